"""Inspection of one object: whether a guard can compare it, and where it keeps its values."""

from __future__ import annotations

import functools
import gc
import operator
import os
import sys
import weakref
from collections.abc import Callable
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np

from .bytecode import is_library, module_of
from .guards import ABSENT

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), range, slice, np.dtype})


def is_plain(value: Any) -> bool:
    """Whether the object is a plain value, without other state."""
    return type(value) in _PLAIN or (
        issubclass(type(value), np.generic | np.dtype | str | bytes | int | float | complex)
        and is_library(module_of(type(value)))
    )


# Modules whose classes read nothing of their objects that could be computed with, or are looked at in a way of their
# own.
_MACHINERY = frozenset(
    (
        *("_io", "_thread", "abc", "asyncio", "builtins", "concurrent", "contextlib", "contextvars", "inspect", "io"),
        *("itertools", "logging", "meshtape", "multiprocessing", "re", "socket", "subprocess"),
        *("typing", "warnings"),
    )
)
_MADE_IN_C = 1 << 8
"""The flag of classes that no Python code has made, or can change."""


@functools.lru_cache(maxsize=4096)
def holds(kind: type) -> tuple[bool, bool]:
    """Whether library bases of a class may read any variable of its objects, and whether C bases may hide values."""
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


class CacheResults:
    """The results in one ``functools.lru_cache``. More may come, but an epoch ends when one is dropped."""

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


_KEPT: weakref.WeakKeyDictionary[Any, CacheResults] = weakref.WeakKeyDictionary()


def kept_by(function: Any) -> CacheResults:
    """The results that this function of ``functools.lru_cache`` keeps."""
    found = _KEPT.get(function)
    if found is None:
        found = _KEPT[function] = CacheResults(function)
    return found


def memory_of(x: Any) -> bytes | None:
    """The bytes of an object that gives out its memory."""
    try:
        return memoryview(x).tobytes()
    except (TypeError, ValueError, BufferError):
        return None


ANSWERS = frozenset({bool, np.bool})
"""Types of an equality that is one answer."""


def is_value(x: Any) -> bool:
    """Whether the object has an equality of its own with one answer, such as a path or a date.

    (Arrays of other libraries compare element by element.)"""
    if type(x).__eq__ is object.__eq__:
        return False
    try:
        hash(x)
        return type(x == x) in ANSWERS
    except Exception:  # such as a ValueError of memory that may be written to
        return False


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def lookup_of(kind: type) -> Callable[[Any, str], Any]:
    """The attribute lookup of these objects without their own Python code."""
    return next(
        vars(c)["__getattribute__"] for c in kind.__mro__ if c.__flags__ & _MADE_IN_C and "__getattribute__" in vars(c)
    )


def variables_of(x: Any) -> Any:
    """The ``__dict__`` of an object; None where it has none."""
    try:
        return lookup_of(type(x))(x, "__dict__")
    except AttributeError:
        return None


# ----- what only code in C knows --------------------------------------------------------------------------------------

# Methods that ask for a state, and one attribute that is a view of it.
_ASKS: dict[str, Callable[[Any], Any]] = {
    "__subclasses__": lambda x: tuple(map(id, type.__subclasses__(x))),
    "cache_info": lambda x: tuple(x.cache_info()),
    "flags": lambda x: x.flags.num,
    "locked": lambda x: x.locked(),
}
_IN_C = GetSetDescriptorType | MemberDescriptorType
# These are dealt with in other ways, or made anew each time.
_NOT_ASKED = frozenset({"__dict__", "__weakref__", "T", "mT", "base", "data", "flat", "real", "imag", "ctypes"})


@functools.lru_cache(maxsize=4096)
def told_by_c(kind: type) -> dict[str, Callable[[Any], Any]]:
    """Attributes of this class that C code computes and that are in no dict, each with a function that reads it."""
    found: dict[str, Callable[[Any], Any]] = {}
    for c in reversed(kind.__mro__):
        for name, member in vars(c).items():
            found.pop(name, None)
            if is_library(module_of(c)) and name in _ASKS:
                found[name] = _ASKS[name]
            elif is_library(module_of(c)) and isinstance(member, _IN_C) and name not in _NOT_ASKED:
                found[name] = member.__get__
    return found


_OF_PROCESS = {
    "sys": "getrecursionlimit getswitchinterval getdefaultencoding getfilesystemencoding gettrace getprofile "
    "get_int_max_str_digits",
    "os": "getcwd getcwdb getpid getppid cpu_count",
    "gc": "isenabled get_threshold get_debug",
    "threading": "active_count get_ident get_native_id",
    "numpy": "geterr get_printoptions",
    "locale": "getlocale",
    "socket": "gethostname getdefaulttimeout",
}
"""Functions without arguments that read a state of the process, by module."""


def state_of_process(fn: Any) -> Callable[[], Any] | None:
    """A function without arguments that reads the process state behind a library function; None where there is none."""
    if fn.__name__ == "getenv":
        return lambda: tuple(os.environ.items())
    if fn.__name__ == "getcontext":
        return lambda: repr(fn())
    homes = [m for m, names in _OF_PROCESS.items() if fn.__name__ in names.split()]
    return fn if any(getattr(sys.modules.get(m), fn.__name__, None) is fn for m in homes) else None


def global_generator(module: Any) -> Any:
    """The generator behind the functions of ``random`` or ``numpy.random``."""
    return module._inst if module.__name__ == "random" else module.mtrand._rand


def slot(get: Callable[[Any], Any], x: Any) -> Any:
    """The value of a descriptor for an object, or ``ABSENT``, also where the object is one that the descriptor
    refuses."""
    try:
        return get(x)
    except (AttributeError, ValueError):
        return ABSENT


_CODE = FunctionType | staticmethod | classmethod | property


def members_of(kind: type) -> tuple[list[type], set[str], set[str], set[str]]:
    """The classes of the user behind a class, the names in them, and of these the plain ones and those that are looked
    up by no name."""
    classes = [c for c in (*kind.__mro__, *type(kind).__mro__) if not is_library(module_of(c))]
    special = {n for c in classes for n, v in vars(c).items() if _is_special(n) and isinstance(v, _CODE)}
    # (Fields are asked of the class: an object may answer for names that it has not.)
    special.update(getattr(kind, "__dataclass_fields__", ()))
    members = {n for c in classes for n in vars(c)}
    return classes, members, {n for n in members if not _is_special(n)}, special


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
