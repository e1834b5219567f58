"""Branches of a directory of numbered checkpoints: a branch begins where a run goes back to an earlier step.

A branch has a name, and names sort by time. Its *forks* are the branches that it comes from, each with the last step
that they share. A manager's checkpoint names its branch in its manifest, so an abandoned step differs from a current
one of the same number. Going back writes one small file, `FILE`, beside the checkpoints. The branch begun last is the
current one.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..base import strict_json
from ..stores import store

FILE = "meshtape-branch.json"
KEY = "meshtape.branch"  # in the metadata of a checkpoint
_NAME = re.compile(r"[0-9]{8}(-[0-9a-f]{8})?")


class BranchStep(Protocol):
    """A checkpoint, as far as branches are concerned."""

    @property
    def step(self) -> int: ...
    @property
    def branch(self) -> Branch: ...


S = TypeVar("S", bound=BranchStep)


@dataclass(frozen=True, order=True, slots=True)
class Branch:
    """A branch: its name, and its forks as (branch, last shared step), oldest first."""

    name: str = "00000000"
    forks: tuple[tuple[str, int], ...] = ()

    @property
    def number(self) -> int:
        return int(self.name[:8])

    def line(self, steps: Iterable[S]) -> list[S]:
        """The checkpoints of a directory that belong to this branch, oldest first.

        >>> @dataclass
        ... class Saved:
        ...     step: int
        ...     branch: Branch
        >>> first = Branch()
        >>> second = first.after(20, first)
        >>> steps = [Saved(10, first), Saved(20, first), Saved(30, second), Saved(100, first)]
        >>> [s.step for s in second.line(steps)], [s.step for s in first.line(steps)]
        ([10, 20, 30], [10, 20, 100])
        """
        place = {name: (at, last) for at, (name, last) in enumerate(self.forks)}
        place[self.name] = (len(self.forks), None)  # type: ignore[assignment]
        found = []
        for s in steps:
            at, last = place.get(s.branch.name, (-1, None))
            if at >= 0 and (last is None or s.step <= last):
                found.append(((at, s.step), s))
        return [s for _, s in sorted(found, key=lambda pair: pair[0])]

    def after(self, step: int | None, newest: Branch) -> Branch:
        """A new branch that goes on from a step of this one (None: from nothing), later than ``newest``."""
        name = f"{newest.number + 1:08d}-{uuid.uuid4().hex[:8]}"
        return Branch(name, () if step is None else (*self.forks, (self.name, step)))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "forks": [list(f) for f in self.forks]}

    def __str__(self) -> str:
        start = f" from step {self.forks[-1][1]}" if self.forks else ""
        return f"branch {self.number}{start}"


def of_plain(said: Any) -> Branch:
    """Inverse of `Branch.plain`. Missing or malformed data gives the first branch, so that no checkpoint is lost."""
    try:
        name, forks = said["name"], tuple((str(n), int(s)) for n, s in said["forks"])
    except (TypeError, ValueError, KeyError):
        return Branch()
    named = all(isinstance(n, str) and _NAME.fullmatch(n) for n in (name, *(n for n, _ in forks)))
    return Branch(name, forks) if named else Branch()


def current(directory: str, steps: Iterable[BranchStep]) -> Branch:
    """The branch that was begun last."""
    found = [Branch(), *(s.branch for s in steps)]
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        found.append(of_plain(strict_json.loads(store.at(directory).get(FILE))))
    return max(found)


def begin(directory: str, branch: Branch) -> None:
    """Make a branch the current one: whole and durable, or not at all."""
    store.at(directory).put(FILE, (json.dumps(branch.plain()) + "\n").encode())
