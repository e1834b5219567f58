"""Checkpoints of ``torch.distributed.checkpoint`` in its other layout: safetensors files with blocks of tensors.

Files are named ``shard-00001-model-00001-of-00002.safetensors``; the metadata of each says under ``DCP_SHARDING_INFO``
where its blocks lie in their tensors. There is no index: all files of the directory count, and a tensor is as large as
its blocks reach. A lost file at the end of a tensor can therefore not be told from a smaller tensor; a hole, an
overlap, and a number missing between the first shard and the last are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CorruptCheckpoint, IncompleteCheckpoint
from ..base import strict_json
from ..base.malformed import malformed
from ..checkpoint.checkpoint import Checkpoint, flat
from ..format.chunk_grid import tiled
from ..readers import safetensors
from ..readers.raw_tensor import RawTensor
from ..readers.reading import Job
from ..readers.safetensors import DCP_INFO as INFO
from ..readers.tensor import rows_of
from ..stores import store
from ..stores.generations import Generation

_NUMBERED = re.compile(r"\Ashard-(\d{1,9})-model-\d+-of-\d+\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class TiledTensor:
    """A tensor made of others that lie side by side in it, each at its box."""

    how: ClassVar[str] = "blocks in safetensors files"
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[Box, RawTensor], ...]

    @property
    def summed(self) -> bool:
        return all(t.summed for _, t in self.parts)

    @property
    def files(self) -> set[str]:
        return {t.path for _, t in self.parts}

    def verify(self) -> int:
        return sum(t.verify() for _, t in self.parts)

    @property
    def readers(self) -> int:
        return max((t.readers for _, t in self.parts), default=1)

    @property
    def chunk(self) -> tuple[int, ...]:
        return rows_of(self.shape)

    def _meeting(self, box: Box) -> Iterator[tuple[Box, RawTensor, Box]]:
        for place, tensor in self.parts:
            common = box.intersect(place)
            if common is not None and common.size:
                yield place, tensor, common

    def only(self, box: Box) -> TiledTensor:
        return replace(self, parts=tuple((place, tensor) for place, tensor, _ in self._meeting(box)))

    def bound(self, generation: Generation) -> TiledTensor:
        return replace(self, parts=tuple((place, tensor.bound(generation)) for place, tensor in self.parts))

    def planned(self, box: Box) -> int:
        return sum(tensor.planned(common.within(place)) for place, tensor, common in self._meeting(box))

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        for place, tensor, common in self._meeting(box):
            yield from tensor.jobs(common.within(place), out[(*common.within(box).slices, ...)])


def _offsets(where: str, header: safetensors.Header) -> dict[str, tuple[int, ...]]:
    """Where the blocks of a file lie, checked."""
    with malformed(f"{where}: {INFO} does not say where every block lies"):
        said = strict_json.loads(header.metadata[INFO])
        out = {name: tuple(said[name]["saved_offsets"]) for name in header.tensors}
    for name, offset in out.items():
        if len(offset) != len(header.tensors[name].shape) or not all(
            type(n) is int and 0 <= n < 1 << 48 for n in offset
        ):
            raise CorruptCheckpoint(f"{where}: {name!r} lies at {offset}, its shape is {header.tensors[name].shape}")
    return out


def _check_numbers(root: str, files: list[str]) -> None:
    held = {int(m[1]) for f in files if (m := _NUMBERED.match(f))}
    lost = sorted(set(range(min(held), max(held) + 1)) - held)[:8] if held and max(held) - min(held) < 1 << 20 else []
    if lost:
        raise IncompleteCheckpoint(f"{root}: the files of shards {', '.join(map(str, lost))} are missing")


def open_shards(root: str, listed: Sequence[str], verify: bool = True) -> Checkpoint | None:
    """Open such a checkpoint; None where the safetensors files among those ``listed`` in a directory say nothing about
    blocks."""
    files = [f for f in listed if f.endswith(".safetensors")]
    try:
        if not files or INFO not in safetensors.read_header(store.join(root, files[0])).metadata:
            return None
    except CorruptCheckpoint:  # a file of whatever kind
        return None
    headers = {f: safetensors.read_header(store.join(root, f), verify=verify) for f in files}
    _check_numbers(root, files)
    held: dict[str, dict[Box, RawTensor]] = {}
    for file, header in headers.items():
        where = store.join(root, file)
        offsets = _offsets(where, header)
        for name, t in header.tensors.items():
            raw = header.tensor(where, name)
            held.setdefault(name, {}).setdefault(Box(offsets[name], t.shape), raw)  # replicas are equal: the first
    return flat(root, "PyTorch DCP", {name: _joined(root, name, parts) for name, parts in sorted(held.items())})


def _joined(root: str, name: str, parts: dict[Box, RawTensor]) -> TiledTensor:
    ranks, types = {len(b.shape) for b in parts}, {t.dtype for t in parts.values()}
    if len(ranks) != 1 or len(types) != 1:
        raise CorruptCheckpoint(f"{root}: the blocks of {name!r} differ in {'rank' if len(types) == 1 else 'dtype'}")
    shape = tuple(max(b.stop[d] for b in parts) for d in range(ranks.pop()))
    if not tiled(shape, list(parts)):
        raise IncompleteCheckpoint(
            f"{root}: the blocks of {name!r} do not cover its shape {shape} once; a file is missing, or of another save"
        )
    return TiledTensor(name, shape, types.pop(), tuple(sorted(parts.items(), key=lambda p: p[0])))
