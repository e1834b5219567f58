"""Functions that rearrange elements: shapes, axes, joining, casting."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.devices import Device
from ..core.dispatch import apply, as_array
from ..core.dtypes import as_dtype, bfloat16, check_cast, finfo, isdtype, result_type
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, defined
from ..kernels.launch import contiguous, write
from .elementwise import ASTYPE, clip
from .param_kinds import AXES, AXIS, ORDER, SIZES

# ----- ops ------------------------------------------------------------------------------------------------------------


def _reshape(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    if xp is np or x.flags.c_contiguous or x.size < Op.large:
        return x.reshape(shape)
    out = x.view()
    try:
        out.shape = shape  # refused where it takes a copy
    except AttributeError:
        return contiguous(x).reshape(shape)
    return out


def _broadcast_to(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    return xp.broadcast_to(x, shape)


def _concat(xp: Any, *xs: Any, axis: int) -> Any:
    if xp is np or sum(x.size for x in xs) < Op.large or any(x.dtype != xs[0].dtype for x in xs):
        return xp.concatenate(xs, axis=axis)
    ends = list(itertools.accumulate(x.shape[axis] for x in xs))
    out = xp.empty((*xs[0].shape[:axis], ends[-1], *xs[0].shape[axis + 1 :]), xs[0].dtype)
    for x, end in zip(xs, ends, strict=True):
        write(out, (*(slice(None),) * axis, slice(end - x.shape[axis], end)), x)
    return out


def _no_view(shape: tuple[int, ...], wanted: tuple[int, ...]) -> ShapeError:
    return ShapeError(f"[reshape] cannot view shape {shape} ({math.prod(shape)} elements) as {wanted}")


def _infer_reshape(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    (x,), shape = args, params["shape"]
    if math.prod(x.shape) != math.prod(shape):
        raise _no_view(x.shape, shape)
    return ShapeDtype(shape, x.dtype)


def _infer_broadcast(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    (x,), shape = args, params["shape"]
    if shape_rules.broadcast_shapes(op, [x.shape, shape]) != shape:
        raise ShapeError(f"[{op.name}] shape {x.shape} does not broadcast to {shape}")
    return ShapeDtype(shape, x.dtype)


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
    return ShapeDtype((*first[:axis], total, *first[axis + 1 :]), result_type(*(a.dtype for a in args)))


RESHAPE = Op("reshape", ("x",), _reshape, _infer_reshape, params={"shape": SIZES}, view="always")
PERMUTE_DIMS = Op(
    "permute_dims", ("x",), lambda xp, x, axes: x.transpose(axes), _infer_permute, params={"axes": ORDER}, view="always"
)
BROADCAST_TO = Op("broadcast_to", ("x",), _broadcast_to, _infer_broadcast, params={"shape": SIZES}, view="always")
FLIP = Op("flip", ("x",), lambda xp, x, axis: xp.flip(x, axis), shape_rules.same, params={"axis": AXES}, view="always")
CONCAT = Op("concat", ("*xs",), _concat, _infer_concat, params={"axis": AXIS})

# ----- functions ------------------------------------------------------------------------------------------------------


def astype(
    x: Any, dtype: Any, /, *, copy: bool = True, device: Device | str | None = None, saturate: bool = False
) -> Array:
    """``x`` in another dtype; the same array where it has that dtype already and ``copy`` is false.

    Values have copy-on-write semantics, so that a "copy" costs nothing until one side is written. The imaginary part of
    complex numbers is not dropped in silence: casting them to real ones raises.

    Parameters
    ----------
    device
        Where the result goes; it stays where ``x`` is by default.
    saturate
        Values beyond the range of a floating ``dtype``, infinities too, become its largest number instead of infinity
        (or NaN in ``float8_e4m3fn``, which has no infinity). NaN stays NaN.

    Examples
    --------
    >>> x = mt.asarray([464.0, 480.0, float("inf")])
    >>> mt.astype(x, mt.float8_e4m3fn).tolist(), mt.astype(x, mt.float8_e4m3fn, saturate=True).tolist()
    ([448.0, nan, nan], [448.0, 448.0, 448.0])
    """
    if not copy and device is None and getattr(getattr(x, "_buf", None), "dtype", None) is dtype:
        return x
    dtype = as_dtype(dtype, "astype")
    x = as_array(x)
    check_cast("astype", x.dtype, dtype)
    if device is not None:
        x = x.to_device(device)
    if x.dtype == dtype and not copy:
        return x
    if saturate and x.dtype != dtype and isdtype(dtype, "real floating"):
        limits = finfo(dtype)
        x = astype(x, np.float32) if x.dtype == bfloat16 else x  # which rounds the largest float16 up
        # The limits must be numbers of the dtype of x; where they are beyond it nothing can be out of range.
        if isdtype(x.dtype, "real floating") and finfo(x.dtype).max > limits.max:
            x = clip(x, limits.min, limits.max)
        elif isdtype(x.dtype, "integral"):
            x = clip(astype(x, np.float64), limits.min, limits.max)
    return apply(ASTYPE, (x,), {"dtype": dtype})


def reshape(x: Any, /, shape: int | Sequence[int], *, copy: bool | None = None, order: str = "C") -> Array:
    """The same elements, in C order, in another shape; one length may be -1.

    With ``order="F"`` the first index runs fastest.

    >>> mt.reshape(mt.arange(6), (2, -1)).shape
    (2, 3)
    """
    if order != "C":
        if order != "F":
            raise ArgumentError(
                f"[reshape] order must be 'C' or 'F', got {order!r}: how the elements lie in memory is nobody's "
                "business"
            )
        full = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        turned = permute_dims(x, tuple(range(as_array(x).ndim))[::-1])
        return permute_dims(reshape(turned, full[::-1]), tuple(range(len(full)))[::-1])
    x = as_array(x)
    several = type(shape) is tuple or isinstance(shape, Sequence)
    try:
        wanted = tuple(map(operator.index, shape)) if several else (operator.index(shape),)
    except TypeError:
        raise ShapeError(f"[reshape] a shape is an integer or a tuple of them, got {shape!r}") from None
    if wanted and min(wanted) < 0:  # of two unknown lengths, or -2, NumPy would make something
        known, size = math.prod(n for n in wanted if n != -1), x.size
        if wanted.count(-1) != 1 or known <= 0 or size % known:
            raise _no_view(x.shape, wanted)
        wanted = tuple(size // known if n == -1 else n for n in wanted)
    return apply(RESHAPE, (x,), {"shape": wanted})


def permute_dims(x: Any, /, axes: Sequence[int]) -> Array:
    """Dimensions in another order: dimension ``i`` of the result is ``axes[i]`` of ``x``.

    >>> mt.permute_dims(mt.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    x = as_array(x)
    ndim = x.ndim
    if type(axes) is not tuple or sorted(axes) != list(range(ndim)):
        if len(axes) != ndim or len(shape_rules.normalize_axis("permute_dims", axes, ndim)) != ndim:
            raise ShapeError(f"[permute_dims] axes {tuple(axes)} are no order of the {ndim} dimensions of {x.shape}")
        axes = tuple(int(a) % ndim for a in axes)
    return apply(PERMUTE_DIMS, (x,), {"axes": axes})


def matrix_transpose(x: Any, /) -> Array:
    """The last two dimensions exchanged.

    >>> mt.matrix_transpose(mt.asarray([[1, 2], [3, 4]]))
    Array([[1, 3],
           [2, 4]])
    """
    x = as_array(x)
    ndim = x.ndim
    if ndim < 2:
        raise ShapeError(f"[matrix_transpose] needs at least two dimensions, got shape {x.shape}")
    return apply(PERMUTE_DIMS, (x,), {"axes": (*range(ndim - 2), ndim - 1, ndim - 2)})


def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int], /) -> Array:
    """Dimensions ``source`` moved to ``destination``, the others in their order.

    >>> mt.moveaxis(mt.ones((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    x = as_array(x)
    src = [source] if isinstance(source, int) or not np.ndim(source) else list(source)
    dst = [destination] if isinstance(destination, int) or not np.ndim(destination) else list(destination)
    shape_rules.normalize_axis("moveaxis", src, x.ndim)
    shape_rules.normalize_axis("moveaxis", dst, x.ndim)
    if len(src) != len(dst):
        raise ShapeError(f"[moveaxis] {len(src)} source axes for {len(dst)} destinations")
    order = [i for i in range(x.ndim) if i not in [a % x.ndim for a in src]]
    for d, s in sorted(zip([a % x.ndim for a in dst], [a % x.ndim for a in src], strict=True)):
        order.insert(d, s)
    return permute_dims(x, order)


def broadcast_to(x: Any, /, shape: int | Sequence[int]) -> Array:
    """``x`` repeated, without copying, along new and length-one dimensions.

    >>> mt.broadcast_to(mt.asarray([1, 2]), (2, 2))
    Array([[1, 2],
           [1, 2]])
    """
    x = as_array(x)
    shape = shape_rules.as_shape("broadcast_to", shape)
    # Never x itself: a write to the result must not be seen through x.
    return apply(BROADCAST_TO, (x,), {"shape": shape})


def broadcast_arrays(*arrays: Any) -> tuple[Array, ...]:
    """The arrays, each broadcast to their common shape.

    >>> [x.shape for x in mt.broadcast_arrays(mt.ones((3, 1)), mt.ones(4))]
    [(3, 4), (3, 4)]
    """
    xs = [as_array(a) for a in arrays]
    shape = shape_rules.broadcast_shapes(BROADCAST_TO, [x.shape for x in xs])
    return tuple(broadcast_to(x, shape) for x in xs)


def broadcast_shapes(*shapes: Sequence[int | None]) -> tuple[int | None, ...]:
    """The shape that arrays of these shapes have together.

    A length of None is unknown, and stays so unless another tells it.

    >>> mt.broadcast_shapes((3, 1), (1, 4))
    (3, 4)
    """
    out: list[int | None] = []
    known_lengths = [[n if n is None else operator.index(n) for n in s][::-1] for s in shapes]
    for lengths in itertools.zip_longest(*known_lengths, fillvalue=1):
        known = {n for n in lengths if n not in (1, None)}
        if len(known) > 1:
            raise ShapeError(f"[broadcast_shapes] shapes do not broadcast together: {', '.join(map(str, shapes))}")
        out.append(known.pop() if known else None if None in lengths else 1)
    return tuple(out[::-1])


def expand_dims(x: Any, /, axis: int | Sequence[int] = 0) -> Array:
    """New dimensions of length one at the places ``axis`` of the result.

    >>> mt.expand_dims(mt.ones(3), axis=(0, -1)).shape
    (1, 3, 1)
    """
    x = as_array(x)
    ndim = x.ndim + (1 if isinstance(axis, int | np.integer) else len(axis))
    axes = shape_rules.normalize_axis("expand_dims", axis, ndim)
    lengths = iter(x.shape)
    return reshape(x, tuple(1 if i in axes else next(lengths) for i in range(ndim)))


def squeeze(x: Any, /, axis: int | Sequence[int] | None = None) -> Array:
    """Without the dimensions ``axis``, which must have length one; all that have, by default.

    >>> mt.squeeze(mt.ones((1, 3, 1)), axis=(0, 2)).shape
    (3,)
    """
    x = as_array(x)
    if axis is None:
        axis = tuple(i for i, n in enumerate(x.shape) if n == 1)
    axes = shape_rules.normalize_axis("squeeze", axis, x.ndim)
    if any(x.shape[a] != 1 for a in axes):
        raise ShapeError(f"[squeeze] axis {axis} of shape {x.shape} has not length 1")
    return reshape(x, shape_rules.reduced_shape(x.shape, axes, False))


def flip(x: Any, /, axis: int | Sequence[int] | None = None) -> Array:
    """Elements in reverse order along the axes (all by default).

    >>> mt.flip(mt.asarray([[1, 2], [3, 4]]), axis=1)
    Array([[2, 1],
           [4, 3]])
    """
    x = as_array(x)
    return apply(FLIP, (x,), {"axis": shape_rules.normalize_axis("flip", axis, x.ndim)})


def concat(arrays: Sequence[Any], /, axis: int | None = 0) -> Array:
    """Arrays joined along an axis they have (flattened first when ``axis`` is None).

    >>> mt.concat([mt.asarray([1, 2]), mt.asarray([3])])
    Array([1, 2, 3])
    """
    xs = [as_array(a) for a in arrays]
    if not xs:
        raise ShapeError("[concat] needs at least one array")
    if axis is None:
        xs, axis = [reshape(x, (-1,)) for x in xs], 0
    axis = shape_rules.one_axis("concat", axis, xs[0].ndim)
    return apply(CONCAT, tuple(xs), {"axis": axis})


def stack(arrays: Sequence[Any], /, axis: int = 0) -> Array:
    """Arrays of one shape joined along a new axis.

    >>> mt.stack([mt.asarray([1, 2]), mt.asarray([3, 4])], axis=1)
    Array([[1, 3],
           [2, 4]])
    """
    xs = [as_array(a) for a in arrays]
    shapes = [x.shape for x in xs]
    if len(set(shapes)) > 1:
        raise ShapeError(f"[stack] takes arrays of one shape, got {', '.join(map(str, shapes))}")
    if not xs:
        raise ShapeError("[stack] needs at least one array")
    axis = shape_rules.one_axis("stack", axis, len(shapes[0]) + 1)
    shape = (*shapes[0][:axis], 1, *shapes[0][axis:])
    return concat([reshape(x, shape) for x in xs], axis=axis)


def unstack(x: Any, /, axis: int = 0) -> tuple[Array, ...]:
    """The parts of ``x`` along an axis, without that axis: the inverse of :func:`stack`.

    >>> [x.tolist() for x in mt.unstack(mt.asarray([[1, 2], [3, 4]]))]
    [[1, 2], [3, 4]]
    """
    x = as_array(x)
    axis = shape_rules.one_axis("unstack", axis, x.ndim)
    lead = (slice(None),) * axis
    return tuple(x[(*lead, i)] for i in range(x.shape[axis]))


def roll(x: Any, /, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Array:
    """Elements moved along axes by ``shift`` places; those that leave at one end come back at the other.

    Without ``axis`` the array is rolled as if it were flat.

    >>> mt.roll(mt.arange(4), 1)
    Array([3, 0, 1, 2])
    """
    x = as_array(x)
    if axis is None:
        if not isinstance(shift, int | np.integer):
            raise ShapeError("[roll] several shifts need as many axes")
        return reshape(roll(reshape(x, (-1,)), shift, axis=0), x.shape)
    axes = (axis,) if isinstance(axis, int | np.integer) else tuple(axis)
    shifts = (shift,) * len(axes) if isinstance(shift, int | np.integer) else tuple(shift)
    if len(shifts) != len(axes):
        raise ShapeError(f"[roll] {len(shifts)} shifts for {len(axes)} axes")
    out = x
    for n, a in zip(shifts, axes, strict=True):
        a = shape_rules.one_axis("roll", a, x.ndim)
        length = x.shape[a]
        cut = -operator.index(n) % length if length else 0
        if cut:
            lead = (slice(None),) * a
            out = concat([out[(*lead, slice(cut, None))], out[(*lead, slice(None, cut))]], axis=a)
    return astype(x, x.dtype) if out is x else out


def tile(x: Any, repetitions: int | Sequence[int], /) -> Array:
    """``x`` as a whole laid side by side, ``repetitions[i]`` times along axis ``i`` (counted from the last one).

    >>> mt.tile(mt.arange(2), (2, 2))
    Array([[0, 1, 0, 1],
           [0, 1, 0, 1]])
    """
    x = as_array(x)
    several = isinstance(repetitions, Sequence) or np.ndim(repetitions)
    reps = tuple(map(operator.index, repetitions if several else (repetitions,)))
    if any(n < 0 for n in reps):
        raise ShapeError(f"[tile] repetitions must not be negative, got {reps}")
    shape = (1,) * (len(reps) - x.ndim) + x.shape
    reps = (1,) * (len(shape) - len(reps)) + reps
    apart = reshape(x, tuple(k for n in shape for k in (1, n)))
    full = broadcast_to(apart, tuple(k for r, n in zip(reps, shape, strict=True) for k in (r, n)))
    return reshape(full, tuple(r * n for r, n in zip(reps, shape, strict=True)))


def repeat(x: Any, repeats: Any, /, axis: int | None = None) -> Array:
    """Each element (each slice along ``axis``) several times in a row; of the flattened array without ``axis``.

    ``repeats`` is one number for all, or an array of one number each (whose values must be known: they make the shape).

    >>> mt.repeat(mt.asarray([1, 2]), mt.asarray([1, 3]))
    Array([1, 2, 2, 2])
    """
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    axis = shape_rules.one_axis("repeat", axis, x.ndim)
    n = x.shape[axis]
    counts = np.asarray(repeats)
    if counts.dtype.kind not in "iu":
        raise DTypeError(f"[repeat] repeats must be integers, got {counts.dtype.name}")
    if counts.ndim > 1 or (counts.ndim == 1 and counts.shape[0] not in (1, n)):
        raise ShapeError(f"[repeat] repeats of shape {counts.shape} for axis {axis} of shape {x.shape}")
    if counts.size and counts.min() < 0:
        raise ArgumentError("[repeat] repeats must not be negative")
    if counts.size == 1 and (n != 1 or counts.ndim == 0):
        k = int(counts.reshape(-1)[0])
        apart = reshape(x, (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :]))
        full = broadcast_to(apart, (*x.shape[: axis + 1], k, *x.shape[axis + 1 :]))
        return reshape(full, (*x.shape[:axis], n * k, *x.shape[axis + 1 :]))
    places = np.repeat(np.arange(n), counts)
    return x[(*(slice(None),) * axis, places)]


__all__ = defined(globals())
