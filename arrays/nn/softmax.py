"""``softmax``, ``log_softmax`` and ``logsumexp``.

The first two are ops of their own with backward ops of their own, computed in blocks that hold whole rows and stay in
cache: composed of other ops they are five passes through memory, and as many temporaries. Each also knows how to
decompose into plain functions: that form serves the derivatives of the backward ops, so that every order is right, and
rows that are split over ranks, whose maxima and sums then become collectives (a vocabulary-parallel model).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backends.row_blocks import by_rows, less, row_dots, row_sums
from ..backends.row_blocks import wide as _wide
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply
from ..core.errors import DTypeError
from ..core.op import Op, composite
from ..core.shape_rules import normalize_axis
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


def shifted(xp: Any, out: Any, x: Any) -> None:
    """``out = x - max``; an infinite maximum is not subtracted."""
    m = x.max(axis=1, keepdims=True, initial=-np.inf) if xp is np or not x.shape[1] else x.max(axis=1, keepdims=True)
    m[xp.isinf(m)] = 0
    less(xp, x, m, out)


def _softmax(xp: Any, x: Any, axis: int, masked: bool) -> Any:
    def block(xp: Any, out: Any, x: Any) -> None:
        shifted(xp, out, x)
        xp.exp(out, out=out)
        total = row_sums(xp, out)
        if masked:
            total[total == 0] = 1
        # A product with the inverse is off by half a unit in the last place more, in half of the time.
        out *= 1 / total

    return by_rows(xp, block, axis, x.dtype, x)


def _softmax_backward(xp: Any, g: Any, y: Any, axis: int) -> Any:
    def block(xp: Any, out: Any, g: Any, y: Any) -> None:
        less(xp, g, row_dots(xp, g, y), out)
        out *= y

    return by_rows(xp, block, axis, y.dtype, g, y)


def _log_softmax(xp: Any, x: Any, axis: int, masked: bool) -> Any:
    def block(xp: Any, out: Any, x: Any) -> None:
        shifted(xp, out, x)
        total = row_sums(xp, xp.exp(out))
        if masked:
            total[total == 0] = 1
        out -= xp.log(total)

    return by_rows(xp, block, axis, x.dtype, x)


def _log_softmax_backward(xp: Any, g: Any, y: Any, axis: int) -> Any:
    def block(xp: Any, out: Any, g: Any, y: Any) -> None:
        xp.exp(y, out=out)
        out *= row_sums(xp, g)
        xp.subtract(g, out, out=out)

    return by_rows(xp, block, axis, y.dtype, g, y)


# ----- the same in plain functions ------------------------------------------------------------------------------------


def _finite_max(x: Array, axis: Any) -> Array:
    """The largest element as a constant, 0 where it is infinite; a stable log-sum-exp subtracts it."""
    if any(x.shape[a] == 0 for a in ((axis,) if isinstance(axis, int) or not np.ndim(axis) else axis)):
        return sum_(x, axis=axis, keepdims=True)  # zeros: there is no largest of no elements
    m = stop_gradient(max_(x, axis=axis, keepdims=True))
    return where_(abs_(m) == math.inf, 0.0, m)


def _decompose_softmax(x: Array, axis: int, masked: bool) -> Array:
    w = astype(x, _wide(x.dtype), copy=False)
    e = exp(w - _finite_max(w, axis))
    total = sum_(e, axis=axis, keepdims=True)
    return astype(e / (where_(total == 0, 1.0, total) if masked else total), x.dtype, copy=False)


def _decompose_softmax_backward(g: Array, y: Array, axis: int) -> Array:
    gw, yw = (astype(a, _wide(y.dtype), copy=False) for a in (g, y))
    return astype(yw * (gw - sum_(gw * yw, axis=axis, keepdims=True)), y.dtype, copy=False)


def _decompose_log_softmax(x: Array, axis: int, masked: bool) -> Array:
    w = astype(x, _wide(x.dtype), copy=False)
    d = w - _finite_max(w, axis)
    total = sum_(exp(d), axis=axis, keepdims=True)
    return astype(d - log(where_(total == 0, 1.0, total) if masked else total), x.dtype, copy=False)


def _decompose_log_softmax_backward(g: Array, y: Array, axis: int) -> Array:
    gw, yw = (astype(a, _wide(y.dtype), copy=False) for a in (g, y))
    return astype(gw - exp(yw) * sum_(gw, axis=axis, keepdims=True), y.dtype, copy=False)


SOFTMAX = Op(
    "softmax",
    ("x",),
    _softmax,
    shape_rules.same,
    decompose=_decompose_softmax,
    overrides={"numpy": first(ops.softmax, _softmax), "cupy": softmaxes.softmax},
    params={"axis": AXIS, "masked": FLAG},
    flops=12,
    wide_sums=True,
)
SOFTMAX_BACKWARD = Op(
    "softmax_backward",
    ("g", "y"),
    _softmax_backward,
    shape_rules.same_as_second,
    decompose=_decompose_softmax_backward,
    overrides={"numpy": first(ops.softmax_backward, _softmax_backward), "cupy": softmaxes.softmax_backward},
    params={"axis": AXIS},
)
LOG_SOFTMAX = Op(
    "log_softmax",
    ("x",),
    _log_softmax,
    shape_rules.same,
    decompose=_decompose_log_softmax,
    overrides={"numpy": first(ops.log_softmax, _log_softmax), "cupy": softmaxes.log_softmax},
    params={"axis": AXIS, "masked": FLAG},
    wide_sums=True,
)
LOG_SOFTMAX_BACKWARD = Op(
    "log_softmax_backward",
    ("g", "y"),
    _log_softmax_backward,
    shape_rules.same_as_second,
    decompose=_decompose_log_softmax_backward,
    overrides={"numpy": first(ops.log_softmax_backward, _log_softmax_backward), "cupy": softmaxes.log_softmax_backward},
    params={"axis": AXIS},
)


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
    x, axis = _floating("log_softmax", where_(mask, x, -math.inf), axis)
    return where_(mask, apply(LOG_SOFTMAX, (x,), {"axis": axis, "masked": True}), -math.inf)


@composite("softmax")
def softmax(x: Any, /, *, axis: int = -1, where: Any = None) -> Array:
    """Positive numbers that sum to one along an axis, in the ratios ``exp(x)``.

    Where ``where`` is false an element has no part in it: its result and its gradient are 0, whatever it is. A row of
    which nothing is left is 0. (A row that is -inf throughout is NaN: there the sum of the weights is zero.) Sums of
    float16 and bfloat16 are made in float32.

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
    m = _finite_max(r, axes) if x.size == 0 else max_(r, axis=axes, keepdims=True)
    # An infinite maximum is the result, and has the slope of one.
    far = abs_(m) == math.inf
    level = stop_gradient(where_(far, 0.0, m))
    out = where_(far, m, log(sum_(exp(where_(far, 0.0, x) - level), axis=axes, keepdims=True)) + level)
    return out if keepdims else squeeze(out, axes)
