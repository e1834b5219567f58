"""`CheckpointManager`: a directory of numbered checkpoints of which the last few are kept."""

# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ..arrays.errors import CheckpointError, NotACheckpoint
from . import commit, manifest
from .loading import load
from .saving import SaveReport, save

_NAME = re.compile(r"\Astep-(\d{8,})\Z")


class CheckpointManager:
    """Saves under ``step-00000010`` and keeps the last ``keep`` complete checkpoints.

    What counts as last is the step in the manifest, never a time of the file system. A directory without a manifest is not
    a checkpoint: it is never returned, and never deleted. Rotation runs after a new checkpoint is complete, so there is
    always a complete one. Remains of processes that were killed are collected when a manager starts and before each save.

    Parameters
    ----------
    directory
        Made when it is missing.
    keep
        How many complete checkpoints to keep, at least one. None keeps all.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> manager = CheckpointManager(tempfile.mkdtemp(), keep=2)
    >>> for step in (10, 20, 30):
    ...     _ = manager.save(step, {"w": np.full(3, step)})
    >>> manager.steps()
    [20, 30]
    >>> np.asarray(manager.restore()["w"])
    array([30, 30, 30])
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 2) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep must be at least 1, got {keep}")
        self.directory = os.path.abspath(os.fspath(directory))
        self.keep = keep
        commit.make_parents(os.path.join(self.directory, "x"))
        commit.recover(self.directory)

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        if step < 0:
            raise CheckpointError(f"a step cannot be negative, got {step}")
        return os.path.join(self.directory, f"step-{step:08d}")

    def save(
        self, step: int, tree: Any, metadata: Mapping[str, Any] | None = None, *, overwrite: bool = False
    ) -> SaveReport:
        """Save a tree under its step, then delete the checkpoints that are no longer kept.

        ``overwrite`` allows a step that exists already, as after a restart from an earlier one.
        """
        target = self.path(int(step))
        commit.recover(self.directory)
        report = save(target, tree, step=int(step), metadata=metadata, overwrite=overwrite)
        self._rotate(target)
        return report

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return [step for step, _ in self._complete()]

    def latest(self) -> str | None:
        """The path of the complete checkpoint with the highest step, or None. Incomplete ones are skipped with a warning."""
        found = self._complete(warn=True)
        return found[-1][1] if found else None

    def restore(self, step: int | None = None, **load_arguments: Any) -> Any:
        """Load the latest checkpoint, or that of ``step``; the other arguments are those of `load`."""
        target = self.latest() if step is None else self.path(step)
        if target is None:
            raise NotACheckpoint(f"{self.directory} holds no complete checkpoint")
        return load(target, **load_arguments)

    def _complete(self, warn: bool = False) -> list[tuple[int, str]]:
        found: dict[str, int] = {}
        names = {e for e in os.listdir(self.directory) if _NAME.match(e)}
        # One that is just being replaced has only its set-aside name for a moment; a reader finds it under its own.
        for entry in os.listdir(self.directory):
            head, kind, _ = entry.partition(".old-")
            if kind and _NAME.match(head):
                names.add(head)
        for name in sorted(names):
            target = os.path.join(self.directory, name)
            try:
                held = manifest.read(commit.resolve(target))
            except CheckpointError as e:
                held = None
                if warn:
                    warnings.warn(f"skipped {target}: {e}", stacklevel=3)
            else:
                if held is None and warn:
                    warnings.warn(f"skipped {target}: it has no {manifest.FILE}, so it is incomplete", stacklevel=3)
            if held is not None:
                number = int(name.partition("-")[2])
                found[target] = number if held.step is None else held.step
        return sorted((step, target) for target, step in found.items())

    def _rotate(self, newest: str) -> None:
        if self.keep is None:
            return
        complete = [target for _, target in self._complete()]
        if newest not in complete:  # someone took it away meanwhile: what is left may be all there is
            return
        others = [target for target in complete if target != newest]
        for target in others[: max(0, len(others) - (self.keep - 1))]:
            # Another process may rotate the same directory, and a full deletion can wait for the next start.
            with contextlib.suppress(OSError):
                commit.discard(target)
