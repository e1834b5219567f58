"""A checkpoint of ours that another program wrote to after it was saved: zarr and xarray append to its arrays and add
others, of which its manifest knows nothing."""

from __future__ import annotations

from typing import Any

from ...arrays.core.errors import CorruptCheckpoint
from ..base import strict_json
from ..base.checksums import crc32c
from ..commit.protocol import protocol_of
from ..format import manifest
from ..stores import store as stores

MOST = 64
"""Arrays of a checkpoint whose group is compared, which takes one read more: of more its file is long, and those are
models, to which nobody appends."""


def refuse_changed(root: str, held: manifest.Manifest) -> None:
    """Raise `CorruptCheckpoint` where Zarr's own files tell of other arrays than the manifest does.

    That of the group is read always, as both write it with the arrays', and those of the arrays where it has changed.
    Attributes may change, and what cannot be read is for `meshtape.verify` to say.
    """
    if held.zarr is None or len(held.arrays) > MOST:
        return
    # In an object store the group's file of a checkpoint that replaces another comes after its manifest, and before its
    # claim goes.
    if _changes(root, held) and not protocol_of(root).is_begun(root) and (changed := _changes(root, held)):
        raise CorruptCheckpoint(
            f"{root}: another program wrote to its Zarr files after it was saved, and {manifest.FILE} does not know "
            f"of it: {'; '.join(changed[:8])}. Its chunks are no longer all checked: read it with zarr or xarray, and "
            f"save that; or delete {manifest.FILE}, and it opens as a Zarr hierarchy of another writer"
        )


def _changes(root: str, held: manifest.Manifest) -> list[str]:
    group, text = _node(root, "zarr.json")
    if not text or crc32c(text) == held.zarr:
        return []
    changed = []
    own = {e.directory: e for e in held.arrays if e.packs is None}
    for directory, entry in own.items():
        node, text = _node(root, f"{directory}/zarr.json")
        shape = node.get("shape")
        if entry.zarr not in (None, crc32c(text)) and isinstance(shape, list) and tuple(shape) != entry.shape:
            changed.append(f"array {entry.name!r} has the shape {tuple(shape)} there, {entry.shape} when it was saved")
    inline = group.get("consolidated_metadata")
    nodes = inline.get("metadata") if isinstance(inline, dict) else None
    if isinstance(nodes, dict):
        added = [n for n, node in nodes.items() if isinstance(node, dict) and node.get("node_type") == "array"]
        changed += [f"array {n!r} is new" for n in added if n not in own]
    return changed


def _node(root: str, file: str) -> tuple[dict[str, Any], bytes]:
    try:
        text = stores.at(root).get(file)
        node = strict_json.loads(text)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}, b""
    return (node, text) if isinstance(node, dict) else ({}, b"")
