"""The arithmetic operators of ``Array``."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np
from numpy import ndarray

from ..core.array import Array
from ..core.dispatch import apply, apply_general, invoke
from ..core.dtypes import FIRST_USER_DTYPE
from ..core.op import Op, is_cuda_elsewhere

_OPERANDS = (np.ndarray, np.generic, list, tuple, Number)
"""(`apply` refuses a fraction or a decimal, and `==` of one is not False.)"""


def operator(op: Op, *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    """The method of ``Array`` for a binary operator. An invalid operand is left to the other side's reflected
    method."""

    def method(self: Array, other: Any) -> Any:
        x = self._buf
        args = (other, self) if reflected else (self, other)
        if type(other) is Array:
            y = other._buf
            if type(x) is ndarray and type(y) is ndarray:
                return invoke(op, args, (x, y))
            return apply_general(op, args)
        if type(other) is float or type(other) is int:
            if type(x) is ndarray and x.dtype.num < FIRST_USER_DTYPE:
                return invoke(op, args, (other, x) if reflected else (x, other))
        elif not isinstance(other, _OPERANDS) and not is_cuda_elsewhere(other):
            return NotImplemented
        return apply(op, args)

    return method


def comparison(op: Op, name: str) -> Callable[[Any, Any], Any]:
    """The method for ``==`` or ``!=``. Where neither side knows how, Python compares identities, and would say that
    equal arrays differ.

    Raises `NotNumbers` for an array of another library.
    """
    plain = operator(op)

    def method(self: Array, other: Any) -> Any:
        out = plain(self, other)
        if out is NotImplemented and _holds_numbers(other):
            out = getattr(type(other), name)(other, self)
            return apply(op, (self, other)) if out is NotImplemented else out  # which refuses it by name
        return out

    return method


def _holds_numbers(other: Any) -> bool:
    if isinstance(other, (memoryview, array, range)):
        return True
    return hasattr(type(other), "__array__") or (hasattr(other, "shape") and hasattr(other, "dtype"))
