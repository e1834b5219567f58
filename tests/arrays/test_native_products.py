"""Products of matrices: those in C against NumPy's, and stacks of rows that are multiplied at once.

Where the kernels are not built the first are skipped; the tests of the wheel run them on one that has them.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays import native
from meshtape.arrays.backends import threads
from meshtape.arrays.core.errors import ShapeError
from meshtape.arrays.native import ops
from meshtape.arrays.ops.matmul import product

in_c = pytest.mark.skipif(
    not native.AVAILABLE or native._kernels.product(np.ones((64, 64)), np.ones((64, 64)), np.empty((64, 64))) is None,
    reason="no products in C: the kernels are not built here, or not for this processor",
)
DTYPES = [np.float32, np.float64]
WIDTHS = [64, 32]


def placed(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: Any) -> np.ndarray:
    a = rng.standard_normal(shape).astype(dtype)
    if kind == "columns":
        return np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
    if kind == "gaps":
        wider = np.zeros((*shape[:-2], shape[-2] + 3, shape[-1] + 5), dtype)
        wider[..., 1:-2, 2:-3] = a
        return wider[..., 1:-2, 2:-3]
    if kind == "backwards":
        return np.ascontiguousarray(a[..., ::-1, :])[..., ::-1, :]
    return a


def shapes(kinds: tuple[str, str]) -> Iterator[tuple[int, int, int]]:
    """Heights of tiles and what is left of them, widths of panels and parts of one, and steps in one and in several passes."""
    _, right = kinds
    for m, n, k in itertools.product(
        (8, 11, 12, 13, 25, 64, 125), (48, 63, 64, 65, 100, 384, 401), (8, 10, 16, 17, 64, 130, 511, 513, 1100)
    ):
        if k * n * 8 <= 1 << 20 and (right != "columns" or m >= 32) and (m * n * k) % 7 < 4:
            yield m, n, k


def exact(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in twice the digits, and what a sum of ``k`` products in any order may be away from it."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    a, b = x.astype(wide), y.astype(wide)
    return a @ b, np.abs(a) @ np.abs(b) * (x.shape[-1] + 2) * np.finfo(x.dtype).eps


@in_c
@pytest.mark.parametrize("widest", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kinds",
    [("rows", "rows"), ("columns", "rows"), ("rows", "columns"), ("gaps", "gaps"), ("backwards", "backwards")],
    ids="-".join,
)
def test_every_shape_and_layout_is_the_product(kinds: tuple[str, str], dtype: Any, widest: int) -> None:
    rng = np.random.default_rng(0)
    seen = 0
    for m, n, k in shapes(kinds):
        if m * n * k > 3_000_000 and (m + n + k) % 5:
            continue
        x, y = placed(rng, (m, k), kinds[0], dtype), placed(rng, (k, n), kinds[1], dtype)
        out = np.full((m + 2, n), np.nan, dtype)
        assert native._kernels.product(x, y, out[1:-1], widest) is not None, (m, n, k)
        if m * n * k < 500_000:
            expected, error = exact(x, y)
        else:
            expected, error = x.astype(np.float64) @ y.astype(np.float64), 1e-3 if dtype == np.float32 else 1e-10
        assert (np.abs(out[1:-1] - expected) <= error).all(), (m, n, k)
        assert np.isnan(out[[0, -1]]).all()  # nothing is written beside it
        seen += 1
    assert seen > 20


@in_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_has_the_bits_of_the_whole(dtype: Any) -> None:
    """So have narrower vectors, other layouts, and a matrix in a stack: what is summed, and in which order, is the same."""
    rng = np.random.default_rng(0)
    for k in (40, 700, 1030):
        x, y = placed(rng, (150, k), "rows", dtype), placed(rng, (k, 110), "rows", dtype)
        whole = np.empty((150, 110), dtype)

        def part(rows: slice, columns: slice, a: np.ndarray = x, b: np.ndarray = y, widest: int = 64) -> np.ndarray:
            a, b = a[rows], b[:, columns]
            out = np.empty((a.shape[0], b.shape[1]), dtype)
            assert native._kernels.product(a, b, out, widest) is not None
            return out

        whole = part(slice(None), slice(None))
        for rows, columns in (
            (slice(0, 13), slice(0, 110)),
            (slice(20, 140), slice(3, 80)),
            (slice(1, 60), slice(50, 99)),
        ):
            np.testing.assert_array_equal(part(rows, columns), whole[rows, columns])
        np.testing.assert_array_equal(part(slice(None), slice(None), widest=32), whole)
        np.testing.assert_array_equal(part(slice(None), slice(None), a=np.asfortranarray(x)), whole)
        np.testing.assert_array_equal(part(slice(None), slice(None), b=np.asfortranarray(y)), whole)
        stack = np.empty((2, 3, 150, 110), dtype)
        xs = np.broadcast_to(x, (2, 3, *x.shape))
        ys = np.stack([y] * 6).reshape(2, 3, *y.shape)
        assert native._kernels.product(xs, ys, stack) is not None
        np.testing.assert_array_equal(stack, np.broadcast_to(whole, stack.shape))


@in_c
def test_stacks_of_several_dimensions() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 2, 20, 30)).transpose(2, 0, 1, 3, 4)[:, ::-1]
    y = rng.standard_normal((2, 4, 3, 60, 30)).transpose(0, 2, 1, 4, 3)
    for right, rows in ((np.ascontiguousarray(y), 20), (y, 40)):
        left = np.concatenate([x] * (rows // 20), axis=-2)
        out = np.empty((2, 3, 4, rows, 60))
        assert native._kernels.product(left, right, out) == 0
        np.testing.assert_allclose(out, left @ right, rtol=1e-12, atol=1e-12)


@in_c
def test_what_is_left_to_numpy() -> None:
    x, out = np.ones((64, 64)), np.full((64, 64), 7.0)
    single, call = x.astype(np.float32), native._kernels.product
    refused: list[tuple[Any, Any, Any]] = [
        (single, x, out),
        (x, x, out.astype(np.float32)),
        (x.astype(np.int64), x.astype(np.int64), out.astype(np.int64)),
        (x.astype(complex), x.astype(complex), out.astype(complex)),
        (x.astype(">f8"), x.astype(">f8"), out),
        (np.ones((128, 128))[::2, ::2], x, out),
        (x, np.ones((128, 128))[::2, ::2], out),
        (x, x, np.full((64, 128), 7.0)[:, ::2]),
        (x[:, :32], x, out),
        (x, x[:, :32], out),
        (x[:0], x, out[:0]),
        (x[:, :0], x[:0], out),
        (x[0], x, out[0]),
        (x[None], x, out[None]),
        (x[None], x[None], np.broadcast_to(out, (1, 64, 64))),  # not to be written
        (x, x[:, :40], np.full((64, 40), 7.0)),  # narrow
        (np.ones((8, 2000)), np.ones((2000, 300)), np.full((8, 300), 7.0)),  # a BLAS's own business
        ([[1.0]], x, out),
    ]
    for a, b, o in refused:
        assert call(a, b, o) is None
        if isinstance(o, np.ndarray):
            assert (o == 7).all()
    both = np.ones((128, 64))
    assert call(both[:64], x, both[32:96]) is None
    assert call(x, both[:64], both[32:96]) is None
    assert (both == 1).all()
    overlapping = np.lib.stride_tricks.as_strided(np.full(64 * 65, 7.0), (64, 64), (8 * 32, 8))
    assert call(x, x, overlapping) is None
    with pytest.raises(TypeError):
        call(x, x)
    assert call(x, x, out, 16) is None  # no such vectors here
    assert call(x, x, out) == 0
    assert (out == 64).all()


@in_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_of_its_own_has_the_same_bits(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for left, right in (((40, 30), (30, 60)), ((3, 2, 40, 30), (3, 2, 30, 60)), ((40, 30), (60, 30))):
        x, y = rng.standard_normal(left).astype(dtype), rng.standard_normal(right).astype(dtype)
        y = y.T if right == (60, 30) else y
        given = np.empty((*left[:-1], 60), dtype)
        assert native._kernels.product(x, y, given) == 0
        own = native._kernels.matmul(x, y)
        assert (own.shape, own.dtype, own.flags.c_contiguous, own.flags.owndata) == (given.shape, dtype, True, True)
        np.testing.assert_array_equal(own, given)
    x[3, 4] = math.inf
    y[4] = 0
    own, raised = native._kernels.matmul(x, y)
    assert raised == 1
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(own, x @ y, rtol=1e-4, atol=1e-4)


@in_c
def test_what_has_no_result_of_its_own() -> None:
    x = np.ones((64, 64))
    for a, b in (
        (x, x.astype(np.float32)),
        (x, np.ones((63, 64))),
        (x, np.ones((64, 40))),
        (x[0], x),
        (x[None], x),
        (np.ones((2, 64, 64)), np.ones((3, 64, 64))),
        (x.astype(np.int64), x.astype(np.int64)),
        (x[:0], x),
        (np.ones((1,) * 9 + (64, 64)), np.ones((1,) * 9 + (64, 64))),
        (x.tolist(), x),
        (np.float64(1.0), x),
    ):
        assert native._kernels.matmul(a, b) is None


@in_c
@pytest.mark.parametrize("several", [1, 4])
def test_refusals_and_warnings_are_the_same_for_one_thread_and_several(
    several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "threads", lambda: several)
    x = np.ones((70, 70))
    x[5] = math.inf
    for a, b in ((x, x), (x[:, :3], x[:3]), (np.stack([x] * 9), np.stack([x] * 9))):
        with np.errstate(invalid="ignore"):  # where rows are infinite, OpenBLAS may say so of places that it fills
            np.testing.assert_array_equal(product(a, b), np.matmul(a, b))
    with pytest.warns(RuntimeWarning, match="invalid value"):
        product(x, np.zeros((70, 70)))
    for a, b in ((x, x[:60]), (np.stack([x] * 9), np.stack([x[:60]] * 9)), (np.stack([x] * 9), np.stack([x] * 8))):
        with pytest.raises(ValueError, match=r"mismatch|could not be broadcast"):
            product(a, b)


@in_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_are_warned_of_as_numpy_does(dtype: Any) -> None:
    x, y = np.ones((70, 64), dtype), np.ones((64, 70), dtype)
    x[5, 7], y[7, 3] = math.inf, 0
    with pytest.warns(RuntimeWarning, match="invalid value encountered in matmul"):
        found = product(x, y)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, np.matmul(x, y))
        np.testing.assert_array_equal(product(x, y), found)
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        product(x, y)
    x[5, 7] = y[7, 3] = np.finfo(dtype).max
    with pytest.warns(RuntimeWarning, match="overflow"):
        product(x, y)
    x[5, 7] = math.nan  # which is no fault of the product
    y[7, 3] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(product(x, y)[5]).all()


@in_c
def test_tiny_numbers_stay_what_they_are() -> None:
    tiny = np.full((64, 64), 1e-30, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(product(tiny, np.full((64, 64), 1e-12, np.float32)), 6.4e-41, rtol=1e-3)


@in_c
def test_stacks_are_shared_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (np.random.default_rng(0).standard_normal((40, 80, 80)) for _ in range(2))
    alone = ops.matmul(x, y)
    monkeypatch.setattr(ops, "threads", lambda: 4)
    monkeypatch.setattr(threads, "threads", lambda: 4)
    shared = ops.matmul(x, y)
    np.testing.assert_array_equal(shared, alone if alone is not NotImplemented else shared)
    np.testing.assert_allclose(shared, x @ y, rtol=1e-12, atol=1e-12)
    assert ops.matmul(x[0], y[0]) is NotImplemented  # a BLAS shares one product


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128, np.int64])
@pytest.mark.parametrize("lead", [(5, 12), (2, 3, 10), (60, 1), (0, 4), (1, 60)])
def test_a_stack_of_rows_times_one_matrix(lead: tuple[int, ...], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(s).astype(dtype) for s in ((*lead, 30), (30, 50)))
    for a in (x, np.asfortranarray(x)):
        found = product(a, y)
        assert (found.shape, found.dtype) == ((*lead, 50), np.dtype(dtype))
        np.testing.assert_allclose(found, np.matmul(a, y), rtol=1e-5, atol=1e-5)
        out = np.empty((*lead, 50), dtype)
        assert product(a, y, out) is out
        np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize("lead", [(5, 12), (60,)])
def test_dtypes_that_differ_meet_in_the_wider_one(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((*lead, 64)).astype(np.float32), rng.standard_normal((64, 80))
    for a, b in ((x, y), (x.astype(np.float64), y.astype(np.float32)), (x, y.astype(">f4"))):
        found = product(a, b)
        assert found.dtype == np.matmul(a, b).dtype
        np.testing.assert_allclose(found, np.matmul(a, b), rtol=1e-5, atol=1e-5)


def test_lengths_that_differ_are_refused_as_before() -> None:
    for a, b in (((3, 40, 50), (40, 50)), ((40, 50), (40, 50)), ((3, 40, 50), (4, 50, 40)), ((60,), (50, 60))):
        with pytest.raises(ShapeError, match=r"\[matmul\]"):
            mt.ones(a) @ mt.ones(b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_products_of_moderate_matrices(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, y, g = (mt.asarray(rng.standard_normal(s).astype(dtype)) for s in ((3, 60, 70), (70, 80), (3, 60, 80)))
    dx, dy = mt.grad(lambda x, y: mt.sum((x @ y) * g), argnums=(0, 1))(x, y)
    a, b, c = (np.asarray(v, np.float64) for v in (x, y, g))
    rtol = 1e-4 if dtype == np.float32 else 1e-11
    np.testing.assert_allclose(np.asarray(dx), c @ b.T, rtol=rtol, atol=rtol * 10)
    np.testing.assert_allclose(np.asarray(dy), np.einsum("bij,bik->jk", a, c), rtol=rtol, atol=rtol * 10)
