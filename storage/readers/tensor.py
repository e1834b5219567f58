"""Stored tensors: arrays in files, of which any box is read with as few bytes as the format allows.

`StoredTensor` is the interface of all formats. `ChunkedTensor`, here, reads our Zarr shards: each touched chunk is read
whole and compared with the crc32c of its place. ``raw_tensor`` reads a row-major range of a file; other formats have
files of their own. All tensors are small picklable values, so that a plan can be sent to another process. ``jobs`` cuts
a read into independent calls, each of which returns the number of bytes that it read; `reading.run` executes many of
them on threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from ...arrays.core.formatting import count, some
from ...arrays.native.copies import stream
from ..base import names, strict_json
from ..base.checksums import crc32c
from ..base.scratch import out_of_memory, room, scratch
from ..format import dtypes
from ..format.chunk_grid import ChunkGrid, Coord, cells, only_shard, place_of, ravel
from ..format.stored_objects import StoredObject
from ..format.zarr_format import said_of
from ..stores import generations, store
from ..stores.contract import Reader
from ..stores.filesystem import IOV_MAX
from ..stores.generations import Generation
from .reading import SMALL, Job, RangeJob, opened, run
from .shared import jobs_of, once

_PAST_CACHES = 1 << 20  # bytes of a result


def view(a: np.ndarray, box: Box) -> np.ndarray:
    """The part of ``a`` in ``box``; a view even of a 0-d array, where ``a[()]`` would be a scalar."""
    return a[(*box.slices, ...)]


def rows_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The chunk of a tensor without chunks: a row."""
    return tuple(1 if i < len(shape) - 1 else max(n, 1) for i, n in enumerate(shape))


def read_into(tensor: Any, box: Box, out: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """(the elements of a box, the bytes that were read), in this thread."""
    try:
        out = np.empty(box.shape, tensor.dtype) if out is None else out
        return out, sum(job() for job in jobs_of(tensor, box, out))
    except MemoryError as e:
        raise out_of_memory(f"key {tensor.name!r}", e) from None


def bytes_of(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1).view(np.uint8)


def buffer_of(a: np.ndarray) -> np.ndarray:
    """The array as a buffer: dtypes that are not NumPy's own are none."""
    return a if a.dtype.isbuiltin == 1 else bytes_of(a)


# ----- our Zarr shards ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)  # not frozen: there may be a hundred thousand, which take three times as long to make
class ChunkedTensor:
    """An array of a meshtape checkpoint. Offsets follow from the grid; the shard index is not needed.

    A chunk is compared with the checksum that the manifest has for its place. The checksum stored beside a chunk serves
    other readers, and this one where a manifest of an earlier version has no table.
    """

    root: str
    name: str
    dtype: np.dtype
    grid: ChunkGrid
    objects: Mapping[Coord, StoredObject]
    verify: bool = True  # compare each chunk with its checksum
    sums: Mapping[Coord, np.ndarray] | None = None  # of the chunks of each shard, where shards hold several
    generation: Generation = generations.NONE

    beside: ClassVar[int] = 4  # bytes of the checksum behind each chunk

    @property
    def how(self) -> str:
        return "a Zarr v3 array: shards of chunks, each chunk with its crc32c"

    @property
    def readers(self) -> int:
        return store.at(self.root).readers

    def bound(self, generation: Generation) -> ChunkedTensor:
        self.generation = generation
        return self

    @property
    def directory(self) -> str:
        return next((o.file.partition("/")[0] for o in self.objects.values()), "")

    @property
    def said(self) -> str:
        """What another writer has said of the array, see ``zarr_format``; read when it is asked for."""
        directory = getattr(self.objects, "directory", "")
        if not directory:  # it is in a pack
            return ""
        file = f"{directory}/zarr.json"
        try:
            text = store.at(self.root).get(file)
            if getattr(self.objects, "zarr", None) not in (None, crc32c(text)):
                raise ValueError("it does not fit its crc32c")
            return said_of(strict_json.loads(text), self.name)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as e:
            self.generation.check()
            raise CorruptCheckpoint(f"{self.root}: {file} is missing or damaged: {e}") from None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grid.shape

    @property
    def chunk(self) -> tuple[int, ...]:
        return self.grid.chunk

    def only(self, box: Box) -> ChunkedTensor:
        """The same tensor with just the objects that ``box`` needs, for sending to another process."""
        needed = list(self._shards(box))
        with self.generation.guarded():
            sums = None if self.sums is None or not self.verify else {c: self.sums[c] for c in needed}
        return replace(self, objects={c: self.objects[c] for c in needed}, sums=sums)

    def check(self) -> None:
        """Raise `IncompleteCheckpoint`, listing all, when files are missing."""
        objects = self.objects
        files = [objects[c].file for c in self._shards(Box.whole(self.grid.shape))]
        lost = store.missing(self.root, files[0].partition("/")[0] if files else "", files)
        if lost:
            self.generation.check()
            raise IncompleteCheckpoint(
                f"{self.root}: {len(lost):,} of {count(len(self.objects), 'file')} of key {self.name!r} missing: "
                f"{some(lost)}; restore them or another checkpoint"
            )

    def _shards(self, box: Box) -> Iterable[Coord]:
        if (alone := only_shard(self.grid)) is not None and box.shape == self.grid.shape:
            return (alone,)
        return cells(box, self.grid.shard)

    def planned(self, box: Box) -> int:
        """Bytes that reading ``box`` takes from files."""
        unit = math.prod(self.grid.chunk) * self.dtype.itemsize + self.beside
        spans = zip(box.offset, box.stop, self.grid.chunk, strict=True)
        return unit * math.prod(-(-b // c) - a // c for a, b, c in spans) if box.size else 0

    def jobs(self, box: Box, out: np.ndarray) -> Iterable[Job]:
        """Calls that together fill ``out`` (of the box's shape) with the elements of ``box``."""
        if (alone := only_shard(self.grid)) is not None and box.shape == self.grid.shape:
            job = self._range(alone, self.objects[alone], out)
            if job is not None:
                return (job,)
        return self._jobs(box, out)

    def _range(self, coord: Coord, stored: StoredObject, out: np.ndarray) -> RangeJob | None:
        """The read of a shard that is one small chunk without padding, directly into ``out``."""
        _, shard, chunk = self.grid
        if stored.nbytes > SMALL or not chunk == shard == out.shape or not out.flags.c_contiguous:
            return None
        path = f"{self.root}/{stored.file}"  # a name of ours below one that was looked at
        value, to = stored.crc32c if self.verify else None, buffer_of(out)
        return RangeJob(self, coord, path, stored.start, out.nbytes, stored.nbytes, value, to, None, self.root)

    def _jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        unit = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        step = max(1, store.at(self.root).job // unit)
        for coord in self._shards(box):
            stored = self.objects[coord]
            if box == stored.box:
                if (job := self._range(coord, stored, out)) is not None:
                    yield job
                    continue
                local, target = Box.whole(box.shape), out
            elif (part := box.intersect(stored.box)) is not None:  # 0-d boxes always meet
                local, target = part.within(stored.box), view(out, part.within(box))
            else:  # only a box beyond the array ends here
                continue
            chunks = list(cells(local, self.grid.chunk))
            for first in range(0, len(chunks), step):
                yield lambda c=coord, t=target, b=local, group=chunks[first : first + step]: self._read(c, b, t, group)

    def refused(self, coord: Coord, value: int) -> CorruptCheckpoint:
        """The error for the one chunk of a shard, whose bytes have the checksum ``value``."""
        path = self.path(coord)
        with opened(path, f"part of {self.name!r}", self.generation) as reader:
            beside = np.empty(1, "<u4")
            reader.readv([beside], math.prod(self.grid.chunk) * self.dtype.itemsize)
        return self.damaged(path, 0, coord, value, int(beside[0]))

    def path(self, coord: Coord) -> str:
        """The file of a shard."""
        return names.inside(self.root, self.objects[coord].file, f"{self.root}: {self.name!r}")

    def read_stored(self, reader: Reader, path: str, coord: Coord, first: int, out: np.ndarray) -> list[int]:
        """Fill ``out`` with chunks of a shard as they are stored, checksums included, from number ``first`` on; returns
        the checksums.

        Raises `CorruptCheckpoint` where one does not fit, whatever ``verify`` says: the bytes are to be stored again.
        """
        nbytes = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        done = reader.readv([out], first * nbytes)
        self.check_length(reader, coord, path)
        if done != out.size:
            raise self.cut(path)
        return [self.checked(path, coord, first + k, row) for k, row in enumerate(out.reshape(-1, nbytes))]

    def wanted(self, coord: Coord) -> Any:
        """The checksums of the chunks of a shard, in their order, as the manifest knows them; None where it does
        not."""
        if self.sums is not None:
            return self.sums[coord]
        return [self.objects[coord].crc32c] if math.prod(self.grid.chunks_in_shard) == 1 else None

    def checked(self, path: str, coord: Coord, number: int, stored: np.ndarray) -> int:
        """The checksum of a chunk as it is stored; raises where it is not the one beside it, or not that of its
        place."""
        value, wanted = crc32c(stored[:-4]), self.wanted(coord)
        if value.to_bytes(4, "little") != stored[-4:].tobytes() or (wanted is not None and value != wanted[number]):
            raise self.damaged(path, number, coord, value, int.from_bytes(stored[-4:].tobytes(), "little"))
        return value

    def check_length(self, reader: Reader, coord: Coord, path: str) -> None:
        held = self.objects[coord]
        if reader.nbytes != (wanted := held.nbytes if held.file_nbytes < 0 else held.file_nbytes):
            raise CorruptCheckpoint(f"{path} has {reader.nbytes} bytes, the manifest says {wanted} (key {self.name!r})")

    def cut(self, path: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{path} ends early (key {self.name!r}); it changed while it was read")

    def index_of(self, number: int, coord: Coord) -> Coord:
        """The place in its shard of the chunk that lies there as number ``number``."""
        return tuple(int(i) for i in np.unravel_index(number, self.grid.present(coord))) if self.grid.shape else ()

    def damaged(self, path: str, number: int, coord: Coord, value: int, beside: int) -> CorruptCheckpoint:
        """The error for a chunk: ``value`` is the checksum of its bytes, ``beside`` the one that is stored with
        them."""
        chunk = f"{path}: chunk {self.index_of(number, coord)} of key {self.name!r}"
        if value == beside:
            return CorruptCheckpoint(
                f"{chunk} is whole, but not the one that belongs there: it comes from another place or another save; "
                "restore the file or another checkpoint"
            )
        return CorruptCheckpoint(
            f"{chunk} does not fit its crc32c{self.extent(number)}; restore the file or another checkpoint"
        )

    def stored_shape(self, coord: Coord, index: Coord) -> tuple[int, ...]:
        """The shape of a chunk as it lies in the file of its shard."""
        return self.grid.chunk

    def extent(self, number: int) -> str:
        """The place of a chunk in its file, for a message."""
        nbytes = math.prod(self.grid.chunk) * self.dtype.itemsize + 4
        return f" (bytes {number * nbytes} to {(number + 1) * nbytes})"

    def _read(self, coord: Coord, local: Box, target: np.ndarray, chunks: list[Coord]) -> int:
        """Read some chunks of one shard; ``target`` is the memory of the box ``local``, counted within the shard."""
        grid, path, begin = self.grid, self.path(coord), self.objects[coord].start
        nbytes = math.prod(grid.chunk) * self.dtype.itemsize
        present = place_of(grid, coord, self.dtype.itemsize).present
        meets = [overlaps(*d) for d in zip(grid.chunk, local.offset, local.shape, strict=True)]
        # Chunks that are rows of the target are read where they belong; others are copied there. Only a few at a time:
        # they are still in a processor's cache when their checksum is taken.
        slots = max(1, min(store.at(self.root).batch // max(nbytes, 1), IOV_MAX // 2, len(chunks)))
        sums = np.empty((slots, 1), "<u4")
        # Copies bypass the caches where those hold the chunk that comes. Extension dtypes have no buffers, so their
        # bits are copied.
        copy = stream if target.nbytes >= _PAST_CACHES else np.copyto
        dtype = dtypes.bits(self.dtype)
        target = target.view(dtype)
        staging = None
        total = 0
        with opened(path, f"part of {self.name!r}", self.generation) as reader:
            wanted = self.wanted(coord) if self.verify else None
            for number, group in consecutive(chunks, present, slots):
                buffers: list[np.ndarray] = []
                asked: list[np.ndarray] = []
                copies: list[tuple[np.ndarray, np.ndarray]] = []
                for k, index in enumerate(group):
                    whole = self.stored_shape(coord, index)
                    parts = [o[i] for o, i in zip(meets, index, strict=True)]
                    place = target[(*(p[0] for p in parts), ...)]
                    if place.shape == whole and place.flags.c_contiguous:
                        held = place
                    else:
                        if staging is None:
                            staging = scratch("read", slots * nbytes).view(dtype).reshape(slots, *grid.chunk)
                        held = staging[(k, *map(slice, whole))]
                        copies.append((place, held[(*(p[1] for p in parts), ...)]))
                    buffers.append(bytes_of(held))
                    asked += (buffers[-1], sums[k]) if self.beside else (buffers[-1],)
                done = reader.readv(asked, begin + number * (nbytes + self.beside))
                if not total:
                    self.check_length(reader, coord, path)
                if done != sum(b.size for b in buffers) + self.beside * len(group):
                    raise self.cut(path)
                total += done
                for k, data in enumerate(buffers if self.verify and (self.beside or wanted is not None) else ()):
                    value = crc32c(data)
                    beside = int(sums[k, 0]) if self.beside else ~value
                    if value != (beside if wanted is None else wanted[number + k]):
                        raise self.damaged(path, number + k, coord, value, beside)
                for place, source in copies:
                    copy(place, source)
        if wanted is None:  # nothing binds these bytes to what was opened
            self.generation.check()
        return total


def overlaps(chunk: int, start: int, length: int) -> dict[int, tuple[slice, slice, bool]]:
    """For each chunk that meets a range of a dimension: (its place in the range, the part of it there, whether all)."""
    out = {}
    for i in range(start // chunk, -(-(start + length) // chunk)):
        lo, hi = max(i * chunk, start), min((i + 1) * chunk, start + length)
        out[i] = slice(lo - start, hi - start), slice(lo - i * chunk, hi - i * chunk), hi - lo == chunk
    return out


def consecutive(chunks: list[Coord], present: Coord, limit: int) -> Iterator[tuple[int, list[Coord]]]:
    """(number of the first, all) of at most ``limit`` chunks that lie one after the other in the file."""
    group: list[Coord] = []
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


class StoredTensor(Protocol):
    """The interface of all stored tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def how(self) -> str:
        """How its elements lie in files, for people."""
        ...

    @property
    def chunk(self) -> tuple[int, ...]: ...

    @property
    def readers(self) -> int: ...

    def only(self, box: Box) -> StoredTensor: ...

    def bound(self, generation: Generation) -> StoredTensor: ...

    def planned(self, box: Box) -> int: ...

    def jobs(self, box: Box, out: np.ndarray) -> Iterable[Job]: ...


def read_box(tensor: StoredTensor, box: Box | None = None) -> tuple[np.ndarray, int]:
    """The elements of ``box`` (all by default) as a new NumPy array, and the number of bytes read."""
    box = Box.whole(tensor.shape) if box is None else box
    out = _room(tensor, box.shape)
    return out, _run(tensor, tensor.jobs(box, out))


def _run(tensor: StoredTensor, jobs: Iterable[Job]) -> int:
    try:
        return run(list(jobs), tensor.readers)
    except MemoryError as e:
        raise out_of_memory(f"key {tensor.name!r}", e) from None


def _room(tensor: StoredTensor, shape: tuple[int, ...]) -> np.ndarray:
    if math.prod(shape) * tensor.dtype.itemsize >= 1 << 62:
        raise CheckpointError(f"key {tensor.name!r}: {shape} elements are more than any memory; read smaller slices")
    return room(tensor.name, shape, tensor.dtype)


# ----- places with steps between them ---------------------------------------------------------------------------------

_WINDOW = 8 << 20  # bytes that a thread holds of what lies between the places
_SKIPPED = 64 << 10  # bytes that a window reads between two places; where there are more, each has one of its own


def read_picks(tensor: StoredTensor, picks: tuple[range, ...]) -> np.ndarray:
    """The elements at the ascending positions ``picks`` of each dimension, as a new array, read window by window."""
    shape = tuple(map(len, picks))
    if 0 in shape or all(r.step == 1 or len(r) == 1 for r in picks):
        return read_box(tensor, Box(tuple(r.start for r in picks), shape))[0]
    out = _room(tensor, shape)
    own = getattr(tensor, "picks", None)
    jobs = _windowed(tensor, picks, out) if own is None else own(picks, out)
    _run(tensor, jobs)
    return out


def _windowed(tensor: StoredTensor, picks: tuple[range, ...], out: np.ndarray) -> Iterator[Job]:
    """Calls that fill ``out`` through windows of whole chunks; each chunk with a picked position is read once."""
    reach = [r[-1] + 1 - r[0] for r in picks]
    unit = math.prod(map(min, tensor.chunk, reach)) * tensor.dtype.itemsize
    lengths = list(tensor.chunk)
    for axis in reversed(range(len(picks))):
        chunk = tensor.chunk[axis]
        one, two = (
            Box(tuple(r[0] for r in picks), (*(1 for _ in reach[:axis]), n, *reach[axis + 1 :]))
            for n in (1, min(picks[axis].step + 1, reach[axis]))
        )
        if once("planned", tensor, two) - 2 * once("planned", tensor, one) <= _SKIPPED:
            lengths[axis] = chunk * max(1, min(_WINDOW // max(unit, 1), -(-tensor.shape[axis] // chunk)))
        unit = unit // min(chunk, reach[axis]) * min(lengths[axis], reach[axis])
        if lengths[axis] < reach[axis]:
            break
    for part in itertools.product(*(list(_cut(r, n)) for r, n in zip(picks, lengths, strict=True))):
        yield lambda part=part: _window(tensor, [r[p] for r, p in zip(picks, part, strict=True)], out[part])


def _cut(picks: range, length: int) -> Iterator[slice]:
    """The picks in each window of a length, as slices; empty windows are left out."""
    at = 0
    while at < len(picks):
        stop = (picks[at] // length + 1) * length
        end = min(len(picks), -(-(stop - picks.start) // picks.step))
        yield slice(at, end)
        at = end


def _window(tensor: StoredTensor, picks: list[range], out: np.ndarray) -> int:
    box = Box(tuple(r[0] for r in picks), tuple(r[-1] + 1 - r[0] for r in picks))
    if box.shape == out.shape:
        return read_into(tensor, box, out)[1]
    held = scratch("picks", box.size * tensor.dtype.itemsize).view(tensor.dtype).reshape(box.shape)
    total = read_into(tensor, box, held)[1]
    out[...] = held[tuple(slice(None, None, r.step) for r in picks)]
    return total
