"""A checkpoint as the keys of a Zarr v3 hierarchy: one array for each name, in chunks without a compressor. Slashes in
names lead into groups.

Tensors are cut into runs of rows, in whole stored chunks, so that the first are sent while the next are read. Where one
row of stored chunks is too large for that, a chunk is a box of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from ...arrays.core.formatting import some
from ..base.names import zarr_paths
from ..checkpoint.checkpoint import Checkpoint, unread
from ..format import dtypes
from ..format.chunk_grid import ChunkGrid, slashed_key, windows
from ..format.zarr_format import own_names
from ..readers.raw_tensor import PackedTensor
from ..readers.tensor import StoredTensor
from ..transform.attributes import attributes_left, held_attributes, that_travel
from ..virtual.identity import pinned
from .virtual_files import LIMIT, ChunkFile, TensorFile, VirtualFile, in_pieces, raw, rows, text_file

_COMPUTED = 4 << 20  # bytes of a chunk that is no run of rows
_KEY = re.compile(r"(?:(.+?)/)?(zarr\.json|c(?:/(?:0|[1-9]\d{0,18}))*)\Z")
FILE = "zarr.json"
GROUP = {"zarr_format": 3, "node_type": "group"}


def grid_node(grid: ChunkGrid) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk)}}


def _node(name: str, tensor: StoredTensor, grid: ChunkGrid, said: str) -> dict[str, Any]:
    """The metadata of an array of plain chunks, with what another writer said of it. A dtype that Zarr has no name for
    is said to be the unsigned integers of its bits."""
    dtype, others = tensor.dtype, json.loads(said or "{}")
    known = dtype.name not in dtypes.NOT_IN_ZARR
    fill: Any = {"b": False, "c": [0.0, 0.0], "f": 0.0}.get(dtype.kind, 0)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(tensor.shape),
        "data_type": dtype.name if known else f"uint{8 * dtype.itemsize}",
        "chunk_grid": grid_node(grid),
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": others.get("attributes", {}) | ({} if known else {"dtype": dtype.name}),
        "dimension_names": others.get("dimension_names", own_names(name, len(tensor.shape))),
    }


def chunks_of(tensor: StoredTensor) -> ChunkGrid:
    """The chunks in which a tensor is shown."""
    shape, item = tensor.shape, tensor.dtype.itemsize
    if 0 in shape or not shape:
        chunk = tuple(max(n, 1) for n in shape)
    else:
        least = TensorFile(tensor).window if raw(tensor) is None else (1,) * len(shape)
        chunk = rows(shape, least, item, LIMIT)
        if not in_pieces(tensor, chunk):
            chunk = next(windows(shape, tensor.chunk, item, _COMPUTED)).shape
    return ChunkGrid(shape, chunk, chunk)


class ZarrView:
    """The keys of a checkpoint and the file of each. ``skipped``: names of packed bits, which have no form in Zarr."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self.ckpt = ckpt
        pinned(ckpt)
        shown = {n: a.tensor for n, a in ckpt.arrays.items() if not isinstance(a.tensor, PackedTensor)}
        why = {**ckpt.skipped, **{n: "packed bits" for n in ckpt.arrays if n not in shown}}
        self.skipped = list(why)
        told = [f"{ckpt.path} is shown without what cannot be read{unread(why)}"] if why else []
        said, self._attributes = held_attributes(ckpt, shown, [])
        self.tensors = dict(zip(zarr_paths(list(shown)), shown.values(), strict=True))
        self.grids = {d: chunks_of(t) for d, t in self.tensors.items()}
        arrays = {
            d: _node(n, t, self.grids[d], said.get(n, ""))
            for n, (d, t) in zip(shown, self.tensors.items(), strict=True)
        }
        groups: dict[str, Any] = {d[:i]: GROUP for d in arrays for i, c in enumerate(d) if c == "/"}
        given = {"": ckpt.group, **ckpt.groups} if ckpt.whole else {}
        kept = {name: that_travel(a) for name, a in given.items()}
        for name, attributes in kept.items():
            folder = zarr_paths([f"{name}/x"])[0].removesuffix("/x")
            groups |= {folder: {**GROUP, **({"attributes": attributes} if attributes else {})}} if name else {}
        gone = {name or "the group": [k for k in a if k not in kept[name]] for name, a in given.items()}
        left = [f"{name} ({', '.join(keys)})" for name, keys in gone.items() if keys] + attributes_left(shown, said)
        if left:
            told.append(f"{ckpt.path} is shown without attributes that are no JSON, or above 64 KiB: {some(left, 4)}")
        self.lost = "\n".join(told)
        # By depth, and children of a group beside each other: zarr-python reads consolidated metadata so.
        self.nodes = dict(sorted((groups | arrays).items(), key=lambda node: (node[0].count("/"), node[0])))

    @cached_property
    def group(self) -> dict[str, Any]:
        """The metadata of the group, with that of its arrays inside ("consolidated")."""
        said = {"step": self.ckpt.step, "skipped": self.skipped}
        inside = {"kind": "inline", "must_understand": False, "metadata": self.nodes}
        return {
            **GROUP,
            "attributes": {**self._attributes, **{k: v for k, v in said.items() if v not in (None, [])}},
            "consolidated_metadata": inside,
        }

    def find(self, key: str) -> VirtualFile | None:
        """The file of a key, or None where there is none."""
        found = _KEY.match(key)
        if found is None:
            return None
        folder, name = found.groups()
        if name == FILE:
            text = self.group if folder is None else self.nodes.get(folder)
            return None if text is None else text_file(json.dumps(text).encode())
        tensor, grid = self.tensors.get(folder), self.grids.get(folder)
        coord = tuple(map(int, name.split("/")[1:]))
        if tensor is None or grid is None or len(coord) != len(grid.shape):
            return None
        if not all(i < n for i, n in zip(coord, grid.counts, strict=True)):
            return None
        return self.chunk(folder, coord)

    def chunk(self, folder: str, coord: tuple[int, ...]) -> VirtualFile:
        grid = self.grids[folder]
        return ChunkFile(self.tensors[folder], grid.shard_box(coord), grid.chunk)

    def every_key(self) -> Iterator[str]:
        """All keys, array by array."""
        yield FILE
        for folder in self.nodes:
            yield f"{folder}/{FILE}"
            if folder in self.grids:
                yield from (f"{folder}/{slashed_key(c)}" for c in self.grids[folder].shards())

    def names(self, folder: str) -> tuple[str, ...]:
        """The metadata and the nodes of a folder, to list; empty where there is no such folder."""
        start = f"{folder}/" if folder else ""
        below = (n.removeprefix(start) for n in self.nodes if n.startswith(start))
        return (FILE, *(f"{n}/" for n in below if "/" not in n)) if not folder or folder in self.nodes else ()
