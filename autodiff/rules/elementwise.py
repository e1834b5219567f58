"""Derivatives of the elementwise functions; legend in ``registry``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays.native import AVAILABLE
from ...arrays.native import ops as native
from ...arrays.nn import activations, gelu, regression_losses
from ...arrays.ops import elementwise as ew
from .registry import call, conj, defanalytic, defvjp, defvjp_of_short, same


def in_c(kernel: Callable[[Any, Any], Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule; where the kernels in C are there, buffers of NumPy go through ``kernel`` first, which needs one pass
    over them."""
    if not AVAILABLE:
        return rule

    def either(xp, g, ans):
        if xp is np and (out := kernel(g, ans)) is not NotImplemented:
            return out
        return rule(xp, g, ans)

    return either


# ----- arithmetic -----------------------------------------------------------------------------------------------------

defvjp(ew.ADD, x=same, y=same)
defvjp(ew.SUBTRACT, x=same, y=lambda xp, g: -g)
defanalytic(ew.MULTIPLY, x=lambda xp, g, y: g * y, y=lambda xp, g, x: g * x)
defanalytic(ew.DIVIDE, x=lambda xp, g, y: g / y, y=lambda xp, g, y, ans: -g * (ans / y))


# The quotient that the remainder was formed with; floor(x / y) may be off by one where x is close to a multiple of y.
def _remainder_y(xp, g, x, y, ans):
    # (By an infinite divisor `floor_divide` gives the limits of the quotient, while `remainder` was formed with 0 or
    # -1.)
    quotient = xp.where(xp.isinf(y), xp.where(ans == x, 0.0, -1.0), xp.floor_divide(x, y))
    return -g * xp.where(ans == ans, quotient, math.nan)


defvjp(ew.REMAINDER, x=same, y=_remainder_y)
defvjp(ew.FMOD, x=same, y=lambda xp, g, x, y, ans: -g * xp.round((x - ans) / y))
defvjp(ew.HEAVISIDE, x=lambda xp, g: xp.zeros_like(g), y=lambda xp, g, x: xp.where(xp.equal(x, 0), g, 0.0))
defvjp(ew.LDEXP, x=lambda xp, g, y: call(xp, ew.LDEXP, g, y))


def _pow_x(xp, g, x, y):
    # 0 * x**(-1) would be NaN at x = 0 for y = 0, where the derivative is 0.
    if isinstance(y, bool | int | float | complex):  # stays a scalar, which never widens x
        return 0.0 * g if y == 0 else g * conj(xp, y * call(xp, ew.POW, x, y - 1))
    # (Where y is 0 so is the derivative, but not that of it by y: 1 / x, where that is finite.)
    base = xp.where((y == 0) & ~(xp.abs(x) > np.finfo(g.dtype).tiny / 4), 1.0, x)
    return g * conj(xp, y * call(xp, ew.POW, base, y - 1))


def _pow_y(xp, g, x, ans):
    # x**y is constant in y at x = 0 (for y > 0): log 0 must not reach the product.
    complex_too = ans.dtype.kind == "c"  # the logarithm of a negative base is complex where the power is
    if isinstance(x, bool | int | float | complex):  # a number, which CuPy's functions do not take
        with np.errstate(all="ignore"):
            return g * conj(xp, ans * (np.log(complex(x) if complex_too else x).item() if x else 0.0))
    base = xp.where(x == 0, 1.0, x)
    return g * conj(xp, ans * xp.log(base + 0j if complex_too else base))


defvjp(ew.POW, x=_pow_x, y=_pow_y)
defvjp(ew.NEGATIVE, x=lambda xp, g: -g)
defvjp(ew.POSITIVE, x=same)
defvjp(ew.ALIAS, x=same)
defvjp(ew.BARRIER, x=same)
defvjp(ew.ABS, x=lambda xp, g, x: g * xp.sign(x))


def _sign(xp, g, x, ans):
    # Piecewise constant on the line; in the plane only the component of g across x turns the direction x / |x|.
    if x.dtype.kind != "c":
        return None
    return (g - ans * xp.real(xp.conj(ans) * g)) / xp.where(ans == 0, 1.0, xp.abs(x))


defvjp(ew.SIGN, x=_sign)
defanalytic(ew.RECIPROCAL, x=lambda xp, g, ans: -g * (ans * ans))
defvjp_of_short(ew.RECIPROCAL, x=lambda xp, g, x: -(g / x) / x)
defanalytic(ew.SQUARE, x=lambda xp, g, x: 2.0 * g * x)
defanalytic(ew.SQRT, x=lambda xp, g, ans: 0.5 * g / ans)
defvjp_of_short(ew.SQRT, x=lambda xp, g, x: 0.5 * g / xp.sqrt(x))


def _cube_root(xp, g, ans):
    return g / (3.0 * ans * ans)


defvjp(ew.CBRT, x=_cube_root)
defvjp_of_short(ew.CBRT, x=lambda xp, g, x: _cube_root(xp, g, xp.cbrt(x)))


def _cosine(xp, g, x, ans):
    # 0 at the origin, as of every norm; an infinite side is the whole of the length.
    return g * xp.where(xp.isinf(x), xp.sign(x), x / xp.where(ans == 0, math.inf, ans))


defvjp(ew.HYPOT, x=_cosine, y=lambda xp, g, y, ans: _cosine(xp, g, y, ans))

# Ties: maximum and minimum give each side half, as the reductions share evenly; fmax and fmin give all to the first.
# The slope at NaN is NaN, which `ans` is wherever an operand of the first two is.


def _where(xp, condition, x, y):
    return call(xp, ew.WHERE, condition, x, y)


def _chosen(xp, g, chosen, tie, ans):
    out = _where(xp, chosen, g, 0.0)
    if xp is not np or tie.any():
        out = _where(xp, tie, 0.5 * g, out)
    nan = ans != ans
    return _where(xp, nan, ans, out) if xp is not np or nan.any() else out


def _greater(xp, g, x, y, ans):
    return _chosen(xp, g, x > y, x == y, ans)


def _less(xp, g, x, y, ans):
    return _chosen(xp, g, x < y, x == y, ans)


defvjp(ew.MAXIMUM, x=_greater, y=_less)
defvjp(ew.MINIMUM, x=_less, y=_greater)
defvjp(
    ew.FMAX,
    x=lambda xp, g, x, y: _where(xp, (x >= y) | (y != y), g, 0.0),
    y=lambda xp, g, x, y: _where(xp, (x >= y) | (y != y), 0.0, g),
)
defvjp(
    ew.FMIN,
    x=lambda xp, g, x, y: _where(xp, (x <= y) | (y != y), g, 0.0),
    y=lambda xp, g, x, y: _where(xp, (x <= y) | (y != y), 0.0, g),
)

# ----- exponentials and logarithms ------------------------------------------------------------------------------------

defanalytic(ew.EXP, x=lambda xp, g, ans: g * ans)
defanalytic(ew.EXPM1, x=lambda xp, g, x: g * xp.exp(x))  # `ans + 1` has lost the digits of a small slope
defanalytic(ew.EXP2, x=lambda xp, g, ans: g * (ans * math.log(2)))
defvjp_of_short(ew.EXP2, x=lambda xp, g, x: g * (xp.exp2(x - 1.0) * math.log(4)))  # finite where the power is not
defanalytic(ew.LOG, x=lambda xp, g, x: g / x)
defanalytic(ew.LOG1P, x=lambda xp, g, x: g / (x + 1.0))
defanalytic(ew.LOG2, x=lambda xp, g, x: g / math.log(2) / x)  # in this order: products of the largest x overflow
defanalytic(ew.LOG10, x=lambda xp, g, x: g / math.log(10) / x)


def _share(xp, g, x, y, difference):
    # The part of x in the sum: a half of two equal infinities, whose difference is NaN. (At other ties the difference
    # is 0 and has a slope, which the second derivative needs.)
    return g * call(xp, ew.SIGMOID, xp.where((x == y) & (difference != difference), 0.0, difference))


defvjp(ew.LOGADDEXP, x=lambda xp, g, x, y: _share(xp, g, x, y, x - y), y=lambda xp, g, x, y: _share(xp, g, x, y, y - x))
defvjp(
    ew.LOGADDEXP2,
    x=lambda xp, g, x, y: _share(xp, g, x, y, (x - y) * math.log(2)),
    y=lambda xp, g, x, y: _share(xp, g, x, y, (y - x) * math.log(2)),
)

# ----- trigonometry ---------------------------------------------------------------------------------------------------

defanalytic(ew.SIN, x=lambda xp, g, x: g * xp.cos(x))
defanalytic(ew.COS, x=lambda xp, g, x: -g * xp.sin(x))
defanalytic(ew.TAN, x=lambda xp, g, ans: g * (1.0 + ans * ans))
defvjp_of_short(ew.TAN, x=lambda xp, g, x: g / xp.square(xp.cos(x)))
# The factors of 1 - x² are exact near 1, where the square is rounded to the digits of 1.
defanalytic(ew.ASIN, x=lambda xp, g, x: g / xp.sqrt((1.0 - x) * (1.0 + x)))
defanalytic(ew.ACOS, x=lambda xp, g, x: -g / xp.sqrt((1.0 - x) * (1.0 + x)))
defanalytic(ew.ATAN, x=lambda xp, g, x: g / (1.0 + x * x))


def _turn(xp, g, along, across):
    # The square of the length would overflow, or vanish, long before the length does.
    length = xp.hypot(along, across)
    return g * (along / length) / length


defvjp(ew.ATAN2, x=lambda xp, g, x, y: _turn(xp, g, y, x), y=lambda xp, g, x, y: -_turn(xp, g, x, y))
defanalytic(ew.SINH, x=lambda xp, g, x: g * xp.cosh(x))
defanalytic(ew.COSH, x=lambda xp, g, x: g * xp.sinh(x))
defanalytic(ew.TANH, x=in_c(native.tanh_backward, lambda xp, g, ans: g * ((1.0 - ans) * (1.0 + ans))))
defvjp_of_short(ew.TANH, x=lambda xp, g, x: g * (4.0 * _bell(xp, 2.0 * x)))
# The square of a large number would overflow.
defanalytic(ew.ASINH, x=lambda xp, g, x: g / (xp.sqrt(x * x + 1.0) if x.dtype.kind == "c" else xp.hypot(x, 1.0)))
defanalytic(ew.ACOSH, x=lambda xp, g, x: g / (xp.sqrt(x - 1.0) * xp.sqrt(x + 1.0)))
defanalytic(ew.ATANH, x=lambda xp, g, x: g / ((1.0 - x) * (1.0 + x)))

# ----- parts of numbers -----------------------------------------------------------------------------------------------

defvjp(ew.CONJ, x=lambda xp, g: conj(xp, g))
defvjp(ew.REAL, x=same)
defvjp(ew.IMAG, x=lambda xp, g: g * 1j)  # in this order: 1j * np.float64 is a Python complex
defvjp(ew.COPYSIGN, x=lambda xp, g, x, ans: g * xp.sign(x) * xp.sign(ans))
defvjp(ew.NEXTAFTER, x=same)
defvjp(ew.ASTYPE, x=same)

# ----- selection and activations --------------------------------------------------------------------------------------

# Selected, not multiplied: NaN on the side that is not taken must not leak.
defvjp(
    ew.WHERE,
    x=lambda xp, g, condition: call(xp, ew.WHERE, condition, g, 0.0),
    y=lambda xp, g, condition: call(xp, ew.WHERE, condition, 0.0, g),
)
# NaN has the slope NaN.
defvjp(ew.RELU, x=in_c(native.relu_backward, lambda xp, g, ans: xp.where(ans > 0, g, xp.where(ans == ans, 0.0, ans))))
defanalytic(ew.ERF, x=lambda xp, g, x: g * (2 / math.sqrt(math.pi)) * xp.exp(-x * x))
defanalytic(ew.SIGMOID, x=in_c(native.sigmoid_backward, lambda xp, g, ans: g * (ans * (1.0 - ans))))
defvjp_of_short(ew.SIGMOID, x=lambda xp, g, x: g * _bell(xp, x))


def _bell(xp, x):
    """The slope of the sigmoid; the sigmoid itself, rounded to two bytes, is 1 while that is far from 0."""
    return call(xp, ew.SIGMOID, x) * call(xp, ew.SIGMOID, -x)


defanalytic(ew.SILU, x=lambda xp, g, x: call(xp, activations.SWIGLU_BACKWARD, 1.0, x, g))
defanalytic(
    activations.SWIGLU,
    gate=lambda xp, g, gate, up: call(xp, activations.SWIGLU_BACKWARD, g, gate, up),
    up=lambda xp, g, gate: call(xp, activations.SWIGLU, gate, g),
)


defvjp(
    regression_losses.HUBER,
    x=lambda xp, g, x, delta: g * xp.clip(x, -delta, delta),
    delta=lambda xp, g, x, delta: g * xp.maximum(xp.abs(x) - delta, 0.0),
)


def _gelu_slope(xp, g, dy, x):
    # The slope of dy (Phi(x) + x phi(x)) in x, where Phi' = phi and phi' = -x phi.
    # (Factor by factor: the product of short ones would be rounded before it meets the cotangent.)
    if x.dtype.kind != "c":  # beyond it the density is 0, and its product with an infinite square would be NaN
        x = xp.clip(x, -gelu.FAR, gelu.FAR)
    density = xp.exp(-0.5 * x * x)
    return g * conj(xp, dy) * conj(xp, 2.0 - x * x) * conj(xp, density) * (1 / math.sqrt(2 * math.pi))


defvjp(gelu.GELU, x=lambda xp, g, x: call(xp, gelu.GELU_BACKWARD, g, conj(xp, x)))
defvjp(gelu.GELU_BACKWARD, dy=lambda xp, g, x: call(xp, gelu.GELU_BACKWARD, g, conj(xp, x)), x=_gelu_slope)
