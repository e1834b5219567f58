"""Traced per-rank code as one op: its program, operands and results, and its derivative.

For the tape, ``mt.compile`` and the pending program of a mesh, a call of per-rank code is one call of one op. The
partitioner inlines it into the rank program (:func:`lower`), where equal calls are shared. So the derivative repeats
the calls of the forward pass, but reuses their results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, apply, made, wrap
from ...arrays.core.errors import GradientError, ShardingConflict
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import simplify
from ...arrays.ops.creation import zeros
from ...arrays.ops.elementwise import where
from ...autodiff.captures.tracing import Lifted
from ...autodiff.rules import defvjp_all
from ...autodiff.tape.tape import Tape, is_differentiable
from ..sharding.mesh_protocol import MeshProtocol
from ..sharding.placement import REPLICATED, Layout, block_box, make_layout
from . import rank_ops as ops
from .rank_trace import RankTrace, tracing

Body = Callable[[RankTrace, Sequence[Array]], Sequence[Array]]


class TracedShardMap:
    """Traced per-rank code.

    ``operands`` says which operands of the call the inputs of its ``program`` are. The operands are the arguments,
    followed by captured arrays (``captured``).
    """

    def __init__(
        self,
        name: str,
        mesh: MeshProtocol,
        in_avals: Sequence[ShapeDtype],
        in_layouts: Sequence[Layout],
        out_layouts: Callable[[int, frozenset[int]], Layout],
        body: Body,
        what: Callable[[int], str],
        is_derivative: bool = False,
    ) -> None:
        self.is_derivative = is_derivative
        self.name, self.mesh, self.body = name, mesh, body
        self.count = len(in_avals)
        trace = RankTrace(mesh)
        blocks = [self._block(a, lay, i) for i, (a, lay) in enumerate(zip(in_avals, in_layouts, strict=True))]
        arguments = [trace.input(b, self._varying(lay)) for b, lay in zip(blocks, in_layouts, strict=True)]
        with tracing(trace):
            outs = []
            results = body(trace, arguments)
            trace.check_refusals()
            for i, x in enumerate(map(trace.lift, results)):
                layout = out_layouts(i, x._buf.varying)  # results vary along the axes where they are split or pending
                outs.append(trace.varied(x, tuple(sorted(self._varying(layout)))))
        self.has_calls = trace.has_calls
        self.captured: list[Lifted] = []
        found: dict[Any, int] = {}
        for c in trace.captured:
            if found.setdefault(self._key_of(c), self.count + len(self.captured)) == self.count + len(self.captured):
                self.captured.append(c)
        self.operands = (*range(self.count), *(found[self._key_of(c)] for c in trace.captured))
        self.in_avals = (*in_avals, *(ShapeDtype(tuple(c.buf.shape), c.buf.dtype) for c in self.captured))
        self.in_layouts = (*in_layouts, *(REPLICATED for _ in self.captured))
        self.out_layouts = tuple(out_layouts(i, x._buf.varying) for i, x in enumerate(outs))
        for i, (layout, x) in enumerate(zip(self.out_layouts, outs, strict=True)):
            self._check_replicated(layout, x, what(i))
        self.out_avals = tuple(
            self._whole(x, lay, what(i)) for i, (x, lay) in enumerate(zip(outs, self.out_layouts, strict=True))
        )
        self.program = simplify(trace.build(outs))
        self._backward: dict[Any, TracedShardMap] = {}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def _key_of(self, c: Lifted) -> Any:
        """The key by which captured arrays are merged: the value for a derivative's constants, else the identity."""
        if self.is_derivative and isinstance(c.buf, np.ndarray):
            return c.buf.shape, c.buf.dtype, c.buf.tobytes()
        return id(c.array), id(c.buf)

    def _block(self, aval: ShapeDtype, layout: Layout, i: int) -> ShapeDtype:
        """The block of an argument, which must have one shape on all ranks."""
        for dim, axes in layout.shards:
            n = math.prod(self.mesh.sizes[a] for a in axes)
            if aval.shape[dim] % n:
                raise ShardingConflict(
                    f"[{self.name}] argument {i}: dimension {dim} of length {aval.shape[dim]} is divided over {n} "
                    f"ranks, which all run the same code on blocks of one shape: pad it to a multiple of {n}, or write "
                    "this with functions of whole arrays"
                )
        return ShapeDtype(block_box(layout, self.mesh.sizes, aval.shape, 0).shape, aval.dtype)

    def _varying(self, layout: Layout) -> frozenset[int]:
        axes = [a for _, s in layout.shards for a in s] + [a for a, _ in layout.partials]
        return frozenset(a for a in axes if self.mesh.sizes[a] > 1)

    # ----- results ----------------------------------------------------------------------------------------------------

    def _check_replicated(self, layout: Layout, x: Array, what: str) -> None:
        """Raise where a result is declared replicated along an axis on which ranks may differ."""
        wrong = sorted(x._buf.varying - self._varying(layout))
        if wrong:
            names = ", ".join(repr(self.mesh.names[a]) for a in wrong)
            raise ShardingConflict(
                f"[{self.name}] {what} is to be Replicate() along {names}, but there ranks may hold different values: "
                "reduce it (mt.all_reduce, mt.all_gather, mt.broadcast), or give it Shard(dim) or Partial('sum') "
                f"along {names}"
            )

    def _whole(self, block: Array, layout: Layout, what: str) -> ShapeDtype:
        shape = list(block.shape)
        for dim, axes in layout.shards:
            if not 0 <= dim < len(shape):
                raise ShardingConflict(
                    f"[{self.name}] {what} has blocks of shape {block.shape}, and no dimension {dim} to be split along"
                )
            shape[dim] *= math.prod(self.mesh.sizes[a] for a in axes)
        return ShapeDtype(tuple(shape), block.dtype)

    # ----- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, arguments: Sequence[Array]) -> list[Array]:
        if not self.out_avals:
            return []
        given = [*arguments, *(made(c.current()) for c in self.captured)]
        operands = [self._placed(x) for x in given]
        if not any(isinstance(x._buf, Deferred) and x._buf.host is self.mesh for x in operands):
            operands.append(
                made(self.mesh.replicate(made(wrap(np.zeros((), np.int8)))))
            )  # so that the call goes to the mesh
        op = shard_map_op(len(self.out_avals))
        out = apply(op, tuple(operands), {"code": self})
        return [out] if op.nout == 1 else list(out)

    def _placed(self, x: Array) -> Array:
        if isinstance(x._buf, Deferred) or any(r.watches(x) for r in state.recorders):
            return x
        return self.mesh.replicate(x)

    # ----- derivative -------------------------------------------------------------------------------------------------

    def backward(self, operands: Sequence[Array], seeds: Sequence[Array | None]) -> list[Array | None]:
        # A derivative reads constants of rules beside its arguments. Nobody else knows these, so they need no
        # cotangent.
        known = self.in_avals[: self.count] if self.is_derivative else self.in_avals
        smooth_in = tuple(i for i, a in enumerate(known) if is_differentiable(a.dtype))
        smooth_out = tuple(i for i, a in enumerate(self.out_avals) if is_differentiable(a.dtype))
        for i in smooth_out:
            for axis, op in self.out_layouts[i].partials:
                if op != "sum":
                    raise GradientError(
                        f"[{self.name}] result {i} is Partial({op!r}) along {self.mesh.names[axis]!r}, which has no "
                        f"derivative: reduce it inside with mt.all_reduce(x, {self.mesh.names[axis]!r}, op={op!r})"
                    )
        code = self._backward.get(smooth_out)
        if code is None:
            code = self._backward[smooth_out] = self._derivative(smooth_in, smooth_out)
        count = len(self.in_avals)
        found = code([*operands[:count], *(seeds[i] for i in smooth_out)])  # type: ignore[list-item]
        out: list[Array | None] = [None] * len(operands)
        for i, g in zip(smooth_in, found, strict=True):
            out[i] = g
        return out

    def _derivative(self, smooth_in: tuple[int, ...], smooth_out: tuple[int, ...]) -> TracedShardMap:
        in_avals = [*self.in_avals, *(self.out_avals[i] for i in smooth_out)]
        in_layouts = [*self.in_layouts, *(self.out_layouts[i].reduced() for i in smooth_out)]

        def layout_of(k: int, varying: frozenset[int]) -> Layout:
            shards = self.in_layouts[smooth_in[k]].shards
            split = {a for _, axes in shards for a in axes}
            return make_layout({d: list(axes) for d, axes in shards}, dict.fromkeys(sorted(varying - split), "sum"))

        return TracedShardMap(
            f"{self.name} vjp",
            self.mesh,
            in_avals,
            in_layouts,
            layout_of,
            functools.partial(self._pull_back, smooth_in, smooth_out),
            lambda k: f"cotangent {smooth_in[k]}",
            is_derivative=True,
        )

    def _pull_back(
        self, smooth_in: tuple[int, ...], smooth_out: tuple[int, ...], trace: RankTrace, arguments: Sequence[Array]
    ) -> list[Array]:
        operands, seeds = arguments[: len(self.in_avals)], arguments[len(self.in_avals) :]
        tape = Tape()
        with tape:
            tape.watch([operands[i] for i in smooth_in])
            # Calls with derivatives of their own, or to be made again: the code says which, its calls do not.
            outs = (self._once_more if self.has_calls else self._replay)(trace, operands)
        names = [operands[i]._id for i in smooth_in]
        pairs = [(outs[i], s) for i, s in zip(smooth_out, seeds, strict=True) if tape.watches(outs[i])]
        found = tape.backward([t for t, _ in pairs], [s for _, s in pairs], names)
        out = []
        for i, name in zip(smooth_in, names, strict=True):
            g = found.get(name)
            like = operands[i]
            if g is None:
                g = zeros(like.shape, dtype=like.dtype)
            g = trace.unreduced(trace.lift(g))
            for axis, _ in self.in_layouts[i].partials:
                # Every rank has the cotangent of the sum: one of them counts.
                if self.mesh.sizes[axis] > 1:
                    g = where(trace.index((axis,)) == 0, g, 0.0)
            split = tuple(a for _, axes in self.in_layouts[i].shards for a in axes)
            out.append(trace.varied(g, split))
        return out

    def _once_more(self, trace: RankTrace, operands: Sequence[Array]) -> Sequence[Array]:
        """Run the body on other values, those for its captured arrays included."""
        for c, x in zip(self.captured, operands[self.count :], strict=True):
            trace.found[id(c.array), id(c.buf)] = x
        outs = self.body(trace, operands[: self.count])
        return [
            trace.varied(x, tuple(sorted(self._varying(lay)))) for x, lay in zip(outs, self.out_layouts, strict=True)
        ]

    def _replay(self, trace: RankTrace, operands: Sequence[Array]) -> list[Array]:
        """Replay the program on other values."""
        p = self.program
        env: dict[int, Array] = {v: operands[i] for v, i in zip(p.inputs, self.operands, strict=True)}
        origin, site = state.origin, state.site
        try:
            for e in p.entries:
                state.origin, state.site = origin or e.origin, e.site
                args = [env[v] if isinstance(v, int) else v.value for v in e.inputs]
                if e.op is ops.AXIS_INDEX:
                    env[e.outputs[0]] = trace.index(e.params["axes"])
                elif isinstance(e.op, ops.RankOp):
                    env[e.outputs[0]] = ops.replay(e.op, trace.lift(args[0]), e.params)
                else:
                    out = apply(e.op, tuple(args), e.params)
                    env.update(zip(e.outputs, out if e.op.nout > 1 else (out,), strict=True))
        finally:
            state.origin, state.site = origin, site
        return [env[v] for v in p.outputs]


# ----- the op ---------------------------------------------------------------------------------------------------------


def _infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
    out = params["code"].out_avals
    return out[0] if len(out) == 1 else out


class ShardMapOp(ops.RankOp):
    """A call of per-rank code with ``nout`` results."""

    __slots__ = ()

    def __init__(self, nout: int) -> None:
        super().__init__(f"shard_map:{nout}", ("*xs",), ops._together, _infer, nout=nout)
        self.name = "shard_map"


@functools.cache
def shard_map_op(nout: int) -> ShardMapOp:
    op = ShardMapOp(nout)

    def pull(xp: Any, g: Any, xs: Sequence[Any], code: TracedShardMap) -> Sequence[Any]:
        return code.backward(list(xs), list(g) if nout > 1 else [g])

    defvjp_all(op, pull)
    return op
