"""Rendezvous of ranks that are traced separately.

Where ranks may take different paths through a function (blocks of different shapes, ``int(mt.axis_index(…))``) each is
traced by a thread of its own. One runs at a time; at a collective it waits for the others of its group. A deadlock of
ranks is found here, before anything has run, and raises an error that names them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...arrays.core.errors import CollectiveMismatch
from ...arrays.core.op import state


class Uneven(BaseException):
    """Raised inside the trace of all ranks if they turn out to differ, so that each must be traced by itself.

    No ``Exception``, so that nothing in the user's code takes it for an error of his own.
    """


class _Stopped(BaseException):
    """Ends the threads of the other ranks when one has failed."""


class Waiting(NamedTuple):
    group: tuple[int, ...]
    what: str
    details: Any
    payload: Any


class Meeting:
    """Runs one function for each rank, and synchronizes them at collectives."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting: dict[int, Waiting] = {}
        self.answers: dict[int, Any] = {}
        self.mail: dict[tuple[int, int], deque[Any]] = {}
        self.expecting: dict[int, int] = {}
        self.runnable: deque[int] = deque(range(count))
        self.done: set[int] = set()
        self.meetings = 0
        self.stopped = False
        self._go = [threading.Semaphore(0) for _ in range(count)]
        self._back = threading.Semaphore(0)

    def run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Results of all bodies; the error of the first that failed."""
        results: list[Any] = [None] * self.count
        errors: dict[int, BaseException] = {}
        inherited = {k: getattr(state, k) for k in ("recorders", "origin", "site", "device")}

        def thread(rank: int) -> None:
            self._go[rank].acquire()
            try:
                if not self.stopped:
                    for k, v in inherited.items():
                        setattr(state, k, v)
                    results[rank] = bodies[rank]()
            except _Stopped:
                pass
            except BaseException as e:
                errors[rank] = e
            finally:
                self.done.add(rank)
                self._back.release()

        threads = [
            threading.Thread(target=thread, args=(r,), name=f"meshtape-trace-{r}", daemon=True)
            for r in range(self.count)
        ]
        for t in threads:
            t.start()
        try:
            while self.runnable and not errors:
                self._go[self.runnable.popleft()].release()
                self._back.acquire()
            if not errors and len(self.done) < self.count:
                raise self._mismatch()
        finally:
            self.stopped = True
            for r, t in enumerate(threads):
                if t.is_alive() and r not in self.done:
                    self._go[r].release()
                t.join()
        if errors:
            raise errors[min(errors)]
        return results

    def meet(self, rank: int, group: tuple[int, ...], what: str, details: Any, payload: Any) -> tuple[int, list[Any]]:
        """Number of this meeting, and the payloads of the group in its order. Called by the thread of ``rank``."""
        self.waiting[rank] = Waiting(group, what, details, payload)
        if all(r in self.waiting and self.waiting[r].group == group for r in group):
            mine = self.waiting[rank]
            for r in group:
                other = self.waiting[r]
                if (other.what, other.details) != (what, details):
                    raise CollectiveMismatch(
                        f"rank {rank} is in {_text(mine)}, rank {r} in {_text(other)}: the ranks {list(group)} must meet in the "
                        "same collective, of the same shapes where it needs that"
                    )
            self.meetings += 1
            payloads = [self.waiting.pop(r).payload for r in group]
            for r in group:
                self.answers[r] = (self.meetings, payloads)
            self.runnable.extend(r for r in group if r != rank)
            return self.answers.pop(rank)
        self._back.release()
        self._go[rank].acquire()
        if self.stopped:
            raise _Stopped
        return self.answers.pop(rank)

    def post(self, rank: int, to: int, what: Any) -> None:
        """Leave a value for another rank to :meth:`take`, without waiting. Called by the thread of ``rank``."""
        self.mail.setdefault((rank, to), deque()).append(what)
        if self.expecting.get(to) == rank:
            del self.expecting[to]
            self.runnable.append(to)

    def take(self, rank: int, source: int) -> Any:
        """The next value that another rank posted. Called by the thread of ``rank``."""
        box = self.mail.setdefault((source, rank), deque())
        if not box:
            self.expecting[rank] = source
            self._back.release()
            self._go[rank].acquire()
            if self.stopped:
                raise _Stopped
        return box.popleft()

    def _mismatch(self) -> CollectiveMismatch:
        lines = [f"rank {r} waits in {_text(w)} for ranks {list(w.group)}" for r, w in sorted(self.waiting.items())]
        lines += [f"rank {r} waits for what rank {s} sends" for r, s in sorted(self.expecting.items())]
        lines += [f"rank {r} has returned" for r in sorted(self.done)]
        return CollectiveMismatch(f"the ranks would wait for each other for ever: {'; '.join(lines)}")


def _text(w: Waiting) -> str:
    return f"{w.what}{w.details}"
