"""Read-ahead: neighbouring small arrays of one object, fetched together.

An array that shares a file with others is a range of bytes. A transfer or a comparison reads array after array, and
each would be a request of its own to an object store. `ReadAhead` knows the coming ranges: near ones make a segment,
and the first read in a segment fetches all of it. A segment is fetched once and held until its ranges were read, or
until others need its memory; its remaining ranges are then read one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..base.waiting import lock
from ..checkpoint.checkpoint import Checkpoint
from ..readers.packed import PackedBlocks
from ..readers.raw_tensor import RawTensor
from ..rules.lazy_tensors import leaves
from ..stores import store as stores
from ..stores.contract import Reader, fill


class _AheadSegment:
    __slots__ = ("data", "fetched", "file_nbytes", "left", "lock", "start", "stop", "tag")

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop, self.left = start, stop, 0
        self.data: bytearray | None = None
        self.fetched = False
        self.file_nbytes, self.tag = 0, ""
        self.lock = lock()


class ReadAhead:
    """Segments of the objects of a checkpoint, of which at most about ``limit`` bytes are held.

    Threads may share it; a copy in another process is empty.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit, self._used = limit, 0
        self._segments: dict[str, tuple[list[int], list[_AheadSegment]]] = {}
        self._held: dict[_AheadSegment, None] = {}  # the one that was used last comes last
        self._lock = lock()

    def __reduce__(self) -> Any:
        return ReadAhead, ()

    def expect(self, tensors: Iterable[Any]) -> None:
        """Plan for reads of these tensors."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for tensor in tensors:
            for where, start, nbytes in _ranges(tensor):
                if nbytes <= stores.holding(where)[0].gap:
                    ranges.setdefault(where, []).append((start, start + nbytes))
        for where, wanted in ranges.items():
            store = stores.holding(where)[0]
            longest = min(store.job, self._limit // (2 * len(ranges)))  # arrays that are split lie in all files
            made: list[_AheadSegment] = []
            for start, stop in sorted(wanted):
                if not made or start > made[-1].stop + store.gap or stop - made[-1].start > longest:
                    made.append(_AheadSegment(start, stop))
                made[-1].stop = max(made[-1].stop, stop)
                made[-1].left += stop - start
            self._segments[where] = [s.start for s in made], made

    @property
    def reserved(self) -> int:
        """The most bytes that it may hold."""
        return self._limit if self._segments else 0

    def reader(self, where: str, reader: Reader) -> Reader:
        """A reader of an object that serves ranges from its segments where it can."""
        return _AheadReader(self, where, reader) if where in self._segments else reader

    def segment(self, where: str, start: int, stop: int) -> _AheadSegment | None:
        starts, made = self._segments[where]
        at = bisect_right(starts, start) - 1
        return made[at] if at >= 0 and stop <= made[at].stop else None

    def bytes_of(self, segment: _AheadSegment, reader: Reader) -> bytearray | None:
        """The bytes of a segment, fetched at the first call; None where they were dropped."""
        with segment.lock:
            if not segment.fetched:
                data = bytearray(segment.stop - segment.start)
                del data[reader.readv([data], segment.start) :]
                segment.file_nbytes, segment.tag = reader.nbytes, reader.tag
                segment.data, segment.fetched = data, True
                with self._lock:
                    self._used += len(data)
                    self._held[segment] = None
                    while self._used > self._limit and len(self._held) > 1:
                        self._drop(next(iter(self._held)))
            return segment.data

    def used(self, segment: _AheadSegment, nbytes: int) -> None:
        """Count the bytes read of a segment, and drop it when all were read."""
        with self._lock:
            segment.left -= nbytes
            if segment in self._held:
                del self._held[segment]
                self._held[segment] = None
                if segment.left <= 0:
                    self._drop(segment)

    def _drop(self, segment: _AheadSegment) -> None:
        del self._held[segment]
        self._used -= len(segment.data or b"")
        segment.data = None


def reading_ahead(ckpt: Checkpoint, limit: int) -> ReadAhead:
    """A `ReadAhead` for all later reads of a checkpoint; `ReadAhead.expect` plans them. Disks are not read ahead."""
    ahead = ReadAhead(limit)
    if stores.is_url(ckpt.path) and ckpt.computed is None:
        ckpt.belongs_to(replace(ckpt.generation, ahead=ahead))
    return ahead


def _ranges(tensor: Any) -> Iterator[tuple[str, int, int]]:
    """(file, first byte, bytes) of the stored parts of a tensor that are ranges of files."""
    for leaf in leaves(tensor):
        if isinstance(leaf, PackedBlocks):
            for coord, held in leaf.objects.items():
                yield leaf.path(coord), held.start, held.nbytes
        elif isinstance(leaf, RawTensor):
            yield leaf.path, leaf.start, leaf.stored_nbytes


class _AheadReader(Reader):
    __slots__ = ("_ahead", "_inner", "_last", "_where")

    def __init__(self, ahead: ReadAhead, where: str, inner: Reader) -> None:
        self._ahead, self._where, self._inner = ahead, where, inner
        self._last: _AheadSegment | None = None  # whose answer told length and tag

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes if self._last is None else self._last.file_nbytes

    @property
    def tag(self) -> str:
        return self._inner.tag if self._last is None else self._last.tag

    def readv(self, buffers: list[Any], offset: int) -> int:
        views = [memoryview(b).cast("B") for b in buffers]
        wanted = sum(map(len, views))
        segment = self._ahead.segment(self._where, offset, offset + wanted)
        data = None if segment is None else self._ahead.bytes_of(segment, self._inner)
        if segment is None or data is None:
            return self._inner.readv(buffers, offset)
        self._last = segment
        held = memoryview(data)[offset - segment.start :][:wanted]
        fill(views, held)
        self._ahead.used(segment, wanted)
        return len(held)

    def close(self) -> None:
        self._inner.close()
