"""The cache key of a compiled function's arguments; :mod:`.captures` has the key of its captures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.devices import CPU
from ...arrays.core.dispatch import Deferred
from ...arrays.core.op import device_beside, is_cuda_elsewhere, state
from ...arrays.core.program import freeze
from ...arrays.core.tree import TreeDef
from ...arrays.indexing.sparse_cotangent import SparseCotangent
from ...arrays.interface.writing import settled
from ...arrays.ops.creation import asarray
from ..captures.objects import ANSWERS, is_plain
from ..captures.tracing import Tracer
from .donation import Gone


def as_array(x: Any, device: Any = None) -> Any:
    """A NumPy array as an Array on this device, one of CuPy as an Array where it is; all else as it is."""
    if issubclass(type(x), np.ndarray) and x.dtype != object:
        return asarray(x, device=device)
    return asarray(x) if device is not None and is_cuda_elsewhere(x) else x


def as_inputs(leaves: Sequence[Any]) -> tuple[list[Any], list[Array]]:
    """The leaves, those that are arrays of any kind as Arrays; and these alone."""
    where = found = None
    if "cupy" in sys.modules:
        found = device_beside(leaves, state)
        if found is None:  # the first array is in host memory: is it a key?
            found = device_beside([x for x in leaves if not _is_key(x)], state)
        where = (state.device if found is state else found) or CPU
    given = [x if type(x) is Array else as_array(x, where) for x in leaves]
    if found is not None and found is not state:
        given = [x.to_device(found) if _is_key(x) else x for x in given]
    return given, [x for x in given if issubclass(type(x), Array)]


def _is_key(x: Any) -> bool:
    """Whether it is a random key, or several, in host memory: they follow the other arguments to their GPU."""
    buf = x._buf if type(x) is Array else None
    return type(buf) is np.ndarray and buf.dtype == np.uint64 and buf.shape[-1:] == (2,)


def is_traced(inputs: Sequence[Array]) -> bool:
    """Whether one of them is traced by another program."""
    return bool([x for x in inputs if type(x._buf) is not np.ndarray and isinstance(x._buf, Tracer)])


def read_too(leaves: Sequence[Any], treedef: TreeDef) -> list[Any]:
    """Arguments whose contents the function may read, such as the object of a method, and the classes of containers."""
    found = [x for x in leaves if not issubclass(type(x), Array) and not is_plain(x)]
    return [*found, *treedef.objects] if treedef.objects else found


def leaf_keys(given: Sequence[Any], numbers: bool = False) -> tuple[Any, ...]:
    """The key of arguments from :func:`as_inputs`; with ``numbers``, without the values of Python numbers."""
    if numbers:
        return tuple([type(x) if type(x) is float or type(x) is int else leaf_key(x) for x in given])
    return tuple([leaf_key(x) for x in given])


def leaf_key(x: Any) -> Any:
    if type(x) is Array:
        buf = x._buf if type(x._buf) is np.ndarray else settled(x)
        if type(buf) is np.ndarray:
            return (buf.shape, buf.dtype)
        if not isinstance(buf, Deferred):
            return (buf.shape, buf.dtype, buf.device.id)
    if issubclass(type(x), Array):  # and no question to the object itself, whose code may raise
        if type(x._buf) is Gone:
            raise x._buf.error()
        return ("array", x.shape, x.dtype, x.device, x.sharding, type(x._buf) is SparseCotangent)
    try:
        key = freeze(x)
        hash(key if type(x) is slice else x)  # slices have a hash since Python 3.12
        comparable = type(x == x) in ANSWERS
    except Exception:
        comparable = False
    return ("static", type(x), key) if comparable else ("object", _ById(x))


class _ById:
    """A static argument without a hash, or with elementwise equality: equal to itself alone, kept alive for its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value
