"""Factor mappings of the elementwise functions: dimensions align from the right; length-one dimensions broadcast."""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays import elementwise as ew
from ...arrays._infer import elementwise as elementwise_shape
from ...arrays._op import OPS, Op
from ...arrays.adam import LAZY_ADAM
from ...arrays.program import ShapeDtype
from ..factors import FactorRule, Letters, rule
from ..ops import RESHARD

# Sets of operands in which an op is jointly linear, by name.
_LINEAR: dict[Op, tuple[tuple[int, ...], ...]] = {
    ew.ADD: ((0, 1),),
    ew.SUBTRACT: ((0, 1),),
    ew.MULTIPLY: ((0,), (1,)),
    ew.DIVIDE: ((0,),),
    ew.NEGATIVE: ((0,),),
    ew.POSITIVE: ((0,),),
    ew.ALIAS: ((0,),),
    ew.BARRIER: ((0,),),
    ew.STOP_GRADIENT: ((0,),),
    ew.CONJ: ((0,),),
    ew.REAL: ((0,),),
    ew.IMAG: ((0,),),
    ew.WHERE: ((1, 2),),
    ew.ASTYPE: ((0,),),
    RESHARD: ((0,),),
}


def _linear(op: Op, avals: Sequence[Any], out_avals: Sequence[ShapeDtype]) -> list[tuple[int, ...]]:
    """The linear sets that hold for these arguments: a scalar beside a sum would be added once a rank."""
    arrays = {i for i, a in enumerate(avals) if isinstance(a, ShapeDtype)}
    out = []
    for group in _LINEAR.get(op, ()):
        scalars = [avals[i] for i in group if i not in arrays]
        others = [a for i, a in enumerate(avals) if i not in group]
        if op in (ew.MULTIPLY, ew.DIVIDE) and not all(_scales(op, a) for a in others):
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


def _scales(op: Op, factor: Any) -> bool:
    """Whether the sum of what is scaled is the scaled sum. Parts may be zero or infinite where the sum is neither: a factor that is
    zero or not finite makes NaN of them. A single number that is known only when the program runs may be one; so may a divisor."""
    if isinstance(factor, ShapeDtype):
        return op is ew.MULTIPLY and math.prod(factor.shape) != 1
    return factor != 0 and cmath.isfinite(factor)


def _elementwise(
    op: Op, avals: Sequence[Any], out_avals: Sequence[ShapeDtype], params: Mapping[str, Any]
) -> FactorRule:
    letters = Letters()
    shape = out_avals[0].shape
    out = letters.many(shape)
    operands = []
    for a in avals:
        if not isinstance(a, ShapeDtype):
            operands.append(())
            continue
        lead = len(shape) - len(a.shape)
        operands.append(tuple(out[lead + i] if n == shape[lead + i] else None for i, n in enumerate(a.shape)))
    return letters.rule(operands, [out] * op.nout, _linear(op, avals, out_avals), valueless=op.name == "full_like")


ELEMENTWISE = tuple(
    op
    for op in OPS.values()
    if op.infer in (elementwise_shape, ew._infer_astype) or op in (ew.STOP_GRADIENT, ew.ALIAS, ew.BARRIER)
)
rule(*ELEMENTWISE, RESHARD, LAZY_ADAM)(_elementwise)
