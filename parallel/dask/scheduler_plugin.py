"""The plugin of the Dask scheduler: leases of clients on workers, and news of lost workers and clients.

Gangs of two clients on the same workers would deadlock, if one starts first here and the other there. So a client holds
a *lease* on the workers of its meshes while its gangs run. It keeps the lease until another client wants one of the
workers. The scheduler then tells the holder, which finishes its runs in flight and gives the lease up. The scheduler
takes the lease from a client that leaves, and, if others wait, from one that has not used it for a while or does not
answer. It tells the workers first: a client that hung and goes on does not know, and its messages must not come between
the programs of others.

The scheduler also learns first of a lost worker or client, and tells the workers of the meshes concerned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from distributed import SchedulerPlugin
from distributed.core import Status, connect

_REPORTS = 64  # clients whose last report is kept
_PATIENCE = 2.0  # seconds for the answers of workers

YIELD = "meshtape-yield-"
"""Topic, followed by a client's name, under which it is told that others wait."""


@dataclass(eq=False)
class Wish:
    """A client that waits for workers."""

    client: str
    workers: frozenset[str]
    patience: float
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class MeshtapeScheduler(SchedulerPlugin):
    """See the module. Its state is touched by the scheduler's event loop alone."""

    name = "meshtape"
    idempotent = True

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.holders: dict[str, frozenset[str]] = {}
        self.waiting: deque[Wish] = deque()
        self.meshes: dict[bytes, tuple[str, tuple[str, ...]]] = {}
        self.reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._idle_since: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._fenced: dict[str, frozenset[str]] = {}
        self._fences = itertools.count(1)
        self._watch: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[Any]] = set()
        scheduler.handlers["meshtape_acquire"] = self.acquire
        scheduler.handlers["meshtape_release"] = self.release
        scheduler.handlers["meshtape_here"] = self.here
        scheduler.handlers["meshtape_holding"] = self.holding
        scheduler.handlers["meshtape_relay"] = self.relay
        scheduler.handlers["meshtape_open"] = self.open
        scheduler.handlers["meshtape_closed"] = self.closed
        scheduler.handlers["meshtape_activity"] = self.activity

    async def before_close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    # ----- leases -----------------------------------------------------------------------------------------------------

    async def acquire(self, name: str, workers: Iterable[str], patience: float) -> None:
        """Give a client these workers, when its turn comes. An idle holder loses them after ``patience`` seconds."""
        wish = Wish(name, frozenset(workers), patience)
        self.waiting.append(wish)
        self._grant()
        if not wish.granted.is_set():
            self._ask_holders()
            if self._watch is None or self._watch.done():
                self._idle_since.clear()  # not watched since the last watch ended
                self._heard.clear()
                self._watch = asyncio.create_task(self._revoke_idle())
        try:
            await wish.granted.wait()
        except asyncio.CancelledError:
            if wish in self.waiting:
                self.waiting.remove(wish)
            raise
        if (fenced := self._fenced.pop(name, None)) is not None:
            await self._fence(name, fenced, closed=False)

    async def release(self, name: str) -> None:
        """A client gives up its workers."""
        self._free(name)

    async def here(self, name: str) -> None:
        """A client that was told that others wait still has runs in flight, and is alive."""
        if name in self.holders:
            self._heard[name] = time.monotonic()

    async def holding(self, name: str, workers: Iterable[str]) -> list[tuple[str, list[str]]]:
        """Which other clients have some of these workers or were first to ask for them, and the programs that they
        run."""
        wanted = set(workers)
        before = itertools.takewhile(lambda w: w.client != name, self.waiting)
        found = [(n, ws) for n, ws in self.holders.items() if n != name] + [(w.client, w.workers) for w in before]
        return [(n, await self._running(n, ws)) for n, ws in found if not wanted.isdisjoint(ws)]

    def _free(self, name: str) -> None:
        self.holders.pop(name, None)
        self._idle_since.pop(name, None)
        self._heard.pop(name, None)
        self._grant()

    def _grant(self) -> None:
        """Grant leases in the order of asking. A client that waits for other workers does not hold up the rest."""
        taken = {w for name, workers in self.holders.items() for w in workers}
        for wish in list(self.waiting):
            if wish.workers.isdisjoint(taken):
                self.waiting.remove(wish)
                self.holders[wish.client] = wish.workers
                wish.granted.set()
            taken |= wish.workers
        if self.waiting:
            self._ask_holders()

    def _ask_holders(self) -> None:
        wanted = {w for wish in self.waiting for w in wish.workers}
        for name, workers in self.holders.items():
            if not wanted.isdisjoint(workers):
                self.scheduler.log_event(YIELD + name, {"waiting": len(self.waiting)})

    async def _revoke_idle(self) -> None:
        """Take the lease from holders that were idle or silent for longer than the patience of waiting clients."""
        while self.waiting:
            self._ask_holders()
            await asyncio.sleep(min(0.5, *(w.patience / 4 for w in self.waiting)))
            now = time.monotonic()
            for name, workers in list(self.holders.items()):
                patience = min((w.patience for w in self.waiting if not w.workers.isdisjoint(workers)), default=None)
                running = patience is None or await self._running(name, workers)
                if running:
                    self._idle_since.pop(name, None)
                if patience is None or self.holders.get(name) is not workers:
                    continue
                if name in self._fenced:  # the workers refuse its programs, and have ended those that they had
                    if not running:
                        self._free(name)
                    continue
                since = [self._heard.setdefault(name, now)]
                if not running:
                    since.append(self._idle_since.setdefault(name, now))
                if now - min(since) > patience:
                    self._fenced[name] = workers
                    await self._fence(name, workers, closed=True)

    async def _fence(self, name: str, workers: Iterable[str], closed: bool) -> None:
        """Tell workers to refuse programs and gangs of a client and to stop those that they can, or to accept them
        again. Of two such messages the one sent last counts."""
        message = {"op": "meshtape_fence", "client": name, "number": next(self._fences), "closed": closed}
        await self._asked(message, workers)

    async def _running(self, name: str, workers: Iterable[str]) -> list[str]:
        """Names of the unfinished work of workers for a client. A worker that does not answer counts as busy."""
        found = await self._asked({"op": "meshtape_busy", "client": name}, workers)
        if found is None:
            return ["something that keeps a worker from answering"]
        return sorted({n for names in found.values() if isinstance(names, list | tuple) for n in names})

    async def _asked(self, message: dict[str, Any], workers: Iterable[str]) -> dict[str, Any] | None:
        """Answers of those workers that are there; None where one of them takes too long."""
        there = [w for w in workers if w in self.scheduler.workers]
        try:
            return await asyncio.wait_for(
                self.scheduler.broadcast(msg=message, workers=there, on_error="return"), _PATIENCE
            )
        except TimeoutError:
            return None

    # ----- workers that a client cannot reach -------------------------------------------------------------------------

    async def relay(self, comm: Any, client: str, session: str, address: str) -> Any:
        """Relay a client's stream to a worker through the scheduler."""
        try:
            there = await connect(address, deserialize=False, **self.scheduler.connection_args)
        except (OSError, TimeoutError) as e:
            return {"status": "error", "text": str(e)}
        pumps = [asyncio.ensure_future(_pump(comm, there)), asyncio.ensure_future(_pump(there, comm))]
        try:
            await there.write({"op": "meshtape_session", "client": client, "session": session})
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            there.abort()
            comm.abort()
        return Status.dont_reply

    # ----- comings and goings -----------------------------------------------------------------------------------------

    async def open(self, name: str, mesh: bytes, workers: Iterable[str]) -> None:
        """A client made a mesh on these workers."""
        self.meshes[mesh] = name, tuple(workers)

    async def closed(self, mesh: bytes) -> None:
        """A mesh was closed."""
        self.meshes.pop(mesh, None)

    async def activity(self, name: str, written: dict[str, Any], activities: list[dict[str, Any]]) -> None:
        """The saves, merges and reshards of a client (`progress`). The live page shows them even after it has left."""
        before = self.reports.pop(name, {"bases": {}})["bases"]
        # Where a place in an object store is written once more, earlier bytes do not count.
        bases = {
            a["id"]: before[a["id"]] if a["id"] in before else self.written(a["root"]) for a in activities if a["root"]
        }
        self.reports[name] = {
            "at": time.monotonic(),
            "written": written,
            "activities": activities,
            "bases": bases,
            "left": False,
        }
        while len(self.reports) > _REPORTS:
            self.reports.popitem(last=False)

    def written(self, root: str) -> int:
        """Bytes that all processes have written below a folder, as far as they have said so. Some are worker and client
        at once."""
        said = [w.metrics.get("meshtape_written") for w in self.scheduler.workers.values()]
        said += [r["written"] for r in self.reports.values()]
        found: dict[str, int] = {}
        for s in said:
            if isinstance(s, dict) and root in s.get("bytes", {}):
                found[s["process"]] = max(found.get(s["process"], 0), s["bytes"][root])
        return sum(found.values())

    def remove_client(self, scheduler: Any, client: str) -> None:
        if client in self.reports:
            self.reports[client]["left"] = True
        self.waiting = deque(w for w in self.waiting if w.client != client)
        self._fenced.pop(client, None)
        self._free(client)
        for mesh, (name, workers) in list(self.meshes.items()):
            if name == client:
                del self.meshes[mesh]
                self._tell({"op": "meshtape_forget", "mesh": mesh}, workers)

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        for mesh, (_, workers) in self.meshes.items():
            if worker in workers:
                others = [w for w in workers if w != worker]
                self._tell({"op": "meshtape_left", "mesh": mesh, "worker_left": worker}, others)

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        # Members of a mesh hold its blocks: an adaptive cluster must not end them.
        members = {w for _, used in self.meshes.values() for w in used}
        return [w for w in workers if w.address not in members]

    def _tell(self, message: dict[str, Any], workers: Iterable[str]) -> None:
        there = [w for w in workers if w in self.scheduler.workers]
        if there:
            task = asyncio.ensure_future(self.scheduler.broadcast(msg=message, workers=there, on_error="return"))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)


async def _pump(source: Any, target: Any) -> None:
    """Forward messages unread, until one of the two comms ends."""
    with contextlib.suppress(OSError):
        while True:
            await target.write(await source.read())
