"""Views of a whole checkpoint: totals, the list of its arrays (as a tree, or search results), the map by bytes."""

from __future__ import annotations

import heapq
from typing import Any

from ..model.inventory import PAGE, SORTS, Group, Query, Row, largest_first
from ..model.site import Opened, Site
from ..model.text import FORMATS, count, human_bytes, key, natural, percent, visible
from . import charts
from .frame import Shown, crumbs, facts, framed, href, notice, section, shape_text, table, tabs
from .html import Markup, join, tag

_CRUMBS = 6  # levels that are shown at each end of a long path
_ROOM = 36  # rows within which groups are shown unfolded


def tab_bar(opened: Opened, current: str) -> Markup:
    """Links to the views of a checkpoint."""
    at = opened.place.at
    return tabs(
        current,
        [
            ("arrays", "Arrays", href("checkpoint", at=at)),
            ("map", "Map", href("map", at=at)),
            ("health", "Health", href("health", at=at)),
            ("compare", "Compare", href("compare", at=at)),
            ("details", "Details", href("details", at=at)),
        ],
    )


def head(opened: Opened) -> Markup:
    """Title and totals."""
    ckpt, held = opened.ckpt, opened.inventory
    meshes = "; ".join(" × ".join(f"{a}={n}" for a, n in m.items()) for m in ckpt.meshes[:4])
    kinds = list(held.dtypes.items())
    legend = [
        tag(
            "span", tag("i", class_=f"mt-key d{min(k, 5)}"), f"{name} {human_bytes(size)}", title=f"{count(n, 'array')}"
        )
        for k, (name, (n, size)) in enumerate(kinds[:6])
    ]
    return tag(
        "div",
        tag("h1", visible(opened.place.label, 120)),
        tag("p", visible(ckpt.path, 300), class_="mt-path"),
        facts(
            [
                ("Size", human_bytes(held.nbytes)),
                ("Arrays", f"{len(held.rows):,}"),
                ("Elements", f"{held.elements:,}" if held.elements < 10**15 else f"{held.elements:.3g}"),
                ("Step", None if ckpt.step is None else f"{ckpt.step:,}"),
                ("Format", FORMATS.get(ckpt.kind, ckpt.kind)),
                ("Saved from", meshes or None),
                ("Not readable here", f"{len(ckpt.skipped):,}" if ckpt.skipped else None),
            ]
        ),
        tag(
            "div",
            charts.share_bar([(k, size) for k, (_, size) in kinds]),
            tag("p", legend, class_="mt-legend"),
            class_="mt-dtypes",
        )
        if held.nbytes
        else None,
        class_="mt-head",
    )


def facts_of(opened: Opened) -> dict[str, Any]:
    """The totals as plain data."""
    ckpt = opened.ckpt
    return {"path": ckpt.path, "kind": ckpt.kind, "step": ckpt.step, "meshes": ckpt.meshes} | opened.inventory.facts()


def row_data(r: Row) -> dict[str, Any]:
    return {"name": r.name, "shape": list(r.shape), "dtype": r.dtype, "nbytes": r.nbytes, "sharding": r.sharding}


# ----- the list -------------------------------------------------------------------------------------------------------


def checkpoint(site: Site, at: str, query: Query, inside: list[str], rows_only: bool = False) -> Shown:
    """The list of arrays: the children of one group, or the matches of a query."""
    opened = site.open(at)
    if query.narrows:
        shown, data = _found(opened, query)
    else:
        shown, data = _tree(opened, inside, query.page)
    if rows_only:
        return Shown("", shown, data)
    body = join(
        [head(opened), tab_bar(opened, "arrays"), _form(opened, query, inside), tag("div", shown, id="listing")]
    )
    up = (
        href("checkpoint", at=at, in_=inside[:-1])
        if inside
        else href("open", at=at.rpartition("/")[0])
        if "/" in at
        else None
    )
    return Shown(opened.place.label, body, facts_of(opened) | data, crumbs(site, opened.place), up=up)


def _form(opened: Opened, query: Query, inside: list[str]) -> Markup:
    at = opened.place.at
    sizes = [
        ("", "any size"),
        ("1024", "≥ 1 KiB"),
        (str(1 << 20), "≥ 1 MiB"),
        (str(100 << 20), "≥ 100 MiB"),
        (str(1 << 30), "≥ 1 GiB"),
    ]
    named = {"tree": "as a tree", "name": "by name", "size": "by size", "dtype": "by dtype", "rank": "by rank"}
    if str(query.least or "") not in [v for v, _ in sizes]:
        sizes.append((str(query.least), f"≥ {human_bytes(query.least)}"))

    def choose(name: str, label: str, options: list[tuple[str, str]], chosen: str) -> Markup:
        return tag(
            "select",
            [tag("option", text, value=value, selected=value == chosen) for value, text in options],
            name=name,
            aria_label=label,
        )

    return tag(
        "form",
        tag("input", type="hidden", name="at", value=at),
        tag(
            "input",
            type="search",
            name="q",
            value=query.words,
            placeholder="Search names: words, or a pattern with *",
            aria_label="Search names",
            autocomplete="off",
            spellcheck="false",
        ),
        choose("dtype", "dtype", [("", "any dtype"), *((d, d) for d in opened.inventory.dtypes)], query.dtype),
        choose("least", "Least size", sizes, str(query.least or "")),
        choose("sort", "Order", [(s, named[s]) for s in SORTS], query.sort),
        tag("label", tag("input", type="checkbox", name="down", value="1", checked=query.descending), "descending"),
        tag("button", "Filter"),
        action="checkpoint",
        method="get",
        class_="mt-filter",
        role="search",
    )


def _size(nbytes: int, total: int) -> Markup:
    share = nbytes / total if total else 0.0
    return join(
        [
            tag("span", human_bytes(nbytes)),
            tag(
                "svg",
                tag("rect", x=0, y=0, width=64, height=6, rx=1, class_="mt-track"),
                tag("rect", x=0, y=0, width=max(64 * share, 1 if nbytes else 0), height=6, rx=1, class_="mt-fill"),
                viewBox="0 0 64 6",
                width=64,
                height=6,
                aria_hidden="true",
            ),
        ]
    )


def _array_row(at: str, r: Row, total: int, label: str, depth: int = 0) -> Markup:
    return tag(
        "tr",
        tag(
            "td",
            tag("a", label, href=href("array", at=at, name=key(r.name)), title=visible(r.name, 300)),
            class_=f"mt-name n{min(depth, 9)}",
        ),
        tag("td", r.dtype),
        tag("td", shape_text(r.shape)),
        tag("td", visible(r.sharding or "", 80), class_="mt-quiet"),
        tag("td", _size(r.nbytes, total), class_="mt-number mt-size"),
        data_row=True,
    )


def _group_row(at: str, g: Group, inside: list[str], total: int, depth: int, open_: bool) -> Markup:
    here = [*inside, key(g.label)]
    return tag(
        "tr",
        tag(
            "td",
            tag(
                "button",
                "▸",
                type="button",
                class_="mt-fold",
                aria_expanded="true" if open_ else "false",
                aria_label=f"Unfold {visible(g.label, 80)}",
                data_unfold=href("rows", at=at, in_=here),
            ),
            tag("a", visible(g.label, 120) or "(empty)", href=href("checkpoint", at=at, in_=here), class_="mt-group"),
            class_=f"mt-name n{min(depth, 9)}",
        ),
        tag("td", count(g.arrays, "array"), colspan=3, class_="mt-quiet"),
        tag("td", _size(g.nbytes, total), class_="mt-number mt-size"),
        data_row=True,
        data_depth=depth,
    )


def _rows(
    opened: Opened, group: Group, inside: list[str], page: int, depth: int, unfold: bool = True
) -> tuple[list[Markup], int]:
    children = group.children()
    at, total = opened.place.at, opened.inventory.nbytes
    pages = max(1, -(-len(children) // PAGE))
    page = max(0, min(page, pages - 1))
    out: list[Markup] = []
    shown = children[page * PAGE : (page + 1) * PAGE]
    # Where there is room, groups stand unfolded: level by level, as long as a whole level fits.
    room, levels, level = _ROOM - len(shown), 0, [c for c in shown if isinstance(c, Group)]
    while level and unfold and (more := sum(len(g.groups) + len(g.rows) for g in level)) <= room:
        room, levels = room - more, levels + 1
        level = [below for g in level for below in g.groups.values()]

    def add(items: list[Group | Row], where: list[str], depth: int, left: int) -> None:
        for c in items:
            if isinstance(c, Group):
                out.append(_group_row(at, c, where, total, depth, left > 0))
                if left > 0:
                    add(c.children(), [*where, key(c.label)], depth + 1, left - 1)
            else:
                out.append(_array_row(at, c, total, visible(c.path[-1] if c.path else c.name, 120) or "(empty)", depth))

    add(shown, inside, depth, levels)
    return out, pages


def unfolded(site: Site, at: str, inside: list[str]) -> Shown:
    """The rows right below a group, for display under its row. A link leads to those that do not fit a page."""
    opened = site.open(at)
    group = opened.inventory.group(inside)
    rows, pages = _rows(opened, group, inside, 0, len(inside), unfold=False)
    if pages > 1:
        more = f"… {len(group.groups) + len(group.rows) - PAGE:,} more"
        rows.append(
            tag(
                "tr",
                tag(
                    "td",
                    tag("a", more, href=href("checkpoint", at=at, in_=inside)),
                    colspan=5,
                    class_=f"mt-name n{min(len(inside), 9)}",
                ),
                data_row=True,
            )
        )
    return Shown("", join(rows))


def _listed(rows: list[Markup]) -> Markup:
    head = ("Name", "dtype", "Shape", "Sharding", "Size")
    return framed(head, rows, [head.index("Size")], "mt-arrays")


def _pager(page: int, pages: int, found: str, to: Any) -> Markup:
    return tag(
        "p",
        tag("span", found),
        tag("a", "Previous", href=to(page - 1), rel="prev") if page > 0 else None,
        tag("span", f"page {page + 1:,} of {pages:,}") if pages > 1 else None,
        tag("a", "Next", href=to(page + 1), rel="next") if page + 1 < pages else None,
        class_="mt-pager",
    )


def _trail(view: str, at: str, group: Group, inside: list[str]) -> Markup:
    """Links from the whole checkpoint down to a group."""
    steps = [
        tag("a", visible(name, 60), href=href(view, at=at, in_=inside[: k + 1]))
        for k, name in enumerate(group.path)
        if k < _CRUMBS or k >= len(group.path) - _CRUMBS
    ]
    if len(group.path) > 2 * _CRUMBS:
        steps.insert(_CRUMBS, tag("span", f"… {len(group.path) - 2 * _CRUMBS:,} levels …"))
    links = [tag("a", "all", href=href(view, at=at)), *steps]
    return tag("p", join(links, '<span class="mt-slash">/</span>'), class_="mt-crumbs mt-inside")


def _tree(opened: Opened, inside: list[str], page: int) -> tuple[Markup, dict[str, Any]]:
    at, held = opened.place.at, opened.inventory
    group = held.group(inside)
    rows, pages = _rows(opened, group, inside, page, 0)
    page = max(0, min(page, pages - 1))
    trail = _trail("checkpoint", at, group, inside)
    found = f"{count(group.arrays, 'array')}, {human_bytes(group.nbytes)}"
    if inside:
        found += f" ({percent(group.nbytes / held.nbytes if held.nbytes else 0)} of the checkpoint)"
    shown = join(
        [
            trail if inside else None,
            _listed(rows) if rows else notice("note", "This checkpoint holds no arrays."),
            _pager(page, pages, found, lambda p: href("checkpoint", at=at, in_=inside, page=p or None)),
        ]
    )
    data = {
        "inside": list(group.path),
        "groups": [
            {"name": g.label, "arrays": g.arrays, "nbytes": g.nbytes}
            for g in sorted(group.groups.values(), key=lambda g: natural(g.label))
        ],
        "rows": [row_data(r) for r in group.rows[page * PAGE : (page + 1) * PAGE]],
    }
    return shown, data


def _found(opened: Opened, query: Query) -> tuple[Markup, dict[str, Any]]:
    at, held = opened.place.at, opened.inventory
    listing = held.list(query)

    def to(p: int) -> str:
        return href(
            "checkpoint",
            at=at,
            q=query.words,
            dtype=query.dtype,
            least=query.least or None,
            most=query.most,
            sort=query.sort if query.sort != "tree" else None,
            down=query.descending,
            page=p or None,
        )

    rows = [_array_row(at, r, held.nbytes, visible(r.name, 160) or "(empty)") for r in listing.rows]
    found = f"{count(listing.found, 'array')} found, {human_bytes(listing.nbytes)}"
    shown = join(
        [
            _listed(rows)
            if rows
            else notice(
                "note", "Nothing found.", tag("p", "Fewer words, another dtype or a smaller size may find more.")
            ),
            _pager(listing.page, listing.pages, found, to),
        ]
    )
    return shown, {
        "found": listing.found,
        "page": listing.page,
        "pages": listing.pages,
        "rows": [row_data(r) for r in listing.rows],
    }


# ----- map ------------------------------------------------------------------------------------------------------------


def bytes_map(site: Site, at: str, inside: list[str]) -> Shown:
    """The treemap of a group."""
    opened = site.open(at)
    group = opened.inventory.group(inside)

    def link(item: Group | Row) -> str:
        if isinstance(item, Row):
            return href("array", at=at, name=key(item.name))
        return href("map", at=at, in_=[key(p) for p in item.path])

    trail = _trail("map", at, group, inside)
    largest = heapq.nsmallest(10, opened.inventory.rows, key=largest_first)
    body = join(
        [
            head(opened),
            tab_bar(opened, "map"),
            trail,
            charts.bytes_map(group, link),
            tag(
                "p",
                f"{count(group.arrays, 'array')}, {human_bytes(group.nbytes)}. Areas are bytes; a click goes deeper.",
                class_="mt-quiet",
            ),
            section(
                "Largest arrays",
                table(
                    ("Name", "dtype", "Shape", "Size", "Share"),
                    [
                        (
                            tag("a", visible(r.name, 160), href=href("array", at=at, name=key(r.name))),
                            r.dtype,
                            shape_text(r.shape),
                            human_bytes(r.nbytes),
                            percent(r.nbytes / opened.inventory.nbytes) if opened.inventory.nbytes else "–",
                        )
                        for r in largest
                    ],
                    numeric=(3, 4),
                    cls="mt-names",
                ),
            ),
        ]
    )
    up = href("map", at=at, in_=inside[:-1]) if inside else href("checkpoint", at=at)
    data = facts_of(opened) | {"largest": [row_data(r) for r in largest]}
    return Shown(f"{opened.place.label}: map", body, data, crumbs(site, opened.place, ("map", None)), up=up)
