"""Losses of classification and of contrastive learning. They are computed in float32 at least."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import host_sync
from ..backends.backend import on_device_of
from ..core.array import Array
from ..core.dispatch import Deferred, apply, argument_avals, as_array, as_number
from ..core.dtypes import float64, result_type
from ..core.errors import ArgumentError, ArrayIndexError, DTypeError, ShapeError
from ..core.op import composite
from ..linalg.matrix_norms import vector_norm
from ..ops.creation import arange, asarray, beside
from ..ops.elementwise import where
from ..ops.manipulation import astype
from ..ops.matmul import matmul
from ..reductions.moments import mean
from ..reductions.reductions import sum
from .cross_entropy import CROSS_ENTROPY, all_classes
from .linear_cross_entropy import LINEAR_CROSS_ENTROPY, WHOLE, linear
from .norms.layer_norm import _wide
from .regression_losses import check_reduction


@composite("cross_entropy")
def cross_entropy(
    logits: Any,
    labels: Any,
    /,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Array:
    """Negative log-likelihood of integer labels under ``softmax(logits)``.

    Parameters
    ----------
    logits
        Shape ``(*batch, classes)``.
    labels
        Integers of shape ``(*batch,)``.
    reduction
        ``"mean"`` (over the samples that are not ignored; 0 where all are), ``"sum"`` or ``"none"`` (one value a
        sample).
    ignore_index
        A label that marks samples without a class (often -100): their loss is 0, and so is its gradient. By default
        there are none, and the mean needs no count of them over the mesh.
    label_smoothing
        This part of each label is spread evenly over all classes (Szegedy et al., 2016).

    Raises
    ------
    ArrayIndexError
        For a label that is neither a class nor ``ignore_index``. Traced labels and labels on a mesh are not looked at;
        there such a sample has the loss NaN.
    ShapeError
        When the labels have another shape than the batch.
    DTypeError
        For labels that are no integers, and logits that are not real.

    Examples
    --------
    >>> mt.nn.cross_entropy(mt.asarray([[0.0, 0.0], [0.0, 9.0]]), mt.asarray([1, -100]), ignore_index=-100)
    Array(0.69314718, dtype=float64)
    """
    logits, labels = as_array(logits), as_array(labels)
    shape, dtype = logits.shape, logits.dtype
    if not shape or shape[:-1] != labels.shape:
        remedy = "labels are numbers of classes, one for each row of logits"
        if labels.shape == shape:
            written = "-mt.mean(mt.sum(labels * mt.nn.log_softmax(logits), axis=-1))"
            remedy = f"for labels that are probabilities write {written}"
        raise ShapeError(f"[cross_entropy] labels {labels.shape} do not match logits {shape}: {remedy}")
    if dtype.kind == "c":
        raise DTypeError(f"[cross_entropy] logits must be real, got {dtype.name}")
    if dtype.kind in "biu":
        logits, dtype = astype(logits, np.float64), float64
    params = _checked("cross_entropy", labels, shape[-1], reduction, ignore_index, label_smoothing)
    # One a sample, in the wide dtype: NaN for a label that is no class, 0 for one that is ignored.
    losses, *_ = apply(CROSS_ENTROPY, (logits, labels), params)
    out = _reduced(losses, labels, reduction, params["ignore_index"])
    return out if out.dtype is dtype else astype(out, dtype, copy=False)


@composite("linear_cross_entropy")
def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    /,
    *,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Array:
    """:func:`cross_entropy` of the logits ``hidden @ weight``, of which no more than 64 MB are held at once.

    Larger logits are made in tiles, and again in the backward pass, which takes a third more time for the products. (On
    a GPU so are all of float16 and bfloat16: matrix units multiply these, with sums and logits in float32, and the
    slopes of the logits are rounded to them.) On a mesh whose ranks split the classes they are held in parts, as those
    of :func:`cross_entropy` are.

    Parameters
    ----------
    hidden
        Shape ``(*batch, d)``.
    weight
        Shape ``(d, classes)``; a transposed embedding is one without a copy.
    labels, reduction, ignore_index, label_smoothing
        As of :func:`cross_entropy`.

    Returns
    -------
    Array
        Of float32 at least, also where the operands are shorter floats.

    Raises
    ------
    ArrayIndexError, ShapeError, DTypeError
        As :func:`cross_entropy` does.

    Examples
    --------
    >>> mt.nn.linear_cross_entropy(mt.ones((2, 3)), mt.zeros((3, 8)), mt.asarray([1, 7]))
    Array(2.07944154, dtype=float64)
    """
    hidden, weight, labels = as_array(hidden), as_array(weight), as_array(labels)
    hidden, weight = (astype(a, float64) if a.dtype.kind in "biu" else a for a in (hidden, weight))
    # The shape rule raises for what does not fit.
    loss, *_ = LINEAR_CROSS_ENTROPY.avals(argument_avals((hidden, weight, labels)), {})
    params = _checked("linear_cross_entropy", labels, weight.shape[1], reduction, ignore_index, label_smoothing)
    split = weight.sharding is not None and weight.sharding.layout.axes_of(1)
    # The op of the tiles multiplies short floats on a GPU as they are: more than worth a product more.
    short = hidden.dtype == weight.dtype and hidden.dtype.itemsize == 2 and getattr(hidden.device, "kind", "") == "cuda"
    if (short or loss.nbytes * weight.shape[1] > WHOLE) and not split:
        losses, *_ = apply(LINEAR_CROSS_ENTROPY, (hidden, weight, labels), params)
    else:
        hidden, weight = (astype(a, loss.dtype, copy=False) for a in (hidden, weight))  # logits are never rounded
        losses, *_ = apply(CROSS_ENTROPY, (linear(hidden, weight), labels), params)
    return _reduced(losses, labels, reduction, params["ignore_index"])


def _checked(
    name: str, labels: Array, classes: int, reduction: str, ignore_index: int | None, label_smoothing: float
) -> dict[str, Any]:
    """The parameters of the op."""
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"[{name}] labels must be integers, got {labels.dtype.name}")
    if reduction != "mean":
        check_reduction(name, reduction)
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"[{name}] label_smoothing must be between 0 and 1, got {label_smoothing}")
    _check_labels(name, labels, classes, ignore_index)
    if ignore_index is not None and labels.dtype.kind == "u" and ignore_index < 0:
        ignore_index = None  # no label can be it
    return {"ignore_index": ignore_index, "label_smoothing": as_number(name, "label_smoothing", label_smoothing)}


def _reduced(losses: Array, labels: Array, reduction: str, ignore_index: int | None) -> Array:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return sum(losses)
    if ignore_index is None:
        return mean(losses)
    n = astype(sum(astype(labels != ignore_index, np.int64)), losses.dtype)
    return sum(losses) / where(n == 0, 1.0, n)


def _check_labels(name: str, labels: Array, classes: int, ignore_index: int | None) -> None:
    if isinstance(labels._buf, Deferred) or labels.size == 0:
        return
    buf = labels._buf
    if not isinstance(buf, np.ndarray) and host_sync.known_within(buf, 0, classes - 1, ignore_index):
        return
    host_sync.note("labels are checked")
    with on_device_of(buf):
        if isinstance(buf, np.ndarray):
            if all_classes(buf, classes):
                return
        elif not host_sync.any_outside(buf, 0, classes - 1, ignore_index):
            return
        wrong = (buf < 0) | (buf >= classes)
        if ignore_index is not None and not (labels.dtype.kind == "u" and ignore_index < 0):
            wrong &= buf != ignore_index
        if wrong.any():
            raise ArrayIndexError(
                f"[{name}] label {int(buf[wrong][0])} is none of the {classes} classes (nor ignore_index "
                f"{ignore_index})"
            )


@composite("info_nce")
def info_nce(
    queries: Any,
    keys: Any,
    /,
    *,
    temperature: float = 0.05,
    group_size: int = 1,
    normalize: bool = False,
    reduction: str = "mean",
) -> Array:
    """Contrastive loss: each query against all keys, with its own key as the right one (van den Oord et al., 2018).

    Query ``i`` belongs to key ``i * group_size``; the other keys of a group are hard negatives, as are those of all
    other groups. ``scores = queries @ keys.T / temperature`` go to :func:`cross_entropy`.

    Parameters
    ----------
    queries, keys
        Shapes ``(n, d)`` and ``(n * group_size, d)``.
    temperature
        Positive.
    normalize
        Scale all vectors to length one first; a zero vector stays zero.
    reduction
        As in :func:`cross_entropy`.

    Examples
    --------
    >>> mt.nn.info_nce(mt.eye(2), mt.eye(2), temperature=1.0)
    Array(0.31326169, dtype=float64)
    """
    q, k = asarray(queries), asarray(keys)
    if q.ndim != 2 or k.ndim != 2 or q.shape[1] != k.shape[1] or k.shape[0] != q.shape[0] * group_size:
        raise ShapeError(f"[info_nce] queries {q.shape} and keys {k.shape} do not fit groups of {group_size}")
    if not temperature > 0:
        raise ArgumentError(f"[info_nce] temperature must be positive, got {temperature}")
    dtype = result_type(q.dtype, k.dtype)
    q, k = (astype(x, _wide(x.dtype), copy=False) for x in (q, k))
    if normalize:
        lengths = [vector_norm(x, axis=1, keepdims=True) for x in (q, k)]
        q, k = (x / where(n == 0, 1.0, n) for x, n in zip((q, k), lengths, strict=True))
    scores = matmul(q, k.T) * (1.0 / temperature)
    labels = arange(q.shape[0], device=beside(scores)) * group_size
    return astype(cross_entropy(scores, labels, reduction=reduction, ignore_index=None), dtype, copy=False)
