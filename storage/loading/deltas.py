"""Deltas: arrays that are stored as differences from the same array of a base checkpoint, and read by adding it.

An element's bits are an unsigned integer. Its difference from that of the base, modulo 2 to the number of bits, is a
signed number near zero where training has moved it a little; zigzag makes it an unsigned one (0, -1, 1, -2, … become 0,
1, 2, 3, …), so that the bytes of high place are zeros. The exclusive or of the two would have long carries instead: it
takes 4 % more bytes. A base is plain, never a delta itself, so a delta costs two reads wherever it stands, and there
are no circles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ..base.scratch import scratch
from ..checkpoint.checkpoint import Checkpoint
from ..format.chunk_grid import ChunkGrid, cells
from ..format.compression import Codec, Compression, compression_of, unzigzag, zigzag
from ..format.manifest import MOST_DELTA
from ..readers.compressed import CompressedTensor
from ..readers.reading import Job
from ..readers.tensor import ChunkedTensor, read_into, view
from ..rules.lazy_tensors import OfParts, of_source
from ..stores.generations import Generation


def unsigned(dtype: np.dtype) -> np.dtype:
    """The dtype of the differences of elements."""
    return np.dtype(f"u{dtype.itemsize}")


def from_base(
    base: Any, grid: ChunkGrid, coord: tuple[int, ...], codec: Codec, index: tuple[int, ...], data: np.ndarray
) -> np.ndarray:
    """The bytes of a chunk of a delta, by those of its elements and the tensor of the base; this thread's, until it
    asks for the next."""
    kind = unsigned(base.dtype)
    box = grid.chunk_box([k * n + i for k, n, i in zip(coord, grid.chunks_in_shard, index, strict=True)])
    held = scratch("difference", data.size).view(kind).reshape(grid.chunk)
    if box.shape != grid.chunk:
        held[...] = 0  # as the padding of a plain chunk
    inside = held[(*map(slice, box.shape), ...)]
    read_into(base, box, inside.view(base.dtype))
    held = held.reshape(-1)
    np.subtract(data.view(kind), held, out=held)
    return (held if codec.signed else zigzag(held)).view(np.uint8)


@dataclass(frozen=True, slots=True)
class DeltaTensor(OfParts):
    """The sum of the array of a base and of stored differences. The identity of the base binds its chunks, as the
    manifest does those of the differences."""

    name: str
    dtype: np.dtype
    parts: tuple[ChunkedTensor, CompressedTensor]  # array of the base, and differences

    how: ClassVar[str] = "differences from the same array of a base checkpoint, added to it when they are read"
    source = property(lambda self: self.parts[0])
    stored = property(lambda self: self.parts[1])
    shape = of_source("shape")
    chunk = property(lambda self: self.parts[1].chunk)

    @property
    def compression(self) -> Compression:
        """That of the base: a plain copy has it."""
        return compression_of(self.parts[0])

    def bound(self, generation: Generation) -> DeltaTensor:
        for part in self.parts:
            part.bound(generation)
        return self

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        for index in cells(box, self.chunk):
            offset = tuple(i * c for i, c in zip(index, self.chunk, strict=True))
            if (part := Box(offset, self.chunk).intersect(box)) is not None:
                yield lambda part=part: self._read(part, view(out, part.within(box)))

    def _read(self, box: Box, out: np.ndarray) -> int:
        base, stored = self.parts
        nbytes = math.prod(box.shape) * self.dtype.itemsize
        held = scratch("difference", nbytes).view(stored.dtype).reshape(box.shape)
        total = read_into(stored, box, held)[1] + read_into(base, box, out)[1]
        if not stored.compression.signed:
            unzigzag(held)
        out.view(stored.dtype)[...] += held
        return total


def stored_of(tensor: Any) -> Any:
    """The part of a tensor that lies in files of its own checkpoint."""
    return getattr(tensor, "stored", tensor)


def base_of(base: Checkpoint, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """The tensor of a base from which an array can be a delta; None where there is none of this name, shape and
    dtype."""
    held = base.arrays.get(name)
    fits = held is not None and (held.shape, held.dtype) == (shape, dtype)
    return held.tensor if fits and shape and 0 not in shape and dtype.itemsize <= MOST_DELTA else None  # type: ignore[union-attr]
