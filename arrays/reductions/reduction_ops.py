"""Ops of reductions. Float16 and bfloat16 accumulate in float32."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..backends.pieces import large, reduced
from ..core import shape_rules
from ..core.dispatch import apply, as_array, wrap
from ..core.dtypes import as_dtype, is_low_precision
from ..core.errors import ShapeError
from ..core.op import Op
from ..ops.elementwise import POSITIONS, isnan, where
from ..ops.manipulation import astype
from ..ops.param_kinds import AXES, AXIS, COUNT, FLAG

Axis = int | Sequence[int] | None


# The ufuncs behind NumPy's methods, without the Python code in between.
_UFUNC_REDUCE = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "any": np.logical_or.reduce,
    "all": np.logical_and.reduce,
}


def _named(name: str) -> Callable[..., Any]:
    reduce = _UFUNC_REDUCE[name]

    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if xp is np:
            return reduce(x, axis=axis, keepdims=keepdims)
        return getattr(x, name)(axis=axis, keepdims=keepdims)

    return impl


def _accumulated(name: str) -> Callable[..., Any]:
    """``xp.name`` that sums low-precision floats in float32 and rounds once."""
    plainly = _named(name)

    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if is_low_precision(x.dtype):
            return getattr(x, name)(axis=axis, keepdims=keepdims, dtype=np.float32).astype(x.dtype)
        return plainly(xp, x, axis, keepdims)

    return impl


_summed = _named("sum")


def _mean_over(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool, count: int) -> Any:
    divisor = count or np.nan  # there is no mean of nothing, and no reason to warn of it
    if is_low_precision(x.dtype):
        return (x.sum(axis=axis, keepdims=keepdims, dtype=np.float32) / divisor).astype(x.dtype)
    return _summed(xp, x, axis, keepdims) / divisor


def _nothing_to_choose(name: str, shape: tuple[int, ...], axis: tuple[int, ...]) -> bool:
    """Whether the reduced dimensions have no elements. Raises :class:`ShapeError` where the result would have some."""
    if not builtins.any(shape[a] == 0 for a in axis):
        return False
    if 0 not in shape_rules.reduced_shape(shape, axis, False):
        raise ShapeError(f"[{name}] of no elements has no value: shape {shape}, axis {axis}")
    return True


def _extremum(name: str) -> Callable[..., Any]:
    plainly = _named(name)

    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if x.size == 0 and _nothing_to_choose(name, x.shape, axis):
            return xp.empty(shape_rules.reduced_shape(x.shape, axis, keepdims), x.dtype)
        return plainly(xp, x, axis, keepdims)

    return impl


def _infer_extremum(op: Op, args: tuple[Any, ...], params: Any) -> shape_rules.ShapeDtype:
    _nothing_to_choose(op.name, args[0].shape, params["axis"])
    return shape_rules.reduction(op, args, params)


_BOOL = "boolean result"

_OVER = {"axis": AXES, "keepdims": FLAG}
SUM = Op("sum", ("x",), _accumulated("sum"), shape_rules.reduction, params=_OVER)
# `count` is how many elements there are for each mean. It is no property of the operand: a rank has a block of that,
# whose part of the mean it gives.
MEAN = Op("mean", ("x",), _mean_over, shape_rules.reduction, params={**_OVER, "count": COUNT})
PROD = Op("prod", ("x",), _accumulated("prod"), shape_rules.reduction, params=_OVER)
MAX = Op("max", ("x",), _extremum("max"), _infer_extremum, params=_OVER)
MIN = Op("min", ("x",), _extremum("min"), _infer_extremum, params=_OVER)
ANY = Op("any", ("x",), _named("any"), shape_rules.reduction, nondifferentiable=_BOOL, params=_OVER)
ALL = Op("all", ("x",), _named("all"), shape_rules.reduction, nondifferentiable=_BOOL, params=_OVER)


def _infer_arg(op: Op, args: tuple[Any, ...], params: Any) -> shape_rules.ShapeDtype:
    _nothing_to_choose(op.name, args[0].shape, (params["axis"],))
    return shape_rules.ShapeDtype(
        shape_rules.reduced_shape(args[0].shape, (params["axis"],), params["keepdims"]), np.dtype(np.int64)
    )


def _arg(name: str, extremum: Op) -> Op:
    def impl(xp: Any, x: Any, axis: int, keepdims: bool) -> Any:
        if x.size == 0 and _nothing_to_choose(name, x.shape, (axis,)):
            return xp.empty(shape_rules.reduced_shape(x.shape, (axis,), keepdims), np.int64)
        return getattr(xp, name)(x, axis=axis, keepdims=keepdims)

    def decompose(x: Any, axis: int, keepdims: bool) -> Any:
        """The smallest of the places, along the whole dimension, that hold the extremum; NaN, where there is one, is
        that."""
        n = x.shape[axis]
        best = apply(extremum, (x,), {"axis": (axis,), "keepdims": True})
        hit = x == best
        if x.dtype.kind in "fcV":
            hit = hit | isnan(x)
        places = apply(POSITIONS, (x,), {"axis": axis, "start": 0})
        return apply(MIN, (where(hit, places, n),), {"axis": (axis,), "keepdims": keepdims})

    kinds = {"axis": AXIS, "keepdims": FLAG}
    return Op(name, ("x",), impl, _infer_arg, nondifferentiable=_INT, decompose=decompose, params=kinds)


_INT = "integer result"
ARGMAX, ARGMIN = _arg("argmax", MAX), _arg("argmin", MIN)


def _reduce(op: Op, x: Any, axis: Axis, keepdims: bool) -> Any:
    x = as_array(x)
    ndim = x._buf.ndim
    axes = tuple(range(ndim)) if axis is None else shape_rules.normalize_axis(op.name, axis, ndim)
    return apply(op, (x,), {"axis": axes, "keepdims": bool(keepdims)})


def plainly(op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any) -> Any:
    """The reduction of all elements."""
    return _reduce(op, x, axis, keepdims) if dtype is None else _reduce_in(op, x, axis, keepdims, dtype)


def _reduce_in(op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any) -> Any:
    """The reduction computed, and given, in another dtype; small integers asked for are accumulated wide and cut
    off."""
    dtype = as_dtype(dtype, op.name)
    if (buf := large(x, dtype)) is not None:
        axes, reduce = shape_rules.normalize_axis(op.name, axis, buf.ndim), _UFUNC_REDUCE[op.name]
        wide = np.dtype(np.float32) if is_low_precision(dtype) else None

        def piece(b: np.ndarray) -> np.ndarray:
            return reduce(b.astype(dtype, copy=False), axis=axes, dtype=wide, keepdims=True)

        return wrap(reduced(piece, np.add if op is SUM else np.multiply, axes, keepdims, buf).astype(dtype, copy=False))
    return astype(_reduce(op, astype(x, dtype, copy=False), axis, keepdims), dtype, copy=False)


def repeated(g: Any, shape: tuple[int, ...], axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """``g`` broadcast along the reduced dimensions of ``shape``, in a tenth of the time of ``np.broadcast_to``.

    (That took half the time of the derivative of a small sum.)"""
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
