"""Lowering of per-rank code into a rank program: the partitioner calls :func:`lower` for each call of such code.

Code that is the same on all ranks becomes steps of all ranks, merged with equal steps. Code that differs becomes steps
of single ranks, in waves from collective to collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ...arrays.core.op import Op
from ...arrays.core.program import Entry, freeze, site_text
from ...arrays.ops.elementwise import ALIAS
from ..resharding.collective_plans import Collective, groups_of
from ..sharding.placement import group_of
from ..spmd import rank_ops as ops
from ..spmd.per_rank_op import RankCode


def collective_of(
    code: RankCode, op: Op, params: Mapping[str, Any], groups: Any, shapes: Any, results: Any
) -> Collective:
    """The collective of an entry."""
    kept = {
        k: v for k, v in params.items() if k not in ("axes", "shape") and not (k == "lengths" and "gather" in op.name)
    }
    if op is ops.ALL_REDUCE:
        kept["op"] = "sum"
    return Collective(ops.COLLECTIVES[op], params["axes"], groups, shapes, results, tuple(sorted(kept.items())))


def lower(w: Any, e: Entry, inputs: Sequence[int]) -> list[int]:
    """Write the insides of a call into the rank program of ``w`` (the partitioner's writer); variables of the results."""
    code: RankCode = e.params["code"]
    return _lower_even(w, code, inputs) if code.even else _lower_uneven(w, code, inputs)


def _lower_even(w: Any, code: RankCode, inputs: Sequence[int]) -> list[int]:
    (p,) = code.programs
    sizes = code.mesh.sizes
    env = {v: inputs[i] for v, i in zip(p.inputs, code.operands[0], strict=True)}
    for x in p.entries:
        if x.op in (ops.VARY, ops.TIE):
            env[x.outputs[0]] = env[x.inputs[0]]  # type: ignore[index]
            continue
        args = tuple(env[v] if isinstance(v, int) else v for v in x.inputs)
        origin = f"{code.name}: {x.origin or x.op.name}"
        if x.op in ops.COLLECTIVES:
            shapes = (p.avals[x.inputs[0]].shape,)  # type: ignore[index]
            c = collective_of(code, x.op, x.params, groups_of(sizes, x.params["axes"]), shapes, (x.params["shape"],))
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


def _lower_uneven(w: Any, code: RankCode, inputs: Sequence[int]) -> list[int]:
    """Programs of ranks that differ, in waves: each goes on to its next collective, and those that are complete are made."""
    n = code.mesh.size
    envs = [
        {v: inputs[i] for v, i in zip(p.inputs, code.operands[r], strict=True)} for r, p in enumerate(code.programs)
    ]
    at = [0] * n
    waiting: dict[int, Entry] = {}
    mail: dict[tuple[int, int], deque[int]] = {}
    while True:
        moving = True
        while moving:
            # Each in turn, up to its next message, so that its receiver goes on beside the sender.
            before = sum(at)
            for r in range(n):
                if r not in waiting:
                    at[r] = _advance(w, code, r, at[r], envs[r], waiting, mail)
            moving = sum(at) > before
        if not waiting:
            break
        _lower_wave(w, code, waiting, envs)
    outs = []
    for i in range(len(code.out_avals)):
        out = w.new_inner(code.programs[0].avals[code.programs[0].outputs[i]])
        for r, p in enumerate(code.programs):
            w.inner(ALIAS, (envs[r][p.outputs[i]],), (out,), {}, {r: {}}, code.name, "")
        outs.append(out)
    return outs


def _advance(
    w: Any,
    code: RankCode,
    rank: int,
    at: int,
    env: dict[int, int],
    waiting: dict[int, Entry],
    mail: dict[tuple[int, int], deque[int]],
) -> int:
    """Write a rank's steps up to its next collective, after its next message, or up to one that was not sent yet.
    Returns its position."""
    entries = code.programs[rank].entries
    while at < len(entries):
        x = entries[at]
        if x.op is ops.RECEIVE:
            box = mail.get((x.params["peer"], rank))
            if not box:
                return at
            env[x.outputs[0]] = box.popleft()
        elif x.op is ops.SEND:
            source, peer = env[x.inputs[0]], x.params["peer"]  # type: ignore[index]
            aval = code.programs[rank].avals[x.inputs[0]]  # type: ignore[index]
            target = w.new_inner(aval)
            everywhere = (aval.shape,) * code.mesh.size
            pair = Collective("message", (), ((rank, peer),), everywhere, everywhere, ())
            w.message(source, target, f"{code.name}: a message", pair)
            mail.setdefault((rank, peer), deque()).append(target)
            return at + 1
        elif x.op in (ops.VARY, ops.TIE):
            env[x.outputs[0]] = env[x.inputs[0]]  # type: ignore[index]
        elif x.op in ops.COLLECTIVES:
            waiting[rank] = x
            return at + 1
        else:
            _lower_one(w, code, rank, x, env)
        at += 1
    return at


def _lower_one(w: Any, code: RankCode, rank: int, x: Entry, env: dict[int, int]) -> None:
    args = tuple(env[v] if isinstance(v, int) else v for v in x.inputs)
    params: Mapping[str, Any] = x.params
    if x.op is ops.AXIS_INDEX:
        group = group_of(code.mesh.sizes, x.params["axes"], rank)
        params = {"value": group.index(rank)}
    outs = tuple(w.new_inner(code.programs[rank].avals[v]) for v in x.outputs)
    origin = f"{code.name}: {x.origin or x.op.name}"
    w.inner(x.op, args, outs, params, {rank: params}, origin, "" if x.site is None else site_text(x.site))
    env.update(zip(x.outputs, outs, strict=True))


def _lower_wave(w: Any, code: RankCode, waiting: dict[int, Entry], envs: Sequence[dict[int, int]]) -> None:
    """All collectives for which all of a group wait; equal ones of several groups are one move."""
    sizes, n = code.mesh.sizes, code.mesh.size
    ready: dict[Any, list[tuple[int, ...]]] = {}
    for r, x in list(waiting.items()):
        group = group_of(sizes, x.params["axes"], r)
        if r == group[0] and all(q in waiting and waiting[q].params["axes"] == x.params["axes"] for q in group):
            c = collective_of(code, x.op, x.params, (), (), ())
            dtype = code.programs[r].avals[x.outputs[0]].dtype
            ready.setdefault((c._replace(params=freeze(c.params)), c, dtype), []).append(group)
    if not ready:
        raise AssertionError(f"collectives of {code.name} that no group completes: {waiting}")
    for (_, c, _), groups in ready.items():
        members = [r for g in groups for r in g]
        shapes: list[tuple[int, ...]] = [()] * n
        results: list[tuple[int, ...]] = [()] * n
        first = waiting[members[0]]
        aval = code.programs[members[0]].avals[first.inputs[0]]  # type: ignore[index]
        source = w.new_inner(aval)
        target = w.new_inner(code.programs[members[0]].avals[first.outputs[0]])
        for r in members:
            x = waiting.pop(r)
            shapes[r] = code.programs[r].avals[x.inputs[0]].shape  # type: ignore[index]
            results[r] = x.params["shape"]
            w.inner(ALIAS, (envs[r][x.inputs[0]],), (source,), {}, {r: {}}, code.name, "")  # type: ignore[index]
            envs[r][x.outputs[0]] = target
        origin = f"{code.name}: {first.origin or first.op.name}"
        w.collective(
            source, target, origin, c._replace(groups=tuple(groups), shapes=tuple(shapes), results=tuple(results))
        )
