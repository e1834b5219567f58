"""Sparse gradients, which are zero almost everywhere: their public view.

A read of a large array by an index (``table[ids]``, an embedding, ``x[:, columns]``, ``mt.take_along_axis``, a mask, a
slice) has a gradient that is zero at all other places. It is an :class:`~meshtape.Array`, which any function takes.
Only its places and numbers are kept until a function needs the whole of it. :func:`sparse_gradient` shows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import refuse_history, wrap
from ...arrays.core.errors import ShapeError
from ...arrays.core.formatting import human_bytes
from ...arrays.indexing.rows import Rows
from ...arrays.indexing.sparse_cotangent import SparseCotangent
from ...arrays.ops.creation import asarray


@dataclass(frozen=True, eq=False)
class SparseGradient:
    """A gradient as the places where it is not zero, and the numbers there; made by :func:`sparse_gradient`.

    Attributes
    ----------
    axes
        The dimensions that were read at places, ascending.
    indices
        For each of them an integer array of shape ``(k,)``: the places, each once, in C order.
    values
        Shape ``(k, *rest)``: at each place the elements along the other dimensions, in their order. A place may hold
        zeros.
    shape
        Of the dense gradient.
    """

    axes: tuple[int, ...]
    indices: tuple[Array, ...]
    values: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the places and of the numbers."""
        return self.values.nbytes + sum(i.nbytes for i in self.indices)

    def dense(self) -> Array:
        """The gradient as an array of :attr:`shape`. It stays sparse inside until an op needs the whole of it."""
        ids: Any = np.zeros(len(self.values), np.intp)
        for d, i in zip(self.axes, self.indices, strict=True):
            ids = ids * self.shape[d] + np.asarray(i)
        values = np.asarray(self.values).reshape(len(ids), -1) if len(ids) else np.zeros((0, 1), self.dtype)
        if not len(ids):
            return asarray(np.zeros(self.shape, self.dtype), device=self.values.device)
        out = wrap(SparseCotangent.of_rows(Rows(self.axes, ids, values), self.shape).compact())
        return out if self.values.device.kind == "cpu" else out.to_device(self.values.device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a sparse gradient has no dense array to share: it is made by a copy")
        out = np.array(self.dense())
        return out if dtype is None else out.astype(dtype, copy=False)

    def __repr__(self) -> str:
        places = math.prod(self.shape[d] for d in self.axes)
        whole = math.prod(self.shape) * self.dtype.itemsize
        along = f"axis {self.axes[0]}" if len(self.axes) == 1 else f"axes {self.axes}"
        return (
            f"SparseGradient(shape={self.shape}, dtype={self.dtype.name}, {len(self.values)} of {places} places along "
            f"{along}, {human_bytes(self.nbytes)} instead of {human_bytes(whole)})"
        )


def sparse_gradient(g: Any, /) -> SparseGradient:
    """The places where a gradient is not zero, and its numbers there.

    A gradient of an array that was read at some places is kept in this form until something needs the whole of it,
    which this function does not. These keep the form: ``+``, ``-`` of two such gradients; products with and quotients
    by a finite number; ``abs``, ``square``, ``sqrt``, ``sign``, ``astype``; clipping. ``parameter - rate * gradient``
    changes only the places that were read.

    Parameters
    ----------
    g
        A gradient; any array. One that is kept dense is searched for rows, along its first dimension, that are not
        zero.

    Raises
    ------
    ShapeError
        For a 0-d array.
    GradientError, TracedValueError
        For a gradient inside another gradient, or inside a function that is traced.

    Examples
    --------
    >>> g = mt.grad(lambda t: t[:, mt.asarray([7, 2, 7])].sum())(mt.zeros((3, 10_000)))
    >>> mt.sparse_gradient(g)
    SparseGradient(shape=(3, 10000), dtype=float64, 2 of 10000 places along axis 1, 64 B instead of 234.4 KiB)
    >>> s = mt.sparse_gradient(g)
    >>> s.axes, s.indices[0].tolist(), s.values.tolist()
    ((1,), [2, 7], [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    >>> bool(mt.all(s.dense() == g))
    True
    """
    g = g if isinstance(g, Array) else asarray(g)
    refuse_history("sparse_gradient", g, "which places it shows has no derivative; compute with the gradient itself")
    shape = tuple(g.shape)
    if not shape:
        raise ShapeError("[sparse_gradient] a 0-d array has no places")
    if type(g._buf) is not SparseCotangent:
        host = g._concrete()
        ids = np.flatnonzero((host != 0).reshape(len(host), math.prod(shape[1:])).any(axis=1))
        there = "cpu" if g.sharding is not None else g.device
        return SparseGradient((0,), (asarray(ids, device=there),), asarray(host[ids], device=there), shape)
    axes, ids, values = g._buf.summed()
    rest = tuple(n for d, n in enumerate(shape) if d not in axes)
    indices = np.unravel_index(ids, [shape[d] for d in axes]) if len(axes) != 1 else (ids,)
    return SparseGradient(axes, tuple(map(wrap, indices)), wrap(values.reshape(len(ids), *rest)), shape)


def gradient_rows(g: Any, /) -> tuple[Array, Array]:
    """The rows of a gradient that are not zero: their numbers, and the rows.

    It is :func:`sparse_gradient` for the gradient of a table of which rows were read (``table[ids]``, an embedding):
    that is not made dense by it.

    Returns
    -------
    ids, rows
        Ascending integers, and the part ``g[ids]``. Of a gradient that is kept otherwise, all rows with an element that
        is not zero.

    Examples
    --------
    >>> g = mt.grad(lambda t: t[mt.asarray([5, 2, 5])].sum())(mt.zeros((10_000, 2)))
    >>> mt.gradient_rows(g)
    (Array([2, 5]), Array([[1., 1.],
           [2., 2.]], dtype=float64))
    """
    found = sparse_gradient(g)
    if found.axes != (0,):
        found = sparse_gradient(np.asarray(g))
    return found.indices[0], found.values
