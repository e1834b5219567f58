"""New rows of an array that grows, made of the rows that are stored: their mean, or numbers drawn with their mean and
deviation.

Each column has its own mean and deviation (of the population), in float64, over tiles of rows that only the shape
decides; what is drawn is a function of the seed, the array's name and the place. So windows, workers and their order
change nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ... import arrays
from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError
from ..readers.tensor import read_into
from .casting import cast
from .lazy_tensors import DerivedTensor, of_source

_TILE = 1 << 19  # elements of whole rows


@dataclass(frozen=True, slots=True)
class GrownRows(DerivedTensor):
    """``count`` rows beyond the end of ``source`` along ``axis``, for which all rows of their columns are read."""

    name: str
    source: Any
    axis: int
    count: int
    noise: bool
    seed: int
    casts: ClassVar[bool] = True

    dtype = of_source("dtype")

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.source.shape
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    @property
    def chunk(self) -> tuple[int, ...]:
        return tuple(min(c, n) for c, n in zip(self.source.chunk, self.shape, strict=True))

    def _rows(self, box: Box, start: int, stop: int) -> Box:
        k = self.axis
        offset = (*box.offset[:k], start, *box.offset[k + 1 :])
        return Box(offset, (*box.shape[:k], stop - start, *box.shape[k + 1 :]))

    def needs(self, box: Box) -> Box:
        return self._rows(box, 0, self.source.shape[self.axis])

    def pieces(self, box: Box, kept: int) -> Iterator[Box]:
        return iter([Box.whole(box.shape)] * bool(box.size))

    def _statistics(self, box: Box) -> tuple[np.ndarray, np.ndarray, int]:
        """(mean, deviation) of each column of a box, of length 1 along the axis; and the bytes that were read."""
        n = self.source.shape[self.axis]
        step = max(1, _TILE * n // math.prod(self.source.shape))
        count, nbytes = 0, 0
        mean = squares = np.zeros((), np.float64)
        for start in range(0, n, step):
            part = self._rows(box, start, min(start + step, n))
            held, n_read = read_into(self.source, part)
            nbytes += n_read
            # Columns as rows in memory: each is summed by itself, however many there are.
            tile = np.ascontiguousarray(np.moveaxis(held, self.axis, -1)).astype(np.float64)
            k = tile.shape[-1]
            own = tile.sum(-1, keepdims=True) / k
            gap = own - mean
            squares = squares + ((tile - own) ** 2).sum(-1, keepdims=True) + gap**2 * (count * k / (count + k))
            mean = mean + gap * (k / (count + k))
            count += k
        if not np.isfinite(mean).all():
            raise CheckpointError(
                f"{self.name!r} holds values that are not finite, so its new rows cannot be made of its mean; pad it "
                "with value="
            )
        back = (np.moveaxis(a, -1, self.axis) for a in (mean, np.sqrt(squares / n)))
        return (*back, nbytes)

    def _read(self, box: Box, out: np.ndarray) -> int:
        with np.errstate(all="ignore"):
            mean, deviation, nbytes = self._statistics(box)
        rows = np.broadcast_to(mean, box.shape)
        if self.noise:
            k, n = self.axis, self.source.shape[self.axis]
            whole = (*self.shape[:k], n + self.count, *self.shape[k + 1 :])
            place = self._rows(box, n + box.offset[k], n + box.stop[k])
            key = arrays.random.fold_in(arrays.random.key(self.seed), zlib.crc32(self.name.encode()))
            draw = arrays.OPS["random_normal"].impl
            rows = mean + deviation * draw(
                np, np.asarray(key), place.shape, place.offset, whole, np.dtype(np.float64), mean=0.0, std=1.0
            )
        out[...] = cast(self.name, np.ascontiguousarray(rows), self.dtype, box.offset)
        return nbytes
