"""`CheckpointManager`: a directory of numbered checkpoints, with policies of when to save and which to keep."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from ...arrays.core.errors import CheckpointError, CheckpointExists, MeshtapeError, NotACheckpoint
from ...arrays.core.formatting import DRAWINGS
from ..base.arguments import step_number, whole_number
from ..base.page import Page
from ..checkpoint import branches, numbered
from ..checkpoint.branches import Branch
from ..checkpoint.numbered import Numbered
from ..commit import contents, leftovers
from ..commit.anchor_lock import locked, still_held
from ..commit.protocol import protocol_of
from ..format.compression import Codec, chosen
from ..format.zarr_format import is_raw
from ..loading.load import load
from ..stores import atomic_directory, store
from . import packs
from .background import SaveHandle
from .dual import is_dual
from .rebase import release, taken_out
from .save import SaveReport, save, save_async


def _number(what: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise CheckpointError(f"{what} is a number, got {value!r:.40}") from None


class CheckpointManager:
    """Saves under ``step-00000010`` and keeps the last ``keep`` complete checkpoints, and those that policies protect.

    The last one is that of the highest step in its manifest, never of the latest time; one that was just saved is kept
    whatever its step. A directory without a manifest is no checkpoint: it is never returned, and never deleted.
    Rotation runs after a save is complete. Remains of killed processes are collected before each save; a manager that
    only reads changes nothing.

    A run that goes back to an earlier step begins a branch there: with `rollback`, or where a save follows `restore`
    between it and the newest. `latest` follows the branch that was begun last. Steps of the others stay until rotation,
    which takes them first, or `delete`.

    Parameters
    ----------
    directory
        A path, made when it is missing, or a URL (``s3://``, ``gs://``, ``az://``).
    keep
        How many complete checkpoints to keep, at least one. None keeps all.
    every_steps, every_minutes
        When `should_save` says yes: at multiples of so many steps, or so long after the last save. Either suffices;
        without both it always does.
    keep_every
        Checkpoints at multiples of so many steps are kept for good. They do not count towards ``keep``.
    best
        Name of a metric; the ``keep_best`` checkpoints with its best values are kept. They count towards ``keep``, but
        the newest is kept as well: with ``keep=1`` there are two unless the newest is the best.
    best_is
        Whether the ``"lowest"`` or the ``"highest"`` value is best. NaN is worse than any.
    keep_best
        How many of the best to keep.
    asynchronous
        Save in the background: `save` returns a `SaveHandle`. One save runs at a time. At the interpreter's end (see
        `save_async`) it has ended then.
    when_busy
        The policy of `save` while an earlier one still runs: ``"wait"`` for it, or ``"skip"`` this one (it returns None
        and counts in ``skipped``).
    compression, pack, dtype_fallback, layout
        As in `save`.
    anchor_every
        Store deltas: each such number of checkpoints begins with a plain one, the *anchor*, and the others hold
        differences from it (``base`` of `save`), which takes a tenth to two thirds of the bytes. Each opens by two
        reads. An anchor stays as long as a checkpoint that is kept needs it, and does not count towards ``keep``;
        `delete` gives those that need it another one first.
    share
        Files of shards that are the same as in the step before become second names of those, and are not written: see
        `save`. Any step can be deleted. On disks only; in object stores every step has its own objects.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> manager = CheckpointManager(tempfile.mkdtemp(), keep=2, every_steps=10, best="loss")
    >>> for step in range(1, 51):
    ...     if manager.should_save(step):
    ...         _ = manager.save(step, {"w": np.full(3, step)}, metrics={"loss": abs(step - 10)})
    >>> manager.steps(), manager.best()[-8:]
    ([10, 50], '00000010')
    >>> np.asarray(manager.restore()["w"])
    array([50, 50, 50])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 2,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        keep_best: int = 1,
        asynchronous: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        compression: str | Codec | None = None,
        pack: bool | int | None = None,
        dtype_fallback: Literal["raw"] | None = None,
        layout: Literal["dual"] | None = None,
        share: bool = True,
        anchor_every: int | None = None,
    ) -> None:
        numbers = {"keep": keep, "every_steps": every_steps, "keep_every": keep_every, "keep_best": keep_best}
        numbers |= {"anchor_every": anchor_every}
        for name, value in numbers.items():
            if (value is not None or name == "keep_best") and whole_number(name, value) < 1:
                raise CheckpointError(f"{name} must be at least 1, got {value}")
        if every_minutes is not None and not _number("every_minutes", every_minutes) > 0:
            raise CheckpointError(f"every_minutes must be positive, got {every_minutes}")
        if not isinstance(best, str | None):
            raise CheckpointError(f"best is the name of a metric, got {best!r:.80}")
        for name, value in {"share": share, "asynchronous": asynchronous}.items():
            if not isinstance(value, bool):
                raise CheckpointError(f"{name} is true or false, got {value!r:.80}")
        if best_is not in ("lowest", "highest"):
            raise CheckpointError(f"best_is must be 'lowest' or 'highest', got {best_is!r}")
        if when_busy not in ("wait", "skip"):
            raise CheckpointError(f"when_busy must be 'wait' or 'skip', got {when_busy!r}")
        self.directory = store.location(directory)
        store.at(self.directory).refuse_writes()
        self.keep, self.anchor_every = keep, anchor_every
        self.every_steps, self.every_minutes, self.keep_every = every_steps, every_minutes, keep_every
        self.best_metric, self.best_is, self.keep_best = best, best_is, keep_best
        self.asynchronous, self.when_busy = asynchronous, when_busy
        self.compression, self.pack, self.dtype_fallback = chosen(compression), pack, dtype_fallback
        self.share = share and not store.is_url(self.directory)
        packs.threshold(pack, self.directory)  # refused now, where it is no such number
        is_raw(dtype_fallback)
        is_dual({"layout": layout, "compression": compression, "pack": pack, "anchor_every": anchor_every})
        self.layout = layout
        self.skipped = 0
        self._running: SaveHandle | None = None
        self._branch: Branch | None = None  # that of this manager's saves; None: the current one when it saves
        self._newest: int | None = None  # step of that branch
        self._restored: tuple[int, Branch] | None = None
        self._last_save = time.monotonic()
        with atomic_directory.writing(self.directory):
            atomic_directory.make_parents(store.join(self.directory, "x"))

    def path(self, step: int) -> str:
        """The path of the checkpoint of a step, which need not exist."""
        return store.join(self.directory, numbered.name(step_number(step)))

    def should_save(self, step: int) -> bool:
        """Whether it is time, by ``every_steps`` and ``every_minutes``. Step 0 is never due by count."""
        if self.every_steps is None and self.every_minutes is None:
            return True
        if self.every_steps is not None and step > 0 and step % self.every_steps == 0:
            return True
        return self.every_minutes is not None and time.monotonic() - self._last_save >= 60 * self.every_minutes

    def save(
        self,
        step: int,
        tree: Any,
        metadata: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        documents: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> SaveReport | SaveHandle | None:
        """Save a tree under its step, then delete the checkpoints that are no longer kept.

        Parameters
        ----------
        step, tree, metadata, documents
            As in `meshtape.storage.save`.
        metrics
            Numbers that say how good this state is, for ``best``; kept in the manifest.
        overwrite
            Allow a step that exists already, as after a restart from an earlier one.

        Returns
        -------
        SaveReport, SaveHandle or None
            A handle when ``asynchronous``; None when the save was skipped. The error of a background save is raised by
            the next call, or by `wait`.
        """
        step = step_number(step)
        target = store.join(self.directory, numbered.name(step))
        if self._running is not None:
            if self.when_busy == "skip" and not self._running.done():
                self.skipped += 1
                return None
            self.wait()
        for place in leftovers.places(self.directory):
            protocol_of(place).recover(place)
        if overwrite and (other := numbered.step_at(target)) not in (None, step):
            raise CheckpointExists(
                f"{target} holds step {other}, by its manifest: rename the folder before step {step} is saved"
            )
        if overwrite:
            with locked(self.directory):
                release(target, self._complete())
        kept = {k: v for k, v in dict(metadata or {}).items() if k not in numbered.OF_A_STEP}
        kept[branches.KEY] = self._place(step, overwrite)
        if metrics is not None:
            kept[numbered.METRICS] = {name: _number(f"metric {name!r}", value) for name, value in metrics.items()}
        kept |= {numbered.BEST: {"metric": self.best_metric, "is": self.best_is}} if self.best_metric else {}
        base, number, earlier = self._earlier(target)
        if base is not None:
            kept[numbered.DELTA] = number
        options: dict[str, Any] = {
            "step": step,
            "layout": self.layout,
            "metadata": kept,
            "documents": documents,
            "overwrite": overwrite,
            "compression": self.compression,
            "pack": self.pack,
            "dtype_fallback": self.dtype_fallback,
            "share": earlier if self.share else None,
            "base": base,
        }
        if not self.asynchronous:
            report = save(target, tree, **options)
            self._last_save = time.monotonic()
            self._saved(step)
            self._rotate(target)
            return report
        handle = save_async(target, tree, **options, then=lambda: self._rotate(target))
        self._last_save = time.monotonic()
        self._saved(step)
        self._running = handle
        return handle

    def _earlier(self, target: str) -> tuple[str | None, int, str | None]:
        """(base of a save, or None where it is to be plain; its number since the anchor; the checkpoint whose files it
        may share)."""
        newest, every = None if self._newest is None else self.path(self._newest), self.anchor_every or 0
        line = self._branch.line(self._complete()) if self._branch is not None and every else []
        if not (line := [c for c in line if c.path != target]):
            return None, 0, newest
        anchor, number = line[-1].base_path or line[-1].path, line[-1].delta + 1
        if anchor == target:  # which is written anew
            return None, 0, newest
        return (anchor, number, newest) if number < every else (None, 0, anchor)

    def _place(self, step: int, overwrite: bool) -> dict[str, Any]:
        """The branch entry of a step's manifest; a new branch begins here where the run has gone back."""
        if self._branch is None:
            found = self._complete()
            self._branch = branches.current(self.directory, found)
            line = self._branch.line(found)
            self._newest = line[-1].step if line else None
        newest, back = self._newest, self._restored
        if newest is not None and back is not None and back[0] < step <= newest:
            where = self.path(step)
            protocol_of(where).check_target(where, overwrite, contents.SAVED)  # a save that is refused begins nothing
            self._begin(back[1].after(back[0], self._current()), back[0])
        elif newest is not None and step < newest:
            kept = f"; these two are kept, and of the others as many as keep={self.keep} leaves" if self.keep else ""
            warnings.warn(
                f"step {step} is saved below step {newest} of its branch, which stays the latest{kept}; where the run "
                "went back, call rollback(step) before it saves",
                stacklevel=3,
            )
        return {**self._branch.plain(), "parent": self._newest}

    def _saved(self, step: int) -> None:
        self._restored = None
        self._newest = step if self._newest is None else max(step, self._newest)

    def _begin(self, branch: Branch, step: int | None) -> None:
        with atomic_directory.writing(store.join(self.directory, branches.FILE)):
            branches.begin(self.directory, branch)
        self._branch, self._newest, self._restored = branch, step, None

    def _current(self) -> Branch:
        return branches.current(self.directory, self._complete())

    def _of_step(self, step: int) -> Numbered:
        """The complete checkpoint whose manifest has this step; a folder's name counts where several have it."""
        found = self._complete()
        own = self.path(step)
        if of_it := sorted((c for c in found if c.step == step), key=lambda c: c.path != own):
            return of_it[0]
        there = ", ".join(str(c.step) for c in found) or "none"
        raise NotACheckpoint(f"{self.directory} holds no complete checkpoint of step {step}; its steps are {there}")

    def rollback(self, step: int | None) -> str | None:
        """Go back to a step, or to one of an abandoned branch: `latest` is that checkpoint until the next save.

        Nothing is deleted. A kill leaves the branch from before, or the new one.

        Parameters
        ----------
        step
            That of a complete checkpoint; None begins anew, from nothing.

        Returns
        -------
        str or None
            Path of the checkpoint.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> manager = CheckpointManager(tempfile.mkdtemp(), keep=None)
        >>> for step in (10, 20, 30):
        ...     _ = manager.save(step, {"w": np.full(2, step)})
        >>> manager.rollback(10)[-2:]
        '10'
        >>> _ = manager.save(15, {"w": np.zeros(2)})
        >>> manager.steps(), manager.branch()
        ([10, 15, 20, 30], [10, 15])
        """
        self.wait()
        if step is None:
            self._begin(Branch().after(None, self._current()), None)
            return None
        c = self._of_step(step)
        found = self._complete()
        now = branches.current(self.directory, found)
        line = now.line(found)
        if line and line[-1].path == c.path:  # there already
            self._branch, self._newest, self._restored = now, c.step, None
        else:
            self._begin(c.branch.after(c.step, now), c.step)
        return c.path

    def delete(self, step: int) -> None:
        """Delete the checkpoint of a step: all of it, or nothing that a reader notices.

        Deltas from it are rewritten first: the oldest of them becomes plain, and the base of the others. A kill leaves
        each step whole. Refused for the only complete one of the current branch, and where its directory holds what is
        not the checkpoint's.

        Examples
        --------
        >>> import numpy as np, tempfile
        >>> manager = CheckpointManager(tempfile.mkdtemp())
        >>> for step in (10, 20):
        ...     _ = manager.save(step, {"w": np.ones(2)})
        >>> manager.delete(20)
        >>> manager.steps(), manager.latest()[-2:]
        ([10], '10')
        """
        self.wait()
        with atomic_directory.writing(self.path(step), done="deleted"), locked(self.directory):
            self._delete(step)
        self._branch = None  # its newest step may be another now

    def _delete(self, step: int) -> None:
        path, complete = self.path(step), self._complete()
        # A delta without its base is read by nobody, and nothing depends on it.
        if all(c.step != step for c in complete) and numbered.step_at(path) == step:
            complete = []
        else:
            path = self._of_step(step).path
            if [x.path for x in self._line()] == [path]:
                raise CheckpointError(
                    f"step {step} is the only complete checkpoint of {self.directory}, or of its current branch; save "
                    "or roll back to another first"
                )
        contents.refuse_strangers(path, contents.beside(path), "only a checkpoint is deleted")
        release(path, complete)
        if not still_held(self.directory):
            raise CheckpointError(f"{path} was not deleted: this process stood still for so long that it lost its turn")
        try:
            protocol_of(path).discard(path)
        except FileNotFoundError:
            raise NotACheckpoint(f"{path} is gone: another process deleted it at the same time") from None

    def _line(self, warn: bool = False) -> list[Numbered]:
        """The complete checkpoints of the current branch, oldest first; of all branches where it has lost its own."""
        found = self._complete(warn)
        now = branches.current(self.directory, found)
        line = now.line(found)
        if warn and found and line and line[-1].step < found[-1].step:
            warnings.warn(
                f"step {found[-1].step} of {self.directory} is not of {now}, which was begun last: the latest is "
                f"step {line[-1].step}; rollback({found[-1].step}) goes on from the other, delete({found[-1].step}) "
                "removes it",
                stacklevel=4,
            )
        if line or not found or not now.forks:
            return line
        if warn:
            warnings.warn(
                f"{self.directory} has no checkpoint of {now} any more; taken is that of another", stacklevel=4
            )
        return sorted(found, key=lambda c: (c.branch, c.step))

    def branch(self) -> list[int]:
        """Steps of the complete checkpoints of the current branch, in order: those that the latest comes from, and
        itself."""
        return [c.step for c in self._line()]

    def wait(self) -> None:
        """Wait for the running background save, if any, and for its rotation; raises their error."""
        if self._running is not None and not self._running.told:
            try:
                self._running.wait()
            except Exception:  # after Ctrl-C it is waited for again
                self._running = None
                raise
        self._running = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return [c.step for c in self._complete()]

    def latest(self) -> str | None:
        """The path of the last complete checkpoint of the branch that was begun last, or None.

        Incomplete ones are skipped with a warning. One is given, too, where a higher step belongs to another branch.
        """
        found = self._line(warn=True)
        return found[-1].path if found else None

    def best(self) -> str | None:
        """The path of the complete checkpoint with the best metric; the newest of equals. None when none has it."""
        ranked = self._ranked(self._complete(warn=True))
        return ranked[0].path if ranked else None

    def restore(self, step: int | None = None, **load_arguments: Any) -> Any:
        """Load the latest checkpoint, or that of ``step``; the other arguments are those of `load`.

        Where the rotation of another process deletes the latest one during the read, the newer one is loaded.
        """
        if step is not None:
            target = self.path(step)
            try:
                c = self._of_step(step)
            except NotACheckpoint:
                if numbered.step_at(target) not in (None, step):  # it is one of another step
                    raise
                return load(target, **load_arguments)  # raises what is wrong with it
            tree = load(c.path, **load_arguments)
            self._restored = c.step, c.branch
            return tree
        self._branch = self._restored = None  # as it is now: another process may have rolled back
        target = self.latest()
        while True:
            if target is None:
                raise NotACheckpoint(f"{self.directory} holds no complete checkpoint of a CheckpointManager")
            try:
                return load(target, **load_arguments)
            except CheckpointError:
                newer = self.latest()
                there = store.at(self.directory).folders()
                if newer == target or store.split(atomic_directory.resolve(target))[1] in there:
                    raise
                target = newer

    def __repr__(self) -> str:
        best = f", best={self.best_metric!r}, best_is={self.best_is!r}" if self.best_metric else ""
        try:
            now = branches.current(self.directory, [])
        except MeshtapeError:  # a store that does not answer
            now = Branch()
        return f"CheckpointManager({self.directory!r}, keep={self.keep}{best}{f', {now}' if now.number else ''})"

    def _repr_html_(self) -> str:
        return DRAWINGS["run"](self.directory, *((self.best_metric, self.best_is) if self.best_metric else ()))

    def browse(self) -> Page:
        """Serve the checkpoints of this directory to a web browser from this process, on loopback; returns a page that
        shows itself as a link."""
        return DRAWINGS["page"](self.directory, metric=self.best_metric, best=self.best_metric and self.best_is)

    def _complete(self, warn: bool = False) -> list[Numbered]:
        return numbered.complete(self.directory, warn)

    def _ranked(self, complete: list[Numbered]) -> list[Numbered]:
        """The checkpoints with the metric, best first; of equals, the newest first."""
        if self.best_metric is None:
            return []
        sign = 1.0 if self.best_is == "lowest" else -1.0

        def order(c: Numbered) -> tuple[bool, float, int]:
            value = c.metrics[self.best_metric]
            return math.isnan(value), 0.0 if math.isnan(value) else sign * value, -c.step

        return sorted((c for c in complete if isinstance(c.metrics.get(self.best_metric), (int, float))), key=order)

    def _rotate(self, newest: str) -> None:
        if self.keep is None:
            return
        # Where others save deltas now, or delete, a later save rotates.
        with locked(self.directory, patience=0) as alone:
            if alone:
                self._rotate_alone(self.keep, newest)

    def _rotate_alone(self, keep: int, newest: str) -> None:
        complete = self._complete()
        if all(c.path != newest for c in complete):  # someone took it away meanwhile: what is left may be all there is
            return
        own = next(c.branch for c in complete if c.path == newest).line(complete)
        # Another process may have gone back meanwhile: what it counts on stays, too.
        line = branches.current(self.directory, complete).line(complete)
        milestones = {c.path for c in complete if self.keep_every is not None and c.step % self.keep_every == 0}
        kept = {newest, *(c.path for c in line[-1:]), *(c.path for c in self._ranked(complete)[: self.keep_best])}
        kept -= milestones  # they stay, and do not count
        for c in reversed([*(c for c in complete if c not in own), *own]):
            if len(kept) >= keep:
                break
            if c.path not in milestones:
                kept.add(c.path)
        kept |= milestones
        kept |= {c.base_path for c in complete if c.path in kept and c.base_path is not None}
        for c in sorted(complete, key=lambda c: c.base is None):  # no delta outlives its base
            if c.path not in kept and (why := taken_out(c, self.directory)):
                warnings.warn(why, stacklevel=2)
