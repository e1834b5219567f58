"""Pipelines: every schedule gives the loss and the gradients of the model on one rank."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.parallel.transforms.pipeline_schedules import schedule

WIDTH, BATCH = 3, 12


def stage(p, x):
    return mt.tanh(x @ p["w"] + p["b"])


def loss(shared, x, y):
    return mt.mean((x @ shared - y) ** 2)


def arrays(stages: int):
    rng = np.random.default_rng(0)
    params = {
        "w": mt.asarray(rng.normal(size=(stages, WIDTH, WIDTH))),
        "b": mt.asarray(rng.normal(size=(stages, WIDTH))),
    }
    return params, *(mt.asarray(rng.normal(size=s)) for s in ((WIDTH, 2), (BATCH, WIDTH), (BATCH, 2)))


def whole(params, shared, x, y):
    for i in range(params["w"].shape[0]):
        x = stage({k: v[i] for k, v in params.items()}, x)
    return loss(shared, x, y)


def check(f, params, shared, x, y, *, folded=lambda p: p) -> None:
    want, wanted = mt.value_and_grad(whole, (0, 1, 2))(params, shared, x, y)
    run = mt.value_and_grad(lambda p, s, x: f(folded(p), s, x, y), (0, 1, 2))
    got, grads = run(params, shared, x)
    np.testing.assert_allclose(float(got), float(want), 1e-12)
    np.testing.assert_allclose(float(f(folded(params), shared, x, y)), float(want), 1e-12)
    for path in (lambda g: g[0]["w"], lambda g: g[0]["b"], lambda g: g[1], lambda g: g[2]):
        np.testing.assert_allclose(np.asarray(path(grads)), np.asarray(path(wanted)), 1e-9, 1e-12)


@pytest.mark.parametrize("kind", ["fthenb", "1f1b", "zerobubble"])
@pytest.mark.parametrize(("ranks", "micros"), [(1, 3), (2, 4), (4, 2), (3, 6)])
def test_equals_the_model_on_one_rank(kind, ranks, micros):
    f = mt.pipeline(stage, loss, mt.Mesh({"pipe": ranks}), micros=micros, kind=kind)
    check(f, *arrays(ranks))


@pytest.mark.parametrize(("ranks", "chunks", "micros"), [(2, 2, 4), (3, 2, 3), (1, 3, 2)])
def test_interleaved(ranks, chunks, micros):
    f = mt.pipeline(stage, loss, mt.Mesh({"pipe": ranks}), micros=micros, kind="interleaved", chunks=chunks)

    def folded(p):
        return {k: mt.reshape(v, (chunks, ranks, *v.shape[1:])) for k, v in p.items()} if chunks > 1 else p

    check(f, *arrays(ranks * chunks), folded=folded)


def test_beside_data_parallelism_and_another_axis():
    mesh = mt.Mesh({"data": 2, "pipe": 2, "model": 1})
    check(mt.pipeline(stage, loss, mesh, data_axis="data", micros=3), *arrays(2))
    mesh = mt.Mesh({"pipe": 2, "model": 2})
    check(mt.pipeline(stage, loss, mesh, micros=3), *arrays(2))


def test_recomputed_stages():
    f = mt.pipeline(mt.checkpoint(stage), loss, mt.Mesh({"pipe": 2}), micros=4)
    check(f, *arrays(2))


def test_the_gradient_of_the_head_and_of_what_feeds_the_pipeline():
    """A model with an embedding before the pipeline and a head in the loss, trained a few steps: as on one rank."""
    rng = np.random.default_rng(1)
    table = mt.asarray(rng.normal(size=(7, WIDTH)))
    ids = mt.asarray(rng.integers(0, 7, BATCH))
    params, head, _, y = arrays(2)
    f = mt.pipeline(stage, loss, mt.Mesh({"pipe": 2}), micros=2)

    def trained(inner):
        state = (table, params, head)
        for _ in range(3):
            grads = mt.grad(lambda s: inner(s[1], s[2], s[0][ids], y))(state)
            state = mt.tree_map(lambda a, g: a - 0.1 * g, state, grads)
        return state

    for got, want in zip(mt.tree.flatten(trained(f))[0], mt.tree.flatten(trained(whole))[0], strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), 1e-9, 1e-12)


def test_parameters_stay_split_over_the_stages_and_other_axes():
    mesh = mt.Mesh({"pipe": 2, "model": 2})
    params, head, x, y = arrays(2)
    split = {"pipe": mt.Shard(0)}
    params = {
        "w": mt.distribute(params["w"], mesh, **split, model=mt.Shard(2)),
        "b": mt.distribute(params["b"], mesh, **split),
    }
    f = mt.pipeline(stage, loss, mesh, micros=3)
    check(f, params, head, x, y)
    grads = mt.grad(lambda p: f(p, head, x, y))(params)
    assert {n: g.sharding for n, g in grads.items()} == {n: p.sharding for n, p in params.items()}


def test_what_is_refused():
    mesh = mt.Mesh({"pipe": 2})
    params, head, x, y = arrays(2)
    with pytest.raises(errors.MeshError, match="no axis 'stages'"):
        mt.pipeline(stage, loss, mesh, axis="stages", micros=2)
    with pytest.raises(errors.MeshError, match="schedule is of 3 ranks"):
        mt.pipeline(stage, loss, mesh, kind=schedule("1f1b", 3, 2))
    with pytest.raises(TypeError, match="micros="):
        mt.pipeline(stage, loss, mesh)
    f = mt.pipeline(stage, loss, mesh, micros=5)
    with pytest.raises(errors.ShapeError, match="12 does not divide into 5"):
        f(params, head, x, y)
    f = mt.pipeline(stage, loss, mesh, micros=2)
    with pytest.raises(errors.ShapeError, match=r"params w of shape \(3, 3, 3\)"):
        f(arrays(3)[0], head, x, y)
    with pytest.raises(errors.MeshError, match=r"outside of mt\.compile"):
        mt.compile(lambda s: f(params, s, x, y))(head)
    with pytest.raises(errors.NonDifferentiableError, match="cannot be differentiated again"):
        mt.grad(lambda s: mt.sum(mt.grad(lambda s: f(params, s, x, y))(s)))(head)


@pytest.mark.parametrize("kind", ["1f1b", "zerobubble"])
def test_on_worker_processes(processes, kind):
    params, *rest = arrays(2)
    with mt.Mesh({"pipe": 2, "model": 1}, client=processes) as mesh:
        if kind == "zerobubble":
            params = mt.distribute(params, mesh, pipe=mt.Shard(0))
        check(mt.pipeline(stage, loss, mesh, micros=4, kind=kind), params, *rest)
