"""Tracing per-rank code: once for all ranks, whose blocks have one shape.

Inside :func:`meshtape.shard_map` an array stands for one rank's block. The tracer writes a program of local ops and
collectives, and tracks, for every value, the mesh axes along which it *varies*. Where a value that is the same on all
ranks meets one that varies, the tracer inserts a ``vary``, which costs nothing and which the derivative needs (see
:mod:`.rank_ops`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply, argument_avals, call_site, program_inputs, wrap
from ...arrays.core.errors import MeshError, TracedValueError
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import Program, ProgramBuilder
from ...arrays.ops.elementwise import ADD
from ...autodiff.captures.tracing import Lifted, Refusals
from ...autodiff.tape.backward import same_value
from ..sharding.mesh_protocol import MeshProtocol
from . import rank_ops as ops
from .rank_tracer import RankTracer


class _CurrentTrace(threading.local):
    trace: RankTrace | None = None


current = _CurrentTrace()


class OuterRecorder:
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

    def note_call(self, outs: Sequence[Array], own: bool) -> None:
        self.trace.has_calls = True


class RankTrace(Refusals):
    def __init__(self, mesh: MeshProtocol) -> None:
        self.mesh = mesh
        self.builder = ProgramBuilder()
        self.captured: list[Lifted] = []
        self.found: dict[tuple[int, int], Array] = {}
        self.gathered: dict[int, tuple[Array, Mapping[str, Any]]] = {}  # results of all_gather, and its operands
        self.sums: dict[
            int, tuple[Array, ...]
        ] = {}  # all-reduced sums: their contributions, or the sums that were added
        self.has_calls = False
        self.errors = np.geterr()
        self.open = True

    # ----- the grid ---------------------------------------------------------------------------------------------------

    def group_size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.mesh.sizes[a] for a in axes)

    def index(self, axes: tuple[int, ...]) -> Array:
        """This rank's place along the axes, as a value of the program."""
        return self._emit(ops.AXIS_INDEX, (), {"axes": axes}, self._real(axes))[0]

    def _real(self, axes: Sequence[int]) -> frozenset[int]:
        return frozenset(a for a in axes if self.mesh.sizes[a] > 1)

    # ----- values -----------------------------------------------------------------------------------------------------

    def input(self, aval: ShapeDtype, varying: frozenset[int]) -> Array:
        return wrap(RankTracer(self, self.builder.input(aval), aval, varying))

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
                    f"[shard_map] the function reads an array with {sharding} from around it: pass it as an argument, "
                    "with its placement"
                )
            self.captured.append(Lifted(len(self.captured), x, buf))  # holding both keeps their ids their own
            known = self.found[key] = self.input(ShapeDtype(tuple(buf.shape), buf.dtype), frozenset())
        out = wrap(known._buf)
        out._id = known._id or x._id  # tapes inside know it by its name
        return out

    def axes_of_variation(self, x: Array) -> frozenset[int]:
        return x._buf.varying

    def varied(self, x: Array, axes: tuple[int, ...]) -> Array:
        x = self.lift(x)
        missing = tuple(sorted(self._real(axes) - x._buf.varying))
        if not missing:
            return x
        source = self.gathered.get(x._buf.var)
        if source is not None and set(source[1]["axes"]) == set(missing):
            p = source[1]
            return ops.all_gather(source[0], p["axes"], p["dim"], varying=True)
        return apply(ops.VARY, (x,), {"axes": missing})

    def admit(self, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands as tracers, made to vary along the same axes."""
        lifted = tuple(self.lift(a) if isinstance(a, Array) else a for a in args)
        if isinstance(op, ops.RankOp):
            return lifted
        need = frozenset[int]().union(*(a._buf.varying for a in lifted if isinstance(a, Array)))
        if not need:
            return lifted
        axes = tuple(sorted(need))
        return tuple(self.varied(a, axes) if isinstance(a, Array) else a for a in lifted)

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[RankTracer, ...]:
        if not self.open:
            raise TracedValueError("an array of mt.shard_map is used after the function returned")
        self.refuse_errstate(op)
        varying = frozenset[int]().union(*(a._buf.varying for a in args if isinstance(a, Array)))
        if isinstance(op, ops.RankOp) and (op is ops.VARY or op.collective):
            axes = self._real(params["axes"])
            varying = varying - axes if op.invariant else varying | axes
        outs = self._emit(op, args, params, varying)
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
        return tuple(wrap(RankTracer(self, v, aval, varying)) for v, aval in zip(outs, avals, strict=True))

    def unreduced(self, x: Array) -> Array:
        """The contributions to ``x`` if it is a sum over ranks, to be reduced later with others; else ``x``."""
        parts = self.sums.get(x._buf.var)
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
    state.recorders = (*(OuterRecorder(r) for r in before), _Notes(trace))
    try:
        yield
    finally:
        state.recorders, state.origin = before, origin
        current.trace = None
