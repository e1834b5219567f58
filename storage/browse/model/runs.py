"""The directory of a run, local or in an object store: its checkpoints by step, with sizes, metrics and faults.

It only looks: unlike the save of a `CheckpointManager` it collects no remains and deletes nothing.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ....arrays.core.errors import CheckpointError
from ...checkpoint import branches, numbered
from ...checkpoint.branches import Branch
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.numbered import Direction
from ...format import manifest
from ...loading import runs
from ...stores import atomic_directory
from ...stores import store as stores
from .text import human_bytes

READ = 2000  # steps of a run for a page
_CACHED = 10_000


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run, or an incomplete one: ``note`` then says why."""

    name: str
    step: int
    arrays: int = 0
    nbytes: int = 0
    saved: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()
    policy: tuple[str, Direction] = ("", "")  # metric and direction of the manager that saved it
    note: str = ""
    branch: Branch = field(default_factory=Branch)
    base: manifest.Base | None = None  # from which it is a delta
    identity: str = ""
    kind: str = "meshtape"  # as of an opened checkpoint

    def metric(self, name: str) -> float | None:
        return dict(self.metrics).get(name)

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.saved)) if self.saved else "–"


@dataclass(frozen=True)
class RunSteps:
    """Steps in order, remains of interrupted saves, and which step is best."""

    steps: list[RunCheckpoint]
    remains: list[str]
    metrics: list[str]
    metric: str = ""
    best_is: Direction = ""
    branch: Branch = field(default_factory=Branch)  # that was begun last
    unread: int = 0  # older steps, beyond those that were asked for

    @property
    def complete(self) -> list[RunCheckpoint]:
        return [s for s in self.steps if not s.note]

    @property
    def origin(self) -> str:
        """The branch of a run of ours; of others' the kinds of its checkpoints."""
        kinds = dict.fromkeys(s.kind for s in self.complete)
        return ", ".join(kinds) if kinds.keys() - {"meshtape"} else str(self.branch)

    @property
    def latest(self) -> RunCheckpoint | None:
        line = self.branch.line(self.complete) or self.complete
        return line[-1] if line else None

    @property
    def best(self) -> RunCheckpoint | None:
        """The complete step with the best value of ``metric``, the newest of equals; None where no step has it, or
        nobody says which value is best."""
        sign = 1.0 if self.best_is == "lowest" else -1.0
        values = [(s, s.metric(self.metric)) for s in self.complete]
        having = [(sign * v, -s.step, s) for s, v in values if v is not None and not math.isnan(v)]
        return min(having, key=lambda t: t[:2])[2] if having and self.best_is else None

    @property
    def facts(self) -> list[tuple[str, str | None]]:
        """Facts above the list of steps."""
        done, latest, best = self.complete, self.latest, self.best
        return [
            ("Complete", f"{len(done):,}"),
            ("Incomplete", f"{len(self.steps) - len(done):,}" if len(self.steps) != len(done) else None),
            ("Not read", f"{self.unread:,} older, nor are they shown" if self.unread else None),
            ("Latest", f"step {latest.step:,}" if latest else None),
            ("Best", f"step {best.step:,}{' of those read' if self.unread else ''}" if best else None),
            ("Size", human_bytes(sum(s.nbytes for s in done))),
        ]

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric."""
        return [(s.step, v) for s in self.complete if (v := s.metric(metric)) is not None]


def history(directory: str, metric: str = "", best_is: Direction = "", most: int | None = None) -> RunSteps:
    """The run in ``directory``; with ``most``, its newest steps alone.

    Where nothing is given, metric and direction are those of the manager that saved the latest step. Without either no
    step is best, and the metric is one to look at: a loss if there is one.

    >>> import numpy as np, tempfile
    >>> from meshtape.storage import CheckpointManager
    >>> manager = CheckpointManager(tempfile.mkdtemp(), keep=3, best="loss")
    >>> for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
    ...     _ = manager.save(step, {"w": np.ones(2)}, metrics={"loss": loss})
    >>> run = history(manager.directory)
    >>> run.metrics, run.best.step, run.latest.step, run.curve("loss")[0]
    (['loss'], 2, 3, (1, 0.5))
    """
    if others := runs.of_others(directory):
        steps = [_of_another(name, held) for name, held in others.items()]
        return RunSteps(sorted(steps, key=lambda s: (s.step, s.name)), [], [])
    folders = runs.folders_of(directory)
    names = sorted(numbered.listed(folders), key=numbered.series)[::-1]
    steps = [_step(directory, name) for name in names[:most]]
    held = {s.name: s.identity for s in steps}
    if any(s.base and held.get(s.base.name) != s.base.identity for s in steps):  # or it has a name of another form
        sound = {stores.split(c.path)[1] for c in numbered.complete(directory)}
        for i, s in enumerate(steps):
            if s.base and s.name not in sound:
                steps[i] = replace(s, note=f"its base {s.base.name} is gone, or another by now")
    steps.sort(key=lambda s: (s.step, s.name))
    metrics = list(dict.fromkeys(name for s in steps for name, _ in s.metrics))
    remains = [e for e in folders if atomic_directory.KINDS.match(e)]
    done = [s for s in steps if not s.note]
    now = branches.current(directory, done)
    policy = next((s.policy for s in reversed(now.line(done) or done)), ("", ""))
    if metric not in metrics:
        best_is = "" if metric else best_is  # of a metric that no step has
        losses_first = sorted(metrics, key=lambda m: "loss" not in m.lower())
        metric = next((m for m in (policy[0], *losses_first) if m in metrics), "")
    if not best_is and metric == policy[0]:
        best_is = policy[1]
    return RunSteps(steps, remains, metrics, metric, best_is, now, len(names) - len(steps))


def _of_another(name: str, held: Checkpoint | CheckpointError) -> RunCheckpoint:
    _, step = numbered.series(name)
    if isinstance(held, CheckpointError):
        return RunCheckpoint(name, step, note=str(held), kind="")
    return RunCheckpoint(name, step, len(held), held.nbytes, kind=held.kind)


def _step(directory: str, name: str) -> RunCheckpoint:
    root = stores.join(directory, name)
    note = f"incomplete: it has no {manifest.FILE}"
    try:
        if stores.is_url(root):
            step = _complete.__wrapped__(root, name)
        else:
            root = atomic_directory.resolve(root)
            stat = os.stat(os.path.join(root, manifest.FILE))
            step = _complete(root, name, stat.st_mtime, stat.st_ino, stat.st_size)
    except FileNotFoundError:
        step = None
    except (CheckpointError, OSError) as e:
        step, note = None, str(e)
    return step or RunCheckpoint(name, int(name.partition("-")[2]), note=note)


@lru_cache(_CACHED)
def _complete(root: str, name: str, saved: float = 0.0, *mark: int) -> RunCheckpoint | None:
    """A complete step. Its manifest is read once: it never changes without another inode, time or length."""
    held = manifest.read(root)
    if held is None:
        return None
    said = numbered.of_manifest(stores.join(stores.split(root)[0], name), held)
    metrics = tuple((str(k), float(v)) for k, v in said.metrics.items() if type(v) in (int, float))
    nbytes = sum(a.nbytes for a in held.arrays)
    policy = numbered.policy_of(held)
    return RunCheckpoint(
        name, said.step, len(held.arrays), nbytes, saved, metrics, policy, "", said.branch, held.base, held.identity
    )
