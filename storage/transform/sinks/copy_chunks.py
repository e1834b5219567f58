"""Chunks that keep their bytes when a checkpoint is cut anew: checked on their way, and copied as they are stored.

Two grids of one array that agree on the chunk differ only in which file holds it, and where. So nothing is taken apart:
runs of chunks that lie together in both files pass through memory that stays in a processor's cache, each with the
checksum that follows it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.checksums import combine, crc32c
from ...base.scratch import scratch
from ...format.chunk_grid import ChunkGrid, Coord, ravel
from ...format.compression import Compression, compression_of
from ...format.zarr_format import chunk_coords, shard_index
from ...readers.compressed import CompressedTensor
from ...readers.dual_tensor import DualTensor
from ...readers.packed import PackedBlocks
from ...readers.reading import opened
from ...readers.tensor import ChunkedTensor
from ...stores import store
from ...stores.contract import Reader
from ...stores.filesystem import active

_SOURCES = 16  # files that are open at a time for one target


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """A chunk: its index in the array, and the shard and the number there, in the target and in the source."""

    index: Coord
    target: Coord
    to: int
    source: Coord
    at: int


def keeps_bytes(tensor: Any, grid: ChunkGrid, dtype: np.dtype, compression: Compression = None) -> bool:
    """Whether the stored chunks of ``tensor`` are the same bytes in an array of ``grid`` with this compression."""
    return (
        isinstance(tensor, ChunkedTensor)
        and not isinstance(tensor, (PackedBlocks, DualTensor))  # without checksums beside the chunks
        and bool(grid.shape)  # a 0-d array is a bare chunk
        and tensor.grid.shape == grid.shape
        and tensor.grid.chunk == grid.chunk
        and tensor.dtype == dtype
        and compression_of(tensor) == compression
    )


def moves(source: ChunkGrid, target: ChunkGrid, chunks: Sequence[Coord]) -> list[ChunkCopy]:
    """Where chunks lie, in the order in which files are opened once for all that they share.

    >>> two, four = ChunkGrid((1, 4), (1, 2), (1, 1)), ChunkGrid((1, 4), (1, 1), (1, 1))
    >>> [(m.target, m.to, m.source, m.at) for m in moves(four, two, [(0, 2), (0, 3)])]
    [((0, 1), 0, (0, 2), 0), ((0, 1), 1, (0, 3), 0)]
    """
    at, to = _places(source), _places(target)
    found = [ChunkCopy(i, *to(i), *at(i)) for i in chunks]
    return sorted(found, key=lambda m: (m.target, m.source, m.to))


def _places(grid: ChunkGrid) -> Callable[[Coord], tuple[Coord, int]]:
    """(shard, number in it) of chunks of an array."""
    present = functools.cache(grid.present)

    def place(index: Coord) -> tuple[Coord, int]:
        coord, local = grid.place_in_shard(index)
        return coord, ravel(local, present(coord))

    return place


def _runs(found: Sequence[ChunkCopy], longest: int) -> Iterator[list[ChunkCopy]]:
    """Chunks that follow one another in both files, at most ``longest`` at a time."""
    run: list[ChunkCopy] = []
    for m in found:
        if run and (m.to != run[-1].to + 1 or m.at != run[-1].at + 1 or len(run) == longest):
            yield run
            run = []
        run.append(m)
    if run:
        yield run


def copy_chunks(
    tensor: ChunkedTensor, grid: ChunkGrid, chunks: Sequence[Coord], path_of: Callable[[Coord], str]
) -> dict[Coord, int]:
    """Copy chunks of ``tensor`` to the files ``path_of(shard)``, which exist; returns the checksum of each.

    Raises what reading the tensor would: every chunk is compared with its checksum before it is written.
    """
    fs = active()
    nbytes = math.prod(grid.chunk) * tensor.dtype.itemsize + 4
    longest = max(1, store.at(tensor.root).batch // nbytes)
    held = scratch("copy", min(longest, len(chunks)) * nbytes)
    out: dict[Coord, int] = {}
    found = moves(tensor.grid, grid, chunks)
    for target, theirs in itertools.groupby(found, key=lambda m: m.target):
        with fs.opened(path_of(target)) as fd:
            for source, group in itertools.groupby(theirs, key=lambda m: m.source):
                path = tensor.path(source)
                with opened(path, f"part of {tensor.name!r}", tensor.generation) as reader:
                    for run in _runs(list(group), longest):
                        data = held[: len(run) * nbytes]
                        sums = tensor.read_stored(reader, path, source, run[0].at, data)
                        out.update(zip((m.index for m in run), sums, strict=True))
                        fs.write(fd, [data], run[0].to * nbytes)
    return out


class CopiedShard:
    """The bytes of one shard, from the chunks of a tensor that `keeps_bytes`: as `ShardBytes`, for targets that are
    written from their start.

    When all ``batches`` are gone, ``nbytes`` is their length, ``digest`` the crc32c, and ``sums`` the crc32c of each
    chunk.
    """

    def __init__(self, tensor: ChunkedTensor, grid: ChunkGrid, coord: Coord) -> None:
        self.tensor, self.grid, self.coord = tensor, grid, coord
        self.nbytes = self.digest = 0
        self.sums: list[int] = []

    def batches(self) -> Generator[list[Any]]:
        """The buffers; each is valid until the next is asked for. Raises what reading the tensor would."""
        self.digest, self.sums = 0, []
        grid, tensor = self.grid, self.tensor
        first = [i * k for i, k in zip(self.coord, grid.chunks_in_shard, strict=True)]
        every = [tuple(f + i for f, i in zip(first, local, strict=True)) for local in chunk_coords(grid, self.coord)]
        order = sorted(moves(tensor.grid, grid, every), key=lambda m: m.to)
        unit = math.prod(grid.chunk) * tensor.dtype.itemsize + 4
        longest = max(1, store.at(tensor.root).batch // unit)
        lengths: list[int] = []
        with contextlib.ExitStack() as stack:
            readers: dict[Coord, Reader] = {}
            for source, group in itertools.groupby(order, key=lambda m: m.source):
                path = tensor.path(source)
                if source not in readers:
                    if len(readers) == _SOURCES:
                        stack.close()
                        readers.clear()
                    held = opened(path, f"part of {tensor.name!r}", tensor.generation)
                    readers[source] = stack.enter_context(held)
                reader = readers[source]
                for run in _runs(list(group), longest):
                    data, found = self._take(reader, path, source, run[0].at, len(run))
                    lengths += found
                    yield [data]
        table = shard_index(grid, self.coord, lengths)
        self.nbytes = sum(lengths) + len(table)
        yield [table]

    def _take(self, reader: Reader, path: str, source: Coord, first: int, count: int) -> tuple[np.ndarray, list[int]]:
        """(bytes, length of each) of chunks that follow one another in a file, compared with their checksums."""
        tensor = self.tensor
        if isinstance(tensor, CompressedTensor):
            data, at = tensor.frames(reader, path, source, first, count)
            for k in range(count):
                stored = data[at[k] : at[k + 1]]
                self.sums.append(tensor.checked(path, source, first + k, stored))
                self.digest = crc32c(stored[:-4], self.digest)
            return data, np.diff(at).tolist()
        nbytes = math.prod(self.grid.chunk) * tensor.dtype.itemsize
        data = scratch("copy", count * (nbytes + 4))
        for value in tensor.read_stored(reader, path, source, first, data):
            self.digest = combine(self.digest, value, nbytes)
            self.sums.append(value)
        return data, [nbytes + 4] * count
