"""Slopes at the ends of the line, at 0 and at NaN: eager and compiled alike, and never NaN where there is a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

nn = mt.nn
INF, NAN = math.inf, math.nan
POINTS = [-INF, -1e4, -0.0, 0.0, 1e4, INF]


def beside_zero(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of rows, of the row of each number and 0."""
    return lambda x: fn(mt.stack([x, mt.zeros_like(x)], axis=-1))


# Values and slopes at POINTS. NaN stands where there is no limit, or where the value is one by the formula that
# everybody has.
Row = tuple[Callable[..., Any], list[float], list[float]]
LN2 = math.log(2)
TABLE: dict[str, Row] = {
    "relu": (nn.relu, [0, 0, 0, 0, 1e4, INF], [0, 0, 0, 0, 1, 1]),
    "relu6": (nn.relu6, [0, 0, 0, 0, 6, 6], [0] * 6),
    "leaky_relu": (nn.leaky_relu, [-INF, -100, 0, 0, 1e4, INF], [0.01, 0.01, 0.01, 0.01, 1, 1]),
    "squared_relu": (nn.squared_relu, [0, 0, 0, 0, 1e8, INF], [0, 0, 0, 0, 2e4, INF]),
    "elu": (nn.elu, [-1, -1, 0, 0, 1e4, INF], [0, 0, 1, 1, 1, 1]),
    "celu": (lambda x: nn.celu(x, alpha=2.0), [-2, -2, 0, 0, 1e4, INF], [0, 0, 1, 1, 1, 1]),
    "selu": (
        nn.selu,
        [-1.7580993408473766] * 2 + [0, 0, 10507.009873554806, INF],
        [0, 0, 1.7580993408473766, 1.7580993408473766, 1.0507009873554805, 1.0507009873554805],
    ),
    "hard_tanh": (nn.hard_tanh, [-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]),
    "hard_sigmoid": (nn.hard_sigmoid, [0, 0, 0.5, 0.5, 1, 1], [0, 0, 1 / 6, 1 / 6, 0, 0]),
    "hard_silu": (nn.hard_silu, [0, 0, 0, 0, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "softplus": (nn.softplus, [0, 0, LN2, LN2, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "softplus, beta": (lambda x: nn.softplus(x, beta=2.0), [0, 0, LN2 / 2, LN2 / 2, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "log_sigmoid": (nn.log_sigmoid, [-INF, -1e4, -LN2, -LN2, 0, 0], [1, 1, 0.5, 0.5, 0, 0]),
    "softsign": (nn.softsign, [-1, -1 + 1 / 10001, 0, 0, 1 - 1 / 10001, 1], [0, 10001**-2, 1, 1, 10001**-2, 0]),
    "sigmoid": (nn.sigmoid, [0, 0, 0.5, 0.5, 1, 1], [0, 0, 0.25, 0.25, 0, 0]),
    "silu": (nn.silu, [0, 0, 0, 0, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "mish": (nn.mish, [0, 0, 0, 0, 1e4, INF], [0, 0, 0.6, 0.6, 1, 1]),
    "gelu": (nn.gelu, [0, 0, 0, 0, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "gelu, tanh": (lambda x: nn.gelu(x, approximate=True), [0, 0, 0, 0, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "glu, gate": (
        lambda x: nn.glu(mt.stack([mt.ones_like(x), x], axis=-1))[:, 0],
        [0, 0, 0.5, 0.5, 1, 1],
        [0, 0, 0.25, 0.25, 0, 0],
    ),
    "tanh": (mt.tanh, [-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]),
    "erf": (mt.erf, [-1, -1, 0, 0, 1, 1], [0, 0, 2 / math.sqrt(math.pi), 2 / math.sqrt(math.pi), 0, 0]),
    "atan": (mt.atan, [-math.pi / 2, -math.atan(1e4), 0, 0, math.atan(1e4), math.pi / 2], [0, 1e-8, 1, 1, 1e-8, 0]),
    "asinh": (mt.asinh, [-INF, -math.asinh(1e4), 0, 0, math.asinh(1e4), INF], [0, 1e-4, 1, 1, 1e-4, 0]),
    "exp": (mt.exp, [0, 0, 1, 1, INF, INF], [0, 0, 1, 1, INF, INF]),
    "expm1": (mt.expm1, [-1, -1, 0, 0, INF, INF], [0, 0, 1, 1, INF, INF]),
    "sqrt": (mt.sqrt, [NAN, NAN, 0, 0, 100, INF], [NAN, NAN, -INF, INF, 0.005, 0]),
    "cbrt": (
        mt.cbrt,
        [-INF, -np.cbrt(1e4), 0, 0, np.cbrt(1e4), INF],
        [0, 1e4 ** (-2 / 3) / 3, INF, INF, 1e4 ** (-2 / 3) / 3, 0],
    ),
    "abs": (mt.abs, [INF, 1e4, 0, 0, 1e4, INF], [-1, -1, 0, 0, 1, 1]),
    "hypot": (
        lambda x: mt.hypot(x, 3.0),
        [INF, math.hypot(1e4, 3), 3, 3, math.hypot(1e4, 3), INF],
        [-1, -1e4 / math.hypot(1e4, 3), 0, 0, 1e4 / math.hypot(1e4, 3), 1],
    ),
    "hypot with 0": (lambda x: mt.hypot(0.0, x), [INF, 1e4, 0, 0, 1e4, INF], [-1, -1, 0, 0, 1, 1]),
    "logaddexp": (lambda x: mt.logaddexp(x, 0.0), [0, 0, LN2, LN2, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "logaddexp, right": (lambda x: mt.logaddexp(0.0, x), [0, 0, LN2, LN2, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "logaddexp of itself": (
        lambda x: mt.logaddexp(x, x),
        [-INF, LN2 - 1e4, LN2, LN2, 1e4 + LN2, INF],
        [1, 1, 1, 1, 1, 1],
    ),
    "logaddexp2": (lambda x: mt.logaddexp2(x, 0.0), [0, 0, 1, 1, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "logsumexp": (beside_zero(lambda r: nn.logsumexp(r, axis=-1)), [0, 0, LN2, LN2, 1e4, INF], [0, 0, 0.5, 0.5, 1, 1]),
    "softmax": (beside_zero(lambda r: nn.softmax(r)[:, 0]), [0, 0, 0.5, 0.5, 1, NAN], [0, 0, 0.25, 0.25, 0, NAN]),
    "log_softmax": (
        beside_zero(lambda r: nn.log_softmax(r)[:, 0]),
        [-INF, -1e4, -LN2, -LN2, 0, NAN],
        [1, 1, 0.5, 0.5, 0, NAN],
    ),
    "remainder": (lambda x: mt.remainder(x, 3.0), [NAN, -1e4 % 3, 0, 0, 1, NAN], [1] * 6),
    "remainder by": (lambda x: mt.remainder(3.0, x), [-INF, -9997, NAN, NAN, 3, 3], [1, 1, NAN, NAN, 0, 0]),
    "remainder of a negative by": (
        lambda x: mt.remainder(-3.0, x),
        [-3, -3, NAN, NAN, 9997, INF],
        [0, 0, NAN, NAN, 1, 1],
    ),
    "norm": (lambda x: mt.linalg.vector_norm(x[:, None], axis=1), [INF, 1e4, 0, 0, 1e4, INF], [NAN, -1, 0, 0, 1, NAN]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("name", TABLE)
def test_values_and_slopes(name, dtype):
    fn, values, slopes = TABLE[name]
    x = mt.asarray(POINTS, dtype=dtype)
    eps = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3}[dtype]
    bound = float(np.finfo(dtype).max)
    expected = [np.where(np.abs(e) > bound, np.copysign(INF, e), e) for e in (np.asarray(values), np.asarray(slopes))]
    for way in (lambda f: f, mt.compile):
        found = way(fn)(x), way(mt.grad(lambda x: mt.sum(fn(x))))(x)
        for a, b, what in zip(found, expected, ("value", "slope"), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(np.asarray(a, dtype=np.float64), b, rtol=eps, atol=eps, err_msg=what)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TABLE)
def test_nan_stays_nan(name):
    """And its slope is NaN, or 0 where a function is made of straight pieces."""
    fn = TABLE[name][0]
    x = mt.asarray([NAN, 1.0])
    if not name.startswith(("relu", "squared_relu")):
        assert math.isnan(float(fn(x)[0]))
    slope = mt.grad(lambda x: mt.sum(fn(x)))(x)
    assert math.isnan(float(slope[0])) or float(slope[0]) in (0.0, 0.01, 1.0)
    assert math.isfinite(float(slope[1]))


def test_every_activation_is_in_the_table():
    """Whatever of `mt.nn` takes one array of any shape and gives one like it."""
    x = mt.asarray([[0.5, -0.5]])
    activations = set()
    for name in nn.__all__:
        try:
            same = getattr(nn, name)(x).shape == x.shape
        except (TypeError, ValueError):
            continue
        activations |= {name} if same else set()
    assert activations <= {n.split(",")[0] for n in TABLE}


# ----- deviations -----------------------------------------------------------------------------------------------------

DEVIATIONS = {
    "std": mt.std,
    "nanstd": mt.nanstd,
    "std, corrected": lambda x: mt.std(x, correction=1),
    "std of each": lambda x: mt.std(x[None], axis=1),
    "norm": lambda x: mt.linalg.vector_norm(x - mt.mean(x)),
}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "complex128"])
@pytest.mark.parametrize("name", DEVIATIONS)
def test_the_deviation_of_a_constant_has_slope_0(name, dtype):
    fn = DEVIATIONS[name]
    x = mt.ones(4, dtype=dtype) * 3
    loss = lambda x: mt.sum(fn(x))  # noqa: E731
    split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
    for found in (mt.grad(loss)(x), mt.compile(mt.grad(loss))(x), mt.grad(loss)(split)):
        assert np.asarray(found, dtype=np.complex128).tolist() == [0] * 4
    rows = mt.asarray([[1.0, 1.0], [1.0, 3.0]])
    np.testing.assert_allclose(np.asarray(mt.grad(lambda r: mt.sum(mt.std(r, axis=1)))(rows)), [[0, 0], [-0.5, 0.5]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fn", [mt.std, mt.var, mt.nanstd, mt.nanvar])
def test_one_element(fn):
    one = mt.asarray([5.0])
    assert (float(fn(one)), mt.grad(fn)(one).tolist()) == (0.0, [0.0])
    corrected = lambda x: fn(x, correction=1)  # noqa: E731
    for way in (lambda f: f, mt.compile):
        assert math.isnan(float(way(corrected)(one)))
        assert math.isnan(float(way(mt.grad(corrected))(one)[0]))


def test_the_gradient_of_a_determinant_with_nan_is_nan_there_alone() -> None:
    x = mt.asarray([[[NAN, 1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0, 5.0]]])
    for fn in (mt.grad(lambda x: mt.sum(mt.linalg.det(x))), mt.compile(mt.grad(lambda x: mt.sum(mt.linalg.det(x))))):
        with np.errstate(invalid="ignore"):
            got = fn(x).numpy()
        assert np.isnan(got[0]).all()
        np.testing.assert_allclose(got[1], [[5.0, -3.0], [-2.0, 1.0]], rtol=1e-12)
