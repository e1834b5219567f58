"""A lower bound on the memory of a program, computed from its shapes before it runs."""

from __future__ import annotations

import math

from ...arrays.core.index_template import is_basic
from ...arrays.core.program import Entry, Program, last_uses

_SORTED_NBYTES = 16  # a random word and its number in the order


def most_held(program: Program) -> tuple[int, int]:
    """(a lower bound on the peak bytes beside arguments and constants, the number of the entry that needs them).

    Each result in new memory counts from the call that makes it to the last call that reads it. The work memory of ops
    is not counted, except that of a part of a random order and of positions along a dimension.

    >>> import meshtape as mt
    >>> from meshtape.arrays.core.program import trace
    >>> most_held(trace(lambda x: mt.sum(mt.exp(x) + 1.0), (mt.ones((2, 4)),)).program)
    (128, 1)
    >>> most_held(trace(lambda x: mt.broadcast_to(x, (1000, 4)), (mt.ones(4),)).program)
    (0, 0)
    """
    held: dict[int, int] = {}
    total = most = where = 0
    for n, (entry, free) in enumerate(zip(program.entries, last_uses(program), strict=True)):
        if not _may_be_view(entry):
            for v in entry.outputs:
                held[v] = program.avals[v].nbytes
                total += held[v]
        beside = _beside(program, entry)
        if total + beside > most:
            most, where = total + beside, n
        for v in free:
            total -= held.pop(v, 0)
    return most, where


def _may_be_view(entry: Entry) -> bool:
    if entry.op.name == "getitem":
        return is_basic(entry.params["template"])
    return entry.op.view != ""


def _beside(program: Program, entry: Entry) -> int:
    if entry.op.name == "random_permutation":
        return _SORTED_NBYTES * math.prod(entry.params["global_shape"])
    if entry.op.name == "positions":
        (places,) = (program.avals[v] for v in entry.outputs)
        return places.dtype.itemsize * places.shape[entry.params["axis"]]
    return 0
