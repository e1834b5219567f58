"""`verify`: the check of every byte of a checkpoint against its manifest."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ...arrays.core.errors import CorruptCheckpoint
from ...arrays.core.formatting import count, human_bytes
from ..base import names
from ..base.checksums import combine, crc32c
from ..base.scratch import scratch
from ..checkpoint.checkpoint import Checkpoint, unread
from ..format import manifest
from ..format.chunk_sums import StoredSums
from ..format.zarr_format import chunk_coords, group_metadata, shard_index
from ..readers import packed
from ..readers.compressed import CompressedTensor, frames_in
from ..readers.reading import opened, run
from ..readers.tensor import ChunkedTensor
from ..stores import store as stores
from ..stores.contract import Reader
from .open import open_checkpoint
from .verifying_others import verify_others

T = TypeVar("T")

_FILES = ("safetensors", "NumPy", "PyTorch")  # kinds of checkpoints that are one file
_BATCH = 8 << 20  # bytes of one read


@dataclass(frozen=True)
class VerifyReport:
    """Report of `verify`: arrays, files, bytes, seconds.

    ``uncovered`` names files without a checksum, which were not compared; ``skipped`` names arrays that cannot be read.
    """

    path: str
    arrays: int
    files: int
    nbytes: int
    seconds: float
    uncovered: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        arrays, files = count(self.arrays, "array"), count(self.files, "file")
        text = f"{self.path}: {arrays}, {human_bytes(self.nbytes)} in {files}: sound{unread(self.skipped)}"
        if rest := self.uncovered:
            more = f" and {len(rest) - 12} more" if len(rest) > 12 else ""
            text += f"\n  not compared, as nothing has their checksums ({len(rest)}): {', '.join(rest[:12])}{more}"
        return text


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check every stored byte of a checkpoint that has checksums: chunks, indices, lengths and metadata.

    These are a checkpoint of `save`, and safetensors files that meshtape wrote, with their index and documents. The
    report names all other files there, which are not compared.

    Raises
    ------
    CorruptCheckpoint
        Lists every damaged file, with key and chunk where one is damaged.
    IncompleteCheckpoint
        Files are missing; names them.
    CheckpointError
        The checkpoint, or a part of it, has no checksums (safetensors or Zarr by others).

    Examples
    --------
    >>> import tempfile
    >>> from meshtape.storage import save
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> _ = save(where, {"w": np.ones(3)})
    >>> verify(where).files
    1
    """
    started = time.perf_counter()
    ckpt = open_checkpoint(path)
    with ckpt.generation.guarded():
        return _verify(ckpt, stores.location(path), started)


def _verify(ckpt: Checkpoint, given: str, started: float) -> VerifyReport:
    held = ckpt.manifest
    if held is None:
        root = stores.split(ckpt.path)[0] if ckpt.kind in _FILES else ckpt.path
        files, nbytes = verify_others(ckpt, root)
        rest = [] if ckpt.kind in _FILES and given == ckpt.path else _others(root, files)
        return VerifyReport(
            ckpt.path, len(ckpt), len(files), nbytes, time.perf_counter() - started, rest, list(ckpt.skipped)
        )
    tensors = [a.tensor.whole() for a in ckpt.arrays.values()]
    with stores.listed_once():
        for t in tensors:
            t.check()
    faults: list[str] = []
    small = [t for t in tensors if isinstance(t, packed.PackedBlocks)]
    jobs = [
        lambda t=t, c=c: _check_object(t, c, faults)
        for t in tensors
        if not isinstance(t, packed.PackedBlocks)
        for c in t.objects
    ]
    jobs += packed.check(ckpt.path, held.packs, small, faults)
    nbytes = run(jobs, max((t.readers for t in tensors), default=1))
    nbytes += sum(_check_metadata(ckpt.path, held, faults))
    # Each is checked when it is read.
    reads: list[Callable[[], int]] = [lambda name=name: len(ckpt.documents.raw(name)) for name in ckpt.documents]
    reads += [t.sums.check for t in tensors if isinstance(t.sums, StoredSums)]
    for read in reads:
        try:
            nbytes += read()
        except CorruptCheckpoint as e:
            faults.append(str(e))
    if faults:
        shown = "\n  ".join(sorted(faults)[:20])
        raise CorruptCheckpoint(f"{ckpt.path}: {len(faults)} damaged files:\n  {shown}")
    ckpt.generation.check()
    known = {manifest.FILE, "zarr.json", held.sums, *(a.directory for a in held.arrays), *(p.file for p in held.packs)}
    rest = _others(ckpt.path, known | {file for _, file in held.documents.values()})
    count, seconds = len(jobs) + len(ckpt.documents), time.perf_counter() - started
    return VerifyReport(ckpt.path, len(tensors), count, nbytes, seconds, rest)


def _others(root: str, compared: Container[str | None]) -> list[str]:
    """Entries at the top of a checkpoint's directory that were not compared; none for a server without lists."""
    store = stores.at(root)
    if not store.lists:
        return []
    return sorted(n for n in store.files() if n not in compared) + [
        f"{f}/" for f in store.folders() if f not in compared
    ]


def _check_metadata(root: str, held: manifest.Manifest, faults: list[str]) -> Iterator[int]:
    """Zarr's own files, from which others read the arrays; gives the length of each.

    A manifest of an earlier version does not know their checksums: then only their presence is checked.
    """
    texts: dict[str, bytes] = {}
    for entry in held.arrays:
        if entry.packs is not None:
            continue
        file = f"{entry.directory}/zarr.json"
        text = texts[entry.directory] = _text(root, file, faults)
        if text and entry.zarr not in (None, crc32c(text)):
            faults.append(f"{stores.join(root, file)} (key {entry.name!r}) does not fit its crc32c")
        yield len(text)
    group = _text(root, "zarr.json", faults)
    names_of = [p.file for p in held.packs]
    # In an object store it may have been written anew after a kill, by another version of zarr.
    if group and held.zarr not in (None, crc32c(group)) and group != group_metadata(held.version, texts, names_of):
        faults.append(f"{stores.join(root, 'zarr.json')} does not fit its crc32c")
    yield len(group)


def _text(root: str, file: str, faults: list[str]) -> bytes:
    try:
        text = stores.at(root).get(file)
    except FileNotFoundError:
        text = b""
    if not text:
        faults.append(f"{stores.join(root, file)} is missing or empty")
    return text


def _batched(items: Iterable[T], n: int) -> Iterator[list[T]]:
    rest = iter(items)
    while group := list(itertools.islice(rest, n)):
        yield group


def _check_object(t: ChunkedTensor, coord: tuple[int, ...], faults: list[str]) -> int:
    """Read one file to its end; add its faults to ``faults``; return its length."""
    stored = t.objects[coord]
    path = names.inside(t.root, stored.file, stores.join(t.root, manifest.FILE))
    nbytes = math.prod(t.grid.chunk) * t.dtype.itemsize
    digest = position = 0
    bad: list[tuple[int, ...]] = []
    with opened(path, f"part of {t.name!r}") as reader:
        size = reader.nbytes
        if size != stored.nbytes:
            faults.append(f"{path} has {size} bytes, the manifest says {stored.nbytes} (key {t.name!r})")
            return 0
        if isinstance(t, CompressedTensor):
            _check_frames(t, coord, reader, faults)
            return size
        slots = max(1, _BATCH // max(nbytes, 1))
        data, marks = scratch("check", slots * nbytes).reshape(slots, nbytes), np.empty((slots, 4), np.uint8)
        for group in _batched(chunk_coords(t.grid, coord), slots):
            position += reader.readv([b for k in range(len(group)) for b in (data[k], marks[k])], position)
            for index, held, mark in zip(group, data, marks, strict=False):
                value = crc32c(held)
                if value.to_bytes(4, "little") != mark.tobytes():
                    bad.append(index)
                digest = combine(digest, value, nbytes)
        tail = np.empty(size - position, np.uint8)
        position += reader.readv([tail], position)
    if bad:
        faults.append(f"{path} (key {t.name!r}): chunk {_some(bad)} does not fit its crc32c")
    elif digest != stored.crc32c:
        faults.append(
            f"{path} (key {t.name!r}): its chunks are whole, but they are those of another place or another save"
        )
    elif t.grid.shape and tail.tobytes() != shard_index(t.grid, coord, nbytes + 4):
        faults.append(f"{path} (key {t.name!r}): its index is damaged; the values are whole")
    return position


def _some(bad: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, bad[:4])) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")


def _check_frames(t: CompressedTensor, coord: tuple[int, ...], reader: Reader, faults: list[str]) -> None:
    """`_check_object` for a file of compressed chunks: also unpacks each, as its checksum alone proves too little."""
    stored, grid = t.objects[coord], t.grid
    path = t.path(coord)
    digest, bad, wrong = 0, [], ""
    try:
        for number, held in frames_in(reader, grid, coord, stored.nbytes, t.dtype.itemsize, _BATCH):
            digest = crc32c(held[:-4], digest)
            if crc32c(held[:-4]).to_bytes(4, "little") != held[-4:].tobytes():
                bad.append(t.index_of(number, coord))
            elif not wrong:
                try:
                    t.compression.decompress(held[:-4], scratch("check", math.prod(grid.chunk) * t.dtype.itemsize))
                except ValueError as e:
                    wrong = f"chunk {t.index_of(number, coord)}: {e}"
    except ValueError as e:
        faults.append(f"{path} (key {t.name!r}): {e}")
        return
    if bad:
        wrong = f"chunk {_some(bad)} does not fit its crc32c"
    elif not wrong and digest != stored.crc32c:
        wrong = "its chunks are whole, but they are those of another place or another save"
    if wrong:
        faults.append(f"{path} (key {t.name!r}): {wrong}")
