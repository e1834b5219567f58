"""Files that exist only while they are read: texts, and the elements of tensors, of which those are read or computed
that the bytes in question hold."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np

from ...arrays.core.blocks import Box
from ..foreign.dcp import DcpTensor
from ..format.chunk_grid import ravel
from ..readers.raw_tensor import RawTensor
from ..readers.reading import Job, opened, run
from ..readers.tensor import StoredTensor, view
from ..rules.lazy_tensors import leaves
from ..stores import generations
from ..stores import store as stores
from ..stores.contract import Reader
from ..stores.generations import NONE, Generation

_WINDOW = 8 << 20  # bytes of a piece
_LARGEST = 64 << 20  # bytes of a piece of larger chunks, and of all windows that are kept
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a local file, of the generation that was opened."""

    path: str
    start: int
    nbytes: int
    generation: Generation

    def __len__(self) -> int:
        return self.nbytes

    def opened(self) -> opened:
        return opened(self.path, "bytes that are served", self.generation)

    def check(self, reader: Reader) -> None:
        """Raise `CheckpointReplaced` where the file is another by now, or was written to."""
        generations.refuse(self.path, self.generation.tags.get(self.path, ""), reader.tag)


class VirtualFile(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def readers(self) -> int:
        """How many threads may help to read a piece."""

    def cut(self, at: int) -> int:
        """Where a piece that begins at ``at`` ends best, so that no chunk is read for two pieces."""

    def file_range(self, start: int, stop: int) -> FileRange | None:
        """The place of bytes that lie in a local file as they are, and are compared with no checksum."""

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        """Calls that together fill ``out`` with the bytes from ``start`` on."""


def read(file: VirtualFile, start: int, stop: int) -> np.ndarray:
    """Some bytes of a virtual file in memory."""
    # Aligned as if the file began at a multiple of the size of each element.
    out = np.empty(stop - start + _ALIGNED, np.uint8)[start % _ALIGNED :][: stop - start]
    run(file.jobs(start, out), file.readers)
    return out


def _readers(tensor: StoredTensor) -> int:
    """Threads that fetch objects of a store; of local files each piece has one thread."""
    return tensor.readers if tensor.readers > 4 else 1


@dataclass(frozen=True, slots=True)
class TextFile:
    text: bytes
    readers: ClassVar[int] = 1

    @property
    def nbytes(self) -> int:
        return len(self.text)

    def cut(self, at: int) -> int:
        return self.nbytes

    def file_range(self, start: int, stop: int) -> None:
        return None

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        yield lambda: _copy(out, np.frombuffer(self.text, np.uint8), start)


def _copy(out: np.ndarray, data: np.ndarray, start: int) -> int:
    out[...] = data[start : start + out.size]
    return out.size


# ----- tensors --------------------------------------------------------------------------------------------------------


def raw(tensor: StoredTensor) -> RawTensor | None:
    """The tensor where its row-major bytes lie in a file as they are."""
    return tensor if isinstance(tensor, RawTensor) and tensor.strides is None else None


def bytes_in(held: RawTensor, start: int, nbytes: int) -> RawTensor:
    """Bytes of a tensor that is `raw`, which are compared with no checksum."""
    return replace(held, shape=(nbytes,), dtype=np.dtype(np.uint8), start=held.start + start, crc32c=None)


def _range_of(held: RawTensor | None) -> FileRange | None:
    if held is None or stores.is_url(held.path):
        return None
    return FileRange(held.path, held.start, held.stored_nbytes, held.generation)


def file_of(path: str, nbytes: int, generation: Generation) -> TensorFile:
    """A file of the checkpoint as it lies there."""
    return TensorFile(RawTensor(path, path, (nbytes,), np.dtype(np.uint8), 0, nbytes, generation=generation))


def _whole(tensor: StoredTensor, box: Box, out: np.ndarray) -> Iterator[Job]:
    """Calls that fill bytes with the elements of a box."""
    yield from tensor.jobs(box, out.view(tensor.dtype).reshape(box.shape))


class _Windows:
    """The windows of which only a part was asked for: the next range is likely to ask for more of it."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, Box], tuple[StoredTensor, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    def part(self, tensor: StoredTensor, box: Box, start: int, out: np.ndarray) -> int:
        """Fill ``out`` with the bytes of a box from ``start`` on."""
        key = id(tensor), box  # as long as it is held, no other tensor has this number
        with self._lock:
            found = self._held.get(key)
        if found is None:
            data = np.empty(box.size * tensor.dtype.itemsize, np.uint8)
            run(_whole(tensor, box, data), _readers(tensor))
            found = tensor, data
        else:
            for leaf in leaves(tensor):
                getattr(leaf, "generation", NONE).check()
        with self._lock:
            self._held[key] = found
            self._held.move_to_end(key)
            while len(self._held) > 1 and sum(data.size for _, data in self._held.values()) > _LARGEST:
                self._held.popitem(last=False)
        return _copy(out, found[1], start)


_windows = _Windows()


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

    @property
    def readers(self) -> int:
        return _readers(self.tensor)

    def cut(self, at: int) -> int:
        inside = self.box.size * self.tensor.dtype.itemsize
        return self.nbytes if at >= inside or self._bytes(at, at) is None else min(at + _WINDOW, inside)

    def _bytes(self, start: int, stop: int) -> RawTensor | None:
        """The bytes as they lie in a file; None where they do not, or all of the tensor is compared with a checksum."""
        held = raw(self.tensor)
        if held is None or (held.summed and self.box.shape == held.shape):
            return None
        return bytes_in(self.stored(held), start, stop - start)

    def file_range(self, start: int, stop: int) -> FileRange | None:
        return _range_of(self._bytes(start, stop)) if stop <= self.box.size * self.tensor.dtype.itemsize else None

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        t, inside = self.tensor, self.box.size * self.tensor.dtype.itemsize
        if self.box.shape[1:] == self.chunk[1:]:  # all zeros come last
            zeros = max(0, start + out.size - max(start, inside))
            out[out.size - zeros :] = 0
            out = out[: out.size - zeros]
            if out.size == inside:
                yield from _whole(t, self.box, out)
            elif out.size and (part := self._bytes(start, start + out.size)) is not None:
                yield from part.jobs(Box.whole(part.shape), out)
            elif out.size:
                yield lambda: _windows.part(t, self.box, start, out)
        elif out.size == self.nbytes:
            out[...] = 0
            place = out.view(t.dtype).reshape(self.chunk)
            yield from t.jobs(self.box, view(place, Box.whole(self.box.shape)))
        else:
            yield lambda: _copy(out, read(self, 0, self.nbytes), start)

    def stored(self, held: RawTensor) -> RawTensor:
        """The bytes of the box in the file of a tensor that is `raw`: chunks of those are runs of it."""
        item = held.dtype.itemsize
        return bytes_in(held, ravel(self.box.offset, held.shape) * item, self.box.size * item)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """All elements of a tensor in row-major order."""

    tensor: StoredTensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize

    @property
    def readers(self) -> int:
        return _readers(self.tensor)

    def cut(self, at: int) -> int:
        if raw(self.tensor) is not None:
            return min(at + _WINDOW, self.nbytes)
        if (found := self._part(at)) is not None:
            return min(at + _WINDOW, found[0] + found[1].stored_nbytes)
        first, box = self._window(at)
        return first + box.size * self.tensor.dtype.itemsize

    def _part(self, at: int) -> tuple[int, RawTensor] | None:
        """(the first byte of a part, the part) of a DCP tensor that has more than one piece: a whole one is read, and
        compared with its checksum."""
        t = self.tensor
        return t.raw_part(at) if isinstance(t, DcpTensor) and self.nbytes > _WINDOW else None

    def _bytes(self, start: int, stop: int) -> RawTensor | None:
        """The bytes as they lie in a file."""
        if (held := raw(self.tensor)) is not None:
            return bytes_in(held, start, stop - start)
        first, part = self._part(start) or (0, None)
        return (
            None if part is None or stop > first + part.stored_nbytes else bytes_in(part, start - first, stop - start)
        )

    def file_range(self, start: int, stop: int) -> FileRange | None:
        summed = getattr(self.tensor, "summed", False) and stop - start == self.nbytes
        return None if summed else _range_of(self._bytes(start, stop))

    def _window(self, at: int) -> tuple[int, Box]:
        """(the first byte, the elements) of the window in which a byte lies."""
        shape, chunk, item = self.tensor.shape, self.tensor.chunk, self.tensor.dtype.itemsize
        cut = next((i for i, n in enumerate(chunk) if n > 1), 0)
        band = math.prod(chunk[cut : cut + 1]) * math.prod(shape[cut + 1 :]) * item  # whole chunks, in one run
        size = rows(shape, chunk, item, max(_WINDOW, min(_LARGEST, band)))
        if size == shape:
            return 0, Box.whole(shape)
        axis = max(i for i, n in enumerate(size) if n < shape[i])
        unit = math.prod(shape[axis + 1 :]) * item
        outer, at = divmod(at // unit, shape[axis])
        at -= at % size[axis]
        start = (*map(int, np.unravel_index(outer, shape[:axis])), at, *(0,) * (len(shape) - axis - 1))
        length = min(size[axis], shape[axis] - at)
        return (outer * shape[axis] + at) * unit, Box(start, (*size[:axis], length, *size[axis + 1 :]))

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        t, stop = self.tensor, start + out.size
        if out.size == self.nbytes:
            yield from _whole(t, Box.whole(t.shape), out)
        elif (held := self._bytes(start, stop)) is not None:
            yield from held.jobs(Box.whole(held.shape), out)
        else:
            at = start
            while at < stop:
                first, box = self._window(at)
                end = min(stop, first + box.size * t.dtype.itemsize)
                part = out[at - start : end - start]
                if part.size == box.size * t.dtype.itemsize:
                    yield from _whole(t, box, part)
                else:
                    yield lambda box=box, at=at - first, part=part: _windows.part(t, box, at, part)
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
        self.readers = max((p.readers for p in parts), default=1)

    def cut(self, at: int) -> int:
        i = bisect_right(self._ends, at)
        begin = self._ends[i] - self._parts[i].nbytes
        end = begin + self._parts[i].cut(at - begin)
        if end < self._ends[i]:
            return end
        return max(end, self._ends[bisect_right(self._ends, at + _WINDOW) - 1])  # with all that fit in behind it

    def file_range(self, start: int, stop: int) -> FileRange | None:
        i = bisect_right(self._ends, start)
        begin = self._ends[i] - self._parts[i].nbytes
        return self._parts[i].file_range(start - begin, stop - begin) if stop <= self._ends[i] else None

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        stop = start + out.size
        for i in range(bisect_right(self._ends, start), len(self._parts)):
            first, end = self._ends[i] - self._parts[i].nbytes, self._ends[i]
            if first >= stop:
                break
            if first < end:
                a, b = max(start, first), min(stop, end)
                yield from self._parts[i].jobs(a - first, out[a - start : b - start])
