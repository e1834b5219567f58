"""One process's connection to one other while messages are exchanged: what is still to be sent, and what is to come.

:class:`StreamLink` sends everything through a byte stream. :class:`SlotLink` sends large messages through slots of memory that both
processes see, and only a byte a chunk through the stream, which also tells when the other process ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from . import frames
from .pieces import QUANTUM, Batch, Sink, Steps, bytes_of, chunk_of, incoming, outgoing
from .streams import Stream

Check = Callable[["Link", frames.Head | None], None]
"""Looks at a head that came; raises where it is not what was expected."""

_READ = 1 << 17


class Link:
    """See the module. A link is told what an exchange moves by :meth:`start`; then the group calls :meth:`push` and :meth:`pull`
    until both return True."""

    def __init__(self, peer: int, stream: Stream) -> None:
        self.peer, self.stream = peer, stream
        self.stalled = False
        """A chunk is here whose turn has not come."""
        self.moved = 0
        """Counts what changed, so that a caller knows when another attempt is worth it."""

    def start(
        self, head: bytes | None, batches: Sequence[Batch], sinks: Sequence[Sink] | None, small: tuple[bool, bool]
    ) -> None:
        """What this exchange sends (``head`` None: nothing) and receives (``sinks`` None: nothing). ``small`` says of both
        messages whether they are."""
        raise NotImplementedError

    def push(self) -> bool:
        """Send what can be sent now; True when all is sent."""
        raise NotImplementedError

    def pull(self, check: Check) -> bool:
        """Receive what is here; True when all has come."""
        raise NotImplementedError

    def interest(self) -> int:
        """What to poll for, of what :meth:`push` and :meth:`pull` wait for."""
        raise NotImplementedError

    def reason(self, length: int) -> str:
        """The text of an abort, whose head has come."""
        return self.stream.read(length, 1.0).decode(errors="replace")

    @property
    def at_boundary(self) -> bool:
        """Whether a new head may be sent now."""
        raise NotImplementedError

    def close(self) -> None:
        self.stream.close()


class StreamLink(Link):
    """Everything through the stream, received where it belongs."""

    def __init__(self, peer: int, stream: Stream) -> None:
        super().__init__(peer, stream)
        self._views: deque[memoryview] = deque()
        self._out: Steps | None = None
        self._in: Steps | None = None
        self._receiving = False
        self._head = bytearray(frames.SIZE)
        self._head_got = 0
        self._into: memoryview | None = None
        self._got = 0
        self._chunk: np.ndarray | None = None
        self._scratch: np.ndarray | None = None

    def start(
        self, head: bytes | None, batches: Sequence[Batch], sinks: Sequence[Sink] | None, small: tuple[bool, bool]
    ) -> None:
        if head is not None:
            self._views.append(memoryview(head))
            self._out = outgoing(batches)
        self._receiving = sinks is not None
        if sinks is not None:
            self._in, self._head_got = incoming(sinks), 0

    @property
    def at_boundary(self) -> bool:
        return not self._views and (self._out is None or self._out.done)

    def interest(self) -> int:
        return self.stream.events(self._receiving and not self.stalled, not self.at_boundary)

    def push(self) -> bool:
        views, out = self._views, self._out
        try:
            while True:
                # Views of contiguous chunks cost nothing; packed ones are made as they are needed.
                size = sum(map(len, views))
                while out is not None and not out.done and len(views) < 32 and size < 2 * QUANTUM:
                    chunk = chunk_of(*out.current())
                    views.append(bytes_of(np.asarray(chunk, order="C")))
                    size += chunk.nbytes
                    out.next()
                if not views:
                    return True
                n = self.stream.send(list(views))
                while n:
                    if n >= len(views[0]):
                        n -= len(views.popleft())
                    else:
                        views[0] = views[0][n:]
                        n = 0
        except BlockingIOError:
            return False

    def pull(self, check: Check) -> bool:
        if not self._receiving:
            return True
        self.stalled = False
        try:
            while self._head_got < frames.SIZE:
                n = self.stream.recv_into(memoryview(self._head)[self._head_got :])
                if n == 0:
                    raise ConnectionError("closed")
                self._head_got += n
                if self._head_got == frames.SIZE:
                    check(self, frames.unpack(self._head))
            steps = self._in
            assert steps is not None
            while not steps.done:
                sink, k, j = steps.current()
                if self._into is None:
                    place = sink.place(k, j)
                    self._chunk = None
                    if place is None:
                        place = self._chunk = self._room(sink, k)
                    self._into, self._got = bytes_of(place), 0
                while self._got < len(self._into):
                    n = self.stream.recv_into(self._into[self._got :])
                    if n == 0:
                        raise ConnectionError("closed")
                    self._got += n
                if not sink.accept(k, j, self._chunk):
                    self.stalled = True
                    return False
                self._into = self._chunk = None
                self.moved += 1
                steps.next()
        except BlockingIOError:
            return False
        self._receiving = False
        return True

    def _room(self, sink: Sink, k: int) -> np.ndarray:
        if self._scratch is None:
            self._scratch = np.empty(QUANTUM, np.uint8)
        return _shaped(self._scratch, sink, k)


class Slots(Protocol):
    """Memory for chunks that one process writes and another reads; ``count`` of them."""

    count: int
    by_reference: bool
    """Whether a slot only refers to the sender's memory, which must then stay as it is until the chunk was taken."""

    def put(self, slot: int, chunk: np.ndarray) -> None: ...

    def view(self, slot: int, sink: Sink, k: int) -> np.ndarray:
        """The chunk in a slot, in the shape of the ``k``-th chunk of the sink."""

    def taken(self, slot: int) -> None:
        """The chunk in the slot was taken."""

    def close(self) -> None: ...


_CHUNK, _TAKEN = ord("c"), ord("k")
_HEAD_BYTE = ord("M")


class SlotLink(Link):
    """Large messages through slots. The stream carries heads and small messages as they are, and one byte for each chunk that was
    put in a slot or taken out of one."""

    def __init__(self, peer: int, stream: Stream, outbox: Slots, inbox: Slots) -> None:
        super().__init__(peer, stream)
        self._outbox, self._inbox = outbox, inbox
        self._views: deque[memoryview] = deque()
        self._out: Steps | None = None
        self._in: Steps | None = None
        self._out_inline = self._in_inline = True
        self._receiving = False
        self._head_seen = False
        self._free = outbox.count
        self._put = self._take = 0  # the next slots
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._end = 0
        self._into: memoryview | None = None
        self._got = 0
        self._chunk: np.ndarray | None = None

    def start(
        self, head: bytes | None, batches: Sequence[Batch], sinks: Sequence[Sink] | None, small: tuple[bool, bool]
    ) -> None:
        if head is not None:
            self._views.append(memoryview(head))
            self._out, self._out_inline = outgoing(batches), small[0]
        self._receiving = sinks is not None
        if sinks is not None:
            self._in, self._head_seen, self._in_inline = incoming(sinks), False, small[1]

    @property
    def at_boundary(self) -> bool:
        return not self._views

    def interest(self) -> int:
        waits = self._waits_for_slots or (self._receiving and not self.stalled)
        return self.stream.events(waits, bool(self._views))

    @property
    def _waits_for_slots(self) -> bool:
        if self._out is None or self._out_inline:
            return False
        return not self._out.done or (self._outbox.by_reference and self._free < self._outbox.count)

    def push(self) -> bool:
        try:
            while True:
                self._flush()
                out = self._out
                if out is None or (out.done and not self._waits_for_slots):
                    return True
                if self._out_inline:
                    while not out.done:
                        self._views.append(bytes_of(np.asarray(chunk_of(*out.current()), order="C")))
                        out.next()
                elif self._free and not out.done:
                    self._outbox.put(self._put, chunk_of(*out.current()))
                    self._put = (self._put + 1) % self._outbox.count
                    self._free -= 1
                    self.moved += 1
                    out.next()
                    self._views.append(_CHUNK_BYTE)
                else:
                    self._read_taken()
                    if not self._free or (out.done and self._waits_for_slots):
                        return False
        except BlockingIOError:
            return False

    def _flush(self) -> None:
        views = self._views
        while views:
            n = self.stream.send(list(views))
            while n:
                if n >= len(views[0]):
                    n -= len(views.popleft())
                else:
                    views[0] = views[0][n:]
                    n = 0

    def _fill(self) -> None:
        """More bytes from the stream; raises ``BlockingIOError`` where there are none."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        n = self.stream.recv_into(self._buffer[self._end :])
        if n == 0:
            raise ConnectionError("closed")
        self._end += n
        self.moved += 1

    def _read_taken(self) -> None:
        """Count the slots that became free, as far as that is what comes next."""
        while True:
            while self._start < self._end and self._buffer[self._start] == _TAKEN:
                self._free += 1
                self._start += 1
            if self._start < self._end:
                return
            try:
                self._fill()
            except BlockingIOError:
                return

    def pull(self, check: Check) -> bool:
        if not self._receiving:
            return True
        self.stalled = False
        steps = self._in
        assert steps is not None
        try:
            while not (self._head_seen and steps.done):
                if self._head_seen and self._in_inline:
                    if not self._pull_inline(steps):
                        return False
                    continue
                if self._start == self._end:
                    self._fill()
                byte = self._buffer[self._start]
                if byte == _TAKEN:
                    self._free += 1
                    self._start += 1
                elif byte == _CHUNK and self._head_seen:
                    sink, k, j = steps.current()
                    if not sink.accept(k, j, self._inbox.view(self._take, sink, k)):
                        self.stalled = True
                        return False
                    self._inbox.taken(self._take)
                    self._take = (self._take + 1) % self._inbox.count
                    self._start += 1
                    self.moved += 1
                    steps.next()
                    self._say_taken()
                elif byte == _HEAD_BYTE:
                    while self._end - self._start < frames.SIZE:
                        self._fill()
                    head = frames.unpack(self._buffer[self._start : self._start + frames.SIZE])
                    self._start += frames.SIZE
                    # Within a message only an abort may come.
                    check(self, None if self._head_seen and head and head.kind == frames.DATA else head)
                    self._head_seen = True
                else:
                    check(self, None)
        except BlockingIOError:
            return False
        self._receiving = False
        return True

    def _say_taken(self) -> None:
        """Bytes about slots go between whole frames."""
        self._views.append(_TAKEN_BYTE)
        # A peer that has all it needs may have left; where it still owes something, reading tells.
        with contextlib.suppress(OSError):
            self._flush()

    def _pull_inline(self, steps: Steps) -> bool:
        sink, k, j = steps.current()
        if self._into is None:
            place = sink.place(k, j)
            self._chunk = None
            if place is None:
                place = self._chunk = _shaped(np.empty(QUANTUM, np.uint8), sink, k)
            self._into, self._got = bytes_of(place), 0
        while self._got < len(self._into):
            if self._start == self._end:
                self._fill()
            n = min(len(self._into) - self._got, self._end - self._start)
            self._into[self._got : self._got + n] = self._buffer[self._start : self._start + n]
            self._got += n
            self._start += n
        if not sink.accept(k, j, self._chunk):
            self.stalled = True
            return False
        self._into = self._chunk = None
        self.moved += 1
        steps.next()
        return True

    def reason(self, length: int) -> str:
        here = bytes(self._buffer[self._start : min(self._end, self._start + length)])
        self._start += len(here)
        rest = self.stream.read(length - len(here), 1.0) if len(here) < length else b""
        return (here + rest).decode(errors="replace")

    def close(self) -> None:
        super().close()
        self._outbox.close()
        self._inbox.close()


_CHUNK_BYTE, _TAKEN_BYTE = memoryview(b"c"), memoryview(b"k")


def _shaped(memory: np.ndarray, sink: Sink, k: int) -> np.ndarray:
    """The first bytes of ``memory`` in the shape of a sink's ``k``-th chunk."""
    shape = chunk_shape(sink, k)
    size = int(np.prod(shape, dtype=np.int64)) * sink.dtype.itemsize
    return memory[:size].view(sink.dtype).reshape(shape)


def chunk_shape(sink: Sink, k: int) -> tuple[int, ...]:
    """Shape of the ``k``-th chunk of a batch."""
    from .pieces import chunks

    index = chunks(sink.shape, sink.dtype.itemsize)[k]
    if index == (Ellipsis,):
        return sink.shape
    return tuple(s.stop - s.start for s in index) + sink.shape[len(index) :]
