"""Relayed moves: small blocks go through other processes, so that each of n sends only about log2(n) messages.

Processes form a ring. In round ``k`` each sends to the process ``2**k`` places on all parcels whose distance has that
binary digit, the lowest digit first. With one parcel for all this is the broadcast along a binomial tree, with one for
each process Bruck's all-to-all, and with copies for all his all-gather, which sends no byte twice to one process
(Bruck, Ho, Kipnis, Upfal, Weathersby: Efficient algorithms for all-to-all communications in multiport message-passing
systems, 1997).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from ..base.device_memory import BlockMemory
from .costs import depth
from .pieces import ArraySink

Slices = tuple[slice, ...]


class Parcel(NamedTuple):
    """A part of a rank's block."""

    rank: int
    part: Box


class Delivery(NamedTuple):
    """Where a parcel goes at its process: a part of one of its blocks."""

    block: int
    slices: Slices


class RelayRound(NamedTuple):
    """One message sent and one received; none where there are no parcels."""

    to: int
    sent: tuple[Parcel, ...]
    source: int
    got: tuple[Parcel, ...]


class Route(NamedTuple):
    """The rounds of one process, and where in its blocks the parcels for it go."""

    rounds: tuple[RelayRound, ...]
    deliveries: Mapping[Parcel, tuple[Delivery, ...]]


def route(
    processes: Sequence[int],
    process: int,
    given: Callable[[int, int], Sequence[Parcel]],
    deliveries: Mapping[Parcel, tuple[Delivery, ...]],
) -> Route:
    """The route of one process. ``given(source, target)`` lists the parcels that one process has for another."""

    def carried(pairs: Sequence[tuple[int, int]]) -> tuple[Parcel, ...]:
        lists = {id(found): found for s, t in pairs if (found := given(processes[s], processes[t]))}
        return tuple(dict.fromkeys(itertools.chain.from_iterable(lists.values())))

    ways = _ways(len(processes), list(processes).index(process))
    rounds = [
        RelayRound(processes[to], carried(sent), processes[source], carried(got)) for to, sent, source, got in ways
    ]
    return Route(tuple(rounds), deliveries)


Pairs = list[tuple[int, int]]


@functools.lru_cache(maxsize=8)
def _ways(n: int, here: int) -> list[tuple[int, Pairs, int, Pairs]]:
    """By round, for the process at place ``here`` of ``n``: the next place and the previous one, each with the (source,
    target) places of the parcels that go there, or come from there, whether they end here or go on."""

    def carried(at: int, k: int) -> Pairs:
        sources = [((at - way) % n, way) for way in range(1 << k, min(2 << k, n))]
        return [(s, (s + whole_way) % n) for s, way in sources for whole_way in range(way, n, 2 << k)]

    steps = [(1 << k, k) for k in range(depth(n))]
    return [((here + d) % n, carried((here + d) % n, k), (here - d) % n, carried(here, k)) for d, k in steps]


class Relaying:
    """A route being taken, from the blocks of this process's ranks into its new ones."""

    def __init__(
        self,
        found: Route,
        sources: Mapping[int, Any],
        block: Callable[[int], Any],
        dtype: np.dtype,
        memory: BlockMemory,
    ) -> None:
        self._route, self._sources, self._block, self._dtype, self._memory = found, sources, block, dtype, memory
        self._here: dict[Parcel, Any] = {}

    def rounds(self) -> Iterator[tuple[dict[int, list[Any]], dict[int, list[Any]]]]:
        """Messages by process, to be exchanged before the next ones are asked for."""
        for r in self._route.rounds:
            sends = {r.to: [(self._parcel(p),) for p in r.sent]} if r.sent else {}
            receives = {r.source: [ArraySink(self._room(p)) for p in r.got]} if r.got else {}
            yield sends, receives
        for p, places in self._route.deliveries.items():
            for d in places[1:]:
                self._part(d)[...] = self._here[p]

    def _parcel(self, p: Parcel) -> Any:
        found = self._here.get(p)
        if found is not None:
            return found
        block = self._sources[p.rank]
        return block[p.part.slices] if p.part.shape else block

    def _part(self, d: Delivery) -> Any:
        block = self._block(d.block)
        return block[d.slices] if d.slices else block

    def _room(self, p: Parcel) -> Any:
        places = self._route.deliveries.get(p)
        room = self._memory.empty(p.part.shape, self._dtype) if places is None else self._part(places[0])
        self._here[p] = room
        return room
