"""The frame of all views: addresses, pages, tables, facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from ..model.site import Place, Site
from ..model.text import visible
from .html import Markup, join, tag

LOGO = Markup(
    '<svg class="mt-logo" viewBox="0 0 22 22" width="22" height="22" aria-hidden="true">'
    '<rect x="1" y="1" width="9" height="9" rx="2" class="l1"/><rect x="12" y="1" width="9" height="9" rx="2" class="l2"/>'
    '<rect x="1" y="12" width="9" height="9" rx="2" class="l2"/><rect x="12" y="12" width="9" height="9" rx="2" class="l3"/></svg>'
)

KEYS = (
    ("/", "search"),
    ("j  k", "next and previous row"),
    ("Enter", "open the row"),
    ("→  ←", "unfold and fold a group"),
    ("u", "up"),
    ("[  ]", "previous and next array"),
    ("1 … 5", "tabs"),
    ("Arrows", "walk over the values of a focused heat map"),
    ("Shift + arrows", "move its window"),
    ("t", "light or dark"),
    ("?", "these keys"),
)


@dataclass(frozen=True)
class Shown:
    """A view, ready: its body as markup and the same as plain data. ``status`` is that of HTTP."""

    title: str
    body: Markup
    data: Any = None
    crumbs: Sequence[tuple[str, str | None]] = ()
    status: int = 200
    up: str | None = None


@lru_cache
def asset(name: str) -> bytes:
    """A static file of this package."""
    return files(__package__).joinpath("static", name).read_bytes()


def href(view: str, **parameters: Any) -> str:
    """A relative address: it works below any prefix and behind any proxy. None and "" are left out, lists repeat their name.

    >>> href("array", at="0", name="a b", page=None)
    'array?at=0&name=a+b'
    """
    pairs = [(k.rstrip("_"), v) for k, v in parameters.items() if v is not None and v != "" and v is not False]
    query = urlencode([(k, "1" if v is True else v) for k, v in pairs], doseq=True)
    return f"{view}?{query}" if query else view


def page(shown: Shown, *, prefix: str = "") -> str:
    """The whole page around a view. ``prefix`` leads to the static files, relative to the page."""
    return opening(shown.title, prefix) + rest(shown)


def opening(title: str, prefix: str = "", waiting: str = "") -> str:
    """The part of a page before its view. ``waiting`` is shown until `rest` arrives."""
    return "<!doctype html>" + _open(
        tag(
            "html",
            tag(
                "head",
                tag("meta", charset="utf-8"),
                tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
                tag("meta", name="color-scheme", content="light dark"),
                tag("title", f"{visible(title, 120)} · meshtape"),
                tag("link", rel="icon", href=f"{prefix}static/icon.svg", type="image/svg+xml"),
                tag("link", rel="stylesheet", href=f"{prefix}static/browse.css"),
                tag("script", src=f"{prefix}static/browse.js", defer=True),
            ),
            _open(
                tag(
                    "body",
                    tag("a", "Skip to the content", href="#main", class_="mt-skip"),
                    tag("p", waiting, class_="mt-wait", role="status") if waiting else None,
                    class_="mt",
                )
            ),
            lang="en",
        )
    )


def _open(element: Markup) -> Markup:
    """An element without its end tag."""
    return Markup(element[: element.rindex("</")])


def rest(shown: Shown) -> str:
    """The part of a page after `opening`."""
    crumbs = join(
        [
            tag("a", visible(label, 80), href=to) if to else tag("span", visible(label, 80), aria_current="page")
            for label, to in shown.crumbs
        ],
        '<span class="mt-slash">/</span>',
    )
    keys = tag("dl", [join([tag("dt", tag("kbd", k)), tag("dd", what)]) for k, what in KEYS])
    parts = [
        tag(
            "header",
            tag("a", LOGO, "meshtape", href="./", class_="mt-brand"),
            tag("nav", crumbs, class_="mt-crumbs", aria_label="Where you are"),
            tag("button", "Keys", type="button", class_="mt-plain", data_keys=True, title="Keys (?)"),
            tag("button", "Theme", type="button", class_="mt-plain", data_theme_button=True, title="Light or dark (t)"),
            class_="mt-top",
        ),
        tag("main", shown.body, id="main", data_up=shown.up),
        tag(
            "dialog",
            tag("h2", "Keys", id="keys-title"),
            keys,
            tag("form", tag("button", "Close"), method="dialog"),
            id="keys",
            aria_labelledby="keys-title",
        ),
    ]
    return f"{join(parts)}</body></html>"


def crumbs(site: Site, place: Place, *more: tuple[str, str | None]) -> list[tuple[str, str | None]]:
    """Links from the root of a place down to it, then ``more``; the last one is where the reader is."""
    number, *names = place.at.split("/")
    trail: list[tuple[str, str | None]] = [(site.place(number).label, href("open", at=number))]
    for k, name in enumerate(names):
        trail.append((name, href("open", at="/".join([number, *names[: k + 1]]))))
    trail += more
    return [*trail[:-1], (trail[-1][0], None)]


def facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """A row of facts: a small name above each value."""
    return tag(
        "dl",
        [tag("div", tag("dt", k), tag("dd", v)) for k, v in pairs if v is not None and v != ""],
        class_="mt-facts",
    )


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], numeric: Sequence[int] = (), cls: str = "") -> Markup:
    """A table; the columns ``numeric`` are set to the right."""

    def row(cells: Sequence[Any]) -> Markup:
        return tag("tr", [tag("td", c, class_="mt-number" if i in numeric else None) for i, c in enumerate(cells)])

    return framed(head, [row(cells) for cells in rows], numeric, cls)


def framed(head: Sequence[Any], rows: Sequence[Markup], numeric: Sequence[int] = (), cls: str = "") -> Markup:
    """A table around rows that are ready."""
    return tag(
        "div",
        tag(
            "table",
            tag(
                "thead",
                tag(
                    "tr",
                    [
                        tag("th", h, scope="col", class_="mt-number" if i in numeric else None)
                        for i, h in enumerate(head)
                    ],
                ),
            ),
            tag("tbody", rows),
            class_=f"mt-table {cls}".strip(),
        ),
        class_="mt-scroll",
    )


def section(title: str, *children: Any, note: Any = None, cls: str = "", **attributes: Any) -> Markup:
    """A titled part of a view."""
    return tag(
        "section",
        tag("div", tag("h2", title), tag("p", note, class_="mt-quiet") if note else None, class_="mt-section-head"),
        *children,
        class_=f"mt-section {cls}".strip(),
        **attributes,
    )


def notice(level: str, title: str, *children: Any) -> Markup:
    """A message in a box: ``level`` is ``"bad"``, ``"note"`` or ``"good"``."""
    return tag("div", tag("strong", title), *children, class_=f"mt-notice {level}", role="status")


def tabs(current: str, items: Sequence[tuple[str, str, str]]) -> Markup:
    """Links to the views of one thing: (key, label, address)."""
    return tag(
        "nav",
        [tag("a", label, href=to, aria_current="page" if key == current else None) for key, label, to in items],
        class_="mt-tabs",
        aria_label="Views",
    )


def shape_text(shape: Sequence[int]) -> str:
    """
    >>> shape_text((2, 3)), shape_text(())
    ('2 × 3', 'scalar')
    """
    if not shape:
        return "scalar"
    shown = [f"{n}" for n in shape]
    return " × ".join(shown if len(shown) <= 12 else [*shown[:6], "…", *shown[-5:]])
