"""Expert dispatch: the steps of a call whose rows are sent to the ranks of their experts, in a rank program."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.op import Op, ShapeDtype
from ...arrays.core.program import Entry, site_text
from ..resharding import expert_all_to_all as d
from ..resharding.collective_plans import Collective, groups_of
from ..sharding.placement import REPLICATED
from ..sharding.propagate import Placed
from .builder import RankProgramBuilder
from .rank_program import Move, Moves


def place_dispatch(w: RankProgramBuilder, e: Entry, placed: Placed) -> None:
    """A call of which ``placed.exchanged`` splits rows and experts alike."""
    rule = placed.rule
    exchange = rule.exchange
    assert exchange is not None
    inputs: list[int] = [w.operand(e, placed, i) for i in range(len(e.inputs))]
    steps = _StepWriter(w, e.origin or e.op.name, "" if e.site is None else site_text(e.site))
    chosen = inputs[exchange.chosen]
    bounds = _bounds(w, placed, inputs)
    groups = groups_of(w.sizes, placed.exchanged)
    held = [math.prod(box.shape[:-1]) for box in w.boxes(chosen, w.layouts[chosen])]  # rows that each rank has
    amounts = _amounts(groups, bounds, held, w.avals[chosen].shape[-1])
    forth = d.AllToAllV(placed.exchanged, groups, False, *amounts)

    # So many rows at most are in the blocks whose length is found at run time.
    most = max(sum(held[r] for r in g) for g in groups)
    p = len(groups[0])
    places = [[bounds[r] for r in g] for g in groups]
    by_rank = {r: {"bounds": tuple(places[k])} for k, g in enumerate(groups) for r in g}
    index = np.dtype(np.int64)
    known = e.inputs[exchange.numbers]
    assert isinstance(known, int)
    numbers = w.moved_to(known, REPLICATED, e.origin, "as every rank must know who has which")
    order, counts = steps.once(
        d.ROUTE, (chosen, numbers), (ShapeDtype((most,), index), ShapeDtype((1, p), index)), by_rank
    )
    table = steps.gathered(
        counts, Collective("all_gather", placed.exchanged, groups, ((1, p),), ((p, p),), (("dim", 0),))
    )

    def rows_of(aval: ShapeDtype) -> ShapeDtype:
        return ShapeDtype((most, aval.shape[-1]), aval.dtype)

    def is_rows(dims: Sequence[Any]) -> bool:
        return any(x is not None and x.factor in exchange.rows for x in dims)

    sent = {
        i: steps.once(d.PACK, (v, order), (rows_of(w.avals[v]),))[0]
        for i, v in enumerate(inputs)
        if is_rows(rule.operands[i])
    }
    got = steps.exchanged(tuple(sent.values()), table, forth)
    inputs = [dict(zip(sent, got, strict=True)).get(i, v) for i, v in enumerate(inputs)]
    w.layouts.update(zip(e.outputs, placed.results, strict=True))
    returned = {
        v: w.new_inner(rows_of(w.avals[v])) for v, dims in zip(e.outputs, rule.results, strict=True) if is_rows(dims)
    }
    steps.call(e.op, inputs, [returned.get(v, v) for v in e.outputs], e.params)
    back = steps.exchanged(tuple(returned.values()), table, forth._replace(back=True))
    for v, found in zip(returned, back, strict=True):
        steps.call(d.UNPACK, (found, order, counts, chosen), (v,), {})


def _bounds(w: RankProgramBuilder, placed: Placed, inputs: Sequence[int]) -> list[tuple[int, int]]:
    """The experts of each rank: the first of them, and the first that is not."""
    assert placed.rule.exchange is not None
    expert = placed.rule.exchange.expert
    v, layout, dim = next(
        (v, layout, k)
        for v, layout, dims in zip(inputs, placed.operands, placed.rule.operands, strict=True)
        for k, x in enumerate(dims)
        if x is not None and x.factor == expert
    )
    assert layout is not None
    return [(b.offset[dim], b.offset[dim] + b.shape[dim]) for b in w.boxes(v, layout)]


def _amounts(
    groups: Sequence[Sequence[int]], bounds: Sequence[tuple[int, int]], held: Sequence[int], k: int
) -> tuple[int, int]:
    """Rows that cross between ranks where each set of ``k`` experts is chosen as often, and at most."""
    likely, most = 0.0, 0
    for group in groups:
        here = [bounds[r][1] - bounds[r][0] for r in group]
        experts = sum(here)
        of = min(k, experts)
        met = [1 - math.comb(experts - n, of) / math.comb(experts, of) for n in here]
        for i, r in enumerate(group):
            likely += held[r] * (sum(met) - met[i])
            most += held[r] * min(k, sum(n > 0 for j, n in enumerate(here) if j != i))
    return round(likely), most


class _StepWriter:
    """Writes steps, equal ones only once: the backward pass reuses the rows that the forward pass sent."""

    def __init__(self, w: RankProgramBuilder, origin: str, site: str) -> None:
        self.w, self.origin, self.site = w, origin, site

    def call(
        self,
        op: Op,
        inputs: Sequence[int],
        outputs: Sequence[int],
        params: Mapping[str, Any],
        by_rank: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self.w.inner(op, tuple(inputs), tuple(outputs), params, by_rank, self.origin, self.site)

    def once(
        self,
        op: Op,
        inputs: tuple[int, ...],
        avals: Sequence[ShapeDtype],
        by_rank: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        key: Hashable = "dispatch", op, inputs, by_rank and tuple((r, p["bounds"]) for r, p in by_rank.items())
        found = self.w.seen.get(key)
        if found is None:
            found = self.w.seen[key] = tuple(map(self.w.new_inner, avals))
            self.call(op, inputs, found, {}, by_rank)
        return found

    def gathered(self, counts: int, what: Collective) -> int:
        """The counts of all ranks of a group, on each of them."""
        key = "dispatch", counts, what
        found = self.w.seen.get(key)
        if found is None:
            (shape,) = what.results
            found = self.w.seen[key] = (self.w.new_inner(ShapeDtype(shape, self.w.avals[counts].dtype)),)
            self.w.collective(counts, found[0], f"{self.origin}: how many rows go where", what)
        return found[0]

    def exchanged(self, rows: Sequence[int], table: int, what: d.AllToAllV) -> list[int]:
        """Rows on the ranks that they are sent to; all in one round."""
        moves = []
        for v in rows:
            key = "dispatch", v, table, what
            if key not in self.w.seen:
                self.w.seen[key] = (self.w.new_inner(self.w.avals[v]),)
                moves.append(Move(v, self.w.seen[key][0], self.origin, what, None, table))
        if moves:
            self.w.use([*(m.source for m in moves), table])
            self.w.steps.append(Moves(tuple(moves)))
        return [self.w.seen["dispatch", v, table, what][0] for v in rows]
