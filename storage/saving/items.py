"""Items, tasks and records of a save: an array, a shard to write, and a shard that was written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays.core.blocks import BlockSharding, Box
from ...arrays.core.tree import Path
from ..base import names
from ..format.chunk_grid import ChunkGrid
from ..format.compression import Compression, most_nbytes
from ..format.stored_objects import Pack
from ..format.zarr_format import dual_shard


@dataclass(slots=True)
class SaveItem:
    """One array of the tree on its way to disk."""

    path: Path
    array: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: BlockSharding | None
    grid: ChunkGrid
    directory: str = ""
    mesh: int | None = None
    compression: Compression = None
    packed: bool = False
    raw: bool = False  # see ``array_metadata``
    like: str = ""  # a folder of an array with the same grid, dtype and compression, whose files may be shared
    dual: bool = False  # see ``zarr_format``
    said: str = ""  # see ``array_metadata``

    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = names.leaf_name(self.path)
        if not self.shape:  # a bare chunk of a few bytes
            self.compression = None

    @property
    def stored_nbytes(self) -> int:
        """Bytes of its files; with compression, the most that they can have."""
        if self.packed:
            return math.prod(self.shape) * self.dtype.itemsize
        return sum(self.most(c) for c in self.grid.shards())

    @property
    def whole(self) -> bool:
        """Whether its files can only be written from their first byte to their last."""
        return self.compression is not None or self.dual

    @property
    def least_nbytes(self) -> int:
        """Bytes that its files will surely need."""
        return self.stored_nbytes if self.compression is None and not self.like else 0

    def most(self, coord: tuple[int, ...]) -> int:
        """Bytes of the file of a shard; with compression, the most that it can have."""
        if self.dual:
            return dual_shard(self.name, self.dtype, self.grid, coord).nbytes
        return most_nbytes(self.grid, coord, self.dtype.itemsize, self.compression)


@dataclass(slots=True)
class Task:
    """One shard to write: which array of the call, which part of the rank's block, and the file's place in the grid."""

    array: int
    part: Box
    grid: ChunkGrid
    coord: tuple[int, ...]
    file: str
    compression: Compression = None
    name: str | None = None  # of a packed array
    pack: str = ""  # the file in which it lies with others
    like: str = ""  # a file to share where it has the same bytes
    dual: str | None = None  # the name of an array of layout "dual"


@dataclass(slots=True)
class Record:
    """One shard written."""

    file: str
    nbytes: int
    crc32c: int
    sums: bytes  # of its chunks, in order (see ``chunk_sums``)
    pack: Pack | None = None  # in which it lies, and from which byte on
    start: int = 0
    shared: bool = False  # with an earlier checkpoint
