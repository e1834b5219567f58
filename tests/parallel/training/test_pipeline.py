"""A pipelined decoder equals the whole one, by every schedule, with tied embeddings; and holds what its schedule
says."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

de, tr = mt.models.decoder, mt.training
CONFIG = de.Config(vocab=40, width=16, layers=4, heads=2, max_length=16)


def micros(count=4, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        ids = rng.integers(0, 40, (2, 9))
        out.append({"ids": ids[:, :-1], "labels": ids[:, 1:].copy()})
    out[-1]["labels"][0, :4] = -100
    return out


def whole(config=CONFIG, count=4):
    params = de.init(mt.random.key(0), config)

    def loss(p):
        found = [de.loss(p, mt.tree.tree_map(mt.asarray, m), config) for m in micros(count)]
        return sum(t for t, _ in found), sum(float(w) for _, w in found)

    return params, mt.value_and_grad(loss, has_aux=True)(params)


def check(pipe, stages, config=CONFIG, count=4):
    params, ((total, weight), grads) = whole(config, count)
    parts, tied = de.split_stages(params, config, stages)
    sums, found = pipe(tied).value_and_grad(pipe(tied).place(parts), micros(count))
    assert abs(float(sums["loss"]) - float(total)) < 1e-4
    assert float(sums["weight"]) == weight
    joined = {"embed": found[0]["embed"], "layers": [x for f in found for x in f["layers"]], "norm": found[-1]["norm"]}
    if not config.tied:
        joined["head"] = found[-1]["head"]
    for (path, a), b in zip(mt.tree.flatten_with_path(grads), mt.tree.flatten(joined)[0], strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=2e-5, err_msg=str(path))
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["fthenb", "1f1b", "zerobubble"])
def test_every_schedule_gives_the_loss_and_gradients_of_the_whole_model(kind, tied):
    config = de.Config(vocab=40, width=16, layers=4, heads=2, max_length=16, tied=tied)
    made = {}

    def pipe(tied_parts):
        return made.setdefault(0, tr.Pipeline(de.stages(config, 2), mt.Mesh({"pipe": 2}), kind=kind, tied=tied_parts))

    found = check(pipe, 2, config)
    if tied:
        np.testing.assert_array_equal(np.asarray(found[0]["embed"]), np.asarray(found[1]["embed"]))
    assert made[0].peak == made[0].schedule(4).simulate().peak


def test_interleaved_chunks_and_a_product_with_data_and_tensor_axes():
    made = {}

    def interleaved(tied):
        mesh = mt.Mesh({"pipe": 2})
        return made.setdefault(0, tr.Pipeline(de.stages(CONFIG, 4), mesh, kind="interleaved", chunks=2, tied=tied))

    check(interleaved, 4)
    assert made[0].peak == made[0].schedule(4).simulate().peak

    def product(tied):
        plan, mesh = de.plan("dp+tp"), mt.Mesh({"pipe": 2, "data": 2, "model": 2})
        return made.setdefault(1, tr.Pipeline(de.stages(CONFIG, 2, plan=plan), mesh, plan=plan, tied=tied))

    check(product, 2)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_any_number_of_micro_batches(count):
    made = {}

    def pipe(tied):
        return made.setdefault(0, tr.Pipeline(de.stages(CONFIG, 4), mt.Mesh({"pipe": 4}), tied=tied))

    check(pipe, 4, count=count)
    assert made[0].peak == tuple(min(count, 4 - s) for s in range(4))


def test_steps_on_real_workers_equal_those_of_one_rank(processes):
    params = de.init(mt.random.key(0), CONFIG)
    optimizer = mt.optim.adamw(1e-2)
    state, single = optimizer.init(params), []
    for step in range(3):

        def loss(p, step=step):
            found = [de.loss(p, mt.tree.tree_map(mt.asarray, m), CONFIG) for m in micros(seed=step)]
            return sum(t for t, _ in found) / sum(w for _, w in found)

        value, grads = mt.value_and_grad(loss)(params)
        params, state = optimizer.update(params, grads, state)
        single.append(float(value))
    parts, tied = de.split_stages(de.init(mt.random.key(0), CONFIG), CONFIG, 2)
    with mt.Mesh({"pipe": 2}, client=processes) as mesh:
        pipe = tr.Pipeline(de.stages(CONFIG, 2), mesh, tied=tied)
        init, step_fn = pipe.optimizer(optimizer)
        held = pipe.place(parts)
        states, losses = init(held), []
        for step in range(3):
            held, states, value = step_fn(held, states, micros(seed=step))
            losses.append(float(value))
        embeds = [np.asarray(held[i]["embed"]) for i in (0, 1)]
    np.testing.assert_allclose(losses, single, rtol=2e-5)
    np.testing.assert_array_equal(*embeds)  # tied parameters stay one


def test_what_does_not_fit_is_refused():
    with pytest.raises(mt.errors.TrainingError, match="3 stages for 2 ranks"):
        tr.Pipeline(de.stages(CONFIG, 3), mt.Mesh({"pipe": 2}))
    with pytest.raises(mt.errors.MeshError, match="no axis 'pipe'"):
        tr.Pipeline(de.stages(CONFIG, 2), mt.Mesh({"data": 2}))
    with pytest.raises(mt.errors.ShapeError, match="cannot be cut into 5"):
        de.stages(CONFIG, 5)
    with pytest.raises(ValueError, match="micro-batches"):
        tr.Pipeline(de.stages(CONFIG, 2), mt.Mesh({"pipe": 2})).value_and_grad([{}, {}], [])
