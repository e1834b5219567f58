"""Sorting, searching, sets and running sums: NumPy is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meshtape
from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError, ShapeError, TracedValueError

BOUNDED = settings(max_examples=40, deadline=None)
few = hnp.arrays(
    "float64", hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5), elements=st.integers(-3, 3)
)


@BOUNDED
@given(few, st.data())
def test_sorting(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    a = mt.asarray(x)
    np.testing.assert_array_equal(np.asarray(mt.sort(a, axis=axis)), np.sort(x, axis=axis))
    np.testing.assert_array_equal(np.asarray(mt.argsort(a, axis=axis)), np.argsort(x, axis=axis, kind="stable"))
    # Equals keep their order in the descending direction too: the order of the negated numbers.
    down = mt.argsort(a, axis=axis, descending=True)
    np.testing.assert_array_equal(np.asarray(down), np.argsort(-x, axis=axis, kind="stable"))
    np.testing.assert_array_equal(
        np.asarray(mt.take_along_axis(a, down, axis=axis)), np.asarray(mt.sort(a, axis=axis, descending=True))
    )


def test_nan_is_last_in_ascending_order():
    x = mt.asarray([np.nan, 1.0, -np.inf, np.nan])
    np.testing.assert_array_equal(np.asarray(mt.sort(x)), [-np.inf, 1, np.nan, np.nan])
    assert mt.argsort(x).tolist() == [2, 1, 0, 3]
    assert mt.sort(mt.asarray([2.0, 1.0], dtype=mt.bfloat16)).tolist() == [1, 2]


@BOUNDED
@given(few)
def test_sets(x):
    a = mt.asarray(x)
    values, indices, inverse, counts = mt.unique_all(a)
    want = np.unique_all(x)
    for got, expected in zip((values, indices, inverse, counts), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got), expected)
        assert got.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(mt.unique_counts(a).counts), want.counts)
    np.testing.assert_array_equal(np.asarray(mt.unique_inverse(a).inverse_indices), want.inverse_indices)
    for invert in (False, True):
        got = mt.isin(a, mt.asarray([1.0, -2.0, 7.0]), invert=invert)
        np.testing.assert_array_equal(np.asarray(got), np.isin(x, [1.0, -2.0, 7.0], invert=invert))


def test_sets_of_special_values():
    nan = float("nan")
    assert mt.unique_counts(mt.asarray([nan, 1.0, nan])).counts.tolist() == [1, 1, 1]
    assert mt.isin(mt.asarray([nan, 1.0]), mt.asarray([nan, 1.0])).tolist() == [False, True]
    assert mt.isin(mt.asarray([1, 2]), mt.asarray([], dtype=mt.int64)).tolist() == [False, False]
    assert mt.isin(3, mt.asarray([1, 3])).tolist() is True
    assert mt.isin(mt.asarray([1.5, 2.0]), 2).tolist() == [False, True]


def test_a_distinct_value_keeps_its_gradient():
    g = meshtape.grad(lambda x: mt.sum(mt.unique_values(x) * mt.asarray([1.0, 10.0])))(mt.asarray([3.0, 1.0, 3.0]))
    assert g.tolist() == [10, 1, 0]


@BOUNDED
@given(few)
def test_searching(x):
    a = mt.asarray(x)
    for got, want in zip(mt.nonzero(a), np.nonzero(x), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(np.asarray(mt.count_nonzero(a, axis=0)), np.count_nonzero(x, axis=0))
    table = np.array([-2.0, 0.0, 0.0, 1.0])
    for side in ("left", "right"):
        got = mt.searchsorted(mt.asarray(table), a, side=side)
        np.testing.assert_array_equal(np.asarray(got), np.searchsorted(table, x, side=side))
    got = mt.searchsorted(mt.asarray(table[::-1]), a, sorter=mt.asarray([3, 2, 1, 0]))
    np.testing.assert_array_equal(np.asarray(got), np.searchsorted(table, x))


def test_numbers_wider_than_the_table_are_not_rounded():
    assert int(mt.searchsorted(mt.asarray([1, 2, 3]), mt.asarray(2.5))) == 2
    assert int(mt.searchsorted(mt.asarray([1, 2, 3]), 2.5)) == 2


def test_taking():
    x = np.arange(24.0).reshape(2, 3, 4)
    i = np.array([2, 0, -1])
    np.testing.assert_array_equal(np.asarray(mt.take(mt.asarray(x), mt.asarray(i), axis=1)), np.take(x, i, axis=1))
    k = np.argsort(-x, axis=1)[:, :2]
    np.testing.assert_array_equal(
        np.asarray(mt.take_along_axis(mt.asarray(x), mt.asarray(k), axis=1)), np.take_along_axis(x, k, axis=1)
    )
    spread = mt.take_along_axis(mt.asarray(x), mt.asarray([[[1]]]), axis=2)  # the other dimensions broadcast
    np.testing.assert_array_equal(np.asarray(spread), x[:, :, 1:2])
    np.testing.assert_array_equal(np.asarray(mt.take(mt.asarray(x), mt.asarray(i))), np.take(x, i))  # flattened
    with pytest.raises(DTypeError, match="integers"):
        mt.take(mt.asarray(x), mt.asarray([1.0]), axis=0)
    with pytest.raises(IndexError, match="out of bounds"):
        mt.take_along_axis(mt.asarray(x), mt.asarray([[[4]]]), axis=2)


@BOUNDED
@given(few, st.data())
def test_running(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    a = mt.asarray(x)
    for initial in (False, True):
        for ours, theirs in ((mt.cumulative_sum, np.cumulative_sum), (mt.cumulative_prod, np.cumulative_prod)):
            got = ours(a, axis=axis, include_initial=initial)
            np.testing.assert_array_equal(np.asarray(got), theirs(x, axis=axis, include_initial=initial))
    for n in (0, 1, 2):
        np.testing.assert_array_equal(np.asarray(mt.diff(a, axis=axis, n=n)), np.diff(x, n, axis))


def test_running_dtypes():
    assert mt.cumulative_sum(mt.ones(3, dtype=mt.int8)).dtype == mt.int64
    assert mt.cumulative_prod(mt.ones(3, dtype=mt.uint8), dtype=mt.uint8).dtype == mt.uint8
    assert mt.cumulative_sum(mt.ones(3, dtype=mt.bfloat16)).dtype == mt.bfloat16
    # 257 needs more digits than bfloat16 has: the sum is kept in float32.
    assert float(mt.cumulative_sum(mt.ones(300, dtype=mt.bfloat16))[-1]) == 300.0
    assert mt.diff(mt.asarray([True, False, False])).tolist() == [True, False]
    assert mt.diff(mt.asarray([1, 4]), prepend=0, append=mt.asarray([9])).tolist() == [1, 3, 5]


def test_shapes_that_depend_on_values_cannot_be_traced():
    for f in (mt.nonzero, mt.unique_values, mt.unique_all):
        with pytest.raises(TracedValueError):
            meshtape.compile(f)(mt.asarray([1.0, 0.0]))
    assert meshtape.compile(mt.sort)(mt.asarray([2.0, 1.0])).tolist() == [1, 2]


def test_errors():
    with pytest.raises(ShapeError, match=r"\[sort\] a 0-d array"):
        mt.sort(mt.asarray(1.0))
    with pytest.raises(IndexError, match=r"\[argsort\] axis 1"):
        mt.argsort(mt.ones(3), axis=1)
    with pytest.raises(ShapeError, match="needs an axis"):
        mt.cumulative_sum(mt.ones((2, 2)))
    with pytest.raises(ValueError, match="side"):
        mt.searchsorted(mt.ones(2), 1.0, side="middle")
    with pytest.raises(ShapeError, match="0-d"):
        mt.nonzero(mt.asarray(1))


def test_uint64_among_signed_integers_is_compared_exactly():
    # In float64, which the two give together, these neighbours are equal.
    far = 2**63
    unsigned, signed = np.array([5, far - 1, far, far + 1], np.uint64), np.array([-3, 5, far - 2, far - 1], np.int64)
    for side in ("left", "right"):
        for table, values in ((unsigned, signed), (signed, unsigned)):
            below = (lambda a, b: a < b) if side == "left" else (lambda a, b: a <= b)
            expected = [sum(below(t, v) for t in table.tolist()) for v in values.tolist()]
            assert mt.searchsorted(mt.asarray(table), mt.asarray(values), side=side).tolist() == expected
    assert mt.isin(mt.asarray(unsigned), mt.asarray(signed)).tolist() == [True, True, False, False]
    assert mt.isin(mt.asarray(signed), mt.asarray(unsigned), invert=True).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "bool", "int8", "uint32", "int64", "uint64"]
)
@pytest.mark.parametrize(("shape", "axis"), [((9, 400), 1), ((700, 4), 0), ((3000,), 0)])
def test_orders_of_many_elements_are_stable(shape: tuple[int, ...], axis: int, dtype: str) -> None:
    """Many are equal: NaN of both signs, zeros of both signs, numbers above half of the range."""
    x = np.asarray(mt.asarray(np.random.default_rng(3).integers(-200, 200, shape)).astype(dtype)).copy()
    wide = x
    if "float" in dtype:
        for i, v in enumerate([np.nan, -np.nan, -0.0, 0.0, np.inf, -np.inf]):
            x.reshape(-1)[i::17] = v
        wide = x.astype(np.float64)
    n = shape[axis]
    up = np.argsort(wide, axis=axis, kind="stable")
    down = n - 1 - np.flip(np.argsort(np.flip(wide, axis), axis=axis, kind="stable"), axis)
    for largest, want in ((False, up), (True, down)):
        np.testing.assert_array_equal(mt.argsort(mt.asarray(x), axis=axis, descending=largest), want)
        for k in (0, 1, 7, n // 3, n):
            values, places = mt.topk(mt.asarray(x), k, axis=axis, largest=largest)
            np.testing.assert_array_equal(places, np.take(want, range(k), axis=axis))
            values = np.asarray(values, wide.dtype)
            np.testing.assert_array_equal(values, np.take_along_axis(wide, np.asarray(places), axis=axis))
    if "float" not in dtype:
        return
    g = np.random.default_rng(4).standard_normal(shape)
    (got,) = meshtape.vjp(lambda x: mt.sort(x, axis=axis), mt.asarray(wide))[1](mt.asarray(g))
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(got), up, axis=axis), g)
