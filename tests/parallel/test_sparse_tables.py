"""Tables of which few places are read: their gradients and steps are those of one rank, whoever holds the rows and the
index arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import meshtape as mt

ROWS, WIDTH, K = 40, 6, 8
RNG = np.random.default_rng(0)
TABLE = mt.asarray(RNG.standard_normal((ROWS, WIDTH)))
IDS = mt.asarray(RNG.integers(-ROWS, ROWS, K))
WEIGHT = mt.asarray(RNG.standard_normal((K, WIDTH)))

READS = {
    "rows": lambda t, ids: t[ids],
    "columns": lambda t, ids: t[:, ids % WIDTH].T @ mt.ones((ROWS, WIDTH)) * 0.1,
    "elements": lambda t, ids: t[ids, ids % WIDTH][:, None] * mt.ones(WIDTH),
    "take_along_axis": lambda t, ids: mt.take_along_axis(t[:K], (ids % WIDTH)[:, None], axis=1) * mt.ones(WIDTH),
    "slice of rows": lambda t, ids: t[3 : 3 + K] * (1.0 + ids[:, None] % 2),
}
PLACEMENTS = {"R": mt.Replicate(), "S0": mt.Shard(0), "S1": mt.Shard(1)}


def loss(read: Any, t: mt.Array, ids: mt.Array) -> mt.Array:
    return (mt.sin(read(t, ids)) * WEIGHT).sum()


@pytest.mark.parametrize("name", READS)
def test_every_placement_gives_the_gradient_of_one_rank(name: str) -> None:
    read = READS[name]
    expected = np.asarray(mt.grad(lambda t: loss(read, t, IDS))(TABLE))
    mesh = mt.Mesh({"a": 2, "b": 3})
    slope = mt.compile(mt.grad(lambda t, ids: loss(read, t, ids)))
    for a, b, i in itertools.product(PLACEMENTS, PLACEMENTS, ("", "a", "b")):
        t = mt.distribute(TABLE, mesh, a=PLACEMENTS[a], b=PLACEMENTS[b])
        ids = mt.distribute(IDS, mesh, **({i: mt.Shard(0)} if i else {}))
        g = slope(t, ids)
        np.testing.assert_allclose(
            np.asarray(g), expected, atol=1e-12, err_msg=f"{a} {b}, ids split along {i or 'nothing'}"
        )


@pytest.mark.parametrize(
    "opt", [mt.optim.sgd(0.1), mt.optim.adam(0.1), mt.optim.lazy_adam(0.1)], ids=["sgd", "adam", "lazy"]
)
def test_steps_on_a_split_table_are_those_of_one_rank(opt: Any) -> None:
    def steps(t: mt.Array, ids: mt.Array, update: Any) -> tuple[mt.Array, Any]:
        state = opt.init(t)
        for _ in range(3):
            t, state = update(t, mt.grad(lambda t: loss(READS["rows"], t, ids))(t), state)
        return t, state

    expected, expected_state = steps(TABLE, IDS, opt.update)
    mesh = mt.Mesh({"data": 2, "model": 2})
    for row, split in itertools.product(("data", "model"), (True, False)):
        t = mt.distribute(TABLE, mesh, **{row: mt.Shard(0)})
        ids = mt.distribute(IDS, mesh, **({"data": mt.Shard(0)} if split else {}))
        for update in (opt.update, mt.compile(opt.update)):
            found, state = steps(t, ids, update)
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-12)
            for x, y in zip(mt.tree.flatten(state)[0], mt.tree.flatten(expected_state)[0], strict=True):
                np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-12)


def test_places_travel_and_not_the_table() -> None:
    """Of a table that all ranks have, and of which each reads a few rows, the gradient costs the rows and not the
    table."""
    mesh = mt.Mesh({"data": 2})
    table = mt.distribute(mt.ones((10_000, 64)), mesh)
    ids = mt.distribute(mt.asarray(np.arange(32) % 7), mesh, data=mt.Shard(0))
    text = mt.explain(mt.grad(lambda t, ids: (t[ids] ** 2).sum()), table, ids)
    assert "all_reduce" not in text
    assert text.count("all_gather") == 2  # 32 rows of 64 numbers, and 32 places
    # Where much of it is read the sums of the ranks are added, as for any other gradient.
    often = mt.distribute(mt.asarray(np.arange(8192) % 7), mesh, data=mt.Shard(0))
    assert "all_reduce" in mt.explain(mt.grad(lambda t, ids: (t[ids] ** 2).sum()), table, often)


def test_second_order_on_a_split_table() -> None:
    v = mt.asarray(RNG.standard_normal((ROWS, WIDTH)))
    expected = np.asarray(mt.hvp(lambda t: loss(READS["rows"], t, IDS), TABLE, v))
    mesh = mt.Mesh({"a": 2})
    for placement, split in itertools.product(PLACEMENTS.values(), (True, False)):
        t, d = (mt.distribute(x, mesh, a=placement) for x in (TABLE, v))
        ids = mt.distribute(IDS, mesh, **({"a": mt.Shard(0)} if split else {}))
        np.testing.assert_allclose(
            np.asarray(mt.hvp(lambda t, ids=ids: loss(READS["rows"], t, ids), t, d)), expected, atol=1e-12
        )


@pytest.mark.parametrize("opt", [mt.optim.sgd(0.1), mt.optim.lazy_adam(0.1)], ids=["sgd", "lazy"])
@pytest.mark.parametrize("place", [mt.Shard(0), mt.Replicate()], ids=["rows split", "on all ranks"])
@pytest.mark.parametrize("steps", [1, 2], ids=["one step", "two steps"])
def test_a_step_holds_no_gradient_of_the_size_of_the_table(opt: Any, place: Any, steps: int, peak_of: Any) -> None:
    """What steps make are the new table and the new state; of the gradient a rank holds the rows that it has and that
    were read.

    A second step of the same call writes into what the first has made, which nobody else sees.
    """
    mesh = mt.Mesh({"data": 2})
    start = np.random.default_rng(0).standard_normal((60_000, 16)).astype(np.float32)  # 3.84 MB
    ids = np.random.default_rng(1).integers(0, len(start), 64)

    def step(p: mt.Array, s: Any, ids: mt.Array) -> tuple[mt.Array, Any]:
        for _ in range(steps):
            g = mt.grad(lambda t: (t[ids] ** 2).sum())(p) + mt.grad(lambda t: t[ids[:8]].sum())(p)
            p, s = opt.update(p, mt.optim.clip_by_global_norm(g, 1.0)[0], s)
        return p, s

    local = mt.asarray(start)
    expected, _ = step(local, opt.init(local), mt.asarray(ids))
    run = mt.compile(step)
    p, batch = mt.distribute(local, mesh, data=place), mt.distribute(mt.asarray(ids), mesh, data=mt.Shard(0))
    state = opt.init(p)
    found, after = run(p, state, batch)
    peak = peak_of(lambda: run(p, state, batch)[0][0].tolist())
    copies = (1 if place == mt.Shard(0) else 2) * sum(x.ndim > 0 for x in mt.tree.flatten((found, after))[0])
    assert peak < copies * start.nbytes + 2_000_000
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-6)


def test_a_choice_of_places_over_sums_is_explained() -> None:
    mesh = mt.Mesh({"data": 2})
    table = mt.distribute(mt.ones((10_000, 64)), mesh)
    ids = mt.distribute(mt.asarray(np.arange(32) % 7), mesh, data=mt.Shard(0))
    text = mt.explain(mt.grad(lambda t, ids: (t[ids] ** 2).sum()), table, ids)
    assert text.count("few places are read: they travel, and not sums of the whole table") == 2
