"""Stores of checkpoints: local directories and object stores, behind one small contract.

A *location* is a text: an absolute path, or a URL (``s3://bucket/run``, ``gs://``, ``az://``, ``memory://``; to read,
``http://``, ``https://`` and what fsspec knows, such as ``hf://``), with its options in it (see ``url_options``). It
travels in plans to other processes, which find the store again with `at`. Names inside a store are relative, with
``/``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from ...arrays.core.errors import CheckpointError, CheckpointExists
from ..base.locations import READ_ONLY, SCHEMES, URL, is_url, split
from ..base.locations import join as join
from . import icechunk_store, url_options
from .contract import Store, failed
from .fsspec_store import FsspecStore, is_known
from .local import LocalStore
from .object_store import ObjectStore

_LONGEST = 4095  # characters: no system opens a longer path
_ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
_NAMED_BEFORE_AT = ("abfs", "abfss", "github")  # container@account, organisation:repository@branch: no users


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError as e:  # of the working directory, which may be gone
        raise failed(e, f"{path!r} leads nowhere, as the working directory is gone; give an absolute path") from None


def location(path: str | os.PathLike[str]) -> str:
    """The absolute form of a path or URL that a user gives.

    Raises `CheckpointError` for an unknown scheme, and for a URL that carries a user, a password or a query:
    credentials come from the environment, so that no message, plan or manifest can show them.

    >>> location("s3://bucket/run//step-1/"), location("file:///tmp/x")
    ('s3://bucket/run/step-1', '/tmp/x')
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise CheckpointError(f"a location is a text or a path, not {path!r:.40}")
    if not text:
        raise CheckpointError("the location is empty; '.' is the current folder")
    if "\0" in text:
        raise CheckpointError(f"{text[:80]!r} has a NUL byte, which no name of a file has")
    if len(text) > _LONGEST:
        raise CheckpointError(f"{text[:80]}… has {len(text)} characters, more than the {_LONGEST} of a path or URL")
    found = URL.match(text)
    if found is None:
        if re.match(r"[a-z0-9]+::([a-z0-9]+::)*[a-z0-9]+://", text):
            raise CheckpointError("chained URLs (a::b://…) are not opened; name the place itself")
        return _absolute(text)
    scheme = found[1].lower()
    if scheme == icechunk_store.SCHEME:
        place, _, ref = found[2].rpartition("@") if "@" in found[2] else (found[2], "", "main")
        place, _, virtual = place.partition(icechunk_store.VIRTUAL)
        if "@" in place or not place or not ref:
            raise CheckpointError(f"{text}: an icechunk location is icechunk://PLACE@BRANCH, with one @")
        return f"{scheme}://{location(place)}{icechunk_store.allowing(unquote(virtual))}@{ref.rstrip('/')}"
    scheme = _ALIASES.get(scheme, scheme)
    if scheme in ("file", "local"):
        return _absolute(unquote(urlsplit(text).path))
    if scheme not in SCHEMES and not is_known(scheme):
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
        ``s3://``: ``endpoint``, ``region``, ``anonymous``, ``encryption`` (``"AES256"``, ``"aws:kms"``, …),
        ``kms_key``, ``bucket_key``, ``storage_class``, ``requester_pays``, ``virtual_hosted``. ``gs://``: ``endpoint``,
        ``anonymous``, ``storage_class``. ``az://``: these and ``account``. URLs that fsspec opens: the options of its
        file system. Possible secrets are refused: credentials come from the environment. ``icechunk://``: those of its
        place, and ``virtual_chunks``, the URLs of folders between commas (``"file:///data/, s3://bucket/run/"``) below
        which virtual chunks may be fetched; without it none are.

    Examples
    --------
    >>> options("s3://bucket/run", region="eu-west-1", anonymous=True)
    's3://bucket;anonymous=true;region=eu-west-1/run'
    """
    where = location(path)
    if not is_url(where):
        raise CheckpointError(f"{where} is a local path, which has no options")
    scheme, _, rest = where.partition("://")
    if scheme == icechunk_store.SCHEME:
        place, _, ref = rest.rpartition("@")
        place, _, virtual = place.partition(icechunk_store.VIRTUAL)
        virtual = icechunk_store.allowing(str(given.pop("virtual_chunks", unquote(virtual))))
        return f"{scheme}://{options(place, **given) if given else place}{virtual}@{ref}"
    authority, slash, below = rest.partition("/")
    host, held = url_options.divide(authority)
    return f"{scheme}://{url_options.joined(scheme, host, {**held, **given})}{slash}{below}"


def lies_in(place: str, folder: str) -> bool:
    """Whether a place is a folder or lies below it, by their names, where links lead, or in a bucket that other options
    of a URL reach as well."""
    pairs = [(place, folder), (_real(place), _real(folder))]
    return any(p == f or p.startswith(join(f, "")) for p, f in pairs)


def _real(place: str) -> str:
    scheme, mark, rest = place.partition("://")
    if not is_url(place) or scheme == icechunk_store.SCHEME:
        return place if mark else os.path.realpath(place)
    authority, slash, below = rest.partition("/")
    host, given = url_options.divide(authority)
    held = (given.get("endpoint"), *map(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")))
    endpoint = next(filter(None, held), "") if scheme == "s3" else ""
    return f"{scheme}://{endpoint.rstrip('/')}/{host}{slash}{below}"


def at(root: str) -> Store:
    """The store of a directory's location."""
    if not is_url(root):
        return _local_at(root)
    if icechunk_store.is_versioned(root):
        return icechunk_store.IcechunkStore(root)
    if root.partition("://")[0] not in SCHEMES:
        return FsspecStore(root)
    return ObjectStore(root)


def repository_at(where: str) -> str | None:
    """The location of an icechunk repository: one that says so, or the branch main of a path or URL that holds one."""
    if icechunk_store.is_versioned(where):
        return where
    if is_url(where) and not where.startswith("s3://"):
        return None
    marks = ("refs/branch.main/ref.json", "repo")  # of its two formats; both have snapshots
    there = at(where)
    found = any(there.size(m) is not None for m in marks) and "snapshots" in there.folders()
    return f"{icechunk_store.SCHEME}://{where}@main" if found else None


def holding(where: str) -> tuple[Store, str]:
    """The store of a file's location, and the file's name in it."""
    if not is_url(where):
        return _local(where)
    head, name = split(where)
    return at(head), name


def refuse_folder(where: str) -> None:
    """Raise where a file cannot be written to a URL: it is a whole bucket, or the checkpoint (or anything else) below
    it would hide the file, or be hidden by it."""
    if not is_url(where):
        return  # a file system refuses it itself
    if not split(where)[1]:
        raise CheckpointError(f"{where} is a whole bucket; name a file in it")
    store = at(where)
    if store.lists and next(iter(store.entries()), None) is not None:
        raise CheckpointExists(f"{where} is a directory; only files are replaced, write to another name")


_local_at = lru_cache(maxsize=1 << 8)(LocalStore)


@lru_cache(maxsize=1 << 12)
def _local(where: str) -> tuple[Store, str]:
    head, name = os.path.split(where)
    return LocalStore(head), name


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
    """The files of one folder of a checkpoint that do not exist."""
    known = _listings.get()
    if not is_url(root):
        held = set() if known is None else known.setdefault(root, set())  # many arrays may lie in one pack
        lost = [f for f in files if f not in held and not os.path.exists(f"{root}{os.sep}{f}")]
        # What may not be looked at is an error, and not missing.
        lost = [f for f, tag in zip(lost, at(root).tags(lost), strict=True) if tag is None]
        held.update(files if not lost else set(files) - set(lost))
        return lost
    store = at(root)
    if store.lists:  # one request for all
        if known is None:
            held = {e.name for e in store.entries(folder)}
        else:
            held = known[root] if root in known else known.setdefault(root, {e.name for e in store.entries()})
        return [f for f in files if f not in held]
    return [f for f in files if store.size(f) is None]
