"""Sums of rows that share an index: the cotangent of reading rows of a table.

Reading 10⁵ of 10⁶ rows has a cotangent that is zero almost everywhere. :class:`RowSum` keeps the distinct rows and their sums, and
stands for the dense array until an op needs that. The sums are formed as the product of a sparse matrix of ones with the rows,
which adds them in order, as ``np.add.at`` does, an order of magnitude faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._dispatch import Deferred, apply
from ._op import Op, not_recording, state
from .devices import CPU
from .elementwise import ABS, ADD, ALIAS, ASTYPE, DIVIDE, MULTIPLY, NEGATIVE, POSITIVE, SQUARE, STOP_GRADIENT, SUBTRACT
from .indexing import Slot, Span, Template
from .reductions import SUM

if TYPE_CHECKING:
    from ._array import Array

# Below this number of elements of the table a dense array costs less than the bookkeeping.
SMALLEST = 1 << 14

_ALL = Span(None, None, None)

# Ops that make zero of zero, element by element.
_KEEP_ZERO = frozenset({ABS, ALIAS, ASTYPE, NEGATIVE, POSITIVE, SQUARE, STOP_GRADIENT})


def rows_read(
    template: Template, arrays: Sequence[np.ndarray], shape: tuple[int, ...]
) -> tuple[np.ndarray, int] | None:
    """Which rows ``x[key]`` reads, in order, and how many dimensions of ``x`` make up its rows' numbers.

    None unless the key is index arrays for the first dimensions and everything of the others.
    """
    lead = len(arrays)
    if not lead or template[:lead] != tuple(map(Slot, range(lead))) or any(p != _ALL for p in template[lead:]):
        return None
    ids: Any = 0
    for a, n in zip(arrays, shape, strict=False):
        a = a.astype(np.intp, copy=False)
        if a.size and a.min() < 0:
            a = np.where(a < 0, a + n, a)
        # A multi-index is made one: NumPy's fast path, and the sparse product, know one dimension.
        ids = a if lead == 1 else ids * n + a
    return ids.reshape(-1), lead


def sum_rows(ids: np.ndarray, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids (of ``0 … n-1``) in ascending order, and for each the sum of its rows; ``rows`` has two dimensions.

    Numbers of one or two bytes are summed in float32. What is returned may share memory with the arguments.
    """
    # Marking places beats sorting the ids by an order of magnitude.
    hit = np.zeros(n, bool)
    hit[ids] = True
    distinct = np.flatnonzero(hit)
    place = np.empty(n, np.intp)
    place[distinct] = np.arange(len(distinct))
    if len(distinct) == len(ids):
        out = np.empty(rows.shape, rows.dtype)
        out[place[ids]] = rows
        return distinct, out
    if rows.strides[0] == 0:
        # All rows are one row, spread by the derivative of a sum: it is counted, and never written out.
        counts = np.bincount(place[ids], minlength=len(distinct))
        wide = np.dtype(np.float32) if rows.dtype.itemsize <= 2 else rows.dtype
        sums = counts.astype(wide.type(0).real.dtype)[:, None] * rows[:1].astype(wide, copy=False)
        return distinct, sums.astype(rows.dtype, copy=False)
    from scipy.sparse import csc_matrix

    wide = rows.astype(np.float32) if rows.dtype.itemsize <= 2 else rows
    ones = np.ones(len(ids), wide.real.dtype)
    shape = (len(distinct), len(ids))
    sums = csc_matrix((ones, place[ids], np.arange(len(ids) + 1)), shape=shape) @ np.ascontiguousarray(wide)
    return distinct, sums.astype(rows.dtype, copy=False)


def scatter_rows(ids: np.ndarray, rows: np.ndarray, n: int) -> np.ndarray:
    """Zeros of ``n`` rows with each of ``rows`` added at its id."""
    out = np.zeros((n, rows.shape[1]), rows.dtype)
    if rows.shape[1] == 1 and rows.dtype.itemsize > 2:
        np.add.at(out[:, 0], ids, rows[:, 0])
        return out
    distinct, sums = sum_rows(ids, rows, n)
    out[distinct] = sums
    return out


class RowSum(Deferred):
    """A buffer that is zero but for some rows. ``ids`` ascend; ``rows[i]`` belongs to row ``ids[i]`` of the first ``lead``
    dimensions taken as one. Never written to: several arrays may hold it."""

    __slots__ = ("_dense", "dtype", "ids", "lead", "rows", "shape")
    __array_ufunc__ = None  # dense + RowSum is ours to compute
    priority = 3
    host = None
    sharding = None
    device = CPU

    def __init__(self, ids: np.ndarray, rows: np.ndarray, shape: tuple[int, ...], lead: int) -> None:
        self.ids, self.rows, self.shape, self.lead = ids, rows, shape, lead
        self.dtype = rows.dtype
        self._dense: np.ndarray | None = None

    @property
    def _n(self) -> int:
        return math.prod(self.shape[: self.lead])

    def emit(self, op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """Kept in rows where the op allows it; else the arguments become dense for good, so that this is done once."""
        # Tapes save the operands of what they record, and rules take dense ones.
        kept = None if state.recorders else _in_rows(op, args, params)
        if kept is not None:
            return (kept,)
        densify(args)
        with not_recording():
            out = apply(op, args, params)
        return tuple(o._buf for o in out) if op.nout > 1 else (out._buf,)

    def concrete(self) -> np.ndarray:
        if self._dense is None:
            dense = np.zeros((self._n, self.rows.shape[1]), self.dtype)
            dense[self.ids] = self.rows
            self._dense = dense.reshape(self.shape)
        return self._dense

    def plus(self, other: Any) -> Any:
        """The sum with another buffer: a :class:`RowSum` where both are, with the same rows."""
        from .indexsum import IndexSum

        if type(other) is IndexSum:
            return other.plus(self)
        if isinstance(other, RowSum):
            if other.lead != self.lead:
                return self.concrete() + other.concrete()
            ids = np.concatenate([self.ids, other.ids])
            distinct, sums = sum_rows(ids, np.concatenate([self.rows, other.rows]), self._n)
            return RowSum(distinct, sums, self.shape, self.lead)
        return self.add_to(np.array(other))

    def add_to(self, out: np.ndarray) -> np.ndarray:
        """``out``, with the rows added in place."""
        out[self._key()] += self.rows.reshape(-1, *self.shape[self.lead :])
        return out

    def _key(self) -> Any:
        """The key of the rows. (A reshaped array may be a copy, where the columns come first in memory.)"""
        return self.ids if self.lead == 1 else np.unravel_index(self.ids, self.shape[: self.lead])


def _in_rows(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> Any:
    """The result of what optimizers and clipping do with gradients, for the price of the rows; None for everything else."""
    bufs = [getattr(a, "_buf", a) for a in args]
    g = next(b for b in bufs if type(b) is RowSum)
    if op in _KEEP_ZERO:
        return RowSum(g.ids, op.numpy(g.rows, **params), g.shape, g.lead)
    if op is SUM and len(params["axis"]) == len(g.shape) and not params["keepdims"]:
        return np.asarray(op.numpy(g.rows, axis=(0, 1), keepdims=False))
    if len(bufs) != 2:
        return None
    x, y = bufs
    other = y if x is g else x
    if op in (MULTIPLY, DIVIDE) and (x is g or op is MULTIPLY) and np.ndim(other) == 0 and type(other) is not RowSum:
        # Infinity times zero is not zero, nor is a quotient by it: what is not finite must not be hidden.
        if isinstance(other, Deferred) or not np.isfinite(other) or (op is DIVIDE and other == 0):
            return None
        rows = op.numpy(*(b.rows if b is g else b for b in bufs))
        return RowSum(g.ids, rows, g.shape, g.lead)
    if op in (ADD, SUBTRACT) and type(other) is np.ndarray and other.shape == g.shape and other.dtype == g.dtype:
        if y is not g and op is SUBTRACT:
            return None
        out, key = np.array(other), g._key()
        out[key] = op.numpy(out[key], g.rows.reshape(-1, *g.shape[g.lead :]))
        return out
    return None


def densify(xs: Sequence[Any]) -> None:
    """Arrays that stand for dense ones become them."""
    for x in xs:
        buf = getattr(x, "_buf", None)
        if type(buf) is RowSum:
            x._buf = buf.concrete()


def gradient_rows(g: Array, /) -> tuple[Array, Array]:
    """The rows of a gradient that are not zero: their numbers, and the rows.

    The gradient of a table of which some rows were read (``table[ids]``, an embedding) is kept in this form until something needs
    the whole of it, which this function does not.

    Returns
    -------
    ids, rows
        Ascending integers, and the part ``g[ids]``. Of a gradient that is kept dense, all rows with an element that is not zero.

    Examples
    --------
    >>> import meshtape as mt
    >>> g = mt.grad(lambda t: t[mt.asarray([5, 2, 5])].sum())(mt.zeros((10_000, 2)))
    >>> mt.gradient_rows(g)
    (Array([2, 5]), Array([[1., 1.],
           [2., 2.]], dtype=float64))
    """
    from ._dispatch import wrap
    from .creation import asarray

    g = asarray(g) if not hasattr(g, "_buf") else g
    buf = g._buf
    if type(buf) is RowSum and buf.lead == 1:
        return wrap(buf.ids), wrap(buf.rows.reshape(-1, *buf.shape[1:]))
    host = g._concrete()
    ids = np.flatnonzero((host != 0).reshape(len(host), -1).any(axis=1))
    return wrap(ids), g[wrap(ids)]
