"""Reshard plans: the source of each piece of each target block, as pure values.

A plan can be inspected, counted and tested without a cluster. Its rule: every element of every target block comes from
exactly one source block, or, where contributions are pending, from exactly one block of each contribution. Any pair of
layouts on one mesh has a plan; gather, slice, all-to-all, all-reduce and reduce-scatter are special cases.

A plan is arithmetic on coordinates, not a list of pairs of ranks: it gives the pieces of one rank, or of one pair of
ranks. A process queries its own ranks alone, so that its work grows with the number of ranks, not with its square.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import ReshardError
from ..sharding.placement import Layout, Partial, Replicate, Shard, block_box, group_of, strides_of


class Piece(NamedTuple):
    """Part of a target block: ``source`` is the part of rank ``rank``'s block, ``target`` the part of the new block,
    both as boxes within their blocks. ``term`` numbers the contribution that it belongs to."""

    rank: int
    source: Box
    target: Box
    term: int


class ReshardPlan(ABC):
    """The pieces that move between the blocks of ``size`` ranks.

    ``reduce`` is the operator that joins the ``terms`` contributions to an element, None for a single one. Neutral
    blocks are filled with the identity of the operator ``fill``.

    Ranks come in classes, by which a process avoids double work:

    * replicas, which hold the same block of the same contribution, agree in :meth:`holds`;
    * a rank takes each piece from the one replica with its own :meth:`lane`, or from one of its own process;
    * ranks whose new blocks are equal agree in :meth:`same`;
    * ranks that have a collective among themselves agree in :meth:`group`;
    * only :meth:`partners` exchange pieces.
    """

    size: int
    reduce: str | None
    terms: int
    fill: str

    @abstractmethod
    def takes_part(self, rank: int) -> bool:
        """Whether a rank gets a new block."""

    @abstractmethod
    def box(self, rank: int) -> Box:
        """The new block of a rank."""

    def neutral(self, rank: int) -> bool:
        """Whether a rank's new block is filled with the identity of a pending reduction."""
        return False

    @abstractmethod
    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of a rank's new block, by contribution and by place within each."""

    @abstractmethod
    def piece(self, source: int, rank: int) -> Piece | None:
        """The piece of a rank's new block from ``source``, a rank of its lane; None if there is none."""

    def part(self, source: int, rank: int) -> Box | None:
        """The part of the source's block in :meth:`piece`."""
        found = self.piece(source, rank)
        return None if found is None else found.source

    @abstractmethod
    def lane(self, rank: int) -> Hashable: ...

    @abstractmethod
    def holds(self, rank: int) -> Hashable: ...

    @abstractmethod
    def same(self, rank: int) -> Hashable: ...

    @abstractmethod
    def group(self, rank: int) -> Hashable: ...

    @abstractmethod
    def partners(self, rank: int) -> Sequence[int]:
        """The rank itself, and all ranks that it may exchange pieces with. Partners of partners are partners."""

    @property
    @abstractmethod
    def elements_moved(self) -> int:
        """Elements that cross between ranks."""

    def bytes_received(self, itemsize: int) -> int:
        """Bytes that cross between ranks."""
        return itemsize * self.elements_moved


_box = functools.lru_cache(maxsize=8192)(Box)


class Overlap(NamedTuple):
    """One block of a layout that meets a box: ``rank`` is the rank at that block whose other coordinates are 0."""

    rank: int
    source: Box
    target: Box


def overlaps(layout: Layout, sizes: tuple[int, ...], shape: Sequence[int], want: Box) -> list[Overlap]:
    """The blocks of a layout that meet ``want``, in order. They are found by division, without a search.

    >>> rows = Layout(((0, (0,)),))
    >>> [(o.rank, o.target.offset) for o in overlaps(rows, (4,), (10,), Box((2,), (5,)))]
    [(0, (0,)), (1, (1,)), (2, (4,))]
    """
    if not want.size:
        return []
    if not shape:
        return [Overlap(0, want, want)]
    strides = strides_of(sizes)
    found: list[
        list[tuple[int, int, int, int]]
    ] = []  # for each dimension: (rank, start in block, start in want, length)
    for dim, (lo, n) in enumerate(zip(want.offset, want.shape, strict=True)):
        axes = layout.axes_of(dim)
        if not axes:
            found.append([(0, lo, 0, n)])
            continue
        step = -(-shape[dim] // math.prod(sizes[a] for a in axes))
        here = []
        for b in range(lo // step, (lo + n - 1) // step + 1):
            start, stop = max(lo, b * step), min(lo + n, (b + 1) * step)
            rank, rest = 0, b
            for a in reversed(axes):
                rest, at = divmod(rest, sizes[a])
                rank += at * strides[a]
            here.append((rank, start - b * step, start - lo, stop - start))
        found.append(here)
    return [
        Overlap(sum(ranks), _box(source, lengths), _box(target, lengths))
        for ranks, source, target, lengths in (zip(*parts, strict=True) for parts in itertools.product(*found))
    ]


def _along(rank: int, steps: Sequence[tuple[int, int]]) -> int:
    """The part of a rank's number that its coordinates along some axes make."""
    out = 0
    for stride, n in steps:
        out += rank // stride % n * stride
    return out


@functools.lru_cache(maxsize=8)
def _blocks_of(plan: Reshard) -> dict[tuple[int, Any], Box]:
    """The blocks of ranks, old (True) and new (False), while a plan is being made: each meets many others. In plans
    without double cuts also what a new block takes of blocks of a shape: the same of all of them."""
    return {}


class Reshard(ReshardPlan):
    """From one layout to another; see :func:`plan_reshard`."""

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        source: Layout,
        target: Layout,
        boxes: tuple[Box, ...] | None,
    ) -> None:
        before, after = dict(source.partials), dict(target.partials)
        reduced = [a for a in before if a not in after]
        for a in after:
            if a in before and before[a] != after[a]:
                raise ReshardError(f"a pending {before[a]} along mesh axis {a} cannot become a pending {after[a]}")
        ops = {before[a] for a in reduced}
        if len(ops) > 1:
            raise ReshardError(f"reductions {sorted(ops)} are pending together: reduce one axis after the other")
        self.size = math.prod(sizes)
        self.reduce = ops.pop() if ops else None
        self.terms = math.prod(sizes[a] for a in reduced)
        fresh = [a for a in after if a not in before]
        self.fill = after[fresh[0]] if fresh else "sum"
        self._shape, self._sizes, self._source, self._target, self._boxes = shape, sizes, source, target, boxes
        self._reduced = reduced
        self._reduced_steps = self._steps(reduced)
        kept = [a for a in before if a in after]
        carried = [a for a in fresh if after[a] in ("sum", "prod", "any", "all")]
        bound = {*before, *(a for _, axes in source.shards for a in axes)}
        free = [a for a in range(len(sizes)) if a not in bound]
        idle = [a for a in range(len(sizes)) if source.placement(a) == target.placement(a)]
        split = {a for _, axes in source.shards for a in axes}
        fixed = {a for a in idle if a not in split} | (self._aligned() if boxes is None else set())
        cut_twice = any(source.axes_of(d) and target.axes_of(d) for d in range(len(shape)))
        self._apart = boxes is None and not cut_twice
        self._open = tuple(a for a in range(len(sizes)) if a not in fixed)
        # Each class of ranks is a part of their numbers.
        self._free, self._kept, self._carried, self._idle = map(self._steps, (free, kept, carried, idle))

    def _steps(self, axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Stride and length of each of these axes."""
        strides = strides_of(self._sizes)
        return tuple((strides[a], self._sizes[a]) for a in axes)

    def _aligned(self) -> set[int]:
        """Outer axes that cut a dimension at the same places before and after."""
        found: set[int] = set()
        for dim, n in enumerate(self._shape):
            before, after = self._source.axes_of(dim), self._target.axes_of(dim)
            outer = [a for a, b in zip(before, after, strict=False) if a == b]
            if before[: len(outer)] != after[: len(outer)]:
                continue
            parts = math.prod(self._sizes[a] for a in outer)
            inner = [math.prod(self._sizes[a] for a in axes) // parts for axes in (before, after)]
            if len({k * -(-n // (parts * k)) for k in inner}) == 1:
                found.update(outer)
        return found

    def partners(self, rank: int) -> Sequence[int]:
        return group_of(self._sizes, self._open, rank)

    def takes_part(self, rank: int) -> bool:
        return True

    def box(self, rank: int) -> Box:
        return block_box(self._target, self._sizes, self._shape, rank) if self._boxes is None else self._boxes[rank]

    def neutral(self, rank: int) -> bool:
        return bool(self._carried) and _along(rank, self._carried) != 0

    def lane(self, rank: int) -> Hashable:
        return _along(rank, self._free), _along(rank, self._kept)

    def holds(self, rank: int) -> Hashable:
        return rank - _along(rank, self._free)

    def same(self, rank: int) -> Hashable:
        return self._block(rank, False), _along(rank, self._kept), self.neutral(rank)

    def group(self, rank: int) -> Hashable:
        return _along(rank, self._idle)

    @functools.cached_property
    def _term_ranks(self) -> list[int]:
        """For each contribution, the rank with its coordinates along the reduced axes and 0 along all others."""
        strides = strides_of(self._sizes)
        places = itertools.product(*(range(self._sizes[a]) for a in self._reduced))
        return [sum(i * strides[a] for a, i in zip(self._reduced, p, strict=True)) for p in places]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        if self.neutral(rank):
            return ()
        base = _along(rank, self._free) + _along(rank, self._kept)
        found = overlaps(self._source, self._sizes, self._shape, self.box(rank))
        return tuple(
            Piece(base + first + o.rank, o.source, o.target, term)
            for term, first in enumerate(self._term_ranks)
            for o in found
        )

    def piece(self, source: int, rank: int) -> Piece | None:
        if self.neutral(rank):
            return None
        have, want = self._block(source, True), self._block(rank, False)
        if self._apart:
            # One of the two is whole along each dimension, so that few boxes make all pieces.
            common = tuple(map(min, have.shape, want.shape))
            found = None if 0 in common else (_box(want.offset, common), _box(have.offset, common))
        else:
            found = have.meet(want)
        if found is None:
            return None
        term = 0
        for stride, n in self._reduced_steps:
            term = term * n + source // stride % n
        return Piece(source, *found, term)

    def part(self, source: int, rank: int) -> Box | None:
        if not self._apart:
            return super().part(source, rank)
        blocks, key = _blocks_of(self), (rank, self._block(source, True).shape)
        found = blocks.get(key)
        if found is None and (found := super().part(source, rank)) is not None:
            blocks[key] = found
        return found

    def _block(self, rank: int, old: bool) -> Box:
        blocks = _blocks_of(self)
        if (found := blocks.get((rank, old))) is None:
            found = blocks[rank, old] = (
                block_box(self._source, self._sizes, self._shape, rank) if old else self.box(rank)
            )
        return found

    @functools.cached_property
    def elements_moved(self) -> int:
        # The elements that a rank needs of all contributions, less those in its own block; for all ranks at once.
        need, own = np.ones(self.size, np.int64), np.ones(self.size, np.int64)
        want = self._ends(self._target, self._boxes)
        for (lo, hi), (start, stop) in zip(want, self._ends(self._source, None), strict=True):
            need *= hi - lo
            own *= np.maximum(np.minimum(hi, stop) - np.maximum(lo, start), 0)
        taking = np.ones(self.size, bool)
        for stride, n in self._carried:
            taking &= np.arange(self.size) // stride % n == 0
        return int(np.sum((self.terms * need - own)[taking]))

    def _coordinates(self, axis: int) -> np.ndarray:
        """Coordinates of all ranks along one axis."""
        return np.arange(self.size) // strides_of(self._sizes)[axis] % self._sizes[axis]

    def _ends(self, layout: Layout, boxes: Sequence[Box] | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where the blocks of all ranks start and stop, by dimension."""
        if boxes is not None:
            return [
                (np.array([b.offset[d] for b in boxes]), np.array([b.stop[d] for b in boxes]))
                for d in range(len(self._shape))
            ]
        out = []
        for dim, n in enumerate(self._shape):
            index, parts = np.zeros(self.size, np.int64), 1
            for a in layout.axes_of(dim):
                index = index * self._sizes[a] + self._coordinates(a)
                parts *= self._sizes[a]
            step = -(-n // parts)
            out.append((np.minimum(index * step, n), np.minimum((index + 1) * step, n)))
        return out


@functools.lru_cache(maxsize=4096)
def plan_reshard(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    source: Layout,
    target: Layout,
    boxes_wanted: tuple[Box, ...] | None = None,
) -> Reshard:
    """The plan from one layout to another, for an array of ``shape`` on a mesh of lengths ``sizes``.

    With ``boxes_wanted`` each rank gets that part of the array instead of its block in ``target``. Raises
    :class:`ReshardError` when a pending reduction would have to become another one.

    An all-reduce over 4,096 ranks is planned for the one rank that asks:

    >>> plan = plan_reshard((6,), (4096,), Layout((), ((0, "sum"),)), Layout())
    >>> plan.terms, len(plan.pieces(7)), plan.bytes_received(8)
    (4096, 4096, 805109760)
    """
    return Reshard(shape, sizes, source, target, boxes_wanted)


def reshard_text(source: Layout, target: Layout, names: Sequence[str]) -> str:
    """A reshard as collectives, axis by axis: ``all_reduce(model)``."""
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


class Fetch(NamedTuple):
    """A move in which each rank gets a box of an array of its own choice; ``boxes`` has them by rank."""

    shape: tuple[int, ...]
    source: Layout
    target: Layout
    boxes: tuple[Box, ...]

    def plan(self, sizes: tuple[int, ...]) -> ReshardPlan:
        return plan_reshard(self.shape, sizes, self.source, self.target, self.boxes)

    def text(self, names: Sequence[str], sizes: tuple[int, ...]) -> str:
        """As in ``halo_exchange(data)``; ``slice(data)`` if every rank has its box already."""
        axes = sorted({a for _, split in (*self.source.shards, *self.target.shards) for a in split})
        kind = "halo_exchange" if self.plan(sizes).elements_moved else "slice"
        return f"{kind}({'+'.join(names[a] for a in axes)})"
