"""softmax, log_softmax and cross_entropy: the kernels' own sources, run on the CPU, against the ops in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS
from meshtape.arrays.kernels import softmaxes

# The kernels are the same for both short floats: by default one of them is tried.
SHORT = [pytest.param(np.float16, marks=pytest.mark.slow), ml_dtypes.bfloat16]
DTYPES = [np.float32, np.float64, *SHORT]
SHAPES = [(5, 7), (9, 200), (1, 1), (2, 1024), (2, 3001), (2, 16395), (0, 4), (4, 0)]
NAMES = ["softmax", "log_softmax"]


def op(name: str, *args: Any, **params: Any) -> tuple[Any, Any]:
    wide = [a.astype(np.float64) if a.dtype.kind not in "biu" else a for a in args]
    return OPS[name].overrides["cupy"](*args, **params), OPS[name].numpy(*wide, **params)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(emulator: Any, place: Any, close: Any, name: str, shape: Any, dtype: Any) -> None:
    rng = np.random.default_rng(sum(shape))
    x, g = place(rng.normal(scale=4, size=shape), dtype), place(rng.normal(size=shape), dtype)
    y, expected = op(name, x, axis=1, masked=False)
    assert y.dtype == dtype
    close(y, expected)
    dx, expected = op(f"{name}_backward", g, y, axis=1)
    assert dx.dtype == dtype
    close(dx, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_axis(emulator: Any, place: Any, close: Any, axis: int) -> None:
    x = place(np.random.default_rng(0).normal(size=(3, 4, 5)), np.float32)
    for name in NAMES:
        y, expected = op(name, x, axis=axis, masked=False)
        close(y, expected)
        close(*op(f"{name}_backward", x, y, axis=axis))


@pytest.mark.parametrize("width", [5, 16395])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_infinite_and_missing_elements(emulator: Any, place: Any, name: str, width: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(7, width))
    x[0, :] = -np.inf
    x[1, 1:] = -np.inf
    x[2, 2] = np.inf
    x[3, 3] = np.nan
    x[4] = 1000 + x[4]
    x[5] = -1000 + x[5]
    x[6, : width // 2] = -np.inf
    x = place(x, np.float32)
    for masked in (False, True):
        y, expected = op(name, x, axis=1, masked=masked)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES[:2], np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_rows_that_begin_anywhere(emulator: Any, place: Any, close: Any, dtype: Any) -> None:
    """Wide accesses between the ends of rows, in registers, in shared memory and, of what it does not hold, again; rows
    of two arrays that begin elsewhere within a vector."""
    emulator.device = emulator.device._replace(shared_memory=69 << 10)
    rng = np.random.default_rng(0)
    for rows, width in ((3, 1), (9, 13), (2, 1031), (2, 16387 if np.dtype(dtype).itemsize < 8 else 8197)):
        x, g = (place(rng.normal(scale=2, size=rows * width + 1), dtype)[i : rows * width + i] for i in (1, 0))
        x, g, at = x.reshape(rows, width), g.reshape(rows, width), place(rng.integers(0, width, rows))
        y, expected = op("log_softmax", x, axis=1, masked=False)
        close(y, expected)
        close(*op("log_softmax_backward", g, y, axis=1))
        params = {"ignore_index": None, "label_smoothing": 0.25}
        (losses, *saved), expected = op("cross_entropy", x, at, **params)
        close(losses, expected[0])
        g = place(np.ones(rows))
        close(*op("cross_entropy_backward", g, x, at, *saved, **params))


def test_a_cotangent_of_another_dtype(emulator: Any, place: Any, close: Any) -> None:
    rng = np.random.default_rng(0)
    y, g = place(rng.random((3, 8)), np.float16), place(rng.normal(size=(3, 8)), np.float32)
    dx, expected = op("softmax_backward", g, y, axis=1)
    assert dx.dtype == np.float16
    close(dx, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(6, 7), (9, 200), (4, 1), (3, 3001), (3, 16395), (0, 4), (3, 0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy(emulator: Any, place: Any, close: Any, shape: Any, smoothing: float, dtype: Any) -> None:
    rng = np.random.default_rng(sum(shape))
    x, g = place(rng.normal(scale=3, size=shape), dtype), place(rng.normal(size=shape[0]))
    labels = rng.integers(0, max(shape[1], 1), shape[0])
    if shape[0] > 2:
        labels[0], labels[1] = -100, shape[1]  # one to ignore, and one that is no class
        if shape[1]:
            x[0, 0] = np.nan
    for kind, ignored in ((np.int64, -100), (np.int32, None), (np.int64, -(2**70))):
        params = {"ignore_index": ignored, "label_smoothing": smoothing}
        at = place(labels, kind)
        (losses, *saved), (expected, *of_rows) = op("cross_entropy", x, at, **params)
        np.testing.assert_allclose(saved, of_rows, rtol=1e-5, atol=1e-6)
        assert losses.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_array_equal(np.isnan(losses), np.isnan(expected))
        close(losses[~np.isnan(expected)], expected[~np.isnan(expected)], factor=0.1 if losses.dtype == dtype else 1)
        dx, expected = op("cross_entropy_backward", g, x, at, *saved, **params)
        assert dx.dtype == dtype
        close(dx, expected)


def test_unsigned_labels(emulator: Any, place: Any, close: Any) -> None:
    x = place(np.random.default_rng(0).normal(size=(2, 5)), np.float32)
    labels = place(np.array([3, 2**64 - 1], np.uint64))
    (got, *_), (expected, *_) = op("cross_entropy", x, labels, ignore_index=None, label_smoothing=0.0)
    assert np.isnan(got).tolist() == np.isnan(expected).tolist() == [False, True]
    close(got[:1], expected[:1])


@pytest.mark.parametrize("width", [40, 16395])
@pytest.mark.filterwarnings("ignore")
def test_large_and_infinite_logits_keep_their_digits(emulator: Any, place: Any, width: int) -> None:
    """The backward op has all digits of a row a million away, and infinities where the softmax has them."""
    x = np.random.default_rng(2).normal(size=(5, width)) + np.array([[1e6], [-1e6], [0], [0], [0]])
    x[2, 3], x[3, :], x[4, 1:] = np.inf, -np.inf, -np.inf
    x, at, g = place(x, np.float32), place(np.zeros(5, np.int64)), place(np.ones(5))
    params = {"ignore_index": None, "label_smoothing": 0.0}
    (_, *saved), (_, *expected) = op("cross_entropy", x, at, **params)
    np.testing.assert_allclose(saved, expected, rtol=1e-5)
    dx, _ = op("cross_entropy_backward", g, x, at, *saved, **params)
    expected = OPS["softmax"].numpy(x.astype(np.float64), axis=1, masked=False)
    expected[:, 0] -= 1
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [9, 3001])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_softmax_with_what_it_shifts_and_divides_by(
    emulator: Any, place: Any, close: Any, width: int, masked: bool
) -> None:
    x = np.random.default_rng(3).normal(size=(2, 3, width))
    x[0, 1], x[1, 2, :2] = -np.inf, -np.inf
    y, shift, total = softmaxes.softmax_of_rows(place(x, np.float32), masked=masked)
    close(y, OPS["softmax"].numpy(x, axis=2, masked=masked))
    assert (shift[0, 1], total[0, 1]) == (0, masked)
    expected = np.logaddexp.reduce(x, axis=2)
    expected[0, 1] = 0 if masked else -np.inf
    np.testing.assert_allclose(shift + np.log(total), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [5, 300, 20_000])
def test_far_logits_that_are_equal(emulator: Any, place: Any, classes: int) -> None:
    """A log-sum-exp would have no digits for the number of classes."""
    x, labels = np.full((3, classes), [[1e30], [-3e38], [1.0]], np.float32), np.asarray([0, classes - 1, 2])
    options = {"ignore_index": None, "label_smoothing": 0.0}
    _, *saved = softmaxes.cross_entropy(place(x), place(labels), **options)
    ones = place(np.ones(3, np.float32))
    got = softmaxes.cross_entropy_backward(ones, place(x), place(labels), *saved, **options)
    want = np.full(x.shape, 1 / classes)
    want[np.arange(3), labels] -= 1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize(("classes", "width"), [(40, 16), (300, 300), (9100, 9001)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.filterwarnings("ignore")
def test_tiles_of_classes_give_what_all_of_them_give(
    emulator: Any, place: Any, close: Any, classes: int, width: int, smoothing: float, dtype: Any
) -> None:
    """Losses and what is kept for slopes, from tiles of some rows and classes; slopes of a tile, rounded once. A label
    is in a tile, at its ends, in another one, ignored, or no class; logits are far, infinite and missing."""
    rng, n = np.random.default_rng(classes), 9
    x = rng.normal(scale=3, size=(n, classes))
    labels = rng.integers(0, classes, n)
    labels[:5] = -100, classes, width - 1, width % classes, 0
    x[0, 0] = x[1, 1] = np.nan
    x[5] += 1e4
    x[6, :-1] = -np.inf
    x[7, 1] = -np.inf
    x[8, 3] = np.inf
    wide = np.float64 if dtype == np.float64 else np.float32
    x, at, g = place(x, wide), place(labels), place(rng.normal(size=n), wide)
    params = {"ignore_index": -100, "label_smoothing": smoothing}
    targets = softmaxes.Targets.of(at, classes, *params.values())
    losses = softmaxes.TiledLosses(targets, width, np.dtype(wide))
    tiles = [(b, slice(i, min(i + width, classes))) for i in range(0, classes, width) for b in (slice(4), slice(4, n))]
    for b, c in tiles:
        losses.show(place(x[b, c], wide), b, c.start)
    got = losses.results()
    want = OPS["cross_entropy"].numpy(x.astype(np.float64), at, **params)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == wide
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    _, shift, total = got
    slope = OPS["cross_entropy_backward"].numpy(
        g.astype(np.float64), x.astype(np.float64), at, shift.astype(np.float64), total.astype(np.float64), **params
    )
    for b, c in tiles:
        of_rows = [place(a[b]) for a in (g, shift, total)]
        here = targets._replace(labels=place(labels[b]))
        dx = softmaxes.slopes(place(x[b, c], wide), here, of_rows, np.dtype(dtype), c.start)
        assert dx.dtype == dtype
        there = ~np.isnan(slope[b, c])
        np.testing.assert_array_equal(~np.isnan(dx.astype(wide)), there)
        close(dx[there], slope[b, c][there], factor=0.2 if np.dtype(dtype).itemsize == 2 else 1)


def test_tiles_of_far_logits_that_are_equal(emulator: Any, place: Any) -> None:
    """The sum over the classes, too, is that of what is left of them."""
    x, labels = np.full((3, 20), [[1e30], [-3e38], [1.0]], np.float32), place(np.asarray([0, 19, 2]))
    losses = softmaxes.TiledLosses(softmaxes.Targets.of(labels, 20, None, 0.5), 8, np.dtype(np.float32))
    for c in (slice(0, 8), slice(8, 16), slice(16, 20)):
        losses.show(place(x[:, c]), slice(3), c.start)
    np.testing.assert_allclose(losses.results()[0], np.log(20), rtol=1e-6)
    empty = softmaxes.TiledLosses(softmaxes.Targets.of(labels, 0, 2, 0.0), 1, np.dtype(np.float32))
    np.testing.assert_array_equal(empty.results()[0], [np.nan, np.nan, 0])
