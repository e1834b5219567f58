"""``layout="dual"``: shard files that are safetensors files, too.

A file is the header of safetensors, the rows of a block, and a second tensor of bytes, `INDEX`, which ends with the index of the Zarr shard. The inner
chunks of the shard are runs of rows without a checksum of their own, one after the other, so that they are the row-major tensor. A last chunk that
reaches beyond the block takes zeros from the beginning of `INDEX`. All but the rows follows from the place of the shard and the checksums of its rows,
so that `verify` compares every byte.
"""

from __future__ import annotations

import json
import math
import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...arrays.core.errors import CheckpointError, CheckpointKeyError
from ..base.checksums import crc32c
from . import dtypes, tensor_sums
from .chunk_grid import TARGET, ChunkGrid, divisors, place_of

INDEX = "__zarr_index__"
_ABSENT = np.uint64(2**64 - 1)


def dual_grid(grid: ChunkGrid, itemsize: int, name: str) -> ChunkGrid:
    """The grid with the same blocks whose chunks follow one another in row-major order.

    Raises `CheckpointError` where blocks are no whole rows, and `CheckpointKeyError` for a reserved name.

    >>> dual_grid(ChunkGrid((5, 4), (5, 4), (5, 2)), 1 << 18, "w")
    ChunkGrid(shape=(5, 4), shard=(5, 4), chunk=(1, 4))
    """
    if name == INDEX:
        raise CheckpointKeyError(f"a tensor cannot be named {INDEX!r}: files of layout='dual' reserve that name")
    if split := [axis for axis, n in enumerate(grid.counts) if axis and n > 1]:
        raise CheckpointError(
            f"key {name!r} is split along dimension {split[0]}: layout='dual' needs blocks of whole rows, split along dimension 0 alone; "
            "reshard it, or save without layout="
        )
    extent = [min(grid.shard[0], grid.shape[0]), *grid.shape[1:]]
    chunk = [1] * len(extent)
    for axis in reversed(range(len(extent))):
        n, most = extent[axis], max(1, TARGET // (math.prod(chunk) * itemsize))
        if axis == 0 and grid.counts[0] == 1:  # the only shard may be rounded up
            chunk[0] = -(-n // -(-n // most))
        elif most >= n:
            chunk[axis] = n
        else:
            chunk[axis] = min(divisors(n), key=lambda d: abs(math.log(d / most)))
            break
    shard = tuple(-(-n // c) * c for n, c in zip(extent, chunk, strict=True))
    return ChunkGrid(grid.shape, shard, tuple(chunk))


def is_dual_grid(grid: ChunkGrid) -> bool:
    """Whether the chunks of each shard follow one another in row-major order, and a shard is whole rows."""
    inner = next((i for i, c in enumerate(grid.chunk) if c > 1), len(grid.chunk))
    whole = all(
        c == s == n
        for c, s, n in zip(grid.chunk[inner + 1 :], grid.shard[inner + 1 :], grid.shape[inner + 1 :], strict=True)
    )
    return bool(grid.shape) and 0 not in grid.shape and whole and grid.shard[1:] == grid.shape[1:]


class DualShard(NamedTuple):
    """All of a file but its rows: ``head`` without its checksums, the bytes of the rows, and ``tail``, the tensor `INDEX`."""

    head: bytes
    rows: int
    tail: bytes

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.rows + len(self.tail)

    def sealed(self, value: int) -> bytes:
        """The header, where ``value`` is the crc32c of the rows."""
        return tensor_sums.sealed(self.head, [value, crc32c(np.frombuffer(self.tail, np.uint8))])


@lru_cache(maxsize=1 << 12)
def dual_shard(name: str, dtype: np.dtype, grid: ChunkGrid, coord: tuple[int, ...]) -> DualShard:
    """The file of a shard."""
    place = place_of(grid, coord, dtype.itemsize)
    unit, count = math.prod(grid.chunk) * dtype.itemsize, math.prod(place.present)
    rows = place.box.size * dtype.itemsize
    padding = count * unit - rows
    length = padding + math.prod(grid.chunks_in_shard) * 16 + 4
    free = {"format": "pt", tensor_sums.KEY: tensor_sums.text([0, 0, 0])}
    if place.box.shape != grid.shape:
        free["meshtape.block"] = json.dumps({"offset": place.box.offset, "of": grid.shape})
    top = {
        "__metadata__": free,
        name: {"dtype": dtypes.safetensors_name(dtype, name), "shape": place.box.shape, "data_offsets": (0, rows)},
        INDEX: {"dtype": "U8", "shape": (length,), "data_offsets": (rows, rows + length)},
    }
    text = json.dumps(top, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    table = np.full((*grid.chunks_in_shard, 2), _ABSENT, "<u8")
    where = tuple(map(slice, place.present))
    table[(*where, 0)] = (len(head) + unit * np.arange(count, dtype="<u8")).reshape(place.present)
    table[(*where, 1)] = unit
    return DualShard(head, rows, bytes(padding) + table.tobytes() + crc32c(table).to_bytes(4, "little"))
