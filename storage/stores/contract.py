"""The contract of a store, which one test class checks for each of them:

- an object is whole and durable once `put` has returned, and readers always see the whole of it or nothing;
- ``put(new=True)`` succeeds for one of many writers of a name, and raises ``FileExistsError`` for the others;
- a `Reader` fills buffers from a place on, as far as the object goes, and knows the object's length after its first
  read;
- `entries` lists all names below, in order; `delete` does not mind names that are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ...arrays.core.errors import CheckpointReplaced, CorruptCheckpoint, StoreError
from ..base.locations import join
from ..base.threads import UPLOADS, in_threads

Pieces = bytes | Iterable[Any] | Callable[[], Iterable[Any]]
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_CURES = {
    errno.EXDEV: " (on overlayfs no folder of a lower layer, as of a container's image, can be renamed: choose another "
    "place, or put a copy of it in its place first)",
    errno.EBUSY: " (it is a mount point, or in use: unmount it, or choose another place)",
}
LONGEST = 1 << 30  # bytes of an object that `Store.get` reads; a table of a million chunks has a fifth of that
SHORT = 64 << 10  # bytes of it that are asked for before its length is known


@dataclass(frozen=True, slots=True)
class StoredObjectInfo:
    """An object: its name below the store's root, its length, its last write (in seconds), and its version tag."""

    name: str
    nbytes: int
    modified: float
    tag: str


class Reader(Protocol):
    """An object that is open for reading."""

    @property
    def nbytes(self) -> int:
        """The length of the whole object."""

    @property
    def tag(self) -> str:
        """The version tag of the object; an object by another writer has another tag."""

    def readv(self, buffers: list[Any], offset: int) -> int:
        """Fill all buffers from ``offset`` on, or as many as the object has bytes for; returns the number of bytes."""

    def part(self, start: int, nbytes: int) -> bytes:
        """The bytes from ``start`` on, or as many as there are."""
        data = memoryview(bytearray(nbytes))
        return bytes(data[: self.readv([data], start) if nbytes else 0])

    def read_now(self, buffers: list[Any], offset: int) -> int:
        """As `readv`, of bytes that are in this machine's memory; fewer, or -1, where it would have to wait for others,
        or cannot tell."""
        return -1

    def at_hand(self, offset: int) -> bool:
        """Whether the bytes there come from this machine's memory: then a small read costs little."""
        return self.read_now([bytearray(1)], offset) == 1

    def close(self) -> None: ...


class Store(ABC):
    """Named byte strings below a root. The module's docstring has the contract of the methods."""

    root: str
    writable: ClassVar[bool] = True
    lists: ClassVar[bool] = True
    readers: ClassVar[int] = 4  # threads that read faster than one
    job: ClassVar[int] = 16 << 20  # bytes that one thread reads at a time
    batch: ClassVar[int] = 1 << 20  # bytes of one read that are copied on: they stay in a processor's cache
    gap: ClassVar[int] = 4 << 10  # bytes that are cheaper to read than to skip
    row: ClassVar[int] = 128 << 10  # rows up to this length are cheaper to read whole
    near: ClassVar[int] = 8 << 10  # the same, where a read need not wait for a disk

    @abstractmethod
    def reader(self, name: str) -> Reader:
        """Open an object; ``FileNotFoundError`` where there is none, at the latest when it is read."""

    def put(self, name: str, pieces: Pieces, *, new: bool = False) -> int:
        """Write an object whole from bytes or buffers; returns its length. ``new``: it must not exist.

        A function that makes the buffers anew may be called again, where an upload has failed on the way. A store that
        can only be read refuses.
        """
        self.refuse_writes()
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        self.refuse_writes()

    @abstractmethod
    def entries(self, under: str = "") -> Iterator[StoredObjectInfo]:
        """All objects below the folder ``under``, sorted by name."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders directly below the root, sorted."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the objects directly below the root, sorted; folders are not listed."""

    def get(self, name: str) -> bytes:
        """A whole object, such as a table of contents; `CorruptCheckpoint` where it is far too long for one."""
        with contextlib.closing(self.reader(name)) as r:
            first = r.part(0, SHORT)  # whose answer tells the length, too
            if (n := r.nbytes) > LONGEST:
                raise CorruptCheckpoint(f"{join(self.root, name)} has {n} bytes, at most {LONGEST} are read at once")
            return first if n <= len(first) else first + r.part(len(first), n - len(first))

    def size(self, name: str) -> int | None:
        """The length of an object, or None where there is none."""
        with contextlib.suppress(*_ABSENT), contextlib.closing(self.reader(name)) as r:
            return r.nbytes
        return None

    def tag(self, name: str) -> str | None:
        """The version tag of the present object, or None where there is none."""
        with contextlib.suppress(*_ABSENT), contextlib.closing(self.reader(name)) as r:
            return r.tag or None
        return None

    def tags(self, names: Sequence[str]) -> list[str | None]:
        """The same of several objects."""
        return in_threads(self.tag, names, UPLOADS)

    def refuse_writes(self) -> None:
        if not self.writable:
            raise StoreError(f"{self.root} can only be read; write to a local directory, s3://, gs:// or az://")


def fill(views: list[memoryview], data: memoryview) -> None:
    """Move data into buffers of bytes, one after the other; what is left of them stays in the list."""
    while len(data):
        n = min(len(data), len(views[0]))
        views[0][:n], data, views[0] = data[:n], data[n:], views[0][n:]
        if not len(views[0]):
            views.pop(0)


def failed(error: OSError, what: str) -> StoreError:
    """The operating system's error as one of ours; ``what`` says what could not be done, and where.

    >>> str(failed(PermissionError(13, "Permission denied", "/x"), "/x cannot be read"))
    '/x cannot be read: Permission denied'
    """
    cure = _CURES.get(error.errno or 0, "")
    out = StoreError(f"{what}: {error.strerror or error}{cure}")
    out.errno = error.errno
    return out


def unlisted(error: OSError) -> None:
    """The ``onerror`` of ``os.walk``: a folder that cannot be listed is an error, not empty; one that is gone is."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise failed(error, f"{error.filename[:200]} cannot be listed") from error


def listed(folder: str) -> list[str]:
    """The names in a local folder, in order; none where it is gone."""
    try:
        return sorted(os.listdir(folder))
    except OSError as e:
        unlisted(e)
        return []


_opened: ContextVar[list[tuple[str, Reader]] | None] = ContextVar("opened", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Callable[[], dict[str, str]]]:
    """Gives a function that returns the tag of each object that this thread reads within the block."""
    opened: list[tuple[str, Reader]] = []

    def tags() -> dict[str, str]:
        out: dict[str, str] = {}
        for where, reader in opened:
            if out.setdefault(where, reader.tag) != reader.tag:
                raise CheckpointReplaced(
                    f"{where} was replaced while the checkpoint was opened: it had {out[where]}; now it has "
                    f"{reader.tag}"
                )
        return out

    token = _opened.set(opened)
    try:
        yield tags
    finally:
        _opened.reset(token)


def recorded(where: str, reader: Reader) -> Reader:
    """The reader of an object, after noting it for `recording`."""
    if (opened := _opened.get()) is not None:
        opened.append((where, reader))
    return reader


def is_recording() -> bool:
    """Whether a `recording` is open in this thread."""
    return _opened.get() is not None
