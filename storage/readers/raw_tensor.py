"""Tensors that are one row-major range of a file, as in safetensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointDTypeError, CorruptCheckpoint
from ..base.checksums import combine, crc32c
from ..base.scratch import room, scratch
from ..format.tensor_sums import of_range
from ..stores import generations
from ..stores import store as stores
from ..stores.contract import Reader
from ..stores.generations import Generation
from .reading import SMALL, Job, RangeJob, opened
from .tensor import buffer_of, bytes_of, rows_of, view

_SHORT = 4 << 10  # bytes of a row that is sooner copied to its place than read there


class _EqualRows(NamedTuple):
    """A part of a box, as rows that lie at equal distances in the file."""

    part: Box
    axis: int  # along which they follow one another
    count: int
    stride: int  # elements from one to the next
    length: int  # elements from the first to the last of one
    dense: bool  # whether a row has no gaps

    @property
    def span(self) -> int:
        return (self.count - 1) * self.stride + self.length


@dataclass(slots=True, eq=False)  # not frozen, as in ``tensor``
class RawTensor:
    """A row-major range of a file, bound to its generation by the tag of the file.

    With a checksum, whole reads are compared with it; a part cannot be.
    """

    how: ClassVar[str] = "one run of bytes in a file"
    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    file_nbytes: int
    crc32c: int | None = None
    generation: Generation = field(default=generations.NONE, kw_only=True)
    strides: tuple[int, ...] | None = field(default=None, kw_only=True)  # in elements; None: row-major
    said: str = field(default="", kw_only=True)  # attributes by another writer, see ``zarr_format``

    @property
    def summed(self) -> bool:
        return self.crc32c is not None

    @property
    def stored_nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def files(self) -> set[str]:
        return {self.path}

    @property
    def readers(self) -> int:
        return stores.holding(self.path)[0].readers

    @property
    def chunk(self) -> tuple[int, ...]:
        """The piece in whose multiples windows are cut: a row."""
        return rows_of(self.shape)

    def only(self, box: Box) -> RawTensor:
        return self

    def bound(self, generation: Generation) -> RawTensor:
        self.generation = generation
        return self

    def planned(self, box: Box) -> int:
        return sum(rows.span for rows in self._reads(box)) * self.dtype.itemsize

    def _steps(self) -> tuple[int, ...]:
        return self.strides or tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def picks(self, picks: tuple[range, ...], out: np.ndarray) -> Iterator[Job]:
        """Calls that fill ``out`` from where ``picks`` meet: those places are an array of longer strides."""
        steps = self._steps()
        start = self.start + self.dtype.itemsize * sum(r.start * s for r, s in zip(picks, steps, strict=True))
        strides = tuple(r.step * s for r, s in zip(picks, steps, strict=True))
        part = replace(self, shape=out.shape, start=start, crc32c=None, strides=strides)
        return part.jobs(Box.whole(out.shape), out)

    def _over(self, stride: int, length: int, at_hand: bool) -> bool:
        """Whether reading the gaps between rows is cheaper than skipping them."""
        store, item = stores.holding(self.path)[0], self.dtype.itemsize
        if at_hand:
            return stride * item <= store.near
        return (stride - length) * item <= store.gap or stride * item <= store.row

    def _reads(self, box: Box) -> Iterator[_EqualRows]:
        """The box in pieces that one thread reads at a time."""
        if box.size == 0:
            return
        store, item, steps = stores.holding(self.path)[0], self.dtype.itemsize, self._steps()
        axis, count, stride, length, dense = 0, 1, 0, 1, True
        for i in reversed(range(len(self.shape))):
            n, step = box.shape[i], steps[i]
            if n == 1:
                continue
            if dense and step == length:
                length *= n
            elif n * step * item <= store.batch and self._over(step, length, True):
                length, dense = (n - 1) * step + length, False
            else:
                unit = step if self._over(step, length, False) else length
                axis, stride, count = i, step, max(1, min(n, store.job // (unit * item)))
                break
        ranges = [
            (o,) if stride == 0 or i > axis else range(o, e, count if i == axis else 1)
            for i, (o, e) in enumerate(zip(box.offset, box.stop, strict=True))
        ]
        for start in itertools.product(*ranges):
            n = min(count, box.stop[axis] - start[axis]) if stride else 1
            shape = tuple(m if i > axis or not stride else n if i == axis else 1 for i, m in enumerate(box.shape))
            yield _EqualRows(Box(start, shape), axis, n, stride, length, dense)

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        whole = self.strides is None and out.nbytes > 0 and box.shape == self.shape and out.flags.c_contiguous
        # A request costs as much as so many bytes: neighbours share one.
        if whole and (out.nbytes <= SMALL or out.nbytes <= stores.holding(self.path)[0].gap):
            yield RangeJob(self, None, self.path, self.start, out.nbytes, -1, self.crc32c, buffer_of(out))
            return
        if self.crc32c is not None and box.size and box.shape == self.shape:
            if out.flags.c_contiguous:
                yield from self._checked(bytes_of(out))
            else:
                yield lambda: self._copied(out)
            return
        pending: list[_EqualRows] = []
        size, limit = 0, stores.holding(self.path)[0].job
        for rows in self._reads(box):
            part, nbytes = rows.part, rows.span * self.dtype.itemsize
            if rows.dense and rows.count == 1 and nbytes > limit and part.shape and part.shape[0] > 1:
                # One long run: let several threads read it.
                n = max(1, limit * part.shape[0] // nbytes)
                for a in range(0, part.shape[0], n):
                    b = min(n, part.shape[0] - a)
                    piece = Box((part.offset[0] + a, *part.offset[1:]), (b, *part.shape[1:]))
                    group = list(self._reads(piece))
                    yield lambda g=group: self._read(box, out, g)
                continue
            pending.append(rows)
            size += rows.part.size * self.dtype.itemsize if rows.count > 1 else nbytes
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
            self.check_length(reader)
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
        held = room(self.name, self.shape, self.dtype)
        total = sum(job() for job in self._checked(bytes_of(held)))
        out[...] = held
        return total

    def check_length(self, reader: Reader, coord: None = None, path: str = "") -> None:
        generations.refuse(self.path, self.generation.tags.get(self.path, ""), reader.tag)
        if reader.nbytes != self.file_nbytes:
            raise CorruptCheckpoint(f"{self.path} had {self.file_nbytes} bytes when it was opened, now {reader.nbytes}")

    def refused(self, coord: None, value: int) -> CorruptCheckpoint:
        return self.damaged()

    def damaged(self) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self.path}: key {self.name!r} does not fit its crc32c; restore the file or another checkpoint "
            "(mt.load with verify=False reads it all the same)"
        )

    def verify(self) -> int:
        """Compare every byte with the checksum, in little memory; returns their number. Raises as a read does."""
        nbytes = self.stored_nbytes
        with opened(self.path, f"key {self.name!r}", self.generation) as reader:
            found = of_range(reader, self.start, nbytes)
            self.check_length(reader)
            if found != self.crc32c:
                raise self.damaged()
        return nbytes

    def _read(self, box: Box, out: np.ndarray, group: list[_EqualRows]) -> int:
        item, steps, batch = self.dtype.itemsize, self._steps(), stores.holding(self.path)[0].batch
        total = 0
        with opened(self.path, f"key {self.name!r}", self.generation) as reader:
            for part, axis, count, stride, length, dense in group:
                target = view(out, part.within(box))
                start = self.start + item * sum(o * s for o, s in zip(part.offset, steps, strict=True))
                unit = stride if count > 1 and self._over(stride, length, False) else length
                most = max(1, batch // (unit * item))
                for k in range(0, count, most):
                    n, at = min(most, count - k), start + k * stride * item
                    place = target if n == count else target[(slice(None),) * axis + (slice(k, k + n), ...)]
                    over = n > 1 and self._over(stride, length, reader.at_hand(at))
                    apart = stride if over else length
                    nbytes = (apart * (n - 1) + length) * item
                    direct = dense and (n == 1 or apart == length) and place.flags.c_contiguous
                    size, far = length * item, stride * item
                    gather = None if over or n == 1 or size > _SHORT else getattr(reader, "gather", None)
                    if gather is not None:
                        direct, buffer = False, gather(size, range(at, at + n * far, far))
                        done = len(buffer)
                    else:
                        buffer = bytes_of(place) if direct else scratch("read", nbytes)
                        if over or n == 1:
                            done = reader.readv([buffer], at)
                        else:
                            rows = memoryview(buffer)
                            done = sum(reader.readv([rows[j * size : j * size + size]], at + j * far) for j in range(n))
                    self.check_length(reader)
                    if done != nbytes:
                        raise CorruptCheckpoint(f"{self.path} ends early (key {self.name!r})")
                    total += done
                    if not direct:
                        apart_by = [(apart if i == axis and count > 1 else s) * item for i, s in enumerate(steps)]
                        # The constructor, as NumPy's own function for this does not know float8.
                        place[...] = np.ndarray(place.shape, self.dtype, buffer, 0, apart_by)
        return total


@dataclass(slots=True, eq=False)
class PackedTensor(RawTensor):
    """A tensor of 4- or 6-bit numbers, which is listed and checked, and whose values NumPy cannot hold as they are
    stored."""

    how: ClassVar[str] = "one run of packed bits in a file"
    nbytes: int = 0

    @property
    def stored_nbytes(self) -> int:
        return self.nbytes

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        raise CheckpointDTypeError(
            f"{self.path}: key {self.name!r} is {self.dtype.name} in packed bits, which meshtape lists and does not "
            "unpack; leave it out with keys="
        )
