"""The cotangent of an array that was read at some places: the reads, and what came back for each.

A loop that reads ``x[i]`` for every ``i`` would, with a dense cotangent for each read, take time and memory of the square of what it
reads. Here the cotangents of the reads are collected, and added into one dense array when something needs that. (Reads of whole rows
by index arrays have a form of their own, which also outlives the backward pass: :class:`.rowsum.RowSum`.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .indexing import Template, is_basic, numpy_key
from .rowsum import RowSum


class IndexSum:
    """Zeros of a shape, with values added at indices. The backward pass alone holds such an object, and may change it."""

    __slots__ = ("count", "dtype", "parts", "shape")

    def __init__(self, template: Template, arrays: Sequence[np.ndarray], values: Any, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, values.dtype
        self.parts: list[Any] = [(template, arrays, values)]
        self.count = values.size

    def concrete(self) -> np.ndarray:
        """The dense array."""
        return self.add_to(np.zeros(self.shape, self.dtype))

    def add_to(self, out: np.ndarray) -> np.ndarray:
        """``out``, with the values added in place."""
        for part in self.parts:
            if type(part) is RowSum:
                part.add_to(out)
                continue
            template, arrays, values = part
            key = numpy_key(template, arrays)
            if is_basic(template):
                out[key] += values
            else:
                np.add.at(out, key, values)
        return out

    def plus(self, other: Any) -> Any:
        """The sum with a buffer, a :class:`RowSum` or another such sum: sparse as long as that takes less memory than dense."""
        if type(other) is IndexSum:
            self.parts += other.parts
            self.count += other.count
        elif type(other) is RowSum:
            self.parts.append(other)
            self.count += other.rows.size
        else:
            return self.add_to(np.array(other))
        return self if self.count < math.prod(self.shape) else self.concrete()


def is_sparse(g: Any) -> bool:
    """Whether a cotangent is kept as parts of a dense one."""
    return isinstance(g, RowSum | IndexSum)
