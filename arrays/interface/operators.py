"""The arithmetic operators of ``Array``."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dispatch import SCALARS, apply
from ..core.op import Op

_OPERANDS = (np.ndarray, np.generic, list, tuple, Number)
"""(`apply` refuses a fraction or a decimal, and `==` of one is not False.)"""
_FREQUENT = SCALARS | {Array}


def operator(op: Op, *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    """The method of ``Array`` for a binary operator. An invalid operand is left to the other side's reflected method."""

    def method(self: Array, other: Any) -> Any:
        if type(other) not in _FREQUENT and not isinstance(other, _OPERANDS):
            return NotImplemented
        return apply(op, (other, self) if reflected else (self, other))

    return method
