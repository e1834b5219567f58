"""Shared-memory links: large messages go through slots of memory that both processes see (:mod:`.memory`).

The stream carries heads, small messages, and one byte for each chunk that was put in a slot or taken out of one. It
also shows when the other process ends. A slot is read only after the stream's byte about it, which orders the memory
accesses.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import numpy as np

from ..collectives.pieces import BatchSink, chunk_of
from . import frames
from .links import Check, Link, Small, send
from .streams import PeerStream


class LinkSlots(Protocol):
    """``count`` slots of memory for chunks, which one process writes and another reads."""

    count: int
    by_reference: bool
    """Whether a slot only refers to the sender's memory, which must then stay unchanged until the chunk is taken."""

    def put(self, slot: int, chunk: np.ndarray) -> None: ...

    def view(self, slot: int, sink: BatchSink, k: int) -> np.ndarray:
        """The chunk in a slot, in the shape of the ``k``-th chunk of the sink."""

    def taken(self, slot: int) -> None:
        """Mark the chunk in a slot as taken."""

    def close(self) -> None: ...


_CHUNK, _TAKEN = ord("c"), ord("k")
_HEAD_BYTE = ord("M")
_HERE, _GONE = memoryview(b"c"), memoryview(b"k" * 64)  # 64: more than there are slots
_READ = 1 << 17


class SlotLink(Link):
    """See the module. ``outbox`` has the slots that this process writes, ``inbox`` those of the other."""

    def __init__(self, peer: int, stream: PeerStream, outbox: LinkSlots, inbox: LinkSlots) -> None:
        super().__init__(peer, stream)
        self.outbox, self.inbox = outbox, inbox
        self._free = outbox.count
        self._put = self._take = 0  # the next slots
        self._owed = 0  # chunks that were taken, and the other process was not told
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._end = 0

    @property
    def apart(self) -> bool:
        return super().apart and not self.outbox.by_reference

    @property
    def at_boundary(self) -> bool:
        return not self._views

    def interest(self) -> int:
        waits = self._waits_for_slots or (self._receiving and not self.stalled)
        return self.stream.events(waits, bool(self._views))

    @property
    def _waits_for_slots(self) -> bool:
        return not self._out.done or (self.outbox.by_reference and self._free < self.outbox.count)

    def push(self) -> bool:
        out = self._out
        try:
            while True:
                while self._views:
                    send(self.stream, self._views)
                if out.done and not self._waits_for_slots:
                    return True
                if self._free and not out.done:
                    self.outbox.put(self._put, chunk_of(*out.current()))
                    self._put = (self._put + 1) % self.outbox.count
                    self._free -= 1
                    self.moved += 1
                    out.next()
                    self._views.append(_HERE)
                else:
                    self._count_freed()
                    if not self._free or (out.done and self._waits_for_slots):
                        return False
        except BlockingIOError:
            return False

    def _fill(self) -> None:
        """Read more bytes from the stream. Raises ``BlockingIOError`` if there are none."""
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

    def _count_freed(self) -> None:
        """Count the slots that became free, from the next bytes of the stream."""
        before = self._free
        while True:
            while self._start < self._end and self._buffer[self._start] == _TAKEN:
                self._free += 1
                self._start += 1
            if self._start < self._end:
                if self._free == before and not self._receiving and self._buffer[self._start] == _HEAD_BYTE:
                    raise ConnectionError("it stopped before it had all")  # it takes everything before it goes on
                return
            try:
                self._fill()
            except BlockingIOError:
                return

    def pull(self, check: Check) -> bool:
        if not self._receiving:
            return True
        self.stalled = False
        message, steps = self._message, self._in
        assert message is not None
        try:
            if message.got == 0 and self._start == self._end:
                self._read_at_once(message, check)
            while True:
                if 0 < message.got < len(message.raw):
                    self._read_message(message, check)
                if self._checked and message.got == len(message.raw):
                    if not message.deliver():
                        self.stalled = True
                        return False
                    if steps.done:
                        break
                if self._start == self._end:
                    self._fill()
                byte = self._buffer[self._start]
                if byte == _TAKEN:
                    self._free += 1
                    self._start += 1
                elif byte == _CHUNK and self._checked:
                    sink, k, j = steps.current()
                    if not sink.accept(k, j, self.inbox.view(self._take, sink, k)):
                        self.stalled = True
                        self._say_taken()
                        return False
                    self.inbox.taken(self._take)
                    self._take = (self._take + 1) % self.inbox.count
                    self._owed += 1
                    self._start += 1
                    self.moved += 1
                    steps.next()
                    # Said for several at once, as each message wakes the other process; before it runs out of slots.
                    if 2 * self._owed >= self.inbox.count or steps.done or self._start == self._end:
                        self._say_taken()
                elif byte == _HEAD_BYTE and not self._checked:
                    self._read_message(message, check)
                elif byte == _HEAD_BYTE:  # within a message only an abort may come
                    while self._end - self._start < frames.SIZE:
                        self._fill()
                    head = frames.unpack(self._buffer[self._start : self._start + frames.SIZE])
                    self._start += frames.SIZE
                    message.got = 0  # the reason is not in there
                    check(self, None if head and head.kind == frames.DATA else head)
                else:
                    check(self, None)
        except BlockingIOError:
            return False
        self.moved += 1
        self._receiving = False
        return True

    def _read_at_once(self, message: Small, check: Check) -> None:
        """Read the next bytes, most often a head or a whole small message, right into ``message``."""
        n = self.stream.recv_into(message.raw)
        if n == 0:
            raise ConnectionError("closed")
        self.moved += 1
        if n == len(message.raw) and message.raw[0] == _HEAD_BYTE:
            message.got = n
            self._look(message, check)
        else:
            self._buffer[:n] = message.raw[:n]
            self._start, self._end = 0, n

    def _read_message(self, message: Small, check: Check) -> None:
        """Read the head, and the rest of a small message, as far as it is here."""
        while message.got < len(message.raw):
            if self._start == self._end:
                self._fill()
            n = min(len(message.raw) - message.got, self._end - self._start)
            message.raw[message.got : message.got + n] = self._buffer[self._start : self._start + n]
            message.got += n
            self._start += n
            if not self._checked and message.got >= frames.SIZE:
                self._look(message, check)

    def _say_taken(self) -> None:
        """Tell the other process about taken chunks, between whole frames."""
        if not self._owed:
            return
        self._views.append(_GONE[: self._owed])
        self._owed = 0
        # A peer that has all it needs may have left; where it still owes something, reading tells.
        with contextlib.suppress(OSError):
            while self._views:
                send(self.stream, self._views)

    def reason(self, length: int) -> str:
        message = self._message
        got = message.got if message is not None else 0
        here = bytes(message.raw[frames.SIZE : min(got, frames.SIZE + length)]) if message is not None else b""
        more = bytes(self._buffer[self._start : min(self._end, self._start + length - len(here))])
        self._start += len(more)
        here += more
        rest = self.stream.read(length - len(here), 1.0) if len(here) < length else b""
        return (here + rest).decode(errors="replace")

    def close(self) -> None:
        super().close()
        self.outbox.close()
        self.inbox.close()
