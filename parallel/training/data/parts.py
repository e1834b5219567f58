"""Samples that lie in numbered parts, such as the chunks of a Dask collection."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....arrays.core import tree as trees


class Sized:
    """Base of sources that find out their number of samples when they are made."""

    _size: int

    def __len__(self) -> int:
        return self._size


class PartedSource(Sized):
    """A source whose samples lie in numbered parts, which ``_load`` reads; ``starts`` are the numbers of their first
    rows. It keeps ``cached`` parts."""

    starts: Sequence[int]
    _load: Callable[[int], Any]

    def __init__(self, cached: int) -> None:
        self.cached = cached
        self._held: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict()}

    def _part(self, number: int) -> Any:
        if number not in self._held:
            self._held[number] = self._load(number)
            while len(self._held) > self.cached:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        return self._held[number]

    def read(self, ids: np.ndarray) -> Any:
        """See :class:`Source`. Each part is read once."""
        ids = np.asarray(ids)
        # Of several parts that begin at one number all but the last are empty.
        of = np.array([bisect.bisect_right(self.starts, int(i)) - 1 for i in ids], dtype=np.int64)
        pieces, places = [], []
        for p in np.unique(of):
            (at,) = np.nonzero(of == p)
            local = ids[at] - self.starts[p]
            pieces.append(trees.tree_map(lambda x, local=local: x[local], self._part(int(p))))
            places.append(at)
        back = np.argsort(np.concatenate(places), kind="stable")
        return trees.tree_map(lambda *xs: np.concatenate(xs)[back], *pieces)
