"""How a directory comes into being in an object store, where nothing can be renamed.

The protocol, for a target ``NAME`` (an object ``NAME/x`` is called x here):

1. The writer announces itself with a *claim*, ``.meshtape-writing``, which says who writes. The store lets one of many create it. Who gets it,
   and finds nothing else at ``NAME``, writes under plain names. Everybody else (a checkpoint is replaced, or a killed writer left something)
   claims ``.meshtape-writing~gXXXXXXXX`` and writes under names with that mark: ``w~gXXXXXXXX/c.0``. So no two writers ever share a name.
2. Data objects are put. A put is whole and durable or has not happened.
3. The *last* object is put: the manifest, or an index. Its presence, and what it names, is what makes ``NAME`` a checkpoint. Where there
   was none before, it is put only if there still is none; where one is replaced, only if it is still the one that was seen. At every instant
   ``NAME`` is therefore nothing, the old generation whole, or the new one whole. Zarr's own group metadata comes just before a first
   manifest, and just after one that replaces.
4. What no table of contents names any more, and no living writer claims, is deleted; the claim last.

A kill leaves a claim and objects that nothing names. `recover`, which each save to ``NAME`` and each manager runs, deletes them when the
owner is gone: a process of this host that does not run any more, or any that is silent for a day. Until then they cost space alone.
A deletion first puts ``.meshtape-trash``, then removes the manifest; `recover` ends what it finds half done.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..arrays.errors import CheckpointError, CheckpointExists, CorruptCheckpoint, StoreError
from . import manifest, strict_json
from .commit import Folder, has_left, host
from .documents import PROGRAM, beside
from .objects import ObjectStore
from .opening import HF_INDEX, HF_SINGLE, read_index
from .stores import Entry, split
from .writing import in_threads
from .zarr_format import group_metadata

CLAIM = ".meshtape-writing"
TRASH = ".meshtape-trash"
JOURNAL = ".meshtape-transfer"  # of an upload that can go on (see ``uploading``)
_GROUP = "zarr.json"
_LAST = (manifest.FILE, HF_INDEX, PROGRAM)
_MARK = re.compile(r"~g[0-9a-f]{8}(?=\Z|\.[a-z]+\Z)")

_mine: set[str] = set()  # claims that this process, in any thread, holds now


def _mark_of(name: str) -> str:
    """The mark in a name below the target, or "" for plain ones."""
    found = _MARK.search(name.partition("/")[0])
    return found[0] if found else ""


def _claim_text() -> bytes:
    return json.dumps({"host": host(), "pid": os.getpid(), "id": uuid.uuid4().hex}).encode()


def _owner_is_gone(store: ObjectStore, claim: Entry) -> bool:
    if f"{store.root}/{claim.name}" in _mine:
        return False
    try:
        said = strict_json.loads(store.get(claim.name))
        owner, pid = said["host"], int(said["pid"])
    except FileNotFoundError:
        return False  # just finished
    except (ValueError, KeyError, TypeError):
        owner, pid = "", 0
    return has_left(owner, pid, claim.modified)


def _named(store: ObjectStore, held: set[str]) -> set[str] | None:
    """What the committed table of contents names at the top level, itself included; None where there is none."""
    if manifest.FILE in held:
        found = manifest.read(store.root)
        if found is not None:
            return {
                manifest.FILE,
                _GROUP,
                *(a.directory for a in found.arrays),
                *(f for _, f in found.documents.values()),
                *([] if found.sums is None else [found.sums]),
            }
    if HF_INDEX in held:
        files = {file.partition("/")[0] for file in read_index(store.root)[0].values()}
        return {HF_INDEX, *files, *beside(store.root)}
    if HF_SINGLE in held:
        return {HF_SINGLE, *beside(store.root)}
    if PROGRAM in held:
        try:
            return {PROGRAM, str(strict_json.loads(store.get(PROGRAM))["file"])}
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptCheckpoint(f"{store.root}/{PROGRAM}: no program: {e}") from None
    return None


def _is_written(name: str, held: set[str]) -> bool:
    """Whether a writer of ours makes such names for arrays: beside a checkpoint that is whole, anything else belongs to its user."""
    top = name.partition("/")[0]
    of_an_array = f"{top}/zarr.json" in held or re.fullmatch(r"[^/]+/c([./].*)?", name) is not None
    return bool(_mark_of(name)) or name == JOURNAL or top.endswith(".safetensors") or of_an_array


def _delete(store: ObjectStore, names: list[str]) -> None:
    groups = [names[i : i + 1000] for i in range(0, len(names), 1000)]
    in_threads(store.delete, groups)


def is_begun(root: str) -> bool:
    """Whether a writer has begun there and not finished."""
    return any(name.startswith(CLAIM) for name in ObjectStore(root).files())


def is_ours(root: str) -> bool:
    """Whether what lies there may be replaced: a checkpoint, a Hugging Face directory, or remains of one."""
    names = {e.name for e in ObjectStore(root).entries()}
    return bool(names & {manifest.FILE, HF_INDEX, HF_SINGLE, TRASH}) or any(
        n.startswith(CLAIM) or n.endswith("/zarr.json") for n in names - {PROGRAM}
    )


def is_program(root: str) -> bool:
    """Whether a program file lies there, or what is left of a writer."""
    names = {e.name for e in ObjectStore(root).entries()}
    others = any(n in (manifest.FILE, HF_INDEX, HF_SINGLE) or n.endswith("/zarr.json") for n in names)
    return not others and (PROGRAM in names or any(n == TRASH or n.startswith(CLAIM) for n in names))


def recover(root: str) -> list[str]:
    """Delete what dead writers and half a deletion left below a target; returns the names."""
    store = ObjectStore(root)
    if not any(name == TRASH or name.startswith(CLAIM) for name in store.files()):
        return []  # as nearly always: without a look into the folders
    entries = list(store.entries())
    held = {e.name for e in entries}
    claims = [e for e in entries if e.name.startswith(CLAIM)]
    dead = [c for c in claims if _owner_is_gone(store, c)]
    if not dead and TRASH not in held:
        return []
    try:
        named = _named(store, held)
    except CheckpointError:
        return []  # what a damaged table of contents names cannot be told from what it does not
    alive = {_mark_of(c.name) for c in claims if c not in dead}
    gone = []
    for e in entries:
        if e.name in held & {*(c.name for c in claims), TRASH, *_LAST}:
            continue
        if _mark_of(e.name) in alive:
            continue
        if named is not None and (e.name.partition("/")[0] in named or not _is_written(e.name, held)):
            continue
        gone.append(e.name)
    _delete(store, gone)
    if named is not None and manifest.FILE in held:
        _renew_group(store)
    # A manifest beside the mark of a deletion: it had not begun, so it does not happen.
    _delete(store, [TRASH] * (TRASH in held) + [c.name for c in dead])
    return [*gone, *(c.name for c in dead)]


def _renew_group(store: ObjectStore) -> None:
    """Put Zarr's group metadata where a kill came between the manifest and it."""
    found = manifest.read(store.root)
    if found is None:
        return
    wanted = {a.directory for a in found.arrays}
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        if set(strict_json.loads(store.get(_GROUP))["consolidated_metadata"]["metadata"]) == wanted:
            return
    texts = {a.directory: store.get(f"{a.directory}/zarr.json") for a in found.arrays}  # in the order of a save
    store.put(_GROUP, group_metadata(manifest.VERSION, texts))


def discard(root: str) -> None:
    """Delete a checkpoint: its table of contents first, so that nobody takes what is left for one."""
    store = ObjectStore(root)
    store.put(TRASH, b"")
    store.delete(list(_LAST))
    _delete(store, sorted(e.name for e in store.entries() if e.name != TRASH))
    store.delete([TRASH])


def check_target(root: str, overwrite: bool, ours: Callable[[str], bool]) -> None:
    """Raise `CheckpointExists` where ``root`` may not be written to."""
    store = ObjectStore(root)
    store.refuse_writes()
    if not split(root)[1]:
        raise CheckpointError(f"{root} is a whole bucket; name a place in it")
    held = {e.name for e in store.entries()}
    if not overwrite and held & {*_LAST, HF_SINGLE}:
        raise CheckpointExists(f"{root} exists; pass overwrite=True to replace it")
    if held and not ours(root):
        raise CheckpointExists(f"{root} holds something that is not a checkpoint; refused to replace it")


class ObjectFolder(Folder):
    """A target that is being filled. Names get ``suffix``; the last objects wait for `commit`."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.store = ObjectStore(root)
        self._late: dict[str, bytes] = {}
        self._after: dict[str, bytes] = {}
        self._claim = CLAIM
        self._seen: dict[str, dict[str, str]] = {}
        self._unfinished = False

    def begin(self) -> None:
        """Claim names, and remember what is there."""
        try:
            self._claim_names()
        except BaseException:
            # The claim may be there or not; it is nobody's now, so that `recover` collects it.
            _mine.difference_update({f"{self.root}/{CLAIM}", f"{self.root}/{self._claim}"})
            raise

    def _claim_names(self) -> None:
        text = _claim_text()
        _mine.add(f"{self.root}/{CLAIM}")
        try:
            if list(self.store.entries()):
                raise FileExistsError
            self.store.put(CLAIM, text, new=True)
            # Between the two looks another writer may have come and gone.
            if [e.name for e in self.store.entries()] != [CLAIM]:
                self.store.delete([CLAIM])
                raise FileExistsError
        except FileExistsError:
            _mine.discard(f"{self.root}/{CLAIM}")
            self.suffix = f"~g{uuid.uuid4().hex[:8]}"
            self._claim = f"{CLAIM}{self.suffix}"
            _mine.add(f"{self.root}/{self._claim}")
            self.store.put(self._claim, text)
        self._see(self.store.entries())

    def take_over(self, suffix: str) -> bool:
        """Go on under the names of a writer that is gone; False where there is none, or it lives."""
        claim = f"{CLAIM}{suffix}"
        entries = list(self.store.entries())
        found = next((e for e in entries if e.name == claim), None)
        if found is None or not _owner_is_gone(self.store, found):
            return False
        self.suffix, self._claim = suffix, claim
        _mine.add(f"{self.root}/{claim}")
        try:
            self.store.put(claim, _claim_text())
        except BaseException:
            self.leave()
            raise
        self._see(entries)
        return True

    def _see(self, entries: Iterable[Entry]) -> None:
        """Remember which table of contents is there, to replace that one and no other."""
        for e in entries:
            if e.name in _LAST:
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    self._seen[e.name] = self.store.version(e)

    def leave(self) -> None:
        """Stop, and leave what was written to whoever takes it over."""
        _mine.discard(f"{self.root}/{self._claim}")

    def mkdir(self, name: str) -> None:
        pass  # a folder is there as soon as something is in it

    def put(self, name: str, data: bytes) -> None:
        if name in (*_LAST, _GROUP):
            self._late[name] = data
        elif self._seen and "/" not in name and not _mark_of(name):
            self._after[name] = data  # others read it by this very name: it changes when the rest has
        else:
            self.store.put(name, data)

    def settle(self, name: str = "") -> None:
        pass  # what was put is durable

    def commit(self) -> None:
        """Put what makes the folder a checkpoint, then delete what it replaces."""
        last = next(n for n in _LAST if n in self._late)
        group = self._late.get(_GROUP)
        seen = self._seen.get(last)
        try:
            if seen is None:
                if group is not None and not self._seen:
                    self.store.put(_GROUP, group)
                self.store.put(last, self._late[last], new=True)
            else:
                self.store.replace(last, self._late[last], seen)
        except FileExistsError:
            if seen is None and group is not None:  # which stands in the place of the other's by now
                with contextlib.suppress(CheckpointError):
                    _renew_group(self.store)
            raise CheckpointExists(
                f"{self.root}: another process has saved there meanwhile; nothing was replaced"
            ) from None
        self.committed = True
        try:
            # Another kind of checkpoint was there: with its table of contents it ends.
            self.store.delete([n for n in self._seen if n != last])
            if group is not None and self._seen:
                self.store.put(_GROUP, group)
            for name, data in self._after.items():
                self.store.put(name, data)
            if self._seen or self.suffix:
                self._collect()
        except StoreError:
            # The new generation is in place: this is no longer an error of the save. The claim stays, for `recover` to end the work.
            self._unfinished = True

    def _collect(self) -> None:
        entries = list(self.store.entries())
        named = _named(self.store, {e.name for e in entries})
        alive = {_mark_of(e.name) for e in entries if e.name.startswith(CLAIM) and e.name != self._claim}
        _delete(
            self.store,
            [
                e.name
                for e in entries
                if named is not None
                and e.name.partition("/")[0] not in named
                and not e.name.startswith(CLAIM)
                and e.name not in _LAST
                and _mark_of(e.name) not in alive
            ],
        )

    def end(self, committed: bool) -> None:
        """Give the claim back; without the commit, delete what was written under it."""
        try:
            if not committed:
                named = _named(self.store, {e.name for e in self.store.entries()}) or set()
                _delete(
                    self.store,
                    [
                        e.name
                        for e in self.store.entries()
                        if (_mark_of(e.name) == self.suffix or e.name == JOURNAL)
                        and not e.name.startswith(CLAIM)
                        and e.name not in (*_LAST, TRASH)
                        and e.name.partition("/")[0] not in named
                    ],
                )
            if not self._unfinished:
                self.store.delete([self._claim, JOURNAL])
        finally:
            _mine.discard(f"{self.root}/{self._claim}")


@contextlib.contextmanager
def replacing(root: str, *, overwrite: bool, ours: Callable[[str], bool]) -> Iterator[Any]:
    """As `commit.replacing`, in an object store."""
    ObjectStore(root).refuse_writes()
    recover(root)
    check_target(root, overwrite, ours)
    folder = ObjectFolder(root)
    folder.begin()
    try:
        yield folder
    finally:
        if folder.committed:
            folder.end(True)
        else:
            # The error that brought us here matters more than one of the clean-up; `recover` collects the rest.
            with contextlib.suppress(Exception):
                folder.end(False)
