"""Where a transfer writes: a Zarr checkpoint or a Hugging Face directory, one window of one array at a time.

Every byte of the result has one place that the plan fixes, so windows may come in any order, from any thread, and again after an
interruption; the files are the same. A sink answers for what it wrote with checksums: `write` returns them, `check` reads the
window back and compares, `finish` turns them into the metadata that makes the directory a checkpoint.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import CorruptCheckpoint
from . import dtypes, manifest, safetensors
from .checksums import combine, crc32c
from .files import IOV_MAX, Files, active
from .grid import Grid, runs, windows
from .opened import HF_INDEX
from .saving import Item, finish_directory
from .tensors import preadv
from .writing import Record, in_threads
from .zarr_format import chunk_coords, shard_index

_BATCH = 8 << 20  # bytes handed to the kernel in one call, and of staging memory


@dataclass(frozen=True, slots=True)
class Unit:
    """A window of an array."""

    array: int
    box: Box


class Sink(Protocol):
    """What a transfer needs of its target."""

    nbytes: int  # of all files, roughly

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        """Windows of at most ``limit`` bytes (one chunk at least) that cover every array, in order of places."""

    def describe(self) -> Any:
        """The plan as JSON: equal plans write equal files."""

    def create(self, root: str) -> None:
        """Make directories and files below ``root``, leaving those alone that an interrupted run has made."""

    def write(self, root: str, unit: Unit, data: np.ndarray) -> list[int]:
        """Put the elements of a window to their places; returns their checksums."""

    def check(self, root: str, unit: Unit, sums: list[int]) -> bool:
        """Whether the files hold what ``sums`` says."""

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        """Complete the files of data and make them durable."""

    def finish(self, root: str, target: str) -> int:
        """Write what makes the directory a checkpoint, last; returns the bytes of all files."""


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


class ZarrSink:
    """A checkpoint like those of `save`. The sums of a window are the crc32c of its chunks, in lexicographic order."""

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

    def _chunks(self, unit: Unit) -> list[tuple[tuple[int, ...], tuple[int, ...], Box]]:
        """(shard, chunk in the shard, its box) of each chunk of a window."""
        grid = self.items[unit.array].grid
        spans = [range(a // c, -(-b // c)) for a, b, c in zip(unit.box.offset, unit.box.stop, grid.chunk, strict=True)]
        per = grid.chunks_in_shard
        out = []
        for index in itertools.product(*spans):
            offset = tuple(i * c for i, c in zip(index, grid.chunk, strict=True))
            shape = tuple(min(c, n - o) for c, n, o in zip(grid.chunk, grid.shape, offset, strict=True))
            coord = tuple(i // k for i, k in zip(index, per, strict=True))
            out.append((coord, tuple(i % k for i, k in zip(index, per, strict=True)), Box(offset, shape)))
        return out

    def write(self, root: str, unit: Unit, data: np.ndarray) -> list[int]:
        fs, item = active(), self.items[unit.array]
        grid = item.grid
        n = math.prod(grid.chunk) * item.dtype.itemsize
        slots = max(1, min(_BATCH // max(n, 1), IOV_MAX // 2))
        staging: np.ndarray | None = None
        sums: list[int] = []
        pending: list[Any] = []
        where: tuple[tuple[int, ...], int] = ((), 0)  # shard and place of the first pending chunk

        def flush() -> None:
            if pending:
                fd = fs.open(os.path.join(root, item.directory, grid.key(where[0])))
                try:
                    fs.write(fd, pending, where[1])
                finally:
                    fs.close(fd)
                pending.clear()

        for coord, local, box in self._chunks(unit):
            place = _ravel(local, grid.present(coord)) * (n + 4)
            if not pending or coord != where[0] or place != where[1] + len(pending) // 2 * (n + 4):
                flush()
                where = (coord, place)
            part = data[(*box.within(unit.box).slices, ...)]
            if part.shape != grid.chunk or not part.flags.c_contiguous:
                if staging is None:
                    staging = np.zeros((slots, *grid.chunk), item.dtype)
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

    def check(self, root: str, unit: Unit, sums: list[int]) -> bool:
        item = self.items[unit.array]
        n = math.prod(item.grid.chunk) * item.dtype.itemsize
        chunks = self._chunks(unit)
        if len(sums) != len(chunks):
            return False
        data, mark = np.empty(n, np.uint8), np.empty(4, np.uint8)
        for (coord, local, _), value in zip(chunks, sums, strict=True):
            path = os.path.join(root, item.directory, item.grid.key(coord))
            if not _read(path, [data, mark], _ravel(local, item.grid.present(coord)) * (n + 4)):
                return False
            if crc32c(data) != value or mark.tobytes() != value.to_bytes(4, "little"):
                return False
        return True

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        table: list[dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = [{} for _ in self.items]
        for unit, values in sums.items():
            for (coord, local, _), value in zip(self._chunks(unit), values, strict=True):
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

    def finish(self, root: str, target: str) -> int:
        return finish_directory(root, target, self.head, self.items, self._records)


def _ravel(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    number = 0
    for i, n in zip(index, shape, strict=True):
        number = number * n + i
    return number


# ----- safetensors ----------------------------------------------------------------------------------------------------


class HuggingFaceSink:
    """``model.safetensors`` in one file or several, and their index. The sum of a window is the crc32c of its elements."""

    def __init__(self, named: Sequence[tuple[str, Any]], groups: list[list[str]], format_: str = "pt") -> None:
        by_name = {name: i for i, (name, _) in enumerate(named)}
        count = len(groups)
        self.files = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        kinds = {name: dtypes.safetensors_name(t.dtype, f"key {name!r}") for name, t in named}
        self.heads, self.places = [], []
        self._at: dict[int, tuple[str, int]] = {}  # file and place of each array
        for file, group in zip(self.files, groups, strict=True):
            head, place = safetensors.build_header(
                [(n, kinds[n], tuple(named[by_name[n]][1].shape)) for n in group], {"format": format_}
            )
            self.heads.append(head)
            self.places.append(place)
            self._at.update((by_name[n], (file, len(head) + t.begin)) for n, t in place.items())
        self.shapes = [tuple(t.shape) for _, t in named]
        self.itemsizes = [t.dtype.itemsize for _, t in named]
        self.weight_map = {n: file for file, group in zip(self.files, groups, strict=True) for n in group}
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

    def _runs(self, unit: Unit, data: np.ndarray) -> list[tuple[int, list[np.ndarray]]]:
        """(place in the file, pieces of ``data``) of each stretch of the file that a window covers."""
        item, start = self.itemsizes[unit.array], self._at[unit.array][1]
        raw = data.reshape(-1).view(np.uint8)
        out: list[tuple[int, list[np.ndarray]]] = []
        end = -1
        for inner, outer, length in runs(unit.box, self.shapes[unit.array]):
            if outer * item != end or len(out[-1][1]) == IOV_MAX:
                out.append((start + outer * item, []))
            out[-1][1].append(raw[inner * item : (inner + length) * item])
            end = (outer + length) * item
        return out

    def write(self, root: str, unit: Unit, data: np.ndarray) -> list[int]:
        fs = active()
        fd = fs.open(os.path.join(root, self._at[unit.array][0]))
        try:
            for place, pieces in self._runs(unit, data):
                fs.write(fd, pieces, place)
        finally:
            fs.close(fd)
        return [crc32c(data)]

    def check(self, root: str, unit: Unit, sums: list[int]) -> bool:
        held = np.empty(unit.box.size * self.itemsizes[unit.array], np.uint8)
        path = os.path.join(root, self._at[unit.array][0])
        whole = all(_read(path, pieces, place) for place, pieces in self._runs(unit, held))
        return whole and sums == [crc32c(held)]

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        fs = active()
        for file in self.files:
            fd = fs.open(os.path.join(root, file))
            try:
                fs.fsync(fd)
            finally:
                fs.close(fd)

    def finish(self, root: str, target: str) -> int:
        fs = active()
        for file, place in zip(self.files, self.places, strict=True):
            if safetensors.read_header(os.path.join(root, file)).tensors != place:
                raise CorruptCheckpoint(f"{file} does not read back as it was written; nothing was committed")
        index = {"metadata": {"total_size": self.total_size}, "weight_map": self.weight_map}
        text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
        fs.fsync_dir(root)
        fs.write_file(os.path.join(root, HF_INDEX), text)
        fs.fsync_dir(root)
        return self.total_size + sum(map(len, self.heads)) + len(text)


__all__ = ["Grid", "HuggingFaceSink", "Sink", "Unit", "ZarrSink"]
