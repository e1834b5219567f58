"""The places of the true elements of a mask on CUDA. How many there are is the only thing that the host waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .geometry import ceil_div
from .launch import contiguous, i64, runner

FILE = "compact.cu"
_THREADS, _EACH = 256, 16


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    yield FILE, "count_true"
    yield FILE, "write_true"


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
