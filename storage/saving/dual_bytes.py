"""The bytes of a shard file that is a safetensors file, too (see ``zarr_format``)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from ..base.checksums import combine, crc32c
from ..format import dtypes
from ..format.chunk_grid import ChunkGrid
from ..format.zarr_format import chunk_coords, dual_shard


class DualBytes:
    """As `ShardBytes`: when all `batches` are gone, ``nbytes`` is their length, ``digest`` the crc32c of the rows, and ``sums`` that of each chunk.

    The header comes first and has the checksums in it, so the rows are gone through twice.
    """

    def __init__(
        self, block: np.ndarray, grid: ChunkGrid, coord: tuple[int, ...], wrote: Callable[[int], None], name: str
    ) -> None:
        self.block, self.grid, self.coord, self.wrote = block, grid, coord, wrote
        self.shard = dual_shard(name, dtypes.little(block.dtype), grid, coord)
        self.nbytes, self.digest = self.shard.nbytes, 0
        self.sums: list[int] = []

    def batches(self) -> Generator[list[Any]]:
        self.digest, self.sums = 0, []
        for rows in self._chunks():
            self.sums.append(crc32c(rows))
            self.digest = combine(self.digest, self.sums[-1], rows.size)
        yield [self.shard.sealed(self.digest)]
        for rows in self._chunks():
            yield [rows]
            self.wrote(rows.size)
        yield [self.shard.tail]
        self.wrote(self.nbytes - self.shard.rows)

    def _chunks(self) -> Iterator[np.ndarray]:
        dtype = dtypes.little(self.block.dtype)
        for index in chunk_coords(self.grid, self.coord):
            part = self.block[(*(slice(i * c, (i + 1) * c) for i, c in zip(index, self.grid.chunk, strict=True)), ...)]
            yield np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8)
