"""Averages, covariance, running sums, counts in bins, and NumPy's reductions that pass over NaN."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends import pieces
from ..backends.pieces import buffer
from ..backends.row_blocks import wide
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Deferred, wrap
from ..core.dtypes import real_of, result_type
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import composite
from ..linalg.decompositions import diagonal
from ..ops.creation import asarray, beside, full, full_like, inexact, ordered
from ..ops.elementwise import clip, conj, floor, floor_divide, isnan, real, remainder, sqrt, where
from ..ops.manipulation import broadcast_to, concat, moveaxis, reshape
from ..ops.matmul import matmul
from ..ops.wide_floats import in_float32
from ..reductions.cumulative import cumulative_prod, cumulative_sum
from ..reductions.moments import mean
from ..reductions.reductions import Axis, all, any, argmax, argmin, max, min, sum
from ..reductions.searching import searchsorted, take_along_axis
from ..reductions.sorting import flattened, sort
from ..statistics import statistics
from ..statistics.quantiles import between, quantile, weights_of

# ----- shapes of anything ---------------------------------------------------------------------------------------------


def shape(x: Any, /) -> tuple[int, ...]:
    """The shape of an array, or of anything that could become one.

    >>> mt.shape([[1, 2]])
    (1, 2)
    """
    return asarray(x).shape


def ndim(x: Any, /) -> int:
    """The number of dimensions.

    >>> mt.ndim([[1, 2]])
    2
    """
    return asarray(x).ndim


def size(x: Any, /, axis: int | None = None) -> int:
    """The number of elements, or the length of one dimension.

    >>> mt.size([[1, 2]]), mt.size([[1, 2]], 0)
    (2, 1)
    """
    x = asarray(x)
    return x.size if axis is None else x.shape[axis]


# ----- moments --------------------------------------------------------------------------------------------------------


@composite("average")
def average(
    x: Any, /, axis: Axis = None, weights: Any = None, *, returned: bool = False, keepdims: bool = False
) -> Any:
    """The mean, each element counted by its weight.

    The weights have the shape of ``x``, or that of its dimensions ``axis``.

    With ``returned`` the sum of the weights too. The mean is NaN where they add up to zero (NumPy raises
    `ZeroDivisionError`): so it is the same inside a compiled function and of arrays that are split, whose values are
    not known.

    >>> mt.average(mt.asarray([1.0, 4.0]), weights=[2, 1])
    Array(2., dtype=float64)
    """
    x = asarray(x)
    if weights is None:
        out = mean(x, axis=axis, keepdims=keepdims)
        return (out, full_like(out, x.size / builtins.max(out.size, 1))) if returned else out
    return _weighted(x, axis, asarray(weights), returned, keepdims)


@in_float32
def _weighted(x: Array, axis: Axis, w: Array, returned: bool, keepdims: bool) -> Any:
    w = weights_of("average", x, axis, w)
    # As NumPy: what is short of a float is counted in float64, before anything is multiplied.
    dtype = result_type(x.dtype, w.dtype, *([np.float64] if x.dtype.kind in "biu" else []))
    total = sum(broadcast_to(w, x.shape), axis=axis, keepdims=keepdims, dtype=dtype)
    axes = shape_rules.normalize_axis("average", axis, x.ndim)
    if (buf := pieces.large(x)) is not None and (v := buffer(w)) is not None:

        def piece(b: np.ndarray, v: np.ndarray) -> np.ndarray:
            return np.add.reduce(np.multiply(b, v, dtype=dtype), axis=axes, keepdims=True)

        out = wrap(pieces.reduced(piece, np.add, axes, keepdims, buf, v))
    else:
        x, w = x.astype(dtype, copy=False), w.astype(dtype, copy=False)
        out = sum(x * w, axis=axes, keepdims=keepdims)
    out = out / where(total == 0, np.nan, total)
    return (out, total) if returned else out


@composite("cov")
@in_float32
def cov(
    x: Any,
    y: Any = None,
    /,
    rowvar: bool = True,
    *,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
) -> Array:
    """The covariance matrix of variables, one a row (a column without ``rowvar``), and their observations.

    Parameters
    ----------
    x, y
        Observations; the variables of ``y`` come behind those of ``x``.
    rowvar
        Whether rows are variables.
    bias, ddof
        The sum is divided by ``n - ddof``, by default by ``n - 1``, by ``n`` with ``bias``.
    fweights, aweights
        How often each observation counts (integers), and how much.

    Examples
    --------
    >>> mt.cov(mt.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
    Array([[ 1., -1.],
           [-1.,  1.]], dtype=float64)
    """

    def variables(v: Any) -> Array:
        v = inexact(v)
        if v.ndim > 2:
            raise ShapeError(f"[cov] takes vectors and matrices, got shape {v.shape}")
        # A vector is one variable either way.
        return reshape(v, (1, -1)) if v.ndim < 2 else v if rowvar else v.mT

    x = variables(x)
    if y is not None:
        x = concat([x, variables(y)], axis=0)
    n = x.shape[1]
    ddof = (0 if bias else 1) if ddof is None else ddof
    w: Any = None
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is not None:
            given = asarray(given)
            if name == "fweights" and given.dtype.kind not in "biu":
                raise DTypeError(f"[cov] fweights are integers, got {given.dtype.name}: aweights are any numbers")
            if not isinstance(given._buf, Deferred) and bool((given < 0).any()):
                raise ArgumentError("[cov] weights must not be negative")
            if given.shape != (n,):
                raise ShapeError(f"[cov] weights of shape {given.shape} for {n} observations")
            given = given.astype(real_of(x.dtype)) if given.dtype.kind in "biu" else given
            w = given if w is None else w * given
    if w is None:
        total, rest = n, n - ddof
        centred = x - mean(x, axis=1, keepdims=True)
        product = matmul(centred, conj(centred).mT)
    else:
        total = sum(w)
        rest = total - ddof if aweights is None else total - ddof * sum(w * given) / total
        rest = where(rest > 0, rest, 0)
        centred = x - sum(x * w, axis=1, keepdims=True) / total
        product = matmul(centred * w, conj(centred).mT)
    divisor = asarray(builtins.max(rest, 0) if isinstance(rest, int | float) else rest).astype(real_of(x.dtype))
    with np.errstate(divide="ignore", invalid="ignore"):
        out = product / divisor
    return reshape(out, ()) if out.size == 1 else out


@composite("corrcoef")
@in_float32
def corrcoef(x: Any, y: Any = None, /, rowvar: bool = True) -> Array:
    """Correlation coefficients of variables, see :func:`cov`.

    >>> mt.corrcoef(mt.asarray([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]))
    Array([[ 1., -1.],
           [-1.,  1.]], dtype=float64)
    """
    c = cov(x, y, rowvar)
    if c.ndim == 0:
        return c / c
    d = sqrt(real(diagonal(c)))
    out = c / d[:, None] / d[None, :]
    return out if out.dtype.kind == "c" else clip(out, -1, 1)


def ptp(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The distance of the largest from the smallest element.

    >>> mt.ptp(mt.asarray([3, 1, 9]))
    Array(8)
    """
    x = asarray(x)
    return max(x, axis=axis, keepdims=keepdims) - min(x, axis=axis, keepdims=keepdims)


def divmod(x: Any, y: Any, /) -> tuple[Array, Array]:
    """The rounded-down quotient and the remainder.

    >>> mt.divmod(mt.asarray([7, -7]), 2)
    (Array([ 3, -4]), Array([1, 1]))
    """
    return floor_divide(x, y), remainder(x, y)


# ----- running --------------------------------------------------------------------------------------------------------


def _running(function: Any, x: Any, axis: int | None, dtype: Any) -> Array:
    x, axis = flattened(asarray(x), axis)
    return function(x, axis=axis, dtype=dtype)


def cumsum(x: Any, /, axis: int | None = None, dtype: Any = None) -> Array:
    """Running sums along ``axis``; of the flat array without one.

    >>> mt.cumsum(mt.asarray([[1, 2], [3, 4]]))
    Array([ 1,  3,  6, 10])
    """
    return _running(cumulative_sum, x, axis, dtype)


def cumprod(x: Any, /, axis: int | None = None, dtype: Any = None) -> Array:
    """Running products along ``axis``; of the flat array without one.

    >>> mt.cumprod(mt.asarray([1, 2, 3]))
    Array([1, 2, 6])
    """
    return _running(cumulative_prod, x, axis, dtype)


def nancumsum(x: Any, /, axis: int | None = None, dtype: Any = None) -> Array:
    """Running sums, NaN counted as nothing.

    >>> mt.nancumsum(mt.asarray([1.0, mt.nan, 2.0]))
    Array([1., 1., 3.], dtype=float64)
    """
    x = asarray(x)
    return cumsum(where(isnan(x), 0, x) if x.dtype.kind in "fcV" else x, axis, dtype)


def nancumprod(x: Any, /, axis: int | None = None, dtype: Any = None) -> Array:
    """Running products, NaN counted as one.

    >>> mt.nancumprod(mt.asarray([2.0, mt.nan, 3.0]))
    Array([2., 2., 6.], dtype=float64)
    """
    x = asarray(x)
    return cumprod(where(isnan(x), 1, x) if x.dtype.kind in "fcV" else x, axis, dtype)


# ----- past NaN -------------------------------------------------------------------------------------------------------


def _nan_position(name: str, x: Any, axis: int | None, keepdims: bool, find: Any, fill: float) -> Array:
    x = asarray(x)
    if x.dtype.kind in "biu":
        return find(x, axis=axis, keepdims=keepdims)
    bad = isnan(x)
    if not isinstance(bad._buf, Deferred) and bool(all(bad, axis=axis).any()):
        raise ArgumentError(f"[{name}] a slice is NaN throughout")
    found = find(where(bad, fill, x), axis=axis, keepdims=keepdims)
    return where(all(bad, axis=axis, keepdims=keepdims), -1, found) if isinstance(bad._buf, Deferred) else found


@composite("nanargmax")
def nanargmax(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """The place of the largest element that is not NaN. Raises `ValueError` where all are.

    Inside a compiled function, and of an array that is split, values are not known: there the place is -1 where all are
    NaN.

    >>> mt.nanargmax(mt.asarray([mt.nan, 3.0, 1.0]))
    Array(1)
    """
    return _nan_position("nanargmax", x, axis, keepdims, argmax, -np.inf)


@composite("nanargmin")
def nanargmin(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """The place of the smallest element that is not NaN. Raises `ValueError` where all are.

    Inside a compiled function, and of an array that is split, values are not known: there the place is -1 where all are
    NaN.

    >>> mt.nanargmin(mt.asarray([mt.nan, 3.0, 1.0]))
    Array(2)
    """
    return _nan_position("nanargmin", x, axis, keepdims, argmin, np.inf)


@composite("nanquantile")
def nanquantile(x: Any, /, q: Any, axis: Axis = None, *, keepdims: bool = False, method: str = "linear") -> Array:
    """Quantiles of the elements that are not NaN, by linear interpolation; NaN where all are.

    The dimensions of ``q`` come first.

    >>> mt.nanquantile(mt.asarray([1.0, mt.nan, 3.0]), 0.5)
    Array(2., dtype=float64)
    """
    x, q = asarray(x), asarray(q)
    if method != "linear":
        raise ArgumentError(
            f"[nanquantile] method must be 'linear', got {method!r}: quantile has the others, without NaN"
        )
    if x.dtype.kind == "c":
        raise DTypeError(f"[nanquantile] complex numbers have no order, got {x.dtype}")
    if x.dtype.kind in "biu" and x.size:  # which have no NaN
        return quantile(x, q, axis, keepdims=keepdims)
    x = inexact(x)
    if bool(any((q < 0) | (q > 1))):
        raise ArgumentError("[nanquantile] quantiles lie between 0 and 1")
    axes = shape_rules.normalize_axis("nanquantile", axis, x.ndim)
    kept = tuple(i for i in range(x.ndim) if i not in axes)
    flat = moveaxis(x, kept, tuple(range(len(kept))))
    flat = reshape(flat, (*(x.shape[i] for i in kept), math.prod(x.shape[i] for i in axes)))
    if flat.shape[-1] == 0:
        flat = full((*flat.shape[:-1], 1), np.nan, dtype=x.dtype, device=beside(x))
    levels, n = reshape(q.astype(np.float64), (1,) * len(kept) + (-1,)), len(flat)
    step = builtins.max(1, n * pieces.PIECE // flat.size) if kept and pieces.large(flat) is not None else n
    cuts = [flat] if step == n else [flat[i : i + step] for i in range(0, n, step)]
    out = concat([_nan_quantiles(cut, levels) for cut in cuts], axis=0)
    out = reshape(moveaxis(out, -1, 0), (*q.shape, *(x.shape[i] for i in kept)))
    if keepdims:
        out = reshape(out, (*q.shape, *(1 if i in axes else n for i, n in enumerate(x.shape))))
    return out


def _nan_quantiles(rows: Array, levels: Array) -> Array:
    """Those of each row of the last dimension."""
    count = sum(~isnan(rows), axis=-1, keepdims=True)
    ordered = sort(where(isnan(rows), np.inf, rows), axis=-1)
    place = clip(count - 1, 0, None) * levels
    low = floor(place).astype(np.int64)
    high = clip(low + 1, None, clip(count - 1, 0, None))
    a, b = take_along_axis(ordered, low, axis=-1), take_along_axis(ordered, high, axis=-1)
    out = between(a, b, (place - low).astype(wide(rows.dtype))).astype(rows.dtype, copy=False)
    return where(count == 0, np.nan, out)


@composite("nanpercentile")
def nanpercentile(x: Any, /, q: Any, axis: Axis = None, *, keepdims: bool = False, method: str = "linear") -> Array:
    """Quantiles of the elements that are not NaN, in percent; see :func:`nanquantile`.

    >>> mt.nanpercentile(mt.asarray([1.0, mt.nan, 3.0]), 100)
    Array(3., dtype=float64)
    """
    return nanquantile(x, asarray(q) / 100, axis, keepdims=keepdims, method=method)


def nanmedian(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The median of the elements that are not NaN.

    >>> mt.nanmedian(mt.asarray([1.0, mt.nan, 3.0]))
    Array(2., dtype=float64)
    """
    return nanquantile(x, 0.5, axis, keepdims=keepdims)


# ----- bins -----------------------------------------------------------------------------------------------------------


@composite("digitize")
def digitize(x: Any, bins: Any, /, right: bool = False) -> Array:
    """Which bin each element falls into: ``i`` where ``bins[i-1] <= x < bins[i]`` (the other ends with ``right``).

    >>> mt.digitize(mt.asarray([0.5, 1.0, 5.0]), [0.0, 1.0, 2.0])
    Array([1, 2, 3])
    """
    bins, x = asarray(bins), ordered("digitize", x)
    if bins.ndim != 1:
        raise ShapeError(f"[digitize] bins are a vector, got shape {bins.shape}")
    edges = np.asarray(bins)
    ascending, descending = bool((edges[1:] >= edges[:-1]).all()), bool((edges[1:] <= edges[:-1]).all())
    if not (ascending or descending):
        raise ArgumentError("[digitize] bins must ascend or descend")
    side = "left" if right else "right"
    if ascending:
        return searchsorted(bins, x, side=side)
    return edges.size - searchsorted(bins[::-1], x, side=side)


def histogram_bin_edges(x: Any, /, bins: int | Sequence[float] = 10, range: tuple[float, float] | None = None) -> Array:
    """The edges of the bins that :func:`histogram` would count in.

    >>> mt.histogram_bin_edges(mt.asarray([0.0, 4.0]), 4)
    Array([0., 1., 2., 3., 4.], dtype=float64)
    """
    return statistics.histogram(x, bins, range=range)[1]


@composite("histogram2d")
def histogram2d(
    x: Any, y: Any, /, bins: Any = 10, range: Any = None, *, weights: Any = None, density: bool | None = None
) -> tuple[Array, Array, Array]:
    """Counts of points in a grid of bins, and the edges of the bins of both coordinates.

    Parameters
    ----------
    x, y
        Coordinates, two vectors of one length.
    bins
        The number of bins of both, or the edges of both, or a pair of either.
    range
        The lowest and highest edge of each of both; those of the points by default.
    weights
        The weight of each point.
    density
        Whether the counts are divided by their sum and by the areas of the bins.

    Examples
    --------
    >>> mt.histogram2d([0.0, 1.0, 1.0], [0.0, 1.0, 1.0], 2)[0]
    Array([[1., 0.],
           [0., 2.]], dtype=float64)
    """
    x, y = asarray(x), asarray(y)
    if x.ndim != 1 or x.shape != y.shape:
        raise ShapeError(f"[histogram2d] coordinates are two vectors of one length, got shapes {x.shape} and {y.shape}")
    one = isinstance(bins, int) or len(bins) not in (1, 2)
    first, second = (bins, bins) if one else tuple(bins) * (3 - len(bins))
    spans = (None, None) if range is None else range
    edges = [histogram_bin_edges(v, b, s) for v, b, s in zip((x, y), (first, second), spans, strict=True)]
    inside, places = None, []
    for v, e in zip((x, y), edges, strict=True):
        place = searchsorted(e, v, side="right") - 1
        place = where(v == e[-1], e.size - 2, place)  # the last bin has both its edges
        fits = (place >= 0) & (place < e.size - 1)
        inside = fits if inside is None else inside & fits
        places.append(clip(place, 0, e.size - 2))
    rows, columns = edges[0].size - 1, edges[1].size - 1
    counts = where(inside, 1.0 if weights is None else asarray(weights), 0.0)
    flat = statistics.bincount(places[0] * columns + places[1], weights=counts, length=rows * columns)
    grid = reshape(flat, (rows, columns))
    if density:
        areas = [e[1:] - e[:-1] for e in edges]
        grid = grid / (areas[0][:, None] * areas[1]) / sum(grid)
    return grid, edges[0], edges[1]
