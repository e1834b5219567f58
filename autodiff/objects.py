"""One object: whether a guard can compare it, and where it keeps its values."""

from __future__ import annotations

import functools
import gc
import operator
import sys
import weakref
from typing import Any

import numpy as np

from .codes import is_library, module_of
from .guards import ABSENT

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), range, slice, np.dtype})


def is_plain(value: Any) -> bool:
    """Whether the value is all that there is to the object."""
    return type(value) in _PLAIN or (
        isinstance(value, np.generic | np.dtype | str | bytes | int | float | complex)
        and is_library(module_of(type(value)))
    )


# Modules whose classes read nothing of their objects that could be computed with, or are looked at in a way of their own.
_MACHINERY = frozenset(
    (
        *("_io", "_thread", "abc", "asyncio", "builtins", "concurrent", "contextlib", "contextvars", "inspect", "io"),
        *("itertools", "logging", "meshtape", "multiprocessing", "queue", "re", "socket", "subprocess", "threading"),
        *("typing", "warnings"),
    )
)
_MADE_IN_C = 1 << 8
"""The flag of classes that no Python code has made, or can change."""


@functools.lru_cache(maxsize=4096)
def holds(kind: type) -> tuple[bool, bool]:
    """Of the library classes that a class is derived from: whether they may read any variable of the object, and whether they are in C
    and may hold what nobody sees."""
    bases = [c for c in kind.__mro__ if is_library(module_of(c)) and module_of(c).partition(".")[0] not in _MACHINERY]
    hidden = any(_is_in_c(c) and not is_standard(module_of(c)) for c in bases)
    return bool(bases), hidden and not issubclass(kind, np.ndarray | np.generic)


def _is_in_c(cls: type) -> bool:
    """Whether objects of the class have memory that belongs to no variable."""
    if cls.__flags__ & _MADE_IN_C:
        return True
    return vars(cls).keys().isdisjoint({"__slots__", "__dict__", "__weakref__"}) and (
        cls.__basicsize__ > cls.__base__.__basicsize__  # type: ignore[union-attr]
    )


class Kept:
    """Results that one ``functools.lru_cache`` keeps: more may come, but an epoch ends where some of it is gone."""

    def __init__(self, function: Any) -> None:
        self.results = next(x for x in gc.get_referents(function) if type(x) is dict and x is not function.__dict__)
        self.seen: list[Any] = []
        self.epoch = 0

    def __call__(self) -> int:
        now = list(self.results.values())  # in the order in which they came
        if len(now) < len(self.seen) or not all(map(operator.is_, self.seen, now)):
            self.epoch += 1
        self.seen = now
        return self.epoch


_KEPT: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()


def kept_by(function: Any) -> Kept:
    """The results that this function of ``functools.lru_cache`` keeps."""
    found = _KEPT.get(function)
    if found is None:
        found = _KEPT[function] = Kept(function)
    return found


def memory_of(x: Any) -> bytes | None:
    """The bytes of an object that gives out its memory."""
    try:
        return memoryview(x).tobytes()
    except (TypeError, ValueError, BufferError):
        return None


def is_value(x: Any) -> bool:
    """Whether the object is known by an equality of its own, such as a path or a date."""
    if type(x).__eq__ is object.__eq__:
        return False
    try:
        hash(x)
    except (TypeError, ValueError):  # the latter of memory that may be written to
        return False
    return True


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def slot(member: Any, x: Any) -> Any:
    try:
        return member.__get__(x)
    except AttributeError:
        return ABSENT
