"""Atomic in-place writes, which no other thread sees half done.

A write goes in place where the array alone holds its buffer. Another thread could take the buffer between that check
and the write. So the buffer is first taken out of the array, and only then its references are counted: earlier holders
are counted, and no thread can get it until the write is done. Meanwhile the array has a :class:`Writing` in place of
its buffer, with shape and dtype; a thread that needs the values waits for the end of the write.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np

from ..backends.memory_pool import is_sole
from ..core.array import Array
from ..core.devices import CPU
from ..core.dispatch import Deferred, wrap
from ..core.errors import ConcurrentWriteError

PATIENCE = 60.0
"""Seconds after which a write of another thread counts as broken off."""


class Writing(Deferred):
    """The stand-in for the buffer of an array during a write by some thread."""

    __slots__ = ("_array", "held", "name")
    priority = 10
    passing = True
    host = None
    sharding = None
    device = CPU
    __array_ufunc__ = None

    def __init__(self, array: Any, held: np.ndarray) -> None:
        self._array = array
        self.held = held  # once the write is done: what it made
        self.name = 0  # of the value on tapes: a new one has none
        self.part = False

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.held.shape

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.held.dtype

    def wait(self) -> np.ndarray:
        """The buffer, once the write is done. Raises :class:`ConcurrentWriteError` where it does not end.

        (The next write does not reach it: this object is one of its holders.)
        """
        turns, end = 0, 0.0
        while self._array._buf is self:
            turns += 1
            if turns < _TURNS:
                time.sleep(0)
                continue
            end = end or time.monotonic() + PATIENCE
            if time.monotonic() > end:
                raise self._error("did not end")
            time.sleep(0.0001)
        return self.held

    concrete = wait

    def value(self) -> Any:
        """An Array of the value that the write makes."""
        x = wrap(self.wait())
        x._id = self.name
        return x

    def _error(self, what: str) -> ConcurrentWriteError:
        return ConcurrentWriteError(
            f"[setitem] a write of another thread to this array (shape {self.shape}, {self.dtype.name}) {what}: let "
            "one thread write while no other reads (with a lock), or give each a copy of its own"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error(f"was going on when its {name} was asked for")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error("was going on when it was read")


_TURNS = 100

WATCHERS: dict[int, tuple[int, Any]] = {}
"""Tapes that were told to watch arrays and are recording, by id, with their threads."""

_alone: list[int] = []
"""The reference count of a buffer that only its array holds, measured at import: it depends on the version of
Python."""

_swap = threading.Lock()
"""The lock by which only one of two threads that write to an array takes the buffer."""


def settled(x: Any) -> Any:
    """The buffer of an Array that no thread is writing to."""
    buf = x._buf
    return buf.wait() if type(buf) is Writing else buf


def take(x: Array, buf: np.ndarray, copy: bool = True) -> np.ndarray | None:
    """``buf`` taken out of ``x`` for a write, or a copy of it where others hold it: the caller writes, and puts it
    back.

    None where another thread has it by now, and without ``copy`` where others hold it. Raises
    :class:`ConcurrentWriteError` where a tape of another thread watches the array.
    """
    mark = Writing(x, buf)
    with _swap:
        if x._buf is not buf:
            return None
        x._buf = mark
    try:
        if x._id and WATCHERS:
            _refuse_watched(x, buf)
        holders = sys.getrefcount(buf)
        if not _alone:
            _alone.append(holders)
        if holders <= _alone[0] and is_sole(buf):
            return buf
        if not copy:
            x._buf = buf
            return None
        mine = mark.held = buf.copy()
        return mine
    except BaseException:
        mark.name = x._id
        x._buf = buf
        raise


def become(x: Array, buf: Any, name: int) -> None:
    """Give ``x`` another buffer and name, at once for all threads."""
    while True:
        old: Any = settled(x)
        if not isinstance(old, np.ndarray):
            x._buf, x._id = buf, name
            return
        mark = Writing(x, old)
        with _swap:
            if x._buf is not old:
                continue
            x._buf = mark
        break
    try:
        if x._id and WATCHERS:
            _refuse_watched(x, old)
        x._id, old, mark.held = name, buf, buf
    except BaseException:
        mark.name = x._id
        raise
    finally:
        x._buf = old


def _refuse_watched(x: Array, buf: np.ndarray) -> None:
    me = threading.get_ident()
    for thread, tape in list(WATCHERS.values()):
        if thread != me and tape.watches(x):
            raise ConcurrentWriteError(
                f"[setitem] a tape of another thread watches this array (shape {buf.shape}): the gradient it is to "
                "give is that of the value it watched. Write to a copy, or after that thread has left its tape"
            )
