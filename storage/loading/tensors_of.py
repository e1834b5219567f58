"""The tensors of an entry of a manifest, of a safetensors file, and of the folder of an array of layout "dual"."""

from __future__ import annotations

import warnings
from typing import Any

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CorruptCheckpoint, NotACheckpoint
from ..base import strict_json
from ..foreign import dcp_safetensors
from ..format import dtypes, manifest, tensor_sums
from ..format.chunk_grid import ChunkGrid
from ..format.chunk_sums import StoredSums
from ..format.zarr_format import DUAL_INDEX, described
from ..readers import safetensors
from ..readers.compressed import CompressedTensor
from ..readers.dual_tensor import DualTensor
from ..readers.packed import PackedBlocks
from ..readers.raw_tensor import PackedTensor, RawTensor
from ..readers.tensor import ChunkedTensor, StoredTensor
from ..stores import store as stores
from . import deltas


def entry(root: str, e: manifest.ArrayEntry, table: str | None, verify: bool) -> ChunkedTensor:
    """The array of an entry, whose list of objects is checked only when it is read."""
    held = (root, e.name, deltas.unsigned(e.dtype) if e.delta else e.dtype, e.grid, e, verify)
    if e.packs is not None:
        return PackedBlocks(*held)
    sums = None if e.sums is None else StoredSums(root, table or "", e.sums, e.grid, e.name)
    if e.dual:
        return DualTensor(*held, sums)
    if e.compression is not None:
        return CompressedTensor(*held, sums, compression=e.compression)
    return ChunkedTensor(*held, sums)


def file(
    path: str, verify: bool, listed: str | None = None
) -> tuple[dict[str, StoredTensor], dict[str, str], dict[str, Any]]:
    """The tensors of a file, its metadata, and the attributes of the Zarr group that it was. ``listed``: the checksums
    that an index has for it."""
    header = safetensors.read_header(path, verify=verify)
    sums = header.sums or {}
    if listed is not None and verify:
        try:
            head, *held = tensor_sums.values(listed, 1 + len(header.tensors))
            if head != header.sum or (sums and held != list(sums.values())):
                raise ValueError("its checksums are not those of the index: it is of another save")
        except ValueError as e:
            raise CorruptCheckpoint(f"{path}: {e}") from None
        sums = dict(zip(header.tensors, held, strict=True))
    said = _said(path, header.metadata.pop(safetensors.ATTRIBUTES, None))
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(header.tensors):
        t = header.tensors[name]
        if name == DUAL_INDEX and t.dtype == "U8" and len(header.tensors) == 2:
            continue  # of the layout "dual", for readers of Zarr alone
        row, place = dtypes.SAFETENSORS[t.dtype], header.data_start + t.begin
        if row.dtype is not None:
            given = said.get(name)
            text = (
                "" if given is None else described(given.get("attributes"), given.get("dimension_names"), len(t.shape))
            )
            held = (path, name, t.shape, row.dtype, place, header.file_nbytes, sums.get(name))
            tensors[name] = RawTensor(*held, said=text)
        else:
            held = (path, name, t.shape, dtypes.PACKED[t.dtype], place, header.file_nbytes, sums.get(name))
            tensors[name] = PackedTensor(*held, nbytes=t.nbytes)
    group = said.get("", {}).get("attributes")
    return tensors, header.metadata, group if isinstance(group, dict) else {}


def _said(path: str, text: str | None) -> dict[str, dict[str, Any]]:
    """Attributes by other writers that an export has carried along, by name."""
    try:
        said = {} if text is None else strict_json.loads(text)
        if not isinstance(said, dict) or not all(isinstance(v, dict) for v in said.values()):
            raise ValueError("it is no object of objects")
        return said
    except (ValueError, RecursionError) as e:
        warnings.warn(f"{path}: its entry {safetensors.ATTRIBUTES!r} cannot be read: {e}", stacklevel=6)
        return {}


def dual_folder(root: str, key: str, array: Any, verify: bool) -> StoredTensor | None:
    """An array of layout "dual" at its folder, None of all others: its chunks have no checksums of their own. Those of
    the manifest count, which lies beside the folder; without it, those of whole shards in their headers."""
    form = getattr(array.metadata, "chunk_key_encoding", None)
    above, directory = stores.split(root)
    if array.shards is None or getattr(form, "separator", "") != "." or not directory:
        return None
    if (m := manifest.read(above)) is not None:
        return next((entry(above, e, m.sums, verify) for e in m.arrays if e.dual and e.directory == directory), None)
    grid = ChunkGrid(tuple(array.shape), tuple(array.shards), tuple(array.chunks))
    parts: list[tuple[Box, RawTensor]] = []
    for coord in grid.shards():
        try:
            tensors, _, _ = file(stores.join(root, grid.key(coord)), verify)
        except (CorruptCheckpoint, NotACheckpoint):
            return None
        (held,) = tensors.values() if len(tensors) == 1 else [None]
        if not isinstance(held, RawTensor) or held.shape != grid.shard_box(coord).shape:
            return None
        parts.append((grid.shard_box(coord), held))
    return dcp_safetensors.TiledTensor(key, grid.shape, parts[0][1].dtype, tuple(parts)) if parts else None
