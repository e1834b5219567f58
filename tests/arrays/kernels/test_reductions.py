"""Sums of columns and extremes of rows: the kernels' own sources, run on the CPU, against float64 and NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS
from meshtape.arrays.kernels import row_norms

FLOATS = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_norms, "_LEAST", 1)


def cuda(name: str, x: Any, **params: Any) -> Any:
    return OPS[name].overrides["cupy"](x, **params)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((700, 160), (0,)), ((3, 129), (0,)), ((1, 256), (0,)), ((20, 30, 257), (1, 0)), ((9, 8, 40), (0,))],
)
def test_sums_of_columns(emulator: Any, place: Any, close: Any, shape: Any, axis: Any, dtype: np.dtype) -> None:
    x = place(np.random.default_rng(0).normal(1, 2, shape), dtype)
    exact, count = x.astype(np.float64), int(np.prod([shape[a] for a in axis]))
    for keepdims in (False, True):
        total = cuda("sum", x, axis=axis, keepdims=keepdims)
        mean = cuda("mean", x, axis=axis, keepdims=keepdims, count=count)
        assert total.dtype == mean.dtype == dtype
        close(total, exact.sum(axis=axis, keepdims=keepdims))
        close(mean, exact.mean(axis=axis, keepdims=keepdims))
    x[..., 5] = np.nan
    x[..., 7] = np.inf
    total = cuda("sum", x, axis=axis, keepdims=False).astype(np.float64)
    assert np.array_equal(np.argwhere(np.isnan(total))[:, -1] % shape[-1] == 5, np.ones(np.isnan(total).sum(), bool))
    assert np.isinf(total[..., 7]).all()


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=lambda d: d.name)
def test_the_sum_of_all(emulator: Any, place: Any, close: Any, dtype: np.dtype) -> None:
    x = place(np.random.default_rng(0).normal(1, 2, (8, 6, 512)), dtype)
    exact = x.astype(np.float64)
    for keepdims in (False, True):
        total = cuda("sum", x, axis=(0, 1, 2), keepdims=keepdims)
        mean = cuda("mean", x, axis=(0, 1, 2), keepdims=keepdims, count=x.size)
        assert total.dtype == mean.dtype == dtype
        assert total.shape == (1, 1, 1) * keepdims
        close(np.asarray(total), exact.sum(keepdims=keepdims))
        close(np.asarray(mean), exact.mean(keepdims=keepdims))
    assert cuda("sum", x[:7, :5, :3], axis=(0, 1, 2), keepdims=False) is NotImplemented


def test_sums_that_the_kernel_leaves(emulator: Any, place: Any) -> None:
    x = place(np.ones((40, 50, 64)), np.float32)
    for y, axis in (
        (x, (1,)),
        (x, (2,)),
        (x, (0, 2)),
        (x, (0, 1, 2)),
        (x.transpose(1, 0, 2), (0,)),
        (x[..., :3], (0,)),
    ):
        assert cuda("sum", y, axis=axis, keepdims=False) is NotImplemented
        assert cuda("mean", y, axis=axis, keepdims=False, count=40) is NotImplemented
    assert not emulator.launched


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=lambda d: d.name)
@pytest.mark.parametrize(("shape", "axis"), [((130, 77), (1,)), ((128, 2051), (1,)), ((3, 50, 5, 16), (3, 2))])
def test_extremes_of_rows(emulator: Any, place: Any, shape: Any, axis: Any, dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    x = place(rng.normal(size=shape), dtype)
    x.reshape(-1)[rng.integers(0, x.size, 20)] = np.nan
    x[1], x[2] = -np.inf, np.inf
    for name in ("max", "min"):
        for keepdims in (False, True):
            got = cuda(name, x, axis=axis, keepdims=keepdims)
            expected = getattr(x.astype(np.float32), name)(axis=axis, keepdims=keepdims)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.astype(np.float32), expected)
    assert {k.partition("<")[0] for _, k, _, _ in emulator.launched} == {"row_extremes"}


def test_extremes_that_the_kernel_leaves(emulator: Any, place: Any) -> None:
    x = place(np.ones((130, 64)), np.float16)
    others = ((x, (0,)), (x, (0, 1)), (x[:100], (1,)), (x[:, :5], (1,)), (place(np.ones((130, 64)), np.float32), (1,)))
    for y, axis in others:
        assert cuda("max", y, axis=axis, keepdims=False) is NotImplemented
    assert not emulator.launched


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(130, 77), (128, 2051), (2, 70, 33)])
def test_places_of_extremes(emulator: Any, place: Any, shape: Any, dtype: np.dtype) -> None:
    """The first of equal ones, and of NaN; of rows of infinities too."""
    rng = np.random.default_rng(0)
    x = place(rng.integers(-3, 4, shape), dtype)
    flat = x.reshape(-1, shape[-1])
    flat[3, [9, 20]] = flat[5, :] = flat[6, -1] = np.nan
    flat[1], flat[2], flat[7, 4:] = -np.inf, np.inf, -np.inf
    for name in ("argmax", "argmin"):
        for keepdims in (False, True):
            got = cuda(name, x, axis=x.ndim - 1, keepdims=keepdims)
            expected = getattr(np, name)(x.astype(np.float64), axis=-1, keepdims=keepdims)
            assert got.dtype == np.int64
            np.testing.assert_array_equal(got, expected)
    assert {k.partition("<")[0] for _, k, _, _ in emulator.launched} == {"row_places"}
