"""The emulation of CUDA notices what a GPU would punish: what it lets through can be believed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meshtape.arrays.kernels import launch

SOURCES = {
    "sum": """
        template <int N> __global__ void k(const float* x, float* y) {
            SHARED(float, s, 64);
            s[threadIdx.x] = x[threadIdx.x];
            %s
            if (threadIdx.x == 0 || threadIdx.x == 63) { float t = 0; for (int i = 0; i < 64; ++i) t += s[i]; y[threadIdx.x != 0] = t; }
        }""",
    "warp": """
        template <int N> __global__ void k(const float* x, float* y) {
            float v = x[threadIdx.x];
            for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(WHOLE_WARP, v, o);
            %s
            if (threadIdx.x %% 32 == 0) y[threadIdx.x / 32] = v;
        }""",
    "touch": "template <int N> __global__ void k(const float* x, float* y) { %s }",
    "bounded": "template <int N> __global__ void __launch_bounds__(N * 32, 2) k(const float* x, float* y) { %s }",
}


SOUND = (("sum", "__syncthreads();"), ("sum", ""), ("warp", ""))
MISTAKES = (
    ("sum", "if (threadIdx.x < 32) __syncthreads();", "some threads never reach|have returned"),
    ("warp", "if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(WHOLE_WARP, v, 1);", "never reach|have returned"),
    ("warp", "v += __shfl_xor_sync(0xffffu, v, 1);", r"without the whole warp in thread \(\d+, 0, 0\)"),
    ("touch", "y[2] = x[0];", "illegal memory access"),
    ("touch", "y[0] = x[-1];", "illegal memory access"),
    ("touch", "y[0] = x[64];", "illegal memory access"),
    ("bounded", "", "more threads than the launch bounds in thread"),
    ("touch", "y[0] = reinterpret_cast<const Vector<float, 4>*>(x + 1)->at[0];", "misaligned"),
)


@pytest.fixture(scope="module")
def compiled(emulation: ModuleType, library_cache: Path) -> dict[tuple[str, str], str]:
    """The sources with each line put in, under the names that one library has them by."""
    files = {(which, line): f"{which} {line}" for which, line, *_ in (*SOUND, *MISTAKES)}
    texts = {file: launch.source("headers/types.cuh") + SOURCES[which] % line for (which, line), file in files.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "source", texts.__getitem__)
        emulation.compile_kernels(library_cache, {(file, "k<1>") for file in texts})
    return files


@pytest.fixture
def run(emulation: ModuleType, library_cache: Path, compiled: dict[tuple[str, str], str]) -> Any:
    """Runs one of the sources, with a line put in, over 64 numbers in either order of the threads."""

    def go(which: str, line: str, descending: bool, at: str = "start") -> np.ndarray:
        e = emulation.Emulator(library_cache, at, descending)
        x = emulation.guarded(64, np.float32, at, np.arange(64, dtype=np.float32))
        y = emulation.guarded(2, np.float32, at)
        e.launch(compiled[which, line], "k<1>", (1, 1, 1), (64, 1, 1), (x, y))
        return y

    return go


@pytest.mark.parametrize("descending", [False, True])
def test_barriers_and_shuffles(run: Any, descending: bool) -> None:
    assert run("sum", "__syncthreads();", descending).tolist() == [2016, 2016]
    assert run("warp", "", descending).tolist() == [496, 1520]


def test_a_missing_barrier_shows_in_both_orders(run: Any) -> None:
    for descending in (False, True):
        assert np.isnan(run("sum", "", descending)).any()


@pytest.mark.parametrize(("which", "line", "says"), MISTAKES)
def test_mistakes_are_errors(run: Any, emulation: ModuleType, which: str, line: str, says: str) -> None:
    at = "end" if "[2]" in line or "[64]" in line else "start"
    with pytest.raises(emulation.KernelError, match=says):
        run(which, line, False, at)
    assert run("warp", "", False).tolist() == [496, 1520]  # and the next launch is sound


SPEAK = "SHARED(float, s, 64); s[threadIdx.x] = x[threadIdx.x]; "
COUNT = "unsigned* n = reinterpret_cast<unsigned*>(y); "
ANOTHER = "a race with thread [0-9]+ of its block, which is another one"
RACES = {
    # Kernels of 5 blocks of 64 threads, and what is wrong with them.
    SPEAK + "if (s[threadIdx.x ^ 1] < 0) y[0] = 1;": "a race with thread [0-9]+ of its block in",
    SPEAK + "__syncwarp(); if (s[threadIdx.x ^ 1] < 0) y[0] = 1;": None,
    SPEAK + "__syncwarp(); if (s[threadIdx.x ^ 32] < 0) y[0] = 1;": "a race with thread",
    SPEAK + "__syncthreads(); if (s[63 - threadIdx.x] < 0) y[0] = 1;": None,
    SPEAK + "if (s[threadIdx.x] < 0) y[0] = 1;": None,
    "y[0] += x[threadIdx.x];": "a race with thread",
    "if (threadIdx.x == 0) y[0] += 1;": ANOTHER,
    "if (threadIdx.x == 0) y[blockIdx.x % 2] = x[blockIdx.x];": ANOTHER,
    "if (threadIdx.x == 0 && blockIdx.x < 2) y[blockIdx.x] = x[0];": None,
    "if (y[0] > 2 || (threadIdx.x == 0 && blockIdx.x == 1)) y[0] = 1;": "a race with thread",
    COUNT + "atomicAdd(n, 1u); if (threadIdx.x == 5) y[1] = n[0];": "a race with thread",
    COUNT + "atomicAdd(n, 1u);": None,
    COUNT + "unsigned v = atomicAdd(n, 0u); atomicMax(n, v + 1);": None,  # a gap between the two, in which others come
}


@pytest.fixture
def meet(emulation: ModuleType, library_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs one of these, by its place, in a random order."""
    chain = " else ".join(f"if constexpr (N == {i}) {{ {body} }}" for i, body in enumerate(RACES))
    text = f"{launch.source('headers/types.cuh')}template <int N> __global__ void k(const float* x, float* y) {{ {chain} }}"
    monkeypatch.setattr(emulation, "source", lambda _: text)
    monkeypatch.setattr(emulation, "variants", lambda: [("races", f"k<{i}>") for i in range(len(RACES))])

    def go(number: int, seed: int) -> np.ndarray:
        x = emulation.guarded(64, np.float32, "start", np.arange(64, dtype=np.float32))
        y = emulation.guarded(2, np.float32, "start", np.zeros(2, np.float32))
        emulation.Emulator(library_cache, seed=seed).launch("races", f"k<{number}>", (5, 1, 1), (64, 1, 1), (x, y))
        return y.view(np.uint32)

    return go


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 20))])
def test_races_are_errors(meet: Any, emulation: ModuleType, seed: int) -> None:
    for number, says in enumerate(RACES.values()):
        if says is None:
            meet(number, seed)
        else:
            with pytest.raises(emulation.KernelError, match=says):
                meet(number, seed)


def test_atomic_operations_meet_others(meet: Any) -> None:
    """Each alone is whole; into a gap between two of them others come, and what they did is lost."""
    whole, gap = len(RACES) - 2, len(RACES) - 1
    assert [meet(whole, s)[0] for s in (1, 2)] == [320, 320]
    counts = [int(meet(gap, s)[0]) for s in (1, 2, 3)]
    assert len({*counts}) > 1
    assert max(counts) < 320


def test_a_launch_is_checked_as_a_driver_would(emulation: ModuleType, library_cache: Path) -> None:
    e = emulation.Emulator(library_cache)
    for grid, block, shared in (
        ((0, 1, 1), (32, 1, 1), 0),
        ((1, 1, 1), (32, 33, 1), 0),
        ((1, 70000, 1), (32, 1, 1), 0),
    ):
        with pytest.raises(emulation.KernelError, match="a grid of"):
            e.launch("row_norm.cu", "none", grid, block, (), shared)
    x = np.zeros((4, 4), np.float32)
    with pytest.raises(emulation.KernelError, match="gaps"):
        e._argument(x[:, ::2])
    with pytest.raises(emulation.KernelError, match="no exact type"):
        e._argument(3)
    one = np.zeros(1, np.int64)
    for arguments in ((one, one), (one, one, np.int32(0)), (one, one, np.float64(0)), (one, np.int64(1), np.int64(1))):
        with pytest.raises(emulation.KernelError, match=r"count_true takes .*, got"):
            e.launch("scans.cu", "count_true", (1, 1, 1), (256, 1, 1), arguments)
