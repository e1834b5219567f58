"""The fused kernels against the memory of the GPU, and against PyTorch, Triton's compiler in it, and JAX: ``python benchmarks/gpu.py``.

For each kernel and shape: the bytes that it must move (each input read once, each output written once) over its time, as a share
of what a device-to-device copy moves in the same run; and its time over that of each peer that can be imported. Times are medians
between CUDA events, of calls in turns over inputs that together exceed the second-level cache several times. ``--quick`` takes
fewer shapes, ``--only NAME`` the rows whose name contains it.

Targets (H200): 90 % of the copy for rows of 1024 and more, never slower than PyTorch; the deterministic gradient of an embedding
within twice the atomic one; no more than 2 microseconds over CuPy for an op on eight elements; a step of a hundred small ops as a CUDA
graph five times faster than eager.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import meshtape as mt
from meshtape.arrays.kernels import launch

SHAPES = (
    (4096, 256),
    (4096, 1024),
    (4096, 4096),
    (4096, 8192),
    (16384, 4096),
    (16384, 16384),
    (4097, 1001),
    (1000, 5003),
)
DTYPES = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))
IMAGES = ((64, 256, 28, 28), (32, 64, 112, 112))
EPS = 1e-5


class Row(NamedTuple):
    """One measurement: ``ours(*arrays)`` and each ``peers[name](*arrays)`` do the same work on one set of inputs."""

    name: str
    nbytes: int
    make: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Any]
    peers: Mapping[str, Callable[..., Any]]
    target: float | None = None  # of the copy's speed


def op(name: str, **params: Any) -> Callable[..., Any]:
    """An op of ours on raw buffers."""
    fn = mt.OPS[name].overrides["cupy"]
    return lambda *args: fn(*args, **params)


# ----- peers ------------------------------------------------------------------------------------------------------------


def importable(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


class Torch:
    """PyTorch's functions on buffers of ours (shared through DLPack), eager or compiled (by Triton, on a GPU)."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def of(self, a: Any) -> Any:
        if a.dtype == ml_dtypes.bfloat16:
            return self.torch.from_dlpack(a.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_dlpack(a)

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        seen: dict[int, Any] = {}

        def call(*arrays: Any) -> Any:
            key = id(arrays[0])
            if key not in seen:
                seen[key] = [self.of(a) for a in arrays]
            return fn(*seen[key])

        return call

    def pair(self, fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        return {"torch": self.wrap(fn), "torch compiled": self.wrap(self.torch.compile(fn))}

    def backward(self, fn: Callable[..., Any], wanted: Sequence[int]) -> dict[str, Callable[..., Any]]:
        """The backward pass alone: the forward pass is made once for each set of inputs. The cotangent is the first array."""

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            seen: dict[int, Any] = {}

            def call(*arrays: Any) -> Any:
                key = id(arrays[0])
                if key not in seen:
                    g, *args = (self.of(a) for a in arrays)
                    leaves = [args[i].requires_grad_() for i in wanted]
                    seen[key] = forward(*args), leaves, g
                out, leaves, g = seen[key]
                return self.torch.autograd.grad(out, leaves, g, retain_graph=True)

            return call

        return {"torch": make(fn), "torch compiled": make(self.torch.compile(fn))}


def jax_peer(jax: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    jitted, seen = jax.jit(fn), {}

    def call(*arrays: Any) -> Any:
        key = id(arrays[0])
        if key not in seen:
            seen[key] = [jax.dlpack.from_dlpack(a) for a in arrays]
        return jax.block_until_ready(jitted(*seen[key]))

    return call


# ----- rows -------------------------------------------------------------------------------------------------------------


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
    target = 0.9 if width >= 1024 else None
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
        target,
    )
    yield Row(
        f"rms_norm, {label}",
        2 * size,
        lambda: (x(), w()),
        op("rms_norm", **params),
        {} if t is None else t.pair(rms),
        target,
    )
    yield Row(
        f"rms_norm backward, {label}",
        3 * size,
        lambda: (x(), x(), w()),
        op("rms_norm_backward", **params),
        {} if t is None else t.backward(rms, (0, 1)),
        target,
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
    target = 0.9 if width >= 1024 else None
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
            target,
        )
    params = {"ignore_index": None, "label_smoothing": 0.0}
    loss = None if t is None else (lambda x, y: F.cross_entropy(x, y, reduction="none"))
    yield Row(
        f"cross_entropy, {label}",
        size,
        lambda: (m.normal(shape, d), m.integers(rows, width)),
        op("cross_entropy", **params),
        {} if t is None else t.pair(loss),
        target,
    )
    yield Row(
        f"cross_entropy backward, {label}",
        2 * size,
        lambda: (m.normal((rows,), launch.wide(d)), m.normal(shape, d), m.integers(rows, width)),
        op("cross_entropy_backward", **params),
        {}
        if t is None
        else t.backward(lambda x, y: F.cross_entropy(x.float() if d.itemsize == 2 else x, y, reduction="none"), (0,)),
        target,
    )


def image_rows(m: Maker, t: Torch | None, shape: tuple[int, ...], d: np.dtype, last: bool) -> Iterator[Row]:
    n, c, h, w = shape
    groups, axis = 32 if c % 32 == 0 else 2, 3 if last else 1
    own = (n, h, w, c) if last else shape
    size, label = n * c * h * w * d.itemsize, f"{'NHWC' if last else 'NCHW'} {' x '.join(map(str, own))} {d.name}"
    group, one = {"num_groups": groups, "axis": axis, "eps": EPS}, {"axis": axis, "eps": EPS}
    peers: dict[str, dict[str, Callable[..., Any]]] = {}
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
    yield Row(
        f"batch_norm, {label}", 3 * size, lambda: (x(), p(), p()), op("batch_norm", **one), peers.get("batch_norm", {})
    )
    backward = mt.OPS["batch_norm_backward"].overrides["cupy"]

    def with_no_cotangent_of_statistics(g: Any, x: Any, w: Any, b: Any) -> Any:
        zero = launch.runner().xp.zeros(c, statistic)
        return backward(g, zero, zero, x, w, **one)

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
        yield Row(f"embedding gradient, in order, {label}", nbytes, make, gradient, peer | {"ours, atomic": atomic})
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
    from meshtape.arrays.kernels.compact import true_places

    yield Row(
        f"places of a mask, {n}",
        n + 8 * n // 2,
        lambda: (m.normal((n,), np.dtype(np.float32)) > 0,),
        true_places,
        {} if t is None else {"torch": t.wrap(lambda x: t.torch.nonzero(x))},
    )


def all_rows(m: Maker, t: Torch | None, jax: Any, quick: bool) -> Iterator[Row]:
    """Every row of the table."""
    for d in DTYPES[:2] if quick else DTYPES:
        for shape in SHAPES[1:4:2] if quick else SHAPES:
            yield from row_norm_rows(m, t, jax, shape, d)
            yield from softmax_rows(m, t, jax, shape, d)
        for shape in IMAGES[:1] if quick else IMAGES:
            for last in (False, True):
                yield from image_rows(m, t, shape, d, last)
        yield from index_rows(m, t, 100_000, 50_000, 256, d)
        yield from random_rows(m, t, 1 << 26, d)


# ----- measuring --------------------------------------------------------------------------------------------------------


def seconds(cp: Any, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]], rounds: int = 30) -> float:
    """Median of one call between two events, over all sets of inputs in turns."""
    for _ in range(3):
        for s in sets:
            fn(*s)
    cp.cuda.Device().synchronize()
    found = []
    for i in range(rounds):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        fn(*sets[i % len(sets)])
        stop.record()
        stop.synchronize()
        found.append(cp.cuda.get_elapsed_time(start, stop) * 1e-3)
    return statistics.median(found)


def sets_of(cp: Any, row: Row, cache: int) -> list[tuple[Any, ...]]:
    """Inputs that together exceed the second-level cache four times, up to eight sets."""
    count = max(2, min(8, -(-4 * cache // max(row.nbytes, 1))))
    return [row.make() for _ in range(count)]


def copy_speed(cp: Any) -> float:
    """Bytes read and written per second by a copy of a gigabyte on the device."""
    a, b = (cp.empty(1 << 28, cp.float32) for _ in range(2))
    return 2 * a.nbytes / seconds(cp, lambda: cp.copyto(b, a), [()])


def overhead_lines(cp: Any) -> list[str]:
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
    mark = "✓" if ours <= theirs + 2 else "✗"
    return [f"x + x, 8 elements: {ours:.1f} us, CuPy {theirs:.1f} us (target: CuPy + 2 us) {mark}"]


def small_step(x: Any, w: Any, b: Any) -> Any:
    """A hundred small ops: twenty norms, each with four elementwise ops behind it."""
    for _ in range(20):
        h = mt.nn.layer_norm(x, x.shape[-1], w, b)
        x = mt.tanh(h * 1.01) + x - 0.5
    return x


def graph_lines(cp: Any) -> list[str]:
    """Microseconds of a step of a hundred small ops, to the end on the device: eager, compiled, and replayed as a CUDA graph."""
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

    eager, compiled = step_time(small_step), step_time(mt.compile(small_step))
    graph = step_time(mt.compile(small_step, cuda_graph=True))
    mark = "✓" if eager >= 5 * graph else "✗"
    return [
        f"a step of 100 small ops: eager {eager:.0f} us, compiled {compiled:.0f} us, as a CUDA graph {graph:.0f} us: "
        f"{eager / graph:.1f} times faster than eager (target: 5) {mark}"
    ]


def missing() -> str | None:
    """What this benchmark needs and does not find."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'meshtape[cuda13]' (or cuda12)"
    return (
        None if cupy.is_available() else "CuPy is installed, but no CUDA driver with a device answers on this machine"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes and dtypes")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"benchmarks/gpu.py measures kernels on a GPU, and there is none to measure on: {reason}")
    from rich.console import Console
    from rich.table import Table

    cp = launch.runner().xp
    properties = cp.cuda.runtime.getDeviceProperties(0)
    copy = copy_speed(cp)
    torch, jax = importable("torch"), importable("jax")
    t = Torch(torch) if torch is not None and torch.cuda.is_available() else None
    console = Console(width=150)
    console.print(f"{properties['name'].decode()}, copy {copy / 1e12:.2f} TB/s")
    for name, there in (("PyTorch with CUDA", t), ("JAX", jax)):
        if there is None:
            console.print(f"{name}: missing, its columns are empty")
    table = Table("work", "time", "TB/s", "of the copy", "target", "peers (our time over theirs)")
    for row in all_rows(Maker(), t, jax, options.quick):
        if options.only not in row.name:
            continue
        sets = sets_of(cp, row, properties["l2CacheSize"])
        ours = seconds(cp, row.ours, sets)
        speed = row.nbytes / ours
        peers = []
        for name, fn in row.peers.items():
            try:
                theirs = seconds(cp, fn, sets)
            except Exception as e:  # a peer that cannot do this work is named, and does not end the run
                peers.append(f"{name}: {type(e).__name__}")
            else:
                peers.append(f"{name} {ours / theirs:.2f}{' ✗' if name == 'torch' and ours > theirs else ''}")
        goal = "" if row.target is None else f"{row.target:.0%} {'✓' if speed >= row.target * copy else '✗'}"
        table.add_row(
            row.name, f"{ours * 1e6:.1f} us", f"{speed / 1e12:.2f}", f"{speed / copy:.0%}", goal, ", ".join(peers)
        )
        del sets
        cp.get_default_memory_pool().free_all_blocks()
    console.print(table)
    for line in (*overhead_lines(cp), *graph_lines(cp)):
        console.print(line)


if __name__ == "__main__":
    main()
