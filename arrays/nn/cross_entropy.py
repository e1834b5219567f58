"""The cross-entropy of integer labels as an op, and its backward op.

Both go through the logits once, in blocks of rows that stay in cache; composed of other ops they are a dozen passes,
and keep an array of the size of the logits for the backward pass. That needs two numbers of each row alone, which the
forward op gives: its shift (the largest logit) and the sum of the exponentials of what is left. Their log-sum-exp would
be one, but of large logits no float has digits left for the number of classes. The decompositions serve derivatives of
higher order, and logits whose classes are split over ranks: there each rank looks for the labels among its own classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backends.row_blocks import BLOCK, row_sums
from ..backends.row_blocks import wide as _wide
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import is_low_precision
from ..core.op import Op, ShapeDtype
from ..kernels import softmaxes
from ..native import ops
from ..native.calls import first
from ..ops.elementwise import POSITIONS, exp, log, stop_gradient, where
from ..ops.manipulation import astype, expand_dims, squeeze
from ..ops.param_kinds import FRACTION, LABEL
from ..reductions.moments import mean
from ..reductions.reductions import sum as sum_
from .softmax import finite_max, softmax


def _blocks(xp: Any, rows: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(width, 1)) if xp is np else max(rows, 1)
    return (slice(i, i + step) for i in range(0, rows, step))


def all_classes(labels: Any, classes: int) -> bool:
    """Whether all labels (at least one) name a class."""
    found = ops.below(labels, classes)
    if found is not None:
        return found
    # Seen without their sign, negative labels are the largest: one look for the two ends, and beyond all that the dtype
    # counts to, which may be fewer than the classes.
    largest = int(labels.view(labels.dtype.str.replace("i", "u")).max())
    return largest < classes and largest <= np.iinfo(labels.dtype).max


def _looked_up(xp: Any, labels: Any, classes: int, ignore_index: int | None) -> tuple[Any, Any, Any]:
    """Labels that are safe to look up; which samples have a class, and which are ignored (None, where all have one)."""
    if xp is np and ignore_index is None and labels.size and all_classes(labels, classes):
        return labels, None, None
    known = (labels >= 0) & (labels < classes)
    ignored = xp.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    return xp.where(known, labels, 0).astype(np.intp), known & ~ignored, ignored


def _cross_entropy(xp: Any, logits: Any, labels: Any, ignore_index: int | None, label_smoothing: float) -> Any:
    if is_low_precision(logits.dtype):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return CROSS_ENTROPY.bind(xp)(logits.astype(np.float32), labels, **options)
    classes = logits.shape[-1]
    x, flat = logits.reshape(math.prod(labels.shape), classes), labels.reshape(-1)
    out, shift, total = (xp.full(flat.shape, value, x.dtype) for value in (np.nan, 0, 1))
    safe, valid, ignored = _looked_up(xp, flat, classes, ignore_index)
    with np.errstate(all="ignore"):
        for b in _blocks(xp, len(flat), classes) if classes else ():
            top = x[b].max(axis=1, keepdims=True)
            top[~xp.isfinite(top)] = 0
            d = x[b] - top
            loss = -(1 - label_smoothing) * d[xp.arange(len(d)), safe[b]]
            if label_smoothing:
                loss -= label_smoothing * d.mean(axis=1)
            total[b] = row_sums(xp, xp.exp(d, out=d))[:, 0]
            out[b], shift[b] = loss + xp.log(total[b]), top[:, 0]
    if valid is not None:
        out[~valid] = np.nan
        out[ignored] = 0
        shift[~valid], total[~valid] = 0, 1
    return tuple([a.reshape(labels.shape) for a in (out, shift, total)])


def _cross_entropy_backward(
    xp: Any, g: Any, logits: Any, labels: Any, shift: Any, total: Any, ignore_index: int | None, label_smoothing: float
) -> Any:
    """The softmax is computed again: cheaper than writing it to memory in the forward pass and reading it back."""
    if is_low_precision(logits.dtype):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        out = CROSS_ENTROPY_BACKWARD.bind(xp)(g, logits.astype(np.float32), labels, shift, total, **options)
        return out.astype(logits.dtype)
    classes = logits.shape[-1]
    x, flat = logits.reshape(math.prod(labels.shape), classes), labels.reshape(-1)
    out = xp.empty(x.shape, x.dtype)
    safe, valid, _ = _looked_up(xp, flat, classes, ignore_index)
    scale = g.reshape(-1).astype(x.dtype, copy=False)
    with np.errstate(all="ignore"):
        shift, factor = shift.reshape(-1), scale / total.reshape(-1)
        for b in _blocks(xp, len(flat), classes) if classes else ():
            o = xp.subtract(x[b], shift[b, None], out=out[b])
            xp.exp(o, out=o)
            o *= factor[b, None]
            o[xp.arange(len(o)), safe[b]] -= (1 - label_smoothing) * scale[b]
            if label_smoothing:
                o -= (label_smoothing / classes) * scale[b, None]
    if valid is not None:  # selected, not multiplied: NaN in a sample that does not count must not leak
        out[~valid] = 0
    return out.reshape(logits.shape)


def _hits(x: Array, labels: Array) -> Array:
    return expand_dims(labels, axis=labels.ndim) == apply(POSITIONS, (x,), {"axis": x.ndim - 1, "start": 0})


def _valid(labels: Array, classes: int, ignore_index: int | None) -> Array:
    known = (labels >= 0) & (labels < classes)
    return known if ignore_index is None else known & (labels != ignore_index)


def _decompose(logits: Array, labels: Array, ignore_index: int | None, label_smoothing: float) -> tuple[Array, ...]:
    x = astype(logits, _wide(logits.dtype), copy=False)
    # Not the op: over classes that are split, all results then have their collectives in common.
    top = finite_max(x, -1)
    total = sum_(exp(x - top), axis=-1, keepdims=True)
    logs = (x - top) - log(total)
    losses = -sum_(where(_hits(logs, labels), logs, 0.0), axis=-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * mean(logs, axis=-1)
    valid = _valid(labels, logits.shape[-1], ignore_index)
    losses = where(valid, losses, math.nan)
    losses = losses if ignore_index is None else where(labels == ignore_index, 0.0, losses)
    shift, total = (stop_gradient(where(valid, squeeze(a, -1), b)) for a, b in ((top, 0.0), (total, 1.0)))
    return losses, shift, total


def _decompose_backward(
    g: Array, logits: Array, labels: Array, *_saved: Array, ignore_index: int | None, label_smoothing: float
) -> Array:
    x = astype(logits, _wide(logits.dtype), copy=False)
    p = softmax(x)  # not by the saved results, functions of the logits: so the derivative is that of all of it
    return astype(slope_of(g, p, labels, ignore_index, label_smoothing), logits.dtype, copy=False)


def slope_of(g: Array, p: Array, labels: Array, ignore_index: int | None, label_smoothing: float) -> Array:
    """``g`` times the probabilities ``p``, less what they should be; 0 in rows that do not count."""
    classes = p.shape[-1]
    valid = expand_dims(_valid(labels, classes, ignore_index), axis=labels.ndim)
    scale = expand_dims(astype(g, p.dtype, copy=False), axis=labels.ndim)
    even = label_smoothing / classes * scale
    target = where(_hits(p, labels), (1 - label_smoothing) * scale + even, even)
    return where(valid, scale * p - target, 0.0)


def _infer(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    logits, labels = args
    return (ShapeDtype(labels.shape, _wide(logits.dtype)),) * 3


_PARAMS = {"ignore_index": LABEL, "label_smoothing": FRACTION}
CROSS_ENTROPY = Op(
    "cross_entropy",
    ("logits", "labels"),
    _cross_entropy,
    _infer,
    nout=3,
    decompose=_decompose,
    overrides={"numpy": first(ops.cross_entropy, _cross_entropy), "cupy": softmaxes.cross_entropy},
    params=_PARAMS,
    flops=12,
    wide_sums=True,
)
"""The loss of each row; and for the backward op its shift and its sum, which are constants: 0 and 1 of rows that do not
count."""
CROSS_ENTROPY_BACKWARD = Op(
    "cross_entropy_backward",
    ("g", "logits", "labels", "shift", "total"),
    _cross_entropy_backward,
    lambda op, args, params: ShapeDtype(args[1].shape, args[1].dtype),
    decompose=_decompose_backward,
    overrides={
        "numpy": first(ops.cross_entropy_backward, _cross_entropy_backward),
        "cupy": softmaxes.cross_entropy_backward,
    },
    params=_PARAMS,
    flops=12,
)
