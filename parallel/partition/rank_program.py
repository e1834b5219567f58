"""The rank program, which every rank of a mesh runs: plain data from the partitioner for the executor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...arrays.core.blocks import Box
from ...arrays.core.op import Op, ShapeDtype
from ...arrays.core.program import Const
from ..resharding.collective_plans import Collective, plan_collective
from ..resharding.expert_all_to_all import AllToAllV
from ..resharding.plan import Fetch, plan_reshard, reshard_text
from ..sharding.factors import FactorRule, RankView
from ..sharding.placement import Layout, block_box


class LocalCall(NamedTuple):
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
    """A reshard of one variable into another, or a collective of per-rank code, which has a plan of its own."""

    source: int
    target: int
    origin: str | None
    collective: Collective | Fetch | AllToAllV | None = None
    why: str | None = None
    """The reason for the move, in words."""
    table: int | None = None
    """The variable with the row counts of a :class:`AllToAllV` move."""

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.source,) if self.table is None else (self.source, self.table)


class Moves(NamedTuple):
    """Reshards that are carried out together, in one round of messages."""

    moves: tuple[Move, ...]


Step = LocalCall | Moves


@dataclass(frozen=True)
class RankProgram:
    """The partitioned form of a program: the same text for every rank of a mesh with these axis lengths.

    ``avals`` are those of the whole arrays; ``layouts`` give the block of each variable on a rank.
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

    def plan(self, m: Move) -> Any:
        """The plan of a move: a :class:`~meshtape.parallel.resharding.plan.ReshardPlan`, or the expected volume of one
        that is found at run time."""
        if isinstance(m.collective, Fetch):
            return m.collective.plan(self.sizes)
        if isinstance(m.collective, AllToAllV):
            return m.collective.plan(math.prod(self.avals[m.source].shape[1:]))
        if m.collective is not None:
            return plan_collective(math.prod(self.sizes), m.collective)
        return plan_reshard(self.avals[m.source].shape, self.sizes, self.layouts[m.source], self.layouts[m.target])

    def move_text(self, m: Move, names: Sequence[str]) -> str:
        """A move as text, such as ``all_gather(data)``."""
        if isinstance(m.collective, Fetch):
            return m.collective.text(names, self.sizes)
        if m.collective is not None:
            return m.collective.text(names)
        return reshard_text(self.layouts[m.source], self.layouts[m.target], names)

    def block(self, v: int, rank: int) -> ShapeDtype:
        """Shape and dtype of the block of a variable on one rank."""
        shape, dtype = self.avals[v]
        return ShapeDtype(
            shape if v in self.inner else block_box(self.layouts[v], self.sizes, shape, rank).shape, dtype
        )

    def view(self, step: LocalCall, rank: int) -> RankView:
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
