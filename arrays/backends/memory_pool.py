"""A memory pool for large arrays.

A program makes arrays of the same few sizes in every step. The system clears and maps fresh memory page by page at the
first write, which costs up to three times the work on it. Its allocator also returns large free blocks, and those on
top of the heap, at once. So the results of compiled programs and of kernels, and the blocks of ranks, take their memory
from a pool of this process. Memory returns to the pool by itself when the last array on it is gone, so no array is
overwritten while somebody can see it.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SMALLEST = 64 << 10
"""Bytes below which arrays come from NumPy's own cache."""

LINE = 64
"""Bytes of a line of a cache: memory starts at one, as a vector of processors that lies in two lines takes two
reads."""


class Pool:
    """Buffers by size. ``limit`` bounds the bytes of free buffers; the oldest are dropped first.

    Examples
    --------
    >>> import numpy as np
    >>> pool = Pool(limit=1 << 20)
    >>> a = pool.empty((256, 256), np.dtype(np.float64))
    >>> address, view = a.ctypes.data, a[3:]
    >>> del a
    >>> pool.empty((512, 256), np.dtype(np.float32)).ctypes.data == address  # the view still needs it
    False
    >>> del view
    >>> pool.empty((512, 256), np.dtype(np.float32)).ctypes.data == address
    True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: OrderedDict[int, list[tuple[np.ndarray, int]]] = OrderedDict()  # with where the first line starts
        self._kept = 0
        self._lent: dict[int, tuple[Any, tuple[np.ndarray, int]]] = {}
        self._lock = threading.RLock()  # a collection may end an array's life in the middle of a call

    @property
    def kept(self) -> int:
        """Bytes of free memory in the pool."""
        return self._kept

    @property
    def lent(self) -> int:
        """Bytes in use."""
        with self._lock:
            return sum(raw.nbytes - LINE for _, (raw, _) in self._lent.values())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An uninitialized array."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size < SMALLEST or self.limit == 0:
            return np.empty(shape, dtype)
        size = _rounded(size)
        with self._lock:
            stack = self._free.get(size)
            if stack:
                raw, start = stack.pop()
                self._kept -= size
                if not stack:
                    del self._free[size]
            else:
                try:
                    raw = np.empty(size + LINE, np.uint8)
                except MemoryError:  # of which some may lie here, in other sizes
                    self.clear()
                    raw = np.empty(size + LINE, np.uint8)
                start = -raw.ctypes.data % LINE
            # All arrays on this memory hold this object; it dies with the last one. (NumPy would bypass a memoryview.)
            memory = (ctypes.c_char * size).from_buffer(raw, start)
            key = id(memory)
            self._lent[key] = weakref.ref(memory, lambda _: self._back(key)), (raw, start)
        return np.ndarray(shape, dtype, buffer=memory)

    def lends(self, memory: Any) -> bool:
        """Whether this is memory of the pool: the base of an array on it, but not of the array's views."""
        lent = self._lent.get(id(memory))
        return lent is not None and lent[0]() is memory

    def _back(self, key: int) -> None:
        with self._lock:
            _, piece = self._lent.pop(key)
            size = piece[0].nbytes - LINE
            self._free.setdefault(size, []).append(piece)
            self._free.move_to_end(size)
            self._kept += size
            while self._kept > self.limit:
                size, stack = next(iter(self._free.items()))
                stack.pop()
                self._kept -= size
                if not stack:
                    del self._free[size]

    def clear(self) -> None:
        """Return free memory to the system."""
        with self._lock:
            self._free.clear()
            self._kept = 0


def _rounded(size: int) -> int:
    """Sizes in steps of an eighth of a power of two: blocks of nearly one size share memory."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


POOL = Pool(limit=1 << 30)
"""Of this process. Workers set its limit from ``meshtape.pool`` in Dask's configuration."""

LARGE = 1 << 18
"""Bytes from which results outside of workers come from the pool."""


def copied(a: np.ndarray) -> np.ndarray:
    """A copy without gaps."""
    if a.nbytes < LARGE:
        return a.copy()
    out = fresh(a.shape, a.dtype)
    out[...] = a
    return out


def is_sole(a: np.ndarray) -> bool:
    """Whether the array is writeable and has its memory alone, its own or lent: only holders of this array see it."""
    return a.flags.writeable and (a.base is None or POOL.lends(a.base))


def fresh(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory for a result outside of workers, where the system's allocator does keep blocks of moderate size."""
    return (POOL.empty if math.prod(shape) * dtype.itemsize >= LARGE else np.empty)(shape, dtype)


def room(
    values: Mapping[int, np.ndarray], dying: Sequence[int], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray | None:
    """Memory for a result: that of one of the ``dying`` values, or some of the pool's. None for a small result."""
    for v in dying:
        if is_free(values, v):
            a = values[v]
            if a.shape == shape and a.dtype == dtype and a.flags.c_contiguous:
                return a
    return POOL.empty(shape, dtype) if math.prod(shape) * dtype.itemsize >= SMALLEST else None


def is_free(values: Mapping[int, np.ndarray] | list[Any], v: int) -> bool:
    """Whether nobody but this table sees the block, or a view of it."""
    if type(values[v]) is not np.ndarray or _references(values, v) != _ALONE:
        return False
    return is_sole(values[v])


def _references(values: Mapping[int, np.ndarray] | list[Any], v: int) -> int:
    a = values[v]
    return sys.getrefcount(a)


_ALONE = _references({0: np.empty(0)}, 0)
"""The reference count of an array that only a table or list of values holds; it depends on the version of Python."""
