"""Tornado handlers: addresses to views. The stand-alone server and the Dask dashboard mount the same ones.

Protections:

- only the site's roots can be named (`Site.place`), and no request changes a file;
- the Host header must name this server, so that a page elsewhere cannot point its own name here (DNS rebinding);
  where a token is required, any host name may lead here;
- forms that start work are accepted only from this site's own pages;
- the content security policy allows this server's own style and script, pictures in the page, and nothing else: markup
  that came from a file could neither run nor call anywhere.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tornado import web
from tornado.httputil import url_concat
from tornado.ioloop import IOLoop
from tornado.iostream import StreamClosedError

from ....arrays.backends.threads import Pool
from ....arrays.core.errors import CheckpointKeyError, MeshtapeError, NotACheckpoint
from ..model.inventory import SORTS, Query
from ..model.site import Site
from ..model.text import plain, visible
from ..views import view_array, view_checkpoint, view_compare, view_details, view_places, view_scans
from ..views.frame import Shown, asset, href, opening, page, render, rest

_LOG = logging.getLogger("meshtape.browse")
_STATIC = {"browse.css": "text/css", "browse.js": "text/javascript", "icon.svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action "
    "'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    **dict.fromkeys(("Referrer-Policy", "Cross-Origin-Resource-Policy", "Cross-Origin-Opener-Policy"), "same-origin"),
    "Cache-Control": "no-store",
    "Server": "meshtape",
}
_LONGEST = 8192  # bytes of one parameter
PATIENCE = 0.2  # seconds after which the frame of a page is sent before its view is ready


@dataclass
class Access:
    """A site and who may see it: ``hosts`` are the names in a Host header (None: any); ``token`` is asked for."""

    site: Site
    hosts: frozenset[str] | None = None
    token: str | None = None
    pool: Pool = field(default_factory=lambda: Pool(4, thread_name_prefix="meshtape-browse"))

    def close(self) -> None:
        self.site.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def host_of(header: str) -> str:
    """The name in a Host header, without its port.

    >>> host_of("LocalHost:8000"), host_of("[::1]:8000"), host_of("")
    ('localhost', '::1', '')
    """
    try:
        return (urlsplit(f"//{header}").hostname or "").casefold()
    except ValueError:
        return ""


class Handler(web.RequestHandler):
    """Guards, parameters, and the answer as page, fragment or JSON."""

    def initialize(self, access: Access | Callable[[], Access]) -> None:
        self.access = access() if callable(access) else access
        self.site = self.access.site

    def set_default_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.set_header(name, value)

    def head(self, *path: str) -> Any:
        return self.get(*path)

    def prepare(self) -> None:
        self._check_host()
        if self.access.token is not None and not self._knows_token(self.access.token):
            return
        if self.request.method == "POST":
            site = self.request.headers.get("Sec-Fetch-Site")
            origin = self.request.headers.get("Origin")
            # Browsers say where a form came from in the first header; old ones, and other programs, at most in the
            # second.
            same = origin is None or urlsplit(origin).netloc == self.request.host
            if not (site in ("same-origin", "none") if site else same):
                raise web.HTTPError(403, reason="This form was sent from another site")

    def _check_host(self) -> None:
        if self.access.hosts is not None and host_of(self.request.host) not in self.access.hosts:
            raise web.HTTPError(403, reason="This server does not go by that name")

    def _knows_token(self, token: str) -> bool:
        """Whether the cookie or the address has the token; an address that has it is traded for a cookie."""
        port = self.request.host.rpartition(":")[2]
        cookie = f"meshtape-browse-{port if port.isdecimal() else 80}"
        given = self.request.query_arguments.get("token", [b""])[0]
        if given and hmac.compare_digest(given, token.encode()):
            self.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            kept = {k: self.parameters(k) for k in self.request.query_arguments if k != "token"}
            self.redirect(href(self.request.path.rpartition("/")[2] or "./", **kept))
            return False
        if hmac.compare_digest((self.get_cookie(cookie) or "").encode(), token.encode()):
            return True
        raise web.HTTPError(403, reason="The address needs the token that was printed when the server started")

    def parameters(self, name: str) -> list[str]:
        """All values of a parameter. Tornado's own would turn control characters into spaces."""
        out = []
        for raw in self.request.arguments.get(name, []):
            try:
                out.append(raw.decode())
            except UnicodeDecodeError:
                raise web.HTTPError(400, reason="A parameter is not UTF-8") from None
            if len(raw) > _LONGEST:
                raise web.HTTPError(400, reason="A parameter is too long")
        return out

    def parameter(self, name: str, default: str = "") -> str:
        return (self.parameters(name) or [default])[0]

    def number(self, name: str, default: int | None = None, most: int = 2**62) -> int | None:
        text = self.parameter(name)
        if not text:
            return default
        if not text.isdecimal() or len(text) > 20:
            raise web.HTTPError(400, reason=f"{name} must be a whole number")
        return min(int(text), most)

    def integers(self, name: str) -> tuple[int, ...]:
        """Whole numbers between commas."""
        text = self.parameter(name).strip()
        parts = [t.strip() for t in text.split(",")] if text else []
        if not all(t.isdecimal() and len(t) <= 20 for t in parts):
            raise web.HTTPError(400, reason=f"{name} must be whole numbers with commas between them")
        return tuple(min(int(t), 2**62) for t in parts)

    async def answer(self, make: Callable[[], Shown], patience: float | None) -> None:
        """Make a view in a thread and write it; after ``patience`` seconds the frame of the page goes ahead."""
        work = IOLoop.current().run_in_executor(self.access.pool, _guarded, make)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        if not (await asyncio.wait([work], timeout=patience if self.format == "html" else None))[0]:
            # From here on the status is that of the page, whatever the view turns out to be.
            title = self.parameter("name") or self.parameter("at").rpartition("/")[2]
            self.write(opening(title, waiting="Reading …"))
            await self.flush()
            self.finish(rest(await work))
            return
        shown = work.result()
        if shown.location is not None:
            asked = {name: value for name in ("format", "fragment") if (value := self.parameter(name))}
            self.redirect(url_concat(shown.location, asked), status=shown.status)
            return
        self.set_status(shown.status)
        if self.format == "json":
            self.set_header("Content-Type", "application/json")
            self.finish(json.dumps(plain(shown.data), allow_nan=False))
        else:
            self.finish(str(shown.body) if self.format == "fragment" else page(shown))

    @property
    def format(self) -> str:
        """``"html"`` for a whole page, ``"fragment"`` for its changing part, or ``"json"``."""
        return "json" if self.parameter("format") == "json" else "fragment" if self.parameter("fragment") else "html"

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        reason = self._reason if status_code != 500 else "Something went wrong; the server's log says what"
        self.set_header("Content-Type", "text/html; charset=utf-8")
        body = render("error.html", title=f"{status_code}", text=visible(reason, 400), back=None)
        self.finish(page(Shown(f"{status_code}", body)))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, (web.HTTPError, StreamClosedError)):  # the last: a client that has gone
            _LOG.error("%s: unexpected error", visible(self.request.path), exc_info=(typ, value, tb))


def _guarded(make: Callable[[], Shown]) -> Shown:
    """A view, or a page with the error that the checkpoint caused."""
    try:
        return make()
    except (MeshtapeError, OSError) as e:
        missing = isinstance(e, (NotACheckpoint, CheckpointKeyError, FileNotFoundError))
        title = "Not found" if missing else "This cannot be shown"
        body = render("error.html", title=title, text=visible(f"{type(e).__name__}: {e}", 2000), back="./")
        status = 404 if missing else 422 if isinstance(e, MeshtapeError) else 500
        return Shown(title, body, {"error": type(e).__name__, "message": str(e)}, [("error", None)], status)


def _query(h: Handler) -> Query:
    sort, down = h.parameter("sort", "tree"), bool(h.parameter("down"))
    least, page = h.number("least", 0) or 0, h.number("page", 0, 10**9) or 0
    sort = sort if sort in SORTS else "tree"
    return Query(h.parameter("q"), h.parameter("dtype"), least, h.number("most"), sort, down, page)


def _view(h: Handler) -> dict[str, Any]:
    every = h.integers("every")
    dimensions = {d: h.number(d, None, 64) for d in ("rows", "columns")}
    return {**dimensions, "at": h.integers("index"), "steps": (every[0], every[-1]) if every else (0, 0)}


_PARAMETERS: dict[str, Callable[[Handler], Any]] = {
    **{name: lambda h, name=name: h.parameter(name) for name in ("name", "b", "metric", "job")},  # type: ignore[misc]
    **{name: lambda h, name=name: bool(h.parameter(name)) for name in ("fragment", "check", "again")},  # type: ignore[misc]
    "at": lambda h: h.parameter("at", "0"),
    "best": lambda h: best if (best := h.parameter("best")) in ("lowest", "highest") else "",
    "a": lambda h: h.parameter("a") or h.parameter("at", "0"),
    "in": lambda h: h.parameters("in"),
    "json": lambda h: h.format == "json",
    "query": _query,
    "rules": lambda h: h.parameter("rules").replace("\r\n", "\n"),  # forms change the ends of lines
    "view": _view,
}
"""How views get their parameters from a request, by the names in `_VIEWS`."""


def _home(site: Site, listed: bool) -> Shown:
    """The only root, or a list."""
    if len(site.roots) == 1 and not listed:
        return Shown("", status=302, location=href("open", at="0"))
    return view_places.home(site)


def _open(site: Site, at: str, metric: str, best: str) -> Shown:
    """Redirects to the view for the kind of a place."""
    kind = site.kind(site.place(at))
    if kind == "directory":
        return view_places.directory(site, at)
    also = {"metric": metric, "best": best} if kind == "run" else {}
    return Shown("", status=302, location=href(kind, at=at, **also))


def _stop(site: Site, number: str) -> None:
    if (job := site.jobs.get(number)) is not None:
        job.stop()


class _PageSpec(NamedTuple):
    """How a page is made, of which parameters; what its form starts, of which; and the page after that."""

    make: Callable[..., Shown] | None
    takes: str = ""
    start: Callable[..., Any] | None = None
    needs: str = ""
    then: str = ""  # a view and its parameters
    only: str = ""  # format in which alone it answers
    patience: float | None = PATIENCE


_VIEWS = {
    "": _PageSpec(_home, "json", patience=None),
    "open": _PageSpec(_open, "at metric best", patience=None),
    "run": _PageSpec(view_places.run, "at metric best"),
    "checkpoint": _PageSpec(view_checkpoint.checkpoint, "at query in fragment"),
    "rows": _PageSpec(view_checkpoint.unfolded, "at in", only="fragment"),
    "map": _PageSpec(view_checkpoint.bytes_map, "at in"),
    "details": _PageSpec(view_details.details, "at"),
    "array": _PageSpec(view_array.array, "at name view check"),
    "values": _PageSpec(view_array.values, "at name view", only="json"),
    "statistics": _PageSpec(
        view_array.distribution, "at name", view_array.start_statistics, "at name", "array at name"
    ),
    "health": _PageSpec(view_scans.health, "at fragment", view_scans.start_health, "at again", "health at"),
    "compare": _PageSpec(
        view_compare.comparison,
        "a b rules fragment",
        view_compare.start_comparison,
        "a b rules again",
        "compare a b rules",
    ),
    "stop": _PageSpec(None, "", _stop, "job"),
}


class _PageHandler(Handler):
    """A view, and the work that its form starts."""

    def initialize(self, access: Access | Callable[[], Access], view: _PageSpec) -> None:
        super().initialize(access)
        self.view = view

    def taken(self, names: str) -> dict[str, Any]:
        return {name: _PARAMETERS[name](self) for name in names.split()}

    async def get(self) -> None:
        if self.view.make is None:
            raise web.HTTPError(405)
        if self.view.only:
            self.request.arguments["format" if self.view.only == "json" else "fragment"] = [self.view.only.encode()]
        await self.answer(partial(self.view.make, self.site, *self.taken(self.view.takes).values()), self.view.patience)

    async def post(self) -> None:
        if self.view.start is None:
            raise web.HTTPError(405)
        start = partial(self.view.start, self.site, *self.taken(self.view.needs).values())
        view, _, names = self.view.then.partition(" ")
        then = href(view, **self.taken(names)) if view else self.back()

        def begin() -> Shown:
            start()
            return Shown("", status=303, location=then)

        await self.answer(begin, None)

    def back(self) -> str:
        """The page that a form names, of this site alone: others would make this server lead a reader elsewhere."""
        view, _, query = self.parameter("back").partition("?")
        return f"{view}?{query}" if view in ("health", "compare") else "./"


class _Static(Handler):
    def prepare(self) -> None:  # these hold no secrets, and the page that refuses a visitor wants its style
        self._check_host()

    def get(self, name: str) -> None:
        if name not in _STATIC:
            raise web.HTTPError(404)
        data = asset(name)
        self.set_header("Content-Type", f"{_STATIC[name]}; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        self.finish(data)  # which tags it, and answers 304 to a visitor that has it


class _Nothing(Handler):
    def get(self) -> None:
        raise web.HTTPError(404, reason="There is no such page")

    post = get


def routes(access: Access | Callable[[], Access], prefix: str = "/") -> list[tuple[str, type[Handler], dict[str, Any]]]:
    """(pattern, handler, arguments) of every page below ``prefix``; a function ``access`` is called at each request."""
    pages = [(prefix + path, _PageHandler, {"access": access, "view": view}) for path, view in _VIEWS.items()]
    return [*pages, (f"{prefix}static/(.*)", _Static, {"access": access})]


def application(access: Access) -> web.Application:
    """The stand-alone application."""
    return web.Application(
        routes(access),
        default_handler_class=_Nothing,
        default_handler_args={"access": access},
        compress_response=True,
        log_function=lambda handler: None,
    )
