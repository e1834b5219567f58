"""Callbacks of a run, and early stopping as one of them."""

from __future__ import annotations

import math
from typing import Any

from ...arrays.core.errors import TrainingError


class Callback:
    """Base of callbacks: every method may be overridden, none need be.

    All are called in the process that holds the Trainer, between two steps. ``trainer`` is the
    :class:`meshtape.Trainer`; ``trainer.stop(reason)`` ends the run there. ``state`` is saved with each checkpoint, as
    plain numbers and texts; a run that resumes passes it to ``restore``.
    """

    name = ""

    def on_start(self, trainer: Any) -> None:
        """Before the first step of a run, or the first one after a restart."""

    def on_log(self, trainer: Any, numbers: dict[str, Any]) -> None:
        """After each ``log_every`` steps, with the logged numbers; without a loss if no sample counted."""

    def on_evaluate(self, trainer: Any, numbers: dict[str, Any]) -> None:
        """After each evaluation; names begin with ``eval_``."""

    def on_save(self, trainer: Any, path: str) -> None:
        """After a checkpoint is complete; if it is written in the background, before a later step or at the end."""

    def on_stop(self, trainer: Any, reason: str) -> None:
        """After the last step."""

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state`."""


class EarlyStop(Callback):
    """Ends the run when a number of the evaluation has not improved for ``patience`` evaluations.

    Parameters
    ----------
    metric
        The name of the number, as it is logged.
    patience
        The number of evaluations in a row without improvement.
    least
        An improvement smaller than this is none.
    highest
        Whether more is better.

    Examples
    --------
    >>> stop = EarlyStop(patience=2)
    >>> [stop.seen(v) for v in (3.0, 2.0, 2.5, 2.1)]
    [False, False, False, True]
    """

    name = "early_stop"

    def __init__(
        self, metric: str = "eval_loss", *, patience: int = 3, least: float = 0.0, highest: bool = False
    ) -> None:
        if patience < 1:
            raise TrainingError(f"[EarlyStop] patience must be at least 1, got {patience}")
        self.metric, self.patience, self.least, self.highest = metric, patience, least, highest
        self.best, self.without = math.inf, 0

    def seen(self, value: float) -> bool:
        """Record a value. Returns whether it is time to stop. NaN is no improvement."""
        signed = -value if self.highest else value
        if signed < self.best - self.least:
            self.best, self.without = signed, 0
        else:
            self.without += 1
        return self.without >= self.patience

    def on_evaluate(self, trainer: Any, numbers: dict[str, Any]) -> None:
        if self.metric not in numbers:
            raise TrainingError(
                f"[EarlyStop] there is no {self.metric!r} to wait for: the evaluation gives {', '.join(numbers)}"
            )
        if self.seen(numbers[self.metric]):
            trainer.stop(f"early stop: {self.metric} has not improved for {self.patience} evaluations")

    def state(self) -> dict[str, Any]:
        return {"best": None if math.isinf(self.best) else self.best, "without": self.without}

    def restore(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else state["best"]
        self.without = state["without"]
