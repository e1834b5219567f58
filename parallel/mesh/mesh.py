"""The mesh: an n-dimensional grid of ranks with named axes, and its interface to other packages."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.devices import Device
from ...arrays.core.dispatch import wrap
from ...arrays.core.errors import MeshError
from ...arrays.core.op import Op, ShapeDtype, not_recording
from ...arrays.core.program import Const, Program, ProgramBuilder
from ..base.device_memory import memory_of
from ..execution.devices import local_device
from ..execution.runtime import HostValue, LocalRuntime, Runtime, called
from ..partition.explicit import is_explicit, refuse_moves, refuse_moves_within
from ..partition.partition import partition
from ..partition.rank_program import RankProgram
from ..sharding import rules  # noqa: F401  # every op's factor mapping is registered by the import
from ..sharding.ops import RESHARD
from ..sharding.placement import REPLICATED, Layout, Sharding
from ..sharding.propagate import Placed, propagate
from ..sharding.splat import spread
from ..spmd.per_rank_op import ShardMapOp
from .sharded_array import IMPLICIT_LIMIT, Pending, ShardedBuffer, another_mesh, handles_of, sharded_array, two_meshes
from .visualize import mesh_html

MOST_RANKS = 1 << 20
"""The most ranks; beyond it a plan alone is larger than a process's memory."""


class Mesh:
    """A grid of ranks with named axes.

    Parameters
    ----------
    axes
        Names and lengths, the outermost first: ``{"data": 2, "model": 4}`` has eight ranks, numbered in C order.
    client
        A ``distributed.Client``: the ranks then live on its workers, in consecutive runs. Without it all ranks live in
        this process, which needs no cluster and computes the same numbers.
    workers
        Addresses of the workers to use; all that the scheduler knows by default.
    device
        What the ranks compute on: ``"cpu"``, or ``"cuda"`` for blocks on GPUs. A worker computes on one GPU, which its
        ranks share: the first that it sees and the fewest others use (dask-cuda's workers: their own), or the N-th for
        ``"cuda:N"``. By default GPUs where each worker has one to itself, else the CPU; without a client, the default
        device of this process.

    Raises
    ------
    MeshError
        For axes that are no mesh, and more than 2**20 ranks.
    ClusterError
        When the scheduler or a worker cannot be used; the message says why.
    DeviceError, BackendError
        Where a worker has no such device; CuPy or a driver is missing.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 4})
    >>> mesh
    Mesh(data=2, model=4)
    >>> mesh.size
    8
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        *,
        client: Any = None,
        workers: Sequence[str] | None = None,
        device: str | Device | None = None,
    ) -> None:
        if not isinstance(axes, Mapping):
            raise MeshError(f"a mesh is made of named axes such as {{'data': 2}}, got {axes!r}")
        for name, n in axes.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"the name of a mesh axis must be an identifier, got {name!r}")
            try:
                good = operator.index(n) >= 1
            except TypeError:
                good = False
            if not good:
                raise MeshError(f"mesh axis {name!r} must have a length of at least 1, got {n!r}")
        self.names: tuple[str, ...] = tuple(axes)
        self.sizes: tuple[int, ...] = tuple(map(operator.index, axes.values()))
        self.size: int = math.prod(self.sizes)
        if self.size > MOST_RANKS:
            raise MeshError(f"a mesh has at most {MOST_RANKS:,} ranks, got {self.size:,}: {dict(axes)}")
        self.runtime: Runtime
        if client is None:
            if workers is not None:
                raise MeshError("workers=… names workers of a cluster: pass client=… too")
            self.runtime = LocalRuntime(self.sizes, memory_of(local_device(device)))
        else:
            from ..dask.progress import follow
            from ..dask.runtime import DaskRuntime

            self.runtime = DaskRuntime(self.size, self.names, client, workers, device)
            follow(client)
        self.pending = Pending(self)
        self._parts: dict[tuple[tuple[str, int], ...], Mesh] = {}

    # ----- the grid ---------------------------------------------------------------------------------------------------

    def axis(self, name: str) -> int:
        """Number of the axis called ``name``. Raises :class:`MeshError` for an unknown name."""
        try:
            return self.names.index(name)
        except ValueError:
            raise MeshError(f"{self} has no axis {name!r}: its axes are {', '.join(map(repr, self.names))}") from None

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank along each axis."""
        if not 0 <= rank < self.size:
            raise MeshError(f"{self} has ranks 0 to {self.size - 1}, got {rank!r}")
        return tuple(int(c) for c in np.unravel_index(rank, self.sizes)) if self.sizes else ()

    def submesh(self, **places: int) -> Mesh:
        """The part of the mesh at these places along the named axes, with the axes that are left, on the workers of its
        ranks.

        It is the same object each time, and closed with this mesh.

        >>> import meshtape as mt
        >>> mt.Mesh({"pipe": 2, "data": 3}).submesh(pipe=1)
        Mesh(data=3)
        """
        for name, i in places.items():
            n = self.sizes[self.axis(name)]
            if not isinstance(i, SupportsIndex) or not -n <= operator.index(i) < n:
                raise MeshError(f"{self} has places 0 to {n - 1} along axis {name!r}, got {i!r}")
        key = tuple(sorted((name, i % self.sizes[self.axis(name)]) for name, i in places.items()))
        found = self._parts.get(key)
        if found is None:
            fixed = {self.axis(name): i for name, i in key}
            ranks = [r for r in range(self.size) if all(self.coordinates(r)[a] == i for a, i in fixed.items())]
            axes = {n: s for a, (n, s) in enumerate(zip(self.names, self.sizes, strict=True)) if a not in fixed}
            if isinstance(self.runtime, LocalRuntime):
                found = Mesh(axes, device=self.runtime.memory.name)
            else:
                workers = list(dict.fromkeys(self.runtime.addresses[self.runtime.homes[r]] for r in ranks))
                found = Mesh(axes, client=self.runtime.client, workers=workers, device=self.runtime.device)
            self._parts[key] = found
        return found

    def describe(self) -> dict[str, int]:
        """Axis names and lengths, in order."""
        return dict(zip(self.names, self.sizes, strict=True))

    def close(self, *, wait: bool = True) -> None:
        """Free everything that the mesh holds on its workers. Arrays on it cannot be used afterwards.

        ``wait=False`` gives up runs in flight, for a mesh that has lost a worker.
        """
        meshes = self._all_parts()
        if not wait:  # of all parts at first, as they wait for each other
            for m in meshes:
                m.runtime.abandon()
        for m in meshes:
            m.runtime.close()
            if not isinstance(m.runtime, LocalRuntime):  # which has nothing to give back: its arrays stay
                m.pending.close()

    def _all_parts(self) -> list[Mesh]:
        return [m for part in self._parts.values() for m in part._all_parts()] + [self]

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any = None) -> Mesh:
        return self  # known by identity: arrays of a copy would lie on another mesh

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        raise MeshError(
            f"{self} has connections and blocks of this process, and cannot be pickled: make a mesh where it is "
            "needed, keep what arrays have with mt.save, and let functions that are sent to workers take local arrays"
        )

    def __repr__(self) -> str:
        where = [] if isinstance(self.runtime, LocalRuntime) else [str(self.runtime)]
        where += [placed] if (placed := self.runtime.placed()) is not None else []
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))
        return f"Mesh({axes})" + (f" on {', '.join(where)}" if where else "")

    def _repr_html_(self) -> str:
        return mesh_html(self)

    # ----- programs (ProgramHost) -------------------------------------------------------------------------------------

    def place_layouts(
        self,
        op: Op,
        avals: Sequence[Any],
        out_avals: Sequence[ShapeDtype],
        layouts: Sequence[Layout | None],
        params: Mapping[str, Any],
    ) -> tuple[Layout, ...]:
        """Layouts of the results of a call."""
        if op is RESHARD:
            return (params["layout"],)
        if isinstance(op, ShardMapOp):
            return params["code"].out_layouts
        placed = propagate(op, avals, out_avals, params, layouts, self.sizes)
        if not placed.lost or op.decompose is None or placed.rule.choice:
            self.check_moves(op, avals, layouts, placed)
            return placed.results
        # The op will be decomposed: the layouts of its results are found by partitioning the decomposition.
        builder = ProgramBuilder()
        inputs = [builder.input(a) if isinstance(a, ShapeDtype) else Const(a) for a in avals]
        program = builder.build(builder.add(op, inputs, params, out_avals))
        given = {v: layout for v, layout in zip(inputs, layouts, strict=True) if isinstance(v, int)}
        done = partition(program, given, self.sizes, settle=False)
        if is_explicit():
            refuse_moves_within(op.name, done, self.names)
        return tuple(done.layouts[v] for v in done.outputs)

    def check_moves(self, op: Op, avals: Sequence[Any], layouts: Sequence[Layout | None], placed: Placed) -> None:
        """Raise :class:`ShardingConflict` where a call moves blocks and :func:`explicit_sharding` is in force."""
        if is_explicit():
            refuse_moves(op.name, avals, layouts, placed, self.sizes, self.names)

    def place(
        self, op: Op, avals: Sequence[Any], shardings: Sequence[Any], params: Mapping[str, Any]
    ) -> tuple[Sharding, ...]:
        """Shardings of the results of a call; see ``ProgramHost``."""
        layouts = []
        for a, s in zip(avals, shardings, strict=True):
            if s is not None and s.mesh is not self:
                raise two_meshes(op.name, self, s.mesh)
            layouts.append((s.layout if s is not None else REPLICATED) if isinstance(a, ShapeDtype) else None)
        found = self.place_layouts(op, avals, op.avals(tuple(avals), params), layouts, params)
        return tuple(Sharding.of(self, layout) for layout in found)

    def prepare(
        self, program: Program, shardings: Sequence[Any], name: str = "compiled"
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """The program partitioned and loaded; see ``ProgramHost``."""
        load, outs, constants = self.loaded(program, shardings, name)

        def run(buffers: Sequence[Any]) -> list[Any]:
            sharded = [self._buffer(b, "an argument of the compiled function") for b in buffers]
            handles = load(handles_of([*sharded, *constants]))
            return [ShardedBuffer(self, lay, a, handle=h) for (lay, a), h in zip(outs, handles, strict=True)]

        return run

    def loaded(
        self, program: Program, shardings: Sequence[Any], name: str
    ) -> tuple[Callable[..., list[Any]], list[tuple[Layout, ShapeDtype]], list[ShardedBuffer]]:
        """The program partitioned and loaded: its function of handles, the layouts and avals of its results, and its
        constants."""
        p, constants = self._partitioned(program, shardings, name)
        return self.runtime.load(p, self.names), [(p.layouts[v], p.avals[v]) for v in p.outputs], constants

    def rank_program(self, program: Program, shardings: Sequence[Any]) -> RankProgram:
        """The partitioned form of a program, as it would run; for :func:`explain`."""
        return self._partitioned(program, shardings, "program")[0]

    def _partitioned(
        self, program: Program, shardings: Sequence[Any], name: str
    ) -> tuple[RankProgram, list[ShardedBuffer]]:
        program = spread(program, IMPLICIT_LIMIT)
        constants = [self._buffer(c, "a constant of the compiled function") for c in program.constants.values()]
        layouts = {v: s.layout if s is not None else REPLICATED for v, s in zip(program.inputs, shardings, strict=True)}
        layouts.update({v: b.layout for v, b in zip(program.constants, constants, strict=True)})
        return partition(program, layouts, self.sizes, name=name), constants

    def _buffer(self, buf: Any, what: str) -> ShardedBuffer:
        if isinstance(buf, ShardedBuffer):
            if buf.mesh is not self:
                raise another_mesh(what, buf.mesh, self)
            return buf
        host = np.asarray(wrap(buf)._concrete())
        return ShardedBuffer(
            self,
            REPLICATED,
            ShapeDtype(host.shape, host.dtype),
            handle=HostValue(host, REPLICATED, self.sizes),
        )

    def replicate(self, value: Array) -> Array:
        """The value on every rank."""
        return value if isinstance(value._buf, ShardedBuffer) else wrap(self._buffer(value._buf, "a value"))

    def moved(self, buf: ShardedBuffer, layout: Layout) -> ShardedBuffer:
        """The same value in another layout."""
        with not_recording():
            (out,) = self.pending.emit(RESHARD, (wrap(buf),), {"layout": layout})
        return out

    # ----- blocks (BlockHost) -----------------------------------------------------------------------------------------

    def settle(self, arrays: Sequence[Array]) -> list[Array]:
        """Equal arrays whose values are computed and whose shardings are not partial."""
        buffers = [self._buffer(a._buf, "an array") for a in arrays]
        for b in buffers:
            b.computed()
        done = [self.moved(b, b.layout.reduced()) if b.layout.partials else b for b in buffers]
        handles_of(done)
        return [wrap(b) for b in done]

    def run_on_blocks(self, fn: Any, arrays: Sequence[Array], payloads: Mapping[int, Any]) -> list[Any]:
        """See ``BlockHost``."""
        buffers = [self._buffer(a._buf, "an array") for a in arrays]
        return self.runtime.call(fn, handles_of(buffers), payloads)

    def create(self, fn: Any, payloads: Mapping[int, Any], specs: Sequence[Any]) -> list[Array]:
        """See ``BlockHost``."""
        if set(payloads) != set(range(self.size)):
            raise MeshError(f"create needs a payload for each of the {self.size} ranks, got {sorted(payloads)}")
        arrays = [(ShapeDtype(tuple(shape), np.dtype(dtype)), sharding.layout) for shape, dtype, sharding in specs]
        self.runtime.check_memory(called(fn), arrays, self.sizes)
        handles = self.runtime.create(fn, payloads, len(specs))
        return [sharded_array(self, lay, a, handle) for (a, lay), handle in zip(arrays, handles, strict=True)]
