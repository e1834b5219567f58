"""Windows of blocks that lie in a file as they are, row-major: tensors of safetensors files, and blocks of packs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.core.blocks import Box
from ...base.checksums import crc32c
from ...base.scratch import scratch
from ...format import tensor_sums
from ...format.chunk_grid import runs
from ...stores.filesystem import IOV_MAX, active, preadv
from .sink import cut, read, touch


def begin(root: str, heads: Mapping[str, bytes]) -> None:
    """Make files that start with a header, in which zeros keep the place of checksums. Elements that an interrupted run
    has written stay."""
    fs = active()
    for file, head in heads.items():
        path = os.path.join(root, file)
        touch(fs, path)
        fd = fs.open(path)
        try:
            fs.write(fd, [head], 0)
        finally:
            fs.close(fd)


def seal(root: str, file: str, head: bytes, sums: Sequence[int], nbytes: int) -> bytes:
    """Write the header of a file of ``nbytes`` anew, with the checksums of its tensors, and make the file durable;
    returns the header."""
    fs, head = active(), tensor_sums.sealed(head, sums)
    fd = fs.open(os.path.join(root, file))
    try:
        fs.write(fd, [head], 0)
        cut(fd, nbytes)
        fs.fsync(fd)
    finally:
        fs.close(fd)
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

    def _sums(self, data: np.ndarray) -> list[int]:
        return [crc32c(data), *([zlib.crc32(data.reshape(-1).view(np.uint8))] if self.zipped else [])]

    def _runs(self, window: Box, data: np.ndarray) -> list[tuple[int, list[np.ndarray]]]:
        """(place in the file, pieces of ``data``) of each stretch of the file that a window covers."""
        item = self.itemsize
        raw = data.reshape(-1).view(np.uint8)
        out: list[tuple[int, list[np.ndarray]]] = []
        end = -1
        for inner, outer, length in runs(window.within(self.block), self.block.shape):
            if outer * item != end or len(out[-1][1]) == IOV_MAX:
                out.append((self.start + outer * item, []))
            out[-1][1].append(raw[inner * item : (inner + length) * item])
            end = (outer + length) * item
        return out

    def put(self, root: str, window: Box, tensor: Any) -> list[int]:
        data = read(tensor, window, passing=True)
        fs = active()
        fd = fs.open(os.path.join(root, self.file))
        try:
            for place, pieces in self._runs(window, data):
                fs.write(fd, pieces, place)
        finally:
            fs.close(fd)
        return self._sums(data)

    def check(self, root: str, window: Box, sums: list[int]) -> bool:
        held = scratch("check", window.size * self.itemsize)
        path = os.path.join(root, self.file)
        whole = all(_read_file(path, pieces, place) for place, pieces in self._runs(window, held))
        return whole and sums == self._sums(held)


class BlockedWriter:
    """Base of the writers of an array whose blocks are written by a `RawWriter` each: ``_of`` finds that of a
    window."""

    __slots__ = ()

    def _of(self, window: Box) -> RawWriter:
        raise NotImplementedError

    def put(self, root: str, window: Box, tensor: Any) -> list[int]:
        return self._of(window).put(root, window, tensor)

    def check(self, root: str, window: Box, sums: list[int]) -> bool:
        return self._of(window).check(root, window, sums)


def _read_file(path: str, buffers: list[np.ndarray], offset: int) -> bool:
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        return preadv(fd, buffers, offset) == sum(b.nbytes for b in buffers)
    finally:
        os.close(fd)
