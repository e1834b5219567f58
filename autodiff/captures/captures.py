"""Captures: the values that a traced function reads beside its arguments, and guards that they are unchanged.

A program holds the values that its code read during the trace. So all values that the code could read are searched for,
by the names that it looks up (:mod:`.bytecode`): variables of enclosing functions and of modules, default arguments,
attributes of objects and of their classes, elements of containers, and the same for all functions found on the way.
Objects of libraries are searched whole, as the names that their methods read are unknown. The search finds too much,
never too little: a value that only C code can see has a guard that never holds. Each place is noted with its value, as
checking the places takes a fraction of the time of a new search.
"""

from __future__ import annotations

import abc
import collections
import functools
import gc
import io
import logging
import operator
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import ItemsView, Iterator, KeysView, Sequence, ValuesView
from contextvars import ContextVar
from decimal import Decimal, getcontext
from enum import Enum
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.errors import TracedValueError
from ...arrays.core.program import freeze
from ...arrays.indexing.sparse_cotangent import densify
from ..tape.function_wrapper import Wrapper
from .bytecode import is_library, module_of, names_in
from .guards import ABSENT, NUMBERS, CaptureKey, Captures, CaptureSearch
from .number_inputs import TracedNumber
from .objects import (
    global_generator,
    holds,
    is_plain,
    is_standard,
    is_value,
    kept_by,
    lookup_of,
    members_of,
    memory_of,
    slot,
    state_of_process,
    told_by_c,
    variables_of,
)
from .tracing import Tracer, memory

LARGEST_COMPARED = 1 << 20
"""Bytes of a NumPy array up to which its elements are compared at every call."""


def captures_of(fn: Any, objects: Sequence[Any] = ()) -> Captures:
    """The captures of a function, and of these ``objects`` among its arguments, now.

    Raises
    ------
    TracedValueError
        For a value that can change unnoticed and is too large to be compared at every call.
    """
    return _Walk(getattr(fn, "__name__", type(fn).__name__)).search(fn, objects)


_VALUES = (int, float, complex, str, bytes)
_SKIPPED = types.BuiltinFunctionType | types.GetSetDescriptorType | np.random.Generator | np.random.RandomState
# Objects that call others, and the attributes where these are.
_PARTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (types.MethodType, ("__func__", "__self__")),
    (functools.partial | functools.partialmethod, ("func", "args", "keywords")),
    (property, ("fget", "fset", "fdel")),
    (staticmethod | classmethod, ("__func__",)),
    (functools.cached_property, ("func",)),
)
_CLASSES_ARE_ASKED = frozenset({"isinstance", "issubclass", "__match_args__"})
_IN_C = frozenset({"builtin_function_or_method", "cython_function_or_method", "fused_cython_function"})
_DISPATCHER = functools.singledispatch(len).__code__  # type: ignore[attr-defined]
_MOST_WALKED = 2000
"""The most objects of libraries that are searched; one that holds more is not compared."""


class _Walk(CaptureSearch):
    """One search for captures. Objects are searched again when new code looks up further names."""

    def __init__(self, title: str, behind: bool = False) -> None:
        super().__init__(title)
        self.behind = behind  # whether code may read, by `super()`, attributes that others hide
        self.names_super = False
        self.walked = 0
        self.seen: dict[int, int] = {}  # in which order objects were come to, by id
        self.names: set[str] = set()
        self.unsure: set[str] = set()  # those that code may ask for where they are not
        self.anything = False
        self.members = functools.cache(members_of)
        # Objects, classes and modules, with the names that were looked up.
        self.owners: list[tuple[Any, str, set[str]]] = []

    def search(self, fn: Any, objects: Sequence[Any]) -> Captures:
        self.visit(fn, self.title)
        for i, x in enumerate(objects):
            place = "an argument" if i == 0 else f"argument object {i}"
            self.visit(x, f"{place} ({type(x).__name__})")
        while True:
            while self.queue:
                value, path = self.queue.pop()
                try:
                    self._one(value, path)
                except (TracedValueError, RecursionError):
                    raise
                except Exception as e:  # of the object's own code
                    raise TracedValueError(
                        f"[compile] {self.title} can read {path}, a {type(value).__name__}, which cannot be looked at "
                        f"({type(e).__name__}: {e}): let its __getattr__ and the like raise AttributeError for what "
                        "they do not know, or pass what is read as an argument"
                    ) from e
            if self.names_super and not self.behind:  # which changes what every attribute may stand for
                return _Walk(self.title, behind=True).search(fn, objects)
            before = len(self.names), self.anything
            self.unsure = {name for name in self.names if name.startswith("?")}
            for owner in list(self.owners):
                self._attributes(*owner)
            if not self.queue and before == (len(self.names), self.anything):
                break
        self.found.key = CaptureKey(tuple(self.key), self.held)
        return self.found

    # ----- values -----------------------------------------------------------------------------------------------------

    def _one(self, value: Any, path: str) -> None:
        if type(value) is TracedNumber:
            value = value._read()
        kind = type(value)
        self.found.paths.append((len(self.key), path))
        if is_plain(value):
            self.key.append((kind, freeze(value)))
            return
        if kind is tuple and all(type(v) in NUMBERS for v in value):
            self.key.append(freeze(value))
            return
        if kind in weakref.ProxyTypes:  # which says of itself whatever the object says
            self.visit(value.__dir__.__self__, path)
            return
        if value is ABSENT:
            self.key.append(ABSENT)
            return
        # An object with an equality of its own is compared by its readable values, any other by identity.
        structural = kind.__eq__ is not object.__eq__ and not isinstance(value, Array | np.ndarray | type)
        self.key.append(kind if structural else id(value))
        # Their equality is that of no value to be read.
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            loose = isinstance(value.__self__, types.ModuleType | type | None)  # others are made anew at each look-up
            self.key.append(id(value) if loose else value.__name__)
        if isinstance(value, _VALUES):  # of a class of the user's
            self.key.append(next(base.__repr__(value) for base in _VALUES if isinstance(value, base)))
        if id(value) in self.seen:
            self.key.append(self.seen[id(value)])  # two that are equal, or one twice
            return
        self.seen[id(value)] = len(self.seen)
        self.held.append(value)
        if value is Decimal or kind is Decimal:
            self._library_function(getcontext)  # which the arithmetic reads
        if kind is Array:
            self._array(value, path)
        elif isinstance(value, np.ndarray):
            self._numpy(value, path)
            if kind is not np.ndarray:
                self._object(value, path)
        elif isinstance(value, Wrapper):
            for f in value.functions():
                self.visit(f, path)
            self._same_contents(value.functions)
        elif kind is types.FunctionType:
            self._function(value, path)
        elif (parts := next((names for kinds, names in _PARTS if isinstance(value, kinds)), None)) is not None:
            for name in parts:
                self.visit(getattr(value, name), path)
        elif isinstance(value, types.ModuleType):
            self.owners.append((value, path, set()))
            if value.__name__ in ("random", "numpy.random"):
                self.found.chance.append(global_generator(value))
        elif type(value).__name__ in _IN_C and not is_library(value.__module__ or "builtins"):
            self._unseen()  # compiled code of the user's
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType) and not isinstance(
            value.__self__, types.ModuleType | type | None
        ):
            self.visit(value.__self__, path)  # such as the `get` of a dict
        elif isinstance(value, type):
            self.owners.append((value, path, set()))
        elif isinstance(value, np.ufunc):
            for f in gc.get_referents(value):  # what `np.frompyfunc` was given
                if callable(f):
                    self.visit(f, path)
        elif isinstance(value, np.flatiter):
            self.visit(value.base, path)
        elif isinstance(value, KeysView | ValuesView | ItemsView) and hasattr(value, "mapping"):
            self._mapping(value.mapping, path)
        elif isinstance(value, io.IOBase):
            self._unseen()
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            self.found.chance.append(value)
        elif isinstance(value, Iterator) and is_library(module_of(kind)):
            self._unseen()  # what is taken from it is another thing each time
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            names = value.__reduce__()[1]
            self.names.update(n for name in names if isinstance(name, str) for n in name.split("."))
            self.key.append(repr(value))
        elif isinstance(value, type(np.sum)):  # NumPy's functions that ask their arguments first
            self.visit(getattr(value, "__wrapped__", None), path)
        elif isinstance(value, types.BuiltinFunctionType):
            self._library_function(value)
        elif isinstance(value, threading.Thread):  # of which names alone are read: it holds whatever it runs
            self.owners.append((value, path, set()))
        elif not isinstance(value, _SKIPPED):
            self._object(value, path)

    def _library_function(self, fn: Any) -> None:
        """A function of a library: its identity, and the state of the process that it tells."""
        self.found.named.add(fn.__name__)
        if fn is threading.current_thread:
            self._value(fn, "the thread")
        if (look := state_of_process(fn)) is not None:
            self._state(look)

    def _array(self, x: Array, path: str) -> None:
        densify([x])
        buffer = x._buf
        if isinstance(buffer, Tracer):
            self.found.traced.append((buffer.builder, path))
        self.held.append(buffer)
        self.key.append(id(buffer))
        self.found.arrays.append((x, buffer))
        self.found.known |= {id(x), id(buffer)}
        if isinstance(buffer, np.ndarray):
            self.found.known.add(id(memory(buffer)))

    def _numpy(self, x: np.ndarray, path: str) -> None:
        self.found.known |= {id(x), id(memory(x))}
        self.owners.append((x, path, set()))
        if x.dtype == object:
            self._sequence(x, path, x.ravel().tolist)
            return
        if x.nbytes > LARGEST_COMPARED:
            base: Any = x
            while isinstance(base, np.ndarray) and not base.flags.writeable:
                base = base.base
            if base is not None and not isinstance(base, bytes):
                raise TracedValueError(
                    f"[compile] {self.title} can read {path}, a NumPy array of {x.nbytes:,} bytes, which may be "
                    "written to without anybody noticing: pass it as an argument, hold it as mt.asarray(...), or "
                    "declare it constant with .setflags(write=False)"
                )
            return

        def look() -> tuple[Any, ...]:
            return x.shape, x.dtype, x.tobytes()

        content = look()
        self.key.append(content)
        self.found.others.append((look, content))

    def _function(self, fn: types.FunctionType, path: str) -> None:
        code, defaults, named = fn.__code__, fn.__defaults__, fn.__kwdefaults__
        if code is _DISPATCHER:  # which looks at types, and keeps what it found in a table of its own
            self.found.named.add("type")
            self._state(abc.get_cache_token)
            self._mapping(fn.registry, path)  # type: ignore[attr-defined]
            return
        self.found.functions.append((fn, code, defaults, named))
        self.held.append(code)
        self.key.append(id(code))
        module = fn.__globals__
        ours = is_library(module.get("__name__", ""))
        names = names_in(code)
        optional = code.co_varnames[code.co_argcount - len(defaults or ()) :]
        for name, value in zip(optional, defaults or (), strict=False):
            self.visit(value, f"the default of {name} of {fn.__name__}")
        if named:
            self.visit(named, f"the defaults of {fn.__name__}")
        if ours and not module.get("__name__", "").startswith("meshtape."):
            self._library_function(fn)
        elif not ours:
            self.owners.append((fn, path, set()))
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that is not bound yet
                value = ABSENT
            self.found.cells.append((cell, value))
            self.visit(value, name)
        if ours:
            return
        if not module.get("__name__", "").startswith("meshtape."):  # which draws from nothing that is not an argument
            self.found.named |= names.variables | names.attributes
        self.names |= names.attributes
        if not _CLASSES_ARE_ASKED.isdisjoint(names.variables | names.attributes):
            self._state(abc.get_cache_token)  # which classes are registered with an abstract one, only code in C knows
        self.anything |= names.anything
        self.names_super |= "super" in names.variables
        for name in names.variables:
            self._item(module, name, name)
            if name not in module:
                self._builtin(name)
        if names.any_variable:
            self._data(module, fn.__module__)
        for name in names.modules:
            for m in (name, *(f"{name}.{n}" for n in names.attributes)):
                if m in sys.modules or m is name:
                    self._item(sys.modules, m, m)

    # ----- containers and objects -------------------------------------------------------------------------------------

    def _kept(self, function: Any, path: str) -> None:
        """The results in a ``functools.lru_cache``, which the function returns again without a call."""
        results = kept_by(function)
        epoch = results()
        self.key.append((id(function), epoch))
        self.found.others.append((results, epoch))
        for x in (*gc.get_referents(function), *results.seen):
            if isinstance(x, Array | np.ndarray | list | tuple) or (type(x) is dict and x is not results.results):
                self.visit(x, f"what {path} keeps by lru_cache")

    def _object(self, x: Any, path: str) -> None:
        kind = type(x)
        if isinstance(x, list | tuple | collections.deque):
            self._sequence(x, path)
        elif isinstance(x, dict | types.MappingProxyType):
            self._mapping(x, path)
            if isinstance(x, collections.defaultdict):
                self._value(lambda: x.default_factory, path)
        elif isinstance(x, set | frozenset):
            for i, v in enumerate(self._same_contents(functools.partial(list, x))):
                self.visit(v, f"{path}: element {i}")
        elif isinstance(x, weakref.ref):
            self._value(x, path)
        elif isinstance(x, ContextVar):
            self._value(functools.partial(x.get, None), path)
        elif kind is functools._lru_cache_wrapper:
            self.visit(x.__wrapped__, path)
            self._kept(x, path)
        elif not isinstance(x, np.ndarray) and (content := memory_of(x)) is not None:
            self.key.append(content)
            self.found.others.append((functools.partial(memory_of, x), content))
            if content and hasattr(x, "contents"):  # a pointer of ctypes
                self._value(lambda: memory_of(x.contents) if x else None, path)
        elif isinstance(x, queue.SimpleQueue):
            self._state(x.qsize)
        variables = variables_of(x)
        library = is_library(module_of(kind))
        if library and kind is not tuple and is_value(x):
            self.key.append(x)
            if is_standard(module_of(kind)):
                self.key.append(repr(x))  # Decimal("1") and Decimal("1.0") are equal, and so is an hour in two zones
                return
        if module_of(kind).startswith("meshtape.") and library:
            # Of ours what calls functions of the user's, such as an optimizer with its schedule.
            for name, v in (variables or {}).items():
                if isinstance(v, types.FunctionType | types.MethodType | functools.partial):
                    self.visit(v, f"{path}.{name}")
            return
        read_by_name, hidden = holds(kind)
        if read_by_name:
            self._library(x, variables, path)
        if hidden or self.walked > _MOST_WALKED:
            self._unseen()
        self.found.objects.append((x, kind, variables, lookup_of(kind)))
        if not library:
            self.found.classes[kind] = kind.__mro__
        self.owners.append((x, path, set()))

    def _library(self, x: Any, variables: Any, path: str) -> None:
        """All variables of an object with methods of a library, which may read any of them."""
        self.walked += 1
        if self.walked > _MOST_WALKED:
            return
        if isinstance(variables, dict):
            self._mapping(variables, path)
        for c in type(x).__mro__:
            for name, member in vars(c).items():
                if isinstance(member, types.MemberDescriptorType):
                    self._value(functools.partial(slot, member.__get__, x), f"{path}.{name}")

    # ----- attributes -------------------------------------------------------------------------------------------------

    def _attributes(self, x: Any, path: str, done: set[str]) -> None:
        """The attributes of an object, class or module that some code looks up, except those already ``done``."""
        names = self.names - done
        if isinstance(x, types.ModuleType):
            if self.anything and "**" not in done and not is_library(x.__name__):
                done.add("**")
                self._data(vars(x), path)
            done |= names
            self._module(x, path, sorted(names))
            return
        kind = x if isinstance(x, type) else type(x)
        # The class of a class stands behind it: properties and calls of a class are there.
        classes, members, plain, special = self.members(kind)
        variables = None if isinstance(x, type) else variables_of(x)
        if not done:
            # Operators, calls, indices and the like are looked up by no name; nor are the fields of trees.
            names |= special
        if self.anything and not isinstance(x, Enum):
            names |= plain - done
            if isinstance(variables, dict) and "**" not in done:
                names.add("**")
                self._mapping(variables, path)
        done |= names
        present = names & members
        if isinstance(variables, dict):
            present |= names & variables.keys()
            asked = names if "__getattr__" in members else {n[1:] for n in names & self.unsure}
            if absent := asked.difference(members, variables):
                self.found.others += [
                    (functools.partial(absent.isdisjoint, d), True) for d in (variables, *map(vars, classes))
                ]
        for name in sorted(present):
            self._attribute(x, name, f"{path}.{name}", variables, classes)
        if isinstance(x, logging.Logger) and names & {"isEnabledFor", "getEffectiveLevel"}:
            self._state(lambda: (x.getEffectiveLevel(), x.manager.disable, x.disabled))
        told = told_by_c(type(x))
        for name in sorted(names & told.keys()):
            look = functools.partial(slot, told[name], x)
            if is_plain(value := look()) or type(value) is tuple:
                self._state(look)
            elif type(value) is dict:
                self._value(look, f"{path}.{name}")

    def _attribute(self, x: Any, name: str, path: str, variables: Any, classes: Sequence[type]) -> None:
        homes = [i for i, c in enumerate(classes) if name in vars(c)]
        if isinstance(variables, dict):
            self._item(variables, name, path)
            if name in variables and not (
                homes and (self.behind or hasattr(type(vars(classes[homes[0]])[name]), "__set__"))
            ):
                return
        for c in classes[: homes[-1 if self.behind else 0] + 1]:  # one that comes to stand before it hides it
            member = vars(c).get(name, ABSENT)
            if member is ABSENT:
                self.found.items.append((vars(c).get, name, ABSENT))
            elif not isinstance(member, types.MemberDescriptorType):
                self._item(vars(c), name, path)
                if name == "__match_args__":
                    self.names.update(n for n in member if isinstance(n, str))
            elif not isinstance(x, type):
                self._value(functools.partial(slot, member.__get__, x), path)

    def _module(self, x: types.ModuleType, path: str, names: Sequence[str]) -> None:
        variables = vars(x)
        library = is_library(x.__name__)
        for name in names:
            value = variables.get(name, ABSENT)
            if value is ABSENT and not library and f"?{name}" in self.names:
                self.found.items.append((variables.get, name, value))
            if value is ABSENT and not library and "__getattr__" in variables:
                self._item(variables, "__getattr__", path)  # PEP 562
            if value is ABSENT or value is sys.modules:
                continue
            if library and isinstance(value, types.ModuleType):
                if value.__name__ == "numpy.random":
                    self.found.chance.append(global_generator(value))
                continue
            self.found.items.append((variables.get, name, value))
            if library and (callable(value) or module_of(type(value)).startswith("meshtape.")):
                self.held.append(value)
                self.key.append(id(value))
                function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
                if function and not x.__name__.startswith("meshtape"):
                    self._library_function(value)
                elif value is Decimal:
                    self._library_function(getcontext)
            else:
                self.visit(value, f"{path}.{name}")
