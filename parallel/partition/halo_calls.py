"""Partitioning of ops that need halos or lookups."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays.core.blocks import Box
from ...arrays.core.program import Const, Entry, site_text
from ..sharding.factors import Dim, FactorRule
from ..sharding.placement import REPLICATED, Layout
from ..sharding.propagate import Placed
from .builder import RankProgramBuilder


def partition_halo_call(w: RankProgramBuilder, e: Entry, placed: Placed) -> None:
    """Write a call whose ranks need halos of operands, or look up in their part of a table."""
    rule = placed.rule
    assert rule.part is not None
    results = [w.boxes(v, layout) for v, layout in zip(e.outputs, placed.results, strict=True)]
    operands = [w.boxes(v, layout or REPLICATED) for v, layout in zip(e.inputs, placed.operands, strict=True)]
    steps = list(zip(*results, *operands, strict=True))
    inputs: list[int | Const] = []
    needed = []
    for k, (v, layout, dims) in enumerate(zip(e.inputs, placed.operands, rule.operands, strict=True)):
        boxes = operands[k]
        if layout and any(d is not None and d.window is not None and layout.axes_of(i) for i, d in enumerate(dims)):
            boxes = [_seen(box, dims, layout, rule, step) for box, step in zip(boxes, steps, strict=True)]
            inputs.append(w.fetched(v, layout, tuple(boxes), e.origin))
        else:
            inputs.append(w.operand(e, placed, k))
        needed.append(boxes)
    by_rank = w.localized(e, rule.part, needed, results)
    w.layouts.update(zip(e.outputs, placed.results, strict=True))
    site = "" if e.site is None else site_text(e.site)
    w.inner(rule.part.op, tuple(inputs), e.outputs, dict(e.params), by_rank, e.origin or e.op.name, site)


def _seen(box: Box, dims: Sequence[Dim | None], layout: Layout, rule: FactorRule, steps: Sequence[Box]) -> Box:
    """The part of an operand that a rank needs for its blocks of the results, and of the operands that run in step."""
    offset, shape = list(box.offset), list(box.shape)
    for i, d in enumerate(dims):
        if d is None or d.window is None or not layout.axes_of(i):
            continue
        for out, out_dims in zip(steps, (*rule.results, *rule.operands), strict=True):
            for k, x in enumerate(out_dims):
                if x is not None and x.factor == d.factor and x.window is None:
                    offset[i], shape[i] = d.window.region(out.offset[k], out.shape[k])
    return Box(tuple(offset), tuple(shape))
