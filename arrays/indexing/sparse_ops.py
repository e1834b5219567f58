"""Ops on sparse cotangents, which only pay for the places that are not zero.

The dispatcher, and the executors of compiled programs and of ranks, call this module where an operand is an
:class:`~meshtape.arrays.indexing.sparse_cotangent.SparseCotangent`. :func:`sparse_values` tells before a program runs
which of its values may be one.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.dispatch import Deferred
from ..core.op import Op, ShapeDtype
from ..ops.elementwise import (
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
    STOP_GRADIENT,
    SUBTRACT,
)
from ..reductions.reductions import MEAN, SUM
from . import sparse_cotangent
from .indexing import SCATTER, register_sparse_scatter
from .lazy_adam import LAZY_ADAM, lazy_adam_at
from .sparse_cotangent import SparseCotangent

# Ops of two operands that may keep an operand sparse.
_PAIRS = frozenset({ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM})

ADDS = frozenset({ADD, SUBTRACT})
"""Ops that add a sparse operand to a dense one."""

# A tape keeps no operand of these.
_SAVED_BY_NONE = frozenset({ADD, ALIAS, ASTYPE, CONJ, NEGATIVE, POSITIVE, SCATTER, STOP_GRADIENT, SUBTRACT, MEAN, SUM})


def saves_nothing(op: Op, args: Sequence[Any]) -> bool:
    """Whether a tape that records the call keeps no array that it reads."""
    return op in _SAVED_BY_NONE or (op in (MULTIPLY, DIVIDE) and type(args[1]) in (int, float, complex))


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
        return x.add(y if op is ADD else y.map(np.negative))
    if type(other) is not np.ndarray or (op is SUBTRACT and y is not g):
        return None
    if g.parts > 1:
        g.summed()  # once, as a dense gradient would be before it is added to something
    own = any(f and b is other for f, b in zip(free, bufs, strict=False))
    return (g if op is ADD else g.map(np.negative)).add_to(other if own else np.array(other))


def _keeps_zero(op: Op, first: bool, number: Any) -> bool:
    """Whether ``op`` of zero and a number is zero."""
    if op in (MULTIPLY, DIVIDE):
        # Infinity times zero is not zero, nor is a quotient by it: what is not finite must not be hidden.
        return bool(np.isfinite(number)) and (op is MULTIPLY or (first and number != 0))
    if op is MAXIMUM:
        return bool(number < 0)
    return bool(number > 0) if op is MINIMUM else False


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
    return (
        bool(out.shape)
        and size >= sparse_cotangent.SMALLEST
        and 2 * (values.nbytes + sum(a.nbytes for a in arrays)) <= out.nbytes
    )


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


sparse_cotangent.register_calls(sys.modules[__name__])
register_sparse_scatter(sparse_cotangent.scatter)
