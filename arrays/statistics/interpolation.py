"""Functions of sampled curves: interpolation, convolution, slopes; and products of patterns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.pieces import buffers, mapped
from ..core import shape_rules
from ..core.array import Array
from ..core.dispatch import has_history, wrap
from ..core.dtypes import HALF, real_of, result_type
from ..core.errors import ArgumentError, ShapeError
from ..core.op import composite
from ..linalg.decompositions import diagonal
from ..ops.creation import arange, asarray, beside, inexact, ordered, zeros
from ..ops.elementwise import clip, isfinite, isinf, isnan, where
from ..ops.manipulation import astype, concat, flip, reshape
from ..ops.wide_floats import in_float32
from ..reductions.reductions import sum
from ..reductions.searching import searchsorted, take
from ..reductions.sorting import argsort
from .padding import pad


@composite("interp")
@in_float32
def interp(x: Any, xp: Any, fp: Any, /, *, left: Any = None, right: Any = None, period: float | None = None) -> Array:
    """Straight lines between the points (``xp``, ``fp``), read at ``x``.

    Parameters
    ----------
    x
        Where, of any shape.
    xp, fp
        The points, with ascending ``xp``, in one dimension.
    left, right
        Values before the first and after the last point; those of the points by default.
    period
        After which the points repeat; they need not ascend then, and there are no first and last ones.

    Examples
    --------
    >>> mt.interp(mt.asarray([0.5, 3.0]), mt.asarray([0.0, 1.0]), mt.asarray([10.0, 20.0]))
    Array([15., 20.], dtype=float64)
    """
    x, xp, fp = inexact(ordered("interp", x)), inexact(ordered("interp", xp)), inexact(fp)
    # (Slopes in the dtype of the result: that of short ``fp`` would overflow, or lose digits that ``x`` has.)
    fp = astype(fp, result_type(x, xp, fp))
    x, xp = astype(x, real_of(fp.dtype)), astype(xp, real_of(fp.dtype))
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ShapeError(f"[interp] points of shapes {xp.shape} and {fp.shape} must have one dimension of one length")
    if period is not None:
        if not period:
            raise ArgumentError("[interp] the period must not be zero")
        period, left, right = math.fabs(period), None, None
        xp = xp % period
        order = argsort(xp)
        xp, fp = xp[order], fp[order]
        xp = concat([xp[-1:] - period, xp, xp[:1] + period])
        fp = concat([fp[-1:], fp, fp[:1]])
    ends = fp[0] if left is None else left, fp[-1] if right is None else right
    return mapped(lambda x: _read_between(x if period is None else x % period, xp, fp, *ends), x)


def _read_between(x: Array, xp: Array, fp: Array, first: Any, last: Any) -> Array:
    if xp.size == 1:
        inside: Any = fp[0]
    else:
        i = clip(searchsorted(xp, x, side="right"), 1, xp.size - 1)
        x0, x1 = take(xp, i - 1, axis=0), take(xp, i, axis=0)
        f0, f1 = take(fp, i - 1, axis=0), take(fp, i, axis=0)
        width = x1 - x0
        slope = (f1 - f0) / where(width == 0, 1, width)
        inside = where(width == 0, f1, f0 + slope * (x - x0))
        del i, x1, width, slope  # a block of each, which is memory
        # Between two ends of which one is infinite all is, and NaN beside NaN; but not at the other end.
        far = where((f0 == f1) | (x == x0), f0, where(isinf(f0) & isinf(f1), np.nan, where(isfinite(f0), f1, f0)))
        inside = where(isfinite(f0) & isfinite(f1), inside, where(isnan(f1) & (x != x0), f1, far))
        inside = where(x == xp[-1], fp[-1], inside)  # exact at the last point too
    out = where(x < xp[0], first, where(x > xp[-1], last, inside))
    return where(isnan(x), np.nan, out)


@composite("convolve")
def convolve(a: Any, v: Any, /, mode: str = "full") -> Array:
    """Discrete convolution of two vectors: ``sum(a[m] * v[n - m])``.

    ``mode`` is ``"full"`` (every overlap), ``"same"`` (the middle, as long as the longer one) or ``"valid"`` (whole
    overlaps).

    >>> mt.convolve(mt.asarray([1, 2, 3]), mt.asarray([0, 1, 10]))
    Array([ 0,  1, 12, 23, 30])
    """
    a, v = asarray(a), asarray(v)
    if a.ndim != 1 or v.ndim != 1 or not a.size or not v.size:
        raise ShapeError(f"[convolve] takes two vectors that are not empty, got shapes {a.shape} and {v.shape}")
    if mode not in ("full", "same", "valid"):
        raise ArgumentError(f"[convolve] mode must be 'full', 'same' or 'valid', got {mode!r}")
    if v.size > a.size:
        a, v = v, a
    n, m = a.size, v.size
    before = {"full": m - 1, "same": m - 1 - (m - 1) // 2, "valid": 0}[mode]
    after = {"full": m - 1, "same": (m - 1) // 2, "valid": 0}[mode]
    count = n + before + after - m + 1
    if (both := buffers(a, v)) is not None and result_type(*both).num < HALF:
        return wrap(np.asarray(_convolved(*both, mode)))
    windows = np.arange(count)[:, None] + np.arange(m)
    # (Beside the ends nothing counts: zeros there would make NaN of what is infinite in the shorter one.)
    inside = (windows >= before) & (windows < n + before)
    terms = pad(a, ((before, after),))[windows] * flip(v)
    zero = False if terms.dtype.kind == "b" else 0
    return sum(where(asarray(inside, device=beside(terms)), terms, zero), axis=-1, dtype=terms.dtype)


def _convolved(a: np.ndarray, v: np.ndarray, mode: Any) -> np.ndarray:
    """NumPy's, complex ones by their parts: BLAS makes NaN of a complex infinity times a number."""
    if "c" not in a.dtype.kind + v.dtype.kind:
        return np.convolve(a, v, mode)
    re = np.convolve(a.real, v.real, mode) - np.convolve(a.imag, v.imag, mode)
    out = re.astype(result_type(a, v))
    out.imag = np.convolve(a.real, v.imag, mode) + np.convolve(a.imag, v.real, mode)
    return out


@composite("gradient")
def gradient(
    x: Any, /, *spacing: Any, axis: int | Sequence[int] | None = None, edge_order: int = 1
) -> Array | tuple[Array, ...]:
    """Slopes along axes by second-order differences inside, by one-sided ones at the ends.

    Parameters
    ----------
    x
        Samples.
    spacing
        Nothing (1), one step for all axes, or for each axis a step or the coordinates of its samples (one dimension,
        any distances).
    axis
        One axis, several in this order, or all (None).
    edge_order
        1 or 2: whether the ends take one neighbour into account or two.

    Returns
    -------
    Array or tuple of Array
        One array for a single axis, else one for each.

    Examples
    --------
    >>> mt.gradient(mt.asarray([1.0, 4.0, 9.0]))
    Array([3., 4., 5.], dtype=float64)
    >>> mt.gradient(mt.asarray([0.0, 1.0, 9.0]), mt.asarray([0.0, 1.0, 3.0]), edge_order=2)
    Array([0., 2., 6.], dtype=float64)
    """
    x = inexact(x)
    sorted_axes = shape_rules.normalize_axis("gradient", axis, x.ndim)
    axes = sorted_axes if axis is None or np.ndim(axis) == 0 else [int(a) % x.ndim for a in axis]
    if edge_order not in (1, 2):
        raise ArgumentError(f"[gradient] edge_order must be 1 or 2, got {edge_order!r}")
    steps = spacing or (1.0,)
    steps = steps * len(axes) if len(steps) == 1 and np.ndim(steps[0]) == 0 else steps
    if len(steps) != len(axes):
        raise ShapeError(f"[gradient] {len(steps)} spacings for {len(axes)} axes")
    out = [_slope(x, a, h, edge_order) for a, h in zip(axes, steps, strict=True)]
    return out[0] if isinstance(axis, int) or (axis is None and x.ndim == 1) else tuple(out)


def _slope(x: Array, axis: int, spacing: Any, edge_order: int) -> Array:
    n = x.shape[axis]
    if n < edge_order + 1:
        raise ShapeError(f"[gradient] needs {edge_order + 1} elements along axis {axis} of shape {x.shape}")

    def at(start: int | None, stop: int | None) -> Array:
        return x[(*(slice(None),) * axis, slice(start, stop))]

    def column(h: Array) -> Array:
        return reshape(h, tuple(-1 if i == axis else 1 for i in range(x.ndim)))

    host = getattr(spacing, "_buf", spacing)
    if type(host) is np.ndarray and host.shape == (n,) and not has_history(spacing):
        apart = np.diff(host.astype(np.float64) if host.dtype.kind in "biu" else host)
        if (apart == apart[0]).all():
            spacing = apart[0].item()  # as NumPy does, so that a NaN is not its own slope
    if np.ndim(spacing) == 0:
        spacing = inexact(spacing) if hasattr(spacing, "dtype") else spacing
        inner = (at(2, None) - at(None, -2)) / (2 * spacing)
        near, far = (spacing, spacing), (spacing, spacing)
    else:
        places = inexact(spacing)
        if places.shape != (n,):
            raise ShapeError(f"[gradient] {places.shape} coordinates for axis {axis} of shape {x.shape}")
        h = (places[1:] - places[:-1]).astype(x.dtype, copy=False)
        left, right = column(h[:-1]), column(h[1:])
        # Divided differences: the slopes of both sides, each weighted by the length of the other.
        inner = right / (left * (left + right)) * (at(1, -1) - at(None, -2))
        inner = inner + left / (right * (left + right)) * (at(2, None) - at(1, -1))
        near, far = (h[0], h[min(1, n - 2)]), (h[-1], h[max(-2, 1 - n)])
    return concat([_end(x, axis, near, edge_order, 1), inner, _end(x, axis, far, edge_order, -1)], axis=axis)


def _end(x: Array, axis: int, steps: tuple[Any, Any], order: int, direction: int) -> Array:
    """The slope at one end of an axis: of the line, or of the parabola, through its outermost elements."""

    def at(i: int) -> Array:
        i = i if direction > 0 else x.shape[axis] - 1 - i
        return x[(*(slice(None),) * axis, slice(i, i + 1))]

    def between(i: int) -> Array:
        """The difference of two neighbours, in the order in which they lie: a difference of nothing is 0.0 at either
        end."""
        return at(i + 1) - at(i) if direction > 0 else at(i) - at(i + 1)

    h, k = steps
    slope = between(0) / h
    return slope + (between(0) / h - between(1) / k) * (h / (h + k)) if order == 2 else slope


@composite("kron")
def kron(a: Any, b: Any, /) -> Array:
    """Kronecker product: ``b`` as a whole in the place of each element of ``a``, times that element.

    >>> mt.kron(mt.asarray([1, 10]), mt.asarray([1, 2]))
    Array([ 1,  2, 10, 20])
    """
    a, b = asarray(a), asarray(b)
    n = max(a.ndim, b.ndim)
    s, t = (1,) * (n - a.ndim) + a.shape, (1,) * (n - b.ndim) + b.shape
    x = reshape(a, tuple(k for m in s for k in (m, 1)))
    y = reshape(b, tuple(k for m in t for k in (1, m)))
    return reshape(x * y, tuple(p * q for p, q in zip(s, t, strict=True)))


def diag(x: Any, /, k: int = 0) -> Array:
    """A matrix with the vector ``x`` on its ``k``-th diagonal, or that diagonal of a matrix.

    >>> mt.diag(mt.asarray([1, 2]))
    Array([[1, 0],
           [0, 2]])
    """
    x = asarray(x)
    if x.ndim == 2:
        return diagonal(x, offset=k)
    if x.ndim != 1:
        raise ShapeError(f"[diag] takes a vector or a matrix, got shape {x.shape}")
    n = x.size + abs(k)
    i = arange(x.size, device=beside(x))
    return zeros((n, n), dtype=x.dtype, device=beside(x)).at[i + max(-k, 0), i + max(k, 0)].set(x)
