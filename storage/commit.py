"""How a directory of files comes into being all at once, and how one replaces another.

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
`recover` deletes those whose owner is gone. An owner that still runs is left alone; one on another host counts as gone
after a day, because this host cannot ask.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname

from ..arrays.errors import CheckpointExists, MeshtapeError, StorageFull
from . import stores
from .files import Files, active

_KINDS = re.compile(r"\A(?P<name>.+)\.(?P<kind>tmp|old|trash)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\Z", re.S)
FOREIGN_AGE = 24 * 3600.0  # seconds

_mine: set[str] = set()  # what this process, in any thread, is filling, moving or deleting now


@contextlib.contextmanager
def _owned(path: str) -> Iterator[str]:
    _mine.add(path)
    try:
        yield path
    finally:
        _mine.discard(path)


def host() -> str:
    """This machine, in names and claims."""
    return f"{zlib.crc32(gethostname().encode()):08x}"


def has_left(owner_host: str, pid: int, modified: float) -> bool:
    """Whether the process that a leftover names, which this one does not hold, is no more.

    Of another host's only the age tells: ``modified`` is when the leftover was last written, in seconds since the epoch.
    """
    if owner_host != host():
        return time.time() - modified > FOREIGN_AGE
    if pid == os.getpid():
        return True  # of this process, and not being filled: an earlier process had the same number
    import psutil

    try:
        return not psutil.pid_exists(pid)
    except OverflowError:  # no process has such a number
        return True


def _new_id() -> str:
    return f"{host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_begun(root: str) -> bool:
    """Whether a writer has begun to fill a place in an object store, and has not finished."""
    if not stores.is_url(root):
        return False
    from . import object_commit

    return object_commit.is_begun(root)


@contextlib.contextmanager
def temporary(target: str) -> Iterator[str]:
    """A name beside a file that is written anew; what dead writers of it left goes first, and so does this when it is left behind."""
    recover(*os.path.split(os.path.abspath(target)))
    with _owned(f"{target}.tmp-{_new_id()}") as name:
        try:
            yield name
        finally:
            # Renamed, as a rule. The error that left it matters more than one of the clean-up; the next writer collects it.
            with contextlib.suppress(OSError):
                active().unlink(name)


def siblings(target: str, kind: str) -> list[str]:
    """Paths of the ``NAME.kind-ID`` beside a target, in order of name."""
    parent, name = os.path.split(os.path.abspath(target))
    try:
        listed = sorted(os.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = ((entry, _KINDS.match(entry)) for entry in listed)
    return [os.path.join(parent, entry) for entry, m in found if m and m["name"] == name and m["kind"] == kind]


def resolve(target: str) -> str:
    """Where a reader finds ``target``: there, or where a replacement that was cut short has set it aside."""
    if stores.is_url(target):
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


def _owner_is_gone(path: str, m: re.Match[str]) -> bool:
    if path in _mine:
        return False
    try:
        return has_left(m["host"], int(m["pid"]), os.lstat(path).st_mtime)
    except OSError:
        return False


def recover(parent: str, name: str | None = None) -> list[str]:
    """Put back what was set aside, delete what dead owners left; returns the paths dealt with.

    ``name`` limits it to one target of the directory ``parent``.
    """
    if stores.is_url(parent):
        from . import object_commit

        targets = stores.at(parent).folders() if name is None else [name]
        return [p for t in targets for p in object_commit.recover(stores.join(parent, t))]
    fs = active()
    parent = os.path.abspath(parent)
    try:
        listed = sorted(os.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return []
    done = []
    for entry in listed:
        m = _KINDS.match(entry)
        path = os.path.join(parent, entry)
        if not m or (name is not None and m["name"] != name) or not _owner_is_gone(path, m):
            continue
        target = os.path.join(parent, m["name"])
        # Another process may be collecting the same directory; whoever comes second finds it gone.
        with contextlib.suppress(FileNotFoundError):
            if m["kind"] == "old" and not os.path.lexists(target):
                fs.rename(path, target)
                fs.fsync_dir(parent)
            else:
                discard(path)
            done.append(path)
    return done


def discard(path: str) -> None:
    """Delete a directory: renamed first, so that it is never found half deleted under its own name."""
    if stores.is_url(path):
        from . import object_commit

        object_commit.discard(path)
        return
    fs = active()
    m = _KINDS.match(os.path.basename(path))
    if m and m["kind"] == "trash":
        fs.remove_tree(path)
        return
    parent = os.path.dirname(path)
    name = m["name"] if m else os.path.basename(path)
    with _owned(os.path.join(parent, f"{name}.trash-{_new_id()}")) as trash:
        fs.rename(path, trash)
        fs.fsync_dir(parent)
        fs.remove_tree(trash)


def make_parents(target: str) -> None:
    """Create the directories above a target that are missing."""
    if stores.is_url(target):
        return
    parent = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(parent):
        make_parents(parent)
        with contextlib.suppress(FileExistsError):
            active().mkdir(parent)
        active().fsync_dir(os.path.dirname(parent))  # a checkpoint is as durable as the folders on the way to it


@contextlib.contextmanager
def writing(target: str, needs: str = "more room") -> Iterator[None]:
    """Errors of the file system while ``target`` is written, as errors that name it: `StorageFull`, or `StoreError` for any other."""
    try:
        yield
    except MeshtapeError:
        raise
    except OSError as e:
        # What has no number, or speaks of a connection, came from a cluster or a pipe, not from a disk.
        if e.errno is None or stores.is_url(target) or isinstance(e, (ConnectionError, TimeoutError)):
            raise
        where, name = os.path.split(os.path.abspath(target))
        if m := _KINDS.match(name):  # a name beside it, of which the user knows nothing
            target = os.path.join(where, m["name"])
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{target} needs {needs}; {where} filled up while it was written: {e.strerror}") from e
        beside = "" if e.filename is None or e.filename == target else f" ({os.fsdecode(e.filename)})"
        raise stores.failed(e, f"{target} cannot be written{beside}") from e


@contextlib.contextmanager
def room_for(nbytes: int, target: str) -> Iterator[None]:
    """As `writing`; and raise `StorageFull` before anything is written when ``nbytes`` do not fit."""
    with writing(target, f"{nbytes} bytes"):
        if not stores.is_url(target):
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
def replacing(target: str, *, overwrite: bool, ours: Callable[[str], bool]) -> Iterator[Folder]:
    """Give a directory to fill and `Folder.commit`; without the commit, nothing is left behind.

    ``ours(path)`` says whether an existing directory is of a kind that may be replaced: ``overwrite=True`` never deletes a
    directory that holds something else.
    """
    if stores.is_url(target):
        from . import object_commit

        with object_commit.replacing(target, overwrite=overwrite, ours=ours) as there:
            yield there
        return
    fs = active()
    target = os.path.abspath(target)
    parent, name = os.path.split(target)
    recover(parent, name)
    check_target(target, overwrite, ours)
    temporary = os.path.join(parent, f"{name}.tmp-{_new_id()}")

    def commit() -> None:
        check_target(target, overwrite, ours)
        _swap_in(fs, temporary, target)

    folder = Folder(temporary, commit)
    with _owned(temporary):
        try:
            fs.mkdir(temporary)
            yield folder
        finally:
            if not folder.committed:
                # The error that brought us here matters more than one of the clean-up; the next writer collects the rest.
                with contextlib.suppress(OSError):
                    fs.remove_tree(temporary)


def adopt(directory: str, target: str, without: str) -> None:
    """Commit a finished directory that stands beside the target under a name of its own, less its file ``without``."""
    fs = active()
    with _owned(f"{target}.tmp-{_new_id()}") as temporary:
        fs.rename(directory, temporary)
        # Only now: a directory of the former name without this file could not be told from somebody else's.
        fs.unlink(os.path.join(temporary, without))
        fs.fsync_dir(temporary)
        _swap_in(fs, temporary, target)


def check_target(target: str, overwrite: bool, ours: Callable[[str], bool]) -> None:
    """Raise `CheckpointExists` where ``target`` may not be replaced."""
    if stores.is_url(target):
        from . import object_commit

        object_commit.check_target(target, overwrite, ours)
        return
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise CheckpointExists(f"{target} exists; pass overwrite=True to replace it")
    path = Path(target)
    if path.is_symlink() or not path.is_dir():
        raise CheckpointExists(f"{target} is not a directory; overwrite=True replaces checkpoint directories alone")
    if any(path.iterdir()) and not ours(target):
        raise CheckpointExists(f"{target} holds something that is not a checkpoint; refused to replace it")


def _swap_in(fs: Files, temporary: str, target: str) -> None:
    parent = os.path.dirname(target)
    if not os.path.lexists(target):
        fs.rename(temporary, target)
        fs.fsync_dir(parent)
        return
    old = f"{target}.old-{_new_id()}"
    with _owned(old):
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
