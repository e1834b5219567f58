"""The packs of a transfer (see ``packs``): in a directory their blocks are written window by window, in an object store
each is one upload.

The header of a pack has its checksums, which are known at the end. In a directory their place is kept; what is uploaded
begins with them, so the blocks of such a pack are held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....arrays.core.blocks import Box
from ...base.checksums import combine
from ...base.names import leaf_name
from ...base.threads import SYNCS, in_threads
from ...format.chunk_grid import ChunkGrid, Coord, windows
from ...format.stored_objects import Pack
from ...readers.safetensors import TensorInfo
from ...saving import packs
from ...saving.items import Record, SaveItem, Task
from .raw_writer import RawWriter, begin, seal
from .sink import Unit, UploadStream, read


@dataclass(frozen=True, slots=True)
class BlockWriter:
    """The writer of an array whose blocks lie in packs: ``places`` has the file and first byte of each."""

    grid: ChunkGrid
    itemsize: int
    places: Mapping[Coord, tuple[str, int]]

    def raw_of(self, window: Box) -> RawWriter:
        coord = self.grid.shard_at(window)
        file, start = self.places[coord]
        return RawWriter(file, start, self.grid.shard_box(coord), self.itemsize)


class PackFiles:
    """The packs of the packed ones among ``items``, whose blocks the n-th rank of each mesh would write together."""

    def __init__(self, items: Sequence[SaveItem]) -> None:
        self._items = items
        self._suffix = ""

    def mark(self, suffix: str) -> None:
        self._suffix = suffix

    def _tasks(self, limit: int | None = None) -> dict[str, list[Task]]:
        stems: dict[str, list[Task]] = {}
        for n, i in enumerate(self._items):
            for k, coord in enumerate(i.grid.shards() if i.packed else ()):
                file, name = f"{i.directory}/{i.grid.key(coord)}", leaf_name(i.path)
                task = Task(n, i.grid.shard_box(coord), i.grid, coord, file, name=name)
                stems.setdefault("local" if i.mesh is None else f"{i.mesh}-{k:05d}", []).append(task)
        out: dict[str, list[Task]] = {}
        sizes = [i.dtype.itemsize for i in self._items]
        for stem, tasks in stems.items():
            for task in packs.dealt(tasks, sizes, stem, self._suffix, limit):
                out.setdefault(task.pack, []).append(task)
        return out

    # ----- in a directory

    def units(self, array: int, limit: int) -> Iterator[Unit]:
        """Stretches of the blocks of an array."""
        item = self._items[array]
        for block in map(item.grid.shard_box, item.grid.shards()):
            for part in windows(block.shape, (1,) * len(block.shape), item.dtype.itemsize, limit):
                yield Unit(array, part.shifted(block.offset))

    def create(self, root: str) -> None:
        begin(root, {file: head for file, (_, head, _) in self._placed.items()})

    @cached_property
    def _placed(self) -> dict[str, tuple[list[Task], bytes, dict[str, TensorInfo]]]:
        """Tasks, header and places of each pack."""
        kinds = [i.dtype for i in self._items]
        return {f: (some, *packs.head_of(some, [kinds[t.array] for t in some])) for f, some in self._tasks().items()}

    @cached_property
    def writers(self) -> dict[int, BlockWriter]:
        """The writer of each packed array."""
        places: dict[int, dict[Coord, tuple[str, int]]] = {}
        for file, (tasks, head, held) in self._placed.items():
            for t in tasks:
                places.setdefault(t.array, {})[t.coord] = file, len(head) + held[t.name].begin
        return {n: BlockWriter(self._items[n].grid, self._items[n].dtype.itemsize, held) for n, held in places.items()}

    def sync(self, root: str, sums: Mapping[Unit, list[int]]) -> list[Record]:
        """Write the headers with their checksums, and make the packs durable."""
        blocks: dict[tuple[int, Coord], list[tuple[Coord, int, int]]] = {}
        for unit, (value,) in sums.items():
            item = self._items[unit.array]
            row = unit.box.offset, value, unit.box.size * item.dtype.itemsize
            blocks.setdefault((unit.array, item.grid.shard_at(unit.box)), []).append(row)

        def of(task: Task) -> int:
            total = 0
            for _, value, nbytes in sorted(blocks[task.array, task.coord]):
                total = combine(total, value, nbytes)
            return total

        def write(file: str) -> list[Record]:
            tasks, head, places = self._placed[file]
            found = {t.name: of(t) for t in tasks}
            nbytes = len(head) + sum(p.nbytes for p in places.values())
            head = seal(root, file, head, [found[name] for name in places], nbytes)
            return packs.records_of(tasks, head, places, found)

        return [r for held in in_threads(write, list(self._placed), SYNCS) for r in held]

    # ----- in an object store

    def streams(self, tensors: Sequence[Any]) -> list[UploadStream]:
        def pack(stream: UploadStream, tasks: list[Task]) -> Iterator[Any]:
            records, body = packs.laid_out(tasks, [read(tensors[t.array], t.part) for t in tasks])
            yield from body()
            p = records[0].pack
            assert p is not None
            stream.nbytes = p.nbytes
            stream.digest = [p.header, p.crc32c, *(n for r in records for n in (r.nbytes, r.crc32c, r.start))]

        sizes = [i.dtype.itemsize for i in self._items]
        return [
            UploadStream(
                file, sum(t.part.size * sizes[t.array] for t in tasks), lambda stream, t=tasks: pack(stream, t)
            )
            for file, tasks in self._tasks(packs.HELD).items()
        ]

    def accept(self, streams: Mapping[str, UploadStream]) -> list[Record]:
        """The records of the streams that are packs."""
        out = []
        for file, tasks in self._tasks(packs.HELD).items():
            s = streams[file]
            (header, crc), rows = s.digest[:2], s.digest[2:]
            pack = Pack(file, s.nbytes, header, crc)
            for task, row in zip(tasks, zip(*[iter(rows)] * 3, strict=True), strict=True):
                out.append(Record(task.file, row[0], row[1], b"", pack, row[2]))
        return out
