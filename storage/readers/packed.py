"""Arrays whose blocks lie in packs (see ``packs``): how they are read, and how packs are verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CorruptCheckpoint
from ..base import names
from ..base.checksums import crc32c
from ..format import dtypes, manifest
from ..format.stored_objects import StoredObject
from ..stores import store
from .reading import Job, RangeJob, opened
from .tensor import ChunkedTensor, buffer_of, view

_CHECKED = 8 << 20  # bytes of one read of `check`


@lru_cache(maxsize=1 << 10)
def _path(root: str, file: str) -> str:
    return store.join(root, file)  # a name that was looked at when the checkpoint was opened


@dataclass(slots=True, eq=False)
class PackedBlocks(ChunkedTensor):
    """An array whose blocks lie in packs. A block is read whole, with its neighbours in one request, and compared with
    the checksum of its place."""

    @property
    def how(self) -> str:
        return "blocks in safetensors files that it shares with other small arrays, each with its crc32c"

    @property
    def directory(self) -> str:
        return ""

    def path(self, coord: tuple[int, ...]) -> str:
        return _path(self.root, self.objects[coord].file)

    def planned(self, box: Box) -> int:
        return sum(self.objects[coord].nbytes for coord in self._shards(box))

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        for coord in self._shards(box):
            held = self.objects[coord]
            value, take, place = held.crc32c if self.verify else None, None, out
            if box.offset != held.box.offset or box.shape != held.box.shape:
                part = box.intersect(held.box)
                if part is None:
                    continue
                place = view(out, part.within(box))
                if part != held.box or not place.flags.c_contiguous:
                    take = partial(self._take, held, place, part.within(held.box))
            elif not out.flags.c_contiguous:
                take = partial(self._take, held, out, held.box.within(held.box))
            to = None if take is not None else buffer_of(place)
            span = held.start, held.nbytes, held.file_nbytes
            yield RangeJob(self, coord, _path(self.root, held.file), *span, value, to, take)

    def _take(self, held: StoredObject, out: np.ndarray, local: Box, data: np.ndarray) -> None:
        stored = data.view(dtypes.bits(self.dtype)).reshape(held.box.shape)
        out.view(dtypes.bits(self.dtype))[...] = view(stored, local)

    def refused(self, coord: tuple[int, ...], value: int) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.unfit(coord)}; restore the file or another checkpoint")

    def unfit(self, coord: tuple[int, ...]) -> str:
        held = self.objects[coord]
        end = held.start + held.nbytes
        return (
            f"{self.path(coord)}: block {coord} of key {self.name!r} (bytes {held.start} to {end}) does not fit its "
            "crc32c"
        )


def check(root: str, packs: Sequence[manifest.Pack], tensors: Sequence[PackedBlocks], faults: list[str]) -> list[Job]:
    """A call for each pack that compares all of its bytes, adds its faults to ``faults``, and returns its length."""
    blocks: dict[str, list[tuple[int, PackedBlocks, tuple[int, ...]]]] = {p.file: [] for p in packs}
    for number, t in enumerate(tensors):
        for coord, held in t.objects.items():
            blocks[held.file].append((held.start, number, coord))
    return [
        lambda p=p: _check_pack(root, p, [(tensors[n], c) for _, n, c in sorted(blocks[p.file])], faults) for p in packs
    ]


def _check_pack(
    root: str, pack: manifest.Pack, blocks: list[tuple[PackedBlocks, tuple[int, ...]]], faults: list[str]
) -> int:
    path = names.inside(root, pack.file, store.join(root, manifest.FILE))
    with opened(path, "packed arrays") as reader:
        if reader.nbytes != pack.nbytes:
            faults.append(f"{path} has {reader.nbytes} bytes, the manifest says {pack.nbytes}")
            return 0
        at, held = 0, np.empty(0, np.uint8)

        def following(nbytes: int) -> np.ndarray:
            nonlocal at, held
            if len(held) < nbytes:
                more = np.empty(min(max(nbytes, _CHECKED), len(held) + pack.nbytes - at) - len(held), np.uint8)
                if reader.readv([more], at) != more.size:
                    raise CorruptCheckpoint(f"{path} ends early; it changed while it was read")
                at, held = at + more.size, np.concatenate([held, more])
            out, held = held[:nbytes], held[nbytes:]
            return out

        position = pack.header
        if crc32c(following(pack.header)) != pack.crc32c:
            faults.append(f"{path}: its header does not fit its crc32c; the values may be whole")
        for t, coord in blocks:
            stored = t.objects[coord]
            if stored.start != position:
                break
            position += stored.nbytes
            if crc32c(following(stored.nbytes)) != stored.crc32c:
                faults.append(t.unfit(coord))
        if position != pack.nbytes:
            faults.append(f"{path}: the blocks that the manifest lists do not fill it, from byte {position} on")
    return pack.nbytes
