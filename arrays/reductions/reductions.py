# cython: annotation_typing=False
"""Reductions over axes. Float16 and bfloat16 accumulate in float32."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends.pieces import LARGE, large, reduced
from ..backends.short_ways import HALF, REFUSED, TAKES_ELLIPSIS, buffer, result
from ..core import shape_rules
from ..core.dispatch import apply, as_array, wrap
from ..core.dtypes import as_dtype, is_low_precision
from ..core.errors import NumPyFunctionError, ShapeError
from ..core.op import OPS, Op, composite, state

if TYPE_CHECKING:
    from ..core.array import Array

Axis = int | Sequence[int] | None


# What NumPy's methods do, without the Python code that they pass through on their way.
_UFUNC_REDUCE = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "any": np.logical_or.reduce,
    "all": np.logical_and.reduce,
}


def _reduced(xp: Any, name: str, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    if xp is np:
        return _UFUNC_REDUCE[name](x, axis=axis, keepdims=keepdims)
    return getattr(x, name)(axis=axis, keepdims=keepdims)


def _accumulated(name: str) -> Callable[..., Any]:
    """``xp.name`` that sums low-precision floats in float32 and rounds once."""

    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if is_low_precision(x.dtype):
            return getattr(x, name)(axis=axis, keepdims=keepdims, dtype=np.float32).astype(x.dtype)
        return _reduced(xp, name, x, axis, keepdims)

    return impl


def _named(name: str) -> Callable[..., Any]:
    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        return _reduced(xp, name, x, axis, keepdims)

    return impl


def _mean_over(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool, count: int) -> Any:
    divisor = count or np.nan  # there is no mean of nothing, and no reason to warn of it
    if is_low_precision(x.dtype):
        return (x.sum(axis=axis, keepdims=keepdims, dtype=np.float32) / divisor).astype(x.dtype)
    return _reduced(xp, "sum", x, axis, keepdims) / divisor


def _nothing_to_choose(name: str, shape: tuple[int, ...], axis: tuple[int, ...]) -> bool:
    """Whether the reduced dimensions have no elements. Raises :class:`ShapeError` where the result would have some."""
    if not builtins.any(shape[a] == 0 for a in axis):
        return False
    if 0 not in shape_rules.reduced_shape(shape, axis, False):
        raise ShapeError(f"[{name}] of no elements has no value: shape {shape}, axis {axis}")
    return True


def _extremum(name: str) -> Callable[..., Any]:
    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if x.size == 0 and _nothing_to_choose(name, x.shape, axis):
            return xp.empty(shape_rules.reduced_shape(x.shape, axis, keepdims), x.dtype)
        return _reduced(xp, name, x, axis, keepdims)

    return impl


def _infer_extremum(op: Op, args: tuple[Any, ...], params: Any) -> shape_rules.ShapeDtype:
    _nothing_to_choose(op.name, args[0].shape, params["axis"])
    return shape_rules.reduction(op, args, params)


_BOOL = "boolean result"

SUM = Op("sum", ("x",), _accumulated("sum"), shape_rules.reduction)
# `count` is how many elements there are for each mean. It is no property of the operand: a rank has a block of that, whose part of the
# mean it gives.
MEAN = Op("mean", ("x",), _mean_over, shape_rules.reduction)
PROD = Op("prod", ("x",), _accumulated("prod"), shape_rules.reduction)
MAX = Op("max", ("x",), _extremum("max"), _infer_extremum)
MIN = Op("min", ("x",), _extremum("min"), _infer_extremum)
ANY = Op("any", ("x",), _named("any"), shape_rules.reduction, nondifferentiable=_BOOL)
ALL = Op("all", ("x",), _named("all"), shape_rules.reduction, nondifferentiable=_BOOL)


def _arg(name: str) -> Callable[..., Any]:
    def impl(xp: Any, x: Any, axis: int, keepdims: bool) -> Any:
        if x.size == 0 and _nothing_to_choose(name, x.shape, (axis,)):
            return xp.empty(shape_rules.reduced_shape(x.shape, (axis,), keepdims), np.int64)
        return getattr(xp, name)(x, axis=axis, keepdims=keepdims)

    return impl


def _infer_arg(op: Op, args: tuple[Any, ...], params: Any) -> shape_rules.ShapeDtype:
    _nothing_to_choose(op.name, args[0].shape, (params["axis"],))
    return shape_rules.ShapeDtype(
        shape_rules.reduced_shape(args[0].shape, (params["axis"],), params["keepdims"]), np.dtype(np.int64)
    )


def _decompose_arg(extremum: Op) -> Callable[..., Any]:
    def decompose(x: Any, axis: int, keepdims: bool) -> Any:
        """The smallest of the places, along the whole dimension, that hold the extremum; NaN, where there is one, is that."""
        from ..ops.elementwise import POSITIONS, isnan, where

        n = x.shape[axis]
        best = apply(extremum, (x,), {"axis": (axis,), "keepdims": True})
        hit = x == best
        if x.dtype.kind in "fcV":
            hit = hit | isnan(x)
        places = apply(POSITIONS, (x,), {"axis": axis, "start": 0})
        return apply(MIN, (where(hit, places, n),), {"axis": (axis,), "keepdims": keepdims})

    return decompose


_INT = "integer result"
ARGMAX = Op("argmax", ("x",), _arg("argmax"), _infer_arg, nondifferentiable=_INT, decompose=_decompose_arg(MAX))
ARGMIN = Op("argmin", ("x",), _arg("argmin"), _infer_arg, nondifferentiable=_INT, decompose=_decompose_arg(MIN))


_DIRECT = {OPS[name]: reduce for name, reduce in _UFUNC_REDUCE.items()}


def _reduce(op: Op, x: Any, axis: Axis, keepdims: bool) -> Any:
    if axis is None or type(axis) is int:
        buf = getattr(x, "_buf", None)
        if type(buf) is np.ndarray and buf.dtype.num < HALF and not state.now.recorders and (axis is None or buf.ndim):
            try:
                if TAKES_ELLIPSIS:
                    return wrap(_DIRECT[op](buf, axis, keepdims=keepdims, out=...))
                return result(_DIRECT[op](buf, axis, None, None, keepdims))
            except REFUSED:
                pass
    x = as_array(x)
    return apply(op, (x,), {"axis": _axes_of(op.name, axis, x.ndim), "keepdims": bool(keepdims)})


def _axes_of(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim)) if axis is None else shape_rules.normalize_axis(name, axis, ndim)


def plainly(op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any) -> Any:
    """The reduction of all elements."""
    return _reduce(op, x, axis, keepdims) if dtype is None else _reduce_in(op, x, axis, keepdims, dtype)


def _selected(op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any, where: Any, initial: Any) -> Array:
    from .masked_reductions import reduced

    return reduced(op, x, axis, keepdims, dtype, where, initial)


def _reduce_in(op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any) -> Any:
    """The reduction computed, and given, in another dtype; small integers asked for are accumulated wide and cut off."""
    from ..ops.manipulation import astype

    dtype = as_dtype(dtype, op.name)
    if (buf := large(x, dtype)) is not None:
        axes, reduce = _axes_of(op.name, axis, buf.ndim), _UFUNC_REDUCE[op.name]
        wide = np.dtype(np.float32) if is_low_precision(dtype) else None

        def piece(b: np.ndarray) -> np.ndarray:
            return reduce(b.astype(dtype, copy=False), axis=axes, dtype=wide, keepdims=True)

        return wrap(reduced(piece, np.add if op is SUM else np.multiply, axes, keepdims, buf).astype(dtype, copy=False))
    return astype(_reduce(op, astype(x, dtype, copy=False), axis, keepdims), dtype, copy=False)


def repeated(g: Any, shape: tuple[int, ...], axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """``g`` along the reduced dimensions of ``shape`` again: what ``np.broadcast_to`` gives, in a tenth of its time. (It was half of
    what the derivative of a small sum costs.)"""
    g = np.asarray(g)
    if len(axis) == len(shape):
        strides = (0,) * len(shape)
    else:
        kept = iter([s for i, s in enumerate(g.strides) if not keepdims or i not in axis])
        strides = tuple([0 if i in axis else next(kept) for i in range(len(shape))])
    out = (
        np.lib.stride_tricks.as_strided(g, shape, strides)
        if not g.flags.forc
        else np.ndarray(shape, g.dtype, g, 0, strides)
    )
    out.flags.writeable = False
    return out


def sum(
    x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """Sum over axes. Small integers sum in the default integer; 0 for no elements.

    Only elements where ``where`` holds are summed, and ``initial`` is added.

    >>> import meshtape as mt
    >>> mt.sum(mt.asarray([[1, 2], [3, 4]]), axis=0)
    Array([4, 6])
    """
    if where is not None or initial is not None:
        return _selected(SUM, x, axis, keepdims, dtype, where, initial)
    return _reduce(SUM, x, axis, keepdims) if dtype is None else _reduce_in(SUM, x, axis, keepdims, dtype)


def prod(
    x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """Product over axes; 1 for no elements. ``initial`` and ``where`` are as in :func:`sum`.

    >>> import meshtape as mt
    >>> mt.prod(mt.asarray([2, 3, 4]))
    Array(24)
    """
    if where is not None or initial is not None:
        return _selected(PROD, x, axis, keepdims, dtype, where, initial)
    return _reduce(PROD, x, axis, keepdims) if dtype is None else _reduce_in(PROD, x, axis, keepdims, dtype)


def max(x: Any, /, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None) -> Array:
    """Largest element; NaN if there is one. Tied elements share the gradient evenly.

    >>> import meshtape as mt
    >>> mt.max(mt.asarray([[1, 5], [7, 2]]), axis=1)
    Array([5, 7])
    """
    if where is not None or initial is not None:
        return _selected(MAX, x, axis, keepdims, None, where, initial)
    return _reduce(MAX, x, axis, keepdims)


def min(x: Any, /, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None) -> Array:
    """Smallest element; NaN if there is one. Tied elements share the gradient evenly.

    >>> import meshtape as mt
    >>> mt.min(mt.asarray([[1, 5], [7, 2]]), axis=0)
    Array([1, 2])
    """
    if where is not None or initial is not None:
        return _selected(MIN, x, axis, keepdims, None, where, initial)
    return _reduce(MIN, x, axis, keepdims)


def _refuse_out(name: str, out: Any) -> None:
    """(xarray passes on the ``out=None`` that NumPy gave it.)"""
    if out is not None:
        raise NumPyFunctionError(f"[{name}] arrays are values: write out[...] = mt.{name}(x), or np.{name}(x, out=out)")


def any(x: Any, /, axis: Axis = None, *, keepdims: bool = False, where: Any = None, out: Any = None) -> Array:
    """Whether any element is true.

    >>> import meshtape as mt
    >>> mt.any(mt.asarray([[True, False], [False, False]]), axis=1)
    Array([ True, False])
    """
    _refuse_out("any", out)
    if where is not None:
        return _selected(ANY, x, axis, keepdims, None, where, None)
    return _reduce(ANY, x, axis, keepdims)


def all(x: Any, /, axis: Axis = None, *, keepdims: bool = False, where: Any = None, out: Any = None) -> Array:
    """Whether all elements are true.

    >>> import meshtape as mt
    >>> mt.all(mt.asarray([[True, False], [True, True]]), axis=1)
    Array([False,  True])
    """
    _refuse_out("all", out)
    if where is not None:
        return _selected(ALL, x, axis, keepdims, None, where, None)
    return _reduce(ALL, x, axis, keepdims)


def _argreduce(op: Op, x: Any, axis: int | None, keepdims: bool) -> Array:
    if keepdims is False and (axis is None or type(axis) is int):
        buf = buffer(x)
        if buf is not None and (axis is None or buf.ndim):
            try:
                return result(buf.argmax(axis) if op is ARGMAX else buf.argmin(axis))
            except REFUSED:
                pass
    from ..ops.manipulation import reshape

    x = as_array(x)
    if axis is None:
        out = apply(op, (reshape(x, (-1,)),), {"axis": 0, "keepdims": False})
        return reshape(out, (1,) * x.ndim) if keepdims else out
    axis = shape_rules.one_axis(op.name, axis, x.ndim)
    return apply(op, (x,), {"axis": axis, "keepdims": bool(keepdims)})


def argmax(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first largest element (along an axis, or of the flattened array).

    >>> import meshtape as mt
    >>> mt.argmax(mt.asarray([3, 9, 9]))
    Array(1)
    """
    return _argreduce(ARGMAX, x, axis, keepdims)


def argmin(x: Any, /, axis: int | None = None, *, keepdims: bool = False) -> Array:
    """Index of the first smallest element (along an axis, or of the flattened array).

    >>> import meshtape as mt
    >>> mt.argmin(mt.asarray([[3, 1], [0, 2]]), axis=1)
    Array([1, 0])
    """
    return _argreduce(ARGMIN, x, axis, keepdims)


# Of the floats that sum in themselves; others are widened first.
_OWN_MEAN = frozenset(np.dtype(t).num for t in "fd")


def _plain_mean(buf: Any, axis: int | None, keepdims: bool) -> Any:
    """The mean by two calls of NumPy; None where there is nothing to divide by."""
    n = buf.size if axis is None else buf.shape[axis]
    return np.add.reduce(buf, axis, None, None, keepdims) / n if n else None


def _plain_var(buf: Any, axis: int | None, correction: float, keepdims: bool) -> Any:
    """The variance in two passes over one array of the size of ``buf``; None where there is nothing to divide by."""
    if buf.size >= LARGE:
        return None
    center = _plain_mean(buf, axis, True)
    rest = (buf.size if axis is None else buf.shape[axis]) - correction
    if center is None or type(rest) not in (int, float) or rest <= 0:
        return None
    d = np.subtract(buf, center)
    np.multiply(d, d, d)
    return np.add.reduce(d, axis, None, None, keepdims) / rest


def _moment(x: Any, axis: Axis, plain: Callable[..., Any], *args: Any) -> Array | None:
    """``plain(buffer, axis, ...)`` as an Array, where ``x`` is a float array that takes the short way; else None."""
    if axis is None or type(axis) is int:
        buf = buffer(x)
        if buf is not None and buf.dtype.num in _OWN_MEAN and buf.ndim:
            try:
                out = plain(buf, axis, *args)
            except REFUSED:
                return None
            return None if out is None else result(out)
    return None


def mean(x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, where: Any = None) -> Array:
    """Arithmetic mean; NaN for no elements. Integers give the default float; ``dtype`` is that of the result, and what it is summed in.

    >>> import meshtape as mt
    >>> mt.mean(mt.asarray([1.0, 2.0, 6.0]))
    Array(3., dtype=float64)
    """
    out = _moment(x, axis, _plain_mean, keepdims) if dtype is None and where is None else None
    return _moments("mean", x, axis, keepdims, dtype, where) if out is None else out


def _moments(name: str, *args: Any) -> Array:
    from . import moments

    return composite(name)(getattr(moments, name))(name, *args)


def var(
    x: Any,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    ddof: float | None = None,
    dtype: Any = None,
    where: Any = None,
) -> Array:
    """Variance, divided by ``n - correction``, in two passes (no cancellation); of complex numbers that of the plane.

    ``ddof`` is NumPy's older name of ``correction``; ``dtype`` is that of the result, and of what it is computed in.

    >>> import meshtape as mt
    >>> mt.var(mt.asarray([1.0, 3.0]), correction=1)
    Array(2., dtype=float64)
    """
    correction = correction if ddof is None else ddof
    out = _moment(x, axis, _plain_var, correction, keepdims) if dtype is None and where is None else None
    return _moments("var", x, axis, correction, keepdims, dtype, where) if out is None else out


def std(
    x: Any,
    /,
    axis: Axis = None,
    *,
    correction: float = 0.0,
    keepdims: bool = False,
    ddof: float | None = None,
    dtype: Any = None,
    where: Any = None,
) -> Array:
    """Standard deviation: the root of :func:`var`; ``ddof`` and ``dtype`` are as there.

    Its gradient where all elements are equal is 0, as that of a norm at the origin. (That of ``sqrt(var(x))`` is NaN there.)

    >>> import meshtape as mt
    >>> mt.std(mt.asarray([1.0, 3.0]))
    Array(1., dtype=float64)
    """
    correction = correction if ddof is None else ddof
    plain = dtype is None and where is None
    out = _moment(x, axis, lambda *args: np.sqrt(_plain_var(*args)), correction, keepdims) if plain else None
    return _moments("std", x, axis, correction, keepdims, dtype, where) if out is None else out
