"""Blocks of whole rows for the fused ops: small enough to stay in cache, with sums along them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..core.dtypes import is_low_precision

# Rows are handled in blocks of about this many elements: operands, result and scratch of a block fit in a second-level
# cache.
BLOCK = 32768
# Above so many elements OpenBLAS updates a matrix with several threads. Those are SciPy's, beside NumPy's own, which
# still spin after a product of matrices: waiting for them takes milliseconds where the update takes microseconds.
ONE_THREAD = 8192


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which sums of numbers of ``dtype`` are made: float32 for those of two bytes and fewer."""
    return np.dtype(np.float32) if is_low_precision(dtype) else dtype


def row_blocks(xp: Any, shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], Iterator[tuple[slice, ...]]]:
    """The shape as (before, along[, after]) ``axis``, and the keys of blocks that hold whole rows along it.

    On a GPU there is one block: there the launch of a kernel is what costs.
    """
    before, n, after = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    size = BLOCK if xp is np else before * n * after
    if after == 1:
        rows = max(1, size // max(n, 1))
        return (before, n), ((slice(i, i + rows),) for i in range(0, before, rows))
    columns = max(1, min(after, size // max(n, 1)))
    rows = max(1, size // max(n * columns, 1))
    return (before, n, after), (
        (slice(i, i + rows), slice(None), slice(j, j + columns))
        for i in range(0, before, rows)
        for j in range(0, after, columns)
    )


def row_sums(xp: Any, x: Any) -> Any:
    """Sums along dimension 1 of a block, kept."""
    if xp is np and x.ndim == 2:
        # A product with ones takes a third of the time of NumPy's sum.
        return (x @ np.ones(x.shape[1], x.dtype))[:, None]
    return x.sum(axis=1, keepdims=True)


def row_dots(xp: Any, x: Any, y: Any) -> Any:
    """Sums of products along dimension 1 of two blocks, kept."""
    if xp is np and x.ndim == 2:
        return np.vecdot(x, y)[:, None]
    return (x * y).sum(axis=1, keepdims=True)


def blocks_and_scratch(
    xp: Any, shape: tuple[int, int], dtype: np.dtype, count: int
) -> tuple[list[tuple[slice, ...]], list[Any]]:
    """Keys of blocks of whole rows of a matrix, and ``count`` arrays in which the largest of them has room."""
    keys = list(row_blocks(xp, shape, 1)[1])
    rows = min(shape[0], keys[0][0].stop) if keys else 0
    return keys, [aligned(xp, (rows, shape[1]), dtype) for _ in range(count)]


def aligned(xp: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """An empty array that starts with a cache line: passes over it take half of the time of those over what NumPy
    allocates."""
    if xp is not np:
        return xp.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def with_zeros(xp: Any, row: Any) -> Any:
    """A vector as :func:`outer` takes it: above a row of zeros."""
    return xp.stack([row, xp.zeros_like(row)])


def outer(xp: Any, column: Any, row: Any, out: Any) -> Any:
    """``out = column * row``, and ``out``. The second column of zeros makes it a product that NumPy leaves to BLAS: a
    tenth of the time."""
    pair = xp.zeros((len(column), 2), column.dtype)
    pair[:, 0] = column
    return xp.matmul(pair, row, out=out)


@functools.cache
def _rank_one_update(char: str) -> Callable[..., Any]:
    from scipy.linalg import blas

    return blas.sger if char == "f" else blas.dger


def add_outer(xp: Any, out: Any, column: Any, row: Any) -> None:
    """``out += column * row`` in place, for a 2-d block: one pass of BLAS for three passes of NumPy's broadcasting."""
    # Small blocks gain nothing, and must not load SciPy.
    rows, width = out.shape
    if xp is np and out.dtype.char in "fd" and out.size >= 4096 and width <= ONE_THREAD:
        update = _rank_one_update(out.dtype.char)
        step = ONE_THREAD // width
        for i in range(0, rows, step):
            # The transposed block has the memory order that BLAS knows, and is written to in place.
            update(1.0, row, column[i : i + step], a=out[i : i + step].T, overwrite_a=True)
    else:
        out += column[:, None] * row
