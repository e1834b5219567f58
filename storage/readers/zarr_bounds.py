"""Bounds on the unpacked size of chunks of a foreign Zarr array: a chunk longer than the metadata says is refused.

zarr-python gives its codecs no limit: 32 KB that say they are a chunk of 4 KB could unpack to gigabytes.
"""

from __future__ import annotations

import bz2
import dataclasses
import lzma
import math
import zlib
from collections.abc import Callable
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec

from ..format.compression import content_field, content_nbytes

_SLACK = 1 << 20  # bytes that what is not the last codec of a chain may add
_UNSAID = 64 << 20  # bytes that a frame without a length may have in any case: its blocks give no more than a bound
_BLOCK = 128 << 10


def _counted(make: Callable[[], Any]) -> Callable[[bytes, int], int]:
    """The length by unpacking in pieces that are thrown away, for formats that do not say it."""

    def count(data: bytes, limit: int) -> int:
        total, unpack, rest = 0, make(), data
        while total <= limit and not unpack.eof:
            got = unpack.decompress(rest, _SLACK)
            rest = getattr(unpack, "unconsumed_tail", b"")
            if not got and not rest:
                break
            total += len(got)
        return total

    return count


def _zstd(data: bytes, limit: int) -> int:
    said = content_nbytes(data[:18])
    if said is not None or len(data) < 6:
        return said or 0
    at, total = sum(content_field(data[4])), 0
    while at + 3 <= len(data):  # headers of blocks: RFC 8878, 3.1.1.2
        block = int.from_bytes(data[at : at + 3], "little")
        kind, size = block >> 1 & 3, block >> 3
        total += _BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if block & 1:
            break
    return total if total > max(_UNSAID, 8 * limit) else 0


_NBYTES: dict[str, Callable[[bytes, int], int]] = {
    "zstd": _zstd,
    "blosc": lambda data, limit: int.from_bytes(data[4:8], "little"),
    "lz4": lambda data, limit: int.from_bytes(data[:4], "little"),
    "gzip": _counted(lambda: zlib.decompressobj(47)),
    "zlib": _counted(lambda: zlib.decompressobj(47)),
    "bz2": _counted(bz2.BZ2Decompressor),
    "lzma": _counted(lzma.LZMADecompressor),
}


def _check(name: str, data: Any, limit: int) -> None:
    measure = _NBYTES.get(name.removeprefix("numcodecs."))
    try:
        nbytes = 0 if measure is None else measure(bytes(data), limit)
    except (zlib.error, lzma.LZMAError, OSError, EOFError):
        return  # damaged: its codec says so
    if nbytes > limit:
        raise ValueError(f"a chunk unpacks ({name}) to {nbytes} bytes or more, its metadata allows {limit}")
    if measure is _NBYTES["blosc"]:  # whose library ends the process where it gets no memory for its blocks
        np.empty(nbytes + 3 * min(int.from_bytes(bytes(data[8:12]), "little"), nbytes), np.uint8)


@dataclasses.dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """A codec that looks at the length first."""

    inner: Any
    limit: int
    is_fixed_size = False

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return self.inner.compute_encoded_size(input_byte_length, chunk_spec)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        _check(self.inner.to_dict()["name"], chunk_bytes.to_bytes(), self.limit)
        return (await self.inner.decode([(chunk_bytes, chunk_spec)]))[0]


class _BoundedV2(numcodecs.abc.Codec):
    """The bound for a compressor of Zarr v2."""

    codec_id = "meshtape.bounded"

    def __init__(self, inner: Any, limit: int) -> None:
        self._inner, self._limit = inner, limit

    def encode(self, buf: Any) -> Any:
        return self._inner.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        _check(self._inner.codec_id, buf, self._limit)
        return self._inner.decode(buf, out)

    def get_config(self) -> dict[str, Any]:
        return self._inner.get_config()


def _bounded(codec: Any, chunk: int, itemsize: int) -> Any:
    if isinstance(codec, ShardingCodec):
        inner = math.prod(codec.chunk_shape) * itemsize
        return ShardingCodec(
            chunk_shape=codec.chunk_shape,
            codecs=[_bounded(c, inner, itemsize) for c in codec.codecs],
            index_codecs=codec.index_codecs,
            index_location=codec.index_location,
        )
    return _Bounded(codec, chunk + _SLACK) if isinstance(codec, BytesBytesCodec) else codec


def bound(array: Any) -> Any:
    """An opened array that refuses chunks which unpack to more than they are to hold: the same metadata, with codecs
    that look first."""
    said, itemsize = array.metadata, array.dtype.itemsize
    chunk = math.prod(array.shards or array.chunks) * itemsize
    chunk += chunk // 8 + 16 * math.prod(array.shards or ()) // max(math.prod(array.chunks), 1)  # a shard has an index
    if said.zarr_format == 2:
        if said.compressor is None:
            return array
        said = dataclasses.replace(said, compressor=_BoundedV2(said.compressor, chunk + _SLACK))
    else:
        said = dataclasses.replace(said, codecs=[_bounded(c, chunk, itemsize) for c in said.codecs])
    return zarr.Array(zarr.AsyncArray(said, array.store_path))
