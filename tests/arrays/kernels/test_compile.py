"""Every kernel compiles to machine code for every architecture that is promised, on a machine without a GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from meshtape.arrays import kernels
from meshtape.arrays.kernels import launch

ARCHITECTURES = (75, 80, 90, 100)
VARIANTS = sorted(set(kernels.variants()))
FILES = sorted({file for file, _ in VARIANTS})
_USED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S)


@pytest.fixture
def check(machine_code: Callable[..., dict[str, str]]) -> Callable[[str, Sequence[str], int], None]:
    return lambda *args: _check(machine_code, *args)


def _check(machine_code: Callable[..., dict[str, str]], file: str, names: Sequence[str], architecture: int) -> None:
    """All of these kernels compile, and none keeps in memory what belongs in registers."""
    halves = [names[i::2] for i in range(2) if names[i::2]]
    with ThreadPoolExecutor(2) as pool:
        logs = pool.map(lambda half: machine_code(file, half, architecture), halves)
        found = {name: _USED.search(log) for part in logs for name, log in part.items()}
    assert all(found.values()), "the log was not understood"
    for name, m in sorted(found.items()):
        print(f"sm_{architecture} {m[3]:>4} registers  {name}")
    # Float64 is held up by its arithmetic, a sixty-fourth of that of float32 on most devices: some registers may spill there.
    spilled = {n: b for n, m in found.items() if (b := int(m[1]) + int(m[2])) > (300 if "double" in n else 0)}
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
def test_every_dtype_compiles_for_the_oldest_and_some_for_each_architecture(
    file: str, architecture: int, check: Callable[..., None]
) -> None:
    """Of each kernel and its dtypes one geometry, another one for each architecture: all of them for the oldest, which can least, and
    for each of the others a third."""
    at = ARCHITECTURES.index(architecture)
    geometries = [
        names[(i + at * (len(names) // 4 or 1)) % len(names)] for i, names in enumerate(of_file(file).values())
    ]
    check(file, geometries if at == 0 else geometries[(at - 1) % len(geometries) :: 3], architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_every_variant_compiles_for_every_architecture(
    file: str, architecture: int, check: Callable[..., None]
) -> None:
    check(file, [n for f, n in VARIANTS if f == file], architecture)


def test_sources_need_no_header_of_a_toolkit() -> None:
    for file in FILES:
        assert "#include" not in launch.source(file), file


def test_names_are_those_of_the_dtypes() -> None:
    for dtype in launch.NAMES:
        assert np.dtype(dtype).itemsize in (1, 2, 4, 8)
    assert launch.named("k", np.dtype(np.float16), False, 3) == "k<float16, false, 3>"
