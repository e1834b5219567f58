"""Resharding as a pure plan: which piece of which block goes where.

A plan is a value that can be looked at, counted and tested without a cluster. Its rule: every element of every target block
comes from exactly one source block, or, where contributions are pending, from exactly one block of each contribution. Any pair
of layouts on one mesh has a plan: gather, slice, all-to-all, all-reduce and reduce-scatter are what it turns out to be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import ReshardError
from .placement import Layout, block_box


class Piece(NamedTuple):
    """Part of a target block: ``source`` is the part of rank ``rank``'s block, ``target`` the part of the new block, both as
    boxes within their blocks. ``term`` numbers the contribution that it belongs to."""

    rank: int
    source: Box
    target: Box
    term: int


class RankPlan(NamedTuple):
    """How one rank's new block is made: from ``pieces``, in order; ``neutral`` blocks are filled with the identity of a pending
    reduction, which another rank's block carries."""

    box: Box
    pieces: tuple[Piece, ...]
    neutral: bool


class Plan(NamedTuple):
    """A reshard: one :class:`RankPlan` a rank (None for a rank that has no part in it). ``reduce`` is the operator that joins
    terms, None where there is one term; ``fill`` that whose identity neutral blocks are filled with."""

    ranks: tuple[RankPlan | None, ...]
    reduce: str | None
    terms: int
    fill: str = "sum"

    def bytes_received(self, itemsize: int) -> int:
        """Bytes that cross between ranks."""
        return itemsize * sum(
            p.source.size for rank, plan in enumerate(self.ranks) if plan for p in plan.pieces if p.rank != rank
        )


@functools.lru_cache(maxsize=4096)
def plan_reshard(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    source: Layout,
    target: Layout,
    homes: tuple[int, ...] | None = None,
    boxes_wanted: tuple[Box, ...] | None = None,
) -> Plan:
    """The plan from one layout to another, for an array of ``shape`` on a mesh of lengths ``sizes``.

    ``homes`` gives the process of each rank: among equal blocks the rank's own is taken first, then one of its process. With
    ``boxes_wanted`` each rank gets that part of the array instead of its block in ``target``.

    Raises
    ------
    ReshardError
        When a pending reduction would have to become another one.
    """
    before, after = dict(source.partials), dict(target.partials)
    reduced = [a for a in before if a not in after]
    for a in after:
        if a in before and before[a] != after[a]:
            raise ReshardError(f"a pending {before[a]} along mesh axis {a} cannot become a pending {after[a]}")
    ops = {before[a] for a in reduced}
    if len(ops) > 1:
        raise ReshardError(f"reductions {sorted(ops)} are pending together: reduce one axis after the other")
    kept = [a for a in before if a in after]
    fresh = [a for a in after if a not in before]
    n = math.prod(sizes)
    coords = [tuple(int(c) for c in np.unravel_index(r, sizes)) if sizes else () for r in range(n)]
    boxes = [block_box(source, sizes, shape, r) for r in range(n)]
    where = homes or tuple(range(n))
    # Ranks by contribution, and within it by block: replicas stand side by side.
    terms = sorted({tuple(c[a] for a in reduced) for c in coords})
    holders: list[dict[Box, list[int]]] = []
    for term in terms:
        by_box: dict[Box, list[int]] = {}
        for r in range(n):
            if tuple(coords[r][a] for a in reduced) == term and boxes[r].size:
                by_box.setdefault(boxes[r], []).append(r)
        holders.append(by_box)
    out = []
    for r in range(n):
        want = block_box(target, sizes, shape, r) if boxes_wanted is None else boxes_wanted[r]
        neutral = any(coords[r][a] != 0 and after[a] in ("sum", "prod", "any", "all") for a in fresh)
        pieces: list[Piece] = []
        if not neutral and want.size:
            for t, by_box in enumerate(holders):
                for box, ranks in by_box.items():
                    part = box.intersect(want)
                    if part is None:
                        continue
                    # A contribution that stays pending must come from a rank with the same coordinate there.
                    able = [s for s in ranks if all(coords[s][a] == coords[r][a] for a in kept)]
                    if not able:
                        continue
                    s = min(able, key=lambda q: (q != r, where[q] != where[r], (q - r) % n))
                    pieces.append(Piece(s, part.within(box), part.within(want), t))
        out.append(RankPlan(want, tuple(pieces), neutral))
    return Plan(tuple(out), ops.pop() if ops else None, len(terms), after[fresh[0]] if fresh else "sum")


def reshard_text(source: Layout, target: Layout, names: Sequence[str]) -> str:
    """What a reshard amounts to, axis by axis, in the field's words: ``all_reduce(model)``."""
    from .placement import Partial, Replicate, Shard

    words = []
    for i, name in enumerate(names):
        a, b = source.placement(i), target.placement(i)
        if a == b:
            continue
        kind = {
            (Shard, Replicate): "all_gather",
            (Replicate, Shard): "slice",
            (Shard, Shard): "all_to_all",
            (Partial, Replicate): "all_reduce",
            (Partial, Shard): "reduce_scatter",
            (Replicate, Partial): "keep_one",
            (Shard, Partial): "all_gather+keep_one",
        }.get((type(a), type(b)), "reshard")
        words.append(f"{kind}({name})")
    return ", ".join(words) or "reorder"
