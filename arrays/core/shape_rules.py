"""Shape and dtype rules shared by many ops: ``rule(op, args, params) -> ShapeDtype``.

The dtype of an elementwise result is asked of the implementation itself, on one-element arrays, once for each
combination of dtypes: the rule cannot drift from what the op does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from .errors import ArgumentError, AxisError, DTypeError, MeshtapeError, NumberRangeError, ShapeError
from .op import Op, ShapeDtype
from .program import freeze


def broadcast_shapes(op: Op, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The broadcast shape. Raises :class:`ShapeError` that names the op and all shapes."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"[{op.name}] shapes do not broadcast together: {', '.join(map(str, shapes))}") from None


def as_shape(name: str, shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints. Raises :class:`ShapeError` that says who was given what instead."""
    try:
        if type(shape) is int:
            full: tuple[int, ...] = (shape,)
        elif type(shape) is tuple or (isinstance(shape, Iterable) and not isinstance(shape, Set | Mapping)):
            full = tuple(map(operator.index, shape))
        else:
            full = (operator.index(shape),)
    except TypeError:
        raise ShapeError(f"[{name}] a shape is an int or a sequence of ints, got {shape!r}") from None
    if full and min(full) < 0:
        raise ShapeError(f"[{name}] a shape has no negative lengths, got {full}")
    if math.prod(full) >= 2**62:
        raise ShapeError(f"[{name}] shape {full} has too many elements: places are counted in 64 bits")
    return full


_PROBED: dict[Any, np.dtype] = {}
_MOST_PROBED = 4096


def probed_dtype(op: Op, args: Sequence[Any], params: Mapping[str, Any]) -> np.dtype:
    """The dtype that the NumPy form of ``op`` gives, on arrays of one element of these dtypes (or Python scalars)."""
    # By meaning: 1 and 1.0 are kept apart.
    key = op, tuple([a if isinstance(a, np.dtype) else freeze(a) for a in args]), freeze(params)
    found = _PROBED.get(key)
    if found is None:
        operands = [np.ones((1,), a) if isinstance(a, np.dtype) else a for a in args]
        with np.errstate(all="ignore"):
            found = op.numpy(*operands, **params).dtype
        if len(_PROBED) >= _MOST_PROBED:
            _PROBED.clear()
        _PROBED[key] = found
    return found


def result_dtype(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> np.dtype:
    """The dtype that ``op`` gives for arguments of these dtypes (scalars stay scalars).

    Raises :class:`DTypeError` where the op is not defined for them, :class:`NumberRangeError` where a Python number
    does not fit the dtype that it meets.
    """
    dtypes = tuple(a.dtype if isinstance(a, ShapeDtype) else a for a in args)
    try:
        return probed_dtype(op, dtypes, params)
    except MeshtapeError:
        raise
    except TypeError:
        names = ", ".join(d.name if isinstance(d, np.dtype) else type(d).__name__ for d in dtypes)
        raise DTypeError(f"[{op.name}] is not defined for {names}") from None
    except ValueError as e:  # of numbers that the op has no value for
        raise ArgumentError(f"[{op.name}] {e} (of {', '.join(map(str, args))})") from None
    except OverflowError:
        arrays = {d.name for d in dtypes if isinstance(d, np.dtype)}
        numbers = [d for d in dtypes if not isinstance(d, np.dtype)]
        raise NumberRangeError(
            f"[{op.name}] {', '.join(map(str, numbers))} is out of the range of {', '.join(arrays)}: cast the array "
            "first"
        ) from None


def elementwise(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """All arguments broadcast together."""
    shapes = [a.shape for a in args if isinstance(a, ShapeDtype)]
    shape = shapes[0] if len(shapes) == 1 else broadcast_shapes(op, shapes)
    return ShapeDtype(shape, result_dtype(op, args, params))


def normalize_axis(op_name: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes as sorted, non-negative ints; None is all of them. Raises :class:`AxisError` out of range,
    :class:`ShapeError` when repeated."""
    if axis is None:
        return tuple(range(ndim))
    if type(axis) is int and -ndim <= axis < ndim:
        return (axis % ndim,)
    axes = axis if type(axis) is tuple or (isinstance(axis, Iterable) and np.ndim(axis)) else (axis,)
    out = []
    for a in axes:
        if type(a) is int and -ndim <= a < ndim:
            out.append(a % ndim)
            continue
        try:
            i = operator.index(a)
        except TypeError:
            i = None
        if i is None or isinstance(a, bool | np.bool):
            raise ArgumentError(f"[{op_name}] an axis is an int, several are a tuple of them: got {axis!r}")
        if not -ndim <= i < ndim:
            raise AxisError(f"[{op_name}] axis {i} is out of bounds for an array of {ndim} dimension(s)")
        out.append(i % ndim)
    if len(set(out)) != len(out):
        raise ShapeError(f"[{op_name}] axis {axes} names a dimension twice")
    return tuple(sorted(out))


def one_axis(op_name: str, axis: int, ndim: int) -> int:
    """One axis as a non-negative int, where several or none make no sense. Raises as :func:`normalize_axis` does."""
    if type(axis) is int and -ndim <= axis < ndim:
        return axis % ndim
    if type(axis) is not int and isinstance(axis, Iterable) and np.ndim(axis):
        raise ArgumentError(f"[{op_name}] takes one axis, an int: got {axis!r}")
    (one,) = normalize_axis(op_name, (axis,), ndim)
    return one


def reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """Shape after a reduction over ``axes``."""
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def reduction(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """``params`` has ``axis`` (a tuple of non-negative ints) and ``keepdims``."""
    x = args[0]
    dtype = probed_dtype(op, (x.dtype,), {**params, "axis": (0,), "keepdims": False})
    return ShapeDtype(reduced_shape(x.shape, params["axis"], params["keepdims"]), dtype)


def places(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """Integers in the shape of the first operand."""
    return ShapeDtype(args[0].shape, np.dtype(np.int64))


def same(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """Like the first argument."""
    return ShapeDtype(args[0].shape, args[0].dtype)


def same_as_second(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """Like the second argument."""
    return ShapeDtype(args[1].shape, args[1].dtype)
