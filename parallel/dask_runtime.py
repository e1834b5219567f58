"""A mesh on the workers of a Dask cluster.

The client side: ranks are given to workers in consecutive runs, a program run is submitted as one task a worker, and what comes
back are futures of bundles of blocks that stay where they are. Programs travel once; small new inputs travel with the task that
first reads them, large ones go to the workers directly. Up to :data:`~.flight.IN_FLIGHT` runs are on their way at a time, and an error in
one of them is raised by the next call.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import secrets
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dask
import numpy as np
from distributed import Client, Future

from ..arrays.devices import CPU, Device
from ..arrays.devices import device as named
from ..arrays.errors import ClusterError, MeshError, MeshtapeError, RankLost, WorkerMismatch
from . import gang, settings
from .asking import Asking
from .dask_tasks import task
from .flight import IN_FLIGHT, Flight, Gang, failed
from .gpus import Choice, choose, visible
from .lease import lease_of
from .progress import last_word
from .rank_program import RankProgram
from .room import Value, check_room
from .runtime import HostValue, Turns
from .scheduler import PREFIX, MeshtapeScheduler, hasten
from .workers import ask, give_plugin, known_workers, silent

settings.register()

SHIP_WITH_TASK = 1 << 20  # larger inputs bypass the scheduler


class RemoteBlocks:
    """Handle of blocks on workers: a slot in the bundles of a gang."""

    __slots__ = ("__weakref__", "gang", "slot")

    def __init__(self, gang_: Gang, slot: int, dead: list[tuple[str, int]]) -> None:
        self.gang, self.slot = gang_, slot
        # Told to the workers with the next run: their memory is freed before the whole bundle is.
        weakref.finalize(self, dead.append, (gang_.run, slot)).atexit = False


class DaskRuntime:
    """See the module; satisfies ``Runtime``."""

    def __init__(
        self,
        size: int,
        names: Sequence[str],
        client: Any,
        workers: Sequence[str] | None,
        device: str | Device | None = None,
    ) -> None:
        if device is not None:
            named(device)  # an unknown name is refused before anybody is asked
        if not isinstance(client, Client):
            raise MeshError(f"client=… takes a distributed.Client, got {type(client).__name__}")
        if client.asynchronous:
            raise MeshError("a mesh needs a synchronous client: Client(…) without asynchronous=True")
        if client.status != "running":
            raise ClusterError(f"the Dask client is {client.status}, not connected to a running scheduler")
        self.client = client
        there = known_workers(client)
        self._resources = {a: dict(w.get("resources") or {}) for a, w in there.items()}
        known = sorted(there)
        if workers is None and (resources := dask.get_annotations().get("resources")):
            known = [w for w in known if self._has(w, resources)]
            if not known:
                raise ClusterError(f"no worker of the Dask cluster has the resources {resources}: start one that has")
        quiet = silent(client, known if workers is None else [w for w in workers if w in known])
        if workers is not None:
            missing = sorted(set(workers) - set(known))
            if missing:
                raise MeshError(
                    f"the scheduler does not know worker(s) {', '.join(missing)}; it has {', '.join(known)}"
                )
            if quiet:
                raise ClusterError(f"worker(s) {', '.join(quiet)} do not answer: stop them, or name others")
            known = list(workers)
        known = [w for w in known if w not in quiet]
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
        self._limits = [there[a].get("memory_limit") for a in self.addresses]
        self._check_versions()
        self.mesh_id, secret = uuid.uuid4().bytes, secrets.token_bytes(32)
        self.transport = settings.transport()
        problem = self._register()
        pool = int(settings.number("pool"))
        interval = settings.number("interval")
        planes = ask(
            client, gang.open_plane, self.mesh_id, secret, self.transport, pool, interval, workers=self.addresses
        )
        for address, answer in planes.items():
            if isinstance(answer, MeshtapeError):
                raise answer from problem
            if isinstance(answer, BaseException):
                raise WorkerMismatch(f"worker {address} cannot open a mesh: {answer}") from (problem or answer)
        self.device, self._choice = device, self._choose(device)
        self._peers = {p: a if isinstance(a := planes[w], str) else tuple(a) for p, w in enumerate(self.addresses)}
        client.sync(
            client.scheduler.meshtape_open,
            name=client.id,
            mesh=self.mesh_id,
            workers=self.addresses,
            interval=interval,
        )
        hasten(getattr(client, "scheduler_comm", None), interval)
        self._lease = lease_of(client)
        self._flight = Flight(client, self.mesh_id, self.addresses, self._lease, list(self._ranks.values()))
        self._asking = Asking(self._flight)
        self._numbers = itertools.count(1)
        self._dead: list[tuple[str, int]] = []
        self._dead_programs: list[str] = []
        self._shipped: weakref.WeakKeyDictionary[HostValue, RemoteBlocks] = weakref.WeakKeyDictionary()
        self._closed = False

    def __repr__(self) -> str:
        return f"{len(self.addresses)} Dask worker(s) of {self.client.scheduler.address}"

    def placed(self) -> str | None:
        return self._choice.text

    def _choose(self, device: str | Device | None) -> Choice:
        """What each worker computes on."""
        if device is not None and named(device) == CPU:
            return Choice(("cpu",) * len(self.addresses))
        found = ask(self.client, visible, workers=self.addresses)
        if errors := [g for g in found.values() if isinstance(g, BaseException)]:
            raise errors[0]
        encrypted = any(a.startswith(("tls://", "wss://")) for a in self.addresses)
        hosts = {a.partition("://")[2].rpartition(":")[0] for a in self.addresses}
        seen = {a: found[a] for a in self.addresses}
        return choose(device, seen, plain=not encrypted or len(hosts) == 1, ports=self.transport != "comms")

    def _has(self, address: str, resources: Mapping[str, float]) -> bool:
        """Whether a worker was started with these resources of Dask, as far as an annotation names them."""
        return all(self._resources.get(address, {}).get(k, 0) >= n for k, n in resources.items())

    def _register(self) -> Exception | None:
        """What meshtape needs on scheduler and workers; Dask gives it to workers that come later too."""
        try:
            self.client.register_plugin(MeshtapeScheduler())
        except Exception as e:
            raise WorkerMismatch(
                f"the scheduler at {self.client.scheduler.address} cannot import meshtape: install meshtape "
                f"{importlib.metadata.version('meshtape')} in its environment, restart it"
            ) from e
        return give_plugin(self.client, gang.MeshtapeWorker())

    def _check_versions(self) -> None:
        """Every worker has this meshtape and this NumPy. Asked with a function of the standard library, which any worker has."""
        for package in ("meshtape", "numpy"):
            mine = importlib.metadata.version(package)
            found = ask(self.client, importlib.metadata.version, package, workers=self.addresses)
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
            self._flight.epoch,
            process,
            self.addresses[process],
            self.homes,
            {p: a for p, a in self._peers.items() if p != process},
            self._ranks,
            settings.number("timeouts.collective"),
            settings.number("timeouts.silence"),
            self.transport == "auto",
            self._choice.devices[process],
            self._choice.nccl,
        )

    def _submit(self, fn: Callable[..., Any], process: int, name: str, *args: Any) -> Future:
        """One task on the worker of a process. Futures among the arguments are handed over as what they hold."""
        return self._submit_all(fn, name, {process: args})[process]

    def _submit_all(self, fn: Callable[..., Any], name: str, args: Mapping[int, Sequence[Any]]) -> dict[int, Future]:
        """A task on the worker of each of some processes. They travel in one message: those of a gang wait for each other."""
        if resources := dask.get_annotations().get("resources"):
            for p in args:
                if not self._has(self.addresses[p], resources):  # the task would wait for ever
                    raise ClusterError(
                        f"{self._ranks[p]} does not have the resources {resources} of the annotation: make the mesh within it"
                    )
        keys = {p: f"{PREFIX}{name.replace('-', '_')}-{uuid.uuid4().hex}" for p in args}
        graph = {keys[p]: task(keys[p], fn, a) for p, a in args.items()}
        where = {keys[p]: [self.addresses[p]] for p in args}
        with dask.annotate(executor=gang.EXECUTOR, workers=where.get):
            futures = self.client.get(
                graph,
                list(graph),
                sync=False,
                # A task that is pinned to a worker that left waits for ever; elsewhere it raises at once.
                allow_other_workers=True,
                # The others of the gang wait for this one: it goes before whatever is queued on its worker.
                priority=1_000_000,
                retries=0,
                fifo_timeout=0,
            )
        return dict(zip(args, futures, strict=True))

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
                    done = self._shipped[h] = self._scatter([h])
                out.append(done if done is not None else h)
            else:
                out.append(h)
        return out

    def _scatter(self, values: Sequence[HostValue]) -> RemoteBlocks:
        """Host values sent to the workers; the first of their slots."""
        run = uuid.uuid4().hex
        futures = []
        for p, address in enumerate(self.addresses):
            hosted = self._hosted(p)
            slots = {i: {r: np.asarray(h.block(r), order="C") for r in hosted} for i, h in enumerate(values)}
            futures.append(self._scatter_one(f"{PREFIX}blocks-{run}-{p}", gang.Bundle(run, slots), address))
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

    def check_room(self, what: str, values: Sequence[Value], sizes: tuple[int, ...]) -> None:
        if set(self._choice.devices) == {"cpu"}:
            check_room(what, values, sizes, self.homes, self._limits, self._ranks)

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[[Sequence[Any], Turns | None], list[Any]]:
        for vs in ((*program.inputs, *program.constants), program.outputs):
            self.check_room(program.name, [(program.avals[v], program.layouts[v]) for v in set(vs)], program.sizes)
        ident = f"{self.mesh_id.hex()}/{program.name}-{uuid.uuid4().hex[:12]}"
        sent = False

        def run(handles: Sequence[Any], turns: Turns | None = None) -> list[Any]:
            nonlocal sent
            self._check_open()
            self._flight.check()
            resolved = self._resolve(handles)
            shipped = {i: h for i, h in enumerate(resolved) if isinstance(h, HostValue)}
            data = self._turn_data(turns)
            self._lease.enter(self.addresses, self._flight.check)
            try:
                text = None if sent else program
                this = self._launch(
                    lambda: self._submit_run(program, ident, text, names, resolved, shipped, turns, data)
                )
            except BaseException:
                self._lease.leave()
                raise
            self._flight.gangs.append(this)
            if not sent:
                self._flight.settle(this)  # an error keeps the program from being taken for sent
                sent = True
            elif len(self._flight.gangs) > IN_FLIGHT:
                self._flight.settle(self._flight.gangs[0])
            outs = [RemoteBlocks(this, i, self._dead) for i in range(len(program.outputs))]
            for k, i in enumerate(shipped):
                self._shipped[shipped[i]] = RemoteBlocks(this, len(program.outputs) + k, self._dead)
            return outs

        # Workers forget a program that no function of this process runs any more.
        weakref.finalize(run, self._dead_programs.append, ident).atexit = False
        return run

    def _launch(self, submit: Callable[[], Gang]) -> Gang:
        """Submit the tasks of one run after those of the other meshes of this client on these workers."""
        while True:
            with self._lease.order:
                last = [self._lease.last[a] for a in self.addresses if a in self._lease.last]
                others = [f for mesh, f in last if mesh != self.mesh_id and not f.done()]
                if not others:
                    return submit()
            self._flight.wait_for(others[0])

    def _submit_run(
        self,
        program: RankProgram,
        ident: str,
        text: RankProgram | None,
        names: Sequence[str],
        resolved: Sequence[Any],
        shipped: Mapping[int, HostValue],
        turns: Turns | None,
        data: RemoteBlocks | None,
    ) -> Gang:
        """Submit the tasks of one run, each after its predecessor of this mesh. Under the lock of the order."""
        run_id = uuid.uuid4().hex
        args: dict[int, tuple[Any, ...]] = {}
        number = next(self._numbers)
        drops, self._dead[:] = tuple(self._dead), []
        forget, self._dead_programs[:] = tuple(self._dead_programs), []
        for p, address in enumerate(self.addresses):
            gangs: list[Gang] = []
            sources = self._sources(resolved, p, gangs, shipped)
            spec = gang.Run(
                run_id,
                number,
                self._seat(p),
                ident,
                text,
                tuple(names),
                sources,
                tuple(shipped),
                drops,
                forget,
                self._loop(turns, p, gangs, data),
            )
            bundles = [g.futures[p] for g in gangs]
            mesh, before = self._lease.last.get(address, (b"", None))
            ours = before is not None and mesh == self.mesh_id and before not in bundles and not failed(before)
            args[p] = (len(bundles), spec, *bundles, *([before] if ours else []))
        futures = self._submit_all(_in_order, program.name, args)
        self._lease.last.update((self.addresses[p], (self.mesh_id, f)) for p, f in futures.items())
        return Gang(run_id, program.name, list(futures.values()), self._lease.leave)

    def _turn_data(self, turns: Turns | None) -> RemoteBlocks | None:
        """Host values that the turns read, sent to the workers directly where they are large."""
        values = [h for hs in turns.each for h in hs if isinstance(h, HostValue)] if turns is not None else []
        return self._scatter(values) if sum(h.value.nbytes for h in values) > SHIP_WITH_TASK else None

    def _loop(
        self, turns: Turns | None, process: int, gangs: list[Gang], data: RemoteBlocks | None
    ) -> gang.Loop | None:
        """The turns as one process reads them; adds the gangs whose bundles hold their data."""
        if turns is None:
            return None
        slots = itertools.count()

        def source(h: Any) -> gang.Source:
            if isinstance(h, HostValue) and data is None:
                return {r: np.asarray(h.block(r), order="C") for r in self._hosted(process)}
            where = data.gang if isinstance(h, HostValue) and data is not None else h.gang
            if where not in gangs:
                gangs.append(where)
            return gangs.index(where), next(slots) if isinstance(h, HostValue) else h.slot

        return gang.Loop(turns.count, turns.carried, tuple(tuple(map(source, hs)) for hs in turns.each))

    def wait(self, handle: Any) -> None:
        if not isinstance(handle, HostValue):
            self._flight.settle(handle.gang)

    def fetch(self, handle: Any, ranks: Sequence[int]) -> dict[int, np.ndarray]:
        if isinstance(handle, HostValue):
            return {r: handle.block(r) for r in ranks}
        self._check_open()
        this: Gang = handle.gang
        asked = {p: [r for r in ranks if self.homes[r] == p] for p in sorted({self.homes[r] for r in ranks})}
        found = self.client.sync(self._asking.take, this, handle.slot, asked)
        missing = {p: rs for p, rs in asked.items() if found[p] is None}
        if missing:
            self._flight.settle(this)
            found |= self.client.sync(self._asking.take, this, handle.slot, missing)
        out: dict[int, np.ndarray] = {}
        for p, blocks in found.items():
            if blocks is None:
                raise RankLost(f"{self._ranks[p]} lost the blocks that {this.what} left there")
            out.update(blocks)
        return out

    def call(self, fn: Any, handles: Sequence[Any], payloads: Mapping[int, Any]) -> list[Any]:
        self._check_open()
        resolved = self._resolve(handles)
        shipped = {i: h for i, h in enumerate(resolved) if isinstance(h, HostValue)}
        args: dict[int, list[Any]] = {}
        for p in sorted({self.homes[r] for r in payloads}):
            gangs: list[Gang] = []
            mine = {r: payloads[r] for r in payloads if self.homes[r] == p}
            spec = gang.Call(uuid.uuid4().hex, self._seat(p), fn, mine, self._sources(resolved, p, gangs, shipped))
            for g in gangs:
                self._flight.settle(g)
            args[p] = [spec, *[g.futures[p] for g in gangs]]
        name = getattr(fn, "__name__", "call").strip("_")
        return self._flight.gather(Gang("", name, list(self._submit_all(gang.call_on_blocks, name, args).values())))

    def create(self, fn: Any, payloads: Mapping[int, Any], count: int) -> list[Any]:
        self._check_open()
        run = uuid.uuid4().hex
        args = {
            p: [gang.Call(run, self._seat(p), fn, {r: payloads[r] for r in self._hosted(p)}, ())]
            for p in range(len(self.addresses))
        }
        this = Gang(run, "create", list(self._submit_all(gang.create_blocks, "create", args).values()))
        self._flight.settle(this)
        return [RemoteBlocks(this, i, self._dead) for i in range(count)]

    def abandon(self) -> None:
        if not self._closed:
            self._flight.abandon()

    def close(self) -> None:
        if self._closed:
            return
        self._flight.land()  # what is on its way still needs its program
        self._closed = True
        if self.client.status == "running":
            last_word(self.client)
            there = self._flight.present()
            late = silent(self.client, there)
            with contextlib.suppress(OSError):
                self.client.sync(self.client.scheduler.meshtape_closed, mesh=self.mesh_id, late=late)
            there = [a for a in there if a not in late]
            with contextlib.suppress(ClusterError):  # one that goes now takes the mesh's state with it
                ask(self.client, gang.close_mesh, self.mesh_id, (), workers=there)

    # ----- errors -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise MeshError("this mesh was closed")
        if self.client.status != "running":
            raise ClusterError(f"the Dask client is {self.client.status}: the cluster of this mesh is gone")


def _in_order(count: int, spec: gang.Run, *args: Any) -> gang.Bundle:
    """The gang task with its predecessor as a last argument, which only orders them."""
    return gang.run_program(spec, *args[:count])
