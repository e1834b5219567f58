"""Linear algebra (``mt.linalg``): the extension of the array-API standard.

Matrices are the last two dimensions; leading ones are batches. Integers are computed in float64, floats of one or two bytes
in float32 and rounded once. Where a decomposition is not unique (signs and phases of vectors, bases of the space of a repeated
value), gradients are those of functions that do not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _infer
from ._dispatch import apply
from ._op import Op, composite
from .errors import DTypeError, ShapeError
from .manipulation import matrix_transpose
from .products import cross, matmul, outer, tensordot, vecdot
from .program import ShapeDtype

if TYPE_CHECKING:
    from ._array import Array

__all__ = [
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]

# ----- shapes ---------------------------------------------------------------------------------------------------------


def _real_of(dtype: np.dtype) -> np.dtype:
    return np.dtype(dtype.type(0).real.dtype)


def _complex_of(dtype: np.dtype) -> np.dtype:
    return np.result_type(dtype, np.complex64)


def _square(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape, args[0].dtype)


def _infer_solve(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    a, b = args
    batch = _infer.broadcast_shapes(op, [a.shape[:-2], b.shape[:-2]])
    return ShapeDtype((*batch, *b.shape[-2:]), np.result_type(a.dtype, b.dtype))


def _infer_det(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape[:-2], args[0].dtype)


def _infer_slogdet(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    return ShapeDtype(x.shape[:-2], x.dtype), ShapeDtype(x.shape[:-2], _real_of(x.dtype))


def _infer_eigh(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    return ShapeDtype(x.shape[:-1], _real_of(x.dtype)), ShapeDtype(x.shape, x.dtype)


def _infer_eigvalsh(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape[:-1], _real_of(args[0].dtype))


def _infer_eig(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x, dtype = args[0], _complex_of(args[0].dtype)
    return ShapeDtype(x.shape[:-1], dtype), ShapeDtype(x.shape, dtype)


def _infer_eigvals(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape[:-1], _complex_of(args[0].dtype))


def _infer_svd(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    (*batch, m, n), k = x.shape, min(x.shape[-2:])
    left, right = (m, n) if params["full_matrices"] else (k, k)
    return (
        ShapeDtype((*batch, m, left), x.dtype),
        ShapeDtype((*batch, k), _real_of(x.dtype)),
        ShapeDtype((*batch, right, n), x.dtype),
    )


def _infer_svdvals(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x = args[0]
    return ShapeDtype((*x.shape[:-2], min(x.shape[-2:])), _real_of(x.dtype))


def _infer_qr(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x = args[0]
    *batch, m, n = x.shape
    k = m if params["mode"] == "complete" else min(m, n)
    return ShapeDtype((*batch, m, k), x.dtype), ShapeDtype((*batch, k, n), x.dtype)


def _infer_pinv(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x = args[0]
    return ShapeDtype((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)


# ----- ops ------------------------------------------------------------------------------------------------------------


def _plain(name: str) -> Callable[..., Any]:
    def impl(xp: Any, *args: Any, **params: Any) -> Any:
        return getattr(xp.linalg, name)(*args, **params)

    return impl


def _solve(xp: Any, a: Any, b: Any) -> Any:
    return xp.linalg.solve(a, b)


def _eig(xp: Any, x: Any) -> Any:
    w, v = xp.linalg.eig(x)
    dtype = _complex_of(x.dtype)  # NumPy answers in real numbers where all of them happen to be
    return w.astype(dtype, copy=False), v.astype(dtype, copy=False)


def _eigvals(xp: Any, x: Any) -> Any:
    return xp.linalg.eigvals(x).astype(_complex_of(x.dtype), copy=False)


def _svdvals(xp: Any, x: Any) -> Any:
    return xp.linalg.svd(x, compute_uv=False)


def _adjugate(xp: Any, x: Any) -> Any:
    """``det(x) inv(x)``, which exists for singular matrices too: from the products of all other singular values."""
    u, s, vh = xp.linalg.svd(x)
    n = x.shape[-1]
    others = xp.stack([xp.prod(xp.delete(s, i, axis=-1), axis=-1) for i in range(n)], axis=-1) if n else s
    phase = xp.linalg.det(u) * xp.linalg.det(vh)
    vo = xp.conj(xp.swapaxes(vh, -1, -2)) * others[..., None, :]
    return (phase[..., None, None] * (vo @ xp.conj(xp.swapaxes(u, -1, -2)))).astype(x.dtype, copy=False)


def _pinv(xp: Any, x: Any, rtol: float) -> Any:
    u, s, vh = xp.linalg.svd(x, full_matrices=False)
    largest = s[..., :1] if s.shape[-1] else s
    kept = s > rtol * largest
    inverse = xp.where(kept, 1 / xp.where(kept, s, 1), 0).astype(s.dtype, copy=False)
    return xp.matmul(xp.conj(xp.swapaxes(vh, -1, -2)) * inverse[..., None, :], xp.conj(xp.swapaxes(u, -1, -2)))


CHOLESKY = Op("cholesky", ("x",), _plain("cholesky"), _square)
INV = Op("inv", ("x",), _plain("inv"), _square)
SOLVE = Op("solve", ("a", "b"), _solve, _infer_solve)
DET = Op("det", ("x",), _plain("det"), _infer_det)
ADJUGATE = Op("adjugate", ("x",), _adjugate, _square)
SLOGDET = Op("slogdet", ("x",), _plain("slogdet"), _infer_slogdet, nout=2)
EIGH = Op("eigh", ("x",), _plain("eigh"), _infer_eigh, nout=2)
EIGVALSH = Op("eigvalsh", ("x",), _plain("eigvalsh"), _infer_eigvalsh)
EIG = Op("eig", ("x",), _eig, _infer_eig, nout=2)
EIGVALS = Op("eigvals", ("x",), _eigvals, _infer_eigvals, decompose=lambda x: apply(EIG, (x,))[0])
SVD = Op("svd", ("x",), _plain("svd"), _infer_svd, nout=3)
SVDVALS = Op("svdvals", ("x",), _svdvals, _infer_svdvals)
QR = Op("qr", ("x",), _plain("qr"), _infer_qr, nout=2)
PINV = Op("pinv", ("x",), _pinv, _infer_pinv)

# ----- arguments ------------------------------------------------------------------------------------------------------


def _matrices(name: str, x: Any, *, square: bool = False) -> tuple[Array, np.dtype | None]:
    """``x`` in a dtype that LAPACK has, and the dtype to round results to (None: they are right)."""
    from .creation import asarray
    from .manipulation import astype

    x = asarray(x)
    if x.ndim < 2:
        raise ShapeError(f"[{name}] needs matrices (at least two dimensions), got shape {x.shape}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"[{name}] needs square matrices, got shape {x.shape}")
    if x.dtype.kind == "b":
        raise DTypeError(f"[{name}] takes numbers, got booleans")
    if x.dtype.kind in "iu":
        return astype(x, np.float64), None
    if x.dtype.itemsize <= 2:
        return astype(x, np.float32), x.dtype
    return x, None


def _back(x: Array, dtype: np.dtype | None) -> Array:
    from .manipulation import astype

    if dtype is None:
        return x
    return astype(x, dtype) if x.dtype.kind != "c" else x


def _one(op: Op, x: Any, *, square: bool = True, **params: Any) -> Array:
    x, dtype = _matrices(op.name, x, square=square)
    return _back(apply(op, (x,), params), dtype)


def _several(op: Op, x: Any, *, square: bool = True, **params: Any) -> tuple[Array, ...]:
    x, dtype = _matrices(op.name, x, square=square)
    return tuple(_back(y, dtype) for y in apply(op, (x,), params))


# ----- solving --------------------------------------------------------------------------------------------------------


def cholesky(x: Any, /, *, upper: bool = False) -> Array:
    """The lower triangular ``L`` with ``x = L @ L^H`` for Hermitian, positive definite matrices (or the upper one, ``L^H``).

    Only the lower triangle of ``x`` is read.

    >>> import meshtape as mt
    >>> mt.linalg.cholesky(mt.asarray([[4.0, 2.0], [2.0, 2.0]]))
    Array([[2., 0.],
           [1., 1.]], dtype=float64)
    """
    from .elementwise import conj

    lower = _one(CHOLESKY, x)
    return matrix_transpose(conj(lower)) if upper else lower


def inv(x: Any, /) -> Array:
    """Inverse of square matrices. Raises ``numpy.linalg.LinAlgError`` for singular ones.

    >>> import meshtape as mt
    >>> mt.linalg.inv(mt.asarray([[2.0, 0.0], [0.0, 4.0]]))
    Array([[0.5 , 0.  ],
           [0.  , 0.25]], dtype=float64)
    """
    return _one(INV, x)


def solve(x1: Any, x2: Any, /) -> Array:
    """The solution ``y`` of ``x1 @ y = x2``; a vector ``x2`` (one dimension) gives vectors.

    >>> import meshtape as mt
    >>> mt.linalg.solve(mt.asarray([[2.0, 0.0], [0.0, 4.0]]), mt.asarray([2.0, 2.0]))
    Array([1. , 0.5], dtype=float64)
    """
    from .creation import asarray

    a, dtype = _matrices("solve", x1, square=True)
    b = asarray(x2)
    vector = b.ndim == 1
    b, other = _matrices("solve", b[:, None] if vector else b)
    if b.shape[-2] != a.shape[-1]:
        raise ShapeError(
            f"[solve] {a.shape} times what is {asarray(x2).shape}: the lengths {a.shape[-1]} and {b.shape[-2]}"
        )
    out = _back(apply(SOLVE, (a, b)), dtype if dtype == other else None)
    return out[..., 0] if vector else out


def matrix_power(x: Any, n: int, /) -> Array:
    """Square matrices multiplied with themselves: ``n`` factors; of the inverse for negative ``n``, the identity for 0.

    >>> import meshtape as mt
    >>> mt.linalg.matrix_power(mt.asarray([[1, 1], [0, 1]]), 5)
    Array([[1, 5],
           [0, 1]])
    """
    from .creation import asarray, eye, wrap_same
    from .manipulation import broadcast_to

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


def pinv(x: Any, /, *, rtol: Any = None) -> Array:
    """Moore-Penrose inverse; singular values up to ``rtol`` times the largest count as zero (``max(m, n) * eps`` by default).

    >>> import meshtape as mt
    >>> mt.linalg.pinv(mt.asarray([[2.0, 0.0], [0.0, 0.0]]))
    Array([[0.5, 0. ],
           [0. , 0. ]], dtype=float64)
    """
    from .creation import asarray
    from .elementwise import conj, where

    x, dtype = _matrices("pinv", x)
    if rtol is None or isinstance(rtol, int | float):
        bound = _rtol(x) if rtol is None else float(rtol)
        return _back(apply(PINV, (x,), {"rtol": bound}), dtype)
    # One tolerance a matrix: an operand, not a parameter.
    u, s, vh = apply(SVD, (x,), {"full_matrices": False})
    kept = s > asarray(rtol)[..., None] * s[..., :1]
    inverse = where(kept, 1.0 / where(kept, s, 1.0), 0.0)
    return _back(matmul(matrix_transpose(conj(vh)) * inverse[..., None, :], matrix_transpose(conj(u))), dtype)


def _rtol(x: Array) -> float:
    return max(x.shape[-2:]) * float(np.finfo(x.dtype).eps)


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Array:
    """How many singular values are larger than ``rtol`` times the largest (``max(m, n) * eps`` by default).

    >>> import meshtape as mt
    >>> mt.linalg.matrix_rank(mt.asarray([[1.0, 2.0], [2.0, 4.0]]))
    Array(1)
    """
    from .creation import asarray
    from .searching import count_nonzero

    x, _ = _matrices("matrix_rank", x)
    s = apply(SVDVALS, (x,))
    bound = _rtol(x) if rtol is None else rtol if isinstance(rtol, int | float) else asarray(rtol)[..., None]
    return count_nonzero(s > bound * s[..., :1], axis=-1)


# ----- determinants ---------------------------------------------------------------------------------------------------


class SlogdetResult(NamedTuple):
    """``det(x) = sign * exp(logabsdet)``."""

    sign: Array
    logabsdet: Array


def det(x: Any, /) -> Array:
    """Determinant of square matrices.

    >>> import meshtape as mt
    >>> round(float(mt.linalg.det(mt.asarray([[1.0, 2.0], [3.0, 4.0]]))), 12)
    -2.0
    """
    return _one(DET, x)


def slogdet(x: Any, /) -> SlogdetResult:
    """Sign (a phase, for complex numbers) and logarithm of the magnitude of the determinant, without overflow.

    >>> import meshtape as mt
    >>> mt.linalg.slogdet(mt.asarray([[2.0, 0.0], [0.0, -1.0]]))
    SlogdetResult(sign=Array(-1., dtype=float64), logabsdet=Array(0.69314718, dtype=float64))
    """
    return SlogdetResult(*_several(SLOGDET, x))


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

    >>> import meshtape as mt
    >>> mt.linalg.eigh(mt.asarray([[2.0, 0.0], [0.0, 1.0]])).eigenvalues
    Array([1., 2.], dtype=float64)
    """
    return EighResult(*_several(EIGH, x))


def eigvalsh(x: Any, /) -> Array:
    """Eigenvalues of Hermitian matrices, ascending.

    >>> import meshtape as mt
    >>> mt.linalg.eigvalsh(mt.asarray([[2.0, 1.0], [1.0, 2.0]]))
    Array([1., 3.], dtype=float64)
    """
    return _one(EIGVALSH, x)


def eig(x: Any, /) -> EigResult:
    """Eigenvalues and right eigenvectors of square matrices, always complex.

    >>> import meshtape as mt
    >>> mt.linalg.eig(mt.asarray([[2.0, 0.0], [0.0, 3.0]])).eigenvalues
    Array([2.+0.j, 3.+0.j], dtype=complex128)
    """
    return EigResult(*_several(EIG, x))


def eigvals(x: Any, /) -> Array:
    """Eigenvalues of square matrices, always complex, in no order.

    >>> import meshtape as mt
    >>> mt.linalg.eigvals(mt.asarray([[0.0, -1.0], [1.0, 0.0]]))
    Array([0.+1.j, 0.-1.j], dtype=complex128)
    """
    return _one(EIGVALS, x)


def qr(x: Any, /, *, mode: str = "reduced") -> QRResult:
    """Orthonormal columns ``Q`` times an upper triangle ``R``.

    ``mode="complete"`` gives a square ``Q`` (and no derivative, unless ``"reduced"`` would give the same).

    >>> import meshtape as mt
    >>> mt.linalg.qr(mt.asarray([[0.0, 2.0], [-3.0, 0.0]])).R.shape
    (2, 2)
    """
    if mode not in ("reduced", "complete"):
        raise ValueError(f"[qr] mode must be 'reduced' or 'complete', got {mode!r}")
    x, dtype = _matrices("qr", x)
    mode = mode if x.shape[-2] > x.shape[-1] else "reduced"  # one thing, then; and that one has a derivative
    return QRResult(*(_back(y, dtype) for y in apply(QR, (x,), {"mode": mode})))


def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Singular value decomposition, values descending.

    With ``full_matrices`` (the standard's default) ``U`` and ``Vh`` are square; those of a matrix that is not have columns that
    nothing determines, and no derivative.

    >>> import meshtape as mt
    >>> mt.linalg.svd(mt.ones((3, 2)), full_matrices=False).U.shape
    (3, 2)
    """
    x, dtype = _matrices("svd", x)
    full = bool(full_matrices) and x.shape[-1] != x.shape[-2]
    return SVDResult(*(_back(y, dtype) for y in apply(SVD, (x,), {"full_matrices": full})))


def svdvals(x: Any, /) -> Array:
    """Singular values, descending.

    >>> import meshtape as mt
    >>> mt.linalg.svdvals(mt.asarray([[3.0, 0.0], [0.0, 4.0]]))
    Array([4., 3.], dtype=float64)
    """
    return _one(SVDVALS, x, square=False)


# ----- diagonals ------------------------------------------------------------------------------------------------------


def diagonal(x: Any, /, *, offset: int = 0) -> Array:
    """The ``offset``-th diagonal of each matrix (above the main one for positive numbers).

    >>> import meshtape as mt
    >>> mt.linalg.diagonal(mt.asarray([[1, 2], [3, 4]]))
    Array([1, 4])
    """
    from .creation import arange, asarray, beside

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

    >>> import meshtape as mt
    >>> mt.linalg.trace(mt.asarray([[1, 2], [3, 4]]))
    Array(5)
    """
    from .reductions import sum

    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


# ----- norms ----------------------------------------------------------------------------------------------------------


@composite("vector_norm")
def vector_norm(x: Any, /, *, axis: int | Sequence[int] | None = None, keepdims: bool = False, ord: float = 2) -> Array:
    """``sum(abs(x)**ord)**(1/ord)`` over axes (all by default).

    ``ord`` may be any number: ``inf`` and ``-inf`` give the largest and smallest magnitude, ``0`` counts what is not zero. The
    gradient at a zero vector is zero.

    >>> import meshtape as mt
    >>> mt.linalg.vector_norm(mt.asarray([3.0, 4.0]))
    Array(5., dtype=float64)
    """
    from .creation import asarray
    from .elementwise import abs, real, sqrt, square, where
    from .manipulation import astype
    from .reductions import max, min, sum

    x = asarray(x)
    if x.dtype.kind in "biu":
        x = astype(x, np.float64)
    elif x.dtype.itemsize <= 2:
        low = x.dtype
        return astype(vector_norm(astype(x, np.float32), axis=axis, keepdims=keepdims, ord=ord), low)
    axes = _infer.normalize_axis("vector_norm", axis, x.ndim)
    over = {"axis": axes, "keepdims": keepdims}
    if ord == 0:
        return astype(sum(astype(x != 0, np.int64), **over), _real_of(x.dtype))
    if ord == math.inf:
        return max(abs(x), **over) if x.size else sum(abs(x), **over)
    if ord == -math.inf:
        return min(abs(x), **over)
    if ord == 1:
        return sum(abs(x), **over)
    if ord == 2:
        squares = square(real(x)) + square(_imag(x)) if x.dtype.kind == "c" else square(x)
        total = sum(squares, **over)
        # The root has no slope at zero: there the branch that is not taken must not divide by it.
        return where(total == 0, 0.0, sqrt(where(total == 0, 1.0, total)))
    size = abs(x)
    if ord < 0:
        return sum(size**ord, **over) ** (1.0 / ord)
    total = sum(where(size == 0, 0.0, where(size == 0, 1.0, size) ** ord), **over)
    return where(total == 0, 0.0, where(total == 0, 1.0, total) ** (1.0 / ord))


def _imag(x: Array) -> Array:
    from .elementwise import imag

    return imag(x)


@composite("matrix_norm")
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: float | str | None = "fro") -> Array:
    """Norm of each matrix.

    ``"fro"`` (Frobenius), ``"nuc"`` (sum of the singular values), ``2``/``-2`` (largest/smallest of them), ``1``/``-1`` (largest/
    smallest sum of a column), ``inf``/``-inf`` (the same of a row).

    >>> import meshtape as mt
    >>> mt.linalg.matrix_norm(mt.asarray([[1.0, -2.0], [3.0, 4.0]]), ord=1)
    Array(6., dtype=float64)
    """
    from .elementwise import abs
    from .manipulation import expand_dims
    from .reductions import max, min, sum

    x, dtype = _matrices("matrix_norm", x)
    if ord in ("fro", None):
        return _back(vector_norm(x, axis=(-2, -1), keepdims=keepdims), dtype)
    if ord in (1, 2, math.inf) and 0 in x.shape[-2:]:
        return _back(sum(abs(x), axis=(-2, -1), keepdims=keepdims), dtype)  # the norm of nothing is 0
    if ord in (1, -1, math.inf, -math.inf):
        lines = sum(abs(x), axis=-2 if ord in (1, -1) else -1)
        out = (max if ord > 0 else min)(lines, axis=-1)
    elif ord in (2, -2, "nuc"):
        s = apply(SVDVALS, (x,))
        out = sum(s, axis=-1) if ord == "nuc" else (max if ord > 0 else min)(s, axis=-1)
    else:
        raise ValueError(f"[matrix_norm] ord must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {ord!r}")
    return _back(expand_dims(out, axis=(-2, -1)) if keepdims else out, dtype)
