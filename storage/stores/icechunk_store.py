"""Icechunk repositories as stores to read: ``icechunk://PLACE@REF``, where REF is a branch, a tag or the id of a
snapshot.

PLACE is a local path or an ``s3://`` URL. A snapshot never changes, so whoever opens a repository reads one snapshot
(`pinned`) to the end. The package ``icechunk`` does all that concerns the format.

Virtual chunks are ranges of files and objects elsewhere, which a snapshot names. A snapshot by others may name anything
that its reader may read, so nothing of them is fetched but below the prefixes that the location says (`allowing`), and
from the servers that the location or this environment says, never from one of the repository's own configuration.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote

from ...arrays.core.errors import CheckpointError, CheckpointReplaced, NotACheckpoint, StorageFull, StoreError
from ..base import waiting
from ..base.locations import is_url, join
from ..base.waiting import uninterrupted
from . import url_options
from .contract import Reader, Store, StoredObjectInfo, fill
from .filesystem import try_lock
from .object_store import environment

T = TypeVar("T")

SCHEME = "icechunk"
_OPTIONS = ("endpoint", "region", "anonymous", "requester_pays", "virtual_hosted")  # of an s3:// URL
_WAIT = 120.0  # seconds for which another commit to a local repository may take
_LONG = 256 << 20  # bytes for whose time a collection or a count may take: icechunk does not say how far it is
VIRTUAL = ";virtual_chunks="  # behind PLACE: URLs between commas, quoted
_FOLDERS = ("snapshots", "manifests", "chunks", "refs", "transactions", "overwritten")  # of a repository
_FORM = re.compile(r"icechunk://(?P<place>[^@]+)@(?P<ref>[^@/]+)(?:/(?P<node>.*))?", re.S)


def is_versioned(root: str) -> bool:
    """Whether a location lies in a repository."""
    return root.startswith(f"{SCHEME}://")


def divide(root: str) -> tuple[str, str, str]:
    """(place, branch or tag or snapshot, node) of a location.

    >>> divide("icechunk://s3://bucket/run@main/w")
    ('s3://bucket/run', 'main', 'w')
    """
    found = _FORM.fullmatch(root)
    if found is None:
        raise CheckpointError(
            f"{root}: an icechunk location is icechunk://PLACE@BRANCH, with a tag or a snapshot in place of a branch"
        )
    return found["place"], found["ref"], (found["node"] or "").strip("/")


def allowing(prefixes: str) -> str:
    """The part of a location that allows virtual chunks below some URLs, which commas divide.

    >>> allowing("file:///data/a, s3://bucket/b/")
    ';virtual_chunks=file%3A%2F%2F%2Fdata%2Fa%2F%2Cs3%3A%2F%2Fbucket%2Fb%2F'
    """
    held = [prefix.strip().rstrip("/") + "/" for prefix in prefixes.split(",") if prefix.strip()]
    for prefix in held:
        if not re.match(r"(file:///|s3://)[^/@?#]", prefix):
            raise CheckpointError(
                f"virtual_chunks allows folders as file:///… or s3://…, not {prefix.split('@')[-1]:.80}"
            )
    return VIRTUAL + quote(",".join(held), safe="") if held else ""


def package() -> Any:
    """The package icechunk; `StoreError` with what to install where it is not there."""
    # For each local repository it prints on the standard output that commits are not safe beside others; those of ours
    # take turns (see ``icechunk_commit``). Nobody can have chosen what it prints before it is imported; afterwards that
    # is its user's own matter.
    ours = "icechunk" not in sys.modules and "ICECHUNK_LOG" not in os.environ
    with uninterrupted():
        try:
            import icechunk
        except ImportError:
            raise StoreError("icechunk:// needs the package icechunk: pip install 'meshtape[icechunk]'") from None
        if ours:
            icechunk.set_logs_filter("warn,icechunk::storage::object_store=error,icechunk_arrow_object_store=error")
    return icechunk


def called(work: Callable[[], T], place: str, asked: str, nbytes: int = 0) -> T:
    """The result of calls of icechunk for a repository, which a limit or an interrupt ends where that is not on a disk
    here; `StoreError` in a forked child whose calls nobody would answer."""
    waiting.refuse_fork("icechunk", f"{SCHEME}://{place}")
    return waiting.limited(work, f"{SCHEME}://{place}", asked, nbytes) if _is_remote(place) else work()


def _is_remote(place: str) -> bool:
    return is_url(place) or VIRTUAL in place


def repository(place: str, *, create: bool = False, anew: bool = False) -> Any:
    """The repository at a place, opened once a process; ``anew`` to see what others have deleted of its history."""
    if anew:
        forget()
    surroundings = environment() if _is_remote(place) else ""
    return called(lambda: _repository(place, create, surroundings), place, "its opening")


@lru_cache(maxsize=16)
def _repository(place: str, create: bool, surroundings: str) -> Any:
    ice = package()
    place, _, virtual = place.partition(VIRTUAL)
    try:
        if not is_url(place):
            if not create and not os.path.isdir(place):  # icechunk would make it
                raise NotACheckpoint(f"{place} is no icechunk repository")
            for folder in (place, *(join(place, n) for n in _FOLDERS)):  # of which icechunk says that they are empty
                if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
                    raise StoreError(f"{folder} cannot be read: {os.strerror(errno.EACCES)}")
            storage = ice.local_filesystem_storage(place)
        elif place.startswith("s3://"):
            bucket, prefix, settings = _s3(place)
            access = {"anonymous": True} if settings.pop("anonymous") else {"from_env": True}
            storage = ice.s3_storage(bucket=bucket, prefix=prefix, **access, **settings)
        else:
            raise CheckpointError(f"{place}: icechunk repositories are opened at local paths and s3:// URLs")
        if create:
            return ice.Repository.open_or_create(storage)
        if not ice.Repository.exists(storage):
            raise NotACheckpoint(f"{place} is no icechunk repository")
        return ice.Repository.open(storage, **_virtual(ice, unquote(virtual)) if virtual else {})
    except ice.IcechunkError as e:
        raise refused(place, "cannot open it", e) from None


def _s3(url: str) -> tuple[str, str, dict[str, Any]]:
    """(bucket, prefix, settings of icechunk) of an ``s3://`` URL with options."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    bucket, given = url_options.divide(bucket)
    if unknown := given.keys() - _OPTIONS:
        raise CheckpointError(f"{url}: an icechunk repository has no option {', '.join(sorted(unknown))}")
    flags = {name: url_options.plain(given.get(name, "false")) is True for name in _OPTIONS}
    endpoint = given.get("endpoint")
    settings = {
        "region": given.get("region"),
        "endpoint_url": endpoint,
        "allow_http": (endpoint or "").startswith("http://"),
        "force_path_style": endpoint is not None and not flags["virtual_hosted"],
        "requester_pays": flags["requester_pays"],
        "anonymous": flags["anonymous"],
    }
    return bucket, prefix, settings


def _virtual(ice: Any, prefixes: str) -> dict[str, Any]:
    """What `Repository.open` takes for virtual chunks below some URLs to be fetched."""
    config, access = ice.RepositoryConfig(), {}
    for url in prefixes.split(","):
        if url.startswith("s3://"):
            bucket, prefix, settings = _s3(url)
            url, store = f"s3://{bucket}/{prefix}", ice.s3_store(**settings)
            who = ice.s3_anonymous_credentials() if settings["anonymous"] else ice.s3_from_env_credentials()
            access |= ice.containers_credentials({url: who})
        else:
            store = ice.local_filesystem_store(url.removeprefix("file://"))
            access[url] = getattr(ice.credentials, "LocalFileSystemAccess", None)  # None: of version 1
        config.set_virtual_chunk_container(ice.VirtualChunkContainer(url, store))
    return {"config": config, "authorize_virtual_chunk_access": access}


def is_id(ref: str) -> bool:
    """Whether a text has the form of a snapshot's id."""
    return re.fullmatch(r"[0-9A-Z]{20}", ref) is not None


def first_line(error: Exception) -> str:
    """The first line of an error of icechunk, which tells many of its own code."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def refused(root: str, what: str, error: Exception) -> StorageFull | StoreError:
    """The error for what icechunk did not do; `StorageFull` where a disk is full, of which icechunk gives a text."""
    full = any(f"(os error {n})" in str(error) for n in (errno.ENOSPC, errno.EDQUOT))
    cure = "; storage.gc frees what was written in vain, a day later or by older_than=" if full else ""
    return (StorageFull if full else StoreError)(f"{root}: icechunk {what}: {first_line(error)}{cure}")


@contextlib.contextmanager
def asked(root: str, what: str = "its history") -> Iterator[None]:
    """Errors of icechunk as `StoreError`."""
    try:
        yield
    except package().IcechunkError as e:
        raise refused(root, f"cannot read {what}", e) from None


@dataclass(frozen=True, slots=True)
class History:
    """Branches and tags of a repository with the ids of their snapshots; facts of the snapshots, newest first."""

    branches: dict[str, str]
    tags: dict[str, str]
    snapshots: list[Any]


def history(place: str, limit: int) -> History:
    """The history of a repository, of whatever branch or tag, as far as its ``limit`` newest snapshots."""
    repo = repository(place, anew=True)
    with asked(place):
        return called(lambda: _history(repo, limit), place, "its history")


def _history(repo: Any, limit: int) -> History:
    found: dict[str, Any] = {}
    branches = {name: repo.lookup_branch(name) for name in sorted(repo.list_branches())}
    tags = {name: repo.lookup_tag(name) for name in sorted(repo.list_tags())}
    for snapshot in [*branches.values(), *tags.values()]:
        # Where this line meets one that was followed, it goes on as that one did.
        line = itertools.takewhile(lambda s, held=found: s.id not in held, repo.ancestry(snapshot_id=snapshot))
        found |= {s.id: s for s in itertools.islice(line, limit)}
    newest = sorted(found.values(), key=lambda s: s.written_at, reverse=True)
    return History(branches, tags, newest[:limit])


def collect(place: str, silence: float, *, dry_run: bool) -> Any:
    """icechunk's summary of what no branch or tag leads to and nobody has written for so many seconds; deletes it."""
    before = datetime.fromtimestamp(time.time() - min(max(silence, -1.0), time.time()), UTC)
    repo = repository(place, anew=True)
    with asked(place, "what is unreachable in it"):
        if dry_run:
            return called(lambda: repo.garbage_collect(before, dry_run=True), place, "a collection", _LONG)
        refuse_unwritable(place)
        with alone(place):
            return called(lambda: repo.garbage_collect(before), place, "a collection", _LONG)


def chunk_bytes(place: str) -> Any:
    """icechunk's count of the bytes of chunks to which branches and tags lead: native, inlined and virtual ones."""
    count = getattr(repository(place, anew=True), "chunk_storage_stats", None)
    if count is None:
        raise StoreError(f"{place}: this icechunk counts no chunks; a later one has Repository.chunk_storage_stats")
    with asked(place, "the sizes of its chunks"):
        return called(count, place, "the sizes of its chunks", _LONG)


def snapshot_of(repo: Any, ref: str, root: str) -> str:
    """The id of the snapshot that a branch, a tag or an id names."""
    return called(lambda: _snapshot_of(repo, ref, root), divide(root)[0], "its branches and tags")


def _snapshot_of(repo: Any, ref: str, root: str) -> str:
    with asked(root):
        branches, tags = repo.list_branches(), repo.list_tags()
        if ref in branches and ref in tags:
            raise CheckpointError(
                f"{root}: {ref!r} is a branch and a tag; name the snapshot: {repo.lookup_branch(ref)} or "
                f"{repo.lookup_tag(ref)}"
            )
        if ref in branches:
            return repo.lookup_branch(ref)
        if ref in tags:
            return repo.lookup_tag(ref)
    try:
        return repo.lookup_snapshot(ref).id
    except Exception:
        known = ", ".join(sorted(branches | tags))
        raise NotACheckpoint(f"{root}: no branch, tag or snapshot is called {ref!r}; there are {known}") from None


def pinned(root: str) -> str:
    """The location with the id of the snapshot that it names now."""
    place, ref, node = divide(root)
    held = f"{SCHEME}://{place}@{snapshot_of(repository(place), ref, root)}"
    return join(held, node) if node else held


@lru_cache(maxsize=64)
def _snapshot(place: str, snapshot: str) -> Any:
    """Zarr's store of a snapshot, which stays as it is."""
    with asked(place, f"snapshot {snapshot}"):
        return repository(place).readonly_session(snapshot_id=snapshot).store


def virtual_files(root: str) -> list[str]:
    """Locations of the files behind the virtual chunks of a snapshot, of those that its location allows."""
    place, snapshot, _ = divide(root)
    prefixes = list(filter(None, unquote(place.partition(VIRTUAL)[2]).split(",")))
    if not prefixes:
        return []

    def locations() -> list[str]:
        return repository(place).readonly_session(snapshot_id=snapshot).all_virtual_chunk_locations()

    with asked(root, "its virtual chunks"):
        named = set(map(unquote, called(locations, place, "its virtual chunks")))
    found = []
    for given in prefixes:
        scheme, _, rest = given.partition("://")
        authority, slash, below = rest.partition("/")
        plain = f"{scheme}://{url_options.divide(authority)[0]}{slash}{below}"
        urls = sorted(url for url in named if url.startswith(plain) and "/../" not in url)
        found += [f"{given}{url.removeprefix(plain)}".removeprefix("file://") for url in urls]
    return found


def _refused(root: str, where: str, said: str) -> CheckpointError | None:
    """The error for a virtual chunk that icechunk does not fetch; None where it says something else."""
    text = " ".join(said.partition("context:")[0].replace("|", " ").split())
    if "checksum of the object owning" in text:
        return CheckpointReplaced(f"{where} is a virtual chunk, whose file is another by now: {text}")
    if "fetching virtual reference" in text:
        why = re.findall(r"-> (.+)", said)[1:2] or [text]
        return StoreError(f"{where} is a virtual chunk, and its bytes cannot be fetched: {why[0]}")
    if "virtual chunk" not in text or "container" not in text:
        return None
    place, ref, _ = divide(root)
    place, _, held = place.partition(VIRTUAL)
    found = re.search(r"(?:file|s3|https?)://[^\s,()`]+", text)
    url = found[0].rpartition("/")[0] + "/" if found else "file:///folder/"
    allowed = f"beside {unquote(held)} " if held else ""
    return StoreError(
        f"{where} is a virtual chunk: its bytes lie below {url}, and a repository names what it likes, so nothing is "
        f'fetched without your word. Allow it {allowed}by mt.storage.options("{SCHEME}://{place}@{ref}", '
        f'virtual_chunks="{",".join(filter(None, [unquote(held), url]))}")'
    )


class _IcechunkReader(Reader):
    __slots__ = ("_data", "tag")

    def __init__(self, data: Any, tag: str) -> None:
        self._data, self.tag = memoryview(data).cast("B"), tag

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def readv(self, buffers: list[Any], offset: int) -> int:
        views = [memoryview(b).cast("B") for b in buffers]
        part = self._data[offset : offset + sum(map(len, views))]
        fill(views, part)
        return len(part)


@dataclass(frozen=True)
class IcechunkStore(Store):
    """A snapshot of a repository, to read; objects are those of its Zarr hierarchy."""

    root: str

    writable: ClassVar[bool] = False
    readers: ClassVar[int] = 8

    def _held(self) -> tuple[Any, str, str]:
        place, ref, node = divide(self.root)
        if not is_id(ref):
            ref = snapshot_of(repository(place), ref, self.root)
        return called(lambda: _snapshot(place, ref), place, "a snapshot"), node, ref

    def reader(self, name: str) -> Reader:
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        held, node, ref = self._held()
        key = "/".join(p for p in (node, name) if p)
        place = divide(self.root)[0]
        try:
            size = called(lambda: sync(held.getsize(key)), place, "a length") if _is_remote(place) else 0
            found = called(lambda: sync(held.get(key, default_buffer_prototype())), place, key, size)
        except StoreError:
            raise
        except Exception as e:
            # Of icechunk 2 many errors are a ValueError or a KeyError, too: also of chunks that may not be fetched.
            plain = isinstance(e, (ValueError, KeyError, FileNotFoundError)) and not isinstance(
                e, package().IcechunkError
            )
            if plain or type(e).__name__ == "NodeNotFoundError" or "invalid zarr key" in str(e).lower():
                raise FileNotFoundError(key) from None  # a name that no hierarchy has
            raise _refused(self.root, join(self.root, name), str(e)) or StoreError(
                f"{join(self.root, name)} cannot be read: {first_line(e)}"
            ) from None
        if found is None:
            raise FileNotFoundError(key)
        return _IcechunkReader(found.to_bytes(), ref)

    def refuse_writes(self) -> None:
        raise StoreError(f"{self.root} can only be read here; mt.save commits to a branch")

    def _names(self, under: str) -> list[str]:
        from zarr.core.sync import sync

        held, node, _ = self._held()
        start = "/".join(p for p in (node, under) if p)

        async def names() -> list[str]:
            return [key async for key in held.list_prefix(start)]

        cut = f"{node}/" if node else ""
        try:
            listed = called(lambda: sync(names()), divide(self.root)[0], "a list of its names")
        except StoreError:
            raise
        except Exception as e:
            if "key prefix" in str(e):  # nothing lies there
                return []
            raise StoreError(f"{self.root} cannot be listed: {first_line(e)}") from None
        found = (key.lstrip("/") for key in listed)
        return sorted(k.removeprefix(cut) for k in found if k.startswith(f"{start}/" if start else ""))

    def entries(self, under: str = "") -> Iterator[StoredObjectInfo]:
        ref = divide(self.root)[1]
        return (StoredObjectInfo(name, 0, 0.0, ref) for name in self._names(under))

    def folders(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._names("") if "/" in name})

    def files(self) -> list[str]:
        return [name for name in self._names("") if "/" not in name]


def refuse_unwritable(place: str) -> None:
    """Raise `StoreError` where a local repository may not be written to: icechunk itself panics."""
    folder = place
    while not is_url(place) and not os.path.lexists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    if not is_url(place) and os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"{place}: no permission to write in {folder}")


@contextlib.contextmanager
def alone(place: str) -> Iterator[None]:
    """One change of a local repository at a time: there icechunk itself cannot tell two of them apart. Object
    stores can."""
    if is_url(place):
        yield
        return
    lock = f"{place.rstrip('/')}.meshtape-lock"
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as e:
        raise StoreError(f"{lock}, which a commit holds, cannot be opened: {e.strerror}; nothing was changed") from None
    try:
        deadline = time.monotonic() + _WAIT
        while try_lock(fd) is False:
            if time.monotonic() > deadline:
                raise StoreError(f"{place}: another process has been committing for {_WAIT:.0f} s; nothing was changed")
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def forget() -> None:
    """Open repositories anew from now on: icechunk keeps in memory what it has read."""
    _repository.cache_clear()
    _snapshot.cache_clear()
