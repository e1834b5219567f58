"""Results of a traced function that are no arrays: its program gives them again at each call."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...arrays.core.array import Array
from ...arrays.core.dispatch import Deferred
from ...arrays.core.errors import TracedValueError
from ..tape.hidden import held_in
from .number_inputs import TracedNumber
from .objects import is_plain

ARRAY: Any = type("_ArrayPlace", (), {"__repr__": lambda self: "an array"})()
"""Stands where an array was."""


class _MadeResult(NamedTuple):
    """A result that the function made, and that each caller may write to."""

    value: Any
    outside: dict[int, Any]  # by id, what it shares with all others


def static(who: str, out: Any, around: Iterable[Any] = ()) -> Any:
    """A result as a program keeps it; objects ``around`` the function are shared, not copied."""
    if isinstance(out, Array):
        return ARRAY
    if is_plain(out):
        return out
    refuse_traced(who, out)
    outside = {id(x): x for x in around}
    try:
        made = copy.deepcopy(out, dict(outside))
    except Exception as e:
        raise TracedValueError(
            f"{who} makes and returns a {type(out).__name__}, of which a program cannot give each caller one of his "
            f"own ({type(e).__name__}: {e}): return arrays and plain values, and make the object outside"
        ) from e
    return out if made is out else _MadeResult(made, outside)


def refuse_traced(who: str, out: Any) -> None:
    """Raise where an object has arrays inside that only stand for values."""
    if not isinstance(out, Array) and any(getattr(x, "traced", True) for x in held_in(out, (Deferred, TracedNumber))):
        raise TracedValueError(
            f"{who} returns a {type(out).__name__}, which is no tree: the arrays in it would have no value. Return "
            "arrays, in tuples, "
            f"lists, dicts or dataclasses, or call mt.tree.register({type(out).__name__}, flatten, unflatten)"
        )


def filled(statics: Sequence[Any], arrays: Iterable[Array]) -> list[Any]:
    """All leaves of a result, with these arrays in their places."""
    outs = iter(arrays)
    return [
        next(outs) if s is ARRAY else copy.deepcopy(s.value, dict(s.outside)) if type(s) is _MadeResult else s
        for s in statics
    ]
