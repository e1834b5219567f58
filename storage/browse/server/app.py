"""The stand-alone server: for ``meshtape browse``, and in a thread of its own for notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....arrays.core.errors import CheckpointError
from ...base.page import Page
from ...base.threads import starting
from ..model.site import Site, SitePlace
from ..views.frame import href

if TYPE_CHECKING:
    from .half_closed import HalfClosedServer

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Server:
    """Serves the views of some paths and URLs until it is closed.

    Parameters
    ----------
    paths
        Checkpoints, runs, or directories of them. Nothing outside them can be seen.
    host
        The address to listen at. Anything but loopback asks for a token: who has the address that `url` gives may look.
    port
        0 takes a free one.
    token
        Ask for this token even on loopback, where other users of the machine can connect as well.

    Raises
    ------
    CheckpointError
        The address cannot be listened at.

    Examples
    --------
    >>> import numpy as np, tempfile, urllib.request
    >>> from meshtape.storage import save
    >>> where = os.path.join(tempfile.mkdtemp(), "ckpt")
    >>> _ = save(where, {"w": np.ones((2, 3))})
    >>> with Server([where]) as server:
    ...     page = urllib.request.urlopen(server.url).read().decode()
    >>> "w</a>" in page
    True
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
    ) -> None:
        from .handlers import Access

        if token is not None and not (isinstance(token, str) and token):
            raise CheckpointError(f"a token is a text of a character or more, got {token!r:.80}; without, one is made")
        local = is_loopback(host)
        self.site = Site(paths)
        self.host = host
        self.token = token if token is not None or local else secrets.token_urlsafe(24)
        hosts = frozenset(LOOPBACK) | {host.strip("[]").casefold()} if local else None
        self.access = Access(self.site, hosts, self.token)
        self.http: HalfClosedServer | None = None  # while it serves
        self._thread: threading.Thread | None = None
        self._began = threading.Event()
        self._end: Callable[[], Any] = lambda: None
        self._sockets = _listen(host, port)
        self.port: int = self._sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """The address of the start page, with the token where there is one."""
        return self.address()

    def address(self, place: SitePlace | None = None, **parameters: Any) -> str:
        """The address of a place of the site, or of the start page."""
        view, at = ("open", place.at) if place is not None else ("", None)
        return f"{self.origin}/{href(view, at=at, token=self.token, **parameters)}"

    @property
    def origin(self) -> str:
        """The address without a path."""
        shown = self.host
        if shown in ("0.0.0.0", "::", ""):  # listens everywhere: one name by which others may find it
            shown = socket.getfqdn()
        elif ":" in shown and not shown.startswith("["):
            shown = f"[{shown}]"
        return f"http://{shown}:{self.port}"

    def application(self) -> Any:
        """The application of Tornado that is served."""
        from .handlers import application

        return application(self.access)

    def run(self) -> None:
        """Serve in this thread until `close` is called from another, or an interrupt."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        from .half_closed import HalfClosedServer

        ended = asyncio.Event()
        self._end = partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)
        self._began.set()
        server = self.http = HalfClosedServer(
            self.application(), max_header_size=1 << 16, max_body_size=1 << 20, idle_connection_timeout=120
        )
        server.add_sockets(self._sockets)
        try:
            await ended.wait()
        finally:
            server.stop()
            await server.close_all_connections()

    def start(self) -> Server:
        """Serve in a thread of its own, which ends with the process at the latest."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="meshtape-browse", daemon=True)
            with starting():
                self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving, and all scans."""
        if self._thread is not None:
            while self._thread.is_alive() and not self._began.wait(0.1):
                pass
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._end()
            self._thread.join()
            self._thread = None
        for s in self._sockets:
            s.close()
        self.access.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host.casefold() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> list[socket.socket]:
    from tornado.netutil import bind_sockets

    try:
        family = socket.AF_INET if host in ("localhost", "") else socket.AF_UNSPEC
        return bind_sockets(port, host.strip("[]") or None, family=family)
    except OSError as e:
        raise CheckpointError(
            f"cannot listen at {host}:{port}: {e.strerror or e}; choose another --port or --host"
        ) from None


_lock = threading.Lock()
_shared: Server | None = None


def show(path: str | os.PathLike[str], **parameters: Any) -> Page:
    """Serve a path from this process, on loopback with a token, and give its page. One server serves all of a process.

    The token keeps other users of the machine out: a notebook often runs on a shared one.
    """
    global _shared
    with _lock:
        if _shared is None:
            _shared = Server(token=secrets.token_urlsafe(24)).start()
        place = _shared.site.add(path)
        return Page(_shared.address(place, **parameters), place.path)


def close() -> None:
    """Stop the server that `show` has started, if any."""
    global _shared
    with _lock:
        server, _shared = _shared, None
    if server is not None:
        server.close()
