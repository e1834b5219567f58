"""Fragments of the browser for a notebook, with their style, without links and without a server."""

from __future__ import annotations

import math
from typing import Literal

from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import Checkpoint, StoredArray
from ..model import layout
from ..model.inventory import Group, Inventory, Row
from ..model.runs import history
from ..model.site import Opened, Place
from ..model.slices import View, window
from ..model.text import count, human_bytes, number, visible
from ..views import charts
from ..views.frame import asset, facts, section, shape_text, table
from ..views.html import Markup, join, tag
from ..views.view_array import heat_map
from ..views.view_checkpoint import head

_ROWS = 40
_BUDGET = 4 << 20  # bytes that showing an array may read


def _embedded(*children: object) -> str:
    style = Markup(f"<style>{asset('browse.css').decode()}</style>")
    return str(tag("div", style, *children, class_="mt mt-embed"))


def checkpoint_html(ckpt: Checkpoint) -> str:
    """An opened checkpoint: totals, the map of its bytes, and its arrays. Reads nothing more from files."""
    held = Inventory(ckpt)
    opened = Opened(Place("", ckpt.path, ckpt.path.rstrip("/").rpartition("/")[2] or ckpt.path), ckpt, held, 0.0)
    rows: list[tuple[Markup, str, str, str, str]] = []
    left = 0

    def add(group: Group, depth: int) -> None:
        nonlocal left
        for c in group.children():
            if len(rows) >= _ROWS:
                left += c.arrays if isinstance(c, Group) else 1
            elif isinstance(c, Row):
                name = tag("span", visible(c.path[-1], 80) or "(empty)")
                rows.append(
                    (
                        _indented(name, depth),
                        c.dtype,
                        shape_text(c.shape),
                        visible(c.sharding or "", 60),
                        human_bytes(c.nbytes),
                    )
                )
            else:
                name = tag("strong", visible(c.label, 80) or "(empty)")
                rows.append((_indented(name, depth), count(c.arrays, "array"), "", "", human_bytes(c.nbytes)))
                # A group that does not fit whole is shown folded, unless it is all there is.
                if c.arrays + len(c.groups) <= _ROWS - len(rows) or len(group.groups) + len(group.rows) == 1:
                    add(c, depth + 1)

    add(held.tree, 0)
    more = tag("p", f"… and {count(left, 'array')} more", class_="mt-quiet") if left else None
    return _embedded(
        head(opened),
        tag("details", tag("summary", "Where the bytes are"), charts.bytes_map(held.tree, None, 900, 320))
        if held.nbytes
        else None,
        tag(
            "details",
            tag("summary", count(len(held.rows), "array")),
            table(("Name", "dtype", "Shape", "Sharding", "Size"), rows, numeric=(4,)),
            more,
            open=len(rows) <= 24,
        ),
        tag("p", "ckpt.browse() shows values, distributions, chunks and health.", class_="mt-quiet"),
    )


def _indented(name: Markup, depth: int) -> Markup:
    return join([[tag("i", class_="mt-in") for _ in range(min(depth, 12))], name])


def array_html(a: StoredArray) -> str:
    """An array of a checkpoint: its facts, a window of its values, its blocks. Reads at most a few megabytes."""
    view = View.of(a.shape)
    parts: list[object] = [
        tag("h1", visible(a.name, 160) or "(empty)", class_="mt-mono"),
        facts(
            [
                ("Shape", shape_text(a.shape)),
                ("dtype", a.dtype.name),
                ("Size", human_bytes(a.nbytes)),
                ("Sharding", visible(a.sharding_text, 100) if a.sharding_text else None),
            ]
        ),
    ]
    if math.prod(a.shape):
        try:
            seen = window(a, view, _BUDGET)
            parts.append(section("Values", heat_map(seen), note=f"{human_bytes(seen.nbytes)} read"))
        except (CheckpointError, OSError, IndexError) as e:
            parts.append(tag("p", visible(f"{type(e).__name__}: {e}", 400), class_="mt-wrong"))
    blocks = layout.blocks(a)
    if blocks is not None:
        parts.append(
            section(
                "Blocks over ranks", charts.block_map(a.shape, blocks, view.rows, view.columns, view.at, height=140)
            )
        )
    return _embedded(*parts)


def run_html(directory: str, metric: str = "", best_is: Literal["lowest", "highest"] = "lowest") -> str:
    """The directory of a manager: its steps and the curve of its metric."""
    r = history(directory, metric, best_is)
    best, latest = r.best, r.latest
    points = r.curve(r.metric) if r.metric else []
    marks = [(float(best.step), best.metric(r.metric) or 0.0, f"best: {r.best_is}")] if best else []
    rows = [
        (
            f"{s.step:,}",
            human_bytes(s.nbytes) if not s.note else visible(s.note, 80),
            *[number(s.metric(m)) for m in r.metrics[:6]],
            ", ".join(w for w, m in (("latest", latest), ("best", best)) if m is s),
        )
        for s in reversed(r.steps[-_ROWS:])
    ]
    return _embedded(
        tag("h1", visible(directory, 200)),
        facts(
            [
                ("Complete", f"{len(r.complete):,}"),
                ("Latest", f"step {latest.step:,}" if latest else None),
                ("Best", f"step {best.step:,}" if best else None),
                ("Size", human_bytes(sum(s.nbytes for s in r.complete))),
            ]
        ),
        section(
            visible(r.metric, 60), charts.curve([(float(x), y) for x, y in points], marks, width=720, label=r.metric)
        )
        if len(points) > 1
        else None,
        section(
            "Checkpoints",
            table(
                ("Step", "Size", *(visible(m, 24) for m in r.metrics[:6]), ""),
                rows,
                numeric=range(1, 2 + len(r.metrics[:6])),
            ),
        )
        if rows
        else None,
    )
