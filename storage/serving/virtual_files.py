"""Files that exist only while they are read: texts, ranges of real files, and elements that are computed for the bytes
that are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CorruptCheckpoint
from ..format import dtypes
from ..format.chunk_grid import ravel, windows
from ..readers.raw_tensor import RawTensor
from ..readers.reading import opened
from ..readers.tensor import StoredTensor, bytes_of, read_box
from ..stores import generations
from ..stores.generations import Generation

_WINDOW = 8 << 20  # bytes that are computed at a time


class FileSpan(NamedTuple):
    """Bytes of a real file, of the generation that was opened."""

    path: str
    start: int
    nbytes: int
    generation: Generation

    def read(self) -> np.ndarray:
        out = np.empty(self.nbytes, np.uint8)
        with opened(self.path, "bytes that are shown in another format", self.generation) as reader:
            done = reader.readv([out], self.start)
            generations.refuse(self.path, self.generation.tags.get(self.path, ""), reader.tag)
            if done != self.nbytes:
                raise CorruptCheckpoint(f"{self.path} ends early; it changed while it was read")
        return out


Span = FileSpan | np.ndarray


class VirtualFile(Protocol):
    nbytes: int

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The bytes from ``start`` to ``stop`` (which lie in the file), in order."""


def read(file: VirtualFile, start: int, stop: int) -> np.ndarray:
    """Some bytes of a virtual file in memory."""
    parts = [s.read() if isinstance(s, FileSpan) else s for s in file.spans(start, stop)]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])


@dataclass(frozen=True, slots=True)
class TextFile:
    text: bytes

    @property
    def nbytes(self) -> int:
        return len(self.text)

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        yield np.frombuffer(self.text, np.uint8)[start:stop]


@dataclass(frozen=True, slots=True)
class RealFile:
    """A file of the checkpoint as it lies there."""

    path: str
    nbytes: int
    generation: Generation

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        yield FileSpan(self.path, start, stop - start, self.generation)


def raw(tensor: StoredTensor) -> RawTensor | None:
    """The tensor where its row-major bytes lie in a file as they are."""
    return tensor if isinstance(tensor, RawTensor) and tensor.strides is None else None


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk of a Zarr array without a compressor: the elements of a box, and zeros up to the shape of a whole
    chunk."""

    tensor: StoredTensor
    box: Box
    chunk: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.chunk) * self.tensor.dtype.itemsize

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        t = self.tensor
        held = raw(t)
        if held is None or (
            held.summed and self.box.shape == t.shape
        ):  # such a tensor is read whole, with its checksum
            data = read_box(t, self.box)[0]
            if self.box.shape != self.chunk:
                full = np.zeros(self.chunk, t.dtype)
                full.view(dtypes.bits(t.dtype))[(*map(slice, self.box.shape), ...)] = data.view(dtypes.bits(t.dtype))
                data = full
            yield bytes_of(data)[start:stop]
            return
        span = self.stored(held)
        end = min(stop, span.nbytes)
        if start < end:
            yield span._replace(start=span.start + start, nbytes=end - start)
        if (zeros := stop - max(start, end)) > 0:
            yield np.zeros(zeros, np.uint8)

    def stored(self, held: RawTensor) -> FileSpan:
        """The bytes of the box in the file of a tensor that is `raw`: chunks of those are runs of it."""
        item = held.dtype.itemsize
        start = held.start + ravel(self.box.offset, held.shape) * item
        return FileSpan(held.path, start, self.box.size * item, held.generation)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """All elements of a tensor in row-major order."""

    tensor: StoredTensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        t, item = self.tensor, self.tensor.dtype.itemsize
        if (held := raw(t)) is not None:
            yield FileSpan(held.path, held.start + start, stop - start, held.generation)
            return
        at = 0
        for box in windows(t.shape, rows(t.shape, t.chunk, item, _WINDOW), item, _WINDOW):
            end = at + box.size * item
            if at < stop and end > start:
                yield bytes_of(read_box(t, box)[0])[max(start - at, 0) : stop - at]
            at = end


def rows(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """The shape of a run of at most ``limit`` bytes of an array in row-major order: whole chunks of rows, where these
    fit.

    >>> rows((10, 6), (4, 3), 1, 30), rows((10, 6), (4, 3), 1, 12)
    ((4, 6), (2, 6))
    """
    out = [1] * len(shape)
    for axis in reversed(range(len(shape))):
        most = max(1, min(shape[axis], limit // (math.prod(out) * itemsize)))
        out[axis] = most - most % chunk[axis] if chunk[axis] <= most < shape[axis] else most
        if most < shape[axis]:
            break
    return tuple(out)


class JoinedFile:
    """Files one after the other."""

    def __init__(self, parts: Sequence[VirtualFile]) -> None:
        self._parts = parts
        self._ends = list(accumulate(p.nbytes for p in parts))
        self.nbytes = self._ends[-1] if parts else 0

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        for part, end in zip(self._parts, self._ends, strict=True):
            at = end - part.nbytes
            if part.nbytes and at < stop and end > start:
                yield from part.spans(max(start - at, 0), min(stop - at, part.nbytes))
