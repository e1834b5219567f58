"""Recovery of a run after a loss of workers, or with added ones: another mesh, the newest snapshot, the same order of
samples."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...arrays.core.errors import BatchSizeError, ClusterError, MeshtapeError, NonFiniteError, RestartsExhausted
from ..mesh.mesh import Mesh
from ..mesh.replicas import Replica
from ..models.plans import AXES
from .data.batching import batch_sizes
from .elastic import Elastic, is_loss, rebuild
from .job.jobs import alive, client_of, workers_of
from .logging.progress import Progress
from .nonfinite import ROLLBACKS, NonFiniteStep

SNAPSHOT_LIMIT = 300.0
"""Seconds after which an incomplete snapshot is given up."""


class Recovery:
    """The part of a run that recovers it: its first mesh, the number of restarts, and its snapshots."""

    def __init__(self, trainer: Any, policy: Elastic | None) -> None:
        self.trainer, self.policy = trainer, policy
        mesh = trainer.mesh
        self.axes = {} if mesh is None else mesh.describe()
        self.workers = [] if mesh is None else workers_of(mesh)
        self.per_worker = -(-math.prod(self.axes.values()) // max(1, len(self.workers)))
        client = client_of(mesh)
        # A closed client does not know it any more.
        self.scheduler = None if client is None else client.scheduler.address
        self.restarts = 0
        self.snapshots: list[tuple[Progress, Replica]] = []  # the newest last; all but that one are complete
        self._failed_at: int | None = None
        self._rolled = (-1, 0)  # the step of the last rollback, and how many have led there

    def take_snapshot(self) -> None:
        """Begin a copy of the state in the memory of the workers; the one before is dropped when the next one
        begins."""
        t = self.trainer
        # One copy is under way at a time: a second would hold a third state in memory.
        complete = [(at, copy) for at, copy in self.snapshots if copy.wait(SNAPSHOT_LIMIT)]
        for _, old in complete[:-1]:
            old.drop()
        self.snapshots = [*complete[-1:], (dataclasses.replace(t.position()), t.session.snapshot())]

    def drop_snapshots(self) -> None:
        """Give their memory back."""
        for _, copy in self.snapshots:
            copy.drop()
        self.snapshots = []

    def after(self, error: Exception) -> None:
        """Go on after a loss, or after a step that was not finite; raise the error where it was none of these, or one
        too many."""
        if isinstance(error, NonFiniteStep):
            self._roll_back(error)
            return
        while True:
            mesh = self.trainer.session.mesh
            self._still_connected(error, mesh)
            if self.policy is None or mesh is None or not is_loss(error, mesh):
                raise error
            self._count(error, mesh, self.policy)
            saved = self._newest_complete()  # first: a mesh that is closed ends the save that reads from it
            following = self._next(mesh)  # waits as long as the policy says; its errors end the run
            try:
                self._move(following, saved)
                return
            except Exception as e:  # another loss, while the state was being put on the new mesh
                error = e

    def _roll_back(self, error: NonFiniteStep) -> None:
        """The run at the newest snapshot or checkpoint, with the samples after those that failed."""
        t = self.trainer
        if t.recipe.on_nonfinite != "rollback" or error.consumed is None:
            raise error
        rollbacks, consumed = t.progress.rollbacks + 1, error.consumed
        t.report.display.say(f"rolled back: {error}")
        self._restore(self._newest_complete())
        at = t.progress
        self._rolled = (at.step, self._rolled[1] + 1 if self._rolled[0] == at.step else 1)
        if self._rolled[1] > ROLLBACKS:
            raise NonFiniteError(f"after {ROLLBACKS} rollbacks to step {at.step} it is the same: {error}") from error
        at.rollbacks, at.consumed, at.epoch = rollbacks, consumed, t.sampler.epoch(consumed)
        t.report.open_writers()

    def _still_connected(self, error: Exception, mesh: Mesh | None) -> None:
        """Raise a clear error if the scheduler is gone, as errors of the broken connection say little."""
        client = client_of(mesh)
        gone = client is not None and client.status != "running"
        if gone and isinstance(error, MeshtapeError | OSError | RuntimeError):
            raise ClusterError(
                f"the Dask scheduler at {self.scheduler} is gone, and its workers with it ({type(error).__name__}: "
                f"{error}). The newest checkpoint is {self.trainer.newest() or 'none'}; a run on another scheduler "
                "goes on from there"
            ) from error

    def _count(self, error: Exception, mesh: Mesh, policy: Elastic) -> None:
        t = self.trainer
        lost = sorted(set(workers_of(mesh)) - set(alive(client_of(mesh))))
        if not lost and self._failed_at == t.progress.step:
            raise error  # nobody is missing, and it fails at the same step again: the job itself is wrong
        self._failed_at = t.progress.step
        if self.restarts >= policy.max_restarts:
            raise RestartsExhausted(
                f"workers were lost {self.restarts + 1} times, max_restarts is {policy.max_restarts}; the last loss, "
                f"at step {t.progress.step}: {error}"
            ) from error
        self.restarts += 1
        t.report.display.say(
            f"restart {self.restarts}: {', '.join(lost) or 'a rank'} was lost at step {t.progress.step}: {error}"
        )
        t.report.note("restarting", error=f"{type(error).__name__}: {error}")

    def _next(self, mesh: Mesh) -> Mesh:
        policy = self.policy
        assert policy is not None
        if self.trainer.signals.received is not None:
            # It is to stop: it goes on only where that takes no waiting, to save.
            policy = dataclasses.replace(policy, rejoin=0.0, patience=0.0)
        return rebuild(mesh, self.axes, self.per_worker, policy, self._fits, len(self.workers))

    def _fits(self, data: int) -> bool:
        """Whether the batch divides over a data axis of this length."""
        plan, sizes = self.trainer.recipe.plan, self.trainer.sizes
        ranks = data if AXES["dp"] in {AXES[p] for p in plan.parts} else 1
        if AXES["ep"] in {AXES[p] for p in plan.parts}:
            ranks *= self.axes.get(AXES["ep"], 1)
        try:
            batch_sizes(sizes["batch"], ranks=ranks, micro=sizes["micro"], accumulation=sizes["accumulation"])
        except BatchSizeError:
            return False
        return True

    def _move(self, mesh: Mesh, saved: int | None) -> None:
        """The run on another mesh, from the newest of: the snapshot in memory, the checkpoints up to ``saved``, the
        beginning."""
        t = self.trainer
        t.session.close()
        t.mesh = mesh
        t.session = t.new_session(mesh)
        self._restore(saved)
        t.report.open_writers()
        for c in t.callbacks:
            c.on_start(t)
        t.report.note("running", error=None)

    def _restore(self, saved: int | None) -> None:
        """State and position of the newest of: the snapshot in memory, the checkpoints up to ``saved``, the
        beginning."""
        t = self.trainer
        if not self._from_memory(saved or 0):
            t.session.start(t.init)
            path = t.resume_from(t.resume) if saved is None else t.resume_from("auto", saved)
            t.report.display.say(f"going on from {path or 'the beginning'}")
            if path is None:
                at = t.progress
                t.go_to(Progress(seed=at.seed, samples=at.samples, batch=at.batch))
        t.saved_at = saved

    def _from_memory(self, saved: int) -> bool:
        """Restore the newest snapshot that is no older than the checkpoint and has its workers. Returns success."""
        t = self.trainer
        client = client_of(t.mesh)
        there = [] if client is None else alive(client)
        while self.snapshots:
            progress, copy = self.snapshots[-1]
            if progress.step >= saved and copy.wait(SNAPSHOT_LIMIT) and copy.available(there):
                try:
                    t.session.restore(copy)
                    if not t.session.finite():
                        raise NonFiniteError("its parameters are not finite")
                except (MeshtapeError, OSError) as e:
                    t.report.display.say(f"the snapshot of step {progress.step} cannot be used: {e}")
                else:
                    t.report.display.say(f"going on from the snapshot of step {progress.step} in memory")
                    t.go_to(progress)
                    return True
            self.snapshots.pop()[1].drop()
        return False

    def _newest_complete(self) -> int | None:
        """Step of the newest complete checkpoint of this run."""
        t = self.trainer
        try:
            t.landed(wait=True)
        except Exception as e:  # the one being written when the worker went: that before it counts
            t.report.display.say(f"a background save failed: {e}")
        if t.checkpoints is None or t.saved_at is None:
            return None
        return max((s for s in t.checkpoints.branch() if s <= t.saved_at), default=None)

    def grow(self) -> bool:
        """Right after a checkpoint or a snapshot: whether workers were added that a longer data axis, or ranks that
        share a worker, have use for; the run is on them then."""
        t = self.trainer
        mesh, client = t.session.mesh, client_of(t.session.mesh)
        if self.policy is None or client is None or mesh is None:
            return False
        there = len(alive(client))
        now = self.policy.axes(self.axes, self.per_worker, there, self._fits)
        # More ranks; or as many on more workers, as ranks moved together where workers were lost.
        room = min(there, -(-math.prod(now.values()) // self.per_worker))
        if math.prod(now.values()) <= mesh.size and room <= len(workers_of(mesh)):
            return False
        if t.saving_at() == t.progress.step:
            t.landed(wait=True)
            self.drop_snapshots()
        elif not self.snapshots or not self.snapshots[-1][1].wait(SNAPSHOT_LIMIT):
            return False
        t.report.display.say(f"workers were added: going on with {now}")
        saved = self._newest_complete()
        self._move(self._next(mesh), saved)
        return True
