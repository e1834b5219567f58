"""Factor mappings of the softmax family, attention and rotary positions. Rows stay whole; where their dimension is
split, the op is decomposed."""

from __future__ import annotations

import numpy as np

from ....arrays.core.op import Op
from ....arrays.nn import attention as a
from ....arrays.nn import cross_entropy as ce
from ....arrays.nn import linear_cross_entropy as lce
from ....arrays.nn import rotary
from ....arrays.nn import softmax as s
from ..factors import Avals, FactorRule, Letters, Outs, Params, RankView, rule


@rule(s.SOFTMAX, s.LOG_SOFTMAX, s.SOFTMAX_BACKWARD, s.LOG_SOFTMAX_BACKWARD)
def _softmax(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    dims = tuple(letters.new(n, whole=i == params["axis"]) for i, n in enumerate(outs[0].shape))
    return letters.rule([dims] * len(avals), [dims], [(0,)] if len(avals) == 2 else [])


@rule(ce.CROSS_ENTROPY, ce.CROSS_ENTROPY_BACKWARD)
def _cross_entropy(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    logits, labels = avals if op is ce.CROSS_ENTROPY else avals[1:3]
    batch, classes = letters.many(labels.shape), letters.new(logits.shape[-1], whole=True)
    rows = (*batch, classes)
    if op is ce.CROSS_ENTROPY:
        return letters.rule([rows, batch], [batch] * 3)
    return letters.rule([batch, rows, batch, batch, batch], [rows], [(0,)])


@rule(lce.LINEAR_CROSS_ENTROPY, lce.LINEAR_CROSS_ENTROPY_BACKWARD)
def _linear_cross_entropy(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    _, weights, labels = avals[:3] if op is lce.LINEAR_CROSS_ENTROPY else avals[1:4]
    batch, weight = letters.many(labels.shape, reduce="sum"), letters.many(weights.shape, whole=True)
    hidden = (*batch, weight[0])
    if op is lce.LINEAR_CROSS_ENTROPY:
        return letters.rule([hidden, weight, batch], [batch] * 3)
    return letters.rule([batch, hidden, weight, batch, batch, batch], [hidden, weight], [(0,)])


def _local_start(params: Params, view: RankView) -> Params:
    return {**params, "start": params["start"] + view.results[0].offset[params["axis"]]}


@rule(ce.POSITIONS)
def _positions(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    dims = letters.many(avals[0].shape)
    return letters.rule([dims], [dims], localize=_local_start, valueless=True)


@rule(a.ATTENTION, a.ATTENTION_BACKWARD, a.ATTENTION_BIAS_BACKWARD)
def _attention(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    inputs = avals if op is a.ATTENTION else avals[1:4] + avals[7:]
    q, k, v, *_ = inputs
    lead = np.broadcast_shapes(*(x.shape[:-2] for x in inputs))
    batch, rows = letters.many(lead, reduce="sum"), letters.new(q.shape[-2], reduce="sum")
    cols, width, columns = (letters.new(n, whole=True) for n in (*k.shape[-2:], v.shape[-1]))
    full = [(*batch, *last) for last in ((rows, width), (cols, width), (cols, columns), (rows, cols))]
    operands = [letters.aligned(dims, x.shape) for x, dims in zip(inputs, full, strict=False)]
    results = [*batch, rows, columns], [*batch, rows], [*batch, rows]
    at = op is not a.ATTENTION  # of the query

    def local(params: Params, view: RankView) -> Params:
        rows = view.operands[at]
        if params["diagonal"] is None or rows is None:
            return params
        return {**params, "diagonal": params["diagonal"] + rows.offset[-2]}

    if op is a.ATTENTION:
        return letters.rule(operands, results, localize=local)
    return letters.rule([results[0], *operands[:3], *results, *operands[3:]], operands[: len(outs)], localize=local)


@rule(rotary.ROTARY_EMBEDDING)
def _rotary_embedding(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    x, *tables = avals
    rows = letters.many(x.shape[:-1])
    width, pairs = letters.new(x.shape[-1], whole=True), letters.new(x.shape[-1] // 2, whole=True)
    own = [letters.aligned((*rows, pairs), t.shape) for t in tables]
    return letters.rule([(*rows, width), *own], [(*rows, width)])
