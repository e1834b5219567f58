"""Quantiles: the values below which given parts of the elements lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backends.pieces import buffer
from ..backends.row_blocks import wide
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import wrap
from ..core.dtypes import FIRST_USER_DTYPE
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import composite
from ..ops.creation import asarray, beside, full
from ..ops.elementwise import isfinite, isnan, minimum, where
from ..ops.manipulation import astype, broadcast_to, expand_dims, moveaxis, permute_dims, reshape, stack
from ..reductions.cumulative import cumulative_sum
from ..reductions.reductions import Axis, any, sum
from ..reductions.searching import take_along_axis
from ..reductions.sorting import argsort, sort

Places = Callable[[np.ndarray, int], np.ndarray]


def _between(alpha: float, beta: float) -> Places:
    """Where among ``n`` sorted elements the part ``q`` lies, by Hyndman and Fan's family (The American Statistician,
    1996)."""
    return lambda q, n: n * q + alpha + q * (1 - alpha - beta) - 1


def _averaged(q: np.ndarray, n: int) -> np.ndarray:
    at = n * q - 1
    return np.where(at == np.floor(at), at + 0.5, np.ceil(at))


def _closest(q: np.ndarray, n: int) -> np.ndarray:
    at = n * q - 1.5
    # Of two that are equally near, the one of even rank, counted from one.
    return np.floor(at) + np.where((at == np.floor(at)) & (np.floor(at) % 2 == 1), 0, 1)


# Each gives places, whose fractions are what the upper neighbour counts.
_METHODS: dict[str, Places] = {
    "linear": lambda q, n: q * (n - 1),
    "lower": lambda q, n: np.floor(q * (n - 1)),
    "higher": lambda q, n: np.ceil(q * (n - 1)),
    "midpoint": lambda q, n: 0.5 * (np.floor(q * (n - 1)) + np.ceil(q * (n - 1))),
    "nearest": lambda q, n: np.round(q * (n - 1)),
    "inverted_cdf": lambda q, n: np.ceil(n * q - 1),
    "averaged_inverted_cdf": _averaged,
    "closest_observation": _closest,
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "median_unbiased": _between(1 / 3, 1 / 3),
    "normal_unbiased": _between(3 / 8, 3 / 8),
}
# These give one of the elements, in its own dtype.
_PICKING = frozenset({"lower", "higher", "nearest", "inverted_cdf", "closest_observation"})


def _rows(name: str, x: Any, axis: Axis) -> tuple[Array, tuple[int, ...]]:
    """The axes laid out as one last dimension, and the axes."""
    x = asarray(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"[{name}] complex numbers have no order")
    axes = shape_rules.normalize_axis(name, axis, x.ndim)
    keep = [i for i in range(x.ndim) if i not in axes]
    length = int(np.prod([x.shape[a] for a in axes]))
    return reshape(permute_dims(x, (*keep, *axes)), (*(x.shape[i] for i in keep), length)), axes


def _ordered(rows: Array, places: np.ndarray) -> Array:
    """The rows partitioned so that these positions hold the elements of sorted rows."""
    buf = buffer(rows)
    if buf is None or buf.dtype.num >= FIRST_USER_DTYPE:
        return sort(rows, axis=-1)
    return wrap(np.partition(buf, places, axis=-1))


def between(below: Array, above: Array, part: Array) -> Array:
    """On the straight line between two neighbours, as NumPy computes it; also beside infinities, where it has NaN."""
    step = above - below
    near = where(part < 0.5, below + step * part, above - step * (1 - part))
    # Not below + (above - below) * 0, which is NaN there.
    far = where(part == 0, below, where(part == 1, above, below * (1 - part) + above * part))
    return where(isfinite(step), near, far)


def weights_of(name: str, x: Array, axis: Axis, weights: Any) -> Array:
    """Weights of the shape of ``x``, or of that of its dimensions ``axis``, in as many dimensions as ``x`` has."""
    w = asarray(weights)
    if w.dtype.kind == "c" and name != "average":
        raise DTypeError(f"[{name}] weights are real numbers, got {w.dtype.name}")
    if w.shape == x.shape:
        return w
    axes = shape_rules.normalize_axis(name, axis, x.ndim)
    given = [a % x.ndim for a in (axis if isinstance(axis, Sequence) else axes)]
    if axis is None or w.shape != tuple(x.shape[a] for a in given):
        raise ShapeError(
            f"[{name}] weights of shape {w.shape} do not fit an array of shape {x.shape} along axis {axis}"
        )
    w = permute_dims(w, [given.index(a) for a in axes])
    return reshape(w, shape_rules.reduced_shape(x.shape, tuple(set(range(x.ndim)) - set(axes)), True))


def _weighted(name: str, rows: Array, weights: Array, parts: np.ndarray) -> Array:
    """For each part the element with which the weights of the sorted rows, added up, reach it."""
    order = argsort(rows, axis=-1)
    rows, weights = (take_along_axis(a, order, axis=-1) for a in (rows, weights))
    reached = cumulative_sum(astype(weights, np.float64, copy=False), axis=-1)
    total = reached[..., -1:]
    usable = isfinite(total) & (total > 0)
    if not getattr(weights._buf, "traced", False):
        if bool(any(weights < 0)):
            raise ArgumentError(f"[{name}] weights must not be negative")
        if not bool(usable.all()):
            raise ArgumentError(f"[{name}] the weights are zero throughout, or not finite")
    elif rows.dtype.kind in "biu":
        raise DTypeError(
            f"[{name}] weights that are traced may be zero throughout, where integers have no value: cast x to a float"
        )
    reached = reached / where(usable, total, 1.0)
    reached = where(reached == 0, -1.0, reached)  # what weighs nothing is no quantile, the lowest neither
    at = stack([sum(reached < q, axis=-1) for q in parts.reshape(-1)], axis=-1)
    out = take_along_axis(rows, minimum(at, rows.shape[-1] - 1), axis=-1)
    if rows.dtype.kind not in "biu":
        out = where(isnan(rows[..., -1:]) | ~usable, np.nan, out)
    return out if parts.ndim else out[..., 0]


def _quantile(
    name: str, x: Any, parts: np.ndarray, axis: Axis, keepdims: bool, method: str, weights: Any = None
) -> Array:
    if parts.ndim > 1:
        flat = _quantile(name, x, parts.reshape(-1), axis, keepdims, method, weights)
        return reshape(flat, (*parts.shape, *flat.shape[1:]))
    if not ((parts >= 0) & (parts <= 1)).all():
        raise ArgumentError(f"[{name}] q must be between 0 and {100 if name == 'percentile' else 1}")
    if method not in _METHODS:
        raise ArgumentError(f"[{name}] method must be one of {', '.join(_METHODS)}, got {method!r}")
    if weights is not None and method != "inverted_cdf":
        raise ArgumentError(f"[{name}] weights go with method='inverted_cdf' alone, got {method!r}")
    x = asarray(x)
    rows, axes = _rows(name, x, axis)
    whole = rows.dtype.kind in "biu"
    dtype = np.dtype(np.float64) if whole and method not in _PICKING else rows.dtype
    n = rows.shape[-1]
    if n == 0:
        if dtype.kind in "biu":
            raise ShapeError(f"[{name}] of no elements has no value of {rows.dtype.name}: shape {asarray(x).shape}")
        out = full((*rows.shape[:-1], *parts.shape), np.nan, dtype=dtype, device=beside(rows))
    elif weights is not None:
        w = broadcast_to(weights_of(name, x, axis, weights), x.shape)
        out = _weighted(name, rows, _rows(name, w, axis)[0], parts)
    else:
        at = np.clip(_METHODS[method](parts, n), 0, n - 1)
        low, high = np.floor(at).astype(np.intp), np.ceil(at).astype(np.intp)
        places = np.unique([*low.ravel(), *high.ravel(), n - 1])
        ordered = _ordered(rows, places)
        # (Integers become floats when they have been chosen: to sort them takes less memory.)
        out = astype(ordered[..., low], dtype, copy=False)
        if method not in _PICKING:
            weight = asarray((at - low).astype(wide(dtype)), device=beside(rows))
            out = astype(between(out, astype(ordered[..., high], dtype, copy=False), weight), dtype, copy=False)
        if not whole:
            bad = isnan(ordered[..., -1])  # which is where sorting puts NaN
            out = where(bad if parts.ndim == 0 else expand_dims(bad, axis=-1), np.nan, out)
    if parts.ndim:
        out = moveaxis(out, -1, 0)
    return expand_dims(out, axis=tuple(a + parts.ndim for a in axes)) if keepdims else out


@composite("quantile")
def quantile(
    x: Any, /, q: Any, axis: Axis = None, *, keepdims: bool = False, method: str = "linear", weights: Any = None
) -> Array:
    """Values below which the parts ``q`` (between 0 and 1) of the elements lie; NaN where there is one, or no element.

    Parameters
    ----------
    x
        Real numbers.
    q
        A number, or an array of them, whose dimensions then come first in the result.
    axis
        One axis, several, or all (None).
    keepdims
        Whether the reduced dimensions stay, with length one.
    method
        One of NumPy's: between two elements ``"linear"`` or ``"midpoint"``; one of them, in the dtype of ``x``:
        ``"lower"``, ``"higher"``, ``"nearest"``, ``"inverted_cdf"``, ``"closest_observation"``; and the estimators of
        Hyndman and Fan (1996): ``"averaged_inverted_cdf"``, ``"interpolated_inverted_cdf"``, ``"hazen"``,
        ``"weibull"``, ``"median_unbiased"``, ``"normal_unbiased"``.
    weights
        The weight of each element, with ``method="inverted_cdf"``: of the shape of ``x``, or of that of the dimensions
        ``axis``. Traced weights that sum to zero give NaN.

    Raises
    ------
    ValueError
        For a ``q`` out of range or an unknown method.
    DTypeError
        For complex numbers.

    Examples
    --------
    >>> mt.quantile(mt.asarray([1.0, 2.0, 4.0]), 0.75)
    Array(3., dtype=float64)
    >>> mt.quantile(mt.asarray([1, 2, 4]), [0.0, 0.7], method="higher")
    Array([1, 4])
    """
    return _quantile("quantile", x, np.asarray(q, np.float64), axis, keepdims, method, weights)


@composite("percentile")
def percentile(
    x: Any, /, q: Any, axis: Axis = None, *, keepdims: bool = False, method: str = "linear", weights: Any = None
) -> Array:
    """:func:`quantile` with ``q`` between 0 and 100.

    >>> mt.percentile(mt.asarray([1.0, 2.0, 4.0]), 75)
    Array(3., dtype=float64)
    """
    return _quantile("percentile", x, np.asarray(q, np.float64) / 100, axis, keepdims, method, weights)


@composite("median")
def median(x: Any, /, axis: Axis = None, *, keepdims: bool = False) -> Array:
    """The middle element, or the mean of the two in the middle; NaN where there is one, or no element.

    >>> mt.median(mt.asarray([[1.0, 9.0, 2.0], [3.0, 4.0, 5.0]]), axis=1)
    Array([2., 4.], dtype=float64)
    """
    return _quantile("median", x, np.asarray(0.5), axis, keepdims, "linear")
