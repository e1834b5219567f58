"""Reductions over axes: their ops, and the functions. Low-precision floats accumulate in float32.

NumPy's ``where=`` and ``initial=`` reduce the elements that a mask selects, from an initial value on.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..backends.pieces import buffer, large
from ..backends.pieces import reduced as joined
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array, wrap
from ..core.dtypes import FIRST_USER_DTYPE, HALF, as_dtype, is_low_precision, result_type
from ..core.errors import ArgumentError, DTypeError, NumPyFunctionError, ShapeError
from ..core.op import Op, ShapeDtype, for_floats
from ..kernels import row_norms as kernels
from ..ops.creation import full
from ..ops.elementwise import POSITIONS, add, isnan, maximum, minimum, multiply
from ..ops.elementwise import where as select
from ..ops.manipulation import astype, broadcast_to, reshape
from ..ops.param_kinds import AXES, AXIS, COUNT, FLAG

# ----- ops ------------------------------------------------------------------------------------------------------------

Axis = int | Sequence[int] | None
_OVER = {"axis": AXES, "keepdims": FLAG}

# The ufuncs behind NumPy's methods, without the Python code in between.
_UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
_UFUNCS |= {"any": np.logical_or, "all": np.logical_and}


def _plain(name: str, short: bool = False) -> Callable[..., Any]:
    """``xp.name``. With ``short``, floats of one or two bytes are joined in float32 and rounded once."""
    reduce = _UFUNCS[name].reduce

    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if short and x.dtype.num >= HALF:
            return getattr(x, name)(axis=axis, keepdims=keepdims, dtype=np.float32).astype(x.dtype)
        if xp is np:
            if x.dtype.num >= FIRST_USER_DTYPE and name in ("max", "min"):  # ml_dtypes' own take 30 times as long
                return reduce(x, axis=axis, keepdims=keepdims, dtype=np.float32).astype(x.dtype)
            return reduce(x, axis=axis, keepdims=keepdims)
        return getattr(x, name)(axis=axis, keepdims=keepdims)

    return impl


_summed = _plain("sum")


def _mean_over(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool, count: int) -> Any:
    divisor = count or np.nan  # there is no mean of nothing, and no reason to warn of it
    if x.dtype.num >= HALF:
        return (x.sum(axis=axis, keepdims=keepdims, dtype=np.float32) / divisor).astype(x.dtype)
    return _summed(xp, x, axis, keepdims) / divisor


@for_floats
def _sum_on_cuda(x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
    return kernels.column_sums(x, axis, keepdims, x.dtype)


@for_floats
def _mean_on_cuda(x: Any, axis: tuple[int, ...], keepdims: bool, count: int) -> Any:
    total = kernels.column_sums(x, axis, keepdims, kernels.wide(x.dtype))
    return total if total is NotImplemented else (total / (count or np.nan)).astype(x.dtype, copy=False)


def _nothing_to_choose(name: str, shape: tuple[int, ...], axis: tuple[int, ...]) -> bool:
    """Whether the reduced dimensions have no elements. Raises :class:`ShapeError` where the result would have some."""
    if not builtins.any(shape[a] == 0 for a in axis):
        return False
    if 0 not in shape_rules.reduced_shape(shape, axis, False):
        raise ShapeError(f"[{name}] of no elements has no value: shape {shape}, axis {axis}")
    return True


def _extremum(name: str) -> Callable[..., Any]:
    plain = _plain(name)

    def impl(xp: Any, x: Any, axis: tuple[int, ...], keepdims: bool) -> Any:
        if x.size == 0 and _nothing_to_choose(name, x.shape, axis):
            return xp.empty(shape_rules.reduced_shape(x.shape, axis, keepdims), x.dtype)
        return plain(xp, x, axis, keepdims)

    return impl


def _extremum_op(name: str) -> Op:
    on_cuda = for_floats(functools.partial(kernels.row_extremes, name.title()))
    return Op(name, ("x",), _extremum(name), _infer_extremum, overrides={"cupy": on_cuda}, params=_OVER)


def _infer_extremum(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    _nothing_to_choose(op.name, args[0].shape, params["axis"])
    return shape_rules.reduction(op, args, params)


_BOOL, _INT = "boolean result", "integer result"
SUM = Op(
    "sum", ("x",), _plain("sum", short=True), shape_rules.reduction, overrides={"cupy": _sum_on_cuda}, params=_OVER
)
# `count` is how many elements there are for each mean. It is no property of the operand: a rank has a block of that,
# whose part of the mean it gives.
MEAN = Op(
    "mean",
    ("x",),
    _mean_over,
    shape_rules.reduction,
    overrides={"cupy": _mean_on_cuda},
    params={**_OVER, "count": COUNT},
)
PROD = Op("prod", ("x",), _plain("prod", short=True), shape_rules.reduction, params=_OVER)
MAX = _extremum_op("max")
MIN = _extremum_op("min")
ANY = Op("any", ("x",), _plain("any"), shape_rules.reduction, nondifferentiable=_BOOL, params=_OVER)
ALL = Op("all", ("x",), _plain("all"), shape_rules.reduction, nondifferentiable=_BOOL, params=_OVER)


def _infer_arg(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    shape, axes = args[0].shape, (params["axis"],)
    _nothing_to_choose(op.name, shape, axes)
    return ShapeDtype(shape_rules.reduced_shape(shape, axes, params["keepdims"]), np.dtype(np.int64))


def _arg(name: str, extremum: Op) -> Op:
    def impl(xp: Any, x: Any, axis: int, keepdims: bool) -> Any:
        if x.size == 0 and _nothing_to_choose(name, x.shape, (axis,)):
            return xp.empty(shape_rules.reduced_shape(x.shape, (axis,), keepdims), np.int64)
        found = getattr(xp, name)(x, axis=axis, keepdims=keepdims)
        if xp is np or x.dtype.kind not in "fcV":
            return found
        lost = xp.isnan(x)  # of several NaN CuPy gives any
        first = xp.argmax(lost, axis=axis, keepdims=keepdims)
        return xp.where(xp.any(lost, axis=axis, keepdims=keepdims), first, found)

    def decompose(x: Any, axis: int, keepdims: bool) -> Any:
        """The smallest of the places, along the whole dimension, that hold the extremum; NaN, where there is one, is
        that."""
        n = x.shape[axis]
        best = apply(extremum, (x,), {"axis": (axis,), "keepdims": True})
        hit = x == best
        if x.dtype.kind in "fcV":
            hit = hit | isnan(x)
        places = apply(POSITIONS, (x,), {"axis": axis, "start": 0})
        return apply(MIN, (select(hit, places, n),), {"axis": (axis,), "keepdims": keepdims})

    return Op(
        name,
        ("x",),
        impl,
        _infer_arg,
        nondifferentiable=_INT,
        decompose=decompose,
        overrides={"cupy": for_floats(functools.partial(kernels.row_places, extremum is MAX))},
        params={"axis": AXIS, "keepdims": FLAG},
    )


ARGMAX, ARGMIN = _arg("argmax", MAX), _arg("argmin", MIN)


def _reduce(
    op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any = None, mask: Any = None, initial: Any = None
) -> Array:
    """``op`` of the elements that the mask selects (None: all), joined with ``initial`` (None: nothing)."""
    if mask is not None or initial is not None:
        return _masked(op, x, axis, keepdims, dtype, mask, initial)
    if dtype is not None:
        return _reduce_in(op, x, axis, keepdims, dtype)
    x = as_array(x)
    ndim = x._buf.ndim
    axes = tuple(range(ndim)) if axis is None else shape_rules.normalize_axis(op.name, axis, ndim)
    return apply(op, (x,), {"axis": axes, "keepdims": bool(keepdims)})


def _reduce_in(op: Op, x: Any, axis: Axis, keepdims: bool, dtype: Any) -> Any:
    """The reduction computed, and given, in another dtype; small integers asked for are accumulated wide and cut
    off."""
    dtype = as_dtype(dtype, op.name)
    if (buf := large(x, dtype)) is not None:
        axes, ufunc = shape_rules.normalize_axis(op.name, axis, buf.ndim), _UFUNCS[op.name]
        wide = np.dtype(np.float32) if is_low_precision(dtype) else None

        def piece(b: np.ndarray) -> np.ndarray:
            return ufunc.reduce(b.astype(dtype, copy=False), axis=axes, dtype=wide, keepdims=True)

        return wrap(joined(piece, ufunc, axes, keepdims, buf).astype(dtype, copy=False))
    return astype(_reduce(op, astype(x, dtype, copy=False), axis, keepdims), dtype, copy=False)


# ----- of a mask ------------------------------------------------------------------------------------------------------

_NEUTRAL = {SUM: 0, PROD: 1, ANY: 0, ALL: 1}
_JOIN = {SUM: add, PROD: multiply, MAX: maximum, MIN: minimum}


def selection(name: str, mask: Any, x: Array) -> Array:
    """A mask in the shape of the array that it is of."""
    mask = as_array(mask)
    if mask.dtype.kind != "b":
        raise DTypeError(f"[{name}] where must be boolean, got {mask.dtype.name}: compare, x != 0")
    if np.broadcast_shapes(mask.shape, x.shape) != x.shape:
        raise ShapeError(f"[{name}] where of shape {mask.shape} does not broadcast to an array of shape {x.shape}")
    return broadcast_to(mask, x.shape)


def _masked(op: Op, x: Any, axis: Any, keepdims: bool, dtype: Any, mask: Any, initial: Any) -> Array:
    x = as_array(x)
    if mask is not None:
        if op not in _NEUTRAL and initial is None:
            raise ArgumentError(
                f"[{op.name}] of what where= selects may be of nothing: say its value then with initial="
            )
        mask = selection(op.name, mask, x)
    axes = shape_rules.normalize_axis(op.name, axis, x.ndim)

    def of(x: Array, mask: Any, keepdims: bool, dtype: Any) -> Array:
        if mask is not None:
            x = _kept(op.name, select(mask, x, _NEUTRAL.get(op, initial)), x.dtype)
        if op not in _NEUTRAL and builtins.any(x.shape[a] == 0 for a in axes) and initial is not None:
            return full(shape_rules.reduced_shape(x.shape, axes, keepdims), initial, dtype=x.dtype)
        return _reduce(op, x, axes, keepdims, dtype)

    if buffer(mask) is None or (buf := large(x)) is None:
        out = of(x, mask, keepdims, dtype)
    else:
        last = x.dtype if dtype is None else as_dtype(dtype, op.name)
        short = op in (SUM, PROD) and is_low_precision(last)

        def piece(b: np.ndarray, m: np.ndarray) -> np.ndarray:
            return of(wrap(b), wrap(m), True, np.float32 if short else dtype)._buf

        found = joined(piece, _UFUNCS[op.name], axes, keepdims, buf, mask._buf)
        out = astype(wrap(found), last) if short else wrap(found)
    if initial is None:
        return out
    if out.dtype.kind == "b" and result_type(out, initial).kind in "iu":
        initial = initial != 0  # beside truths a number is one: -1 is the largest of all then
    return _kept(op.name, _JOIN[op](out, initial), out.dtype)


def _kept(name: str, x: Array, dtype: np.dtype) -> Array:
    """A result joined with ``initial``, in the ``dtype`` that it has without."""
    if dtype.kind in "biu" and x.dtype.kind not in "biu":
        raise DTypeError(f"[{name}] initial= is no number of {dtype.name}: cast the array with astype")
    return astype(x, dtype, copy=False)


# ----- functions ------------------------------------------------------------------------------------------------------


def sum(
    x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """Sum over axes. Small integers sum in the default integer; 0 for no elements.

    Only elements where ``where`` holds are summed, and ``initial`` is added.

    >>> mt.sum(mt.asarray([[1, 2], [3, 4]]), axis=0)
    Array([4, 6])
    """
    return _reduce(SUM, x, axis, keepdims, dtype, where, initial)


def prod(
    x: Any, /, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """Product over axes; 1 for no elements. ``initial`` and ``where`` are as in :func:`sum`.

    >>> mt.prod(mt.asarray([2, 3, 4]))
    Array(24)
    """
    return _reduce(PROD, x, axis, keepdims, dtype, where, initial)


def max(x: Any, /, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None) -> Array:
    """Largest element; NaN if there is one. Tied elements share the gradient evenly.

    >>> mt.max(mt.asarray([[1, 5], [7, 2]]), axis=1)
    Array([5, 7])
    """
    return _reduce(MAX, x, axis, keepdims, None, where, initial)


def min(x: Any, /, axis: Axis = None, *, keepdims: bool = False, initial: Any = None, where: Any = None) -> Array:
    """Smallest element; NaN if there is one. Tied elements share the gradient evenly.

    >>> mt.min(mt.asarray([[1, 5], [7, 2]]), axis=0)
    Array([1, 2])
    """
    return _reduce(MIN, x, axis, keepdims, None, where, initial)


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
    return _reduce(ANY, x, axis, keepdims, None, where)


def all(x: Any, /, axis: Axis = None, *, keepdims: bool = False, where: Any = None, out: Any = None) -> Array:
    """Whether all elements are true.

    >>> mt.all(mt.asarray([[True, False], [True, True]]), axis=1)
    Array([False,  True])
    """
    _refuse_out("all", out)
    return _reduce(ALL, x, axis, keepdims, None, where)


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


def repeated(g: Any, shape: tuple[int, ...], axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """``g`` broadcast along the reduced dimensions of ``shape``, in a tenth of the time of ``np.broadcast_to``.

    (That took half the time of the derivative of a small sum.)"""
    g = np.asarray(g)
    if len(axis) == len(shape):
        strides = (0,) * len(shape)
    else:
        kept = iter([s for i, s in enumerate(g.strides) if not keepdims or i not in axis])
        strides = tuple([0 if i in axis else next(kept) for i in range(len(shape))])
    out = np.ndarray(shape, g.dtype, g, 0, strides) if g.flags.forc else as_strided(g, shape, strides)
    out.flags.writeable = False
    return out
