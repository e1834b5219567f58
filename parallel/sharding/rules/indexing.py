"""Factor mappings of reading and writing by index.

A dimension taken by a full slice is split like any batch. A dimension that is sliced is fetched through a window. One
that is looked up (by an index array or a number) may be split too: a read then leaves a pending sum, and in a write
each rank does those to its own places. The dimensions of index arrays may be split for reads, as each position is
looked up by itself. For writes they may not, as writes of different ranks to one place have no order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ....arrays.core.index_template import result_shape
from ....arrays.core.op import Op, ShapeDtype
from ....arrays.indexing import indexing as ix
from ....arrays.indexing import keys
from ..factors import Avals, Dim, FactorRule, Letters, Outs, Params, PartCall, rule
from ..halos import Halo
from ..sharded_indexing import READ_PART, SCATTER_PART, WRITE_PART, local_read, local_scatter, local_write


class _Dims(NamedTuple):
    """Dims of an indexed array, of each index array, and of the indexed part; and which factors are looked up, and
    sliced."""

    array: list[Dim | None]
    indices: list[list[Dim | None]]
    part: list[Dim | None]
    looked_up: frozenset[int]
    sliced: frozenset[int]
    common: tuple[Dim, ...]


def _dims(
    letters: Letters,
    template: keys.Template,
    shape: Sequence[int],
    index_shapes: Sequence[tuple[int, ...]],
    *,
    reading: bool,
) -> _Dims:
    """``reading``: factors of sliced dimensions run along the part, and the array sees them through a window; else the
    other way round."""
    array: list[Dim | None] = []
    out: list[Dim | None] = []
    looked_up: set[int] = set()
    sliced: set[int] = set()
    truths = [(int(p.value),) for p in template if isinstance(p, keys.Truth)]
    advanced = not keys.is_basic(template)
    # A boolean in the key is an index array of its own, of fixed length: the others cannot then be split beside it.
    common = letters.many(np.broadcast_shapes(*index_shapes, *truths), whole=bool(truths)) if advanced else ()
    joined = [i for i, p in enumerate(template) if isinstance(p, keys.Slot | keys.Truth | int)]
    together = bool(joined) and joined == list(range(joined[0], joined[-1] + 1))
    front: int | None = None
    axis = 0
    for p in template:
        if p is None:
            out.append(None)
            continue
        if isinstance(p, keys.Gap):
            continue
        n = shape[axis] if axis < len(shape) else 0
        if isinstance(p, keys.Span):
            taken = p.places(n)
            d = letters.new(len(taken) if reading else n)
            if taken == range(n):
                array.append(d)
                out.append(d)
            else:
                sliced.add(d.factor)
                window = taken.start, taken.step
                array.append(Dim(d.factor, 1, Halo("slice", window)) if reading else d)
                out.append(d if reading else Dim(d.factor, 1, Halo("slice_grad", (*window, len(taken)))))
            axis += 1
            continue
        if advanced and front is None:
            front = len(out)
        if not isinstance(p, keys.Truth):
            d = letters.new(n, whole=bool(truths))
            array.append(d)
            if not truths:
                looked_up.add(d.factor)
            axis += 1
    if advanced:
        at = front if together and front is not None else 0
        out[at:at] = common
    index_dims = [letters.aligned(common, s) for s in index_shapes]
    return _Dims(array, index_dims, out, frozenset(looked_up), frozenset(sliced), tuple(common))


# Places and values that are this many times smaller than the array are gathered, and not added up by rank. (The array
# may be split along another axis, and the values not.)
FEW = 8


@rule(ix.GETITEM)
def _getitem(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    shape = avals[0].shape
    found = _dims(letters, params["template"], shape, [a.shape for a in avals[1:]], reading=True)
    letters.turn(found.looked_up, reduce="any" if avals[0].dtype.kind == "b" else "sum")
    part = PartCall(found.looked_up | found.sliced, READ_PART, functools.partial(local_read, tuple(shape)))
    return letters.rule([found.array, *found.indices], [found.part], [(0,)], part=part)


@rule(ix.SCATTER)
def _scatter(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    # The transpose of getitem: a split dimension of the index arrays leaves every rank with some of the additions.
    # Their sum sends the whole array. Where few places were read, it is cheaper to gather these and their values on all
    # ranks.
    shape = outs[0].shape
    found = _dims(letters, params["template"], shape, [a.shape for a in avals[1:]], reading=False)
    common = {d.factor for d in found.common}
    choice = ""
    if FEW * sum(a.nbytes for a in avals) <= outs[0].nbytes:
        letters.turn(common, whole=True)
        choice = "as few places are read: they travel, and not sums of the whole table"
    else:
        letters.turn(common, reduce="sum")
    split = found.looked_up | found.sliced | {d.factor for d in found.array if d is not None}
    part = PartCall(split, SCATTER_PART, functools.partial(local_scatter, tuple(shape)), found.looked_up)
    return letters.rule([found.part, *found.indices], [found.array], [(0,)], part=part, choice=choice)


_ADDING = (ix.INDEX_SET, ix.INDEX_ADD)


@rule(*_ADDING, ix.INDEX_MIN, ix.INDEX_MAX)
def _index_write(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    shape, index_shapes = avals[0].shape, [a.shape for a in avals[2:]]
    found = _dims(letters, params["template"], shape, index_shapes, reading=False)
    letters.turn({d.factor for d in found.common}, whole=True)
    value = avals[1]
    part = PartCall(found.looked_up | found.sliced, WRITE_PART, functools.partial(local_write, tuple(shape), op.name))
    if not isinstance(value, ShapeDtype):
        linear = [(0,)] if value == 0 and op in _ADDING else []
        return letters.rule([found.array, (), *found.indices], [found.array], linear, part=part)
    sizes = result_shape(params["template"], shape, index_shapes)
    lead = len(sizes) - len(value.shape)
    v = [found.part[lead + i] if lead + i >= 0 and n == sizes[lead + i] else None for i, n in enumerate(value.shape)]
    linear = [(0, 1)] if op in _ADDING else []
    return letters.rule([found.array, v, *found.indices], [found.array], linear, part=part)


@rule(ix.LAST_WRITES)
def _last_writes(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    shape = avals[0].shape
    found = _dims(letters, params["template"], shape, [a.shape for a in avals[1:]], reading=True)
    # Which write came last is known only where all of them, and all that they may hit, are seen.
    letters.turn({*(d.factor for d in found.common), *found.looked_up}, whole=True)
    part = PartCall(found.sliced, READ_PART, functools.partial(local_read, tuple(shape)))
    if not keys.is_basic(params["template"]):
        letters.turn(found.sliced, whole=True)
        part = None
    return letters.rule([found.array, *found.indices], [found.part], [(0,)], part=part)
