"""Donated inputs of a CUDA graph, and the results that take their memory."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...arrays.core.program import Entry, FusedRun, Program
from .fusion import takers


def views_of(inputs: Sequence[int], values: Mapping[int, Any], address: Callable[[Any], int]) -> dict[int, set[int]]:
    """For each input the variables whose values lie in its memory, itself among them."""
    starts = sorted((address(values[i]), i) for i in inputs if values[i].nbytes)
    found: dict[int, set[int]] = {i: set() for i in inputs}
    for v, x in values.items() if starts else ():
        start, i = starts[max(bisect(starts, (address(x), math.inf)) - 1, 0)]
        if 0 <= address(x) - start < values[i].nbytes:
            found[i].add(v)
    return found


def taken_inputs(
    program: Program, parts: Sequence[Entry | FusedRun], views: Mapping[int, set[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """The donated inputs whose memory outputs take, by these outputs; and those of them that a fused run writes there.

    An input that the function returns as it is stays in its place. ``views`` are those of :func:`views_of`.
    """
    outputs, avals = dict.fromkeys(program.outputs), program.avals
    made_at = {v: n for n, p in enumerate(parts) for v in p.outputs}
    last_read = {v: n for n, p in enumerate(parts) for v in p.inputs if isinstance(v, int)}
    viewing = set().union(*views.values())
    makers = {v: _run_of(v, parts[made_at[v]]) for v in outputs if v in made_at and v not in viewing}
    taken: dict[int, int] = {}
    in_place: dict[int, int] = {}
    for i, on_it in views.items():
        # Numbers are copied beside others: of those that have their shape (a loss) a caller keeps many.
        if math.prod(avals[i].shape) < 2 or not on_it.isdisjoint(outputs.keys() - {i}):
            continue
        if i in outputs:
            taken[i] = i
            continue
        fits = [v for v in makers if v not in taken and avals[v] == avals[i]]
        if not fits:
            continue
        v = next((v for v in fits if i in makers[v].inputs), fits[0])
        taken[v] = i
        n, run = made_at[v], makers[v]
        if isinstance(run, FusedRun) and max(last_read.get(x, -1) for x in on_it) <= n:
            read = [x for x in parts[n].inputs if x in on_it]
            free = takers(run)[run.outputs.index(v)]
            if not read or (read == [i] and i in run.inputs and run.inputs.index(i) in free):
                in_place[v] = i
    return taken, in_place


def _run_of(v: int, part: Entry | FusedRun) -> Entry | FusedRun:
    """The part that makes a value, or that member of it."""
    return next((m for m in getattr(part, "members", ()) if v in m.outputs), part)
