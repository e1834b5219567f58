"""Parts of a sparse cotangent: a key with the values read there, or values by place; and their sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.index_template import Template, is_basic, numpy_key
from .rows import Rows, indexed_axes, rows_of
from .segment_sum import sum_rows


class IndexedPart(NamedTuple):
    """The values of one read, in the shape of its result, with its key."""

    template: Template
    arrays: tuple[np.ndarray, ...]
    values: np.ndarray

    def rows(self, shape: tuple[int, ...]) -> Rows:
        return rows_of(self.template, self.arrays, self.values, shape)

    def add_to(self, out: np.ndarray, fresh: bool) -> None:
        if is_basic(self.template):
            key = numpy_key(self.template, self.arrays)
            if fresh:
                out[key] = self.values
            else:
                out[key] += self.values
        else:
            RowsPart(self.rows(out.shape), False).add_to(out, fresh)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        here = self.values.size * self.values.dtype.itemsize
        if is_basic(self.template):
            return here
        return here + 8 * self.values.size // max(indexed_axes(self.template, shape)[1], 1)


class RowsPart(NamedTuple):
    """Values by place; ``distinct`` says that no place comes twice, and that they ascend."""

    found: Rows
    distinct: bool

    def rows(self, shape: tuple[int, ...]) -> Rows:
        return self.found

    def add_to(self, out: np.ndarray, fresh: bool) -> None:
        axes, ids, rows = self.found
        shape = out.shape
        if rows.shape[1] == 1 and rows.dtype.itemsize > 2 and not self.distinct and out.flags.c_contiguous:
            # The other dimensions are of length one. One dimension is what NumPy is fast on.
            np.add.at(out.reshape(-1), ids, rows[:, 0])
            return
        if not self.distinct:
            ids, rows = sum_rows(ids, rows, math.prod(shape[d] for d in axes))
        rest = [d for d in range(len(shape)) if d not in axes]
        # (Reshaping would copy an array whose columns come first in memory.)
        key = np.unravel_index(ids, [shape[d] for d in axes]) if len(axes) != 1 else (ids,)
        turned = out.transpose((*axes, *rest))
        values = rows.reshape(len(ids), *(shape[d] for d in rest))
        if fresh:
            turned[key] = values
        else:
            turned[key] += values

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return self.found.values.size * self.found.values.dtype.itemsize + self.found.ids.nbytes


class AppendView(Sequence[Any]):
    """The first ``n`` elements of an append-only list."""

    __slots__ = ("all", "n")

    def __init__(self, parts: list[Any], n: int) -> None:
        self.all, self.n = parts, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return self.all[i] if type(i) is int and 0 <= i < self.n else self.all[: self.n][i]

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.all, self.n)


def joined(rows: Sequence[Rows]) -> Rows:
    """Rows with places among the same dimensions, one after the other."""
    if len(rows) == 1:
        return rows[0]
    return Rows(rows[0].axes, np.concatenate([r.ids for r in rows]), np.concatenate([r.values for r in rows]))


def sum_places(rows: Rows, shape: tuple[int, ...]) -> Rows:
    return Rows(rows.axes, *sum_rows(rows.ids, rows.values, math.prod(shape[d] for d in rows.axes)))


def grouped(parts: Sequence[IndexedPart | RowsPart], shape: tuple[int, ...]) -> tuple[list[IndexedPart], list[Rows]]:
    """Reads without index arrays; and the others, those that pick of the same dimensions joined."""
    plain: list[IndexedPart] = []
    together: dict[tuple[int, ...], list[Rows]] = {}
    for p in parts:
        if type(p) is IndexedPart and is_basic(p.template):
            plain.append(p)
        else:
            r = p.rows(shape)
            together.setdefault(r.axes, []).append(r)
    return plain, [joined(rows) for rows in together.values()]


def added(out: np.ndarray, parts: Sequence[IndexedPart | RowsPart], *, fresh: bool) -> np.ndarray:
    """``out`` with the parts added in place; ``fresh``: it is zero everywhere."""
    if len(parts) == 1:
        parts[0].add_to(out, fresh)
        return out
    plain, together = grouped(parts, out.shape)
    for p in (*plain, *(RowsPart(rows, False) for rows in together)):
        p.add_to(out, fresh)
        fresh = False
    return out
