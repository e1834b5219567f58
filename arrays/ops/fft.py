"""Discrete Fourier transforms (``mt.fft``): the extension of the array-API standard.

Three ops carry all of them: complex to complex, real to half a spectrum, and half a spectrum to real. Each keeps the
precision of its input. ``norm`` says where the factor ``1/n`` stands: with the inverse (``"backward"``, or None), with
the forward transform (``"forward"``), or as ``1/sqrt(n)`` with both (``"ortho"``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import shape_rules
from ..core.array import Array
from ..core.devices import Device
from ..core.dispatch import apply
from ..core.dtypes import as_dtype, complex_of, is_low_precision
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, composite, defined
from .creation import asarray, beside, zeros
from .elementwise import conj
from .manipulation import astype, concat, roll
from .param_kinds import AXES, AXIS, FLAG, POSITIVE, one_of
from .wide_floats import in_float32

# ----- ops ------------------------------------------------------------------------------------------------------------


def _fft(xp: Any, x: Any, axes: tuple[int, ...], norm: str, inverse: bool) -> Any:
    x = x.astype(complex_of(x.dtype), copy=False)
    return (xp.fft.ifftn if inverse else xp.fft.fftn)(x, axes=axes, norm=norm)


def _rfft(xp: Any, x: Any, axis: int, norm: str) -> Any:
    x = x.astype(np.float32) if is_low_precision(x.dtype) else x  # NumPy has the factor of the norm in the dtype of x
    return xp.fft.rfft(x, axis=axis, norm=norm)


def _irfft(xp: Any, x: Any, n: int, axis: int, norm: str) -> Any:
    return xp.fft.irfft(x, n, axis=axis, norm=norm)


def _infer_fft(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    return ShapeDtype(args[0].shape, complex_of(args[0].dtype))


def _resized(shape: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    return (*shape[:axis], n, *shape[axis + 1 :])


def _infer_rfft(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, axis = args[0], params["axis"]
    return ShapeDtype(_resized(x.shape, axis, x.shape[axis] // 2 + 1), complex_of(x.dtype))


def _infer_irfft(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x = args[0]
    single = complex_of(x.dtype) == np.dtype(np.complex64)
    return ShapeDtype(_resized(x.shape, params["axis"], params["n"]), np.dtype(np.float32 if single else np.float64))


_NORM = one_of("backward", "ortho", "forward")
FFT = Op("fft", ("x",), _fft, _infer_fft, params={"axes": AXES, "norm": _NORM, "inverse": FLAG})
RFFT = Op("rfft", ("x",), _rfft, _infer_rfft, params={"axis": AXIS, "norm": _NORM})
IRFFT = Op("irfft", ("x",), _irfft, _infer_irfft, params={"n": POSITIVE, "axis": AXIS, "norm": _NORM})

# ----- arguments ------------------------------------------------------------------------------------------------------

_NORMS = ("backward", "ortho", "forward")
SWAPPED = {"backward": "forward", "forward": "backward", "ortho": "ortho"}
"""The ``norm`` that gives the opposite direction the factor that this direction had."""


def _floating(name: str, x: Any, norm: str | None) -> tuple[Array, str]:
    norm = "backward" if norm is None else norm
    if norm not in _NORMS:
        raise ArgumentError(f"[{name}] norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    x = asarray(x)
    if x.dtype.itemsize <= 2 or x.dtype.kind in "iu":
        return astype(x, np.float64 if x.dtype.kind in "biu" else np.float32), norm
    return x, norm


def _real(name: str, x: Array) -> Array:
    if x.dtype.kind == "c":
        raise DTypeError(f"[{name}] takes real numbers, got {x.dtype.name}")
    return x


def _fit(name: str, x: Array, axis: int, n: int | None) -> Array:
    """``x`` cut off or filled up with zeros at the end of an axis, to length ``n``."""
    length = x.shape[axis]
    n = length if n is None else n
    if n < 1:
        raise ShapeError(f"[{name}] a transform of {n} points along axis {axis} of shape {x.shape}")
    if n < length:
        return x[(*(slice(None),) * axis, slice(None, n))]
    if n > length:
        return concat([x, zeros(_resized(x.shape, axis, n - length), dtype=x.dtype, device=beside(x))], axis=axis)
    return x


def _axes(name: str, x: Array, s: Sequence[int | None] | None, axes: Sequence[int] | None) -> list[tuple[int, Any]]:
    """(axis, wanted length) pairs, in the order given."""
    if axes is None:
        axes = tuple(range(x.ndim)) if s is None else tuple(range(x.ndim - len(s), x.ndim))
    shape_rules.normalize_axis(name, axes, x.ndim)
    if s is not None and len(s) != len(axes):
        raise ShapeError(f"[{name}] {len(s)} lengths for {len(axes)} axes")
    return [(a % x.ndim, None if s is None else s[i]) for i, a in enumerate(axes)]


# ----- complex to complex ---------------------------------------------------------------------------------------------


def _complex(name: str, x: Array, pairs: Sequence[tuple[int, Any]], norm: str, inverse: bool) -> Array:
    for axis, n in pairs:
        x = _fit(name, x, axis, n)
    if not pairs:
        return astype(x, complex_of(x.dtype))
    return apply(FFT, (x,), {"axes": tuple(a for a, _ in pairs), "norm": norm, "inverse": inverse})


def _one(name: str, x: Any, n: int | None, axis: int, norm: str | None, inverse: bool) -> Array:
    x, norm = _floating(name, x, norm)
    axis = shape_rules.one_axis(name, axis, x.ndim)
    return _complex(name, x, [(axis, n)], norm, inverse)


def fft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Array:
    """Fourier transform along an axis, of ``n`` points (cut off or filled with zeros).

    >>> mt.fft.fft(mt.asarray([1.0, 0.0, 0.0, 0.0]))
    Array([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j], dtype=complex128)
    """
    return _one("fft", x, n, axis, norm, False)


def ifft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Array:
    """Inverse of :func:`fft`.

    >>> mt.fft.ifft(mt.asarray([4.0, 0.0, 0.0, 0.0]))
    Array([1.+0.j, 1.+0.j, 1.+0.j, 1.+0.j], dtype=complex128)
    """
    return _one("ifft", x, n, axis, norm, True)


def fftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> Array:
    """Fourier transform along several axes (all by default), of lengths ``s``.

    >>> mt.fft.fftn(mt.ones((2, 2)))
    Array([[4.+0.j, 0.+0.j],
           [0.+0.j, 0.+0.j]], dtype=complex128)
    """
    x, norm = _floating("fftn", x, norm)
    return _complex("fftn", x, _axes("fftn", x, s, axes), norm, False)


def ifftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> Array:
    """Inverse of :func:`fftn`.

    >>> mt.fft.ifftn(mt.asarray([[4.0, 0.0], [0.0, 0.0]]))
    Array([[1.+0.j, 1.+0.j],
           [1.+0.j, 1.+0.j]], dtype=complex128)
    """
    x, norm = _floating("ifftn", x, norm)
    return _complex("ifftn", x, _axes("ifftn", x, s, axes), norm, True)


# ----- real, and half a spectrum --------------------------------------------------------------------------------------


def _rfft_along(name: str, x: Array, axis: int, n: int | None, norm: str) -> Array:
    return apply(RFFT, (_fit(name, _real(name, x), axis, n),), {"axis": axis, "norm": norm})


def _irfft_along(name: str, x: Array, axis: int, n: int | None, norm: str) -> Array:
    n = 2 * (x.shape[axis] - 1) if n is None else n
    if n < 1:
        raise ShapeError(f"[{name}] a transform of {n} points along axis {axis} of shape {x.shape}")
    x = astype(_fit(name, x, axis, n // 2 + 1), complex_of(x.dtype), copy=False)
    return apply(IRFFT, (x,), {"n": n, "axis": axis, "norm": norm})


def rfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Array:
    """Fourier transform of real numbers: the ``n // 2 + 1`` terms of frequency zero and above.

    >>> mt.fft.rfft(mt.asarray([1.0, 2.0, 3.0])).shape
    (2,)
    """
    x, norm = _floating("rfft", x, norm)
    axis = shape_rules.one_axis("rfft", axis, x.ndim)
    return _rfft_along("rfft", x, axis, n, norm)


@in_float32
def irfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Array:
    """Inverse of :func:`rfft`: ``n`` real numbers (``2 * (m - 1)`` for ``m`` terms by default).

    >>> mt.fft.irfft(mt.asarray([4.0, 0.0, 0.0]))
    Array([1., 1., 1., 1.], dtype=float64)
    """
    x, norm = _floating("irfft", x, norm)
    axis = shape_rules.one_axis("irfft", axis, x.ndim)
    return _irfft_along("irfft", x, axis, n, norm)


@composite("rfftn")
def rfftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> Array:
    """:func:`rfft` along the last of the axes, :func:`fftn` along the others.

    >>> mt.fft.rfftn(mt.ones((2, 4))).shape
    (2, 3)
    """
    x, norm = _floating("rfftn", x, norm)
    x = _real("rfftn", x)
    pairs = _axes("rfftn", x, s, axes)
    if not pairs:
        raise ShapeError("[rfftn] needs at least one axis")
    axis, n = pairs[-1]
    return _complex("rfftn", _rfft_along("rfftn", x, axis, n, norm), pairs[:-1], norm, False)


@composite("irfftn")
def irfftn(
    x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str | None = "backward"
) -> Array:
    """Inverse of :func:`rfftn`.

    >>> mt.fft.irfftn(mt.fft.rfftn(mt.ones((2, 4)))).shape
    (2, 4)
    """
    x, norm = _floating("irfftn", x, norm)
    pairs = _axes("irfftn", x, s, axes)
    if not pairs:
        raise ShapeError("[irfftn] needs at least one axis")
    axis, n = pairs[-1]
    return _irfft_along("irfftn", _complex("irfftn", x, pairs[:-1], norm, True), axis, n, norm)


@composite("hfft")
@in_float32
def hfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Array:
    """Transform of a signal with Hermitian symmetry, given by its first half: ``n`` real numbers.

    >>> mt.fft.hfft(mt.asarray([1.0, 2.0, 1.0]), n=4)
    Array([ 6.,  0., -2.,  0.], dtype=float64)
    """
    x, norm = _floating("hfft", x, norm)
    axis = shape_rules.one_axis("hfft", axis, x.ndim)
    return _irfft_along("hfft", conj(x), axis, n, SWAPPED[norm])


@composite("ihfft")
def ihfft(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Array:
    """Inverse of :func:`hfft`.

    >>> mt.fft.ihfft(mt.asarray([1.0, 1.0, 1.0, 1.0]))
    Array([1.-0.j, 0.-0.j, 0.-0.j], dtype=complex128)
    """
    x, norm = _floating("ihfft", x, norm)
    axis = shape_rules.one_axis("ihfft", axis, x.ndim)
    return conj(_rfft_along("ihfft", x, axis, n, SWAPPED[norm]))


# ----- of two dimensions ----------------------------------------------------------------------------------------------


def _of_two(name: str, several: Callable[..., Array], shown: str) -> Callable[..., Array]:
    def fn(
        x: Any, /, *, s: Sequence[int] | None = None, axes: Sequence[int] = (-2, -1), norm: str | None = "backward"
    ) -> Array:
        return several(x, s=s, axes=axes, norm=norm)

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f":func:`{several.__name__}` along two axes.\n\n>>> mt.fft.{name}(mt.ones((2, 4))).shape\n{shown}\n"
    return composite(name)(fn)


fft2 = _of_two("fft2", fftn, "(2, 4)")
ifft2 = _of_two("ifft2", ifftn, "(2, 4)")
rfft2 = _of_two("rfft2", rfftn, "(2, 3)")
irfft2 = _of_two("irfft2", irfftn, "(2, 6)")

# ----- frequencies ----------------------------------------------------------------------------------------------------


def _frequencies(name: str, numbers: np.ndarray, n: int, d: float, dtype: Any, where: Any) -> Array:
    if n < 1 or not d:
        raise ArgumentError(f"[fft.{name}] needs samples that are apart, got n={n}, d={d}")
    dtype = as_dtype(np.float64 if dtype is None else dtype, name)
    if dtype.kind in "biuc":
        raise DTypeError(f"[{name}] frequencies are real floating, got {dtype.name}")
    return asarray((numbers / (n * d)).astype(dtype), device=where)


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Device | str | None = None) -> Array:
    """The frequencies of the terms of :func:`fft`, for samples ``d`` apart.

    >>> mt.fft.fftfreq(4)
    Array([ 0.  ,  0.25, -0.5 , -0.25], dtype=float64)
    """
    numbers = np.concatenate([np.arange((n + 1) // 2), np.arange(-(n // 2), 0)])
    return _frequencies("fftfreq", numbers, n, d, dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Device | str | None = None) -> Array:
    """The frequencies of the terms of :func:`rfft`, for samples ``d`` apart.

    >>> mt.fft.rfftfreq(4)
    Array([0.  , 0.25, 0.5 ], dtype=float64)
    """
    return _frequencies("rfftfreq", np.arange(n // 2 + 1), n, d, dtype, device)


def _shift(name: str, x: Any, axes: int | Sequence[int] | None, sign: int) -> Array:
    x = asarray(x)
    which = shape_rules.normalize_axis(name, axes, x.ndim)
    by = [x.shape[a] // 2 if sign > 0 else -(x.shape[a] // 2) for a in which]
    return roll(x, by, axis=which)


def fftshift(x: Any, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """Frequency zero moved to the middle.

    >>> mt.fft.fftshift(mt.fft.fftfreq(4))
    Array([-0.5 , -0.25,  0.  ,  0.25], dtype=float64)
    """
    return _shift("fftshift", x, axes, 1)


def ifftshift(x: Any, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """Inverse of :func:`fftshift`.

    >>> mt.fft.ifftshift(mt.asarray([-1, 0, 1]))
    Array([ 0,  1, -1])
    """
    return _shift("ifftshift", x, axes, -1)


__all__ = defined(globals())
__dir__ = __all__.copy
