"""Attributes and names of dimensions of other writers' Zarr arrays, which go along with elements that stay the same."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from typing import Any

from ..base import strict_json
from ..base.checksums import crc32c
from ..checkpoint.checkpoint import Checkpoint
from ..format.zarr_format import said_of
from ..rules.lazy_tensors import DerivedTensor, leaves, whole_of
from ..stores import store


def held_attributes(ckpt: Checkpoint, arrays: Mapping[str, Any], notes: list[str]) -> dict[str, str]:
    """What other writers said of the arrays that are written as they are stored, by name, as `array_metadata` takes
    it."""
    nodes, held = {}, ckpt.manifest
    if held is not None:
        try:
            text = store.at(ckpt.path).get("zarr.json")
            if held.zarr not in (None, crc32c(text)):
                raise ValueError
            nodes = strict_json.loads(text)["consolidated_metadata"]["metadata"]
            nodes = {a.name: said_of(nodes[a.directory], a.name) for a in held.arrays if a.packs is None}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            notes.append("zarr.json is missing or damaged: attributes, if there were any, are not written")
    same = {n: whole_of(t) for n, t in arrays.items()}
    return {n: getattr(t, "said", nodes.get(t.name, "")) for n, t in same.items() if not isinstance(t, DerivedTensor)}


def attributes_left(arrays: Mapping[str, Any], carried: Container[str] = ()) -> list[str]:
    """A note on the attributes of another writer's Zarr arrays, such as a ``scale_factor``, that are not written."""
    told: dict[str, dict[str, None]] = {}
    for n, t in arrays.items():
        for leaf in leaves(t) if n not in carried else ():
            if names := getattr(leaf, "attributes", ()):
                told.setdefault(n, {}).update(dict.fromkeys(names))
    shown = [f"{n} ({', '.join(names)})" for n, names in itertools.islice(told.items(), 8)]
    more = f" and those of {len(told) - 8} more arrays" if len(told) > 8 else ""
    return [f"attributes are not written: those of {', '.join(shown)}{more}"] if told else []
