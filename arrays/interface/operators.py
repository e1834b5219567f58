"""The arithmetic operators of ``Array``.

An operator on small arrays costs a fraction of a microsecond in NumPy, and each Python call on the way to it a tenth of that. So
the most frequent calls of all, NumPy arrays and Python numbers, are made from the operator method itself. Everything else takes
the general way through ``apply``: other buffers and operands, and errors, which it words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np

from ..core import dispatch
from ..core.dispatch import _OURS, apply, call_site, written_to
from ..core.op import NO_PARAMS, Op, state
from ..core.value import COMPILED, FIRST_USER_DTYPE, FLOAT32, FLOAT64, NUMBERS32, NUMBERS64, Now, Value, number
from ..native.broadcasts import WORTH_A_LOOK, broadcast

_getframe = sys._getframe
_ndarray = np.ndarray
_CALLER = 0 if COMPILED else 1  # frames from the method to the line with the operator
_OPERANDS = bool | int | float | complex | np.ndarray | np.generic | list | tuple


def operate(op: Op, x: Any, y: Any) -> Any:
    """A binary operator, in the general case: an invalid operand is left to the other side's reflected method."""
    for a in (x, y):
        if type(a) is not dispatch._array_type and not isinstance(a, _OPERANDS) and not isinstance(a, Number):
            return NotImplemented  # (a fraction or a decimal is refused by `apply`, and `==` of one is not False)
    return apply(op, (x, y))


def operator(op: Op, *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    """The method of ``Array`` for a binary operator."""
    fn = op.numpy
    plain = isinstance(fn, np.ufunc)  # which treats a number and an array of it alike
    both = broadcast(op.name)

    def method(self: Value, other: Any) -> Any:
        x = self._buf
        compute = fn
        kind = type(other)
        cls: type = type(self)
        if kind is cls:
            right: Value = other
            y = right._buf
            if type(x) is not _ndarray or type(y) is not _ndarray:
                return operate(op, other, self) if reflected else operate(op, self, other)
            if both is not None and (x.size >= WORTH_A_LOOK or y.size >= WORTH_A_LOOK):
                compute = both
        elif (kind is float or kind is int) and type(x) is _ndarray:
            dtype = x.dtype
            if plain and dtype is FLOAT64:
                try:
                    y = NUMBERS64[other]
                except KeyError:
                    y = number(other, FLOAT64)
            elif plain and dtype is FLOAT32:
                try:
                    y = NUMBERS32[other]
                except KeyError:
                    y = number(other, FLOAT32)
            elif dtype.num < FIRST_USER_DTYPE:
                y = other
            else:
                return operate(op, other, self) if reflected else operate(op, self, other)
        else:
            return operate(op, other, self) if reflected else operate(op, self, other)
        try:
            buf = compute(y, x) if reflected else compute(x, y)
        except (ValueError, TypeError, OverflowError, MemoryError):
            buf = None
        if buf is None:
            return operate(op, other, self) if reflected else operate(op, self, other)
        if type(buf) is not _ndarray:
            buf = np.asarray(buf)
        result: Value = cls.__new__(cls)
        result._buf = buf
        result._id = 0
        now: Now = state.now
        recorders = now.recorders
        if recorders:
            site = now.site
            if site is None:
                frame = _getframe(_CALLER)
                ours = _OURS.get(id(frame.f_globals))
                site = (frame.f_code, frame.f_lasti) if ours is False else call_site()
            args = (other, self) if reflected else (self, other)
            origin = now.origin
            for r in recorders:
                r.record(op, args, (result,), NO_PARAMS, origin, site)
            if self._buf is not x or (kind is cls and other._buf is not y):
                raise written_to(op)
        return result

    return method
