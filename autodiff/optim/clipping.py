"""Gradient clipping (part of ``mt.optim``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import DTypeError
from ...arrays.ops.creation import as_arrays, asarray
from ...arrays.ops.elementwise import abs, add, clip, minimum, sqrt, square
from ...arrays.ops.manipulation import stack
from ...arrays.reductions.reductions import sum
from ..tape.tape import is_differentiable
from .parameters import batched, check, wide


def global_norm(grads: Any) -> Array:
    """The common 2-norm of a tree of gradients. Squares of low-precision gradients are summed in float32.

    >>> float(mt.optim.global_norm([mt.asarray([3.0]), mt.asarray([4.0])]))
    5.0
    """
    return _global_norm(grads)


@batched
def _global_norm(grads: Any) -> Array:
    # (A dot product would write no squares to memory. It would make a sparse gradient dense, and of millions of numbers
    # it loses digits.)
    leaves = map(wide, as_arrays(*trees.flatten(grads)[0]))
    sums = [sum(square(abs(g) if g.dtype.kind == "c" else g)) for g in leaves]
    if not sums:
        return asarray(0.0)
    if all(s.sharding is None and s.device.kind == "cuda" for s in sums):
        return sqrt(functools.reduce(add, sums))  # of which a compiled program makes one kernel
    # As one array: what is pending on a mesh is joined in one round, where each addition would ask for its own.
    return sqrt(sum(stack(sums)))


def clip_scale(norm: Array, limit: float) -> Array:
    """The factor that scales gradients of this norm to a norm of at most ``limit``."""
    # PyTorch's summand: no gradients, no division by zero. By an infinite norm all would be zero; 0 * inf is NaN.
    return minimum(1.0, limit / (norm + 1e-6)) + 0.0 * norm


def scaled(g: Array, scale: Array) -> Array:
    """A gradient times a number, computed in float32 at least."""
    g = asarray(g)
    if not is_differentiable(g.dtype):
        raise DTypeError(f"[clip_by_global_norm] gradients are floats, got {g.dtype.name}")
    g, dtype = wide(g), g.dtype
    return (g * scale.astype(g.dtype, copy=False)).astype(dtype, copy=False)


def clip_by_global_norm(grads: Any, limit: float, *, norm: Array | None = None) -> tuple[Any, Array]:
    """Gradients scaled down so that their common 2-norm is at most ``limit``; and the norm before.

    Pass ``norm`` where it is known, or where ``grads`` are only a part of all gradients (a stage of a pipeline); the
    default is their :func:`global_norm`. A norm that is not finite makes the result NaN: nothing is hidden.

    >>> clipped, norm = mt.optim.clip_by_global_norm([mt.asarray([3.0]), mt.asarray([4.0])], 1.0)
    >>> float(norm), [round(float(g[0]), 5) for g in clipped]
    (5.0, [0.6, 0.8])
    """
    check("clip_by_global_norm", limit=limit)
    fixed, given = (float(limit), None) if type(limit) in (int, float) else (None, limit)
    norm, scale = _norm_and_scale(fixed)(grads, norm, given)
    return _all_scaled(grads, scale), norm


@functools.lru_cache(maxsize=16)
def _norm_and_scale(fixed: float | None) -> Callable[..., tuple[Array, Array]]:
    """(As an argument, a number would be an array of the compiled program, and a launch.)"""

    @batched
    def run(grads: Any, norm: Array | None, limit: Any) -> tuple[Array, Array]:
        norm = _global_norm(grads) if norm is None else norm
        return norm, clip_scale(norm, limit if fixed is None else fixed)

    return run


@batched
def _all_scaled(grads: Any, scale: Array) -> Any:
    return trees.tree_map(lambda g: scaled(g, scale), grads)


def clip_by_value(grads: Any, limit: float) -> Any:
    """Gradients with every element between ``-limit`` and ``limit``.

    >>> mt.optim.clip_by_value(mt.asarray([-3.0, 0.5]), 1.0)
    Array([-1. ,  0.5], dtype=float64)
    """
    check("clip_by_value", limit=limit)
    return trees.tree_map(lambda g: clip(g, -limit, limit), grads)
