"""Stored arrays that give any box of themselves, reading as few bytes as their format lets them.

Many formats, one face, `StoredTensor`: here `ChunkedTensor` (our Zarr shards: every chunk that is touched is read whole and its crc32c checked)
and `RawTensor` (a safetensors tensor: one row-major range of a file).
All are small picklable values, so that a plan can be sent to where the bytes are wanted. ``jobs`` cuts a read into
independent calls, each of which returns the number of bytes that it read; `run` executes many of them on threads.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import CheckpointDTypeError, CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from ..arrays.native.copies import is_large, stream
from . import dtypes, names, stores
from .checksums import combine, crc32c
from .files import IOV_MAX
from .grid import Grid, ravel, runs
from .manifest import StoredObject
from .scratch import scratch
from .tensor_sums import of_range

Job = Callable[[], int]


def run(jobs: Sequence[Job], readers: int = 4) -> int:
    """Execute all jobs, on a few threads when that may help; returns the sum of what they return.

    ``readers`` is what the stores of the tensors say: to a disk more threads than processors only wait for each other.
    """
    workers = min(readers, len(jobs), max(readers if readers > 4 else 2, os.cpu_count() or 1))
    if workers < 2:
        return sum(job() for job in jobs)
    with ThreadPoolExecutor(workers, thread_name_prefix="meshtape-io") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            return sum(f.result() for f in futures)
        except BaseException:
            for f in futures:
                f.cancel()
            raise


def _view(a: np.ndarray, box: Box) -> np.ndarray:
    """The part of ``a`` in ``box``; a view even of a 0-d array, where ``a[()]`` would be a scalar."""
    return a[(*box.slices, ...)]


def bytes_of(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1).view(np.uint8)


@contextlib.contextmanager
def opened(where: str, what: str) -> Iterator[stores.Reader]:
    """A file of a checkpoint for reading; `IncompleteCheckpoint` where it is missing, at the opening or the first read."""
    store, name = stores.holding(where)
    try:
        with contextlib.closing(store.reader(name)) as reader:
            yield reader
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteCheckpoint(
            f"{where} is missing, which holds {what}; restore the file or another checkpoint"
        ) from None


# ----- our Zarr shards ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """An array of a meshtape checkpoint. Offsets follow from the grid, as our writer leaves no choice to the index."""

    root: str
    name: str
    dtype: np.dtype
    grid: Grid
    objects: Mapping[tuple[int, ...], StoredObject]
    verify: bool = True  # compare each chunk with its checksum

    @property
    def readers(self) -> int:
        return stores.at(self.root).readers

    @property
    def directory(self) -> str:
        return next((o.file.partition("/")[0] for o in self.objects.values()), "")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grid.shape

    @property
    def chunk(self) -> tuple[int, ...]:
        return self.grid.chunk

    def only(self, box: Box) -> ChunkedTensor:
        """The same tensor with just the objects that ``box`` needs: what is worth sending elsewhere."""
        return replace(self, objects={c: self.objects[c] for c in self._shards(box)})

    def check(self) -> None:
        """Raise `IncompleteCheckpoint`, listing all, when files are missing."""
        lost = stores.missing(self.root, self.directory, [o.file for o in self.objects.values()])
        if lost:
            shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
            raise IncompleteCheckpoint(
                f"{self.root}: {len(lost)} of the {len(self.objects)} files of key {self.name!r} are missing: {shown}; "
                "restore them or another checkpoint"
            )

    def _shards(self, box: Box) -> Iterator[tuple[int, ...]]:
        if box.size:
            spans = zip(box.offset, box.stop, self.grid.shard, strict=True)
            yield from itertools.product(*(range(a // s, -(-b // s)) for a, b, s in spans))

    def planned(self, box: Box) -> int:
        """Bytes that reading ``box`` takes from files."""
        unit = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        spans = zip(box.offset, box.stop, self.grid.chunk, strict=True)
        return unit * math.prod(-(-b // c) - a // c for a, b, c in spans) if box.size else 0

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        """Calls that together fill ``out`` (of the box's shape) with the elements of ``box``."""
        unit = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        step = max(1, stores.at(self.root).job // unit)
        for coord in self._shards(box):
            stored = self.objects[coord]
            part = box.intersect(stored.box)
            if part is None:  # 0-d boxes always meet, so only a box beyond the array ends here
                continue
            local = part.within(stored.box)
            target = _view(out, part.within(box))
            spans = [
                range(a // c, -(-b // c)) for a, b, c in zip(local.offset, local.stop, self.grid.chunk, strict=True)
            ]
            chunks = list(itertools.product(*spans))
            for first in range(0, len(chunks), step):
                yield lambda c=coord, t=target, b=local, group=chunks[first : first + step]: self._read(c, b, t, group)

    def path(self, coord: tuple[int, ...]) -> str:
        """The file of a shard."""
        return names.inside(self.root, self.objects[coord].file, f"{self.root}: {self.name!r}")

    def read_stored(
        self, reader: stores.Reader, path: str, coord: tuple[int, ...], first: int, out: np.ndarray
    ) -> list[int]:
        """Fill ``out`` with chunks of a shard as they are stored, checksums included, from number ``first`` on; returns the checksums.

        Raises `CorruptCheckpoint` where one does not fit, whatever ``verify`` says: the bytes are to be stored again.
        """
        nbytes = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        done = reader.readv([out], first * nbytes)
        self.check_length(reader, coord, path)
        if done != out.size:
            raise self.cut(path)
        rows = out.reshape(-1, nbytes)
        sums = [crc32c(row[:-4]) for row in rows]
        for k, (row, value) in enumerate(zip(rows, sums, strict=True)):
            if row[-4:].tobytes() != value.to_bytes(4, "little"):
                raise self.damaged(path, first + k, coord)
        return sums

    def check_length(self, reader: stores.Reader, coord: tuple[int, ...], path: str) -> None:
        wanted = self.objects[coord].nbytes
        if reader.nbytes != wanted:
            raise CorruptCheckpoint(f"{path} has {reader.nbytes} bytes, the manifest says {wanted} (key {self.name!r})")

    def cut(self, path: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{path} ends early (key {self.name!r}); it changed while it was read")

    def index_of(self, number: int, coord: tuple[int, ...]) -> tuple[int, ...]:
        """The place in its shard of the chunk that lies there as number ``number``."""
        return tuple(int(i) for i in np.unravel_index(number, self.grid.present(coord))) if self.grid.shape else ()

    def damaged(self, path: str, number: int, coord: tuple[int, ...]) -> CorruptCheckpoint:
        nbytes = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        return CorruptCheckpoint(
            f"{path}: chunk {self.index_of(number, coord)} of key {self.name!r} does not fit its crc32c "
            f"(bytes {number * nbytes} to {(number + 1) * nbytes}); restore the file or another checkpoint"
        )

    def _read(self, coord: tuple[int, ...], local: Box, target: np.ndarray, chunks: list[tuple[int, ...]]) -> int:
        """Read some chunks of one shard; ``target`` is the memory of the box ``local``, counted within the shard."""
        grid, path = self.grid, self.path(coord)
        nbytes = math.prod(grid.chunk) * self.dtype.itemsize
        present = grid.present(coord)
        meets = [overlaps(*d) for d in zip(grid.chunk, local.offset, local.shape, strict=True)]
        # Chunks that are rows of the target are read where they belong; others are copied there. Only a few at a time: they are still in
        # a processor's cache when their checksum is taken.
        slots = max(1, min(stores.at(self.root).batch // max(nbytes, 1), IOV_MAX // 2, len(chunks)))
        sums = np.empty((slots, 1), "<u4")
        # What is copied to a large array goes past the caches; the numbers of others' dtypes are no buffers, but their bits are.
        copy = stream if is_large(target) else np.copyto
        dtype = dtypes.bits(self.dtype)
        target = target.view(dtype)
        staging = None
        total = 0
        with opened(path, f"part of {self.name!r}") as reader:
            for number, group in consecutive(chunks, present, slots):
                buffers: list[np.ndarray] = []
                copies: list[tuple[np.ndarray, np.ndarray]] = []
                for k, index in enumerate(group):
                    parts = [o[i] for o, i in zip(meets, index, strict=True)]
                    place = target[(*(p[0] for p in parts), ...)]
                    if all(p[2] for p in parts) and place.flags.c_contiguous:
                        held = place
                    else:
                        if staging is None:
                            staging = scratch("read", slots * nbytes).view(dtype).reshape(slots, *grid.chunk)
                        held = staging[k, ...]
                        copies.append((place, held[(*(p[1] for p in parts), ...)]))
                    buffers += (bytes_of(held), sums[k])
                done = reader.readv(buffers, number * (nbytes + 4))
                if not total:
                    self.check_length(reader, coord, path)
                if done != len(group) * (nbytes + 4):
                    raise self.cut(path)
                total += done
                if self.verify:
                    for k, value in enumerate(sums[: len(group), 0].tolist()):
                        if crc32c(buffers[2 * k]) != value:
                            raise self.damaged(path, number + k, coord)
                for place, source in copies:
                    copy(place, source)
        return total


def overlaps(chunk: int, start: int, length: int) -> dict[int, tuple[slice, slice, bool]]:
    """Of each chunk that meets a range of a dimension: (its place in the range, the part of it that lies there, whether that is all)."""
    out = {}
    for i in range(start // chunk, -(-(start + length) // chunk)):
        lo, hi = max(i * chunk, start), min((i + 1) * chunk, start + length)
        out[i] = slice(lo - start, hi - start), slice(lo - i * chunk, hi - i * chunk), hi - lo == chunk
    return out


def consecutive(
    chunks: list[tuple[int, ...]], present: tuple[int, ...], limit: int
) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """(number of the first, all) of at most ``limit`` chunks that lie one after the other in the file."""
    group: list[tuple[int, ...]] = []
    start = 0
    for index in chunks:
        number = ravel(index, present)
        if group and (number != start + len(group) or len(group) == limit):
            yield start, group
            group = []
        if not group:
            start = number
        group.append(index)
    if group:
        yield start, group


# ----- safetensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A row-major range of a file. With a checksum, whole reads are compared with it; a part cannot be, only the length of the file."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    file_nbytes: int
    crc32c: int | None = None

    @property
    def summed(self) -> bool:
        return self.crc32c is not None

    @property
    def files(self) -> set[str]:
        return {self.path}

    @property
    def readers(self) -> int:
        return stores.holding(self.path)[0].readers

    @property
    def chunk(self) -> tuple[int, ...]:
        """The piece in whose multiples windows are cut: a row."""
        return tuple(1 if i < len(self.shape) - 1 else max(n, 1) for i, n in enumerate(self.shape))

    def only(self, box: Box) -> RawTensor:
        return self

    def planned(self, box: Box) -> int:
        return sum(n for _, _, n in self._reads(box))

    def _reads(self, box: Box) -> Iterator[tuple[Box, bool, int]]:
        """(part of the box, whether it is one run of the file, bytes from its first to its last element)."""
        if box.size == 0:
            return
        item = self.dtype.itemsize
        all_runs = runs(box, self.shape)
        _, first, length = next(all_runs)
        second = next(all_runs, None)
        if second is None:
            yield box, True, length * item
            return
        stride = second[1] - first
        # Runs of one row each: read over the gaps where that is cheaper than to skip them.
        axis = next(i for i in range(len(self.shape) - 1, -1, -1) if box.shape[i] != self.shape[i]) - 1
        outer = [i for i in range(axis + 1) if box.shape[i] > 1]
        axis = outer[-1] if outer else axis
        gap, store = stride - length, stores.holding(self.path)[0]
        over = gap * item <= store.gap or stride * item <= store.row
        rows = max(1, store.batch // (stride * item)) if over else 1
        ranges = [
            range(box.offset[i], box.stop[i], rows if i == axis else 1) if i <= axis else (box.offset[i],)
            for i in range(len(self.shape))
        ]
        for start in itertools.product(*ranges):
            shape = tuple(
                min(rows, box.stop[i] - s) if i == axis else 1 if i < axis else box.shape[i]
                for i, s in enumerate(start)
            )
            n = shape[axis]
            yield Box(tuple(start), shape), n == 1, ((n - 1) * stride + length) * item

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        if self.crc32c is not None and box.size and box.shape == self.shape:
            if out.flags.c_contiguous:
                yield from self._checked(bytes_of(out))
            else:
                yield lambda: self._copied(out)
            return
        pending: list[tuple[Box, bool, int]] = []
        size, limit = 0, stores.holding(self.path)[0].job
        for read in self._reads(box):
            if read[1] and read[2] > limit and len(read[0].shape) and read[0].shape[0] > 1:
                # One long run: let several threads read it.
                part = read[0]
                rows = max(1, limit * part.shape[0] // read[2])
                for a in range(0, part.shape[0], rows):
                    b = min(rows, part.shape[0] - a)
                    piece = Box((part.offset[0] + a, *part.offset[1:]), (b, *part.shape[1:]))
                    group = [(piece, True, piece.size * self.dtype.itemsize)]
                    yield lambda g=group: self._read(box, out, g)
                continue
            pending.append(read)
            size += read[2]
            if size >= limit:
                yield lambda g=pending: self._read(box, out, g)
                pending, size = [], 0
        if pending:
            yield lambda g=pending: self._read(box, out, g)

    def _checked(self, out: np.ndarray) -> Iterator[Job]:
        """The whole tensor, in pieces for several threads; who ends last compares the checksum of all."""
        step = stores.holding(self.path)[0].job
        found: dict[int, int] = {}
        starts = range(0, out.size, step)
        yield from (lambda a=a: self._piece(out[a : a + step], a, found, len(starts), step) for a in starts)

    def _piece(self, out: np.ndarray, at: int, found: dict[int, int], count: int, step: int) -> int:
        value, batch = 0, stores.holding(self.path)[0].batch
        with opened(self.path, f"key {self.name!r}") as reader:
            self._check_length(reader)
            for a in range(0, out.size, batch):
                part = out[a : a + batch]
                if reader.readv([part], self.start + at + a) != part.size:
                    raise CorruptCheckpoint(f"{self.path} ends early (key {self.name!r})")
                value = crc32c(part, value)
        found[at] = value
        if len(found) == count:  # two that end together both compare, which harms nothing
            total = math.prod(self.shape) * self.dtype.itemsize
            value = 0
            for a in range(0, total, step):
                value = combine(value, found[a], min(step, total - a))
            if value != self.crc32c:
                raise self.damaged()
        return out.size

    def _copied(self, out: np.ndarray) -> int:
        held = np.empty(self.shape, self.dtype)
        total = sum(job() for job in self._checked(bytes_of(held)))
        out[...] = held
        return total

    def _check_length(self, reader: stores.Reader) -> None:
        if reader.nbytes != self.file_nbytes:
            raise CorruptCheckpoint(f"{self.path} had {self.file_nbytes} bytes when it was opened, now {reader.nbytes}")

    def damaged(self) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self.path}: key {self.name!r} does not fit its crc32c; restore the file or another checkpoint"
        )

    def verify(self) -> int:
        """Compare every byte with the checksum, in little memory; returns their number. Raises as a read does."""
        nbytes = getattr(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)  # packed bits know their own
        with opened(self.path, f"key {self.name!r}") as reader:
            self._check_length(reader)
            if of_range(reader, self.start, nbytes) != self.crc32c:
                raise self.damaged()
        return nbytes

    def _read(self, box: Box, out: np.ndarray, group: list[tuple[Box, bool, int]]) -> int:
        item = self.dtype.itemsize
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        total = 0
        with opened(self.path, f"key {self.name!r}") as reader:
            for part, one_run, nbytes in group:
                place = _view(out, part.within(box))
                offset = self.start + item * sum(o * s for o, s in zip(part.offset, strides, strict=True))
                direct = one_run and place.flags.c_contiguous
                buffer = bytes_of(place) if direct else scratch("read", nbytes)
                done = reader.readv([buffer], offset)
                self._check_length(reader)
                if done != nbytes:
                    raise CorruptCheckpoint(f"{self.path} ends early (key {self.name!r})")
                total += done
                if not direct:
                    # The constructor, as NumPy's own function for this does not know float8.
                    place[...] = np.ndarray(part.shape, self.dtype, buffer, 0, [s * item for s in strides])
        return total


@dataclass(frozen=True, slots=True)
class PackedTensor(RawTensor):
    """A tensor of 4- or 6-bit numbers, which is listed and checked, and whose values NumPy cannot hold as they are stored."""

    nbytes: int = 0

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        raise CheckpointDTypeError(
            f"{self.path}: key {self.name!r} is {self.dtype.name} in packed bits, which meshtape lists and does not unpack; leave it out with keys="
        )


class StoredTensor(Protocol):
    """The face that all of them have."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def chunk(self) -> tuple[int, ...]: ...

    @property
    def readers(self) -> int: ...

    def only(self, box: Box) -> StoredTensor: ...

    def planned(self, box: Box) -> int: ...

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]: ...


def read_box(tensor: StoredTensor, box: Box | None = None) -> tuple[np.ndarray, int]:
    """The elements of ``box`` (all by default) as a new NumPy array, and the bytes that it took."""
    box = Box.whole(tensor.shape) if box is None else box
    if box.size * tensor.dtype.itemsize >= 1 << 62:
        raise CheckpointError(
            f"key {tensor.name!r}: {box.shape} elements are more than any memory; read smaller slices"
        )
    out = np.empty(box.shape, tensor.dtype)
    return out, run(list(tensor.jobs(box, out)), tensor.readers)
