"""The backward pass: cotangents pulled back through the records of a tape.

Each cotangent is dropped as soon as its producer is done with it. Undoing broadcasting and casting a cotangent to the dtype of its
value happen here, in :func:`fit`, and in no rule.

The cotangents of floats of one or two bytes are kept, summed and pulled back in float32. They are rounded once, where
they leave the engine: for a caller, a hook, a user's derivative, or an op whose own kernels take short operands and sum
them in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ...arrays.backends.short_ways import HALF
from ...arrays.core.array import Array
from ...arrays.core.dispatch import apply, wrap
from ...arrays.core.errors import NonDifferentiableError, ShapeError
from ...arrays.core.op import state
from ...arrays.core.program import site_text
from ...arrays.core.shape_dtype import ShapeDtype
from ...arrays.core.value import FLOAT32, FLOAT64, NUMBERS64, Now
from ...arrays.indexing.indexing import GETITEM, INDEX_SET, write
from ...arrays.indexing.sparse_cotangent import IndexSum
from ...arrays.interface.writing import Writing
from ...arrays.nn import convolution as conv
from ...arrays.nn import cross_entropy, mixture_of_experts, softmax
from ...arrays.nn.norms import batch_norm, group_norm, layer_norm
from ...arrays.ops import matmul
from ...arrays.ops.elementwise import ALIAS, DIVIDE, MULTIPLY, NEGATIVE, SUBTRACT
from ..rules.registry import same
from . import anomaly
from .record import Recorded
from .vjp_plan import Recipe

ndarray, multiply = np.ndarray, np.multiply

Hook = Callable[[Array], Array]
"""A function of the complete cotangent of a value, which returns its replacement."""

TapeMaker = Callable[[], Any]
"""The class of tapes, which this module cannot import: calls recorded in the backward pass need a tape of their own."""

NO_HOOKS: Any = MappingProxyType({})


def walk(
    records: list[Any],
    cots: dict[int, Any],
    keep: frozenset[int],
    xp: Any,
    wrapped: bool,
    *,
    free: bool,
    hooks: Mapping[int, list[Hook]] = NO_HOOKS,
    owned: set[int] | None = None,
    short: dict[int, np.dtype],
    tape: TapeMaker,
) -> None:
    """Pull the cotangents in ``cots`` (by name) back through the records (fields of :class:`Recorded`), last one first.

    ``wrapped`` says that rules run on Arrays, and are recorded, instead of on the raw buffers of ``xp``. Cotangents of ``keep``
    stay; records are dropped with their saved values when ``free``. ``hooks`` are called on the cotangents of their values, once
    these are complete. ``short`` has the dtypes of those values whose cotangents are kept in float32 though they are shorter.
    ``tape`` makes a tape for calls that are recorded only now.
    """
    hooks = dict(hooks)
    # Cotangents whose buffer nobody else can hold: they may be added to in place.
    owned = set() if owned is None else owned
    # Rules on raw buffers that need saved values only are called from here: most of the time of a small call would go into calls
    # of our own.
    slow = wrapped or anomaly.mode.on
    recipe: Recipe
    position = len(records)
    now: Now = state.now
    outer, outer_site = now.origin, now.site
    fields: Any = None
    try:
        while position:
            position -= 1
            fields = records.pop() if free else records[position]
            recipe, operands, _, outputs, saved, params, avals, _, _, _ = fields
            if hooks:
                for v in outputs:
                    _call_hooks(v, cots, hooks, owned, wrapped, short)
            quick = recipe.quick
            aside = slow or (short and not short.keys().isdisjoint(outputs))
            if quick is None and recipe.direct and not aside:
                v = outputs[0]
                g = cots.get(v) if v in keep else cots.pop(v, None)
                if g is None:
                    continue
                mine = v in owned and v not in keep
                if type(g) is IndexSum and recipe.op is not GETITEM:
                    g = g.concrete()
                owned.discard(v)
                found = _by_rules(recipe, g, saved, params, avals, xp, mine)
                _own_edited(recipe, operands, cots, owned)
                if g.dtype is FLOAT32 and [x for x in found if x is not None and x.dtype is not FLOAT32]:
                    found = widened(
                        found
                    )  # a loss of short logits is float32, and their cotangent as short as they are
                operands = spelled(operands, g.shape, g.dtype)
            elif quick is None or aside:
                operands, found = _found(fields, cots, keep, owned, short, xp, wrapped, tape)
                if found is None:
                    continue
            else:
                v = outputs[0]
                g = cots.get(v) if v in keep else cots.pop(v, None)
                if g is None:
                    continue
                if owned:
                    owned.discard(v)
                if type(g) is IndexSum:
                    g, found = _pull_sparse(recipe, g, saved, xp)
                    operands = spelled(operands, g.shape, g.dtype)
                elif type(operands) is int:
                    ((pull, at),) = quick
                    if pull is None:
                        continue
                    if pull is same:
                        gx = g
                    else:
                        if type(at) is int:
                            value = saved[at]
                            if recipe.op is MULTIPLY and type(value) is float and type(g) is ndarray:
                                # The most frequent rule of all, `g * value`, without the two calls that it takes.
                                gx = multiply(g, NUMBERS64.get(value, value) if g.dtype is FLOAT64 else value)
                            else:
                                gx = pull(xp, g, value)
                        else:
                            gx = pull(xp, g, *[saved[k] for k in at])
                        if gx is None:
                            continue
                        if gx.dtype is not g.dtype:
                            gx = fit(xp, gx, g.shape, g.dtype)
                    if operands not in cots:
                        cots[operands] = gx
                        continue
                    found, operands = (gx,), (operands,)
                else:
                    found = None  # one by one below
            for k in range(len(operands)):
                if found is not None:
                    gx = found[k]
                else:
                    pull, at = quick[k]
                    if pull is same:
                        gx = g
                    elif pull is None:
                        continue
                    elif type(at) is int:
                        value = saved[at]
                        if recipe.op is MULTIPLY and type(value) is ndarray and value.dtype is FLOAT64:
                            gx = multiply(g, value)
                        else:
                            gx = pull(xp, g, value)
                    else:
                        gx = pull(xp, g, *[saved[i] for i in at])
                if gx is None:
                    continue
                operand = operands[k]
                if type(operand) is int:
                    var = operand
                    if gx.dtype is not g.dtype:
                        gx = fit(xp, gx, g.shape, g.dtype)
                else:
                    var, shape, dtype = operand
                    if gx.shape != shape or (gx.dtype is not dtype and gx.dtype != dtype):
                        if dtype.num >= HALF:
                            short[var], dtype = dtype, FLOAT32
                        gx = fit(xp, gx, shape, dtype)
                before = cots.get(var)
                if before is None:
                    cots[var] = gx
                elif type(before) is IndexSum:
                    total = cots[var] = before.plus(gx)
                    if type(total) is not IndexSum:
                        owned.add(var)
                elif type(gx) is IndexSum:
                    cots[var] = gx.add_to(before) if var in owned else gx.plus(before)
                    owned.add(var)
                elif var in owned:
                    before += gx
                else:
                    total = cots[var] = before + gx
                    if not wrapped and type(total) is np.ndarray:
                        owned.add(var)
        for v in list(hooks):  # of what no call on this tape has made
            _call_hooks(v, cots, hooks, owned, wrapped, short)
    except NonDifferentiableError:
        raise
    except Exception as e:
        if fields is not None:
            r = Recorded._make(fields)
            e.add_note(f"in the derivative of {r.name}, called at {site_text(r.site)}")
        raise
    finally:
        now.origin, now.site = outer, outer_site


_LINEAR = frozenset({DIVIDE, MULTIPLY, NEGATIVE, SUBTRACT})
"""Ops whose rules only use operations that a sparse cotangent has."""


def _pull_sparse(recipe: Recipe, g: IndexSum, saved: Sequence[Any], xp: Any) -> tuple[Any, list[Any]]:
    """The cotangent used, and those of the operands: sparse where the op passes on, or scales, a sparse cotangent."""
    quick: Any = recipe.quick
    if recipe.op not in _LINEAR and any(pull is not None and pull is not same for pull, _ in quick):
        g = g.concrete()
    places = [(pull, (at,) if type(at) is int else at) for pull, at in quick]
    return g, [None if p is None else g if p is same else p(xp, g, *[saved[k] for k in at]) for p, at in places]


_OWN_SUMS = frozenset(
    {
        matmul.MATMUL,
        conv.CONV,
        conv.CONV_IMAGE,
        conv.CONV_KERNEL,
        cross_entropy.CROSS_ENTROPY,
        mixture_of_experts.EXPERTS,
        layer_norm.LAYER_NORM,
        layer_norm.RMS_NORM,
        group_norm.GROUP_NORM,
        batch_norm.BATCH_NORM,
        softmax.SOFTMAX,
        softmax.LOG_SOFTMAX,
    }
)
"""Ops whose derivative is a call of another op that sums short floats in float32, as the matrix units of a GPU do."""


def spelled(operands: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Operands with shapes and dtypes; where only a name is given, shape and dtype are those of the result."""
    if type(operands) is int:
        return ((operands, shape, dtype),)
    return [(v, shape, dtype) for v in operands] if type(operands[0]) is int else operands


def _sums_itself(recipe: Recipe, operands: Any, g: Any) -> bool:
    # Where broadcasting is still to be undone, as it is beside a vector, the products of a product are summed outside of it. (One
    # matrix beside a stack of them is multiplied with all rows together.)
    if recipe.op is matmul.MATMUL:
        found = zip(recipe.wanted, operands, strict=True)
        return all(len(s) == 2 if i else s[:-2] == g.shape[:-2] and len(s) > 1 for i, (_, s, _) in found)
    return recipe.op in _OWN_SUMS


def widened(values: Sequence[Any]) -> list[Any]:
    """The floats of one or two bytes among these in float32."""
    return [cast(x, FLOAT32) if getattr(getattr(x, "dtype", None), "num", 0) >= HALF else x for x in values]


def cast(x: Any, dtype: np.dtype) -> Any:
    """A cotangent of another dtype, sparse as it was."""
    return x.map(lambda values: values.astype(dtype)) if type(x) is IndexSum else x.astype(dtype)


def _found(
    fields: tuple[Any, ...],
    cots: dict[int, Any],
    keep: frozenset[int],
    owned: set[int],
    short: dict[int, np.dtype],
    xp: Any,
    wrapped: bool,
    tape: TapeMaker,
) -> tuple[Any, Any]:
    """The operands of any record and their cotangents, in the general case; None for the latter where all is done."""
    r = Recorded._make(fields)
    recipe, operands = r.recipe, r.operands
    if hasattr(recipe.op, "expand"):
        _expand(r, cots, keep, owned, short, xp, wrapped, tape)
        return operands, None
    gs = [cots.get(v) for v in r.outputs]
    if all(g is None for g in gs):
        return operands, None
    rounded = [short.get(v) for v in r.outputs]
    mine = not wrapped and r.outputs[0] in owned and r.outputs[0] not in keep
    for v in r.outputs:
        owned.discard(v)
        if v not in keep:
            cots.pop(v, None)
            short.pop(v, None)
    if recipe.single:
        operands = spelled(operands, gs[0].shape, rounded[0] or gs[0].dtype)
    wide = any(rounded)
    if wide and (hasattr(recipe.op, "pull") or _sums_itself(recipe, operands, gs[0])):
        gs = [g if d is None else cast(g, d) for g, d in zip(gs, rounded, strict=True)]
        wide = False
    sparse = recipe.op is GETITEM or hasattr(recipe.op, "pull")  # what a user's function is shown may stay sparse
    if type(gs[0]) is IndexSum and not sparse and recipe.quick is not None and not (wrapped or anomaly.mode.on):
        return operands, _pull_sparse(recipe, gs[0], widened(r.saved), xp)[1]
    if not sparse:
        gs = [g.concrete() if type(g) is IndexSum else g for g in gs]
    g = gs[0]
    if not recipe.single:
        g = tuple(
            c if c is not None else xp.zeros(a.shape, dtype=a.dtype) for c, a in zip(gs, r.out_avals or (), strict=True)
        )
    now = state.now
    now.site = r.site
    if wrapped:
        now.origin = f"{r.name} vjp"
    found = _pull(r, g, xp, wrapped, wide, mine, tape)
    if not wrapped:
        _own_edited(recipe, operands, cots, owned)
    if anomaly.mode.on:
        anomaly.check_cotangents(r, g, found)
    return operands, widened(found)


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
    cots: dict[int, Any],
    keep: frozenset[int],
    owned: set[int],
    short: dict[int, np.dtype],
    xp: Any,
    wrapped: bool,
    tape: TapeMaker,
) -> None:
    """The cotangents of a call whose inner calls are recorded only now."""
    if not any(v in cots for v in r.outputs):
        return
    state.site = r.site
    records, outputs = r.recipe.op.expand(r, wrapped, tape)
    for v, inner in zip(r.outputs, outputs, strict=True):
        if v in cots:
            if v not in keep and v in owned:
                owned.add(inner)
            owned.discard(v)
            if v in short:
                short[inner] = short[v] if v in keep else short.pop(v)
            cots[inner] = cots[v] if v in keep else cots.pop(v)
    walk(records, cots, keep, xp, wrapped, free=True, owned=owned, short=short, tape=tape)


def _pull(r: Recorded, g: Any, xp: Any, wrapped: bool, wide: bool, mine: bool, tape: TapeMaker) -> list[Any]:
    """Cotangents of the watched operands by the rules, in the general case. ``wide``: short floats in float32."""
    recipe = r.recipe
    if recipe.decomposed:
        if hasattr(recipe.op, "pull"):
            return recipe.op.pull(r, g, wrapped)
        if recipe.op.decompose is None:
            raise NonDifferentiableError(f"[{recipe.op.name}] has no derivative; it was called at {site_text(r.site)}")
        return _pull_decomposed(r, g, wrapped, wide, tape)
    saved, avals = r.saved, r.avals
    if wrapped:
        names = [*(r.inputs[p] for p in recipe.saves), *r.outputs]
        saved = tuple(named(b, v) if isinstance(v, int) else b for b, v in zip(saved, names, strict=False))
    if wide:
        saved = widened(saved)
        if avals is not None:
            avals = tuple(
                a._replace(dtype=FLOAT32) if isinstance(a, ShapeDtype) and a.dtype.num >= HALF else a for a in avals
            )
    if recipe.together is not None:
        found = recipe.together(xp, g, *recipe.arguments(0, saved, r.params, avals))
        return [found[p] for p in recipe.wanted]
    return _by_rules(recipe, g, saved, r.params, avals, xp, mine)


def _by_rules(recipe: Recipe, g: Any, saved: Any, params: Any, avals: Any, xp: Any, mine: bool) -> list[Any]:
    """Each operand's cotangent by the rule that it has. The memory of ``g`` may be written to where it is ``mine``."""
    if recipe.op is INDEX_SET:
        found: list[Any] = []
        # The written value's first. Then nobody reads the array's again, and a loop of n writes copies it once, and not n times.
        for i in reversed(range(len(recipe.pulls))):
            pull: Any = recipe.pulls[i]
            if pull is None:  # an index array
                gx = None
            elif mine and recipe.wanted[i] == 0:
                arrays, template = recipe.arguments(i, saved, params, avals)
                write(xp, g, 0.0, template, arrays)
                gx = g
            else:
                gx = pull[0](xp, g, *recipe.arguments(i, saved, params, avals))
            found.append(gx)
        return found[::-1]
    return [
        None if pull is None else pull[0](xp, g, *recipe.arguments(i, saved, params, avals))
        for i, pull in enumerate(recipe.pulls)
    ]


def _own_edited(recipe: Recipe, operands: Any, cots: dict[int, Any], owned: set[int]) -> None:
    """Note that nobody else holds the memory of the cotangent of an array before a write."""
    if recipe.op is INDEX_SET and recipe.wanted[0] == 0 and operands[0][0] not in cots:
        owned.add(operands[0][0])


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
    # Where outer tapes listen, each operand is an alias with a name of its own that they know: an array that is passed twice
    # would otherwise get the sum of both cotangents twice.
    args = [
        b if type(v) is not int else (apply(ALIAS, (named(b, v),)) if wrapped else wrap(b))
        for b, v in zip(r.saved, r.inputs, strict=True)
    ]
    args = widened(args) if wide else args
    tape = make()
    with tape:
        tape.watch([args[p] for p in r.recipe.wanted])
        outs = r.recipe.op.decompose(*args, **r.params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    seeds = g if isinstance(g, tuple) else (g,)
    if not wrapped:
        seeds = tuple(wrap(np.asarray(s)) if isinstance(s, np.generic) else wrap(s) for s in seeds)
    pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if tape.watches(o)]
    names = [args[p]._id for p in r.recipe.wanted]
    found = tape.backward([o for o, _ in pairs], [s for _, s in pairs], names)
    return [found.get(v) if wrapped or found.get(v) is None else found[v]._buf for v in names]


def fit(xp: Any, g: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """A cotangent made to fit the value it belongs to: broadcasting undone by sums, dtype cast.

    Rules leave both to this one place. The cotangent of a real value is real.
    """
    if type(g) is IndexSum:
        if g.shape == shape and (dtype.kind == "c" or g.dtype.kind != "c"):
            return g if g.dtype == dtype else cast(g, dtype)
        g = g.concrete()
    if dtype is FLOAT32 and g.dtype.num >= HALF:
        g = g.astype(dtype)  # before it is summed
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
            g = xp.astype(g, dtype)
    return g
