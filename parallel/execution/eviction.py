"""Blocks of a run that wait in host memory, where its arrays do not fit on their GPU together.

A run knows all its reads beforehand. Where a call finds no memory, blocks go to the host, and the call is made again:
calls change none of their operands. First go blocks that no call reads any more, then those of the run that it reads
last (Belady, 1966), twice as many at each attempt. A call that reads a block takes it back. Where nothing is left to
go, a call is made in parts, if it has some. What each reads and makes must fit.

Blocks keep the order of their dimensions in memory, on which the order of sums depends; blocks with gaps stay. It is
for runs of which this process hosts all ranks: elsewhere blocks may be on their way to another process.
"""

from __future__ import annotations

import traceback
from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from ...arrays.core.errors import MeshtapeError, OutOfMemory
from ..base.device_memory import CudaMemory, is_on_host, moved, order_of

Act = Callable[[], None]
Blocks = MutableMapping[int, Any]
"""Of a variable, by rank."""


class Call(NamedTuple):
    """The variables that a call reads and makes, and its error of another."""

    reads: Collection[int]
    makes: Collection[int]
    failure: Callable[[Exception], Exception]


class Plan:
    """When the calls of a program read its variables."""

    def __init__(self, reads: Sequence[Collection[int]], outputs: Collection[int], memory: CudaMemory) -> None:
        self.memory, self._end = memory, len(reads)
        self._when: dict[int, list[int]] = {}
        for n, variables in enumerate([*reads, outputs]):
            for v in variables:
                self._when.setdefault(v, []).append(n)

    def next_read(self, v: int, n: int) -> int:
        """The number of the first call after ``n`` that reads ``v``; that of all calls where only the caller does."""
        when = self._when.get(v, [])
        return (*when, self._end)[bisect(when, n)]


class Eviction:
    """The blocks of one run: ``env`` has them by rank and variable, ``owners`` by variable where others have them too,
    and see that they moved. ``others`` gives blocks that are no part of it, in the order in which they may go."""

    def __init__(
        self,
        plan: Plan,
        env: dict[int, dict[int, Any]],
        owners: Mapping[int, Blocks],
        others: Callable[[], Iterable[Blocks]],
    ) -> None:
        self._plan, self._env, self._owners, self._others = plan, env, owners, others
        self._away = {v for blocks in env.values() for v, b in blocks.items() if is_on_host(b)}

    def call(self, n: int, call: Call, act: Act, parts: Callable[[], Sequence[tuple[Call, Act]]] = tuple) -> None:
        """Make call ``n`` of the run, by ``act``, with what it reads on the device."""
        count = 1
        smaller: Sequence[tuple[Call, Act]] = ()
        while not smaller:
            called = False
            try:
                for v in self._away.intersection(call.reads):
                    self._move(v, self._plan.memory.put)
                    self._away.discard(v)
                called = True
                act()
                return
            except Exception as e:
                if not isinstance(self._plan.memory.translated(e), OutOfMemory):
                    raise
                for v, held in ((v, held) for v in call.makes for held in self._env.values()):
                    held.pop(v, None)  # of some ranks alone: it is made again
                if not self._evict(n, call.reads, count) and not (smaller := parts()):
                    if called and isinstance(e, MeshtapeError):
                        raise
                    raise call.failure(e) from e
                _forget(e)
            count *= 2
        for part in smaller:
            self.call(n, *part)

    def _evict(self, n: int, reads: Collection[int], count: int) -> bool:
        """Move blocks to the host; whether there was one."""
        present: dict[int, bool] = {}  # and whether some blocks may go
        for held in self._env.values():
            for v, b in held.items():
                present[v] = present.get(v, False) or _may_go(b)
        for blocks in self._beside(present):
            if any(map(_may_go, list(blocks.values()))):
                blocks.update(moved(blocks, self._spilled))
                return True
        there = [v for v, may_go in present.items() if may_go and v not in reads]
        chosen = sorted(there, key=lambda v: self._plan.next_read(v, n))[-count:]
        for v in chosen:
            self._move(v, self._spilled)
            self._away.add(v)
        return bool(chosen)

    def _beside(self, present: Collection[int]) -> Iterator[Blocks]:
        yield from (b for v, b in self._owners.items() if v not in present)
        own = {id(b) for v, b in self._owners.items() if v in present}
        yield from (b for b in self._others() if id(b) not in own)

    def _spilled(self, block: Any) -> Any:
        return self._plan.memory.spilled(block) if _may_go(block) else block

    def _move(self, v: int, to: Callable[[Any], Any]) -> None:
        blocks = {r: held[v] for r, held in self._env.items() if v in held}
        for rank, block in moved(blocks, to).items():
            self._env[rank][v] = block
            if v in self._owners:
                self._owners[v][rank] = block


def _may_go(block: Any) -> bool:
    return not is_on_host(block) and order_of(block) is not None


def _forget(error: BaseException | None) -> None:
    """An error is in a circle with the frames that it went through, and these hold blocks."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
