"""Per-rank code: what each collective computes, its derivative, and what is refused before anything runs."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors

ROWS, COLS = {"a": mt.Shard(0)}, {"a": mt.Shard(1)}
bounded = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-32, 33, shape) / 16


# ----- against the same on whole arrays -------------------------------------------------------------------------------


class Case(NamedTuple):
    """Per-rank code, and what it amounts to on whole arrays, on a mesh whose axis ``a`` has ``n`` ranks."""

    fn: Callable[..., Any]
    ins: Any
    outs: Any
    whole: Callable[..., Any]  # (n, *arrays)
    shapes: tuple[tuple[int, ...], ...]


def mlp(x, w1, w2):
    return mt.all_reduce(mt.tanh(x @ w1) @ w2, "a")


def row_block_sums(n: int, x: Any, parts: int) -> Any:
    """Sum of the row blocks of ``x``, each of ``len(x) // n`` rows."""
    return mt.sum(mt.reshape(x, (n, parts, *x.shape[1:])), axis=0)


EVEN: dict[str, Case] = {
    "columns, then rows": Case(mlp, ({}, COLS, ROWS), {}, lambda n, x, a, b: mt.tanh(x @ a) @ b, ((3, 4), (4, 12), (12, 2))),
    "data": Case(
        lambda x, w: mt.all_reduce(mt.sum(mt.square(x @ w)), "a", op="mean"),
        (ROWS, {}),
        {},
        lambda n, x, w: mt.sum(mt.square(x @ w)) / n,
        ((12, 3), (3, 2)),
    ),
    "gathered parameters": Case(
        lambda x, w: mt.tanh(x @ mt.all_gather(w, "a")),
        (ROWS, ROWS),
        ROWS,
        lambda n, x, w: mt.tanh(x @ w),
        ((12, 12), (12, 3)),
    ),
    "gathered, used by all and by each": Case(
        lambda x, w: x * mt.sum(mt.all_gather(w, "a") ** 2) + mt.sum(mt.all_gather(w, "a"), axis=0),
        (ROWS, ROWS),
        ROWS,
        lambda n, x, w: x * mt.sum(w**2) + mt.sum(w, axis=0),
        ((12, 3), (12, 3)),
    ),
    "reduce_scatter": Case(
        lambda x: mt.reduce_scatter(mt.sin(x), "a"),
        (COLS,),
        ROWS,
        lambda n, x: mt.sum(mt.reshape(mt.sin(x), (12, n, 12 // n)), axis=1),
        ((12, 12),),
    ),
    "all_to_all": Case(
        lambda x: mt.sin(mt.all_to_all(x, "a", split_dim=1, concat_dim=0)), (ROWS,), COLS, lambda n, x: mt.sin(x), ((12, 24),)
    ),
    "ring": Case(
        lambda x: x * mt.permute(x, "a", shift=1), (ROWS,), ROWS, lambda n, x: x * mt.roll(x, 12 // n, axis=0), ((12, 3),)
    ),
    "broadcast": Case(
        lambda x: x * mt.broadcast(x, "a", source=0), (ROWS,), ROWS,
        lambda n, x: mt.reshape(mt.reshape(x, (n, 12 // n, 3)) * x[: 12 // n], (12, 3)), ((12, 3),),
    ),
    "max over ranks, with ties": Case(
        lambda x: mt.all_reduce(mt.max(mt.round(x), axis=0), "a", op="max") + 0 * mt.all_reduce(x, "a")[0],
        (ROWS,),
        {},
        lambda n, x: mt.max(mt.round(x), axis=0) + 0 * mt.sum(x, axis=0),
        ((12, 3),),
    ),
    "product over ranks": Case(
        lambda x: mt.all_reduce(mt.prod(x, axis=0), "a", op="prod"), (ROWS,), {}, lambda n, x: mt.prod(x, axis=0), ((12, 2),)
    ),
    "own place": Case(
        lambda x: x * (1 + mt.axis_index("a")), (ROWS,), ROWS,
        lambda n, x: x * (1 + mt.asarray(np.repeat(np.arange(n), 12 // n))[:, None]), ((12, 2),),
    ),
    "same and different together": Case(
        lambda x, w: mt.tanh(w) * x + mt.all_reduce(x * w, "a") * mt.sum(w),
        (ROWS, {}),
        ROWS,
        lambda n, x, w: mt.tanh(w) * x
        + mt.reshape(mt.broadcast_to(row_block_sums(n, x * w, 12 // n), (n, 12 // n, 2)), (12, 2)) * mt.sum(w),
        ((12, 2), (2,)),
    ),
    "left pending": Case(
        lambda x: mt.sum(x * x, axis=0), (ROWS,), {"a": mt.Partial()}, lambda n, x: mt.sum(x * x, axis=0), ((12, 2),)
    ),
    "recomputed": Case(
        lambda x, w: mt.all_reduce(mt.checkpoint(lambda y: mt.sin(mt.exp(y @ w)))(x / 4).sum(), "a"),
        (ROWS, {}),
        {},
        lambda n, x, w: mt.sum(mt.sin(mt.exp(x / 4 @ w))),
        ((12, 2), (2, 2)),
    ),
    "compiled inside": Case(
        lambda x: mt.compile(lambda y: mt.all_reduce(mt.tanh(y), "a"))(x), (ROWS,), {},
        lambda n, x: row_block_sums(n, mt.tanh(x), 12 // n), ((12, 2),),
    ),
    "twice": Case(
        lambda x: mt.all_reduce(mt.all_reduce(x, "a") * x, "a"), (ROWS,), {},
        lambda n, x: row_block_sums(n, x, 12 // n) ** 2, ((12, 2),),
    ),
}  # fmt: skip


def both(case: Case, n: int, mesh: mt.Mesh, *, compiled: bool) -> None:
    """Values and gradients, to the second order, are those on whole arrays."""
    values = [mt.asarray(numbers(*s, seed=i)) for i, s in enumerate(case.shapes)]
    mapped = mt.shard_map(case.fn, mesh, case.ins, case.outs)
    wrap = mt.compile if compiled else lambda f: f

    def whole(*xs: Any) -> Any:
        return case.whole(n, *xs)

    want = whole(*values)
    np.testing.assert_allclose(np.asarray(wrap(mapped)(*values)), np.asarray(want), 1e-9, 1e-9)
    seed = mt.asarray(numbers(*want.shape, seed=9))

    def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *xs: mt.vjp(f, *xs)[1](seed)

    for got, expected in zip(wrap(gradients(mapped))(*values), gradients(whole)(*values), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), 1e-9, 1e-9)

    def second(f: Callable[..., Any]) -> Callable[..., Any]:
        return mt.grad(lambda x, *rest: sum(mt.sum(mt.sin(g)) for g in gradients(f)(x, *rest)))

    got, expected = wrap(second(mapped))(*values), second(whole)(*values)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), 1e-8, 1e-8)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", EVEN)
def test_equals_the_same_on_whole_arrays(name, n, compiled):
    both(EVEN[name], n, mt.Mesh({"a": n}), compiled=compiled)


@pytest.mark.parametrize("name", ["columns, then rows", "data", "gathered parameters", "all_to_all", "ring", "twice"])
def test_beside_other_axes(name):
    """Ranks along axes that the code does not speak of do the same."""
    both(EVEN[name], 2, mt.Mesh({"b": 3, "a": 2, "c": 1}), compiled=False)


def test_every_axis_of_a_mesh():
    """Batch over one axis, model over the other; a reduction over both at once."""
    mesh = mt.Mesh({"data": 2, "model": 3})
    x, w = mt.asarray(numbers(4, 6)), mt.asarray(numbers(6, 5, seed=1))

    def fn(x, w):
        y = mt.all_reduce(x @ w, "model")
        return mt.all_reduce(mt.sum(mt.tanh(y)), "data"), mt.all_reduce(mt.sum(x), ("data", "model"))

    f = mt.shard_map(fn, mesh, ({"data": mt.Shard(0), "model": mt.Shard(1)}, {"model": mt.Shard(0)}), {})
    loss, total = f(x, w)
    np.testing.assert_allclose(float(loss), float(mt.sum(mt.tanh(x @ w))))
    np.testing.assert_allclose(float(total), float(mt.sum(x)))
    got = mt.grad(lambda x, w: f(x, w)[0] * f(x, w)[1], (0, 1))(x, w)
    want = mt.grad(lambda x, w: mt.sum(mt.tanh(x @ w)) * mt.sum(x), (0, 1))(x, w)
    for g, e in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(e), 1e-9)


def test_groups_of_several_axes_are_in_the_order_named():
    mesh = mt.Mesh({"a": 2, "b": 3})
    x = mt.arange(6)
    for axes in (("a", "b"), ("b", "a")):
        placements = {n: mt.Shard(0) for n in axes}
        f = mt.shard_map(lambda x, axes=axes: mt.all_gather(x, axes), mesh, (placements,), {})
        np.testing.assert_array_equal(np.asarray(f(x)), np.arange(6))


# ----- gradients inside -----------------------------------------------------------------------------------------------


def test_gradient_inside_of_what_is_replicated_is_reduced():
    mesh = mt.Mesh({"a": 2})
    x, w = mt.asarray(numbers(4, 3)), mt.asarray(numbers(3))

    def step(x, w):
        return mt.grad(lambda w: mt.all_reduce(mt.sum(mt.tanh(x @ w)), "a"))(w)

    got = mt.shard_map(step, mesh, (ROWS, {}), {})(x, w)
    np.testing.assert_allclose(np.asarray(got), np.asarray(mt.grad(lambda w: mt.sum(mt.tanh(x @ w)))(w)), 1e-12)


def test_gradient_inside_of_what_varies_is_its_own():
    mesh = mt.Mesh({"a": 2})
    x = mt.asarray(numbers(4, 3))
    inside = mt.shard_map(mt.grad(lambda x: mt.all_reduce(mt.sum(mt.tanh(x)), "a")), mesh, (ROWS,), ROWS)(x)
    np.testing.assert_allclose(np.asarray(inside), np.asarray(mt.grad(lambda x: mt.sum(mt.tanh(x)))(x)), 1e-12)


def test_reducing_twice_is_an_error():
    mesh = mt.Mesh({"a": 2})

    def step(x, w):
        g = mt.grad(lambda w: mt.sum(x * w))(w)
        return mt.all_reduce(g, "a")

    with pytest.raises(errors.MeshError, match="same on all ranks of 'a' already"):
        mt.shard_map(step, mesh, (ROWS, {}), {})(mt.ones(4), mt.asarray(2.0))


def test_forgetting_to_reduce_is_an_error():
    def total(x):
        return mt.sum(x)

    mesh, what = mt.Mesh({"a": 2}), r"result 0 of total is to be Replicate\(\) along 'a'.*all_reduce"
    with pytest.raises(errors.ShardingConflict, match=what):
        mt.shard_map(total, mesh, (ROWS,), {})(mt.ones(4))


def test_gradient_of_what_is_read_from_around():
    mesh = mt.Mesh({"a": 2})
    x = mt.asarray(numbers(4, 3))

    def loss(w):
        double = w * 2
        f = mt.shard_map(lambda x: mt.all_reduce(mt.sum(mt.tanh(x * w + double)), "a"), mesh, (ROWS,), {})
        return f(x)

    w = mt.asarray(numbers(3, seed=2))
    want = mt.grad(lambda w: mt.sum(mt.tanh(x * 3 * w - x * 3 * w + x * w + 2 * w)))(w)
    np.testing.assert_allclose(np.asarray(mt.grad(loss)(w)), np.asarray(want), 1e-9)
    np.testing.assert_allclose(np.asarray(mt.compile(mt.grad(loss))(w)), np.asarray(want), 1e-9)


def test_what_is_computed_inside_from_around_is_computed_each_time():
    mesh = mt.Mesh({"a": 2})
    w = mt.asarray([1.0, 2.0])
    f = mt.shard_map(lambda x: x + 2 * w, mesh, (ROWS,), ROWS)
    x = mt.zeros((2, 2))
    assert np.asarray(f(x)).tolist() == [[2, 4], [2, 4]]
    with mt.Tape() as tape:
        tape.watch(w)
        y = f(x).sum()
    assert np.asarray(tape.gradient(y, w)).tolist() == [4, 4]


def test_the_reduction_of_a_gradient_waits():
    """Gradients of replicated arguments leave the code pending, so that they are reduced late and together."""
    mesh = mt.Mesh({"a": 2})
    x, w = mt.asarray(numbers(4, 3)), mt.asarray(numbers(3))
    f = mt.shard_map(lambda x, u, v: mt.all_reduce(mt.sum(mt.tanh(x * u) * v), "a"), mesh, (ROWS, {}, {}), {})
    x = mt.distribute(x, mesh, a=mt.Shard(0))
    text = mt.explain(mt.grad(lambda u, v: f(x, u, v), (0, 1)), mt.distribute(w, mesh), mt.distribute(w, mesh))
    reductions = [line for line in text.splitlines() if "all_reduce" in line]
    assert len(reductions) == 2, text
    assert [line.strip()[0] for line in reductions] == ["┌", "└"], text


def test_custom_derivative_inside():
    @mt.custom_vjp
    def halved(x):
        return x * x

    halved.defvjp(lambda x: (x * x, x), lambda x, g: (g * x,))
    mesh = mt.Mesh({"a": 2})
    f = mt.shard_map(lambda x: mt.all_reduce(mt.sum(halved(x)), "a"), mesh, (ROWS,), {})
    x = mt.asarray([1.0, 2.0, 3.0, 4.0])
    assert np.asarray(mt.grad(f)(x)).tolist() == [1, 2, 3, 4]


# ----- sizes of parts -------------------------------------------------------------------------------------------------

SPLITS = [[1, 2, 0], [0, 1, 2], [2, 0, 1]]


def test_asymmetric_all_to_all():
    """What rank i sends to rank j arrives there, in the order of the senders; nothing is sent where it says 0."""
    mesh = mt.Mesh({"a": 3})
    x = mt.asarray(numbers(9))
    f = mt.shard_map(lambda x: mt.all_to_all(x, "a", split_sizes=SPLITS), mesh, (ROWS,), ROWS)
    np.testing.assert_array_equal(np.asarray(f(x)), np.asarray(x)[[0, 6, 7, 1, 2, 3, 4, 5, 8]])
    weight = mt.asarray(numbers(9, seed=1))
    got = mt.grad(lambda x: mt.sum(mt.sin(f(x)) * weight))(x)
    want = mt.grad(lambda x: mt.sum(mt.sin(x[mt.asarray([0, 6, 7, 1, 2, 3, 4, 5, 8])]) * weight))(x)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want))


def test_split_sizes_are_keyword_only():
    mesh = mt.Mesh({"a": 2})
    with pytest.raises(TypeError):
        mt.shard_map(lambda x: mt.all_to_all(x, "a", [1, 1]), mesh, (ROWS,), ROWS)(mt.ones(4))
    for sizes, what in (([1, 2], r"parts \[1, 2\] of a dimension of length 2"), ([2, 0], r"would get parts \[2, 2\]")):
        with pytest.raises(errors.ShapeError, match=what):
            mt.shard_map(lambda x, s=sizes: mt.all_to_all(x, "a", split_sizes=s), mesh, (ROWS,), ROWS)(mt.ones(4))


def test_ranks_that_bring_nothing():
    """Every collective ends, with the right shapes, where blocks are empty."""
    mesh = mt.Mesh({"a": 3})

    def fn(x):
        back = mt.all_to_all(x, "a")
        scattered = mt.reduce_scatter(mt.ones((0, 6)) * mt.sum(x), "a", dim=1)
        return (
            mt.all_gather(x, "a"),
            mt.all_gather(back, "a"),
            mt.all_reduce(mt.sum(x), "a"),
            mt.all_gather(scattered, "a", dim=1),
        )

    f = mt.shard_map(fn, mesh, (ROWS,), {})
    x = mt.zeros((0, 4))
    assert [(y.shape, y.dtype) for y in f(x)] == [(s, np.float64) for s in ((0, 4), (0, 4), (), (0, 6))]
    assert mt.grad(lambda x: sum(mt.sum(y) for y in f(x)))(x).shape == (0, 4)


# ----- trees ----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def test_broadcast_of_a_tree():
    """The structure stays, other leaves included."""
    mesh = mt.Mesh({"a": 3})
    seen = []

    def fn(x):
        r = mt.axis_index("a")
        got = mt.broadcast(
            {"a": [x * (r + 1), (None, 3, "s")], "b": {}, "p": Pair(mt.zeros((0, 2)), x[0])}, "a", source=1
        )
        seen.append({**got, "a": got["a"][1:], "p": type(got["p"])})
        return got["a"][0], got["p"]

    block, pair = mt.shard_map(fn, mesh, (ROWS,), {})(mt.asarray([1.0, 2.0, 3.0]))
    assert np.asarray(block).tolist() == [4.0]
    assert isinstance(pair, Pair)
    assert (pair.left.shape, float(pair.right)) == ((0, 2), 2.0)
    assert seen == [{"a": [(None, 3, "s")], "b": {}, "p": Pair}]


def test_trees_of_arguments_and_results():
    mesh = mt.Mesh({"a": 2})
    params = {"w": mt.asarray(numbers(4, 3)), "b": mt.asarray(numbers(3, seed=1)), "note": "kept"}

    def fn(x, p, scale):
        y = mt.all_reduce(x @ p["w"], "a") + p["b"]
        return {"y": y * scale, "w": p["w"], "note": p["note"]}

    places = (COLS, {"w": ROWS, "b": {}, "note": {}}, {})
    f = mt.shard_map(fn, mesh, places, {"y": {}, "w": ROWS, "note": None})
    x = mt.asarray(numbers(2, 4, seed=2))
    out = f(x, params, 2)
    assert (out["note"], out["w"].sharding.placements) == ("kept", {"a": mt.Shard(0)})
    np.testing.assert_allclose(np.asarray(out["y"]), np.asarray((x @ params["w"] + params["b"]) * 2))


# ----- what is refused ------------------------------------------------------------------------------------------------


def test_bad_input():
    mesh, other = mt.Mesh({"a": 2}), mt.Mesh({"a": 2})
    x = mt.ones((4, 3))
    ident = lambda x: x  # noqa: E731
    with pytest.raises(errors.MeshError, match="no axis 'b'"):
        mt.shard_map(ident, mesh, ({"b": mt.Shard(0)},), {})(x)
    with pytest.raises(errors.ShardingConflict, match=r"argument 0 of .*splits dimension 2"):
        mt.shard_map(ident, mesh, ({"a": mt.Shard(2)},), {})(x)
    with pytest.raises(errors.ShardingConflict, match="2 in_placements for 1 positional"):
        mt.shard_map(ident, mesh, (ROWS, ROWS), ROWS)(x)
    with pytest.raises(errors.ShardingConflict, match="fits no Array"):
        mt.shard_map(ident, mesh, ([ROWS, ROWS],), ROWS)(x)
    with pytest.raises(errors.MeshError, match="of another mesh"):
        mt.shard_map(ident, mesh, (mt.Sharding(other, a=mt.Shard(0)),), ROWS)(x)
    with pytest.raises(errors.MeshError, match="per-rank code"):
        mt.all_reduce(x, "a")
    with pytest.raises(errors.MeshError, match="no axis 'z'"):
        mt.shard_map(lambda x: mt.all_reduce(x, "z"), mesh, (ROWS,), ROWS)(x)
    with pytest.raises(ValueError, match="op is one of"):
        mt.shard_map(lambda x: mt.all_reduce(x, "a", op="avg"), mesh, (ROWS,), ROWS)(x)
    with pytest.raises(errors.DTypeError, match="booleans take"):
        mt.shard_map(lambda x: mt.all_reduce(x > 0, "a"), mesh, (ROWS,), ROWS)(x)
    with pytest.raises(errors.AxisError, match="dim 2"):
        mt.shard_map(lambda x: mt.all_gather(x, "a", dim=2), mesh, (ROWS,), {})(x)
    with pytest.raises(errors.TracedValueError, match=r"mt\.where"):
        mt.shard_map(lambda x: x if x.sum() > 0 else -x, mesh, (ROWS,), ROWS)(x)
    inner = mt.shard_map(ident, mesh, (ROWS,), ROWS)
    with pytest.raises(errors.MeshError, match="inside another"):
        mt.shard_map(lambda x: inner(x), mesh, (ROWS,), ROWS)(x)
    with pytest.raises(errors.TracedValueError, match="all ranks run the same code"):
        mt.shard_map(lambda: mt.ones(1 + int(mt.axis_index("a"))), mesh, (), ROWS)()
    with pytest.raises(errors.ShardingConflict, match=r"dimension 0 of length 5 is divided over 2 ranks.*pad it"):
        mt.shard_map(ident, mesh, (ROWS,), ROWS)(mt.ones(5))
    for call in (mt.reduce_scatter, mt.all_to_all):
        with pytest.raises(errors.ShapeError, match="length 3 is divided between 2 ranks in equal parts"):
            mt.shard_map(lambda x, call=call: call(x, "a"), mesh, ({},), ROWS)(mt.ones(3))
    with pytest.raises(errors.MeshError, match="arrays of two meshes"):
        mt.shard_map(ident, mesh, (ROWS,), ROWS)(mt.distribute(x, other))


def test_the_code_is_traced_once_a_signature(capsys):
    mesh = mt.Mesh({"a": 4})

    def fn(x):
        print(x.shape)
        return mt.all_reduce(x, "a")

    f = mt.shard_map(fn, mesh, (ROWS,), {})
    for n in (4, 4, 8, 4):
        f(mt.ones(n))
    assert capsys.readouterr().out == "(1,)\n(2,)\n"


def test_a_program_with_per_rank_code_cannot_be_saved(tmp_path):
    mesh = mt.Mesh({"a": 2})
    f = mt.shard_map(lambda x: x * 2, mesh, (ROWS,), ROWS)
    with pytest.raises(errors.MeshtapeError):
        mt.save_program(tmp_path / "p", f, mt.distribute(mt.ones(4), mesh))


# ----- any two placements ---------------------------------------------------------------------------------------------


@bounded
@given(data=st.data())
def test_any_placements(data):
    """Whatever the argument's placements, wherever it comes from: blocks in are blocks out, and the gradient is that of
    doing nothing."""
    sizes = data.draw(st.sampled_from([{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 1, "b": 3}]))
    mesh = mt.Mesh(sizes)
    shape = data.draw(st.sampled_from([(12,), (12, 24), (0, 12), (12, 12, 12)]))
    order = data.draw(st.permutations(list(sizes)))
    choices = [mt.Replicate(), *(mt.Shard(d) for d in range(len(shape)))]
    inside = {n: data.draw(st.sampled_from(choices)) for n in order}
    before = {n: data.draw(st.sampled_from(choices)) for n in order}
    x = numbers(*shape)
    f = mt.shard_map(lambda x: mt.sin(x), mesh, (inside,), inside)
    y = f(mt.distribute(x, mesh, **before))
    np.testing.assert_allclose(np.asarray(y), np.sin(x))
    g = mt.grad(lambda x: mt.sum(f(x)))(mt.distribute(x, mesh, **before))
    np.testing.assert_allclose(np.asarray(g), np.cos(x))


# ----- on processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["columns, then rows", "gathered parameters", "all_to_all", "ring", "max over ranks, with ties"]
)
def test_on_worker_processes(processes, name):
    with mt.Mesh({"a": 4}, client=processes) as mesh:
        both(EVEN[name], 4, mesh, compiled=True)


def test_what_code_of_ranks_draws_reads_and_writes_is_another_each_time():
    """It is traced at each call then, and says so once."""
    mesh, split = mt.Mesh({"x": 2}), {"x": mt.Shard(0)}
    numbers, notes = itertools.count(1), queue.SimpleQueue()
    draws = {
        "random": lambda b: b * random.random(),
        "a clock": lambda b: b * time.perf_counter(),
        "an iterator": lambda b: b * next(numbers),
    }
    for name, draw in draws.items():
        f = mt.shard_map(draw, mesh, (split,), split)
        with pytest.warns(RuntimeWarning, match="traced at every call"):
            found = [float(f(mt.ones(2))[0]) for _ in range(3)]
        assert len(set(found)) == 3, name
    f = mt.shard_map(lambda b: (notes.put(1), b)[1], mesh, (split,), split)
    with pytest.warns(RuntimeWarning, match="traced at every call"):
        assert [float(f(mt.ones(2))[0]) for _ in range(3)] == [1.0] * 3
    assert notes.qsize() == 3
    drawn = mt.shard_map(draws["random"], mesh, (split,), split)
    with pytest.raises(mt.errors.NondeterministicError):
        mt.compile(lambda x: drawn(x))(mt.ones(2))
