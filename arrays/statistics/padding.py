"""Arrays with elements put around them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dispatch import Deferred, as_array
from ..core.errors import ArgumentError, ShapeError
from ..core.shape_rules import one_axis
from ..ops.creation import asarray, beside, full
from ..ops.elementwise import floor, round, where
from ..ops.manipulation import astype, concat, flip, repeat
from ..ops.number_ranges import check_numbers
from ..reductions.moments import mean
from ..reductions.reductions import max as max_
from ..reductions.reductions import min
from .quantiles import median

_STATISTICS = ("maximum", "mean", "median", "minimum")
_REPEATING = ("edge", "reflect", "symmetric", "wrap")
_MODES = ("constant", "empty", "linear_ramp", *_STATISTICS, *_REPEATING)


def pad(
    x: Any,
    pad_width: Any,
    /,
    mode: str = "constant",
    *,
    constant_values: Any = 0,
    end_values: Any = 0,
    stat_length: Any = None,
    reflect_type: str = "even",
) -> Array:
    """``x`` with elements put before and after along each axis, one axis after the other.

    Widths, values and lengths are a number for all sides, a pair (before, after) for all axes, or one pair an axis.

    Parameters
    ----------
    pad_width
        How many; also a dict from axes to numbers or pairs.
    mode
        ``"constant"``; ``"empty"`` (anything); ``"edge"`` (the last element), ``"reflect"`` (mirrored at the last
        element), ``"symmetric"`` (mirrored behind it), ``"wrap"`` (from the other end); ``"linear_ramp"`` (from the
        last element to an end value); ``"maximum"``, ``"mean"``, ``"median"`` or ``"minimum"`` of the elements at that
        side.
    constant_values
        The values of ``"constant"``.
    end_values
        The end values of ``"linear_ramp"``.
    stat_length
        Of how many elements the statistics are; of all by default.
    reflect_type
        ``"odd"`` mirrors values as well: twice the last element less the mirrored one.

    Examples
    --------
    >>> mt.pad(mt.asarray([1, 2, 3]), (1, 2), mode="reflect")
    Array([2, 1, 2, 3, 2, 1])
    >>> mt.pad(mt.asarray([1, 2, 3]), 2, mode="linear_ramp", end_values=(-1, 7))
    Array([-1,  0,  1,  2,  3,  5,  7])
    """
    x = as_array(x)
    if mode not in _MODES:
        raise ArgumentError(f"[pad] mode must be one of {', '.join(_MODES)}, got {mode!r}")
    if reflect_type not in ("even", "odd"):
        raise ArgumentError(f"[pad] reflect_type must be 'even' or 'odd', got {reflect_type!r}")
    widths = _widths(pad_width, x)
    given = {"constant": constant_values, "linear_ramp": end_values, "empty": 0}.get(mode, stat_length)
    values = _pairs("values" if mode in ("constant", "linear_ramp") else "stat_length", given, x)
    for v in [v for pair in values for v in pair] if mode in ("constant", "linear_ramp") else []:
        if isinstance(v, int | float | complex):
            check_numbers("pad", v, x.dtype)
    if mode in ("constant", "empty") and not _nested(given):
        shape = tuple(b + n + a for n, (b, a) in zip(x.shape, widths, strict=True))
        place = tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, widths, strict=True))
        return full(shape, given, dtype=x.dtype, device=beside(x)).at[place].set(x)
    for axis, (before, after) in enumerate(widths):
        n, lead = x.shape[axis], (slice(None),) * axis
        if not before and not after:
            continue
        if n == 0 and mode != "constant":
            raise ShapeError(f"[pad] axis {axis} of shape {x.shape} has no elements to repeat")
        if mode in _REPEATING:
            i = np.arange(-before, n + after)
            at = _padded_places(i, n, mode)
            if isinstance(x._buf, Deferred):
                y = x[(*lead, at)]
            else:  # an index of the whole would take eight bytes an element
                y = concat([x[(*lead, at[:before])], x, x[(*lead, at[before + n :])]], axis=axis)
            x = _odd(x, y, i, axis, mode) if reflect_type == "odd" and n > 1 and mode in ("reflect", "symmetric") else y
            continue
        sides = []
        for width, value, first in ((before, values[axis][0], True), (after, values[axis][1], False)):
            if mode == "constant":
                shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
                sides.append(full(shape, value, dtype=x.dtype, device=beside(x)))
            elif mode == "linear_ramp":
                sides.append(_ramp(x, axis, width, value, first))
            else:
                sides.append(_statistic(x, axis, width, value, first, mode))
        x = concat([sides[0], x, sides[1]], axis=axis)
    return x


def _nested(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def _pairs(what: str, value: Any, x: Array) -> list[tuple[Any, Any]]:
    """One pair an axis, from one number, one pair, or one pair (or number in brackets) an axis."""
    found = [list(v) if _nested(v) else v for v in value] if _nested(value) else [value]
    rows = [v if isinstance(v, list) else None for v in found]
    if all(r is None for r in rows) and len(found) in (1, 2):
        return [(found[0], found[-1])] * x.ndim
    if all(r is not None and len(r) in (1, 2) and not any(map(_nested, r)) for r in rows) and len(rows) in (1, x.ndim):
        pairs = [(r[0], r[-1]) for r in rows if r is not None]
        return pairs * x.ndim if len(pairs) == 1 else pairs
    raise ShapeError(
        f"[pad] {what} {value} does not fit an array of shape {x.shape}: write a number, (before, after), or one pair "
        "an axis"
    )


def _widths(value: Any, x: Array) -> list[tuple[int, int]]:
    if isinstance(value, dict):
        given = {one_axis("pad", a, x.ndim): v if _nested(v) else (v, v) for a, v in value.items()}
        value = [given.get(a, (0, 0)) for a in range(x.ndim)]
    try:
        pairs = [(operator.index(b), operator.index(a)) for b, a in _pairs("pad_width", value, x)]
    except TypeError:
        pairs = [(-1, -1)]
    if any(n < 0 for pair in pairs for n in pair):
        raise ArgumentError(f"[pad] pad_width must be integers that are not negative, got {value}")
    return pairs


def _padded_places(i: np.ndarray, n: int, mode: str) -> np.ndarray:
    """Which of ``n`` elements stands at each place, also before the first and after the last."""
    if mode == "edge":
        return np.clip(i, 0, n - 1)
    if mode == "wrap":
        return i % n
    if mode == "symmetric":
        i = i % (2 * n)
        return np.minimum(i, 2 * n - 1 - i)
    if n == 1:
        return np.zeros_like(i)
    i = i % (2 * n - 2)
    return np.minimum(i, 2 * n - 2 - i)


def _odd(x: Array, mirrored: Array, i: np.ndarray, axis: int, mode: str) -> Array:
    """The values mirrored too, which after two mirrors have moved by twice the distance of the ends."""

    def column(v: np.ndarray) -> np.ndarray:
        return v.reshape([-1 if a == axis else 1 for a in range(x.ndim)])

    n, lead = x.shape[axis], (slice(None),) * axis
    first, last = x[(*lead, slice(0, 1))], x[(*lead, slice(n - 1, n))]
    turns, at = np.divmod(i, 2 * n if mode == "symmetric" else 2 * n - 2)
    y = where(column(at < n), mirrored, 2 * last - mirrored)
    return where(column((i >= 0) & (i < n)), mirrored, y + column((2 * turns).astype(x.dtype)) * (last - first))


def _ramp(x: Array, axis: int, width: int, end: Any, first: bool) -> Array:
    """The values of :func:`numpy.linspace` between the end value and the outermost element."""
    n, whole = x.shape[axis], x.dtype.kind in "biu"
    edge = x[(*(slice(None),) * axis, slice(0, 1) if first else slice(n - 1, n))]
    edge = astype(edge, np.float64) if whole else edge
    places = np.arange(width, dtype=edge.dtype).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    out = asarray(places, device=beside(edge)) * ((edge - end) / max(width, 1)) + end
    out = astype(floor(out) if x.dtype.kind in "iu" else out, x.dtype, copy=False)
    return out if first else flip(out, axis=axis)


def _statistic(x: Array, axis: int, width: int, length: Any, first: bool, mode: str) -> Array:
    n = x.shape[axis]
    length = n if length is None else operator.index(length)
    if length < 0 or (length == 0 and mode in ("maximum", "minimum")):
        raise ArgumentError(f"[pad] stat_length of {length} gives no {mode}")
    part = x[(*(slice(None),) * axis, slice(0, length) if first else slice(n - length if length < n else 0, n))]
    reduce: Callable[..., Array] = {"maximum": max_, "mean": mean, "median": median, "minimum": min}[mode]
    found = reduce(part, axis=axis, keepdims=True)
    whole = x.dtype.kind in "iu" and found.dtype.kind == "f"
    return repeat(astype(round(found) if whole else found, x.dtype, copy=False), width, axis=axis)
