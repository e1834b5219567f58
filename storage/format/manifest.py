"""The manifest, ``meshtape.json``: the data of a checkpoint that Zarr lacks, and the sign that it is complete.

It is one line of JSON: format and version, step, the user's metadata, the meshes, the tree, and for each array its
path, shape, dtype, sharding, grid, stored objects (file, offset, shape, bytes, crc32c), the crc32c of its
``zarr.json``, and where the checksums of its chunks stand (see ``chunk_sums``). Its last member is the crc32c of all
that stands before, so that a damaged step or shape cannot pass for a true one.

A manifest is read as hostile text: every type, range and file name is checked before it is used.
"""

from __future__ import annotations

import json
import marshal
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...arrays.backends.collector import no_collections
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError, CorruptCheckpoint
from ...arrays.core.tree import Path
from ..base import names, strict_json
from ..base.malformed import malformed
from ..base.sealed import sealed, unsealed
from ..stores import store
from . import dtypes
from .chunk_grid import ChunkGrid
from .chunk_sums import Section, has_section
from .compression import Compression, PackedZstd, of_plain
from .migrations import Step, upgraded
from .stored_objects import FILE, ArrayEntry, Pack, pack_of
from .zarr_format import is_dual_grid

FORMAT = "meshtape"
# An earlier version is still written where it has all that is needed, so that older readers read it. Version 2 has
# packs, and version 3 the layout dual and more compressions; version 4 has deltas, and version 5 those in few bits.
MIGRATIONS: list[Step] = [lambda document: document] * 4
VERSION = len(MIGRATIONS) + 1

MAX_DEPTH = 200
_MAX_NDIM = 64
MOST_DELTA = 8  # bytes of an item
FORMER = "meshtape.former"
"""The key, in the metadata, of the identities that the same values had before they got another base."""
_KEYS = frozenset([str, int])


class Base(NamedTuple):
    """The checkpoint from which deltas are taken: the name of a folder beside their own, and the identity that it
    had."""

    name: str
    identity: str

    def fault(self, found: object) -> str:
        """Why the manifest that is now at its place is not the one that was pinned; empty where it is."""
        if not isinstance(found, Manifest):
            return f"its base {self.name} {'is not there any more' if found is None else 'cannot be read'}"
        if found.identity != self.identity:
            return f"its base {self.name} is another by now: {self.identity} was pinned, and {found.identity} is there"
        return "" if found.base is None else f"its base {self.name} is a delta itself"


@dataclass
class Manifest:
    """Everything in ``meshtape.json``. ``tree`` is in the form of `encode_tree`; ``structure``, of one that was read,
    is the tree itself."""

    arrays: list[ArrayEntry]
    tree: Any
    step: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    meshes: list[dict[str, int]] = field(default_factory=list)
    packs: list[Pack] = field(default_factory=list)
    documents: dict[str, tuple[int, str]] = field(default_factory=dict)  # crc32c, and file beside the arrays
    sums: str | None = None  # the file of the table of checksums
    zarr: int | None = None  # crc32c of the group's ``zarr.json``
    base: Base | None = None  # of the arrays that are deltas
    structure: Any = None
    attributes: dict[str, Any] = field(default_factory=dict, compare=False)  # of the group, for its ``zarr.json``
    crc32c: int | None = field(default=None, compare=False)  # of the text that it was read from

    @property
    def version(self) -> int:
        """The version of its text."""
        needed = {3 if a.dual else 1 if a.compression is None else a.compression.since for a in self.arrays}
        return max([4 if self.base else 2 if self.packs else 1, *needed])

    @property
    def identity(self) -> str:
        """A short text that changes where the content does: the manifest's checksum, as it binds every chunk."""
        return f"meshtape:{self.crc32c or 0:08x}"

    @property
    def identities(self) -> list[str]:
        """Its identity, and those that the same values had before."""
        former = self.metadata.get(FORMER)
        return [self.identity, *(former if isinstance(former, list) else [])]

    def dumps(self, check: str | None = None) -> bytes:
        """Its text. ``check``: the name by which errors call it, where a reader's checks are to be made of what the
        text says."""
        body = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "metadata": encode_json(self.metadata, "metadata"),
            "nbytes": sum(a.nbytes for a in self.arrays),
            "meshes": [[[k, n] for k, n in m.items()] for m in self.meshes],
            "tree": self.tree,
            **({"documents": {n: [f"{c:08x}", f] for n, (c, f) in self.documents.items()}} if self.documents else {}),
            **({} if self.sums is None else {"sums": self.sums}),
            **({} if self.zarr is None else {"zarr": f"{self.zarr:08x}"}),
            **({} if self.base is None else {"base": list(self.base)}),
            **({"packs": [[p.file, p.nbytes, p.header, f"{p.crc32c:08x}"] for p in self.packs]} if self.packs else {}),
        }
        forms: dict[Any, str] = {}
        rows, first = [], []
        for a in self.arrays:
            known = len(forms)
            rows.append(a.text(forms))
            if len(forms) > known:
                first.append(rows[-1])
        if check is not None:  # arrays of one form have one text, but for their own names, places and checksums
            _build({**body, "arrays": list(map(json.loads, first))}, check, self.arrays)
        return sealed(f'{strict_json.compact(body)[:-1]},"arrays":[{",".join(rows)}]}}'.encode())


# ----- values: JSON with the floats that JSON lacks -------------------------------------------------------------------

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_json(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` as JSON proper: NumPy scalars become numbers, NaN and infinities ``{"$float": "NaN"}``."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where[:60]}…: values within values, more than {MAX_DEPTH}, cannot be saved")
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        value = value.item()
    elif isinstance(value, np.generic) and value.dtype.name in dtypes.EXTENSIONS:
        value = float(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return {"$float": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, (list, tuple)):
        return [encode_json(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == "$float":
                raise CheckpointError(f"{where}: key {key!r} cannot be kept in JSON; use a text other than '$float'")
        return {key: encode_json(v, f"{where}[{key!r}]", depth + 1) for key, v in value.items()}
    raise CheckpointDTypeError(
        f"{where}: a {type(value).__name__} cannot be saved; arrays, numbers, texts, booleans and None can"
    )


def decode_json(value: Any, depth: int = 0) -> Any:
    """Inverse of `encode_json` (tuples come back as lists)."""
    if depth > MAX_DEPTH:
        raise ValueError(f"values within values: more than {MAX_DEPTH}")
    if isinstance(value, list):
        return [decode_json(v, depth + 1) for v in value]
    if isinstance(value, dict):
        if value.keys() == {"$float"} and value["$float"] in _FLOATS:
            return _FLOATS[value["$float"]]
        return {k: decode_json(v, depth + 1) for k, v in value.items()}
    return value


# ----- trees ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which takes three times as long to make
class Leaf:
    """Placeholder of array number ``index`` in a tree."""

    index: int


def encode_tree(node: Any, where: str = "tree") -> Any:
    """A tree whose arrays are `Leaf`s, as JSON. Named tuples and dataclasses have become dicts before."""
    if type(node) is Leaf:
        return {"array": node.index}
    if isinstance(node, dict):
        for key in node:
            if type(key) not in (str, int):
                raise CheckpointError(f"{where}: key {key!r} is a {type(key).__name__}; keys are texts or ints")
        return {"dict": [[k, encode_tree(v, f"{where}.{k}")] for k, v in node.items()]}
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [encode_tree(v, f"{where}.{i}") for i, v in enumerate(node)]}
    return None if node is None else {"value": encode_json(node, where)}


def decoded(node: Any, path: Path, arrays: Sequence[Any], found: list[int]) -> Any:
    """Inverse of `encode_tree` for a node that is checked: well formed, each array at its own path. ``found`` gets the
    numbers of these."""
    if len(path) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if node is None:
        return None
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"malformed node at {path}")
    ((kind, content),) = node.items()
    if kind == "array":
        if type(content) is not int or not 0 <= content < len(arrays):
            raise ValueError(f"{content!r} at {path} is not an array")
        if arrays[content].path != path:
            raise ValueError(f"array {content} stands at {path}, its own path is {arrays[content].path}")
        found.append(content)
        return Leaf(content)
    if kind == "dict" and isinstance(content, list):
        children: dict[Any, Any] = {}
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in _KEYS or pair[0] in children:
                raise ValueError(f"malformed or repeated key at {path}")
            key, value = pair
            children[key] = decoded(value, (*path, key), arrays, found)
        return children
    if kind in ("list", "tuple") and isinstance(content, list):
        listed = [decoded(v, (*path, i), arrays, found) for i, v in enumerate(content)]
        return listed if kind == "list" else tuple(listed)
    if kind != "value":
        raise ValueError(f"unknown kind {kind!r} at {path}")
    value = decode_json(content)
    if type(value) in (dict, list):
        raise ValueError(f"{str(content)[:40]} at {path} is no value")
    return value


# ----- reading --------------------------------------------------------------------------------------------------------


def sizes(x: Any, what: str, least: int = 0) -> tuple[int, ...]:
    """A list of integers from untrusted text or a pickle; ``what`` it is stands in the error."""
    fine = isinstance(x, (list, tuple)) and len(x) <= _MAX_NDIM
    if not fine or not all(type(n) is int and least <= n < 1 << 63 for n in x):
        raise ValueError(f"{what} {str(x)[:80]} is no list of integers of at least {least}")
    return tuple(x)


_SUM = re.compile(r"[0-9a-f]{8}\Z")


def _crc(text: Any) -> int:
    if not isinstance(text, str) or not _SUM.match(text):
        raise ValueError(f"{str(text)[:40]!r} is not a crc32c")
    return int(text, 16)


def _section(x: Any, grid: ChunkGrid) -> Section | None:
    if x is None:
        return None
    first, crc = x
    if type(first) is not int or not 0 <= first < 1 << 60 or not has_section(grid):
        raise ValueError(f"{str(x)[:80]} is not a place in the table of checksums")
    return first, _crc(crc)


def _base(x: Any) -> Base:
    name, identity = x
    if not isinstance(name, str) or not isinstance(identity, str) or not 0 < len(identity) < 100:
        raise ValueError(f"{str(x)[:80]} is no base")
    return Base(name, identity)


_Form = tuple[ChunkGrid, np.dtype, int, int | None, list[str] | None, Compression, bool, bool, bool]
"""Checked data that most arrays of a large checkpoint share: grid, dtype, number of shards, mesh, sharding,
compression, whether packed, of layout "dual", a delta."""


def _form(e: dict[str, Any], n_meshes: int) -> _Form:
    packed, dual, delta = (e.get(k, False) for k in ("packed", "dual", "delta"))
    mesh, sharding, nbytes = e["mesh"], e["sharding"], e.get("nbytes", 0)
    grid = ChunkGrid(sizes(e["shape"], "shape"), sizes(e["shard"], "shard", 1), sizes(e["chunk"], "chunk", 1))
    if not len(grid.shape) == len(grid.shard) == len(grid.chunk):
        raise ValueError("shape, shard and chunk differ in length")
    if any(s % c for s, c in zip(grid.shard, grid.chunk, strict=True)):
        raise ValueError("chunks do not divide their shard")
    dtype = dtypes.by_name(e["dtype"])
    if math.prod(grid.shard) * dtype.itemsize >= 1 << 62 or math.prod(grid.shape) * dtype.itemsize >= 1 << 62:
        raise ValueError("too large")
    compression = of_plain(e.get("compression"))
    if compression is not None and not grid.shape:
        raise ValueError("a 0-d array is not compressed")
    if mesh is not None and (type(mesh) is not int or not 0 <= mesh < n_meshes):
        raise ValueError(f"no mesh {mesh!r}")
    if sharding is not None and not (isinstance(sharding, list) and all(isinstance(t, str) for t in sharding)):
        raise ValueError("sharding is not a list of texts")
    if sharding is not None and mesh is None:
        raise ValueError("it has a sharding and no mesh")
    if type(nbytes) is not int:
        raise ValueError(f"nbytes is {str(nbytes)[:40]}")
    if type(packed) is not bool or (packed and (grid.shard != grid.chunk or compression or "dir" in e)):
        raise ValueError("what is packed is neither compressed nor cut into chunks, and has no directory")
    if type(dual) is not bool or (dual and (packed or compression or not is_dual_grid(grid))):
        raise ValueError("an array of layout 'dual' is runs of rows that are neither packed nor compressed")
    if type(delta) is not bool or (delta and (dual or compression is None or dtype.itemsize > MOST_DELTA)):
        raise ValueError("a delta is compressed, of items of at most 8 bytes, and not of layout 'dual'")
    if isinstance(compression, PackedZstd) and not (delta and dtype.itemsize == 2):
        raise ValueError(f"compression {compression.name!r} is for deltas of items of 2 bytes")
    return grid, dtype, math.prod(grid.counts), mesh, sharding, compression, packed, dual, delta


def _array(e: Any, number: int, source: str, n_meshes: int, packs: list[Pack], forms: dict[bytes, _Form]) -> ArrayEntry:
    """An entry, whose own members are taken out of ``e``; ``forms`` keeps the others, which were checked."""
    path: Any = None
    try:
        take = e.pop
        path, objects, sums = take("path"), take("objects"), take("sums", None)
        zarr = _crc(take("zarr")) if "zarr" in e else None
        directory = "" if e.get("packed") is True else take("dir")
        if not isinstance(path, list) or not _KEYS.issuperset(map(type, path)):
            raise ValueError("path is not a list of keys")
        text = marshal.dumps(e, 2)  # bytes, where True is not 1
        if (form := forms.get(text)) is None:
            form = forms[text] = _form(e, n_meshes)
        e.clear()  # now rather than with all others, when it has left the processor's cache
        grid, dtype, count, mesh, sharding, compression, packed, dual, delta = form
        if not isinstance(objects, list) or len(objects) != count:
            raise ValueError(f"{count} objects are needed")
        # Refused here, though the file is opened much later: a manifest with a hostile name must not open at all.
        if not packed and len(names.plain(directory, source)) > 1:
            raise ValueError(f"directory {directory!r} is not one name")
        section = _section(sums, grid)
    except CorruptCheckpoint:
        raise
    except KeyError as err:
        raise CorruptCheckpoint(f"{source}: arrays[{number}]: lacks {err.args[0]!r}") from None
    except (ValueError, TypeError, AttributeError, CheckpointError) as err:
        raise CorruptCheckpoint(f"{source}: arrays[{number}], of path {str(path)[:80]}: {err}") from None
    own = tuple(path), directory, grid, dtype, mesh, sharding, objects, source, compression
    return ArrayEntry(*own, section, zarr, packs if packed else None, dual, delta)


def loads(data: bytes, source: str) -> Manifest:
    """Check and decode a manifest; ``source`` names it in errors.

    Raises
    ------
    UnsupportedVersion
        It was written by a later version; names both.
    CorruptCheckpoint
        It is damaged, or not a manifest at all; says where.
    """
    with no_collections():
        return _loads(data, source)


def _loads(data: bytes, source: str) -> Manifest:
    body, said, fits = unsealed(data)
    with malformed(f"{source}: not a manifest"):
        top = strict_json.loads(body)
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise CorruptCheckpoint(f"{source}: not a manifest: it does not say format {FORMAT!r}")
    version = top.get("version")
    if (type(version) is int and 1 <= version <= VERSION) and not fits:
        raise CorruptCheckpoint(f"{source}: its crc32c does not fit: the manifest is damaged or was edited")
    out = _build(upgraded(top, MIGRATIONS, source, CorruptCheckpoint), source)
    out.crc32c = said
    return out


def _build(top: dict[str, Any], source: str, written: list[ArrayEntry] | None = None) -> Manifest:
    """The manifest of a document. ``written``: all of its arrays, where the document has one of each form."""
    step, metadata, meshes, arrays = (top.get(k) for k in ("step", "metadata", "meshes", "arrays"))
    if step is not None and type(step) is not int:
        raise CorruptCheckpoint(f"{source}: step {step!r} is not an integer")
    if (
        not isinstance(metadata, dict)
        or not isinstance(meshes, list)
        or not isinstance(arrays, list)
        or "tree" not in top
    ):
        raise CorruptCheckpoint(f"{source}: tree, metadata, meshes or arrays are missing or malformed")
    with malformed(f"{source}: malformed meshes"):
        described = [{k: n for k, n in m} for m in meshes]  # noqa: C416  # pairs, or an error
        if any(type(k) is not str or type(n) is not int or n < 1 for m in described for k, n in m.items()):
            raise ValueError("an axis is a name and a positive length")
    if not isinstance(top.get("packs", []), list) or type(top.get("nbytes", 0)) is not int:
        raise CorruptCheckpoint(f"{source}: packs are not a list, or nbytes is not a number")
    packs = [pack_of(row, source) for row in top.get("packs", [])]
    if len({p.file for p in packs}) != len(packs):
        raise CorruptCheckpoint(f"{source}: a pack is listed twice")
    forms: dict[bytes, _Form] = {}
    entries = [_array(e, i, source, len(meshes), packs, forms) for i, e in enumerate(arrays)]
    entries = entries if written is None else written
    names.check_distinct([e.path for e in entries], [e.name for e in entries])
    directories = [e.directory for e in entries if e.packs is None]
    if len(set(directories)) != len(directories):
        raise CorruptCheckpoint(f"{source}: two arrays share a directory")
    found: list[int] = []
    with malformed(f"{source}: tree"):
        structure = decoded(top["tree"], (), entries, found)
        if len(found) != len(entries):  # each at its own path, and so none twice
            raise ValueError(f"{len(entries) - len(found)} arrays have no place in it")
    with malformed(f"{source}: malformed documents or base"):
        documents = {n: (_crc(crc), str(file)) for n, (crc, file) in top.get("documents", {}).items()}
        sums, zarr = top.get("sums"), _crc(top["zarr"]) if "zarr" in top else None
        base = _base(top["base"]) if "base" in top else None
        beside = [sums, None if base is None else base.name]
        for file in [*(file for _, file in documents.values()), *(f for f in beside if f is not None)]:
            if len(names.plain(file, source)) > 1:
                raise ValueError(f"{file!r} is not one name")
    if sums is None and any(e.sums for e in entries):
        raise CorruptCheckpoint(f"{source}: arrays have checksums in a table that it does not name")
    if any(e.delta for e in entries) != (base is not None):
        raise CorruptCheckpoint(f"{source}: deltas and a base are only there together")
    with malformed(f"{source}: metadata"):
        held = step, decode_json(metadata), described, packs, documents, sums, zarr, base
    return Manifest(entries, top["tree"], *held, structure)


def read(root: str) -> Manifest | None:
    """The manifest in a directory, or None when there is none."""
    try:
        data = store.at(root).get(FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return loads(data, store.join(root, FILE))


def scalar_leaves(tree: Any, path: Path = (), none: bool = False) -> Iterator[tuple[Path, Any]]:
    """(path, value) of the leaves of a decoded tree that are not arrays; where asked, of None and of empty containers,
    too."""
    if isinstance(tree, (dict, list, tuple)) and (tree or not path or not none):
        for k, v in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if type(v) is not Leaf:
                yield from scalar_leaves(v, (*path, k), none)
    elif (none or tree is not None) and not isinstance(tree, Leaf):
        yield path, tree
