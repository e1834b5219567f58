"""The listener: an open port with a bounded number of handshake threads and a bounded time for each.

Unauthenticated connections cannot keep others out. If all threads are taken, the oldest connection is closed, of the
address that has most of them. If the system has no descriptor left, the port waits for one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

GREETED = 64
"""The most unauthenticated connections."""
GREETING = 10.0
"""Seconds for the authentication of a connection."""
_PAUSE = 0.05
_STARVED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Gate:
    """Counts unauthenticated connections, and closes one to make room for the next."""

    def __init__(self, limit: int = GREETED) -> None:
        self._limit = limit
        self._inside: dict[int, tuple[str, Callable[[], None]]] = {}  # oldest first
        self._changed = threading.Condition()
        self._next = 0
        self.most = 0
        """The most there were at once."""

    def enter(self, address: str, end: Callable[[], None]) -> int:
        """A place for a connection from ``address``, which ``end`` ends. A full gate ends another one first."""
        with self._changed:
            while len(self._inside) >= self._limit:
                crowd, _ = Counter(a for a, _ in self._inside.values()).most_common(1)[0]
                next(e for a, e in self._inside.values() if a == crowd)()
                # Its thread ends as soon as it is run; until then no other connection enters.
                self._changed.wait(_PAUSE)
            self._next += 1
            self._inside[self._next] = address, end
            self.most = max(self.most, len(self._inside))
            return self._next

    def leave(self, place: int) -> None:
        """Free the place of a connection that is authenticated or closed."""
        with self._changed:
            self._inside.pop(place, None)
            self._changed.notify_all()


class Listener:
    """A TCP port. ``greet`` is called with each connection, wrapped by ``wrap``, in a thread of its own. It closes
    connections that it does not keep, and calls its second argument as soon as one is authenticated."""

    def __init__(
        self,
        host: str,
        gate: Gate,
        wrap: Callable[[socket.socket], socket.socket],
        greet: Callable[[socket.socket, Callable[[], None]], None],
    ) -> None:
        self._gate, self._wrap, self._greet = gate, wrap, greet
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(512)
        self._closed = False
        self.starved = 0
        """How often the system had no descriptor for a connection."""
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="meshtape-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._socket.accept()
            except OSError as e:
                if self._closed or e.errno in (errno.EBADF, errno.EINVAL):
                    return
                # ECONNABORTED and its like concern one connection. Without descriptors those that wait stay in the
                # queue.
                if e.errno in _STARVED:
                    self.starved += 1
                    time.sleep(_PAUSE)
                continue
            try:
                sock = self._wrap(sock)
            except OSError:
                sock.close()
                continue
            place = self._gate.enter(str(address[0]), lambda sock=sock: _end(sock))  # type: ignore[misc]
            thread = threading.Thread(target=self._serve, args=(sock, place), name="meshtape-greet", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be had
                sock.close()
                self._gate.leave(place)
                time.sleep(_PAUSE)

    def _serve(self, sock: socket.socket, place: int) -> None:
        leave = functools.partial(self._gate.leave, place)
        try:
            self._greet(sock, leave)
        finally:
            leave()

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def join(self, seconds: float) -> bool:
        """Wait for the thread that accepts; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # under TLS that of the connection below
