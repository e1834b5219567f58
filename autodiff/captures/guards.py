"""Guards of the captures of a traced function: one look at each tells whether all are unchanged; and the search that
notes them."""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from ...arrays.core.array import Array
from ...arrays.core.program import freeze


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


# ----- places: each has a guard and a part of the key, and leads to further places ------------------------------------


NUMBERS = frozenset({bool, int, float, complex, str})


class CaptureSearch:
    """The captures found so far, and the queue of values to visit."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.found = Captures()
        self.key: list[Any] = []
        self.held: list[Any] = []
        self.queue: list[tuple[Any, str]] = []

    def visit(self, value: Any, path: str) -> None:
        self.queue.append((value, path))

    def _state(self, look: Callable[[], Any]) -> None:
        """A plain value that is read again at every call."""
        value = look()
        self.key.append(freeze(value))
        self.found.others.append((look, value))

    def _item(self, variables: Mapping[str, Any], name: str, path: str) -> None:
        value = variables.get(name, ABSENT)
        self.found.items.append((variables.get, name, value))
        self.visit(value, path)

    def _same_contents(self, look: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        values = look()
        self.found.contents.append((look, values))
        self.held.append(values)
        self.key.append(len(values))
        return values

    def _sequence(self, x: Any, path: str, look: Callable[[], Sequence[Any]] | None = None) -> None:
        if type(x) is tuple:
            values: Sequence[Any] = x
            self.key.append(len(x))
        else:
            values = self._same_contents(functools.partial(list, x) if look is None else look)
        if all(type(v) in NUMBERS for v in values):
            self.key.append(freeze(values))
            return
        for i, v in enumerate(values):
            self.visit(v, f"{path}[{i}]")

    def _mapping(self, x: Any, path: str) -> None:
        def look() -> Sequence[Any]:
            return [*x, *x.values()]

        found = self._same_contents(look)
        n = len(found) // 2
        for k, v in zip(found[:n], found[n:], strict=True):
            self.visit(k, f"a key of {path}")
            self.visit(v, f"{path}[{k!r}]")

    def _unseen(self) -> None:
        """A guard that never holds."""
        self.key.append(object())
        self.found.others.append((object, None))

    def _value(self, look: Callable[[], Any], path: str) -> None:
        (value,) = self._same_contents(lambda: (look(),))
        self.visit(value, path)

    def _builtin(self, name: str) -> None:
        variables = vars(builtins)
        value = variables.get(name, ABSENT)
        # Python's own is not searched, as long as nobody puts another in its place.
        if getattr(value, "__module__", None) == "builtins":
            self.found.items.append((variables.get, name, value))
            self.key.append(id(value))
        else:
            self._item(variables, name, name)

    def _data(self, variables: Mapping[str, Any], path: str) -> None:
        """Of the variables of a module those that are no code."""
        for name, value in list(variables.items()):
            if not name.startswith("__") and not isinstance(value, ModuleType | FunctionType | type):
                self._item(variables, name, f"{path}.{name}")
