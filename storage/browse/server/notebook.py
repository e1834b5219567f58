"""Fragments of the browser for a notebook, with their style, without links and without a server. Charts are
pictures."""

from __future__ import annotations

import math
from typing import Any

from ....arrays.core.errors import CheckpointError
from ...checkpoint.checkpoint import Checkpoint, StoredArray
from ...checkpoint.numbered import Direction
from ..model import layout
from ..model.inventory import ArrayRow, Inventory, NameGroup
from ..model.runs import READ, history
from ..model.site import Opened, SitePlace
from ..model.slices import SliceView, window
from ..model.text import human_bytes
from ..views import charts
from ..views.frame import Markup, asset, render
from ..views.view_array import facts_of, heat_map
from ..views.view_checkpoint import head
from ..views.view_places import metric_curve

_ROWS = 40
_BUDGET = 4 << 20  # bytes that showing an array may read


def _embedded(**parts: Any) -> str:
    empty = dict.fromkeys(("head", "title", "facts_of", "picture", "rows", "sections", "steps"))
    return str(render("notebook.html", style=Markup(asset("browse.css").decode()), **empty | parts))


def checkpoint_html(ckpt: Checkpoint) -> str:
    """An opened checkpoint: totals, the map of its bytes, and its arrays. Reads nothing more from files."""
    held = Inventory(ckpt)
    opened = Opened(SitePlace("", ckpt.path, ckpt.path.rstrip("/").rpartition("/")[2] or ckpt.path), ckpt, held, 0.0)
    rows: list[tuple[int, NameGroup | ArrayRow]] = []
    left = 0

    def add(group: NameGroup, depth: int) -> None:
        nonlocal left
        for c in group.children():
            if len(rows) >= _ROWS:
                left += c.arrays
                continue
            rows.append((min(depth, 12), c))
            # A group that does not fit whole is shown folded, unless it is all there is.
            alone = len(group.groups) + len(group.rows) == 1
            if isinstance(c, NameGroup) and (alone or c.arrays + len(c.groups) <= _ROWS - len(rows)):
                add(c, depth + 1)

    add(held.tree, 0)
    picture = charts.bytes_map(held.tree, None, 900, 320).image()
    return _embedded(head=head(opened), picture=picture, rows=rows, arrays=len(held.rows), left=left)


def array_html(a: StoredArray) -> str:
    """An array of a checkpoint: its facts, a window of its values, its blocks. Reads at most a few megabytes."""
    view = SliceView.of(a.shape)
    sections: list[tuple[str, Any, str | None]] = []
    if math.prod(a.shape):
        try:
            seen = window(a, view, _BUDGET)
            sections.append(("Values", heat_map(seen), f"{human_bytes(seen.nbytes)} read"))
        except (CheckpointError, OSError, IndexError) as e:
            sections.append(("Values", f"{type(e).__name__}: {e}"[:400], "they cannot be read"))
    blocks = layout.blocks(a)
    if blocks is not None:
        picture = charts.block_map(a.shape, blocks, view.rows, view.columns, view.at, height=140).image()
        sections.append(("Blocks over ranks", picture, None))
    return _embedded(title=a.name, facts_of=facts_of(a), sections=sections)


def run_html(directory: str, metric: str = "", best_is: Direction = "") -> str:
    """The directory of a manager: its steps and the curve of its metric."""
    r = history(directory, metric, best_is, READ)
    sections = [(r.metric, metric_curve(r, 720).image(), None)] if len(r.curve(r.metric)) > 1 else []
    return _embedded(title=directory, facts_of=r.facts, sections=sections, run=r, steps=r.steps[: -_ROWS - 1 : -1])
