"""Functions called with random awkward arrays (empty, of no dimensions, of extreme integers, with NaN and infinities)
as NumPy has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meshtape as mt

BOUNDED = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 7.25, 100.0, np.inf, -np.inf, np.nan]
NUMBERS = [0, 1, -1, 3, 300, 0.5, -1.5, True]


def elements(dtype: str) -> Any:
    kind = np.dtype(dtype).kind
    if kind == "b":
        return st.booleans()
    if kind in "iu":
        limits = np.iinfo(dtype)
        return st.sampled_from([0, 1, 2, 3, 7, int(limits.min), int(limits.max), int(limits.max) // 2])
    return st.sampled_from(SPECIAL)


@st.composite
def arrays(draw: Any, dtypes: Any = ("bool", *INTEGERS, *FLOATS), shape: Any = None) -> np.ndarray:
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)) if shape is None else shape
    return draw(hnp.arrays(dtype, shape, elements=elements(dtype)))


@st.composite
def with_axis(draw: Any) -> Any:
    x = draw(arrays())
    return x, draw(st.sampled_from([None, *range(-x.ndim, x.ndim)]))


def check(ours: Callable[..., Any], numpys: Callable[..., Any], args: tuple[Any, ...], **kwargs: Any) -> None:
    """Our result is NumPy's, value, shape and dtype; where NumPy refuses the call, so do we, or our result has no
    elements."""

    def run(f: Callable[..., Any], given: Any) -> Any:
        try:
            with np.errstate(all="ignore"):
                out = f(*given, **kwargs)
        except (TypeError, ValueError, OverflowError, IndexError, ZeroDivisionError) as e:
            return e
        return [np.asarray(v) for v in (out if isinstance(out, tuple) else (out,))]

    want = run(numpys, args)
    got = run(ours, [mt.asarray(a) if isinstance(a, np.ndarray) else a for a in args])
    if isinstance(want, Exception):  # also of nothing from nothing, which is here nothing
        assert isinstance(got, Exception) or not any(v.size for v in got), (got, want)
        return
    assert not isinstance(got, Exception), got
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        eps = {2: 4e-3, 4: 1e-5}.get(w.dtype.itemsize, 1e-9) if w.dtype.kind == "f" else 0
        np.testing.assert_allclose(g.astype(w.dtype), w, rtol=eps, atol=eps)


ONE = [
    "absolute",
    "deg2rad",
    "rad2deg",
    "fabs",
    "modf",
    "isposinf",
    "isneginf",
    "fix",
    "nan_to_num",
    "isreal",
    "iscomplex",
    "angle",
    "rint",
    "exp2",
    "sqrt",
    "square",
    "sign",
    "reciprocal",
    "negative",
    "floor",
    "ceil",
    "trunc",
    "log2",
    "log1p",
    "arctan",
    "isnan",
    "signbit",
    "real",
    "imag",
    "logical_not",
    "invert",
    "ptp",
    "cumsum",
    "cumprod",
    "nancumsum",
    "nancumprod",
    "unique",
    "argwhere",
    "flatnonzero",
    "count_nonzero",
    "ravel",
    "tanh",
    "cbrt",
]
TWO = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "remainder",
    "fmod",
    "power",
    "maximum",
    "fmin",
    "copysign",
    "logaddexp",
    "logaddexp2",
    "hypot",
    "arctan2",
    "heaviside",
    "equal",
    "less",
    "logical_xor",
    "bitwise_and",
    "left_shift",
    "float_power",
    "not_equal",
]
OVER_AXES = [
    "sum",
    "prod",
    "max",
    "min",
    "mean",
    "any",
    "all",
    "argmax",
    "nansum",
    "nanprod",
    "nanmax",
    "nanmin",
    "nanmean",
    "median",
    "nanmedian",
    "std",
    "nanvar",
    "average",
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ONE)
@BOUNDED
@given(x=arrays())
def test_of_one_array(name, x):
    check(getattr(mt, name), getattr(np, name), (x,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TWO)
@BOUNDED
@given(data=st.data(), x=arrays(), swapped=st.booleans())
def test_of_two(name, data, x, swapped):
    y = data.draw(st.one_of(st.sampled_from(NUMBERS), arrays(shape=x.shape), arrays(shape=())))
    check(getattr(mt, name), getattr(np, name), (y, x) if swapped else (x, y))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OVER_AXES)
@BOUNDED
@given(x=with_axis(), keepdims=st.booleans())
def test_over_axes(name, x, keepdims):
    check(getattr(mt, name), getattr(np, name), (x[0],), axis=x[1], keepdims=keepdims)


VECTORS: dict[str, Callable[..., Any]] = {
    "diff": lambda m, x, y, n: m.diff(x, 1 + abs(int(n)) % 2),
    "convolve": lambda m, x, y, n: m.convolve(x, y[:2]),
    "interp": lambda m, x, y, n: m.interp(x, m.asarray(np.arange(4)), y),
    "interp with ends": lambda m, x, y, n: m.interp(x, m.asarray(np.arange(4)), y, left=n, right=2),
    "digitize up": lambda m, x, y, n: m.digitize(x, m.asarray(np.arange(3.0))),
    "digitize down": lambda m, x, y, n: m.digitize(x, m.asarray(np.arange(3.0)[::-1]), right=bool(n)),
    "searchsorted": lambda m, x, y, n: m.searchsorted(m.sort(x), y),
    "insert": lambda m, x, y, n: m.insert(x, 1, y.astype(x.dtype)),
    "delete": lambda m, x, y, n: m.delete(x, slice(None, None, -2)),
    "roll": lambda m, x, y, n: m.roll(x, int(n)),
    "where": lambda m, x, y, n: m.where(x > y, x, y),
    "select": lambda m, x, y, n: m.select([x > y, x < y], [x, y], default=1),
    "average": lambda m, x, y, n: m.average(x, weights=m.abs(y) % 3 + 1),
    "vander": lambda m, x, y, n: m.vander(x.astype("int16"), 3),
    "polyval": lambda m, x, y, n: m.polyval(x.astype("float64"), y),
    "isclose": lambda m, x, y, n: m.isclose(x, y, equal_nan=True),
    "union1d": lambda m, x, y, n: m.union1d(x, y),
    "isin": lambda m, x, y, n: m.isin(x, y),
    "full_like": lambda m, x, y, n: m.full_like(x, n),
    "slices": lambda m, x, y, n: x[::-1][1::-1],
    "lexsort": lambda m, x, y, n: m.lexsort([x, y]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VECTORS)
@BOUNDED
@given(x=arrays(shape=(4,)), y=arrays(shape=(4,)), n=st.sampled_from([0, 1, 2, 5, 1.5, True]))
def test_of_vectors(name, x, y, n):
    def call(m: Any) -> Callable[..., Any]:
        return lambda x, y: VECTORS[name](m, x, y, n)

    check(call(mt), call(np), (x, y))
