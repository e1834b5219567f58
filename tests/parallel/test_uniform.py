"""Large arrays that functions and gradients make beside sharded ones: nobody has to distribute them, and they do not
travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.ops import triangles
from meshtape.parallel.mesh import mesh, sharded_array
from meshtape.parallel.sharding.splat import repeated_element


def large(*shape: int) -> np.ndarray:
    """More than is copied to every rank by itself."""
    x = np.random.default_rng(0).normal(size=shape)
    assert x.nbytes > sharded_array.IMPLICIT_LIMIT
    return x


def rows(x: np.ndarray) -> mt.Array:
    return mt.distribute(x, mt.Mesh({"a": 2}), a=mt.Shard(0))


LOSSES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: mt.sum(x * x),
    "mean": lambda x: mt.mean(mt.tanh(x)),
    "linear": lambda x: mt.sum(x * 2),
    "along a dimension": lambda x: mt.sum(mt.sum(x, axis=1) ** 2 + mt.sum(-x)),
    "part": lambda x: mt.sum(x[:200] * 3),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_sums_of_large_arrays(name, compiled):
    value = large(400, 400)
    x = rows(value)

    def step(x: Any) -> Any:
        return x - 0.5 * mt.grad(LOSSES[name])(x)

    got = (mt.compile(step) if compiled else step)(x)
    assert got.sharding == x.sharding
    np.testing.assert_allclose(np.asarray(got), np.asarray(step(mt.asarray(value))), rtol=1e-12)


def test_a_gradient_is_made_in_blocks_of_one_number():
    x = rows(large(400, 400))
    text = mt.explain(lambda x: x - mt.grad(lambda x: mt.sum(x * 2))(x), x)
    (constant,) = [line for line in text.splitlines() if "constant" in line]
    (made,) = [line for line in text.splitlines() if "broadcast_to" in line]
    assert constant.endswith(": float64[]"), text
    assert made.endswith(": float64[400@a,400]"), text


def attention(x: Any) -> Any:
    heads = mt.reshape(x[:, :16], (1, 1, -1, 16))
    return mt.nn.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "pad": lambda x: mt.pad(x, 1),
    "fft": lambda x: mt.abs(mt.fft.fft(x, n=80)),
    "cumulative_sum": lambda x: mt.cumulative_sum(x, axis=0, include_initial=True),
    "diag": lambda x: mt.diag(x[:, 0]),
    "tril": mt.tril,
    "triu": lambda x: mt.triu(x, k=-3),
    "attention": attention,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_make_large_arrays(monkeypatch, name):
    monkeypatch.setattr(sharded_array, "IMPLICIT_LIMIT", 512)
    monkeypatch.setattr(mesh, "IMPLICIT_LIMIT", 512)
    monkeypatch.setattr(triangles, "LARGE", 512)
    fn, value = FUNCTIONS[name], np.random.default_rng(1).normal(size=(37, 41))
    x = rows(value)
    for f in (fn, mt.compile(fn), mt.grad(lambda x: mt.sum(fn(x) ** 2))):
        np.testing.assert_allclose(np.asarray(f(x)), np.asarray(f(mt.asarray(value))), rtol=1e-9, atol=1e-9)


def test_a_large_array_of_a_user_is_one_number_too_or_refused():
    x = rows(large(400, 400))
    np.testing.assert_array_equal(np.asarray(x + np.full((400, 400), 2.0)), np.asarray(x) + 2)
    with pytest.raises(mt.errors.MeshError, match="only arrays up to 1 MiB"):
        x + np.asarray(x)


@pytest.mark.parametrize(
    ("value", "one"),
    [
        (np.full((2, 3), -1.5), -1.5),
        (np.full((2, 3), np.nan), np.nan),
        (np.zeros((3, 4)).T, 0.0),
        (np.zeros((4, 6))[::2, ::3], 0.0),
        (np.broadcast_to(np.float32(2), (1 << 40,)), 2.0),
        (np.full(5, 1, ml_dtypes.bfloat16), 1.0),
        (np.full(5, 1 + 2j), 1 + 2j),
        (np.ones((2, 2), bool), True),
        (np.array(7), 7),
        (np.array([0.0, -0.0]), None),
        (np.array([1.0, 2.0, 1.0]), None),
        (np.array([[1, 2], [1, 2], [1, 2]])[:, ::-1], None),
        (np.zeros((0, 3)), None),
        ([1.0], None),
    ],
)
def test_the_element_that_all_are(value, one):
    found = repeated_element(value)
    if one is None:
        assert found is None
        return
    assert (found.shape, found.dtype) == ((), value.dtype)
    np.testing.assert_array_equal(found, np.asarray(one, value.dtype))
