"""Sending large answers: ranges of files by ``sendfile``, each checked before its last byte goes out, and
pieces that are read or computed ahead.

A thread sends with blocking calls, the fastest way for a client that reads. One that takes nothing for a moment gives
its thread back, and gets another when it reads on: so clients that read slowly, or not at all, keep nobody waiting.
Where a check fails, the connection ends early, which every client notices by the length it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import numpy as np

from ...arrays.backends.threads import Pool
from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointReplaced, MeshtapeError
from ..base.scratch import keep_freed
from ..readers.raw_tensor import RawTensor
from ..readers.reading import opened
from ..stores import store as stores
from .served import ServedCheckpoint
from .virtual_files import LIMIT, ChunkFile, VirtualFile, check, read

_AHEAD = max(1, min(4, (os.cpu_count() or 1) - 1))  # pieces that are made while those before them are sent
SMALL = 256 << 10  # bytes of an answer that is sent with its headers
PATIENCE = 120.0  # seconds that a client may take nothing
_TURN = 0.25  # seconds of them in which it has a thread
_KEPT = 16  # answers that keep what is made while their clients take nothing; others make it again
Piece = RawTensor | np.ndarray  # of bytes


class _TakesNothing(Exception):
    """The client, for the time of a turn."""


class Answer:
    """A large answer on its way: a piece, and the bytes of a file from ``at`` to ``stop``, if any. ``then`` is
    told whether all of them are gone."""

    def __init__(
        self,
        sock: socket.socket,
        file: VirtualFile,
        at: int,
        stop: int,
        piece: Piece,
        source: ServedCheckpoint,
        then: Callable[[bool], None],
    ) -> None:
        self.sock, self.source, self.then = sock, source, then
        self.error: MeshtapeError | None = None  # that ended it
        self.moved = time.monotonic()  # when the client last took something
        self._file, self._at, self._stop = file, at, stop
        self._piece: Piece | None = piece
        self._first = at - (piece.stored_nbytes if isinstance(piece, RawTensor) else piece.size)
        self._sent = 0  # bytes of the piece
        self._coming: deque[tuple[int, RawTensor | Future[np.ndarray]]] = deque()
        sock.settimeout(_TURN)
        # Else the last byte waits until those before it are acknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, readers: Pool) -> None:
        """Send what is left. Raises `_TakesNothing` in between."""
        while True:
            if self._piece is None:
                self._piece = lying(self._file, self._first, self._at) or read(self._file, self._first, self._at)
            while self._at < self._stop and len(self._coming) < _AHEAD:
                at, self._at = self._at, min(self._stop, self._file.cut(self._at))
                coming = lying(self._file, at, self._at) or readers.submit(read, self._file, at, self._at)
                self._coming.append((at, coming))
            try:
                self._send_file(self._piece) if isinstance(self._piece, RawTensor) else self._send_bytes(self._piece)
            except TimeoutError:
                raise _TakesNothing from None
            if not self._coming:
                return
            self._first, coming = self._coming.popleft()
            self._piece, self._sent = coming.result() if isinstance(coming, Future) else coming, 0

    def _took(self, nbytes: int) -> None:
        if nbytes > 0:
            self._sent, self.moved = self._sent + nbytes, time.monotonic()

    def _send_bytes(self, piece: np.ndarray) -> None:
        with memoryview(piece) as data:
            while self._sent < len(data):
                self._took(self.sock.send(data[self._sent :]))

    def _send_file(self, held: RawTensor) -> None:
        last = held.start + held.stored_nbytes - 1
        with (
            opened(held.path, "bytes that are served", held.generation) as reader,
            open(reader.fileno(), "rb", closefd=False) as file,  # type: ignore[attr-defined]
        ):
            held.check_length(reader)
            if (start := held.start + self._sent) < last:
                file.seek(start)
                try:
                    self.sock.sendfile(file, start, last - start)
                finally:
                    self._took(file.tell() - start)
            end = os.pread(file.fileno(), 1, last)
            held.check_length(reader)
            if len(end) != 1 or held.start + self._sent != last:
                raise OSError("it ends early")
            self._took(self.sock.send(end))

    def forget(self) -> None:
        """Keep nothing that can be made again; the piece ends at ``_at`` then."""
        for _, coming in self._coming:
            if isinstance(coming, Future):
                coming.cancel()
        if self._coming:
            self._at = self._coming[0][0]
        self._coming.clear()
        if isinstance(self._piece, np.ndarray):
            self._piece = None


class Sender:
    """Threads that read and compute pieces of answers, and those that send large answers meanwhile."""

    def __init__(self) -> None:
        keep_freed()  # of the pieces that are made
        self.readers = Pool(32, thread_name_prefix="meshtape-ahead")
        self.senders = Pool(32, thread_name_prefix="meshtape-serve")  # these may wait for clients
        self._busy: dict[Answer, None] = {}
        self._waiting = 0  # of them, those whose client takes nothing
        self._ahead: OrderedDict[tuple[int, Box], tuple[ChunkFile, Future[np.ndarray]]] = OrderedDict()
        self._asked: deque[tuple[int, Box]] = deque(maxlen=8)  # chunks, and below those that follow them
        self._expected: deque[tuple[int, Box]] = deque(maxlen=8)
        self._reading = 0  # requests for chunks
        self._lock = threading.Lock()

    def first(self, file: VirtualFile, start: int, stop: int) -> Piece:
        """The first piece of an answer. Where it begins a chunk of Zarr that follows one that was asked for, the
        beginnings of the next chunks are made meanwhile."""
        if stop - start > SMALL and (held := lying(file, start, stop)) is not None:
            with opened(held.path, "bytes that are served", held.generation) as reader:
                held.check_length(reader)  # what shows now has a status of its own
            return held
        if not isinstance(file, ChunkFile) or start or stop != file.cut(0) or stop > LIMIT:
            return read(file, start, stop)
        after = file.following(_AHEAD)
        with self._lock:
            _, coming = self._ahead.pop(file.key, (None, None))
            self._reading += 1
            self._asked.append(file.key)
            if file.key in self._expected and self._reading <= _AHEAD:  # else others have the processors
                with contextlib.suppress(RuntimeError):  # the server is closed
                    for each in after:
                        if each.key not in self._ahead and each.key not in self._asked:
                            self._ahead[each.key] = each, self.readers.submit(read, each, 0, each.cut(0))
                while len(self._ahead) > 2 * _AHEAD:  # nobody has asked for these
                    self._ahead.popitem(last=False)[1][1].cancel()
            self._expected.extend(each.key for each in after[:1])
        try:
            early = coming is not None and coming.done()
            # One that waits for a thread, as this request did, or that failed, is read now.
            if coming is None or coming.cancel() or coming.exception() is not None:
                return read(file, start, stop)
            if early:
                check(file.tensor)
            return coming.result()
        finally:
            with self._lock:
                self._reading -= 1

    def start(self, answer: Answer, loop: asyncio.AbstractEventLoop) -> None:
        """Send an answer from a thread; ``loop`` is asked to tell when its client reads on."""
        with self._lock:
            self._busy[answer] = None
        try:
            self.senders.submit(self._send, answer, loop)
        except RuntimeError:  # the server is closed
            self._finish(answer, False)

    def _send(self, answer: Answer, loop: asyncio.AbstractEventLoop) -> None:
        whole = False
        try:
            answer.send(self.readers)
            whole = True
        except _TakesNothing:
            with self._lock:
                waiting = self._waiting = self._waiting + 1
            if waiting > _KEPT:
                answer.forget()
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wait, answer, loop)
                return
        except CheckpointReplaced:
            answer.source.forget()
        except MeshtapeError as e:
            answer.error = e  # the client sees an answer that is too short
        except (OSError, RuntimeError, CancelledError):  # the last two: the server is closed
            pass
        self._finish(answer, whole)

    def _wait(self, answer: Answer, loop: asyncio.AbstractEventLoop) -> None:
        """Until the client takes more, or its time is over."""

        def go_on(more: bool) -> None:
            loop.remove_writer(answer.sock)
            timer.cancel()
            with self._lock:
                self._waiting -= 1
            self.start(answer, loop) if more else self._finish(answer, False)

        timer = loop.call_at(loop.time() + answer.moved + PATIENCE - time.monotonic(), go_on, False)
        loop.add_writer(answer.sock, go_on, True)

    def _finish(self, answer: Answer, whole: bool) -> None:
        answer.forget()
        with self._lock:
            self._busy.pop(answer, None)
        answer.sock.close()
        with contextlib.suppress(RuntimeError):  # the server is closed
            answer.then(whole)

    def close(self) -> None:
        with self._lock:
            for answer in self._busy:
                with contextlib.suppress(OSError):
                    answer.sock.shutdown(socket.SHUT_RDWR)
        for pool in (self.readers, self.senders):
            pool.shutdown(wait=False, cancel_futures=True)


def lying(file: VirtualFile, at: int, stop: int) -> RawTensor | None:
    """Where some bytes lie in a local file as they are."""
    held = file.stored(at, stop)
    return held if isinstance(held, RawTensor) and not stores.is_url(held.path) else None
