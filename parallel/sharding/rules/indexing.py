"""Factor mappings of reading and writing by index.

A dimension taken by a full slice is split like any batch. A dimension that is sliced is fetched through a window. One
that is looked up (by an index array or a number) may be split too: a read then leaves a pending sum, and in a write
each rank does those to its own places. The dimensions of index arrays may be split for reads, as each position is
looked up by itself. For writes they may not, as writes of different ranks to one place have no order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....arrays.core.index_template import result_shape
from ....arrays.core.op import Op, ShapeDtype
from ....arrays.indexing import indexing as ix
from ....arrays.indexing import keys
from ..factors import Dim, Factor, FactorRule, Letters, PartCall, rule
from ..halos import Halo
from ..sharded_indexing import READ_PART, SCATTER_PART, WRITE_PART, local_read, local_scatter, local_write

Avals = Sequence[Any]
Params = Mapping[str, Any]


class _Dims(NamedTuple):
    """Dims of an indexed array, of each index array, and of the indexed part; and which factors are looked up, and sliced."""

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
    """``reading``: factors of sliced dimensions run along the part, and the array sees them through a window; else the other way
    round."""
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
    index_dims: list[list[Dim | None]] = []
    for s in index_shapes:
        lead = len(common) - len(s)
        index_dims.append(
            [common[lead + i] if n == letters.factors[common[lead + i].factor].size else None for i, n in enumerate(s)]
        )
    return _Dims(array, index_dims, out, frozenset(looked_up), frozenset(sliced), tuple(common))


def _summed(letters: Letters, factors: frozenset[int] | set[int]) -> None:
    for f in factors:
        if not letters.factors[f].whole:
            letters.factors[f] = Factor(letters.factors[f].size, False, "sum")


# Places and values that are this many times smaller than the array are gathered, and not added up by rank. (The array may be split
# along another axis, and the values not.)
FEW = 8


@rule(ix.GETITEM)
def _getitem(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape = avals[0].shape
    found = _dims(letters, params["template"], shape, [a.shape for a in avals[1:]], reading=True)
    _summed(letters, found.looked_up if avals[0].dtype.kind != "b" else frozenset())
    if avals[0].dtype.kind == "b":
        for f in found.looked_up:
            letters.factors[f] = Factor(letters.factors[f].size, False, "any")
    part = PartCall(found.looked_up | found.sliced, READ_PART, functools.partial(local_read, tuple(shape)))
    return letters.rule([found.array, *found.indices], [found.part], [(0,)], part=part)


@rule(ix.SCATTER)
def _scatter(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    # The transpose of getitem: a split dimension of the index arrays leaves every rank with some of the additions.
    # Their sum sends the whole array. Where few places were read, it is cheaper to gather these and their values on all
    # ranks.
    letters = Letters()
    shape = out_avals[0].shape
    found = _dims(letters, params["template"], shape, [a.shape for a in avals[1:]], reading=False)
    common = {d.factor for d in found.common}
    choice = ""
    if FEW * sum(a.nbytes for a in avals) <= out_avals[0].nbytes:
        for f in common:
            letters.factors[f] = Factor(letters.factors[f].size, True)
        choice = "as few places are read: they travel, and not sums of the whole table"
    else:
        _summed(letters, common)
    split = found.looked_up | found.sliced | {d.factor for d in found.array if d is not None}
    part = PartCall(split, SCATTER_PART, functools.partial(local_scatter, tuple(shape)), found.looked_up)
    return letters.rule([found.part, *found.indices], [found.array], [(0,)], part=part, choice=choice)


_ADDING = (ix.INDEX_SET, ix.INDEX_ADD)


@rule(*_ADDING, ix.INDEX_MIN, ix.INDEX_MAX)
def _index_write(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape, index_shapes = avals[0].shape, [a.shape for a in avals[2:]]
    found = _dims(letters, params["template"], shape, index_shapes, reading=False)
    for d in found.common:
        letters.factors[d.factor] = Factor(letters.factors[d.factor].size, True)
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
def _last_writes(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape = avals[0].shape
    found = _dims(letters, params["template"], shape, [a.shape for a in avals[1:]], reading=True)
    # Which write came last is known only where all of them, and all that they may hit, are seen.
    for f in {*(d.factor for d in found.common), *found.looked_up}:
        letters.factors[f] = Factor(letters.factors[f].size, True)
    part = PartCall(found.sliced, READ_PART, functools.partial(local_read, tuple(shape)))
    if not keys.is_basic(params["template"]):
        for f in found.sliced:
            letters.factors[f] = Factor(letters.factors[f].size, True)
        part = None
    return letters.rule([found.array, *found.indices], [found.part], [(0,)], part=part)
