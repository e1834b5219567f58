"""Optimizers (``mt.optim``): pure functions over trees.

``state = opt.init(params)``; ``params, state = opt.update(params, grads, state)``. State is an ordinary tree: sharded, saved and
resharded like anything else. Where a gradient is None (an integer leaf) the parameter stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays._dispatch import Deferred
from ..arrays.creation import asarray, zeros_like
from ..arrays.elementwise import minimum, sqrt, square

Schedule = float | Callable[[Array], Array]


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions; see the module."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


def _step_counter(params: Any) -> Array:
    """Zero, int64 and 0-d, on the mesh of the parameters where they are split."""
    zero = asarray(np.int64(0))
    for x in trees.flatten(params)[0]:
        if isinstance(x, Array) and isinstance(x._buf, Deferred) and x._buf.host is not None:
            return x._buf.host.replicate(zero)
    return zero


def _rate(lr: Schedule, step: Array) -> Any:
    return lr(step) if callable(lr) else lr


def _is_none(x: Any) -> bool:
    return x is None


def _split(params: Any, grads: Any, *slots: Any) -> tuple[list[list[Any]], trees.TreeDef]:
    """Leaves of all trees side by side; a None among the gradients counts as a leaf."""
    leaves, treedef = trees.flatten(params)
    columns = [leaves]
    for name, tree in (("grads", grads), *(("state", s) for s in slots)):
        found = trees.flatten(tree, is_leaf=_is_none if name == "grads" else None)[0]
        if len(found) != len(leaves):
            raise ValueError(f"[optim] {name} has {len(found)} leaves, the parameters {len(leaves)}")
        columns.append(found)
    return columns, treedef


def _cast(scalar: Any, like: Array) -> Any:
    return scalar.astype(like.dtype, copy=False) if isinstance(scalar, Array) else scalar


def sgd(lr: Schedule, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, with momentum as in PyTorch: ``v = momentum * v + g``; ``p -= lr * v``.

    >>> import meshtape as mt
    >>> opt = mt.optim.sgd(0.5)
    >>> params = {"w": mt.asarray([1.0, 2.0])}
    >>> params, state = opt.update(params, {"w": mt.asarray([1.0, 1.0])}, opt.init(params))
    >>> params["w"]
    Array([0.5, 1.5], dtype=float64)
    """

    def init(params: Any) -> Any:
        state = {"step": _step_counter(params)}
        return {**state, "momentum": trees.tree_map(zeros_like, params)} if momentum else state

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        rate = _rate(lr, state["step"])
        slots = (state["momentum"],) if momentum else ()
        (ps, gs, *rest), treedef = _split(params, grads, *slots)
        vs = rest[0] if rest else [None] * len(ps)
        new_p, new_v = [], []
        for p, g, v in zip(ps, gs, vs, strict=True):
            if g is None:
                new_p.append(p)
                new_v.append(v)
                continue
            if weight_decay:
                g = g + weight_decay * p
            if momentum:
                v = momentum * v + g
                g = g + momentum * v if nesterov else v
            new_p.append(p - _cast(rate, p) * g)
            new_v.append(v)
        out = {"step": state["step"] + 1}
        if momentum:
            out["momentum"] = trees.unflatten(treedef, new_v)
        return trees.unflatten(treedef, new_p), out

    return Optimizer(init, update)


def adamw(
    lr: Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """Adam with decoupled weight decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), as PyTorch computes it.

    ``p -= lr * weight_decay * p``, then ``p -= lr * mhat / (sqrt(vhat) + eps)``.
    """

    def init(params: Any) -> Any:
        return {
            "step": _step_counter(params),
            "mean": trees.tree_map(zeros_like, params),
            "square": trees.tree_map(zeros_like, params),
        }

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        step = state["step"] + 1
        rate = _rate(lr, state["step"])
        (ps, gs, ms, vs), treedef = _split(params, grads, state["mean"], state["square"])
        t = step.astype(np.float64)
        c1, c2 = 1.0 - b1**t, sqrt(1.0 - b2**t)
        new_p, new_m, new_v = [], [], []
        for p, g, m, v in zip(ps, gs, ms, vs, strict=True):
            if g is not None:
                m = b1 * m + (1.0 - b1) * g
                v = b2 * v + (1.0 - b2) * square(g)
                size = _cast(rate / c1, p)
                p = p * (1.0 - _cast(rate * weight_decay, p)) - size * (m / (sqrt(v) / _cast(c2, p) + eps))
            new_p.append(p)
            new_m.append(m)
            new_v.append(v)
        rebuild = trees.unflatten
        return rebuild(treedef, new_p), {
            "step": step,
            "mean": rebuild(treedef, new_m),
            "square": rebuild(treedef, new_v),
        }

    return Optimizer(init, update)


def clip_by_global_norm(grads: Any, limit: float) -> tuple[Any, Array]:
    """Gradients scaled down so that their common 2-norm is at most ``limit``; and the norm before.

    >>> import meshtape as mt
    >>> clipped, norm = mt.optim.clip_by_global_norm([mt.asarray([3.0]), mt.asarray([4.0])], 1.0)
    >>> float(norm), [round(float(g[0]), 6) for g in clipped]
    (5.0, [0.6, 0.8])
    """
    from ..arrays.reductions import sum

    total: Any = 0.0
    for g in trees.flatten(grads)[0]:
        total = total + sum(square(g))
    norm = sqrt(asarray(total))
    scale = minimum(1.0, limit / (norm + 1e-12))
    return trees.tree_map(lambda g: g * _cast(scale, g), grads), norm
