"""The server of a checkpoint as ranges over HTTP: for ``meshtape serve``, and in a thread of its own for `serve`.

Access is as in the browser: loopback, or a token, here the first part of every path (or ``Authorization: Bearer``), as
readers of ranges keep no cookies. A small answer goes through Tornado. A larger one is sent by a thread (`sending`),
which gives the connection back.
"""

from __future__ import annotations

import asyncio
import hmac
import html
import os
import re
from typing import Any
from urllib.parse import quote

import numpy as np
from tornado import web
from tornado.iostream import StreamClosedError

from ...arrays.core.errors import CheckpointReplaced, MeshtapeError, NotACheckpoint, StoreError
from ..browse.server.app import Server
from ..browse.server.handlers import Handler
from ..checkpoint.checkpoint import Checkpoint
from . import sending
from .sending import Answer, Piece, Sender
from .served import Found, ServedCheckpoint
from .virtual_files import VirtualFile

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

    async def get(self, path: str) -> None:
        found, at, stop, first = await self._guarded(lambda: self._begin(path))
        # A folder in a tree is one of Zarr, whose clients look for files: of one called model.safetensors, too.
        if found is None or (found.file is None and "/" in path and not path.endswith("/")):
            raise web.HTTPError(404, reason="There is no such file")
        if found.file is None:
            if path and not path.endswith("/"):
                self.redirect(quote(path.rpartition("/")[2]) + "/")
                return
            # fsspec takes what stands there for names; browsers escape what is no URL themselves.
            names = ((re.sub("[%?#:]", lambda m: quote(m[0]), n), n) for n in found.names)
            links = "".join(f'<li><a href="{html.escape(to)}">{html.escape(n)}</a></li>' for to, n in names)
            self.set_header("Content-Type", "text/html; charset=utf-8")
            self.finish(f"<!doctype html><title>{html.escape(path or '/')}</title><ul>{links}</ul>")
        elif first is None:
            self.finish()
        elif isinstance(first, np.ndarray) and at == stop and first.size <= sending.SMALL:
            self.finish(first.tobytes())
        else:
            stays = self.request.version == "HTTP/1.1" and self.request.headers.get("Connection", "").lower() != "close"
            if not stays:
                self.set_header("Connection", "close")
            try:
                await self.flush()
            except StreamClosedError:  # the client has gone
                return
            address, stream, loop = self.request.connection.context.address, self.detach(), asyncio.get_running_loop()

            def then(whole: bool) -> None:
                if answer.error is not None:
                    self.server.told[found.etag] = (stop, answer.error)
                more = (self.server.http.resume, stream, address) if whole and stays else (stream.close,)
                loop.call_soon_threadsafe(*more)

            sock = stream.socket.dup()  # the sender's own: Tornado may close the other at any time
            answer = Answer(sock, found.file, at, stop, first, self.source, then)
            self.sender.start(answer, loop)

    def _begin(self, path: str) -> tuple[Found | None, int, int, Piece | None]:
        """(what lies there, where the first piece ends, where all that is asked for, the piece); sets the headers."""
        found = self.source.find(path)
        part = None if found is None or found.file is None else self._head(path, found.file, found.etag)
        if part is None or self.request.method == "HEAD":
            return found, 0, 0, None
        start, stop = part
        # A client that takes an answer cut short for a fault of the network asks again: it is told why.
        ended, error = self.server.told.pop(found.etag, (0, None))
        if error is not None and start < ended:
            raise error
        at = stop if stop - start <= sending.SMALL else min(stop, found.file.cut(start))
        return found, at, stop, self.sender.first(found.file, start, at)

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
            # Zarr takes 404 for a chunk that nobody wrote: it is the answer where the checkpoint has no such file.
            passes = isinstance(e, (NotACheckpoint, StoreError)) or not isinstance(e, MeshtapeError)
            raise self._error(503 if passes else 422, e) from None

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
        follow: bool = False,
        missing: str = "error",
    ) -> None:
        self.source = ServedCheckpoint(path, follow, missing)
        self.sender = Sender()
        self.told: dict[
            str, tuple[int, Exception]
        ] = {}  # by ETag, what ended answers early, which the next request is told
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
