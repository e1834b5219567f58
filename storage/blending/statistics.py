"""Numbers about whole tensors that formulas need: scalar products, order statistics, sums of magnitudes.

They are computed from parts of the flat tensor, by streaming: a part is read block by block, its sums are float64 sums
of fixed blocks, and the sums of parts are added in order. So they are the same to the bit for any windows, threads,
workers and layouts of the sources. The k-th largest magnitude is found exactly, by histograms of the digits of the
floats' bits (a radix selection), one pass for 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError
from ..format.chunk_grid import windows
from ..readers.shared import once

BLOCK = 1 << 18  # elements of each source that are held at once
PART = 1 << 22  # elements of a call
Jobs = Generator[list[tuple[Callable[..., Any], tuple[Any, ...]]], list[Any], Any]


def flat_boxes(shape: Sequence[int], limit: int, rows: bool = False) -> Iterator[Box]:
    """Boxes that are consecutive ranges of the flat array, of at most ``limit`` elements; of whole ``rows`` if so, then
    of one at least.

    >>> [(b.offset, b.shape) for b in flat_boxes((2, 3), 2)]
    [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    >>> [b.offset for b in flat_boxes((4, 3), 7, True)]
    [(0, 0), (2, 0)]
    """
    row = shape[-1:] if rows else (1,) * len(shape[-1:])
    return windows(tuple(shape), (*(1,) * len(shape[:-1]), *row), 1, limit)


def _blocks(tensor: Any, part: Box, rows: bool) -> Iterator[Any]:
    for b in flat_boxes(part.shape, BLOCK, rows):
        yield tensor.piece(b.shifted(part.offset))


def _over_parts(tensor: Any, fn: Callable[..., Any], *args: Any, rows: bool = False) -> Jobs:
    """The results of ``fn(tensor, part, *args)`` for each part, in order."""
    parts = flat_boxes(tensor.shape, PART, rows or tensor.method.rows)
    return (yield [(fn, (once("cut", tensor, p), p, *args)) for p in parts])


# ----- order statistics -----------------------------------------------------------------------------------------------


def _keys(a: np.ndarray, work: np.dtype) -> np.ndarray:
    """Magnitudes as unsigned integers in the same order."""
    if work.itemsize == 2:
        return np.asarray(a).astype(work).view(np.uint16) & np.uint16(0x7FFF)
    unsigned = np.uint64 if a.dtype == np.float64 else np.uint32
    return np.asarray(a, order="C").view(unsigned) & unsigned(np.iinfo(unsigned).max >> 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """A number of the largest or smallest elements by magnitude: those beyond ``key``, and of those at it the first, up
    to ``position``."""

    largest: bool
    key: int | None  # None where the number is zero
    position: int | None  # None where all at the key belong to them

    def holds(self, a: np.ndarray, piece: Any) -> np.ndarray:
        """Whether each element is one of them."""
        if self.key is None:
            return np.zeros(a.shape, np.bool_)
        keys = _keys(a, piece.work)
        key = keys.dtype.type(self.key)
        if self.position is None:
            return keys >= key if self.largest else keys <= key
        beyond = keys > key if self.largest else keys < key
        return beyond | ((keys == key) & (piece.positions() <= self.position))


def order_statistics(tensor: Any, wanted: Sequence[tuple[int, int, bool]]) -> Jobs:
    """The `Cut` of each (number of a ranked array, count, whether of the largest)."""
    size = math.prod(tensor.shape)
    shifts = {2: (0,), 8: (48, 32, 16, 0)}.get(tensor.work.itemsize, (16, 0))
    prefixes = [0] * len(wanted)
    left = [min(count, size) for _, count, _ in wanted]
    live = [i for i, n in enumerate(left) if n]
    results: list[Any] = []
    for level, shift in enumerate(shifts):
        looks = sorted({(wanted[i][0], prefixes[i]) for i in live})
        if not looks:
            break
        results = yield from _over_parts(tensor, _digits, looks, shift, level == 0)
        counts = {look: np.zeros(1 << 16, np.int64) for look in looks}
        for found in results:
            for look, (digits, n) in zip(looks, found, strict=True):
                counts[look][digits] += n
        held = {}
        for i in live:
            which, _, largest = wanted[i]
            n = counts[which, prefixes[i]]
            reach = np.cumsum(n[::-1] if largest else n)
            at = int(np.searchsorted(reach, left[i]))
            left[i] -= int(reach[at - 1]) if at else 0
            digit = len(n) - 1 - at if largest else at
            held[i] = (looks.index((which, prefixes[i])), digit, int(n[digit]))
            prefixes[i] = prefixes[i] << 16 | digit
    positions: list[int | None] = [None] * len(wanted)
    asked = []
    for i in live:
        look, digit, equal = held[i]
        if left[i] < equal:  # some of the equal ones are not among them: the first are
            before = 0
            for number, found in enumerate(results):
                digits, n = found[look]
                here = int(n[digits == digit].sum())
                if before + here >= left[i]:
                    asked.append((i, number, left[i] - before))
                    break
                before += here
    if asked:
        parts = list(flat_boxes(tensor.shape, PART, tensor.method.rows))
        places = yield [
            (_place, (tensor.cut(parts[p]), parts[p], wanted[i][0], prefixes[i], nth)) for i, p, nth in asked
        ]
        for (i, *_), place in zip(asked, places, strict=True):
            positions[i] = place
    return [Cut(largest, prefixes[i] if i in live else None, positions[i]) for i, (_, _, largest) in enumerate(wanted)]


def _digits(tensor: Any, part: Box, looks: Sequence[tuple[int, int]], shift: int, first: bool) -> list[Any]:
    """For each (ranked array, prefix): the 16-bit digits at ``shift`` of the keys with the prefix, and how often each
    occurs."""
    counts = [np.zeros(1 << 16, np.int64) for _ in looks]
    for piece in _blocks(tensor, part, tensor.method.rows):
        ranked = tensor.method.ranked(piece)
        keys = {which: _keys(ranked[which], tensor.work).reshape(-1) for which in {w for w, _ in looks}}
        for n, (which, prefix) in zip(counts, looks, strict=True):
            k = keys[which]
            if not first:
                k = k[k >> np.uint8(shift + 16) == prefix]
            digits = k if k.dtype == np.uint16 else (k >> np.uint8(shift)).astype(np.uint16)
            n += np.bincount(digits, minlength=1 << 16)
    return [(d.astype(np.uint16), n[d]) for n in counts for d in [np.flatnonzero(n)]]


def _place(tensor: Any, part: Box, which: int, key: int, nth: int) -> int:
    """The position in the flat tensor of the n-th element with a key within a part."""
    for piece in _blocks(tensor, part, tensor.method.rows):
        found = np.flatnonzero(_keys(tensor.method.ranked(piece)[which], tensor.work).reshape(-1) == key)
        if len(found) >= nth:
            start = int(
                replace(piece, box=Box(piece.box.offset, (1,) * len(piece.box.shape))).positions().reshape(-1)[0]
            )
            return start + int(found[nth - 1])
        nth -= len(found)
    raise AssertionError("the part holds the element")


def check_finite(tensor: Any, sums: Any) -> None:
    """Refuse sums that say nothing about any element of a tensor."""
    if not np.isfinite(sums).all():
        raise CheckpointError(
            f"key {tensor.name!r}: a sum over the whole array is not finite: a source holds NaN or infinity, or values "
            "near the end of their range"
        )


# ----- sums -----------------------------------------------------------------------------------------------------------


def nonzero(tensor: Any) -> Jobs:
    """How many elements of the first ranked array are not zero."""
    return sum((yield from _over_parts(tensor, _nonzero)))


def _nonzero(tensor: Any, part: Box) -> int:
    return sum(int(np.count_nonzero(tensor.method.ranked(p)[0])) for p in _blocks(tensor, part, False))


def shares(tensor: Any) -> Jobs:
    """Sum of ``shares`` of the formula over all elements."""
    return sum((yield from _over_parts(tensor, _shares)))


def _shares(tensor: Any, part: Box) -> Any:
    return sum(tensor.method.shares(p) for p in _blocks(tensor, part, False))


def magnitudes(tensor: Any, cuts: Any) -> Jobs:
    """(sum of magnitudes of all elements, of the kept ones) of each task vector."""
    return sum((yield from _over_parts(tensor, _sums, cuts, np.abs)), np.zeros(()))


def squares(tensor: Any, cuts: Any) -> Jobs:
    """Sum of the squares of the kept elements of each task vector."""
    return sum((yield from _over_parts(tensor, _sums, cuts, np.square)), np.zeros(()))[:, 1]


def _sums(tensor: Any, part: Box, cuts: Any, of: Any) -> np.ndarray:
    total: Any = 0.0
    for piece in _blocks(tensor, part, tensor.method.rows):
        rows = []
        for d, mask in tensor.method.sparse(piece, cuts):
            x = of(d.astype(np.float64))
            every = float(np.sum(x))
            rows.append((every, every if mask is None else float(np.sum(x * mask))))
        total = total + np.asarray(rows)
    return total


def products(tensor: Any, relative: bool, axis: int | None) -> Jobs:
    """The scalar products of the sources, or of their differences from the first; with an ``axis`` those along it, for
    each place of the others."""
    if not tensor.shape or len(tensor.shape) == 1:
        axis = None
    if axis == 0:
        parts: list[Any] = list(_slabs(tensor.shape, PART))
        results = yield [(_products, (tensor.cut(p), p, relative, 0)) for p in parts]
        return sum(results[1:], results[0])
    results = yield from _over_parts(tensor, _products, relative, axis, rows=axis == -1)
    if axis == -1:
        flat = np.concatenate(results)
        return flat.reshape(*tensor.shape[:-1], *flat.shape[-2:])
    return sum(results[1:], results[0])


def _slabs(shape: Sequence[int], limit: int) -> Iterator[Box]:
    return windows(tuple(shape), (1, *shape[1:]), 1, limit)


def _products(tensor: Any, part: Box, relative: bool, axis: int | None) -> np.ndarray:
    found = []
    if axis == 0:
        pieces: Iterator[Any] = (tensor.piece(b.shifted(part.offset)) for b in _slabs(part.shape, BLOCK))
    else:
        pieces = _blocks(tensor, part, axis == -1)
    spec = {None: "i,i->", -1: "ij,ij->i", 0: "i...,i...->..."}[axis]
    for piece in pieces:
        held = piece.deltas() if relative else piece.held
        flat = [x.astype(np.float64) for x in held]
        if axis is None:
            flat = [x.reshape(-1) for x in flat]
        elif axis == -1:
            flat = [x.reshape(-1, x.shape[-1]) for x in flat]
        n = len(flat)
        first = np.einsum(spec, flat[0], flat[0])
        out = np.empty((*np.shape(first), n, n))
        for i in range(n):
            for j in range(i, n):
                out[..., i, j] = out[..., j, i] = np.einsum(spec, flat[i], flat[j])
        found.append(out)
    return np.concatenate(found) if axis == -1 else sum(found[1:], found[0])
