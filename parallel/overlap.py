"""When the collectives of a program start: as early as their sources are there, so that they run beside what is computed meanwhile.

The partitioner puts reshards where their results are first used, all that are due in one round. Here each such round is divided in
*buckets* by the order in which the program makes their sources, and a bucket that is large enough starts as soon as its last source
is made; the program waits for it where the round stood. Gradients of the last layers are thus reduced while those of the first are
computed. All processes start their buckets in one order, as they run one program.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import settings
from .rank_program import Move, Moves, RankProgram, Step


class Start(NamedTuple):
    """A round that begins here; ``ticket`` numbers it."""

    ticket: int
    moves: tuple[Move, ...]


class Wait(NamedTuple):
    """From here on the results of a round are used."""

    ticket: int
    moves: tuple[Move, ...]


class Action(NamedTuple):
    """One thing to do, and the variables that may be dropped afterwards. ``step`` is the place in the program."""

    step: int
    what: Step | Start | Wait
    frees: tuple[int, ...]


class Buckets(NamedTuple):
    """What runs beside: ``size`` bytes travel together, and ``least`` bytes are worth it (0: never). All processes of a mesh must
    have the same, or they would wait for each other in different places: workers get it from the client."""

    size: float
    least: float

    @classmethod
    def configured(cls) -> Buckets:
        """As Dask's configuration of this process has it."""
        return cls(settings.number("bucket"), settings.number("overlap"))


def schedule(program: RankProgram, buckets: Buckets | None = None) -> list[Action]:
    """The steps of a program with its large rounds started early; by this process's configuration where nothing else is said."""
    bucket, least = buckets or Buckets.configured()
    made: dict[int, int] = {}
    starts: dict[int, list[Start]] = {}
    waits: dict[int, list[Wait]] = {}
    rest: dict[int, Moves] = {}
    tickets = 0
    for i, s in enumerate(program.steps):
        if isinstance(s, Moves):
            if least:
                late = []
                for moves in _buckets(program, s, made, bucket):
                    ready = max(made.get(v, -1) for m in moves for v in m.reads)
                    between = any(not isinstance(program.steps[k], Moves) for k in range(ready + 1, i))
                    if between and sum(_bytes(program, m) for m in moves) >= least:
                        starts.setdefault(ready, []).append(Start(tickets, moves))
                        waits.setdefault(i, []).append(Wait(tickets, moves))
                        tickets += 1
                    else:
                        late += moves
                if i in waits:
                    rest[i] = Moves(tuple(late))
            for m in s.moves:
                made[m.target] = i
        else:
            made.update(dict.fromkeys(s.outputs, i))
    actions = [Action(-1, x, ()) for x in starts.get(-1, ())]
    for i, (s, frees) in enumerate(zip(program.steps, program.frees, strict=True)):
        here: list[Step | Start | Wait] = [rest[i]] if i in rest and rest[i].moves else [] if i in rest else [s]
        here += waits.get(i, [])
        actions += [Action(i, x, ()) for x in here[:-1]]
        actions.append(Action(i, here[-1], frees))
        actions += [Action(i, x, ()) for x in starts.get(i, ())]
    return actions


def _bytes(program: RankProgram, m: Move) -> int:
    """Bytes that a rank has in a move, about; 0 where each can cut its new block from its own. (The plan, which knows exactly, is
    a long list on many ranks.)"""
    now, then = program.layouts[m.source], program.layouts[m.target]
    aval = program.avals[m.source]
    if m.collective is not None:
        return aval.nbytes
    if now.partials == then.partials and all(then.axes_of(d) == axes for d, axes in now.shards):
        return 0
    parts = math.prod(program.sizes[a] for _, axes in now.shards for a in axes)
    return aval.nbytes // parts


def _buckets(program: RankProgram, s: Moves, made: dict[int, int], limit: float) -> list[tuple[Move, ...]]:
    """The moves of a round in the order in which their sources appear, in buckets of about ``limit`` bytes."""
    out: list[tuple[Move, ...]] = []
    now: list[Move] = []
    size = 0
    for m in sorted(s.moves, key=lambda m: max(made.get(v, -1) for v in m.reads)):
        if now and size >= limit:
            out.append(tuple(now))
            now, size = [], 0
        now.append(m)
        size += _bytes(program, m)
    return [*out, tuple(now)]
