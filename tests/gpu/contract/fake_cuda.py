"""Real CuPy on a machine without a GPU: import this module before ``cupy``.

CuPy's own code, dtype rules, refusals, streams and pools are as they are; the driver, the runtime and the libraries
under it are made here by gcc. Device memory is host memory, new memory is zeros, kernels do nothing, solvers succeed.
Every launch, copy, allocation and wait is noted. The runtime is linked into some of CuPy's modules: its functions there
are overwritten, when they are loaded, by jumps to the fake ones. Since the process is changed so, the contract runs in
processes of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
BUILD = "MESHTAPE_FAKE_CUDA"
"""The environment's word for the folder that :func:`build` filled."""
VALUES = "MESHTAPE_FAKE_VALUES"
"""The environment's word for the folder of compiled kernels, where they are to compute."""

LIBRARIES = {
    "libcublas.so.13": "cupy_backends/cuda/libs/cublas",
    "libcublasLt.so.13": None,
    "libcudnn.so.9": None,
    "libcusolver.so.12": "cupy_backends/cuda/libs/cusolver",
    "libcusparse.so.12": "cupy_backends/cuda/libs/cusparse",
    "libcufft.so.12": "cupy/cuda/cufft",
    "libcurand.so.10": "cupy_backends/cuda/libs/curand",
}
"""Each library, and the module of CuPy that asks for its functions, if one does."""

CONVOLUTIONS = ("Forward", "BackwardData", "BackwardFilter")

# CuPy finds these by name, so that no module asks for them; cuBLASLt and cuDNN are this package's own.
MORE = {
    "libcusolver.so.12": ("cusolverDnXgeev", "cusolverDnXgeev_bufferSize"),
    "libcublasLt.so.13": (
        *("cublasLtGetVersion", "cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute"),
        *("cublasLtMatmulDescDestroy", "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutSetAttribute"),
        *("cublasLtMatrixLayoutDestroy", "cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceSetAttribute"),
        *("cublasLtMatmulPreferenceDestroy", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"),
    ),
    "libcudnn.so.9": (
        *("cudnnGetVersion", "cudnnGetErrorString", "cudnnCreate", "cudnnSetStream"),
        *(f"cudnn{do}{kind}Descriptor" for kind in ("Tensor", "Filter", "Convolution") for do in ("Create", "Destroy")),
        *(f"cudnnSet{kind}NdDescriptor" for kind in ("Tensor", "Filter", "Convolution")),
        *("cudnnSetConvolutionGroupCount", "cudnnSetConvolutionMathType"),
        *(f"cudnnGetConvolution{kind}Algorithm_v7" for kind in CONVOLUTIONS),
        *(f"cudnnConvolution{kind}" for kind in CONVOLUTIONS),
        "cudnnBackendExecute",
    ),
}

WITH_A_RUNTIME = ("cupy_backends.cuda.api.runtime", "cupy.cuda.thrust", "cupy.cuda.cub", "cupy.random._generator_api")
"""Modules of CuPy that the runtime is linked into, but for ``cupy.cuda.jitify``, which nothing loads."""

# What a function writes beside its result: "i" an int, "u" a size or a handle, at which argument, and what. (Name
# without the letter of the type.)
WRITES = {
    r"cublasGet(Math|Pointer)Mode(_v2)?": "i1=0",
    r"(?!cublasLt)\w+Version(_v2)?": "i0=13020",
    r"cudnnCreate\w+": "u0=119",
    r"cudnnGetConvolution\w+Algorithm_v7": "i6=1",
    r"cublasLt\w*Create": "u0=119",
    r"cublasLtMatmulAlgoGetHeuristic": "i9=1",
    r"cusolverGetProperty": "i1=12",
    r"cublasgetrsBatched": "i9=0",
    r"cufftCreate": "i0=5",
    r"cufftMakePlan1d": "u4=0",
    r"cufftMakePlanMany": "u11=0",
    r"cufftXtMakePlanMany": "u12=0",
    r"cusolverDn(gebrd|gesvd)_bufferSize": "i3=16",
    r"cusolverDnsytrf_bufferSize": "i4=16",
    r"cusolverDn(geqrf|getrf|potrf)_bufferSize": "i5=16",
    r"cusolverDn(syevd|heevd|syevjBatched|heevjBatched|syevj|heevj|orgqr|ungqr)_bufferSize": "i7=16",
    r"cusolverDn(gels|gesv|gesvdjBatched|ormqr|unmqr)_bufferSize": "i11=16",
    r"cusolverDngesvdj_bufferSize": "i12=16",
    r"cusolverDngesvdaStridedBatched_bufferSize": "i16=16",
    r"cusolverDnXsyevd_bufferSize": "u11=16 u12=16",
    r"cusolverDnXgeev_bufferSize": "u17=16 u18=16",
}
_QUIET = re.compile(r"\w*(bufferSize|Create|Destroy|Get|Set|Version|Plan|WorkArea|AutoAllocation)\w*")


def beside(name: str) -> Any:
    """A module of this folder, which is not on the path."""
    spec = spec_from_file_location(f"contract_{name}", HERE / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing() -> str | None:
    """Why there is no fake CUDA here; None where there is one."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "CuPy's modules are changed for Linux on x86-64 alone"
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            return f"no {tool} to make a CUDA runtime with"
    try:
        version = metadata.version("cupy-cuda13x")
    except metadata.PackageNotFoundError:
        return "cupy-cuda13x is not installed: the dependency group cuda-check has it"
    return None if version.startswith("14.2.") else f"written for CuPy 14.2 for CUDA 13, here is {version}"


def site(path: str) -> str:
    """A module of CuPy by its path without the ending."""
    root = Path(find_spec("cupy_backends").submodule_search_locations[0]).parent
    return str(next(root.glob(f"{path}.*.so")))


def symbols(path: str, *options: str) -> list[tuple[int, str]]:
    """Addresses (0 where there is none) and names of symbols of a file."""
    lines = subprocess.run(["nm", *options, path], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [re.fullmatch(r"([0-9a-f]*) +[TtU] (\w+)(@\S+)?", line) for line in lines]
    return [(int(m[1] or "0", 16), m[2]) for m in found if m]


def _entry(name: str) -> str:
    """The C source of a library's function."""
    if name == "cublasLtGetVersion":
        return f"u {name}(void) {{ return 130200; }}"
    if name == "cudnnGetVersion":
        return f"u {name}(void) {{ return 92801; }}"
    if name == "cudnnGetErrorString":
        return f'const char *{name}(int status) {{ return "an error of the fake cuDNN"; }}'
    if re.fullmatch(r"(cublas(?!Lt)|cudnn|curand|cusolver|cusparse)\w*Create(_v2|Generator|Params|\w+Info)?", name):
        # A handle points at its stream.
        return f"int {name}(u *handle) {{ *handle = (u)calloc(1, 8); return 0; }}"
    if name == "cufftSetStream":  # of plans, which are numbers
        return f"int {name}(int plan, u stream) {{ of_plan = stream; return 0; }}"
    if "SetStream" in name:
        return f"int {name}(u *handle, u stream) {{ *handle = stream; return 0; }}"
    plain = re.sub(r"^(cublas|cusolverDn)[SDCZ][SDCZHXYK]?(?=[a-z])", r"\1", name)
    words = ", ".join(f"a{i}" for i in range(24))
    stream = "of_plan" if name.startswith("cufft") else "*(u*)a0"
    lines = [] if _QUIET.fullmatch(name) else [f'note("{name}", {stream}, 0);']
    if name == "cublasLtMatmul":
        lines = [f'note("{name}", a15, 0); if (captured(a15)) return keep_call("cublasLt", "", a15, (u[]){{{words}}});']
    if name.startswith(("cudnnConvolution", "cudnnBackend")):
        keep = f'return keep_call("cudnn", "{name.removeprefix("cudnn")}", *(u*)a0, (u[]){{{words}}});'
        lines = [f'note("{name}", *(u*)a0, 0); if (captured(*(u*)a0)) {keep}']
    lines.append(f'u a[] = {{{words}}}; int done = library ? library("{name}", a) : -1; if (done >= 0) return done;')
    if name.endswith("Algorithm_v7"):  # ALGO_1, deterministic, by additions of products alone
        lines.append("((int *)a7)[0] = ((int *)a7)[6] = 1; ((int *)a7)[7] = 3;")
    for pattern, writes in WRITES.items():
        if re.fullmatch(pattern, plain):
            for kind, at, value in re.findall(r"([iu])(\d+)=(\d+)", writes):
                at = "1" if name in ("cusparseGetVersion", "cublasGetVersion_v2") else at
                lines.append(f"*({'int' if kind == 'i' else 'u'}*)a{at} = {value};")
    arguments = ", ".join(f"u a{i}" for i in range(24))
    return f"int {name}({arguments}) {{ {' '.join(lines)} return 0; }}"


def build(folder: Path) -> None:
    """Make the driver, the runtime and the libraries in ``folder``."""

    def compiled(target: str, source: Path, *options: str) -> None:
        command = [
            "gcc",
            "-O1",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{target}",
            *options,
            "-o",
            folder / target,
            source,
        ]
        subprocess.run(command, check=True)

    compiled("libcuda.so.1", HERE / "runtime.c")
    for target, module in LIBRARIES.items():
        prefix = target.removeprefix("lib").partition(".")[0]
        asked = symbols(site(module), "-D", "--undefined-only") if module is not None else ()
        names = sorted({n for _, n in asked if n.startswith(prefix)})
        names += MORE.get(target, ())
        source = folder / f"{prefix}.c"
        head = (
            "#include <stdint.h>\ntypedef uint64_t u;\nvoid note(const char *, u, u);\nextern int (*library)(const "
            "char *, u *);\nint captured(u), keep_call(const char *, const char *, u, u *);\nvoid *calloc(u, u);\n"
            "static u of_plan;\n"
        )
        source.write_text(head + "\n".join(map(_entry, names)) + "\n")
        versions = folder / f"{prefix}.map"
        versions.write_text(f"{target} {{ global: *; }};\n")
        compiled(target, source, f"-Wl,--version-script={versions}")


def answer(folder: Path, name: str, argument: str = "") -> Any:
    """What a sweep answers, run in a process of its own over the fake that :func:`build` made in ``folder``."""
    env = {k: v for k, v in os.environ.items() if k not in (VALUES, "MESHTAPE_EMULATED_GPU")}
    env |= {BUILD: str(folder), "CUPY_CACHE_DIR": str(folder / "cupy")}
    command = [sys.executable, str(HERE / "sweeps.py"), name, argument]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, check=False)
    if done.returncode:
        raise RuntimeError(f"the sweep {name} did not end: rc {done.returncode}: {done.stderr[-3000:]}")
    return json.loads(done.stdout)


# ----- the process that runs CuPy -------------------------------------------------------------------------------------

RENAMED = {
    "cudaLaunchKernel": "launch",
    "__cudaLaunchKernel": "launch",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": "occupancy",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": "occupancy",
}
# Beside the functions of the runtime itself, these of the code that nvcc makes for a launch.
OF_LAUNCHES = {"__cudaPushCallConfiguration", "__cudaPopCallConfiguration", "__cudaLaunchKernel", "__cudaGetKernel"}


def redirect(driver: ctypes.CDLL, path: str) -> dict[str, bool]:
    """Let the runtime's functions in a loaded module jump to the fake ones: whether each has one, or else does
    nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.path.realpath(path)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    ends = [(*(int(end, 16) for end in m[0].split("-")), m[1]) for m in mapped]
    base = min(start for start, _, _ in ends)
    for start, end, access in ends:
        if "x" in access and libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 7):
            raise OSError(ctypes.get_errno(), "mprotect")
    done = {}
    for at, name in symbols(path):
        if not at or not (re.match(r"cuda[A-Z]", name) or name in OF_LAUNCHES):
            continue
        fake = getattr(driver, f"fake_{RENAMED.get(name, name)}", None)
        target = ctypes.cast(driver.fake_nothing if fake is None else fake, ctypes.c_void_p).value
        # mov rax, target; jmp rax
        ctypes.memmove(base + at, b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0", 12)
        done[name] = fake is not None
    return done


class _Call(ctypes.Structure):
    _fields_ = (("what", ctypes.c_char_p), ("stream", ctypes.c_uint64), ("size", ctypes.c_uint64))


class FakeCuda:
    """The fake under CuPy in this process, which imports CuPy. With values, kernels and libraries compute them."""

    def __init__(self) -> None:
        folder = Path(os.environ[BUILD])
        cache = os.environ.get(VALUES)
        loaded = {n: ctypes.CDLL(str(folder / n), ctypes.RTLD_GLOBAL) for n in ("libcuda.so.1", *LIBRARIES)}
        self._driver = loaded.pop("libcuda.so.1")
        self._calls = (_Call * (1 << 16)).in_dll(self._driver, "calls")
        self._called = ctypes.c_uint64.in_dll(self._driver, "called")

        import cuda.pathfinder as pathfinder

        found = {Path(n.partition(".")[0]).name.removeprefix("lib"): lib for n, lib in loaded.items()}
        theirs = pathfinder.load_nvidia_dynamic_lib
        pathfinder.load_nvidia_dynamic_lib = lambda name: (
            SimpleNamespace(_handle_uint=found[name]._handle, abs_path=found[name]._name)
            if name in found
            else theirs(name)
        )
        import cupy_backends.cuda.api.runtime as runtime

        self.redirected = {runtime.__name__: redirect(self._driver, runtime.__file__)}
        import cupy
        import cupy.cuda.compiler as compiler
        from cupy.cuda import thrust

        self.arguments = beside("arguments")
        for name in WITH_A_RUNTIME[1:]:
            self.redirected[name] = redirect(self._driver, __import__(name, fromlist=["x"]).__file__)

        def sorted_by_thrust(*args: Any, **kwargs: Any) -> None:
            self._driver.note(b"launch", ctypes.c_uint64(cupy.cuda.get_current_stream().ptr), ctypes.c_uint64(0))

        self.kernels, self.libraries = None, None
        if cache is not None:
            cupy._core.set_routine_accelerators([])  # their code is in CuPy's wheel
            cupy._core.set_reduction_accelerators([])
            self.kernels, self.libraries = beside("kernels").Kernels(Path(cache)), beside("libraries")
            self.products = beside("cublaslt")
            self.convolutions = beside("cudnn")
            for answered in (self.products, self.convolutions):
                self.libraries.ANSWERS.update(answered.answers(self.libraries))
            self._answer = self.libraries.Answer(self.libraries.answer)
            hook = ctypes.c_void_p.in_dll(self._driver, "library")
            hook.value = ctypes.cast(self._answer, ctypes.c_void_p).value
            atexit.register(setattr, hook, "value", None)  # handles are destroyed after that
        for name in ("sort", "lexsort", "argsort"):  # thrust waits for what its kernels count

            def sorting(*args: Any, name: str = name, **kwargs: Any) -> None:
                sorted_by_thrust()
                if self.libraries is not None:
                    getattr(self.libraries, name)(*args)

            setattr(thrust, name, sorting)
        self.sources: set[tuple[str, tuple[str, ...]]] = set()
        self.asked: set[tuple[str, tuple[str, ...]]] = set()

        def compiled(source: str, options: Any, *args: Any, name_expressions: Any = None, **kwargs: Any) -> Any:
            # The compiler crashes in a process that is changed so.
            names = tuple(name_expressions or ())
            self.sources.add((source, tuple(options)))
            self.asked.add((source, names))
            module = self.arguments.Module(source, names)
            module.load(b"nothing" if self.kernels is None else self.kernels.module((source, names)))
            if names:
                module._set_mapping({n: f"t{i}" for i, n in enumerate(names)})
            return module

        compiler._compile_module_with_cache = compiled
        self.cupy = cupy
        self.use_pool(False)

    def use_pool(self, pool: bool) -> None:
        """Whether memory comes from CuPy's pool; without it all memory is new, and so the results of kernels are
        zeros."""
        self.cupy.cuda.set_allocator(self.cupy.get_default_memory_pool().malloc if pool else None)

    @contextmanager
    def calls(self) -> Iterator[list[tuple[str, int, int]]]:
        """The calls of a block, in order, once it has ended: what, its stream, and its size."""
        out: list[tuple[str, int, int]] = []
        first = self._called.value
        try:
            yield out
        finally:
            last = self._called.value
            assert last - first <= len(self._calls), "more calls than are kept"
            for i in range(first, last):
                c = self._calls[i % len(self._calls)]
                out.append((c.what.decode(), c.stream, c.size))

    @contextmanager
    def free_memory(self, size: int) -> Iterator[None]:
        """So many bytes of the current device are free, beside those that are in use."""
        limit = ctypes.c_uint64.in_dll(self._driver, "limit")
        before, free = limit.value, self.cupy.cuda.runtime.memGetInfo()[0]
        limit.value = before - free + size
        try:
            yield
        finally:
            limit.value = before

    @contextmanager
    def memory_of(self, byte: int) -> Iterator[None]:
        """New memory is full of this byte, and so is each result of a kernel: with 1, every truth is true."""
        fill = ctypes.c_int.in_dll(self._driver, "fill")
        fill.value = byte
        try:
            yield
        finally:
            fill.value = 0


def counts(calls: list[tuple[str, int, int]]) -> Counter[str]:
    """How many of each kind: launches (those of libraries too), fills of memory, which are among these, copies to the
    host and from it, waits."""
    plain = {"launch", "graph", "h2d", "d2h", "d2d", "wait", "malloc", "order", "record"}
    found = Counter(what if what in plain else "launch" for what, _, _ in calls)
    found["memset"] = sum(what == "memset" for what, _, _ in calls)
    return found


def cost(n: Counter[str]) -> str:
    """What is counted, as the budgets write it: launches, and what is not zero of copies, fills and waits."""
    others = {"up": "h2d", "down": "d2h", "copy": "d2d", "fill": "memset", "wait": "wait"}
    launches = n["launch"] + n["graph"]
    return " ".join([str(launches), *(f"{n[kind]}{word}" for word, kind in others.items() if n[kind])])
