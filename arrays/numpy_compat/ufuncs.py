"""Functions of each element that the standard lacks."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..backends.pieces import mapped
from ..core.array import Array
from ..core.dtypes import finfo
from ..core.op import composite
from ..ops import elementwise as ew
from ..ops.creation import asarray, inexact, ordered
from ..ops.elementwise import where
from ..ops.manipulation import concat, moveaxis
from ..ops.wide_floats import in_float32
from ..reductions.cumulative import cumulative_sum, diff


def round(x: Any, /, decimals: int = 0) -> Array:
    """Rounded to ``decimals`` digits behind the point (before it, where negative), halves to even.

    >>> mt.round(mt.asarray([1.234, 2.5])), mt.round(mt.asarray([1.234, 2.5]), 1)
    (Array([1., 2.], dtype=float64), Array([1.2, 2.5], dtype=float64))
    """
    if decimals == 0:
        return ew.round(x)
    x = asarray(x)
    # (A number beside bfloat16 becomes one of it, which has no place for all integers.)
    return x if x.dtype.kind in "biu" and decimals > 0 else in_float32(ew.round_to)(x, int(decimals))


def _floating(x: Any) -> Array:
    """``x`` with integers as floats of the size in which NumPy's functions of each element take them."""
    x = asarray(x)
    return x.astype(np.rint(np.ones(1, x.dtype)).dtype) if x.dtype.kind in "biu" else x


@in_float32
def _scaled(x: Array, factor: float) -> Array:
    return x * factor


@composite("deg2rad")
def deg2rad(x: Any, /) -> Array:
    """Degrees as radians.

    >>> mt.deg2rad(mt.asarray(180.0))
    Array(3.14159265, dtype=float64)
    """
    return _scaled(_floating(ordered("deg2rad", x)), math.pi / 180)


@composite("rad2deg")
def rad2deg(x: Any, /) -> Array:
    """Radians as degrees.

    >>> mt.rad2deg(mt.asarray(mt.pi))
    Array(180., dtype=float64)
    """
    return _scaled(_floating(ordered("rad2deg", x)), 180 / math.pi)


radians, degrees = deg2rad, rad2deg


def fabs(x: Any, /) -> Array:
    """Absolute value as a floating-point number.

    >>> mt.fabs(mt.asarray([-1, 2]))
    Array([1., 2.], dtype=float64)
    """
    return ew.abs(_floating(ordered("fabs", x)))


@composite("float_power")
def float_power(x: Any, y: Any, /) -> Array:
    """A power in at least float64, for all dtypes: negative powers of integers too.

    >>> mt.float_power(mt.asarray([2, 4]), -1)
    Array([0.5 , 0.25], dtype=float64)
    """
    x, y = asarray(x), asarray(y)
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    return ew.pow(x.astype(wide), y.astype(wide))


@composite("modf")
def modf(x: Any, /) -> tuple[Array, Array]:
    """The part behind the point and the whole part, both with the sign of ``x``.

    >>> mt.modf(mt.asarray(-1.5))
    (Array(-0.5, dtype=float64), Array(-1., dtype=float64))
    """
    x = _floating(ordered("modf", x))
    negative = ew.signbit(x)
    size = where(ew.isinf(x), 0, where(negative, -x, x))
    rest = size - ew.trunc(size)
    return where(negative, -rest, rest), ew.trunc(x)


@composite("sinc")
@in_float32  # of a rounded multiple of pi a sine would be another's
def sinc(x: Any, /) -> Array:
    """``sin(pi x) / (pi x)``, which is 1 at 0.

    >>> mt.sinc(mt.asarray([0.0, 0.5]))
    Array([1.        , 0.63661977], dtype=float64)
    """
    return mapped(_sinc, inexact(x))


def _sinc(x: Array) -> Array:
    y = math.pi * x
    small = ew.abs(y) < 1
    # The slopes of the quotient are differences of terms that grow as y shrinks: near 0 they are those of the series.
    square = ew.square(where(small, y, 0))
    near = functools.reduce(lambda sum, k: 1 - sum * square / (2 * k * (2 * k + 1)), range(9, 0, -1), 1.0)
    far = where(small, 1, y)
    return where(small, near, ew.sin(far) / far)


@composite("nan_to_num")
def nan_to_num(x: Any, /, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Array:
    """NaN replaced by ``nan``, infinities by the given numbers, or by the largest and smallest finite ones.

    ``copy`` stands where NumPy has it. It has no meaning here: arrays are values.

    >>> mt.nan_to_num(mt.asarray([mt.nan, 1.0, mt.inf]), posinf=9.0)
    Array([0., 1., 9.], dtype=float64)
    """
    x = asarray(x)
    if x.dtype.kind in "biu":
        return x
    if x.dtype.kind == "c":
        real, imag = (nan_to_num(part(x), copy, nan, posinf, neginf) for part in (ew.real, ew.imag))
        return real + 1j * imag
    limits = finfo(x.dtype)
    x = where(ew.isnan(x), nan, x)
    x = where(x == math.inf, limits.max if posinf is None else posinf, x)
    return where(x == -math.inf, limits.min if neginf is None else neginf, x)


@composite("angle")
def angle(z: Any, /, deg: bool = False) -> Array:
    """The angle of complex numbers in the plane, in radians or degrees.

    >>> mt.angle(mt.asarray([1.0, 1j, -1.0]), deg=True)
    Array([  0.,  90., 180.], dtype=float64)
    """
    z = asarray(z)
    z = inexact(z) if z.dtype.kind == "b" else _floating(z)
    out = ew.atan2(ew.imag(z), ew.real(z)) if z.dtype.kind == "c" else ew.atan2(0.0, ew.stop_gradient(z))
    return rad2deg(out) if deg else out


@composite("unwrap")
@in_float32
def unwrap(x: Any, /, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Array:
    """Angles along ``axis`` without jumps.

    Where neighbours differ by more than half a ``period``, whole periods are added.

    >>> mt.unwrap(mt.asarray([0.0, 3.0, -3.0]))
    Array([0.        , 3.        , 3.28318531], dtype=float64)
    """
    x = moveaxis(inexact(x), axis, -1)
    step = diff(x)
    low = -period / 2
    turned = ew.remainder(step - low, period) + low
    turned = where((turned == low) & (step > 0), -low, turned)
    jump = where(ew.abs(step) < (period / 2 if discont is None else max(discont, period / 2)), 0, turned - step)
    return moveaxis(concat([x[..., :1], x[..., 1:] + cumulative_sum(jump, axis=-1)], axis=-1), -1, axis)


def isposinf(x: Any, /) -> Array:
    """Where an element is plus infinity.

    >>> mt.isposinf(mt.asarray([mt.inf, -mt.inf]))
    Array([ True, False])
    """
    return ordered("isposinf", x) == math.inf


def isneginf(x: Any, /) -> Array:
    """Where an element is minus infinity.

    >>> mt.isneginf(mt.asarray([mt.inf, -mt.inf]))
    Array([False,  True])
    """
    return ordered("isneginf", x) == -math.inf


def isreal(x: Any, /) -> Array:
    """Where the imaginary part is zero.

    >>> mt.isreal(mt.asarray([1j, 2.0]))
    Array([False,  True])
    """
    x = asarray(x)
    return ew.equal(ew.imag(x), 0) if x.dtype.kind == "c" else ew.equal(x, x) | True


def iscomplex(x: Any, /) -> Array:
    """Where the imaginary part is not zero.

    >>> mt.iscomplex(mt.asarray([1j, 2.0]))
    Array([ True, False])
    """
    return ew.logical_not(isreal(x))


def iscomplexobj(x: Any, /) -> bool:
    """Whether the dtype is complex.

    >>> mt.iscomplexobj(mt.asarray([1j]))
    True
    """
    return asarray(x).dtype.kind == "c"


def isrealobj(x: Any, /) -> bool:
    """Whether the dtype is not complex.

    >>> mt.isrealobj(mt.asarray([1.0]))
    True
    """
    return not iscomplexobj(x)
