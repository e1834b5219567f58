"""A snapshot of an icechunk repository as a checkpoint: ours with its tree, step and metadata, others' as the Zarr
hierarchies that they are."""

from __future__ import annotations

import base64
import contextlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.errors import IncompleteCheckpoint, NotACheckpoint, StoreError, UnsupportedVersion
from ..base import strict_json
from ..base.checksums import crc32c
from ..base.malformed import malformed
from ..base.names import leaf_name
from ..base.scratch import scratch
from ..checkpoint.checkpoint import Checkpoint, StoredArray
from ..format import manifest
from ..format.chunk_grid import ChunkGrid, slashed_key
from ..format.stored_objects import StoredObject
from ..readers.reading import opened
from ..readers.tensor import ChunkedTensor
from ..readers.zarr_tensor import METADATA
from ..stores import icechunk_store
from ..stores import store as stores

_MOST = 1 << 12  # files behind virtual chunks that each read looks at
_REQUEST = 64  # of them, as long as one in a bucket takes


@dataclass(slots=True, eq=False)
class IcechunkTensor(ChunkedTensor):
    """An array whose chunks are objects with their crc32c behind them. The attribute has the crc32c of each place."""

    node: str = ""
    summed: ClassVar[bool] = True

    @property
    def how(self) -> str:
        return "a Zarr array in a snapshot of an icechunk repository, each chunk with its crc32c"

    @property
    def files(self) -> set[str]:
        return {self.node, "zarr.json"}  # the latter was compared when it was opened

    def index_of(self, number: int, coord: tuple[int, ...]) -> tuple[int, ...]:
        return coord

    def verify_chunk(self, coord: tuple[int, ...]) -> int:
        """Compare a chunk, and the checksum beside it, with that of its place; returns the bytes of its elements."""
        nbytes, path = self.objects[coord].nbytes, self.path(coord)
        with opened(path, f"part of {self.name!r}", self.generation) as reader:
            self.read_stored(reader, path, coord, 0, scratch("check", nbytes))
        return nbytes - 4


def _tensor(root: str, node: str, name: str, dtype: np.dtype, grid: ChunkGrid, sums: str) -> IcechunkTensor:
    held = np.frombuffer(base64.b64decode(sums, validate=True), "<u4")
    if held.size != math.prod(grid.counts):
        raise ValueError(f"the array {node!r} has checksums of {held.size} chunks, not of {math.prod(grid.counts)}")
    nbytes = math.prod(grid.chunk) * dtype.itemsize + 4
    objects = {
        c: StoredObject(f"{node}/{slashed_key(c)}", grid.shard_box(c), nbytes, value)
        for c, value in zip(grid.shards(), held.tolist(), strict=True)
    }
    return IcechunkTensor(root, name, dtype, grid, objects, node=node)


def nothing_at(root: str) -> NotACheckpoint | None:
    """The error for a place in a snapshot where no array and no group lies; None for all others. The first snapshot of
    a repository is empty."""
    if not icechunk_store.is_versioned(root) or any(stores.at(root).size(name) is not None for name in METADATA):
        return None
    place, ref, node = icechunk_store.divide(root)
    what = f"nothing lies at {node!r}" if node else "it is empty, as a new repository is"
    return NotACheckpoint(f"{place}: snapshot {ref} is not a checkpoint: {what}")


def look_at_files(root: str) -> None:
    """Look at the files behind virtual chunks, so that a generation has their tags: a reference need not have any.
    Warns where there are too many for every read to look at them."""
    files = icechunk_store.virtual_files(root)
    if sum(_REQUEST if stores.is_url(f) else 1 for f in files) > _MOST:
        warnings.warn(
            f"{root} refers to {len(files)} files, too many to compare their versions at each read: one that is "
            "replaced meanwhile is noticed only where its references have a time or an ETag",
            stacklevel=6,
        )
        return
    for store, name in map(stores.holding, files):
        with contextlib.suppress(StoreError):  # reads of it will say so
            store.tag(name)


def restored(ckpt: Checkpoint, attribute: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of a save of ours, from the hierarchy and the attribute of its group."""
    where = ckpt.path
    with malformed(f"{where}: the attribute of its group is damaged"):
        text = attribute["checkpoint"]
        if f"{crc32c(text.encode()):08x}" != attribute["crc32c"]:
            raise ValueError("it does not fit its crc32c")
        held = strict_json.loads(text)
        if held["version"] != 1:
            raise UnsupportedVersion(
                f"{where}: its form is {held['version']}, which a later meshtape wrote; this one reads 1"
            )
        arrays: dict[str, StoredArray] = {}
        for path, node, shape, dtype, chunk, sums in held["arrays"]:
            found = ckpt.arrays.get(node)
            if found is None:
                raise IncompleteCheckpoint(f"{where}: the array {node!r} is missing")
            t = found.tensor
            grid = ChunkGrid(tuple(shape), tuple(chunk), tuple(chunk))
            if (t.shape, t.dtype.name, t.chunk) != (grid.shape, dtype, grid.chunk):
                raise ValueError(f"the array {node!r} is {t.dtype.name}{list(t.shape)}, not {dtype}{shape}")
            stored = StoredArray(tuple(path), _tensor(where, node, leaf_name(tuple(path)), t.dtype, grid, sums))
            arrays[stored.name] = stored
        found_at: list[int] = []
        tree = manifest.decoded(held["tree"], (), list(arrays.values()), found_at)
        if sorted(found_at) != list(range(len(arrays))):
            raise ValueError("its tree does not have each array once")
        metadata = manifest.decode_json(held["metadata"])
        nodes = {row[1] for row in held["arrays"]}
        others = {n: "another program wrote it beside the checkpoint" for n in ckpt.arrays if n not in nodes}
        skipped = ckpt.skipped | others
        return Checkpoint(where, "icechunk", arrays, tree, held["step"], metadata, skipped=skipped)
