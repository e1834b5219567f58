"""Slots of memory between two processes of one host, or two workers of one process.

Shared memory is a file in ``/dev/shm`` that only its user can open. The ranks open it themselves, and it loses its name as soon as
both have it: whatever ends a process, the memory goes with it. ``multiprocessing.shared_memory`` is not used, as its resource tracker
removes segments that others still use when the first process ends (https://github.com/python/cpython/issues/82300).
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

from .links import shaped
from .pieces import QUANTUM, Sink

ROOT = Path("/dev/shm")
SLOTS = 8
BYTES = 2 * SLOTS * QUANTUM
"""Of the segment of one pair of processes: slots in both directions."""

_PREFIX = "meshtape-"


@functools.cache
def host_id() -> bytes:
    """The same in all processes that see the same shared memory: of this boot, and of this mount of ``/dev/shm``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot}{ROOT.stat().st_dev}{os.getuid()}".encode()).digest()
    except OSError:
        return secrets.token_bytes(32)  # like no other


@functools.cache
def process_id() -> bytes:
    """Names this process."""
    return secrets.token_bytes(16)


class SharedSlots:
    """One direction of a segment."""

    by_reference = False
    count = SLOTS

    def __init__(self, segment: Segment, direction: int) -> None:
        self._segment = segment
        memory = np.frombuffer(segment.map, np.uint8)
        start = direction * SLOTS * QUANTUM
        self._slots = [memory[start + i * QUANTUM : start + (i + 1) * QUANTUM] for i in range(SLOTS)]

    def put(self, slot: int, chunk: np.ndarray) -> None:
        memory = self._slots[slot][: chunk.nbytes]
        np.copyto(memory.view(chunk.dtype).reshape(chunk.shape), chunk)

    def view(self, slot: int, sink: Sink, k: int) -> np.ndarray:
        return shaped(self._slots[slot], sink, k)

    def taken(self, slot: int) -> None:
        pass

    def close(self) -> None:
        self._slots = []
        self._segment.close()


class Segment:
    """A piece of shared memory of :data:`BYTES`: made by one process under a name of its own, opened by one other."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        try:
            self.map = mmap.mmap(fd, BYTES)
        finally:
            os.close(fd)

    @classmethod
    def create(cls) -> Segment:
        """A new one. Raises ``OSError`` where there is no room: all of it is there from the start, as a later lack would end
        the process with a signal."""
        _sweep()
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(12)}"
        fd = os.open(ROOT / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, BYTES)
        except BaseException:
            os.close(fd)
            (ROOT / name).unlink()
            raise
        return cls(fd, name)

    @classmethod
    def open(cls, name: str) -> Segment:
        """One that another process made. Raises ``OSError``."""
        if not name.startswith(_PREFIX) or "/" in name:
            raise OSError(f"{name!r} is no segment's name")
        fd = os.open(ROOT / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if os.fstat(fd).st_size != BYTES or os.fstat(fd).st_uid != os.getuid():
            os.close(fd)
            raise OSError(f"{name!r} is not what was announced")
        return cls(fd, name)

    def unlink(self) -> None:
        """Take its name away; those who have it keep it."""
        with contextlib.suppress(FileNotFoundError):
            (ROOT / self.name).unlink()

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left."""
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
    """Slots between two workers of one process: they refer to the sender's memory, which is copied once, by the receiver."""

    by_reference = True
    count = SLOTS

    def __init__(self) -> None:
        self._slots: list[np.ndarray | None] = [None] * SLOTS

    def put(self, slot: int, chunk: np.ndarray) -> None:
        self._slots[slot] = chunk

    def view(self, slot: int, sink: Sink, k: int) -> np.ndarray:
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
