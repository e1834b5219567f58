"""Tensors that are one row-major range of a file, as those of safetensors are."""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import CheckpointDTypeError, CorruptCheckpoint
from . import generations, stores
from .checksums import combine, crc32c
from .generations import Generation
from .grid import runs
from .scratch import scratch
from .tensor_sums import of_range
from .tensors import Job, bytes_of, opened, view


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A row-major range of a file, bound to its generation by the tag of the file.

    With a checksum, whole reads are compared with it; a part cannot be.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    file_nbytes: int
    crc32c: int | None = None
    generation: Generation = generations.NONE

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

    def bound(self, generation: Generation) -> RawTensor:
        return replace(self, generation=generation)

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
        with opened(self.path, f"key {self.name!r}", self.generation) as reader:
            for a in range(0, out.size, batch):
                part = out[a : a + batch]
                if reader.readv([part], self.start + at + a) != part.size:
                    raise CorruptCheckpoint(f"{self.path} ends early (key {self.name!r})")
                value = crc32c(part, value)
            self._check_length(reader)
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
        generations.refuse(self.path, self.generation.tags.get(self.path, ""), reader.tag)
        if reader.nbytes != self.file_nbytes:
            raise CorruptCheckpoint(f"{self.path} had {self.file_nbytes} bytes when it was opened, now {reader.nbytes}")

    def damaged(self) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self.path}: key {self.name!r} does not fit its crc32c; restore the file or another checkpoint (verify=False reads it all the same)"
        )

    def verify(self) -> int:
        """Compare every byte with the checksum, in little memory; returns their number. Raises as a read does."""
        nbytes = getattr(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)  # packed bits know their own
        with opened(self.path, f"key {self.name!r}", self.generation) as reader:
            found = of_range(reader, self.start, nbytes)
            self._check_length(reader)
            if found != self.crc32c:
                raise self.damaged()
        return nbytes

    def _read(self, box: Box, out: np.ndarray, group: list[tuple[Box, bool, int]]) -> int:
        item = self.dtype.itemsize
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        total = 0
        with opened(self.path, f"key {self.name!r}", self.generation) as reader:
            for part, one_run, nbytes in group:
                place = view(out, part.within(box))
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
