"""The Zarr v3 form of a checkpoint: zarr-python writes the metadata, this module writes the shards.

A checkpoint is a group with one array for each leaf. An array's codec is ``sharding_indexed``; a shard is one file,
written by one rank. In it lie, in lexicographic order, the inner chunks, each little-endian, compressed or not, and
followed by its crc32c; then the index, which ends with its own crc32c. Chunks over the edge of the array are padded
with zeros, chunks wholly beyond it are absent. A 0-d array has no grid to shard: its file is one chunk.

zarr-python would spend three to six times as long on the data itself, so it is used for what must be exactly its own
words.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.errors import CheckpointError
from ..base.checksums import combine, crc32c
from ..base.threads import starting
from ..base.waiting import pool
from ..stores.filesystem import IOV_MAX
from . import dtypes, tensor_sums
from .chunk_grid import TARGET, ChunkGrid, Coord, divisors, place_of
from .compression import Codec, Compression

DELTA_CODEC = "meshtape.delta"
GROUP_ATTRIBUTE = "meshtape"  # marks a group as ours even when its manifest is lost
_MOST_SAID = 64 << 10  # bytes of an array's attributes that travel with its elements
_ABSENT = np.uint64(2**64 - 1)
_BATCH = 1 << 20  # bytes handed to the kernel in one call: a processor's cache still has them, and theirs is used again
_WORTH = 4 << 20  # bytes of a shard that several threads compress


@lru_cache(maxsize=512)
def _array_template(
    grid: ChunkGrid, dtype: np.dtype, compression: Compression, raw: bool, dual: bool
) -> tuple[str, str]:
    """The metadata of an array, before and behind the names of its dimensions: those alone differ where a model has
    many arrays of a shape."""
    said = dtypes.bits(dtype) if raw else dtype
    node = json.loads(_array_node(grid, dtypes.little(said), compression, dual))
    if said != dtype:
        node["attributes"] = {GROUP_ATTRIBUTE: {"dtype": dtype.name}}
    node["dimension_names"] = "\0"
    before, _, behind = json.dumps(node).partition(json.dumps("\0"))
    return before, behind


@starting()  # zarr has a thread of its own
def _array_node(grid: ChunkGrid, dtype: np.dtype, compression: Compression, dual: bool) -> str:
    from .zarr_dtypes import zarr

    held: dict[str, Any] = {}
    zarr.create_array(
        store=zarr.storage.MemoryStore(held),
        shape=grid.shape,
        dtype=dtype,
        chunks=grid.chunk,
        shards=grid.shard or None,
        filters=None,
        compressors=[
            *([] if compression is None else [compression.codec(dtype.itemsize)]),
            *([] if dual else [zarr.codecs.Crc32cCodec()]),
        ],
        fill_value=0,
        # One directory an array, whatever its rank: fewer names to make durable.
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    return held["zarr.json"].to_bytes().decode()


def array_metadata(
    grid: ChunkGrid,
    dtype: np.dtype,
    name: str,
    compression: Compression = None,
    raw: bool = False,
    dual: bool = False,
    said: str = "",
    base: Sequence[str] | None = None,
) -> bytes:
    """``zarr.json`` of an array. Dimensions are named after it, so that xarray opens arrays of any shapes side by side.

    ``raw``: a type that Zarr's specification lacks is said to be the unsigned integers of its bits, and an attribute
    names it. ``said``: attributes and names of dimensions of another writer, as members of a JSON object. ``base``:
    name and identity of the checkpoint from which the array is a delta, in a codec that readers of Zarr refuse by its
    name.
    """
    before, behind = _array_template(grid, dtype, compression, raw, dual)
    text = f"{before}{json.dumps(own_names(name, len(grid.shape)))}{behind}"
    if said:
        node, others = json.loads(text), json.loads(said)
        others["attributes"] |= node.get("attributes", {})
        text = json.dumps(node | others)
    if base is not None:
        node = json.loads(text)
        codec = {"name": DELTA_CODEC, "configuration": dict(zip(("base", "identity"), base, strict=True))}
        node["codecs"][0]["configuration"]["codecs"].insert(0, codec)
        text = json.dumps(node)
    return text.encode()


def own_names(name: str, rank: int) -> list[str]:
    """The names of dimensions of an array for which no other writer has given some."""
    return [f"{name}.{axis}" for axis in range(rank)]


def described(attributes: Any, dims: Any = None, rank: int = 0) -> str:
    """Attributes and names of dimensions of another writer as `array_metadata` takes them: members of a JSON object.
    Empty where there are none, or none that can travel: no JSON, or above 64 KiB."""
    members: dict[str, Any] = {"attributes": {}}
    if isinstance(attributes, dict):
        members["attributes"] = {k: v for k, v in attributes.items() if k != GROUP_ATTRIBUTE}
    if isinstance(dims, list | tuple) and len(dims) == rank and any(dims):
        members["dimension_names"] = [None if n is None else str(n) for n in dims]
    try:
        text = json.dumps(members, allow_nan=False, ensure_ascii=False) if any(members.values()) else ""
        return text if len(text.encode()) <= _MOST_SAID else ""
    except (ValueError, TypeError, RecursionError):
        return ""


def group_said(node: dict[str, Any]) -> dict[str, Any]:
    """The attributes of the group by another writer, in its metadata."""
    return {k: v for k, v in node["attributes"].items() if k != GROUP_ATTRIBUTE}


def said_of(node: dict[str, Any], name: str) -> str:
    """What ``said`` was when `array_metadata` made the metadata of an array."""
    dims = node["dimension_names"]
    return described(node.get("attributes"), None if dims == own_names(name, len(dims)) else dims, len(dims))


def is_raw(dtype_fallback: str | None) -> bool:
    """Whether `array_metadata` is ``raw``, as a user says it."""
    if dtype_fallback not in (None, "raw"):
        raise CheckpointError(f'dtype_fallback={dtype_fallback!r} is unknown; give "raw" or None')
    return dtype_fallback is not None


@starting()
def group_metadata(
    version: int, arrays: dict[str, bytes], packs: Sequence[str] = (), others: Mapping[str, Any] | None = None
) -> bytes:
    """``zarr.json`` of the group, with the metadata of its arrays inside ("consolidated"), which opens it in one read.

    ``packs`` are the safetensors files of small arrays: whoever does not know the manifest finds them here. ``others``:
    attributes of the group by another writer.
    """
    from .zarr_dtypes import zarr

    held: dict[str, Any] = {}
    own = {"version": version, **({"packs": list(packs)} if packs else {})}
    zarr.create_group(
        store=zarr.storage.MemoryStore(held),
        attributes={**group_said({"attributes": others or {}}), GROUP_ATTRIBUTE: own},
    )
    node = json.loads(held["zarr.json"].to_bytes())
    node["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": "\0"}
    before, _, behind = json.dumps(node).encode().partition(json.dumps("\0").encode())
    # They are JSON: to read them, and to write them again, would take as long as all else that a small array needs.
    held = b", ".join(b"%s: %s" % (json.dumps(name).encode(), text) for name, text in arrays.items())
    return before + b"{" + held + b"}" + behind


def group_texts(found: Any, arrays: dict[str, bytes]) -> list[bytes]:
    """What ``zarr.json`` of the group of a manifest can be: without attributes of another writer, and with them, which
    are among the metadata."""
    packs = [p.file for p in found.packs]
    return [
        group_metadata(found.version, arrays, packs, others)
        for others in ({}, found.metadata)[: 1 + bool(described(found.metadata))]
    ]


def chunk_coords(grid: ChunkGrid, coord: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Chunks of a shard that are present, in the order in which they are stored."""
    return itertools.product(*map(range, grid.present(coord)))


@lru_cache(maxsize=1 << 12)
def _index_of_one(first: int, length: int) -> bytes:
    table = struct.pack("<QQ", first, length)
    return table + crc32c(table).to_bytes(4, "little")


def shard_index(grid: ChunkGrid, coord: Coord, lengths: int | Sequence[int], first: int = 0) -> bytes:
    """The table of (place, length) of every chunk of a shard, with its checksum. ``lengths`` are those of the chunks as
    stored, or of each, and ``first`` is the place of the first."""
    if grid.chunk == grid.shard:
        (alone,) = [lengths] if isinstance(lengths, int) else lengths
        return _index_of_one(first, alone)
    table = np.full((*grid.chunks_in_shard, 2), _ABSENT, "<u8")
    present = grid.present(coord)
    where = tuple(slice(n) for n in present)
    held = np.broadcast_to(np.asarray(lengths, "<u8"), math.prod(present))
    table[(*where, 0)] = (first + held.cumsum(dtype="<u8") - held).reshape(present)
    table[(*where, 1)] = held.reshape(present)
    return table.tobytes() + crc32c(table).to_bytes(4, "little")


class ShardBytes:
    """The bytes of one shard, whose elements are ``block``. When all `batches` are gone, ``nbytes`` is their length,
    ``digest`` the crc32c, and ``sums`` the crc32c of each chunk.

    The checksum covers the chunks' data (as it is stored: compressed, where it is) one after the other, without their
    own checksums: bytes followed by their crc32c have the same crc32c whatever they are, so a checksum of the whole
    file would tell nothing.

    ``delta`` is given the index of a chunk in the shard, and its bytes, and gives those that are compressed in their
    place.

    ``threads`` compress at a time. A frame depends on its chunk alone, so the bytes are the same for any number; in
    memory are as many chunks, and one more.
    """

    def __init__(
        self,
        block: np.ndarray,
        grid: ChunkGrid,
        coord: tuple[int, ...],
        wrote: Callable[[int], None] | None = None,
        compression: Compression = None,
        threads: int = 1,
        delta: Callable[[tuple[int, ...], np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.block, self.grid, self.coord, self.compression = block, grid, coord, compression
        self.threads, self.delta = threads, delta
        self.wrote = wrote  # told of the bytes of each batch, before compression, when the next one is asked for
        self.nbytes = self.digest = 0
        self.sums: list[int] = []

    def batches(self) -> Generator[list[Any]]:
        """Buffers, a few megabytes at a time; their memory is used again for the next ones.

        Chunks that lie in memory as they will lie in the file are given where they are; others are copied.
        """
        grid, codec = self.grid, self.compression
        nbytes = math.prod(grid.chunk) * self.block.dtype.itemsize
        slots = max(1, min(_BATCH // max(nbytes, 1), IOV_MAX // 2))
        pending: list[Any] = []
        lengths: list[int] = []
        self.nbytes, self.digest, self.sums = 0, 0, []
        used = 0
        for data in self._chunks(slots) if codec is None else self._frames(codec):
            value = crc32c(data)
            self.sums.append(value)
            if codec is None:
                self.digest = combine(self.digest, value, nbytes)
            else:
                self.digest = crc32c(data, self.digest)  # to combine them takes longer where each length is another
            lengths.append(len(data) + 4)
            pending += [data, value.to_bytes(4, "little")]
            used += 1
            if used == slots:
                yield pending
                if self.wrote is not None:
                    self.wrote(used * (nbytes + 4))
                pending, used = [], 0
        self.nbytes = sum(lengths)
        if grid.shape:
            pending.append(shard_index(grid, self.coord, lengths))
            self.nbytes += len(pending[-1])
        yield pending
        if self.wrote is not None:
            self.wrote(used * (nbytes + 4) + (len(pending[-1]) if grid.shape else 0))

    def _chunks(self, slots: int) -> Iterator[Any]:
        """The bytes of each chunk, in order. The memory of one that was copied is used again ``slots`` chunks later."""
        grid, block = self.grid, self.block
        dtype = dtypes.little(block.dtype)
        as_it_is = block.dtype == dtype
        staging: np.ndarray | None = None
        for number, index in enumerate(chunk_coords(grid, self.coord)):
            part = block[(*(slice(i * c, (i + 1) * c) for i, c in zip(index, grid.chunk, strict=True)), ...)]
            if not (as_it_is and part.shape == grid.chunk and part.flags.c_contiguous):
                if staging is None:
                    staging = np.empty((slots, *grid.chunk), dtype)
                slot = staging[number % slots, ...]
                if part.shape != grid.chunk:
                    slot[...] = 0
                slot[(*map(slice, part.shape), ...)] = part
                part = slot
            yield part.reshape(-1).view(np.uint8)

    def _frames(self, codec: Codec) -> Iterator[bytes]:
        """Each chunk compressed, in order."""
        count = math.prod(self.grid.present(self.coord))
        threads = min(self.threads, count)

        def compress(index: tuple[int, ...], data: np.ndarray) -> bytes:
            data = data if self.delta is None else self.delta(index, data)
            return codec.compress(data, self.block.dtype.itemsize)

        if threads < 2 or count * math.prod(self.grid.chunk) * self.block.dtype.itemsize < _WORTH:
            yield from map(compress, chunk_coords(self.grid, self.coord), self._chunks(1))
            return
        coming: deque[Future[bytes]] = deque()
        with starting(), pool(threads, "meshtape-zstd") as made:
            # While a chunk is made ready, those that the threads have are not written to: one slot more.
            for index, data in zip(chunk_coords(self.grid, self.coord), self._chunks(threads + 1), strict=True):
                coming.append(made.submit(compress, index, data))
                if len(coming) > threads:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()


# ----- layout "dual": shard files that are safetensors files, too -----------------------------------------------------
#
# A file is the header of safetensors, the rows of a block, and a second tensor of bytes, `DUAL_INDEX`, which ends with
# the index of the Zarr shard. The inner chunks of the shard are runs of rows without a checksum of their own, one after
# the other, so that they are the row-major tensor. A last chunk that reaches beyond the block takes zeros from the
# beginning of `DUAL_INDEX`. All but the rows follows from the place of the shard and the checksum of its rows, so that
# `verify` compares every byte.

DUAL_INDEX = "__zarr_index__"


def dual_grid(grid: ChunkGrid, itemsize: int, name: str) -> ChunkGrid:
    """The grid with the same blocks whose chunks follow one another in row-major order.

    Raises `CheckpointError` where blocks are no whole rows.

    >>> dual_grid(ChunkGrid((5, 4), (5, 4), (5, 2)), 1 << 18, "w")
    ChunkGrid(shape=(5, 4), shard=(5, 4), chunk=(1, 4))
    """
    if split := [axis for axis, n in enumerate(grid.counts) if axis and n > 1]:
        raise CheckpointError(
            f"key {name!r} is split along dimension {split[0]}: layout='dual' needs blocks of whole rows, split along "
            "dimension 0 alone; reshard it, or save without layout="
        )
    extent = [min(grid.shard[0], grid.shape[0]), *grid.shape[1:]]
    chunk = [1] * len(extent)
    for axis in reversed(range(len(extent))):
        n, most = extent[axis], max(1, TARGET // (math.prod(chunk) * itemsize))
        if axis == 0 and grid.counts[0] == 1:  # the only shard may be rounded up
            chunk[0] = -(-n // -(-n // most))
        elif most >= n:
            chunk[axis] = n
        else:
            chunk[axis] = min(divisors(n), key=lambda d: abs(math.log(d / most)))
            break
    shard = tuple(-(-n // c) * c for n, c in zip(extent, chunk, strict=True))
    return ChunkGrid(grid.shape, shard, tuple(chunk))


def is_dual_grid(grid: ChunkGrid) -> bool:
    """Whether the chunks of each shard follow one another in row-major order, and a shard is whole rows."""
    inner = next((i for i, c in enumerate(grid.chunk) if c > 1), len(grid.chunk))
    whole = all(
        c == s == n
        for c, s, n in zip(grid.chunk[inner + 1 :], grid.shard[inner + 1 :], grid.shape[inner + 1 :], strict=True)
    )
    return bool(grid.shape) and 0 not in grid.shape and whole and grid.shard[1:] == grid.shape[1:]


class DualShard(NamedTuple):
    """All of a file but its rows: ``head`` without its checksums, the bytes of the rows, and ``tail``, the tensor
    `DUAL_INDEX`."""

    head: bytes
    rows: int
    tail: bytes

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.rows + len(self.tail)

    def sealed(self, value: int) -> bytes:
        """The header, where ``value`` is the crc32c of the rows."""
        return tensor_sums.sealed(self.head, [value, crc32c(np.frombuffer(self.tail, np.uint8))])


@lru_cache(maxsize=1 << 12)
def dual_shard(name: str, dtype: np.dtype, grid: ChunkGrid, coord: tuple[int, ...]) -> DualShard:
    """The file of a shard."""
    place = place_of(grid, coord, dtype.itemsize)
    unit, count = math.prod(grid.chunk) * dtype.itemsize, math.prod(place.present)
    rows = place.box.size * dtype.itemsize
    padding = count * unit - rows
    length = padding + math.prod(grid.chunks_in_shard) * 16 + 4
    free = {"format": "pt", tensor_sums.KEY: tensor_sums.text([0, 0, 0])}
    if place.box.shape != grid.shape:
        free["meshtape.block"] = json.dumps({"offset": place.box.offset, "of": grid.shape})
    top = {
        "__metadata__": free,
        name: {"dtype": dtypes.safetensors_name(dtype, name), "shape": place.box.shape, "data_offsets": (0, rows)},
        DUAL_INDEX: {"dtype": "U8", "shape": (length,), "data_offsets": (rows, rows + length)},
    }
    text = json.dumps(top, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return DualShard(head, rows, bytes(padding) + shard_index(grid, coord, unit, len(head)))
