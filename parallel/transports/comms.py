"""Byte streams over ``distributed``'s own connections, for clusters where no further port may be opened.

A stream is one Dask comm between two workers, on the port that the worker listens at anyway and with the security of
the cluster. The worker's event loop moves the bytes; the thread that runs a program polls a descriptor as for any other
stream. A message takes about 0.2 ms longer than over an own socket. Only bytes are read from such a connection, nothing
is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .listener import Gate
from .streams import Handshake

WINDOW = 4 << 20
"""The most bytes that are buffered on either side."""

_PART = 1 << 20
HANDLER = "meshtape_stream"


class CommStream(Handshake):
    """A ``Stream`` over a Dask comm. Made on the event loop's thread."""

    apart = False

    def __init__(self, comm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._comm, self._loop = comm, loop
        self._inbox: deque[memoryview] = deque()
        self._outbox: deque[bytes] = deque()
        self._in_bytes = self._out_bytes = 0
        self._ended = False
        self._changed = threading.Condition()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._room, self._more = asyncio.Event(), asyncio.Event()
        self.tasks = [loop.create_task(self._read()), loop.create_task(self._write())]

    # ----- on the event loop ------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while True:
                data = await self._comm.read(deserializers=("msgpack",))
                if not isinstance(data, bytes) or not 0 < len(data) <= _PART:
                    break
                with self._changed:
                    self._inbox.append(memoryview(data))
                    self._in_bytes += len(data)
                    full = self._in_bytes >= WINDOW
                    self._notify()
                if full:
                    self._room.clear()
                    if self._in_bytes >= WINDOW:
                        await self._room.wait()
        except (OSError, TypeError, ValueError):
            pass  # closed, or the message is not ours
        finally:
            self._finish()

    async def _write(self) -> None:
        try:
            while not self._ended or self._outbox:
                if not self._outbox:
                    self._more.clear()
                    if not self._outbox and not self._ended:
                        await self._more.wait()
                    continue
                data = self._outbox[0]
                await self._comm.write(data)
                with self._changed:
                    self._outbox.popleft()
                    self._out_bytes -= len(data)
                    self._notify()
        except OSError:
            pass
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._changed:
            self._ended = True
            self._notify()
        self._more.set()
        self._room.set()
        if not self._outbox or self._comm.closed():
            self._comm.abort()

    def _notify(self) -> None:
        self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._ring.send(b"x")

    # ----- in the thread that uses it ---------------------------------------------------------------------------------

    def trust(self) -> None:
        pass

    def fileno(self) -> int:
        return self._bell.fileno()

    def events(self, read: bool, write: bool) -> int:
        return select.POLLIN if read or write else 0  # the bell rings for both

    def awake(self) -> None:
        with contextlib.suppress(OSError):
            while self._bell.recv(4096):
                pass

    def send(self, views: Sequence[memoryview]) -> int:
        with self._changed:
            if self._ended:
                raise ConnectionError("closed")
            if self._out_bytes >= WINDOW:
                raise BlockingIOError
            parts, size = [], 0
            for v in views:
                parts.append(v[: _PART - size])
                size += len(parts[-1])
                if size == _PART:
                    break
            self._outbox.append(b"".join(parts))
            self._out_bytes += size
        self._call(self._more.set)
        return size

    def recv_into(self, view: memoryview) -> int:
        with self._changed:
            if not self._inbox:
                if self._ended:
                    return 0
                raise BlockingIOError
            data = self._inbox[0]
            n = min(len(view), len(data))
            view[:n] = data[:n]
            if n == len(data):
                self._inbox.popleft()
            else:
                self._inbox[0] = data[n:]
            before = self._in_bytes
            self._in_bytes -= n
        if before >= WINDOW > self._in_bytes:
            self._call(self._room.set)
        return n

    def _call(self, fn: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(fn)

    def _wait(self, reading: bool, deadline: float) -> None:
        with self._changed:
            if reading and (self._inbox or self._ended):
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            self._changed.wait(left)

    def shutdown(self) -> None:
        self._call(self._comm.abort)

    def close(self) -> None:
        with self._changed:
            self._ended = True
        # Queued bytes are still written, then the tasks end and close the comm.
        self._call(self._more.set)
        self._call(self._room.set)
        if not self._outbox:
            self._call(self._comm.abort)
        self._bell.close()
        self._ring.close()


def serve(worker: Any, gate: Gate, greet: Callable[[CommStream, Callable[[], None]], None]) -> None:
    """Take streams at the port of a Dask worker; ``greet`` is called with each, in a thread of its own."""

    def greeted(stream: CommStream, address: str) -> None:
        leave = functools.partial(gate.leave, gate.enter(address, stream.shutdown))
        try:
            greet(stream, leave)
        finally:
            leave()

    async def handler(comm: Any) -> str:
        stream = CommStream(comm, asyncio.get_running_loop())
        address = str(comm.peer_address).rpartition(":")[0]
        threading.Thread(target=greeted, args=(stream, address), name="meshtape-greet", daemon=True).start()
        await asyncio.gather(*stream.tasks, return_exceptions=True)
        return "OK"

    worker.handlers[HANDLER] = handler


def connect(worker: Any, address: str, timeout: float) -> CommStream:
    """A stream to another Dask worker. Called by any thread but the event loop's. Raises ``OSError``."""
    from distributed.comm import connect as open_comm

    async def start() -> CommStream:
        comm = await open_comm(address, timeout=timeout, **worker.security.get_connection_args("worker"))
        await comm.write({"op": HANDLER, "reply": False})
        return CommStream(comm, asyncio.get_running_loop())

    return asyncio.run_coroutine_threadsafe(start(), worker.loop.asyncio_loop).result(timeout + 1)
