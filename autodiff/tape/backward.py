"""The backward pass: cotangents pulled back through the records of a tape.

Each cotangent is dropped as soon as its producer is done with it. Undoing broadcasting and casting a cotangent to the
dtype of its value happen here, in :func:`fit`, and in no rule.

The cotangents of floats of one or two bytes are summed and pulled back in float32. They are rounded once, where they
leave the engine: for a caller, a hook, a user's derivative, or an op whose own kernels take short operands and sum them
in float32. A cotangent that such an op gave waits as it is, and is widened where it is added to, or computed with: the
same bits, and two casts less where the next op takes it short. So does one that is complete, where it will be rounded
next: the sum, and the last op of a chain on a GPU, are then one launch with the rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ...arrays.backends import casts
from ...arrays.chains.chains import as_one_launch
from ...arrays.core.array import Array, new_id
from ...arrays.core.dispatch import apply, compiled, wrap
from ...arrays.core.dtypes import HALF, float32
from ...arrays.core.errors import NonDifferentiableError, ShapeError
from ...arrays.core.op import ShapeDtype, state
from ...arrays.core.program import Const, site_text
from ...arrays.indexing.indexing import GETITEM, INDEX_SET, write
from ...arrays.indexing.sparse_cotangent import SparseCotangent
from ...arrays.interface.writing import Writing
from ...arrays.nn.rotary import ROTARY_EMBEDDING
from ...arrays.ops.elementwise import ALIAS
from ...arrays.ops.matmul import MATMUL
from ..rules.registry import rounded, same
from . import anomaly
from .record import Recorded, Recording, VJPPlan

Hook = Callable[[Array], Array]
"""A function of the complete cotangent of a value, which returns its replacement."""

TapeMaker = Callable[[], Any]
"""The class of tapes, which this module cannot import: calls recorded in the backward pass need a tape of their own."""

NO_HOOKS: Any = MappingProxyType({})


def walk(
    tape: Recording,
    records: list[Any],
    cots: dict[int, Any],
    keep: frozenset[int],
    xp: Any,
    wrapped: bool,
    *,
    free: bool,
    hooks: Mapping[int, list[Hook]] = NO_HOOKS,
    owned: set[int] | None = None,
    make: TapeMaker,
) -> None:
    """Pull the cotangents in ``cots`` (by name) back through the records of a tape (fields of :class:`Recorded`), last
    one first.

    ``wrapped`` says that rules run on Arrays, and are recorded, instead of on the raw buffers of ``xp``. Cotangents of
    ``keep`` stay; records are dropped with their saved values when ``free``. ``hooks`` are called on the cotangents of
    their values, once these are complete. ``owned`` are cotangents whose buffer nobody else can hold: they may be added
    to in place. ``make`` makes a tape for calls that are recorded only now.
    """
    hooks = dict(hooks)
    owned = set() if owned is None else owned
    live, short = tape.live, tape.short
    general = wrapped or anomaly.mode.on or bool(hooks) or bool(short)
    left = _rounded_next(records, tape, keep) if short and not hooks else {}
    in_c = compiled is not None and not general
    records = records if free else records.copy()
    outer, outer_site = state.origin, state.site
    fields: Any = None
    try:
        while records:
            if in_c:
                fields = None
                compiled.pull(records, cots, keep, owned, live, xp)  # up to a record that is not plain
                if not records:
                    break
            fields = records.pop()
            plan, inputs, outputs, kept, _, _, _, _ = fields
            if general or not plan.simple:
                for v in outputs:
                    if v in hooks:
                        _call_hooks(v, cots, hooks, owned, wrapped, short)
                found = _found(fields, tape, cots, keep, owned, xp, wrapped, make, left)
                for i, gx in found:
                    if gx is not None:
                        give(gx, inputs[i], live, cots, owned, xp, wrapped, short, left)
                continue
            # The most frequent records by far: the rules are called as they are.
            v = outputs[0]
            g = cots.get(v) if v in keep else cots.pop(v, None)
            if g is None:
                continue
            if owned:
                owned.discard(v)
            if not plan.takes_sparse and type(g) is SparseCotangent:
                g = g.concrete()
            for i, rule, find in plan.pulls:
                gx = g if rule is same else rule(xp, g, *find(kept))
                v = inputs[i]
                if gx is None:
                    continue
                if v not in cots and (gx.shape, gx.dtype) == live[v]:
                    cots[v] = gx
                else:
                    give(gx, v, live, cots, owned, xp, wrapped)
        for v in list(hooks):  # of what no call on this tape has made
            _call_hooks(v, cots, hooks, owned, wrapped, short)
    except NonDifferentiableError:
        raise
    except Exception as e:
        if fields is None and records:
            fields = records[-1]  # whose rule raised in C
        if fields is not None:
            r = Recorded._make(fields)
            e.add_note(f"in the derivative of {r.name}, called at {site_text(r.site)}")
        raise
    finally:
        state.origin, state.site = outer, outer_site


def give(
    g: Any,
    v: int,
    live: Mapping[int, tuple[tuple[int, ...], np.dtype]],
    cots: dict[int, Any],
    owned: set[int],
    xp: Any,
    wrapped: bool,
    short: Mapping[int, np.dtype] = NO_HOOKS,
    left: dict[int, int] = NO_HOOKS,
) -> None:
    """Add to the cotangent of the value ``v``. The first one of a ``short`` value stays as short as it is until another
    is added, or a rule needs it in float32: most go to an op that takes it as it is. ``left`` counts what is still to
    be given to values whose cotangent is rounded next."""
    shape, dtype = live[v]
    before = cots.get(v)
    if v in left:
        left[v] -= 1
    if g.shape != shape or (g.dtype is not dtype and not (g.dtype == short.get(v) and is_kept_short(g))):
        g = fit(xp, g, shape, dtype)
    if before is None:
        cots[v] = g
        return
    if v in short:
        if v not in owned and type(before) is not SparseCotangent and type(g) is not SparseCotangent:
            total = cots[v] = _sum(before, g, dtype if left.get(v, 1) else short[v], not wrapped and xp is not np)
            if total.dtype is dtype and type(total) is np.ndarray:
                owned.add(v)
            return
        before, g = cast(before, dtype), cast(g, dtype)
        cots[v] = before
    if v in owned and type(g) is not SparseCotangent:
        before += g
    elif type(before) is SparseCotangent:
        total = cots[v] = before.add(g)
        if type(total) is not SparseCotangent:
            owned.add(v)
    elif type(g) is SparseCotangent:
        cots[v] = g.add_to(before) if v in owned else g.add(before)
        owned.add(v)
    else:
        total = cots[v] = before + g
        if not wrapped and type(total) is np.ndarray:
            owned.add(v)


def _sum(a: Any, b: Any, dtype: np.dtype, on_gpu: bool) -> Any:
    """The sum in float32 of two cotangents, rounded to ``dtype``."""
    out = _sum_in_one_launch(dtype)(a, b) if on_gpu else NotImplemented
    return cast(cast(a, float32) + cast(b, float32), dtype) if out is NotImplemented else out


@functools.cache
def _sum_in_one_launch(dtype: np.dtype) -> Callable[..., Any]:
    return as_one_launch(lambda a, b: cast(cast(a, float32) + cast(b, float32), dtype))


def _rounded_next(records: Sequence[Any], tape: Recording, keep: frozenset[int]) -> dict[int, int]:
    """The values of two bytes whose cotangents are rounded before anything is computed with them, and how many times
    each is given one."""
    live, short = tape.live, tape.short
    times: dict[int, int] = {}
    made: set[int] = set()
    calls = [r[:3] for r in records]
    for plan, inputs, outputs in calls:
        made.update(outputs)
        for i in plan.wanted:
            times[inputs[i]] = times.get(inputs[i], 0) + 1
    rounded = {v for v in keep if v not in made and v in short and short[v].itemsize == 2}
    for plan, inputs, outputs in calls:
        v = outputs[0]
        if v not in short or short[v].itemsize != 2 or hasattr(plan.op, "expand"):
            continue
        if plan.moves:
            names = [inputs[i] for i in plan.wanted]
            summed = plan.pulls and plan.pulls[0][1] is same and any(live[u][0] != live[v][0] for u in names)
            if not summed and all(u in rounded and times[u] == 1 for u in names):
                rounded.add(v)
        elif hasattr(plan.op, "pull") or _sums_itself(plan, inputs, outputs, live):
            rounded.add(v)
    return {v: times[v] for v in rounded if v in times}


def _sums_itself(plan: VJPPlan, inputs: Sequence[Any], outputs: Sequence[int], live: Mapping[int, Any]) -> bool:
    # Where broadcasting is still to be undone, as it is beside a vector, the products of a product are summed outside
    # of it. (One matrix beside a stack of them is multiplied with all rows together.)
    if plan.op is MATMUL:
        shapes, rows = [(i, live[inputs[i]][0]) for i in plan.wanted], live[outputs[0]][0][:-2]
        return all(len(s) == 2 if i else s[:-2] == rows and len(s) > 1 for i, s in shapes)
    # So are the products that the tables of a rotation get.
    return plan.op.wide_sums and (plan.op is not ROTARY_EMBEDDING or plan.wanted == (0,))


def is_kept_short(g: Any) -> bool:
    """Whether a cotangent may wait in its own dtype: a dense one of two bytes."""
    return g.dtype.itemsize == 2 and type(g) is not SparseCotangent


def widened(values: Sequence[Any]) -> list[Any]:
    """The floats of one or two bytes among these in float32, and so what is said of their dtypes."""
    return [_wide(x) for x in values]


def _wide(x: Any) -> Any:
    if type(x) is tuple:
        return tuple(widened(x))
    if getattr(getattr(x, "dtype", None), "num", 0) < HALF:
        return x
    return x._replace(dtype=float32) if isinstance(x, ShapeDtype) else cast(x, float32)


def cast(x: Any, dtype: np.dtype) -> Any:
    """A cotangent of another dtype, sparse as it was."""
    if type(x) is SparseCotangent:
        return x.map(lambda values: cast(values, dtype))
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if isinstance(x, Array) else casts.cast(x, dtype)


def _found(
    fields: tuple[Any, ...],
    tape: Recording,
    cots: dict[int, Any],
    keep: frozenset[int],
    owned: set[int],
    xp: Any,
    wrapped: bool,
    make: TapeMaker,
    left: Mapping[int, int],
) -> Iterable[tuple[int, Any]]:
    """The cotangents that a record of any kind gives, with the positions of their operands."""
    plan, inputs, outputs, _, _, out_avals, _, site = fields
    if hasattr(plan.op, "expand"):
        _expand(Recorded._make(fields), tape, cots, keep, owned, xp, wrapped, make)
        return ()
    gs = [cots.get(v) if v in keep else cots.pop(v, None) for v in outputs]
    if not [g for g in gs if g is not None]:
        return ()
    mine = not wrapped and outputs[0] in owned and outputs[0] not in keep
    if owned:
        owned.difference_update(outputs)
    own, short = hasattr(plan.op, "pull"), tape.short
    widths = () if plan.moves else [short[v].itemsize for v in outputs if v in short]
    wide = bool(widths)
    if wide and (own or (min(widths) > 1 and _sums_itself(plan, inputs, outputs, tape.live))):
        # (A float8 would not hold the sums.)
        # Cotangents of results beside an op's first are passed on, and stay wide.
        count = len(gs) if own else 1
        for i, v in enumerate(outputs):
            if v in short and gs[i] is not None:
                gs[i] = cast(gs[i], short[v] if i < count else float32)
        wide = False
    elif wide and not plan.widens:
        gs = widened(gs)
    # A user's function may be shown sparse cotangents.
    if not own and plan.op is not GETITEM and (wrapped or anomaly.mode.on or not plan.takes_sparse):
        gs = [g.concrete() if type(g) is SparseCotangent else g for g in gs]
    g = gs[0]
    if not plan.single:
        avals = out_avals or ()
        zeros = (lambda a: None) if plan.partial else (lambda a: xp.zeros(a.shape, dtype=a.dtype))
        g = tuple(zeros(a) if c is None else c for c, a in zip(gs, avals, strict=True))
    state.site = site
    if wrapped:
        state.origin = f"{Recorded._make(fields).name} vjp"
    to: dict[int, np.dtype] = {}
    if left and plan.widens and not wrapped:  # operands that get no other cotangent, and no sum of one
        for i in plan.wanted:
            v = inputs[i]
            if left.get(v) == 1 and v not in cots and tape.live[v][0] == tape.live[outputs[0]][0]:
                to[i] = short[v]
    found = _pull(fields, g, xp, wrapped, wide, mine, make, to)
    if not wrapped and plan.op is INDEX_SET and plan.wanted[0] == 0 and inputs[0] not in cots:
        owned.add(inputs[0])  # nobody else holds the memory of the cotangent of an array before a write
    if anomaly.mode.on:
        anomaly.check_cotangents(Recorded._make(fields), g, found)
    return zip(plan.wanted, found, strict=True)


def _call_hooks(
    v: int, cots: dict[int, Any], hooks: dict[int, list[Hook]], owned: set[int], wrapped: bool, short: dict[int, Any]
) -> None:
    g = cots.get(v)
    fns = hooks.pop(v, ())
    if g is None:
        return
    if v in short:
        g = cast(g, short[v])
    for fn in fns:
        given = g if wrapped else wrap(np.asarray(g) if isinstance(g, np.generic) else g)
        found = fn(given)
        if found is not given:
            g = found if wrapped else found._buf
        owned.discard(v)  # the hook may have kept it
    cots[v] = widened((g,))[0] if v in short else g


def _expand(
    r: Recorded,
    tape: Recording,
    cots: dict[int, Any],
    keep: frozenset[int],
    owned: set[int],
    xp: Any,
    wrapped: bool,
    make: TapeMaker,
) -> None:
    """The cotangents of a call whose inner calls are recorded only now."""
    if not any(v in cots for v in r.outputs):
        return
    state.site = r.site
    inner, operands, outputs = r.plan.op.expand(r, wrapped, make)

    def move(v: int, to: int) -> None:
        if v in cots:
            cots[to] = _wide(cots[v] if v in keep else cots.pop(v))
            if v in owned and v not in keep:
                owned.add(to)
            owned.discard(v)

    for v, name in zip(r.outputs, outputs, strict=True):
        move(v, name)
    # Cotangents from others go before those of the inner calls, as in the plain backward pass: the sums have the same
    # bits.
    names = [(r.inputs[p], operands[p]._id) for p in r.plan.wanted]
    for v, name in names:
        move(v, name)
    walk(inner, inner._records, cots, keep, xp, wrapped, free=True, owned=owned, make=make)
    for v, name in names:
        move(name, v)


def _pull(
    fields: tuple[Any, ...],
    g: Any,
    xp: Any,
    wrapped: bool,
    wide: bool,
    mine: bool,
    make: TapeMaker,
    to: Mapping[int, np.dtype],
) -> list[Any]:
    """Cotangents of the watched operands by the rules, in the general case. ``wide``: short floats in float32; the
    memory of ``g`` may be written to where it is ``mine``; ``to``: dtypes to which one launch rounds, by operand."""
    plan, inputs, outputs, kept = fields[:4]
    if plan.pulls is None and plan.together is None:
        r = Recorded._make(fields)
        if hasattr(plan.op, "pull"):
            return plan.op.pull(r, g, wrapped)
        if plan.op.decompose is None:
            raise NonDifferentiableError(f"[{plan.op.name}] has no derivative; it was called at {site_text(r.site)}")
        if plan.widens and not wrapped:
            rounds = tuple(map(to.get, plan.wanted))
            out = _in_one_launch(plan, repr(r.params), tuple(r.params.items()), wide, rounds, make)(g, *r.kept)
            if out is not NotImplemented:
                return list(out)
        return _pull_decomposed(r, g, wrapped, wide, make)
    if wrapped:
        names = (*inputs, *outputs)
        values = [
            named(b, v) if type(v) is int else b for b, v in zip(kept, (names[p] for p in plan.saves), strict=False)
        ]
        kept = (*values, *kept[len(values) :])
    if wide and not plan.widens:
        kept = tuple(widened(kept))
    if plan.together is not None:
        rule, find = plan.together
        found = rule(xp, g, *find(kept), **({"to": to} if plan.widens else {}))
        return [found.get(p) for p in plan.wanted] if type(found) is dict else [found[p] for p in plan.wanted]
    found = dict.fromkeys(plan.wanted)
    # The written value's first. Then nobody reads the array's again, and a loop of n writes copies it once, and not n
    # times.
    for i, rule, find in reversed(plan.pulls or ()):
        if mine and plan.op is INDEX_SET and i == 0:
            index, template = find(kept)
            write(xp, g, 0.0, template, index)
            found[i] = g
        elif i in to and rule is not same:
            found[i] = rule(xp, g, *find(kept), to=to[i])
        else:
            found[i] = rule(xp, g, *find(kept))
    return list(found.values())


def named(buf: Any, var: int) -> Array:
    """A saved buffer as an Array with its old name, which outer tapes know."""
    x = wrap(buf)
    x._id = var
    return x


def same_value(x: Array) -> Array:
    """A second Array of the value and name that ``x`` has now; a write to ``x`` does not reach it."""
    name = x._id
    buf = x._buf
    while x._id != name:  # another thread writes: the value before or after it, but not the one with the other's name
        name = x._id
        buf = x._buf
    return buf.value() if type(buf) is Writing else named(buf, name)


def _pull_decomposed(r: Recorded, g: Any, wrapped: bool, wide: bool, make: TapeMaker) -> list[Any]:
    """Derivative of an op through its decomposition: record that on a tape of its own and walk it."""
    # Where outer tapes listen, each operand is an alias with a name of its own that they know: an array that is passed
    # twice would otherwise get the sum of both cotangents twice.
    args = [
        b if type(v) is not int else (apply(ALIAS, (named(b, v),)) if wrapped else wrap(b))
        for b, v in zip(r.kept, r.inputs, strict=True)
    ]
    if wide:
        args, g = widened(args), _wide(g)
    tape = make()
    with tape:
        tape.watch([args[p] for p in r.plan.wanted])
        outs = r.plan.op.decompose(*args, **r.params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    seeds = g if isinstance(g, tuple) else (g,)
    if not wrapped:
        seeds = tuple(wrap(np.asarray(s)) if isinstance(s, np.generic) else wrap(s) for s in seeds)
    pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if tape.watches(o)]
    names = [args[p]._id for p in r.plan.wanted]
    found = tape.backward([o for o, _ in pairs], [s for _, s in pairs], names)
    return [found.get(v) if wrapped or found.get(v) is None else found[v]._buf for v in names]


@functools.lru_cache(maxsize=256)
def _in_one_launch(
    plan: VJPPlan, text: str, params: tuple[Any, ...], wide: bool, to: tuple[np.dtype | None, ...], make: TapeMaker
) -> Callable[..., Any]:
    """:func:`_pull_decomposed` of an elementwise op as one launch on a GPU, of the cotangent and the operands, with the
    results rounded ``to`` these dtypes. (The text tells 1 from 1.0, and 0.0 from -0.0.)"""

    def cotangents(g: Array, *args: Any) -> tuple[Any, ...]:
        names = [new_id(a) if type(a) is Array else Const(a) for a in args]
        kept = tuple(a._buf if type(a) is Array else a for a in args)
        record = Recorded(plan, names, (), kept, dict(params), None, None, None)
        return rounded(_pull_decomposed(record, g, True, wide, make), to)

    return as_one_launch(cotangents)


def fit(xp: Any, g: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A cotangent made to fit the value it belongs to: broadcasting undone by sums, dtype cast.

    Rules leave both to this one place. The cotangent of a real value is real.
    """
    if type(g) is SparseCotangent:
        if g.shape == shape and (dtype.kind == "c" or g.dtype.kind != "c"):
            return g if g.dtype == dtype else cast(g, dtype)
        g = g.concrete()
    if dtype is float32 and g.dtype.num >= HALF:
        g = cast(g, dtype)  # before it is summed
    if g.shape != shape:
        lead = len(g.shape) - len(shape)
        if lead > 0 and xp is np and g.shape[lead:] == shape:  # what was added to each row: the most frequent of all
            g = np.add.reduce(g, 0 if lead == 1 else tuple(range(lead)))
            return g if g.dtype is dtype else fit(xp, g, shape, dtype)
        if lead < 0:
            g, lead = xp.reshape(g, (1,) * -lead + tuple(g.shape)), 0
        axes = tuple(range(lead)) + tuple(
            i + lead for i, n in enumerate(shape) if n == 1 and lead + i < len(g.shape) and g.shape[i + lead] != 1
        )
        if axes:
            # The same as `np.sum`, in half the time.
            g = np.add.reduce(g, axes) if xp is np else xp.sum(g, axis=axes)
        if g.shape != shape:
            if any(m != n and m != 1 for m, n in zip(g.shape, shape, strict=False)) and math.prod(g.shape) != math.prod(
                shape
            ):
                raise ShapeError(f"[gradient] a cotangent of shape {g.shape} does not fit a value of shape {shape}")
            # A rule may answer with a broadcastable piece; lengths of one that the sums removed come back here.
            g = xp.reshape(g, shape) if math.prod(g.shape) == math.prod(shape) else xp.broadcast_to(g, shape)
    if g.dtype != dtype:
        if g.dtype.kind == "c" and dtype.kind != "c":
            g = xp.real(g)
        if g.dtype != dtype:
            g = cast(g, dtype)
    return g
