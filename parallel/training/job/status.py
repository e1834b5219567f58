"""The status of a run: a small JSON file beside its checkpoints, and a note at the Dask scheduler."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from ....arrays.core.errors import ClusterError, TrainingError
from ...dask.workers import call_scheduler, on_loop, scheduler_answer

FILE = "status.json"
TOPIC = "meshtape-jobs"
_EVERY = 1.0  # seconds between two notes; changes of state are written at once
_CLOCKS = 60.0  # seconds by which the clock may have been set since the machine started, from where the system counts


class Status:
    """Keeps ``status.json`` of a run up to date. The file is replaced, never half written."""

    def __init__(self, directory: Path | None, client: Any = None, name: str = "") -> None:
        self.path = None if directory is None else directory / FILE
        self.client = client
        self.facts: dict[str, Any] = {
            "name": name or (directory.name if directory is not None else "run"),
            "state": "starting",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
        }
        self._written = 0.0

    def update(self, **facts: Any) -> None:
        """New facts; written now where the state changes, else once a second at most."""
        changed = "state" in facts and facts["state"] != self.facts["state"]
        self.facts.update(facts)
        if changed or time.monotonic() - self._written >= _EVERY:
            self.write()

    def write(self) -> None:
        """Write the file, and tell the scheduler."""
        self._written = time.monotonic()
        facts = {**self.facts, "updated": time.time()}
        facts = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
        if self.path is not None:
            beside = self.path.with_name(f"{FILE}.{os.getpid()}.new")
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                beside.write_text(json.dumps(facts, indent=1), encoding="utf-8")
                beside.replace(self.path)
            except OSError:  # others only look here: it ends no run, nor hides why one ends
                with contextlib.suppress(OSError):
                    beside.unlink()
        if self.client is not None and self.client.status == "running":
            # Others only look here; a scheduler that is just going away, or stands still, must not end or hold up the
            # run in its stead.
            key = [TOPIC, f"{facts['host']}-{facts['pid']}-{facts['name']}"]
            with contextlib.suppress(ClusterError, TimeoutError):
                on_loop(
                    self.client, scheduler_answer, self.client, "set_metadata", keys=key, value=facts, seconds=_EVERY
                )


def read_status(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts in ``status.json``, or in the run's directory. ``alive`` says whether its process still is, where that
    is known."""
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(f"{path} is no directory of a run: it has no {FILE}") from None
    except (OSError, ValueError) as e:
        raise TrainingError(f"{file} cannot be read: {e}") from e
    if not isinstance(facts, dict) or "state" not in facts:
        raise TrainingError(f"{file} is no status of a run")
    return with_life(facts)


def with_life(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with ``alive``: whether the process of a run on this host is there; None for another host."""
    alive: bool | None = None
    if facts.get("host") == socket.gethostname() and isinstance(facts.get("pid"), int):
        alive = _lives(facts["pid"], facts.get("started"))
    return {**facts, "alive": alive}


def _lives(pid: int, started: Any) -> bool:
    """Whether the process that had this number when a run started still runs: not one that got the number later, nor
    one that is dead and was not waited for."""
    import psutil

    try:
        process = psutil.Process(pid)
        later = isinstance(started, int | float) and process.create_time() > started + _CLOCKS
        return not later and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def scheduler_jobs(client: Any) -> list[dict[str, Any]]:
    """The runs reported to a Dask scheduler, the latest last."""
    held = call_scheduler(client, "get_metadata", keys=[TOPIC], default={})
    return sorted((with_life(f) for f in held.values()), key=lambda f: f.get("started", 0.0))
