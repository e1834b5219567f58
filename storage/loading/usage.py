"""`usage`: bytes of the numbered checkpoints of a directory, in which files that they share count once; and of an
icechunk repository."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ...arrays.core.errors import NotACheckpoint
from ..checkpoint import numbered
from ..checkpoint.checkpoint import Checkpoint
from ..format import manifest
from ..stores import atomic_directory, icechunk_store, store
from ..stores.contract import unlisted
from . import runs
from .open import open_checkpoint


@dataclass(frozen=True, slots=True)
class StepUsage:
    """A checkpoint: the number of its arrays, the bytes of their elements (``total_size``), of its files (``nbytes``),
    and those that deleting it alone would free; and the name of its base where it is a delta.

    A base is replaced by the first of its deltas when it is deleted: about as many bytes are free as that one has.
    """

    path: str
    step: int | None
    arrays: int
    total_size: int
    nbytes: int
    freed: int
    base: str | None = None


@dataclass(frozen=True, slots=True)
class UnreadStep:
    """A step that cannot be opened, the bytes of its files, and why."""

    path: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of all files in a place, each counted once whatever its names, the `StepUsage` of each complete checkpoint,
    and the steps that are none, whose bytes count in the total."""

    path: str
    nbytes: int
    steps: list[StepUsage]
    unread: list[UnreadStep] = field(default_factory=list)


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
        at, name = store.holding(root)
        total = sum(e.nbytes for e in store.at(root).entries()) or at.size(name) or 0
        return total, total
    if os.path.isfile(root):
        held = os.lstat(root)
        return held.st_size, held.st_size * (held.st_nlink == 1)
    names: Counter[_File] = Counter()
    files: dict[_File, tuple[int, int]] = {}
    for key, nbytes, links in _walk(root):
        names[key] += 1
        files[key] = nbytes, links
    return sum(n for n, _ in files.values()), sum(n for key, (n, links) in files.items() if links <= names[key])


def usage(directory: str | os.PathLike[str]) -> Usage | RepositoryUsage:
    """Bytes of a directory of numbered checkpoints, or of one checkpoint, whoever wrote them. Only tables of contents
    and lists of files are read.

    Of a whole icechunk repository, whatever branch or snapshot the location names, it is a `RepositoryUsage`.

    Raises
    ------
    NotACheckpoint
        The place is no checkpoint, and has no complete one; where it has steps, it says why one cannot be opened.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import CheckpointManager
    >>> manager = CheckpointManager(tempfile.mkdtemp())
    >>> for step in (1, 2):
    ...     _ = manager.save(step, {"frozen": np.ones(5000), "w": np.full(3, step)})
    >>> found = usage(manager.directory)
    >>> [s.total_size for s in found.steps], found.nbytes < sum(s.nbytes for s in found.steps) - 40_000
    ([40024, 40024], True)
    """
    where = store.location(directory)
    if repository := store.repository_at(where):
        place = icechunk_store.divide(repository)[0]
        chunks, garbage = icechunk_store.chunk_bytes(place), icechunk_store.collect(place, 0, dry_run=True)
        held = chunks.native_bytes, chunks.inlined_bytes, chunks.virtual_bytes, garbage.bytes_deleted
        return RepositoryUsage(place, _files(place.partition(icechunk_store.VIRTUAL)[0])[0], *held)
    others = runs.one_run(where, runs.of_others(where))
    runs.warn_of_others(where, others)
    steps, faults, found = [], dict[str, str](), list[str]()
    for n, c in others.items():
        if isinstance(c, Checkpoint):
            steps.append(_of_another(store.join(where, n), c, numbered.series(n)[1]))
        else:
            faults[store.join(where, n)] = str(c)
    if not steps:
        complete, faults = numbered.survey(where)
        faults = {} if faults and runs.is_whole(where) else faults
        found = [c.path for c in complete] or [where]
    for path in found:
        root = atomic_directory.resolve(path)
        if (held := manifest.read(root)) is None:
            try:
                steps.append(_of_another(path, ckpt := open_checkpoint(root), ckpt.step))
            except NotACheckpoint:
                if path != where or not faults:
                    raise
                at, why = max(faults.items())
                raise NotACheckpoint(f"no step of {where} can be opened: {at}: {why}") from None
            continue
        nbytes, base = sum(a.nbytes for a in held.arrays), held.base and held.base.name
        steps.append(StepUsage(path, held.step, len(held.arrays), nbytes, *_files(root), base))
    first: dict[str | None, int] = {}
    for s in steps:
        first.setdefault(s.base, s.freed)
    steps = [replace(s, freed=first.get(store.split(s.path)[1], s.freed)) for s in steps]
    roots = {path: atomic_directory.resolve(path) for path in faults}
    there = {path: store.is_url(path) or os.path.exists(root) for path, root in roots.items()}  # no link to nowhere
    unread = [UnreadStep(p, _files(roots[p])[0] if there[p] else 0, why) for p, why in faults.items()]
    return Usage(where, _files(where)[0], steps, unread)


def _of_another(path: str, ckpt: Checkpoint, step: int | None) -> StepUsage:
    return StepUsage(path, step, len(ckpt), ckpt.nbytes, *_files(atomic_directory.resolve(path)))
