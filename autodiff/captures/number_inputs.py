"""Python numbers among the arguments of a traced function: inputs of the program as long as they only enter arithmetic.

During the trace a :class:`TracedNumber` stands for such a number. Arithmetic with it gives another one, which Python
computes again at each call of the program. Beside an array it becomes an input of the program, a 0-d array with the
dtype that NumPy gives a Python number there: ``float32`` beside ``float32``. Any other use (a comparison, an index, a
length, a text) needs the number itself, which is then part of the signature.
"""

from __future__ import annotations

import gc
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from types import CellType
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import FIRST_USER_DTYPE, Symbol
from ...arrays.core.op import Op
from ...arrays.ops import elementwise as ew
from ...arrays.ops.creation import asarray
from .tracing import Tracer, _Trace

KINDS = frozenset({int, float})

# Ops whose result, and the cotangent of their other operand, have the same bits for a number and for an array of it.
_ALIKE = frozenset({ew.ADD, ew.SUBTRACT, ew.MULTIPLY, ew.DIVIDE, ew.MAXIMUM, ew.MINIMUM, *ew.COMPARISONS})


class OtherKind(Exception):
    """The program of another call is not valid for these arguments."""


class Term(NamedTuple):
    """The expression of a number in the arguments: the leaf at a position, a constant, or a call on other terms."""

    kind: type
    leaf: int = -1
    fn: Callable[..., Any] | None = None
    of: tuple[Any, ...] = ()

    def value(self, leaves: Sequence[Any]) -> Any:
        """The number for these leaves. Raises :class:`OtherKind` where it is of another type than that of the traced
        call."""
        if self.fn is None:
            found = leaves[self.leaf] if self.leaf >= 0 else self.of[0]
        else:
            found = self.fn(*[t.value(leaves) for t in self.of])
        if type(found) is not self.kind:
            raise OtherKind
        return found


class NumberInput(NamedTuple):
    """A number as an input of a program."""

    term: Term
    dtype: np.dtype
    device: Any

    def buffer(self, leaves: Sequence[Any]) -> Any:
        """Memory with its value for these leaves. Raises :class:`OtherKind` where that does not fit the dtype."""
        try:
            value = self.term.value(leaves)
            if self.term.kind is int and self.dtype.kind not in "iu" and abs(value) > 2**53:
                raise OtherKind  # NumPy rounds these in another way
            host = np.asarray(value, self.dtype)
        except ArithmeticError:
            raise OtherKind from None  # said by the code itself, which is traced with the number
        if self.device is None:
            return host
        return asarray(host, device=self.device)._buf


def _calculates(fn: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def method(self: TracedNumber, *others: Any) -> Any:
        if any(isinstance(o, Array) for o in others):
            return NotImplemented
        if not all(type(o) in KINDS or type(o) is TracedNumber for o in others):
            values = [self._read(), *others]
            return fn(*(values[::-1] if reflected else values))
        operands = [self, *others]
        if reflected:
            operands.reverse()
        numbers = [o._value if type(o) is TracedNumber else o for o in operands]
        found = fn(*numbers)
        if type(found) not in KINDS:
            return fn(*[o._read() if type(o) is TracedNumber else o for o in operands])
        terms = tuple(o._term if type(o) is TracedNumber else Term(type(o), of=(o,)) for o in operands)
        leaves = frozenset().union(*(o._leaves for o in operands if type(o) is TracedNumber))
        return TracedNumber(self._trace, found, Term(type(found), -1, fn, terms), leaves)

    return method


def _reads(fn: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def method(self: TracedNumber, *others: Any) -> Any:
        if any(isinstance(o, Array) for o in others):
            return NotImplemented
        values = [self._read(), *others]
        return fn(*(values[::-1] if reflected else values))

    return method


class TracedNumber(Symbol):
    """A Python number that is an argument of the function being traced."""

    __slots__ = ("__weakref__", "_leaves", "_term", "_trace", "_value")
    __array_ufunc__ = None  # NumPy leaves operators to this class

    def __init__(self, trace: _Trace, value: int | float, term: Term, leaves: frozenset[int]) -> None:
        self._trace, self._value, self._term, self._leaves = trace, value, term, leaves
        trace.stand_ins.append(weakref.ref(self))

    def _read(self) -> Any:
        """The number itself; the program is then valid for it alone."""
        self._trace.pinned |= self._leaves
        return self._value

    def operand(self, op: Op, args: tuple[Any, ...]) -> Any:
        others = [a for a in args if a is not self]
        if op not in _ALIKE or len(others) != 1 or type(others[0]) is not Array:
            return self._read()
        (x,) = others
        own = isinstance(x._buf, Tracer) and x._buf.builder is self._trace
        dtype = _beside(x.dtype, self._term.kind)
        if dtype is None or not (own or isinstance(x._buf, np.ndarray)):
            return self._read()
        hosted = own and x._buf.host is not None
        made = NumberInput(self._term, dtype, None if hosted or str(x.device) == "cpu" else x.device)
        try:
            made.buffer(self._trace.leaves)
        except OtherKind:
            return self._read()
        return self._trace.number(made, x.device)

    # A program is traced for numbers of one type, so that asking for it tells nothing of the value.
    __class__ = property(lambda self: self._term.kind)  # type: ignore[assignment]

    __bool__, __hash__, __int__, __float__, __complex__ = map(_reads, (bool, hash, int, float, complex))  # type: ignore[assignment]
    __round__, __trunc__, __divmod__ = map(_reads, (round, math.trunc, divmod))
    __rdivmod__ = _reads(divmod, reflected=True)
    __floor__, __ceil__ = _reads(math.floor), _reads(math.ceil)
    __str__, __repr__, __format__ = _reads(str), _reads(repr), _reads(format)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._read(), dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self._term.kind, name):  # which the type knows
            raise AttributeError(name)
        return getattr(self._read(), name)

    def __copy__(self) -> TracedNumber:
        return self

    def __deepcopy__(self, memo: Any) -> TracedNumber:
        return self

    def __reduce__(self) -> Any:
        return self._term.kind, (self._read(),)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _fn = getattr(operator, f"__{_name}__")
    setattr(TracedNumber, f"__{_name}__", _calculates(_fn))
    setattr(TracedNumber, f"__r{_name}__", _calculates(_fn, reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(TracedNumber, f"__{_name}__", _calculates(getattr(operator, f"__{_name}__")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "lshift", "rshift", "invert", "index"):
    setattr(TracedNumber, f"__{_name}__", _reads(getattr(operator, f"__{_name}__")))
for _name in ("and", "or", "xor", "lshift", "rshift"):
    setattr(TracedNumber, f"__r{_name}__", _reads(getattr(operator, f"__{_name}__"), reflected=True))


def settle_kept(trace: _Trace) -> None:
    """Replace every kept :class:`TracedNumber` by its number, for which alone the program is then valid."""
    for ref in trace.stand_ins:
        number = ref()
        if number is not None:
            value = number._read()
            _replace(number, value)


def _replace(old: Any, new: Any) -> None:
    """Replace an object in all its holders."""
    for holder in gc.get_referrers(old):
        if type(holder) is tuple:
            _replace(holder, _swapped(holder, old, new))
        elif isinstance(holder, CellType):
            holder.cell_contents = new
        elif isinstance(holder, set):
            holder.remove(old)
            holder.add(new)
        else:
            _replace_in(holder, old, new)


def _swapped(values: tuple[Any, ...], old: Any, new: Any) -> tuple[Any, ...]:
    # (In a function of its own, whose cells nobody takes for holders.)
    return tuple([new if v is old else v for v in values])


def _replace_in(holder: Any, old: Any, new: Any) -> None:
    variables = holder if isinstance(holder, dict | list) else getattr(holder, "__dict__", None)
    if isinstance(variables, dict):
        places: list[Any] = [k for k, v in variables.items() if v is old]
    else:
        places = [i for i, v in enumerate(variables or ()) if v is old]
    for k in places:
        variables[k] = new  # type: ignore[index]
    for name in getattr(type(holder), "__slots__", ()):
        if getattr(holder, name, None) is old:
            setattr(holder, name, new)


def _beside(dtype: np.dtype, kind: type) -> np.dtype | None:
    """The dtype of a Python number beside an array; None where the program depends on the number."""
    if dtype.num >= FIRST_USER_DTYPE:
        return dtype
    if dtype.kind not in "biuf":
        return None  # to NumPy a real number beside complex ones is a complex one, with a zero that has a sign
    return np.result_type(dtype, kind(0))
