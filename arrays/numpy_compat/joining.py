"""Arrays put together and taken apart."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.pieces import buffer, buffers
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import wrap
from ..core.errors import ArrayIndexError, ShapeError
from ..core.op import composite
from ..ops.creation import asarray, elements
from ..ops.manipulation import broadcast_to, concat, moveaxis, reshape
from ..reductions.searching import take
from ..reductions.sorting import flattened
from .rearranging import atleast_1d, atleast_2d, atleast_3d


@composite("vstack")
def vstack(arrays: Sequence[Any], /) -> Array:
    """Joined as rows: along the first dimension, vectors as one row each.

    >>> mt.vstack([mt.arange(2), mt.arange(2)]).shape
    (2, 2)
    """
    return concat([atleast_2d(a) for a in arrays], axis=0)


@composite("hstack")
def hstack(arrays: Sequence[Any], /) -> Array:
    """Joined side by side: along the second dimension, vectors along their only one.

    >>> mt.hstack([mt.arange(2), mt.arange(3)])
    Array([0, 1, 0, 1, 2])
    """
    found = [atleast_1d(a) for a in arrays]
    return concat(found, axis=0 if found and found[0].ndim == 1 else 1)


@composite("dstack")
def dstack(arrays: Sequence[Any], /) -> Array:
    """Joined along the third dimension.

    >>> mt.dstack([mt.arange(2), mt.arange(2)]).shape
    (1, 2, 2)
    """
    return concat([atleast_3d(a) for a in arrays], axis=2)


@composite("column_stack")
def column_stack(arrays: Sequence[Any], /) -> Array:
    """Vectors as the columns of a matrix; matrices keep theirs.

    >>> mt.column_stack([mt.arange(2), mt.ones((2, 2), mt.int64)])
    Array([[0, 1, 1],
           [1, 1, 1]])
    """
    found = [asarray(a) for a in arrays]
    return concat([a if a.ndim > 1 else reshape(a, (-1, 1)) for a in found], axis=1)


@composite("block")
def block(arrays: Any, /) -> Array:
    """An array of nested lists of blocks.

    The innermost lists join along the last dimension, the next along that before it.

    >>> mt.block([[mt.eye(2), mt.zeros((2, 1))], [mt.ones((1, 3))]])
    Array([[1., 0., 0.],
           [0., 1., 0.],
           [1., 1., 1.]], dtype=float64)
    """

    def depth(a: Any) -> int:
        if not isinstance(a, list):
            return 0
        depths = {depth(b) for b in a}
        if len(depths) != 1:
            raise ShapeError("[block] takes lists that are nested equally deep everywhere, and not empty")
        return 1 + depths.pop()

    def leaves(a: Any) -> list[Any]:
        return [leaf for b in a for leaf in leaves(b)] if isinstance(a, list) else [asarray(a)]

    deep = depth(arrays)
    ndim = max([deep, *(a.ndim for a in leaves(arrays))])

    def joined(a: Any, level: int) -> Array:
        if isinstance(a, list):
            return concat([joined(b, level + 1) for b in a], axis=ndim - deep + level)
        a = asarray(a)
        return reshape(a, (1,) * (ndim - a.ndim) + a.shape)

    return joined(arrays, 0)


@composite("append")
def append(x: Any, values: Any, /, axis: int | None = None) -> Array:
    """``values`` behind ``x``, along ``axis``; both flat without one.

    >>> mt.append(mt.arange(2), 7)
    Array([0, 1, 7])
    """
    return concat([atleast_1d(x), atleast_1d(values)], axis=axis)


# ----- apart ----------------------------------------------------------------------------------------------------------


_MOST_PIECES = 2**24  # each is an Array of some hundred bytes


def _pieces(
    name: str, x: Any, where: int | Sequence[int], axis: int, *, uneven: bool = False, least: int = 0
) -> list[Array]:
    x = asarray(x)
    if x.ndim < least:
        raise ShapeError(f"[{name}] needs an array of {least} or more dimensions, got shape {x.shape}")
    axis = shape_rules.one_axis(name, axis, x.ndim)
    length = x.shape[axis]
    if isinstance(where, int | np.integer):
        if not 1 <= where <= _MOST_PIECES:
            raise ShapeError(f"[{name}] needs from 1 to {_MOST_PIECES:,} pieces, got {where}")
        if length % where and not uneven:
            raise ShapeError(
                f"[{name}] an axis of length {length} does not divide into {where} equal pieces; array_split makes "
                "unequal ones"
            )
        each, longer = divmod(length, int(where))
        ends = np.cumsum([each + (i < longer) for i in range(int(where))]).tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    else:
        cuts = [operator.index(w) for w in where]
        bounds = list(zip([0, *cuts], [*cuts, length], strict=True))
    lead = (slice(None),) * axis
    return [x[(*lead, slice(a, b))] for a, b in bounds]


@composite("split")
def split(x: Any, indices_or_sections: int | Sequence[int], /, axis: int = 0) -> list[Array]:
    """Pieces along ``axis``: so many equal ones, or cut before the given places.

    Raises
    ------
    ShapeError
        Where the length does not divide into so many equal pieces (:func:`array_split` makes unequal ones).

    Examples
    --------
    >>> mt.split(mt.arange(4), 2), mt.split(mt.arange(4), [1])
    ([Array([0, 1]), Array([2, 3])], [Array([0]), Array([1, 2, 3])])
    """
    return _pieces("split", x, indices_or_sections, axis)


@composite("array_split")
def array_split(x: Any, indices_or_sections: int | Sequence[int], /, axis: int = 0) -> list[Array]:
    """Like :func:`split`; where the length does not divide, the first pieces are one longer.

    >>> mt.array_split(mt.arange(3), 2)
    [Array([0, 1]), Array([2])]
    """
    return _pieces("array_split", x, indices_or_sections, axis, uneven=True)


def hsplit(x: Any, indices_or_sections: int | Sequence[int], /) -> list[Array]:
    """Pieces along the second dimension, of vectors along the only one; see :func:`split`.

    >>> [p.shape for p in mt.hsplit(mt.ones((2, 4)), 2)]
    [(2, 2), (2, 2)]
    """
    x = asarray(x)
    return _pieces("hsplit", x, indices_or_sections, 0 if x.ndim == 1 else 1, least=1)


def vsplit(x: Any, indices_or_sections: int | Sequence[int], /) -> list[Array]:
    """Pieces along the first dimension of at least two; see :func:`split`.

    >>> [p.shape for p in mt.vsplit(mt.ones((2, 4)), 2)]
    [(1, 4), (1, 4)]
    """
    return _pieces("vsplit", x, indices_or_sections, 0, least=2)


def dsplit(x: Any, indices_or_sections: int | Sequence[int], /) -> list[Array]:
    """Pieces along the third dimension; see :func:`split`.

    >>> [p.shape for p in mt.dsplit(mt.ones((1, 2, 4)), 2)]
    [(1, 2, 2), (1, 2, 2)]
    """
    return _pieces("dsplit", x, indices_or_sections, 2, least=3)


@composite("delete")
def delete(x: Any, where: Any, /, axis: int | None = None) -> Array:
    """Without the elements, rows, … at ``where`` along ``axis``; flat without one.

    ``where`` is a number, several, a slice, or a mask.

    >>> mt.delete(mt.arange(5), [0, -1])
    Array([1, 2, 3])
    """
    x, axis = flattened(asarray(x), axis)
    axis = shape_rules.one_axis("delete", axis, x.ndim)
    where = where if isinstance(where, slice) else np.asarray(where)
    if (buf := buffer(x)) is not None:
        return wrap(np.asarray(np.delete(buf, where, axis)))
    return take(x, np.delete(np.arange(x.shape[axis]), where), axis=axis)


@composite("insert")
def insert(x: Any, where: Any, values: Any, /, axis: int | None = None) -> Array:
    """``values`` put before the places ``where`` along ``axis``; flat without one.

    Places are a number, several, or a slice; all mean the array as it was.

    >>> mt.insert(mt.arange(3), 1, 9), mt.insert(mt.arange(3), [0, 3], [7, 8])
    (Array([0, 9, 1, 2]), Array([7, 0, 1, 2, 8]))
    """
    x = asarray(x)
    values = elements("insert", values, x.dtype)
    x, axis = flattened(x, axis)
    axis = shape_rules.one_axis("insert", axis, x.ndim)
    length = x.shape[axis]
    places = np.arange(*where.indices(length)) if isinstance(where, slice) else np.asarray(where)
    if places.dtype.kind == "b":
        places = np.flatnonzero(places)
    if places.size and (places.dtype.kind not in "iu" or places.min() < -length or places.max() > length):
        raise ArrayIndexError(f"[insert] places {places.tolist()} do not fit an axis of length {length}")
    flat = places.reshape(-1).astype(np.intp)
    flat = np.where(flat < 0, flat + length, flat)
    rest = x.shape[:axis] + x.shape[axis + 1 :]
    if places.ndim == 0:
        # One place takes as many as there are values along the axis, which NumPy expects in front.
        values = moveaxis(reshape(values, (1,) * (x.ndim - values.ndim) + values.shape), 0, axis)
        flat = np.repeat(flat, values.shape[axis])
    new = broadcast_to(values, (*rest[:axis], flat.size, *rest[axis:]))
    if (plain := buffers(x, new)) is not None:
        buf, put = plain
        at, put = (int(places), np.moveaxis(put, axis, 0)) if places.ndim == 0 else (flat, put)
        return wrap(np.asarray(np.insert(buf, at, put, axis)))
    source = np.insert(np.arange(length), flat, length + np.arange(flat.size))
    return take(concat([x, new], axis=axis), source, axis=axis)
