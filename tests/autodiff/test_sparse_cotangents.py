"""Cotangents of reads are collected, and made dense when something needs that: the same numbers as dense all the
way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.core.op import ShapeDtype
from meshtape.arrays.indexing import keys as index_keys
from meshtape.arrays.indexing import sparse_cotangent
from meshtape.arrays.indexing.rows import expand_axes
from meshtape.arrays.indexing.sparse_cotangent import SMALLEST, SparseCotangent
from meshtape.autodiff.rules.structure import _read

SHAPE = (40, 30, 20)
assert np.prod(SHAPE) >= SMALLEST

ints = st.integers(-20, 19)
arrays = st.lists(ints, min_size=1, max_size=4).map(np.asarray)
slices = st.builds(slice, st.integers(-5, 5), st.integers(10, 20), st.sampled_from([1, 2, 3]))
full = st.just(slice(None))
two = st.lists(ints, min_size=2, max_size=2).map(lambda v: np.asarray(v)[:, None])
masks = st.integers(0, 99).map(lambda s: np.random.default_rng(s).random(40) < 0.1)
keys = st.one_of(
    ints,
    slices,
    arrays,
    masks,
    st.tuples(ints, ints, ints),
    st.tuples(slices, arrays),
    st.tuples(arrays, full, ints),
    st.tuples(st.just(...), arrays),
    st.tuples(st.just(None), ints, slices),
    st.tuples(full, arrays),
    st.tuples(full, slices, arrays),
    st.tuples(two, full, arrays),
    st.tuples(full, two, two),
    st.tuples(arrays, st.just(None), slices),
    st.tuples(st.just(True), ints),
    st.booleans(),
    st.tuples(full, st.booleans(), ints),
    st.just([]),
    st.just(slice(3, 3)),
    st.integers(0, 99).map(lambda s: np.random.default_rng(s).random(SHAPE) < 0.01),
    st.integers(0, 99).map(lambda s: np.random.default_rng(s).random(SHAPE[:2]) < 0.02),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(keys, min_size=1, max_size=6), st.lists(st.sampled_from(["read", "dense", "transposed"]), max_size=3))
def test_any_mixture_of_reads(reads, others):
    x = np.random.default_rng(0).standard_normal(SHAPE)
    weights = [np.random.default_rng(i).standard_normal(x[k].shape) for i, k in enumerate(reads)]
    dense = np.random.default_rng(9).standard_normal(SHAPE)
    expected = np.zeros(SHAPE)
    for k, w in zip(reads, weights, strict=True):
        np.add.at(expected, k, w)
    for o in others:
        expected += x * 2 if o == "read" else dense

    def loss(x):
        total = 0.0
        for i, (k, w) in enumerate(zip(reads, weights, strict=True)):
            total = total + (x[k] * mt.asarray(w)).sum()
            if i < len(others):
                if others[i] == "read":
                    total = total + (x * x).sum()
                elif others[i] == "dense":
                    total = total + (x * mt.asarray(dense)).sum()
                else:
                    total = total + (mt.permute_dims(x, (2, 0, 1)) * mt.asarray(dense.transpose(2, 0, 1))).sum()
        for o in others[len(reads) :]:
            total = total + ((x * x).sum() if o == "read" else (x * mt.asarray(dense)).sum())
        return total

    g = mt.grad(loss)(mt.asarray(x))
    if not others:
        check_form(g, expected)
    np.testing.assert_allclose(np.asarray(g), expected, rtol=1e-12, atol=1e-12)
    with mt.detect_anomaly():
        np.testing.assert_allclose(np.asarray(mt.grad(loss)(mt.asarray(x))), expected, rtol=1e-12, atol=1e-12)


def check_form(g: Any, expected: np.ndarray) -> None:
    """Places ascend, none comes twice, and they say what the dense array says."""
    s = mt.sparse_gradient(g)
    assert list(s.axes) == sorted(set(s.axes))
    flat = np.ravel_multi_index([np.asarray(i) for i in s.indices], [s.shape[d] for d in s.axes])
    assert (np.diff(flat) > 0).all()
    rest = tuple(n for d, n in enumerate(expected.shape) if d not in s.axes)
    assert s.values.shape == (len(flat), *rest)
    np.testing.assert_allclose(np.asarray(s), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.asarray(s.dense()), expected, rtol=1e-12, atol=1e-12)


I = np.asarray
# Keys for the shape (40, 30, 20), and the dimensions that their cotangent is sparse in.
KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "rows": (I([3, 1, 3]), (0,)),
    "negative rows": (I([-1, 39, -40]), (0,)),
    "rows by two arrays": ((I([3, 1]), I([5, 5])), (0, 1)),
    "columns": ((slice(None), I([7, 2, 7])), (1,)),
    "last": ((..., I([[1, 2], [2, 1]])), (2,)),
    "first and last": ((I([0, 0]), slice(None), I([3, 3])), (0, 2)),
    "array and slice": ((slice(2, 6), I([4, 4, 1])), (0, 1)),
    "array, int between": ((I([1, 1]), 3, slice(None)), (0, 1)),
    "int, slice, array": ((0, slice(None), I([5, 6])), (0, 2)),
    "slice backwards": (slice(5, 1, -2), (0,)),
    "slices": ((slice(1, 3), slice(None), slice(2, 12, 4)), (0, 2)),
    "mask of rows": (np.arange(40) % 9 == 2, (0,)),
    "mask of all": (np.arange(24000).reshape(SHAPE) % 501 == 7, (0, 1, 2)),
    "mask of columns": ((slice(None), np.arange(30) % 9 == 2), (1,)),
    "new axes": ((None, I([2, 2]), None, slice(None), 4), (0, 2)),
    "true": ((True, I([1, 2, 1])), (0,)),
    "int8": (I([-1, 3], dtype=np.int8), (0,)),
    "uint8": (I([9, 9], dtype=np.uint8), (0,)),
    "0-d": (I(4), (0,)),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex64])
@pytest.mark.parametrize("name", KINDS)
def test_reads_of_every_kind(name: str, dtype: Any) -> None:
    key, axes = KINDS[name]
    x = np.zeros(SHAPE, dtype)
    w = np.round(np.random.default_rng(1).standard_normal(x[key].shape) * 8).astype(dtype)
    g = mt.grad(lambda x: mt.real(x[key] * mt.asarray(w.conj())).sum())(mt.asarray(x))
    expected = np.zeros(SHAPE, dtype)
    np.add.at(expected, key, w)
    assert type(g._buf) is SparseCotangent
    s = mt.sparse_gradient(g)
    assert (s.axes, s.dtype, g.dtype) == (axes, dtype, dtype)
    check_form(g, expected)
    np.testing.assert_array_equal(np.asarray(g), expected)


@pytest.mark.parametrize("name", ["take", "take_along_axis", "a row at a time", "at a mask"])
def test_functions_that_read(name: str) -> None:
    fn = {
        "take": lambda x: mt.take(x, mt.asarray([5, 5, 0]), axis=2),
        "take_along_axis": lambda x: mt.take_along_axis(x[:, :, :], mt.asarray(np.full((40, 30, 1), 3)), axis=2),
        "a row at a time": lambda x: mt.stack([x[i] for i in (3, 5, 3)]),
        "at a mask": lambda x: x[x > 2.5],
    }[name]
    x = np.random.default_rng(2).standard_normal(SHAPE)
    w = np.random.default_rng(3).standard_normal(fn(mt.asarray(x)).shape)
    g = mt.grad(lambda x: (fn(x) * mt.asarray(w)).sum())(mt.asarray(x))
    # The index of what was read, of the index of each element.
    places = np.asarray(fn(mt.asarray(np.arange(float(x.size)).reshape(SHAPE) if name != "at a mask" else x)))
    expected = np.zeros(x.size)
    if name == "at a mask":
        expected[(x > 2.5).reshape(-1)] = w
    else:
        np.add.at(expected, places.astype(int).reshape(-1), w.reshape(-1))
    check_form(g, expected.reshape(SHAPE))
    np.testing.assert_allclose(np.asarray(g), expected.reshape(SHAPE), rtol=1e-13)


@pytest.mark.parametrize("name", KINDS)
def test_second_order_against_differences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_cotangent, "SMALLEST", 1)
    key, _ = KINDS[name]
    small = np.random.default_rng(4).standard_normal((40, 30, 20))
    fixed = mt.asarray(small)
    picked = np.zeros(SHAPE, bool)
    picked[key] = True
    where = np.argwhere(picked)[:5]

    def fn(v):  # of a few elements, that differences can reach
        x = fixed.at[tuple(where.T)].set(v)
        return mt.sin(x[key]) * x[key]

    mt.check_grads(fn, small[tuple(where.T)], order=2)


@pytest.mark.parametrize(
    "key", [True, False, (), ..., (None,), [], slice(0, 0), (slice(None), []), np.zeros(40, bool)], ids=repr
)
def test_reads_of_everything_and_of_nothing(key: Any) -> None:
    x = np.random.default_rng(5).standard_normal(SHAPE)
    g = mt.grad(lambda x: (x[key] * 2.0).sum())(mt.asarray(x))
    expected = np.zeros(SHAPE)
    np.add.at(expected, key, 2.0)
    np.testing.assert_array_equal(np.asarray(g), expected)
    np.testing.assert_array_equal(np.asarray(mt.sparse_gradient(g)), expected)


def test_rounding_to_the_dtype_of_a_table_comes_after_the_sum() -> None:
    key = mt.asarray([1] * 300 + [0])
    for dtype in (mt.float16, mt.bfloat16):
        g = mt.grad(lambda t: (t[key] * 0.125).astype(mt.float32).sum())(mt.zeros((8192, 4), dtype=dtype))
        assert (type(g._buf), g.dtype) == (SparseCotangent, dtype)
        # Three hundred times 1/8 is lost in bfloat16 unless it is summed in float32.
        assert float(g[1, 0].astype(mt.float32)) == float(mt.asarray(37.5).astype(dtype).astype(mt.float32))
    # A table in float32 that is read in bfloat16 (mixed precision) keeps a sparse gradient, in float32.
    table = mt.zeros((8192, 4), dtype=mt.float32)
    g = mt.grad(lambda t: t.astype(mt.bfloat16)[key].astype(mt.float32).sum())(table)
    assert (type(g._buf), g.dtype) == (SparseCotangent, mt.float32)
    assert g[1].tolist() == [300.0] * 4


def five_times(g: Any) -> Any:
    return g * 5.0


def test_linear_ops_before_a_read_keep_its_cotangent_sparse() -> None:
    ids = mt.asarray([3, 5, 3])
    table = mt.asarray(np.random.default_rng(0).standard_normal((5000, 4)))
    for before, slope in (
        (lambda t: -t, -1.0),
        (lambda t: t * 3.0, 3.0),
        (lambda t: mt.asarray(2.0) * t, 2.0),
        (lambda t: t / 4.0, 0.25),
        (lambda t: 1.0 - t, -1.0),
        (lambda t: t + 1.0, 1.0),
        (lambda t: mt.gradient_hook(t, five_times), 5.0),
    ):
        g = mt.grad(lambda t, before=before: before(t)[ids].sum())(table)
        assert type(g._buf) is SparseCotangent
        assert (g[3].tolist(), g[5].tolist(), float(g.sum())) == ([2 * slope] * 4, [slope] * 4, 12 * slope)
    # Everything else gets a dense one, and so do operands of another shape.
    for before in (mt.tanh, lambda t: t * mt.asarray([1.0, 2.0, 3.0, 4.0]), lambda t: t * t, mt.exp):
        dense = np.zeros((5000, 4))
        _, pull = mt.vjp(before, table)
        np.add.at(dense, [3, 5, 3], 1.0)
        g = mt.grad(lambda t, before=before: before(t)[ids].sum())(table)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(pull(mt.asarray(dense))[0]))
    b = mt.asarray([1.0, 2.0, 3.0, 4.0])
    both = mt.grad(lambda t, b: (t + b)[ids].sum(), argnums=(0, 1))(table, b)
    assert both[1].tolist() == [3.0] * 4


@pytest.mark.parametrize("order", ["rows first", "dense first"])
def test_rows_beside_a_cotangent_whose_columns_come_first_in_memory(order):
    """The sum of the two was lost once: a reshaped copy was written to."""
    table, ids = mt.asarray(np.ones((600, 40))), mt.asarray([3, 5, 3])
    dense = np.random.default_rng(0).standard_normal((40, 600))

    def loss(t):
        parts = [t[ids].sum(), (t.T * mt.asarray(dense)).sum()]
        return parts[0] + parts[1] if order == "rows first" else parts[1] + parts[0]

    expected = dense.T.copy()
    np.add.at(expected, [3, 5, 3], 1.0)
    np.testing.assert_allclose(np.asarray(mt.grad(loss)(table)), expected)
    # And in what optimizers do: a parameter of that layout, and a gradient in rows.
    g = mt.grad(lambda t: t[ids].sum())(table)
    assert type(g._buf) is SparseCotangent
    p = mt.asarray(np.asfortranarray(np.ones((600, 40))))
    updated = np.asarray(p - g * 0.5)
    assert updated[3].tolist() == [0] * 40
    assert updated[5].tolist() == [0.5] * 40
    assert updated.sum() == 600 * 40 - 1.5 * 40


def _one_read(key: Any, g: np.ndarray) -> Any:
    template, arrays = index_keys.parse(mt.zeros(SHAPE), key)
    return _read(np, g, tuple(a._buf for a in arrays), ShapeDtype(SHAPE, np.dtype(float)), template)


def test_what_is_read_in_parts_is_collected_until_dense_takes_less():
    g = np.ones(SHAPE[1:])
    total = _one_read(0, g)
    assert type(total) is SparseCotangent
    for n in range(1, 39):
        total = total.add(_one_read(n, g))
        assert type(total) is SparseCotangent
        assert (total.held, total.parts) == ((n + 1) * g.nbytes, n + 1)
    total = total.add(_one_read(-1, g))
    assert type(total) is np.ndarray
    assert (total == 1.0).all()


def test_reads_by_one_index_are_one_part():
    g = np.ones(SHAPE[1:])
    total = _one_read(3, g)
    for _ in range(99):
        total = total.add(_one_read(3, g))
    assert (type(total), total.parts, total.held) == (SparseCotangent, 1, g.nbytes)
    assert total.concrete()[3].tolist() == np.full(SHAPE[1:], 100.0).tolist()
    assert total.concrete().sum() == 100 * g.size
    assert _one_read(3, g).add(_one_read(4, g)).parts == 2


def test_a_sum_is_not_changed_by_what_grows_from_it():
    first, g = _one_read(1, np.ones(SHAPE[1:])), np.ones(SHAPE[1:])
    a = first.add(_one_read(2, g))
    b, c = a.add(_one_read(3, g)), a.add(_one_read(4, 2 * g))
    for s, places in ((first, {1: 1}), (a, {1: 1, 2: 1}), (b, {1: 1, 2: 1, 3: 1}), (c, {1: 1, 2: 1, 4: 2})):
        dense = s.concrete()
        assert {int(i): float(dense[i, 0, 0]) for i in np.flatnonzero(dense[:, 0, 0])} == places
        assert dense.sum() == sum(places.values()) * g.size


def test_places_among_more_dimensions_are_the_same_places():
    template, arrays = index_keys.parse(mt.zeros(SHAPE), (slice(None), [4, 2, 4]))
    values = np.random.default_rng(0).standard_normal((40, 3, 20))
    part = SparseCotangent.read(template, [a._buf for a in arrays], values, SHAPE)
    expected = np.zeros(SHAPE)
    np.add.at(expected, (slice(None), [4, 2, 4]), values)
    for axes in ((1,), (0, 1), (1, 2), (0, 1, 2)):
        rows = expand_axes(part.summed(), axes, SHAPE)
        order = np.argsort(rows.ids)
        rows = rows._replace(ids=rows.ids[order], values=rows.values[order])
        np.testing.assert_allclose(SparseCotangent.of_rows(rows, SHAPE).concrete(), expected)


def test_a_loop_over_elements_takes_memory_for_one_dense_cotangent(peak_of):
    x = mt.asarray(np.ones(SMALLEST))

    def loss(x):
        total = x[0]
        for i in range(1, 300):
            total = total + x[i] * x[i]
        return total

    slope = mt.grad(loss)
    g = slope(x)
    assert g.tolist()[:301] == [1.0] + [2.0] * 299 + [0.0]
    with mt.Tape(persistent=True) as tape:
        tape.watch(x)
        y = loss(x)
    assert peak_of(lambda: tape.gradient(y, x), most := 3 * x.nbytes) < most


@pytest.mark.parametrize("axis", [0, 1])
def test_no_dense_table_until_something_needs_it(axis: int, peak_of: Any) -> None:
    """10⁴ of 10⁶ rows of 64 numbers: places and numbers take 2.6 MB, the table 256 MB."""
    n, width, k = 1_000_000, 64, 10_000
    rng = np.random.default_rng(0)
    ids = mt.asarray(rng.integers(0, n, k))
    shape = (n, width) if axis == 0 else (width, n)
    table = mt.asarray(np.broadcast_to(np.float32(1), shape), copy=False)
    w = mt.asarray(rng.standard_normal((k, width) if axis == 0 else (width, k)).astype(np.float32))
    key = ids if axis == 0 else (slice(None), ids)
    slope = mt.grad(lambda t: (t[key] * t[key] * w).sum())

    def step() -> tuple[Any, Any, Any]:
        g = slope(table)
        clipped, norm = mt.optim.clip_by_global_norm([g, g], 0.5)
        limited = mt.optim.clip_by_value(clipped[0] + clipped[1], 1.0)
        return g, norm, mt.sparse_gradient(limited * 0.5)

    assert peak_of(step, most := table.nbytes / 4) < most
    g, norm, s = step()
    total = np.asarray(g)
    assert s.nbytes < 3_000_000
    assert len(s.indices[0]) == len(np.unique(np.asarray(ids)))
    np.testing.assert_allclose(float(norm) ** 2, 2 * float((total.astype(np.float64) ** 2).sum()), rtol=1e-5)


def test_gradients_asked_for_twice_and_of_the_second_order():
    x = mt.asarray(np.arange(float(SMALLEST)))
    tape = mt.Tape(persistent=True)
    with tape:
        tape.watch(x)
        y = x[3] * x[4]
    for _ in range(2):
        g = np.asarray(tape.gradient(y, x))
        assert (g[3], g[4], g.sum()) == (4.0, 3.0, 7.0)
    v = mt.zeros(SMALLEST).at[4].set(1.0)
    h = np.asarray(mt.hvp(lambda x: x[3] * x[4], x, v))
    assert (h[3], h.sum()) == (1.0, 1.0)
    with mt.Tape() as tape:
        tape.watch(x)
        kept = []
        tape.hook(x, lambda g: kept.append(g))
        y = x[3] * 2.0 + x[5]
    g = tape.gradient(y, x)
    assert (kept[0][3].tolist(), kept[0][5].tolist()) == (2.0, 1.0)
    assert float(kept[0].sum()) == float(g.sum()) == 3.0


def test_hooks_derivatives_of_ones_own_and_anomalies_see_it():
    seen = []
    t, ids = mt.asarray(np.random.default_rng(0).standard_normal((9000, 2))), mt.asarray([1, 1])
    with mt.Tape() as tape:
        tape.watch(t)
        tape.hook(t, lambda g: seen.append(g))
        y = t[ids].sum()
    g = tape.gradient(y, t)
    assert type(seen[0]._buf) is SparseCotangent
    assert g.tolist() == seen[0].tolist()

    @mt.custom_vjp
    def twice(x):
        return x + x

    twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g + g,))
    g = mt.grad(lambda t: twice(t)[ids].sum())(t)
    assert (g[1].tolist(), float(g.sum())) == ([4.0, 4.0], 8.0)
    huge = mt.full((2, 2), 1e308)
    named = pytest.raises(mt.errors.AnomalyError, match="the derivative of getitem gave the first inf")
    with mt.detect_anomaly(), np.errstate(over="ignore"), named:
        mt.grad(lambda t: (t[ids] * huge).sum())(t)


def test_a_seed_and_a_target_may_be_sparse_themselves():
    t, ids = mt.asarray(np.random.default_rng(0).standard_normal((9000, 2))), mt.asarray([1, 4])
    g = mt.grad(lambda t: t[ids].sum())(t)
    assert type(g._buf) is SparseCotangent
    _, pull = mt.vjp(lambda t: t * t, t)
    np.testing.assert_array_equal(np.asarray(pull(g)[0]), 2 * np.asarray(t) * np.asarray(g))
    again = mt.grad(lambda t: t[ids].sum())(t)
    np.testing.assert_array_equal(np.asarray(mt.grad(lambda x: (x * x).sum())(again)), 2 * np.asarray(g))


def test_higher_orders_compiled_checkpoints_and_meshes():
    rng = np.random.default_rng(0)
    t, ids = mt.asarray(rng.standard_normal((6000, 3))), mt.asarray([1, 1, 3])
    for read in (lambda t: t[ids], lambda t: t[:, mt.asarray([2, 2])][:5], lambda t: t[5:7, 1]):
        loss = lambda t, read=read: (read(t) ** 3).sum()  # noqa: E731
        g = mt.grad(loss)(t)
        dense = np.asarray(g)
        for other in (mt.compile(mt.grad(loss)), mt.grad(mt.compile(loss)), mt.grad(mt.checkpoint(loss))):
            np.testing.assert_array_equal(np.asarray(other(t)), dense)
        v = mt.asarray(rng.standard_normal((6000, 3)))
        touched = (dense != 0) * 6.0 * np.asarray(t) * np.asarray(v)
        count = np.asarray(mt.grad(lambda t, read=read: read(t).sum())(t))
        np.testing.assert_allclose(np.asarray(mt.hvp(loss, t, v)), touched * count, atol=1e-12)
        mesh = mt.Mesh({"a": 2})
        for placement in (mt.Shard(0), mt.Shard(1), mt.Replicate()):
            s = mt.distribute(t, mesh, a=placement)
            np.testing.assert_allclose(np.asarray(mt.grad(loss)(s)), dense, atol=1e-12)
            np.testing.assert_allclose(np.asarray(s * g), np.asarray(t) * dense)
        # And a sparse gradient goes wherever an array goes.
        np.testing.assert_array_equal(np.asarray(mt.compile(lambda g: g + 1.0)(mt.grad(loss)(t))), dense + 1.0)
        np.testing.assert_allclose(np.asarray(mt.distribute(mt.grad(loss)(t), mesh, a=mt.Shard(0))), dense)
    closed_over = mt.grad(lambda t: (t[ids] ** 3).sum())(t)
    dense = np.array(closed_over)
    f = mt.compile(lambda x: (x * closed_over, closed_over))
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(f(t)[0]), np.asarray(t) * dense)
    assert f.signatures == 1


def test_small_arrays_and_reads_of_much_are_dense():
    ids = mt.asarray([1])
    assert type(mt.grad(lambda t: t[ids].sum())(mt.zeros((SMALLEST // 4 - 1, 4)))._buf) is np.ndarray
    assert type(mt.grad(lambda t: t[ids].sum())(mt.zeros((SMALLEST // 4, 4)))._buf) is SparseCotangent
    half = mt.zeros((SMALLEST // 4, 4))
    assert type(mt.grad(lambda t: t[1:].sum())(half)._buf) is np.ndarray
    assert type(mt.grad(lambda t: t[: SMALLEST // 8].sum())(half)._buf) is SparseCotangent
    # Many reads of few places are few places.
    often = mt.asarray(np.arange(3 * SMALLEST) % 5)
    g = mt.grad(lambda t: t[often].sum())(half)
    assert type(g._buf) is SparseCotangent
    assert mt.sparse_gradient(g).values.shape == (5, 4)
