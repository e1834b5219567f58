"""Windows spread over threads of this process, or over the workers of a cluster."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_SHORT = 2e-3  # seconds


class Executor(Protocol):
    """An executor of other processes, such as those of ``concurrent.futures`` and Dask's ``client.get_executor()``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Call ``fn(*args)`` somewhere; returns a future."""


class Spread:
    """Parallel calls of a function on many items: in ``threads`` here, or by ``executor`` with as many calls in flight.

    Results come in the order in which calls end. After an error no call begins, and it is raised when all have ended.
    """

    def __init__(self, threads: int, executor: Executor | None = None) -> None:
        self.threads, self.executor = threads, executor

    def over(
        self, fn: Callable[..., Any], items: Sequence[T], arguments: Callable[[T], tuple[Any, ...]]
    ) -> Iterator[tuple[T, Any]]:
        """(item, ``fn(*arguments(item))``) for all items."""
        if self.executor is not None:
            yield from self._away(fn, items, arguments)
        elif self.threads < 2 or len(items) < 2:
            for item in items:
                yield item, fn(*arguments(item))
        else:
            yield from self._here(fn, items, arguments)

    def _away(
        self, fn: Callable[..., Any], items: Sequence[T], arguments: Callable[[T], tuple[Any, ...]]
    ) -> Iterator[tuple[T, Any]]:
        waiting = iter(items)
        running: dict[Future[Any], T] = {}

        def begin() -> None:
            for item in waiting:
                running[self.executor.submit(fn, *arguments(item))] = item  # type: ignore[union-attr]
                return

        for _ in range(self.threads):
            begin()
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    item = running.pop(future)
                    result = future.result()
                    begin()
                    yield item, result
        finally:
            for future in running:
                future.cancel()
            wait([f for f in running if not f.cancelled()])

    def _here(
        self, fn: Callable[..., Any], items: Sequence[T], arguments: Callable[[T], tuple[Any, ...]]
    ) -> Iterator[tuple[T, Any]]:
        waiting = iter(items)
        lock, arrived = threading.Lock(), threading.Semaphore(0)
        results: list[tuple[T, Any]] = []
        stop = False

        def worker() -> None:
            nonlocal stop
            count = 1  # calls at a time: short ones would spend their time handing the interpreter to one another
            while True:
                with lock:
                    batch = [] if stop else list(itertools.islice(waiting, count))
                if not batch:
                    return
                began, done = time.perf_counter(), []
                for item in batch:
                    try:
                        done.append((item, fn(*arguments(item))))
                    except BaseException as e:
                        done.append((item, _Failed(e)))
                        stop = True
                    if stop:
                        break
                with lock:
                    results.extend(done)
                arrived.release()
                count = min(2 * count, 64) if time.perf_counter() - began < _SHORT else max(count // 2, 1)

        with ThreadPoolExecutor(self.threads, thread_name_prefix="meshtape-io") as pool:
            for _ in range(self.threads):
                pool.submit(worker)
            try:
                left = len(items)
                while left:
                    arrived.acquire()
                    with lock:
                        held = results[:]
                        results.clear()
                    left -= len(held)
                    for item, result in held:
                        if isinstance(result, _Failed):
                            raise result.error
                        yield item, result
            finally:
                stop = True


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error
