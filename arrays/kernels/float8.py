"""Casts between float8 and other numbers on CUDA, where float8 is kept as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS, float8_e4m3fn
from .geometry import ceil_div
from .launch import NAMES, contiguous, i64, named, runner

FILE = "float8.cu"
_THREADS, _MOST_BLOCKS, _BLOCKS_OF_A_REDUCTION = 256, 1 << 16, 1 << 10
SCALED = tuple(d for d in KERNEL_FLOATS if d.itemsize < 8)


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for exponent in (4, 5):
        yield FILE, named("widen", exponent)
        yield FILE, named("scale_of", exponent)
        for dtype in NAMES:
            yield FILE, named("narrow_to", exponent, dtype)
        for dtype in SCALED:
            yield FILE, named("narrow_scaled", exponent, dtype)
    for dtype in SCALED:
        yield FILE, named("magnitudes", dtype)


def widened(x: Any, dtype: np.dtype) -> Any:
    """The numbers of bytes that are of a float8 ``dtype``, as float32."""
    return _cast("widen", (_exponent(dtype),), x, np.float32)


def narrowed(x: Any, dtype: np.dtype) -> Any:
    """Numbers, rounded once to a float8 ``dtype``, as bytes."""
    return _cast("narrow_to", (_exponent(dtype), x.dtype), x, np.uint8)


def scaled(x: Any, scale: Any, dtype: np.dtype) -> Any:
    """Numbers divided by one on the device, and rounded to a float8 ``dtype``, as bytes. What is finite stays so."""
    return _cast("narrow_scaled", (_exponent(dtype), x.dtype), x, np.uint8, scale)


def scale(x: Any, dtype: np.dtype) -> Any:
    """The smallest power of two that brings numbers into the range of a float8 ``dtype``, float32 on the device."""
    r = runner()
    x = contiguous(x)
    blocks = min(ceil_div(x.size, 16 * _THREADS), _BLOCKS_OF_A_REDUCTION) or 1
    most, found = r.xp.empty(blocks, np.float32), r.xp.empty((), np.float32)
    r.launch(FILE, named("magnitudes", x.dtype), (blocks, 1, 1), (_THREADS, 1, 1), (x, most, i64(x.size)))
    r.launch(FILE, named("scale_of", _exponent(dtype)), (1, 1, 1), (_THREADS, 1, 1), (most, found, i64(blocks)))
    return found


def _exponent(dtype: np.dtype) -> int:
    return 4 if dtype == float8_e4m3fn else 5


def _cast(kernel: str, arguments: tuple[Any, ...], x: Any, dtype: Any, *operands: Any) -> Any:
    r = runner()
    x = contiguous(x)
    y = r.xp.empty(x.shape, dtype)
    if x.size:
        grid = (min(ceil_div(x.size, _THREADS), _MOST_BLOCKS), 1, 1)
        r.launch(FILE, named(kernel, *arguments), grid, (_THREADS, 1, 1), (x, *operands, y, i64(x.size)))
    return y
