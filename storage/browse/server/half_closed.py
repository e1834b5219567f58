"""Tornado's server for clients that close their side of a connection when they have asked, as ``nc -N`` does: they get
their answer."""

from __future__ import annotations

from typing import Any

from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream


class _Stream(IOStream):
    def read_from_fd(self, buf: bytearray | memoryview) -> int | None:
        """As Tornado's, but an end where nothing is awaited is no reason to close: the next read finds it again."""
        found = super().read_from_fd(buf)
        if found == 0 and not self.reading():
            # Else the system would tell of it again and again until the answer is there.
            self.io_loop.update_handler(self.fileno(), IOLoop.ERROR | (IOLoop.WRITE if self.writing() else 0))
            return None
        return found


class HalfClosedServer(HTTPServer):
    """As Tornado's."""

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        sizes = {"max_buffer_size": stream.max_buffer_size, "read_chunk_size": stream.read_chunk_size}
        super().handle_stream(_Stream(stream.socket, **sizes), address)

    def resume(self, stream: IOStream, address: Any) -> None:
        """Wait for the next request of a connection that a handler had detached."""
        if not stream.closed():
            super().handle_stream(stream, address)
