"""Zarr hierarchies by others as checkpoints: which arrays there are, by the arrays' own metadata.

Consolidated metadata are a copy that nobody renews when an array is made anew, appended to, added or removed. A
directory is opened without them. Where each file is a request, they are taken at first, and each read compares them
with the array's own (`ZarrTensor`).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from ...arrays.core.errors import CheckpointDTypeError, CorruptCheckpoint, IncompleteCheckpoint, StoreError
from ...arrays.core.formatting import count, some
from ..base import strict_json
from ..base.malformed import malformed
from ..checkpoint.checkpoint import Checkpoint, flat
from ..foreign import icechunk
from ..format import manifest
from ..format.zarr_format import GROUP_ATTRIBUTE
from ..readers.tensor import StoredTensor
from ..readers.zarr_tensor import METADATA, of_array, open_array, reason, refused, root_key, zarr_place
from ..stores import icechunk_store
from ..stores import store as stores
from ..stores.contract import Store

_CHUNK = re.compile(r"c|(c[./])?\d+([./]\d+)*")  # names of chunks in the folder of an array


def _is_array(metadata: bytes) -> bool:
    said = strict_json.loads(metadata)
    return isinstance(said, dict) and said.get("node_type") == "array"


def _nodes(store: Store) -> Iterator[str]:
    """The arrays below a Zarr group, by the files that are there."""
    for entry in store.entries(""):
        folder, _, file = entry.name.rpartition("/")
        if file == ".zarray" or (file == "zarr.json" and _is_array(store.get(entry.name))):
            yield folder


def _is_of_others(nodes: Iterable[Any]) -> bool:
    """Whether another program wrote a hierarchy, with attributes that it read from one of ours, as xarray does: files
    of its chunks are in folders, and those of ours are not."""
    written = [n.metadata for n in nodes if hasattr(n, "metadata") and hasattr(n.metadata, "shape")]
    return bool(written) and all(
        getattr(getattr(m, "chunk_key_encoding", None), "separator", "/") == "/" for m in written
    )


def _members(root: str, group: Any) -> dict[str, Any]:
    """The arrays and groups below a group, by name; typed errors for arrays whose metadata are damaged or lost."""
    from ..format.zarr_dtypes import zarr

    held = group.metadata.consolidated_metadata
    listed = dict(group.members(max_depth=None)) if held is not None or not stores.at(root).lists else {}
    if not stores.at(root).lists:
        return listed
    arrays = {n for n, node in listed.items() if isinstance(node, zarr.Array)}
    if stores.is_url(root) and held is not None and _folders(root, listed) == {n for n in listed if n}:
        return listed
    store, place = zarr_place(root)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", zarr.errors.ZarrUserWarning
        )  # of what is no part of it, which is looked at here
        group = zarr.open_group(store, path=place, mode="r", use_consolidated=False)
        found = dict(group.members(max_depth=None, use_consolidated_for_children=False))
    own = METADATA[:1] if group.metadata.zarr_format == 3 else METADATA[1:]
    lost = arrays - found.keys()
    for name in sorted(_folders(root, found) - found.keys()):
        folder = stores.at(stores.join(root, name))
        if any(folder.size(file) is not None for file in own):
            open_array(root, name)  # of which an error says how it is damaged
        elif any(_CHUNK.fullmatch(e.name) for e in folder.entries()):
            lost.add(name)
    if lost:
        raise IncompleteCheckpoint(
            f"{root}: {count(len(lost), 'array')} without metadata ({own[-1]}), of which there are chunks or "
            f"consolidated metadata: {some(sorted(lost))}; restore them, or where they were removed on purpose, remove "
            "their folders and call zarr.consolidate_metadata"
        )
    return found


def _folders(root: str, nodes: dict[str, Any]) -> set[str]:
    """The folders directly below the groups of a hierarchy."""
    groups = ["", *(n for n, node in nodes.items() if not hasattr(node, "shape"))]
    return {f"{g}/{f}".lstrip("/") for g in groups for f in stores.at(stores.join(root, g) if g else root).folders()}


def open_zarr(root: str, verify: bool) -> Checkpoint:
    """A hierarchy, or an array, that is there."""
    from ..format.zarr_dtypes import zarr

    # zarr raises nearly anything where metadata is not what it expects, from any of these steps.
    store, place = zarr_place(root)
    try:
        try:
            node = zarr.open(store, path=place, mode="r") if place else zarr.open(store, mode="r")
        except Exception as e:
            # One array that zarr does not know is enough, where the group's metadata has those of all.
            if not isinstance(refused(str(e)), CheckpointDTypeError):
                raise
            node = zarr.open_group(store, path=place, mode="r", use_consolidated=False)
        attributes = dict(node.attrs)
    except StoreError:  # nothing is known of what is there
        raise
    except Exception as e:
        raise icechunk.nothing_at(root) or refused(f"{root}: zarr cannot open it: {reason(e)}") from e
    versioned = icechunk_store.is_versioned(root)
    if versioned:
        icechunk.look_at_files(root)
    ours = GROUP_ATTRIBUTE in attributes and isinstance(node, zarr.Group)  # of an array it says the true dtype
    tensors: dict[str, StoredTensor] = {}
    skipped: dict[str, str] = {}
    try:
        try:
            found = {"": node} if isinstance(node, zarr.Array) else _members(root, node)
        except Exception as e:
            if not isinstance(refused(str(e)), CheckpointDTypeError) or not stores.at(root).lists:
                raise
            found = dict.fromkeys(_nodes(stores.at(root)))  # one at a time
        if ours and not versioned:
            if not _is_of_others(found.values()):
                raise IncompleteCheckpoint(
                    f"{root} was written by meshtape but {manifest.FILE} is missing: its save did not finish, or the "
                    "file was lost. Load another checkpoint; zarr.open still reads the arrays, unverified, and "
                    "safetensors the packs that its attributes name. Where another program wrote it and kept the "
                    f"attributes of ours, delete its attribute {GROUP_ATTRIBUTE!r}"
                )
            ours = False
            del attributes[GROUP_ATTRIBUTE]
        for name, a in sorted(found.items()):
            if not isinstance(a, zarr.Group):
                try:
                    tensor = open_array(root, name) if a is None else of_array(root, name, a, verify)
                    tensors[name or root_key(root)] = tensor
                except CheckpointDTypeError as e:
                    skipped[name or root_key(root)] = str(e)
        # Tags of the metadata files that zarr itself has read; in an object store only the root's: each is a request.
        for name, file in itertools.product({"", *([] if stores.is_url(root) else found)}, METADATA):
            stores.at(root).tag(f"{name}/{file}" if name else file)
    except (IncompleteCheckpoint, CorruptCheckpoint):
        raise
    except Exception as e:
        if not stores.at(root).lists:
            raise StoreError(
                f"{root} is a Zarr group without consolidated metadata, and HTTP has no lists of files: have it "
                "written there by zarr.consolidate_metadata, or open one array of it"
            ) from None
        with malformed(f"{root}: zarr cannot list it: {e}"):
            for name in _nodes(stores.at(root)):
                with contextlib.suppress(CheckpointDTypeError):
                    open_array(root, name)  # of which an error has the name
        raise CorruptCheckpoint(f"{root}: zarr cannot list it: {e}") from e
    ckpt = flat(root, "Zarr", tensors, attributes, skipped, attributes if "" not in found else {})
    ckpt.groups = {n: dict(a.attrs) for n, a in sorted(found.items()) if isinstance(a, zarr.Group)}
    return icechunk.restored(ckpt, attributes[GROUP_ATTRIBUTE]) if ours else ckpt
