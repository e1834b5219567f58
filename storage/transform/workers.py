"""Windows spread over threads of this process, or over the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

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
            yield from self._spread(self.executor, self.threads, fn, items, arguments)
        elif self.threads < 2 or len(items) < 2:
            for item in items:
                yield item, fn(*arguments(item))
        else:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="meshtape-io") as pool:
                # One more for each thread, so that none waits for the one that takes the results.
                yield from self._spread(pool, 2 * self.threads, fn, items, arguments)

    @staticmethod
    def _spread(
        executor: Executor,
        in_flight: int,
        fn: Callable[..., Any],
        items: Sequence[T],
        arguments: Callable[[T], tuple[Any, ...]],
    ) -> Iterator[tuple[T, Any]]:
        waiting = iter(items)
        running: dict[Future[Any], T] = {}

        def begin() -> None:
            for item in waiting:
                running[executor.submit(fn, *arguments(item))] = item
                return

        for _ in range(in_flight):
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
