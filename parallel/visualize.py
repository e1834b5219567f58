"""Pictures of who holds what: text for terminals, HTML for notebooks."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from ..arrays._array import Array
from ..arrays.blocks import Box
from .placement import Sharding

# Tints of one colour, neighbours apart: the page of a checkpoint draws its blocks in the same ones.
_COLOURS = ("#ddebed", "#a5cfd4", "#eef4f5", "#c5dfe2", "#7cb8bf", "#ddebed", "#a5cfd4", "#eef4f5")


def _holders(shape: tuple[int, ...], sharding: Sharding) -> dict[Box, list[int]]:
    out: dict[Box, list[int]] = {}
    for rank in range(sharding.mesh.size):
        out.setdefault(sharding.box(shape, rank), []).append(rank)
    return out


def _rank_text(ranks: list[int]) -> str:
    """``0-3, 6`` for many, in order."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _plane(box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns (start, stop) of a block as drawn: the last two dimensions; a vector is one row."""
    rows = (box.offset[-2], box.stop[-2]) if len(box.shape) > 1 else (0, 1)
    cols = (box.offset[-1], box.stop[-1]) if box.shape else (0, 1)
    return rows, cols


def visualize(x: Array) -> str:
    """A drawing of an array's blocks, each with the ranks that hold it. More than two dimensions show their last two.

    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 2})
    >>> print(mt.visualize(mt.distribute(mt.zeros((4, 6)), mesh, data=mt.Shard(0), model=mt.Shard(1))))
    float64[4@data,6@model]  2×2 ranks
    ┌────────┬────────┐
    │ rank 0 │ rank 1 │
    ├────────┼────────┤
    │ rank 2 │ rank 3 │
    └────────┴────────┘
    """
    sharding: Any = x.sharding
    if sharding is None:
        return f"{x.dtype.name}[{','.join(map(str, x.shape))}]  on {x.device}"
    head = f"{sharding.text(x.shape, x.dtype)}  {'×'.join(map(str, sharding.mesh.sizes))} ranks"
    cells: dict[tuple[tuple[int, int], tuple[int, int]], set[int]] = {}
    for box, ranks in _holders(x.shape, sharding).items():
        if box.size or not math.prod(x.shape):
            cells.setdefault(_plane(box), set()).update(ranks)
    rows = sorted({r for r, _ in cells})
    cols = sorted({c for _, c in cells})
    texts = [
        [
            f"rank{'s' if len(cells.get((r, c), ())) != 1 else ''} {_rank_text(list(cells.get((r, c), ())))}"
            for c in cols
        ]
        for r in rows
    ]
    widths = [max(len(t[j]) for t in texts) + 2 for j in range(len(cols))]

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * w for w in widths) + right

    body = [line("┌", "┬", "┐")]
    for i, row in enumerate(texts):
        body.append("│" + "│".join(t.center(w) for t, w in zip(row, widths, strict=True)) + "│")
        body.append(line("├", "┼", "┤") if i + 1 < len(texts) else line("└", "┴", "┘"))
    idle = [r for b, ranks in _holders(x.shape, sharding).items() if not b.size for r in ranks]
    note = (
        [f"no elements on rank{'s' if len(idle) > 1 else ''} {_rank_text(idle)}"] if idle and math.prod(x.shape) else []
    )
    return "\n".join([head, *body, *note])


def blocks_html(shape: tuple[int, ...], sharding: Sharding, width: int = 280, height: int = 140) -> str:
    """The same as an inline picture (SVG), coloured by the first rank that holds a block."""
    h = shape[-2] if len(shape) > 1 else 1
    w = shape[-1] if shape else 1
    if not h or not w:
        return ""
    parts = []
    seen: set[tuple[tuple[int, int], tuple[int, int]]] = set()
    for box, ranks in _holders(shape, sharding).items():
        place = _plane(box)
        if not box.size or place in seen:
            continue
        seen.add(place)
        (r0, r1), (c0, c1) = place
        x, y = c0 / w * width, r0 / h * height
        bw, bh = (c1 - c0) / w * width, (r1 - r0) / h * height
        label = escape(_rank_text(ranks))
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{bw:.1f}" height="{bh:.1f}" fill="{_COLOURS[ranks[0] % len(_COLOURS)]}" '
            f'stroke="#333"><title>ranks {label}: {box.shape} at {box.offset}</title></rect>'
            f'<text x="{x + bw / 2:.1f}" y="{y + bh / 2 + 4:.1f}" font-size="11" text-anchor="middle" fill="#222">{label}</text>'
        )
    text = escape(", ".join(f"{n}={p!r}" for n, p in sharding.placements.items()))
    return (
        f'<figure style="margin:4px 0"><svg width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}" '
        f'role="img" aria-label="blocks by rank">{"".join(parts)}</svg><figcaption style="font-size:smaller">'
        f"ranks of {escape(str(sharding.mesh))}: {text}</figcaption></figure>"
    )
