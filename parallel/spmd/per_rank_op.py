"""Traced per-rank code as one op: its programs, operands and results, and its derivative.

For the tape, ``mt.compile`` and the pending program of a mesh, a call of per-rank code is one call of one op. The
partitioner inlines it into the rank program (:func:`lower`), where equal calls are shared. So the derivative repeats
the calls of the forward pass, but reuses their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred, apply, made, wrap
from ...arrays.core.errors import GradientError, NonDifferentiableError, ShardingConflict
from ...arrays.core.op import Op, state
from ...arrays.core.program import Entry, Program, freeze, simplify
from ...arrays.core.shape_dtype import ShapeDtype
from ...arrays.ops.creation import zeros
from ...arrays.ops.elementwise import where
from ...autodiff.captures.tracing import Lifted
from ...autodiff.rules import defvjp_all
from ...autodiff.tape.tape import Tape, is_differentiable
from ..resharding.collective_plans import groups_of
from ..sharding.mesh_protocol import Mesh
from ..sharding.placement import REPLICATED, Layout, block_box, make_layout
from . import rank_ops as ops
from .rank_trace import RankTrace, trace_all

Body = Callable[[RankTrace, Sequence[Array]], Sequence[Array]]


class RankCode:
    """Traced per-rank code.

    ``programs`` is one program for all ranks, or one a rank; ``operands[k]`` says which operands of the call the inputs of
    program ``k`` are. The operands are the arguments, followed by captured arrays (``captured``).
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        in_avals: Sequence[ShapeDtype],
        in_layouts: Sequence[Layout],
        out_layouts: Callable[[int, Sequence[frozenset[int]]], Layout],
        body: Body,
        what: Callable[[int], str],
        apart: bool = False,
        is_derivative: bool = False,
    ) -> None:
        self.is_derivative = is_derivative
        self.name, self.mesh, self.body = name, mesh, body
        self.count = len(in_avals)
        blocks = [
            [ShapeDtype(block_box(lay, mesh.sizes, a.shape, r).shape, a.dtype) for r in range(mesh.size)]
            for a, lay in zip(in_avals, in_layouts, strict=True)
        ]
        varying = [self._varying(lay) for lay in in_layouts]
        traced = trace_all(mesh, blocks, varying, functools.partial(self._run, out_layouts), apart=apart)
        self.even = len(traced) == 1
        self.has_calls = any(t.has_calls for t, _ in traced)
        self.captured: list[Lifted] = []
        self.operands: list[tuple[int, ...]] = []
        found: dict[Any, int] = {}
        for t, _ in traced:
            keys = [self._key_of(c) for c in t.captured]
            for c, key in zip(t.captured, keys, strict=True):
                if key not in found:
                    found[key] = self.count + len(self.captured)
                    self.captured.append(c)
            self.operands.append((*range(self.count), *(found[key] for key in keys)))
        self.in_avals = (*in_avals, *(ShapeDtype(tuple(c.buf.shape), c.buf.dtype) for c in self.captured))
        self.in_layouts = (*in_layouts, *(REPLICATED for _ in self.captured))
        n_out = len(traced[0][1])
        if any(len(outs) != n_out for _, outs in traced):
            raise ShardingConflict(f"[{name}] the ranks return different numbers of arrays")
        self.out_layouts = tuple(out_layouts(i, [outs[i]._buf.varying for _, outs in traced]) for i in range(n_out))
        for i, layout in enumerate(self.out_layouts):
            self._check_replicated(layout, [(t, outs[i]) for t, outs in traced], what(i))
        self.out_avals = tuple(
            self._whole([outs[i] for _, outs in traced], self.out_layouts[i], what(i)) for i in range(n_out)
        )
        built = [t.build(outs) for t, outs in traced]
        self.programs: tuple[Program, ...] = (simplify(built[0]),) if self.even else tuple(_without_dead(built))
        self._backward: dict[Any, RankCode] = {}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def _key_of(self, c: Lifted) -> Any:
        """The key by which captured arrays are merged: the value for a derivative's constants, else the identity."""
        if self.is_derivative and isinstance(c.buf, np.ndarray):
            return c.buf.shape, c.buf.dtype, c.buf.tobytes()
        return id(c.array), id(c.buf)

    def _varying(self, layout: Layout) -> frozenset[int]:
        axes = [a for _, s in layout.shards for a in s] + [a for a, _ in layout.partials]
        return frozenset(a for a in axes if self.mesh.sizes[a] > 1)

    def _run(self, out_layouts: Any, trace: RankTrace, arguments: Sequence[Array]) -> Sequence[Array]:
        """Run the body. Its results vary along the axes where they are split or pending."""
        out = []
        for i, x in enumerate(self.body(trace, arguments)):
            x = trace.lift(x)
            layout = out_layouts(i, [x._buf.varying])
            out.append(trace.varied(x, tuple(sorted(self._varying(layout)))))
        return out

    # ----- results ----------------------------------------------------------------------------------------------------

    def _check_replicated(self, layout: Layout, outs: Sequence[tuple[RankTrace, Array]], what: str) -> None:
        """Raise where a result is declared replicated along an axis on which ranks may differ."""
        for trace, x in outs:
            wrong = sorted(x._buf.varying - self._varying(layout))
            if wrong:
                names = ", ".join(repr(self.mesh.names[a]) for a in wrong)
                raise ShardingConflict(
                    f"[{self.name}] {what} is to be Replicate() along {names}, but there ranks may hold different values: "
                    f"reduce it (mt.all_reduce, mt.all_gather, mt.broadcast), or give it Shard(dim) or Partial('sum') along "
                    f"{names}"
                )
            known = sorted((trace.known | trace.ragged) - self._varying(layout))
            first = outs[0][0]
            if known and trace.ids.get(x._buf.var) != first.ids.get(outs[0][1]._buf.var):
                raise ShardingConflict(
                    f"[{self.name}] {what} is to be Replicate() along {self.mesh.names[known[0]]!r}, but ranks return "
                    "different things there"
                )

    def _whole(self, blocks: Sequence[Array], layout: Layout, what: str) -> ShapeDtype:
        sizes, n = self.mesh.sizes, self.mesh.size
        of = [blocks[r if len(blocks) > 1 else 0] for r in range(n)]
        if len({(b.ndim, b.dtype) for b in of}) > 1:
            raise ShardingConflict(
                f"[{self.name}] {what} differs between ranks: {sorted({f'{b.dtype.name}, {b.ndim} dimensions' for b in of})}"
            )
        shape = list(of[0].shape)
        for dim, axes in layout.shards:
            if not 0 <= dim < len(shape):
                raise ShardingConflict(
                    f"[{self.name}] {what} has blocks of shape {of[0].shape}, and no dimension {dim} to be split along"
                )
            shape[dim] = sum(of[r].shape[dim] for r in groups_of(sizes, axes)[0])
        for r in range(n):
            expected = block_box(layout, sizes, shape, r).shape
            if of[r].shape != expected:
                lengths = sorted({b.shape for b in of}, reverse=True)
                raise ShardingConflict(
                    f"[{self.name}] {what}: rank {r} returned a block of shape {of[r].shape}, and of an array of shape "
                    f"{tuple(shape)} it holds {expected} (the blocks are {', '.join(map(str, lengths))}; all are of "
                    "ceil(n / ranks) but the last)"
                )
        return ShapeDtype(tuple(shape), of[0].dtype)

    # ----- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, arguments: Sequence[Array]) -> list[Array]:
        """Record the call as one op."""
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
        """Cotangents of the operands of a call."""
        # A derivative reads constants of rules beside its arguments. Nobody else knows these, so they need no
        # cotangent.
        known = self.in_avals[: self.count] if self.is_derivative else self.in_avals
        smooth_in = tuple(i for i, a in enumerate(known) if is_differentiable(a.dtype))
        if any(e.op in ops.MESSAGES for p in self.programs for e in p.entries):
            raise NonDifferentiableError(
                f"[{self.name}] sends messages from rank to rank, and has its own derivative, to the first order: it cannot be "
                "differentiated again"
            )
        smooth_out = tuple(i for i, a in enumerate(self.out_avals) if is_differentiable(a.dtype))
        for i in smooth_out:
            for axis, op in self.out_layouts[i].partials:
                if op != "sum":
                    raise GradientError(
                        f"[{self.name}] result {i} is Partial({op!r}) along {self.mesh.names[axis]!r}, which has no derivative: "
                        f"reduce it inside with mt.all_reduce(x, {self.mesh.names[axis]!r}, op={op!r})"
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

    def _derivative(self, smooth_in: tuple[int, ...], smooth_out: tuple[int, ...]) -> RankCode:
        count = len(self.in_avals)
        in_avals = [*self.in_avals, *(self.out_avals[i] for i in smooth_out)]
        in_layouts = [*self.in_layouts, *(self.out_layouts[i].reduced() for i in smooth_out)]

        def layout_of(k: int, varying: Sequence[frozenset[int]]) -> Layout:
            shards = self.in_layouts[smooth_in[k]].shards
            split = {a for _, axes in shards for a in axes}
            pending = frozenset[int]().union(*varying) - split
            return make_layout({d: list(axes) for d, axes in shards}, dict.fromkeys(sorted(pending), "sum"))

        def body(trace: RankTrace, arguments: Sequence[Array]) -> Sequence[Array]:
            return self._pull_back(trace, arguments[:count], arguments[count:], smooth_in, smooth_out)

        return RankCode(
            f"{self.name} vjp",
            self.mesh,
            in_avals,
            in_layouts,
            layout_of,
            body,
            lambda k: f"cotangent {smooth_in[k]}",
            apart=not self.even,
            is_derivative=True,
        )

    def _pull_back(
        self,
        trace: RankTrace,
        operands: Sequence[Array],
        seeds: Sequence[Array],
        smooth_in: tuple[int, ...],
        smooth_out: tuple[int, ...],
    ) -> list[Array]:
        tape = Tape()
        extra: list[Array] = []
        with tape:
            tape.watch([operands[i] for i in smooth_in])
            if not self.even:
                extra += _vary_all(trace, [operands[i] for i in smooth_in])
            if (
                self.has_calls
            ):  # with derivatives of their own, or to be made again: the code says which, its calls do not
                outs = self._once_more(trace, operands)
            else:
                k = 0 if self.even else trace.rank
                outs = self._replay(k, trace, operands, None if self.even else tape, extra)
        names = [operands[i]._id for i in smooth_in]
        targets, given = [outs[i] for i in smooth_out], list(seeds)
        targets += extra
        given += [trace.varied(zeros(x.shape, dtype=x.dtype), tuple(sorted(x._buf.varying))) for x in extra]
        pairs = [(t, s) for t, s in zip(targets, given, strict=True) if tape.watches(t)]
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

    def _replay(
        self, k: int, trace: RankTrace, operands: Sequence[Array], ties: Tape | None, extra: list[Array]
    ) -> list[Array]:
        """Replay program ``k`` on other values. With ``ties`` every collective takes part in the backward pass, on
        every rank, even if nothing depends on it there."""
        p = self.programs[k]
        env: dict[int, Array] = {v: operands[i] for v, i in zip(p.inputs, self.operands[k], strict=True)}
        origin, site = state.origin, state.site
        token: Array | None = None
        if ties is not None:
            token = wrap(trace.lift(zeros(()))._buf)
            ties.watch(token)
        try:
            for e in p.entries:
                state.origin, state.site = origin or e.origin, e.site
                args = [env[v] if isinstance(v, int) else v.value for v in e.inputs]
                if e.op is ops.AXIS_INDEX:
                    env[e.outputs[0]] = trace.index(e.params["axes"])
                    continue
                if e.op in ops.AGAIN:
                    x = trace.lift(args[0])
                    tied = ties is not None and is_differentiable(x.dtype)
                    if tied and e.op is not ops.VARY:
                        x = apply(ops.TIE, (x, token))
                    y = env[e.outputs[0]] = ops.AGAIN[e.op](x, e.params)
                    if tied and (e.op is not ops.VARY or x._buf.var not in trace.inputs):
                        extra.append(y)
                        if y._buf.var in trace.twins:
                            extra.append(trace.twins[y._buf.var])
                    continue
                out = apply(e.op, tuple(args), e.params)
                env.update(zip(e.outputs, out if e.op.nout > 1 else (out,), strict=True))
        finally:
            state.origin, state.site = origin, site
        return [env[v] for v in p.outputs]


def _vary_all(trace: RankTrace, xs: Sequence[Array]) -> list[Array]:
    """Make common values vary, at one place of the code where all ranks are; later uses reuse the results."""
    everywhere = tuple(range(len(trace.mesh.sizes)))
    out = []
    for x in xs:
        trace.twins.pop(x._buf.var, None)  # the tape that is on now has to see it come about
        varied = trace.varied(x, everywhere)
        if varied is not x:
            trace.twins[x._buf.var] = varied
            out.append(varied)
    return out


def _without_dead(programs: Sequence[Program]) -> list[Program]:
    """Different programs of ranks, without dead calls.

    Collectives stay, as other ranks take part in them; so does each ``vary`` that some rank needs, as all take part in its
    derivative.
    """
    programs = [_shared(p) for p in programs]
    counts = {sum(_meets_backward(p, e) for e in p.entries) for p in programs}
    kept = frozenset(range(max(counts))) if len(counts) > 1 else frozenset[int]()
    while True:
        found = [_live(p, kept) for p in programs]
        needed = kept.union(*(numbers for _, numbers in found))
        if needed == kept:
            return [p for p, _ in found]
        kept = needed


def _shared(p: Program) -> Program:
    """The program with equal calls merged, except for those in which other ranks take part."""
    seen: dict[Any, tuple[int, ...]] = {}
    names: dict[int, int] = {}
    entries: list[Entry] = []
    for e in p.entries:
        inputs = tuple(names.get(v, v) if isinstance(v, int) else v for v in e.inputs)
        key = (e.op, tuple(v if isinstance(v, int) else freeze(v.value) for v in inputs), freeze(e.params))
        if not isinstance(e.op, ops.RankOp):
            first = seen.setdefault(key, e.outputs)
            if first is not e.outputs:
                names.update(zip(e.outputs, first, strict=True))
                continue
        entries.append(e._replace(inputs=inputs))
    return Program(p.inputs, tuple(entries), tuple(names.get(v, v) for v in p.outputs), p.avals)


def _meets_backward(p: Program, e: Entry) -> bool:
    return e.op is ops.VARY and e.inputs[0] not in p.inputs


def _live(p: Program, kept: frozenset[int]) -> tuple[Program, frozenset[int]]:
    """The program without dead calls, and the numbers of the ``vary`` calls that it needs itself."""
    needed = set(p.outputs)
    entries: list[Entry] = []
    numbers: set[int] = set()
    number = sum(_meets_backward(p, e) for e in p.entries)
    for e in reversed(p.entries):
        number -= _meets_backward(p, e)
        own = not needed.isdisjoint(e.outputs)
        if own and _meets_backward(p, e):
            numbers.add(number)
        if own or e.op in ops.COLLECTIVES or e.op in ops.MESSAGES or (_meets_backward(p, e) and number in kept):
            needed.update(v for v in e.inputs if isinstance(v, int))
            entries.append(e)
    return Program(p.inputs, tuple(reversed(entries)), p.outputs, p.avals), frozenset(numbers)


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
    """The op of calls with ``nout`` results."""
    op = ShardMapOp(nout)

    def pull(xp: Any, g: Any, xs: Sequence[Any], code: RankCode) -> Sequence[Any]:
        return code.backward(list(xs), list(g) if nout > 1 else [g])

    defvjp_all(op, pull)
    return op
