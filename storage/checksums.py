"""crc32c of buffers without copies, and the checksum of a concatenation from those of its parts.

>>> a, b = b"mesh", b"tape"
>>> combine(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)
True
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed


def crc32c(data: bytes | np.ndarray, start: int = 0) -> int:
    """Checksum of ``data`` (bytes or a C-contiguous array), continuing from ``start``."""
    import google_crc32c  # loads a C library; wanted only where bytes move

    if isinstance(data, np.ndarray):
        # The library takes read-only buffers alone, and it wants bytes.
        data = data.reshape(-1).view(np.uint8)
        data.flags.writeable = False
    return google_crc32c.extend(start, data)


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
def _zeros(power: int) -> tuple[int, ...]:
    """The GF(2) matrix that advances a checksum over ``2**power`` zero bits."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << n for n in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, row) for row in half)


@lru_cache(maxsize=64)
def _advance(nbytes: int) -> tuple[int, ...]:
    """The matrix for ``nbytes`` zero bytes. Chunks of one array share a length, so it is computed once an array."""
    matrix = tuple(1 << n for n in range(32))
    power, n = 3, nbytes
    while n:
        if n & 1:
            step = _zeros(power)
            matrix = tuple(_times(step, row) for row in matrix)
        n >>= 1
        power += 1
    return matrix


def combine(first: int, second: int, second_nbytes: int) -> int:
    """crc32c of two byte strings one after the other, from the checksum of each and the length of the second."""
    return _times(_advance(second_nbytes), first) ^ second
