"""The VJP plan of a call: what a tape keeps of it, and how its rules find that again.

A plan belongs to an op and to the set of its operands that a tape watches. It is worked out once, so that recording a
call is a few look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any

from ...arrays.core.dispatch import argument_avals
from ...arrays.core.dtypes import complex128
from ...arrays.core.op import Op
from ...arrays.indexing.indexing import GETITEM, INDEX_SET
from ...arrays.ops.elementwise import DIVIDE, MULTIPLY, NEGATIVE, SUBTRACT
from ..rules import RULES
from ..rules.registry import same

_TAKES_SPARSE = frozenset({DIVIDE, GETITEM, MULTIPLY, NEGATIVE, SUBTRACT})
"""Ops whose rules only use operations that a sparse cotangent has."""


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
    takes_sparse
        Whether the rules take a sparse cotangent.
    of_complex
        The plan of calls with complex results.
    """

    __slots__ = (
        "keeps_result",
        "of_complex",
        "op",
        "pick",
        "places",
        "pulls",
        "rest",
        "saves",
        "simple",
        "single",
        "takes_sparse",
        "together",
        "wanted",
    )

    def __init__(self, op: Op, wanted: tuple[int, ...], count: int) -> None:
        rule = RULES.get(op)
        self.op, self.wanted, self.single = op, wanted, op.nout == 1
        self.pulls: tuple[tuple[int, Callable[..., Any], Any], ...] | None = None
        self.places: tuple[tuple[int | slice, ...] | None, ...] = ()
        self.together: tuple[Callable[..., Any], Any] | None = None
        self.rest: tuple[Any, ...] = ()
        self.simple = self.takes_sparse = False
        self.saves: tuple[int, ...] = tuple(range(count))
        if rule is not None:
            keys = (-1,) if rule.together is not None else wanted
            needs = {n for k in keys for n in rule.needs.get(k, ())}
            saves = {n.where for n in needs if n.kind == "operand"}
            for n in needs:
                if n.kind in ("rest", "ans"):
                    saves.update(range(n.where, count) if n.kind == "rest" else range(count, count + op.nout))
            self.saves = tuple(sorted(saves))
            self.rest = tuple(dict.fromkeys(n for n in needs if n.kind in ("like", "rest_like", "param")))
            places = {k: self._places(rule.needs.get(k, ()), count) for k in keys}
            if rule.together is not None:
                self.together = rule.together, _picker(places[-1])
            else:
                self.pulls = tuple((i, rule.each[i], _picker(places[i])) for i in wanted if i in rule.each)
                whole = {i: all(type(p) is int for p in at) for i, at in places.items()}
                self.places = tuple(tuple(places[i]) if whole[i] else None for i, _, _ in self.pulls)
                self.simple = self.single and op is not INDEX_SET
                self.takes_sparse = op in _TAKES_SPARSE or all(fn is same for _, fn, _ in self.pulls)
        self.pick = _picker(self.saves)
        self.keeps_result = bool(self.saves) and self.saves[-1] >= count
        self.of_complex = self
        if rule is not None and rule.analytic:
            self.of_complex = copy(self)
            self.of_complex.pulls = tuple((i, fn, _conjugated(find)) for i, fn, find in self.pulls or ())
            self.of_complex.places = (None,) * len(self.of_complex.pulls)

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
                at.append(self.saves.index(count if n.kind == "ans" else n.where))
        return at

    def others(self, args: tuple[Any, ...], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """What ``rest`` names of a call."""
        avals = argument_avals(args)
        found = []
        for n in self.rest:
            where = n.where
            found.append(params[where] if n.kind == "param" else avals[where] if n.kind == "like" else avals[where:])
        return tuple(found)


def _picker(places: Sequence[int | slice]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes the values at these places out of a tuple; those of a slice are one value, a tuple."""
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
