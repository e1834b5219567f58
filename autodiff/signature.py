"""What a compiled function is traced anew for: its arguments, and what it reads from around it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays.indexsum import IndexSum, densify
from ..arrays.program import freeze

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


def leaf_key(x: Any) -> Any:
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


def outside(fn: Any) -> list[Any]:
    """What the function reads beside its arguments: its closure, its defaults, the arguments of a ``partial``, and the variables of
    the module that it names; and what the functions among them read in turn, if they are of its module or its closure."""
    found: list[Any] = []
    functions, done = [fn], set()
    while functions:
        fn = functions.pop()
        if id(fn) in done:
            continue
        done.add(id(fn))
        if _kind(fn) == _WRAPPER:
            functions += fn.functions()
            continue
        if isinstance(fn, functools.partial):
            values = [fn.func, *fn.args, *fn.keywords.values()]
        else:
            values = [*(getattr(fn, "__defaults__", None) or ()), *(getattr(fn, "__kwdefaults__", None) or {}).values()]
            for cell in getattr(fn, "__closure__", None) or ():
                try:
                    values.append(cell.cell_contents)
                except ValueError:  # a variable that is not bound yet
                    continue
        functions += [v for v in values if _kind(v) != _DATA]
        module = getattr(fn, "__globals__", {})
        if module.get("__package__") == __package__:
            module = {}  # what this package names is code: grad(f) reads what f reads
        named = [module[n] for n in _names_in(getattr(fn, "__code__", None)) if n in module] if module else []
        functions += [v for v in named if any(getattr(f, "__globals__", None) is module for f in _functions_of(v))]
        found += values + named
    return found


class OutsideKey:
    """A key that is compared by the identity of values, and keeps them alive: their ids stay their own."""

    __slots__ = ("_held", "_key")

    def __init__(self, key: tuple[Any, ...], held: list[Any]) -> None:
        self._key, self._held = key, held

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutsideKey) and other._key == self._key


def outside_key(fn: Any) -> OutsideKey:
    """What the function reads beside its arguments, in a form that changes when the result may: numbers and texts count by value,
    arrays by identity and buffer (alone or in containers), everything else by identity."""
    key: list[Any] = []
    held: list[Any] = []
    for value in outside(fn):
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
            key.append(len(arrays))
            for x in arrays:
                held += (x, x._buf)
                key += (id(x), id(x._buf))
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
