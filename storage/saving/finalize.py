"""The end of a save: documents, Zarr's metadata and the manifest, after the check that every shard was written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays.backends.collector import no_collections
from ...arrays.core.errors import CheckpointError
from ..base.checksums import crc32c
from ..base.threads import SYNCS, in_threads
from ..format import chunk_sums, manifest
from ..format.chunk_grid import place_of
from ..format.compression import fits
from ..format.documents import marked
from ..format.zarr_format import array_metadata, group_metadata
from ..stores import atomic_directory, store
from . import dual
from .items import Record, SaveItem


@no_collections()
def finish_directory(
    folder: atomic_directory.Folder,
    target: str,
    head: manifest.Manifest,
    items: list[SaveItem],
    records: Sequence[Record],
    documents: Mapping[str, bytes],
) -> int:
    """Make shards a checkpoint: write documents, Zarr's metadata, then the manifest; returns the directory's bytes."""
    head.packs = list(dict.fromkeys(r.pack for r in records if r.pack is not None))
    head.arrays, table = _entries(items, records, head.packs)
    if table:
        head.sums = marked(chunk_sums.FILE, folder.suffix)
        folder.put(head.sums, table)
    head.documents = {name: (crc32c(data), marked(name, folder.suffix)) for name, data in documents.items()}
    for name, data in documents.items():
        folder.put(marked(name, folder.suffix), data)
    nbytes = (
        sum(r.nbytes for r in records if r.pack is None)
        + sum(p.nbytes for p in head.packs)
        + len(table)
        + sum(map(len, documents.values()))
        + _write_metadata(folder, items, head)
    )
    nbytes += dual.write(folder, head)
    data = head.dumps(check=store.join(target, manifest.FILE))  # never commit what could not be read again
    folder.put(manifest.FILE, data)
    folder.settle()
    return nbytes + len(data)


def _entries(
    items: list[SaveItem], records: Sequence[Record], packs: list[manifest.Pack]
) -> tuple[list[manifest.ArrayEntry], bytes]:
    """Manifest rows and the table of checksums, after the check that every shard was written once, at its full
    length."""
    written: dict[str, Record] = {}
    for r in records:
        if r.file in written:
            raise CheckpointError(f"shard {r.file} was written twice; the hosts of the mesh disagree about its blocks")
        written[r.file] = r
    entries, lost = [], []
    table = bytearray()
    numbers = {pack: i for i, pack in enumerate(packs)}
    if len({p.file for p in packs}) != len(packs):
        raise CheckpointError("two ranks wrote one pack; the hosts of the mesh disagree about its blocks")
    for item in items:
        rows: list[Any] = []
        first = len(table)
        grid, itemsize = item.grid, item.dtype.itemsize
        for coord in grid.shards():
            place = place_of(grid, coord, itemsize)
            key, box = place.key, place.box
            record = written.pop(f"{item.directory}/{key}", None)
            if item.packed and record is not None and record.nbytes == place.size * itemsize:
                crc = f"{record.crc32c:08x}"
                rows.append((numbers[record.pack], box.offset, box.shape, record.nbytes, crc, record.start))
                continue
            whole = item.dual and record is not None and record.nbytes == item.most(coord)
            if record is None or not (whole or fits(record.nbytes, grid, coord, itemsize, item.compression)):
                lost.append(f"{item.name} {key}")
                continue
            rows.append((key, box.offset, box.shape, record.nbytes, f"{record.crc32c:08x}"))
            if chunk_sums.has_section(grid):
                table += record.sums
        sharding = None if item.sharding is None else [str(t) for t in item.sharding.describe()]
        sums = (first // 4, crc32c(bytes(table[first:]))) if len(table) > first else None
        directory, of = ("", packs) if item.packed else (item.directory, None)
        own = item.path, directory, grid, item.dtype, item.mesh, sharding, rows, manifest.FILE, item.compression
        entries.append(manifest.ArrayEntry(*own, sums, None, of, item.dual, item.base is not None, item.name))
    if lost or written:
        raise CheckpointError(
            f"the ranks did not write {lost[:8]}, and wrote {sorted(written)[:8]} unasked; nothing was saved"
        )
    return entries, bytes(table)


def _write_metadata(folder: atomic_directory.Folder, items: list[SaveItem], head: manifest.Manifest) -> int:
    """Zarr's own files, and the sync of every directory; the manifest is told their checksums."""
    held = [i for i in items if not i.packed]
    texts = {
        i.directory: array_metadata(
            i.grid, i.dtype, i.name, i.compression, i.raw, i.dual, i.said, None if i.base is None else head.base
        )
        for i in held
    }

    def write(directory: str) -> None:
        folder.put(f"{directory}/zarr.json", texts[directory])
        folder.settle(directory)

    in_threads(write, list(texts), SYNCS, alone=True)
    group = group_metadata(head.version, texts, [p.file for p in head.packs], head.attributes)
    folder.put("zarr.json", group)
    head.zarr = crc32c(group)
    for entry in head.arrays:
        entry.zarr = crc32c(texts[entry.directory]) if entry.packs is None else None
    folder.settle()
    return len(group) + sum(map(len, texts.values()))
