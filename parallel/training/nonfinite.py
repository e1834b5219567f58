"""Policies for non-finite steps, whose loss or gradients are NaN or infinite.

``"raise"``: the run ends with a :class:`NonFiniteError`, at the step before. ``"skip"``: the step is left out, and its
batch with it. ``"rollback"``: the run goes on from its newest snapshot or checkpoint, with the batch after the one that
failed. The step itself never changes anything (:mod:`.step`). Its flag is read where numbers are logged or saved. With
``"raise"`` and ``"rollback"`` the steps in between do nothing, so that the run stays before the step.

A scaled loss (float16) is tried at smaller scales first; the policy applies if it overflows at the smallest one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...arrays.core import tree as trees
from ...arrays.core.errors import NonFiniteError
from ...arrays.ops.elementwise import isfinite
from ...arrays.ops.manipulation import stack
from ...arrays.reductions.reductions import all as all_
from .logging.progress import Progress
from .precision import LEAST

OnNonFinite = Literal["raise", "skip", "rollback"]

IN_A_ROW = 30
"""The number of skipped steps in a row that ends a run."""

ROLLBACKS = 3
"""The most rollbacks of a run to one step."""


def are_finite(params: Any) -> bool:
    """Whether all numbers of a tree are finite, with one query for each mesh."""
    flags: dict[int, list[Any]] = {}
    for x in trees.flatten(params)[0]:
        if x.dtype.kind in "fcV":
            flags.setdefault(0 if x.sharding is None else id(x.sharding.mesh), []).append(all_(isfinite(x)))
    return all(bool(np.asarray(stack(found)).all()) for found in flags.values())


class NonFiniteStep(NonFiniteError):
    """The error of a step. A rollback goes on after ``consumed`` samples; None where it would not help."""

    def __init__(self, message: str, consumed: int | None = None) -> None:
        super().__init__(message)
        self.consumed = consumed


class Watch:
    """Reads the flags of steps, with the position at the start of each unread step."""

    def __init__(self, policy: OnNonFinite, scales: bool) -> None:
        self.policy, self.scales = policy, scales
        self._before: list[Progress] = []
        self._in_a_row = 0

    def begin(self, at: Progress) -> None:
        self._before.append(dataclasses.replace(at))

    def read(self, rows: Sequence[Mapping[str, float]], at: Progress) -> NonFiniteStep | None:
        """Count the skipped steps. Returns the error that ends the run or rolls it back, if any.

        ``at`` is the position after the last step. If the steps did nothing from the first bad one on, it is set to
        before that.
        """
        before, self._before = self._before, []
        for i, row in enumerate(rows):
            if row["finite"]:
                self._in_a_row = 0
                continue
            said = (
                f"at step {before[i].step + 1} the loss is {row['loss']} and the norm of the gradients "
                f"{row['grad_norm']}"
            )
            if not row["weight"] > 0:
                said += f", and the weight {row['weight']}: a total has a mean over a positive weight alone"
            if self.policy != "skip" and not self.scales:
                consumed = before[i + 1].consumed if i + 1 < len(rows) else at.consumed
                at.step, at.consumed, at.epoch = before[i].step, before[i].consumed, before[i].epoch
                return NonFiniteStep(said, consumed)
            at.skipped += 1
            self._in_a_row += 1
            if self.scales and row["scale"] <= LEAST and self.policy != "skip":
                return NonFiniteStep(f"the gradients are not finite at any scale of the loss: {said}", at.consumed)
            if self._in_a_row == IN_A_ROW:
                return NonFiniteStep(f"{IN_A_ROW} steps in a row were skipped: {said}")
        return None
