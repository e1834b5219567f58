"""Shape and dtype rules shared by many ops: ``rule(op, args, params) -> ShapeDtype``.

The dtype of an elementwise result is asked of the implementation itself, on one-element arrays, once for each combination of
dtypes: the rule cannot drift from what the op does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._op import Op
from .errors import AxisError, ShapeError
from .program import ShapeDtype, freeze


def broadcast_shapes(op: Op, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The broadcast shape. Raises :class:`ShapeError` that names the op and all shapes."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"[{op.name}] shapes do not broadcast together: {', '.join(map(str, shapes))}") from None


class _Probe:
    """Key and arguments of a dtype probe; hashable by meaning, so that ``1`` and ``1.0`` are kept apart."""

    __slots__ = ("args", "key", "op", "params")

    def __init__(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> None:
        self.op, self.args, self.params = op, args, params
        self.key = (op, tuple(a if isinstance(a, np.dtype) else freeze(a) for a in args), freeze(params))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Probe) and self.key == other.key


@functools.lru_cache(maxsize=4096)
def _probe(p: _Probe) -> np.dtype:
    args = [np.ones((1,), a) if isinstance(a, np.dtype) else a for a in p.args]
    with np.errstate(all="ignore"):
        return p.op.numpy(*args, **p.params).dtype


def result_dtype(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> np.dtype:
    """The dtype that ``op`` gives for arguments of these dtypes (scalars stay scalars)."""
    return _probe(_Probe(op, tuple(a.dtype if isinstance(a, ShapeDtype) else a for a in args), params))


def elementwise(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """All arguments broadcast together."""
    shapes = [a.shape for a in args if isinstance(a, ShapeDtype)]
    shape = shapes[0] if len(shapes) == 1 else broadcast_shapes(op, shapes)
    return ShapeDtype(shape, result_dtype(op, args, params))


def normalize_axis(op_name: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes as sorted, non-negative ints; None is all of them. Raises :class:`AxisError` out of range, :class:`ShapeError` when
    repeated."""
    if axis is None:
        return tuple(range(ndim))
    axes = (axis,) if isinstance(axis, int | np.integer) else tuple(axis)
    out = []
    for a in axes:
        if not -ndim <= a < ndim:
            raise AxisError(f"[{op_name}] axis {a} is out of bounds for an array of {ndim} dimension(s)")
        out.append(int(a) % ndim)
    if len(set(out)) != len(out):
        raise ShapeError(f"[{op_name}] axis {axes} names a dimension twice")
    return tuple(sorted(out))


def reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """Shape after a reduction over ``axes``."""
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def reduction(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """``params`` has ``axis`` (a tuple of non-negative ints) and ``keepdims``."""
    x = args[0]
    dtype = _probe(_Probe(op, (x.dtype,), {**params, "axis": (0,), "keepdims": False}))
    return ShapeDtype(reduced_shape(x.shape, params["axis"], params["keepdims"]), dtype)


def same(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """Like the first argument."""
    return ShapeDtype(args[0].shape, args[0].dtype)
