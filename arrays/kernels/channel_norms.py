"""``group_norm`` and ``batch_norm`` on CUDA, with the channels as the second dimension or the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import RowPlan, ceil_div, ladder, row_plan, vector_length
from .launch import NOTHING, contiguous, i64, in_step, named, runner, wide
from .row_norms import dtypes_of, pairs, sum_parts

GROUP, CHANNEL = "group_norm.cu", "channel_norm.cu"
_THREADS = 256


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d, o in pairs():
        for ends in (False, True):
            yield GROUP, named("group_norm_backward", d, o, ends)
            for rung in (*ladder(o.itemsize), (512, 0)):
                yield GROUP, named("group_norm_forward", d, o, *rung, ends)
        for v in (1, 16 // d.itemsize):
            for last in (False, True):
                yield CHANNEL, named("channel_sums", last, True, d, o, v)
                yield CHANNEL, named("linear", last, False, d, o, o, v)
                yield CHANNEL, named("linear", last, True, d, o, d, v)
    for d in KERNEL_FLOATS:
        for v in (1, 16 // d.itemsize):
            for last in (False, True):
                yield CHANNEL, named("channel_sums", last, False, d, d, v)
        for o in dict.fromkeys((d, wide(d))):
            yield CHANNEL, named("backward_factors", True, wide(d), o, o)
            yield CHANNEL, named("backward_factors", False, wide(d), o, wide(d))
            for join, r in ((False, wide(d)), *((True, r) for r in KERNEL_FLOATS)):
                yield CHANNEL, named("forward_factors", join, wide(d), o, r)


class ChannelLayout(NamedTuple):
    """An array of images as samples, channels and positions; ``last`` says whether the channels come last."""

    samples: int
    channels: int
    spatial: int
    last: bool

    def vector(self, itemsize: int, *arrays: Any) -> int:
        """Elements of a vector: of one channel, or of neighbouring ones."""
        run = self.channels if self.last else self.spatial
        return vector_length(run, [itemsize], [runner().address(a) for a in arrays])


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
    return [contiguous(a, dtype) for a in arrays]


# ----- three launches: sums, factors, and a pass that is linear in each element ---------------------------------------


_NO_RUNNING = (*(NOTHING,) * 4, np.float64(0), np.float64(0))


class _Sets(NamedTuple):
    """Sets of samples with statistics of their own, and in them groups of ``inside`` channels."""

    lay: ChannelLayout
    sets: int
    inside: int
    eps: float

    @property
    def all(self) -> int:
        """Channels of all sets."""
        return self.sets * self.lay.channels

    @property
    def numbers(self) -> tuple[Any, Any, Any]:
        return i64(self.inside), i64(self.lay.channels), i64(self.all)

    def sums(self, x: Any, g: Any = None) -> Any:
        """Sums of each channel of a set by shares, as many as keep the device busy: (channels of all sets, shares,
        numbers)."""
        r, lay = runner(), self.lay
        samples, positions = lay.samples // self.sets, 1
        # Where vectors cross the borders of channels, each element of a sample is a channel of its own at first.
        n = 16 // x.dtype.itemsize
        if not lay.last and lay.spatial % n and samples >= 8 * n and lay.channels * lay.spatial % n == 0:
            positions, lay = lay.spatial, ChannelLayout(lay.samples, lay.channels * lay.spatial, 1, True)
        vector = lay.vector(x.dtype.itemsize, x, *(() if g is None else (g,)))
        lanes = min(32, 1 << (ceil_div(lay.channels, vector) - 1).bit_length()) if lay.last else 1
        blocks = self.sets * ceil_div(lay.channels, lanes * vector if lay.last else 1)
        rows = ceil_div(samples * lay.spatial * lanes, 8 * _THREADS)
        shares = max(1, min(6 * r.properties().multiprocessors // blocks, rows, 256))  # whole waves of blocks
        partial = r.xp.empty((self.all, positions * shares, 5), wide(x.dtype))
        other = x if g is None else g
        kernel = named("channel_sums", lay.last, g is not None, x.dtype, other.dtype, vector)
        numbers = (i64(self.sets), i64(samples), i64(lay.channels), i64(lay.spatial), np.int32(lanes))
        r.launch(CHANNEL, kernel, (blocks, shares, 1), (_THREADS, 1, 1), (x, other, partial, *numbers))
        return partial

    def normalized(
        self, x: Any, mean: Any, var: Any, weight: Any, bias: Any, join: bool, running: tuple[Any, ...] = _NO_RUNNING
    ) -> Any:
        """The norm, by the mean and variance of each channel of a set, which are found first where ``join``; then
        ``running`` has the old and the new running ones, and the shares of the batch in these."""
        r, a, o = runner(), wide(x.dtype), weight.dtype
        partial = self.sums(x) if join else mean
        factors = r.xp.empty((3, self.all), a)
        inside = self.inside if join else _THREADS
        numbers = (i64(partial.shape[1] if join else 1), i64(inside), *self.numbers[1:], np.float64(self.eps))
        arguments = (partial, mean, var, weight, bias, factors, *numbers, *running)
        grid = (ceil_div(self.all, inside), 1, 1)
        kept = a if running is _NO_RUNNING else running[0].dtype
        r.launch(CHANNEL, named("forward_factors", join, a, o, kept), grid, (_THREADS, 1, 1), arguments)
        y = r.xp.empty(x.shape, o)
        self._linear(x, None, factors, y)
        return y

    def cotangents(self, g: Any, x: Any, weight: Any, statistics: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """Those of x, and of weight and bias from each set. A batch comes with its statistics and their cotangents."""
        r, a, o = runner(), wide(x.dtype), weight.dtype
        partial = self.sums(x, g)
        shares = partial.shape[1]
        kept = o if statistics else a
        sums, factors = r.xp.empty((self.sets, 2 * self.lay.channels), kept), r.xp.empty((4, self.all), a)
        lanes = max(1, min(1 << (self.inside - 1).bit_length(), _THREADS // (1 << (shares - 1).bit_length()), _THREADS))
        count = np.float64(self.lay.samples // self.sets * self.lay.spatial * self.inside)
        kernel = named("backward_factors", bool(statistics), a, o, kept)
        given = (*(statistics or (weight,) * 4), weight, sums, factors)
        numbers = (i64(shares), *self.numbers, np.int32(lanes), count, np.float64(self.eps))
        r.launch(CHANNEL, kernel, (self.all // self.inside, 1, 1), (_THREADS, 1, 1), (partial, *given, *numbers))
        dx = r.xp.empty(x.shape, x.dtype)
        self._linear(x, g, factors, dx)
        return dx, sums

    def _linear(self, x: Any, g: Any, factors: Any, out: Any) -> None:
        lay, other = self.lay, out if g is None else g
        vector = lay.vector(x.dtype.itemsize, x, other, out)
        if not lay.last and lay.spatial >= 16 // x.dtype.itemsize:  # a vector may end in the next channel
            vector = vector_length(x.size, [x.dtype.itemsize], [runner().address(a) for a in (x, other, out)])
        kernel = named("linear", lay.last, g is not None, x.dtype, other.dtype, out.dtype, vector)
        blocks = min(ceil_div(x.size // vector, _THREADS), 16 * runner().properties().multiprocessors)
        numbers = (i64(x.size), i64(lay.channels), i64(lay.spatial), i64(x.size // self.sets), i64(self.all))
        runner().launch(CHANNEL, kernel, (blocks, 1, 1), (_THREADS, 1, 1), (x, other, factors, out, *numbers))


# ----- group_norm -----------------------------------------------------------------------------------------------------


def _groups(x: Any, lay: ChannelLayout, num_groups: int, eps: float) -> tuple[_Sets, bool]:
    """Also whether a block for each group does: groups without gaps, and as many as keep the device busy or short
    ones."""
    blocks = lay.samples * num_groups
    few = blocks < runner().properties().multiprocessors and x.size // blocks > 64 * _THREADS
    return _Sets(lay, lay.samples, lay.channels // num_groups, eps), not lay.last and not few


def _a_row_each(kernel: str, size: tuple[int, ...], plan: RowPlan, s: _Sets, kept: list[Any], *arguments: Any) -> None:
    """Start a kernel of which a group is a row, and which keeps those of some arrays, x first. The third of its
    arguments is a parameter."""
    r, x, width = runner(), kept[0], s.inside * s.lay.spatial
    ends = width % plan.vector != 0 or r.address(x) % 16 != 0
    slots, shared = plan.kept(width, [a.dtype.itemsize for a in kept], r.properties().shared_memory)
    groups = s.lay.channels // s.inside
    numbers = (i64(s.sets), i64(groups), i64(s.inside), i64(s.lay.spatial), slots, np.float64(s.eps))
    name = named(kernel, x.dtype, arguments[2].dtype, *size, ends)
    r.launch(GROUP, name, plan.grid(s.sets * groups), plan.block, (*arguments, *numbers), shared)


@for_floats
def group_norm(x: Any, weight: Any, bias: Any, *, num_groups: int, axis: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.group_norm.GROUP_NORM`."""
    r = runner()
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, o = dtypes_of(x.dtype, weight.dtype, bias.dtype)
    (xs,), (w, b) = _as(d, x), _as(o, weight, bias)
    if not xs.size:
        return r.xp.empty(x.shape, out_dtype)
    s, block_each = _groups(xs, layout(x.shape, axis), num_groups, eps)
    if block_each:
        y = r.xp.empty(x.shape, o)
        xs, y = in_step(xs, y)
        plan = row_plan(s.inside * s.lay.spatial, o.itemsize, 16 // d.itemsize)
        _a_row_each("group_norm_forward", (plan.threads, plan.items), plan, s, [xs], xs, w, b, y)
    else:
        mean, var = r.xp.empty((2, s.all), wide(d))
        y = s.normalized(xs, mean, var, w, b, join=True)
    return y.astype(out_dtype, copy=False)


@for_floats
def group_norm_backward(g: Any, x: Any, weight: Any, *, num_groups: int, axis: int, eps: float) -> tuple[Any, Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.group_norm.GROUP_NORM_BACKWARD`."""
    r = runner()
    d, o = dtypes_of(x.dtype, g.dtype, weight.dtype)
    (xs,), (gs, w) = _as(d, x), _as(o, g, weight)
    if not xs.size:
        return r.xp.zeros(x.shape, x.dtype), *(r.xp.zeros(weight.shape, weight.dtype) for _ in range(2))
    s, block_each = _groups(xs, layout(x.shape, axis), num_groups, eps)
    if block_each:
        dx, sums = r.xp.empty(x.shape, d), r.xp.empty((s.sets, 2 * s.lay.channels), wide(d))
        xs, gs, dx = in_step(xs, gs, dx)
        plan = RowPlan(_THREADS, 0, 16 // d.itemsize, 1)
        _a_row_each("group_norm_backward", (), plan, s, [xs, gs], gs, xs, w, dx, sums)
    else:
        dx, sums = s.cotangents(gs, xs, w)
    dw, db = sum_parts(sums, weight.dtype).reshape(2, -1)
    return dx.astype(x.dtype, copy=False), dw, db


# ----- batch_norm -----------------------------------------------------------------------------------------------------


@for_floats
def batch_norm(
    x: Any, weight: Any, bias: Any, old_mean: Any, old_var: Any, *, axis: int, eps: float, momentum: float
) -> tuple[Any, ...]:
    """See :data:`meshtape.arrays.nn.norms.batch_norm.BATCH_NORM`."""
    r, lay = runner(), layout(x.shape, axis)
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, o = dtypes_of(x.dtype, weight.dtype, bias.dtype)
    (xs,), (w, b) = _as(d, x), _as(o, weight, bias)
    if not xs.size:
        mean, var = r.xp.zeros((2, lay.channels), wide(x.dtype))
        return r.xp.empty(x.shape, out_dtype), mean, var, old_mean.copy(), old_var.copy()
    count = lay.samples * lay.spatial
    shares = (np.float64(momentum), np.float64(momentum * (count / (count - 1) if count > 1 else 1.0)))
    kept = np.result_type(old_mean.dtype, old_var.dtype)
    mean, var, new_mean, new_var = (r.xp.empty(lay.channels, t) for t in (wide(d), wide(d), kept, kept))
    running = (*_as(kept, old_mean, old_var), new_mean, new_var, *shares)
    y = _Sets(lay, 1, 1, eps).normalized(xs, mean, var, w, b, True, running)
    dtypes = (out_dtype, wide(x.dtype), wide(x.dtype), old_mean.dtype, old_var.dtype)
    return tuple(a.astype(t, copy=False) for a, t in zip((y, mean, var, new_mean, new_var), dtypes, strict=True))


@for_floats
def batch_norm_inference(x: Any, mean: Any, var: Any, weight: Any, bias: Any, *, axis: int, eps: float) -> Any:
    """See :data:`meshtape.arrays.nn.norms.batch_norm.BATCH_NORM_INFERENCE`."""
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, o = dtypes_of(x.dtype, weight.dtype, bias.dtype)
    (xs,), (w, b) = _as(d, x), _as(o, weight, bias)
    if not xs.size:
        return runner().xp.empty(x.shape, out_dtype)
    mean, var = _as(wide(d), mean, var)
    y = _Sets(layout(x.shape, axis), 1, 1, eps).normalized(xs, mean, var, w, b, join=False)
    return y.astype(out_dtype, copy=False)


@for_floats
def batch_norm_backward(
    g: Any, g_mean: Any, g_var: Any, mean: Any, var: Any, x: Any, weight: Any, *, axis: int, eps: float
) -> tuple[Any, Any, Any]:
    """See :data:`meshtape.arrays.nn.norms.batch_norm.BATCH_NORM_BACKWARD`."""
    r = runner()
    d, o = dtypes_of(x.dtype, g.dtype, weight.dtype)
    (xs,), (gs, w) = _as(d, x), _as(o, g, weight)
    if not xs.size:
        return r.xp.zeros(x.shape, x.dtype), *(r.xp.zeros(weight.shape, weight.dtype) for _ in range(2))
    statistics = _as(wide(d), mean, var, g_mean, g_var)
    dx, sums = _Sets(layout(x.shape, axis), 1, 1, eps).cotangents(gs, xs, w, tuple(statistics))
    dw, db = sums.reshape(2, -1).astype(weight.dtype, copy=False)
    return dx.astype(x.dtype, copy=False), dw, db
