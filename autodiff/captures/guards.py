"""Guards of the captures of a traced function: one look at each tells whether all are unchanged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from ...arrays.core.array import Array


class CaptureKey:
    """A key of captures: numbers and texts are compared by value, other objects by identity, and kept alive."""

    __slots__ = ("_hash", "_held", "_key")

    def __init__(self, key: tuple[Any, ...], held: Sequence[Any]) -> None:
        self._key, self._held, self._hash = key, held, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CaptureKey) and other._key == self._key)


ABSENT: Any = type("_Absent", (), {"__repr__": lambda self: "nothing"})()


class Captures:
    """The captures of a function at one moment: the values that it reads beside its arguments."""

    __slots__ = (
        "arrays",
        "cells",
        "chance",
        "classes",
        "contents",
        "functions",
        "items",
        "key",
        "known",
        "named",
        "objects",
        "others",
        "paths",
        "traced",
    )

    def __init__(self) -> None:
        self.key: CaptureKey
        self.named: set[str] = set()  # what the code of the user looks up
        self.chance: list[Any] = []  # generators of random numbers
        self.known: set[int] = set()  # ids of arrays of both kinds
        self.traced: list[tuple[Any, str]] = []  # the traces whose arrays were found, and where
        self.paths: list[tuple[int, str]] = []  # how much of the key there was when something was come to, and where
        # Places, and what stood there.
        self.items: list[tuple[Callable[..., Any], Any, Any]] = []  # of dicts: their method `get`, and a key
        self.cells: list[tuple[Any, Any]] = []
        self.arrays: list[tuple[Array, Any]] = []  # with their buffers
        self.functions: list[tuple[FunctionType, Any, Any, Any]] = []
        self.objects: list[tuple[Any, type, Any, Any]] = []  # with their classes and dicts, and what finds these
        self.classes: dict[type, tuple[type, ...]] = {}  # with the order in which attributes are looked up
        self.contents: list[tuple[Callable[[], Sequence[Any]], Sequence[Any]]] = []  # compared by identity
        self.others: list[tuple[Callable[[], Any], Any]] = []  # compared by equality

    @property
    def around(self) -> Sequence[Any]:
        """All objects that the search found."""
        return self.key._held

    def hold(self) -> bool:
        """Whether the function would read the same values now."""
        for get, name, value in self.items:
            if get(name, ABSENT) is not value:
                return False
        for cell, value in self.cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:  # not bound
                if value is not ABSENT:
                    return False
        for x, buffer in self.arrays:
            if x._buf is not buffer:
                return False
        for fn, code, defaults, named in self.functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ is not named:
                return False
        for x, cls, variables, look_up in self.objects:
            if type(x) is not cls or (variables is not None and look_up(x, "__dict__") is not variables):
                return False
        for cls, order in self.classes.items():
            if cls.__mro__ is not order:
                return False
        for look, values in self.contents:
            now = look()
            if len(now) != len(values) or not all(map(operator.is_, now, values)):
                return False
        return not self.others or all(look() == value for look, value in self.others)

    def changed_since(self, look: Callable[[], Captures]) -> str | None:
        """The first place with another value now (found by ``look``); None where all captures are unchanged."""
        if self.hold():
            return None
        return self.differs(look())

    def differs(self, now: Captures) -> str | None:
        """The first place with another value in ``now``."""
        before, after = self.key._key, now.key._key
        if before == after:
            return None
        pairs = enumerate(zip(before, after, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
        return next((path for i, path in reversed(self.paths) if i <= place), "what it reads")
