"""What users do with a sparse gradient: every function sees the array that it stands for; optimizers and clipping work
on what is kept."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.indexing.sparse_cotangent import SparseCotangent

RNG = np.random.default_rng(0)
SHAPE = (6000, 3)


def table(*shape: int, dtype: Any = np.float64) -> mt.Array:
    return mt.asarray(RNG.standard_normal(shape).astype(dtype))


def is_sparse(g: Any) -> bool:
    return type(g._buf) is SparseCotangent


READS = {
    "rows": lambda t: t[mt.asarray([1, 4, 1])] * mt.asarray([[1.0], [-2.0], [0.5]]),
    "some of a column": lambda t: t[mt.asarray([1, 4, 1]), 2] * mt.asarray([1.0, -2.0, 0.5]),
    "slice": lambda t: t[2:5, 1:] * mt.asarray([1.0, -3.0]),
    "two reads": lambda t: (t[mt.asarray([1, 4, 1])] * 2.0).sum() - t[3:9, 1].sum(),
}


def sparse_and_dense(name: str = "rows", dtype: Any = np.float64) -> tuple[mt.Array, mt.Array]:
    g = mt.grad(lambda t: READS[name](t).sum().astype(mt.float64))(table(*SHAPE, dtype=dtype))
    other = mt.grad(lambda t: READS[name](t).sum().astype(mt.float64))(table(*SHAPE, dtype=dtype))
    assert is_sparse(g)
    return g, mt.asarray(np.array(other))


P = table(*SHAPE)
KEPT = {
    "abs": abs,
    "negative": lambda g: -g,
    "square": mt.square,
    "sign": mt.sign,
    "square root": lambda g: mt.sqrt(mt.square(g)),
    "astype": lambda g: g.astype(mt.float32),
    "scaled": lambda g: g * 0.5,
    "scaled by an array": lambda g: mt.asarray(3.0) * g,
    "divided": lambda g: g / 4.0,
    "g + g": lambda g: g + g,
    "g - g": lambda g: g - g,
    "clipped": lambda g: mt.clip(g, -1.0, 1.0),
    "maximum below zero": lambda g: mt.maximum(g, -0.5),
    "times ones": lambda g: g * mt.broadcast_to(mt.asarray(2.0), SHAPE),
}
OTHER = {
    "sum": lambda g: g.sum(),
    "mean, a sum": mt.mean,
    "sum of an axis": lambda g: g.sum(axis=0),
    "sum that keeps dimensions": lambda g: mt.sum(g, axis=(0, 1), keepdims=True),
    "p - g": lambda g: P - g,
    "g - p": lambda g: g - P,
    "p + g": lambda g: P + g,
    "g + p": lambda g: g + P,
    "g * g": lambda g: g * g,
    "times infinity": lambda g: g * float("inf"),
    "times NaN": lambda g: g * mt.asarray(float("nan")),
    "over zero": lambda g: g / 0.0,
    "one over": lambda g: 1.0 / g,
    "plus a number": lambda g: g + 1.0,
    "broadcast": lambda g: g * mt.asarray([1.0, 2.0, 3.0]),
    "promoted": lambda g: mt.ones(SHAPE, dtype=mt.float32) - g,
    "widened": lambda g: g.astype(mt.float32) * mt.asarray(2.0),
    "exp": mt.exp,
    "index": lambda g: g[1:5],
    "write": lambda g: g.at[0].set(9.0),
    "maximum with zero": lambda g: mt.maximum(g, 0.0),
    "minimum": lambda g: mt.minimum(g, -1.0),
    "matmul": lambda g: g.T @ P,
    "iterated": lambda g: mt.stack(list(g[:9])),
    "layer_norm": lambda g: mt.layer_norm(g, 3),
    "where": lambda g: mt.where(g > 0, g, 1.0),
}


@pytest.mark.parametrize("name", [*KEPT, *OTHER])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_op_sees_the_same_array(name: str) -> None:
    fn = (KEPT | OTHER)[name]
    for read in READS:
        g, dense = sparse_and_dense(read)
        got, expected = fn(g), fn(dense)
        assert is_sparse(got) == (name in KEPT), read
        if name in KEPT:
            assert is_sparse(g), read
        assert got.dtype == expected.dtype
        # Sums of everything are sums of other numbers of zeros, and differ by rounding.
        tolerance = 1e-12 if "sum" in name else 0.0
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), tolerance, tolerance, err_msg=read)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(dense), err_msg=read)


@pytest.mark.parametrize("total", [mt.sum, mt.mean])
def test_a_sum_of_everything_reads_what_is_kept_alone(
    total: Callable[[mt.Array], mt.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    g, dense = sparse_and_dense()
    expected = np.asarray(total(dense))
    with monkeypatch.context() as m:
        m.setattr(SparseCotangent, "concrete", lambda self: pytest.fail("made dense"))
        got = total(g)
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12)


def test_the_protocols_of_an_array() -> None:
    g, dense = sparse_and_dense()
    assert (g.shape, g.dtype, g.ndim, g.size, g.nbytes) == (SHAPE, mt.float64, 2, 18000, 144000)
    assert (str(g.device), g.sharding, repr(g)) == ("cpu", None, repr(dense))
    assert g.tolist() == dense.tolist()
    assert np.from_dlpack(g).tolist() == dense.tolist()
    assert pickle.loads(pickle.dumps(g)).tolist() == dense.tolist()
    assert bool(mt.all(g == dense))
    h = g + 0.0
    g[0] = 7.0
    g += 1.0
    assert (g[0].tolist(), h[0].tolist()) == ([8, 8, 8], [0, 0, 0])


def test_a_write_to_what_it_was_made_of_does_not_reach_it() -> None:
    t, seed = table(*SHAPE), mt.ones((2, 3))
    _, pull = mt.vjp(lambda t: t[mt.asarray([5, 7])], t)
    (g,) = pull(seed)
    seed[...] = 9.0
    t[...] = 0.0
    assert is_sparse(g)
    assert g[5].tolist() == [1, 1, 1]
    s = mt.sparse_gradient(g)
    s.values[...] = 4.0
    assert (g[5].tolist(), float(g.sum())) == ([1, 1, 1], 6.0)


def test_watched_it_is_an_array_like_any_other() -> None:
    g, dense = sparse_and_dense()
    for x in (g, dense):
        assert mt.grad(lambda x: (x * x * 2.0).sum())(x).tolist() == (4.0 * np.asarray(dense)).tolist()
    ids = mt.asarray([0, 1])
    again = mt.grad(lambda t: (mt.stop_gradient(mt.grad(lambda t: (t[ids] ** 2).sum())(t)) * t).sum())(P)
    np.testing.assert_array_equal(np.asarray(again)[:2], 2.0 * np.asarray(P)[:2])


def test_what_is_shown_of_it() -> None:
    g = mt.grad(lambda t: t[mt.asarray([5, 2, 5]), 1].sum())(mt.zeros((10_000, 4), dtype=mt.float32))
    s = mt.sparse_gradient(g)
    assert repr(s) == (
        "SparseGradient(shape=(10000, 4), dtype=float32, 2 of 40000 places along axes (0, 1), 40 B instead of 156.2 "
        "KiB)"
    )
    assert (s.axes, [i.tolist() for i in s.indices], s.values.tolist()) == ((0, 1), [[2, 5], [1, 1]], [1.0, 2.0])
    assert (s.nbytes, s.dtype, is_sparse(s.dense())) == (40, mt.float32, True)
    assert np.asarray(s, dtype=np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="no dense array to share"):
        np.array(s, copy=False)
    # Of an array that is dense: its rows that are not zero.
    ids, rows = mt.gradient_rows(mt.asarray([[0.0, 1.0], [0.0, 0.0]]))
    assert (ids.tolist(), rows.tolist()) == ([0], [[0, 1]])
    ids, rows = mt.gradient_rows(g)
    assert (ids.tolist(), rows.tolist()) == ([2, 5], [[0, 1, 0, 0], [0, 2, 0, 0]])
    nothing = mt.sparse_gradient(mt.zeros((3, 0)))
    assert (nothing.indices[0].tolist(), nothing.dense().shape) == ([], (3, 0))
    with pytest.raises(mt.errors.ShapeError, match="0-d"):
        mt.sparse_gradient(mt.asarray(1.0))


OPTIMIZERS = {
    "sgd": mt.optim.sgd(0.1),
    "sgd, decay": mt.optim.sgd(0.1, weight_decay=0.1),
    "momentum": mt.optim.momentum(0.1),
    "nesterov": mt.optim.momentum(0.1, nesterov=True, weight_decay=0.01),
    "adam": mt.optim.adam(0.1),
    "adam, decay": mt.optim.adam(mt.optim.cosine(0.1, 9), weight_decay=0.1),
    "adamw": mt.optim.adamw(mt.optim.warmup_linear(0.1, 2, 9)),
    "lazy_adam": mt.optim.lazy_adam(0.1),
    "clipped": mt.optim.chain(
        lambda g: mt.optim.clip_by_global_norm(g, 0.5)[0], lambda g: mt.optim.clip_by_value(g, 0.1), mt.optim.adam(0.1)
    ),
}


@pytest.mark.parametrize("dtype", [mt.float64, mt.float32, mt.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_what_dense_gradients_give(name: str, dtype: Any) -> None:
    opt = OPTIMIZERS[name]
    start = {"t": table(*SHAPE).astype(dtype), "b": table(3).astype(dtype)}
    reads = [mt.asarray(RNG.integers(0, 40, 7)) for _ in range(4)]

    def loss(p: Any, ids: mt.Array) -> mt.Array:
        rows = p["t"][ids] * p["b"] + p["t"][:9, 1][:7, None]
        return (rows * rows).astype(mt.float32).sum()

    ours = theirs = start
    state, state2 = opt.init(start), opt.init(start)
    for ids in reads:
        g = mt.grad(loss)(ours, ids)
        assert is_sparse(g["t"])
        ours, state = opt.update(ours, g, state)
        g = mt.tree_map(lambda x: mt.asarray(np.array(x)), mt.grad(loss)(theirs, ids))
        theirs, state2 = opt.update(theirs, g, state2)
    rtol = 0.0
    if name == "clipped":  # by a norm that is a sum of other numbers of zeros
        rtol = {mt.float64: 1e-12, mt.float32: 1e-5, mt.bfloat16: 1e-2}[dtype]
    for a, b in zip(mt.tree.flatten((ours, state))[0], mt.tree.flatten((theirs, state2))[0], strict=True):
        np.testing.assert_allclose(
            np.asarray(a.astype(mt.float64)), np.asarray(b.astype(mt.float64)), rtol=rtol, atol=rtol * 1e-3
        )


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_is_not_hidden_by_clipping(bad: float) -> None:
    g, dense = sparse_and_dense()
    ours, theirs = (mt.optim.clip_by_global_norm([x * bad], 0.5)[0][0] for x in (g, dense))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert np.isnan(np.asarray(ours)).any()


@pytest.mark.parametrize(
    "key", [np.array([3, 1, 3]), (slice(None), np.array([2, 2])), (np.array([[1], [4]]), slice(None), 2)]
)
def test_lazy_adam_moves_what_has_a_gradient_and_nothing_else(key: Any) -> None:
    shape = (60, 50, 8)
    p0 = {"t": table(*shape)}
    opt, plain = mt.optim.lazy_adam(0.1), mt.optim.adam(0.1)
    lazy, state = p0, opt.init(p0)
    touched = np.zeros(shape, bool)
    touched[key] = True
    for n in range(3):
        g = mt.grad(lambda p: (p["t"][key] ** 2).sum())(lazy)
        assert is_sparse(g["t"])
        lazy, state = opt.update(lazy, g, state)
        assert int(state["step"]) == n + 1
    # Where every step has a gradient it is Adam; elsewhere nothing happened.
    full, state2 = p0, plain.init(p0)
    for _ in range(3):
        g = mt.grad(lambda p: (p["t"][key] ** 2).sum())(full)
        full, state2 = plain.update(full, g, state2)
    np.testing.assert_array_equal(np.asarray(lazy["t"]), np.where(touched, np.asarray(full["t"]), np.asarray(p0["t"])))
    assert not np.asarray(state["mean"]["t"])[~touched].any()
    # The numbers do not depend on the form of the gradient, nor on who runs the step.
    g = mt.grad(lambda p: (p["t"][key] ** 2).sum())(lazy)
    once, after = opt.update(lazy, g, state)
    dense = {"t": mt.asarray(np.array(g["t"]))}
    for update in (opt.update, mt.compile(opt.update)):
        again, after2 = update(lazy, dense, state)
        np.testing.assert_allclose(np.asarray(again["t"]), np.asarray(once["t"]), rtol=1e-15)
        np.testing.assert_allclose(np.asarray(after2["square"]["t"]), np.asarray(after["square"]["t"]), rtol=1e-15)
    # What stood still when it had no gradient goes on from where it was, unlike with Adam.
    other = {"t": mt.zeros(shape).at[0, 0, 0].set(1.0)}
    still, _ = opt.update(once, other, after)
    moved, _ = plain.update(once, other, after)
    rest = touched.copy()
    rest[0, 0, 0] = False
    np.testing.assert_array_equal(np.asarray(still["t"])[rest], np.asarray(once["t"])[rest])
    assert (np.asarray(moved["t"])[rest] != np.asarray(once["t"])[rest]).all()


def test_accumulated_over_micro_batches_it_stays_sparse() -> None:
    t = table(*SHAPE)
    batches = [mt.asarray(RNG.integers(0, 90, 8)) for _ in range(4)]
    loss = lambda t, ids: (t[ids] ** 2).mean()  # noqa: E731
    total = None
    for ids in batches:
        g = mt.grad(loss)(t, ids) * 0.25
        total = g if total is None else total + g
        assert is_sparse(total)
    whole = mt.grad(loss)(t, mt.concat(batches))
    np.testing.assert_allclose(np.asarray(total), np.asarray(whole), rtol=1e-12, atol=1e-15)
    average = mt.optim.ema(0.5)
    kept = average.update(t - total, average.init(t))
    np.testing.assert_allclose(np.asarray(kept["mean"]), np.asarray(t) - 0.5 * np.asarray(whole), rtol=1e-12)


def test_it_is_saved_like_any_array(tmp_path: Any) -> None:
    g, dense = sparse_and_dense()
    opt = mt.optim.adam(0.1)
    params, state = opt.update({"t": P}, {"t": g}, opt.init({"t": P}))
    for name in ("saved", "saved.safetensors"):
        mt.save(tmp_path / name, {"g": g, "state": state, "p": params})
        found = mt.load(tmp_path / name)
        np.testing.assert_array_equal(np.asarray(found["g"]), np.asarray(dense))
        np.testing.assert_array_equal(np.asarray(found["state"]["mean"]["t"]), np.asarray(state["mean"]["t"]))


def test_nothing_is_kept_alive_in_a_circle() -> None:
    import weakref

    gc.collect()
    gc.disable()
    try:
        g = mt.grad(lambda t: t[mt.asarray([1, 2])].sum() + t[3])(table(SHAPE[0] * 3)[...])
        ref = weakref.ref(g)
        s = mt.sparse_gradient(g + g)
        del g
        assert ref() is None
        assert s.values.shape[0] == 3
    finally:
        gc.enable()


@pytest.mark.parametrize("show", [lambda g: mt.sparse_gradient(g).values, lambda g: mt.gradient_rows(g)[1]])
@pytest.mark.parametrize("way", [mt.grad, mt.hessian, lambda f: mt.compile(mt.grad(f)), mt.compile])
def test_what_is_shown_of_a_gradient_inside_a_gradient_is_refused(show, way):
    def loss(t):
        return mt.sum(show(mt.grad(lambda t: (t[mt.asarray([1, 0, 1])] ** 2).sum())(t)))

    with pytest.raises((mt.errors.GradientError, mt.errors.TracedValueError), match="sparse_gradient"):
        way(loss)(mt.ones((3, 2)))
    assert float(loss(mt.ones((3, 2)))) == 4.0 * 2 + 2.0 * 2
