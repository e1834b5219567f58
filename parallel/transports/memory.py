"""Slots of memory between two processes of one host, or two workers of one process.

Shared memory is a file in ``/dev/shm`` that only its user can open. The ranks open it themselves, and it loses its name
as soon as both have it: whatever ends a process, the memory goes with it. ``multiprocessing.shared_memory`` is not
used, as its resource tracker removes segments that others still use when the first process ends
(https://github.com/python/cpython/issues/82300).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import secrets
import threading
from pathlib import Path

import numpy as np

from ..base.settings import number
from ..collectives.pieces import QUANTUM, BatchSink
from .links import shaped

ROOT = Path("/dev/shm")
SLOTS = 8
"""The most slots of one direction between two processes."""

_PREFIX = "meshtape-"


@functools.cache
def host_id() -> bytes:
    """An id of this boot and this mount of ``/dev/shm``: equal in all processes that see the same shared memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot}{ROOT.stat().st_dev}{os.getuid()}".encode()).digest()
    except OSError:
        return secrets.token_bytes(32)  # like no other


@functools.cache
def process_id() -> bytes:
    """A random id of this process."""
    return secrets.token_bytes(16)


class Budget:
    """The budget of shared memory that this process creates for its links.

    A host has ``limit``, and each of its processes an equal share of it. A link takes at most half of the rest: the
    first links get all their slots, later ones fewer, and the last ones none, which leaves them the socket.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used = 0
        self.processes = 1
        """The most processes of one mesh on this host."""

    def share(self, processes: int) -> None:
        """A mesh has so many processes on this host."""
        self.processes = max(self.processes, processes)

    @property
    def used(self) -> int:
        """Bytes that are taken now."""
        return self._used

    def take(self) -> int:
        """Bytes for a segment: 0 where there are none left."""
        with self._lock:
            left = int(number("shared-memory")) // self.processes - self._used
            slots = SLOTS
            while slots and 2 * slots * QUANTUM > (left if self.processes <= 2 else left / 2):
                slots //= 2
            self._used += 2 * slots * QUANTUM
            return 2 * slots * QUANTUM

    def give_back(self, size: int) -> None:
        """A segment is gone."""
        with self._lock:
            self._used -= size


BUDGET = Budget()
"""This process's."""


class SharedSlots:
    """One direction of a segment."""

    by_reference = False

    def __init__(self, segment: SharedSegment, direction: int) -> None:
        self._segment = segment
        memory = np.frombuffer(segment.map, np.uint8)
        self.count = len(memory) // (2 * QUANTUM)
        start = direction * self.count * QUANTUM
        self._slots = [memory[start + i * QUANTUM : start + (i + 1) * QUANTUM] for i in range(self.count)]

    def put(self, slot: int, chunk: np.ndarray) -> None:
        memory = self._slots[slot][: chunk.nbytes]
        np.copyto(memory.view(chunk.dtype).reshape(chunk.shape), chunk)

    def view(self, slot: int, sink: BatchSink, k: int) -> np.ndarray:
        return shaped(self._slots[slot], sink, k)

    def taken(self, slot: int) -> None:
        pass

    def close(self) -> None:
        self._slots = []
        self._segment.close()


class SharedSegment:
    """A piece of shared memory, slots in both directions: made by one process under a name of its own, opened by one
    other."""

    def __init__(self, fd: int, name: str, size: int, taken: int = 0) -> None:
        self.name, self._taken = name, taken
        try:
            self.map = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    @classmethod
    def create(cls) -> SharedSegment:
        """A new one. Raises ``OSError`` where there is no room: all of it is there from the start, as a later lack
        would end the process with a signal."""
        _sweep()
        size = BUDGET.take()
        if not size:
            raise OSError("meshtape.shared-memory is used up on this host")
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(12)}"
        try:
            fd = os.open(ROOT / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except BaseException:
                os.close(fd)
                (ROOT / name).unlink()
                raise
            return cls(fd, name, size, size)
        except BaseException:
            BUDGET.give_back(size)
            raise

    @classmethod
    def open(cls, name: str) -> SharedSegment:
        """One that another process made. Raises ``OSError``."""
        if not name.startswith(_PREFIX) or "/" in name:
            raise OSError(f"{name!r} is no segment's name")
        fd = os.open(ROOT / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(fd)
        if found.st_size not in (2 * n * QUANTUM for n in range(1, SLOTS + 1)) or found.st_uid != os.getuid():
            os.close(fd)
            raise OSError(f"{name!r} is not what was announced")
        return cls(fd, name, found.st_size)

    def unlink(self) -> None:
        """Remove its name; processes that have it open keep it."""
        with contextlib.suppress(FileNotFoundError):
            (ROOT / self.name).unlink()

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left."""
        BUDGET.give_back(self._taken)
        self._taken = 0
        with contextlib.suppress(BufferError):
            self.map.close()


def _sweep() -> None:
    """Remove names of processes that ended between making a segment and handing it over."""
    with contextlib.suppress(OSError):
        for path in ROOT.glob(f"{_PREFIX}*"):
            pid = path.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    path.unlink()


class LocalSlots:
    """Slots between two workers of one process: they refer to the sender's memory, which is copied once, by the
    receiver."""

    by_reference = True
    count = SLOTS

    def __init__(self) -> None:
        self._slots: list[np.ndarray | None] = [None] * SLOTS

    def put(self, slot: int, chunk: np.ndarray) -> None:
        self._slots[slot] = chunk

    def view(self, slot: int, sink: BatchSink, k: int) -> np.ndarray:
        chunk = self._slots[slot]
        assert chunk is not None
        return chunk

    def taken(self, slot: int) -> None:
        self._slots[slot] = None

    def close(self) -> None:
        self._slots = [None] * SLOTS


_offered: dict[bytes, tuple[LocalSlots, LocalSlots]] = {}
_offered_lock = threading.Lock()


def offer_local() -> tuple[bytes, tuple[LocalSlots, LocalSlots]]:
    """Slots in both directions, and the key by which the other worker of this process finds them."""
    key, slots = secrets.token_bytes(16), (LocalSlots(), LocalSlots())
    with _offered_lock:
        _offered[key] = slots
    return key, slots


def take_local(key: bytes) -> tuple[LocalSlots, LocalSlots] | None:
    """The slots that were offered under this key, once."""
    with _offered_lock:
        return _offered.pop(key, None)
