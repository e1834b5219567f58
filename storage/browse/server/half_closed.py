"""Tornado's server for clients that close their side of a connection when they have asked, as ``nc -N`` does: they get
their answer. Where file descriptors run out, new connections wait, and those that say nothing are closed."""

from __future__ import annotations

import errno
import logging
import socket
import weakref
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream

_LOG = logging.getLogger("meshtape.browse")
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE = 1.0  # seconds without new connections
IDLE = 5.0  # seconds of silence after which a connection is closed to make room for others
_TOLD = 60.0  # seconds between two lines in the log


class _Stream(IOStream):
    heard = 0.0  # when it last gave a byte, by the loop's clock

    def read_from_fd(self, buf: bytearray | memoryview) -> int | None:
        """As Tornado's, but an end where nothing is awaited is no reason to close: the next read finds it again."""
        found = super().read_from_fd(buf)
        self.heard = self.heard if found is None else self.io_loop.time()
        if found == 0 and not self.reading():
            # Else the system would tell of it again and again until the answer is there.
            self.io_loop.update_handler(self.fileno(), IOLoop.ERROR | (IOLoop.WRITE if self.writing() else 0))
            return None
        return found


class _Listener:
    """A socket that listens, as Tornado uses it."""

    def __init__(self, sock: socket.socket, server: HalfClosedServer) -> None:
        self._sock, self._server = sock, server
        self.fileno, self.close = sock.fileno, sock.close

    def accept(self) -> tuple[socket.socket, Any]:
        """A connection. Without a descriptor for it, which else would be tried again without a pause, it waits."""
        try:
            return self._sock.accept()
        except OSError as e:
            if e.errno not in _SHORT:
                raise
            self._server.make_room(e)
            loop = IOLoop.current()
            loop.update_handler(self._sock, 0)
            loop.call_later(PAUSE, self._again)
            raise BlockingIOError from None

    def _again(self) -> None:
        if self._sock.fileno() >= 0:  # else the server has ended
            IOLoop.current().update_handler(self._sock, IOLoop.READ)


class HalfClosedServer(HTTPServer):
    """As Tornado's."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        super().initialize(*args, **kwargs)
        self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
        self._told = float("-inf")

    def add_sockets(self, sockets: Any) -> None:
        super().add_sockets(_Listener(s, self) for s in sockets)

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        sizes = {"max_buffer_size": stream.max_buffer_size, "read_chunk_size": stream.read_chunk_size}
        held = _Stream(stream.socket, **sizes)
        held.heard = held.io_loop.time()
        self._streams.add(held)
        super().handle_stream(held, address)

    def resume(self, stream: IOStream, address: Any) -> None:
        """Wait for the next request of a connection that a handler had detached."""
        if not stream.closed():
            super().handle_stream(stream, address)

    def make_room(self, error: OSError) -> None:
        """Close the connections that have been silent while they were to ask for something, and tell of ``error``."""
        now = IOLoop.current().time()
        silent = [s for s in self._streams if s.reading() and now - s.heard >= IDLE]
        for stream in silent:
            stream.close()
        if now - self._told >= _TOLD:
            self._told = now
            _LOG.warning(
                "%s: new connections wait, %d silent ones were closed; allow more by ulimit -n",
                error.strerror,
                len(silent),
            )
