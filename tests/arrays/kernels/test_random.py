"""Random bits and masks: the kernels' own sources, run on the CPU, give the very bits of NumPy's generator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshtape.arrays import OPS
from meshtape.arrays.kernels import philox, scans
from meshtape.arrays.random import bit_transforms
from meshtape.arrays.random import philox as _philox

FLOATS = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)
RUNS = [(0, 1), (0, 4096), (3, 700), (5, 2), (2**33 + 1, 77), (2**40 - 3, 9), (7, 0)]


@pytest.mark.parametrize(("start", "count"), RUNS)
@pytest.mark.parametrize("stream", [0, 3])
def test_words(emulator: Any, place: Any, start: int, count: int, stream: int) -> None:
    got = _philox.words(emulator.xp, place(KEY), start, count, stream)
    np.testing.assert_array_equal(got, _philox.words(np, KEY, start, count, stream))


def recipes() -> dict[str, tuple[Any, np.dtype]]:
    found = {f"bits {d}": (bit_transforms.bits(np.dtype(d)), np.dtype(d)) for d in ("uint32", "uint64")}
    for d in FLOATS:
        for low, high in ((0.0, 1.0), (-3.0, 1e-3), (1.0, 1.0 + 2**-6), (0.1, 0.3)):
            found[f"uniform {d.name} {low} {high}"] = bit_transforms.uniform(d, low, high), d
    for threshold in (0, 1, 2**31 + 17, 2**32 - 1, 2**32):
        found[f"bernoulli {threshold}"] = bit_transforms.bernoulli(threshold), np.dtype(bool)
    return found


@pytest.mark.parametrize("name", recipes())
def test_fills_have_the_bits_of_the_cpu(emulator: Any, place: Any, name: str) -> None:
    recipe, dtype = recipes()[name]
    for start, count in RUNS:
        shape, offset, whole = (count,), (start,), (start + count + 3,)
        got = _philox.draw(emulator.xp, place(KEY), recipe, dtype, shape, offset, whole, 0)
        expected = _philox.draw(np, KEY, recipe, dtype, shape, offset, whole, 0)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
    if name.startswith("uniform"):
        assert all("philox_fill<Uniform" in k for _, k, _, _ in emulator.launched)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("Normal", lambda d: bit_transforms.normal(d, 0.0, 1.0)),
        ("Normal", lambda d: bit_transforms.normal(d, -2.5, 0.3)),
        ("Exponential", lambda d: bit_transforms.exponential(d, 1.7)),
        ("Gumbel", bit_transforms.gumbel),
    ],
)
def test_fills_have_the_numbers_of_the_cpu(emulator: Any, place: Any, kind: str, recipe: Any, dtype: np.dtype) -> None:
    """But for the last places of logarithm and cosine; any run has the bits of the whole."""
    whole = emulator.xp.empty(4096, dtype)
    _philox._fill_run(emulator.xp, place(KEY), recipe(dtype), 0, whole, 0)
    for start, count in RUNS:
        got = emulator.xp.empty(count, dtype)
        _philox._fill_run(emulator.xp, place(KEY), recipe(dtype), start, got, 0)
        expected = np.empty(count, dtype)
        _philox._fill_run(np, KEY, recipe(dtype), start, expected, 0)
        unit = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=4 * unit, atol=4 * unit)
        if start + count <= 4096:
            np.testing.assert_array_equal(got.view(np.uint8), whole[start : start + count].view(np.uint8))
    assert {k.partition("<")[2].partition("<")[0] for _, k, _, _ in emulator.launched} == {kind}


@pytest.mark.parametrize("dtype", [None, np.int64, np.uint64, np.int8])
def test_keys_are_folded_to_the_bits_of_the_cpu(emulator: Any, place: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    one, many = rng.integers(0, 2**64, 2, np.uint64), rng.integers(0, 2**64, (300, 1, 2), np.uint64)
    data = [5, 2**64 - 1] if dtype is None else [np.asarray(v, dtype) for v in (5, np.arange(300) % 100, [7], [])]
    for key in (one, many, many[:1], many[:0]):
        for d in data:
            shapes = key.shape[:-2], getattr(d, "shape", ())
            if len({s for s in shapes if s not in ((), (1,))}) > 1:
                continue
            want = OPS["random_fold_in"].numpy(key, d, stream=3)
            got = philox.fold(place(key), d if isinstance(d, int) else place(d), 3)
            np.testing.assert_array_equal(got, want)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_blocks_of_a_matrix(emulator: Any, place: Any) -> None:
    recipe, dtype = bit_transforms.uniform(FLOATS[0], -1.0, 1.0), FLOATS[0]
    for shape, offset, whole in (
        ((3, 5), (2, 1), (9, 7)),
        ((4, 300), (0, 300), (8, 600)),
        ((2, 3, 4), (1, 0, 0), (4, 3, 4)),
    ):
        got = _philox.draw(emulator.xp, place(KEY), recipe, dtype, shape, offset, whole, 1)
        np.testing.assert_array_equal(got, _philox.draw(np, KEY, recipe, dtype, shape, offset, whole, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("rate", [0.25, 0.1, 1.0, 0.0])
def test_dropout_is_its_composition(emulator: Any, place: Any, dtype: np.dtype, rate: float) -> None:
    rng = np.random.default_rng(0)
    x, y = (place(rng.normal(size=501), dtype) for _ in range(2))
    keep, start = 1.0 - rate, 13
    threshold = round(keep * 2**32)
    mask = _philox.draw(np, KEY, bit_transforms.bernoulli(threshold), np.dtype(bool), (501,), (start,), (600,), 0)
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    with np.errstate(all="ignore"):
        kept = np.where(mask, x.astype(wide) / wide.type(keep), wide.type(0))
    for other in (None, y):
        out = emulator.xp.empty(501, dtype)
        philox.dropout_run(place(KEY), x, other, out, start, 0, threshold, keep)
        expected = (kept if other is None else kept + y.astype(wide)).astype(dtype)
        np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(
    ("shape", "offset", "whole"),
    [
        ((4, 6), (0, 0), (4, 6)),
        ((2, 6), (2, 0), (5, 6)),
        ((1, 3), (2, 2), (5, 6)),
        ((2, 3), (1, 3), (5, 6)),
        ((0, 6), (0, 0), (0, 6)),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_dropout_of_any_block(emulator: Any, place: Any, dtype: np.dtype, shape: Any, offset: Any, whole: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = (place(rng.normal(size=shape), dtype) for _ in range(2))
    of_samples = rng.integers(0, 2**63, (whole[0], 1, 2)).astype(np.uint64)
    for rate, key in ((0.3, KEY), (1.0, KEY), (0.3, of_samples), (1.0, of_samples)):
        params = {"rate": rate, "offset": offset, "global_shape": whole}
        for name, args in (("dropout", (x,)), ("dropout_add", (x, y))):
            got = OPS[name].overrides["cupy"](*args, place(key), **params)
            expected = OPS[name].numpy(*args, key, **params)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("shape", [(1,), (31,), (4096,), (4097,), (5, 7), (3, 2000, 2), (0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_places_of_true_elements(emulator: Any, place: Any, shape: Any, share: float) -> None:
    mask = place(np.random.default_rng(0).random(shape) < share)
    got = scans.true_places(mask)
    assert all(a.dtype == np.int64 for a in got)
    for a, e in zip(got, np.nonzero(mask), strict=True):
        np.testing.assert_array_equal(a, e)
