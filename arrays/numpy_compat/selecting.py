"""Elements and values chosen by conditions and index arrays; functions of slices along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import ArgumentError, ArrayIndexError, DTypeError, NumPyFunctionError, ShapeError
from ..core.op import composite
from ..ops.creation import asarray, elements
from ..ops.elementwise import clip, where
from ..ops.manipulation import broadcast_to, expand_dims, moveaxis, reshape, stack
from ..reductions.searching import along_axis, nonzero, take, take_along_axis
from ..reductions.sorting import flattened


@composite("select")
def select(conditions: Sequence[Any], choices: Sequence[Any], /, default: Any = 0) -> Array:
    """From the first of ``choices`` whose condition is true, ``default`` where none is.

    >>> x = mt.arange(4)
    >>> mt.select([x < 1, x > 2], [10, 20], default=x)
    Array([10,  1,  2, 20])
    """
    if len(conditions) != len(choices) or not conditions:
        raise ShapeError(f"[select] {len(conditions)} conditions for {len(choices)} choices")
    found = [c if hasattr(c, "dtype") or isinstance(c, int | float | complex) else asarray(c) for c in choices]
    # The dtype of all together, before two of them meet.
    dtype = result_type(*(asarray(c) if isinstance(c, np.ndarray | np.generic) else c for c in [*found, default]))
    out = elements("select", default, dtype)
    for condition, choice in zip(reversed(conditions), reversed(found), strict=True):
        out = where(asarray(condition), elements("select", choice, dtype), out)
    return out


@composite("piecewise")
def piecewise(
    x: Any, conditions: Sequence[Any], functions: Sequence[Callable[..., Any] | float], /, *args: Any
) -> Array:
    """Each function (or number) where its condition is true, the last of several; an extra one serves the rest.

    Every function is given all elements: where it must not see some, replace them first.

    >>> x = mt.asarray([-2.0, 3.0])
    >>> mt.piecewise(x, [x < 0], [lambda v: -v, 0.0])
    Array([2., 0.], dtype=float64)
    """
    x = asarray(x)
    found = [asarray(c) for c in conditions]
    if len(functions) not in (len(found), len(found) + 1):
        raise ShapeError(f"[piecewise] {len(functions)} functions for {len(found)} conditions; as many, or one more")

    def values(f: Callable[..., Any] | float) -> Any:
        return elements("piecewise", f(x, *args) if callable(f) else f, x.dtype)

    out = broadcast_to(values(functions[-1] if len(functions) > len(found) else 0), x.shape)
    for condition, function in zip(found, functions, strict=False):
        out = where(condition, values(function), out)
    return out


@composite("compress")
def compress(condition: Any, x: Any, /, axis: int | None = None) -> Array:
    """The elements, rows, … where a vector of booleans is true, along ``axis``; flat without one.

    >>> mt.compress([False, True], mt.asarray([[1, 2], [3, 4]]), axis=0)
    Array([[3, 4]])
    """
    x, condition = asarray(x), asarray(condition)
    if condition.ndim != 1:
        raise ShapeError(f"[compress] the condition is a vector, got shape {condition.shape}")
    x, axis = flattened(x, axis)
    return take(x, nonzero(condition)[0], axis=shape_rules.one_axis("compress", axis, x.ndim))


@composite("extract")
def extract(condition: Any, x: Any, /) -> Array:
    """The elements where a condition of the same size is true, flat.

    >>> mt.extract([True, False, True], mt.arange(3))
    Array([0, 2])
    """
    return compress(reshape(asarray(condition).astype(np.bool_), (-1,)), x)


@composite("apply_along_axis")
def apply_along_axis(function: Callable[..., Any], axis: int, x: Any, /, *args: Any, **kwargs: Any) -> Array:
    """``function(vector, *args, **kwargs)`` of every vector along ``axis``; its results replace that dimension.

    It is called once for each vector. A function that takes whole arrays is faster where there is one.

    >>> mt.apply_along_axis(lambda v: v[0] + v[-1], 1, mt.asarray([[1, 2, 3], [4, 5, 6]]))
    Array([ 4, 10])
    """
    x = asarray(x)
    axis = shape_rules.one_axis("apply_along_axis", axis, x.ndim)
    rows = moveaxis(x, axis, -1)
    lead = rows.shape[:-1]
    if not math.prod(lead):
        raise ShapeError(f"[apply_along_axis] an array of shape {x.shape} has no vectors along axis {axis}")
    found = stack([asarray(function(rows[i], *args, **kwargs)) for i in np.ndindex(*lead)])
    out = reshape(found, (*lead, *found.shape[1:]))
    n, k = len(lead), found.ndim - 1
    return moveaxis(out, tuple(range(n, n + k)), tuple(range(axis, axis + k)))


@composite("apply_over_axes")
def apply_over_axes(function: Callable[[Array, int], Any], x: Any, axes: int | Sequence[int], /) -> Array:
    """``function(array, axis)`` for one axis after the other, each of the result before.

    A dimension that it drops stays, with length one.

    >>> mt.apply_over_axes(mt.sum, mt.ones((2, 3)), [0, 1])
    Array([[6.]], dtype=float64)
    """
    x = asarray(x)
    for axis in axes if isinstance(axes, Sequence) else [axes]:
        axis = shape_rules.one_axis("apply_over_axes", axis, x.ndim)
        out = asarray(function(x, axis))
        x = out if out.ndim == x.ndim else expand_dims(out, axis=axis)
    return x


@composite("put_along_axis")
def put_along_axis(x: Any, indices: Any, values: Any, /, axis: int | None, *, inplace: bool = True) -> Array:
    """``x`` with ``values`` at the places that :func:`take_along_axis` reads.

    The result is an array of its own, for which ``inplace=False`` asks.

    Raises
    ------
    NumPyFunctionError
        Without ``inplace=False``: NumPy's function writes into ``x``, and gives nothing. Arrays here are values.

    Examples
    --------
    >>> x = mt.asarray([[1, 2, 3], [4, 5, 6]])
    >>> mt.put_along_axis(x, mt.asarray([[2], [0]]), 9, axis=1, inplace=False)
    Array([[1, 2, 9],
           [9, 5, 6]])
    """
    if inplace:
        raise NumPyFunctionError(
            "[put_along_axis] arrays are values: write x = mt.put_along_axis(x, indices, values, axis, inplace=False)"
        )
    x = asarray(x)
    if axis is None:
        return reshape(put_along_axis(reshape(x, (-1,)), indices, values, axis=0, inplace=False), x.shape)
    return x.at[along_axis("put_along_axis", x.shape, indices, axis)].set(values)


@composite("choose")
def choose(x: Any, choices: Any, /, *, mode: str = "raise") -> Array:
    """For each element ``i`` of ``x``, the element of ``choices[i]`` at the same place; all arrays are broadcast.

    ``mode`` treats a number beyond the choices: as an error (``"raise"``), modulo their number (``"wrap"``), or as the
    nearest (``"clip"``).

    >>> mt.choose(mt.asarray([0, 1, 0]), [mt.asarray([1, 2, 3]), 10])
    Array([ 1, 10,  3])
    """
    x, found = asarray(x), [asarray(c) for c in choices]
    if x.dtype.kind not in "biu":
        raise DTypeError(f"[choose] takes integers, got {x.dtype.name}")
    if not found:
        raise ShapeError("[choose] needs at least one choice")
    if mode not in ("raise", "wrap", "clip"):
        raise ArgumentError(f"[choose] mode must be 'raise', 'wrap' or 'clip', got {mode!r}")
    n, dtype = len(found), result_type(*found)
    x = x.astype(np.int64)  # a short dtype may not count to their number
    # A negative number would count from the end, but NumPy refuses it.
    x = x % n if mode == "wrap" else clip(x, 0, n - 1) if mode == "clip" else where(x < 0, n, x)
    shape = np.broadcast_shapes(x.shape, *(c.shape for c in found))
    table = stack([broadcast_to(c.astype(dtype, copy=False), shape) for c in found])
    try:
        return take_along_axis(table, expand_dims(broadcast_to(x, shape), axis=0), axis=0)[0]
    except ArrayIndexError:
        raise ArrayIndexError(
            f"[choose] an element is not between 0 and {n - 1}, for which there are choices"
        ) from None
