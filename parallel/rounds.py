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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.blocks import Box
from .placement import REDUCERS
from .pool import POOL
from .reshard import Piece, Plan
from .transports.pieces import Fold, Sink, Target

SCATTER_PAIR, SCATTER_MANY = 4 << 20, 64 << 10
"""Bytes from which a reduced block that two, or more, processes need is joined in parts: measured on one host, where for two
processes both ways move the same bytes and the second round costs a latency."""

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


def _blocks(plan: Plan, homes: Sequence[int]) -> list[Block]:
    found: dict[Any, list[int]] = {}
    for rank, rp in enumerate(plan.ranks):
        if rp is None:
            continue
        found.setdefault((homes[rank], rp.box.shape, rp.pieces, rp.neutral), []).append(rank)
    return [
        Block(process, tuple(ranks), shape, () if neutral else _parts(pieces), neutral)
        for (process, shape, pieces, neutral), ranks in found.items()
    ]


def plan_rounds(plan: Plan, homes: Sequence[int], process: int, dtype: np.dtype, low_precision: bool) -> MoveRounds:
    """What ``process`` does in a reshard; ``homes`` gives the process of every rank."""
    blocks = _blocks(plan, homes)
    mine = [b for b in blocks if b.process == process]
    index = {id(b): i for i, b in enumerate(mine)}
    sends: list[Outgoing] = []
    joins: list[Joining] = []
    gathers: list[Gathering] = []
    for group in _shared(plan, blocks, dtype):
        spans: dict[int, slice | None] = {b.process: None for b in group}
        if len(group) > 1:
            size = int(np.prod(group[0].shape, dtype=np.int64))
            step = -(-size // (len(group) * 64)) * 64  # whole cache lines
            spans = {b.process: slice(min(i * step, size), min((i + 1) * step, size)) for i, b in enumerate(group)}
        for b in group:
            for part in b.parts:
                at = tuple(homes[s.rank] for s in part.sources)
                if b.process == process:
                    joins.append(Joining(index[id(b)], part, spans[process], at))
                else:
                    own = tuple(s for s, h in zip(part.sources, at, strict=True) if h == process)
                    if own:
                        sends.append(Outgoing(b.process, own, spans[b.process]))
        for b in group:
            if b.process == process and len(group) > 1:
                others = {p: s for p, s in spans.items() if p != process and s is not None}
                gathers.append(Gathering(index[id(b)], spans[process] or slice(0, 0), others))
    # More than two contributions of one or two bytes an element are joined in float32, and rounded once.
    wide = plan.terms > 2 and plan.reduce is not None and low_precision
    return MoveRounds(tuple(mine), tuple(sends), tuple(joins), tuple(gathers), plan.reduce, wide, dtype)


def _shared(plan: Plan, blocks: Sequence[Block], dtype: np.dtype) -> list[list[Block]]:
    """Blocks in groups: those that several processes need and that are large enough to be joined in parts stand together."""
    groups: dict[Any, list[Block]] = {}
    for i, b in enumerate(blocks):
        whole = len(b.parts) == 1 and b.parts[0].shape == b.shape
        rp = plan.ranks[b.ranks[0]]
        if rp is None or plan.reduce is None or not whole or plan.terms < 2:
            groups[i] = [b]
        else:
            # The same elements of the same contributions, whichever replica each process takes them from.
            terms = tuple(p.term for p in rp.pieces)
            groups.setdefault((rp.box, terms, tuple(p.source.shape for p in rp.pieces)), []).append(b)
    out: list[list[Block]] = []
    for found in groups.values():
        size = int(np.prod(found[0].shape, dtype=np.int64)) * dtype.itemsize
        distinct = len({b.process for b in found}) == len(found)
        many = SCATTER_PAIR if len(found) == 2 else SCATTER_MANY
        if len(found) > 1 and distinct and size >= many:
            out.append(found)
        else:
            out.extend([b] for b in found)
    return out


# ----- carrying it out ------------------------------------------------------------------------------------------------


def _view(blocks: Blocks, source: Source, span: slice | None) -> np.ndarray:
    block = blocks[source.rank]
    part = block[source.slices] if source.slices else block
    return part if span is None else _flat(part)[span]


def _flat(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).reshape(-1)


class Running:
    """One reshard being carried out: first :meth:`scatter`, an exchange, :meth:`gather` and an exchange where it has one, then
    :meth:`results`."""

    def __init__(self, rounds: MoveRounds, blocks: Blocks, neutral: object) -> None:
        self._rounds, self._source = rounds, blocks
        self._out: list[np.ndarray | None] = [
            np.full(b.shape, neutral, rounds.dtype) if b.neutral else None for b in rounds.blocks
        ]

    def _block(self, i: int) -> np.ndarray:
        out = self._out[i]
        if out is None:
            out = self._out[i] = POOL.empty(self._rounds.blocks[i].shape, self._rounds.dtype)
        return out

    def scatter(self, sends: dict[int, list[Any]], receives: dict[int, list[Any]]) -> None:
        """Add what the first round sends and receives; join what is here."""
        r = self._rounds
        for s in r.sends:
            batches = sends.setdefault(s.process, [])
            arrays = tuple(_view(self._source, x, s.span) for x in s.sources)
            # Contributions to one part travel together, chunk by chunk; what is not joined has one source.
            batches.append(arrays)
        for j in r.joins:
            block = r.blocks[j.block]
            here = [
                _view(self._source, s, j.span) if h == block.process else None
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
                out[...] = here[0]
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
    base = a.base
    return base is None or not isinstance(base, np.ndarray) or base.nbytes <= a.nbytes
