"""Factor mappings of the elementwise functions: dimensions align from the right; length-one dimensions broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....arrays.core.op import OPS, Op, ShapeDtype
from ....arrays.core.shape_rules import elementwise as elementwise_shape
from ....arrays.indexing.lazy_adam import LAZY_ADAM
from ....arrays.ops import elementwise as ew
from ..factors import Avals, FactorRule, Letters, Outs, Params, rule
from ..ops import RESHARD


def _linear(op: Op, avals: Sequence[Any], out_avals: Outs) -> list[tuple[int, ...]]:
    """The linear sets for these arguments. (A scalar that is added to a pending sum would be added once a rank.)"""
    arrays = {i for i, a in enumerate(avals) if isinstance(a, ShapeDtype)}
    out = []
    integers = out_avals[0].dtype.kind in "iu"
    # Of integers alone: where two floats cancel, or a rank has nothing, the sum is 0.0, and so it would be with the
    # sign turned.
    for group in () if op in (ew.SUBTRACT, ew.NEGATIVE) and not integers else op.linear:
        scalars = [avals[i] for i in group if i not in arrays]
        others = [a for i, a in enumerate(avals) if i not in group]
        if op in (ew.MULTIPLY, ew.DIVIDE) and not integers and not all(map(_scales, others)):
            continue
        if not scalars:
            out.append(group)
        elif op is ew.WHERE and all(s == 0 for s in scalars) and len(scalars) < len(group):
            out.append(tuple(i for i in group if i in arrays))
    if op is ew.ASTYPE:
        # Rounding contributions before they are summed loses digits: only a wider or equal float may pass.
        x, y = avals[0].dtype, out_avals[0].dtype
        if not (x.kind == y.kind and x.kind in "fc" and y.itemsize >= max(x.itemsize, 4)):
            return []
    return out


def _scales(factor: Any) -> bool:
    """Whether scaling commutes with a sum of floats. Contributions may be zero or infinite where the sum is neither: a
    zero or non-finite factor makes NaN of them, and a negative one changes the sign of a zero. Values of arrays are
    unknown."""
    return not isinstance(factor, ShapeDtype | complex) and 0 < factor < math.inf


def _elementwise(letters: Letters, op: Op, avals: Avals, outs: Outs, params: Params) -> FactorRule:
    out = letters.many(outs[0].shape)
    operands = [letters.aligned(out, a.shape) if isinstance(a, ShapeDtype) else () for a in avals]
    return letters.rule(operands, [out] * op.nout, _linear(op, avals, outs), valueless=op.name == "full_like")


ELEMENTWISE = tuple(
    op
    for op in OPS.values()
    if op.infer in (elementwise_shape, ew._infer_astype) or op in (ew.STOP_GRADIENT, ew.ALIAS, ew.BARRIER)
)
rule(*ELEMENTWISE, RESHARD, LAZY_ADAM)(_elementwise)
