"""Casts of buffers; those of host memory with one rounding.

ml_dtypes makes its narrow floats of float32, so that float64 and wide integers are rounded twice on the way: a value
just above the middle of two neighbours is first rounded to the middle, then to the even one, which may be the wrong
one. Rounded to odd first, a value keeps on which side of the middle it lies, and the second rounding is that of the
value itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from ..core.op import Op, op_named
from .memory_pool import LARGE, fresh

NARROW = frozenset([bfloat16, float8_e4m3fn, float8_e5m2])
_WIDE = frozenset(["f8", "i4", "i8", "u4", "u8"])
_BLOCK = 8192
_EXACT = 53  # bits of an integer that float64 holds


def cast(a: Any, dtype: np.dtype) -> Any:
    """``a.astype(dtype)``, each element the nearest one (or the even one of two).

    >>> x = np.asarray([1 + 2.0**-8 + 2.0**-30])  # just above the middle of 1 and the next bfloat16
    >>> x.astype(bfloat16), cast(x, bfloat16)
    (array([1], dtype=bfloat16), array([1.00781], dtype=bfloat16))
    """
    if type(a).__module__ == "cupy":
        large = a.size >= Op.large
        out = Op.of_large(op_named("astype"), (a,), {"dtype": dtype}) if large else NotImplemented
        return a.astype(dtype) if out is NotImplemented else out
    if dtype in NARROW and isinstance(a, np.ndarray) and a.dtype.str[1:] in _WIDE:
        if a.size > _BLOCK and a.flags.c_contiguous:
            out = fresh(a.shape, dtype)
            of, to = a.reshape(-1), out.reshape(-1)
            for i in range(0, a.size, _BLOCK):  # its steps stay in cache
                to[i : i + _BLOCK] = _to_odd(of[i : i + _BLOCK])
            return out
        a = _to_odd(a)
    if type(a) is np.ndarray and a.nbytes >= LARGE and a.flags.c_contiguous:  # (fresh pages take longer than the cast)
        out = fresh(a.shape, dtype)
        np.copyto(out, a, casting="unsafe")
        return out
    return a.astype(dtype)


def array_of(values: Any, dtype: np.dtype | None, *, copy: bool = True) -> np.ndarray:
    """``np.array(values, dtype)`` with the same rounding."""
    if dtype not in NARROW:
        return np.array(values, dtype=dtype, copy=copy)
    host = np.array(values, copy=copy)
    return cast(host, dtype) if host.dtype.kind in "biuf" else host.astype(dtype)


def _to_odd(a: np.ndarray) -> np.ndarray:
    """float32 of float64 or integers: those that it holds as they are, and of the two neighbours of any other the one
    that ends in a 1."""
    if a.dtype.kind != "f":
        if a.dtype.itemsize > 4:
            low = a.dtype.type((1 << 64 - _EXACT) - 1)
            # As much as float64 holds, and whether there was more.
            held = (a | ((a & low) != 0) * (low + a.dtype.type(1))) & ~low
            a = np.where((a < 1 << _EXACT) & (a > (-1 << _EXACT if a.dtype.kind == "i" else -1)), a, held)
        a = a.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        near = a.astype(np.float32)
    bits, wide = near.view(np.uint32), near.astype(np.float64)
    bits -= np.abs(wide) > np.abs(a)
    bits |= (wide != a) & (a == a)
    return near
