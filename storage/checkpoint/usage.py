"""`usage`: bytes of the numbered checkpoints of a directory, in which files that they share count once; and of an
icechunk repository."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...arrays.core.errors import NotACheckpoint
from ..format import manifest
from ..stores import atomic_directory, icechunk_store, store
from ..stores.contract import unlisted
from . import numbered


@dataclass(frozen=True, slots=True)
class StepUsage:
    """Bytes of a checkpoint: of its arrays, of its files, and those that deleting it alone would free; and the name of
    its base where it is a delta.

    A base is replaced by the first of its deltas when it is deleted: about as many bytes are free as that one has.
    """

    path: str
    step: int | None
    arrays: int
    files: int
    freed: int
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of all files in a place, each counted once whatever its names, and the `StepUsage` of each complete
    checkpoint."""

    path: str
    nbytes: int
    steps: list[StepUsage]


@dataclass(frozen=True, slots=True)
class RepositoryUsage:
    """Bytes of an icechunk repository: of all its files; of the chunks to which its branches and tags lead, in files of
    their own and inlined in manifests; of files elsewhere that are its virtual chunks; and of what `gc` would free,
    were all of it old enough. Snapshots share chunks, so none has bytes of its own."""

    path: str
    nbytes: int
    chunks: int
    inlined: int
    virtual: int
    unreachable: int


_File = tuple[int, int]


def _walk(root: str) -> Iterator[tuple[_File, int, int]]:
    """(identity, bytes, names of it anywhere) of every name below a directory."""
    for folder, _, files in os.walk(root, onerror=unlisted):
        for f in files:
            try:
                found = os.lstat(os.path.join(folder, f))
            except FileNotFoundError:  # another process rotates
                continue
            yield (found.st_dev, found.st_ino), found.st_size, found.st_nlink


def _files(root: str) -> tuple[int, int]:
    """(bytes of a checkpoint's files, bytes that have no name elsewhere)."""
    if store.is_url(root):
        total = sum(e.nbytes for e in store.at(root).entries())
        return total, total
    names: Counter[_File] = Counter()
    held: dict[_File, tuple[int, int]] = {}
    for key, nbytes, links in _walk(root):
        names[key] += 1
        held[key] = nbytes, links
    return sum(n for n, _ in held.values()), sum(n for key, (n, links) in held.items() if links <= names[key])


def usage(directory: str | os.PathLike[str]) -> Usage | RepositoryUsage:
    """Bytes of a directory of numbered checkpoints, or of one checkpoint. Only manifests and lists of files are read.

    Of a whole icechunk repository, whatever branch or snapshot the location names, it is a `RepositoryUsage`.

    Raises
    ------
    NotACheckpoint
        The place has no complete checkpoint.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import CheckpointManager
    >>> manager = CheckpointManager(tempfile.mkdtemp())
    >>> for step in (1, 2):
    ...     _ = manager.save(step, {"frozen": np.ones(5000), "w": np.full(3, step)})
    >>> found = usage(manager.directory)
    >>> [s.arrays for s in found.steps], found.nbytes < sum(s.files for s in found.steps) - 40_000
    ([40024, 40024], True)
    """
    where = store.location(directory)
    if repository := store.repository_at(where):
        place = icechunk_store.divide(repository)[0]
        chunks, garbage = icechunk_store.chunk_bytes(place), icechunk_store.collect(place, 0, dry_run=True)
        held = chunks.native_bytes, chunks.inlined_bytes, chunks.virtual_bytes, garbage.bytes_deleted
        return RepositoryUsage(place, _files(place.partition(icechunk_store.VIRTUAL)[0])[0], *held)
    paths = [c.path for c in numbered.complete(where)] or [where]
    steps = []
    for path in paths:
        root = atomic_directory.resolve(path)
        held = manifest.read(root)
        if held is not None:
            steps.append(
                StepUsage(
                    path, held.step, sum(a.nbytes for a in held.arrays), *_files(root), held.base and held.base.name
                )
            )
    first: dict[str | None, int] = {}
    for s in steps:
        first.setdefault(s.base, s.freed)
    steps = [replace(s, freed=first.get(store.split(s.path)[1], s.freed)) for s in steps]
    if not steps:
        raise NotACheckpoint(f"{where} holds no complete checkpoint of meshtape")
    return Usage(where, _files(where)[0], steps)
