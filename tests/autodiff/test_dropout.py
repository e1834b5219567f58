"""Dropout and a sum in one call, and masks that stay the same where values are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

KEY = mt.random.key(11)


def pair(dtype: Any) -> tuple[mt.Array, mt.Array]:
    x, y = np.random.default_rng(0).standard_normal((2, 6, 5))
    return mt.asarray(x).astype(dtype), mt.asarray(y[0]).astype(dtype)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [mt.float32, mt.float64], ids=str)
def test_the_fused_call_is_the_two_calls_to_the_bit(dtype: Any, rate: float) -> None:
    seed = mt.asarray(np.arange(30.0).reshape(6, 5)).astype(dtype)
    found = [
        (out, *pull(seed))
        for out, pull in (
            mt.vjp(fn, *pair(dtype))
            for fn in (
                lambda x, y: mt.nn.dropout_add(x, y, rate, key=KEY),
                lambda x, y: mt.nn.dropout(x, rate, key=KEY) + y,
            )
        )
    ]
    for a, b in zip(*found, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_none(rate: float) -> None:
    for call in (mt.nn.dropout_add, lambda x, y, rate, key: mt.nn.dropout(x, rate, key=key)):
        with pytest.raises(ValueError, match="between 0 and 1, got"):
            call(*pair(mt.float32), rate, key=KEY)


@pytest.mark.parametrize("how", [mt.checkpoint, mt.compile, lambda f: mt.compile(mt.checkpoint(f))])
def test_the_mask_is_that_of_the_plain_run(how: Callable[..., Any]) -> None:
    def block(x: mt.Array, y: mt.Array) -> mt.Array:
        return mt.nn.dropout_add(mt.tanh(mt.nn.dropout(x, 0.5, key=KEY)), y, 0.5, key=mt.random.fold_in(KEY, 1))

    def gradients(f: Callable[..., Any]) -> list[np.ndarray]:
        return [np.asarray(g) for g in mt.grad(lambda x, y: mt.sum(f(x, y) ** 2), argnums=(0, 1))(*pair(mt.float64))]

    for found, expected in zip(gradients(how(block)), gradients(block), strict=True):
        np.testing.assert_array_equal(found, expected)
