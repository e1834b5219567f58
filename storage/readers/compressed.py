"""Shards whose chunks are compressed: where each lies is told by the shard's index, and nothing is believed of it that
does not add up.

The writer leaves no gaps: frames follow one another in lexicographic order of their chunks, each with its crc32c, up to
the index. So an index is a list of lengths, and one that says anything else is damaged.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CorruptCheckpoint
from ..base.checksums import crc32c
from ..base.scratch import scratch
from ..base.waiting import lock
from ..format.chunk_grid import ChunkGrid, Coord, ravel
from ..format.compression import Codec, Zstd
from ..format.stored_objects import StoredObject
from ..format.zarr_format import shard_index
from ..stores import store
from ..stores.contract import Reader
from .reading import opened
from .tensor import ChunkedTensor, bytes_of, consecutive, overlaps

_ZSTD = Zstd()
_KEPT = 4 << 20  # entries of all the indexes that a process remembers
_LARGE = 1 << 16  # bytes of an index
_DENSEST = 18  # no frame holds more than 2**18 times its own length: a block of 128 KiB, of eighths, costs four bytes


# ----- indexes --------------------------------------------------------------------------------------------------------


def index_nbytes(grid: ChunkGrid) -> int:
    """Length of the index of a shard, its checksum included."""
    return math.prod(grid.chunks_in_shard) * 16 + 4


def starts_of(index: np.ndarray, grid: ChunkGrid, coord: Coord, nbytes: int, itemsize: int) -> np.ndarray:
    """Where the stored chunks of a shard begin, and where the last one ends, by the bytes of its index; ``nbytes`` is
    the length of the file.

    ``ValueError`` where the checksum does not fit, or an entry is not what the writer writes.
    """
    if index.size != index_nbytes(grid) or crc32c(index[:-4]).to_bytes(4, "little") != index[-4:].tobytes():
        raise ValueError("its index is damaged")
    table = index[:-4].view("<u8").reshape(*grid.chunks_in_shard, 2)
    present = tuple(slice(n) for n in grid.present(coord))
    absent = np.ones(grid.chunks_in_shard, bool)
    absent[present] = False
    if not (table[absent] == np.uint64(2**64 - 1)).all():
        raise ValueError("its index names chunks beyond the array")
    held = table[present].reshape(-1, 2)
    chunk = math.prod(grid.chunk) * itemsize
    # Compared as they are, unsigned: a sum of hostile lengths could pass over the end.
    if not ((held[:, 1] > 4 + (chunk >> _DENSEST)) & (held[:, 1] <= nbytes)).all():
        raise ValueError("its index gives chunks impossible lengths")
    starts = np.zeros(len(held) + 1, np.int64)
    starts[1:] = held[:, 1].astype(np.int64).cumsum()
    if (held[:, 0] != starts[:-1].astype(np.uint64)).any() or starts[-1] != nbytes - index.size:
        raise ValueError("its index leaves gaps, or leads out of the file")
    return starts


class _Known:
    """The indexes that were used last, by file and checksum."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, int, int], np.ndarray] = OrderedDict()
        self._lock, self._size = lock(), 0

    def get(self, key: tuple[str, int, int]) -> np.ndarray | None:
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: tuple[str, int, int], starts: np.ndarray) -> None:
        with self._lock:
            if key not in self._held and starts.size <= _KEPT:
                self._held[key] = starts
                self._size += starts.size
                while self._size > _KEPT:
                    self._size -= self._held.popitem(last=False)[1].size


_known = _Known()


# ----- the tensor -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CompressedTensor(ChunkedTensor):
    """An array of a meshtape checkpoint whose chunks are compressed."""

    compression: Codec = _ZSTD

    def _range(self, coord: Coord, stored: StoredObject, out: np.ndarray) -> None:
        return None

    def starts(self, reader: Reader, path: str, coord: Coord) -> np.ndarray:
        """Where the chunks of a shard begin in its file, and where the last one ends."""
        stored = self.objects[coord]
        key = (path, stored.nbytes, stored.crc32c)
        found = _known.get(key)
        if found is None:
            size = index_nbytes(self.grid)
            if size >= stored.nbytes:
                raise CorruptCheckpoint(f"{path} is too short for its index (key {self.name!r})")
            if size > _LARGE:  # before so much memory is taken on a manifest's word
                self.check_length(reader, coord, path)
            index = np.empty(size, np.uint8)
            done = reader.readv([index], stored.nbytes - index.size)
            self.check_length(reader, coord, path)
            if done != index.size:
                raise self.cut(path)
            try:
                found = starts_of(index, self.grid, coord, stored.nbytes, self.dtype.itemsize)
            except ValueError as e:
                raise CorruptCheckpoint(
                    f"{path} (key {self.name!r}): {e}; restore the file or another checkpoint"
                ) from None
            _known.put(key, found)
        return found

    def planned(self, box: Box) -> int:
        """Bytes that reading ``box`` takes from files, as if all the chunks of a shard were equally long."""
        total = 0
        for coord in self._shards(box):
            stored = self.objects[coord]
            part = box.intersect(stored.box)
            if part is not None and part.size:
                local = part.within(stored.box)
                spans = zip(local.offset, local.stop, self.grid.chunk, strict=True)
                touched = math.prod(-(-b // c) - a // c for a, b, c in spans)
                total += stored.nbytes * touched // max(1, math.prod(self.grid.present(coord)))
        return total

    def chunk_nbytes(self, coord: Coord, local: Coord) -> int:
        """Bytes that a chunk of a shard has in its file, checksum included."""
        path = self.path(coord)
        with opened(path, f"part of {self.name!r}", self.generation) as reader:
            starts = self.starts(reader, path, coord)
        number = ravel(local, self.grid.present(coord))
        return int(starts[number + 1] - starts[number])

    def frames(self, reader: Reader, path: str, coord: Coord, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(bytes of some chunks as they are stored, checksums included; where each begins in them, and where the last
        one ends).

        The bytes are this thread's until it reads the next ones. Raises `CorruptCheckpoint` where a checksum does not
        fit.
        """
        starts = self.starts(reader, path, coord)[first : first + count + 1]
        data = scratch("frames", int(starts[-1] - starts[0]))
        done = reader.readv([data], int(starts[0]))
        self.check_length(reader, coord, path)
        if done != data.size:
            raise self.cut(path)
        return data, starts - starts[0]

    def extent(self, number: int) -> str:
        return ""

    def unpack(self, path: str, coord: Coord, number: int, frame: np.ndarray, out: np.ndarray) -> None:
        """The elements of a frame; raises where the frame does not hold exactly a chunk."""
        try:
            self.compression.decompress(frame, out)
        except ValueError as e:
            raise CorruptCheckpoint(
                f"{path}: chunk {self.index_of(number, coord)} of key {self.name!r}: {e}; restore the file or another "
                "checkpoint"
            ) from None

    def _read(self, coord: Coord, local: Box, target: np.ndarray, chunks: list[Coord]) -> int:
        grid, path = self.grid, self.path(coord)
        nbytes = math.prod(grid.chunk) * self.dtype.itemsize
        slots = max(1, min(store.at(self.root).batch // max(nbytes, 1), len(chunks)))
        places = [overlaps(*d) for d in zip(grid.chunk, local.offset, local.shape, strict=True)]
        total = 0
        with opened(path, f"part of {self.name!r}", self.generation) as reader:
            for first, group in consecutive(chunks, grid.present(coord), slots):
                data, at = self.frames(reader, path, coord, first, len(group))
                total += data.size
                for k, index in enumerate(group):
                    stored = data[at[k] : at[k + 1]]
                    if self.verify:
                        self.checked(path, coord, first + k, stored)
                    parts = [o[i] for o, i in zip(places, index, strict=True)]
                    place = target[(*(p[0] for p in parts), ...)]
                    if all(p[2] for p in parts) and place.flags.c_contiguous:
                        self.unpack(path, coord, first + k, stored[:-4], bytes_of(place))
                        continue
                    held = scratch("read", nbytes)
                    self.unpack(path, coord, first + k, stored[:-4], held)
                    place[...] = held.view(self.dtype).reshape(grid.chunk)[(*(p[1] for p in parts), ...)]
        if not self.verify or self.wanted(coord) is None:  # nothing binds these bytes to what was opened
            self.generation.check()
        return total


# ----- a whole file ---------------------------------------------------------------------------------------------------


def frames_in(
    reader: Reader, grid: ChunkGrid, coord: Coord, nbytes: int, itemsize: int, batch: int, compressed: bool = True
) -> Iterator[tuple[int, np.ndarray]]:
    """(number, stored bytes with their checksum) of every chunk of a shard file, in order; each is valid until the next
    batch.

    ``ValueError`` where the index or a length is wrong. Without compression the grid tells where chunks lie, and the
    index is compared at the end.
    """
    length = index_nbytes(grid) if grid.shape else 0
    if reader.nbytes != nbytes or nbytes <= length:
        raise ValueError(f"it has {reader.nbytes} bytes, not {nbytes}")
    index = np.empty(length, np.uint8)
    reader.readv([index], nbytes - index.size)
    if compressed:
        starts = starts_of(index, grid, coord, nbytes, itemsize)
    else:
        unit = math.prod(grid.chunk) * itemsize + 4
        starts = np.arange(math.prod(grid.present(coord)) + 1, dtype=np.int64) * unit
    first, count = 0, len(starts) - 1
    while first < count:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + batch, "right")) - 1)
        data = scratch("frames", int(starts[last] - starts[first]))
        if reader.readv([data], int(starts[first])) != data.size:
            raise ValueError("it ends early")
        for k in range(first, last):
            yield k, data[starts[k] - starts[first] : starts[k + 1] - starts[first]]
        first = last
    if not compressed and length and index.tobytes() != shard_index(grid, coord, unit):
        raise ValueError("its index is damaged; the values are whole")


def digest(
    reader: Reader, grid: ChunkGrid, coord: Coord, nbytes: int, itemsize: int
) -> tuple[int, list[int], list[int]]:
    """(crc32c of all frames one after the other, numbers of the chunks that do not fit their checksum, crc32c of each)
    of a shard file.

    ``ValueError`` as `frames_in`.
    """
    value, bad, sums = 0, [], []
    for number, stored in frames_in(reader, grid, coord, nbytes, itemsize, 1 << 20):
        sums.append(crc32c(stored[:-4]))
        if sums[-1].to_bytes(4, "little") != stored[-4:].tobytes():
            bad.append(number)
        value = crc32c(stored[:-4], value)
    return value, bad, sums
