"""Sinks: the targets of a transfer, a Zarr checkpoint or a Hugging Face directory, written window by window.

The plan fixes the place of every byte of the result, so windows may come in any order, from any thread or process, and
again after an interruption; the files are the same. A sink guards its bytes with checksums: a writer's `put` returns
them, its `check` reads the window back and compares, `finish` turns them into the metadata that makes the directory a
checkpoint. Where files cannot be written in pieces, as in an object store, `streams` gives each file whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ....arrays.core.blocks import Box
from ...base.checksums import crc32c
from ...base.scratch import out_of_memory, scratch
from ...format.chunk_grid import windows
from ...readers.tensor import read_into
from ...rules.casting import making
from ...stores.atomic_directory import Folder
from ...stores.filesystem import Files, active

BATCH = 8 << 20  # bytes handed to the kernel in one call, and of staging memory
CHECKED = 1 << 20  # bytes that are read back at a time: their checksum is taken while a processor's cache has them


class Unit(NamedTuple):
    """A window of an array."""

    array: int
    box: Box


class WindowWriter(Protocol):
    """A writer of the windows of one array, small enough to send to another process.

    One of windows that lie in files as they are has the method ``raw_of`` in place of these (see ``raw_writer``).
    """

    def put(self, root: str, box: Box, tensor: Any) -> list[int]:
        """Write a window of a tensor to its places; returns its checksums. Bytes already in stored form are copied."""

    def check(self, root: str, box: Box, sums: list[int]) -> bool:
        """Whether the bytes in the files have these checksums."""


@dataclass
class UploadStream:
    """One file of the result from its first byte to its last, for an upload.

    ``digest`` is known at its end. ``nbytes`` of a compressed file is an upper bound until then.
    """

    name: str
    nbytes: int
    body: Any  # makes the iterator of buffers; each is valid until the next is asked for
    digest: Any = field(default=0)  # what its sink wants to know of it: plain JSON

    def pieces(self) -> Iterator[Any]:
        yield from self.body(self)


class TransferSink(Protocol):
    """The target of a transfer."""

    nbytes: int  # that all files need at least, roughly

    @property
    def files(self) -> Sequence[str]:
        """The names of the files that it writes, for a report."""

    def units(self, tensors: Sequence[Any], limit: int) -> list[Unit]:
        """Windows that cover every array, in order of places: of ``limit`` bytes; one chunk or shard at least."""

    def describe(self) -> Any:
        """The plan as JSON: equal plans write equal files."""

    def create(self, root: str) -> None:
        """Make directories and files below ``root``, leaving those alone that an interrupted run has made."""

    def writer(self, array: int, limit: int) -> WindowWriter:
        """The `WindowWriter` of one array, which holds about ``limit`` bytes of it in memory."""

    def sync(self, root: str, sums: dict[Unit, list[int]]) -> None:
        """Complete the files of data and make them durable."""

    def mark(self, suffix: str) -> None:
        """Append a suffix to the names of all arrays or files: an object store keeps those of an older generation."""

    def streams(self, tensors: Sequence[Any], limit: int) -> list[UploadStream]:
        """Every file of data, whole; each holds about ``limit`` bytes of its array at a time."""

    def accept(self, streams: Sequence[UploadStream]) -> None:
        """Take the streams that were uploaded for `finish`, in place of `sync`."""

    def finish(self, folder: Folder, target: str) -> int:
        """Write the metadata that makes the directory a checkpoint, last; returns the bytes of all files."""


def read(tensor: Any, box: Box, *, passing: bool = False) -> np.ndarray:
    """The elements of a box, read in this thread, as other threads read other windows.

    ``passing``: in memory that this thread's next window uses again.
    """
    nbytes = box.size * tensor.dtype.itemsize
    try:
        memory = scratch("window", nbytes) if passing else np.empty(nbytes, np.uint8)
    except MemoryError as e:
        raise out_of_memory(f"key {tensor.name!r}", e, "give fewer threads=, or a lower memory_limit=") from None
    out = memory.view(tensor.dtype).reshape(box.shape)
    return making(tensor.name, lambda: read_into(tensor, box, out))[0]


def stretches(tensor: Any, box: Box, limit: int) -> Iterator[np.ndarray]:
    """The bytes of a box as they follow one another in a row-major file: whole rows of chunks where they fit."""
    shape, itemsize = box.shape, tensor.dtype.itemsize
    rows = (*(max(c, 1) for c in tensor.chunk[:1]), *shape[1:])
    for part in windows(shape, rows if math.prod(rows) * itemsize <= limit else (1,) * len(shape), itemsize, limit):
        yield read(tensor, part.shifted(box.offset)).reshape(-1).view(np.uint8)


def by_array(sums: Mapping[Unit, list[int]]) -> dict[int, list[tuple[Box, list[int]]]]:
    """(box, sums) of the windows of each array."""
    out: dict[int, list[tuple[Box, list[int]]]] = {}
    for unit, values in sums.items():
        out.setdefault(unit.array, []).append((unit.box, values))
    return out


def sums(documents: Mapping[str, bytes]) -> dict[str, int]:
    """Checksums of documents, as part of a plan."""
    return {name: crc32c(data) for name, data in documents.items()}


def clear(root: str, late: Sequence[str]) -> None:
    """Remove the last files of an interrupted run, which are written anew."""
    for file in late:
        path = os.path.join(root, file)
        if os.path.lexists(path):
            active().unlink(path)


def cut(fd: int, nbytes: int) -> None:
    """Truncate a file to its length: something may have been appended to one of an interrupted run."""
    if os.fstat(fd).st_size > nbytes:
        os.ftruncate(fd, nbytes)


def touch(fs: Files, path: str) -> None:
    if not os.path.lexists(path):
        fs.close(fs.create(path))
