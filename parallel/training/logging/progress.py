"""Where a run is, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

METADATA_KEY = "meshtape.trainer"


@dataclass
class Progress:
    """Where a run is; saved with each checkpoint, and all that a resumed run needs beside the state."""

    step: int = 0
    consumed: int = 0
    epoch: int = 0
    seed: int = 0
    samples: int = 0
    batch: int = 0
    callbacks: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    rollbacks: int = 0
    loss: float | None = None  # the last that was logged and finite

    __is_tree__ = False


@dataclass
class TrainResult:
    """What became of a run.

    Attributes
    ----------
    reason
        ``"steps"``, ``"epochs"``, the name of a signal, or what :meth:`Trainer.stop` was told.
    step, epoch, consumed
        Steps done, epoch of the next sample, samples consumed (with those that ``drop_last`` left out).
    loss
        Of the last steps that were logged and had a finite one, in a run that was resumed those before the checkpoint too; NaN where
        there are none.
    history
        What was logged, in order.
    restarts
        How many losses of workers the run survived.
    checkpoint
        The newest checkpoint, if any.
    """

    reason: str
    step: int
    epoch: int
    consumed: int
    loss: float
    history: list[dict[str, Any]] = field(repr=False)
    restarts: int
    checkpoint: str | None

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the run before its time."""
        return self.reason.startswith("SIG")
