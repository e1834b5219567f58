"""Compiled functions and values that are none of the result's: the same answer or error as eager ones."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import DTypeError, NumberRangeError, TracedValueError

X = mt.asarray([1.0, 2.0, 3.0])


# ----- keys of programs -----------------------------------------------------------------------------------------------

EQUAL = {
    "one": [1, True, 1.0, 1 + 0j],
    "zero": [0, False, 0.0, -0.0, 0j, complex(0.0, -0.0), complex(-0.0, 0.0)],
    "in a tuple": [(1,), (True,), (1.0,), ((1,),), ((True,),)],
    "zero in a tuple": [(0.0,), (-0.0,), (0,), ("a", -0.0), ("a", 0.0)],
}


@pytest.mark.parametrize("keys", EQUAL.values(), ids=EQUAL)
@pytest.mark.parametrize(
    "tree", [lambda k: {k: 1.0}, lambda k: {k: {"a": X}}, lambda k: [{"b": 1, k: (X,)}], lambda k: {"c": {k: None}}]
)
def test_equal_keys_of_dicts_are_other_signatures(keys, tree):
    seen = mt.compile(lambda x, tree: repr(next(iter(_dict(tree)))))

    def _dict(t):
        while not (type(t) is dict and any(type(k) is not str for k in t)):
            t = next(iter(t.values())) if type(t) is dict else t[0]
        return [k for k in t if k != "b"]

    for _ in range(2):
        for k in keys:
            assert seen(X, tree(k)) == repr(k)
    assert seen.signatures == len(keys)


@pytest.mark.parametrize(
    "values",
    [
        *EQUAL.values(),
        [np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.float64(-0.0), np.int64(0), np.bool_(False), 0.0],
        [frozenset({0}), frozenset({False}), frozenset({0.0}), frozenset({-0.0})],
    ],
)
def test_equal_static_arguments_are_other_signatures(values):
    seen = mt.compile(lambda x, v: repr(v))
    for _ in range(2):
        for v in values:
            assert seen(X, v) == repr(v)
            assert mt.compile(lambda x, v=v: repr(v))(X) == repr(v)


def test_equal_keys_of_a_class_are_equal():
    class Key:
        def __eq__(self, other):
            return isinstance(other, Key)

        def __hash__(self):
            return 1

    added = mt.tree_map(lambda a, b: a + b, {Key(): 1}, {Key(): 2})
    assert list(added.values()) == [3]
    seen = mt.compile(lambda d, x: x * next(iter(d.values())))
    seen({Key(): 2.0}, X)
    seen({Key(): 3.0}, X)
    assert seen.signatures == 1


# ----- numbers that an array is filled with ---------------------------------------------------------------------------

FILLS = {
    "full": lambda like, v: mt.full((2,), v, dtype=like.dtype),
    "full_like": lambda like, v: mt.full_like(like, v),
    "full_like of another dtype": lambda like, v: mt.full_like(mt.zeros(2), v, dtype=like.dtype),
    "pad": lambda like, v: mt.pad(like, 1, constant_values=v),
}
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64")


def numbers_for(dtype):
    if dtype.kind not in "iu":
        return [0, 1, True, 2.5, -0.0, 3]
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return [0, 1, True, low, high, high - 1, min(high, 2**53 + 1), low - 1, high + 1, 2**70, -(2**70)]


def outcome(f, *args):
    try:
        found = f(*args)
    except (NumberRangeError, DTypeError) as e:
        return type(e)
    return (
        found.dtype,
        np.asarray(found).tolist(),
        np.signbit(np.asarray(found)).tolist() if found.dtype.kind == "f" else 0,
    )


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_array_is_filled_with(name, dtype):
    fill, like = FILLS[name], mt.zeros(2, dtype=getattr(mt, dtype, dtype))
    passed = mt.compile(fill)
    for v in numbers_for(like.dtype):
        expected = outcome(fill, like, v)
        try:
            theirs = np.full(2, v, like.dtype)
        except OverflowError:
            assert expected is NumberRangeError, v
        else:
            assert expected[0] == like.dtype
            assert theirs[0] == expected[1][0]
        for _ in range(2):
            assert outcome(passed, like, v) == expected, v
            assert outcome(mt.compile(lambda like, v=v: fill(like, v)), like) == expected, v


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_no_imaginary_part_is_dropped(name, dtype):
    fill, like = FILLS[name], mt.zeros(2, dtype=getattr(mt, dtype))
    for f in (fill, mt.compile(fill), lambda like, v: mt.compile(lambda like: fill(like, v))(like)):
        with pytest.raises(DTypeError, match="imaginary part"):
            f(like, 1 + 2j)


@pytest.mark.parametrize(
    ("start", "stop", "num"),
    [(0, 2**64, 2), (-(2**80), 2**80, 5), (2**53 + 1, 0, 3), (0, 1, 4), (True, 3, 3), (1.5, 9, 7)],
)
def test_linspace_between_integers_of_any_size(start, stop, num):
    expected = np.linspace(float(start), float(stop), num)
    for f in (
        lambda a, b: mt.linspace(a, b, num),
        mt.compile(lambda a, b: mt.linspace(a, b, num)),
        lambda a, b: mt.compile(lambda: mt.linspace(a, b, num))(),
    ):
        found = f(start, stop)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(np.asarray(found), expected)
        with pytest.raises(NumberRangeError, match="linspace"):
            f(0, 10**400)


# ----- values that only a run knows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("find", [mt.nanargmax, mt.nanargmin])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_a_slice_of_nan_has_no_place(find, axis, keepdims):
    x = np.asarray([[math.nan, math.nan, 3.0], [math.nan, math.nan, 1.0], [math.nan, 2.0, 9.0]])
    x = np.full((2, 2), math.nan) if axis is None else x.T if axis else x
    with pytest.raises(ValueError, match="NaN throughout"):
        find(mt.asarray(x), axis=axis, keepdims=keepdims)
    found = mt.compile(lambda x: find(x, axis=axis, keepdims=keepdims))(mt.asarray(x))
    bad = np.isnan(x).all(axis=axis, keepdims=keepdims)
    numpy_find = getattr(np, find.__name__)
    expected = np.where(
        bad, -1, numpy_find(np.where(np.isnan(x) & bad_along(x, axis), 0.0, x), axis=axis, keepdims=keepdims)
    )
    np.testing.assert_array_equal(np.asarray(found), expected)


def bad_along(x, axis):
    return np.isnan(x).all(axis=axis, keepdims=True)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    "p", [[0.5, 0.9, -0.4], [0.0, 0.0, 0.0], [math.nan, 1.0, 1.0], [math.inf, 1.0, 1.0], [-1.0, -1.0, -1.0]]
)
def test_weights_that_are_none_are_refused_in_programs_too(p, replace):
    def draw(key, p):
        return mt.random.choice(key, 3, (2,), p=p, replace=replace)

    fast, key = mt.compile(draw), mt.random.key(0)
    good = mt.asarray([0.2, 0.3, 0.5])
    assert fast(key, good).tolist() == draw(key, good).tolist()
    for f in (draw, fast, mt.compile(lambda key: draw(key, mt.asarray(p)))):
        args = (key, mt.asarray(p)) if (f is not draw and f is fast) or f is draw else (key,)
        with pytest.raises(ValueError, match=r"\[choice\] p must hold finite weights"):
            f(*args)
    with pytest.raises(ValueError, match="only 1 elements have a weight"):
        mt.compile(lambda key, p: mt.random.choice(key, 3, (2,), p=p, replace=False))(key, mt.asarray([0.0, 1.0, 0.0]))


def test_counts_whose_length_is_not_known():
    x = mt.asarray([1, 2, 2])
    for kwargs in ({}, {"minlength": 5}, {"weights": mt.ones(3)}):
        with pytest.raises(TracedValueError, match=r"\[bincount\].*pass length="):
            mt.compile(lambda x, kwargs=kwargs: mt.bincount(x, **kwargs))(x)
    assert mt.compile(lambda x: mt.bincount(x, length=5))(x).tolist() == np.bincount([1, 2, 2], minlength=5).tolist()


@pytest.mark.parametrize(("dtype", "k"), [("int8", 300), ("uint8", -1), ("int32", 2**40)])
def test_a_number_of_a_call_that_is_out_of_the_range_of_a_choice(dtype, k):
    x = mt.asarray([1, 0], dtype=dtype)
    for f in (mt.compile(lambda x, k: mt.where(x > 0, x, k)), mt.compile(lambda x, k: mt.where(x > 0, k, x))):
        with pytest.raises(mt.errors.NumberRangeError):
            f(x, k)
        assert f(x, 5).tolist() in ([1, 5], [5, 0])
        with pytest.raises(mt.errors.NumberRangeError):
            f(x, k)


def test_numbers_that_no_double_holds_reach_the_op():
    op = importlib.import_module("meshtape.arrays.ops.elementwise").FULL_LIKE
    x = np.zeros(2, np.int64)
    assert op.numpy(x, value=2**63 - 1, dtype=x.dtype).tolist() == [2**63 - 1] * 2
    assert mt.compile(lambda x: mt.full_like(x, 2**53 + 1))(mt.asarray([1, 2])).tolist() == [2**53 + 1] * 2
