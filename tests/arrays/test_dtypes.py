"""Dtypes: names, kinds, limits, promotion, and the casts of eight-bit floats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.core import dtypes
from meshtape.arrays.core.errors import DTypeError

FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'float7'.*bfloat16"):
        dtypes.parse("float7")


def test_kinds():
    assert mt.isdtype(mt.int8, "integral")
    assert mt.isdtype(mt.bfloat16, ("bool", "real floating"))
    assert not mt.isdtype(mt.bool, "numeric")
    assert mt.isdtype(mt.complex64, (mt.complex64, "bool"))
    with pytest.raises(ValueError, match="signed integer"):
        mt.isdtype(mt.int8, "int")


def test_limits():
    assert mt.finfo(mt.bfloat16).bits == 16
    assert mt.finfo(mt.float8_e5m2).max == 57344
    assert mt.finfo(mt.complex64) == mt.finfo(mt.float32)
    assert mt.finfo(mt.ones(1)).eps == np.finfo(float).eps
    assert (mt.iinfo(mt.uint8).min, mt.iinfo(mt.ones(1, dtype=mt.int16)).max) == (0, 32767)
    with pytest.raises(DTypeError):
        mt.finfo(mt.int8)
    with pytest.raises(DTypeError):
        mt.iinfo(mt.bool)


def test_promotion():
    assert mt.result_type(mt.int8, mt.uint8) == mt.int16
    assert mt.result_type(mt.float32, 1.0, 2) == mt.float32
    assert mt.result_type(mt.bfloat16, 1.0) == mt.bfloat16
    assert mt.result_type(mt.bfloat16, 1j) == mt.complex64
    assert mt.result_type(mt.ones(2, dtype=mt.float32), mt.float64) == mt.float64
    assert mt.result_type(mt.int8, 1.5) == mt.float64
    with pytest.raises(ValueError, match="at least one"):
        mt.result_type()


def test_casts_that_lose_nothing():
    assert mt.can_cast(mt.int8, mt.int16)
    assert not mt.can_cast(mt.int16, mt.int8)
    assert not mt.can_cast(mt.complex64, mt.float64)
    assert mt.can_cast(mt.ones(1, dtype=mt.float16), mt.float32)


# 464 is half way between 448 and what would be next, 480; rounding to even keeps 448.
E4M3 = [(448, 448), (464, 448), (464.1, math.nan), (480, math.nan), (math.inf, math.nan), (-math.inf, math.nan)]
E4M3 += [(2**-9, 2**-9), (2**-10, 0), (math.nan, math.nan)]
E5M2 = [(57344, 57344), (61439, 57344), (61440, math.inf), (math.inf, math.inf), (464.1, 448), (480, 512)]


@pytest.mark.parametrize(("dtype", "table"), [(mt.float8_e4m3fn, E4M3), (mt.float8_e5m2, E5M2)], ids=str)
@pytest.mark.parametrize("source", ["float64", "float32"])
def test_eight_bit_casts(dtype, table, source):
    x = mt.asarray([a for a, _ in table], dtype=getattr(mt, source))
    np.testing.assert_array_equal(np.asarray(mt.astype(x, dtype)).astype(float), [b for _, b in table])


@pytest.mark.parametrize(
    ("dtype", "most"), [(mt.float8_e4m3fn, 448.0), (mt.float8_e5m2, 57344.0), (mt.float16, 65504.0)]
)
def test_saturating_casts(dtype, most):
    x = mt.asarray([1e30, -1e30, math.inf, -math.inf, math.nan, 1.0, most])
    got = np.asarray(mt.astype(x, dtype, saturate=True)).astype(float)
    np.testing.assert_array_equal(got, [most, -most, most, -most, math.nan, 1, most])
    assert float(mt.astype(mt.asarray(10**9), dtype, saturate=True)) == most
    # From a narrower dtype nothing can be out of range.
    np.testing.assert_array_equal(
        np.asarray(mt.astype(mt.asarray([1.5], dtype=mt.float8_e5m2), mt.float32, saturate=True)), [1.5]
    )


@pytest.mark.parametrize("name", FLOAT8)
def test_all_patterns_survive_widening_and_back(name):
    every = np.arange(256, dtype=np.uint8).view(FLOAT8[name])
    there = mt.astype(mt.asarray(every), mt.float32)
    back = np.asarray(mt.astype(there, getattr(mt, name)))
    same = (back.view(np.uint8) == every.view(np.uint8)) | (
        np.isnan(every.astype(float)) & np.isnan(back.astype(float))
    )
    assert same.all()


@pytest.mark.parametrize("dtype", [mt.bfloat16, mt.float8_e4m3fn, mt.float8_e5m2], ids=str)
def test_numbers_never_widen_short_floats(dtype):
    x = mt.asarray([0.5, 2.0], dtype=dtype)
    for y in (x + 0.5, 1 - x, x * 2, x / 2.0, mt.maximum(x, 0.0), mt.where(x > 1, x, 0.0), x**2, mt.clip(x, 0, 1)):
        assert y.dtype == dtype
    assert (x + 1j).dtype.kind == "c"


def test_complex_numbers_are_not_cut_in_silence():
    with pytest.raises(DTypeError, match="imaginary"):
        mt.astype(mt.asarray([1j]), mt.float64)
    assert mt.astype(mt.asarray([1j, 0j]), mt.bool).tolist() == [True, False]


def test_what_the_namespace_says_of_itself():
    info = mt.asarray(1).__array_namespace__().__array_namespace_info__()
    assert set(info.dtypes(kind="real floating")) == {"float32", "float64"}
    assert "bfloat16" not in info.dtypes()
    assert info.default_dtypes()["real floating"] == mt.zeros(1).dtype
    assert info.default_dtypes()["integral"] == mt.arange(1).dtype
    assert info.default_device() in info.devices()
    assert info.capabilities()["boolean indexing"] is True
    assert set(info.dtypes(kind=("bool", "complex floating"))) == {"bool", "complex64", "complex128"}
