"""Products of vectors, matrices and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends import cublaslt
from ..backends.memory_pool import fresh
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import FIRST_USER_DTYPE, is_low_precision, result_type
from ..core.errors import ShapeError
from ..core.op import Op, ShapeDtype
from .creation import as_arrays, asarray
from .elementwise import conj
from .manipulation import broadcast_arrays, moveaxis, permute_dims, reshape, stack


def _infer_matmul(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, y = args
    if not isinstance(x, ShapeDtype) or not isinstance(y, ShapeDtype) or not x.shape or not y.shape:
        raise ShapeError("[matmul] takes arrays of at least one dimension; use * for scalars")
    k1, k2 = x.shape[-1], y.shape[-2] if len(y.shape) > 1 else y.shape[0]
    if k1 != k2:
        raise ShapeError(f"[matmul] the contracted lengths differ: {x.shape} @ {y.shape}")
    batch = shape_rules.broadcast_shapes(op, [x.shape[:-2], y.shape[:-2]])
    rows = (x.shape[-2],) if len(x.shape) > 1 else ()
    cols = (y.shape[-1],) if len(y.shape) > 1 else ()
    return ShapeDtype((*batch, *rows, *cols), result_type(x.dtype, y.dtype))


_OWN_PRODUCTS = frozenset(np.dtype(t).num for t in "fdFD")

_WORTH_A_LOOK = 1 << 14
"""Products of numbers below which NumPy has the result before it is known whether the rows can be put together."""


def product(x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``np.matmul``; a stack of rows times one matrix is one product over all rows.

    NumPy asks the BLAS for one for each matrix of the stack, and each prepares the right operand anew. ``out``, where
    it is given, is memory without gaps that neither operand has.
    """
    if y.ndim == 2 < x.ndim and x.dtype.num == y.dtype.num:
        k, n = y.shape
        if x.shape[-1] == k and x.size * n >= _WORTH_A_LOOK and x.flags.c_contiguous:
            if out is None:
                out = fresh((*x.shape[:-1], n), x.dtype)
            np.matmul(x.reshape(-1, k), y, out.reshape(-1, n))
            return out
    return np.matmul(x, y, out)


def times_transposed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``x @ y^H``."""
    return product(x, (y.conj() if y.dtype.kind == "c" else y).mT)


def transposed_times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``x^H @ y``."""
    return product((x.conj() if x.dtype.kind == "c" else x).mT, y)


def _matmul(xp: Any, x: Any, y: Any, out: Any = None) -> Any:
    if xp is np and x.dtype == y.dtype and x.dtype.num in _OWN_PRODUCTS:
        return product(x, y, out)
    if xp.__name__ == "cupy" and x.dtype == y.dtype:
        found = cublaslt.product(x, y, out=out)
        if found is not None:
            return found
    if out is not None:
        out[...] = _matmul(xp, x, y)
        return out
    # NumPy has no product of its own for floats of one or two bytes; they are summed in float32 and rounded once.
    dtype = x.dtype if x.dtype == y.dtype else xp.result_type(x.dtype, y.dtype)
    if xp is np and is_low_precision(dtype):
        return product(x.astype(np.float32), y.astype(np.float32)).astype(dtype)
    if x.dtype != y.dtype and xp is not np:
        return _matmul(xp, x.astype(dtype, copy=False), y.astype(dtype, copy=False))
    # CuPy has products of two matrices of these alone.
    if xp is not np and dtype.num >= FIRST_USER_DTYPE and (x.ndim > 2 or y.ndim > 2):
        if y.ndim == 2 and x.shape[-1]:
            rows = _matmul(xp, x.reshape(-1, x.shape[-1]), y)
            return rows.reshape(*x.shape[:-1], y.shape[-1])
        return xp.matmul(x.astype(np.float32), y.astype(np.float32)).astype(dtype)
    out = x @ y
    return out if out.dtype == dtype else out.astype(dtype)


MATMUL = Op("matmul", ("x", "y"), _matmul, _infer_matmul, takes_out=True, wide_sums=True)


def matmul(x1: Any, x2: Any, /) -> Array:
    """Matrix product over the last two dimensions; leading ones broadcast, vectors are rows or columns as in NumPy.

    >>> mt.matmul(mt.ones((2, 3)), mt.ones((3, 4))).shape
    (2, 4)

    Raises
    ------
    ShapeError
        When the contracted lengths differ, the leading dimensions do not broadcast, or an operand is 0-d.
    """
    if type(x1) is not Array or type(x2) is not Array:
        x1, x2 = as_arrays(x1, x2)
    return apply(MATMUL, (x1, x2))


def vecdot(x1: Any, x2: Any, /, axis: int = -1) -> Array:
    """Sums of products along an axis, the first operand conjugated; the other dimensions broadcast.

    >>> mt.vecdot(mt.asarray([1, 2]), mt.asarray([3, 4]))
    Array(11)
    """
    x1, x2 = asarray(x1), asarray(x2)
    if not x1.ndim or not x2.ndim or (not -min(x1.ndim, x2.ndim) <= axis < 0 and x1.ndim != x2.ndim):
        raise ShapeError(f"[vecdot] shapes {x1.shape} and {x2.shape} have no common axis {axis}")
    shape_rules.normalize_axis("vecdot", axis, min(x1.ndim, x2.ndim))
    if x1.shape[axis] != x2.shape[axis]:
        raise ShapeError(f"[vecdot] the lengths along axis {axis} differ: {x1.shape} and {x2.shape}")
    x1, x2 = moveaxis(x1, axis, -1), moveaxis(x2, axis, -1)
    return matmul(conj(x1)[..., None, :], x2[..., :, None])[..., 0, 0]


def tensordot(x1: Any, x2: Any, /, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """Products summed over several axes: the last ``axes`` of ``x1`` with the first of ``x2``, or two lists of axes.

    >>> mt.tensordot(mt.ones((2, 3, 4)), mt.ones((4, 3)), axes=((1, 2), (1, 0))).shape
    (2,)
    """
    x1, x2 = asarray(x1), asarray(x2)
    if isinstance(axes, int):
        if not 0 <= axes <= min(x1.ndim, x2.ndim):
            raise ShapeError(f"[tensordot] cannot sum over {axes} axes of shapes {x1.shape} and {x2.shape}")
        first, second = list(range(x1.ndim - axes, x1.ndim)), list(range(axes))
    else:
        first, second = (list(a) if isinstance(a, Sequence) else [a] for a in axes)
        shape_rules.normalize_axis("tensordot", first, x1.ndim)
        shape_rules.normalize_axis("tensordot", second, x2.ndim)
        first, second = [a % x1.ndim for a in first], [a % x2.ndim for a in second]
    if [x1.shape[a] for a in first] != [x2.shape[a] for a in second]:
        raise ShapeError(f"[tensordot] the summed lengths differ: axes {first} of {x1.shape}, {second} of {x2.shape}")
    rows = [i for i in range(x1.ndim) if i not in first]
    cols = [i for i in range(x2.ndim) if i not in second]
    k = math.prod(x1.shape[a] for a in first)
    left, right = [x1.shape[a] for a in rows], [x2.shape[a] for a in cols]
    a = reshape(permute_dims(x1, (*rows, *first)), (math.prod(left), k))
    b = reshape(permute_dims(x2, (*second, *cols)), (k, math.prod(right)))
    return reshape(matmul(a, b), (*left, *right))


def outer(x1: Any, x2: Any, /) -> Array:
    """All products of the elements of two vectors.

    >>> mt.linalg.outer(mt.asarray([1, 2]), mt.asarray([3, 4]))
    Array([[3, 4],
           [6, 8]])
    """
    x1, x2 = asarray(x1), asarray(x2)
    if x1.ndim != 1 or x2.ndim != 1:
        raise ShapeError(f"[outer] takes two vectors, got shapes {x1.shape} and {x2.shape}")
    return x1[:, None] * x2[None, :]


def cross(x1: Any, x2: Any, /, axis: int = -1) -> Array:
    """Cross product of vectors of three elements along an axis; the other dimensions broadcast.

    >>> mt.linalg.cross(mt.asarray([1, 0, 0]), mt.asarray([0, 1, 0]))
    Array([0, 0, 1])
    """
    x1, x2 = asarray(x1), asarray(x2)
    shape_rules.normalize_axis("cross", axis, min(x1.ndim, x2.ndim))
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ShapeError(f"[cross] vectors have three elements along axis {axis}, got {x1.shape} and {x2.shape}")
    x1, x2 = broadcast_arrays(x1, x2)
    a, b = moveaxis(x1, axis, -1), moveaxis(x2, axis, -1)
    i, j = [1, 2, 0], [2, 0, 1]
    parts = [a[..., m] * b[..., n] - a[..., n] * b[..., m] for m, n in zip(i, j, strict=True)]
    return moveaxis(stack(parts, axis=-1), -1, axis)
