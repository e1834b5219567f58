"""Threads of reads and writes: their numbers by kind, and the priority of background threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

from ...arrays.core.errors import OutOfMemory
from .waiting import pool

THREADS = 2  # to one disk, more only wait for each other
SYNCS = 16  # files that are synced at a time: the file system's journal commits those together that wait together
NICER = 10  # steps of priority by which a save in the background gives way
QUICK = 2e-4  # seconds of a call for which no thread is worth its while
UPLOADS = 8  # objects on their way to an object store
COMPRESSORS = 4  # threads that compress: of each of perhaps many processes on a machine

_behind: ContextVar[bool] = ContextVar("behind", default=False)
T = TypeVar("T")


def within(own: threading.local, state: Mapping[str, Any], call: Callable[[], T]) -> T:
    """A call with a thread's own state set, which is then as it was before: after an interrupt at any place, too. (A
    context manager's own parts may be interrupted, and the state stays.)"""
    restore = partial(vars(own).update, {name: getattr(own, name, None) for name in state})
    try:
        vars(own).update(state)
        return call()
    finally:
        restore()  # one call, before which nothing is interrupted


def give_way() -> None:
    """Give the training precedence over this thread from now on; its writes are then background work.

    One processor is left to the training, and on Linux, where a priority is a thread's own, this thread and those that
    it starts step back; elsewhere the first alone holds.
    """
    _behind.set(True)
    if sys.platform == "linux":
        me = threading.get_native_id()
        with contextlib.suppress(OSError):  # refused in some sandboxes
            os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + NICER)


def writers() -> int:
    """Threads that write at a time."""
    return max(1, min(THREADS, (os.cpu_count() or 1) - 1)) if _behind.get() else THREADS


def compressors(shards: int, at_a_time: int) -> int:
    """Threads that compress the chunks of one shard, where ``shards`` are to be written, so many at a time."""
    processors = max(1, (os.cpu_count() or 1) - _behind.get())
    return max(1, min(COMPRESSORS, processors) // max(1, min(shards, at_a_time)))


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """`OutOfMemory` where this process gets no more threads: from the system, or from Python 3.12 at its end."""
    try:
        yield
    except RuntimeError as e:
        if "new thread" not in str(e):
            raise
        why = "the interpreter ends" if "interpreter" in str(e) else "its ulimit -u is reached"
        raise OutOfMemory(f"there are no more threads for this process: {why}") from None


def in_threads(
    work: Callable[[Any], Any], items: Sequence[Any], threads: int | None = None, *, alone: bool = False
) -> list[Any]:
    """Results in order. After an error none that waits is begun, and it is raised when those that run have ended.

    By default in as many `writers` as there are. ``alone``: in this thread as long as none takes longer than to hand
    the interpreter to another thread.
    """
    count = min(writers() if threads is None else threads, len(items))
    if count < 2:
        return [work(item) for item in items]
    out: list[Any] = [None] * len(items)
    failed: list[int] = []
    # Each thread takes the next: to hand them out one by one takes longer than a small file.
    rest = iter(range(len(items)))
    began = time.perf_counter()
    for i in rest if alone else ():
        out[i] = work(items[i])
        if (now := time.perf_counter()) - began > QUICK:
            break
        began = now
    else:
        if alone:
            return out

    def take() -> None:
        for i in rest:
            if failed:
                return
            try:
                out[i] = work(items[i])
            except BaseException as e:
                failed.append(i)
                out[i] = e
                return

    with pool(count) as made:
        # In the context of the caller, as if they did the work themselves.
        futures: list[Future[None]] = []  # also those before one that cannot begin
        try:
            try:
                futures.extend(made.submit(copy_context().run, take) for _ in range(count))
            except RuntimeError:  # the system has no more threads for us: this one does the work
                take()
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C: none that waits is begun
            failed.append(len(items))
            raise
    if failed:
        raise out[min(failed)]
    return out
