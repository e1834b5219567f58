"""Products of matrices in float8, with one scale for each operand (Micikevicius et al., 2022, arXiv:2209.05433).

An operand is divided by its scale and rounded to float8; products of such numbers are summed in float32 and multiplied
by both scales. Scales are powers of two, so that dividing by them rounds nothing but what falls below float8's range.

Rounding has no slope of use. The derivative is that of the product of the rounded operands as if these had not been
rounded ("straight through"), with cotangents in ``float8_e5m2``, whose range is wider.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends import cublaslt
from ..backends.float8 import FLOAT8, Float8
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import as_dtype, finfo, float8_e4m3fn, is_low_precision, result_type
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..kernels import float8 as kernels
from ..ops.creation import asarray, beside
from ..ops.matmul import MATMUL
from ..ops.param_kinds import DTYPE, FLAG
from ..reductions.reductions import MAX, MIN

LEAST = -126
"""Of exponents of scales: that of the smallest normal float32."""


def _scale(xp: Any, x: Any, dtype: np.dtype) -> Any:
    _short(FLOAT8_SCALE, (x,))
    if not x.size:
        return xp.asarray(2.0**LEAST, np.float32)
    largest, smallest = (
        op.bind(xp)(x, axis=tuple(range(x.ndim)), keepdims=False).astype(np.float32) for op in (MAX, MIN)
    )
    extreme = xp.maximum(largest, -smallest)
    fraction, exponent = xp.frexp(extreme / np.float32(finfo(dtype).max))  # fraction * 2**exponent, from 1/2 on
    exponent = xp.where(fraction == 0, LEAST, xp.maximum(exponent - (fraction == 0.5), LEAST))
    # Of an infinity the scale is infinite, and the product NaN.
    return xp.where(xp.isfinite(extreme), xp.ldexp(np.float32(1), exponent), extreme)


def _short(op: Op, args: tuple[Any, ...]) -> np.dtype:
    """float32, in which all is computed. Raises :class:`DTypeError` for operands with more digits."""
    for what, a in zip(op.operands, args, strict=False):
        if a.dtype != np.float32 and not is_low_precision(a.dtype):
            raise DTypeError(f"[{op.name}] {what} must be float32, float16, bfloat16 or float8, got {a.dtype.name}")
    return np.dtype(np.float32)


# A larger extreme has no smaller scale: the scale of an array is the largest one of its blocks.
FLOAT8_SCALE = Op(
    "float8_scale",
    ("x",),
    _scale,
    lambda op, args, params: ShapeDtype((), _short(op, args)),
    overrides={"cupy": kernels.scale},
    nondifferentiable="the choice of a range",
    params={"dtype": DTYPE},
)


def _rounded(x: np.ndarray, scale: np.ndarray, dtype: np.dtype, rounds: bool) -> np.ndarray:
    """Numbers of float8, as float32. What is finite stays so."""
    if not rounds:
        return x.astype(np.float32)
    most = np.float32(finfo(dtype).max)
    with np.errstate(invalid="ignore", over="ignore"):
        z = x.astype(np.float32) / scale
        np.clip(z, -most, most, out=z, where=np.isfinite(z))
        return z.astype(dtype).astype(np.float32)


def _scaled(xp: Any, sums: Any, x_scale: Any, y_scale: Any, dtype: np.dtype) -> Any:
    """Sums times both scales. Neither the product of the scales nor that with one of them need be within float32."""
    both = xp.multiply(x_scale, y_scale, dtype=np.float64)
    return xp.multiply(sums, both, out=sums, casting="unsafe").astype(dtype, copy=False)


def _matmul(
    xp: Any,
    x: Any,
    y: Any,
    x_scale: Any,
    y_scale: Any,
    x_dtype: np.dtype,
    y_dtype: np.dtype,
    dtype: np.dtype,
    x_rounds: bool,
    y_rounds: bool,
) -> Any:
    _short(FLOAT8_MATMUL, (x, y))
    with np.errstate(invalid="ignore", over="ignore"):
        found = MATMUL.numpy(_rounded(x, x_scale, x_dtype, x_rounds), _rounded(y, y_scale, y_dtype, y_rounds))
        return _scaled(xp, found, x_scale, y_scale, dtype)


def _matmul_on_cupy(
    x: Any,
    y: Any,
    x_scale: Any,
    y_scale: Any,
    x_dtype: np.dtype,
    y_dtype: np.dtype,
    dtype: np.dtype,
    x_rounds: bool,
    y_rounds: bool,
) -> Any:
    import cupy

    x_scale, y_scale = (s.astype(np.float32, copy=False) for s in (x_scale, y_scale))
    x, y = _bytes(x, x_scale, x_dtype, x_rounds), _bytes(y, y_scale, y_dtype, y_rounds)
    found = cublaslt.product(x, y, float8=cublaslt.Float8((x_dtype, y_dtype, dtype), (x_scale, y_scale)))
    if found is None:
        found = MATMUL.impl(cupy, kernels.widened(x, x_dtype), kernels.widened(y, y_dtype))
        found = _scaled(cupy, found, x_scale, y_scale, dtype)
    return found


def _bytes(x: Any, scale: Any, dtype: np.dtype, rounds: bool) -> Any:
    if type(x) is Float8:
        return x.memory
    if not rounds:
        return kernels.narrowed(x, dtype)
    if x.flags.c_contiguous or not x.mT.flags.c_contiguous:
        return kernels.scaled(x, scale, dtype)
    return kernels.scaled(x.mT, scale, dtype).mT  # as it lies: a copy of bytes is the smaller one


def _infer(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    _short(op, args[:2])
    shape = MATMUL.infer(MATMUL, tuple(a._replace(dtype=np.dtype(np.float32)) for a in args[:2]), params).shape
    return ShapeDtype(shape, params["dtype"])


FLOAT8_MATMUL = Op(
    "float8_matmul",
    ("x", "y", "x_scale", "y_scale"),
    _matmul,
    _infer,
    overrides={"cupy": _matmul_on_cupy},
    params={"x_dtype": DTYPE, "y_dtype": DTYPE, "dtype": DTYPE, "x_rounds": FLAG, "y_rounds": FLAG},
    wide_sums=True,
)
"""An operand that does not round is of its float8 already, perhaps widened, as sums over ranks and derivatives widen
what is short."""


def _float8(name: str, dtype: Any) -> np.dtype:
    found = as_dtype(dtype, name)
    if found not in FLOAT8:
        raise DTypeError(f"[{name}] takes float8_e4m3fn and float8_e5m2, got {found.name}")
    return found


@composite("float8_scale")
def float8_scale(x: Any, /, dtype: Any = float8_e4m3fn) -> Array:
    """The smallest power of two by which ``x`` can be divided to fit the range of a float8 ``dtype``.

    Parameters
    ----------
    x
        float32, float16 or bfloat16, of any shape.
    dtype
        ``float8_e4m3fn`` (up to 448) or ``float8_e5m2`` (up to 57344).

    Returns
    -------
    Array
        float32 without dimensions, at least ``2**-126``; not finite where an element is not. It has no derivative.

    Raises
    ------
    DTypeError
        For other dtypes.

    Examples
    --------
    >>> mt.nn.float8_scale(mt.asarray([3.0, -897.0], dtype="float32"))
    Array(4., dtype=float32)
    """
    return apply(FLOAT8_SCALE, (asarray(x),), {"dtype": _float8("float8_scale", dtype)})


@composite("float8_matmul")
def float8_matmul(
    x: Any,
    y: Any,
    /,
    x_scale: Any = None,
    y_scale: Any = None,
    *,
    x_dtype: Any = float8_e4m3fn,
    y_dtype: Any = float8_e4m3fn,
    dtype: Any = None,
) -> Array:
    """``x @ y`` with both operands rounded to float8, and sums in float32.

    On a GPU that multiplies float8 (compute capability 8.9, lengths that 16 divides, not ``float8_e5m2`` twice) it is
    one launch beside those that round. Elsewhere the same rounded numbers are multiplied in float32.

    Parameters
    ----------
    x, y
        Matrices or stacks of them, ``(..., m, k)`` and ``(..., k, n)``: float32, float16 or bfloat16, which are divided
        by their scales and rounded, or float8, which are taken as they are.
    x_scale, y_scale
        Float32 numbers without dimensions. By default :func:`float8_scale` of the operand, and 1 for one that is
        float8. What lies beyond the range after the division becomes the largest number. An array is not looked at:
        where it divides, and is 0, not finite or below ``2**-126``, the product is NaN.
    x_dtype, y_dtype
        The float8 dtypes to round to. A float8 operand has its own.
    dtype
        Of the result: float32, float16 or bfloat16. By default that of the operands that are not float8, else float32.

    Returns
    -------
    Array
        ``(..., m, n)``. An element of an operand that is not finite makes all of it NaN where the scale is the default.

    Raises
    ------
    DTypeError, ShapeError
        Where the operands do not fit.
    ArgumentError
        For a number by which no operand can be divided: 0, one that is not finite, or beyond float32's normal ones.

    Notes
    -----
    An element that float32 can hold is finite, whatever the scales. But where a GPU multiplies float8, its library
    multiplies by one scale and the other in float32: there it may be infinite, 0 or NaN on the way.

    The derivative passes straight through the rounding: ``dx = g @ y.mT`` and ``dy = x.mT @ g``, both products of
    float8 with ``g`` in ``float8_e5m2``. A float8 operand gets a cotangent of its own dtype, and its scale that of a
    factor; the scale of another operand gets zero, as the product does not depend on it but by rounding.

    Examples
    --------
    >>> x, w = mt.asarray([[1.0, 300.0]], dtype="float32"), mt.asarray([[0.1], [0.25]], dtype="float32")
    >>> mt.nn.float8_matmul(x, w)  # 300 becomes 288, and 0.1 becomes 0.1015625
    Array([[72.10156]], dtype=float32)
    """
    name = "float8_matmul"
    x, y = asarray(x), asarray(y)
    _short(FLOAT8_MATMUL, (x, y))
    if x.ndim < 2 or y.ndim < 2:
        raise ShapeError(f"[{name}] takes matrices or stacks of them, got shapes {x.shape} and {y.shape}")
    dtypes, scales = [], []
    for which, a, scale, wanted in (("x", x, x_scale, x_dtype), ("y", y, y_scale, y_dtype)):
        dtypes.append(a.dtype if a.dtype in FLOAT8 else _float8(name, wanted))
        if scale is not None:
            given, scale = scale, asarray(scale, dtype=np.float32, device=beside(a))
            if scale.ndim:
                raise ShapeError(f"[{name}] {which}_scale is one number, got shape {scale.shape}")
            seen = isinstance(given, int | float | np.generic | np.ndarray)
            if seen and a.dtype not in FLOAT8 and not 2.0**LEAST <= np.abs(given) <= finfo(np.float32).max:
                raise ArgumentError(f"[{name}] {which}_scale must be a normal number of float32, got {given}")
        elif a.dtype in FLOAT8:
            scale = asarray(1.0, dtype=np.float32, device=beside(a))
        else:
            scale = apply(FLOAT8_SCALE, (a,), {"dtype": dtypes[-1]})
        scales.append(scale)
    wide = [a.dtype for a in (x, y) if a.dtype not in FLOAT8] or [np.dtype(np.float32)]
    out = result_type(*wide) if dtype is None else as_dtype(dtype, name)
    if out != np.float32 and (out in FLOAT8 or not is_low_precision(out)):
        raise DTypeError(f"[{name}] the result is float32, float16 or bfloat16, not {out.name}")
    rounds = {"x_rounds": x.dtype not in FLOAT8, "y_rounds": y.dtype not in FLOAT8}
    return apply(FLOAT8_MATMUL, (x, y, *scales), {"x_dtype": dtypes[0], "y_dtype": dtypes[1], "dtype": out, **rounds})
