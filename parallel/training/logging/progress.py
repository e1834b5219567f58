"""The position of a run, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

METADATA_KEY = "meshtape.trainer"


@dataclass
class Progress:
    """The position of a run. It is saved with each checkpoint; a resumed run needs only this and the state."""

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
    """The result of a run.

    Attributes
    ----------
    reason
        ``"steps"``, ``"epochs"``, the name of a signal, or the argument of :meth:`Trainer.stop`.
    step, epoch, consumed
        Steps done, epoch of the next sample, samples consumed (with those that ``drop_last`` left out).
    loss
        The last finite loss that was logged, by a resumed run also before the checkpoint; NaN if there is none.
    history
        The logged numbers, in order.
    restarts
        The number of losses of workers that the run survived.
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
