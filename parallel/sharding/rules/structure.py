"""Factor mappings of manipulation, matrix products and normalisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ....arrays.core.op import Op
from ....arrays.linalg import float8
from ....arrays.nn.norms import batch_norm, group_norm, layer_norm
from ....arrays.ops import manipulation as m
from ....arrays.ops import matmul
from ..factors import Avals, Dim, FactorRule, Letters, Outs, Params, PartCall, RankView, bilinear, rule
from ..halos import Halo

# ----- shapes ---------------------------------------------------------------------------------------------------------


def _local_shape(params: Params, view: RankView) -> Params:
    return {**params, "shape": view.results[0].shape}


@rule(m.RESHAPE)
def _reshape(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    """Dimensions are matched in runs of equal products; the leading one of a run may stay split, where the split falls
    on whole rows of the rest of the run: 12 as 4×3 in four blocks of 3, 6×4 as 8×3 in two of 12."""
    source, target = avals[0].shape, outs[0].shape
    src: list[Dim | None] = [None] * len(source)
    dst: list[Dim | None] = [None] * len(target)
    if math.prod(source):
        for a, b in _groups(source, target):
            lead_a = next((i for i in a if source[i] != 1), None)
            lead_b = next((i for i in b if target[i] != 1), None)
            if lead_a is None or lead_b is None:
                continue
            size = math.gcd(source[lead_a], target[lead_b])
            if size > 1:
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
def _permute(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    dims = letters.many(avals[0].shape)
    return letters.rule([dims], [[dims[a] for a in params["axes"]]], [(0,)])


@rule(m.BROADCAST_TO)
def _broadcast(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    out = letters.many(outs[0].shape)
    return letters.rule([letters.aligned(out, avals[0].shape)], [out], [(0,)], _local_shape, made=True)


def _as_it_is(params: Params, view: RankView) -> Params:
    return params


@rule(m.FLIP)
def _flip(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    """A rank's block of the result is the mirror image of a part of the operand, which it fetches."""
    shape, axes = avals[0].shape, [d % len(avals[0].shape) for d in params["axis"]]
    out = letters.many(shape)
    dims = [
        Dim(d.factor, 1, Halo("slice", (n - 1, -1))) if i in axes else d
        for i, (d, n) in enumerate(zip(out, shape, strict=True))
    ]
    part = PartCall(frozenset(out[i].factor for i in axes), op, _as_it_is)
    return letters.rule([dims], [out], [(0,)], part=part)


@rule(m.CONCAT)
def _concat(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    """Each rank fetches those parts of the operands that its block of the result is made of."""
    out = letters.many(outs[0].shape)
    axis, at = params["axis"] % len(out), 0
    operands = []
    for a in avals:
        n = a.shape[axis]
        joined = Dim(out[axis].factor, 1, Halo("join", (at, n)))
        operands.append([joined if i == axis else d for i, d in enumerate(out)])
        at += n
    part = PartCall(frozenset({out[axis].factor}), op, _as_it_is)
    return letters.rule(operands, [out], [range(len(avals))], part=part)


# ----- products -------------------------------------------------------------------------------------------------------


@rule(matmul.MATMUL, float8.FLOAT8_MATMUL)
def _matmul(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    x, y = avals[0].shape, avals[1].shape
    out_shape = outs[0].shape
    k = letters.new(x[-1], reduce="sum")
    rows = (letters.new(x[-2]),) if len(x) > 1 else ()
    cols = (letters.new(y[-1]),) if len(y) > 1 else ()
    batch = letters.many(out_shape[: len(out_shape) - len(rows) - len(cols)])
    a = [*letters.aligned(batch, x[:-2]), *rows, k]
    b = [*letters.aligned(batch, y[:-2]), k, *cols] if len(y) > 1 else [k]
    return letters.rule([a, b, *[()] * (len(avals) - 2)], [[*batch, *rows, *cols]], bilinear(outs))


# ----- norms ----------------------------------------------------------------------------------------------------------


@rule(layer_norm.LAYER_NORM, layer_norm.RMS_NORM, layer_norm.LAYER_NORM_BACKWARD, layer_norm.RMS_NORM_BACKWARD)
@rule(layer_norm.ADD_LAYER_NORM, layer_norm.ADD_RMS_NORM)
def _row_norm(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    shape = outs[0].shape
    split = len(shape) - params["naxes"]
    batch, inner = letters.many(shape[:split], reduce="sum"), letters.many(shape[split:], whole=True)
    x = (*batch, *inner)
    operands = [inner if name in ("weight", "bias") else x for name in op.operands[: len(avals)]]
    return letters.rule(operands, [x, *[inner if "g" in op.operands else x] * (len(outs) - 1)])


def _local_groups(inside: int, params: Params, view: RankView) -> Params:
    """As many groups as a rank has; one where it has no channel."""
    return {**params, "num_groups": max(view.results[0].shape[params["axis"]] // inside, 1)}


@rule(group_norm.GROUP_NORM, group_norm.GROUP_NORM_BACKWARD)
def _group_norm(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    """Samples, and channels in groups that stay together; the places are whole."""
    shape, groups, axis = outs[0].shape, params["num_groups"], params["axis"]
    x = [letters.new(n, whole=True) if i else letters.new(n, reduce="sum") for i, n in enumerate(shape)]
    if shape[axis]:
        x[axis] = Dim(letters.new(groups).factor, shape[axis] // groups)
    c = (x[axis],)
    local = functools.partial(_local_groups, max(shape[axis] // groups, 1))
    if op is group_norm.GROUP_NORM:
        return letters.rule([x, c, c], [x], localize=local)
    return letters.rule([x, x, c], [x, c, c], localize=local)


@rule(batch_norm.BATCH_NORM, batch_norm.BATCH_NORM_BACKWARD, batch_norm.BATCH_NORM_INFERENCE)
def _batch_norm(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    """Channels may be split; in inference all else, too."""
    inference, axis = op is batch_norm.BATCH_NORM_INFERENCE, params["axis"]
    x = [letters.new(n, whole=not inference and i != axis) for i, n in enumerate(outs[0].shape)]
    c = (x[axis],)
    if inference:
        return letters.rule([x, c, c, c, c], [x])
    if op is batch_norm.BATCH_NORM:
        return letters.rule([x, c, c, c, c], [x, c, c, c, c])
    return letters.rule([x, c, c, c, c, x, c], [x, c, c])
