"""Losses of regression and of binary classification, and the cosine of vectors.

They are computed in float32 at least.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..chains.chains import one_launch
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Cuda, Op, composite
from ..linalg.matrix_norms import vector_norm
from ..ops.creation import asarray, inexact
from ..ops.elementwise import abs, logaddexp, maximum, square
from ..ops.manipulation import astype
from ..ops.matmul import vecdot
from ..ops.wide_floats import in_float32
from ..reductions.moments import mean
from ..reductions.reductions import sum


def _huber(xp: Any, x: Any, delta: Any) -> Any:
    near = xp.clip(x, -delta, delta)
    out = near * -0.5
    out += x
    out *= near
    return out


# (The difference is its operand: neither a magnitude, which has no second derivative at 0, nor the steps, each of which
# the tape would keep.)
HUBER = Op(
    "huber",
    ("x", "delta"),
    _huber,
    shape_rules.elementwise,
    overrides={"cupy": one_launch("huber")},
    flops=5,
    cuda=Cuda("smaller(larger({0}, -{1}), {1}) * ({0} - ({t})0.5 * smaller(larger({0}, -{1}), {1}))"),
)


def _pair(name: str, predictions: Any, targets: Any) -> tuple[Array, Array, np.dtype]:
    """Both, wide enough to compute in, and the dtype of the result."""
    x, y = asarray(predictions), asarray(targets)
    if x.shape != y.shape:
        # Broadcasting would compare each prediction with each target, the commonest mistake with a loss.
        raise ShapeError(f"[{name}] predictions {x.shape} and targets {y.shape} must have one shape")
    x = inexact(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"[{name}] predictions must be real, got {x.dtype.name}")
    wide = np.dtype(np.float32) if x.dtype.itemsize <= 2 else x.dtype
    return astype(x, wide, copy=False), astype(y, wide, copy=False), x.dtype


def check_reduction(name: str, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"[{name}] reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _reduced(name: str, losses: Array, reduction: str, dtype: np.dtype) -> Array:
    check_reduction(name, reduction)
    out = losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)
    return astype(out, dtype, copy=False)


@composite("mse_loss")
def mse_loss(predictions: Any, targets: Any, /, *, reduction: str = "mean") -> Array:
    """Squares of the differences: their mean, their ``"sum"``, or each (``"none"``).

    >>> mt.nn.mse_loss(mt.asarray([1.0, 2.0]), [1.0, 4.0])
    Array(2., dtype=float64)
    """
    x, y, dtype = _pair("mse_loss", predictions, targets)
    return _reduced("mse_loss", square(x - y), reduction, dtype)


@composite("l1_loss")
def l1_loss(predictions: Any, targets: Any, /, *, reduction: str = "mean") -> Array:
    """Magnitudes of the differences: their mean, their ``"sum"``, or each (``"none"``).

    >>> mt.nn.l1_loss(mt.asarray([1.0, 2.0]), [1.0, 4.0])
    Array(1., dtype=float64)
    """
    x, y, dtype = _pair("l1_loss", predictions, targets)
    return _reduced("l1_loss", abs(x - y), reduction, dtype)


@composite("huber_loss")
def huber_loss(predictions: Any, targets: Any, /, *, delta: float = 1.0, reduction: str = "mean") -> Array:
    """Half the square of a difference up to ``delta``, a straight line beyond it (Huber, 1964).

    >>> mt.nn.huber_loss(mt.asarray([0.5, 3.0]), [0.0, 0.0], reduction="none")
    Array([0.125, 2.5  ], dtype=float64)
    """
    if not delta > 0:
        raise ArgumentError(f"[huber_loss] delta must be positive, got {delta}")
    x, y, dtype = _pair("huber_loss", predictions, targets)
    return _reduced("huber_loss", apply(HUBER, (x - y, delta)), reduction, dtype)


@composite("binary_cross_entropy")
def binary_cross_entropy(
    logits: Any, labels: Any, /, *, positive_weight: float = 1.0, reduction: str = "mean"
) -> Array:
    """Negative log-likelihood of labels between 0 and 1 under ``sigmoid(logits)``, stable for logits of any size.

    The loss at a label of 1 counts ``positive_weight`` times.

    >>> mt.nn.binary_cross_entropy(mt.asarray([0.0, 1000.0]), [1, 1])
    Array(0.34657359, dtype=float64)
    """
    x, y, dtype = _pair("binary_cross_entropy", logits, labels)
    wrong = positive_weight * y * logaddexp(-x, 0.0) + (1.0 - y) * logaddexp(x, 0.0)
    return _reduced("binary_cross_entropy", wrong, reduction, dtype)


@composite("cosine_similarity")
@in_float32
def cosine_similarity(x: Any, y: Any, /, *, axis: int = -1, eps: float = 1e-8) -> Array:
    """The cosine of the angle between vectors along ``axis``.

    Lengths below ``eps`` count as that, so that a zero vector gives 0.

    The other dimensions are broadcast.

    >>> mt.nn.cosine_similarity(mt.asarray([[1.0, 0.0], [1.0, 1.0]]), mt.asarray([0.0, 2.0]))
    Array([0.        , 0.70710678], dtype=float64)
    """
    x, y = inexact(asarray(x)), inexact(asarray(y))
    if "c" in (x.dtype.kind, y.dtype.kind):
        raise DTypeError(
            f"[cosine_similarity] x and y must be real, got {x.dtype.name} and {y.dtype.name}: two complex vectors "
            "have no one angle"
        )
    lengths = [maximum(vector_norm(v, axis=axis, keepdims=True), eps) for v in (x, y)]
    return vecdot(x / lengths[0], y / lengths[1], axis=axis)
