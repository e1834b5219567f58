"""Lowering of per-rank code into a rank program: the partitioner calls :func:`lower` for each call of such code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays.core.program import Entry, freeze, site_text
from ..resharding.collective_plans import Collective, groups_of
from ..spmd import rank_ops as ops
from ..spmd.per_rank_op import TracedShardMap


def lower(w: Any, e: Entry, inputs: Sequence[int]) -> list[int]:
    """Write the insides of a call into the rank program of ``w`` (the partitioner's writer); variables of the
    results."""
    code: TracedShardMap = e.params["code"]
    p, sizes = code.program, code.mesh.sizes
    env = {v: inputs[i] for v, i in zip(p.inputs, code.operands, strict=True)}
    for x in p.entries:
        if x.op is ops.VARY:
            env[x.outputs[0]] = env[x.inputs[0]]  # type: ignore[index]
            continue
        args = tuple(env[v] if isinstance(v, int) else v for v in x.inputs)
        origin = f"{code.name}: {x.origin or x.op.name}"
        if isinstance(x.op, ops.RankOp) and x.op.collective:
            axes, shape = x.params["axes"], p.avals[x.inputs[0]].shape  # type: ignore[index]
            kept = {k: v for k, v in x.params.items() if k not in ("axes", "shape")}
            if x.op is ops.ALL_REDUCE:
                kept["op"] = "sum"
            kept = tuple(sorted(kept.items()))
            c = Collective(x.op.collective, axes, groups_of(sizes, axes), (shape,), (x.params["shape"],), kept)
            key: Any = ("collective", args[0], c._replace(params=freeze(c.params)))
            found = w.seen.get(key)
            if found is None:
                found = w.seen[key] = (w.new_inner(p.avals[x.outputs[0]]),)
                w.collective(args[0], found[0], origin, c)
            env[x.outputs[0]] = found[0]
            continue
        by_rank = None
        params: Mapping[str, Any] = x.params
        if x.op is ops.AXIS_INDEX:
            axes = x.params["axes"]
            by_rank = {r: {"value": i} for g in groups_of(sizes, axes) for i, r in enumerate(g)}
        key = ("inner", x.op, tuple(v if isinstance(v, int) else freeze(v.value) for v in args), freeze(params))
        found = w.seen.get(key)
        if found is None:
            found = w.seen[key] = tuple(w.new_inner(p.avals[v]) for v in x.outputs)
            w.inner(x.op, args, found, params, by_rank, origin, "" if x.site is None else site_text(x.site))
        env.update(zip(x.outputs, found, strict=True))
    return [env[v] for v in p.outputs]
