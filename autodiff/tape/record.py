"""Records of calls on a tape, and their VJP plans: what a tape keeps of a call, and how its rules find that again.

A plan belongs to an op and to the set of its operands that a tape watches. It is worked out once, so that recording a
call is a few look-ups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ...arrays.core.array import Array, new_id, next_id
from ...arrays.core.dispatch import argument_avals, call_site, compiled, written_to
from ...arrays.core.dtypes import HALF, complex128, float32, float64
from ...arrays.core.op import Op, ShapeDtype, state
from ...arrays.core.program import Const, Entry, Site
from ...arrays.core.shape_rules import elementwise
from ...arrays.indexing.indexing import GETITEM, INDEX_SET
from ...arrays.ops.elementwise import DIVIDE, MULTIPLY, NEGATIVE, SUBTRACT
from ...arrays.ops.manipulation import CONCAT, FLIP, PERMUTE_DIMS, RESHAPE
from ..rules import RULES
from ..rules.registry import RULES_OF_SHORT, VJPRule, all_in_one_launch, in_one_launch, same

_TAKES_SPARSE = frozenset({DIVIDE, GETITEM, MULTIPLY, NEGATIVE, SUBTRACT})
"""Ops whose rules only use operations that a sparse cotangent has."""
_MOVES = frozenset({CONCAT, FLIP, PERMUTE_DIMS, RESHAPE})
"""Ops whose rules put the elements of a cotangent elsewhere, and compute nothing."""


class VJPPlan:
    """One op, with one set of watched operands.

    Attributes
    ----------
    wanted
        The positions of the watched operands.
    saves
        The positions of the values that are kept, among the operands and, after these, the results; ``pick`` takes them
        out. An op without a rule is differentiated through its decomposition, for which all operands are kept.
    rest
        What is kept beside values: shapes and dtypes of operands, and parameters.
    pulls
        For each watched operand with a derivative its position, its rule and the function that finds the rule's
        arguments in what is kept. ``together`` are the same two of a rule that answers for all operands.
    places
        For each of ``pulls`` the places of these arguments, or None where they are more than values at places.
    simple
        Whether the backward pass may call the rules as they are: there is one result, and a rule for each operand.
    plain
        Whether it may in C, of arrays of NumPy: for any number of results, and by a rule for all operands, too.
    takes_sparse
        Whether the rules take a sparse cotangent.
    moves
        Whether the rules compute nothing, so that they take a cotangent of two bytes as it is.
    partial
        Whether the rule takes None for the cotangent of a result that nothing depends on.
    of_complex, of_short
        The plans of calls with complex results, and with results of one or two bytes.
    on_gpu
        The plan of calls on a GPU: the rules of an elementwise op are one launch together, which widens short floats
        itself (``widens``).
    """

    __slots__ = (
        *("keeps_result", "moves", "of_complex", "of_short", "on_gpu", "op", "partial", "pick", "places", "plain"),
        *("pulls", "rest", "saves", "simple", "single", "takes_sparse", "together", "wanted", "widens"),
    )

    def __init__(self, op: Op, wanted: tuple[int, ...], count: int, rule: VJPRule | None = None) -> None:
        rule, short = rule or RULES.get(op), None if rule else RULES_OF_SHORT.get(op)
        self.op, self.wanted, self.single = op, wanted, op.nout == 1
        self.pulls: tuple[tuple[int, Callable[..., Any], Any], ...] | None = None
        self.places: tuple[tuple[int | slice, ...] | None, ...] = ()
        self.together: tuple[Callable[..., Any], Any] | None = None
        self.rest: tuple[Any, ...] = ()
        self.simple = self.takes_sparse = self.moves = self.widens = False
        self.partial = rule is not None and rule.partial
        self.plain = rule is not None and op is not INDEX_SET
        self.saves: tuple[int, ...] = tuple(range(count))
        if rule is not None:
            keys = (-1,) if rule.together is not None else wanted
            needs = {n for k in keys for n in rule.needs.get(k, ())}
            saves = {n.where + count * (n.kind == "result") for n in needs if n.kind in ("operand", "result")}
            for n in needs:
                if n.kind in ("rest", "ans"):
                    saves.update(range(n.where, count) if n.kind == "rest" else range(count, count + op.nout))
            self.saves = tuple(sorted(saves))
            self.rest = tuple(dict.fromkeys(n for n in needs if n.kind in ("like", "rest_like", "param")))
            places = {k: self._places(rule.needs.get(k, ()), count) for k in keys}
            if rule.together is not None:
                self.together = rule.together, picker(places[-1])
                self.moves = op in _MOVES
            else:
                self.pulls = tuple((i, rule.each[i], picker(places[i])) for i in wanted if i in rule.each)
                whole = {i: all(type(p) is int for p in at) for i, at in places.items()}
                self.places = tuple(tuple(places[i]) if whole[i] else None for i, _, _ in self.pulls)
                self.simple = self.single and op is not INDEX_SET
                ones = all(fn is same for _, fn, _ in self.pulls)
                self.takes_sparse, self.moves = ones or op in _TAKES_SPARSE, ones or op in _MOVES
        self.pick = picker(self.saves)
        self.keeps_result = bool(self.saves) and self.saves[-1] >= count
        self.of_complex = self.on_gpu = self
        self.of_short = VJPPlan(op, wanted, count, short) if short else self
        if rule is not None and rule.analytic:
            self.of_complex = copy(self)
            self.of_complex.of_complex = self.of_complex.on_gpu = self.of_complex
            self.of_complex.pulls = tuple((i, fn, _conjugated(find)) for i, fn, find in self.pulls or ())
            self.of_complex.places = (None,) * len(self.of_complex.pulls)
        if op.infer is elementwise and (self.pulls or rule is None):
            self.on_gpu = copy(self)
            self.on_gpu.widens = True
        if op.infer is elementwise and self.pulls:
            self.on_gpu.pulls = tuple((i, fn if fn is same else in_one_launch(fn), find) for i, fn, find in self.pulls)
            if sum(fn is not same for _, fn, _ in self.pulls) > 1:
                self.on_gpu.together, self.on_gpu.simple = (all_in_one_launch(self.on_gpu.pulls), tuple), False

    def _places(self, needs: Sequence[Any], count: int) -> list[int | slice]:
        """The places of the arguments of a rule in what is kept."""
        at: list[int | slice] = []
        operands = sum(p < count for p in self.saves)
        for n in needs:
            if n.kind in ("like", "rest_like", "param"):
                at.append(len(self.saves) + self.rest.index(n))
            elif n.kind == "rest":
                at.append(slice(sum(p < n.where for p in self.saves), operands))
            elif n.kind == "ans" and not self.single:
                at.append(slice(operands, len(self.saves)))
            else:
                at.append(self.saves.index(count + (n.where or 0) if n.kind in ("ans", "result") else n.where))
        return at

    def others(self, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """What ``rest`` names of a call."""
        found: list[Any] = []
        for n in self.rest:
            if n.kind == "param":
                found.append(params[n.where])
            elif n.kind == "like":
                found += argument_avals((args[n.where],))
            else:
                found.append(argument_avals(args[n.where :]))
        return tuple(found)


def picker(places: Sequence[int | slice]) -> Callable[[Any], Any]:
    """A function that takes the values at these places out of a sequence; those of a slice are one value."""
    if len(places) > 1:
        return itemgetter(*places)
    if places and isinstance(places[0], slice):
        return lambda values: (values[places[0]],)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _conjugated(find: Callable[[tuple[Any, ...]], Sequence[Any]]) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    return lambda kept: [v.conjugate() if getattr(v, "dtype", complex128).kind == "c" else v for v in find(kept)]


def plan_for(op: Op, mask: int) -> VJPPlan | None:
    """The plan of a call, or None where no operand is watched. The first bit of ``mask`` is set, and of those after it
    each whose operand is watched."""
    if mask not in op.plans:
        count = mask.bit_length() - 1
        wanted = tuple(i for i in range(count) if mask >> (count - 1 - i) & 1)
        op.plans[mask] = VJPPlan(op, wanted, count) if wanted else None
    return op.plans[mask]


# ----- records --------------------------------------------------------------------------------------------------------


def is_differentiable(dtype: np.dtype) -> bool:
    """Whether values of this dtype have derivatives: floats and complex numbers, ml_dtypes' included."""
    return dtype.kind in "fc" or (dtype.kind == "V" and dtype.names is None)


class Recorded(NamedTuple):
    """One call on a tape. (A tape holds plain tuples of these fields, which are made in a fraction of the time.)

    ``inputs`` has the names of all operands; a scalar is a ``Const``, or itself where it is a float. ``kept`` is what
    the plan keeps. ``out_avals`` are given where there are several results.
    """

    plan: VJPPlan
    inputs: Sequence[Any]
    outputs: Sequence[int]
    kept: tuple[Any, ...]
    params: Mapping[str, Any]
    out_avals: tuple[ShapeDtype, ...] | None
    origin: str | None
    site: Site | None

    @property
    def entry(self) -> Entry:
        """The call as others read it."""
        inputs = tuple(v if type(v) is int or type(v) is Const else Const(v) for v in self.inputs)
        return Entry(self.plan.op, inputs, tuple(self.outputs), self.params, self.origin, self.site)

    @property
    def name(self) -> str:
        """The word that the user wrote."""
        return self.origin or self.plan.op.name


# Half the time of calling the named tuple's own constructor, for each scalar of a recorded call.
const = functools.partial(tuple.__new__, Const)

_OURS = 4 if compiled is None else 3
"""Frames of ours from :func:`call_site` up to an operator: that of ``invoke`` is none in C."""


class Recording:
    """The record of the calls that watched arrays went into.

    ``live`` has the values that have gradients, by name, with shape and dtype of their cotangents. ``short`` has the
    dtypes of those among them that are floats of one or two bytes, whose cotangents are float32.
    """

    __slots__ = ("_records", "live", "short")
    keeps_no_operand = True
    """Of a write it keeps no array as it was before: that may be written in place, and shown afterwards."""

    def __init__(self) -> None:
        self._records: list[Any] = []  # tuples of the fields of Recorded
        self.live: dict[int, tuple[tuple[int, ...], np.dtype]] = {}
        self.short: dict[int, np.dtype] = {}

    def watches(self, x: Array) -> bool:
        """Whether a call on this array would be recorded."""
        return x._id in self.live

    def follow(self, name: int, buf: Any) -> None:
        """Have a value of this name a gradient, if its dtype allows one."""
        dtype = buf.dtype
        if is_differentiable(dtype):
            if dtype.num >= HALF:
                self.short[name], dtype = dtype, float32
            self.live[name] = tuple(buf.shape), dtype

    def record(
        self, op: Op, args: tuple[Any, ...], bufs: Sequence[Any], outs: tuple[Array, ...], params: Mapping[str, Any]
    ) -> None:
        """Called by the dispatcher after each op call of this thread; must not call ops itself."""
        if op.nondifferentiable:
            return
        live = self.live
        names: list[Any] = []
        mask = 1
        for a in args:
            mask += mask
            if type(a) is Array:
                name = a._id
                if name in live:
                    mask += 1
                elif a._buf is not bufs[len(names)]:
                    raise written_to(op)
                names.append(name)
            else:
                names.append(a if type(a) is float else const((a,)))
        try:
            plan = op.plans[mask]
        except KeyError:
            plan = plan_for(op, mask)
        if plan is None:
            return
        if plan.single:
            out = outs[0]
            name = out._id
            if not name:
                name = out._id = next_id()
            buf = out._buf
            dtype = buf.dtype
            if dtype is float64 or dtype is float32:
                live[name] = buf.shape, dtype
            else:
                self.follow(name, buf)
                if dtype.kind == "c":
                    plan = plan.of_complex
                elif name in self.short:
                    plan = plan.of_short
            if type(buf) is not np.ndarray:
                plan = plan.on_gpu
            kept = plan.pick((*bufs, buf) if plan.keeps_result else bufs) if plan.saves else ()
            outputs, out_avals = (name,), None
        else:
            outputs, out_avals = tuple(map(new_id, outs)), argument_avals(outs)
            for o in outs:
                self.follow(o._id, o._buf)
            kept = plan.pick((*bufs, *[o._buf for o in outs]))
        if plan.rest:
            kept += plan.others(args, params)
        self._records.append((plan, names, outputs, kept, params, out_avals, state.origin, call_site(_OURS)))
