"""Windows spread over threads of this process, or over the workers of a cluster."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from ...arrays.core.errors import CheckpointError, ClusterError
from ..base.threads import starting
from ..base.waiting import pool

T = TypeVar("T")
_SHORT = 2e-3  # seconds


class Executor(Protocol):
    """An executor of other processes, such as those of ``concurrent.futures`` and Dask's ``client.get_executor()``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Call ``fn(*args)`` somewhere; returns a future."""


def executor_of(client: Any) -> Executor | None:
    """The executor of a Dask client; an executor, or None, as it is."""
    if hasattr(client, "get_executor"):
        # Windows are written to fixed places, so a task that a lost worker leaves behind may simply run again.
        return client.get_executor(pure=False)
    if client is None or hasattr(client, "submit"):
        return client
    raise CheckpointError(f"client= is a Dask client or an executor, got {client!r:.80}")


class Workers:
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
            yield from self._spread(self.executor, self.threads, fn, items, arguments, 1)
        elif self.threads < 2 or len(items) < 2:
            for item in items:
                yield item, fn(*arguments(item))
        else:
            with starting(), pool(self.threads) as made:
                # Twice as many as threads, so that none waits for the one that takes the results; short calls many at a
                # time, which would spend their time handing the interpreter to one another.
                yield from self._spread(made, 2 * self.threads, fn, items, arguments, 64)

    @staticmethod
    def _spread(
        executor: Executor,
        in_flight: int,
        fn: Callable[..., Any],
        items: Sequence[T],
        arguments: Callable[[T], tuple[Any, ...]],
        longest: int,
    ) -> Iterator[tuple[T, Any]]:
        waiting = iter(items)
        running: dict[Future[Any], list[T]] = {}
        count = 1

        def begin() -> None:
            batch = list(itertools.islice(waiting, count))
            if batch:
                running[executor.submit(_called, fn, [arguments(item) for item in batch])] = batch

        for _ in range(in_flight):
            begin()
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    batch = running.pop(future)
                    try:
                        results, error, seconds = future.result()
                    except CancelledError as e:
                        raise ClusterError(
                            "the work was cancelled: the scheduler is gone, or its client was closed"
                        ) from e
                    if error is None:
                        count = min(2 * count, longest) if seconds < _SHORT else max(count // 2, 1)
                        begin()
                    yield from zip(batch, results, strict=error is None)
                    if error is not None:
                        raise error
        finally:
            for future in running:
                future.cancel()
            if not isinstance(executor, ThreadPoolExecutor):  # the end of a pool waits itself
                wait([f for f in running if not f.cancelled()])


def _called(fn: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> tuple[list[T], BaseException | None, float]:
    """The results of calls, up to the first that fails, its error, and seconds. A first call that fails raises."""
    began, results = time.perf_counter(), list[T]()
    try:
        for a in arguments:
            results.append(fn(*a))  # those before an error are kept
    except BaseException as e:
        if not results:
            raise
        return results, e, 0.0
    return results, None, time.perf_counter() - began
