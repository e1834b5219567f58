"""Tables of embeddings whose rows come from others in a new order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ..readers.tensor import read_into, rows_of
from ..rules.casting import cast
from ..rules.lazy_tensors import OfParts

ZERO, MEAN = -1, -2
Mean = tuple[tuple[tuple[int, int, int], ...], int]


@dataclass(frozen=True, slots=True)
class TokenRows(OfParts):
    """Rows of several tables in a new order. Row i is row ``rows[i]`` of table ``tables[i]``, or zero, or ``means[i]``:
    the sum of (table, row, times), divided by a number."""

    name: str
    parts: tuple[Any, ...]
    tables: tuple[int, ...]
    rows: tuple[int, ...]
    means: tuple[tuple[int, Mean], ...]
    dtype: np.dtype
    how: ClassVar[str] = "rows of other arrays in another order"

    source = property(lambda self: self.parts[0])
    shape = property(lambda self: (len(self.rows), *self.parts[0].shape[1:]))
    chunk = property(lambda self: rows_of(self.shape))

    def only(self, box: Box) -> TokenRows:
        return self

    def planned(self, box: Box) -> int:
        return box.size * self.parts[0].dtype.itemsize

    def _at(self, row: int, n: int, box: Box) -> Box:
        return Box((row, *box.offset[1:]), (n, *box.shape[1:]))

    def pieces(self, box: Box, kept: int) -> Iterator[Box]:
        return iter([Box.whole(box.shape)] * bool(box.size))

    def _read(self, box: Box, out: np.ndarray) -> int:
        start, stop, nbytes, i = box.offset[0], box.stop[0], 0, box.offset[0]
        means = dict(self.means)
        while i < stop:
            table, n = self.tables[i], 1
            if table >= 0:
                while i + n < stop and self.tables[i + n] == table and self.rows[i + n] == self.rows[i] + n:
                    n += 1
                held, read = read_into(self.parts[table], self._at(self.rows[i], n, box))
                out[i - start : i - start + n] = cast(self.name, held, self.dtype, (i, *box.offset[1:]))
                nbytes += read
            elif table == ZERO:
                out[i - start] = 0
            else:
                if i > start and means.get(i - 1) == means[i]:  # padding has one mean for all
                    out[i - start] = out[i - 1 - start]
                else:
                    total, (summed, count) = np.zeros(out.shape[1:]), means[i]
                    for t, row, times in summed:
                        held, read = read_into(self.parts[t], self._at(row, 1, box))
                        total, nbytes = total + held[0].astype(np.float64) * times, nbytes + read
                    out[i - start] = cast(self.name, total / count, self.dtype, (i, *box.offset[1:]))
            i += n
        return nbytes
