"""Running sums and products on CUDA, and the places of the true elements of a mask. How many of these there are is the
only thing that the host waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from .geometry import MAX_GRID, ceil_div, vector_length
from .launch import NAMES, contiguous, i64, named, runner

FILE = "scans.cu"
_THREADS, _EACH = 256, 16
_SHORT, _LONG = 1024, 1 << 16
"""Rows up to which a warp has one, and beyond which few rows are left to CuPy, which shares one among blocks."""


def _result(dtype: np.dtype) -> np.dtype:
    return dtype if dtype in KERNEL_FLOATS else np.dtype(np.uint64 if dtype.kind == "u" else np.int64)


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    yield FILE, "count_true"
    yield FILE, "write_true"
    for op in ("Sum", "Multiply"):
        for d in NAMES:
            types, vector = (op, d, _result(d)), 16 // d.itemsize
            for threads in (32, _THREADS):
                yield FILE, named("running_rows", *types, threads, min(8, vector))
            for vector in (1, 4 // d.itemsize) if d.itemsize < 4 else (1,):
                yield FILE, named("running_columns", *types, vector)


def running(op: str, x: Any, axis: int) -> Any:
    """The reduction ``op`` (``"Sum"``, ``"Multiply"``) of each element and those before it along a dimension, of floats
    rounded once, of integers in 64 bits; NotImplemented for dtypes that kernels lack, and for few long rows."""
    r = runner()
    if x.dtype not in NAMES:
        return NotImplemented
    rows, length, width = (math.prod(n) for n in (x.shape[:axis], x.shape[axis : axis + 1], x.shape[axis + 1 :]))
    if width > 1 and (width < 32 or rows > 65535):  # too few for a warp side by side
        out = running(op, r.xp.moveaxis(x, axis, -1), x.ndim - 1)
        return out if out is NotImplemented else r.xp.moveaxis(out, -1, axis)
    if width == 1 and length > _LONG and rows < 2 * r.properties().multiprocessors:
        return NotImplemented
    x = contiguous(x)
    out = r.xp.empty(x.shape, _result(x.dtype))
    if not x.size:
        return out
    types, sizes = (op, x.dtype, out.dtype), (x.itemsize, out.itemsize)
    if width > 1:
        vector = max(1, min(4 // x.itemsize, vector_length(width, sizes, map(r.address, (x, out)))))
        grid = ceil_div(width, 32 * vector), rows, 1
        kernel, arguments = named("running_columns", *types, vector), (i64(length), i64(width))
        r.launch(FILE, kernel, grid, (32, 8, 1), (x, out, *arguments))
        return out
    vector, threads = min(8, 16 // x.itemsize), 32 if length <= _SHORT else _THREADS
    vectors = vector_length(length, sizes, map(r.address, (x, out))) >= vector
    grid, block = (min(ceil_div(rows * threads, _THREADS), MAX_GRID), 1, 1), (threads, _THREADS // threads, 1)
    arguments = i64(rows), i64(length), np.bool_(vectors)
    r.launch(FILE, named("running_rows", *types, threads, vector), grid, block, (x, out, *arguments))
    return out


def true_places(mask: Any) -> tuple[Any, ...]:
    """The indices of the true elements, one int64 array a dimension, in C order: ``nonzero`` of a boolean array."""
    r = runner()
    flat = contiguous(mask).reshape(-1)
    size = flat.shape[0]
    if not size:
        places = r.xp.empty(0, np.int64)
    else:
        grid, block = (ceil_div(size, _THREADS * _EACH), 1, 1), (_THREADS, 1, 1)
        counts = r.xp.empty(grid[0], np.int64)
        r.launch(FILE, "count_true", grid, block, (flat, counts, i64(size)))
        ends = contiguous(r.xp.cumsum(counts))
        places = r.xp.empty(int(ends[-1]), np.int64)
        if places.shape[0]:
            r.launch(FILE, "write_true", grid, block, (flat, ends, places, i64(size)))
    if mask.ndim == 1:
        return (places,)
    out = []
    for n in reversed(mask.shape):
        out.append(places % n if n else places)
        places = places // n if n else places
    return tuple(reversed(out))
