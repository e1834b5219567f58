"""The files of a place that are a checkpoint's own: those that its manifest or index lists.

``overwrite=True`` replaces the listed files. Unlisted documents (a tokenizer, a README, a config) stay, unless a new
one has the same name. Any other file is a stranger: the whole place is then refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...arrays.core.errors import CheckpointError, CheckpointExists, StoreError
from ...arrays.core.formatting import some
from ..base import strict_json
from ..base.names import STEP
from ..base.threads import UPLOADS, in_threads
from ..format import chunk_sums, manifest
from ..format.documents import MARK, PROGRAM, is_kept
from ..format.hf_index import HF_INDEX, HF_SINGLE, read_index
from ..stores import atomic_directory, store
from ..stores.contract import unlisted

GROUP = "zarr.json"
DCP = ".metadata"  # of torch.distributed.checkpoint
CHECKPOINTS = frozenset([manifest.FILE, HF_INDEX, HF_SINGLE, DCP])  # tables of contents: each makes a checkpoint
SAVED = frozenset([manifest.FILE])
PROGRAMS = frozenset([PROGRAM])
CLAIM = ".meshtape-writing"
TRASH = ".meshtape-trash"
JOURNAL = ".meshtape-transfer"  # of a transfer that can go on
_SHOWN = 8
_OTHERS = 256  # folders beside a checkpoint, without the number of a step, that are looked at for deltas from it
_VERSION = re.compile(rb'"version":(\d+)')
_IN_ARRAY = re.compile(r"zarr\.json|c([./].*)?")
_SHARD = re.compile(r"(model[^/]*|pack-(local|\d+-\d+)-\d+(~g[0-9a-f]{8})?)\.safetensors")
_DISTCP = re.compile(rb"__\d+_\d+(?:~g[0-9a-f]{8})?\.distcp")  # the names stand in the pickle as they are


def in_array(name: str, held: set[str]) -> bool:
    """Whether a name below a place is one that a writer of ours makes for an array."""
    top, _, rest = name.partition("/")
    return bool(rest) and (f"{top}/{GROUP}" in held or rest != GROUP) and _IN_ARRAY.fullmatch(rest) is not None


def mark_of(name: str) -> str:
    """The mark in a name below the target, or "" for plain ones."""
    found = MARK.search(name.partition("/")[0])
    return found[0] if found else ""


def is_of_a_writer(name: str) -> bool:
    """Whether only writers make such a name."""
    return name in (TRASH, JOURNAL) or name.startswith(CLAIM) or bool(mark_of(name))


@dataclass
class ListedFiles:
    """The files that the tables of contents of a place list."""

    tables: set[str]
    files: set[str] = field(default_factory=set)
    # Manifest rows by directory, or None where they cannot be read.
    arrays: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)  # of a manifest: file by name
    damaged: bool = False
    identity: str = ""  # of a checkpoint from which there may be deltas

    @property
    def tops(self) -> set[str]:
        """Names at the top level that belong to it."""
        return {f.partition("/")[0] for f in self.files} | set(self.arrays)

    def has(self, name: str, held: set[str]) -> bool:
        """Whether a file is listed."""
        if name in self.files:
            return True
        top, _, rest = name.partition("/")
        if self.damaged:
            return in_array(name, held) or _SHARD.fullmatch(name) is not None
        rows = self.arrays.get(top)
        if not rest or rows is None:
            return False
        if isinstance(rows, list):
            rows = self.arrays[top] = {r[0] for r in rows if isinstance(r, list) and r and isinstance(r[0], str)}
        return rest == GROUP or rest in rows


def listing(root: str, held: Iterable[str]) -> ListedFiles:
    """The `ListedFiles` of a place, of which ``held`` are the files.

    Where a table is damaged, the forms of names decide, so that its files can still be replaced.
    """
    tables = (CHECKPOINTS | PROGRAMS) & set(held)
    out = ListedFiles(set(tables), set(tables))
    try:
        if manifest.FILE in tables and (found := manifest.read(root)) is not None:
            out.identity = found.identity if found.base is None else ""
            out.arrays = {a.directory: a.raw_objects for a in found.arrays if a.packs is None}
            out.documents = {name: file for name, (_, file) in found.documents.items()}
            out.files |= {GROUP, *out.documents.values(), *([] if found.sums is None else [found.sums])}
            out.files |= {p.file for p in found.packs}
            if any(a.dual for a in found.arrays):  # their index is no checkpoint of its own
                out.tables -= {HF_INDEX}
        if HF_INDEX in tables:
            out.files |= set(read_index(root)[0].values())
        if DCP in tables:
            out.files |= {name.decode() for name in _DISTCP.findall(store.at(root).get(DCP))}
        if PROGRAM in tables and not tables & CHECKPOINTS:
            said = strict_json.loads(store.at(root).get(PROGRAM))
            out.files.add(str(said["file"]))
    except StoreError:
        raise
    except (CheckpointError, ValueError, KeyError, TypeError, FileNotFoundError):
        out.damaged = True
        out.files |= {GROUP, chunk_sums.FILE, "constants.safetensors"}
    return out


def _walk(root: str) -> list[str]:
    """Files below a local directory; folders with nothing in them, and links to folders, end in ``/``."""
    found = []
    for folder, folders, files in os.walk(root, onerror=unlisted):
        at = os.path.relpath(folder, root).replace(os.sep, "/")
        start = "" if at == "." else f"{at}/"
        found += [start + f for f in files]
        found += [f"{start}{d}/" for d in folders if os.path.islink(os.path.join(folder, d))]
        if start and not files and not folders:
            found.append(start)
    return sorted(found)


def look(root: str, held: Iterable[str] | None = None) -> tuple[ListedFiles, list[str], list[str]]:
    """(listing, strangers, unlisted documents)."""
    every = set(_walk(root) if held is None else held)
    found = listing(root, every)
    loose = sorted(n for n in every if not found.has(n, every))
    # An array without an element has a folder, and no file in it but Zarr's; a link stands for the folder of an array.
    loose = [n for n in loose if not (n.endswith("/") and n[:-1] in found.arrays)]
    documents = [n for n in loose if is_kept(n)]
    return found, sorted(set(loose) - set(documents)), documents


def beside(root: str) -> list[str]:
    """The files in the place of a checkpoint that are not its own, unlisted documents included."""
    held = None
    if store.is_url(root):
        held = {e.name for e in store.at(root).entries()}
    _, strangers, documents = look(root, held)
    return [n for n in strangers + documents if held is None or not is_of_a_writer(n)]


def refuse_strangers(root: str, strangers: list[str], why: str) -> None:
    """Raise `CheckpointExists` with the names of strangers, deep ones by their top folder."""
    tops = list(dict.fromkeys(n if n.count("/") < 2 else f"{n.partition('/')[0]}/…" for n in strangers))
    if tops:
        raise CheckpointExists(
            f"{root} holds what no manifest or index there lists: {some(tops, _SHOWN)}; {why}: move that elsewhere, or "
            "choose another place"
        )


def check(root: str, tables: frozenset[str], held: Iterable[str] | None = None) -> list[str]:
    """Raise `CheckpointExists` unless a checkpoint with one of these ``tables`` may replace all at a place.

    Returns the documents that stay.
    """
    found, strangers, documents = look(root, held)
    if found.tables and not found.tables & tables:
        kinds = ", ".join(sorted(found.tables))
        raise CheckpointExists(
            f"{root} holds {kinds}, not a checkpoint of the kind that is written: remove it, or choose another place"
        )
    if not found.tables:
        if strangers or documents:
            what = ", ".join([*strangers, *documents][:_SHOWN])
            raise CheckpointExists(f"{root} holds something that is not a checkpoint: {what}; refused to replace it")
        return []
    strangers += sorted(found.tables - tables)
    refuse_strangers(root, strangers, "overwrite=True replaces a checkpoint alone")
    refuse_base(root, found.identity)
    return documents


def deltas_from(root: str, identity: str) -> list[str]:
    """The folders beside a checkpoint with deltas from it: steps of its run, and copies of those by whatever name."""
    home, own = store.split(root)
    folders = store.at(home).folders() if identity else []
    numbered = [n for n in folders if STEP.match(n)]
    others = [n for n in folders if not STEP.match(n)][:_OTHERS]

    def needs(name: str) -> bool:
        temporary = atomic_directory.KINDS.match(name)
        if name == own or (temporary and temporary["kind"] != "old"):
            return False
        there = store.at(where := store.join(home, name))
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, CheckpointError),
            contextlib.closing(there.reader(manifest.FILE)) as reader,
        ):
            if (said := _VERSION.search(reader.part(0, 64))) and int(said[1]) >= 4 and (found := manifest.read(where)):
                return found.base == (own, identity)
        return False

    names = numbered + others
    return [n for n, it in zip(names, in_threads(needs, names, UPLOADS), strict=True) if it]


def refuse_base(root: str, identity: str) -> None:
    """Raise `CheckpointExists` where deltas from the checkpoint ``identity`` lie in the same folder, and need it."""
    if needing := deltas_from(root, identity):
        raise CheckpointExists(
            f"{root} is the base of the deltas {', '.join(needing[:_SHOWN])}{', …' * (len(needing) > _SHOWN)}, which "
            "nobody could read without it: CheckpointManager.delete(step), or its save(step, overwrite=True), gives "
            "them another base first"
        )
