"""Whatever NumPy array a user brings, results are NumPy's: other byte orders, odd strides, read-only memory, no
elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import meshtape as mt

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@st.composite
def hostile(draw: Any, dtypes: Any = None, min_dims: int = 0) -> np.ndarray:
    """An array of small numbers, with the odd NaN and infinity, laid out in one of the ways that NumPy allows."""
    dtype = np.dtype(draw(st.sampled_from(dtypes or DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=min_dims, max_dims=4, min_side=0, max_side=4))
    values = st.integers(-5, 5) if dtype.kind != "u" else st.integers(0, 5)
    if dtype.kind == "f":
        values = st.one_of(values, st.sampled_from([0.5, -0.0, np.nan, np.inf, -np.inf]))
    if dtype.kind == "b":
        values = st.booleans()
    x = draw(hnp.arrays(dtype, shape, elements=values))
    layout = draw(st.sampled_from(["C", "F", "gaps", "backwards", "broadcast"]))
    if layout == "F":
        x = np.asfortranarray(x)
    elif layout == "gaps" and x.ndim:
        x = np.repeat(x, 2, axis=-1)[..., ::2]
    elif layout == "backwards" and x.ndim:
        x = x[::-1].copy()[::-1]
    elif layout == "broadcast":
        x = np.broadcast_to(x, (2, *x.shape))
    if draw(st.booleans()):
        x = x.astype(x.dtype.newbyteorder(), order="K")
    if draw(st.booleans()):
        x = x.view()
        x.flags.writeable = False
    return x


def same(got: Any, want: Any) -> None:
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    assert len(got) == len(want)
    for g, w in zip(got, map(np.asarray, want), strict=True):
        assert isinstance(g, mt.Array)
        w = w.astype(w.dtype.newbyteorder("="))
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if w.dtype.kind in "fc":
            tolerance = {2: 4e-3, 4: 1e-5, 8: 1e-5 if w.dtype.kind == "c" else 1e-11, 16: 1e-11}[w.dtype.itemsize]
            np.testing.assert_allclose(g.numpy(), w, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(g.numpy(), w)


def agree(ours: Callable[..., Any], numpys: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Both give the same, or both refuse: ours with an error of its own."""
    before = [a.copy() for a in arrays]
    with np.errstate(all="ignore"):
        try:
            want = numpys(*arrays)
        except (ValueError, TypeError, IndexError):
            with pytest.raises((ValueError, TypeError, IndexError), match=r"^\[\w+\]"):
                ours(*map(mt.asarray, arrays))
            return
        same(ours(*map(mt.asarray, arrays)), want)
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(a, b)


REAL = [d for d in DTYPES if d[0] != "c"]
FLAT = {
    "sum": None,
    "prod": None,
    "any": None,
    "all": None,
    "mean": None,
    "var": None,
    "std": None,
    "nansum": None,
    "nanmean": None,
    "count_nonzero": None,
    "max": REAL,
    "min": REAL,
    "argmax": REAL,
}


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_reductions(name: str, data: Any) -> None:
    x = data.draw(hostile(FLAT[name]))
    if not x.size and FLAT[name]:
        return  # of no elements NumPy has no maximum even where the result is empty; test_reductions.py has our rule
    axis = data.draw(st.one_of(st.none(), *([st.integers(-x.ndim, x.ndim - 1)] if x.ndim else [])))
    keepdims = data.draw(st.booleans())
    agree(
        lambda a: getattr(mt, name)(a, axis=axis, keepdims=keepdims),
        lambda a: getattr(np, name)(a, axis=axis, keepdims=keepdims),
        x,
    )


REARRANGING: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "reshape": (lambda a: mt.reshape(a, (-1,)), lambda a: np.reshape(a, (-1,))),
    "transpose": (lambda a: mt.permute_dims(a, tuple(range(a.ndim))[::-1]), lambda a: a.T),
    "flip": (mt.flip, np.flip),
    "roll": (lambda a: mt.roll(a, 3), lambda a: np.roll(a, 3)),
    "tile": (lambda a: mt.tile(a, (2, 1)), lambda a: np.tile(a, (2, 1))),
    "repeat": (lambda a: mt.repeat(a, 2), lambda a: np.repeat(a, 2)),
    "concat": (lambda a: mt.concat([a, a], axis=None), lambda a: np.concatenate([a, a], axis=None)),
    "stack": (lambda a: mt.stack([a, a], axis=-1), lambda a: np.stack([a, a], axis=-1)),
    "pad": (lambda a: mt.pad(a, 1), lambda a: np.pad(a, 1)),
    "sort": (lambda a: mt.sort(mt.reshape(a, -1)), lambda a: np.sort(a.reshape(-1))),
    "argsort": (lambda a: mt.argsort(mt.reshape(a, -1)), lambda a: np.argsort(a.reshape(-1), kind="stable")),
    "unique": (mt.unique_values, lambda a: np.unique(a, equal_nan=False)),
    "nonzero": (lambda a: mt.nonzero(mt.reshape(a, -1)), lambda a: np.nonzero(a.reshape(-1))),
    "where": (lambda a: mt.where(a != 0, a, 2), lambda a: np.where(a != 0, a, 2)),
    "cumulative_sum": (lambda a: mt.cumulative_sum(mt.reshape(a, -1)), lambda a: np.cumsum(a.reshape(-1))),
    "masked": (lambda a: a[a == a], lambda a: a[a == a]),
    "clip": (lambda a: mt.clip(mt.abs(a), -9, 3), lambda a: np.clip(np.abs(a), -9, 3)),
}


@pytest.mark.parametrize("name", REARRANGING)
@given(x=hostile())
@settings(max_examples=15, deadline=None)
def test_rearranging(name: str, x: np.ndarray) -> None:
    if name == "clip" and x.dtype.kind == "b":
        return  # NumPy has no clip of booleans
    agree(*REARRANGING[name], x)


BINARY = {
    "add": "add",
    "multiply": "multiply",
    "divide": "divide",
    "maximum": "maximum",
    "equal": "equal",
    "less": "less",
    "bitwise_xor": "bitwise_xor",
    "logical_or": "logical_or",
    "atan2": "arctan2",
    "copysign": "copysign",
    "remainder": "remainder",
    "pow": "power",
    "matmul": "matmul",
}


@pytest.mark.parametrize("name", BINARY)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_two_operands(name: str, data: Any) -> None:
    x, y = data.draw(hostile()), data.draw(hostile())
    agree(getattr(mt, name), getattr(np, BINARY[name]), x, y)
    agree(getattr(mt, name), getattr(np, BINARY[name]), x, x)


SCALARS = [2, -1, 0.5, True, 1j, np.float32(2), np.int64(3), np.uint8(200), np.bool_(True), np.float64(-0.0)]


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__}-{s}")
@given(x=hostile())
@settings(max_examples=20, deadline=None)
def test_scalars_on_both_sides(scalar: Any, x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        for ours, numpys in ((mt.multiply, np.multiply), (mt.subtract, np.subtract), (mt.less, np.less)):
            for swap in (False, True):
                args = (scalar, x) if swap else (x, scalar)
                try:
                    want = numpys(*args)
                except (TypeError, OverflowError):
                    with pytest.raises((mt.errors.DTypeError, mt.errors.NumberRangeError), match=r"^\[\w+\]"):
                        ours(*(mt.asarray(a) if a is x else a for a in args))
                else:
                    same(ours(*(mt.asarray(a) if a is x else a for a in args)), want)


def test_operators_with_numpy_operands_on_the_left() -> None:
    x = mt.asarray(np.arange(3, dtype=np.float32))
    for left in (np.float64(2), np.int64(2), np.array([1.0, 2.0, 3.0]), np.array([1, 2, 3], ">i4")):
        for got, want in ((left * x, left * x.numpy()), (left - x, left - x.numpy()), (left < x, left < x.numpy())):
            same(got, want)


@pytest.mark.parametrize(
    "what",
    [
        np.array([1, None], object),
        np.array(["a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", int)]),
        np.ones(2, np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
        "text",
        {1: 2},
        {1, 2},
        None,
        [1, None],
        2**70,
        [-(2**70)],
        pytest.param((i for i in range(3)), id="a generator"),
    ],
    ids=str,
)
def test_what_holds_no_numbers_is_refused(what: Any) -> None:
    with pytest.raises(mt.errors.DTypeError, match=r"^\[asarray\]"):
        mt.asarray(what)


def test_ragged_sequences_are_refused() -> None:
    with pytest.raises(mt.errors.ShapeError, match="different lengths"):
        mt.asarray([[1, 2], [3]])


def test_masked_arrays_without_masked_elements_are_arrays() -> None:
    assert mt.asarray(np.ma.masked_array([1, 2])).tolist() == [1, 2]


def test_foreign_arrays_never_reach_an_op_unchecked() -> None:
    for bad in (np.array(["a"]), np.ones(2, np.longdouble), np.array([None])):
        with pytest.raises(mt.errors.DTypeError):
            mt.ones(2) + bad


MAKERS: dict[str, Callable[[Any], Any]] = {
    "asarray": lambda d: mt.asarray([1, 0], dtype=d),
    "astype": lambda d: mt.astype(mt.ones(2), d),
    "zeros": lambda d: mt.zeros(2, dtype=d),
    "ones": lambda d: mt.ones(2, dtype=d),
    "empty": lambda d: mt.empty(2, dtype=d),
    "full": lambda d: mt.full(2, 1, dtype=d),
    "arange": lambda d: mt.arange(2, dtype=d),
    "linspace": lambda d: mt.linspace(0, 1, 2, dtype=d),
    "eye": lambda d: mt.eye(2, dtype=d),
    "zeros_like": lambda d: mt.zeros_like(mt.ones(2), dtype=d),
}


@pytest.mark.parametrize("name", MAKERS)
def test_dtype_arguments(name: str) -> None:
    for spelled, meant in (
        (">f4", mt.float32),
        (float, mt.float64),
        ("bfloat16", mt.bfloat16),
        (mt.float16, mt.float16),
        (np.longlong, mt.int64),
    ):
        if not (name == "linspace" and meant == mt.bfloat16):
            assert MAKERS[name](spelled).dtype is meant.dtype
    for bad in (object, "S3", np.longdouble, "int4", "nope", "M8[D]", 7):
        with pytest.raises(mt.errors.DTypeError, match=rf"^\[{name}\].*choose one of bool, int8"):
            MAKERS[name](bad)


def test_imaginary_parts_are_never_dropped() -> None:
    for make in (
        lambda: mt.asarray(np.array([1j]), dtype=mt.float64),
        lambda: mt.full(2, 1j, dtype=mt.float64),
        lambda: mt.astype(mt.asarray([1j]), mt.int8),
    ):
        with pytest.raises(TypeError):
            make()


def test_full_takes_values_that_fit() -> None:
    assert mt.full(2, mt.asarray(3, dtype=mt.int8)).dtype is mt.int8.dtype
    assert mt.full((2, 3), mt.asarray([1, 2, 3])).tolist() == [[1, 2, 3], [1, 2, 3]]
    with pytest.raises(OverflowError):
        mt.full(2, 300, dtype=mt.int8)
    with pytest.raises(mt.errors.ShapeError, match=r"\[full\]"):
        mt.full((2, 3), mt.ones(2))


@pytest.mark.parametrize("bad", ["0", 1.0, True, (0, "1"), (True,)])
def test_axes_that_are_no_ints(bad: Any) -> None:
    for fn in (mt.sum, mt.max, mt.mean, mt.flip):
        with pytest.raises(TypeError, match="an axis is an int"):
            fn(mt.ones((2, 3)), axis=bad)


def test_one_axis_where_several_make_no_sense() -> None:
    for fn in (mt.sort, mt.cumulative_sum, mt.argmax, mt.topk):
        with pytest.raises(TypeError, match="takes one axis"):
            fn(mt.ones((2, 3)), *((1,) if fn is mt.topk else ()), axis=(0, 1))


@pytest.mark.parametrize("bad", ["3", 3.0, (2, "a"), -1, (2, -3), (2**40, 2**40)])
def test_shapes_that_are_none(bad: Any) -> None:
    for fn in (mt.zeros, mt.ones, mt.empty, lambda s: mt.full(s, 1), lambda s: mt.random.uniform(mt.random.key(0), s)):
        with pytest.raises(mt.errors.ShapeError):
            fn(bad)


def test_errors_of_eager_calls_are_typed_and_name_op_and_arguments() -> None:
    with pytest.raises(mt.errors.ShapeError, match=r"^\[add\] shapes do not broadcast together: \(2,\), \(3,\)"):
        mt.ones(2) + mt.ones(3)
    with pytest.raises(mt.errors.DTypeError, match=r"^\[bitwise_and\] is not defined for float64, int"):
        mt.ones(2) & 1
    with pytest.raises(mt.errors.NumberRangeError, match=r"^\[add\] 300 is out of the range of int8"):
        mt.ones(2, dtype=mt.int8) + 300
    with pytest.raises(ValueError, match=r"^\[pow\] .*negative integer powers.*int64\[1\]"):
        mt.asarray([2]) ** -1
    with pytest.raises(mt.errors.LinAlgError, match=r"^\[inv\] Singular matrix") as e:
        mt.linalg.inv(mt.zeros((2, 2)))
    assert isinstance(e.value, np.linalg.LinAlgError)
    # The general path, on which calls are recorded, says the same.
    with mt.Tape() as tape:
        x = mt.ones(2)
        tape.watch(x)
        with pytest.raises(mt.errors.ShapeError, match=r"^\[add\] shapes do not broadcast together: \(2,\), \(3,\)"):
            x + mt.ones(3)


def test_an_index_out_of_range_is_refused_even_where_nothing_is_read() -> None:
    x = mt.ones((2, 0))
    with pytest.raises(IndexError, match="index 6 is out of bounds for axis 0 with size 2"):
        x[[6], mt.zeros(0, dtype=mt.int64)]


def test_memory_that_is_not_there_is_an_error_with_the_sizes() -> None:
    huge = (2**20, 2**30)
    for name, make in (
        ("zeros", lambda: mt.zeros(huge)),
        ("full", lambda: mt.full(huge, 1.5)),
        ("empty", lambda: mt.empty(huge)),
        ("add", lambda: mt.broadcast_to(mt.asarray(1.0), huge) + 1.0),
        ("exp", lambda: mt.exp(mt.broadcast_to(mt.asarray(1.0), huge))),
    ):
        with pytest.raises(mt.errors.OutOfMemory, match=rf"^\[{name}\] Unable to allocate 8\.0+ PiB") as e:
            make()
        assert isinstance(e.value, MemoryError)
    with pytest.raises(mt.errors.OutOfMemory, match=r"^\[zeros\]"):
        mt.zeros((2**30, 2**30))
