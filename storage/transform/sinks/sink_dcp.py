"""A transfer into a checkpoint that ``torch.distributed.checkpoint.load`` reads: ``.metadata``, and archives in
``__0_N.distcp``."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.core.blocks import Box
from ...base.checksums import combine, crc32c
from ...base.threads import SYNCS, in_threads
from ...commit.contents import DCP
from ...foreign import dcp_archive
from ...foreign.dcp_archive import Archive
from ...format.chunk_grid import windows
from ...stores.atomic_directory import Folder
from ...stores.filesystem import active
from .raw_writer import RawWriter
from .sink import Unit, UploadStream, by_array, clear, cut, stretches, touch

CHUNK = 256 << 20  # bytes of a chunk: PyTorch reads each as a whole


@dataclass(frozen=True, slots=True)
class ChunksWriter:
    """The writer of a tensor in chunks, each row-major in its archive, with crc32c and CRC32 of each window."""

    chunks: tuple[RawWriter, ...]

    def raw_of(self, window: Box) -> RawWriter:
        return next(w for w in self.chunks if _within(window, w.block))


def _within(window: Box, box: Box) -> bool:
    return all(a <= b and c <= d for a, b, c, d in zip(box.offset, window.offset, window.stop, box.stop, strict=True))


class DcpSink:
    """``.metadata`` and the files that it names: first the values, then the tensors in their order."""

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        paths: Mapping[str, tuple[str | int, ...]],
        values: Mapping[str, Any],
        limit: int | None,
    ) -> None:
        self._number = {name: i for i, (name, _) in enumerate(named)}
        self._tensors = {name: (tuple(t.shape), t.dtype) for name, t in named}
        self._items = [t.dtype.itemsize for _, t in named]
        self._chunk = [tuple(max(c, 1) for c in t.chunk) for _, t in named]
        self._paths = paths
        made = [dcp_archive.of_value(name, value) for name, value in values.items()]
        self._first = [len(made)]  # number of the first archive of each tensor, and of all
        for (name, t), chunk in zip(named, self._chunk, strict=True):
            boxes = list(windows(t.shape, chunk, t.dtype.itemsize, CHUNK)) or [Box.whole(tuple(t.shape))]
            made += [dcp_archive.of_chunk(name, t.dtype, box) for box in boxes]
            self._first.append(len(made))
        self.archives: list[Archive] = []
        self._sizes: dict[str, int] = {}
        number = used = end = 0
        for a in made:
            if limit is not None and used and used + a.nbytes > limit:
                number, used, end = number + 1, 0, 0
            self.archives.append(a.at(f"__0_{number}.distcp", end))
            used, end = used + a.nbytes, end + a.total
            self._sizes[self.archives[-1].file] = end
        self.nbytes = sum(self._sizes.values()) + 4096 * (len(made) + 2)
        self._sums: list[int] = []  # crc32c of the archives

    @property
    def files(self) -> list[str]:
        return list(self._sizes)

    def describe(self) -> Any:
        rows = [[a.file, a.offset, a.nbytes, crc32c(a.head)] for a in self.archives]
        return ["dcp", rows, {name: list(path) for name, path in self._paths.items()}]

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        out = []
        for a in self.archives:
            if a.box is not None:
                n = self._number[a.name]
                parts = windows(a.box.shape, self._chunk[n], self._items[n], limit)
                out += [Unit(n, part.shifted(a.box.offset)) for part in parts]
        return out

    def create(self, root: str) -> None:
        clear(root, [DCP])
        for file in self._sizes:
            touch(active(), os.path.join(root, file))

    def writer(self, array: int, limit: int) -> ChunksWriter:
        archives = self.archives[self._first[array] : self._first[array + 1]]
        return ChunksWriter(tuple(self._raw(a, a.box) for a in archives if a.box is not None))

    def _raw(self, a: Archive, box: Box) -> RawWriter:
        return RawWriter(a.file, a.start, box, self._items[self._number[a.name]], True)

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        held, fs = by_array(sums), active()

        def write(a: Archive) -> int:
            crc = crc32 = 0
            if (box := a.box) is not None:
                windows = held.get(self._number[a.name], ())
                crc, crc32 = self._raw(a, box).joined(root, (w for w in windows if _within(w[0], box)))
            tail = a.tail(crc32)
            with fs.opened(os.path.join(root, a.file)) as fd:
                fs.write(fd, [a.head], a.offset)
                fs.write(fd, [tail], a.start + a.nbytes)
            return _whole(a, crc, tail)

        self._sums = in_threads(write, self.archives, SYNCS)
        for file, nbytes in self._sizes.items():
            with fs.opened(os.path.join(root, file)) as fd:
                cut(fd, nbytes)
                fs.fsync(fd)

    def mark(self, suffix: str) -> None:
        names = {file: f"{file.removesuffix('.distcp')}{suffix}.distcp" for file in self._sizes}
        self._sizes = {names[file]: nbytes for file, nbytes in self._sizes.items()}
        self.archives = [a.at(names[a.file], a.offset) for a in self.archives]

    def streams(self, tensors: Sequence[Any], limit: int) -> list[UploadStream]:
        def body(stream: UploadStream) -> Iterator[Any]:
            found: list[int] = []
            for a in (a for a in self.archives if a.file == stream.name):
                yield a.head
                crc = crc32 = 0
                if a.box is not None:
                    for data in stretches(tensors[self._number[a.name]], a.box, limit):
                        crc, crc32 = crc32c(data, crc), zlib.crc32(data, crc32)
                        yield data
                yield (tail := a.tail(crc32))
                found.append(_whole(a, crc, tail))
            stream.digest = found

        return [UploadStream(file, nbytes, body) for file, nbytes in self._sizes.items()]

    def accept(self, streams: Sequence[UploadStream]) -> None:
        self._sums = [crc for s in streams for crc in s.digest]

    def finish(self, folder: Folder, target: str) -> int:
        rows = list(zip(self.archives, self._sums, strict=True))
        text = dcp_archive.metadata(self._paths, self._tensors, rows)
        folder.settle()
        folder.put(DCP, text)
        folder.settle()
        return sum(self._sizes.values()) + len(text)


def _whole(a: Archive, crc: int, tail: bytes) -> int:
    """The crc32c of an archive."""
    return combine(combine(crc32c(a.head), crc, a.nbytes), crc32c(tail), len(tail))
