"""One array: a window of its values, their distribution, its blocks over the ranks, its chunks and files."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import StoredArray
from ...rules.lazy_tensors import DerivedTensor
from ...stores import store
from ..model import layout
from ..model.site import Opened, Site
from ..model.slices import SliceValues, SliceView, cost, window
from ..model.statistics import LIMIT, Statistics, statistics
from ..model.text import count, human_bytes, key, number, percent, visible
from . import charts, png
from .frame import Markup, Shown, crumbs, href, mesh_text, render, shape_text
from .view_checkpoint import big

_REMOTE_LIMIT = 4 << 20  # bytes of a sample, or of a first look, that are fetched from an object store


def find(opened: Opened, name: str) -> StoredArray:
    """The array that ``name`` (see `text.key`) stands for."""
    real = opened.inventory.name_of(name)
    if real not in opened.ckpt.arrays:
        return opened.ckpt[visible(real)]  # raises, and names the nearest
    return opened.ckpt.arrays[real]


def facts_of(a: StoredArray) -> list[tuple[str, Any]]:
    return [
        ("Shape", shape_text(a.shape)),
        ("dtype", a.dtype.name),
        ("Size", human_bytes(a.nbytes)),
        ("Elements", big(math.prod(a.shape))),
        ("Sharding", visible(a.sharding_text or "", 100)),
    ]


def array(site: Site, at: str, name: str, view: dict[str, Any], check: bool = False) -> Shown:
    """The page of an array. Its statistics are a fragment of their own, as they read the most."""
    opened = site.open(at)
    a = find(opened, name)
    here, rows = key(a.name), opened.inventory.rows
    place = next((i for i, r in enumerate(rows) if r.name == a.name), 0)
    look = _first_look(opened, a, view)

    def to(v: SliceView, view: str = "array", **more: Any) -> str:
        return href(view, at=at, name=here, **parameters(v), **more)

    def beside(k: int) -> str | None:
        return href("array", at=at, name=key(rows[k].name)) if 0 <= k < len(rows) else None

    values, data = _values(a, look, to)
    body = render(
        "array.html",
        a=a,
        at=at,
        here=here,
        before=beside(place - 1),
        after=beside(place + 1),
        place=f"{place + 1:,} of {len(rows):,}",
        facts_of=facts_of(a),
        load=href("statistics", at=at, name=here),
        blocks=_placement(a, look),
        **values,
        **_storage(a, look, to, check),
    )
    up = href("checkpoint", at=at, in_=[key(p) for p in rows[place].path[:-1]] if rows else [])
    facts = {"name": a.name, "shape": list(a.shape), "dtype": a.dtype.name, "nbytes": a.nbytes}
    data = facts | {"sharding": a.sharding_text} | data
    return Shown(a.name, body, data, crumbs(site, opened.place, (a.name, None)), up=up)


def parameters(v: SliceView) -> dict[str, Any]:
    """A view as the parameters of an address."""
    index = ",".join(map(str, v.at)) if any(v.at) else None
    return {"rows": v.rows, "columns": v.columns, "index": index, "every": "{},{}".format(*v.steps)}


def _first_look(opened: Opened, a: StoredArray, view: dict[str, Any]) -> SliceView:
    """The view that was asked for; without steps all of the array, or its first corner if that is remote."""
    look = SliceView.of(a.shape, **view)
    asked = any(view.get("steps") or ())
    if not asked and store.is_url(opened.ckpt.path) and cost(a, look) > _REMOTE_LIMIT:
        return SliceView.of(a.shape, **{**view, "steps": (1, 1)})
    return look


def _values(a: StoredArray, look: SliceView, to: Callable[..., str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section of values, for the template and as data."""
    if 0 in a.shape:
        return {"seen": None, "unread": ""}, {}
    try:
        seen = window(a, look)
    except (CheckpointError, OSError, IndexError) as e:
        return {"seen": None, "unread": visible(str(e), 600)}, {"error": str(e)}
    v = seen.view
    arrows = []
    for d, ways in ((v.columns, (("←", "left", -1), ("→", "right", 1))), (v.rows, (("↑", "up", -1), ("↓", "down", 1)))):
        for symbol, way, sign in ways:
            moved = v.moved(a.shape, d, sign) if d is not None else v
            arrows.append((symbol, way, to(moved) if moved != v else None))
    zooms = {"closer": v.zoomed(a.shape, 0.5), "wider": v.zoomed(a.shape, 2)}
    zooms["whole"] = SliceView.of(a.shape, v.rows, v.columns)
    steps = list(zip(v.steps, ("row", "column"), strict=True)) if v.rows is not None else [(v.steps[1], "element")]
    every = " and ".join(f"every {_ordinal(k)} {thing}" for k, thing in steps if k > 1) or "every element"
    cells = f"{seen.values.shape[0]} × {seen.values.shape[1]} cells"
    shown = {
        "seen": seen,
        "heat": heat_map(seen, to(v, "values")),
        "note": f"{cells}, {every}; {human_bytes(seen.nbytes)} read{a.filled and f'; {a.filled}'}",
        "arrows": arrows,
        "zooms": [(label, to(other)) for label, other in zooms.items() if other != v],
    }
    facts = {"rows": v.rows, "columns": v.columns, "at": list(v.at), "steps": list(v.steps), "read": seen.nbytes}
    return shown, {"window": facts | {"limits": list(seen.limits) if seen.limits else None}}


def _ordinal(n: int) -> str:
    """
    >>> [_ordinal(n) for n in (2, 3, 11, 21)]
    ['2nd', '3rd', '11th', '21st']
    """
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{ending}"


def heat_map(seen: SliceValues, source: str | None = None) -> Markup:
    """The picture of a window, with its scale. ``source`` is where a script finds the values, for hovering."""
    numbers, limits = seen.numbers, seen.limits
    low, high = limits or (0.0, 0.0)
    rows, columns = numbers.shape
    cell = max(5, min(28, 448 // max(columns, 1), 448 // max(rows, 1) if rows > 1 else 28))
    # A picture has the proportions that it is shown in, as notebooks choose the height by the width.
    tall = 1 if rows > 1 else -(-24 // cell)
    lo, hi, two_sided = png.scale(low, high)
    odd = zip(("NaN", "+∞", "−∞"), (np.isnan, np.isposinf, np.isneginf), strict=True)
    return render(
        "heat.html",
        rows=rows,
        columns=columns,
        width=columns * cell,
        height=rows * tall * cell,
        source=source,
        picture=png.data_url(png.heat(np.repeat(numbers, tall, 0), low, high)),
        alt=f"Heat map of {rows} by {columns} values from {number(low)} to {number(high)}",
        readout=f"from ({', '.join(map(str, seen.view.at))})" if seen.view.at else "a scalar",
        scale=(number(lo), png.data_url(png.legend(two_sided)), number(hi)) if limits else None,
        odd=[(k, name) for k, (name, test) in enumerate(odd) if test(numbers).any()],
    )


def values(site: Site, at: str, name: str, view: dict[str, Any]) -> Shown:
    """The values of a window as texts, with the indices of its rows and columns."""
    a = find(site.open(at), name)
    seen = window(a, SliceView.of(a.shape, **view))
    v = seen.view
    rows, columns = seen.values.shape

    def line(d: int | None, n: int, step: int) -> list[int]:
        return [v.at[d] + k * step for k in range(n)] if d is not None else [0] * n

    index = {"row_index": line(v.rows, rows, v.steps[0]), "column_index": line(v.columns, columns, v.steps[1])}
    values = [[_exactly(x) for x in row] for row in seen.values]
    return Shown("", data={"at": list(v.at), "rows": v.rows, "columns": v.columns, **index, "values": values})


def _exactly(x: Any) -> str:
    """A value with the digits that tell it from its neighbours."""
    if isinstance(x, np.floating):
        return np.format_float_positional(x, trim="-") if 1e-4 <= abs(float(x)) < 1e6 or x == 0 else str(x)
    return str(x)


def distribution(site: Site, at: str, name: str) -> Shown:
    """The statistics of an array, or of a sample of it."""
    opened = site.open(at)
    a = find(opened, name)
    here = href("array", at=at, name=key(a.name))
    job = site.jobs.find(("statistics", opened.ckpt.path, a.name))
    limit = _REMOTE_LIMIT if store.is_url(opened.ckpt.path) else LIMIT
    found = job.result if job is not None and job.state == "done" else statistics(a, limit=limit)
    body = render(
        "distribution.html",
        s=found,
        **_described(found),
        job=job if job is not None and job.running else None,
        poll=href("statistics", at=at, name=key(a.name)),
        fields={"at": at, "name": key(a.name)},
        nbytes=a.nbytes,
    )
    data = dataclasses.asdict(found) | {"how": found.how, "quantiles": {str(q): v for q, v in found.quantiles.items()}}
    trail = crumbs(site, opened.place, (a.name, here), ("distribution", None))
    return Shown(f"{a.name}: distribution", body, data, trail, up=here)


def start_statistics(site: Site, at: str, name: str) -> None:
    """Begin to read all of an array."""
    opened = site.open(at)
    a = find(opened, name)

    def work(job: Any) -> None:
        job.result = statistics(a, exact=True, progress=job.advance)

    site.jobs.start(("statistics", opened.ckpt.path, a.name), work)


def _described(s: Statistics) -> dict[str, Any]:
    """Statistics as a histogram, facts and quantiles."""
    names = {0.25: "¼", 0.5: "median", 0.75: "¾"}
    marks = [(names[q], v) for q, v in s.quantiles.items() if q in names]
    kind = "magnitudes" if s.magnitudes else "values"
    facts = [("min", number(s.low)), ("max", number(s.high))]
    facts += [(k, number(getattr(s, k))) for k in ("mean", "std", "norm")]
    facts += [("zeros", percent(s.zeros / max(s.seen, 1))), ("NaN", f"{s.nan:,}"), ("infinite", f"{s.infinite:,}")]
    return {
        "bad": " and ".join(f"{n:,} {what}" for n, what in ((s.nan, "NaN"), (s.infinite, "infinite")) if n),
        "histogram": charts.histogram(s.edges, s.counts, marks, x_name=kind) if s.edges else "",
        "facts_of": facts,
        "quantiles": {names.get(q, f"{100 * q:g} %"): number(v) for q, v in s.quantiles.items()},
    }


def _placement(a: StoredArray, v: SliceView) -> dict[str, Any]:
    parts = layout.blocks(a)
    if parts is None:
        text = f"Saved as {a.sharding_text}: too many ranks to draw, or a placement that this version does not know."
        if not a.mesh:
            how = "is computed when it is read" if isinstance(a.tensor, DerivedTensor) else "was saved from one process"
            text = f"It {how}, not from a mesh."
        return {"picture": "", "note": None, "text": text}
    copies = max(len(b.ranks) for b in parts)
    empty = sum(len(b.ranks) for b in parts if not b.box.size)
    note = f"mesh {mesh_text(a.mesh or {})}; {count(sum(bool(b.box.size) for b in parts), 'distinct block')}"
    note += f", each on up to {count(copies, 'rank')}" if copies > 1 else ""
    note += f"; {count(empty, 'rank')} without elements" if empty else ""
    return {"picture": charts.block_map(a.shape, parts, v.rows, v.columns, v.at), "note": note}


def _storage(a: StoredArray, v: SliceView, to: Callable[..., str], check: bool) -> dict[str, Any]:
    """The section of storage: facts, the place in a file or a map of chunks with the states of them."""
    try:
        s = layout.stored(a)
        m = layout.chunk_map(a, v.rows, v.columns, v.at, check)
    except (CheckpointError, OSError) as e:
        return {"stored": None, "damage": visible(str(e), 600)}
    facts = [("Files", f"{s.files:,}"), ("Stored", None if s.nbytes is None else human_bytes(s.nbytes))]
    facts += [("Chunk", None if s.place else shape_text(s.chunk)), ("Shard", shape_text(s.shard) if s.shard else None)]
    shown: dict[str, Any] = {"stored": s, "storage_facts": facts, "chunks": None}
    if s.place is None and m is not None and m.chunks:

        def link(offset: tuple[int, ...]) -> str:
            return to(SliceView.of(a.shape, v.rows, v.columns, offset, v.steps))

        bad = [c for c in m.chunks if c.state in ("damaged", "missing", "length")]
        shown["chunks"] = {
            "map": charts.chunks(m, link),
            "legend": [(k, f"{n:,} {charts.STATES[k]}") for k, n in Counter(c.state for c in m.chunks).items()],
            "bad": (f"{count(len(bad), 'chunk')} damaged", visible(bad[0].note, 400)) if bad else None,
            "shown": f"{len(m.chunks):,} of {count(m.total, 'chunk')} shown, as far as they cut this plane",
            "check": to(v, check=True) if not check and m.checksums else None,
        }
    return shown
