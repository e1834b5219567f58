"""Writers of a run's numbers: JSON lines, and event files for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....arrays.core.errors import TrainingError


class JsonLines:
    """One JSON object a line, each with its step.

    A run that resumes at step ``n`` drops the lines after ``n``, as it repeats those steps.
    """

    def __init__(self, path: str | os.PathLike[str], step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_until(step)
        self._file = self.path.open("a", encoding="utf-8")

    def _keep_until(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = [line for line in read_lines(self.path) if line["step"] <= step]
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        beside.replace(self.path)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Append the numbers of a step. NaN and infinities become texts, as JSON has none."""
        odd = {n: repr(v) for n, v in numbers.items() if isinstance(v, float) and not math.isfinite(v)}
        line = {"step": step, **numbers, **odd}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that a crash cut off is left out."""
    out = []
    with Path(path).open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                break
            try:
                line = json.loads(text)
            except json.JSONDecodeError as e:
                raise TrainingError(f"{path}, line {number}: {e}") from e
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise TrainingError(f"{path}, line {number}: an object with an integer step was expected")
            out.append(line)
    return out


class EventFile:
    """Scalars for TensorBoard, in a file of its own: ``events.out.tfevents.…`` in ``directory``.

    TensorBoard then hides the scalars of earlier files for steps after ``step``, the last finished step. Raises
    :class:`TrainingError` where the package tensorboardX is missing.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int = 0) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError as e:
            raise TrainingError("events for TensorBoard need tensorboardX: pip install 'meshtape[tensorboard]'") from e
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._event = event_pb2.Event
        # (This writer, unlike tensorboardX's SummaryWriter, has no thread: an error of the disk is raised where it
        # happens.)
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
        self.path = Path(self._file._file_name)
        # A session that starts at a step hides the scalars of earlier files from that step on.
        self._append(step + 1 if step else 0, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Append the numbers of a step; other values are left out."""
        given = {n: v for n, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        self._append(step, summary={"value": [{"tag": n, "simple_value": v} for n, v in given.items()]})

    def _append(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
