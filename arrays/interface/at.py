"""Functional writes: ``x.at[key].set(v)`` and its kin."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backends.row_blocks import wide
from ..core.array import Array
from ..core.dispatch import apply
from ..core.dtypes import result_type
from ..core.errors import ArgumentError
from ..core.index_template import is_basic, numpy_key, result_shape
from ..core.op import Op
from ..indexing.indexing import (
    INDEX_ADD,
    INDEX_MAX,
    INDEX_MIN,
    INDEX_SET,
    check_fits,
    check_value_dtype,
    check_value_shape,
)
from ..indexing.keys import mask_alone, parse
from ..ops.creation import as_arrays, asarray, beside, ones, ones_like
from ..ops.elementwise import ADD, MAXIMUM, MINIMUM, MULTIPLY, where
from ..ops.manipulation import astype, broadcast_to, concat, reshape

_NO_KEY = object()


class AtIndex:
    """``x.at[key]``: functional writes, which return a new array and leave ``x`` as it is.

    >>> mt.zeros(3).at[[0, 0, 2]].add(1.0)
    Array([2., 0., 1.], dtype=float64)
    """

    __slots__ = ("_key", "_x")
    __iter__ = None  # else Python would index without end
    __contains__ = None

    def __init__(self, x: Array, key: Any = _NO_KEY) -> None:
        self._x, self._key = x, key

    def __getitem__(self, key: Any) -> AtIndex:
        return AtIndex(self._x, key)

    def __repr__(self) -> str:
        return f"<x.at[{self._key!r}] of an array of shape {self._x.shape}>"

    def _value(self, v: Any) -> Any:
        """A Python number as it is, anything else as an Array: lists where the array is."""
        return v if isinstance(v, int | float | complex) else as_arrays(self._x, v)[1]

    def _write(self, op: Op, v: Any) -> Array:
        if self._key is _NO_KEY:
            raise ArgumentError(f"[{op.name}] x.at needs an index before it writes: x.at[...]")
        value = self._value(v)
        masked = masked_write(op.name, op, self._x, self._key, value)
        if masked is not None:
            return masked
        template, arrays = parse(self._x, self._key)
        shape = value.shape if isinstance(value, Array) else ()
        check_value_shape(op.name, shape, result_shape(template, self._x.shape, [a.shape for a in arrays]))
        check_value_dtype(op.name, value, self._x.dtype)
        if op is not INDEX_SET:
            check_fits(op.name, result_type(self._x.dtype, value), self._x.dtype)
        if op in (INDEX_MIN, INDEX_MAX) and is_basic(template):
            # No place repeats: the tape keeps what is read and written, where the op would keep all of ``x``, before
            # and after.
            return self.set(astype(apply(_WITH[op], (self._x[self._key], value)), self._x.dtype, copy=False))
        return apply(op, (self._x, value, *arrays), {"template": template})

    def set(self, v: Any) -> Array:
        """A copy with ``v`` at the index; of repeated places the last write in C order wins."""
        return self._write(INDEX_SET, v)

    def add(self, v: Any) -> Array:
        """A copy with ``v`` added at the index; repeated places add up."""
        return self._write(INDEX_ADD, v)

    def min(self, v: Any) -> Array:
        """A copy with the smaller of the element and ``v`` at the index. Tied values share the gradient evenly."""
        return self._write(INDEX_MIN, v)

    def max(self, v: Any) -> Array:
        """A copy with the larger of the element and ``v`` at the index. Tied values share the gradient evenly."""
        return self._write(INDEX_MAX, v)

    def multiply(self, v: Any) -> Array:
        """A copy multiplied by ``v`` at the index; of repeated places by all of theirs.

        Which places repeat must be known: inside ``mt.compile`` the index arrays cannot be traced. (A mask with one
        number can.)

        >>> mt.ones(3).at[[0, 0, 2]].multiply(mt.asarray([2.0, 5.0, 3.0]))
        Array([10.,  1.,  3.], dtype=float64)
        """
        if self._key is _NO_KEY:
            raise ArgumentError("[index_multiply] x.at needs an index before it writes: x.at[...]")
        if isinstance(v, int | float | complex) or getattr(v, "ndim", 1) == 0:
            masked = masked_write("index_multiply", MULTIPLY, self._x, self._key, v)
            if masked is not None:
                return masked
        template, arrays = parse(self._x, self._key)
        target = result_shape(template, self._x.shape, [a.shape for a in arrays])
        if isinstance(v, int | float | complex):  # in the dtype that it has beside ``x``
            v = asarray(v, dtype=result_type(self._x.dtype, v), device=beside(self._x))
        value = self._value(v)
        check_value_shape("index_multiply", value.shape, target)
        check_value_dtype("index_multiply", value, self._x.dtype)
        if is_basic(template):
            return self.set(self._product(self._x[self._key], value))
        # The position in the flattened array of each element that the index selects, in C order.
        positions = np.arange(self._x.size).reshape(self._x.shape)
        places = positions[numpy_key(template, [a._concrete() for a in arrays])].reshape(-1)
        lead = value.ndim - len(target)
        spread = broadcast_to(reshape(value, value.shape[lead:]) if lead > 0 else value, target)
        # As if each were multiplied into the element, in the dtype of both; and products of many short floats are
        # rounded once.
        spread = astype(spread, wide(result_type(self._x.dtype, spread)), copy=False)
        where, factors = _joined(reshape(spread, (-1,)), places)
        flat = reshape(self._x, (-1,))
        return reshape(AtIndex(flat, where).set(self._product(flat[where], factors)), self._x.shape)

    def subtract(self, v: Any) -> Array:
        """A copy with ``v`` subtracted at the index; repeated places lose all of theirs."""
        v = self._value(v)
        where = None if isinstance(v, Array) else beside(self._x)
        return self.add(-asarray(v, dtype=result_type(self._x.dtype, v), device=where))

    def divide(self, v: Any) -> Array:
        """A copy divided by ``v`` at the index; of repeated places by all of theirs."""
        return self._fitted("index_divide", self._x / self._factors(v))

    def power(self, v: Any) -> Array:
        """A copy raised to the power ``v`` at the index; of repeated places to all of theirs."""
        return self._fitted("index_power", self._x ** self._factors(v))

    def _factors(self, v: Any) -> Array:
        """Ones, with ``v`` at the index."""
        v = self._value(v)
        return AtIndex(ones_like(self._x, dtype=result_type(self._x.dtype, v)), self._key).multiply(v)

    def _fitted(self, name: str, new: Array) -> Array:
        check_fits(name, new.dtype, self._x.dtype)
        return astype(new, self._x.dtype, copy=False)

    def _product(self, old: Array, factor: Array) -> Array:
        new = old * factor
        check_value_dtype("index_multiply", new, self._x.dtype)
        return self._fitted("index_multiply", new)


def masked_write(name: str, op: Op, x: Array, key: Any, value: Any) -> Array | None:
    """``x`` written with one number under a mask, as a selection: no place is counted, so that no host waits for a GPU,
    the mask may be traced or split, and NaN under it reaches no gradient. None where it is no such write."""
    if isinstance(value, Array) and value.ndim:
        return None
    mask = mask_alone(x, key)
    if mask is None:
        return None
    mask = reshape(mask, (*mask.shape, *(1,) * (x.ndim - mask.ndim)))
    value = value if isinstance(value, int | float | complex) else as_arrays(x, value)[1]
    check_value_dtype(name, value, x.dtype)
    if op is INDEX_SET:
        if not isinstance(value, Array):
            # In the dtype of x, by the rules (and with the errors) of NumPy's assignment.
            value = asarray(
                np.array(value).astype(x.dtype) if x.dtype.num >= 256 else np.array(value, x.dtype), device=beside(x)
            )
        return where(mask, astype(value, x.dtype, copy=False), x)
    check_fits(name, result_type(x.dtype, value), x.dtype)
    return where(mask, astype(apply(_WITH[op], (x, value)), x.dtype, copy=False), x)


_WITH = {INDEX_ADD: ADD, INDEX_MIN: MINIMUM, INDEX_MAX: MAXIMUM, MULTIPLY: MULTIPLY}


def _joined(values: Array, places: np.ndarray) -> tuple[np.ndarray, Array]:
    """The distinct places, and for each the product of its values.

    Neighbours are multiplied pair by pair, in as many rounds as the longest run needs: no division, so that the
    derivative is right where factors are zero.
    """
    order = np.argsort(places, kind="stable")
    values, places = values[order], places[order]
    while True:
        starts = np.flatnonzero(np.r_[True, places[1:] != places[:-1]]) if places.size else np.zeros(0, np.intp)
        if starts.size == places.size:
            return places, values
        rank = np.arange(places.size) - np.repeat(starts, np.diff(np.r_[starts, places.size]))
        firsts = np.flatnonzero(rank % 2 == 0)
        # A factor without a partner is multiplied by the one at the end.
        partner = np.where(np.isin(firsts + 1, np.flatnonzero(rank % 2)), firsts + 1, places.size)
        padded = concat([values, ones(1, dtype=values.dtype, device=beside(values))], axis=0)
        values, places = values[firsts] * padded[partner], places[firsts]
