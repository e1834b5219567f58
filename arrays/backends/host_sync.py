"""Host synchronization: where the host waits for a device, and which checks may be left out to avoid it.

A GPU works on while Python goes on; the host waits when it needs a value: for a number, for the shape of ``x[mask]``,
for the check of an index. Each such place in this package says so here. They say it on a CPU too, where nothing waits,
so that a step can be checked for waits on any machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    range wraps around. On a CPU NumPy itself checks, always.

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
