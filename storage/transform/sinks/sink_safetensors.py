"""A transfer into a Hugging Face directory: safetensors files and their index, both with the checksums of all tensors.

Local files keep a place in their headers for the checksums, which are known when the windows are written; uploads begin
with the header, so there the index alone has them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ....arrays.core.blocks import Box
from ....arrays.core.errors import CorruptCheckpoint
from ...base.checksums import crc32c
from ...format import dtypes, tensor_sums
from ...format.chunk_grid import windows
from ...format.hf_index import HF_INDEX, index_text
from ...readers import safetensors
from ...stores import store
from ...stores.atomic_directory import Folder
from .raw_writer import RawWriter, begin, seal
from .sink import Unit, UploadStream, by_array, clear, stretches, sums

_MOST_SAID = 1 << 20  # bytes of attributes of all arrays, which each reader of a header unpacks


def split_files(sizes: Iterable[tuple[str, int]], limit: int | None) -> list[list[str]]:
    """Names for each file: in order, a new file where the limit would be passed. A larger array has a file of its own.

    >>> split_files([("a", 6), ("b", 6), ("c", 2), ("d", 6), ("e", 2), ("f", 2)], 10)
    [['a'], ['b', 'c'], ['d', 'e', 'f']]
    """
    out: list[list[str]] = [[]]
    used = 0
    for name, n in sizes:
        if limit is not None and out[-1] and used + n > limit:
            out.append([])
            used = 0
        out[-1].append(name)
        used += n
    return out


class HuggingFaceSink:
    """``model.safetensors`` in one file or several, and their index."""

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        groups: list[list[str]],
        documents: Mapping[str, bytes],
        metadata: Mapping[str, str],
        said: Mapping[str, str] | None = None,
    ) -> None:
        """``said``: what other writers said of arrays, and under "" of the group, see ``zarr_format``."""
        self.documents = dict(documents)
        self._number = {name: i for i, (name, _) in enumerate(named)}
        count = len(groups)
        self.files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            factors = any(".lora_" in n for n in self._number) or "config.json" not in documents
            self.files = ["adapter_" * ("adapter_config.json" in documents and factors) + "model.safetensors"]
        kinds = {name: dtypes.safetensors_name(t.dtype, f"key {name!r}") for name, t in named}
        rows = [[(n, kinds[n], tuple(named[self._number[n]][1].shape)) for n in group] for group in groups]
        metadata = {**metadata, "format": "pt"}
        self.heads, self.places = [], []
        self._at: dict[int, tuple[int, int]] = {}  # number of the file, and place, of each array
        self.said = dict(said or {})
        if sum(map(len, self.said.values())) > _MOST_SAID:
            self.said = {n: text for n, text in self.said.items() if not n}
        free = [self._free(group, metadata) for group in groups]
        for number, row in enumerate(rows):
            head, place = safetensors.build_header(row, free[number], sums=True)
            self.heads.append(head)
            self.places.append(place)
            self._at.update((self._number[n], (number, len(head) + t.begin)) for n, t in place.items())
        self._plain = lambda: [  # of uploads
            safetensors.build_header(row, own)[0] for row, own in zip(rows, free, strict=True)
        ]
        self._sums: list[list[int]] = []  # of the tensors of each file, in their order
        self.shapes = [tuple(t.shape) for _, t in named]
        self.itemsizes = [t.dtype.itemsize for _, t in named]
        self._groups = groups
        self.total_size = sum(t.nbytes for place in self.places for t in place.values())
        self.nbytes = self.total_size + sum(map(len, self.heads)) + 4096 * (count + 1)

    def _free(self, group: Sequence[str], metadata: Mapping[str, str]) -> dict[str, str]:
        """The free texts of a file."""
        own = {n: json.loads(self.said[n]) for n in ("", *group) if n in self.said}
        return {**metadata, **({safetensors.ATTRIBUTES: json.dumps(own, ensure_ascii=False)} if own else {})}

    def describe(self) -> Any:
        return ["safetensors", self.files, [h.decode("utf-8", "replace") for h in self.heads], sums(self.documents)]

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        order = sorted(self._at, key=self._at.__getitem__)
        return [
            Unit(n, box)
            for n in order
            for box in windows(self.shapes[n], tuple(max(c, 1) for c in tensors[n].chunk), self.itemsizes[n], limit)
        ]

    def create(self, root: str) -> None:
        clear(root, [HF_INDEX, *self.documents])
        begin(root, dict(zip(self.files, self.heads, strict=True)))

    def writer(self, array: int, limit: int) -> RawWriter:
        number, place = self._at[array]
        return RawWriter(self.files[number], place, Box.whole(self.shapes[array]), self.itemsizes[array])

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        parts = by_array(sums)
        for number, (file, place) in enumerate(zip(self.files, self.places, strict=True)):
            held = [self.writer(n, 0).joined(root, parts.get(n, ()))[0] for n in map(self._number.__getitem__, place)]
            self._sums.append(held)
            nbytes = len(self.heads[number]) + sum(t.nbytes for t in place.values())
            self.heads[number] = seal(root, file, self.heads[number], held, nbytes)

    def mark(self, suffix: str) -> None:
        self.files = [f"{file.removesuffix('.safetensors')}{suffix}.safetensors" for file in self.files]

    def streams(self, tensors: Sequence[Any], limit: int) -> list[UploadStream]:
        self.heads = self._plain()

        def body(stream: UploadStream, number: int) -> Iterator[Any]:
            yield self.heads[number]
            found: list[int] = []
            for name in self.places[number]:
                value = 0
                array = self._number[name]
                for data in stretches(tensors[array], Box.whole(self.shapes[array]), limit):
                    value = crc32c(data, value)
                    yield data
                found.append(value)
            stream.digest = tensor_sums.text(found)

        return [
            UploadStream(file, len(head) + sum(t.nbytes for t in place.values()), lambda stream, n=n: body(stream, n))
            for n, (file, head, place) in enumerate(zip(self.files, self.heads, self.places, strict=True))
        ]

    def accept(self, streams: Sequence[UploadStream]) -> None:
        self._sums = [tensor_sums.values(s.digest, len(p)) for s, p in zip(streams, self.places, strict=True)]

    def finish(self, folder: Folder, target: str) -> int:
        for file, head, place in zip(self.files, self.heads, self.places, strict=True):
            with contextlib.closing(store.at(folder.root).reader(file)) as reader:
                same = reader.part(0, len(head)) == head
                same = same and reader.nbytes == len(head) + sum(t.nbytes for t in place.values())
            if not same:
                raise CorruptCheckpoint(f"{file} does not read back as it was written; nothing was committed")
        weight_map = {n: file for file, group in zip(self.files, self._groups, strict=True) for n in group}
        sums = {
            file: tensor_sums.text([tensor_sums.own_sum(head), *held])
            for file, head, held in zip(self.files, self.heads, self._sums, strict=True)
        }
        sums |= {name: tensor_sums.text([crc32c(data)]) for name, data in self.documents.items()}
        about = {"total_parameters": sum(map(math.prod, self.shapes)), "total_size": self.total_size}
        text = index_text(about, weight_map, sums)
        for name, data in self.documents.items():
            folder.put(name, data)
        folder.settle()
        folder.put(HF_INDEX, text)
        folder.settle()
        extra = sum(map(len, self.documents.values()))
        return self.total_size + sum(map(len, self.heads)) + len(text) + extra
