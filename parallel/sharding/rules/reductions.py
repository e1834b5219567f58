"""Factor mappings of the reductions: a split reduced dimension leaves ``Partial(op)`` with the right operator."""

from __future__ import annotations

from ....arrays.core.op import Op
from ....arrays.linalg import float8
from ....arrays.reductions import reductions as r
from ..factors import Avals, FactorRule, Letters, Outs, Params, rule

# Ranks divide by the number of all elements, so that the mean is the sum of their contributions.
_REDUCE = {r.SUM: "sum", r.MEAN: "sum", r.PROD: "prod", r.MAX: "max", r.MIN: "min", r.ANY: "any", r.ALL: "all"}


@rule(*_REDUCE)
def _reduction(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    axis, keepdims = params["axis"], params["keepdims"]
    # Products of complex numbers are made in order: of infinite ones another order is NaN, and so is a product with 1.
    whole = op is r.PROD and avals[0].dtype.kind == "c"
    dims = tuple(
        letters.new(n, whole=whole, reduce=_REDUCE[op]) if i in axis else letters.new(n)
        for i, n in enumerate(avals[0].shape)
    )
    out = [None if i in axis else d for i, d in enumerate(dims) if keepdims or i not in axis]
    return letters.rule([dims], [out], [(0,)] if _REDUCE[op] == "sum" else [])


@rule(r.ARGMAX, r.ARGMIN)
def _arg(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    axis, keepdims = params["axis"], params["keepdims"]
    dims = tuple(letters.new(n, whole=i == axis) for i, n in enumerate(avals[0].shape))
    return letters.rule([dims], [[None if i == axis else d for i, d in enumerate(dims) if keepdims or i != axis]])


@rule(float8.FLOAT8_SCALE)
def _scale(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    shape = avals[0].shape  # ranks without a part have no scale; where nobody has one, it is that of no numbers
    return letters.rule([[letters.new(n, whole=0 in shape, reduce="max") for n in shape]], [[]])
