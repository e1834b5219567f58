"""Attributes and names of dimensions of other writers' Zarr arrays, which go along where they stay true."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...arrays.core.errors import CheckpointDTypeError
from ...arrays.core.formatting import some
from ..base import strict_json
from ..base.checksums import crc32c
from ..checkpoint.checkpoint import Checkpoint
from ..format.zarr_format import described, group_said, said_of
from ..readers.tensor import ChunkedTensor
from ..rules.labels import CURE, MEANING, PACKING, Labels, given, meant, plain
from ..rules.lazy_tensors import casts, labels_of, leaves
from ..stores import store


def held_attributes(
    ckpt: Checkpoint, arrays: Mapping[str, Any], notes: list[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """What other writers said that is true of arrays (see `array_metadata`), and the attributes of the group."""
    nodes, group, held = {}, ckpt.group, ckpt.manifest
    if held is not None:
        try:
            text = store.at(ckpt.path).get("zarr.json")
            if held.zarr not in (None, crc32c(text)):
                raise ValueError
            top = strict_json.loads(text)
            group = group_said(top)
            nodes = top["consolidated_metadata"]["metadata"]
            nodes = {a.directory: said_of(nodes[a.directory], a.name) for a in held.arrays if a.packs is None}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            nodes = {}
            notes.append("zarr.json is missing or damaged: attributes, if there were any, are not written")
    if unnamed := [n for n, said in ckpt.groups.items() if said]:
        notes.append(f"attributes of groups below the root are not written: those of {', '.join(unnamed[:8])}")
    if gone := [k for k in group if k not in (kept := that_travel(group))]:
        notes.append(f"attributes of the group are not written, as they are no JSON, or above 64 KiB: {some(gone)}")
        group = kept
    known = {ckpt.path: nodes} if held is not None else {}
    labels = {n: labels_of(t, partial(_stored, known=known)) for n, t in arrays.items()}
    notes += _apart(labels)
    found = {n: one.text(n, len(arrays[n].shape)) for n, one in labels.items()}
    return {n: text for n, text in found.items() if text}, group


def that_travel(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of another writer's group that JSON has, of 64 KiB together."""
    kept = {k: v for k, v in attributes.items() if described({k: v})}
    return kept if described(kept) else {}


def _stored(tensor: Any, known: dict[str, Any], keys: Sequence[str] = ()) -> Labels:
    """The labels of a stored tensor; ``known`` and ``keys`` as in `_nodes`."""
    if not isinstance(tensor, ChunkedTensor):
        return given(tensor)
    node = _nodes(tensor.root, known, keys).get(tensor.directory, "")
    return given(tensor, node if isinstance(node, str) else said_of(node, tensor.name))


def is_coordinate(name: str, tensor: Any, known: dict[str, Any]) -> bool:
    """Whether an array says where the elements of a dimension lie: it has that dimension alone, and its name (CF
    conventions, section 5; NUG). ``known`` keeps what the checkpoints of parts say of their arrays."""
    if len(tensor.shape) != 1:
        return False
    dims = labels_of(tensor, partial(_stored, known=known, keys=("dimension_names",))).dims
    return bool(dims) and dims[0] is not None and dims[0].name == re.split(r"[/.]", name)[-1]


def _apart(labels: dict[str, Labels]) -> list[str]:
    """Take the name from dimensions that were cut where others of that name in the group have other parts, as readers
    take those of one name for the same; returns a note on them."""
    parts: dict[tuple[str, str], set[Any]] = {}
    for n, one in labels.items():
        for d in filter(None, one.dims):
            parts.setdefault((n.rpartition("/")[0], d.name), set()).add(d.part)
    odd = []
    for n, one in labels.items():
        lone = {d for d in one.dims if d and isinstance(d.part, tuple) and len(parts[n.rpartition("/")[0], d.name]) > 1}
        if lone:
            odd.append(f"{n} ({', '.join(d.name for d in one.dims if d in lone)})")
            labels[n] = replace(one, dims=tuple(None if d in lone else d for d in one.dims))
    why = "names of dimensions are not written where arrays of the group have other parts of them"
    return [f"{why}: those of {some(odd)}"] if odd else []


def attributes_left(arrays: Mapping[str, Any], carried: Mapping[str, str]) -> list[str]:
    """Arrays of another writer's Zarr, with the names of attributes, such as a ``scale_factor``, that are not kept."""
    told = []
    for n, t in arrays.items():
        kept = json.loads(carried.get(n, "{}"))
        said = [given(leaf) for leaf in leaves(t) if not isinstance(leaf, ChunkedTensor)]
        names = dict.fromkeys(k for one in said for k in one.attributes if k not in kept.get("attributes", ()))
        if "dimension_names" not in kept and any(any(one.dims) for one in said):
            names["names of dimensions"] = None
        if names:
            told.append(f"{n} ({', '.join(names)})")
    return told


def refuse_lost_fills(arrays: Mapping[str, Any]) -> None:
    """Raise `CheckpointDTypeError` where a cast of some arrays would make numbers of masked elements."""
    known: dict[str, Any] = {}
    for tensor in filter(casts, arrays.values()):
        if meaning(tensor, known):
            labels_of(tensor, partial(_stored, known=known))


def refuse_packed(name: str, parts: Sequence[Any], places: Sequence[str], sums: bool, known: dict[str, Any]) -> None:
    """Raise where sums would be taken of stored numbers that stand for others, or equal ones stand for different ones.

    ``known`` keeps what the checkpoints of the parts say of their arrays.
    """
    said = [meaning(p, known) for p in parts]
    for s, place in zip(said, places, strict=True):
        for key in {**s, **said[0]}:
            ours, theirs = said[0].get(key), s.get(key)
            if sums and key in PACKING and meant(key, theirs) is not None:
                why = "sums of the stored numbers, which stand for others, mean nothing"
            elif meant(key, theirs) != meant(key, ours):
                why = f"{places[0]} has {plain(ours)!r:.40}, so equal numbers stand for other things"
            else:
                continue
            raise CheckpointDTypeError(
                f"{place}: key {name!r} has the attribute {key!r} = {plain(theirs)!r:.40}: {why}. {CURE}"
            )


def attributes_apart(a: Any, b: Any, known: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The attributes with which equal numbers of two tensors stand for other things, and both their values."""
    ours, theirs = meaning(a, known), meaning(b, known)
    pairs = {k: (ours.get(k), theirs.get(k)) for k in {**ours, **theirs}}
    return {k: (plain(x), plain(y)) for k, (x, y) in pairs.items() if meant(k, x) != meant(k, y)}


def meaning(tensor: Any, known: dict[str, Any]) -> dict[str, Any]:
    """The attributes of the stored sources of a tensor that change what its numbers mean (see `labels`)."""
    found: dict[str, Any] = {}
    for leaf in leaves(tensor):
        ours = isinstance(leaf, ChunkedTensor)
        node = _nodes(leaf.root, known, MEANING).get(leaf.directory, {}) if ours else {}
        held = node.get("attributes", {}) if ours else given(leaf).attributes
        found |= {k: held[k] for k in MEANING if k in held}
    return found


def _nodes(root: str, known: dict[str, Any], keys: Sequence[str] = ()) -> Any:
    """The metadata of the arrays of a checkpoint of ours, by directory; {} where none has one of the ``keys``."""
    if root not in known:
        known[root] = {}
        # Of a damaged file none are known, as for a conversion.
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            text = store.at(root).get("zarr.json")
            if not keys or any(f'"{k}"'.encode() in text for k in keys):
                known[root] = strict_json.loads(text)["consolidated_metadata"]["metadata"]
    return known[root]
