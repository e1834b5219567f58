"""Where checkpoints lie: a local directory or an object store, behind one small contract.

A *location* is a text: an absolute path, or a URL (``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``; to read, ``http://``,
``https://`` and what fsspec knows, such as ``hf://``), with its options in it (see ``url_options``). It travels in plans to other processes,
which find the store again with `at`. Names inside a store are relative, with ``/``.

The contract of a `Store`, which one test class checks for each of them:

- what `put` has returned for is whole and durable, and readers see the whole of it or nothing, whatever happens meanwhile;
- ``put(new=True)`` succeeds for one of many writers of a name, and raises ``FileExistsError`` for the others;
- a `Reader` fills buffers from a place on, as far as the object goes, and knows the object's length after its first read;
- `entries` lists all names below, in order; `delete` does not mind names that are gone.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote, urlsplit

from ...arrays.core.errors import CheckpointError, CheckpointExists, CheckpointReplaced, CorruptCheckpoint, StoreError
from . import url_options
from .filesystem import active, preadv

Pieces = bytes | Iterable[Any] | Callable[[], Iterable[Any]]

_URL = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]+)://(.*)\Z", re.S)
_LONGEST = 4095  # characters: no system opens a longer path
SCHEMES = ("s3", "gs", "az", "memory", "http", "https")
READ_ONLY = ("http", "https")
_ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
_NAMED_BEFORE_AT = ("abfs", "abfss", "github")  # container@account, organisation:repository@branch: no users
LONGEST = 1 << 30  # bytes of an object that `Store.get` reads; a table of a million chunks has a fifth of that


# ----- locations ------------------------------------------------------------------------------------------------------


def is_url(location: str) -> bool:
    """Whether a location lies in an object store."""
    return "://" in location and _URL.match(location) is not None


def location(path: str | os.PathLike[str]) -> str:
    """The absolute form of what a user calls a path.

    Raises `CheckpointError` for an unknown scheme, and for a URL that carries a user, a password or a query: credentials come from the
    environment, so that no message, plan or manifest can show them.

    >>> location("s3://bucket/run//step-1/"), location("file:///tmp/x")
    ('s3://bucket/run/step-1', '/tmp/x')
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise CheckpointError(f"a location is a text or a path, not {path!r:.40}")
    if "\0" in text:
        raise CheckpointError(f"{text[:80]!r} has a NUL byte, which no name of a file has")
    if len(text) > _LONGEST:
        raise CheckpointError(f"{text[:80]}… has {len(text)} characters, more than the {_LONGEST} of a path or URL")
    found = _URL.match(text)
    if found is None:
        if re.match(r"[a-z0-9]+::([a-z0-9]+::)*[a-z0-9]+://", text):
            raise CheckpointError("chained URLs (a::b://…) are not opened; name the place itself")
        return os.path.abspath(text)
    scheme = found[1].lower()
    scheme = _ALIASES.get(scheme, scheme)
    if scheme in ("file", "local"):
        return os.path.abspath(unquote(urlsplit(text).path))
    if scheme not in SCHEMES:
        from .fsspec_store import is_known

        if not is_known(scheme):
            raise CheckpointError(
                f"{scheme}:// is not a kind of storage; known are {', '.join(f'{s}://' for s in SCHEMES)}, "
                "and to read, those of fsspec where its package is installed"
            )
    rest = found[2]
    user = "@" in rest.split("/")[0] and scheme not in _NAMED_BEFORE_AT
    if user or "?" in rest or "#" in rest:
        # Neither the part before @ nor the query is repeated here: they may be secrets.
        raise CheckpointError(
            f"a {scheme}:// location has no user, password, query or fragment; credentials come from the environment"
        )
    bucket, *parts = [p for p in rest.split("/") if p] or [""]
    if scheme not in SCHEMES and rest.startswith("/"):
        bucket, parts = "", [bucket, *parts]  # hdfs:///path: of the host that is configured
    elif not bucket and scheme != "memory":
        raise CheckpointError(f"{text} names no {'host' if scheme in READ_ONLY else 'bucket'}")
    if any(p in (".", "..") for p in parts):
        raise CheckpointError(f"{text}: '.' and '..' have no meaning in an object store")
    return f"{scheme}://{'/'.join([url_options.joined(scheme, *url_options.divide(bucket)), *parts])}"


def options(path: str | os.PathLike[str], **given: str | int | bool) -> str:
    """A URL with options in its text, which is used wherever a URL may stand; it travels to workers as it is.

    Parameters
    ----------
    path
        A URL, which may have options already.
    **given
        ``s3://``: ``endpoint``, ``region``, ``anonymous``, ``encryption`` (``"AES256"``, ``"aws:kms"``, …), ``kms_key``, ``bucket_key``,
        ``storage_class``, ``requester_pays``, ``virtual_hosted``. ``gs://``: ``endpoint``, ``anonymous``, ``storage_class``. ``az://``: these and
        ``account``. URLs that fsspec opens: what its file system takes. What may be a secret is refused: credentials come from the environment.

    Examples
    --------
    >>> options("s3://bucket/run", region="eu-west-1", anonymous=True)
    's3://bucket;anonymous=true;region=eu-west-1/run'
    """
    where = location(path)
    if not is_url(where):
        raise CheckpointError(f"{where} is a local path, which has no options")
    scheme, _, rest = where.partition("://")
    authority, slash, below = rest.partition("/")
    host, held = url_options.divide(authority)
    return f"{scheme}://{url_options.joined(scheme, host, {**held, **given})}{slash}{below}"


def join(root: str, *names: str) -> str:
    """A location below another."""
    return "/".join([root, *names]) if is_url(root) else os.path.join(root, *names)


def split(where: str) -> tuple[str, str]:
    """The location above, and the last name.

    >>> split("s3://bucket/run/step-1")
    ('s3://bucket/run', 'step-1')
    """
    if not is_url(where):
        return os.path.split(where)
    scheme, _, rest = where.partition("://")
    head, _, name = rest.rpartition("/")
    return (f"{scheme}://{head}", name) if head else (where, "")


# ----- the contract ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """An object: its name below the store's root, its length, when it was last written (seconds), and what tells its version."""

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
        """What tells the version of the object that is read: another writer's object has another."""

    def readv(self, buffers: list[Any], offset: int) -> int:
        """Fill all buffers from ``offset`` on, or as many as the object has bytes for; returns the number of bytes."""

    def at_hand(self, offset: int) -> bool:
        """Whether the bytes there come from this machine's memory: then a small read costs little."""
        return False

    def close(self) -> None: ...


class Store(ABC):
    """Named byte strings below a root. Read the module's text for what its methods promise."""

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

    @abstractmethod
    def put(self, name: str, pieces: Pieces, *, new: bool = False) -> int:
        """Write an object whole from bytes or buffers; returns its length. ``new``: it must not exist.

        A function that makes the buffers anew may be called again, where an upload has failed on the way.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""

    @abstractmethod
    def entries(self, under: str = "") -> Iterator[Entry]:
        """All objects below the folder ``under``, sorted by name."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders directly below the root, sorted."""

    @abstractmethod
    def files(self) -> list[str]:
        """Names of the objects directly below the root, sorted; what lies in folders is not looked at."""

    def get(self, name: str) -> bytes:
        """A whole object; `CorruptCheckpoint` where it is far too long for what is read whole, such as a table of contents."""
        with contextlib.closing(self.reader(name)) as r:
            n = r.nbytes
            if n > LONGEST:
                raise CorruptCheckpoint(f"{join(self.root, name)} has {n} bytes, at most {LONGEST} are read at once")
            data = bytearray(n)
            got = r.readv([data], 0) if n else 0
            return bytes(data[:got])

    def size(self, name: str) -> int | None:
        """The length of an object, or None where there is none."""
        try:
            with contextlib.closing(self.reader(name)) as r:
                return r.nbytes
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def tag(self, name: str) -> str | None:
        """What tells the version of an object that is there now, or None where there is none."""
        try:
            with contextlib.closing(self.reader(name)) as r:
                return r.tag or None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def refuse_writes(self) -> None:
        if not self.writable:
            raise StoreError(f"{self.root} can only be read; write to a local directory, s3://, gs:// or az://")


def at(root: str) -> Store:
    """The store of a directory's location."""
    if not is_url(root):
        return LocalStore(root)
    if root.partition("://")[0] not in SCHEMES:
        from .fsspec_store import FsspecStore

        return FsspecStore(root)
    from .object_store import ObjectStore

    return ObjectStore(root)


def holding(where: str) -> tuple[Store, str]:
    """The store of a file's location, and the file's name in it."""
    if not is_url(where):
        return _local(where)
    head, name = split(where)
    return at(head), name


@lru_cache(maxsize=1 << 12)
def _local(where: str) -> tuple[Store, str]:
    head, name = os.path.split(where)
    return LocalStore(head), name


_opened: ContextVar[list[tuple[str, Reader]] | None] = ContextVar("opened", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Callable[[], dict[str, str]]]:
    """Gives what tells the tag of each object that was read meanwhile, in this thread."""
    opened: list[tuple[str, Reader]] = []
    token = _opened.set(opened)
    try:
        yield lambda: _tags(opened)
    finally:
        _opened.reset(token)


def _tags(opened: list[tuple[str, Reader]]) -> dict[str, str]:
    out: dict[str, str] = {}
    for where, reader in opened:
        if out.setdefault(where, reader.tag) != reader.tag:
            raise CheckpointReplaced(
                f"{where} was replaced while the checkpoint was opened: it had {out[where]}; now it has {reader.tag}"
            )
    return out


def recorded(where: str, reader: Reader) -> Reader:
    """The reader of an object, after `recording` was told."""
    if (opened := _opened.get()) is not None:
        opened.append((where, reader))
    return reader


_listings: ContextVar[dict[str, set[str]] | None] = ContextVar("listings", default=None)


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """Ask an object store for its names once, however many arrays are checked with `missing` meanwhile."""
    token = _listings.set({})
    try:
        yield
    finally:
        _listings.reset(token)


def missing(root: str, folder: str, files: Sequence[str]) -> list[str]:
    """Those of the files of one folder of a checkpoint that do not exist."""
    known = _listings.get()
    if not is_url(root):
        held = set() if known is None else known.setdefault(root, set())  # many arrays may lie in one pack
        if held.issuperset(files):
            return []
        held.update(f for f in files if f not in held and os.path.exists(f"{root}{os.sep}{f}"))
        return [f for f in files if f not in held]
    store = at(root)
    if store.lists:  # one request for all
        if known is None:
            held = {e.name for e in store.entries(folder)}
        else:
            held = known[root] if root in known else known.setdefault(root, {e.name for e in store.entries()})
        return [f for f in files if f not in held]
    return [f for f in files if store.size(f) is None]


# ----- local files ----------------------------------------------------------------------------------------------------


def failed(error: OSError, what: str) -> StoreError:
    """The operating system's error as one of ours; ``what`` says what could not be done, and where.

    >>> str(failed(PermissionError(13, "Permission denied", "/x"), "/x cannot be read"))
    '/x cannot be read: Permission denied'
    """
    out = StoreError(f"{what}: {error.strerror or error}")
    out.errno = error.errno
    return out


def _kind(mode: int) -> str:
    """In words, what is no file."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


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

    def gather(self, nbytes: int, starts: range) -> bytes:
        """The short runs of ``nbytes`` that begin at ``starts``, one after the other; fewer bytes where the file ends before."""
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
        if _opened.get() is not None:
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
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
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
        from .atomic_directory import make_parents, temporary

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

    def entries(self, under: str = "") -> Iterator[Entry]:
        found = []
        for folder, _, files in os.walk(self._path(under) if under else self.root):
            for file in files:
                path = os.path.join(folder, file)
                with contextlib.suppress(FileNotFoundError):
                    s = os.stat(path)
                    name = posixpath.join(*os.path.relpath(path, self.root).split(os.sep))
                    found.append(Entry(name, s.st_size, s.st_mtime, _tag_of(s)))
        return iter(sorted(found, key=lambda e: e.name))

    def folders(self) -> list[str]:
        return self._children(lambda e: e.is_dir())

    def files(self) -> list[str]:
        return self._children(lambda e: e.is_file())

    def _children(self, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(e.name for e in entries if wanted(e))
        except (FileNotFoundError, NotADirectoryError):
            return []
