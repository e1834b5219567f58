"""The pieces in which a stored array is read for people: whole chunks where it has chunks, short runs where it has
none."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ....arrays.core.blocks import Box
from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import StoredArray
from ...format.chunk_grid import gathered
from ...readers.raw_tensor import RawTensor
from ...readers.zarr_tensor import ZarrTensor

PIECE = 1 << 20  # bytes of one piece, where chunks allow it
_LARGEST = 64 << 20  # bytes: chunks above are read in parts, whatever their codec makes of that
_DECODED = 256 << 20  # bytes: a chunk that unpacks to more is not opened for a page


def refuse_giants(array: StoredArray) -> None:
    """Raise where reading one element unpacks gigabytes: a small hostile file could ask for all memory."""
    if isinstance(array.tensor, ZarrTensor) or getattr(array.tensor, "compression", None) is not None:
        nbytes = math.prod(array.tensor.chunk) * array.dtype.itemsize
        if nbytes > _DECODED:
            raise CheckpointError(
                f"{array.name}: one of its chunks has {nbytes:,} bytes unpacked, which is not read for a page"
            )


class Pieces:
    """A grid of boxes over an array, each about ``limit`` bytes, counted without being listed.

    An array of 2⁶⁰ elements has as quick an answer as one of ten.

    >>> class Two:
    ...     shape, chunk = (4, 6), (2, 3)
    >>> p = Pieces((4, 6), (2, 3), 1, 6)
    >>> p.total, p.box(3)
    (4, Box(offset=(2, 3), shape=(2, 3)))
    """

    def __init__(self, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, limit: int = PIECE) -> None:
        size = [max(1, min(c, n)) for c, n in zip(chunk, shape, strict=True)]
        for d in range(len(shape)):  # a chunk beyond all measure is cut, its slowest dimension first
            while math.prod(size) * itemsize > max(limit, _LARGEST) and size[d] > 1:
                size[d] = -(-size[d] // 2)
        size = gathered([max(1, n) for n in shape], size, itemsize, limit)
        self.shape, self.size = shape, tuple(size)
        self.counts = tuple(-(-n // s) for n, s in zip(shape, size, strict=True))
        self.total = math.prod(self.counts)
        self.nbytes = math.prod(size) * itemsize

    @classmethod
    def of(cls, array: StoredArray, limit: int = PIECE) -> Pieces:
        """The pieces of a stored array. A row of a file is no chunk: it is cut where that suits."""
        refuse_giants(array)
        chunk = (1,) * array.ndim if isinstance(array.tensor, RawTensor) else tuple(array.tensor.chunk)
        return cls(array.shape, chunk, array.dtype.itemsize, limit)

    def box(self, k: int) -> Box:
        """Piece number ``k``, in lexicographic order."""
        offset = []
        for n, size in zip(reversed(self.counts), reversed(self.size), strict=True):
            k, i = divmod(k, n)
            offset.append(i * size)
        offset.reverse()
        return Box(tuple(offset), tuple(min(s, n - o) for s, n, o in zip(self.size, self.shape, offset, strict=True)))

    def all(self) -> Iterator[Box]:
        return (self.box(k) for k in range(self.total))

    def spread(self, n: int) -> Iterator[Box]:
        """At most ``n`` pieces: one in each of ``n`` stretches of equal length, at a place that looks random."""
        if n >= self.total:
            yield from self.all()
            return
        for i in range(n):
            a, b = i * self.total // n, (i + 1) * self.total // n
            # A fixed place in each stretch would meet the period of a layout; Weyl's sequence does not, and repeats
            # from run to run.
            yield self.box(a + int((i * 0.6180339887498949 % 1.0) * (b - a)))
