"""A transfer into a Zarr checkpoint like those of `save`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.core.blocks import Box
from ...base.checksums import combine, crc32c
from ...base.scratch import scratch
from ...base.threads import SYNCS, compressors, in_threads, writers
from ...format import chunk_sums, manifest
from ...format.chunk_grid import ChunkGrid, Coord, cells, ravel, windows
from ...format.chunk_sums import packed
from ...format.zarr_format import chunk_coords, shard_index
from ...readers.tensor import consecutive
from ...rules.lazy_tensors import whole_of
from ...saving.finalize import finish_directory
from ...saving.items import Record, SaveItem, refuse_taken, sizes_of
from ...stores.atomic_directory import Folder
from ...stores.filesystem import IOV_MAX, active, preadv
from .copy_chunks import copy_chunks, keeps_bytes
from .shard_streams import ShardWriter, pieces_of, shard_of
from .sink import BATCH, CHECKED, Unit, UploadStream, clear, cut, read, sums, touch
from .sink_packs import BlockWriter, PackFiles


@dataclass(frozen=True, slots=True)
class ZarrWriter:
    """Windows of an array of a checkpoint. Their sums are the crc32c of their chunks, in lexicographic order."""

    directory: str
    grid: ChunkGrid
    dtype: np.dtype

    def chunks(self, window: Box) -> list[tuple[Coord, Coord, Box]]:
        """(shard, chunk in the shard, its box) of each chunk of a window."""
        grid = self.grid
        return [(*grid.place_in_shard(index), grid.chunk_box(index)) for index in cells(window, grid.chunk)]

    def put(self, root: str, window: Box, tensor: Any) -> list[int]:
        stored = whole_of(tensor)
        if not keeps_bytes(stored, self.grid, self.dtype):
            return self._write(root, window, read(tensor, window, passing=True))
        every = list(cells(window, self.grid.chunk))
        found = copy_chunks(
            stored, self.grid, every, lambda coord: os.path.join(root, self.directory, self.grid.key(coord))
        )
        return [found[index] for index in every]

    def _write(self, root: str, window: Box, data: np.ndarray) -> list[int]:
        fs, grid = active(), self.grid
        n = math.prod(grid.chunk) * self.dtype.itemsize
        slots = max(1, min(BATCH // max(n, 1), IOV_MAX // 2))
        staging: np.ndarray | None = None
        sums: list[int] = []
        pending: list[Any] = []
        where: tuple[Coord, int] = ((), 0)  # shard and place of the first pending chunk

        def flush() -> None:
            if pending:
                with fs.opened(os.path.join(root, self.directory, grid.key(where[0]))) as fd:
                    fs.write(fd, pending, where[1])
                pending.clear()

        for coord, local, box in self.chunks(window):
            place = ravel(local, grid.present(coord)) * (n + 4)
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
        n = math.prod(grid.chunk) * self.dtype.itemsize + 4
        chunks = self.chunks(window)
        if len(sums) != len(chunks):
            return False
        slots = max(1, min(CHECKED // n, len(chunks)))
        held = scratch("check", slots * n)
        wanted = sorted((coord, local, value) for (coord, local, _), value in zip(chunks, sums, strict=True))
        for coord, group in itertools.groupby(wanted, key=lambda w: w[0]):
            of = {local: value.to_bytes(4, "little") for _, local, value in group}
            with open(os.path.join(root, self.directory, grid.key(coord)), "rb", buffering=0) as f:
                for number, some in consecutive(list(of), grid.present(coord), slots):
                    data = held[: len(some) * n]
                    if preadv(f.fileno(), [data], number * n) != data.size:
                        return False
                    for local, row in zip(some, data.reshape(-1, n), strict=True):
                        if row[-4:].tobytes() != of[local] or crc32c(row[:-4]).to_bytes(4, "little") != of[local]:
                            return False
        return True


class ZarrSink:
    """A checkpoint like those of `save`."""

    def __init__(self, items: list[SaveItem], head: manifest.Manifest, documents: Mapping[str, bytes]) -> None:
        self.items, self.head, self.documents = items, head, dict(documents)
        refuse_taken(items, documents)
        self.nbytes = sizes_of(items)[1] + 4096 * (2 * len(items) + 2)
        self._records: list[Record] = []
        self._packs = PackFiles(items)

    @property
    def said(self) -> dict[str, str]:
        """What is written of arrays that another writer has said, by name."""
        return {i.name: i.said for i in self.items if i.said}

    @property
    def files(self) -> list[str]:
        """The arrays' directories, and the packs."""
        return [i.directory for i in self.items if not i.packed] + [p.file for p in self.head.packs]

    def describe(self) -> Any:
        rows = []
        for i in self.items:
            kinds = [str(i.compression)] * bool(i.compression) + ["packed"] * i.packed + ["dual"] * bool(i.dual)
            rows.append([i.directory, i.shape, i.grid.shard, i.grid.chunk, i.dtype.name, *kinds])
        return ["zarr", rows, self.head.dumps().decode(), sums(self.documents)]

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        out: list[Unit] = []
        for n, i in enumerate(self.items):
            if i.packed:
                out += self._packs.units(n, limit)
            else:
                small = windows(i.shape, i.grid.chunk, i.dtype.itemsize, limit)
                out += (Unit(n, box) for box in (map(i.grid.shard_box, i.grid.shards()) if i.whole else small))
        return out

    def create(self, root: str) -> None:
        fs = active()
        nodes = [f"{i.directory}/zarr.json" for i in self.items if not i.packed]
        clear(root, [manifest.FILE, chunk_sums.FILE, "zarr.json", *self.documents, *nodes])
        if any(i.dual for i in self.items):
            files = [f for f in os.listdir(root) if os.path.isfile(os.path.join(root, f))]
            clear(root, [f for f in files if f.startswith("model")])  # second names of shards, and their index
        self._packs.create(root)
        for i in self.items:
            if i.packed:
                continue
            directory = os.path.join(root, i.directory)
            if not os.path.isdir(directory):
                fs.mkdir(directory)
            if not i.whole:
                for coord in i.grid.shards():
                    touch(fs, os.path.join(directory, i.grid.key(coord)))

    def writer(self, array: int, limit: int) -> ZarrWriter | ShardWriter | BlockWriter:
        item = self.items[array]
        if item.packed:
            return self._packs.writers[array]
        if item.whole:
            dual = item.name if item.dual else None
            return ShardWriter(item.directory, item.grid, item.dtype, item.compression, limit, self._helpers(), dual)
        return ZarrWriter(item.directory, item.grid, item.dtype)

    def _helpers(self) -> int:
        return compressors(sum(math.prod(i.grid.counts) for i in self.items if i.compression is not None), writers())

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        table: list[dict[tuple[Coord, Coord], int]] = [{} for _ in self.items]
        whole: list[tuple[ShardWriter, Unit]] = []
        blocks: dict[Unit, list[int]] = {}
        writers = [self.writer(i, 0) for i in range(len(self.items))]
        for unit, values in sums.items():
            writer = writers[unit.array]
            if isinstance(writer, ShardWriter):
                whole.append((writer, unit))
            elif isinstance(writer, BlockWriter):
                blocks[unit] = values
            else:
                for (coord, local, _), value in zip(writer.chunks(unit.box), values, strict=True):
                    table[unit.array][coord, local] = value
        jobs = [
            lambda i=i, held=held, coord=coord: self._complete(root, i, coord, held)
            for i, held in zip(self.items, table, strict=True)
            if not i.whole and not i.packed
            for coord in i.grid.shards()
        ]
        jobs += [lambda w=w, unit=unit: w.sync(root, unit.box, sums[unit]) for w, unit in whole]
        self._records = in_threads(lambda job: job(), jobs, SYNCS) + self._packs.sync(root, blocks)

    def _complete(self, root: str, item: SaveItem, coord: Coord, held: dict[tuple[Coord, Coord], int]) -> Record:
        fs, grid = active(), item.grid
        n, digest, total = math.prod(grid.chunk) * item.dtype.itemsize, 0, 0
        values = [held[coord, local] for local in chunk_coords(grid, coord)]
        for value in values:
            digest, total = combine(digest, value, n), total + n + 4
        file = f"{item.directory}/{grid.key(coord)}"
        with fs.opened(os.path.join(root, file)) as fd:
            if grid.shape:
                total += fs.write(fd, [shard_index(grid, coord, n + 4)], total)
            cut(fd, total)
            fs.fsync(fd)
        return Record(file, total, digest, packed(values))

    def mark(self, suffix: str) -> None:
        self._packs.mark(suffix)
        for i in self.items:
            i.directory += suffix

    def streams(self, tensors: Sequence[Any], limit: int) -> list[UploadStream]:
        helpers = self._helpers()
        return self._packs.streams(tensors) + [
            UploadStream(
                f"{i.directory}/{i.grid.key(coord)}",
                i.most(coord),
                lambda stream, t=t, i=i, coord=coord: pieces_of(
                    shard_of(t, i.grid, coord, i.compression, limit, helpers, i.name if i.dual else None), stream
                ),
            )
            for i, t in zip(self.items, tensors, strict=True)
            if not i.packed
            for coord in i.grid.shards()
        ]

    def accept(self, streams: Sequence[UploadStream]) -> None:
        held = {s.name: s for s in streams}
        self._records = self._packs.accept(held)
        own = {r.pack.file for r in self._records if r.pack is not None}
        self._records += [
            Record(s.name, s.nbytes, s.digest[0], packed(s.digest[1:])) for s in streams if s.name not in own
        ]

    def finish(self, folder: Folder, target: str) -> int:
        return finish_directory(folder, target, self.head, self.items, self._records, self.documents)
