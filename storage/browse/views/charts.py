"""Charts as SVG: histogram, curve, treemap, blocks over ranks, map of chunks. Geometry is here, colours are classes of
the style sheet."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.core.formatting import ranges
from ..model.inventory import ArrayRow, NameGroup
from ..model.layout import ChunkMap, SavedBlock
from ..model.text import count, human_bytes, number, visible
from .frame import Markup, asset, render
from .treemap import treemap

SHADES = 8  # classes s0 … s7
WIDE = 480  # from this width on a chart's letters would be too small on a telephone, where it is moved sideways instead


def shape(kind: str, title: str = "", href: str | None = None, text: str = "", **attributes: Any) -> dict[str, Any]:
    """An element of a chart, as ``chart.html`` draws it: a title says what it is, ``href`` makes it a link."""
    plain = {k.rstrip("_").replace("_", "-"): round(v, 2) if isinstance(v, float) else v for k, v in attributes.items()}
    return {"kind": kind, "title": title, "href": href, "text": text, "attributes": plain}


@dataclass(frozen=True)
class Chart:
    """A drawing: markup in a page, or a picture of its own. Without shapes its label says why."""

    width: float
    height: float
    shapes: Sequence[dict[str, Any]]
    label: str
    cls: str = ""

    def __html__(self) -> str:
        return render("chart.html", chart=self, wide=self.width >= WIDE, style=None)

    def __str__(self) -> str:
        return self.__html__()

    def image(self) -> Markup:
        """As an ``img`` with its own style: a viewer that strips drawings shows its label, not the digits in it."""
        if not self.shapes:
            return Markup(self)
        svg = render("chart.html", chart=self, wide=False, style=Markup(asset("charts.css").decode()))
        url = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
        return Markup('<img src="{}" alt="{}" class="mt-picture">').format(url, visible(self.label))


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
    numbers = range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)[:12]
    return [round(k * step, 12) if abs(step) > 1e-9 else k * step for k in numbers]


def _map(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The linear map of a range to places. It halves, as the difference of the extremes of float64 is no float64."""
    span = high / 2 - low / 2
    return lambda v: start + (end - start) * ((v / 2 - low / 2) / span if span > 0 else 0.5)


def histogram(
    edges: Sequence[float], counts: Sequence[int], marks: Sequence[tuple[str, float]] = (), x_name: str = "value"
) -> Chart:
    """Bars for counts, with marks (such as quantiles) as lines. Each bar says its range and count."""
    width, height = 560, 190
    left, top, base = 8, 16, height - 26
    low, high = edges[0], edges[-1]
    x = _map(low, high, left, width - left)
    step, most, total = (width - 2 * left) / len(counts), max(counts) or 1, sum(counts)
    shapes = []
    for i, (a, b, n) in enumerate(zip(edges, edges[1:], counts, strict=False)):
        title = f"{number(a)} … {number(b)}: {n:,} ({100 * n / total:.1f} %)"
        tall = max((base - top) * n / most, float(n > 0))
        at = {"x": left + i * step + 0.5, "y": base - tall, "width": max(step - 1, 0.5), "height": tall}
        shapes.append(shape("rect", title, **at, class_="mt-bar"))
    shapes.append(shape("line", x1=left, x2=width - left, y1=base, y2=base, class_="mt-axis"))
    for t in _ticks(low, high, 6):
        if left + 8 <= x(t) <= width - left - 8:
            shapes.append(shape("line", x1=x(t), x2=x(t), y1=base, y2=base + 4, class_="mt-axis"))
            shapes.append(_tick(t, x(t), base + 17))
    for name, v in marks:
        if low <= v <= high:
            at = {"x1": x(v), "x2": x(v), "y1": top - 6, "y2": base}
            shapes.append(shape("line", f"{name}: {number(v)}", **at, class_="mt-mark"))
    label = f"Histogram of {x_name}, {len(counts)} bins from {number(low)} to {number(high)}"
    return Chart(width, height, shapes, label, "mt-histogram")


def _whole(v: float) -> str:
    return number(int(v) if v == int(v) else v)


def _tick(value: float, x: float, y: float, anchor: str = "middle") -> dict[str, Any]:
    return shape("text", text=_whole(value), x=x, y=y, text_anchor=anchor, class_="mt-tick")


def curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float, str]] = (),
    width: int = 560,
    height: int = 190,
    label: str = "curve",
    hrefs: Sequence[str] = (),
) -> Chart:
    """A line through points, with marked ones named. Values that are not finite leave a gap."""
    left, right, base, top = 54, width - 24, height - 26, 14
    finite = [(a, b) for a, b in points if math.isfinite(b)]
    if not finite:
        return Chart(0, 0, [], "No finite values to draw.")
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*finite, strict=True))
    if y0 == y1:
        y0, y1 = y0 - max(abs(y0) * 0.1, 0.5), y1 + max(abs(y1) * 0.1, 0.5)
    x, y = _map(x0, x1, left, right), _map(y0, y1, base, top)
    runs: list[list[str]] = [[]]
    for a, b in points:
        if math.isfinite(b):
            runs[-1].append(f"{x(a):.1f},{y(b):.1f}")
        elif runs[-1]:
            runs.append([])
    shapes = []
    for t in _ticks(y0, y1, 4):
        shapes.append(shape("line", x1=left, x2=right, y1=y(t), y2=y(t), class_="mt-grid"))
        shapes.append(_tick(t, left - 6, y(t) + 3.5, "end"))
    shapes += [_tick(t, x(t), height - 8) for t in _ticks(x0, x1, 6) if left <= x(t) <= right]
    shapes += [shape("polyline", points=" ".join(run), class_="mt-line") for run in runs if len(run) > 1]
    named = {(a, b): name for a, b, name in marks}
    for k, (a, b) in enumerate(points):
        name = named.get((a, b), "")
        if math.isfinite(b) and (name or len(points) <= 200):
            title = f"{_whole(a)}: {number(b)}{f' ({name})' if name else ''}"
            style = {"r": 5 if name else 3, "class_": f"mt-dot{' mt-best' if name else ''}"}
            shapes.append(shape("circle", title, hrefs[k] if hrefs else None, cx=x(a), cy=y(b), **style))
    return Chart(width, height, shapes, label, "mt-curve")


def bytes_map(
    group: NameGroup, link: Callable[[NameGroup | ArrayRow], str] | None, width: int = 1132, height: int = 460
) -> Chart:
    """A treemap of a group by bytes. Every tile links to its array or group."""
    if not group.nbytes:
        return Chart(0, 0, [], "Nothing here has a size.")
    shapes = []
    for tile in treemap(group, width, height, depth=4):
        p, item = tile.place, tile.item
        if p.width < 0.5 or p.height < 0.5:
            continue
        share, size = tile.nbytes / group.nbytes, human_bytes(tile.nbytes)
        full = ".".join(item.path) if item else count(tile.count, "more array")
        name = visible(item.path[-1] if item.path else "", 60) if item else full
        # The tile of gathered arrays keeps the lightest shade: none of them is large.
        shade = min(SHADES - 1, int(SHADES * math.sqrt(share))) if item else 0
        kind = "mt-outer" if tile.outer else ""
        at = {"x": p.x, "y": p.y, "width": max(0.0, p.width - 1), "height": max(0.0, p.height - 1), "rx": 2}
        title, href = f"{visible(full, 200)} · {size}, {100 * share:.1f} %", link(item) if link and item else None
        shapes.append(shape("rect", title, href, **at, class_=f"mt-tile s{shade} {kind}"))
        room = int(p.width / 6.6) - 1
        if p.height < 16 or room < 3:
            continue
        lines = [name if len(name) <= room else name[: room - 1] + "…"]
        if not tile.outer and p.height >= 34 and len(size) <= room:
            lines.append(size)
        elif len(lines[0]) + len(size) < room:
            lines[0] += f" {size}"
        style = f"mt-label {kind or f's{shade}'}"
        shapes += [shape("text", text=t, x=p.x + 5, y=p.y + 13 + 14 * k, class_=style) for k, t in enumerate(lines)]
    return Chart(width, height, shapes, "Arrays by bytes", "mt-treemap")


def block_map(
    shape_: tuple[int, ...],
    parts: Sequence[SavedBlock],
    rows: int | None,
    columns: int | None,
    at: Sequence[int],
    width: int = 420,
    height: int = 200,
) -> Chart:
    """Which ranks held which part of the plane of ``rows`` and ``columns`` through ``at``."""
    if 0 in shape_:
        return Chart(0, 0, [], "This array has no elements to place.")
    shapes = []
    colours: dict[tuple[int, ...], int] = {}
    others = [d for d in range(len(shape_)) if d not in (rows, columns)]
    for b in parts:
        colour = colours.setdefault(b.ranks, len(colours)) % SHADES
        box = b.box
        if not box.size or any(not box.offset[d] <= at[d] < box.stop[d] for d in others):
            continue
        (y, tall), (x, wide) = (
            (0.0, length) if d is None else (box.offset[d] / shape_[d] * length, box.shape[d] / shape_[d] * length)
            for d, length in ((rows, float(height)), (columns, float(width)))
        )
        ranks = ranges(b.ranks)
        say = f"rank{'s' if len(b.ranks) != 1 else ''} {ranks}"
        title = f"{say}: {' × '.join(map(str, b.box.shape))} from ({', '.join(map(str, b.box.offset))})"
        place = {"x": x + 0.5, "y": y + 0.5, "width": max(wide - 1.5, 0.5), "height": max(tall - 1.5, 0.5), "rx": 2}
        shapes.append(shape("rect", title, **place, class_=f"mt-block b{colour}"))
        label = next((t for t in (say, ranks) if len(t) * 6.4 < wide), "")
        if label and tall >= 13:
            middle = {"x": x + wide / 2, "y": y + tall / 2 + 4, "text_anchor": "middle"}
            shapes.append(shape("text", text=label, **middle, class_="mt-label"))
    return Chart(width, height, shapes, "Blocks by rank", "mt-blocks")


def chunks(m: ChunkMap, link: Callable[[tuple[int, ...]], str], width: int = 420) -> Chart:
    """The map of chunks; each is a link that moves the window there."""
    n_rows = max(c.row for c in m.chunks) - m.first[0] + 1
    n_columns = max(c.column for c in m.chunks) - m.first[1] + 1
    # Drawn as the plane lies: a chunk's cell has about its proportions, so the map and the blocks can be compared.
    wide = max(6.0, min(96.0, width / n_columns))
    high = max(6.0, min(48.0, 240 / n_rows))
    shapes = []
    for c in m.chunks:
        size = "" if c.nbytes is None else f", {human_bytes(c.nbytes)} stored"
        title = f"{c.file}{size}, from ({', '.join(map(str, c.box.offset))}): {STATES[c.state]}"
        at = {"x": (c.column - m.first[1]) * wide + 0.5, "y": (c.row - m.first[0]) * high + 0.5}
        at |= {"width": wide - 1.5, "height": high - 1.5, "rx": 1.5}
        title += f" · {c.note}" if c.note else ""
        shapes.append(shape("rect", title, link(c.box.offset), **at, class_=f"mt-chunk {c.state}"))
    return Chart(max(n_columns * wide, 60), n_rows * high, shapes, "Chunks and their checksums", "mt-chunks")


STATES = {
    "recorded": "with a checksum, not read now",
    "sound": "read, its checksum fits",
    "damaged": "damaged",
    "missing": "missing",
    "length": "wrong length",
    "plain": "no checksum of ours",
    "absent": "never written",
}


def share_bar(parts: Sequence[tuple[str, int]], width: int = 280) -> Chart:
    """One bar cut by bytes, for dtypes."""
    total = sum(n for _, n in parts) or 1
    shapes, at = [], 0.0
    for k, (name, n) in enumerate(parts):
        w = width * n / total
        title = f"{name}: {human_bytes(n)}, {100 * n / total:.1f} %"
        shapes.append(shape("rect", title, x=at, y=0, width=max(w - 1, 0.5), height=8, class_=f"mt-share d{min(k, 5)}"))
        at += w
    return Chart(width, 8, shapes, "Bytes by dtype")
