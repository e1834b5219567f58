"""Transports between the processes of a mesh: the :class:`Transport` protocol, and :class:`LinkGroup` over links.

The one primitive is an *exchange*: send batches to some processes, and fill sinks with the batches of others. All
collectives are made of it. Sends and receives of one exchange overlap, by polling descriptors; no thread is started.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from ...arrays.core.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from ..collectives.pieces import ArraySink, Batch, BatchSink, expected, nbytes
from . import frames
from .frames import FramePosition
from .links import Link
from .spin_poller import SpinPoller
from .streams import say_abort

SMALL = 32 << 10
"""Messages up to this many bytes travel with their head."""

Sends: TypeAlias = Mapping[int, Sequence["Batch | np.ndarray"]]
Receives: TypeAlias = Mapping[int, Sequence["BatchSink | np.ndarray"]]


class Transport(Protocol):
    """The interface of an executor to the other processes of its mesh.

    One thread uses it at a time, in the same order in every process of the mesh. Nothing may be used after an error.
    """

    eager: bool
    """Whether a wait may spin for a moment; False while the process computes beside it. Set by the caller."""

    def begin(self, run: int, timeout: float) -> None:
        """The exchanges that follow belong to run number ``run``; each may take ``timeout`` seconds."""

    def turn(self, number: int) -> None:
        """The exchanges that follow belong to this turn of a loop within the run."""

    def exchange(self, step: int, what: str, sends: Sends, receives: Receives) -> None:
        """Send batches (or single arrays) to processes, and fill sinks (or arrays) with theirs, in equal order.

        A process that is named here must name this one, with batches of the same shapes. ``step`` is the number of the
        exchange within the program, the same in all processes; ``what`` its purpose in the user's words
        (``all_reduce(data) of mean``). Raises :class:`RankLost` where a process left or stopped,
        :class:`CollectiveMismatch` where it is at another step or sends another size, :class:`CollectiveTimeout`, which
        names the missing processes, where the exchange is not done in time.
        """

    def abort(self, reason: str) -> None:
        """Send all processes that still listen the reason why this one stops."""

    def shutdown(self) -> None:
        """End the connections without freeing them: threads that wait for one see it closed. Called by any thread."""

    def close(self) -> None:
        """Free connections and memory."""


class LinkGroup:
    """A :class:`Transport` with one :class:`Link` to each other process that it exchanges with.

    ``mesh`` and ``epoch`` identify the mesh and its epoch, ``ranks`` names each process in errors. ``connect`` makes
    links to some processes within so many seconds. ``answers`` tells whether a process is alive; it is called after
    :attr:`silence` seconds without a sign of it.
    """

    silence = 5.0

    def __init__(
        self,
        mesh: bytes,
        epoch: int,
        process: int,
        connect: Callable[[Sequence[int], float], Mapping[int, Link]],
        ranks: Mapping[int, str],
        answers: Callable[[int, float], bool] | None = None,
    ) -> None:
        self._answers, self._connect = answers, connect
        self.mesh, self.epoch, self.process, self._ranks = mesh, epoch, process, ranks
        self.links: dict[int, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._waiter = SpinPoller()
        self.eager = True
        # Bytes that another thread of this process moves come sooner if this one does not hold the interpreter.
        self._apart = True
        self._place, self._timeout = FramePosition(0, 0, 0), 60.0
        self._what, self._expect = "", dict[int, int]()
        self._ready: list[Link] = []

    def begin(self, run: int, timeout: float) -> None:
        self._place, self._timeout = FramePosition(run, 0, 0), timeout

    def turn(self, number: int) -> None:
        self._place = self._place._replace(turn=number)

    def connect(self, processes: Collection[int]) -> None:
        """Make the missing links to these processes, each of which does the same. Raises as :meth:`exchange`."""
        missing = [p for p in processes if p not in self.links]
        if missing:
            try:
                found = self._connect(missing, self._timeout)
            except (RankLost, CollectiveTimeout) as e:
                raise type(e)(f"{self._what} ({self._place}): {e}" if self._what else str(e)) from e
            self.links.update(found)
            self._by_fd.update((link.stream.fileno(), link) for link in found.values())
            self._apart = self._apart and all(link.apart for link in found.values())

    def lives(self, process: int) -> bool:
        """Whether a process answers within :attr:`silence` seconds."""
        return self._answers is None or self._answers(process, self.silence)

    @property
    def last(self) -> tuple[int, str]:
        """(number of the run, purpose of its last exchange). Read by other threads, for display."""
        return self._place.run, self._what

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links = {}

    def shutdown(self) -> None:
        for link in list(self.links.values()):
            link.stream.shutdown()

    def abort(self, reason: str) -> None:
        length = min(len(reason.encode()), frames.TEXT_LIMIT)
        head = frames.pack(frames.ABORT, self.epoch, self.mesh, self._place, self.process, length, self._what)
        for link in self.links.values():
            if link.at_boundary:  # otherwise it would be taken for a part of the message; closing says enough
                say_abort(link.stream, head, reason)

    # ----- the exchange -----------------------------------------------------------------------------------------------

    def exchange(self, step: int, what: str, sends: Sends, receives: Receives) -> None:
        self._place = place = FramePosition(self._place.run, self._place.turn, step)
        self._what = what
        if not (self.links.keys() >= sends.keys() and self.links.keys() >= receives.keys()):
            self.connect({**sends, **receives})
        sending: dict[int, Link] = {}
        receiving: dict[int, Link] = {}
        self._expect = {}
        for p in {**sends, **receives}:
            link = self.links[p]
            batches: list[Batch] = []
            head = None
            if p in sends:
                sending[p] = link
                batches = [b if isinstance(b, tuple) else (b,) for b in sends[p]]
                size = nbytes(batches)
                head = frames.pack(frames.DATA, self.epoch, self.mesh, place, self.process, size, what)
                if size <= SMALL:
                    head, batches = b"".join([head, *(a.tobytes() for b in batches for a in b)]), []
            sinks, small, due = None, None, b""
            if p in receives:
                receiving[p] = link
                sinks = [ArraySink(s) if isinstance(s, np.ndarray) else s for s in receives[p]]
                self._expect[p] = size = expected(sinks)
                small = size if size <= SMALL else None
                due = frames.pack(frames.DATA, self.epoch, self.mesh, place, p, size, what)
            link.start(head, batches, sinks, small, due)
        deadline = time.monotonic() + self._timeout
        for link in {**sending, **receiving}.values():
            self._serve(link, sending, receiving)
        while self._unstall(sending, receiving):
            self._await({**sending, **receiving}.values(), deadline)
            for link in self._ready:
                self._serve(link, sending, receiving)

    def _serve(self, link: Link, sending: dict[int, Link], receiving: dict[int, Link]) -> None:
        """Send and receive on one link as far as possible without blocking."""
        p = link.peer
        while True:
            before = link.moved
            try:
                if p in sending and link.push():
                    del sending[p]
            except OSError as e:
                self._lost(link, e)
            try:
                if p in receiving and link.pull(self._check):
                    del receiving[p]
            except OSError as e:
                raise RankLost(f"{self._ranks[p]} left during {self._what}: {e}") from e
            if link.moved == before or not (p in sending or p in receiving):
                return

    def _unstall(self, sending: dict[int, Link], receiving: dict[int, Link]) -> bool:
        """Offer stalled chunks again. Returns whether anything is left to do."""
        again = True
        while again:
            again = False
            for link in [x for x in receiving.values() if x.stalled]:
                before = link.moved
                self._serve(link, sending, receiving)
                again |= link.moved != before
        return bool(sending or receiving)

    def _await(self, links: Collection[Link], deadline: float) -> None:
        wanted: dict[int, int] = {}
        for link in links:
            events = link.interest()
            if events:
                wanted[link.stream.fileno()] = events
        self._waiter.watch(wanted)
        missing = sorted({x.peer for x in links})
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectiveTimeout(
                    f"{self._what} ({self._place}): no answer within {self._timeout:.0f} s from "
                    + ", ".join(self._ranks[p] for p in missing)
                )
            patience = left if self._answers is None else min(left, self.silence)
            found = self._waiter.wait(patience, self.eager and self._apart)
            if found:
                break
            # A computing process still answers. One that is stopped or cut off does not, and is not waited for.
            if self._answers is not None and time.monotonic() < deadline:
                for p in missing:
                    if not self._answers(p, min(self.silence, left)):
                        raise CollectiveTimeout(
                            f"{self._what} ({self._place}): no answer from {self._ranks[p]}, "
                            "whose process is stopped or cut off"
                        )
        self._ready = [self._by_fd[fd] for fd in found]
        for link in self._ready:
            link.stream.awake()

    def _lost(self, link: Link, error: OSError) -> None:
        """Handle a failed send. The peer may have sent a reason before it closed, so that is read first."""
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(OSError, CollectiveMismatch):
            link.start(None, (), (), 0)
            self._expect[link.peer] = -1
            while time.monotonic() < deadline:
                if link.pull(self._check):
                    break
                poll = select.poll()
                poll.register(link.stream.fileno(), link.stream.events(True, False))
                poll.poll(100)
        raise RankLost(f"{self._ranks[link.peer]} left during {self._what}: {error}") from error

    def _check(self, link: Link, head: frames.Head | None) -> None:
        p = link.peer
        if head is None or head.process != p or head.group != self.mesh:
            raise CollectiveMismatch(f"{self._ranks[p]} sent what is no message of this mesh")
        if head.kind == frames.ABORT:
            raise RankLost(f"{self._ranks[p]} stopped: {link.reason(head.length)}")
        want = self._expect[p]
        if want < 0:
            raise ConnectionError("no last words")
        if head.epoch != self.epoch or head.place != self._place or head.length != want:
            epochs = f" of epoch {self.epoch}", f" of epoch {head.epoch}"
            mine, theirs = epochs if head.epoch != self.epoch else ("", "")
            raise CollectiveMismatch(
                f"{self._ranks[self.process]} is in {self._place}{mine} ({self._what}, {want} bytes), "
                f"{self._ranks[p]} in {head.place}{theirs} ({head.what}, {head.length} bytes)"
            )
