"""Every ufunc of NumPy, over dtypes and methods: the value and dtype that NumPy gives, and an error where it has
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
UFUNCS = sorted({u.__name__: u for u in vars(np).values() if isinstance(u, np.ufunc) and not u.signature}.items())
MASK = np.array([True, False, True])
# Stricter than NumPy, by name: results of another kind are not cut off in silence.
STRICTER = ("reduce", "accumulate", "at")


def numbers(dtype: str) -> np.ndarray:
    return np.array([True, False, True]) if dtype == "bool" else np.array([1, 2, 3], dtype)


def outcome(call: Callable[[Any], Any], make: Any) -> Any:
    with np.errstate(all="ignore"):
        try:
            return call(make)
        except (TypeError, ValueError, OverflowError) as e:
            return e


def compare(what: str, call: Callable[[Any], Any], rough: bool = False) -> None:
    want, got = outcome(call, np.array), outcome(call, mt.asarray)
    if isinstance(want, Exception):
        assert isinstance(got, Exception), (what, want, got)
        return
    if isinstance(got, Exception):
        assert isinstance(got, mt.errors.MeshtapeError), (what, got)
        assert any(s in what for s in STRICTER), (what, got, want)
        return
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (want, got)), strict=True)
    for w, g in pairs:
        w, g = np.asarray(w), np.asarray(g)
        assert (w.dtype, w.shape) == (g.dtype, g.shape), (what, w, g)
        np.testing.assert_allclose(g, w, rtol=5e-3 if rough else 1e-6, err_msg=what)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n, _ in UFUNCS])
def test_calls(name: str) -> None:
    ufunc = getattr(np, name)
    for dtype in DTYPES:
        xs = [numbers(dtype), numbers(dtype)[::-1].copy()][: ufunc.nin]
        # What bools and small integers become is computed in float16 here, and rounded on the way.
        rough = dtype in ("bool", "int8", "uint8", "float16")
        compare(f"{name} {dtype}", lambda make, xs=xs: ufunc(*map(make, xs)), rough)
        if ufunc.nin == 2:
            compare(f"{name} {dtype}, 2", lambda make, xs=xs: ufunc(make(xs[0]), 2), rough)
            compare(f"{name} {dtype}, 2.5", lambda make, xs=xs: ufunc(make(xs[0]), 2.5), rough)
            compare(f"{name} {dtype}, int16", lambda make, xs=xs: ufunc(make(xs[0]), make(numbers("int16"))), rough)
            compare(f"{name}.outer {dtype}", lambda make, xs=xs: ufunc.outer(*map(make, xs)), rough)
        for other in ("bool", "int64", "float16", "float32", "float64", "complex128"):
            rough = rough or other == "float16"
            compare(f"{name} {dtype} dtype={other}", lambda make, xs=xs, t=other: ufunc(*map(make, xs), dtype=t), rough)
            if ufunc.nout == 1:
                out = np.ones(3, other)
                compare(
                    f"{name} {dtype} out {other}", lambda make, xs=xs, o=out: ufunc(*map(make, xs), out=make(o)), rough
                )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"axis": None},
    {"keepdims": True},
    {"initial": 1},
    {"where": MASK},
    {"where": MASK, "initial": 1},
    {"dtype": "float64"},
    {"dtype": "int64"},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n, u in UFUNCS if u.nin == 2])
def test_methods(name: str) -> None:
    ufunc = getattr(np, name)
    for dtype in DTYPES:
        x, y = numbers(dtype), numbers(dtype)[::-1].copy()
        for options in OPTIONS:
            compare(f"{name}.reduce {dtype} {options}", lambda make, x=x, o=options: ufunc.reduce(make(x), **o))
        for options in ({}, {"dtype": "float64"}):
            compare(f"{name}.accumulate {dtype} {options}", lambda make, x=x, o=options: ufunc.accumulate(make(x), **o))

        def at(make: Any, value: Any, x: Any = x) -> Any:
            target = make(x)
            ufunc.at(target, [0, 2], value if isinstance(value, int) else make(value))
            return target

        if ufunc.nout == 1:
            compare(f"{name}.at {dtype}", lambda make, y=y, at=at: at(make, y[:2]), dtype == "float16")


def test_differences_of_unsigned_numbers_are_signed_where_the_target_is() -> None:
    x = mt.asarray([5, 5], dtype=mt.int16)
    np.subtract.at(x, [0], mt.asarray([3], dtype=mt.uint8))
    assert x.tolist() == [2, 5]  # not 258
    assert mt.asarray([5, 5], dtype=mt.int16).at[0].subtract(np.array(3, np.uint8)).tolist() == [2, 5]


def test_updates_of_repeated_places() -> None:
    x = np.array([8.0, 3.0, 2.0])
    key, v = [0, 2, 0], np.array([2.0, 4.0, 0.5])
    for name in ("subtract", "divide", "power"):
        want = x.copy()
        getattr(np, name).at(want, key, v)
        write = lambda a, b, name=name: getattr(a.at[key], name)(b)  # noqa: E731
        np.testing.assert_allclose(np.asarray(write(mt.asarray(x), v)), want)
        mt.check_grads(write, mt.asarray(x), mt.asarray(v), order=1)
    with pytest.raises(mt.errors.DTypeError):
        mt.asarray([4, 4]).at[0].divide(2)


def test_initial_values_are_of_the_kind_of_the_array() -> None:
    for fn in (mt.max, mt.min, mt.sum, mt.prod):
        with pytest.raises(mt.errors.DTypeError, match="initial="):
            fn(mt.asarray([1, 2]), initial=2.5)
