"""Continuous distributions, by transforms of a fixed number of random bits each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import ArgumentError
from ..ops.param_kinds import NUMBER
from . import bit_transforms as recipes
from .draw import Request, distribution, floating, not_negative, number


@distribution(recipes.uniform, low=NUMBER, high=NUMBER)
def uniform(
    key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64, low: float = 0.0, high: float = 1.0
) -> Request:
    """Uniform numbers, ``low <= x < high``.

    Multiples of ``2**-53`` (float64), ``2**-24`` (float32), ``2**-11`` (float16) or ``2**-8`` (bfloat16), which are
    exact in their dtype, scaled to the interval.

    Parameters
    ----------
    key
        A key: the same key gives the same numbers.
    shape
        Shape of the result.
    dtype
        float64, float32, float16 or bfloat16.
    low, high
        Ends of the interval.

    Examples
    --------
    >>> x = mt.random.uniform(mt.random.key(1), (1000,), low=-1.0, high=1.0)
    >>> bool(mt.all(x >= -1) and mt.all(x < 1))
    True
    """
    wanted = floating("uniform", dtype)
    a, b = number("uniform", "low", low), number("uniform", "high", high)
    with np.errstate(over="ignore"):
        first, last = float(wanted.type(a)), float(wanted.type(b))
        width = b - a if wanted == recipes.F64 else float(np.float32(b - a))
    if not (-math.inf < first < last < math.inf and math.isfinite(width)):
        raise ArgumentError(f"[uniform] there must be {wanted.name} numbers from low up to high, got {a} and {b}")
    return Request(shape, wanted, {"low": a, "high": b})


@distribution(recipes.normal, flops=40, mean=NUMBER, std=NUMBER)
def normal(
    key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64, mean: float = 0.0, std: float = 1.0
) -> Request:
    """Normal numbers.

    By Box and Muller's transform of pairs: elements ``2j`` and ``2j + 1`` of the global array share two uniform
    numbers, of 53 bits for float64 and of 32 bits otherwise. The largest magnitude is 8.57 (float64) or 6.76 standard
    deviations.

    >>> x = mt.random.normal(mt.random.key(0), (10000,), mean=5.0, std=2.0)
    >>> round(float(mt.mean(x)), 1), round(float(mt.std(x)), 1)
    (5.0, 2.0)
    """
    wanted = floating("normal", dtype)
    own = {"mean": number("normal", "mean", mean), "std": not_negative("normal", "std", std)}
    return Request(shape, wanted, own)


@distribution(recipes.truncated, lower=NUMBER, upper=NUMBER, mean=NUMBER, std=NUMBER)
def truncated_normal(
    key: Any,
    lower: float,
    upper: float,
    shape: int | Sequence[int] = (),
    dtype: Any = np.float64,
    mean: float = 0.0,
    std: float = 1.0,
) -> Request:
    """Normal numbers given that they fall between two bounds: ``mean + std * z`` with ``lower <= z <= upper``.

    By the inverse distribution function in float64, of the tail that is exact; rounding to a shorter dtype may round
    onto a bound's neighbour.

    Raises
    ------
    ValueError
        When the interval is empty, or so far out that it has no probability in float64.

    Examples
    --------
    >>> x = mt.random.truncated_normal(mt.random.key(0), -2.0, 2.0, (1000,))
    >>> bool(mt.all(mt.abs(x) <= 2))
    True
    """
    wanted = floating("truncated_normal", dtype)
    a = number("truncated_normal", "lower", lower, finite=False)
    b = number("truncated_normal", "upper", upper, finite=False)
    if not a < b:
        raise ArgumentError(f"[truncated_normal] lower must be below upper, got {a} and {b}")
    # Below about 1e-300 the inverse of the distribution function has no digits left.
    if (recipes.ndtr(-a) - recipes.ndtr(-b) if a > 0 else recipes.ndtr(b) - recipes.ndtr(a)) < 1e-300:
        raise ArgumentError(f"[truncated_normal] a normal number has no chance of lying between {a} and {b}")
    place = {"mean": number("truncated_normal", "mean", mean), "std": not_negative("truncated_normal", "std", std)}
    return Request(shape, wanted, {"lower": a, "upper": b, **place})


@distribution(recipes.exponential, scale=NUMBER)
def exponential(key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64, scale: float = 1.0) -> Request:
    """Exponential numbers of mean ``scale``: ``-scale * log(u)``; at most 37.4 (float64) or 22.9 times ``scale``.

    >>> bool(mt.all(mt.random.exponential(mt.random.key(0), (100,)) > 0))
    True
    """
    wanted = floating("exponential", dtype)
    return Request(shape, wanted, {"scale": not_negative("exponential", "scale", scale)})


@distribution(recipes.gumbel)
def gumbel(key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64) -> Request:
    """Standard Gumbel numbers, ``-log(-log(u))``.

    The largest of ``logits + gumbel`` is a draw from ``softmax(logits)``.

    >>> mt.random.gumbel(mt.random.key(0), (3,)).shape
    (3,)
    """
    return Request(shape, floating("gumbel", dtype), {})
