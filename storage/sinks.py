"""Where a transfer writes: a Zarr checkpoint or a Hugging Face directory, one window of one array at a time.

Every byte of the result has one place that the plan fixes, so windows may come in any order, from any thread or process, and again after
an interruption; the files are the same. A sink answers for what it wrote with checksums: a writer's `write` returns them, its `check`
reads the window back and compares, `finish` turns them into the metadata that makes the directory a checkpoint. Where files cannot
be written in pieces, as in an object store, `streams` gives each of them from its first byte to its last.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import CorruptCheckpoint
from . import dtypes, manifest, safetensors, stores
from .checksums import combine, crc32c
from .commit import Folder
from .files import IOV_MAX, Files, active, preadv
from .grid import Grid, runs, windows
from .opening import HF_INDEX
from .saving import Item, finish_directory
from .writing import Record, in_threads
from .zarr_format import ShardBytes, chunk_coords, shard_index

_BATCH = 8 << 20  # bytes handed to the kernel in one call, and of staging memory


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of an array."""

    array: int
    box: Box


class Writer(Protocol):
    """What puts windows of one array to their places: small, so that it can be sent to another process."""

    def write(self, root: str, box: Box, data: np.ndarray) -> list[int]:
        """Put the elements of a window to their places; returns their checksums."""

    def check(self, root: str, box: Box, sums: list[int]) -> bool:
        """Whether the files hold what ``sums`` says."""


@dataclass
class Stream:
    """One file of the result from its first byte to its last: what is uploaded. ``digest`` is known at its end."""

    name: str
    nbytes: int
    body: Any  # makes the iterator of buffers; each is valid until the next is asked for
    digest: int = field(default=0)

    def pieces(self) -> Iterator[Any]:
        yield from self.body(self)


class Sink(Protocol):
    """What a transfer needs of its target."""

    nbytes: int  # of all files, roughly

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        """Windows of at most ``limit`` bytes (one chunk at least) that cover every array, in order of places."""

    def describe(self) -> Any:
        """The plan as JSON: equal plans write equal files."""

    def create(self, root: str) -> None:
        """Make directories and files below ``root``, leaving those alone that an interrupted run has made."""

    def writer(self, array: int) -> Writer:
        """What writes the windows of one array."""

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        """Complete the files of data and make them durable."""

    def mark(self, suffix: str) -> None:
        """Append this to the names of all arrays or files: in an object store, those of an older generation are not written over."""

    def streams(self, tensors: Sequence[Any], limit: int) -> list[Stream]:
        """Every file of data, whole; each holds about ``limit`` bytes of its array at a time."""

    def accept(self, streams: Sequence[Stream]) -> None:
        """Take the streams that were uploaded for `finish`, in place of `sync`."""

    def finish(self, folder: Folder, target: str) -> int:
        """Write what makes the directory a checkpoint, last; returns the bytes of all files."""


def read(tensor: Any, box: Box) -> np.ndarray:
    """The elements of a box, read in this thread: the windows themselves are spread."""
    out = np.empty(box.shape, tensor.dtype)
    for job in tensor.jobs(box, out):
        job()
    return out


def _clear(root: str, late: Sequence[str]) -> None:
    """Remove the files of the end of an interrupted run, which are written anew."""
    for file in late:
        path = os.path.join(root, file)
        if os.path.lexists(path):
            active().unlink(path)


def _touch(fs: Files, path: str) -> None:
    if not os.path.lexists(path):
        fs.close(fs.create(path))


def _read(path: str, buffers: list[np.ndarray], offset: int) -> bool:
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        return preadv(fd, buffers, offset) == sum(b.nbytes for b in buffers)
    finally:
        os.close(fd)


# ----- Zarr -----------------------------------------------------------------------------------------------------------


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
        slots = max(1, min(_BATCH // max(n, 1), IOV_MAX // 2))
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
                    staging = np.zeros((slots, *grid.chunk), self.dtype)
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
        slots = max(1, min(_BATCH // max(n, 1), IOV_MAX // 2, len(chunks)))
        data, marks = np.empty((slots, n), np.uint8), np.empty((slots, 4), np.uint8)
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
            if not _read(path, [b for i in range(k) for b in (data[i], marks[i])], start * (n + 4)):
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

    def __init__(self, items: list[Item], head: manifest.Manifest) -> None:
        self.items, self.head = items, head
        self.nbytes = sum(i.stored_nbytes for i in items) + 4096 * (2 * len(items) + 2)
        self._records: list[Record] = []

    def describe(self) -> Any:
        rows = [[i.directory, i.shape, i.grid.shard, i.grid.chunk, i.dtype.name] for i in self.items]
        return ["zarr", rows, self.head.dumps().decode()]

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        return [
            Unit(n, box)
            for n, i in enumerate(self.items)
            for box in windows(i.shape, i.grid.chunk, i.dtype.itemsize, limit)
        ]

    def create(self, root: str) -> None:
        fs = active()
        _clear(root, [manifest.FILE, "zarr.json", *(f"{i.directory}/zarr.json" for i in self.items)])
        for i in self.items:
            directory = os.path.join(root, i.directory)
            if not os.path.isdir(directory):
                fs.mkdir(directory)
            for coord in i.grid.shards():
                _touch(fs, os.path.join(directory, i.grid.key(coord)))

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
        self._records = in_threads(lambda job: job(), jobs)

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
        return finish_directory(folder, target, self.head, self.items, self._records)


def _ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    number = 0
    for i, n in zip(index, shape, strict=True):
        number = number * n + i
    return number


# ----- safetensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawWriter:
    """Windows of a tensor of a safetensors file. The sum of a window is the crc32c of its elements."""

    file: str
    start: int
    shape: tuple[int, ...]
    itemsize: int

    def _runs(self, window: Box, data: np.ndarray) -> list[tuple[int, list[np.ndarray]]]:
        """(place in the file, pieces of ``data``) of each stretch of the file that a window covers."""
        item = self.itemsize
        raw = data.reshape(-1).view(np.uint8)
        out: list[tuple[int, list[np.ndarray]]] = []
        end = -1
        for inner, outer, length in runs(window, self.shape):
            if outer * item != end or len(out[-1][1]) == IOV_MAX:
                out.append((self.start + outer * item, []))
            out[-1][1].append(raw[inner * item : (inner + length) * item])
            end = (outer + length) * item
        return out

    def write(self, root: str, window: Box, data: np.ndarray) -> list[int]:
        fs = active()
        fd = fs.open(os.path.join(root, self.file))
        try:
            for place, pieces in self._runs(window, data):
                fs.write(fd, pieces, place)
        finally:
            fs.close(fd)
        return [crc32c(data)]

    def check(self, root: str, window: Box, sums: list[int]) -> bool:
        held = np.empty(window.size * self.itemsize, np.uint8)
        path = os.path.join(root, self.file)
        whole = all(_read(path, pieces, place) for place, pieces in self._runs(window, held))
        return whole and sums == [crc32c(held)]


class HuggingFaceSink:
    """``model.safetensors`` in one file or several, and their index."""

    def __init__(self, named: Sequence[tuple[str, Any]], groups: list[list[str]], format_: str = "pt") -> None:
        self._number = {name: i for i, (name, _) in enumerate(named)}
        count = len(groups)
        self.files = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        kinds = {name: dtypes.safetensors_name(t.dtype, f"key {name!r}") for name, t in named}
        self.heads, self.places = [], []
        self._at: dict[int, tuple[int, int]] = {}  # number of the file, and place, of each array
        for number, group in enumerate(groups):
            head, place = safetensors.build_header(
                [(n, kinds[n], tuple(named[self._number[n]][1].shape)) for n in group], {"format": format_}
            )
            self.heads.append(head)
            self.places.append(place)
            self._at.update((self._number[n], (number, len(head) + t.begin)) for n, t in place.items())
        self.shapes = [tuple(t.shape) for _, t in named]
        self.itemsizes = [t.dtype.itemsize for _, t in named]
        self._groups = groups
        self.total_size = sum(t.nbytes for place in self.places for t in place.values())
        self.nbytes = self.total_size + sum(map(len, self.heads)) + 4096 * (count + 1)

    def describe(self) -> Any:
        return ["safetensors", self.files, [h.decode("utf-8", "replace") for h in self.heads]]

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        order = sorted(self._at, key=self._at.__getitem__)
        return [
            Unit(n, box)
            for n in order
            for box in windows(self.shapes[n], tuple(max(c, 1) for c in tensors[n].chunk), self.itemsizes[n], limit)
        ]

    def create(self, root: str) -> None:
        fs = active()
        _clear(root, [HF_INDEX])
        for file, head in zip(self.files, self.heads, strict=True):
            path = os.path.join(root, file)
            _touch(fs, path)
            fd = fs.open(path)
            try:
                fs.write(fd, [head], 0)
            finally:
                fs.close(fd)

    def writer(self, array: int) -> RawWriter:
        number, place = self._at[array]
        return RawWriter(self.files[number], place, self.shapes[array], self.itemsizes[array])

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        fs = active()
        for file in self.files:
            fd = fs.open(os.path.join(root, file))
            try:
                fs.fsync(fd)
            finally:
                fs.close(fd)

    def mark(self, suffix: str) -> None:
        self.files = [f"{file.removesuffix('.safetensors')}{suffix}.safetensors" for file in self.files]

    def streams(self, tensors: Sequence[Any], limit: int) -> list[Stream]:
        def body(number: int) -> Iterator[Any]:
            yield self.heads[number]
            for name in self.places[number]:
                array = self._number[name]
                shape, item = self.shapes[array], self.itemsizes[array]
                # Whole rows of chunks where they fit: what a window covers must lie in the file in one stretch.
                chunk = tuple(max(c, 1) for c in tensors[array].chunk)
                rows = (*chunk[:1], *shape[1:])
                unit = rows if math.prod(rows) * item <= limit else (1,) * len(shape)
                for box in windows(shape, unit, item, limit):
                    yield read(tensors[array], box).reshape(-1).view(np.uint8)

        return [
            Stream(file, len(head) + sum(t.nbytes for t in place.values()), lambda stream, n=n: body(n))
            for n, (file, head, place) in enumerate(zip(self.files, self.heads, self.places, strict=True))
        ]

    def accept(self, streams: Sequence[Stream]) -> None:
        pass

    def finish(self, folder: Folder, target: str) -> int:
        for file, place in zip(self.files, self.places, strict=True):
            if safetensors.read_header(stores.join(folder.root, file)).tensors != place:
                raise CorruptCheckpoint(f"{file} does not read back as it was written; nothing was committed")
        weight_map = {n: file for file, group in zip(self.files, self._groups, strict=True) for n in group}
        index = {"metadata": {"total_size": self.total_size}, "weight_map": weight_map}
        text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
        folder.settle()
        folder.put(HF_INDEX, text)
        folder.settle()
        return self.total_size + sum(map(len, self.heads)) + len(text)


__all__ = ["Grid", "HuggingFaceSink", "Sink", "Stream", "Unit", "ZarrSink"]
