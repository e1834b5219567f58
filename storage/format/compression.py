"""Compression of stored chunks: none, zstd, or byte-grouped zstd, as Zarr's codecs ``zstd`` and ``blosc``.

A compressed chunk is one frame that says how long its content is: of Zstandard (RFC 8878), or of C-Blosc 1. The library
is the one with which zarr-python reads it. Frames are hostile until proven otherwise: one that announces another length
than its chunk has is refused before a byte of it is unpacked, and none can write beyond the memory of its chunk.

Another compression is one more class with the attributes and methods of these two, in `KINDS`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.errors import CheckpointError
from ..base.scratch import scratch
from ..base.waiting import uninterrupted
from .chunk_grid import ChunkGrid, place_of

_MAGIC = b"\x28\xb5\x2f\xfd"
_TEXT = re.compile(r"\A(zstd|weights)(?::(\d{1,2}))?\Z")


class _Levelled:
    """Base of the compressions, which have a level."""

    __slots__ = ()
    level: int
    name: ClassVar[str]  # in the manifest
    called: ClassVar[str]  # by users
    levels: ClassVar[range]
    signed: ClassVar[bool] = False  # whether it takes signed numbers near zero as they are

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in self.levels:
            first, last = self.levels[0], self.levels[-1]
            raise CheckpointError(f"a level of {self.called} is an integer from {first} to {last}, got {self.level!r}")

    def __str__(self) -> str:
        return f"{self.called}:{self.level}"

    def plain(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        return {"name": self.name, "level": self.level}


@dataclass(frozen=True, slots=True)
class Zstd(_Levelled):
    """Compress each chunk with Zstandard.

    Parameters
    ----------
    level
        1 (fast) to 22 (small); 3 is zstd's own choice. Reading is as fast for any.

    Raises
    ------
    CheckpointError
        There is no such level.

    Notes
    -----
    Zstandard: RFC 8878. Trained weights are nearly noise: float32 shrinks by some 8 %, bfloat16 by some 20 %, at a
    fraction of a disk's speed. Masks, indices, counts, embeddings with unused rows and the states of sparse optimizers
    shrink to a small part.

    Examples
    --------
    >>> Zstd(level=9)
    Zstd(level=9)
    """

    level: int = 3
    name: ClassVar[str] = "zstd"
    called: ClassVar[str] = "zstd"
    levels: ClassVar[range] = range(1, 23)
    since: ClassVar[int] = 1  # version of the manifest

    def most(self, nbytes: int) -> int:
        """Bytes of the longest frame for so many bytes of data.

        The bound of ``ZSTD_compressBound``: data that cannot be compressed is stored, with a few bytes for each block.
        """
        return nbytes + (nbytes >> 8) + (((128 << 10) - nbytes) >> 11 if nbytes < 128 << 10 else 0)

    def compress(self, data: np.ndarray, itemsize: int = 1) -> bytes:
        """The frame of some bytes of elements; the same for the same bytes, level and version of the library."""
        return _library("zstd").compress(data, self.level)

    def decompress(self, frame: np.ndarray, out: np.ndarray) -> None:
        """Unpack a frame to exactly ``out``. ``ValueError`` where it is damaged or its content has another length."""
        _unpack(_library("zstd").decompress, frame, content_nbytes(frame[:18].tobytes()), out)

    def codec(self, itemsize: int) -> Any:
        """Zarr's codec."""
        from .zarr_dtypes import zarr

        return zarr.codecs.ZstdCodec(level=self.level)


@dataclass(frozen=True, slots=True)
class ShuffledZstd(_Levelled):
    """Group the bytes of a chunk's elements by their place, then compress each group with Zstandard: Zarr's codec
    ``blosc``.

    Parameters
    ----------
    level
        1 (fast) to 9, of Zstandard. Weights are smallest with 1: higher ones look for repetitions that noise only seems
        to have.

    Raises
    ------
    CheckpointError
        There is no such level.

    Notes
    -----
    The exponents of trained weights are few and repeat, their mantissas are noise. Each group is a stream of its own,
    where Blosc's library has one for all: the exponents compress to their entropy nearly, and the noise is stored as it
    is. Any reader of Blosc unpacks both. Format: https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst

    Examples
    --------
    >>> ShuffledZstd()
    ShuffledZstd(level=1)
    """

    level: int = 1
    name: ClassVar[str] = "shuffle-zstd"
    called: ClassVar[str] = "weights"
    levels: ClassVar[range] = range(1, 10)
    since: ClassVar[int] = 3

    def most(self, nbytes: int) -> int:
        """Bytes of the longest frame for so many bytes of data, which are then stored behind the header."""
        return nbytes + _HEADER

    def compress(self, data: np.ndarray, itemsize: int = 1) -> bytes:
        """The frame of some bytes of elements; the same for the same bytes, level and version of the library."""
        compress = _library("zstd").compress
        nbytes, size = data.size, _grouped(itemsize)
        block = max(1, min(nbytes, _BLOCK))
        end, starts, pieces = _HEADER + 4 * -(-nbytes // block), [], []
        for first in range(0, nbytes, block):
            groups = np.ascontiguousarray(data[first : first + block].reshape(-1, size).T)
            # Blosc never splits the last block where it is a shorter one, nor blocks of less than 128 elements.
            whole = groups.size == block and block // size >= 128
            starts.append(end)
            for stream in groups if whole else groups.reshape(1, -1):
                frame = compress(stream, self.level)
                held = frame if len(frame) < stream.size else stream.tobytes()
                pieces += [len(held).to_bytes(4, "little"), held]
                end += 4 + len(held)
        if end >= self.most(nbytes):
            return (
                _BLOSC.pack(2, 1, _ZSTD | _SHUFFLED | _STORED, size, nbytes, block, self.most(nbytes)) + data.tobytes()
            )
        head = _BLOSC.pack(2, 1, _ZSTD | _SHUFFLED, size, nbytes, block, end)
        return b"".join([head, struct.pack(f"<{len(starts)}I", *starts), *pieces])

    def decompress(self, frame: np.ndarray, out: np.ndarray) -> None:
        """Unpack a frame to exactly ``out``. ``ValueError`` where it is damaged or its content has another length."""
        version, _, flags, itemsize, *lengths = _BLOSC.unpack(frame[:_HEADER].tobytes().ljust(_HEADER, b"\0"))
        nbytes, block, held = lengths
        if len(frame) < _HEADER or version != 2 or not itemsize or held != len(frame) or flags & 0xE0 != _ZSTD:
            raise ValueError("its frame is none of Blosc with zstd, or has another length than it says")
        # Its library ends the process where it gets no memory for its blocks.
        np.empty(3 * min(block, out.nbytes) + _TABLES, np.uint8)
        _unpack(_library("blosc").decompress, frame, nbytes, out)

    def codec(self, itemsize: int) -> Any:
        """Zarr's codec."""
        from .zarr_dtypes import zarr

        form = {"typesize": _grouped(itemsize), "clevel": self.level}
        return zarr.codecs.BloscCodec(cname="zstd", shuffle="shuffle", blocksize=0, **form)


@dataclass(frozen=True, slots=True)
class PackedZstd(_Levelled):
    """Differences of 16 bits, most of them near zero: -1, 0 and 1 take two bits. For deltas, not for users.

    A code of Huffman spends a bit on each byte at least, more than most differences hold; four of them in a byte come
    near their entropy. A frame is the length of a frame of Zstandard (4 bytes), that frame, whose content is the lesser
    of 3 and the `zigzag` of four elements a byte, lowest bits first, and, where there are others, their zigzag minus 3
    as a frame of `ShuffledZstd`. After a length of 0 that frame holds all elements as they are.
    """

    level: int = 1
    name: ClassVar[str] = "packed-zstd"
    called: ClassVar[str] = "deltas"
    levels: ClassVar[range] = range(1, 10)
    since: ClassVar[int] = 5
    signed: ClassVar[bool] = True

    def most(self, nbytes: int) -> int:
        """Bytes of the longest frame for so many bytes of data."""
        return 4 + ShuffledZstd().most(nbytes)

    def compress(self, data: np.ndarray, itemsize: int = 2) -> bytes:
        """The frame of some differences."""
        held = zigzag(data.view("<u2").copy())
        large = held[held >= 3] - np.uint16(3)
        four = np.zeros((-(-held.size // 4), 4), np.uint8)
        np.minimum(held, 3, out=four.reshape(-1)[: held.size], casting="unsafe")
        small = Zstd(self.level).compress(four @ np.array([1, 4, 16, 64], np.uint8))
        rest = ShuffledZstd(self.level).compress(large.view(np.uint8), 2) if large.size else b""
        frame = b"".join([len(small).to_bytes(4, "little"), small, rest])
        return frame if len(frame) < data.size else bytes(4) + ShuffledZstd(self.level).compress(data, 2)

    def decompress(self, frame: np.ndarray, out: np.ndarray) -> None:
        """Unpack a frame to exactly ``out``. ``ValueError`` where it is damaged or its content has another length."""
        end = 4 + int.from_bytes(frame[:4].tobytes(), "little")
        if end == 4:
            ShuffledZstd().decompress(frame[4:], out)
            return
        held = out.view("<u2")
        packed = scratch("packed", -(-held.size // 4))
        Zstd().decompress(frame[4:end], packed)
        whole = held.size // 4
        np.take(_FOUR, packed[:whole], out=held[: 4 * whole].view("<u8"), mode="clip")
        held[4 * whole :] = _FOUR[packed[whole:]].view("<u2")[: held.size % 4]
        large = np.flatnonzero(held == _LARGE)
        if large.size:
            rest = scratch("large", 2 * large.size)
            ShuffledZstd().decompress(frame[end:], rest)
            held[large] = unzigzag(rest.view("<u2") + np.uint16(3))
        elif end != len(frame):
            raise ValueError("its frame is longer than it says")

    def codec(self, itemsize: int) -> Any:
        """Zarr's codec of the frames that make up its own; readers of Zarr refuse deltas before they come to it."""
        return ShuffledZstd(self.level).codec(itemsize)


def zigzag(held: np.ndarray) -> np.ndarray:
    """Signed numbers as unsigned ones that are small where they are near zero, in place: 0, -1, 1, -2, … become 0, 1,
    2, 3, …"""
    signed = np.dtype(f"i{held.itemsize}")
    sign = np.right_shift(held.view(signed), 8 * held.itemsize - 1, out=_like(held).view(signed))
    np.left_shift(held, 1, out=held)
    return np.bitwise_xor(held, sign.view(held.dtype), out=held)


def unzigzag(held: np.ndarray) -> np.ndarray:
    """Inverse of `zigzag`."""
    sign = np.bitwise_and(held, 1, out=_like(held))
    np.negative(sign, out=sign)
    np.right_shift(held, 1, out=held)
    return np.bitwise_xor(held, sign, out=held)


def _like(held: np.ndarray) -> np.ndarray:
    """Memory for as many elements: fresh pages would take as long as the arithmetic."""
    return scratch("sign", held.nbytes).view(held.dtype).reshape(held.shape)


_LARGE = 2  # no -1, 0 or 1
_FOUR = np.array([0, -1, 1, _LARGE], "<i2")[np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3].view("<u8").reshape(-1)
"""The four differences of a byte."""

_BLOSC = struct.Struct("<4B3I")  # versions, flags, size of an element; lengths of the content, of a block, of the frame
_HEADER = _BLOSC.size
_SHUFFLED, _STORED, _ZSTD = 1, 2, 4 << 5
_BLOCK = 1 << 20
_TABLES = 256 << 10  # bytes of memory that Zstandard takes to unpack


def _grouped(itemsize: int) -> int:
    """Bytes of the elements that are grouped: complex numbers as pairs of such."""
    return min(itemsize, 8)


@cache
def _library(name: str) -> Any:
    """``zstd`` or ``blosc`` of numcodecs."""
    # The package first: where one thread imports it and another one a module of it, one gets a module half made.
    with uninterrupted():
        import numcodecs

    # As zarr-python has it. Blosc's own threads share one state, and write blocks in the order in which they end.
    numcodecs.blosc.use_threads = False
    return getattr(numcodecs, name)


def _unpack(decompress: Any, frame: np.ndarray, nbytes: int | None, out: np.ndarray) -> None:
    if nbytes != out.nbytes:
        said = "does not say how long its content is" if nbytes is None else f"announces {nbytes} bytes"
        raise ValueError(f"its frame {said}, where a chunk has {out.nbytes}")
    try:
        decompress(frame, out)
    except (RuntimeError, ValueError) as e:
        raise ValueError(f"its frame cannot be unpacked: {e}") from None


def content_nbytes(head: bytes) -> int | None:
    """The length of a frame's content by its header (RFC 8878, 3.1.1), None where it does not say or is no frame.

    >>> import numpy as np
    >>> content_nbytes(Zstd().compress(np.zeros(70_000, np.uint8)))
    70000
    >>> content_nbytes(b"not a frame at all")
    """
    if len(head) < 6 or head[:4] != _MAGIC:
        return None
    at, size = content_field(head[4])
    if not size or len(head) < at + size:
        return None
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


def content_field(flags: int) -> tuple[int, int]:
    """(place, length) of the field that says how long a frame's content is; with it the frame's header ends."""
    single = flags >> 5 & 1
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[flags & 3]  # a window's size and a dictionary's number may come first
    return at, (1 if single else 0, 2, 4, 8)[flags >> 6]


KINDS = (Zstd, ShuffledZstd)
Codec = Zstd | ShuffledZstd | PackedZstd
Compression = Codec | None


def chosen(given: Any) -> Compression:
    """The compression that a user names: None, ``"zstd"``, ``"weights"``, either with ``":LEVEL"``, or an object of the
    two classes.

    Raises `CheckpointError` for anything else.

    >>> chosen("zstd:9"), chosen("weights"), chosen(None)
    (Zstd(level=9), ShuffledZstd(level=1), None)
    """
    if given is None or isinstance(given, KINDS):
        return given
    found = _TEXT.match(given) if isinstance(given, str) else None
    if found is None:
        raise CheckpointError(
            "compression must be None, 'zstd', 'zstd:LEVEL', Zstd(level=…), 'weights', 'weights:LEVEL' or "
            f"ShuffledZstd(level=…), got {given!r}"
        )
    kind = next(k for k in KINDS if k.called == found[1])
    return kind(int(found[2])) if found[2] else kind()


def of_plain(kept: Any) -> Compression:
    """Inverse of ``plain``; ``ValueError`` for anything else."""
    if kept is None:
        return None
    for kind in (*KINDS, PackedZstd) if isinstance(kept, dict) and kept.keys() == {"name", "level"} else ():
        if kept["name"] == kind.name:
            return kind(kept["level"])
    raise ValueError(f"compression {str(kept)[:80]} is not known")


def compression_of(tensor: object) -> Compression:
    """How the stored chunks of a tensor are compressed."""
    return getattr(tensor, "compression", None)


# ----- lengths of files -----------------------------------------------------------------------------------------------


def most_nbytes(grid: ChunkGrid, coord: Sequence[int], itemsize: int, compression: Compression) -> int:
    """The length of the stored file of a shard; with compression, the most that it can be."""
    nbytes = place_of(grid, tuple(coord), itemsize).nbytes
    if compression is None:
        return nbytes
    chunk = math.prod(grid.chunk) * itemsize
    return nbytes + math.prod(grid.present(coord)) * (compression.most(chunk) - chunk)


def fits(nbytes: int, grid: ChunkGrid, coord: Sequence[int], itemsize: int, compression: Compression) -> bool:
    """Whether the file of a shard can have this length."""
    if compression is None:
        return nbytes == place_of(grid, tuple(coord), itemsize).nbytes
    return type(nbytes) is int and 0 < nbytes <= most_nbytes(grid, coord, itemsize, compression)
