"""Links: a process's connection to one other, with the state of the current exchange.

:class:`StreamLink` sends everything through a byte stream. :mod:`.shared_memory_link` sends large messages through
shared memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..collectives.pieces import QUANTUM, Batch, BatchSink, bytes_of, chunk_of, chunks, incoming, outgoing
from . import frames
from .streams import PeerStream

Check = Callable[["Link", frames.Head | None], None]
"""Checks a received head; raises for an unexpected one."""


class Small:
    """A small message to receive, with its head: it is read in one piece, then delivered."""

    __slots__ = ("_i", "_j", "_offset", "_sinks", "got", "raw")

    def __init__(self, sinks: Sequence[BatchSink], size: int) -> None:
        self.raw = memoryview(bytearray(frames.SIZE + size))
        self.got = 0
        self._sinks, self._offset, self._i, self._j = sinks, frames.SIZE, 0, 0

    def deliver(self) -> bool:
        """Deliver the arrays to their sinks; False if a sink does not accept its array yet."""
        while self._i < len(self._sinks):
            sink = self._sinks[self._i]
            count = math.prod(sink.shape)
            while count and self._j < sink.width:
                chunk = np.frombuffer(self.raw, sink.dtype, count, self._offset).reshape(sink.shape)
                if not sink.accept(0, self._j, chunk):
                    return False
                self._j += 1
                self._offset += chunk.nbytes
            self._i, self._j = self._i + 1, 0
        return True


class Link(ABC):
    """See the module. :meth:`start` sets the sends and receives of an exchange; then the group calls :meth:`push` and
    :meth:`pull` until both return True."""

    @property
    def apart(self) -> bool:
        """Whether bytes move without the help of another thread of this process."""
        return self.stream.apart

    def __init__(self, peer: int, stream: PeerStream) -> None:
        self.peer, self.stream = peer, stream
        stream.trust()
        self.stalled = False
        """Whether a received chunk is not accepted by its sink yet."""
        self.moved = 0
        """A counter of progress, by which a caller knows when another attempt is worth it."""
        self._views: deque[memoryview] = deque()  # go through the stream next
        self._out = outgoing(())
        self._in = incoming(())
        self._message: Small | None = None
        self._receiving = self._checked = False
        self._expected = b""

    def start(
        self,
        head: bytes | None,
        batches: Sequence[Batch],
        sinks: Sequence[BatchSink] | None,
        small: int | None,
        expected: bytes = b"",
    ) -> None:
        """Set the sends and receives of an exchange.

        ``head`` is sent first (None: nothing is sent), with a small message as a whole; ``batches`` follow it.
        ``sinks`` take the received message (None: nothing is received); ``small`` is its size if it is a small one.
        ``expected`` is the usual head; only another one is checked.
        """
        self._expected = expected
        if head is not None:
            self._views.append(memoryview(head))
            self._out = outgoing(batches)
        self._receiving = sinks is not None
        if sinks is not None:
            self._in = incoming(sinks if small is None else ())
            self._message, self._checked = Small(sinks if small is not None else (), small or 0), False

    def _look(self, message: Small, check: Check) -> None:
        """Check a complete head."""
        self._checked = True
        raw = message.raw[: frames.SIZE]
        if raw != self._expected:
            check(self, frames.unpack(raw))

    @abstractmethod
    def push(self) -> bool:
        """Send as much as possible now; True when all is sent."""

    @abstractmethod
    def pull(self, check: Check) -> bool:
        """Receive the bytes that are here; True when all has come."""

    @abstractmethod
    def interest(self) -> int:
        """The poll events that :meth:`push` and :meth:`pull` wait for."""

    @abstractmethod
    def reason(self, length: int) -> str:
        """The text of an abort whose head was received."""

    @property
    @abstractmethod
    def at_boundary(self) -> bool:
        """Whether a new head may be sent now."""

    def close(self) -> None:
        self.stream.close()


class StreamLink(Link):
    """A link that sends everything through the stream, and receives it right into the sinks' memory."""

    def __init__(self, peer: int, stream: PeerStream) -> None:
        super().__init__(peer, stream)
        self._into: memoryview | None = None
        self._got = 0
        self._chunk: np.ndarray | None = None
        self._scratch: np.ndarray | None = None

    @property
    def at_boundary(self) -> bool:
        return not self._views and self._out.done

    def interest(self) -> int:
        return self.stream.events(self._receiving and not self.stalled, not self.at_boundary)

    def push(self) -> bool:
        views, out = self._views, self._out
        try:
            while True:
                # Views of contiguous chunks cost nothing; packed ones are made as they are needed.
                size = sum(map(len, views))
                while not out.done and len(views) < 32 and size < 2 * QUANTUM:
                    chunk = chunk_of(*out.current())
                    views.append(bytes_of(np.asarray(chunk, order="C")))
                    size += chunk.nbytes
                    out.next()
                if not views:
                    return True
                send(self.stream, views)
        except BlockingIOError:
            return False

    def pull(self, check: Check) -> bool:
        if not self._receiving:
            return True
        self.stalled = False
        message = self._message
        assert message is not None
        try:
            while message.got < len(message.raw):
                n = self.stream.recv_into(message.raw[message.got :])
                if n == 0:
                    raise ConnectionError("closed")
                message.got += n
                if not self._checked and message.got >= frames.SIZE:
                    self._look(message, check)
            if not message.deliver():
                self.stalled = True
                return False
            while not self._in.done:
                sink, k, j = self._in.current()
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
                self._in.next()
        except BlockingIOError:
            return False
        self.moved += 1
        self._receiving = False
        return True

    def reason(self, length: int) -> str:
        assert self._message is not None
        here = bytes(self._message.raw[frames.SIZE : min(self._message.got, frames.SIZE + length)])
        rest = self.stream.read(length - len(here), 1.0) if len(here) < length else b""
        return (here + rest).decode(errors="replace")

    def _room(self, sink: BatchSink, k: int) -> np.ndarray:
        if self._scratch is None:
            self._scratch = np.empty(QUANTUM, np.uint8)
        return shaped(self._scratch, sink, k)


def send(stream: PeerStream, views: deque[memoryview]) -> None:
    """Send some of these bytes, and remove them. Raises ``BlockingIOError`` if nothing can be sent."""
    n = stream.send(views if len(views) == 1 else list(views))
    while n:
        if n >= len(views[0]):
            n -= len(views.popleft())
        else:
            views[0] = views[0][n:]
            n = 0


def shaped(memory: np.ndarray, sink: BatchSink, k: int) -> np.ndarray:
    """The first bytes of ``memory`` in the shape of a sink's ``k``-th chunk."""
    index = chunks(sink.shape, sink.dtype.itemsize)[k]
    shape = sink.shape
    if index != (Ellipsis,):
        shape = tuple(s.stop - s.start for s in index) + sink.shape[len(index) :]
    return memory[: math.prod(shape) * sink.dtype.itemsize].view(sink.dtype).reshape(shape)
