"""``softmax``, ``log_softmax`` and ``logsumexp``.

The first two are ops of their own with backward ops of their own, for which there are kernels: composed of other ops
they are five passes through memory, and as many temporaries. Each is written in plain functions: that form computes
what the kernels do not take, and serves the derivatives of the backward ops, so that every order is right, and rows
that are split over ranks, whose maxima and sums then become collectives (a vocabulary-parallel model).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..backends.row_blocks import wide as _wide
from ..core.array import Array
from ..core.dispatch import apply, at_once
from ..core.dtypes import float8_e4m3fn
from ..core.errors import DTypeError
from ..core.op import Infer, Op, composite
from ..core.shape_rules import normalize_axis, same, same_as_second
from ..kernels import softmaxes
from ..native import ops
from ..native.calls import first
from ..ops.creation import asarray, inexact
from ..ops.elementwise import abs as abs_
from ..ops.elementwise import exp, log, real, stop_gradient
from ..ops.elementwise import where as where_
from ..ops.manipulation import astype, squeeze
from ..ops.param_kinds import AXIS, FLAG
from ..ops.wide_floats import in_float32
from ..reductions.reductions import max as max_
from ..reductions.reductions import sum as sum_


def finite_max(x: Array, axis: Any) -> Array:
    """The largest element as a constant, 0 where it is infinite; a stable log-sum-exp subtracts it."""
    if any(x.shape[a] == 0 for a in ((axis,) if isinstance(axis, int) or not np.ndim(axis) else axis)):
        return sum_(x, axis=axis, keepdims=True)  # zeros: there is no largest of no elements
    m = stop_gradient(max_(x, axis=axis, keepdims=True))
    return where_(abs_(m) == math.inf, 0.0, m)


def _softmax(x: Array, axis: int, masked: bool) -> Array:
    w = astype(x, _wide(x.dtype), copy=False)
    e = exp(w - finite_max(w, axis))
    total = sum_(e, axis=axis, keepdims=True)
    return astype(e / (where_(total == 0, 1.0, total) if masked else total), x.dtype, copy=False)


def _softmax_backward(g: Array, y: Array, axis: int) -> Array:
    gw, yw = (astype(a, _wide(y.dtype), copy=False) for a in (g, y))
    return astype(yw * (gw - sum_(gw * yw, axis=axis, keepdims=True)), y.dtype, copy=False)


def _log_softmax(x: Array, axis: int, masked: bool) -> Array:
    w = astype(x, _wide(x.dtype), copy=False)
    d = w - finite_max(w, axis)
    total = sum_(exp(d), axis=axis, keepdims=True)
    return astype(d - log(where_(total == 0, 1.0, total) if masked else total), x.dtype, copy=False)


def _log_softmax_backward(g: Array, y: Array, axis: int) -> Array:
    gw, yw = (astype(a, _wide(y.dtype), copy=False) for a in (g, y))
    return astype(gw - exp(yw) * sum_(gw, axis=axis, keepdims=True), y.dtype, copy=False)


def _with_kernels(fn: Callable[..., Array], operands: tuple[str, ...], infer: Infer, **facts: Any) -> Op:
    """An op with a kernel on either device, in plain functions where that does not take the operands."""
    name = fn.__name__.removeprefix("_")
    impl = at_once(name, fn)
    overrides = {"numpy": first(getattr(ops, name), impl), "cupy": getattr(softmaxes, name)}
    return Op(name, operands, impl, infer, decompose=fn, overrides=overrides, **facts)


_FORWARD = {"params": {"axis": AXIS, "masked": FLAG}, "wide_sums": True}
SOFTMAX = _with_kernels(_softmax, ("x",), same, **_FORWARD, flops=12)
SOFTMAX_BACKWARD = _with_kernels(_softmax_backward, ("g", "y"), same_as_second, params={"axis": AXIS})
LOG_SOFTMAX = _with_kernels(_log_softmax, ("x",), same, **_FORWARD)
LOG_SOFTMAX_BACKWARD = _with_kernels(_log_softmax_backward, ("g", "y"), same_as_second, params={"axis": AXIS})


def softmax_of_rows(xp: Any, s: Any, masked: bool) -> tuple[Any, Any, Any]:
    """The softmax of rows, in their memory where that may be, their shift, and the sum of the exponentials of what is
    left: 0 and 1 where all of a row is hidden."""
    if xp is not np:
        return softmaxes.softmax_of_rows(s, masked=masked)
    shift, total = (np.empty((*s.shape[:-1], 1), s.dtype) for _ in range(2))
    if ops.softmax_of_rows(s, shift, total, masked) is NotImplemented:
        with np.errstate(all="ignore"):
            shift = s.max(axis=-1, keepdims=True, initial=-math.inf)
            shift[~np.isfinite(shift)] = 0
            s -= shift
            np.exp(s, out=s)
            total = s.sum(axis=-1, keepdims=True)
            total[masked & (total == 0)] = 1
            s /= total
    return s, shift[..., 0], total[..., 0]


# ----- public functions -----------------------------------------------------------------------------------------------


def _floating(name: str, x: Any, axis: int) -> tuple[Array, int]:
    x = asarray(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"[{name}] x must be real, got {x.dtype.name}")
    if x.dtype.kind in "biu":
        x = astype(x, np.float64)
    (axis,) = normalize_axis(name, axis, x.ndim)
    return x, axis


def _mask(name: str, mask: Any) -> Array:
    mask = asarray(mask)
    if mask.dtype.kind != "b":
        raise DTypeError(f"[{name}] where must be boolean, got {mask.dtype.name}")
    return mask


# (The derivative is made from the result: of one of two bytes the exponential would be off by several units in the last
# place.)
@composite("log_softmax")
@in_float32
def log_softmax(x: Any, /, *, axis: int = -1, where: Any = None) -> Array:
    """Logarithm of :func:`softmax`, exact where probabilities are tiny; -inf where ``where`` is false.

    >>> mt.nn.log_softmax(mt.asarray([0.0, 1000.0]))
    Array([-1000.,     0.], dtype=float64)
    """
    if where is None:
        x, axis = _floating("log_softmax", x, axis)
        return apply(LOG_SOFTMAX, (x,), {"axis": axis, "masked": False})
    mask = _mask("log_softmax", where)
    if getattr(x, "dtype", None) == float8_e4m3fn:  # which has no infinity: NaN stands for it
        return astype(log_softmax(astype(x, np.float32), axis=axis, where=mask), float8_e4m3fn)
    x, axis = _floating("log_softmax", where_(mask, x, -math.inf), axis)
    return where_(mask, apply(LOG_SOFTMAX, (x,), {"axis": axis, "masked": True}), -math.inf)


@composite("softmax")
def softmax(x: Any, /, *, axis: int = -1, where: Any = None) -> Array:
    """Positive numbers that sum to one along an axis, in the ratios ``exp(x)``.

    Where ``where`` is false an element has no part in it: its result and its gradient are 0, whatever it is. A row of
    which nothing is left is 0. (Without ``where``, one that is -inf throughout is NaN: the sum of its weights is zero.)
    Sums of float16 and bfloat16 are made in float32.

    Parameters
    ----------
    x
        Real; integers count as float64.
    axis
        The dimension along which the results sum to one.
    where
        Boolean, broadcast against ``x``.

    Raises
    ------
    DTypeError
        For complex numbers, and for a ``where`` that is not boolean.

    Examples
    --------
    >>> mt.nn.softmax(mt.asarray([0.0, 0.0, 9.0]), where=mt.asarray([True, True, False]))
    Array([0.5, 0.5, 0. ], dtype=float64)
    """
    if where is None:
        x, axis = _floating("softmax", x, axis)
        return apply(SOFTMAX, (x,), {"axis": axis, "masked": False})
    mask = _mask("softmax", where)
    if getattr(x, "dtype", None) == float8_e4m3fn:  # which has no infinity
        return astype(softmax(astype(x, np.float32), axis=axis, where=mask), float8_e4m3fn)
    x, axis = _floating("softmax", where_(mask, x, -math.inf), axis)
    return where_(mask, apply(SOFTMAX, (x,), {"axis": axis, "masked": True}), 0.0)


@composite("logsumexp")
@in_float32
def logsumexp(x: Any, /, *, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """``log(sum(exp(x)))`` without overflow; -inf where all elements are -inf.

    Infinite elements have the slope of a maximum. Of complex numbers it is the principal logarithm.

    >>> mt.nn.logsumexp(mt.asarray([[1000.0, 1000.0], [0.0, -mt.inf]]), axis=1)
    Array([1000.69314718,    0.        ], dtype=float64)
    """
    x = inexact(x)
    axes = tuple(range(x.ndim)) if axis is None else axis
    # Of complex numbers a real number is taken off and put back, so that the imaginary part is that of the logarithm.
    r = real(x) if x.dtype.kind == "c" else x
    m = finite_max(r, axes) if x.size == 0 else max_(r, axis=axes, keepdims=True)
    # An infinite maximum is the result, and has the slope of one.
    far = abs_(m) == math.inf
    level = stop_gradient(where_(far, 0.0, m))
    out = where_(far, m, log(sum_(exp(where_(far, 0.0, x) - level), axis=axes, keepdims=True)) + level)
    return out if keepdims else squeeze(out, axes)
