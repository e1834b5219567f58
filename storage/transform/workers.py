"""Windows spread over threads of this process, or over the workers of a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from ...arrays.core.errors import ClusterError

T = TypeVar("T")


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
                    try:
                        result = future.result()
                    except CancelledError as e:
                        raise ClusterError(
                            "the work was cancelled: the scheduler is gone, or its client was closed"
                        ) from e
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
            while True:
                with lock:
                    item = None if stop else next(waiting, None)
                if item is None:
                    return
                try:
                    result: Any = fn(*arguments(item))
                except BaseException as e:
                    result = _Failed(e)
                with lock:
                    stop = stop or isinstance(result, _Failed)
                    results.append((item, result))
                arrived.release()

        with ThreadPoolExecutor(self.threads, thread_name_prefix="meshtape-io") as pool:
            for _ in range(self.threads):
                pool.submit(worker)
            try:
                for _ in items:
                    arrived.acquire()
                    with lock:
                        item, result = results.pop(0)
                    if isinstance(result, _Failed):
                        raise result.error
                    yield item, result
            finally:
                stop = True


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error
