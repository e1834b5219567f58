"""A runner that executes the kernels' own sources on the CPU: compiled as C++ with ``emulation.h``, a fiber for each
thread.

Arrays that kernels write, and those made by :func:`guarded`, lie against a page that cannot be touched, so that an
access past either end is an error and not a lucky guess.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtape.arrays.kernels import variants
from meshtape.arrays.kernels.launch import NAMES, Properties, source

HEADER = Path(__file__).with_name("emulation.h")
COMPILER = shutil.which("g++")
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing"),
    *(
        "-fsanitize=alignment,shift,integer-divide-by-zero,signed-integer-overflow",
        "-fsanitize-undefined-trap-on-error",
    ),
    # The emulation has what it calls at each access: no runtime of the compiler's is linked.
    *("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics"),
)
LINK = (
    "-shared",
    "-nodefaultlibs",
    "-lstdc++",
    "-lm",
    "-lc",
    "-lgcc_s",
)  # not with the header: nothing would be parsed
WHOLE = 80
"""Kernels of a file up to which all are compiled together: another library costs as much as forty of them."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NORESERVE = 0x4000


def guarded(shape: int | Sequence[int], dtype: Any, at: str = "start", like: np.ndarray | None = None) -> np.ndarray:
    """An array between two pages without access. It touches the one before it (``at="start"``, then it is aligned as
    memory of a GPU is) or the one after it (``"end"``: aligned to its elements only). It is full of 0xff bytes (NaN),
    or a copy of ``like``; memory of more than a gigabyte is left as zeros that take no space."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    page = mmap.PAGESIZE
    inner = -(-max(size, 1) // page) * page
    total = inner + 2 * page
    base = _libc.mmap(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no {total} bytes of address space")
    _libc.mprotect(base + page, inner, mmap.PROT_READ | mmap.PROT_WRITE)
    start = base + page + (0 if at == "start" else inner - size)
    raw = (ctypes.c_char * size).from_address(start)
    out = np.frombuffer(raw, np.uint8, size).view(dtype).reshape(shape) if size else np.empty(shape, dtype)
    # The array's memory lives as long as the object that all its views hold.
    weakref.finalize(raw, _libc.munmap, base, total)
    if like is not None:
        out[...] = like
    elif size <= 1 << 30:
        out.reshape(-1).view(np.uint8)[:] = 0xFF
    return out


class Namespace:
    """NumPy, but that what it makes for a kernel to write is guarded."""

    __name__ = "cupy"  # what the code that it stands in for sees
    ndarray = np.ndarray

    def __init__(self, at: str) -> None:
        self._at = at

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray:
        return guarded(shape, dtype, self._at)

    def zeros(self, shape: Any, dtype: Any = float) -> np.ndarray:
        out = self.empty(shape, dtype)
        out[...] = 0
        return out

    def full(self, shape: Any, value: Any, dtype: Any = None) -> np.ndarray:
        out = self.empty(shape, np.result_type(value) if dtype is None else dtype)
        out[...] = value
        return out

    def empty_like(self, x: np.ndarray) -> np.ndarray:
        return self.empty(x.shape, x.dtype)

    def array(self, x: Any, dtype: Any = None, order: str = "K") -> np.ndarray:
        x = np.asarray(x, dtype)  # guarded memory is in C order, which is one of those that "K" allows
        return guarded(x.shape, x.dtype, self._at, x)

    def asnumpy(self, x: np.ndarray) -> np.ndarray:
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class KernelError(RuntimeError):
    """What a launch died of."""


class Emulator:
    """A :class:`~meshtape.arrays.kernels.launch.Runner` without a GPU.

    ``at`` says how what kernels write is aligned, ``descending`` in which order the threads of a block run; with a
    ``seed`` they run in random order, several blocks at once, and races are errors. ``blocks`` limits each launch to
    some blocks of its grid. With a set in ``noted`` it puts there what is launched,
    and runs nothing.
    """

    def __init__(self, cache: Path, at: str = "start", descending: bool = False, seed: int = 0) -> None:
        self.xp = Namespace(at)
        self.cache = cache
        self.descending = descending
        self.seed = seed
        self.device = Properties(multiprocessors=3, shared_memory=227 << 10, capability=90)
        self.blocks: range | None = None
        self.noted: set[tuple[str, str]] | None = None
        self.launched: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = []

    def properties(self) -> Properties:
        return self.device

    def address(self, array: np.ndarray) -> int:
        return int(array.__array_interface__["data"][0])

    def launch(
        self,
        file: str,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        self.launched.append((file, kernel, tuple(grid), tuple(block)))
        if self.noted is not None:
            self.noted.add((file, kernel))
            return
        if not all(n > 0 for n in (*grid, *block)) or block[0] * block[1] * block[2] > 1024:
            raise KernelError(f"{kernel}: a grid of {grid} blocks of {block} threads")
        if max(grid[1:]) > 65535 or grid[0] >= 2**31 or shared > self.device.shared_memory:
            raise KernelError(f"{kernel}: a grid of {grid} blocks, {shared} bytes of shared memory")
        fn, text, parameters = self._function(file, kernel)
        held = [self._argument(a) for a in arguments]
        given = [("p", 8) if isinstance(a, np.ndarray) else (a.dtype.kind, a.itemsize) for a in arguments]
        # An address may come as a number.
        fits = [g == p or (p[0] == "p" and g == ("u", 8)) for g, p in zip(given, parameters, strict=False)]
        if len(given) != len(parameters) or not all(fits):
            raise KernelError(f"{kernel} takes {parameters}, got {given}")
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        count = grid[0] * grid[1] * grid[2]
        part = range(count) if self.blocks is None else self.blocks
        sizes = ctypes.c_uint * 3
        if fn(
            pointers,
            sizes(*grid),
            sizes(*block),
            ctypes.c_size_t(shared),
            ctypes.c_longlong(part.start),
            ctypes.c_longlong(min(part.stop, count)),
            int(self.descending),
            ctypes.c_ulonglong(self.seed),
        ):
            raise KernelError(f"{kernel}: {text().decode()}")

    def _argument(self, a: Any) -> Any:
        if isinstance(a, np.ndarray):
            if not a.flags.c_contiguous:
                raise KernelError("an array with gaps was passed to a kernel")
            return ctypes.c_void_p(self.address(a))
        if not isinstance(a, np.generic):
            raise KernelError(f"a kernel's argument of no exact type: {a!r}")
        return (ctypes.c_char * a.itemsize).from_buffer_copy(a.tobytes())

    def _function(self, file: str, kernel: str) -> tuple[Any, Any, list[tuple[str, int]]]:
        if (file, kernel) not in _LOADED:
            known = [k for f, k in variants() if f == file]
            alike = known if len(known) <= WHOLE else [k for k in known if _like(k) == _like(kernel)]
            compile_kernels(self.cache, {(file, k) for k in (kernel, *alike)})
        return _LOADED[file, kernel]


_LOADED: dict[tuple[str, str], tuple[Any, Any, list[tuple[str, int]]]] = {}


def _like(kernel: str) -> str:
    """The first dtype of a kernel: those of the same one are compiled together where a file has many."""
    return next((a for a in kernel.rstrip(">").partition("<")[2].split(", ") if a in _WORDS), "")


_WORDS = frozenset(NAMES.values())


_NESTED = r"(?:[^()]|\([^()]*\))*"
_BOUNDS = re.compile(rf"__launch_bounds__\(({_NESTED})\)(\s*\w+\s*\({_NESTED}\)\s*\{{)")


def _bounded(m: re.Match[str]) -> str:
    """A kernel that looks at its launch bounds."""
    return f"{m[2]} emulation::bound_threads({m[1]});"


def _digest(text: str) -> str:
    return hashlib.sha256((text + HEADER.read_text() + " ".join(FLAGS + LINK)).encode()).hexdigest()[:32]


def _make(what: Path, arguments: Sequence[Any], name: str) -> None:
    made = what.with_suffix(f".{os.getpid()}")
    done = subprocess.run([COMPILER, *FLAGS, "-o", made, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"{name}:\n{done.stderr[:4000]}")
    made.rename(what)


def _header(cache: Path) -> Path:
    """A folder with the header as the compiler has parsed it, which halves the time of a kernel."""
    folder = cache / f"header-{_digest('')}"
    parsed = folder / f"{HEADER.name}.gch"
    if not parsed.exists():
        folder.mkdir(exist_ok=True)
        shutil.copy(HEADER, folder)
        _make(parsed, ["-x", "c++-header", HEADER], HEADER.name)
    return folder


def compile_kernels(cache: Path, kernels: Iterable[tuple[str, str]]) -> None:
    """Compile and load kernels, those of each file in a namespace of its own, as one library that is kept in ``cache``
    by its text."""
    kernels = sorted(kernels)
    parts: dict[str, str] = {}
    for i, (file, k) in enumerate(kernels):
        parts.setdefault(file, _BOUNDS.sub(_bounded, source(file)))
        parts[file] += f"\nKERNEL({i}, {k})"
    spaces = [f"namespace file_{i} {{\n{part}\n}}" for i, part in enumerate(parts.values())]
    text = "\n".join([f"#include <{HEADER.name}>", *spaces])
    library = cache / f"{_digest(text)}.so"
    if not library.exists():
        unit = cache / f"{library.stem}.{os.getpid()}.cpp"  # other runs may be compiling the same
        unit.write_text(text)
        _make(library, [f"-I{_header(cache)}", unit, *LINK], f"{kernels[0]}, …")
        unit.unlink()
    loaded = ctypes.CDLL(str(library))
    loaded.launch_message.restype = ctypes.c_char_p
    for i, kernel in enumerate(kernels):
        signature, sizes = getattr(loaded, f"signature_{i}"), getattr(loaded, f"sizes_{i}")
        signature.restype, sizes.restype = ctypes.c_char_p, ctypes.POINTER(ctypes.c_ubyte)
        letters = signature().decode()
        parameters = list(zip(letters, sizes()[: len(letters)], strict=True))
        _LOADED[kernel] = getattr(loaded, f"launch_{i}"), loaded.launch_message, parameters


__all__ = ["COMPILER", "Emulator", "KernelError", "compile_kernels", "guarded"]
