"""Factor mappings of the softmax family. Rows stay whole; where their dimension is split, the op is decomposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....arrays.core.op import Op, ShapeDtype
from ....arrays.nn import cross_entropy as ce
from ....arrays.nn import linear_cross_entropy as lce
from ....arrays.nn import softmax as s
from ..factors import FactorRule, Letters, RankView, rule

Avals = Sequence[Any]
Params = Mapping[str, Any]


@rule(s.SOFTMAX, s.LOG_SOFTMAX, s.SOFTMAX_BACKWARD, s.LOG_SOFTMAX_BACKWARD)
def _softmax(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    dims = tuple(letters.new(n, whole=i == params["axis"]) for i, n in enumerate(out_avals[0].shape))
    return letters.rule([dims] * len(avals), [dims], [(0,)] if len(avals) == 2 else [])


@rule(ce.CROSS_ENTROPY)
def _cross_entropy(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    batch, classes = letters.many(avals[1].shape), letters.new(avals[0].shape[-1], whole=True)
    return letters.rule([(*batch, classes), batch], [batch])


@rule(ce.CROSS_ENTROPY_BACKWARD)
def _cross_entropy_backward(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    batch, classes = letters.many(avals[2].shape), letters.new(avals[1].shape[-1], whole=True)
    return letters.rule([batch, (*batch, classes), batch], [(*batch, classes)], [(0,)])


@rule(lce.LINEAR_CROSS_ENTROPY)
def _linear_cross_entropy(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    batch, (width, classes) = letters.many(avals[2].shape), letters.many(avals[1].shape, whole=True)
    return letters.rule([(*batch, width), (width, classes), batch], [batch, batch])


@rule(lce.LINEAR_CROSS_ENTROPY_BACKWARD)
def _linear_cross_entropy_backward(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    batch = letters.many(avals[4].shape, reduce="sum")
    width, classes = letters.many(avals[3].shape, whole=True)
    hidden, weight = (*batch, width), (width, classes)
    return letters.rule([batch, batch, hidden, weight, batch, batch], [hidden, weight], [(0, 1)])


def _local_start(params: Params, view: RankView) -> Params:
    return {**params, "start": params["start"] + view.results[0].offset[params["axis"]]}


@rule(ce.POSITIONS)
def _positions(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    dims = letters.many(avals[0].shape)
    return letters.rule([dims], [dims], localize=_local_start, valueless=True)
