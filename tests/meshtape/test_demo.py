"""The main job: its parts against the unsharded run, and as a command."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape import demo
from meshtape.parallel.dask.cluster import local_cluster


@pytest.fixture(scope="module")
def digits() -> demo.Digits:
    return demo.load_digits()


def start(mesh: mt.Mesh | None) -> dict:
    params = demo.init(mt.random.key(0), 64)
    state = {"params": params, "optimizer": demo.optimizer.init(params)}
    if mesh is None:
        return state
    return demo.PLAN.distribute(state, mesh)


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"model": 3}, {"data": 3}], ids=str)
def test_training_on_a_mesh_equals_training_without(axes: dict[str, int], digits: demo.Digits) -> None:
    mesh = mt.Mesh(axes)
    plain, split = start(None), start(mesh)
    step = mt.compile(demo.train_step)
    rows = {"data": mt.Shard(0)} if "data" in axes else {}
    for i in range(3):
        x, y = digits.batch(0, i)
        plain, expected = step(plain, mt.asarray(x), mt.asarray(y))
        split, found = step(split, mt.distribute(x, mesh, **rows), mt.distribute(y, mesh, **rows))
        np.testing.assert_allclose(float(found["loss"]), float(expected["loss"]), rtol=1e-5)
        assert float(found["accuracy"]) == pytest.approx(float(expected["accuracy"]))
    for (path, a), (_, b) in zip(mt.tree.flatten_with_path(split), mt.tree.flatten_with_path(plain), strict=True):
        # Adam divides by the root of tiny second moments: rounding of the sums is what may differ.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-5, err_msg=str(path))
        assert a.sharding == demo.PLAN.sharding(path, a.shape, mesh), path
    assert step.signatures == 2


def test_a_step_costs_one_message_a_worker(digits: demo.Digits, runs: Callable[[Any], Any]) -> None:
    with local_cluster(2, processes=False) as client, mt.Mesh({"data": 2, "model": 2}, client=client) as mesh:
        step, state = mt.compile(demo.train_step), start(mesh)
        batches = [[mt.distribute(a, mesh, data=mt.Shard(0)) for a in digits.batch(0, i)] for i in range(6)]
        state, seen = step(state, *batches[0])
        mt.compute(state, seen)
        with runs(client) as done:
            for batch in batches[1:]:
                state, seen = step(state, *batch)
            mt.compute(state, seen)  # every rank's part of the last step, not only the one that holds the loss
            loss = float(seen["loss"])
        assert len(step.program(state, *batches[0]).entries) > 90
        assert done == ["train_step"] * 5 * 2
        assert np.isfinite(loss)


def test_batches_are_a_function_of_seed_and_step(digits: demo.Digits) -> None:
    again = demo.load_digits()
    for step in (0, digits.steps_per_epoch, 5 * digits.steps_per_epoch + 3):
        for a, b in zip(digits.batch(3, step), again.batch(3, step), strict=True):
            np.testing.assert_array_equal(a, b)
    seen = np.concatenate([digits.batch(0, i)[0] for i in range(digits.steps_per_epoch)])
    assert len(np.unique(seen, axis=0)) > 0.95 * len(seen), "an epoch visits every image once"


def test_the_demo_command_succeeds_and_leaves_what_it_says(demo_run: Any) -> None:
    for text in ("test accuracy", "✓", "steps per second", "while resharding", "Try next", "meshtape ls"):
        assert text in demo_run.printed
    assert "✗" not in demo_run.printed
    (run,) = (demo_run.folder / "first-run").iterdir()
    assert len(list((run / "checkpoints").glob("step-*"))) == 2, "the last two are kept"
    assert mt.open_checkpoint(run / "model" / "model.safetensors")["params.w1"].shape == (64, demo.HIDDEN)


@pytest.mark.parametrize("missing", ["sklearn", "safetensors"])
def test_a_missing_package_is_said_before_anything_starts(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(mt.errors.BackendError, match=rf"{missing}.*pip install"):
        demo.run(directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_does_not_hold_fails() -> None:
    report = demo.Report()
    report.add("a fact", "1")
    report.check("test accuracy", True, "0.97")
    report.judge()
    report.check("test accuracy", False, "0.5")
    with pytest.raises(demo.DemoFailed, match=r"test accuracy: 0\.5$"):
        report.judge()


@pytest.mark.slow
def test_a_run_whose_result_is_too_bad_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WANTED_ACCURACY", 1.1)
    with pytest.raises(demo.DemoFailed, match="accuracy"):
        demo.run(directory=tmp_path, epochs=1)
