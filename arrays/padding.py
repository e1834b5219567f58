"""Arrays with elements put around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._dispatch import as_array
from .errors import ShapeError

if TYPE_CHECKING:
    from ._array import Array

_PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


def pad(x: Any, pad_width: Any, /, mode: str = "constant", *, constant_values: Any = 0) -> Array:
    """``x`` with elements put before and after along each axis.

    Parameters
    ----------
    pad_width
        A number for all sides, a pair (before, after) for all axes, or one pair an axis.
    mode
        ``"constant"``, ``"edge"`` (the last element), ``"reflect"`` (mirrored at the last element), ``"symmetric"`` (mirrored
        behind it) or ``"wrap"`` (from the other end).
    constant_values
        What ``"constant"`` puts there.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.pad(mt.asarray([1, 2, 3]), (1, 2), mode="reflect")
    Array([2, 1, 2, 3, 2, 1])
    """
    from .creation import beside, full

    x = as_array(x)
    if mode not in _PAD_MODES:
        raise ValueError(f"[pad] mode must be one of {', '.join(_PAD_MODES)}, got {mode!r}")
    try:
        widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2))
    except ValueError:
        raise ShapeError(f"[pad] pad_width {pad_width} does not fit an array of shape {x.shape}") from None
    if widths.dtype.kind not in "iu" or (widths < 0).any():
        raise ValueError(f"[pad] pad_width must be integers that are not negative, got {pad_width}")
    if mode == "constant" and np.ndim(constant_values):
        pairs = np.broadcast_to(np.asarray(constant_values), (x.ndim, 2))
        for axis, (ends, values) in enumerate(zip(widths.tolist(), pairs.tolist(), strict=True)):
            for side in (0, 1):
                one = [(0, 0)] * axis + [(ends[0], 0) if side == 0 else (0, ends[1])] + [(0, 0)] * (x.ndim - axis - 1)
                x = pad(x, one, constant_values=values[side])
        return x
    if mode == "constant":
        shape = tuple(int(b) + n + int(a) for n, (b, a) in zip(x.shape, widths, strict=True))
        place = tuple(slice(int(b), int(b) + n) for n, (b, _) in zip(x.shape, widths, strict=True))
        return full(shape, constant_values, dtype=x.dtype, device=beside(x)).at[place].set(x)
    for axis, (before, after) in enumerate(widths.tolist()):
        if before or after:
            n = x.shape[axis]
            if n == 0:
                raise ShapeError(f"[pad] axis {axis} of shape {x.shape} has no elements to repeat")
            places = _padded_places(np.arange(-before, n + after), n, mode)
            x = x[(*(slice(None),) * axis, places)]
    return x


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
