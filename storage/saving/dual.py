"""Layout "dual" of a save: its choice, the bytes of a file (see ``zarr_format``), and the index by which Hugging Face
loaders open the directory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError, CheckpointKeyError
from ..base.checksums import combine, crc32c
from ..format import dtypes, manifest
from ..format.chunk_grid import ChunkGrid
from ..format.zarr_format import DUAL_INDEX, chunk_coords, dual_grid, dual_shard
from ..readers.dual_tensor import hugging_face_form
from ..stores import store
from ..stores.atomic_directory import Folder
from ..stores.filesystem import active
from .items import SaveItem


def is_dual(given: Mapping[str, Any]) -> bool:
    """Whether a save is of layout "dual"; `CheckpointError` for another layout, or one with options that do not go with
    it."""
    layout = given.get("layout")
    if layout not in (None, "dual"):
        raise CheckpointError(f'layout={layout!r} is unknown; give "dual" or None')
    for name in ("compression", "pack", "base", "anchor_every"):
        if layout is not None and given.get(name):
            raise CheckpointError(
                f"layout='dual' stores rows as they are, each array in files of its own: leave out {name}="
            )
    return layout is not None


def choose_dual(item: SaveItem) -> None:
    """Mark an array as of layout "dual". One without a dimension or an element has no shard; it stays as it is."""
    dtypes.safetensors_name(item.dtype, f"key {item.name!r}")
    if item.name in (DUAL_INDEX, "__metadata__"):
        raise CheckpointKeyError(f"a tensor cannot be named {item.name!r}: files of layout='dual' reserve that name")
    try:
        item.name.encode()
    except UnicodeEncodeError as e:
        raise CheckpointKeyError(f"a name holds half of a surrogate pair, which safetensors cannot hold: {e}") from None
    if item.shape and math.prod(item.shape):
        item.grid = dual_grid(item.grid, item.dtype.itemsize, item.name)
        item.dual = True


class DualBytes:
    """As `ShardBytes`: when all `batches` are gone, ``nbytes`` is their length, ``digest`` the crc32c of the rows, and
    ``sums`` that of each chunk.

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


def write(folder: Folder, head: manifest.Manifest) -> int:
    """Write the index, with a second name for each shard, as loaders ask for names that end in ``.safetensors``;
    returns the bytes.

    Object stores have no second names: nothing is written there.
    """
    if store.is_url(folder.root) or (form := hugging_face_form(folder.root, head)) is None:
        return 0
    taken = {a.directory for a in head.arrays} & {*form.links, *form.files}
    if taken:
        raise CheckpointError(f"layout='dual' needs the name {min(taken)!r} for a file of its own; rename that array")
    for link, shard in form.links.items():
        active().link(os.path.join(folder.root, shard), os.path.join(folder.root, link))
    for name, data in form.files.items():
        folder.put(name, data)
    folder.settle()
    return sum(map(len, form.files.values()))
