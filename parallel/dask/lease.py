"""A client's lease on the workers of its meshes: the client's side of :mod:`.scheduler_plugin`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distributed import Client

from ...arrays.core.errors import ClusterError
from ..base import settings
from .scheduler_plugin import YIELD
from .workers import LOOK, PerClient, call_scheduler, on_loop, scheduler_answer

NOTICE = 10.0
"""Seconds after which a client that waits for workers warns, naming their holders; again after twice the time."""

log = logging.getLogger("meshtape")


def _waiting(seconds: float, workers: Sequence[str], holders: Sequence[tuple[str, Sequence[str]]]) -> str:
    who = [f"{name}, which runs {', '.join(programs)}" if programs else f"{name}" for name, programs in holders]
    return (
        f"waited {seconds:.0f} s for worker(s) {', '.join(workers)}: another client has them"
        + (f" ({'; '.join(who)})" if who else "")
        + ". Programs of several clients take turns on a worker; meshes on other workers would not wait"
    )


class Lease:
    """The lease of one client, which has the workers between :meth:`enter` and :meth:`leave` of a run.

    Locks are held by ``with self._lock``, which is one step for the interpreter: in ``Condition.__enter__``, which is
    Python code, Ctrl-C leaves a lock behind that nobody gives back.
    """

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self._name = client.id
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held: frozenset[str] = frozenset()
        self._busy: set[object] = set()
        self._wanted = False
        self._asking = False
        me = weakref.ref(self)

        def asked(event: Any) -> None:
            lease = me()
            if lease is not None:
                # Not on the event loop's thread, which an answer to the scheduler needs.
                threading.Thread(target=lease._yield, name="meshtape-yield", daemon=True).start()

        client.subscribe_topic(YIELD + self._name, asked)

    def enter(self, run: object, workers: Iterable[str], meanwhile: Callable[[], None]) -> None:
        """Wait until this client has these workers, and keep them until :meth:`leave` of this run. ``meanwhile`` checks
        the gangs in flight, and raises their errors."""
        needed = frozenset(workers)
        with self._lock:
            while True:
                if self._asking:
                    self._changed.wait()
                elif needed <= self._held and not self._wanted:
                    self._busy.add(run)
                    return
                elif self._busy:  # runs in flight end first
                    self._changed.wait(1.0)
                    meanwhile()
                else:
                    break
            self._asking = True
            wanted = needed | self._held
            held, self._held, self._wanted = self._held, frozenset(), False
        try:
            if held:
                self._call("meshtape_release", name=self._name)
            patience = settings.number("timeouts.lease")
            self._acquire(sorted(wanted), patience)
        except BaseException:
            with self._lock:
                self._asking = False
                self._changed.notify_all()
            raise
        with self._lock:
            self._asking = False
            self._held = wanted
            self._busy.add(run)
            self._changed.notify_all()

    def leave(self, run: object) -> None:
        """A run has ended, or did not begin. Called in any thread, and waits for nothing."""
        with self._lock:
            self._busy.discard(run)
            self._changed.notify_all()
            over = self._wanted and not self._busy
        if over:
            threading.Thread(target=self._give_up, name="meshtape-yield", daemon=True).start()

    def _yield(self) -> None:
        with self._lock:
            self._wanted = True
        self._give_up()
        with contextlib.suppress(Exception):
            self._call("meshtape_here", name=self._name)

    def _give_up(self) -> None:
        """Release the workers, if others want them and nothing is in flight."""
        with self._lock:
            if not self._wanted or self._busy or self._asking or not self._held:
                return
            self._asking = True
            self._held, self._wanted = frozenset(), False
        with contextlib.suppress(Exception):  # the scheduler is gone: so is the lease
            self._call("meshtape_release", name=self._name)
        with self._lock:
            self._asking = False
            self._changed.notify_all()

    def _acquire(self, workers: list[str], patience: float) -> None:
        client = self._client()
        if client is None or client.status != "running":
            return

        async def acquire() -> None:
            call = asyncio.ensure_future(
                client.scheduler.meshtape_acquire(name=self._name, workers=workers, patience=patience)
            )
            said_after, waited = NOTICE, 0.0
            try:
                while not (await asyncio.wait([call], timeout=min(LOOK, said_after - waited)))[0]:
                    waited = min(waited + LOOK, said_after)
                    if waited < said_after:  # a scheduler that is gone gives no turns
                        await scheduler_answer(client, "identity", n_workers=0)
                        continue
                    said_after = 2 * waited
                    holders = await scheduler_answer(client, "meshtape_holding", name=self._name, workers=workers)
                    log.warning(_waiting(waited, workers, holders))
                call.result()
            except OSError as e:
                raise ClusterError(f"the scheduler at {client.scheduler.address} does not answer: {e}") from None
            finally:
                call.cancel()

        on_loop(client, acquire)

    def _call(self, op: str, **kwargs: Any) -> None:
        client = self._client()
        if client is not None and client.status == "running":
            call_scheduler(client, op, **kwargs)


lease_of = PerClient(Lease)
"""The lease of a client: one for all its meshes."""
