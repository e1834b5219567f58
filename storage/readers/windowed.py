"""A box of a stored or lazy tensor with the face of an array in memory, of which a part is read at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays.core.blocks import Box
from ..format import dtypes
from ..format.chunk_grid import windows
from .tensor import read_into


def _read(tensor: Any, box: Box) -> np.ndarray:
    return read_into(tensor, box)[0]


class WindowedBlock:
    """The elements of a box, for those who ask for its chunks in order, once or more often. A window of at most
    ``limit`` bytes, or one chunk, is in memory."""

    def __init__(
        self, tensor: Any, box: Box, chunk: tuple[int, ...], limit: int, read: Callable[[Any, Box], np.ndarray] = _read
    ) -> None:
        self.tensor, self.box, self.read = tensor, box, read
        self.dtype, self.shape = dtypes.little(tensor.dtype), box.shape
        self._windows = lambda: windows(box.shape, chunk, tensor.dtype.itemsize, limit)
        self._coming = self._windows()
        self._window, self._data = Box((0,) * len(box.shape), (0,) * len(box.shape)), np.empty(0, self.dtype)

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        spans = [s.indices(n) for s, n in zip(index[:-1], self.box.shape, strict=True)]
        wanted = Box(tuple(a for a, _, _ in spans), tuple(b - a for a, b, _ in spans))
        if not any(wanted.offset):  # from the first chunk on, perhaps once more
            self._coming, self._data = self._windows(), self._data[:0]
        while wanted.intersect(self._window) != wanted or not self._data.size:
            self._window = next(self._coming)
            self._data = self.read(self.tensor, self._window.shifted(self.box.offset))
        return self._data[(*wanted.within(self._window).slices, ...)]
