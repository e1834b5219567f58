"""One array: a window of its values, their distribution, its blocks over the ranks, its chunks and files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import StoredArray
from ...stores import store
from ..model import layout
from ..model.site import Opened, Site
from ..model.slices import View, Window, cost, window
from ..model.statistics import LIMIT, Statistics, statistics
from ..model.text import count, human_bytes, key, number, percent, visible
from . import charts, png
from .frame import Shown, crumbs, facts, href, notice, section, shape_text, table
from .html import Markup, join, tag

_REMOTE_LIMIT = 4 << 20  # bytes of a sample, or of a first look, that are fetched from an object store


def find(opened: Opened, name: str) -> StoredArray:
    """The array that ``name`` (see `text.key`) stands for."""
    real = opened.inventory.name_of(name)
    if real not in opened.ckpt.arrays:
        return opened.ckpt[visible(real)]  # raises, and names the nearest
    return opened.ckpt.arrays[real]


def array(site: Site, at: str, name: str, view: dict[str, Any], check: bool = False) -> Shown:
    """The page of an array. Its statistics are a fragment of their own, as they read the most."""
    opened = site.open(at)
    a = find(opened, name)
    look = _first_look(opened, a, view)
    here = key(a.name)
    rows = opened.inventory.rows
    place = next((i for i, r in enumerate(rows) if r.name == a.name), 0)

    def to(v: View, **more: Any) -> str:
        return href("array", at=at, name=here, **parameters(v), **more)

    beside = [
        tag("a", "‹ previous", href=href("array", at=at, name=key(rows[place - 1].name)), rel="prev")
        if place
        else None,
        tag("span", f"{place + 1:,} of {len(rows):,}"),
        tag("a", "next ›", href=href("array", at=at, name=key(rows[place + 1].name)), rel="next")
        if place + 1 < len(rows)
        else None,
    ]
    elements = math.prod(a.shape)
    head = tag(
        "div",
        tag("p", beside, class_="mt-beside"),
        tag("h1", visible(a.name, 160) or "(empty)", class_="mt-mono"),
        facts(
            [
                ("Shape", shape_text(a.shape)),
                ("dtype", a.dtype.name),
                ("Size", human_bytes(a.nbytes)),
                ("Elements", f"{elements:,}" if elements < 10**15 else f"{elements:.3g}"),
                ("Sharding", visible(a.sharding_text, 100) if a.sharding_text else None),
            ]
        ),
        class_="mt-head",
    )
    values, data = _values(opened, a, look, to)
    load = href("statistics", at=at, name=here)
    body = join(
        [
            head,
            tag(
                "div",
                tag("div", values, _storage(opened, a, look, to, check)),
                tag(
                    "div",
                    section(
                        "Distribution",
                        tag("p", tag("a", "Compute statistics", href=load), class_="mt-quiet"),
                        data_load=load,
                    ),
                    _placement(a, look),
                ),
                class_="mt-grid",
            ),
        ]
    )
    path = opened.inventory.rows[place].path if rows else ()
    up = href("checkpoint", at=at, in_=[key(p) for p in path[:-1]])
    facts_ = {
        "name": a.name,
        "shape": list(a.shape),
        "dtype": a.dtype.name,
        "nbytes": a.nbytes,
        "sharding": a.sharding_text,
    }
    return Shown(a.name, body, facts_ | data, crumbs(site, opened.place, (a.name, None)), up=up)


def parameters(v: View) -> dict[str, Any]:
    """A view as the parameters of an address."""
    return {
        "rows": v.rows,
        "columns": v.columns,
        "index": ",".join(map(str, v.at)) if any(v.at) else None,
        "every": "{},{}".format(*v.steps),
    }


def _first_look(opened: Opened, a: StoredArray, view: dict[str, Any]) -> View:
    """The view that was asked for. Where no steps were, all of the array, unless that had to be fetched: then its first corner."""
    look = View.of(a.shape, **view)
    asked = any(view.get("steps") or ())
    if not asked and store.is_url(opened.ckpt.path) and cost(a, look) > _REMOTE_LIMIT:
        return View.of(a.shape, **{**view, "steps": (1, 1)})
    return look


# ----- values ---------------------------------------------------------------------------------------------------------


def _values(opened: Opened, a: StoredArray, look: View, to: Any) -> tuple[Markup, dict[str, Any]]:
    if 0 in a.shape:
        return section("Values", tag("p", "This array has no elements.", class_="mt-quiet")), {}
    try:
        seen = window(a, look)
    except (CheckpointError, OSError, IndexError) as e:
        return section("Values", notice("bad", "These values cannot be read", tag("p", visible(str(e), 600)))), {
            "error": str(e)
        }
    v, at, here = seen.view, opened.place.at, key(a.name)
    picture = heat_map(seen, href("values", at=at, name=here, **parameters(v)))
    arrows = []
    for sign, symbol, d in ((-1, "←", v.columns), (1, "→", v.columns), (-1, "↑", v.rows), (1, "↓", v.rows)):
        moved = v.moved(a.shape, d, sign) if d is not None else v
        direction = {"←": "left", "→": "right", "↑": "up", "↓": "down"}[symbol]
        arrows.append(
            tag(
                "a",
                symbol,
                href=to(moved),
                data_pan=direction,
                title=f"Move {direction}",
                aria_label=f"Move {direction}",
                class_="mt-arrow",
            )
            if moved != v
            else tag("span", symbol, class_="mt-arrow off", aria_hidden="true")
        )
    others = (
        ("closer", v.zoomed(a.shape, 0.5)),
        ("wider", v.zoomed(a.shape, 2)),
        ("whole", View.of(a.shape, v.rows, v.columns)),
    )
    zoom = [tag("a", label, href=to(other)) for label, other in others if other != v]
    thing = "element" if v.rows is None else "row"
    sampled = [
        f"every {_ordinal(k)} {what}"
        for k, what in zip(v.steps[::-1] if v.rows is None else v.steps, (thing, "column"), strict=True)
        if k > 1
    ]
    note = f"{seen.values.shape[0]} × {seen.values.shape[1]} cells, {' and '.join(sampled) or 'every element'}; {human_bytes(seen.nbytes)} read"
    body = section(
        "Values",
        picture,
        tag("p", tag("span", arrows, class_="mt-arrows"), zoom, class_="mt-zoom"),
        _dimensions(a, v, at, here),
        note=note,
        cls="mt-values",
    )
    limits = seen.limits
    return body, {
        "window": {
            "rows": v.rows,
            "columns": v.columns,
            "at": list(v.at),
            "steps": list(v.steps),
            "read": seen.nbytes,
            "limits": list(limits) if limits else None,
        }
    }


def _ordinal(n: int) -> str:
    """
    >>> [_ordinal(n) for n in (2, 3, 11, 21)]
    ['2nd', '3rd', '11th', '21st']
    """
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{ending}"


def heat_map(seen: Window, source: str | None = None) -> Markup:
    """The picture of a window, with its scale. ``source`` is where a script finds the values, for hovering."""
    numbers = seen.numbers
    limits = seen.limits
    low, high = limits if limits else (0.0, 0.0)
    rows, columns = numbers.shape
    cell = max(5, min(28, 448 // max(columns, 1), 448 // max(rows, 1) if rows > 1 else 28))
    tall = cell if rows > 1 else max(cell, 24)
    lo, hi, two_sided = png.scale(low, high)
    odd = [
        tag("span", tag("i", class_=f"mt-key odd{k}"), name)
        for k, (name, test) in enumerate((("NaN", np.isnan), ("+∞", np.isposinf), ("−∞", np.isneginf)))
        if test(numbers).any()
    ]
    image = tag(
        "img",
        src=png.data_url(png.heat(numbers, low, high)),
        width=columns * cell,
        height=rows * tall,
        alt=f"Heat map of {rows} by {columns} values from {number(low)} to {number(high)}",
        class_="mt-heat",
    )
    view = seen.view
    return join(
        [
            tag(
                "div",
                image,
                class_="mt-cells",
                data_values=source,
                data_rows=rows,
                data_columns=columns,
                tabindex=0 if source else None,
                role="group",
                aria_label="Values: arrow keys walk over them" if source else None,
            ),
            tag(
                "output",
                f"from ({', '.join(map(str, view.at))})" if view.at else "a scalar",
                class_="mt-readout",
                aria_live="polite",
            ),
            tag(
                "p",
                tag("span", number(lo)),
                tag("img", src=png.data_url(png.legend(two_sided)), width=128, height=8, alt="scale", class_="mt-heat"),
                tag("span", number(hi)),
                odd,
                class_="mt-scale",
            )
            if limits
            else tag("p", odd or "nothing finite here", class_="mt-scale"),
        ]
    )


def _dimensions(a: StoredArray, v: View, at: str, here: str) -> Markup | None:
    """Which dimensions are rows and columns, and where the others are cut."""
    if a.ndim == 0:
        return None
    names = [(str(d), f"{d} (length {n:,})") for d, n in enumerate(a.shape)][:64]

    def choose(name: str, label: str, chosen: int | None) -> Markup:
        return tag(
            "label",
            label,
            tag("select", [tag("option", t, value=d, selected=d == str(chosen)) for d, t in names], name=name),
        )

    return tag(
        "form",
        tag("input", type="hidden", name="at", value=at),
        tag("input", type="hidden", name="name", value=here),
        choose("rows", "rows", v.rows) if a.ndim > 1 else None,
        choose("columns", "columns", v.columns) if a.ndim > 1 else None,
        tag(
            "label",
            "start at",
            tag("input", name="index", value=", ".join(map(str, v.at)), size=max(8, 3 * a.ndim), autocomplete="off"),
        ),
        tag(
            "label", "every", tag("input", name="every", value=", ".join(map(str, v.steps)), size=6, autocomplete="off")
        ),
        tag("button", "Show"),
        action="array",
        method="get",
        class_="mt-filter mt-dimensions",
    )


def values(site: Site, at: str, name: str, view: dict[str, Any]) -> dict[str, Any]:
    """The values of a window as texts, with the indices of its rows and columns."""
    a = find(site.open(at), name)
    seen = window(a, View.of(a.shape, **view))
    v = seen.view
    rows, columns = seen.values.shape

    def line(d: int | None, n: int, step: int) -> list[int]:
        return [v.at[d] + k * step for k in range(n)] if d is not None else [0] * n

    return {
        "at": list(v.at),
        "rows": v.rows,
        "columns": v.columns,
        "row_index": line(v.rows, rows, v.steps[0]),
        "column_index": line(v.columns, columns, v.steps[1]),
        "values": [[_exactly(x) for x in row] for row in seen.values],
    }


def _exactly(x: Any) -> str:
    """A value with the digits that tell it from its neighbours."""
    if isinstance(x, np.floating):
        return np.format_float_positional(x, trim="-") if 1e-4 <= abs(float(x)) < 1e6 or x == 0 else str(x)
    return str(x)


# ----- statistics -----------------------------------------------------------------------------------------------------


def distribution(site: Site, at: str, name: str) -> Shown:
    """The statistics of an array, or of a sample of it."""
    opened = site.open(at)
    a = find(opened, name)
    here = key(a.name)
    job = site.jobs.find(("statistics", opened.ckpt.path, a.name))
    if job is not None and job.state == "done":
        found = job.result
    else:
        found = statistics(a, limit=_REMOTE_LIMIT if store.is_url(opened.ckpt.path) else LIMIT)
    more = None
    if job is not None and job.running:
        more = tag(
            "p",
            f"Reading all of it: {percent(job.share)}",
            class_="mt-quiet",
            data_poll=href("statistics", at=at, name=here),
        )
    elif not found.exact:
        more = tag(
            "form",
            tag("input", type="hidden", name="at", value=at),
            tag("input", type="hidden", name="name", value=here),
            tag("button", f"Read all {human_bytes(a.nbytes)}"),
            method="post",
            action="statistics",
        )
    body = section("Distribution", describe(found), more, note=found.how, id="distribution")
    trail = crumbs(site, opened.place, (a.name, href("array", at=at, name=here)), ("distribution", None))
    return Shown(f"{a.name}: distribution", body, statistics_data(found), trail, up=href("array", at=at, name=here))


def start_statistics(site: Site, at: str, name: str) -> None:
    """Begin to read all of an array."""
    opened = site.open(at)
    a = find(opened, name)

    def work(job: Any) -> None:
        job.result = statistics(a, exact=True, progress=lambda done, total: job.advance(done, total))

    site.jobs.start(("statistics", opened.ckpt.path, a.name), f"statistics of {a.name}", work)


def statistics_data(s: Statistics) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(s) | {"how": s.how, "quantiles": {str(q): v for q, v in s.quantiles.items()}}


def describe(s: Statistics) -> Markup:
    """Statistics as a histogram, quantiles and counts."""
    if s.size == 0:
        return tag("p", "This array has no elements.", class_="mt-quiet")
    bad = []
    if s.nan or s.infinite:
        counts = " and ".join(f"{n:,} {what}" for n, what in ((s.nan, "NaN"), (s.infinite, "infinite")) if n)
        bad = [notice("bad", f"{counts} of {s.seen:,} elements")]
    if s.low is None:
        return join([*bad, tag("p", "There is no finite element.", class_="mt-quiet")])
    names = {0.25: "¼", 0.5: "median", 0.75: "¾"}
    marks = [(names[q], v) for q, v in s.quantiles.items() if q in names]
    what = "magnitudes" if s.magnitudes else "values"
    return join(
        [
            *bad,
            charts.histogram(s.edges, s.counts, marks, x_name=what) if s.edges else None,
            facts(
                [
                    ("min", number(s.low)),
                    ("max", number(s.high)),
                    ("mean", number(s.mean)),
                    ("std", number(s.std)),
                    ("norm", number(s.norm)),
                    ("zeros", percent(s.zeros / s.seen)),
                    ("NaN", f"{s.nan:,}"),
                    ("infinite", f"{s.infinite:,}"),
                ]
            ),
            table(
                [f"{100 * q:g} %" if q not in names else names[q] for q in s.quantiles],
                [[number(v) for v in s.quantiles.values()]],
                numeric=range(len(s.quantiles)),
                cls="mt-quantiles",
            ),
            tag("p", "Of complex elements the magnitudes are shown.", class_="mt-quiet") if s.magnitudes else None,
        ]
    )


# ----- placement and storage ------------------------------------------------------------------------------------------


def _placement(a: StoredArray, v: View) -> Markup:
    parts = layout.blocks(a)
    if parts is None:
        text = (
            "It was saved from one process, not from a mesh."
            if not a.mesh
            else f"Saved as {a.sharding_text}: too many ranks to draw, or a placement that this version does not know."
        )
        return section("Blocks over ranks", tag("p", text, class_="mt-quiet"))
    mesh = " × ".join(f"{n}={s}" for n, s in (a.mesh or {}).items())
    copies = max(len(b.ranks) for b in parts)
    empty = sum(len(b.ranks) for b in parts if not b.box.size)
    note = f"mesh {mesh}; {count(len([b for b in parts if b.box.size]), 'distinct block')}"
    note += f", each on up to {count(copies, 'rank')}" if copies > 1 else ""
    note += f"; {count(empty, 'rank')} without elements" if empty else ""
    return section("Blocks over ranks", charts.block_map(a.shape, parts, v.rows, v.columns, v.at), note=note)


def _storage(opened: Opened, a: StoredArray, v: View, to: Any, check: bool) -> Markup:
    try:
        s = layout.stored(a)
        m = layout.chunk_map(a, v.rows, v.columns, v.at, check)
    except (CheckpointError, OSError) as e:
        return section("Storage", notice("bad", "The list of its files is damaged", tag("p", visible(str(e), 600))))
    pairs: list[tuple[str, Any]] = [("Files", f"{s.files:,}")]
    if s.nbytes is not None:
        pairs.append(("Stored", human_bytes(s.nbytes)))
    if s.place is None:
        pairs.append(("Chunk", shape_text(s.chunk)))
    if s.shard:
        pairs.append(("Shard", shape_text(s.shard)))
    body: list[Any] = [facts(pairs)]
    if s.place is not None:
        file, start, end, total = s.place
        body += [
            charts.strip(start, end, total),
            tag(
                "p", f"bytes {start:,} to {end:,} of {total:,} in ", tag("code", visible(file, 100)), class_="mt-quiet"
            ),
            tag(
                "p", "safetensors has no checksums: damage shows only where it makes values absurd.", class_="mt-quiet"
            ),
        ]
    elif m is not None and m.chunks:
        states: dict[str, int] = {}
        for c in m.chunks:
            states[c.state] = states.get(c.state, 0) + 1
        legend = [tag("span", tag("i", class_=f"mt-key {k}"), f"{n:,} {charts.STATES[k]}") for k, n in states.items()]
        bad = [c for c in m.chunks if c.state in ("damaged", "missing", "length")]
        shown = f"{len(m.chunks):,} of {count(m.total, 'chunk')} shown, as far as they cut this plane"
        body += [
            [notice("bad", f"{count(len(bad), 'chunk')} damaged", tag("p", visible(bad[0].note, 400)))]
            if bad
            else None,
            charts.chunks(
                m, v.rows, v.columns, lambda offset: to(View.of(a.shape, v.rows, v.columns, offset, v.steps))
            ),
            tag("p", legend, class_="mt-legend"),
            tag("p", shown, class_="mt-quiet"),
            tag("p", tag("a", "Read these chunks and check them", href=to(v, check=True)), class_="mt-zoom")
            if not check and m.checksums
            else None,
        ]
    return section("Storage", *body, note=s.how)
