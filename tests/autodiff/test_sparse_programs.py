"""Sparse cotangents in compiled programs, through reads of reads, at the second order, and where they cross such
borders."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.indexing import sparse_cotangent
from meshtape.arrays.indexing.sparse_cotangent import SparseCotangent

I = np.asarray
SHAPE = (12, 10, 8)

FIRST: dict[str, Any] = {
    "rows": I([3, 1, 3, -1]),
    "columns": (slice(None), I([7, 2, 7])),
    "elements": (I([1, 1, 5]), slice(None), I([3, 3, 0])),
    "matrix of rows": I([[1, 2, 1], [0, 5, 5]]),
    "slice": slice(2, 9, 2),
    "slices": (slice(1, 9), slice(None), slice(7, 1, -2)),
    "slice and array": (slice(1, 7), I([4, 4, 1])),
    "array, then int": (I([1, 2, 1]), slice(None), 3),
    "int and slice": (4, slice(2, 8)),
    "new axes": (None, slice(2, 8), None, I([1, 1])),
    "mask": np.arange(12) % 5 == 2,
    "everything": (None, True),
    "nothing": slice(3, 3),
}
SECOND: dict[str, Callable[[int], Any]] = {
    "row": lambda n: 0 if n else slice(0),
    "rows": lambda n: I([n - 1, 0, -1] if n else [], np.intp),
    "slice": lambda n: slice(n // 3, None, 2),
    "last": lambda n: (..., I([1, 1, 0])),
    "ends": lambda n: (I([n - 1, 0], np.intp) if n else slice(0), ..., I([1, 0])),
    "mask": lambda n: np.arange(n) % 2 == 0,
    "new": lambda n: (None, slice(None, n // 2 + 1)),
}


@pytest.fixture
def always_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_cotangent, "SMALLEST", 1)


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_a_read_of_what_was_read(first: str, second: str) -> None:
    a = FIRST[first]
    x = np.random.default_rng(0).standard_normal(SHAPE)
    b = SECOND[second](len(x[a]))
    if isinstance(b, tuple) and isinstance(b[0], np.ndarray) and x[a].ndim == 1:
        b = b[0]
    w = np.random.default_rng(1).standard_normal(x[a][b].shape)
    inner = np.zeros_like(x[a])
    np.add.at(inner, b, w)
    expected = np.zeros(SHAPE)
    np.add.at(expected, a, inner)
    loss = lambda x: (x[a][b] * mt.asarray(w)).sum()  # noqa: E731
    for g in (mt.grad(loss), mt.compile(mt.grad(loss))):
        np.testing.assert_allclose(np.asarray(g(mt.asarray(x))), expected, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(np.asarray(mt.sparse_gradient(g(mt.asarray(x)))), expected, rtol=1e-13, atol=1e-13)


def test_rows_of_rows_of_a_large_table_take_memory_of_these_rows(peak_of: Any) -> None:
    """Each of the three reads would have a dense cotangent of 6 to 26 MB."""
    table = mt.zeros((100_000, 32))
    a, b, c = mt.asarray(np.arange(0, 100_000, 2)), mt.asarray(np.arange(25_000)), mt.asarray([4, 5, 4])
    slope = mt.grad(lambda t: t[a][b][c].sum())
    g = slope(table)
    assert type(g._buf) is SparseCotangent
    read = 8 * 32 * (50_000 + 25_000)
    assert peak_of(lambda: slope(table), most := read + 4_000_000) < most
    ids, rows = mt.gradient_rows(g)
    assert (ids.tolist(), rows[:, 0].tolist()) == ([8, 10], [2, 1])


OPTIMIZERS = {
    "sgd": mt.optim.sgd(0.1),
    "sgd, decay": mt.optim.sgd(0.1, weight_decay=0.1),
    "momentum": mt.optim.momentum(0.1, nesterov=True),
    "adam": mt.optim.adam(0.1),
    "adamw": mt.optim.adamw(0.1),
    "lazy_adam": mt.optim.lazy_adam(0.1),
    "clipped": mt.optim.chain(
        lambda g: mt.optim.clip_by_global_norm(g, 0.5)[0],
        lambda g: mt.optim.clip_by_value(g, 0.1),
        mt.optim.lazy_adam(0.1),
    ),
}


def loss_of(p: Any, ids: mt.Array) -> mt.Array:
    rows = p["t"][ids] * p["b"] + p["t"][:9, 1][:7, None]
    return (rows * rows).astype(mt.float32).sum()


@pytest.mark.parametrize("dtype", [mt.float64, mt.float32, mt.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_does_what_an_eager_one_does(name: str, dtype: Any) -> None:
    opt = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    start = {"t": mt.asarray(rng.standard_normal((6000, 3))).astype(dtype), "b": mt.ones(3).astype(dtype)}
    batches = [[mt.asarray(rng.integers(0, 40, 7)) for _ in range(2)] for _ in range(3)]

    def step(p: Any, s: Any, batch: Any) -> Any:
        loss, g = mt.value_and_grad(loss_of)(p, batch[0])
        more = mt.grad(loss_of)(p, batch[1])  # accumulated
        return (*opt.update(p, mt.tree_map(lambda a, b: (a + b) * 0.5, g, more), s), loss)

    update = mt.compile(opt.update)
    ways = {
        "eager": step,
        "compiled": mt.compile(step),
        "donated": mt.compile(step, donate=(0, 1)),
        "update alone": lambda p, s, b: (
            *update(p, mt.tree_map(lambda a, b: (a + b) * 0.5, *(mt.grad(loss_of)(p, x) for x in b)), s),
            loss_of(p, b[0]),
        ),
    }
    found = {}
    for way, run in ways.items():
        p = mt.tree_map(lambda x: mt.asarray(np.array(x)), start)
        s = opt.init(p)
        for batch in batches:
            p, s, loss = run(p, s, batch)
        found[way] = [np.asarray(x.astype(mt.float64)) for x in mt.tree.flatten((p, s, loss))[0]]
    tolerance = {mt.float64: 1e-12, mt.float32: 1e-5, mt.bfloat16: 5e-2}[dtype]  # sums are made in another order
    for way in ways:
        for a, b in zip(found[way], found["eager"], strict=True):
            assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), way


@pytest.mark.parametrize("name", ["sgd", "lazy_adam", "clipped"])
def test_a_compiled_step_on_a_large_table_takes_memory_of_the_rows_it_read(name: str, peak_of: Any) -> None:
    opt = OPTIMIZERS[name]
    p = {"t": mt.zeros((200_000, 16), dtype=mt.float32)}  # 12.8 MB, as each mean of it

    def step(p: Any, s: Any, ids: mt.Array) -> Any:
        g = mt.grad(lambda p: ((p["t"][ids] - 1.0) ** 2).sum())(p)
        return opt.update(p, g, s)

    run = mt.compile(step, donate=(0, 1))
    s = opt.init(p)
    ids = mt.asarray(np.arange(64) * 7)
    steps = itertools.count()

    def once() -> None:
        nonlocal p, s
        p, s = run(p, s, ids + next(steps) % 2)

    assert peak_of(once) < 4_000_000
    moved = np.flatnonzero(np.asarray(p["t"]).any(axis=1))
    np.testing.assert_array_equal(moved, np.sort(np.concatenate([np.arange(64) * 7, np.arange(64) * 7 + 1])))


def test_gradients_leave_and_enter_compiled_functions_as_they_are() -> None:
    t, ids = mt.asarray(np.random.default_rng(0).standard_normal((6000, 3))), mt.asarray([1, 4, 1])
    g = mt.compile(mt.grad(lambda t: (t[ids] ** 2).sum()))(t)
    assert type(g._buf) is SparseCotangent
    half = mt.compile(lambda g: (g * 0.5, g.sum(), g[1]))
    for x in (g, mt.asarray(np.array(g)), g):
        scaled, total, row = half(x)
        np.testing.assert_array_equal(np.asarray(scaled), 0.5 * np.asarray(g))
        np.testing.assert_allclose((float(total), row.tolist()[0]), (float(np.asarray(g).sum()), np.asarray(g)[1, 0]))
    assert type(half(mt.compile(mt.grad(lambda t: (t[ids] ** 2).sum()))(t))[0]._buf) is SparseCotangent
    assert half.signatures == 2  # a sparse argument and a dense one
    for r in (mt.grad(lambda g: half(g)[0].sum()), mt.compile(mt.grad(lambda g: half(g)[0].sum()))):
        np.testing.assert_array_equal(np.asarray(r(mt.grad(lambda t: (t[ids] ** 2).sum())(t))), np.full((6000, 3), 0.5))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(sorted(FIRST)), min_size=1, max_size=3), st.integers(0, 99))
def test_second_order(reads: list[str], seed: int) -> None:
    before, sparse_cotangent.SMALLEST = sparse_cotangent.SMALLEST, 1
    try:
        rng = np.random.default_rng(seed)
        x, v = (rng.standard_normal(SHAPE) for _ in range(2))

        def loss(x: mt.Array) -> mt.Array:
            return sum((mt.sin(x[FIRST[r]]).sum() ** 2 for r in reads), mt.asarray(0.0))

        expected = np.zeros(SHAPE)
        for r in reads:
            k = FIRST[r]
            total = np.sin(x[k]).sum()
            slope = np.zeros(SHAPE)
            np.add.at(slope, k, np.cos(x[k]))
            bend = np.zeros(SHAPE)
            np.add.at(bend, k, -np.sin(x[k]) * v[k] * 2 * total)
            expected += 2 * slope * (slope * v).sum() + bend
        a, b = mt.asarray(x), mt.asarray(v)
        ways = (
            lambda: mt.hvp(loss, a, b),
            lambda: mt.compile(lambda a, b: mt.hvp(loss, a, b))(a, b),
            lambda: mt.grad(lambda a: (mt.grad(loss)(a) * b).sum())(a),
            lambda: mt.grad(lambda a: (mt.grad(mt.checkpoint(loss))(a) * b).sum())(a),
        )
        for n, way in enumerate(ways):
            np.testing.assert_allclose(np.asarray(way()), expected, rtol=1e-9, atol=1e-9, err_msg=f"way {n}")
    finally:
        sparse_cotangent.SMALLEST = before


def test_a_product_with_a_vector_on_a_large_table_makes_no_dense_gradient(peak_of: Any) -> None:
    table, ids = mt.zeros((100_000, 32)), mt.asarray([3, 5, 3])  # 25.6 MB
    v = mt.ones((100_000, 32))
    loss = lambda t: mt.exp(t[ids]).sum()  # noqa: E731
    h = mt.hvp(loss, table, v)
    assert type(h._buf) is SparseCotangent
    assert peak_of(lambda: mt.hvp(loss, table, v), 5_000_000) < 5_000_000
    assert (h[3].tolist(), h[5].tolist()) == ([2.0] * 32, [1.0] * 32)
