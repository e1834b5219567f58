"""Items, tasks and records of a save: an array, a shard to write, and a shard that was written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays.core.blocks import BlockSharding, Box
from ...arrays.core.errors import CheckpointError, CheckpointKeyError
from ...arrays.core.tree import Path
from ..base import names
from ..checkpoint.checkpoint import Checkpoint
from ..format.chunk_grid import ChunkGrid, cells, only_shard, place_of
from ..format.compression import Compression, PackedZstd, ShuffledZstd, most_nbytes
from ..format.manifest import Base
from ..format.stored_objects import Pack
from ..format.zarr_format import dual_shard
from ..loading.deltas import base_of
from ..loading.open import open_checkpoint
from ..stores import store


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
    base: Any = None  # the tensor from which the array is a delta

    name: str = ""  # that of its path

    def __post_init__(self) -> None:
        self.name = self.name or names.leaf_name(self.path)
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

    def most(self, coord: tuple[int, ...]) -> int:
        """Bytes of the file of a shard; with compression, the most that it can have."""
        if self.dual:
            return dual_shard(self.name, self.dtype, self.grid, coord).nbytes
        return most_nbytes(self.grid, coord, self.dtype.itemsize, self.compression)


def sizes_of(items: Iterable[SaveItem]) -> tuple[int, int]:
    """Bytes that the files of items will have at most, and those that they will surely need."""
    most = surely = 0
    for item in items:
        nbytes = item.stored_nbytes
        most += nbytes
        surely += nbytes if item.compression is None and not item.like else 0
    return most, surely


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """The checkpoint from which arrays become deltas, and its entry in the manifest of those."""

    ckpt: Checkpoint
    entry: Base
    plain: list[tuple[SaveItem, Compression]] = field(default_factory=list)  # items, and how they would be stored

    @classmethod
    def at(cls, where: str, target: str) -> DeltaBase:
        """The base at a place, opened, for a checkpoint at another."""
        home, name = store.split(where)
        if where == target or home != store.split(target)[0]:
            raise CheckpointError(f"base={where} is no other checkpoint in the folder of {target}")
        ckpt = open_checkpoint(where)
        if ckpt.manifest is None or ckpt.base is not None:
            raise CheckpointError(f"base={where} is a delta itself, or none of mt.save: deltas have a plain base")
        return cls(ckpt, Base(name, ckpt.manifest.identity))

    def given_to(self, items: Iterable[SaveItem]) -> Base | None:
        """Make arrays that the base has, too, deltas; gives the entry, or None where there are none."""
        items = list(items)
        self.plain.extend((item, item.compression) for item in items)
        found = False
        for item in items:
            item.base = None if item.packed else base_of(self.ckpt, item.name, item.shape, item.dtype)
            if item.base is not None:
                item.compression, found = PackedZstd() if item.dtype.itemsize == 2 else ShuffledZstd(), True
        return self.entry if found else None

    def taken_back(self) -> None:
        """Make the deltas plain arrays again."""
        for item, compression in self.plain:
            item.base, item.compression = None, compression


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
    base: Any = None  # the tensor from which the array is a delta


def refuse_taken(items: Iterable[SaveItem], documents: Iterable[str]) -> None:
    """Raise `CheckpointKeyError` where a document would have the name of the folder of an array."""
    folders = {item.directory.casefold(): item.name for item in items}
    for file in documents:
        if name := folders.get(file.casefold()):  # some disks tell no cases apart
            told = f"a document cannot be named {file!r}: the folder of the array {name!r} has that name"
            raise CheckpointKeyError(f"{told}; choose another for either")


def tasks_of(number: int, item: SaveItem, block: Box | None = None) -> Iterator[Task]:
    """The shards that make up one block, or all."""
    grid, itemsize = item.grid, item.dtype.itemsize
    name, dual = item.name if item.packed else None, item.name if item.dual else None
    for coord in grid.shards() if block is None or only_shard(grid) is not None else cells(block, grid.shard):
        place = place_of(grid, coord, itemsize)
        part = place.box if block is None else place.box.within(block)
        like = os.path.join(item.like, place.key) if item.like else ""
        base = None if item.base is None else item.base.only(place.box)
        file = f"{item.directory}/{place.key}"
        yield Task(number, part, grid, coord, file, item.compression, name, "", like, dual, base)


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
