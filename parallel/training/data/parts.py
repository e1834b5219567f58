"""Samples that lie in numbered parts, such as the chunks of a Dask collection."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....arrays.core import tree as trees


def from_parts(ids: np.ndarray, starts: Sequence[int], part: Callable[[int], Any]) -> Any:
    """Rows picked from numbered parts, each read once; ``starts`` are the numbers of their first rows."""
    # Of several parts that begin at one number all but the last are empty.
    of = np.array([bisect.bisect_right(starts, int(i)) - 1 for i in ids], dtype=np.int64)
    pieces, places = [], []
    for p in np.unique(of):
        (at,) = np.nonzero(of == p)
        held = part(int(p))
        local = ids[at] - starts[p]
        pieces.append(trees.tree_map(lambda x, local=local: x[local], held))
        places.append(at)
    back = np.argsort(np.concatenate(places), kind="stable")
    return trees.tree_map(lambda *xs: np.concatenate(xs)[back], *pieces)
