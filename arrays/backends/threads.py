"""Threads for work on large arrays: their number, and one pool for all callers."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

# With fewer elements a second thread costs more than it brings.
SMALLEST_SHARED = 1 << 20

_here = threading.local()


@functools.cache  # to ask the system takes as long as a small call, and the pool of threads is made once anyway
def threads() -> int:
    """The number of threads for work on one array: ``OMP_NUM_THREADS`` where it is set, else the processors.

    As for BLAS, it is fixed at the first use.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(int(wanted), available)) if wanted.isdecimal() else available


def _mark() -> None:
    _here.inside = True


class Pool(ThreadPoolExecutor):
    """Threads for which the caller does the work once the interpreter ends: then Python's pools take no more calls, in
    threads that outlive the main one, and in hooks of ``atexit``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of a call, which may have ended."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as e:
            # Python 3.12 may refuse the thread instead, with the call in the queue: a thread of the pool would make it.
            if "interpreter shutdown" not in str(e) or ("thread" in str(e) and self._threads):
                raise
        made = Future[Any]()
        try:
            made.set_result(fn(*args, **kwargs))
        except BaseException as e:
            made.set_exception(e)
        return made


@functools.cache
def _pool() -> Pool:
    return Pool(threads(), thread_name_prefix="meshtape-array", initializer=_mark)


if hasattr(os, "register_at_fork"):  # a child of a fork has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
    os.register_at_fork(after_in_child=threads.cache_clear)


def share(count: int, work: Callable[[int, int], None], *, size: int, unit: int = 1) -> None:
    """Call ``work(start, stop)`` until ``0 … count`` is done: on several threads where ``size``, in elements, is worth
    it.

    Shares start at multiples of ``unit``. An error of one of the calls is raised. Work inside a share is not shared
    again, as all threads could then wait for each other.
    """
    n = threads() if size >= SMALLEST_SHARED and not getattr(_here, "inside", False) else 1
    if n == 1 or count < 2 * n * unit:
        work(0, count)
        return
    step = -(-count // (n * unit)) * unit
    # Each in a copy of this context, which has what np.errstate says.
    done = [_pool().submit(copy_context().run, work, i, min(i + step, count)) for i in range(0, count, step)]
    for d in done:
        d.result()
