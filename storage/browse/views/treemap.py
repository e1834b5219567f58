"""Rectangles whose areas are bytes: a squarified treemap (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..model.inventory import Group, Row, largest_first

MOST = 48  # rectangles of one level: smaller ones are gathered in one


@dataclass(frozen=True, slots=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Tile:
    """A child of a group. ``item`` is None for the gathered rest; ``inner`` are the tiles of a group's own children."""

    place: Rectangle
    item: Group | Row | None
    count: int
    nbytes: int
    inner: tuple[Tile, ...] = ()


def squarify(sizes: Sequence[float], place: Rectangle) -> list[Rectangle]:
    """A rectangle for each size (descending, positive) that together fill ``place``, as near to squares as can be.

    >>> [round(r.width * r.height, 6) for r in squarify([6, 3, 1], Rectangle(0, 0, 5, 4))]
    [12.0, 6.0, 2.0]
    """
    total = sum(sizes)
    if total <= 0 or place.width <= 0 or place.height <= 0:
        return [Rectangle(place.x, place.y, 0, 0) for _ in sizes]
    scale = place.width * place.height / total
    areas = [s * scale for s in sizes]
    left = [*accumulate(reversed(areas), initial=0.0)][::-1]  # the areas from each one on
    out: list[Rectangle] = []
    x, y, w, h = place.x, place.y, place.width, place.height
    start = 0
    while start < len(areas):
        side = min(w, h)
        end, row = start + 1, areas[start]
        worst = _worst(row, areas[start], areas[start], side)
        while end < len(areas):
            grown = row + areas[end]
            then = _worst(grown, areas[start], areas[end], side)
            if then > worst:
                break
            row, worst, end = grown, then, end + 1
        thick = row / side if side > 0 else 0.0
        at = y if w >= h else x
        for a in areas[start:end]:
            length = side * a / row if row > 0 else 0.0  # of the side, so that a row fills it to the last bit
            out.append(Rectangle(x, at, thick, length) if w >= h else Rectangle(at, y, length, thick))
            at += length
        # The room that is left follows from the areas that are left: a difference of lengths would keep few digits of a thin one.
        rest = left[end] / side if side > 0 else 0.0
        if w >= h:
            x, w = x + thick, rest
        else:
            y, h = y + thick, rest
        start = end
    return out


def _worst(row: float, largest: float, smallest: float, side: float) -> float:
    """The worst ratio of the sides in a row of areas along ``side``."""
    if row <= 0 or smallest <= 0 or side <= 0:
        return float("inf")
    return max(side * side * largest / (row * row), row * row / (side * side * smallest))


def treemap(group: Group, width: float, height: float, header: float = 18.0, depth: int = 2) -> list[Tile]:
    """Tiles of a group's children, and in those that have room the tiles of theirs. Empty arrays have no area and no tile."""
    return list(_tiles(group, Rectangle(0, 0, width, height), header, depth))


def _tiles(group: Group, place: Rectangle, header: float, depth: int) -> tuple[Tile, ...]:
    children = sorted((c for c in [*group.groups.values(), *group.rows] if c.nbytes), key=largest_first)
    shown, rest = children[:MOST], children[MOST:]
    sizes = [c.nbytes for c in shown]
    gathered = sum(c.nbytes for c in rest)
    # The gathered tile comes last, even where it is larger: it is the least interesting.
    places = squarify([*sizes, gathered] if gathered else sizes, place)
    out = []
    for child, where in zip(shown, places, strict=False):
        inner: tuple[Tile, ...] = ()
        if isinstance(child, Group) and depth > 1 and where.width > 56 and where.height > header + 24:
            room = Rectangle(where.x + 3, where.y + header, where.width - 6, where.height - header - 3)
            inner = _tiles(child, room, header, depth - 1)
        arrays = child.arrays if isinstance(child, Group) else 1
        out.append(Tile(where, child, arrays, child.nbytes, inner))
    if gathered:
        arrays = sum(c.arrays if isinstance(c, Group) else 1 for c in rest)
        out.append(Tile(places[-1], None, arrays, gathered))
    return tuple(out)
