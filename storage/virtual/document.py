"""The document of a virtual checkpoint: a small JSON file with its expression and the identity of every parent.

It is read as hostile text. A place of a parent is relative to the folder of the document: below it, or with one ``..``
in front, below the folder above; or it is absolute. In an object store, or from a server, it is never local, and never
of another kind of store than the document's: a document from elsewhere reads no files of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from ...arrays.core.errors import (
    CheckpointError,
    CheckpointExists,
    CorruptCheckpoint,
    NotACheckpoint,
    ParentChanged,
    UnsupportedVersion,
)
from ..base import names, strict_json
from ..base.sealed import sealed, unsealed
from ..checkpoint.checkpoint import FILES, Checkpoint, Computed, generation_of
from ..format import manifest
from ..format.migrations import Step, upgraded
from ..loading.deltas import DeltaTensor
from ..loading.open import OPENERS, open_checkpoint
from ..readers.zarr_tensor import METADATA
from ..stores import atomic_directory, icechunk_store, store
from ..stores.generations import JointGeneration
from . import adapters as adapters  # registers its node
from .expressions import DEEPEST, MOST_READS, NODES, Node, Parent, parents_of
from .identity import identity_of

FORMAT = "meshtape.virtual"


def _second(document: dict[str, Any]) -> dict[str, Any]:
    """Version 2: the choice among unequal integers; what an adapter trained beside its factors."""

    def grown(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        sums = ("sum", "ema", "difference", "add", "blend")
        new = {"integers": "equal"} if node["op"] in sums else {}
        new |= {"copies": None, "tokens": []} if node["op"] == "lora" else {}
        if held := new.keys() & node.keys():
            raise ValueError(f"version 1 has no {min(held)!r}")
        return node | {"of": [grown(x) for x in node["of"]]} | new

    return document | {"expression": grown(document["expression"])}


MIGRATIONS: list[Step] = [_second]
START = b'{"format": "meshtape.virtual"'[:24]
LONGEST = 4 << 20  # bytes
_MEMBERS = {"format", "version", "parents", "expression"}


# ----- checkpoints from expressions -----------------------------------------------------------------------------------


def build(node: Node, parents: Mapping[Parent, Checkpoint], known: dict[str, Checkpoint]) -> Checkpoint:
    """The checkpoint of an expression whose parents are open. All is checked, and no array is read. Equal parts of
    expressions make one checkpoint, which ``known`` keeps."""
    reads = sum(1 if (c := parents[p].computed) is None else c.reads for p in parents_of(node))
    if reads > MOST_READS:
        raise CheckpointError(f"{node} reads {reads} arrays for each of its own, at most {MOST_READS} are allowed")

    def depth(x: Any) -> int:
        if isinstance(x, Node):
            return 1 + max(map(depth, x.of))
        return 0 if (c := parents[x].computed) is None else c.depth

    if (levels := depth(node)) > DEEPEST:
        raise CheckpointError(
            f"{node} is nested {levels} levels deep, through its documents; at most {DEEPEST} are allowed"
        )

    def made(x: Any) -> Checkpoint:
        if isinstance(x, Parent):
            return parents[x]
        if (key := repr(x)) not in known:
            known[key] = x.apply([made(y) for y in x.of])
        return known[key]

    generation = JointGeneration.of_all(map(generation_of, parents.values()))
    return replace(made(node), generation=generation, computed=Computed(node, dict(parents), reads, levels))


# ----- text -----------------------------------------------------------------------------------------------------------


def dumps(node: Node, where: str) -> bytes:
    """The document of an expression, for a place."""
    numbers = {p: i for i, p in enumerate(dict.fromkeys(parents_of(node)))}

    def plain(x: Any) -> Any:
        if isinstance(x, Parent):
            return numbers[x]
        return {"op": x.kind, "of": [plain(y) for y in x.of], **{name: getattr(x, name) for name in x.params}}

    parents = [{"path": _relative(p.path, where), "identity": p.identity} for p in numbers]
    body = {"format": FORMAT, "version": len(MIGRATIONS) + 1, "parents": parents, "expression": plain(node)}
    return sealed(json.dumps(body, allow_nan=False).encode())


def loads(data: bytes, where: str) -> Node:
    """The expression of a document that lies at a place.

    Raises
    ------
    UnsupportedVersion
        A later meshtape wrote it.
    CorruptCheckpoint
        It is damaged, was edited, or says what no document may.
    """
    text, _, fits = unsealed(data)
    try:
        top = strict_json.loads(text, unique=True)
        if not isinstance(top, dict) or top.get("format") != FORMAT:
            raise ValueError(f"it does not say format {FORMAT!r}")
        if top.get("version") in range(1, len(MIGRATIONS) + 2) and not fits:
            raise ValueError("its crc32c does not fit: it is damaged or was edited; write it anew")
        top = upgraded(top, MIGRATIONS, where, CorruptCheckpoint)
        _expect(top, _MEMBERS, "the document")
        parents = [_parent(row, where) for row in _list(top["parents"], "parents")]
        node = _node(top["expression"], parents, 0)
        if not isinstance(node, Node) or set(parents_of(node)) != set(parents) or len(set(parents)) != len(parents):
            raise ValueError("the expression is none of all its parents, each listed once")
    except (CorruptCheckpoint, UnsupportedVersion):
        raise
    except (ValueError, RecursionError) as e:
        raise CorruptCheckpoint(f"{where}: no document of a virtual checkpoint: {e}") from None
    return node


def _expect(said: Any, members: set[str], what: str) -> None:
    if not isinstance(said, dict) or said.keys() != members:
        held = sorted(map(str, said))[:8] if isinstance(said, dict) else f"{said!r:.40}"
        raise ValueError(f"{what} has the members {sorted(members)}, not {held}")


def _list(said: Any, what: str) -> list[Any]:
    if isinstance(said, list):
        return said
    raise ValueError(f"{what} are no list")


def _parent(row: Any, where: str) -> Parent:
    _expect(row, {"path", "identity"}, "a parent")
    if not all(isinstance(v, str) and 0 < len(v) < 4096 for v in row.values()):
        raise ValueError("path and identity of a parent are texts")
    return Parent(_resolved(row["path"], where), row["identity"])


def _node(said: Any, parents: list[Parent], depth: int) -> Any:
    if type(said) is int:
        if not 0 <= said < len(parents):
            raise ValueError(f"there is no parent {said}")
        return parents[said]
    if depth >= DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    kind = NODES.get(said["op"]) if isinstance(said, dict) and isinstance(said.get("op"), str) else None
    if kind is None:
        raise ValueError(f"{said!r:.40} is no expression that this version knows")
    _expect(said, {"op", "of", *kind.params}, kind.kind)
    of = tuple(_node(x, parents, depth + 1) for x in _list(said["of"], f"operands of {kind.kind}"))
    return kind(of, **{name: said[name] for name in kind.params})


# ----- places ---------------------------------------------------------------------------------------------------------


def _homes(where: str) -> tuple[str, str | None]:
    """The folder of a document, and the one above; None where that is a whole bucket, host or file system."""
    home = store.split(where)[0]
    above, name = store.split(home)
    return home, above if name and (store.is_url(where) or store.split(above)[1]) else None


def _relative(path: str, where: str) -> str:
    """The place of a parent as the document at a place says it."""
    home, above = _homes(where)
    for folder, start in ((home, ""), (above, "../")):
        head = folder and store.join(folder, "")
        if head and path.startswith(head):
            text = path.removeprefix(head).replace(os.sep, "/")
            with contextlib.suppress(CorruptCheckpoint):
                names.plain(text, where)
                return start + text
    return path


def _resolved(text: str, where: str) -> str:
    """Inverse of `_relative`; `ValueError` for a place that a document may not name."""
    remote = store.is_url(where)
    if store.is_url(text):
        if icechunk_store.VIRTUAL in text:
            raise ValueError(f"parent {text!r:.80} allows virtual chunks, which only its reader may; refused")
        if remote:
            (scheme, _, rest), (own, _, ours) = text.partition("://"), where.partition("://")
            # Options may send what is signed with the user's keys to another host.
            strange = ";" in text and rest.split("/")[0] != ours.split("/")[0]
            if scheme != own or strange:
                raise ValueError(
                    f"parent {text!r:.80} lies in another kind of store, or has options of its own; refused"
                )
        if store.location(text) != text:
            raise ValueError(f"parent {text!r:.80} is no plain location")
        return text
    if os.path.isabs(text):
        if remote or os.path.normpath(text) != text:
            raise ValueError(f"parent {text!r:.80} is a local path, or no plain one; refused")
        return text
    folder: str | None
    folder, above = _homes(where)
    if text.startswith("../"):
        folder, text = above, text.removeprefix("../")
    try:
        names.plain(text, "its parent")
    except CorruptCheckpoint as e:
        raise ValueError(str(e)) from None
    if folder is None:
        raise ValueError(f"parent '../{text:.80}' leaves the bucket, host or file system; refused")
    return store.join(folder, *text.split("/"))


# ----- opening and writing --------------------------------------------------------------------------------------------


@dataclass
class Opening:
    """Documents that are opened together: the ``stack`` of those at work, one for the next, and what was opened. Each
    place is opened once, so that its arrays are read once for all that are made of them."""

    stack: list[str] = field(default_factory=list)
    known: dict[str, Checkpoint] = field(default_factory=dict)  # by their expressions
    opened: dict[str, Checkpoint] = field(default_factory=dict)
    _plain: dict[tuple[str, str], Checkpoint] = field(default_factory=dict)  # by place and identity
    _identities: dict[str, str] = field(default_factory=dict)

    def open(self, path: str) -> Checkpoint:
        """The checkpoint of a place; within it, those that a document names are of this opening, too."""
        if path not in self.opened:
            token = _opening.set(self)
            try:
                self.opened[path] = self._with_one_base(open_checkpoint(path))
            finally:
                _opening.reset(token)
        return self.opened[path]

    def _with_one_base(self, ckpt: Checkpoint) -> Checkpoint:
        """A checkpoint whose deltas are from the one object that others of the same base have, too."""
        plain = ckpt.base or ckpt
        if plain.manifest is not None:
            base = self._plain.setdefault((plain.path, plain.manifest.identity), plain)
            for name, a in ckpt.arrays.items():
                if isinstance(a.tensor, DeltaTensor):
                    a.tensor = replace(a.tensor, parts=(base[name].tensor, a.tensor.stored))
        return ckpt

    def identity_of(self, path: str) -> str:
        """The identity of an open checkpoint. Taken once: it may tie what was opened to other files."""
        if path not in self._identities:
            self._identities[path] = identity_of(self.opened[path])
        return self._identities[path]

    @contextlib.contextmanager
    def reading(self, where: str) -> Iterator[None]:
        """A document is read."""
        if where in self.stack:
            raise CorruptCheckpoint(f"virtual checkpoints in a circle: {' reads '.join([*self.stack, where])}")
        if len(self.stack) >= DEEPEST:
            raise CorruptCheckpoint(f"{where}: virtual checkpoints are nested deeper than {DEEPEST} levels")
        self.stack.append(where)
        try:
            yield
        finally:
            self.stack.pop()


_opening: ContextVar[Opening | None] = ContextVar("opening", default=None)


def read_document(where: str) -> bytes:
    """The bytes of a file that may be a document, of at most `LONGEST`."""
    at, name = store.holding(where)
    with contextlib.closing(at.reader(name)) as reader:
        if reader.nbytes > LONGEST:
            raise CorruptCheckpoint(f"{where} has {reader.nbytes} bytes, a document has at most {LONGEST}")
        return reader.part(0, reader.nbytes)


def is_document(path: str) -> bool:
    """Whether a local file begins as a document does."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        return f.read(len(START)) == START
    return False


def open_document(where: str) -> Checkpoint:
    """The checkpoint of a document. Raises `ParentChanged` where a parent is not what the document pins."""
    opening = _opening.get() or Opening()
    with opening.reading(where):
        data = read_document(where)
        node = loads(data, where)
        parents: dict[Parent, Checkpoint] = {}
        for parent in dict.fromkeys(parents_of(node)):
            if len(opening.opened) >= MOST_READS:
                raise CorruptCheckpoint(f"{where}: more than {MOST_READS} checkpoints would be opened")
            try:
                parents[parent] = opening.open(parent.path)
            except NotACheckpoint as e:
                raise ParentChanged(f"{where}: its parent {parent.path} is not there any more: {e}") from None
        for parent, ckpt in parents.items():  # of which documents are pinned anew before this one
            now = opening.identity_of(parent.path)
            if parent.identity not in ([now] if ckpt.manifest is None else ckpt.manifest.identities):
                told = f"is another by now: {parent.identity} was pinned, and {now} is there"
                if now[:6] == "files:":
                    told += ". Its files were pinned, so a copy or another time counts, too"
                    if parent.path.startswith("icechunk:"):
                        told += ", and the next commit of a branch (@SNAPSHOT stays)"
                if now.startswith(("files:", "virtual:")):
                    told += f"; virtual.repin of {where} pins what is there, and then of documents that name it"
                    told += ", innermost first"
                raise ParentChanged(f"{where}: its parent {parent.path} {told}")
        out = build(node, parents, opening.known)
    assert out.computed is not None
    out.path, out.computed = where, replace(out.computed, identity=f"virtual:{unsealed(data)[1] or 0:08x}")
    return out


OPENERS[START] = open_document


def _known_by_files(ckpt: Checkpoint, where: str) -> Iterator[str]:
    """Parents, and theirs, whose identity a new file would change."""
    for parent, held in ckpt.computed.parents.items() if ckpt.computed is not None else ():
        yield from _known_by_files(held, where)
        folder = store.split(where)[0]
        among = store.lies_in(folder, parent.path) and (held.kind not in FILES or store.lies_in(parent.path, folder))
        if among and parent.identity.startswith("files:"):
            yield parent.path


def write(path: str | os.PathLike[str], ckpt: Checkpoint, *, overwrite: bool = False) -> str:
    """Write the document of a virtual checkpoint: some kilobytes, whole or not at all.

    Parameters
    ----------
    path
        A file or URL of any name, such as ``avg.json``. Parents below its folder, or below the one above, are named
        relative to it, so that they may move together; others by their whole path.
    ckpt
        What a function of this namespace gave, or such a document that was opened.
    overwrite
        Replace another document of a virtual checkpoint. Nothing else is ever replaced.

    Returns
    -------
    str
        The location of the document.

    Raises
    ------
    CheckpointExists
        Something lies there, and it is no such document, or ``overwrite`` is false.
    CheckpointError
        It is not virtual, or the document could not be opened from that place: local parents of a document in an object
        store, and a document that would be its own parent, or a file of one that meshtape did not write.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> home = tempfile.mkdtemp()
    >>> _ = save(os.path.join(home, "a"), {"w": np.zeros(2)})
    >>> _ = save(os.path.join(home, "b"), {"w": np.ones(2)})
    >>> from meshtape.storage import virtual
    >>> mean = virtual.mean([os.path.join(home, "a"), os.path.join(home, "b")])
    >>> where = virtual.write(os.path.join(home, "avg.json"), mean)
    >>> open_checkpoint(where)["w"][...]
    array([0.5, 0.5])
    """
    where = store.location(path)
    if not isinstance(ckpt, Checkpoint) or ckpt.computed is None or not ckpt.whole:
        raise CheckpointError(
            f"only a virtual checkpoint has a document, not {ckpt!r:.80}; make one with mt.storage.virtual"
        )
    parents = ckpt.computed.parents.values()
    if any(store.lies_in(x, where) and store.lies_in(where, x) for p in parents for x in p.places):
        raise CheckpointError(f"{where} is a parent of what is to be written there; write to another name")
    if found := next(_known_by_files(ckpt, where), None):
        raise CheckpointError(
            f"{where} would be one of the files by which its parent {found} is known, so that it could never be "
            "opened; write it beside that folder"
        )
    store.refuse_folder(where)
    at, name = store.holding(where)
    if name in (manifest.FILE, *METADATA):
        raise CheckpointError(f"{where}: {name} is a file of checkpoints themselves; choose another name")
    at.refuse_writes()
    exists = CheckpointExists(f"{where} exists; pass overwrite=True, or choose another name")
    if at.size(name) is not None:
        if not read_document(where).startswith(START):
            raise CheckpointExists(f"{where} is no virtual checkpoint, which alone is replaced: choose another name")
        if not overwrite:
            raise exists
    data = dumps(ckpt.computed.expression, where)
    try:
        loads(data, where)
    except CorruptCheckpoint as e:
        raise CheckpointError(f"{where} cannot have this document: {e}") from None
    with atomic_directory.writing(where):
        try:
            at.put(name, data, new=not overwrite)
        except FileExistsError as e:
            raise e if isinstance(e, CheckpointExists) else exists from None
    return where
