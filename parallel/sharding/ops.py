"""Ops of meshes: ``reshard``, and the class of ops that exist only in rank programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...arrays.core.op import Infer, Op
from ...arrays.core.shape_rules import same
from ...arrays.ops.param_kinds import NOTHING
from ...autodiff.rules import defvjp

RESHARD = Op(
    "reshard", ("x",), lambda xp, x, layout: x, same, params={"layout": NOTHING}, view="always", linear=((0,),)
)
"""The same value in another layout. On an array in one place it does nothing. The partitioner reads ``layout``
itself."""

# The cotangent of a value needs no particular layout: its next use determines it.
defvjp(RESHARD, x=lambda xp, g: g)


RANK_OPS: dict[str, Op] = {}


def rank_op_named(name: str) -> Op:
    """The op of per-rank code called ``name``: how it comes back in another process."""
    return RANK_OPS[name]


@dataclass(eq=False, repr=False, slots=True)
class RankOp(Op):
    """An op that exists inside per-rank code alone: it is in no table of ops, and in no saved program. The shape of its
    result, where a rank does not need it or finds it out, is that of its first operand.

    It may be a ``collective`` of this kind; ``invariant`` says whether all ranks of the axis then have the same result.
    """

    table: ClassVar[dict[str, Op]] = RANK_OPS
    infer: Infer = same
    collective: str = ""
    invariant: bool = False

    def __reduce__(self) -> Any:
        return rank_op_named, (self.name,)
