"""Order, and sets of elements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.pieces import buffers
from ..core.array import Array
from ..core.dispatch import wrap
from ..core.dtypes import FIRST_USER_DTYPE, result_type
from ..core.errors import ArgumentError, ShapeError
from ..core.op import composite
from ..ops.creation import asarray
from ..ops.manipulation import concat
from ..reductions.searching import take_along_axis
from ..reductions.sorting import argsort, flattened, sort
from ..statistics import sets


def _checked(name: str, x: Any, kth: int | Sequence[int], axis: int | None) -> tuple[Array, int]:
    x, axis = flattened(x, axis)
    for k in [kth] if np.ndim(kth) == 0 else kth:  # type: ignore[union-attr]
        try:
            k = operator.index(k)
        except TypeError:
            raise ArgumentError(f"[{name}] places are integers, got {k}") from None
        if not -x.shape[axis] <= k < x.shape[axis]:
            raise ShapeError(f"[{name}] there is no {k}-th element along an axis of length {x.shape[axis]}")
    return x, axis


def partition(x: Any, kth: int | Sequence[int], /, axis: int | None = -1) -> Array:
    """The ``kth`` elements where sorting would put them, smaller ones before and larger ones behind.

    All are sorted, in fact.

    >>> mt.partition(mt.asarray([3, 1, 2]), 1)[1]
    Array(2)
    """
    x, axis = _checked("partition", x, kth, axis)
    return sort(x, axis=axis)


def argpartition(x: Any, kth: int | Sequence[int], /, axis: int | None = -1) -> Array:
    """The indices of the elements of :func:`partition`.

    >>> mt.argpartition(mt.asarray([3, 1, 2]), 1)[0]
    Array(1)
    """
    x, axis = _checked("argpartition", x, kth, axis)
    return argsort(x, axis=axis)


@composite("lexsort")
def lexsort(keys: Any, /, axis: int = -1) -> Array:
    """The order by several keys, the last one first.

    >>> mt.lexsort([mt.asarray([2, 1, 0]), mt.asarray([0, 1, 0])])
    Array([2, 0, 1])
    """
    found = [asarray(k) for k in keys]
    if not found:
        raise ShapeError("[lexsort] needs at least one key")
    if (plain := buffers(*found)) is not None and max(b.dtype.num for b in plain) < FIRST_USER_DTYPE:
        return wrap(np.asarray(np.lexsort(plain, axis)))
    order = argsort(found[0], axis=axis)
    for key in found[1:]:
        order = take_along_axis(order, argsort(take_along_axis(key, order, axis=axis), axis=axis), axis=axis)
    return order


def unique(
    x: Any,
    /,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    *,
    equal_nan: bool = True,
    sorted: bool = True,
) -> Any:
    """The different elements, ascending.

    Where asked for, also their first places, which of them each element is, and how often each occurs.

    All NaN are one, but with ``equal_nan=False``.

    >>> mt.unique(mt.asarray([2, 1, 2]), return_counts=True)
    (Array([1, 2]), Array([1, 2]))
    """
    found = sets.distinct(x, return_index, return_inverse, return_counts, equal_nan=equal_nan)
    return found if len(found) > 1 else found[0]


def union1d(x: Any, y: Any, /) -> Array:
    """The different elements of both, ascending.

    >>> mt.union1d([1, 2], [2, 3])
    Array([1, 2, 3])
    """
    return unique(concat([asarray(x), asarray(y)], axis=None))


def intersect1d(x: Any, y: Any, /) -> Array:
    """The different elements that are in both, ascending.

    >>> mt.intersect1d([1, 2], [2, 3])
    Array([2])
    """
    found, y = unique(x), asarray(y)
    return found[sets.isin(found, y)].astype(result_type(found.dtype, y.dtype))


def setdiff1d(x: Any, y: Any, /) -> Array:
    """The different elements of ``x`` that are not in ``y``, ascending.

    >>> mt.setdiff1d([1, 2], [2, 3])
    Array([1])
    """
    found = unique(x)
    return found[sets.isin(found, asarray(y), invert=True)]


def setxor1d(x: Any, y: Any, /) -> Array:
    """The different elements that are in just one of both, ascending.

    >>> mt.setxor1d([1, 2], [2, 3])
    Array([1, 3])
    """
    return sort(concat([setdiff1d(x, y), setdiff1d(y, x)]))
