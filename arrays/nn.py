"""Functions that models need and the array-API standard lacks (``mt.nn``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ._op import composite
from .creation import arange, asarray
from .elementwise import erf, exp, log, relu, sigmoid, stop_gradient, tanh, where
from .errors import DTypeError, ShapeError
from .manipulation import astype, expand_dims, squeeze
from .norms import layer_norm
from .reductions import max, mean, sum

if TYPE_CHECKING:
    from ._array import Array

__all__ = [
    "cross_entropy",
    "gelu",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "sigmoid",
    "silu",
    "softmax",
]


@composite("gelu")
def gelu(x: Any, /, *, approximate: bool = False) -> Array:
    """``x * Phi(x)`` with the normal distribution function ``Phi`` (Hendrycks and Gimpel, 2016).

    ``approximate=True`` uses their tanh form.

    >>> import meshtape as mt
    >>> round(float(mt.nn.gelu(mt.asarray(1.0))), 6)
    0.841345
    """
    x = asarray(x)
    if approximate:
        return 0.5 * x * (1.0 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


@composite("silu")
def silu(x: Any, /) -> Array:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def _finite_max(x: Array, axis: Any) -> Array:
    """The largest element as a constant, 0 where it is infinite: what a stable log-sum-exp subtracts."""
    m = stop_gradient(max(x, axis=axis, keepdims=True))
    return where(abs(m) == float("inf"), 0.0, m)


@composite("logsumexp")
def logsumexp(x: Any, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """``log(sum(exp(x)))`` without overflow; -inf where all elements are -inf."""
    x = asarray(x)
    axes = tuple(range(x.ndim)) if axis is None else axis
    m = _finite_max(x, axes)
    out = log(sum(exp(x - m), axis=axes, keepdims=True)) + m
    return out if keepdims else squeeze(out, axes)


@composite("log_softmax")
def log_softmax(x: Any, /, *, axis: int = -1) -> Array:
    """Logarithm of :func:`softmax`, exact where probabilities are tiny."""
    x = asarray(x)
    d = x - _finite_max(x, axis)
    return d - log(sum(exp(d), axis=axis, keepdims=True))


@composite("softmax")
def softmax(x: Any, /, *, axis: int = -1) -> Array:
    """Positive numbers that sum to one along an axis, in the ratios ``exp(x)``.

    Where all elements of a row are -inf (everything masked) the row is NaN, as the sum of no weights is zero.

    >>> import meshtape as mt
    >>> mt.nn.softmax(mt.asarray([0.0, 0.0]))
    Array([0.5, 0.5], dtype=float64)
    """
    x = asarray(x)
    e = exp(x - _finite_max(x, axis))
    return e / sum(e, axis=axis, keepdims=True)


@composite("one_hot")
def one_hot(labels: Any, num_classes: int, /, *, dtype: Any = np.float32) -> Array:
    """1 at the label and 0 elsewhere along a new last dimension; labels outside ``0 … num_classes-1`` give zeros only."""
    labels = asarray(labels)
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"[one_hot] labels must be integers, got {labels.dtype.name}")
    return astype(expand_dims(labels, axis=labels.ndim) == arange(num_classes, dtype=labels.dtype), dtype)


@composite("cross_entropy")
def cross_entropy(logits: Any, labels: Any, /, *, reduction: str = "mean") -> Array:
    """Negative log-likelihood of integer labels under ``softmax(logits)``.

    Parameters
    ----------
    logits
        Shape ``(*batch, classes)``.
    labels
        Integers of shape ``(*batch,)``.
    reduction
        ``"mean"``, ``"sum"`` or ``"none"`` (one value a sample).

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.nn.cross_entropy(mt.asarray([[0.0, 0.0]]), mt.asarray([1]))
    Array(0.69314718, dtype=float64)
    """
    logits, labels = asarray(logits), asarray(labels)
    if logits.shape[:-1] != labels.shape:
        raise ShapeError(f"[cross_entropy] labels {labels.shape} do not match logits {logits.shape}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"[cross_entropy] reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    hit = expand_dims(labels, axis=labels.ndim) == arange(logits.shape[-1], dtype=labels.dtype)
    losses = -sum(where(hit, log_softmax(logits), 0.0), axis=-1)
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)
