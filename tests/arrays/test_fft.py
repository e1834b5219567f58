"""Fourier transforms: NumPy is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from meshtape import arrays as mt
from meshtape.arrays.core.errors import DTypeError

rng = np.random.default_rng(6)
NORMS = ["backward", "ortho", "forward", None]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [None, 3, 4, 7])
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_along_an_axis(name, n, norm):
    real = name in ("rfft", "ihfft")
    x = rng.normal(size=(4, 5)) + (0 if real else 1j * rng.normal(size=(4, 5)))
    for axis in (0, -1):
        got = getattr(mt.fft, name)(mt.asarray(x), n=n, axis=axis, norm=norm)
        want = getattr(np.fft, name)(x, n, axis, norm)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_along_several_axes(name, norm):
    x = rng.normal(size=(3, 4, 5)) + (0 if name == "rfftn" else 1j * rng.normal(size=(3, 4, 5)))
    for s, axes in ((None, None), ((2, 6), (0, 2)), ((4, 4), (-1, 0)), (None, (1,))):
        got = getattr(mt.fft, name)(mt.asarray(x), s=s, axes=axes, norm=norm)
        np.testing.assert_allclose(np.asarray(got), getattr(np.fft, name)(x, s, axes, norm), atol=1e-12)


def test_precision_is_kept():
    x = mt.ones(4, dtype=mt.float32)
    assert mt.fft.fft(x).dtype == mt.fft.rfft(x).dtype == mt.complex64
    assert mt.fft.irfft(mt.fft.rfft(x)).dtype == mt.float32
    assert mt.fft.fft(mt.arange(3)).dtype == mt.complex128
    assert mt.fft.fft(mt.ones(2, dtype=mt.bfloat16)).dtype == mt.complex64


@pytest.mark.parametrize("n", [1, 4, 5])
def test_frequencies_and_shifts(n):
    np.testing.assert_array_equal(np.asarray(mt.fft.fftfreq(n, d=0.5)), np.fft.fftfreq(n, 0.5))
    np.testing.assert_array_equal(np.asarray(mt.fft.rfftfreq(n, d=2.0)), np.fft.rfftfreq(n, 2.0))
    x = rng.normal(size=(n, 3))
    for axes in (None, 0, (0, 1)):
        shifted = mt.fft.fftshift(mt.asarray(x), axes=axes)
        np.testing.assert_array_equal(np.asarray(shifted), np.fft.fftshift(x, axes))
        np.testing.assert_array_equal(np.asarray(mt.fft.ifftshift(shifted, axes=axes)), x)
    assert mt.fft.fftfreq(n, dtype=mt.float32).dtype == mt.float32


def test_errors():
    with pytest.raises(ValueError, match=r"\[fft\] norm"):
        mt.fft.fft(mt.ones(3), norm="other")
    with pytest.raises(DTypeError, match=r"\[rfft\] takes real numbers"):
        mt.fft.rfft(mt.ones(3, dtype=mt.complex64))
    with pytest.raises(ValueError, match=r"\[fft\] a transform of 0 points"):
        mt.fft.fft(mt.ones((2, 0)))
    with pytest.raises(ValueError, match=r"\[fftn\] 1 lengths for 2 axes"):
        mt.fft.fftn(mt.ones((2, 2)), s=(2,), axes=(0, 1))
