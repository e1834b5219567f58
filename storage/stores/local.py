"""The store of local files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from operator import attrgetter
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


def _stat(path: str) -> os.stat_result | None:
    """None of a file that is gone, and of a link that leads nowhere."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise failed(e, f"{path} cannot be looked at") from e
        return None


def _tag_of(s: os.stat_result, where: str | int) -> str:
    """The tag of a file, by what is known of it, and its path or descriptor."""
    return f"{s.st_size} bytes, written {_time(s.st_mtime_ns)}, inode {s.st_ino}, made {_time(_made(s, where))}"


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{_second(seconds)}.{rest:09d}"


def _made(s: os.stat_result, where: str | int) -> int:
    """When a file was made, in nanoseconds, or 0 where the system does not tell. One that is unpacked from an archive
    over another may get its inode, its length and its time."""
    if sys.platform != "linux":
        return int(getattr(s, "st_birthtime", 0) * 10**9)
    found, by_fd = ctypes.create_string_buffer(256), isinstance(where, int)
    folder, name, flags = (where, b"", _EMPTY_PATH) if by_fd else (_HERE, os.fsencode(where), 0)
    if _statx()(folder, name, flags, _BIRTH, found):
        return 0
    has, seconds, rest = struct.unpack_from("=I76xqI", found)
    return seconds * 10**9 + rest if has & _BIRTH else 0


_HERE, _EMPTY_PATH, _BIRTH = -100, 0x1000, 0x800  # AT_FDCWD, AT_EMPTY_PATH and STATX_BTIME of Linux's statx(2)


@cache
def _statx() -> Callable[..., int]:
    return getattr(ctypes.CDLL(None), "statx", lambda *args: -1)


@lru_cache(maxsize=1 << 10)
def _second(at: int) -> str:
    return datetime.fromtimestamp(at).isoformat(" ")


# A pipe that nobody writes to would wait for ever; to files O_NONBLOCK means nothing.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_OPENAT2, _BENEATH, _NO_MAGIC = 437, 8, 2  # of Linux, on every processor


@cache
def _openat2() -> Callable[[int, bytes], int]:
    """Linux's ``openat2`` of a file for reading that lies beneath a folder, links included; elsewhere it fails."""
    if sys.platform != "linux":
        return lambda fd, name: -1
    call, how = ctypes.CDLL(None).syscall, (ctypes.c_uint64 * 3)(_FLAGS, 0, _BENEATH | _NO_MAGIC)
    number, size = ctypes.c_long(_OPENAT2), ctypes.c_size_t(24)  # converted once: with ``argtypes`` it is at each call
    return lambda fd, name: call(number, fd, name, how, size)


class Beneath:
    """A folder of which many files are opened: each in one call of the system, which refuses links out of it."""

    def __init__(self, root: str) -> None:
        self._fd, self._call = os.open(root, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)), _openat2()

    def open(self, name: str) -> int:
        """The descriptor of a file, -1 where it has to be looked at more closely."""
        return self._call(self._fd, os.fsencode(name))

    def read_now(self, name: str, buffers: list[Any], offset: int) -> int:
        """Fill the buffers from a file, as `Reader.read_now` does."""
        if (fd := self.open(name)) < 0:
            return -1
        try:
            return os.preadv(fd, buffers, offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):
            return -1
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._fd)


class _LocalReader(Reader):
    __slots__ = ("_fd", "_path", "_tag", "nbytes")

    def __init__(self, fd: int, path: str, nbytes: int) -> None:
        self._fd, self._path, self._tag = fd, path, ""
        self.nbytes = nbytes  # when it was opened

    @property
    def tag(self) -> str:
        # Of a reader that is closed, the tag of when that was; another thread may close it just now, which sets that
        # before the number of the file is anybody's.
        try:
            found = self._tag or _tag_of(os.fstat(self._fd), self._fd)
        except OSError:
            if not self._tag:
                raise
        return self._tag or found

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

    def read_now(self, buffers: list[Any], offset: int) -> int:
        try:
            return os.preadv(self._fd, buffers, offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # it would have to wait for a disk, or the system does not tell
            return -1

    def close(self) -> None:
        if is_recording():
            self._tag = self.tag
        os.close(self._fd)


def local_reader(fd: int, path: str) -> Reader:
    """The reader of a file that is open."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise CorruptCheckpoint(f"{path} is {_kind(found.st_mode)}, where a file belongs")
    return recorded(path, _LocalReader(fd, path, found.st_size))


@dataclass(frozen=True, slots=True)
class LocalStore(Store):
    """A directory. Writes go through `Files`: to a name beside, synced, then renamed."""

    root: str

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def reader(self, name: str) -> Reader:
        path = self._path(name)
        try:
            fd = os.open(path, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as e:
            if e.errno == errno.ENXIO:  # a socket
                raise CorruptCheckpoint(f"{path} is a socket or a device, where a file belongs") from None
            raise failed(e, f"{path} cannot be read") from e
        return local_reader(fd, path)

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

    def tags(self, names: Sequence[str]) -> list[str | None]:
        paths = [f"{self.root}{os.sep}{name}" for name in names]
        return [None if (s := _stat(path)) is None else _tag_of(s, path) for path in paths]

    def entries(self, under: str = "") -> Iterator[StoredObjectInfo]:
        found, folders = [], [under]
        while folders:
            start = f"{folder}/" if (folder := folders.pop()) else ""
            try:
                with os.scandir(self._path(folder)) as held:
                    for e in held:
                        if e.is_dir(follow_symlinks=False):
                            folders.append(start + e.name)
                        elif (s := _stat(e.path)) is not None and not stat.S_ISDIR(s.st_mode):
                            found.append(StoredObjectInfo(start + e.name, s.st_size, s.st_mtime, _tag_of(s, e.path)))
            except OSError as e:
                unlisted(e)
        return iter(sorted(found, key=attrgetter("name")))

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
