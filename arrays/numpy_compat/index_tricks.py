"""Positions of elements: as coordinates, as index arrays, as places in C order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Deferred
from ..core.errors import ArgumentError, ArrayIndexError, ShapeError
from ..ops.creation import asarray
from ..ops.manipulation import astype, reshape, stack
from ..reductions.reductions import all
from ..reductions.searching import nonzero


def indices(dimensions: Sequence[int], /, dtype: Any = int) -> Array:
    """The coordinates of each element of an array of a shape, the dimension first.

    >>> mt.indices((2, 2))
    Array([[[0, 0],
            [1, 1]],
    <BLANKLINE>
           [[0, 1],
            [0, 1]]])
    """
    return asarray(np.indices(shape_rules.as_shape("indices", dimensions))).astype(dtype)


def ix_(*vectors: Any) -> tuple[Array, ...]:
    """Index arrays that select the rows, columns, … of all combinations.

    >>> mt.arange(9).reshape(3, 3)[mt.ix_([0, 2], [1, 2])]
    Array([[1, 2],
           [7, 8]])
    """
    out = []
    for i, v in enumerate(vectors):
        v = asarray(v)
        if v.ndim != 1:
            raise ShapeError(f"[ix_] takes vectors, got shape {v.shape}")
        v = nonzero(v)[0] if v.dtype.kind == "b" else v.astype(np.intp) if not v.size else v
        out.append(reshape(v, (1,) * i + (v.size,) + (1,) * (len(vectors) - i - 1)))
    return tuple(out)


def diag_indices(n: int, /, ndim: int = 2) -> tuple[Array, ...]:
    """Index arrays of the main diagonal of an array with ``ndim`` dimensions of length ``n``.

    >>> mt.ones((3, 3))[mt.diag_indices(3)]
    Array([1., 1., 1.], dtype=float64)
    """
    return (asarray(np.arange(n)),) * ndim


def tril_indices(n: int, /, k: int = 0, m: int | None = None) -> tuple[Array, Array]:
    """Index arrays of the elements at and below the ``k``-th diagonal of an ``(n, m)`` matrix.

    >>> mt.tril_indices(2)
    (Array([0, 1, 1]), Array([0, 0, 1]))
    """
    return tuple(map(asarray, np.tril_indices(n, k, m)))


def triu_indices(n: int, /, k: int = 0, m: int | None = None) -> tuple[Array, Array]:
    """Index arrays of the elements at and above the ``k``-th diagonal of an ``(n, m)`` matrix.

    >>> mt.triu_indices(2)
    (Array([0, 0, 1]), Array([0, 1, 1]))
    """
    return tuple(map(asarray, np.triu_indices(n, k, m)))


def _matrix(name: str, x: Any) -> tuple[int, ...]:
    shape = asarray(x).shape
    if len(shape) != 2:
        raise ShapeError(f"[{name}] takes a matrix, got shape {shape}")
    return shape


def diag_indices_from(x: Any, /) -> tuple[Array, ...]:
    """:func:`diag_indices` of an array.

    >>> mt.diag_indices_from(mt.ones((2, 2)))
    (Array([0, 1]), Array([0, 1]))
    """
    shape = asarray(x).shape
    if len(shape) < 2 or len(set(shape)) > 1:
        raise ShapeError(f"[diag_indices_from] takes an array of several dimensions of one length, got shape {shape}")
    return diag_indices(shape[0], len(shape))


def tril_indices_from(x: Any, /, k: int = 0) -> tuple[Array, Array]:
    """:func:`tril_indices` of a matrix.

    >>> mt.tril_indices_from(mt.ones((2, 2)))
    (Array([0, 1, 1]), Array([0, 0, 1]))
    """
    n, m = _matrix("tril_indices_from", x)
    return tril_indices(n, k, m)


def triu_indices_from(x: Any, /, k: int = 0) -> tuple[Array, Array]:
    """:func:`triu_indices` of a matrix.

    >>> mt.triu_indices_from(mt.ones((2, 2)))
    (Array([0, 0, 1]), Array([0, 1, 1]))
    """
    n, m = _matrix("triu_indices_from", x)
    return triu_indices(n, k, m)


def argwhere(x: Any, /) -> Array:
    """The coordinates of the elements that are not zero, one row an element.

    >>> mt.argwhere(mt.asarray([[0, 1], [1, 0]]))
    Array([[0, 1],
           [1, 0]])
    """
    x = asarray(x)
    if x.ndim == 0:
        return asarray(np.argwhere(np.asarray(x)))
    return stack(nonzero(x), axis=1)


def flatnonzero(x: Any, /) -> Array:
    """The flat positions, in C order, of the elements that are not zero.

    >>> mt.flatnonzero(mt.asarray([[0, 1], [1, 0]]))
    Array([1, 2])
    """
    return nonzero(reshape(asarray(x), (-1,)))[0]


def unravel_index(places: Any, shape: Sequence[int], /) -> tuple[Array, ...]:
    """Coordinates, in an array of a shape, of places in C order.

    Raises
    ------
    IndexError
        Where a place is outside the array.

    Examples
    --------
    >>> mt.unravel_index(5, (2, 3))
    (Array(1), Array(2))
    """
    places, shape = asarray(places), tuple(int(n) for n in shape)
    total = int(np.prod(shape, dtype=object))
    if places.dtype.kind not in "iu":
        raise ArgumentError(f"[unravel_index] places are integers, got {places.dtype}")
    if not isinstance(places._buf, Deferred) and not bool(all((places >= 0) & (places < total))):
        raise ArrayIndexError(
            f"[unravel_index] a place is outside an array of shape {shape}, which has {total} elements"
        )
    if max(shape, default=0) > np.iinfo(places.dtype).max:
        places = astype(places, np.int64)
    out = []
    for n in reversed(shape):
        out.append(places % n)
        places = places // n
    return tuple(reversed(out))


def ravel_multi_index(coordinates: Sequence[Any], shape: Sequence[int], /) -> Array:
    """Places in C order of coordinates in an array of a shape.

    Raises
    ------
    IndexError
        Where a coordinate is outside the array.

    Examples
    --------
    >>> mt.ravel_multi_index((1, 2), (2, 3))
    Array(5)
    """
    if len(coordinates) != len(shape):
        raise ShapeError(f"[ravel_multi_index] {len(coordinates)} coordinates for a shape of {len(shape)} dimensions")
    out: Any = asarray(0)
    for i, (c, n) in enumerate(zip(coordinates, shape, strict=True)):
        c = asarray(c)
        if c.dtype.kind not in "biu":
            raise ArgumentError(f"[ravel_multi_index] coordinates are integers, got {c.dtype.name}")
        if not isinstance(c._buf, Deferred) and not bool(all((c >= 0) & (c < n))):
            raise ArrayIndexError(f"[ravel_multi_index] a coordinate of dimension {i} is outside its length {n}")
        out = out * int(n) + astype(c, np.int64, copy=False)
    return out
