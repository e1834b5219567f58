"""The numbered checkpoints of a directory: ``step-00000100`` and so on."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...arrays.core.errors import CheckpointError
from ..base.names import STEP
from ..format import manifest
from ..stores import atomic_directory, contract, store
from . import branches
from .branches import Branch

Direction = Literal["", "lowest", "highest"]
"""Which value of a metric is best; empty where nobody says."""
METRICS = "meshtape.metrics"
"""The key of a step's metrics in the metadata of its manifest."""
BEST = "meshtape.best"
"""The key of a manager's policy, ``{"metric": name, "is": "lowest" or "highest"}``, in the metadata of its saves."""
DELTA = "meshtape.delta"
"""The key of the number of saves since the anchor, as a manager counts them, in the metadata of a delta."""
OF_A_STEP = (METRICS, BEST, DELTA)
"""What the metadata of a step say of it alone, and not of another one that is saved with them."""
_SERIES = re.compile(r"(?!.*tmp)((?:[^\d.]*(?:[^\w.]|_|(?i:step|epoch|iter|iteration|checkpoint|ckpt|update)))?)(\d+)")
_LOOKS = 100  # at a directory, while another process rotates it


@dataclass(frozen=True, slots=True)
class Numbered:
    """A complete checkpoint of the directory."""

    step: int
    path: str
    metrics: dict[str, float]
    branch: Branch
    base: manifest.Base | None = None  # from which it is a delta
    delta: int = 0  # saves since the anchor

    @property
    def base_path(self) -> str | None:
        return None if self.base is None else store.join(store.split(self.path)[0], self.base.name)


def name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def series(folder: str) -> tuple[str, int] | None:
    """The word and the number of a folder that writers of any kind may give to a step; None where it has none. A number
    right behind a letter is a step's only after a word for steps.

    >>> series("checkpoint-500"), series("global_step7"), series("100"), series("step-3.tmp-1"), series("llama3")
    (('checkpoint-', 500), ('global_step', 7), ('', 100), None, None)
    """
    found = _SERIES.fullmatch(folder)
    return None if found is None else (found[1], int(found[2]))


def listed(folders: list[str]) -> dict[str, None]:
    """Of the folders of a directory the names of checkpoints that are there, or are being replaced, in order."""
    # One that is just being replaced has only its set-aside name for a moment; a reader finds it under its own.
    heads = (e.partition(".old-")[0] for e in folders)
    return dict.fromkeys(sorted(e for e in heads if STEP.fullmatch(e)))


def of_manifest(path: str, held: manifest.Manifest) -> Numbered:
    """A complete checkpoint, whose manifest may give another number than its name."""
    step = int(store.split(path)[1].partition("-")[2]) if held.step is None else held.step
    metrics = held.metadata.get(METRICS)
    branch = branches.of_plain(held.metadata.get(branches.KEY))
    delta = held.metadata.get(DELTA)
    return Numbered(
        step, path, metrics if isinstance(metrics, dict) else {}, branch, held.base, delta if type(delta) is int else 0
    )


def policy_of(held: manifest.Manifest) -> tuple[str, Direction]:
    """The metric, and its value that is best, by the manager that saved a checkpoint; empty where it said neither."""
    said = held.metadata.get(BEST)
    metric, which = (said.get("metric"), said.get("is")) if isinstance(said, dict) else ("", "")
    return (metric, which) if isinstance(metric, str) and which in ("lowest", "highest") else ("", "")


def _manifest(path: str) -> manifest.Manifest | CheckpointError | None:
    """The manifest of a checkpoint, or the error of reading it; None where it has none."""
    try:
        return manifest.read(atomic_directory.resolve(path))
    except CheckpointError as e:
        return e


def step_at(path: str) -> int | None:
    """The step that the manifest of a complete checkpoint gives; None where there is none."""
    held = _manifest(path)
    return of_manifest(path, held).step if isinstance(held, manifest.Manifest) else None


def _orphans(directory: str, held: Mapping[str, Any]) -> dict[str, str]:
    """The deltas whose base is not what they pin, and why."""
    bases = {n: m.base for n, m in held.items() if isinstance(m, manifest.Manifest) and m.base is not None}
    beside = {b.name: _manifest(store.join(directory, b.name)) for b in bases.values() if b.name not in held}
    return {n: why for n, b in bases.items() if (why := b.fault({**beside, **held}[b.name]))}


def _dead_links(directory: str) -> dict[str, str]:
    """The links of a local directory that have the name of a checkpoint, by path, with why they are none."""
    entries = [] if store.is_url(directory) else contract.listed(directory)
    paths = [os.path.join(directory, n) for n in entries if STEP.fullmatch(n)]
    dead = [path for path in paths if os.path.islink(path) and not os.path.exists(path)]
    return dict.fromkeys(dead, "the link leads nowhere, or to itself")


def complete(directory: str, warn: bool = False) -> list[Numbered]:
    """The complete checkpoints of a directory, by step. With ``warn``, a warning names each of the others."""
    if not warn:
        return _read(directory)[0]
    found, others = survey(directory)
    for path, why in others.items():
        warnings.warn(f"skipped {path}: {why}", stacklevel=4)
    return found


def survey(directory: str) -> tuple[list[Numbered], dict[str, str]]:
    """The complete checkpoints of a directory, by step; and the paths of the others, with why they are none."""
    found, others = _read(directory)
    return found, others | _dead_links(directory)


def told(directory: str, folders: Sequence[str]) -> str:
    """The newest of some checkpoints in a directory that can be opened, as a sentence; or why the newest cannot be."""
    paths, faults = [store.join(directory, f) for f in folders], survey(directory)[1]
    found = [f"it holds checkpoints, such as {p}" for p in paths if p not in faults]
    return (found or [f"no step of it can be opened: {p}: {faults[p]}" for p in paths])[-1]


def _read(directory: str) -> tuple[list[Numbered], dict[str, str]]:
    """The same, but for links that lead to nothing."""
    there = store.at(directory)
    names = listed(there.folders())
    held: dict[str, manifest.Manifest | CheckpointError | None] = {}
    orphans: dict[str, str] = {}
    for _ in range(_LOOKS):
        held = {n: held.get(n) or _manifest(store.join(directory, n)) for n in names}
        absent = {n for n, m in held.items() if m is None}
        before = orphans.keys()
        orphans = _orphans(directory, held)
        # Another process may have rotated one away for a newer one that is not listed yet, or have given a delta
        # another base: list again.
        if orphans.keys() == before and (not absent or absent <= (names := listed(there.folders())).keys()):
            break
        if orphans:
            held, names = {}, listed(there.folders())
    found: list[Numbered] = []
    others: dict[str, str] = {}
    for n, m in held.items():
        target = store.join(directory, n)
        if isinstance(m, manifest.Manifest) and n not in orphans:
            found.append(of_manifest(target, m))
        elif n in names:
            others[target] = str(orphans.get(n) or m or f"it has no {manifest.FILE}, so it is incomplete")
    own = {c.step for c in found if c.path == store.join(directory, name(c.step))}
    copies = [c for c in found if c.step in own and c.path != store.join(directory, name(c.step))]
    others |= {c.path: f"its manifest says step {c.step}, which has its own folder" for c in copies}
    return sorted((c for c in found if c not in copies), key=lambda c: (c.step, c.path)), others
