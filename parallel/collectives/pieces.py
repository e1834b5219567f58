"""Pieces of messages: arrays in bounded chunks, so that no transport needs memory of their size.

A message is a list of *batches*, each a tuple of arrays of one shape. Both sides cut a batch into the same chunks of at
most :data:`QUANTUM` bytes, boxes of the array in C order, from its shape alone: a sender may pack from a strided view
and a receiver unpack into another. Chunks that fit a processor's cache also keep copying fast.

A *sink* takes the chunks of one batch: :class:`ArraySink` copies them into an array, :class:`Fold` joins contributions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ...arrays.native.copies import is_large, stream
from .reduction_tree import merges

QUANTUM = 1 << 19

Index = tuple[Any, ...]
Batch = tuple[np.ndarray, ...]


@functools.lru_cache(maxsize=8192)
def chunks(shape: tuple[int, ...], itemsize: int) -> tuple[Index, ...]:
    """Indices that cut an array in boxes of at most :data:`QUANTUM` bytes (or one element), in C order.

    >>> chunks((3, 1 << 18), 2)
    ((slice(0, 1, None),), (slice(1, 2, None),), (slice(2, 3, None),))
    """
    total = math.prod(shape) * itemsize
    if total == 0:
        return ()
    if total <= QUANTUM or not shape:
        return ((Ellipsis,),)
    row = total // shape[0]
    if row <= QUANTUM:
        rows = max(1, QUANTUM // row)
        return tuple((slice(i, min(i + rows, shape[0])),) for i in range(0, shape[0], rows))
    inner = chunks(shape[1:], itemsize)
    return tuple((slice(i, i + 1), *(k for k in rest if k is not Ellipsis)) for i in range(shape[0]) for rest in inner)


def bytes_of(a: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array; ml_dtypes' have no buffer format of their own."""
    return memoryview(a.reshape(-1).view(np.uint8))


def nbytes(batches: Sequence[Batch]) -> int:
    """Bytes of all arrays of a message."""
    return sum(a.nbytes for b in batches for a in b)


class BatchSink(Protocol):
    """The receiver of a batch. The transport goes through chunks in order, and in each through the arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype
    width: int
    """Number of arrays in the batch."""

    def place(self, k: int, j: int) -> np.ndarray | None:
        """C-contiguous memory that chunk ``k`` of array ``j`` may be written to directly, or None."""

    def accept(self, k: int, j: int, chunk: np.ndarray | None) -> bool:
        """The chunk is here (None: in its place). False: it is not its turn yet; ask again after other sinks went on.
        The chunk's memory is the transport's again when the call returns True."""


class ArraySink:
    """A sink that copies a batch of one array into ``array``, which may be strided."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype, self.width = array, array.shape, array.dtype, 1
        self._chunks = chunks(array.shape, array.itemsize)
        self._stream = is_large(array)

    def place(self, k: int, j: int) -> np.ndarray | None:
        part = self.array[self._chunks[k]]
        return part if part.flags.c_contiguous else None

    def accept(self, k: int, j: int, chunk: np.ndarray | None) -> bool:
        if chunk is None:
            return True
        if self._stream:
            stream(self.array[self._chunks[k]], chunk)
        else:
            self.array[self._chunks[k]] = chunk
        return True


class Fold:
    """Contributions joined in the order of :mod:`..reduction_tree`, chunk by chunk: the same bits however many
    processes there are.

    ``terms`` holds, in order, the arrays of this process and None for those of others, which go to :meth:`sink`.
    ``wide`` joins in float32 and rounds once. Memory is ``out`` and a chunk for each value that waits for its sibling;
    a large result is joined chunk by chunk in a place that stays in the cache, and copied from there past it.
    """

    def __init__(self, out: np.ndarray, terms: Sequence[np.ndarray | None], reducer: np.ufunc, wide: bool) -> None:
        self.out, self._terms, self._reducer, self._wide = out, tuple(terms), reducer, wide
        self._chunks = chunks(out.shape, out.itemsize)
        self._merges = merges(len(self._terms))
        self._stream = not wide and is_large(out)
        self._places: dict[int, np.ndarray] = {}  # by place in the stack: memory for values that were joined or copied
        self._k = self._t = 0
        self._stack: list[np.ndarray] = []
        self._advance()

    @property
    def done(self) -> bool:
        """Whether all contributions are in."""
        return self._k == len(self._chunks)

    def sink(self, positions: Sequence[int]) -> FoldSink:
        """The sink for a batch that holds the terms at ``positions``."""
        return FoldSink(self, tuple(positions))

    def accept(self, k: int, t: int, chunk: np.ndarray) -> bool:
        """One contribution to one chunk; False where others come before it."""
        if (k, t) != (self._k, self._t):
            return False
        if not self._merges[t] and (t + 1 == len(self._terms) or self._terms[t + 1] is None):
            # Its memory is not ours, and nothing is joined to it before this returns.
            place = self._place(len(self._stack))
            place[...] = chunk
            chunk = place
        self._push(chunk)
        self._advance()
        return True

    def _place(self, i: int) -> np.ndarray:
        """Memory for the value at place ``i`` of the stack; that of the first is the result's where it can be."""
        part = self.out[self._chunks[self._k]]
        if i == 0 and not self._wide and not self._stream:
            return part
        held = self._places.get(i)
        if held is None:  # no chunk is larger than the first
            held = self._places[i] = np.empty_like(part, np.float32 if self._wide else part.dtype).reshape(-1)
        return held[: part.size].reshape(part.shape)

    def _push(self, term: np.ndarray) -> None:
        stack = self._stack
        stack.append(term)
        for _ in range(self._merges[self._t]):
            right = stack.pop()
            left, place = stack[-1], self._place(len(stack) - 1)
            if self._wide:
                left, right = left.astype(np.float32, copy=False), right.astype(np.float32, copy=False)
            self._reducer(left, right, out=place)
            stack[-1] = place
        self._t += 1

    def _advance(self) -> None:
        """Join the contributions that are here, as far as the order allows."""
        n = len(self._terms)
        while self._k < len(self._chunks):
            while self._t < n and (own := self._terms[self._t]) is not None:
                self._push(own[self._chunks[self._k]])
            if self._t < n:
                return
            part, value = self.out[self._chunks[self._k]], self._stack.pop()
            if self._stream:
                stream(part, value)
            elif n == 1 or self._wide:
                part[...] = value
            self._k, self._t = self._k + 1, 0


class FoldSink:
    """The part of a :class:`Fold` that one process sends."""

    def __init__(self, fold: Fold, positions: tuple[int, ...]) -> None:
        self.fold, self._positions, self.width = fold, positions, len(positions)
        self.shape, self.dtype = fold.out.shape, fold.out.dtype

    def place(self, k: int, j: int) -> None:
        return None

    def accept(self, k: int, j: int, chunk: np.ndarray | None) -> bool:
        assert chunk is not None
        return self.fold.accept(k, self._positions[j], chunk)


class ChunkOrder:
    """The chunks of a message in the order in which they travel: one by one, over batches, chunks and arrays of a
    batch."""

    def __init__(self, items: Sequence[Any], shapes: Sequence[tuple[tuple[int, ...], int, int]]) -> None:
        self._items, self._shapes = items, shapes
        self._i = self._k = self._j = 0
        self._count = 0
        self._skip()

    def _skip(self) -> None:
        while self._i < len(self._items):
            shape, itemsize, width = self._shapes[self._i]
            self._count = len(chunks(shape, itemsize))
            if self._count and width:
                return
            self._i += 1

    @property
    def done(self) -> bool:
        return self._i == len(self._items)

    def current(self) -> tuple[Any, int, int]:
        """The batch or sink, number of the chunk, number of the array."""
        return self._items[self._i], self._k, self._j

    def next(self) -> None:
        self._j += 1
        if self._j == self._shapes[self._i][2]:
            self._j, self._k = 0, self._k + 1
            if self._k == self._count:
                self._k, self._i = 0, self._i + 1
                self._skip()


_NOTHING = ChunkOrder((), ())


def outgoing(batches: Sequence[Batch]) -> ChunkOrder:
    """The chunks to send."""
    if not batches:
        return _NOTHING
    return ChunkOrder(batches, [(b[0].shape, b[0].itemsize, len(b)) if b else ((0,), 1, 0) for b in batches])


def incoming(sinks: Sequence[BatchSink]) -> ChunkOrder:
    """The chunks to receive."""
    if not sinks:
        return _NOTHING
    return ChunkOrder(sinks, [(s.shape, s.dtype.itemsize, s.width) for s in sinks])


def chunk_of(batch: Batch, k: int, j: int) -> np.ndarray:
    """One chunk of a batch: a view."""
    a = batch[j]
    return a[chunks(a.shape, a.itemsize)[k]]


def expected(sinks: Sequence[BatchSink]) -> int:
    """Bytes that the sinks will take."""
    return sum(math.prod(s.shape) * s.dtype.itemsize * s.width for s in sinks)
