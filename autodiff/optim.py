"""Optimizers (``mt.optim``): pure functions over trees.

``state = opt.init(params)``; ``params, state = opt.update(params, grads, state)``. State is an ordinary tree: sharded, saved and
resharded like anything else. All numbers that change from step to step are arrays in it, so that a step under ``mt.compile`` is
traced once. Where a gradient is None (an integer leaf, a frozen one) the parameter stays as it is.

Parameters of one or two bytes (bfloat16, float16, float8) are rounded views of *masters*: the state keeps them in float32 under
``"master"``, the update happens there, and what ``update`` returns is the masters rounded. Without them a step smaller than half
a unit in the last place would be lost. The update rules are PyTorch's.

>>> import meshtape as mt
>>> opt = mt.optim.sgd(0.25)
>>> params = {"w": mt.asarray([1.0, 2.0])}
>>> state = opt.init(params)
>>> for _ in range(2):
...     grads = mt.grad(lambda p: (p["w"] ** 2).sum())(params)
...     params, state = opt.update(params, grads, state)
>>> params["w"], int(state["step"])
(Array([0.25, 0.5 ], dtype=float64), 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import tree as trees
from ..arrays._array import Array
from ..arrays._dispatch import Deferred
from ..arrays.creation import asarray, ones_like, zeros_like
from ..arrays.elementwise import abs, clip, minimum, sqrt, square, where
from ..arrays.errors import DTypeError, ShapeError
from .schedules import Schedule, constant, cosine, exponential, linear, warmup_cosine, warmup_linear
from .tape import is_differentiable


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions over trees.

    Attributes
    ----------
    init
        ``init(params)`` gives the state before the first step.
    update
        ``update(params, grads, state)`` gives the parameters and the state after a step. ``grads`` has the structure of
        ``params``, with None where a leaf is to stay as it is.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


# ----- what the optimizers share --------------------------------------------------------------------------------------


def _is_none(x: Any) -> bool:
    return x is None


def _leaves(tree: Any) -> tuple[list[Any], trees.TreeDef]:
    """Leaves and structure; a None counts as a leaf."""
    return trees.flatten(tree, is_leaf=_is_none)


def _trains(x: Any) -> bool:
    """Whether a leaf is a number that has a gradient."""
    if isinstance(x, Array | np.ndarray | np.generic):
        return is_differentiable(x.dtype)
    return isinstance(x, float | complex)


def _is_small(x: Any) -> bool:
    return _trains(x) and hasattr(x, "dtype") and x.dtype.itemsize <= 2


def _wide(x: Any) -> Any:
    """In float32 where the dtype has one or two bytes."""
    return x.astype(np.float32) if _is_small(x) else x


def _counter(params: Any) -> Array:
    """Zero, int64 and 0-d, where the parameters are: on their device, or on every rank of their mesh."""
    arrays = [x for x in _leaves(params)[0] if isinstance(x, Array)]
    for x in arrays:
        if isinstance(x._buf, Deferred) and x._buf.host is not None:
            return x._buf.host.replicate(asarray(np.int64(0)))
    return asarray(np.int64(0), device=arrays[0].device if arrays else None)


def _cast(scalar: Any, like: Array) -> Any:
    return scalar.astype(like.dtype, copy=False) if isinstance(scalar, Array) else scalar


Rule = Callable[..., tuple[Any, ...]]


def _optimizer(name: str, slots: tuple[str, ...], prepare: Callable[[Array], Rule]) -> Optimizer:
    """An optimizer from the rule of one leaf.

    ``prepare(step)`` is called once an update with the number of steps done, and gives ``rule(p, g, *slots)``, which gives the
    new ``(p, *slots)``. Slots start at zero. All of them, ``p`` and ``g`` have one dtype, of four bytes or more.
    """

    def init(params: Any) -> Any:
        leaves, treedef = _leaves(params)

        def tree(fn: Callable[[Array], Any]) -> Any:
            return trees.unflatten(treedef, [fn(x) if _trains(x) else None for x in leaves])

        state: dict[str, Any] = {"step": _counter(params)}
        for slot in slots:
            state[slot] = tree(lambda x: zeros_like(_wide(asarray(x))))
        if any(map(_is_small, leaves)):
            state["master"] = tree(lambda x: asarray(_wide(x)) if _is_small(x) else None)
        return state

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        ps, treedef = _leaves(params)
        columns = [_column(name, what, t, treedef) for what, t in (("grads", grads), *((s, state[s]) for s in slots))]
        masters = _column(name, "master", state["master"], treedef) if "master" in state else [None] * len(ps)
        rule = prepare(state["step"])
        rows = []
        for i, (p, g, *held) in enumerate(zip(ps, *columns, strict=True)):
            full = _wide(p) if masters[i] is None else masters[i]
            if g is None or not _trains(p):
                rows.append((p, *held, masters[i]))
                continue
            p, full, g = asarray(p), asarray(full), asarray(g)
            if g.shape != p.shape:
                raise ShapeError(f"[{name}] a gradient of shape {g.shape} for a parameter of shape {p.shape}")
            full, *held = rule(full, g.astype(full.dtype, copy=False), *held)
            rows.append((full.astype(p.dtype, copy=False), *held, full if _is_small(p) else None))
        out = [trees.unflatten(treedef, column) for column in zip(*rows, strict=True)] or [params] * (len(slots) + 2)
        new = {"step": state["step"] + 1, **dict(zip(slots, out[1:-1], strict=True))}
        if "master" in state:
            new["master"] = out[-1]
        return out[0], new

    return Optimizer(init, update)


def _column(name: str, what: str, tree: Any, treedef: trees.TreeDef) -> list[Any]:
    """Leaves of a tree that must look like the parameters."""
    leaves, found = _leaves(tree)
    if found != treedef:
        raise ValueError(f"[{name}] {what} has the structure {found}, the parameters {treedef}")
    return leaves


def _rate(lr: Schedule, step: Array) -> Any:
    return lr(step) if callable(lr) else lr


def _check(name: str, most: float = math.inf, **numbers: float) -> None:
    for what, value in numbers.items():
        if not 0 <= value <= most:
            raise ValueError(f"[{name}] {what} must be from 0 to {most}, got {value}")


def masters(params: Any, state: Any) -> Any:
    """The parameters as the optimizer knows them: in float32 where they are of one or two bytes.

    Average (:func:`ema`) and save these; the parameters themselves are their rounded copies.

    >>> import meshtape as mt
    >>> w = mt.ones(2, dtype=mt.bfloat16)
    >>> mt.optim.masters(w, mt.optim.sgd(0.1).init(w))
    Array([1., 1.], dtype=float32)
    """
    if "master" not in state:
        return params
    ps, treedef = _leaves(params)
    held = _column("masters", "master", state["master"], treedef)
    return trees.unflatten(treedef, [p if m is None else m for p, m in zip(ps, held, strict=True)])


# ----- optimizers -----------------------------------------------------------------------------------------------------


def sgd(lr: Schedule, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent: ``v = momentum * v + g``, then ``p -= lr * v``.

    Parameters
    ----------
    lr
        Learning rate; a number or a schedule.
    momentum
        Share of the former velocity that stays.
    nesterov
        Step along ``g + momentum * v`` instead of ``v`` (Nesterov, 1983).
    weight_decay
        ``weight_decay * p`` is added to the gradient (L2 regularisation).

    Examples
    --------
    >>> import meshtape as mt
    >>> opt = mt.optim.sgd(0.5)
    >>> params = {"w": mt.asarray([1.0, 2.0])}
    >>> params, state = opt.update(params, {"w": mt.asarray([1.0, 1.0])}, opt.init(params))
    >>> params["w"]
    Array([0.5, 1.5], dtype=float64)
    """
    _check("sgd", momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("[sgd] nesterov needs momentum > 0")

    def prepare(step: Array) -> Rule:
        rate = _rate(lr, step)

        def rule(p: Array, g: Array, *velocity: Array) -> tuple[Array, ...]:
            if weight_decay:
                g = g + weight_decay * p
            if not velocity:
                return (p - _cast(rate, p) * g,)
            v = momentum * velocity[0] + g
            return p - _cast(rate, p) * (g + momentum * v if nesterov else v), v

        return rule

    return _optimizer("sgd", ("momentum",) if momentum else (), prepare)


def momentum(lr: Schedule, beta: float = 0.9, *, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """:func:`sgd` with momentum ``beta``.

    >>> import meshtape as mt
    >>> opt = mt.optim.momentum(1.0, 0.5)
    >>> p, state = mt.asarray(0.0), opt.init(mt.asarray(0.0))
    >>> for _ in range(2):
    ...     p, state = opt.update(p, mt.asarray(1.0), state)
    >>> float(p)
    -2.5
    """
    return sgd(lr, momentum=beta, nesterov=nesterov, weight_decay=weight_decay)


def adam(
    lr: Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam (Kingma and Ba, 2015): steps of ``lr`` times the mean of the gradients over the root of the mean of their squares.

    Parameters
    ----------
    lr
        Learning rate; a number or a schedule.
    b1, b2
        What stays of the two running means at each step.
    eps
        Added to the root.
    weight_decay
        ``weight_decay * p`` is added to the gradient; see :func:`adamw` for decay that does not pass through the means.

    Examples
    --------
    >>> import meshtape as mt
    >>> opt = mt.optim.adam(0.1)
    >>> p = mt.asarray([1.0, -1.0])
    >>> p, state = opt.update(p, mt.asarray([3.0, -0.01]), opt.init(p))
    >>> mt.round(p * 1e6) / 1e6
    Array([ 0.9, -0.9], dtype=float64)
    """
    return _adam("adam", lr, b1, b2, eps, weight_decay, decoupled=False)


def adamw(
    lr: Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """:func:`adam` with decoupled weight decay (Loshchilov and Hutter, 2019): ``p -= lr * weight_decay * p`` at each step.

    >>> import meshtape as mt
    >>> opt = mt.optim.adamw(0.1, weight_decay=0.5)
    >>> p = mt.asarray(2.0)
    >>> p, state = opt.update(p, mt.asarray(0.0), opt.init(p))
    >>> float(p)
    1.9
    """
    return _adam("adamw", lr, b1, b2, eps, weight_decay, decoupled=True)


def _adam(
    name: str, lr: Schedule, b1: float, b2: float, eps: float, weight_decay: float, *, decoupled: bool
) -> Optimizer:
    _check(name, eps=eps, weight_decay=weight_decay)
    _check(name, math.nextafter(1.0, 0.0), b1=b1, b2=b2)

    def prepare(step: Array) -> Rule:
        rate = _rate(lr, step)
        t = (step + 1).astype(np.float64)
        # Both means start at zero; these undo the bias towards it.
        size, root = rate / (1.0 - b1**t), sqrt(1.0 - b2**t)

        def rule(p: Array, g: Array, m: Array, v: Array) -> tuple[Array, ...]:
            if p.dtype.kind == "c":
                raise DTypeError(f"[{name}] takes real parameters, got {p.dtype.name}: pass real and imaginary parts")
            if weight_decay and not decoupled:
                g = g + weight_decay * p
            if weight_decay and decoupled:
                p = p * (1.0 - _cast(rate * weight_decay, p))
            m = b1 * m + (1.0 - b1) * g
            v = b2 * v + (1.0 - b2) * square(g)
            return p - _cast(size, p) * (m / (sqrt(v) / _cast(root, p) + eps)), m, v

        return rule

    return _optimizer(name, ("mean", "square"), prepare)


def chain(*stages: Any) -> Optimizer:
    """The last stage, an optimizer, fed with gradients that went through the stages before it, functions of the gradients.

    >>> import meshtape as mt
    >>> opt = mt.optim.chain(lambda g: mt.optim.clip_by_value(g, 1.0), mt.optim.sgd(0.5))
    >>> p = mt.asarray(0.0)
    >>> p, state = opt.update(p, mt.asarray(8.0), opt.init(p))
    >>> float(p)
    -0.5
    """
    *functions, last = stages
    if not isinstance(last, Optimizer) or not all(map(callable, functions)):
        raise TypeError("[chain] takes functions of the gradients and, last, an optimizer")

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        for fn in functions:
            grads = fn(grads)
        return last.update(params, grads, state)

    return Optimizer(last.init, update)


# ----- clipping -------------------------------------------------------------------------------------------------------


def global_norm(grads: Any) -> Array:
    """The common 2-norm of a tree of gradients. Squares of low-precision gradients are summed in float32.

    >>> import meshtape as mt
    >>> float(mt.optim.global_norm([mt.asarray([3.0]), mt.asarray([4.0])]))
    5.0
    """
    from ..arrays.reductions import sum

    total: Any = 0.0
    for g in trees.flatten(grads)[0]:
        total = total + sum(square(abs(_wide(g))))
    return sqrt(asarray(total))


def clip_by_global_norm(grads: Any, limit: float, *, norm: Array | None = None) -> tuple[Any, Array]:
    """Gradients scaled down so that their common 2-norm is at most ``limit``; and the norm before.

    ``norm`` is that norm where it is known, or where ``grads`` are only a part of what it is of (a stage of a pipeline); by default it is
    their :func:`global_norm`. One that is not finite makes the result NaN: nothing is hidden.

    >>> import meshtape as mt
    >>> clipped, norm = mt.optim.clip_by_global_norm([mt.asarray([3.0]), mt.asarray([4.0])], 1.0)
    >>> float(norm), [round(float(g[0]), 5) for g in clipped]
    (5.0, [0.6, 0.8])
    """
    norm = global_norm(grads) if norm is None else norm
    scale = minimum(1.0, limit / (norm + 1e-6))  # PyTorch's summand: no gradients, no division by zero
    return trees.tree_map(lambda g: (_wide(g) * scale.astype(_wide(g).dtype, copy=False)).astype(g.dtype), grads), norm


def clip_by_value(grads: Any, limit: float) -> Any:
    """Gradients with every element between ``-limit`` and ``limit``.

    >>> import meshtape as mt
    >>> mt.optim.clip_by_value(mt.asarray([-3.0, 0.5]), 1.0)
    Array([-1. ,  0.5], dtype=float64)
    """
    if not limit >= 0:
        raise ValueError(f"[clip_by_value] limit must not be negative, got {limit}")
    return trees.tree_map(lambda g: clip(g, -limit, limit), grads)


# ----- averages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Average:
    """Three pure functions: ``init(params)``, ``update(params, state, loss=None)`` and ``value(state, like)``."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]
    value: Callable[[Any, Any], Any]


def ema(decay: float, *, interval: int = 1, threshold: float | None = None) -> Average:
    """Exponential moving average of parameters: ``mean = decay * mean + (1 - decay) * params``.

    It starts as a copy of the parameters, and so needs no correction of a bias towards zero. Averages of parameters of one or
    two bytes are kept in float32.

    Parameters
    ----------
    decay
        From 0 (no memory) to 1.
    interval
        Every how many calls of ``update`` the average moves.
    threshold
        It moves only where the ``loss`` passed to ``update`` is smaller; a loss that is not finite never moves it. The state
        counts such refusals under ``"skipped"``.

    Returns
    -------
    Average
        ``state = avg.init(params)``, ``state = avg.update(params, state, loss)``, ``averaged = avg.value(state, params)``, which
        has the dtypes of ``params``.

    Examples
    --------
    >>> import meshtape as mt
    >>> avg = mt.optim.ema(0.9)
    >>> state = avg.init(mt.asarray(1.0))
    >>> for x in (2.0, 3.0):
    ...     state = avg.update(mt.asarray(x), state)
    >>> round(float(state["mean"]), 9)
    1.29
    """
    _check("ema", 1.0, decay=decay)
    if interval < 1:
        raise ValueError(f"[ema] interval must be at least 1, got {interval}")

    def init(params: Any) -> Any:
        zero = _counter(params)
        mean = trees.tree_map(lambda x: asarray(_wide(x), copy=True) if isinstance(x, Array) else x, params)
        return {"step": zero, "skipped": zero, "mean": mean}

    def update(params: Any, state: Any, loss: Any = None) -> Any:
        if loss is None and threshold is not None:
            raise ValueError("[ema] with a threshold, update needs the loss")
        step = state["step"] + 1
        due = step % interval == 0
        good = ones_like(due) if loss is None else asarray(loss) < (math.inf if threshold is None else threshold)
        moves = due & good

        def moved(mean: Any, x: Any) -> Any:
            if not isinstance(x, Array) or not is_differentiable(x.dtype):
                return x
            # Selected, not multiplied by 0 or 1: what a bad step made of the parameters must not leak in.
            return where(moves, decay * mean + (1.0 - decay) * _wide(x).astype(mean.dtype, copy=False), mean)

        skipped = state["skipped"] + (due & ~good).astype(np.int64)
        return {"step": step, "skipped": skipped, "mean": trees.tree_map(moved, state["mean"], params)}

    def value(state: Any, like: Any) -> Any:
        return trees.tree_map(
            lambda mean, x: mean.astype(x.dtype, copy=False) if isinstance(x, Array) else mean, state["mean"], like
        )

    return Average(init, update, value)


__all__ = [
    "Average",
    "Optimizer",
    "Schedule",
    "adam",
    "adamw",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "ema",
    "exponential",
    "global_norm",
    "linear",
    "masters",
    "momentum",
    "sgd",
    "warmup_cosine",
    "warmup_linear",
]
