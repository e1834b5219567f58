"""Derivatives of the Fourier transforms; legend in ``registry``.

The adjoint of a transform is the transform in the opposite direction with the same factor: ``norm`` changes its name.
"""

from __future__ import annotations

import numpy as np

from ...arrays.ops import fft as f
from .registry import call, defvjp


def _fft(xp, g, axes, norm, inverse):
    return call(xp, f.FFT, g, axes=axes, norm=f.SWAPPED[norm], inverse=not inverse)


def _weights(n, axis, ndim, inner, dtype):
    """Along ``axis``: 1 for frequency zero (and the highest one of an even ``n``), ``inner`` for those that stand for
    two."""
    w = np.full(n // 2 + 1, inner, dtype)
    w[0] = 1
    if n % 2 == 0:
        w[-1] = 1
    return w.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _rfft(xp, g, x_like, axis, norm):
    # Re(sum_k g_k exp(+i…)) over half a spectrum: irfft counts the inner terms twice.
    n = x_like.shape[axis]
    w = _weights(n, axis, len(g.shape), 0.5, x_like.dtype)
    return call(xp, f.IRFFT, g * xp.asarray(w), n=n, axis=axis, norm=f.SWAPPED[norm])


def _irfft(xp, g, n, axis, norm):
    w = _weights(n, axis, len(g.shape), 2.0, g.dtype)
    return call(xp, f.RFFT, g, axis=axis, norm=f.SWAPPED[norm]) * xp.asarray(w)


defvjp(f.FFT, x=_fft)
defvjp(f.RFFT, x=_rfft)
defvjp(f.IRFFT, x=_irfft)
