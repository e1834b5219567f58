"""The index of a Hugging Face directory: which file holds each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ..base import names, strict_json
from ..base.malformed import malformed
from ..stores import store as stores
from . import tensor_sums

HF_INDEX = "model.safetensors.index.json"
HF_SINGLE = "model.safetensors"
HF_TORCH = "pytorch_model.bin"


def index_text(about: Mapping[str, Any], weight_map: Mapping[str, str], sums: Mapping[str, str]) -> bytes:
    """The index of a directory: its metadata, the file of each tensor, and checksums by file, with its own."""
    about = {**about, tensor_sums.KEY: {tensor_sums.INDEX: tensor_sums.text([0]), **sums}}
    # Python writes indented JSON slowly, so the long map is joined line by line.
    before, _, _ = json.dumps({"metadata": about, "weight_map": {}}, indent=2, sort_keys=True).rpartition("{")
    lines = ",".join(f"\n    {quoted(n)}: {quoted(weight_map[n])}" for n in sorted(weight_map))
    text = before + "{" + lines + ("\n  " if lines else "") + "}\n}\n"
    return tensor_sums.sealed(text.encode(), key=tensor_sums.INDEX)


def read_index(
    root: str, index: str = HF_INDEX, verify: bool = True
) -> tuple[dict[str, str], dict[str, Any], Mapping[str, str]]:
    """The checked ``weight_map`` and ``metadata`` of a Hugging Face directory, and checksums by file; every file lies
    inside it."""
    path = names.inside(root, index, root)
    data = stores.at(root).get(index)
    with malformed(f"{path}: not an index"):
        top = strict_json.loads(data, unique=True)
        weight_map = top.get("weight_map") if isinstance(top, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ValueError("it has no weight_map from names to files")
        "".join((*weight_map, *weight_map.values())).encode()  # half of a surrogate pair is no name
        metadata = top.get("metadata") or {}
        metadata = metadata if isinstance(metadata, dict) else {}
        sums = tensor_sums.of_index(data, metadata) if verify else {}
        metadata.pop(tensor_sums.KEY, None)
        if any(isinstance(v, dict) and tensor_sums.KEY in v for v in top.values()):
            raise ValueError("checksums stand in an entry that is not 'metadata'")
    for file in set(weight_map.values()):
        names.inside(root, file, path)
    return weight_map, metadata, sums
