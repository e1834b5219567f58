"""``mt.Trainer``: a training run that survives interruptions, lost workers and changes of the mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from ...arrays.core import tree as trees
from ...arrays.core.errors import NonFiniteError, TrainingError
from ...autodiff.optim.optimizers import Average, Optimizer
from ...storage import CheckpointManager, SaveHandle, load, open_checkpoint
from ..mesh.mesh import Mesh
from ..models.plans import Plan, Stages, of_any_model
from .callbacks import Callback
from .data.sampler import Sampler
from .data.sources import as_source
from .elastic import Elastic
from .job.jobs import current_job
from .job.signals import StopSignals, interrupted
from .lock import held
from .logging.meter import Meter
from .logging.progress import METADATA_KEY, Progress, TrainResult
from .logging.reporting import Reporting
from .nonfinite import OnNonFinite, Watch
from .precision import Precision
from .recovery import Recovery
from .run_checkpoints import RunCheckpoints
from .session import Session
from .stages import Pipelining, session_of
from .step import Loss, TrainingConfig


class Trainer(RunCheckpoints):
    """Trains parameters with any loss over trees, on one device or on a mesh.

    Parameters
    ----------
    loss
        ``loss(params, batch, key)``: a mean over the samples of the batch, or ``(total, weight)``, a sum (over tokens,
        say) and the number of its terms, or ``(total, weight, metrics)``. Gradients are those of the mean over the
        whole global batch. ``key`` is for dropout: a key for each sample of the batch (see ``mt.random.fold_in``),
        which is a function of the step and of the sample's place in the whole batch; None in an evaluation.
    init
        The parameters (a tree of local arrays), or a function of a key that makes them.
    optimizer
        Of ``mt.optim``.
    data
        Training samples: a tree of arrays with a common first dimension, a source of ``mt.training``, a Dask
        collection.
    batch
        Samples of a step, over all ranks.
    micro, accumulation
        Samples that a rank computes at a time, or into how many micro-batches a step is cut; one of them or neither.
        All must divide evenly. Random numbers belong to samples: they are the same however a batch is cut, and on every
        mesh.
    steps, epochs
        When to stop; at least one of them.
    mesh
        Where to run; this process without one.
    plan
        Where parameters live and how batches are split: ``mt.models.decoder.plan("dp+tp")``, or a ``Plan`` of your own.
        By default (``"dp"``) the batch is split over the axis ``data`` and parameters are replicated; with ``"fsdp"``
        they are split too.
    stages
        How the model is cut where the plan has ``pp`` and the mesh an axis ``pipe``: ``mt.models.decoder.staged(config,
        plan=plan)``, or a ``mt.models.Stages`` of your own. Micro-batches pass through the stages; ``accumulation``
        says how many there are. The stages then take the place of ``loss``, which is used on all other meshes.
    schedule, chunks
        Of the pipeline: ``"fthenb"``, ``"1f1b"``, ``"interleaved"`` or ``"zerobubble"``, and stages a rank for the
        third.
    zero
        ZeRO stage (0 to 3) over the axis ``data``.
    precision
        ``"float32"`` (the default; it warns of float64 parameters), ``"float64"``, ``"bfloat16"`` or ``"float16"`` for
        the computation, or a ``Precision``; parameters stay as they are.
    clip
        Largest global norm of the gradients.
    ema
        ``mt.optim.ema(…)``: an average of the parameters, kept in the state under ``"ema"``.
    on_nonfinite
        After a step whose loss or gradients are NaN or infinite, which itself changes nothing: ``"raise"``
        :class:`NonFiniteError` and stand before it; ``"skip"`` it (30 in a row end the run); or ``"rollback"``: go on
        from the newest snapshot or checkpoint with the batch after it (a fourth time to the same place ends the run).
        The log counts them. With float16 a smaller scale of the loss is tried first.
    trainable
        ``trainable(path)`` says whether a parameter is trained; the others stay as they are and cost no optimizer
        state.
    seed
        Of the parameters, of dropout, and of the order of the samples.
    shuffle, drop_last
        See :class:`Sampler`.
    ahead
        Batches that are read before they are needed.
    directory
        Where checkpoints, ``metrics.jsonl``, events for TensorBoard (where tensorboardX is installed) and
        ``status.json`` go. Inside ``meshtape run`` that of the job. Without one nothing is written.
    checkpoints
        A ``CheckpointManager`` of your own, instead of one in ``directory/checkpoints``, which keeps two and writes in
        the background: one at a time, from a copy that costs nothing, while steps go on. An error of it ends the run at
        the next step.
    save_every
        Steps between checkpoints, else those of ``checkpoints`` (``every_steps``, ``every_minutes``); one is written at
        the end and at a signal in any case. The run waits for it before it ends.
    resume
        ``"auto"``: from the newest checkpoint if there is one; ``"never"``; or the path of a checkpoint.
    evaluate, eval_every
        Held-out samples, and every how many steps they are evaluated (at the end in any case).
    evaluate_average
        Evaluate the average of ``ema`` instead of the parameters.
    log_every
        Steps between two reads of the loss. Reading waits for the step; in between, steps are only handed on.
    callbacks
        See :class:`Callback`.
    elastic
        Go on when workers are lost or come; see :class:`Elastic`. Without it a loss ends the run.
    snapshot_every
        Steps between copies of the state in the memory of the workers, each block on two of them, from which a run with
        ``elastic`` goes on when they are newer than the last checkpoint. They are taken while the run computes, and
        cost up to twice the state's memory each; while one is taken, the one before is kept.
    progress
        Show it: True, False, or None for a bar on a terminal, and elsewhere lines in a job of ``meshtape run`` and else
        nothing.

    Raises
    ------
    TrainingError, BatchSizeError, DataError, PlanError
        Before anything is changed, where these do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> import meshtape as mt
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> def loss(params, batch, key):
    ...     return mt.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> trainer = mt.Trainer(loss, {"w": mt.zeros((1, 1), dtype=mt.float32)}, mt.optim.sgd(0.5),
    ...                      {"x": x, "y": 3 * x}, batch=16, steps=40, mesh=mt.Mesh({"data": 2}))
    >>> result = trainer.fit()
    >>> result.reason, round(float(trainer.params["w"][0, 0]), 3)
    ('steps', 3.0)
    """

    def __init__(
        self,
        loss: Loss,
        init: Any,
        optimizer: Optimizer,
        data: Any,
        *,
        batch: int,
        micro: int | None = None,
        accumulation: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        mesh: Mesh | None = None,
        plan: str | Plan | None = None,
        stages: Stages | None = None,
        schedule: str = "1f1b",
        chunks: int = 1,
        zero: int = 0,
        precision: str | Precision | None = None,
        clip: float | None = None,
        ema: Average | None = None,
        on_nonfinite: OnNonFinite = "raise",
        trainable: Callable[[trees.Path], bool] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        ahead: int = 2,
        directory: str | os.PathLike[str] | None = None,
        checkpoints: CheckpointManager | None = None,
        save_every: int | None = None,
        resume: str = "auto",
        evaluate: Any = None,
        eval_every: int | None = None,
        evaluate_average: bool = False,
        log_every: int = 10,
        callbacks: Sequence[Callback] = (),
        elastic: Elastic | None = None,
        snapshot_every: int | None = None,
        progress: bool | None = None,
    ) -> None:
        sizes = {"steps": steps, "epochs": epochs, "save_every": save_every, "eval_every": eval_every}
        for name, value in (sizes | {"log_every": log_every, "snapshot_every": snapshot_every}).items():
            if value is not None and not (isinstance(value, Integral) and value >= 1):
                raise TrainingError(f"{name} must be a whole number and at least 1, got {value!r}")
        if steps is None and epochs is None:
            raise TrainingError("a run needs steps= or epochs=, or it would never end")
        if eval_every is not None and evaluate is None:
            raise TrainingError("eval_every needs evaluate=, the held-out samples")
        job = current_job()
        if directory is None and job is not None:
            directory = job.directory
        if job is not None and resume == "auto":
            resume = job.resume
        precision, plan = Precision.of(precision), of_any_model(plan)
        self.recipe = TrainingConfig(loss, optimizer, plan, precision, zero, clip, ema, trainable, on_nonfinite)
        self.pipelining = None if stages is None else Pipelining(stages, schedule, chunks)
        self.mesh = mesh
        self.source = as_source(data)
        self.held_out = None if evaluate is None else as_source(evaluate)
        self.sampler = Sampler(len(self.source), seed=seed, shuffle=shuffle, drop_last=drop_last)
        self.steps, self.epochs = steps, epochs
        self.eval_every, self.evaluate_average, self.log_every = eval_every, evaluate_average, log_every
        self.callbacks, self.elastic, self.snapshot_every = list(callbacks), elastic, snapshot_every
        names = [c.name or type(c).__name__ for c in self.callbacks]
        if len(set(names)) != len(names):
            raise TrainingError(f"two callbacks have one name: {', '.join(names)}; their states would be mixed up")
        self.directory = None if directory is None else Path(directory).absolute()
        self.save_every = save_every
        if checkpoints is None and self.directory is not None:
            checkpoints = CheckpointManager(self.directory / "checkpoints", keep=2, asynchronous=True)
        if checkpoints is None and save_every is not None:
            raise TrainingError("save_every needs directory= or checkpoints=, a place to save to")
        self.checkpoints = checkpoints
        self.resume, self.init = resume, init
        self.sizes = {"batch": batch, "micro": micro, "accumulation": accumulation, "seed": seed, "ahead": ahead}
        self.progress = Progress(seed=seed, samples=len(self.source), batch=batch)
        self.report = Reporting(self, progress)
        self._reason: str | None = None
        self.saved_at: int | None = None  # step of the newest complete checkpoint of this run
        self._saving: tuple[int, SaveHandle] | None = None
        self.session = self.new_session(mesh)
        self.recovery = Recovery(self, elastic)

    def new_session(self, mesh: Mesh | None) -> Session:
        """A session of the run on a mesh."""
        return session_of(self.recipe, self.pipelining, mesh, self.source, self.sampler, **self.sizes)

    # ----- properties -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The whole training state, a tree of arrays."""
        return self.session.state

    @property
    def params(self) -> Any:
        """The parameters."""
        if self.session.state is None:
            raise TrainingError("there are no parameters before fit()")
        return self.session.state["params"]

    @property
    def average(self) -> Any:
        """The average of the parameters that ``ema`` keeps, in their dtypes."""
        return self.session.average()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged numbers, in order."""
        return self.report.history

    def stop(self, reason: str) -> None:
        """End the run after this step; for callbacks."""
        self._reason = self._reason or reason

    # ----- the run ----------------------------------------------------------------------------------------------------

    def fit(self) -> TrainResult:
        """Run to the end; see the class. May be called again, to go on after ``steps`` was raised.

        Raises
        ------
        Interrupted
            SIGINT or SIGTERM came: the step that was running was done and saved. It has the result.
        DirectoryInUse
            Another run holds the directory.
        RestartsExhausted
            Workers were lost more often than ``elastic`` allows.
        NonFiniteError
            A loss or gradients became NaN or infinite, see ``on_nonfinite``; or no checkpoint has finite parameters.
        TrainingError
            A checkpoint does not belong to this run.
        """
        with contextlib.nullcontext() if (place := self._place()) is None else held(place):
            return self._fit()

    def _place(self) -> Path | None:
        """The directory for this run to lock; None if its job holds it already."""
        place, job = self.directory, current_job()
        if place is None and self.checkpoints is not None and "://" not in self.checkpoints.directory:
            place = Path(self.checkpoints.directory)
        return None if job is not None and job.holds and job.directory == place else place

    def _fit(self) -> TrainResult:
        self._reason = None
        self.report.begin(self.total())
        try:
            with StopSignals(self.report.stopping) as self.signals:
                self._begin()
                self.report.open_writers()
                self.report.note("running")
                while True:
                    try:
                        reason = self._run()
                        self._finish(reason)
                        break
                    except Exception as e:
                        self.recovery.after(e)
        except BaseException as e:
            self._let_land()
            self.report.note("failed", error=f"{type(e).__name__}: {e}")
            raise
        finally:
            self.recovery.drop_snapshots()
            self.report.close()
        self.report.note("stopped" if reason.startswith("SIG") else "finished", reason=reason)
        at, newest = self.progress, None if self.checkpoints is None else self.checkpoints.latest()
        loss, restarts = math.nan if at.loss is None else at.loss, self.recovery.restarts
        result = TrainResult(reason, at.step, at.epoch, at.consumed, loss, self.history, restarts, newest)
        if (job := current_job()) is not None:
            job.results.append(result)
        if result.stopped:
            text = (
                f"{reason} stopped the run after step {result.step}; the newest checkpoint is "
                f"{result.checkpoint or 'none'}"
            )
            raise interrupted(text, signal.Signals[reason], result)
        return result

    def total(self) -> int:
        """Steps of the whole run."""
        per_epoch = self.sampler.batches_per_epoch(self.sizes["batch"])
        ends = [n for n in (self.steps, None if self.epochs is None else self.epochs * per_epoch) if n is not None]
        return min(ends)

    def _begin(self) -> None:
        """The state to start from: that of the session, a checkpoint, or new."""
        if self.session.state is None:
            self.session.start(self.init)
            self.resume_from(self.resume)
        for c in self.callbacks:
            c.on_start(self)

    def resume_from(self, which: str, most: float = math.inf) -> str | None:
        """Load the checkpoint ``which``, like the option ``resume``: for ``"auto"`` the newest, up to step ``most``,
        whose parameters are finite. Its path, or None where there is none."""
        if which not in ("auto", "never"):
            self.load(which)
            if not self.session.finite():
                raise NonFiniteError(
                    f"{which} holds parameters that are not finite: give an earlier checkpoint, or resume='auto'"
                )
            self._go_back(which)
            return which
        if self.checkpoints is None or self.checkpoints.latest() is None:
            return None
        if which == "never":
            self.checkpoints.rollback(None)  # the steps of the run before are not this one's
            return None
        steps = [s for s in self.checkpoints.branch() if s <= most]
        for step in reversed(steps):
            path = self.checkpoints.path(step)
            self.load(path)
            if self.session.finite():
                self._go_back(path)
                return path
            warnings.warn(f"skipped {path}: its parameters are not finite", stacklevel=3)
        if steps:
            raise NonFiniteError(
                f"no checkpoint in {self.checkpoints.directory} has finite parameters (steps "
                f"{', '.join(map(str, steps))}): begin anew with resume='never' and another directory"
            )
        return None

    def load(self, path: str) -> None:
        """Load state and position from a checkpoint."""
        held = open_checkpoint(path).metadata.get(METADATA_KEY)
        if not isinstance(held, dict):
            raise TrainingError(f"{path} was not saved by a Trainer: it does not say how far the run had come")
        known = {f.name for f in dataclasses.fields(Progress)}
        found = Progress(**{k: v for k, v in held.items() if k in known})
        for what in ("seed", "samples"):
            mine, theirs = getattr(self.progress, what), getattr(found, what)
            if mine != theirs:
                raise TrainingError(
                    f"{path} belongs to a run with {what} {theirs}, this one has {mine}: its order of samples would be "
                    "another; pass resume='never', or load the parameters yourself"
                )
        self.session.state = load(path, like=self.session.state)
        found.batch = self.progress.batch
        self.go_to(found)
        self.saved_at = found.step

    def go_to(self, progress: Progress) -> None:
        """Go to the position ``progress``."""
        self.progress = dataclasses.replace(progress)
        for c in self.callbacks:
            held = progress.callbacks.get(c.name or type(c).__name__)
            if held is not None:
                c.restore(held)
        self.report.forget_after(progress.step)

    def position(self) -> Progress:
        """The position of the run, with the states of the callbacks."""
        self.progress.callbacks = {c.name or type(c).__name__: c.state() for c in self.callbacks}
        return self.progress

    def _run(self) -> str:
        """Run all steps. Returns the reason for the end."""
        at = self.progress
        meter = Meter(self.session.mesh)
        if (reason := self._done()) is not None:
            return reason
        if self.snapshot_every is not None:
            self.recovery.take_snapshot()
        self.session.go()
        self.watch = Watch(self.recipe.on_nonfinite, self.recipe.precision.scales)
        batches = self.session.loader.batches(at.consumed, epochs=self.epochs)
        try:
            for batch in batches:
                found = self.session.step(batch)
                self.watch.begin(at)
                meter.step(found)
                at.step, at.consumed, at.epoch = at.step + 1, batch.consumed, self.sampler.epoch(batch.consumed)
                self.landed()
                self.report.display.step(at.step)
                reason = self._done()
                save = self.is_due(at.step)
                if at.step % self.log_every == 0 or reason or save or self.signals.received is not None:
                    self._read(meter)
                if self.held_out is not None and self.eval_every and at.step % self.eval_every == 0:
                    self._evaluate()
                stopped = self._reason if self.signals.received is None else self.signals.received.name
                if reason or stopped:
                    return reason or stopped
                if save:
                    self._save()
                elif self.snapshot_every is not None and at.step % self.snapshot_every == 0:
                    self.recovery.take_snapshot()
                else:
                    continue
                if self.recovery.grow():
                    return self._run()
        finally:
            batches.close()
        return "epochs"

    def _done(self) -> str | None:
        at = self.progress
        if self.steps is not None and at.step >= self.steps:
            return "steps"
        if self.epochs is not None:
            ids, after = self.sampler.take(at.consumed, self.sizes["batch"])
            if self.sampler.epoch(after - len(ids)) >= self.epochs:
                return "epochs"
        return None

    def _finish(self, reason: str) -> None:
        at = self.progress
        last = self.history[-1] if self.history else {"step": -1}
        if (
            not reason.startswith("SIG")
            and self.held_out is not None
            and not (last["step"] == at.step and "eval_loss" in last)
        ):
            self._evaluate()
        if self.checkpoints is not None:
            self.landed(wait=True)
            if self.saved_at != at.step:
                self._save()
                self.landed(wait=True)
        for c in self.callbacks:
            c.on_stop(self, reason)

    # ----- numbers ----------------------------------------------------------------------------------------------------

    def _read(self, meter: Meter) -> None:
        """Read the steps since the last read: log them, or raise their error."""
        at, rows = self.progress, meter.rows()
        wrong = self.watch.read(rows, at)
        if wrong is None or any(r["finite"] for r in rows):
            counts = {"rollbacks": at.rollbacks} if self.recipe.on_nonfinite == "rollback" else {}
            if not self.recipe.halts:
                counts["skipped"] = at.skipped
            self._log({**meter.means(rows), **counts})
        if wrong is not None:
            self._let_land()  # what is being written counts
            wrong.args = (
                f"{wrong}; the newest checkpoint is {self.newest() or 'none'}. A smaller learning rate or clip= may "
                "help; mt.detect_anomaly() finds the op",
            )
            raise wrong

    def _log(self, numbers: dict[str, Any]) -> None:
        if math.isfinite(numbers.get("loss", math.nan)):
            self.progress.loss = numbers["loss"]
        self.report.log(self.progress.step, {"epoch": self.progress.epoch, **numbers})
        for c in self.callbacks:
            c.on_log(self, dict(numbers))  # each its own

    def _evaluate(self) -> None:
        assert self.held_out is not None
        numbers = self.session.evaluate(self.held_out, self.evaluate_average)
        self.report.judged(self.progress.step, numbers)
        for c in self.callbacks:
            c.on_evaluate(self, dict(numbers))
