"""Functions that sum give for bfloat16, float16 and float8 what float64 gives, rounded: they add up in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt

DTYPES = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")}
N = 5000
rng = np.random.default_rng(0)
X, Y = (np.asarray(rng.uniform(0.5, 1.0, N)) for _ in range(2))
NEAR_ONE = np.r_[np.tile([0.875, 1.125], 16), np.ones(N - 32)]
FIRST = mt.asarray(np.zeros(N, int))
L, nn = mt.linalg, mt.nn


def zeros(x: Any, n: int = 1) -> mt.Array:
    return mt.zeros(n, dtype=x.dtype)


def knots(x: Any) -> mt.Array:
    return mt.asarray(np.linspace(0, 1, 9)).astype(x.dtype)


ONE: dict[str, Callable[[Any], Any]] = {
    "sum": mt.sum,
    "sum of rows": lambda x: mt.sum(x.reshape((N, 1)), axis=0),
    "sum in a dtype": lambda x: mt.sum(x.astype(mt.float32), dtype=x.dtype),
    "mean": mt.mean,
    "var": mt.var,
    "std": mt.std,
    "cumulative_sum": mt.cumulative_sum,
    "cumulative_sum in a dtype": lambda x: mt.cumulative_sum(x.astype(mt.float32), dtype=x.dtype),
    "at.add": lambda x: zeros(x).at[FIRST].add(x),
    "at.add of one number": lambda x: (zeros(x) + x[:1]).at[FIRST].add(1.0),
    "at.add of rows": lambda x: zeros(x, 2).reshape((1, 2)).at[FIRST[: N // 2]].add(x.reshape((N // 2, 2))),
    "einsum": lambda x: mt.einsum("i->", x),
    "einsum of three": lambda x: mt.einsum("i,i,i->", x, x, x),
    "trace": lambda x: mt.trace(mt.broadcast_to(x[:700], (700, 700))),
    "vector_norm": L.vector_norm,
    "vector_norm of one": lambda x: L.vector_norm(x, ord=1),
    "vector_norm of three": lambda x: L.vector_norm(x, ord=3),
    "matrix_norm": lambda x: L.matrix_norm(x.reshape((50, 100))),
    "matrix_norm of columns": lambda x: L.matrix_norm(x.reshape((N, 1)), ord=1),
    "trapezoid": mt.trapezoid,
    "trapezoid of steps": lambda x: mt.trapezoid(x, dx=0.5),
    "interp": lambda x: mt.interp(x, knots(x), knots(x)),
    "bincount": lambda x: mt.bincount(FIRST, weights=x),
    "average": mt.average,
    "nansum": mt.nansum,
    "nanmean": mt.nanmean,
    "nanvar": mt.nanvar,
    "nanstd": mt.nanstd,
    "nancumsum": mt.nancumsum,
    "cumsum": mt.cumsum,
    "median": mt.median,
    "quantile": lambda x: mt.quantile(x, 0.3),
    "logsumexp": nn.logsumexp,
    "softmax": nn.softmax,
    "log_softmax": nn.log_softmax,
    "layer_norm": lambda x: mt.layer_norm(x, N),
    "rms_norm": lambda x: mt.rms_norm(x, N),
    "group_norm": lambda x: mt.group_norm(x.reshape((1, 2, N // 2)), 2),
    "cross_entropy": lambda x: nn.cross_entropy(x.reshape((N // 2, 2)), FIRST[: N // 2], reduction="sum"),
    "pool": lambda x: nn.pool(x.reshape((1, 1, N)), 1000, kind="mean"),
    "polyval": lambda x: mt.polyval(x[:600], x[:20]),
    "unwrap": mt.unwrap,
    "global_norm": lambda x: mt.optim.global_norm([x]),
    "histogram of weights": lambda x: mt.histogram(mt.asarray(X), 1, range=(0.0, 2.0), weights=x).counts,
}
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": mt.matmul,
    "vecdot": mt.vecdot,
    "dot": mt.dot,
    "inner": mt.inner,
    "tensordot": lambda x, y: mt.tensordot(x, y, axes=1),
    "einsum of two": lambda x, y: mt.einsum("i,i->", x, y),
    "einsum in steps": lambda x, y: mt.einsum("ij,jk,k->", x.reshape((50, 100)), y.reshape((100, 50)), x[:50]),
    "convolve": lambda x, y: mt.convolve(x, y, mode="valid"),
    "correlate": lambda x, y: mt.correlate(x, y, mode="valid"),
    "weighted average": lambda x, y: mt.average(x, weights=y),
    "cov": lambda x, y: mt.cov(mt.stack([x, y])),
    "corrcoef": lambda x, y: mt.corrcoef(mt.stack([x, y + x])),
    "cosine_similarity": lambda x, y: nn.cosine_similarity(x, y),
    "mse_loss": lambda x, y: nn.mse_loss(x, y, reduction="sum"),
    "conv1d": lambda x, y: nn.conv1d(x.reshape((1, 1, N)), y.reshape((1, 1, N))),
    "polymul": lambda x, y: mt.polymul(x[:500], y[:500]),
    "polyfit": lambda x, y: mt.polyfit(x[:50], y[:50], 1),
    "lstsq": lambda x, y: L.lstsq(x.reshape((N // 2, 2)), y[: N // 2])[0],
}
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "prod": mt.prod,
    "cumulative_prod": mt.cumulative_prod,
    "nanprod": mt.nanprod,
    "at.multiply": lambda x: (zeros(x) + 1).at[FIRST].multiply(x),
    "at.multiply of rows": lambda x: (
        mt.ones((1, 2), dtype=x.dtype).at[FIRST[: N // 2]].multiply(x.reshape((N // 2, 2)))
    ),
}
CALLS = [
    *((n, f, (X,)) for n, f in ONE.items()),
    *((n, f, (X, Y)) for n, f in TWO.items()),
    *((n, f, (NEAR_ONE,)) for n, f in PRODUCTS.items()),
]


@pytest.mark.parametrize(("fn", "args"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_sums_are_those_of_float64_rounded(
    fn: Callable[..., Any], args: tuple[np.ndarray, ...], ulps: Callable[[Any, Any, Any], float]
) -> None:
    for short in DTYPES.values():
        xs = [mt.asarray(a.astype(short)) for a in args]
        with np.errstate(all="ignore"):
            got, want = fn(*xs), fn(*[x.astype(mt.float64) for x in xs])
            assert ulps(got, want, short) <= 2, short
        assert got.dtype == short or got.dtype == np.float32  # losses and norms of gradients stay wide


def test_the_result_of_several_operands_has_their_common_dtype() -> None:
    x, y = mt.ones(3, dtype=mt.bfloat16), mt.ones(3, dtype=mt.float32)
    assert mt.einsum("i,i->", x, y).dtype == mt.float32
    assert mt.einsum("i,i->", x, x).dtype == mt.bfloat16
    assert mt.interp(x, y, y).dtype == mt.float32


OF_EVERY = [
    "exp",
    "expm1",
    "exp2",
    "log",
    "log1p",
    "log2",
    "log10",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "sqrt",
    "cbrt",
    "reciprocal",
    "square",
    "sign",
    "floor",
    "ceil",
    "trunc",
    "rint",
]


def apart(got: Any, want: Any) -> np.ndarray:
    """How many numbers of two bytes lie between two of one dtype; of NaN and a number, a million."""
    places = [np.abs(a).view(np.int16).astype(int) * np.where(np.signbit(a), -1, 1) for a in (got, want)]
    nans = [np.isnan(a.astype(np.float64)) for a in (got, want)]
    return np.where(nans[0] | nans[1], (nans[0] ^ nans[1]) * 10**6, np.abs(places[0] - places[1]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OF_EVERY)
def test_functions_of_every_number(name: str, dtype: str) -> None:
    """The value is that of float64, rounded once; float16 may be its neighbour, and so may a slope."""
    fn: Any = getattr(mt, name)
    x = mt.asarray(np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]))
    value, pull = mt.vjp(fn, x)
    wide, wide_pull = mt.vjp(fn, x.astype(mt.float64))
    assert value.dtype == x.dtype
    assert apart(value.numpy(), wide.astype(x.dtype).numpy()).max() <= (dtype == "float16")
    if dtype == "bfloat16":  # of few numbers, too; of float16 the bits are NumPy's
        few = fn(x[15_000:17_000]).numpy()
        assert apart(few, value[15_000:17_000].numpy()).max() == 0

    slope = wide_pull(mt.ones_like(wide))[0].numpy()
    if name == "tanh":  # whose own slope has lost its digits in float64
        slope = np.cosh(x.astype(mt.float64).numpy()) ** -2.0
    there = (np.abs(slope) >= float(mt.finfo(x.dtype).smallest_normal)) | (slope == 0)
    there &= np.isfinite(wide.numpy()) | (name == "exp2")  # elsewhere the slope is what comes of infinities
    rounded = mt.asarray(slope).astype(x.dtype).numpy()
    assert apart(pull(mt.ones_like(value))[0].numpy()[there], rounded[there]).max() <= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["add", "subtract", "multiply", "divide", "remainder", "maximum", "minimum", "pow", "atan2"]
)
def test_functions_of_two_are_rounded_once(name: str, dtype: str) -> None:
    fn: Any = getattr(mt, name)
    bits = np.random.default_rng(1).integers(0, 1 << 16, (2, 300, 300)).astype(np.uint16)
    for x, y in (bits, (bits[0], bits[1][0]), (bits[0].T, bits[1]), (bits[0][:9, :9], bits[1][0, :9])):
        a, b = (mt.asarray(v.view(DTYPES[dtype])) for v in (x, y))
        want = fn(a.astype(mt.float64), b.astype(mt.float64)).astype(a.dtype).numpy()
        for run in (fn, mt.compile(fn)):
            got = run(a, b)
            assert got.dtype == a.dtype
            assert apart(got.numpy(), want).max() <= (dtype == "float16" and name in ("pow", "atan2"))


ALONE = [
    *OF_EVERY,
    *("nn.sigmoid", "nn.silu", "nn.gelu", "nn.elu", "nn.softplus", "nn.mish", "nn.softsign", "nn.hard_silu"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ALONE)
def test_the_value_of_an_element_is_its_own(name: str, dtype: str) -> None:
    """Whatever stands beside it, and however the array lies: of every number, to the bit."""
    fn: Any = getattr(nn if name.startswith("nn.") else mt, name.removeprefix("nn."))
    x = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])

    def bits(v: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(v.astype(np.float32)), 0x7FFF, v.view(np.uint16))

    def value(v: np.ndarray) -> np.ndarray:
        return bits(np.asarray(fn(mt.asarray(v))))

    whole = value(x)
    np.testing.assert_array_equal(value(x[::-1])[::-1], whole)
    np.testing.assert_array_equal(value(x.reshape(256, 256).T).T.reshape(-1), whole)
    np.testing.assert_array_equal(np.concatenate([value(x[i : i + 293]) for i in range(0, x.size, 293)]), whole)
    step = 13 if name == "nn.sigmoid" else 997
    assert [value(v).item() for v in x[::step].reshape(-1, 1)] == whole[::step].tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_sigmoid_of_numpy_is_one_function(dtype: Any) -> None:
    """Without the kernels in C, too: beside numbers whose exponential overflows, and without dimensions."""
    numpy_form: Any = mt.arrays.OPS["sigmoid"].impl
    x = np.concatenate([np.linspace(-110, 110, 2001), np.linspace(-760, 10, 500), [-np.inf, np.inf, np.nan]]).astype(
        dtype
    )
    got = numpy_form(np, x)
    np.testing.assert_array_equal(numpy_form(np, x[::-1])[::-1], got)
    np.testing.assert_array_equal(numpy_form(np, x[x > -60]), got[x > -60])
    np.testing.assert_array_equal([numpy_form(np, v) for v in np.split(x, x.size)], got[:, None])
    wide = x.astype(np.float64)
    exact = np.where(wide < -40, np.exp(wide), 1 / (1 + np.exp(-np.maximum(wide, -40))))
    np.testing.assert_allclose(got, exact, rtol=8 * np.finfo(dtype).eps, atol=1e-322 if dtype == np.float64 else 1e-44)


def test_slopes_of_the_largest_numbers() -> None:
    for dtype, large in ((mt.float32, 1e25), (mt.float64, 1e200)):
        x = mt.asarray(large, dtype=dtype)
        np.testing.assert_allclose(float(mt.grad(mt.asinh)(x)), 1 / large, rtol=1e-6)
        most = mt.asarray(mt.finfo(dtype).max / 1.5, dtype=dtype)
        for name, base in (("log2", 2.0), ("log10", 10.0)):
            got = mt.grad(getattr(mt, name))(most) * most
            np.testing.assert_allclose(float(got), 1 / np.log(base), rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_bfloat16_are_its_own_numbers(name: str, axis: Any) -> None:
    x = np.random.default_rng(0).standard_normal((40, 70)).astype(ml_dtypes.bfloat16)
    x[3, 5] = np.nan
    x[7] = -np.inf
    got = getattr(mt, name)(mt.asarray(x), axis=axis).numpy()
    want = getattr(x.astype(np.float64), name)(axis=axis)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sinc_is_that_of_wide_numbers_rounded(dtype: str) -> None:
    """The multiple of pi is not rounded before its sine is taken."""
    x = mt.asarray([0.0, 0.06, 0.5, 1.0, 1.5, 10.25, 50.5, 100.5, 20000.0]).astype(getattr(mt, dtype))
    exact = np.asarray(x.astype(mt.float64))
    got, pull = mt.vjp(mt.sinc, x)
    np.testing.assert_allclose(np.asarray(got, np.float64), np.sinc(exact), rtol=2**-8, atol=2e-7)
    (slope,) = mt.vjp(mt.sinc, mt.asarray(exact))[1](mt.ones(9))
    np.testing.assert_allclose(np.asarray(pull(mt.ones_like(x))[0], np.float64), slope, rtol=2**-7, atol=2e-6)
