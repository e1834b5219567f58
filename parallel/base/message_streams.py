"""Messages between a client and a worker, and the streams that carry them.

:class:`DaskMessages` uses a connection of Dask's as it is. :class:`SocketMessages` takes the socket out of one in the
clear: any thread writes to it at once, and a message costs a tenth of the processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pickle import dumps
from typing import Any, TypeAlias, TypeVar

import cloudpickle
from distributed.comm.tcp import TCP
from distributed.protocol import Serialize, pickle, to_serialize

T = TypeVar("T")
Message: TypeAlias = "dict[str, Any] | bytes"
"""A message: a dictionary, or one that :func:`encoded` has made bytes, once for all workers. Dask takes 25 µs to look
through a dictionary, and 2 µs for bytes."""
_LENGTH = struct.Struct("<Q")
_READ = 64 << 10


def encoded(message: dict[str, Any]) -> bytes:
    """A message of plain data as bytes; of functions and errors it holds what Dask has pickled."""
    return dumps(message, 5)


def packed(value: Any) -> list[Any]:
    """A value for a message, which :func:`unpacked` reads where it is used. If it cannot be read there, only the item
    that needs it fails, not the stream."""
    buffers: list[Any] = []
    head = pickle.dumps(value, buffer_callback=buffers.append)
    return [to_serialize(head), *map(to_serialize, buffers)]


def unpacked(message: Sequence[Any]) -> Any:
    """See :func:`packed`."""
    head, *buffers = (m.data if isinstance(m, Serialize) else m for m in message)
    # Arrays in them may be written to: what was pickled from memory that may not be is bytes.
    return pickle.loads(head, buffers=[bytearray(b) if isinstance(b, bytes) else b for b in buffers])


def read_error(pickled: bytes) -> BaseException | None:
    """An exception that another process has pickled; None where this one cannot make it: it has no such class, or one
    with arguments of its own."""
    try:
        error = pickle.loads(pickled)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


class RemoteError(Exception):
    """Stands for a worker's error that this process cannot rebuild: its name and text."""


def failure_message(error: BaseException) -> dict[str, Any]:
    """An error for a message, which :func:`failure` reads. Dask's own messages show pickled bytes where one cannot be
    read."""
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
    return {"failed": f"{type(error).__name__}: {error}", "pickled": pickled}


def failure(message: Mapping[str, Any]) -> BaseException:
    """See :func:`failure_message`."""
    return read_error(message["pickled"]) or RemoteError(message["failed"])


def popped(queue: deque[T]) -> Iterator[T]:
    """The elements of a queue, popped one by one; other threads may append and pop meanwhile."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


class MessageStream(ABC):
    """One end of a stream over a connection of Dask's, made on the event loop. All but :meth:`serve` may be called in
    any thread."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._loop = comm, asyncio.get_running_loop()
        self._messages: deque[Message] = deque()

    def put(self, message: Message) -> None:
        """Add a message, without a lock and without sending it."""
        self._messages.append(message)

    @abstractmethod
    def wake(self) -> None:
        """Send what was added, without waiting for the other end."""

    @abstractmethod
    async def serve(self, handle: Callable[[dict[str, Any]], None]) -> None:
        """Have incoming messages handled on the event loop, until the stream ends, by an error."""

    @abstractmethod
    def abort(self) -> None:
        """End the stream."""

    def _soon(self, fn: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(fn, *args)


def has_plain_socket(comm: Any) -> bool:
    """Whether :class:`SocketMessages` can take the socket of a connection of Dask's."""
    return type(comm) is TCP and hasattr(comm.stream, "_read_buffer_size")


class DaskMessages(MessageStream):
    """Messages over the connection as it is; those that have gathered are sent together."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self._some = asyncio.Event()

    def wake(self) -> None:
        self._soon(self._some.set)

    def abort(self) -> None:
        self._soon(self._comm.abort)

    async def serve(self, handle: Callable[[dict[str, Any]], None]) -> None:
        both = [asyncio.ensure_future(self._read(handle)), asyncio.ensure_future(self._write())]
        try:
            for ended in (await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))[0]:
                ended.result()
        finally:
            for task in both:
                task.cancel()
            self._comm.abort()

    async def _read(self, handle: Callable[[dict[str, Any]], None]) -> None:
        while True:
            for m in await self._comm.read():
                handle(pickle.loads(m) if isinstance(m, bytes) else m)

    async def _write(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            while self._messages:
                await self._comm.write(list(popped(self._messages)))


class SocketMessages(MessageStream):
    """Messages over the socket of the connection, which nothing else is read from or written to any more.

    Made in a moment in which the other end sends nothing: by the worker as soon as it has written
    its answer to the client's hello, by the client as soon as it has read that. Each message is pickled, behind its
    length. The connection must outlive the stream, and is aborted with it.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        stream = comm.stream
        if stream is None or stream.writing() or stream._read_buffer_size:
            raise ConnectionError("its connection is not at rest")
        stream.io_loop.remove_handler(stream.fileno())
        self._socket: socket.socket = stream.socket.dup()  # the connection closes its own
        self._socket.setblocking(False)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._got, self._unsent = bytearray(), bytearray()
        self._full = False
        self._lock = threading.Lock()

    def wake(self) -> None:
        try:
            with self._lock:
                for m in popped(self._messages):
                    data = m if isinstance(m, bytes) else encoded(m)
                    self._unsent += _LENGTH.pack(len(data))
                    self._unsent += data
                if not self._full:
                    self._send()
        except Exception as e:
            self._soon(self._end, e)

    def _send(self) -> None:
        """Called while the lock is held."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:  # the other end is slow, or stopped: nobody waits here for it
                self._full = True
                self._soon(self._when_writable)
                return
            except OSError:
                self._unsent.clear()
                raise
            del self._unsent[:sent]

    def _when_writable(self) -> None:
        if not self._ended.done():
            self._loop.add_writer(self._socket, self._go_on)

    def _go_on(self) -> None:
        self._loop.remove_writer(self._socket)
        self._full = False
        self.wake()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which the reader sees

    def _end(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def serve(self, handle: Callable[[dict[str, Any]], None]) -> None:
        self._loop.add_reader(self._socket, self._arrived, handle)
        try:
            await self._ended
        finally:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self.abort()
            with self._lock:
                self._socket.close()
            self._comm.abort()

    def _arrived(self, handle: Callable[[dict[str, Any]], None]) -> None:
        try:
            data = self._socket.recv(_READ)
            if not data:
                raise ConnectionResetError("the other end closed it")
            self._got += data
            at, size = 0, _LENGTH.size
            while len(self._got) >= at + size:
                end = at + size + _LENGTH.unpack_from(self._got, at)[0]
                if len(self._got) < end:
                    break
                handle(pickle.loads(bytes(self._got[at + size : end])))
                at = end
            del self._got[:at]
        except BlockingIOError:
            pass
        except Exception as e:
            self._end(e)
