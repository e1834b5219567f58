"""Factor mappings of the functions that rearrange, index, multiply and normalise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays import indexing as ix
from ...arrays import manipulation as m
from ...arrays import batch_norms, channel_norms, norms, products
from ...arrays._op import Op
from ...arrays.program import ShapeDtype
from ..factors import Dim, FactorRule, Letters, RankView, rule

Avals = Sequence[Any]
Params = Mapping[str, Any]

# ----- shapes ---------------------------------------------------------------------------------------------------------


def _local_shape(params: Params, view: RankView) -> Params:
    return {**params, "shape": view.results[0].shape}


@rule(m.RESHAPE)
def _reshape(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    """Dimensions are matched in groups of equal products; the leading one of a group may stay split, where the split falls on
    whole rows of the rest of the group."""
    letters = Letters()
    source, target = avals[0].shape, out_avals[0].shape
    src: list[Dim | None] = [None] * len(source)
    dst: list[Dim | None] = [None] * len(target)
    if math.prod(source):
        for a, b in _groups(source, target):
            lead_a = next((i for i in a if source[i] != 1), None)
            lead_b = next((i for i in b if target[i] != 1), None)
            if lead_a is None or lead_b is None:
                continue
            size = math.gcd(source[lead_a], target[lead_b])
            # Splitting a dimension (12 → 4×3) or merging (4×3 → 12): the shorter leading length is the factor.
            if size in (source[lead_a], target[lead_b]):
                f = letters.new(size)
                src[lead_a] = Dim(f.factor, source[lead_a] // size)
                dst[lead_b] = Dim(f.factor, target[lead_b] // size)
    return letters.rule([src], [dst], [(0,)], _local_shape)


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dimensions of both shapes with equal products."""
    out, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        a, b, p, q = [], [], 1, 1
        if i < len(source):
            a, p, i = [i], source[i], i + 1
        if j < len(target):
            b, q, j = [j], target[j], j + 1
        while p != q:
            if p < q:
                a.append(i)
                p, i = p * source[i], i + 1
            else:
                b.append(j)
                q, j = q * target[j], j + 1
        out.append((a, b))
    return out


@rule(m.PERMUTE_DIMS)
def _permute(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    dims = letters.many(avals[0].shape)
    return letters.rule([dims], [[dims[a] for a in params["axes"]]], [(0,)])


@rule(m.BROADCAST_TO)
def _broadcast(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape = out_avals[0].shape
    out = letters.many(shape)
    lead = len(shape) - len(avals[0].shape)
    dims = [out[lead + i] if n == shape[lead + i] else None for i, n in enumerate(avals[0].shape)]
    return letters.rule([dims], [out], [(0,)], _local_shape)


@rule(m.FLIP)
def _flip(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    dims = [letters.new(n, whole=i in params["axis"]) for i, n in enumerate(avals[0].shape)]
    return letters.rule([dims], [dims], [(0,)])


@rule(m.CONCAT)
def _concat(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    axis = params["axis"]
    out = [letters.new(n, whole=i == axis) for i, n in enumerate(out_avals[0].shape)]
    operands = [[letters.new(n, whole=True) if i == axis else out[i] for i, n in enumerate(a.shape)] for a in avals]
    return letters.rule(operands, [out], [range(len(avals))])


# ----- products -------------------------------------------------------------------------------------------------------


@rule(products.MATMUL)
def _matmul(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, y = avals[0].shape, avals[1].shape
    out_shape = out_avals[0].shape
    k = letters.new(x[-1], reduce="sum")
    rows = (letters.new(x[-2]),) if len(x) > 1 else ()
    cols = (letters.new(y[-1]),) if len(y) > 1 else ()
    batch = letters.many(out_shape[: len(out_shape) - len(rows) - len(cols)])

    def lead(shape: Sequence[int]) -> list[Dim | None]:
        own = shape[:-2]
        at = len(batch) - len(own)
        return [batch[at + i] if n == letters.factors[batch[at + i].factor].size else None for i, n in enumerate(own)]

    a = [*lead(x), *rows, k]
    b = [*lead(y), k, *cols] if len(y) > 1 else [k]
    return letters.rule([a, b], [[*batch, *rows, *cols]], [(0,), (1,)])


# ----- indexing -------------------------------------------------------------------------------------------------------


def _index_dims(
    letters: Letters, template: ix.Template, shape: Sequence[int], index_shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Dim | None], list[list[Dim | None]], list[Dim | None]]:
    """Dims of the array, of each index array, and of the indexed part. A dimension taken whole by a full slice may be split;
    what is sliced or looked up stays whole; the index arrays' own dimensions may be split, since each position is looked up
    on its own."""
    array_dims: list[Dim | None] = []
    out: list[Dim | None] = []
    truths = [(int(p.value),) for p in template if isinstance(p, ix.Truth)]
    advanced = not ix.is_basic(template)
    # A boolean in the key is an index array of its own, of fixed length: the others cannot then be split beside it.
    common = letters.many(np.broadcast_shapes(*index_shapes, *truths), whole=bool(truths)) if advanced else ()
    joined = [i for i, p in enumerate(template) if isinstance(p, ix.Slot | ix.Truth | int)]
    together = bool(joined) and joined == list(range(joined[0], joined[-1] + 1))
    front: int | None = None
    axis = 0
    for p in template:
        if p is None:
            out.append(None)
            continue
        if isinstance(p, ix.Gap):
            continue
        if isinstance(p, ix.Span):
            if p in (ix.Span(None, None, None), ix.Span(0, shape[axis], 1), ix.Span(None, None, 1)):
                d = letters.new(shape[axis])
                array_dims.append(d)
                out.append(d)
            else:
                array_dims.append(letters.new(shape[axis], whole=True))
                out.append(None)
            axis += 1
            continue
        if advanced and front is None:
            front = len(out)
        if not isinstance(p, ix.Truth):
            array_dims.append(letters.new(shape[axis], whole=True))
            axis += 1
    if advanced:
        at = front if together and front is not None else 0
        out[at:at] = common
    index_dims = []
    for s in index_shapes:
        lead = len(common) - len(s)
        index_dims.append(
            [common[lead + i] if n == letters.factors[common[lead + i].factor].size else None for i, n in enumerate(s)]
        )
    return array_dims, index_dims, out


@rule(ix.GETITEM)
def _getitem(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, indices, out = _index_dims(letters, params["template"], avals[0].shape, [a.shape for a in avals[1:]])
    return letters.rule([x, *indices], [out], [(0,)])


@rule(ix.SCATTER)
def _scatter(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    # The transpose of getitem: a split dimension of the index arrays leaves every rank with some of the additions.
    letters = Letters()
    x, indices, part = _index_dims(letters, params["template"], out_avals[0].shape, [a.shape for a in avals[1:]])
    _reduce_unshared(letters, [x])
    return letters.rule([part, *indices], [x], [(0,)], _local_shape)


def _reduce_unshared(letters: Letters, results: Sequence[Sequence[Dim | None]]) -> None:
    """Factors that no result has are summed."""
    kept = {d.factor for r in results for d in r if d is not None}
    for i, f in enumerate(letters.factors):
        if i not in kept and not f.whole:
            letters.factors[i] = type(f)(f.size, False, "sum")


_ADDING = (ix.INDEX_SET, ix.INDEX_ADD)


@rule(*_ADDING, ix.INDEX_MIN, ix.INDEX_MAX)
def _index_write(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    index_shapes = [a.shape for a in avals[2:]]
    x, indices, part = _index_dims(letters, params["template"], avals[0].shape, index_shapes)
    # Writes of different ranks to one place have an order only where one rank makes them all.
    looked_up = {d.factor for dims in indices for d in dims if d is not None}
    for f in looked_up:
        letters.factors[f] = type(letters.factors[f])(letters.factors[f].size, True)
    value = avals[1]
    if not isinstance(value, ShapeDtype):
        return letters.rule([x, (), *indices], [x], [(0,)] if value == 0 and op in _ADDING else [])
    sizes = ix.result_shape(params["template"], avals[0].shape, index_shapes)
    lead = len(sizes) - len(value.shape)
    v = [part[lead + i] if lead + i >= 0 and n == sizes[lead + i] else None for i, n in enumerate(value.shape)]
    return letters.rule([x, v, *indices], [x], [(0, 1)] if op in _ADDING else [])


@rule(ix.LAST_WRITES)
def _last_writes(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, indices, out = _index_dims(letters, params["template"], avals[0].shape, [a.shape for a in avals[1:]])
    # Which write came last is known only where all of them are seen.
    for dims in indices:
        for d in dims:
            if d is not None:
                letters.factors[d.factor] = type(letters.factors[d.factor])(letters.factors[d.factor].size, True)
    return letters.rule([x, *indices], [out], [(0,)])


# ----- norms ----------------------------------------------------------------------------------------------------------


@rule(norms.LAYER_NORM, norms.RMS_NORM)
def _row_norm(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape, n = avals[0].shape, params["naxes"]
    batch = letters.many(shape[: len(shape) - n])
    inner = letters.many(shape[len(shape) - n :], whole=True)
    return letters.rule([(*batch, *inner), *[inner] * (len(avals) - 1)], [(*batch, *inner)])


@rule(norms.LAYER_NORM_BACKWARD, norms.RMS_NORM_BACKWARD)
def _row_norm_backward(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape, n = avals[1].shape, params["naxes"]
    batch = letters.many(shape[: len(shape) - n], reduce="sum")
    inner = letters.many(shape[len(shape) - n :], whole=True)
    x = (*batch, *inner)
    return letters.rule([x, x, inner], [x, *[inner] * (len(out_avals) - 1)], [(0,)])


@rule(channel_norms.GROUP_NORM)
def _group_norm(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x = (letters.new(avals[0].shape[0]), *letters.many(avals[0].shape[1:], whole=True))
    c = (x[params["axis"]],)
    return letters.rule([x, c, c], [x])


@rule(channel_norms.GROUP_NORM_BACKWARD)
def _group_norm_backward(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    shape = avals[1].shape
    x = (letters.new(shape[0], reduce="sum"), *letters.many(shape[1:], whole=True))
    c = (x[params["axis"]],)
    return letters.rule([x, x, c], [x, c, c], [(0,)])


def _by_channel(letters: Letters, shape: Sequence[int], axis: int, whole: bool) -> tuple[list[Dim], tuple[Dim, ...]]:
    """Dims of images whose channels may be split, and those of a number a channel."""
    x = [letters.new(n, whole=whole and i != axis) for i, n in enumerate(shape)]
    return x, (x[axis],)


@rule(batch_norms.BATCH_NORM, batch_norms.BATCH_NORM_BACKWARD)
def _batch_norm(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, c = _by_channel(letters, out_avals[0].shape, params["axis"], whole=True)
    if op is batch_norms.BATCH_NORM:
        return letters.rule([x, c, c], [x, c, c])
    return letters.rule([x, c, c, x, c], [x, c, c], [(0, 1, 2)])


@rule(batch_norms.BATCH_NORM_INFERENCE)
def _batch_norm_inference(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    x, c = _by_channel(letters, avals[0].shape, params["axis"], whole=False)
    return letters.rule([x, c, c, c, c], [x])
