"""Norms of vectors and of matrices: the norms of ``mt.linalg``."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.pieces import buffer, reduced
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array, wrap
from ..core.dtypes import real_of
from ..core.errors import ArgumentError
from ..core.op import composite
from ..ops import elementwise as ew
from ..ops.creation import asarray, beside
from ..ops.manipulation import astype, expand_dims, squeeze
from ..reductions.reductions import max, min, sum
from .lapack import SVDVALS, back, matrices


@composite("vector_norm")
def vector_norm(x: Any, /, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, ord: float = 2) -> Array:
    """``sum(abs(x)**ord)**(1/ord)`` over axes (all by default).

    ``ord`` may be any number: ``inf`` and ``-inf`` give the largest and smallest magnitude, ``0`` counts what is not
    zero. The gradient at a zero vector is zero. Elements may be as large or small as numbers are: powers of them do not
    overflow or vanish (Blue: A portable Fortran program to find the Euclidean norm of a vector, 1978).

    >>> mt.linalg.vector_norm(mt.asarray([3.0, 4.0]))
    Array(5., dtype=float64)
    """
    x = as_array(x)
    if x.dtype.kind in "biu":
        x = astype(x, np.float64)
    elif (low := x.dtype).itemsize <= 2:
        axes = shape_rules.normalize_axis("vector_norm", axis, x.ndim)
        if ord == 2 and (found := _plainly(x, axes, keepdims)) is not None:
            return astype(found, low)
        return astype(vector_norm(astype(x, np.float32), axis=axis, keepdims=keepdims, ord=ord), low)
    axes = shape_rules.normalize_axis("vector_norm", axis, x.ndim)
    over = {"axis": axes, "keepdims": keepdims}
    if ord == 0:
        return astype(sum(astype(x != 0, np.int64), **over), real_of(x.dtype))
    if ord == math.inf:
        return max(ew.abs(x), **over) if x.size else sum(ew.abs(x), **over)
    if ord == -math.inf:
        return min(ew.abs(x), **over)
    if ord == 1:
        return sum(ew.abs(x), **over)
    if ord == 2 and (found := _plainly(x, axes, keepdims)) is not None:
        return found
    scale, over = _scale(x, axes, ord), {"axis": axes, "keepdims": True}
    if ord == 2:
        # (Part by part: a complex number is divided by way of the square of what divides it.)
        parts = (ew.real(x), ew.imag(x)) if x.dtype.kind == "c" else (x,)
        total = functools.reduce(operator.add, (sum(ew.square(part / scale), **over) for part in parts))
        # The root has no slope at zero: there the branch that is not taken must not divide by it.
        out = ew.where(total == 0, 0.0, ew.sqrt(ew.where(total == 0, 1.0, total)))
    elif ord < 0:
        out = sum((ew.abs(x) / scale) ** ord, **over) ** (1.0 / ord)
    else:
        size = ew.abs(x) / scale
        total = sum(ew.where(size == 0, 0.0, ew.where(size == 0, 1.0, size) ** ord), **over)
        out = ew.where(total == 0, 0.0, ew.where(total == 0, 1.0, total) ** (1.0 / ord))
    out = out * scale
    return out if keepdims else squeeze(out, axis=axes)


_SAFE = {np.dtype(np.float32): (1e-20, 1e38), np.dtype(np.float64): (1e-280, 1e308)}
"""Bounds on sums of squares between which no square has overflowed and none that counts has underflowed."""


def _plainly(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array | None:
    """The 2-norm from plain squares: two passes less, and the same bits. None where they may be out of range.

    That of short floats is float32, without a float32 copy of them all."""
    buf = buffer(x)
    wide = np.dtype(np.float32) if x.dtype.itemsize <= 2 else x.dtype
    if buf is None or wide not in _SAFE or not buf.size:
        return None
    least, most = _SAFE[wide]

    def squares(b: Any) -> Any:
        return np.add.reduce(np.square(b.astype(wide, copy=False)), axis=axes, keepdims=True)

    with np.errstate(over="ignore", under="ignore"):
        total = reduced(squares, np.add, axes, keepdims, buf)
    return wrap(np.asarray(np.sqrt(total))) if np.all((total > least) & (total < most)) else None


def _scale(x: Array, axes: tuple[int, ...], ord: float) -> Array:
    """A divisor of the elements, so that their powers neither overflow nor underflow.

    It is the power of two at the largest magnitude, or the smallest one for a negative ``ord``. So it rounds nothing,
    and it is a constant for the derivative: norms scale with their vectors."""
    limits = np.finfo(x.dtype)
    if not x.size:
        return asarray(1.0, dtype=limits.dtype, device=beside(x))
    size = ew.maximum(ew.abs(ew.real(x)), ew.abs(ew.imag(x))) if x.dtype.kind == "c" and ord > 0 else ew.abs(x)
    at = ew.stop_gradient((max if ord > 0 else min)(size, axis=axes, keepdims=True))
    usable = ew.logical_and(at > 0, ew.isfinite(at))
    exponent = ew.floor(ew.log2(ew.where(usable, at, 1.0)))
    # A smaller one would have an infinite inverse; and the logarithm of the largest number is rounded up.
    return 2.0 ** ew.minimum(ew.maximum(exponent, float(limits.minexp + 2)), float(limits.maxexp - 1))


@composite("matrix_norm")
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: float | str | None = "fro") -> Array:
    """Norm of each matrix.

    ``"fro"`` (Frobenius), ``"nuc"`` (sum of the singular values), ``2``/``-2`` (largest/smallest of them), ``1``/``-1``
    (largest/ smallest sum of a column), ``inf``/``-inf`` (the same of a row).

    >>> mt.linalg.matrix_norm(mt.asarray([[1.0, -2.0], [3.0, 4.0]]), ord=1)
    Array(6., dtype=float64)
    """
    x, dtype = matrices("matrix_norm", x)
    if ord in ("fro", None):
        return back(vector_norm(x, axis=(-2, -1), keepdims=keepdims), dtype)
    if ord in (1, 2, math.inf, "nuc") and 0 in x.shape[-2:]:
        return back(sum(ew.abs(x), axis=(-2, -1), keepdims=keepdims), dtype)  # the norm of nothing is 0
    if ord in (1, -1, math.inf, -math.inf):
        lines = sum(ew.abs(x), axis=-2 if ord in (1, -1) else -1)
        out = (max if ord > 0 else min)(lines, axis=-1)
    elif ord in (2, -2, "nuc"):
        scale = _scale(x, (-2, -1), 2) if x.dtype.kind == "c" and x.size else None
        s = apply(SVDVALS, (x if scale is None else x * (1 / scale),))
        s = s if scale is None else s * scale[..., 0]
        out = sum(s, axis=-1) if ord == "nuc" else (max if ord > 0 else min)(s, axis=-1)
    else:
        raise ArgumentError(f"[matrix_norm] ord must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {ord!r}")
    return back(expand_dims(out, axis=(-2, -1)) if keepdims else out, dtype)
