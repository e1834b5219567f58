"""Launch geometry of kernels: pure functions of shapes, addresses and the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LADDER = ((32, 8), (128, 8), (256, 16), (512, 32))
"""Threads of a row and elements of each, from the shortest rows to the longest that registers hold."""

MAX_GRID = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    """
    >>> ceil_div(7, 2)
    4
    """
    return -(-a // b)


def vector_length(width: int, itemsizes: Sequence[int], addresses: Sequence[int]) -> int:
    """Elements that one load may take: as many as 16 bytes of the narrowest array hold, where everything is aligned;
    else 1.

    >>> vector_length(1024, (4, 4), (0, 512))
    4
    >>> vector_length(1024, (2, 4), (0, 512))
    8
    >>> vector_length(1023, (4,), (0,)), vector_length(1024, (4,), (4,))
    (1, 1)
    """
    n = 16 // min(itemsizes)
    whole = width % n == 0 and all(a % 16 == 0 for a in addresses)
    return n if whole else 1


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


class RowPlan(NamedTuple):
    """A row has ``threads`` threads with ``items`` elements each, read ``vector`` at a time; a block has ``rows``
    rows. Where ``items`` is 0 the row is longer than registers hold."""

    threads: int
    items: int
    vector: int
    rows: int

    @property
    def block(self) -> tuple[int, int, int]:
        return (self.threads, self.rows, 1)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """A block for every group of rows."""
        return (min(ceil_div(rows, self.rows), MAX_GRID), 1, 1)

    def kept(self, width: int, itemsizes: Sequence[int], shared_memory: int) -> tuple[np.int32, int]:
        """Vectors of a long row that a thread keeps in shared memory, of arrays with these sizes of elements, and the
        bytes of all: with two blocks on a multiprocessor, one reads while the other writes.

        >>> RowPlan(512, 0, 8, 1).kept(50_257, (2,), 232_448)
        (np.int32(13), 106496)
        """
        if self.items or not itemsizes:
            return np.int32(0), 0
        each = self.threads * self.vector * sum(itemsizes)
        most = (shared_memory - 4096) // 2 // each
        vectors = min(ceil_div(width, self.threads * self.vector), most)
        return np.int32(vectors), vectors * each


def ladder(itemsize: int) -> tuple[tuple[int, int], ...]:
    """The rungs for elements of this size: numbers of 8 bytes fill the registers sooner."""
    top, items = LADDER[-1]
    return (*LADDER[:-1], (top, items * 4 // max(itemsize, 4)))


def row_plan(width: int, itemsize: int, vector: int) -> RowPlan:
    """How rows of ``width`` elements of this size at most are held.

    >>> row_plan(768, 4, 4)
    RowPlan(threads=128, items=8, vector=4, rows=1)
    >>> row_plan(100_000, 4, 4)
    RowPlan(threads=512, items=0, vector=4, rows=1)
    """
    for threads, items in ladder(itemsize):
        if width <= threads * items:
            return RowPlan(threads, items, vector, 8 if threads == 32 else 1)
    return RowPlan(512, 0, vector, 1)


def persistent_grid(blocks: int, multiprocessors: int, threads: int, shared: int, shared_per_sm: int) -> int:
    """Blocks that stay and loop over the rows, when each leaves a partial sum behind.

    As many as are resident at once, but only as many as have some eight rows' work each: their partial sums cost
    traffic.

    >>> persistent_grid(4096, 132, 256, 32 << 10, 227 << 10)
    512
    >>> persistent_grid(1, 132, 256, 0, 227 << 10)
    1
    """
    resident = max(1, min(2048 // threads, shared_per_sm // max(shared, 1), 4))
    return max(1, min(blocks, multiprocessors * resident, max(multiprocessors, blocks // 8)))
