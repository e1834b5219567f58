"""Chunks that keep their bytes when a checkpoint is cut anew: checked on their way, and copied as they are stored.

Two grids of one array that agree on the chunk differ only in which file holds it, and where. So nothing is taken apart: runs of chunks
that lie together in both files pass through memory that stays in a processor's cache, each with the checksum that follows it.
"""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import stores
from .files import active
from .grid import Grid, ravel
from .scratch import scratch
from .tensors import ChunkedTensor, opened

Coord = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A chunk: its index in the array, and the shard and the number there, in the target and in the source."""

    index: Coord
    target: Coord
    to: int
    source: Coord
    at: int


def keeps_bytes(tensor: Any, grid: Grid, dtype: np.dtype) -> bool:
    """Whether the stored chunks of ``tensor`` are those of an array of ``grid``."""
    return (
        isinstance(tensor, ChunkedTensor)
        and bool(grid.shape)  # a 0-d array is a bare chunk
        and tensor.grid.shape == grid.shape
        and tensor.grid.chunk == grid.chunk
        and tensor.dtype == dtype
    )


def moves(source: Grid, target: Grid, chunks: Sequence[Coord]) -> list[Move]:
    """Where chunks lie, in the order in which files are opened once for all that they share.

    >>> two, four = Grid((1, 4), (1, 2), (1, 1)), Grid((1, 4), (1, 1), (1, 1))
    >>> [(m.target, m.to, m.source, m.at) for m in moves(four, two, [(0, 2), (0, 3)])]
    [((0, 1), 0, (0, 2), 0), ((0, 1), 1, (0, 3), 0)]
    """
    at, to = _Places(source), _Places(target)
    found = [Move(i, *to(i), *at(i)) for i in chunks]
    return sorted(found, key=lambda m: (m.target, m.source, m.to))


class _Places:
    """(shard, number in it) of chunks of an array."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self._per = grid, grid.chunks_in_shard
        self._present: dict[Coord, tuple[int, ...]] = {}

    def __call__(self, index: Coord) -> tuple[Coord, int]:
        coord = tuple(i // k for i, k in zip(index, self._per, strict=True))
        present = self._present.get(coord)
        if present is None:
            present = self._present[coord] = self._grid.present(coord)
        return coord, ravel([i % k for i, k in zip(index, self._per, strict=True)], present)


def _runs(found: Sequence[Move], longest: int) -> Iterator[list[Move]]:
    """Chunks that follow one another in both files, at most ``longest`` at a time."""
    run: list[Move] = []
    for m in found:
        if run and (m.to != run[-1].to + 1 or m.at != run[-1].at + 1 or len(run) == longest):
            yield run
            run = []
        run.append(m)
    if run:
        yield run


def copy_chunks(
    tensor: ChunkedTensor, grid: Grid, chunks: Sequence[Coord], path_of: Callable[[Coord], str]
) -> dict[Coord, int]:
    """Copy chunks of ``tensor`` to the files ``path_of(shard)``, which exist; returns the checksum of each.

    Raises what reading the tensor would: every chunk is compared with its checksum before it is written.
    """
    fs = active()
    nbytes = math.prod(grid.chunk) * tensor.dtype.itemsize + 4
    longest = max(1, stores.at(tensor.root).batch // nbytes)
    held = scratch("copy", min(longest, len(chunks)) * nbytes)
    out: dict[Coord, int] = {}
    found = moves(tensor.grid, grid, chunks)
    for target, theirs in itertools.groupby(found, key=lambda m: m.target):
        fd = fs.open(path_of(target))
        try:
            for source, group in itertools.groupby(theirs, key=lambda m: m.source):
                path = tensor.path(source)
                with opened(path, f"part of {tensor.name!r}") as reader:
                    for run in _runs(list(group), longest):
                        data = held[: len(run) * nbytes]
                        sums = tensor.read_stored(reader, path, source, run[0].at, data)
                        out.update(zip((m.index for m in run), sums, strict=True))
                        fs.write(fd, [data], run[0].to * nbytes)
        finally:
            fs.close(fd)
    return out
