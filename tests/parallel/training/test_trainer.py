"""A run from first step to last: exact resume, other meshes, evaluation, early stop, signals, what is written."""

from __future__ import annotations

import math
import os
import signal

import dask
import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.training.job.jobs import Job, parse_axes, resolve_axes, running
from meshtape.parallel.training.job.status import read_status
from meshtape.parallel.training.logging.metrics import read_lines
from meshtape.parallel.training.logging.progress import METADATA_KEY

from .conftest import losses

de, tr = mt.models.decoder, mt.training


@pytest.fixture(scope="module")
def trainer(small_run):
    """Runs of 12 steps, the 8th of which is the ragged end of an epoch."""
    return small_run(1, steps=12)


def equal(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(mt.tree.flatten(a)[0], mt.tree.flatten(b)[0], strict=True)
    )


@pytest.fixture(scope="module")
def unbroken(trainer):
    t = trainer()
    return t, t.fit()


def test_a_run_learns_and_says_how_it_ended(unbroken):
    t, result = unbroken
    assert (result.reason, result.step, result.consumed) == (
        "steps",
        12,
        58 + 32,
    )  # 58 windows an epoch, the last batch has 2
    assert not result.stopped
    assert result.restarts == 0
    assert losses(result)[-1] < losses(result)[0]
    assert t.average["embed"].shape == (32, 16)


@pytest.mark.parametrize("axes", [None, {"data": 2}, {"data": 2, "model": 2}])
def test_an_interrupted_run_goes_on_bit_for_bit(trainer, tmp_path, axes):
    """Dropout, warm-up, averages, a ragged batch and the turn of an epoch lie between the steps."""
    plan = "dp+tp" if axes and "model" in axes else "dp"
    whole = trainer(axes, plan)
    wanted = whole.fit()
    first = trainer(axes, plan, steps=5, directory=tmp_path).fit()
    second = trainer(axes, plan, directory=tmp_path)
    result = second.fit()
    assert losses(first) + losses(result) == losses(wanted)
    assert equal(second.state, whole.state)


@pytest.mark.parametrize(
    ("before", "after", "zero"),
    [((None, "dp"), ({"data": 2}, "dp"), 2), (({"data": 4}, "dp"), ({"data": 2, "model": 2}, "fsdp+tp"), 0)],
)
def test_a_run_goes_on_on_another_mesh_to_rounding(trainer, tmp_path, unbroken, before, after, zero):
    trainer(*before, steps=5, directory=tmp_path).fit()
    t = trainer(*after, zero=zero, directory=tmp_path)
    result = t.fit()
    np.testing.assert_allclose(losses(result), losses(unbroken[1])[5:], atol=5e-6)
    # The average lies like the parameters, and is loaded like them.
    for a, b in zip(mt.tree.flatten(t.average)[0], mt.tree.flatten(unbroken[0].average)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)
    assert result.consumed == unbroken[1].consumed


def test_a_run_goes_on_with_another_batch_size_at_the_next_sample(trainer, tmp_path):
    trainer(steps=3, directory=tmp_path).fit()
    t = trainer(steps=5, batch=4, directory=tmp_path)
    read = []
    whole = t.source.read
    t.source.read = lambda ids: [read.extend(ids), whole(ids)][1]
    result = t.fit()
    assert result.consumed == 3 * 8 + 2 * 4
    assert read[: 2 * 4] == tr.Sampler(58).take(24, 8)[0].tolist()
    assert mt.open_checkpoint(result.checkpoint).metadata[METADATA_KEY]["batch"] == 4


def test_each_step_and_micro_batch_draws_numbers_of_its_own():
    def loss(params, batch, key):
        drawn, n = mt.random.uniform(key, ()), batch.shape[0]
        return params.sum() * 0 + drawn * n, mt.asarray(float(n)), {"square": drawn * drawn * n}

    t = mt.Trainer(
        loss, mt.ones(2), mt.optim.sgd(0.1), np.ones(8), batch=4, accumulation=2, steps=4, log_every=1, seed=1
    )
    history = t.fit().history
    assert len({h["loss"] for h in history}) == 4
    assert all(h["square"] > h["loss"] ** 2 + 1e-6 for h in history)  # the mean of two squares: they differ


def test_a_finished_run_does_nothing_more(trainer, tmp_path):
    first = trainer(steps=3, directory=tmp_path).fit()
    again = trainer(steps=3, directory=tmp_path)
    result = again.fit()
    assert (result.reason, result.step, result.history) == ("steps", 3, [])
    assert math.isfinite(first.loss)
    assert result.loss == first.loss
    assert trainer(steps=2, directory=tmp_path, resume="never").fit().step == 2


def test_epochs_end_where_the_samples_do(trainer):
    result = trainer(steps=None, epochs=2, batch=16).fit()
    assert (result.reason, result.step, result.consumed, result.epoch) == ("epochs", 2 * 4, 2 * 58, 2)


def test_raising_the_number_of_steps_goes_on(trainer, unbroken):
    t = trainer(steps=4)
    t.fit()
    t.steps = 12
    assert losses(t.fit()) == losses(unbroken[1])


def test_a_checkpoint_of_another_run_is_refused(trainer, tmp_path):
    trainer(steps=2, directory=tmp_path).fit()
    with pytest.raises(mt.errors.TrainingError, match="seed 0, this one has 1"):
        trainer(directory=tmp_path, seed=1).fit()
    other = trainer(directory=tmp_path)
    shorter = mt.Trainer(
        other.recipe.loss,
        other.init,
        other.recipe.optimizer,
        trainer.samples(100),
        batch=2,
        steps=3,
        directory=tmp_path,
    )
    with pytest.raises(mt.errors.TrainingError, match="samples 58, this one has 8"):
        shorter.fit()
    mt.save(tmp_path / "plain", {"w": mt.ones(2)})
    with pytest.raises(mt.errors.TrainingError, match="not saved by a Trainer"):
        trainer(resume=str(tmp_path / "plain")).fit()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_checkpoint_holds_what_a_run_without_it_would(trainer, tmp_path, zero):
    """Saved right after a step, whatever is still on its way then."""
    t = trainer({"data": 2}, zero=zero, steps=4, save_every=1, directory=tmp_path)
    result = t.fit()
    assert equal(mt.load(result.checkpoint), t.state)
    plain = trainer({"data": 2}, zero=zero, steps=4)
    plain.fit()
    assert equal(plain.state, t.state)


def test_a_save_right_after_a_step_waits_for_what_runs_beside_the_computation(trainer, tmp_path, threads):
    """Gradients that are reduced, and parameters that are gathered, while the step goes on: each byte is that of a run
    without."""
    held = []
    for overlap in (0, 1):
        place = tmp_path / str(overlap)
        options = {"meshtape.overlap": overlap, "meshtape.bucket": 1}
        with dask.config.set(options), mt.Mesh({"data": 2}, client=threads) as mesh:
            trainer(mesh, zero=3, steps=2, save_every=1, directory=place).fit()
        manager = mt.CheckpointManager(place / "checkpoints")
        held.append([mt.load(manager.path(step)) for step in manager.steps()])
    assert len(held[0]) == 2
    for a, b in zip(*held, strict=True):
        assert equal(a, b)


def test_a_manager_of_ones_own_says_when_checkpoints_are_due(trainer, tmp_path):
    for name, due, given, steps in (
        ("count", {"every_steps": 2}, {}, [2, 4, 5]),
        ("time", {"every_minutes": 1e-9}, {}, [1, 2, 3, 4, 5]),
        ("neither", {}, {}, [5]),
        ("the run's", {"every_steps": 2}, {"save_every": 3}, [3, 5]),
    ):
        manager = mt.CheckpointManager(tmp_path / name, keep=None, **due)
        trainer(steps=5, checkpoints=manager, **given).fit()
        assert manager.steps() == steps, name


def test_background_saves_hold_the_state_of_their_step(trainer, tmp_path):
    manager = mt.CheckpointManager(tmp_path, keep=None, asynchronous=True)
    t = trainer(steps=6, save_every=2, checkpoints=manager)
    t.fit()
    early = trainer(steps=2)
    early.fit()
    assert manager.steps() == [2, 4, 6]
    assert equal(mt.load(manager.path(2)), early.state)


def test_a_run_that_goes_back_resumes_along_its_new_branch(trainer, tmp_path):
    place = tmp_path / "checkpoints"
    manager = mt.CheckpointManager(place, keep=None)
    trainer(steps=6, save_every=2, checkpoints=manager).fit()
    first = mt.load(manager.path(6))
    back = trainer(steps=3, save_every=1, checkpoints=mt.CheckpointManager(place, keep=None), resume=manager.path(2))
    back.fit()
    assert (manager.branch(), manager.steps()) == ([2, 3], [2, 3, 4, 6])
    with pytest.warns(UserWarning, match="step 6 .*the latest is step 3"):
        assert manager.latest() == manager.path(3)
    seen = []
    on = trainer(steps=5, save_every=1, checkpoints=mt.CheckpointManager(place, keep=None))
    on.load, load = lambda path: (seen.append(path), load(path)), on.load
    on.fit()
    assert seen == [manager.path(3)]
    assert manager.branch() == [2, 3, 4, 5]
    assert equal(mt.load(manager.path(6)), first)
    anew = trainer(steps=1, save_every=1, checkpoints=mt.CheckpointManager(place, keep=None), resume="never")
    anew.fit()
    assert manager.branch() == [1]


# ----- evaluation and stopping ----------------------------------------------------------------------------------------


def test_evaluation_is_over_the_whole_set_without_dropout(trainer, unbroken):
    held = trainer.samples(280)  # 22 windows: the last micro-batch is shorter, and counts by its tokens
    values = {}
    for axes in (None, {"data": 3}):
        t = trainer(axes, steps=2, batch=12, evaluate=held, eval_every=1)
        values[str(axes)] = [h["eval_loss"] for h in t.fit().history]
    np.testing.assert_allclose(*values.values(), atol=2e-6)
    data = mt.tree.tree_map(mt.asarray, held.read(np.arange(len(held))))
    total, weight = de.loss(t.params, data, trainer.config)
    assert abs(values[str({"data": 3})][-1] - float(total) / float(weight)) < 2e-6


def test_early_stop_ends_the_run_and_its_patience_survives_a_restart(trainer, tmp_path):
    held = trainer.samples(200)

    def run(steps, **options):
        stop = tr.EarlyStop(patience=3, least=100.0)  # nothing is ever good enough
        return trainer(steps=steps, evaluate=held, eval_every=1, callbacks=[stop], **options).fit()

    assert run(12).step == 4  # the first value is the best so far, three more bring nothing
    assert "eval_loss" in run(12).reason
    run(2, directory=tmp_path)
    assert run(12, directory=tmp_path).step == 4


def test_early_stop_of_a_number_that_should_grow():
    stop = tr.EarlyStop("eval_accuracy", patience=2, highest=True)
    assert [stop.seen(v) for v in (0.5, 0.6, 0.55, float("nan"))] == [False, False, False, True]


def test_callbacks_see_the_turns_of_a_run(trainer, tmp_path):
    seen = []

    class Watch(tr.Callback):
        def on_start(self, trainer):
            seen.append("start")

        def on_log(self, trainer, numbers):
            seen.append(f"log {trainer.progress.step}")

        def on_save(self, trainer, path):
            seen.append(f"save {path[-1]}")

        def on_stop(self, trainer, reason):
            seen.append(reason)

    trainer(steps=4, log_every=2, save_every=2, directory=tmp_path, callbacks=[Watch()]).fit()
    assert [s for s in seen if s != "save 2"] == ["start", "log 2", "log 4", "save 4", "steps"]
    assert 2 <= seen.index("save 2") <= 3  # once it is complete
    with pytest.raises(mt.errors.TrainingError, match="one name"):
        trainer(callbacks=[Watch(), Watch()])


def test_an_early_stop_that_cannot_be_is_an_error(trainer):
    with pytest.raises(mt.errors.TrainingError, match="patience"):
        tr.EarlyStop(patience=0)
    with pytest.raises(mt.errors.TrainingError, match="no 'eval_bleu' to wait for: the evaluation gives eval_loss"):
        trainer(steps=1, evaluate=trainer.samples(100), callbacks=[tr.EarlyStop("eval_bleu")]).fit()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    x = np.ones((8, 2), np.float32)
    t = mt.Trainer(
        lambda p, b, key: mt.mean(b["x"] @ p) * 1e38,
        mt.ones(2, dtype=mt.float32),
        mt.optim.sgd(1e10),
        {"x": x},
        batch=4,
        steps=9,
        log_every=1,
        directory=tmp_path,
    )
    with np.errstate(all="ignore"), pytest.raises(mt.errors.TrainingError, match="the loss is"):
        t.fit()
    assert read_status(tmp_path)["state"] == "failed"


def test_steps_in_which_nothing_counts_have_no_loss_and_end_no_run(tmp_path):
    """A log over several steps has the mean over what counted in them."""
    counts = np.repeat([1.0, 0.0, 1.0], 4).astype(np.float32)

    def run(**options):
        return mt.Trainer(
            lambda p, b, key: (((p - 3.0) ** 2 * b).sum(), b.sum()),
            mt.zeros((), dtype=mt.float32),
            mt.optim.sgd(0.25),
            counts,
            batch=4,
            steps=3,
            shuffle=False,
            **options,
        ).fit()

    assert [h.get("loss") for h in run(log_every=1, directory=tmp_path).history] == [9.0, None, 2.25]
    assert ["loss" in line for line in read_lines(tmp_path / "metrics.jsonl")] == [True, False, True]
    assert [h["loss"] for h in run(log_every=3).history] == [(9.0 + 2.25) / 2]


def test_a_run_whose_loss_is_finite_at_no_scale_ends():
    t = mt.Trainer(
        lambda p, b, key: mt.mean(p * b) * float("nan"),
        mt.ones((), dtype=mt.float32),
        mt.optim.sgd(0.1),
        np.ones(8, np.float16),
        batch=2,
        steps=100,
        log_every=1,
        precision=tr.Precision("float16", scale=2.0**-12),
    )
    with pytest.raises(mt.errors.TrainingError, match=r"not finite at any scale of the loss.* at step 3"):
        t.fit()
    assert float(t.params) == 1.0
    assert int(t.state["scaler"]["skipped"]) == 3
    assert float(t.state["scaler"]["scale"]) == 2.0**-14  # no less: what is divided by 0 is lost


def test_the_scale_of_the_loss_goes_on_where_it_was(tmp_path):
    def run(steps, **options):
        return mt.Trainer(
            lambda p, b, key: mt.mean((p - b) ** 2),
            mt.ones((), dtype=mt.float32),
            mt.optim.sgd(0.1),
            np.ones(8, np.float32),
            batch=2,
            steps=steps,
            log_every=1,
            precision=tr.Precision("float16", scale=4.0, every=2),
            **options,
        ).fit()

    scales = [h["scale"] for h in run(6).history]
    assert scales == [4.0, 4.0, 8.0, 8.0, 16.0, 16.0]
    found = [h["scale"] for steps in (3, 6) for h in run(steps, directory=tmp_path).history]
    assert found == scales


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_and_the_run_goes_on_from_there(trainer, tmp_path, unbroken, which):
    class Interrupt(tr.Callback):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 4:
                os.kill(os.getpid(), which)

    before = signal.getsignal(which)
    with pytest.raises(
        mt.errors.Interrupted, match=f"{which.name} stopped the run after step .* newest checkpoint is /"
    ) as e:
        trainer(directory=tmp_path, callbacks=[Interrupt()]).fit()
    assert isinstance(e.value, KeyboardInterrupt if which == signal.SIGINT else SystemExit)
    assert not isinstance(e.value, Exception)
    assert (e.value.signal, e.value.code) == (which, 128 + which)
    first = e.value.result
    assert (first.reason, first.stopped) == (which.name, True)
    assert first.step in (4, 5)
    assert signal.getsignal(which) is before
    status = read_status(tmp_path)
    assert (status["state"], status["step"]) == ("stopped", first.step)
    assert losses(first) + losses(trainer(directory=tmp_path).fit()) == losses(unbroken[1])


def test_a_second_signal_ends_the_run_at_once(trainer, tmp_path, capfd):
    """Without a checkpoint of that step: the next run goes on from the last one."""

    class Insist(tr.Callback):
        def on_log(self, trainer, numbers):
            if trainer.progress.step == 5:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(directory=tmp_path, save_every=2, callbacks=[Insist()]).fit()
    assert "SIGINT: the run stops after this step and a checkpoint; once more" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    status = read_status(tmp_path)
    assert (status["state"], status["error"].split(":")[0]) == ("failed", "KeyboardInterrupt")
    again = trainer(directory=tmp_path).fit()
    assert [h["step"] for h in again.history] == list(range(5, 13))


# ----- jobs and bad input ---------------------------------------------------------------------------------------------


def test_a_job_gives_the_mesh_and_the_directory(trainer, tmp_path):
    job = Job(tmp_path, axes={"data": 2})
    with running(job):
        mesh = mt.cluster_mesh({"data": -1, "model": 4})
        assert mesh.describe() == {"data": 2}
        t = trainer(steps=1)
        t.fit()
    assert t.directory == tmp_path
    assert [r.step for r in job.results] == [1]
    assert mt.cluster_mesh().describe() == {"data": 1}


def test_axes_of_the_command_line():
    assert parse_axes("data=4, model=2") == {"data": 4, "model": 2}
    assert resolve_axes({"data": -1, "model": 2}, 7) == {"data": 3, "model": 2}
    assert resolve_axes({"data": -1, "model": 8}, 4) == {"data": 1, "model": 8}
    for text in ("data", "data=x", "data=0", "=2", "data=2,data=2", "data=-1,model=-1", "1x=2"):
        with pytest.raises(mt.errors.MeshError):
            parse_axes(text)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": None}, mt.errors.TrainingError, "never end"),
        ({"steps": 0}, mt.errors.TrainingError, "steps must be a whole number and at least 1"),
        ({"save_every": 2}, mt.errors.TrainingError, "a place to save to"),
        ({"eval_every": 2}, mt.errors.TrainingError, "needs evaluate"),
        ({"batch": 7}, mt.errors.BatchSizeError, "no multiple"),
        ({"precision": "int8"}, mt.errors.TrainingError, "precision"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_done(trainer, options, error, message):
    with pytest.raises(error, match=message):
        trainer(**options)


def test_plans_by_name_for_parameters_of_any_model():
    rows, mesh = np.random.default_rng(0).standard_normal((8, 4)), mt.Mesh({"data": 2})

    def run(plan):
        t = mt.Trainer(
            lambda p, b, k: ((b @ p["w"]) ** 2).mean(),
            {"w": mt.ones((4, 3))},
            mt.optim.sgd(0.1),
            rows,
            batch=4,
            steps=3,
            mesh=mesh,
            plan=plan,
            progress=False,
        )
        t.fit()
        return t.params["w"]

    split, whole = run("fsdp"), run(None)
    assert (str(split.sharding), str(whole.sharding)) == ("Sharding(data=Shard(0))", "Sharding(data=Replicate())")
    np.testing.assert_allclose(np.asarray(split), np.asarray(whole), rtol=1e-12)
    with pytest.raises(mt.errors.PlanError, match="only the model knows"):
        run("dp+tp")
    with pytest.raises(mt.errors.PlanError, match="got int"):
        run(3)


def test_parameters_on_another_mesh_are_refused():
    here = mt.distribute(mt.ones(2), mt.Mesh({"data": 2}))
    t = mt.Trainer(
        lambda p, b, k: p.sum(), here, mt.optim.sgd(0.1), np.ones(4), batch=2, steps=1, mesh=mt.Mesh({"data": 2})
    )
    with pytest.raises(mt.errors.MeshError, match="another mesh"):
        t.fit()
