"""`rebase`: a delta is written anew, in its place, as a plain checkpoint or as a delta from another base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...arrays.core.blocks import Box
from ..base import activity, names, strict_json
from ..checkpoint.numbered import Numbered
from ..commit import contents
from ..commit.anchor_lock import still_held
from ..commit.protocol import protocol_of
from ..format import manifest
from ..format.compression import compression_of
from ..format.zarr_format import GROUP_ATTRIBUTE, group_said, said_of
from ..loading.open import open_checkpoint
from ..readers.tensor import read_into
from ..readers.windowed import WindowedBlock
from ..stores import atomic_directory, store
from ..stores.contract import failed
from . import packs, sharing
from .finalize import finish_directory
from .items import DeltaBase, SaveItem, tasks_of
from .write_shards import write_blocks

_FORMER = 16  # identities that are kept: each deletion of a base adds one


@dataclass(frozen=True)
class _Sharding:
    """The texts of a sharding, with the one method of it that the end of a save asks for."""

    texts: list[str]

    def describe(self) -> list[str]:
        return self.texts


def rebase(path: str, base: str | None) -> None:
    """Write a delta anew, all or nothing: a reader finds the old one or the new one. None for ``base`` makes it
    plain."""
    old = open_checkpoint(path)
    assert old.manifest is not None
    items, deltas = [], []
    entries = old.manifest.arrays
    for entry, directory in zip(entries, names.zarr_names([e.name for e in entries]), strict=True):
        tensor = old.arrays[entry.name].tensor
        compression = compression_of(tensor) if entry.delta else entry.compression
        own: Any = entry.path, tensor, entry.shape, entry.dtype, _Sharding(entry.sharding) if entry.sharding else None
        item = SaveItem(*own, entry.grid, directory, entry.mesh, compression, packed=entry.packs is not None)
        if not item.packed:
            node = strict_json.loads(store.at(old.path).get(f"{entry.directory}/zarr.json"))
            item.raw = "dtype" in node.get("attributes", {}).get(GROUP_ATTRIBUTE, {})
            item.said = said_of(node, item.name)
        items.append(item)
        deltas += [item] if entry.delta else []
    documents = {name: old.documents.raw(name) for name in old.documents}
    given = None if base is None else DeltaBase.at(base, path).given_to(deltas)
    group = group_said(strict_json.loads(store.at(old.path).get("zarr.json")))
    metadata = {**old.manifest.metadata, manifest.FORMER: old.manifest.identities[:_FORMER]}
    head = replace(old.manifest, base=given, sums=None, zarr=None, attributes=group, metadata=metadata)
    if not store.is_url(path):
        sharing.match(items, path)
    with (
        activity.under_way("Rewrite", path, sum(i.stored_nbytes for i in items)) as work,
        atomic_directory.writing(path),
        protocol_of(path).replacing(path, overwrite=True, tables=contents.SAVED) as folder,
    ):
        work.root = folder.root
        tasks, blocks = [], []
        for item in items:
            item.directory += folder.suffix
            if not item.packed:
                folder.mkdir(item.directory)
            for task in tasks_of(0, item):
                box = item.grid.shard_box(task.coord)
                block = WindowedBlock(item.array, box, item.grid.chunk, 0)
                tasks.append(replace(task, array=len(blocks), part=Box.whole(box.shape)))
                blocks.append(read_into(item.array, box)[0] if item.packed else block)
        tasks = packs.dealt(tasks, [b.dtype.itemsize for b in blocks], "local", folder.suffix)
        records = write_blocks({0: (folder.root, tasks)}, {0: blocks})
        old.generation.check()
        finish_directory(folder, path, head, items, records, documents)
        folder.commit()


def release(path: str, complete: Sequence[Numbered]) -> None:
    """Give the deltas of a checkpoint, which is to go, another base: the first step becomes plain, and that of the
    others. Copies of deltas in folders beside become plain."""
    needing = [c.path for c in complete if c.base_path == path]
    for c in needing:
        rebase(c, None if c == needing[0] else needing[0])
    for name in copies(path):
        rebase(store.join(store.split(path)[0], name), None)


def copies(path: str) -> list[str]:
    """The folders with deltas from a plain checkpoint, which nobody could read without it."""
    held = manifest.read(path)
    return [] if held is None or held.base is not None else contents.deltas_from(path, held.identity)


def taken_out(c: Numbered, directory: str) -> str:
    """Delete a checkpoint that rotation takes, in a folder that is locked; returns why it stays, where it does."""
    try:
        if strangers := contents.beside(c.path):
            return f"kept {c.path}, which holds {strangers[0]}: no manifest lists it"
        if c.base is None and (needing := copies(c.path)):
            return f"kept {c.path}: {needing[0]} is a delta from it"
        if still_held(directory):
            protocol_of(c.path).discard(c.path)
    except FileNotFoundError:
        pass  # another process rotates the same directory
    except OSError as e:  # no error of the save, which is complete
        return str(failed(e, f"rotation cannot remove {e.filename or c.path}"))
    return ""
