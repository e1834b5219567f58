"""Products under NumPy's names and with its rules for dimensions."""

from __future__ import annotations

from typing import Any

from ..core.array import Array
from ..core.op import composite
from ..ops import matmul as products
from ..ops.creation import asarray
from ..ops.elementwise import conj
from ..ops.manipulation import reshape
from ..ops.matmul import matmul, tensordot


@composite("dot")
def dot(x: Any, y: Any, /) -> Array:
    """The last dimension of ``x`` with the last but one of ``y``; a product with a scalar.

    Of a vector it is the only one.

    >>> mt.dot(mt.arange(3), mt.arange(3))
    Array(5)
    """
    x, y = asarray(x), asarray(y)
    if x.ndim == 0 or y.ndim == 0:
        return x * y
    if x.ndim <= 2 and y.ndim <= 2:
        return matmul(x, y)
    return tensordot(x, y, axes=((x.ndim - 1,), (max(y.ndim - 2, 0),)))


@composite("vdot")
def vdot(x: Any, y: Any, /) -> Array:
    """The product of two arrays as flat vectors, the first conjugated.

    >>> mt.vdot(mt.asarray([1j, 1.0]), mt.asarray([1j, 2.0]))
    Array(3.+0.j, dtype=complex128)
    """
    return matmul(conj(reshape(asarray(x), (-1,))), reshape(asarray(y), (-1,)))


@composite("inner")
def inner(x: Any, y: Any, /) -> Array:
    """Products of the last dimensions, nothing conjugated.

    >>> mt.inner(mt.ones((2, 3)), mt.ones(3))
    Array([3., 3.], dtype=float64)
    """
    x, y = asarray(x), asarray(y)
    return x * y if x.ndim == 0 or y.ndim == 0 else tensordot(x, y, axes=((x.ndim - 1,), (y.ndim - 1,)))


def outer(x: Any, y: Any, /) -> Array:
    """Products of each element of one flat array with each of another.

    >>> mt.outer([1, 2], [1, 10])
    Array([[ 1, 10],
           [ 2, 20]])
    """
    return products.outer(reshape(asarray(x), (-1,)), reshape(asarray(y), (-1,)))


@composite("cross")
def cross(x: Any, y: Any, /, *, axis: int | None = -1) -> Array:
    """Vector products of vectors of length 3 along ``axis`` (None: the last one, as in NumPy).

    >>> mt.cross(mt.asarray([1, 0, 0]), mt.asarray([0, 1, 0]))
    Array([0, 0, 1])
    """
    return products.cross(asarray(x), asarray(y), axis=-1 if axis is None else axis)


@composite("matvec")
def matvec(x: Any, y: Any, /) -> Array:
    """Matrices times vectors, both in the last dimensions.

    >>> mt.matvec(mt.ones((4, 2, 3)), mt.ones(3)).shape
    (4, 2)
    """
    return matmul(asarray(x), asarray(y)[..., None])[..., 0]


@composite("vecmat")
def vecmat(x: Any, y: Any, /) -> Array:
    """Conjugated vectors times matrices, both in the last dimensions.

    >>> mt.vecmat(mt.ones(2), mt.ones((4, 2, 3))).shape
    (4, 3)
    """
    return matmul(conj(asarray(x))[..., None, :], asarray(y))[..., 0, :]
