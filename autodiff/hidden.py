"""Arrays in places where no gradient finds them: in objects that are no trees."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays.errors import GradientError


def hides_arrays(x: Any) -> bool:
    """Whether an object that is no tree has arrays among its variables or elements."""
    if isinstance(x, collections.deque | set | frozenset):
        held: Any = x
    else:
        held = () if isinstance(x, type | FunctionType | ModuleType) else getattr(x, "__dict__", {}).values()
    return any(isinstance(v, Array) for v in held)


def refuse_hidden(who: str, result: Any) -> None:
    """Raise where a result has arrays in places from which no gradient comes back."""
    for path, x in trees.flatten_with_path(result):
        if hides_arrays(x) or isinstance(x, Iterator):
            place = f"{trees.path_name(path)} of its result" if path else "its result"
            raise GradientError(
                f"[{who}] {place} is a {type(x).__name__}, which is no tree: gradients of what is in it would be lost. Return arrays, in tuples, "
                "lists, dicts or dataclasses"
            )
