"""Compression of stored chunks: none, or zstd, as Zarr's codec of that name.

A compressed chunk is one frame of Zstandard (RFC 8878) that says how long its content is. The library is the one with which zarr-python
reads it. Frames are hostile until proven otherwise: one that announces another length than its chunk has is refused before a byte of it is
unpacked, and none can write beyond the memory of its chunk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
from .chunk_grid import ChunkGrid, place_of

_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVELS = range(1, 23)
_TEXT = re.compile(r"\Azstd(?::(\d{1,2}))?\Z")


@dataclass(frozen=True, slots=True)
class Zstd:
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
    Zstandard: RFC 8878. Trained weights are nearly noise: float32 shrinks by some 8 %, bfloat16 by some 20 %, at a fraction of a disk's speed. Masks, indices,
    counts, embeddings with unused rows and the states of sparse optimizers shrink to a small part.

    Examples
    --------
    >>> Zstd(level=9)
    Zstd(level=9)
    """

    level: int = 3

    def __post_init__(self) -> None:
        if type(self.level) is not int or self.level not in _LEVELS:
            raise CheckpointError(
                f"a level of zstd is an integer from {_LEVELS[0]} to {_LEVELS[-1]}, got {self.level!r}"
            )

    def __str__(self) -> str:
        return f"zstd:{self.level}"

    def most(self, nbytes: int) -> int:
        """Bytes of the longest frame for so many bytes of data.

        The bound of ``ZSTD_compressBound``: data that cannot be compressed is stored, with a few bytes for each block.
        """
        return nbytes + (nbytes >> 8) + (((128 << 10) - nbytes) >> 11 if nbytes < 128 << 10 else 0)

    def compress(self, data: np.ndarray) -> bytes:
        """The frame of some bytes; the same for the same bytes, level and version of the library."""
        from numcodecs.zstd import compress

        return compress(data, self.level)

    def decompress(self, frame: np.ndarray, out: np.ndarray) -> None:
        """Unpack a frame to exactly ``out``. ``ValueError`` where it is damaged or its content has another length."""
        from numcodecs.zstd import decompress

        nbytes = content_nbytes(frame[:18].tobytes())
        if nbytes != out.nbytes:
            said = "does not say how long its content is" if nbytes is None else f"announces {nbytes} bytes"
            raise ValueError(f"its frame {said}, where a chunk has {out.nbytes}")
        try:
            decompress(frame, out)
        except RuntimeError as e:
            raise ValueError(f"its frame cannot be unpacked: {e}") from None

    def plain(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        return {"name": "zstd", "level": self.level}


def content_nbytes(head: bytes) -> int | None:
    """The length of a frame's content by its header (RFC 8878, 3.1.1), None where it does not say or is no frame.

    >>> import numpy as np
    >>> content_nbytes(Zstd().compress(np.zeros(70_000, np.uint8)))
    70000
    >>> content_nbytes(b"not a frame at all")
    """
    if len(head) < 6 or head[:4] != _MAGIC:
        return None
    flags = head[4]
    single = flags >> 5 & 1
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[flags & 3]  # a window's size and a dictionary's number may come first
    size = (1 if single else 0, 2, 4, 8)[flags >> 6]
    if not size or len(head) < at + size:
        return None
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


Compression = Zstd | None


def chosen(given: Any) -> Compression:
    """The compression that a user names: None, ``"zstd"``, ``"zstd:LEVEL"`` or a `Zstd`.

    Raises `CheckpointError` for anything else.

    >>> chosen("zstd:9"), chosen(None)
    (Zstd(level=9), None)
    """
    if given is None or isinstance(given, Zstd):
        return given
    found = _TEXT.match(given) if isinstance(given, str) else None
    if found is None:
        raise CheckpointError(f"compression must be None, 'zstd', 'zstd:LEVEL' or Zstd(level=…), got {given!r}")
    return Zstd(int(found[1])) if found[1] else Zstd()


def of_plain(kept: Any) -> Compression:
    """Inverse of `Zstd.plain`; ``ValueError`` for anything else."""
    if kept is None:
        return None
    if not isinstance(kept, dict) or kept.get("name") != "zstd" or kept.keys() != {"name", "level"}:
        raise ValueError(f"compression {str(kept)[:80]} is not known")
    return Zstd(kept["level"])


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
