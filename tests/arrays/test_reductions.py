"""Reductions: NumPy is the oracle; short floats are summed in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshtape import arrays as mt
from meshtape.arrays.core.errors import ShapeError

BOUNDED = settings(max_examples=60, deadline=None)

DTYPES = ["float64", "float32", "int64", "int32", "int8", "uint8", "bool", "complex128"]


@st.composite
def cases(draw, dtypes=DTYPES):
    """An array, an axis (None, one, or several, negative ones among them) and keepdims."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    dtype = draw(st.sampled_from(dtypes))
    elements = {"float64": st.floats(-100, 100), "float32": st.floats(-100, 100, width=32)}.get(dtype)
    if dtype == "complex128":
        elements = st.complex_numbers(max_magnitude=100, allow_nan=False)
    x = draw(hnp.arrays(dtype, shape, elements=elements))
    n = len(shape)
    axis = draw(st.none() | st.integers(-n, n - 1) if n else st.none())
    if n and draw(st.booleans()):
        axis = tuple(draw(st.permutations(range(n)))[: draw(st.integers(0, n))])
        axis = tuple(a - n if draw(st.booleans()) else a for a in axis)
    return x, axis, draw(st.booleans())


@pytest.mark.parametrize("name", ["sum", "prod", "any", "all"])
def test_reduction_is_numpys(name):
    @BOUNDED
    @given(cases())
    def run(case):
        x, axis, keepdims = case
        with np.errstate(all="ignore"):
            expected = getattr(np, name)(x, axis=axis, keepdims=keepdims)
            got = getattr(mt, name)(mt.asarray(x), axis=axis, keepdims=keepdims)
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12 if x.dtype.itemsize == 8 else 1e-5)

    run()


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremum_is_numpys(name):
    @BOUNDED
    @given(cases([d for d in DTYPES if d != "complex128"]))
    def run(case):
        x, axis, keepdims = case
        try:
            expected = getattr(np, name)(x, axis=axis, keepdims=keepdims)
        except ValueError:
            # NumPy refuses every empty axis; where the result has no elements either, nothing lacks a value.
            if 0 in np.sum(x, axis=axis, keepdims=keepdims).shape:
                return
            with pytest.raises(ValueError, match=rf"\[{name}\]"):
                getattr(mt, name)(mt.asarray(x), axis=axis, keepdims=keepdims)
            return
        got = getattr(mt, name)(mt.asarray(x), axis=axis, keepdims=keepdims)
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got), expected)

    run()


@pytest.mark.parametrize("name", ["mean", "var", "std"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_moments_are_numpys(name):
    @BOUNDED
    @given(cases(["float64", "float32", "int64", "bool"]))
    def run(case):
        x, axis, keepdims = case
        expected = np.asarray(getattr(np, name)(x, axis=axis, keepdims=keepdims))
        got = getattr(mt, name)(mt.asarray(x), axis=axis, keepdims=keepdims)
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-4)

    run()


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_argument_of_the_extremum(name):
    @BOUNDED
    @given(cases(["float64", "int8"]))
    def run(case):
        x, axis, keepdims = case
        axis = axis[0] if isinstance(axis, tuple) and axis else None if isinstance(axis, tuple) else axis
        if x.size == 0:
            return
        expected = getattr(np, name)(x, axis=axis, keepdims=keepdims)
        got = getattr(mt, name)(mt.asarray(x), axis=axis, keepdims=keepdims)
        assert got.shape == expected.shape
        np.testing.assert_array_equal(np.asarray(got), expected)

    run()


# ----- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mt.float16, mt.bfloat16])
def test_short_floats_accumulate_in_float32(dtype):
    """4096 ones: a float16 sum would stop at 2048, a bfloat16 one at 256."""
    x = mt.ones(4096, dtype=dtype)
    assert x.sum().dtype == dtype
    assert float(x.sum()) == 4096
    assert float(x.mean()) == 1
    # 4096 * 30 = 122880 overflows float16 on the way to the mean, but the mean itself does not.
    assert float(mt.mean(x * 30)) == 30
    y = mt.asarray(np.array([255.0] + [1.0] * 255), dtype=dtype)
    assert float(mt.sum(y)) == 510
    # The mean, 100.25, is no bfloat16.
    v = mt.asarray([100.0, 100.5] * 50, dtype=dtype)
    assert float(mt.var(v)) == pytest.approx(0.0625, rel=0.01)
    assert float(mt.std(v)) == pytest.approx(0.25, rel=0.01)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_elements():
    empty = mt.zeros((0, 3))
    assert mt.sum(empty, axis=0).tolist() == [0, 0, 0]
    assert float(mt.sum(empty)) == 0
    assert float(mt.prod(empty)) == 1
    assert math.isnan(float(mt.mean(empty)))
    assert mt.min(empty, axis=1).shape == (0,)
    with pytest.raises(ValueError, match=r"\(0, 3\)"):
        mt.min(empty, axis=0)
    assert bool(mt.all(empty))
    assert not bool(mt.any(empty))


def test_means_of_large_integers_do_not_overflow():
    x = mt.asarray([2**62, 2**62, 2**62])
    assert float(mt.mean(x)) == 2.0**62
    assert float(mt.var(x)) == 0
    assert mt.mean(mt.asarray([250, 255], dtype=mt.uint8)).dtype == mt.float64


def test_nan_wins():
    x = mt.asarray([1.0, math.nan])
    assert math.isnan(float(mt.max(x)))
    assert math.isnan(float(mt.min(x)))


def test_bad_axes():
    x = mt.ones((2, 3))
    with pytest.raises(ShapeError, match=r"\[sum\] axis 2.*2 dimension"):
        mt.sum(x, axis=2)
    with pytest.raises(ShapeError, match="twice"):
        mt.sum(x, axis=(0, -2))
    with pytest.raises(ShapeError, match=r"\[argmax\]"):
        mt.argmax(x, axis=-3)


def test_dtype_argument():
    x = mt.asarray([100, 100], dtype=mt.int8)
    assert mt.sum(x).dtype == mt.int64
    assert mt.sum(x, dtype=mt.float32).dtype == mt.float32
    assert mt.prod(x, dtype=mt.float64).tolist() == 10_000


def test_correction():
    x = mt.asarray([1.0, 2.0, 4.0])
    assert float(mt.var(x, correction=1)) == pytest.approx(np.var([1, 2, 4], ddof=1))
    assert math.isnan(float(mt.var(mt.asarray([1.0]), correction=1)))
