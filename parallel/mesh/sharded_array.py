"""Arrays that are split over a mesh, and the tape of their pending calls.

An op on a sharded array is only recorded: its shape, dtype and sharding are known at once, and errors in them are
raised at once. The recorded calls run together, once, when a value is needed. Nothing is computed twice while an array
is alive, and dropped arrays are not computed at all. The sharding of an array never changes: a pending sum stays one
when it is computed, even where the program reduced it for another call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, argument_avals, call_site, program_inputs, wrap
from ...arrays.core.errors import MeshError
from ...arrays.core.formatting import human_bytes
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import Entry, ProgramBuilder, freeze, simplify
from ...arrays.indexing.indexing import GETITEM, SCATTER
from ...arrays.ops.manipulation import BROADCAST_TO
from ..execution.runtime import HostValue
from ..partition.partition import partition
from ..sharding.mesh_protocol import MeshProtocol
from ..sharding.placement import REPLICATED, Layout, Sharding
from ..sharding.propagate import Hints, propagate
from ..sharding.splat import repeated_element
from .dask_export import as_collection, persisted
from .mesh_transfer import TRANSFER, assembled, joined
from .visualize import blocks_html

# A local array beside sharded ones is copied to every rank. Above this size mt.distribute must ask for it, unless the
# array is one repeated value.
IMPLICIT_LIMIT = 1 << 20

# At this number of recorded calls they run without being asked for, which bounds the length of a program.
PENDING_LIMIT = 5000

# ``for v in x``: each ``x[i]`` by itself would be a program and a request to a worker: milliseconds, for eight bytes.
# So small elements are fetched many at a time. Each is an array on the mesh like ``x[i]``, whose value is in this
# process already.

FEW_ELEMENTS = 8
"""Elements of an array that are indexed one by one: ``a, b = x`` waits for nothing."""

LARGEST_FETCHED = 1 << 20
"""Bytes of an element above which it stays where it is."""

FETCH_WINDOW = 16 << 20
"""Bytes that are fetched at a time."""


class ShardedBuffer(Deferred):
    """Blocks of an array: held by the ranks of a mesh (``handle``), or still to be computed (``var``)."""

    __slots__ = ("__weakref__", "collection", "dtype", "failure", "handle", "layout", "mesh", "shape", "var")
    priority = 1

    def __init__(
        self, mesh: MeshProtocol, layout: Layout, aval: ShapeDtype, *, handle: Any = None, var: int | None = None
    ) -> None:
        self.mesh, self.layout, self.handle, self.var = mesh, layout, handle, var
        self.shape, self.dtype = aval
        self.failure: str | None = None  # why there is neither
        self.collection: Any = None  # the dask.array of the blocks, once it was asked for

    @property
    def sharding(self) -> Sharding:
        return Sharding.of(self.mesh, self.layout)

    @property
    def device(self) -> MeshProtocol:
        return self.mesh

    @property
    def host(self) -> MeshProtocol:
        return self.mesh

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShardedBuffer, ...]:
        if op is TRANSFER:
            target = params["target"]
            handle = assembled([(self, (0,) * len(self.shape))], self.shape, target)
            return (ShardedBuffer(target.mesh, target.layout, self.aval, handle=handle),)
        return self.mesh.pending.emit(op, args, params)

    def computed(self) -> ShardedBuffer:
        """Compute it if it is pending. Returns itself, with a handle."""
        if self.handle is None:
            self.check_alive()
            self.mesh.pending.run()
        return self

    def check_alive(self) -> None:
        """Raise :class:`MeshError` if the run that was to compute this failed."""
        if self.failure is not None:
            raise MeshError(f"this array was never computed, as the run that would have made it failed: {self.failure}")

    def concrete(self) -> np.ndarray:
        """The whole array in this process. Pending calls are computed, contributions are reduced."""
        self.computed()
        if isinstance(self.handle, HostValue):
            return self.handle.value
        if self.layout.partials:
            return self.mesh.moved(self, self.layout.reduced()).concrete()
        sharding = self.sharding
        first: dict[Any, int] = {}
        for rank in range(self.mesh.size):
            first.setdefault(sharding.box(self.shape, rank), rank)
        blocks = self.mesh.runtime.fetch(self.handle, sorted(first.values()))
        if len(first) == 1:
            return next(iter(blocks.values()))
        return joined(self.shape, self.dtype, ((box, blocks[rank]) for box, rank in first.items()))

    def elements(self, x: Array) -> Iterator[Array]:
        return elements(x, self.mesh)

    def dask(self) -> Any:
        return as_collection(self)

    def dask_persisted(self) -> tuple[Any, tuple[Any, ...]]:
        """See ``__dask_postpersist__``."""
        return persisted(self)

    def blocks_html(self) -> str:
        """The blocks drawn over the mesh, for notebooks."""
        return blocks_html(self.shape, self.sharding)


class Pending:
    """The recorded calls of a mesh that have not yet run."""

    def __init__(self, mesh: MeshProtocol) -> None:
        self.mesh = mesh
        self._lock = threading.RLock()
        self._programs: dict[Any, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._builder = ProgramBuilder()
        self._inputs: dict[int, tuple[int, ShardedBuffer]] = {}  # id of a buffer → variable; holds the buffer
        self._layouts: dict[int, Layout] = {}
        self._hints = Hints()
        self._alive: weakref.WeakValueDictionary[int, ShardedBuffer] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._builder.entries)

    def _var(self, op: Op, a: Array) -> int:
        buf = a._buf
        if not isinstance(buf, ShardedBuffer):
            one = None
            if isinstance(buf, Deferred) or (a.nbytes > IMPLICIT_LIMIT and (one := repeated_element(buf)) is None):
                raise MeshError(
                    f"[{op.name}] a local array of shape {a.shape} ({human_bytes(a.nbytes)}) beside arrays on "
                    f"{self.mesh}: "
                    "only arrays up to 1 MiB are copied to every rank by themselves; use mt.distribute(x, mesh, …)"
                )
            return self._lifted(buf, lambda: np.asarray(a._concrete())) if one is None else self._spread(buf, one)
        if buf.mesh is not self.mesh:
            raise two_meshes(op.name, self.mesh, buf.mesh)
        if buf.handle is None:
            buf.check_alive()
            return buf.var
        known = self._inputs.get(id(buf))
        return known[0] if known is not None else self._input(id(buf), buf, buf)

    def _lifted(self, buf: Any, value_of: Callable[[], np.ndarray]) -> int:
        """The input of a value that stands for a local buffer."""
        known = self._inputs.get(id(buf))
        if known is not None:
            return known[0]
        value = value_of()
        handle = HostValue(value, REPLICATED, self.mesh.sizes)
        lifted = ShardedBuffer(self.mesh, REPLICATED, ShapeDtype(value.shape, value.dtype), handle=handle)
        return self._input(id(buf), lifted, (lifted, buf))

    def _spread(self, buf: np.ndarray, one: np.ndarray) -> int:
        """Record a large array that is ``one`` everywhere as made by the ranks."""
        source, aval = self._lifted(buf, lambda: one), ShapeDtype(buf.shape, buf.dtype)
        (v,) = self._builder.add(BROADCAST_TO, (source,), {"shape": buf.shape}, (aval,), state.origin, call_site())
        self._layouts[v] = REPLICATED
        return v

    def _input(self, key: int, buf: ShardedBuffer, hold: Any) -> int:
        var = self._builder.input(buf.aval)
        self._inputs[key] = (var, hold)
        self._layouts[var] = buf.layout
        return var

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[ShardedBuffer, ...]:
        avals = argument_avals(args)
        out_avals = op.avals(avals, params)
        with self._lock:
            inputs = program_inputs(args, lambda a: self._var(op, a))
            layouts = [self._layouts[v] if isinstance(v, int) else None for v in inputs]
            placed = self._placed(op, avals, out_avals, inputs, layouts, params)
            outs = self._builder.add(op, inputs, params, out_avals, state.origin, call_site())
            buffers = []
            for v, aval, layout in zip(outs, out_avals, placed, strict=True):
                self._layouts[v] = layout
                b = self._alive[v] = ShardedBuffer(self.mesh, layout, aval, var=v)
                buffers.append(b)
            if len(self._builder.entries) >= PENDING_LIMIT:
                self.run()
        return tuple(buffers)

    def _placed(
        self,
        op: Op,
        avals: tuple[Any, ...],
        out_avals: tuple[ShapeDtype, ...],
        inputs: tuple[Any, ...],
        layouts: Sequence[Layout | None],
        params: Mapping[str, Any],
    ) -> tuple[Layout, ...]:
        if op is GETITEM or op is SCATTER:
            entry = Entry(op, inputs, (), params)
            found = propagate(op, avals, out_avals, params, layouts, self.mesh.sizes)
            self.mesh.check_moves(op, avals, layouts, found)
            return self._hints.placed(entry, found, layouts, self.mesh.sizes).results
        return self.mesh.place_layouts(op, avals, out_avals, layouts, params)

    def run(self) -> None:
        """Compute every pending array that is still referenced, as one program."""
        with self._lock:
            builder, inputs, layouts = self._builder, self._inputs, self._layouts
            wanted = [(v, b) for v, b in sorted(self._alive.items()) if b.handle is None]
            self._reset()
            if not wanted:
                return
            outputs = tuple(v for v, _ in wanted)
            key = (
                tuple((v, builder.avals[v], layouts[v]) for v in builder.inputs),
                tuple(map(_key_of, builder.entries)),
                tuple((v, b.layout) for v, b in wanted),
            )
            try:
                ready = self._programs.get(key)
                if ready is None:
                    program = simplify(builder.build(outputs))
                    rank_program = partition(
                        program, layouts, self.mesh.sizes, wanted=[b.layout for _, b in wanted], name="program"
                    )
                    if len(self._programs) > 1000:
                        self._programs.clear()
                    ready = self._programs[key] = self.mesh.runtime.load(rank_program, self.mesh.names)
                buffers = [hold[0] if isinstance(hold, tuple) else hold for _, hold in inputs.values()]
                handles = ready([b.handle for b in buffers])
            except BaseException as e:
                self._lost(wanted, e)
                raise
            for (_, b), handle in zip(wanted, handles, strict=True):
                b.handle, b.var = handle, None

    def _lost(self, wanted: Sequence[tuple[int, ShardedBuffer]], e: BaseException) -> None:
        """Mark the arrays that wait for failed calls with the error."""
        for _, b in wanted:
            b.var, b.failure = None, f"{type(e).__name__}: {e}"

    def close(self) -> None:
        """Drop the recorded calls and their inputs."""
        with self._lock:
            wanted = [(v, b) for v, b in self._alive.items() if b.handle is None]
            self._programs.clear()
            self._reset()
            self._lost(wanted, MeshError("this mesh was closed"))


def _key_of(e: Entry) -> Any:
    return e.op, tuple(i if isinstance(i, int) else freeze(i.value) for i in e.inputs), e.outputs, freeze(e.params)


def two_meshes(op: str, a: MeshProtocol, b: MeshProtocol) -> MeshError:
    return MeshError(
        f"[{op}] arrays of two meshes in one op: {a} and {b}{_alike(a, b)}; move one first, with mt.reshard(x, "
        "y.sharding)"
    )


def another_mesh(what: str, theirs: MeshProtocol, ours: MeshProtocol) -> MeshError:
    return MeshError(f"{what} is on another mesh: {theirs}, not {ours}{_alike(theirs, ours)}")


def _alike(a: MeshProtocol, b: MeshProtocol) -> str:
    return " (another object, though it looks alike: make one mesh and use it for all)" if repr(a) == repr(b) else ""


def sharded_array(mesh: MeshProtocol, layout: Layout, aval: ShapeDtype, handle: Any) -> Array:
    return wrap(ShardedBuffer(mesh, layout, aval, handle=handle))


def handles_of(buffers: Sequence[ShardedBuffer]) -> list[Any]:
    """The handles of arrays; pending ones are computed."""
    return [b.computed().handle for b in buffers]


# ----- elements, one after the other ----------------------------------------------------------------------------------


def elements(x: Array, mesh: MeshProtocol) -> Iterator[Array]:
    """``x[0]``, ``x[1]``, … of an array on a mesh: recorded calls under a trace, else fetched in windows if small."""
    count, nbytes = x.shape[0], x.nbytes // max(1, x.shape[0])
    if count <= FEW_ELEMENTS or nbytes > LARGEST_FETCHED or state.recorders:
        return (x[i] for i in range(count))
    return _fetched(x, mesh, max(1, FETCH_WINDOW // max(1, nbytes)))


def _fetched(x: Array, mesh: MeshProtocol, window: int) -> Iterator[Array]:
    layout = x[0]._buf.layout.reduced()  # recorded, and never computed, as it is dropped
    aval = ShapeDtype(x.shape[1:], x.dtype)
    here, start, values = None, 0, np.empty(0)
    for i in range(x.shape[0]):
        if state.recorders:
            yield x[i]
            continue
        if x._buf is not here or i == start + len(values):  # (it was written to)
            whole = window >= x.shape[0]
            here, start = x._buf, 0 if whole else i
            values = (x if whole else x[i : i + window])._concrete()
        # A copy, so that one kept element does not keep all.
        value = HostValue(np.array(values[i - start], copy=True), layout, mesh.sizes)
        yield sharded_array(mesh, layout, aval, value)
