"""Arrays whose shard files are safetensors files, too (see ``zarr_format``): how they are read and verified, and their
form for Hugging Face."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...arrays.core.errors import CorruptCheckpoint
from ..base.checksums import crc32c
from ..base.scratch import scratch
from ..format import dtypes, tensor_sums
from ..format.chunk_grid import Coord
from ..format.chunk_sums import StoredSums
from ..format.hf_index import HF_INDEX, index_text
from ..format.manifest import ArrayEntry, Manifest, read
from ..format.zarr_format import DUAL_INDEX, dual_shard
from ..stores import store
from ..stores.contract import Store
from .raw_tensor import RawTensor
from .reading import opened
from .safetensors import build_header, read_header
from .tensor import ChunkedTensor


@dataclass(slots=True, eq=False)
class DualTensor(ChunkedTensor):
    """An array of layout "dual". A chunk is compared with its checksum in the manifest: none lies beside it."""

    beside: ClassVar[int] = 0
    summed: ClassVar[bool] = True

    @property
    def files(self) -> set[str]:
        return {store.join(self.root, self.directory, "zarr.json"), *map(self.path, self.objects)}

    def verify_chunk(self, coord: Coord) -> int:
        """Compare every byte of a file; returns their number."""
        if faults := list(self.faults(coord)):
            raise CorruptCheckpoint("; ".join(faults))
        return self.objects[coord].nbytes

    @property
    def how(self) -> str:
        return "a Zarr v3 array whose shards are safetensors files"

    def refused(self, coord: Coord, value: int) -> CorruptCheckpoint:
        return self.damaged(self.path(coord), 0, coord, value, ~value)

    def extent(self, number: int) -> str:
        return ""

    def stored_shape(self, coord: Coord, index: Coord) -> tuple[int, ...]:
        # The last chunk may reach beyond the rows; what is stored of it does not.
        box = self.objects[coord].box
        return tuple(min(c, n - i * c) for c, n, i in zip(self.grid.chunk, box.shape, index, strict=True))

    def faults(self, coord: Coord) -> Iterator[str]:
        """Every byte of a file that is not as it must be: header, rows, and the tensor of the index."""
        path, stored = self.path(coord), self.objects[coord]
        shard = dual_shard(self.name, self.dtype, self.grid, coord)
        unit, wanted = math.prod(self.grid.chunk) * self.dtype.itemsize, self.wanted(coord)
        with opened(path, f"part of {self.name!r}", self.generation) as reader:
            if reader.nbytes != stored.nbytes:
                yield f"{path} has {reader.nbytes} bytes, the manifest says {stored.nbytes} (key {self.name!r})"
                return

            def taken(nbytes: int, at: int) -> np.ndarray:
                data = scratch("check", nbytes)
                if reader.readv([data], at) != nbytes:
                    raise self.cut(path)
                return data

            digest = 0
            for number, at in enumerate(range(0, shard.rows, unit)):
                data = taken(min(unit, shard.rows - at), stored.start + at)
                digest = crc32c(data, digest)
                if crc32c(data) != wanted[number]:
                    yield f"{path} (key {self.name!r}): chunk {self.index_of(number, coord)} does not fit its crc32c"
            if digest != stored.crc32c:
                yield f"{path} (key {self.name!r}): its rows do not fit their crc32c"
            if taken(stored.start, 0).tobytes() != shard.sealed(stored.crc32c):
                yield f"{path} (key {self.name!r}): its safetensors header is damaged; the values may be whole"
            if taken(len(shard.tail), stored.start + shard.rows).tobytes() != shard.tail:
                yield f"{path} (key {self.name!r}): its Zarr index is damaged; the values may be whole"


def at_folder(root: str, verify: bool) -> DualTensor | ArrayEntry | None:
    """The array whose folder that is, by the manifest beside: of layout "dual" its tensor, of others what that says of
    it; None where there is none."""
    above, directory = store.split(root)
    if not directory or (m := read(above)) is None:
        return None
    for e in m.arrays:
        if e.packs is None and e.directory == directory:
            if not e.dual:
                return e
            sums = None if e.sums is None else StoredSums(above, m.sums or "", e.sums, e.grid, e.name)
            return DualTensor(above, e.name, e.dtype, e.grid, e, verify, sums)
    return None


def is_dual(tensor: Any) -> bool:
    """Whether a tensor of safetensors lies in a shard of a Zarr hierarchy."""
    return isinstance(tensor, RawTensor) and DUAL_INDEX in read_header(tensor.path).tensors


class HuggingFaceForm(NamedTuple):
    """The names under which Hugging Face loaders find the shards, and files beside: the index, and arrays that are no
    shards."""

    links: dict[str, str]
    files: dict[str, bytes]


def hugging_face_form(root: str, m: Manifest) -> HuggingFaceForm | None:
    """The `HuggingFaceForm` of a checkpoint; None where no array is of layout "dual", or one has several blocks."""
    dual = [a for a in m.arrays if a.dual]
    if not dual or any(len(a) != 1 for a in dual):
        return None
    small = {a.name: a for a in m.arrays if not a.dual}  # of no dimension or no element
    names = [f"model-{i:05d}-of-{len(dual) + bool(small):05d}.safetensors" for i in range(1, len(dual) + 2)]
    links, files, sums, where = {}, {}, {}, {}
    for file, a in zip(names, dual, strict=False):
        ((coord, held),) = a.items()
        shard = dual_shard(a.name, a.dtype, a.grid, coord)
        head = shard.sealed(held.crc32c)
        links[file], where[a.name] = held.file, file
        sums[file] = tensor_sums.text(
            [tensor_sums.own_sum(head), held.crc32c, crc32c(np.frombuffer(shard.tail, np.uint8))]
        )
    if small:
        file = names[-1]
        rows = [(n, dtypes.safetensors_name(a.dtype, n), a.shape) for n, a in small.items()]
        head, place = build_header(rows, sums=True)
        parts = [b"" if small[n].nbytes == 0 else store.at(root).get(f"{small[n].directory}/c")[:-4] for n in place]
        held_sums = [crc32c(p) for p in parts]
        head = tensor_sums.sealed(head, held_sums)
        files[file] = b"".join([head, *parts])
        sums[file] = tensor_sums.text([tensor_sums.own_sum(head), *held_sums])
        where |= dict.fromkeys(small, file)
    files[HF_INDEX] = index_text({"total_size": sum(a.nbytes for a in m.arrays)}, where, sums)
    return HuggingFaceForm(links, files)


def form_faults(root: str, m: Manifest) -> tuple[set[str], list[str]]:
    """(names of the `HuggingFaceForm` that were compared, their faults). A link that is a file of its own by now has
    the same bytes."""
    form = hugging_face_form(root, m)
    if form is None or store.is_url(root):
        return set(), []
    held = store.at(root)
    bad = [n for n, data in form.files.items() if held.size(n) is None or held.get(n) != data]
    bad += [n for n, shard in form.links.items() if held.tag(n) != held.tag(shard) and not _same_bytes(held, n, shard)]
    return {*form.files, *form.links}, [
        f"{store.join(root, n)} is missing or damaged; the arrays may be whole" for n in bad
    ]


def _same_bytes(held: Store, a: str, b: str) -> bool:
    """Whether both files are there, with the same bytes."""
    if held.size(a) is None or held.size(a) != held.size(b):
        return False
    with contextlib.closing(held.reader(a)) as one, contextlib.closing(held.reader(b)) as other:
        buffers = np.empty((2, 1 << 20), np.uint8)
        for at in range(0, one.nbytes, buffers.shape[1]):
            n, m = one.readv([buffers[0]], at), other.readv([buffers[1]], at)
            if n != m or not np.array_equal(buffers[0, :n], buffers[1, :n]):
                return False
    return True
