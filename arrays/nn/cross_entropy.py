"""The cross-entropy of integer labels as an op, and its backward op.

Both go through the logits once, in blocks of rows that stay in cache; composed of other ops they are a dozen passes,
and keep an array of the size of the logits for the backward pass. That needs the log-sum-exp of each row alone, which
the forward op gives in float64: of large logits float32 has no digits to spare. The decompositions serve derivatives of
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
from ..ops.elementwise import POSITIONS, exp, log, where
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


FAR = 2.0**20
"""Of log-sum-exps: beyond it float64 has no digits for the number of classes, and a row's sum is made anew."""


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
    out, lse = xp.full(flat.shape, np.nan, x.dtype), xp.full(flat.shape, -np.inf, np.float64)
    safe, valid, ignored = _looked_up(xp, flat, classes, ignore_index)
    with np.errstate(all="ignore"):
        for b in _blocks(xp, len(flat), classes) if classes else ():
            top = x[b].max(axis=1, keepdims=True)
            top[xp.isinf(top)] = 0
            d = x[b] - top
            loss = -(1 - label_smoothing) * d[xp.arange(len(d)), safe[b]]
            if label_smoothing:
                loss -= label_smoothing * d.mean(axis=1)
            total = row_sums(xp, xp.exp(d, out=d)).astype(np.float64)[:, 0]
            loss += xp.log(total).astype(x.dtype)
            out[b], lse[b] = loss, top[:, 0] + xp.log(total)
    if valid is not None:
        out[~valid] = np.nan
        out[ignored] = 0
        lse[~valid] = 0
    return out.reshape(labels.shape), lse.reshape(labels.shape)


def _cross_entropy_backward(
    xp: Any,
    g: Any,
    g_lse: Any,
    logits: Any,
    labels: Any,
    lse: Any,
    ignore_index: int | None,
    label_smoothing: float,
) -> Any:
    """The softmax is computed again: cheaper than writing it to memory in the forward pass and reading it back."""
    if is_low_precision(logits.dtype):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        out = CROSS_ENTROPY_BACKWARD.bind(xp)(g, g_lse, logits.astype(np.float32), labels, lse, **options)
        return out.astype(logits.dtype)
    classes = logits.shape[-1]
    x, flat = logits.reshape(math.prod(labels.shape), classes), labels.reshape(-1)
    out = xp.empty(x.shape, x.dtype)
    safe, valid, _ = _looked_up(xp, flat, classes, ignore_index)
    scale = g.reshape(-1).astype(x.dtype, copy=False)
    with np.errstate(all="ignore"):
        lse, shift = lse.reshape(-1), lse.reshape(-1).astype(x.dtype)
        rest = xp.exp(xp.where(xp.isinf(shift), 0, shift - lse))  # the digits that x's dtype takes from the log-sum-exp
        factor = ((scale + g_lse.reshape(-1)) * rest).astype(x.dtype)
        far = np.flatnonzero((np.abs(lse) > FAR) & np.isfinite(lse)) if xp is np else ()
        if len(far) and classes:
            shift[far] = x[far].max(axis=1)
            factor[far] = (scale + g_lse.reshape(-1))[far] / np.exp(x[far] - shift[far, None]).sum(axis=1)
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


def _decompose(logits: Array, labels: Array, ignore_index: int | None, label_smoothing: float) -> tuple[Array, Array]:
    x = astype(logits, _wide(logits.dtype), copy=False)
    # Not the op: over classes that are split, losses and log-sum-exp then have their collectives in common.
    top = finite_max(x, -1)
    log_sum = log(sum_(exp(x - top), axis=-1, keepdims=True))
    logs, lse = (x - top) - log_sum, squeeze(astype(top, np.float64) + astype(log_sum, np.float64), -1)
    losses = -sum_(where(_hits(logs, labels), logs, 0.0), axis=-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * mean(logs, axis=-1)
    valid = _valid(labels, logits.shape[-1], ignore_index)
    losses, lse = where(valid, losses, math.nan), where(valid, lse, 0.0)
    return losses if ignore_index is None else where(labels == ignore_index, 0.0, losses), lse


def _decompose_backward(
    g: Array,
    g_lse: Array,
    logits: Array,
    labels: Array,
    lse: Array,
    ignore_index: int | None,
    label_smoothing: float,
) -> Array:
    x = astype(logits, _wide(logits.dtype), copy=False)
    p = softmax(x)  # not by the log-sum-exp, a function of the logits: so the derivative is that of all of it
    slope = slope_of(g, g + astype(g_lse, g.dtype), p, labels, ignore_index, label_smoothing)
    return astype(slope, logits.dtype, copy=False)


def slope_of(g: Array, of_p: Array, p: Array, labels: Array, ignore_index: int | None, label_smoothing: float) -> Array:
    """``of_p`` times the probabilities ``p``, less ``g`` times what they should be; 0 in rows that do not count."""
    classes = p.shape[-1]
    valid = expand_dims(_valid(labels, classes, ignore_index), axis=labels.ndim)
    scale, of_p = (expand_dims(astype(a, p.dtype, copy=False), axis=labels.ndim) for a in (g, of_p))
    even = label_smoothing / classes * scale
    target = where(_hits(p, labels), (1 - label_smoothing) * scale + even, even)
    return where(valid, of_p * p - target, 0.0)


def _infer(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ShapeDtype]:
    logits, labels = args
    return ShapeDtype(labels.shape, _wide(logits.dtype)), ShapeDtype(labels.shape, np.dtype(np.float64))


_PARAMS = {"ignore_index": LABEL, "label_smoothing": FRACTION}
CROSS_ENTROPY = Op(
    "cross_entropy",
    ("logits", "labels"),
    _cross_entropy,
    _infer,
    nout=2,
    decompose=_decompose,
    overrides={"numpy": first(ops.cross_entropy, _cross_entropy), "cupy": softmaxes.cross_entropy},
    params=_PARAMS,
    flops=12,
    wide_sums=True,
)
"""The loss of each row, and its log-sum-exp: 0 of those that do not count."""
CROSS_ENTROPY_BACKWARD = Op(
    "cross_entropy_backward",
    ("g", "g_lse", "logits", "labels", "lse"),
    _cross_entropy_backward,
    lambda op, args, params: ShapeDtype(args[2].shape, args[2].dtype),
    decompose=_decompose_backward,
    overrides={
        "numpy": first(ops.cross_entropy_backward, _cross_entropy_backward),
        "cupy": softmaxes.cross_entropy_backward,
    },
    params=_PARAMS,
    flops=12,
)
