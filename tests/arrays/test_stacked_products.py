"""Products of NumPy's arrays: stacks of rows that are multiplied at once, dtypes that differ, and gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.errors import ShapeError
from meshtape.arrays.ops.matmul import product

DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128, np.int64])
@pytest.mark.parametrize("lead", [(5, 12), (2, 3, 10), (60, 1), (0, 4), (1, 60)])
def test_a_stack_of_rows_times_one_matrix(lead: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(s).astype(dtype) for s in ((*lead, 30), (30, 50)))
    for a in (x, np.asfortranarray(x)):
        found = product(a, y)
        assert (found.shape, found.dtype) == ((*lead, 50), np.dtype(dtype))
        np.testing.assert_allclose(found, np.matmul(a, y), rtol=1e-5, atol=1e-5)
        out = np.empty((*lead, 50), dtype)
        assert product(a, y, out) is out
        np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize("lead", [(5, 12), (60,)])
def test_dtypes_that_differ_meet_in_the_wider_one(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((*lead, 64)).astype(np.float32), rng.standard_normal((64, 80))
    for a, b in ((x, y), (x.astype(np.float64), y.astype(np.float32)), (x, y.astype(">f4"))):
        found = product(a, b)
        assert found.dtype == np.matmul(a, b).dtype
        np.testing.assert_allclose(found, np.matmul(a, b), rtol=1e-5, atol=1e-5)


def test_lengths_that_differ_are_refused_as_before() -> None:
    for a, b in (((3, 40, 50), (40, 50)), ((40, 50), (40, 50)), ((3, 40, 50), (4, 50, 40)), ((60,), (50, 60))):
        with pytest.raises(ShapeError, match=r"\[matmul\]"):
            mt.ones(a) @ mt.ones(b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_products_of_moderate_matrices(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, y, g = (mt.asarray(rng.standard_normal(s).astype(dtype)) for s in ((3, 60, 70), (70, 80), (3, 60, 80)))
    dx, dy = mt.grad(lambda x, y: mt.sum((x @ y) * g), argnums=(0, 1))(x, y)
    a, b, c = (np.asarray(v, np.float64) for v in (x, y, g))
    rtol = 1e-4 if dtype == np.float32 else 1e-11
    np.testing.assert_allclose(np.asarray(dx), c @ b.T, rtol=rtol, atol=rtol * 10)
    np.testing.assert_allclose(np.asarray(dy), np.einsum("bij,bik->jk", a, c), rtol=rtol, atol=rtol * 10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("lead", [(5, 12), (60,)])
def test_floats_of_two_bytes_are_summed_in_float32(lead: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (mt.asarray(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in ((*lead, 900), (900, 50)))
    expected = np.asarray(x).astype(np.float64) @ np.asarray(y).astype(np.float64)
    half = float(mt.finfo(x.dtype).eps) / 2
    found = x @ y
    assert found.dtype == x.dtype
    assert (np.abs(np.asarray(found).astype(np.float64) - expected) <= half * np.abs(expected) + 1e-3).all()


def test_infinities_are_warned_of_in_stacks_too() -> None:
    x, y = np.ones((5, 14, 64)), np.ones((64, 70))
    x[0, 5, 7], y[7, 3] = math.inf, 0
    with pytest.warns(RuntimeWarning, match="invalid value encountered in matmul"):
        found = product(x, y)
    assert np.isnan(found[0, 5, 3])
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        product(x, y)
