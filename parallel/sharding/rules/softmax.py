"""Factor mappings of the softmax family. Rows stay whole; where their dimension is split, the op is decomposed."""

from __future__ import annotations

from ....arrays.core.op import Op
from ....arrays.nn import cross_entropy as ce
from ....arrays.nn import softmax as s
from ..factors import Avals, FactorRule, Letters, Outs, Params, RankView, rule


@rule(s.SOFTMAX, s.LOG_SOFTMAX, s.SOFTMAX_BACKWARD, s.LOG_SOFTMAX_BACKWARD)
def _softmax(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    dims = tuple(letters.new(n, whole=i == params["axis"]) for i, n in enumerate(outs[0].shape))
    return letters.rule([dims] * len(avals), [dims], [(0,)] if len(avals) == 2 else [])


@rule(ce.CROSS_ENTROPY)
def _cross_entropy(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    batch, classes = letters.many(avals[1].shape), letters.new(avals[0].shape[-1], whole=True)
    return letters.rule([(*batch, classes), batch], [batch])


@rule(ce.CROSS_ENTROPY_BACKWARD)
def _cross_entropy_backward(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    batch, classes = letters.many(avals[2].shape), letters.new(avals[1].shape[-1], whole=True)
    return letters.rule([batch, (*batch, classes), batch], [(*batch, classes)], [(0,)])


def _local_start(params: Params, view: RankView) -> Params:
    return {**params, "start": params["start"] + view.results[0].offset[params["axis"]]}


@rule(ce.POSITIONS)
def _positions(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    dims = letters.many(avals[0].shape)
    return letters.rule([dims], [dims], localize=_local_start, valueless=True)
