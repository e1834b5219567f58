"""Elementwise functions: those of the array-API standard, and further ones for models.

Each line of the tables is one op: its name, the function of NumPy/CuPy (or ours) that computes it, and its meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..backends.casts import cast
from ..backends.erf import erf32
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Symbol, apply, as_array, invoke, number
from ..core.dtypes import is_low_precision
from ..core.errors import DTypeError
from ..core.op import NO_PARAMS, Op
from ..core.shape_dtype import ShapeDtype
from ..native import AVAILABLE, ops
from ..native.calls import first
from .examples import EXAMPLES
from .number_ranges import check_numbers

# ----- making ops and functions ---------------------------------------------------------------------------------------


spelled: Any = None
"""A hook for calls with keywords that a function lacks: called with its name, itself, its arguments and the keywords.

``numpy_keywords`` sets it."""


def _function(op: Op, doc: str) -> Callable[..., Any]:
    """The public function of an elementwise op: positional operands, nothing else."""
    if len(op.operands) == 1:

        def fn(x: Any, /, **numpys: Any) -> Array:
            if numpys:
                return spelled(op.name, fn, (x,), numpys)
            if type(x) is Array and type(x._buf) is np.ndarray:
                return invoke(op, (x,), (x._buf,))
            return apply(op, (x,))
    else:

        def fn(x1: Any, x2: Any, /, **numpys: Any) -> Array:
            return spelled(op.name, fn, (x1, x2), numpys) if numpys else apply(op, (x1, x2))

    fn.__name__ = fn.__qualname__ = op.name
    shown = [p for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_KEYWORD]
    fn.__signature__ = inspect.Signature(shown, return_annotation="Array")  # type: ignore[attr-defined]
    call, shown = EXAMPLES[op.name]
    how = (
        "Element by element."
        if len(op.operands) == 1
        else "Element by element; the operands broadcast against each other."
    )
    fn.__doc__ = f"{doc}\n\n{how}\n\n>>> {call}\n{shown}\n"
    return fn


def _unary(
    name: str,
    doc: str,
    impl: str | Callable[..., Any] | None = None,
    *,
    nograd: str | None = None,
    overrides: Mapping[str, Callable[..., Any]] = NO_PARAMS,
) -> Any:
    op = Op(name, ("x",), impl or name, shape_rules.elementwise, nondifferentiable=nograd, overrides=overrides)
    return op, _function(op, doc)


def _binary(
    name: str,
    doc: str,
    impl: str | Callable[..., Any] | None = None,
    *,
    nograd: str | None = None,
    overrides: Mapping[str, Callable[..., Any]] = NO_PARAMS,
) -> Any:
    op = Op(name, ("x", "y"), impl or name, shape_rules.elementwise, nondifferentiable=nograd, overrides=overrides)
    return op, _function(op, doc)


def _floor_divide(xp: Any, x: Any, y: Any) -> Any:
    """NumPy gives NaN where one operand is infinite; the array-API standard the limits that ``x / y`` has there."""
    if all_integers(x, y):
        return xp.floor_divide(x, y)
    far = xp.isinf(x) | xp.isinf(y)
    if xp is np and not far.any():  # a GPU would have to wait for the answer
        return xp.floor_divide(x, y)
    with np.errstate(invalid="ignore"):
        quotient = xp.floor_divide(x, y)
        return xp.where(far, xp.true_divide(x, y), quotient).astype(quotient.dtype, copy=False)


def _round_to(xp: Any, x: Any, decimals: Any) -> Any:
    n = int(decimals)
    if x.dtype.kind in "biu":
        return xp.round(x, n)
    if x.dtype.kind == "c":
        out = xp.empty(x.shape, x.dtype)
        out.real, out.imag = _round_to(xp, x.real, n), _round_to(xp, x.imag, n)
        return out
    wide = x.astype(np.float32) if is_low_precision(x.dtype) else x
    if abs(n) > (38 if wide.dtype == np.float32 else 308):  # beyond the digits of any such float
        return x if n > 0 else xp.where(xp.isfinite(x), x * 0, x)
    with np.errstate(over="ignore"):
        out = xp.round(wide, n).astype(x.dtype, copy=False)
    return xp.where(xp.isfinite(out), out, x) if n > 0 else out  # what is too large to be scaled has no digits there


def all_integers(*operands: Any) -> bool:
    """Whether no operand (buffer or Python number) is floating."""
    return all(isinstance(a, int) if not hasattr(a, "dtype") else a.dtype.kind in "biu" for a in operands)


def _expm1(xp: Any, x: Any) -> Any:
    """Of complex numbers by parts: NumPy loses the digits near the imaginary axis, and the standard's special cases."""
    if x.dtype.kind != "c":
        return xp.expm1(x)
    a, b = x.real, x.imag
    with np.errstate(all="ignore"):
        half = xp.sin(b / 2)
        re = xp.expm1(a) * xp.cos(b) - 2 * half * half
        im = xp.exp(a) * xp.sin(b)
        re, im = xp.where(b == 0, xp.expm1(a) + 0.0, re), xp.where(b == 0, b, im)  # + 0.0: the zero is positive
        no_angle = ~xp.isfinite(b)
        re = xp.where(no_angle & xp.isinf(a), xp.expm1(a), re)
        im = xp.where(no_angle & (a == -np.inf), 0, im)
    out = xp.empty(x.shape, x.dtype)
    out.real, out.imag = re, im
    return out


def _tanh(xp: Any, x: Any) -> Any:
    out = xp.tanh(x)
    if x.dtype.kind == "c" and ((far := xp.isinf(x.real)).any() if xp is np else True):
        far = xp.isinf(x.real)
        # The limit is reached: C libraries let the zero there turn its sign with the angle, the standard does not.
        out = xp.array(out)
        out.imag = xp.where(far, xp.copysign(0, x.imag), out.imag)
    return out


def _on_cuda(name: str) -> Mapping[str, Callable[..., Any]]:
    """A logical function of CuPy, which takes no complex numbers, on their truths."""

    def impl(*operands: Any) -> Any:
        import cupy

        return getattr(cupy, name)(*[a != 0 if getattr(a, "dtype", _BOOLS).kind == "c" else a for a in operands])

    return {"cupy": impl}


def _sign(xp: Any, x: Any) -> Any:
    out = xp.sign(x)
    # That of -0.0 is 0.0, which ml_dtypes' loops leave as it is.
    return out + out.dtype.type(0) if x.dtype.num >= 256 else out


def _conj(xp: Any, x: Any) -> Any:
    return xp.conj(x) if x.dtype.kind == "c" else x


def _ldexp(xp: Any, x: Any, n: Any) -> Any:
    if not all_integers(n):
        raise DTypeError("[ldexp] the exponent is an integer: write x * 2.0**n for a power that is none")
    out = xp.ldexp(x, n)
    # (Of the dtypes that others register NumPy makes float32.)
    return out.astype(x.dtype, copy=False) if getattr(x, "dtype", out.dtype).num >= 256 else out


_BOOL = "boolean result"
_BOOLS = np.dtype(bool)
_INT = "integer result"
_STEP = "piecewise constant: its derivative is zero wherever it exists"

# ----- arithmetic -----------------------------------------------------------------------------------------------------

ADD, add = _binary("add", "Sum.")
SUBTRACT, subtract = _binary("subtract", "Difference.")
MULTIPLY, multiply = _binary("multiply", "Product.")
DIVIDE, divide = _binary("divide", "Quotient.")
FLOOR_DIVIDE, floor_divide = _binary(
    "floor_divide", "Quotient rounded towards minus infinity.", _floor_divide, nograd=_STEP
)
REMAINDER, remainder = _binary("remainder", "Rest of the floor division, with the sign of the divisor.")
FMOD, fmod = _binary("fmod", "Rest of the division rounded towards zero, with the sign of ``x1``.")
LDEXP, _scaled = _binary("ldexp", "``x1 * 2**x2``, rounded once; ``x2`` are integers.", _ldexp)
POW, pow = _binary("pow", "``x1`` to the power ``x2``.", "power")
NEGATIVE, negative = _unary("negative", "Minus ``x``.")
POSITIVE, positive = _unary("positive", "``x`` itself.")
ABS, abs = _unary("abs", "Magnitude.")
SIGN, sign = _unary("sign", "-1, 0 or 1 (``x / abs(x)`` for complex numbers).", _sign)
RECIPROCAL, reciprocal = _unary("reciprocal", "One over ``x``.")
SQUARE, square = _unary("square", "``x * x``.")
SQRT, sqrt = _unary("sqrt", "Square root.")
CBRT, cbrt = _unary("cbrt", "Cube root, negative for negative numbers.")
HYPOT, hypot = _binary("hypot", "``sqrt(x1**2 + x2**2)`` without overflow on the way.")
MAXIMUM, maximum = _binary("maximum", "The larger one; NaN if either is. At ties each gets half of the gradient.")
MINIMUM, minimum = _binary("minimum", "The smaller one; NaN if either is. At ties each gets half of the gradient.")
FMAX, fmax = _binary("fmax", "The larger one; the other where one is NaN. At ties the first gets the gradient.")
FMIN, fmin = _binary("fmin", "The smaller one; the other where one is NaN. At ties the first gets the gradient.")


def ldexp(x1: Any, x2: Any, /) -> Array:
    # A number is an integer beside bfloat16, too, where others take the dtype of the array.
    return _scaled(x1, as_array(x2) if type(x2) is int and hasattr(x1, "dtype") else x2)


ldexp.__doc__ = _scaled.__doc__

# ----- exponentials and logarithms ------------------------------------------------------------------------------------

EXP, exp = _unary("exp", "``e**x``.")
EXPM1, expm1 = _unary("expm1", "``e**x - 1``, exact near zero.", _expm1)
EXP2, exp2 = _unary("exp2", "``2**x``.")
LOG, log = _unary("log", "Natural logarithm.")
LOG1P, log1p = _unary("log1p", "``log(1 + x)``, exact near zero.")
LOG2, log2 = _unary("log2", "Logarithm to base 2.")
LOG10, log10 = _unary("log10", "Logarithm to base 10.")
LOGADDEXP, logaddexp = _binary("logaddexp", "``log(exp(x1) + exp(x2))`` without overflow.")
LOGADDEXP2, logaddexp2 = _binary("logaddexp2", "``log2(2**x1 + 2**x2)`` without overflow.")

# ----- trigonometry ---------------------------------------------------------------------------------------------------

SIN, sin = _unary("sin", "Sine.")
COS, cos = _unary("cos", "Cosine.")
TAN, tan = _unary("tan", "Tangent.")
ASIN, asin = _unary("asin", "Inverse sine.", "arcsin")
ACOS, acos = _unary("acos", "Inverse cosine.", "arccos")
ATAN, atan = _unary("atan", "Inverse tangent.", "arctan")
ATAN2, atan2 = _binary("atan2", "Angle of the point (``x2``, ``x1``).", "arctan2")
SINH, sinh = _unary("sinh", "Hyperbolic sine.")
COSH, cosh = _unary("cosh", "Hyperbolic cosine.")
TANH, tanh = _unary("tanh", "Hyperbolic tangent.", _tanh)
ASINH, asinh = _unary("asinh", "Inverse hyperbolic sine.", "arcsinh")
ACOSH, acosh = _unary("acosh", "Inverse hyperbolic cosine.", "arccosh")
ATANH, atanh = _unary("atanh", "Inverse hyperbolic tangent.", "arctanh")

# ----- rounding and parts ---------------------------------------------------------------------------------------------

FLOOR, floor = _unary("floor", "Rounded towards minus infinity.", nograd=_STEP)
CEIL, ceil = _unary("ceil", "Rounded towards plus infinity.", nograd=_STEP)
TRUNC, trunc = _unary("trunc", "Rounded towards zero.", nograd=_STEP)
RINT, rint = _unary("rint", "Rounded to the nearest integer, halves to even, as a floating-point number.", nograd=_STEP)
HEAVISIDE, heaviside = _binary("heaviside", "0 below zero, 1 above, ``x2`` there.")
ROUND_TO, round_to = _binary("round_to", "Rounded to so many digits behind the point.", _round_to, nograd=_STEP)
ROUND, round = _unary("round", "Rounded to the nearest integer, halves to even.", nograd=_STEP)
CONJ, conj = _unary("conj", "Complex conjugate; real numbers are their own.", _conj)
REAL, real = _unary("real", "Real part.")
IMAG, imag = _unary("imag", "Imaginary part.")
COPYSIGN, copysign = _binary("copysign", "``x1`` with the sign of ``x2``.")
NEXTAFTER, nextafter = _binary("nextafter", "The next number after ``x1`` towards ``x2``.")

# ----- comparison and logic -------------------------------------------------------------------------------------------

EQUAL, equal = _binary("equal", "Whether equal.", nograd=_BOOL)
NOT_EQUAL, not_equal = _binary("not_equal", "Whether different.", nograd=_BOOL)
LESS, less = _binary("less", "Whether ``x1 < x2``.", nograd=_BOOL)
LESS_EQUAL, less_equal = _binary("less_equal", "Whether ``x1 <= x2``.", nograd=_BOOL)
GREATER, greater = _binary("greater", "Whether ``x1 > x2``.", nograd=_BOOL)
GREATER_EQUAL, greater_equal = _binary("greater_equal", "Whether ``x1 >= x2``.", nograd=_BOOL)
LOGICAL_AND, logical_and = _binary("logical_and", "Both true.", nograd=_BOOL, overrides=_on_cuda("logical_and"))
LOGICAL_OR, logical_or = _binary("logical_or", "Either true.", nograd=_BOOL, overrides=_on_cuda("logical_or"))
LOGICAL_XOR, logical_xor = _binary("logical_xor", "Exactly one true.", nograd=_BOOL, overrides=_on_cuda("logical_xor"))
LOGICAL_NOT, logical_not = _unary("logical_not", "Not true.", nograd=_BOOL, overrides=_on_cuda("logical_not"))
ISNAN, isnan = _unary("isnan", "Whether NaN.", nograd=_BOOL)
ISINF, isinf = _unary("isinf", "Whether infinite.", nograd=_BOOL)
ISFINITE, isfinite = _unary("isfinite", "Whether neither infinite nor NaN.", nograd=_BOOL)
SIGNBIT, signbit = _unary("signbit", "Whether the sign bit is set.", nograd=_BOOL)

# ----- bits -----------------------------------------------------------------------------------------------------------

BITWISE_AND, bitwise_and = _binary("bitwise_and", "Bits set in both.", nograd=_INT)
BITWISE_OR, bitwise_or = _binary("bitwise_or", "Bits set in either.", nograd=_INT)
BITWISE_XOR, bitwise_xor = _binary("bitwise_xor", "Bits set in one.", nograd=_INT)
BITWISE_INVERT, bitwise_invert = _unary("bitwise_invert", "Bits turned over.", nograd=_INT)
BITWISE_LEFT_SHIFT, bitwise_left_shift = _binary("bitwise_left_shift", "Bits moved left.", nograd=_INT)
BITWISE_RIGHT_SHIFT, bitwise_right_shift = _binary("bitwise_right_shift", "Bits moved right.", nograd=_INT)

# ----- with more operands ---------------------------------------------------------------------------------------------


def _where(xp: Any, condition: Any, x: Any, y: Any) -> Any:
    return xp.where(condition, x, y)


WHERE = Op(
    "where",
    ("condition", "x", "y"),
    "where",
    shape_rules.elementwise,
    overrides={"numpy": first(ops.where, _where)} if AVAILABLE else {},
)


def where(condition: Any, x1: Any = None, x2: Any = None, /) -> Any:
    """``x1`` where the condition holds, ``x2`` elsewhere; all three broadcast together. Of a condition alone, :func:`nonzero`.

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
        x1, x2 = (number(v) if getattr(w, "dtype", _BOOLS).kind in "iu" else v for v, w in ((x1, x2), (x2, x1)))
        _check_branches(x1, x2)
    return apply(WHERE, (condition, x1, x2))


def _check_branches(x1: Any, x2: Any) -> None:
    """NumPy lets a number that is out of the range of the other branch wrap around."""
    for value, other in ((x1, x2), (x2, x1)):
        if type(value) is int and not 0 <= value < 128 and getattr(other, "dtype", _BOOLS).kind in "iu":
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


def _relu(xp: Any, x: Any) -> Any:
    if x.dtype.kind == "c":
        raise DTypeError(f"[relu] takes real numbers, got {x.dtype.name}: take real(x), imag(x) or abs(x) first")
    return xp.maximum(x, 0)


def _erf(xp: Any, x: Any) -> Any:
    if xp is np:
        if x.dtype == np.float32:
            return erf32(x)
        if x.dtype.itemsize <= 2 and x.dtype.kind not in "biu":
            return erf32(x.astype(np.float32)).astype(x.dtype)
        from scipy.special import erf as special_erf
    else:
        if x.dtype.kind == "c":
            raise DTypeError(
                f"[erf] of {x.dtype.name} is computed on a CPU alone: move the array with x.to_device('cpu')"
            )
        from cupyx.scipy.special import erf as special_erf
    if x.dtype.itemsize <= 2 and x.dtype.kind not in "biu":  # SciPy knows no float of one or two bytes but float16
        return special_erf(x.astype(np.float32)).astype(x.dtype)
    return special_erf(x)


def _sigmoid(xp: Any, x: Any) -> Any:
    x = x.astype(np.float64) if x.dtype.kind in "biu" else x
    if xp is np and x.ndim and x.dtype.char in "fd" and x.min(initial=0) > (-80 if x.dtype.char == "f" else -700):
        # No exponential overflows: four passes in one piece of memory, a fifth of the time of what follows.
        out = np.negative(x)
        np.exp(out, out=out)
        out += 1
        return np.reciprocal(out, out=out)
    # One exponential of a non-positive number (or one whose real part is not positive): no overflow for either sign.
    right = x.real >= 0 if x.dtype.kind == "c" else x >= 0
    e = xp.exp(xp.where(right, -x, x) if x.dtype.kind == "c" else -xp.abs(x))
    return xp.where(right, 1 / (1 + e), e / (1 + e)).astype(x.dtype, copy=False)


def _silu(xp: Any, x: Any) -> Any:
    wide = x.astype(np.float32) if is_low_precision(x.dtype) else x
    s = SIGMOID.bind(xp)(wide)
    # From where on the sigmoid is 0 in every dtype the product is: that of -inf would be NaN.
    out = wide * s if x.dtype.kind == "c" else xp.maximum(wide, SILU_IS_ZERO) * s
    return out.astype(x.dtype, copy=False)


SILU_IS_ZERO = -1e4


RELU, relu = _unary("relu", "``max(x, 0)``, with gradient 0 at 0.", _relu)
ERF, erf = _unary("erf", "Error function.", _erf)
SIGMOID, sigmoid = _unary(
    "sigmoid",
    "``1 / (1 + exp(-x))`` without overflow.",
    _sigmoid,
    overrides={"numpy": first(ops.sigmoid, _sigmoid)} if AVAILABLE else NO_PARAMS,
)
SILU = Op("silu", ("x",), _silu, shape_rules.elementwise)

# ----- identity with a meaning ----------------------------------------------------------------------------------------


def _identity(xp: Any, x: Any) -> Any:
    return x


def _astype(xp: Any, x: Any, dtype: np.dtype) -> Any:
    return cast(x, dtype)


def _infer_astype(op: Op, args: tuple[Any, ...], params: Any) -> Any:
    return shape_rules.ShapeDtype(args[0].shape, params["dtype"])


def _full_like(xp: Any, x: Any, value: Any, dtype: np.dtype) -> Any:  # (compiled, `float` would be a C double)
    return xp.full(x.shape, value, dtype)


FULL_LIKE = Op("full_like", ("x",), _full_like, _infer_astype, nondifferentiable="a constant")
ALIAS = Op("alias", ("x",), _identity, shape_rules.same)
# Computations on a barrier's result are never merged with those on its operand: they run again.
BARRIER = Op("barrier", ("x",), _identity, shape_rules.same)
STOP_GRADIENT = Op("stop_gradient", ("x",), _identity, shape_rules.same, nondifferentiable="it is what was asked for")
ASTYPE = Op("astype", ("x",), _astype, _infer_astype)


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


def _infer_positions(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    return ShapeDtype(args[0].shape, np.dtype(np.int64))


# Places along a dimension, counted from `start`: on a rank, from where its block starts.
POSITIONS = Op("positions", ("x",), _positions, _infer_positions, nondifferentiable="integer result")
