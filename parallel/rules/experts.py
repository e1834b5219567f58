"""Factor mappings of networks of experts: rows are free; experts, and hidden units, which only meet in the last product, give parts of a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays import experts as e
from ...arrays._op import Op
from ...arrays.program import ShapeDtype
from ..factors import Dim, FactorRule, Letters, rule

Avals = Sequence[Any]
Params = Mapping[str, Any]


def _operands(letters: Letters, avals: Avals, reduce: str | None) -> list[tuple[Dim, ...]]:
    x, chosen, _, gate = avals[:4]
    rows = letters.many(x.shape[:-1], reduce=reduce)
    width, k = letters.new(x.shape[-1], whole=True), letters.new(chosen.shape[-1], whole=True)
    expert, hidden = letters.new(gate.shape[0], reduce="sum"), letters.new(gate.shape[2], reduce="sum")
    forth, back = (expert, width, hidden), (expert, hidden, width)
    return [(*rows, width), (*rows, k), (*rows, k), forth, forth, back, (expert,)]


@rule(e.EXPERTS)
def _experts(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    operands = _operands(letters, avals, None)
    return letters.rule(operands, [operands[0]], [(2,), (5,)])


@rule(e.EXPERTS_BACKWARD)
def _experts_backward(op: Op, avals: Avals, out_avals: Sequence[ShapeDtype], params: Params) -> FactorRule:
    letters = Letters()
    operands = _operands(letters, avals[1:], "sum")
    x, _, weights, gate, up, down, _ = operands
    return letters.rule([x, *operands], [x, weights, gate, up, down], [(0,)])
