"""The builder of rank programs: the steps so far, and the layouts of their variables.

A pending sum (or product) of floats of one or two bytes is kept in float32: ranks add, scale and send it in that dtype,
and round the result. ``rounded`` has these variables, with the dtype of their values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.dtypes import is_low_precision
from ...arrays.core.op import Op, ShapeDtype
from ...arrays.core.program import Const, Entry, Program
from ...arrays.ops.elementwise import ASTYPE
from ..resharding.collective_plans import Collective
from ..resharding.plan import Fetch
from ..sharding.factors import FactorRule, PartCall, RankView
from ..sharding.placement import REPLICATED, Layout, Replicate, block_box, make_layout
from ..sharding.propagate import Hints, Placed, reason
from .rank_program import LocalCall, Move, Moves, Step


class RankProgramBuilder:
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
        self.made: dict[int, LocalCall] = {}  # results any block of which a rank can make by itself
        self.next_var = max(program.avals, default=-1) + 1
        self.inners: set[int] = set()
        self.hints = Hints()
        self.rounded: dict[int, np.dtype] = {}
        self.roundings: list[LocalCall] = []  # of the results of due moves

    def new(self, aval: ShapeDtype, layout: Layout) -> int:
        v = self.next_var
        self.next_var += 1
        self.avals[v], self.layouts[v] = aval, layout
        return v

    def boxes(self, var: int | Const, layout: Layout) -> list[Box]:
        """The block of each rank, if a variable has this layout."""
        shape = self.avals[var].shape if isinstance(var, int) else ()
        return [block_box(layout, self.sizes, shape, r) for r in range(math.prod(self.sizes))]

    def aval(self, var: int) -> ShapeDtype:
        """Shape and dtype of the values that a variable stands for."""
        return ShapeDtype(self.avals[var].shape, self.rounded.get(var, self.avals[var].dtype))

    def is_wide(self, dtype: np.dtype, layout: Layout) -> bool:
        """Whether values of this dtype and layout are kept in float32."""
        return is_low_precision(dtype) and any(op in ("sum", "prod") and self.sizes[a] > 1 for a, op in layout.partials)

    def cast(self, var: int, dtype: np.dtype, target: int | None = None) -> int:
        """The variable in another dtype, its layout as it is. A ``target`` is written to; else equal casts are one."""
        key = ("cast", var, dtype)
        if target is None and key in self.seen:
            return self.seen[key][0]
        out = self.new(ShapeDtype(self.avals[var].shape, dtype), self.layouts[var]) if target is None else target
        if target is None:
            self.seen[key] = (out,)
        self.use((var,))
        self.steps.append(_cast(var, out, dtype))
        return out

    def widened(self, var: int) -> int:
        """A variable of short floats in float32; others as they are."""
        if var in self.rounded or not is_low_precision(self.avals[var].dtype):
            return var
        out = self.cast(var, _FLOAT32)
        if self.is_wide(self.avals[var].dtype, self.layouts[var]):
            self.rounded[out] = self.avals[var].dtype
        return out

    def moved_to(self, var: int, layout: Layout, origin: str | None, why: str | None = None) -> int:
        """The variable with another layout; the same move is written once."""
        now = self.layouts[var]
        short = self.aval(var).dtype
        if now != layout and self.is_wide(short, layout):
            var = self.widened(var)
        if now == layout or now.on_many(self.sizes) == layout.on_many(self.sizes):
            return var
        key = (var, layout)
        found = self.moved.get(key)
        if found is None and var in self.made and not layout.partials:
            made = self.made[var]
            if made.rule.made:
                if now.is_cut_to(layout):  # no sum is pending, as none is in the new layout
                    found = self.moved[key] = self._made_as(made, var, layout, origin, why)
            elif (part := self.part_of(made, var, layout)) is not None:
                found = self.moved[key] = self.moved_to(part, layout, origin, why)
        if found is None:
            step = _between(now, layout)
            if step is not None:
                return self.moved_to(self.moved_to(var, step, origin, why), layout, origin, why)
            found = self.moved[key] = self.new(self.avals[var], layout)
            if var in self.due_targets:
                self.flush()
            dtype = None if self.avals[var].dtype == short else short  # of the value that this stands for in float32
            if now.is_cut_to(layout):
                # Nothing is sent: no reason to carry out the reductions that can still wait.
                self.steps.append(Moves((Move(var, found, origin, None, why),)))
            else:
                self.due.append(Move(var, found, origin, None, why))
                self.due_targets.add(found)
            if dtype is not None and self.is_wide(dtype, layout):
                self.rounded[found] = dtype
            elif dtype is not None:
                whole, found = found, self.new(self.aval(var), layout)
                self.moved[key] = found
                self.roundings.append(_cast(whole, found, dtype))
                self.due_targets.add(found)
        return found

    def operand(self, e: Entry, placed: Placed, i: int) -> Any:
        """Operand ``i`` of a call, in the layout that was chosen for it."""
        v, layout = e.inputs[i], placed.operands[i]
        if not isinstance(v, int) or layout is None:
            return v
        return self.moved_to(v, layout, e.origin, reason(e.origin or e.op.name, placed, i, self.layouts[v], self.sizes))

    def _made_as(self, made: LocalCall, var: int, layout: Layout, origin: str | None, why: str | None) -> int:
        """A result that any rank can make any block of, made in the blocks of ``layout``; operands are cut as it is
        split."""
        split = {x.factor: axes for d, axes in layout.shards if (x := made.rule.results[0][d]) is not None}
        inputs = []
        for v, dims in zip(made.inputs, made.rule.operands, strict=True):
            if isinstance(v, int):
                shards = {d: split[x.factor] for d, x in enumerate(dims) if x is not None and x.factor in split}
                v = self.moved_to(v, make_layout(shards), origin, why)
            inputs.append(v)
        self.use(inputs)
        found = self.new(self.avals[var], layout)
        self.steps.append(made._replace(inputs=tuple(inputs), outputs=(found,)))
        return found

    def part_of(self, made: LocalCall, var: int, layout: Layout) -> int | None:
        """A result that was made replicated made again in the parts that ``layout`` wants, where the op can; pending
        sums stay."""
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
        operands = [self.boxes(v, self.layouts[v] if isinstance(v, int) else REPLICATED) for v in made.inputs]
        by_rank = self.localized(made, rule.part, operands, [self.boxes(var, between)])
        out = self.new(self.avals[var], between)
        self.steps.append(made._replace(op=rule.part.op, outputs=(out,), rule=AS_IT_IS, by_rank=by_rank))
        if var in self.rounded:
            self.rounded[out] = self.rounded[var]
        return out

    @staticmethod
    def localized(
        call: Entry | LocalCall, part: PartCall, operands: Sequence[list[Box]], results: Sequence[list[Box]]
    ) -> dict[int, Mapping[str, Any]]:
        """The parameters of each rank's call on parts, from the boxes of all ranks by operand and by result."""
        given = zip(call.inputs, operands, strict=True)
        known = [boxes if isinstance(v, int) else [None] * len(boxes) for v, boxes in given]
        views = zip(zip(*known, strict=True), zip(*results, strict=True), strict=True)
        return {r: part.localize(call.params, RankView(*view)) for r, view in enumerate(views)}

    def new_inner(self, aval: ShapeDtype) -> int:
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
        self.steps.append(LocalCall(op, inputs, outputs, params, AS_IT_IS, origin, site, by_rank))

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
            var = self.moved_to(var, Layout(now.shards, layout.partials), origin, "its parts are fetched")
            now = self.layouts[var]
        shape = self.avals[var].shape
        if now == layout and list(boxes) == self.boxes(var, now):
            return var  # a kernel of one place, a slice of everything: each rank has what it needs
        key = ("fetch", var, layout, boxes)
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = (self.new_inner(ShapeDtype(boxes[0].shape, self.avals[var].dtype)),)
            what = Fetch(shape, now, layout, boxes)
            if var in self.due_targets:
                self.flush()
            if what.plan(self.sizes).bytes_received(1):
                self.due.append(Move(var, found[0], origin, what))
                self.due_targets.add(found[0])
            else:
                self.steps.append(Moves((Move(var, found[0], origin, what),)))
        return found[0]

    def flush(self) -> None:
        if self.due:
            self.steps.append(Moves(tuple(self.due)))
            self.steps += self.roundings
            self.due, self.due_targets, self.roundings = [], set(), []

    def use(self, variables: Sequence[int | Const]) -> None:
        """Before these are read: carry out the moves that are due, if one of them is among them."""
        if not self.due_targets.isdisjoint(v for v in variables if isinstance(v, int)):
            self.flush()


AS_IT_IS = FactorRule((), (), ())
_FLOAT32 = np.dtype(np.float32)


def _cast(var: int, target: int, dtype: np.dtype) -> LocalCall:
    return LocalCall(ASTYPE, (var,), (target,), {"dtype": dtype}, AS_IT_IS, "astype", "")


def _between(now: Layout, then: Layout) -> Layout | None:
    """An intermediate layout where different reductions end or begin together, so that each move has a single one.

    The last axis is reduced first. Axes ahead of it with another operator cannot be reduced before it, and a reduction
    that begins ahead of others begins first.
    """
    ending = {a for a, _ in now.partials} - {a for a, _ in then.partials}
    begins = [(a, op) for a, op in then.partials if a not in dict(now.partials)]
    if ending:
        last = now.partials[-1][1]
        inner = {a for a, _ in itertools.takewhile(lambda p: p[1] == last, reversed(now.partials))}
        if not ending <= inner:
            return Layout(now.shards, tuple(p for p in now.partials if p[0] not in inner))
    if len({op for _, op in begins}) > 1:
        first = {a for a, op in begins if op == begins[0][1]}
        return Layout(now.shards, tuple(p for p in then.partials if p[0] in first or p[0] in dict(now.partials)))
    return None
