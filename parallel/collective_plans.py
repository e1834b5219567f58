"""Collectives of per-rank code as plans: which piece of which rank's block goes where.

A :class:`Collective` is a small value that travels with a rank program; each process works out the plan when it prepares the
program. The plans are those of a reshard (:class:`~meshtape.parallel.reshard.Plan`), so that one executor carries out both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import Box
from .reshard import Piece, Plan, RankPlan

Shape = tuple[int, ...]


class Collective(NamedTuple):
    """What ranks do together at one place of per-rank code.

    ``shapes`` and ``results`` are those of the blocks that ranks give and get: one for all, or one a rank. ``groups`` are the
    ranks that take part, each group in the order of its coordinates along ``axes``. What ``params`` holds depends on ``kind``:

    ==================  ===============================================================================
    ``all_reduce``      ``op``
    ``all_gather``      ``dim``
    ``reduce_scatter``  ``dim``, ``lengths`` (of each rank's part)
    ``slice``           ``dim``, ``lengths``
    ``all_to_all``      ``split_dim``, ``concat_dim``, ``sizes`` (row: what a rank sends to each)
    ``permute``         ``pairs`` (from, to); who gets nothing has zeros
    ``broadcast``       ``source``
    ``message``         nothing: the first rank of the group sends, the second one gets
    ==================  ===============================================================================
    """

    kind: str
    axes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    results: tuple[Shape, ...]
    params: tuple[tuple[str, Any], ...]

    def text(self, names: Sequence[str]) -> str:
        """As in ``all_reduce(model)``."""
        if self.kind == "message":
            return f"message({self.groups[0][0]} to {self.groups[0][1]})"
        return f"{self.kind}({'+'.join(names[a] for a in self.axes)})"


def groups_of(sizes: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ along ``axes`` alone, in groups; the first axis named is the outer one.

    >>> groups_of((2, 2), (1,))
    ((0, 1), (2, 3))
    >>> groups_of((2, 2), (1, 0))
    ((0, 2, 1, 3),)
    """
    ranks = np.arange(int(np.prod(sizes, dtype=np.int64))).reshape(tuple(sizes))
    others = [a for a in range(len(sizes)) if a not in axes]
    table = ranks.transpose([*others, *axes]).reshape(-1, int(np.prod([sizes[a] for a in axes], dtype=np.int64)))
    return tuple(tuple(map(int, row)) for row in table)


@functools.lru_cache(maxsize=4096)
def plan_collective(n: int, c: Collective) -> Plan:
    """The plan on a mesh of ``n`` ranks. Ranks outside the groups have no part in it (None)."""
    params = dict(c.params)

    def given(rank: int) -> Shape:
        return c.shapes[rank if len(c.shapes) > 1 else 0]

    def wanted(rank: int) -> Shape:
        return c.results[rank if len(c.results) > 1 else 0]

    ranks: list[RankPlan | None] = [None] * n
    for group in c.groups:
        for me, rank in enumerate(group):
            if c.kind == "message" and me == 0:
                continue  # who sends gets nothing
            box = Box.whole(wanted(rank))
            pieces = tuple(
                Piece(q, s, t, term) for q, s, t, term in _pieces(c.kind, params, group, me, given, box) if s.size
            )
            ranks[rank] = RankPlan(box, pieces, not pieces and c.kind == "permute")
    reduce = params.get("op", "sum") if c.kind in ("all_reduce", "reduce_scatter") else None
    return Plan(tuple(ranks), reduce, len(c.groups[0]) if reduce else 1, "sum")


def _pieces(
    kind: str, params: dict[str, Any], group: tuple[int, ...], me: int, given: Any, box: Box
) -> Iterable[tuple[int, Box, Box, int]]:
    """(rank, part of its block, part of mine, term) of all that one rank is given."""
    if kind == "all_reduce":
        return [(q, Box.whole(given(q)), box, i) for i, q in enumerate(group)]
    if kind == "broadcast":
        q = group[params["source"]]
        return [(q, Box.whole(given(q)), box, 0)]
    if kind == "message":
        return [(group[0], Box.whole(given(group[0])), box, 0)]
    if kind == "permute":
        return [(group[s], Box.whole(given(group[s])), box, 0) for s, d in params["pairs"] if d == me]
    if kind == "all_gather":
        dim = params["dim"]
        starts = _starts([given(q)[dim] for q in group])
        return [
            (q, Box.whole(given(q)), _part(box.shape, dim, a, given(q)[dim]), 0)
            for q, a in zip(group, starts, strict=True)
        ]
    if kind in ("reduce_scatter", "slice"):
        dim, lengths = params["dim"], params["lengths"]
        start = _starts(lengths)[me]
        sources = enumerate(group) if kind == "reduce_scatter" else [(0, group[me])]
        return [(q, _part(given(q), dim, start, lengths[me]), box, i) for i, q in sources]
    if kind == "all_to_all":
        split, concat, sizes = params["split_dim"], params["concat_dim"], params["sizes"]
        out, at = [], 0
        for i, q in enumerate(group):
            part = _part(given(q), split, _starts(sizes[i])[me], sizes[i][me])
            target = _part(part.shape, concat, at, part.shape[concat])
            out.append((q, part, target, 0))
            at += part.shape[concat]
        return out
    raise AssertionError(f"no collective called {kind}")


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def _part(shape: Shape, dim: int, start: int, length: int) -> Box:
    return Box(
        tuple(start if d == dim else 0 for d in range(len(shape))),
        tuple(length if d == dim else m for d, m in enumerate(shape)),
    )
