"""Dimensions added, exchanged and turned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import linalg
from ..core import shape_rules
from ..core.array import Array
from ..core.errors import ShapeError
from ..core.op import composite
from ..ops.creation import asarray, beside, zeros
from ..ops.manipulation import flip, moveaxis, permute_dims, reshape, tile
from ..statistics.interpolation import diag


def _at_least(x: Any, ndim: int) -> Array:
    x = asarray(x)
    if x.ndim >= ndim:
        return x
    shape = x.shape or (1,)
    return reshape(x, shape if ndim == 1 else (*(1,) * (2 - len(shape)), *shape, *(1,) * (ndim - 2)))


def _each(xs: tuple[Any, ...], ndim: int) -> Any:
    found = tuple(_at_least(x, ndim) for x in xs)
    return found[0] if len(found) == 1 else found


def atleast_1d(*arrays: Any) -> Any:
    """Scalars as vectors of one element; a tuple for several arrays.

    >>> mt.atleast_1d(3.0)
    Array([3.], dtype=float64)
    """
    return _each(arrays, 1)


def atleast_2d(*arrays: Any) -> Any:
    """Vectors as one row; a tuple for several arrays.

    >>> mt.atleast_2d(mt.arange(3)).shape
    (1, 3)
    """
    return _each(arrays, 2)


def atleast_3d(*arrays: Any) -> Any:
    """Vectors of length n as ``(1, n, 1)``, matrices with one more dimension behind; a tuple for several arrays.

    >>> mt.atleast_3d(mt.ones((2, 4))).shape
    (2, 4, 1)
    """
    return _each(arrays, 3)


def transpose(x: Any, /, axes: Sequence[int] | None = None) -> Array:
    """Dimensions in the order ``axes``, reversed without it.

    >>> mt.transpose(mt.ones((2, 3, 4))).shape
    (4, 3, 2)
    """
    x = asarray(x)
    return permute_dims(x, tuple(range(x.ndim))[::-1] if axes is None else axes)


def swapaxes(x: Any, axis1: int, axis2: int, /) -> Array:
    """Two dimensions exchanged.

    >>> mt.swapaxes(mt.ones((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """
    x = asarray(x)
    order = list(range(x.ndim))
    a, b = (shape_rules.one_axis("swapaxes", i, x.ndim) for i in (axis1, axis2))
    order[a], order[b] = b, a
    return permute_dims(x, order)


def ravel(x: Any, /, order: str = "C") -> Array:
    """The elements in C order, in one dimension; with ``order="F"`` the first index runs fastest.

    >>> mt.ravel(mt.ones((2, 3))).shape
    (6,)
    """
    return reshape(asarray(x), (-1,), order=order)


def flipud(x: Any, /) -> Array:
    """The first dimension reversed.

    >>> mt.flipud(mt.arange(3))
    Array([2, 1, 0])
    """
    return flip(x, axis=0)


def fliplr(x: Any, /) -> Array:
    """The second dimension reversed.

    >>> mt.fliplr(mt.asarray([[1, 2], [3, 4]]))
    Array([[2, 1],
           [4, 3]])
    """
    return flip(x, axis=1)


@composite("rot90")
def rot90(x: Any, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Array:
    """Turned ``k`` times by 90 degrees, from the first of ``axes`` towards the second.

    >>> mt.rot90(mt.asarray([[1, 2], [3, 4]]))
    Array([[2, 4],
           [1, 3]])
    """
    x = asarray(x)
    a, b = (shape_rules.one_axis("rot90", i, x.ndim) for i in axes)
    if a == b:
        raise ShapeError(f"[rot90] turns in a plane of two different axes, got {axes}")
    k %= 4
    if k == 2:
        return flip(x, axis=(a, b))
    if k == 1:
        return swapaxes(flip(x, axis=b), a, b)
    return flip(swapaxes(x, a, b), axis=b) if k else x


def diagonal(x: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """Diagonals of the matrices in the dimensions ``axis1`` and ``axis2``, as a last dimension.

    `mt.linalg.diagonal` takes those of the last two dimensions.

    >>> mt.diagonal(mt.asarray([[1, 2], [3, 4]]))
    Array([1, 4])
    """
    return linalg.diagonal(moveaxis(asarray(x), (axis1, axis2), (-2, -1)), offset=offset)


def trace(x: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """Sums of the diagonals of the matrices in the dimensions ``axis1`` and ``axis2``.

    >>> mt.trace(mt.asarray([[1, 2], [3, 4]]))
    Array(5)
    """
    return linalg.trace(moveaxis(asarray(x), (axis1, axis2), (-2, -1)), offset=offset)


def diagflat(x: Any, /, k: int = 0) -> Array:
    """A matrix with the flat elements on its ``k``-th diagonal.

    >>> mt.diagflat([1, 2])
    Array([[1, 0],
           [0, 2]])
    """
    return diag(ravel(x), k)


def rollaxis(x: Any, axis: int, /, start: int = 0) -> Array:
    """The dimension ``axis`` moved to stand before the one that is now at ``start``.

    :func:`moveaxis` says where it comes to stand.

    >>> mt.rollaxis(mt.ones((2, 3, 4)), 2).shape
    (4, 2, 3)
    """
    x = asarray(x)
    axis = shape_rules.one_axis("rollaxis", axis, x.ndim)
    before = start + x.ndim if start < 0 else start
    if not 0 <= before <= x.ndim:
        raise ShapeError(
            f"[rollaxis] start {start} is not between {-x.ndim} and {x.ndim}, for an array of shape {x.shape}"
        )
    return moveaxis(x, axis, before - (axis < before))


@composite("resize")
def resize(x: Any, shape: int | Sequence[int], /) -> Array:
    """The elements in C order as an array of another shape: repeated from the first on, or cut off.

    Zeros where there are none.

    >>> mt.resize(mt.asarray([1, 2, 3]), (2, 2))
    Array([[1, 2],
           [3, 1]])
    """
    flat = ravel(x)
    shape = shape_rules.as_shape("resize", shape)
    size = math.prod(shape)
    if not flat.size:
        return zeros(shape, dtype=flat.dtype, device=beside(flat))
    return reshape(tile(flat, -(-size // flat.size))[:size], shape)
