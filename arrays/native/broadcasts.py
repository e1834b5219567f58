# cython: annotation_typing=False
"""Arithmetic of an array and a smaller one: NumPy begins anew at every row, which takes as long as the row of a few hundred elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import AVAILABLE, _kernels
from .calls import STEPS, is_taken, result_like

WORTH_A_LOOK = 4096
"""Elements of an operand below which NumPy has the result before it is known whether a kernel takes it."""

_TAKEN = frozenset(np.dtype(t).num for t in "fd")


def broadcast(name: str) -> Callable[[Any, Any], Any] | None:
    """``f(x, y)`` like the elementwise ``np.name``, but faster where one operand is broadcast to the other.

    None where no kernel has the function. Call it where one operand has ``WORTH_A_LOOK`` elements."""
    if not AVAILABLE or name not in STEPS[:4]:
        return None
    compute = getattr(np, name)
    steps = np.asarray([STEPS.index(name), 2, 0, 1], np.int32).tobytes()

    def either(x: Any, y: Any) -> Any:
        whole, part = (x, y) if x.size > y.size else (y, x)
        if part.size == whole.size or part.size < 2 or not whole.flags.c_contiguous:
            return compute(x, y)
        number = whole.dtype.num
        if number not in _TAKEN or number != part.dtype.num or part.ndim > whole.ndim:
            return compute(x, y)
        out = result_like(whole)
        return out if is_taken(_kernels.chain(steps, (x, y, out), 2, 0)) else compute(x, y)

    return either
