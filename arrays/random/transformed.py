"""Distributions by transforms of other draws. Their parameters may be arrays, and have gradients (the random numbers
have none)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dispatch import Deferred
from ..core.dtypes import as_dtype
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import composite, defined
from ..core.shape_rules import as_shape
from ..linalg.decompositions import cholesky
from ..ops.creation import asarray
from ..ops.elementwise import exp, floor, log1p, sqrt, tan, where
from ..ops.manipulation import astype, broadcast_shapes
from ..ops.matmul import matmul
from ..reductions.reductions import all
from . import bit_transforms as recipes
from .continuous import exponential, gumbel, normal, uniform
from .discrete import bernoulli
from .draw import floating
from .keys import split

Shape = int | Sequence[int] | None


def _drawn(name: str, shape: Shape, dtype: Any, *parameters: Any) -> tuple[tuple[int, ...], np.dtype, np.dtype]:
    """The shape of the result (that of the parameters together, by default), the dtype to compute in, and that of the
    result."""
    wanted = floating(name, dtype)
    own = broadcast_shapes(*(asarray(p).shape for p in parameters))
    if shape is None:
        found = own
    else:
        found = as_shape(name, shape)
        if broadcast_shapes(own, found) != found:
            raise ShapeError(f"[{name}] parameters of shape {own} do not fit a result of shape {found}")
    return found, wanted if wanted == recipes.F64 else recipes.F32, wanted


def _positive(name: str, what: str, value: Any, wide: np.dtype) -> Array:
    found = asarray(value)
    if found.dtype.kind not in "biuf" and found.dtype != recipes.BF16:
        raise DTypeError(f"[{name}] {what} must be real numbers, got {found.dtype.name}")
    known = value > 0 if type(value) in (int, float) else isinstance(found._buf, Deferred) or bool(all(found > 0))
    if not known:
        raise ArgumentError(f"[{name}] {what} must be positive")
    return astype(found, wide)


def _real(value: Any, wide: np.dtype) -> Array:
    return astype(asarray(value), wide)


@composite("laplace")
def laplace(key: Any, shape: Shape = None, dtype: Any = np.float64, loc: Any = 0.0, scale: Any = 1.0) -> Array:
    """Laplace numbers: exponential ones of mean ``scale`` to either side of ``loc``.

    >>> x = mt.random.laplace(mt.random.key(0), (10000,), loc=3.0)
    >>> round(float(mt.median(x)), 1)
    3.0
    """
    found, wide, out = _drawn("laplace", shape, dtype, loc, scale)
    sizes, signs = split(key)
    size = exponential(sizes, found, wide)
    draws = where(bernoulli(signs, 0.5, found), size, -size)
    return (_real(loc, wide) + _positive("laplace", "scale", scale, wide) * draws).astype(out)


@composite("logistic")
def logistic(key: Any, shape: Shape = None, dtype: Any = np.float64, loc: Any = 0.0, scale: Any = 1.0) -> Array:
    """Logistic numbers: differences of two of Gumbel's.

    >>> mt.random.logistic(mt.random.key(0), (3,)).shape
    (3,)
    """
    found, wide, out = _drawn("logistic", shape, dtype, loc, scale)
    one, two = split(key)
    draws = gumbel(one, found, wide) - gumbel(two, found, wide)
    return (_real(loc, wide) + _positive("logistic", "scale", scale, wide) * draws).astype(out)


@composite("cauchy")
def cauchy(key: Any, shape: Shape = None, dtype: Any = np.float64, loc: Any = 0.0, scale: Any = 1.0) -> Array:
    """Cauchy numbers, which have no mean: ``loc + scale * tan(pi * (u - 1/2))``.

    >>> x = mt.random.cauchy(mt.random.key(0), (10000,), loc=3.0)
    >>> round(float(mt.median(x)), 1)
    3.0
    """
    found, wide, out = _drawn("cauchy", shape, dtype, loc, scale)
    draws = tan(np.pi * (uniform(key, found, recipes.F64) - 0.5)).astype(wide)
    return (_real(loc, wide) + _positive("cauchy", "scale", scale, wide) * draws).astype(out)


@composite("lognormal")
def lognormal(key: Any, shape: Shape = None, dtype: Any = np.float64, mean: Any = 0.0, sigma: Any = 1.0) -> Array:
    """Numbers whose logarithms are normal with this mean and standard deviation.

    >>> bool(mt.all(mt.random.lognormal(mt.random.key(0), (100,)) > 0))
    True
    """
    found, wide, out = _drawn("lognormal", shape, dtype, mean, sigma)
    draws = _positive("lognormal", "sigma", sigma, wide) * normal(key, found, wide)
    return exp(_real(mean, wide) + draws).astype(out)


@composite("rayleigh")
def rayleigh(key: Any, shape: Shape = None, dtype: Any = np.float64, scale: Any = 1.0) -> Array:
    """Lengths of plane vectors whose coordinates are normal with standard deviation ``scale``.

    >>> bool(mt.all(mt.random.rayleigh(mt.random.key(0), (100,)) > 0))
    True
    """
    found, wide, out = _drawn("rayleigh", shape, dtype, scale)
    draws = sqrt(2.0 * exponential(key, found, wide))
    return (_positive("rayleigh", "scale", scale, wide) * draws).astype(out)


@composite("weibull")
def weibull(key: Any, k: Any, shape: Shape = None, dtype: Any = np.float64, scale: Any = 1.0) -> Array:
    """Weibull numbers: ``scale`` times the ``k``-th root of exponential ones.

    >>> bool(mt.all(mt.random.weibull(mt.random.key(0), 2.0, (100,)) > 0))
    True
    """
    found, wide, out = _drawn("weibull", shape, dtype, k, scale)
    draws = exponential(key, found, wide) ** (1.0 / _positive("weibull", "k", k, wide))
    return (_positive("weibull", "scale", scale, wide) * draws).astype(out)


@composite("pareto")
def pareto(key: Any, a: Any, shape: Shape = None, dtype: Any = np.float64, scale: Any = 1.0) -> Array:
    """Pareto numbers, at least ``scale``: the chance of more than ``x`` is ``(scale / x)**a``.

    NumPy's, also called Lomax numbers, are these less ``scale``.

    >>> bool(mt.all(mt.random.pareto(mt.random.key(0), 3.0, (100,)) >= 1))
    True
    """
    found, wide, out = _drawn("pareto", shape, dtype, a, scale)
    draws = exp(exponential(key, found, wide) / _positive("pareto", "a", a, wide))
    return (_positive("pareto", "scale", scale, wide) * draws).astype(out)


@composite("geometric")
def geometric(key: Any, p: Any, shape: Shape = None, dtype: Any = np.int64) -> Array:
    """Numbers of trials up to the first success, whose chance is ``p`` each time: integers from 1.

    >>> x = mt.random.geometric(mt.random.key(0), 0.25, (10000,))
    >>> round(float(mt.mean(x)))
    4
    """
    wanted = as_dtype(dtype, "geometric")
    if wanted.kind not in "iu":
        raise DTypeError(f"[geometric] the dtype must be one of integers, got {wanted.name}")
    p = asarray(p)
    if not isinstance(p._buf, Deferred) and not bool(all((p > 0) & (p <= 1))):
        raise ArgumentError("[geometric] p must be above 0 and at most 1")
    found, _, _ = _drawn("geometric", shape, np.float64, p)
    sure = p == 1
    rate = -log1p(-where(sure, 0.5, p.astype(np.float64)))
    failures = where(sure, 0.0, floor(exponential(key, found) / rate))
    return (failures + 1.0).astype(wanted)


@composite("triangular")
def triangular(key: Any, left: Any, mode: Any, right: Any, shape: Shape = None, dtype: Any = np.float64) -> Array:
    """Numbers between ``left`` and ``right`` whose density rises linearly to ``mode`` and falls from there.

    >>> x = mt.random.triangular(mt.random.key(0), -1.0, 0.0, 1.0, (1000,))
    >>> bool(mt.all(mt.abs(x) <= 1))
    True
    """
    found, wide, out = _drawn("triangular", shape, dtype, left, mode, right)
    a, c, b = (_real(v, wide) for v in (left, mode, right))
    order = (a <= c) & (c <= b) & (a < b)
    if not isinstance(order._buf, Deferred) and not bool(all(order)):
        raise ArgumentError("[triangular] left, mode and right must ascend, and not all be one number")
    u = uniform(key, found, wide)
    rising = u * (b - a) < c - a
    # The branch that is not taken may have the root of zero, whose slope is infinite.
    low, high = where(rising, u, 0.5), where(rising, 0.5, u)
    up = a + sqrt(where(rising, low * (b - a) * (c - a), 1.0))
    down = b - sqrt(where(rising, 1.0, (1.0 - high) * (b - a) * (b - c)))
    return where(rising, up, down).astype(out)


@composite("multivariate_normal")
def multivariate_normal(
    key: Any, mean: Any, cov: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64
) -> Array:
    """Vectors of normal numbers with a mean and a covariance matrix: shape ``(*shape, n)``.

    Raises
    ------
    numpy.linalg.LinAlgError
        Where the matrix is not positive definite.

    Examples
    --------
    >>> x = mt.random.multivariate_normal(mt.random.key(0), mt.zeros(2), mt.asarray([[2.0, 1.0], [1.0, 2.0]]), (10000,))
    >>> mt.round(mt.cov(x, rowvar=False))
    Array([[2., 1.],
           [1., 2.]], dtype=float64)
    """
    wanted = floating("multivariate_normal", dtype)
    wide = wanted if wanted == recipes.F64 else recipes.F32
    mean, cov = asarray(mean), asarray(cov)
    if mean.ndim != 1 or cov.shape != (mean.size, mean.size):
        raise ShapeError(f"[multivariate_normal] a mean of shape {mean.shape} has no covariance of shape {cov.shape}")
    z = normal(key, (*as_shape("multivariate_normal", shape), mean.size), wide)
    return (mean.astype(wide) + matmul(z, cholesky(cov.astype(wide)).mT)).astype(wanted)


__all__ = defined(globals())
