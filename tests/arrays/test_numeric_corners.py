"""Corners of small functions: eager, compiled, split and through NumPy's protocol alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import special

import meshtape as mt
from meshtape.arrays import native

BIG = np.finfo(np.float64).max
MESH = mt.Mesh({"data": 2})


def everywhere(fn: Any, *hosts: Any) -> list[np.ndarray]:
    """Eager, compiled, and with the first dimension split."""
    xs = [mt.asarray(h) for h in hosts]
    split = [mt.distribute(x, MESH, data=mt.Shard(0)) if x.ndim else x for x in xs]
    return [np.asarray(v) for v in (fn(*xs), mt.compile(fn)(*xs), fn(*split))]


# ----- norms and conditions -------------------------------------------------------------------------------------------

LARGE = [
    *(np.array([[z]]) for z in (BIG + 0j, -1j * BIG, complex(0.6 * BIG, 0.6 * BIG), complex(BIG, 0.25 * BIG))),
    np.array([[0.5 * BIG, 0.25j * BIG], [0.0, complex(0.25 * BIG, -0.25 * BIG)]]),
    np.array([[BIG]]),
    np.array([[np.finfo(np.float32).max]], np.float32),
    np.array([[np.finfo(np.float32).max * 1j]], np.complex64),
]


def far(norm: Any, x: np.ndarray, ord: Any) -> np.ndarray:
    """The norm by way of numbers near 1, of which no power overflows; infinite where it is beyond the largest
    number."""
    real = np.zeros(1, x.dtype).real.dtype
    scale = 2.0 ** (np.finfo(real).maxexp - 2)
    return np.asarray(norm(x.astype(np.complex128) / scale, ord) * scale).astype(real)


@pytest.mark.parametrize("x", LARGE)
@pytest.mark.parametrize("ord", [2, 1, 3, 0.5, -1, np.inf, -np.inf])
def test_vector_norms_of_the_largest_numbers(x, ord):
    x = x[x != 0]
    with np.errstate(over="ignore"):
        want = far(np.linalg.norm, x, ord)
        for got in everywhere(lambda x: mt.linalg.vector_norm(x, ord=ord), x)[:2]:
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-6 if x.dtype.itemsize < 16 and x.dtype != float else 1e-14)


@pytest.mark.parametrize("x", LARGE)
@pytest.mark.parametrize("ord", ["fro", "nuc", 2, -2, 1, np.inf])
def test_matrix_norms_of_the_largest_numbers(x, ord):
    single = x.dtype in (np.float32, np.complex64)
    with np.errstate(over="ignore"):
        want = far(np.linalg.norm, x, ord)
        for got in (
            mt.linalg.matrix_norm(mt.asarray(x), ord=ord),
            mt.compile(lambda x: mt.linalg.matrix_norm(x, ord=ord))(mt.asarray(x)),
        ):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-6 if single else 1e-13)


def test_slopes_of_norms_of_the_largest_numbers():
    for x in (np.array([BIG, 0.0]), np.array([BIG * 1j, 0.0])):
        g = np.asarray(mt.grad(lambda x: mt.linalg.vector_norm(x))(mt.asarray(x)))
        np.testing.assert_allclose(g, x / BIG)


SINGULAR = [np.zeros((2, 2)), np.ones((2, 2)), np.array([[1.0, 2.0], [2.0, 4.0]]), np.zeros((2, 2)) + 0j]


@pytest.mark.parametrize("p", [None, 2, 1, -1, np.inf, -np.inf, "fro"])
@pytest.mark.parametrize("x", SINGULAR)
def test_singular_matrices_have_an_infinite_condition(x, p):
    if p in (None, 2) and x.any():
        pytest.skip("the least singular value is rounded, here as in NumPy")
    with np.errstate(all="ignore"):
        for got in (mt.linalg.cond(mt.asarray(x), p), mt.compile(lambda x: mt.linalg.cond(x, p))(mt.asarray(x))):
            np.testing.assert_array_equal(np.asarray(got), np.linalg.cond(x, p))
            assert np.isinf(np.asarray(got))


@pytest.mark.parametrize("p", [None, 2, -2, 1, np.inf, "fro"])
def test_conditions_beside_singular_ones(p):
    x = np.stack([np.array([[2.0, 1.0], [0.0, 1.0]]), np.zeros((2, 2)), np.eye(2)])
    for got in everywhere(lambda x: mt.linalg.cond(x, p), x):
        np.testing.assert_allclose(got, np.linalg.cond(x, p))
    with np.errstate(all="ignore"):
        for bad in (np.diag([np.inf, 1.0]), np.diag([np.inf, 0.0])):
            np.testing.assert_array_equal(np.asarray(mt.linalg.cond(mt.asarray(bad), p)), np.linalg.cond(bad, p))


# ----- rounding -------------------------------------------------------------------------------------------------------

COMPLEX = np.array([complex(np.inf, 1234.56), complex(np.nan, -np.inf), complex(-15.0, 25.0), complex(-0.0, 0.05)])
REAL = np.array([np.inf, -np.inf, np.nan, -0.0, 1234.567, -15.0, 25.0, 1e300])


@pytest.mark.parametrize("decimals", [-3, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("x", [COMPLEX, REAL, REAL.astype(np.float32), np.array([15, -25, 1234, 2**62])])
def test_round_as_numpy(x, decimals):
    with np.errstate(all="ignore"):
        want = np.round(x, decimals)
        for got in [*everywhere(lambda x: mt.round(x, decimals), x), np.asarray(np.round(mt.asarray(x), decimals))]:
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
            if x.dtype.kind == "f":
                np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_round_to_more_digits_than_there_are():
    x = np.array([1e308, -1e308, 1.25, np.inf, -0.0])
    for decimals in (1, 20, 308, 309, 400):
        want = np.array([1e308, -1e308, 1.2 if decimals == 1 else 1.25, np.inf, -0.0])
        for got in everywhere(lambda x: mt.round(x, decimals), x):  # noqa: B023
            np.testing.assert_array_equal(got, want)
    for got in everywhere(lambda x: mt.round(x, -400), x):
        np.testing.assert_array_equal(got, [0.0, -0.0, 0.0, np.inf, -0.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("decimals", [-3, -2, -1, 0, 1, 2, 5, 40])
def test_round_of_short_floats_everywhere(decimals, dtype):
    x = np.asarray(mt.asarray([1.2345, 234.5, -0.0, 3e-3, 17.5, 25, 35, -125], dtype=dtype))
    want = np.round(x.astype(np.float64), decimals).astype(np.float32).astype(x.dtype)
    for got in everywhere(lambda x: mt.round(x, decimals), x):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


ACTIVATIONS = [
    "celu",
    "elu",
    "gelu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "squared_relu",
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_short_dtypes_everywhere(name, dtype):
    x = np.asarray(mt.asarray([[-2.0, -0.5], [0.25, 3.0]], dtype=dtype))
    fn = getattr(mt.nn, name)
    exact = np.asarray(fn(mt.asarray(x.astype(np.float64))))
    for got in everywhere(fn, x):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(
            got.astype(np.float64), exact, rtol=0.26 if dtype == "float8_e5m2" else 0.13, atol=0.01
        )
    assert mt.grad(lambda x: mt.sum(fn(x).astype(mt.float32)))(mt.asarray(x)).dtype == x.dtype


# ----- averages, edges, slopes ----------------------------------------------------------------------------------------


def test_averages_whose_weights_add_up_to_zero():
    x, w = np.array([[2.0, 3.0], [4.0, 5.0]]), np.array([[1.0, -1.0], [1.0, 2.0]])

    def mean(x: Any, w: Any) -> Any:
        return mt.average(x, 1, w)

    a, b = mt.asarray(x), mt.asarray(w)
    split = [mt.distribute(v, MESH, data=mt.Shard(0)) for v in (a, b)]
    for got in (mean(a, b), mt.compile(mean)(a, b), mean(*split)):
        np.testing.assert_allclose(np.asarray(got), [np.nan, 14 / 3])
    mean, total = mt.average(mt.asarray(x), 1, mt.asarray(w), returned=True)
    np.testing.assert_array_equal(np.asarray(total), [0.0, 3.0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int16"])
def test_edges_of_histograms_are_the_same_under_a_tape(dtype):
    x = mt.asarray(np.random.default_rng(0).normal(size=40) * 9).astype(dtype)
    plain = mt.histogram(x, 7)
    with mt.Tape() as tape:
        tape.watch(x)
        watched = mt.histogram(x, 7)
    assert watched.edges.dtype == plain.edges.dtype
    np.testing.assert_allclose(np.asarray(mt.stop_gradient(watched.edges)), np.asarray(plain.edges), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(watched.counts), np.asarray(plain.counts))


SAMPLES = [
    np.ones(4),
    np.array([0.0, -0.0, 0.0, 0.0]),
    np.array([2, 2, 2]),
    np.array([1.0, 1.0, 2.0, 2.0]),
    np.arange(5.0) ** 2,
]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("x", SAMPLES)
def test_signs_of_zero_slopes(x, order):
    for spacing in ((), (2.0,)):
        want = np.gradient(x, *spacing, edge_order=order)
        for got in everywhere(lambda x: mt.gradient(x, *spacing, edge_order=order), x):  # noqa: B023
            np.testing.assert_array_equal(got, want)
            ends = [0, -1] if order == 1 else [-1]
            np.testing.assert_array_equal(np.signbit(got[ends]), np.signbit(want[ends]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_linspace_has_the_dtype_of_its_ends(dtype):
    ends = [mt.asarray(v).astype(dtype) for v in (0.1, 0.7)]
    want = np.linspace(*(float(e) for e in ends), 5)
    got = mt.linspace(*ends, 5)
    traced = mt.compile(lambda a, b: mt.linspace(a, b, 5))(*ends)
    for out in (got, traced):
        assert out.dtype == ends[0].dtype
        np.testing.assert_allclose(np.asarray(out.astype(mt.float64)), want, rtol=1e-2)


# ----- tails of gelu --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_and_its_derivatives_keep_their_digits_in_the_tail(dtype):
    x = np.array([-0.5, -2.0, -3.0, -4.0, -5.0, -6.0, -7.5, -9.0, -11.0]).astype(dtype)
    x = np.append(x, -36.0) if dtype == "float64" else x
    wide = x.astype(np.float64)
    density, cdf = np.exp(-wide * wide / 2) / np.sqrt(2 * np.pi), np.exp(special.log_ndtr(wide))
    # What the exponential of -650 loses; the kernels in C compute float32 with more digits.
    eps = np.finfo(dtype).eps * ((8 if native.AVAILABLE else 40) if dtype == "float32" else 2000)

    def slope(x: Any) -> Any:
        return mt.grad(lambda x: mt.nn.gelu(x).sum())(x)

    for fn, want in (
        (mt.nn.gelu, wide * cdf),
        (slope, cdf + wide * density),
        (lambda x: mt.grad(lambda x: slope(x).sum())(x), (2 - wide * wide) * density),
    ):
        for got in everywhere(fn, x):
            assert got.dtype == x.dtype
            np.testing.assert_allclose(got, want, rtol=eps)


def test_gelu_far_out():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        x = mt.asarray([np.inf, -np.inf, np.nan, 1e4, -1e4, 0.0]).astype(dtype)
        np.testing.assert_array_equal(
            np.asarray(mt.nn.gelu(x).astype(mt.float64)),
            np.asarray(mt.stack([x[0], -0.0 * x[5], x[2], x[3], x[5], x[5]]).astype(mt.float64)),
        )
        slopes = np.asarray(mt.grad(lambda x: mt.nn.gelu(x).sum())(x).astype(mt.float64))
        np.testing.assert_array_equal(slopes, [1, 0, np.nan, 1, 0, 0.5])


# ----- indices and labels of short integers ---------------------------------------------------------------------------

N = 300  # beyond what one byte counts to
BY_INDEX: dict[str, Any] = {
    "read": lambda i: mt.arange(N)[i],
    "read of a column": lambda i: mt.reshape(mt.arange(2 * N), (2, N))[:, i],
    "take": lambda i: mt.take(mt.arange(N), i),
    "take_along_axis": lambda i: mt.take_along_axis(mt.arange(N), i, axis=0),
    "put_along_axis": lambda i: mt.put_along_axis(mt.arange(N), i, mt.asarray([7, 8]), axis=0, inplace=False),
    "set": lambda i: mt.zeros(N).at[i].set(1.0),
    "add": lambda i: mt.zeros(N).at[i].add(1.0),
    "max": lambda i: mt.zeros(N).at[i].max(1.0),
    "gradient of a read": lambda i: mt.grad(lambda x: mt.sum(x[i]))(mt.ones(N)),
    "compiled read": lambda i: mt.compile(lambda i: mt.arange(N)[i])(i),
    "read of a split array": lambda i: mt.distribute(mt.arange(N), MESH, data=mt.Shard(0))[i],
    "delete": lambda i: mt.delete(mt.arange(N), i),
    "choose": lambda i: mt.choose(i, [mt.asarray(k) for k in range(N)]),
    "unravel_index": lambda i: mt.stack(mt.unravel_index(i, (2, N))),
    "ravel_multi_index": lambda i: mt.ravel_multi_index((i, i), (N, N)),
    "bincount": lambda i: mt.bincount(i, minlength=N),
    "one_hot": lambda i: mt.nn.one_hot(i, N),
    "embedding": lambda i: mt.nn.embedding(i, mt.ones((N, 2)), padding_idx=N - 1),
    "comparisons": lambda i: mt.stack([i < N, i >= -N, i == N, i != -N]),
    **{
        f"{name}, {ignored}": lambda i, loss=loss, ignored=ignored: loss(i, reduction="none", ignore_index=ignored)
        for ignored in (None, -1, -100, 255, 1000, 2**63)
        for name, loss in {
            "cross_entropy": lambda i, **kw: mt.nn.cross_entropy(mt.ones((2, N)), i, **kw),
            "cross_entropy of short floats": lambda i, **kw: mt.nn.cross_entropy(
                mt.ones((2, N), dtype=mt.bfloat16), i, **kw
            ),
            "linear_cross_entropy": lambda i, **kw: mt.nn.linear_cross_entropy(
                mt.ones((2, 3)), mt.ones((3, N)), i, **kw
            ),
            "split cross_entropy": lambda i, **kw: mt.nn.cross_entropy(
                mt.distribute(mt.ones((2, N)), MESH, data=mt.Shard(1)), i, **kw
            ),
        }.items()
    },
}


@pytest.mark.parametrize("name", BY_INDEX)
def test_short_integers_index_as_long_ones_do(name: str) -> None:
    """Also where the array is longer than they count: with the same values, and the same errors."""

    def outcome(values: list[int], dtype: str) -> Any:
        try:
            return np.asarray(BY_INDEX[name](mt.asarray(values, dtype=dtype))).tolist()
        except mt.errors.MeshtapeError as e:
            return type(e)

    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint64"):
        limits = np.iinfo(dtype)
        for values in ([0, 1], [127, 5], [-1, 1], [-100, 1], [-128, 127], [255, 1], [299, -300], [300, 1], [-301, 1]):
            if limits.min <= min(values) and max(values) <= limits.max:
                assert repr(outcome(values, dtype)) == repr(outcome(values, "int64")), (dtype, values)
