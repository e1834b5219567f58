"""Activations and losses beyond the common few: formulas in NumPy and SciPy are the oracle, differences check the
derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

import meshtape as mt

rng = np.random.default_rng(12)
X = np.concatenate([rng.normal(size=14) * 3, [0.25, -0.25]]).reshape(4, 4)
FAR = np.array([-1e300, -1e4, -50.0, 50.0, 1e4, 1e300])
Y = rng.normal(size=(4, 4))
P = rng.random(size=(4, 4))

FORMULAS = {
    "softplus": lambda x: np.logaddexp(x, 0),
    "log_sigmoid": special.log_expit,
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "celu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hard_tanh": lambda x: np.clip(x, -1, 1),
    "hard_sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "hard_silu": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "glu": lambda x: x[..., : x.shape[-1] // 2] * special.expit(x[..., x.shape[-1] // 2 :]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name):
    f, formula = getattr(mt.nn, name), FORMULAS[name]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(f(mt.asarray(X)), formula(X), rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(f(mt.asarray(FAR)), formula(FAR), rtol=1e-14)
        slopes = mt.grad(lambda x: mt.sum(f(x)))(mt.asarray(np.clip(FAR, -1e30, 1e30)))
    assert np.isfinite(np.asarray(slopes)).all()
    mt.check_grads(f, mt.asarray(X), order=2)
    for short in (mt.float32, mt.bfloat16, mt.float16):
        out = f(mt.asarray(X, short))
        assert out.dtype == short
        np.testing.assert_allclose(np.asarray(out, np.float64), formula(X), rtol=0.05, atol=0.02)
    np.testing.assert_allclose(mt.compile(f)(mt.asarray(X)), formula(X), rtol=1e-14, atol=1e-15)


def test_parameters_of_activations():
    x = mt.asarray(X)
    np.testing.assert_allclose(mt.nn.softplus(x, beta=2.0), np.logaddexp(2 * X, 0) / 2)
    np.testing.assert_allclose(mt.nn.elu(x, alpha=0.5), np.where(X > 0, X, 0.5 * np.expm1(X)))
    np.testing.assert_allclose(mt.nn.celu(x, alpha=2.0), np.where(X > 0, X, 2 * np.expm1(X / 2)))
    np.testing.assert_allclose(mt.nn.leaky_relu(x, negative_slope=0.2), np.where(X > 0, X, 0.2 * X))
    np.testing.assert_allclose(mt.nn.glu(x, axis=0), X[:2] * special.expit(X[2:]))
    with pytest.raises(mt.errors.ShapeError, match=r"axis -1 is cut in halves, and its length 3 is odd"):
        mt.nn.glu(mt.ones((2, 3)))
    with pytest.raises(ValueError, match="beta must be positive"):
        mt.nn.softplus(x, beta=0.0)


LOSSES = {
    "mse_loss": lambda x, y: (x - y) ** 2,
    "l1_loss": lambda x, y: np.abs(x - y),
    "huber_loss": lambda x, y: special.huber(1.0, x - y),
    "binary_cross_entropy": lambda x, y: -y * special.log_expit(x) - (1 - y) * special.log_expit(-x),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    f, formula = getattr(mt.nn, name), LOSSES[name]
    y = P if name == "binary_cross_entropy" else Y
    each = formula(X, y)
    np.testing.assert_allclose(f(mt.asarray(X), y, reduction="none"), each, rtol=1e-13)
    np.testing.assert_allclose(f(mt.asarray(X), y, reduction="sum"), each.sum(), rtol=1e-13)
    np.testing.assert_allclose(f(mt.asarray(X), y), each.mean(), rtol=1e-13)
    mt.check_grads(f, mt.asarray(X), mt.asarray(y), order=2)
    mesh = mt.Mesh({"m": 2})
    np.testing.assert_allclose(f(mt.distribute(X, mesh, m=mt.Shard(0)), y), each.mean(), rtol=1e-13)
    with pytest.raises(mt.errors.ShapeError, match=r"predictions \(4, 4\) and targets \(4,\) must have one shape"):
        f(mt.asarray(X), y[0])
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got 'max'"):
        f(mt.asarray(X), y, reduction="max")


def test_losses_of_short_floats_are_computed_in_float32():
    x, y = np.full(4096, 0.1), np.zeros(4096)
    out = mt.nn.mse_loss(mt.asarray(x, mt.bfloat16), mt.asarray(y, mt.bfloat16), reduction="sum")
    assert out.dtype == mt.bfloat16
    np.testing.assert_allclose(float(out), 4096 * float(mt.asarray(0.1, mt.bfloat16)) ** 2, rtol=0.004)


def test_huber_and_weights():
    np.testing.assert_allclose(
        mt.nn.huber_loss(mt.asarray(X), Y, delta=0.3, reduction="none"), special.huber(0.3, X - Y), rtol=1e-13
    )
    weighted = mt.nn.binary_cross_entropy(mt.asarray(X), P, positive_weight=3.0, reduction="none")
    np.testing.assert_allclose(weighted, -3 * P * special.log_expit(X) - (1 - P) * special.log_expit(-X), rtol=1e-13)
    assert float(mt.nn.binary_cross_entropy(mt.asarray([1e4]), [0.0])) == 1e4


def test_cosine_similarity():
    want = (X * Y).sum(1) / np.linalg.norm(X, axis=1) / np.linalg.norm(Y, axis=1)
    np.testing.assert_allclose(mt.nn.cosine_similarity(mt.asarray(X), mt.asarray(Y)), want, rtol=1e-13)
    assert float(mt.nn.cosine_similarity(mt.zeros(3), mt.ones(3))) == 0
    pairs = mt.nn.cosine_similarity(mt.asarray(X)[:, None], mt.asarray(Y)[None])
    assert pairs.shape == (4, 4)
    mt.check_grads(mt.nn.cosine_similarity, mt.asarray(X), mt.asarray(Y), order=2)
    slope = mt.grad(lambda x: mt.nn.cosine_similarity(x, mt.ones(3)))(mt.zeros(3))
    assert np.isfinite(np.asarray(slope)).all()
