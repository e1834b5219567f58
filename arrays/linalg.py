"""Products of vectors and matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _infer
from ._dispatch import apply
from ._op import Op
from .errors import ShapeError
from .program import ShapeDtype
from .reductions import _is_low_precision

if TYPE_CHECKING:
    from ._array import Array


def _infer_matmul(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, y = args
    if not isinstance(x, ShapeDtype) or not isinstance(y, ShapeDtype) or not x.shape or not y.shape:
        raise ShapeError("[matmul] takes arrays of at least one dimension; use * for scalars")
    k1, k2 = x.shape[-1], y.shape[-2] if len(y.shape) > 1 else y.shape[0]
    if k1 != k2:
        raise ShapeError(f"[matmul] the contracted lengths differ: {x.shape} @ {y.shape}")
    batch = _infer.broadcast_shapes(op, [x.shape[:-2], y.shape[:-2]])
    rows = (x.shape[-2],) if len(x.shape) > 1 else ()
    cols = (y.shape[-1],) if len(y.shape) > 1 else ()
    return ShapeDtype((*batch, *rows, *cols), np.result_type(x.dtype, y.dtype))


def _matmul(xp: Any, x: Any, y: Any) -> Any:
    # NumPy has no product of its own for floats of one or two bytes; they are summed in float32 and rounded once.
    dtype = xp.result_type(x.dtype, y.dtype)
    if xp is np and _is_low_precision(dtype):
        return xp.matmul(x.astype(np.float32), y.astype(np.float32)).astype(dtype)
    return xp.matmul(x, y).astype(dtype, copy=False)


MATMUL = Op("matmul", ("x", "y"), _matmul, _infer_matmul)


def matmul(x1: Any, x2: Any, /) -> Array:
    """Matrix product over the last two dimensions; leading ones broadcast, vectors are rows or columns as in NumPy.

    >>> import meshtape as mt
    >>> mt.matmul(mt.ones((2, 3)), mt.ones((3, 4))).shape
    (2, 4)

    Raises
    ------
    ShapeError
        When the contracted lengths differ, the leading dimensions do not broadcast, or an operand is 0-d.
    """
    from .creation import asarray

    x1, x2 = asarray(x1), asarray(x2)
    # NumPy's own message names neither shape; the rule is cheap beside the product.
    if x1.ndim == 0 or x2.ndim == 0 or x1.shape[-1] != x2.shape[-2 if x2.ndim > 1 else 0]:
        _infer_matmul(MATMUL, (ShapeDtype(x1.shape, x1.dtype), ShapeDtype(x2.shape, x2.dtype)), {})
    return apply(MATMUL, (x1, x2))
