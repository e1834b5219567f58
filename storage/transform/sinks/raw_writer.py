"""Windows of blocks that lie in a file as they are, row-major: tensors of safetensors files, and blocks of packs."""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ....arrays.core.blocks import Box
from ....arrays.core.errors import CorruptCheckpoint
from ...base.checksums import CASTAGNOLI, ZIP, combine, crc32c
from ...base.scratch import out_of_memory, scratch
from ...format import tensor_sums
from ...format.chunk_grid import runs
from ...readers.reading import SMALL, Job, run
from ...readers.tensor import read_into
from ...rules.casting import CastLoss, Tally, tallied
from ...rules.lazy_tensors import casts
from ...stores import store
from ...stores.filesystem import IOV_MAX, active, preadv
from .sink import CHECKED, Unit, WindowWriter, cut, touch

_ALIGNED = 16  # bytes: no item is longer
_TOGETHER = 512  # windows at most


def begin(root: str, heads: Mapping[str, bytes]) -> None:
    """Make files that start with a header, zeros in place of checksums; elements of an interrupted run stay."""
    fs = active()
    for file, head in heads.items():
        path = os.path.join(root, file)
        touch(fs, path)
        with fs.opened(path) as fd:
            fs.write(fd, [head], 0)


def seal(root: str, file: str, head: bytes, sums: Sequence[int], nbytes: int) -> bytes:
    """Write the header of a file of ``nbytes`` anew, with checksums; make the file durable; returns the header."""
    fs, head = active(), tensor_sums.sealed(head, sums)
    with fs.opened(os.path.join(root, file)) as fd:
        fs.write(fd, [head], 0)
        cut(fd, nbytes)
        fs.fsync(fd)
    return head


@dataclass(frozen=True, slots=True)
class RawWriter:
    """Windows of a block of an array, whose elements lie row-major from a place of a file on. The sum of a window is
    the crc32c of its elements.

    ``zipped``: their CRC32 comes second.
    """

    file: str
    start: int
    block: Box
    itemsize: int
    zipped: bool = False

    def raw_of(self, window: Box) -> RawWriter:
        """The writer of the block in which a window lies."""
        return self

    def sums(self, data: np.ndarray, start: Sequence[int] = (0, 0)) -> list[int]:
        """The sums of elements, continuing from ``start``."""
        zipped = [zlib.crc32(data.reshape(-1).view(np.uint8), start[1])] if self.zipped else []
        return [crc32c(data, start[0]), *zipped]

    def joined(self, root: str, written: Iterable[tuple[Box, list[int]]]) -> list[int]:
        """The sums of the block, from those of its windows; read back where these are not stretches of the file."""
        found: list[tuple[int, int, list[int]]] = []
        for window, sums in written:
            (_, start, length), *more = itertools.islice(runs(window.within(self.block), self.block.shape), 2)
            if more:
                return self._read_back(root)
            found.append((start, length * self.itemsize, sums))
        out = [0] * (1 + self.zipped)
        for _, nbytes, sums in sorted(found):
            out = [combine(a, b, nbytes, kind) for a, b, kind in zip(out, sums, (CASTAGNOLI, ZIP), strict=False)]
        return out

    def _read_back(self, root: str) -> list[int]:
        out, nbytes = [0] * (1 + self.zipped), self.block.size * self.itemsize
        with contextlib.closing(store.at(root).reader(self.file)) as reader:
            for at in range(0, nbytes, CHECKED):
                part = scratch("sum", min(CHECKED, nbytes - at))
                if reader.readv([part], self.start + at) != part.size:
                    raise CorruptCheckpoint(f"{self.file} ends early; nothing was committed")
                out = self.sums(part, out)
        return out


def put_all(
    writers: Sequence[WindowWriter], root: str, windows: Sequence[Box], tensors: Sequence[Any]
) -> list[tuple[list[int], CastLoss]]:
    """Write one window, or several of writers with ``raw_of``; returns checksums and losses of casts of each."""
    if not hasattr(writers[0], "raw_of"):
        tally = Tally()
        sums = tallied(tally, lambda: writers[0].put(root, windows[0], tensors[0]))
        return [(sums, sum(tally.values(), CastLoss()))]
    try:
        parts = _memory("window", windows, [t.dtype for t in tensors])
    except MemoryError as e:
        cure = "its chunk is read whole; give fewer threads=, or a lower memory_limit= where its chunks are smaller"
        raise out_of_memory(f"key {tensors[0].name!r}", e, cure) from None
    losses, jobs = [CastLoss()] * len(parts), list[Job]()
    for i, (window, tensor, part) in enumerate(zip(windows, tensors, parts, strict=True)):
        if casts(tensor):
            tally = Tally()
            tallied(tally, partial(read_into, tensor, window, part), name=tensor.name)
            losses[i] = sum(tally.values(), CastLoss())
        else:
            jobs += tensor.jobs(window, part)
    run(jobs, 1)  # in this thread, as other threads write other windows
    raws = [w.raw_of(window) for w, window in zip(writers, windows, strict=True)]
    _write(root, _stretches(raws, windows, parts))
    return list(zip([raw.sums(part) for raw, part in zip(raws, parts, strict=True)], losses, strict=True))


def check_all(
    writers: Sequence[WindowWriter], root: str, windows: Sequence[Box], sums: Sequence[list[int]]
) -> list[bool]:
    """Whether each of the windows that `put_all` has written reads back with its checksums."""
    if not hasattr(writers[0], "raw_of"):
        return [writers[0].check(root, windows[0], sums[0])]
    raws = [w.raw_of(window) for w, window in zip(writers, windows, strict=True)]
    parts = _memory("check", windows, [np.dtype((np.void, raw.itemsize)) for raw in raws])
    whole = all(_read(root, stretch) for stretch in _stretches(raws, windows, parts))
    return [whole and of == raw.sums(part) for raw, part, of in zip(raws, parts, sums, strict=True)]


def steps_of(
    left: Sequence[int], units: Sequence[Unit], sizes: Sequence[int], writers: Sequence[WindowWriter], limit: int
) -> list[list[int]]:
    """The windows ``left``, by number, in steps: one, or several small ones that have at most ``limit`` bytes."""
    out: list[list[int]] = []
    used = 0
    for n in left:
        small = sizes[n] <= SMALL and hasattr(writers[units[n].array], "raw_of")
        if not (small and 0 < used <= limit - sizes[n] and len(out[-1]) < _TOGETHER):
            out.append([])
            used = 0
        out[-1].append(n)
        used = used + sizes[n] if small else limit
    return out


def put_and_check(
    writers: Sequence[WindowWriter], root: str, windows: Sequence[Box], tensors: Sequence[Any]
) -> list[tuple[list[int], CastLoss, bool]]:
    """Write windows, and read them back: checksums and losses of each, and whether it is there as written.

    While other threads write others: reading takes processors and memory, writing waits for the disk.
    """
    done = put_all(writers, root, windows, tensors)
    same = check_all(writers, root, windows, [sums for sums, _ in done])
    return [(*row, whole) for row, whole in zip(done, same, strict=True)]


def _memory(use: str, windows: Sequence[Box], kinds: Sequence[np.dtype]) -> list[np.ndarray]:
    """Arrays for windows, in memory that this thread uses again."""
    sizes = [w.size * kind.itemsize for w, kind in zip(windows, kinds, strict=True)]
    held, at, out = scratch(use, sum(sizes) + _ALIGNED * len(sizes)), 0, []
    for window, kind, nbytes in zip(windows, kinds, sizes, strict=True):
        out.append(held[at : at + nbytes].view(kind).reshape(window.shape))
        at += -(-nbytes // _ALIGNED) * _ALIGNED
    return out


class _Stretch(NamedTuple):
    file: str
    place: int
    pieces: list[np.ndarray]


def _stretches(raws: Sequence[RawWriter], windows: Sequence[Box], parts: Sequence[np.ndarray]) -> list[_Stretch]:
    """The stretches of files that windows cover, with the pieces of ``parts`` that fill them."""
    out: list[_Stretch] = []
    file, end = "", -1
    for raw, window, part in zip(raws, windows, parts, strict=True):
        data, item = part.reshape(-1).view(np.uint8), raw.itemsize
        for inner, outer, length in runs(window.within(raw.block), raw.block.shape):
            place = raw.start + outer * item
            if place != end or raw.file != file or len(out[-1].pieces) == IOV_MAX:
                out.append(_Stretch(raw.file, place, []))
            out[-1].pieces.append(data[inner * item : (inner + length) * item])
            file, end = raw.file, place + length * item
    return out


def _write(root: str, stretches: Sequence[_Stretch]) -> None:
    fs = active()
    for file, some in itertools.groupby(stretches, key=attrgetter("file")):
        with fs.opened(os.path.join(root, file)) as fd:
            for _, place, pieces in some:
                fs.write(fd, pieces, place)


def _read(root: str, stretch: _Stretch) -> bool:
    with open(os.path.join(root, stretch.file), "rb", buffering=0) as f:
        return preadv(f.fileno(), stretch.pieces, stretch.place) == sum(b.nbytes for b in stretch.pieces)
