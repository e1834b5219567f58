"""Triangles of matrices, and their masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.backend import cupy_backend, on_device_of
from ..core.array import Array
from ..core.dispatch import Deferred, made, wrap
from ..core.errors import ShapeError
from .creation import arange, asarray, beside, placed
from .elementwise import where

LARGE = 1 << 20
"""Elements of a mask that a mesh is not sent: it is made where the blocks are."""


def lower_triangle(like: Array, k: int = 0) -> Array:
    """Which elements of the matrices in ``like`` are on or below the ``k``-th diagonal: a mask that broadcasts against
    ``like``.

    >>> lower_triangle(mt.zeros((2, 3))).tolist()
    [[True, False, False], [True, True, False]]
    """
    rows, cols = like.shape[-2:]
    if isinstance(like._buf, Deferred) and like._buf.host is not None and rows * cols > LARGE:
        row = like._buf.host.replicate(arange(rows)[:, None])
        return row >= arange(-k, cols - k)
    if not isinstance(like._buf, Deferred | np.ndarray):  # made where it is used
        with on_device_of(like._buf):
            return made(wrap(cupy_backend().xp.tri(rows, cols, k, dtype=bool)))
    return placed(np.tri(rows, cols, k, dtype=bool), beside(like))


def _triangle(name: str, x: Any, k: int, lower: bool) -> Array:
    x = asarray(x)
    if x.ndim < 2:
        raise ShapeError(f"[{name}] needs at least two dimensions, got shape {x.shape}")
    below = lower_triangle(x, k if lower else k - 1)
    return where(below if lower else ~below, x, False if x.dtype.kind == "b" else 0)


def tril(x: Any, /, k: int = 0) -> Array:
    """The lower triangle of matrices: zeros above the ``k``-th diagonal.

    >>> mt.tril(mt.asarray([[1, 2], [3, 4]]))
    Array([[1, 0],
           [3, 4]])
    """
    return _triangle("tril", x, k, lower=True)


def triu(x: Any, /, k: int = 0) -> Array:
    """The upper triangle of matrices: zeros below the ``k``-th diagonal.

    >>> mt.triu(mt.asarray([[1, 2], [3, 4]]))
    Array([[1, 2],
           [0, 4]])
    """
    return _triangle("triu", x, k, lower=False)
