"""Plans of per-rank collectives: the target of each piece of each rank's block.

A :class:`Collective` is a small value in a rank program; each process makes the plan when it prepares the program. The
plans are those of a reshard (:class:`~meshtape.parallel.resharding.plan.ReshardPlan`), so that one executor carries out
both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from .plan import Piece, ReshardPlan

Shape = tuple[int, ...]


class Collective(NamedTuple):
    """A collective at one place of per-rank code.

    ``shapes`` and ``results`` are the shapes of the blocks that ranks send and receive: one for all, or one a rank.
    ``groups`` are the ranks that take part, each group in the order of its coordinates along ``axes``. The content of
    ``params`` depends on
    ``kind``:

    ==================  ===============================================================================
    ``all_reduce``      ``op``
    ``all_gather``      ``dim``
    ``reduce_scatter``  ``dim``, ``lengths`` (of each rank's part)
    ``slice``           ``dim``, ``lengths``
    ``all_to_all``      ``split_dim``, ``concat_dim``, ``sizes`` (:class:`~.split_sizes.SplitSizes`)
    ``permute``         ``pairs`` (from, to); ranks without a source get zeros
    ``broadcast``       ``source``
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
        return f"{self.kind}({'+'.join(names[a] for a in self.axes)})"


@functools.lru_cache(maxsize=256)
def groups_of(sizes: tuple[int, ...], axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ along ``axes`` alone, in groups; the first axis named is the outer one.

    >>> groups_of((2, 2), (1,))
    ((0, 1), (2, 3))
    >>> groups_of((2, 2), (1, 0))
    ((0, 2, 1, 3),)
    """
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    others = [a for a in range(len(sizes)) if a not in axes]
    table = ranks.transpose([*others, *axes]).reshape(-1, math.prod(sizes[a] for a in axes))
    return tuple(tuple(row) for row in table.tolist())


class CollectivePlan(ReshardPlan):
    """A :class:`Collective` on a mesh of ``size`` ranks. Ranks outside its groups have no part in it."""

    def __init__(self, size: int, c: Collective) -> None:
        self.size = size
        self._c, self._params = c, dict(c.params)
        self._place = {r: (g, i) for g, group in enumerate(c.groups) for i, r in enumerate(group)}
        reduces = c.kind in ("all_reduce", "reduce_scatter")
        self.reduce = self._params.get("op", "sum") if reduces else None
        self.terms = len(c.groups[0]) if reduces else 1
        self.fill = "sum"
        self._sender = {d: s for s, d in self._params.get("pairs", ())}
        self._starts: dict[tuple[str, Hashable], list[int]] = {}
        self._cuts: dict[tuple[int, Shape], list[Box | None]] = {}

    def _given(self, rank: int) -> Shape:
        return self._c.shapes[rank if len(self._c.shapes) > 1 else 0]

    def takes_part(self, rank: int) -> bool:
        return rank in self._place

    def box(self, rank: int) -> Box:
        return Box.whole(self._c.results[rank if len(self._c.results) > 1 else 0])

    def neutral(self, rank: int) -> bool:
        return self._c.kind == "permute" and self._place[rank][1] not in self._sender

    def lane(self, rank: int) -> Hashable:
        return self._place[rank][0] if rank in self._place else -1 - rank

    def holds(self, rank: int) -> Hashable:
        return rank

    def same(self, rank: int) -> Hashable:
        if self._c.kind in ("all_reduce", "all_gather", "broadcast"):
            return "group", self._place[rank][0]
        return "rank", rank

    def group(self, rank: int) -> Hashable:
        return self._place[rank][0]

    def partners(self, rank: int) -> Sequence[int]:
        return self._c.groups[self._place[rank][0]] if rank in self._place else (rank,)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        found = (self.piece(q, rank) for q in self._sources(rank))
        return tuple(p for p in found if p is not None)

    def _sources(self, rank: int) -> Sequence[int]:
        """Ranks that may send a piece to a rank."""
        g, me = self._place[rank]
        kind, group = self._c.kind, self._c.groups[g]
        if kind == "slice":
            return (rank,)
        if kind == "broadcast":
            return (group[self._params["source"]],)
        if kind == "permute":
            return (group[self._sender[me]],) if me in self._sender else ()
        return group

    def piece(self, source: int, rank: int) -> Piece | None:
        g, me = self._place[rank]
        where = self._part(g, self._place[source][1], me, source, rank)
        if where is None or not where[0].size:
            return None
        return Piece(source, *where, self._place[source][1] if self.reduce else 0)

    def part(self, source: int, rank: int) -> Box | None:
        if self._c.kind != "all_to_all":
            return super().part(source, rank)
        # Ranks with equal blocks and sizes cut alike: without the place in the new block, a part is looked up.
        sizes, given = self._params["sizes"], self._given(source)
        row = sizes.of[self._place[source][1]]
        cuts = self._cuts.get((row, given))
        if cuts is None:
            dim, lengths = self._params["split_dim"], sizes.rows[row]
            boxes = (
                _part(given, dim, *at) for at in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)
            )
            cuts = self._cuts[row, given] = [b if b.size else None for b in boxes]
        return cuts[self._place[rank][1]]

    def _part(self, g: int, i: int, me: int, source: int, rank: int) -> tuple[Box, Box] | None:
        """The piece from place ``i`` to place ``me`` of group ``g``: its boxes in the source and in the new block."""
        kind, params, given = self._c.kind, self._params, self._given(source)
        if kind == "all_reduce":
            return Box.whole(given), self.box(rank)
        if kind == "broadcast":
            return (Box.whole(given), self.box(rank)) if i == params["source"] else None
        if kind == "permute":
            return (Box.whole(given), self.box(rank)) if self._sender.get(me) == i else None
        if kind == "all_gather":
            dim = params["dim"]
            start = self._starts_of("blocks", g, lambda: [self._given(q)[dim] for q in self._c.groups[g]])[i]
            return Box.whole(given), _part(self.box(rank).shape, dim, start, given[dim])
        if kind in ("reduce_scatter", "slice"):
            if kind == "slice" and source != rank:
                return None
            dim, lengths = params["dim"], params["lengths"]
            start = self._starts_of("lengths", 0, lambda: lengths)[me]
            return _part(given, dim, start, lengths[me]), self.box(rank)
        if kind == "all_to_all":
            part = self.part(source, rank)
            if part is None:
                return None
            concat, sizes = params["concat_dim"], params["sizes"]
            if params["split_dim"] == concat:
                at = self._starts_of("column", sizes.kinds(me), lambda: sizes.column(me))[i]
            else:
                at = self._starts_of("blocks", g, lambda: [self._given(q)[concat] for q in self._c.groups[g]])[i]
            return part, _part(self.box(rank).shape, concat, at, part.shape[concat])
        raise AssertionError(f"no collective called {kind}")

    def _starts_of(self, what: str, i: Hashable, lengths: Any) -> list[int]:
        """Start of each of these consecutive lengths; cached."""
        found = self._starts.get((what, i))
        if found is None:
            found = self._starts[what, i] = [0, *itertools.accumulate(lengths())]
        return found

    @functools.cached_property
    def elements_moved(self) -> int:
        return sum(self._received(r) for r in self._place if self.takes_part(r))

    def _received(self, rank: int) -> int:
        own = self.part(rank, rank)
        mine = 0 if own is None else own.size
        if self.reduce:
            return self.terms * self.box(rank).size - mine
        return 0 if self.neutral(rank) else self.box(rank).size - mine


@functools.lru_cache(maxsize=4096)
def plan_collective(n: int, c: Collective) -> CollectivePlan:
    """The plan on a mesh of ``n`` ranks. Ranks outside the groups have no part in it."""
    return CollectivePlan(n, c)


def in_halves(c: Collective) -> tuple[Collective, Collective] | None:
    """Two collectives that together are ``c``, for a process that hosts all ranks.

    The first joins all blocks to one shared array, the second cuts it. That takes two copies a rank instead of one for
    each pair of ranks. None for other collectives, and where blocks differ. The two may take, and return, blocks with
    one more dimension, of the same elements in the same order.
    """
    n = len(c.groups[0]) if c.groups else 0
    if n <= 8 or len(c.shapes) > 1 or len(c.results) > 1:
        return None
    (shape,), results, params = c.shapes, c.results, dict(c.params)
    if c.kind == "reduce_scatter":
        whole = c._replace(kind="all_reduce", results=c.shapes, params=(("op", params["op"]),))
        dim, lengths = params["dim"], params["lengths"]
    elif c.kind == "all_to_all":
        dim, (lengths, *others), joined = params["split_dim"], params["sizes"].rows, params["concat_dim"]
        if others:
            return None
        if dim == joined:  # parts of one block for one rank are cut where they lie along a dimension of their own
            shape, dim = (*shape[:dim], 1, *shape[dim:]), dim + 1
            results = ((*shape[:joined], n, lengths[0], *shape[dim + 1 :]),)
        gathered = tuple(k * n if d == joined else k for d, k in enumerate(shape))
        whole = c._replace(kind="all_gather", shapes=(shape,), results=(gathered,), params=(("dim", joined),))
    else:
        return None
    params = (("dim", dim), ("lengths", lengths))
    return whole, c._replace(kind="slice", shapes=whole.results, results=results, params=params)


@functools.lru_cache(maxsize=4096)  # pairs of ranks outnumber the different parts by far
def _part(shape: Shape, dim: int, start: int, length: int) -> Box:
    before, after = shape[:dim], shape[dim + 1 :]
    return Box((0,) * len(before) + (start,) + (0,) * len(after), (*before, length, *after))
