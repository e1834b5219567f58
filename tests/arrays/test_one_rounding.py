"""Casts to narrow floats round once: each element becomes the nearest one, or of two the even one."""

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape import storage

NARROW = [np.dtype(getattr(ml_dtypes, n)) for n in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]


def values_of(dtype):
    """All finite numbers of a dtype, ascending, as float64."""
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


def nearest(x, dtype):
    """By bisection among the numbers of the dtype; every middle of two of them is exact in float64."""
    held = values_of(dtype)
    middle = (held[1:] + held[:-1]) / 2
    low = np.searchsorted(middle, x, "left")  # how many middles lie below
    tie = middle[np.minimum(low, len(middle) - 1)] == x
    bits = np.abs(held).astype(dtype).view(f"u{dtype.itemsize}")
    return held[np.where(tie & (bits[low] % 2 == 1), low + 1, low)]


def hard(dtype):
    """Middles, their neighbours in float64 at several distances, and random numbers; all within the range."""
    held = values_of(dtype)
    middle = (held[1:] + held[:-1]) / 2
    close = [
        np.nextafter(middle, np.inf),
        np.nextafter(middle, -np.inf),
        middle * (1 + 2.0**-30),
        middle * (1 - 2.0**-40),
    ]
    rng = np.random.default_rng(0)
    span = rng.uniform(-1, 1, 20000) * 2.0 ** rng.uniform(-20, 8, 20000)
    found = np.concatenate([held, middle, *close, span])
    return found[np.abs(found) <= held[-1]]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
class TestFloat64:
    def test_astype(self, dtype):
        x = hard(dtype)
        want = nearest(x, dtype)
        for made in (
            mt.asarray(x).astype(dtype),
            mt.asarray(x, dtype=dtype),
            mt.compile(lambda a: mt.astype(a, dtype))(mt.asarray(x)),
            mt.asarray(x[:, None].T).astype(dtype)[0],
        ):
            assert np.array_equal(np.asarray(made).astype(np.float64), want)

    def test_numbers(self, dtype):
        for v in hard(dtype)[-300::7].tolist():
            want = nearest(np.asarray([v]), dtype)
            for made in (mt.asarray([v], dtype=dtype), mt.asarray(v, dtype=dtype), mt.full((1,), v, dtype=dtype)):
                assert np.asarray(made).astype(np.float64).reshape(1) == want

    def test_a_checkpoint(self, dtype, tmp_path):
        x = hard(dtype)
        want = nearest(x, dtype)
        storage.save(tmp_path / "c", {"w": x})
        got = storage.load(tmp_path / "c", like={"w": np.zeros(len(x), dtype)}, cast=True)["w"]
        assert np.array_equal(got.astype(np.float64), want)
        storage.convert(tmp_path / "c", tmp_path / "d", format="zarr", dtype=dtype)
        assert np.array_equal(np.asarray(storage.load(tmp_path / "d")["w"]).astype(np.float64), want)

    def test_the_ends_of_the_range(self, dtype):
        end = float(values_of(dtype)[-1])
        x = np.asarray([np.inf, -np.inf, np.nan, 0.0, -0.0, end, -end, 1e300, 5e-324, -5e-324, end * 1.0001])
        with np.errstate(over="ignore"):
            got, plain = np.asarray(mt.asarray(x).astype(dtype)), x.astype(dtype)
        assert np.array_equal(got.astype(np.float64), plain.astype(np.float64), equal_nan=True)
        assert np.array_equal(np.signbit(got), np.signbit(plain))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("source", ["int32", "int64", "uint32", "uint64"])
def test_integers(dtype, source):
    info, top = np.iinfo(source), values_of(dtype)[-1]
    rng = np.random.default_rng(1)
    found = {0, info.max, info.min, info.max - 1}
    for bit in range(9, info.bits - (info.min < 0)):
        for low in (1 << bit) | (int(rng.integers(0, 256)) << max(bit - 8, 0)), 1 << bit:
            half = 1 << max(bit - 8, 0)
            found |= {low + half // 2 * k + d for k in (1, 3) for d in (-1, 0, 1)}
    found = [n for n in found | {-n for n in found} if info.min <= n <= min(info.max, int(top))]
    exact = values_of(dtype)
    got = np.asarray(mt.asarray(np.asarray(found, source)).astype(dtype)).astype(np.float64)
    for n, g in zip(found, got, strict=True):
        if np.isfinite(g):
            i = int(np.searchsorted(exact, float(g)))
            gap = abs(n - int(exact[i])) if exact[i] == int(exact[i]) else abs(n - float(exact[i]))
            for j in (i - 1, i + 1):
                if 0 <= j < len(exact) and exact[j] == int(exact[j]):
                    assert gap <= abs(n - int(exact[j])), (n, g)


def test_float16_of_float64_is_numpys():
    x = hard(np.dtype(np.float16))
    assert np.array_equal(np.asarray(mt.asarray(x).astype("float16")).astype(np.float64), nearest(x, np.dtype("f2")))
