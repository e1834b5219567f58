"""The float32 error function against SciPy on a dense grid, and gelu with its derivatives against the composed form."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from scipy.special import erf as scipy_erf

import meshtape as mt
from meshtape.arrays.backends import erf as _erf
from meshtape.arrays.core.op import OPS

GRID = np.concatenate(
    [np.linspace(-6, 6, 1_000_001), np.geomspace(1e-38, 1, 100_000), -np.geomspace(1e-38, 1, 1000)]
).astype(np.float32)


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    return np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32))


def test_erf_of_float32_is_within_eight_units_in_the_last_place():
    exact = scipy_erf(GRID.astype(np.float64))
    got = np.asarray(mt.erf(mt.asarray(GRID)))
    assert got.dtype == np.float32
    error = ulps(got, exact)
    assert error.max() < 8
    assert error.mean() < 1
    assert np.array_equal(np.asarray(mt.erf(mt.asarray(-GRID))), -got)
    assert np.abs(got).max() == 1.0


def test_erf_at_the_edges():
    odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, 4.0, 1e30], np.float32)
    got = np.asarray(mt.erf(mt.asarray(odd)))
    np.testing.assert_array_equal(got[[0, 1, 2, 6, 7]], np.float32([1, -1, np.nan, 1, 1]))
    assert np.signbit(got[:5]).tolist() == [False, True, bool(np.signbit(got[2])), False, True]
    assert got[5] == np.float32(1e-45)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5, 3, 2)])
def test_erf_of_any_shape_and_layout(shape, monkeypatch):
    monkeypatch.setattr(_erf, "BLOCK", 4)
    x = np.linspace(-2, 2, math.prod(shape) or 1)[: math.prod(shape)].reshape(shape).astype(np.float32)
    for y in (x, x.T, x[..., ::-1] if shape else x):
        got = np.asarray(OPS["erf"].numpy(y))
        assert got.shape == y.shape
        np.testing.assert_allclose(got, scipy_erf(y), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_low_precision_is_rounded_once(dtype):
    x = np.linspace(-3, 3, 301).astype(dtype)
    exact = scipy_erf(x.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(mt.erf(mt.asarray(x))), exact.astype(np.float32).astype(dtype))
    wide = x.astype(np.float64)
    expected = (0.5 * wide * (1 + scipy_erf(wide / math.sqrt(2)))).astype(np.float32)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(mt.nn.gelu(mt.asarray(x))).astype(np.float32), expected, rtol=eps, atol=eps / 64
    )


def composed(x):
    return 0.5 * x * (1.0 + mt.erf(x * math.sqrt(0.5)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mt.float32, 2e-6), (mt.float64, 1e-12)])
def test_gelu_and_its_derivatives_to_fourth_order(dtype, tolerance):
    x = mt.asarray(np.linspace(-5, 5, 41), dtype=dtype)
    reference = mt.asarray(np.asarray(x), dtype=mt.float64)

    def up(f):
        return lambda x: mt.grad(lambda y: mt.sum(f(y)))(x)

    ours, plain = mt.nn.gelu, composed
    for order in range(5):
        got, expected = ours(x), plain(reference)
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=0, atol=tolerance * 4**order)
        compiled = mt.compile(ours)(x)
        np.testing.assert_allclose(np.asarray(compiled), np.asarray(expected), rtol=0, atol=tolerance * 4**order)
        ours, plain = up(ours), up(plain)


def test_gelu_is_recorded_as_one_call():
    x = mt.ones(3)
    with mt.Tape() as tape:
        tape.watch(x)
        mt.nn.gelu(x)
    assert [e.op.name for e in tape.entries] == ["gelu"]


def test_float32_gradient_at_edges_and_beside_them():
    odd = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-20, -1e-11, 1e-9, 0.5, -7.0, 1e30, -1e30, np.nan]
    x = np.float32(odd)
    wide = x.astype(np.float64)
    cdf = 0.5 * (1 + scipy_erf(wide / math.sqrt(2)))
    expected = cdf + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    got = np.asarray(mt.grad(lambda x: mt.sum(mt.nn.gelu(x)))(mt.asarray(x)))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=3e-7, atol=1e-9)
    # Also where zeros are not looked for because the least of a block is NaN, and under a cotangent of its own.
    seed = np.linspace(-1, 1, len(odd)).astype(np.float32)
    _, pull = mt.vjp(mt.nn.gelu, mt.asarray(x[::-1]))
    np.testing.assert_allclose(np.asarray(pull(mt.asarray(seed))[0]), expected[::-1] * seed, rtol=3e-7, atol=1e-9)
    dense = mt.asarray(GRID[:: len(GRID) // 5000])
    slope = np.asarray(mt.grad(lambda x: mt.sum(mt.nn.gelu(x)))(dense))
    wide = np.asarray(dense).astype(np.float64)
    exact = 0.5 * (1 + scipy_erf(wide / math.sqrt(2))) + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    assert np.abs(slope - exact).max() < 3e-7
