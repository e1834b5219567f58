"""The commit of a directory in an object store, where nothing can be renamed.

The protocol, for a target ``NAME`` (an object ``NAME/x`` is called x here):

1. The writer puts a *claim*, ``.meshtape-writing``, with its host and process. The store lets one of many create it.
   The winner, where it finds nothing else at ``NAME``, writes under plain names. Any other writer (one that replaces
   a checkpoint, or finds leftovers) claims ``.meshtape-writing~gXXXXXXXX`` and writes under names with that mark:
   ``w~gXXXXXXXX/c.0``. So no two writers share a name.
2. Data objects are put. A put is whole and durable or has not happened.
3. The *last* object is put: the manifest, or an index. It makes ``NAME`` a checkpoint. A first one is put only if there
   still is none; one that replaces, only if the old one is still the one that was seen. So at every instant ``NAME``
   is nothing, the old generation whole, or the new one whole. Zarr's own group metadata comes just before a first
   manifest, and just after one that replaces. Transformers opens a lone ``model.safetensors`` first, and so does
   meshtape where there is no manifest: where one is replaced, it is deleted next, and until then it is the
   checkpoint, whole.
4. Objects that the old table of contents lists and the new one does not are deleted; the claim last. Nobody else's
   objects are touched: a claim lists the names at the top of ``NAME`` that it replaces, and all other objects of a
   writer have its mark.

A kill leaves a claim and objects that nothing names. `recover`, which each save to ``NAME`` and ``meshtape gc`` run,
deletes them when the owner is gone: a process of this PID namespace that has ended, or any that put nothing for a day.
Until then they only cost space. (Parts of an interrupted upload show in no list; a rule of the bucket removes them.)
A deletion first puts ``.meshtape-trash``, then removes the manifest; `recover` completes a half-done one.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from ...arrays.core.errors import CheckpointError, CheckpointExists, StoreError
from ..base import strict_json
from ..base.checksums import crc32c
from ..base.threads import in_threads
from ..format import chunk_sums, manifest
from ..format.documents import PROGRAM, is_kept
from ..format.hf_index import HF_INDEX, HF_SINGLE
from ..format.zarr_format import GROUP_ATTRIBUTE, group_texts
from ..stores import owners
from ..stores.atomic_directory import Folder
from ..stores.contract import Store, StoredObjectInfo
from ..stores.owners import host
from ..stores.store import at, holding, split
from . import contents
from .anchor_lock import PATIENCE, locked
from .contents import CLAIM, JOURNAL, TRASH, is_of_a_writer, mark_of

_GROUP = "zarr.json"
_LAST = (manifest.FILE, HF_INDEX, PROGRAM, contents.DCP)

_mine: set[str] = set()  # claims that this process, in any thread, holds now


def _claim_text(replaces: Iterable[str]) -> bytes:
    said = {"host": host(), "pid": os.getpid(), "id": uuid.uuid4().hex, "replaces": sorted(replaces)}
    return json.dumps(said).encode()


def why_gone(
    store: Store, claim: StoredObjectInfo, entries: Iterable[StoredObjectInfo], silence: float | None = None
) -> str | None:
    """The reason why the owner of a claim counts as dead; None where it may live."""
    if f"{store.root}/{claim.name}" in _mine:
        return None
    try:
        said = strict_json.loads(store.get(claim.name))
        owner, pid = str(said["host"]), int(said["pid"])
    except FileNotFoundError:
        return None  # just finished
    except (ValueError, KeyError, TypeError):
        owner, pid = "", 0
    mark = mark_of(claim.name)
    last = max([claim.modified, *(e.modified for e in entries if mark_of(e.name) == mark)])
    return owners.why_dead(owner, pid, last, owners.FOREIGN_AGE if silence is None else silence)


def _replaced(store: Store, claim: str) -> set[str]:
    """The names that a claim says it replaces."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return {str(name) for name in strict_json.loads(store.get(claim))["replaces"]}
    return set()


def _is_written(name: str, held: set[str]) -> bool:
    """Whether a writer makes such a name in an empty place: arrays, shards, Zarr's metadata and documents."""
    own = name in (JOURNAL, _GROUP, chunk_sums.FILE) or ("/" not in name and name.endswith((".safetensors", ".distcp")))
    return own or bool(mark_of(name)) or contents.in_array(name, held) or is_kept(name)


def _delete(store: Store, names: list[str]) -> None:
    groups = [names[i : i + 1000] for i in range(0, len(names), 1000)]
    in_threads(store.delete, groups)


def is_begun(root: str) -> bool:
    """Whether a writer has begun there and not finished."""
    return any(name.startswith(CLAIM) for name in at(root).files())


def _stale(store: Store, held: set[str]) -> set[str]:
    """Old tables of contents that a writer, killed after it had put its own, was about to delete."""
    named = contents.listing(store.root, held)
    out: set[str] = set()
    for claim in (n for n in held if n.startswith(CLAIM) and mark_of(n) and len(named.tables) > 1):
        mark = mark_of(claim)
        for table in named.tables - {HF_SINGLE}:
            if any(mark_of(top) == mark for top in contents.listing(store.root, {table}).tops):
                out |= (named.tables & _replaced(store, claim)) - {table}
    return out


def remains(store: Store, silence: float | None = None) -> dict[str, tuple[list[StoredObjectInfo], str | None]]:
    """By claim, or mark of a deletion: its owner's objects, and why the owner counts as dead (None: it may live)."""
    if not any(name == TRASH or name.startswith(CLAIM) for name in store.files()):
        return {}  # as nearly always: without a look into the folders
    entries = list(store.entries())
    held = {e.name for e in entries}
    stale = _stale(store, held)
    named = contents.listing(store.root, held - stale)
    known = bool(named.tables)
    beaten = known and all(mark_of(n) for n in named.tops - {_GROUP, *named.tables})
    out: dict[str, tuple[list[StoredObjectInfo], str | None]] = {}
    for claim in (e for e in entries if e.name == TRASH or e.name.startswith(CLAIM)):
        deletion = claim.name == TRASH
        # Beside a table of contents a deletion had not begun, so it does not happen.
        why = "a deletion was cut short" if deletion else why_gone(store, claim, entries, silence)
        mark, replaced = mark_of(claim.name), _replaced(store, claim.name)

        def left(name: str, mark: str = mark, replaced: set[str] = replaced, deletion: bool = deletion) -> bool:
            if name in stale:
                return name in replaced
            if name in _LAST or name == TRASH or name.startswith(CLAIM):
                return False
            if known and (named.damaged or named.has(name, held) or name in named.files):
                return False
            if name == JOURNAL:
                return True
            if mark:
                return mark_of(name) == mark or name.partition("/")[0] in replaced
            # Without a mark: a deletion, or a writer that came to an empty place. Another may have been faster, under
            # marked names.
            own = not mark_of(name) and (_is_written(name, held) or name.partition("/")[0] in replaced)
            return own and (not known or (beaten and not is_kept(name)))

        out[claim.name] = [claim, *(e for e in entries if left(e.name))], why
    if not known and TRASH in out:
        marked = [e for e in entries if (m := mark_of(e.name)) and f"{CLAIM}{m}" not in out]
        out[TRASH][0].extend(marked)
    return out


def recover(root: str, silence: float | None = None) -> list[str]:
    """Delete the leftovers of dead writers and of half a deletion below a target; returns the names."""
    store = at(root)
    found = remains(store, silence)
    dead = {claim: left for claim, (left, why) in found.items() if why is not None}
    if not dead:
        return []
    if contents.listing(root, held := set(store.files())).damaged:
        return []  # what a damaged table of contents names cannot be told from what it does not
    kept = {e.name for claim, (left, why) in found.items() if why is None for e in left}
    gone = sorted({e.name for left in dead.values() for e in left[1:]} - kept)
    store.delete([n for n in gone if n in contents.CHECKPOINTS])  # first: what they list is deleted with them
    _delete(store, [n for n in gone if n not in contents.CHECKPOINTS])
    if manifest.FILE in held:
        _renew_group(store)
    _delete(store, list(dead))
    return [*gone, *(name for name in dead if name != TRASH)]


def _renew_group(store: Store) -> None:
    """Put Zarr's group metadata after a kill between it and the manifest."""
    found = manifest.read(store.root)
    if found is None:
        return
    arrays, packs = [a.directory for a in found.arrays if a.packs is None], [p.file for p in found.packs]
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        held = strict_json.loads(store.get(_GROUP))
        same = held["attributes"][GROUP_ATTRIBUTE].get("packs", []) == packs
        if same and set(held["consolidated_metadata"]["metadata"]) == set(arrays):
            return
    texts = {name: store.get(f"{name}/zarr.json") for name in arrays}  # in the order of a save
    written = group_texts(found, texts)
    store.put(_GROUP, next((t for t in written if crc32c(t) == found.zarr), written[0]))


def discard(root: str) -> None:
    """Delete a checkpoint, its table of contents first, so that the rest is never taken for a checkpoint."""
    store = at(root)
    held = {e.name for e in store.entries()}
    found = contents.listing(root, held)
    store.put(TRASH, json.dumps({"replaces": sorted(found.tops)}).encode())
    store.delete(list(_LAST))
    _delete(store, sorted(n for n in held if found.has(n, held)))
    store.delete([TRASH])


def check_target(root: str, overwrite: bool, tables: frozenset[str]) -> list[str]:
    """Raise `CheckpointExists` where ``root`` may not be written to; returns the documents there that stay."""
    store = at(root)
    store.refuse_writes()
    above, name = holding(root)
    if not name:
        raise CheckpointError(f"{root} is a whole bucket; name a place in it")
    if above.size(name) is not None:
        raise CheckpointExists(f"{root} is a file; overwrite=True replaces checkpoint directories alone")
    held = {e.name for e in store.entries()}
    if not overwrite and held & {*_LAST, HF_SINGLE}:
        raise CheckpointExists(f"{root} exists; pass overwrite=True to replace it")
    users = {n for n in held if not is_of_a_writer(n)}
    if not held & (contents.CHECKPOINTS | contents.PROGRAMS) and users < held:
        return []  # somebody writes there, or did: we shall write beside that, and delete nothing of it
    return contents.check(root, tables, users | (held & contents.listing(root, held).files))


class ObjectFolder(Folder):
    """A target that is being filled. Names get ``suffix``; the last objects wait for `commit`."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.store: Any = at(root)
        self._late: dict[str, bytes] = {}
        self._after: dict[str, bytes] = {}
        self._claim = CLAIM
        self._seen: dict[str, dict[str, str]] = {}
        self._replaces: set[str] = set()
        self._single = False  # whether there is a model in one file, without a table of contents
        self._documents: set[str] = set()
        self._identity = ""  # of a checkpoint that is replaced, from which there may be deltas
        self._unfinished = False

    def begin(self) -> None:
        """Claim names, and remember the present objects."""
        try:
            self._claim_names()
        except BaseException:
            # The claim may be there or not; it is nobody's now, so that `recover` collects it.
            _mine.difference_update({f"{self.root}/{CLAIM}", f"{self.root}/{self._claim}"})
            raise

    def _claim_names(self) -> None:
        _mine.add(f"{self.root}/{CLAIM}")
        try:
            self._see(entries := list(self.store.entries()))
            if entries:
                raise FileExistsError
            self.store.put(CLAIM, _claim_text([]), new=True)
            # Between the two looks another writer may have come and gone.
            if [e.name for e in self.store.entries()] != [CLAIM]:
                self.store.delete([CLAIM])
                self._see(self.store.entries())
                raise FileExistsError
        except FileExistsError:
            _mine.discard(f"{self.root}/{CLAIM}")
            self.suffix = f"~g{uuid.uuid4().hex[:8]}"
            self._claim = f"{CLAIM}{self.suffix}"
            _mine.add(f"{self.root}/{self._claim}")
            self.store.put(self._claim, _claim_text(self._replaces))

    def take_over(self, suffix: str) -> bool:
        """Continue under the names of a dead writer; False where there is none, or it lives."""
        claim = f"{CLAIM}{suffix}"
        entries = list(self.store.entries())
        found = next((e for e in entries if e.name == claim), None)
        if found is None or why_gone(self.store, found, entries) is None:
            return False
        self.suffix, self._claim = suffix, claim
        _mine.add(f"{self.root}/{claim}")
        try:
            self._see(entries)
            self.store.put(claim, _claim_text(self._replaces))
        except BaseException:
            self.leave()
            raise
        return True

    def _see(self, entries: Iterable[StoredObjectInfo]) -> None:
        """Remember the present table of contents, so that only that one is replaced, and its listing."""
        entries = list(entries)
        held = {e.name for e in entries}
        for e in entries:
            if e.name in _LAST:
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    self._seen[e.name] = self.store.version(e)
        found = contents.listing(self.root, held)
        self._single, self._identity = HF_SINGLE in held, found.identity
        listed = {n for n in held if found.tables and found.has(n, held)}
        self._replaces = {n.partition("/")[0] for n in listed}
        self._documents = {n for n in held - listed if is_kept(n) and not mark_of(n)}

    def leave(self) -> None:
        """Stop, and leave the written objects to a later writer (see `take_over`)."""
        _mine.discard(f"{self.root}/{self._claim}")

    def mkdir(self, name: str) -> None:
        pass  # a folder is there as soon as something is in it

    def put(self, name: str, data: bytes) -> None:
        if name in (*_LAST, _GROUP):
            self._late[name] = data
        elif self._seen and "/" not in name and not mark_of(name):
            self._after[name] = data  # others read it by this very name: it changes when the rest has
        else:
            self.store.put(name, data)

    def settle(self, name: str = "") -> None:
        pass  # what was put is durable

    def commit(self) -> None:
        """Put the last object, which makes the folder a checkpoint, then delete the replaced objects."""
        if not self._identity:
            self._publish()
            return
        with locked(split(self.root)[0], patience=10 * PATIENCE):
            contents.refuse_base(self.root, self._identity)
            self._publish()

    def _publish(self) -> None:
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
            if self._single:
                self.store.delete([HF_SINGLE])
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
            # The new generation is in place: this is no longer an error of the save. The claim stays, for `recover` to
            # end the work.
            self._unfinished = True

    def _collect(self) -> None:
        entries = list(self.store.entries())
        held = {e.name for e in entries}
        found = contents.listing(self.root, held)
        if not found.tables or found.damaged:
            return
        alive = {mark_of(name) for name in held if name.startswith(CLAIM) and name != self._claim}
        # A document that stayed makes way for a new one of its name, which has a mark.
        renewed = self._documents & {name for name, file in found.documents.items() if name != file}

        def is_old(name: str) -> bool:
            if name in _LAST or name.startswith(CLAIM) or found.has(name, held):
                return False
            if mark := mark_of(name):
                return mark not in alive
            return name.partition("/")[0] in self._replaces or name in renewed

        _delete(self.store, [name for name in held if is_old(name)])

    def end(self, committed: bool) -> None:
        """Delete the claim; without the commit, also the objects written under it."""
        try:
            if not committed:
                left = remains(self.store).get(self._claim)
                _delete(self.store, [e.name for e in left[0][1:]] if left else [])
            if not self._unfinished:
                self.store.delete([self._claim, JOURNAL])
        finally:
            _mine.discard(f"{self.root}/{self._claim}")


@contextlib.contextmanager
def replacing(root: str, *, overwrite: bool, tables: frozenset[str]) -> Iterator[Any]:
    """As `CommitProtocol.replacing`."""
    at(root).refuse_writes()
    recover(root)
    check_target(root, overwrite, tables)
    folder = ObjectFolder(root)
    folder.begin()
    try:
        yield folder
    finally:
        # An error that brought us here matters more than one of the clean-up; `recover` collects the rest.
        with contextlib.suppress(*(() if folder.committed else (Exception,))):
            folder.end(folder.committed)
