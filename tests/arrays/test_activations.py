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
    for beta in (0.0, -1.0, np.nan):
        with pytest.raises(mt.errors.ArgumentError, match="beta must be positive"):
            mt.nn.softplus(x, beta=beta)
    with pytest.raises(mt.errors.ArgumentError, match="alpha must not be 0"):
        mt.nn.celu(x, alpha=0)


CURVES = {
    **{n: getattr(mt.nn, n) for n in FORMULAS if n != "glu"},
    **{n: getattr(mt.nn, n) for n in ("gelu", "silu", "relu", "sigmoid")},
    "tanh": mt.tanh,
    "gelu by tanh": lambda x: mt.nn.gelu(x, approximate=True),
    "softplus, beta 10": lambda x: mt.nn.softplus(x, beta=10.0),
    "softplus, beta 0.1": lambda x: mt.nn.softplus(x, beta=0.1),
    "elu, alpha 3": lambda x: mt.nn.elu(x, alpha=3.0),
    "celu, alpha 0.1": lambda x: mt.nn.celu(x, alpha=0.1),
    "celu, alpha 10": lambda x: mt.nn.celu(x, alpha=10.0),
    "leaky_relu, slope 0.3": lambda x: mt.nn.leaky_relu(x, negative_slope=0.3),
    "swiglu": lambda x: mt.nn.swiglu(x, x),
    "glu": lambda x: mt.nn.glu(mt.stack([x, x], axis=-1))[..., 0],
}
SLOPES = {"sigmoid": lambda x: special.expit(x) * special.expit(-x), "tanh": lambda x: 1 / np.cosh(x) ** 2}


def ranks(x: np.ndarray) -> np.ndarray:
    """The numbers of a dtype counted from 0, with their sign."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    return np.where(bits < 0, -(bits & (1 << 8 * x.dtype.itemsize - 1) - 1), bits)


@pytest.mark.parametrize("dtype", [mt.float8_e4m3fn, mt.float8_e5m2, mt.float16, mt.bfloat16], ids=str)
@pytest.mark.parametrize("name", CURVES)
def test_every_short_float_has_the_value_and_the_slope_of_float64_rounded(name: str, dtype: mt.DType) -> None:
    """To the last digit or the one beside it: no step between is rounded, overflows, or is beyond a corner."""
    f, short = CURVES[name], np.dtype(dtype)
    x = np.arange(1 << 8 * short.itemsize, dtype=f"u{short.itemsize}").view(short)
    x = mt.asarray(x[np.isfinite(x.astype(np.float32))])
    with np.errstate(all="ignore"):
        (value, pull), (exact, pull_exact) = mt.vjp(f, x), mt.vjp(f, x.astype(mt.float64))
        pairs = [(value, exact), (pull(mt.ones_like(value))[0], pull_exact(mt.ones_like(exact))[0])]
        if name in SLOPES:  # float64 has them of the result, which is 1 far from 0
            pairs[1] = pairs[1][0], SLOPES[name](np.asarray(x, np.float64))
        for got, want in pairs:
            assert got.dtype == short
            found, wanted = np.asarray(got), np.asarray(want).astype(short)
            lost = np.isnan(wanted.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), lost)
            assert np.abs(ranks(found) - ranks(wanted))[~lost].max() <= 1


def test_curves_of_float32_keep_their_digits_far_from_zero() -> None:
    far = np.float32([-3e38, -1e7, -20.0, -5.5, 5.5, 1e7, 3e38])
    curves = [CURVES[n] for n in ("gelu by tanh", "softsign", "softplus, beta 10", "hard_sigmoid", "hard_silu")]
    for f in curves:
        (value, pull), (exact, pull_exact) = mt.vjp(f, mt.asarray(far)), mt.vjp(f, mt.asarray(far, mt.float64))
        np.testing.assert_allclose(value, exact, rtol=1e-4, atol=1e-38)
        np.testing.assert_allclose(
            pull(mt.ones_like(value))[0], pull_exact(mt.ones_like(exact))[0], rtol=1e-4, atol=1e-38
        )
    corner = np.nextafter(np.float32(3), np.float32(0))
    assert mt.grad(mt.nn.hard_sigmoid)(mt.asarray(corner)) == np.float32(1 / 6)


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


def test_swiglu_of_two_dtypes_is_computed_in_the_wider_one():
    gate, up = np.linspace(-3, 3, 64, dtype=np.float32), np.linspace(1, 2, 64, dtype=np.float32)
    short = mt.asarray(gate).astype(mt.bfloat16)
    found = mt.nn.swiglu(short, mt.asarray(up))
    assert found.dtype == np.float32
    wide = np.asarray(short).astype(np.float64)
    np.testing.assert_allclose(np.asarray(found), wide / (1 + np.exp(-wide)) * up, rtol=3e-7)
