"""Arrays among the numbers that another one is made of: where a tape watches them, or they are traced, they are not
read as numbers.

``asarray([a, 2.0 * b])``, ``full(shape, a)`` and ``linspace(a, b)`` would otherwise give arrays without a history: a
gradient of zero, and no word said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dispatch import as_array, has_history
from ..core.errors import ArgumentError, ShapeError
from .elementwise import floor, log10, pow, sign
from .manipulation import astype, broadcast_to, reshape, stack


def is_tracked(obj: Any) -> bool:
    """:func:`has_history` of anything in nested sequences."""
    if isinstance(obj, list | tuple):
        return any(map(is_tracked, obj))
    return has_history(obj)


def stacked(obj: Any) -> Array:
    """Nested sequences as one Array, by calls that tapes record; numbers and dtypes are those that NumPy makes of them.

    Raises
    ------
    ShapeError
        For sequences of different lengths.
    """
    if not (isinstance(obj, list | tuple) and is_tracked(obj)):
        return as_array(obj)
    parts = [stacked(o) for o in obj]
    shapes = dict.fromkeys(p.shape for p in parts)
    if len(shapes) > 1:
        raise ShapeError(
            f"[asarray] the nested sequences have different lengths: parts of {', '.join(map(str, shapes))}"
        )
    return stack(parts)


def filled(value: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """An array of ``shape`` filled with ``value``, whose history it has."""
    try:
        return broadcast_to(astype(value, dtype, copy=False), shape)
    except ShapeError:
        raise ShapeError(f"[full] a value of shape {value.shape} does not fill an array of shape {shape}") from None


def linspace_from(start: Any, stop: Any, num: int, endpoint: bool, dtype: np.dtype | None) -> Array:
    """:func:`numpy.linspace` by calls that tapes record, in the order in which NumPy computes: the numbers are the
    same."""
    # Python numbers stay such, which widen nothing. NumPy takes other libraries' short floats to float64.
    given = [v.dtype if isinstance(v, Array) else v for v in (start, stop)]
    wide = np.result_type(*(np.dtype(float) if getattr(d, "kind", "") == "V" else d for d in given), 1.0)
    first, last = (astype(v, wide, copy=False) if isinstance(v, Array) else v for v in (start, stop))
    if num < 0:
        raise ArgumentError(f"[linspace] num must not be negative, got {num}")
    steps = num - 1 if endpoint else num
    delta = last - first
    places = reshape(astype(as_array(np.arange(num)), delta.dtype), (num,) + (1,) * delta.ndim)
    out = places * (delta / steps if steps > 0 else delta) + first
    if endpoint and num > 1:
        out = out.at[-1].set(last)
    if dtype is None:
        return out
    return astype(floor(out) if dtype.kind in "iu" else out, dtype)


def geometric_ramp(start: Any, stop: Any, num: int, endpoint: bool) -> Array:
    """:func:`numpy.geomspace` by calls that tapes record."""
    first, last = as_array(start) * 1.0, as_array(stop) * 1.0
    side = sign(first)
    out = pow(10.0, linspace_from(log10(first / side), log10(last / side), num, endpoint, None)) * side
    if num > 0:
        out = out.at[0].set(first)
    return out.at[-1].set(last) if endpoint and num > 1 else out
