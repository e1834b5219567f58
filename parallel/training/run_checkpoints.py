"""The checkpoints of a run, written in the background while steps go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...storage import SaveHandle
from .logging.progress import METADATA_KEY
from .nonfinite import NonFiniteStep


class RunCheckpoints:
    """Base of the trainer: at most one checkpoint is being written, and one counts once it is complete."""

    checkpoints: Any
    save_every: int | None
    saved_at: int | None
    _saving: tuple[int, SaveHandle] | None

    def newest(self) -> str | None:
        """The newest complete checkpoint of this run."""
        return None if self.saved_at is None or self.checkpoints is None else self.checkpoints.path(self.saved_at)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after a step that is not the last."""
        if self.save_every is not None:
            return step % self.save_every == 0
        c = self.checkpoints
        return c is not None and (c.every_steps or c.every_minutes) is not None and c.should_save(step)

    def saving_at(self) -> int | None:
        """Step of the newest checkpoint that was begun."""
        return self.saved_at if self._saving is None else self._saving[0]

    def _go_back(self, path: str) -> None:
        """Where the state just loaded is that of an earlier checkpoint of this run, the next one goes on from it."""
        c, step = self.checkpoints, self.progress.step
        if c is not None and Path(path).absolute() == Path(c.path(step)).absolute():
            c.rollback(step)

    def _save(self) -> None:
        at = self.position()
        if not self.session.finite():
            raise NonFiniteStep(f"the parameters are not finite after step {at.step}, and are not saved", at.consumed)
        last = self.history[-1] if self.history else {}
        metrics = {n: v for n, v in last.items() if n != "step" and isinstance(v, int | float)}
        self.landed(wait=self.checkpoints.when_busy == "wait")
        done = self.checkpoints.save(
            at.step, self.state, {METADATA_KEY: dataclasses.asdict(at)}, metrics=metrics, overwrite=True
        )
        if done is None:  # left out, as the one before is still being written
            return
        if self._saving is not None:  # it was complete just now
            self._saved(self._saving[0])
        if isinstance(done, SaveHandle):
            self._saving = (at.step, done)
        else:
            self._saved(at.step)

    def landed(self, wait: bool = False) -> None:
        """Record the background checkpoint if it is complete. Raises its error."""
        if self._saving is None or not (wait or self._saving[1].done()):
            return
        (step, _), self._saving = self._saving, None
        self.checkpoints.wait()
        self._saved(step)

    def _saved(self, step: int) -> None:
        self.saved_at = step
        self.report.note()  # a save may land while the run restarts
        for c in self.callbacks:
            c.on_save(self, self.checkpoints.path(step))

    def _let_land(self) -> None:
        """Nothing is being written when the run ends. A run that ends well has waited before: this is for one that ends
        by another error."""
        try:
            self.landed(wait=True)
        except Exception as e:
            self.report.display.say(f"a background save failed: {e}")
