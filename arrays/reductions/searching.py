"""Searching and taking: by position, by value, by truth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ..backends import host_sync
from ..backends.backend import on_device_of
from ..backends.pieces import large, reduced
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import Deferred, apply, as_array, wrap
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..kernels import scans
from ..ops.creation import arange, beside
from ..ops.manipulation import astype, broadcast_to, reshape
from ..ops.param_kinds import one_of
from .reductions import sum

# ----- by position ----------------------------------------------------------------------------------------------------


def _indices(name: str, indices: Any) -> Array:
    indices = as_array(indices)
    if indices.dtype.kind not in "iu":
        raise DTypeError(f"[{name}] indices must be integers, got {indices.dtype.name}")
    return indices


def take(x: Any, indices: Any, /, axis: int | None = None) -> Array:
    """The slices of ``x`` at ``indices`` along an axis; the elements of the flattened array without one.

    >>> mt.take(mt.asarray([10, 20, 30]), mt.asarray([2, 0]))
    Array([30, 10])
    """
    x = as_array(x)
    indices = _indices("take", indices)
    if axis is None:
        x, axis = x if x.ndim == 1 else reshape(x, (-1,)), 0
    axis = shape_rules.one_axis("take", axis, x.ndim)
    return x[(*(slice(None),) * axis, indices)] if axis else x[indices]


def take_along_axis(x: Any, indices: Any, /, axis: int = -1) -> Array:
    """For each place of ``indices``, the element of ``x`` in the same row along ``axis``, at that index.

    The other dimensions broadcast. ``indices`` may come from :func:`argsort` or :func:`argmax`.

    >>> x = mt.asarray([[3, 1, 2], [0, 5, 4]])
    >>> mt.take_along_axis(x, mt.argsort(x, axis=1), axis=1)
    Array([[1, 2, 3],
           [0, 4, 5]])
    """
    x = as_array(x)
    indices = _indices("take_along_axis", indices)
    axis = shape_rules.one_axis("take_along_axis", axis, x.ndim)
    if indices.ndim == x.ndim:
        ours, theirs = ((*s[:axis], *s[axis + 1 :]) for s in (x.shape, indices.shape))
        if ours != theirs:
            lead = shape_rules.broadcast_shapes(_TAKE, [ours, theirs])
            x = broadcast_to(x, (*lead[:axis], x.shape[axis], *lead[axis:]))
    return x[along_axis("take_along_axis", x.shape, indices, axis)]


_TAKE: Any = SimpleNamespace(name="take_along_axis")  # an op's name, for the message of a failed broadcast


def along_axis(name: str, shape: tuple[int, ...], indices: Any, axis: int) -> tuple[Array, ...]:
    """The key, of an array of ``shape``, of the places that have these indices along an axis and lie in the same
    row."""
    indices = _indices(name, indices)
    axis = shape_rules.one_axis(name, axis, len(shape))
    if indices.ndim != len(shape):
        raise ShapeError(f"[{name}] indices of shape {indices.shape} for an array of shape {shape}")
    where = beside(indices)
    rows = [[n if j == i else 1 for j in range(len(shape))] for i, n in enumerate(shape)]
    return tuple(
        indices if i == axis else reshape(arange(n, device=where), tuple(row))
        for i, (n, row) in enumerate(zip(shape, rows, strict=True))
    )


# ----- by value -------------------------------------------------------------------------------------------------------


def _searchsorted(xp: Any, x: Any, v: Any, side: str) -> Any:
    dtype = xp.result_type(x, v)  # a number that is wider than the table is compared, not rounded
    if dtype.kind == "f" and x.dtype.kind in "iu" and getattr(v, "dtype", dtype).kind in "iu":
        return _searchsorted_beyond(xp, x, v, side)
    return xp.searchsorted(x.astype(dtype, copy=False), v, side=side)


def _searchsorted_beyond(xp: Any, x: Any, v: Any, side: str) -> Any:
    """Of uint64 among signed integers, or the reverse: no integer dtype holds both, and in floats neighbours would be
    equal."""
    if x.dtype.kind == "u":
        inside = xp.searchsorted(x, xp.maximum(v, 0).astype(x.dtype), side=side)
        return xp.where(v < 0, 0, inside)
    most = np.iinfo(np.int64).max
    inside = xp.searchsorted(x.astype(np.int64), xp.minimum(v, v.dtype.type(most)).astype(np.int64), side=side)
    return xp.where(v > v.dtype.type(most), x.shape[0], inside)


def _infer_searchsorted(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    v = args[1]
    return ShapeDtype(v.shape if isinstance(v, ShapeDtype) else (), np.dtype(np.int64))


SEARCHSORTED = Op(
    "searchsorted",
    ("x", "v"),
    _searchsorted,
    _infer_searchsorted,
    nondifferentiable="integer result",
    params={"side": one_of("left", "right")},
)


def searchsorted(x1: Any, x2: Any, /, side: str = "left", *, sorter: Any = None) -> Array:
    """Where the values ``x2`` would go in the sorted array ``x1`` so that it stays sorted.

    Parameters
    ----------
    x1
        One dimension, ascending (after ``sorter``).
    x2
        Values of any shape, or one number.
    side
        ``"left"`` puts a value before its equals, ``"right"`` behind them.
    sorter
        Indices that sort ``x1``.

    Examples
    --------
    >>> mt.searchsorted(mt.asarray([1.0, 2.0, 4.0]), mt.asarray([2.0, 3.0]), side="right")
    Array([2, 2])
    """
    x1 = as_array(x1)
    if x1.ndim != 1:
        raise ShapeError(f"[searchsorted] the table must have one dimension, got shape {x1.shape}")
    if side not in ("left", "right"):
        raise ArgumentError(f"[searchsorted] side must be 'left' or 'right', got {side!r}")
    if sorter is not None:
        x1 = take(x1, sorter, axis=0)
    return apply(SEARCHSORTED, (x1, x2), {"side": side})


# ----- by truth -------------------------------------------------------------------------------------------------------


def nonzero(x: Any, /) -> tuple[Array, ...]:
    """The indices of the elements that are not zero, one array a dimension, in C order.

    How many there are is known only when ``x`` is computed: inside ``mt.compile`` this raises.

    >>> mt.nonzero(mt.asarray([[0, 1], [2, 0]]))
    (Array([0, 1]), Array([1, 0]))
    """
    x = as_array(x)
    if x.ndim == 0:
        raise ShapeError("[nonzero] a 0-d array has no indices")
    host_sync.note("nonzero elements are counted")
    buf = x._buf
    if isinstance(buf, Deferred):
        buf = buf.concrete() if buf.memory is None else (x != 0)._buf
    with on_device_of(buf):
        return tuple(wrap(i) for i in (buf.nonzero() if type(buf) is np.ndarray else scans.true_places(buf != 0)))


@composite("count_nonzero")
def count_nonzero(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """How many elements are not zero.

    >>> mt.count_nonzero(mt.asarray([[0, 1], [2, 3]]), axis=0)
    Array([1, 2])
    """
    if (buf := large(x)) is not None:
        axes = shape_rules.normalize_axis("count_nonzero", axis, buf.ndim)
        zero = buf.dtype.type(0)
        return wrap(
            reduced(
                lambda b: np.add.reduce(b != zero, axis=axes, dtype=np.int64, keepdims=True),
                np.add,
                axes,
                keepdims,
                buf,
            )
        )
    return sum(astype(as_array(x) != 0, np.int64), axis=axis, keepdims=keepdims)
