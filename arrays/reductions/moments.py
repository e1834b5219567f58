"""Means and variances: of all elements, of those that a mask selects, and of those that are not NaN.

Low-precision floats are rounded once, when all parts are together; a sum of integers may overflow where their mean does
not. Variances are computed in two passes, since a mean rounded to few digits would count as deviation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backends.pieces import buffer, large, reduced
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array, as_number, wrap
from ..core.dtypes import as_dtype, is_low_precision, real_of
from ..core.errors import DTypeError
from ..core.op import composite
from ..ops.elementwise import abs, isnan, maximum, sqrt, square, where
from ..ops.manipulation import astype
from .reductions import MEAN, Axis, selection, sum

NOT_NAN = "elements that are not NaN"
"""A mask of the elements themselves. (None is all of them; else it is an array of booleans.)"""


def _dtypes(name: str, x: Array, dtype: Any) -> tuple[np.dtype, np.dtype]:
    """In which dtype a moment of ``x`` is computed, and in which it is given where ``dtype`` is asked for (None: by
    that of ``x``)."""
    own = x.dtype
    if dtype is None and own.kind in "fc" and own.itemsize > 2:
        return own, own
    own = np.dtype(np.float64) if own.kind in "biu" else own
    out = own if dtype is None else as_dtype(dtype, name)
    if out.kind in "biu":
        raise DTypeError(f"[{name}] {out.name} has no place for a fraction: write mt.{name}(x).astype(mt.{out.name})")
    return np.dtype(np.float32) if is_low_precision(out) else out, out


def _in_pieces(x: Array, wide: np.dtype, mask: Any) -> Any:
    if x.dtype.kind == "c" and wide.kind != "c":  # `astype` refuses to drop imaginary parts
        return None
    return large(x, wide) if mask is None or mask is NOT_NAN or buffer(mask) is not None else None


def _total(x: Array, axes: tuple[int, ...], keepdims: bool, wide: np.dtype, mask: Any, center: Array | None) -> Array:
    """The sum of what counts; the sum of the squares of its distances from ``center``, where there is one."""
    if (buf := _in_pieces(x, wide, mask)) is not None:

        def piece(b: np.ndarray, *rest: np.ndarray) -> np.ndarray:
            d = b.astype(wide) if center is None else b.astype(wide, copy=False) - rest[-1]
            if mask is not None:
                d[np.isnan(b) if mask is NOT_NAN else ~rest[0]] = 0
            if center is not None:
                d = d.real**2 + d.imag**2 if d.dtype.kind == "c" else np.multiply(d, d, d)
            return np.add.reduce(d, axis=axes, keepdims=True)

        rest = [a._buf for a in (mask, center) if a is not None and a is not NOT_NAN]
        return wrap(reduced(piece, np.add, axes, keepdims, buf, *rest))
    d = astype(x, wide, copy=False)
    d = d if center is None else d - center
    d = d if mask is None else where(mask, d, 0)
    if center is not None:
        d = square(abs(d)) if d.dtype.kind == "c" else square(d)
    return sum(d, axis=axes, keepdims=keepdims)


def _count(x: Array, axes: tuple[int, ...], keepdims: bool, wide: np.dtype, mask: Any) -> Any:
    """How many elements count: an int, or an Array of real numbers."""
    if mask is None:
        return math.prod([x.shape[a] for a in axes])
    if mask is NOT_NAN and (buf := _in_pieces(x, wide, mask)) is not None:

        def piece(b: np.ndarray) -> np.ndarray:
            return np.add.reduce(~np.isnan(b), axis=axes, dtype=np.int64, keepdims=True)

        found = wrap(reduced(piece, np.add, axes, keepdims, buf))
    else:
        found = sum(mask, axis=axes, keepdims=keepdims)
    return astype(found, real_of(wide))


def _masked(name: str, x: Array, wide: np.dtype, mask: Any) -> Any:
    """The mask as an array of booleans, but where pieces make their own of it."""
    if mask is not NOT_NAN:
        return None if mask is None else selection(name, mask, x)
    if x.dtype.kind in "biu":
        return None
    return mask if _in_pieces(x, wide, mask) is not None else ~isnan(x)


def mean_of(name: str, x: Any, axis: Any, keepdims: bool, dtype: Any, mask: Any = None) -> Array:
    """The mean of the counted elements; NaN where there are none."""
    x = as_array(x)
    wide, out = _dtypes(name, x, dtype)
    axes = shape_rules.normalize_axis(name, axis, x.ndim)
    mask = _masked(name, x, wide, mask)
    n = _count(x, axes, keepdims, wide, mask)
    if mask is None and (x.dtype == wide or _in_pieces(x, wide, mask) is None):
        params = {"axis": axes, "keepdims": bool(keepdims), "count": n}
        if x.dtype != out:  # a short float itself is summed in float32, and rounded once
            x = astype(x, wide, copy=False)
        return astype(apply(MEAN, (x,), params), out, copy=False)
    total = _total(x, axes, keepdims, wide, mask, None)
    return astype(total / ((n or math.nan) if mask is None else where(n > 0, n, math.nan)), out, copy=False)


def var_of(name: str, x: Any, axis: Any, correction: Any, keepdims: bool, dtype: Any, mask: Any = None) -> Array:
    """The variance of what counts, divided by its number less ``correction``, but by no less than 0. NaN is divided by
    nothing."""
    x = as_array(x)
    wide, out = _dtypes(name, x, dtype)
    axes = shape_rules.normalize_axis(name, axis, x.ndim)
    chosen = _masked(name, x, wide, mask)
    if _in_pieces(x, wide, chosen) is None:
        x = astype(x, wide, copy=False)  # once: each cast would round a part of the cotangent
    center = mean_of(name, x, axis, True, wide, chosen)
    total = _total(x, axes, keepdims, wide, chosen, center)
    rest = _count(x, axes, keepdims, wide, chosen) - correction
    if chosen is None:
        rest = max(as_number(name, "correction", rest), 0.0)
    else:
        rest = where(rest > 0, rest, math.nan) if mask is NOT_NAN else maximum(rest, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return astype(total / rest, real_of(out), copy=False)


def std_of(name: str, x: Any, axis: Any, correction: Any, keepdims: bool, dtype: Any, mask: Any = None) -> Array:
    """The root of :func:`var_of`, rounded once. Its slope at 0 is 0: a deviation of nothing has the slope of a norm at
    the origin."""
    x = as_array(x)
    wide, out = _dtypes(name, x, dtype)
    variance = var_of(name, x, axis, correction, keepdims, wide if out != wide else dtype, mask)
    none = variance == 0
    return astype(where(none, 0.0, sqrt(where(none, 1.0, variance))), real_of(out), copy=False)


# ----- the functions --------------------------------------------------------------------------------------------------


@composite("mean")
def mean(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, where: Any = None) -> Array:
    """Arithmetic mean; NaN for no elements. Integers give the default float; ``dtype`` is that of sum and result.

    >>> mt.mean(mt.asarray([1.0, 2.0, 6.0]))
    Array(3., dtype=float64)
    """
    return mean_of("mean", x, axis, keepdims, dtype, where)


@composite("var")
def var(
    x: Any,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    ddof: float | None = None,
    dtype: Any = None,
    where: Any = None,
) -> Array:
    """Variance, divided by ``n - correction``, in two passes (no cancellation); of complex numbers that of the plane.

    ``ddof`` is NumPy's older name of ``correction``; ``dtype`` is that of the result, and of what it is computed in.

    >>> mt.var(mt.asarray([1.0, 3.0]), correction=1)
    Array(2., dtype=float64)
    """
    return var_of("var", x, axis, correction if ddof is None else ddof, keepdims, dtype, where)


@composite("std")
def std(
    x: Any,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    ddof: float | None = None,
    dtype: Any = None,
    where: Any = None,
) -> Array:
    """Standard deviation: the root of :func:`var`; ``ddof`` and ``dtype`` are as there.

    Its gradient where all elements are equal is 0, as that of a norm at the origin. (That of ``sqrt(var(x))`` is NaN
    there.)

    >>> mt.std(mt.asarray([1.0, 3.0]))
    Array(1., dtype=float64)
    """
    return std_of("std", x, axis, correction if ddof is None else ddof, keepdims, dtype, where)
