"""Statistics beyond the standard: order statistics, reductions that pass over NaN, counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _infer
from ._op import composite
from .errors import DTypeError, ShapeError

if TYPE_CHECKING:
    from ._array import Array

Axis = int | Sequence[int] | None

# ----- order ----------------------------------------------------------------------------------------------------------


class TopK(NamedTuple):
    """The ``k`` largest (or smallest) elements in order, and where they are."""

    values: Array
    indices: Array


@composite("topk")
def topk(x: Any, k: int, /, *, axis: int = -1, largest: bool = True) -> TopK:
    """The ``k`` largest elements along an axis, largest first (or smallest, smallest first); of equals the first ones.

    >>> import meshtape as mt
    >>> mt.topk(mt.asarray([3.0, 1.0, 5.0]), 2)
    TopK(values=Array([5., 3.], dtype=float64), indices=Array([2, 0]))
    """
    from .creation import asarray
    from .searching import take_along_axis
    from .sorting import argsort

    x = asarray(x)
    (axis,) = _infer.normalize_axis("topk", axis, x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ShapeError(f"[topk] cannot take {k} of the {x.shape[axis]} elements along axis {axis} of shape {x.shape}")
    order = argsort(x, axis=axis, descending=largest)
    indices = order[(*(slice(None),) * axis, slice(None, k))]
    return TopK(take_along_axis(x, indices, axis=axis), indices)


def _rows(name: str, x: Any, axis: Axis) -> tuple[Array, tuple[int, ...]]:
    """The axes laid out as one last dimension, and the axes."""
    from .creation import asarray
    from .manipulation import astype, permute_dims, reshape

    x = asarray(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"[{name}] complex numbers have no order")
    x = astype(x, np.float64) if x.dtype.kind in "biu" else x
    axes = _infer.normalize_axis(name, axis, x.ndim)
    keep = [i for i in range(x.ndim) if i not in axes]
    return reshape(
        permute_dims(x, (*keep, *axes)), (*(x.shape[i] for i in keep), -1 if x.size else _length(x, axes))
    ), axes


def _length(x: Array, axes: tuple[int, ...]) -> int:
    n = 1
    for a in axes:
        n *= x.shape[a]
    return n


_METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


@composite("quantile")
def quantile(x: Any, q: Any, /, *, axis: Axis = None, keepdims: bool = False, method: str = "linear") -> Array:
    """Values below which the parts ``q`` (between 0 and 1) of the elements lie; NaN where there is one.

    Parameters
    ----------
    q
        A number, or numbers in one dimension, which then comes first in the result.
    method
        Between two elements: ``"linear"``, ``"lower"``, ``"higher"``, ``"midpoint"`` or ``"nearest"``.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.quantile(mt.asarray([1.0, 2.0, 4.0]), 0.75)
    Array(3., dtype=float64)
    """
    from .creation import asarray
    from .elementwise import isnan, where
    from .manipulation import astype, expand_dims, moveaxis
    from .reductions import any
    from .sorting import sort

    rows, axes = _rows("quantile", x, axis)
    parts = np.asarray(q, dtype=np.float64)
    if parts.ndim > 1:
        raise ShapeError(f"[quantile] q must be a number or have one dimension, got shape {parts.shape}")
    if not ((parts >= 0) & (parts <= 1)).all():
        raise ValueError("[quantile] q must be between 0 and 1")
    if method not in _METHODS:
        raise ValueError(f"[quantile] method must be one of {', '.join(_METHODS)}, got {method!r}")
    n = rows.shape[-1]
    if n == 0:
        raise ShapeError("[quantile] of no elements has no value")
    at = parts * (n - 1)
    low, high = np.floor(at).astype(np.intp), np.ceil(at).astype(np.intp)
    share = {
        "linear": at - low,
        "lower": np.zeros_like(at),
        "higher": (high > low).astype(float),
        "midpoint": 0.5 * (high > low),
        "nearest": np.round(at) - low,
    }[method]
    ordered = sort(rows, axis=-1)
    below, above = ordered[..., low], ordered[..., high]
    weight = asarray(share.astype(_weight_dtype(rows.dtype)), device=_beside(rows))
    # Not below + (above - below) * 0: that would be NaN between two infinities.
    out = where(weight == 0, below, where(weight == 1, above, below * (1 - weight) + above * weight))
    out = astype(out, rows.dtype, copy=False)
    bad = any(isnan(rows), axis=-1)
    out = where(bad if parts.ndim == 0 else expand_dims(bad, axis=-1), np.nan, out)
    if parts.ndim:
        out = moveaxis(out, -1, 0)
    return expand_dims(out, axis=tuple(a + parts.ndim for a in axes)) if keepdims else out


def _weight_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype.itemsize <= 2 else dtype


def _beside(x: Array) -> Any:
    from .creation import beside

    return beside(x)


def percentile(x: Any, q: Any, /, *, axis: Axis = None, keepdims: bool = False, method: str = "linear") -> Array:
    """:func:`quantile` with ``q`` between 0 and 100."""
    return quantile(x, np.asarray(q) / 100, axis=axis, keepdims=keepdims, method=method)


def median(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The middle element, or the mean of the two in the middle; NaN where there is one.

    >>> import meshtape as mt
    >>> mt.median(mt.asarray([[1.0, 9.0, 2.0], [3.0, 4.0, 5.0]]), axis=1)
    Array([2., 4.], dtype=float64)
    """
    return quantile(x, 0.5, axis=axis, keepdims=keepdims)


# ----- passing over NaN -----------------------------------------------------------------------------------------------


def _without_nan(x: Any, fill: float) -> tuple[Array, Array]:
    """NaN replaced, and where it was."""
    from .creation import asarray
    from .elementwise import isnan, where

    x = asarray(x)
    bad = isnan(x)
    return (where(bad, fill, x) if x.dtype.kind in "fcV" else x), bad


@composite("nansum")
def nansum(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Sum of what is not NaN.

    >>> import meshtape as mt
    >>> mt.nansum(mt.asarray([1.0, float("nan"), 2.0]))
    Array(3., dtype=float64)
    """
    from .reductions import sum

    return sum(_without_nan(x, 0)[0], axis=axis, keepdims=keepdims)


@composite("nanprod")
def nanprod(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Product of what is not NaN."""
    from .reductions import prod

    return prod(_without_nan(x, 1)[0], axis=axis, keepdims=keepdims)


def _nan_extremum(x: Any, axis: Axis, keepdims: bool, largest: bool) -> Array:
    from .creation import asarray
    from .elementwise import where
    from .reductions import all, max, min

    x = asarray(x)
    reduce = max if largest else min
    if x.dtype.kind in "biu":
        return reduce(x, axis=axis, keepdims=keepdims)
    filled, bad = _without_nan(x, -np.inf if largest else np.inf)
    out = reduce(filled, axis=axis, keepdims=keepdims)
    return where(all(bad, axis=axis, keepdims=keepdims), np.nan, out)


@composite("nanmax")
def nanmax(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Largest element that is not NaN; NaN where all are."""
    return _nan_extremum(x, axis, keepdims, largest=True)


@composite("nanmin")
def nanmin(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Smallest element that is not NaN; NaN where all are."""
    return _nan_extremum(x, axis, keepdims, largest=False)


@composite("nanmean")
def nanmean(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Mean of what is not NaN; NaN where all are."""
    from .manipulation import astype
    from .reductions import sum

    filled, bad = _without_nan(x, 0)
    if filled.dtype.kind in "biu":
        filled = astype(filled, np.float64)
    wide = _weight_dtype(filled.dtype)
    count = sum(astype(~bad, np.int64), axis=axis, keepdims=keepdims)
    n = astype(count, np.float64 if wide.kind == "c" else wide)
    total = sum(astype(filled, wide, copy=False), axis=axis, keepdims=keepdims)
    with np.errstate(invalid="ignore"):
        return astype(total / n, filled.dtype, copy=False)


@composite("nanvar")
def nanvar(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Variance of what is not NaN, divided by their number less ``correction``; NaN where that is not positive."""
    from .elementwise import abs, square, where
    from .manipulation import astype
    from .reductions import sum

    filled, bad = _without_nan(x, 0)
    if filled.dtype.kind in "biu":
        filled = astype(filled, np.float64)
    wide = astype(filled, _weight_dtype(filled.dtype), copy=False)
    mean = nanmean(where(bad, np.nan, wide), axis=axis, keepdims=True)
    d = where(bad, 0.0, wide - mean)
    squares = square(abs(d)) if d.dtype.kind == "c" else square(d)
    count = sum(astype(~bad, np.int64), axis=axis, keepdims=keepdims)
    n = astype(count, squares.dtype) - correction
    out = sum(squares, axis=axis, keepdims=keepdims) / where(n > 0, n, np.nan)
    return astype(out, filled.dtype, copy=False) if filled.dtype.kind != "c" else out


@composite("nanstd")
def nanstd(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Root of :func:`nanvar`."""
    from .elementwise import sqrt

    return sqrt(nanvar(x, axis=axis, correction=correction, keepdims=keepdims))


# ----- counting -------------------------------------------------------------------------------------------------------


@composite("bincount")
def bincount(x: Any, /, *, weights: Any = None, length: int | None = None) -> Array:
    """How often each of ``0 … length-1`` occurs (or the sum of the weights that stand beside it).

    Parameters
    ----------
    x
        Integers that are not negative, in one dimension.
    weights
        One number an element; the result is differentiable in them.
    length
        Of the result; the largest element and one by default, which must then be known. Elements beyond it are an error.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.bincount(mt.asarray([0, 2, 2]), length=4)
    Array([1, 0, 2, 0])
    """
    from .creation import asarray, beside, zeros

    x = asarray(x)
    if x.dtype.kind not in "iu" or x.ndim != 1:
        raise DTypeError(f"[bincount] takes integers in one dimension, got {x.dtype.name} of shape {x.shape}")
    host = x._concrete() if length is None or beside(x) is not None else None
    if host is not None and host.size and host.min() < 0:
        raise ValueError(f"[bincount] elements must not be negative, got {int(host.min())}")
    if length is None:
        length = int(host.max()) + 1 if host is not None and host.size else 0
    values: Any = 1 if weights is None else asarray(weights)
    if weights is not None and values.shape != x.shape:
        raise ShapeError(f"[bincount] weights of shape {values.shape} for elements of shape {x.shape}")
    dtype = np.dtype(np.int64) if weights is None else values.dtype
    return zeros(length, dtype=dtype, device=beside(x)).at[x].add(values)


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
        A number of bins of one width between the ends of ``range`` (the extremes of ``x`` by default), or ascending edges.
    weights
        One number an element, summed instead of counted.
    density
        Divide by the total and by the widths: the integral is one.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.histogram(mt.asarray([0.0, 0.1, 0.9]), 2, range=(0.0, 1.0)).counts
    Array([2, 1])
    """
    from .creation import asarray, beside
    from .elementwise import clip, where
    from .manipulation import astype, reshape
    from .reductions import sum
    from .searching import searchsorted

    flat = reshape(asarray(x), (-1,))
    if isinstance(bins, int | np.integer):
        if range is None:
            host = flat._concrete()
            range = (float(host.min()), float(host.max())) if host.size else (0.0, 1.0)
        low, high = map(float, range)
        if not np.isfinite([low, high]).all() or low > high or bins < 1:
            raise ValueError(f"[histogram] {bins} bins between {low} and {high}")
        edges = np.linspace(low, high, bins + 1) if high > low else np.linspace(low - 0.5, high + 0.5, bins + 1)
    else:
        edges = np.asarray(bins)
        if edges.ndim != 1 or edges.size < 2 or (np.diff(edges) < 0).any():
            raise ValueError("[histogram] edges must be at least two ascending numbers in one dimension")
    n = edges.size - 1
    where_to = asarray(edges, device=beside(flat))
    at = searchsorted(where_to, flat, side="right") - 1
    at = where(flat == where_to[-1], n - 1, at)
    inside = (at >= 0) & (at < n) & (flat == flat)
    values = asarray(1 if weights is None else weights, device=beside(flat))
    values = where(inside, values if weights is None else reshape(values, (-1,)), 0)
    counts = bincount(clip(at, 0, n - 1), weights=values, length=n)
    if density:
        counts = astype(counts, np.float64) if counts.dtype.kind in "biu" else counts
        counts = counts / sum(counts) / asarray(np.diff(edges), device=beside(flat))
    return Histogram(counts, where_to)
