"""A run whose model is in stages of a pipeline equals the run on one rank: numbers, checkpoints, resume on any mesh."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

de, tr = mt.models.decoder, mt.training


@pytest.fixture(scope="module")
def trainer(small_run):
    return small_run(4, tokens=500, steps=6, clip=0.5)


def numbers(result, name="loss"):
    return [h[name] for h in result.history if name in h]


def close(a, b, atol=1e-6):
    assert mt.tree.flatten(a)[1] == mt.tree.flatten(b)[1]
    for (path, x), y in zip(mt.tree.flatten_with_path(a), mt.tree.flatten(b)[0], strict=True):
        np.testing.assert_allclose(np.asarray(y), np.asarray(x), rtol=1e-4, atol=atol, err_msg=str(path))


@pytest.fixture(scope="module")
def single(trainer):
    """Six steps on one rank, the last but one of which is the ragged end of an epoch."""
    t = trainer(evaluate=trainer.samples(150), eval_every=3)
    return t, t.fit()


@pytest.mark.parametrize(
    ("plan", "axes", "options"),
    [
        ("pp", {"pipe": 2}, {"precision": tr.Precision("float32", scale=1024.0)}),
        ("pp", {"pipe": 4}, {"schedule": "zerobubble"}),
        ("pp", {"pipe": 2}, {"schedule": "interleaved", "chunks": 2}),
        ("dp+pp", {"pipe": 2, "data": 2}, {"zero": 2, "schedule": "fthenb"}),
        ("fsdp+tp+pp", {"data": 2, "pipe": 2, "model": 2}, {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_run_in_stages_equals_that_of_one_rank(trainer, single, plan, axes, options):
    """Dropout, clipping, averages, tied embeddings and a ragged batch are in it; and in one a scaled loss, which
    changes nothing."""
    t = trainer(axes, plan, evaluate=trainer.samples(150), eval_every=3, **options)
    result = t.fit()
    for name in ("loss", "grad_norm", "eval_loss"):
        np.testing.assert_allclose(numbers(result, name), numbers(single[1], name), rtol=2e-5)
    close(single[0].state, {n: x for n, x in t.state.items() if n != "scaler"})
    close(single[0].average, t.average)


def test_each_part_holds_its_own_parameters_alone(trainer):
    t = trainer({"pipe": 2}, "pp", steps=1)
    t.fit()
    parts = [t.mesh.submesh(pipe=r) for r in range(2)]
    where = {mt.tree.path_name(p): parts.index(x.sharding.mesh) for p, x in mt.tree.flatten_with_path(t.params)}
    assert where["embed"] == where["layers.1.ffn.up"] == 0
    assert where["layers.2.attn.q"] == where["norm"] == 1
    slots = mt.tree.flatten_with_path(t.state["optimizer"]["mean"])
    assert all(parts.index(x.sharding.mesh) == where[mt.tree.path_name(p)] for p, x in slots)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_small_floats_follow_float32(trainer, single, precision):
    t = trainer({"pipe": 2}, "pp", precision=precision, steps=3)
    result = t.fit()
    np.testing.assert_allclose(numbers(result), numbers(single[1])[:3], rtol=2e-2)
    np.testing.assert_allclose(numbers(result, "grad_norm"), numbers(single[1], "grad_norm")[:3], rtol=5e-2)
    if precision == "float16":
        assert numbers(result, "scale") == [2.0**15] * 3
        assert int(t.state["scaler"]["good"]) == 3


def test_a_step_whose_gradients_overflow_is_left_out_by_every_stage(trainer):
    t = trainer({"pipe": 2}, "pp", precision=tr.Precision("float16", scale=2.0**40), steps=2)
    t.fit()
    close(de.init(mt.random.fold_in(mt.random.key(0), 0), trainer.config), t.params, atol=0)
    assert int(t.state["scaler"]["skipped"]) == 2


def test_a_gradient_that_overflows_in_the_first_stage_alone_leaves_the_step_out_of_all():
    cut = mt.models.Stages(
        lambda n: [lambda p, x, b, k: b @ p["a"][:, None], lambda p, x, b, k: mt.mean(x * p["b"])],
        lambda p, n: [{"a": p["a"]}, {"b": p["b"]}],
    )
    params = {"a": mt.full(1, 1e-4, dtype=mt.float32), "b": mt.ones(1, dtype=mt.float32)}
    t = mt.Trainer(
        lambda p, b, k: 0, params, mt.optim.sgd(1e-3), np.full((8, 1), 3e4, np.float16), batch=4, accumulation=2, steps=1,
        plan=de.plan("pp"), mesh=mt.Mesh({"pipe": 2}), stages=cut, precision=tr.Precision("float16", scale=64.0),
    )  # fmt: skip
    t.fit()
    assert int(t.state["scaler"]["skipped"]) == 1
    close(params, t.params, atol=0)


def test_frozen_parameters_stay_and_cost_no_state(trainer, single):
    chosen = lambda path: path[0] == "layers" and path[1] == 1  # noqa: E731  # all in the first stage
    runs = []
    for axes, plan in ((None, "dp"), ({"pipe": 2}, "pp")):
        t = trainer(axes, plan, trainable=chosen, steps=3)
        runs.append((t, t.fit()))
    np.testing.assert_allclose(numbers(runs[1][1]), numbers(runs[0][1]), rtol=2e-5)
    close(runs[0][0].state, runs[1][0].state)
    assert runs[1][0].state["optimizer"]["mean"]["embed"] is None


def test_experts_in_stages_keep_their_balance_loss(trainer):
    moe = mt.models.moe.Config(experts=4, top_k=2, capacity_factor=None, aux_weight=0.5)
    config = de.Config(vocab=32, width=16, layers=2, heads=2, max_length=16, experts=moe)
    one = trainer(config=config, steps=3).fit()
    two = trainer({"pipe": 2, "expert": 2}, "ep+pp", config=config, steps=3).fit()
    np.testing.assert_allclose(numbers(two), numbers(one), rtol=5e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"pipe": 2}, "pp"), ({"pipe": 2}, "pp")),
        (({"pipe": 4}, "pp"), (None, "dp")),
        (({"data": 2}, "dp"), ({"pipe": 2, "data": 2}, "dp+pp")),
    ],
    ids=["the same", "to one rank", "from data ranks"],
)
def test_a_checkpoint_of_a_run_in_stages_goes_on_anywhere(trainer, tmp_path, single, before, after):
    manager = mt.CheckpointManager(tmp_path, keep=None)
    first = trainer(*before, steps=6 if before == after else 3, checkpoints=manager, save_every=3)
    unbroken = first.fit()
    t = trainer(*after, resume=manager.path(3))
    result = t.fit()
    assert len(numbers(result)) == 3
    if before == after:
        assert numbers(result) == numbers(unbroken)[3:]
        close(first.state, t.state, atol=0)
    np.testing.assert_allclose(numbers(result), numbers(single[1])[3:], rtol=2e-5)
    close(single[0].state, t.state)


def test_a_snapshot_of_a_run_in_stages_is_put_on_other_stages(trainer, single):
    t = trainer({"pipe": 2}, "pp", steps=3)
    t.fit()
    other = trainer({"pipe": 4}, "pp")
    other.session.restore(t.session.snapshot())
    other.go_to(t.position())
    np.testing.assert_allclose(numbers(other.fit()), numbers(single[1])[3:], rtol=2e-5)


def test_stages_on_worker_processes(trainer, processes, tmp_path, single):
    with mt.Mesh({"pipe": 2}, client=processes) as mesh:
        t = trainer(mesh, "pp", directory=tmp_path)
        result = t.fit()
        close(single[0].params, t.params)
    np.testing.assert_allclose(numbers(result), numbers(single[1]), rtol=2e-5)
    close(single[0].state, mt.load(result.checkpoint))


def test_without_the_axis_or_the_part_the_loss_is_used(trainer, single):
    for axes, plan in (({"data": 2}, "dp+pp"), ({"pipe": 2}, "dp")):
        np.testing.assert_allclose(numbers(trainer(axes, plan, steps=2).fit()), numbers(single[1])[:2], rtol=2e-5)


def test_what_does_not_fit_is_refused_before_anything_runs(trainer):
    with pytest.raises(mt.errors.PlanError, match="stages="):
        mt.Trainer(
            lambda p, b, k: 0,
            {},
            mt.optim.sgd(1),
            np.ones(4),
            batch=2,
            steps=1,
            plan=de.plan("pp"),
            mesh=mt.Mesh({"pipe": 2}),
        )
    with pytest.raises(mt.errors.TrainingError, match="multiples of its 2 ranks: accumulation is 1"):
        trainer({"pipe": 2}, "pp", schedule="interleaved", chunks=2, accumulation=1)
    with pytest.raises(mt.errors.TrainingError, match="one of fthenb"):
        trainer({"pipe": 2}, "pp", schedule="2f2b")
    with pytest.raises(mt.errors.ShapeError, match="cannot be cut into 8"):
        trainer({"pipe": 4}, "pp", schedule="interleaved", chunks=2, batch=16, accumulation=4)
    cut = mt.models.Stages(lambda n: [lambda p, x, b, k: x] * n, lambda p, n: [{"a": p["a"]}] * n)
    t = mt.Trainer(
        lambda p, b, k: 0, {"a": mt.ones(1), "b": mt.ones(1)}, mt.optim.sgd(1), np.ones(4), batch=2, steps=1, plan=de.plan("pp"),
        mesh=mt.Mesh({"pipe": 2}), stages=cut,
    )  # fmt: skip
    with pytest.raises(mt.errors.TrainingError, match="no stage takes the parameter b"):
        t.fit()
