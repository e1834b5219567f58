"""Distributions by transforms: Kolmogorov and Smirnov's test against SciPy's, the same numbers on any mesh, gradients
of parameters."""

from __future__ import annotations

import numpy as np
import pytest
import scipy  # whose parts are imported where they are used

import meshtape as mt

KEY = mt.random.key(7)
N = 20_000

# (name, arguments before the shape, keywords, SciPy's distribution)
CASES = [
    ("laplace", (), {"loc": 1.0, "scale": 2.0}, scipy.stats.laplace(1.0, 2.0)),
    ("logistic", (), {"loc": -1.0, "scale": 0.5}, scipy.stats.logistic(-1.0, 0.5)),
    ("cauchy", (), {"loc": 2.0, "scale": 3.0}, scipy.stats.cauchy(2.0, 3.0)),
    ("lognormal", (), {"mean": 0.3, "sigma": 0.7}, scipy.stats.lognorm(0.7, scale=np.exp(0.3))),
    ("rayleigh", (), {"scale": 2.0}, scipy.stats.rayleigh(scale=2.0)),
    ("weibull", (1.7,), {"scale": 2.0}, scipy.stats.weibull_min(1.7, scale=2.0)),
    ("pareto", (2.5,), {"scale": 3.0}, scipy.stats.pareto(2.5, scale=3.0)),
    ("triangular", (-1.0, 0.5, 2.0), {}, scipy.stats.triang(0.5, -1.0, 3.0)),
    ("triangular", (0.0, 0.0, 2.0), {}, scipy.stats.triang(0.0, 0.0, 2.0)),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "expected"), CASES)
@pytest.mark.parametrize("dtype", [mt.float64, mt.float32])
def test_distributions(name, args, kwargs, expected, dtype):
    """With a fixed key the outcome is fixed; at 20,000 draws a distance of 0.012 between the distribution functions is
    found."""
    x = getattr(mt.random, name)(KEY, *args, (N,), dtype, **kwargs)
    assert x.dtype == dtype
    assert scipy.stats.kstest(np.asarray(x, np.float64), expected.cdf).pvalue > 1e-3


def test_geometric():
    x = np.asarray(mt.random.geometric(KEY, 0.3, (N,)))
    assert x.dtype == np.int64
    counts = np.bincount(x)[1:9]
    p = scipy.stats.geom(0.3).pmf(np.arange(1, 9))
    chi = scipy.stats.chisquare([*counts, N - counts.sum()], [*(N * p), N * (1 - p.sum())])
    assert chi.pvalue > 1e-3
    assert np.asarray(mt.random.geometric(KEY, 1.0, (5,), mt.int8)).tolist() == [1] * 5


def test_multivariate_normal():
    cov = np.array([[2.0, -1.2, 0.0], [-1.2, 1.5, 0.3], [0.0, 0.3, 0.5]])
    x = np.asarray(mt.random.multivariate_normal(KEY, mt.asarray([1.0, 2.0, 3.0]), mt.asarray(cov), (N,)))
    assert x.shape == (N, 3)
    white = np.linalg.solve(np.linalg.cholesky(cov), (x - [1, 2, 3]).T)
    for row in white:
        assert scipy.stats.kstest(row, scipy.stats.norm.cdf).pvalue > 1e-3
    np.testing.assert_allclose(white @ white.T / N, np.eye(3), atol=0.03)
    slope = mt.grad(lambda m: mt.sum(mt.random.multivariate_normal(KEY, m, mt.asarray(cov))))(mt.zeros(3))
    np.testing.assert_array_equal(slope, [1, 1, 1])


@pytest.mark.parametrize(("name", "args", "kwargs", "expected"), CASES[:7])
def test_the_same_numbers_compiled_and_on_any_mesh(name, args, kwargs, expected):
    draw = getattr(mt.random, name)
    x = draw(KEY, *args, (10,), **kwargs)
    np.testing.assert_allclose(mt.compile(lambda k: draw(k, *args, (10,), **kwargs))(KEY), x, rtol=1e-14)
    mesh = mt.Mesh({"m": 3})
    scales = mt.distribute(np.linspace(1, 2, 10), mesh, m=mt.Shard(0))
    split = draw(KEY, *args, **(kwargs | {"sigma" if name == "lognormal" else "scale": scales}))
    whole = draw(KEY, *args, **(kwargs | {"sigma" if name == "lognormal" else "scale": np.linspace(1, 2, 10)}))
    np.testing.assert_allclose(split, whole, rtol=1e-13)


def test_parameters_have_gradients():
    for name, args, kwargs, _ in CASES[:7]:
        draw = getattr(mt.random, name)
        for what, value in kwargs.items():
            rest = {k: v for k, v in kwargs.items() if k != what}
            mt.check_grads(lambda v, d=draw, a=args, w=what, r=rest: d(KEY, *a, (4,), **{w: v}, **r), mt.asarray(value))
    mt.check_grads(lambda a, b, c: mt.random.triangular(KEY, a, b, c, (5,)), *map(mt.asarray, (-1.0, 0.5, 2.0)))


def test_shapes_come_from_the_parameters():
    assert mt.random.laplace(KEY).shape == ()
    assert mt.random.laplace(KEY, loc=np.zeros((2, 1)), scale=np.ones(3)).shape == (2, 3)
    assert mt.random.weibull(KEY, np.ones(3), (4, 3), mt.bfloat16).dtype == mt.bfloat16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mt.random.laplace(KEY, (3,), scale=-1.0), ValueError, r"\[laplace\] scale must be positive"),
        (lambda: mt.random.laplace(KEY, (3,), scale=1j), mt.errors.DTypeError, "must be real numbers, got complex128"),
        (lambda: mt.random.pareto(KEY, np.ones(2), (3,)), mt.errors.ShapeError, r"\(2,\)"),
        (lambda: mt.random.pareto(KEY, np.ones((3, 1)), (3,)), mt.errors.ShapeError, "do not fit a result of shape"),
        (lambda: mt.random.geometric(KEY, 0.0), ValueError, "p must be above 0"),
        (lambda: mt.random.geometric(KEY, 0.5, (), mt.float32), mt.errors.DTypeError, "one of integers, got float32"),
        (lambda: mt.random.triangular(KEY, 1.0, 0.0, 2.0), ValueError, "must ascend"),
        (lambda: mt.random.multivariate_normal(KEY, np.ones(2), np.eye(3)), mt.errors.ShapeError, "has no covariance"),
        (lambda: mt.random.logistic(3, (2,)), mt.errors.DTypeError, "a key is uint64"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
