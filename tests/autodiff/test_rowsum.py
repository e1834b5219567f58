"""The cotangent of reading rows of a table stays (ids, summed rows) until something needs the whole of it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays import rowsum
from meshtape.arrays.rowsum import RowSum

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rowsum, "SMALLEST", 1)


def table(*shape, dtype=np.float64):
    return mt.asarray(RNG.standard_normal(shape).astype(dtype))


def is_rows(g):
    return type(g._buf) is RowSum


def added_at(shape, key, g, dtype=np.float64):
    out = np.zeros(shape, dtype)
    np.add.at(out, key, g)
    return out


KEYS = {
    "repeated": np.array([5, 1, 5, 5, 0]),
    "negative": np.array([-1, 9, -10, 0]),
    "distinct": np.array([3, 1, 9]),
    "two dimensions": np.array([[1, 2], [2, 1]]),
    "one": np.array([4]),
    "0-d": np.array(4),
    "none": np.zeros((0,), int),
    "int8": np.array([-1, 3], np.int8),
    "uint8": np.array([9, 9], np.uint8),
}


@pytest.mark.parametrize("name", KEYS)
def test_the_gradient_is_that_of_add_at(name):
    key, t = KEYS[name], table(10, 3)
    w = mt.asarray(RNG.standard_normal(np.asarray(t)[key].shape))
    g = mt.grad(lambda t: (t[mt.asarray(key)] * w).sum())(t)
    assert is_rows(g)
    np.testing.assert_array_equal(np.asarray(g), added_at((10, 3), key, np.asarray(w)))
    ids, rows = mt.gradient_rows(g)
    assert ids.tolist() == sorted({int(i) % 10 for i in key.reshape(-1)})
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(g)[np.asarray(ids)])


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_table_and_any_leading_index(data):
    rowsum.SMALLEST, before = 1, rowsum.SMALLEST
    try:
        shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
        lead = data.draw(st.integers(1, len(shape)))
        count = data.draw(st.integers(0, 12))
        key = tuple(
            np.array(data.draw(st.lists(st.integers(-n, n - 1), min_size=count, max_size=count)), int)
            for n in shape[:lead]
        )
        dtype = data.draw(st.sampled_from([np.float64, np.complex128]))
        t = table(*shape, dtype=dtype)
        w = np.round(RNG.standard_normal(np.asarray(t)[key].shape) * 8)
        g = mt.grad(
            lambda t: (
                mt.sum(mt.real(t[tuple(map(mt.asarray, key))] * w)) if dtype is np.complex128 else (t[key] * w).sum()
            )
        )(t)
        np.testing.assert_array_equal(np.asarray(g), added_at(shape, key, w, dtype))
    finally:
        rowsum.SMALLEST = before


@pytest.mark.parametrize("dtype", [mt.float32, mt.float16, mt.bfloat16, mt.complex64])
def test_dtypes(dtype):
    key = mt.asarray([1] * 300 + [0])
    g = mt.grad(lambda t: mt.real(t[key] * 0.125).astype(mt.float32).sum())(mt.zeros((3, 4), dtype=dtype))
    assert is_rows(g)
    assert g.dtype == dtype
    # Three hundred times 1/8 is lost in bfloat16 unless it is summed in float32.
    assert complex(g[1, 0].astype(mt.complex64)) == complex(mt.asarray(37.5).astype(dtype).astype(mt.complex64))


def test_gradients_of_several_readings_are_added():
    t, a, b = table(10, 2), mt.asarray([1, 2, 1]), mt.asarray([2, 7])
    only = mt.grad(lambda t: t[a].sum() + 2.0 * t[b].sum())(t)
    assert is_rows(only)
    expected = added_at((10, 2), [1, 2, 1, 2, 2, 7, 7], 1.0)
    np.testing.assert_array_equal(np.asarray(only), expected)
    for mixed in (lambda t: t[a].sum() + 2.0 * t[b].sum() + t.sum(), lambda t: t.sum() + 2.0 * t[b].sum() + t[a].sum()):
        np.testing.assert_array_equal(np.asarray(mt.grad(mixed)(t)), expected + 1.0)
    two = mt.grad(lambda t: t[a].sum() + t[a, mt.asarray([0, 1, 1])].sum())(t)
    assert np.asarray(two)[:3].tolist() == [[0, 0], [3, 3], [1, 2]]


def test_a_dense_rule_before_it_gets_a_dense_cotangent():
    t, ids = table(10, 2), mt.asarray([1, 1, 3])
    g = mt.grad(lambda t: mt.tanh(t * 2.0)[ids].sum())(t)
    assert not is_rows(g)
    np.testing.assert_allclose(
        np.asarray(g), added_at((10, 2), [1, 1, 3], 1.0) * 2.0 * (1 - np.tanh(2 * np.asarray(t)) ** 2)
    )
    mt.check_grads(lambda t: mt.sin(t[ids]), np.asarray(t), order=2)


def test_higher_orders_compiled_checkpoints_and_meshes():
    t, ids = table(6, 2), mt.asarray([1, 1, 3])
    loss = lambda t: (t[ids] ** 3).sum()  # noqa: E731
    g = mt.grad(loss)(t)
    for other in (mt.compile(mt.grad(loss)), mt.grad(mt.compile(loss)), mt.grad(mt.checkpoint(loss))):
        np.testing.assert_array_equal(np.asarray(other(t)), np.asarray(g))
    v = table(6, 2)
    expected = added_at((6, 2), [1, 1, 3], 6.0 * (np.asarray(t) * np.asarray(v))[[1, 1, 3]])
    np.testing.assert_allclose(np.asarray(mt.hvp(loss, t, v)), expected)
    s = mt.distribute(t, mt.Mesh({"a": 2}), a=mt.Shard(0))
    np.testing.assert_allclose(np.asarray(mt.grad(loss)(s)), np.asarray(g))
    # And a gradient in rows goes wherever an array goes.
    np.testing.assert_array_equal(np.asarray(mt.compile(lambda g: g + 1.0)(mt.grad(loss)(t))), np.asarray(g) + 1.0)
    np.testing.assert_allclose(
        np.asarray(mt.distribute(mt.grad(loss)(t), mt.Mesh({"a": 2}), a=mt.Shard(0))), np.asarray(g)
    )
    np.testing.assert_allclose(np.asarray(s * mt.grad(loss)(t)), np.asarray(t) * np.asarray(g))
    closed_over = mt.grad(loss)(t)
    assert is_rows(closed_over)
    f = mt.compile(lambda x: (x * closed_over, closed_over))
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(f(t)[0]), np.asarray(t) * np.asarray(g))
    assert f.signatures == 1


def rows_and_dense():
    g = mt.grad(lambda t: (t[mt.asarray([1, 4, 1])] * mt.asarray([[1.0], [-2.0], [0.5]])).sum())(table(6, 2))
    assert is_rows(g)
    return g, mt.asarray(np.asarray(g))


P = table(6, 2)
KEPT = {
    "abs": abs,
    "negative": lambda g: -g,
    "square": mt.square,
    "astype": lambda g: g.astype(mt.float32),
    "scaled": lambda g: g * 0.5,
    "scaled by an array": lambda g: mt.asarray(3.0) * g,
    "divided": lambda g: g / 4.0,
}
OTHER = {
    "sum": lambda g: g.sum(),
    "sum of an axis": lambda g: g.sum(axis=0),
    "sum that keeps dimensions": lambda g: mt.sum(g, axis=(0, 1), keepdims=True),
    "p - g": lambda g: P - g,
    "g - p": lambda g: g - P,
    "p + g": lambda g: P + g,
    "g + p": lambda g: g + P,
    "g + g": lambda g: g + g,
    "g * g": lambda g: g * g,
    "times infinity": lambda g: g * float("inf"),
    "times NaN": lambda g: g * mt.asarray(float("nan")),
    "over zero": lambda g: g / 0.0,
    "one over": lambda g: 1.0 / g,
    "broadcast": lambda g: g * mt.asarray([1.0, 2.0]),
    "promoted": lambda g: mt.ones((6, 2), dtype=mt.float32) - g,
    "exp": mt.exp,
    "index": lambda g: g[1:5],
    "write": lambda g: g.at[0].set(9.0),
    "maximum": lambda g: mt.maximum(g, 0.0),
    "matmul": lambda g: g.T @ P,
    "iterated": lambda g: mt.stack(list(g)),
    "layer_norm": lambda g: mt.layer_norm(g, 2),
}


@pytest.mark.parametrize("name", [*KEPT, *OTHER])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_op_sees_the_same_array(name):
    fn = (KEPT | OTHER)[name]
    g, dense = rows_and_dense()
    got, expected = fn(g), fn(dense)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    assert is_rows(got) == (name in KEPT)
    if name in KEPT:
        assert is_rows(g)


def test_the_protocols_of_an_array():
    g, dense = rows_and_dense()
    assert (g.shape, g.dtype, g.ndim, g.size, g.nbytes) == ((6, 2), mt.float64, 2, 12, 96)
    assert (str(g.device), g.sharding, repr(g)) == ("cpu", None, repr(dense))
    assert g.tolist() == dense.tolist()
    assert np.from_dlpack(g).tolist() == dense.tolist()
    assert pickle.loads(pickle.dumps(g)).tolist() == dense.tolist()
    assert bool(mt.all(g == dense))
    h = g + 0.0
    g[0] = 7.0
    g += 1.0
    assert (g[0].tolist(), h[0].tolist()) == ([8, 8], [0, 0])


def test_watched_it_is_an_array_like_any_other():
    g, dense = rows_and_dense()
    for x in (g, dense):
        assert mt.grad(lambda x: (x * x * 2.0).sum())(x).tolist() == (4.0 * np.asarray(dense)).tolist()
    ids = mt.asarray([0, 1])
    again = mt.grad(lambda t: (mt.stop_gradient(mt.grad(lambda t: (t[ids] ** 2).sum())(t)) * t).sum())(P)
    np.testing.assert_array_equal(np.asarray(again)[:2], 2.0 * np.asarray(P)[:2])


@pytest.mark.parametrize(
    "opt", [mt.optim.sgd(0.1), mt.optim.momentum(0.1), mt.optim.adamw(0.1)], ids=["sgd", "momentum", "adamw"]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_optimizers_and_clipping(opt):
    g, dense = rows_and_dense()
    clipped, norm = mt.optim.clip_by_global_norm({"t": g}, 0.5)
    assert is_rows(clipped["t"])
    assert is_rows(g)
    same, norm2 = mt.optim.clip_by_global_norm({"t": dense}, 0.5)
    assert float(norm) == float(norm2)
    params = {"t": P}
    ours, state = opt.update(params, clipped, opt.init(params))
    theirs, state2 = opt.update(params, same, opt.init(params))
    np.testing.assert_allclose(np.asarray(ours["t"]), np.asarray(theirs["t"]), rtol=1e-15)
    for a, b in zip(mt.tree.flatten(state)[0], mt.tree.flatten(state2)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-15)
    for bad in (float("inf"), float("nan")):
        ours, theirs = (mt.optim.clip_by_global_norm([x * bad], 0.5)[0][0] for x in (g, dense))
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert np.isnan(np.asarray(ours)).any()


def test_hooks_and_anomalies_see_it():
    seen = []
    t, ids = table(6, 2), mt.asarray([1, 1])
    with mt.Tape() as tape:
        tape.watch(t)
        tape.hook(t, lambda g: seen.append(g.tolist()))
        y = t[ids].sum()
    assert tape.gradient(y, t).tolist() == seen[0]
    huge = mt.full((2, 2), 1e308)
    named = pytest.raises(mt.errors.AnomalyError, match="the derivative of getitem gave the first inf")
    with mt.detect_anomaly(), np.errstate(over="ignore"), named:
        mt.grad(lambda t: (t[ids] * huge).sum())(mt.zeros((6, 2)))


def test_small_tables_are_dense(monkeypatch):
    monkeypatch.setattr(rowsum, "SMALLEST", 100)
    assert not is_rows(mt.grad(lambda t: t[mt.asarray([1])].sum())(table(10, 3)))
    assert is_rows(mt.grad(lambda t: t[mt.asarray([1])].sum())(table(50, 3)))
    assert not is_rows(mt.grad(lambda t: t[mt.asarray([1])].sum())(table(500)))
    assert not is_rows(mt.grad(lambda t: t[:, mt.asarray([1])].sum())(table(50, 3)))
    ids, rows = mt.gradient_rows(mt.asarray([[0.0, 1.0], [0.0, 0.0]]))
    assert (ids.tolist(), rows.tolist()) == ([0], [[0, 1]])
