"""A checkpoint that is open: a lazy mapping from names to arrays that are read when they are indexed."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import (
    ArrayIndexError,
    CheckpointDTypeError,
    CheckpointError,
    CheckpointKeyError,
    IncompleteCheckpoint,
)
from ...arrays.core.formatting import DRAWINGS, count, human_bytes, some
from ...arrays.core.tree import Path
from ..base.names import leaf_name, matching
from ..base.page import Page
from ..format import manifest
from ..format.compression import Codec, compression_of
from ..format.documents import Documents
from ..readers.tensor import StoredTensor, read_box, read_picks
from ..readers.zarr_tensor import ZarrTensor
from ..stores import icechunk_store, store
from ..stores.generations import NONE, Generation, JointGeneration, Listed

FILES = ("safetensors", "Hugging Face", "NumPy", "PyTorch")  # kinds whose opening reads a part of every file


class StoredArray:
    """An array in a checkpoint. Indexing it with integers, slices and ``...`` reads what that index needs."""

    __slots__ = ("mesh", "name", "path", "placements", "rule", "sharding_text", "tensor")

    def __init__(
        self,
        path: Path,
        tensor: StoredTensor,
        sharding_text: str | None = None,
        mesh: dict[str, int] | None = None,
        placements: tuple[str, ...] | None = None,
        name: str | None = None,
    ) -> None:
        self.path, self.name = path, leaf_name(path) if name is None else name
        self.tensor = tensor
        self.sharding_text = sharding_text
        self.rule: str | None = None  # that made it
        self.mesh, self.placements = mesh, placements  # as it was saved: axes, and one text for each

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        tensor = self.tensor
        return math.prod(tensor.shape) * tensor.dtype.itemsize

    @property
    def attributes(self) -> dict[str, Any]:
        """What another writer has said of the array, such as its units; empty for arrays of `save`."""
        return dict(getattr(self.tensor, "attributes", None) or self._said().get("attributes", {}))

    @property
    def dimension_names(self) -> list[str | None] | None:
        """Names of dimensions that another writer has given."""
        return getattr(self.tensor, "dims", None) or self._said().get("dimension_names")

    def _said(self) -> dict[str, Any]:
        return json.loads(getattr(self.tensor, "said", "") or "{}")

    @property
    def filled(self) -> str:
        """A note where reads have met chunks of another writer's Zarr array that are not there; else empty."""
        absent = sorted(getattr(self.tensor, "absent", ()))
        return f"chunks that are not there are shown as the fill value: {', '.join(absent)}" if absent else ""

    def check(self) -> None:
        """Check the list of this array's files, and that they exist, without reading them."""
        check = getattr(self.tensor, "check", None)
        if check is None:
            return
        try:
            check()
        except IncompleteCheckpoint as e:
            if self.mesh is None:
                raise
            axes = ", ".join(f"{name}={n}" for name, n in self.mesh.items())
            raise IncompleteCheckpoint(
                f"{e}. It was saved by {count(math.prod(self.mesh.values()), 'rank')} ({axes})"
            ) from None

    def read(self, box: Box | None = None) -> np.ndarray:
        """The elements of a box, or all, as a new NumPy array."""
        return read_box(self.tensor, box)[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        picks, rest = _plan_index(index, self.shape)
        return read_picks(self.tensor, picks)[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a stored array must be read, so it cannot become an array without a copy")
        out = self.read()
        return out if dtype is None else out.astype(dtype, copy=False)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def _repr_html_(self) -> str:
        return DRAWINGS["stored array"](self)

    def __repr__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"<StoredArray {self.name!r} {text}{f' {self.sharding_text}' if self.sharding_text else ''}>"


def _is_integer(i: Any) -> bool:
    if isinstance(i, (bool, np.bool_)) or getattr(i, "dtype", None) == np.bool_:
        return False
    try:
        operator.index(i)  # arrays have the method, and refuse
    except TypeError:
        return False
    return True


def _plan_index(index: Any, shape: tuple[int, ...]) -> tuple[tuple[range, ...], tuple[Any, ...]]:
    """The positions that an index reads along each dimension, ascending, and the index to apply to what was read."""
    items = list(index) if isinstance(index, tuple) else [index]
    if sum(i is Ellipsis for i in items) > 1:
        raise ArrayIndexError("an index has at most one '...'")
    for i in items:
        if i is not Ellipsis and not isinstance(i, slice) and not _is_integer(i):
            raise ArrayIndexError(
                f"a stored array takes integers, slices and '...', got {type(i).__name__}; read it with np.asarray "
                "first"
            )
    given = sum(i is not Ellipsis for i in items)
    if given > len(shape):
        raise ArrayIndexError(f"too many indices: array of shape {shape} was indexed with {given}")
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (len(shape) - given)
    picks, rest = [], []
    for axis, (i, n) in enumerate(zip(items, shape, strict=True)):
        if isinstance(i, slice):
            picked = range(*i.indices(n))
            picks.append(picked if picked.step > 0 else picked[::-1])
            rest.append(slice(None, None, 1 if picked.step > 0 else -1))
        else:
            k = i.__index__()
            if not -n <= k < n:
                raise ArrayIndexError(f"index {k} is out of range for dimension {axis} of length {n}")
            picks.append(range(k % n, k % n + 1))
            rest.append(0)
    return tuple(picks), tuple(rest)


@dataclass(frozen=True)
class Computed:
    """The origin of a virtual checkpoint: its expression, and the checkpoints that it reads, by their place in that."""

    expression: Any
    parents: Mapping[Any, Checkpoint]
    reads: int  # of stored elements, for one of its own
    depth: int  # of its expression, and those of its parents
    identity: str = ""  # of the document that it was opened from


@dataclass(repr=False)
class Checkpoint(Mapping[str, StoredArray]):
    """An opened checkpoint: names to `StoredArray`, in the order of the tree. Only the table of contents was read."""

    path: str
    kind: str
    arrays: dict[str, StoredArray]
    structure: Any
    step: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    meshes: list[dict[str, int]] = field(default_factory=list)
    mapping: list[tuple[str, int]] = field(default_factory=list)  # rules that made it, and how often each was applied
    group: dict[str, Any] = field(default_factory=dict)  # attributes of the root group of another writer's Zarr
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)  # those below it, with their attributes
    documents: Mapping[str, Any] = field(default_factory=dict)  # files beside the arrays: config, generation_config, …
    generation: Generation = NONE  # that was opened
    manifest: manifest.Manifest | None = None  # of a checkpoint of ours
    skipped: dict[str, str] = field(default_factory=dict)  # what its files hold and no reader here can give, and why
    computed: Computed | None = None  # of a virtual one
    base: Checkpoint | None = None  # from which arrays of it are deltas
    whole: bool = True  # false for a part of a checkpoint, and for what rules made of one

    def belongs_to(self, generation: Generation) -> None:
        """Tie the checkpoint, and all later reads, to a generation of its place."""
        if self.computed is not None:  # its arrays are bound already, each to its parent
            self.generation = JointGeneration.of_all([self.generation, generation])
            return
        self.generation = generation
        if self.base is not None:
            self.base.belongs_to(generation)
        if isinstance(self.documents, Documents):
            self.documents.generation = generation
        for a in self.arrays.values():
            a.tensor = a.tensor.bound(generation)

    def __getitem__(self, name: str) -> StoredArray:
        found = self.arrays.get(name)
        if found is None:
            self.refuse_skipped([str(name)])
            close = get_close_matches(str(name), self.arrays, 3, 0.4)
            hint = f"close are {', '.join(map(repr, close))}" if close else f"it holds {some(self.arrays, 3) or 'none'}"
            raise CheckpointKeyError(f"{self.path} has no array {name!r}; {hint}")
        return found

    def refuse_skipped(self, wanted: Iterable[str]) -> None:
        """Raise `CheckpointDTypeError` where one of these names or patterns matches an array that cannot be read."""
        for found in (n for name in wanted for n in matching(name, self.skipped)):
            raise CheckpointDTypeError(f"{self.path}: key {found!r} cannot be read: {self.skipped[found]}")

    @property
    def places(self) -> set[str]:
        """Its own place, and those of all checkpoints from which it is computed."""
        found, left = dict[int, Checkpoint](), [self]
        while left:  # each once: several may be computed from one
            c = left.pop()
            found[id(c)] = c
            from_these = [*(() if c.computed is None else c.computed.parents.values()), *filter(None, [c.base])]
            left += [p for p in from_these if id(p) not in found]
        return {c.path for c in found.values()}

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    @property
    def compression(self) -> Codec | None:
        """How the chunks are compressed; 0-d arrays never are."""
        return next((c for a in self.arrays.values() if (c := compression_of(a.tensor)) is not None), None)

    @property
    def leaves(self) -> dict[str, Any]:
        """The leaves of the tree that are not arrays, None among them, by name."""
        found = ((leaf_name(p), v) for p, v in manifest.scalar_leaves(self.structure, none=True))
        return {n: v for n, v in found if n not in self.skipped}  # None is what a list has in place of these

    def tree(self) -> Any:
        """The tree as it was saved, with a `StoredArray` for each array."""
        stored = list(self.arrays.values())
        return fill(self.structure, lambda leaf: stored[leaf.index])

    def below(self, prefix: str) -> Checkpoint:
        """The part of the checkpoint below a name, or below a group of nested Zarr, with names from there on; or the
        one leaf of that name.

        Raises `CheckpointKeyError` where nothing lies there, and where a leaf has the name that others begin with.
        """
        if not isinstance(prefix, str):
            raise CheckpointError(f"prefix is the name of a part of the checkpoint, got {prefix!r:.80}")
        starts = f"{prefix.removesuffix('.')}.", f"{prefix.removesuffix('/')}/"
        every = *self.arrays, *self.leaves
        groups = [s for s in dict.fromkeys(starts) if any(name.startswith(s) for name in every)]
        if len(groups) > 1 and prefix not in groups:
            raise CheckpointKeyError(f"{self.path}: prefix={prefix!r} is {groups[0]!r} or {groups[1]!r}: give one")
        start = prefix if prefix in groups else next(iter(groups), starts[0])
        alone = prefix in every
        if alone and (more := [n for n in every if n.startswith(start)]):
            raise CheckpointKeyError(
                f"{self.path}: {prefix!r} is a leaf, and other names begin with it ({some(more, 3)}): take the leaf by "
                f"keys={prefix!r}, the others by prefix={start!r}"
            )
        kept: dict[str, StoredArray] = {}
        for name, a in self.arrays.items():
            if name.startswith(start) or (alone and name == prefix):
                path = () if alone else _cut(a.path, start)
                kept[name] = StoredArray(path, a.tensor, a.sharding_text, a.mesh, a.placements)
        order = {i: n for n, i in enumerate(i for i, name in enumerate(self.arrays) if name in kept)}
        structure, found = _below(self.structure, start, order, alone)
        if not found:
            self.refuse_skipped([prefix, f"{prefix}.*"])
            raise CheckpointKeyError(
                f"{self.path}: nothing lies below {prefix!r}; the first names are {', '.join(list(self.arrays)[:8])}"
            )
        arrays = {a.name: a for a in kept.values()}
        skipped = {n.removeprefix(start): why for n, why in self.skipped.items() if n.startswith(start)}
        return replace(self, arrays=arrays, structure=structure, skipped=skipped, whole=False)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (name, str(a.dtype), str(a.shape), human_bytes(a.nbytes), a.sharding_text or "")
            for name, a in self.arrays.items()
        ]

    def _title(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        of = "" if self.computed is None or not self.computed.identity else f" = {self.computed.expression}"
        return (
            f"{self.kind} checkpoint {self.path}{of}{step}: {count(len(self), 'array')}, "
            f"{human_bytes(self.nbytes)}{unread(self.skipped)}"
        )

    def __repr__(self) -> str:
        rows = self._rows()
        shown = rows if len(rows) <= 24 else [*rows[:12], ("…", f"({len(rows) - 20} more)", "", "", ""), *rows[-8:]]
        widths = [max((len(r[i]) for r in shown), default=0) for i in range(5)]
        lines = ["  " + "  ".join(t.ljust(w) for t, w in zip(r, widths, strict=True)).rstrip() for r in shown]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        return DRAWINGS["checkpoint"](self)

    def browse(self) -> Page:
        """Serve this checkpoint to a web browser from this process, on loopback: tree, values, distributions, chunks,
        health.

        Returns
        -------
        Page
            Shows itself as a link; ``page.url`` is its address. The server ends with the process, or with
            ``storage.browse.close()``.
        """
        if self.computed is not None and not self.computed.identity:
            raise CheckpointError(
                f"{self.path} has no place of its own; virtual.write gives it one, which a page shows"
            )
        return DRAWINGS["page"](self.path)


def generation_of(ckpt: Checkpoint, target: str = "") -> Generation:
    """The generation of all that a checkpoint may read: of a directory by others, all that lies in it, apart from a
    ``target`` that is written below it."""
    inner = target.removeprefix(store.join(ckpt.path, "")) if target else ""
    apart = (f"{inner}/", f"{inner}.") if inner not in ("", target) else ()
    if isinstance(held := ckpt.generation, Listed):
        return held if held.apart == apart else replace(held, apart=apart)
    virtual = bool(held.tags) and icechunk_store.is_versioned(ckpt.path)  # a snapshot itself stays
    if ckpt.manifest is not None or ckpt.computed is not None or ckpt.kind in FILES or virtual:
        return held
    tensors = [a.tensor for a in ckpt.arrays.values()]
    known = (f for t in tensors if isinstance(t, ZarrTensor) for f in t.every_file())
    listed = Listed.now(ckpt.path, apart=apart, known=known)
    return held if listed is NONE else listed


def flat(
    path: str,
    kind: str,
    tensors: Mapping[str, StoredTensor],
    metadata: dict[str, Any] | None = None,
    skipped: dict[str, str] | None = None,
    group: dict[str, Any] | None = None,
) -> Checkpoint:
    """A checkpoint that is one dict of arrays."""
    arrays = {name: StoredArray((name,), t, name=name) for name, t in tensors.items()}
    structure = {name: manifest.Leaf(i) for i, name in enumerate(arrays)}
    return Checkpoint(path, kind, arrays, structure, None, metadata or {}, skipped=skipped or {}, group=group or {})


def unread(skipped: Mapping[str, str]) -> str:
    """Arrays that cannot be read, and why, as the end of a sentence.

    >>> unread({}), unread({"a": "dates", "b": "texts"})
    ('', '; not readable here (2): a (dates), b (texts)')
    """
    told = [f"{n} ({why})" for n, why in skipped.items()]
    return f"; not readable here ({len(told)}): {some(told, 4)}" if told else ""


def _cut(path: Path, start: str) -> Path:
    """A path without its beginning, which may end inside one of its keys."""
    for i, key in enumerate(path):
        text = f"{key}."
        if start == text:
            return path[i + 1 :]
        if start.startswith(text):
            start = start[len(text) :]
        else:
            return (str(key)[len(start) :], *path[i + 1 :])
    return ()


def _below(node: Any, start: str, order: dict[int, int], alone: bool) -> tuple[Any, bool]:
    """The part of a tree below a name, its leaves numbered by ``order``; and whether there is any. ``alone``: the leaf
    of that name."""
    if not start:
        return fill(node, lambda leaf: manifest.Leaf(order[leaf.index])), True
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    out: dict[Any, Any] = {}
    for key, value in pairs:
        text = f"{key}."
        if start == text and not alone and not isinstance(value, (dict, list, tuple)):
            continue
        if start.startswith(text):
            part, found = _below(value, start[len(text) :], order, alone)
            if found and not isinstance(part, dict):
                return part, True
            out.update(part if found else {})
        elif text.startswith(start):
            out[str(key)[len(start) :]] = fill(value, lambda leaf: manifest.Leaf(order[leaf.index]))
    return out, bool(out)


def fill(node: Any, make: Callable[[manifest.Leaf], Any]) -> Any:
    """A decoded tree with each `Leaf` replaced by ``make(leaf)``."""
    if isinstance(node, manifest.Leaf):
        return make(node)
    if isinstance(node, dict):
        return {k: make(v) if type(v) is manifest.Leaf else fill(v, make) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(fill(v, make) for v in node)
    return node
