"""Partitioning of ops that need halos or lookups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...arrays.core.blocks import Box
from ...arrays.core.program import Const, Entry, site_text
from ..sharding.factors import Dim, FactorRule, RankView
from ..sharding.placement import REPLICATED, Layout, block_box
from ..sharding.propagate import Placed, reason
from .builder import AS_IT_IS, RankProgramBuilder
from .rank_program import LocalCall


def partition_halo_call(w: RankProgramBuilder, e: Entry, placed: Placed) -> None:
    """Write a call whose ranks need halos of operands, or look up in their part of a table."""
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
            why = reason(e.origin or e.op.name, placed, len(inputs), w.layouts[v], w.sizes)
            inputs.append(w.moved_to(v, layout, e.origin, why))
        for view, box in zip(views, boxes, strict=True):
            view.append(box)
    by_rank = {r: rule.part.localize(e.params, RankView(tuple(views[r]), results[r])) for r in ranks}
    w.use(inputs)
    w.layouts.update(zip(e.outputs, placed.results, strict=True))
    site = "" if e.site is None else site_text(e.site)
    origin = e.origin or e.op.name
    w.steps.append(LocalCall(rule.part.op, tuple(inputs), e.outputs, dict(e.params), AS_IT_IS, origin, site, by_rank))


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
