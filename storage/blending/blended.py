"""The lazy tensor of a blend: a box of it is computed from the same box of its sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ..readers.tensor import read_into
from ..rules.casting import cast, count_overflows
from ..rules.lazy_tensors import OfParts
from ..rules.measured import Measured
from .methods import Formula, Piece, real, rounded
from .statistics import Jobs


@dataclass(frozen=True, slots=True)
class Blended(OfParts):
    """A tensor made of ``parts`` of its shape by the formula ``method``, which computes in ``work``, and stored as
    ``dtype``."""

    name: str
    parts: tuple[Any, ...]
    method: Formula
    work: np.dtype
    dtype: np.dtype
    measured: Measured | None = None  # of a formula that needs numbers about the whole tensor
    casts: ClassVar[bool] = True
    how: ClassVar[str] = "blended of other arrays when it is read"

    source = property(lambda self: self.parts[0])
    shape = property(lambda self: self.parts[0].shape)
    chunk = property(lambda self: self.parts[0].chunk)
    # Some arrays of the width of computing for each source.
    per_element = property(lambda self: 4 * real(self.work).itemsize * len(self.parts))

    def needs(self, box: Box) -> Box:
        """The box of the sources: whole rows where the formula ranks in rows."""
        if not self.method.rows or not box.shape:
            return box
        return Box((*box.offset[:-1], 0), (*box.shape[:-1], self.shape[-1]))

    def cut(self, box: Box) -> Blended:
        """The tensor with the files that a box needs, measured or not."""
        return OfParts.only(self, box)

    def only(self, box: Box) -> Blended:
        if box.size:
            self._facts()  # of all of it, before it is cut
        return self.cut(box)

    def measuring(self) -> Jobs:
        return self.method.measuring(self)

    def _facts(self) -> Any:
        return None if self.measured is None else self.measured.of(self)

    def piece(self, box: Box) -> Piece:
        """The elements of a box of all sources, as the formula takes them."""
        return self.evaluated(lambda: self._filled(box))[0]

    def _filled(self, box: Box) -> tuple[Piece, int]:
        held, total = [], 0
        for p in self.parts:
            a, n = read_into(p, box)
            if a.dtype != self.work:
                a = cast(self.name, a, self.work, box.offset)
            held.append(a.astype(real(self.work), copy=False))
            total += n
        return Piece(box, self.shape, self.work, held), total

    def _read(self, box: Box, out: np.ndarray) -> int:
        needs = self.needs(box)
        piece, nbytes = self._filled(needs)
        with np.errstate(all="ignore"):
            made = self.method.combine(piece, self._facts())
            if self.dtype != self.work:
                made = rounded(made, self.work)  # first the dtype of the result, then that of the file
        inner = (*box.within(needs).slices, ...)
        made = made[inner]
        count_overflows(self.name, made, [x[inner] for x in piece.held], box.offset)
        out[...] = cast(self.name, made, self.dtype, box.offset)
        return nbytes
