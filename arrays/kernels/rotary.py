"""``rotary_embedding`` on CUDA: one launch, of rows that lie in any way (heads are put before positions by it)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import ceil_div, joined, vector_length
from .launch import contiguous, i64, named, placed, runner, wide

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


@functools.lru_cache(maxsize=256)
def _geometry(x: Any, cosines: Any, sines: Any, y: Any, multiprocessors: int) -> Any:
    """The grid of a launch, the elements of a vector, and the numbers that the kernel takes; None where no two loops
    go over the rows with tables of their own and no two over those that share them."""
    (shape, strides, x_size, _), (table, table_strides, table_size, _) = x, cosines
    *lead, half = (*shape[:-1], shape[-1] // 2)
    own = [s if n > 1 else 0 for n, s in zip(table, table_strides, strict=True)][:-1]
    own = [0] * (len(lead) - len(own)) + own
    steps = [[s // size for s in at] for at, size in ((own, table_size), (strides[:-1], x_size), (y[1][:-1], x_size))]
    dims = list(zip(lead, *steps, strict=True))
    kinds = [d for d in dims if d[1]], [d for d in dims if not d[1]]
    loops = [joined(*zip(*kind, strict=True)) if kind else [] for kind in kinds]
    if table_strides != sines[1] or max(map(len, loops)) > 2:
        return None
    inner, outer = ([(1, 0, 0, 0)] * (2 - len(loop)) + loop for loop in loops)
    (_, *first), (rows, *second) = inner
    (_, *third), (shared, *fourth) = outer
    count, times = (math.prod(n for n, *_ in loop) for loop in (inner, outer))
    sizes = table_size, x_size, x_size
    ends = [n * size for at in (first, second, third, fourth) for n, size in zip(at, sizes, strict=True)]
    vector = vector_length(half, sizes, [a[3] for a in (x, cosines, sines, y)] + ends)
    blocks = ceil_div(count * (half // vector), _THREADS)
    grid = (blocks, min(times, max(1, ceil_div(16 * multiprocessors, blocks)), _MOST_ROWS), 1)
    numbers = [half, count, rows, times, shared, first[0], second[0]]
    return grid, vector, [*map(i64, numbers + [at[k] for k in (1, 2) for at in (first, second, third, fourth)])]


@for_floats
def rotary_embedding(x: Any, cosines: Any, sines: Any, *, inverse: bool) -> Any:
    """See :data:`meshtape.arrays.nn.rotary.ROTARY_EMBEDDING`."""
    r = runner()
    if cosines.dtype != sines.dtype or cosines.dtype not in (x.dtype, wide(x.dtype)):
        return NotImplemented
    y = r.xp.empty(x.shape, x.dtype)
    if not x.size:
        return y
    x, cosines, sines = (a if a.strides[-1] == a.itemsize else contiguous(a) for a in (x, cosines, sines))
    multiprocessors = r.properties().multiprocessors
    found = _geometry(*map(placed, (x, cosines, sines, y)), multiprocessors)
    if found is None:
        shape = (*x.shape[:-1], cosines.shape[-1])
        x, cosines, sines = map(contiguous, (x, *(r.xp.broadcast_to(t, shape) for t in (cosines, sines))))
        found = _geometry(*map(placed, (x, cosines, sines, y)), multiprocessors)
    grid, vector, numbers = found
    arguments = [*(np.uint64(r.address(a)) for a in (x, cosines, sines, y)), *numbers, np.bool_(inverse)]
    r.launch(FILE, named("rotary", x.dtype, cosines.dtype, vector), grid, (_THREADS, 1, 1), arguments)
    return y
