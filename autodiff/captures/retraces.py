"""Values for which a compiled function is traced again at every call, where an input would have been traced once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...arrays.core import tree as trees
from .guards import Captures

MOST = 8
"""Traces in succession for another value in the same place, after which a warning says so."""


class Retrace(NamedTuple):
    """One trace: the keys of its arguments (without arrays), their structure, and the captures."""

    leaves: Sequence[Any]
    treedef: trees.TreeDef
    reads: Captures


class Retraces:
    """Traces of one function in succession, without a call in between that found its program."""

    __slots__ = ("_last", "_place", "_told", "count")

    def __init__(self) -> None:
        self._last: Retrace | None = None
        self._place: Any = None
        self._told = False
        self.count = 0

    def note(self, new: Retrace, leaves: Sequence[Any]) -> str | None:
        """The place and the remedy, at the trace from which on this is worth a warning."""
        old, self._last = self._last, new
        place = None if old is None or self._told else _place(old, new)
        self.count = self.count + 1 if place is not None and place == self._place else 0
        self._place = place
        if self.count < MOST or old is None:
            return None
        self._told = True
        if isinstance(place, str):
            return (
                f"{place} is another one each time: pass it as an argument, as an array (mt.asarray) if it is a number"
            )
        path = trees.flatten_with_path(trees.unflatten(new.treedef, range(new.treedef.size)))[place][0]
        return (
            f"argument {trees.path_name(path[1:])} is another one each time (now {leaves[place]!r:.80}): "
            "pass it as an array (mt.asarray), or let the code only calculate with a Python number, and neither "
            "compare nor index with it"
        )


def _place(old: Retrace, new: Retrace) -> Any:
    """The one place in which two traces differ: the number of a leaf, or the path of a capture; else None."""
    if old.treedef != new.treedef:
        return None
    places = [i for i, (a, b) in enumerate(zip(old.leaves, new.leaves, strict=True)) if a != b]
    if any(x.leaves[i][0] not in ("static", "object") for i in places for x in (old, new)):
        return None  # another shape or dtype
    return places[0] if places else new.reads.differs(old.reads)
