"""Order statistics, NaN-reductions, counting, sampled curves: NumPy is the oracle, differences check the
derivatives."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meshtape
from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError, ShapeError

BOUNDED = settings(max_examples=40, deadline=None)
rng = np.random.default_rng(9)
numbers = st.floats(-10, 10, allow_subnormal=False) | st.just(np.nan)
some = hnp.arrays("float64", hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4), elements=numbers)


METHODS = [
    "linear",
    "lower",
    "higher",
    "midpoint",
    "nearest",
    "inverted_cdf",
    "averaged_inverted_cdf",
    "closest_observation",
    "interpolated_inverted_cdf",
    "hazen",
    "weibull",
    "median_unbiased",
    "normal_unbiased",
]


def n(x):
    return np.asarray(x)


@BOUNDED
@given(some, st.data())
def test_quantiles_are_numpys(x, data):
    axis = data.draw(st.none() | st.integers(-x.ndim, x.ndim - 1) | st.just(tuple(range(x.ndim))))
    method = data.draw(st.sampled_from(METHODS))
    q = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, [0.25, 0.5, 0.9], []]))
    keep = data.draw(st.booleans())
    got = mt.quantile(mt.asarray(x), q, axis=axis, keepdims=keep, method=method)
    want = np.quantile(x, q, axis=axis, keepdims=keep, method=method)
    assert got.shape == want.shape
    np.testing.assert_allclose(n(got), want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(n(mt.median(mt.asarray(x), axis=axis)), np.median(x, axis=axis), atol=1e-12)


def test_quantiles_of_infinities_and_integers():
    assert float(mt.median(mt.asarray([np.inf, -np.inf, 1.0]))) == 1
    assert float(mt.median(mt.asarray([1, 2, 4, 8]))) == 3
    assert float(mt.percentile(mt.asarray([0.0, 10.0]), 30)) == 3
    assert mt.median(mt.ones(3, dtype=mt.bfloat16)).dtype == mt.bfloat16
    with pytest.raises(ValueError, match="between 0 and 1"):
        mt.quantile(mt.ones(2), 1.5)
    assert np.isnan(n(mt.median(mt.ones((2, 0)), axis=1))).tolist() == [True, True]
    with pytest.raises(ShapeError, match="no elements"):
        mt.quantile(mt.ones((2, 0), dtype=mt.int8), 0.5, method="nearest")
    with pytest.raises(DTypeError, match="complex"):
        mt.median(mt.asarray([1j]))


@pytest.mark.parametrize("method", METHODS)
def test_quantiles_of_integers_are_numpys(method):
    x = np.array([[3, -7, 3], [100, 2, 2**60], [-(2**60), 5, 9], [8, 8, -1]])
    for q in (0.0, 0.25, 0.4, 1.0, [0.1, 0.5, 0.75]):
        got, want = mt.quantile(mt.asarray(x), q, axis=0, method=method), np.quantile(x, q, axis=0, method=method)
        np.testing.assert_allclose(n(got), want, rtol=1e-12)
        if method in ("lower", "higher", "nearest", "inverted_cdf", "closest_observation"):
            assert got.dtype == want.dtype == np.int64
            np.testing.assert_array_equal(n(got), want)


def test_quantile_errors_name_the_function_that_was_called():
    with pytest.raises(ValueError, match=r"\[percentile\] q must be between 0 and 100"):
        mt.percentile(mt.ones(2), 101)
    with pytest.raises(DTypeError, match=r"\[median\] complex"):
        mt.median(mt.asarray([1j]))
    with pytest.raises(ValueError, match="weibull"):
        mt.quantile(mt.ones(2), 0.5, method="most")


def test_topk():
    x = rng.normal(size=(3, 5))
    values, indices = mt.topk(mt.asarray(x), 2, axis=1)
    np.testing.assert_array_equal(n(values), -np.sort(-x, axis=1)[:, :2])
    np.testing.assert_array_equal(np.take_along_axis(x, n(indices), axis=1), n(values))
    assert mt.topk(mt.asarray([1, 3, 3, 2]), 3).indices.tolist() == [1, 2, 3]
    assert mt.topk(mt.asarray([1, 3, 3, 2]), 2, largest=False).values.tolist() == [1, 2]
    with pytest.raises(ShapeError, match=r"\[topk\]"):
        mt.topk(mt.ones(2), 3)


@BOUNDED
@given(some, st.data())
def test_reductions_that_pass_over_nan(x, data):
    axis = data.draw(st.none() | st.integers(-x.ndim, x.ndim - 1))
    keep = data.draw(st.booleans())
    for name in ("nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanvar", "nanstd"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            want = getattr(np, name)(x, axis=axis, keepdims=keep)
        got = getattr(mt, name)(mt.asarray(x), axis=axis, keepdims=keep)
        np.testing.assert_allclose(n(got), want, rtol=1e-9, atol=1e-9, err_msg=name)
        assert got.shape == want.shape


def test_nan_gets_no_gradient():
    x = mt.asarray([1.0, np.nan, 3.0])
    for name, want in (
        ("nansum", [1, 0, 1]),
        ("nanmean", [0.5, 0, 0.5]),
        ("nanmax", [0, 0, 1]),
        ("nanvar", [-1, 0, 1]),
    ):
        assert meshtape.grad(getattr(mt, name))(x).tolist() == want, name
    assert mt.nanmax(mt.asarray([1, 5])).tolist() == 5
    assert mt.nanmean(mt.asarray([1, 2])).tolist() == 1.5


def test_counting():
    x = np.array([0, 3, 1, 3])
    w = rng.normal(size=4)
    np.testing.assert_array_equal(n(mt.bincount(mt.asarray(x))), np.bincount(x))
    np.testing.assert_array_equal(n(mt.bincount(mt.asarray(x), weights=mt.asarray(w))), np.bincount(x, w))
    np.testing.assert_array_equal(n(mt.bincount(mt.asarray(x), length=6)), np.bincount(x, minlength=6))
    assert mt.bincount(mt.asarray([], dtype=mt.int64)).shape == (0,)
    with pytest.raises(ValueError, match="negative"):
        mt.bincount(mt.asarray([-1]), length=3)
    with pytest.raises(IndexError, match="out of bounds"):
        mt.bincount(mt.asarray([3]), length=3)
    meshtape.check_grads(lambda v: mt.bincount(mt.asarray(x), weights=v), w)
    wide = mt.bincount(mt.asarray([0, 0]), weights=mt.asarray([100, 100], dtype=mt.int8))
    assert (wide.tolist(), wide.dtype) == ([200], mt.int64)
    many = mt.bincount(mt.zeros(4096, dtype=mt.int64), weights=mt.ones(4096, dtype=mt.float16))
    assert (many.tolist(), many.dtype) == ([4096.0], mt.float16)  # which float16 itself counts to 2048 only
    counted = meshtape.compile(lambda v: mt.bincount(v, length=4))(mt.asarray(x))
    assert counted.tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("bins", [1, 4, [0.0, 0.5, 2.0], [-1, 0, 1]])
def test_histograms_are_numpys(bins):
    x = np.concatenate([rng.normal(size=50), [0.0, 0.5, 2.0, 1.0, np.nan]])
    finite = x[:-1]
    for weights in (None, rng.normal(size=x.size)):
        own = None if weights is None else mt.asarray(weights)
        got = mt.histogram(mt.asarray(x), bins, range=(-1.0, 2.0), weights=own)
        counts, edges = np.histogram(finite, bins, range=(-1, 2), weights=None if weights is None else weights[:-1])
        np.testing.assert_allclose(n(got.counts), counts)
        np.testing.assert_allclose(n(got.edges), edges)
    got = mt.histogram(mt.asarray(finite), bins, density=True)
    np.testing.assert_allclose(n(got.counts), np.histogram(finite, bins, density=True)[0])
    assert mt.histogram(mt.asarray([2.0, 2.0]), 3).counts.tolist() == np.histogram([2.0, 2.0], 3)[0].tolist()
    for rule in ("auto", "sturges", "fd"):
        got, want = mt.histogram(mt.asarray(finite), rule), np.histogram(finite, rule)
        np.testing.assert_array_equal(n(got.counts), want[0])
        np.testing.assert_allclose(n(got.edges), want[1])
    assert mt.histogram(mt.ones(2, dtype=mt.float32)).edges.dtype == mt.float32
    with pytest.raises(DTypeError, match="complex"):
        mt.histogram(mt.asarray([1j]))
    with pytest.raises(ValueError, match="ascending"):
        mt.histogram(mt.ones(2), [2.0, 1.0])


def test_interpolation_is_numpys():
    xp, fp = np.array([0.0, 1.0, 1.0, 3.0]), np.array([1.0, 5.0, 7.0, -1.0])
    x = np.array([[-1.0, 0.0, 0.25], [1.0, 3.0, 4.0], [2.5, 0.999, np.nan]])
    np.testing.assert_allclose(n(mt.interp(*map(mt.asarray, (x, xp, fp)))), np.interp(x, xp, fp))
    got = mt.interp(*map(mt.asarray, (x, xp, fp)), left=9.0, right=8.0)
    np.testing.assert_allclose(n(got), np.interp(x, xp, fp, 9.0, 8.0))
    meshtape.check_grads(mt.interp, np.array([0.3, 2.2]), np.array([0.0, 1.0, 3.0]), np.array([1.0, 5.0, -1.0]))


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize(("k", "m"), [(5, 3), (3, 5), (4, 4), (1, 3), (6, 2), (7, 4)])
def test_convolution_is_numpys(k, m, mode):
    a, v = rng.normal(size=k), rng.normal(size=m)
    np.testing.assert_allclose(n(mt.convolve(mt.asarray(a), mt.asarray(v), mode=mode)), np.convolve(a, v, mode))


def test_slopes_products_and_diagonals():
    x = rng.normal(size=(3, 4))
    for got, want in zip(mt.gradient(mt.asarray(x), 0.5), np.gradient(x, 0.5), strict=True):
        np.testing.assert_allclose(n(got), want)
    np.testing.assert_allclose(n(mt.gradient(mt.asarray(x), axis=1)), np.gradient(x, axis=1))
    places = [np.cumsum(rng.random(k) + 0.1) for k in x.shape]
    for order in (1, 2):
        for axes, steps in (((0, 1), places), ((1, 0), [places[1], 2.0]), ((-1,), [3.0]), ((1,), places[1:])):
            got = mt.gradient(mt.asarray(x), *steps, axis=axes, edge_order=order)
            want = np.gradient(x, *steps, axis=axes, edge_order=order)
            for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
                np.testing.assert_allclose(n(g), w)
    meshtape.check_grads(lambda a: mt.gradient(a, mt.asarray(places[0]), axis=0, edge_order=2), x)
    with pytest.raises(ShapeError, match="2 spacings for 1 axes"):
        mt.gradient(mt.asarray(x), 1.0, 2.0, axis=0)
    with pytest.raises(ShapeError, match="needs 3 elements"):
        mt.gradient(mt.ones(2), edge_order=2)
    with pytest.raises(ValueError, match="edge_order"):
        mt.gradient(mt.ones(4), edge_order=3)
    for a, b in (((2, 3), (4,)), ((2,), (2, 3)), ((2, 3), (3, 2)), ((), (3,)), ((2, 1, 3), (2, 2, 2))):
        p, q = rng.normal(size=a), rng.normal(size=b)
        np.testing.assert_allclose(n(mt.kron(mt.asarray(p), mt.asarray(q))), np.kron(p, q))
    for k in (-2, 0, 1):
        np.testing.assert_allclose(n(mt.diag(mt.asarray(x[0]), k=k)), np.diag(x[0], k))
        np.testing.assert_allclose(n(mt.diag(mt.asarray(x), k=k)), np.diag(x, k))


def test_derivatives():
    x = rng.normal(size=(3, 5))
    for f in (
        lambda a: mt.quantile(a, [0.1, 0.7], axis=1),
        lambda a: mt.topk(a, 2).values,
        lambda a: mt.convolve(a[0], a[1]),
        lambda a: mt.kron(a, a[:2]),
        lambda a: mt.gradient(a, axis=0),
        lambda a: mt.diag(a[0], k=1),
        lambda a: mt.repeat(a, mt.asarray([0, 2, 1]), axis=0),
        lambda a: mt.roll(mt.tile(a, (2, 1)), 2, axis=1),
        lambda a: mt.tril(a) * mt.linalg.diagonal(a)[:, None],
        lambda a: mt.linalg.cross(a[:, :3], a[:, 2:]),
        lambda a: mt.linalg.vector_norm(a, axis=0, ord=3),
        lambda a: mt.linalg.matrix_power(a[:, :3], 3),
    ):
        meshtape.check_grads(f, x)


def test_quantiles_of_several_dimensions_of_parts():
    x, q = np.arange(12.0).reshape(3, 4) ** 2, np.array([[0.1, 0.5], [0.25, 1.0]])
    for axis in (None, 0, -1):
        for keep in (False, True):
            got = mt.quantile(mt.asarray(x), mt.asarray(q), axis=axis, keepdims=keep)
            np.testing.assert_allclose(np.asarray(got), np.quantile(x, q, axis=axis, keepdims=keep))
    assert mt.percentile(mt.asarray(x), 100 * q, axis=1).shape == (2, 2, 3)
