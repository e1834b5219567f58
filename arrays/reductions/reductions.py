"""Reductions over axes: the functions. Float16 and bfloat16 accumulate in float32."""

from __future__ import annotations

from typing import Any

from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array
from ..core.errors import NumPyFunctionError
from ..core.op import Op
from ..ops.manipulation import reshape
from .masked_reductions import reduced
from .reduction_ops import ALL, ANY, ARGMAX, ARGMIN, MAX, MIN, PROD, SUM, Axis, _reduce, _reduce_in


def sum(
    x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """Sum over axes. Small integers sum in the default integer; 0 for no elements.

    Only elements where ``where`` holds are summed, and ``initial`` is added.

    >>> mt.sum(mt.asarray([[1, 2], [3, 4]]), axis=0)
    Array([4, 6])
    """
    if where is not None or initial is not None:
        return reduced(SUM, x, axis, keepdims, dtype, where, initial)
    return _reduce(SUM, x, axis, keepdims) if dtype is None else _reduce_in(SUM, x, axis, keepdims, dtype)


def prod(
    x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """Product over axes; 1 for no elements. ``initial`` and ``where`` are as in :func:`sum`.

    >>> mt.prod(mt.asarray([2, 3, 4]))
    Array(24)
    """
    if where is not None or initial is not None:
        return reduced(PROD, x, axis, keepdims, dtype, where, initial)
    return _reduce(PROD, x, axis, keepdims) if dtype is None else _reduce_in(PROD, x, axis, keepdims, dtype)


def max(x: Any, /, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None) -> Array:
    """Largest element; NaN if there is one. Tied elements share the gradient evenly.

    >>> mt.max(mt.asarray([[1, 5], [7, 2]]), axis=1)
    Array([5, 7])
    """
    if where is not None or initial is not None:
        return reduced(MAX, x, axis, keepdims, None, where, initial)
    return _reduce(MAX, x, axis, keepdims)


def min(x: Any, /, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None) -> Array:
    """Smallest element; NaN if there is one. Tied elements share the gradient evenly.

    >>> mt.min(mt.asarray([[1, 5], [7, 2]]), axis=0)
    Array([1, 2])
    """
    if where is not None or initial is not None:
        return reduced(MIN, x, axis, keepdims, None, where, initial)
    return _reduce(MIN, x, axis, keepdims)


def _refuse_out(name: str, out: Any) -> None:
    """(xarray passes on the ``out=None`` that NumPy gave it.)"""
    if out is not None:
        raise NumPyFunctionError(f"[{name}] arrays are values: write out[...] = mt.{name}(x), or np.{name}(x, out=out)")


def any(x: Any, /, axis: Axis = None, *, keepdims: bool = False, where: Any = None, out: Any = None) -> Array:
    """Whether any element is true.

    >>> mt.any(mt.asarray([[True, False], [False, False]]), axis=1)
    Array([ True, False])
    """
    _refuse_out("any", out)
    if where is not None:
        return reduced(ANY, x, axis, keepdims, None, where, None)
    return _reduce(ANY, x, axis, keepdims)


def all(x: Any, /, axis: Axis = None, *, keepdims: bool = False, where: Any = None, out: Any = None) -> Array:
    """Whether all elements are true.

    >>> mt.all(mt.asarray([[True, False], [True, True]]), axis=1)
    Array([False,  True])
    """
    _refuse_out("all", out)
    if where is not None:
        return reduced(ALL, x, axis, keepdims, None, where, None)
    return _reduce(ALL, x, axis, keepdims)


def _argreduce(op: Op, x: Any, axis: int | None, keepdims: bool) -> Array:
    x = as_array(x)
    if axis is None and x.ndim == 1:
        axis = 0
    if axis is None:
        out = apply(op, (reshape(x, (-1,)),), {"axis": 0, "keepdims": False})
        return reshape(out, (1,) * x.ndim) if keepdims else out
    axis = shape_rules.one_axis(op.name, axis, x.ndim)
    return apply(op, (x,), {"axis": axis, "keepdims": bool(keepdims)})


def argmax(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first largest element (along an axis, or of the flattened array).

    >>> mt.argmax(mt.asarray([3, 9, 9]))
    Array(1)
    """
    return _argreduce(ARGMAX, x, axis, keepdims)


def argmin(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first smallest element (along an axis, or of the flattened array).

    >>> mt.argmin(mt.asarray([[3, 1], [0, 2]]), axis=1)
    Array([1, 0])
    """
    return _argreduce(ARGMIN, x, axis, keepdims)
