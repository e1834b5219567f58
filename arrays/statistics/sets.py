"""Sets: distinct elements, and membership.

How many distinct elements there are is known only when the array is computed; inside ``mt.compile`` the ``unique_*``
functions raise. Every NaN is distinct from every other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..backends.pieces import buffer, mapped
from ..core.array import Array
from ..core.dtypes import result_type
from ..core.op import composite
from ..ops.creation import asarray, beside, full, placed
from ..ops.elementwise import equal, logical_not, minimum
from ..ops.manipulation import astype, reshape
from ..reductions.searching import searchsorted, take
from ..reductions.sorting import sort


class UniqueAll(NamedTuple):
    """Distinct values in order, where each is first, which of them each element is, and how often each occurs."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """Distinct values in order, and how often each occurs."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """Distinct values in order, and which of them each element is."""

    values: Array
    inverse_indices: Array


def distinct(
    x: Any, index: bool = False, inverse: bool = False, counts: bool = False, *, equal_nan: bool = False
) -> tuple[Array, ...]:
    """The distinct elements in order, and the other requested results alone: positions take eight bytes an element."""
    x = asarray(x)
    host = x._concrete()
    wide = host.astype(np.float32) if host.dtype.num >= 256 else host
    # Else the values are read by their places: they keep their history, and where they are.
    plain = buffer(x) is not None
    index_too = index or not plain
    found = np.unique(wide, return_index=index_too, return_inverse=inverse, return_counts=counts, equal_nan=equal_nan)
    values, *rest = found if isinstance(found, tuple) else (found,)
    places = [placed(a.astype(np.int64, copy=False), beside(x)) for a in rest]
    if inverse:
        places[index_too] = reshape(places[index_too], x.shape)
    first = placed(values.astype(host.dtype, copy=False), None) if plain else reshape(x, (-1,))[places[0]]
    return (first, *(places if index or plain else places[1:]))


def unique_all(x: Any, /) -> UniqueAll:
    """The distinct elements, in ascending order, with everything about them; the values keep their gradient.

    >>> mt.unique_all(mt.asarray([3, 1, 3])).counts
    Array([1, 2])
    """
    return UniqueAll(*distinct(x, True, True, True))


def unique_counts(x: Any, /) -> UniqueCounts:
    """The distinct elements, in ascending order, and how often each occurs.

    >>> mt.unique_counts(mt.asarray([3, 1, 3]))
    UniqueCounts(values=Array([1, 3]), counts=Array([1, 2]))
    """
    return UniqueCounts(*distinct(x, counts=True))


def unique_inverse(x: Any, /) -> UniqueInverse:
    """The distinct elements, in ascending order, and for each element of ``x`` which of them it is.

    >>> mt.unique_inverse(mt.asarray([3, 1, 3]))
    UniqueInverse(values=Array([1, 3]), inverse_indices=Array([1, 0, 1]))
    """
    return UniqueInverse(*distinct(x, inverse=True))


def unique_values(x: Any, /) -> Array:
    """The distinct elements, in ascending order.

    >>> mt.unique_values(mt.asarray([3, 1, 3]))
    Array([1, 3])
    """
    return distinct(x)[0]


@composite("isin")
def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> Array:
    """Whether each element of ``x1`` is among the elements of ``x2``. NaN is not equal to NaN.

    >>> mt.isin(mt.asarray([1, 2, 3]), mt.asarray([2, 5]))
    Array([False,  True, False])
    """
    if isinstance(x1, int | float | complex) and not isinstance(x2, int | float | complex):
        x2 = asarray(x2)
        x1 = asarray(x1, dtype=result_type(x2.dtype, x1))
    elif isinstance(x2, int | float | complex):
        x1 = asarray(x1)
        x2 = asarray(x2, dtype=result_type(x1.dtype, x2))
    x1, x2 = asarray(x1), asarray(x2)
    dtype = result_type(x1.dtype, x2.dtype)
    if dtype.kind != "f" or not (x1.dtype.kind in "iu" and x2.dtype.kind in "iu"):
        # (In floats, which uint64 and signed integers give together, neighbours would be equal.)
        x2 = astype(x2, dtype, copy=False)
    else:
        dtype = x1.dtype
    table = sort(reshape(x2, (-1,)))
    if table.size == 0:
        return full(x1.shape, bool(invert), dtype=bool, device=beside(x1))

    def among(x: Array) -> Array:
        x = astype(x, dtype, copy=False)
        at = minimum(searchsorted(table, x), table.size - 1)
        found = equal(take(table, at, axis=0), x)
        return logical_not(found) if invert else found

    return mapped(among, x1)
