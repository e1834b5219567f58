"""What runs on Dask workers: one task a worker for one run of a program.

The tasks of a run form a gang: they need each other. They have a thread of their own and go before all ordinary tasks that are
queued on their worker, and each depends on the previous one of its mesh on its worker, so that all workers run gangs in one order.
(A worker of one thread ends the ordinary task it is at first: Dask counts tasks, whatever their executor.) Dask would happily run a
lost task again somewhere else; a gang task therefore first checks that it is where its blocks are, and fails if not.

A task that fails ends all that were submitted after it on its mesh, as they depend on it. Gangs of another mesh do not: the client
submits them when those of the first have ended.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from distributed import WorkerPlugin, get_worker
from distributed.protocol import to_serialize

from ..arrays.errors import ClusterError, RankLost
from ..arrays.pool import POOL
from ..storage import activity
from .block_memory import BlockMemory, is_on_host, memory_of, on_host, serving
from .dataplane import Address, DataPlane, interface_of
from .executor import Prepared
from .overlap import Buckets
from .rank_program import RankProgram
from .scheduler import hasten
from .transports.group import Group, Transport
from .transports.nccl import NcclGroup
from .transports.staged import Staged

EXECUTOR = "meshtape"
TOPIC = "meshtape"
"""Of the events that workers log: ``client.get_events("meshtape")``."""


class Bundle:
    """Blocks that one run left on one worker: ``slots[slot][rank]``. It is the value of the task's Dask future."""

    def __init__(self, run: str, slots: dict[int, dict[int, np.ndarray]]) -> None:
        self.run, self.slots = run, slots

    def __sizeof__(self) -> int:
        # What Dask's memory accounting and dashboard show: of the host.
        return 64 + sum(b.nbytes for blocks in self.slots.values() for b in blocks.values() if is_on_host(b))

    def __reduce__(self) -> Any:
        # Dask puts values aside on disk, or moves them: blocks of a device go as host memory, and come back to it.
        devices = {str(b.device.id) for blocks in self.slots.values() for b in blocks.values() if not is_on_host(b)}
        host = {i: {r: on_host(b) for r, b in blocks.items()} for i, blocks in self.slots.items()}
        return _bundle_of, (self.run, host, f"cuda:{min(devices)}" if devices else "cpu")

    def __repr__(self) -> str:
        return f"<Bundle of {len(self.slots)} array(s), {self.__sizeof__()} bytes>"


def _bundle_of(run: str, slots: dict[int, dict[int, np.ndarray]], device: str) -> Bundle:
    memory = memory_of(device)
    with memory.using():
        return Bundle(run, {i: {r: memory.put(b) for r, b in blocks.items()} for i, blocks in slots.items()})


class Failure:
    """The result of a task that failed, where those that depend on it are to see why and not to fail with it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"<Failure: {type(self.error).__name__}: {self.error}>"


@dataclass
class WorkerState:
    """What meshtape keeps in a worker: its data plane, prepared programs and the bundles that are alive."""

    plane: DataPlane
    programs: dict[str, Prepared] = field(default_factory=dict)
    bundles: weakref.WeakValueDictionary[str, Bundle] = field(default_factory=weakref.WeakValueDictionary)
    device_groups: dict[tuple[bytes, int], Transport] = field(default_factory=dict)

    def device_group(self, seat: Seat, host: Group) -> Transport:
        """What carries blocks of devices between the processes of a mesh: made once for each of its epochs."""
        key = (seat.mesh, seat.epoch)
        found = self.device_groups.get(key)
        if found is None:
            self.drop_device_groups(seat.mesh)
            if seat.nccl:
                count, ended = len(seat.peers) + 1, functools.partial(self.plane.ended, *key)
                found = NcclGroup(host, seat.process, count, seat.timeout, ended)
            else:
                found = Staged(host, seat.memory)
            self.device_groups[key] = found
        return found

    def drop_device_groups(self, mesh: bytes) -> None:
        """Forget what carried the device blocks of a mesh."""
        for key in [k for k in self.device_groups if k[0] == mesh]:
            self.device_groups.pop(key).close()


_STATES: dict[str, WorkerState] = {}
_LOCK = threading.Lock()


class MeshtapeWorker(WorkerPlugin):
    """Gives each worker the gang executor, lets the scheduler reach it, and closes what meshtape opened when the worker goes.

    Registered with the scheduler, which gives it to workers that come later or are started again.
    """

    name = "meshtape"
    idempotent = True

    def __init__(self) -> None:
        self._ended: dict[str, asyncio.Event] = {}

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """A task of the worker changed its state."""
        if self._ended and finish in ("memory", "error") and (ended := self._ended.get(key)) is not None:
            ended.set()

    async def _blocks(self, worker: Any, key: str, slot: int, ranks: Sequence[int], patience: float) -> Any:
        """Blocks of what a task left here, as soon as it has ended; nothing where that takes more than ``patience`` seconds, or it
        failed."""
        if key not in worker.data:
            ended = self._ended.setdefault(key, asyncio.Event())
            try:
                await asyncio.wait_for(ended.wait(), patience)
            except TimeoutError:
                return {}
            finally:
                self._ended.pop(key, None)
        bundle = worker.data.get(key)
        if not isinstance(bundle, Bundle):
            return {}
        blocks = {r: bundle.slots[slot][r] for r in ranks}
        if not all(map(is_on_host, blocks.values())):
            # The device may still compute them: nobody else is to wait for that.
            blocks = await asyncio.to_thread(lambda: {r: on_host(b) for r, b in blocks.items()})
        return {"blocks": to_serialize({r: np.asarray(b, order="C") for r, b in blocks.items()})}

    def setup(self, worker: Any) -> None:
        if EXECUTOR not in worker.executors:
            worker.executors[EXECUTOR] = ThreadPoolExecutor(1, thread_name_prefix="meshtape-gang")

        # Sent with each heartbeat; the dashboard shows it.
        worker.metrics["meshtape"] = lambda w: (
            state.plane.last_exchanges() if (state := _STATES.get(w.address)) is not None else {}
        )
        worker.metrics["meshtape_written"] = lambda w: activity.written()

        # What the scheduler says when a client or a worker of a mesh is gone: nobody else could.
        async def meshtape_left(mesh: bytes, worker_left: str) -> None:
            state = _STATES.get(worker.address)
            if state is not None:
                state.plane.left(mesh, worker_left)

        async def meshtape_forget(mesh: bytes) -> None:
            close_mesh(mesh, (), worker)

        async def meshtape_blocks(key: str, slot: int, ranks: Sequence[int], patience: float) -> Any:
            return await self._blocks(worker, key, slot, ranks, patience)

        worker.handlers["meshtape_blocks"] = meshtape_blocks
        worker.handlers["meshtape_left"] = meshtape_left
        worker.handlers["meshtape_forget"] = meshtape_forget

    def teardown(self, worker: Any) -> None:
        close_state(worker.address)


def close_state(address: str) -> None:
    """Close the data plane of a worker of this process."""
    with _LOCK:
        state = _STATES.pop(address, None)
    if state is not None:
        state.plane.close()


def open_plane(mesh: bytes, secret: bytes, transport: str, pool: int, interval: float, dask_worker: Any) -> Address:
    """Run on each worker (by ``Client.run``): open the data plane where there is none, admit the mesh, say the address."""
    if EXECUTOR not in dask_worker.executors:
        raise ClusterError(f"worker {dask_worker.address} could not set up meshtape's worker plugin")
    POOL.limit = pool
    hasten(dask_worker.batched_stream, interval)
    with _LOCK:
        state = _STATES.get(dask_worker.address)
        if state is None:
            tls = None
            if dask_worker.address.startswith(("tls://", "wss://")):
                security = dask_worker.security
                tls = tuple(
                    get("worker")["ssl_context"] for get in (security.get_listen_args, security.get_connection_args)
                )
            plane = DataPlane(None, tls, dask_worker)
            state = _STATES[dask_worker.address] = WorkerState(plane)
        if transport != "comms":
            state.plane.listen(interface_of(dask_worker.address))
    state.plane.admit(mesh, secret)
    return dask_worker.address if transport == "comms" else state.plane.address


def close_mesh(mesh: bytes, programs: Sequence[str], dask_worker: Any) -> None:
    """Run on each worker: forget a mesh, its connections and programs."""
    state = _STATES.get(dask_worker.address)
    if state is not None:
        state.plane.dismiss(mesh)
        state.drop_device_groups(mesh)
        mine = f"{mesh.hex()}/"
        for p in [p for p in state.programs if p.startswith(mine) or p in programs]:
            del state.programs[p]


def stop_epoch(mesh: bytes, epoch: int, dask_worker: Any) -> None:
    """Run on each worker after a failure: what still waits for the one that failed ends."""
    state = _STATES.get(dask_worker.address)
    if state is not None:
        state.plane.stop(mesh, epoch)


@dataclass(frozen=True)
class Seat:
    """A process's place in a mesh."""

    mesh: bytes
    epoch: int
    process: int
    address: str
    homes: tuple[int, ...]
    peers: Mapping[int, Address]
    ranks: Mapping[int, str]
    timeout: float
    silence: float
    share: bool
    device: str = "cpu"
    nccl: bool = False
    buckets: Buckets = field(default_factory=Buckets.configured)  # the client's, where seats are made

    @property
    def memory(self) -> BlockMemory:
        """Where the blocks of this process are."""
        return memory_of(self.device)

    @property
    def hosted(self) -> tuple[int, ...]:
        return tuple(r for r, p in enumerate(self.homes) if p == self.process)

    def take(self) -> WorkerState:
        """State of the worker. Raises :class:`RankLost` on any other worker than the seat's."""
        here = get_worker().address
        state = _STATES.get(here)
        if here != self.address or state is None:
            raise RankLost(
                f"{self.ranks[self.process]} is lost: worker {self.address} left the cluster, and its blocks with it"
            )
        return state

    def named(self, address: str) -> str:
        """Ranks of the worker at an address, in words."""
        return next((n for n in self.ranks.values() if f"(worker {address})" in n), f"worker {address}")


Source = tuple[int, int] | Mapping[int, np.ndarray]
"""Where an input's blocks are: (number of the bundle among the task's arguments, slot), or the blocks themselves."""


@dataclass(frozen=True)
class Run:
    """One run of a program, for one process. ``program`` is sent the first time only.

    With ``turns`` the program runs as often, one turn for each of ``each``'s blocks: see :mod:`.loops`.
    """

    run: str
    number: int
    seat: Seat
    program_id: str
    program: RankProgram | None
    names: tuple[str, ...]
    sources: tuple[Source, ...]
    keep: tuple[int, ...]  # inputs that were shipped with the task and stay in its bundle, after the outputs
    drops: tuple[tuple[str, int], ...]  # (run, slot) that nobody holds any more
    forget: tuple[str, ...]  # programs that nobody runs any more
    loop: Loop | None = None

    def __repr__(self) -> str:
        return f"<Run {self.run} of {self.program_id}>"

    def __dask_tokenize__(self) -> tuple[str, int]:
        # Dask asks each task for its identity, and would read all of this for one.
        return self.run, self.seat.process


@dataclass(frozen=True)
class Loop:
    """Several turns of one program: its first ``carried`` outputs are the first inputs of the next turn, the inputs that follow are
    of this turn alone (``each``, one list of blocks a turn), the rest stays. The other outputs are stacked, turn by turn."""

    turns: int
    carried: int
    each: tuple[tuple[Source, ...], ...]


def _drop(state: WorkerState, drops: Sequence[tuple[str, int]]) -> None:
    for run, slot in drops:
        bundle = state.bundles.get(run)
        if bundle is not None:
            bundle.slots.pop(slot, None)


def _blocks(source: Source, bundles: Sequence[Bundle | Failure]) -> Mapping[int, np.ndarray]:
    if isinstance(source, tuple):
        bundle = bundles[source[0]]
        if isinstance(bundle, Failure):
            raise bundle.error
        return bundle.slots[source[1]]
    return source


def _landed(source: Source, bundles: Sequence[Bundle | Failure], memory: BlockMemory) -> Mapping[int, np.ndarray]:
    """The blocks of an input where they are computed on: those that come with a task, or were sent before it, are host memory."""
    blocks = _blocks(source, bundles)
    if memory.name == "cpu" or not any(map(is_on_host, blocks.values())):
        return blocks
    with memory.using():
        placed = {r: memory.put(b) for r, b in blocks.items()}
    if isinstance(source, tuple):
        bundles[source[0]].slots[source[1]] = placed  # type: ignore[union-attr]  # they travel once
    return placed


def run_program(spec: Run, *bundles: Bundle | Failure) -> Bundle:
    """The gang task."""
    try:
        return _run_program(spec, bundles)
    except BaseException as e:
        get_worker().log_event(TOPIC, {"failed": spec.program_id, "error": f"{type(e).__name__}: {e}"})
        raise


def _run_program(spec: Run, bundles: Sequence[Bundle | Failure]) -> Bundle:
    state = spec.seat.take()
    seat = spec.seat
    group = None
    try:
        missing = state.plane.missing(seat.mesh)
        if missing is not None:
            raise RankLost(f"{seat.named(missing)} left the cluster")
        prepared = state.programs.get(spec.program_id)
        if prepared is None:
            if spec.program is None:
                raise RankLost(f"worker {seat.address} was restarted and lost the program {spec.program_id}")
            prepared = Prepared(spec.program, seat.hosted, seat.homes, spec.names, seat.memory, seat.buckets)
            state.programs[spec.program_id] = prepared
        memory = prepared.memory
        inputs = [_landed(s, bundles, memory) for s in spec.sources]
        if seat.peers:
            group = state.plane.group(
                seat.mesh, seat.epoch, seat.process, seat.peers, seat.ranks, seat.timeout, seat.share
            )
            group.silence = seat.silence
            group.begin(spec.number, seat.timeout)
        transport: Transport | None = group
        if group is not None and memory.name != "cpu":
            with memory.using():
                transport = state.device_group(seat, group)
        if spec.loop is None:
            outputs = prepared.run(inputs, transport)
        else:
            each = [[_landed(s, bundles, memory) for s in sources] for sources in spec.loop.each]
            outputs = prepared.loop(inputs, spec.loop.turns, spec.loop.carried, each, transport)
    except BaseException as e:
        group = group or state.plane.current(seat.mesh, seat.epoch)
        if group is not None:
            group.abort(f"{type(e).__name__}: {e}")
            if (carrier := state.device_groups.pop((seat.mesh, seat.epoch), None)) is not None:
                carrier.shutdown()
            state.plane.drop(seat.mesh, seat.epoch)
        missing = state.plane.missing(seat.mesh)
        if isinstance(e, RankLost) and missing is not None:
            raise RankLost(f"{seat.named(missing)} left the cluster: {e}") from e
        raise
    _drop(state, spec.drops)
    for p in spec.forget:
        state.programs.pop(p, None)
    slots = dict(enumerate(outputs))
    for i in spec.keep:
        slots[len(slots)] = dict(inputs[i])
    bundle = Bundle(spec.run, slots)
    state.bundles[spec.run] = bundle
    return bundle


@dataclass(frozen=True)
class Call:
    """A function of blocks, for one process."""

    run: str
    seat: Seat
    fn: Callable[..., Any]
    payloads: Mapping[int, Any]
    sources: tuple[Source, ...]

    def __repr__(self) -> str:
        return f"<Call {getattr(self.fn, '__name__', self.fn)}>"

    def __dask_tokenize__(self) -> tuple[str, int]:
        return self.run, self.seat.process


def call_on_blocks(spec: Call, *bundles: Bundle) -> Any:
    """Task of ``BlockHost.run_on_blocks``."""
    spec.seat.take()
    inputs = [_blocks(s, bundles) for s in spec.sources]
    with serving(spec.seat.memory):
        return spec.fn(dict(spec.payloads), {r: [on_host(b[r]) for b in inputs] for r in spec.payloads})


def create_blocks(spec: Call) -> Bundle:
    """Task of ``BlockHost.create``."""
    state = spec.seat.take()
    made = spec.fn(dict(spec.payloads))
    count = len(next(iter(made.values()))) if made else 0
    return kept(spec, state, {i: {r: blocks[i] for r, blocks in made.items()} for i in range(count)})


def kept(spec: Call, state: WorkerState, slots: Mapping[int, Mapping[int, np.ndarray]]) -> Bundle:
    """Host blocks that a task made, as the bundle of its run: where the ranks compute."""
    memory = spec.seat.memory
    with memory.using():
        placed = {i: {r: memory.put(b) for r, b in blocks.items()} for i, blocks in slots.items()}
    bundle = Bundle(spec.run, placed)
    state.bundles[spec.run] = bundle
    return bundle
