"""Reductions of large arrays: a few megabytes beyond the result, and the values of the plain way; and `dtype=`, as
NumPy has it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.backends import pieces

MIB = 2**20
BEYOND = 16 * MIB
FUNCTIONS: dict[str, Any] = {
    "count_nonzero": mt.count_nonzero,
    "sum": mt.sum,
    "sum in int64": lambda x, **k: mt.sum(x, dtype="int64", **k),
    "sum in float64": lambda x, **k: mt.sum(x, dtype="float64", **k),
    "prod in float32": lambda x, **k: mt.prod(x, dtype="float32", **k),
    "mean": mt.mean,
    "mean in float32": lambda x, **k: mt.mean(x, dtype="float32", **k),
    "var": mt.var,
    "std": lambda x, **k: mt.std(x, correction=1, **k),
    "any": mt.any,
    "all": mt.all,
    "max": mt.max,
    "min": mt.min,
    "average": mt.average,
    "ptp": mt.ptp,
    "nansum": mt.nansum,
    "nanprod": mt.nanprod,
    "nanmean": mt.nanmean,
    "nanvar": mt.nanvar,
    "nanstd": mt.nanstd,
    "nanmax": mt.nanmax,
    "nanmin": mt.nanmin,
}
MASK = np.random.default_rng(3).random((120, 70)) < 0.6
SELECTED: dict[str, Any] = {
    f"{name} where": lambda x, fn=fn, k0=k0, **k: fn(x, where=mt.asarray(MASK), **k0, **k)
    for name, fn, k0 in [
        ("sum", mt.sum, {}),
        ("sum from 1", mt.sum, {"initial": 1}),
        ("prod", mt.prod, {}),
        ("mean", mt.mean, {}),
        ("var", mt.var, {}),
        ("std", mt.std, {"correction": 1}),
        ("any", mt.any, {}),
        ("all", mt.all, {}),
        ("max", mt.max, {"initial": 1}),
        ("min", mt.min, {"initial": 1}),
        ("average", lambda x, where, **k: mt.average(x, weights=mt.astype(mt.asarray(1 + MASK), x.dtype), **k), {}),
    ]
}
DTYPES = ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]
UNORDERED = {"max", "min", "ptp", "nanmax", "nanmin"}


def filled(dtype: str, shape: tuple[int, int], order: Any = "C") -> mt.Array:
    rng = np.random.default_rng(2)
    host = rng.integers(0, 4, size=shape).astype(np.float32)
    return mt.asarray(np.asarray(np.asarray(mt.asarray(host).astype(dtype)), order=order))


def skipped(name: str, dtype: str) -> bool:
    words = name.split()
    name = words[0]
    cast = dtype == "complex64" and "in" in words
    return cast or (dtype == "complex64" and name in UNORDERED) or (name == "ptp" and dtype == "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_take_little_memory(dtype, peak_of):
    itemsize = mt.zeros(1, dtype=dtype).nbytes
    x = filled(dtype, (20 * MIB // itemsize // 1024, 1024))
    assert x.nbytes > BEYOND
    for turn, (name, fn) in enumerate(FUNCTIONS.items(), DTYPES.index(dtype)):
        if skipped(name, dtype):
            continue
        axis = (None, 0, 1)[turn % 3]  # over the dtypes, each function has each of them
        peak = peak_of(lambda fn=fn, axis=axis: fn(x, axis=axis), below=BEYOND)
        assert peak < BEYOND, (name, axis, f"{peak / MIB:.0f} MiB beyond an array of 20")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_in_pieces_they_give_what_they_give_at_once(dtype, order, monkeypatch):
    x = filled(dtype, (120, 70), order)
    if x.dtype.kind not in "biu":
        x[3, 4] = x[:, 7] = mt.nan
    numbers = filled(dtype, (120, 70), order)
    for name, fn in {**FUNCTIONS, **SELECTED}.items():
        if skipped(name, dtype):
            continue
        given = x if "nan" in name else numbers
        for axis in (None, 0, 1, (0, 1)):
            for keepdims in (False, True):
                if name in ("average", "average where") and isinstance(axis, tuple):
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    plain = fn(given, axis=axis, keepdims=keepdims)
                    with monkeypatch.context() as m:
                        m.setattr(pieces, "LARGE", 1)
                        m.setattr(pieces, "PIECE", 900)
                        parts = fn(given, axis=axis, keepdims=keepdims)
                assert (parts.shape, parts.dtype) == (plain.shape, plain.dtype), name
                eps = 1e-2 if dtype in ("float16", "bfloat16") else 1e-5
                wide = np.complex128 if parts.dtype.kind == "c" else np.float64
                np.testing.assert_allclose(
                    np.asarray(parts).astype(wide), np.asarray(plain).astype(wide), rtol=eps, err_msg=name
                )


def test_in_pieces_they_give_element_by_element_what_they_give_at_once(monkeypatch):
    table, values = mt.asarray([-1.0, 0.0, 0.5, 2.0]), mt.asarray([3.0, 1.0, 2.0, 8.0])
    functions = {
        "interp": lambda x: mt.interp(x, table, values),
        "interp, periodic": lambda x: mt.interp(x, table, values, period=2.5),
        "isin": lambda x: mt.isin(x, table),
        "isin, inverted": lambda x: mt.isin(x, [1, 2], invert=True),
        "sinc": mt.sinc,
        "nanquantile": lambda x: mt.nanquantile(x, [0.2, 0.9], axis=0),
        "nanquantile of two": lambda x: mt.nanquantile(mt.reshape(x, (12, 10, 70)), 0.4, axis=(0, 2)),
    }
    for name, fn in functions.items():
        for dtype in ("int16", "float16", "float32", "float64"):
            for order in "CF":
                x = filled(dtype, (120, 70), order)
                plain = fn(x)
                with monkeypatch.context() as m:
                    m.setattr(pieces, "LARGE", 1)
                    m.setattr(pieces, "PIECE", 900)
                    parts = fn(x)
                assert (parts.shape, parts.dtype) == (plain.shape, plain.dtype), name
                np.testing.assert_array_equal(np.asarray(parts), np.asarray(plain), err_msg=name)


# ----- dtype= ---------------------------------------------------------------------------------------------------------

WITH_DTYPE = [
    "sum",
    "prod",
    "mean",
    "std",
    "var",
    "nansum",
    "nanprod",
    "nanmean",
    "nanstd",
    "nanvar",
    "cumsum",
    "cumprod",
    "nancumsum",
    "nancumprod",
]
METHODS = ["sum", "prod", "mean", "std", "var", "cumsum", "cumprod"]
PAIRS = [
    ("float32", "float64"),
    ("float64", "float32"),
    ("int16", "float32"),
    ("int64", "float64"),
    ("bool", "int8"),
    ("float32", "complex64"),
    ("float64", "int64"),
]


@pytest.mark.parametrize(("given", "asked"), PAIRS)
@pytest.mark.parametrize("name", WITH_DTYPE)
def test_dtype(name, given, asked):
    if asked in ("int8", "int64") and name in ("std", "var", "nanstd", "nanvar", "nanmean", "mean"):
        pytest.skip("NumPy cannot: it has no place for the quotient")
    host = np.asarray([[1, 2, 3], [2, 0, 1]]).astype(given)
    x = mt.asarray(host)
    for axis in (None, 0, 1):
        expected = getattr(np, name)(host, axis=axis, dtype=asked)
        ways = [getattr(mt, name), mt.compile(getattr(mt, name))]
        calls = [f(x, axis=axis, dtype=asked) for f in ways]
        if name in METHODS:
            calls += [getattr(x, name)(axis=axis, dtype=asked), getattr(x, name)(axis, asked)]
        for found in calls:
            real = name.endswith(("std", "var"))
            # NumPy calls the variance of complex numbers complex, with an imaginary part of 0.
            assert found.dtype == (expected.real.dtype if real else expected.dtype)
            np.testing.assert_allclose(np.asarray(found), expected.real if real else expected, rtol=1e-6)
    split = mt.distribute(x, mt.Mesh({"data": 2}), data=mt.Shard(0))
    np.testing.assert_allclose(
        np.asarray(getattr(mt, name)(split, axis=1, dtype=asked)),
        getattr(np, name)(host, axis=1, dtype=asked).real,
        rtol=1e-6,
    )


@pytest.mark.parametrize("name", ["mean", "var", "std", "nanmean", "nanvar", "nanstd", "nansum", "sum"])
def test_dtype_has_a_gradient_and_its_errors(name):
    fn = getattr(mt, name)
    mt.check_grads(lambda x: fn(x, dtype="float64"), mt.asarray([0.5, 2.0, -1.0]), order=1)
    with pytest.raises(mt.errors.DTypeError, match="imaginary"):
        fn(mt.asarray([1j, 2.0]), dtype="float64")
    with pytest.raises((TypeError, ValueError), match="dtype"):
        fn(mt.asarray([1.0]), dtype="no such")
