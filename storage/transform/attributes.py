"""Attributes and names of dimensions of other writers' Zarr arrays, which go along with elements that stay the same."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import struct
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ...arrays.core.errors import CheckpointDTypeError
from ..base import strict_json
from ..base.checksums import crc32c
from ..checkpoint.checkpoint import Checkpoint
from ..format.zarr_format import described, group_said, said_of
from ..readers.raw_tensor import RawTensor
from ..readers.tensor import ChunkedTensor
from ..rules.lazy_tensors import DerivedTensor, leaves, whole_of
from ..stores import store

_PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value")
"""Attributes by which readers of CF conventions, such as xarray, make other numbers of the stored ones."""
_UNITS = (*_PACKING, "_Unsigned", "units", "calendar")  # with which equal integers stand for other numbers
_NEUTRAL = {"scale_factor": 1, "add_offset": 0}


def held_attributes(
    ckpt: Checkpoint, arrays: Mapping[str, Any], notes: list[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """What other writers said of arrays that stay as stored (see `array_metadata`), and the attributes of the group."""
    nodes, group, held = {}, ckpt.group, ckpt.manifest
    if held is not None:
        try:
            text = store.at(ckpt.path).get("zarr.json")
            if held.zarr not in (None, crc32c(text)):
                raise ValueError
            top = strict_json.loads(text)
            group = group_said(top)
            nodes = top["consolidated_metadata"]["metadata"]
            nodes = {a.name: said_of(nodes[a.directory], a.name) for a in held.arrays if a.packs is None}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            notes.append("zarr.json is missing or damaged: attributes, if there were any, are not written")
    if ckpt.unnamed:
        notes.append(f"attributes of groups below the root are not written: those of {', '.join(ckpt.unnamed[:8])}")
    if group and not described(group):
        notes.append("attributes of the group are not written as such: they are no JSON, or above 64 KiB")
        group = {}
    same = {n: whole_of(t) for n, t in arrays.items()}
    found = {
        n: nodes.get(t.name, "") if held is not None else getattr(t, "said", "")
        for n, t in same.items()
        if not isinstance(t, DerivedTensor)
    }
    return {n: text for n, text in found.items() if text}, group


def attributes_left(arrays: Mapping[str, Any], carried: Container[str] = ()) -> list[str]:
    """A note on the attributes of another writer's Zarr arrays, such as a ``scale_factor``, that are not written."""
    told: dict[str, dict[str, None]] = {}
    for n, t in arrays.items():
        for leaf in leaves(t) if n not in carried else ():
            said = json.loads(getattr(leaf, "said", "") or "{}") if isinstance(leaf, RawTensor) else {}
            names = list(getattr(leaf, "attributes", said.get("attributes", ())))
            names += ["names of dimensions"] * bool(getattr(leaf, "dims", said.get("dimension_names")))
            if names:
                told.setdefault(n, {}).update(dict.fromkeys(names))
    shown = [f"{n} ({', '.join(names)})" for n, names in itertools.islice(told.items(), 8)]
    more = f" and those of {len(told) - 8} more arrays" if len(told) > 8 else ""
    return [f"attributes are not written: those of {', '.join(shown)}{more}"] if told else []


def refuse_packed(name: str, parts: Sequence[Any], places: Sequence[str], sums: bool, known: dict[str, Any]) -> None:
    """Raise where sums would be taken of stored numbers that stand for others, or equal ones stand for different ones.

    ``known`` keeps what the checkpoints of the parts say of their arrays.
    """
    said = [_packing(p, _PACKING if sums else _UNITS, known) for p in parts]
    for s, place in zip(said, places, strict=True):
        for key in {**s, **said[0]}:
            ours, theirs = said[0].get(key), s.get(key)
            if sums and theirs is not None:
                why = "sums of the stored numbers, which stand for others, mean nothing"
            elif not sums and theirs != ours:
                why = f"{places[0]} has {ours!r:.40}, so equal integers stand for other numbers"
            else:
                continue
            raise CheckpointDTypeError(
                f"{place}: key {name!r} has the attribute {key!r} = {theirs!r:.40}: {why}. Write its real numbers "
                "first: xarray.open_zarr(…).drop_encoding().to_zarr(…)"
            )


def _packing(tensor: Any, names: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
    """Those of some attributes of the stored sources of a tensor that change what its numbers mean."""
    found: dict[str, Any] = {}
    for leaf in leaves(tensor):
        if isinstance(leaf, ChunkedTensor):
            held = _of_group(leaf.root, known).get(leaf.directory, {})
        else:
            held = json.loads(getattr(leaf, "said", "") or "{}").get("attributes", {})
            held = getattr(leaf, "attributes", held)
        for k in (n for n in names if n in held):
            value = held[k]
            if isinstance(value, str):  # xarray writes fill values of floats in base64
                with contextlib.suppress(ValueError, struct.error):
                    value = struct.unpack("<d", base64.b64decode(value))[0]
            if value == value and value not in (_NEUTRAL.get(k), "NaN"):  # sums keep NaN
                found[k] = value
    return found


def _of_group(root: str, known: dict[str, Any]) -> Any:
    """The attributes that others have given to the arrays of a checkpoint of ours, by directory."""
    if root not in known:
        known[root] = {}
        # Of a damaged file none are known, as for a conversion.
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            text = store.at(root).get("zarr.json")
            if any(f'"{k}"'.encode() in text for k in _UNITS):
                nodes = strict_json.loads(text)["consolidated_metadata"]["metadata"]
                known[root] = {d: dict(node.get("attributes", {})) for d, node in nodes.items()}
    return known[root]
