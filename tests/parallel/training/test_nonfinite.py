"""Steps that are not finite: raised, skipped or rolled back, on every path, and never saved."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.training.logging.progress import METADATA_KEY
from meshtape.parallel.training.nonfinite import IN_A_ROW, ROLLBACKS

tr = mt.training
NON_FINITE = mt.errors.NonFiniteError
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


def rows(bad=()):
    """Samples, of which some make the gradient NaN and leave the loss finite."""
    flaw = np.ones(32, np.float32)
    flaw[list(bad)] = 0.0
    return {"x": X, "y": X @ np.arange(4, dtype=np.float32), "flaw": flaw}


def loss(params, batch, key):
    """Its gradient by ``b`` is NaN where a flaw is 0: 0 times infinity, behind a finite value."""
    e = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return mt.mean(e) + mt.mean(mt.sqrt(batch["flaw"] * (1 + params["b"])))


def init():
    return {"w": mt.zeros(4, dtype=mt.float32), "b": mt.zeros((), dtype=mt.float32)}


def trainer(bad=(), mesh=None, function=loss, **options):
    options = {"batch": 4, "steps": 8, "log_every": 1, "shuffle": False, "optimizer": mt.optim.adam(0.05)} | options
    mesh = mesh if mesh is None or isinstance(mesh, mt.Mesh) else mt.Mesh(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mt.Trainer(function, init(), options.pop("optimizer"), rows(bad), mesh=mesh, **options)


def quietly(t):
    with np.errstate(all="ignore"):
        return t.fit()


def leaves(tree):
    return [np.asarray(x) for x in mt.tree.flatten(tree)[0]]


def same(a, b, **close):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if close:
            np.testing.assert_allclose(x, y, **close)
        else:
            np.testing.assert_array_equal(x, y)


def cached(params, batch, key):
    def embed(p, part, key):
        flawed = mt.sqrt(part["flaw"] * (1 + p["b"]))
        return (part["x"] @ p["w"] - part["y"]) ** 2 + flawed

    return tr.grad_cache(embed, mt.mean, chunk=1)(params, batch, key)


PATHS = {
    "one rank": {},
    "micro-batches": {"accumulation": 2},
    "cached": {"function": cached},
    "ranks": {"mesh": {"data": 2}},
    "micro-batches on ranks": {"mesh": {"data": 2}, "accumulation": 2},
    "zero 1": {"mesh": {"data": 2}, "zero": 1},
    "zero 2": {"mesh": {"data": 2}, "zero": 2},
    "zero 3": {"mesh": {"data": 4}, "zero": 3},
    "clipped": {"clip": 1.0},
    "averaged": {"ema": mt.optim.ema(0.5)},
    "lazy": {"optimizer": mt.optim.lazy_adam(0.05)},
    "bfloat16": {"precision": "bfloat16"},
    "a scaled loss": {"precision": tr.Precision("float16", scale=4.0)},
    "a loss that is NaN too": {"function": lambda p, b, key: loss(p, b, key) / b["flaw"].min() * b["flaw"].min()},
}


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("path", PATHS)
def test_a_skipped_step_changes_nothing_but_its_batch(path, every):
    """The state is that of a run without the step, however late somebody looks."""
    options = PATHS[path]
    t = trainer((13,), on_nonfinite="skip", **options | {"log_every": every})
    result = quietly(t)
    assert result.history[-1]["skipped"] == 1
    assert all(np.isfinite(h["loss"]) for h in result.history if "loss" in h)
    keep = [i for i in range(32) if i // 4 != 3]
    held = rows()
    clean = trainer(steps=7, **options)
    clean.source = clean.session.loader.source = tr.ArraySource({n: v[keep] for n, v in held.items()})
    clean.sampler.size = clean.session.loader.sampler.size = clean.progress.samples = 28
    quietly(clean)
    if "scaled" not in path:
        same({k: v for k, v in t.state.items() if k != "step"}, {k: v for k, v in clean.state.items() if k != "step"})
    else:
        same(t.params, clean.params, rtol=0, atol=2e-3)
    assert int(t.state["step"]) == 8


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("path", [p for p in PATHS if p != "a scaled loss"])
def test_a_step_that_raises_leaves_the_run_before_it(path, every, tmp_path):
    options = PATHS[path]
    t = trainer((13,), directory=tmp_path, **options | {"log_every": every})
    with pytest.raises(
        NON_FINITE, match=r"at step 4 the loss is .* norm of the gradients (nan|inf); the newest checkpoint is none"
    ):
        quietly(t)
    assert isinstance(NON_FINITE("x"), FloatingPointError | mt.errors.TrainingError)
    assert (t.progress.step, t.progress.consumed, int(t.state["step"])) == (3, 12, 3)
    before = trainer(steps=3, **options)
    quietly(before)
    same(t.state, before.state)
    with pytest.raises(NON_FINITE, match="at step 4"):  # it stands there, and tries again
        quietly(t)
    saves = trainer((13,), directory=tmp_path / "saves", save_every=3, **options)
    with pytest.raises(NON_FINITE, match=r"the newest checkpoint is /.*step-0*3\."):  # also one that is being written
        quietly(saves)


@pytest.mark.parametrize("path", ["one rank", "micro-batches on ranks", "zero 2", "zero 3", "averaged"])
def test_a_rollback_goes_on_after_the_bad_batch(path, tmp_path):
    options = PATHS[path]
    t = trainer((13,), directory=tmp_path, save_every=2, on_nonfinite="rollback", steps=7, **options)
    result = quietly(t)
    assert (result.step, result.consumed, result.reason) == (
        7,
        36,
        "steps",
    )  # steps 1 2 (3) 4, without the batch of 4 and those before
    assert result.history[-1]["rollbacks"] == 1
    assert [h["step"] for h in result.history] == list(range(1, 8))
    keep = [i for i in range(32) if i // 4 not in (2, 3)]
    held = rows()
    clean = trainer(steps=6, **options)
    clean.source = clean.session.loader.source = tr.ArraySource({n: v[keep] for n, v in held.items()})
    clean.sampler.size = clean.session.loader.sampler.size = clean.progress.samples = 24
    quietly(clean)
    loaded = mt.load(tmp_path / "checkpoints" / "step-00000006")
    same(loaded["params"], clean.params)
    assert mt.open_checkpoint(result.checkpoint).metadata[METADATA_KEY]["rollbacks"] == 1


def test_without_a_checkpoint_a_rollback_leads_to_the_beginning():
    result = quietly(trainer((6,), on_nonfinite="rollback", steps=3))
    assert (result.step, result.consumed, result.history[-1]["rollbacks"]) == (3, 20, 1)


def test_rollbacks_and_skips_end_a_run_that_comes_to_nothing(tmp_path):
    bad = range(8, 32)
    t = trainer(bad, on_nonfinite="rollback", directory=tmp_path, save_every=1)
    with pytest.raises(NON_FINITE, match=f"after {ROLLBACKS} rollbacks to step 2 it is the same"):
        quietly(t)
    assert mt.CheckpointManager(tmp_path / "checkpoints").steps() == [1, 2]
    t = trainer(range(32), on_nonfinite="skip", steps=100)
    with pytest.raises(NON_FINITE, match=f"{IN_A_ROW} steps in a row were skipped"):
        quietly(t)
    assert t.progress.step == IN_A_ROW


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_stages_decide_alike(small_run, policy):
    """The gradient of the last stage alone is NaN, and the first changes nothing either."""

    run = small_run(layers=2, steps=5, ema=None, clip=None, on_nonfinite=policy)
    t = run({"pipe": 2}, "dp+pp", batch=8)
    poisoned = {"at": None}

    class Poison(tr.Callback):
        """Makes one parameter of the last stage infinite before step 3, and mends it after."""

        def on_log(self, trainer, numbers):
            if trainer.progress.step == 2 and poisoned["at"] is None:
                poisoned["at"] = leaves(trainer.params)
                part = trainer.session._states[1]["params"]
                part["norm"] = part["norm"] * float("nan")

    t.callbacks.append(Poison())
    if policy == "skip":
        t.steps = 4
        quietly(t)
        now = leaves(t.params)
        assert t.progress.skipped == 2
    else:
        if policy == "rollback":
            t.recovery._restore = lambda saved: None  # there is nothing good to go back to
        with pytest.raises(NON_FINITE, match="at step 3"):
            quietly(t)
        now = leaves(t.params)
        assert t.progress.step == 2
    flat = [mt.tree.path_name(p) for p, _ in mt.tree.flatten_with_path(t.params)]
    for name, a, b in zip(flat, now, poisoned["at"], strict=True):
        if name != "norm":
            np.testing.assert_array_equal(a, b)


# ----- checkpoints ----------------------------------------------------------------------------------------------------


def spoil(path):
    """A checkpoint as it would be with parameters that are not finite."""
    ckpt = mt.open_checkpoint(path)
    tree, held = mt.load(path), ckpt.metadata
    tree["params"]["w"] = tree["params"]["w"] * np.float32("inf")
    mt.save(path, tree, step=held[METADATA_KEY]["step"], metadata=dict(held), overwrite=True)


def test_a_run_resumes_from_the_last_checkpoint_with_finite_parameters(tmp_path):
    whole = quietly(trainer())
    quietly(trainer(steps=4, directory=tmp_path, save_every=2))
    manager = mt.CheckpointManager(tmp_path / "checkpoints")
    assert manager.steps() == [2, 4]
    spoil(manager.path(4))
    t = trainer(directory=tmp_path)
    with pytest.warns(UserWarning, match=r"skipped .*step-00000004: its parameters are not finite"):
        result = t.fit()
    assert [h["loss"] for h in result.history] == [h["loss"] for h in whole.history[2:]]
    for step in manager.steps():
        spoil(manager.path(step))
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(NON_FINITE, match=r"no checkpoint in .* has finite parameters \(steps "),
    ):
        trainer(directory=tmp_path).fit()
    with pytest.raises(NON_FINITE, match="give an earlier checkpoint"):
        trainer(resume=manager.latest()).fit()


def test_parameters_that_overflow_are_not_saved(tmp_path):
    """The gradients are finite, what the optimizer makes of them is not."""
    t = mt.Trainer(
        lambda p, b, key: mt.mean(b * p),
        mt.ones((), dtype=mt.float32),
        mt.optim.sgd(lambda step: 10.0 ** (33 * step)),
        np.full(8, 1e6, np.float32),
        batch=4,
        steps=6,
        directory=tmp_path,
        save_every=1,
    )
    with np.errstate(all="ignore"), pytest.raises(NON_FINITE, match="the parameters are not finite after step"):
        t.fit()
    manager = mt.CheckpointManager(tmp_path / "checkpoints")
    assert manager.steps()
    assert all(np.isfinite(np.asarray(mt.load(manager.path(s))["params"])) for s in manager.steps())


def test_snapshots_in_memory_hold_good_steps_alone(processes):
    """On worker processes; a rollback goes to the snapshot, which is newer than any checkpoint."""
    with mt.Mesh({"data": 2}, client=processes) as mesh:
        t = trainer((21,), mesh=mesh, on_nonfinite="rollback", snapshot_every=2, log_every=3, steps=7)
        result = quietly(t)
        assert (result.step, result.history[-1]["rollbacks"]) == (7, 1)
        assert result.consumed == 4 * 9
        assert all(np.isfinite(x).all() for x in leaves(t.params))


def test_a_sparse_table_is_left_alone_by_a_step_that_is_not_finite():
    table = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)

    def looked_up(p, batch, key):
        return mt.mean((mt.nn.embedding(batch["id"], p) * batch["by"][:, None]) ** 2)

    by = np.ones(12, np.float32)
    by[5] = np.inf
    t = mt.Trainer(
        looked_up,
        mt.asarray(table),
        mt.optim.lazy_adam(0.1),
        {"id": np.arange(12), "by": by},
        batch=4,
        steps=2,
        shuffle=False,
        on_nonfinite="skip",
    )
    quietly(t)
    moved = (np.asarray(t.params) != table).any(axis=1)
    assert moved[:4].all()
    assert not moved[4:].any()


def test_policies_are_checked():
    with pytest.raises(
        mt.errors.TrainingError, match="on_nonfinite must be one of raise, skip, rollback, got 'ignore'"
    ):
        trainer(on_nonfinite="ignore")
