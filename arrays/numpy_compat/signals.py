"""Samples: correlation, windows, areas, differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.dtypes import result_type
from ..core.errors import DTypeError
from ..core.op import composite
from ..ops.creation import asarray, elements, inexact
from ..ops.elementwise import conj
from ..ops.manipulation import concat, flip, moveaxis, reshape
from ..ops.wide_floats import in_float32
from ..reductions.cumulative import diff
from ..reductions.reductions import sum
from ..statistics.interpolation import convolve


@composite("correlate")
def correlate(x: Any, y: Any, /, mode: str = "valid") -> Array:
    """Correlation of two vectors, ``sum(x[n + k] * conj(y[n]))``; see :func:`convolve` for ``mode``.

    >>> mt.correlate(mt.asarray([1.0, 2.0, 3.0]), mt.asarray([0.0, 1.0]))
    Array([2., 3.], dtype=float64)
    """
    x, y = asarray(x), asarray(y)
    if y.size > x.size:
        # The longer one is what a convolution moves along, so that lags come out in the other order.
        return flip(conj(correlate(y, x, mode)))
    return convolve(x, conj(flip(y)), mode=mode)


@composite("trapezoid")
@in_float32
def trapezoid(y: Any, x: Any = None, /, dx: float = 1.0, axis: int = -1) -> Array:
    """The area below samples ``y`` at ``x`` (or ``dx`` apart) along ``axis``, by trapezoids.

    >>> mt.trapezoid(mt.asarray([1.0, 2.0, 3.0]))
    Array(4., dtype=float64)
    """
    y = moveaxis(inexact(y), axis, -1)
    if x is None:
        step: Any = dx
    else:
        x = asarray(x)
        x = x.astype(result_type(x.dtype, y.dtype)) if x.dtype.kind in "biu" else x
        step = diff(x) if x.ndim == 1 else diff(moveaxis(x, axis, -1))
    return sum(step * (y[..., 1:] + y[..., :-1]) / 2, axis=-1)


@composite("ediff1d")
def ediff1d(x: Any, /, to_end: Any = None, to_begin: Any = None) -> Array:
    """Differences of neighbours of the flat array, with something before and behind.

    >>> mt.ediff1d(mt.asarray([1, 4, 9]), to_begin=0)
    Array([0, 3, 5])
    """
    middle = diff(reshape(asarray(x), (-1,)))

    def end(v: Any) -> list[Array]:
        given = result_type(middle.dtype, v if isinstance(v, int | float | complex) else asarray(v).dtype)
        if not np.can_cast(given, middle.dtype, "same_kind"):
            raise DTypeError(
                f"[ediff1d] an end of {given.name} for differences of {middle.dtype.name}: cast the array first"
            )
        return [reshape(elements("ediff1d", v, middle.dtype), (-1,))]

    return concat([*([] if to_begin is None else end(to_begin)), middle, *([] if to_end is None else end(to_end))])


def _window(name: str, title: str, example: str, shown: str) -> Callable[[int], Array]:
    """NumPy's window of this name, and an example of it."""

    def window(n: int, /) -> Array:
        return asarray(getattr(np, name)(n))

    window.__name__ = window.__qualname__ = name
    window.__doc__ = f"The {title} window of ``n`` points.\n\n    >>> {example}\n    {shown}\n    "
    return window


hanning = _window("hanning", "Hann", "mt.hanning(3)", "Array([0., 1., 0.], dtype=float64)")
hamming = _window("hamming", "Hamming", "mt.hamming(3)", "Array([0.08, 1.  , 0.08], dtype=float64)")
bartlett = _window("bartlett", "triangular", "mt.bartlett(3)", "Array([0., 1., 0.], dtype=float64)")
blackman = _window("blackman", "Blackman", "mt.blackman(5)[2]", "Array(1., dtype=float64)")


def kaiser(n: int, /, beta: float = 14.0) -> Array:
    """The Kaiser window of ``n`` points.

    >>> mt.kaiser(3, 0.0)
    Array([1., 1., 1.], dtype=float64)
    """
    return asarray(np.kaiser(n, beta))
