"""Captures of a function, cached from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .captures import captures_of
from .guards import Captures

_MOST_KEPT = 64


class CachedCaptures:
    """The captures of one function, cached from call to call."""

    __slots__ = ("_fn", "_last")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._last: dict[tuple[int, ...], Captures] = {}  # by ids of objects

    def look(self, objects: Sequence[Any] = ()) -> Captures:
        """The captures of the function, and of these ``objects`` among its arguments, now."""
        # The captures hold the objects, so that their ids stay their own.
        place = tuple(map(id, objects)) if objects else ()
        last = self._last.get(place)
        if last is not None and last.hold():
            return last
        found = captures_of(self._fn, objects)
        if len(self._last) >= _MOST_KEPT:
            self._last.clear()
        self._last[place] = found
        return found
