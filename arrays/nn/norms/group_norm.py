"""Norms of images over groups of channels: ``group_norm``, and ``instance_norm``, whose groups are single channels.

One op with its own backward op, computed in blocks of groups that stay in cache, and by one fused kernel on a GPU. Each
also knows how to decompose into plain functions: that form serves higher derivatives, and channels and positions that
are sharded, whose sums then become collectives.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...backends.row_blocks import row_blocks, row_sums
from ...core.array import Array
from ...core.dispatch import apply, as_number
from ...core.errors import ShapeError
from ...core.op import Op, composite
from ...kernels import channel_norms as kernels
from ...native import ops
from ...native.calls import first
from ...ops.manipulation import astype, reshape
from ...ops.param_kinds import AXIS, NUMBER, POSITIVE
from ...reductions.moments import mean
from ...reductions.reductions import sum
from .layer_norm import _normalized, _statistics, _wide, checked, infer_affine, infer_affine_backward, parameter

# ----- what the norms of images share ---------------------------------------------------------------------------------


def image(name: str, x: Any, channel_axis: int, eps: float, least: int = 2) -> tuple[Array, int]:
    """``x`` as an array, checked, and the dimension of its channels: 1 or the last one."""
    x = checked(name, x, eps)
    if x.ndim < least:
        rest = " with something to average" if least > 2 else ""
        raise ShapeError(f"[{name}] x has the shape (N, channels, ...){rest}, got {x.shape}")
    if channel_axis not in (1, -1, x.ndim - 1):
        raise ShapeError(f"[{name}] channel_axis is 1 or the last dimension of x {x.shape}, got {channel_axis}")
    return x, channel_axis % x.ndim


def spread(p: Array, like: Array, axis: int) -> Array:
    """A number a channel, in the wide dtype and in a shape that broadcasts against ``like``."""
    wide = np.result_type(_wide(p.dtype), _wide(like.dtype))
    return astype(reshape(p, tuple(-1 if i == axis else 1 for i in range(like.ndim))), wide, copy=False)


# ----- the op ---------------------------------------------------------------------------------------------------------


def _groups(xp: Any, x: Any, num_groups: int, axis: int) -> Any:
    """Shape (samples * groups, channels of a group, positions); a copy where the channels are last."""
    if axis != 1:
        x = xp.moveaxis(x, axis, 1)
    n, c = x.shape[:2]
    return xp.ascontiguousarray(x).reshape(n * num_groups, c // num_groups, math.prod(x.shape[2:]))


def _back(xp: Any, y: Any, shape: tuple[int, ...], axis: int) -> Any:
    """Inverse of :func:`_groups`."""
    if axis == 1:
        return y.reshape(shape)
    moved = (shape[0], shape[axis], *(n for i, n in enumerate(shape) if i not in (0, axis)))
    return xp.ascontiguousarray(xp.moveaxis(y.reshape(moved), 1, axis))


def _group_norm(xp: Any, x: Any, weight: Any, bias: Any, num_groups: int, axis: int, eps: float) -> Any:
    wide = _wide(x.dtype)
    groups = _groups(xp, x, num_groups, axis)
    rows, inside, spatial = groups.shape
    out = xp.empty(groups.shape, xp.result_type(x.dtype, weight.dtype, bias.dtype))
    # In the dtype of the sums, as NumPy multiplies short floats one by one.
    given = out.dtype if out.dtype.itemsize > wide.itemsize else wide
    w, b = (p.reshape(num_groups, inside, 1).astype(given, copy=False) for p in (weight, bias))
    if x.size:
        with np.errstate(all="ignore"):
            for (key,) in row_blocks(xp, (rows, inside * spatial), 1)[1]:
                r = xp.ascontiguousarray(groups[key], dtype=wide).reshape(-1, inside * spatial)
                n = xp.empty(r.shape, wide)
                _normalized(xp, r, eps, n)
                which = xp.arange(rows)[key] % num_groups
                y = n.reshape(-1, inside, spatial)
                y = xp.multiply(y, w[which], out=y if given == wide else None)
                y += b[which]
                out[key] = y
    return _back(xp, out, x.shape, axis)


def _group_norm_backward(xp: Any, g: Any, x: Any, weight: Any, num_groups: int, axis: int, eps: float) -> Any:
    """Cotangents of x, weight and bias. The statistics are computed again: cheaper than reading them back from
    memory."""
    wide = _wide(x.dtype)
    groups, gs = (_groups(xp, a, num_groups, axis) for a in (x, g))
    rows, inside, spatial = groups.shape
    size = inside * spatial
    w = weight.reshape(num_groups, inside, 1).astype(wide, copy=False)
    dx = xp.empty(groups.shape, x.dtype)
    # Of each sample and channel, what weight and bias get.
    dw, db = xp.zeros((rows, inside), wide), xp.zeros((rows, inside), wide)
    if x.size:
        with np.errstate(all="ignore"):
            for (key,) in row_blocks(xp, (rows, size), 1)[1]:
                r, gi = (xp.ascontiguousarray(a[key], dtype=wide) for a in (groups, gs))
                n = xp.empty((len(r), size), wide)
                inverse = _normalized(xp, r.reshape(-1, size), eps, n)
                n = n.reshape(r.shape)
                dw[key], db[key] = (gi * n).sum(axis=2), gi.sum(axis=2)
                ws = w[xp.arange(rows)[key] % num_groups]
                slope = row_sums(xp, dw[key] * ws[:, :, 0]) / size
                one = row_sums(xp, db[key] * ws[:, :, 0]) / size
                n *= slope[:, :, None]
                n += one[:, :, None]
                xp.subtract(gi * ws, n, out=n)
                n *= inverse[:, :, None]
                dx[key] = n
    sums = [a.reshape(x.shape[0], weight.shape[0]).sum(axis=0).astype(weight.dtype) for a in (dw, db)]
    return _back(xp, dx, x.shape, axis), *sums


def _split(x: Array, num_groups: int, axis: int) -> tuple[Array, tuple[int, ...]]:
    """The channels as groups and channels within them, and the dimensions that a group has its statistics over."""
    c = x.shape[axis]
    parts = reshape(x, (*x.shape[:axis], num_groups, c // num_groups, *x.shape[axis + 1 :]))
    return parts, tuple(i for i in range(1, parts.ndim) if i != axis)


def _decompose(x: Array, weight: Array, bias: Array, num_groups: int, axis: int, eps: float) -> Array:
    dtype = np.result_type(x.dtype, weight.dtype, bias.dtype)
    parts, axes = _split(astype(x, _wide(x.dtype), copy=False), num_groups, axis)
    d, inverse = _statistics(parts, axes, eps)
    y = reshape(d * inverse, x.shape)
    return astype(y * spread(weight, x, axis) + spread(bias, x, axis), dtype, copy=False)


def _decompose_backward(
    g: Array, x: Array, weight: Array, num_groups: int, axis: int, eps: float
) -> tuple[Array, Array, Array]:
    wide = _wide(x.dtype)
    gi = astype(g, wide, copy=False)
    parts, axes = _split(astype(x, wide, copy=False), num_groups, axis)
    d, inverse = _statistics(parts, axes, eps)
    n = d * inverse
    gw, _ = _split(gi * spread(weight, x, axis), num_groups, axis)
    dx = (gw - mean(gw, axis=axes, keepdims=True) - n * mean(gw * n, axis=axes, keepdims=True)) * inverse
    rest = tuple(i for i in range(x.ndim) if i != axis)
    return (
        astype(reshape(dx, x.shape), x.dtype, copy=False),
        astype(sum(gi * reshape(n, x.shape), axis=rest), weight.dtype, copy=False),
        astype(sum(gi, axis=rest), weight.dtype, copy=False),
    )


_PARAMS = {"num_groups": POSITIVE, "axis": AXIS, "eps": NUMBER}
GROUP_NORM = Op(
    "group_norm",
    ("x", "weight", "bias"),
    _group_norm,
    infer_affine,
    decompose=_decompose,
    overrides={"numpy": first(ops.group_norm, _group_norm), "cupy": kernels.group_norm},
    params=_PARAMS,
    wide_sums=True,
)
GROUP_NORM_BACKWARD = Op(
    "group_norm_backward",
    ("g", "x", "weight"),
    _group_norm_backward,
    infer_affine_backward,
    nout=3,
    decompose=_decompose_backward,
    overrides={"numpy": first(ops.group_norm_backward, _group_norm_backward), "cupy": kernels.group_norm_backward},
    params=_PARAMS,
)


# ----- public functions -----------------------------------------------------------------------------------------------


@composite("group_norm")
def group_norm(
    x: Any, num_groups: int, /, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, channel_axis: int = 1
) -> Array:
    """Mean 0 and variance 1 over each group of neighbouring channels of each sample (Wu and He, 2018).

    Statistics of float16 and bfloat16 are kept in float32.

    Parameters
    ----------
    x
        Shape ``(N, channels, ...)``, or ``(N, ..., channels)`` with ``channel_axis=-1``; floating.
    num_groups
        Must divide the channels.
    weight, bias
        One number a channel; ones and zeros by default.
    eps
        Positive; added to the (biased) variance.
    channel_axis
        The dimension of the channels: 1, or the last one.

    Raises
    ------
    ShapeError
        When the groups do not divide the channels, or weight or bias have another shape.
    DTypeError
        For integers and complex numbers.

    Examples
    --------
    >>> mt.group_norm(mt.asarray([[1.0, 2.0, 4.0, 8.0]]), 2)
    Array([[-0.99998   ,  0.99998   , -0.99999875,  0.99999875]], dtype=float64)
    """
    x, axis = image("group_norm", x, channel_axis, eps)
    c = x.shape[axis]
    if num_groups < 1 or c % num_groups:
        raise ShapeError(f"[group_norm] {num_groups} groups do not divide the {c} channels of x {x.shape}")
    w = parameter("group_norm", "weight", weight, x, (x.shape[axis],), 1.0)
    b = parameter("group_norm", "bias", bias, x, (x.shape[axis],), 0.0)
    return apply(
        GROUP_NORM, (x, w, b), {"num_groups": int(num_groups), "axis": axis, "eps": as_number("group_norm", "eps", eps)}
    )


@composite("instance_norm")
def instance_norm(
    x: Any, /, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, channel_axis: int = 1
) -> Array:
    """Mean 0 and variance 1 over each channel of each sample (Ulyanov, Vedaldi and Lempitsky, 2016).

    It is :func:`group_norm` with a group for each channel.

    >>> mt.instance_norm(mt.asarray([[[1.0, 3.0]]])).shape
    (1, 1, 2)
    """
    x, axis = image("instance_norm", x, channel_axis, eps, least=3)
    c = x.shape[axis]
    w = parameter("instance_norm", "weight", weight, x, (x.shape[axis],), 1.0)
    b = parameter("instance_norm", "bias", bias, x, (x.shape[axis],), 0.0)
    if c == 0:
        return x + 0.0
    return apply(GROUP_NORM, (x, w, b), {"num_groups": c, "axis": axis, "eps": as_number("instance_norm", "eps", eps)})
