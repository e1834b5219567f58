"""The cotangent of an array that was read at some places: the places, and what came back for each.

Reading 10⁵ of 10⁶ rows has a cotangent that is zero almost everywhere; a loop that reads ``x[i]`` for every ``i`` would, with a dense
cotangent for each read, take time and memory of the square of what it reads. :class:`IndexSum` keeps what was read as it came, and
stands for the dense array until an op needs that. Reads of every kind have this one form: by slices, ints, masks, index arrays and
mixtures of them. What optimizers and clipping do with gradients is done for the price of what is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._dispatch import Deferred, apply
from ._op import Op, not_recording, state
from .devices import CPU
from .elementwise import (
    ABS,
    ADD,
    ALIAS,
    ASTYPE,
    CONJ,
    DIVIDE,
    MAXIMUM,
    MINIMUM,
    MULTIPLY,
    NEGATIVE,
    POSITIVE,
    SIGN,
    SQRT,
    SQUARE,
    STOP_GRADIENT,
    SUBTRACT,
)
from .index_keys import Template, is_basic, numpy_key
from .places import Rows, picked, refined, rows_of
from .reductions import SUM
from .rowsum import sum_rows

# Below this number of elements of the array a dense cotangent costs less than the bookkeeping.
SMALLEST = 1 << 14

# Fewer elements than this are added one by one.
_TINY = 512

# Ops that make zero of zero, element by element.
_KEEP_ZERO = frozenset({ABS, ALIAS, ASTYPE, CONJ, NEGATIVE, POSITIVE, SIGN, SQRT, SQUARE, STOP_GRADIENT})


class _Read(NamedTuple):
    """What one read gets, in the shape of its result."""

    template: Template
    arrays: tuple[np.ndarray, ...]
    values: np.ndarray

    def rows(self, shape: tuple[int, ...]) -> Rows:
        return rows_of(self.template, self.arrays, self.values, shape)

    def add_to(self, out: np.ndarray, fresh: bool) -> None:
        if is_basic(self.template):
            key = numpy_key(self.template, self.arrays)
            if fresh:
                out[key] = self.values
            else:
                out[key] += self.values
        else:
            _Places(self.rows(out.shape), False).add_to(out, fresh)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        here = self.values.size * self.values.dtype.itemsize
        return (
            here if is_basic(self.template) else here + 8 * self.values.size // max(picked(self.template, shape)[1], 1)
        )


class _Places(NamedTuple):
    """Values by place; ``distinct`` says that no place comes twice, and that they ascend."""

    found: Rows
    distinct: bool

    def rows(self, shape: tuple[int, ...]) -> Rows:
        return self.found

    def add_to(self, out: np.ndarray, fresh: bool) -> None:
        axes, ids, rows = self.found
        shape = out.shape
        if rows.shape[1] == 1 and rows.dtype.itemsize > 2 and not self.distinct and out.flags.c_contiguous:
            # The other dimensions are of length one. One dimension is what NumPy is fast on.
            np.add.at(out.reshape(-1), ids, rows[:, 0])
            return
        if not self.distinct:
            ids, rows = sum_rows(ids, rows, math.prod(shape[d] for d in axes))
        rest = [d for d in range(len(shape)) if d not in axes]
        # (Reshaping would copy an array whose columns come first in memory.)
        key = np.unravel_index(ids, [shape[d] for d in axes]) if len(axes) != 1 else (ids,)
        turned = out.transpose((*axes, *rest))
        values = rows.reshape(len(ids), *(shape[d] for d in rest))
        if fresh:
            turned[key] = values
        else:
            turned[key] += values

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return self.found.values.size * self.found.values.dtype.itemsize + self.found.ids.nbytes


class IndexSum(Deferred):
    """A buffer of zeros, with values added at places. It is never written to: several arrays may hold it."""

    __slots__ = ("_dense", "_held", "_parts", "_summed", "dtype", "shape")
    priority = 3
    host = None
    sharding = None
    device = CPU

    def __init__(self, parts: Sequence[_Read | _Places], shape: tuple[int, ...], dtype: np.dtype, held: int) -> None:
        self._parts, self.shape, self.dtype, self._held = parts, shape, dtype, held
        self._dense: np.ndarray | None = None
        self._summed: Rows | None = None

    @classmethod
    def read(
        cls, template: Template, arrays: Sequence[np.ndarray], values: np.ndarray, shape: tuple[int, ...]
    ) -> IndexSum:
        """The cotangent of ``x`` of ``shape`` where ``values`` is that of ``x[key]``."""
        part = _Read(template, tuple(arrays), values)
        return cls([part], shape, values.dtype, part.nbytes(shape))

    @classmethod
    def of_rows(cls, rows: Rows, shape: tuple[int, ...]) -> IndexSum:
        """From distinct ascending places."""
        part = _Places(rows, True)
        out = cls([part], shape, rows.values.dtype, part.nbytes(shape))
        out._summed = rows
        return out

    # ----- forms ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes of what is kept."""
        return self._held

    @property
    def parts(self) -> int:
        """How many reads are kept apart."""
        return len(self._parts)

    def concrete(self) -> np.ndarray:
        """The dense array."""
        if self._dense is None:
            if len(self._parts) > 1 and self.dtype.itemsize <= 2:
                self.summed()  # in float32
            parts = self._parts if self._summed is None else [_Places(self._summed, True)]
            self._dense = _added(_zeros(self), parts, fresh=True)
        return self._dense

    def summed(self) -> Rows:
        """Distinct places in ascending order, and the sum at each."""
        if self._summed is None:
            plain, together = _grouped(self._parts, self.shape)
            found = [p.rows(self.shape) for p in plain]
            # In the order in which a dense array would be added to: the numbers are the same.
            found += [_sum(r, self.shape) for r in together] if plain or len(together) > 1 else together
            axes = tuple(sorted({d for r in found for d in r.axes}))
            self._summed = _sum(_joined([refined(r, axes, self.shape) for r in found]), self.shape)
        return self._summed

    def add_to(self, out: np.ndarray) -> np.ndarray:
        """``out``, with the values added in place."""
        return _added(out, self._parts if self._summed is None else [_Places(self._summed, True)], fresh=False)

    def plus(self, other: Any) -> Any:
        """The sum with another buffer of this shape and dtype: sparse as long as that takes less memory than dense."""
        if type(other) is not IndexSum:
            return self.add_to(np.array(other))
        parts, held = self._merged(other)
        if held >= self.nbytes:
            return other.add_to(np.array(self._dense) if self._dense is not None else self.add_to(_zeros(self)))
        return IndexSum(parts, self.shape, self.dtype, held)

    def _merged(self, other: IndexSum) -> tuple[Sequence[_Read | _Places], int]:
        if (
            len(other._parts) == 1
            and type(last := self._parts[len(self._parts) - 1]) is _Read
            and type(new := other._parts[0]) is _Read
        ):
            same = last.template == new.template and all(map(_is, last.arrays, new.arrays))
            if same and tuple(map(type, last.template)) == tuple(map(type, new.template)):
                merged = last._replace(values=last.values + new.values)
                return [*self._parts[:-1], merged], self._held
        # Sums share what they grow from, so that a loop of n reads does not copy n lists.
        parts = self._parts
        if type(parts) is not _Grown or len(parts.all) != parts.n:
            parts = _Grown(list(parts), len(parts))
        parts.all.extend(other._parts)
        return _Grown(parts.all, len(parts.all)), self._held + other._held

    def settled(self) -> IndexSum | np.ndarray:
        """Itself, or with repeated places summed, where that takes at most half of the memory of the dense array; else that."""
        if 2 * self._held <= self.nbytes:
            return self
        if all(type(p) is _Read and is_basic(p.template) for p in self._parts):
            return self.concrete()
        less = IndexSum.of_rows(self.summed(), self.shape)
        return less if 2 * less._held <= self.nbytes else less.concrete()

    # ----- calls ------------------------------------------------------------------------------------------------------

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """Kept sparse where the op allows it; else the arguments become dense for good, so that this is done once."""
        # Tapes save the operands of what they record, and rules take dense ones.
        kept = None if state.recorders else sparse_call(op, [getattr(a, "_buf", a) for a in args], params)
        if kept is not None:
            return (kept,)
        densify(args)
        with not_recording():
            out = apply(op, args, params)
        return tuple(o._buf for o in out) if op.nout > 1 else (out._buf,)

    def map(self, fn: Callable[[Any], Any]) -> IndexSum:
        """With ``fn``, which makes zero of zero, applied to every element."""
        part = self._parts[0]
        if self._summed is None and len(self._parts) == 1 and type(part) is _Read and is_basic(part.template):
            values = fn(part.values)  # no element was read twice, and nobody needs the places yet
            return IndexSum.read(part.template, part.arrays, values, self.shape)
        axes, ids, rows = self.summed()
        return IndexSum.of_rows(Rows(axes, ids, fn(rows)), self.shape)

    __array_ufunc__ = None  # dense + sparse is ours to compute

    # What rules of linear ops do with a cotangent.

    def __neg__(self) -> Any:
        return self.map(np.negative)

    def __mul__(self, other: Any) -> Any:
        return _call(MULTIPLY, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _call(MULTIPLY, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _call(DIVIDE, self, other)


def _call(op: Op, *bufs: Any) -> Any:
    found = sparse_call(op, bufs, {})
    return op.numpy(*(b.concrete() if type(b) is IndexSum else b for b in bufs)) if found is None else found


class _Grown(Sequence[Any]):
    """The first ``n`` of a list that only grows."""

    __slots__ = ("all", "n")

    def __init__(self, parts: list[Any], n: int) -> None:
        self.all, self.n = parts, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return self.all[i] if type(i) is int and 0 <= i < self.n else self.all[: self.n][i]

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.all, self.n)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _zeros(like: IndexSum) -> np.ndarray:
    return np.zeros(like.shape, like.dtype)


def _joined(rows: Sequence[Rows]) -> Rows:
    """Rows with places among the same dimensions, one after the other."""
    if len(rows) == 1:
        return rows[0]
    return Rows(rows[0].axes, np.concatenate([r.ids for r in rows]), np.concatenate([r.values for r in rows]))


def _sum(rows: Rows, shape: tuple[int, ...]) -> Rows:
    return Rows(rows.axes, *sum_rows(rows.ids, rows.values, math.prod(shape[d] for d in rows.axes)))


def _grouped(parts: Sequence[_Read | _Places], shape: tuple[int, ...]) -> tuple[list[_Read], list[Rows]]:
    """Reads without index arrays; and the others, those that pick of the same dimensions joined."""
    plain: list[_Read] = []
    together: dict[tuple[int, ...], list[Rows]] = {}
    for p in parts:
        if type(p) is _Read and is_basic(p.template):
            plain.append(p)
        else:
            r = p.rows(shape)
            together.setdefault(r.axes, []).append(r)
    return plain, [_joined(rows) for rows in together.values()]


def _added(out: np.ndarray, parts: Sequence[_Read | _Places], *, fresh: bool) -> np.ndarray:
    """``out`` with the parts added in place; ``fresh``: it is zero everywhere."""
    if len(parts) == 1:
        parts[0].add_to(out, fresh)
        return out
    plain, together = _grouped(parts, out.shape)
    for p in (*plain, *(_Places(rows, False) for rows in together)):
        p.add_to(out, fresh)
        fresh = False
    return out


def scatter(template: Template, arrays: Sequence[np.ndarray], values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros of ``shape`` with ``values`` added at the index; numbers of one or two bytes are summed in float32."""
    values = np.asarray(values)
    out = np.zeros(shape, values.dtype)
    if not values.size:
        return out
    if values.size < _TINY and values.dtype.itemsize > 2 and not is_basic(template):
        np.add.at(out, numpy_key(template, arrays), values)
        return out
    return _added(out, [_Read(template, tuple(arrays), values)], fresh=True)


# ----- ops on sparse buffers ------------------------------------------------------------------------------------------


def _number(b: Any) -> Any:
    """The number that a scalar, or an array of one number everywhere, is; None for other arrays."""
    if isinstance(b, Deferred):
        return None
    if np.ndim(b) == 0:
        return b
    return b[(0,) * b.ndim] if b.size and not any(b.strides) else None


def sparse_call(op: Op, bufs: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """The result of an op that optimizers and clipping use, for the price of what is kept; None for everything else."""
    g = next(b for b in bufs if type(b) is IndexSum)
    if op in _KEEP_ZERO:
        return g.map(lambda v: op.numpy(v, **params))
    if op is SUM and len(params["axis"]) == len(g.shape) and not params["keepdims"]:
        return np.asarray(op.numpy(g.summed().values, **{**params, "axis": (0, 1)}))
    if len(bufs) != 2:
        return None
    x, y = bufs
    other = y if x is g else x
    number = _number(other)
    if number is not None and (np.ndim(other) == 0 or other.shape == g.shape) and _keeps_zero(op, x is g, number):
        if np.result_type(g.dtype, other) == g.dtype:
            return g.map(lambda v: op.numpy(v, number) if x is g else op.numpy(number, v))
        return None
    if op not in (ADD, SUBTRACT) or getattr(other, "shape", None) != g.shape or other.dtype != g.dtype:
        return None
    if type(other) is IndexSum:
        return x.plus(y if op is ADD else y.map(np.negative))
    if type(other) is not np.ndarray or (op is SUBTRACT and y is not g):
        return None
    if g.parts > 1:
        g.summed()  # once, as a dense gradient would be before it is added to something
    return (g if op is ADD else g.map(np.negative)).add_to(np.array(other))


def _keeps_zero(op: Op, first: bool, number: Any) -> bool:
    """Whether ``op`` of zero and a number is zero."""
    if op in (MULTIPLY, DIVIDE):
        # Infinity times zero is not zero, nor is a quotient by it: what is not finite must not be hidden.
        return bool(np.isfinite(number)) and (op is MULTIPLY or (first and number != 0))
    if op is MAXIMUM:
        return bool(number < 0)
    return bool(number > 0) if op is MINIMUM else False


def densify(xs: Sequence[Any]) -> None:
    """Arrays that stand for dense ones become them."""
    for x in xs:
        buf = getattr(x, "_buf", None)
        if type(buf) is IndexSum:
            x._buf = buf.concrete()
