"""kill -9 of a worker of a run without checkpoints: it goes on from the copy in the memory of the others, to the
bit."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.dask.cluster import local_cluster

tr = mt.training
LIMIT = 250.0


class Kill(tr.Callback):
    """Kills a worker at a step, when the last snapshot is complete; and sees where the run begins again."""

    def __init__(self, step):
        self.step, self.began = step, []

    def on_start(self, trainer):
        self.began.append(trainer.progress.step)

    def on_log(self, trainer, numbers):
        if trainer.progress.step == self.step and self.began == [0]:
            assert trainer.recovery.snapshots[-1][1].wait(LIMIT)
            client, victim = trainer.mesh.runtime.client, trainer.mesh.runtime.addresses[-1]
            os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)


@pytest.fixture(scope="module")
def trainer(small_run):
    return small_run(2, steps=6)


X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)


def fit_line(mesh, steps=9, **options):
    """A model of one vector: what it costs is the cluster's work alone. Its slots are split, so that each block is on
    one rank."""
    return mt.Trainer(
        lambda p, b, key: mt.mean((b["x"] @ p["w"] - b["y"]) ** 2),
        lambda key: {"w": mt.random.normal(key, (6,), dtype=mt.float32)},
        mt.optim.adam(0.05),
        {"x": X, "y": X @ np.arange(6, dtype=np.float32)},
        batch=16,
        steps=steps,
        log_every=1,
        mesh=mesh,
        zero=1,
        **options,
    ).fit()


def losses(result):
    return [h["loss"] for h in result.history]


KEEP = tr.Elastic(rejoin=0.0, on_loss="keep")


def test_a_killed_worker_costs_the_steps_since_the_snapshot(mortal):
    kill = Kill(7)
    result = fit_line(mt.Mesh({"data": 2}, client=mortal), callbacks=[kill], snapshot_every=3, elastic=KEEP)
    assert (result.step, result.restarts, kill.began) == (9, 1, [0, 6])
    assert losses(result) == losses(fit_line(mt.Mesh({"data": 2})))


def test_stages_go_on_from_the_snapshot_on_the_worker_that_is_left(trainer, mortal):
    kill = Kill(5)
    options = {"callbacks": [kill], "snapshot_every": 4, "elastic": KEEP}
    result = trainer(mt.Mesh({"pipe": 2}, client=mortal), "pp", **options).fit()
    assert (result.step, result.restarts, kill.began) == (6, 1, [0, 4])
    assert losses(result) == losses(trainer({"pipe": 2}, "pp").fit())


def test_a_newer_checkpoint_goes_before_a_snapshot(mortal, tmp_path):
    kill = Kill(8)
    result = fit_line(
        mt.Mesh({"data": 2}, client=mortal),
        callbacks=[kill],
        snapshot_every=3,
        save_every=7,
        checkpoints=mt.CheckpointManager(tmp_path),  # complete before the next step
        elastic=KEEP,
    )
    assert (result.step, result.restarts, kill.began) == (9, 1, [0, 7])


class KillOften(tr.Callback):
    """Kills a worker at each of some steps, or as soon after as two are there; sees what that costs."""

    def __init__(self, steps):
        self.steps, self.redone, self.seconds, self.at = sorted(steps), [], [], None

    def on_start(self, trainer):
        if self.at is not None:
            self.redone.append(self.at[0] - trainer.progress.step)

    def on_log(self, trainer, numbers):
        step, runtime = trainer.progress.step, trainer.mesh.runtime
        if self.at is not None and step > self.at[0]:
            self.seconds.append(time.monotonic() - self.at[1])
            self.at = None
        if self.at is None and self.steps and step >= self.steps[0] and len(runtime.addresses) == 2:
            self.steps.pop(0)
            assert trainer.recovery.snapshots[-1][1].wait(LIMIT)
            pid = runtime.client.run(os.getpid, workers=runtime.addresses[1:])[runtime.addresses[1]]
            self.at = step, time.monotonic()
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_in_two_hundred_steps_cost_a_step_each():
    kill = KillOften(range(9, 200, 9)[:20])
    with local_cluster(2) as client:
        options = {"snapshot_every": 1, "elastic": tr.Elastic(max_restarts=20, rejoin=60.0, on_loss="keep")}
        result = fit_line(mt.Mesh({"data": 2}, client=client), 200, callbacks=[kill], **options)
    print(f"seconds from a kill to the next step: {kill.seconds}")
    assert (result.step, result.restarts, kill.redone) == (200, 20, [1] * 20)
    np.testing.assert_allclose(losses(result), losses(fit_line(mt.Mesh({"data": 2}), 200)), rtol=1e-7)
