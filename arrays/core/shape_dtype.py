"""Shape and dtype of a value before it is computed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class ShapeDtype(NamedTuple):
    """The shape and dtype of a value, known before it is computed."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
