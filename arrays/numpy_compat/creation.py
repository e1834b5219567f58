"""Arrays made from numbers or functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.devices import Device
from ..core.dispatch import has_history
from ..core.errors import ShapeError
from ..core.op import composite
from ..ops.creation import asarray, eye, linspace
from ..ops.elementwise import pow
from ..ops.manipulation import stack
from ..ops.nested import geometric_ramp
from .index_tricks import indices


def array(obj: Any, /, dtype: Any = None, *, device: Device | str | None = None, copy: bool | None = None) -> Array:
    """An array of nested lists, numbers or another library's array: `mt.asarray` under NumPy's name.

    >>> mt.array([[1, 2], [3, 4]], mt.float32)
    Array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    return asarray(obj, dtype, device=device, copy=copy)


def copy(x: Any, /) -> Array:
    """An array of the same value. Memory is shared until one side is written.

    >>> mt.copy([1, 2])
    Array([1, 2])
    """
    return asarray(x).copy()


def identity(n: int, /, dtype: Any = None) -> Array:
    """The square identity matrix.

    >>> mt.identity(2)
    Array([[1., 0.],
           [0., 1.]], dtype=float64)
    """
    return eye(n, dtype=dtype)


def tri(n: int, m: int | None = None, /, k: int = 0, dtype: Any = None) -> Array:
    """Ones at and below the ``k``-th diagonal, zeros above.

    >>> mt.tri(2, 3)
    Array([[1., 0., 0.],
           [1., 1., 0.]], dtype=float64)
    """
    return asarray(np.tri(n, m, k)).astype(np.float64 if dtype is None else dtype)


@composite("logspace")
def logspace(
    start: float, stop: float, /, num: int = 50, *, base: float = 10.0, endpoint: bool = True, dtype: Any = None
) -> Array:
    """``num`` numbers from ``base**start`` to ``base**stop``, with one ratio between neighbours.

    >>> mt.logspace(0, 2, 3)
    Array([  1.,  10., 100.], dtype=float64)
    """
    start, stop = (v.astype(np.float64) if has_history(v) else float(v) for v in (start, stop))
    out = pow(base if has_history(base) else float(base), linspace(start, stop, num, endpoint=endpoint))
    return out if dtype is None else out.astype(dtype)


def geomspace(start: float, stop: float, /, num: int = 50, *, endpoint: bool = True, dtype: Any = None) -> Array:
    """``num`` numbers from ``start`` to ``stop``, with one ratio between neighbours.

    >>> mt.geomspace(1, 100, 3)
    Array([  1.,  10., 100.], dtype=float64)
    """
    if has_history(start) or has_history(stop):
        return asarray(geometric_ramp(start, stop, num, endpoint), dtype)
    start, stop = (v.item() if hasattr(v, "item") else v for v in (start, stop))
    return asarray(np.geomspace(start, stop, num, endpoint=endpoint), dtype)


def fromfunction(function: Callable[..., Any], shape: Sequence[int], /, dtype: Any = float) -> Any:
    """``function`` of the coordinates of all elements, one array a dimension.

    >>> mt.fromfunction(lambda i, j: i + 10 * j, (2, 2), mt.int64)
    Array([[ 0, 10],
           [ 1, 11]])
    """
    return function(*indices(shape, dtype))


@composite("vander")
def vander(x: Any, /, n: int | None = None, increasing: bool = False) -> Array:
    """Powers of the elements of a vector as columns, the highest first.

    >>> mt.vander(mt.asarray([1, 2, 3]), 3)
    Array([[1, 1, 1],
           [4, 2, 1],
           [9, 3, 1]])
    """
    x = asarray(x)
    x = x.astype(np.promote_types(x.dtype, np.int64), copy=False) if x.dtype.kind in "biu" else x
    if x.ndim != 1:
        raise ShapeError(f"[vander] takes a vector, got shape {x.shape}")
    n = x.size if n is None else n
    powers = [x**i for i in range(n)] if n else []
    columns = powers if increasing else powers[::-1]
    return stack(columns, axis=1) if columns else x[:, None][:, :0]
