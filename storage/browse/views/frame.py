"""The frame of all views: templates, addresses, pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from ..model.site import Site, SitePlace
from ..model.text import count, human_bytes, key, number, percent, visible


@dataclass(frozen=True)
class Shown:
    """A view as markup and as plain data. ``status`` is that of HTTP; a redirect has a ``location`` alone."""

    title: str
    body: str = ""
    data: Any = None
    crumbs: Sequence[tuple[str, str | None]] = ()
    status: int = 200
    up: str | None = None
    location: str | None = None


@lru_cache
def asset(name: str) -> bytes:
    """A static file of this package; the style sheet of pages begins with that of charts."""
    data = files(__package__).joinpath("static", name).read_bytes()
    return asset("charts.css") + data if name == "browse.css" else data


def href(view: str, **parameters: Any) -> str:
    """A relative address: it works below any prefix and behind any proxy. None and "" are left out, lists repeat their
    name.

    >>> href("array", at="0", name="a b", page=None)
    'array?at=0&name=a+b'
    """
    pairs = [(k.rstrip("_"), v) for k, v in parameters.items() if v is not None and v != "" and v is not False]
    query = urlencode([(k, "1" if v is True else v) for k, v in pairs], doseq=True)
    return f"{view}?{query}" if query else view


def shape_text(shape: Sequence[int]) -> str:
    """
    >>> shape_text((2, 3)), shape_text(())
    ('2 × 3', 'scalar')
    """
    shown = [f"{n}" for n in shape]
    return " × ".join(shown if len(shown) <= 12 else [*shown[:6], "…", *shown[-5:]]) or "scalar"


def mesh_text(mesh: dict[str, int]) -> str:
    return " × ".join(f"{a}={n}" for a, n in mesh.items())


def _safe(value: Any) -> Any:
    """The value of each ``{{ … }}`` before it is escaped, with control characters spelt out in all but markup."""
    return value if hasattr(value, "__html__") else "" if value is None else visible(str(value), 10**6)


def _lines(text: str, longest: int = 10**6) -> Markup:
    """A text of several lines, each made visible."""
    return Markup("\n").join(escape(visible(line, longest)) for line in text.split("\n"))


_ENVIRONMENT = Environment(
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_safe,
    trim_blocks=True,
    lstrip_blocks=True,
    loader=FunctionLoader(lambda name: files(__package__).joinpath("templates", name).read_text(encoding="utf-8")),
)
_ENVIRONMENT.filters.update(
    bytes=human_bytes,
    clip=visible,
    commas="{:,}".format,
    lines=_lines,
    mesh=mesh_text,
    number=number,
    percent=percent,
    shape=shape_text,
)
_ENVIRONMENT.globals.update(count=count, href=href, key=key)


def render(template: str, **values: Any) -> Markup:
    """A template of this package with values; all but markup is escaped.

    >>> "a &lt; b" in render("error.html", title="a < b", text="", back=None)
    True
    """
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def template(text: str) -> Any:
    """A template of another package. It may import macros of this one."""
    return _ENVIRONMENT.from_string(text)


def page(shown: Shown, *, prefix: str = "") -> str:
    """The whole page around a view. ``prefix`` leads to the static files, relative to the page."""
    return opening(shown.title, prefix) + rest(shown)


def opening(title: str, prefix: str = "", waiting: str = "") -> str:
    """The part of a page before its view. ``waiting`` is shown until `rest` arrives."""
    return render("opening.html", title=title, prefix=prefix, waiting=waiting)


def rest(shown: Shown) -> str:
    """The part of a page after `opening`."""
    return render("rest.html", shown=shown)


def crumbs(site: Site, place: SitePlace, *more: tuple[str, str | None]) -> list[tuple[str, str | None]]:
    """Links from the root of a place down to it, then ``more``; the last one is where the reader is."""
    number, *names = place.at.split("/")
    trail: list[tuple[str, str | None]] = [(site.place(number).label, href("open", at=number))]
    trail += [(name, href("open", at="/".join([number, *names[: k + 1]]))) for k, name in enumerate(names)]
    trail += more
    return [*trail[:-1], (trail[-1][0], None)]


def above(at: str) -> str | None:
    """The address of the directory that holds a place; None for a root."""
    return href("open", at=at.rpartition("/")[0]) if "/" in at else None
