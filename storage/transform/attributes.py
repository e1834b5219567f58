"""Attributes and names of dimensions of other writers' Zarr arrays, which go along with elements that stay the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Mapping
from typing import Any

from ..base import strict_json
from ..base.checksums import crc32c
from ..checkpoint.checkpoint import Checkpoint
from ..format.zarr_format import described, group_said, said_of
from ..readers.raw_tensor import RawTensor
from ..rules.lazy_tensors import DerivedTensor, leaves, whole_of
from ..stores import store


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
