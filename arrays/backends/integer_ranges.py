"""Ranges of whole numbers in device memory, for the checks of indices and labels.

The host has to wait for the device to learn them. It need not where it saw the numbers itself on their way there, as it
does of the batches of a training loop: their ends are kept with the buffer, for itself and for its views.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np

_ends: dict[int, tuple[Any, tuple[int, int, int, int]]] = {}
"""By ``id`` of a buffer, a weak reference to it and the ends: CuPy's arrays take no attributes and have no hash."""

_LOOKED_AT = 1 << 20
"""Bytes of the largest array that is looked at: up to there it takes as long as a copy in host memory."""


_UNKNOWN: tuple[Any, tuple[int, int, int, int]] = (lambda: None, (0, 0, 0, 0))


def remember(buf: Any, host: np.ndarray) -> Any:
    """``buf``, a new buffer on a device that ``host`` was copied to, with the ends of its numbers if they are whole."""
    if host.dtype.kind in "iu" and 0 < host.nbytes <= _LOOKED_AT:
        least, greatest = second, last_but_one = int(host.min()), int(host.max())
        # A number that marks what is left out is negative (-100, -1), or 255 in a mask of bytes.
        if least < 0:
            second = int(host.min(where=host > least, initial=greatest))
        if greatest == 255:
            last_but_one = int(host.max(where=host < greatest, initial=least))
        key = id(buf)
        _ends[key] = weakref.ref(buf, lambda _: _ends.pop(key, None)), (least, second, last_but_one, greatest)
    return buf


def forget(buf: Any) -> None:
    """Drop what is known of a buffer: its memory is handed out to another library, which may write to it."""
    _ends.pop(id(_root(buf)), None)


def within(buf: Any, low: int, high: int, mark: int | None = None) -> bool:
    """Whether all numbers of a buffer on a device are known to be from ``low`` to ``high``, or ``mark``."""
    root = _root(buf)
    held, ends = _ends.get(id(root), _UNKNOWN)
    if held() is not root or root.dtype != buf.dtype:
        return False
    least, second, last_but_one, greatest = ends
    if least == greatest == mark:
        return True
    return low <= (second if least == mark else least) and (last_but_one if greatest == mark else greatest) <= high


def outside(buf: Any, low: int, high: int, mark: int | None = None) -> Any:
    """Whether a number is neither from ``low`` (at most 0) to ``high`` nor ``mark``: a truth on the device, made by one
    launch."""
    if low > high:
        return True
    info = np.iinfo(buf.dtype)
    low, high = max(low, int(info.min)), min(high, int(info.max))
    mark = mark if mark is not None and info.min <= mark <= info.max else low
    return _found()(buf, *(buf.dtype.type(v) for v in (low, high, mark)))


def _root(buf: Any) -> Any:
    """The buffer that has the memory, or its first view where another library has it."""
    base = getattr(buf, "base", None)  # which buffers of float8 do not have
    return buf if base is None else base


@functools.cache
def _found() -> Any:
    import cupy

    found = "(x < low || x > high) && x != mark"
    return cupy.ReductionKernel(
        "T x, T low, T high, T mark", "bool found", found, "a || b", "found = a", "false", "number_outside"
    )
