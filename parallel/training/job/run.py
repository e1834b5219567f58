"""The protocol of a training run for its parts and callbacks; :class:`meshtape.Trainer` implements it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from ...mesh.mesh import Mesh


class TrainingRun(Protocol):
    """The position and the parts of a run, and the methods by which it moves to another mesh."""

    mesh: Mesh | None
    directory: Path | None
    session: Any
    recipe: Any
    sizes: dict[str, Any]
    sampler: Any
    progress: Any
    report: Any
    recovery: Any
    checkpoints: Any
    callbacks: Any
    signals: Any
    init: Any
    resume: Any
    saved_at: int | None

    def stop(self, reason: str) -> None:
        """End the run after this step."""

    def total(self) -> int:
        """Steps of the whole run."""

    def position(self) -> Any:
        """The position of the run, with the states of its callbacks."""

    def go_to(self, progress: Any) -> None:
        """Go to another position."""

    def new_session(self, mesh: Mesh | None) -> Any:
        """State and step on a mesh."""

    def resume_from(self, which: str, most: float = ...) -> str | None:
        """State and position of a checkpoint; its path."""

    def newest(self) -> str | None:
        """The newest checkpoint of this run."""

    def saving_at(self) -> int | None:
        """Step of the newest checkpoint that was begun."""

    def landed(self, wait: bool = False) -> None:
        """Note the checkpoint that was written in the background, if it is complete."""
