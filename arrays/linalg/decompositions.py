"""Solvers and decompositions of matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.array import Array
from ..core.dispatch import apply
from ..core.errors import ArgumentError, ShapeError
from ..ops.creation import arange, asarray, beside, eye, wrap_same
from ..ops.elementwise import conj, where
from ..ops.manipulation import broadcast_to, matrix_transpose
from ..ops.matmul import matmul
from ..reductions.reductions import sum
from ..reductions.searching import count_nonzero
from . import lapack as la
from .lapack import back, matrices, one, several

# ----- solving --------------------------------------------------------------------------------------------------------


def cholesky(x: Any, /, *, upper: bool = False) -> Array:
    """The lower triangular ``L`` with ``x = L @ L^H`` (or the upper one, ``L^H``).

    The matrices are Hermitian and positive definite.

    Only the lower triangle of ``x`` is read.

    >>> mt.linalg.cholesky(mt.asarray([[4.0, 2.0], [2.0, 2.0]]))
    Array([[2., 0.],
           [1., 1.]], dtype=float64)
    """
    lower = one(la.CHOLESKY, x)
    return matrix_transpose(conj(lower)) if upper else lower


def inv(x: Any, /) -> Array:
    """Inverse of square matrices. Raises ``numpy.linalg.LinAlgError`` for singular ones.

    >>> mt.linalg.inv(mt.asarray([[2.0, 0.0], [0.0, 4.0]]))
    Array([[0.5 , 0.  ],
           [0.  , 0.25]], dtype=float64)
    """
    return one(la.INV, x)


def solve(x1: Any, x2: Any, /) -> Array:
    """The solution ``y`` of ``x1 @ y = x2``; a vector ``x2`` (one dimension) gives vectors.

    >>> mt.linalg.solve(mt.asarray([[2.0, 0.0], [0.0, 4.0]]), mt.asarray([2.0, 2.0]))
    Array([1. , 0.5], dtype=float64)
    """
    a, dtype = matrices("solve", x1, square=True)
    b = asarray(x2)
    vector = b.ndim == 1
    b, other = matrices("solve", b[:, None] if vector else b)
    if b.shape[-2] != a.shape[-1]:
        raise ShapeError(
            f"[solve] {a.shape} times what is {asarray(x2).shape}: the lengths {a.shape[-1]} and {b.shape[-2]}"
        )
    out = back(apply(la.SOLVE, (a, b)), dtype if dtype == other else None)
    return out[..., 0] if vector else out


def matrix_power(x: Any, n: int, /) -> Array:
    """Square matrices multiplied with themselves: ``n`` factors; of the inverse for negative ``n``, the identity for 0.

    >>> mt.linalg.matrix_power(mt.asarray([[1, 1], [0, 1]]), 5)
    Array([[1, 5],
           [0, 1]])
    """
    x = asarray(x)
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"[matrix_power] needs square matrices, got shape {x.shape}")
    if n == 0:
        return broadcast_to(eye(x.shape[-1], dtype=x.dtype), x.shape)
    base, n = (inv(x), -n) if n < 0 else (x, n)
    out = None
    while True:
        if n & 1:
            out = base if out is None else matmul(out, base)
        n >>= 1
        if not n:
            return wrap_same(out) if out is x else out
        base = matmul(base, base)


def pinv(x: Any, /, rtol: Any = None) -> Array:
    """Moore-Penrose inverse.

    Singular values up to ``rtol`` times the largest count as zero (``max(m, n) * eps`` by default).

    >>> mt.linalg.pinv(mt.asarray([[2.0, 0.0], [0.0, 0.0]]))
    Array([[0.5, 0. ],
           [0. , 0. ]], dtype=float64)
    """
    x, dtype = matrices("pinv", x)
    if rtol is None or isinstance(rtol, int | float):
        bound = _rtol(x) if rtol is None else float(rtol)
        return back(apply(la.PINV, (x,), {"rtol": bound}), dtype)
    # One tolerance a matrix: an operand, not a parameter.
    u, s, vh = apply(la.SVD, (x,), {"full_matrices": False})
    kept = s > asarray(rtol)[..., None] * s[..., :1]
    inverse = where(kept, 1.0 / where(kept, s, 1.0), 0.0)
    return back(matmul(matrix_transpose(conj(vh)) * inverse[..., None, :], matrix_transpose(conj(u))), dtype)


def _rtol(x: Array) -> float:
    return max(x.shape[-2:]) * float(np.finfo(x.dtype).eps)


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Array:
    """How many singular values are larger than ``rtol`` times the largest (``max(m, n) * eps`` by default).

    >>> mt.linalg.matrix_rank(mt.asarray([[1.0, 2.0], [2.0, 4.0]]))
    Array(1)
    """
    x, _ = matrices("matrix_rank", x)
    s = apply(la.SVDVALS, (x,))
    bound = _rtol(x) if rtol is None else rtol if isinstance(rtol, int | float) else asarray(rtol)[..., None]
    return count_nonzero(s > bound * s[..., :1], axis=-1)


# ----- determinants ---------------------------------------------------------------------------------------------------


class SlogdetResult(NamedTuple):
    """``det(x) = sign * exp(logabsdet)``."""

    sign: Array
    logabsdet: Array


def det(x: Any, /) -> Array:
    """Determinant of square matrices.

    >>> round(float(mt.linalg.det(mt.asarray([[1.0, 2.0], [3.0, 4.0]]))), 12)
    -2.0
    """
    return one(la.DET, x)


def slogdet(x: Any, /) -> SlogdetResult:
    """Sign (a phase, for complex numbers) and logarithm of the magnitude of the determinant, without overflow.

    >>> mt.linalg.slogdet(mt.asarray([[2.0, 0.0], [0.0, -1.0]]))
    SlogdetResult(sign=Array(-1., dtype=float64), logabsdet=Array(0.69314718, dtype=float64))
    """
    return SlogdetResult(*several(la.SLOGDET, x))


# ----- decompositions -------------------------------------------------------------------------------------------------


class EighResult(NamedTuple):
    """Ascending eigenvalues, and the eigenvectors in the columns."""

    eigenvalues: Array
    eigenvectors: Array


class EigResult(NamedTuple):
    """Eigenvalues in no order, and eigenvectors of length one in the columns."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """``x = Q @ R``."""

    Q: Array
    R: Array


class SVDResult(NamedTuple):
    """``x = U @ diag(S) @ Vh``."""

    U: Array
    S: Array
    Vh: Array


def eigh(x: Any, /) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices; only the lower triangle is read.

    >>> mt.linalg.eigh(mt.asarray([[2.0, 0.0], [0.0, 1.0]])).eigenvalues
    Array([1., 2.], dtype=float64)
    """
    return EighResult(*several(la.EIGH, x))


def eigvalsh(x: Any, /) -> Array:
    """Eigenvalues of Hermitian matrices, ascending.

    >>> mt.linalg.eigvalsh(mt.asarray([[2.0, 1.0], [1.0, 2.0]]))
    Array([1., 3.], dtype=float64)
    """
    return one(la.EIGVALSH, x)


def eig(x: Any, /) -> EigResult:
    """Eigenvalues and right eigenvectors of square matrices, always complex.

    >>> mt.linalg.eig(mt.asarray([[2.0, 0.0], [0.0, 3.0]])).eigenvalues
    Array([2.+0.j, 3.+0.j], dtype=complex128)
    """
    return EigResult(*several(la.EIG, x))


def eigvals(x: Any, /) -> Array:
    """Eigenvalues of square matrices, always complex, in no order.

    >>> mt.linalg.eigvals(mt.asarray([[0.0, -1.0], [1.0, 0.0]]))
    Array([0.+1.j, 0.-1.j], dtype=complex128)
    """
    return one(la.EIGVALS, x)


def qr(x: Any, /, mode: str = "reduced") -> QRResult:
    """Orthonormal columns ``Q`` times an upper triangle ``R``.

    ``mode="complete"`` gives a square ``Q`` (and no derivative, unless ``"reduced"`` would give the same).

    >>> mt.linalg.qr(mt.asarray([[0.0, 2.0], [-3.0, 0.0]])).R.shape
    (2, 2)
    """
    if mode not in ("reduced", "complete"):
        raise ArgumentError(f"[qr] mode must be 'reduced' or 'complete', got {mode!r}")
    x, dtype = matrices("qr", x)
    mode = mode if x.shape[-2] > x.shape[-1] else "reduced"  # one thing, then; and that one has a derivative
    return QRResult(*(back(y, dtype) for y in apply(la.QR, (x,), {"mode": mode})))


def svd(x: Any, /, full_matrices: bool = True) -> SVDResult:
    """Singular value decomposition, values descending.

    With ``full_matrices`` (the standard's default) ``U`` and ``Vh`` are square; those of a matrix that is not have
    columns that nothing determines, and no derivative.

    >>> mt.linalg.svd(mt.ones((3, 2)), full_matrices=False).U.shape
    (3, 2)
    """
    x, dtype = matrices("svd", x)
    full = bool(full_matrices) and x.shape[-1] != x.shape[-2]
    return SVDResult(*(back(y, dtype) for y in apply(la.SVD, (x,), {"full_matrices": full})))


def svdvals(x: Any, /) -> Array:
    """Singular values, descending.

    >>> mt.linalg.svdvals(mt.asarray([[3.0, 0.0], [0.0, 4.0]]))
    Array([4., 3.], dtype=float64)
    """
    return one(la.SVDVALS, x, square=False)


# ----- diagonals ------------------------------------------------------------------------------------------------------


def diagonal(x: Any, /, *, offset: int = 0) -> Array:
    """The ``offset``-th diagonal of each matrix (above the main one for positive numbers).

    >>> mt.linalg.diagonal(mt.asarray([[1, 2], [3, 4]]))
    Array([1, 4])
    """
    x = asarray(x)
    if x.ndim < 2:
        raise ShapeError(f"[diagonal] needs matrices (at least two dimensions), got shape {x.shape}")
    rows, cols = x.shape[-2:]
    down, right = max(-offset, 0), max(offset, 0)
    n = max(min(rows - down, cols - right), 0)
    i = arange(n, device=beside(x))
    return x[..., i + down, i + right]


def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """Sum of a diagonal of each matrix.

    >>> mt.linalg.trace(mt.asarray([[1, 2], [3, 4]]))
    Array(5)
    """
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


__all__ = [n for n, v in globals().items() if getattr(v, "__module__", None) == __name__ and n[0] != "_"]
