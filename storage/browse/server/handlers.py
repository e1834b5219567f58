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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tornado import web
from tornado.ioloop import IOLoop

from ....arrays.core.errors import CheckpointError, CheckpointKeyError, MeshtapeError, NotACheckpoint
from ..model.inventory import SORTS, Query
from ..model.site import Site
from ..model.text import plain, visible
from ..views import view_array, view_checkpoint, view_compare, view_details, view_places, view_scans
from ..views.frame import Shown, asset, href, notice, opening, page, rest
from ..views.html import tag

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

    def initialize(self, access: Access | Callable[[], Access], **also: Any) -> None:
        self.access = access() if callable(access) else access

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

    async def show(self, make: Callable[[], Shown]) -> None:
        """Make a view in a thread and write it; the frame of a page goes ahead where the view takes long."""
        work = IOLoop.current().run_in_executor(self.access.pool, _guarded, make)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        if self.parameter("format") == "json":
            shown = await work
            self.set_status(shown.status)
            self.write_json(shown.data)
        elif self.parameter("fragment"):
            shown = await work
            self.set_status(shown.status)
            self.finish(str(shown.body))
        elif (await asyncio.wait([work], timeout=PATIENCE))[0]:
            shown = work.result()
            self.set_status(shown.status)
            self.finish(page(shown))
        else:
            # From here on the status is that of the page, whatever the view turns out to be.
            title = self.parameter("name") or self.parameter("at").rpartition("/")[2]
            self.write(opening(title, waiting="Reading …"))
            await self.flush()
            self.finish(rest(await work))

    def write_json(self, data: Any) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(plain(data), allow_nan=False))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        reason = self._reason if status_code != 500 else "Something went wrong; the server's log says what"
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(
            page(
                Shown(
                    f"{status_code}",
                    notice("bad", f"{status_code}", tag("p", visible(reason, 400))),
                    status=status_code,
                )
            )
        )

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, web.HTTPError):
            _LOG.error("%s: unexpected error", visible(self.request.path), exc_info=(typ, value, tb))


def _guarded(make: Callable[[], Shown]) -> Shown:
    """A view, or a page with the error that the checkpoint caused."""
    try:
        return make()
    except (MeshtapeError, OSError) as e:
        missing = isinstance(e, (NotACheckpoint, CheckpointKeyError, FileNotFoundError))
        title = {True: "Not found", False: "This cannot be shown"}[missing]
        body = notice(
            "bad",
            title,
            tag("p", visible(f"{type(e).__name__}: {e}", 2000)),
            tag("p", tag("a", "Back to the start", href="./")),
        )
        status = 404 if missing else 422 if isinstance(e, (CheckpointError, MeshtapeError)) else 500
        return Shown(title, body, {"error": type(e).__name__, "message": str(e)}, [("error", None)], status)


# ----- the views ------------------------------------------------------------------------------------------------------


class _Home(_Handler):
    async def get(self) -> None:
        site = self.access.site
        if len(site.roots) == 1 and not self.parameter("format"):
            self.redirect(href("open", at="0"))
            return
        await self.show(lambda: view_places.home(site))


class _Open(_Handler):
    """Redirects to the view for the kind of a place."""

    async def get(self) -> None:
        site, at = self.access.site, self.parameter("at", "0")

        def look() -> Shown:
            kind = site.kind(site.place(at))
            return view_places.directory(site, at) if kind == "directory" else Shown(kind, tag("p"), None)

        shown = await IOLoop.current().run_in_executor(self.access.pool, _guarded, look)
        if shown.status == 200 and shown.data is None:
            also = {k: self.parameter(k) for k in ("metric", "best")} if shown.title == "run" else {}
            self.redirect(href("run" if shown.title == "run" else "checkpoint", at=at, **also))
        else:
            await self.show(lambda: shown)


class _Checkpoint(_Handler):
    def query(self) -> Query:
        sort = self.parameter("sort", "tree")
        return Query(
            self.parameter("q"),
            self.parameter("dtype"),
            self.number("least", 0) or 0,
            self.number("most"),
            sort if sort in SORTS else "tree",
            bool(self.parameter("down")),
            self.number("page", 0, 10**9) or 0,
        )

    async def get(self) -> None:
        site, at, query, inside = self.access.site, self.parameter("at", "0"), self.query(), self.parameters("in")
        part = bool(self.parameter("fragment"))
        await self.show(lambda: view_checkpoint.checkpoint(site, at, query, inside, part))


class _Rows(_Handler):
    async def get(self) -> None:
        site, at, inside = self.access.site, self.parameter("at", "0"), self.parameters("in")
        self.request.arguments["fragment"] = [b"1"]
        await self.show(lambda: view_checkpoint.unfolded(site, at, inside))


class _Map(_Handler):
    async def get(self) -> None:
        site, at, inside = self.access.site, self.parameter("at", "0"), self.parameters("in")
        await self.show(lambda: view_checkpoint.bytes_map(site, at, inside))


class _Details(_Handler):
    async def get(self) -> None:
        site, at = self.access.site, self.parameter("at", "0")
        await self.show(lambda: view_details.details(site, at))


class _Array(_Handler):
    def view(self) -> dict[str, Any]:
        every = self.integers("every")
        return {
            "rows": self.number("rows", None, 64),
            "columns": self.number("columns", None, 64),
            "at": self.integers("index"),
            "steps": (every[0], every[-1]) if every else (0, 0),
        }

    async def get(self) -> None:
        site, at, name, view = self.access.site, self.parameter("at", "0"), self.parameter("name"), self.view()
        check = bool(self.parameter("check"))
        await self.show(lambda: view_array.array(site, at, name, view, check))


class _Values(_Array):
    async def get(self) -> None:
        site, at, name, view = self.access.site, self.parameter("at", "0"), self.parameter("name"), self.view()
        self.request.arguments["format"] = [b"json"]
        await self.show(lambda: Shown("", tag("p"), view_array.values(site, at, name, view)))


class _Statistics(_Handler):
    async def get(self) -> None:
        site, at, name = self.access.site, self.parameter("at", "0"), self.parameter("name")
        await self.show(lambda: view_array.distribution(site, at, name))

    async def post(self) -> None:
        site, at, name = self.access.site, self.parameter("at", "0"), self.parameter("name")
        await self.begin(lambda: view_array.start_statistics(site, at, name), href("array", at=at, name=name))

    async def begin(self, start: Callable[[], Any], then: str) -> None:
        def work() -> Shown:
            start()
            return Shown("", tag("p"))

        shown = await IOLoop.current().run_in_executor(self.access.pool, _guarded, work)
        if shown.status == 200:
            self.redirect(then, status=303)
        else:
            await self.show(lambda: shown)


class _Health(_Statistics):
    async def get(self) -> None:
        site, at, part = self.access.site, self.parameter("at", "0"), bool(self.parameter("fragment"))
        await self.show(lambda: view_scans.health(site, at, part))

    async def post(self) -> None:
        site, at, again = self.access.site, self.parameter("at", "0"), bool(self.parameter("again"))
        await self.begin(lambda: view_scans.start_health(site, at, again), href("health", at=at))


class _Compare(_Statistics):
    def pair(self) -> tuple[str, str, str]:
        """Both addresses, and the rules with the line ends that forms change made good."""
        rules = self.parameter("rules").replace("\r\n", "\n")
        return self.parameter("a") or self.parameter("at", "0"), self.parameter("b"), rules

    async def get(self) -> None:
        site, part, (a, b, rules) = self.access.site, bool(self.parameter("fragment")), self.pair()
        await self.show(lambda: view_compare.comparison(site, a, b, rules, part))

    async def post(self) -> None:
        site, anew, (a, b, rules) = self.access.site, bool(self.parameter("again")), self.pair()
        then = href("compare", a=a, b=b, rules=rules)
        await self.begin(lambda: view_compare.start_comparison(site, a, b, rules, anew), then)


class _Stop(_Handler):
    async def post(self) -> None:
        job = self.access.site.jobs.get(self.parameter("job"))
        if job is not None:
            job.stop()
        view, _, query = self.parameter("back").partition("?")
        # Only to a page of this site: anything else would make this server lead a reader elsewhere.
        self.redirect(f"{view}?{query}" if view in ("health", "compare") else "./", status=303)


class _Run(_Handler):
    async def get(self) -> None:
        site, at, metric = self.access.site, self.parameter("at", "0"), self.parameter("metric")
        best = "highest" if self.parameter("best") == "highest" else "lowest"
        await self.show(lambda: view_places.run(site, at, metric, best))


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


_VIEWS: Sequence[tuple[str, type[_Handler]]] = (
    ("", _Home),
    ("open", _Open),
    ("checkpoint", _Checkpoint),
    ("rows", _Rows),
    ("map", _Map),
    ("details", _Details),
    ("array", _Array),
    ("values", _Values),
    ("statistics", _Statistics),
    ("health", _Health),
    ("compare", _Compare),
    ("stop", _Stop),
    ("run", _Run),
    ("static/(.*)", _Static),
)


def routes(
    access: Access | Callable[[], Access], prefix: str = "/"
) -> list[tuple[str, type[_Handler], dict[str, Any]]]:
    """(pattern, handler, arguments) of every page below ``prefix``. ``access`` may be a function that is called when a page is asked for."""
    return [(prefix + path, handler, {"access": access}) for path, handler in _VIEWS]


def application(access: Access) -> web.Application:
    """The stand-alone application."""
    return web.Application(
        routes(access),
        default_handler_class=_Nothing,
        default_handler_args={"access": access},
        compress_response=True,
        log_function=lambda handler: None,
    )
