"""Arrays without gradients: those of other libraries, and those in objects that are no trees."""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import mmap
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import Symbol
from ...arrays.core.errors import GradientError

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, functools.partial)
_NO_HOLDERS = (*_CODE, np.ndarray, str, float)
_MOST_SEEN = 1000
"""Objects that are looked at, for fear of one that leads to all there is."""


def held_in(x: Any, kinds: Any = Array) -> Iterator[Any]:
    """The arrays that can be reached from an object which is no tree, but for those that code holds."""
    held, seen = [] if isinstance(x, _NO_HOLDERS) else [x], {id(x)}
    for one in held:
        for v in gc.get_referents(one):  # whatever holds it: variables, slots, elements, a view of a dict
            if isinstance(v, kinds):
                yield v
            elif id(v) not in seen and gc.is_tracked(v) and not isinstance(v, _NO_HOLDERS) and len(held) < _MOST_SEEN:
                seen.add(id(v))
                held.append(v)


_EXPORTS = ("__array__", "__dlpack__", "__array_interface__", "__cuda_array_interface__", "__buffer__")
_BUFFERS = (array.array, memoryview, mmap.mmap, ctypes.Array)
_NOT_FOREIGN = (Array, Symbol, np.ndarray, np.generic, str, bytes, bytearray)


@functools.lru_cache(maxsize=1024)
def is_foreign(kind: type) -> bool:
    """Whether objects of a class are arrays of another library, which NumPy would convert."""
    if issubclass(kind, _NOT_FOREIGN):
        return False
    return issubclass(kind, _BUFFERS) or any(hasattr(kind, name) for name in _EXPORTS)


def foreign_text(x: Any) -> str:
    """The end of a sentence about such an array, with the remedy."""
    return (
        f"is a {type(x).__module__}.{type(x).__qualname__}, an array of another library, which would get no gradient: "
        "make it an Array with mt.asarray(...)"
    )


def refuse_foreign(who: str, tree: Any, what: str) -> None:
    """Raise where a leaf of a tree is an array of another library."""
    for path, x in trees.flatten_with_path(tree):
        if is_foreign(type(x)):
            raise GradientError(f"[{who}] {f'{trees.path_name(path)} of {what}' if path else what} {foreign_text(x)}")


def hides_arrays(x: Any) -> bool:
    """Whether an object that is no tree has arrays inside."""
    return next(held_in(x), None) is not None


def refuse_hidden(who: str, tree: Any, what: str = "its result") -> None:
    """Raise where a tree has arrays in places where no gradient is looked for."""
    if not [x for x in trees.flatten(tree)[0] if type(x) is not Array and (isinstance(x, Iterator) or hides_arrays(x))]:
        return
    for path, x in trees.flatten_with_path(tree):
        if not isinstance(x, Array) and (isinstance(x, Iterator) or hides_arrays(x)):
            place = f"{trees.path_name(path)} of {what}" if path else what
            raise GradientError(
                f"[{who}] {place} is a {type(x).__name__}, which is no tree: gradients of what is in it would be lost. "
                "Put arrays into tuples, "
                f"lists, dicts or dataclasses, or call mt.tree.register({type(x).__name__}, flatten, unflatten)"
            )
