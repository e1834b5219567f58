"""Overlap of collectives with computation: rounds start as soon as their sources are ready.

The partitioner puts reshards where their results are first used, all that are due in one round. Here the reshards of
all rounds are put in *buckets* by the order in which the program makes their sources. A large enough bucket starts as
soon as its last source is made, and the program waits for it where the first of its results is used. So the gradients
of the last layers are reduced while those of the first are computed, and small reshards travel with others. All
processes start their buckets in one order, as they run one program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..base import settings
from .rank_program import LocalCall, Move, Moves, RankProgram, Step


class Start(NamedTuple):
    """The start of a round; ``ticket`` numbers it."""

    ticket: int
    moves: tuple[Move, ...]


class Wait(NamedTuple):
    """The wait for a round, before its results are used."""

    ticket: int
    moves: tuple[Move, ...]


class StepAndDrops(NamedTuple):
    """A step, and the variables that may be dropped after it."""

    what: Step | Start | Wait
    frees: tuple[int, ...]


class Buckets(NamedTuple):
    """Sizes of buckets: up to ``size`` bytes travel together, and rounds of at least ``least`` bytes start early (0:
    none). All processes of a mesh need the same sizes, or they would wait for each other at different steps; workers
    get them from the client."""

    size: float
    least: float

    @classmethod
    def configured(cls) -> Buckets:
        """The sizes in Dask's configuration of this process."""
        return cls(settings.number("bucket"), settings.number("overlap"))


def schedule(program: RankProgram, buckets: Buckets | None = None) -> list[StepAndDrops]:
    """The steps of a program with its large rounds started early; ``buckets`` defaults to the configuration."""
    bucket, least = buckets or Buckets.configured()
    if not least:
        return [StepAndDrops(s, f) for s, f in zip(program.steps, program.frees, strict=True)]
    hoisted, made = _hoisted(program)
    begin: dict[int, list[Step | Start]] = {}  # after a step: calls that were brought forward, then rounds that start
    for i, k in hoisted.items():
        begin.setdefault(k, []).append(program.steps[i])
    rounds: dict[int, list[Move]] = {}  # the rest of a step's round
    waits: dict[int, list[Wait]] = {}
    tickets = 0
    for r in _rounds(program, made, bucket):
        between = any(isinstance(program.steps[k], LocalCall) and k not in hoisted for k in range(r.ready + 1, r.due))
        if between and r.size >= least:
            begin.setdefault(r.ready, []).append(Start(tickets, tuple(r.moves)))
            waits.setdefault(r.due, []).append(Wait(tickets, tuple(r.moves)))
            tickets += 1
        else:
            rounds.setdefault(r.due, []).extend(r.moves)
    written = {m.target: n for n, m in enumerate(m for s in program.steps if isinstance(s, Moves) for m in s.moves)}
    order: list[Step | Start | Wait] = [*begin.get(-1, ())]
    for i, s in enumerate(program.steps):
        if isinstance(s, Moves):
            order += [Moves(tuple(sorted(rounds[i], key=lambda m: written[m.target])))] if i in rounds else []
            order += waits.get(i, ())
        elif i not in hoisted:
            order.append(s)
        order += begin.get(i, ())
    return [StepAndDrops(x, f) for x, f in zip(order, dropped(map(variables, order), program.outputs), strict=True)]


def variables(s: Step | Start | Wait) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The variables that a step reads and makes. The blocks that a round reads must last until its end."""
    if isinstance(s, LocalCall):
        return s.inputs, s.outputs
    return tuple(v for m in s.moves for v in m.reads), () if isinstance(s, Start) else tuple(m.target for m in s.moves)


def dropped(steps: Iterable[tuple[Iterable[Any], Iterable[int]]], outputs: Iterable[int]) -> list[tuple[int, ...]]:
    """The variables that nothing reads after each step. A step is given by the variables that it reads and makes."""
    needed, out = set(outputs), []
    for reads, makes in reversed(list(steps)):
        used = dict.fromkeys([*(v for v in reads if isinstance(v, int)), *makes])
        out.append(tuple(v for v in used if v not in needed))
        needed.update(used)
    return out[::-1]


def _hoisted(program: RankProgram) -> tuple[dict[int, int], dict[int, int]]:
    """Calls that are hoisted, and the step after which each variable is ready.

    A call that makes the source of a round from one variable, like the ``0.1 * g`` of ``w - 0.1 * g``, is hoisted to
    the step that makes that variable. The sum over the ranks comes after that call, and would otherwise start no
    earlier than the optimizer.
    """
    made: dict[int, int] = {}
    calls: dict[int, int] = {}  # variables that are made from one other, and where
    for i, s in enumerate(program.steps):
        if isinstance(s, LocalCall):
            if len(s.outputs) == 1 and len({v for v in s.inputs if isinstance(v, int)}) == 1:
                calls[s.outputs[0]] = i
            for v in made.keys() & set(s.outputs):
                calls.pop(v, None)  # ranks make it in several steps, each its own
            made.update(dict.fromkeys(s.outputs, i))
        else:
            made.update((m.target, i) for m in s.moves)
    hoisted: dict[int, int] = {}
    for source in [m.source for s in program.steps if isinstance(s, Moves) for m in s.moves if _bytes(program, m)]:
        chain: list[int] = []
        v = source
        while v in calls and calls[v] not in hoisted:
            (before,) = {x for x in program.steps[calls[v]].inputs if isinstance(x, int)}  # type: ignore[union-attr]
            if (
                program.avals[v].nbytes > program.avals[before].nbytes
                or made.get(before, -1) >= made[v] - len(chain) - 1
            ):
                break
            chain.append(v)
            v = before
        for x in reversed(chain):
            hoisted[calls[x]] = made[x] = made.get(v, -1)
    return dict(sorted(hoisted.items())), made


_OPEN = 32
"""Rounds that a move may still join: a program of thousands of moves is not compared pair by pair."""


@dataclass
class _MoveRound:
    """Moves that travel together. All sources are ready after the step ``ready``; the step ``due`` needs a result."""

    moves: list[Move]
    ready: int
    due: int
    size: int


def _rounds(program: RankProgram, made: Mapping[int, int], limit: float) -> list[_MoveRound]:
    """All moves of a program, in the order in which they become ready, in buckets of about ``limit`` bytes."""
    coming = [
        (max(made.get(v, -1) for v in m.reads), i, m)
        for i, s in enumerate(program.steps)
        if isinstance(s, Moves)
        for m in s.moves
    ]
    out: list[_MoveRound] = []
    for ready, due, m in sorted(coming, key=lambda x: x[:2]):
        size = _bytes(program, m)
        for r in reversed(out[-_OPEN:]):
            if r.size < limit and ready < r.due and (due == r.due or _fit(r, ready, due, m, size)):
                r.moves.append(m)
                r.ready, r.due, r.size = max(r.ready, ready), min(r.due, due), r.size + size
                break
        else:
            out.append(_MoveRound([m], ready, due, size))
    return sorted(out, key=lambda r: (r.ready, r.due))


def _fit(r: _MoveRound, ready: int, due: int, m: Move, size: int) -> bool:
    """Whether a move that is due in another step may join this round. Only moves that are due at about the same time
    do: urgent ones, like activations, must not wait for others, like gradients. Collectives of the user's code stay
    where they are."""
    free = size and r.size and m.collective is None and all(x.collective is None for x in r.moves)
    return bool(free) and abs(due - r.due) <= min(due, r.due) - max(ready, r.ready)


def _bytes(program: RankProgram, m: Move) -> int:
    """Estimated bytes of a rank in a move; 0 if each rank cuts its new block from its own. (An exact plan is long.)"""
    now, then = program.layouts[m.source], program.layouts[m.target]
    aval = program.avals[m.source]
    if m.collective is not None:
        return aval.nbytes
    if now.is_cut_to(then):
        return 0
    parts = math.prod(program.sizes[a] for _, axes in now.shards for a in axes)
    return aval.nbytes // parts
