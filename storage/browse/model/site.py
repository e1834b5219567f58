"""The site of a browser: the given roots and all below them; opened checkpoints are kept while they do not change.

A place is written ``ROOT/REST``: the number of a root, and names below it. Names that are ``..``, hidden, or links that
lead out of their root are refused, so that no address reaches anything that was not given.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ....arrays.core.errors import CheckpointError, NotACheckpoint
from ...checkpoint.checkpoint import Checkpoint
from ...format import manifest
from ...format.hf_index import HF_INDEX
from ...loading.open import open_checkpoint
from ...loading.runs import is_run
from ...stores import atomic_directory
from ...stores import store as stores
from ...stores.contract import listed
from ...virtual.document import is_document
from .inventory import Inventory
from .jobs import Jobs

_OPEN = 8  # opened checkpoints that are kept
_REMOTE_AGE = 30.0  # seconds for which an object store is not asked again
_MOST_ENTRIES = 1000


@dataclass(frozen=True)
class SitePlace:
    """A root or something below it. ``at`` is its address, ``path`` where it is."""

    at: str
    path: str
    label: str


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """A name in a directory, and its kind: ``"checkpoint"``, ``"run"`` or ``"directory"``."""

    name: str
    kind: str
    at: str


@dataclass
class Opened:
    """An opened checkpoint with its inventory."""

    place: SitePlace
    ckpt: Checkpoint
    inventory: Inventory
    seconds: float


class Site:
    """The roots, and the checkpoints that are open.

    >>> Site(["/data/run"]).place("0/step-00000010").path
    '/data/run/step-00000010'
    >>> Site(["/data/run"]).place("0/../../etc")
    Traceback (most recent call last):
        ...
    meshtape.arrays.core.errors.NotACheckpoint: no such place: '0/../../etc'
    """

    def __init__(self, roots: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.roots: list[str] = []
        self.jobs = Jobs()
        self._open: OrderedDict[str, tuple[object, Opened]] = OrderedDict()
        self._lock = threading.Lock()
        for root in roots:
            self.add(root)

    def add(self, root: str | os.PathLike[str]) -> SitePlace:
        """Make a path or URL, and all below it, part of the site; returns its place."""
        where = stores.location(root)
        with self._lock:
            if where not in self.roots:
                self.roots.append(where)
            return self._root(self.roots.index(where))

    def _root(self, number: int) -> SitePlace:
        where = self.roots[number]
        return SitePlace(str(number), where, stores.split(where)[1] or where)

    def places(self) -> list[SitePlace]:
        return [self._root(i) for i in range(len(self.roots))]

    def place(self, at: str) -> SitePlace:
        """The place of an address; `NotACheckpoint` for one that is not below a root."""
        number, *names = at.split("/")
        strange = NotACheckpoint(f"no such place: {at!r}")
        if not number.isdecimal() or len(number) > 6 or int(number) >= len(self.roots):
            raise strange
        root = self._root(int(number))
        if not names:
            return root
        if any(n.startswith(".") or not n or "\\" in n or "\0" in n for n in names):
            raise strange
        path = stores.join(root.path, *names)
        if not stores.is_url(path):
            inside, real = os.path.realpath(root.path), os.path.realpath(path)
            if os.path.commonpath([inside, real]) != inside:
                raise strange
        return SitePlace(at, path, names[-1])

    def open(self, at: str) -> Opened:
        """The checkpoint at an address, opened anew when it has changed."""
        place = self.place(at)
        mark = _mark(place.path)
        with self._lock:
            held = self._open.get(place.path)
            if held is not None and held[0] == mark:
                self._open.move_to_end(place.path)
                return held[1]
        started = time.perf_counter()
        ckpt = open_checkpoint(place.path)
        if ckpt.computed is not None and place.path not in self.roots:
            self._refuse_beyond(place, ckpt.places)
        opened = Opened(place, ckpt, Inventory(ckpt), time.perf_counter() - started)
        with self._lock:
            self._open[place.path] = (mark, opened)
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return opened

    def _refuse_beyond(self, place: SitePlace, read: Iterable[str]) -> None:
        """Raise where a virtual checkpoint below a root reads others that are below none."""
        roots = [r if stores.is_url(r) else os.path.realpath(r) for r in self.roots]
        for path in read:
            real = path if stores.is_url(path) else os.path.realpath(path)
            if not any(real == r or real.startswith(stores.join(r, "")) for r in roots):
                raise NotACheckpoint(f"{place.path} is computed from {path}, which lies outside of what is shown here")

    def check(self, place: SitePlace) -> None:
        """Raise the error of opening the place, unless it is a directory or a run."""
        if self.kind(place) == "checkpoint":
            self.open(place.at)

    def kind(self, place: SitePlace) -> str:
        """``"checkpoint"``, ``"run"`` or ``"directory"``."""
        if stores.is_url(place.path):
            return "run" if is_run(place.path) else "checkpoint"
        return _kind(place.path)

    def entries(self, place: SitePlace) -> list[DirectoryEntry]:
        """The folders and safetensors files of a directory; hidden names and other files are left out."""
        out: list[DirectoryEntry] = []
        if stores.is_url(place.path):
            store = stores.at(place.path)
            found = store.folders()[:_MOST_ENTRIES] if store.lists else []
            return [DirectoryEntry(n, "checkpoint", f"{place.at}/{n}") for n in found if not n.startswith(".")]
        for name in listed(place.path)[: 10 * _MOST_ENTRIES]:
            if name.startswith(".") or len(out) >= _MOST_ENTRIES:
                continue
            path = os.path.join(place.path, name)
            if not os.path.isdir(path) and not name.endswith(".safetensors") and not is_document(path):
                continue
            at = f"{place.at}/{name}"
            try:
                self.place(at)
            except CheckpointError:  # a link that leads out
                continue
            out.append(DirectoryEntry(name, _kind(path), at))
        return out

    def close(self) -> None:
        """Stop the background jobs."""
        self.jobs.close()


def _kind(path: str) -> str:
    if os.path.isfile(path):
        return "checkpoint"
    if not os.path.isdir(path) and not os.path.isdir(atomic_directory.resolve(path)):
        raise NotACheckpoint(f"{path}: no such file or directory")
    marks = (manifest.FILE, HF_INDEX, "model.safetensors", "zarr.json", ".zgroup", ".zarray")
    if any(os.path.exists(os.path.join(path, m)) for m in marks):
        return "checkpoint"
    # One that is neither is only set aside, for a moment.
    return "run" if is_run(path) else "directory" if os.path.isdir(path) else "checkpoint"


def _mark(path: str) -> object:
    """A mark of a checkpoint's version, which changes when it is written anew."""
    if stores.is_url(path):
        return int(time.monotonic() / _REMOTE_AGE)
    out = []
    for name in ("", manifest.FILE, HF_INDEX, "model.safetensors", "zarr.json"):
        try:
            s = os.stat(os.path.join(path, name) if name else path)
            out.append((s.st_ino, s.st_mtime_ns, s.st_size))
        except OSError:
            out.append(None)
    return tuple(out)
