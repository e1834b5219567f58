"""The identity of a checkpoint that another is computed from: a short text that changes where its content does.

=====================  =========================================================================================
of                     identity
=====================  =========================================================================================
meshtape               the crc32c of its manifest, which binds every chunk
virtual                the crc32c of its document, which pins its own parents
safetensors with sums  a digest of names, shapes, dtypes and checksums of all tensors
all others             a digest of the table of contents and the files' tags: lengths, times, inodes, births, or ETags
=====================  =========================================================================================
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ..checkpoint.checkpoint import FILES, Checkpoint, generation_of
from ..readers.raw_tensor import RawTensor
from ..stores import store
from ..stores.generations import Generation


def pinned(ckpt: Checkpoint) -> Generation:
    """The generation of all that a checkpoint may read; reads of another writer's Zarr hierarchy, where any file may
    change by itself, are tied to it from now on."""
    generation = generation_of(ckpt)
    if ckpt.kind == "Zarr":
        ckpt.belongs_to(generation)
    return generation


def identity_of(ckpt: Checkpoint) -> str:
    """The identity of an open checkpoint, which all later reads of it are tied to; empty for a virtual one without a
    document."""
    if ckpt.computed is not None:
        return ckpt.computed.identity
    if ckpt.manifest is not None:
        return ckpt.manifest.identity
    tensors: dict[str, Any] = {n: a.tensor for n, a in ckpt.arrays.items()}
    rows = [[n, list(map(int, t.shape)), t.dtype.name] for n, t in tensors.items()]
    if tensors and all(isinstance(t, RawTensor) and t.summed for t in tensors.values()):
        return f"sums:{_digest([[*row, t.crc32c] for row, t in zip(rows, tensors.values(), strict=True)])}"
    generation = pinned(ckpt)
    root = store.split(ckpt.path)[0] if ckpt.kind in FILES else ckpt.path
    tags = sorted((file.removeprefix(root).lstrip("/"), tag) for file, tag in generation.tags.items())
    return f"files:{_digest([rows, tags])}"


def _digest(held: Any) -> str:
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:32]
