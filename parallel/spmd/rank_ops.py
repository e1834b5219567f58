"""The ops of per-rank code, their derivatives, and their types.

A value inside :func:`meshtape.shard_map` *varies* along some mesh axes and is the same on all ranks of the others. The
tracer keeps track of that; only these ops change it. With V for "may differ between the ranks of the axis" and I for
"the same on all of
them", forward and backward come in pairs:

=======================  =======  ==========================  ==================================================
forward                  type     backward                    remark
=======================  =======  ==========================  ==================================================
``vary`` (no message)    I → V    ``all_reduce``              put in by the tracer, where I meets V
``all_reduce``           V → I    ``vary`` (no message)       Megatron's *g*; *f* is ``vary``
``all_gather``           V → I    ``slice`` (no message)
``all_gather``, varying  V → V    ``reduce_scatter``          where what was gathered meets V: FSDP's parameters
``reduce_scatter``       V → V    ``all_gather``, varying
``slice`` (no message)   I → V    ``all_gather``
``all_to_all``           V → V    ``all_to_all``, transposed
``permute``              V → V    ``permute``, reversed
``broadcast``            V → I    zeros but on the source
=======================  =======  ==========================  ==================================================

The cotangent of an I value is I, that of a V value V: a gradient that still has to be reduced and one that is reduced already
cannot be taken for one another (JAX, *Autodiff and sharding*; Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply
from ...arrays.core.errors import MeshError
from ...arrays.core.op import Op
from ...arrays.core.shape_dtype import ShapeDtype
from ...autodiff.rules import defvjp
from ..resharding.collective_plans import Shape
from ..resharding.split_sizes import PartSizes
from ..sharding.ops import RankOp
from .rank_tracer import BlockTrace, RankTracer


def _together(xp: Any, *args: Any, **params: Any) -> Any:
    raise MeshError("a collective runs inside mt.shard_map only")


def _shaped(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    return ShapeDtype(params["shape"], args[0].dtype)


def _like_first(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    return args[0]


AXIS_INDEX = RankOp(
    "axis_index", (), lambda xp, value: np.asarray(value), lambda op, a, p: ShapeDtype((), np.dtype(int))
)
AXIS_INDEX.nondifferentiable = "integer result"
VARY = RankOp("vary", ("x",), lambda xp, x, axes: x, _like_first)
TIE = RankOp("tie", ("x", "token"), lambda xp, x, token: x, _like_first)
ALL_REDUCE = RankOp("all_reduce", ("x",), _together, _shaped)
ALL_REDUCE_BY = RankOp("all_reduce_by", ("x",), _together, _shaped)
ALL_GATHER = RankOp("all_gather", ("x",), _together, _shaped)
ALL_GATHER_VARYING = RankOp("all_gather_varying", ("x",), _together, _shaped)
REDUCE_SCATTER = RankOp("reduce_scatter", ("x",), _together, _shaped)
SLICE = RankOp("slice", ("x",), _together, _shaped)
ALL_TO_ALL = RankOp("all_to_all", ("x",), _together, _shaped)
PERMUTE = RankOp("permute", ("x",), _together, _shaped)
BROADCAST = RankOp("broadcast", ("x",), _together, _shaped)

SEND = RankOp("send", ("x",), _together, lambda op, a, p: ())
RECEIVE = RankOp("receive", (), _together, lambda op, a, p: ShapeDtype(p["shape"], p["dtype"]))
SEND.nout = 0

COLLECTIVES = {
    op: op.name for op in (ALL_REDUCE, ALL_REDUCE_BY, ALL_GATHER, REDUCE_SCATTER, SLICE, ALL_TO_ALL, PERMUTE, BROADCAST)
} | {ALL_REDUCE_BY: "all_reduce", ALL_GATHER_VARYING: "all_gather"}
"""Ops that are carried out as collectives, with the kind of each."""

MESSAGES = frozenset({SEND, RECEIVE})
"""Messages between two ranks. Their derivative is up to the code that uses them (the pipeline)."""

INVARIANT_RESULT = frozenset({ALL_REDUCE, ALL_REDUCE_BY, ALL_GATHER, BROADCAST})


# ----- the ops on Arrays of a trace: each meets the other ranks to learn their shapes -----------------------------------


def trace_of(x: Array) -> BlockTrace:
    """The per-rank code that a traced value belongs to."""
    return x._buf.builder


def sum_over(x: Array, axes: tuple[int, ...], op: str = "sum") -> Array:
    """V → I."""
    t = trace_of(x)
    x = t.varied(x, axes)
    t.meet("all_reduce", axes, (x.shape, x.dtype.name, op))
    if op == "sum":
        return t.settled(apply(ALL_REDUCE, (x,), {"axes": axes, "shape": x.shape}), axes)
    return t.settled(apply(ALL_REDUCE_BY, (x,), {"axes": axes, "shape": x.shape, "op": op}), axes)


def gather(x: Array, axes: tuple[int, ...], dim: int, *, varying: bool = False) -> Array:
    """V → I, or V → V where ``varying``."""
    t = trace_of(x)
    x = t.varied(x, axes)
    rest = (*x.shape[:dim], *x.shape[dim + 1 :])
    lengths = tuple(t.meet("all_gather", axes, (rest, x.dtype.name, dim), x.shape[dim]))
    shape = _with_length(x.shape, dim, sum(lengths))
    params = {"axes": axes, "shape": shape, "dim": dim, "lengths": lengths}
    if varying:
        return apply(ALL_GATHER_VARYING, (x,), params)
    return t.settled(apply(ALL_GATHER, (x,), params), axes)


def scatter_sum(x: Array, axes: tuple[int, ...], dim: int, lengths: tuple[int, ...]) -> Array:
    """V → V: the sum; each rank keeps a part of it."""
    t = trace_of(x)
    x = t.varied(x, axes)
    t.meet("reduce_scatter", axes, (x.shape, x.dtype.name, dim, lengths))
    shape = _with_length(x.shape, dim, lengths[_place(t, axes, len(set(lengths)) > 1)])
    return apply(REDUCE_SCATTER, (x,), {"axes": axes, "shape": shape, "dim": dim, "lengths": lengths, "op": "sum"})


def own_part(x: Array, axes: tuple[int, ...], dim: int, lengths: tuple[int, ...]) -> Array:
    """I → V: each rank's part of the common value."""
    t = trace_of(x)
    t.meet("slice", axes, (x.shape, x.dtype.name, dim, lengths))
    shape = _with_length(x.shape, dim, lengths[_place(t, axes, len(set(lengths)) > 1)])
    return apply(SLICE, (x,), {"axes": axes, "shape": shape, "dim": dim, "lengths": lengths})


def exchange(x: Array, axes: tuple[int, ...], split_dim: int, concat_dim: int, sizes: PartSizes) -> Array:
    """V → V: ranks send each other ``sizes`` of their ``split_dim``, and join what they get along ``concat_dim``."""
    t = trace_of(x)
    x = t.varied(x, axes)
    rest = tuple(n for d, n in enumerate(x.shape) if d not in (split_dim, concat_dim))
    what = (rest, x.ndim, x.dtype.name, split_dim, concat_dim, sizes)
    others = t.meet("all_to_all", axes, what, x.shape[concat_dim])
    me = _place(t, axes, len(sizes.rows) > 1 or len({*sizes.rows[0]}) > 1)
    if split_dim == concat_dim:
        shape = _with_length(x.shape, split_dim, sum(sizes.column(me)))
    else:
        if len({*sizes.kinds(me)}) > 1:
            raise MeshError(
                f"[all_to_all] rank {me} of the axis gets parts of lengths {list(sizes.column(me))} along dimension "
                f"{split_dim}, which cannot be joined along dimension {concat_dim}: they must be equal"
            )
        shape = _with_length(_with_length(x.shape, split_dim, sizes.rows[0][me]), concat_dim, sum(others))
    params = {"axes": axes, "shape": shape, "split_dim": split_dim, "concat_dim": concat_dim, "sizes": sizes}
    return apply(ALL_TO_ALL, (x,), params)


def send(x: Array, axes: tuple[int, ...], pairs: tuple[tuple[int, int], ...]) -> Array:
    """V → V: along the pairs (from, to); zeros where nothing is sent."""
    t = trace_of(x)
    x = t.varied(x, axes)
    shapes = t.meet("permute", axes, (x.ndim, x.dtype.name, pairs), x.shape)
    shape = x.shape
    if any(s != shapes[0] for s in shapes):
        me = _place(t, axes, True)
        shape = next((shapes[s] for s, d in pairs if d == me), x.shape)
    return apply(PERMUTE, (x,), {"axes": axes, "shape": shape, "pairs": pairs})


def from_one(x: Array, axes: tuple[int, ...], source: int) -> Array:
    """V → I: the value of one rank."""
    t = trace_of(x)
    x = t.varied(x, axes)
    shape, dtype = t.meet("broadcast", axes, (source,), (x.shape, x.dtype))[source]
    if dtype != x.dtype:
        x = x.astype(dtype)  # values of other ranks do not matter
    return t.settled(apply(BROADCAST, (x,), {"axes": axes, "shape": shape, "source": source}), axes)


def _place(t: BlockTrace, axes: tuple[int, ...], uneven: bool) -> int:
    """This rank's place in the group; ``uneven`` says that the shapes of results depend on it."""
    me = t.place(axes, uneven=uneven)
    if uneven:
        t.differ(axes)
    return me


AGAIN: dict[Op, Callable[[Array, Mapping[str, Any]], Array]] = {
    VARY: lambda x, p: trace_of(x).varied(x, p["axes"]),
    ALL_REDUCE: lambda x, p: sum_over(x, p["axes"]),
    ALL_REDUCE_BY: lambda x, p: sum_over(x, p["axes"], p["op"]),
    ALL_GATHER: lambda x, p: gather(x, p["axes"], p["dim"]),
    ALL_GATHER_VARYING: lambda x, p: gather(x, p["axes"], p["dim"], varying=True),
    REDUCE_SCATTER: lambda x, p: scatter_sum(x, p["axes"], p["dim"], p["lengths"]),
    SLICE: lambda x, p: own_part(x, p["axes"], p["dim"], p["lengths"]),
    ALL_TO_ALL: lambda x, p: exchange(x, p["axes"], p["split_dim"], p["concat_dim"], p["sizes"]),
    PERMUTE: lambda x, p: send(x, p["axes"], p["pairs"]),
    BROADCAST: lambda x, p: from_one(x, p["axes"], p["source"]),
}
"""The function that replays each op on another value."""


def _with_length(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


# ----- derivatives ----------------------------------------------------------------------------------------------------


def _settled(g: Array, axes: tuple[int, ...]) -> Array:
    """The cotangent of a value that is the same on all ranks: the sum where ranks have their own."""
    open_axes = tuple(a for a in axes if a in trace_of(g).axes_of_variation(g)) if in_trace(g) else ()
    return sum_over(g, open_axes) if open_axes else g


def in_trace(x: Any) -> bool:
    """Whether an array stands for a value of per-rank code."""
    return isinstance(x, Array) and isinstance(x._buf, RankTracer)


def _traced(g: Array, like: Array) -> Array:
    return g if in_trace(g) else trace_of(like).lift(g)


def _all_reduce_by(xp: Any, g: Any, x: Any, ans: Any, axes: tuple[int, ...], op: str) -> Any:
    g = _settled(_traced(g, x), axes)
    if op == "prod":
        # The product of the others: all values, with 1 in place of the own one.
        size = trace_of(x).group_size(axes)
        all_of_them = gather(x[None], axes, 0)
        mine = xp.arange(size) == trace_of(x).index(axes)
        mine = xp.reshape(mine, (size,) + (1,) * x.ndim)
        return g * xp.prod(xp.where(mine, 1, all_of_them), axis=0)
    hit = xp.astype(x == ans, x.dtype)  # ties share, however many ranks hold them
    return g * hit / sum_over(hit, axes)


def _broadcast(xp: Any, g: Any, axes: tuple[int, ...], source: int, x_like: ShapeDtype) -> Any:
    t = trace_of(g)
    g = t.varied(_settled(g, axes), axes)
    if g.shape != x_like.shape:  # only the source's shape is that of the result
        return t.varied(xp.zeros(x_like.shape, dtype=g.dtype), axes)
    return xp.where(t.index(axes) == source, g, 0.0)


defvjp(VARY, x=lambda xp, g, axes: sum_over(g, axes))
defvjp(TIE, x=lambda xp, g: g, token=lambda xp, g: None)
defvjp(ALL_REDUCE, x=lambda xp, g, axes: _settled(g, axes))
defvjp(ALL_REDUCE_BY, x=_all_reduce_by)


def _all_gather(xp: Any, g: Any, axes: tuple[int, ...], dim: int, lengths: tuple[int, ...]) -> Any:
    if any(a in trace_of(g).axes_of_variation(g) for a in axes):
        return scatter_sum(g, axes, dim, lengths)
    return own_part(g, axes, dim, lengths)


def _all_to_all(
    xp: Any, g: Any, axes: tuple[int, ...], split_dim: int, concat_dim: int, sizes: PartSizes, x_like: ShapeDtype
) -> Any:
    if split_dim == concat_dim:
        return exchange(g, axes, split_dim, split_dim, sizes.transposed())
    # The part from a rank was as long, along `concat_dim`, as that rank's own block.
    lengths = tuple(trace_of(g).meet("all_to_all vjp", axes, (split_dim, concat_dim), x_like.shape[concat_dim]))
    return exchange(g, axes, concat_dim, split_dim, PartSizes.alike(lengths, len(lengths)))


defvjp(ALL_GATHER, x=_all_gather)
defvjp(ALL_GATHER_VARYING, x=lambda xp, g, axes, dim, lengths: scatter_sum(g, axes, dim, lengths))
defvjp(REDUCE_SCATTER, x=lambda xp, g, axes, dim: gather(g, axes, dim, varying=True))
defvjp(SLICE, x=lambda xp, g, axes, dim: gather(g, axes, dim))
defvjp(ALL_TO_ALL, x=_all_to_all)
defvjp(PERMUTE, x=lambda xp, g, axes, pairs: send(g, axes, tuple((d, s) for s, d in pairs)))
defvjp(BROADCAST, x=_broadcast)
