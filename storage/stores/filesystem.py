"""The one object through which storage changes the file system.

Every create, write, sync, rename and unlink of this package is a method of `Files`. A test that puts its own instance
in place with `using` can therefore fail, or kill the process at, the N-th operation, for every N.
Reading needs no such hook and uses ``os`` directly.

Files and directories are created with the process's umask, never with the private mode of temporary files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from functools import cache
from typing import Any

IOV_MAX = 512  # the kernel takes 1024; half of it is as fast and leaves room

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_CLONE = 0x40049409  # Linux's FICLONE
_WORTH = 256 << 10  # bytes of a write after which the disk is told to begin


@cache
def _system_call(name: str, *argtypes: Any) -> Any:
    """A function of Linux's C library; None where the library has none of that name."""
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = argtypes or None
    return call


class Files:
    """Operations on local files. Subclass it to watch, fail or reorder them; each method is one operation."""

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> int:
        """A descriptor for writing a new file; fails where the name exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def open(self, path: str) -> int:
        """A descriptor for writing to a file that exists."""
        return os.open(path, os.O_WRONLY)

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write all of ``buffers`` (at most `IOV_MAX` of them) from ``offset`` on; returns the number of bytes."""
        views = [v for b in buffers if (v := memoryview(b)).nbytes]
        wanted, total = sum([v.nbytes for v in views]), 0
        while total < wanted:
            done = os.pwritev(fd, views, offset + total)
            if done == 0:
                raise OSError(errno.EIO, "a write made no progress")
            total += done
            if total == wanted:
                break
            views = _after([v.cast("B") for v in views], done)  # a short write is legal
        if total >= _WORTH:
            # The disk may begin: what `fsync` waits for later is then mostly done. It promises nothing, so errors are
            # left to `fsync`.
            call = _system_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
            if call is not None:
                call(fd, offset, total, _SYNC_FILE_RANGE_WRITE)
        return total

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(fd)
        except OSError as e:
            # Some network file systems do not sync directories and say so this way.
            if e.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Rename; a file at ``target`` is replaced, a directory there must be empty."""
        os.rename(source, target)

    def exchange(self, a: str, b: str) -> bool:
        """Swap two names in one step. False, with nothing changed, where the system cannot."""
        call = _system_call("renameat2")
        if call is None:
            return False
        if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
            return False
        raise OSError(code, os.strerror(code), a)

    def link(self, source: str, target: str) -> None:
        """A second name for a file; fails where the name exists."""
        os.link(source, target)

    def clone(self, source: int, path: str) -> int | None:
        """A descriptor of a new file with the blocks of an open one (a reflink); None where the system cannot."""
        fd = self.create(path)
        try:
            import fcntl

            fcntl.ioctl(fd, _CLONE, source)
            return fd
        except (ImportError, OSError):
            self.close(fd)
            self.unlink(path)
            return None

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def write_new(self, path: str, batches: Generator[Sequence[Any]]) -> int:
        """A new file of these buffers; returns its descriptor, which is the caller's to sync and close.

        Many files synced together cost far fewer commits of the file system's journal, and only the descriptor that
        wrote is sure to be told of an error.
        """
        fd = self.create(path)
        try:
            total = 0
            with contextlib.closing(batches):
                for batch in batches:
                    total += self.write(fd, batch, total)
        except BaseException:
            self.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A block with a descriptor for writing to a file that exists."""
        fd = self.open(path)
        try:
            yield fd
        finally:
            self.close(fd)

    def write_file(self, path: str, data: bytes) -> None:
        """A new, synced file with ``data``."""
        fd = self.create(path)
        try:
            self.write(fd, [data], 0)
            self.fsync(fd)
        finally:
            self.close(fd)

    def remove_tree(self, path: str) -> None:
        """Delete a file or a directory with all below it. Symbolic links are removed, never followed."""
        with contextlib.suppress(FileNotFoundError):  # another process may be deleting the same
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                self.unlink(path)
                return
            with os.scandir(path) as entries:
                children = sorted(e.path for e in entries)
            for child in children:
                self.remove_tree(child)
            self.rmdir(path)

    def free_bytes(self, path: str) -> int:
        """Bytes that this user may still write to the file system of ``path``."""
        s = os.statvfs(path)
        return s.f_bavail * s.f_frsize


def try_lock(fd: int, shared: bool = False) -> bool | None:
    """Whether this process has an open file for itself now, or ``shared`` with others that ask so; None where there are
    no such locks. The lock goes with the process."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        # (Some network file systems lock no directories.)
        if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL):
            raise
        return None
    return True


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Buffers without their first ``done`` bytes."""
    while views and done >= len(views[0]):
        done -= len(views.pop(0))
    return [views[0][done:], *views[1:]] if views else []


def preadv(fd: int, buffers: list[Any], offset: int) -> int:
    """Fill all buffers from ``offset`` on, or as many as the file has bytes for; returns the number of bytes."""
    wanted = sum(memoryview(b).nbytes for b in buffers)
    total = os.preadv(fd, buffers, offset) if 0 < len(buffers) <= IOV_MAX else 0
    if total == wanted:
        return total
    # A short read is legal, and there may be more buffers than one call takes: go on where it ended.
    views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
    done = total
    while (views := _after(views, done)) and (done := os.preadv(fd, views[:IOV_MAX], offset + total)):
        total += done
    return total


_active = Files()


def active() -> Files:
    """The `Files` in use in this process."""
    return _active


@contextlib.contextmanager
def using(files: Files) -> Iterator[Files]:
    """Put another `Files` in place for a while. It is process-wide, as the threads of a save must see it too."""
    global _active
    before, _active = _active, files
    try:
        yield files
    finally:
        _active = before
