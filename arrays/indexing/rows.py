"""Flattens an index into (row id, row values).

A key takes some dimensions whole (``:``) and picks from the others. A *place* is one combination of picked positions;
its row has the elements along the whole dimensions. Any mixture of slices, ints, masks and index arrays reads rows by
place, in some order of the dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.index_template import Slot, Span, Template, Truth, is_basic


class Rows(NamedTuple):
    """Values at places. ``ids[i]`` is a place among the dimensions ``axes`` (ascending) taken as one, in C order;
    ``values[i]`` has the elements of the other dimensions, in their order, as one."""

    axes: tuple[int, ...]
    ids: np.ndarray
    values: np.ndarray


def _is_whole(p: Span, n: int) -> bool:
    return (p.start, p.stop, p.step) == (None, None, None) or slice(*p).indices(n) == (0, n, 1)


def indexed_axes(template: Template, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The dimensions that a key picks from, and the number of elements of a row in the others."""
    axes, width, d = [], 1, 0
    for p in template:
        t = type(p)
        if t is Span and _is_whole(p, shape[d]):  # type: ignore[arg-type]
            width *= shape[d]
        elif t is Span or t is Slot or t is int:
            axes.append(d)
        else:
            continue
        d += 1
    return tuple(axes), width


def _common(template: Template, arrays: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The broadcast shape of the index arrays of a key."""
    if is_basic(template):
        return ()
    return np.broadcast_shapes(*(a.shape for a in arrays), *((int(p.value),) for p in template if type(p) is Truth))


def _made(template: Template, n_common: int, shape: tuple[int, ...]) -> tuple[list[tuple[str, int]], dict[int, Any]]:
    """Kind and number of each dimension of a read's result, and the positions that slices read.

    The kinds: ``"common"`` (of the broadcast index arrays), ``"part"`` (sliced), ``"whole"``, ``"new"``."""
    advanced = not is_basic(template)
    made: list[tuple[str, int]] = []
    starts: dict[int, Any] = {}
    joined, front, d = [], 0, 0
    for i, p in enumerate(template):
        t = type(p)
        if p is None:
            made.append(("new", 0))
        elif t is Span:
            whole = _is_whole(p, shape[d])  # type: ignore[arg-type]
            made.append(("whole" if whole else "part", d))
            if not whole:
                starts[d] = np.arange(shape[d])[slice(*p)]  # type: ignore[misc]
        elif advanced and (t is Slot or t is Truth or t is int):
            if not joined:
                front = len(made)
            joined.append(i)
        d += t is Span or t is Slot or t is int
    if advanced:
        at = front if joined == list(range(joined[0], joined[-1] + 1)) else 0
        made[at:at] = [("common", i) for i in range(n_common)]
    return made, starts


def rows_of(template: Template, arrays: Sequence[np.ndarray], values: np.ndarray, shape: tuple[int, ...]) -> Rows:
    """The rows of values read from an array of ``shape``, or to add to it; ``values`` has the shape of the result."""
    common = _common(template, arrays)
    made, starts = _made(template, len(common), shape)
    order = [i for kind in ("common", "part", "new", "whole") for i, (m, _) in enumerate(made) if m == kind]
    lengths = [len(starts[d]) for d in starts]
    count = math.prod(common) * math.prod(lengths)
    axes, width = indexed_axes(template, shape)
    rows = values.transpose(order).reshape(count, width)

    ids: Any = np.intp(0)
    spans = d = 0
    for p in template:
        t = type(p)
        if t is Slot:
            a = arrays[p.n].astype(np.intp, copy=False)  # type: ignore[union-attr]
            if a.size and a.min() < 0:
                a = np.where(a < 0, a + shape[d], a)
            here: Any = a.reshape(a.shape + (1,) * len(lengths)) if lengths else a
        elif t is int:
            here = p
        elif d in starts and t is Span:
            spans += 1
            here = starts[d].reshape((-1,) + (1,) * (len(lengths) - spans))
        else:
            d += t is Span
            continue
        ids = here if len(axes) == 1 else ids * shape[d] + here
        d += 1
    ids = np.broadcast_to(ids, (*common, *lengths)).reshape(count)
    found = Rows(axes, ids, rows)
    return found if axes else expand_axes(found, (0,), shape)  # everything, once or never: a key of booleans alone


def expand_axes(part: Rows, axes: tuple[int, ...], shape: tuple[int, ...]) -> Rows:
    """The same values by places among more dimensions."""
    if part.axes == axes:
        return part
    rest = [d for d in range(len(shape)) if d not in part.axes]
    more = [d for d in rest if d in axes]
    less = [d for d in rest if d not in axes]
    k = len(part.ids)
    values = part.values.reshape(k, *(shape[d] for d in rest))
    order = [0, *(1 + rest.index(d) for d in more), *(1 + rest.index(d) for d in less)]
    count = k * math.prod(shape[d] for d in more)
    values = values.transpose(order).reshape(count, math.prod(shape[d] for d in less))
    places = np.unravel_index(part.ids, [shape[d] for d in part.axes]) if part.axes else ()
    known = dict(zip(part.axes, places, strict=True))
    ids: Any = np.zeros((k,) + (1,) * len(more), np.intp)
    for d in axes:
        if d in known:
            here = known[d].reshape((k,) + (1,) * len(more))
        else:
            here = np.arange(shape[d]).reshape((-1,) + (1,) * (len(more) - 1 - more.index(d)))
        ids = ids * shape[d] + here
    return Rows(axes, np.broadcast_to(ids, (k, *(shape[d] for d in more))).reshape(count), values)


def compose(
    template: Template, arrays: Sequence[np.ndarray], part: Rows, read: tuple[int, ...], shape: tuple[int, ...]
) -> Rows:
    """Rows of ``x[key]``, of shape ``read``, as rows of ``x``, of ``shape``; places may repeat."""
    common = _common(template, arrays)
    made, starts = _made(template, len(common), shape)
    axes = tuple(i for i, (kind, _) in enumerate(made) if kind != "whole" or i in part.axes)
    part = expand_axes(part, axes, read)
    places = dict(zip(axes, np.unravel_index(part.ids, [read[i] for i in axes]), strict=True)) if axes else {}
    at: dict[int, Any] = {}  # where in each dimension of x
    for i, where in places.items():
        kind, d = made[i]
        if kind == "whole":
            at[d] = where
        elif kind == "part":
            at[d] = starts[d][where]
    joined = tuple(places[i] for i, (kind, _) in enumerate(made) if kind == "common")
    d = 0
    for p in template:
        if type(p) is Slot:
            a = np.broadcast_to(arrays[p.n], common)[joined].astype(np.intp)
            at[d] = np.where(a < 0, a + shape[d], a)
        elif type(p) is int:
            at[d] = p
        d += type(p) in (Span, Slot, int)
    ids: Any = np.zeros(len(part.ids), np.intp)
    for d in sorted(at):
        ids = ids * shape[d] + at[d]
    found = Rows(tuple(sorted(at)), ids, part.values)
    return found if found.axes else expand_axes(found, (0,), shape)
