"""A mesh on the workers of a Dask cluster.

The client side. Each worker gets consecutive ranks. A program run is one message to each worker, and the resulting
blocks stay on the workers. Programs, and each worker's part of the mesh, are sent once. Small new inputs travel with
the message of the run that first reads them, large ones by connections of their own. Up to
:data:`~.in_flight.IN_FLIGHT` runs are in flight at a time; an error in one of them is raised by the next call.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import dask
import numpy as np
from distributed.protocol import to_serialize

from ...arrays.backends.determinism import is_deterministic
from ...arrays.core.devices import CPU, Device
from ...arrays.core.devices import device as named
from ...arrays.core.errors import ClusterError, MeshError, MeshtapeError, RankLost
from ..base import settings
from ..base.interrupts import Uninterrupted
from ..base.message_streams import packed
from ..execution.devices import DeviceChoice, choose, visible
from ..execution.memory_limits import Value, check_memory
from ..execution.runtime import HostValue, Turns, called
from ..partition.overlap import Buckets
from ..partition.rank_program import RankProgram
from . import worker as mesh_worker
from .in_flight import IN_FLIGHT, Gang, RunQueue
from .lease import lease_of
from .progress import last_word
from .set_up import set_up
from .streams import WorkerFuture
from .worker_queue import answered
from .workers import (
    ask,
    call_scheduler,
    check_client,
    check_known,
    check_running,
    check_thread,
    is_forked,
    known_workers,
    on_loop,
    silent,
    workers_with,
)

settings.register()

SHIP_WITH_RUN = 1 << 20  # larger inputs do not hold up the stream


class RemoteBlocks:
    """Handle of blocks on workers: a slot in the bundles of a gang."""

    __slots__ = ("__weakref__", "gang", "slot")

    def __init__(self, gang_: Gang, slot: int) -> None:
        self.gang, self.slot = gang_, slot
        gang_.futures[0].stream.streams.when_gone(self, gang_.slots.drop, slot)


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
        check_client("a mesh", client)
        self.client = client
        annotated = dask.get_annotations().get("resources") or {}
        known = workers_with(known_workers(client), annotated if workers is None else {})
        if workers is not None:
            known = check_known(workers, known)
        quiet = silent(client, known)
        if quiet and (workers is not None or len(quiet) == len(known)):
            raise ClusterError(f"worker(s) {', '.join(quiet)} do not answer: stop them, or name others")
        known = [w for w in known if w not in quiet]
        if not known:
            raise ClusterError("the Dask cluster has no workers: start some, or wait with client.wait_for_workers(n)")
        count = min(len(known), size)
        self.addresses = known[:count]
        self.homes = tuple(r * count // size for r in range(size))
        self._ranks = mesh_worker.names_of(self.homes, self.addresses)
        self.mesh_id, secret = uuid.uuid4().bytes, secrets.token_bytes(32)
        self.transport = settings.transport()
        # First: a stream that is opened anew has lost its client's state.
        self._streams = set_up(client, self.addresses)
        try:
            self._open(secret, device)
        except BaseException:
            self._forget()
            raise
        self._lease = lease_of(client)
        self._queue = RunQueue(client, self._streams, self.mesh_id, self.addresses, self._lease, self._ranks)
        self._dead_programs: list[str] = []
        self._shipped: weakref.WeakKeyDictionary[HostValue, RemoteBlocks] = weakref.WeakKeyDictionary()
        self._closed = False
        self._left_behind = list(self.addresses)  # if it is not closed
        self._streams.when_gone(self, partial(self._streams.forget, self.mesh_id), self._left_behind)

    def _open(self, secret: bytes, device: str | Device | None) -> None:
        """Have every worker and the scheduler know the mesh."""
        client = self.client
        pool = int(settings.number("pool"))
        planes = ask(
            client,
            mesh_worker.open_plane,
            self.mesh_id,
            secret,
            self.transport,
            pool,
            client.id,
            workers=self.addresses,
        )
        for address, answer in planes.items():
            if isinstance(answer, MeshtapeError):
                raise answer
            if isinstance(answer, BaseException):
                raise ClusterError(f"worker {address} cannot open a mesh: {answer}") from answer
        self._limits = [planes[a][1] for a in self.addresses]
        self.device, self._choice = device, self._choose(device)
        context = {
            "mesh": self.mesh_id,
            "addresses": tuple(self.addresses),
            "planes": tuple(a if isinstance(a := planes[w][0], str) else tuple(a) for w in self.addresses),
            "homes": self.homes,
            "share": self.transport == "auto",
            "nccl": self._choice.nccl,
        }
        for p, (address, on) in enumerate(zip(self.addresses, self._choice.devices, strict=True)):
            self._streams[address].send({"op": "context", "context": {**context, "process": p, "device": on}})
        call_scheduler(client, "meshtape_open", name=client.id, mesh=self.mesh_id, workers=self.addresses)

    def _forget(self) -> None:
        """Have every worker and the scheduler forget the mesh."""
        self._streams.forget(self.mesh_id, self.addresses)
        self._streams.flush(())

    def __repr__(self) -> str:
        return f"{len(self.addresses)} Dask worker(s) of {self.client.scheduler.address}"

    def placed(self) -> str | None:
        return self._choice.text

    def _choose(self, device: str | Device | None) -> DeviceChoice:
        """The device of each worker."""
        if device is not None and named(device) == CPU:
            return DeviceChoice(("cpu",) * len(self.addresses))
        found = ask(self.client, visible, workers=self.addresses)
        if errors := [g for g in found.values() if isinstance(g, BaseException)]:
            raise errors[0]
        encrypted = any(a.startswith(("tls://", "wss://")) for a in self.addresses)
        alone = mesh_worker.hosts_of(self.addresses) == 1
        seen = {a: found[a] for a in self.addresses}
        return choose(device, seen, plain=not encrypted or alone, ports=self.transport != "comms")

    # ----- sending ----------------------------------------------------------------------------------------------------

    def submit(self, fn: Callable[..., Any], name: str, args: Mapping[int, Sequence[Any]]) -> dict[int, WorkerFuture]:
        """Have processes call a function with their place in the mesh and ``args``. Futures among these stand for their
        results, on whatever worker."""
        self._check_open()
        futures = self._streams.call(fn, name, {self.addresses[p]: a for p, a in args.items()}, self.mesh_id)
        return {p: futures[self.addresses[p]] for p in args}

    def kept(self, fn: Callable[..., Any], name: str, args: Mapping[int, Sequence[Any]]) -> Gang:
        """The same for a function that returns a bundle of new blocks on each process; waits for them."""
        this = Gang(name, list(self.submit(fn, name, args).values()))
        self._queue.wait(this)
        return this

    def hosted(self, process: int) -> list[int]:
        """Ranks of a process."""
        return [r for r, p in enumerate(self.homes) if p == process]

    def _resolve(self, handles: Sequence[Any]) -> list[Any]:
        """Handles with large or known host values replaced by blocks on the workers."""
        out = []
        for h in handles:
            if isinstance(h, HostValue):
                done = self._shipped.get(h)
                if done is None and h.value.nbytes > SHIP_WITH_RUN:
                    done = self._shipped[h] = RemoteBlocks(self._scatter([h]), 0)
                out.append(done if done is not None else h)
            else:
                out.append(h)
        return out

    def _scatter(self, values: Sequence[HostValue]) -> Gang:
        """Host values sent to the workers, in the order of slots."""
        with self._streams.order:
            number = self._streams.number()
        futures = [WorkerFuture(self._streams[a], number, "distribute") for a in self.addresses]

        async def put(p: int, future: WorkerFuture) -> None:
            slots = {i: {r: self._block(h, r) for r in self.hosted(p)} for i, h in enumerate(values)}
            bundle = to_serialize(mesh_worker.Bundle(slots))
            try:
                answered(await future.stream.call("meshtape_put", number=number, name="distribute", value=bundle))
            except Exception as e:
                future.finish("lost" if isinstance(e, RankLost) else "failed", e)
            else:
                future.finish("done")

        async def put_all() -> None:
            await asyncio.gather(*(put(p, f) for p, f in enumerate(futures)))

        on_loop(self.client, put_all)
        this = Gang("distribute", futures)
        self._queue.wait(this)
        return this

    def _block(self, h: HostValue, rank: int) -> np.ndarray:
        return np.asarray(h.block(rank), order="C")

    # ----- Runtime ----------------------------------------------------------------------------------------------------

    def check_memory(self, what: str, values: Sequence[Value], sizes: tuple[int, ...]) -> None:
        if set(self._choice.devices) == {"cpu"}:
            check_memory(what, values, sizes, self.homes, self._limits, self._ranks)

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[[Sequence[Any], Turns | None], list[Any]]:
        for vs in ((*program.inputs, *program.constants), program.outputs):
            self.check_memory(program.name, [(program.avals[v], program.layouts[v]) for v in set(vs)], program.sizes)
        ident = f"{self.mesh_id.hex()}/{program.name}-{uuid.uuid4().hex[:12]}"
        buckets, sent = Buckets.configured(), set[str]()

        def run(handles: Sequence[Any], turns: Turns | None = None) -> list[Any]:
            native = self._choice.nccl and not is_deterministic()
            this_ident = f"{ident}-native" if native else ident
            text = None if this_ident in sent else packed((program, tuple(names), buckets, native))
            self._check_open()
            self._queue.check()
            resolved = self._resolve(handles)
            shipped = {i: h for i, h in enumerate(resolved) if isinstance(h, HostValue)}
            loop = self._loop(turns, len(shipped))
            turn, this = object(), None
            try:
                self._lease.enter(turn, self.addresses, self._queue.check)
                with Uninterrupted():  # a run that some workers alone heard of would keep them waiting
                    this = self._submit_run(program, this_ident, text, resolved, shipped, loop, turn)
                    self._queue.gangs.append(this)
            except BaseException:
                if this is None:
                    self._lease.leave(turn)
                raise
            if text is not None:
                self._queue.wait(this)  # an error keeps the program from being taken for sent
                sent.add(this_ident)
            elif len(self._queue.gangs) > IN_FLIGHT:
                self._queue.wait(self._queue.gangs[0])
            outs = [RemoteBlocks(this, i) for i in range(len(program.outputs))]
            for k, i in enumerate(shipped):
                self._shipped[shipped[i]] = RemoteBlocks(this, len(program.outputs) + k)
            return outs

        # Workers forget a program that no function of this process runs any more.
        weakref.finalize(run, self._dead_programs.extend, sent).atexit = False
        return run

    def _submit_run(
        self,
        program: RankProgram,
        ident: str,
        text: Any,
        resolved: Sequence[Any],
        shipped: Mapping[int, HostValue],
        loop: Turning | None,
        turn: object,
    ) -> Gang:
        """One run: one message to each worker. The lease of this ``turn`` is given back when it has ended."""
        place = {i: k for k, i in enumerate(shipped)}
        message = {
            "op": "run",
            "mesh": self.mesh_id,
            "epoch": self._queue.epoch,
            "timeout": settings.number("timeouts.collective"),
            "silence": settings.number("timeouts.silence"),
            "program_id": ident,
            "program": text,
            "sources": mesh_worker.ranges_of(
                [(-1, place[i]) if i in place else (h.gang.number, h.slot) for i, h in enumerate(resolved)]
            ),
            "keep": tuple(shipped),
            "loop": None if loop is None else loop.message,
            "blocks": (),
        }
        travel = [*shipped.values(), *(loop.values if loop is not None else ())]
        forget, self._dead_programs[:] = tuple(self._dead_programs), []
        messages = {}
        for p, address in enumerate(self.addresses):
            blocks = [{r: self._block(h, r) for r in self.hosted(p)} for h in travel]
            messages[address] = {**message, "blocks": packed(blocks)} if blocks else message
        with self._streams.order:
            if forget:
                for address in self.addresses:
                    self._streams[address].send({"op": "forget", "programs": forget})
            alike = text is None and not travel
            futures = self._streams.submit(self._streams.number(), program.name, messages, alike)
        return Gang(program.name, list(futures.values()), partial(self._lease.leave, turn))

    def _loop(self, turns: Turns | None, given: int) -> Turning | None:
        """The turns in the form of a run's message. Large host values that they read are sent to the workers first;
        small ones go with the message, after the ``given`` ones."""
        if turns is None:
            return None
        flat = [h for hs in turns.each for h in hs]
        values = [h for h in flat if isinstance(h, HostValue)]
        sent = self._scatter(values) if sum(h.value.nbytes for h in values) > SHIP_WITH_RUN else None
        slots = itertools.count(0 if sent is not None else given)
        number = -1 if sent is None else sent.number
        where = [(number, next(slots)) if isinstance(h, HostValue) else (h.gang.number, h.slot) for h in flat]
        message = (turns.count, turns.carried, mesh_worker.ranges_of(where))
        return Turning(message, values if sent is None else [], (sent, turns.each))

    def wait(self, handle: Any) -> None:
        if not isinstance(handle, HostValue):
            self._queue.wait(handle.gang)

    def fetch(self, handle: Any, ranks: Sequence[int]) -> dict[int, np.ndarray]:
        if isinstance(handle, HostValue):
            return {r: handle.block(r) for r in ranks}
        self._check_open()
        this: Gang = handle.gang
        asked = {p: [r for r in ranks if self.homes[r] == p] for p in sorted({self.homes[r] for r in ranks})}

        async def one(p: int, mine: Sequence[int]) -> dict[int, np.ndarray]:
            stream = self._streams[self.addresses[p]]
            try:
                return answered(await stream.call("meshtape_blocks", number=this.number, slot=handle.slot, ranks=mine))
            except RankLost as e:
                check_running(self.client)
                raise RankLost(f"{self._ranks[p]} does not have what {this.what} left there any more: {e}") from e

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(one(p, rs) for p, rs in asked.items()), return_exceptions=True)

        found = on_loop(self.client, all_of_them)
        if errors := [e for e in found if isinstance(e, BaseException)]:
            self._queue.wait(this)  # which knows the cause
            raise errors[0]
        return {r: b for blocks in found for r, b in blocks.items()}

    def call(self, fn: Any, handles: Sequence[Any], payloads: Mapping[int, Any]) -> list[Any]:
        self._check_open()
        resolved = self._resolve(handles)
        args: dict[int, list[Any]] = {}
        for p in sorted({self.homes[r] for r in payloads}):
            mine = {r: payloads[r] for r in payloads if self.homes[r] == p}
            args[p] = [fn, mine, *self.reads(resolved, p, list(mine))]
        name = called(fn)
        return self._queue.gather(Gang(name, list(self.submit(mesh_worker.call_on_blocks, name, args).values())))

    def reads(self, handles: Sequence[Any], process: int, ranks: Sequence[int]) -> list[Any]:
        """For a function that a process is to call: the slots of arrays, as :func:`.worker.blocks_of` takes them, and
        the futures of the bundles. Waits until these are there."""
        gangs = list({h.gang.number: h.gang for h in handles if not isinstance(h, HostValue)}.values())
        for g in gangs:
            self._queue.wait(g)
        slots = [
            (-1, {r: self._block(h, r) for r in ranks}) if isinstance(h, HostValue) else (gangs.index(h.gang), h.slot)
            for h in handles
        ]
        return [slots, *(g.futures[process] for g in gangs)]

    def create(self, fn: Any, payloads: Mapping[int, Any], count: int) -> list[Any]:
        self._check_open()
        args = {p: [fn, {r: payloads[r] for r in self.hosted(p)}] for p in range(len(self.addresses))}
        this = self.kept(mesh_worker.create_blocks, called(fn), args)
        return [RemoteBlocks(this, i) for i in range(count)]

    def abandon(self) -> None:
        if not self._closed:
            self._queue.abandon()

    def close(self) -> None:
        if self._closed or is_forked(self.client):
            return
        check_thread(self.client)
        self._queue.drain()  # runs in flight still need the program
        self._closed = True
        if self.client.status == "running":
            last_word(self.client)
            self._forget()
        self._left_behind.clear()

    # ----- errors -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise MeshError("this mesh was closed")
        check_thread(self.client)
        check_running(self.client)


class Turning(NamedTuple):
    """Several turns of a program in a run's message: its fields, its host values, and objects that must live until it
    is sent."""

    message: tuple[int, int, Any]
    values: Sequence[HostValue]
    held: Any
