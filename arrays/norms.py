"""Normalisation layers.

``layer_norm`` is an op of its own with its own backward op, both computed in blocks of rows that stay in cache. Each also knows
how to decompose into plain functions: that form serves higher derivatives (a fused backward has no history of its own
statistics) and normalised dimensions that are sharded, whose sums then become collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._dispatch import apply
from ._op import Op, composite
from ._rows import row_blocks, row_dots, row_sums
from ._rows import wide as _wide
from .errors import ShapeError
from .program import ShapeDtype

if TYPE_CHECKING:
    from ._array import Array


def _normalized(xp: Any, x: Any, eps: float, out: Any) -> Any:
    """``out = (x - mean) / deviation`` of the rows of a block; returns one over the deviation."""
    width = x.shape[1]
    xp.subtract(x, row_sums(xp, x) / width, out=out)
    inverse = 1 / xp.sqrt(row_dots(xp, out, out) / width + x.dtype.type(eps))
    out *= inverse
    return inverse


def _layer_norm(xp: Any, x: Any, weight: Any, bias: Any, naxes: int, eps: float) -> Any:
    width = math.prod(x.shape[x.ndim - naxes :])
    rows = x.reshape(math.prod(x.shape[: x.ndim - naxes]), width)
    w, b = weight.reshape(-1), bias.reshape(-1)
    wide = _wide(x.dtype)
    out = xp.empty(rows.shape, xp.result_type(x.dtype, w.dtype, b.dtype))
    with np.errstate(all="ignore"):
        for key in row_blocks(xp, rows.shape, 1)[1]:
            r = xp.ascontiguousarray(rows[key], dtype=wide)
            n = out[key] if out.dtype == wide else xp.empty(r.shape, wide)
            _normalized(xp, r, eps, n)
            if out.dtype == wide:
                n *= w
                n += b
            else:
                out[key] = n * w + b
    return out.reshape(x.shape)


def _layer_norm_backward(xp: Any, g: Any, x: Any, weight: Any, naxes: int, eps: float) -> Any:
    """Cotangents of x, weight and bias. The statistics are computed again: cheaper than reading them back from memory."""
    width = math.prod(x.shape[x.ndim - naxes :])
    rows = x.reshape(math.prod(x.shape[: x.ndim - naxes]), width)
    gs = g.reshape(rows.shape)
    wide = _wide(x.dtype)
    w = weight.reshape(-1).astype(wide, copy=False)
    dx = xp.empty(rows.shape, x.dtype)
    dw, db = xp.zeros(width, wide), xp.zeros(width, wide)
    with np.errstate(all="ignore"):
        for key in row_blocks(xp, rows.shape, 1)[1]:
            r, gi = (xp.ascontiguousarray(a[key], dtype=wide) for a in (rows, gs))
            n = xp.empty(r.shape, wide)
            inverse = _normalized(xp, r, eps, n)
            # The sums are products with vectors, which BLAS makes in a third of the time of a reduction.
            one = xp.ones(len(r), wide)
            t = gi * n
            dw += one @ t
            db += one @ gi
            n *= ((t @ w) / width)[:, None]
            n += ((gi @ w) / width)[:, None]
            xp.multiply(gi, w, out=t)
            t -= n
            o = dx[key]
            if o.dtype == wide:
                xp.multiply(t, inverse, out=o)
            else:
                o[...] = t * inverse
    return (
        dx.reshape(x.shape),
        dw.reshape(weight.shape).astype(weight.dtype),
        db.reshape(weight.shape).astype(weight.dtype),
    )


def _statistics(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array]:
    """Deviations from the mean, and one over the standard deviation, over ``axes`` (kept)."""
    from .elementwise import sqrt, square
    from .reductions import mean

    d = x - mean(x, axis=axes, keepdims=True)
    return d, 1.0 / sqrt(mean(square(d), axis=axes, keepdims=True) + eps)


def _decompose_layer_norm(x: Array, weight: Array, bias: Array, naxes: int, eps: float) -> Array:
    from .manipulation import astype

    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, inv = _statistics(astype(x, _wide(x.dtype), copy=False), tuple(range(x.ndim - naxes, x.ndim)), eps)
    return astype(d * inv * weight + bias, out_dtype, copy=False)


def _decompose_layer_norm_backward(
    g: Array, x: Array, weight: Array, naxes: int, eps: float
) -> tuple[Array, Array, Array]:
    from .manipulation import astype
    from .reductions import mean, sum

    lead, axes = tuple(range(x.ndim - naxes)), tuple(range(x.ndim - naxes, x.ndim))
    wide = _wide(x.dtype)
    gi = astype(g, wide, copy=False)
    d, inv = _statistics(astype(x, wide, copy=False), axes, eps)
    n = d * inv
    gw = gi * weight
    dx = (gw - mean(gw, axis=axes, keepdims=True) - n * mean(gw * n, axis=axes, keepdims=True)) * inv
    return (
        astype(dx, x.dtype, copy=False),
        astype(sum(gi * n, axis=lead), weight.dtype, copy=False),
        astype(sum(gi, axis=lead), weight.dtype, copy=False),
    )


def _infer_layer_norm(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    x, weight, bias = args
    return ShapeDtype(x.shape, np.result_type(x.dtype, weight.dtype, bias.dtype))


def _infer_backward(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    _, x, weight = args
    w = ShapeDtype(weight.shape, weight.dtype)
    return ShapeDtype(x.shape, x.dtype), w, w


LAYER_NORM = Op("layer_norm", ("x", "weight", "bias"), _layer_norm, _infer_layer_norm, decompose=_decompose_layer_norm)
LAYER_NORM_BACKWARD = Op(
    "layer_norm_backward",
    ("g", "x", "weight"),
    _layer_norm_backward,
    _infer_backward,
    nout=3,
    decompose=_decompose_layer_norm_backward,
)


@composite("layer_norm")
def layer_norm(
    x: Any,
    /,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
) -> Array:
    """Each sample shifted and scaled to mean 0 and variance 1 over its last dimensions (Ba, Kiros and Hinton, 2016).

    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, with the biased variance; statistics of float16 and bfloat16 are
    kept in float32.

    Parameters
    ----------
    x
        Shape ``(*batch, *normalized_shape)``, floating.
    normalized_shape
        Lengths of the last dimensions of ``x``.
    weight, bias
        Of shape ``normalized_shape``; ones and zeros by default.
    eps
        Positive; added to the variance.

    Raises
    ------
    ShapeError
        When the last dimensions of ``x``, ``weight`` or ``bias`` are not ``normalized_shape``.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.layer_norm(mt.asarray([[1.0, 2.0, 3.0]]), 3)
    Array([[-1.22473569,  0.        ,  1.22473569]], dtype=float64)
    """
    from .creation import asarray, ones, zeros

    x = asarray(x)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or x.shape[x.ndim - len(shape) :] != shape:
        raise ShapeError(f"[layer_norm] the last dimensions of x {x.shape} must be normalized_shape {shape}")
    if not eps > 0:
        raise ValueError(f"[layer_norm] eps must be positive, got {eps}")
    where = None if hasattr(x._buf, "aval") else x.device
    w = ones(shape, dtype=x.dtype, device=where) if weight is None else asarray(weight)
    b = zeros(shape, dtype=x.dtype, device=where) if bias is None else asarray(bias)
    for name, p in (("weight", w), ("bias", b)):
        if p.shape != shape:
            raise ShapeError(f"[layer_norm] {name} has shape {p.shape}, expected {shape}")
    return apply(LAYER_NORM, (x, w, b), {"naxes": len(shape), "eps": float(eps)})
