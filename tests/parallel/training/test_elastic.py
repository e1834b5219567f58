"""Workers that are killed, retired or added while a run goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.mesh.mesh import Mesh
from meshtape.parallel.training.elastic import Elastic
from meshtape.parallel.training.logging.metrics import read_lines

tr = mt.training
LIMIT = 250.0
X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
DATA = {"x": X, "y": X @ np.arange(6, dtype=np.float32)}


def loss(params, batch, key):
    return mt.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def init(key):
    return {"w": mt.random.normal(key, (6,), dtype=mt.float32), "b": mt.zeros((), dtype=mt.float32)}


STEPS = 20


def trainer(mesh, steps=STEPS, **options):
    options = {"log_every": 1, "seed": 3, "accumulation": 1} | options
    return mt.Trainer(loss, init, mt.optim.adam(0.05), DATA, batch=16, steps=steps, mesh=mesh, **options)


def losses(result):
    return [h["loss"] for h in result.history]


@pytest.fixture(scope="module")
def unbroken():
    return losses(trainer(mt.Mesh({"data": 2})).fit())


class Kill(tr.Callback):
    """Kills a worker of the run at each of some steps, once."""

    def __init__(self, steps, retire=False):
        self.steps, self.retire, self.killed = set(steps), retire, 0

    def on_log(self, trainer, numbers):
        step = trainer.progress.step
        if step in self.steps and len(trainer.mesh.runtime.addresses) > 1:
            self.steps.remove(step)
            self.killed += 1
            client = trainer.mesh.runtime.client
            victim = trainer.mesh.runtime.addresses[-1]
            if self.retire:
                client.retire_workers([victim])
            else:
                pid = client.run(os.getpid, workers=[victim])[victim]
                os.kill(pid, signal.SIGKILL)


class Sizes(tr.Callback):
    """At which steps the run began, or began again, and on how many ranks."""

    def __init__(self):
        self.seen = []

    def on_start(self, trainer):
        self.seen.append((trainer.progress.step, trainer.mesh.size))


@pytest.mark.parametrize(
    ("steps", "rejoin"),
    [pytest.param([8], 0.0, id="once"), pytest.param([8, 17], 60.0, id="twice", marks=pytest.mark.slow)],
)
def test_killed_workers_cost_only_the_steps_since_the_checkpoint(mortal, tmp_path, unbroken, steps, rejoin):
    """kill -9; the axes of the mesh stay, whether new workers come in time or the others take more ranks, and so do the
    numbers, to the bit."""
    kill = Kill(steps)
    t = trainer(
        mt.Mesh({"data": 2}, client=mortal),
        directory=tmp_path,
        save_every=5,
        callbacks=[kill],
        elastic=Elastic(rejoin=rejoin, on_loss="keep"),
    )
    result = t.fit()
    assert (result.reason, result.restarts) == ("steps", kill.killed)
    assert kill.killed >= 1
    assert losses(result) == unbroken
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_without_its_worker_the_run_goes_on_with_fewer_ranks_and_grows_again(tmp_path, unbroken):
    """The retired worker does not come back: one rank does the work of two, until a worker is added."""

    class Add(tr.Callback):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 12:
                client.cluster.scale(3)  # the retired one still counts for it
                client.wait_for_workers(2, timeout=LIMIT)

    sizes = Sizes()
    with local_cluster(2, processes=False) as client:
        result = trainer(
            mt.Mesh({"data": 2}, client=client),
            directory=tmp_path,
            save_every=4,
            callbacks=[Kill([6], retire=True), Add(), sizes],
            elastic=Elastic(rejoin=0.0),
        ).fit()
    assert (result.reason, result.restarts) == ("steps", 1)
    assert [n for _, n in sizes.seen] == [2, 1, 2]
    np.testing.assert_allclose(losses(result), unbroken, rtol=1e-4)


@pytest.mark.parametrize("kept", ["on disk", "in memory"])
def test_ranks_that_were_kept_on_fewer_workers_spread_when_workers_return(tmp_path, unbroken, kept):
    """The mesh keeps its two ranks throughout, and the numbers their bits: on two workers, on one, and on two again,
    once."""

    class Where(tr.Callback):
        def __init__(self):
            self.seen = []

        def on_start(self, trainer):
            self.seen.append(len(trainer.mesh.runtime.addresses))

        def on_log(self, trainer, numbers):
            if trainer.progress.step == 12:
                client.cluster.scale(3)  # the retired one still counts for it
                client.wait_for_workers(2, timeout=LIMIT)

    where = Where()
    options = {"directory": tmp_path, "save_every": 4} if kept == "on disk" else {"snapshot_every": 4}
    with local_cluster(2, processes=False) as client:
        result = trainer(
            mt.Mesh({"data": 2}, client=client),
            callbacks=[Kill([6], retire=True), where],
            elastic=Elastic(rejoin=0.0, on_loss="keep"),
            **options,
        ).fit()
    assert (result.reason, result.restarts, where.seen) == ("steps", 1, [2, 1, 2])
    assert losses(result) == unbroken


def test_a_run_that_is_only_kept_in_memory_grows_too(unbroken):
    class Add(Sizes):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 3:
                client.cluster.scale(2)
                client.wait_for_workers(2, timeout=LIMIT)

    add = Add()
    with local_cluster(1, processes=False) as client:
        result = trainer(
            mt.Mesh({"data": 1}, client=client),
            steps=6,
            snapshot_every=2,
            callbacks=[add],
            elastic=Elastic(rejoin=0.0, most=2),
        ).fit()
    assert (result.step, result.restarts, add.seen) == (6, 0, [(0, 1), (4, 2)])
    np.testing.assert_allclose(losses(result), unbroken[:6], rtol=1e-4)


class Terminate(tr.Callback):
    """Asks the run to stop at a step."""

    def __init__(self, step):
        self.step = step

    def on_log(self, trainer, numbers):
        if trainer.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("told", [False, True], ids=["patience 0", "after SIGTERM"])
def test_a_run_gives_up_once_when_too_few_workers_are_left(tmp_path, told):
    """Patience is waited for once, not for each restart that is left; and not at all by a run that is to stop."""
    with local_cluster(2, processes=False) as client:
        t = trainer(
            mt.Mesh({"data": 2}, client=client),
            directory=tmp_path,
            callbacks=[Kill([4], retire=True), *([Terminate(4)] if told else [])],
            elastic=Elastic(rejoin=0.0, min_workers=2, patience=1e6 if told else 0.0),
        )
        with pytest.raises(mt.errors.TrainingError, match=r"1 worker\(s\) are left and 2 are needed") as raised:
            t.fit()
    assert type(raised.value) is mt.errors.TrainingError
    assert t.recovery.restarts == 1


def test_a_failure_at_the_same_step_with_no_worker_gone_is_the_jobs_own(threads):
    class Stall(tr.Callback):
        times = 0

        def on_log(self, trainer, numbers):
            if trainer.progress.step == 3:
                self.times += 1
                raise mt.errors.CollectiveTimeout("no answer")

    stall = Stall()
    t = trainer(mt.Mesh({"data": 2}, client=threads), callbacks=[stall], elastic=Elastic(max_restarts=9))
    with pytest.raises(mt.errors.CollectiveTimeout, match="no answer"):
        t.fit()
    assert (stall.times, t.recovery.restarts) == (2, 1)


def test_a_restart_waits_for_the_save_in_flight_and_takes_no_newer_checkpoint_of_an_earlier_run(
    threads, tmp_path, monkeypatch
):
    stalled, write = threading.Event(), Mesh.run_on_blocks

    class StallOnce(Sizes):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 3 and len(self.seen) == 1:
                stalled.set()
                raise mt.errors.CollectiveTimeout("no answer")

        def on_save(self, trainer, path):
            states.append(trainer.report.status.facts["state"])

    states: list[str] = []

    def late(self, *args):
        assert stalled.wait(60)
        time.sleep(0.5)  # of a run that does not wait the mesh is closed by then
        return write(self, *args)

    trainer(None, steps=8, directory=tmp_path, save_every=8).fit()
    monkeypatch.setattr(Mesh, "run_on_blocks", late)
    stall = StallOnce()
    options = {"directory": tmp_path, "resume": "never", "save_every": 2, "callbacks": [stall], "elastic": Elastic()}
    result = trainer(mt.Mesh({"data": 2}, client=threads), steps=6, **options).fit()
    assert (result.step, result.restarts, stall.seen) == (6, 1, [(0, 2), (2, 2)])
    assert states[:2] == ["restarting", "running"]  # on the old mesh, and on the new one


def test_the_end_of_the_scheduler_is_said_to_be_that(tmp_path):
    class End(tr.Callback):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 5:
                trainer.landed(wait=True)
                client.cluster.close()
                client.close()

    with local_cluster(1, processes=False) as client:
        address = client.scheduler.address
        t = trainer(
            mt.Mesh({"data": 1}, client=client), directory=tmp_path, save_every=4, callbacks=[End()], elastic=Elastic()
        )
        with pytest.raises(mt.errors.ClusterError, match=f"scheduler at {address} is gone.*step-00000004"):
            t.fit()


def test_ctrl_c_in_a_terminal_reaches_the_job_and_not_its_workers(processes):
    """Each worker of this machine is a process group of its own, so that the state is there to be saved."""
    groups = processes.run(os.getpgrp)
    assert len({os.getpgrp(), *groups.values()}) == 1 + len(groups)


def test_more_losses_than_allowed_end_the_run(mortal, tmp_path):
    t = trainer(
        mt.Mesh({"data": 2}, client=mortal),
        directory=tmp_path,
        save_every=2,
        callbacks=[Kill([4])],
        elastic=Elastic(max_restarts=0),
    )
    with pytest.raises(mt.errors.RestartsExhausted, match="max_restarts is 0"):
        t.fit()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_without_elastic_a_loss_is_the_error_it_is(mortal):
    with pytest.raises(mt.errors.RankLost):
        trainer(mt.Mesh({"data": 2}, client=mortal), callbacks=[Kill([4])]).fit()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_runs_with_a_worker_killed_at_a_random_step_all_arrive(tmp_path, unbroken):
    rng = random.Random(0)
    for i in range(20):
        with local_cluster(2) as client:
            result = trainer(
                mt.Mesh({"data": 2}, client=client),
                directory=tmp_path / str(i),
                save_every=5,
                callbacks=[Kill([rng.randrange(1, STEPS)])],
                elastic=Elastic(rejoin=10.0 * (i % 2)),
            ).fit()
        assert result.step == STEPS
        np.testing.assert_allclose(losses(result)[-1], unbroken[-1], rtol=1e-3)


def test_the_next_mesh_splits_the_batch_evenly_over_experts_too():
    """A batch of 12 goes to 1, 2, 3 or 6 data ranks beside two of experts, which have rows of their own; not to 4."""
    mesh = mt.Mesh({"data": 2, "expert": 2})
    t = mt.Trainer(loss, init, mt.optim.sgd(0.1), DATA, batch=12, steps=1, mesh=mesh, plan=mt.models.Plan(("dp", "ep")))
    assert [n for n in range(1, 8) if t.recovery._fits(n)] == [1, 2, 3, 6]
    t = mt.Trainer(loss, init, mt.optim.sgd(0.1), DATA, batch=12, steps=1, mesh=mesh)
    assert [n for n in range(1, 8) if t.recovery._fits(n)] == [1, 2, 3, 4, 6]


def test_the_policy_by_hand():
    fits = lambda n: 12 % n == 0  # noqa: E731
    assert Elastic().axes({"data": 4}, 1, 3, fits) == {"data": 3}
    assert Elastic().axes({"data": 6}, 1, 5, fits) == {"data": 4}  # 12 does not divide over 5
    assert Elastic().axes({"data": 2, "model": 4}, 1, 2, fits) == {"data": 1, "model": 4}  # ranks share workers
    assert Elastic().axes({"data": 2}, 2, 5, fits) == {"data": 2}  # not beyond what it began with
    assert Elastic(most=6).axes({"data": 2}, 1, 6, fits) == {"data": 6}
    assert Elastic().axes({"model": 2}, 1, 1, fits) == {"model": 2}
    with pytest.raises(mt.errors.TrainingError, match="on_loss"):
        Elastic(on_loss="panic")
