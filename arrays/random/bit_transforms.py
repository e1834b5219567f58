"""Transforms of random words to numbers: one a distribution, cached by dtype and parameters.

Each recipe is a function of whole groups of words; see ``_philox.BitTransform``. They work in place: their words are
theirs.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import ml_dtypes
import numpy as np

from .philox import BitTransform

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
BF16 = np.dtype(ml_dtypes.bfloat16)
BOOL, I64, U32, U64 = np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.uint32), np.dtype(np.uint64)

FLOATS = {F64: 53, F32: 24, F16: 11, BF16: 8}
"""Supported floating dtypes and the bits of their significands."""


def halves(xp: Any, w: Any) -> Any:
    """Each word as two 32-bit words, the low one first."""
    h = w.view(np.uint32)
    return h if sys.byteorder == "little" else h.reshape(*w.shape, 2)[..., ::-1].reshape(h.shape)


def fraction(xp: Any, w: Any) -> Any:
    """The upper 53 bits as a float64 in [0, 1)."""
    # Signed integers convert to floats several times faster than unsigned ones.
    return (w >> np.uint64(11)).view(np.int64) * 2.0**-53


@functools.cache
def bits(dtype: np.dtype) -> BitTransform:
    words, transform = (2, halves) if dtype == U32 else (1, lambda xp, w: w)
    return BitTransform(1, words, transform, ("Bits", ()))


@functools.lru_cache(maxsize=256)
def uniform(dtype: np.dtype, low: float, high: float) -> BitTransform:
    digits = FLOATS[dtype]
    # Scaling rounds, and may round up to the excluded end.
    below = None if (low, high) == (0.0, 1.0) else largest_below(high, dtype)

    def scaled(xp: Any, u: Any) -> Any:
        if below is not None:
            u *= u.dtype.type(high - low)
            u += u.dtype.type(low)
        # Rounding to half precision is monotone, so that one limit after it serves.
        u = u.astype(dtype, copy=False)
        return u if below is None else xp.minimum(u, below)

    numbers = {"shift": 32 - digits if digits < 32 else 11, "unit": 2.0**-digits, "scaled": below is not None}
    numbers |= {"width": high - low, "low": low, "below": 1.0 if below is None else float(below)}
    kernel = ("Uniform", tuple(numbers.items()))
    if dtype == F64:
        return BitTransform(1, 1, lambda xp, w: scaled(xp, fraction(xp, w)), kernel)

    def short(xp: Any, w: Any) -> Any:
        h = halves(xp, w)
        h >>= np.uint32(32 - digits)
        return scaled(xp, h.astype(np.float32) * np.float32(2.0**-digits))

    return BitTransform(1, 2, short, kernel)


def largest_below(high: float, dtype: np.dtype) -> Any:
    """The largest number of ``dtype`` below ``high``."""
    top = dtype.type(high)
    return top if float(top) < high else np.nextafter(top, dtype.type(-np.inf))


@functools.lru_cache(maxsize=256)
def normal(dtype: np.dtype, mean: float, std: float) -> BitTransform:
    """Box and Muller (1958): two uniforms give two independent normals."""
    wide: Any = np.float64 if dtype == F64 else np.float32

    def polar(xp: Any, radius2: Any, angle: Any) -> Any:
        radius = xp.sqrt(radius2)
        if std != 1.0:
            radius *= wide(std)
        out = xp.empty((radius.shape[0], 2), wide)
        xp.multiply(radius, xp.cos(angle), out=out[:, 0])
        xp.multiply(radius, xp.sin(angle), out=out[:, 1])
        if mean != 0.0:
            out += wide(mean)
        return out.astype(dtype, copy=False)

    def double(xp: Any, w: Any) -> Any:
        # 1 - u is in (0, 1]: its logarithm is finite, and the largest radius is 8.57.
        radius2 = xp.log(1.0 - fraction(xp, w[:, 0]))
        radius2 *= -2.0
        return polar(xp, radius2, fraction(xp, w[:, 1]) * math.tau)

    def single(xp: Any, w: Any) -> Any:
        h = halves(xp, w)
        # All 32 bits of the radius count near 0, where the tail is: the largest radius is 6.76.
        u = h[:, 0].astype(np.float32)
        u += np.float32(0.5)
        u *= np.float32(2.0**-32)
        radius2 = xp.log(u)
        radius2 *= np.float32(-2.0)
        return polar(xp, radius2, h[:, 1].astype(np.float32) * np.float32(math.tau * 2.0**-32))

    kernel = ("Normal", (("width", std), ("low", mean)))
    return BitTransform(2, 2, double, kernel) if dtype == F64 else BitTransform(1, 2, single, kernel)


def ndtr(x: float) -> float:
    """Distribution function of the standard normal, exact in the lower tail."""
    return 0.5 * math.erfc(-x * math.sqrt(0.5))


@functools.lru_cache(maxsize=256)
def truncated(dtype: np.dtype, lower: float, upper: float, mean: float, std: float) -> BitTransform:
    """Inverse distribution function, in float64, on the side of the bell where it is exact."""
    flip = lower > 0
    a, b = (-upper, -lower) if flip else (lower, upper)
    pa, pb = ndtr(a), ndtr(b)

    def transform(xp: Any, w: Any) -> Any:
        if xp.__name__ == "cupy":
            from cupyx.scipy.special import ndtri
        else:
            from scipy.special import ndtri
        # Inside (0, 1): at the ends the inverse is infinite.
        u = xp.minimum((fraction(xp, w) + 2.0**-54) * (pb - pa) + pa, 1 - 2.0**-53)
        z = xp.clip(ndtri(u), a, b)
        return ((-z if flip else z) * std + mean).astype(dtype, copy=False)

    return BitTransform(1, 1, transform)


def survival(xp: Any, w: Any, dtype: np.dtype) -> Any:
    """A uniform variable in (0, 1), finest near 0, as a group of float64 or float32."""
    if dtype == F64:
        u = fraction(xp, w) + 2.0**-54
        return xp.minimum(u, 1 - 2.0**-53)
    u = halves(xp, w).astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-32)
    return xp.minimum(u, np.float32(1 - 2.0**-24))


@functools.lru_cache(maxsize=256)
def exponential(dtype: np.dtype, scale: float) -> BitTransform:
    def transform(xp: Any, w: Any) -> Any:
        out = xp.log(survival(xp, w, dtype))
        out *= out.dtype.type(-scale)
        return out.astype(dtype, copy=False)

    return BitTransform(1, 1 if dtype == F64 else 2, transform, ("Exponential", (("width", -scale),)))


@functools.cache
def gumbel(dtype: np.dtype) -> BitTransform:
    def transform(xp: Any, w: Any) -> Any:
        # -log(1 - u) keeps every digit of a small u, and small ones make the large results, which decide a maximum.
        return (-xp.log(-xp.log1p(-survival(xp, w, dtype)))).astype(dtype, copy=False)

    return BitTransform(1, 1 if dtype == F64 else 2, transform, ("Gumbel", ()))


@functools.lru_cache(maxsize=256)
def integers(dtype: np.dtype, low: int, span: int) -> BitTransform:
    """``low + (word * span) >> 64``: each value has probability within 2**-64 of ``1 / span``."""
    start = np.uint64(low % 2**64)
    s0, s1 = np.uint64(span & 0xFFFFFFFF), np.uint64(span >> 32 & 0xFFFFFFFF)
    c32 = np.uint64(32)

    def transform(xp: Any, w: Any) -> Any:
        if span < 2**64:
            hi, lo = w >> c32, w & np.uint64(0xFFFFFFFF)
            mid = hi * s0 + ((lo * s0) >> c32)
            if s1:
                low_mid = (mid & np.uint64(0xFFFFFFFF)) + lo * s1
                w = hi * s1 + (mid >> c32) + (low_mid >> c32)
            else:
                w = mid >> c32
        return (w + start).astype(dtype, copy=False)

    return BitTransform(1, 1, transform)


@functools.lru_cache(maxsize=256)
def bernoulli(threshold: int) -> BitTransform:
    def transform(xp: Any, w: Any) -> Any:
        h = halves(xp, w)
        return xp.zeros(h.shape, bool) if threshold == 0 else h <= np.uint32(threshold - 1)

    return BitTransform(1, 2, transform, ("Bernoulli", (("width", float(threshold)),)))
