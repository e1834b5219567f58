"""A mesh on the workers of a Dask cluster.

The client side: ranks are given to workers in consecutive runs, a program run is submitted as one task a worker, and what comes
back are futures of bundles of blocks that stay where they are. Programs travel once; small new inputs travel with the task that
first reads them, large ones go to the workers directly. Up to :data:`IN_FLIGHT` runs are on their way at a time, and an error in
one of them is raised by the next call.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import secrets
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
from distributed import Client, Future

from ..arrays.errors import ClusterError, CollectiveTimeout, MeshError, MeshtapeError, RankLost, WorkerMismatch
from . import gang
from .partition import RankProgram
from .runtime import HostValue

IN_FLIGHT = 4
SHIP_WITH_TASK = 1 << 20  # larger inputs bypass the scheduler

DEFAULTS = {"meshtape": {"timeouts": {"collective": 60.0, "abort": 10.0}}}
dask.config.update_defaults(DEFAULTS)


@dataclass(eq=False)
class Gang:
    """The futures of one run, one a process."""

    run: str
    what: str
    futures: list[Future]


class RemoteBlocks:
    """Handle of blocks on workers: a slot in the bundles of a gang."""

    __slots__ = ("__weakref__", "gang", "slot")

    def __init__(self, gang_: Gang, slot: int, dead: list[tuple[str, int]]) -> None:
        self.gang, self.slot = gang_, slot
        # Told to the workers with the next run: their memory is freed before the whole bundle is.
        weakref.finalize(self, dead.append, (gang_.run, slot)).atexit = False


_last_task: weakref.WeakKeyDictionary[Client, dict[str, Future]] = weakref.WeakKeyDictionary()
"""The last gang task of each worker, by client: all meshes of a client run in one order on all workers."""


class DaskRuntime:
    """See the module; satisfies ``Runtime``."""

    def __init__(self, size: int, names: Sequence[str], client: Any, workers: Sequence[str] | None) -> None:
        if not isinstance(client, Client):
            raise MeshError(f"client=… takes a distributed.Client, got {type(client).__name__}")
        if client.asynchronous:
            raise MeshError("a mesh needs a synchronous client: Client(…) without asynchronous=True")
        if client.status != "running":
            raise ClusterError(f"the Dask client is {client.status}, not connected to a running scheduler")
        self.client = client
        known = sorted(client.scheduler_info(n_workers=-1)["workers"])
        if workers is not None:
            missing = sorted(set(workers) - set(known))
            if missing:
                raise MeshError(
                    f"the scheduler does not know worker(s) {', '.join(missing)}; it has {', '.join(known)}"
                )
            known = list(workers)
        if not known:
            raise ClusterError("the Dask cluster has no workers: start some, or wait with client.wait_for_workers(n)")
        count = min(len(known), size)
        self.addresses = known[:count]
        self.homes = tuple(r * count // size for r in range(size))
        self._ranks = {
            p: f"rank{'s' if self.homes.count(p) > 1 else ''} "
            + "-".join(str(r) for r in sorted({self.homes.index(p), size - 1 - self.homes[::-1].index(p)}))
            + f" (worker {a})"
            for p, a in enumerate(self.addresses)
        }
        self._check_versions()
        self.mesh_id, secret = uuid.uuid4().bytes, secrets.token_bytes(32)
        client.register_plugin(gang.MeshtapeWorker())
        planes = client.run(gang.open_plane, self.mesh_id, secret, workers=self.addresses)
        self._peers = {p: tuple(planes[a]) for p, a in enumerate(self.addresses)}
        self._epoch = 0
        self._numbers = itertools.count(1)
        self._dead: list[tuple[str, int]] = []
        self._flight: deque[Gang] = deque()
        self._shipped: weakref.WeakKeyDictionary[HostValue, RemoteBlocks] = weakref.WeakKeyDictionary()
        self._programs: list[str] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"{len(self.addresses)} Dask worker(s) of {self.client.scheduler.address}"

    def _check_versions(self) -> None:
        """Every worker has this meshtape and this NumPy. Asked with a function of the standard library, which any worker has."""
        for package in ("meshtape", "numpy"):
            mine = importlib.metadata.version(package)
            found = self.client.run(importlib.metadata.version, package, workers=self.addresses, on_error="return")
            for address, theirs in found.items():
                if isinstance(theirs, BaseException):
                    raise WorkerMismatch(
                        f"worker {address} cannot import {package}: install {package} {mine} in its environment, restart it"
                    )
                if theirs != mine:
                    raise WorkerMismatch(
                        f"worker {address} has {package} {theirs}, this process {mine}: use one version everywhere"
                    )

    # ----- seats and submission ---------------------------------------------------------------------------------------

    def _seat(self, process: int) -> gang.Seat:
        return gang.Seat(
            self.mesh_id,
            self._epoch,
            process,
            self.addresses[process],
            self.homes,
            {p: a for p, a in self._peers.items() if p != process},
            self._ranks,
            float(dask.config.get("meshtape.timeouts.collective")),
        )

    def _submit(self, fn: Callable[..., Any], process: int, name: str, *args: Any) -> Future:
        address = self.addresses[process]
        with dask.annotate(executor=gang.EXECUTOR):
            return self.client.submit(
                fn,
                *args,
                key=f"meshtape-{name}-{uuid.uuid4().hex}",
                workers=[address],
                # A task that is pinned to a worker that left waits for ever; elsewhere it raises at once.
                allow_other_workers=True,
                # The others of the gang wait for this one: it goes before whatever is queued on its worker.
                priority=1_000_000,
                retries=0,
                pure=False,
            )

    def _sources(
        self, handles: Sequence[Any], process: int, gangs: list[Gang], shipped: Mapping[int, HostValue]
    ) -> tuple[gang.Source, ...]:
        out: list[gang.Source] = []
        for i, h in enumerate(handles):
            if i in shipped:
                out.append({r: np.asarray(shipped[i].block(r), order="C") for r in self._hosted(process)})
            else:
                if h.gang not in gangs:
                    gangs.append(h.gang)
                out.append((gangs.index(h.gang), h.slot))
        return tuple(out)

    def _hosted(self, process: int) -> list[int]:
        return [r for r, p in enumerate(self.homes) if p == process]

    def _resolve(self, handles: Sequence[Any]) -> list[Any]:
        """Handles with large or known host values replaced by blocks on the workers."""
        out = []
        for h in handles:
            if isinstance(h, HostValue):
                done = self._shipped.get(h)
                if done is None and h.value.nbytes > SHIP_WITH_TASK:
                    done = self._shipped[h] = self._scatter(h)
                out.append(done if done is not None else h)
            else:
                out.append(h)
        return out

    def _scatter(self, h: HostValue) -> RemoteBlocks:
        run = uuid.uuid4().hex
        futures = []
        for p, address in enumerate(self.addresses):
            bundle = gang.Bundle(run, {0: {r: np.asarray(h.block(r), order="C") for r in self._hosted(p)}})
            key = f"meshtape-blocks-{run}-{p}"
            futures.append(self._scatter_one(key, bundle, address))
        return RemoteBlocks(Gang(run, "distribute", futures), 0, self._dead)

    def _scatter_one(self, key: str, bundle: gang.Bundle, address: str) -> Future:
        for direct in (True, False):
            try:
                return self.client.scatter({key: bundle}, workers=[address], direct=direct, hash=False)[key]
            except OSError:  # the client cannot reach the worker itself: through the scheduler, then
                if not direct:
                    raise
        raise AssertionError

    # ----- Runtime ----------------------------------------------------------------------------------------------------

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[[Sequence[Any]], list[Any]]:
        ident = f"{program.name}-{uuid.uuid4().hex[:12]}"
        self._programs.append(ident)
        sent = False

        def run(handles: Sequence[Any]) -> list[Any]:
            nonlocal sent
            self._check_open()
            self._check_flight()
            resolved = self._resolve(handles)
            shipped = {i: h for i, h in enumerate(resolved) if isinstance(h, HostValue)}
            keep = tuple(shipped)
            number, run_id = next(self._numbers), uuid.uuid4().hex
            drops, self._dead[:] = tuple(self._dead), []
            last = _last_task.setdefault(self.client, {})
            futures = []
            for p, address in enumerate(self.addresses):
                gangs: list[Gang] = []
                spec = gang.Run(
                    run_id,
                    number,
                    self._seat(p),
                    ident,
                    None if sent else program,
                    tuple(names),
                    self._sources(resolved, p, gangs, shipped),
                    keep,
                    drops,
                )
                bundles = [g.futures[p] for g in gangs]
                before = last.get(address)
                order = [before] if before is not None and before not in bundles and not before.cancelled() else []
                futures.append(self._submit(_in_order, p, program.name, len(bundles), spec, *bundles, *order))
                last[address] = futures[-1]
            this = Gang(run_id, program.name, futures)
            self._flight.append(this)
            first_time, sent = not sent, True
            if first_time or len(self._flight) > IN_FLIGHT:
                try:
                    self._settle(self._flight[0] if not first_time else this)
                except BaseException:
                    sent = not first_time and sent
                    raise
            outs = [RemoteBlocks(this, i, self._dead) for i in range(len(program.outputs))]
            for k, i in enumerate(keep):
                self._shipped[shipped[i]] = RemoteBlocks(this, len(program.outputs) + k, self._dead)
            return outs

        return run

    def wait(self, handle: Any) -> None:
        if not isinstance(handle, HostValue):
            self._settle(handle.gang)

    def fetch(self, handle: Any, ranks: Sequence[int]) -> dict[int, np.ndarray]:
        if isinstance(handle, HostValue):
            return {r: handle.block(r) for r in ranks}
        self._check_open()
        self._settle(handle.gang)
        tasks = []
        for p in sorted({self.homes[r] for r in ranks}):
            wanted = {r: None for r in ranks if self.homes[r] == p}
            spec = gang.Call(uuid.uuid4().hex, self._seat(p), gang.take_blocks, wanted, ((0, handle.slot),))
            tasks.append(self._submit(gang.take_blocks, p, "fetch", spec, handle.gang.futures[p]))
        out: dict[int, np.ndarray] = {}
        for part in self._gather(Gang("", "fetch", tasks)):
            out.update(part)
        return out

    def call(self, fn: Any, handles: Sequence[Any], payloads: Mapping[int, Any]) -> list[Any]:
        self._check_open()
        resolved = self._resolve(handles)
        shipped = {i: h for i, h in enumerate(resolved) if isinstance(h, HostValue)}
        tasks = []
        for p in sorted({self.homes[r] for r in payloads}):
            gangs: list[Gang] = []
            mine = {r: payloads[r] for r in payloads if self.homes[r] == p}
            spec = gang.Call(uuid.uuid4().hex, self._seat(p), fn, mine, self._sources(resolved, p, gangs, shipped))
            for g in gangs:
                self._settle(g)
            name = getattr(fn, "__name__", "call").strip("_")
            tasks.append(self._submit(gang.call_on_blocks, p, name, spec, *[g.futures[p] for g in gangs]))
        return self._gather(Gang("", "call", tasks))

    def create(self, fn: Any, payloads: Mapping[int, Any], count: int) -> list[Any]:
        self._check_open()
        run = uuid.uuid4().hex
        futures = []
        for p in range(len(self.addresses)):
            mine = {r: payloads[r] for r in self._hosted(p)}
            spec = gang.Call(run, self._seat(p), fn, mine, ())
            futures.append(self._submit(gang.create_blocks, p, "create", spec))
        this = Gang(run, "create", futures)
        self._settle(this)
        return [RemoteBlocks(this, i, self._dead) for i in range(count)]

    def close(self) -> None:
        if self._closed:
            return
        # What is on its way still needs its program; an error in it has nobody left to tell.
        while self._flight:
            with contextlib.suppress(MeshtapeError):
                self._settle(self._flight[0])
        self._closed = True
        if self.client.status == "running":
            alive = set(self.client.scheduler_info(n_workers=-1)["workers"])
            there = [a for a in self.addresses if a in alive]
            if there:
                self.client.run(gang.close_mesh, self.mesh_id, self._programs, workers=there, on_error="return")

    # ----- errors -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise MeshError("this mesh was closed")
        if self.client.status != "running":
            raise ClusterError(f"the Dask client is {self.client.status}: the cluster of this mesh is gone")

    def _check_flight(self) -> None:
        """Raise what went wrong in an earlier run, if anything did."""
        while self._flight and all(f.done() for f in self._flight[0].futures):
            self._settle(self._flight[0])

    def _settle(self, this: Gang) -> None:
        """Wait until a gang has ended; raise its error, the cause before its consequences."""
        pending = list(this.futures)
        failed_at: float | None = None
        grace = float(dask.config.get("meshtape.timeouts.abort"))
        # Not distributed.wait: it needs a current client, and to set one changes Dask's configuration for all threads.
        ended = threading.Event()
        for f in pending:
            if not f.done():
                f.add_done_callback(lambda _: ended.set())
        while pending:
            if not any(f.done() for f in pending):
                ended.wait(0.2 if failed_at else 5)
            ended.clear()
            pending = [f for f in pending if not f.done()]
            if failed_at is None and any(f.status in ("error", "cancelled", "lost") for f in this.futures):
                failed_at = time.monotonic()
                if pending:
                    self._stop_the_rest()
            if failed_at is not None and time.monotonic() - failed_at > grace:
                break
            if pending and self.client.status != "running":
                raise ClusterError(f"the Dask client is {self.client.status}: the cluster went away during {this.what}")
        if this in self._flight:
            self._flight.remove(this)
        if failed_at is None:
            return
        self._epoch += 1  # the next run connects anew
        self._flight.clear()
        # What comes next on these workers must not wait for tasks that failed, or it would fail like them.
        last = _last_task.get(self.client, {})
        for address, f in list(last.items()):
            if f in this.futures or f.status != "finished":
                del last[address]
        errors = []
        for f in this.futures:
            if f.status == "error":
                errors.append(f.exception())
            elif f.status in ("cancelled", "lost"):
                errors.append(RankLost(f"the task {f.key} was {f.status}: its worker left the cluster"))
        # A rank that failed by itself explains the others, which only noticed.
        errors.sort(
            key=lambda e: (isinstance(e, RankLost | CollectiveTimeout), " stopped: " in str(e) or " left" in str(e))
        )
        cause = errors[0]
        if isinstance(cause, MeshtapeError):
            raise cause
        raise RankLost(f"a worker failed while it ran {this.what}: {type(cause).__name__}: {cause}") from cause

    def _stop_the_rest(self) -> None:
        """Workers that still wait for one that failed are told; nobody waits for their answer, as one may have none."""
        alive = set(self.client.scheduler_info(n_workers=-1)["workers"])
        there, epoch = [a for a in self.addresses if a in alive], self._epoch

        def tell() -> None:
            with contextlib.suppress(Exception):  # it hastens an end that timeouts would bring as well
                self.client.run(gang.stop_epoch, self.mesh_id, epoch, workers=there, on_error="return")

        threading.Thread(target=tell, name="meshtape-stop", daemon=True).start()

    def _gather(self, this: Gang) -> list[Any]:
        self._settle(this)
        for direct in (True, False):
            try:
                return self.client.gather(this.futures, direct=direct)
            except OSError:
                if not direct:
                    raise
        raise AssertionError


def _in_order(count: int, spec: gang.Run, *args: Any) -> gang.Bundle:
    """The gang task with its predecessor as a last argument, which only orders them."""
    return gang.run_program(spec, *args[:count])
