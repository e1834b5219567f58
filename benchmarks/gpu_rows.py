"""Rows of the table of kernels: norms, softmaxes, images, indices, random numbers, rotary positions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from gpu_clock import Peer
from gpu_peers import Torch, jax_peer, on_stream

import meshtape as mt
from meshtape.arrays.backends.host_sync import remember_range
from meshtape.arrays.core.dispatch import wrap
from meshtape.arrays.kernels import launch

EPS = 1e-5
BACKWARD = 0.8
"""Share of the copy that backward passes are to reach."""
LARGE = 64e6
"""Bytes from which arrays have a target: smaller ones are soon in the cache."""


class Row(NamedTuple):
    """One measurement: ``ours(*arrays)`` and each of the peers do the same work on one set of inputs."""

    name: str
    nbytes: int
    make: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Any]
    peers: Mapping[str, Peer]
    target: float | None = None  # of the copy's speed
    most: Mapping[str, float] = {"torch": 1.0}  # our time over that of peers


def op(name: str, **params: Any) -> Callable[..., Any]:
    """An op of ours on raw buffers."""
    fn = mt.OPS[name].overrides["cupy"]
    return lambda *args: fn(*args, **params)


def of_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours on raw buffers."""
    return lambda *bufs: fn(*map(wrap, bufs))


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

    def padding(self, rows: int, length: int) -> Any:
        """A mask of attention: half of each row or more is no padding."""
        lengths = self.rng.integers(length // 2, length + 1, (rows, 1, 1, 1))
        return self.xp.asarray(np.arange(length) < lengths)

    def integers(self, n: int, high: int) -> Any:
        """As indices that come from host memory: their check needs no wait."""
        host = self.rng.integers(0, high, n)
        return remember_range(self.xp.asarray(host), host)


def row_norm_rows(m: Maker, t: Torch | None, jax: Any, shape: tuple[int, int], d: np.dtype) -> Iterator[Row]:
    rows, width = shape
    size, label = rows * width * d.itemsize, f"{rows} x {width} {d.name}"
    target, back = (0.9, BACKWARD) if width >= 1024 and size >= LARGE else (None, None)
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
    target, back = (0.9, BACKWARD) if width >= 1024 and size >= LARGE else (None, None)
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
        both, most = peer | {"ours, atomic": on_stream(atomic)}, {"torch": 1.0, "ours, atomic": 2.0}
        yield Row(f"embedding gradient, in order, {label}", nbytes, make, gradient, both, None, most)
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
        from meshtape.arrays.kernels.scans import true_places

        yield Row(
            f"places of a mask, {n}",
            n + 8 * n // 2,
            lambda: (m.normal((n,), d) > 0,),
            true_places,
            {} if t is None else {"torch": t.wrap(lambda x: t.torch.nonzero(x))},
        )


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
