"""The commit of a directory of files, all at once, and the replacement of one by another.

The protocol, for a target ``NAME``:

1. A directory ``NAME.tmp-ID`` is made beside the target. ``ID`` names the host and process that owns it.
2. Every file is written there under its final name, and synced. Nothing of an older generation is touched.
3. The directories are synced. Then the *last* file is written and synced (the manifest, or an index): its presence is
   what makes the directory complete, so it must not be durable before what it vouches for.
4. A new target: ``NAME.tmp-ID`` is renamed to ``NAME``; the parent directory is synced.
5. A replaced target: the two names are exchanged in one step (Linux ``renameat2``). At every instant ``NAME`` is the old
   generation or the new one. Where the system cannot exchange, ``NAME`` is renamed to ``NAME.old-ID``, then
   ``NAME.tmp-ID`` to ``NAME``. Between the two, ``NAME`` does not exist; `resolve` makes a reader take ``NAME.old-ID``
   then, which is whole, and `recover` lets the next writer rename it back.
6. What is no longer wanted is renamed to ``NAME.trash-ID`` and deleted from there, so that half a deletion is never
   taken for a checkpoint.

A kill at any point leaves ``NAME`` (or ``NAME.old-ID``) whole, and at most one ``.tmp-``, ``.old-`` or ``.trash-`` directory.
Whoever fills, moves or deletes one of these holds a lock on it (see ``owners``). A writer, and nobody else, collects beside its target those
whose owner is gone: `recover`. Readers and managers that start delete nothing.

A replacement never takes what is not the checkpoint's: see ``contents``. Documents that stay are linked into the new generation before step 4.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from ...arrays.core.errors import CheckpointExists, MeshtapeError, StorageFull
from . import owners, store
from .filesystem import active

KINDS = re.compile(
    r"\A(?P<name>.+)\.(?P<kind>tmp|old|trash)-(?P<owner>[0-9a-f]{8}(-[0-9a-f]{8})?)-(?P<pid>\d+)-[0-9a-f]{8}\Z", re.S
)


@contextlib.contextmanager
def _owned(path: str) -> Iterator[str]:
    """A name that this process works under, locked if there is something."""
    held = owners.Hold(path).lock()
    try:
        yield path
    finally:
        held.release()


def _new(target: str, make: Callable[[str], Any]) -> tuple[owners.Hold, Any]:
    """A new temporary name, made and locked; and what ``make`` returned: a descriptor, or None for a directory."""
    while True:
        held = owners.Hold(f"{target}.tmp-{owners.new_id()}")
        try:
            fd = make(held.path)
            # Between the two a collector of another namespace may have taken it for one that nobody holds.
            if held.lock(fd).is_there():
                return held, fd
        except BaseException:
            held.release()
            raise
        held.release()
        if fd is not None:
            active().close(fd)


def is_begun(root: str) -> bool:
    """Whether a writer has begun to fill a place in an object store, and has not finished."""
    if not store.is_url(root):
        return False
    from ..commit import object_commit

    return object_commit.is_begun(root)


@contextlib.contextmanager
def temporary(target: str) -> Iterator[tuple[str, int]]:
    """A new file beside one that is written anew, and its descriptor; what dead writers left goes first, and so does this when it is left behind.

    It is to be renamed within the block: its lock lasts as long as the descriptor is open.
    """
    recover(os.path.dirname(os.path.abspath(target)))
    fs = active()
    held, fd = _new(target, fs.create)
    try:
        yield held.path, fd
    finally:
        # Renamed, as a rule. The error that left it matters more than one of the clean-up; the next writer collects it.
        for undo in (lambda: fs.unlink(held.path), lambda: fs.close(fd), held.release):
            with contextlib.suppress(OSError):
                undo()


def siblings(target: str, kind: str) -> list[str]:
    """Paths of the ``NAME.kind-ID`` beside a target, in order of name."""
    parent, name = os.path.split(os.path.abspath(target))
    try:
        listed = sorted(os.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = ((entry, KINDS.match(entry)) for entry in listed)
    return [os.path.join(parent, entry) for entry, m in found if m and m["name"] == name and m["kind"] == kind]


def resolve(target: str) -> str:
    """Where a reader finds ``target``: there, or where a replacement that was cut short has set it aside."""
    if store.is_url(target):
        return target
    for _ in range(3):
        if os.path.lexists(target):
            return target
        aside = siblings(target, "old")
        if aside and os.path.isdir(aside[-1]):
            return aside[-1]
        # A replacement may have finished between the two looks.
        if not aside:
            break
    return target


def recover(parent: str) -> list[str]:
    """Put back what was set aside, delete what dead owners left in a directory; returns the paths dealt with.

    In an object store ``parent`` is one target.
    """
    if store.is_url(parent):
        from ..commit import object_commit

        return object_commit.recover(parent)
    parent = os.path.abspath(parent)
    try:
        listed = sorted(os.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return []
    done = []
    for entry in listed:
        m = KINDS.match(entry)
        path = os.path.join(parent, entry)
        # Another process may be collecting the same: whoever comes second finds it gone. What cannot be deleted is no error of a save.
        with contextlib.suppress(OSError):
            if m and owners.why_gone(path, m["owner"], int(m["pid"])) and collect(path):
                done.append(path)
    return done


def collect(path: str) -> bool:
    """End what the dead owner of a temporary name had begun: put back what has no successor, and delete the rest.

    False where somebody has it after all: a writer of another namespace, which had not locked it yet when it was looked at.
    """
    held = owners.Hold(path).lock()
    try:
        if held.locked is False:
            return False
        fs = active()
        parent, entry = os.path.split(path)
        m = KINDS.match(entry)
        target = os.path.join(parent, m["name"]) if m else path
        if m and m["kind"] == "old" and not os.path.lexists(target):
            fs.rename(path, target)
            fs.fsync_dir(parent)
        else:
            discard(path)
        return True
    finally:
        held.release()


def discard(path: str) -> None:
    """Delete a directory: renamed first, so that it is never found half deleted under its own name."""
    if store.is_url(path):
        from ..commit import object_commit

        object_commit.discard(path)
        return
    fs = active()
    m = KINDS.match(os.path.basename(path))
    if m and m["kind"] == "trash":
        fs.remove_tree(path)
        return
    parent = os.path.dirname(path)
    name = m["name"] if m else os.path.basename(path)
    with _owned(path), _owned(os.path.join(parent, f"{name}.trash-{owners.new_id()}")) as trash:
        fs.rename(path, trash)
        fs.fsync_dir(parent)
        fs.remove_tree(trash)


def make_parents(target: str) -> None:
    """Create the directories above a target that are missing."""
    if store.is_url(target):
        return
    parent, lost = os.path.dirname(os.path.abspath(target)), []
    while not os.path.isdir(parent):
        lost.append(parent)
        parent = os.path.dirname(parent)
    for folder in reversed(lost):
        with contextlib.suppress(FileExistsError):
            active().mkdir(folder)
        active().fsync_dir(os.path.dirname(folder))  # a checkpoint is as durable as the folders on the way to it


@contextlib.contextmanager
def writing(target: str, needs: str = "more room") -> Iterator[None]:
    """Errors of the file system while ``target`` is written, as errors that name it: `StorageFull`, or `StoreError` for any other."""
    try:
        yield
    except MeshtapeError:
        raise
    except OSError as e:
        # What has no number, or speaks of a connection, came from a cluster or a pipe, not from a disk.
        if e.errno is None or store.is_url(target) or isinstance(e, (ConnectionError, TimeoutError)):
            raise
        where, name = os.path.split(os.path.abspath(target))
        if m := KINDS.match(name):  # a name beside it, of which the user knows nothing
            target = os.path.join(where, m["name"])
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{target} needs {needs}; {where} filled up while it was written: {e.strerror}") from e
        beside = "" if e.filename is None or e.filename == target else f" ({os.fsdecode(e.filename)})"
        raise store.failed(e, f"{target} cannot be written{beside}") from e


@contextlib.contextmanager
def room_for(nbytes: int, target: str) -> Iterator[None]:
    """As `writing`; and raise `StorageFull` before anything is written when ``nbytes`` do not fit."""
    with writing(target, f"{nbytes} bytes"):
        if not store.is_url(target):
            make_parents(target)
            check_room(nbytes, target)
        yield


def check_room(nbytes: int, target: str) -> None:
    """Raise `StorageFull` where ``nbytes`` do not fit beside a local target."""
    parent = os.path.dirname(os.path.abspath(target))
    free = active().free_bytes(parent)
    if free < nbytes:
        raise StorageFull(f"{target} needs {nbytes} bytes, {parent} has {free} free")


class Folder:
    """A directory that is being filled: small files whole and synced, names made durable, then `commit`.

    ``suffix`` is what the writer appends to the names of arrays: something only where older names cannot be written over.
    """

    def __init__(self, root: str, commit: Callable[[], None] | None = None) -> None:
        self.root, self.suffix, self.committed = root, "", False
        self._commit = commit

    def mkdir(self, name: str) -> None:
        """Make a folder in it."""
        active().mkdir(os.path.join(self.root, name))

    def put(self, name: str, data: bytes) -> None:
        """A new, durable file."""
        active().write_file(os.path.join(self.root, name), data)

    def settle(self, name: str = "") -> None:
        """Make the names in it, or in a folder of it, durable."""
        active().fsync_dir(os.path.join(self.root, name) if name else self.root)

    def commit(self) -> None:
        """Put the directory in its place."""
        assert self._commit is not None
        self._commit()
        self.committed = True


@contextlib.contextmanager
def replacing(target: str, *, overwrite: bool, tables: frozenset[str]) -> Iterator[Folder]:
    """Give a directory to fill and `Folder.commit`; without the commit, nothing is left behind.

    ``tables`` are the tables of contents of what may be replaced (see ``contents``): ``overwrite=True`` never deletes anything else.
    """
    if store.is_url(target):
        from ..commit import object_commit

        with object_commit.replacing(target, overwrite=overwrite, tables=tables) as there:
            yield there
        return
    fs = active()
    target = os.path.abspath(target)
    recover(os.path.dirname(target))
    check_target(target, overwrite, tables)
    held, _ = _new(target, fs.mkdir)
    folder = Folder(held.path, lambda: _swap_in(held.path, target, overwrite, tables))
    try:
        yield folder
    finally:
        if not folder.committed:
            # The error that brought us here matters more than one of the clean-up; the next writer collects the rest.
            with contextlib.suppress(OSError):
                fs.remove_tree(held.path)
        held.release()


def adopt(directory: str, target: str, without: str, *, overwrite: bool, tables: frozenset[str]) -> None:
    """Commit a finished directory that stands beside the target under a name of its own, less its file ``without``."""
    fs = active()
    check_target(target, overwrite, tables)
    temporary = f"{target}.tmp-{owners.new_id()}"
    # Locked before it has a name that others collect.
    with _owned(directory), _owned(temporary):
        fs.rename(directory, temporary)
        # Only now: a directory of the former name without this file could not be told from somebody else's.
        fs.unlink(os.path.join(temporary, without))
        fs.fsync_dir(temporary)
        _swap_in(temporary, target, overwrite, tables)


def check_target(target: str, overwrite: bool, tables: frozenset[str]) -> list[str]:
    """Raise `CheckpointExists` where ``target`` may not be replaced; returns the documents there that stay."""
    from ..commit import contents

    if store.is_url(target):
        from ..commit import object_commit

        return object_commit.check_target(target, overwrite, tables)
    if not os.path.lexists(target):
        return []
    if not overwrite:
        raise CheckpointExists(f"{target} exists; pass overwrite=True to replace it")
    if os.path.islink(target) or not os.path.isdir(target):
        raise CheckpointExists(f"{target} is not a directory; overwrite=True replaces checkpoint directories alone")
    return contents.check(target, tables)


def _swap_in(temporary: str, target: str, overwrite: bool, tables: frozenset[str]) -> None:
    fs = active()
    parent = os.path.dirname(target)
    # Again: somebody may have put something there while we wrote.
    documents = check_target(target, overwrite, tables)
    if not os.path.lexists(target):
        fs.rename(temporary, target)
        fs.fsync_dir(parent)
        return
    _bring(target, temporary, documents)
    old = f"{target}.old-{owners.new_id()}"
    with _owned(target), _owned(old):
        if fs.exchange(temporary, target):
            old = temporary
        else:
            fs.rename(target, old)
            try:
                fs.rename(temporary, target)
            except BaseException:
                fs.rename(old, target)
                raise
        fs.fsync_dir(parent)
    # The new generation is in place and durable: from here on an error is no longer one of the save.
    with contextlib.suppress(OSError):
        discard(old)


def _bring(source: str, target: str, documents: list[str]) -> None:
    """Bring documents that stay into the next generation, as links where there are such."""
    fs = active()
    brought = [d for d in documents if not os.path.lexists(os.path.join(target, d))]
    for name in brought:
        there, here = os.path.join(source, name), os.path.join(target, name)
        try:
            fs.link(there, here)
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES):
                raise
            with open(there, "rb") as f:
                fs.write_file(here, f.read())
    if brought:
        fs.fsync_dir(target)
