"""Factor mappings of networks of experts.

Rows may be split freely. Split experts or hidden units, which only meet in the last product, leave a pending sum. Where
an axis splits rows and experts alike, rows are sent to the ranks of their experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....arrays.core.op import Op
from ....arrays.nn import mixture_of_experts as e
from ..factors import Avals, Dim, ExpertExchange, FactorRule, Letters, Outs, Params, rule


def _operands(letters: Letters, avals: Avals, reduce: str | None) -> list[tuple[Dim, ...]]:
    x, chosen, _, gate = avals[:4]
    rows = letters.many(x.shape[:-1], reduce=reduce)
    width, k = letters.new(x.shape[-1], whole=True), letters.new(chosen.shape[-1], whole=True)
    expert, hidden = letters.new(gate.shape[0], reduce="sum"), letters.new(gate.shape[2], reduce="sum")
    forth, back = (expert, width, hidden), (expert, hidden, width)
    return [(*rows, width), (*rows, k), (*rows, k), forth, forth, back, (expert,)]


def _exchange(operands: Sequence[tuple[Dim, ...]], chosen: int) -> ExpertExchange:
    (expert,) = operands[-1]
    rows = frozenset(d.factor for d in operands[0][:-1])
    return ExpertExchange(rows, expert.factor, chosen, chosen + len(operands) - 2)


@rule(e.EXPERTS)
def _experts(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    operands = _operands(letters, avals, None)
    return letters.rule(operands, [operands[0]], exchange=_exchange(operands, 1))


@rule(e.EXPERTS_BACKWARD)
def _experts_backward(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    operands = _operands(letters, avals[1:], "sum")
    x, _, weights, gate, up, down, _ = operands
    return letters.rule([x, *operands], [x, weights, gate, up, down], exchange=_exchange(operands, 2))
