"""Execution of reshards: the messages of each round, and the new blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.core.dtypes import is_low_precision
from ..base.device_memory import HOST, BlockMemory
from ..collectives.combining import AllReduce, Combining, Messages
from ..collectives.pieces import ArraySink, BatchSink, Fold
from ..collectives.relaying import Relaying
from ..sharding.placement import REDUCERS
from .schedule import BlockSource, Combined, Joining, MoveRounds

Blocks = Mapping[int, np.ndarray]
MOST_ROUNDS = 64
"""More than any reshard has: there and back through a tree over the largest mesh take 41."""


def carry_out(running: Sequence[Any], exchange: Callable[[int, Messages, Messages], None]) -> None:
    """Carry out some reshards together. ``exchange`` gets the number of the round, below :data:`MOST_ROUNDS`, and its
    messages."""
    for i, (sends, receives) in enumerate(together([r.rounds() for r in running])):
        if sends or receives:
            exchange(i, sends, receives)


def together(going: Sequence[Iterator[tuple[Messages, Messages]]]) -> Iterator[tuple[Messages, Messages]]:
    """The messages of several reshards, round by round, in their order."""
    if len(going) == 1:
        yield from going[0]
        return
    for messages in itertools.zip_longest(*going, fillvalue=({}, {})):
        out: tuple[Messages, Messages] = {}, {}
        for one in messages:
            for into, some in zip(out, one, strict=True):
                for process, what in some.items():
                    into.setdefault(process, []).extend(what)
        yield out


def _view(blocks: Blocks, source: BlockSource, span: slice | None, xp: Any) -> np.ndarray:
    block = blocks[source.rank]
    part = block[source.slices] if source.slices else block
    return part if span is None else xp.ascontiguousarray(part).reshape(-1)[span]


class ReshardExecution:
    """A reshard in progress: :meth:`rounds` yields the messages by round, then :meth:`results` has the new blocks."""

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

    def rounds(self) -> Iterator[tuple[Messages, Messages]]:
        """Messages by process, to be exchanged before the next ones are asked for."""
        r, memory = self._rounds, self._memory
        found: Messages = {}
        wanted: Messages = {}
        self._scatter(found, wanted)
        trees = [self._combining(c) for c in r.combined]
        others = [t.rounds() for t in trees]
        if r.relayed is not None:
            others.append(Relaying(r.relayed, self._source, self._block, r.dtype, memory).rounds())
        if not others:
            yield found, wanted
            if r.gathers:
                yield self._gather()
            return
        if found or wanted or r.gathers:
            others.append(iter([(found, wanted), self._gather()]))
        yield from together(others)
        for t, c in zip(trees, r.combined, strict=True):
            for i, part in c.blocks:
                self._out[i] = t.result[part].reshape(r.blocks[i].shape)

    def _combining(self, c: Combined) -> Combining | AllReduce:
        r, xp = self._rounds, self._memory.xp
        assert r.reduce is not None
        terms = {}
        for t, sources in c.terms:
            parts = [xp.ascontiguousarray(_view(self._source, s, None, xp)).reshape(-1) for s in sources]
            terms[t] = parts[0] if len(parts) == 1 else xp.concatenate(parts)
        if c.native:
            low = is_low_precision(r.dtype)
            return AllReduce(c.native, list(terms.values()), REDUCERS[r.reduce], r.dtype, low)
        return Combining(c.share, terms, REDUCERS[r.reduce], r.wide, r.dtype, self._memory)

    def _scatter(self, sends: Messages, receives: Messages) -> None:
        """Add the sends and receives of the first round, and join the parts that are here."""
        r = self._rounds
        for s in r.sends:
            batches = sends.setdefault(s.process, [])
            arrays = tuple(_view(self._source, x, s.span, self._memory.xp) for x in s.sources)
            # Contributions to one part travel together, chunk by chunk; parts that are not joined have one source.
            batches.append(arrays)
        for j in r.joins:
            block = r.blocks[j.block]
            here = [
                _view(self._source, s, j.span, self._memory.xp) if h == block.process else None
                for s, h in zip(j.part.sources, j.homes, strict=True)
            ]
            if len(here) == 1 and here[0] is not None and j.part.shape == block.shape and j.span is None:
                # The whole block from one place. Blocks are never written again, so that it may be the same memory; a
                # part of a larger block is copied, or it would keep all of that alive.
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
                receives.setdefault(j.homes[0], []).append(ArraySink(out))
            return
        assert r.reduce is not None
        fold = Fold(out, here, REDUCERS[r.reduce], r.wide)
        sink: BatchSink
        for h, positions in remote.items():
            sink = fold.sink(positions)
            receives.setdefault(h, []).append(sink)

    def _gather(self) -> tuple[Messages, Messages]:
        """The sends and receives of the second round."""
        sends: Messages = {}
        receives: Messages = {}
        for g in self._rounds.gathers:
            flat = self._block(g.block).reshape(-1)
            for p, span in g.spans.items():
                if g.own.stop > g.own.start:
                    sends.setdefault(p, []).append((flat[g.own],))
                if span.stop > span.start:
                    receives.setdefault(p, []).append(ArraySink(flat[span]))
        return sends, receives

    def results(self) -> dict[int, np.ndarray]:
        """The new blocks, by rank."""
        return {rank: self._block(i) for i, b in enumerate(self._rounds.blocks) for rank in b.ranks}


def _is_all(a: np.ndarray) -> bool:
    """Whether an array fills the memory that it keeps alive, more or less."""
    # (The base of an array on the pool's memory has no size of its own.)
    return getattr(a.base, "nbytes", 0) <= a.nbytes
