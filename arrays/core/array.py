"""The ``Array`` type: a buffer, and its name on tapes.

Operators, methods, indexing and display are attached to it from :mod:`meshtape.arrays.interface`, when the package is
put together: no op needs them to make a result.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from .errors import ArgumentError

ids = itertools.count(1)


class Array:
    """A dense n-dimensional array of numbers, on a CPU, on a GPU, or split over a mesh.

    Made by :func:`asarray` and the creation functions, never by calling the class.
    """

    __slots__ = ("__weakref__", "_buf", "_id")
    _buf: Any
    _id: int  # the name on tapes, 0 until a tape has seen it

    def __init__(self) -> None:
        raise ArgumentError("make arrays with meshtape.asarray(...), zeros(...), … : Array() is not a constructor")

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        return self._buf.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self._buf.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._buf.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._buf.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements (of the whole array, where it is split)."""
        return int(self._buf.nbytes)


next_id = ids.__next__
"""A name that no value has had."""


def new_id(x: Array) -> int:
    """The name of this value on tapes, given on first use."""
    name = x._id
    if not name:
        name = x._id = next(ids)
    return name


class _Empty:
    """A class with no more than every class has."""


def attach(part: type) -> None:
    """Give :class:`Array` the methods and properties of a class."""
    for name, value in vars(part).items():
        if name not in vars(_Empty):
            if hasattr(value, "__qualname__") and value.__qualname__.startswith(f"{part.__qualname__}."):
                value.__qualname__ = f"Array.{name}"
            setattr(Array, name, value)
