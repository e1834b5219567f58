"""Reductions of the elements that a mask selects, from an initial value on: NumPy's ``where=`` and ``initial=``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import pieces
from ..backends.pieces import buffer
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import as_array, wrap
from ..core.dtypes import as_dtype, is_low_precision, result_type
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op
from ..ops.creation import full
from ..ops.elementwise import add, maximum, minimum, multiply, where
from ..ops.manipulation import astype, broadcast_to
from . import reduction_ops as ops

_NEUTRAL = {ops.SUM: 0, ops.PROD: 1, ops.ANY: 0, ops.ALL: 1}
_ROUNDING = (ops.SUM, ops.PROD)
_JOIN = {ops.SUM: add, ops.PROD: multiply, ops.MAX: maximum, ops.MIN: minimum}


def selection(name: str, mask: Any, x: Array) -> Array:
    """A mask in the shape of the array that it is of."""
    mask = as_array(mask)
    if mask.dtype.kind != "b":
        raise DTypeError(f"[{name}] where must be boolean, got {mask.dtype.name}: compare, x != 0")
    if np.broadcast_shapes(mask.shape, x.shape) != x.shape:
        raise ShapeError(f"[{name}] where of shape {mask.shape} does not broadcast to an array of shape {x.shape}")
    return broadcast_to(mask, x.shape)


def reduced(op: Op, x: Any, axis: Any, keepdims: bool, dtype: Any, mask: Any, initial: Any) -> Array:
    """``op`` of the elements that the mask selects (None: all), joined with ``initial`` (None: nothing)."""
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
            x = _kept(op.name, where(mask, x, _NEUTRAL.get(op, initial)), x.dtype)
        if op not in _NEUTRAL and any(x.shape[a] == 0 for a in axes) and initial is not None:
            return full(shape_rules.reduced_shape(x.shape, axes, keepdims), initial, dtype=x.dtype)
        return ops.plainly(op, x, axes, keepdims, dtype)

    if buffer(mask) is None or (buf := pieces.large(x)) is None:
        out = of(x, mask, keepdims, dtype)
    else:
        last = x.dtype if dtype is None else as_dtype(dtype, op.name)
        short = op in _ROUNDING and is_low_precision(last)
        found = pieces.reduced(
            lambda b, m: of(wrap(b), wrap(m), True, np.float32 if short else dtype)._buf,
            ops._UFUNC_REDUCE[op.name].__self__,
            axes,
            keepdims,
            buf,
            mask._buf,
        )
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
