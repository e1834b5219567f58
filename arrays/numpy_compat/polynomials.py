"""Polynomials as vectors of coefficients, the highest power first (``numpy.polyval`` and its relatives)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import linalg
from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import ArgumentError, ShapeError
from ..core.op import composite
from ..ops.creation import asarray, inexact, zeros, zeros_like
from ..ops.manipulation import concat
from ..ops.wide_floats import in_float32
from ..statistics.interpolation import convolve, diag
from .creation import vander
from .rearranging import atleast_1d


def _coefficients(name: str, p: Any) -> Array:
    p = atleast_1d(p)
    if p.ndim != 1:
        raise ShapeError(f"[{name}] the coefficients are a vector, got shape {p.shape}")
    return p


@composite("polyval")
@in_float32
def polyval(p: Any, x: Any, /) -> Array:
    """The polynomial with coefficients ``p`` at ``x``, by Horner's rule.

    >>> mt.polyval([1.0, 0.0, 2.0], mt.asarray([0.0, 3.0]))
    Array([ 2., 11.], dtype=float64)
    """
    p, x = _coefficients("polyval", p), asarray(x)
    out: Any = zeros_like(x)
    for i in range(p.size):
        out = out * x + p[i]
    return out


@composite("polyfit")
@in_float32
def polyfit(x: Any, y: Any, deg: int, /, *, w: Any = None) -> Array:
    """Coefficients of the polynomial of degree ``deg`` with the least squares of differences from ``y`` at ``x``.

    ``y`` may have several columns, each of which is fitted; ``w`` are weights of the differences, before they are
    squared.

    >>> mt.round(mt.polyfit([0.0, 1.0, 2.0], [1.0, 3.0, 5.0], 1), 6)
    Array([2., 1.], dtype=float64)
    """
    x, y = asarray(x), asarray(y)
    if x.ndim != 1 or y.ndim not in (1, 2) or y.shape[0] != x.shape[0] or not x.size:
        raise ShapeError(f"[polyfit] x is a vector and y has as many rows, got shapes {x.shape} and {y.shape}")
    if deg < 0:
        raise ArgumentError(f"[polyfit] the degree must not be negative, got {deg}")
    x = inexact(x)
    left, right = vander(x, deg + 1), y.astype(x.dtype) if y.dtype.kind in "biu" else y
    if w is not None:
        w = asarray(w)
        left, right = left * w[:, None], right * (w if right.ndim == 1 else w[:, None])
    # Columns of one length: powers of large or small numbers differ by many orders of magnitude.
    scale = linalg.vector_norm(left, axis=0)
    c = linalg.lstsq(left / scale, right)[0]
    return c / (scale if c.ndim == 1 else scale[:, None])


@composite("polyder")
def polyder(p: Any, /, m: int = 1) -> Array:
    """The ``m``-th derivative.

    >>> mt.polyder([1.0, 2.0, 3.0])
    Array([2., 2.], dtype=float64)
    """
    p = _coefficients("polyder", p)
    for _ in range(m):
        p = p[:-1] * asarray(np.arange(p.size - 1, 0, -1))
    return p


@composite("polyint")
def polyint(p: Any, /, m: int = 1, k: Any = None) -> Array:
    """The ``m``-th integral with the constants ``k``: a number for all, or one for each integration; 0 by default.

    >>> mt.polyint([2.0, 2.0])
    Array([1., 2., 0.], dtype=float64)
    """
    p = _coefficients("polyint", p)
    constants = atleast_1d(0.0 if k is None else k)
    if constants.ndim > 1 or constants.size not in (1, m):
        raise ShapeError(f"[polyint] k must be a number, or {m} of them, got shape {constants.shape}")
    for i in range(m):
        p = concat([p / asarray(np.arange(p.size, 0, -1.0)), constants[i : i + 1] if constants.size > 1 else constants])
    return p


def polymul(p: Any, q: Any, /) -> Array:
    """The product of two polynomials.

    >>> mt.polymul([1, 1], [1, -1])
    Array([ 1,  0, -1])
    """
    return convolve(_coefficients("polymul", p), _coefficients("polymul", q))


@composite("polyadd")
def polyadd(p: Any, q: Any, /) -> Array:
    """The sum of two polynomials.

    >>> mt.polyadd([1, 1], [5])
    Array([1, 6])
    """
    p, q = _coefficients("polyadd", p), _coefficients("polyadd", q)
    n = max(p.size, q.size)
    p, q = (concat([zeros(n - a.size, a.dtype), a]) for a in (p, q))
    return p + q


def polysub(p: Any, q: Any, /) -> Array:
    """The difference of two polynomials.

    >>> mt.polysub([1, 1], [5])
    Array([ 1, -4])
    """
    p, q = asarray(p), asarray(q)
    return polyadd(p, -q.astype(result_type(p.dtype, q.dtype), copy=False))


@composite("roots")
def roots(p: Any, /) -> Array:
    """The complex numbers where a polynomial is zero: eigenvalues of its companion matrix.

    The first coefficient must not be zero.

    >>> mt.sort(mt.real(mt.roots([1.0, 0.0, -4.0])))
    Array([-2.,  2.], dtype=float64)
    """
    p = _coefficients("roots", p)
    if p.size < 2:
        return zeros(0)
    p = inexact(p)
    companion = diag(np.ones(p.size - 2, p.dtype), -1)
    return linalg.eigvals(companion.at[0].set(-p[1:] / p[0]))
