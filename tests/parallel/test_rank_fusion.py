"""Elementwise chains of rank programs: the bits of the same calls made one by one, in the memory that is there, with
errors that name the call."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors
from meshtape.arrays.backends.memory_pool import POOL
from meshtape.arrays.core import tree as trees
from meshtape.autodiff.compiler import fusion
from meshtape.parallel.execution import executor
from meshtape.parallel.execution.explain import program_text
from meshtape.parallel.execution.fusion import Chain, PreparedChain, fused
from meshtape.parallel.partition.rank_program import LocalCall, Moves, RankProgram

RNG = np.random.default_rng(3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of arrays of any size, in blocks so small that every array has many."""
    monkeypatch.setattr(fusion, "SMALLEST", 1)
    monkeypatch.setattr(fusion, "SMALLEST_RUN", 1)
    monkeypatch.setattr(fusion, "BLOCK", 7)


def rank_program(fn: Any, *args: Any) -> RankProgram:
    program = mt.compile(fn).program(*args)
    inputs = [x for x in trees.flatten(args)[0] if isinstance(x, mt.Array)]
    mesh = next(x.sharding.mesh for x in inputs if x.sharding is not None)
    return mesh.rank_program(program, [x.sharding for x in inputs])


def doings(program: RankProgram) -> list[Any]:
    return fused(program, list(zip(program.steps, program.frees, strict=True)))


UNARY = (mt.exp, mt.negative, mt.square, mt.nn.sigmoid, lambda x: x * 0.5 + 1.0, lambda x: (x > 0).astype(x.dtype))
BINARY = (mt.add, mt.multiply, mt.maximum, lambda x, y: x / (mt.square(y) + 0.5), lambda x, y: mt.where(x > y, x, y))


@pytest.mark.usefixtures("small")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chains_have_the_bits_of_single_calls(data: st.DataObject) -> None:
    """On any mesh, for ragged and empty blocks, with operands that repeat, sums that are pending, and reductions in
    between."""
    draw = data.draw
    mesh = mt.Mesh({"a": draw(st.integers(1, 3)), "b": draw(st.integers(1, 2))})
    shape = draw(st.tuples(st.integers(1, 7), st.integers(1, 5)))

    def placed(shape: tuple[int, ...]) -> mt.Array:
        value = RNG.standard_normal(shape).astype(np.float32)
        free = list(range(len(shape)))
        axes = {}
        for axis in "ab":
            if free and draw(st.booleans()):
                axes[axis] = mt.Shard(free.pop(draw(st.integers(0, len(free) - 1))))
        return mt.distribute(value, mesh, **axes)

    xs = [placed(shape), placed(shape), placed(shape[1:]), placed((shape[0], 1))]
    recipe = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=9))

    def fn(*xs: mt.Array) -> list[mt.Array]:
        values = [*xs[:2], xs[0] * xs[2], xs[1] + xs[3]]
        for kind, i, j in recipe:
            x, y = values[i % len(values)], values[j % len(values)]
            if kind == 12:  # a sum along what may be split, which comes back in every element
                values.append(x - mt.mean(y, axis=0, keepdims=True))
            elif kind == 11:  # a sum that stays pending through what is linear in it
                values.append((y.mT @ x) @ mt.ones((shape[1], 1), dtype=x.dtype) * 2.0 + 0.0 * mt.sum(x))
                values[-1] = x * mt.sum(values[-1])
            else:
                values.append(UNARY[kind](x) if kind < 6 else BINARY[kind - 6](x, y))
        return values[-3:]

    with np.errstate(all="ignore"):
        found = [np.asarray(x) for x in mt.compile(fn)(*xs)]
        together, executor.fused = executor.fused, lambda program, doings, **_: doings
        try:
            wanted = [np.asarray(x) for x in mt.compile(fn)(*xs)]
        finally:
            executor.fused = together
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(f, w)


def test_a_chain_is_one_step_and_its_values_are_never_whole() -> None:
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(np.ones((700, 300), np.float32), mesh, data=mt.Shard(0))
    b = mt.distribute(np.ones(300, np.float32), mesh)
    program = rank_program(lambda x, b: mt.sum(mt.tanh(x * 2.0 + b) - x, axis=0), x, b)
    (chain, frees), *rest = doings(program)
    assert isinstance(chain, Chain)
    assert [c.op.name for c in chain.calls] == ["multiply", "add", "tanh", "subtract"]
    assert len(chain.group.outputs) == 1
    assert set(frees) == set(program.inputs)
    assert [type(s) for s, _ in rest] == [LocalCall, Moves]
    text = program_text(program, ("data",))
    assert [line[0] for line in text.splitlines()[1:]] == ["╭", "│", "│", "╰", " ", " ", " "]


@pytest.mark.usefixtures("small")
def test_blocks_that_are_alike_on_one_rank_alone_are_not_joined() -> None:
    """Of 7 rows over two ranks the first has 4, as of 8; the second has 3, and 4."""
    mesh = mt.Mesh({"a": 2})
    x, y = (mt.distribute(np.ones((n, 3)), mesh, a=mt.Shard(0)) for n in (7, 8))
    program = rank_program(lambda x, y: (x * 2.0 + 1.0, y * 2.0 + 1.0), x, y)
    assert [len(s.calls) for s, _ in doings(program)] == [2, 2]


@pytest.mark.usefixtures("small")
def test_leaves_of_a_tree_are_chains_of_their_own() -> None:
    mesh = mt.Mesh({"a": 2})
    ps, gs = ([mt.distribute(np.full((6, 4), i + 1.0), mesh) for i in range(3)] for _ in range(2))
    opt = mt.optim.adamw(0.1)

    def step(ps: Any, gs: Any, state: Any) -> Any:
        gs, norm = mt.optim.clip_by_global_norm(gs, 1.0)
        return *opt.update(ps, gs, state), norm

    state = opt.init(ps)
    chains = [s for s, _ in doings(rank_program(step, ps, gs, state)) if isinstance(s, Chain)]
    updates = [c for c in chains if "sqrt" in {x.op.name for x in c.calls} and c.group.shape]
    assert [len(c.group.outputs) for c in updates] == [3, 3, 3]
    got = mt.compile(step)(ps, gs, state)
    local = [trees.tree_map(lambda x: mt.asarray(np.asarray(x)), t) for t in (ps, gs, state)]
    for g, w in zip(trees.flatten(got)[0], trees.flatten(step(*local))[0], strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-12)


def test_results_take_the_memory_of_operands_that_nobody_sees() -> None:
    mesh = mt.Mesh({"a": 1})
    host = RNG.standard_normal((512, 256))
    x = mt.distribute(host, mesh)
    chain = mt.compile(lambda x, w: mt.exp(x @ w) * 2.0 + 1.0)
    w = mt.distribute(np.eye(256), mesh)
    seen: list[bool] = []
    compute = PreparedChain.run

    def watched(self: PreparedChain, values: dict[int, Any], rank: int, failure: Any) -> None:
        before = {a.__array_interface__["data"][0] for a in values.values()}
        compute(self, values, rank, failure)
        seen.append(values[self.outputs[0]].__array_interface__["data"][0] in before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedChain, "run", watched)
        y = np.asarray(chain(x, w))
    np.testing.assert_array_equal(y, np.exp(host @ np.eye(256)) * 2.0 + 1.0)
    assert seen == [True]
    # An argument is never written to, and what a chain makes of it comes from the pool.
    z = mt.compute(mt.compile(lambda x: x * 2.0 + 1.0)(x))
    np.testing.assert_array_equal(np.asarray(x), host)
    block = z._buf.handle.blocks[0]
    assert any(np.may_share_memory(raw, block) for _, (raw, _) in POOL._lent.values())


def test_an_output_takes_only_what_is_not_read_after_it() -> None:
    program = mt.compile(lambda x, y: ((a := x * 2.0) + 1.0, a * y - x)).program(*[mt.ones(100_000)] * 2)
    (group,) = fusion.chains(program)
    x, y = program.inputs
    first, second = ([group.inputs[k] for k in ks] for ks in fusion.takers(group))
    assert (first, sorted(second)) == ([], sorted([x, y]))


@pytest.mark.parametrize("other", [mt.exp, mt.abs, lambda x: x], ids=["exp", "abs", "one run in C"])
def test_an_error_names_the_call_and_its_line(other: Any) -> None:
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(-np.ones((600, 300)), mesh, a=mt.Shard(0))
    fn = mt.compile(lambda x: mt.sqrt(x * 2.0) - other(x))
    with (
        np.errstate(invalid="raise"),
        pytest.raises(errors.RankLost, match=r"rank 0 failed in (multiply, )?sqrt(, subtract)?, called at ") as e,
    ):
        np.asarray(fn(x))
    assert re.search(rf"{re.escape(__file__)}:\d+", str(e.value))
    assert isinstance(e.value.__cause__, FloatingPointError)


def test_training_on_worker_processes_is_training_here(processes: Any) -> None:
    """Chains large enough to be made, gradients that are reduced beside them."""
    width = 320

    def loss(p: Any, b: Any, key: Any) -> Any:
        return mt.mean(mt.square(mt.nn.silu(b["x"] @ p["u"]) @ p["w"] - b["x"]))

    params = {k: (RNG.standard_normal((width, width)) * 0.05).astype(np.float32) for k in "uw"}
    data = {"x": RNG.standard_normal((32, width)).astype(np.float32)}

    def losses(mesh: Any) -> list[float]:
        trainer = mt.Trainer(loss, params, mt.optim.adamw(1e-2), data, batch=32, steps=1, mesh=mesh, clip=1.0)
        trainer.session.start(trainer.init)
        batch = next(iter(trainer.session.loader.batches(0)))
        return [float(trainer.session.step(batch)["loss"]) for _ in range(4)]

    with mt.Mesh({"data": 2}, client=processes) as mesh:
        found = losses(mesh)
    np.testing.assert_allclose(found, losses(None), rtol=1e-5)
    assert found[-1] < found[0]
