"""The propagator: from the layouts of a call's operands to those they must have, and those of the results.

One procedure reads every op's factor mapping, forward and backward entries alike, one mesh axis at a time:

1. The operands propose: each factor that one of them is split along on this axis is a candidate, and so is each set of
   operands that is ``Partial("sum")`` together and in which the op is linear, and so is replication.
2. The candidate that moves the fewest bytes wins, including the reduction of a pending result. Such a reduction is
deferred unless
   the op makes the pending value larger. At ties a split wins over replication, earlier operands over later ones.
3. An axis that splits both rows and experts, of which each row needs a few, keeps both splits: rows are sent to their
experts. 4. Where a factor is split by several axes, a candidate must keep blocks even if the mapping needs it. Axes are
taken from the
   largest to the smallest (ties: the outer one first), so that the largest one stays.

The function is cached: it depends on layouts and lengths, not on meshes or values. Where only some of the axes that
split a dimension can stay, it says so in the log ``meshtape``, once for an op and a layout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...arrays.core.op import Op, ShapeDtype
from ...arrays.core.program import Entry, freeze
from ...arrays.indexing.indexing import GETITEM, SCATTER
from .factors import FactorRule, rule_for
from .placement import REPLICATED, Layout, Shard, make_layout

log = logging.getLogger("meshtape")


class Placed(NamedTuple):
    """The layouts chosen for a call.

    ``operands`` are the layouts that the operands must have (None for scalars), ``results`` those of the results.
    ``lost`` is the number of bytes that operands split along a ``whole`` factor must move: a reason to decompose the
    op. ``split`` are the split factors, ``exchanged`` the mesh axes between whose ranks rows are sent
    (:class:`~.factors.ExpertExchange`).
    """

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]
    rule: FactorRule
    lost: int
    split: frozenset[int] = frozenset()
    exchanged: tuple[int, ...] = ()


def move_bytes(aval: ShapeDtype, sizes: Sequence[int], source: Layout, axis: int, target: str, dim: int = -1) -> float:
    """Bytes that each rank sends when an operand changes along one mesh axis, all else equal.

    With ``N`` the bytes of the block joined along the axis, of ``n`` ranks: gather and reduce-scatter ``N (n-1)/n``,
    all-reduce twice that, all-to-all ``N (n-1)/n**2``, and slicing nothing.
    """
    n = sizes[axis]
    if n == 1:
        return 0.0
    others = math.prod(sizes[a] for _, axes in source.shards for a in axes if a != axis)
    whole = aval.nbytes / max(others, 1)
    now = source.placement(axis)
    if isinstance(now, Shard):
        if target == "shard":
            return 0.0 if now.dim == dim else whole * (n - 1) / n**2
        return whole * (n - 1) / n
    if target == "partial" or not source.partials or axis not in dict(source.partials):
        return 0.0
    return whole * (n - 1) / n * (1 if target == "shard" else 2)


def propagate(
    op: Op,
    avals: Sequence[Any],
    out_avals: Sequence[ShapeDtype],
    params: Mapping[str, Any],
    layouts: Sequence[Layout | None],
    sizes: Sequence[int],
) -> Placed:
    """Layouts of a call on operands with these layouts (None: a scalar). ``sizes`` are the lengths of the mesh axes."""
    key = (
        op,
        tuple(a if isinstance(a, ShapeDtype) else freeze(a) for a in avals),
        freeze(params),
        tuple(layouts),
        tuple(sizes),
    )
    found = _cache.get(key)
    if found is None:
        if len(_cache) > 20_000:
            _cache.clear()
        rule = rule_for(op, avals, out_avals, params)
        found = _cache[key] = _propagate(rule, avals, out_avals, layouts, tuple(sizes))
        _tell_fallbacks(op, layouts, tuple(sizes), found)
    return found


_cache: dict[Any, Placed] = {}
_told: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()


def _tell_fallbacks(op: Op, layouts: Sequence[Layout | None], sizes: tuple[int, ...], placed: Placed) -> None:
    for dims, now, then in zip(placed.rule.operands, layouts, placed.operands, strict=True):
        if now is None or then is None:
            continue
        for d, axes in now.shards:
            kept, dim = then.axes_of(d), dims[d]
            if dim is None or not kept or not set(kept) < set(axes) or _even(placed.rule, dim.factor, axes, sizes):
                continue
            key = op.name, axes, sizes
            if key not in _told:
                _told.add(key)
                log.warning(
                    f"[{op.name}] dimension {d} is split over the mesh axes {list(axes)} of {[sizes[a] for a in axes]} "
                    f"ranks, which do not divide the blocks that {op.name} keeps: it stays split over {list(kept)}, "
                    "and its blocks move"
                )


def _propagate(
    rule: FactorRule,
    avals: Sequence[Any],
    out_avals: Sequence[ShapeDtype],
    layouts: Sequence[Layout | None],
    sizes: tuple[int, ...],
) -> Placed:
    arrays = [i for i, a in enumerate(avals) if isinstance(a, ShapeDtype)]
    result_bytes = sum(a.nbytes for a in out_avals)
    now = {i: layouts[i] or REPLICATED for i in arrays}
    if rule.valueless:  # pending reductions do not matter here
        now = {i: Layout(lay.shards) for i, lay in now.items()}
    chosen: dict[int, Any] = {}  # mesh axis → factor (int), set of partial operands, or nothing
    split: dict[int, list[int]] = {}  # factor → mesh axes
    exchanged: list[int] = []
    lost = 0.0
    order = _shard_order(now.values(), len(sizes))
    for axis in sorted(range(len(sizes)), key=lambda a: (-sizes[a], order[a])):
        if sizes[axis] == 1:
            continue  # one rank holds everything: nothing is split, nothing is pending
        rows = _exchanged(rule, now, axis)
        if rows is not None:
            exchanged.append(axis)
            for factor in (rows, rule.exchange.expert):  # type: ignore[union-attr]
                split.setdefault(factor, []).append(axis)
            continue
        candidates: dict[Any, float] = {}
        gathered = {i: move_bytes(avals[i], sizes, now[i], axis, "replicate") for i in arrays}
        for i in arrays:
            p = now[i].placement(axis)
            d = rule.operands[i][p.dim] if isinstance(p, Shard) else None
            if d is None:
                continue
            if rule.factors[d.factor].whole:
                lost += gathered[i]
            elif d.factor not in candidates and _even(rule, d.factor, [*split.get(d.factor, ()), axis], sizes):
                candidates[d.factor] = _cost(rule, avals, now, sizes, axis, d.factor)
                if rule.part is not None and d.factor in rule.part.factors and rule.factors[d.factor].reduce:
                    # A lookup may be larger than the table: then that is gathered, and not the results summed.
                    candidates[d.factor] += 2 * result_bytes * (sizes[axis] - 1) / sizes[axis]
        for group in rule.linear:
            if all(dict(now[i].partials).get(axis) == "sum" for i in group):
                others = sum(n for i, n in gathered.items() if i not in group)
                # The result is reduced later: to defer that pays if it is no larger than the pending operand.
                growth = result_bytes / max(sum(avals[i].nbytes for i in group), 1)
                candidates[group] = others + growth * sum(gathered[i] for i in group)
        candidates[None] = sum(gathered.values())
        best = min(candidates, key=lambda c: candidates[c])  # the first of equals; replication comes last
        chosen[axis] = best
        if isinstance(best, int):
            split.setdefault(best, []).append(axis)
    for factor, axes in split.items():
        split[factor] = _nesting(rule, now, factor, axes)
    operands = tuple(_operand(rule, i, split, chosen) if i in now else None for i in range(len(avals)))
    if rule.valueless:
        pending = [lay.partials if lay else () for lay in layouts]
        operands = tuple(
            lay and make_layout(dict(lay.shards), {a: op for a, op in p if not isinstance(lay.placement(a), Shard)})
            for lay, p in zip(operands, pending, strict=True)
        )
    results = tuple(_result(rule, r, split, chosen, exchanged) for r in rule.results)
    return Placed(operands, results, rule, int(lost), frozenset(split), tuple(sorted(exchanged)))


def reason(name: str, placed: Placed, i: int, now: Layout, sizes: Sequence[int]) -> str | None:
    """Why operand ``i`` of a call of ``name`` has to change from layout ``now`` to ``placed``; None where it stays."""
    then = placed.operands[i]
    if then is None or then == now:
        return None
    gone = [a for a, _ in now.partials if a not in dict(then.partials)]
    if gone:
        linear = any(i in g for g in placed.rule.linear)
        return f"as {name} " + ("has other operands that are not pending" if linear else "is not linear in it")
    for d, axes in now.shards:
        if set(axes) - set(then.axes_of(d)):
            dim = placed.rule.operands[i][d] if d < len(placed.rule.operands[i]) else None
            if dim is None or placed.rule.factors[dim.factor].whole:
                return placed.rule.choice or f"as {name} needs dimension {d} whole"
            if not _even(placed.rule, dim.factor, axes, sizes):
                n, ranks = placed.rule.factors[dim.factor].size, math.prod(sizes[a] for a in axes)
                together = f" of {dim.inner}" if dim.inner > 1 else ""
                return f"as {name} keeps dimension {d} in {n} blocks{together}, which {ranks} ranks do not divide"
            return f"as {name} then moves the fewest bytes"
    return f"beside what else {name} has"


class Hints:
    """The layouts of the tables that a program looks up, by which their gradients are split.

    The op that makes such a gradient has the indices and the added rows as operands, but not the table. Without the
    hint every rank would get the whole gradient.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, Layout] = {}

    def placed(self, e: Entry, found: Placed, layouts: Sequence[Layout | None], sizes: Sequence[int]) -> Placed:
        """``found`` with the result split like the table, along axes that nothing else uses."""
        if e.op is GETITEM:
            indices = tuple(v for v in e.inputs[1:] if isinstance(v, int))
            if indices and layouts[0] is not None:
                self._tables.setdefault((e.params["template"], indices), layouts[0])
            return found
        if e.op is not SCATTER or found.rule.part is None:
            return found
        table = self._tables.get((e.params["template"], tuple(v for v in e.inputs[1:] if isinstance(v, int))))
        if table is None:
            return found
        (now,) = found.results
        used = {a for lay in (now, *found.operands) if lay for _, axes in lay.shards for a in axes}
        used |= {a for lay in (now, *found.operands) if lay for a, _ in lay.partials}
        dims = found.rule.results[0]
        fresh = {
            d: axes
            for d, axes in table.shards
            if not used.intersection(axes) and (x := dims[d]) is not None and x.factor in found.rule.part.makes
        }
        if not fresh:
            return found
        split = found.split | {dims[d].factor for d in fresh}  # type: ignore[union-attr]
        layout = make_layout({**dict(now.shards), **fresh}, dict(now.partials))
        return found._replace(results=(layout,), split=split)


def _shard_order(layouts: Iterable[Layout], axes: int) -> dict[int, int]:
    """Place of each mesh axis in the order in which operands name them, outer ones first; the rest in the mesh's
    order."""
    named = [a for layout in layouts for _, nested in layout.shards for a in nested]
    return {a: i for i, a in enumerate(dict.fromkeys([*named, *range(axes)]))}


def _even(rule: FactorRule, factor: int, axes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the ceil rule cuts all dimensions of the factor at the same places."""
    inner = {d.inner for dims in (*rule.operands, *rule.results) for d in dims if d is not None and d.factor == factor}
    return inner == {1} or rule.factors[factor].size % math.prod(sizes[a] for a in axes) == 0


def _cost(
    rule: FactorRule, avals: Sequence[Any], now: Mapping[int, Layout], sizes: Sequence[int], axis: int, factor: int
) -> float:
    total = 0.0
    for i, layout in now.items():
        dim = next((d for d, x in enumerate(rule.operands[i]) if x is not None and x.factor == factor), None)
        target = "replicate" if dim is None else "shard"
        total += move_bytes(avals[i], sizes, layout, axis, target, -1 if dim is None else dim)
    return total


def _nesting(rule: FactorRule, now: Mapping[int, Layout], factor: int, axes: list[int]) -> list[int]:
    """Order of the axes that split a factor: that of the first operand which has all of them there, else the mesh's."""
    for i, layout in now.items():
        for d, x in enumerate(rule.operands[i]):
            if x is not None and x.factor == factor and set(layout.axes_of(d)) == set(axes):
                return list(layout.axes_of(d))
    return sorted(axes)


def _operand(rule: FactorRule, i: int, split: Mapping[int, list[int]], chosen: Mapping[int, Any]) -> Layout:
    shards = {d: split[x.factor] for d, x in enumerate(rule.operands[i]) if x is not None and x.factor in split}
    partials = {a: "sum" for a, c in chosen.items() if isinstance(c, frozenset) and i in c}
    return make_layout(shards, partials)


def _exchanged(rule: FactorRule, now: Mapping[int, Layout], axis: int) -> int | None:
    """The factor of rows that this axis splits, if it splits the experts too."""
    if rule.exchange is None:
        return None
    found = []
    for i, layout in now.items():
        p = layout.placement(axis)
        d = rule.operands[i][p.dim] if isinstance(p, Shard) else None
        found += [] if d is None else [d.factor]
    if rule.exchange.expert not in found:
        return None
    return next((f for f in found if f in rule.exchange.rows), None)


def _result(
    rule: FactorRule,
    dims: Sequence[Any],
    split: Mapping[int, list[int]],
    chosen: Mapping[int, Any],
    exchanged: Sequence[int],
) -> Layout:
    shards = {d: split[x.factor] for d, x in enumerate(dims) if x is not None and x.factor in split}
    partials = {a: "sum" for a, c in chosen.items() if isinstance(c, frozenset)}
    have = {x.factor for x in dims if x is not None}
    for factor, axes in split.items():
        if factor not in have:
            op = rule.factors[factor].reduce
            if op is None:
                raise AssertionError(f"factor {factor} is missing in a result and has no reduction: {rule}")
            partials.update({a: op for a in axes if a not in exchanged})
    return make_layout(shards, partials)
