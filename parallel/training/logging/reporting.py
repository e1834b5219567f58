"""Reports of a run: its history, files of numbers, status, and lines on a terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from typing import Any

from ....storage.stores.atomic_directory import writing
from ..job.jobs import client_of, current_job, workers_of
from ..job.status import Status
from .display import Display
from .metrics import EventFile, JsonLines


class Reporting:
    """The part of a run that writes and shows numbers. ``shown`` is the user's option ``progress``."""

    def __init__(self, trainer: Any, shown: bool | None) -> None:
        self.trainer, self._shown = trainer, shown
        self.history: list[dict[str, Any]] = []
        self._writers: list[JsonLines | EventFile] = []

    def begin(self, total: int) -> None:
        """Begin a call of ``fit``, up to step ``total``. A job without a terminal shows plain lines, for its log."""
        t = self.trainer
        self.status = Status(t.directory, client_of(t.mesh))
        shown = True if self._shown is None and current_job() is not None else self._shown
        self.display = Display(total, wanted=shown)

    def open_writers(self) -> None:
        """Open the files of numbers, and drop the numbers of steps that are repeated."""
        self._close_writers()
        t = self.trainer
        if t.directory is not None:
            step = t.progress.step
            with writing(str(t.directory / "metrics.jsonl")):
                self._writers = [JsonLines(t.directory / "metrics.jsonl", step)]
                if importlib.util.find_spec("tensorboardX") is not None:
                    self._writers.append(EventFile(t.directory / "events", step))

    def _close_writers(self) -> None:
        for w in self._writers:
            with contextlib.suppress(OSError):  # a failed write was reported then
                w.close()
        self._writers = []

    def close(self) -> None:
        self.display.close()
        self._close_writers()

    def log(self, step: int, numbers: dict[str, Any]) -> None:
        self._write(step, numbers)
        self.display.log(step, numbers)
        self.note("running")

    def judged(self, step: int, numbers: dict[str, Any]) -> None:
        """Log the numbers of an evaluation beside those of the step."""
        self._write(step, numbers)
        self.display.log(step, {**self.history[-1]})

    def _write(self, step: int, numbers: dict[str, Any]) -> None:
        if self.history and self.history[-1]["step"] == step:
            self.history[-1].update(numbers)
        else:
            self.history.append({"step": step, **numbers})
        for w in self._writers:
            with writing(str(w.path)):
                w.write(step, numbers)

    def forget_after(self, step: int) -> None:
        """Drop the history after a step, as later steps are repeated and logged again."""
        self.history = [h for h in self.history if h["step"] <= step]

    def stopping(self, received: signal.Signals) -> None:
        """Say that a signal ends the run after the running step, which may take a while."""
        saved = "" if self.trainer.checkpoints is None else " and a checkpoint"
        self.display.say(f"{received.name}: the run stops after this step{saved}; once more stops it at once")

    def note(self, state: str | None = None, **facts: Any) -> None:
        """Publish the status of the run, in the state that it is in by default."""
        t = self.trainer
        at, mesh = t.progress, t.session.mesh
        last = self.history[-1] if self.history else {}
        self.status.update(
            state=state or self.status.facts["state"],
            step=at.step,
            steps=t.total(),
            epoch=at.epoch,
            loss=last.get("loss"),
            per_second=last.get("per_second"),
            mesh={} if mesh is None else mesh.describe(),
            workers=[] if mesh is None else workers_of(mesh),
            checkpoint=t.newest(),
            restarts=t.recovery.restarts,
            **facts,
        )
