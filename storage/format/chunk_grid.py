"""The chunk grid of an array on disk: shard objects (one a mesh block) made of inner chunks.

An array of ``shape`` is a regular grid of *shards*, each a file; a shard is a regular grid of *chunks*, each with its
own crc32c. A chunk is the unit of verification, so a reader of some rows or columns reads at most one chunk too many at
each side. Matrices are therefore cut along columns too, in pieces that stay long enough to be read quickly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError

TARGET = 1 << 20  # bytes of a chunk: large enough to amortise Python, small enough for a CPU cache
SHORTEST_ROW = 1 << 10  # bytes: no chunk row is cut shorter than this
COLUMN_PARTS = 8
MAX_SHARDS = 1 << 16

Coord = tuple[int, ...]  # of a shard in its array, or a chunk in its shard


class ChunkGrid(NamedTuple):  # which hashes and compares without a call of Python's
    """Shape of an array, of its shards, and of the chunks in a shard (which divides the shard).

    >>> g = ChunkGrid((5, 4), (3, 4), (1, 4))
    >>> [g.shard_box(c).shape for c in g.shards()]
    [(3, 4), (2, 4)]
    """

    shape: tuple[int, ...]
    shard: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Shards along each dimension."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shard, strict=True))

    @property
    def chunks_in_shard(self) -> tuple[int, ...]:
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    def shards(self) -> Iterator[tuple[int, ...]]:
        """Coordinates of all shards that hold an element, in lexicographic order."""
        if (alone := only_shard(self)) is not None:
            return iter((alone,))
        return product([range(n) for n in self.counts])

    def shard_box(self, coord: Sequence[int]) -> Box:
        return self._cell(coord, self.shard)

    def chunk_box(self, index: Sequence[int]) -> Box:
        """The box of a chunk by its index in the array, where it ends with the array."""
        return self._cell(index, self.chunk)

    def _cell(self, index: Sequence[int], size: Sequence[int]) -> Box:
        offset = tuple(i * s for i, s in zip(index, size, strict=True))
        return Box(offset, tuple(min(s, n - o) for s, n, o in zip(size, self.shape, offset, strict=True)))

    def shard_at(self, box: Box) -> tuple[int, ...]:
        """The coordinate of the shard in which a box begins."""
        return tuple(o // s for o, s in zip(box.offset, self.shard, strict=True))

    def place_in_shard(self, index: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(coordinate of its shard, index there) of a chunk, by its index in the array."""
        pairs = [divmod(i, k) for i, k in zip(index, self.chunks_in_shard, strict=True)]
        return tuple(shard for shard, _ in pairs), tuple(local for _, local in pairs)

    def present(self, coord: Sequence[int]) -> tuple[int, ...]:
        """Chunks along each dimension that hold an element of the array; the others of an edge shard are absent."""
        return tuple(-(-n // c) for n, c in zip(self.shard_box(coord).shape, self.chunk, strict=True))

    def object_nbytes(self, coord: Sequence[int], itemsize: int) -> int:
        """Size of the stored file of a shard: chunks with a checksum each, then the index with its own."""
        chunk = math.prod(self.chunk) * itemsize + 4
        if not self.shape:  # a 0-d array is one bare chunk
            return chunk
        return math.prod(self.present(coord)) * chunk + math.prod(self.chunks_in_shard) * 16 + 4

    def key(self, coord: Sequence[int]) -> str:
        """The Zarr key of a shard below its array: ``c.0.1``, or ``c`` for a 0-d array."""
        return ".".join(["c", *map(str, coord)])


class ShardPlace(NamedTuple):
    """All that the grid says of a shard."""

    number: int  # in lexicographic order
    key: str
    box: Box
    size: int  # elements
    present: tuple[int, ...]
    nbytes: int  # of its file, where nothing is compressed


@lru_cache(maxsize=1 << 14)
def place_of(grid: ChunkGrid, coord: tuple[int, ...], itemsize: int) -> ShardPlace:
    """The place of a shard, kept, as most arrays of a large checkpoint are alike; ``KeyError`` where the grid has no
    such shard."""
    counts = grid.counts
    if len(coord) != len(counts) or not all(0 <= i < n for i, n in zip(coord, counts, strict=True)):
        raise KeyError(coord)
    box, nbytes = grid.shard_box(coord), grid.object_nbytes(coord, itemsize)
    if box.shape == grid.shape:
        box = Box.whole(grid.shape)  # the one that all share, which is compared in no time
    return ShardPlace(ravel(coord, counts), grid.key(coord), box, box.size, grid.present(coord), nbytes)


@lru_cache(maxsize=1 << 14)
def only_shard(grid: ChunkGrid) -> tuple[int, ...] | None:
    """The coordinate of the one shard of an array that has just one; most have."""
    return (0,) * len(grid.shape) if all(n == 1 for n in grid.counts) else None


@lru_cache(maxsize=1 << 14)
def sizes_text(sizes: tuple[int, ...], between: str = ",") -> str:
    """Sizes as JSON.

    >>> sizes_text((2, 3))
    '[2,3]'
    """
    return f"[{between.join(map(str, sizes))}]"


def slashed_key(coord: Sequence[int]) -> str:
    """The name of a chunk below its array by Zarr's default encoding; `ChunkGrid.key` has that of our files.

    >>> slashed_key((0, 2)), slashed_key(())
    ('c/0/2', 'c')
    """
    return "/".join(["c", *map(str, coord)])


@lru_cache(maxsize=1024)
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _options(n: int, free: bool, wanted: int) -> set[int]:
    """Chunk lengths near ``wanted`` for a shard dimension of ``n``: at most one below and one above."""
    wanted = max(1, min(n, wanted))
    if free:
        # The only shard along this dimension may be rounded up, so its chunks need not divide the array.
        divisor = max(d for d in divisors(n) if d <= wanted)
        return {divisor if 2 * divisor >= wanted else -(-n // -(-n // wanted))}
    found = divisors(n)
    below = max(d for d in found if d <= wanted)
    above = min(d for d in found if d >= wanted)
    return {below, above}


def _choose_chunk(extent: tuple[int, ...], free: tuple[bool, ...], itemsize: int) -> tuple[int, ...]:
    if math.prod(extent) * itemsize <= TARGET:
        return extent
    last = len(extent) - 1
    if last == 0:
        columns = _options(extent[0], free[0], TARGET // itemsize)
    else:
        wanted = {max(-(-extent[last] // k), -(-SHORTEST_ROW // itemsize)) for k in (1, 2, 4, COLUMN_PARTS)}
        columns = set().union(*(_options(extent[last], free[last], w) for w in wanted))
        columns = {c for c in columns if c * itemsize >= SHORTEST_ROW} | {extent[last]}
    candidates: list[tuple[int, ...]] = []
    for c in columns:
        heads: list[tuple[int, ...]] = [(c,)]
        for axis in range(last - 1, -1, -1):
            grown = []
            for head in heads:
                room = TARGET // (math.prod(head) * itemsize)
                cut = any(h < extent[axis + 1 + i] for i, h in enumerate(head[:-1]))
                lengths = {1} if cut else _options(extent[axis], free[axis], room)
                grown += [(n, *head) for n in lengths]
            heads = grown
        candidates += heads

    def badness(chunk: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        size = math.log2(math.prod(chunk) * itemsize / TARGET)
        parts = 1 if last == 0 else -(-extent[last] // chunk[last])
        return 2 * max(0.0, abs(size) - 1) + 0.25 * abs(size) + 0.5 * abs(math.log2(parts / COLUMN_PARTS)), chunk

    return min(candidates, key=badness)


@lru_cache(maxsize=1024)
def whole_grid(shape: tuple[int, ...], itemsize: int) -> ChunkGrid:
    """The grid of `choose_grid` for an unsplit array, cached, as most arrays of a large checkpoint are alike."""
    return choose_grid(shape, itemsize, [Box.whole(shape)])


def choose_grid(shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> ChunkGrid:
    """The grid in which each of ``boxes`` (the distinct blocks of an array) is a whole number of shards.

    Blocks that follow the ceil rule become one shard each. Blocks cut otherwise become several: the shard's length is
    then the greatest one that every block starts at a multiple of. The chunks are those of the unsplit array where they
    divide the shards: files for one mesh and for another then hold the same chunks, which a reshard copies as they are.

    >>> choose_grid((6, 4), 8, [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))])
    ChunkGrid(shape=(6, 4), shard=(3, 4), chunk=(3, 4))
    """
    extent, free = [], []
    for axis, n in enumerate(shape):
        starts = {b.offset[axis] for b in boxes if b.size}
        step = math.gcd(*starts) if len(starts) > 1 else 0
        extent.append(max(step or n, 1))
        free.append(not step)
    chunk = _choose_chunk(tuple(shape), (True,) * len(shape), itemsize) if math.prod(shape) else tuple(extent)
    if any(e % c for e, c, f in zip(extent, chunk, free, strict=True) if not f):
        chunk = _choose_chunk(tuple(extent), tuple(free), itemsize)
    # Along a dimension that is not split, the shard is rounded up to whole chunks.
    shard = tuple(-(-e // c) * c for e, c in zip(extent, chunk, strict=True))
    grid = ChunkGrid(tuple(shape), shard, chunk)
    if math.prod(grid.counts) > max(MAX_SHARDS, 4 * len(boxes)):
        raise CheckpointError(
            f"blocks of an array of shape {shape} start at places without a common step, which would need "
            f"{math.prod(grid.counts)} files; reshard it before saving"
        )
    return grid


def product(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """As `itertools.product`, which first writes out every range: those of hostile shapes fill the memory.

    >>> list(product([range(2), range(5, 7)])), next(product([range(10**30)] * 2))
    ([(0, 5), (0, 6), (1, 5), (1, 6)], (0, 0))
    >>> list(product([range(10**30), range(0)])), list(product([]))
    ([], [()])
    """
    if not ranges:
        return iter(((),))
    return ((*first, last) for first in product(ranges[:-1]) for last in ranges[-1]) if all(ranges) else iter(())


def cells(box: Box, size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices of the cells of a grid, each of this size, that a box meets, in lexicographic order.

    >>> list(cells(Box((0, 5), (4, 2)), (4, 3)))
    [(0, 1), (0, 2)]
    """
    spans = zip(box.offset, box.stop, size, strict=True)
    return product([range(a // c, -(-b // c)) for a, b, c in spans]) if box.size else iter(())


def windows(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes that cover an array in lexicographic order: whole chunks, in at most ``limit`` bytes where one chunk fits.

    >>> [b.offset for b in windows((4, 6), (2, 3), 1, 12)]
    [(0, 0), (2, 0)]
    """
    if 0 in shape:
        return
    if math.prod(shape) * itemsize <= limit:
        yield Box.whole(shape)
        return
    size = gathered(shape, [min(c, n) for c, n in zip(chunk, shape, strict=True)], itemsize, limit)
    for start in product([range(0, n, s) for n, s in zip(shape, size, strict=True)]):
        yield Box(start, tuple(min(s, n - o) for s, n, o in zip(size, shape, start, strict=True)))


def gathered(shape: Sequence[int], chunk: Sequence[int], itemsize: int, limit: int) -> list[int]:
    """The shape of as many chunks together as ``limit`` bytes hold, along the last dimensions first; at least of one.

    >>> gathered((4, 6), (2, 3), 1, 12)
    [2, 6]
    """
    size = list(chunk)
    for axis in range(len(shape) - 1, -1, -1):
        unit = math.prod(size) * itemsize
        times = max(1, min(limit // unit, -(-shape[axis] // size[axis])))
        size[axis] = min(size[axis] * times, shape[axis])
        if size[axis] < shape[axis]:
            break
    return size


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number of a place in a grid, in lexicographic order.

    >>> ravel((1, 2), (3, 4))
    6
    """
    number = 0
    for i, n in zip(index, shape, strict=True):
        number = number * n + i
    return number


_CELLS = 1 << 22


def tiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover an array once: no hole, no overlap, nothing beyond it.

    >>> tiled((2, 3), [Box((0, 0), (2, 1)), Box((0, 1), (2, 2))]), tiled((4,), [Box((0,), (2,)), Box((1,), (2,))])
    (True, False)
    """
    held = [b for b in boxes if b.size]
    if any(n > m for b in boxes for n, m in zip(b.stop, shape, strict=True)):
        return False
    if sum(b.size for b in held) != math.prod(shape):
        return False
    # Equal sizes: they tile unless two overlap. Between the places where boxes begin and end, all is alike.
    cuts = [sorted({b.offset[d] for b in held} | {b.stop[d] for b in held}) for d in range(len(shape))]
    cells = [max(len(c) - 1, 1) for c in cuts]
    if math.prod(cells) > _CELLS:
        return all(a.intersect(b) is None or not a.intersect(b).size for a, b in itertools.combinations(held, 2))
    place = [{at: i for i, at in enumerate(c)} for c in cuts]
    seen = np.zeros(cells, bool)
    for b in held:
        part = seen[(*(slice(p[a], p[z]) for p, a, z in zip(place, b.offset, b.stop, strict=True)), ...)]
        if part.any():
            return False
        part[...] = True
    return True


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """(place in the box, place in the array, length) of each contiguous run of a box, counted in elements.

    >>> list(runs(Box((1, 2), (2, 3)), (4, 6)))
    [(0, 8, 3), (3, 14, 3)]
    """
    if box.size == 0:
        return
    if box.shape == shape:
        yield 0, 0, box.size
        return
    inner = len(shape)
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dimensions from `inner` on are whole; the one before them is a range; those before that are walked.
    first = max(inner - 1, 0)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    length = math.prod(box.shape[first:]) if shape else 1
    base = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    for i, index in enumerate(itertools.product(*map(range, box.shape[:first]))):
        yield i * length, base + sum(k * s for k, s in zip(index, strides[:first], strict=True)), length
