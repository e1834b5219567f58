"""Ctrl-C, limits and forks: calls of the clients of network stores, made in a thread aside, whose wait each of them
ends.

These clients (obstore, icechunk) are written in Rust. Nothing ends a call of theirs from outside. Their threads do not
survive a fork, and what a child would ask of them, it would do to the parent's connections: both share one epoll.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ...arrays.backends.threads import Pool
from ...arrays.core.errors import StoreError

T = TypeVar("T")

SECONDS = 180.0
"""The limit of a request, where Dask's configuration has no ``meshtape.timeouts.store``."""
RATE = 64 << 10  # bytes a second, at least; a request has as much longer as its bytes take at that rate
_SLICE = 0.25  # seconds after which a waiting thread looks whether an interrupt has ended the whole
_CLIENTS = ("obstore", "icechunk")

_own = threading.local()  # .stop: set where the work of this thread is no longer wanted
_idle: list[SimpleQueue[Any]] = []  # of threads that wait for a call
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_running: tuple[str, ...] = ()  # clients that had threads at the last fork
_lost: set[str] = set()  # those whose threads stayed behind in a parent


def seconds(nbytes: int = 0) -> float:
    """The seconds that a request for so many bytes may take, with all its repetitions."""
    if "dask.config" not in sys.modules:
        with contextlib.suppress(RuntimeError):  # the rest of Dask is not to be imported once the interpreter ends
            import dask  # noqa: F401
    value = sys.modules["dask.config"].get("meshtape.timeouts.store", SECONDS)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise StoreError(f"meshtape.timeouts.store in Dask's configuration must be seconds above 0, got {value!r:.40}")
    return value + nbytes / RATE


def limited(work: Callable[[], T], where: str, asked: str, nbytes: int = 0, left: float | None = None) -> T:
    """The result of a call of a client, made in a thread aside.

    Raises `StoreError` with ``errno.ETIMEDOUT`` after ``left`` seconds, by default those of a request for ``nbytes``,
    and at once where an interrupt has ended the work that it is part of (see `pool`). The call then goes on alone, and
    nobody has its result.
    """
    future: Future[T] = Future()
    call = partial(copy_context().run, work)
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        try:
            threading.Thread(target=_serve, args=(calls,), name="meshtape-call", daemon=True).start()
        except RuntimeError:  # the system has no more threads for us
            return work()
    calls.put((future, call))
    return result(future, where, asked, nbytes, left)


def begin(work: Callable[[], T]) -> Future[T]:
    """Begin a call in a thread of its own, for which the end of the process does not wait."""
    future: Future[T] = Future()
    call = partial(copy_context().run, work)
    threading.Thread(target=_make, args=(future, call), name="meshtape-call", daemon=True).start()
    return future


def result(future: Future[T], where: str, asked: str, nbytes: int = 0, left: float | None = None) -> T:
    """The result of a call that was begun; see `limited`."""
    whole = seconds(nbytes)
    end = time.monotonic() + (whole if left is None else left)
    while True:
        rest = end - time.monotonic()
        with contextlib.suppress(TimeoutError):
            return future.result(min(rest, _SLICE))
        if future.done():
            return future.result()  # its own error may be a TimeoutError, too
        check_stopped(where)
        if rest <= 0:
            raise late(where, asked, whole)


def late(where: str, asked: str, whole: float) -> StoreError:
    """The error for a store that says nothing, or too slowly."""
    error = StoreError(
        f"{where}: asked for {asked}, the store gave no whole answer within {whole:.3g} s. That is the setting "
        f"meshtape.timeouts.store of Dask's configuration (DASK_MESHTAPE__TIMEOUTS__STORE), {seconds():.3g} s, and a "
        f"second more for each {RATE >> 10} KiB"
    )
    error.errno = errno.ETIMEDOUT
    return error


def is_late(error: BaseException) -> bool:
    """Whether a store did not answer in time, or nobody waits any more: to ask it anything else takes as long again."""
    return isinstance(error, StoreError) and error.errno in (errno.ETIMEDOUT, errno.ECANCELED)


def check_stopped(where: str) -> None:
    """Raise where an interrupt has ended the work that this thread is part of."""
    if (stop := getattr(_own, "stop", None)) is not None and stop.is_set():
        error = StoreError(f"{where}: given up, as the work was interrupted")
        error.errno = errno.ECANCELED
        raise error


@contextlib.contextmanager
def pool(threads: int, name: str = "meshtape-io") -> Iterator[Pool]:
    """Threads that read and write, joined at the end of the block; an interrupt there ends their waits for a store."""
    stop = getattr(_own, "stop", None) or threading.Event()
    made = Pool(threads, name, initializer=lambda: setattr(_own, "stop", stop))
    try:
        yield made
    except (KeyboardInterrupt, SystemExit):
        stop.set()
        raise
    finally:
        try:
            made.shutdown(cancel_futures=stop.is_set())
        except KeyboardInterrupt:  # while the last ones are waited for
            stop.set()
            raise


def _serve(calls: SimpleQueue[Any]) -> None:
    while True:
        future, work = calls.get()
        _make(future, work, then=lambda: _idle.append(calls))
        del future, work  # nothing of a call is kept meanwhile


def _make(future: Future[Any], work: Callable[[], Any], then: Callable[[], None] = lambda: None) -> None:
    try:
        found = work()
    except BaseException as e:
        then()
        future.set_exception(e)
    else:
        then()
        future.set_result(found)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the imports of a block are done; the signal's handler is called then.

    Half of a large package would stay in the process, and every later import of it fail there.
    Python gives the signal to the main thread alone, so that imports of others are whole.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, object]] = []
    signal.signal(signal.SIGINT, lambda *said: held.append(said))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


# ----- forks ----------------------------------------------------------------------------------------------------------


def lock() -> threading.Lock:
    """A lock that is free in a forked child, whichever thread of the parent held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def is_lost(client: str) -> bool:
    """Whether this process was forked from one in which the threads of a client ran."""
    return client in _lost


def refuse_fork(client: str, where: str) -> None:
    """Raise `StoreError` where a client's threads were lost."""
    if is_lost(client):
        raise StoreError(
            f"{where}: {client}'s threads do not survive a fork, and this process was forked from one that had used "
            'them. Start processes by "spawn" or "forkserver" (of multiprocessing; of a DataLoader by '
            "multiprocessing_context=), or use such a store only after the fork"
        )


def _before_fork() -> None:
    global _running
    _running = tuple(name for name in _CLIENTS if name in sys.modules)
    if _running:
        with contextlib.suppress(OSError):  # without Linux's /proc nothing tells whether an imported client was used
            names = [_thread_name(task) for task in os.listdir("/proc/self/task")]
            _running = _running if any(name.startswith("tokio") for name in names) else ()


def _thread_name(task: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm", encoding="ascii", errors="replace") as f:
        return f.read()
    return ""


def _after_fork() -> None:
    global _own
    _own = threading.local()
    _idle.clear()
    _lost.update(_running)
    for held in _locks:
        held._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
