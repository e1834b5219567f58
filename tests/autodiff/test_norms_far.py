"""Norms of numbers whose mean is large beside their deviations: values and gradients keep the digits of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

N, C, P = 6, 4, 70


def batch(x: Any, w: Any, b: Any) -> Any:
    zero, one = mt.zeros(C, dtype=x.dtype), mt.ones(C, dtype=x.dtype)
    return mt.batch_norm(x, zero, one, w, b, training=True).out


# The function, and the dimension of its weights.
NORMS: dict[str, tuple[Callable[..., Any], int]] = {
    "layer_norm": (lambda x, w, b: mt.layer_norm(x, P, w, b), 2),
    "group_norm": (lambda x, w, b: mt.group_norm(x, 2, w, b), 1),
    "instance_norm": (mt.instance_norm, 1),
    "batch_norm": (batch, 1),
    "rms_norm": (lambda x, w, b: mt.rms_norm(x, P, w) + b, 2),
}


def inputs(dtype: Any, offset: float, axis: int) -> list[Any]:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((N, C, P)) + offset).astype(np.float32)
    x[0] -= np.float32(offset)  # near zero, beside rows that are not
    w, b = (rng.standard_normal(x.shape[axis]).astype(np.float32) for _ in range(2))
    return [mt.asarray(a.astype(dtype)) for a in (x, w, b)]


@pytest.mark.parametrize("offset", [0.0, 10.0, -1e4, 1e6])
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_are_those_of_float64(name: str, offset: float) -> None:
    fn, axis = NORMS[name]
    seed = np.random.default_rng(4).standard_normal((N, C, P)).astype(np.float32)

    def run(dtype: Any) -> list[np.ndarray]:
        args = inputs(dtype, offset, axis)
        value, pull = mt.vjp(fn, *args)
        return [np.asarray(a) for a in (value, *pull(mt.asarray(seed.astype(dtype))))]

    for got, want in zip(run(np.float32), run(np.float64), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "instance_norm"])
def test_a_row_has_the_same_result_whatever_stands_beside_it(name: str) -> None:
    fn, axis = NORMS[name]
    x, w, b = inputs(np.float32, 1e4, axis)
    nothing = x.at[3].set(float("nan"))
    together, beside_nan = np.asarray(fn(x, w, b)), np.asarray(fn(nothing, w, b))
    assert np.isnan(beside_nan[3]).all()
    for i in (0, 1, 5):
        np.testing.assert_array_equal(beside_nan[i], together[i])


@pytest.mark.parametrize("level", [1.0, 1e4, -1e6])
def test_what_does_not_deviate_is_zero(level: float) -> None:
    x = mt.full((3, 1023), level, dtype=mt.float32)
    assert np.abs(np.asarray(mt.layer_norm(x, 1023))).max() < 1e-4
    out = batch(mt.full((5, C, 31), level, dtype=mt.float32), None, None)
    assert np.abs(np.asarray(out)).max() < 1e-4
