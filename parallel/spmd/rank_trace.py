"""Tracing per-rank code: once for all ranks while they are alike, else once for each.

Inside :func:`meshtape.shard_map` an array stands for one rank's block. The tracer writes a program of local ops and
collectives, and tracks, for every value, the mesh axes along which it *varies*. Where a value that is the same on all
ranks meets one that varies, the tracer inserts a ``vary``, which costs nothing and which the derivative needs (see
:mod:`.rank_ops`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply, argument_avals, call_site, program_inputs, wrap
from ...arrays.core.errors import MeshError, ShardingConflict, TracedValueError
from ...arrays.core.op import Op, state
from ...arrays.core.program import Program, ProgramBuilder, freeze
from ...arrays.core.shape_dtype import ShapeDtype
from ...arrays.ops.elementwise import ADD
from ...autodiff.captures.tracing import Lifted
from ...autodiff.tape.backward import same_value
from ..resharding.collective_plans import groups_of
from ..sharding.mesh_protocol import Mesh
from ..sharding.placement import group_of
from ..sharding.rules.elementwise import ELEMENTWISE
from . import rank_ops as ops
from .rank_tracer import RankTracer
from .rendezvous import Meeting, Uneven

NOWHERE: frozenset[int] = frozenset()


class _Current(threading.local):
    trace: RankTrace | None = None


current = _Current()


class Outside:
    """A recorder of the surrounding code. It sees the calls on its own values, but none on tracers of blocks."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def watches(self, x: Array) -> bool:
        return self.recorder.watches(x)

    def record(self, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: tuple[Array, ...], *rest: Any) -> None:
        if not any(isinstance(o._buf, RankTracer) for o in outs):
            self.recorder.record(op, args, bufs, outs, *rest)


class _Notes:
    """A recorder that detects calls with their own derivative (``custom_vjp``) or recomputation (``checkpoint``)."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace

    def watches(self, x: Array) -> bool:
        return False

    def record(self, *call: Any) -> None:
        """Nothing: the trace itself records the call."""

    def note_call(self, outs: Sequence[Array]) -> None:
        self.trace.has_calls = True


class RankTrace:
    """A trace of per-rank code: of all ranks (``rank`` None), or of one, which meets the others at collectives."""

    def __init__(self, mesh: Mesh, rank: int | None = None, meeting: Meeting | None = None) -> None:
        self.mesh, self.rank, self.meeting = mesh, rank, meeting
        self.builder = ProgramBuilder()
        self.varying: dict[int, frozenset[int]] = {}
        self.inputs: set[int] = set()
        self.captured: list[Lifted] = []
        self.found: dict[tuple[int, int], Array] = {}
        self.gathered: dict[int, tuple[Array, Mapping[str, Any]]] = {}  # results of all_gather, and its operands
        self.sums: dict[
            int, tuple[Array, ...]
        ] = {}  # all-reduced sums: their contributions, or the reduced sums that were added
        self.ids: dict[
            int, tuple[Any, ...]
        ] = {}  # names of those values that are the same on all ranks; so are their names
        self.used: list[tuple[tuple[int, ...], Any, Any]] = []  # … of those that ranks use beside values of their own
        self.ragged: frozenset[int] = NOWHERE  # axes along which blocks have different shapes
        self.known: frozenset[int] = NOWHERE  # axes along which Python code knows its index
        self.twins: dict[int, Array] = {}
        self.has_calls = False
        self.last_meeting = 0
        self.open = True

    # ----- the grid ---------------------------------------------------------------------------------------------------

    def group_size(self, axes: tuple[int, ...]) -> int:
        n = 1
        for a in axes:
            n *= self.mesh.sizes[a]
        return n

    def group(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks of this rank's group along the axes."""
        assert self.rank is not None
        return group_of(self.mesh.sizes, axes, self.rank)

    def place(self, axes: tuple[int, ...], *, uneven: bool = True) -> int:
        """This rank's place in its group; 0 in the trace of all ranks, unless the place matters (``uneven``)."""
        if self.rank is not None:
            return self.group(axes).index(self.rank)
        if uneven:
            raise Uneven
        return 0

    def meet(self, what: str, axes: tuple[int, ...], details: Any, payload: Any = None) -> list[Any]:
        """The payloads of all ranks of the group, which must have equal ``details``."""
        if self.meeting is None:
            self.last_meeting += 1
            return [payload] * self.group_size(axes)
        assert self.rank is not None
        self.last_meeting, found = self.meeting.meet(self.rank, self.group(axes), what, (*details, axes), payload)
        return found

    def index(self, axes: tuple[int, ...]) -> Array:
        """This rank's place along the axes, as a value of the program."""
        (out,) = self._emit(ops.AXIS_INDEX, (), {"axes": axes}, self._real(axes))
        out._buf.index_of = axes
        return out

    def send(self, x: Array, axes: tuple[int, ...], to: int) -> None:
        """Send a value to the rank at place ``to`` of the group, without waiting for its :meth:`receive`."""
        assert self.meeting is not None
        assert self.rank is not None
        x = self.varied(x, axes)
        peer = self.group(axes)[to]
        self.builder.add(ops.SEND, (x._buf.var,), {"peer": peer}, [], state.origin, call_site())
        self.meeting.post(self.rank, peer, (x.shape, x.dtype, x._buf.varying))

    def receive(self, axes: tuple[int, ...], source: int) -> Array:
        """The next value that the rank at place ``source`` of the group sent."""
        assert self.meeting is not None
        assert self.rank is not None
        peer = self.group(axes)[source]
        shape, dtype, varying = self.meeting.take(self.rank, peer)
        return self._emit(ops.RECEIVE, (), {"peer": peer, "shape": shape, "dtype": dtype}, varying)[0]

    def look(self, axes: tuple[int, ...]) -> int:
        """This rank's place as a number. From here on Python code may go different ways on different ranks."""
        place = self.place(axes)
        fresh = self._real(axes) - self.known
        if fresh:
            for v in [v for v in self.varying if v not in self.inputs and fresh - self.varying[v]]:
                aval = self.builder.avals[v]
                self.twins[v] = self.varied(wrap(RankTracer(self, v, aval, self.varying[v])), tuple(sorted(fresh)))
            self.known |= fresh
        return place

    def _real(self, axes: Sequence[int]) -> frozenset[int]:
        return frozenset(a for a in axes if self.mesh.sizes[a] > 1)

    # ----- values -----------------------------------------------------------------------------------------------------

    def input(self, aval: ShapeDtype, varying: frozenset[int], ident: Any = None) -> Array:
        var = self.builder.input(aval)
        self.ids[var] = ("in", len(self.inputs) if ident is None else ident)
        self.varying[var] = varying
        self.inputs.add(var)
        return wrap(RankTracer(self, var, aval, varying))

    def lift(self, x: Array) -> Array:
        """A captured array as an input, which is the same on all ranks."""
        buf = x._buf
        if isinstance(buf, RankTracer):
            if buf.builder is not self:
                raise MeshError("an array of one mt.shard_map was used in another: return it, and pass it on")
            return x
        key = (id(x), id(buf))
        known = self.found.get(key)
        if known is None:
            sharding = getattr(buf, "sharding", None)
            if sharding is not None and sharding.layout.shards:
                raise MeshError(
                    f"[shard_map] the function reads an array with {sharding} from around it: pass it as an argument, with "
                    "its placement"
                )
            self.captured.append(Lifted(len(self.captured), x, buf))  # holding both keeps their ids their own
            ident = (buf.shape, buf.dtype, buf.tobytes()) if isinstance(buf, np.ndarray) else (id(x), id(buf))
            known = self.found[key] = self.input(ShapeDtype(tuple(buf.shape), buf.dtype), NOWHERE, ident)
        out = wrap(known._buf)
        out._id = known._id or x._id  # tapes inside know it by its name
        return out

    def axes_of_variation(self, x: Array) -> frozenset[int]:
        return x._buf.varying

    def varied(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The value, made to vary along the axes."""
        x = self.lift(x)
        missing = tuple(sorted(self._real(axes) - x._buf.varying))
        if not missing:
            return x
        twin = self.twins.get(x._buf.var)
        if twin is not None and not self._real(axes) - twin._buf.varying:
            out = wrap(twin._buf)
            out._id = twin._id or x._id  # tapes that watch the value know it by this name
            return out
        source = self.gathered.get(x._buf.var)
        if source is not None and self.meeting is None and set(source[1]["axes"]) == set(missing):
            p = source[1]
            return ops.gather(source[0], p["axes"], p["dim"], varying=True)
        if self.meeting is not None and self.ids.get(x._buf.var, ("in",))[0] == "op":
            self.used.append((missing, self.ids[x._buf.var], x._buf))
        return apply(ops.VARY, (x,), {"axes": missing})

    def settled(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The result of a collective, which is the same on all ranks. If each rank has its own trace, it is made to
        vary here, where all ranks are, so that they meet here in the derivative, too."""
        if self.meeting is not None:
            self.ids[x._buf.var] = ("meeting", self.last_meeting)
            self.twins[x._buf.var] = apply(ops.VARY, (x,), {"axes": tuple(sorted(self._real(axes)))})
        return x

    def differ(self, axes: Sequence[int]) -> None:
        """From here on ranks hold blocks of different shapes along the axes."""
        self.ragged |= self._real(axes)

    def admit(self, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands as tracers, made to vary along the same axes."""
        lifted = tuple(self.lift(a) if isinstance(a, Array) else a for a in args)
        if isinstance(op, ops.RankOp):
            return lifted
        need = self.known.union(*(a._buf.varying for a in lifted if isinstance(a, Array)))
        if self.ragged and not self._stays_same(op, lifted):
            need |= self.ragged
        if not need:
            return lifted
        axes = tuple(sorted(need))
        return tuple(self.varied(a, axes) if isinstance(a, Array) else a for a in lifted)

    def _stays_same(self, op: Op, args: Sequence[Any]) -> bool:
        """Whether a call gives the same result on all ranks although their blocks differ in shape: elementwise, without
        broadcasting. The numbers in it are compared when all ranks are traced."""
        arrays = [a for a in args if isinstance(a, Array)]
        return op in ELEMENTWISE and len({a.shape for a in arrays}) == 1

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[RankTracer, ...]:
        if not self.open:
            raise TracedValueError("an array of mt.shard_map is used after the function returned")
        varying = self.known.union(*(a._buf.varying for a in args if isinstance(a, Array)))
        same = not isinstance(op, ops.RankOp) and self.ragged and self._stays_same(op, args)
        if not isinstance(op, ops.RankOp) and not same:
            varying |= self.ragged
        if op is ops.VARY or op in ops.COLLECTIVES:
            axes = self._real(params["axes"])
            varying = args[0]._buf.varying
            varying = varying - axes if op in ops.INVARIANT_RESULT else varying | axes
        outs = self._emit(op, args, params, varying)
        if same and not self.known and not varying & self.ragged:
            for k, o in enumerate(outs):
                names = tuple(self.ids.get(a._buf.var) if isinstance(a, Array) else freeze(a) for a in args)
                self.ids[o._buf.var] = ("op", op.name, k, names, freeze(params))
        if op is ops.ALL_REDUCE:
            self.sums[outs[0]._buf.var] = (same_value(args[0]),)
        if op is ADD and all(isinstance(a, Array) and a._buf.var in self.sums for a in args):
            self.sums[outs[0]._buf.var] = tuple(map(same_value, args))
        if op is ops.ALL_GATHER:
            self.gathered[outs[0]._buf.var] = (same_value(args[0]), params)
        return tuple(o._buf for o in outs)

    def _emit(
        self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any], varying: frozenset[int]
    ) -> tuple[Array, ...]:
        avals = op.avals(argument_avals(args), params)
        inputs = program_inputs(args, lambda a: a._buf.var)
        outs = self.builder.add(op, inputs, params, avals, state.origin, call_site())
        found = []
        for v, aval in zip(outs, avals, strict=True):
            self.varying[v] = varying
            found.append(wrap(RankTracer(self, v, aval, varying)))
        return tuple(found)

    def unreduced(self, x: Array) -> Array:
        """The contributions to ``x`` if it is a sum over ranks, to be reduced later with others; else ``x``."""
        parts = self.sums.get(x._buf.var) if self.meeting is None else None
        if parts is None or len(parts) == 1:
            return x if parts is None else parts[0]
        return apply(ADD, tuple(map(self.unreduced, parts)))

    def build(self, outputs: Sequence[Array]) -> Program:
        self.open = False
        return self.builder.build([o._buf.var for o in outputs])


@contextmanager
def tracing(trace: RankTrace) -> Iterator[None]:
    """A context that records calls on values of ``trace``. Recorders of the surrounding code see none of them."""
    if current.trace is not None:
        raise MeshError("[shard_map] inside another mt.shard_map: the ranks' code is per-rank code already")
    before, origin = state.recorders, state.origin
    current.trace = trace
    state.origin = None  # calls inside name themselves
    state.recorders = (*(Outside(r) for r in before), _Notes(trace))
    try:
        yield
    finally:
        state.recorders, state.origin = before, origin
        current.trace = None


def trace_all(
    mesh: Mesh,
    boxes: Sequence[Sequence[ShapeDtype]],
    varying: Sequence[frozenset[int]],
    body: Callable[[RankTrace, Sequence[Array]], Sequence[Array]],
    *,
    apart: bool = False,
) -> list[tuple[RankTrace, list[Array]]]:
    """The traces of ``body`` on blocks: one for all ranks, or one a rank (``apart``: always so). ``boxes[i][rank]`` is the block of
    argument ``i``."""

    ragged = frozenset(
        a
        for a, n in enumerate(mesh.sizes)
        if n > 1 and any(b[r] != b[g[0]] for b in boxes for g in groups_of(mesh.sizes, (a,)) for r in g)
    )

    def one(rank: int | None, meeting: Meeting | None) -> tuple[RankTrace, list[Array]]:
        trace = RankTrace(mesh, rank, meeting)
        trace.ragged = ragged
        arguments = [trace.input(b[rank or 0], v) for b, v in zip(boxes, varying, strict=True)]
        with tracing(trace):
            return trace, [trace.lift(x) for x in body(trace, arguments)]

    if not apart and all(b == blocks[0] for blocks in boxes for b in blocks):
        try:
            return [one(None, None)]
        except Uneven:
            pass
    meeting = Meeting(mesh.size)
    found = meeting.run([lambda r=r: one(r, meeting) for r in range(mesh.size)])
    _compare([t for t, _ in found])
    return found


def _compare(traces: Sequence[RankTrace]) -> None:
    """Raise where ranks differ in values that each computed for itself and the code uses as the same on all."""
    mesh = traces[0].mesh
    for a in range(len(mesh.sizes)):
        for group in groups_of(mesh.sizes, (a,)):
            lists = [[ident for axes, ident, _ in traces[r].used if a in axes] for r in group]
            for r, one in zip(group, lists, strict=True):
                if one != lists[0]:
                    raise ShardingConflict(
                        f"[shard_map] ranks {group[0]} and {r} compute different things from what a collective along "
                        f"{mesh.names[a]!r} gave them all (perhaps with the length of their own block) and go on with it: use such "
                        "numbers before the collective, or mt.axis_size and whole lengths after it"
                    )
