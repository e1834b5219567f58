"""What a compiled function is traced anew for: its arguments, and what it reads from around it."""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays.indexsum import IndexSum, densify
from ..arrays.program import freeze
from ..arrays.writing import settled
from .tracing import Tracer

_CODE = FunctionType | BuiltinFunctionType | ModuleType | type
"""What a function names that is no data."""


class Wrapper(abc.ABC):
    """A callable that calls functions of the user's: what these read counts as read by it."""

    @abc.abstractmethod
    def functions(self) -> list[Callable[..., Any]]:
        """The functions."""


# Every call of a compiled function asks these of all that the function reads, and a look at the type is all that most answers take.
_FUNCTION, _WRAPPER, _DATA = range(3)
_kinds: dict[type, int] = {}


def _kind(value: Any) -> int:
    found = _kinds.get(type(value))
    if found is None:
        found = (
            _WRAPPER
            if isinstance(value, Wrapper)
            else _FUNCTION
            if isinstance(value, FunctionType | functools.partial)
            else _DATA
        )
        if type(value).__module__ in _FAMILIAR:  # and not classes that a user makes at each call, which would be kept
            _kinds[type(value)] = found
    return found


_FAMILIAR = frozenset({"builtins", "functools", "numpy", __name__, f"{__package__}.compile", Array.__module__})


def _functions_of(value: Any) -> list[Any]:
    return value.functions() if _kind(value) == _WRAPPER else [value]


def as_array(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype != object:
        from ..arrays.creation import asarray

        return asarray(x)
    return x


def as_inputs(leaves: Sequence[Any]) -> tuple[list[Any], list[Array]]:
    """The leaves, those that are arrays of any kind as Arrays; and these alone."""
    given = [x if type(x) is Array else as_array(x) for x in leaves]
    return given, [x for x in given if isinstance(x, Array)]


def is_traced(inputs: Sequence[Array]) -> bool:
    """Whether one of them only stands for a value of another program."""
    return bool([x for x in inputs if type(x._buf) is not np.ndarray and isinstance(x._buf, Tracer)])


def leaf_keys(given: Sequence[Any]) -> tuple[Any, ...]:
    """What the program depends on of arguments that :func:`as_inputs` gave."""
    return tuple([leaf_key(x) for x in given])


def leaf_key(x: Any) -> Any:
    if type(x) is Array and (type(x._buf) is np.ndarray or type(settled(x)) is np.ndarray):
        return (x._buf.shape, x._buf.dtype)
    if isinstance(x, Array):
        return ("array", x.shape, x.dtype, x.device, x.sharding, type(x._buf) is IndexSum)
    try:
        hash(x)
    except TypeError:
        return ("object", _ById(x))
    return ("static", type(x), freeze(x))


class _ById:
    """An unhashable static argument, equal to itself alone; holding it keeps its id its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value


class _Places:
    """Where a function reads from, and what stood there: whether all still does takes less time to see than to find again."""

    __slots__ = ("arrays", "cells", "containers", "dicts", "functions", "names", "steady", "wrappers")

    def __init__(self) -> None:
        self.functions: list[tuple[Any, Any, Any]] = []  # with their code and defaults
        self.wrappers: list[tuple[Wrapper, list[Any]]] = []
        self.dicts: list[tuple[dict[str, Any], list[Any]]] = []
        self.cells: list[tuple[Any, Any]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.arrays: list[tuple[Array, Any]] = []  # with their buffers
        self.containers: list[tuple[Any, list[Array], list[Any]]] = []
        self.steady = True  # there was nothing of which this cannot tell

    def hold(self) -> bool:
        """Whether the function would read the very same objects now."""
        for cell, value in self.cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:  # not bound any more
                return False
        for module, name, value in self.names:
            if module.get(name, _ABSENT) is not value:
                return False
        for x, buffer in self.arrays:
            if x._buf is not buffer:
                return False
        for fn, code, defaults in self.functions:
            if getattr(fn, "__code__", None) is not code or getattr(fn, "__defaults__", None) is not defaults:
                return False
        for fn, functions in self.wrappers:
            if not _same(fn.functions(), functions):
                return False
        for found, values in self.dicts:
            if not _same(list(found.values()), values):
                return False
        for value, arrays, buffers in self.containers:
            now = arrays_in(value)
            if not _same(now, arrays) or not _same([x._buf for x in now], buffers):
                return False
        return self.steady


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


_ABSENT = object()


def outside(fn: Any, places: _Places | None = None) -> list[Any]:
    """What the function reads beside its arguments: its closure, its defaults, the arguments of a ``partial``, and the variables of
    the module that it names; and what the functions among them read in turn, if they are of its module or its closure.
    ``places`` takes down where each was found."""
    found: list[Any] = []
    places = _Places() if places is None else places
    functions, done = [fn], set()
    while functions:
        fn = functions.pop()
        if id(fn) in done:
            continue
        done.add(id(fn))
        if _kind(fn) == _WRAPPER:
            called = fn.functions()
            places.wrappers.append((fn, list(called)))
            functions += called
            continue
        if isinstance(fn, functools.partial):
            values = [fn.func, *fn.args, *fn.keywords.values()]
            places.dicts.append((fn.keywords, list(fn.keywords.values())))
        else:
            code, defaults = getattr(fn, "__code__", None), getattr(fn, "__defaults__", None)
            named_defaults = getattr(fn, "__kwdefaults__", None) or {}
            values = [*(defaults or ()), *named_defaults.values()]
            places.functions.append((fn, code, defaults))
            if named_defaults:
                places.dicts.append((named_defaults, list(named_defaults.values())))
            for cell in getattr(fn, "__closure__", None) or ():
                try:
                    value = cell.cell_contents
                except ValueError:  # a variable that is not bound yet
                    places.steady = False
                    continue
                values.append(value)
                places.cells.append((cell, value))
        functions += [v for v in values if _kind(v) != _DATA]
        module = getattr(fn, "__globals__", {})
        if module.get("__package__") == __package__:
            module = {}  # what this package names is code: grad(f) reads what f reads
        named = []
        for name in _names_in(getattr(fn, "__code__", None)) if module else ():
            value = module.get(name, _ABSENT)
            places.names.append((module, name, value))
            if value is not _ABSENT:
                named.append(value)
        functions += [v for v in named if any(getattr(f, "__globals__", None) is module for f in _functions_of(v))]
        found += values + named
    return found


class OutsideKey:
    """A key that is compared by the identity of values, and keeps them alive: their ids stay their own."""

    __slots__ = ("_hash", "_held", "_key")

    def __init__(self, key: tuple[Any, ...], held: list[Any]) -> None:
        self._key, self._held, self._hash = key, held, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, OutsideKey) and other._key == self._key)


class Outside:
    """The key of what one function reads beside its arguments, at one call after the other."""

    __slots__ = ("_fn", "_last")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._last: tuple[_Places, OutsideKey] | None = (
            None  # replaced as a whole: threads may call one compiled function
        )

    def key(self) -> OutsideKey:
        """What the function reads, in a form that changes when the result may: numbers and texts count by value, arrays by identity
        and buffer (alone or in containers), everything else by identity."""
        last = self._last
        if last is not None and last[0].hold():
            return last[1]
        places = _Places()
        found = _key_of(outside(self._fn, places), places)
        self._last = places, found
        return found


def _key_of(values: list[Any], places: _Places) -> OutsideKey:
    key: list[Any] = []
    held: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _BY_VALUE or isinstance(value, bool | int | float | complex | str | bytes):
            key.append((kind, freeze(value)))
            continue
        held.append(value)
        key.append(id(value))
        if kind is not FunctionType and not isinstance(value, _CODE):
            # Of a container only the arrays count: a list that the function appends a note to at each trace must not bring about
            # the next.
            arrays = arrays_in(value)
            buffers = [x._buf for x in arrays]
            key.append(len(arrays))
            key += map(id, arrays)
            key += map(id, buffers)
            held += arrays
            held += buffers
            if kind is Array:
                places.arrays.append((value, value._buf))
            elif arrays or trees.is_container(value):
                places.containers.append((value, arrays, buffers))
    return OutsideKey(tuple(key), held)


_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None)})


@functools.lru_cache(maxsize=1024)
def _names_in(code: Any) -> tuple[str, ...]:
    """Names that a function, and the functions written inside it, may look up in the module."""
    if code is None:
        return ()
    inner = [n for c in code.co_consts if isinstance(c, type(code)) for n in _names_in(c)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def arrays_in(value: Any) -> list[Array]:
    found = [value] if type(value) is Array else [x for x in trees.flatten(value)[0] if isinstance(x, Array)]
    densify(found)
    return found
