"""`verify`: the check of every byte of a checkpoint against its manifest."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from ...arrays.core.formatting import count, human_bytes, some
from ..base import names
from ..base.checksums import combine, crc32c
from ..base.scratch import out_of_memory, scratch
from ..checkpoint.checkpoint import Checkpoint, Computed, unread
from ..commit.protocol import protocol_of
from ..format import manifest
from ..format.chunk_sums import StoredSums
from ..format.zarr_format import group_texts
from ..readers import packed
from ..readers.compressed import CompressedTensor, frames_in
from ..readers.dual_tensor import DualTensor, form_faults
from ..readers.reading import opened, run
from ..readers.tensor import ChunkedTensor
from ..stores import icechunk_store
from ..stores import store as stores
from .deltas import stored_of
from .open import open_checkpoint
from .verifying_others import noting, refuse, verify_others

_FILES = ("safetensors", "NumPy", "PyTorch")  # kinds of checkpoints that are one file
_BATCH = 8 << 20  # bytes of one read


@dataclass(frozen=True)
class VerifyReport:
    """Report of `verify`: arrays, files, bytes, seconds.

    ``uncovered`` names files without a checksum, which were not compared; ``skipped`` says why arrays cannot be read.
    """

    path: str
    arrays: int
    files: int
    nbytes: int
    seconds: float
    uncovered: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        """Whether no array has a checksum, as all are computed from files of others."""
        return bool(self.arrays and self.uncovered and not self.nbytes)

    def __str__(self) -> str:
        arrays, files = count(self.arrays, "array"), count(self.files, "file")
        found = "nothing tells whether they are whole" if self.is_bare else "sound"
        text = f"{self.path}: {arrays}, {human_bytes(self.nbytes)} in {files}: {found}{unread(self.skipped)}"
        if rest := self.uncovered:
            text += f"\n  not compared, as nothing has their checksums ({len(rest)}): {some(rest, 12)}"
        return text


def verify(path: str | os.PathLike[str] | Checkpoint) -> VerifyReport:
    """Check every stored byte of a checkpoint that has checksums: chunks, indices, lengths and metadata.

    These are a checkpoint of `save`, and safetensors files that meshtape wrote, with their index and documents. The
    report names all other files there, which are not compared. Of a virtual checkpoint all parents are checked, and of
    deltas their base.

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
    >>> import os, tempfile
    >>> import numpy as np
    >>> from meshtape.storage import save
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> _ = save(where, {"w": np.ones(3)})
    >>> verify(where).files
    1
    """
    started = time.perf_counter()
    icechunk_store.forget()  # else its memory would be compared
    ckpt = open_checkpoint(path)
    given = ckpt.path if path is ckpt else stores.location(path)  # type: ignore[arg-type]
    try:
        with ckpt.generation.guarded():
            return _verify(ckpt, given, _Work(started))
    except MemoryError as e:
        raise out_of_memory(given, e, "a chunk of it is unpacked whole") from None


@dataclass
class _Work:
    """A call of `verify`, and what it has verified: parents and bases that several share are read once."""

    started: float
    done: dict[tuple[str, str], VerifyReport] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def part(self, ckpt: Checkpoint, lenient: bool = False) -> tuple[VerifyReport, int, int]:
        """The report of a parent or a base, and how many files and bytes of it were not counted before."""
        of = ckpt.computed or ckpt.manifest
        key = ckpt.path, "" if of is None else of.identity
        if key in self.done:
            return self.done[key], 0, 0
        r = self.done[key] = _verify(ckpt, ckpt.path, self, lenient)
        return r, r.files, r.nbytes


def _verify_computed(ckpt: Checkpoint, computed: Computed, work: _Work) -> VerifyReport:
    """The document of a virtual checkpoint was compared when it was opened, and so were its parents' identities."""
    parts = [work.part(p, lenient=True) for p in computed.parents.values()]
    held = [r for r, _, _ in parts]
    seconds = work.seconds
    ckpt.generation.check()
    files, nbytes = sum(n for _, n, _ in parts) + bool(computed.identity), sum(n for _, _, n in parts)
    rest = []
    for parent, r in zip(computed.parents.values(), held, strict=True):
        if parent.computed is not None:
            rest += r.uncovered
        elif r.arrays and not r.nbytes:  # of others, without checksums: known by its identity alone
            rest.append(r.path)
        else:
            rest += [stores.join(r.path, name) for name in r.uncovered]
    return VerifyReport(ckpt.path, len(ckpt), files, nbytes, seconds, list(dict.fromkeys(rest)), ckpt.skipped)


def _verify(ckpt: Checkpoint, given: str, work: _Work, lenient: bool = False) -> VerifyReport:
    if ckpt.computed is not None:
        return _verify_computed(ckpt, ckpt.computed, work)
    held = ckpt.manifest
    if held is None:
        root = stores.split(ckpt.path)[0] if ckpt.kind in _FILES else ckpt.path
        files, nbytes = verify_others(ckpt, root, lenient)
        rest = [] if ckpt.kind in _FILES and given == ckpt.path else _others(root, files)
        return VerifyReport(ckpt.path, len(ckpt), len(files), nbytes, work.seconds, rest, ckpt.skipped)
    tensors = [stored_of(a.tensor) for a in ckpt.arrays.values()]
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
    sections = [t.sums for t in tensors if isinstance(t.sums, StoredSums)]
    nbytes += sum(job() for job in noting(faults, [*reads, *(s.check for s in sections)]))
    end = max((s.end for s in sections), default=0)
    if end and (stores.at(ckpt.path).size(held.sums) or 0) > end:
        faults.append(f"{stores.join(ckpt.path, held.sums)} goes on after the checksums of all arrays")
    form, wrong = form_faults(ckpt.path, held)
    refuse(ckpt.path, faults + wrong, "files")
    ckpt.generation.check()
    known = {manifest.FILE, "zarr.json", held.sums, *(a.directory for a in held.arrays), *(p.file for p in held.packs)}
    rest = _others(ckpt.path, known | form | {file for _, file in held.documents.values()})
    count = len(jobs) + len(ckpt.documents)
    if ckpt.base is not None:
        _, files, more = work.part(ckpt.base)
        count, nbytes = count + files, nbytes + more
    return VerifyReport(ckpt.path, len(tensors), count, nbytes, work.seconds, rest)


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

    def is_other(group: bytes) -> bool:
        # In an object store it may have been written anew after a kill, by another version of zarr.
        return group != b"" and held.zarr not in (None, crc32c(group)) and group not in group_texts(held, texts)

    # Nor is it the manifest's before the writer that replaces a checkpoint has ended (see `other_writers`).
    if is_other(group) and not protocol_of(root).is_begun(root) and is_other(_text(root, "zarr.json", faults)):
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


def _check_object(t: ChunkedTensor, coord: tuple[int, ...], faults: list[str]) -> int:
    """Read one file to its end; add its faults to ``faults``; return its length. What is compressed is unpacked: a
    checksum proves too little."""
    stored, itemsize = t.objects[coord], t.dtype.itemsize
    if isinstance(t, DualTensor):
        faults += t.faults(coord)
        return stored.nbytes
    path = names.inside(t.root, stored.file, stores.join(t.root, manifest.FILE))
    codec = t.compression if isinstance(t, CompressedTensor) else None
    nbytes = math.prod(t.grid.chunk) * itemsize
    digest, bad, wrong = 0, list[tuple[int, ...]](), ""
    with opened(path, f"part of {t.name!r}") as reader:
        if reader.nbytes != stored.nbytes:
            faults.append(f"{path} has {reader.nbytes} bytes, the manifest says {stored.nbytes} (key {t.name!r})")
            return 0
        try:
            for number, held in frames_in(reader, t.grid, coord, stored.nbytes, itemsize, _BATCH, codec is not None):
                value = crc32c(held[:-4])
                digest = combine(digest, value, nbytes) if codec is None else crc32c(held[:-4], digest)
                if value.to_bytes(4, "little") != held[-4:].tobytes():
                    bad.append(t.index_of(number, coord))
                elif codec is not None and not wrong:
                    try:
                        codec.decompress(held[:-4], scratch("check", nbytes))
                    except ValueError as e:
                        wrong = f"chunk {t.index_of(number, coord)}: {e}"
        except ValueError as e:
            wrong = str(e)
    if bad:
        wrong = f"chunk {some(bad, 4)} does not fit its crc32c"
    elif digest != stored.crc32c and (not wrong or codec is None):
        wrong = "its chunks are whole, but they are those of another place or another save"
    if wrong:
        faults.append(f"{path} (key {t.name!r}): {wrong}")
    return stored.nbytes
