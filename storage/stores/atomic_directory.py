"""Temporary directories and files beside their targets: locks, leftovers of dead owners, and disk errors.

``directory_commit`` has the protocol that they serve.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from ...arrays.core.errors import MeshtapeError, StorageFull
from ..base.locations import is_url
from . import owners
from .contract import failed, listed
from .filesystem import active

KINDS = re.compile(
    r"\A(?P<name>.+)\.(?P<kind>tmp|old|trash)-(?P<owner>[0-9a-f]{8}(-[0-9a-f]{8})?)-(?P<pid>\d+)-[0-9a-f]{8}\Z", re.S
)


@contextlib.contextmanager
def owned(path: str) -> Iterator[owners.Hold]:
    """A temporary name that this process works under, locked where it exists."""
    held = owners.Hold(path).lock()
    try:
        yield held
    finally:
        held.release()


def new_beside(target: str, make: Callable[[str], Any]) -> tuple[owners.Hold, Any]:
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


@contextlib.contextmanager
def temporary(target: str) -> Iterator[tuple[str, int]]:
    """A new temporary file beside a target, and its descriptor; leftovers of dead writers are deleted first.

    Rename it within the block, as its lock lasts only while the descriptor is open; otherwise it is deleted.
    """
    recover(os.path.dirname(os.path.abspath(target)))
    fs = active()
    held, fd = new_beside(target, fs.create)
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
    found = ((entry, KINDS.match(entry)) for entry in listed(parent))
    return [os.path.join(parent, entry) for entry, m in found if m and m["name"] == name and m["kind"] == kind]


def resolve(target: str) -> str:
    """The path of ``target`` for a reader: itself, or the name where an interrupted replacement has set it aside."""
    if is_url(target):
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
    """Put back checkpoints that were set aside, and delete leftovers of dead owners; returns their paths."""
    parent, done = os.path.abspath(parent), []
    for entry in listed(parent):
        m = KINDS.match(entry)
        path = os.path.join(parent, entry)
        # Another process may be collecting the same: whoever comes second finds it gone. What cannot be deleted is no
        # error of a save.
        with contextlib.suppress(OSError):
            if m and owners.why_gone(path, m["owner"], int(m["pid"])) and collect(path):
                done.append(path)
    return done


def collect(path: str) -> bool:
    """Clean up a temporary name of a dead owner: put back a checkpoint without a successor, delete anything else.

    False where a living writer has it after all: one of another namespace, which had not locked it yet.
    """
    with owned(path) as held:
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


def discard(path: str) -> None:
    """Delete a directory: renamed first, so that it is never found half deleted under its own name."""
    fs = active()
    m = KINDS.match(os.path.basename(path))
    if m and m["kind"] == "trash":
        fs.remove_tree(path)
        return
    parent = os.path.dirname(path)
    name = m["name"] if m else os.path.basename(path)
    with owned(path), owned(os.path.join(parent, f"{name}.trash-{owners.new_id()}")) as trash:
        fs.rename(path, trash.path)
        fs.fsync_dir(parent)
        fs.remove_tree(trash.path)


def make_parents(target: str) -> None:
    """Create the directories above a target that are missing."""
    if is_url(target):
        return
    parent, lost = os.path.dirname(os.path.abspath(target)), []
    while not os.path.isdir(parent):
        if os.path.isfile(parent):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), parent)
        lost.append(parent)
        parent = os.path.dirname(parent)
    for folder in reversed(lost):
        with contextlib.suppress(FileExistsError):
            active().mkdir(folder)
        active().fsync_dir(os.path.dirname(folder))  # a checkpoint is as durable as the folders on the way to it


def _shown(path: str) -> str:
    """A path without the names beside a target, of which the user knows nothing."""
    return os.sep.join(m["name"] if (m := KINDS.match(name)) else name for name in path.split(os.sep))


@contextlib.contextmanager
def writing(target: str, needs: str = "more room", done: str = "written") -> Iterator[None]:
    """Errors of the file system while ``target`` is written, or what is ``done`` to it, as `StorageFull` or
    `StoreError` that names it."""
    try:
        yield
    except MeshtapeError:
        raise
    except OSError as e:
        # An error without a number, or of a connection, came from a cluster or a pipe, not from a disk.
        if e.errno is None or is_url(target) or isinstance(e, (ConnectionError, TimeoutError)):
            raise
        target = _shown(target)
        where = os.path.dirname(os.path.abspath(target))
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{target} needs {needs}; {where} filled up while it was {done}: {e.strerror}") from e
        beside = "" if e.filename is None or e.filename == target else f" ({os.fsdecode(e.filename)})"
        raise failed(e, f"{target} cannot be {done}{beside}") from e


@contextlib.contextmanager
def room_for(nbytes: int, target: str) -> Iterator[None]:
    """As `writing`; and raise `StorageFull` before anything is written when ``nbytes`` do not fit."""
    with writing(target, f"{nbytes} bytes"):
        if not is_url(target):
            make_parents(target)
            check_space(nbytes, target)
        yield


def check_space(nbytes: int, target: str) -> None:
    """Raise `StorageFull` where ``nbytes`` do not fit beside a local target."""
    parent = os.path.dirname(os.path.abspath(target))
    target = _shown(target)
    free = active().free_bytes(parent)
    if free < nbytes:
        raise StorageFull(f"{target} needs {nbytes} bytes, {_shown(parent)} has {free} free")


class Folder:
    """A directory that is being filled: small files whole and synced, names made durable, then `commit`.

    The writer appends ``suffix`` to the names of arrays. It is empty unless older names cannot be written over.
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
