"""A transfer into a Zarr checkpoint like those of `save`."""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.blocks import Box
from . import dtypes, manifest
from .checksums import combine, crc32c
from .commit import Folder
from .files import IOV_MAX, active
from .finishing import Item, finish_directory
from .grid import Grid, windows
from .scratch import scratch
from .sinks import BATCH, Stream, Unit, clear, read, read_file, sums, touch
from .writing import SYNCS, Record, in_threads
from .zarr_format import ShardBytes, chunk_coords, shard_index


@dataclass(frozen=True, slots=True)
class ZarrWriter:
    """Windows of an array of a checkpoint. Their sums are the crc32c of their chunks, in lexicographic order."""

    directory: str
    grid: Grid
    dtype: np.dtype

    def chunks(self, window: Box) -> list[tuple[tuple[int, ...], tuple[int, ...], Box]]:
        """(shard, chunk in the shard, its box) of each chunk of a window."""
        grid = self.grid
        spans = [range(a // c, -(-b // c)) for a, b, c in zip(window.offset, window.stop, grid.chunk, strict=True)]
        per = grid.chunks_in_shard
        out = []
        for index in itertools.product(*spans):
            offset = tuple(i * c for i, c in zip(index, grid.chunk, strict=True))
            shape = tuple(min(c, n - o) for c, n, o in zip(grid.chunk, grid.shape, offset, strict=True))
            coord = tuple(i // k for i, k in zip(index, per, strict=True))
            out.append((coord, tuple(i % k for i, k in zip(index, per, strict=True)), Box(offset, shape)))
        return out

    def write(self, root: str, window: Box, data: np.ndarray) -> list[int]:
        fs, grid = active(), self.grid
        n = math.prod(grid.chunk) * self.dtype.itemsize
        slots = max(1, min(BATCH // max(n, 1), IOV_MAX // 2))
        staging: np.ndarray | None = None
        sums: list[int] = []
        pending: list[Any] = []
        where: tuple[tuple[int, ...], int] = ((), 0)  # shard and place of the first pending chunk

        def flush() -> None:
            if pending:
                fd = fs.open(os.path.join(root, self.directory, grid.key(where[0])))
                try:
                    fs.write(fd, pending, where[1])
                finally:
                    fs.close(fd)
                pending.clear()

        for coord, local, box in self.chunks(window):
            place = _ravel(local, grid.present(coord)) * (n + 4)
            if not pending or coord != where[0] or place != where[1] + len(pending) // 2 * (n + 4):
                flush()
                where = (coord, place)
            part = data[(*box.within(window).slices, ...)]
            if part.shape != grid.chunk or not part.flags.c_contiguous:
                if staging is None:
                    staging = scratch("write", slots * n).view(self.dtype).reshape(slots, *grid.chunk)
                slot = staging[len(pending) // 2, ...]
                if part.shape != grid.chunk:
                    slot[...] = 0
                slot[(*map(slice, part.shape), ...)] = part
                part = slot
            raw = part.reshape(-1).view(np.uint8)
            sums.append(crc32c(raw))
            pending += [raw, sums[-1].to_bytes(4, "little")]
            if len(pending) == 2 * slots:
                flush()
        flush()
        return sums

    def check(self, root: str, window: Box, sums: list[int]) -> bool:
        grid = self.grid
        n = math.prod(grid.chunk) * self.dtype.itemsize
        chunks = self.chunks(window)
        if len(sums) != len(chunks):
            return False
        slots = max(1, min(BATCH // max(n, 1), IOV_MAX // 2, len(chunks)))
        data, marks = scratch("check", slots * n).reshape(slots, n), np.empty((slots, 4), np.uint8)
        first = 0
        while first < len(chunks):
            coord = chunks[first][0]
            start = _ravel(chunks[first][1], grid.present(coord))
            last = first + 1
            while (
                last < len(chunks)
                and last - first < slots
                and chunks[last][0] == coord
                and _ravel(chunks[last][1], grid.present(coord)) == start + last - first
            ):
                last += 1
            k = last - first
            path = os.path.join(root, self.directory, grid.key(coord))
            if not read_file(path, [b for i in range(k) for b in (data[i], marks[i])], start * (n + 4)):
                return False
            for held, mark, value in zip(data, marks, sums[first:last], strict=False):
                if crc32c(held) != value or mark.tobytes() != value.to_bytes(4, "little"):
                    return False
            first = last
        return True


class _Windowed:
    """The elements of a box of a lazy tensor, with the face of an array that is read chunk by chunk, in order."""

    def __init__(self, tensor: Any, box: Box, chunk: tuple[int, ...], limit: int) -> None:
        self.tensor, self.box, self.dtype = tensor, box, dtypes.little(tensor.dtype)
        self._coming = windows(box.shape, chunk, tensor.dtype.itemsize, limit)
        self._window, self._data = Box((0,) * len(box.shape), (0,) * len(box.shape)), np.empty(0, self.dtype)

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        spans = [s.indices(n) for s, n in zip(index[:-1], self.box.shape, strict=True)]
        wanted = Box(tuple(a for a, _, _ in spans), tuple(b - a for a, b, _ in spans))
        while wanted.intersect(self._window) != wanted or not self._data.size:
            self._window = next(self._coming)
            offset = tuple(a + b for a, b in zip(self.box.offset, self._window.offset, strict=True))
            self._data = read(self.tensor, Box(offset, self._window.shape))
        return self._data[(*wanted.within(self._window).slices, ...)]


class ZarrSink:
    """A checkpoint like those of `save`."""

    def __init__(self, items: list[Item], head: manifest.Manifest, documents: Mapping[str, bytes]) -> None:
        self.items, self.head, self.documents = items, head, dict(documents)
        self.nbytes = sum(i.stored_nbytes for i in items) + 4096 * (2 * len(items) + 2)
        self._records: list[Record] = []

    def describe(self) -> Any:
        rows = [[i.directory, i.shape, i.grid.shard, i.grid.chunk, i.dtype.name] for i in self.items]
        return ["zarr", rows, self.head.dumps().decode(), sums(self.documents)]

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        return [
            Unit(n, box)
            for n, i in enumerate(self.items)
            for box in windows(i.shape, i.grid.chunk, i.dtype.itemsize, limit)
        ]

    def create(self, root: str) -> None:
        fs = active()
        clear(root, [manifest.FILE, "zarr.json", *self.documents, *(f"{i.directory}/zarr.json" for i in self.items)])
        for i in self.items:
            directory = os.path.join(root, i.directory)
            if not os.path.isdir(directory):
                fs.mkdir(directory)
            for coord in i.grid.shards():
                touch(fs, os.path.join(directory, i.grid.key(coord)))

    def writer(self, array: int) -> ZarrWriter:
        item = self.items[array]
        return ZarrWriter(item.directory, item.grid, item.dtype)

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        table: list[dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = [{} for _ in self.items]
        writers = [self.writer(i) for i in range(len(self.items))]
        for unit, values in sums.items():
            for (coord, local, _), value in zip(writers[unit.array].chunks(unit.box), values, strict=True):
                table[unit.array][coord, local] = value
        jobs = [
            lambda i=i, held=held, coord=coord: self._complete(root, i, coord, held)
            for i, held in zip(self.items, table, strict=True)
            for coord in i.grid.shards()
        ]
        self._records = in_threads(lambda job: job(), jobs, SYNCS)

    def _complete(
        self, root: str, item: Item, coord: tuple[int, ...], held: dict[tuple[tuple[int, ...], tuple[int, ...]], int]
    ) -> Record:
        fs, grid = active(), item.grid
        n, digest, total = math.prod(grid.chunk) * item.dtype.itemsize, 0, 0
        for local in chunk_coords(grid, coord):
            digest, total = combine(digest, held[coord, local], n), total + n + 4
        file = f"{item.directory}/{grid.key(coord)}"
        fd = fs.open(os.path.join(root, file))
        try:
            if grid.shape:
                total += fs.write(fd, [shard_index(grid, coord, n + 4)], total)
            fs.fsync(fd)
        finally:
            fs.close(fd)
        return Record(file, total, digest)

    def mark(self, suffix: str) -> None:
        for i in self.items:
            i.directory += suffix

    def streams(self, tensors: Sequence[Any], limit: int) -> list[Stream]:
        def body(stream: Stream, tensor: Any, grid: Grid, coord: tuple[int, ...]) -> Iterator[Any]:
            block = _Windowed(tensor, grid.shard_box(coord), grid.chunk, limit)
            shard = ShardBytes(block, grid, coord)  # type: ignore[arg-type]
            yield from shard.pieces()
            stream.digest = shard.digest

        return [
            Stream(
                f"{i.directory}/{i.grid.key(coord)}",
                i.grid.object_nbytes(coord, i.dtype.itemsize),
                lambda stream, t=t, i=i, coord=coord: body(stream, t, i.grid, coord),
            )
            for i, t in zip(self.items, tensors, strict=True)
            for coord in i.grid.shards()
        ]

    def accept(self, streams: Sequence[Stream]) -> None:
        self._records = [Record(s.name, s.nbytes, s.digest) for s in streams]

    def finish(self, folder: Folder, target: str) -> int:
        return finish_directory(folder, target, self.head, self.items, self._records, self.documents)


def _ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    number = 0
    for i, n in zip(index, shape, strict=True):
        number = number * n + i
    return number
