"""Kinds of parameters of ops: what a value must be in a call, which files of programs are checked by.

Public functions check their arguments themselves, with messages of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.index_template import Gap, Slot, Span, Truth
from ..core.op import ShapeDtype


class OpCall(NamedTuple):
    """A call of an op: its operands and parameters."""

    args: tuple[Any, ...]  # ShapeDtype, or Python scalars
    params: Mapping[str, Any]

    @property
    def ndim(self) -> int:
        return len(self.args[0].shape)


@dataclass(frozen=True)
class Kind:
    """A kind of parameter: its description, and the test whether a value fits it in a call."""

    what: str
    fits: Callable[[Any, OpCall], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _wholes(value: Any, least: int) -> bool:
    return type(value) is tuple and all(_whole(n) and n >= least for n in value)


def one_of(*names: str) -> Kind:
    """One of these texts."""
    return Kind(f"one of {', '.join(map(repr, names))}", lambda v, _: type(v) is str and v in names)


def _is_axis(value: Any, call: OpCall) -> bool:
    return _whole(value) and 0 <= value < call.ndim


def _is_number(value: Any, _: OpCall) -> bool:
    return type(value) in (int, float) or (isinstance(value, np.generic) and value.dtype.kind in "iuf")


def _axes(value: Any, call: OpCall) -> bool:
    return type(value) is tuple and all(_is_axis(a, call) for a in value) and len(set(value)) == len(value)


AXIS = Kind("a dimension of the first operand", _is_axis)
AXES = Kind("dimensions of the first operand, each once", _axes)
ORDER = Kind("an order of all dimensions", lambda v, c: _axes(v, c) and len(v) == c.ndim)
FLAG = Kind("true or false", lambda v, _: type(v) is bool)
WHOLE = Kind("an integer", lambda v, _: _whole(v))
COUNT = Kind("an integer of 0 or more", lambda v, _: _whole(v) and v >= 0)
POSITIVE = Kind("an integer of 1 or more", lambda v, _: _whole(v) and v >= 1)
LABEL = Kind("an integer or null", lambda v, _: v is None or _whole(v))
NUMBER = Kind("a number", _is_number)
NUMBERS = Kind(
    "a tuple of numbers", lambda v, c: type(v) is tuple and all(type(n) is bool or _is_number(n, c) for n in v)
)
VALUE = Kind(
    "a number or a truth value",
    lambda v, c: _is_number(v, c) or type(v) in (bool, complex) or isinstance(v, np.generic),
)
FRACTION = Kind("a number from 0 to 1", lambda v, c: _is_number(v, c) and 0 <= v <= 1)
SIZES = Kind("a tuple of sizes", lambda v, _: _wholes(v, 0) and math.prod(v) < 2**63)
STEPS = Kind("a tuple of integers of 1 or more", lambda v, _: _wholes(v, 1))
DTYPE = Kind("a dtype", lambda v, _: isinstance(v, np.dtype))
NOTHING = Kind("null: in a file there is no mesh", lambda v, _: v is None)


def _in_block(value: Any, call: OpCall) -> bool:
    """Whether a block at this offset lies in the global array; its shape is that of the result, or of the operand."""
    block, whole = call.params.get("shape"), call.params.get("global_shape")
    block = call.args[0].shape if block is None else block
    if not (_wholes(value, 0) and _wholes(block, 0) and _wholes(whole, 0) and len(value) == len(block) == len(whole)):
        return False
    return all(o + n <= w for o, n, w in zip(value, block, whole, strict=True))


THRESHOLD = Kind("an integer from 0 to 2**32", lambda v, _: _whole(v) and 0 <= v <= 2**32)
OFFSET = Kind("the place of a block inside global_shape", _in_block)


def _is_template(value: Any, call: OpCall) -> bool:
    if type(value) is not tuple:
        return False
    shape = call.params.get("shape", call.args[0].shape)
    arrays = [a for a in call.args if isinstance(a, ShapeDtype)][-sum(isinstance(p, Slot) for p in value) :]
    slots, axis = [], 0
    for p in value:
        if isinstance(p, Truth | Gap) or p is None:
            continue
        if axis == len(shape):
            return False
        if isinstance(p, Slot):
            slots.append(p.n)
            if arrays[p.n : p.n + 1] == [] or arrays[p.n].dtype.kind not in "iu":
                return False
        elif isinstance(p, Span):
            if p.step == 0:
                return False
        elif not (_whole(p) and 0 <= p < shape[axis]):
            return False
        axis += 1
    return axis == len(shape) and slots == list(range(len(slots)))


TEMPLATE = Kind("an index into the array, each index array in its place", _is_template)

BLOCK = {"offset": OFFSET, "global_shape": SIZES}
DRAW = {"shape": SIZES, **BLOCK, "dtype": DTYPE}
