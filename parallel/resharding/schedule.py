"""The schedule of reshards: rounds of messages between processes.

A reshard is a plan of pieces (:mod:`.plan`). A schedule sorts it by process: the parts of blocks that this process
sends to each other, and the joins of its ranks' new blocks from its own parts and received ones. Ranks of one process
that need the same block share it, and it travels once.

The algorithm is the fastest by :mod:`meshtape.parallel.collectives.costs`. All processes choose the same one, from the
same data.

*direct*
    Every process gets the pieces of its blocks from all others at once, in one round.
*scattered*
    Where several processes need one and the same block, each takes a part of it, and the parts are then gathered: two
    rounds, and twice the block in bytes, however many processes there are.
*doubling*, *halving*
    Reductions along a tree (:mod:`meshtape.parallel.collectives.combining`): of few bytes in few messages, of many
    bytes with the volumes of a ring.
*relayed*
    Small blocks that go through other processes (:mod:`meshtape.parallel.collectives.relaying`).

All of them join contributions in the order of one tree over mesh coordinates
(:mod:`meshtape.parallel.collectives.reduction_tree`). So a result has the same bits in every run, on every rank, and on
the virtual mesh. A ring would start its order at another rank for each part.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.collector import no_collections
from ...arrays.core.blocks import Box
from ..collectives.combining import ReductionShare, Tree, segments, tree_of
from ..collectives.costs import COSTS, Costs, depth
from ..collectives.relaying import Delivery, Parcel, Route, route
from .plan import Piece, ReshardPlan


class BlockSource(NamedTuple):
    """A part of a rank's block."""

    rank: int
    slices: tuple[slice, ...]


class BlockPart(NamedTuple):
    """A part of a new block, and the contributions it is joined from, in order."""

    slices: tuple[slice, ...]
    shape: tuple[int, ...]
    sources: tuple[BlockSource, ...]


class NewBlock(NamedTuple):
    """A new block, for the ranks of one process that need it. ``neutral``: filled with the identity of a pending
    reduction."""

    process: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[BlockPart, ...]
    neutral: bool


class Outgoing(NamedTuple):
    """The message to one process for one part: sources in this process's blocks, or a ``span`` of their elements."""

    process: int
    sources: tuple[BlockSource, ...]
    span: slice | None


class Joining(NamedTuple):
    """The join of a part of one of this process's blocks. ``homes`` gives the process of each source."""

    block: int
    part: BlockPart
    span: slice | None
    homes: tuple[int, ...]


class Gathering(NamedTuple):
    """The second round of a scattered block: this process sends its span and receives those of the others."""

    block: int
    own: slice
    spans: Mapping[int, slice]


class Combined(NamedTuple):
    """A reduction along the tree. ``terms`` has the sources of each contribution of this process, which form one
    vector; ``blocks`` the new blocks of this process, with their slices of its result. ``native`` has the processes of
    a sum that the transport makes, in place of the tree."""

    share: ReductionShare
    terms: tuple[tuple[int, tuple[BlockSource, ...]], ...]
    blocks: tuple[tuple[int, slice], ...]
    native: tuple[int, ...] = ()


class MoveRounds(NamedTuple):
    """The part of one process in a reshard."""

    blocks: tuple[NewBlock, ...]
    sends: tuple[Outgoing, ...]
    joins: tuple[Joining, ...]
    gathers: tuple[Gathering, ...]
    combined: tuple[Combined, ...]
    relayed: Route | None
    reduce: str | None
    wide: bool
    dtype: np.dtype

    @property
    def remote(self) -> bool:
        """Whether other processes take part."""
        return bool(self.combined or self.relayed or self.sends) or any(
            h != self.blocks[j.block].process for j in self.joins for h in j.homes
        )


def _parts(pieces: Sequence[Piece]) -> tuple[BlockPart, ...]:
    by_target: dict[Box, list[BlockSource]] = {}
    for p in pieces:  # in the order of terms
        by_target.setdefault(p.target, []).append(BlockSource(p.rank, p.source.slices))
    return tuple(BlockPart(box.slices, box.shape, tuple(s)) for box, s in by_target.items())


class _Process:
    """The ranks of one process by new block (``makes``); of each new block the first rank and its lane (``wants``); by
    lane the ranks and what they hold (``lanes``); and a rank for each held block (``has``)."""

    def __init__(self, plan: ReshardPlan, ranks: Sequence[int]) -> None:
        self.has: dict[Any, int] = {}
        self.makes: dict[Any, list[int]] = {}
        self.lanes: dict[Any, list[tuple[int, Any]]] = {}
        for r in ranks:
            held = plan.holds(r)
            self.lanes.setdefault(plan.lane(r), []).append((r, held))
            self.has.setdefault(held, r)
            if plan.takes_part(r):
                self.makes.setdefault(plan.same(r), []).append(r)
        self.wants = [(same[0], plan.lane(same[0])) for same in self.makes.values()]


@functools.lru_cache(maxsize=8)
def _hosted(homes: tuple[int, ...]) -> dict[int, list[int]]:
    """The ranks of each process."""
    ranks: dict[int, list[int]] = {}
    for r, h in enumerate(homes):
        ranks.setdefault(h, []).append(r)
    return ranks


@functools.lru_cache(maxsize=8)
def _concerned(plan: ReshardPlan, homes: tuple[int, ...], process: int) -> tuple[int, ...]:
    """A process, its partners, and their partners, by their first ranks; a process alone where nothing moves."""
    # All processes concerned must choose alike, so partners of partners count, too.
    ranks, looked_at, found, left = _hosted(homes), set[int](), {process}, [process]
    while left and plan.elements_moved:
        for r in ranks[left.pop()]:
            if r not in looked_at:  # partners have the same partners
                partners = plan.partners(r)
                looked_at.update(partners)
                new = {homes[q] for q in partners} - found
                found |= new
                left += new
    return tuple(sorted(found, key=lambda h: ranks[h][0]))


@functools.lru_cache(maxsize=8)
def _processes(plan: ReshardPlan, homes: tuple[int, ...], concerned: tuple[int, ...]) -> dict[int, _Process]:
    """The processes concerned, which is one cached table for all of them."""
    ranks = _hosted(homes)  # once: to look it up takes a hash of all homes
    return {h: _Process(plan, ranks[h]) for h in concerned}


def plan_rounds(
    plan: ReshardPlan,
    homes: tuple[int, ...],
    process: int,
    dtype: np.dtype,
    low_precision: bool,
    hosts: int = 1,
    native: bool = False,
) -> MoveRounds:
    """The part of ``process`` in a reshard; ``homes`` has the process of every rank, ``hosts`` counts machines.
    ``native``: the transport may make sums of numbers that all processes of a group need."""
    return _plan_rounds(plan, homes, process, dtype, low_precision, hosts, COSTS, native and plan.reduce == "sum")


@functools.lru_cache(maxsize=512)
@no_collections()  # more than half of the time for a thousand ranks
def _plan_rounds(
    plan: ReshardPlan,
    homes: tuple[int, ...],
    process: int,
    dtype: np.dtype,
    low_precision: bool,
    hosts: int,
    costs: Costs,
    native: bool,
) -> MoveRounds:
    concerned = _concerned(plan, homes, process)
    processes = _processes(plan, homes, concerned)
    me = processes[process]
    blocks: list[NewBlock] = []
    joins: list[Joining] = []
    gathers: list[tuple[int, Gathering]] = []
    deliveries: dict[Parcel, tuple[Delivery, ...]] = {}
    relayed = plan.elements_moved > 0 and _relayed(plan, homes, concerned, dtype.itemsize, hosts, costs) is not None
    shared = _shared(plan, homes, concerned, dtype, hosts, costs, relayed, native)
    for ranks in me.makes.values():
        first = ranks[0]
        if shared.tree(first) is not None:
            blocks.append(NewBlock(process, tuple(ranks), plan.box(first).shape, (), False))
            continue
        # A block of this process stands in for its replicas elsewhere.
        pieces = [p._replace(rank=me.has.get(plan.holds(p.rank), p.rank)) for p in plan.pieces(first)]
        spans = shared.spans(first)
        if relayed:
            for p in pieces:
                if homes[p.rank] != process:
                    parcel = Parcel(p.rank, p.source)
                    deliveries[parcel] = (*deliveries.get(parcel, ()), Delivery(len(blocks), p.target.slices))
            pieces = [p for p in pieces if homes[p.rank] == process]
        block = NewBlock(process, tuple(ranks), plan.box(first).shape, _parts(pieces), plan.neutral(first))
        for part in block.parts:
            at = tuple(homes[s.rank] for s in part.sources)
            joins.append(Joining(len(blocks), part, spans and spans[process], at))
        if spans:
            others = {p: s for p, s in spans.items() if p != process}
            gathers.append((shared.order(first), Gathering(len(blocks), spans[process], others)))
        blocks.append(block)
    # More than two contributions of one or two bytes an element are joined in float32, and rounded once.
    wide = plan.terms > 2 and plan.reduce is not None and low_precision
    # Two processes that share several blocks gather them in one order.
    in_order = tuple(g for _, g in sorted(gathers, key=lambda x: x[0]))
    found = None
    if relayed:
        found = route(sorted(processes), process, _parcels(plan, homes, concerned), deliveries)
    sends = () if relayed else tuple(_sends(plan, processes, process, shared))
    combined = tuple(shared.combined(process, blocks))
    return MoveRounds(tuple(blocks), sends, tuple(joins), in_order, combined, found, plan.reduce, wide, dtype)


def described(plan: ReshardPlan, dtype: np.dtype) -> str:
    """The algorithm and its expected time, if each rank is a process on one host; empty for direct moves."""
    homes = tuple(range(plan.size))
    if plan.size <= 2 or plan.elements_moved == 0:
        return ""
    first = next(filter(plan.takes_part, homes), None)
    if first is None:
        return ""
    concerned = _concerned(plan, homes, first)
    seconds, name = _relayed(plan, homes, concerned, dtype.itemsize, 1, COSTS), "relayed"
    if seconds is None:
        shared = _shared(plan, homes, concerned, dtype, 1, COSTS, False)
        if shared.tree(first) is None and shared.spans(first) is None:
            return ""
        name, seconds = shared.chosen[plan.group(first)]
    return f"{name}, about {seconds * 1e3:.3g} ms"


def _sends(plan: ReshardPlan, processes: Mapping[int, _Process], process: int, shared: _Shared) -> Iterator[Outgoing]:
    """The messages to other processes, in the order in which these join them: block by block, part by part. Blocks that
    are reduced along the tree are left out."""
    mine = processes[process].lanes
    for q, other in processes.items():
        for first, lane in other.wants if q != process else ():
            if shared.tree(first) is not None:
                continue
            found = [
                p for s, held in mine.get(lane, ()) if held not in other.has and (p := plan.piece(s, first)) is not None
            ]
            found.sort(key=lambda p: (p.target.offset, p.term))
            spans = shared.spans(first) if found else None
            for _, pieces in itertools.groupby(found, key=lambda p: p.target):
                yield Outgoing(q, tuple(BlockSource(p.rank, p.source.slices) for p in pieces), spans and spans[q])


@functools.lru_cache(maxsize=2)  # the choice of the algorithm asks for some first
def _parcels(
    plan: ReshardPlan, homes: tuple[int, ...], concerned: tuple[int, ...]
) -> Callable[[int, int], list[Parcel]]:
    """A function (process, other process) that lists the parcels of one for the other, in a move without reduction."""
    processes = _processes(plan, homes, concerned)
    # An all-gather has the same parcels for all that make the same blocks, and lack the same ones.
    kinds = dict[Any, int]()
    replicated = len(set().union(*(p.has for p in processes.values()))) < sum(len(p.has) for p in processes.values())
    of = {
        q: kinds.setdefault(
            (*p.makes, *(lane for _, lane in p.wants), *(p.has if replicated else ())),
            len(kinds),
        )
        for q, p in processes.items()
    }
    known: dict[tuple[int, int], list[Parcel]] = {}

    def between(process: int, q: int) -> list[Parcel]:
        found = known.get((process, of[q]))
        if found is None:
            lanes, other = processes[process].lanes, processes[q]
            found = known[process, of[q]] = [
                Parcel(s, part)
                for first, lane in other.wants
                for s, held in lanes.get(lane, ())
                if held not in other.has and (part := plan.part(s, first)) is not None
            ]
        return found

    return between


@functools.lru_cache(maxsize=512)
def _relayed(
    plan: ReshardPlan, homes: tuple[int, ...], concerned: tuple[int, ...], itemsize: int, hosts: int, costs: Costs
) -> float | None:
    """Expected seconds of the relayed algorithm, if it is the fastest; estimated from the first process and a
    source."""
    processes = _processes(plan, homes, concerned)
    if plan.reduce is not None or len(processes) <= 2 or (len(processes) <= 8 and costs.only is None):
        return None

    def givers(q: int) -> set[int]:
        return {homes[p.rank] for first, _ in processes[q].wants for p in plan.pieces(first)} - {q}

    n, (first, second, *_) = len(processes), sorted(processes)
    given = givers(first)
    giver, taker = (min(given), first) if given else (first, second)
    parcels = _parcels(plan, homes, concerned)
    if len(parcels(giver, taker)) * n * (depth(n) + 2) > 16 * plan.size:
        return None  # planning the parcels would take longer than it saves
    lists = [parcels(giver, q) if q != giver else [] for q in processes]
    takers = [q for q, some in zip(processes, lists, strict=True) if some]
    partners = max(len(given), len(takers), *(len(givers(q)) for q in takers[:1]))
    out = itemsize * sum(x.part.size for some in lists for x in some)
    gives = itemsize * sum(x.part.size for x in {x for some in lists for x in some})
    gets = itemsize * plan.elements_moved / n
    ways = costs.movement(n, partners, gets, out, gives, hosts)
    return ways.relayed if costs.best(ways) == "relayed" else None


@functools.lru_cache(maxsize=8)
def _shared(
    plan: ReshardPlan,
    homes: tuple[int, ...],
    concerned: tuple[int, ...],
    dtype: np.dtype,
    hosts: int,
    costs: Costs,
    relayed: bool,
    native: bool = False,
) -> _Shared:
    alone = relayed or not plan.elements_moved
    return _Shared(plan, {} if alone else _processes(plan, homes, concerned), homes, dtype, hosts, costs, native)


class _Shared:
    """The algorithms for blocks that several processes share.

    ``tree`` is for processes whose ranks have the collective among themselves, each with one contribution in one piece.
    ``spans`` is for processes that need the same whole block, each of which takes a part of it first.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        processes: Mapping[int, _Process],
        homes: tuple[int, ...],
        dtype: np.dtype,
        hosts: int,
        costs: Costs,
        native: bool,
    ) -> None:
        self._plan, self._processes, self._homes, self._dtype = plan, processes, homes, dtype
        self._hosts, self._costs, self._native = hosts, costs, native
        self._members: dict[Any, list[tuple[int, int]]] = {}  # (process, rank), in the order of processes
        self._groups: dict[Any, list[tuple[int, int]]] = {}
        self._spans: dict[Any, dict[int, slice] | None] = {}
        self._trees: dict[Any, _TreeReduction | None] = {}
        self.chosen: dict[Any, tuple[str, float]] = {}
        """The algorithm and its seconds, by group."""
        if len(processes) > 1:
            for q, p in sorted(processes.items()):
                for same, ranks in p.makes.items():
                    group = plan.group(ranks[0])
                    self._members.setdefault((same, group), []).append((q, ranks[0]))
                    self._groups.setdefault(group, []).append((q, ranks[0]))

    def _key(self, rank: int) -> Any:
        return self._plan.same(rank), self._plan.group(rank)

    def order(self, rank: int) -> int:
        """A sort key that gives two processes the same order of their shared blocks."""
        return self._members[self._key(rank)][0][1]

    def spans(self, rank: int) -> dict[int, slice] | None:
        """The part of the flat block of ``rank`` that each process joins; None where each joins all of it."""
        if not self._members:
            return None
        key = self._key(rank)
        if key not in self._spans:
            self._spans[key] = self._divided(self._members.get(key, ()))
        return self._spans[key]

    def _divided(self, members: Sequence[tuple[int, int]]) -> dict[int, slice] | None:
        n, plan = len(members), self._plan
        if n < 2 or (plan.reduce is None and n == 2):
            return None
        first = members[0][1]
        size = plan.box(first).size
        nbytes = size * self._dtype.itemsize
        if plan.reduce is not None:
            ways = self._costs.reduction(n, nbytes, hosts=self._hosts, tree=False)
        else:
            ways = self._costs.movement(n, n - 1, nbytes, (n - 1) * nbytes, nbytes, self._hosts)._replace(
                relayed=math.inf
            )
        if self._costs.best(ways) != "scattered" or plan.neutral(first):
            return None
        self.chosen[plan.group(first)] = "scattered", ways.scattered
        pieces = plan.pieces(first)
        if len({p.target for p in pieces}) != 1 or (plan.reduce is None and not self._is_from_one(members, pieces[0])):
            return None
        step = -(-size // (n * 64)) * 64  # whole cache lines
        return {q: slice(min(i * step, size), min((i + 1) * step, size)) for i, (q, _) in enumerate(members)}

    def _is_from_one(self, members: Sequence[tuple[int, int]], piece: Piece) -> bool:
        """Whether all members need one block that a single one of them has."""
        plan, holds = self._plan, self._plan.holds(piece.rank)
        here = [q for q, _ in members if holds in self._processes[q].has]
        return here == [self._homes[piece.rank]] and len({plan.lane(r) for _, r in members}) == 1

    def tree(self, rank: int) -> _TreeReduction | None:
        """The reduction of a rank's group along the tree; None if it uses another algorithm."""
        if self._plan.reduce is None or len(self._groups) == 0 or self._plan.terms < 2:
            return None
        group = self._plan.group(rank)
        if group not in self._trees:
            self._trees[group] = self._grown(self._groups[group])
        return self._trees[group]

    def _grown(self, entries: Sequence[tuple[int, int]]) -> _TreeReduction | None:
        plan, homes = self._plan, self._homes
        members = dict.fromkeys(q for q, _ in entries)
        n, first = len(members), entries[0][1]
        few = n <= 4 and self._costs.only is None
        if n < 2 or (few and not self._native) or any(plan.neutral(r) for _, r in entries):
            return None
        items: dict[Any, tuple[int, list[int]]] = {}  # a rank of each different block, and the processes that make it
        for q, r in entries:
            items.setdefault(plan.same(r), (r, []))[1].append(q)
        items = {k: x for k, x in items.items() if plan.box(x[0]).size}
        sizes = [plan.box(r).size for r, _ in items.values()]
        nbytes = sum(sizes) * self._dtype.itemsize
        one = len(items) == 1 and len(next(iter(items.values()))[1]) == n
        if not items or not (one or all(len(x[1]) == 1 for x in items.values())):
            return None
        native = self._native and one
        ways = self._costs.reduction(n, nbytes, scatter=not one, hosts=self._hosts)
        best = "doubling" if native else self._costs.best(ways)
        if best not in ("doubling", "halving") or (few and not native):
            return None
        self.chosen[plan.group(first)] = best, getattr(ways, best)
        pieces = plan.pieces(next(iter(items.values()))[0])
        if len(pieces) != plan.terms or [p.term for p in pieces] != list(range(plan.terms)):
            return None
        at = tuple(homes[p.rank] for p in pieces)
        lane = plan.lane(first)
        if set(at) != set(members) or any(plan.lane(r) != lane for _, r in entries):
            return None
        for r, _ in items.values():
            piece = plan.piece(pieces[0].rank, r)
            if piece is None or piece.target.shape != plan.box(r).shape:
                return None
        ranks = tuple(r for r, _ in items.values())
        if not one:
            bounds = [0, *itertools.accumulate(sizes)]
            owners = tuple(q for _, (q,) in items.values())
        elif best == "halving":
            bounds, owners = segments(at, sizes[0])
        else:
            bounds, owners = [0, sizes[0]], None
        sources = tuple(p.rank for p in pieces)
        members_of_native = tuple(sorted(members)) if native else ()
        back = one and best == "halving"
        return _TreeReduction(tree_of(at, owners), sources, ranks, tuple(bounds), back, one, members_of_native)

    def combined(self, process: int, blocks: Sequence[NewBlock]) -> Iterator[Combined]:
        """The parts of one process in reductions along the tree."""
        plan = self._plan
        found: dict[Any, list[int]] = {}
        for i, b in enumerate(blocks):
            if self.tree(b.ranks[0]) is not None:
                found.setdefault(plan.group(b.ranks[0]), []).append(i)
        # Two processes that share several reductions have their messages in one order.
        for g, indices in sorted(((self._trees[k], x) for k, x in found.items()), key=lambda x: x[0].sources):  # type: ignore
            terms = []
            for t, s in enumerate(g.sources):
                if self._homes[s] == process:
                    pieces = [p for r in g.items if (p := plan.piece(s, r)) is not None]
                    terms.append((t, tuple(BlockSource(s, p.source.slices) for p in pieces)))
            share = g.tree.share(process, g.bounds, g.back)
            mine, at = [], 0
            for i in indices:
                size = math.prod(blocks[i].shape)
                if size:
                    mine.append((i, slice(at, at + size)))
                    at += 0 if g.whole else size
            yield Combined(share, tuple(terms), tuple(mine), g.native)


class _TreeReduction(NamedTuple):
    """A reduction along the tree: contributions of the ranks ``sources``, and in ``items`` one rank for each different
    new block (``whole``: all processes need the same one). ``native``: see :class:`Combined`."""

    tree: Tree
    sources: tuple[int, ...]
    items: tuple[int, ...]
    bounds: tuple[int, ...]
    back: bool
    whole: bool
    native: tuple[int, ...]
