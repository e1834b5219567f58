"""Arithmetic of an array and one that is broadcast to it: NumPy's values, memory and warnings, with the kernels in C and without."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays import native
from meshtape.arrays.native import ops
from meshtape.arrays.native.broadcasts import WORTH_A_LOOK, broadcast

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}
in_c = pytest.mark.skipif(not native.AVAILABLE, reason="the kernels in C are not built here")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A large array, and one that lacks dimensions or has some of length one; either may lie otherwise than in rows."""
    shape = draw(st.sampled_from([(128, 256), (40, 5, 33), (5000,), (300, 17), (3, 2000), (16, 16, 16), (700, 6)]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    dtypes = [draw(st.sampled_from([np.float32, np.float64, np.int64, np.complex64])) for _ in range(2)]
    if draw(st.booleans()):
        dtypes = [np.float32] * 2
    lacks = draw(st.integers(0, len(shape)))
    part = tuple(n if draw(st.booleans()) else 1 for n in shape[lacks:])

    def made(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        x = (rng.standard_normal(shape) * 9).astype(dtype)
        turned = draw(st.sampled_from(["rows", "rows", "columns", "backwards", "gaps"])) if shape else "rows"
        if turned == "columns":
            return np.asfortranarray(x)
        if turned == "backwards":
            return x[::-1]
        if turned == "gaps":
            return np.repeat(x, 2, axis=-1)[..., ::2]
        return x

    x, y = made(shape, dtypes[0]), made(part, dtypes[1])
    return (x, y) if draw(st.booleans()) else (y, x)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(OPERATORS)), pairs())
def test_an_operator_gives_what_numpy_gives(name: str, operands: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = operands
    with np.errstate(all="ignore"):
        want = OPERATORS[name](x, y)
        got = np.asarray(OPERATORS[name](mt.asarray(x, copy=False), mt.asarray(y, copy=False)))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got, want)
    if x.flags.c_contiguous and y.flags.c_contiguous:
        assert got.strides == want.strides
    assert not np.shares_memory(got, x)
    assert not np.shares_memory(got, y)


def test_what_is_recorded_has_the_gradient_of_both() -> None:
    x, row = mt.asarray(np.full((64, 128), 3.0)), mt.asarray(np.full(128, 2.0))
    slopes = mt.grad(lambda x, row: mt.sum(x / row), argnums=(0, 1))(x, row)
    np.testing.assert_array_equal(np.asarray(slopes[0]), np.full((64, 128), 0.5))
    np.testing.assert_array_equal(np.asarray(slopes[1]), np.full(128, -64 * 3 / 4))


@in_c
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_kernel_takes_rows_columns_and_what_is_repeated_over_stacks(name: str, dtype: Any) -> None:
    compute: Any = broadcast(name)
    assert compute is not None
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 32, 64)).astype(dtype)
    for shape in ((64,), (1, 64), (32, 1), (8, 1, 64), (8, 32, 1), (32, 64)):
        y = rng.standard_normal(shape).astype(dtype)
        out = np.full(x.shape, 7, dtype)
        steps = np.int32([[list(OPERATORS).index(name), 2, 0, 1]]).tobytes()
        assert native._kernels.chain(steps, (x, y, out), 2, 0) == 0
        np.testing.assert_array_equal(out, OPERATORS[name](x, y))
        np.testing.assert_array_equal(compute(x, y), out)
        np.testing.assert_array_equal(compute(y, x), OPERATORS[name](y, x))


def test_other_functions_have_none() -> None:
    assert broadcast("maximum") is None
    assert broadcast("sqrt") is None  # of one operand


@pytest.mark.parametrize(
    ("name", "left", "right", "text"),
    [
        ("divide", 1.0, 0.0, "divide by zero"),
        ("divide", 0.0, 0.0, "invalid value"),
        ("multiply", 1e300, 1e300, "overflow"),
        ("subtract", math.inf, math.inf, "invalid value"),
    ],
)
def test_warnings_are_those_of_numpy(name: str, left: float, right: float, text: str) -> None:
    x, y = mt.asarray(np.ones((64, 64))), mt.asarray(np.ones(64))
    x[:, 5], y[5] = left, right
    call = OPERATORS[name]
    with pytest.warns(RuntimeWarning, match=text):
        call(x, y)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError, match=text):
        call(x, y)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        call(x, y)


def test_shapes_that_do_not_fit_are_said_in_our_words() -> None:
    with pytest.raises(mt.errors.ShapeError, match=r"\[add\].*\(64, 100\).*\(99,\)"):
        mt.ones((64, 100)) + mt.ones(99)
    assert math.prod((64, 100)) > WORTH_A_LOOK


@in_c
def test_labels_are_looked_at_in_one_pass() -> None:
    good = np.arange(1000) % 7
    assert ops.below(good, 7) is True
    assert ops.below(good, 6) is False
    assert ops.below(good[:0], 0) is True
    assert ops.below(good[0:1].reshape(()), 1) is True
    for at, wrong in ((0, -1), (999, 7), (500, -(2**63)), (31, 2**63 - 1)):
        labels = good.copy()
        labels[at] = wrong
        assert ops.below(labels, 7) is False
    for unlike in (good.astype(np.int32), good.astype(np.uint64), good[::2], good.astype(">i8"), good.tolist()):
        assert ops.below(unlike, 7) is None
    with pytest.raises(mt.errors.ArrayIndexError, match="label 7 is none of the 7 classes"):
        mt.nn.cross_entropy(mt.zeros((3, 7)), mt.asarray([0, 6, 7]))
