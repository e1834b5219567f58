"""Unix sockets between two processes of one host, which are cheaper than TCP through the loopback.

A door is a name in ``/dev/shm`` beside that of the shared segment. One process listens there for the other, and removes
the name as soon as that has connected. Only the user of the listening process can open it.
"""

from __future__ import annotations

import contextlib
import os
import socket

from .memory import ROOT

_SUFFIX = ".door"


class UnixListener:
    """Made by the process that also made the segment; the other one calls :func:`enter`."""

    def __init__(self, segment: str) -> None:
        """Raises ``OSError`` where there can be none."""
        self._path = ROOT / f"{segment}{_SUFFIX}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # before it has a name, so that no other user can ever connect
            self._socket.bind(str(self._path))
            self._socket.listen(1)
        except BaseException:
            self._socket.close()
            raise

    def accept(self, timeout: float) -> socket.socket:
        """The connection of the process that has entered. Raises ``OSError`` where none has."""
        self._socket.settimeout(timeout)
        return self._socket.accept()[0]

    def close(self) -> None:
        """Take the name away; a connection stays."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def enter(segment: str) -> socket.socket:
    """The connection to the process that made the door. Raises ``OSError`` where there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)  # a busy door is an error, not a wait
    try:
        sock.connect(str(ROOT / f"{segment}{_SUFFIX}"))
    except BaseException:
        sock.close()
        raise
    return sock
