"""The cross-entropy of integer labels as an op, and its backward op.

Both go through the logits once, in blocks of rows that stay in cache; composed of other ops they are a dozen passes,
and keep an array of the size of the logits for the backward pass. The decompositions serve derivatives of higher order,
and logits whose classes are split over ranks: there each rank looks for the labels among its own classes.
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
from ..core.shape_rules import same_as_second
from ..kernels import softmaxes
from ..native import ops
from ..native.calls import first
from ..ops.elementwise import POSITIONS, where
from ..ops.manipulation import astype, expand_dims
from ..ops.param_kinds import FRACTION, LABEL
from ..reductions.moments import mean
from ..reductions.reductions import sum as sum_
from .softmax import log_softmax, softmax


def _blocks(xp: Any, rows: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(width, 1)) if xp is np else max(rows, 1)
    return (slice(i, i + step) for i in range(0, rows, step))


def all_classes(labels: Any, classes: int) -> bool:
    """Whether all labels (at least one) name a class."""
    found = ops.below(labels, classes)
    # Seen without their sign, negative labels are the largest: one look for the two ends.
    return bool(labels.view(labels.dtype.str.replace("i", "u")).max() < classes) if found is None else found


def _looked_up(xp: Any, labels: Any, classes: int, ignore_index: int | None) -> tuple[Any, Any, Any]:
    """Labels that are safe to look up; which samples have a class, and which are ignored (None, where all have one)."""
    if xp is np and ignore_index is None and labels.size and all_classes(labels, classes):
        return labels, None, None
    known = (labels >= 0) & (labels < classes)
    ignored = xp.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    return xp.where(known, labels, 0).astype(np.intp), known & ~ignored, ignored


def _shifted(xp: Any, x: Any) -> Any:
    """``x - max`` of each row; an infinite maximum is not subtracted."""
    m = x.max(axis=1, keepdims=True)
    m[xp.isinf(m)] = 0
    return x - m


def _cross_entropy(xp: Any, logits: Any, labels: Any, ignore_index: int | None, label_smoothing: float) -> Any:
    if is_low_precision(logits.dtype):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return CROSS_ENTROPY.bind(xp)(logits.astype(np.float32), labels, **options)
    classes = logits.shape[-1]
    x, flat = logits.reshape(math.prod(labels.shape), classes), labels.reshape(-1)
    out = xp.full(flat.shape, np.nan, x.dtype)
    safe, valid, ignored = _looked_up(xp, flat, classes, ignore_index)
    with np.errstate(all="ignore"):
        for b in _blocks(xp, len(flat), classes) if classes else ():
            d = _shifted(xp, x[b])
            loss = -(1 - label_smoothing) * d[xp.arange(len(d)), safe[b]]
            if label_smoothing:
                loss -= label_smoothing * d.mean(axis=1)
            loss += xp.log(row_sums(xp, xp.exp(d, out=d)))[:, 0]
            out[b] = loss
    if valid is not None:
        out[~valid] = np.nan
        out[ignored] = 0
    return out.reshape(labels.shape)


def _cross_entropy_backward(
    xp: Any, g: Any, logits: Any, labels: Any, ignore_index: int | None, label_smoothing: float
) -> Any:
    """The softmax is computed again: cheaper than writing it to memory in the forward pass and reading it back."""
    if is_low_precision(logits.dtype):
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        out = CROSS_ENTROPY_BACKWARD.bind(xp)(g, logits.astype(np.float32), labels, **options)
        return out.astype(logits.dtype)
    classes = logits.shape[-1]
    x, flat = logits.reshape(math.prod(labels.shape), classes), labels.reshape(-1)
    out = xp.empty(x.shape, x.dtype)
    safe, valid, _ = _looked_up(xp, flat, classes, ignore_index)
    scale = g.reshape(-1).astype(x.dtype, copy=False)
    with np.errstate(all="ignore"):
        for b in _blocks(xp, len(flat), classes) if classes else ():
            o = xp.exp(_shifted(xp, x[b]), out=out[b])
            o *= scale[b, None] / row_sums(xp, o)
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


def _decompose(logits: Array, labels: Array, ignore_index: int | None, label_smoothing: float) -> Array:
    logs = log_softmax(astype(logits, _wide(logits.dtype), copy=False))
    losses = -sum_(where(_hits(logs, labels), logs, 0.0), axis=-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * mean(logs, axis=-1)
    losses = where(_valid(labels, logits.shape[-1], ignore_index), losses, math.nan)
    return losses if ignore_index is None else where(labels == ignore_index, 0.0, losses)


def _decompose_backward(
    g: Array, logits: Array, labels: Array, ignore_index: int | None, label_smoothing: float
) -> Array:
    x = astype(logits, _wide(logits.dtype), copy=False)
    classes = x.shape[-1]
    valid = expand_dims(_valid(labels, classes, ignore_index), axis=labels.ndim)
    scale = expand_dims(astype(g, x.dtype, copy=False), axis=labels.ndim)
    target = where(_hits(x, labels), 1 - label_smoothing + label_smoothing / classes, label_smoothing / classes)
    return astype(where(valid, scale * (softmax(x) - target), 0.0), logits.dtype, copy=False)


_PARAMS = {"ignore_index": LABEL, "label_smoothing": FRACTION}
CROSS_ENTROPY = Op(
    "cross_entropy",
    ("logits", "labels"),
    _cross_entropy,
    lambda op, args, params: ShapeDtype(args[1].shape, _wide(args[0].dtype)),
    decompose=_decompose,
    overrides={"numpy": first(ops.cross_entropy, _cross_entropy), "cupy": softmaxes.cross_entropy},
    params=_PARAMS,
    flops=12,
    wide_sums=True,
)
CROSS_ENTROPY_BACKWARD = Op(
    "cross_entropy_backward",
    ("g", "logits", "labels"),
    _cross_entropy_backward,
    same_as_second,
    decompose=_decompose_backward,
    overrides={
        "numpy": first(ops.cross_entropy_backward, _cross_entropy_backward),
        "cupy": softmaxes.cross_entropy_backward,
    },
    params=_PARAMS,
    flops=12,
)
