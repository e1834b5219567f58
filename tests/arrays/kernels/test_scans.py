"""Running sums and products: the kernels' own sources, run on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS
from meshtape.arrays.kernels import scans

FLOATS = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
INTEGERS = [np.dtype(t) for t in ("?", "u2", "i4", "i8")]
INTEGERS += [pytest.param(np.dtype(t), marks=pytest.mark.slow) for t in ("i1", "u1", "i2", "u4", "u8")]
SHAPES = [
    *[((5, 40), 1), ((3, 1), 1), ((2, 7, 1500), 2), ((3, 2051), -1), ((9,), 0)],
    *[((70, 64), 0), ((3, 130, 33), 1), ((1, 65, 256), 1), ((6, 5, 3), 1), ((4, 6), 0)],
]


def running(name: str, x: Any, axis: int) -> Any:
    return OPS[name].overrides["cupy"](x, axis=axis % x.ndim)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_running_sums_of_floats(
    emulator: Any, place: Any, close: Any, shape: Any, axis: int, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "_LONG", 1 << 30)
    rng = np.random.default_rng(0)
    x = place(rng.normal(1, 1, shape), dtype)
    got = running("cumulative_sum", x, axis)
    assert (got.dtype, got.shape) == (dtype, shape)
    close(got, np.cumsum(x.astype(np.float64), axis=axis))
    if dtype == np.float32:  # each dtype has kernels of its own, which take a second to compile
        x = place(rng.uniform(0.9, 1.1, shape), dtype)
        close(running("cumulative_prod", x, axis), np.cumprod(x.astype(np.float64), axis=axis))
    assert len(emulator.launched) == 1 + (dtype == np.float32)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_running_sums_of_integers_wrap(
    emulator: Any, place: Any, shape: Any, axis: int, dtype: np.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "_LONG", 1 << 30)
    rng = np.random.default_rng(0)
    x = place(rng.integers(0, 2, shape).astype(dtype) if dtype.kind == "b" else rng.integers(1, 9, shape), dtype)
    if dtype.itemsize == 8:
        x = place(x + (np.iinfo(dtype).max - 20), dtype)
    for name in ("cumsum", "cumprod") if dtype == np.int32 else ("cumsum",):
        got = running(f"cumulative_{name[3:]}", x, axis)
        want = getattr(np, name)(x, axis=axis)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("shape", "axis"), [((3, 300), 1), ((300, 40), 0), ((4, 50), 1)])
def test_infinities_and_signs_reach_what_follows_alone(emulator: Any, place: Any, shape: Any, axis: int) -> None:
    x = np.moveaxis(np.random.default_rng(0).normal(size=shape), axis, -1)
    x[..., 20], x[0, 37], x[1, 30], x[2, :5] = np.inf, -np.inf, np.nan, -0.0
    x = place(np.moveaxis(x, -1, axis), np.float32)
    got = running("cumulative_sum", x, axis)
    with np.errstate(invalid="ignore"):
        want = np.cumsum(x, axis=axis, dtype=np.float32)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.signbit(np.moveaxis(got, axis, -1)[2, :5]), True)


def test_operands_may_lie_in_any_way(emulator: Any, place: Any) -> None:
    x = place(np.random.default_rng(0).integers(0, 99, (6, 8, 40)), np.float32)
    for y in (x.transpose(2, 0, 1), x[:, ::2, 3:], x[::-1, :, ::-1], x[:, :, 1:]):
        for axis in range(3):
            np.testing.assert_array_equal(running("cumulative_sum", y, axis), np.cumsum(y, axis=axis))


def test_dtypes_and_rows_that_kernels_leave(emulator: Any, place: Any) -> None:
    assert scans.running("Sum", place(np.ones(4), np.complex64), 0) is NotImplemented
    assert scans.running("Sum", place(np.ones(scans._LONG + 1), np.float32), 0) is NotImplemented
    assert running("cumulative_sum", place(np.ones(4), np.complex64), 0).tolist() == [1, 2, 3, 4]
    assert running("cumulative_sum", place(np.ones((2, 0)), np.int32), 1).shape == (2, 0)
    assert not emulator.launched
