"""The store of local files."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from ...arrays.core.errors import CheckpointExists, CorruptCheckpoint
from .atomic_directory import make_parents, temporary
from .contract import Pieces, Reader, Store, StoredObjectInfo, failed, is_recording, recorded, unlisted
from .filesystem import active, preadv


def _kind(mode: int) -> str:
    """The kind, in words, of a path that is no file."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


@contextlib.contextmanager
def _no_loops() -> Iterator[None]:
    """Pass over a link that leads to itself: it is no file and no folder, as one that leads nowhere."""
    try:
        yield
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise


def _tag_of(s: os.stat_result) -> str:
    return _tag_text(s.st_size, s.st_mtime_ns, s.st_ino)


@lru_cache(maxsize=1 << 10)
def _tag_text(nbytes: int, written: int, inode: int) -> str:
    at = datetime.fromtimestamp(written // 10**9).isoformat(" ")
    return f"{nbytes} bytes, written {at}.{written % 10**9:09d}, inode {inode}"


class _LocalReader(Reader):
    __slots__ = ("_fd", "_path", "_tag")

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path, self._tag = fd, path, ""

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def tag(self) -> str:
        # Of a reader that is closed, the tag of when that was.
        return self._tag or _tag_of(os.fstat(self._fd))

    def readv(self, buffers: list[Any], offset: int) -> int:
        try:
            return preadv(self._fd, buffers, offset)
        except OSError as e:
            raise failed(e, f"{self._path} cannot be read") from e

    def fileno(self) -> int:
        return self._fd

    def gather(self, nbytes: int, starts: range) -> bytes:
        """The short runs of ``nbytes`` that begin at ``starts``, joined; fewer bytes where the file ends before."""
        pread, fd = os.pread, self._fd
        try:
            return b"".join([pread(fd, nbytes, at) for at in starts])
        except OSError as e:
            raise failed(e, f"{self._path} cannot be read") from e

    def at_hand(self, offset: int) -> bool:
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except (OSError, AttributeError):  # it would have to wait for a disk, or the system does not tell
            return False

    def close(self) -> None:
        if is_recording():
            self._tag = self.tag
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class LocalStore(Store):
    """A directory. Writes go through `Files`: to a name beside, synced, then renamed."""

    root: str

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def reader(self, name: str) -> Reader:
        path = self._path(name)
        try:
            # A pipe that nobody writes to would wait for ever; to files the flag means nothing.
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as e:
            if e.errno == errno.ENXIO:  # a socket
                raise CorruptCheckpoint(f"{path} is a socket or a device, where a file belongs") from None
            raise failed(e, f"{path} cannot be read") from e
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            raise CorruptCheckpoint(f"{path} is {_kind(mode)}, where a file belongs")
        return recorded(path, _LocalReader(fd, path))

    def size(self, name: str) -> int | None:
        return None if os.path.isdir(self._path(name)) else Store.size(self, name)

    def put(self, name: str, pieces: Pieces, *, new: bool = False) -> int:
        fs, path = active(), self._path(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(mode := os.stat(path).st_mode):
                raise CheckpointExists(f"{path} is {_kind(mode)}; only files are replaced, write to another name")
        make_parents(path)
        total = 0
        with temporary(path) as (beside, fd):
            for piece in [pieces] if isinstance(pieces, bytes) else pieces() if callable(pieces) else pieces:
                total += fs.write(fd, [piece], total)
            fs.fsync(fd)
            if new:
                # A hard link fails where the name exists; a rename would replace it.
                fs.link(beside, path)
            else:
                fs.rename(beside, path)
        fs.fsync_dir(os.path.dirname(path))
        return total

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                active().unlink(self._path(name))

    def entries(self, under: str = "") -> Iterator[StoredObjectInfo]:
        found = []
        for folder, _, files in os.walk(self._path(under) if under else self.root, onerror=unlisted):
            for file in files:
                path = os.path.join(folder, file)
                with _no_loops(), contextlib.suppress(FileNotFoundError):
                    s = os.stat(path)
                    name = posixpath.join(*os.path.relpath(path, self.root).split(os.sep))
                    found.append(StoredObjectInfo(name, s.st_size, s.st_mtime, _tag_of(s)))
        return iter(sorted(found, key=lambda e: e.name))

    def folders(self) -> list[str]:
        return self._children(lambda e: e.is_dir())

    def files(self) -> list[str]:
        return self._children(lambda e: e.is_file())

    def _children(self, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        found = []
        try:
            with os.scandir(self.root) as entries:
                for e in entries:
                    with _no_loops():
                        found += [e.name] if wanted(e) else []
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as e:
            raise failed(e, f"{self.root} cannot be listed") from e
        return sorted(found)
