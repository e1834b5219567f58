"""Equality of arrays, exact or within tolerances."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.array import Array
from ..core.op import composite
from ..ops.creation import asarray
from ..ops.elementwise import abs, equal, isfinite, isnan, logical_and, logical_or, where
from ..ops.manipulation import broadcast_shapes
from ..reductions.reductions import all


@composite("isclose")
def isclose(a: Any, b: Any, /, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False) -> Array:
    """Where ``|a - b| <= atol + rtol * |b|``. Infinities are close to themselves; NaN to NaN with ``equal_nan``.

    >>> mt.isclose(mt.asarray([1.0, 2.0]), mt.asarray([1.0 + 1e-9, 2.1]))
    Array([ True, False])
    """
    a, b = asarray(a), asarray(b)
    if b.dtype.kind in "biu":
        b = b.astype(np.float64)  # a difference of unsigned integers would wrap round
    both = logical_and(isfinite(a), isfinite(b))
    # The difference of infinities would be NaN, with a warning.
    near = abs(where(both, a, 0) - where(both, b, 0)) <= atol + rtol * abs(where(both, b, 0))
    out = logical_or(logical_and(both, near), equal(a, b))
    return logical_or(out, logical_and(isnan(a), isnan(b))) if equal_nan else out


def allclose(a: Any, b: Any, /, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False) -> bool:
    """Whether all elements are close, see :func:`isclose`.

    >>> mt.allclose(mt.asarray([1.0, 2.0]), [1.0, 2.0 + 1e-9])
    True
    """
    return bool(all(isclose(a, b, rtol, atol, equal_nan=equal_nan)))


@composite("array_equal")
def array_equal(a: Any, b: Any, /, *, equal_nan: bool = False) -> bool:
    """Whether two arrays have the same shape and elements.

    >>> mt.array_equal([1, 2], mt.asarray([1, 2])), mt.array_equal([1, 2], [[1, 2]])
    (True, False)
    """
    a, b = asarray(a), asarray(b)
    if a.shape != b.shape:
        return False
    same = equal(a, b)
    return bool(all(logical_or(same, logical_and(a != a, b != b)) if equal_nan else same))


@composite("array_equiv")
def array_equiv(a: Any, b: Any, /) -> bool:
    """Whether two arrays are equal where they are broadcast together.

    >>> mt.array_equiv([1, 2], [[1, 2], [1, 2]])
    True
    """
    a, b = asarray(a), asarray(b)
    try:
        broadcast_shapes(a.shape, b.shape)
    except ValueError:
        return False
    return bool(all(equal(a, b)))
