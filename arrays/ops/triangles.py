"""Masks of the lower triangle of matrices."""

from __future__ import annotations

import numpy as np

from ..core.array import Array
from ..core.dispatch import Deferred
from .creation import arange, asarray, beside

LARGE = 1 << 20
"""Elements of a mask that a mesh is not sent: it is made where the blocks are."""


def lower_triangle(like: Array, k: int = 0) -> Array:
    """Which elements of the matrices in ``like`` are on or below the ``k``-th diagonal: a mask that broadcasts against ``like``.

    >>> import meshtape as mt
    >>> lower_triangle(mt.zeros((2, 3))).tolist()
    [[True, False, False], [True, True, False]]
    """
    rows, cols = like.shape[-2:]
    if isinstance(like._buf, Deferred) and like._buf.host is not None and rows * cols > LARGE:
        row = like._buf.host.replicate(arange(rows)[:, None])
        return row >= arange(-k, cols - k)
    return asarray(np.tri(rows, cols, k, dtype=bool), copy=False, device=beside(like))
