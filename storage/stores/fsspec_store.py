"""Reading through fsspec: Hugging Face's hub, HDFS, FTP, GitHub and all else that has a file system there.

These stores can only be read. A commit needs a name that one of many writers creates, and an object that is replaced
only where it is still the one that was seen (see ``object_commit``); fsspec promises neither.

Credentials come from where each file system looks, and from fsspec's own configuration (``FSSPEC_…`` variables,
``~/.config/fsspec``).
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from ...arrays.core.errors import MeshtapeError, StoreError
from ..base.locations import join
from ..base.waiting import uninterrupted
from . import url_options
from .contract import Reader, Store, StoredObjectInfo, fill, recorded
from .object_store import plain_text, repeated

T = TypeVar("T")

# Whatever file systems say of a version. Times of reading and counts of links are not among them.
_VERSION = (
    "ETag", "etag", "e_tag", "generation", "version_id", "VersionId", "sha", "blob_id", "md5Hash", "md5", "content_md5",
    "checksum", "ino", "mtime", "modification_time", "LastModified", "last_modified", "modify", "updated", "created",
)  # fmt: skip
REFRESH = 60.0  # seconds for which a file system may answer from its own listings: hubs count the questions
_refreshed: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
_TIMES = ("mtime", "modification_time", "LastModified", "last_modified", "updated", "created")


def is_known(scheme: str) -> bool:
    """Whether fsspec has a file system of that name, be its package installed or not."""
    try:
        with uninterrupted():
            import fsspec
    except ImportError:
        return False
    return scheme in fsspec.available_protocols() or scheme in fsspec.registry


def address(root: str) -> tuple[str, dict[str, Any]]:
    """A location as fsspec names it, and its options."""
    scheme, _, rest = root.partition("://")
    authority, slash, below = rest.partition("/")
    host, options = url_options.divide(authority)
    return f"{scheme}://{host}{slash}{below}", {name: url_options.plain(value) for name, value in options.items()}


def filesystem(root: str) -> tuple[Any, str]:
    """(the file system of a location, the location's path in it), one a thread: not every one may be shared."""
    url, options = address(root)
    try:
        held, path = importlib.import_module("fsspec").url_to_fs(url, **options)
    except ImportError as e:
        raise StoreError(f"{root} needs a package that is not installed: {plain_text(e)}") from None
    except Exception as e:
        raise StoreError(f"{root} cannot be reached: {type(e).__name__}: {plain_text(e)}") from None
    return held, path.rstrip("/")


def _asked(work: Callable[[], T], where: str, asked: str, nbytes: int = 0) -> T:
    def once() -> T:
        try:
            return work()
        except (IsADirectoryError, NotADirectoryError):
            raise FileNotFoundError(where) from None
        except (OSError, MeshtapeError):
            raise
        except NotImplementedError as e:
            raise StoreError(f"{where}: this file system does not do that ({plain_text(e)})") from None
        except Exception as e:  # each file system has errors of its own
            raise ConnectionError(f"{type(e).__name__}: {e}") from None

    return repeated(once, where, asked, nbytes)


def _tag(info: Mapping[str, Any]) -> str:
    version = " ".join(f"{name} {info[name]}" for name in _VERSION if info.get(name))
    return f"{info['size']} bytes, {version or 'of an unknown version'}"


def _modified(info: Mapping[str, Any]) -> float:
    for value in (info.get(name) for name in _TIMES):
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


class _FsspecReader(Reader):
    __slots__ = ("_info", "_name", "_root", "_where")

    def __init__(self, root: str, name: str) -> None:
        self._root, self._name, self._where = root, name, join(root, name)
        self._info: Mapping[str, Any] | None = None

    def _known(self) -> Mapping[str, Any]:
        if self._info is None:

            def once() -> Mapping[str, Any]:
                held, base = filesystem(self._root)
                if time.monotonic() - _refreshed.get(held, -math.inf) > REFRESH:
                    _refreshed[held] = time.monotonic()
                    held.invalidate_cache()
                info = held.info(f"{base}/{self._name}")
                if info["type"] != "file":
                    raise FileNotFoundError(self._where)
                return info

            self._info = _asked(once, self._where, "its length and version")
            recorded(self._where, self)
        return self._info

    @property
    def nbytes(self) -> int:
        return int(self._known()["size"])

    @property
    def tag(self) -> str:
        return _tag(self._known())

    def readv(self, buffers: list[Any], offset: int) -> int:
        views = [memoryview(b).cast("B") for b in buffers]
        count = max(0, min(sum(map(len, views)), self.nbytes - offset))
        if not count:
            return 0

        def once() -> memoryview:
            held, base = filesystem(self._root)
            data = held.cat_file(f"{base}/{self._name}", start=offset, end=offset + count)
            if len(data) != count:
                raise ConnectionError(f"{len(data)} bytes came where {count} from {offset} on were asked for")
            return memoryview(data)

        fill(views, _asked(once, self._where, f"bytes {offset} to {offset + count}", count))
        return count


@dataclass(frozen=True)
class FsspecStore(Store):
    """A folder of a file system of fsspec, to read."""

    root: str

    writable: ClassVar[bool] = False
    readers: ClassVar[int] = 8
    job: ClassVar[int] = 32 << 20
    batch: ClassVar[int] = 8 << 20
    gap: ClassVar[int] = 1 << 20
    row: ClassVar[int] = 1 << 20

    def reader(self, name: str) -> Reader:
        return _FsspecReader(self.root, name)

    def _listed(self, under: str, ask: Callable[[Any, str], Any]) -> tuple[str, Any]:
        """The path of the root, and what the file system lists below a place; nothing where that is not there."""

        def once() -> tuple[str, Any]:
            held, base = filesystem(self.root)
            held.invalidate_cache()
            try:
                return base, ask(held, f"{base}/{under}".rstrip("/"))
            except FileNotFoundError:
                return base, {}

        return _asked(once, join(self.root, under), "a list of its names")

    def entries(self, under: str = "") -> Iterator[StoredObjectInfo]:
        base, found = self._listed(under, lambda held, at: held.find(at, withdirs=False, detail=True))
        every = (
            StoredObjectInfo(path[len(base) :].lstrip("/"), int(info["size"]), _modified(info), _tag(info))
            for path, info in found.items()
            if path.rstrip("/") != base and info["type"] == "file"
        )
        return iter(sorted(every, key=lambda e: e.name))

    def folders(self) -> list[str]:
        return self._children("directory")

    def files(self) -> list[str]:
        return self._children("file")

    def _children(self, kind: str) -> list[str]:
        base, found = self._listed("", lambda held, at: held.ls(at, detail=True))
        paths = [str(info["name"]).rstrip("/") for info in found if info["type"] == kind]
        return sorted(path.rpartition("/")[2] for path in paths if path != base)
