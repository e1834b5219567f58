"""Leftovers of killed writers: `leftovers` lists them with the reason to call their owner dead, `gc` deletes them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ...arrays.core.errors import StoreError
from ...arrays.core.formatting import count
from ..stores import atomic_directory, icechunk_store, owners, store
from ..stores.contract import listed
from ..stores.filesystem import try_lock
from . import object_commit
from .anchor_lock import sweep
from .contents import JOURNAL

PART = ".part"
_DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Unfinished work of a writer. ``why`` says why its owner counts as dead; "" where it may live.

    ``kind`` is ``"tmp"`` (half a save), ``"old"`` (a checkpoint that is being replaced), ``"trash"`` (half a deletion),
    ``"claim"`` (either, in an object store), ``"part"`` (an unfinished transfer, with which the same call goes on), or
    ``"garbage"`` (of an icechunk repository: all to which no branch or tag leads).
    """

    path: str
    kind: str
    nbytes: int
    age: float  # seconds since anything of it was written
    why: str

    @property
    def dead(self) -> bool:
        return bool(self.why)


def places(directory: str) -> list[str]:
    """The places for `CommitProtocol.recover`: the directory of checkpoints, or its folders in an object store."""
    if not store.is_url(directory):
        return [directory]
    return [store.join(directory, name) for name in store.at(directory).folders()]


def _size(path: str) -> int:
    """Bytes that are free when it is deleted: those of files with other names, which steps share, are not."""
    if not os.path.isdir(path) or os.path.islink(path):
        return os.lstat(path).st_size
    total = 0
    for file in (os.path.join(folder, f) for folder, _, names in os.walk(path) for f in names):
        with contextlib.suppress(OSError):
            found = os.lstat(file)
            total += found.st_size if found.st_nlink == 1 else 0
    return total


@contextlib.contextmanager
def _idle(part: str) -> Iterator[bool]:
    """Whether an unfinished transfer is idle; it stays so within the block."""
    with contextlib.ExitStack() as stack:
        try:
            journal = stack.enter_context(open(os.path.join(part, JOURNAL), "rb", buffering=0))
        except OSError:
            yield False
            return
        yield try_lock(journal.fileno()) is True


def _local(parent: str, only: str | None, silence: float | None) -> Iterator[Leftover]:
    for entry in listed(parent):
        path = os.path.join(parent, entry)
        m = atomic_directory.KINDS.match(entry)
        if m is None and not (entry.endswith(PART) and os.path.exists(os.path.join(path, JOURNAL))):
            continue
        name = m["name"] if m else entry.removesuffix(PART)
        if only is not None and name != only:
            continue
        with contextlib.suppress(FileNotFoundError):
            if m:
                kind, why = m["kind"], owners.why_gone(path, m["owner"], int(m["pid"]), silence)
            else:
                with _idle(path) as idle:
                    kind, why = "part", "no process works on it" if idle else None
            try:
                age = max(0.0, time.time() - owners.last_write(path))
            except StoreError:  # of another user, say: it may live, and hides none of the others
                age = 0.0
            yield Leftover(path, kind, _size(path), age, why or "")


def _stored(place: str, silence: float | None) -> Iterator[Leftover]:
    for claim, (left, why) in object_commit.remains(store.at(place), silence).items():
        age = max(0.0, time.time() - max(e.modified for e in left))
        yield Leftover(store.join(place, claim), "claim", sum(e.nbytes for e in left), age, why or "")


def _garbage(repository: str, silence: float | None, dry_run: bool) -> list[Leftover]:
    place, silence = icechunk_store.divide(repository)[0], _DAY if silence is None else silence
    held = icechunk_store.collect(place, silence, dry_run=dry_run)
    objects = {"chunk": held.chunks_deleted, "manifest": held.manifests_deleted, "snapshot": held.snapshots_deleted}
    why = ", ".join(count(n, what) for what, n in objects.items() if n)
    return [Leftover(place, "garbage", held.bytes_deleted, silence, f"no branch or tag leads to {why}")] if why else []


def leftovers(directory: str | os.PathLike[str], *, older_than: float | None = None) -> list[Leftover]:
    """The unfinished work of the writers of a directory of checkpoints, or of one checkpoint. Nothing is changed.

    Parameters
    ----------
    directory
        A directory with checkpoints in it, a checkpoint, or an icechunk repository; a path or URL.
    older_than
        Seconds without a sign after which an owner that cannot be asked (of another machine, say) counts as dead; by
        default an hour, and a day in an object store and in a repository, which knows no owners: it must be longer than
        any save into it takes. The holder of a lock here is alive however silent.

    Examples
    --------
    >>> import tempfile
    >>> home = tempfile.mkdtemp()
    >>> os.mkdir(os.path.join(home, "ckpt.tmp-01234567-89abcdef-7-01234567"))
    >>> [(x.kind, x.nbytes, x.dead) for x in leftovers(home)]
    [('tmp', 0, False)]
    >>> [x.dead for x in leftovers(home, older_than=-1)]
    [True]
    """
    where = store.location(directory)
    if repository := store.repository_at(where):
        return _garbage(repository, older_than, dry_run=True)
    if store.is_url(where):
        return [x for place in (where, *places(where)) for x in _stored(place, older_than)]
    where = os.path.abspath(where)
    return [*_local(where, None, older_than), *_local(*os.path.split(where), older_than)]


def gc(
    directory: str | os.PathLike[str], *, dry_run: bool = False, older_than: float | None = None, parts: bool = False
) -> list[Leftover]:
    """Delete the leftovers of dead writers, and put back a checkpoint that one had set aside; returns those leftovers.

    Of an icechunk repository icechunk itself deletes all to which no branch or tag leads. History is never deleted:
    ``icechunk.Repository.expire_snapshots`` shortens it.

    Parameters
    ----------
    directory, older_than
        As in `leftovers`.
    dry_run
        Change nothing: return the leftovers that would be deleted.
    parts
        Delete unfinished transfers too, with which the same `convert` or `merge` would go on.

    Examples
    --------
    >>> import tempfile
    >>> home = tempfile.mkdtemp()
    >>> os.mkdir(os.path.join(home, "ckpt.tmp-01234567-89abcdef-7-01234567"))
    >>> gc(home)  # too young, of another machine
    []
    >>> len(gc(home, older_than=-1, dry_run=True)), len(gc(home, older_than=-1)), os.listdir(home)
    (1, 1, [])
    """
    where = store.location(directory)
    if repository := store.repository_at(where):
        return _garbage(repository, older_than, dry_run)
    found = [x for x in leftovers(where, older_than=older_than) if x.dead and (parts or x.kind != "part")]
    if dry_run:
        return found
    if store.is_url(where):
        sweep(where)
    return [x for x in found if _collected(x, older_than)]


def _collected(x: Leftover, older_than: float | None) -> bool:
    """Whether a leftover is gone; since it was listed, its writer may have gone on or another may have deleted it."""
    with atomic_directory.writing(x.path), contextlib.suppress(FileNotFoundError):  # whoever comes second finds it gone
        if x.kind == "claim":
            object_commit.recover(x.path.rpartition("/")[0], older_than)
        elif x.kind == "part":
            with _idle(x.path) as idle:
                if idle:
                    atomic_directory.discard(x.path)
                return idle
        else:
            return atomic_directory.collect(x.path)
    return True
