"""Norms over the last dimensions: ``layer_norm`` and ``rms_norm``.

Each is an op of its own with its own backward op, computed in blocks of rows that stay in cache, and by one fused
kernel on a GPU; so is each of a sum, which is a result too. Each also knows how to decompose into plain functions: that
form serves higher derivatives (a fused backward has no history of its own statistics) and normalised dimensions that
are sharded, whose sums then become collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...backends.row_blocks import add_outer, blocks_and_scratch, outer, row_blocks, row_dots, row_sums, with_zeros
from ...backends.row_blocks import wide as _wide
from ...core.array import Array
from ...core.dispatch import apply, as_number
from ...core.errors import ArgumentError, DTypeError, ShapeError
from ...core.op import Op, ShapeDtype, composite
from ...kernels import row_norms
from ...native import ops
from ...native.calls import first
from ...ops.creation import asarray, beside, full
from ...ops.elementwise import sqrt, square
from ...ops.manipulation import astype
from ...ops.param_kinds import COUNT, NUMBER
from ...reductions.moments import mean
from ...reductions.reductions import sum

# Deviations from a mean of so many standard deviations are taken a second time: what its rounding left is then seen.
FAR = 4.0


def _deviations(xp: Any, x: Any, eps: float, out: Any) -> Any:
    """``out = x - mean`` of the rows of a block; returns one over the standard deviation of each."""
    width, one = x.shape[1], xp.ones(x.shape[1], x.dtype)
    least = x.dtype.type(eps)
    less_mean = row_sums(xp, x)[:, 0] / -width
    xp.copyto(out, x)
    add_outer(xp, out, less_mean, one)
    inverse = 1 / xp.sqrt(row_dots(xp, out, out)[:, 0] / width + least)
    # A mean of 10⁴ is rounded by 5e-4, and all its deviations with it. The deviations themselves are nearly exact, and
    # so is their mean. Most rows are near zero, and pay for the question alone.
    distance = less_mean * inverse
    if not distance @ distance <= FAR * FAR:
        off = xp.where(xp.abs(distance) > FAR, row_sums(xp, out)[:, 0] / -width, 0)
        add_outer(xp, out, off, one)
        inverse = 1 / xp.sqrt(row_dots(xp, out, out)[:, 0] / width + least)
    return inverse


def _normalized(xp: Any, x: Any, eps: float, out: Any) -> Any:
    """``out = (x - mean) / deviation`` of the rows of a block; returns one over the deviation, as a column."""
    inverse = _deviations(xp, x, eps, out)[:, None]
    out *= inverse
    return inverse


# In the two below each pass over a block counts. A factor for each row costs NumPy two passes, one for each column half
# as much more than one; their products, made by BLAS, and multiplied with in place, are the least.


def _layer_norm(xp: Any, x: Any, weight: Any, bias: Any, naxes: int, eps: float) -> Any:
    width = math.prod(x.shape[x.ndim - naxes :])
    rows = x.reshape(math.prod(x.shape[: x.ndim - naxes]), width)
    wide = _wide(x.dtype)
    w, b = (p.reshape(-1).astype(wide, copy=False) for p in (weight, bias))
    out = xp.empty(rows.shape, xp.result_type(x.dtype, weight.dtype, bias.dtype))
    row = with_zeros(xp, w)
    keys, (product, deviation) = blocks_and_scratch(xp, rows.shape, wide, 2)
    with np.errstate(all="ignore"):
        for key in keys:
            r = xp.ascontiguousarray(rows[key], dtype=wide)
            n = out[key] if out.dtype == wide else deviation[: len(r)]
            inverse = _deviations(xp, r, eps, n)
            n *= outer(xp, inverse, row, product[: len(r)])
            add_outer(xp, n, xp.ones(len(n), wide), b)
            if out.dtype != wide:
                out[key] = n
    return out.reshape(x.shape)


def _layer_norm_backward(xp: Any, g: Any, x: Any, weight: Any, naxes: int, eps: float) -> Any:
    """Cotangents of x, weight and bias. The statistics are computed again: cheaper than reading them back from
    memory."""
    width = math.prod(x.shape[x.ndim - naxes :])
    rows = x.reshape(math.prod(x.shape[: x.ndim - naxes]), width)
    gs = g.reshape(rows.shape)
    wide = _wide(x.dtype)
    w = weight.reshape(-1).astype(wide, copy=False)
    dx = xp.empty(rows.shape, x.dtype)
    dw, db = xp.zeros(width, wide), xp.zeros(width, wide)
    row = with_zeros(xp, w)
    keys, scratch = blocks_and_scratch(xp, rows.shape, wide, 3)
    with np.errstate(all="ignore"):
        for key in keys:
            r, gi = (xp.ascontiguousarray(a[key], dtype=wide) for a in (rows, gs))
            p, d, t = (s[: len(r)] for s in scratch)
            inverse = _deviations(xp, r, eps, d)
            # dx = (g w - mean(g w) - n mean(g w n)) / deviation, with n = d / deviation, which is never formed: what is
            # one number a row goes into the sums, which are products with vectors, a third of the time of a reduction.
            xp.multiply(gi, d, out=t)
            dw += inverse @ t
            db += xp.ones(len(r), wide) @ gi
            d *= ((t @ w) / width * inverse * inverse * inverse)[:, None]  # in this order zeros stay zeros
            o = dx[key] if dx.dtype == wide else t
            xp.multiply(gi, outer(xp, inverse, row, p), out=o)
            o -= d
            add_outer(xp, o, (gi @ w) * inverse / -width, xp.ones(width, wide))
            if o is t:
                dx[key] = t
    return dx.reshape(x.shape), *(s.reshape(weight.shape).astype(weight.dtype) for s in (dw, db))


def _statistics(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array]:
    """Deviations from the mean, and one over the standard deviation, over ``axes`` (kept)."""
    d = x - mean(x, axis=axes, keepdims=True)
    return d, 1.0 / sqrt(mean(square(d), axis=axes, keepdims=True) + eps)


def _decompose_layer_norm(x: Array, weight: Array, bias: Array, naxes: int, eps: float) -> Array:
    out_dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    d, inv = _statistics(astype(x, _wide(x.dtype), copy=False), tuple(range(x.ndim - naxes, x.ndim)), eps)
    return astype(d * inv * weight + bias, out_dtype, copy=False)


def _decompose_layer_norm_backward(
    g: Array, x: Array, weight: Array, *, naxes: int, eps: float
) -> tuple[Array, Array, Array]:
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


def infer_affine(op: Op, args: tuple[Any, ...], params: Any) -> ShapeDtype:
    """The shape of the first operand, in the dtype that it has together with weight and bias, the last two."""
    return ShapeDtype(args[0].shape, np.result_type(args[0].dtype, args[-2].dtype, args[-1].dtype))


def infer_affine_backward(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    """Like x, and twice like the weight; a cotangent behind them is added to that of x."""
    x, weight, *g_sum = args[op.operands.index("x") :]
    w = ShapeDtype(weight.shape, weight.dtype)
    return ShapeDtype(x.shape, np.result_type(x.dtype, *(g.dtype for g in g_sum))), w, w


# ----- the norm of a sum ----------------------------------------------------------------------------------------------

BACKWARD_OPERANDS = ("g", "x", "weight", "*g_sum")
"""With the cotangent of x besides, where x is a sum that is used besides: it is added to the result for x."""


def _joined(backward: Callable[..., Any], leading: int = 0) -> Callable[..., Any]:
    """A form of a backward op, which takes ``leading`` arguments before the operands, with the operand ``g_sum``."""
    end = leading + 3

    def joined(*args: Any, **params: Any) -> Any:
        dx, *sums = backward(*args[:end], **params)
        for g in args[end:]:
            dx = dx + g
        return dx, *sums

    return joined


def _of_sum(norm: Op, kernel: Callable[..., Any]) -> Op:
    """The op of ``norm(x + residual)`` and of the sum, which is rounded to its dtype first."""

    def impl(xp: Any, x: Any, residual: Any, *parameters: Any, **params: Any) -> Any:
        total = xp.add(x, residual)
        return norm.bind(xp)(total, *parameters, **params), total

    def infer(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
        x, residual, *parameters = args
        total = ShapeDtype(x.shape, np.result_type(x.dtype, residual.dtype))
        return *norm.avals((total, *parameters), params), total

    def decompose(x: Array, residual: Array, *parameters: Array, **params: Any) -> tuple[Array, Array]:
        total = x + residual
        return norm.decompose(total, *parameters, **params), total  # type: ignore[misc]

    return Op(
        f"add_{norm.name}",
        ("x", "residual", *norm.operands[1:]),
        impl,
        infer,
        nout=2,
        decompose=decompose,
        overrides={"cupy": kernel},
        params=_PARAMS,
        wide_sums=True,
    )


_PARAMS = {"naxes": COUNT, "eps": NUMBER}
LAYER_NORM = Op(
    "layer_norm",
    ("x", "weight", "bias"),
    _layer_norm,
    infer_affine,
    decompose=_decompose_layer_norm,
    overrides={"numpy": first(ops.layer_norm, _layer_norm), "cupy": row_norms.layer_norm},
    params=_PARAMS,
    wide_sums=True,
)
LAYER_NORM_BACKWARD = Op(
    "layer_norm_backward",
    BACKWARD_OPERANDS,
    _joined(_layer_norm_backward, 1),
    infer_affine_backward,
    nout=3,
    decompose=_joined(_decompose_layer_norm_backward),
    overrides={
        "numpy": _joined(first(ops.layer_norm_backward, _layer_norm_backward)),
        "cupy": row_norms.layer_norm_backward,
    },
    params=_PARAMS,
)
ADD_LAYER_NORM = _of_sum(LAYER_NORM, row_norms.add_layer_norm)

# ----- rms_norm -------------------------------------------------------------------------------------------------------


def _root(xp: Any, x: Any, eps: float) -> Any:
    """One over the root of the mean square of the rows of a block."""
    return 1 / xp.sqrt(row_dots(xp, x, x) / x.shape[1] + x.dtype.type(eps))


def _rms_norm(xp: Any, x: Any, weight: Any, naxes: int, eps: float) -> Any:
    width = math.prod(x.shape[x.ndim - naxes :])
    rows = x.reshape(math.prod(x.shape[: x.ndim - naxes]), width)
    w, wide = weight.reshape(-1), _wide(x.dtype)
    out = xp.empty(rows.shape, xp.result_type(x.dtype, w.dtype))
    with np.errstate(all="ignore"):
        for key in row_blocks(xp, rows.shape, 1)[1]:
            r = xp.ascontiguousarray(rows[key], dtype=wide)
            if out.dtype == wide:
                xp.multiply(r, _root(xp, r, eps), out=out[key])
                out[key] *= w
            else:
                out[key] = r * _root(xp, r, eps) * w
    return out.reshape(x.shape)


def _rms_norm_backward(xp: Any, g: Any, x: Any, weight: Any, naxes: int, eps: float) -> Any:
    """Cotangents of x and weight."""
    width = math.prod(x.shape[x.ndim - naxes :])
    rows = x.reshape(math.prod(x.shape[: x.ndim - naxes]), width)
    gs = g.reshape(rows.shape)
    wide = _wide(x.dtype)
    w = weight.reshape(-1).astype(wide, copy=False)
    dx, dw = xp.empty(rows.shape, x.dtype), xp.zeros(width, wide)
    with np.errstate(all="ignore"):
        for key in row_blocks(xp, rows.shape, 1)[1]:
            r, gi = (xp.ascontiguousarray(a[key], dtype=wide) for a in (rows, gs))
            inverse = _root(xp, r, eps)
            n = r * inverse
            t = gi * n
            dw += xp.ones(len(r), wide) @ t
            n *= ((t @ w) / width)[:, None]
            xp.multiply(gi, w, out=t)
            t -= n
            t *= inverse
            dx[key] = t
    return dx.reshape(x.shape), dw.reshape(weight.shape).astype(weight.dtype)


def _inverse_root(x: Array, naxes: int, eps: float) -> Array:
    return 1.0 / sqrt(mean(square(x), axis=tuple(range(x.ndim - naxes, x.ndim)), keepdims=True) + eps)


def _decompose_rms_norm(x: Array, weight: Array, naxes: int, eps: float) -> Array:
    out_dtype = np.result_type(x.dtype, weight.dtype)
    x = astype(x, _wide(x.dtype), copy=False)
    return astype(x * _inverse_root(x, naxes, eps) * weight, out_dtype, copy=False)


def _decompose_rms_norm_backward(g: Array, x: Array, weight: Array, *, naxes: int, eps: float) -> tuple[Array, Array]:
    lead, axes = tuple(range(x.ndim - naxes)), tuple(range(x.ndim - naxes, x.ndim))
    wide = _wide(x.dtype)
    gi, r = (astype(a, wide, copy=False) for a in (g, x))
    inverse = _inverse_root(r, naxes, eps)
    n, gw = r * inverse, gi * weight
    dx = (gw - n * mean(gw * n, axis=axes, keepdims=True)) * inverse
    return astype(dx, x.dtype, copy=False), astype(sum(gi * n, axis=lead), weight.dtype, copy=False)


RMS_NORM = Op(
    "rms_norm",
    ("x", "weight"),
    _rms_norm,
    lambda op, args, params: ShapeDtype(args[0].shape, np.result_type(*(a.dtype for a in args))),
    decompose=_decompose_rms_norm,
    overrides={"numpy": first(ops.rms_norm, _rms_norm), "cupy": row_norms.rms_norm},
    params=_PARAMS,
    wide_sums=True,
)
RMS_NORM_BACKWARD = Op(
    "rms_norm_backward",
    BACKWARD_OPERANDS,
    _joined(_rms_norm_backward, 1),
    lambda op, args, params: infer_affine_backward(op, args, params)[:2],
    nout=2,
    decompose=_joined(_decompose_rms_norm_backward),
    overrides={"numpy": _joined(first(ops.rms_norm_backward, _rms_norm_backward)), "cupy": row_norms.rms_norm_backward},
    params=_PARAMS,
)
ADD_RMS_NORM = _of_sum(RMS_NORM, row_norms.add_rms_norm)

# ----- public functions -----------------------------------------------------------------------------------------------


def checked(name: str, x: Any, eps: float, what: str = "x") -> Array:
    """``x`` as an array of real floats. Raises where it is none, or ``eps`` is not positive."""
    x = asarray(x)
    if x.dtype.kind in "biuc":
        raise DTypeError(f"[{name}] {what} must be real floating, got {x.dtype.name}")
    if not eps > 0:
        raise ArgumentError(f"[{name}] eps must be positive, got {eps}")
    return x


def parameter(name: str, what: str, p: Any, x: Array, shape: tuple[int, ...], default: float) -> Array:
    """A parameter of this shape beside ``x``; ``default`` throughout where ``p`` is None."""
    p = full(shape, default, dtype=x.dtype, device=beside(x)) if p is None else asarray(p)
    if p.shape != shape:
        raise ShapeError(f"[{name}] {what} has shape {p.shape}, expected {shape}")
    if p.dtype.kind in "biuc":
        raise DTypeError(f"[{name}] {what} must be real floating, got {p.dtype.name}")
    return p


def _norm(
    op: Op, x: Any, *residual: Any, normalized_shape: int | Sequence[int], eps: float, **parameters: tuple[Any, float]
) -> Any:
    """The op of ``x``, of a residual if there is one, and of parameters, with a constant for each that is None."""
    name = op.name
    x, others = checked(name, x, eps), [checked(name, r, eps, "residual") for r in residual]
    if others and others[0].shape != x.shape:
        raise ShapeError(f"[{name}] residual has shape {others[0].shape}, expected {x.shape}")
    shape = (normalized_shape,) if isinstance(normalized_shape, int | np.integer) else tuple(normalized_shape)
    if not shape or x.shape[x.ndim - len(shape) :] != shape:
        raise ShapeError(f"[{name}] the last dimensions of x {x.shape} must be normalized_shape {shape}")
    own = [parameter(name, what, p, x, shape, default) for what, (p, default) in parameters.items()]
    return apply(op, (x, *others, *own), {"naxes": len(shape), "eps": as_number(name, "eps", eps)})


@composite("layer_norm")
def layer_norm(
    x: Any, /, normalized_shape: int | Sequence[int], weight: Any = None, bias: Any = None, *, eps: float = 1e-5
) -> Array:
    """Each sample shifted and scaled to mean 0 and variance 1 over its last dimensions (Ba, Kiros and Hinton, 2016).

    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, with the biased variance; statistics of float16 and bfloat16
    are kept in float32.

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
    DTypeError
        For integers and complex numbers.

    Examples
    --------
    >>> mt.layer_norm(mt.asarray([[1.0, 2.0, 3.0]]), 3)
    Array([[-1.22473569,  0.        ,  1.22473569]], dtype=float64)
    """
    return _norm(LAYER_NORM, x, normalized_shape=normalized_shape, eps=eps, weight=(weight, 1.0), bias=(bias, 0.0))


@composite("rms_norm")
def rms_norm(x: Any, /, normalized_shape: int | Sequence[int], weight: Any = None, *, eps: float = 1e-6) -> Array:
    """Each sample scaled to a mean square of 1 over its last dimensions (Zhang and Sennrich, 2019).

    ``y = x / sqrt(mean(x**2) + eps) * weight``; means of float16 and bfloat16 are made in float32.

    Parameters
    ----------
    x
        Shape ``(*batch, *normalized_shape)``, floating.
    normalized_shape
        Lengths of the last dimensions of ``x``.
    weight
        Of shape ``normalized_shape``; ones by default.
    eps
        Positive; added to the mean square.

    Raises
    ------
    ShapeError
        When the last dimensions of ``x``, or ``weight``, are not ``normalized_shape``.
    DTypeError
        For integers and complex numbers.

    Examples
    --------
    >>> mt.round(mt.rms_norm(mt.asarray([[3.0, 4.0, 0.0, 0.0]]), 4) * 1000)
    Array([[1200., 1600.,    0.,    0.]], dtype=float64)
    """
    return _norm(RMS_NORM, x, normalized_shape=normalized_shape, eps=eps, weight=(weight, 1.0))


@composite("add_layer_norm")
def add_layer_norm(
    x: Any,
    residual: Any,
    /,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
) -> tuple[Array, Array]:
    """``total = x + residual`` and its :func:`layer_norm`: ``(layer_norm(total), total)``, in one pass.

    The sum is rounded to its dtype, and the norm is that of the rounded sum: the results have the bits of those of the
    two functions.

    Parameters
    ----------
    x, residual
        Of one shape ``(*batch, *normalized_shape)``, floating.
    normalized_shape, weight, bias, eps
        As :func:`layer_norm` takes them.

    Raises
    ------
    ShapeError
        When ``x`` and ``residual`` have two shapes; and as :func:`layer_norm`.
    DTypeError
        For integers and complex numbers.

    Examples
    --------
    >>> y, total = mt.nn.add_layer_norm(mt.asarray([[1.0, 2.0, 3.0]]), mt.asarray([[1.0, 1.0, 1.0]]), 3)
    >>> total
    Array([[2., 3., 4.]], dtype=float64)
    """
    parameters = {"weight": (weight, 1.0), "bias": (bias, 0.0)}
    return _norm(ADD_LAYER_NORM, x, residual, normalized_shape=normalized_shape, eps=eps, **parameters)


@composite("add_rms_norm")
def add_rms_norm(
    x: Any, residual: Any, /, normalized_shape: int | Sequence[int], weight: Any = None, *, eps: float = 1e-6
) -> tuple[Array, Array]:
    """``total = x + residual`` and its :func:`rms_norm`: ``(rms_norm(total), total)``, in one pass.

    The sum is rounded to its dtype, and the norm is that of the rounded sum: the results have the bits of those of the
    two functions.

    Parameters
    ----------
    x, residual
        Of one shape ``(*batch, *normalized_shape)``, floating.
    normalized_shape, weight, eps
        As :func:`rms_norm` takes them.

    Raises
    ------
    ShapeError
        When ``x`` and ``residual`` have two shapes; and as :func:`rms_norm`.
    DTypeError
        For integers and complex numbers.

    Examples
    --------
    >>> y, total = mt.nn.add_rms_norm(mt.asarray([[2.0, 4.0, 0.0, 0.0]]), mt.asarray([[1.0, 0.0, 0.0, 0.0]]), 4)
    >>> mt.round(y * 1000), total
    (Array([[1200., 1600.,    0.,    0.]], dtype=float64), Array([[3., 4., 0., 0.]], dtype=float64))
    """
    return _norm(ADD_RMS_NORM, x, residual, normalized_shape=normalized_shape, eps=eps, weight=(weight, 1.0))
