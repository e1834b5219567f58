"""Elementwise functions: NumPy is the oracle, over dtypes and broadcasting."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError, ShapeError
from meshtape.arrays.core.op import OPS

BOUNDED = settings(max_examples=15, deadline=None)

# name here -> name in NumPy, where the two differ.
NUMPY_NAMES = {"pow": "power", "real": "real", "imag": "imag"}

FLOATS = ["float64", "float32", "float16"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPLEX = ["complex64", "complex128"]
REALS = FLOATS + INTS

UNARY_REAL = ["floor", "ceil", "trunc", "signbit", "isnan", "isinf", "isfinite", "abs", "positive", "square", "sign"]
UNARY_FLOAT = ["exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"]
UNARY_FLOAT += ["exp2", "rint"]
UNARY_FLOAT += ["sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "round", "negative", "reciprocal", "conj"]
UNARY_COMPLEX = ["exp", "sin", "cos", "tanh", "sqrt", "log", "abs", "conj", "real", "imag", "negative", "square"]
UNARY_COMPLEX += ["positive", "isnan", "isfinite", "isinf", "reciprocal", "sign"]
BINARY_ANY = ["add", "subtract", "multiply", "equal", "not_equal"]
BINARY_REAL = ["maximum", "minimum", "less", "less_equal", "greater", "greater_equal", "fmax", "fmin"]
BINARY_REAL += ["logical_and", "logical_or", "logical_xor"]
BINARY_FLOAT = ["divide", "floor_divide", "remainder", "pow", "atan2", "hypot", "logaddexp", "copysign", "nextafter"]
BINARY_FLOAT += ["fmod", "logaddexp2", "heaviside"]
BINARY_INT = ["bitwise_and", "bitwise_or", "bitwise_xor"]


def oracle(name):
    return getattr(np, NUMPY_NAMES.get(name, name))


def check(name, *xs):
    """Our function on the arrays gives NumPy's result: value, shape and dtype."""
    with np.errstate(all="ignore"):
        expected = np.asarray(oracle(name)(*xs))
        if name == "floor_divide" and expected.dtype.kind == "f":  # NumPy has NaN there, the standard has limits
            far = np.isinf(xs[0]) | np.isinf(xs[1])
            expected = np.where(far, np.divide(*xs), expected).astype(expected.dtype)
        got = getattr(mt, name)(*map(mt.asarray, xs))
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got), expected)


def values(dtype, shape):
    return hnp.arrays(dtype, shape)


@st.composite
def operands(draw, dtypes, count):
    """``count`` arrays of one dtype whose shapes broadcast together, zero-size and 0-d ones among them."""
    dtype = draw(st.sampled_from(dtypes))
    if count == 1:
        return [draw(values(dtype, draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))))]
    found = draw(hnp.mutually_broadcastable_shapes(num_shapes=count, max_dims=3, min_side=0, max_side=4))
    return [draw(values(dtype, s)) for s in found.input_shapes]


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [(n, REALS) for n in UNARY_REAL]
    + [(n, FLOATS) for n in UNARY_FLOAT]
    + [(n, COMPLEX) for n in UNARY_COMPLEX]
    + [("logical_not", [*REALS, "bool"]), ("bitwise_invert", [*INTS, "bool"])],
)
def test_unary_is_numpys(name, dtypes):
    @BOUNDED
    @given(operands(dtypes, 1))
    def run(xs):
        check(name, *xs)

    run()


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [(n, REALS + COMPLEX) for n in BINARY_ANY]
    + [(n, REALS) for n in BINARY_REAL]
    + [(n, FLOATS) for n in BINARY_FLOAT]
    + [(n, [*INTS, "bool"]) for n in BINARY_INT],
)
def test_binary_is_numpys(name, dtypes):
    @BOUNDED
    @given(operands(dtypes, 2))
    def run(xs):
        check(name, *xs)

    run()


@BOUNDED
@given(st.sampled_from(INTS), st.data())
def test_shifts(dtype, data):
    x = data.draw(values(dtype, (3,)))
    by = np.asarray(data.draw(st.integers(0, 7)), dtype)
    check("bitwise_left_shift", x, by)
    check("bitwise_right_shift", x, by)


@BOUNDED
@given(operands(REALS, 3), st.data())
def test_where(xs, data):
    condition = data.draw(values("bool", xs[0].shape))
    got = mt.where(mt.asarray(condition), mt.asarray(xs[1]), mt.asarray(xs[2]))
    expected = np.where(condition, xs[1], xs[2])
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got), expected)


@BOUNDED
@given(operands(FLOATS, 1), st.floats(-10, 0), st.floats(0, 10))
def test_clip(xs, low, high):
    x = xs[0]
    np.testing.assert_array_equal(np.asarray(mt.clip(mt.asarray(x), low, high)), np.clip(x, low, high))
    np.testing.assert_array_equal(np.asarray(mt.clip(mt.asarray(x), min=low)), np.maximum(x, low))
    y = mt.clip(mt.asarray(x))
    assert y.dtype == x.dtype


@pytest.mark.parametrize("left", REALS)
def test_promotion_is_numpys(left):
    for right in REALS:
        x, y = np.ones(2, left), np.ones(2, right)
        assert (mt.asarray(x) + mt.asarray(y)).dtype == (x + y).dtype, right


@pytest.mark.parametrize("dtype", [*REALS, *COMPLEX, "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_python_numbers_are_weak(dtype):
    x = mt.ones(2, dtype=getattr(mt, dtype))
    assert (x + 1).dtype == x.dtype
    assert (2 * x).dtype == x.dtype
    if x.dtype.kind not in "iu":
        assert (x + 0.5).dtype == x.dtype
        assert (1.5 - x).dtype == x.dtype


OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
]  # fmt: skip


@pytest.mark.parametrize("op", OPERATORS, ids=lambda f: f.__name__)
def test_operators_in_both_directions(op):
    a, b = np.array([1.0, 2.5, -3.0]), np.array([2.0, 0.5, 3.0])
    for x, y, n in [
        (mt.asarray(a), mt.asarray(b), op(a, b)),
        (mt.asarray(a), 2.0, op(a, 2.0)),
        (2.0, mt.asarray(b), op(2.0, b)),
        (mt.asarray(a), b, op(a, b)),
        (a, mt.asarray(b), op(a, b)),
        (np.float64(2.0), mt.asarray(b), op(2.0, b)),
    ]:
        got = op(x, y)
        assert isinstance(got, mt.Array)
        np.testing.assert_array_equal(np.asarray(got), n)


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift])
def test_bit_operators(op):
    a, b = np.array([6, 3]), np.array([1, 2])
    np.testing.assert_array_equal(np.asarray(op(mt.asarray(a), mt.asarray(b))), op(a, b))
    np.testing.assert_array_equal(np.asarray(op(mt.asarray(a), 1)), op(a, 1))
    np.testing.assert_array_equal(np.asarray(op(1, mt.asarray(b))), op(1, b))


def test_unary_operators():
    x = mt.asarray([1, -2])
    assert (-x).tolist() == [-1, 2]
    assert (+x).tolist() == [1, -2]
    assert abs(x).tolist() == [1, 2]
    assert (~x).tolist() == [-2, 1]


def test_nan_and_ties_of_the_requirements():
    nan = math.nan
    assert mt.fmax(mt.asarray([nan, 1.0]), mt.asarray([2.0, nan])).tolist() == [2.0, 1.0]
    assert mt.fmin(mt.asarray([nan, 1.0]), mt.asarray([1.0, nan])).tolist() == [1.0, 1.0]
    assert math.isnan(mt.fmin(mt.asarray(nan), mt.asarray(nan)))
    assert math.isnan(mt.maximum(mt.asarray(nan), 1.0))
    with np.errstate(divide="ignore"):
        assert mt.reciprocal(mt.asarray([0.0])).tolist() == [math.inf]


def test_activations():
    x = np.linspace(-800, 800, 33)
    with np.errstate(over="raise"):
        s = np.asarray(mt.nn.sigmoid(mt.asarray(x)))
    assert s[0] == 0
    assert s[-1] == 1
    assert s[16] == 0.5
    np.testing.assert_array_equal(np.asarray(mt.nn.relu(mt.asarray(x))), np.maximum(x, 0))
    np.testing.assert_allclose(np.asarray(mt.erf(mt.asarray([0.0, 1.0]))), [0.0, math.erf(1.0)])


@pytest.mark.parametrize("name", ["exp", "tanh", "sqrt", "negative", "floor", "abs", "square"])
def test_short_floats(name):
    x = np.array([0.25, 1.0, 2.5])
    for dtype in (mt.bfloat16, mt.float16):
        y = getattr(mt, name)(mt.asarray(x, dtype=dtype))
        assert y.dtype == dtype
        np.testing.assert_allclose(np.asarray(y).astype(float), oracle(name)(x), rtol=0.01)


def test_floor_division_by_infinities_is_the_standards():
    inf = math.inf
    x, y = mt.asarray([inf, inf, -inf, 1.0, -1.0, inf]), mt.asarray([2.0, -2.0, 2.0, -inf, inf, inf])
    with np.errstate(all="raise"):
        q = (x // y).tolist()
    assert q[:5] == [inf, -inf, -inf, 0, 0]
    assert math.copysign(1, q[3]) == math.copysign(1, q[4]) == -1
    assert math.isnan(q[5])
    assert mt.floor_divide(mt.asarray([7, -7]), 2).tolist() == [3, -4]


def test_expm1_of_complex_numbers_near_zero():
    z = mt.asarray([1e-9 + 1e-9j, 1e-300j, -1e-12 + 3e-9j])
    # Two terms of the series are exact to double precision here.
    s = np.asarray(z)
    np.testing.assert_allclose(np.asarray(mt.expm1(z)), s + s * s / 2, rtol=1e-15)


# ----- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["text", None, object(), {"a": 1}])
def test_what_is_no_array_is_refused_by_name(bad):
    with pytest.raises(DTypeError, match=r"\[add\] cannot take"):
        mt.add(mt.ones(2), bad)
    with pytest.raises(TypeError):
        mt.ones(2) + bad


def test_shapes_that_do_not_broadcast():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        mt.ones(2) + mt.ones(3)
    with pytest.raises(ShapeError, match=r"\[where\]"):
        OPS["where"].avals(tuple(mt.ShapeDtype((n,), mt.bool) for n in (2, 3, 4)), {})


def test_the_sign_of_a_negative_zero_is_zero():
    for dtype in (mt.bfloat16, mt.float8_e4m3fn, mt.float8_e5m2, mt.float16, mt.float32, mt.float64):
        got = mt.sign(mt.asarray([-0.0, 0.0, -2.0, 3.0, math.nan], dtype=dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got).astype(float), [0, 0, -1, 1, math.nan])
        assert not np.signbit(np.asarray(got)[:2].astype(float)).any()
