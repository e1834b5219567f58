"""Optimizers (``mt.optim``): pure functions over trees.

``state = opt.init(params)``; ``params, state = opt.update(params, grads, state)``. State is an ordinary tree: sharded,
saved and resharded like anything else. All numbers that change from step to step are arrays in it, so that a step under
``mt.compile`` is traced once. Where a gradient is None (an integer leaf, a frozen one) the parameter stays as it is.

Parameters of one or two bytes (bfloat16, float16, float8) are rounded views of *masters*: the state keeps them in
float32 under ``"master"``, the update happens there, and what ``update`` returns is the masters rounded. Without them a
step smaller than half a unit in the last place would be lost. The update rules are PyTorch's.

A gradient that is kept sparse (:func:`meshtape.sparse_gradient`) gives the very numbers that a dense one gives, in
every optimizer, without being made dense unless weight decay is added to it; only :func:`lazy_adam` leaves alone what
was not read.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply
from ...arrays.core.errors import ArgumentError, DTypeError, TreeError
from ...arrays.indexing.lazy_adam import LAZY_ADAM, adam_step
from ...arrays.ops import elementwise
from ...arrays.ops.creation import as_arrays, asarray, zeros_like
from ...arrays.ops.elementwise import sqrt
from .averages import Average, ema
from .clipping import clip_by_global_norm, clip_by_value, global_norm
from .learning_rates import Schedule, constant, cosine, exponential, linear, warmup_cosine, warmup_linear
from .parameters import Recipe, batched, check, check_shape, counter, is_small, leaves_of, recorded, trains, wide


@dataclass(frozen=True)
class Optimizer(Recipe):
    """A pair of pure functions over trees. One of a function of ``mt.optim`` can be pickled, with a schedule of
    ``mt.optim``, too.

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


def _cast(scalar: Any, like: Array) -> Any:
    return scalar.astype(like.dtype, copy=False) if isinstance(scalar, Array) else scalar


Rule = Callable[..., tuple[Any, ...]]


def _optimizer(name: str, slots: tuple[str, ...], lr: Schedule, prepare: Callable[[Array, Any], Rule]) -> Optimizer:
    """An optimizer from the rule of one leaf.

    ``prepare(step, rate)`` is called once an update with the number of steps done, and gives ``rule(p, g, *slots)``,
    which gives the new ``(p, *slots)``. Slots start at zero. All of them, ``p`` and ``g`` have one dtype, of four bytes
    or more.
    """

    def init(params: Any) -> Any:
        leaves, treedef = leaves_of(params)

        def tree(fn: Callable[[Array], Any]) -> Any:
            return trees.unflatten(treedef, [fn(x) if trains(x) else None for x in leaves])

        state: dict[str, Any] = {"step": counter(params)}
        for slot in slots:
            state[slot] = tree(lambda x: zeros_like(wide(asarray(x))))
        if any(map(is_small, leaves)):
            state["master"] = tree(lambda x: asarray(wide(x)) if is_small(x) else None)
        return state

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        if not isinstance(state, Mapping) or not {"step", *slots} <= state.keys():
            held = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise TreeError(
                f"[{name}] the state must hold {', '.join(('step', *slots))}, it holds {held}: use init(params)"
            )
        # A schedule of the user's may look at values: it runs outside of what is compiled.
        theirs = callable(lr) and getattr(getattr(lr, "func", lr), "__module__", "") != constant.__module__
        return run(params, grads, state, *([lr(state["step"])] if theirs else ()))

    @batched
    def run(params: Any, grads: Any, state: Any, rate: Any = lr) -> tuple[Any, Any]:
        ps, treedef = leaves_of(params)
        columns = [_column(name, what, t, treedef) for what, t in (("grads", grads), *((s, state[s]) for s in slots))]
        masters = _column(name, "master", state["master"], treedef) if "master" in state else [None] * len(ps)
        rule = prepare(state["step"], rate(state["step"]) if callable(rate) else rate)
        rows = []
        for i, (p, g, *held) in enumerate(zip(ps, *columns, strict=True)):
            full = wide(p) if masters[i] is None else masters[i]
            if g is None or not trains(p):
                rows.append((p, *held, masters[i]))
                continue
            p, full, g = as_arrays(p, full, g)
            for what, x in zip(("grads", *slots, "master"), (g, *held, full), strict=True):
                check_shape(name, what, x, p)
            full, *held = rule(full, g.astype(full.dtype, copy=False), *held)
            rows.append((full.astype(p.dtype, copy=False), *held, full if is_small(p) else None))
        out = [trees.unflatten(treedef, column) for column in zip(*rows, strict=True)] or [params] * (len(slots) + 2)
        new = {"step": state["step"] + 1, **dict(zip(slots, out[1:-1], strict=True))}
        if "master" in state:
            new["master"] = out[-1]
        return out[0], new

    return Optimizer(init, update)


def _column(name: str, what: str, tree: Any, treedef: trees.TreeDef) -> list[Any]:
    """Leaves of a tree that must look like the parameters."""
    leaves, found = leaves_of(tree, trained=False)
    if found != treedef:
        raise TreeError(f"[{name}] {what} has the structure {found}, the parameters {treedef}")
    return leaves


def _check_rate(name: str, lr: Schedule) -> None:
    if not callable(lr):
        check(name, lr=lr)


def masters(params: Any, state: Any) -> Any:
    """The parameters as the optimizer knows them: in float32 where they are of one or two bytes.

    Average (:func:`ema`) and save these; the parameters themselves are their rounded copies.

    >>> w = mt.ones(2, dtype=mt.bfloat16)
    >>> mt.optim.masters(w, mt.optim.sgd(0.1).init(w))
    Array([1., 1.], dtype=float32)
    """
    if "master" not in state:
        return params
    ps, treedef = leaves_of(params)
    held = _column("masters", "master", state["master"], treedef)
    return trees.unflatten(treedef, [p if m is None else m for p, m in zip(ps, held, strict=True)])


# ----- optimizers -----------------------------------------------------------------------------------------------------


@recorded
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
    >>> opt = mt.optim.sgd(0.5)
    >>> params = {"w": mt.asarray([1.0, 2.0])}
    >>> params, state = opt.update(params, {"w": mt.asarray([1.0, 1.0])}, opt.init(params))
    >>> params["w"]
    Array([0.5, 1.5], dtype=float64)
    """
    _check_rate("sgd", lr)
    check("sgd", momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ArgumentError("[sgd] nesterov needs momentum > 0")

    def prepare(step: Array, rate: Any) -> Rule:
        def rule(p: Array, g: Array, *velocity: Array) -> tuple[Array, ...]:
            if weight_decay:
                g = g + weight_decay * p
            if not velocity:
                return (p - _cast(rate, p) * g,)
            v = momentum * velocity[0] + g
            return p - _cast(rate, p) * (g + momentum * v if nesterov else v), v

        return rule

    return _optimizer("sgd", ("momentum",) if momentum else (), lr, prepare)


def momentum(lr: Schedule, beta: float = 0.9, *, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """:func:`sgd` with momentum ``beta``.

    >>> opt = mt.optim.momentum(1.0, 0.5)
    >>> p, state = mt.asarray(0.0), opt.init(mt.asarray(0.0))
    >>> for _ in range(2):
    ...     p, state = opt.update(p, mt.asarray(1.0), state)
    >>> float(p)
    -2.5
    """
    return sgd(lr, momentum=beta, nesterov=nesterov, weight_decay=weight_decay)


@recorded
def adam(
    lr: Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam (Kingma and Ba, 2015): steps of ``lr`` times the mean of the gradients over the root of the mean of their
    squares.

    Parameters
    ----------
    lr
        Learning rate; a number or a schedule.
    b1, b2
        Decay factors of the two running means.
    eps
        Added to the root.
    weight_decay
        ``weight_decay * p`` is added to the gradient; see :func:`adamw` for decay that does not pass through the means.

    Examples
    --------
    >>> opt = mt.optim.adam(0.1)
    >>> p = mt.asarray([1.0, -1.0])
    >>> p, state = opt.update(p, mt.asarray([3.0, -0.01]), opt.init(p))
    >>> mt.round(p * 1e6) / 1e6
    Array([ 0.9, -0.9], dtype=float64)
    """
    return _adam("adam", lr, b1, b2, eps, weight_decay, decoupled=False)


@recorded
def adamw(
    lr: Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer:
    """:func:`adam` with decoupled weight decay (Loshchilov and Hutter, 2019): ``p -= lr * weight_decay * p`` at each
    step.

    >>> opt = mt.optim.adamw(0.1, weight_decay=0.5)
    >>> p = mt.asarray(2.0)
    >>> p, state = opt.update(p, mt.asarray(0.0), opt.init(p))
    >>> float(p)
    1.9
    """
    return _adam("adamw", lr, b1, b2, eps, weight_decay, decoupled=True)


@recorded
def lazy_adam(lr: Schedule, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    r""":func:`adam` that moves nothing where the gradient is zero: neither the parameter nor its two means.

    For large tables of which each step reads some rows. :func:`adam` lets the means of all other rows decay and steps
    by what is left of them, at the price of the whole table; here (as in PyTorch's ``SparseAdam``) a step costs what
    was read, but for the copies of the table and of its means that a pure function makes. A compiled step with
    ``donate=`` makes none. The bias of the means is corrected by the number of all steps. The result does not depend on
    whether a gradient is kept sparse (see :func:`meshtape.sparse_gradient`).

    Parameters
    ----------
    lr, b1, b2, eps
        As of :func:`adam`. There is no weight decay, which would move every row.

    Examples
    --------
    >>> opt = mt.optim.lazy_adam(0.1)
    >>> p, state = mt.zeros(2), opt.init(mt.zeros(2))
    >>> for g in ([1.0, 1.0], [1.0, 0.0]):
    ...     p, state = opt.update(p, mt.asarray(g), state)
    >>> mt.round(p * 1e6) / 1e6
    Array([-0.2, -0.1], dtype=float64)
    """
    return _adam("lazy_adam", lr, b1, b2, eps, 0.0, decoupled=False, lazy=True)


def _adam(
    name: str,
    lr: Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    *,
    decoupled: bool,
    lazy: bool = False,
) -> Optimizer:
    _check_rate(name, lr)
    check(name, eps=eps, weight_decay=weight_decay)
    check(name, most=math.nextafter(1.0, 0.0), b1=b1, b2=b2)

    def prepare(step: Array, rate: Any) -> Rule:
        t = (step + 1).astype(np.float64)
        # Both means start at zero; the root and what the rate is divided by undo the bias towards it.
        root = sqrt(1.0 - b2**t)
        size, least = rate * root / (1.0 - b1**t), eps * root

        def rule(p: Array, g: Array, m: Array, v: Array) -> tuple[Array, ...]:
            if p.dtype.kind == "c":
                raise DTypeError(f"[{name}] takes real parameters, got {p.dtype.name}: pass real and imaginary parts")
            if weight_decay and not decoupled:
                g = g + weight_decay * p
            if weight_decay and decoupled:
                p = p * (1.0 - _cast(rate * weight_decay, p))
            rates = _cast(size, p), _cast(least, p)
            if lazy:
                return apply(LAZY_ADAM, (p, g, m, v, *rates), {"b1": b1, "b2": b2})
            return adam_step(elementwise, p, g, m, v, *rates, b1=b1, b2=b2)

        return rule

    return _optimizer(name, ("mean", "square"), lr, prepare)


@recorded
def chain(*stages: Any) -> Optimizer:
    """The last stage, an optimizer, fed with gradients that went through the stages before it, functions of the
    gradients.

    >>> opt = mt.optim.chain(lambda g: mt.optim.clip_by_value(g, 1.0), mt.optim.sgd(0.5))
    >>> p = mt.asarray(0.0)
    >>> p, state = opt.update(p, mt.asarray(8.0), opt.init(p))
    >>> float(p)
    -0.5
    """
    *functions, last = stages
    if not isinstance(last, Optimizer) or not all(map(callable, functions)):
        raise ArgumentError("[chain] takes functions of the gradients and, last, an optimizer")

    def update(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        for fn in functions:
            grads = fn(grads)
        return last.update(params, grads, state)

    return Optimizer(last.init, update)


__all__ = ["Average", "Optimizer", "Schedule", "adam", "adamw", "chain", "clip_by_global_norm", "clip_by_value"]
__all__ += ["constant", "cosine", "ema", "exponential", "global_norm", "lazy_adam", "linear", "masters", "momentum"]
__all__ += ["sgd", "warmup_cosine", "warmup_linear"]
__dir__ = __all__.copy
