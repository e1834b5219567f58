"""Statistics beyond the standard: reductions that pass over NaN, and counting."""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..backends import pieces
from ..backends.row_blocks import wide as wide_of
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import as_array, as_number, has_history, refuse_history, wrap
from ..core.dtypes import as_dtype
from ..core.errors import ArgumentError, DTypeError, ShapeError, TracedValueError
from ..core.op import composite
from ..ops.creation import asarray, beside, linspace, zeros
from ..ops.elementwise import clip, isnan, where
from ..ops.manipulation import astype, reshape
from ..reductions import moments, reductions
from ..reductions.cumulative import diff
from ..reductions.reductions import Axis
from ..reductions.searching import searchsorted

# ----- passing over NaN -----------------------------------------------------------------------------------------------


def _without_nan(x: Array, fill: float) -> tuple[Array, Array]:
    """NaN replaced, and where it was."""
    bad = isnan(x)
    return where(bad, fill, x), bad


def _in_pieces(
    piece: Callable[..., np.ndarray], ufunc: np.ufunc, axis: Axis, keepdims: bool, *operands: np.ndarray
) -> Array:
    """``piece(part, …, axes)`` of all parts, joined by ``ufunc``."""
    axes = shape_rules.normalize_axis("reduce", axis, operands[0].ndim)
    return wrap(pieces.reduced(lambda *parts: piece(*parts, axes), ufunc, axes, keepdims, *operands))


def _nan_total(name: str, fill: int, x: Any, axis: Axis, dtype: Any, keepdims: bool) -> Array:
    """The sum (the product, where ``fill`` is 1) of the elements that are not NaN."""
    x = as_array(x)
    reduce = reductions.prod if fill else reductions.sum
    if x.dtype.kind in "biu":
        return reduce(x, axis=axis, keepdims=keepdims, dtype=dtype)
    out = x.dtype if dtype is None else as_dtype(dtype, name)
    wide = wide_of(out)
    if out.kind in "biu" or (buf := pieces.large(x, wide)) is None:
        return reduce(_without_nan(x, fill)[0], axis=axis, keepdims=keepdims, dtype=dtype)
    ufunc = np.multiply if fill else np.add

    def piece(b: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        filled = np.where(np.isnan(b), wide.type(fill), b.astype(wide, copy=False))
        return ufunc.reduce(filled, axis=axes, keepdims=True)

    return astype(_in_pieces(piece, ufunc, axis, keepdims, buf), out, copy=False)


@composite("nansum")
def nansum(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Sum of the elements that are not NaN.

    >>> mt.nansum(mt.asarray([1.0, float("nan"), 2.0]))
    Array(3., dtype=float64)
    """
    return _nan_total("nansum", 0, x, axis, dtype, keepdims)


@composite("nanprod")
def nanprod(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Product of the elements that are not NaN.

    >>> mt.nanprod(mt.asarray([2.0, mt.nan, 3.0]))
    Array(6., dtype=float64)
    """
    return _nan_total("nanprod", 1, x, axis, dtype, keepdims)


def _nan_extremum(x: Any, axis: Axis, keepdims: bool, largest: bool) -> Array:
    x = as_array(x)
    reduce = reductions.max if largest else reductions.min
    if x.dtype.kind in "biu":
        return reduce(x, axis=axis, keepdims=keepdims)
    if x.dtype.kind != "c" and (buf := pieces.large(x, x.dtype)) is not None:
        ufunc = np.fmax if largest else np.fmin
        return _in_pieces(lambda b, axes: ufunc.reduce(b, axis=axes, keepdims=True), ufunc, axis, keepdims, buf)
    filled, bad = _without_nan(x, -np.inf if largest else np.inf)
    out = reduce(filled, axis=axis, keepdims=keepdims)
    return where(reductions.all(bad, axis=axis, keepdims=keepdims), np.nan, out)


@composite("nanmax")
def nanmax(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """Largest element that is not NaN; NaN where all are.

    >>> mt.nanmax(mt.asarray([2.0, mt.nan, 3.0]))
    Array(3., dtype=float64)
    """
    return _nan_extremum(x, axis, keepdims, largest=True)


@composite("nanmin")
def nanmin(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """Smallest element that is not NaN; NaN where all are.

    >>> mt.nanmin(mt.asarray([2.0, mt.nan, 3.0]))
    Array(2., dtype=float64)
    """
    return _nan_extremum(x, axis, keepdims, largest=False)


@composite("nanmean")
def nanmean(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Mean of the elements that are not NaN; NaN where all are. ``dtype`` is that of sum and result.

    >>> mt.nanmean(mt.asarray([2.0, mt.nan, 3.0]))
    Array(2.5, dtype=float64)
    """
    return moments.mean_of("nanmean", x, axis, keepdims, dtype, moments.NOT_NAN)


@composite("nanvar")
def nanvar(
    x: Any,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    ddof: float | None = None,
    dtype: Any = None,
) -> Array:
    """Variance of the elements that are not NaN, over their number less ``correction``; NaN where that is not positive.

    ``ddof`` is NumPy's older name of ``correction``; ``dtype`` is that of the result, and of what it is computed in.

    >>> mt.nanvar(mt.asarray([1.0, mt.nan, 3.0]))
    Array(1., dtype=float64)
    """
    return moments.var_of("nanvar", x, axis, correction if ddof is None else ddof, keepdims, dtype, moments.NOT_NAN)


@composite("nanstd")
def nanstd(
    x: Any,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    ddof: float | None = None,
    dtype: Any = None,
) -> Array:
    """Root of :func:`nanvar`.

    >>> mt.nanstd(mt.asarray([1.0, mt.nan, 3.0]))
    Array(1., dtype=float64)
    """
    return moments.std_of("nanstd", x, axis, correction if ddof is None else ddof, keepdims, dtype, moments.NOT_NAN)


# ----- counting -------------------------------------------------------------------------------------------------------


@composite("bincount")
def bincount(x: Any, /, weights: Any = None, minlength: int = 0, *, length: int | None = None) -> Array:
    """How often each of ``0 … length-1`` occurs (or the sum of the weights that stand beside it).

    Parameters
    ----------
    x
        Integers that are not negative, in one dimension.
    weights
        One number an element; the result is differentiable in them. Small integers sum in 64 bits, short floats in
        float32.
    minlength
        The result is longer where an element asks for it.
    length
        Of the result; the largest element and one by default, which must then be known. Elements beyond it are an
        error.

    Examples
    --------
    >>> mt.bincount(mt.asarray([0, 2, 2]), length=4)
    Array([1, 0, 2, 0])
    """
    x = asarray(x)
    if x.dtype.kind not in "iu" or x.ndim != 1:
        raise DTypeError(f"[bincount] takes integers in one dimension, got {x.dtype.name} of shape {x.shape}")
    if minlength < 0:
        raise ArgumentError(f"[bincount] minlength must not be negative, got {minlength}")
    if length is None and getattr(x._buf, "traced", False):
        raise TracedValueError(
            f"[bincount] how long the result is depends on the values of a {x._buf.aval} (minlength is the least), "
            "which mt.compile does not know: pass length="
        )
    host = x._concrete() if length is None or beside(x) is not None else None
    if host is not None and host.size and host.min() < 0:
        raise ArgumentError(f"[bincount] elements must not be negative, got {int(host.min())}")
    if length is None:
        length = max(int(host.max()) + 1 if host is not None and host.size else 0, minlength)
    elif length < minlength:
        raise ArgumentError(f"[bincount] a length of {length} is less than the minlength of {minlength}")
    values: Any = 1 if weights is None else asarray(weights)
    if weights is not None and values.shape != x.shape:
        raise ShapeError(f"[bincount] weights of shape {values.shape} for elements of shape {x.shape}")
    if weights is None:
        return zeros(length, dtype=np.int64, device=beside(x)).at[x].add(values)
    kind = values.dtype.kind
    wide = np.dtype(np.uint64 if kind == "u" else np.int64) if kind in "biu" else wide_of(values.dtype)
    total = zeros(length, dtype=wide, device=beside(x)).at[x].add(astype(values, wide, copy=False))
    return total if kind in "biu" else astype(total, values.dtype, copy=False)


class Histogram(NamedTuple):
    """Counts of the bins, and their edges (one more)."""

    counts: Array
    edges: Array


@composite("histogram")
def histogram(
    x: Any, /, bins: Any = 10, *, range: tuple[float, float] | None = None, weights: Any = None, density: bool = False
) -> Histogram:
    """How many elements fall in each bin. All bins but the last are open at their upper end.

    Parameters
    ----------
    bins
        A number of bins of one width between the ends of ``range`` (the extremes of ``x`` by default), ascending edges,
        or the name of one of NumPy's rules for the number (``"auto"``, ``"fd"``, ``"sturges"``, …), which looks at the
        values.
    weights
        One number an element, summed instead of counted.
    density
        Divide by the total and by the widths: the integral is one.

    Examples
    --------
    >>> mt.histogram(mt.asarray([0.0, 0.1, 0.9]), 2, range=(0.0, 1.0)).counts
    Array([2, 1])
    """
    flat = reshape(asarray(x), (-1,))
    if flat.dtype.kind == "c":
        raise DTypeError("[histogram] complex numbers have no order")
    if isinstance(bins, str):  # how many NumPy would make; where they lie follows below
        bins = np.histogram_bin_edges(flat._concrete(), bins, range).size - 1
    moving = range is None and isinstance(bins, int | np.integer) and has_history(flat)
    if isinstance(bins, int | np.integer):
        if range is None:
            host = flat._concrete()
            range = (float(host.min()), float(host.max())) if host.size else (0.0, 1.0)
        low, high = (as_number("histogram", "range", v) for v in range)
        if not np.isfinite([low, high]).all() or low > high or bins < 1:
            raise ArgumentError(f"[histogram] {bins} bins between {low} and {high}")
        wide = np.dtype(np.float64) if flat.dtype.kind in "biu" else wide_of(flat.dtype)
        if low == high:
            low, high, moving = low - 0.5, high + 0.5, False
        edges = np.linspace(low, high, bins + 1, dtype=wide)
    else:
        for v in bins if isinstance(bins, list | tuple) else [bins]:
            refuse_history("histogram", v, "the counts have no derivative by the edges")
        edges = np.asarray(bins)
        if edges.ndim != 1 or edges.size < 2 or (np.diff(edges) < 0).any():
            raise ArgumentError("[histogram] edges must be at least two ascending numbers in one dimension")
    n = edges.size - 1
    where_to = asarray(edges, device=beside(flat))
    if moving:  # the outermost edges are elements, which have derivatives
        where_to = linspace(*(astype(r(flat), edges.dtype) for r in (reductions.min, reductions.max)), n + 1)
    values = None if weights is None else reshape(asarray(weights, device=beside(flat)), (-1,))
    if values is not None and values.shape != flat.shape:
        raise ShapeError(f"[histogram] {values.size} weights for {flat.size} elements")

    def counted(v: Array, of: Array | None) -> Array:
        at = searchsorted(where_to, v, side="right") - 1
        at = where(v == where_to[-1], n - 1, at)
        inside = (at >= 0) & (at < n) & (v == v)
        each = where(inside, asarray(1, device=beside(v)) if of is None else of, 0)
        return bincount(clip(at, 0, n - 1), weights=each, length=n)

    if pieces.large(flat) is None:
        counts = counted(flat, values)
    else:  # places take eight bytes an element, several times over
        cuts = [slice(i, i + pieces.PIECE) for i in builtins.range(0, flat.size, pieces.PIECE)]
        parts = (counted(flat[cut], None if values is None else values[cut]) for cut in cuts)
        counts = functools.reduce(operator.add, parts)
    if density:
        counts = astype(counts, np.float64) if counts.dtype.kind in "biu" else counts
        counts = counts / reductions.sum(counts) / diff(where_to)
    return Histogram(counts, where_to)
