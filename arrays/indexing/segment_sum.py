"""Segment sums: the sum of the rows of each index, for additions at repeated places.

The sums are formed as the product of a sparse matrix of ones with the rows, which adds them in order, as ``np.add.at``
does, an order of magnitude faster.
"""

from __future__ import annotations

import numpy as np

# Up to this many places they are marked one by one in any case.
_FEW = 1 << 20


def _distinct(ids: np.ndarray, n: int, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids (of ``0 … n-1``) in ascending order, and the position of each id among them."""
    if len(ids) > 1 and bool((ids[1:] > ids[:-1]).all()):
        return ids, np.arange(len(ids))
    if n > _FEW and row_bytes < 18:
        # Marks take nine bytes a place: more than half of the memory of the dense array.
        return np.unique(ids, return_inverse=True)
    # Marking places beats sorting the ids by an order of magnitude.
    hit = np.zeros(n, bool)
    hit[ids] = True
    distinct = np.flatnonzero(hit)
    place = np.empty(n, np.intp)
    place[distinct] = np.arange(len(distinct))
    return distinct, place[ids]


def sum_rows(ids: np.ndarray, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids (of ``0 … n-1``) in ascending order, and for each the sum of its rows; ``rows`` has two
    dimensions.

    Numbers of one or two bytes are summed in float32. The results may share memory with the arguments.
    """
    distinct, place = _distinct(ids, n, rows.shape[1] * rows.dtype.itemsize)
    if len(distinct) == len(ids):
        if distinct is ids:
            return ids, rows
        out = np.empty(rows.shape, rows.dtype)
        out[place] = rows
        return distinct, out
    if rows.strides[0] == 0:
        # All rows are one row, spread by the derivative of a sum: it is counted, and never written out.
        counts = np.bincount(place, minlength=len(distinct))
        wide = np.dtype(np.float32) if rows.dtype.itemsize <= 2 else rows.dtype
        sums = counts.astype(wide.type(0).real.dtype)[:, None] * rows[:1].astype(wide, copy=False)
        return distinct, sums.astype(rows.dtype, copy=False)
    from scipy.sparse import csc_matrix

    wide = rows.astype(np.float32) if rows.dtype.itemsize <= 2 else rows
    ones = np.ones(len(ids), wide.real.dtype)
    shape = (len(distinct), len(ids))
    sums = csc_matrix((ones, place, np.arange(len(ids) + 1)), shape=shape) @ np.ascontiguousarray(wide)
    return distinct, sums.astype(rows.dtype, copy=False)
