"""Factor mappings of the random functions: an element is a function of the key and its place, so that any rank can make
any block.

The key is whole on every rank. The dimensions of a draw are factors that no operand has: nothing proposes to split
them, so a draw is first replicated, and a rank that needs a part of one makes just that part (``FactorRule.made``).
"""

from __future__ import annotations

from ....arrays.core.op import Op, ShapeDtype
from ....arrays.nn import dropout
from ....arrays.random.draw import BY_PLACE
from ....arrays.random.keys import FOLD_IN
from ....arrays.random.permutations import CHOICE, PERMUTATION
from ..factors import Avals, FactorRule, Letters, Outs, Params, RankView, replicated_rule, rule


def _local_block(params: Params, view: RankView) -> Params:
    box = view.results[0]
    return {**params, "shape": box.shape, "offset": box.offset}


@rule(*BY_PLACE, PERMUTATION, CHOICE)
def _draw(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    operands = [letters.many(a.shape, whole=True) if isinstance(a, ShapeDtype) else () for a in avals]
    return letters.rule(operands, [letters.many(outs[0].shape)], localize=_local_block, made=True)


@rule(FOLD_IN)
def _key(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    return replicated_rule(avals, outs)


@rule(dropout.DROPOUT, dropout.DROPOUT_ADD)
def _dropout(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    x, key = letters.many(outs[0].shape), letters.many(avals[-1].shape, whole=True)

    def local(params: Params, view: RankView) -> Params:
        return {**params, "offset": view.results[0].offset}

    arrays = len(avals) - 1
    return letters.rule([*[x] * arrays, key], [x], [range(arrays)], local)
