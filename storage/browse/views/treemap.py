"""Rectangles whose areas are bytes: a squarified treemap (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..model.inventory import ArrayRow, NameGroup, largest_first

MOST = 48  # rectangles of one level: smaller ones are gathered in one
_HEADER = 18.0


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Tile(NamedTuple):
    """A child of a group; ``item`` is None for the gathered rest. Behind an ``outer`` one follow its children's."""

    place: Rectangle
    item: NameGroup | ArrayRow | None
    count: int
    nbytes: int
    outer: bool = False


def squarify(sizes: Sequence[float], place: Rectangle) -> list[Rectangle]:
    """A rectangle for each size (descending, positive) that together fill ``place``, as near to squares as can be.

    >>> [round(r.width * r.height, 6) for r in squarify([6, 3, 1], Rectangle(0, 0, 5, 4))]
    [12.0, 6.0, 2.0]
    """
    x, y, w, h = place
    scale = w * h / (sum(sizes) or 1)
    areas = [s * scale for s in sizes]
    left = [*accumulate(reversed(areas), initial=0.0)][::-1]  # the areas from each one on
    out: list[Rectangle] = []
    while len(out) < len(areas):
        start, side = len(out), min(w, h)

        def worst(end: int, start: int = start, side: float = side) -> float:
            """The worst ratio of sides in the row of areas from ``start`` to ``end`` along ``side``."""
            row = left[start] - left[end]
            least = areas[end - 1]
            if min(row, least, side) <= 0:
                return float("inf")
            return max(side * side * areas[start] / (row * row), row * row / (side * side * least))

        end = start + 1
        while end < len(areas) and worst(end + 1) <= worst(end):
            end += 1
        row = sum(areas[start:end])
        # Thickness and remaining room follow from areas: a difference of lengths would keep few digits of a thin one.
        thick, rest = (row / side, left[end] / side) if side > 0 else (0.0, 0.0)
        at = y if w >= h else x
        for a in areas[start:end]:
            length = side * a / row if row > 0 else 0.0  # of the side, so that a row fills it to the last bit
            out.append(Rectangle(x, at, thick, length) if w >= h else Rectangle(at, y, length, thick))
            at += length
        x, y, w, h = (x + thick, y, rest, h) if w >= h else (x, y + thick, w, rest)
    return out


def treemap(group: NameGroup, width: float, height: float, depth: int = 2) -> list[Tile]:
    """Tiles of a group's children, and behind those that have room the tiles of theirs; none of empty arrays."""
    return list(_tiles(group, Rectangle(0, 0, width, height), depth))


def _tiles(group: NameGroup, place: Rectangle, depth: int) -> Iterator[Tile]:
    children = sorted((c for c in [*group.groups.values(), *group.rows] if c.nbytes), key=largest_first)
    shown, rest = children[:MOST], children[MOST:]
    gathered = sum(c.nbytes for c in rest)
    # The gathered tile comes last, even where it is larger: it is the least interesting.
    places = squarify([*(c.nbytes for c in shown), *([gathered] if rest else [])], place)
    for child, p in zip(shown, places, strict=False):
        outer = isinstance(child, NameGroup) and depth > 1 and p.width > 56 and p.height > _HEADER + 24
        yield Tile(p, child, child.arrays, child.nbytes, outer)
        if outer:
            yield from _tiles(child, Rectangle(p.x + 3, p.y + _HEADER, p.width - 6, p.height - _HEADER - 3), depth - 1)
    if rest:
        yield Tile(places[-1], None, sum(c.arrays for c in rest), gathered)
