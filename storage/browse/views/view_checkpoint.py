"""Views of a whole checkpoint: totals, the list of its arrays (as a tree, or search results), the map by bytes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Any

from ..model.inventory import PAGE, SORTS, ArrayRow, NameGroup, Query, largest_first
from ..model.site import Opened, Site
from ..model.text import FORMATS, count, human_bytes, key, natural, percent
from . import charts
from .frame import Markup, Shown, above, crumbs, href, mesh_text, render

_CRUMBS = 6  # levels that are shown at each end of a long path
_ROOM = 36  # rows within which groups are shown unfolded
_SIZES = {0: "any size", 1 << 10: "≥ 1 KiB", 1 << 20: "≥ 1 MiB", 100 << 20: "≥ 100 MiB", 1 << 30: "≥ 1 GiB"}
_ORDERS = {"tree": "as a tree", **{s: f"by {s}" for s in SORTS[1:]}}


def head(opened: Opened, tab: str = "") -> Markup:
    """Title and totals, above links to the views of the checkpoint where ``tab`` names the present one."""
    ckpt, held = opened.ckpt, opened.inventory
    kinds = list(held.dtypes.items())
    facts = [
        ("Size", human_bytes(held.nbytes)),
        ("Arrays", f"{len(held.rows):,}"),
        ("Elements", big(held.elements)),
        ("Step", None if ckpt.step is None else f"{ckpt.step:,}"),
        ("Format", FORMATS.get(ckpt.kind, ckpt.kind)),
        ("Saved from", "; ".join(mesh_text(m) for m in ckpt.meshes[:4])),
        ("Not readable here", f"{len(ckpt.skipped):,}" if ckpt.skipped else None),
    ]
    bar = charts.share_bar([(k, size) for k, (_, size) in kinds])
    return render(
        "head.html",
        place=opened.place,
        path=ckpt.path,
        facts_of=facts,
        bar=bar if tab else bar.image(),
        kinds=kinds[:6] if held.nbytes else [],
        tab=tab,
    )


def big(n: int) -> str:
    return f"{n:,}" if n < 10**15 else f"{n:.3g}"


def facts_of(opened: Opened) -> dict[str, Any]:
    """The totals as plain data."""
    ckpt = opened.ckpt
    return {"path": ckpt.path, "kind": ckpt.kind, "step": ckpt.step, "meshes": ckpt.meshes} | opened.inventory.facts()


def checkpoint(site: Site, at: str, query: Query, inside: list[str], rows_only: bool = False) -> Shown:
    """The list of arrays: the children of one group, or the matches of a query."""
    opened = site.open(at)
    listing, data = _found(opened, query) if query.narrows else _tree(opened, inside, query.page)
    if rows_only:
        return Shown("", listing, data)
    sizes = _SIZES if query.least in _SIZES else _SIZES | {query.least: f"≥ {human_bytes(query.least)}"}
    body = render(
        "checkpoint.html",
        head=head(opened, "checkpoint"),
        at=at,
        query=query,
        dtypes=[("", "any dtype"), *((d, d) for d in opened.inventory.dtypes)],
        sizes=sizes,
        orders=_ORDERS,
        listing=listing,
    )
    up = href("checkpoint", at=at, in_=inside[:-1]) if inside else above(at)
    return Shown(opened.place.label, body, facts_of(opened) | data, crumbs(site, opened.place), up=up)


def _tree(opened: Opened, inside: list[str], page: int) -> tuple[Markup, dict[str, Any]]:
    at, held = opened.place.at, opened.inventory
    group = held.group(inside)
    rows, page, pages = _rows(opened, group, inside, page)
    found = f"{count(group.arrays, 'array')}, {human_bytes(group.nbytes)}"
    if inside:
        found += f" ({percent(group.nbytes / held.nbytes if held.nbytes else 0)} of the checkpoint)"
    trail = _trail("checkpoint", at, group, inside)
    listing = _listing(rows, trail, found, page, pages, lambda p: href("checkpoint", at=at, in_=inside, page=p))
    groups = sorted(group.groups.values(), key=lambda g: natural(g.label))
    return listing, {
        "inside": list(group.path),
        "groups": [{"name": g.label, "arrays": g.arrays, "nbytes": g.nbytes} for g in groups],
        "rows": [r.data() for r in group.rows[page * PAGE : (page + 1) * PAGE]],
    }


def _found(opened: Opened, query: Query) -> tuple[Markup, dict[str, Any]]:
    listing = opened.inventory.list(query)
    asked = {"q": query.words, "dtype": query.dtype, "least": query.least or None, "most": query.most}
    asked |= {"sort": query.sort if query.sort != "tree" else None, "down": query.descending}
    rows = _drawn(opened, [(r, r.name, [], 0, False) for r in listing.rows])
    found = f"{count(listing.found, 'array')} found, {human_bytes(listing.nbytes)}"
    to = partial(href, "checkpoint", at=opened.place.at, **asked)
    shown = _listing(rows, [], found, listing.page, listing.pages, lambda p: to(page=p))
    data = {"found": listing.found, "page": listing.page, "pages": listing.pages}
    return shown, data | {"rows": [r.data() for r in listing.rows]}


def _listing(
    rows: Markup, trail: list[Any], found: str, page: int, pages: int, to: Callable[[int | None], str]
) -> Markup:
    beside = {"before": to(page - 1 or None) if page > 0 else None, "after": to(page + 1) if page + 1 < pages else None}
    return render("listing.html", rows=rows, trail=trail, found=found, page=page, pages=pages, **beside)


def _rows(
    opened: Opened, group: NameGroup, inside: list[str], page: int, depth: int = 0, unfold: bool = True
) -> tuple[Markup, int, int]:
    """The rows of a page of a group's children, the page's number, and how many there are."""
    children = group.children()
    pages = max(1, -(-len(children) // PAGE))
    page = max(0, min(page, pages - 1))
    shown = children[page * PAGE : (page + 1) * PAGE]
    # Where there is room, groups stand unfolded: level by level, as long as a whole level fits.
    room, levels, level = _ROOM - len(shown), 0, [c for c in shown if isinstance(c, NameGroup)]
    while level and unfold and (more := sum(len(g.groups) + len(g.rows) for g in level)) <= room:
        room, levels = room - more, levels + 1
        level = [below for g in level for below in g.groups.values()]
    rows: list[tuple[NameGroup | ArrayRow, str, list[str], int, bool]] = []

    def add(items: list[NameGroup | ArrayRow], where: list[str], depth: int, left: int) -> None:
        for c in items:
            here = [*where, key(c.label)]
            rows.append((c, c.label, here, depth, left > 0))
            if isinstance(c, NameGroup) and left > 0:
                add(c.children(), here, depth + 1, left - 1)

    add(shown, inside, depth, levels)
    return _drawn(opened, rows), page, pages


def _drawn(opened: Opened, rows: list[tuple[NameGroup | ArrayRow, str, list[str], int, bool]]) -> Markup:
    return render("rows.html", at=opened.place.at, total=opened.inventory.nbytes or 1, rows=rows)


def unfolded(site: Site, at: str, inside: list[str]) -> Shown:
    """The rows right below a group, for display under its row. A link leads to those that do not fit a page."""
    opened = site.open(at)
    group = opened.inventory.group(inside)
    rows, _, pages = _rows(opened, group, inside, 0, len(inside), unfold=False)
    more = len(group.groups) + len(group.rows) - PAGE
    return Shown("", rows + render("more.html", more=more, at=at, inside=inside) if pages > 1 else rows)


def _trail(view: str, at: str, group: NameGroup, inside: list[str]) -> list[tuple[str, str | None]]:
    """Links from the whole checkpoint down to a group."""
    steps: list[tuple[str, str | None]] = [("all", href(view, at=at))]
    for k, name in enumerate(group.path):
        if k < _CRUMBS or k >= len(group.path) - _CRUMBS:
            steps.append((name, href(view, at=at, in_=inside[: k + 1])))
        elif k == _CRUMBS:
            steps.append((f"… {len(group.path) - 2 * _CRUMBS:,} levels …", None))
    return steps


def bytes_map(site: Site, at: str, inside: list[str]) -> Shown:
    """The treemap of a group."""
    opened = site.open(at)
    group = opened.inventory.group(inside)

    def link(item: NameGroup | ArrayRow) -> str:
        if isinstance(item, ArrayRow):
            return href("array", at=at, name=key(item.name))
        return href("map", at=at, in_=[key(p) for p in item.path])

    largest = heapq.nsmallest(10, opened.inventory.rows, key=largest_first)
    body = render(
        "map.html",
        head=head(opened, "map"),
        at=at,
        trail=_trail("map", at, group, inside),
        picture=charts.bytes_map(group, link),
        group=group,
        largest=largest,
        total=opened.inventory.nbytes or 1,
    )
    up = href("map", at=at, in_=inside[:-1]) if inside else href("checkpoint", at=at)
    data = facts_of(opened) | {"largest": [r.data() for r in largest]}
    return Shown(f"{opened.place.label}: map", body, data, crumbs(site, opened.place, ("map", None)), up=up)
