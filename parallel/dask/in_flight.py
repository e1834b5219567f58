"""Runs in flight: waiting for gangs, and the handling of their failures."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from distributed import Client

from ...arrays.core.errors import CollectiveTimeout, MeshtapeError, RankLost, StorageFull, StoreError
from ...storage.stores.contract import failed
from ..base import settings
from ..base.message_streams import RemoteError, popped
from .lease import Lease
from .streams import WorkerFuture, WorkerStream, WorkerStreams
from .workers import LOOK, check_running

IN_FLIGHT = 4
"""Runs that are submitted before the first of them is waited for."""


class DroppedSlots:
    """The slots of a gang that nobody has any more."""

    def __init__(self, gang: Gang) -> None:
        self._gang, self._streams = weakref.ref(gang), tuple(f.stream for f in gang.futures)
        self._dead: deque[int] = deque()

    def drop(self, slot: int) -> None:
        """Have the workers drop a slot with the next message, or soon: its memory is freed before the whole bundle
        is."""
        self._dead.append(slot)
        if self._streams:
            self._streams[0].streams.put_later(self._told)

    def _told(self) -> Sequence[WorkerStream]:
        gang, slots = self._gang(), tuple(popped(self._dead))
        if gang is None or not slots:  # without a gang its futures are dropped, and all slots with them
            return ()
        if not gang.futures[0].done():  # that comes to pass most often as soon as it has ended
            self._dead.extend(slots)
            gang.futures[0].add_done_callback(lambda _: self._streams[0].streams.put_later(self._told))
            return ()
        for s in self._streams:
            s.send({"op": "drop_slots", "n": gang.number, "slots": slots})
        return self._streams


def _of_files(error: BaseException, name: str) -> BaseException:
    """A file-system error of a worker, with the worker's name: other workers may have space and permissions."""
    if isinstance(error, StorageFull | StoreError):
        said = copy.copy(error)
        said.args = (f"{name}: {error}",)
        return said
    if not isinstance(error, OSError) or isinstance(error, MeshtapeError):
        return error
    where = "" if error.filename is None else f" {os.fsdecode(error.filename)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = StorageFull(f"{name}: the disk of a file{where} filled up: {error.strerror}")
        full.__cause__ = error
        return full
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        refused = failed(error, f"{name}: a file{where} cannot be used")
        refused.__cause__ = error
        return refused
    return error


class Gang:
    """The futures of one run, one a process. ``on_end`` is called once, when all have ended or are given up."""

    def __init__(self, what: str, futures: Sequence[WorkerFuture], on_end: Callable[[], None] | None = None) -> None:
        self.what, self.futures = what, list(futures)
        self.number = self.futures[0].number
        self.slots = DroppedSlots(self)
        self._on_end, self._open = on_end, len(self.futures)
        self._lock = threading.Lock()
        if on_end is not None:
            for f in self.futures:
                f.add_done_callback(self._one_ended)

    def _one_ended(self, _: WorkerFuture) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self.end()

    def end(self) -> None:
        """Call ``on_end``, once: nothing waits for this gang any more."""
        with self._lock:
            fn, self._on_end = self._on_end, None
        if fn is not None:
            fn()

    @property
    def done(self) -> bool:
        return all(f.done() for f in self.futures)

    @property
    def failed(self) -> bool:
        return any(f.failed for f in self.futures)


class RunQueue:
    """The runs of one mesh that were submitted and not yet waited for."""

    def __init__(
        self,
        client: Client,
        streams: WorkerStreams,
        mesh: bytes,
        addresses: Sequence[str],
        lease: Lease,
        names: Mapping[int, str],
    ) -> None:
        self.client, self._streams, self.mesh, self.lease = client, streams, mesh, lease
        self.addresses = addresses
        self.names = {a: names[p] for p, a in enumerate(addresses)}
        self.gangs: deque[Gang] = deque()
        self.epoch = 0

    def check(self) -> None:
        """Raise the error of an earlier run, if any."""
        while self.gangs and (self.gangs[0].done or self.gangs[0].failed):
            self.wait(self.gangs[0])

    def drain(self) -> None:
        """Wait for all gangs, and ignore their errors."""
        while self.gangs:
            with contextlib.suppress(MeshtapeError):
                self.wait(self.gangs[0])

    def wait(self, this: Gang) -> None:
        """Wait until a gang has ended; raise its error, the cause before its consequences."""
        # A queue of C's: in a threading.Event, Ctrl-C can leave a lock behind at which the event loop stands for ever.
        failed_at: float | None = None
        grace = settings.number("timeouts.abort")
        ended, count = SimpleQueue[None](), itertools.count(1)

        def one(f: WorkerFuture) -> None:  # this thread is not woken for each of many workers
            if next(count) == len(this.futures) or f.failed:
                ended.put(None)

        for f in () if this.done else this.futures:
            f.add_done_callback(one)
        while not this.done:
            with contextlib.suppress(Empty):
                ended.get(timeout=0.2 if failed_at is not None else LOOK)
            if failed_at is None and this.failed:
                failed_at = time.monotonic()
                self._stop_the_rest()
            if failed_at is not None and time.monotonic() - failed_at > grace:
                break
            if not this.done:
                check_running(self.client)
        if this in self.gangs:
            self.gangs.remove(this)
        if this.done and not this.failed:
            return
        gangs = [this, *self.gangs]
        self._give_up(gangs)
        raise self._cause(this)

    def _give_up(self, gangs: Sequence[Gang]) -> None:
        """Stop waiting for these gangs. The next run begins a new epoch."""
        self._stop_the_rest()
        self.epoch += 1  # the next run connects anew
        waiting: dict[WorkerStream, list[int]] = {}
        for g in gangs:
            g.end()
            for f in g.futures:
                if not f.done():
                    waiting.setdefault(f.stream, []).append(f.number)
        with self._streams.order:
            for stream, numbers in waiting.items():
                stream.send({"op": "cancel", "numbers": numbers})
            self._streams.flush(s.address for s in waiting)
        self.gangs.clear()

    def abandon(self) -> None:
        """Give up all gangs in flight: after the loss of a worker they may never end."""
        self._give_up(list(self.gangs))

    def _stop_the_rest(self) -> None:
        """Stop workers that still wait for a failed one, without waiting for answers, as one may have none."""
        with self._streams.order:
            for a in self.addresses:
                self._streams[a].send({"op": "stop", "mesh": self.mesh, "epoch": self.epoch})
            self._streams.flush(self.addresses)

    def _cause(self, this: Gang) -> MeshtapeError:
        errors: list[BaseException] = []
        check_running(self.client)  # workers leave with their scheduler
        for f in this.futures:
            if f.state == "lost":
                name = self.names.get(f.stream.address, f"worker {f.stream.address}")
                errors.append(RankLost(f"{name} left the cluster during {this.what}: {f.stream.lost or f.error}"))
            elif f.error is not None:
                errors.append(_of_files(f.error, self.names.get(f.stream.address, f"worker {f.stream.address}")))
        # A rank that failed by itself explains the others, which only noticed.
        errors.sort(
            key=lambda e: (isinstance(e, RankLost | CollectiveTimeout), " stopped: " in str(e) or " left" in str(e))
        )
        cause = errors[0]
        if isinstance(cause, MeshtapeError):
            # The future keeps its error. Were that one raised, its traceback would hold the frames that hold the
            # future.
            return copy.copy(cause).with_traceback(cause.__traceback__)
        if isinstance(cause, RemoteError):
            return RankLost(f"a worker failed while it ran {this.what}: {cause}")
        lost = RankLost(f"a worker failed while it ran {this.what}: {type(cause).__name__}: {cause}")
        lost.__cause__ = cause
        return lost

    def gather(self, this: Gang) -> list[Any]:
        """The results of a gang, brought here."""
        self.wait(this)
        try:
            return self._streams.results(this.futures)
        except RankLost as e:
            raise RankLost(f"a worker left the cluster before the answer of {this.what} was here: {e}") from e
