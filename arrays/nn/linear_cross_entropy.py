"""The cross-entropy of ``hidden @ weight`` as an op that never holds all logits, and its backward op.

Both make the logits in tiles of some rows and some classes. The largest logit of each row is kept, and the sum of its
exponentials: with them the backward op needs a tile alone for its part of the softmax, at the price of one more
product. The decompositions are the product and the cross-entropy as they stand; they serve derivatives of higher order,
and classes that are split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backends.memory_pool import fresh
from ..backends.row_blocks import row_sums
from ..backends.row_blocks import wide as _wide
from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import DTypeError, ShapeError
from ..core.op import Op, ShapeDtype
from ..ops.manipulation import astype, reshape
from ..ops.matmul import MATMUL, matmul
from .cross_entropy import _PARAMS, _decompose, _looked_up, slope_of
from .softmax import softmax, softmax_of_rows

TILE = {"numpy": 1 << 24, "cupy": 1 << 26}
"""Bytes of a tile: on a CPU it stays in cache."""
WHOLE = 1 << 26
"""Bytes of logits up to which these are kept: computing them anew takes a third more time."""


def linear(x: Array, w: Array) -> Array:
    """``x @ w`` for ``x`` of shape ``(*batch, inputs)``, as one product of matrices.

    As a product of stacks the gradient of ``w`` would be one matrix a row of the batch, and their sum. Where rows of
    the flattened ``x`` would not lie as those of ``x`` do (a split sequence, an uneven split of the batch) it stays a
    stack.
    """
    *batch, inputs = x.shape
    here = x.sharding
    if here is not None and batch:
        parts = math.prod(here.mesh.sizes[a] for a in here.layout.axes_of(0))
        if any(here.layout.axes_of(d) for d in range(1, len(batch))) or batch[0] % parts:
            return x @ w
    return reshape(reshape(x, (math.prod(batch), inputs)) @ w, (*batch, w.shape[1]))


def _common(hidden: Any, weight: Any) -> np.dtype:
    dtype = result_type(hidden.dtype, weight.dtype)
    if dtype.kind in "biuc":
        raise DTypeError(f"[linear_cross_entropy] hidden and weight must be real floats, got {dtype.name}")
    return dtype


class _Tiles:
    """The operands as matrices of the dtype in which products are made, and the slices of a tile's rows and classes."""

    def __init__(self, xp: Any, hidden: Any, weight: Any, labels: Any, ignore_index: int | None) -> None:
        # Products of short floats, too, are made in float32: no logit is rounded to two bytes.
        self.xp, self.wide, self.times = xp, _wide(_common(hidden, weight)), MATMUL.bind(xp)
        rows, self.classes = labels.size, weight.shape[1]
        self.hidden = hidden.reshape(rows, hidden.shape[-1]).astype(self.wide, copy=False)
        self.labels, self.valid, self.ignored = _looked_up(xp, labels.reshape(-1), self.classes, ignore_index)
        self.labels = self.labels.astype(np.intp, copy=False)
        tile = TILE[xp.__name__] // self.wide.itemsize
        height = max(math.isqrt(tile), tile // max(self.classes, 1))
        height = -(-rows // -(-rows // height)) if rows else 1  # rows are dealt evenly
        self.rows = [slice(i, min(i + height, rows)) for i in range(0, rows, height)]
        width = max(1, tile // height)
        self.columns = [slice(i, min(i + width, self.classes)) for i in range(0, self.classes, width)]

    def product(self, x: Any, y: Any) -> Any:
        return np.matmul(x, y, fresh((len(x), y.shape[1]), self.wide)) if self.xp is np else self.times(x, y)

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
    xp: Any,
    g: Any,
    hidden: Any,
    weight: Any,
    labels: Any,
    shift: Any,
    total: Any,
    ignore_index: int | None,
    label_smoothing: float,
) -> Any:
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
    _shift: Array,
    _total: Array,
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
    params=_PARAMS,
)
