"""The partitioner: from a program on whole arrays to the rank program that every rank runs on its blocks.

The partitioner walks the entries forward, asks the propagator for the layouts of operands, and writes two kinds of
steps: *local* ones (the op on a block, its shape parameters made local) and *moves* (reshards). A move is written where
its source appears, as soon as it is known to be needed, and carried out where its result is first used, together with
all others that are due by then: reductions are as late, and as bucketed, as the data flow allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...arrays.core.devices import CPU
from ...arrays.core.dispatch import wrap
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import Entry, Program, freeze, simplify, site_text
from ...arrays.indexing.indexing import GETITEM
from ...arrays.ops.elementwise import ALIAS
from ...autodiff.captures.tracing import Tracer, _Trace
from ..sharding.factors import rule_for
from ..sharding.ops import RESHARD
from ..sharding.placement import REPLICATED, Layout
from ..sharding.propagate import Placed, propagate
from ..spmd.per_rank_op import ShardMapOp
from .builder import RankProgramBuilder
from .expert_dispatch import place_dispatch
from .halo_calls import partition_halo_call
from .overlap import dropped, variables
from .rank_lowering import lower
from .rank_program import LocalCall, RankProgram, Step


def partition(
    program: Program,
    layouts: Mapping[int, Layout],
    sizes: tuple[int, ...],
    *,
    wanted: Sequence[Layout] | None = None,
    settle: bool = True,
    name: str = "program",
    renames: dict[int, int] | None = None,
) -> RankProgram:
    """The rank program of a program whose inputs and constants have these layouts.

    Outputs get the layouts of ``wanted``, where it is given; else, with ``settle``, none is left with a pending
    reduction. ``renames`` is filled with the variables of the program that have another number in the rank program.
    """
    w = RankProgramBuilder(
        program, {v: layouts.get(v, REPLICATED) for v in (*program.inputs, *program.constants)}, sizes
    )
    reduce_early = _reduced_anyway(program)
    for i, v in enumerate(program.outputs):
        whole = settle if wanted is None else not wanted[i].partials
        if whole:
            reduce_early.setdefault(v, "")
    renamed = _same_constants(program, w.layouts)
    for v in (*program.inputs, *program.constants):
        if v not in renamed and w.is_wide(w.avals[v].dtype, w.layouts[v]):
            renamed[v] = w.widened(v)  # a pending sum is kept so where it came from; one that a user gave may not be
    pending: dict[int, int] = {}  # values that were reduced where they appeared, as they were before
    for e in program.entries:
        _place_entry(
            w, e._replace(inputs=tuple(renamed.get(v, v) if isinstance(v, int) else v for v in e.inputs)), renamed
        )
        for v in e.outputs:
            r = renamed.get(v, v)
            if v in reduce_early and w.layouts[r].partials:
                why = reduce_early[v] or "as results are whole"
                pending[v], renamed[v] = r, w.moved_to(r, w.layouts[r].reduced(), e.origin, why)
    outputs = []
    for i, v in enumerate(program.outputs):
        r = renamed.get(v, v)
        if wanted is not None:
            before = pending.get(v, r)
            r = before if w.layouts[before] == wanted[i] else w.moved_to(r, wanted[i], None, "as the result was to be")
        elif settle and w.layouts[r].partials:
            r = w.moved_to(r, w.layouts[r].reduced(), None, "results are whole")
        outputs.append(r)
    w.use(outputs)
    if renames is not None:
        renames.update(renamed)
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
    return with_frees(result)


def _same_constants(program: Program, layouts: Mapping[int, Layout]) -> dict[int, int]:
    """Constants that share a buffer under several names: each later variable, mapped to the first."""
    first: dict[Any, int] = {}
    return {
        v: known
        for v, value in program.constants.items()
        if (known := first.setdefault((id(value), program.avals[v], layouts[v]), v)) != v
    }


def _reduced_anyway(program: Program) -> dict[int, str]:
    """Variables that some entry, or the caller, needs without a pending sum, and why. Reducing them once, where they
    appear, serves the entries that could have taken the pending sum as well."""
    out: dict[int, str] = {}
    for e in program.entries:
        if e.op is RESHARD:
            continue  # a pending sum may become a reduce-scatter there
        if isinstance(e.op, ShardMapOp):
            taken = zip(e.inputs, e.params["code"].in_layouts, strict=False)
            out = {
                v: "" for v, layout in taken if isinstance(v, int) and not layout.shards and not layout.partials
            } | out
            continue
        avals = tuple(program.avals[v] if isinstance(v, int) else v.value for v in e.inputs)
        rule = rule_for(e.op, avals, tuple(program.avals[v] for v in e.outputs), e.params)
        for i, v in enumerate(() if rule.valueless else e.inputs):
            if isinstance(v, int) and not any(i in g for g in rule.linear):
                out[v] = out.get(v) or f"as {e.origin or e.op.name} is not linear in it"
    return out


def _place_entry(w: RankProgramBuilder, e: Entry, renamed: dict[int, int]) -> None:
    if e.op is RESHARD:
        target = e.params["layout"]
        renamed[e.outputs[0]] = w.moved_to(e.inputs[0], target, e.origin, "as reshard asks")
        return
    if isinstance(e.op, ShardMapOp):
        code = e.params["code"]
        why = f"as the placements of {code.name} say"
        inputs = [w.moved_to(v, layout, e.origin, why) for v, layout in zip(e.inputs, code.in_layouts, strict=False)]
        inputs = [w.cast(v, w.rounded[v]) if v in w.rounded else v for v in inputs]  # the code's own dtype
        w.use(inputs)
        for v, found, layout in zip(e.outputs, lower(w, e, inputs), code.out_layouts, strict=True):
            w.inner(ALIAS, (found,), (v,), {}, {r: {} for r in range(math.prod(w.sizes))}, code.name, "")
            w.layouts[v] = layout
            if w.is_wide(w.avals[v].dtype, layout):
                renamed[v] = w.widened(v)
        return
    avals = tuple(w.aval(v) if isinstance(v, int) else v.value for v in e.inputs)
    out_avals = tuple(w.avals[v] for v in e.outputs)
    layouts = [w.layouts[v] if isinstance(v, int) else None for v in e.inputs]
    placed = w.hints.placed(e, propagate(e.op, avals, out_avals, e.params, layouts, w.sizes), layouts, w.sizes)
    if placed.lost and e.op.decompose is not None and not placed.rule.choice:
        _inline(w, e, avals, renamed)
        return
    if placed.rule.valueless or not any(
        w.is_wide(a.dtype, layout) for a, layout in zip(out_avals, placed.results, strict=True)
    ):
        _place(w, e, placed, renamed)
    else:
        _place_wide(w, e, placed, avals, renamed)


def _place_wide(
    w: RankProgramBuilder, e: Entry, placed: Placed, avals: tuple[Any, ...], renamed: dict[int, int]
) -> None:
    """A call with a pending sum of short floats: it computes in float32, and rounds results that are not pending."""
    inputs = tuple(
        w.operand(e, placed, i) if v in w.rounded and layout is not None and not w.is_wide(w.rounded[v], layout) else v
        for i, (v, layout) in enumerate(zip(e.inputs, placed.operands, strict=True))
    )
    if e.op is not GETITEM or inputs[0] in w.rounded:  # each element is read by one rank, and the others add zeros
        inputs = tuple(w.widened(v) if isinstance(v, int) else v for v in inputs)
        known = iter([w.avals[v] for v in inputs if isinstance(v, int)])
        avals = tuple(next(known) if isinstance(a, ShapeDtype) else a for a in avals)
    if e.op.wide_sums and "dtype" in e.params:  # of the result
        e = e._replace(params={**e.params, "dtype": np.dtype(np.float32)})
    outputs = [w.new(a, REPLICATED) for a in e.op.avals(avals, e.params)]
    local: dict[int, int] = {}
    _place(w, e._replace(inputs=inputs, outputs=tuple(outputs)), placed, local)
    for v, o, layout in zip(e.outputs, outputs, placed.results, strict=True):
        o, dtype = local.get(o, o), w.avals[v].dtype
        w.layouts[v] = layout
        if w.is_wide(dtype, layout):
            renamed[v] = o if o in w.rounded or w.avals[o].dtype == np.float32 else w.cast(o, np.dtype(np.float32))
            w.rounded[renamed[v]] = dtype
        elif w.avals[o].dtype == dtype:
            renamed[v] = o
        else:
            w.cast(o, dtype, v)


def _place(w: RankProgramBuilder, e: Entry, placed: Placed, renamed: dict[int, int]) -> None:
    if placed.rule.part is not None and not placed.split.isdisjoint(placed.rule.part.factors):
        partition_halo_call(w, e, placed)
        return
    if placed.exchanged:
        place_dispatch(w, e, placed)
        return
    inputs = tuple(w.operand(e, placed, i) for i in range(len(e.inputs)))
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
    step = LocalCall(e.op, inputs, e.outputs, dict(e.params), placed.rule, e.origin, site)
    w.steps.append(step)
    if placed.rule.made or (placed.rule.part is not None and placed.rule.part.makes):
        w.made[e.outputs[0]] = step


def _inline(w: RankProgramBuilder, e: Entry, avals: tuple[Any, ...], renamed: dict[int, int]) -> None:
    """The entries of an op's decomposition, in place of the op: its sharded inner dimensions become collectives of
    sums."""
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
    trace = _Trace()
    args = [
        wrap(Tracer(trace, trace.builder.input(a), a, CPU, None, None)) if isinstance(a, ShapeDtype) else a
        for a in avals
    ]
    before, recorders = state.origin, state.recorders
    state.origin, state.recorders = origin, ()
    try:
        outs = op.decompose(*args, **params)
    finally:
        state.origin, state.recorders = before, recorders
    outs = outs if isinstance(outs, tuple) else (outs,)
    return simplify(trace.builder.build([o._buf.var for o in outs]))


def with_frees(p: RankProgram) -> RankProgram:
    """The program with the variables to drop after each step, and without unused steps (such as random draws)."""
    needed = set(p.outputs)
    steps: list[Step] = []
    for s in reversed(p.steps):
        reads, makes = variables(s)
        if needed.isdisjoint(makes):
            continue
        steps.append(s)
        needed.update(v for v in reads if isinstance(v, int))
        needed.update(makes)
    steps.reverse()
    keep = needed | set(p.inputs) | set(p.constants)
    return replace(
        p,
        steps=tuple(steps),
        avals={v: a for v, a in p.avals.items() if v in keep},
        layouts={v: x for v, x in p.layouts.items() if v in keep},
        frees=tuple(dropped(map(variables, steps), p.outputs)),
    )
