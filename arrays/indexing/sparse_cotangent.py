"""Sparse cotangents: the cotangent of an array that was read at some places, as those places and their values.

Reading 10⁵ of 10⁶ rows has a cotangent that is zero almost everywhere. With dense cotangents, a loop that reads
``x[i]`` for every ``i`` would take quadratic time and memory. :class:`SparseCotangent` keeps the values of each read,
and stands for the dense array until an op needs that. All reads have this one form: by slices, ints, masks, index
arrays and mixtures of them. Optimizers and clipping only pay for the kept values.

The dispatcher, and the executors of compiled programs and of ranks, call :func:`call` where an operand is a
:class:`SparseCotangent`. :func:`sparse_values` tells before a program runs which of its values may be one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.devices import CPU
from ..core.dispatch import Deferred, apply
from ..core.index_template import Template, is_basic, numpy_key
from ..core.op import Op, ShapeDtype, not_recording, state
from ..ops import elementwise as ew
from ..reductions.reductions import MEAN, SUM
from .indexing import SCATTER, register_sparse_scatter
from .lazy_adam import LAZY_ADAM, lazy_adam_at
from .parts import AppendView, IndexedPart, RowsPart, added, grouped, joined, sum_places
from .rows import Rows, compose, expand_axes

# Below this number of elements of the array a dense cotangent costs less than the bookkeeping.
SMALLEST = 1 << 14

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
        last, new = self._parts[len(self._parts) - 1], other._parts[0]
        if len(other._parts) == 1 and type(last) is IndexedPart and type(new) is IndexedPart:
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
        if not state.recorders or saves_nothing(op, args):
            kept = sparse_call(op, [getattr(a, "_buf", a) for a in args], params)
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
        return call(ew.MULTIPLY, (self, other), {})

    def __rmul__(self, other: Any) -> Any:
        return call(ew.MULTIPLY, (other, self), {})

    def __truediv__(self, other: Any) -> Any:
        return call(ew.DIVIDE, (self, other), {})


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


# ----- calls of ops ---------------------------------------------------------------------------------------------------

# Ops of two operands that may keep an operand sparse.
_PAIRS = frozenset({ew.ADD, ew.SUBTRACT, ew.MULTIPLY, ew.DIVIDE, ew.MAXIMUM, ew.MINIMUM})

ADDS = frozenset({ew.ADD, ew.SUBTRACT})
"""Ops that add a sparse operand to a dense one."""

# A tape keeps no operand of these.
_SAVED_BY_NONE = frozenset(
    {ew.ADD, ew.ALIAS, ew.ASTYPE, ew.CONJ, ew.NEGATIVE, ew.POSITIVE, SCATTER, ew.STOP_GRADIENT, ew.SUBTRACT, MEAN, SUM}
)


def saves_nothing(op: Op, args: Sequence[Any]) -> bool:
    """Whether a tape that records the call keeps no array that it reads."""
    return op in _SAVED_BY_NONE or (op in (ew.MULTIPLY, ew.DIVIDE) and type(args[1]) in (int, float, complex))


def _number(b: Any) -> Any:
    """The number that a scalar, or an array of one number everywhere, is; None for other arrays."""
    if isinstance(b, Deferred):
        return None
    if np.ndim(b) == 0:
        return b
    return b[(0,) * b.ndim] if b.size and not any(b.strides) else None


def sparse_call(op: Op, bufs: Sequence[Any], params: Mapping[str, Any], free: Sequence[bool] = ()) -> Any:
    """The result of an op that optimizers and clipping use, computed on the kept values; None for any other call.

    ``free`` says of each operand whether its memory may take a result.
    """
    if op is SCATTER:
        arrays = [b.concrete() if type(b) is SparseCotangent else b for b in bufs[1:]]
        return op.numpy(bufs[0], *arrays, **params)
    g = next(b for b in bufs if type(b) is SparseCotangent)
    if op.zero_preserving:
        return g.map(lambda v: op.numpy(v, **params))
    if op in (SUM, MEAN) and len(params["axis"]) == len(g.shape) and not params["keepdims"]:
        return np.asarray(op.numpy(g.summed().values, **{**params, "axis": (0, 1)}))
    if op is LAZY_ADAM and g is bufs[1] and not any(isinstance(b, Deferred) for i, b in enumerate(bufs) if i != 1):
        return lazy_adam_at(g.summed(), bufs, params, free)
    if op not in _PAIRS:
        return None
    x, y = bufs
    other = y if x is g else x
    number = _number(other)
    if number is not None and (np.ndim(other) == 0 or other.shape == g.shape) and _keeps_zero(op, x is g, number):
        if np.result_type(g.dtype, other) == g.dtype:
            return g.map(lambda v: op.numpy(v, number) if x is g else op.numpy(number, v))
        return None
    if op not in ADDS or getattr(other, "shape", None) != g.shape or other.dtype != g.dtype:
        return None
    if type(other) is SparseCotangent:
        return x.add(y if op is ew.ADD else y.map(np.negative))
    if type(other) is not np.ndarray or (op is ew.SUBTRACT and y is not g):
        return None
    if g.parts > 1:
        g.summed()  # once, as a dense gradient would be before it is added to something
    own = any(f and b is other for f, b in zip(free, bufs, strict=False))
    return (g if op is ew.ADD else g.map(np.negative)).add_to(other if own else np.array(other))


def _keeps_zero(op: Op, first: bool, number: Any) -> bool:
    """Whether ``op`` of zero and a number is zero."""
    if op in (ew.MULTIPLY, ew.DIVIDE):
        # Infinity times zero is not zero, nor is a quotient by it: what is not finite must not be hidden.
        return bool(np.isfinite(number)) and (op is ew.MULTIPLY or (first and number != 0))
    if op is ew.MAXIMUM:
        return bool(number < 0)
    return bool(number > 0) if op is ew.MINIMUM else False


def call(op: Op, bufs: Sequence[Any], params: Mapping[str, Any], free: Sequence[bool] = ()) -> Any:
    """The result of any op on buffers, some of which may be sparse."""
    if not any(type(b) is SparseCotangent for b in bufs):
        return op.numpy(*bufs, **params)
    found = sparse_call(op, bufs, params, free)
    return op.numpy(*map(dense, bufs), **params) if found is None else found


def dense(buf: Any) -> Any:
    """A buffer that is not sparse."""
    return buf.concrete() if type(buf) is SparseCotangent else buf


# ----- programs -------------------------------------------------------------------------------------------------------


class ProgramCall(Protocol):
    """A call of a program."""

    @property
    def op(self) -> Op: ...
    @property
    def inputs(self) -> Sequence[Any]: ...
    @property
    def outputs(self) -> Sequence[int]: ...
    @property
    def params(self) -> Mapping[str, Any]: ...


def makes_sparse(inputs: Iterable[ShapeDtype], out: ShapeDtype) -> bool:
    """Whether the cotangent of a read (a scatter of these operands) is surely kept sparse."""
    values, *arrays = inputs
    size = out.nbytes // max(out.dtype.itemsize, 1)
    return bool(out.shape) and size >= SMALLEST and 2 * (values.nbytes + sum(a.nbytes for a in arrays)) <= out.nbytes


def sparse_values(
    calls: Iterable[ProgramCall],
    avals: Mapping[int, ShapeDtype],
    sparse: Iterable[int] = (),
    *,
    made_by: Container[Op] | None = None,
) -> frozenset[int]:
    """Variables of a program whose values may be sparse when it runs on NumPy buffers; ``sparse`` are inputs that are.

    The executor keeps all others dense. ``made_by`` are ops whose results may be sparse, whatever their operands; by
    default these are scatters with surely few places.
    """
    found = set(sparse)
    for e in calls:
        reads = [v for v in e.inputs if isinstance(v, int)]
        if e.op in made_by if made_by is not None else e.op is SCATTER:
            if made_by is not None or makes_sparse([avals[v] for v in reads], avals[e.outputs[0]]):
                found.update(e.outputs)
            continue
        thin = [v for v in reads if v in found]
        if not thin:
            continue
        others = [v for v in reads if v not in found]
        if (
            e.op.zero_preserving
            or (e.op in ADDS and len(thin) == 2)
            or (e.op in _PAIRS - ADDS and len(thin) == 1 and not any(avals[v].shape for v in others))
        ):
            found.update(e.outputs)
    return frozenset(found)


register_sparse_scatter(scatter)
