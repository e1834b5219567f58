"""Times of calls on a GPU alone, and whether the clock can be believed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Inputs = Sequence[tuple[Any, ...]]


class Timed(NamedTuple):
    """A candidate that is ready to be timed: seconds of one call, and how the launches of the host are kept out."""

    elapsed: Callable[[], float]
    by: str


Peer = Callable[["Meter", Inputs], Timed]


SPIN = """extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}"""
LONGEST_SPIN = 100e-3
COPY = """extern "C" __global__ void copy(const uint4* x, uint4* y, long long n) {
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) y[i] = x[i];
}"""


class Meter:
    """Times of calls on the device, without those of their launches."""

    def __init__(self, cp: Any, tiny: bool = False) -> None:
        from meshtape.autodiff.compiler.cuda_graphs import CudaGraphs

        self.cp, self.tiny = cp, tiny
        self._graphs = CudaGraphs
        self._spin = cp.RawKernel(SPIN, "spin")
        self.copy = 0.0  # bytes a second, read and written

    def between(self, run: Callable[[], Any], ahead: float = 0.0) -> tuple[float, bool]:
        """Seconds of the device from the first to the last call of ``run``, and whether all were queued before the
        first began.

        With ``ahead``, a kernel spins for so many seconds before the first."""
        start, stop = self.cp.cuda.Event(), self.cp.cuda.Event()
        if ahead:
            self._spin((1,), (1,), (np.uint64(ahead * 1e9),))
        start.record()
        run()
        queued = not start.done
        stop.record()
        stop.synchronize()
        return self.cp.cuda.get_elapsed_time(start, stop) * 1e-3, queued

    def calls(self, fn: Callable[..., Any], sets: Inputs) -> int:
        """Calls of one measurement: about 5 ms of them, each set of inputs as often as the others."""
        for s in sets:
            fn(*s)
        self.cp.cuda.Device().synchronize()
        one = self.between(lambda: [fn(*s) for s in sets])[0] / len(sets)
        wanted = 1 if self.tiny else min(200, int(5e-3 / max(one, 1e-7)) + 1)
        return len(sets) * -(-wanted // len(sets))

    def prepare(self, fn: Callable[..., Any], sets: Inputs, count: int = 0) -> Timed:
        """Calls on CuPy's current stream: as a graph where they can be captured, else behind a spinning kernel."""
        n = count or self.calls(fn, sets)

        def all_calls() -> list[Any]:
            kept = deque(maxlen=len(sets))  # so that results take turns, too
            for i in range(n):
                kept.append(fn(*sets[i % len(sets)]))
            return list(kept)

        from meshtape.autodiff.compiler.cuda_graphs import CaptureRefused

        graphs = self._graphs(0)
        try:
            with graphs.apart():
                held = graphs.capture(all_calls)
        except CaptureRefused:
            return self.behind_spin(all_calls, n)

        def elapsed(kept: Any = (graphs, held)) -> float:  # the memory that the graph writes to, and its pool
            return self.between(held[1])[0] / n

        return Timed(elapsed, "graph")

    def behind_spin(self, run: Callable[[], Any], n: int) -> Timed:
        """``run`` makes ``n`` calls, and the spin is as long as they take to be queued."""
        start = time.perf_counter()
        run()
        ahead = 2 * (time.perf_counter() - start) + 1e-3
        self.cp.cuda.Device().synchronize()
        while ahead < LONGEST_SPIN and not self.between(run, ahead)[1]:
            ahead *= 4
        by = "spin" if ahead < LONGEST_SPIN else "host"
        return Timed(lambda: self.between(run, ahead if by == "spin" else 0.0)[0] / n, by)

    def turns(self, candidates: Mapping[str, Timed], rounds: int = 7) -> dict[str, float]:
        """Medians over rounds, in each of which every candidate has its turn."""
        found: dict[str, list[float]] = {name: [] for name in candidates}
        for i in range(1 if self.tiny else rounds + 1):
            for name, candidate in candidates.items():
                seconds = candidate.elapsed()
                if i or self.tiny:  # the first is a warm-up
                    found[name].append(seconds)
        return {name: statistics.median(seconds) for name, seconds in found.items()}


def checks(meter: Meter) -> list[dict[str, Any]]:
    """Whether the clock can be believed: what was measured in two ways, or is known, and whether it agrees. Sets the
    speed of the copy."""
    cp, out = meter.cp, []
    a, b = (cp.zeros(1 << (10 if meter.tiny else 28), cp.float32) for _ in range(2))

    def note(name: str, found: float, low: float, high: float) -> None:
        out.append({"name": name, "found": found, "from": low, "to": high, "ok": bool(low <= found <= high)})

    kernel = cp.RawKernel(COPY, "copy")

    def copy(x: Any, y: Any) -> None:
        kernel((1 << 14,), (256,), (x, y, np.int64(x.nbytes // 16)))

    def median(elapsed: Callable[[], float]) -> float:
        return statistics.median(elapsed() for _ in range(7))

    def run() -> None:
        for _ in range(8):
            copy(a, b)

    # The driver's copy is the roofline. As a node of a graph it takes half as long again (seen on an H200).
    meter.copy = 2 * a.nbytes / median(meter.behind_spin(lambda: [cp.copyto(b, a) for _ in range(8)], 8).elapsed)
    graph = meter.prepare(copy, [(a, b)], 8)
    by_graph, by_events = median(graph.elapsed), median(lambda: meter.between(run)[0] / 8)
    note("a copy can be captured", float(graph.by == "graph"), 1, 1)
    note("a copy by a graph over one by events", by_graph / by_events, 0.95, 1.05)
    spun = meter.behind_spin(run, 8)
    note("a copy can be queued behind a spin", float(spun.by == "spin"), 1, 1)
    note("a copy by a graph over one behind a spin", by_graph / median(spun.elapsed), 0.95, 1.05)
    twice = meter.prepare(copy, [(a, b)], 16)
    note("16 copies in a graph over 8", 2 * median(twice.elapsed) / by_graph, 1.9, 2.1)
    a += 1
    graph.elapsed()
    note("a graph writes the values", float(cp.abs(b - 1).max()), 0, 0)
    note(
        "a kernel that copies 16 bytes at a time over the driver's copy",
        2 * a.nbytes / by_graph / meter.copy,
        0.8,
        1.15,
    )
    with contextlib.suppress(Exception):  # not every driver tells
        attribute = cp.cuda.runtime.deviceGetAttribute
        peak = 2e3 * attribute(36, 0) * attribute(37, 0) / 8  # kHz of the memory's clock, and bits of its bus
        if peak > 0:
            note("the copy over the memory's own limit", meter.copy / peak, 0.5, 1.0)
    return out
