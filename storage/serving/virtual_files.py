"""Files that exist only while they are read: texts, and the elements of tensors, of which those are read or computed
that the bytes in question hold."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np

from ...arrays.core.blocks import Box
from ..foreign.dcp import DcpTensor
from ..format.chunk_grid import ChunkGrid, ravel
from ..readers.raw_tensor import RawTensor
from ..readers.reading import Job, run
from ..readers.tensor import StoredTensor, bytes_of, view
from ..rules.lazy_tensors import InMemoryTensor, leaves
from ..stores.generations import NONE, Generation, Listed

LIMIT = 16 << 20  # bytes of a chunk; of a tensor that is read whole, with its checksum
_WINDOW = 4 << 20  # bytes of a piece: those in flight are to stay in the caches
_LARGEST = 64 << 20  # bytes of a piece of larger chunks, and of all windows that are kept
_ALIGNED = 16


class VirtualFile(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def readers(self) -> int:
        """How many threads read a piece: of local files one, as others read the next pieces."""

    def cut(self, at: int) -> int:
        """Where a piece that begins at ``at`` ends best, so that no chunk is read for two pieces."""

    def stored(self, start: int, stop: int) -> RawTensor | InMemoryTensor | None:
        """The bytes where they are at hand without any others, and are compared with no checksum."""

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        """Calls that together fill ``out`` with the bytes from ``start`` on."""


def read(file: VirtualFile, start: int, stop: int) -> np.ndarray:
    """Some bytes of a virtual file in memory."""
    # Aligned as if the file began at a multiple of the size of each element.
    out = np.empty(stop - start + _ALIGNED, np.uint8)[start % _ALIGNED :][: stop - start]
    run(file.jobs(start, out), file.readers)
    return out


def text_file(text: bytes) -> TensorFile:
    return TensorFile(InMemoryTensor("", np.frombuffer(text, np.uint8)))


def file_of(path: str, nbytes: int, generation: Generation) -> TensorFile:
    """A file of the checkpoint as it lies there."""
    return TensorFile(RawTensor(path, path, (nbytes,), np.dtype(np.uint8), 0, nbytes, generation=generation))


def raw(tensor: StoredTensor) -> RawTensor | None:
    """The tensor where its row-major bytes lie in a file as they are."""
    return tensor if isinstance(tensor, RawTensor) and tensor.strides is None else None


def bytes_in(held: RawTensor, start: int, nbytes: int) -> RawTensor:
    """Bytes of a tensor that is `raw`, which are compared with no checksum."""
    return replace(held, shape=(nbytes,), dtype=np.dtype(np.uint8), start=held.start + start, crc32c=None)


def rows_in(held: RawTensor, box: Box) -> RawTensor:
    """The bytes of a box that is one run of a tensor that is `raw`."""
    item = held.dtype.itemsize
    return bytes_in(held, ravel(box.offset, held.shape) * item, box.size * item)


def _whole(tensor: StoredTensor, box: Box, out: np.ndarray) -> Iterator[Job]:
    """Calls that fill bytes with the elements of a box."""
    yield from tensor.jobs(box, out.view(tensor.dtype).reshape(box.shape))


def check(tensor: StoredTensor) -> None:
    """Raise `CheckpointReplaced` where bytes that were read before are of another generation by now."""
    for leaf in leaves(tensor):
        getattr(leaf, "generation", NONE).check()


class _Windows:
    """The windows of which only a part was asked for: other ranges, at once or next, are likely to ask for the rest."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, Box], tuple[StoredTensor, Future[np.ndarray]]] = OrderedDict()
        self._lock = threading.Lock()

    def part(self, tensor: StoredTensor, box: Box, start: int, out: np.ndarray) -> int:
        """Fill ``out`` with the bytes of a box from ``start`` on."""
        key = id(tensor), box  # as long as it is held, no other tensor has this number
        with self._lock:
            _, found = self._held.pop(key, (None, None))
            mine, found = found is None, found or Future()
            self._held[key] = tensor, found
            sizes = [b.size * t.dtype.itemsize for (_, b), (t, _) in self._held.items()]
            while len(self._held) > 1 and sum(sizes[-len(self._held) :]) > _LARGEST:
                self._held.popitem(last=False)
        if mine:
            try:
                data = np.empty(box.size * tensor.dtype.itemsize, np.uint8)
                run(_whole(tensor, box, data), tensor.readers)
                found.set_result(data)
            except BaseException as e:
                found.set_exception(e)
                with self._lock:
                    self._held.pop(key, None)
        elif found.done():
            check(tensor)
        return _copy(out, found.result(), start)


_windows = _Windows()


@dataclass(frozen=True, slots=True)
class TensorFile:
    """All elements of a tensor in row-major order."""

    tensor: StoredTensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize

    @property
    def readers(self) -> int:
        return self.tensor.readers if self.tensor.readers > 4 else 1

    def cut(self, at: int) -> int:
        first, held = self._run(at)
        if held is not None:
            whole = isinstance(held, RawTensor) and held.summed and self.nbytes <= LIMIT
            return self.nbytes if whole else min(at + _WINDOW, first + math.prod(held.shape) * held.dtype.itemsize)
        first, box = self._window(at)
        return first + box.size * self.tensor.dtype.itemsize

    def _run(self, at: int) -> tuple[int, RawTensor | InMemoryTensor | None]:
        """(the first byte, the elements) of the run in a file or in memory in which a byte lies."""
        t = self.tensor
        if isinstance(t, DcpTensor) and self.nbytes > _WINDOW:  # a small one is read whole, with its checksum
            return t.raw_part(at) or (0, None)
        return 0, t if isinstance(t, InMemoryTensor) else raw(t)

    def stored(self, start: int, stop: int) -> RawTensor | InMemoryTensor | None:
        first, held = self._run(start)
        if isinstance(held, InMemoryTensor):
            return InMemoryTensor("", bytes_of(held.array)[start:stop])
        if held is None or stop > first + held.stored_nbytes or (held.summed and stop - start == held.stored_nbytes):
            return None
        return bytes_in(held, start - first, stop - start)

    @property
    def window(self) -> tuple[int, ...]:
        """The shape of the pieces: whole stored chunks that together are one run of the file, where these are not too
        large."""
        shape, chunk, item = self.tensor.shape, self.tensor.chunk, self.tensor.dtype.itemsize
        cut = next((i for i, n in enumerate(chunk) if n > 1), 0)
        band = math.prod(chunk[cut : cut + 1]) * math.prod(shape[cut + 1 :]) * item
        return rows(shape, chunk, item, max(_WINDOW, min(_LARGEST, band)))

    def _window(self, at: int) -> tuple[int, Box]:
        """(the first byte, the elements) of the window in which a byte lies."""
        shape, size, item = self.tensor.shape, self.window, self.tensor.dtype.itemsize
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
            return
        held, at = self.stored(start, stop), start
        if held is not None:
            yield from held.jobs(Box.whole(held.shape), out)
            return
        while at < stop:
            first, box = self._window(at)
            nbytes = box.size * t.dtype.itemsize
            part = out[at - start : first + nbytes - start]
            if part.size == nbytes:
                yield from _whole(t, box, part)
            else:
                yield lambda box=box, at=at - first, part=part: _windows.part(t, box, at, part)
            at = first + nbytes


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk of a Zarr array without a compressor: the elements of a box, and zeros up to the shape of a whole chunk.
    Where these elements follow one another in row-major order, it is a part of a `TensorFile`; any other is read
    whole."""

    tensor: StoredTensor
    box: Box
    chunk: tuple[int, ...]

    nbytes = property(lambda self: math.prod(self.chunk) * self.tensor.dtype.itemsize)
    readers = property(lambda self: TensorFile(self.tensor).readers)

    @property
    def key(self) -> tuple[int, Box]:
        """What tells it from the chunks of all tensors that are held meanwhile."""
        return id(self.tensor), self.box

    def following(self, count: int) -> list[ChunkFile]:
        """The next chunks of the array, in the order of its grid; none where `check` would list a whole hierarchy."""
        if any(isinstance(getattr(leaf, "generation", None), Listed) for leaf in leaves(self.tensor)):
            return []
        grid = ChunkGrid(self.tensor.shape, self.chunk, self.chunk)
        here = ravel([o // c for o, c in zip(self.box.offset, self.chunk, strict=True)], grid.counts)
        places = range(here + 1, min(here + 1 + count, math.prod(grid.counts)))
        return [replace(self, box=grid.shard_box([int(i) for i in np.unravel_index(n, grid.counts)])) for n in places]

    def _run(self) -> tuple[int, int]:
        """The bytes of the tensor that it is, from one to another; none where they are not one run."""
        shape, item = self.tensor.shape, self.tensor.dtype.itemsize
        within = next((i for i, n in enumerate(self.box.shape) if n > 1), len(shape))
        if self.box.shape[within + 1 :] != shape[within + 1 :] or not in_pieces(self.tensor, self.chunk):
            return 0, 0
        first = ravel(self.box.offset, shape) * item
        return first, first + self.box.size * item

    def cut(self, at: int) -> int:
        first, stop = self._run()
        if at >= stop - first:
            return self.nbytes
        end = min(stop, TensorFile(self.tensor).cut(first + at))
        return end - first if end < stop else self.nbytes

    def stored(self, start: int, stop: int) -> RawTensor | InMemoryTensor | None:
        first, end = self._run()
        return TensorFile(self.tensor).stored(first + start, first + stop) if first + stop <= end else None

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        first, end = self._run()
        if first < end:
            held = max(0, min(out.size, end - first - start))
            out[held:] = 0
            if held:
                yield from TensorFile(self.tensor).jobs(first + start, out[:held])
            return
        if out.size < self.nbytes:
            yield lambda: _copy(out, read(self, 0, self.nbytes), start)
            return
        if self.box.shape != self.chunk:
            out[...] = 0
        place = out.view(self.tensor.dtype).reshape(self.chunk)
        yield from self.tensor.jobs(self.box, view(place, Box.whole(self.box.shape)))


def in_pieces(tensor: StoredTensor, chunk: tuple[int, ...]) -> bool:
    """Whether chunks of this shape are sent in the pieces of a `TensorFile`, none of which two of them share."""
    if raw(tensor) is not None:
        return True
    window = TensorFile(tensor).window
    return all(c % w == 0 or c >= n for c, w, n in zip(chunk, window, tensor.shape, strict=True))


def _copy(out: np.ndarray, data: np.ndarray, start: int) -> int:
    out[...] = data[start : start + out.size]
    return out.size


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

    def stored(self, start: int, stop: int) -> RawTensor | InMemoryTensor | None:
        i = bisect_right(self._ends, start)
        begin = self._ends[i] - self._parts[i].nbytes
        return self._parts[i].stored(start - begin, stop - begin) if stop <= self._ends[i] else None

    def jobs(self, start: int, out: np.ndarray) -> Iterator[Job]:
        stop = start + out.size
        for i in range(bisect_right(self._ends, start), len(self._parts)):
            first, end = self._ends[i] - self._parts[i].nbytes, self._ends[i]
            if first >= stop:
                break
            if first < end:
                a, b = max(start, first), min(stop, end)
                yield from self._parts[i].jobs(a - first, out[a - start : b - start])
