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
import hashlib
import hmac
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tornado import web
from tornado.ioloop import IOLoop

from ....arrays.core.errors import CheckpointKeyError, MeshtapeError, NotACheckpoint
from ..model.inventory import SORTS, Query
from ..model.site import Site
from ..model.text import plain, visible
from ..views import view_array, view_checkpoint, view_compare, view_details, view_places, view_scans
from ..views.frame import Shown, asset, href, opening, page, render, rest

_LOG = logging.getLogger("meshtape.browse")
_STATIC = {"browse.css": "text/css", "browse.js": "text/javascript", "icon.svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_LONGEST = 8192  # bytes of one parameter
PATIENCE = 0.2  # seconds after which the frame of a page is sent before its view is ready


@dataclass
class Access:
    """A site and who may see it. ``hosts`` are the names that the Host header may give (None: any); ``token`` is asked for when set."""

    site: Site
    hosts: frozenset[str] | None = None
    token: str | None = None
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="meshtape-browse")
    )

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


class _Handler(web.RequestHandler):
    """Guards, parameters, and the answer as page, fragment or JSON."""

    def initialize(self, access: Access | Callable[[], Access]) -> None:
        self.access = access() if callable(access) else access
        self.site = self.access.site

    def set_default_headers(self) -> None:
        for name, value in (
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
            ("Server", "meshtape"),
        ):
            self.set_header(name, value)

    def prepare(self) -> None:
        access = self.access
        if access.hosts is not None and host_of(self.request.host) not in access.hosts:
            raise web.HTTPError(403, reason="This server does not go by that name")
        if access.token is not None and not self._knows_token(access.token):
            return
        if self.request.method == "POST":
            site = self.request.headers.get("Sec-Fetch-Site")
            origin = self.request.headers.get("Origin")
            # Browsers say where a form came from in the first header; old ones, and other programs, at most in the second.
            ours = (
                site in ("same-origin", "none")
                if site
                else origin is None or urlsplit(origin).netloc == self.request.host
            )
            if not ours:
                raise web.HTTPError(403, reason="This form was sent from another site")

    def _knows_token(self, token: str) -> bool:
        """Whether the cookie or the address has the token; an address that has it is traded for a cookie."""
        port = self.request.host.rpartition(":")[2]
        cookie = f"meshtape-browse-{port if port.isdecimal() else 80}"
        given = self.request.query_arguments.get("token", [b""])[0]
        if given and hmac.compare_digest(given, token.encode()):
            self.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            rest = {
                k: [v.decode("utf-8", "replace") for v in vs]
                for k, vs in self.request.query_arguments.items()
                if k != "token"
            }
            self.redirect(href(self.request.path.rpartition("/")[2] or "./", **rest))
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

    async def answer(self, make: Callable[[], Shown], patience: float | None = PATIENCE) -> None:
        """Make a view in a thread and write it. The frame of a page goes ahead where the view takes longer than ``patience`` seconds."""
        work = IOLoop.current().run_in_executor(self.access.pool, _guarded, make)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        if self.format != "html":
            patience = None
        if not (await asyncio.wait([work], timeout=patience))[0]:
            # From here on the status is that of the page, whatever the view turns out to be.
            title = self.parameter("name") or self.parameter("at").rpartition("/")[2]
            self.write(opening(title, waiting="Reading …"))
            await self.flush()
            self.finish(rest(await work))
            return
        shown = work.result()
        if shown.location is not None:
            self.redirect(shown.location, status=shown.status)
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
        return self.parameter("format") if self.parameter("format") == "json" else "fragment" if self.part else "html"

    @property
    def part(self) -> bool:
        return bool(self.parameter("fragment"))

    @property
    def at(self) -> str:
        return self.parameter("at", "0")

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        reason = self._reason if status_code != 500 else "Something went wrong; the server's log says what"
        self.set_header("Content-Type", "text/html; charset=utf-8")
        body = render("error.html", title=f"{status_code}", text=visible(reason, 400), back=None)
        self.finish(page(Shown(f"{status_code}", body)))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, web.HTTPError):
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


# ----- the views: each takes the parameters of a request and gives a function that makes the page ---------------------------


def _home(h: _Handler) -> Callable[[], Shown]:
    if len(h.site.roots) == 1 and h.format != "json":
        return partial(Shown, "", status=302, location=href("open", at="0"))
    return partial(view_places.home, h.site)


def _open(h: _Handler) -> Callable[[], Shown]:
    """Redirects to the view for the kind of a place."""
    also = {k: h.parameter(k) for k in ("metric", "best")}

    def look() -> Shown:
        kind = h.site.kind(h.site.place(h.at))
        if kind == "directory":
            return view_places.directory(h.site, h.at)
        return Shown("", status=302, location=href(kind, at=h.at, **also if kind == "run" else {}))

    return look


def _checkpoint(h: _Handler) -> Callable[[], Shown]:
    sort = h.parameter("sort", "tree")
    query = Query(
        h.parameter("q"),
        h.parameter("dtype"),
        h.number("least", 0) or 0,
        h.number("most"),
        sort if sort in SORTS else "tree",
        bool(h.parameter("down")),
        h.number("page", 0, 10**9) or 0,
    )
    return partial(view_checkpoint.checkpoint, h.site, h.at, query, h.parameters("in"), h.part)


def _array(h: _Handler) -> tuple[Site, str, str, dict[str, Any]]:
    """The site, and which view of which array is asked for."""
    every = h.integers("every")
    view: dict[str, Any] = {d: h.number(d, None, 64) for d in ("rows", "columns")}
    view |= {"at": h.integers("index"), "steps": (every[0], every[-1]) if every else (0, 0)}
    return h.site, h.at, h.parameter("name"), view


def _pair(h: _Handler) -> tuple[str, str, str]:
    """Both checkpoints, and the rules with the line ends that forms change made good."""
    return h.parameter("a") or h.at, h.parameter("b"), h.parameter("rules").replace("\r\n", "\n")


def _run(h: _Handler) -> Callable[[], Shown]:
    best = "highest" if h.parameter("best") == "highest" else "lowest"
    return partial(view_places.run, h.site, h.at, h.parameter("metric"), best)


@dataclass(frozen=True)
class _View:
    """How a page is made, and where its form leads: what it starts, and the address of the page after that."""

    make: Callable[[_Handler], Callable[[], Shown]] | None
    start: Callable[[_Handler], Callable[[], Any]] | None = None
    then: Callable[[_Handler], str] = lambda h: "./"
    only: str = ""  # format in which alone it answers
    patience: float | None = PATIENCE


def _back(h: _Handler) -> str:
    view, _, query = h.parameter("back").partition("?")
    # Only to a page of this site: anything else would make this server lead a reader elsewhere.
    return f"{view}?{query}" if view in ("health", "compare") else "./"


def _stop(h: _Handler) -> Callable[[], Any]:
    job = h.site.jobs.get(h.parameter("job"))
    return job.stop if job is not None else lambda: None


_VIEWS = {
    "": _View(_home, patience=None),
    "open": _View(_open, patience=None),
    "run": _View(_run),
    "checkpoint": _View(_checkpoint),
    "rows": _View(lambda h: partial(view_checkpoint.unfolded, h.site, h.at, h.parameters("in")), only="fragment"),
    "map": _View(lambda h: partial(view_checkpoint.bytes_map, h.site, h.at, h.parameters("in"))),
    "details": _View(lambda h: partial(view_details.details, h.site, h.at)),
    "array": _View(lambda h: partial(view_array.array, *_array(h), bool(h.parameter("check")))),
    "values": _View(lambda h: partial(view_array.values, *_array(h)), only="json"),
    "statistics": _View(
        lambda h: partial(view_array.distribution, h.site, h.at, h.parameter("name")),
        lambda h: partial(view_array.start_statistics, h.site, h.at, h.parameter("name")),
        lambda h: href("array", at=h.at, name=h.parameter("name")),
    ),
    "health": _View(
        lambda h: partial(view_scans.health, h.site, h.at, h.part),
        lambda h: partial(view_scans.start_health, h.site, h.at, bool(h.parameter("again"))),
        lambda h: href("health", at=h.at),
    ),
    "compare": _View(
        lambda h: partial(view_compare.comparison, h.site, *_pair(h), h.part),
        lambda h: partial(view_compare.start_comparison, h.site, *_pair(h), bool(h.parameter("again"))),
        lambda h: href("compare", **dict(zip(("a", "b", "rules"), _pair(h), strict=True))),
    ),
    "stop": _View(None, _stop, _back),
}


class _Page(_Handler):
    """A view, and the work that its form starts."""

    def initialize(self, access: Access | Callable[[], Access], view: _View) -> None:
        super().initialize(access)
        self.view = view

    async def get(self) -> None:
        if self.view.make is None:
            raise web.HTTPError(405)
        if self.view.only:
            self.request.arguments["format" if self.view.only == "json" else "fragment"] = [self.view.only.encode()]
        await self.answer(self.view.make(self), self.view.patience)

    async def post(self) -> None:
        if self.view.start is None:
            raise web.HTTPError(405)
        start, then = self.view.start(self), self.view.then(self)

        def begin() -> Shown:
            start()
            return Shown("", status=303, location=then)

        await self.answer(begin, None)


class _Static(_Handler):
    def prepare(self) -> None:  # these hold no secrets, and the page that refuses a visitor wants its style
        if self.access.hosts is not None and host_of(self.request.host) not in self.access.hosts:
            raise web.HTTPError(403, reason="This server does not go by that name")

    def get(self, name: str) -> None:
        if name not in _STATIC:
            raise web.HTTPError(404)
        data = asset(name)
        self.set_header("Content-Type", f"{_STATIC[name]}; charset=utf-8")
        self.set_header("Cache-Control", "no-cache")
        self.set_header("ETag", f'"{hashlib.sha256(data).hexdigest()[:16]}"')
        if self.check_etag_header():
            self.set_status(304)
            self.finish()
            return
        self.finish(data)


class _Nothing(_Handler):
    def get(self) -> None:
        raise web.HTTPError(404, reason="There is no such page")

    post = get


def routes(
    access: Access | Callable[[], Access], prefix: str = "/"
) -> list[tuple[str, type[_Handler], dict[str, Any]]]:
    """(pattern, handler, arguments) of every page below ``prefix``. ``access`` may be a function that is called when a page is asked for."""
    pages = [(prefix + path, _Page, {"access": access, "view": view}) for path, view in _VIEWS.items()]
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
