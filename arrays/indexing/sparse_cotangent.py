"""Sparse cotangents: the cotangent of an array that was read at some places, as those places and their values.

Reading 10⁵ of 10⁶ rows has a cotangent that is zero almost everywhere. With dense cotangents, a loop that reads
``x[i]`` for every ``i`` would take quadratic time and memory. :class:`SparseCotangent` keeps the values of each read,
and stands for the dense array until an op needs that. All reads have this one form: by slices, ints, masks, index
arrays and mixtures of them. Optimizers and clipping only pay for the kept values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.devices import CPU
from ..core.dispatch import Deferred, apply
from ..core.index_template import Template, is_basic, numpy_key
from ..core.op import Op, not_recording, state
from ..ops.elementwise import DIVIDE, MULTIPLY
from .parts import AppendView, IndexedPart, RowsPart, added, grouped, joined, sum_places
from .rows import Rows, compose, expand_axes

# Below this number of elements of the array a dense cotangent costs less than the bookkeeping.
SMALLEST = 1 << 14

_above: Any
"""The calls of ops on these, which are a module of their own."""


def register_calls(calls: Any) -> None:
    """Called once by the module of these calls."""
    global _above
    _above = calls


# Fewer elements than this are added one by one.
_TINY = 512


class SparseCotangent(Deferred):
    """A buffer of zeros, with values added at places. It is never written to: several arrays may hold it."""

    __slots__ = ("_dense", "_held", "_parts", "_summed", "dtype", "shape")
    priority = 3
    host = None
    sharding = None
    device = CPU

    def __init__(
        self, parts: Sequence[IndexedPart | RowsPart], shape: tuple[int, ...], dtype: np.dtype, held: int
    ) -> None:
        self._parts, self.shape, self.dtype, self._held = parts, shape, dtype, held
        self._dense: np.ndarray | None = None
        self._summed: Rows | None = None

    @classmethod
    def read(
        cls, template: Template, arrays: Sequence[np.ndarray], values: np.ndarray, shape: tuple[int, ...]
    ) -> SparseCotangent:
        """The cotangent of ``x`` of ``shape`` where ``values`` is that of ``x[key]``."""
        part = IndexedPart(template, tuple(arrays), values)
        return cls([part], shape, values.dtype, part.nbytes(shape))

    @classmethod
    def at(cls, found: Rows, shape: tuple[int, ...]) -> SparseCotangent:
        """A cotangent of values at places in any order, which may repeat."""
        part = RowsPart(found, False)
        return cls([part], shape, found.values.dtype, part.nbytes(shape))

    @classmethod
    def of_rows(cls, rows: Rows, shape: tuple[int, ...]) -> SparseCotangent:
        """From distinct ascending places."""
        part = RowsPart(rows, True)
        out = cls([part], shape, rows.values.dtype, part.nbytes(shape))
        out._summed = rows
        return out

    # ----- forms ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes of the kept values and places."""
        return self._held

    @property
    def parts(self) -> int:
        """The number of reads kept apart."""
        return len(self._parts)

    def concrete(self) -> np.ndarray:
        """The dense array."""
        if self._dense is None:
            if len(self._parts) > 1 and self.dtype.itemsize <= 2:
                self.summed()  # in float32
            parts = self._parts if self._summed is None else [RowsPart(self._summed, True)]
            self._dense = added(_zeros(self), parts, fresh=True)
        return self._dense

    def summed(self) -> Rows:
        """Distinct places in ascending order, and the sum at each."""
        if self._summed is None:
            plain, together = grouped(self._parts, self.shape)
            found = [p.rows(self.shape) for p in plain]
            # In the order in which a dense array would be added to: the numbers are the same.
            found += [sum_places(r, self.shape) for r in together] if plain or len(together) > 1 else together
            axes = tuple(sorted({d for r in found for d in r.axes}))
            self._summed = sum_places(joined([expand_axes(r, axes, self.shape) for r in found]), self.shape)
        return self._summed

    def add_to(self, out: np.ndarray) -> np.ndarray:
        """``out``, with the values added in place."""
        return added(out, self._parts if self._summed is None else [RowsPart(self._summed, True)], fresh=False)

    def add(self, other: Any) -> Any:
        """The sum with another buffer of this shape and dtype, sparse while that takes less memory than dense."""
        if type(other) is not SparseCotangent:
            return self.add_to(np.array(other))
        parts, held = self._merged(other)
        if held >= self.nbytes:
            return other.add_to(np.array(self._dense) if self._dense is not None else self.add_to(_zeros(self)))
        return SparseCotangent(parts, self.shape, self.dtype, held)

    def _merged(self, other: SparseCotangent) -> tuple[Sequence[IndexedPart | RowsPart], int]:
        if (
            len(other._parts) == 1
            and type(last := self._parts[len(self._parts) - 1]) is IndexedPart
            and type(new := other._parts[0]) is IndexedPart
        ):
            same = last.template == new.template and all(map(_is, last.arrays, new.arrays))
            if same and tuple(map(type, last.template)) == tuple(map(type, new.template)):
                merged = last._replace(values=last.values + new.values)
                return [*self._parts[:-1], merged], self._held
        # Sums share what they grow from, so that a loop of n reads does not copy n lists.
        parts = self._parts
        if type(parts) is not AppendView or len(parts.all) != parts.n:
            parts = AppendView(list(parts), len(parts))
        parts.all.extend(other._parts)
        return AppendView(parts.all, len(parts.all)), self._held + other._held

    def compact(self) -> SparseCotangent | np.ndarray:
        """Itself, perhaps with repeated places summed, where it takes at most half of the dense memory; else dense."""
        if 2 * self._held <= self.nbytes:
            return self
        if all(type(p) is IndexedPart and is_basic(p.template) for p in self._parts):
            return self.concrete()
        less = SparseCotangent.of_rows(self.summed(), self.shape)
        return less if 2 * less._held <= self.nbytes else less.concrete()

    def through(self, template: Template, arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> SparseCotangent:
        """The cotangent of ``x`` of ``shape``, where this is that of ``x[key]``."""
        return SparseCotangent.at(compose(template, arrays, self.summed(), self.shape, shape), shape)

    # ----- calls ------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """A sparse result where the op allows it; else the arguments become dense for good, which is done once."""
        # Tapes save operands of what they record, and rules take dense ones.
        if not state.recorders or _above.saves_nothing(op, args):
            kept = _above.sparse_call(op, [getattr(a, "_buf", a) for a in args], params)
            if kept is not None:
                return kept if op.nout > 1 else (kept,)
        densify(args)
        with not_recording():
            out = apply(op, args, params)
        return tuple(o._buf for o in out) if op.nout > 1 else (out._buf,)

    def map(self, fn: Callable[[Any], Any]) -> SparseCotangent:
        """The elementwise ``fn`` of it; ``fn`` must keep zero."""
        part = self._parts[0]
        if self._summed is None and len(self._parts) == 1 and type(part) is IndexedPart and is_basic(part.template):
            values = fn(part.values)  # no element was read twice, and nobody needs the places yet
            return SparseCotangent.read(part.template, part.arrays, values, self.shape)
        axes, ids, rows = self.summed()
        return SparseCotangent.of_rows(Rows(axes, ids, fn(rows)), self.shape)

    __array_ufunc__ = None  # dense + sparse is ours to compute

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.concrete(), dtype, copy=copy)

    # Operations of the VJP rules of linear ops.

    def __neg__(self) -> Any:
        return self.map(np.negative)

    def __mul__(self, other: Any) -> Any:
        return _call(MULTIPLY, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _call(MULTIPLY, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _call(DIVIDE, self, other)


def _call(op: Op, *bufs: Any) -> Any:
    return _above.call(op, bufs, {})


def _is(a: Any, b: Any) -> bool:
    return a is b


def _zeros(like: SparseCotangent) -> np.ndarray:
    return np.zeros(like.shape, like.dtype)


def scatter(
    template: Template, arrays: Sequence[np.ndarray], values: Any, shape: tuple[int, ...]
) -> np.ndarray | SparseCotangent:
    """Zeros of ``shape`` with ``values`` added at the index; numbers of one or two bytes are summed in float32.

    It is kept sparse where that takes at most half of the memory, and the array is not small.
    """
    if type(values) is SparseCotangent:
        return values.through(template, arrays, shape).compact()
    values = np.asarray(values)
    if shape and math.prod(shape) >= SMALLEST:
        return SparseCotangent.read(template, arrays, values, shape).compact()
    out = np.zeros(shape, values.dtype)
    if is_basic(template):
        out[numpy_key(template, arrays)] = values
        return out
    if not values.size:
        return out
    if values.size < _TINY and values.dtype.itemsize > 2:
        np.add.at(out, numpy_key(template, arrays), values)
        return out
    return added(out, [IndexedPart(template, tuple(arrays), values)], fresh=True)


def densify(xs: Sequence[Any]) -> None:
    """Arrays that stand for dense ones become them."""
    for x in xs:
        buf = getattr(x, "_buf", None)
        if type(buf) is SparseCotangent:
            x._buf = buf.concrete()
