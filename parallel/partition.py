"""From a program on whole arrays to one program that every rank runs on its blocks.

The partitioner walks the entries forward, asks the propagator what each operand must become, and writes two kinds of steps:
*local* ones (the op on a block, its shape parameters made local) and *moves* (reshards). A move is written where its source
appears, as soon as it is known to be needed, and carried out where its result is first used, together with all others that are
due by then: reductions are as late, and as bucketed, as the data flow allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..arrays._dispatch import wrap
from ..arrays._op import Op, state
from ..arrays.blocks import Box
from ..arrays.elementwise import ALIAS
from ..arrays.program import Const, Entry, Program, ShapeDtype, freeze, simplify, site_text
from .collective_plans import Collective, plan_collective
from .factors import Dim, FactorRule, RankView, rule_for
from .ops import RESHARD
from .placement import REPLICATED, Layout, Replicate, block_box, make_layout
from .propagate import Hints, Placed, propagate
from .rank_code import ShardMapOp
from .rank_lowering import lower
from .reshard import Plan, plan_reshard, reshard_text
from .windows import Fetch


class Local(NamedTuple):
    """An op on the blocks of one rank. Variables are those of the rank program.

    Where ``by_rank`` is given, only the ranks it names run the call, each with parameters of its own.
    """

    op: Op
    inputs: tuple[int | Const, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any]
    rule: FactorRule
    origin: str | None
    site: str
    by_rank: Mapping[int, Mapping[str, Any]] | None = None


class Move(NamedTuple):
    """A reshard of one variable into another, or a collective of per-rank code, which says by itself what goes where."""

    source: int
    target: int
    origin: str | None
    collective: Collective | Fetch | None = None


class Moves(NamedTuple):
    """Reshards that are carried out together, in one round of messages."""

    moves: tuple[Move, ...]


Step = Local | Moves


@dataclass(frozen=True)
class RankProgram:
    """The partitioned form of a program: the same text for every rank of a mesh with these axis lengths.

    ``avals`` are those of the whole arrays; ``layouts`` say what a rank holds of each variable.
    """

    sizes: tuple[int, ...]
    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    avals: Mapping[int, ShapeDtype]
    layouts: Mapping[int, Layout]
    constants: tuple[int, ...] = ()
    name: str = "program"
    frees: tuple[tuple[int, ...], ...] = field(default=())
    inner: frozenset[int] = frozenset()
    """Variables of per-rank code: their avals are those of one rank's block."""

    def plan(self, m: Move, homes: tuple[int, ...] | None = None) -> Plan:
        """What goes where in a move."""
        if isinstance(m.collective, Fetch):
            return m.collective.plan(self.sizes, homes)
        if m.collective is not None:
            return plan_collective(math.prod(self.sizes), m.collective)
        return plan_reshard(
            self.avals[m.source].shape, self.sizes, self.layouts[m.source], self.layouts[m.target], homes
        )

    def move_text(self, m: Move, names: Sequence[str]) -> str:
        """A move in the field's words."""
        if m.collective is not None:
            return m.collective.text(names)
        return reshard_text(self.layouts[m.source], self.layouts[m.target], names)

    def view(self, step: Local, rank: int) -> RankView:
        """The blocks of a call's operands and results on one rank."""

        def box(v: int) -> Box:
            return block_box(self.layouts[v], self.sizes, self.avals[v].shape, rank)

        return RankView(
            tuple(box(v) if isinstance(v, int) else None for v in step.inputs), tuple(map(box, step.outputs))
        )

    def moved_bytes(self) -> int:
        """Bytes that cross between ranks in one run."""
        total = 0
        for s in self.steps:
            if isinstance(s, Moves):
                for m in s.moves:
                    total += self.plan(m).bytes_received(self.avals[m.source].dtype.itemsize)
        return total

    def text(self, names: Sequence[str]) -> str:
        """One line a step: the op, the block that a rank holds of its result, and the collectives with their bytes."""
        lines = []

        def typed(v: int) -> str:
            aval, layout = self.avals[v], self.layouts[v]
            dims = [
                f"{n}@{'+'.join(names[a] for a in layout.axes_of(i))}" if layout.axes_of(i) else str(n)
                for i, n in enumerate(aval.shape)
            ]
            partial = ",".join(f"{op}:{names[a]}" for a, op in layout.partials)
            mark = " a rank" if v in self.inner else ""
            return f"{aval.dtype.name}[{','.join(dims)}]" + (f"{{{partial}}}" if partial else "") + mark

        for s in self.steps:
            if isinstance(s, Moves):
                for i, m in enumerate(s.moves):
                    words = self.move_text(m, names)
                    moved = self.plan(m).bytes_received(self.avals[m.source].dtype.itemsize)
                    mark = (
                        "┌"
                        if len(s.moves) > 1 and i == 0
                        else "└"
                        if len(s.moves) > 1 and i == len(s.moves) - 1
                        else "│"
                        if len(s.moves) > 1
                        else " "
                    )
                    lines.append(f"{mark} %{m.target} = {words} %{m.source}  : {typed(m.target)}  # {moved} bytes")
            else:
                entry = Entry(s.op, s.inputs, s.outputs, s.params)
                note = f"  # {s.origin}" if s.origin and s.origin != s.op.name else ""
                lines.append(f"  {entry}  : {', '.join(map(typed, s.outputs))}{note}")
        head = ", ".join(f"%{v}: {typed(v)}" for v in self.inputs)
        tail = f"  return {', '.join(f'%{v}' for v in self.outputs)}"
        return "\n".join([f"rank program({head}):", *lines, tail])


class _Writer:
    """State of one pass of the partitioner."""

    def __init__(self, program: Program, layouts: Mapping[int, Layout], sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.avals: dict[int, ShapeDtype] = dict(program.avals)
        self.layouts: dict[int, Layout] = dict(layouts)
        self.steps: list[Step] = []
        self.due: list[Move] = []  # moves whose results nothing has used yet
        self.due_targets: set[int] = set()
        self.moved: dict[tuple[int, Layout], int] = {}
        self.seen: dict[Any, tuple[int, ...]] = {}
        self.made: dict[int, Local] = {}  # results any block of which a rank can make by itself
        self.next_var = max(program.avals, default=-1) + 1
        self.inners: set[int] = set()
        self.hints = Hints()

    def new(self, aval: ShapeDtype, layout: Layout) -> int:
        v = self.next_var
        self.next_var += 1
        self.avals[v], self.layouts[v] = aval, layout
        return v

    def moved_to(self, var: int, layout: Layout, origin: str | None) -> int:
        """The variable with another layout; the same move is written once."""
        now = self.layouts[var]
        if now == layout or _same_blocks(now, layout, self.avals[var].shape, self.sizes):
            return var
        key = (var, layout)
        found = self.moved.get(key)
        if found is None and var in self.made and not layout.partials:
            made = self.made[var]
            if made.rule.made:
                found = self.moved[key] = self.new(self.avals[var], layout)
                self.steps.append(made._replace(outputs=(found,)))
            elif (part := self.part_of(made, var, layout)) is not None:
                found = self.moved[key] = self.moved_to(part, layout, origin)
        if found is None:
            if dict(now.partials).keys() - dict(layout.partials).keys() and len({o for _, o in now.partials}) > 1:
                # Different pending reductions are not one: do the innermost axis first.
                axis = now.partials[-1][0]
                step = Layout(now.shards, tuple(p for p in now.partials if p[0] != axis))
                return self.moved_to(self.moved_to(var, step, origin), layout, origin)
            found = self.moved[key] = self.new(self.avals[var], layout)
            if var in self.due_targets:
                self.flush()
            if _is_local(now, layout):
                # Nothing is sent: no reason to carry out the reductions that can still wait.
                self.steps.append(Moves((Move(var, found, origin),)))
            else:
                self.due.append(Move(var, found, origin))
                self.due_targets.add(found)
        return found

    def part_of(self, made: Local, var: int, layout: Layout) -> int | None:
        """A result that was made replicated made again in the parts that ``layout`` wants, where the op can; pending sums stay."""
        rule, now = made.rule, self.layouts[var]
        assert rule.part is not None
        fresh = {
            d: axes
            for d, axes in layout.shards
            if not now.axes_of(d)
            and all(isinstance(now.placement(a), Replicate) for a in axes)
            and (x := rule.results[0][d]) is not None
            and x.factor in rule.part.makes
        }
        if not fresh:
            return None
        between = make_layout({**dict(now.shards), **fresh}, dict(now.partials))
        shape = self.avals[var].shape
        by_rank = {}
        for r in range(math.prod(self.sizes)):
            view = RankView(made_view(self, made, r), (block_box(between, self.sizes, shape, r),))
            by_rank[r] = rule.part.localize(made.params, view)
        out = self.new(self.avals[var], between)
        self.steps.append(made._replace(op=rule.part.op, outputs=(out,), rule=_AS_IT_IS, by_rank=by_rank))
        return out

    def new_inner(self, aval: ShapeDtype) -> int:
        """A variable of per-rank code, with the aval of a block."""
        v = self.new(aval, REPLICATED)
        self.inners.add(v)
        return v

    def inner(
        self,
        op: Op,
        inputs: tuple[int | Const, ...],
        outputs: tuple[int, ...],
        params: Mapping[str, Any],
        by_rank: Mapping[int, Mapping[str, Any]] | None,
        origin: str | None,
        site: str,
    ) -> None:
        """A call of per-rank code, on blocks as they are."""
        self.use(inputs)
        self.steps.append(Local(op, inputs, outputs, params, _AS_IT_IS, origin, site, by_rank))

    def collective(self, source: int, target: int, origin: str | None, what: Collective) -> None:
        """A collective of per-rank code; it is carried out with others, when its result is needed."""
        if source in self.due_targets:
            self.flush()
        self.due.append(Move(source, target, origin, what))
        self.due_targets.add(target)

    def fetched(self, var: int, layout: Layout, boxes: tuple[Box, ...], origin: str | None) -> int:
        """The parts of a variable that ranks need, which overlap or are elsewhere."""
        now = self.layouts[var]
        kept = dict(layout.partials)
        if any(a not in kept for a, _ in now.partials):
            var = self.moved_to(var, Layout(now.shards, layout.partials), origin)
            now = self.layouts[var]
        shape = self.avals[var].shape
        key = ("fetch", var, layout, boxes)
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = (self.new_inner(ShapeDtype(boxes[0].shape, self.avals[var].dtype)),)
            what = Fetch(shape, now, layout, boxes)
            if var in self.due_targets:
                self.flush()
            if what.plan(self.sizes, None).bytes_received(1):
                self.due.append(Move(var, found[0], origin, what))
                self.due_targets.add(found[0])
            else:
                self.steps.append(Moves((Move(var, found[0], origin, what),)))
        return found[0]

    def flush(self) -> None:
        if self.due:
            self.steps.append(Moves(tuple(self.due)))
            self.due, self.due_targets = [], set()

    def use(self, variables: Sequence[int | Const]) -> None:
        """Before these are read: carry out the moves that are due, if one of them is among them."""
        if not self.due_targets.isdisjoint(v for v in variables if isinstance(v, int)):
            self.flush()


def made_view(w: _Writer, made: Local, rank: int) -> tuple[Box | None, ...]:
    """The blocks of a call's operands on one rank."""
    return tuple(
        block_box(w.layouts[v], w.sizes, w.avals[v].shape, rank) if isinstance(v, int) else None for v in made.inputs
    )


_AS_IT_IS = FactorRule((), (), ())


def _is_local(now: Layout, then: Layout) -> bool:
    """Whether each rank can cut its new block from its old one: nothing is reduced or gathered, and what is split was whole."""
    return now.partials == then.partials and all(then.axes_of(d) == axes for d, axes in now.shards)


def _same_blocks(a: Layout, b: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether two layouts differ in axes of length one alone."""

    def strip(x: Layout) -> tuple[object, ...]:
        shards = tuple((d, tuple(i for i in axes if sizes[i] > 1)) for d, axes in x.shards)
        return tuple(s for s in shards if s[1]), tuple(p for p in x.partials if sizes[p[0]] > 1)

    return strip(a) == strip(b)


def partition(
    program: Program,
    layouts: Mapping[int, Layout],
    sizes: tuple[int, ...],
    *,
    wanted: Sequence[Layout] | None = None,
    settle: bool = True,
    name: str = "program",
) -> RankProgram:
    """The rank program of a program whose inputs and constants have these layouts.

    Outputs get the layouts of ``wanted``, where it is given; else, with ``settle``, none is left with a pending reduction.
    """
    w = _Writer(program, {v: layouts.get(v, REPLICATED) for v in (*program.inputs, *program.constants)}, sizes)
    reduce_early = _reduced_anyway(program)
    if wanted is not None:
        reduce_early.update(v for v, lay in zip(program.outputs, wanted, strict=True) if not lay.partials)
    elif settle:
        reduce_early.update(program.outputs)
    renamed: dict[int, int] = {}
    pending: dict[int, int] = {}  # values that were reduced where they appeared, as they were before
    for e in program.entries:
        _place_entry(
            w, e._replace(inputs=tuple(renamed.get(v, v) if isinstance(v, int) else v for v in e.inputs)), renamed
        )
        for v in e.outputs:
            r = renamed.get(v, v)
            if v in reduce_early and w.layouts[r].partials:
                pending[v], renamed[v] = r, w.moved_to(r, w.layouts[r].reduced(), e.origin)
    outputs = []
    for i, v in enumerate(program.outputs):
        r = renamed.get(v, v)
        if wanted is not None:
            before = pending.get(v, r)
            r = before if w.layouts[before] == wanted[i] else w.moved_to(r, wanted[i], None)
        elif settle and w.layouts[r].partials:
            r = w.moved_to(r, w.layouts[r].reduced(), None)
        outputs.append(r)
    w.use(outputs)
    result = RankProgram(
        sizes,
        program.inputs,
        tuple(w.steps),
        tuple(outputs),
        w.avals,
        w.layouts,
        tuple(program.constants),
        name,
        inner=frozenset(w.inners),
    )
    return _with_frees(result)


def _reduced_anyway(program: Program) -> set[int]:
    """Variables that some entry, or the caller, needs without a pending sum. Reducing them once, where they appear, serves
    the entries that could have taken the pending sum as well."""
    out: set[int] = set()
    for e in program.entries:
        if e.op is RESHARD:
            continue  # a pending sum may become a reduce-scatter there
        if isinstance(e.op, ShardMapOp):
            taken = zip(e.inputs, e.params["code"].in_layouts, strict=False)
            out.update(v for v, layout in taken if isinstance(v, int) and not layout.shards and not layout.partials)
            continue
        avals = tuple(program.avals[v] if isinstance(v, int) else v.value for v in e.inputs)
        groups = rule_for(e.op, avals, tuple(program.avals[v] for v in e.outputs), e.params).linear
        for i, v in enumerate(e.inputs):
            if isinstance(v, int) and not any(i in g for g in groups):
                out.add(v)
    return out


def _place_entry(w: _Writer, e: Entry, renamed: dict[int, int]) -> None:
    if e.op is RESHARD:
        target = e.params["layout"]
        renamed[e.outputs[0]] = w.moved_to(e.inputs[0], target, e.origin)
        return
    if isinstance(e.op, ShardMapOp):
        code = e.params["code"]
        inputs = [w.moved_to(v, layout, e.origin) for v, layout in zip(e.inputs, code.in_layouts, strict=False)]
        w.use(inputs)
        for v, found, layout in zip(e.outputs, lower(w, e, inputs), code.out_layouts, strict=True):
            w.inner(ALIAS, (found,), (v,), {}, {r: {} for r in range(math.prod(w.sizes))}, code.name, "")
            w.layouts[v] = layout
        return
    avals = tuple(w.avals[v] if isinstance(v, int) else v.value for v in e.inputs)
    out_avals = tuple(w.avals[v] for v in e.outputs)
    layouts = [w.layouts[v] if isinstance(v, int) else None for v in e.inputs]
    placed = w.hints.placed(e, propagate(e.op, avals, out_avals, e.params, layouts, w.sizes), layouts, w.sizes)
    if placed.lost and e.op.decompose is not None:
        _inline(w, e, avals, renamed)
        return
    if placed.rule.part is not None and not placed.split.isdisjoint(placed.rule.part.factors):
        _place_part(w, e, placed)
        return
    inputs = tuple(
        w.moved_to(v, layout, e.origin) if isinstance(v, int) else v
        for v, layout in zip(e.inputs, placed.operands, strict=True)
    )
    # Decompositions repeat what the program has: the statistics of a norm, forward and backward.
    key = (e.op, tuple(v if isinstance(v, int) else freeze(v.value) for v in inputs), freeze(e.params))
    seen = w.seen.setdefault(key, e.outputs)
    if seen is not e.outputs:
        for v, first in zip(e.outputs, seen, strict=True):
            renamed[v] = first
            w.layouts[v] = w.layouts[first]
        return
    w.use(inputs)
    w.layouts.update(zip(e.outputs, placed.results, strict=True))
    site = "" if e.site is None else site_text(e.site)
    step = Local(e.op, inputs, e.outputs, dict(e.params), placed.rule, e.origin, site)
    w.steps.append(step)
    if placed.rule.made or (placed.rule.part is not None and placed.rule.part.makes):
        w.made[e.outputs[0]] = step


def _place_part(w: _Writer, e: Entry, placed: Placed) -> None:
    """A call that ranks make on parts of its operands which do not run in step with their part of the result."""
    rule, ranks = placed.rule, range(math.prod(w.sizes))
    assert rule.part is not None
    views: list[list[Box | None]] = [[] for _ in ranks]
    results = [
        tuple(block_box(lay, w.sizes, w.avals[v].shape, r) for v, lay in zip(e.outputs, placed.results, strict=True))
        for r in ranks
    ]
    steps = [
        tuple(
            block_box(lay or REPLICATED, w.sizes, w.avals[v].shape if isinstance(v, int) else (), r)
            for v, lay in zip(e.inputs, placed.operands, strict=True)
        )
        for r in ranks
    ]
    inputs: list[int | Const] = []
    for v, layout, dims in zip(e.inputs, placed.operands, rule.operands, strict=True):
        if not isinstance(v, int):
            inputs.append(v)
            for view in views:
                view.append(None)
            continue
        assert layout is not None
        shape = w.avals[v].shape
        boxes = [block_box(layout, w.sizes, shape, r) for r in ranks]
        if any(d is not None and d.window is not None and layout.axes_of(i) for i, d in enumerate(dims)):
            boxes = [_seen(box, dims, layout, rule, results[r], steps[r]) for r, box in enumerate(boxes)]
            inputs.append(w.fetched(v, layout, tuple(boxes), e.origin))
        else:
            inputs.append(w.moved_to(v, layout, e.origin))
        for view, box in zip(views, boxes, strict=True):
            view.append(box)
    by_rank = {r: rule.part.localize(e.params, RankView(tuple(views[r]), results[r])) for r in ranks}
    w.use(inputs)
    w.layouts.update(zip(e.outputs, placed.results, strict=True))
    site = "" if e.site is None else site_text(e.site)
    origin = e.origin or e.op.name
    w.steps.append(
        Local(rule.part.op, tuple(inputs), e.outputs, dict(e.params), _AS_IT_IS, origin, site, by_rank)
    )


def _seen(
    box: Box,
    dims: Sequence[Dim | None],
    layout: Layout,
    rule: FactorRule,
    results: Sequence[Box],
    operands: Sequence[Box],
) -> Box:
    """The part of an operand that a rank needs for its blocks of the results, and of the operands that run in step."""
    offset, shape = list(box.offset), list(box.shape)
    for i, d in enumerate(dims):
        if d is None or d.window is None or not layout.axes_of(i):
            continue
        for out, out_dims in zip((*results, *operands), (*rule.results, *rule.operands), strict=True):
            for k, x in enumerate(out_dims):
                if x is not None and x.factor == d.factor and x.window is None:
                    offset[i], shape[i] = d.window.region(out.offset[k], out.shape[k])
    return Box(tuple(offset), tuple(shape))


def _inline(w: _Writer, e: Entry, avals: tuple[Any, ...], renamed: dict[int, int]) -> None:
    """The entries of an op's decomposition, in place of the op: its sharded inner dimensions become collectives of sums."""
    program = decomposition(e.op, avals, e.params, e.origin or e.op.name)
    names: dict[int, int] = dict(zip(program.inputs, [v for v in e.inputs if isinstance(v, int)], strict=True))
    for v, value in program.constants.items():
        raise AssertionError(f"the decomposition of {e.op.name} holds a constant array {v}: {value!r}")
    for inner in program.entries:
        outs = []
        for v in inner.outputs:
            names[v] = w.new(program.avals[v], REPLICATED)
            outs.append(names[v])
        local: dict[int, int] = {}
        inputs = tuple(names[v] if isinstance(v, int) else v for v in inner.inputs)
        _place_entry(w, inner._replace(inputs=inputs, outputs=tuple(outs), site=e.site), local)
        for v, o in zip(inner.outputs, outs, strict=True):
            names[v] = local.get(o, o)
    for v, o in zip(e.outputs, program.outputs, strict=True):
        renamed[v] = names[o]
        w.layouts[v] = w.layouts[names[o]]


def decomposition(op: Op, avals: tuple[Any, ...], params: Mapping[str, Any], origin: str) -> Program:
    """An op's decomposition as a program of its array operands."""
    from ..arrays.devices import CPU
    from ..autodiff.compile import Tracer, _Trace

    trace = _Trace()
    args: list[Any] = []
    for a in avals:
        if isinstance(a, ShapeDtype):
            args.append(wrap(Tracer(trace, trace.builder.input(a), a, CPU, None, None)))
        else:
            args.append(a)
    before, recorders = state.origin, state.recorders
    state.origin, state.recorders = origin, ()
    try:
        outs = op.decompose(*args, **params)
    finally:
        state.origin, state.recorders = before, recorders
    outs = outs if isinstance(outs, tuple) else (outs,)
    return simplify(trace.builder.build([o._buf.var for o in outs]))


def _with_frees(p: RankProgram) -> RankProgram:
    """The variables that may be dropped after each step, and no step that nobody needs: draws that were made in parts instead."""
    needed = set(p.outputs)
    frees: list[tuple[int, ...]] = []
    steps: list[Step] = []
    for s in reversed(p.steps):
        if needed.isdisjoint(s.outputs if isinstance(s, Local) else [m.target for m in s.moves]):
            continue
        steps.append(s)
        if isinstance(s, Moves):
            used = dict.fromkeys([m.source for m in s.moves] + [m.target for m in s.moves])
        else:
            used = dict.fromkeys([v for v in s.inputs if isinstance(v, int)] + list(s.outputs))
        frees.append(tuple(v for v in used if v not in needed))
        needed.update(used)
    keep = needed | set(p.inputs) | set(p.constants)
    return RankProgram(
        p.sizes,
        p.inputs,
        tuple(reversed(steps)),
        p.outputs,
        {v: a for v, a in p.avals.items() if v in keep},
        {v: x for v, x in p.layouts.items() if v in keep},
        p.constants,
        p.name,
        tuple(reversed(frees)),
        p.inner,
    )
