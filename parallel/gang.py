"""What runs on Dask workers: one task a worker for one run of a program.

The tasks of a run form a gang: they need each other. They have a thread of their own and go before all ordinary tasks that are
queued on their worker, and each depends on the previous one of its worker, so that all workers run gangs in one order. (A worker
of one thread ends the ordinary task it is at first: Dask counts tasks, whatever their executor.) Dask would happily run a
lost task again somewhere else; a gang task therefore first checks that it is where its blocks are, and raises if not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from distributed import WorkerPlugin, get_worker

from ..arrays.errors import RankLost
from .dataplane import DataPlane, interface_of
from .executor import Prepared
from .partition import RankProgram

EXECUTOR = "meshtape"


class Bundle:
    """Blocks that one run left on one worker: ``slots[slot][rank]``. It is the value of the task's Dask future."""

    def __init__(self, run: str, slots: dict[int, dict[int, np.ndarray]]) -> None:
        self.run, self.slots = run, slots

    def __sizeof__(self) -> int:
        # What Dask's memory accounting and dashboard show.
        return 64 + sum(b.nbytes for blocks in self.slots.values() for b in blocks.values())

    def __repr__(self) -> str:
        return f"<Bundle of {len(self.slots)} array(s), {self.__sizeof__()} bytes>"


@dataclass
class WorkerState:
    """What meshtape keeps in a worker: its data plane, prepared programs and the bundles that are alive."""

    plane: DataPlane
    programs: dict[str, Prepared] = field(default_factory=dict)
    bundles: weakref.WeakValueDictionary[str, Bundle] = field(default_factory=weakref.WeakValueDictionary)


_STATES: dict[str, WorkerState] = {}
_LOCK = threading.Lock()


class MeshtapeWorker(WorkerPlugin):
    """Gives each worker the gang executor, and closes what meshtape opened when the worker goes."""

    name = "meshtape"
    idempotent = True

    def setup(self, worker: Any) -> None:
        if EXECUTOR not in worker.executors:
            worker.executors[EXECUTOR] = ThreadPoolExecutor(1, thread_name_prefix="meshtape-gang")

    def teardown(self, worker: Any) -> None:
        close_state(worker.address)


def close_state(address: str) -> None:
    """Close the data plane of a worker of this process."""
    with _LOCK:
        state = _STATES.pop(address, None)
    if state is not None:
        state.plane.close()


def open_plane(mesh: bytes, secret: bytes, dask_worker: Any) -> tuple[str, int]:
    """Run on each worker (by ``Client.run``): open the data plane where there is none, admit the mesh, say the address."""
    with _LOCK:
        state = _STATES.get(dask_worker.address)
        if state is None:
            state = _STATES[dask_worker.address] = WorkerState(DataPlane(interface_of(dask_worker.address)))
    state.plane.admit(mesh, secret)
    return state.plane.host, state.plane.port


def close_mesh(mesh: bytes, programs: Sequence[str], dask_worker: Any) -> None:
    """Run on each worker: forget a mesh, its connections and programs."""
    state = _STATES.get(dask_worker.address)
    if state is not None:
        state.plane.dismiss(mesh)
        for p in programs:
            state.programs.pop(p, None)


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
    peers: Mapping[int, tuple[str, int]]
    ranks: Mapping[int, str]
    timeout: float

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


Source = tuple[int, int] | Mapping[int, np.ndarray]
"""Where an input's blocks are: (number of the bundle among the task's arguments, slot), or the blocks themselves."""


@dataclass(frozen=True)
class Run:
    """One run of a program, for one process. ``program`` is sent the first time only."""

    run: str
    number: int
    seat: Seat
    program_id: str
    program: RankProgram | None
    names: tuple[str, ...]
    sources: tuple[Source, ...]
    keep: tuple[int, ...]  # inputs that were shipped with the task and stay in its bundle, after the outputs
    drops: tuple[tuple[str, int], ...]  # (run, slot) that nobody holds any more

    def __repr__(self) -> str:
        return f"<Run {self.run} of {self.program_id}>"


def _drop(state: WorkerState, drops: Sequence[tuple[str, int]]) -> None:
    for run, slot in drops:
        bundle = state.bundles.get(run)
        if bundle is not None:
            bundle.slots.pop(slot, None)


def _blocks(source: Source, bundles: Sequence[Bundle]) -> Mapping[int, np.ndarray]:
    if isinstance(source, tuple):
        return bundles[source[0]].slots[source[1]]
    return source


def run_program(spec: Run, *bundles: Bundle) -> Bundle:
    """The gang task."""
    state = spec.seat.take()
    seat = spec.seat
    prepared = state.programs.get(spec.program_id)
    if prepared is None:
        if spec.program is None:
            raise RankLost(f"worker {seat.address} was restarted and lost the program {spec.program_id}")
        prepared = Prepared(spec.program, seat.hosted, seat.homes, spec.names)
        state.programs[spec.program_id] = prepared
    inputs = [_blocks(s, bundles) for s in spec.sources]
    group = None
    if seat.peers:
        group = state.plane.group(seat.mesh, seat.epoch, seat.process, seat.peers, seat.ranks, seat.timeout)
        group.begin(spec.number, seat.timeout)
    try:
        outputs = prepared.run(inputs, group)
    except BaseException as e:
        if group is not None:
            group.abort(f"{type(e).__name__}: {e}")
            state.plane.drop(seat.mesh, seat.epoch)
        raise
    _drop(state, spec.drops)
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


def call_on_blocks(spec: Call, *bundles: Bundle) -> Any:
    """Task of ``BlockHost.run_on_blocks``."""
    spec.seat.take()
    inputs = [_blocks(s, bundles) for s in spec.sources]
    return spec.fn(dict(spec.payloads), {r: [b[r] for b in inputs] for r in spec.payloads})


def create_blocks(spec: Call) -> Bundle:
    """Task of ``BlockHost.create``."""
    state = spec.seat.take()
    made = spec.fn(dict(spec.payloads))
    count = len(next(iter(made.values()))) if made else 0
    bundle = Bundle(spec.run, {i: {r: blocks[i] for r, blocks in made.items()} for i in range(count)})
    state.bundles[spec.run] = bundle
    return bundle


def take_blocks(spec: Call, bundle: Bundle) -> dict[int, np.ndarray]:
    """Task that hands blocks to the client."""
    spec.seat.take()
    _, slot = spec.sources[0]
    return {r: np.asarray(bundle.slots[slot][r], order="C") for r in spec.payloads}
