"""Charts as SVG: histogram, curve, treemap, blocks over ranks, map of chunks. Colours come from the style sheet, by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..model.inventory import Group, Row
from ..model.layout import Block, ChunkMap
from ..model.text import count, human_bytes, number, visible
from .html import Markup, join, tag
from .treemap import Tile, treemap

Link = Callable[..., str]
SHADES = 8  # classes s0 … s7
WIDE = 480  # from this width on a chart's letters would be too small on a telephone, where it is moved sideways instead


def _svg(width: float, height: float, *children: object, label: str, cls: str = "") -> Markup:
    drawn = tag(
        "svg",
        tag("title", label),
        *children,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        class_=f"mt-svg {cls}".strip(),
        width=f"{width:g}",
        height=f"{height:g}",
    )
    return tag("div", drawn, class_="mt-chart") if width >= WIDE else drawn


def _ticks(low: float, high: float, n: int = 5) -> list[float]:
    """Round numbers within a range.

    >>> _ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    raw = span / n
    unit = 10.0 ** math.floor(math.log10(raw)) if raw else 0.0
    if not unit:  # no round number is as small
        return [low, high]
    step = next((m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999), 10 * unit)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) if abs(step) > 1e-9 else k * step for k in range(first, int(high / step + 1e-9) + 1)][
        :12
    ]


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    marks: Sequence[tuple[str, float]] = (),
    width: int = 560,
    height: int = 190,
    x_name: str = "value",
) -> Markup:
    """Bars for counts, with marks (such as quantiles) as lines. Each bar says its range and count."""
    left, bottom, top = 8, 26, 16
    w, h = width - 2 * left, height - bottom - top
    low, high = edges[0], edges[-1]
    most = max(counts) or 1
    step = w / len(counts)
    total = sum(counts)

    def x(v: float) -> float:
        return left + w * (v / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else left

    bars = [
        tag(
            "rect",
            tag("title", f"{number(a)} … {number(b)}: {n:,} ({100 * n / total:.1f} %)"),
            x=left + i * step + 0.5,
            y=top + h * (1 - n / most),
            width=max(step - 1, 0.5),
            height=max(h * n / most, 0.0 if n == 0 else 1.0),
            class_="mt-bar",
        )
        for i, (a, b, n) in enumerate(zip(edges, edges[1:], counts, strict=False))
    ]
    axis = [
        join(
            [
                tag("line", x1=x(t), x2=x(t), y1=top + h, y2=top + h + 4, class_="mt-axis"),
                tag("text", number(t), x=x(t), y=top + h + 17, text_anchor="middle", class_="mt-tick"),
            ]
        )
        for t in _ticks(low, high, 6)
        if left + 8 <= x(t) <= width - left - 8
    ]
    lines = [
        tag("line", tag("title", f"{name}: {number(v)}"), x1=x(v), x2=x(v), y1=top - 6, y2=top + h, class_="mt-mark")
        for name, v in marks
        if low <= v <= high
    ]
    return _svg(
        width,
        height,
        bars,
        tag("line", x1=left, x2=width - left, y1=top + h, y2=top + h, class_="mt-axis"),
        axis,
        lines,
        label=f"Histogram of {x_name}, {len(counts)} bins from {number(low)} to {number(high)}",
        cls="mt-histogram",
    )


def curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float, str]] = (),
    width: int = 560,
    height: int = 190,
    label: str = "curve",
    hrefs: Sequence[str | None] = (),
    dots: bool = True,
) -> Markup:
    """A line through points, with marked ones named. Values that are not finite leave a gap."""
    left, right, bottom, top = 54, 24, 26, 14
    w, h = width - left - right, height - bottom - top
    finite = [(a, b) for a, b in points if math.isfinite(b)]
    if not finite:
        return tag("p", "No finite values to draw.", class_="mt-quiet")
    x0, x1 = min(p[0] for p in finite), max(p[0] for p in finite)
    y0, y1 = min(p[1] for p in finite), max(p[1] for p in finite)
    if y0 == y1:
        y0, y1 = y0 - max(abs(y0) * 0.1, 0.5), y1 + max(abs(y1) * 0.1, 0.5)

    def x(v: float) -> float:
        return left + (w * (v - x0) / (x1 - x0) if x1 > x0 else w / 2)

    def y(v: float) -> float:
        return top + h * (1 - (v / 2 - y0 / 2) / (y1 / 2 - y0 / 2))

    runs: list[list[tuple[float, float]]] = [[]]
    for a, b in points:
        if math.isfinite(b):
            runs[-1].append((a, b))
        elif runs[-1]:
            runs.append([])
    grid = [
        join(
            [
                tag("line", x1=left, x2=width - right, y1=y(t), y2=y(t), class_="mt-grid"),
                tag("text", number(t), x=left - 6, y=y(t) + 3.5, text_anchor="end", class_="mt-tick"),
            ]
        )
        for t in _ticks(y0, y1, 4)
    ]
    below = [
        tag("text", number(int(t) if t == int(t) else t), x=x(t), y=height - 8, text_anchor="middle", class_="mt-tick")
        for t in _ticks(x0, x1, 6)
        if left <= x(t) <= width - right
    ]
    lines = [
        tag("polyline", points=" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in run), class_="mt-line")
        for run in runs
        if len(run) > 1
    ]
    named = {(a, b): name for a, b, name in marks}
    circles = []
    for k, (a, b) in enumerate(points):
        if not math.isfinite(b) or not ((dots and len(points) <= 200) or (a, b) in named):
            continue
        name = named.get((a, b), "")
        c = tag(
            "circle",
            tag("title", f"{number(int(a) if a == int(a) else a)}: {number(b)}{f' ({name})' if name else ''}"),
            cx=x(a),
            cy=y(b),
            r=5 if name else 3,
            class_="mt-dot mt-best" if name else "mt-dot",
        )
        href = hrefs[k] if k < len(hrefs) else None
        circles.append(tag("a", c, href=href) if href else c)
    return _svg(width, height, grid, below, lines, circles, label=label, cls="mt-curve")


def bytes_map(group: Group, link: Callable[[Group | Row], str] | None, width: int = 1132, height: int = 460) -> Markup:
    """A treemap of a group by bytes. Every tile links to its array or group."""
    total = group.nbytes
    if not total:
        return tag("p", "Nothing here has a size.", class_="mt-quiet")

    def draw(tile: Tile, level: int) -> Markup:
        p = tile.place
        if p.width < 0.5 or p.height < 0.5:
            return Markup("")
        rest = f"{count(tile.count, 'more array')}" if tile.item is None else ""
        name = rest or visible(tile.item.path[-1] if tile.item.path else "", 60)
        full = rest or visible(".".join(tile.item.path), 200)
        share = tile.nbytes / total
        # The tile of gathered arrays keeps the lightest shade: none of them is large.
        shade = 0 if rest else min(SHADES - 1, int(SHADES * math.sqrt(share)))
        parts: list[Markup] = [
            tag(
                "rect",
                tag("title", f"{full}\n{human_bytes(tile.nbytes)}, {100 * share:.1f} %".replace("\n", " · ")),
                x=p.x,
                y=p.y,
                width=max(0.0, p.width - 1),
                height=max(0.0, p.height - 1),
                rx=2,
                class_=f"mt-tile s{shade}" + (" mt-outer" if tile.inner else ""),
            )
        ]
        room = int(p.width / 6.6) - 1
        if p.height >= 16 and room >= 3:
            shown = name if len(name) <= room else name[: room - 1] + "…"
            size = f" {human_bytes(tile.nbytes)}"
            if len(shown) + len(size) <= room and (tile.inner or p.height < 34):
                shown += size
            parts.append(
                tag(
                    "text",
                    shown,
                    x=p.x + 5,
                    y=p.y + 13,
                    class_=f"mt-label s{shade}" if not tile.inner else "mt-label mt-outer",
                )
            )
            if not tile.inner and p.height >= 34 and len(human_bytes(tile.nbytes)) <= room:
                parts.append(tag("text", human_bytes(tile.nbytes), x=p.x + 5, y=p.y + 27, class_=f"mt-label s{shade}"))
        own = join(parts)
        if link is not None and tile.item is not None:
            own = tag("a", own, href=link(tile.item))
        return join([own, *(draw(t, level + 1) for t in tile.inner)])

    tiles = treemap(group, width, height, depth=4)
    return _svg(width, height, *(draw(t, 0) for t in tiles), label="Arrays by bytes", cls="mt-treemap")


def _spread(ranks: Sequence[int]) -> str:
    """``0-3, 6``.

    >>> _spread([0, 1, 2, 3, 6])
    '0-3, 6'
    """
    runs: list[list[int]] = []
    for r in ranks:
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    out = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs[:6])
    return out + (", …" if len(runs) > 6 else "")


def block_map(
    shape: tuple[int, ...],
    parts: Sequence[Block],
    rows: int | None,
    columns: int | None,
    at: Sequence[int],
    width: int = 420,
    height: int = 200,
) -> Markup:
    """Which ranks held which part of the plane of ``rows`` and ``columns`` through ``at``."""
    h = shape[rows] if rows is not None else 1
    w = shape[columns] if columns is not None else 1
    if not h or not w:
        return tag("p", "This array has no elements to place.", class_="mt-quiet")
    out = []
    numbers: dict[tuple[int, ...], int] = {}
    for b in parts:
        numbers.setdefault(b.ranks, len(numbers))
        cut = [(o, o + n) for o, n in zip(b.box.offset, b.box.shape, strict=True)]
        if not b.box.size or any(
            not a <= i < z for d, ((a, z), i) in enumerate(zip(cut, at, strict=False)) if d not in (rows, columns)
        ):
            continue
        (y0, y1) = cut[rows] if rows is not None else (0, 1)
        (x0, x1) = cut[columns] if columns is not None else (0, 1)
        px, py, pw, ph = x0 / w * width, y0 / h * height, (x1 - x0) / w * width, (y1 - y0) / h * height
        ranks = _spread(b.ranks)
        say = f"rank{'s' if len(b.ranks) != 1 else ''} {ranks}"
        title = f"{say}: {' × '.join(map(str, b.box.shape))} from ({', '.join(map(str, b.box.offset))})"
        label = say if len(say) * 6.4 < pw else ranks if len(ranks) * 6.4 < pw else ""
        out.append(
            tag(
                "rect",
                tag("title", title),
                x=px + 0.5,
                y=py + 0.5,
                width=max(pw - 1.5, 0.5),
                height=max(ph - 1.5, 0.5),
                rx=2,
                class_=f"mt-block b{numbers[b.ranks] % SHADES}",
            )
        )
        if label and ph >= 13:
            out.append(tag("text", label, x=px + pw / 2, y=py + ph / 2 + 4, text_anchor="middle", class_="mt-label"))
    return _svg(width, height, *out, label="Blocks by rank", cls="mt-blocks")


def chunks(
    m: ChunkMap, rows: int | None, columns: int | None, link: Callable[[tuple[int, ...]], str] | None, width: int = 420
) -> Markup:
    """The map of chunks; each is a link that moves the window there."""
    n_rows = max(c.row for c in m.chunks) - m.first[0] + 1
    n_columns = max(c.column for c in m.chunks) - m.first[1] + 1
    # Drawn as the plane lies: a chunk's cell has about its proportions, so the map and the blocks can be compared.
    wide = max(6.0, min(96.0, width / n_columns))
    high = max(6.0, min(48.0, 240 / n_rows))
    out = []
    for c in m.chunks:
        x, y = (c.column - m.first[1]) * wide, (c.row - m.first[0]) * high
        size = "" if c.nbytes is None else f", {human_bytes(c.nbytes)} stored"
        title = f"{c.file}{size}, from ({', '.join(map(str, c.box.offset))}): {STATES[c.state]}" + (
            f" · {c.note}" if c.note else ""
        )
        rect = tag(
            "rect",
            tag("title", title),
            x=x + 0.5,
            y=y + 0.5,
            width=wide - 1.5,
            height=high - 1.5,
            rx=1.5,
            class_=f"mt-chunk {c.state}",
        )
        out.append(tag("a", rect, href=link(c.box.offset)) if link is not None else rect)
    return _svg(max(n_columns * wide, 60), n_rows * high, *out, label="Chunks and their checksums", cls="mt-chunks")


STATES = {
    "recorded": "with a checksum, not read now",
    "sound": "read, its checksum fits",
    "damaged": "damaged",
    "missing": "missing",
    "length": "wrong length",
    "plain": "no checksum of ours",
    "absent": "never written",
}


def strip(start: int, end: int, total: int, width: int = 420) -> Markup:
    """Where a run of bytes lies in its file."""
    a = width * start / total if total else 0
    b = width * (end - start) / total if total else 0
    return _svg(
        width,
        18,
        tag("rect", x=0, y=3, width=width, height=12, rx=2, class_="mt-track"),
        tag("rect", x=min(a, width - 2), y=3, width=max(b, 2), height=12, rx=1, class_="mt-fill"),
        label=f"Bytes {start:,} to {end:,} of {total:,}",
    )


def share_bar(parts: Sequence[tuple[str, int]], width: int = 280) -> Markup:
    """One bar cut by bytes, for dtypes."""
    total = sum(n for _, n in parts) or 1
    out, at = [], 0.0
    for k, (name, n) in enumerate(parts):
        w = width * n / total
        out.append(
            tag(
                "rect",
                tag("title", f"{name}: {human_bytes(n)}, {100 * n / total:.1f} %"),
                x=at,
                y=0,
                width=max(w - 1, 0.5),
                height=8,
                class_=f"mt-share d{min(k, 5)}",
            )
        )
        at += w
    return _svg(width, 8, *out, label="Bytes by dtype")
