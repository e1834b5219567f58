"""``batch_norm``: each channel normalized over the whole batch, by its own statistics or running ones.

Training is an op with its own backward op, inference is another; all are computed in blocks that stay in cache, and by
fused kernels on a GPU. Each knows how to decompose into plain functions: that form serves higher derivatives, and a
batch that is split, whose sums then become collectives: its statistics are those of the global batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...backends.row_blocks import BLOCK
from ...core.array import Array
from ...core.dispatch import apply, as_number
from ...core.op import Op, ShapeDtype, composite
from ...kernels import channel_norms as kernels
from ...ops.elementwise import sqrt, square, stop_gradient
from ...ops.manipulation import astype
from ...ops.param_kinds import AXIS, NUMBER
from ...reductions.moments import mean
from ...reductions.reductions import sum
from .group_norm import image, spread
from .layer_norm import FAR, _wide, infer_affine, infer_affine_backward, parameter


def other_axes(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i != axis)


def shaped(p: Any, ndim: int, axis: int) -> Any:
    return p.reshape(tuple(-1 if i == axis else 1 for i in range(ndim)))


def _blocks(xp: Any, x: Any) -> list[slice]:
    """Blocks of whole samples: on a CPU, of about as much as stays in cache."""
    n = x.shape[0]
    step = max(1, BLOCK // max(math.prod(x.shape[1:]), 1)) if xp is np else max(n, 1)
    return [slice(i, i + step) for i in range(0, n, step)]


def sums_along_deviations(xp: Any, g: Any, x: Any, mean: Any, axis: int) -> tuple[Any, Any]:
    """``g`` in the dtype of its sums, and the sums by channel of ``g * (x - mean)``, of NumPy's buffers in blocks."""
    g, x, mean = (a.astype(_wide(a.dtype), copy=False) for a in (g, x, mean))
    center, axes = shaped(mean, x.ndim, axis), other_axes(x.ndim, axis)
    if xp is not np:
        return g, xp.sum(g * (x - center), axis=axes)
    total = np.zeros(mean.shape, g.dtype)
    for b in _blocks(xp, x):
        d = x[b] - center
        d *= g[b]
        total += d.sum(axis=axes)
    return g, total


def _moments(xp: Any, x: Any, axis: int) -> tuple[Any, Any, Any]:
    """Mean and biased variance of each channel, in the wide dtype, and the rounding error of the mean.

    All are zeros for an empty batch."""
    wide, channels = _wide(x.dtype), x.shape[axis]
    mean, var, rest = (xp.zeros(channels, wide) for _ in range(3))
    count, axes = x.size // max(channels, 1), other_axes(x.ndim, axis)
    if count:
        for b in _blocks(xp, x):
            mean += x[b].sum(axis=axes, dtype=wide)
        mean /= count
        center = shaped(mean, x.ndim, axis)
        for b in _blocks(xp, x):
            d = x[b] - center
            d *= d
            var += d.sum(axis=axes)
        var /= count
        rest = _rest_of_mean(xp, x, mean, var, axis)
        var = xp.maximum(var - rest * rest, 0)
    return mean, var, rest


def _rest_of_mean(xp: Any, x: Any, mean: Any, var: Any, axis: int) -> Any:
    """As with rows (norms.FAR): the mean of deviations from a mean far from zero is what that was wrong by."""
    far, rest = xp.abs(mean) > FAR * xp.sqrt(var), xp.zeros_like(mean)
    if far.any():
        for b in _blocks(xp, x):
            rest += (x[b] - shaped(mean, x.ndim, axis)).sum(axis=other_axes(x.ndim, axis))
        rest = xp.where(far, rest / (x.size // x.shape[axis]), 0)
    return rest


def _linear(xp: Any, x: Any, mean: Any, scale: Any, shift: Any, axis: int, dtype: np.dtype) -> Any:
    """``(x - mean) * scale + shift`` by channel."""
    out = xp.empty(x.shape, dtype)
    m, s, t = (shaped(p, x.ndim, axis) for p in (mean, scale, shift))
    for b in _blocks(xp, x):
        d = x[b] - m
        d *= s
        xp.add(d, t, out=out[b], casting="same_kind")
    return out


def _shares(count: int, momentum: Any) -> tuple[Any, Any]:
    """Shares of a batch of ``count`` numbers a channel in the new running mean and variance, which has no bias. The old
    one has the rest of ``momentum``."""
    return momentum, momentum * (count / (count - 1) if count > 1 else 1.0)


def _batch_norm(
    xp: Any, x: Any, weight: Any, bias: Any, old_mean: Any, old_var: Any, axis: int, eps: float, momentum: float
) -> Any:
    mean, var, rest = _moments(xp, x, axis)
    y = _normalized(xp, x, mean, var, rest, weight, bias, axis, eps)
    momentum = momentum if x.size else 0.0  # of a batch of nothing nothing is learnt
    shares = _shares(x.size // max(x.shape[axis], 1), momentum)
    moved = (
        (old.astype(_wide(old.dtype), copy=False) * (1 - momentum) + new * share).astype(old.dtype, copy=False)
        for old, new, share in zip((old_mean, old_var), (mean, var), shares, strict=True)
    )
    return y, mean, var, *moved


def _inference(xp: Any, x: Any, mean: Any, var: Any, weight: Any, bias: Any, axis: int, eps: float) -> Any:
    return _normalized(xp, x, mean, var, None, weight, bias, axis, eps)


def _normalized(xp: Any, x: Any, mean: Any, var: Any, rest: Any, weight: Any, bias: Any, axis: int, eps: float) -> Any:
    """With the mean ``mean + rest``, where there is a rest."""
    wide = _wide(x.dtype)
    m, v, w = (p.astype(wide, copy=False) for p in (mean, var, weight))
    with np.errstate(all="ignore"):
        scale = w / xp.sqrt(v + wide.type(eps))
        shift = bias if rest is None else bias - rest * scale
        return _linear(xp, x, m, scale, shift, axis, xp.result_type(x.dtype, weight.dtype, bias.dtype))


def _backward(
    xp: Any, g: Any, g_mean: Any, g_var: Any, mean: Any, var: Any, x: Any, weight: Any, axis: int, eps: float
) -> Any:
    """Cotangents of x, weight and bias; ``g_mean`` and ``g_var`` are those of the statistics ``mean`` and ``var``."""
    wide, axes = _wide(x.dtype), other_axes(x.ndim, axis)
    dw, db = xp.zeros(mean.shape, wide), xp.zeros(mean.shape, wide)
    count = x.size // max(x.shape[axis], 1)
    dx = xp.empty(x.shape, x.dtype)
    with np.errstate(all="ignore"):
        rest = _rest_of_mean(xp, x, mean, var, axis) if count else xp.zeros_like(mean)
        inverse = 1 / xp.sqrt(var + wide.type(eps))
        center, n = (shaped(p, x.ndim, axis) for p in (mean, inverse))
        for b in _blocks(xp, x) if count else ():
            gi = g[b].astype(wide, copy=False)
            db += gi.sum(axis=axes)
            d = x[b] - center
            d *= n
            d *= gi
            dw += d.sum(axis=axes)
        if count:
            dw -= rest * inverse * db
            scale = weight.astype(wide, copy=False) * inverse
            slope = (2 * g_var.astype(wide, copy=False) - scale * inverse * dw) / count
            level = (g_mean.astype(wide, copy=False) - scale * db) / count - slope * rest
            s, t, scale = (shaped(p, x.ndim, axis) for p in (slope, level, scale))
            for b in _blocks(xp, x):
                d = x[b] - center
                d *= s
                d += t
                d += g[b].astype(wide, copy=False) * scale
                dx[b] = d
    return dx, dw.astype(weight.dtype), db.astype(weight.dtype)


def _decompose(
    x: Array, weight: Array, bias: Array, old_mean: Array, old_var: Array, axis: int, eps: float, momentum: Any
) -> tuple[Array, ...]:
    dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    w, axes = astype(x, _wide(x.dtype), copy=False), other_axes(x.ndim, axis)
    # Sums over ranks are pending through linear steps. Zero ends that: what reads a statistic shares one sum.
    center = mean(w, axis=axes) + 0.0
    d = w - spread(center, x, axis)
    var = mean(square(d), axis=axes) + 0.0
    y = d / sqrt(spread(var, x, axis) + eps) * spread(weight, x, axis) + spread(bias, x, axis)
    statistics = center, var
    shares = _shares(x.size // max(x.shape[axis], 1), momentum)

    def moved(old: Array, new: Array, share: Any) -> Array:
        old_share = astype(stop_gradient(old), _wide(old.dtype), copy=False) * (1 - momentum)
        return astype(old_share + stop_gradient(new) * share, old.dtype, copy=False)

    running = map(moved, (old_mean, old_var), statistics, shares)
    return astype(y, dtype, copy=False), *statistics, *running


def _decompose_backward(
    g: Array, g_mean: Array, g_var: Array, center: Array, var: Array, x: Array, weight: Array, axis: int, eps: float
) -> tuple[Array, ...]:
    wide, axes = _wide(x.dtype), other_axes(x.ndim, axis)
    gi, w = (astype(a, wide, copy=False) for a in (g, x))
    d = w - spread(center, x, axis)
    inverse = 1.0 / sqrt(spread(var, x, axis) + eps)
    n, scale, count = d * inverse, spread(weight, x, axis) * inverse, x.size // x.shape[axis]
    of_n, of_one = sum(gi * n, axis=axes) + 0.0, sum(gi, axis=axes) + 0.0
    along = spread(of_one, x, axis) + n * spread(of_n, x, axis)
    of_statistics = spread(g_mean, x, axis) + 2.0 * d * spread(g_var, x, axis)
    dx = scale * gi + (of_statistics - scale * along) * (1.0 / count)
    dtypes = x.dtype, weight.dtype, weight.dtype
    return tuple(astype(a, dtype, copy=False) for a, dtype in zip((dx, of_n, of_one), dtypes, strict=True))


def _decompose_inference(x: Array, mean: Array, var: Array, weight: Array, bias: Array, axis: int, eps: float) -> Array:
    dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    m, v, w, b = (spread(p, x, axis) for p in (mean, var, weight, bias))
    return astype((astype(x, _wide(x.dtype), copy=False) - m) * (w / sqrt(v + eps)) + b, dtype, copy=False)


def _infer(op: Op, args: tuple[Any, ...], params: Any) -> tuple[ShapeDtype, ...]:
    x, _, _, *running = args
    statistic = ShapeDtype((x.shape[params["axis"]],), _wide(x.dtype))
    return infer_affine(op, args[:3], params), statistic, statistic, *(ShapeDtype(r.shape, r.dtype) for r in running)


_PARAMS = {"axis": AXIS, "eps": NUMBER}
BATCH_NORM = Op(
    "batch_norm",
    ("x", "weight", "bias", "running_mean", "running_var"),
    _batch_norm,
    _infer,
    nout=5,
    decompose=_decompose,
    overrides={"cupy": kernels.batch_norm},
    params={**_PARAMS, "momentum": NUMBER},
    wide_sums=True,
)
"""The normalised batch, its mean and biased variance, and the new running ones, which are constants."""
BATCH_NORM_BACKWARD = Op(
    "batch_norm_backward",
    ("g", "g_mean", "g_var", "mean", "var", "x", "weight"),
    _backward,
    infer_affine_backward,
    nout=3,
    decompose=_decompose_backward,
    overrides={"cupy": kernels.batch_norm_backward},
    params=_PARAMS,
)
BATCH_NORM_INFERENCE = Op(
    "batch_norm_inference",
    ("x", "mean", "var", "weight", "bias"),
    _inference,
    infer_affine,
    decompose=_decompose_inference,
    overrides={"cupy": kernels.batch_norm_inference},
    params=_PARAMS,
)


class BatchNorm(NamedTuple):
    """The normalised array, and the statistics to keep for later."""

    out: Array
    running_mean: Array
    running_var: Array


@composite("batch_norm")
def batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    /,
    weight: Any = None,
    bias: Any = None,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    channel_axis: int = 1,
) -> BatchNorm:
    """Mean 0 and variance 1 over each channel of the whole batch (Ioffe and Szegedy, 2015).

    Nothing is changed in place: the new running statistics are part of the result. They move by ``momentum`` towards
    those of the batch, the variance without bias (divided by one less than the count), as in PyTorch; gradients do not
    flow through them. On a split batch the statistics are those of the global batch. Statistics of float16 and bfloat16
    are kept in float32.

    Parameters
    ----------
    x
        Shape ``(N, channels, ...)``, or ``(N, ..., channels)`` with ``channel_axis=-1``; floating.
    running_mean, running_var
        One number a channel.
    weight, bias
        One number a channel; ones and zeros by default.
    training
        Normalise by the statistics of the batch; else by the running ones, which then stay as they are.
    momentum
        Share of the batch in the new running statistics.
    eps
        Positive; added to the (biased) variance.
    channel_axis
        The dimension of the channels: 1, or the last one.

    Examples
    --------
    >>> out, mean, var = mt.batch_norm(mt.asarray([[1.0], [3.0]]), mt.zeros(1), mt.ones(1), training=True, momentum=1.0)
    >>> mean.tolist(), var.tolist()
    ([2.0], [2.0])
    """
    x, axis = image("batch_norm", x, channel_axis, eps)
    channels = (x.shape[axis],)
    old_mean = parameter("batch_norm", "running_mean", running_mean, x, channels, 0.0)
    old_var = parameter("batch_norm", "running_var", running_var, x, channels, 1.0)
    w = parameter("batch_norm", "weight", weight, x, channels, 1.0)
    b = parameter("batch_norm", "bias", bias, x, channels, 0.0)
    params = {"axis": axis, "eps": as_number("batch_norm", "eps", eps)}
    count = x.size // max(x.shape[axis], 1)
    if not training or count == 0:  # of a batch of nothing nothing is learnt
        return BatchNorm(apply(BATCH_NORM_INFERENCE, (x, old_mean, old_var, w, b), params), old_mean, old_var)
    operands = (x, w, b, old_mean, old_var)
    if isinstance(momentum, Array):  # it may be watched
        out, _, _, *running = _decompose(*operands, **params, momentum=momentum)
    else:
        out, _, _, *running = apply(BATCH_NORM, operands, {**params, "momentum": float(momentum)})
    return BatchNorm(out, *running)
