"""``group_norm`` and ``batch_norm`` on CUDA, with the channels as the second dimension or the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import MAX_GRID, ceil_div, vector_length
from .launch import contiguous, i64, named, runner, wide
from .row_norms import dtypes_of, pairs, sum_parts

GROUP, BATCH = "group_norm.cu", "batch_norm.cu"
_THREADS = 256


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d, o in pairs():
        vectors = (1, 16 // d.itemsize)
        for last in (False, True):
            for v in (1,) if last else vectors:
                yield GROUP, named("group_norm_forward", last, d, o, o, v)
                yield GROUP, named("group_norm_backward", last, d, o, o, v)
            yield from ((BATCH, named("batch_sums", last, d, o, v)) for v in (vectors[:1] if last else vectors))
            for v in vectors:
                yield BATCH, named("linear", last, False, d, o, o, v)
                yield BATCH, named("linear", last, True, d, o, d, v)
    for d in KERNEL_FLOATS:
        for last, v in ((True, 1), (False, 1), (False, 16 // d.itemsize)):
            yield BATCH, named("batch_moments", last, d, v)
    for a in dict.fromkeys(wide(d) for d in KERNEL_FLOATS):
        for name in ("merge_moments", "backward_factors", "forward_factors"):
            yield BATCH, named(name, a)


class ChannelLayout(NamedTuple):
    """An array of images as samples, channels and positions; ``last`` says whether the channels come last."""

    samples: int
    channels: int
    spatial: int
    last: bool

    @property
    def total(self) -> int:
        return self.samples * self.channels * self.spatial

    @property
    def numbers(self) -> tuple[Any, Any, Any]:
        return i64(self.samples), i64(self.channels), i64(self.spatial)

    def vector(self, itemsize: int, *arrays: Any) -> int:
        """Elements of a vector: of one channel, or of neighbouring ones."""
        run = self.channels if self.last else self.spatial
        return vector_length(run, [itemsize], [runner().address(a) for a in arrays])

    def summed(self, *arrays: Any) -> int:
        """Elements that a sum over a channel reads at once: of arrays with the channels second."""
        return 1 if self.last else self.vector(arrays[0].dtype.itemsize, *arrays)


def layout(shape: tuple[int, ...], axis: int) -> ChannelLayout:
    """How kernels see images of this shape. With one position a channel both forms are the same, and the last is
    faster.

    >>> layout((2, 3, 4, 5), 1), layout((2, 3), 1).last
    (ChannelLayout(samples=2, channels=3, spatial=20, last=False), True)
    """
    channels = shape[axis]
    spatial = math.prod(n for i, n in enumerate(shape) if i not in (0, axis))
    return ChannelLayout(shape[0], channels, spatial, axis == len(shape) - 1 or spatial == 1)


def _as(dtype: np.dtype, *arrays: Any) -> list[Any]:
    return [contiguous(a.astype(dtype, copy=False)) for a in arrays]


# ----- group_norm -----------------------------------------------------------------------------------------------------


def _group_numbers(x: Any, lay: ChannelLayout, num_groups: int, eps: float) -> tuple[Any, ...]:
    return i64(lay.samples), i64(num_groups), i64(lay.channels // num_groups), i64(lay.spatial), np.float64(eps)


@for_floats
def group_norm(x: Any, weight: Any, bias: Any, *, num_groups: int, axis: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.group_norm.GROUP_NORM`."""
    r = runner()
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, o = dtypes_of(x.dtype, weight.dtype, bias.dtype)
    (xs,), (w, b) = _as(d, x), _as(o, weight, bias)
    y = r.xp.empty(x.shape, o)
    if xs.size:
        lay = layout(x.shape, axis)
        vector = lay.summed(xs, y)
        grid, block = (min(lay.samples * num_groups, MAX_GRID), 1, 1), (_THREADS, 1, 1)
        kernel = named("group_norm_forward", lay.last, d, o, o, vector)
        r.launch(GROUP, kernel, grid, block, (xs, w, b, y, *_group_numbers(xs, lay, num_groups, eps)))
    return y.astype(out_dtype, copy=False)


@for_floats
def group_norm_backward(g: Any, x: Any, weight: Any, *, num_groups: int, axis: int, eps: float) -> tuple[Any, Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.group_norm.GROUP_NORM_BACKWARD`."""
    r = runner()
    d, o = dtypes_of(x.dtype, g.dtype, weight.dtype)
    (xs,), (gs, w) = _as(d, x), _as(o, g, weight)
    if not xs.size:
        return r.xp.zeros(x.shape, x.dtype), *(r.xp.zeros(weight.shape, weight.dtype) for _ in range(2))
    lay = layout(x.shape, axis)
    dx = r.xp.empty(x.shape, d)
    partial = r.xp.empty((lay.samples, 2 * lay.channels), wide(d))
    vector = lay.summed(xs, gs, dx)
    grid, block = (min(lay.samples * num_groups, MAX_GRID), 1, 1), (_THREADS, 1, 1)
    kernel = named("group_norm_backward", lay.last, d, o, o, vector)
    r.launch(GROUP, kernel, grid, block, (gs, xs, w, dx, partial, *_group_numbers(xs, lay, num_groups, eps)))
    dw, db = sum_parts(partial, weight.dtype).reshape(2, -1)
    return dx.astype(x.dtype, copy=False), dw, db


# ----- batch_norm -----------------------------------------------------------------------------------------------------


def _shares(lay: ChannelLayout) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and block of the kernels that sum over the batch: as many shares as keep the device busy."""
    busy = 8 * runner().properties().multiprocessors
    if lay.last:
        tiles = ceil_div(lay.channels, 32)
        shares = min(ceil_div(busy, tiles), ceil_div(lay.samples * lay.spatial, 64))
        return (tiles, max(1, min(shares, 256)), 1), (32, 8, 1)
    shares = min(ceil_div(busy, lay.channels), ceil_div(lay.samples * lay.spatial, 8 * _THREADS))
    return (lay.channels, max(1, min(shares, 256)), 1), (_THREADS, 1, 1)


def _a_channel_each(kernel: str, channels: int, *arguments: Any) -> None:
    grid, block = (ceil_div(channels, _THREADS), 1, 1), (_THREADS, 1, 1)
    runner().launch(BATCH, kernel, grid, block, arguments)


def _moments(x: Any, lay: ChannelLayout) -> tuple[Any, Any]:
    """Mean and (biased) variance of each channel of a batch that is not empty."""
    r, a = runner(), wide(x.dtype)
    grid, block = _shares(lay)
    partial = r.xp.empty((grid[1], lay.channels, 3), a)
    r.launch(BATCH, named("batch_moments", lay.last, x.dtype, lay.summed(x)), grid, block, (x, partial, *lay.numbers))
    mean, var = (r.xp.empty(lay.channels, a) for _ in range(2))
    numbers = (i64(grid[1]), i64(lay.channels))
    _a_channel_each(named("merge_moments", a), lay.channels, partial, mean, var, *numbers)
    return mean, var


def _linear(x: Any, g: Any, factors: Any, out: Any, lay: ChannelLayout) -> None:
    arrays = [a for a in (x, g, out) if a is not None]
    vector = lay.vector(x.dtype.itemsize, *arrays)
    other = out.dtype if g is None else g.dtype
    kernel = named("linear", lay.last, g is not None, x.dtype, other, out.dtype, vector)
    blocks = min(ceil_div(lay.total // vector, _THREADS), 16 * runner().properties().multiprocessors)
    arguments = (x, x if g is None else g, factors, out, i64(lay.total), i64(lay.channels), i64(lay.spatial))
    runner().launch(BATCH, kernel, (max(blocks, 1), 1, 1), (_THREADS, 1, 1), arguments)


def _normalized(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, lay: ChannelLayout, o: np.dtype, eps: float
) -> Any:
    r, a = runner(), wide(x.dtype)
    factors = r.xp.empty((3, lay.channels), a)
    arrays = _as(a, mean, var, weight, bias)
    _a_channel_each(named("forward_factors", a), lay.channels, *arrays, factors, i64(lay.channels), np.float64(eps))
    y = r.xp.empty(x.shape, o)
    _linear(x, None, factors, y, lay)
    return y


@for_floats
def batch_norm(x: Any, weight: Any, bias: Any, *, axis: int, eps: float) -> tuple[Any, Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.batch_norm.BATCH_NORM`."""
    r, lay = runner(), layout(x.shape, axis)
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, o = dtypes_of(x.dtype, weight.dtype, bias.dtype)
    (xs,) = _as(d, x)
    stats = wide(x.dtype)
    if not xs.size:
        return (r.xp.empty(x.shape, out_dtype), *(r.xp.zeros(lay.channels, stats) for _ in range(2)))
    mean, var = _moments(xs, lay)
    y = _normalized(xs, mean, var, weight, bias, lay, o, eps)
    return y.astype(out_dtype, copy=False), mean.astype(stats, copy=False), var.astype(stats, copy=False)


@for_floats
def batch_norm_inference(x: Any, mean: Any, var: Any, weight: Any, bias: Any, *, axis: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.batch_norm.BATCH_NORM_INFERENCE`."""
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, o = dtypes_of(x.dtype, weight.dtype, bias.dtype)
    (xs,) = _as(d, x)
    if not xs.size:
        return runner().xp.empty(x.shape, out_dtype)
    y = _normalized(xs, mean, var, weight, bias, layout(x.shape, axis), o, eps)
    return y.astype(out_dtype, copy=False)


@for_floats
def batch_norm_backward(
    g: Any, g_mean: Any, g_var: Any, x: Any, weight: Any, *, axis: int, eps: float
) -> tuple[Any, Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.batch_norm.BATCH_NORM_BACKWARD`."""
    r, lay = runner(), layout(x.shape, axis)
    d, o = dtypes_of(x.dtype, g.dtype)
    a = wide(d)
    (xs,), (gs,) = _as(d, x), _as(o, g)
    if not xs.size:
        return r.xp.zeros(x.shape, x.dtype), *(r.xp.zeros(weight.shape, weight.dtype) for _ in range(2))
    mean, var = _moments(xs, lay)
    grid, block = _shares(lay)
    partial = r.xp.empty((grid[1], 2 * lay.channels), a)
    arguments = (gs, xs, mean, var, partial, *lay.numbers, np.float64(eps))
    r.launch(BATCH, named("batch_sums", lay.last, d, o, lay.summed(xs, gs)), grid, block, arguments)
    sums = sum_parts(partial, a)
    factors = r.xp.empty((4, lay.channels), a)
    given = _as(a, weight, g_mean, g_var)
    count = np.float64(lay.samples * lay.spatial)
    _a_channel_each(
        named("backward_factors", a),
        lay.channels,
        *(sums, mean, var, *given, factors, count, i64(lay.channels), np.float64(eps)),
    )
    dx = r.xp.empty(x.shape, d)
    _linear(xs, gs, factors, dx, lay)
    dw, db = sums.reshape(2, -1).astype(weight.dtype, copy=False)
    return dx.astype(x.dtype, copy=False), dw, db
