"""Norms of images: by group, by instance and by batch.

Each is written in plain functions, whose derivatives and shardings it has: statistics over a split dimension become sums over
the mesh, with the global count. Float16 and bfloat16 are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._op import composite
from .errors import DTypeError, ShapeError
from .norms import _statistics, _wide

if TYPE_CHECKING:
    from ._array import Array


def _floating(name: str, x: Any, eps: float) -> tuple[Array, np.dtype]:
    """``x`` in the dtype that statistics are kept in, and its own dtype."""
    from .creation import asarray
    from .manipulation import astype

    x = asarray(x)
    if x.dtype.kind in "biuc":
        raise DTypeError(f"[{name}] x must be real floating, got {x.dtype.name}")
    if not eps > 0:
        raise ValueError(f"[{name}] eps must be positive, got {eps}")
    return astype(x, _wide(x.dtype), copy=False), x.dtype


def _parameter(name: str, what: str, p: Any, shape: tuple[int, ...]) -> Array:
    from .creation import asarray

    p = asarray(p)
    if p.shape != shape:
        raise ShapeError(f"[{name}] {what} has shape {p.shape}, expected {shape}")
    return p


def _affine(name: str, y: Array, weight: Any, bias: Any, dtype: np.dtype) -> Array:
    """Each channel (dimension 1) scaled and shifted, rounded to the dtype of the input and of the parameters."""
    from .manipulation import astype, reshape

    spread = (-1, *[1] * (y.ndim - 2))
    for what, p in (("weight", weight), ("bias", bias)):
        if p is not None:
            p = _parameter(name, what, p, (y.shape[1],))
            dtype = np.result_type(dtype, p.dtype)
            y = y * reshape(p, spread) if what == "weight" else y + reshape(p, spread)
    return astype(y, dtype, copy=False)


def _images(name: str, x: Array) -> Array:
    if x.ndim < 2:
        raise ShapeError(f"[{name}] x has the shape (N, channels, ...), got {x.shape}")
    return x


@composite("group_norm")
def group_norm(x: Any, num_groups: int, /, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Array:
    """Mean 0 and variance 1 over each group of neighbouring channels of each sample (Wu and He, 2018).

    Parameters
    ----------
    x
        Shape ``(N, channels, ...)``.
    num_groups
        Must divide the channels.
    weight, bias
        One number a channel.
    eps
        Positive; added to the (biased) variance.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.group_norm(mt.asarray([[1.0, 2.0, 4.0, 8.0]]), 2)
    Array([[-0.99998   ,  0.99998   , -0.99999875,  0.99999875]], dtype=float64)
    """
    from .manipulation import reshape

    x, dtype = _floating("group_norm", x, eps)
    _images("group_norm", x)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ShapeError(f"[group_norm] {num_groups} groups do not divide the {x.shape[1]} channels of x {x.shape}")
    n, c, *image = x.shape
    parts = reshape(x, (n, num_groups, c // num_groups, *image))
    d, inverse = _statistics(parts, tuple(range(2, parts.ndim)), eps)
    return _affine("group_norm", reshape(d * inverse, x.shape), weight, bias, dtype)


@composite("instance_norm")
def instance_norm(x: Any, /, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Array:
    """Mean 0 and variance 1 over each channel of each sample: :func:`group_norm` with a group for each channel.

    >>> import meshtape as mt
    >>> mt.instance_norm(mt.asarray([[[1.0, 3.0]]])).shape
    (1, 1, 2)
    """
    x, dtype = _floating("instance_norm", x, eps)
    if x.ndim < 3:
        raise ShapeError(f"[instance_norm] x has the shape (N, channels, ...) with something to average, got {x.shape}")
    d, inverse = _statistics(x, tuple(range(2, x.ndim)), eps)
    return _affine("instance_norm", d * inverse, weight, bias, dtype)


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
) -> BatchNorm:
    """Mean 0 and variance 1 over each channel of the whole batch (Ioffe and Szegedy, 2015).

    Nothing is changed in place: the new running statistics are part of the result. They move by ``momentum`` towards those of
    the batch, the variance without bias (divided by one less than the count), as in PyTorch; gradients do not flow through
    them. On a split batch the statistics are those of the global batch.

    Parameters
    ----------
    x
        Shape ``(N, channels, ...)``.
    running_mean, running_var
        One number a channel.
    weight, bias
        One number a channel.
    training
        Normalise by the statistics of the batch; else by the running ones, which then stay as they are.
    momentum
        Share of the batch in the new running statistics.
    eps
        Positive; added to the (biased) variance.

    Examples
    --------
    >>> import meshtape as mt
    >>> out, mean, var = mt.batch_norm(mt.asarray([[1.0], [3.0]]), mt.zeros(1), mt.ones(1), training=True, momentum=1.0)
    >>> mean.tolist(), var.tolist()
    ([2.0], [2.0])
    """
    from .elementwise import sqrt, square, stop_gradient
    from .manipulation import astype, reshape
    from .reductions import mean

    x, dtype = _floating("batch_norm", x, eps)
    _images("batch_norm", x)
    old_mean = _parameter("batch_norm", "running_mean", running_mean, (x.shape[1],))
    old_var = _parameter("batch_norm", "running_var", running_var, (x.shape[1],))
    spread = (1, -1, *[1] * (x.ndim - 2))
    axes = (0, *range(2, x.ndim))
    count = math.prod(x.shape[a] for a in axes)
    if not training:
        y = (x - reshape(old_mean, spread)) / sqrt(reshape(old_var, spread) + eps)
        return BatchNorm(_affine("batch_norm", y, weight, bias, dtype), old_mean, old_var)
    if count == 0:  # nothing was seen, nothing is learnt
        return BatchNorm(_affine("batch_norm", x, weight, bias, dtype), old_mean, old_var)
    center = mean(x, axis=axes, keepdims=True)
    d = x - center
    var = mean(square(d), axis=axes, keepdims=True)
    y = d / sqrt(var + eps)
    unbiased = var * (count / (count - 1)) if count > 1 else var

    def moved(old: Array, new: Array) -> Array:
        new = reshape(stop_gradient(new), (x.shape[1],))
        return astype(stop_gradient(old) * (1 - momentum) + new * momentum, old.dtype, copy=False)

    return BatchNorm(_affine("batch_norm", y, weight, bias, dtype), moved(old_mean, center), moved(old_var, unbiased))
