"""Writes, choices and functions along axes, and weighted quantiles: what NumPy does in place, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt

rng = np.random.default_rng(4)
A = rng.normal(size=(4, 6))
B = rng.normal(size=(4, 6))
V = rng.normal(size=6)


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_put_along_axis_gives_an_array_of_its_own(axis):
    places = np.array([3, 17, 8]) if axis is None else np.take(np.argsort(A, axis=axis), [0, 1], axis=axis)
    values = rng.normal(size=places.shape)
    want = A.copy()
    np.put_along_axis(want, places, values, axis)

    def put(x: Any, v: Any) -> Any:
        return mt.put_along_axis(x, places, v, axis, inplace=False)

    x, v = mt.asarray(A), mt.asarray(values)
    split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
    for got in (put(x, v), mt.compile(put)(x, v), put(split, v)):
        np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(np.asarray(x), A)
    mt.check_grads(lambda x, v: (put(x, v) * B).sum(), x, v, order=1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mt.quantile(V, 0.5, weights=V + 9), ValueError, "method='inverted_cdf' alone"),
        (lambda: mt.quantile(V, 0.5, weights=-V, method="inverted_cdf"), ValueError, "must not be negative"),
        (lambda: mt.quantile(V, 0.5, weights=0 * V, method="inverted_cdf"), ValueError, "zero throughout"),
        (lambda: mt.quantile(A, 0.5, weights=V, method="inverted_cdf"), mt.errors.ShapeError, "along axis None"),
        (lambda: mt.choose([3], [1, 2]), IndexError, "not between 0 and 1"),
        (lambda: mt.choose([-1], [1, 2]), IndexError, "not between 0 and 1"),
        (lambda: mt.compile(lambda i: mt.choose(i, [1, 2]))(mt.asarray([2])), IndexError, "out of bounds|between"),
        (lambda: mt.choose([0.0], [1, 2]), mt.errors.DTypeError, "takes integers"),
        (lambda: mt.put_along_axis(mt.ones((2, 2)), [[0]], 1, 1), mt.errors.NumPyFunctionError, "inplace=False"),
        (lambda: np.put_along_axis(mt.ones((2, 2)), np.array([[0]]), 1, 1), mt.errors.NumPyFunctionError, "are values"),
        (lambda: mt.apply_along_axis(mt.sum, 0, np.ones((2, 0))), mt.errors.ShapeError, "no vectors along axis 0"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_traced_weights_that_are_zero_give_nan():
    def median(x, w):
        return mt.quantile(x, 0.5, weights=w, method="inverted_cdf")

    x = mt.asarray(V)
    assert mt.isnan(mt.compile(median)(x, mt.zeros(6)))
    with pytest.raises(mt.errors.DTypeError, match="traced"):
        mt.compile(median)(x.astype(mt.int64), mt.zeros(6))
