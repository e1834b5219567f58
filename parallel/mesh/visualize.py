"""Pictures of the blocks of each rank: text, the same in colours for terminals, HTML for notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ...arrays.core.array import Array
from ...arrays.core.formatting import DRAWINGS
from ..sharding.mesh_protocol import MeshProtocol
from ..sharding.placement import Sharding, make_layout
from .block_grid import BlockGrid, Slab, Span, colour_of, grid_of, ranks_text

MOST_ROWS, MOST_SLABS, MOST_CELLS = 16, 6, 64
"""Rows of a table of text, tables, and rows and columns of a picture that are drawn; of more the first ones and the
last one."""

_Piece = tuple[str, int | None]
"""Text, and the rank whose colour it has."""


class Drawing(str):
    """A drawing: a text, which ``rich`` prints in colours and a notebook shows as a picture."""

    __slots__ = ("_html", "_lines")
    _html: str
    _lines: list[list[_Piece]]

    def __rich__(self) -> Any:
        """The text with each block in the colour of the first rank that holds it; ``rich`` asks for it."""
        from rich.text import Text

        out = Text(no_wrap=True)
        for i, line in enumerate(self._lines):
            out.append("\n" if i else "")
            for text, rank in line:
                out.append(text, style="" if rank is None else f"black on {colour_of(rank)}")
        return out

    def _repr_html_(self) -> str:
        return self._html or f"<pre>{escape(self)}</pre>"


def visualize(x: Array, *, width: int = 100) -> Drawing:
    """A drawing of an array's blocks, each with the ranks that hold it.

    Parameters
    ----------
    x
        Any array. Nothing is computed.
    width
        Characters that a line may have. Wider tables are drawn with numbers alone, and then with their middle left out.

    Returns
    -------
    Drawing
        A text. ``rich.print`` shows it in colours, one for each rank; as the value of a notebook's cell it is a
        picture. Rows and columns are those of the last two dimensions; where dimensions before them are split, each of
        their places has a table.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 2})
    >>> print(mt.visualize(mt.distribute(mt.zeros((4, 6)), mesh, data=mt.Shard(0), model=mt.Shard(1))))
    float64[4@data,6@model]  2×2 ranks
    ┌────────┬────────┐
    │ rank 0 │ rank 1 │
    ├────────┼────────┤
    │ rank 2 │ rank 3 │
    └────────┴────────┘
    >>> print(mt.visualize(mt.distribute(mt.zeros(100), mt.Mesh({"data": 64}), data=mt.Shard(0)), width=50))
    float64[100@data]  64 ranks
    ┌───┬───┬───┬───┬───┬───┬───┬───┬───┬───┬───┬────┐
    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │ 8 │ 9 │ … │ 49 │
    └───┴───┴───┴───┴───┴───┴───┴───┴───┴───┴───┴────┘
    dimension 0 in blocks of 2 (50 times), 0 (14 times)
    no elements on ranks 50-63
    """
    sharding: Any = x.sharding
    if sharding is None:
        lines: list[list[_Piece]] = [[(f"{x.dtype.name}[{','.join(map(str, x.shape))}]  on {x.device}", None)]]
        html = ""
    else:
        head = f"{sharding.text(x.shape, x.dtype)}  {'×'.join(map(str, sharding.mesh.sizes))} ranks"
        lines = [[(head, None)], *_drawn(grid_of(x.shape, sharding), width)]
        html = blocks_html(x.shape, sharding)
    out = Drawing("\n".join("".join(text for text, _ in line) for line in lines))
    out._lines, out._html = lines, html
    return out


# ----- text -----------------------------------------------------------------------------------------------------------


def _drawn(grid: BlockGrid, width: int) -> Iterator[list[_Piece]]:
    shown = _ends(len(grid.slabs), MOST_SLABS)
    for k in shown:
        if k is None:
            yield [(f"… {len(grid.slabs) - len(shown) + 1} more places", None)]
            continue
        if grid.slabs[k].place:
            yield [(grid.slabs[k].place, None)]
        yield from _table(grid.slabs[k], width)
    for note in grid.notes:
        yield [(note, None)]


def _table(slab: Slab, width: int) -> Iterator[list[_Piece]]:
    rows = _ends(len(slab.rows), MOST_ROWS)
    columns: Sequence[int | None] = range(len(slab.columns))

    def text(ranks: tuple[int, ...], words: bool) -> str:
        return (f"rank{'s' if len(ranks) > 1 else ''} " if words else "") + ranks_text(ranks)

    def widths(words: bool) -> list[int]:
        return [3 if j is None else max(len(text(row[j], words)) for row in slab.ranks) + 2 for j in columns]

    words = True
    size = widths(words)
    if sum(size) + len(size) + 1 > width:
        words = False
        size = widths(words)
    keep = len(slab.columns)
    while sum(size) + len(size) + 1 > width and keep > 2:
        keep -= 1
        columns = _ends(len(slab.columns), keep)
        size = widths(words)

    def line(left: str, middle: str, right: str) -> list[_Piece]:
        return [(left + middle.join("─" * w for w in size) + right, None)]

    yield line("┌", "┬", "┐")
    for n, i in enumerate(rows):
        cells: list[_Piece] = [("│", None)]
        for j, w in zip(columns, size, strict=True):
            ranks = () if i is None or j is None else slab.ranks[i][j]
            cells += [((text(ranks, words) if ranks else "…").center(w), ranks[0] if ranks else None), ("│", None)]
        yield cells
        if n + 1 == len(rows):
            yield line("└", "┴", "┘")
        elif len(rows) <= 8:
            yield line("├", "┼", "┤")


def _ends(n: int, most: int) -> list[int | None]:
    """Numbers from 0 to ``n`` - 1; of more than ``most`` the first ones and the last one, with None for those
    between."""
    return list(range(n)) if n <= most else [*range(max(most - 2, 1)), None, n - 1]


# ----- HTML -----------------------------------------------------------------------------------------------------------


def blocks_html(
    shape: tuple[int, ...], sharding: Sharding, width: int = 280, height: int = 140, caption: str | None = None
) -> str:
    """The same as inline pictures (SVG) in the array's proportions; empty for an array without elements."""
    grid = grid_of(shape, sharding)
    if not grid.slabs:
        return ""
    shown = _ends(len(grid.slabs), MOST_SLABS)
    pictures = []
    for k in shown:
        if k is None:
            pictures.append(f'<div style="align-self:center">… {len(grid.slabs) - len(shown) + 1} more …</div>')
            continue
        slab = grid.slabs[k]
        label = f'<div style="font-size:smaller">{escape(slab.place)}</div>' if slab.place else ""
        pictures.append(f"<div>{label}{_svg(slab, shape, width, height)}</div>")
    if caption is None:
        placements = ", ".join(f"{n}={p!r}" for n, p in sharding.placements.items())
        caption = f"ranks of {sharding.mesh}: {placements}"
    captions = [caption, *grid.notes]
    return (
        f'<figure style="margin:4px 0"><div style="display:flex;flex-wrap:wrap;gap:8px">{"".join(pictures)}</div>'
        f'<figcaption style="font-size:smaller">{"<br>".join(map(escape, captions))}</figcaption></figure>'
    )


def sharding_html(sharding: Sharding) -> str:
    """A sharding without an array: blocks of one element each, along every dimension that it splits."""
    sizes = sharding.mesh.sizes
    # A dimension that is counted from the end stands after those that are counted from the start.
    shards = sorted(sharding.layout.shards, key=lambda s: (s[0] < 0, s[0]))
    ahead = [d for d, _ in shards if d >= 0]
    behind = [d for d, _ in shards if d < 0]
    ndim = (max(ahead) + 1 if ahead else 0) - (min(behind) if behind else 0)
    layout = make_layout({d % ndim: axes for d, axes in shards}, dict(sharding.layout.partials))
    shape = tuple(math.prod(sizes[a] for a in layout.axes_of(d)) for d in range(ndim))
    placements = ", ".join(f"{n}={p!r}" for n, p in sharding.placements.items())
    split = ", ".join(f"dimension {d} in {math.prod(sizes[a] for a in axes)}" for d, axes in shards)
    text = f"ranks of {sharding.mesh}: {placements}; {f'splits {split}' if split else 'splits no dimension'}"
    return blocks_html(shape, Sharding.of(sharding.mesh, layout), caption=text)


DRAWINGS["sharding"] = sharding_html


def mesh_html(mesh: MeshProtocol) -> str:
    """The ranks of a mesh as a table: the last axis runs along its columns, those before it along its rows."""
    if not mesh.sizes:
        return blocks_html((), Sharding(mesh), caption=f"{mesh}: 1 rank")
    *outer, last = range(len(mesh.sizes))
    layout = make_layout({0: outer, 1: [last]} if outer else {0: [last]})
    rows = math.prod(mesh.sizes[:-1])
    over = f"; rows: {' × '.join(mesh.names[:-1])}, columns: {mesh.names[-1]}" if outer else f" along {mesh.names[-1]}"
    text = f"{mesh}: {mesh.size:,} rank{'s' if mesh.size > 1 else ''}{over}"
    return blocks_html((rows, mesh.sizes[-1]) if outer else (mesh.size,), Sharding.of(mesh, layout), caption=text)


def _svg(slab: Slab, shape: tuple[int, ...], width: int, height: int) -> str:
    if len(shape) < 2:
        height //= 3
    rows, columns = _ends(len(slab.rows), MOST_CELLS), _ends(len(slab.columns), MOST_CELLS)
    ys = _places(slab.rows, rows, shape[-2] if len(shape) > 1 else 1, height)
    xs = _places(slab.columns, columns, shape[-1] if shape else 1, width)
    longest = max(len(ranks_text(cell)) for row in slab.ranks for cell in row)
    size = min(11.0, 0.8 * min(n for _, n in ys), min(n for _, n in xs) / (0.62 * longest))
    parts = []
    for i, (y, bh) in zip(rows, ys, strict=True):
        for j, (x, bw) in zip(columns, xs, strict=True):
            if i is None or j is None:
                continue
            ranks = slab.ranks[i][j]
            label = ranks_text(ranks)
            title = f"ranks {label}: {_block_text(slab.rows[i], slab.columns[j], len(shape))}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bw:.1f}" height="{bh:.1f}" fill="{colour_of(ranks[0])}" '
                f'stroke="#555" stroke-width="{min(1.0, bw / 8, bh / 8):.2f}"><title>{escape(title)}</title></rect>'
            )
            if size >= 5:  # unreadable labels are in the title alone
                parts.append(
                    f'<text x="{x + bw / 2:.1f}" y="{y + bh / 2 + size * 0.36:.1f}" font-size="{size:.1f}" '
                    f'text-anchor="middle" fill="#222" pointer-events="none">{escape(label)}</text>'
                )
    return (
        f'<svg width="{width + 2}" height="{height + 2}" viewBox="-1 -1 {width + 2} {height + 2}" role="img" '
        f'aria-label="blocks by rank">{"".join(parts)}</svg>'
    )


def _places(spans: Sequence[Span], shown: Sequence[int | None], n: int, length: int) -> list[tuple[float, float]]:
    """Where each row or column starts in a picture of this length, and how long it is: as in the array, or, where some
    are left out, all alike."""
    if len(shown) == len(spans):
        return [(a / n * length, (b - a) / n * length) for a, b in spans]
    return [(k * length / len(shown), length / len(shown)) for k in range(len(shown))]


def _block_text(row: Span, column: Span, ndim: int) -> str:
    spans = [f"{a}:{b}" for a, b in ((row, column) if ndim > 1 else (column,))]
    return f"[{', '.join(['…'] * (ndim > 2) + spans)}]" if ndim else "[]"
