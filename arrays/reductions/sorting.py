"""Sorting. NaN goes last in ascending order and first in descending order, as if it were the largest number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import apply, as_array
from ..core.errors import ShapeError
from ..core.op import Op, ShapeDtype, composite
from ..ops.manipulation import reshape
from ..ops.param_kinds import AXIS, COUNT, FLAG
from .searching import take_along_axis


def _ordered(xp: Any, x: Any) -> Any:
    """Float8 and bfloat16 compare exactly as the float32 they widen to, and NumPy has no fast sort for them."""
    return x.astype(np.float32) if x.dtype.num >= 256 else x


def _has_negative_zeros(xp: Any, x: Any) -> bool:
    """Whether equal elements can differ: the signs of zeros are all that a stable sort of values shows."""
    if x.dtype.kind in "biu":
        return False
    zeros = x[x == 0]
    parts = (zeros.real, zeros.imag) if x.dtype.kind == "c" else (zeros,)
    return any(bool(xp.signbit(p).any()) for p in parts)


def _restore_zeros(xp: Any, x: Any, ordered: Any) -> None:
    """Zeros of both signs, which an unstable sort may mix, put back in their order. They stand together: no pass over
    all."""
    zero = xp.asarray(0, ordered.dtype)  # of a number in another dtype a copy of the whole table would be made
    low, high = int(ordered.searchsorted(zero)), int(ordered.searchsorted(zero, "right"))
    zeros = ordered[low:high]
    if zeros.size > 1 and bool(xp.signbit(zeros).any()):
        ordered[low:high] = x[x == 0]


def _sort(xp: Any, x: Any, axis: int, descending: bool, stable: bool) -> Any:
    w = _ordered(xp, x)
    # A stable descending sort is an ascending one of the reversed array, reversed: equals come back in their order.
    w = xp.flip(w, axis) if descending else w
    if xp is not np:
        out = xp.sort(w, axis=axis)  # CuPy's sorts are stable, and take no word for it
    elif stable and w.ndim == 1 and w.dtype.kind == "f":
        out = w.copy()
        out.sort()
        _restore_zeros(xp, w, out)
    else:
        out = xp.sort(w, axis=axis, kind="stable" if stable and _has_negative_zeros(xp, w) else None)
    return (xp.flip(out, axis) if descending else out).astype(x.dtype, copy=False)


_PLACE = 0xFFFFFFFF


def _keys(x: np.ndarray, descending: bool) -> np.ndarray | None:
    """Integers in the order of the elements along the last dimension, whose lower halves are the places: equal elements
    stay in order. None where neither int32 nor float32 hold the elements.

    NumPy sorts integers by vectors; its stable sort of floats takes five to ten times as long.
    """
    if not any(np.can_cast(x.dtype, d) for d in (np.int32, np.float32)) or x.shape[-1] > _PLACE:
        return None
    if x.dtype.kind == "f":
        nan = x != x
        x = np.add(x, 0, dtype=np.float32).view(np.int32)  # (zeros have one sign)
        x ^= (x >> 31) & 0x7FFFFFFF
        x[nan] = 0x7FFFFFFF
    keys = np.invert(x, dtype=np.int64) if descending else x.astype(np.int64)
    keys <<= 32
    keys |= np.arange(x.shape[-1])
    return keys


def _stable_order(x: np.ndarray) -> np.ndarray:
    """The stable ``argsort`` along the last dimension: an unstable one by vectors, and then the places of equal
    elements in order, in a half to an eighth of the time."""
    if x.dtype.kind not in "fiu":
        return np.argsort(x, axis=-1, kind="stable")
    order = np.argsort(x, axis=-1)
    found = np.take_along_axis(x, order, axis=-1)
    first = np.ones(x.shape, bool)
    last, these = found[..., :-1], found[..., 1:]
    first[..., 1:] = (last != these) & ((last == last) | (these == these))
    tied = ~first
    tied[..., :-1] |= tied[..., 1:]
    places = order[tied] + np.cumsum(first)[tied.reshape(-1)] * x.shape[-1]
    places.sort()
    order[tied] = places % x.shape[-1]
    return order


_FEW = 2048
"""Elements below which NumPy's stable sort takes less time than the calls that replace it."""


def _argsort(xp: Any, x: Any, axis: int, descending: bool, stable: bool) -> Any:
    w = _ordered(xp, x)
    if stable and xp is np and x.size > _FEW:
        w = np.moveaxis(w, axis, -1)
        keys = _keys(w, descending)
        if keys is not None:
            keys.sort(axis=-1)
            keys &= _PLACE
            return np.moveaxis(keys, -1, axis)
        w = w[..., ::-1] if descending else w
        order = np.moveaxis(_stable_order(w), -1, axis)
    else:
        kind = "stable" if stable and xp is np else None  # CuPy's sorts are stable, and take no word for it
        order = xp.argsort(xp.flip(w, axis) if descending else w, axis=axis, kind=kind)
    return x.shape[axis] - 1 - xp.flip(order, axis) if descending else order


def _topk(xp: Any, x: Any, k: int, axis: int, largest: bool) -> Any:
    if xp is np and 0 < 4 * k < x.shape[axis] and x.size > _FEW:
        keys = _keys(_ordered(np, np.moveaxis(x, axis, -1)), largest)
        if keys is not None:
            keys.partition(k, axis=-1)
            return np.moveaxis(np.sort(keys[..., :k], axis=-1) & _PLACE, -1, axis)
    order = _argsort(xp, x, axis, largest, True)
    return order[(*(slice(None),) * axis, slice(None, k))]


def _infer_topk(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    shape, axis = args[0].shape, params["axis"]
    return ShapeDtype((*shape[:axis], params["k"], *shape[axis + 1 :]), np.dtype(np.int64))


_ORDER = {"axis": AXIS, "descending": FLAG, "stable": FLAG}
SORT = Op("sort", ("x",), _sort, shape_rules.same, params=_ORDER)
ARGSORT = Op("argsort", ("x",), _argsort, shape_rules.places, nondifferentiable="integer result", params=_ORDER)

TOPK = Op(
    "topk",
    ("x",),
    _topk,
    _infer_topk,
    nondifferentiable="integer result",
    params={"k": COUNT, "axis": AXIS, "largest": FLAG},
)
"""The places of the largest or smallest elements."""


def _params(name: str, x: Array, axis: int, descending: bool, stable: bool) -> dict[str, Any]:
    if x.ndim == 0:
        raise ShapeError(f"[{name}] a 0-d array has no order")
    axis = shape_rules.one_axis(name, axis, x.ndim)
    return {"axis": axis, "descending": bool(descending), "stable": bool(stable)}


def flattened(x: Any, axis: int | None) -> tuple[Array, int]:
    """The array and the axis; flattened, as NumPy does, where there is none."""
    x = as_array(x)
    return (x, axis) if axis is not None else (reshape(x, (-1,)), 0)


def sort(x: Any, /, axis: int | None = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """The elements in order along an axis; flattened where it is None.

    >>> mt.sort(mt.asarray([2, 3, 1]), descending=True)
    Array([3, 2, 1])
    """
    x, axis = flattened(x, axis)
    return apply(SORT, (x,), _params("sort", x, axis, descending, stable))


def argsort(x: Any, /, axis: int | None = -1, *, descending: bool = False, stable: bool = True) -> Array:
    """The indices that sort ``x`` along an axis; with ``stable``, equal elements keep their order in both directions.

    >>> mt.argsort(mt.asarray([2, 1, 2]), descending=True)
    Array([0, 2, 1])
    """
    x, axis = flattened(x, axis)
    return apply(ARGSORT, (x,), _params("argsort", x, axis, descending, stable))


class TopK(NamedTuple):
    """The ``k`` largest (or smallest) elements in order, and where they are."""

    values: Array
    indices: Array


@composite("topk")
def topk(x: Any, k: int, /, axis: int = -1, *, largest: bool = True) -> TopK:
    """The ``k`` largest elements along an axis, largest first (or smallest, smallest first); of equals the first ones.

    >>> mt.topk(mt.asarray([3.0, 1.0, 5.0]), 2)
    TopK(values=Array([5., 3.], dtype=float64), indices=Array([2, 0]))
    """
    x = as_array(x)
    axis = shape_rules.one_axis("topk", axis, x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ShapeError(f"[topk] cannot take {k} of the {x.shape[axis]} elements along axis {axis} of shape {x.shape}")
    indices = apply(TOPK, (x,), {"k": int(k), "axis": axis, "largest": bool(largest)})
    return TopK(take_along_axis(x, indices, axis=axis), indices)
