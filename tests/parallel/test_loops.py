"""``mt.scan`` is the Python loop, in few tasks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import dask
import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import MeshError, RankLost, ShapeError
from meshtape.parallel.transforms import scan

rng = np.random.default_rng(4)


def sgd(w: Any, batch: Any) -> Any:
    x, y = batch
    loss, g = mt.value_and_grad(lambda w: mt.mean(mt.square(x @ w["w"] + w["b"] - y)))(w)
    return {k: w[k] - 0.1 * g[k] for k in w}, {"loss": loss, "none": None}


def batches(mesh: Any, sizes: list[int]) -> list[Any]:
    out = []
    for i, n in enumerate(sizes):
        r = np.random.default_rng(i)
        x, y = r.normal(size=(n, 3)), r.normal(size=(n, 2))
        out.append((x, y) if mesh is None else mt.distribute((x, y), mesh, data=mt.Shard(0)))
    return out


def weights(mesh: Any) -> Any:
    host = {"w": np.ones((3, 2)), "b": np.zeros(2)}
    return host if mesh is None else mt.distribute(host, mesh)


@pytest.fixture(params=["local", "virtual", "threads", "processes"])
def mesh(request: pytest.FixtureRequest) -> Any:
    if request.param == "local":
        yield None
    elif request.param == "virtual":
        yield mt.Mesh({"data": 2})
    else:
        with mt.Mesh({"data": 2}, client=request.getfixturevalue(request.param)) as found:
            yield found


def test_training_by_scan_is_training(mesh):
    """A last batch of another size among them: the loop is cut there."""
    sizes = [4, 4, 4, 4, 3]
    state, outs = mt.scan(sgd, weights(mesh), batches(mesh, sizes))
    w, losses = {k: mt.asarray(v) for k, v in weights(None).items()}, []
    for batch in batches(None, sizes):
        w, out = sgd(w, batch)
        losses.append(float(out["loss"]))
    np.testing.assert_allclose(outs["loss"], losses, rtol=1e-12)
    assert outs["none"] is None
    for k in w:
        np.testing.assert_allclose(state[k], w[k], rtol=1e-12)


def test_many_turns_are_one_message_a_worker(processes, runs):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.compute(mt.distribute(np.ones(4), mesh, a=mt.Shard(0)))

        def count_up(x: Any, _: Any) -> Any:
            return x + 1.0, mt.sum(x)

        mt.scan(count_up, x, length=2)
        with runs(processes) as done:
            state, sums = mt.scan(count_up, x, length=100)
            np.asarray(state)
        assert done == ["count_up"] * 4  # 64 turns and 36, on two workers
        np.testing.assert_array_equal(state, np.full(4, 101.0))
        np.testing.assert_array_equal(sums, 4.0 * np.arange(1, 101))


def test_the_state_keeps_its_sharding(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(rng.normal(size=(4, 4)), mesh, a=mt.Shard(0))
        turned, _ = mt.scan(lambda x, _: (mt.reshard(x.mT, a=mt.Shard(1)), None), x, length=3)
        assert turned.sharding == x.sharding
        np.testing.assert_array_equal(turned, np.asarray(x).T)


def test_data_of_the_turns_that_is_large_or_computed(processes, monkeypatch):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        big = [np.full((300, 1000), float(i)) for i in range(5)]  # 2.4 MB each: goes to the workers directly
        monkeypatch.setattr(scan, "SEGMENT_BYTES", 6_000_000)  # two a task
        data = (mt.distribute(b, mesh, a=mt.Shard(0)) for b in big)
        total, last = mt.scan(lambda s, x: (s + mt.sum(x), x[0]), 0.0, data)
        assert float(total) == 300_000.0 * 10
        np.testing.assert_array_equal(last, np.stack([b[0] for b in big]))
        computed = [mt.compute(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)) * i) for i in range(3)]
        total, _ = mt.scan(lambda s, x: (s + mt.sum(x), None), 0.0, computed)
        assert float(total) == 6.0 * 3


@dataclasses.dataclass
class Row:
    x: Any
    y: Any


X, Y = rng.normal(size=(5, 3)), rng.normal(size=5)
TREES = {
    "tuple": ((X, Y), lambda r: (r[0], r[1])),
    "dict": ({"x": X, "y": Y}, lambda r: (r["x"], r["y"])),
    "nested": ({"a": (X, [Y]), "none": None}, lambda r: (r["a"][0], r["a"][1][0])),
    "dataclass": (Row(X, Y), lambda r: (r.x, r.y)),
    "arrays": ((mt.asarray(X), mt.asarray(Y)), lambda r: (r[0], r[1])),
    "lists": ([(x, y) for x, y in zip(X, Y, strict=True)], lambda r: (r[0], r[1])),
}
CARRIES = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "b": [b]},
    "dataclass": lambda a, b: Row(a, b),
}


@pytest.mark.parametrize("length", [None, 5])
@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("data", TREES)
@pytest.mark.parametrize("way", ["plain", "mesh", "compiled"])
def test_data_states_and_results_are_any_tree(way, data, carry, length):
    each, parts = TREES[data]

    def step(state: Any, row: Any) -> Any:
        a, b = mt.tree.flatten(state)[0]
        x, y = parts(row)
        return CARRIES[carry](a + x * y, b + y), {"sum": (a, [b]), "y": y}

    init = CARRIES[carry](np.zeros(3), 0.0)
    if way == "mesh":
        init = mt.distribute(init, mt.Mesh({"a": 2}))
    run = lambda each: mt.scan(step, init, each, length)  # noqa: E731
    state, outs = (mt.compile(run) if way == "compiled" else run)(each)
    assert type(state) is type(CARRIES[carry](0, 0))
    a, b = mt.tree.flatten(state)[0]
    before = np.cumsum(X * Y[:, None], 0) - X * Y[:, None], np.cumsum(Y) - Y
    for found, right in (
        (a, (X * Y[:, None]).sum(0)),
        (b, Y.sum()),
        (outs["sum"][0], before[0]),
        (outs["sum"][1][0], before[1]),
        (outs["y"], Y),
    ):
        np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-14)


def test_a_gradient_by_the_data_of_the_turns():
    found = mt.grad(lambda d: mt.scan(lambda c, r: (c + r["x"] @ r["x"] * r["y"], None), 0.0, d)[0])(
        {"x": mt.asarray(X), "y": mt.asarray(Y)}
    )
    np.testing.assert_allclose(found["x"], 2 * X * Y[:, None], rtol=1e-12)
    np.testing.assert_allclose(found["y"], (X * X).sum(1), rtol=1e-12)


@pytest.mark.parametrize("at", [None, "mesh"])
@pytest.mark.parametrize("numbers", [[1, 2, 3], [1.5, 2.5, 3.5], [True, False, True]])
def test_numbers_that_a_step_gives_are_stacked(numbers, at):
    init = mt.distribute(np.zeros(()), mt.Mesh({"a": 2})) if at else 0.0
    state, (found, same, text) = mt.scan(lambda c, x: (c + x, (x, 3, "s")), init, numbers)
    assert float(state) == sum(numbers)
    assert found.tolist() == numbers
    assert same.tolist() == [3, 3, 3]
    assert text == "s"
    with pytest.raises(ShapeError, match="only numbers can be stacked"):
        mt.scan(lambda c, x: (c, x), init, ["a", "b"])


def test_rows_of_numpy_arrays_are_traced_once():
    def step(c: Any, x: Any) -> Any:
        return c + x, x

    assert mt.scan(step, mt.asarray(0.0), np.arange(20.0))[1].tolist() == list(range(20))
    assert scan._turn_of(step).compiled.signatures == 1


@pytest.mark.parametrize(
    ("each", "length", "message"),
    [
        ((X, Y[:3]), None, r"\{'0': 5, '1': 3\}"),
        ({"x": X, "y": Y}, 4, r"\{'x': 5, 'y': 5, 'length': 4\}"),
        (X, 4, r"\{'each': 5, 'length': 4\}"),
        ({"x": X, "y": 2.0}, None, "y has no dimensions"),
        (mt.asarray(1.0), None, "each has no dimensions"),
        (3, None, "each has no dimensions"),
        ([X, X], 3, "end after 2 turns"),
        (None, 2.5, r"whole number from 1, got 2\.5"),
        (None, 0, "got 0"),
        (X[:0], None, "no turn"),
        ((), None, r"got \{\}"),
    ],
)
def test_data_of_no_turns_are_refused_by_name(each, length, message):
    with pytest.raises(ShapeError, match=message):
        mt.scan(lambda s, x: (s, x), 0.0, each, length)


def test_length_bounds_endless_data():
    data = itertools.repeat(np.ones(2))
    assert float(mt.scan(lambda s, x: (s + mt.sum(x), None), 0.0, data, 4)[0]) == 8.0


def test_data_is_read_as_the_turns_need_it():
    """Not all of it at once: a generator may be endless but for its last."""
    seen: list[int] = []

    def endless() -> Any:
        for i in range(10_000):
            seen.append(i)
            if i == 7:
                raise KeyError("the reader failed")
            yield np.ones(2)

    mesh = mt.Mesh({"a": 2})
    with dask.config.set({"meshtape.loop": 3}), pytest.raises(KeyError, match="the reader failed"):
        mt.scan(lambda s, x: (s + mt.sum(x), None), mt.distribute(np.zeros(()), mesh), endless())
    assert len(seen) == 8


def test_gradients_flow_through_a_loop():
    def end(w: Any) -> Any:
        return mt.scan(lambda s, _: (mt.tanh(s * w), s), w, length=3)[0]

    def plain(w: Any) -> Any:
        s = w
        for _ in range(3):
            s = mt.tanh(s * w)
        return s

    w = mt.asarray(0.7)
    np.testing.assert_allclose(mt.grad(end)(w), mt.grad(plain)(w), rtol=1e-12)
    np.testing.assert_allclose(mt.compile(end)(w), plain(w), rtol=1e-12)


def test_a_turn_that_fails_names_it(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.ones(4), mesh, a=mt.Shard(0))

        def broken(on: bool) -> None:
            from meshtape.arrays import OPS

            def fails(v: Any) -> Any:
                if v.flat[0] > 5:
                    raise FloatingPointError("too much")
                return np.tan(v)

            OPS["tan"].numpy = fails if on else np.tan

        (first, *_) = mesh.runtime.addresses
        processes.run(broken, True, workers=[first])
        try:
            with pytest.raises(RankLost, match=r"rank 0 failed in tan, called at .*test_loops.*too much"):
                mt.compute(mt.scan(lambda s, _: (s + mt.sum(mt.tan(s)) * 0 + 1, None), x, length=10)[0])
        finally:
            processes.run(broken, False, workers=[first])
        state, _ = mt.scan(lambda s, _: (s + 1, None), x, length=10)
        np.testing.assert_array_equal(state, np.full(4, 11.0))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda s, _: s, r"must give \(state, out\), not Array"),
        (lambda s, _: ((s, s), None), "a state of another structure"),
        (lambda s, _: (s[:1], None), r"leaf 0 of the state is float64\[3\] and becomes float64\[1\]"),
        (lambda s, _: (mt.astype(s, mt.float32), None), r"becomes float32\[3\]"),
    ],
)
def test_steps_that_are_none(step, message):
    for x in (mt.ones(3), mt.distribute(np.ones(3), mt.Mesh({"a": 2}), a=mt.Shard(0))):
        with pytest.raises(ShapeError, match=message):
            mt.scan(step, x, length=2)


def test_bad_arguments():
    with pytest.raises(ShapeError, match="or their number"):
        mt.scan(lambda s, x: (s, x), 0.0)
    with pytest.raises(ShapeError, match="has no turn"):
        mt.scan(lambda s, x: (s, x), 0.0, [])
    one, two = (mt.distribute(np.ones(2), mt.Mesh({"a": 2})) for _ in range(2))
    with pytest.raises(MeshError, match="arrays of two meshes"):
        mt.scan(lambda s, x: (s + x, None), one, [two])
    with dask.config.set({"meshtape.loop": "often"}), pytest.raises(MeshError, match=r"meshtape.loop .* got 'often'"):
        mt.scan(lambda s, x: (s, x), 0.0, length=1)
