"""Derivatives of every elementwise function to the third, against 60 digits: at 0, at ties, near poles, in the
tails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import mpmath as mp
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays import OPS
from meshtape.arrays.core import shape_rules
from meshtape.arrays.core.op import recording
from meshtape.autodiff.rules import RULES

nn = mt.nn
Real = Callable[[Any], Any]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def softplus(x: Any) -> Any:
    return mp.log1p(mp.exp(x))


def beside(x: Any, y: float) -> mt.Array:
    return mt.stack([x, mt.full_like(x, y)], axis=-1)


SMALL = [0.0, -0.0, 1e-30, 1e-20, -1e-20, 1e-12, 1e-8, -1e-8, 1e-5, -1e-4, 1e-3, 0.01, -0.01]
MIDDLE = [0.1, -0.3, 0.32, 0.5, -0.7, 0.9, 0.9999, -0.9999, 1.0, -1.0, 1.5, 2.0, -2.0, 3.0, -3.0, 5.0, -5.0]
FAR = [
    8.0,
    -8.0,
    15.0,
    -15.0,
    20.0,
    -20.0,
    50.0,
    -50.0,
    85.0,
    -85.0,
    100.0,
    -100.0,
    740.0,
    -740.0,
    1e4,
    -1e4,
    1e10,
    -1e10,
]
VERY_FAR = [1e20, -1e20, 1e30, -1e30]  # their squares are beyond float32
EVERYWHERE = SMALL + MIDDLE + FAR + VERY_FAR
NOT_ZERO = MIDDLE + FAR

# Ours, that of mpmath, and where.
TABLE: dict[str, tuple[Callable[[Any], Any], Real, list[float]]] = {
    "negative": (mt.negative, lambda x: -x, EVERYWHERE),
    "positive": (mt.positive, lambda x: +x, EVERYWHERE),
    "add": (lambda x: x + 1.0, lambda x: x + 1, EVERYWHERE),
    "subtract": (lambda x: 1.0 - x, lambda x: 1 - x, EVERYWHERE),
    "multiply": (lambda x: x * x, lambda x: x * x, SMALL + MIDDLE + FAR),
    "divide": (lambda x: 1.0 / x, lambda x: 1 / x, NOT_ZERO),
    "divided": (lambda x: x / 3.0, lambda x: x / 3, EVERYWHERE),
    "reciprocal": (mt.reciprocal, lambda x: 1 / x, NOT_ZERO),
    "square": (mt.square, lambda x: x * x, SMALL + MIDDLE + FAR),
    "power of 3": (lambda x: x**3, lambda x: x**3, SMALL + MIDDLE),
    "power of an array": (lambda x: x ** mt.asarray(3.0, dtype=x.dtype), lambda x: x**3, SMALL + MIDDLE),
    "power of 2.5": (lambda x: x**2.5, lambda x: x ** mp.mpf(2.5), [p for p in MIDDLE if p > 0]),
    "power to x": (lambda x: 2.0**x, lambda x: mp.mpf(2) ** x, SMALL + MIDDLE),
    "x to the x": (lambda x: x**x, lambda x: x**x, [p for p in MIDDLE if p > 0]),
    "sqrt": (mt.sqrt, mp.sqrt, [p for p in MIDDLE + FAR if p > 0]),
    "cbrt": (mt.cbrt, lambda x: mp.sign(x) * mp.cbrt(abs(x)), NOT_ZERO),
    "hypot": (lambda x: mt.hypot(x, 1.0), lambda x: mp.sqrt(x * x + 1), EVERYWHERE),
    "hypot, right": (lambda x: mt.hypot(1.0, x), lambda x: mp.sqrt(x * x + 1), EVERYWHERE),
    "exp": (mt.exp, mp.exp, SMALL + MIDDLE + [-20.0, -85.0, -740.0]),
    "exp2": (mt.exp2, lambda x: mp.mpf(2) ** x, SMALL + MIDDLE),
    "expm1": (mt.expm1, mp.expm1, SMALL + MIDDLE + [-20.0, -85.0, -740.0]),
    "log": (mt.log, mp.log, [p for p in MIDDLE + FAR + VERY_FAR if p > 0]),
    "log2": (mt.log2, lambda x: mp.log(x, 2), [p for p in MIDDLE + FAR + VERY_FAR if p > 0]),
    "log10": (mt.log10, mp.log10, [p for p in MIDDLE + FAR + VERY_FAR if p > 0]),
    "log1p": (mt.log1p, mp.log1p, [p for p in SMALL + MIDDLE + FAR if p > -0.99]),
    "logaddexp": (lambda x: mt.logaddexp(x, 0.0), softplus, EVERYWHERE),
    "logaddexp, right": (lambda x: mt.logaddexp(0.0, x), softplus, EVERYWHERE),
    "logaddexp, tied": (lambda x: mt.logaddexp(x, 1.0), lambda x: mp.log(mp.exp(x) + mp.e), SMALL + MIDDLE),
    "logaddexp of two": (lambda x: mt.logaddexp(x, x * 2), lambda x: x + softplus(x), SMALL + MIDDLE),
    "logaddexp2": (lambda x: mt.logaddexp2(x, 0.0), lambda x: mp.log(1 + mp.mpf(2) ** x, 2), SMALL + MIDDLE + FAR),
    "sin": (mt.sin, mp.sin, SMALL + MIDDLE + [8.0, -20.0, 1e4]),
    "cos": (mt.cos, mp.cos, SMALL + MIDDLE + [8.0, -20.0, 1e4]),
    "tan": (mt.tan, mp.tan, SMALL + MIDDLE),
    "asin": (mt.asin, mp.asin, [p for p in SMALL + MIDDLE if abs(p) < 1]),
    "acos": (mt.acos, mp.acos, [p for p in SMALL + MIDDLE if abs(p) < 1]),
    "atan": (mt.atan, mp.atan, SMALL + MIDDLE + FAR),
    "atan2": (lambda x: mt.atan2(x, 1.0), mp.atan, EVERYWHERE),
    "atan2, right": (lambda x: mt.atan2(1.0, x), lambda x: mp.atan2(1, x), EVERYWHERE),
    "sinh": (mt.sinh, mp.sinh, SMALL + MIDDLE + FAR),
    "cosh": (mt.cosh, mp.cosh, SMALL + MIDDLE + FAR),
    "tanh": (mt.tanh, mp.tanh, EVERYWHERE),
    "asinh": (mt.asinh, mp.asinh, SMALL + MIDDLE + FAR),
    "acosh": (mt.acosh, mp.acosh, [p for p in MIDDLE + FAR if p > 1]),
    "atanh": (mt.atanh, mp.atanh, [p for p in SMALL + MIDDLE if abs(p) < 1]),
    "erf": (mt.erf, mp.erf, EVERYWHERE),
    "sigmoid": (nn.sigmoid, sigmoid, EVERYWHERE),
    "silu": (nn.silu, lambda x: x * sigmoid(x), EVERYWHERE),
    "swiglu": (lambda x: nn.swiglu(x, x + 1.0), lambda x: x * sigmoid(x) * (x + 1), SMALL + MIDDLE),
    "gelu": (nn.gelu, lambda x: x * mp.ncdf(x), EVERYWHERE),
    "softplus": (nn.softplus, softplus, EVERYWHERE),
    "softplus, beta": (lambda x: nn.softplus(x, beta=2.0), lambda x: softplus(2 * x) / 2, EVERYWHERE),
    "log_sigmoid": (nn.log_sigmoid, lambda x: -softplus(-x), EVERYWHERE),
    "mish": (nn.mish, lambda x: x * mp.tanh(softplus(x)), EVERYWHERE),
    "elu": (nn.elu, lambda x: x if x > 0 else mp.expm1(x), [p for p in EVERYWHERE if p]),
    "celu": (lambda x: nn.celu(x, alpha=2.0), lambda x: x if x > 0 else 2 * mp.expm1(x / 2), [p for p in EVERYWHERE if p]),
    "sinc": (mt.sinc, lambda x: mp.sinc(mp.pi * x), SMALL + MIDDLE + [8.25, -20.5]),
    "binary_cross_entropy": (
        lambda x: nn.binary_cross_entropy(x, mt.full_like(x, 0.25), reduction="none"),
        lambda x: 0.25 * softplus(-x) + 0.75 * softplus(x),
        SMALL + MIDDLE + FAR,
    ),
    "softmax": (lambda x: nn.softmax(beside(x, 0.0))[..., 0], sigmoid, EVERYWHERE),
    "log_softmax": (lambda x: nn.log_softmax(beside(x, 0.0))[..., 0], lambda x: -softplus(-x), SMALL + MIDDLE + FAR),
    "logsumexp": (lambda x: nn.logsumexp(beside(x, 0.0), axis=-1), softplus, SMALL + MIDDLE + FAR),
    "ldexp": (lambda x: mt.ldexp(x, 3), lambda x: 8 * x, EVERYWHERE),
    "fmod": (lambda x: mt.fmod(x, 4.0), lambda x: x, [*SMALL, 1.0, -1.0, 2.0]),
    "modf": (lambda x: mt.modf(x)[0], lambda x: x, [*SMALL, 0.5, -0.5]),
    "huber_loss": (
        lambda x: nn.huber_loss(x, x * 0, reduction="none"),
        lambda x: x * x / 2 if abs(x) < 1 else abs(x) - 0.5,
        [*SMALL, 0.5, -0.5, 2.0, -2.0, 50.0],
    ),
    "angle": (mt.angle, lambda x: mp.mpf(0), [p for p in EVERYWHERE if p >= 0 and math.copysign(1, p) > 0]),
}  # fmt: skip

# Straight pieces, whose conventions are fixed by hand in test_rules and test_limits, and what is no function of real
# numbers.
OTHERS = {"abs", "sign", "maximum", "minimum", "fmax", "fmin", "relu", "where", "copysign", "remainder"}
OTHERS |= {"conj", "real", "imag", "gelu_backward", "heaviside", "nextafter"}  # the slope of gelu; steps


class Seen:
    def __init__(self) -> None:
        self.names: set[str] = set()

    def watches(self, x: Any) -> bool:
        return True

    def record(self, op: Any, *rest: Any) -> None:
        self.names.add(op.name)


def test_every_elementwise_op_with_a_rule_is_here() -> None:
    seen = Seen()
    with recording(seen), np.errstate(all="ignore"):
        for fn, _, _ in TABLE.values():
            fn(mt.asarray([0.5, 2.0]))
    wanted = {n for n, op in OPS.items() if op in RULES and op.infer is shape_rules.elementwise}
    assert wanted - OTHERS <= seen.names


@contextmanager
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def derivative(fn: Callable[[Any], Any], order: int) -> Callable[[Any], Any]:
    """Of each element by itself."""
    for _ in range(order):
        fn = mt.grad(lambda x, f=fn: mt.sum(f(x)))
    return fn


def pushed(fn: Callable[[Any], Any], order: int) -> Callable[[Any], Any]:
    for _ in range(order):
        fn = lambda x, f=fn: mt.jvp(f, [x], [mt.ones_like(x)])[1]  # noqa: E731
    return fn


WAYS: dict[str, Callable[[Callable[[Any], Any], int], Callable[[Any], Any]]] = {
    "grad": derivative,
    "jvp": pushed,
    "compiled": lambda fn, order: mt.compile(derivative(fn, order)),
    "checkpoint": lambda fn, order: derivative(mt.checkpoint(fn), order),
    "hvp": lambda fn, order: (
        derivative(fn, order) if order < 2 else lambda x: mt.hvp(lambda y: mt.sum(derivative(fn, order - 2)(y)), x, mt.ones_like(x))
    ),
}  # fmt: skip


def exact(real: Real, p: float, order: int) -> float:
    with mp.workdps(80):
        x = mp.mpf(p)
        h = mp.mpf(10) ** -25 * max(abs(x), mp.mpf(10) ** -12)
        return float(mp.diff(real, x, order, h=h) if order else real(x))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", TABLE)
def test_derivatives(name: str, dtype: str) -> None:
    fn, real, points = TABLE[name]
    info = ml_dtypes.finfo(dtype)
    rounded = {p: float(np.asarray(p).astype(dtype)) for p in points if abs(p) < float(info.max)}
    # (What is 0 or 1 only when it is rounded may lie where the function has a kink, or a pole.)
    x = mt.asarray([v for p, v in rounded.items() if abs(v) not in (0, 1) or v == p]).astype(dtype)
    at = np.asarray(x, np.float64)
    orders = range(4) if dtype == "float64" else range(3)
    for order in orders:
        wanted = np.array([exact(real, float(p), order) for p in at])
        known = np.abs(wanted) < float(info.max) / 100
        # What is bounded is known to the digits of its bound: of 1, or of the value where that is larger.
        size = np.maximum(np.abs(wanted), 1.0)
        units = {0: 8, 1: 32, 2: 64, 3: 1024}[order]
        for way, of in WAYS.items():
            with quiet():
                got = np.asarray(of(fn, order)(x), np.float64)
            off = np.abs(got - wanted) / size / float(info.eps)
            worst = int(np.nanargmax(np.where(known, np.nan_to_num(off, nan=np.inf), 0)))
            assert not known[worst] or off[worst] <= units, (way, order, at[worst], got[worst], wanted[worst])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("way", [lambda f: f, mt.compile, mt.checkpoint], ids=["eager", "compiled", "checkpoint"])
def test_ties_of_two_operands(way: Callable[..., Any], dtype: str) -> None:
    """The Hessian of logaddexp where its operands are equal; of two equal infinities each has half of the slope, and no
    more."""
    for y in (0.0, 1.0, -300.0, 1e30):
        x = mt.asarray([y, y], dtype=dtype)
        for f in (lambda x: mt.logaddexp(x[0], x[1]), lambda x: nn.logsumexp(x)):
            assert np.asarray(mt.grad(way(f))(x), np.float64).tolist() == [0.5, 0.5]
            assert np.asarray(mt.hessian(way(f))(x), np.float64).tolist() == [[0.25, -0.25], [-0.25, 0.25]]
    with quiet():
        for y in (np.inf, -np.inf):
            f = lambda x: mt.logaddexp(x[0], x[1])  # noqa: E731
            x = mt.asarray([y, y], dtype=dtype)
            assert np.asarray(mt.grad(way(f))(x), np.float64).tolist() == [0.5, 0.5]
            assert np.asarray(mt.hessian(way(f))(x), np.float64).tolist() == [[0, 0], [0, 0]]
    for logits, labels in (
        (mt.zeros(1, dtype=dtype), mt.ones(1, dtype=dtype)),
        (mt.zeros(1, dtype=dtype), mt.zeros(1, dtype=dtype)),
    ):
        f = lambda x: nn.binary_cross_entropy(x, labels)  # noqa: E731, B023
        assert np.asarray(mt.hessian(way(f))(logits), np.float64).tolist() == [[0.25]]


@pytest.mark.parametrize("way", [lambda f: f, mt.compile, mt.checkpoint], ids=["eager", "compiled", "checkpoint"])
def test_the_second_derivatives_of_a_power(way: Callable[..., Any]) -> None:
    """By base and exponent: where the exponent is 0 its derivative by the base is 0, and the derivative of that is
    not."""
    x, y = np.meshgrid([0.5, 1.0, 2.0, 1e-90], [0.0, 1.0, -1.0, 2.5])
    f = lambda p: mt.sum(p[0] ** p[1])  # noqa: E731
    mixed = mt.grad(lambda y: mt.sum(way(mt.grad(lambda x: f((x, y))))(mt.asarray(x))))(mt.asarray(y))
    other = mt.grad(lambda x: mt.sum(way(mt.grad(lambda y: f((x, y))))(mt.asarray(y))))(mt.asarray(x))
    wanted = x ** (y - 1) * (1 + y * np.log(x))
    for found in (mixed, other):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-13)
    # Where the base is 0 too, subnormal, or no number.
    at = mt.asarray([0.0, 1e-310, math.nan, math.inf, 2.0])
    with quiet():
        for order in (1, 2):
            assert derivative(way(lambda x: x ** mt.zeros(5)), order)(at).tolist() == [0.0] * 5
    with np.errstate(all="raise"):  # nothing is divided by a base of 0 whose exponent is not
        found = mt.grad(lambda x: mt.sum(way(lambda x: x ** mt.asarray([3.0, 2.0]))(x)))(mt.asarray([0.0, 1.0]))
    assert found.tolist() == [0.0, 2.0]


def test_a_tie_of_logaddexp_on_a_mesh() -> None:
    mesh = mt.Mesh({"data": 2})
    x = mt.distribute(mt.zeros(4), mesh, data=mt.Shard(0))
    assert np.asarray(mt.grad(lambda x: mt.sum(mt.grad(lambda y: mt.sum(nn.softplus(y)))(x)))(x)).tolist() == [0.25] * 4


KINKED = {
    "relu": nn.relu, "relu6": nn.relu6, "squared_relu": nn.squared_relu, "mish": nn.mish, "hard_sigmoid": nn.hard_sigmoid,
    "hard_silu": nn.hard_silu, "maximum": lambda x: mt.maximum(x, 0.0), "maximum, right": lambda x: mt.maximum(0.0, x),
    "minimum": lambda x: mt.minimum(x, 6.0), "clip": lambda x: mt.clip(x, 0.0, 6.0),
    "by NaN": lambda x: mt.maximum(x * 0 + 1.0, x), "abs": mt.abs, "softplus": nn.softplus, "elu": nn.elu, "gelu": nn.gelu,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", KINKED)
def test_the_slope_at_nan_is_nan(name: str, dtype: str) -> None:
    x = mt.asarray([math.nan, 1.0] * 40, dtype=dtype)
    f = KINKED[name]
    for way in (lambda f: f, mt.compile):
        with quiet():
            slope = np.asarray(way(mt.grad(lambda x: mt.sum(f(x))))(x), np.float64)
        assert np.isnan(slope[::2]).all()
        assert np.isfinite(slope[1::2]).all()


def test_the_ends_of_straight_pieces() -> None:
    """relu's convention, which is JAX's and PyTorch's, for the functions made like it; halves for clip, maximum and
    minimum."""
    slopes = lambda f, *at: mt.grad(lambda x: mt.sum(f(x)))(mt.asarray(at)).tolist()  # noqa: E731
    assert slopes(nn.relu6, -1.0, 0.0, 3.0, 6.0, 7.0) == [0, 0, 1, 0, 0]
    assert slopes(nn.hard_tanh, -2.0, -1.0, 0.5, 1.0, 2.0) == [0, 0, 1, 0, 0]
    assert slopes(nn.hard_sigmoid, -3.0, 0.0, 3.0) == [0, pytest.approx(1 / 6), 0]
    assert slopes(lambda x: mt.clip(x, 0.0, 6.0), 0.0, 3.0, 6.0) == [0.5, 1, 0.5]
    assert nn.relu6(mt.asarray([-1, 3, 9])).tolist() == [0, 3, 6]
    assert nn.relu6(mt.asarray([-1, 3, 9])).dtype == mt.int64
    assert nn.hard_tanh(mt.asarray([-3, 0, 3])).tolist() == [-1, 0, 1]
    assert slopes(lambda x: mt.fmod(x, 2.0), -2.0, -0.0, 0.0, 2.0, 3.0) == [1] * 5
    assert slopes(lambda y: mt.fmod(5.0, y), 2.0, -2.0) == [-2, 2]
    assert slopes(lambda x: mt.modf(x)[0], -2.0, 0.0, 2.5) == [1, 1, 1]
    assert slopes(mt.angle, 0.0, -1.0, math.inf) == [0, 0, 0]
    assert mt.angle(mt.asarray([math.inf, -math.inf])).tolist() == [0.0, math.pi]


@pytest.mark.parametrize("way", [lambda f: f, mt.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("scale", [1e-25, 1e-10, 1.0, 1e25])
def test_the_angle_of_points_of_any_size(way: Callable[..., Any], scale: float) -> None:
    """The square of their distance is beyond float32 long before that is."""
    at = mt.asarray([3.0 * scale, 4.0 * scale], dtype=mt.float32)
    slope = np.asarray(way(mt.grad(lambda p: mt.atan2(p[0], p[1])))(at), np.float64)
    np.testing.assert_allclose(slope * scale, [4 / 25, -3 / 25], rtol=1e-6)
