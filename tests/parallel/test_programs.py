"""Programs of ranks: what they move, in how many rounds, and that training on a mesh is training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core import tree as trees
from meshtape.parallel.execution.explain import program_text
from meshtape.parallel.partition.rank_program import Moves, RankProgram
from meshtape.parallel.resharding.plan import plan_reshard
from meshtape.parallel.sharding.placement import block_box

rng = np.random.default_rng(5)


def rank_program(fn: Any, *args: Any) -> RankProgram:
    """What every rank runs for ``fn(*args)``."""
    program = mt.compile(fn).program(*args)
    shardings = [x.sharding for x in trees.flatten(args)[0] if isinstance(x, mt.Array)]
    mesh = next(s.mesh for s in shardings if s is not None)
    return mesh.rank_program(program, shardings)


def rounds(program: RankProgram) -> int:
    """How often the ranks exchange messages in one run."""

    def sends(m: Any) -> bool:
        plan = plan_reshard(
            program.avals[m.source].shape, program.sizes, program.layouts[m.source], program.layouts[m.target]
        )
        return plan.bytes_received(1) > 0

    return sum(isinstance(s, Moves) and any(map(sends, s.moves)) for s in program.steps)


# ----- inner dimensions that are split --------------------------------------------------------------------------------

INNER = {
    "layer_norm": lambda x: mt.layer_norm(x, x.shape[-1]),
    "softmax": lambda x: mt.nn.softmax(x, axis=-1),
    "log_softmax": lambda x: mt.nn.log_softmax(x, axis=-1),
    "logsumexp": lambda x: mt.nn.logsumexp(x, axis=-1),
    "cross_entropy": lambda x: mt.nn.cross_entropy(x, mt.asarray(np.arange(x.shape[0]) % x.shape[-1])),
    "variance": lambda x: mt.var(x, axis=-1),
}


@pytest.mark.parametrize("width", [64, 61])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", INNER)
def test_functions_over_a_split_dimension_never_gather_it(name, ranks, width):
    """Numbers of rows move, forward and backward, not elements."""
    fn, rows = INNER[name], 3
    mesh, value = mt.Mesh({"model": ranks}), rng.normal(size=(rows, width))
    x = mt.distribute(value, mesh, model=mt.Shard(1))

    def both(x: mt.Array) -> Any:
        y, pull = mt.vjp(fn, x)
        return y, pull(mt.ones(y.shape))[0]

    program = rank_program(both, x)
    gathered = value.nbytes * (ranks - 1)
    assert program.moved_bytes() < gathered, program_text(program, mesh.names)
    statistic = rows * 8 * ranks * (ranks - 1)  # one number a row, from all to all
    assert program.moved_bytes() <= 6 * statistic
    y, g = mt.compile(both)(x)
    want, want_g = both(mt.asarray(value))
    np.testing.assert_allclose(y, want, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(g, want_g, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_a_mean_is_made_in_blocks():
    """What is broadcast to a split array is never whole on any rank; its operand is cut where it is split with it."""
    mesh = mt.Mesh({"a": 4})
    x = mt.distribute(rng.normal(size=(10, 6)), mesh, a=mt.Shard(0))
    row = mt.distribute(rng.normal(size=(10, 1)), mesh)
    for fn, args in (
        (lambda x: x - mt.grad(lambda x: mt.mean(mt.square(mt.mean(x, axis=0))))(x), (x,)),
        (lambda x, r: mt.broadcast_to(r, (10, 6)) * x, (x, row)),
    ):
        program = rank_program(fn, *args)
        largest = max(
            math.prod(block_box(program.layouts[v], (4,), a.shape, 0).shape) for v, a in program.avals.items()
        )
        assert largest <= 3 * 6, program_text(program, mesh.names)
        np.testing.assert_allclose(mt.compile(fn)(*args), fn(*(mt.asarray(np.asarray(a)) for a in args)), 1e-12)


# ----- reductions are late, and together ------------------------------------------------------------------------------


def test_gradients_of_many_parameters_are_reduced_in_one_round():
    mesh = mt.Mesh({"data": 4})
    x = mt.distribute(rng.normal(size=(8, 5)), mesh, data=mt.Shard(0))
    ws = [mt.distribute(rng.normal(size=(5, 5)), mesh) for _ in range(4)]

    def gradients(ws: Any, x: mt.Array) -> Any:
        def loss(ws: Any) -> mt.Array:
            h = x
            for w in ws:
                h = mt.tanh(h @ w)
            return mt.mean(mt.square(h))

        return mt.grad(loss)(ws)

    assert rounds(rank_program(gradients, ws, x)) == 1


def test_results_of_a_compiled_function_are_whole():
    """Whatever becomes pending in it, and where nothing happens to what came in pending."""
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.arange(6.0).reshape(3, 2), mesh, a=mt.Shard(0))
    pending = mt.sum(x, axis=0)
    assert pending.sharding.partial
    for fn, arg in [
        (lambda p: p, pending),
        (lambda p: 2.0 * p, pending),
        (lambda x: mt.sum(x, axis=0), x),
        (lambda p: mt.reshard(mt.reshard(p, a=mt.Replicate()), a=mt.Partial()), pending),
    ]:
        out = mt.compile(fn)(arg)
        assert not out.sharding.partial
        np.testing.assert_array_equal(out, np.asarray(fn(arg)))


def test_a_sum_is_reduced_after_what_is_linear_in_it():
    mesh = mt.Mesh({"model": 2})
    x, w = (mt.distribute(rng.normal(size=(4, 4)), mesh, model=mt.Shard(1 - i)) for i in range(2))
    program = rank_program(lambda x, w: mt.sum((x @ w) * 2.0, axis=0), x, w)
    assert rounds(program) == 1
    assert program.moved_bytes() == 2 * 4 * 8  # four numbers each way, not sixteen


def test_a_value_that_several_need_is_moved_once():
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(rng.normal(size=(4, 4)), mesh, data=mt.Shard(0))
    program = rank_program(lambda x: (x @ x.mT, mt.exp(x) @ x.mT), x)
    assert [len(s.moves) for s in program.steps if isinstance(s, Moves)] == [1]


# ----- training -------------------------------------------------------------------------------------------------------


def mlp_step(opt: Any) -> Any:
    def loss(params: Any, x: mt.Array, labels: mt.Array) -> mt.Array:
        h = mt.nn.gelu(mt.layer_norm(x, x.shape[-1], weight=params["g"]) @ params["w1"] + params["b1"])
        return mt.nn.cross_entropy(h @ params["w2"] + params["b2"], labels)

    def step(params: Any, state: Any, x: mt.Array, labels: mt.Array) -> Any:
        value, grads = mt.value_and_grad(loss)(params, x, labels)
        params, state = opt.update(params, grads, state)
        return params, state, value

    return step


LAYOUTS = {
    # mesh → placements of the batch, of w1's columns and w2's rows; and the rounds of messages of one step
    "data": ({"data": 3}, {"data": mt.Shard(0)}, None, 1),
    "data and model": ({"data": 2, "model": 2}, {"data": mt.Shard(0)}, "model", 3),
    "model": ({"data": 1, "model": 4}, {}, "model", 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_on_a_mesh_is_the_training_step(layout):
    sizes, batch, model, expected_rounds = LAYOUTS[layout]
    host = {
        "g": np.ones(6),
        "w1": rng.normal(size=(6, 8)),
        "b1": np.zeros(8),
        "w2": rng.normal(size=(8, 5)),
        "b2": np.zeros(5),
    }
    data = [(rng.normal(size=(10, 6)), rng.integers(0, 5, 10)) for _ in range(5)]
    opt = mt.optim.adamw(0.01)
    step = mt.compile(mlp_step(opt))
    mesh = mt.Mesh(sizes)
    split = {"w1": mt.Shard(1), "b1": mt.Shard(0), "w2": mt.Shard(0)}
    params = {n: mt.distribute(p, mesh, **({model: split[n]} if model and n in split else {})) for n, p in host.items()}
    state = opt.init(params)
    plain = {n: mt.asarray(p) for n, p in host.items()}
    plain_state, plain_step = opt.init(plain), mlp_step(opt)
    before = {n: p.sharding for n, p in params.items()}
    for x, labels in data:
        on_mesh = mt.distribute(x, mesh, **batch), mt.distribute(labels, mesh, **batch)
        params, state, value = step(params, state, *on_mesh)
        plain, plain_state, plain_value = plain_step(plain, plain_state, mt.asarray(x), mt.asarray(labels))
        np.testing.assert_allclose(value, plain_value, rtol=1e-10)
    for n, p in params.items():
        np.testing.assert_allclose(p, plain[n], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(state["square"][n], plain_state["square"][n], rtol=1e-8, atol=1e-14)
    # Parameters come out as they went in, so that the next step is the same program.
    assert {n: p.sharding for n, p in params.items()} == before
    assert step.signatures == 1
    program = rank_program(mlp_step(opt), params, state, *on_mesh)
    assert rounds(program) == expected_rounds


def test_values_are_freed_at_their_last_use():
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(np.ones(4), mesh, data=mt.Shard(0))
    program = rank_program(lambda x: mt.sum(mt.exp(mt.sin(x))), x)
    freed = [v for f in program.frees for v in f]
    assert len(freed) == len(set(freed))
    assert set(freed).isdisjoint(program.outputs)
    made = {v for s in program.steps for v in (s.outputs if not isinstance(s, Moves) else [m.target for m in s.moves])}
    assert made - set(program.outputs) <= set(freed)
