"""Functions that rearrange elements: shapes, axes, joining, casting."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _infer
from ._dispatch import apply
from ._op import Op
from .elementwise import ASTYPE
from .errors import ShapeError
from .program import ShapeDtype

if TYPE_CHECKING:
    from ._array import Array

# ----- ops ------------------------------------------------------------------------------------------------------------


def _reshape(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    return x.reshape(shape)


def _permute_dims(xp: Any, x: Any, axes: tuple[int, ...]) -> Any:
    return x.transpose(axes)


def _broadcast_to(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    return xp.broadcast_to(x, shape)


def _flip(xp: Any, x: Any, axis: tuple[int, ...]) -> Any:
    return xp.flip(x, axis)


def _concat(xp: Any, *xs: Any, axis: int) -> Any:
    return xp.concatenate(xs, axis=axis)


def _with_shape(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(params["shape"], args[0].dtype)


def _infer_permute(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(tuple(args[0].shape[a] for a in params["axes"]), args[0].dtype)


def _infer_concat(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    axis = params["axis"]
    first = args[0].shape
    for a in args[1:]:
        if len(a.shape) != len(first) or any(
            m != n for i, (m, n) in enumerate(zip(a.shape, first, strict=True)) if i != axis
        ):
            raise ShapeError(
                f"[concat] shapes may differ along axis {axis} only: {', '.join(str(x.shape) for x in args)}"
            )
    total = sum(a.shape[axis] for a in args)
    return ShapeDtype((*first[:axis], total, *first[axis + 1 :]), np.result_type(*(a.dtype for a in args)))


RESHAPE = Op("reshape", ("x",), _reshape, _with_shape)
PERMUTE_DIMS = Op("permute_dims", ("x",), _permute_dims, _infer_permute)
BROADCAST_TO = Op("broadcast_to", ("x",), _broadcast_to, _with_shape)
FLIP = Op("flip", ("x",), _flip, _infer.same)
CONCAT = Op("concat", ("*xs",), _concat, _infer_concat)

# ----- functions ------------------------------------------------------------------------------------------------------


def _asarray(x: Any) -> Array:
    from .creation import asarray

    return asarray(x)


def astype(x: Any, dtype: Any, /, *, copy: bool = True) -> Array:
    """``x`` in another dtype; the same array where it has that dtype already and ``copy`` is false.

    Values have copy-on-write semantics, so that a "copy" costs nothing until one side is written.
    """
    x = _asarray(x)
    dtype = np.dtype(dtype)
    if x.dtype == dtype and not copy:
        return x
    return apply(ASTYPE, (x,), {"dtype": dtype})


def reshape(x: Any, /, shape: int | Sequence[int], *, copy: bool | None = None) -> Array:
    """The same elements, in C order, in another shape; one length may be -1.

    >>> import meshtape as mt
    >>> mt.reshape(mt.arange(6), (2, -1)).shape
    (2, 3)
    """
    x = _asarray(x)
    wanted = (operator.index(shape),) if not isinstance(shape, Sequence) else tuple(map(operator.index, shape))
    known = math.prod(n for n in wanted if n != -1)
    full = wanted
    if wanted.count(-1) == 1 and known > 0 and x.size % known == 0:
        full = tuple(x.size // known if n == -1 else n for n in wanted)
    if -1 in full or math.prod(full) != x.size or any(n < 0 for n in full):
        raise ShapeError(f"[reshape] cannot view shape {x.shape} ({x.size} elements) as {wanted}")
    return apply(RESHAPE, (x,), {"shape": full})


def permute_dims(x: Any, /, axes: Sequence[int]) -> Array:
    """Dimensions in another order: dimension ``i`` of the result is ``axes[i]`` of ``x``."""
    x = _asarray(x)
    if len(axes) != x.ndim or len(_infer.normalize_axis("permute_dims", axes, x.ndim)) != x.ndim:
        raise ShapeError(f"[permute_dims] axes {tuple(axes)} are no order of the {x.ndim} dimensions of {x.shape}")
    return apply(PERMUTE_DIMS, (x,), {"axes": tuple(int(a) % x.ndim for a in axes)})


def matrix_transpose(x: Any, /) -> Array:
    """The last two dimensions exchanged."""
    x = _asarray(x)
    if x.ndim < 2:
        raise ShapeError(f"[matrix_transpose] needs at least two dimensions, got shape {x.shape}")
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int], /) -> Array:
    """Dimensions ``source`` moved to ``destination``, the others in their order."""
    x = _asarray(x)
    src = [source] if isinstance(source, int) else list(source)
    dst = [destination] if isinstance(destination, int) else list(destination)
    _infer.normalize_axis("moveaxis", src, x.ndim)
    _infer.normalize_axis("moveaxis", dst, x.ndim)
    if len(src) != len(dst):
        raise ShapeError(f"[moveaxis] {len(src)} source axes for {len(dst)} destinations")
    order = [i for i in range(x.ndim) if i not in [a % x.ndim for a in src]]
    for d, s in sorted(zip([a % x.ndim for a in dst], [a % x.ndim for a in src], strict=True)):
        order.insert(d, s)
    return permute_dims(x, order)


def broadcast_to(x: Any, /, shape: Sequence[int]) -> Array:
    """``x`` repeated, without copying, along new and length-one dimensions."""
    x = _asarray(x)
    shape = tuple(map(operator.index, shape))
    if _infer.broadcast_shapes(BROADCAST_TO, [x.shape, shape]) != shape:
        raise ShapeError(f"[broadcast_to] shape {x.shape} does not broadcast to {shape}")
    # Never x itself: a write to the result must not be seen through x.
    return apply(BROADCAST_TO, (x,), {"shape": shape})


def broadcast_arrays(*arrays: Any) -> tuple[Array, ...]:
    """The arrays, each broadcast to their common shape."""
    xs = [_asarray(a) for a in arrays]
    shape = _infer.broadcast_shapes(BROADCAST_TO, [x.shape for x in xs])
    return tuple(broadcast_to(x, shape) for x in xs)


def expand_dims(x: Any, /, *, axis: int = 0) -> Array:
    """A new dimension of length one at ``axis`` of the result."""
    x = _asarray(x)
    (axis,) = _infer.normalize_axis("expand_dims", axis, x.ndim + 1)
    return reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


def squeeze(x: Any, /, axis: int | Sequence[int]) -> Array:
    """Without the dimensions ``axis``, which must have length one."""
    x = _asarray(x)
    axes = _infer.normalize_axis("squeeze", axis, x.ndim)
    if any(x.shape[a] != 1 for a in axes):
        raise ShapeError(f"[squeeze] axis {axis} of shape {x.shape} has not length 1")
    return reshape(x, _infer.reduced_shape(x.shape, axes, False))


def flip(x: Any, /, *, axis: int | Sequence[int] | None = None) -> Array:
    """Elements in reverse order along the axes (all by default)."""
    x = _asarray(x)
    return apply(FLIP, (x,), {"axis": _infer.normalize_axis("flip", axis, x.ndim)})


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Array:
    """Arrays joined along an axis they have (flattened first when ``axis`` is None)."""
    xs = [_asarray(a) for a in arrays]
    if not xs:
        raise ShapeError("[concat] needs at least one array")
    if axis is None:
        xs, axis = [reshape(x, (-1,)) for x in xs], 0
    (axis,) = _infer.normalize_axis("concat", axis, xs[0].ndim)
    _infer_concat(CONCAT, tuple(ShapeDtype(x.shape, x.dtype) for x in xs), {"axis": axis})
    return apply(CONCAT, tuple(xs), {"axis": axis})


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Array:
    """Arrays of one shape joined along a new axis."""
    return concat([expand_dims(a, axis=axis) for a in arrays], axis=axis)
