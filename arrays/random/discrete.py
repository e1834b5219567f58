"""Discrete distributions: bits, integers, truth values, classes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dtypes import as_dtype
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import composite
from ..core.shape_rules import as_shape
from ..ops.creation import asarray
from ..ops.manipulation import broadcast_to
from ..ops.param_kinds import COUNT, THRESHOLD, WHOLE
from ..reductions.reductions import argmax
from . import bit_transforms as recipes
from .continuous import gumbel, uniform
from .draw import Request, distribution, drawn, floating, number, op_of

BERNOULLI = op_of("bernoulli", recipes.bernoulli, takes_dtype=False, threshold=THRESHOLD)


@distribution(recipes.bits)
def bits(key: Any, shape: int | Sequence[int] = (), dtype: Any = np.uint64) -> Request:
    """Random bits: uint64 or uint32.

    >>> mt.random.bits(mt.random.key(0), (2,))
    Array([ 1609277786247541068, 15789900245555285980], dtype=uint64)
    """
    wanted = as_dtype(dtype, "bits")
    if wanted not in (recipes.U64, recipes.U32):
        raise DTypeError(f"[bits] dtype must be uint64 or uint32, got {wanted.name}")
    return Request(shape, wanted, {})


@distribution(recipes.integers, low=WHOLE, span=COUNT)
def integers(
    key: Any, shape: int | Sequence[int] = (), low: int = 0, high: int | None = None, dtype: Any = np.int64
) -> Request:
    """Integers, ``low <= x < high``, all equally likely.

    By the high half of the product of a 64-bit word and the number of values (Lemire, 2019) without its rejection: the
    probability of a value differs from ``1 / (high - low)`` by less than ``2**-64``.

    Parameters
    ----------
    key
        A key.
    shape
        Shape of the result.
    low, high
        Bounds, which may be anything that fits the dtype (``high`` may be one more). With ``high=None``, ``0 … low -
        1``.
    dtype
        Any integer dtype.

    Examples
    --------
    >>> x = mt.random.integers(mt.random.key(0), (1000,), 1, 7)
    >>> int(mt.min(x)), int(mt.max(x))
    (1, 6)
    """
    wanted = as_dtype(dtype, "integers")
    if wanted.kind not in "iu":
        raise DTypeError(f"[integers] dtype must be an integer dtype, got {wanted.name}")
    try:
        a, b = (0, operator.index(low)) if high is None else (operator.index(low), operator.index(high))
    except TypeError:
        raise DTypeError(f"[integers] low and high must be integers, got {low!r} and {high!r}") from None
    limits = np.iinfo(wanted)
    if not (limits.min <= a < b <= int(limits.max) + 1):
        raise ArgumentError(f"[integers] needs {limits.min} <= low < high <= {int(limits.max) + 1}, got {a} and {b}")
    return Request(shape, wanted, {"low": a, "span": b - a})


@composite("bernoulli")
def bernoulli(key: Any, p: Any = 0.5, shape: int | Sequence[int] | None = None) -> Array:
    """True with probability ``p``.

    Parameters
    ----------
    key
        A key.
    p
        A number between 0 and 1, taken to the nearest multiple of ``2**-32``; or a floating array of such, which
        broadcasts to ``shape`` (numbers outside 0 … 1 mean 0 or 1 there).
    shape
        Shape of the result; that of ``p`` if None.

    Examples
    --------
    >>> keep = mt.random.bernoulli(mt.random.key(0), 0.9, (100_000,))
    >>> round(float(mt.mean(keep)), 2)
    0.9
    """
    if isinstance(p, Array | np.ndarray):
        chance = asarray(p)
        full = chance.shape if shape is None else as_shape("bernoulli", shape)
        wide = recipes.F64 if floating("bernoulli", chance.dtype) == recipes.F64 else recipes.F32
        return uniform(key, full, wide) < broadcast_to(chance, full)
    chance_of_all = number("bernoulli", "p", p)
    if not 0 <= chance_of_all <= 1:
        raise ArgumentError(f"[bernoulli] p must be between 0 and 1, got {chance_of_all}")
    return drawn(BERNOULLI, key, () if shape is None else shape, recipes.BOOL, threshold=round(chance_of_all * 2**32))


@composite("categorical")
def categorical(key: Any, logits: Any, axis: int = -1) -> Array:
    """One class for each row of unnormalised log-probabilities: the result lacks dimension ``axis``.

    By the largest of ``logits`` plus Gumbel noise; a logit of -inf is never chosen (unless all of a row are).

    >>> logits = mt.asarray([[0.0, -mt.inf], [-mt.inf, 5.0]])
    >>> mt.random.categorical(mt.random.key(0), logits)
    Array([0, 1])
    """
    x = asarray(logits)
    wanted = floating("categorical", x.dtype)
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"[categorical] logits of shape {x.shape} have no axis {axis}")
    if x.shape[axis] == 0:
        raise ShapeError(f"[categorical] there is no class to choose from: shape {x.shape}, axis {axis}")
    noise = gumbel(key, x.shape, recipes.F64 if wanted == recipes.F64 else recipes.F32)
    return argmax(x.astype(noise.dtype, copy=False) + noise, axis=axis)
