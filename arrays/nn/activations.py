"""Activation functions, each stable for large arguments; and the ops of ``swiglu`` and its derivative, one pass through
memory and one launch on a GPU each."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np

from ..backends.pieces import mapped
from ..chains.chains import as_one_launch, one_launch
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Deferred, apply, at_once
from ..core.dtypes import KERNEL_FLOATS, result_type
from ..core.errors import ArgumentError, ShapeError
from ..core.op import Cuda, Op, composite, defined, state
from ..native import ops
from ..native.calls import first
from ..ops.creation import inexact, ordered
from ..ops.elementwise import (
    SILU,
    SILU_IS_ZERO,
    abs,
    clip,
    exp,
    expm1,
    log1p,
    logaddexp,
    maximum,
    minimum,
    relu,
    sigmoid,
    sign,
    where,
)
from ..ops.manipulation import astype, moveaxis
from ..ops.param_kinds import NUMBERS, Kind
from ..ops.wide_floats import in_float32
from .gelu import GELU


@in_float32
def _swiglu(gate: Array, up: Array) -> Array:
    return apply(SILU, (gate,)) * up


@in_float32
def _swiglu_backward(g: Array, gate: Array, up: Array) -> Array:
    gate, up = inexact(gate), inexact(up)  # g may be a number
    s = sigmoid(gate)
    # Beyond the bounds the sigmoid is 0 or 1, and the slope is that: the product of infinity and 0 would be NaN.
    near = gate if gate.dtype.kind == "c" else clip(gate, SILU_IS_ZERO, -SILU_IS_ZERO)
    return g * up * (s * (1.0 + near * (1.0 - s)))


_forward, _backward = at_once("swiglu", _swiglu), at_once("swiglu_backward", _swiglu_backward)
SWIGLU = Op(
    "swiglu",
    ("gate", "up"),
    _forward,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.swiglu, _forward), "cupy": one_launch("swiglu")},
    flops=12,
    cuda=Cuda("larger({0}, ({t})-1e4) * logistic({0}) * {1}"),
)
SWIGLU_BACKWARD = Op(
    "swiglu_backward",
    ("g", "gate", "up"),
    _backward,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.swiglu_backward, _backward), "cupy": one_launch("swiglu_backward")},
    decompose=_swiglu_backward,
    flops=16,
    cuda=Cuda(
        "{0} * {2} * (logistic({1}) * (({t})1 + smaller(larger({1}, ({t})-1e4), ({t})1e4) * (({t})1 - logistic({1}))))"
    ),
)
"""The cotangent of the gate; that of the other operand is ``swiglu(gate, g)``."""

# ----- functions of several ops as one launch -------------------------------------------------------------------------

P = ParamSpec("P")
_FUNCTIONS: dict[str, Callable[..., Array]] = {}


def _pointwise(*arrays: Array, function: str, numbers: tuple[float, ...]) -> Array:
    fn = _FUNCTIONS[function]
    return fn(*arrays, **dict(zip(_options(fn), numbers, strict=True)))


def _options(fn: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of a function, with what they are by default."""
    return {n: p.default for n, p in inspect.signature(fn).parameters.items() if p.kind is p.KEYWORD_ONLY}


@functools.cache
def _chain(function: str) -> Callable[..., Any]:
    return as_one_launch(lambda x, *numbers: _pointwise(x, function=function, numbers=numbers))


def _on_gpu(x: Any, *, function: str, numbers: tuple[float, ...]) -> Any:
    import cupy

    out = _chain(function)(x, *numbers)
    return _composed(cupy, x, function=function, numbers=numbers) if out is NotImplemented else out


_composed = at_once("pointwise", _pointwise)
POINTWISE = Op(
    "pointwise",
    ("x",),
    _composed,
    shape_rules.elementwise,
    decompose=_pointwise,
    overrides={"cupy": _on_gpu},
    params={"function": Kind("the name of an activation function", lambda v, _: v in _FUNCTIONS), "numbers": NUMBERS},
    flops=10,
)
"""An activation function by name, with the values of its keywords in order."""


def _one_op_on_gpu(fn: Callable[P, Array]) -> Callable[P, Array]:
    """Decorator of a function of one array whose ops are elementwise: floats on a GPU go through :data:`POINTWISE`, one
    launch forward and one backward. Elsewhere, and where it is traced, the ops speak for themselves."""
    _FUNCTIONS[fn.__name__] = fn
    defaults = _options(fn)

    @functools.wraps(fn)
    def inner(*args: P.args, **options: P.kwargs) -> Array:
        buf = getattr(args[0], "_buf", None) if len(args) == 1 else None
        if type(buf) is np.ndarray or buf is None or isinstance(buf, Deferred) or buf.dtype not in KERNEL_FLOATS:
            return fn(*args, **options)
        numbers = tuple({**defaults, **options}.values())
        if len(numbers) > len(defaults) or not all(type(n) in (bool, int, float) for n in numbers):
            return fn(*args, **options)
        if any(getattr(r, "lifts", False) for r in state.recorders):
            return fn(*args, **options)
        return apply(POINTWISE, args, {"function": fn.__name__, "numbers": numbers})

    return inner


# ----- functions ------------------------------------------------------------------------------------------------------


def _straight_above(x: Array, gated: Callable[[Array], Array], low: float = -40.0) -> Array:
    """``gated(x)``, which is ``x`` from 40 on and 0 below ``low``, in the digits of every dtype: also where ``x`` times
    a gate that is 0 is NaN."""
    return where(x >= 40.0, x, gated(clip(x, low, 40.0)))


@_one_op_on_gpu
@in_float32
def _gelu_by_tanh(x: Array, /) -> Array:
    def gated(x: Array) -> Array:  # 0.5 * (1 + tanh(u)), whose digits cancel below 0, is the sigmoid of 2u
        return x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))

    return gated(x) if x.dtype.kind == "c" else _straight_above(x, gated)


@composite("gelu")
def gelu(x: Any, /, *, approximate: bool = False) -> Array:
    """``x * Phi(x)`` with the normal distribution function ``Phi`` (Hendrycks and Gimpel, 2016).

    ``approximate=True`` uses their tanh form.

    >>> round(float(mt.nn.gelu(mt.asarray(1.0))), 6)
    0.841345
    """
    x = inexact(x)
    return _gelu_by_tanh(x) if approximate else apply(GELU, (x,))


@composite("silu")
def silu(x: Any, /) -> Array:
    """``x * sigmoid(x)``, also called swish (Ramachandran et al., 2017).

    >>> round(float(mt.nn.silu(mt.asarray(1.0))), 6)
    0.731059
    """
    return apply(SILU, (inexact(x),))


@composite("softplus")
@_one_op_on_gpu
@in_float32
def softplus(x: Any, /, *, beta: float = 1.0) -> Array:
    """``log(1 + exp(beta * x)) / beta``, a smooth :func:`relu`.

    ``beta`` is positive; :class:`ArgumentError` for others (of 0 there is no such function).

    >>> mt.nn.softplus(mt.asarray([-1000.0, 0.0, 1000.0]))
    Array([0.00000000e+00, 6.93147181e-01, 1.00000000e+03], dtype=float64)
    """
    if not beta > 0:
        raise ArgumentError(f"[softplus] beta must be positive, got {beta}")
    x = inexact(ordered("softplus", x))
    if beta == 1:
        return logaddexp(x, 0.0)
    scaled = x * beta
    far = scaled >= 40.0  # where the product may be infinite, and the function is x
    return where(far, x, logaddexp(where(far, 0.0, scaled), 0.0) / beta)


@composite("log_sigmoid")
@_one_op_on_gpu
@in_float32
def log_sigmoid(x: Any, /) -> Array:
    """``log(sigmoid(x))``, finite wherever ``x`` is.

    >>> mt.nn.log_sigmoid(mt.asarray([-1000.0, 1000.0]))
    Array([-1000.,    -0.], dtype=float64)
    """
    return -softplus(-inexact(ordered("log_sigmoid", x)))


@composite("elu")
@_one_op_on_gpu
@in_float32
def elu(x: Any, /, *, alpha: float = 1.0) -> Array:
    """``x`` where it is positive, ``alpha * (exp(x) - 1)`` elsewhere (Clevert et al., 2016).

    Its derivatives at 0 are those of the latter.

    >>> mt.nn.elu(mt.asarray([-1.0, 2.0]))
    Array([-0.63212056,  2.        ], dtype=float64)
    """
    x = inexact(ordered("elu", x))
    # The branch that is not taken must not overflow: infinity times a zero cotangent is NaN.
    return where(x > 0, x, alpha * expm1(where(x > 0, 0.0, x)))


@composite("selu")
@_one_op_on_gpu
@in_float32
def selu(x: Any, /) -> Array:
    """A scaled :func:`elu` that keeps mean 0 and variance 1 from layer to layer (Klambauer et al., 2017).

    >>> mt.nn.selu(mt.asarray([-1.0, 1.0]))
    Array([-1.11133074,  1.05070099], dtype=float64)
    """
    return 1.0507009873554804934193349852946 * elu(x, alpha=1.6732632423543772848170429916717)


@composite("celu")
@_one_op_on_gpu
@in_float32
def celu(x: Any, /, *, alpha: float = 1.0) -> Array:
    """``x`` where it is positive, ``alpha * (exp(x / alpha) - 1)`` elsewhere (Barron, 2017).

    It is smooth for every ``alpha``; :class:`ArgumentError` for 0.

    >>> mt.nn.celu(mt.asarray([-1.0, 2.0]), alpha=2.0)
    Array([-0.78693868,  2.        ], dtype=float64)
    """
    if type(alpha) in (int, float) and alpha == 0:
        raise ArgumentError("[celu] alpha must not be 0: it divides")
    x = inexact(ordered("celu", x))
    return where(x > 0, x, alpha * expm1(where(x > 0, 0.0, x) / alpha))


@composite("leaky_relu")
@_one_op_on_gpu
@in_float32
def leaky_relu(x: Any, /, *, negative_slope: float = 0.01) -> Array:
    """``x`` where it is positive, ``negative_slope * x`` elsewhere (Maas et al., 2013).

    >>> mt.nn.leaky_relu(mt.asarray([-1.0, 2.0]))
    Array([-0.01,  2.  ], dtype=float64)
    """
    x = inexact(ordered("leaky_relu", x))
    return where(x > 0, x, negative_slope * x)


@composite("relu6")
@_one_op_on_gpu
def relu6(x: Any, /) -> Array:
    """``min(max(x, 0), 6)`` (Howard et al., 2017), with gradient 0 at 0 and 6, as :func:`relu` has at 0.

    >>> mt.nn.relu6(mt.asarray([-1.0, 3.0, 9.0]))
    Array([0., 3., 6.], dtype=float64)
    """
    x = ordered("relu6", x)
    return where(x >= 6, 6, relu(x))


@composite("hard_tanh")
@_one_op_on_gpu
def hard_tanh(x: Any, /) -> Array:
    """``x`` limited to -1 … 1, with gradient 0 at both ends.

    >>> mt.nn.hard_tanh(mt.asarray([-3.0, 0.5]))
    Array([-1. ,  0.5], dtype=float64)
    """
    x = ordered("hard_tanh", x)
    return where(x >= 1, 1, where(x <= -1, -1, x))


@composite("hard_sigmoid")
@_one_op_on_gpu
@in_float32
def hard_sigmoid(x: Any, /) -> Array:
    """``min(max(x + 3, 0), 6) / 6``: :func:`sigmoid` of three straight lines.

    >>> mt.nn.hard_sigmoid(mt.asarray([-4.0, 0.0]))
    Array([0. , 0.5], dtype=float64)
    """
    x = inexact(ordered("hard_sigmoid", x))
    return where(x >= 3, 6.0, relu(x + 3.0)) / 6.0  # just below 3 the sum is rounded to 6


@composite("hard_silu")
@_one_op_on_gpu
@in_float32
def hard_silu(x: Any, /) -> Array:
    """``x * hard_sigmoid(x)``, also called hard swish (Howard et al., 2019).

    >>> mt.nn.hard_silu(mt.asarray([-4.0, 3.0]))
    Array([-0.,  3.], dtype=float64)
    """
    x = inexact(ordered("hard_silu", x))
    return maximum(x, -3.0) * hard_sigmoid(x)


@composite("mish")
@_one_op_on_gpu
@in_float32
def mish(x: Any, /) -> Array:
    """``x * tanh(softplus(x))`` (Misra, 2019).

    >>> mt.nn.mish(mt.asarray([0.0, 1.0]))
    Array([0.        , 0.86509839], dtype=float64)
    """
    return mapped(_mish, inexact(ordered("mish", x)))


def _mish(x: Array) -> Array:
    # With e = exp(x) the tangent is e (e + 2) / (e (e + 2) + 2), the sigmoid of x + log(1 + e / 2): 1 from 20 on.
    near = minimum(x, 20.0)
    return maximum(x, SILU_IS_ZERO) * sigmoid(near + log1p(0.5 * exp(near)))


@composite("softsign")
@_one_op_on_gpu
@in_float32
def softsign(x: Any, /) -> Array:
    """``x / (1 + |x|)``.

    >>> mt.nn.softsign(mt.asarray([-1.0, 3.0]))
    Array([-0.5 ,  0.75], dtype=float64)
    """
    x = inexact(x)
    if x.dtype.kind == "c":
        return x / (1.0 + abs(x))
    size = abs(x)
    share, near = 1.0 / (1.0 + size), size < 1
    # Far from 0 the two terms in the derivative of a quotient cancel, and infinity by infinity is NaN.
    return where(near, where(near, x, 0.0) * share, sign(x) * (1.0 - share))


@composite("swiglu")
def swiglu(gate: Any, up: Any, /) -> Array:
    """``silu(gate) * up`` in one pass (Shazeer, 2020), and each of its gradients in one.

    >>> mt.nn.swiglu(mt.asarray([0.0, 100.0]), mt.asarray([3.0, 2.0]))
    Array([  0., 200.], dtype=float64)
    """
    x, y = inexact(gate), inexact(up)
    if x.dtype != y.dtype:  # else the gate's rounding would be seen in a wider result
        dtype = result_type(x.dtype, y.dtype)
        x, y = astype(x, dtype, copy=False), astype(y, dtype, copy=False)
    return apply(SWIGLU, (x, y))


@composite("glu")
@in_float32
def glu(x: Any, /, *, axis: int = -1) -> Array:
    """The first half along ``axis`` times :func:`sigmoid` of the second (Dauphin et al., 2017).

    >>> mt.nn.glu(mt.asarray([2.0, 0.0]))
    Array([1.], dtype=float64)
    """
    x = moveaxis(inexact(x), axis, -1)
    half, odd = divmod(x.shape[-1], 2)
    if odd:
        raise ShapeError(f"[glu] axis {axis} is cut in halves, and its length {x.shape[-1]} is odd")
    return moveaxis(x[..., :half] * sigmoid(x[..., half:]), -1, axis)


@composite("squared_relu")
@_one_op_on_gpu
def squared_relu(x: Any, /) -> Array:
    """``relu(x)**2`` (So et al., 2021).

    >>> mt.nn.squared_relu(mt.asarray([-1.0, 3.0]))
    Array([0., 9.], dtype=float64)
    """
    y = relu(ordered("squared_relu", x))
    return y * y


__all__ = defined(globals())
