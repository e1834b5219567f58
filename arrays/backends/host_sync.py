"""Host synchronization: where the host waits for a device, and which checks may be left out to avoid it.

A GPU works on while Python goes on; the host waits when it needs a value: for a number, for the shape of ``x[mask]``,
for the check of an index. Each such place in this package says so here. They say it on a CPU too, where nothing waits,
so that a step can be checked for waits on any machine.

The host need not wait for the range of indices and labels where it saw the numbers itself on their way to the device,
as it does of the batches of a training loop: their ends are kept with the buffer, for itself and for its views.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.dispatch import call_site
from ..core.program import site_text


class _Waits(threading.local):
    noted: tuple[list[str], ...] = ()
    checks: bool = True


_local = _Waits()


def note(what: str) -> None:
    """Say that the host waits here (or would, were the array on a GPU)."""
    if _local.noted:
        text = f"{what}, at {site_text(call_site())}"
        for log in _local.noted:
            log.append(text)


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """The places where this thread waits for a device while the context is open, each with the line that caused it.

    On a CPU the list shows where the host would wait if the arrays were on a GPU, but for reads by masks and by index
    arrays (``x[mask]``, ``x[ids]``, `take`), which NumPy itself does there. It has the checks of all labels there; on a
    GPU those of labels (and indices) that came from host memory, in up to 1 MiB, need no wait.

    Examples
    --------
    >>> x = mt.asarray([1.0, -2.0])
    >>> with mt.host_waits() as waits:
    ...     x[x < 0] = 0.0
    ...     y = mt.sum(x) * 2.0
    >>> waits
    []
    >>> with mt.host_waits() as waits:
    ...     if y > 1:
    ...         pass
    >>> len(waits), waits[0].partition(",")[0]
    (1, 'a value is read')
    """
    log: list[str] = []
    before = _local.noted
    _local.noted = (*before, log)
    try:
        yield log
    finally:
        _local.noted = before


@contextmanager
def index_checks(on: bool) -> Iterator[None]:
    """Whether index arrays on a GPU are checked before they are used, for which the host waits; they are by default.

    Indices that came from host memory, in up to 1 MiB, are checked without a wait. Without the check an index out of
    range wraps around; so do those that a compiled function computes by itself on a GPU: its arguments, and views of
    them, are checked before it runs. On a CPU NumPy itself checks, always.

    Examples
    --------
    >>> with mt.index_checks(False):
    ...     y = mt.asarray([10, 20])[mt.asarray([1, 0])]
    >>> y
    Array([20, 10])
    """
    before = _local.checks
    _local.checks = on
    try:
        yield
    finally:
        _local.checks = before


def checks_indices() -> bool:
    """Whether index arrays on a GPU are checked in this thread."""
    return _local.checks


_ends: dict[int, tuple[Any, tuple[int, int, int, int]]] = {}
"""By ``id`` of a buffer, a weak reference to it and the ends: CuPy's arrays take no attributes and have no hash."""

_LOOKED_AT = 1 << 20
"""Bytes of the largest array that is looked at: up to there it takes as long as a copy in host memory."""


_UNKNOWN: tuple[Any, tuple[int, int, int, int]] = (lambda: None, (0, 0, 0, 0))


def remember_range(buf: Any, host: np.ndarray) -> Any:
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


def forget_range(buf: Any) -> None:
    """Drop what is known of a buffer: its memory is handed out to another library, which may write to it."""
    _ends.pop(id(_root(buf)), None)


def known_within(buf: Any, low: int, high: int, mark: int | None = None) -> bool:
    """Whether all numbers of a buffer on a device are known to be from ``low`` to ``high``, or ``mark``."""
    root = _root(buf)
    held, ends = _ends.get(id(root), _UNKNOWN)
    if held() is not root or root.dtype != buf.dtype:
        return False
    least, second, last_but_one, greatest = ends
    if least == greatest == mark:
        return True
    return low <= (second if least == mark else least) and (last_but_one if greatest == mark else greatest) <= high


def any_outside(buf: Any, low: int, high: int, mark: int | None = None) -> Any:
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
