"""Object stores through obstore: S3, Google Cloud Storage, Azure Blob Storage, memory, and plain HTTP to read.

Credentials come from where each cloud's own tools look: environment variables (``AWS_ACCESS_KEY_ID``,
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME``, …), instance metadata, and for S3 the shared files
of ``~/.aws`` where boto3 is installed. They are never part of a location, a message or a plan.

A request that fails in the server or on the way is repeated, with a growing pause, and so is an interrupted download.
After the last attempt it is a `StoreError`. ``memory://`` lives in one process, for tests and examples.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

from ...arrays.core.errors import CheckpointReplaced, MeshtapeError, StoreError
from ..base import waiting
from ..base.checksums import crc32c
from ..base.locations import READ_ONLY, SCHEMES, join
from ..base.waiting import uninterrupted
from . import multipart, url_options
from .contract import Pieces, Reader, Store, StoredObjectInfo, fill, recorded

T = TypeVar("T")

ATTEMPTS = 5  # of a whole download; each of its requests is repeated by the client too
RETRIES = 6
FIRST_PAUSE = 0.1  # seconds; doubled each time
CONNECT_TIMEOUT = timedelta(seconds=10)
STALL_TIMEOUT = timedelta(seconds=30)  # without a byte
_REQUEST = 8 << 20  # bytes of one download

# Where clouds keep the credentials of their own machines: asked where the environment has none.
_METADATA = re.compile(r"/latest/api/token|/latest/meta-data|computeMetadata|metadata/identity|169\.254\.169\.254")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_SECRETS = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|SAS|CREDENTIAL")
_VERSION = " bytes, version "
_STREAMED = 64 << 20  # of a server without ranges: bytes that are skipped at most
_clients: dict[Any, Any] = {}
_rangeless: set[str] = set()  # servers that have answered a request for a range with the whole
_lock = waiting.lock()


def _obstore() -> Any:
    try:
        with uninterrupted():
            return importlib.import_module("obstore")
    except ImportError:
        raise StoreError("object stores need obstore: install meshtape[s3], or obstore itself") from None


def environment() -> str:
    """A digest of the credentials and endpoints in the environment, which reveals none of them."""
    held = sorted((k, v) for k, v in os.environ.items() if k.startswith(("AWS_", "GOOGLE_", "AZURE_")))
    return hashlib.sha256(repr(held).encode()).hexdigest()


def client(root: str) -> tuple[Any, str]:
    """(obstore's store of the bucket, prefix of ``root`` in it); one store a bucket and environment."""
    scheme, _, rest = root.partition("://")
    bucket, _, prefix = rest.partition("/")  # with the options of the URL
    limit = waiting.seconds()
    key = (scheme, bucket, "" if scheme == "memory" else environment(), limit)
    _refuse_fork(root)
    with _lock:
        if key not in _clients:
            _clients[key] = _connect(scheme, bucket, limit)
        return _clients[key], prefix


def _refuse_fork(where: str) -> None:
    """Raise `StoreError` in a forked child whose requests nobody would answer. Memory needs no threads."""
    scheme = where.partition("://")[0]
    if scheme in SCHEMES and scheme != "memory":
        waiting.refuse_fork("obstore", where)


def _connect(scheme: str, authority: str, limit: float) -> Any:
    _obstore()
    bucket, given = url_options.divide(authority)
    config = {url_options.KNOWN[scheme][name]: url_options.plain(value) for name, value in given.items()}
    config.pop("", None)
    stores = importlib.import_module("obstore.store")
    if scheme == "memory":
        return stores.MemoryStore()
    variables = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
    addresses = [given.get("endpoint", ""), *(os.environ.get(name, "") for name in variables)]
    plain = scheme == "http" or any(a.startswith("http://") for a in addresses)
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": min(STALL_TIMEOUT, timedelta(seconds=limit + 1)),
            "timeout": timedelta(seconds=waiting.seconds(multipart.PART)),
            "allow_http": plain,
            "user_agent": "meshtape",
        },
        "retry_config": {
            "max_retries": RETRIES,
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_PAUSE),
                "max_backoff": timedelta(seconds=15),
                "base": 2,
            },
            "retry_timeout": timedelta(seconds=limit),
        },
    }
    try:
        if scheme == "s3":
            if "skip_signature" not in config and (provider := _shared_files()) is not None:
                options["credential_provider"] = provider
            return stores.S3Store(bucket, config=config, **options)
        if scheme == "gs":
            return stores.GCSStore(bucket, config=config, **options)
        if scheme == "az":
            # The client does not look for the name itself (https://github.com/developmentseed/obstore, class
            # AzureStore).
            config.setdefault("account_name", os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"))
            if not config["account_name"]:
                raise StoreError("AZURE_STORAGE_ACCOUNT_NAME is not set")
            return stores.AzureStore(bucket, config=config, **options)
        return stores.HTTPStore(f"{scheme}://{bucket}", **options)
    except Exception as e:
        raise StoreError(f"{scheme}://{bucket}: {plain_text(e)}; check its environment variables") from None


def _shared_files() -> Any:
    """A provider of the credentials in ``~/.aws``, where the environment has none and such files exist; else None."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE"):
        return None
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE") or os.path.expanduser("~/.aws/config"),
    )
    if not (os.environ.get("AWS_PROFILE") or any(map(os.path.exists, files))):
        return None
    with contextlib.suppress(ImportError):
        return importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()
    return None


def plain_text(error: BaseException) -> str:
    """The first line of a client's error, without anything that may be secret."""
    text = str(error).strip().split("\n")[0].split("Debug source")[0][:400]
    text = re.sub(r"(\w+://)[^/\s@]*@", r"\1", text)
    text = re.sub(r"(\w+://[^\s?\"']+)\?[^\s\"')]*", r"\1", text)
    for name, value in os.environ.items():
        if len(value) > 3 and _SECRETS.search(name.upper()):
            text = text.replace(value, "…")
    return text


def _explained(error: Exception, where: str) -> Exception:
    """The error that is raised for one of obstore's."""
    kind = type(error).__name__
    if _NO_BUCKET.search(str(error)):
        return StoreError(f"{where}: the bucket does not exist, or these credentials do not see it")
    if _METADATA.search(str(error)):
        return StoreError(
            f"{where}: there are no credentials in the environment, and this machine has no service that gives any "
            f"({plain_text(error)})"
        )
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{where}: no such object")
    if kind == "AlreadyExistsError" or kind == "PreconditionError":
        return FileExistsError(f"{where} was written by somebody else")
    refused = kind in ("PermissionError", "PermissionDeniedError", "UnauthenticatedError")
    if refused or re.search(r"\b(401|403)\b(?!\.)", str(error)):
        return StoreError(
            f"{where}: access was refused; check the credentials in the environment, and what they may do "
            f"({plain_text(error)})"
        )
    return StoreError(f"{where}: {plain_text(error).replace('retry_timeout', 'meshtape.timeouts.store')}")


def _passes(error: Exception) -> bool:
    """Whether another attempt may go better."""
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return False
    text = str(error)
    if _METADATA.search(text):  # the client has asked often enough
        return False
    if re.search(r"\b4\d\d [A-Z]", text) and not re.search(r"\b(408|429) ", text):
        return False
    return isinstance(error, OSError) or type(error).__name__ == "GenericError"


def _host(where: str) -> str:
    """``scheme://host`` of a location."""
    return "/".join(where.split("/")[:3])


def repeated(work: Callable[[], T], where: str, asked: str, nbytes: int = 0) -> T:
    """The result of a request for ``nbytes``, asked again where that may help; `StoreError` after its time (`waiting`).

    ``asked`` is for the error, as "its length".
    """
    _refuse_fork(where)
    if where.startswith("memory:"):
        return _repeated(work, where, math.inf)
    end = time.monotonic() + waiting.seconds(nbytes)
    return _repeated(lambda: waiting.limited(work, where, asked, nbytes, end - time.monotonic()), where, end)


def _repeated(work: Callable[[], T], where: str, end: float) -> T:
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except Exception as e:
            # obstore's own types; an error of ours, or of the caller's iterator, goes through as it is.
            if isinstance(e, MeshtapeError) or not (type(e).__module__.startswith("obstore") or isinstance(e, OSError)):
                raise
            if attempt == ATTEMPTS - 1 or time.monotonic() > end or not _passes(e):
                raise _explained(e, where) from None
        time.sleep(FIRST_PAUSE * 2**attempt * (0.5 + random.random()))
    raise AssertionError("unreachable")


def _fetched(work: Callable[[], T], where: str, asked: str = "its length", nbytes: int = 0) -> T:
    """`repeated` for a read: a server that answers 409 or 412 has another object by now."""
    try:
        return repeated(work, where, asked, nbytes)
    except FileExistsError:
        raise CheckpointReplaced(f"{where} was replaced while it was read; open it again") from None


def _tag(meta: Any) -> str:
    # Servers call the tag of an answer weak that they pack on its way; the object is the same.
    version = str(meta.get("e_tag") or meta["last_modified"]).removeprefix("W/")
    return f"{meta['size']}{_VERSION}{version}"


class _ObjectReader(Reader):
    __slots__ = ("_client", "_key", "_nbytes", "_tag", "_where")

    def __init__(self, client: Any, key: str, where: str) -> None:
        self._client, self._key, self._where = client, key, where
        self._nbytes: int | None = None
        self._tag = ""

    @property
    def nbytes(self) -> int:
        if self._nbytes is None:
            self._nbytes = _fetched(self._looked, self._where)
        return self._nbytes

    @property
    def tag(self) -> str:
        """The tag at the first read; before any read, the present one."""
        if not self._tag:
            with contextlib.suppress(FileNotFoundError):
                _fetched(self._looked, self._where)
        return self._tag

    def _looked(self) -> int:
        """Meet the present version; returns its length. Over HTTP a byte is asked for, as reads are: caches on the way
        answer HEAD with an old version or with none, and some servers not at all."""
        if self._where.partition("://")[0] in READ_ONLY and _host(self._where) not in _rangeless:
            try:
                if self._asked(0, 1) is not None:
                    return self._nbytes or 0
            except Exception as e:
                # An empty file has no first byte. The text holds the URL, whose port or name may have 416 in it.
                if "416 Range" not in str(e):
                    raise
        try:
            return self._seen(_obstore().head(self._client, self._key))
        except Exception as e:
            if not any(said in str(e) for said in ("405 Method", "501 Not")):
                raise
            # A server without HEAD; what it sends says how much there is.
            return self._seen(_obstore().get(self._client, self._key).meta)

    def _seen(self, meta: Any) -> int:
        """Remember version and length of the object from an answer; returns the length. All reads are of one
        version."""
        tag = _tag(meta)
        if not self._tag:
            recorded(self._where, self)
            self._tag, self._nbytes = tag, int(meta["size"])
        elif tag != self._tag:
            raise CheckpointReplaced(
                f"{self._where} was replaced while it was read: it had {self._tag}; now it has {tag}. Open it again"
            )
        return int(meta["size"])

    def readv(self, buffers: list[Any], offset: int) -> int:
        views = [memoryview(b).cast("B") for b in buffers]
        wanted, total = sum(map(len, views)), 0
        while total < wanted:
            data = self._range(offset + total, min(wanted - total, _REQUEST))
            if not len(data):
                break
            total += len(data)
            fill(views, data)
        return total

    def _range(self, start: int, n: int) -> memoryview:
        def once() -> memoryview:
            data = self._asked(start, n) if _host(self._where) not in _rangeless else None
            if data is None:
                data = self._streamed(start, n)
            if len(data) != max(0, min(n, (self._nbytes or 0) - start)):
                # The client believes what the head of an answer says; this one said something else than it sent.
                raise ConnectionError(f"{len(data)} bytes came where {n} from {start} on were asked for")
            return data

        if self._nbytes is not None and start >= self._nbytes:
            return memoryview(b"")
        whole = start + n if _host(self._where) in _rangeless else n
        try:
            return _fetched(once, self._where, f"bytes {start} to {start + n}", whole)
        except StoreError as e:
            # Servers answer a range behind the end with an error; whether it was that one, the length tells.
            if not waiting.is_late(e) and start >= self.nbytes:
                return memoryview(b"")
            raise

    def _asked(self, start: int, n: int) -> memoryview | None:
        """A range of the object, or None where the server answers with the whole of it."""
        from obstore.exceptions import NotSupportedError

        try:
            found = _obstore().get(self._client, self._key, options={"range": (start, start + n)})
        except NotSupportedError:
            _rangeless.add(host := _host(self._where))
            warnings.warn(
                f"{host} does not answer requests for ranges of bytes: each read downloads its file from the start",
                stacklevel=2,
            )
            return None
        self._seen(found.meta)
        return memoryview(found.bytes())

    def _streamed(self, start: int, n: int) -> memoryview:
        """A range from a server without ranges: a download from the start, of which only that part is kept."""
        if start > _STREAMED:
            raise StoreError(
                f"{self._where}: the server does not answer requests for ranges of bytes, and the file is too long to "
                "be read from its start each time; copy it here, or have it served with ranges"
            )
        found = _obstore().get(self._client, self._key)
        encoding = str(found.attributes.get("Content-Encoding", "identity"))
        if encoding not in ("", "identity"):
            raise StoreError(f"{self._where}: the server sends it compressed ({encoding}); have it served as it is")
        self._seen(found.meta)
        out, at = bytearray(), 0
        for piece in found.stream(min_chunk_size=1 << 20):
            view = memoryview(piece)
            out += view[max(0, start - at) : max(0, start + n - at)]
            at += len(view)
            if at >= start + n:
                break
        return memoryview(out)


@dataclass(frozen=True)
class ObjectStore(Store):
    """A prefix of a bucket."""

    root: str

    readers: ClassVar[int] = 16
    job: ClassVar[int] = 8 << 20
    batch: ClassVar[int] = 8 << 20
    gap: ClassVar[int] = 1 << 20  # a request costs as much as a megabyte
    row: ClassVar[int] = 1 << 20

    @property
    def writable(self) -> bool:  # type: ignore[override]
        return self.root.partition("://")[0] not in READ_ONLY

    @property
    def lists(self) -> bool:  # type: ignore[override]
        return self.writable

    def _attributes(self) -> dict[str, str] | None:
        """The attributes of each written object."""
        given = url_options.divide(self.root.partition("://")[2].partition("/")[0])[1]
        return {"Storage-Class": given["storage_class"]} if "storage_class" in given else None

    def _at(self, name: str) -> tuple[Any, str, str]:
        held, prefix = client(self.root)
        return held, "/".join(p for p in (prefix, name) if p), join(self.root, name)

    def reader(self, name: str) -> Reader:
        return _ObjectReader(*self._at(name))

    def get(self, name: str) -> bytes:
        for _ in range(3):
            with contextlib.suppress(CheckpointReplaced):  # between two requests
                return super().get(name)
        return super().get(name)

    def put(self, name: str, pieces: Pieces, *, new: bool = False) -> int:
        return self._put(name, pieces, "create" if new else "overwrite")

    def version(self, entry: StoredObjectInfo) -> dict[str, str]:
        """The version of the present object, for `replace`."""
        if not self.root.startswith("gs:"):
            return {"e_tag": entry.tag.rpartition(_VERSION)[2]}
        # Google compares generations, of which its lists say nothing.
        held, key, where = self._at(entry.name)
        meta = repeated(lambda: _obstore().head(held, key), where, "its version")
        return {"e_tag": str(meta["e_tag"]), "version": str(meta["version"])}

    def replace(self, name: str, data: bytes, version: Mapping[str, str]) -> int:
        """Overwrite a `version` of an object; ``FileExistsError`` where the object has changed since."""
        return self._put(name, data, dict(version))

    def _put(self, name: str, pieces: Pieces, mode: Any) -> int:
        self.refuse_writes()
        held, key, where = self._at(name)
        if isinstance(pieces, bytes):
            return self._put_whole(name, pieces, mode)
        made = pieces if callable(pieces) else None

        def once() -> int:
            digest = 0

            def summed() -> Iterator[bytes]:
                nonlocal digest
                for data in multipart.owned(made() if made else pieces):
                    digest = crc32c(data, digest)
                    yield data

            rest = summed()
            first, n = [], 0
            for data in rest:
                first.append(data)
                n += len(data)
                if n > multipart.PART and not waiting.is_lost("obstore"):  # memory:// in a fork: no thread takes parts
                    try:
                        return multipart.in_parts(held, key, first, rest, self._attributes(), where)
                    except FileNotFoundError as e:
                        # Where the answer to its end was lost, the client has asked again for the end of what had
                        # ended.
                        if _NO_BUCKET.search(str(e)) or (nbytes := self._holds(name, digest)) is None:
                            raise
                        return nbytes
            return self._put_whole(name, b"".join(first), mode)

        if made is not None:
            return _repeated(once, where, time.monotonic() + waiting.seconds())
        try:
            return once()
        except Exception as e:
            if type(e).__module__.startswith("obstore"):
                raise _explained(e, where) from None
            raise

    def _holds(self, name: str, digest: int) -> int | None:
        """The length of an object where its bytes have this checksum."""
        data, at, found = bytearray(multipart.PART), 0, 0
        with contextlib.suppress(FileNotFoundError), contextlib.closing(self.reader(name)) as reader:
            while n := reader.readv([data], at):
                found, at = crc32c(bytes(data[:n]), found), at + n
        return at if found == digest else None

    def _put_whole(self, name: str, data: bytes, mode: Any) -> int:
        held, key, where = self._at(name)
        options = {"mode": mode, "use_multipart": False, "attributes": self._attributes()}
        try:
            work = partial(_obstore().put, held, key, data, **options)
            repeated(work, where, f"a write of {len(data)} bytes", len(data))
        except FileExistsError:
            # An answer that was lost is asked for again, and then the object that is there may be this very one.
            if self.get(name) != data:
                raise
        return len(data)

    def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        self.refuse_writes()
        held = self._at("")[0]
        keys = [self._at(n)[1] for n in names]

        def once() -> None:
            try:
                _obstore().delete(held, keys)
            except FileNotFoundError:
                # Google and Azure stop at the first that is gone.
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        _obstore().delete(held, key)

        repeated(once, self.root, f"a deletion of {len(keys)} objects")

    def entries(self, under: str = "") -> Iterator[StoredObjectInfo]:
        held, prefix, where = self._at(under)
        strip = len(self._at("")[1]) + 1 if self._at("")[1] else 0

        def once() -> list[Any]:
            return [m for page in _obstore().list(held, prefix=prefix or None) for m in page]

        self._refuse_lists()
        found = [
            StoredObjectInfo(m["path"][strip:], m["size"], m["last_modified"].timestamp(), _tag(m))
            for m in repeated(once, where, "a list of its names")
        ]
        return iter(sorted(found, key=lambda e: e.name))

    def folders(self) -> list[str]:
        return sorted(p.rstrip("/").rpartition("/")[2] for p in self._children()["common_prefixes"])

    def files(self) -> list[str]:
        return sorted(m["path"].rpartition("/")[2] for m in self._children()["objects"])

    def _children(self) -> Any:
        self._refuse_lists()
        held, prefix, where = self._at("")
        work = partial(_obstore().list_with_delimiter, held, prefix=prefix or None)
        return repeated(work, where, "a list of its names")

    def _refuse_lists(self) -> None:
        if not self.lists:
            raise StoreError(f"{self.root}: HTTP has no lists of files; name a checkpoint itself")
