"""Activities of this process: the progress of saves, merges and reshards, for display.

An `Activity` exists from the first byte of its work until a while after its end. A transfer counts its bytes where its
windows come together. A save counts its bytes by folder in the processes that hold the blocks; the reader adds them up.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from ...arrays.core.errors import CheckpointError

_KEPT = 8  # pieces of work that have ended
_ROOTS = 16  # folders whose bytes are remembered

_lock = threading.Lock()
_running: dict[int, Activity] = {}
_ended: deque[Activity] = deque(maxlen=_KEPT)
_written: OrderedDict[str, int] = OrderedDict()
_observers: list[Callable[[], None]] = []
_process = secrets.token_hex(8)


class Activity:
    """One piece of work. ``root`` is the folder whose bytes `wrote` counts, or "" where ``done`` is known here.

    >>> with under_way("Save", "/tmp/ckpt", 100) as work:
    ...     work.done = 40
    ...     work.plain()["done"], work.state
    (40, 'running')
    >>> work.state
    'done'
    """

    def __init__(self, kind: str, path: str, total: int) -> None:
        self.kind, self.path, self.total = kind, path, total
        self.root, self.done, self.doing = "", 0, ""
        self.state, self.error = "running", ""
        self._started = time.monotonic()
        self._ended: float | None = None

    def follow(self, also: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """A progress function that keeps ``done`` and ``total``, and then calls ``also``."""
        if also is not None and not callable(also):
            raise CheckpointError(f"progress is a function of the bytes done and of all bytes, got {also!r:.80}")

        def progress(done: int, total: int) -> None:
            self.done, self.total = done, total
            self.doing = "checking what was written" if done >= total else ""
            if also is not None:
                also(done, total)

        return progress

    def plain(self) -> dict[str, Any]:
        """Plain data. Times are ages in seconds, so clocks of other hosts do not matter."""
        now = time.monotonic()
        return {
            "id": f"{_process}-{id(self):x}",
            **{k: v for k, v in vars(self).items() if not k.startswith("_")},
            "seconds": (self._ended or now) - self._started,
            "ended": None if self._ended is None else now - self._ended,
        }


@contextlib.contextmanager
def under_way(kind: str, path: str, total: int = 0) -> Iterator[Activity]:
    """An `Activity` that observers see until the block ends or raises."""
    work = Activity(kind, path, total)
    with _lock:
        _running[id(work)] = work
    _tell()
    try:
        yield work
        work.state = "done"
    except BaseException as e:
        work.state, work.error = "failed", f"{type(e).__name__}: {e}"[:1000]
        raise
    finally:
        work._ended = time.monotonic()
        with _lock:
            del _running[id(work)]
            _ended.append(work)
        _tell()


def wrote(root: str, nbytes: int) -> None:
    """``nbytes`` more were written to files below ``root``."""
    with _lock:
        _written[root] = _written.pop(root, 0) + nbytes
        while len(_written) > _ROOTS:
            _written.popitem(last=False)


def written() -> dict[str, Any]:
    """Bytes written by folder, with the name of this process, as several block hosts may share one process."""
    with _lock:
        return {"process": _process, "bytes": dict(_written)}


def news() -> list[dict[str, Any]]:
    """Running activities and the last ended ones, oldest first."""
    with _lock:
        return [a.plain() for a in (*_ended, *_running.values())]


def busy() -> bool:
    """Whether anything runs."""
    return bool(_running)


def observe(observer: Callable[[], None]) -> None:
    """Call ``observer`` whenever work begins or ends, in the thread that does it; it must neither wait nor raise."""
    with _lock:
        if observer not in _observers:
            _observers.append(observer)


def forget(observer: Callable[[], None]) -> None:
    """Remove an observer."""
    with _lock, contextlib.suppress(ValueError):
        _observers.remove(observer)


def _tell() -> None:
    for observer in _observers:
        observer()


def _after_fork() -> None:
    global _process, _lock
    _process, _lock = secrets.token_hex(8), threading.Lock()
    _running.clear()
    _written.clear()
    _observers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
