"""The plugin of Dask workers: programs, and functions of blocks, of one process of a mesh.

The processes of a mesh run each program together. :mod:`.worker_queue` brings them the runs in one order everywhere. A
lost worker takes its blocks with it: runs that need them fail with :class:`RankLost`, and nothing is repeated
elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from distributed import WorkerPlugin, get_worker
from distributed.core import Status
from distributed.protocol import to_serialize

from ...arrays.backends.memory_pool import POOL
from ...arrays.core.errors import ClusterError, RankLost
from ...storage.base import activity
from ..base.bundles import Bundle, make_room, oldest_first, register_with_dask_cuda
from ..base.device_memory import HOST, BlockMemory, is_on_host, memory_of, on_host, serving
from ..base.message_streams import failure_message, unpacked
from ..execution.executor import Prepared
from ..transports.group import LinkGroup, Transport
from ..transports.nccl import NcclGroup
from ..transports.rendezvous import Address, DataPlane, interface_of
from ..transports.staged import Staged
from .worker_queue import ClientSession, Ref, Resident, WorkItem

TOPIC = "meshtape"
"""Of the events that workers log: ``client.get_events("meshtape")``."""

_POOL_PART = 8  # the most of a worker's memory that it keeps unused for blocks

Ranges = Sequence[tuple[int, int, int]]
"""Slots of bundles, as (number of the item that left the bundle, first slot, how many)."""


@dataclass
class WorkerState:
    """The state of meshtape in a worker: its queue, its data plane, its places in meshes and its prepared programs."""

    resident: Resident
    plane: DataPlane | None = None
    contexts: dict[bytes, ProcessContext] = field(default_factory=dict)
    owners: dict[bytes, str] = field(default_factory=dict)  # the client of each mesh
    programs: dict[str, Prepared] = field(default_factory=dict)
    device_groups: dict[tuple[bytes, int], Transport] = field(default_factory=dict)
    forgotten: deque[bytes] = field(default_factory=lambda: deque(maxlen=1000))
    """Meshes that :func:`open_plane` does not admit any more: it comes by another connection than their end, and by a
    worker that stood still both are found at once, in any order."""

    def device_group(self, context: ProcessContext, epoch: int, host: LinkGroup, timeout: float) -> Transport:
        """The transport of device blocks between the processes of a mesh, made once for each of its epochs."""
        key = (context.mesh, epoch)
        found = self.device_groups.get(key)
        if found is None:
            self.drop_device_groups(context.mesh)
            if context.nccl:
                assert self.plane is not None
                count, ended = len(context.peers) + 1, functools.partial(self.plane.ended, *key)
                found = NcclGroup(host, context.process, count, timeout, ended)
            else:
                found = Staged(host, context.memory)
            self.device_groups[key] = found
        return found

    def drop_device_groups(self, mesh: bytes) -> None:
        """Close the transports of device blocks of a mesh."""
        for key in [k for k in list(self.device_groups) if k[0] == mesh]:
            self.device_groups.pop(key).close()

    def forget(self, mesh: bytes) -> None:
        """Forget a mesh, its connections and programs."""
        self.forgotten.append(mesh)
        if self.plane is not None:
            self.plane.unregister_mesh(mesh)
        self.drop_device_groups(mesh)
        self.contexts.pop(mesh, None)
        self.owners.pop(mesh, None)
        for p in [p for p in list(self.programs) if p.startswith(f"{mesh.hex()}/")]:
            del self.programs[p]

    def left(self, client: str) -> None:
        """Forget the meshes of a client whose stream has ended."""
        for mesh in [m for m, c in list(self.owners.items()) if c == client]:
            self.forget(mesh)


_STATES: dict[str, WorkerState] = {}
_LOCK = threading.Lock()


class MeshtapeWorker(WorkerPlugin):
    """The worker plugin: a queue for meshes, handlers for clients and the scheduler, and clean-up when the worker
    closes.

    It is installed on the workers of a mesh or a gang when that is made. Registered with the scheduler, it would keep
    workers without meshtape from joining.
    """

    name = "meshtape"

    def setup(self, worker: Any) -> None:
        register_with_dask_cuda()
        resident = Resident(
            worker, lambda client_session, message: _command(state, client_session, message), lambda c: state.left(c)
        )
        with _LOCK:
            state = _STATES[worker.address] = WorkerState(resident)

        # Sent with each heartbeat; the dashboard shows it.
        worker.metrics["meshtape"] = lambda w: {
            **resident.report(),
            "exchanges": {} if state.plane is None else state.plane.last_exchanges(),
        }
        worker.metrics["meshtape_written"] = lambda w: activity.written()

        # The scheduler calls these when a worker or a client of a mesh is gone.
        async def meshtape_left(mesh: bytes, worker_left: str) -> None:
            if state.plane is not None:
                state.plane.on_peer_lost(mesh, worker_left)

        async def meshtape_forget(mesh: bytes) -> None:
            state.forget(mesh)

        async def meshtape_blocks(session: str, number: int, slot: int, ranks: Sequence[int]) -> Any:
            return await _taken(resident, session, number, slot, ranks)

        worker.handlers |= {
            "meshtape_blocks": meshtape_blocks,
            "meshtape_left": meshtape_left,
            "meshtape_forget": meshtape_forget,
            "meshtape_session": resident.stream,
            "meshtape_value": resident.take,
            "meshtape_put": resident.put,
            "meshtape_busy": resident.busy_for,
            "meshtape_fence": resident.fence,
        }

    def teardown(self, worker: Any) -> None:
        close_state(worker.address)


async def _taken(resident: Resident, session: str, number: int, slot: int, ranks: Sequence[int]) -> Any:
    """Blocks of an item's value, as soon as the item has ended."""
    try:
        bundle = await resident.of(session).value(number)
        blocks = {r: bundle.slots[slot][r] for r in ranks}
        if not all(map(is_on_host, blocks.values())):
            # The device may still compute them: nobody else is to wait for that.
            blocks = await asyncio.to_thread(lambda: {r: on_host(b) for r, b in blocks.items()})
        return {"value": to_serialize({r: np.asarray(b, order="C") for r, b in blocks.items()})}
    except Exception as e:
        return failure_message(e)


def close_state(address: str) -> None:
    """Close the resources of a worker of this process."""
    with _LOCK:
        state = _STATES.pop(address, None)
    if state is not None:
        state.resident.close()
        if state.plane is not None:
            state.plane.close()


def open_plane(
    mesh: bytes, secret: bytes, transport: str, pool: int, client: str, dask_worker: Any
) -> tuple[Address, int | None]:
    """Run on each worker (by ``Client.run``): open the data plane where there is none, admit the mesh; say the address,
    and the bytes that the worker may use before Dask pauses it."""
    manager = dask_worker.memory_manager
    limit = manager.memory_limit and int(manager.memory_limit * (manager.memory_pause_fraction or 1.0))
    POOL.limit = min(pool, limit // _POOL_PART) if limit else pool
    with _LOCK:
        state = _STATES.get(dask_worker.address)
        if state is None:
            raise ClusterError(f"worker {dask_worker.address} is closing")
        if mesh in state.forgotten or all(s.client != client for s in list(state.resident.sessions.values())):
            raise ClusterError(f"worker {dask_worker.address} was left by this client meanwhile")
        if state.plane is None:
            tls = None
            if dask_worker.address.startswith(("tls://", "wss://")):
                security = dask_worker.security
                tls = tuple(
                    get("worker")["ssl_context"] for get in (security.get_listen_args, security.get_connection_args)
                )
            state.plane = DataPlane(None, tls, dask_worker)
        if transport != "comms":
            state.plane.listen(interface_of(dask_worker.address))
    state.owners[mesh] = client
    state.plane.register_mesh(mesh, secret)
    return (dask_worker.address if transport == "comms" else state.plane.address), limit or None


@dataclass(frozen=True)
class ProcessContext:
    """A process's place in a mesh, sent to it once when the mesh is opened."""

    mesh: bytes
    process: int
    addresses: tuple[str, ...]
    """Of the worker of each process."""
    planes: tuple[Address, ...]
    homes: tuple[int, ...]
    share: bool
    device: str = "cpu"
    nccl: bool = False

    @property
    def address(self) -> str:
        return self.addresses[self.process]

    @functools.cached_property
    def peers(self) -> Mapping[int, Address]:
        return {p: a for p, a in enumerate(self.planes) if p != self.process}

    @functools.cached_property
    def ranks(self) -> Mapping[int, str]:
        return names_of(self.homes, self.addresses)

    @property
    def memory(self) -> BlockMemory:
        """The memory of this process's blocks."""
        return memory_of(self.device)

    @functools.cached_property
    def hosted(self) -> tuple[int, ...]:
        return tuple(r for r, p in enumerate(self.homes) if p == self.process)

    @functools.cached_property
    def hosts(self) -> int:
        """The number of machines on which the processes of the mesh are."""
        return hosts_of(self.addresses)

    def named(self, address: str) -> str:
        """Ranks of the worker at an address, in words."""
        return self.ranks[self.addresses.index(address)] if address in self.addresses else f"worker {address}"


def hosts_of(addresses: Iterable[str]) -> int:
    """The number of machines that addresses name.

    >>> hosts_of(("tcp://a:1", "tcp://a:2", "tls://[::1]:3"))
    2
    """
    return len({a.partition("://")[2].rpartition(":")[0] for a in addresses})


def names_of(homes: Sequence[int], addresses: Sequence[str]) -> dict[int, str]:
    """The ranks of each process in words.

    >>> names_of((0, 0, 1), ("tcp://a:1", "tcp://b:2"))
    {0: 'ranks 0-1 (worker tcp://a:1)', 1: 'rank 2 (worker tcp://b:2)'}
    """
    hosted: dict[int, list[int]] = {p: [] for p in range(len(addresses))}
    for r, p in enumerate(homes):
        hosted[p].append(r)
    return {
        p: f"rank{'s' if len(rs) > 1 else ''} " + "-".join(map(str, dict.fromkeys((rs[0], rs[-1])))) + f" (worker {a})"
        for (p, rs), a in zip(hosted.items(), addresses, strict=True)
    }


def client_session_here(address: str, session: str) -> tuple[ClientSession, Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Called in a task of Dask's: a client's session on this worker, and a function that waits for a coroutine on the
    worker's event loop. Raises :class:`RankLost` on any other worker than the one at ``address``."""
    worker = get_worker()
    state = _STATES.get(worker.address)
    if worker.address != address or state is None:
        raise RankLost(f"worker {address} left the cluster, and its blocks with it")

    def finish(what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, worker.loop.asyncio_loop).result()

    return state.resident.of(session), finish


def process_context_here(mesh: bytes) -> ProcessContext:
    """Called in a task of Dask's: the place of this worker in a mesh."""
    context = _STATES[get_worker().address].contexts.get(mesh)
    if context is None:
        raise RankLost("this process forgot the mesh: it was closed")
    return context


# ----- commands of a stream -------------------------------------------------------------------------------------------


def _command(state: WorkerState, client_session: ClientSession, message: dict[str, Any]) -> None:
    """Carry out a client's message, or queue it."""
    op = message["op"]
    if op == "run":
        client_session.add(_run_item(state, client_session, message))
    elif op == "call":
        needs = [Ref(*r) for r in message["needs"]]
        stop = threading.Event() if message["stoppable"] else None
        work = functools.partial(_call, state, message, stop)
        client_session.add(WorkItem(message["n"], message["name"], work, needs, timeout=message["timeout"], stop=stop))
    elif op == "drop":
        client_session.then(lambda: client_session.drop(message["numbers"]))
    elif op == "drop_slots":
        client_session.then(lambda: _drop_slots(client_session, message["n"], message["slots"]))
    elif op == "forget":
        client_session.then(lambda: [state.programs.pop(p, None) for p in message["programs"]])  # type: ignore[arg-type,return-value]
    elif op == "close":
        client_session.then(lambda: state.forget(message["mesh"]))
    elif op == "context":
        context = ProcessContext(**message["context"])
        state.contexts[context.mesh] = context
    elif op == "stop":  # end the waits for a failed process
        if state.plane is not None:
            state.plane.stop(message["mesh"], message["epoch"])
    elif op == "cancel":
        client_session.cancel(message["numbers"])
    elif op == "ping":
        client_session.say({"op": "pong", "paused": client_session.resident.worker.status == Status.paused})


def _call(state: WorkerState, message: Mapping[str, Any], stop: threading.Event | None, values: Sequence[Any]) -> Any:
    mesh = message["mesh"]
    context = None if mesh is None else state.contexts.get(mesh)
    if mesh is not None and context is None:
        raise RankLost("this process forgot the mesh: it was closed")
    fn, args = unpacked(message["work"])
    given = iter(values)
    options = {} if stop is None else {"stop": stop}
    return fn(context, *(next(given) if isinstance(a, Ref) else a for a in args), **options)


def _drop_slots(client_session: ClientSession, number: int, slots: Sequence[int]) -> None:
    if (key := client_session.kept.get(number)) is None:
        return
    bundle = client_session.resident.value(key)
    for slot in slots:
        bundle.slots.pop(slot, None)
    client_session.resident.store(key, bundle)  # its size has changed
    if number not in client_session.kept:  # the client left meanwhile
        client_session.resident.forget(key)


def _run_item(state: WorkerState, client_session: ClientSession, m: dict[str, Any]) -> WorkItem:
    each = m["loop"][2] if m["loop"] is not None else ()
    numbers = dict.fromkeys(n for ranges in (m["sources"], each) for n, _, _ in ranges if n >= 0)
    here = client_session.resident.worker.address, client_session.session

    def work(values: Sequence[Bundle]) -> Bundle:
        try:
            return run_program(state, m, dict(zip(numbers, values, strict=True)))
        except BaseException as e:
            event = {"failed": m["program_id"], "error": f"{type(e).__name__}: {e}"}
            client_session.resident.worker.log_event(TOPIC, event)
            raise

    return WorkItem(m["n"], m["name"], work, [Ref(n, *here) for n in numbers], (m["mesh"], m["epoch"]))


def ranges_of(slots: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Slots of bundles, neighbours together.

    >>> ranges_of([(7, 0), (7, 1), (7, 2), (9, 4)])
    [(7, 0, 3), (9, 4, 1)]
    """
    out: list[tuple[int, int, int]] = []
    for n, slot in slots:
        if out and out[-1][0] == n and sum(out[-1][1:]) == slot:
            out[-1] = (n, out[-1][1], out[-1][2] + 1)
        else:
            out.append((n, slot, 1))
    return out


def _landed(
    ranges: Ranges, bundles: Mapping[int, Bundle], given: Sequence[Mapping[int, np.ndarray]], memory: BlockMemory
) -> Iterator[Mapping[int, np.ndarray]]:
    """The blocks of inputs, in the memory of the process if that is a device. Blocks that come with a message, or were
    sent before it, are in host memory. The number -1 stands for blocks that come with the message."""
    for n, first, count in ranges:
        for slot in range(first, first + count):
            blocks = given[slot] if n < 0 else bundles[n].slots.get(slot)
            if blocks is None:
                raise RankLost("blocks that a program needs are gone from their worker")
            if memory.name != "cpu" and any(map(is_on_host, blocks.values())):
                with memory.using():
                    blocks = {r: memory.put(b) for r, b in blocks.items()}
                if n >= 0:
                    bundles[n].slots[slot] = blocks  # type: ignore[assignment]  # they travel once
            yield blocks


def run_program(state: WorkerState, m: Mapping[str, Any], bundles: Mapping[int, Bundle]) -> Bundle:
    """One run of a program, for one process.

    Parameters
    ----------
    m
        The client's message. ``program`` is sent until a run of it has succeeded; with ``loop`` the program runs
        several turns (:mod:`.scan`): how many, how many outputs are carried, and the slots that the turns read, turn by
        turn; ``blocks`` are inputs that come with the message; the inputs whose numbers are in ``keep`` stay in the
        bundle, after the outputs.
    bundles
        Values of earlier items on this worker, by item number.
    """
    context, plane = state.contexts.get(m["mesh"]), state.plane
    if context is None or plane is None:
        raise RankLost("this process forgot the mesh: it was closed")
    mesh, epoch, timeout, group = context.mesh, m["epoch"], m["timeout"], None
    try:
        missing = plane.missing(mesh)
        if missing is not None:
            raise RankLost(f"{context.named(missing)} left the cluster")
        prepared = state.programs.get(m["program_id"])
        if prepared is None:
            if m["program"] is None:
                raise RankLost(f"worker {context.address} was restarted and lost the program {m['program_id']}")
            program, names, buckets, native = unpacked(m["program"])
            here = context.hosted, context.homes, names, context.memory
            prepared = Prepared(program, *here, buckets, context.hosts, native)
            prepared.others = lambda: oldest_first(state.resident.in_memory())
            state.programs[m["program_id"]] = prepared
        memory = prepared.memory
        given = unpacked(m["blocks"]) if m["blocks"] else ()
        make_room(state.resident.in_memory, bundles.values(), memory)
        # A program whose ranks are all here takes blocks to the device when it reads them.
        landed = functools.partial(_landed, bundles=bundles, given=given, memory=HOST if prepared.evicting else memory)
        inputs = list(landed(m["sources"]))
        if context.peers:
            group = plane.group(mesh, epoch, context.process, context.peers, context.ranks, timeout, context.share)
            group.silence = m["silence"]
            group.begin(m["n"], timeout)
        transport: Transport | None = group
        if group is not None and memory.name != "cpu":
            with memory.using():
                transport = state.device_group(context, epoch, group, timeout)
        if m["loop"] is None:
            outputs = prepared.run(inputs, transport)
        else:
            turns, carried, ranges = m["loop"]
            flat = list(landed(ranges))
            width = len(flat) // turns
            each = [flat[t * width : (t + 1) * width] for t in range(turns)] if flat else []
            outputs = prepared.loop(inputs, turns, carried, each, transport)
    except BaseException as e:
        group = group or plane.current(mesh, epoch)
        if group is not None:
            group.abort(f"{type(e).__name__}: {e}")
            if (carrier := state.device_groups.pop((mesh, epoch), None)) is not None:
                carrier.shutdown()
            plane.drop(mesh, epoch)
        missing = plane.missing(mesh)
        if isinstance(e, RankLost) and missing is not None:
            raise RankLost(f"{context.named(missing)} left the cluster: {e}") from e
        raise
    slots: dict[int, Any] = dict(enumerate(outputs))
    for i in m["keep"]:
        slots[len(slots)] = dict(inputs[i])
    return Bundle(slots)


# ----- functions of blocks --------------------------------------------------------------------------------------------


def blocks_of(slots: Sequence[tuple[int, Any]], bundles: Sequence[Bundle]) -> list[Mapping[int, Any]]:
    """The blocks of some arrays, by rank. ``slots`` gives the bundle of each and the slot in it; in place of the slot
    of bundle -1 stand blocks that come with the call."""
    return [slot if i < 0 else bundles[i].slots[slot] for i, slot in slots]


def call_on_blocks(
    context: ProcessContext,
    fn: Callable[..., Any],
    payloads: Mapping[int, Any],
    slots: Sequence[tuple[int, int]],
    *bundles: Bundle,
) -> Any:
    """``BlockHost.run_on_blocks``, for one process. ``slots`` and ``bundles`` are those of :func:`blocks_of`."""
    inputs = blocks_of(slots, bundles)
    with serving(context.memory):
        return fn(dict(payloads), {r: [on_host(b[r]) for b in inputs] for r in payloads})


def create_blocks(context: ProcessContext, fn: Callable[..., Any], payloads: Mapping[int, Any]) -> Bundle:
    """``BlockHost.create``, for one process."""
    made = fn(dict(payloads))
    count = len(next(iter(made.values()))) if made else 0
    return kept(context, {i: {r: blocks[i] for r, blocks in made.items()} for i in range(count)})


def kept(context: ProcessContext, slots: Mapping[int, Mapping[int, np.ndarray]]) -> Bundle:
    """Host blocks as a bundle, in the memory that the ranks compute in."""
    memory = context.memory
    with memory.using():
        return Bundle({i: {r: memory.put(b) for r, b in blocks.items()} for i, blocks in slots.items()})
