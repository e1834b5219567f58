"""Functions of ``numpy.linalg`` beyond the standard: least squares, condition numbers, norms and longer products."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Deferred, as_array, as_number
from ..core.errors import ArgumentError, LinAlgError, ShapeError
from ..core.op import composite
from ..ops.creation import beside, eye
from ..ops.elementwise import abs, isnan, logical_and, square, where
from ..ops.manipulation import permute_dims, reshape
from ..ops.matmul import matmul
from ..ops.wide_floats import in_float32
from ..reductions.reductions import any, max, min, sum
from .decompositions import inv, pinv, slogdet, solve, svdvals
from .matrix_norms import matrix_norm, vector_norm


class LstsqResult(NamedTuple):
    """The result of :func:`lstsq`."""

    solution: Array
    residuals: Array
    rank: Array
    singular_values: Array


@composite("lstsq")
@in_float32
def lstsq(a: Any, b: Any, /, *, rcond: float | None = None) -> LstsqResult:
    """The ``x`` of least length with the least ``sum(abs(b - a @ x)**2)``.

    It is found by the pseudo-inverse, so that it differentiates.

    Parameters
    ----------
    a
        Coefficients, shape ``(m, n)``.
    b
        Right-hand sides, shape ``(m,)`` or ``(m, k)``.
    rcond
        Singular values below this fraction of the largest count as zero; machine precision times ``max(m, n)`` by
        default.

    Returns
    -------
    LstsqResult
        The solution, the sum of squared residuals of each column (empty where the rank is below ``n`` or ``m <= n``),
        the rank, and the singular values of ``a``.

    Examples
    --------
    >>> mt.round(mt.linalg.lstsq([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], [1.0, 3.0, 5.0]).solution, 6)
    Array([1., 2.], dtype=float64)
    """
    a, b = as_array(a), as_array(b)
    if a.ndim != 2 or b.ndim not in (1, 2) or a.shape[0] != b.shape[0]:
        raise ShapeError(f"[lstsq] takes a matrix and as many rows to be met, got shapes {a.shape} and {b.shape}")
    m, n = a.shape
    s = svdvals(a)
    cut = float(np.finfo(s.dtype).eps) * builtins.max(m, n) if rcond is None else as_number("lstsq", "rcond", rcond)
    x = matmul(pinv(a, rtol=cut), b)
    rank = sum(s > cut * max(s)) if s.size else sum(s > 0)
    squares = square(abs(matmul(a, x) - b))
    left = sum(squares if b.ndim == 2 else squares[:, None], axis=0)
    # How many residuals there are depends on the rank; a traced one is taken to be full.
    full = m > n and (isinstance(rank._buf, Deferred) or bool(rank == n))
    return LstsqResult(x, left if full else left[:0], rank, s)


def norm(
    x: Any, /, ord: float | str | None = None, axis: int | Sequence[int] | None = None, *, keepdims: bool = False
) -> Array:
    """The norm of vectors (one ``axis``) or matrices (two); without ``axis`` that of the array's own dimensions.

    Without ``ord`` the root of the sum of squares; otherwise as :func:`vector_norm` and :func:`matrix_norm` have it.

    >>> mt.linalg.norm(mt.asarray([[3.0, 4.0]])), mt.linalg.norm(mt.asarray([[3.0, 4.0]]), axis=0)
    (Array(5., dtype=float64), Array([3., 4.], dtype=float64))
    """
    x = as_array(x)
    if axis is None:
        if ord is None:
            return reshape(vector_norm(x), (1,) * x.ndim) if keepdims else vector_norm(x)
        if x.ndim not in (1, 2):
            raise ShapeError(f"[norm] ord={ord!r} needs a vector or a matrix, or axis=…; got shape {x.shape}")
        axis = tuple(range(x.ndim))
    axes = shape_rules.normalize_axis("norm", axis, x.ndim)
    if len(axes) == 1 or ord is None:
        if isinstance(ord, str):
            raise ArgumentError(f"[norm] ord={ord!r} is a norm of matrices, and axis={axis} names vectors")
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if len(axes) != 2:
        raise ShapeError(f"[norm] vectors have one dimension and matrices two, got axis={axis}")
    given = axis if isinstance(axis, Sequence) else axes
    a, b = (shape_rules.one_axis("norm", i, x.ndim) for i in given)
    rest = [i for i in range(x.ndim) if i not in (a, b)]
    out = matrix_norm(permute_dims(x, (*rest, a, b)), ord=ord)
    return reshape(out, tuple(1 if i in (a, b) else n for i, n in enumerate(x.shape))) if keepdims else out


@composite("cond")
def cond(x: Any, /, p: float | str | None = None) -> Array:
    """The condition of matrices: the norm ``p`` times that of the inverse.

    By default (2) it is the ratio of the singular values.

    That of a singular matrix is infinite.

    >>> mt.linalg.cond(mt.asarray([[2.0, 0.0], [0.0, 0.5]]))
    Array(4., dtype=float64)
    """
    x = as_array(x)
    if 0 in x.shape[-2:]:
        raise LinAlgError(f"[cond] matrices without elements have no condition, got shape {x.shape}")
    if p in (None, 2, -2):
        s = svdvals(x)
        above, below = max(s, axis=-1), min(s, axis=-1)
        above, below = (below, above) if p == -2 else (above, below)
        found = where(below == 0, np.inf, above / where(below == 0, 1, below))
        # As NumPy has it: NaN is left to matrices that have one, and those with an infinite element are singular.
        return where(logical_and(isnan(found), ~any(isnan(x), axis=(-2, -1))), np.inf, found)
    singular = slogdet(x).sign == 0
    inverse = inv(where(singular[..., None, None], eye(x.shape[-1], dtype=x.dtype, device=beside(x)), x))
    return where(singular, np.inf, matrix_norm(x, ord=p) * matrix_norm(inverse, ord=p))


@composite("multi_dot")
def multi_dot(arrays: Sequence[Any], /) -> Array:
    """The product of several matrices, in the order that needs the fewest multiplications.

    The first and the last may be vectors.

    Source: Cormen et al., *Introduction to Algorithms*, 15.2.

    >>> mt.linalg.multi_dot([mt.ones((1, 9)), mt.ones((9, 9)), mt.ones((9, 2))])
    Array([[81., 81.]], dtype=float64)
    """
    found = [as_array(a) for a in arrays]
    if len(found) < 2:
        raise ShapeError("[multi_dot] needs at least two arrays")
    row, column = found[0].ndim == 1, found[-1].ndim == 1
    if row:
        found[0] = found[0][None, :]
    if column:
        found[-1] = found[-1][:, None]
    if builtins.any(a.ndim != 2 for a in found):
        raise ShapeError(f"[multi_dot] takes matrices, got shapes {[a.shape for a in found]}")
    lengths = [a.shape[0] for a in found] + [found[-1].shape[1]]
    n = len(found)
    cost = {(i, i): 0 for i in range(n)}
    cut: dict[tuple[int, int], int] = {}
    for width in range(1, n):
        for i in range(n - width):
            j = i + width
            prices = {
                k: cost[i, k] + cost[k + 1, j] + lengths[i] * lengths[k + 1] * lengths[j + 1] for k in range(i, j)
            }
            cut[i, j] = builtins.min(prices, key=prices.__getitem__)
            cost[i, j] = prices[cut[i, j]]

    def product(i: int, j: int) -> Array:
        return found[i] if i == j else matmul(product(i, cut[i, j]), product(cut[i, j] + 1, j))

    out = product(0, n - 1)
    out = out[0] if row else out
    return out[..., 0] if column else out


@composite("tensorsolve")
def tensorsolve(a: Any, b: Any, /) -> Array:
    """The ``x`` with ``tensordot(a, x, x.ndim) == b``; its shape is that of ``a`` after the dimensions of ``b``.

    >>> mt.linalg.tensorsolve(2 * mt.eye(4).reshape(2, 2, 4), mt.ones((2, 2)))
    Array([0.5, 0.5, 0.5, 0.5], dtype=float64)
    """
    a, b = as_array(a), as_array(b)
    shape = a.shape[b.ndim :]
    if math.prod(shape) != b.size or a.shape[: b.ndim] != b.shape:
        raise ShapeError(
            f"[tensorsolve] an array of shape {a.shape} does not map onto one of shape {b.shape} one to one"
        )
    return reshape(solve(reshape(a, (b.size, b.size)), reshape(b, (-1,))), shape)


@composite("tensorinv")
def tensorinv(a: Any, /, ind: int = 2) -> Array:
    """The inverse of ``a`` as a linear map, whose result has the first ``ind`` dimensions of ``a``.

    >>> mt.linalg.tensorinv(mt.eye(4).reshape(2, 2, 4)).shape
    (4, 2, 2)
    """
    a = as_array(a)
    n = math.prod(a.shape[:ind])
    if ind < 1 or n != math.prod(a.shape[ind:]):
        raise ShapeError(f"[tensorinv] the first {ind} dimensions of shape {a.shape} hold not as much as the others")
    return reshape(inv(reshape(a, (n, n))), a.shape[ind:] + a.shape[:ind])
