"""``meshtape.sums``: the crc32c of every inner chunk, by array and place.

A checksum that lies beside its chunk tells that the chunk is whole, not that it is the one that belongs there. This
table does: a chunk or a shard that was exchanged for another, or comes from another save, does not fit it. It is a list
of little-endian unsigned 32-bit numbers. Each array whose shards hold several chunks has a section, shard by shard in
the order of the grid and chunk by chunk in the order of the file; the manifest gives its place and its own crc32c. An
array of one chunk a shard has none: the row of a shard says the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from ...arrays.core.errors import CorruptCheckpoint, IncompleteCheckpoint
from ..base.checksums import crc32c
from ..stores import store
from .chunk_grid import ChunkGrid, Coord, ravel

FILE = "meshtape.sums"
_MANY = 1 << 20

Section = tuple[int, int]  # number of its first checksum in the table, and the crc32c of its bytes


def packed(sums: Sequence[int]) -> bytes:
    """Checksums as they lie in the table."""
    return np.asarray(sums, "<u4").tobytes()


def has_section(grid: ChunkGrid) -> bool:
    """Whether the table has checksums of an array's chunks; the checksum of a lone chunk is in the row of its shard."""
    return math.prod(grid.chunks_in_shard) > 1


def _starts(grid: ChunkGrid) -> np.ndarray:
    """Where the checksums of each shard begin in the section of an array, and where the last ones end.

    >>> _starts(ChunkGrid((5, 4), (4, 4), (1, 2))).tolist()
    [0, 8, 10]
    """
    held = np.ones(1, np.int64)
    for n, shard, chunk, count in zip(grid.shape, grid.shard, grid.chunk, grid.counts, strict=True):
        along = np.full(count, shard // chunk, np.int64)
        along[-1:] = -(-(n - (count - 1) * shard) // chunk)
        held = np.multiply.outer(held, along).reshape(-1)
    return np.concatenate([np.zeros(1, np.int64), held.cumsum()])


class StoredSums(Mapping[Coord, np.ndarray]):
    """The checksums of the chunks of each shard of an array, read from the table when the first is asked for."""

    def __init__(self, root: str, file: str, section: Section, grid: ChunkGrid, name: str) -> None:
        self._root, self._file, self._section, self._grid, self._name = root, file, section, grid, name

    @cached_property
    def _starts(self) -> np.ndarray:
        return _starts(self._grid)

    @cached_property
    def _held(self) -> np.ndarray:
        first, wanted = self._section
        count = int(self._starts[-1])
        where = store.join(self._root, self._file)
        try:
            with contextlib.closing(store.at(self._root).reader(self._file)) as reader:
                # Before so much memory is taken on a manifest's word.
                if count > _MANY and reader.nbytes < 4 * (first + count):
                    count = 0
                out = np.empty(count, "<u4")
                done = reader.readv([out], 4 * first)
        except FileNotFoundError:
            raise IncompleteCheckpoint(
                f"{where} is missing, which holds the checksums of chunks; restore it, or load with verify=False"
            ) from None
        if not count or done != out.nbytes or crc32c(out) != wanted:
            raise CorruptCheckpoint(
                f"{where}: the checksums of the chunks of key {self._name!r} do not fit their own; restore the file, "
                "or load with verify=False"
            )
        return out

    @property
    def end(self) -> int:
        """Where the section ends in the table, in bytes."""
        return 4 * (self._section[0] + int(self._starts[-1]))

    def check(self) -> int:
        """Read the section, which is compared with its checksum; returns its length in bytes."""
        return self._held.nbytes

    def __getitem__(self, coord: Coord) -> np.ndarray:
        number = ravel(coord, self._grid.counts)
        return self._held[self._starts[number] : self._starts[number + 1]]

    def __iter__(self) -> Iterator[Coord]:
        return self._grid.shards()

    def __len__(self) -> int:
        return math.prod(self._grid.counts)
