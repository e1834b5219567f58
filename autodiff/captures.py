"""What a traced function reads beside its arguments, and whether all of it still is what it was.

A program holds what its code read while it was traced. So everything that the code could read is looked for, in what it says it looks
up (:mod:`.codes`): variables of functions around it and of modules, default arguments, attributes of objects and of their classes, what
lies in containers, and the same of all functions that are found on the way. That is more than what is read, and never less, but for
what only code in C can see. Where each was found is taken down: seeing that all still stands there takes a fraction of the time of
finding it again.
"""

from __future__ import annotations

import abc
import array
import collections
import functools
import gc
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np

from ..arrays._array import Array
from ..arrays.errors import TracedValueError
from ..arrays.indexsum import densify
from ..arrays.program import freeze
from .codes import is_library, names_in
from .guards import ABSENT, CaptureKey, Captures
from .tracing import memory

LARGEST_COMPARED = 1 << 20
"""Bytes of a NumPy array up to which its elements are compared at every call."""


class Wrapper(abc.ABC):
    """A callable that calls functions of the user's: what these read counts as read by it."""

    @abc.abstractmethod
    def functions(self) -> list[Callable[..., Any]]:
        """The functions."""


class Outside:
    """What one function reads beside its arguments, at one call after the other."""

    __slots__ = ("_alone", "_fn", "_last")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._alone: Captures | None = None  # of calls with arrays and numbers alone
        self._last: dict[tuple[int, ...], Captures] = {}  # by ids of objects

    def look(self, objects: Sequence[Any] = ()) -> Captures:
        """What the function, and these ``objects`` among its arguments, can read now."""
        if not objects:
            last = self._alone
            if last is None or not last.hold():
                last = self._alone = captures_of(self._fn)
            return last
        # The objects are held by what was found, so that their ids stay their own.
        place = tuple(map(id, objects))
        last = self._last.get(place)
        if last is not None and last.hold():
            return last
        found = captures_of(self._fn, objects)
        if len(self._last) >= _MOST_KEPT:
            self._last.clear()
        self._last[place] = found
        return found


_MOST_KEPT = 64


def captures_of(fn: Any, objects: Sequence[Any] = ()) -> Captures:
    """What the function, and these ``objects`` among its arguments, can read now.

    Raises
    ------
    TracedValueError
        For what can be written to without anybody noticing, and is too large to be compared at every call.
    """
    walk = _Walk(getattr(fn, "__name__", type(fn).__name__))
    walk.visit(fn, walk.title)
    for i, x in enumerate(objects):
        walk.visit(x, f"an argument ({type(x).__name__})" if i == 0 else f"argument object {i} ({type(x).__name__})")
    return walk.finish()


_CODE = FunctionType | staticmethod | classmethod | property
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), range, slice, np.dtype})


def is_plain(value: Any) -> bool:
    """Whether the value is all that there is to the object."""
    return type(value) in _PLAIN or isinstance(value, np.generic | np.dtype | str | bytes | int | float | complex)


_NUMBERS = frozenset({bool, int, float, complex, str})
_SKIPPED = (
    BuiltinFunctionType
    | GetSetDescriptorType
    | threading.Thread
    | np.random.Generator
    | np.random.RandomState
    | np.ufunc
)


class _Walk:
    """One search. Objects are gone through again when code is found that looks up further names."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.found = Captures()
        self.key: list[Any] = []
        self.held: list[Any] = []
        self.seen: set[int] = set()
        self.names: set[str] = set()
        self.noted: set[str] = set()
        self.anything = False
        self.owners: list[
            tuple[Any, str, set[str]]
        ] = []  # objects, classes and modules, with the names that were looked up
        self.queue: list[tuple[Any, str]] = []

    def visit(self, value: Any, path: str) -> None:
        self.queue.append((value, path))

    def finish(self) -> Captures:
        while True:
            while self.queue:
                self._one(*self.queue.pop())
            before = len(self.names), self.anything
            for owner in list(self.owners):
                self._attributes(*owner)
            if not self.queue and before == (len(self.names), self.anything):
                break
        self.found.key = CaptureKey(tuple(self.key), self.held)
        return self.found

    # ----- values -----------------------------------------------------------------------------------------------------

    def _one(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in _PLAIN or is_plain(value):
            self.key.append((kind, freeze(value) if kind is not slice else repr(value)))
            return
        if value is ABSENT:
            self.key.append(ABSENT)
            return
        # What has an equality of its own is known by what can be read of it, all else by identity.
        structural = kind.__eq__ is not object.__eq__ and not isinstance(value, Array | np.ndarray | type)
        self.key.append(kind if structural else id(value))
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        self.held.append(value)
        if kind is Array:
            self._array(value)
        elif isinstance(value, np.ndarray):
            self._numpy(value, path)
        elif isinstance(value, Wrapper):
            for f in value.functions():
                self.visit(f, path)
            self._same_contents(value.functions)
        elif kind is FunctionType:
            self._function(value, path)
        elif isinstance(value, MethodType):
            self.visit(value.__func__, path)
            self.visit(value.__self__, path)
        elif isinstance(value, functools.partial):
            self.visit(value.func, path)
            self.visit(value.args, f"{path}.args")
            self.visit(value.keywords, f"{path}.keywords")
        elif isinstance(value, ModuleType):
            self.owners.append((value, path, set()))
        elif isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType | type | None):
            self.visit(value.__self__, path)  # such as the `get` of a dict
        elif isinstance(value, property):
            self.visit(value.fget, path)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(value.__func__, path)
        elif isinstance(value, functools.cached_property):
            self.visit(value.func, path)
        elif isinstance(value, type):
            if not is_library(value.__module__):
                self.owners.append((value, path, set()))
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            self.found.chance.append(value)
        elif isinstance(value, Iterator) and is_library(kind.__module__):
            self.found.named.add("SystemRandom")  # to be traced twice: what is taken from it is another thing each time
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            names = value.__reduce__()[1]
            self.names.update(n for name in names if isinstance(name, str) for n in name.split("."))
            self.key.append(repr(value))
        elif not isinstance(value, _SKIPPED):
            self._object(value, path)

    def _array(self, x: Array) -> None:
        densify([x])
        buffer = x._buf
        self.held.append(buffer)
        self.key.append(id(buffer))
        self.found.arrays.append((x, buffer))
        self.found.known |= {id(x), id(buffer)}
        if isinstance(buffer, np.ndarray):
            self.found.known.add(id(memory(buffer)))

    def _numpy(self, x: np.ndarray, path: str) -> None:
        self.found.known |= {id(x), id(memory(x))}
        if x.dtype == object:
            self._sequence(x, path, x.ravel().tolist)
            return
        if x.nbytes > LARGEST_COMPARED:
            base: Any = x
            while isinstance(base, np.ndarray) and not base.flags.writeable:
                base = base.base
            if base is not None and not isinstance(base, bytes):
                raise TracedValueError(
                    f"[compile] {self.title} can read {path}, a NumPy array of {x.nbytes:,} bytes, which may be written to without "
                    "anybody noticing: pass it as an argument, hold it as mt.asarray(...), or declare it constant with "
                    ".setflags(write=False)"
                )
            return

        def look() -> tuple[Any, ...]:
            return x.shape, x.dtype, x.tobytes()

        content = look()
        self.key.append(content)
        self.found.others.append((look, content))

    def _function(self, fn: FunctionType, path: str) -> None:
        code, defaults, named = fn.__code__, fn.__defaults__, fn.__kwdefaults__
        self.found.functions.append((fn, code, defaults, named))
        self.held.append(code)
        self.key.append(id(code))
        module = fn.__globals__
        ours = is_library(module.get("__name__", ""))
        names = names_in(code)
        for name, value in zip(
            code.co_varnames[code.co_argcount - len(defaults or ()) :], defaults or (), strict=False
        ):
            self.visit(value, f"the default of {name} of {fn.__name__}")
        if named:
            self.visit(named, f"the defaults of {fn.__name__}")
        if fn.__dict__ and not ours:
            self.owners.append((fn, path, set()))
        noted = frozenset() if ours else names.noted
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that is not bound yet
                value = ABSENT
            self.found.cells.append((cell, value))
            self._named(value, name, name in noted)
        if ours:
            return
        if not module.get("__name__", "").startswith("meshtape."):  # which draws from nothing that is not an argument
            self.found.named |= names.variables | names.attributes
        self.names |= names.attributes
        self.noted |= names.noted & names.attributes
        self.anything |= names.anything
        for name in names.variables:
            self._item(module, name, name, name in noted)
        if names.any_variable:
            self._data(module, fn.__module__)
        for name in names.modules:
            for m in (name, *(f"{name}.{n}" for n in names.attributes)):
                if m in sys.modules:
                    self.visit(sys.modules[m], m)

    def _named(self, value: Any, path: str, noted: bool) -> None:
        """What a name stands for; of a container that is only told to take something in, the contents don't matter."""
        if noted and isinstance(value, list | dict | set | collections.deque):
            self.held.append(value)
            self.key.append(id(value))
        else:
            self.visit(value, path)

    def _item(self, variables: Mapping[str, Any], name: str, path: str, noted: bool = False) -> None:
        value = variables.get(name, ABSENT)
        self.found.items.append((variables.get, name, value))
        self._named(value, path, noted)

    def _data(self, variables: Mapping[str, Any], path: str) -> None:
        """Of the variables of a module those that are no code."""
        for name, value in list(variables.items()):
            if not name.startswith("__") and not isinstance(value, ModuleType | FunctionType | type):
                self._item(variables, name, f"{path}.{name}")

    # ----- containers and objects -------------------------------------------------------------------------------------

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
        if all(type(v) in _NUMBERS for v in values):
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

    def _kept(self, function: Any) -> None:
        """Arrays that ``functools.lru_cache`` keeps: results of the function, which gives them again without being called."""
        left = gc.get_referents(function)
        while left:
            x = left.pop()
            if type(x) is Array:
                self._array(x)
            elif isinstance(x, np.ndarray):
                self._numpy(x, f"what {self.title} keeps by lru_cache")
            elif isinstance(x, dict | list | tuple) or type(x).__name__ == "_lru_list_elem":
                left += [v for v in gc.get_referents(x) if not isinstance(v, type | str) and id(v) not in self.seen]
                self.seen.add(id(x))
                self.held.append(x)

    def _object(self, x: Any, path: str) -> None:
        kind = type(x)
        if isinstance(x, list | tuple | collections.deque):
            self._sequence(x, path)
        elif isinstance(x, dict | MappingProxyType):
            self._mapping(x, path)
        elif isinstance(x, set | frozenset):
            for i, v in enumerate(self._same_contents(functools.partial(list, x))):
                self.visit(v, f"{path}: element {i}")
        elif isinstance(x, bytearray | memoryview | array.array):
            content = bytes(x)
            self.key.append(content)
            self.found.others.append((lambda: bytes(x), content))
        elif isinstance(x, weakref.ref | ContextVar):
            read = x if isinstance(x, weakref.ref) else functools.partial(x.get, None)
            (value,) = self._same_contents(lambda: (read(),))
            self.visit(value, path)
        elif kind is functools._lru_cache_wrapper:
            self.visit(x.__wrapped__, path)
            self._kept(x)
        variables = getattr(x, "__dict__", None)
        if is_library(kind.__module__):
            if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None and kind is not tuple:
                self.key.append(x)  # such as a path or a date
            if kind.__module__.startswith("meshtape.") or not isinstance(variables, dict):
                return
            if isinstance(x, Mapping | Sequence | Set | SimpleNamespace) or kind.__module__ == "argparse":
                self._mapping(variables, path)
        self.found.objects.append((x, kind, variables))
        self.owners.append((x, path, set()))

    # ----- attributes -------------------------------------------------------------------------------------------------

    def _attributes(self, x: Any, path: str, done: set[str]) -> None:
        """The attributes of an object, class or module that some code looks up, as far as they were not looked up before."""
        names = self.names - done
        if isinstance(x, ModuleType):
            if self.anything and "**" not in done and not is_library(x.__name__):
                done.add("**")
                self._data(vars(x), path)
            done |= names
            self._module(x, path, sorted(names))
            return
        classes = [c for c in (x if isinstance(x, type) else type(x)).__mro__ if not is_library(c.__module__)]
        variables = None if isinstance(x, type) else getattr(x, "__dict__", None)
        if not done:
            # Operators, calls, indices and the like are looked up by no name; nor are the fields of trees.
            names |= {n for c in classes for n, v in vars(c).items() if _is_special(n) and isinstance(v, _CODE)}
            names |= getattr(x, "__dataclass_fields__", {}).keys()
        if self.anything and not isinstance(x, Enum):
            names |= {n for c in classes for n in vars(c) if not _is_special(n)} - done
            if isinstance(variables, dict) and "**" not in done:
                names.add("**")
                self._mapping(variables, path)
        done |= names
        for name in sorted(names):
            self._attribute(x, name, f"{path}.{name}", variables, classes)

    def _attribute(self, x: Any, name: str, path: str, variables: Any, classes: Sequence[type]) -> None:
        noted = name in self.noted
        mine = variables.get(name, ABSENT) if isinstance(variables, dict) else ABSENT
        home = next((i for i, c in enumerate(classes) if name in vars(c)), None)
        if isinstance(variables, dict) and (mine is not ABSENT or home is not None):
            self._item(variables, name, path, noted)
            if mine is not ABSENT and (home is None or not isinstance(vars(classes[home])[name], property)):
                return
        if home is None:
            if isinstance(variables, dict) and (
                f"?{name}" in self.names or any("__getattr__" in vars(c) for c in classes)
            ):
                self.found.items += [(d.get, name, ABSENT) for d in (variables, *map(vars, classes))]
            return
        for c in classes[:home]:  # one that comes to stand before it hides it
            self.found.items.append((vars(c).get, name, ABSENT))
        member = vars(classes[home])[name]
        if isinstance(member, MemberDescriptorType):
            if not isinstance(x, type):
                (value,) = self._same_contents(lambda: (_slot(member, x),))
                self._named(value, path, noted)
            return
        self._item(vars(classes[home]), name, path, noted)

    def _module(self, x: ModuleType, path: str, names: Sequence[str]) -> None:
        variables = vars(x)
        library = is_library(x.__name__)
        for name in names:
            value = variables.get(name, ABSENT)
            if value is ABSENT and not library and f"?{name}" in self.names:
                self.found.items.append((variables.get, name, value))
            if value is ABSENT or (library and isinstance(value, ModuleType)) or value is sys.modules:
                continue
            self.found.items.append((variables.get, name, value))
            if library and (callable(value) or type(value).__module__.startswith("meshtape.")):
                self.held.append(value)
                self.key.append(id(value))
            else:
                self._named(value, f"{path}.{name}", name in self.noted)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _slot(member: Any, x: Any) -> Any:
    try:
        return member.__get__(x)
    except AttributeError:
        return ABSENT
