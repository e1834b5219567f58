"""Dropout as an op: its mask is made where it is used, from the key and the place in the global array.

It is linear in what it drops from, and its derivative is itself with the same key: no mask is kept for the backward
pass, and every order is right. On a GPU the mask never reaches memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backends.row_blocks import wide as _wide
from ..core.array import Array
from ..core.dispatch import apply, as_number
from ..core.dtypes import KERNEL_FLOATS, result_type
from ..core.errors import ArgumentError, DTypeError
from ..core.op import Op, composite
from ..core.shape_rules import same
from ..kernels import philox as kernels
from ..kernels.launch import contiguous, runner
from ..ops.creation import asarray, wrap_same
from ..ops.manipulation import astype, reshape
from ..ops.param_kinds import BLOCK, FRACTION
from ..random import bit_transforms as recipes
from ..random.draw import as_key, by_sample
from ..random.keys import key_beside
from ..random.philox import draw


def _threshold(rate: float) -> int:
    """Words below it are kept: the same as those of ``mt.random.bernoulli(key, 1 - rate)``."""
    return round((1.0 - rate) * 2**32)


def _kept(xp: Any, x: Any, key: Any, rate: float, offset: tuple[int, ...], global_shape: tuple[int, ...]) -> Any:
    """``x`` with elements dropped and the others scaled, in the wide dtype."""
    wide = _wide(x.dtype)
    if rate == 1:
        return xp.zeros(x.shape, wide)
    mask = draw(xp, key, recipes.bernoulli(_threshold(rate)), recipes.BOOL, x.shape, offset, global_shape)
    with np.errstate(all="ignore"):
        return xp.where(mask, x.astype(wide, copy=False) / wide.type(1.0 - rate), wide.type(0))


def _dropout(xp: Any, x: Any, key: Any, **params: Any) -> Any:
    return _kept(xp, x, key, **params).astype(x.dtype, copy=False)


def _dropout_add(xp: Any, x: Any, y: Any, key: Any, **params: Any) -> Any:
    return (_kept(xp, x, key, **params) + y).astype(x.dtype, copy=False)


def _start(shape: tuple[int, ...], offset: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """The flat offset of the block in the global array; None where it is not contiguous there."""
    cut = [i for i, (n, m) in enumerate(zip(shape, whole, strict=True)) if n != m]
    if cut and any(n != 1 for n in shape[: cut[-1]]):
        return None
    strides = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    return sum(o * s for o, s in zip(offset, strides, strict=True))


def _on_cuda(x: Any, y: Any, key: Any, rate: float, offset: tuple[int, ...], global_shape: tuple[int, ...]) -> Any:
    xp = runner().xp
    if key.ndim == 3:
        rows = xp.empty(x.shape, x.dtype)
        for i in range(len(x)):
            one = key[offset[0] + i, 0]
            rows[i] = _on_cuda(x[i], None if y is None else y[i], one, rate, offset[1:], global_shape[1:])
        return rows
    start = _start(x.shape, offset, global_shape)
    if start is None or x.dtype not in KERNEL_FLOATS or rate == 1:
        params = {"rate": rate, "offset": offset, "global_shape": global_shape}
        return _dropout(xp, x, key, **params) if y is None else _dropout_add(xp, x, y, key, **params)
    out = xp.empty(x.shape, x.dtype)
    flat = [None if a is None else contiguous(a).reshape(-1) for a in (x, y)]
    kernels.dropout_run(key, *flat, out.reshape(-1), start, 0, _threshold(rate), 1.0 - rate)
    return out


# params: rate, and where the block x starts (offset) in the array that the mask belongs to (global_shape).
DROPOUT = Op(
    "dropout",
    ("x", "key"),
    _dropout,
    same,
    overrides={"cupy": lambda x, key, **params: _on_cuda(x, None, key, **params)},
    params={"rate": FRACTION, **BLOCK},
)
DROPOUT_ADD = Op(
    "dropout_add",
    ("x", "y", "key"),
    _dropout_add,
    same,
    overrides={"cupy": _on_cuda},
    params={"rate": FRACTION, **BLOCK},
)


def _prepared(name: str, x: Array, rate: float, key: Any) -> tuple[Array, dict[str, Any]]:
    """The key as an array, checked, and the params of the op, which is laid over ``x`` in their ``global_shape``."""
    if key is None:
        raise ArgumentError(f"[{name}] needs a key: key=mt.random.key(seed), another one for each call")
    if x.dtype.kind in "biu":
        raise DTypeError(f"[{name}] x must be floating, got {x.dtype.name}")
    key, shape = by_sample(as_key(name, key_beside(key, x)), x.shape)
    return key, {"rate": as_number(name, "rate", rate), "offset": (0,) * len(shape), "global_shape": shape}


def _over(op: Op, arrays: tuple[Array, ...], key: Array, params: dict[str, Any]) -> Array:
    """The op in the shape that its key asks for."""
    shape, wanted = arrays[0].shape, params["global_shape"]
    if shape == wanted:
        return apply(op, (*arrays, key), params)
    return reshape(apply(op, (*(reshape(x, wanted) for x in arrays), key), params), shape)


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ArgumentError(f"[{name}] rate must be between 0 and 1, got {rate}")


@composite("dropout")
def dropout(x: Any, rate: float, /, *, key: Any = None, training: bool = True) -> Array:
    """Each element set to 0 with probability ``rate``, the others divided by ``1 - rate`` (Srivastava et al., 2014).

    The mask is a function of the key and of the place in the global array: it is the same however ``x`` is split, and
    in a second forward pass with the same key. Keys of samples, of shape ``(n, 1, 2)``, give each of the ``n`` parts of
    the first dimension a mask of its own, which is then the same however a batch is cut. With ``training=False``, or a
    rate of 0, it is ``x``, and takes no key.

    >>> mt.nn.dropout(mt.ones(4), 1.0, key=mt.random.key(0))
    Array([0., 0., 0., 0.], dtype=float64)
    """
    x = asarray(x)
    _check_rate("dropout", rate)
    if not training or rate == 0:
        return wrap_same(x)
    key, params = _prepared("dropout", x, rate, key)
    return _over(DROPOUT, (x,), key, params)


@composite("dropout_add")
def dropout_add(x: Any, y: Any, rate: float, /, *, key: Any = None, training: bool = True) -> Array:
    """``dropout(x) + y``, with one rounding: the sum of float16 and bfloat16 is made in float32.

    ``x`` and ``y`` broadcast; the mask has the shape of ``x``.

    >>> mt.nn.dropout_add(mt.ones(2), mt.asarray([1.0, 2.0]), 0.5, training=False)
    Array([2., 3.], dtype=float64)
    """
    x, y = asarray(x), asarray(y)
    _check_rate("dropout_add", rate)
    dtype = result_type(x.dtype, y.dtype)
    if training and rate > 0:
        key, params = _prepared("dropout_add", x, rate, key)
        if x.shape == y.shape:
            x, y = (astype(a, dtype, copy=False) for a in (x, y))
            return _over(DROPOUT_ADD, (x, y), key, params)
    if dtype.itemsize <= 2 and dtype.kind not in "biu":
        x, y = astype(x, np.float32), astype(y, np.float32)
    return astype(dropout(x, rate, key=key, training=training) + y, dtype, copy=False)
