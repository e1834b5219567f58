"""Where the bytes of an array are: its blocks over the ranks that saved it, its chunks, the files that hold them.

It comes from the table of contents, and from asking the file system for the lengths of the files that are shown.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.core.blocks import Box
from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import StoredArray
from ...format.compression import compression_of
from ...format.sharding_spec import AxisLayout
from ...loading.deltas import stored_of
from ...readers.compressed import CompressedTensor
from ...readers.packed import PackedBlocks
from ...readers.raw_tensor import RawTensor
from ...readers.tensor import ChunkedTensor, read_box
from ...readers.zarr_tensor import ZarrTensor
from ...rules.lazy_tensors import whole_of

MAP = 40  # chunks shown along each side of the map
_MOST_RANKS = 1 << 11  # of more, no picture tells anything
CHECK = 256 << 20  # bytes that a page checks at once


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A part of an array, and the ranks that held it when it was saved."""

    box: Box
    ranks: tuple[int, ...]


def blocks(array: StoredArray) -> list[SavedBlock] | None:
    """The blocks of an array over the mesh that saved it; None for a local array or an unknown sharding."""
    mesh, placements = array.mesh, array.placements
    if not mesh or placements is None or math.prod(mesh.values()) > _MOST_RANKS:
        return None
    try:
        layout = AxisLayout.of(mesh, dict(zip(mesh, placements, strict=False)), array.shape, array.name)
    except CheckpointError:
        return None
    spans = [s.T.tolist() for s in layout.spans(array.shape)]
    held: dict[Box, list[int]] = {}
    for rank in range(math.prod(mesh.values())):
        here = [span[rank] for span in spans]
        held.setdefault(Box(tuple(o for o, _ in here), tuple(n for _, n in here)), []).append(rank)
    return [SavedBlock(box, tuple(ranks)) for box, ranks in held.items()]


@dataclass(frozen=True, slots=True)
class MapChunk:
    """A chunk on the map: its place, its file, its stored bytes, and its state.

    ``state`` is ``"recorded"`` (a checksum lies beside it, unread), ``"sound"`` (read now, and the checksum fits),
    ``"damaged"``, ``"missing"``, ``"length"`` (the file is not as long as the manifest says), ``"plain"`` (this format
    has no checksum of ours) or ``"absent"`` (never written: reads as the fill value).
    """

    row: int
    column: int
    box: Box
    file: str
    nbytes: int | None
    state: str
    note: str = ""


@dataclass(frozen=True)
class ChunkMap:
    """The chunks of a plane of an array, at most `MAP` × `MAP` of them, from chunk ``first`` on."""

    chunks: list[MapChunk]
    first: tuple[int, int]
    counts: tuple[int, int]
    shape: tuple[int, ...]
    total: int
    checksums: bool


@dataclass(frozen=True)
class StorageSummary:
    """How an array is stored: one sentence, its files, bytes on the disk where they are known."""

    how: str
    files: int
    nbytes: int | None
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None
    place: tuple[str, int, int, int] | None = None  # file, first byte, end, length of the file


def stored(array: StoredArray) -> StorageSummary:
    """How ``array`` lies in files."""
    tensor = array.tensor
    if isinstance(tensor, RawTensor):
        end = tensor.start + array.nbytes
        place = (os.path.basename(tensor.path), tensor.start, end, tensor.file_nbytes)
        return StorageSummary(tensor.how, 1, array.nbytes, array.shape, None, place)
    if isinstance(tensor, ZarrTensor):
        n = math.prod(-(-s // c) for s, c in zip(array.shape, tensor.chunk, strict=True)) if array.shape else 1
        return StorageSummary(tensor.how, n, None, tensor.chunk, None)
    whole = stored_of(whole_of(tensor))
    if not isinstance(whole, ChunkedTensor):
        return StorageSummary(tensor.how, len(getattr(tensor, "files", ())) or 1, None, tensor.chunk, None)
    grid, how = whole.grid, whole_of(tensor).how
    nbytes = sum(o.nbytes for o in whole.objects.values())
    if (codec := compression_of(whole)) is not None:
        how += f", compressed with {codec} to {nbytes / max(array.nbytes, 1):.0%} of the array's bytes"
    return StorageSummary(how, len({o.file for o in whole.objects.values()}), nbytes, grid.chunk, grid.shard)


def chunk_map(
    array: StoredArray, rows: int | None, columns: int | None, at: Sequence[int], check: bool = False
) -> ChunkMap | None:
    """The chunks of the plane through ``at``, around it. None where there are no chunks: a safetensors tensor is one
    run.

    With ``check``, chunks are read (at most `CHECK` bytes of them) and their checksums compared.
    """
    tensor = array.tensor
    whole = stored_of(whole_of(tensor))
    if not isinstance(whole, (ChunkedTensor, ZarrTensor)) or 0 in array.shape:
        return None
    chunk = tuple(max(1, c) for c in whole.chunk)
    counts = [-(-n // c) for n, c in zip(array.shape, chunk, strict=True)]
    here = [min(a, n - 1) // c for a, n, c in zip(at, array.shape, chunk, strict=True)]

    def span(d: int | None) -> range:
        if d is None:
            return range(1)
        start = max(0, min(here[d] - MAP // 2, counts[d] - MAP))
        return range(start, min(start + MAP, counts[d]))

    length = functools.cache(_length)  # each file is asked for once
    out, read = [], 0
    item = array.dtype.itemsize
    for i, j in itertools.product(span(rows), span(columns)):
        index = [i if d == rows else j if d == columns else k for d, k in enumerate(here)]
        offset = tuple(k * c for k, c in zip(index, chunk, strict=True))
        box = Box(offset, tuple(min(c, n - o) for c, n, o in zip(chunk, array.shape, offset, strict=True)))
        file, nbytes, state, note = _state(whole, tuple(index), box, item, length)
        if check and state in ("recorded", "plain") and read + math.prod(chunk) * item <= CHECK:
            read += math.prod(chunk) * item
            try:
                read_box(tensor, box)
                state = "sound" if state == "recorded" else state
            except (CheckpointError, OSError) as e:
                state, note = "damaged", str(e)
        out.append(MapChunk(i, j, box, file, nbytes, state, note))
    plane = (counts[rows] if rows is not None else 1, counts[columns] if columns is not None else 1)
    first = (span(rows).start, span(columns).start)
    return ChunkMap(out, first, plane, chunk, math.prod(counts), not isinstance(tensor, ZarrTensor))


def _length(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return None


def _state(
    tensor: Any, index: tuple[int, ...], box: Box, item: int, length: Callable[[str], int | None]
) -> tuple[str, int | None, str, str]:
    """(file, stored bytes, state, note) of a chunk."""
    # An object store is not asked for each file: opening the checkpoint has shown that it answers.
    local = os.path.isabs(str(tensor.root))
    if isinstance(tensor, ZarrTensor):
        file = "/".join(p for p in (tensor.node, tensor.key(index)) if p)
        size = length(os.path.join(tensor.root, file)) if local else None
        if local and size is None:
            return file, None, "absent", "never written: it reads as the fill value"
        return file, size, "plain", ""
    grid = tensor.grid
    coord, local_index = grid.place_in_shard(index)
    held = tensor.objects[coord]
    packed = isinstance(tensor, PackedBlocks)
    nbytes, file_nbytes = held.nbytes, held.file_nbytes if packed else held.nbytes
    if not packed:
        nbytes = math.prod(grid.chunk) * item + 4 * (not held.start)
    if local:
        size = length(os.path.join(tensor.root, held.file))
        if size is None:
            return held.file, None, "missing", "the file is missing"
        if size != file_nbytes:
            return held.file, nbytes, "length", f"the file has {size:,} bytes, the manifest says {file_nbytes:,}"
        if isinstance(tensor, CompressedTensor):
            try:
                stored = tensor.chunk_nbytes(coord, local_index)
            except CheckpointError as e:
                return held.file, None, "damaged", str(e)
            note = f"{stored / nbytes:.0%} of its {nbytes - 4:,} bytes, by {tensor.compression}"
            return held.file, stored, "recorded", note
    elif isinstance(tensor, CompressedTensor):
        return held.file, None, "recorded", f"compressed by {tensor.compression}"
    return held.file, nbytes, "recorded", f"crc32c of the {'block' if packed else 'data'} {held.crc32c:08x}"
