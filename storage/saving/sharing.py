"""Files that a checkpoint shares with an earlier one: a shard with the very same bytes is not written again.

A file that is committed is never written to: every writer makes new files, so that two names of one file are as good as
two files. Either can be deleted. That the bytes are the same is found by comparing all of them: a checksum of 32 bits
proves too little.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
from ..base import names
from ..format import manifest
from ..stores.atomic_directory import resolve
from ..stores.filesystem import active
from .items import SaveItem

_PAGE = 4 << 10  # bytes that tell most files apart
_PIECE = 1 << 20
_REFUSED = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.ENOENT)


def match(items: Sequence[SaveItem], earlier: str) -> None:
    """Tell arrays the folders of those in an ``earlier`` checkpoint that are stored as they will be."""
    root = resolve(earlier)
    with contextlib.suppress(CheckpointError):  # a damaged one is no reason not to save
        held = manifest.read(root)
        stored = {} if held is None else {a.path: a for a in held.arrays if a.packs is None}
        for item in items:
            old = stored.get(item.path)
            form = item.grid, item.dtype, item.compression
            if not item.packed and old is not None and (old.grid, old.dtype, old.compression) == form:
                item.like = names.inside(root, old.directory, root)


def write_or_share(path: str, batches: Generator[Sequence[Any]], like: str) -> tuple[int, bool]:
    """(descriptor of a file with these bytes, to be synced and closed; whether it is ``like``, which has them
    already)."""
    fs = active()
    old = _opened(like) if like else None
    if old is None:
        return fs.write_new(path, batches), False
    at, fd = 0, None
    batch: Sequence[Any] = []
    try:
        for batch in batches:
            nbytes = sum(memoryview(b).nbytes for b in batch)
            if not _holds(old, at, batch, nbytes):
                break
            at += nbytes
        else:
            batch = []
            if os.fstat(old).st_size == at:
                fd = old if _second_name(old, like, path) else fs.clone(old, path)
        if fd is not None:
            return fd, True
        return fs.write_new(path, _from(old, at, batch, batches)), False
    finally:
        if fd != old:
            os.close(old)


def _opened(path: str) -> int | None:
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags)
    except OSError:  # damaged as it may be, it is not to be read
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _holds(fd: int, at: int, batch: Sequence[Any], nbytes: int) -> bool:
    """Whether a file has these bytes at a place."""
    if not at and batch:  # most files that differ do so early: little is read of them
        first = bytes(memoryview(batch[0]).cast("B")[:_PAGE])
        if os.pread(fd, len(first), 0) != first:
            return False
    held = np.frombuffer(os.pread(fd, nbytes, at), np.uint8)
    if held.size != nbytes:
        return False
    start = 0
    for b in batch:
        wanted = np.frombuffer(b, np.uint8)
        if not np.array_equal(held[start : start + wanted.size], wanted):
            return False
        start += wanted.size
    return True


def _second_name(fd: int, like: str, path: str) -> bool:
    """Give an opened file a second name. False, with nothing left there, where the system refuses or it has another
    name by now."""
    fs = active()
    try:
        fs.link(like, path)
    except OSError as e:
        if e.errno not in _REFUSED:
            raise
        return False
    if os.path.samestat(os.lstat(path), os.fstat(fd)):
        return True
    fs.unlink(path)
    return False


def _from(old: int, equal: int, batch: Sequence[Any], rest: Generator[Sequence[Any]]) -> Generator[Sequence[Any]]:
    """Buffers of a new file whose first bytes an old one has."""
    for first in range(0, equal, _PIECE):
        yield [os.pread(old, min(_PIECE, equal - first), first)]
    yield batch
    yield from rest
