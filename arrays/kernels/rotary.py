"""``rotary_embedding`` on CUDA: one launch, of rows that lie in any way (heads are put before positions by it)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import ceil_div, vector_length
from .launch import contiguous, i64, named, runner, wide

FILE = "rotary.cu"
_THREADS = 256
_MOST_ROWS = 65535
"""Blocks along the second coordinate."""


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d in KERNEL_FLOATS:
        for table in dict.fromkeys((d, wide(d))):
            for vector in (1, 16 // d.itemsize):
                yield FILE, named("rotary", d, table, vector)


def joined(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Length and strides of each dimension, those made one that no array tells apart.

    >>> joined((2, 3, 1, 4), (12, 4, 4, 1), (0, 0, 0, 0))
    [(24, 1, 0)]
    >>> joined((2, 3), (1, 2))
    [(2, 1), (3, 2)]
    """
    out: list[tuple[int, ...]] = []
    for n, *own in zip(shape, *strides, strict=True):
        if out and all(a == n * b for a, b in zip(out[-1][1:], own, strict=True)):
            out[-1] = (out[-1][0] * n, *own)
        elif n != 1:
            out.append((n, *own))
    return out


def _loops(x: Any, y: Any, table: Any) -> list[list[tuple[int, ...]]]:
    """Dimensions, of rows with tables of their own and of rows that share them: length, and steps in each array."""
    steps = [[s // a.itemsize for s in a.strides[:-1]] for a in (table, x, y)]
    dims = list(zip(x.shape[:-1], *steps, strict=True))
    kinds = ([d for d in dims if d[1]], [d for d in dims if not d[1]])
    return [joined(*zip(*kind, strict=True)) if kind else [] for kind in kinds]


@for_floats
def rotary_embedding(x: Any, cosines: Any, sines: Any, *, inverse: bool) -> Any:
    """See :data:`meshtape.arrays.nn.rotary.ROTARY_EMBEDDING`."""
    r = runner()
    if cosines.dtype != sines.dtype or cosines.dtype not in (x.dtype, wide(x.dtype)):
        return NotImplemented
    y = r.xp.empty(x.shape, x.dtype)
    if not x.size:
        return y
    half = x.shape[-1] // 2
    x, *tables = (a if a.strides[-1] == a.itemsize else contiguous(a) for a in (x, cosines, sines))
    cosines, sines = (r.xp.broadcast_to(t, (*x.shape[:-1], half)) for t in tables)
    loops = _loops(x, y, cosines)
    if cosines.strides != sines.strides or max(map(len, loops)) > 2:
        x, cosines, sines = map(contiguous, (x, cosines, sines))
        loops = _loops(x, y, cosines)
    inner, outer = ([(1, 0, 0, 0)] * (2 - len(loop)) + loop for loop in loops)
    (_, *first), (rows, *second) = inner
    (_, *third), (shared, *fourth) = outer
    count, times = (math.prod(n for n, *_ in loop) for loop in (inner, outer))
    sizes = (cosines.itemsize, x.itemsize, y.itemsize)
    steps = [n * size for at in (first, second, third, fourth) for n, size in zip(at, sizes, strict=True)]
    addresses = [r.address(a) for a in (x, cosines, sines, y)]
    vector = vector_length(half, sizes, [*addresses, *steps])
    blocks = ceil_div(count * (half // vector), _THREADS)
    resident = 8 * r.properties().multiprocessors
    grid = (blocks, min(times, max(1, ceil_div(2 * resident, blocks)), _MOST_ROWS), 1)
    numbers = [half, count, rows, times, shared, first[0], second[0]]
    numbers += [at[k] for k in (1, 2) for at in (first, second, third, fourth)]
    arguments = (*map(np.uint64, addresses), *map(i64, numbers), np.bool_(inverse))
    r.launch(FILE, named("rotary", x.dtype, cosines.dtype, vector), grid, (_THREADS, 1, 1), arguments)
    return y
