"""Implementations of elementwise ops where NumPy has none, or one that loses digits, dtypes or special cases."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.erf import erf32
from ..core.dtypes import is_low_precision, numpy_form
from ..core.errors import DTypeError
from ..core.op import op_named


def floor_divide(xp: Any, x: Any, y: Any) -> Any:
    """NumPy gives NaN where one operand is infinite; the array-API standard the limits that ``x / y`` has there."""
    if all_integers(x, y):
        return xp.floor_divide(x, y)
    far = xp.isinf(x) | xp.isinf(y)
    if xp is np and not far.any():  # a GPU would have to wait for the answer
        return xp.floor_divide(x, y)
    with np.errstate(invalid="ignore"):
        quotient = xp.floor_divide(x, y)
        return xp.where(far, xp.true_divide(x, y), quotient).astype(quotient.dtype, copy=False)


def power(xp: Any, x: Any, y: Any) -> Any:
    return numpy_form(np.power, (x if hasattr(x, "dtype") else y).dtype)(x, y) if xp is np else xp.power(x, y)


def power_on_cuda(x: Any, y: Any) -> Any:
    """CuPy has a number for a negative power of an integer, which NumPy refuses."""
    import cupy

    if type(y) is int and y < 0 and x.dtype.kind in "biu":
        raise ValueError("Integers to negative integer powers are not allowed.")
    return cupy.power(x, y)


def nextafter_on_cuda(x: Any, y: Any) -> Any:
    """CuPy has NaN next to an infinite float16."""
    import cupy

    out = cupy.nextafter(x, y)
    if out.dtype != np.float16:
        return out
    beside = cupy.where(x == y, x, cupy.copysign(np.float16(65504), x))
    return cupy.where(cupy.isinf(x) & ~cupy.isnan(y), beside, out)


def round_to(xp: Any, x: Any, decimals: Any) -> Any:
    n = int(decimals)
    if x.dtype.kind in "biu":
        return xp.round(x, n)
    if x.dtype.kind == "c":
        out = xp.empty(x.shape, x.dtype)
        out.real, out.imag = round_to(xp, x.real, n), round_to(xp, x.imag, n)
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


def expm1(xp: Any, x: Any) -> Any:
    """Of complex numbers by parts: NumPy loses the digits near the imaginary axis, and the standard's special cases."""
    if x.dtype.kind != "c":
        return numpy_form(np.expm1, x.dtype)(x) if xp is np else xp.expm1(x)
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


def logaddexp(xp: Any, x: Any, y: Any, out: Any = None) -> Any:
    dtype = np.result_type(x, y)
    if xp is not np or dtype.char not in "fd":
        return xp.logaddexp(x, y, out=out)
    with np.errstate(invalid="ignore"):
        rest = np.subtract(x, y, dtype=dtype)
    # NumPy's own goes number by number, and takes five to nine times as long as these passes. The difference of two
    # equal infinities is no number, and counts as 0; NaN is in the larger one.
    rest = np.asarray(rest)
    np.fmin(np.negative(np.abs(rest, out=rest), out=rest), 0, out=rest)
    return np.add(np.maximum(x, y), np.log1p(np.exp(rest, out=rest), out=rest), out=rest if out is None else out)


def tanh(xp: Any, x: Any) -> Any:
    out = numpy_form(np.tanh, x.dtype)(x) if xp is np else xp.tanh(x)
    if x.dtype.kind == "c" and ((far := xp.isinf(x.real)).any() if xp is np else True):
        far = xp.isinf(x.real)
        # The limit is reached: C libraries let the zero there turn its sign with the angle, the standard does not.
        out = xp.array(out)
        out.imag = xp.where(far, xp.copysign(0, x.imag), out.imag)
    return out


def sign(xp: Any, x: Any) -> Any:
    out = numpy_form(np.sign, x.dtype)(x) if xp is np else xp.sign(x)
    # That of -0.0 is 0.0, which ml_dtypes' loops leave as it is.
    return out + out.dtype.type(0) if x.dtype.num >= 256 else out


def conj(xp: Any, x: Any) -> Any:
    return xp.conj(x) if x.dtype.kind == "c" else x


def ldexp(xp: Any, x: Any, n: Any) -> Any:
    if not all_integers(n):
        raise DTypeError("[ldexp] the exponent is an integer: write x * 2.0**n for a power that is none")
    out = xp.ldexp(x, n)
    # (Of the dtypes that others register NumPy makes float32.)
    return out.astype(x.dtype, copy=False) if getattr(x, "dtype", out.dtype).num >= 256 else out


def relu(xp: Any, x: Any) -> Any:
    if x.dtype.kind == "c":
        raise DTypeError(f"[relu] takes real numbers, got {x.dtype.name}: take real(x), imag(x) or abs(x) first")
    return xp.maximum(x, 0)


def erf(xp: Any, x: Any) -> Any:
    x = x.astype(np.float64) if x.dtype.kind in "biu" else x  # CuPy has no more than float32 of short integers
    if xp is np:
        if x.dtype == np.float32:
            return erf32(x)
        if x.dtype.itemsize <= 2:
            return erf32(x.astype(np.float32)).astype(x.dtype)
        from scipy.special import erf as special_erf
    else:
        if x.dtype.kind == "c":
            raise DTypeError(
                f"[erf] of {x.dtype.name} is computed on a CPU alone: move the array with x.to_device('cpu')"
            )
        from cupyx.scipy.special import erf as special_erf
    if x.dtype.itemsize <= 2:  # SciPy knows no float of one or two bytes but float16
        return special_erf(x.astype(np.float32)).astype(x.dtype)
    return special_erf(x)


def sigmoid(xp: Any, x: Any) -> Any:
    x = x.astype(np.float64) if x.dtype.kind in "biu" else x
    if is_low_precision(x.dtype):
        return op_named("sigmoid").bind(xp)(x.astype(np.float32, order="C")).astype(x.dtype)
    if xp is np and x.dtype.char in "fd":
        # Four passes in one piece of memory, a fifth of the time of what follows. Where the exponential would overflow
        # the sigmoid is its inverse; each element is computed in one way, whatever stands beside it.
        shape, x, low = x.shape, x.reshape(-1), -80 if x.dtype.char == "f" else -700
        out, far = np.negative(x), x < low if np.fmin.reduce(x, initial=0) < low else None
        np.exp(out if far is None else np.minimum(out, -low, out=out), out=out)
        out += 1
        np.reciprocal(out, out=out)
        if far is not None:
            out[far] = np.exp(x[far])
        return out.reshape(shape)
    # One exponential of a non-positive number (or one whose real part is not positive): no overflow for either sign.
    right = x.real >= 0 if x.dtype.kind == "c" else x >= 0
    e = xp.exp(xp.where(right, -x, x) if x.dtype.kind == "c" else -xp.abs(x))
    return xp.where(right, 1 / (1 + e), e / (1 + e)).astype(x.dtype, copy=False)
