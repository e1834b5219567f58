"""The server of a checkpoint as ranges over HTTP: for ``meshtape serve``, and in a thread of its own for `serve`.

Access is as in the browser: loopback, or a token, here the first part of every path (or ``Authorization: Bearer``), as
readers of ranges keep no cookies. An answer of one piece goes through Tornado. A longer one is sent by a thread with
blocking calls: ranges of files by ``sendfile``, each checked before its last byte goes out, and pieces that are read or
computed ahead; then Tornado has the connection back. Where a check fails, the connection ends early, which every client
notices by the length it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import os
import re
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import numpy as np
from tornado import web

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointReplaced, MeshtapeError, NotACheckpoint
from ..base.scratch import keep_freed
from ..browse.server.app import Server
from ..browse.server.handlers import Handler
from ..checkpoint.checkpoint import Checkpoint
from ..readers.raw_tensor import RawTensor
from ..readers.reading import opened
from ..stores import store as stores
from .served import Found, ServedCheckpoint
from .virtual_files import LIMIT, ChunkFile, VirtualFile, check, read

_SMALL = 256 << 10  # bytes of an answer that is sent with its headers
_AHEAD = max(1, min(4, (os.cpu_count() or 1) - 1))  # pieces that are made while those before them are sent
_PATIENCE = 120.0  # seconds that a client may take nothing
Piece = RawTensor | np.ndarray  # of bytes
_RANGE = re.compile(r"bytes=(\d*)-(\d*)\Z")


def part_of(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """The range that a header asks for; None for the whole: several ranges, and what is no range of bytes, are answered
    so.

    ``ValueError`` where no byte of the file lies in it.

    >>> part_of("bytes=2-4", 10), part_of("bytes=7-", 10), part_of("bytes=-3", 10), part_of("bytes=0-1,4-5", 10)
    ((2, 5), (7, 10), (7, 10), None)
    >>> part_of("bytes=0-99999999999999999999999", 10)
    (0, 10)
    """
    found = _RANGE.match(header or "")
    if found is None or found.groups() == ("", ""):
        return None
    # Twenty digits are beyond any file, and short enough for int().
    first, last = (n.lstrip("0")[:20] or n[-1:] for n in found.groups())
    start, stop = (
        (int(first), min(int(last) + 1, nbytes) if last else nbytes) if first else (max(0, nbytes - int(last)), nbytes)
    )
    if first and last and int(last) < int(first):
        return None
    if start >= stop:
        raise ValueError(header)
    return start, stop


class Sender:
    """Threads that read and compute pieces of answers, and those that send answers of several pieces meanwhile."""

    def __init__(self) -> None:
        keep_freed()  # of the pieces that are made
        self.readers = ThreadPoolExecutor(32, thread_name_prefix="meshtape-ahead")
        self.senders = ThreadPoolExecutor(32, thread_name_prefix="meshtape-serve")  # these may wait for clients
        self._busy: set[socket.socket] = set()
        self._ahead: OrderedDict[tuple[int, Box], tuple[ChunkFile, Future[np.ndarray]]] = OrderedDict()
        self._asked: deque[tuple[int, Box]] = deque(maxlen=8)  # chunks, and below those that follow them
        self._expected: deque[tuple[int, Box]] = deque(maxlen=8)
        self._reading = 0  # requests for chunks
        self._lock = threading.Lock()

    def read(self, file: VirtualFile, start: int, stop: int) -> np.ndarray:
        """Some bytes of a file. Where they are a chunk of Zarr that follows one that was asked for, the next chunks are
        made meanwhile."""
        if not isinstance(file, ChunkFile) or stop - start < file.nbytes or file.nbytes > LIMIT:
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
                            self._ahead[each.key] = each, self.readers.submit(read, each, 0, each.nbytes)
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

    def send(
        self,
        sock: socket.socket,
        file: VirtualFile,
        at: int,
        stop: int,
        piece: RawTensor | np.ndarray,
        source: ServedCheckpoint,
        then: Callable[[bool], None],
    ) -> None:
        """Send a piece and the bytes from ``at`` to ``stop``, then tell whether all of them are gone."""
        with self._lock:
            self._busy.add(sock)
        coming: deque[Future[Piece]] = deque()
        whole = False
        try:
            with sock:
                sock.settimeout(_PATIENCE)
                while True:
                    while at < stop and len(coming) < _AHEAD:
                        end = min(stop, file.cut(at))
                        coming.append(self.readers.submit(_piece, file, at, end))
                        at = end
                    if isinstance(piece, RawTensor):
                        _send_file(sock, piece)
                    else:
                        sock.sendall(piece)
                    if not coming:
                        whole = True
                        return
                    piece = coming.popleft().result()
        except CheckpointReplaced:
            source.forget()
        except (MeshtapeError, OSError, RuntimeError, CancelledError):  # the last two: the server is closed
            pass  # the client sees an answer that is too short
        finally:
            for each in coming:
                each.cancel()
            with self._lock:
                self._busy.discard(sock)
            with contextlib.suppress(RuntimeError):  # the server is closed
                then(whole)

    def close(self) -> None:
        with self._lock:
            for sock in self._busy:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for pool in (self.readers, self.senders):
            pool.shutdown(wait=False, cancel_futures=True)


def _lying(file: VirtualFile, at: int, stop: int) -> RawTensor | None:
    """Where some bytes lie in a local file as they are."""
    held = file.stored(at, stop)
    return held if isinstance(held, RawTensor) and not stores.is_url(held.path) else None


def _piece(file: VirtualFile, at: int, stop: int) -> Piece:
    return _lying(file, at, stop) or read(file, at, stop)


def _send_file(sock: socket.socket, held: RawTensor) -> None:
    end = held.start + held.stored_nbytes - 1
    with (
        opened(held.path, "bytes that are served", held.generation) as reader,
        open(reader.fileno(), "rb", closefd=False) as file,  # type: ignore[attr-defined]
    ):
        held.check_length(reader)
        sock.sendfile(file, held.start, end - held.start)
        last = os.pread(file.fileno(), 1, end)
        held.check_length(reader)
        if len(last) != 1:
            raise OSError("it ends early")
        sock.sendall(last)


class FileHandler(Handler):
    """GET and HEAD of files and folders."""

    def initialize(self, server: CheckpointServer) -> None:
        super().initialize(server.access)
        self.server, self.source, self.sender = server, server.source, server.sender

    def _knows_token(self, token: str) -> bool:
        given, _, rest = str(self.path_args[0]).partition("/")
        if hmac.compare_digest(given.encode(), token.encode()):
            self.path_args = [rest]
            return True
        bearer = self.request.headers.get("Authorization", "")
        if hmac.compare_digest(bearer.encode(), f"Bearer {token}".encode()):
            return True
        raise web.HTTPError(403, reason="The address needs the token that was printed when the server started")

    async def head(self, path: str) -> None:
        await self.get(path)

    async def get(self, path: str) -> None:
        found, at, stop, first = await self._guarded(lambda: self._begin(path))
        if found is None:
            raise web.HTTPError(404, reason="There is no such file")
        if found.file is None:
            if path and not path.endswith("/"):
                self.redirect(quote(path.rpartition("/")[2]) + "/")
                return
            links = "".join(f'<li><a href="{quote(n)}">{html.escape(n)}</a></li>' for n in found.names)
            self.set_header("Content-Type", "text/html; charset=utf-8")
            self.finish(f"<!doctype html><title>{html.escape(path or '/')}</title><ul>{links}</ul>")
        elif first is None or (at == stop and first.size <= _SMALL):
            self.finish(first if first is None else first.tobytes())
        elif at == stop:
            try:
                async with asyncio.timeout(_PATIENCE):
                    await asyncio.gather(self.flush(), self.request.connection.write(memoryview(first)))
            except (OSError, TimeoutError):  # the client is gone, or takes nothing
                self.request.connection.close()
        else:
            stays = self.request.version == "HTTP/1.1" and self.request.headers.get("Connection", "").lower() != "close"
            if not stays:
                self.set_header("Connection", "close")
            await self.flush()
            address, stream, loop = self.request.connection.context.address, self.detach(), asyncio.get_running_loop()

            def then(whole: bool) -> None:
                more = (self.server.http.resume, stream, address) if whole and stays else (stream.close,)
                loop.call_soon_threadsafe(*more)

            sock = stream.socket.dup()  # the sender's own: Tornado may close the other at any time
            self.sender.senders.submit(self.sender.send, sock, found.file, at, stop, first, self.source, then)

    def _begin(self, path: str) -> tuple[Found | None, int, int, np.ndarray | None]:
        """(what lies there, where the first piece ends, where all that is asked for, the piece); sets the headers."""
        found = self.source.find(path)
        part = None if found is None or found.file is None else self._head(path, found.file, found.etag)
        if part is None or self.request.method == "HEAD":
            return found, 0, 0, None
        start, stop = part
        at = stop if stop - start <= _SMALL else min(stop, found.file.cut(start))
        return found, at, stop, self.sender.read(found.file, start, at)

    def _head(self, path: str, file: VirtualFile, etag: str) -> tuple[int, int] | None:
        """Set status and headers; gives the bytes of the body, or None where there is none."""
        asked, nbytes = self.request.headers, file.nbytes
        self.set_header("Content-Type", "application/json" if path.endswith(".json") else "application/octet-stream")
        self.set_header("Accept-Ranges", "bytes")
        self.set_header("Cache-Control", "no-cache")
        self.set_header("ETag", etag)
        wanted, known = ({t.strip() for t in asked.get(name, "").split(",")} for name in ("If-Match", "If-None-Match"))
        if "If-Match" in asked and not wanted & {etag, "*"}:
            raise web.HTTPError(412, reason="The checkpoint was replaced")
        if {t.removeprefix("W/") for t in known} & {etag, "*"}:
            self.set_status(304)
            return None
        part = None
        if asked.get("If-Range", etag) == etag:
            try:
                part = part_of(asked.get("Range"), nbytes)
            except ValueError:
                self.set_status(416)
                self.set_header("Content-Range", f"bytes */{nbytes}")
                return None
        start, stop = part or (0, nbytes)
        if part is not None:
            self.set_status(206)
            self.set_header("Content-Range", f"bytes {start}-{stop - 1}/{nbytes}")
        self.set_header("Content-Length", str(stop - start))
        return start, stop

    async def _guarded(self, work: Any) -> Any:
        """The result of work in a thread; the errors of a checkpoint as a status."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.sender.readers, work)
        except CheckpointReplaced as e:
            self.source.forget()
            raise self._error(409, e) from None
        except (MeshtapeError, OSError) as e:
            raise self._error(
                404 if isinstance(e, NotACheckpoint) else 422 if isinstance(e, MeshtapeError) else 500, e
            ) from None

    def _error(self, status: int, error: Exception) -> web.HTTPError:
        self._said = f"{type(error).__name__}: {error}"
        return web.HTTPError(status, reason=type(error).__name__)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        for name in ("Content-Length", "Content-Range", "ETag"):
            self.clear_header(name)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(getattr(self, "_said", self._reason) + "\n")


class CheckpointServer(Server):
    """Serves the bytes of a checkpoint until it is closed: below ``url``, ``safetensors/`` and ``zarr/``."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        self.source = ServedCheckpoint(path)
        self.sender = Sender()
        super().__init__(host=host, port=port, token=token)

    @property
    def url(self) -> str:
        """The address of the start page, with the token where there is one; it ends in ``/``."""
        token = quote(self.token, safe="") + "/" if self.token else ""
        return f"{self.origin}/{token}"

    def application(self) -> web.Application:
        return web.Application([(r"/(.*)", FileHandler, {"server": self})], log_function=lambda handler: None)

    def close(self) -> None:
        self.sender.close()
        super().close()
