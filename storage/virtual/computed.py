"""Lazy tensors that compute: weighted sums, products of low rank, quantised rows.

Each element depends on elements of the sources alone, never on the box that is read with it, so results are the same to
the bit for any windows, threads and workers. Sums run in the order of the sources. They are taken in float32, or in
float64 for such arrays, and cast to the dtype of the result; what overflows is a loss, as of a cast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...arrays import asarray
from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError
from ..format import dtypes
from ..readers.shared import once
from ..readers.tensor import read_into, rows_of
from ..rules.casting import cast, count_lost_rows, watched
from ..rules.labels import Labels, Reader
from ..rules.lazy_tensors import Agreed, DerivedTensor, labels_of, of_source
from ..saving.quantize import pack, row_integers, row_scales, wide_of

_FACTORS = 4 << 20  # bytes of the factors of a product that a piece holds at once


def working_dtype(dtype: np.dtype) -> np.dtype | None:
    """The dtype in which arithmetic on arrays of a dtype is done; None where there is none, as of integers.

    >>> working_dtype(np.dtype("float16")), working_dtype(np.dtype("int64"))
    (dtype('float32'), None)
    """
    if dtype.name in dtypes.FLOATS:
        return np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return dtype if dtype.kind == "c" else None


def _at_work(tensor: Any, box: Box, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """(the elements of a box in a working dtype, as a new array; the bytes that were read)."""
    held, nbytes = read_into(tensor, box)
    with np.errstate(all="ignore"):
        return held.astype(dtype, copy=False), nbytes


@dataclass(frozen=True, slots=True)
class Equal(Agreed):
    """An array without arithmetic, such as a count of steps, which all parents must hold alike."""

    places: tuple[str, ...] = ()
    ways: str = ""  # to have one that is not equal

    how: ClassVar[str] = "equal in all parents"

    def _differ(self, other: Any, ours: np.ndarray, theirs: np.ndarray) -> CheckpointError:
        at = next(i for i, p in enumerate(self.parts) if p is other)
        return CheckpointError(
            f"{self.name!r} is {self.dtype}, of which no sums are taken, so it must be equal in all parents; "
            f"{self.places[at]} holds other values than {self.places[0]}. {self.ways}"
        )


@dataclass(frozen=True, slots=True)
class WeightedSum(Agreed):
    """``(w0 * x0 + w1 * x1 + …) / divisor``, in the dtype of source number ``base``."""

    weights: tuple[float, ...]
    divisor: float = 1.0
    base: int = 0

    casts: ClassVar[bool] = True
    how: ClassVar[str] = "a weighted sum, taken when it is read"
    source = property(lambda self: self.parts[self.base])
    # The largest, so that a piece reads few bytes twice.
    chunk = property(lambda self: max((p.chunk for p in self.parts), key=lambda c: int(np.prod(c, dtype=object))))
    per_element = property(lambda self: 3 * self._wide.itemsize)

    def labels(self, of: Reader) -> Labels:
        held = [labels_of(p, of) for p in self.parts]
        weight = sum(w * one.weight for w, one in zip(self.weights, held, strict=True)) / self.divisor
        return Labels.agreed(self.name, held, weight)

    @property
    def _wide(self) -> np.dtype:
        return max((working_dtype(p.dtype) or p.dtype for p in self.parts), key=lambda d: d.itemsize)

    def _read(self, box: Box, out: np.ndarray) -> int:
        wide = self._wide
        number = wide.type(0).real.dtype.type
        total = np.zeros(box.shape, wide)
        nbytes = 0
        with watched(self.name, total, box.offset, lambda: (_at_work(p, box, wide)[0] for p in self.parts)):
            for i, (part, weight) in enumerate(zip(self.parts, self.weights, strict=True)):
                held, n = _at_work(part, box, wide)
                nbytes += n
                if weight != 1.0:
                    _scale(np.multiply, held, number(weight))
                if i:
                    total += held
                else:
                    total[...] = held  # a sum that begins with a zero would lose the sign of a negative one
            if self.divisor != 1.0:
                _scale(np.divide, total, number(self.divisor))
        out[...] = cast(self.name, total, self.dtype, box.offset)
        return nbytes


def _scale(by: np.ufunc, x: np.ndarray, number: np.floating[Any]) -> None:
    """Multiply or divide in place by a real number: as a complex one it would make NaN of the part beside an
    infinity."""
    for part in (x.real, x.imag) if x.dtype.kind == "c" else (x,):
        by(part, number, out=part)


@dataclass(frozen=True, slots=True)
class LowRankSum(DerivedTensor):
    """``source + factor * (left @ right)``, where a factor is stored as it is, or swapped with the other and
    transposed.

    The product is a sum of as many terms as its rank, in their order: a library's product would depend on the size of
    the box.
    """

    name: str
    source: Any
    parts: tuple[Any, Any]  # A of shape (rank, n) and B of shape (m, rank), of the product B @ A
    factor: float
    swapped: bool = False  # the product is transposed

    casts: ClassVar[bool] = True
    how: ClassVar[str] = "a stored array plus a product of low rank, taken when it is read"
    per_element: ClassVar[int] = 4 * np.dtype(np.float64).itemsize
    shape, dtype, chunk = of_source("shape"), of_source("dtype"), of_source("chunk")

    def sources(self) -> tuple[Any, ...]:
        return (self.source, *self.parts)

    def _factors(self, box: Box, first: int, last: int) -> tuple[Box, Box]:
        """The boxes of A and B that the ranks from ``first`` on need."""
        (i, j), (m, n) = box.offset, box.shape
        if self.swapped:
            i, j, m, n = j, i, n, m
        return Box((first, j), (last - first, n)), Box((i, first), (m, last - first))

    def _needed(self, box: Box) -> Iterator[tuple[Any, Box]]:
        return zip(self.sources(), (box, *self._factors(box, 0, self.rank)), strict=True)

    @property
    def rank(self) -> int:
        return int(self.parts[0].shape[0])

    def only(self, box: Box) -> LowRankSum:
        if not box.size:
            return self
        source, *parts = (once("only", t, b) for t, b in self._needed(box))
        return replace(self, source=source, parts=tuple(parts))

    def planned(self, box: Box) -> int:
        return sum(once("planned", t, b, again=0) for t, b in self._needed(box)) if box.size else 0

    def _read(self, box: Box, out: np.ndarray) -> int:
        wide = working_dtype(self.dtype) or self.dtype
        total, nbytes = _at_work(self.source, box, wide)
        product, term = np.zeros(box.shape, wide), np.empty(box.shape, wide)
        step = max(1, _FACTORS // (wide.itemsize * sum(box.shape)))
        with watched(self.name, total, box.offset, lambda: iter([_at_work(self.source, box, wide)[0]])):
            for first in range(0, self.rank, step):
                boxes = self._factors(box, first, min(first + step, self.rank))
                (a, n), (b, m) = (_at_work(p, at, wide) for p, at in zip(self.parts, boxes, strict=True))
                nbytes += n + m
                left, right = (a.T, b.T) if self.swapped else (b, a)
                for k in range(left.shape[1]):
                    np.multiply(left[:, k, None], right[None, k], out=term)
                    product += term
            product *= wide.type(self.factor)
            total += product
        out[...] = cast(self.name, total, self.dtype, box.offset)
        return nbytes


# ----- quantised rows, as `quantize` makes them -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowScales(DerivedTensor):
    """The scale of each row of a tensor: its largest magnitude over ``levels``; 1 for one of zeros, and one that is not
    finite."""

    name: str
    source: Any
    levels: int

    casts: ClassVar[bool] = True
    how: ClassVar[str] = "scales of quantised rows, taken when they are read"
    dtype = property(lambda self: wide_of(self.source.dtype))
    shape = property(lambda self: (*self.source.shape[:-1], 1))
    chunk = property(lambda self: (*self.source.chunk[:-1], 1))
    per_element = property(lambda self: 3 * self.dtype.itemsize * self.source.shape[-1])

    def needs(self, box: Box) -> Box:
        return Box((*box.offset[:-1], 0), (*box.shape[:-1], self.source.shape[-1]))

    def _read(self, box: Box, out: np.ndarray) -> int:
        rows = self.needs(box)
        held, nbytes = _at_work(self.source, rows, self.dtype)
        out[...] = np.asarray(row_scales(asarray(held, copy=False), self.levels))
        count_lost_rows(self.name, held, out, rows.offset)
        return nbytes


@dataclass(frozen=True, slots=True)
class RowIntegers(RowScales):
    """The rows of a tensor in units of their scale: int8, or four bits each, two a byte, the first in the lower
    half."""

    how: ClassVar[str] = "quantised rows, made when they are read"
    dtype = property(lambda self: np.dtype(np.int8 if self.levels > 7 else np.uint8))
    shape = property(lambda self: self._packed(*self.source.shape))
    chunk = property(lambda self: rows_of(self.shape))
    per_element = property(lambda self: 8 * wide_of(self.source.dtype).itemsize)

    def _packed(self, *shape: int) -> tuple[int, ...]:
        return (*shape[:-1], -(-shape[-1] // (1 if self.levels > 7 else 2)))

    def _read(self, box: Box, out: np.ndarray) -> int:
        rows, nbytes = _at_work(self.source, self.needs(box), wide_of(self.source.dtype))
        wide = asarray(rows, device="cpu", copy=False)
        with np.errstate(invalid="ignore"):
            q = np.asarray(row_integers(wide, row_scales(wide, self.levels), self.levels))
        held = q if self.levels > 7 else pack(q)
        out[...] = held[..., box.offset[-1] : box.stop[-1]]
        return nbytes


def cancels(weights: Sequence[float]) -> bool:
    """Whether weights sum to 0 as far as float32 tells, in which arrays are multiplied by them: nothing is divided by
    that.

    >>> cancels([0.1, 0.2, -0.3]), cancels([1e-9, 2e-9])
    (True, False)
    """
    return abs(math.fsum(weights)) <= 2.0**-20 * math.fsum(map(abs, weights))
