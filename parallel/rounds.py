"""How reshards become rounds of messages between processes.

A reshard is a plan of pieces (``reshard``). Here it is sorted by process: which parts of blocks this process sends to each other,
and how the blocks of its own ranks are joined from parts of its own and parts that arrive. Ranks of one process that need the same
block share it, and it travels once.

Two algorithms, chosen by size. *Direct*: every process is sent what its blocks are made of, all pairs at once, in one round. It is
what gathers, slices and all-to-alls are (each byte is wanted where it goes), and what reductions of few bytes are. *Scattered*: where
several processes need one and the same reduced block of many bytes, each joins a part of it and the parts are then gathered, so that
the bytes that a process sends do not grow with the number of processes. Contributions are joined in the order of their mesh
coordinates in both, which is why a result has the same bits in every run, on every rank, and on the virtual mesh; a ring would start
the order at another rank for each part (Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH,
2005, compares the algorithms; the volumes of the scattered one equal a ring's).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import Box
from .block_memory import HOST, BlockMemory
from .placement import REDUCERS
from .reshard import Piece, Plan
from .transports.pieces import Fold, Sink, Target


class Limits(NamedTuple):
    """Bytes from which a reduced block that two, or more, processes need is joined in parts."""

    pair: int
    many: int


LIMITS = Limits(4 << 20, 64 << 10)
"""Measured on one host, where for two processes both ways move the same bytes and the second round costs a latency."""

Blocks = Mapping[int, np.ndarray]


class Source(NamedTuple):
    """A part of a rank's block."""

    rank: int
    slices: tuple[slice, ...]


class Part(NamedTuple):
    """A part of a new block, and the contributions it is joined from, in order."""

    slices: tuple[slice, ...]
    shape: tuple[int, ...]
    sources: tuple[Source, ...]


class Block(NamedTuple):
    """A new block, for the ranks of one process that need it. ``neutral``: filled with the identity of a pending reduction."""

    process: int
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    neutral: bool


class Outgoing(NamedTuple):
    """What one process is sent for one part: sources of ranks of this process, perhaps only some of their elements."""

    process: int
    sources: tuple[Source, ...]
    span: slice | None


class Joining(NamedTuple):
    """How a part of one of this process's blocks is joined. ``homes`` gives the process of each source."""

    block: int
    part: Part
    span: slice | None
    homes: tuple[int, ...]


class Gathering(NamedTuple):
    """The second round of a scattered block: this process's span goes to the others, and theirs come."""

    block: int
    own: slice
    spans: Mapping[int, slice]


class MoveRounds(NamedTuple):
    """One reshard as one process takes part in it."""

    blocks: tuple[Block, ...]
    sends: tuple[Outgoing, ...]
    joins: tuple[Joining, ...]
    gathers: tuple[Gathering, ...]
    reduce: str | None
    wide: bool
    dtype: np.dtype


def _parts(pieces: Sequence[Piece]) -> tuple[Part, ...]:
    by_target: dict[Box, list[Source]] = {}
    for p in pieces:  # in the order of terms
        by_target.setdefault(p.target, []).append(Source(p.rank, p.source.slices))
    return tuple(Part(box.slices, box.shape, tuple(s)) for box, s in by_target.items())


class _Process:
    """Ranks of one process: those whose new blocks are equal (``makes``), and one for each block that is there (``has``)."""

    def __init__(self, plan: Plan, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.has: dict[Any, int] = {}
        self.makes: dict[Any, list[int]] = {}
        for r in ranks:
            self.has.setdefault(plan.holds(r), r)
            if plan.takes_part(r):
                self.makes.setdefault(plan.same(r), []).append(r)


@functools.lru_cache(maxsize=8)
def _hosted(homes: tuple[int, ...]) -> dict[int, list[int]]:
    """The ranks of each process."""
    ranks: dict[int, list[int]] = {}
    for r, h in enumerate(homes):
        ranks.setdefault(h, []).append(r)
    return ranks


@functools.lru_cache(maxsize=8)
def _processes(plan: Plan, homes: tuple[int, ...], process: int) -> dict[int, _Process]:
    """A process, and those with which it may have to do."""
    ranks, looked_at = _hosted(homes), set[int]()
    for r in ranks[process]:
        if r not in looked_at:  # partners have the same partners
            looked_at.update(plan.partners(r))
    first = {homes[q]: ranks[homes[q]][0] for q in looked_at}
    return {h: _Process(plan, ranks[h]) for h in sorted(first, key=first.__getitem__)}


def plan_rounds(plan: Plan, homes: tuple[int, ...], process: int, dtype: np.dtype, low_precision: bool) -> MoveRounds:
    """What ``process`` does in a reshard; ``homes`` gives the process of every rank."""
    return _plan_rounds(plan, homes, process, dtype, low_precision, LIMITS)


@functools.lru_cache(maxsize=512)
def _plan_rounds(
    plan: Plan, homes: tuple[int, ...], process: int, dtype: np.dtype, low_precision: bool, limits: Limits
) -> MoveRounds:
    if plan.elements_moved:
        processes = _processes(plan, homes, process)
    else:  # nobody else has a part in it
        processes = {process: _Process(plan, [r for r, h in enumerate(homes) if h == process])}
    me = processes[process]
    blocks: list[Block] = []
    joins: list[Joining] = []
    gathers: list[tuple[int, Gathering]] = []
    shared = _Shared(plan, processes, dtype, limits)
    for ranks in me.makes.values():
        first = ranks[0]
        # A block of this process stands in for its replicas elsewhere.
        pieces = [p._replace(rank=me.has.get(plan.holds(p.rank), p.rank)) for p in plan.pieces(first)]
        block = Block(process, tuple(ranks), plan.box(first).shape, _parts(pieces), plan.neutral(first))
        spans = shared.spans(first)
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
    sends = tuple(_sends(plan, processes, process, shared))
    return MoveRounds(tuple(blocks), sends, tuple(joins), in_order, plan.reduce, wide, dtype)


def _sends(plan: Plan, processes: Mapping[int, _Process], process: int, shared: _Shared) -> Iterator[Outgoing]:
    """What each other process is sent, in the order in which it joins it: block by block, and part by part."""
    lanes: dict[Any, list[int]] = {}
    for r in processes[process].ranks:
        lanes.setdefault(plan.lane(r), []).append(r)
    for q, other in processes.items():
        if q == process:
            continue
        for ranks in other.makes.values():
            first = ranks[0]
            found = [
                p
                for s in lanes.get(plan.lane(first), ())
                if plan.holds(s) not in other.has and (p := plan.piece(s, first)) is not None
            ]
            parts: dict[Box, list[Piece]] = {}
            for p in sorted(found, key=lambda p: (p.target.offset, p.term)):
                parts.setdefault(p.target, []).append(p)
            spans = shared.spans(first) if found else None
            for pieces in parts.values():
                yield Outgoing(q, tuple(Source(p.rank, p.source.slices) for p in pieces), spans and spans[q])


class _Shared:
    """Which reduced blocks are joined in parts by the processes that need them, and by which process which part.

    Those are the processes whose ranks have the collective among themselves, where each joins the same whole block; a block must
    have so many bytes that a second round costs less than it saves.
    """

    def __init__(self, plan: Plan, processes: Mapping[int, _Process], dtype: np.dtype, limits: Limits) -> None:
        self._plan, self._dtype, self._limits = plan, dtype, limits
        self._members: dict[Any, list[tuple[int, int]]] = {}  # (process, rank), in the order of processes
        self._spans: dict[Any, dict[int, slice] | None] = {}
        if plan.reduce is not None and plan.terms > 1:
            for q, p in sorted(processes.items()):
                for same, ranks in p.makes.items():
                    self._members.setdefault((same, plan.group(ranks[0])), []).append((q, ranks[0]))

    def _key(self, rank: int) -> Any:
        return self._plan.same(rank), self._plan.group(rank)

    def order(self, rank: int) -> int:
        """A number by which the blocks that two processes share are in the same order for both."""
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
        if len(members) < 2:
            return None
        first = members[0][1]
        size = self._plan.box(first).size
        if size * self._dtype.itemsize < (self._limits.pair if len(members) == 2 else self._limits.many):
            return None
        if self._plan.neutral(first) or len({p.target for p in self._plan.pieces(first)}) != 1:
            return None
        step = -(-size // (len(members) * 64)) * 64  # whole cache lines
        return {q: slice(min(i * step, size), min((i + 1) * step, size)) for i, (q, _) in enumerate(members)}


# ----- carrying it out ------------------------------------------------------------------------------------------------


def _view(blocks: Blocks, source: Source, span: slice | None, xp: Any) -> np.ndarray:
    block = blocks[source.rank]
    part = block[source.slices] if source.slices else block
    return part if span is None else xp.ascontiguousarray(part).reshape(-1)[span]


class Running:
    """One reshard being carried out: first :meth:`scatter`, an exchange, :meth:`gather` and an exchange where it has one, then
    :meth:`results`."""

    def __init__(self, rounds: MoveRounds, blocks: Blocks, neutral: object, memory: BlockMemory = HOST) -> None:
        self._rounds, self._source, self._memory = rounds, blocks, memory
        self._out: list[np.ndarray | None] = [
            memory.full(b.shape, neutral, rounds.dtype) if b.neutral else None for b in rounds.blocks
        ]

    def _block(self, i: int) -> np.ndarray:
        out = self._out[i]
        if out is None:
            out = self._out[i] = self._memory.empty(self._rounds.blocks[i].shape, self._rounds.dtype)
        return out

    def scatter(self, sends: dict[int, list[Any]], receives: dict[int, list[Any]]) -> None:
        """Add what the first round sends and receives; join what is here."""
        r = self._rounds
        for s in r.sends:
            batches = sends.setdefault(s.process, [])
            arrays = tuple(_view(self._source, x, s.span, self._memory.xp) for x in s.sources)
            # Contributions to one part travel together, chunk by chunk; what is not joined has one source.
            batches.append(arrays)
        for j in r.joins:
            block = r.blocks[j.block]
            here = [
                _view(self._source, s, j.span, self._memory.xp) if h == block.process else None
                for s, h in zip(j.part.sources, j.homes, strict=True)
            ]
            if len(here) == 1 and here[0] is not None and j.part.shape == block.shape and j.span is None:
                # The whole block from one place. Blocks are never written again, so that it may be the same memory; a part of
                # a larger block is copied, or it would keep all of that alive.
                self._out[j.block] = here[0] if _is_all(here[0]) else here[0].copy()
                continue
            self._join(j, here, self._part(j), receives)

    def _part(self, j: Joining) -> np.ndarray:
        out = self._block(j.block)
        if j.span is not None:
            return out.reshape(-1)[j.span]
        return out[j.part.slices] if j.part.slices else out

    def _join(self, j: Joining, here: list[np.ndarray | None], out: np.ndarray, receives: dict[int, list[Any]]) -> None:
        r = self._rounds
        remote: dict[int, list[int]] = {}
        for t, (x, h) in enumerate(zip(here, j.homes, strict=True)):
            if x is None:
                remote.setdefault(h, []).append(t)
        if len(here) == 1:
            if here[0] is not None:
                self._memory.copy(out, here[0])
            else:
                receives.setdefault(j.homes[0], []).append(Target(out))
            return
        assert r.reduce is not None
        fold = Fold(out, here, REDUCERS[r.reduce], r.wide)
        sink: Sink
        for h, positions in remote.items():
            sink = fold.sink(positions)
            receives.setdefault(h, []).append(sink)

    def gather(self, sends: dict[int, list[Any]], receives: dict[int, list[Any]]) -> None:
        """Add what the second round sends and receives."""
        for g in self._rounds.gathers:
            flat = self._block(g.block).reshape(-1)
            for p, span in g.spans.items():
                if g.own.stop > g.own.start:
                    sends.setdefault(p, []).append((flat[g.own],))
                if span.stop > span.start:
                    receives.setdefault(p, []).append(Target(flat[span]))

    def results(self) -> dict[int, np.ndarray]:
        """The new blocks, by rank."""
        return {rank: self._block(i) for i, b in enumerate(self._rounds.blocks) for rank in b.ranks}


def _is_all(a: np.ndarray) -> bool:
    """Whether an array has its memory to itself, give or take."""
    # (What is below an array on the pool's memory has no size of its own.)
    return getattr(a.base, "nbytes", 0) <= a.nbytes
