"""Replay of a rank's run of a program without values: live blocks, messages and times, step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..execution.executor import thin_values
from ..execution.fusion import BlockAvals, Chain, fused
from ..partition.overlap import Buckets, Start, Wait, schedule
from ..partition.rank_program import LocalCall, Move, Moves, RankProgram
from .costs import flops, is_view, reorders, touched
from .figures import DeviceFigures, LinkFigures
from .specs import GRADIENTS
from .traffic import Traffic

ACTIVATIONS, COLLECTIVES = "activations", "collective buffers"


@dataclass
class LinkTraffic:
    """The traffic over the links of one kind, in messages and bytes."""

    messages: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class RankForecast:
    """Memory, messages and time of one rank for a step. Bytes are those at the peak; seconds are of the whole step."""

    rank: int
    peak: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)
    """Bytes of activations, by the function that made them."""
    at: str = ""
    """The call at the peak."""
    start: int = 0
    """Bytes of the arguments, which stay until the end."""
    within: LinkTraffic = field(default_factory=LinkTraffic)
    across: LinkTraffic = field(default_factory=LinkTraffic)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rounds and bytes sent, by collective."""
    seconds: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    flops: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waits for messages and does nothing else."""
        return self.seconds - self.compute


class Order:
    """The steps of a program in the executor's order, and the kinds of its variables."""

    def __init__(
        self,
        program: RankProgram,
        names: Sequence[str],
        kinds: Mapping[int, str],
        cuda: bool,
        buckets: Buckets,
        per_host: int,
    ) -> None:
        self.program, self.names, self.ranks = program, names, math.prod(program.sizes)
        self.hosts = math.ceil(self.ranks / per_host)
        actions = schedule(program, buckets if self.ranks > 1 else Buckets(0, 0))
        thin = frozenset() if cuda else thin_values(program)
        self.steps = fused(program, actions, cuda=cuda, apart=thin)
        self.overlaps = any(isinstance(s, Start) for s, _ in self.steps)
        self.makers: dict[int, str | None] = {}
        """The function that makes each variable; None for a collective."""
        for s, _ in self.steps:
            if isinstance(s, Chain):
                self.makers.update((v, c.origin or c.op.name) for c in s.calls for v in c.outputs)
            elif isinstance(s, LocalCall):
                self.makers.update(dict.fromkeys(s.outputs, s.origin or s.op.name))
            else:
                self.makers.update(dict.fromkeys(m.target for m in s.moves))
        self.kinds = _spread(program, kinds)


class _VirtualMemory:
    """The memory of one rank: its variables, and the allocation that each lies in."""

    def __init__(self, held: dict[int, tuple[int, int]]) -> None:
        self.held, self.total = held, 0
        self.home: dict[int, int] = {}  # variable → number of its memory
        self.in_order: dict[int, bool] = {}
        self.kept: set[int] = set()  # of the caller
        self._users: Counter[int] = Counter()

    def make(self, v: int, nbytes: int) -> None:
        self.home[v], self.in_order[v] = v, True
        self._users[v] += 1
        self.held[v] = v, nbytes
        self.total += nbytes

    def share(self, v: int, other: int, in_order: bool) -> None:
        self.home[v], self.in_order[v] = self.home[other], in_order
        self._users[self.home[v]] += 1

    def take(self, v: int, other: int) -> None:
        """Put a variable in place of another, which nothing reads again."""
        self.share(v, other, True)
        self.held[self.home[v]] = v, self.held[self.home[v]][1]

    def is_sole(self, v: int) -> bool:
        """Whether a variable shares its memory with no other, nor with the caller."""
        at = self.home.get(v)
        return at is not None and self._users[at] == 1 and at not in self.kept

    def free(self, v: int) -> None:
        """Drop a variable; the memory is freed with its last variable."""
        at = self.home.pop(v, None)
        if at is not None:
            self._users[at] -= 1
            if not self._users[at] and at not in self.kept:
                self.total -= self.held.pop(at)[1]


class Replay:
    """The run of one rank."""

    def __init__(self, order: Order, rank: int) -> None:
        self.order, self.program, self.rank = order, order.program, rank
        self.avals = BlockAvals(order.program, rank)
        self.traffic = Traffic(order.program, rank, order.names, order.ranks, order.hosts)

    def forecast(self, device: DeviceFigures, links: LinkFigures) -> RankForecast:
        out = RankForecast(self.rank)
        self._memory(out)
        self._time(device, links, out)
        return out

    # ----- memory -----------------------------------------------------------------------------------------------------

    def _memory(self, into: RankForecast) -> None:
        """The peak, and the blocks that are alive then."""
        most, worst = -1, 0
        for i, total in enumerate(self._totals({})):
            into.start = into.start or total
            if total > most:
                most, worst = total, i
        held: dict[int, tuple[int, int]] = {}
        for i, _ in enumerate(self._totals(held)):
            if i == worst:
                break
        kinds: Counter[str] = Counter()
        ops: Counter[str] = Counter()
        makers = self.order.makers
        for v, nbytes in held.values():
            kind = self.order.kinds.get(v, COLLECTIVES if makers.get(v) is None else ACTIVATIONS)
            kinds[kind] += nbytes
            if kind == ACTIVATIONS:
                ops[str(makers[v])] += nbytes
        into.peak, into.kinds, into.activations = most, dict(kinds.most_common()), dict(ops.most_common())
        into.at = self._called(self.order.steps[worst - 1][0]) if worst else "the start"

    def _totals(self, held: dict[int, tuple[int, int]]) -> Iterable[int]:
        """Bytes in use at the start and in each step. ``held`` has the variable and bytes of each allocation."""
        p, memory = self.program, _VirtualMemory(held)
        for v in (*p.inputs, *p.constants):
            memory.make(v, self.avals[v].nbytes)
            memory.kept.add(v)
        yield memory.total
        for s, frees in self.order.steps:
            dying = {v for v in frees if memory.is_sole(v)}
            if isinstance(s, Chain):
                self._make(memory, s.group.outputs, dying)
            elif isinstance(s, LocalCall):
                first = s.inputs[0] if s.inputs and isinstance(s.inputs[0], int) else None
                if s.by_rank is not None and self.rank not in s.by_rank:
                    pass
                elif first in memory.home and is_view(s, memory.in_order[first]):
                    out = s.outputs[0]
                    memory.share(out, first, memory.in_order[first] and not reorders(s, self.avals[out]))
                elif s.op.name == "positions":  # places along a dimension, which are repeated along all others
                    shape, dtype = self.avals[s.outputs[0]]
                    memory.make(s.outputs[0], dtype.itemsize * shape[s.params["axis"]])
                else:
                    self._make(memory, s.outputs, dying if isinstance(s.op.numpy, np.ufunc) else set())
            elif not isinstance(s, Wait):
                for m in s.moves:
                    if self._same_block(m, memory):
                        memory.share(m.target, m.source, memory.in_order[m.source])
                    else:
                        memory.make(m.target, self.avals[m.target].nbytes)
            yield memory.total
            for v in frees:
                memory.free(v)

    def _make(self, memory: _VirtualMemory, outputs: Sequence[int], dying: set[int]) -> None:
        """Give results new memory, or that of an operand that nothing reads again."""
        for v in outputs:
            alike = (d for d in sorted(dying) if memory.in_order[d] and self.avals[d] == self.avals[v])
            match = next(alike, None)
            dying = dying - {match}
            if match is None:
                memory.make(v, self.avals[v].nbytes)
            else:
                memory.take(v, match)

    def _same_block(self, m: Move, memory: _VirtualMemory) -> bool:
        """Whether a move hands on the source block itself."""
        p = self.program
        if m.collective is not None or m.source not in memory.home or self.avals[m.source] != self.avals[m.target]:
            return False
        return p.layouts[m.source].partials == p.layouts[m.target].partials and not self.traffic.of((m,))

    def _called(self, s: Any) -> str:
        if isinstance(s, Chain):
            return ", ".join(dict.fromkeys(c.origin or c.op.name for c in s.calls))
        return (s.origin or s.op.name) if isinstance(s, LocalCall) else self._moved(s.moves)

    def _moved(self, moves: Sequence[Move]) -> str:
        return ", ".join(dict.fromkeys(self.program.move_text(m, self.order.names) for m in moves))

    # ----- time -------------------------------------------------------------------------------------------------------

    def _time(self, device: DeviceFigures, links: LinkFigures, into: RankForecast) -> None:
        """The time of the step. Calls run one after the other, and early rounds in a line of their own beside them."""
        now = line = 0.0
        ends: dict[int, float] = {}
        for s, _ in self.order.steps:
            if isinstance(s, LocalCall | Chain):
                if isinstance(s, LocalCall) and s.by_rank is not None and self.rank not in s.by_rank:
                    continue
                spent, done = self._call(s, device)
                now, into.compute, into.flops = now + spent, into.compute + spent, into.flops + done
                continue
            if isinstance(s, Wait):
                now = max(now, ends.pop(s.ticket))
                continue
            spent = self._exchanged(s.moves, links, into)
            into.communication += spent
            if isinstance(s, Start):
                line = ends[s.ticket] = max(line, now) + spent
            elif spent:
                now = line = max(now, line if self.order.overlaps else now) + spent
        into.seconds = max(now, *ends.values()) if ends else now

    def _call(self, s: LocalCall | Chain, device: DeviceFigures) -> tuple[float, float]:
        if isinstance(s, Chain):
            done = sum(flops(c, self.avals) for c in s.calls)
            nbytes = touched(s.group.inputs, s.group.outputs, self.avals)
            return device.seconds(done, nbytes, self.avals[s.group.outputs[0]].dtype), done
        if is_view(s, True):
            return 0.0, 0.0
        done = flops(s, self.avals)
        return device.seconds(done, touched(s.inputs, s.outputs, self.avals), self.avals[s.outputs[0]].dtype), done

    def _exchanged(self, moves: Sequence[Move], links: LinkFigures, into: RankForecast) -> float:
        spent = 0.0
        host = self.rank // links.ranks_per_host
        text = self._moved(moves)
        for e in self.traffic.of(moves):
            slowest = 0.0
            for link, (latency, rate), near in ((into.within, links.within, True), (into.across, links.across, False)):
                sent = [n for p, n in e.sent.items() if (p // links.ranks_per_host == host) is near]
                come = [n for p, n in e.received.items() if (p // links.ranks_per_host == host) is near]
                link.messages += len(sent)
                link.sent += sum(sent)
                link.received += sum(come)
                if sent or come:  # both directions at once
                    slowest = max(slowest, max(len(sent), len(come)) * latency + max(sum(sent), sum(come)) / rate)
            spent += slowest
            rounds, nbytes = into.collectives.get(text, (0, 0))
            into.collectives[text] = rounds + 1, nbytes + sum(e.sent.values())
        return spent


def _spread(program: RankProgram, kinds: Mapping[int, str]) -> dict[int, str]:
    """The kinds with that of gradients propagated through collectives and casts, and to scaled or added gradients."""
    found = {v: k for v, k in kinds.items() if v in program.avals}
    for backwards in (True, False):
        for s in reversed(program.steps) if backwards else program.steps:
            if isinstance(s, Moves):
                pairs = [(m.source, m.target) for m in s.moves]
            else:
                full = program.avals[s.outputs[0]].shape
                alike = [v for v in s.inputs if isinstance(v, int) and program.avals[v].shape == full and full]
                whole = s.op.name == "astype" if backwards else all(found.get(v) == GRADIENTS for v in alike)
                pairs = [(v, s.outputs[0]) for v in alike if whole]
            for source, target in pairs:
                to, of = (source, target) if backwards else (target, source)
                if found.get(of) == GRADIENTS:
                    found.setdefault(to, GRADIENTS)
    return found
