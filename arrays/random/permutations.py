"""Orders and choices. Each rank makes the whole order, and takes its part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dispatch import Deferred
from ..core.errors import ArgumentError, ShapeError
from ..core.op import Op, composite, is_cuda_elsewhere
from ..core.shape_rules import as_shape
from ..ops.creation import asarray
from ..ops.param_kinds import DRAW, FLAG
from . import bit_transforms as recipes
from .discrete import integers
from .draw import RANDOM_BITS, box_of, drawn, infer, whole
from .philox import Ints, draw


def _permutation_impl(xp: Any, key: Any, shape: Ints, offset: Ints, global_shape: Ints, dtype: np.dtype) -> Any:
    # Every rank sorts all of the keys: no element is known before all are.
    order = draw(xp, key, recipes.bits(recipes.U64), recipes.U64, global_shape, (0,), global_shape)
    return box_of(xp.argsort(order, kind="stable"), shape, offset, dtype)


def _choice_impl(
    xp: Any, key: Any, p: Any, shape: Ints, offset: Ints, global_shape: Ints, dtype: np.dtype, replace: bool
) -> Any:
    weights = p.astype(np.float64)
    if xp is np:  # of a GPU, looking would wait for it
        _check_weights(weights, math.prod(global_shape), replace)
    if replace:
        edges = xp.cumsum(weights)
        u = draw(xp, key, recipes.uniform(recipes.F64, 0.0, 1.0), recipes.F64, shape, offset, global_shape) * edges[-1]
        found = xp.searchsorted(edges, u.reshape(-1), side="right").reshape(shape)
        # u * sum may round up to the sum: the last element that has a weight is meant.
        return xp.minimum(found, xp.searchsorted(edges, edges[-1:], side="left")[0]).astype(dtype, copy=False)
    # The largest of log p + Gumbel noise are a sample without replacement, in order (Yellott, 1977; Efraimidis, 2006).
    noise = draw(xp, key, recipes.gumbel(recipes.F64), recipes.F64, p.shape, (0,), p.shape)
    score = xp.where(weights > 0, xp.log(xp.where(weights > 0, weights, 1.0)) + noise, -np.inf)
    chosen = xp.argsort(-score, kind="stable")[: math.prod(global_shape)].reshape(global_shape)
    return box_of(chosen, shape, offset, dtype)


def _check_weights(weights: np.ndarray, count: int, replace: bool) -> None:
    some = int(np.count_nonzero(weights))
    if not np.all((weights >= 0) & np.isfinite(weights)) or (count and not some):
        raise ArgumentError("[choice] p must hold finite weights that are not negative and not all 0")
    if not replace and some < count:
        raise ArgumentError(f"[choice] cannot choose {count} without replacement: only {some} elements have a weight")


PERMUTATION = Op("random_permutation", ("key",), _permutation_impl, infer, nondifferentiable=RANDOM_BITS, params=DRAW)
CHOICE = Op(
    "random_choice", ("key", "p"), _choice_impl, infer, nondifferentiable=RANDOM_BITS, params={**DRAW, "replace": FLAG}
)


@composite("permutation")
def permutation(key: Any, x: Any, axis: int = 0) -> Array:
    """The numbers ``0 … x - 1`` in random order, or the slices of an array along ``axis`` in random order.

    By sorting random 64-bit words; each device sorts all of them, also where the result is sharded. Orders are equally
    likely up to the chance of two equal words, ``x**2 / 2**65``.

    >>> order = mt.random.permutation(mt.random.key(0), 5)
    >>> sorted(order.tolist())
    [0, 1, 2, 3, 4]
    >>> mt.random.permutation(mt.random.key(0), mt.ones((4, 2))).shape
    (4, 2)
    """
    values, axis, n = _elements("permutation", x, axis)
    if n < 0:
        raise ArgumentError(f"[permutation] the number of elements must not be negative, got {n}")
    return _taken(values, axis, drawn(PERMUTATION, key, n, recipes.I64))


@composite("choice")
def choice(
    key: Any, a: Any, shape: int | Sequence[int] = (), *, replace: bool = True, p: Any = None, axis: int = 0
) -> Array:
    """Elements chosen at random.

    Parameters
    ----------
    key
        A key.
    a
        A number ``n``, to choose from ``0 … n - 1``, or an array, to choose slices of along ``axis``.
    shape
        Shape of the choice.
    replace
        Whether an element may be chosen again.
    p
        Weights of the elements (one-dimensional, finite, not negative, not all 0); equal if None. They need not sum to
        one. An array on a GPU is not looked at, as the host would wait.

    Examples
    --------
    >>> mt.random.choice(mt.random.key(0), mt.asarray([10, 20, 30]), (4,), p=[0.0, 1.0, 0.0])
    Array([20, 20, 20, 20])
    """
    full = as_shape("choice", shape)
    values, axis, n = _elements("choice", a, axis)
    count = math.prod(full)
    if n < 0 or (n == 0 and count):
        raise ArgumentError(f"[choice] cannot choose {count} of {n} elements")
    if not replace and count > n:
        raise ArgumentError(f"[choice] cannot choose {count} of {n} elements without replacement")
    if p is not None:
        weights = asarray(p)
        if weights.shape != (n,):
            raise ShapeError(f"[choice] p must have shape {(n,)}, one weight for each element, got {weights.shape}")
        on_a_gpu = not isinstance(weights._buf, np.ndarray | Deferred)  # where the op itself does not look
        if on_a_gpu and not isinstance(p, Array) and not hasattr(p, "__cuda_array_interface__"):
            _check_weights(np.asarray(p, np.float64), count, bool(replace))
        where = drawn(CHOICE, key, full, recipes.I64, weights, replace=bool(replace))
    elif replace:
        where = integers(key, full, 0, max(n, 1))
    else:
        where = permutation(key, n)[:count].reshape(full)
    return _taken(values, axis, where)


def _elements(name: str, x: Any, axis: int) -> tuple[Array | None, int, int]:
    """The array whose slices along the axis are meant (None for a number of elements), the axis, and their number."""
    x = asarray(x) if is_cuda_elsewhere(x) else x
    if not isinstance(x, Array | np.ndarray) or not x.ndim:
        return None, axis, whole(name, "takes a number of elements or an array", x)
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"[{name}] an array of shape {x.shape} has no axis {axis}")
    return asarray(x), axis % x.ndim, x.shape[axis]


def _taken(values: Array | None, axis: int, places: Array) -> Array:
    return places if values is None else values[(*(slice(None),) * axis, places)]
