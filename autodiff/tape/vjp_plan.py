"""The VJP plan of a call: how it is recorded and pulled back, worked out once for each kind of call.

A *recipe* belongs to an op and to the set of its operands that a tape watches. It lists what the rules of those operands need of
the call, so that recording is a few tuple look-ups, and how each rule's arguments are found in what was saved. Recording is the
price of every eager op under a tape: this is why it is not worked out call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.core.op import Op
from ...arrays.core.shape_rules import elementwise
from ..rules import RULES, Need


class Recipe:
    """One op, with one set of watched operands.

    ``saves`` are the positions of the operands whose values are kept, in order; where ``keeps_ans`` the results follow them.
    ``pulls`` has, for each watched operand, its rule and where the rule's arguments are found (see ``_place``), or None for these where
    a rule takes any number of operands. ``together`` is a rule that answers for all operands. An op without a rule
    (``rule is None``) is differentiated through its decomposition, for which all operands are kept.

    ``quick`` is ``pulls`` in the form that the backward pass on raw buffers reads, where all of them need saved values only: the
    rule and the place of its one argument, or the tuple of their places. ``keeps`` says in a word what is saved of one or two
    operands (0: nothing, 1: the first, 2: the second, 3: both), ``floating`` that a floating operand makes a floating result, and
    ``direct`` that there is one result and a rule for each operand.
    """

    __slots__ = (
        "decomposed",
        "direct",
        "floating",
        "keeps",
        "keeps_ans",
        "keeps_avals",
        "needs",
        "op",
        "pulls",
        "quick",
        "saved_at",
        "saves",
        "single",
        "together",
        "wanted",
    )

    def __init__(self, op: Op, wanted: tuple[int, ...], count: int) -> None:
        rule = RULES.get(op)
        self.op, self.wanted, self.single = op, wanted, op.nout == 1
        self.decomposed = rule is None
        self.together = None if rule is None else rule.together
        self.direct = self.single and rule is not None and self.together is None
        self.pulls: list[tuple[Callable[..., Any], tuple[int | str, ...] | None] | None] = []
        self.needs: list[tuple[Need, ...]] = []
        self.keeps_ans, self.keeps_avals = False, not self.single
        if rule is None:
            self.saves = tuple(range(count))
        else:
            positions, self.keeps_ans = rule.saves(wanted, count)
            self.saves = tuple(sorted(positions))
        self.saved_at = {p: i for i, p in enumerate(self.saves)}
        self.keeps = sum(1 << p for p in self.saves)
        self.floating = op.infer is elementwise
        self.quick: tuple[tuple[Callable[..., Any] | None, Any], ...] | None = None
        if rule is None:
            return
        keys = [-1] if rule.together is not None else wanted
        for key in keys:
            fn = rule.together if key == -1 else rule.each.get(key)
            if fn is None:  # an operand without a derivative (an index, a condition)
                self.pulls.append(None)
                self.needs.append(())
                continue
            needs = rule.needs[key]
            self.needs.append(needs)
            self.keeps_avals |= any(n.kind in ("like", "rest_like") for n in needs)
            places = [self._place(n) for n in needs]
            at = None if None in places else tuple(places)
            self.pulls.append((fn, at))
        if self.single and self.together is None and all(p is None or _are_saved(p[1]) for p in self.pulls):
            self.quick = tuple(
                (None, ()) if p is None else (p[0], p[1][0] if len(p[1]) == 1 else p[1]) for p in self.pulls
            )

    def _place(self, n: Need) -> int | str | None:
        """The source of an argument of a rule: its position among saved values, or the name of a parameter.

        Below zero it is the position of an aval from the end; None for any other argument."""
        if n.kind == "operand":
            return self.saved_at[n.where]
        if n.kind == "ans":
            return len(self.saves) if self.single else None
        if n.kind == "like":
            return -1 - n.where
        return n.where if n.kind == "param" else None

    def arguments(self, which: int, saved: Sequence[Any], params: Any, avals: Any) -> list[Any]:
        """Arguments, after ``xp`` and ``g``, of the ``which``-th rule."""
        pull: Any = self.pulls[which]
        if pull is not None and pull[1] is not None:
            # A loop over its needs takes longer than most rules.
            return [params[k] if type(k) is str else saved[k] if k >= 0 else avals[-1 - k] for k in pull[1]]
        out: list[Any] = []
        n_saved = len(self.saves)
        for n in self.needs[which]:
            if n.kind == "operand":
                out.append(saved[self.saved_at[n.where]])
            elif n.kind == "ans":
                out.append(saved[n_saved] if self.single else tuple(saved[n_saved:]))
            elif n.kind == "param":
                out.append(params[n.where])
            elif n.kind == "rest":
                out.append(tuple(saved[self.saved_at[p]] for p in self.saves if p >= n.where))
            elif n.kind == "rest_like":
                out.append(avals[n.where :])
            else:
                out.append(avals[n.where])
        return out


def _are_saved(at: tuple[int | str, ...] | None) -> bool:
    return at is not None and all(type(k) is int and k >= 0 for k in at)


RECIPES: dict[Op, dict[int, Recipe]] = {}
"""Recipes by op and by mask, see :func:`recipe_for`; the tape looks here first, which saves it a call."""


def recipe_for(op: Op, mask: int) -> Recipe:
    """The recipe of a call; bit ``i`` of ``mask`` is set where operand ``i`` is watched, and one bit above the last operand."""
    by_mask = RECIPES.get(op)
    if by_mask is None:
        by_mask = RECIPES[op] = {}
    found = by_mask.get(mask)
    if found is None:
        count = mask.bit_length() - 1
        found = by_mask[mask] = Recipe(op, tuple(i for i in range(count) if mask >> i & 1), count)
    return found
