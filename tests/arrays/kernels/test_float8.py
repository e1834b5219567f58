"""Casts of float8 on CUDA: to the bit those of the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays.backends.casts import cast
from meshtape.arrays.kernels import float8, launch
from meshtape.arrays.linalg.float8 import FLOAT8_SCALE

FLOAT8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]


def numbers(dtype: np.dtype, of: np.dtype) -> np.ndarray:
    """Every number of two bytes or less; of longer ones, random bits, and what lies at and beside the middles between
    float8 numbers."""
    if dtype.itemsize == 1:
        return np.arange(256).astype(np.uint8).view(np.uint8 if dtype.kind == "b" else dtype).astype(dtype)
    if dtype.itemsize == 2:
        return np.arange(1 << 16).astype(np.uint16).view(dtype)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, 4096 * dtype.itemsize, np.uint8).view(dtype)
    whole = np.arange(256).astype(np.uint8).view(of).astype(np.float64)
    whole = np.unique(whole[np.isfinite(whole)])
    middles = np.concatenate([whole, (whole[1:] + whole[:-1]) / 2, [464, 465, 480, 57344, 61440, 65536, 1e300]])
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            middles = np.concatenate([middles, -middles]).astype(dtype)
        beside = [np.nextafter(middles, dtype.type(s)) for s in (np.inf, -np.inf)]
        return np.concatenate([bits, middles, *beside, np.asarray([np.inf, -np.inf, np.nan, -np.nan, -0.0], dtype)])
    middles = middles[(abs(middles) < 1e5) & ((middles >= 0) | (dtype.kind == "i"))]
    return np.concatenate([bits, middles.astype(dtype), np.arange(3000).astype(dtype)])


@pytest.mark.parametrize("of", FLOAT8, ids=lambda d: d.name)
def test_float8_casts(emulator: Any, place: Any, of: np.dtype) -> None:
    codes = np.arange(256).astype(np.uint8)
    wide = float8.widened(place(codes), of)
    np.testing.assert_array_equal(wide.view(np.uint32), codes.view(of).astype(np.float32).view(np.uint32))
    for dtype in launch.NAMES:
        x = numbers(dtype, of)
        with np.errstate(all="ignore"):
            want = cast(x, of).view(np.uint8)
        got = float8.narrowed(place(x), of)
        np.testing.assert_array_equal(got, want, err_msg=f"of {dtype}")
    assert float8.widened(place(codes[:0].reshape(0, 3)), of).shape == (0, 3)


@pytest.mark.parametrize("of", FLOAT8, ids=lambda d: d.name)
def test_scaled_float8(emulator: Any, place: Any, of: np.dtype) -> None:
    most = np.float32(ml_dtypes.finfo(of).max)
    for dtype in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)):
        x = numbers(dtype, of)
        for scale in (1.0, 0.125, 2.0**-126, 3.0, np.inf, np.nan):
            with np.errstate(all="ignore"):
                z = x.astype(np.float32) / np.float32(scale)
                want = np.where(np.isfinite(z), np.clip(z, -most, most), z).astype(of)
            got = float8.scaled(place(x), place(np.asarray(scale, np.float32)), of).view(of)
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("of", FLOAT8, ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", float8.SCALED, ids=lambda d: d.name)
def test_scales(emulator: Any, place: Any, dtype: np.dtype, of: np.dtype) -> None:
    """Those of NumPy: of lengths that vectors and blocks do not divide, and of what is extreme or not finite."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n).astype(dtype) for n in (0, 1, 7, 8, 4097, 9001)]
    most = float(ml_dtypes.finfo(of).max)
    arrays += [np.asarray([x, -x / 3], np.float32).astype(dtype) for x in (most, most / 64, 2 * most, 1e-44, 0.0, 3e38)]
    arrays += [np.asarray([1, x, -2], dtype) for x in (np.nan, np.inf, -np.inf)]
    for x in arrays:
        with np.errstate(over="ignore"):
            want = FLOAT8_SCALE.numpy(x, dtype=of)
        np.testing.assert_array_equal(float8.scale(place(x), of), want)
