"""Every kernel compiles to machine code for every architecture that is promised, on a machine without a GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from meshtape.arrays import kernels
from meshtape.arrays.kernels import launch

try:
    from cupy.cuda import nvrtc

    nvrtc.getVersion()
except (ImportError, RuntimeError) as e:
    nvrtc, REASON = None, f"NVRTC is not there: {e}"
else:
    REASON = ""

ARCHITECTURES = (75, 80, 90, 100)
VARIANTS = sorted(set(kernels.variants()))
FILES = sorted({file for file, _ in VARIANTS})
_ENTRY = re.compile(
    r"Compiling entry function '(\S+)' for .*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)

pytestmark = pytest.mark.skipif(nvrtc is None, reason=REASON)


def compiled(file: str, names: Sequence[str], architecture: int) -> dict[str, tuple[int, int]]:
    """Registers and bytes of spills of each kernel; raises with the compiler's log."""
    program = nvrtc.createProgram(launch.source(file), file, (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (f"-arch=sm_{architecture}", *launch.OPTIONS, "--ptxas-options=-v"))
        except nvrtc.NVRTCError:
            raise AssertionError(nvrtc.getProgramLog(program)[:4000]) from None
        assert nvrtc.getCUBIN(program)
        log = nvrtc.getProgramLog(program)
        mangled = {nvrtc.getLoweredName(program, name): name for name in names}
    finally:
        nvrtc.destroyProgram(program)
    return {mangled[m[1]]: (int(m[4]), int(m[2]) + int(m[3])) for m in _ENTRY.finditer(log) if m[1] in mangled}


def check(file: str, names: Sequence[str], architecture: int) -> None:
    halves = [names[i::2] for i in range(2) if names[i::2]]
    with ThreadPoolExecutor(2) as pool:
        found = {k: v for part in pool.map(lambda h: compiled(file, h, architecture), halves) for k, v in part.items()}
    assert set(found) == set(names), "the log was not understood"
    for name, (registers, _) in sorted(found.items()):
        print(f"sm_{architecture} {registers:4} registers  {name}")
    # Float64 is held up by its arithmetic, a sixty-fourth of that of float32 on most devices: some registers may spill there.
    spilled = {name: spills for name, (_, spills) in found.items() if spills > (300 if "double" in name else 0)}
    assert not spilled, f"registers are spilled to memory on sm_{architecture}: {spilled}"


def of_file(file: str) -> dict[tuple[str, ...], list[str]]:
    """The variants of a file by kernel and dtypes."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    words = set(launch.NAMES.values())
    for f, name in VARIANTS:
        if f == file:
            kernel, _, arguments = name.rstrip(">").partition("<")
            groups[kernel, *(a for a in arguments.split(", ") if a in words)].append(name)
    return groups


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_every_dtype_compiles_for_every_architecture(file: str, architecture: int) -> None:
    """Of each kernel and its dtypes one geometry, another one for each architecture."""
    at = ARCHITECTURES.index(architecture)
    check(
        file,
        [names[(i + at * (len(names) // 4 or 1)) % len(names)] for i, names in enumerate(of_file(file).values())],
        architecture,
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_every_variant_compiles_for_every_architecture(file: str, architecture: int) -> None:
    check(file, [n for f, n in VARIANTS if f == file], architecture)


def test_sources_need_no_header_of_a_toolkit() -> None:
    for file in FILES:
        assert "#include" not in launch.source(file), file


def test_names_are_those_of_the_dtypes() -> None:
    for dtype in launch.NAMES:
        assert np.dtype(dtype).itemsize in (1, 2, 4, 8)
    assert launch.named("k", np.dtype(np.float16), False, 3) == "k<float16, false, 3>"
