"""Runs on their way: waiting for gangs, and what is done when one fails."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Future

from ..arrays.errors import ClusterError, CollectiveTimeout, MeshtapeError, RankLost
from . import gang, settings
from .lease import Lease
from .workers import LOOK, known_workers

IN_FLIGHT = 4
"""Runs that are submitted before the first of them is waited for."""


class Gang:
    """The futures of one run, one a process. ``on_end`` is called once, when all have ended or are given up."""

    def __init__(
        self, run: str, what: str, futures: Sequence[Future], on_end: Callable[[], None] | None = None
    ) -> None:
        self.run, self.what, self.futures = run, what, list(futures)
        self._on_end, self._open = on_end, len(self.futures)
        self._lock = threading.Lock()
        if on_end is not None:
            for f in self.futures:
                f.add_done_callback(self._one_ended)

    def _one_ended(self, _: Future) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self.end()

    def end(self) -> None:
        """Nothing of this gang is waited for any more."""
        with self._lock:
            fn, self._on_end = self._on_end, None
        if fn is not None:
            fn()

    @property
    def done(self) -> bool:
        return all(f.done() for f in self.futures)


def failed(f: Future) -> bool:
    """Whether a task failed, by itself or with its worker."""
    return f.status in ("error", "cancelled", "lost") or (f.status == "finished" and f.type is gang.Failure)


class Flight:
    """The runs of one mesh that were submitted and not yet waited for."""

    def __init__(
        self, client: Client, mesh: bytes, addresses: Sequence[str], lease: Lease, names: Sequence[str]
    ) -> None:
        self.client, self.mesh, self.addresses, self.lease, self.names = client, mesh, addresses, lease, names
        self.gangs: deque[Gang] = deque()
        self.epoch = 0

    def check(self) -> None:
        """Raise what went wrong in an earlier run, if anything did."""
        while self.gangs and (self.gangs[0].done or any(map(failed, self.gangs[0].futures))):
            self.settle(self.gangs[0])

    def land(self) -> None:
        """Wait for everything; an error has nobody left to tell."""
        while self.gangs:
            with contextlib.suppress(MeshtapeError):
                self.settle(self.gangs[0])

    def settle(self, this: Gang) -> None:
        """Wait until a gang has ended; raise its error, the cause before its consequences."""
        pending = list(this.futures)
        looked_at = time.monotonic()
        failed_at: float | None = None
        gone_at: float | None = None
        gone: list[str] = []
        grace = settings.number("timeouts.abort")
        # Not distributed.wait: it needs a current client, and to set one changes Dask's configuration for all threads.
        ended = threading.Event()
        for f in pending:
            if not f.done():
                f.add_done_callback(lambda _: ended.set())
        while pending:
            if not any(f.done() for f in pending):
                ended.wait(0.2 if failed_at else LOOK)
            ended.clear()
            pending = [f for f in pending if not f.done()]
            if failed_at is None and any(map(failed, this.futures)):
                failed_at = time.monotonic()
                if pending:
                    self._stop_the_rest()
            if failed_at is not None and time.monotonic() - failed_at > grace:
                break
            if failed_at is None and pending and time.monotonic() - looked_at > LOOK:
                # A task whose worker died before it began is not always told to have failed: the scheduler may keep it for a
                # worker of that address to come, for ever.
                looked_at = time.monotonic()
                gone = self._gone()
                gone_at = None if not gone else gone_at or looked_at
                if gone_at is not None and looked_at - gone_at > grace:
                    self._stop_the_rest()
                    break
            if pending and self.client.status != "running":
                raise ClusterError(f"the Dask client is {self.client.status}: the cluster went away during {this.what}")
        if this in self.gangs:
            self.gangs.remove(this)
        if not pending and not any(map(failed, this.futures)):
            return
        self.epoch += 1  # the next run connects anew
        self._give_up((this, *self.gangs))
        raise self._cause(this, gone)

    def _give_up(self, gangs: Sequence[Gang]) -> None:
        """Wait for these no longer: neither here, nor with what comes next."""
        for g in gangs:
            g.end()
        self.gangs.clear()
        self.lease.forget(f for g in gangs for f in g.futures if not f.done())

    def abandon(self) -> None:
        """Give up what is on its way: with the part of it that a lost worker had, the rest may never end."""
        gangs = list(self.gangs)
        waiting = [f for g in gangs for f in g.futures if not f.done()]
        if waiting and self.client.status == "running":
            with contextlib.suppress(OSError, TimeoutError):
                self.client.cancel(waiting, force=True)
        self._give_up(gangs)

    def present(self) -> list[str]:
        """Addresses of the mesh that the scheduler still knows."""
        alive = known_workers(self.client)
        return [a for a in self.addresses if a in alive]

    def wait_for(self, f: Future) -> None:
        """Wait until a task has ended, well or not. Raises :class:`RankLost` where one of the workers has left."""
        ended = threading.Event()
        f.add_done_callback(lambda _: ended.set())
        while not ended.wait(LOOK) and not f.done():
            if gone := self._gone():
                raise RankLost(f"{self.names[self.addresses.index(gone[0])]} left the cluster")

    def _gone(self) -> list[str]:
        there = self.present()
        return [a for a in self.addresses if a not in there]

    def _cause(self, this: Gang, gone: Sequence[str]) -> MeshtapeError:
        if not gone and any(f.status in ("cancelled", "lost") for f in this.futures):
            gone = self._gone()  # what is lost with one worker cancels the tasks of all
        names = dict(zip(self.addresses, self.names, strict=True))
        errors: list[BaseException] = [RankLost(f"{names[a]} left the cluster during {this.what}") for a in gone]
        for f in this.futures:
            if f.status == "error":
                errors.append(f.exception() or RankLost(f"the task {f.key} failed"))
            elif f.status in ("cancelled", "lost"):
                errors.append(RankLost(f"the task {f.key} was {f.status}: a worker left the cluster"))
            elif failed(f):
                errors.append(self._failure(f))
        # A rank that failed by itself explains the others, which only noticed.
        errors.sort(
            key=lambda e: (isinstance(e, RankLost | CollectiveTimeout), " stopped: " in str(e) or " left" in str(e))
        )
        cause = errors[0]
        if isinstance(cause, MeshtapeError):
            # Dask's client keeps the error of a future. Were that one raised, its traceback would hold the frames that hold the
            # future, which would then never be released.
            return copy.copy(cause).with_traceback(cause.__traceback__)
        lost = RankLost(f"a worker failed while it ran {this.what}: {type(cause).__name__}: {cause}")
        lost.__cause__ = cause
        return lost

    def _failure(self, f: Future) -> BaseException:
        """What a task says about its failure; where its worker has no answer any more, that it failed."""
        try:
            found = f.result(timeout=settings.number("timeouts.abort"))
        except Exception as e:
            return RankLost(f"the task {f.key} failed, and its worker left: {type(e).__name__}")
        return found.error if isinstance(found, gang.Failure) else RankLost(f"the task {f.key} was run again")

    def _stop_the_rest(self) -> None:
        """Workers that still wait for one that failed are told; nobody waits for their answer, as one may have none."""
        there, epoch = self.present(), self.epoch

        def tell() -> None:
            with contextlib.suppress(Exception):  # it hastens an end that timeouts would bring as well
                self.client.run(gang.stop_epoch, self.mesh, epoch, workers=there, on_error="return")

        threading.Thread(target=tell, name="meshtape-stop", daemon=True).start()

    def gather(self, this: Gang) -> list[Any]:
        """The results of a gang, brought here."""
        self.settle(this)
        for direct in (True, False):
            try:
                return self.client.gather(this.futures, direct=direct)
            except MeshtapeError:
                raise
            except Exception as e:
                # The tasks have ended well: what is lost now are their answers. Dask says so by errors of many kinds.
                if direct and isinstance(e, OSError):
                    continue
                names = [self.names[self.addresses.index(a)] for a in self._gone()]
                who = ", ".join(names) or "a worker"
                raise RankLost(
                    f"{who} left the cluster before the answer of {this.what} was here: {type(e).__name__}: {e}"
                ) from e
        raise AssertionError
