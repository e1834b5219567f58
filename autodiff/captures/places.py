"""Places of captures: each has a guard and a part of the key, and leads to further places."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from ...arrays.core.program import freeze
from .guards import ABSENT, Captures

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
        if (
            getattr(value, "__module__", None) == "builtins"
        ):  # Python's own, as long as nobody puts another in its place
            self.found.items.append((variables.get, name, value))
            self.key.append(id(value))
        else:
            self._item(variables, name, name)

    def _data(self, variables: Mapping[str, Any], path: str) -> None:
        """Of the variables of a module those that are no code."""
        for name, value in list(variables.items()):
            if not name.startswith("__") and not isinstance(value, ModuleType | FunctionType | type):
                self._item(variables, name, f"{path}.{name}")
