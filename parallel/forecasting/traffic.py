"""Traffic of collectives: messages and bytes, counted by a transport on blocks that take no memory.

The executor itself runs the moves, so that no algorithm is described twice: the counted messages are those of a real
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..base.device_memory import HostMemory
from ..collectives.pieces import expected
from ..execution.executor import Prepared
from ..partition.overlap import Buckets, dropped, variables
from ..partition.rank_program import Move, Moves, RankProgram
from ..resharding.expert_all_to_all import AllToAllV
from ..transports.group import Receives, Sends, Transport


class TrafficRound(NamedTuple):
    """One round: bytes sent to and received from each other rank, in one message each."""

    sent: Counter[int]
    received: Counter[int]


class CountingTransport(Transport):
    """A transport that counts sends and receives, and moves nothing."""

    eager = True

    def __init__(self) -> None:
        self.exchanges: dict[int, TrafficRound] = {}

    def exchange(self, step: int, what: str, sends: Sends, receives: Receives) -> None:
        sent = {
            p: sum(a.nbytes for b in batches for a in (b if isinstance(b, tuple) else (b,)))
            for p, batches in sends.items()
        }
        come = {
            p: sum(s.nbytes if isinstance(s, np.ndarray) else expected([s]) for s in sinks)
            for p, sinks in receives.items()
        }
        self.exchanges[step] = TrafficRound(Counter(sent), Counter(come))


class _Hollow(HostMemory):
    """Blocks of one element that is repeated: of any shape, and of no size."""

    xp = SimpleNamespace(
        __name__="numpy",
        ascontiguousarray=lambda a: a,
        concatenate=lambda parts: HOLLOW.empty((sum(map(len, parts)),), parts[0].dtype),
    )

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))

    def full(self, shape: tuple[int, ...], value: object, dtype: np.dtype) -> np.ndarray:
        return self.empty(shape, dtype)

    def copy(self, to: Any, source: Any) -> None:
        """There is nothing in a block."""


class Traffic:
    """The rounds of one rank in each step of a rank program, where every rank is a process of its own. Equal moves are
    counted once."""

    def __init__(self, program: RankProgram, rank: int, names: Sequence[str], ranks: int, hosts: int) -> None:
        self._program, self._rank, self._names, self._hosts = program, rank, names, hosts
        self._homes = tuple(range(ranks))
        self._known: dict[Any, Mapping[int, TrafficRound]] = {}
        self._merged: dict[Any, tuple[TrafficRound, ...]] = {}

    def of(self, moves: Sequence[Move]) -> tuple[TrafficRound, ...]:
        """The rounds of moves that travel together, with one message for each peer in a round."""
        p = self._program
        counts: Counter[Any] = Counter()
        for m in moves:
            key = p.avals[m.source], p.layouts[m.source], p.layouts[m.target], m.collective
            if key not in self._known:
                self._known[key] = self._alone(m)
            counts[key] += 1
        together = frozenset(counts.items())
        found = self._merged.get(together)
        if found is None:
            rounds: dict[int, TrafficRound] = {}
            for key, n in counts.items():
                for step, e in self._known[key].items():
                    whole = rounds.setdefault(step, TrafficRound(Counter(), Counter()))
                    for into, part in zip(whole, e, strict=True):
                        for peer, nbytes in part.items():
                            into[peer] += n * nbytes
            found = self._merged[together] = tuple(rounds[step] for step in sorted(rounds))
        return found

    def _alone(self, m: Move) -> Mapping[int, TrafficRound]:
        """The rounds of one move, by number."""
        if isinstance(m.collective, AllToAllV):
            return {0: self._likely(m, m.collective)}
        p = self._program
        steps = (Moves((m,)),)
        frees = tuple(dropped(map(variables, steps), (m.target,)))
        alone = RankProgram(p.sizes, (m.source,), steps, (m.target,), p.avals, p.layouts, frees=frees, inner=p.inner)
        prepared = Prepared(alone, (self._rank,), self._homes, self._names, HOLLOW, Buckets(0, 0), self._hosts)
        transport = CountingTransport()
        prepared.run([{self._rank: HOLLOW.empty(*p.block(m.source, self._rank))}], transport)
        return transport.exchanges

    def _likely(self, m: Move, what: AllToAllV) -> TrafficRound:
        """Rows that are sent where run-time numbers say: as if all were chosen as often."""
        p = self._program
        group = next(g for g in what.groups if self._rank in g)
        row = p.avals[m.source].nbytes // max(p.avals[m.source].shape[0], 1)
        each = what.likely * row // max(sum(len(g) * (len(g) - 1) for g in what.groups), 1)
        peers = Counter(dict.fromkeys((r for r in group if r != self._rank), each))
        return TrafficRound(peers, peers)


HOLLOW = _Hollow()
