"""Reading at an index array on CUDA: rows of any dtype, 16 bytes at a time where memory allows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.index_template import Slot, Span, numpy_key
from .geometry import MAX_GRID, ceil_div
from .launch import contiguous, i64, named, runner

FILE = "gather.cu"
_THREADS, _DEEP = 256, 4
_U8, _U16, _U32, _U64 = (np.dtype(f"u{n}") for n in (1, 2, 4, 8))
_VECTORS = {16: (_U64, 2), 8: (_U64, 1), 4: (_U32, 1), 2: (_U16, 1), 1: (_U8, 1)}
"""Dtype and length of what so many bytes are copied as."""
_WHOLE = (Span(None, None, None), Span(None, None, 1))
_INDICES = (np.dtype(np.int64), np.dtype(np.int32))
"""Dtypes of indices that the kernel reads; others are cast to the first one."""


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for vector in _VECTORS.values():
        for index in _INDICES:
            yield FILE, named("gather_rows", *vector, index)


def _threads(width: int) -> int:
    """Threads of a row of so many vectors: neighbours have neighbouring vectors, and each of a long row has several."""
    least = width if width <= 32 else max(32, ceil_div(width, _DEEP))
    return min(1 << (least - 1).bit_length(), _THREADS)


def take_rows(x: Any, indices: Any, axis: int = 0) -> Any:
    """``take(x, indices, axis)`` of a contiguous array: its slices at the integers of an array, whatever shape this
    has. Indices out of range wrap around."""
    r = runner()
    length, tail = x.shape[axis], x.shape[axis + 1 :]
    out = r.xp.empty((*x.shape[:axis], *indices.shape, *tail), x.dtype)
    if not out.size:
        return out
    if indices.dtype not in _INDICES:
        indices = indices.astype(_INDICES[0])
    size = math.prod(tail) * x.dtype.itemsize
    each = next(n for n in _VECTORS if not any(k % n for k in (size, r.address(x), r.address(out))))
    outer, count, width = math.prod(x.shape[:axis]), indices.size, size // each
    threads = _threads(width)
    grid = (min(ceil_div(outer * count, _THREADS // threads), MAX_GRID), 1, 1)
    kernel = named("gather_rows", *_VECTORS[each], indices.dtype)
    numbers = map(i64, (outer, length, count, width))
    r.launch(FILE, kernel, grid, (threads, _THREADS // threads, 1), (x, contiguous(indices), out, *numbers))
    return out


def getitem(x: Any, *arrays: Any, template: Any) -> Any:
    """See :data:`meshtape.arrays.indexing.indexing.GETITEM`. A key of one index array among whole dimensions is read by
    the kernel, from memory without gaps."""
    at = [i for i, p in enumerate(template) if p not in _WHOLE]
    if len(at) == 1 and isinstance(template[at[0]], Slot) and x.flags.c_contiguous and x.shape[at[0]]:
        (indices,) = arrays
        return take_rows(x, indices, at[0])
    return x[numpy_key(template, arrays)]
