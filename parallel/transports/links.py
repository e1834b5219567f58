"""One process's connection to one other while messages are exchanged: what is still to be sent, and what is to come.

:class:`StreamLink` sends everything through a byte stream; ``slots`` has another way for large messages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..collectives.pieces import QUANTUM, Batch, Sink, bytes_of, chunk_of, chunks, incoming, outgoing
from . import frames
from .streams import Stream

Check = Callable[["Link", frames.Head | None], None]
"""Looks at a head that came; raises where it is not what was expected."""


class Small:
    """A small message that is to come, head and all: read in one go, then handed out."""

    __slots__ = ("_i", "_j", "_offset", "_sinks", "got", "raw")

    def __init__(self, sinks: Sequence[Sink], size: int) -> None:
        self.raw = memoryview(bytearray(frames.SIZE + size))
        self.got = 0
        self._sinks, self._offset, self._i, self._j = sinks, frames.SIZE, 0, 0

    def deliver(self) -> bool:
        """Hand out the arrays; False where the next one's turn has not come."""
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
    """See the module. A link is told what an exchange moves by :meth:`start`; then the group calls :meth:`push` and :meth:`pull`
    until both return True."""

    @property
    def apart(self) -> bool:
        """Whether the other end needs no thread of this process."""
        return self.stream.apart

    def __init__(self, peer: int, stream: Stream) -> None:
        self.peer, self.stream = peer, stream
        stream.trust()
        self.stalled = False
        """A chunk is here whose turn has not come."""
        self.moved = 0
        """Counts what changed, so that a caller knows when another attempt is worth it."""
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
        sinks: Sequence[Sink] | None,
        small: int | None,
        expected: bytes = b"",
    ) -> None:
        """What this exchange sends and receives.

        ``head`` is what goes first (None: nothing is sent), a small message as a whole; ``batches`` follow it. ``sinks`` take what
        comes (None: nothing does); ``small`` is its size where it is a small message. ``expected`` is the head that comes if all is
        well: another one is looked at.
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
        """The head is here."""
        self._checked = True
        raw = message.raw[: frames.SIZE]
        if raw != self._expected:
            check(self, frames.unpack(raw))

    @abstractmethod
    def push(self) -> bool:
        """Send what can be sent now; True when all is sent."""

    @abstractmethod
    def pull(self, check: Check) -> bool:
        """Receive what is here; True when all has come."""

    @abstractmethod
    def interest(self) -> int:
        """What to poll for, of what :meth:`push` and :meth:`pull` wait for."""

    @abstractmethod
    def reason(self, length: int) -> str:
        """The text of an abort, whose head has come."""

    @property
    @abstractmethod
    def at_boundary(self) -> bool:
        """Whether a new head may be sent now."""

    def close(self) -> None:
        self.stream.close()


class StreamLink(Link):
    """Everything through the stream, received where it belongs."""

    def __init__(self, peer: int, stream: Stream) -> None:
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

    def _room(self, sink: Sink, k: int) -> np.ndarray:
        if self._scratch is None:
            self._scratch = np.empty(QUANTUM, np.uint8)
        return shaped(self._scratch, sink, k)


def send(stream: Stream, views: deque[memoryview]) -> None:
    """Send some of these and take what was sent out. Raises ``BlockingIOError`` where nothing can be."""
    n = stream.send(views if len(views) == 1 else list(views))
    while n:
        if n >= len(views[0]):
            n -= len(views.popleft())
        else:
            views[0] = views[0][n:]
            n = 0


def shaped(memory: np.ndarray, sink: Sink, k: int) -> np.ndarray:
    """The first bytes of ``memory`` in the shape of a sink's ``k``-th chunk."""
    index = chunks(sink.shape, sink.dtype.itemsize)[k]
    shape = sink.shape
    if index != (Ellipsis,):
        shape = tuple(s.stop - s.start for s in index) + sink.shape[len(index) :]
    return memory[: math.prod(shape) * sink.dtype.itemsize].view(sink.dtype).reshape(shape)
