"""Saves that run in the background: one thread each, at most one for a path, none lost at exit.

A handle is *running*, then *finished* with a report or an error. An error is *seen* once somebody was told: by
``SaveHandle.wait``, by the next save to the same path, or, when neither came, by a message when the interpreter ends.
Those that come later, in hooks of ``atexit`` and threads that outlive the main one, run in the foreground.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ...arrays.core.errors import CheckpointError
from ..base.threads import give_way, starting
from ..base.waiting import lock

_lock = lock()
_by_target: dict[str, SaveHandle] = {}  # running, or failed and not yet seen
_waited = False  # for all, as the interpreter ends: nobody would wait for another


class SaveHandle:
    """A save in the background, as `save_async` returns it.

    >>> handle = start("/tmp/x", lambda: "saved")
    >>> handle.wait()
    'saved'
    >>> handle.done()
    True
    """

    def __init__(self, path: str, work: Callable[[], Any]) -> None:
        self.path = path
        self._work: Callable[[], Any] | None = work
        self._report: Any = None
        self._error: BaseException | None = None
        self.told = False  # whether the error was raised
        # A join that Ctrl-C breaks off marks the thread as ended (CPython 3.11), and nothing waits for it any more.
        self._ended = threading.Event()
        self._process = os.getpid()
        # Not a daemon: the interpreter must not end below it.
        self._thread = threading.Thread(target=self._run, name="meshtape-save", daemon=False)

    def _run(self) -> None:
        give_way()
        self._make()

    def _make(self) -> None:
        work, self._work = self._work, None
        try:
            self._report = work()
        except BaseException as e:
            self._error = e
        else:
            _forget(self)
        self._ended.set()

    def done(self) -> bool:
        """Whether the save has ended, well or badly. Never waits; raises only in a forked child, `CheckpointError`
        where the save belongs to the parent."""
        ended = self._ended.is_set()
        if not ended and os.getpid() != self._process:
            raise CheckpointError(f"the save to {self.path} belongs to the parent of this process, which was forked")
        return ended

    def wait(self, timeout: float | None = None) -> Any:
        """The `SaveReport`, once the save has ended.

        Raises whatever the save raised, each time it is asked; ``TimeoutError`` when ``timeout`` seconds were not
        enough.
        """
        if not self.done() and threading.current_thread() is self._thread:
            raise CheckpointError(f"the save to {self.path} waits for itself, in its ``then``")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self.path} still runs after {timeout} seconds")
        if self._error is not None:
            _forget(self)
            self.told = True
            raise self._error
        return self._report

    def __repr__(self) -> str:
        state = "running" if not self._ended.is_set() else "done" if self._error is None else f"failed: {self._error}"
        return f"<SaveHandle {self.path}: {state}>"


def _forget(handle: SaveHandle) -> None:
    with _lock:
        if _by_target.get(handle.path) is handle:
            del _by_target[handle.path]


def finish_earlier(target: str) -> None:
    """Wait for a background save to ``target``, if there is one, and raise its error where it was not raised yet."""
    with _lock:
        earlier = _by_target.get(target)
    if earlier is not None and earlier._thread is not threading.current_thread():
        earlier.wait()


def start(target: str, work: Callable[[], Any]) -> SaveHandle:
    """Run ``work`` in the background, after an earlier save to ``target`` has ended; raises that one's unseen error."""
    handle = SaveHandle(target, work)
    while True:
        finish_earlier(target)
        with _lock:
            earlier = _by_target.get(target)
            if _waited or (earlier is not None and earlier._thread is threading.current_thread()):  # or of its ``then``
                break
            if earlier is None:
                with starting():
                    handle._thread.start()
                _by_target[target] = handle
                return handle
    handle._make()
    handle.wait()  # raises its error at once: nobody may come to ask
    return handle


def _finish_all() -> None:
    global _waited
    with _lock:
        _waited = True
        left = list(_by_target.values())
    for handle in left:
        handle._ended.wait()
        if handle._error is not None:
            print(f"meshtape: the save to {handle.path} failed, and nobody waited for it:", file=sys.stderr)
            traceback.print_exception(handle._error)


# Threads do not survive a fork: the child must not wait for them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_by_target.clear)

# The standard library closes its pools of threads before it joins threads. A save needs them: `_finish_all` runs before
# that, as it is registered after. Without the private hook, only errors are reported, and the threads are joined.
try:
    getattr(threading, "_register_atexit", atexit.register)(_finish_all)
except RuntimeError:  # this was imported as the interpreter ends
    _finish_all()
