"""Running averages of parameters (part of ``mt.optim``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.array import Array
from ...arrays.core.errors import ArgumentError
from ...arrays.ops.creation import asarray, ones_like
from ...arrays.ops.elementwise import where
from ..tape.tape import is_differentiable
from .parameters import Recipe, batched, check, check_shape, counter, recorded, wide


@dataclass(frozen=True)
class Average(Recipe):
    """Three pure functions: ``init(params)``, ``update(params, state, loss=None)`` and ``value(state, like)``."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]
    value: Callable[[Any, Any], Any]


@recorded
def ema(decay: float, *, interval: int = 1, threshold: float | None = None) -> Average:
    """Exponential moving average of parameters: ``mean = decay * mean + (1 - decay) * params``.

    It starts as a copy of the parameters, and so needs no correction of a bias towards zero. Averages of parameters of
    one or two bytes are kept in float32.

    Parameters
    ----------
    decay
        From 0 (no memory) to 1.
    interval
        Every how many calls of ``update`` the average moves.
    threshold
        It moves only where the ``loss`` passed to ``update`` is smaller; a loss that is not finite never moves it. The
        state counts such refusals under ``"skipped"``.

    Returns
    -------
    Average
        ``state = avg.init(params)``, ``state = avg.update(params, state, loss)``, ``averaged = avg.value(state,
        params)``, which has the dtypes of ``params``.

    Examples
    --------
    >>> avg = mt.optim.ema(0.9)
    >>> state = avg.init(mt.asarray(1.0))
    >>> for x in (2.0, 3.0):
    ...     state = avg.update(mt.asarray(x), state)
    >>> round(float(state["mean"]), 9)
    1.29
    """
    check("ema", most=1.0, decay=decay)
    if interval < 1:
        raise ArgumentError(f"[ema] interval must be at least 1, got {interval}")

    def init(params: Any) -> Any:
        zero = counter(params)
        mean = trees.tree_map(lambda x: asarray(wide(x), copy=True) if isinstance(x, Array) else x, params)
        return {"step": zero, "skipped": zero, "mean": mean}

    @batched
    def update(params: Any, state: Any, loss: Any = None) -> Any:
        if loss is None and threshold is not None:
            raise ArgumentError("[ema] with a threshold, update needs the loss")
        step = state["step"] + 1
        due = step % interval == 0
        good = ones_like(due) if loss is None else asarray(loss) < (math.inf if threshold is None else threshold)
        moves = due & good

        def moved(mean: Any, x: Any) -> Any:
            if not isinstance(x, Array) or not is_differentiable(x.dtype):
                return x
            check_shape("ema", "a mean", mean, x)
            # Selected, not multiplied by 0 or 1: what a bad step made of the parameters must not leak in.
            return where(moves, decay * mean + (1.0 - decay) * wide(x).astype(mean.dtype, copy=False), mean)

        skipped = state["skipped"] + (due & ~good).astype(np.int64)
        return {"step": step, "skipped": skipped, "mean": trees.tree_map(moved, state["mean"], params)}

    def value(state: Any, like: Any) -> Any:
        def own(mean: Any, x: Any) -> Any:
            if not isinstance(x, Array):
                return mean
            check_shape("ema", "a mean", mean, x)
            return mean.astype(x.dtype, copy=False)

        return trees.tree_map(own, state["mean"], like)

    return Average(init, update, value)
