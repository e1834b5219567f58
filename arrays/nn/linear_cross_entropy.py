"""The cross-entropy of ``hidden @ weight`` as an op that never holds all logits, and its backward op.

Both make the logits in tiles of some rows and some classes. The largest logit of each row is kept, and the sum of its
exponentials: with them the backward op needs a tile alone for its part of the softmax, at the price of one more
product. The decompositions are the product and the cross-entropy as they stand; they serve derivatives of higher order,
and classes that are split over ranks.

No logit is rounded to two bytes: short floats are multiplied in float32, or on a GPU as they are, with sums and results
in float32. There the slopes of the logits are rounded to the operands' dtype, to be multiplied with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backends import cublaslt
from ..backends.memory_pool import fresh
from ..backends.row_blocks import row_sums
from ..backends.row_blocks import wide as _wide
from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import DTypeError, ShapeError
from ..core.op import Op, ShapeDtype
from ..kernels.launch import contiguous, runner
from ..kernels.softmaxes import Targets, TiledLosses, slopes
from ..ops.manipulation import astype, reshape
from ..ops.matmul import MATMUL, matmul
from .cross_entropy import _PARAMS, _decompose, _looked_up, slope_of
from .softmax import softmax, softmax_of_rows

TILE = {"numpy": 1 << 24, "cupy": 1 << 26}
"""Bytes of a tile: on a CPU it stays in cache."""
STEP = 128
"""Rows and classes of the tiles of a GPU are a multiple of it: so that all their rows begin where wide accesses may."""
WHOLE = 1 << 26
"""Bytes of logits up to which these are kept: computing them anew takes a third more time."""


def linear(x: Array, w: Array) -> Array:
    """``x @ w`` for ``x`` of shape ``(*batch, inputs)``, on a mesh as one product of matrices.

    As a product of stacks the gradient of ``w`` would be one matrix a row of the batch, and their sum, as its rule
    leaves split dimensions apart. Where rows of the flattened ``x`` would not lie as those of ``x`` do (a split
    sequence, an uneven split of the batch) it stays a stack.
    """
    *batch, inputs = x.shape
    here = x.sharding
    if here is None or not batch:
        return x @ w
    parts = math.prod(here.mesh.sizes[a] for a in here.layout.axes_of(0))
    if any(here.layout.axes_of(d) for d in range(1, len(batch))) or batch[0] % parts:
        return x @ w
    return reshape(reshape(x, (math.prod(batch), inputs)) @ w, (*batch, w.shape[1]))


def _common(hidden: Any, weight: Any) -> np.dtype:
    dtype = result_type(hidden.dtype, weight.dtype)
    if dtype.kind in "biuc":
        raise DTypeError(f"[linear_cross_entropy] hidden and weight must be real floats, got {dtype.name}")
    return dtype


def _cut(rows: int, classes: int, tile: int, step: int = 1) -> tuple[list[slice], list[slice]]:
    """The slices of rows and of classes that make tiles of ``tile`` elements or so."""
    height = max(math.isqrt(tile), tile // max(classes, 1))
    height = -(-rows // -(-rows // height)) if rows else 1  # rows are dealt evenly
    height = -(-height // step) * step
    width = max(step, tile // height // step * step)
    ends = (rows, height), (classes, width)
    return tuple([[slice(i, min(i + n, end)) for i in range(0, end, n)] for end, n in ends])


class _Tiles:
    """The operands as matrices of the dtype in which products are made, and the slices of a tile's rows and classes."""

    def __init__(self, xp: Any, hidden: Any, weight: Any, labels: Any, ignore_index: int | None) -> None:
        # Products of short floats, too, are made in float32: no logit is rounded to two bytes.
        self.xp, self.wide = xp, _wide(_common(hidden, weight))
        rows, self.classes = labels.size, weight.shape[1]
        self.hidden = hidden.reshape(rows, hidden.shape[-1]).astype(self.wide, copy=False)
        self.labels, self.valid, self.ignored = _looked_up(xp, labels.reshape(-1), self.classes, ignore_index)
        self.labels = self.labels.astype(np.intp, copy=False)
        self.rows, self.columns = _cut(rows, self.classes, TILE["numpy"] // self.wide.itemsize)

    def product(self, x: Any, y: Any) -> Any:
        return np.matmul(x, y, fresh((len(x), y.shape[1]), self.wide))

    def targets(self, b: slice, c: slice) -> tuple[Any, tuple[Any, Any]]:
        """Which rows have their label in a tile, and an index of one element a row: that of the label."""
        labels = self.labels[b]
        at = self.xp.clip(labels, c.start, c.stop - 1)
        return at == labels, (self.xp.arange(len(at)), at - c.start)


def _linear_cross_entropy(
    xp: Any, hidden: Any, weight: Any, labels: Any, ignore_index: int | None, label_smoothing: float
) -> Any:
    t = _Tiles(xp, hidden, weight, labels, ignore_index)
    picked, level = xp.zeros(labels.size, t.wide), xp.zeros(labels.size, np.float64)
    shifts, sums = (xp.zeros((max(len(t.columns), 1), labels.size), t.wide) for _ in range(2))  # of each tile
    with np.errstate(all="ignore"):
        for i, c in enumerate(t.columns):
            w = weight[:, c].astype(t.wide, copy=False)
            for b in t.rows:
                z = t.product(t.hidden[b], w)
                inside, at = t.targets(b, c)
                picked[b] = xp.where(inside, z[at], picked[b])
                if label_smoothing:
                    level[b] += row_sums(xp, z)[:, 0]
                _, shifts[i, b], sums[i, b] = softmax_of_rows(xp, z, masked=False)
        shift = xp.where(sums == 0, -np.inf, shifts).max(axis=0)
        shift = xp.where(xp.isfinite(shift), shift, 0)
        # What is nothing or infinite stays so: the factor may be the other.
        total = xp.where((sums == 0) | xp.isinf(sums), sums, sums * xp.exp(shifts - shift)).sum(axis=0)
        # Less the shift first: beside a large one a logarithm has no digits.
        losses = (1 - label_smoothing) * (shift - picked) + xp.log(total)
        if label_smoothing:
            losses += label_smoothing * (shift - level / t.classes)
    if t.valid is not None:
        losses = xp.where(t.valid, losses, xp.where(t.ignored, 0, np.nan))
        shift, total = xp.where(t.valid, shift, 0), xp.where(t.valid, total, 1)
    return tuple([a.astype(t.wide, copy=False).reshape(labels.shape) for a in (losses, shift, total)])


def _linear_cross_entropy_backward(
    xp: Any, g: Any, *operands: Any, ignore_index: int | None, label_smoothing: float
) -> Any:
    hidden, weight, labels, shift, total = operands
    t = _Tiles(xp, hidden, weight, labels, ignore_index)
    g, shift, total = (a.reshape(-1).astype(t.wide, copy=False) for a in (g, shift, total))
    if t.valid is not None:
        g = xp.where(t.valid, g, 0)
    d_hidden = xp.zeros(t.hidden.shape, t.wide)
    d_weight = xp.empty_like(weight)
    with np.errstate(all="ignore"):
        scale, hit, even = g / total, (1 - label_smoothing) * g, label_smoothing / max(t.classes, 1) * g
        # Selected, not multiplied: NaN in a sample that does not count must not leak.
        silent = None if t.valid is None else g == 0
        for c in t.columns:
            w, dw = weight[:, c].astype(t.wide, copy=False), 0
            for b in t.rows:
                z = t.product(t.hidden[b], w)
                z -= shift[b, None]
                xp.exp(z, out=z)
                z *= scale[b, None]
                inside, at = t.targets(b, c)
                z[at] -= xp.where(inside, hit[b], 0)
                if label_smoothing:
                    z -= even[b, None]
                if silent is not None:
                    xp.copyto(z, 0, where=silent[b, None])
                d_hidden[b] += t.product(z, w.T)
                dw = dw + t.product(t.hidden[b].T, z)
            d_weight[:, c] = dw
    return d_hidden.astype(hidden.dtype, copy=False).reshape(hidden.shape), d_weight


# ----- on a GPU -------------------------------------------------------------------------------------------------------


def _times(x: Any, y: Any, out: Any = None) -> Any:
    """``x @ y`` in float32 at least, added to ``out`` where that is given; short floats are multiplied as they are."""
    dtype = _wide(x.dtype)
    found = cublaslt.product(x, y, dtype=dtype, out=out, add=out is not None)
    if found is None:
        found = MATMUL.bind(runner().xp)(*(a.astype(dtype, copy=False) for a in (x, y)))
        if out is not None:
            out += found
            return out
    return found


class _OnGPU:
    """The operands as matrices of the dtype that is multiplied, and the slices of a tile's rows and classes."""

    def __init__(self, hidden: Any, weight: Any, labels: Any, *losses: Any) -> None:
        self.wide = _wide(_common(hidden, weight))
        self.weight, dtype = weight, hidden.dtype if hidden.dtype == weight.dtype else self.wide
        self.hidden = hidden.reshape(labels.size, hidden.shape[-1]).astype(dtype, copy=False)
        self.targets = Targets.of(labels, weight.shape[1], *losses)
        self.rows, self.columns = _cut(labels.size, weight.shape[1], TILE["cupy"] // self.wide.itemsize, STEP)

    def of_classes(self, c: slice) -> Any:
        """Their part of the weight, where it lies if it can."""
        return self.weight[:, c].astype(self.hidden.dtype, copy=False)


def _on_gpu(hidden: Any, weight: Any, labels: Any, *, ignore_index: int | None, label_smoothing: float) -> Any:
    t = _OnGPU(hidden, weight, labels, ignore_index, label_smoothing)
    losses = TiledLosses(t.targets, t.columns[0].stop if t.columns else 1, t.wide)
    for c in t.columns:
        w = t.of_classes(c)
        for b in t.rows:
            losses.show(_times(t.hidden[b], w), b, c.start)
    return tuple([a.reshape(labels.shape) for a in losses.results()])


def _within_float16(g: Any) -> tuple[Any, Any]:
    """``g`` times a power of two, so that the largest is about 2**15, and the inverse of that power: for most slopes of
    a mean over some thousands of rows float16 has no digits."""
    xp = runner().xp
    top = xp.where(xp.isfinite(g), abs(g), 0).max()
    power = xp.clip(15 - xp.frexp(top)[1], -100, 100)
    return xp.ldexp(g, power), xp.ldexp(xp.ones_like(top), -power)


def _backward_on_gpu(g: Any, *operands: Any, ignore_index: int | None, label_smoothing: float) -> Any:
    hidden, weight, labels, shift, total = operands
    t, xp = _OnGPU(hidden, weight, labels, ignore_index, label_smoothing), runner().xp
    of_rows = [contiguous(a.reshape(-1).astype(t.wide, copy=False)) for a in (g, shift, total)]
    d_hidden, d_weight, inverse = xp.zeros(t.hidden.shape, t.wide), xp.empty_like(weight), None
    if t.hidden.dtype == np.float16 and labels.size:
        of_rows[0], inverse = _within_float16(of_rows[0])
    across = weight.T.flags.c_contiguous  # a transposed embedding, whose cotangent will lie as it does
    for c in t.columns:
        w, dw = t.of_classes(c), None
        for b in t.rows:
            h, targets = t.hidden[b], t.targets._replace(labels=t.targets.labels[b])
            s = slopes(_times(h, w), targets, [a[b] for a in of_rows], h.dtype, c.start, in_place=True)
            _times(s, w.T, d_hidden[b])
            dw = _times(*((s.T, h) if across else (h.T, s)), dw)
            del s  # before the next tile is made
        if inverse is not None:
            dw *= inverse
        (d_weight.T[c] if across else d_weight[:, c])[...] = 0 if dw is None else dw
    if inverse is not None:
        d_hidden *= inverse
    return d_hidden.astype(hidden.dtype, copy=False).reshape(hidden.shape), d_weight


# ----- ops ------------------------------------------------------------------------------------------------------------


def _widened(*arrays: Array) -> list[Array]:
    return [astype(a, _wide(a.dtype), copy=False) for a in arrays]


def _decompose_whole(
    hidden: Array, weight: Array, labels: Array, ignore_index: int | None, label_smoothing: float
) -> tuple[Array, ...]:
    return _decompose(linear(*_widened(hidden, weight)), labels, ignore_index, label_smoothing)


def _decompose_whole_backward(
    g: Array,
    hidden: Array,
    weight: Array,
    labels: Array,
    *_saved: Array,
    ignore_index: int | None,
    label_smoothing: float,
) -> tuple[Array, Array]:
    h, w = _widened(hidden, weight)
    logits = linear(h, w)
    slope = slope_of(g, softmax(logits), labels, ignore_index, label_smoothing)
    dw = matmul(reshape(h, (labels.size, w.shape[0])).T, reshape(slope, (labels.size, w.shape[1])))
    return astype(linear(slope, w.T), hidden.dtype, copy=False), astype(dw, weight.dtype, copy=False)


def _infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShapeDtype, ...]:
    hidden, weight, labels = args
    if len(weight.shape) != 2 or hidden.shape != (*labels.shape, weight.shape[0]):
        raise ShapeError(
            f"[{op.name}] hidden {hidden.shape}, weight {weight.shape} and labels {labels.shape} are no (*batch, d), "
            "(d, classes) and (*batch,)"
        )
    wide = _wide(_common(hidden, weight))
    return (ShapeDtype(labels.shape, wide),) * 3


def _infer_backward(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShapeDtype, ...]:
    _infer(op, args[1:4], params)
    return tuple(ShapeDtype(a.shape, a.dtype) for a in args[1:3])


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    ("hidden", "weight", "labels"),
    _linear_cross_entropy,
    _infer,
    nout=3,
    decompose=_decompose_whole,
    overrides={"cupy": _on_gpu},
    params=_PARAMS,
    wide_sums=True,
)
"""The loss of each row, its shift and its sum, as of :data:`.cross_entropy.CROSS_ENTROPY`."""
LINEAR_CROSS_ENTROPY_BACKWARD = Op(
    "linear_cross_entropy_backward",
    ("g", "hidden", "weight", "labels", "shift", "total"),
    _linear_cross_entropy_backward,
    _infer_backward,
    nout=2,
    decompose=_decompose_whole_backward,
    overrides={"cupy": _backward_on_gpu},
    params=_PARAMS,
)
