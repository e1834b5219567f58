"""Cotangents of reads are collected, and made dense once: the same numbers as dense all the way."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.indexsum import IndexSum
from meshtape.arrays.rowsum import SMALLEST, RowSum
from meshtape.autodiff.rules.structure import _read

SHAPE = (40, 30, 20)
assert np.prod(SHAPE) >= SMALLEST

ints = st.integers(-20, 19)
arrays = st.lists(ints, min_size=1, max_size=4).map(np.asarray)
slices = st.builds(slice, st.integers(-5, 5), st.integers(10, 20), st.sampled_from([1, 2, 3]))
keys = st.one_of(
    ints,
    slices,
    arrays,
    st.tuples(ints, ints, ints),
    st.tuples(slices, arrays),
    st.tuples(arrays, st.just(slice(None)), ints),
    st.tuples(st.just(...), arrays),
    st.tuples(st.just(None), ints, slices),
)


@settings(deadline=None, max_examples=60)
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

    np.testing.assert_allclose(np.asarray(mt.grad(loss)(mt.asarray(x))), expected, rtol=1e-12, atol=1e-12)
    with mt.detect_anomaly():
        np.testing.assert_allclose(np.asarray(mt.grad(loss)(mt.asarray(x))), expected, rtol=1e-12, atol=1e-12)


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
    assert type(g._buf) is RowSum
    p = mt.asarray(np.asfortranarray(np.ones((600, 40))))
    updated = np.asarray(p - g * 0.5)
    assert updated[3].tolist() == [0] * 40
    assert updated[5].tolist() == [0.5] * 40
    assert updated.sum() == 600 * 40 - 1.5 * 40


def test_what_is_read_in_parts_is_collected_until_dense_takes_less():
    from meshtape.arrays import indexing
    from meshtape.arrays.program import ShapeDtype

    template, _ = indexing.parse(mt.zeros(SHAPE), 3)
    like = ShapeDtype(SHAPE, np.dtype(float))
    g = np.ones(SHAPE[1:])
    total = _read(np, g, (), like, template)
    assert type(total) is IndexSum
    for n in range(2, 39):
        total = total.plus(_read(np, g, (), like, template))
        assert type(total) is IndexSum
        assert total.count == n * g.size
    total = total.plus(_read(np, g, (), like, template)).plus(_read(np, g, (), like, template))
    assert type(total) is np.ndarray
    assert total[3].tolist() == np.full(SHAPE[1:], 40.0).tolist()
    assert total.sum() == 40 * g.size


def test_a_loop_over_elements_takes_memory_for_one_dense_cotangent():
    x = mt.asarray(np.ones(SMALLEST))

    def loss(x):
        total = x[0]
        for i in range(1, 300):
            total = total + x[i] * x[i]
        return total

    slope = mt.grad(loss)
    g = slope(x)
    assert g.tolist()[:301] == [1.0] + [2.0] * 299 + [0.0]
    with mt.Tape() as tape:
        tape.watch(x)
        y = loss(x)
    tracemalloc.start()
    try:
        tape.gradient(y, x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * x.nbytes


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
        y = x[3] * 2.0
    tape.gradient(y, x)
    assert kept[0][3].tolist() == 2.0
