"""What the tests of the kernels share: the emulator, and a comparison with float64."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshtape.arrays.kernels import launch
from meshtape.arrays.kernels.launch import running_on


def _module() -> ModuleType:
    # A neighbour of this file, which the importlib mode of pytest does not put on the path.
    name = "kernel_emulator"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("emulator.py"))
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def emulation() -> ModuleType:
    """The module ``emulator``; a test that asks for it is skipped where there is no C++ compiler."""
    module = _module()
    if module.COMPILER is None:
        pytest.skip("no g++ to compile the kernels with")
    return module


@pytest.fixture(scope="session")
def library_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept: from run to run, unless pytest keeps nothing."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("kernels") if cache is None else Path(cache.mkdir("kernels"))


_USED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S)
_ACCESS = re.compile(r"(?:ld|st)\.global(?:\.nc)?\.(?:v(\d)\.)?[a-z](\d+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (\d+)[,;]")
_IN_MEMORY = re.compile(r"\b(ld|st)\.local|[1-9]\d* bytes stack frame")


class Figures(NamedTuple):
    """Of a kernel's code: registers of a thread, accesses of 16 bytes (asynchronous copies, too), narrower ones, bytes
    that are spilled, and whether an array is kept in memory, as its index is known only while it runs."""

    registers: int
    wide: int
    narrow: int
    spilled: int
    in_memory: bool

    def over(self, most: int, least: int, narrow: int) -> str:
        """Where they leave a budget: registers at most, accesses of 16 bytes at least, narrower ones at most."""
        out = f"{self.registers} {self.wide} {self.narrow}, the budget is {most} {least} {narrow}"
        within = self.registers <= most and self.wide >= least and self.narrow <= narrow
        return "an array is kept in memory" if self.in_memory else "" if within else out


class MachineCode:
    """What NVRTC makes of kernels, each of which it compiles once."""

    def __init__(self, nvrtc: Any) -> None:
        self._nvrtc = nvrtc
        self._found: dict[tuple[str, str, str], str] = {}

    def __call__(self, file: str, names: Sequence[str], architecture: int, binary: bool = True) -> dict[str, str]:
        """For each kernel what the assembler logged of it, and then its PTX; or the PTX alone, which takes a fraction
        of the time, as that is the assembler's."""
        target = f"{'sm' if binary else 'compute'}_{architecture}"
        if missing := [name for name in names if (file, name, target) not in self._found]:
            made = self._compiled(file, missing, target, binary)
            self._found.update({(file, name, target): text for name, text in made.items()})
        return {name: self._found[file, name, target] for name in names}

    @staticmethod
    def figures(text: str) -> Figures:
        """Of what a call gave for a kernel."""
        used = _USED.search(text)
        assert used, "the log was not understood"
        sizes = [int(n or 1) * int(b) // 8 for n, b in _ACCESS.findall(text)]
        sizes += map(int, _COPY.findall(text))
        wide = sum(s >= 16 for s in sizes)
        spilled = int(used[1]) + int(used[2])
        return Figures(int(used[3]), wide, len(sizes) - wide, spilled, bool(_IN_MEMORY.search(text)))

    def _compiled(self, file: str, names: Sequence[str], target: str, binary: bool) -> dict[str, str]:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(launch.source(file), file, (), ())
        try:
            for name in names:
                nvrtc.addNameExpression(program, name)
            options = (f"-arch={target}", *launch.OPTIONS, *(("--ptxas-options=-v",) if binary else ()))
            try:
                nvrtc.compileProgram(program, options)
            except nvrtc.NVRTCError:
                raise AssertionError(nvrtc.getProgramLog(program)[:4000]) from None
            assert not binary or nvrtc.getCUBIN(program)
            parts = nvrtc.getProgramLog(program).split("Compiling entry function '")[1:]
            logs = {mangled: log for mangled, _, log in (p.partition("'") for p in parts)}
            ptx = nvrtc.getPTX(program)
            bodies = dict(
                re.findall(
                    r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", ptx.decode() if isinstance(ptx, bytes) else ptx, re.DOTALL
                )
            )
            mangled = {name: nvrtc.getLoweredName(program, name) for name in names}
            return {name: logs.get(m, "") + bodies[m] for name, m in mangled.items()}
        finally:
            nvrtc.destroyProgram(program)


@pytest.fixture(scope="session")
def machine_code() -> MachineCode:
    """``machine_code(file, names, architecture)``: what the compiler of CUDA says, on a machine without a GPU."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as e:
        pytest.skip(f"NVRTC is not there: {e}")
    return MachineCode(nvrtc)


ORDERS = {
    "aligned, ascending": ("start", False, 0),
    "unaligned, random": ("end", False, 1),
    "unaligned, descending": ("end", True, 0),
    **{f"random {seed}": ("start", False, seed) for seed in range(2, 6)},
}


FIRST = tuple(ORDERS)[:2]
NOTED = "MESHTAPE_NOTED_KERNELS"
"""The environment's word for a file: the tests of the emulator, in the first two orders, only write to it what they
would launch (``test_coverage.py``)."""


@contextlib.contextmanager
def _noting() -> Iterator[pytest.MonkeyPatch]:
    """While launches are only noted nothing is written to results: comparisons of them say nothing."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        for name in ("assert_allclose", "assert_array_equal"):
            patch.setattr(np.testing, name, lambda *args, **kwargs: None)
        # Nor does pytest explain what differs: where CI is set, of bytes that takes it minutes.
        patch.setattr("_pytest.assertion.util._reprcompare", None)
        with contextlib.suppress(Exception, pytest.skip.Exception):
            yield patch


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    if NOTED not in os.environ:
        return (yield)
    with _noting():
        yield
    return True


@pytest.hookimpl(tryfirst=True)  # before long runs are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cases of a test run in one of the first two orders, in turns, and a test of less than four cases in both.
    All others are long runs."""
    if NOTED in os.environ:
        of_emulator = [i for i in items if "emulator" in getattr(i, "fixturenames", ())]
        items[:] = [i for i in of_emulator if i.callspec.params["emulator"] in FIRST]
    cases: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if "emulator" in getattr(item, "fixturenames", ()):
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        by_rest: dict[str, list[pytest.Function]] = defaultdict(list)
        for item in of_test:
            by_rest[str({n: i for n, i in item.callspec.indices.items() if n != "emulator"})].append(item)
        for i, orders in enumerate(by_rest.values()):
            wanted = FIRST if len(by_rest) < 4 else FIRST[i % 2 : i % 2 + 1]
            for item in orders:
                if item.callspec.params["emulator"] not in wanted:
                    item.add_marker(pytest.mark.slow)


@pytest.fixture(params=ORDERS)
def emulator(request: pytest.FixtureRequest, emulation: ModuleType, library_cache: Path) -> Iterator[Any]:
    """Kernels run on the CPU while the test does: with memory as a GPU has it and threads in ascending order, or with
    results that are aligned to their elements only, threads and blocks in random order and races found; in slow runs
    in all orders."""
    runner = emulation.Emulator(library_cache, *ORDERS[request.param])
    runner.noted = set() if NOTED in os.environ else None
    with running_on(runner):
        yield runner
    if NOTED in os.environ:
        slow = int(request.node.get_closest_marker("slow") is not None)
        with Path(os.environ[NOTED]).open("a") as noted:
            noted.writelines(f"{slow}|{file}|{kernel}\n" for file, kernel in runner.noted)


@pytest.fixture
def place(emulator: Any) -> Callable[..., np.ndarray]:
    """``place(values, dtype)``: an array between pages without access."""
    return emulator.xp.array


@pytest.fixture(scope="module")
def compiled_together(request: pytest.FixtureRequest, emulation: ModuleType, library_cache: Path) -> None:
    """All kernels of a file of tests in one library: most of the time of a small one goes to what all have in common.
    The tests are called once with emulators that only note what is launched."""
    noted: set[tuple[str, str]] = set()
    for item in () if NOTED in os.environ else request.session.items:
        if item.path != request.path or "emulator" not in item.fixturenames or any(item.iter_markers("skip")):
            continue
        given = dict(item.callspec.params)
        runner = emulation.Emulator(library_cache, *ORDERS[given.pop("emulator")])
        runner.noted = noted
        with _noting() as patch, running_on(runner):
            given |= {"emulator": runner, "place": runner.xp.array, "monkeypatch": patch, "emulation": emulation}
            given["close"] = lambda *args, **kwargs: None
            names = item._fixtureinfo.argnames
            item.obj(**{n: given[n] if n in given else request.getfixturevalue(n) for n in names})
    if noted:
        emulation.compile_kernels(library_cache, noted)


TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    """``close(got, expected)``: to the precision of the dtype of ``got``, relative to the largest element."""

    def check(got: np.ndarray, expected: Any, *, factor: float = 1.0) -> None:
        wide, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        assert wide.shape == expected.shape
        scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
        np.testing.assert_allclose(wide, expected, rtol=0, atol=factor * TOLERANCE[got.dtype.name] * scale)

    return check if NOTED not in os.environ else lambda *args, **kwargs: None
