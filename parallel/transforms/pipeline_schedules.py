"""Pipeline schedules: the actions of each rank on micro-batches and stages, in order. Plain data, no arrays.

A schedule is a matrix of actions, one row a rank: ``F3`` is the forward pass of micro-batch 3, ``B3`` its backward
pass, ``I3`` and ``W3`` the two halves of that (the cotangent of the input, which the stage before waits for, and those
of the parameters, for which no stage waits). With ``chunks`` a rank has several stages: stage ``c * ranks + rank`` is
its ``c``-th.

=================  =================================  =========================  ==============================
kind               order                              idle time, in stage times  stages' activations held
=================  =================================  =========================  ==============================
``"fthenb"``       all forward, then all backward     ``(p-1)(F+B+W)``           ``m``
``"1f1b"``         in turn, after a start             ``(p-1)(F+B+W)``           ``min(m, p-s)``
``"interleaved"``  the same over ``v`` chunks a rank  ``(p-1)(F+B+W)/v``         ``min(mv, 2(p-s-1)+(v-1)p+1)``
``"zerobubble"``   1f1b whose ``W`` are put off       ``(p-1)(F+B-W)``           ``p``
=================  =================================  =========================  ==============================

``p`` ranks, ``m`` micro-batches, ``v`` chunks, rank ``s``. Sources: GPipe (Huang et al., 2019), PipeDream-flush and
interleaving (Narayanan et al., 2021), ZB-H1 (Qi et al., 2023).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("fthenb", "1f1b", "interleaved", "zerobubble")


class ScheduleAction(NamedTuple):
    """One action of a rank: ``kind`` is ``"F"``, ``"B"``, ``"I"`` or ``"W"``."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}"


class Simulation(NamedTuple):
    """A simulated schedule: the end of each action, the total time, the idle time of the worst rank, and the peak
    number of activations on each rank."""

    ends: Mapping[ScheduleAction, float]
    time: float
    idle: float
    peak: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """A matrix of actions; made by :func:`schedule`.

    ``stages`` counts all stages; stage ``i`` is computed by rank ``i % len(rows)``.
    """

    kind: str
    stages: int
    micros: int
    rows: tuple[tuple[ScheduleAction, ...], ...]

    def check(self) -> Schedule:
        """Itself. Raises ``ValueError`` where an action is missing, doubled or in vain, or ranks would wait for each
        other for ever."""
        wanted = {("F", i, j) for i in range(self.stages) for j in range(self.micros)}
        halves = any(a.kind == "W" for row in self.rows for a in row)
        wanted |= {(k, i, j) for _, i, j in wanted for k in ("IW" if halves else "B")}
        done = [tuple(a) for row in self.rows for a in row]
        if len(done) != len(wanted) or set(done) != wanted:
            raise ValueError(f"{self.kind}: actions are missing or doubled")
        for rank, row in enumerate(self.rows):
            if any(a.stage % len(self.rows) != rank for a in row):
                raise ValueError(f"{self.kind}: rank {rank} has actions of another's stage")
        self.simulate()
        return self

    def simulate(self, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> Simulation:
        """The schedule with these times of a rank's whole model part (``F``, ``I`` and ``W``; ``B`` is both), messages
        being free.

        >>> schedule("1f1b", 4, 8).simulate().time
        33.0
        """
        share = self.stages // len(self.rows)
        cost = {"F": forward / share, "I": backward / share, "W": weight / share}
        cost["B"] = cost["I"] + cost["W"]
        ends: dict[ScheduleAction, float] = {}
        at, clock, busy = [0] * len(self.rows), [0.0] * len(self.rows), [0.0] * len(self.rows)
        back = "I" if any(a.kind == "I" for row in self.rows for a in row) else "B"
        held, peak = [0] * len(self.rows), [0] * len(self.rows)
        left = sum(map(len, self.rows))
        while left:
            before = left
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row):
                    a = row[at[rank]]
                    needs = []
                    if a.kind == "F" and a.stage:
                        needs = [ScheduleAction("F", a.stage - 1, a.micro)]
                    elif a.kind == back:
                        needs = [ScheduleAction("F", a.stage, a.micro)]
                        needs += [ScheduleAction(back, a.stage + 1, a.micro)] if a.stage + 1 < self.stages else []
                    elif a.kind == "W":
                        needs = [ScheduleAction(back, a.stage, a.micro)]
                    if any(n not in ends for n in needs):
                        break
                    clock[rank] = max([clock[rank], *(ends[n] for n in needs)]) + cost[a.kind]
                    busy[rank] += cost[a.kind]
                    ends[a] = clock[rank]
                    held[rank] += (a.kind == "F") - (a.kind in "BW")
                    peak[rank] = max(peak[rank], held[rank])
                    at[rank] += 1
                    left -= 1
            if left == before:
                stuck = ", ".join(f"rank {r} at {row[at[r]]}" for r, row in enumerate(self.rows) if at[r] < len(row))
                raise ValueError(f"{self.kind}: the ranks would wait for each other for ever: {stuck}")
        time = max(clock, default=0.0)
        return Simulation(ends, time, max((time - b for b in busy), default=0.0), tuple(peak))

    def text(self) -> str:
        """A picture over time, one row a rank; several stages of a rank are told apart by letters.

        >>> print(schedule("1f1b", 2, 3).text())
        rank 0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2 |
        rank 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .  |
        """
        unit = len(self.rows) / self.stages
        ends = self.simulate().ends
        cells: list[dict[int, str]] = [{} for _ in self.rows]
        for a, end in ends.items():
            steps = {"F": 1, "I": 1, "W": 1, "B": 2}[a.kind]
            name = str(a) + (chr(ord("a") + a.stage // len(self.rows)) if unit < 1 else "")
            for k in range(steps):
                cells[a.stage % len(self.rows)][round(end / unit) - steps + k] = name
        length = max((max(c) for c in cells if c), default=-1) + 1
        width = max((len(x) for c in cells for x in c.values()), default=1)
        return "\n".join(
            f"rank {r} | {' '.join(c.get(k, '.').ljust(width) for k in range(length))} |" for r, c in enumerate(cells)
        )

    def __str__(self) -> str:
        return self.text()


def schedule(kind: str, ranks: int, micros: int, *, chunks: int = 1) -> Schedule:
    """A pipeline schedule.

    Parameters
    ----------
    kind
        ``"fthenb"``, ``"1f1b"``, ``"interleaved"`` or ``"zerobubble"``; see the module.
    ranks
        Number of ranks along the pipe.
    micros
        Number of micro-batches.
    chunks
        Stages a rank, for ``"interleaved"``, whose micro-batches come in multiples of the ranks.

    Raises
    ------
    ValueError
        For an unknown kind, no micro-batches, or numbers that do not fit the kind.

    Examples
    --------
    >>> [str(a) for a in schedule("1f1b", 2, 3).rows[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    >>> schedule("1f1b", 4, 8).simulate().peak
    (4, 3, 2, 1)
    """
    ranks, micros, chunks = map(operator.index, (ranks, micros, chunks))
    if kind not in KINDS:
        raise ValueError(f"a pipeline schedule is one of {', '.join(KINDS)}, got {kind!r}")
    if ranks < 1 or micros < 1 or chunks < 1:
        raise ValueError(f"a pipeline needs ranks, micro-batches and chunks, got {ranks}, {micros} and {chunks}")
    if chunks > 1 and kind != "interleaved":
        raise ValueError(f"chunks are for 'interleaved' schedules, got {chunks} with {kind!r}")
    if kind == "interleaved" and micros % ranks:
        raise ValueError(f"an interleaved schedule takes micro-batches in multiples of its {ranks} ranks, got {micros}")
    make = {"fthenb": _all_forward, "zerobubble": _zerobubble}.get(kind, _in_turn)
    return _made(kind, make, ranks, micros, chunks)


def all_forward_first(ranks: int, micros: int, chunks: int) -> Schedule:
    """The schedule ``"fthenb"`` with several stages a rank."""
    return _made("fthenb", _all_forward, ranks, micros, chunks)


def _made(kind: str, make: Callable[..., list[ScheduleAction]], ranks: int, micros: int, chunks: int) -> Schedule:
    rows = (tuple(make(s, ranks, micros, chunks)) for s in range(ranks))
    return Schedule(kind, ranks * chunks, micros, tuple(rows))


def warm_up(rank: int, ranks: int, micros: int) -> int:
    """Forward passes that a rank of a ``1f1b`` schedule makes before its first pair.

    >>> [warm_up(s, 4, 8) for s in range(4)], [warm_up(s, 4, 2) for s in range(4)]
    ([3, 2, 1, 0], [2, 2, 1, 0])
    """
    return min(ranks - rank - 1, micros)


def _all_forward(s: int, ranks: int, micros: int, chunks: int) -> list[ScheduleAction]:
    mine = range(s, ranks * chunks, ranks)
    row = [ScheduleAction("F", stage, i) for stage in mine for i in range(micros)]
    return row + [ScheduleAction("B", stage, i) for stage in reversed(mine) for i in range(micros)]


def _zerobubble(s: int, ranks: int, micros: int, chunks: int) -> list[ScheduleAction]:
    row: list[ScheduleAction] = []
    put_off: list[ScheduleAction] = []
    for a in _in_turn(s, ranks, micros, chunks):
        if a.kind == "F":
            row.append(a)
            continue
        row.append(ScheduleAction("I", s, a.micro))
        put_off.append(ScheduleAction("W", s, a.micro))
        # A rank that starts late has room for as many activations as it started fewer micro-batches.
        if len(put_off) > s or a.micro >= micros - (ranks - s - 1):
            row.append(put_off.pop(0))
    return row + put_off


def _in_turn(s: int, ranks: int, micros: int, chunks: int) -> list[ScheduleAction]:
    total = micros * chunks

    def nth(k: int, kind: str) -> ScheduleAction:
        chunk = k // ranks % chunks
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return ScheduleAction(kind, chunk * ranks + s, k // (ranks * chunks) * ranks + k % ranks)

    start = min(total, 2 * (ranks - s - 1) + (chunks - 1) * ranks) if chunks > 1 else warm_up(s, ranks, micros)
    row = [nth(k, "F") for k in range(start)]
    for k in range(total - start):
        row += [nth(start + k, "F"), nth(k, "B")]
    return row + [nth(k, "B") for k in range(total - start, total)]
