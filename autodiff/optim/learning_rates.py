"""Learning rates: pure functions of the number of steps done so far, re-exported by ``mt.optim``.

They are written without ``if`` on arrays, so that a compiled step is traced once, and can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.ops.creation import asarray, ones_like
from ...arrays.ops.elementwise import cos, minimum, where
from .parameters import check

Schedule = float | Callable[[Array], Any]
"""A learning rate: a number, or a function of the number of steps done so far (a 0-d integer Array)."""


def _progress(step: Array, steps: int) -> Array:
    """How much of ``steps`` is done, from 0 to 1."""
    return minimum(asarray(step).astype(np.float64) / max(steps, 1), 1.0)


def constant(lr: float) -> Callable[[Array], Array]:
    """Always ``lr``.

    >>> float(mt.optim.constant(0.1)(mt.asarray(7)))
    0.1
    """
    check("constant", lr=lr)
    return partial(_constant, lr)


def _constant(lr: float, step: Array) -> Array:
    return ones_like(asarray(step), dtype=np.float64) * lr


def linear(start: float, end: float, steps: int) -> Callable[[Array], Array]:
    """From ``start`` to ``end`` in ``steps`` equal steps, then ``end``.

    >>> [float(mt.optim.linear(1.0, 0.0, 4)(mt.asarray(i))) for i in (0, 1, 4, 9)]
    [1.0, 0.75, 0.0, 0.0]
    """
    check("linear", start=start, end=end, steps=steps)
    return partial(_linear, start, end, steps)


def _linear(start: float, end: float, steps: int, step: Array) -> Array:
    return start + (end - start) * _progress(step, steps)


def cosine(lr: float, steps: int, end: float = 0.0) -> Callable[[Array], Array]:
    """From ``lr`` to ``end`` along half a cosine (Loshchilov and Hutter, 2017), then ``end``.

    >>> [round(float(mt.optim.cosine(1.0, 4)(mt.asarray(i))), 6) for i in (0, 2, 4, 9)]
    [1.0, 0.5, 0.0, 0.0]
    """
    check("cosine", lr=lr, steps=steps, end=end)
    return partial(_cosine, lr, steps, end)


def _cosine(lr: float, steps: int, end: float, step: Array) -> Array:
    return end + (lr - end) * (0.5 * (1.0 + cos(math.pi * _progress(step, steps))))


def exponential(lr: float, decay: float, every: int = 1) -> Callable[[Array], Array]:
    """``lr`` times ``decay`` to the power of the number of full periods of ``every`` steps done.

    >>> [float(mt.optim.exponential(1.0, 0.5, 2)(mt.asarray(i))) for i in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    check("exponential", lr=lr, decay=decay)
    check("exponential", least=1, every=every)
    return partial(_exponential, lr, decay, every)


def _exponential(lr: float, decay: float, every: int, step: Array) -> Array:
    return lr * decay ** (asarray(step) // every).astype(np.float64)


def warmup_linear(peak: float, warmup: int, total: int, end: float = 0.0) -> Callable[[Array], Array]:
    """From 0 to ``peak`` in ``warmup`` steps, then linearly to ``end`` at step ``total``.

    >>> [float(mt.optim.warmup_linear(1.0, 2, 6)(mt.asarray(i))) for i in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_warmup("warmup_linear", peak, warmup, total)
    return partial(_warmup, peak, warmup, linear(peak, end, total - warmup))


def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0) -> Callable[[Array], Array]:
    """From 0 to ``peak`` in ``warmup`` steps, then along half a cosine to ``end`` at step ``total``.

    >>> [round(float(mt.optim.warmup_cosine(1.0, 2, 6)(mt.asarray(i))), 6) for i in (0, 1, 2, 4, 6)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check_warmup("warmup_cosine", peak, warmup, total)
    return partial(_warmup, peak, warmup, cosine(peak, total - warmup, end))


def _check_warmup(name: str, peak: float, warmup: int, total: int) -> None:
    check(name, peak=peak, total=total)
    check(name, most=total, warmup=warmup)


def _warmup(peak: float, warmup: int, after: Callable[[Array], Array], step: Array) -> Array:
    step = asarray(step)
    return where(step < warmup, peak * _progress(step, warmup), after(step - warmup))
