"""Byte streams between two processes: plain sockets, and sockets under TLS.

A stream in use never blocks: if nothing can be sent or received it raises ``BlockingIOError``, and
:meth:`PeerStream.events` gives the events to poll its descriptor for. The handshake comes before, with a limit on its
time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from . import frames

SOCKET_BUFFER = 4 << 20
_IOV = 64  # buffers that one system call takes


class PeerStream(Protocol):
    """A connection to one process."""

    apart: bool
    """Whether its bytes move without the help of another thread of this process."""

    def trust(self) -> None:
        """Give the stream large buffers, once the other side is authenticated."""

    def fileno(self) -> int:
        """The descriptor to poll."""

    def events(self, read: bool, write: bool) -> int:
        """The poll events for a read or a write."""

    def awake(self) -> None:
        """Called when polling found the descriptor ready."""

    def send(self, views: Sequence[memoryview]) -> int:
        """Send some bytes; returns how many. Raises ``BlockingIOError`` if none can go, ``OSError`` at the end."""

    def recv_into(self, view: memoryview) -> int:
        """Receive some bytes. Returns their number, 0 at the end. Raises ``BlockingIOError`` if none are there."""

    def read(self, n: int, timeout: float) -> bytes:
        """Exactly ``n`` bytes, waiting for them."""

    def write(self, data: bytes, timeout: float) -> None:
        """All of these bytes, waiting until they are taken."""

    def shutdown(self) -> None:
        """End the connection without freeing it: threads that wait for it see it closed. Called by any thread."""

    def close(self) -> None: ...


class Handshake:
    """Reads and writes of a stream that wait for its other end, with a limit on their time."""

    def read(self, n: int, timeout: float) -> bytes:
        out, deadline = bytearray(n), time.monotonic() + timeout
        got = 0
        while got < n:
            try:
                part = self.recv_into(memoryview(out)[got:])
            except BlockingIOError:
                self._wait(True, deadline)
                continue
            if part == 0:
                raise ConnectionError("closed during the handshake")
            got += part
        return bytes(out)

    def write(self, data: bytes, timeout: float) -> None:
        view, deadline = memoryview(data), time.monotonic() + timeout
        while view:
            try:
                view = view[self.send([view]) :]
            except BlockingIOError:
                self._wait(False, deadline)


class SocketStream(Handshake):
    """A plain socket."""

    apart = True

    def __init__(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # not a TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._sock = sock

    def trust(self) -> None:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER)

    def fileno(self) -> int:
        return self._sock.fileno()

    def events(self, read: bool, write: bool) -> int:
        return (select.POLLIN if read else 0) | (select.POLLOUT if write else 0)

    def awake(self) -> None:
        pass

    def send(self, views: Sequence[memoryview]) -> int:
        return self._sock.send(views[0]) if len(views) == 1 else self._sock.sendmsg(views[:_IOV])

    def recv_into(self, view: memoryview) -> int:
        return self._sock.recv_into(view)

    def _wait(self, reading: bool, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._sock, self.events(reading, not reading))
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("no answer in time")

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class TlsStream(SocketStream):
    """A socket under TLS, with the certificates of the cluster's ``Security``."""

    def __init__(self, secure: ssl.SSLSocket, timeout: float) -> None:
        """Shake hands on a wrapped socket. Raises ``OSError``."""
        secure.settimeout(timeout)
        secure.do_handshake()
        super().__init__(secure)
        self._secure = secure
        self._crossed = 0  # what the last call waits for, which may be the other direction while TLS itself talks

    def events(self, read: bool, write: bool) -> int:
        return super().events(read, write) | (self._crossed if read or write else 0)

    def send(self, views: Sequence[memoryview]) -> int:
        return self._tried(self._secure.send, views[0])

    def recv_into(self, view: memoryview) -> int:
        return self._tried(self._secure.recv_into, view)

    def _tried(self, call: Callable[[memoryview], int], view: memoryview) -> int:
        self._crossed = 0
        try:
            return call(view)
        except ssl.SSLWantReadError:
            self._crossed = select.POLLIN
        except ssl.SSLWantWriteError:
            self._crossed = select.POLLOUT
        raise BlockingIOError

    def shutdown(self) -> None:
        # Of the connection below: the TLS object belongs to the thread that uses it.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._secure, socket.SHUT_RDWR)


def say_abort(stream: PeerStream, head: bytes, reason: str) -> None:
    """Send the reason why this process stops, if the other still listens."""
    with contextlib.suppress(OSError):
        stream.write(head + reason.encode()[: frames.TEXT_LIMIT], 1.0)
