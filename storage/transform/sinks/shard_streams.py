"""Shard files written from their first byte to their last: uploads, compressed shards and those of layout "dual".

A chunk that is compressed has no place before those before it are known. So such a shard is one window of a transfer,
whatever its length; it passes through memory in smaller ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.core.blocks import Box
from ....arrays.core.errors import CheckpointError
from ...format.chunk_grid import ChunkGrid, Coord
from ...format.chunk_sums import packed
from ...format.compression import Compression
from ...format.stored_objects import StoredObject
from ...format.zarr_format import ShardBytes, dual_shard
from ...readers.compressed import digest
from ...readers.dual_tensor import DualTensor
from ...readers.reading import opened
from ...readers.windowed import WindowedBlock
from ...rules.lazy_tensors import whole_of
from ...saving.dual import DualBytes
from ...saving.items import Record
from ...stores.filesystem import active
from .copy_chunks import CopiedShard, keeps_bytes
from .sink import read


def shard_of(
    tensor: Any,
    grid: ChunkGrid,
    coord: Coord,
    compression: Compression,
    limit: int,
    threads: int = 1,
    dual: str | None = None,
) -> ShardBytes | CopiedShard | DualBytes:
    """A shard of an array that is filled from a lazy tensor: its chunks as they are stored where they stay the same,
    else made anew.

    ``dual``: the name of an array of that layout, whose tensor is read twice, as the header has the checksum of the
    rows.
    """
    block: Any = WindowedBlock(tensor, grid.shard_box(coord), grid.chunk, limit, read)
    if dual is not None:
        return DualBytes(block, grid, coord, lambda _: None, dual)
    stored = whole_of(tensor)
    if keeps_bytes(stored, grid, tensor.dtype, compression):
        return CopiedShard(stored, grid, coord)
    return ShardBytes(block, grid, coord, compression=compression, threads=threads)


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Whole shards of an array. The sums of a shard are the length of its file, its digest, and those of its chunks."""

    directory: str
    grid: ChunkGrid
    dtype: np.dtype
    compression: Compression
    limit: int
    threads: int = 1  # that compress
    dual: str | None = None  # the name of an array of layout "dual"

    def _path(self, root: str, coord: Coord) -> str:
        return os.path.join(root, self.directory, self.grid.key(coord))

    def put(self, root: str, window: Box, tensor: Any) -> list[int]:
        fs, coord = active(), self.grid.shard_at(window)
        shard = shard_of(tensor, self.grid, coord, self.compression, self.limit, self.threads, self.dual)
        path = self._path(root, coord)
        for _ in range(8):
            # In place of what an interrupted run has left. A task that a lost worker left behind may be at the same.
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(path)
            with contextlib.suppress(FileExistsError):
                fs.close(fs.write_new(path, shard.batches()))
                return [shard.nbytes, shard.digest, *shard.sums]
        raise CheckpointError(f"{path} keeps appearing: other processes write it")

    def check(self, root: str, window: Box, sums: list[int]) -> bool:
        path = self._path(root, coord := self.grid.shard_at(window))
        if not os.path.exists(path) or len(sums) < 2:
            return False
        if self.dual is not None:
            file = f"{self.directory}/{self.grid.key(coord)}"
            start = len(dual_shard(self.dual, self.dtype, self.grid, coord).head)
            objects = {coord: StoredObject(file, self.grid.shard_box(coord), *sums[:2], start)}
            held = DualTensor(
                root, self.dual, self.dtype, self.grid, objects, sums={coord: np.asarray(sums[2:], np.uint32)}
            )
            return not any(held.faults(coord))
        with opened(path, "a shard") as reader:
            try:
                value, bad, found = digest(reader, self.grid, coord, sums[0], self.dtype.itemsize)
            except ValueError:
                return False
        return not bad and [value, *found] == sums[1:] and os.path.getsize(path) == sums[0]

    def sync(self, root: str, window: Box, sums: list[int]) -> Record:
        """Make a shard durable."""
        fs, coord = active(), self.grid.shard_at(window)
        with fs.opened(self._path(root, coord)) as fd:
            fs.fsync(fd)
        return Record(f"{self.directory}/{self.grid.key(coord)}", *sums[:2], packed(sums[2:]))


def pieces_of(shard: ShardBytes | CopiedShard | DualBytes, stream: Any) -> Iterator[Any]:
    """The bytes of a shard, for a `sinks.Stream`, which is told their length and checksums at the end."""
    yield from itertools.chain.from_iterable(shard.batches())
    stream.nbytes, stream.digest = shard.nbytes, [shard.digest, *shard.sums]
