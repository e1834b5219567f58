"""Ctrl-C where half of a change would be worse than none, and where a lock left behind would stop an event loop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """A context in which SIGINT waits: its handler, which raises ``KeyboardInterrupt`` as a rule, is called at the end.
    Python calls handlers in the main thread alone, so that other threads have nothing to wait for.

    >>> import os
    >>> done = []
    >>> try:
    ...     with Uninterrupted():
    ...         os.kill(os.getpid(), signal.SIGINT)
    ...         done.append("all of it")
    ... except KeyboardInterrupt:
    ...     done.append("then the interrupt")
    >>> done
    ['all of it', 'then the interrupt']
    """

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler: Any = None

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            found = signal.getsignal(signal.SIGINT)
            if callable(found):  # else SIGINT ends the process, is ignored, or belongs to other code than Python's
                signal.signal(signal.SIGINT, self._later)
                self._handler = found

    def _later(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame

    def __exit__(self, *exc: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)


class OnceEvent:
    """An event that is set once. In a ``threading.Event``, which is Python code, Ctrl-C can leave the lock behind that
    the thread needs that sets it.

    >>> event = OnceEvent()
    >>> event.wait(0.01), event.set(), event.wait(), event.is_set()
    (False, None, True, True)
    """

    def __init__(self) -> None:
        self._lock, self._set = threading.Lock(), False
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or so many seconds; whether it is."""
        if not self._set and self._lock.acquire(timeout=-1 if timeout is None else timeout):
            self._lock.release()  # for the next that waits
        return self._set
