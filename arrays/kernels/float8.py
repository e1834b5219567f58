"""Casts between float8 and other numbers on CUDA, where float8 is kept as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.dtypes import float8_e4m3fn
from .geometry import ceil_div
from .launch import NAMES, contiguous, i64, named, runner

FILE = "float8.cu"
_THREADS, _MOST_BLOCKS = 256, 1 << 16


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for exponent in (4, 5):
        yield FILE, named("widen", exponent)
        for dtype in NAMES:
            yield FILE, named("narrow_to", exponent, dtype)


def widened(x: Any, dtype: np.dtype) -> Any:
    """The numbers of bytes that are of a float8 ``dtype``, as float32."""
    return _cast("widen", (_exponent(dtype),), x, np.float32)


def narrowed(x: Any, dtype: np.dtype) -> Any:
    """Numbers, rounded once to a float8 ``dtype``, as bytes."""
    return _cast("narrow_to", (_exponent(dtype), x.dtype), x, np.uint8)


def _exponent(dtype: np.dtype) -> int:
    return 4 if dtype == float8_e4m3fn else 5


def _cast(kernel: str, arguments: tuple[Any, ...], x: Any, dtype: Any) -> Any:
    r = runner()
    x = contiguous(x)
    y = r.xp.empty(x.shape, dtype)
    if x.size:
        grid = (min(ceil_div(x.size, _THREADS), _MOST_BLOCKS), 1, 1)
        r.launch(FILE, named(kernel, *arguments), grid, (_THREADS, 1, 1), (x, y, i64(x.size)))
    return y
