"""Owners of temporary names: the process that holds the lock on one, or its name where locks cannot be had.

A writer locks the directory or file that it fills (``flock`` on its descriptor) as soon as it is there. The kernel
drops the lock with the process, however that ends. So every process of the same kernel, in whatever container or PID
namespace, can ask whether the owner lives.

Locks do not travel everywhere: not from machine to machine on every network file system, and some take none on
directories. Temporary names therefore say whose they are: ``BOOT-NAMESPACE-PID``. A PID means something in its own
namespace since the same start of the machine alone; of any other owner only silence tells: nothing below the name was
written for `SILENT_AGE`.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
import zlib
from functools import cache
from socket import gethostname

from .contract import unlisted
from .filesystem import try_lock

SILENT_AGE = 3600.0
"""Seconds. A writer writes all the time, and one that was wrongly taken for dead loses a save, no checkpoint."""
FOREIGN_AGE = 24 * 3600.0  # seconds; in object stores, where an upload shows nothing until it ends
_MOST = 4096  # files that are looked at for the time of the last write

_holds: set[Hold] = set()  # of this process, in any thread


def _hash(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


@cache
def boot() -> str:
    """This start of this machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return _hash(f.read().strip())
    except OSError:  # no Linux
        return _hash(f"{gethostname()} {uuid.getnode()}")


def host() -> str:
    """Where a process number means this process: the start of the machine and the PID namespace."""
    try:
        return f"{boot()}-{_hash(os.readlink('/proc/self/ns/pid'))}"
    except OSError:
        return f"{boot()}-{_hash('')}"


def new_id() -> str:
    """The end of a temporary name of this process."""
    return f"{host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class Hold:
    """A name that this process fills, moves or deletes now, which need not exist yet, with a lock where possible."""

    def __init__(self, path: str) -> None:
        self.path, self._fd = path, -1
        self._own = False  # whether the descriptor is the hold's
        self.locked: bool | None = None  # None: such things take no locks here
        _holds.add(self)

    def lock(self, fd: int | None = None) -> Hold:
        """Lock the present file or directory. ``fd`` is its descriptor, closed by the caller; by default a new one."""
        if fd is not None:
            self._fd, self.locked = fd, try_lock(fd)
            return self
        try:
            self._fd = _open(self.path)
        except FileNotFoundError:
            self.locked = False
        except OSError:  # no directories can be opened here
            pass
        else:
            self._own, self.locked = True, try_lock(self._fd)
        return self

    def is_there(self) -> bool:
        """Whether the name is still the locked file: a collector may have been faster than the lock."""
        if self._fd < 0:
            return self.locked is not False
        try:
            return self.locked is not False and os.stat(self.path).st_ino == os.fstat(self._fd).st_ino
        except OSError:
            return False

    def release(self) -> None:
        """Give it back."""
        _holds.discard(self)
        if self._own:
            self._own = False
            os.close(self._fd)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))


def _is_locked(path: str) -> bool | None:
    """Whether some process holds the lock; None where that cannot be asked."""
    try:
        fd = _open(path)
    except OSError:
        return None
    try:
        got = try_lock(fd)
        return None if got is None else not got
    finally:
        os.close(fd)


def last_write(path: str) -> float:
    """When anything at or below a path was last written (seconds since the epoch), as some thousand files tell."""
    newest, seen = os.lstat(path).st_mtime, 0
    for folder, folders, files in os.walk(path, onerror=unlisted):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
            seen += 1
        if seen > _MOST:
            break
    return newest


def _runs(pid: int, modified: float) -> bool:
    """Whether the process of that number is one that was there when ``modified`` was written."""
    import psutil

    try:
        # (A second, as the two clocks are not read alike.)
        return psutil.Process(pid).create_time() <= modified + 1.0
    except (psutil.NoSuchProcess, OverflowError, ValueError):
        return False
    except psutil.Error:
        return True


def why_dead(owner: str, pid: int, modified: float, silence: float = FOREIGN_AGE) -> str | None:
    """The reason to take an owner that holds no lock for dead; None where it may live.

    ``modified`` is when it last wrote; of owners that cannot be asked for, ``silence`` seconds without a sign tell.
    """
    if owner != host():
        quiet = time.time() - modified
        told = f"its owner is of another machine or container, and wrote nothing for {quiet:.0f} s"
        return told if quiet > silence else None
    if pid == os.getpid():
        return "its owner had the number of this process"
    return None if _runs(pid, modified) else f"its owner, process {pid}, does not run any more"


def why_gone(path: str, owner: str, pid: int, silence: float | None = None) -> str | None:
    """The reason to take the owner of a temporary name for dead; None where it lives or may live."""
    if any(h.path == path for h in tuple(_holds)):
        return None
    locked = _is_locked(path)
    if locked:
        return None
    try:
        modified = last_write(path)
    except OSError:
        return None
    if locked is False and owner != host() and owner.partition("-")[0] == boot():
        return "no process of this machine holds its lock"
    return why_dead(owner, pid, modified, SILENT_AGE if silence is None else silence)


def _after_fork() -> None:
    # The copy of a descriptor would keep the lock for as long as the child lives.
    for h in tuple(_holds):
        with contextlib.suppress(OSError):
            h.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
