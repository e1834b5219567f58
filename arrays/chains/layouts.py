"""Layouts of the operands of an elementwise kernel: the dimensions that are one, and where neighbours follow each
other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..kernels.geometry import joined

FULL, ONE, LINE, HELD, STRIDED = "full", "one", "line", "held", "strided"
"""Layouts of an operand beside the result: alike, a single element, of neighbours or of one element along the last
dimension, or any other."""


class Layout(NamedTuple):
    """How operands lie beside a result whose elements follow each other."""

    order: tuple[int, ...]  # of the dimensions of the result in memory, the slowest first
    sizes: tuple[int, ...]  # of the dimensions that are left where neighbours are joined
    kinds: tuple[str, ...]
    steps: tuple[tuple[int, ...], ...]  # in elements along each such dimension; 0 where an operand repeats


def strides_of(array: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Steps in elements along each dimension of the result; 0 where the operand repeats."""
    lead = len(shape) - array.ndim
    own = tuple(0 if n == 1 else s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    return (0,) * lead + own


def layout_of(arrays: Sequence[Any], shape: tuple[int, ...], ordered: bool = False) -> Layout:
    """The layout of operands beside a result of ``shape``, which is in C order where it is ``ordered``; else in that of
    the first operand of its shape.

    >>> import numpy as np
    >>> layout_of([np.ones((2, 3)), np.ones(1), np.ones(3), np.ones((2, 1))], (2, 3)).kinds
    ('full', 'one', 'line', 'held')
    >>> layout_of([np.ones((3, 2)).T, np.ones((2, 3))], (2, 3))
    Layout(order=(1, 0), sizes=(3, 2), kinds=('full', 'strided'), steps=((), (1, 3)))
    """
    strides = [strides_of(a, shape) if a.size != 1 else None for a in arrays]
    order = tuple(range(len(shape)))
    for s in () if ordered else strides:
        if s is not None and all(step > 0 for step, n in zip(s, shape, strict=True) if n > 1):
            long = [d for d in order if shape[d] > 1]
            found = sorted(long, key=lambda d: -s[d])
            if found != long:
                order = (*[d for d in order if shape[d] == 1], *found)
            break
    given = [s for s in strides if s is not None]
    joint = joined(*([s[d] for d in order] for s in (shape, *given)))
    sizes, *steps = zip(*joint, strict=True) if joint else [()] * (1 + len(given))
    whole = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    operands: list[tuple[str, tuple[int, ...]]] = []
    rest = iter(steps)
    for s in strides:
        own = None if s is None else next(rest)
        if own is None or own == whole:
            operands.append((ONE if own is None else FULL, ()))
        else:
            operands.append(({1: LINE, 0: HELD}.get(own[-1], STRIDED), own))
    return Layout(order, sizes, tuple([kind for kind, _ in operands]), tuple([own for _, own in operands]))
