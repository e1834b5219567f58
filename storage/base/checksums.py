"""crc32c of buffers without copies, and the checksum of a concatenation from those of its parts.

>>> a, b = b"mesh", b"tape"
>>> combine(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)
True
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

CASTAGNOLI, ZIP = 0x82F63B78, 0xEDB88320  # polynomials of crc32c and of CRC32, bits reversed
_LONG = 32 << 10  # bytes for which it pays to let other threads run meanwhile


@cache
def _extend() -> Callable[[int, bytes], int]:
    import google_crc32c  # loads a C library; wanted only where bytes move

    return google_crc32c.extend


@cache
def _native() -> Callable[[int, int, int], int] | None:
    """The C function behind google_crc32c, or None where its library hides it.

    Called through ctypes it runs without the interpreter's lock, so threads that read also check; the package's own
    call holds the lock.
    """
    import google_crc32c

    if google_crc32c.implementation != "c":
        return None
    from google_crc32c import _crc32c

    try:
        call = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (OSError, AttributeError):
        return None
    call.restype, call.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    return call


def crc32c(data: bytes | np.ndarray, start: int = 0) -> int:
    """Checksum of ``data`` (bytes or a C-contiguous array), continuing from ``start``."""
    if isinstance(data, np.ndarray):
        if data.nbytes < _LONG:
            data = data.tobytes()  # the package takes read-only buffers alone; so little is copied faster than made one
        elif (call := _native()) is not None:
            return call(start, data.__array_interface__["data"][0], data.nbytes)
        else:
            data = data.reshape(-1).view(np.uint8)
            data.flags.writeable = False
    return _extend()(start, data)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    out = 0
    for row in matrix:
        if not vector:
            break
        if vector & 1:
            out ^= row
        vector >>= 1
    return out


@cache
def _zeros(power: int, polynomial: int) -> tuple[int, ...]:
    """The GF(2) matrix that advances a checksum over ``2**power`` zero bits."""
    if power == 0:
        return (polynomial, *(1 << n for n in range(31)))
    half = _zeros(power - 1, polynomial)
    return tuple(_times(half, row) for row in half)


@lru_cache(maxsize=64)
def _advance(nbytes: int, polynomial: int) -> tuple[int, ...]:
    """The matrix for ``nbytes`` zero bytes. Chunks of one array share a length, so it is computed once an array."""
    matrix = tuple(1 << n for n in range(32))
    power, n = 3, nbytes
    while n:
        if n & 1:
            step = _zeros(power, polynomial)
            matrix = tuple(_times(step, row) for row in matrix)
        n >>= 1
        power += 1
    return matrix


def combine(first: int, second: int, second_nbytes: int, polynomial: int = CASTAGNOLI) -> int:
    """crc32c (``ZIP``: CRC32) of two byte strings together, from the checksum of each and the second's length."""
    return _times(_advance(second_nbytes, polynomial), first) ^ second
