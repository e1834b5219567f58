"""Parameters of NumPy's functions that analysts use: honoured as NumPy does, eager, compiled and sharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt

RNG = np.random.default_rng(4)
X = RNG.normal(size=(4, 6))
MASK = RNG.random((4, 6)) < 0.6
MASK[0] = False  # a row of which nothing is left
ROW = np.asarray([True, False, True, True, False, True])
INTS = RNG.integers(-3, 4, size=(4, 6))

WHERE = ["sum", "prod", "any", "all", "mean", "var", "std"]
INITIAL = ["sum", "prod", "max", "min"]


def same(found: Any, expected: Any) -> None:
    assert (found.dtype, found.shape) == (np.asarray(expected).dtype, np.shape(expected))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", [MASK, ROW, MASK[:, :1]], ids=["full", "row", "column"])
@pytest.mark.parametrize("host", [X, INTS, X > 0, X + 1j * X[::-1]], ids=["float", "int", "bool", "complex"])
@pytest.mark.parametrize("name", WHERE)
def test_where(name, host, mask):
    fn = getattr(mt, name)
    x, m = mt.asarray(host), mt.asarray(mask)
    split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
    for axis in (None, 0, 1):
        for keepdims in (False, True):
            expected = getattr(np, name)(host, axis=axis, keepdims=keepdims, where=mask)
            call = lambda x: fn(x, axis=axis, keepdims=keepdims, where=m)  # noqa: B023, E731
            for found in (call(x), mt.compile(call)(x), call(split)):
                same(found, expected)


@pytest.mark.parametrize("host", [X, INTS], ids=["float", "int"])
@pytest.mark.parametrize("name", INITIAL)
def test_initial(name, host):
    x = mt.asarray(host)
    for axis in (None, 0, 1, (0, 1)):
        same(getattr(mt, name)(x, axis=axis, initial=2), getattr(np, name)(host, axis=axis, initial=2))
        expected = getattr(np, name)(host, axis=axis, initial=2, where=MASK)
        same(getattr(mt, name)(x, axis=axis, initial=2, where=MASK), expected)
    none = host[:0]
    same(getattr(mt, name)(mt.asarray(none), axis=0, initial=5), getattr(np, name)(none, axis=0, initial=5))


def test_slopes_and_errors_of_where():
    x, m = mt.asarray(X[1]), mt.asarray(ROW)
    for fn in (mt.sum, mt.prod, mt.mean, mt.var, mt.std):
        mt.check_grads(lambda x: fn(x, where=m), x, rtol=1e-3)  # noqa: B023
    assert (
        mt.grad(lambda x: mt.mean(x, where=m))(mt.asarray([1, mt.nan, 3, 4, mt.nan, 6.0])).tolist()
        == (ROW / 4).tolist()
    )
    with pytest.raises(mt.errors.DTypeError, match="where must be boolean"):
        mt.sum(x, where=x)
    with pytest.raises(mt.errors.ShapeError, match=r"\(2, 6\).*\(6,\)"):
        mt.sum(x, where=mt.ones((2, 6), dtype=bool))
    with pytest.raises(ValueError, match=r"\[max\].*initial="):
        mt.max(x, where=m)


@pytest.mark.parametrize("shape", [(24,), (6, 4), (-1, 3), (2, -1, 3), 24, -1])
def test_reshape_in_the_order_of_fortran(shape):
    host = X.reshape(2, 3, 4)
    x = mt.asarray(host)
    expected = host.reshape(shape, order="F")
    same(mt.reshape(x, shape, order="F"), expected)
    same(x.reshape(shape, order="F"), expected)
    same(mt.compile(lambda x: mt.reshape(x, shape, order="F"))(x), expected)
    for found in (x.flatten("F"), x.ravel("F"), mt.ravel(x, "F"), mt.ravel(x, order="F")):
        same(found, host.ravel("F"))
    with pytest.raises(ValueError, match="'C' or 'F', got 'A'"):
        mt.reshape(x, shape, order="A")


def test_places_of_parameters():
    x = mt.asarray([np.nan, 1.0, np.inf])
    same(mt.nan_to_num(x, True, 7.0, 8.0), np.nan_to_num(np.asarray(x), True, 7.0, 8.0))
    same(mt.nan_to_num(x, copy=False, nan=-1.0), np.nan_to_num(np.asarray(x), nan=-1.0))
    with pytest.raises(TypeError):  # NumPy's third is `axisa`
        mt.cross(mt.ones(3), mt.ones(3), 0)
    same(mt.tile(mt.asarray([1, 2]), 3), np.tile([1, 2], 3))
    same(mt.tile(mt.asarray([[1], [2]]), np.int64(2)), np.tile([[1], [2]], 2))
    for indexing in ("xy", "ij"):
        ours = mt.meshgrid(mt.arange(2), mt.arange(3), indexing=indexing, sparse=True)
        for a, b in zip(ours, np.meshgrid(np.arange(2), np.arange(3), indexing=indexing, sparse=True), strict=True):
            same(a, b)
