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

The cotangent of an I value is I, that of a V value V: a gradient that still has to be reduced and one that is reduced
already cannot be taken for one another (JAX, *Autodiff and sharding*; Megatron-LM, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply
from ...arrays.core.errors import MeshError
from ...arrays.core.op import Op, ShapeDtype
from ...autodiff.rules import defvjp
from ..resharding.collective_plans import Shape
from ..resharding.split_sizes import SplitSizes
from ..sharding.ops import RankOp
from .rank_tracer import BlockTrace, RankTracer


def _together(xp: Any, *args: Any, **params: Any) -> Any:
    raise MeshError("a collective runs inside mt.shard_map only")


def _shaped(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    return ShapeDtype(params["shape"], args[0].dtype)


def _collective(name: str, kind: str = "", invariant: bool = False) -> RankOp:
    return RankOp(name, ("x",), _together, _shaped, collective=kind or name, invariant=invariant)


AXIS_INDEX = RankOp(
    "axis_index",
    (),
    lambda xp, value: np.asarray(value),
    lambda op, a, p: ShapeDtype((), np.dtype(int)),
    nondifferentiable="integer result",
)
VARY = RankOp("vary", ("x",), lambda xp, x, axes: x)
ALL_REDUCE = _collective("all_reduce", invariant=True)
ALL_REDUCE_BY = _collective("all_reduce_by", "all_reduce", invariant=True)
ALL_GATHER = _collective("all_gather", invariant=True)
ALL_GATHER_VARYING = _collective("all_gather_varying", "all_gather")
REDUCE_SCATTER = _collective("reduce_scatter")
SLICE = _collective("slice")
ALL_TO_ALL = _collective("all_to_all")
PERMUTE = _collective("permute")
BROADCAST = _collective("broadcast", invariant=True)


# ----- the ops on Arrays of a trace -----------------------------------------------------------------------------------


def trace_of(x: Array) -> BlockTrace:
    """The per-rank code that a traced value belongs to."""
    return x._buf.builder


def _varied(x: Array, axes: tuple[int, ...]) -> Array:
    return trace_of(x).varied(x, axes)


def all_reduce(x: Array, axes: tuple[int, ...], op: str = "sum") -> Array:
    """V → I."""
    if op == "sum":
        return apply(ALL_REDUCE, (_varied(x, axes),), {"axes": axes, "shape": x.shape})
    return apply(ALL_REDUCE_BY, (_varied(x, axes),), {"axes": axes, "shape": x.shape, "op": op})


def all_gather(x: Array, axes: tuple[int, ...], dim: int, *, varying: bool = False) -> Array:
    """V → I, or V → V where ``varying``."""
    shape = _with_length(x.shape, dim, x.shape[dim] * trace_of(x).group_size(axes))
    op = ALL_GATHER_VARYING if varying else ALL_GATHER
    return apply(op, (_varied(x, axes),), {"axes": axes, "shape": shape, "dim": dim})


def reduce_scatter(x: Array, axes: tuple[int, ...], dim: int) -> Array:
    """V → V: the sum, of which each rank keeps an equal part."""
    params = _parts(x, axes, dim)
    return apply(REDUCE_SCATTER, (_varied(x, axes),), {**params, "op": "sum"})


def slice_local(x: Array, axes: tuple[int, ...], dim: int) -> Array:
    """I → V: each rank's equal part of the common value."""
    return apply(SLICE, (x,), _parts(x, axes, dim))


def _parts(x: Array, axes: tuple[int, ...], dim: int) -> dict[str, Any]:
    n = trace_of(x).group_size(axes)
    length = x.shape[dim] // n
    return {"axes": axes, "shape": _with_length(x.shape, dim, length), "dim": dim, "lengths": (length,) * n}


def all_to_all(x: Array, axes: tuple[int, ...], split_dim: int, concat_dim: int, sizes: SplitSizes) -> Array:
    """V → V: ranks send each other ``sizes`` of their ``split_dim``, and join what they get along ``concat_dim``."""
    if split_dim == concat_dim:
        shape = x.shape
    else:
        part = sizes.rows[0][0]
        shape = _with_length(x.shape, concat_dim, x.shape[concat_dim] * len(sizes.of))
        shape = _with_length(shape, split_dim, part)
    params = {"axes": axes, "shape": shape, "split_dim": split_dim, "concat_dim": concat_dim, "sizes": sizes}
    return apply(ALL_TO_ALL, (_varied(x, axes),), params)


def send(x: Array, axes: tuple[int, ...], pairs: tuple[tuple[int, int], ...]) -> Array:
    """V → V: along the pairs (from, to); zeros where nothing is sent."""
    return apply(PERMUTE, (_varied(x, axes),), {"axes": axes, "shape": x.shape, "pairs": pairs})


def broadcast(x: Array, axes: tuple[int, ...], source: int) -> Array:
    """V → I: the value of one rank."""
    return apply(BROADCAST, (_varied(x, axes),), {"axes": axes, "shape": x.shape, "source": source})


def replay(op: RankOp, x: Array, params: Mapping[str, Any]) -> Array:
    """A call of one of these ops again, on another value of the same shape."""
    if op is not SLICE:
        x = _varied(x, params["axes"])
    return x if op is VARY else apply(op, (x,), params)


def _with_length(shape: Shape, dim: int, n: int) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


# ----- derivatives ----------------------------------------------------------------------------------------------------


def _settled(g: Array, axes: tuple[int, ...]) -> Array:
    """The cotangent of a value that is the same on all ranks: the sum where ranks have their own."""
    open_axes = tuple(a for a in axes if a in trace_of(g).axes_of_variation(g)) if in_trace(g) else ()
    return all_reduce(g, open_axes) if open_axes else g


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
        all_of_them = all_gather(x[None], axes, 0)
        mine = xp.arange(size) == trace_of(x).index(axes)
        mine = xp.reshape(mine, (size,) + (1,) * x.ndim)
        return g * xp.prod(xp.where(mine, 1, all_of_them), axis=0)
    hit = xp.astype(x == ans, x.dtype)  # ties share, however many ranks hold them
    return g * hit / all_reduce(hit, axes)


def _broadcast(xp: Any, g: Any, axes: tuple[int, ...], source: int) -> Any:
    g = _varied(_settled(g, axes), axes)
    return xp.where(trace_of(g).index(axes) == source, g, 0.0)


defvjp(VARY, x=lambda xp, g, axes: all_reduce(g, axes))
defvjp(ALL_REDUCE, x=lambda xp, g, axes: _settled(g, axes))
defvjp(ALL_REDUCE_BY, x=_all_reduce_by)


def _all_gather(xp: Any, g: Any, axes: tuple[int, ...], dim: int) -> Any:
    varies = any(a in trace_of(g).axes_of_variation(g) for a in axes)
    return reduce_scatter(g, axes, dim) if varies else slice_local(g, axes, dim)


def _all_to_all(xp: Any, g: Any, axes: tuple[int, ...], split_dim: int, concat_dim: int, sizes: SplitSizes) -> Any:
    if split_dim == concat_dim:
        return all_to_all(g, axes, split_dim, split_dim, sizes.transposed())
    n = len(sizes.of)
    return all_to_all(g, axes, concat_dim, split_dim, SplitSizes.alike((g.shape[concat_dim] // n,) * n, n))


defvjp(ALL_GATHER, x=_all_gather)
defvjp(ALL_GATHER_VARYING, x=lambda xp, g, axes, dim: reduce_scatter(g, axes, dim))
defvjp(REDUCE_SCATTER, x=lambda xp, g, axes, dim: all_gather(g, axes, dim, varying=True))
defvjp(SLICE, x=lambda xp, g, axes, dim: all_gather(g, axes, dim))
defvjp(ALL_TO_ALL, x=_all_to_all)
defvjp(PERMUTE, x=lambda xp, g, axes, pairs: send(g, axes, tuple((d, s) for s, d in pairs)))
defvjp(BROADCAST, x=_broadcast)
