"""Packs: safetensors files in which the small blocks of many arrays lie together.

A small array of its own costs a directory, Zarr's metadata and a shard. Packed, it is a few rows: of the header of a
pack, and of the manifest, which knows for each block its pack, its bytes and their crc32c. A block is the bytes of a
shard's elements, row-major, without padding. One rank writes one pack, or several where `LIMIT` is reached. Each is a
true safetensors file: a block has the name of its array, and ``DCP_SHARDING_INFO`` says where it lies in it, as in the
files of ``torch.distributed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointDTypeError, CheckpointError
from ..base.checksums import crc32c
from ..format import dtypes, tensor_sums
from ..format.chunk_grid import ChunkGrid, only_shard, place_of, sizes_text
from ..format.stored_objects import Pack
from ..readers.safetensors import DCP_INFO, TensorInfo, build_header, joined, pieces_of, sum_of
from ..stores import store
from .items import Record, SaveItem, Task

THRESHOLD = 1 << 20  # bytes of a block that are packed by default
LIMIT = 64 << 20  # bytes of blocks after which a rank begins another pack
HELD = 8 << 20
"""`LIMIT` for a conversion into an object store, which holds a pack in memory: its header, with the sums, is first."""


def threshold(pack: bool | int | None, target: str) -> int:
    """Bytes up to which blocks are packed; 0 for not at all. None: in object stores, where each file is a request, and
    not on disks.

    >>> threshold(None, "/data"), threshold(4096, "/data")
    (0, 4096)
    >>> threshold(None, "s3://bucket/x"), threshold(False, "s3://bucket/x")
    (1048576, 0)
    """
    if pack is None:
        pack = store.is_url(target)
    if isinstance(pack, bool):
        return THRESHOLD if pack else 0
    if not isinstance(pack, int) or pack < 0:
        raise CheckpointError(
            f"pack is True, False, or a number of bytes of which smaller blocks are packed; got {pack!r}"
        )
    return pack


def choose(item: SaveItem, boxes: Callable[[Any, tuple[int, ...]], Sequence[Box]], limit: int) -> None:
    """Mark an array as packed where its blocks are small enough, each is one shard, and safetensors has its dtype."""
    grid = _packed_grid(item.grid, item.dtype, limit)
    if grid is None or item.name == "__metadata__":
        return
    try:
        item.name.encode()
    except UnicodeEncodeError:
        return
    alone = item.sharding is None and only_shard(grid) is not None
    if alone or {b for b in boxes(item.sharding, item.shape) if b.size} == set(map(grid.shard_box, grid.shards())):
        item.packed, item.grid, item.compression = True, grid, None


@lru_cache(maxsize=1 << 10)
def _packed_grid(grid: ChunkGrid, dtype: np.dtype, limit: int) -> ChunkGrid | None:
    """The grid of an array in packs, whose shards are chunks and end with the array; None where it stays a Zarr array.

    One without an element has no bytes to share a file; others' readers find it as Zarr's.
    """
    shard = tuple(min(s, n) for s, n in zip(grid.shard, grid.shape, strict=True))
    try:
        dtypes.safetensors_name(dtype)
    except CheckpointDTypeError:
        return None
    return ChunkGrid(grid.shape, shard, shard) if 0 < math.prod(shard) * dtype.itemsize <= limit else None


def dealt(tasks: list[Task], sizes: Sequence[int], stem: str, suffix: str, limit: int | None = None) -> list[Task]:
    """The tasks of one rank with the packs that they go to. ``sizes`` are bytes of an item, by array."""
    limit = LIMIT if limit is None else limit
    number, used, pack = -1, 0, ""
    for task in tasks:
        if task.name is not None:
            nbytes = task.part.size * sizes[task.array]
            if not pack or used + nbytes > limit:
                number, used = number + 1, 0
                pack = f"pack-{stem}-{number:05d}{suffix}.safetensors"
            used += nbytes
            task.pack = pack
    return tasks


def held_blocks(mesh: Any, items: Sequence[SaveItem], arrays: Sequence[Any]) -> list[tuple[int, Box, int, list[int]]]:
    """(number of an array, a block that is not empty, its bytes, the ranks that hold it) of arrays on a mesh."""
    found = []
    for number, (item, array) in enumerate(zip(items, arrays, strict=True)):
        holders: dict[Box, list[int]] = {}
        for rank in range(mesh.size):
            holders.setdefault(array.sharding.box(item.shape, rank), []).append(rank)
        found += [(number, box, box.size * item.dtype.itemsize, ranks) for box, ranks in holders.items() if box.size]
    return found


def assign(
    wanted: Sequence[tuple[int, Box, int, Sequence[int]]], small: Container[int] = ()
) -> dict[int, list[tuple[int, Box]]]:
    """Choose a writer for each block ``(array, box, nbytes, ranks that hold it)``: the one with the fewest bytes so
    far.

    Large blocks are dealt first; ties go to the lowest rank. Blocks of the ``small`` arrays share files: each goes to a
    rank that has such a file already, where one has room.

    >>> dealt = assign([(i, Box((0,), (4,)), 32, (0, 1, 2)) for i in range(10)])
    >>> [len(dealt[r]) for r in sorted(dealt)]
    [4, 3, 3]
    """
    load: dict[int, int] = {}
    out: dict[int, list[tuple[int, Box]]] = {}
    packed: dict[int, int] = {}
    # Of the small ones those first that few ranks hold, as these write a file in any case.
    for array, box, nbytes, ranks in sorted(
        wanted, key=lambda w: (w[0] in small, len(w[3]) if w[0] in small else 0, -w[2], w[0], w[1])
    ):
        if array in small:
            room = [r for r in ranks if r in packed and packed[r] + nbytes <= LIMIT]
            rank = min(room or ranks, key=lambda r: (packed.get(r, 0), load.get(r, 0), r))
            packed[rank] = packed.get(rank, 0) + nbytes
        else:
            rank = min(ranks, key=lambda r: (load.get(r, 0), r))
        load[rank] = load.get(rank, 0) + nbytes
        out.setdefault(rank, []).append((array, box))
    return out


def head_of(tasks: Sequence[Task], kinds: Sequence[np.dtype]) -> tuple[bytes, dict[str, TensorInfo]]:
    """The first bytes of a pack, with zeros in the place of checksums, and where its blocks go. Names are distinct: a
    rank has one block of an array."""
    rows, info = [], []
    for t, kind in zip(tasks, kinds, strict=True):
        box = place_of(t.grid, t.coord, 1).box
        rows.append((t.name, dtypes.safetensors_name(kind), box.shape))
        info.append(f'{quoted(t.name)}: {{"saved_offsets": {sizes_text(box.offset, ", ")}}}')
    return build_header(rows, {"format": "pt", DCP_INFO: f"{{{', '.join(info)}}}"}, sums=True)


def records_of(
    tasks: Sequence[Task], head: bytes, places: Mapping[str, TensorInfo], sums: Mapping[str, int]
) -> list[Record]:
    """The records of the blocks of one pack that was written."""
    first, last = len(head), next(reversed(places.values()))
    pack = Pack(tasks[0].pack, first + last.end, first, crc32c(head))
    out = []
    for t in tasks:
        _, _, begin, end = places[t.name]
        out.append(Record(t.file, end - begin, sums[t.name], b"", pack, first + begin))
    return out


def laid_out(tasks: Sequence[Task], parts: Sequence[np.ndarray]) -> tuple[list[Record], Callable[[], Iterator[Any]]]:
    """The records of the blocks of one pack, and a source of the bytes of its file."""
    head, places = head_of(tasks, [a.dtype for a in parts])
    named = dict(zip([t.name for t in tasks], parts, strict=True))
    arrays = [named[name] for name in places]
    # What is short is copied once, for its checksum and for the file.
    brief = sum([a.nbytes for a in arrays]) <= HELD
    pieces = [b"".join(pieces_of(a)) for a in arrays] if brief else []
    sums = [crc32c(p) for p in pieces] if brief else [sum_of(pieces_of(a)) for a in arrays]
    head = tensor_sums.sealed(head, sums)

    def body() -> Iterator[Any]:
        if brief:
            return iter([b"".join([head, *pieces])])
        return joined(chain([head], chain.from_iterable(map(pieces_of, arrays))))

    return records_of(tasks, head, places, dict(zip(places, sums, strict=True))), body
