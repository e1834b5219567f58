"""Elementwise functions: those of the array-API standard, and further ones for models.

Each line of the tables is one op: its name, the function of NumPy/CuPy (or ours) that computes it, and its meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.backend import backend_of
from ..backends.casts import cast
from ..backends.float8 import FLOAT8, Float8
from ..chains.chains import one_launch
from ..chains.large import of_large
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Symbol, apply, as_array, number
from ..core.dtypes import is_low_precision
from ..core.op import Cuda, Op, composite, defined
from ..kernels import float8
from ..native import AVAILABLE, ops
from ..native.calls import first
from . import element_functions as fn
from .element_rows import BOOL, BOOLS, STEP, binary, comparison, logic, rounding, unary
from .number_ranges import check_numbers
from .param_kinds import AXIS, DTYPE, VALUE, WHOLE

Op.of_large = staticmethod(of_large)
_INT = "integer result"

# ----- arithmetic -----------------------------------------------------------------------------------------------------

ADD, add = binary("add", "Sum.", "[1, 2], 10 -> [11, 12]", cuda=Cuda("sum({0}, {1})", "iuf"), linear=((0, 1),))
SUBTRACT, subtract = binary(
    "subtract", "Difference.", "[5, 2], 1 -> [4, 1]", cuda=Cuda("difference({0}, {1})", "iuf"), linear=((0, 1),)
)
MULTIPLY, multiply = binary(
    "multiply", "Product.", "[1.5, 2.0], 2 -> [3., 4.]", cuda=Cuda("product({0}, {1})", "iuf"), linear=((0,), (1,))
)
DIVIDE, divide = binary("divide", "Quotient.", "[1, 2], 4 -> [0.25, 0.5 ]", cuda="{0} / {1}", linear=((0,),))
FLOOR_DIVIDE, floor_divide = binary(
    "floor_divide",
    "Quotient rounded towards minus infinity.",
    "[7, -7], 2 -> [ 3, -4]",
    fn.floor_divide,
    nograd=STEP,
    overrides={"cupy": one_launch("floor_divide")},
    cuda="rint{f}(floored_quotient({0}, {1}, fmod{f}({0}, {1})))",
)
REMAINDER, remainder = binary(
    "remainder",
    "Rest of the floor division, with the sign of the divisor.",
    "[7, -7], 3 -> [1, 2]",
    overrides={"cupy": one_launch("remainder")},  # CuPy gives NaN where the divisor is infinite
    cuda="floored_rest({1}, fmod{f}({0}, {1}))",
)
FMOD, fmod = binary(
    "fmod",
    "Rest of the division rounded towards zero, with the sign of ``x1``.",
    "[-3.0, 3.0], 2.0 -> [-1.,  1.]",
    cuda="fmod{f}({0}, {1})",
)
LDEXP, _scaled = binary(
    "ldexp", "``x1 * 2**x2``, rounded once; ``x2`` are integers.", "[1.0, 3.0], 2 -> [ 4., 12.]", fn.ldexp
)
POW, pow = binary(
    "pow",
    "``x1`` to the power ``x2``.",
    "[2, 3], 2 -> [4, 9]",
    fn.power,
    overrides={"numpy": first(ops.power, fn.power), "cupy": fn.power_on_cuda},
    cuda="pow{f}({0}, {1})",
)
NEGATIVE, negative = unary(
    "negative",
    "Minus ``x``.",
    "[1, -2] -> [-1,  2]",
    cuda=Cuda("-{0}", "if", "difference({zero}, {0})"),
    linear=((0,),),
    zero_preserving=True,
)
POSITIVE, positive = unary(
    "positive",
    "``x`` itself.",
    "[1, -2] -> [ 1, -2]",
    cuda=Cuda("{0}", "iuf"),
    linear=((0,),),
    view="sometimes",
    zero_preserving=True,
)
ABS, abs = unary(
    "abs", "Magnitude.", "[-3, 2] -> [3, 2]", cuda=Cuda("fabs{f}({0})", "iuf", "magnitude({0})"), zero_preserving=True
)
SIGN, sign = unary(
    "sign",
    "-1, 0 or 1 (``x / abs(x)`` for complex numbers).",
    "[-3.0, 0.0, 2.0] -> [-1.,  0.,  1.]",
    fn.sign,
    cuda=Cuda("sign_of({0})", "iuf"),
    zero_preserving=True,
)
RECIPROCAL, reciprocal = unary("reciprocal", "One over ``x``.", "[2.0, 4.0] -> [0.5 , 0.25]", cuda="1 / {0}")
SQUARE, square = unary(
    "square", "``x * x``.", "[3, -4] -> [ 9, 16]", cuda=Cuda("product({0}, {0})", "iuf"), zero_preserving=True
)
SQRT, sqrt = unary("sqrt", "Square root.", "[4.0, 9.0] -> [2., 3.]", cuda="sqrt{f}({0})", zero_preserving=True)
CBRT, cbrt = unary("cbrt", "Cube root, negative for negative numbers.", "[-8.0, 27.0] -> [-2.,  3.]", cuda=True)
HYPOT, hypot = binary(
    "hypot",
    "``sqrt(x1**2 + x2**2)`` without overflow on the way.",
    "[3.0, 1e300], [4.0, 0.0] -> [5.e+000, 1.e+300]",
    cuda="hypot{f}({0}, {1})",
)
MAXIMUM, maximum = binary(
    "maximum",
    "The larger one; NaN if either is. At ties each gets half of the gradient.",
    "[1, 5], 3 -> [3, 5]",
    cuda=Cuda("larger({0}, {1})", "iuf"),
)
MINIMUM, minimum = binary(
    "minimum",
    "The smaller one; NaN if either is. At ties each gets half of the gradient.",
    "[1, 5], 3 -> [1, 3]",
    cuda=Cuda("smaller({0}, {1})", "iuf"),
)
FMAX, fmax = binary(
    "fmax",
    "The larger one; the other where one is NaN. At ties the first gets the gradient.",
    "[mt.nan, 2.0], 1.0 -> [1., 2.]",
    cuda=Cuda("larger_number({0}, {1})", "iuf"),
)
FMIN, fmin = binary(
    "fmin",
    "The smaller one; the other where one is NaN. At ties the first gets the gradient.",
    "[mt.nan, 2.0], 1.0 -> [1., 1.]",
    cuda=Cuda("smaller_number({0}, {1})", "iuf"),
)


@composite("ldexp")
def ldexp(x1: Any, x2: Any, /) -> Array:
    # A number is an integer beside bfloat16, too, where others take the dtype of the array.
    return _scaled(x1, as_array(x2) if type(x2) is int and hasattr(x1, "dtype") else x2)


ldexp.__doc__ = _scaled.__doc__

# ----- exponentials and logarithms ------------------------------------------------------------------------------------

EXP, exp = unary("exp", "``e**x``.", "[0.0, 1.0] -> [1.        , 2.71828183]", cuda=True, flops=8)
EXPM1, expm1 = unary("expm1", "``e**x - 1``, exact near zero.", "[0.0, 1e-12] -> [0.e+00, 1.e-12]", fn.expm1, cuda=True)
EXP2, exp2 = unary("exp2", "``2**x``.", "[0.0, 3.0] -> [1., 8.]", cuda=True)
LOG, log = unary("log", "Natural logarithm.", "[1.0, mt.e] -> [0., 1.]", cuda=True, flops=8)
LOG1P, log1p = unary("log1p", "``log(1 + x)``, exact near zero.", "[0.0, 1e-12] -> [0.e+00, 1.e-12]", cuda=True)
LOG2, log2 = unary("log2", "Logarithm to base 2.", "[1.0, 8.0] -> [0., 3.]", cuda=True)
LOG10, log10 = unary("log10", "Logarithm to base 10.", "[1.0, 1000.0] -> [0., 3.]", cuda=True)
LOGADDEXP, logaddexp = binary(
    "logaddexp",
    "``log(exp(x1) + exp(x2))`` without overflow.",
    "[0.0, 1000.0], [0.0, 1000.0] -> [6.93147181e-01, 1.00069315e+03]",
    fn.logaddexp,
    takes_out=True,
    cuda="log_of_sum({0}, {1})",
)
LOGADDEXP2, logaddexp2 = binary(
    "logaddexp2", "``log2(2**x1 + 2**x2)`` without overflow.", "mt.asarray(1000.0), 1000.0 -> 1001."
)

# ----- trigonometry ---------------------------------------------------------------------------------------------------

SIN, sin = unary("sin", "Sine.", "[0.0, mt.pi / 2] -> [0., 1.]", cuda=True, flops=12)
COS, cos = unary("cos", "Cosine.", "[0.0, mt.pi] -> [ 1., -1.]", cuda=True, flops=12)
TAN, tan = unary("tan", "Tangent.", "[0.0, 1.0] -> [0.        , 1.55740772]", cuda=True)
ASIN, asin = unary("asin", "Inverse sine.", "[0.0, 1.0] -> [0.        , 1.57079633]", "arcsin", cuda=True)
ACOS, acos = unary("acos", "Inverse cosine.", "[1.0, 0.0] -> [0.        , 1.57079633]", "arccos", cuda=True)
ATAN, atan = unary("atan", "Inverse tangent.", "[0.0, 1.0] -> [0.        , 0.78539816]", "arctan", cuda=True)
ATAN2, atan2 = binary(
    "atan2",
    "Angle of the point (``x2``, ``x1``).",
    "[1.0, -1.0], [0.0, -1.0] -> [ 1.57079633, -2.35619449]",
    "arctan2",
    cuda="atan2{f}({0}, {1})",
)
SINH, sinh = unary("sinh", "Hyperbolic sine.", "[0.0, 1.0] -> [0.        , 1.17520119]", cuda=True)
COSH, cosh = unary("cosh", "Hyperbolic cosine.", "[0.0, 1.0] -> [1.        , 1.54308063]", cuda=True)
TANH, tanh = unary(
    "tanh", "Hyperbolic tangent.", "[0.0, 1.0] -> [0.        , 0.76159416]", fn.tanh, cuda=True, flops=12
)
ASINH, asinh = unary(
    "asinh", "Inverse hyperbolic sine.", "[0.0, 1.0] -> [0.        , 0.88137359]", "arcsinh", cuda=True
)
ACOSH, acosh = unary(
    "acosh", "Inverse hyperbolic cosine.", "[1.0, 2.0] -> [0.       , 1.3169579]", "arccosh", cuda=True
)
ATANH, atanh = unary(
    "atanh", "Inverse hyperbolic tangent.", "[0.0, 0.5] -> [0.        , 0.54930614]", "arctanh", cuda=True
)

# ----- rounding and parts ---------------------------------------------------------------------------------------------

FLOOR, floor = rounding("floor", "Rounded towards minus infinity.", "[1.7, -1.2] -> [ 1., -2.]", "floor")
CEIL, ceil = rounding("ceil", "Rounded towards plus infinity.", "[1.2, -1.7] -> [ 2., -1.]", "ceil")
TRUNC, trunc = rounding("trunc", "Rounded towards zero.", "[1.7, -1.7] -> [ 1., -1.]", "trunc")
RINT, rint = unary(
    "rint",
    "Rounded to the nearest integer, halves to even, as a floating-point number.",
    "[0.5, 1.6] -> [0., 2.]",
    nograd=STEP,
)
HEAVISIDE, heaviside = binary(
    "heaviside", "0 below zero, 1 above, ``x2`` there.", "[-1.0, 0.0, 2.0], 0.5 -> [0. , 0.5, 1. ]"
)
ROUND_TO, round_to = binary(
    "round_to",
    "Rounded to so many digits behind the point.",
    "mt.round(mt.asarray([1.25, -13.0]), 1) -> [  1.2, -13. ]",
    fn.round_to,
    nograd=STEP,
    view="sometimes",
)
ROUND, round = rounding(
    "round", "Rounded to the nearest integer, halves to even.", "[0.5, 1.5, 2.6] -> [0., 2., 3.]", "rint"
)
CONJ, conj = unary(
    "conj",
    "Complex conjugate; real numbers are their own.",
    "[1 + 2j] -> [1.-2.j], dtype=complex128",
    fn.conj,
    cuda=Cuda("{0}", "biuf"),
    view="sometimes",
    zero_preserving=True,
)
REAL, real = unary("real", "Real part.", "[1 + 2j] -> [1.]", cuda=Cuda("{0}", "iuf"), linear=((0,),), view="always")
IMAG, imag = unary("imag", "Imaginary part.", "[1 + 2j] -> [2.]", linear=((0,),), view="always")
COPYSIGN, copysign = binary(
    "copysign", "``x1`` with the sign of ``x2``.", "[1.0, 2.0], [-0.0, 3.0] -> [-1.,  2.]", cuda="copysign{f}({0}, {1})"
)
NEXTAFTER, nextafter = binary(
    "nextafter",
    "The next number after ``x1`` towards ``x2``.",
    "mt.nextafter(mt.asarray([1.0], dtype=mt.float32), 2.0) - 1.0 -> [1.1920929e-07], dtype=float32",
    overrides={"cupy": fn.nextafter_on_cuda},
)

# ----- comparison and logic -------------------------------------------------------------------------------------------

EQUAL, equal = comparison("equal", "Whether equal.", "[1, 2], 2 -> [False,  True]", "==")
NOT_EQUAL, not_equal = comparison("not_equal", "Whether different.", "[1, 2], 2 -> [ True, False]", "!=")
LESS, less = comparison("less", "Whether ``x1 < x2``.", "[1, 2], 2 -> [ True, False]", "<")
LESS_EQUAL, less_equal = comparison("less_equal", "Whether ``x1 <= x2``.", "[1, 2], 1 -> [ True, False]", "<=")
GREATER, greater = comparison("greater", "Whether ``x1 > x2``.", "[1, 2], 1 -> [False,  True]", ">")
GREATER_EQUAL, greater_equal = comparison("greater_equal", "Whether ``x1 >= x2``.", "[1, 2], 2 -> [False,  True]", ">=")
COMPARISONS = (EQUAL, NOT_EQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL)
LOGICAL_AND, logical_and = logic(
    binary, "logical_and", "Both true.", "[True, True], [True, False] -> [ True, False]", "{0} && {1}"
)
LOGICAL_OR, logical_or = logic(
    binary, "logical_or", "Either true.", "[True, False], [False, False] -> [ True, False]", "{0} || {1}"
)
LOGICAL_XOR, logical_xor = logic(
    binary, "logical_xor", "Exactly one true.", "[True, False], True -> [False,  True]", "{0} != {1}"
)
LOGICAL_NOT, logical_not = logic(unary, "logical_not", "Not true.", "[True, False] -> [False,  True]", "!{0}")
ISNAN, isnan = unary(
    "isnan",
    "Whether NaN.",
    "[1.0, mt.nan] -> [False,  True]",
    nograd=BOOL,
    cuda=Cuda("{0} != {0}", "f", computed_in="operands"),
)
ISINF, isinf = unary(
    "isinf",
    "Whether infinite.",
    "[1.0, -mt.inf] -> [False,  True]",
    nograd=BOOL,
    cuda=Cuda("fabs{f}({0}) == infinity<{t}>()", "f", computed_in="operands"),
)
ISFINITE, isfinite = unary(
    "isfinite",
    "Whether neither infinite nor NaN.",
    "[1.0, mt.nan, mt.inf] -> [ True, False, False]",
    nograd=BOOL,
    cuda=Cuda("fabs{f}({0}) < infinity<{t}>()", "f", computed_in="operands"),
)
SIGNBIT, signbit = unary("signbit", "Whether the sign bit is set.", "[1.0, -0.0] -> [False,  True]", nograd=BOOL)

# ----- bits -----------------------------------------------------------------------------------------------------------

BITWISE_AND, bitwise_and = binary(
    "bitwise_and", "Bits set in both.", "[6, 5], 3 -> [2, 1]", nograd=_INT, cuda=Cuda("{0} & {1}", "biu")
)
BITWISE_OR, bitwise_or = binary(
    "bitwise_or", "Bits set in either.", "[6, 5], 3 -> [7, 7]", nograd=_INT, cuda=Cuda("{0} | {1}", "biu")
)
BITWISE_XOR, bitwise_xor = binary(
    "bitwise_xor", "Bits set in one.", "[6, 5], 3 -> [5, 6]", nograd=_INT, cuda=Cuda("{0} ^ {1}", "biu")
)
BITWISE_INVERT, bitwise_invert = unary(
    "bitwise_invert", "Bits turned over.", "[0, 5] -> [-1, -6]", nograd=_INT, cuda=Cuda("!{0}", "biu", "~{0}")
)
BITWISE_LEFT_SHIFT, bitwise_left_shift = binary(
    "bitwise_left_shift", "Bits moved left.", "[1, 3], 2 -> [ 4, 12]", nograd=_INT
)
BITWISE_RIGHT_SHIFT, bitwise_right_shift = binary(
    "bitwise_right_shift", "Bits moved right.", "[8, 3], 1 -> [4, 1]", nograd=_INT
)

# ----- with more operands ---------------------------------------------------------------------------------------------


def _where(xp: Any, condition: Any, x: Any, y: Any) -> Any:
    return xp.where(condition, x, y)


WHERE = Op(
    "where",
    ("condition", "x", "y"),
    "where",
    shape_rules.elementwise,
    overrides={"numpy": first(ops.where, _where)} if AVAILABLE else {},
    linear=((1, 2),),
    cuda=Cuda("{0} ? {1} : {2}", "biuf"),
)


def where(condition: Any, x1: Any = None, x2: Any = None, /) -> Any:
    """``x1`` where the condition holds, ``x2`` elsewhere; all three broadcast together.

    Of a condition alone, :func:`nonzero`.

    >>> mt.where(mt.asarray([True, False]), 1.0, 2.0)
    Array([1., 2.], dtype=float64)
    """
    if type(x1) is int or type(x2) is int:
        _check_branches(x1, x2)
    if x1 is None and x2 is None:
        return as_array(condition).nonzero()
    if isinstance(x1, Symbol) or isinstance(
        x2, Symbol
    ):  # numbers of a compiled call: beside integers, those of this call
        x1, x2 = (number(v) if getattr(w, "dtype", BOOLS).kind in "iu" else v for v, w in ((x1, x2), (x2, x1)))
        _check_branches(x1, x2)
    if type(condition) in (bool, int, float):  # which CuPy does not take
        condition = np.asarray(condition)
    return apply(WHERE, (condition, x1, x2))


def _check_branches(x1: Any, x2: Any) -> None:
    """NumPy lets a number that is out of the range of the other branch wrap around."""
    for value, other in ((x1, x2), (x2, x1)):
        if type(value) is int and not 0 <= value < 128 and getattr(other, "dtype", BOOLS).kind in "iu":
            check_numbers("where", value, other.dtype)


def clip(x: Any, /, min: Any = None, max: Any = None) -> Array:
    """``x`` limited to ``min … max``; either bound may be None.

    >>> mt.clip(mt.asarray([-1.0, 0.5, 3.0]), 0.0, 1.0)
    Array([0. , 0.5, 1. ], dtype=float64)
    """
    bounded = False
    for op, bound in ((MAXIMUM, min), (MINIMUM, max)):
        if bound is not None and not _bounds_nothing(op, as_array(x).dtype, bound):
            x, bounded = apply(op, (x, bound)), True
    return x if bounded else apply(ALIAS, (as_array(x),))


def _bounds_nothing(op: Op, dtype: np.dtype, bound: Any) -> bool:
    """Whether a bound is a Python integer that lies beyond every number of an integer dtype."""
    if type(bound) is not int or dtype.kind not in "iu":
        return False
    limits = np.iinfo(dtype)
    return bound < limits.min if op is MAXIMUM else bound > limits.max


# ----- activations ----------------------------------------------------------------------------------------------------


def _silu(xp: Any, x: Any) -> Any:
    wide = x.astype(np.float32, order="C") if is_low_precision(x.dtype) else x
    s = SIGMOID.bind(xp)(wide)
    # From where on the sigmoid is 0 in every dtype the product is: that of -inf would be NaN.
    out = wide * s if x.dtype.kind == "c" else xp.maximum(wide, SILU_IS_ZERO) * s
    return out.astype(x.dtype, copy=False)


SILU_IS_ZERO = -1e4


RELU, relu = unary(
    "relu",
    "``max(x, 0)``, with gradient 0 at 0.",
    "[-1.0, 2.0] -> [0., 2.]",
    fn.relu,
    cuda=Cuda("larger({0}, {zero})", "iuf"),
)
ERF, erf = unary(
    "erf",
    "Error function.",
    "[0.0, 0.5] -> [0.        , 0.52049988]",
    fn.erf,
    overrides={"cupy": one_launch("erf")},
    cuda=True,
    flops=12,
)
SIGMOID, sigmoid = unary(
    "sigmoid",
    "``1 / (1 + exp(-x))`` without overflow.",
    "[0.0, 1000.0] -> [0.5, 1. ]",
    fn.sigmoid,
    overrides={"numpy": first(ops.sigmoid, fn.sigmoid), "cupy": one_launch("sigmoid")},
    cuda="logistic({0})",
    flops=10,
)
SILU = Op(
    "silu",
    ("x",),
    _silu,
    shape_rules.elementwise,
    overrides={"numpy": first(ops.silu, _silu), "cupy": one_launch("silu")},
    flops=10,
    cuda=Cuda("larger({0}, ({t})-1e4) * logistic({0})"),
)

# ----- identity with a meaning ----------------------------------------------------------------------------------------


def _identity(xp: Any, x: Any) -> Any:
    return x


def _astype(xp: Any, x: Any, dtype: np.dtype) -> Any:
    if type(x) is Float8:
        backend, x = x.backend, float8.widened(x.memory, x.dtype)
        return Float8(backend, float8.narrowed(x, dtype), dtype) if dtype in FLOAT8 else cast(x, dtype)
    if dtype in FLOAT8 and xp.__name__ == "cupy":
        return Float8(backend_of(x), float8.narrowed(x, dtype), dtype)
    return cast(x, dtype)


def _infer_astype(op: Op, args: tuple[Any, ...], params: Any) -> Any:
    return shape_rules.ShapeDtype(args[0].shape, params["dtype"])


def _full_like(xp: Any, x: Any, value: Any, dtype: np.dtype) -> Any:  # (compiled, `float` would be a C double)
    if dtype in FLOAT8:
        return _astype(xp, xp.full(x.shape, value, np.float32), dtype)
    return xp.full(x.shape, value, dtype)


FULL_LIKE = Op(
    "full_like",
    ("x",),
    _full_like,
    _infer_astype,
    nondifferentiable="a constant",
    params={"value": VALUE, "dtype": DTYPE},
)


def _same(name: str, **facts: Any) -> Op:
    linear, cuda = ((0,),), Cuda("{0}", "biuf")
    return Op(name, ("x",), _identity, shape_rules.same, view="always", linear=linear, cuda=cuda, **facts)


ALIAS = _same("alias", zero_preserving=True)
# Computations on a barrier's result are never merged with those on its operand: they run again.
BARRIER = _same("barrier")
STOP_GRADIENT = _same("stop_gradient", nondifferentiable="it is what was asked for", zero_preserving=True)
ASTYPE = Op(
    "astype",
    ("x",),
    _astype,
    _infer_astype,
    params={"dtype": DTYPE},
    view="sometimes",
    linear=((0,),),
    zero_preserving=True,
    cuda=Cuda("{0}", "biuf"),
)


def stop_gradient(x: Any, /) -> Array:
    """``x`` as a constant: no gradient flows through it.

    >>> mt.grad(lambda x: x * mt.stop_gradient(x))(3.0)
    Array(3., dtype=float64)
    """
    return apply(STOP_GRADIENT, (x,))


def _positions(xp: Any, x: Any, axis: int, start: int) -> Any:
    shape = [1] * x.ndim
    shape[axis] = -1
    return xp.broadcast_to(xp.arange(start, start + x.shape[axis]).reshape(shape), x.shape)


# Places along a dimension, counted from `start`: on a rank, from where its block starts.
POSITIONS = Op(
    "positions",
    ("x",),
    _positions,
    shape_rules.places,
    nondifferentiable="integer result",
    params={"axis": AXIS, "start": WHOLE},
    view="sometimes",
)

# The others are in ``mt.nn``, and under ``mt.round``.
__all__ = [n for n in defined(globals()) if n not in ("relu", "round", "round_to", "sigmoid")]
