"""The kernels against the memory of the GPU, and against PyTorch (eager and compiled), CuPy and JAX: ``python
benchmarks/gpu.py``.

For each row: the bytes that it must move (each input read once, each output written once) over its time, as a share of
what a device-to-device copy moves in the same run (the roofline of all that computes little), and its time over that of
each peer that can be imported.

Times are of the device alone: many calls, over inputs that together exceed the second-level cache several times, are
captured in a CUDA graph, and the graph is timed between events. Calls that cannot be captured are queued behind a
kernel that spins until all of them wait in the stream. Where a call waits for the device itself, neither works, and its
time holds the host's too: "host" stands in the column "by". JAX has streams of its own: one jitted function makes the
calls on all inputs, and the clock of the host is read. Candidates of a row are timed in turns.

``--quick`` takes fewer shapes and ends within 8 minutes: rows that no time is left for are named in the table as
dropped. ``--only NAME`` takes the rows whose name contains it, ``--no-compile`` leaves ``torch.compile`` out, ``--json
FILE`` writes all of it as JSON, ``--tiny`` takes shapes of a few elements, which shows that rows run and measures
nothing. The status is 1 where a row of ours or a check of the clock failed.

Targets (H200): 90 % of the copy for rows of 1024 and more, forward, and 80 % backward; never slower than PyTorch; the
deterministic gradient of an embedding within twice the atomic one; products and convolutions 95 % of PyTorch's speed;
no more than 2 microseconds over CuPy for an op on eight elements; a step of a hundred small ops as a CUDA graph five
times faster than eager.
"""

from __future__ import annotations

import time

START = time.time()

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import meshtape as mt
from meshtape.arrays.core.dispatch import wrap
from meshtape.arrays.kernels import launch

QUICK = 420.0
"""Seconds that ``--quick`` begins no new candidate after; the watch ends it half a minute later, with what it has."""
SHAPES = (
    (4096, 4096),
    (16384, 4096),
    (4096, 8192),
    (16384, 16384),
    (4096, 1024),
    (4096, 256),
    (4097, 1001),
    (1000, 5003),
)
DTYPES = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))
IMAGES = ((64, 256, 28, 28), (32, 64, 112, 112))
CONVOLUTIONS = (
    ((64, 64, 56, 56), (64, 64, 3, 3), 1),
    ((64, 256, 56, 56), (64, 256, 1, 1), 1),
    ((64, 3, 224, 224), (64, 3, 7, 7), 2),
    ((64, 256, 14, 14), (256, 256, 3, 3), 1),
    ((64, 512, 28, 28), (1024, 512, 1, 1), 2),
)
"""Images, kernels and strides of layers of a ResNet-50."""
EPS = 1e-5
BACKWARD = 0.8
"""Share of the copy that backward passes are to reach."""

Inputs = Sequence[tuple[Any, ...]]


class Timed(NamedTuple):
    """A candidate that is ready to be timed: seconds of one call, and how the launches of the host are kept out."""

    elapsed: Callable[[], float]
    by: str


Peer = Callable[["Meter", Inputs], Timed]


class Row(NamedTuple):
    """One measurement: ``ours(*arrays)`` and each of the peers do the same work on one set of inputs."""

    name: str
    nbytes: int
    make: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Any]
    peers: Mapping[str, Peer]
    target: float | None = None  # of the copy's speed
    most: float = 1.0  # of PyTorch's time


def op(name: str, **params: Any) -> Callable[..., Any]:
    """An op of ours on raw buffers."""
    fn = mt.OPS[name].overrides["cupy"]
    return lambda *args: fn(*args, **params)


def of_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours on raw buffers."""
    return lambda *bufs: fn(*map(wrap, bufs))


# ----- the clock ------------------------------------------------------------------------------------------------------

SPIN = """extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}"""
LONGEST_SPIN = 100e-3


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

    def copy(x: Any, y: Any) -> None:
        cp.copyto(y, x)

    def median(elapsed: Callable[[], float]) -> float:
        return statistics.median(elapsed() for _ in range(7))

    def run() -> None:
        for _ in range(8):
            copy(a, b)

    graph = meter.prepare(copy, [(a, b)], 8)
    by_graph, by_events = median(graph.elapsed), median(lambda: meter.between(run)[0] / 8)
    meter.copy = 2 * a.nbytes / by_graph
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
    add = cp.ElementwiseKernel("float32 x", "float32 y", "y = x + 1", "benchmark_known_bytes")
    known = 2 * a.nbytes / median(meter.prepare(lambda x, y: add(x, y), [(a, b)], 8).elapsed)
    note("x + 1, whose bytes are known, over the copy", known / meter.copy, 0.8, 1.15)
    with contextlib.suppress(Exception):  # not every driver tells
        attribute = cp.cuda.runtime.deviceGetAttribute
        peak = 2e3 * attribute(36, 0) * attribute(37, 0) / 8  # kHz of the memory's clock, and bits of its bus
        if peak > 0:
            note("the copy over the memory's own limit", meter.copy / peak, 0.5, 1.0)
    return out


# ----- peers ----------------------------------------------------------------------------------------------------------


def importable(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


def on_stream(fn: Callable[..., Any]) -> Peer:
    """CuPy's own functions, or others of ours."""
    return lambda meter, sets: meter.prepare(fn, sets)


class Torch:
    """PyTorch's functions on buffers of ours (shared through DLPack), eager or compiled (by Triton, on a GPU)."""

    def __init__(self, torch: Any, compiled: bool = True) -> None:
        self.torch, self.compiled = torch, compiled

    def of(self, a: Any) -> Any:
        if a.dtype == ml_dtypes.bfloat16:
            return self.torch.from_dlpack(a.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_dlpack(a)

    def prepare(self, meter: Meter, run_all: Callable[[int], Any], sets: int) -> Timed:
        """``run_all(n)`` makes n calls. Capture is PyTorch's own: its memory and its autograd know of it."""
        torch, side = self.torch, self.torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run_all(sets)
            torch.cuda.synchronize()
            start = time.perf_counter()
            run_all(sets)
            torch.cuda.synchronize()
            one = (time.perf_counter() - start) / sets
        n = sets * -(-(1 if meter.tiny else min(200, int(5e-3 / max(one, 1e-7)) + 1)) // sets)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=side):
                run_all(n)
        except Exception:
            torch.cuda.synchronize()
            return meter.behind_spin(lambda: run_all(n), n)
        return Timed(lambda: meter.between(graph.replay)[0] / n, "graph")

    def calls(self, fn: Callable[[], Callable[..., Any]]) -> Peer:
        """``fn()`` is made when its turn comes: what was compiled for another row is forgotten before."""

        def prepare(meter: Meter, sets: Inputs) -> Timed:
            call, tensors = fn(), [[self.of(a) for a in s] for s in sets]
            kept = deque(maxlen=len(sets))

            def run_all(n: int) -> None:
                for i in range(n):
                    kept.append(call(*tensors[i % len(tensors)]))

            return self.prepare(meter, run_all, len(sets))

        return prepare

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.torch._dynamo.reset()
        return self.torch.compile(fn, dynamic=False)

    def wrap(self, fn: Callable[..., Any]) -> Peer:
        return self.calls(lambda: fn)

    def both(self, peer: Callable[[Callable[[], Callable[..., Any]]], Peer], fn: Callable[..., Any]) -> dict[str, Peer]:
        eager = {"torch": peer(lambda: fn)}
        return eager | {"torch compiled": peer(lambda: self.compile(fn))} if self.compiled else eager

    def pair(self, fn: Callable[..., Any]) -> dict[str, Peer]:
        return self.both(self.calls, fn)

    def backward(self, fn: Callable[..., Any], wanted: Sequence[int]) -> dict[str, Peer]:
        """The backward pass alone: the forward pass is made once for each set of inputs. The cotangent is the first
        array."""

        def peer(make: Callable[[], Callable[..., Any]]) -> Peer:
            def prepare(meter: Meter, sets: Inputs) -> Timed:
                forward, kept, made = make(), deque(maxlen=len(sets)), []

                def run_all(n: int) -> None:
                    if not made:  # on the stream of the capture, where its backward pass then runs
                        for s in sets:
                            g, *args = (self.of(a) for a in s)
                            leaves = [args[i].requires_grad_() for i in wanted]
                            made.append((forward(*args), leaves, g))
                    for i in range(n):
                        out, leaves, g = made[i % len(made)]
                        kept.append(self.torch.autograd.grad(out, leaves, g, retain_graph=True))

                return self.prepare(meter, run_all, len(sets))

            return prepare

        return self.both(peer, fn)


def jax_peer(jax: Any, fn: Callable[..., Any]) -> Peer:
    """One jitted function makes the calls on all inputs; several such are queued before the last is awaited."""

    def prepare(meter: Meter, sets: Inputs) -> Timed:
        def of(a: Any) -> Any:
            if a.dtype == ml_dtypes.bfloat16:
                return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(a.view(np.uint16)), a.dtype)
            return jax.dlpack.from_dlpack(a)

        given = [[of(a) for a in s] for s in sets]
        every = jax.jit(lambda given: [fn(*s) for s in given])
        jax.block_until_ready(every(given))

        def elapsed(rounds: int = 20) -> float:
            start = time.perf_counter()
            for _ in range(rounds):
                out = every(given)
            jax.block_until_ready(out)
            return (time.perf_counter() - start) / rounds / len(sets)

        return Timed(elapsed, "jit")

    return prepare


# ----- rows -----------------------------------------------------------------------------------------------------------


class Maker:
    """Random inputs on the device."""

    def __init__(self) -> None:
        self.xp = launch.runner().xp
        self.rng = np.random.default_rng(0)

    def normal(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        # A block of numbers, repeated: the host makes them slowly.
        n = int(np.prod(shape))
        block = self.xp.asarray(self.rng.standard_normal(min(n, 1 << 20)).astype(np.float32))
        out = self.xp.empty(n, np.float32)
        for i in range(0, n, len(block)):
            out[i : i + len(block)] = block[: n - i]
        return out.reshape(shape).astype(dtype)

    def integers(self, n: int, high: int) -> Any:
        return self.xp.asarray(self.rng.integers(0, high, n))


def row_norm_rows(m: Maker, t: Torch | None, jax: Any, shape: tuple[int, int], d: np.dtype) -> Iterator[Row]:
    rows, width = shape
    size, label = rows * width * d.itemsize, f"{rows} x {width} {d.name}"
    target, back = (0.9, BACKWARD) if width >= 1024 else (None, None)
    F = None if t is None else t.torch.nn.functional

    def x() -> Any:
        return m.normal(shape, d)

    def w() -> Any:
        return m.normal((width,), d)

    params = {"naxes": 1, "eps": EPS}
    layer = None if t is None else (lambda x, w, b: F.layer_norm(x, (width,), w, b, EPS))
    rms = None if t is None else (lambda x, w: F.rms_norm(x, (width,), w, EPS))
    jax_layer = {} if jax is None else {"jax": jax_peer(jax, lambda x, w, b: _jax_layer_norm(jax, x, w, b))}
    yield Row(
        f"layer_norm, {label}",
        2 * size,
        lambda: (x(), w(), w()),
        op("layer_norm", **params),
        jax_layer if t is None else t.pair(layer) | jax_layer,
        target,
    )
    yield Row(
        f"layer_norm backward, {label}",
        3 * size,
        lambda: (x(), x(), w(), w()),
        without_bias(op("layer_norm_backward", **params)),
        {} if t is None else t.backward(layer, (0, 1, 2)),
        back,
    )
    yield Row(
        f"rms_norm, {label}",
        2 * size,
        lambda: (x(), w()),
        op("rms_norm", **params),
        {} if t is None else t.pair(rms),
        target,
    )
    summed = None if t is None else (lambda x, r, w: (F.rms_norm(s := x + r, (width,), w, EPS), s))
    added = {} if t is None else t.pair(summed)
    joined = {} if t is None else t.backward(lambda *a: sum(summed(*a)), (0, 1, 2))
    yield Row(f"add_rms_norm, {label}", 4 * size, lambda: (x(), x(), w()), op("add_rms_norm", **params), added, target)
    add_back = op("rms_norm_backward", **params)
    yield Row(
        f"add_rms_norm backward, {label}",
        4 * size,
        lambda: (x(), x(), x(), w()),
        lambda g, x, r, w: add_back(g, x, w, r),
        joined,
        back,
    )
    yield Row(
        f"rms_norm backward, {label}",
        3 * size,
        lambda: (x(), x(), w()),
        op("rms_norm_backward", **params),
        {} if t is None else t.backward(rms, (0, 1)),
        back,
    )


def without_bias(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A backward op of ours, which needs no bias, where the peers have one."""
    return lambda g, x, w, b: fn(g, x, w)


def _jax_layer_norm(jax: Any, x: Any, w: Any, b: Any) -> Any:
    f = x.astype("float32")
    d = f - f.mean(-1, keepdims=True)
    return (d * jax.lax.rsqrt((d * d).mean(-1, keepdims=True) + EPS) * w + b).astype(x.dtype)


def with_result(fn: Callable[..., Any], g: Any, x: Any) -> tuple[Any, Any, Any]:
    """A cotangent, an input, and the result for it: our backward ops start from that, the peers from the input."""
    return g, x, fn(x)


def from_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda g, x, y: fn(g, y)


def softmax_rows(m: Maker, t: Torch | None, jax: Any, shape: tuple[int, int], d: np.dtype) -> Iterator[Row]:
    rows, width = shape
    size, label = rows * width * d.itemsize, f"{rows} x {width} {d.name}"
    target, back = (0.9, BACKWARD) if width >= 1024 else (None, None)
    F = None if t is None else t.torch.nn.functional
    masked = False
    for name in ("softmax", "log_softmax"):
        peer = None if t is None else (lambda x, f=name: getattr(F, f)(x, -1))
        jitted = {} if jax is None else {"jax": jax_peer(jax, lambda x, f=name: getattr(jax.nn, f)(x))}
        yield Row(
            f"{name}, {label}",
            2 * size,
            lambda: (m.normal(shape, d),),
            op(name, axis=1, masked=masked),
            jitted if t is None else t.pair(peer) | jitted,
            target,
        )
        yield Row(
            f"{name} backward, {label}",
            3 * size,
            lambda f=name: with_result(op(f, axis=1, masked=masked), m.normal(shape, d), m.normal(shape, d)),
            from_result(op(f"{name}_backward", axis=1)),
            {} if t is None else t.backward(lambda x, y, f=peer: f(x), (0,)),
            back,
        )
    params = {"ignore_index": None, "label_smoothing": 0.0}
    losses, back_of_losses = op("cross_entropy", **params), op("cross_entropy_backward", **params)

    def with_saved() -> tuple[Any, ...]:  # the cotangents of losses, and what the op saves of rows
        x, labels, g = m.normal(shape, d), m.integers(rows, width), m.normal((rows,), launch.wide(d))
        return g, x, labels, *losses(x, labels)[1:]

    loss = None if t is None else (lambda x, y: F.cross_entropy(x, y, reduction="none"))
    yield Row(
        f"cross_entropy, {label}",
        size,
        lambda: (m.normal(shape, d), m.integers(rows, width)),
        losses,
        {} if t is None else t.pair(loss),
        target,
    )
    yield Row(
        f"cross_entropy backward, {label}",
        2 * size,
        with_saved,
        back_of_losses,
        {}
        if t is None
        else t.backward(
            lambda x, y, *_: F.cross_entropy(x.float() if d.itemsize == 2 else x, y, reduction="none"), (0,)
        ),
        back,
    )


def image_rows(m: Maker, t: Torch | None, shape: tuple[int, ...], d: np.dtype, last: bool) -> Iterator[Row]:
    n, c, h, w = shape
    groups, axis = 32 if c % 32 == 0 else 2, 3 if last else 1
    own = (n, h, w, c) if last else shape
    size, label = n * c * h * w * d.itemsize, f"{'NHWC' if last else 'NCHW'} {' x '.join(map(str, own))} {d.name}"
    group, one = {"num_groups": groups, "axis": axis, "eps": EPS}, {"axis": axis, "eps": EPS}
    peers: dict[str, dict[str, Peer]] = {}
    if t is not None:
        F = t.torch.nn.functional

        def nchw(x: Any) -> Any:  # PyTorch's channels-last is a stride order of the same shape
            return x.permute(0, 3, 1, 2) if last else x

        def of_groups(x: Any, w: Any, b: Any) -> Any:
            return F.group_norm(nchw(x), groups, w, b, EPS)

        def of_batch(x: Any, w: Any, b: Any) -> Any:
            return F.batch_norm(nchw(x), None, None, w, b, True, 0.1, EPS)

        def ours_back(fn: Callable[..., Any]) -> Callable[..., Any]:  # the cotangent comes in our layout too
            return lambda x, w, b: fn(x, w, b).permute(0, 2, 3, 1) if last else fn(x, w, b)

        peers = {
            "group_norm": t.pair(of_groups),
            "group_norm backward": t.backward(ours_back(of_groups), (0, 1, 2)),
            "batch_norm": t.pair(of_batch),
            "batch_norm backward": t.backward(ours_back(of_batch), (0, 1, 2)),
        }

    def x() -> Any:
        return m.normal(own, d)

    def p(dtype: np.dtype = d) -> Any:
        return m.normal((c,), dtype)

    statistic = launch.wide(d)
    yield Row(
        f"group_norm, {label}",
        2 * size,
        lambda: (x(), p(), p()),
        op("group_norm", **group),
        peers.get("group_norm", {}),
    )
    yield Row(
        f"group_norm backward, {label}",
        3 * size,
        lambda: (x(), x(), p(), p()),
        without_bias(op("group_norm_backward", **group)),
        peers.get("group_norm backward", {}),
    )

    @functools.cache
    def statistics() -> Any:  # their cotangents, mean and variance
        return launch.runner().xp.asarray([[0.0], [0.0], [0.0], [1.0]], statistic).repeat(c, axis=1)

    yield Row(
        f"batch_norm, {label}",
        3 * size,
        lambda: (x(), p(), p()),
        lambda x, w, b: op("batch_norm", **one, momentum=0.1)(x, w, b, *statistics()[2:]),
        peers.get("batch_norm", {}),
    )
    backward = mt.OPS["batch_norm_backward"].overrides["cupy"]

    def with_no_cotangent_of_statistics(g: Any, x: Any, w: Any, b: Any) -> Any:
        return backward(g, *statistics(), x, w, **one)

    yield Row(
        f"batch_norm backward, {label}",
        5 * size,
        lambda: (x(), x(), p(), p()),
        with_no_cotangent_of_statistics,
        peers.get("batch_norm backward", {}),
    )


def index_rows(m: Maker, t: Torch | None, rows: int, table: int, width: int, d: np.dtype) -> Iterator[Row]:
    from meshtape.arrays.core.index_template import Slot, Span

    template = (Slot(0), Span(None, None, None))
    nbytes = (rows + table) * width * d.itemsize
    for ids, high in (("uniform", table), ("64 rows", 64)):
        label = f"{rows} rows of {width} into {table}, {ids}, {d.name}"

        def make(high: int = high) -> tuple[Any, ...]:
            return m.normal((rows, width), d), m.integers(rows, high)

        gradient = op("scatter", template=template, shape=(table, width))

        def atomic(*a: Any, fn: Callable[..., Any] = gradient) -> Any:
            with mt.use_deterministic(False):
                return fn(*a)

        peer = {}
        if t is not None:
            peer = {"torch": t.wrap(lambda g, i: t.torch.ops.aten.embedding_dense_backward(g, i, table, -1, False))}
        yield Row(
            f"embedding gradient, in order, {label}", nbytes, make, gradient, peer | {"ours, atomic": on_stream(atomic)}
        )
        yield Row(f"embedding gradient, atomic, {label}", nbytes, make, atomic, peer)

        def make_write(high: int = high) -> tuple[Any, ...]:
            return m.normal((table, width), d), m.normal((rows, width), d), m.integers(rows, high)

        write = {} if t is None else {"torch (any write wins)": t.wrap(lambda x, v, i: t.torch.index_put(x, (i,), v))}
        yield Row(
            f"index_put, last write, {label}",
            (2 * table + 2 * rows) * width * d.itemsize,
            make_write,
            op("index_set", template=template),
            write,
        )


def random_rows(m: Maker, t: Torch | None, n: int, d: np.dtype) -> Iterator[Row]:
    from meshtape.arrays.random import bit_transforms, philox

    xp, key = m.xp, m.xp.asarray(np.array([1, 2], np.uint64))
    recipe = bit_transforms.uniform(d, 0.0, 1.0)
    like = {} if t is None else {"torch": t.wrap(lambda x: t.torch.rand_like(x))}
    yield Row(
        f"uniform, {n} {d.name}",
        n * d.itemsize,
        lambda: (m.normal((n,), d),),
        lambda x: philox.draw(xp, key, recipe, d, (n,), (0,), (n,)),
        like,
    )
    params = {"rate": 0.1, "offset": (0,), "global_shape": (n,)}
    F = None if t is None else t.torch.nn.functional
    dropped = {} if t is None else t.pair(lambda x, y: F.dropout(x, 0.1) + y)
    yield Row(
        f"dropout_add, {n} {d.name}",
        3 * n * d.itemsize,
        lambda: (m.normal((n,), d), m.normal((n,), d)),
        lambda x, y: mt.OPS["dropout_add"].overrides["cupy"](x, y, key, **params),
        dropped,
    )
    if d == np.float32:
        from meshtape.arrays.kernels.compact import true_places

        yield Row(
            f"places of a mask, {n}",
            n + 8 * n // 2,
            lambda: (m.normal((n,), d) > 0,),
            true_places,
            {} if t is None else {"torch": t.wrap(lambda x: t.torch.nonzero(x))},
        )


def elementwise_rows(m: Maker, t: Torch | None, jax: Any, n: int, d: np.dtype) -> Iterator[Row]:
    """What CuPy has too: it is the peer."""
    xp, label = m.xp, f"{n} {d.name}"
    two, one = (lambda: (m.normal((n,), d), m.normal((n,), d))), (lambda: (m.normal((n,), d),))
    torch, jnp = None if t is None else t.torch, None if jax is None else jax.numpy
    gelu = None if t is None else (lambda x: torch.nn.functional.gelu(x))
    swiglu = None if t is None else (lambda x, y: torch.nn.functional.silu(x) * y)
    for name, sizes, make, ours, theirs, of_torch, of_jax in (
        ("x + y", 3, two, lambda x, y: x + y, lambda x, y: x + y, lambda x, y: x + y, lambda x, y: x + y),
        ("tanh", 2, one, mt.tanh, xp.tanh, torch and torch.tanh, jnp and jnp.tanh),
        ("gelu", 2, one, mt.nn.gelu, None, gelu, jax and (lambda x: jax.nn.gelu(x, approximate=False))),
        ("mish", 2, one, mt.nn.mish, None, torch and torch.nn.functional.mish, jax and jax.nn.mish),
        ("swiglu", 3, two, mt.nn.swiglu, None, swiglu, jax and (lambda x, y: jax.nn.silu(x) * y)),
        ("sum", 1, one, mt.sum, lambda x: x.sum(dtype=launch.wide(d)), torch and torch.sum, jnp and jnp.sum),
    ):
        peers = {} if theirs is None else {"cupy": on_stream(theirs)}
        peers |= {} if t is None else t.pair(of_torch)
        peers |= {} if jax is None else {"jax": jax_peer(jax, of_jax)}
        yield Row(f"{name}, {label}", sizes * n * d.itemsize, make, of_arrays(ours), peers, 0.9)
    yield Row(
        f"swiglu, both ways, {label}",
        8 * n * d.itemsize,
        lambda: tuple(m.normal((n,), d) for _ in range(3)),
        of_arrays(lambda g, x, y: mt.vjp(mt.nn.swiglu, x, y)[1](g)),
        {} if t is None else {"torch": t.wrap(lambda g, x, y: their_gradients(t, swiglu, g, x, y))},
    )
    side = max(1, int(n**0.5) // 32 * 32)
    yield Row(
        f"transpose, {side} x {side} {d.name}",
        2 * side * side * d.itemsize,
        lambda: (m.normal((side, side), d),),
        of_arrays(lambda x: mt.copy(x.T)),
        {"cupy": on_stream(lambda x: xp.ascontiguousarray(x.T))}
        | ({} if t is None else t.pair(lambda x: x.T.contiguous())),
    )


def their_gradients(t: Torch, fn: Callable[..., Any], g: Any, *args: Any) -> Any:
    args = tuple(x.detach().requires_grad_() for x in args)
    return t.torch.autograd.grad(fn(*args), args, g)


def rotary_rows(m: Maker, t: Torch | None, shape: tuple[int, int, int, int], d: np.dtype) -> Iterator[Row]:
    """Queries, whose heads lie behind their positions and are put before them. PyTorch composes it."""
    b, h, s, width = shape

    def make() -> tuple[Any, ...]:
        tables = (m.normal((s, width // 2), launch.wide(d)) for _ in range(2))
        return (m.normal((b, s, h, width), d), *tables)

    def ours(x: Any, c: Any, sine: Any) -> Any:
        return mt.nn.rotary_embedding(mt.permute_dims(x, (0, 2, 1, 3)), c, sine)

    def theirs(x: Any, c: Any, sine: Any) -> Any:
        left, right = x.transpose(1, 2).chunk(2, -1)
        turned = (left * c - right * sine, right * c + left * sine)
        return t.torch.cat(turned, -1).to(x.dtype)

    nbytes = 2 * int(np.prod(shape)) * d.itemsize
    label = f"rotary_embedding, {' x '.join(map(str, shape))} {d.name}"
    yield Row(label, nbytes, make, of_arrays(ours), {} if t is None else t.pair(theirs), 0.85)


def product_rows(m: Maker, t: Torch | None, jax: Any, side: int, d: np.dtype) -> Iterator[Row]:
    """Products of matrices, whose bound is not the memory: PyTorch is the measure."""
    peers = {} if t is None else t.pair(lambda a, b: a @ b)
    peers |= {} if jax is None else {"jax": jax_peer(jax, lambda a, b: a @ b)}
    for shape in ((side, side), (16, side // 8, side // 8)):
        nbytes = 3 * int(np.prod(shape)) * d.itemsize
        label = f"product, {' x '.join(map(str, shape))} {d.name}"
        yield Row(
            label,
            nbytes,
            lambda s=shape: (m.normal(s, d), m.normal(s, d)),
            of_arrays(lambda a, b: a @ b),
            peers,
            None,
            1 / 0.95,
        )


def convolution_rows(
    m: Maker, t: Torch | None, image: tuple[int, ...], kernel: tuple[int, ...], stride: int, d: np.dtype, last: bool
) -> Iterator[Row]:
    """A convolution of images (N, channels, height, width), and the same with both gradients; channels last in memory
    or not. PyTorch is the measure."""
    (n, _, *size), (o, _, *window) = image, kernel
    padding, moved = window[0] // 2, (0, 3, 1, 2)
    out = (n, o, *(-(-s // stride) for s in size))
    own = [(s[0], *s[2:], s[1]) if last else s for s in (image, kernel, out)]
    x, w, g = (int(np.prod(s)) * d.itemsize for s in own)
    label = f"{'NHWC' if last else 'NCHW'} {' x '.join(map(str, image))} by {o} of {window[0]} x {window[1]}"
    label += f", stride {stride}, {d.name}"

    def made(count: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(m.normal(s, d) for s in own[:count])

    def ours(x: Any, w: Any) -> Any:
        x, w = (mt.permute_dims(a, moved) if last else a for a in (x, w))
        return mt.nn.conv2d(x, w, stride=stride, padding=padding)

    def step(x: Any, w: Any, g: Any) -> Any:
        y, pull = mt.vjp(ours, x, w)
        return y, *pull(mt.permute_dims(g, moved) if last else g)

    def theirs(x: Any, w: Any) -> Any:
        x, w = (a.permute(moved) if last else a for a in (x, w))
        return t.torch.nn.functional.conv2d(x, w, stride=stride, padding=padding)

    def their_step(x: Any, w: Any, g: Any) -> Any:
        x, w = (a.detach().requires_grad_() for a in (x, w))
        y = theirs(x, w)
        return y, *t.torch.autograd.grad(y, (x, w), g.permute(moved) if last else g)

    eager, both = ({}, {}) if t is None else ({"torch": t.wrap(theirs)}, {"torch": t.wrap(their_step)})
    yield Row(f"convolution, {label}", x + w + g, made(2), of_arrays(ours), eager, None, 1 / 0.95)
    yield Row(f"convolution, both ways, {label}", 3 * (x + w + g), made(3), of_arrays(step), both, None, 1 / 0.95)


def attention_rows(m: Maker, t: Torch | None, shape: tuple[int, int, int, int], d: np.dtype) -> Iterator[Row]:
    """Causal attention and its gradient: PyTorch's fused one is the measure."""
    size, label = int(np.prod(shape)) * d.itemsize, f"{' x '.join(map(str, shape))} {d.name}"
    F = None if t is None else t.torch.nn.functional

    def three() -> tuple[Any, ...]:
        return tuple(m.normal(shape, d) for _ in range(3))

    def ours(q: Any, k: Any, v: Any) -> Any:
        return mt.nn.scaled_dot_product_attention(q, k, v, is_causal=True)

    def step(g: Any, q: Any, k: Any, v: Any) -> Any:
        return mt.vjp(ours, q, k, v)[1](g)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def their_step(g: Any, q: Any, k: Any, v: Any) -> Any:
        return their_gradients(t, theirs, g, q, k, v)

    eager, both = ({}, {}) if t is None else ({"torch": t.wrap(theirs)}, {"torch": t.wrap(their_step)})
    yield Row(f"attention, {label}", 4 * size, three, of_arrays(ours), eager, None, 1.25)
    yield Row(
        f"attention, both ways, {label}",
        8 * size,
        lambda: (m.normal(shape, d), *three()),
        of_arrays(step),
        both,
        None,
        1.25,
    )


def expert_rows(m: Maker, t: Torch | None, shape: tuple[int, int, int, int, int], d: np.dtype) -> Iterator[Row]:
    """Networks of experts and their gradients, whose bound is not the memory: PyTorch's grouped products are the
    measure, where it has them for the dtype, and a loop over the experts."""
    rows, k, experts, width, hidden = shape
    size, label = d.itemsize, f"{rows} x {width}, {k} of {experts} of {hidden} {d.name}"
    nbytes = (2 * rows * width + 3 * experts * width * hidden) * size

    def make() -> tuple[Any, ...]:
        matrices = [m.normal(s, d) for s in [(experts, width, hidden)] * 2 + [(experts, hidden, width)]]
        return (
            m.normal((rows, width), d),
            m.integers(rows * k, experts).reshape(rows, k),
            m.normal((rows, k), d),
            *matrices,
        )

    def ours(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        return mt.nn.experts(x, chosen, weights, gate=gate, up=up, down=down)

    def step(g: Any, x: Any, chosen: Any, *others: Any) -> Any:
        return mt.vjp(lambda x, *others: ours(x, chosen, *others), x, *others)[1](g)

    def grouped(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        product, silu = t.torch.nn.functional.grouped_mm, t.torch.nn.functional.silu
        found, order = chosen.flatten().sort(stable=True)
        numbers = t.torch.arange(experts, device=x.device)
        ends = t.torch.searchsorted(found, numbers, right=True, out_int32=True)
        own = x[order // k]
        y = product(silu(product(own, gate, offs=ends)) * product(own, up, offs=ends), down, offs=ends)
        return t.torch.zeros_like(x).index_add(0, order // k, y * weights.flatten()[order, None])

    def loop(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        out, silu = t.torch.zeros_like(x), t.torch.nn.functional.silu
        for e in range(experts):
            places, at = t.torch.nonzero(chosen == e, as_tuple=True)
            own = x[places]
            y = (silu(own @ gate[e]) * (own @ up[e])) @ down[e]
            out = out.index_add(0, places, y * weights[places, at, None])
        return out

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(g: Any, x: Any, chosen: Any, *others: Any) -> Any:
            leaves = [a.detach().requires_grad_() for a in (x, *others)]
            return t.torch.autograd.grad(fn(leaves[0], chosen, *leaves[1:]), leaves, g)

        return run

    peers = {}
    if t is not None:
        has = d == ml_dtypes.bfloat16 and hasattr(t.torch.nn.functional, "grouped_mm")
        peers = {"torch": grouped, "torch, a loop": loop} if has else {"torch": loop}
    eager = {name: t.wrap(fn) for name, fn in peers.items()}
    yield Row(f"experts, {label}", nbytes, make, of_arrays(ours), eager)
    eager = {name: t.wrap(both(fn)) for name, fn in peers.items()}
    yield Row(
        f"experts, both ways, {label}",
        2 * nbytes,
        lambda: (m.normal((rows, width), d), *make()),
        of_arrays(step),
        eager,
    )


def optimizer_rows(m: Maker, t: Torch | None, count: int, n: int) -> Iterator[Row]:
    """A step of AdamW over many float32 arrays: four arrays read and three written."""
    update = mt.optim.adamw(1e-3)
    d = np.dtype(np.float32)

    def make() -> tuple[Any, ...]:
        return tuple(m.normal((n,), d) for _ in range(2 * count))

    states: dict[int, Any] = {}

    def ours(*bufs: Any) -> Any:
        params, grads = list(map(wrap, bufs[:count])), list(map(wrap, bufs[count:]))
        if id(bufs[0]) not in states:
            states[id(bufs[0])] = bufs[0], update.init(params)
        return update.update(params, grads, states[id(bufs[0])][1])

    peers = {}
    if t is not None:
        torch, theirs = t.torch, {}

        def step(*tensors: Any) -> None:
            key = tensors[0].data_ptr()
            if key not in theirs:
                params = [torch.nn.Parameter(x.clone()) for x in tensors[:count]]
                for p, g in zip(params, tensors[count:], strict=True):
                    p.grad = g
                theirs[key] = torch.optim.AdamW(params, lr=1e-3, fused=True, capturable=True)
            theirs[key].step()

        peers = {"torch": t.wrap(step)}
    yield Row(f"AdamW, {count} arrays of {n} float32", 7 * count * n * d.itemsize, make, ours, peers, 0.85)


def guarded(family: Callable[..., Iterator[Row]], *args: Any) -> Iterator[Row]:
    """The rows of a family; where one cannot even be described, a row that fails."""
    try:
        yield from family(*args)
    except Exception as e:
        error = e  # the name of a handler ends with it

        def fails() -> tuple[Any, ...]:
            raise error

        yield Row(f"the rest of {family.__name__}, {', '.join(map(str, args[2:]))}", 0, fails, fails, {})


def all_rows(m: Maker, t: Torch | None, jax: Any, quick: bool, tiny: bool = False) -> Iterator[Row]:
    """Every row of the table, those with targets first: what a budget drops is what comes last."""
    dtypes = DTYPES[:2] if quick else DTYPES
    shapes, images = (SHAPES[:1], IMAGES[:1]) if quick else (SHAPES, IMAGES)
    convolutions = CONVOLUTIONS[:2] if quick else CONVOLUTIONS
    n, side, attention, table = 1 << 26, 8192, (1, 16, 16384, 128), (100_000, 50_000, 256)
    sent = (16384, 2, 8, 2048, 4096), (16384, 8, 64, 2048, 1024)
    if tiny:
        shapes, images, n, side, attention, table = ((5, 40),), ((2, 4, 3, 3),), 1024, 64, (1, 2, 16, 8), (70, 80, 8)
        convolutions = (((2, 4, 5, 5), (4, 4, 3, 3), 1),)
        sent = ((5, 2, 3, 8, 16),)
    for d in dtypes:
        for shape in shapes:
            yield from guarded(row_norm_rows, m, t, jax, shape, d)
            yield from guarded(softmax_rows, m, t, jax, shape, d)
    yield from guarded(product_rows, m, t, jax, side, DTYPES[1])
    yield from guarded(attention_rows, m, t, attention, DTYPES[1])
    for d in DTYPES[1:2] if quick else DTYPES[1:]:
        for layer in convolutions:
            for last in (True, False):
                yield from guarded(convolution_rows, m, t, *layer, d, last)
    for shape in sent:
        yield from guarded(expert_rows, m, t, shape, DTYPES[1])
    yield from guarded(expert_rows, m, t, sent[0], DTYPES[0])
    yield from guarded(optimizer_rows, m, t, 4 if tiny else 64, n // 64)
    for d in dtypes:
        yield from guarded(elementwise_rows, m, t, jax, n, d)
        yield from guarded(rotary_rows, m, t, attention, d)
        for shape in images:
            for last in (False, True):
                yield from guarded(image_rows, m, t, shape, d, last)
        yield from guarded(index_rows, m, t, *table, d)
        yield from guarded(random_rows, m, t, n, d)


# ----- calls of the host ----------------------------------------------------------------------------------------------


def overhead(cp: Any) -> dict[str, Any]:
    """Host microseconds of a call on eight elements: ours, and CuPy's own."""
    x = cp.ones(8, cp.float32)
    a = mt.asarray(np.ones(8, np.float32), device="cuda:0")

    def host(fn: Callable[[], Any]) -> float:
        best = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                fn()
            best.append((time.perf_counter() - start) / 200)
            cp.cuda.Device().synchronize()
        return statistics.median(best) * 1e6

    ours, theirs = host(lambda: a + a), host(lambda: x + x)
    return {
        "name": "x + x, 8 elements, of the host",
        "us": {"ours": ours, "cupy": theirs},
        "target": "CuPy + 2 us",
        "met": ours <= theirs + 2,
    }


def small_step(x: Any, w: Any, b: Any) -> Any:
    """A hundred small ops: twenty norms, each with four elementwise ops behind it."""
    for _ in range(20):
        h = mt.nn.layer_norm(x, x.shape[-1], w, b)
        x = mt.tanh(h * 1.01) + x - 0.5
    return x


def graphs(cp: Any) -> dict[str, Any]:
    """Microseconds of a step of a hundred small ops, to the end on the device: eager, compiled, and replayed as a CUDA
    graph."""
    args = [mt.asarray(np.ones(shape, np.float32), device="cuda:0") for shape in ((32, 128), (128,), (128,))]

    def step_time(fn: Callable[..., Any]) -> float:
        for _ in range(3):
            fn(*args)
        found = []
        for _ in range(20):
            cp.cuda.Device().synchronize()
            start = time.perf_counter()
            fn(*args)
            cp.cuda.Device().synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found) * 1e6

    found = {"eager": step_time(small_step), "compiled": step_time(mt.compile(small_step))}
    found["graph"] = step_time(mt.compile(small_step, cuda_graph=True))
    met = found["eager"] >= 5 * found["graph"]
    return {"name": "a step of 100 small ops", "us": found, "target": "graph 5 times faster than eager", "met": met}


# ----- the run --------------------------------------------------------------------------------------------------------


def sets_of(row: Row, cache: int) -> list[tuple[Any, ...]]:
    """Inputs that together exceed the second-level cache four times, up to eight sets."""
    count = max(2, min(8, -(-4 * cache // max(row.nbytes, 1))))
    return [row.make() for _ in range(count)]


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


class Run:
    """The state of a run, which is the JSON that it leaves."""

    def __init__(self, options: argparse.Namespace, before: dict[str, Any] | None = None) -> None:
        self.options = options
        self.found = before or {"rows": [], "dropped": [], "checks": [], "host": [], "start": START}
        self.longest: dict[str, float] = {}
        self.end = None if options.budget is None else self.found["start"] + options.budget

    def late(self, candidate: str) -> bool:
        """Whether no time is left for one more candidate that takes as long as the longest of its kind has."""
        return self.end is not None and time.time() + self.longest.get(candidate, 1.0) > self.end

    def measure(self, meter: Meter, row: Row, cache: int) -> dict[str, Any]:
        """What a row shows: ours, and each peer's time or why there is none."""
        out: dict[str, Any] = {"name": row.name, "nbytes": row.nbytes, "target": row.target, "peers": {}}
        ready: dict[str, Timed] = {}
        sets = sets_of(row, cache)
        prepare = {"ours": on_stream(row.ours), **row.peers}
        for name, make in prepare.items():
            if name != "ours" and self.late(name):
                out["peers"][name] = {"error": "dropped: no time is left"}
                continue
            start = time.time()
            try:
                ready[name] = make(meter, sets)
            except Exception as e:
                if name == "ours":
                    raise
                out["peers"][name] = {"error": said(e)}
            self.longest[name] = max(self.longest.get(name, 0.0), time.time() - start)
        seconds = meter.turns(ready)
        ours = seconds.pop("ours")
        share = row.nbytes / ours / meter.copy
        out |= {"seconds": ours, "by": ready["ours"].by, "share": share}
        if row.target is not None:
            out["met"] = share >= row.target
        for name, theirs in seconds.items():
            out["peers"][name] = {"seconds": theirs, "by": ready[name].by, "ratio": ours / theirs}
            if name == "torch":
                out["peers"][name]["met"] = ours <= row.most * theirs
        return out

    def rows(self, meter: Meter, rows: Iterator[Row], cache: int) -> None:
        done = {r["name"] for r in self.found["rows"]}
        for row in rows:
            if self.options.only not in row.name or row.name in done:
                continue
            if self.late("ours"):
                self.found["dropped"].append(row.name)
                continue
            self.found["begun"] = row.name
            try:
                result = self.measure(meter, row, cache)
            except Exception as e:
                traceback.print_exc(limit=-4)
                result = {"name": row.name, "error": said(e)}
            self.found["rows"].append(result)
            self.found.pop("begun")
            meter.cp.get_default_memory_pool().free_all_blocks()
            if "error" in result:
                self.go_on_afresh(meter.cp)

    def go_on_afresh(self, cp: Any) -> None:
        """An illegal access ends all that a process can do on its device: the rows that are left run in another in its
        place."""
        try:
            cp.cuda.Device().synchronize()
        except Exception:
            state = Path(f"/tmp/benchmark-gpu-{os.getpid()}.json")
            state.write_text(json.dumps(self.found))
            sys.stdout.flush()
            arguments = [a for a in sys.argv[1:] if not a.startswith("--resume=")]
            os.execv(sys.executable, [sys.executable, __file__, *arguments, f"--resume={state}"])

    def watch(self) -> None:
        """End the process half a minute after its time, whatever it waits for, with what it has found."""

        def stop() -> None:
            self.found["stopped"] = f"the time was over while {self.found.get('begun', 'it began')} ran"
            try:
                self.report()
                sys.stdout.flush()
            finally:
                os._exit(1)

        if self.end is not None:
            timer = threading.Timer(max(0.0, self.end + 30 - time.time()), stop)
            timer.daemon = True
            timer.start()

    def report(self) -> int:
        """Write table and JSON; the status of the run."""
        self.found["spent"] = time.time() - self.found["start"]
        if self.options.json:
            Path(self.options.json).write_text(json.dumps(self.found, indent=1))
        show(self.found)
        failed = [r for r in self.found["rows"] if "error" in r] + [c for c in self.found["checks"] if not c["ok"]]
        return 1 if failed or "stopped" in self.found else 0


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=160, markup=False, highlight=False)
    console.print(f"{found.get('device')}, copy {found.get('copy', 0) / 1e12:.2f} TB/s, {found['spent']:.0f} s")
    for name, there in found.get("versions", {}).items():
        console.print(f"{name} {there}" if there else f"{name}: missing, its columns are empty")
    for c in found["checks"]:
        mark = "✓" if c["ok"] else "✗ NOT AS IT SHOULD BE: do not believe the times"
        console.print(f"check: {c['name']}: {c['found']:.3g}, wanted {c['from']:g} to {c['to']:g} {mark}")
    table = Table("work", "time", "by", "TB/s", "of the copy", "target", "peers (our time over theirs)")
    for r in found["rows"]:
        if "error" in r:
            table.add_row(escape(r["name"]), "failed", "", "", "", "✗", escape(r["error"]))
            continue
        peers = []
        for name, p in r["peers"].items():
            mark = " ✗" if p.get("met") is False else ""
            peers.append(f"{name}: {escape(p['error'])}" if "error" in p else f"{name} {p['ratio']:.2f}{mark}")
        goal = "" if r["target"] is None else f"{r['target']:.0%} {'✓' if r['met'] else '✗'}"
        speed = r["nbytes"] / r["seconds"] / 1e12
        table.add_row(
            escape(r["name"]),
            f"{r['seconds'] * 1e6:.1f} us",
            r["by"],
            f"{speed:.2f}",
            f"{r['share']:.0%}",
            goal,
            ", ".join(peers),
        )
    for name in found["dropped"]:
        table.add_row(escape(name), "dropped", "", "", "", "", "no time was left")
    console.print(table)
    for h in found["host"]:
        times = ", ".join(f"{n} {us:.1f} us" for n, us in h.get("us", {}).items())
        console.print(f"{h['name']}: {h.get('error') or times} (target: {h['target']}) {'✓' if h.get('met') else '✗'}")
    if "stopped" in found:
        console.print(f"stopped: {found['stopped']}")


def missing() -> str | None:
    """What this benchmark needs and does not find."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'meshtape[cuda13]' (or cuda12)"
    return (
        None if cupy.is_available() else "CuPy is installed, but no CUDA driver with a device answers on this machine"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and dtypes, within 8 minutes")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--json", help="a file for all that is found")
    parser.add_argument("--budget", type=float, help=f"seconds that rows may begin in (with --quick: {QUICK:.0f})")
    parser.add_argument("--tiny", action="store_true", help="shapes of a few elements, which measure nothing")
    parser.add_argument("--resume", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        sys.exit(f"benchmarks/gpu.py measures kernels on a GPU, and there is none to measure on: {reason}")
    if options.quick and options.budget is None:
        options.budget = QUICK
    before = json.loads(Path(options.resume).read_text()) if options.resume else None
    run = Run(options, before)
    run.watch()
    cp = launch.runner().xp
    properties = cp.cuda.runtime.getDeviceProperties(0)
    torch, jax = importable("torch"), importable("jax")
    t = Torch(torch, not options.no_compile) if torch is not None and torch.cuda.is_available() else None
    versions = {"PyTorch with CUDA": t and torch.__version__, "JAX": jax and jax.__version__, "CuPy": cp.__version__}
    run.found |= {"device": properties["name"].decode(), "versions": versions, "tiny": options.tiny}
    meter = Meter(cp, options.tiny)
    run.found["checks"] = checks(meter)
    run.found["copy"] = meter.copy
    cp.get_default_memory_pool().free_all_blocks()
    run.found["host"] = []
    for line, target in ((overhead, "CuPy + 2 us"), (graphs, "graph 5 times faster than eager")):
        try:
            run.found["host"].append(line(cp))
        except Exception as e:
            run.found["host"].append({"name": line.__name__, "error": said(e), "target": target})
    cache = 0 if options.tiny else properties["l2CacheSize"]
    run.rows(meter, all_rows(Maker(), t, jax, options.quick, options.tiny), cache)
    return run.report()


if __name__ == "__main__":
    sys.exit(main())
