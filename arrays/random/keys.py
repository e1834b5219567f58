"""Keys: where all randomness starts, and how one becomes several."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.array import Array
from ..core.devices import Device
from ..core.dispatch import apply
from ..core.errors import ArgumentError, DTypeError, ShapeError
from ..core.op import Op, ShapeDtype, device_beside
from ..kernels import philox as kernels
from ..ops.creation import placed
from ..ops.manipulation import permute_dims
from ..ops.param_kinds import COUNT
from . import bit_transforms as recipes
from .draw import RANDOM_BITS, as_key, check_key, drawn, op_of, whole
from .philox import philox4x64, words

# The counter's last word keeps draws (0) apart from the words that new keys are made of.
_SPLITS, _FOLDS, _NAMES = 1, 2, 3


def key_beside(key: Any, *arrays: Any) -> Any:
    """A random key in host memory, on the GPU of the arrays that it draws for. It is 16 bytes, and its bits are the
    same anywhere."""
    if type(key) is Array and type(key._buf) is np.ndarray and (where := device_beside(arrays, None)) is not None:
        return key.to_device(where)
    return key


def _fold_impl(xp: Any, key: Any, data: Any, stream: int) -> Any:
    if key.ndim == 3 or getattr(data, "ndim", 0):  # a key for each row, or for each number
        count = xp.asarray(data).astype(np.uint64).reshape(-1)
        zero = xp.zeros((1,), np.uint64)
        found = philox4x64(
            xp, (count, zero, zero, zero + np.uint64(stream)), (key[..., 0].reshape(-1), key[..., 1].reshape(-1))
        )
        return xp.stack(found[:2], axis=1)[:, None]
    return words(xp, key, 4 * (int(data) % 2**64), 2, stream)


def _infer_fold(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    key, data = args
    check_key("fold_in", key)
    try:
        rows = np.broadcast_shapes(key.shape[:-2], getattr(data, "shape", ()))
    except ValueError:
        raise ShapeError(f"[fold_in] {data.shape[0]} numbers do not fit {key.shape[0]} keys") from None
    return ShapeDtype((*rows, 1, 2) if rows else (2,), recipes.U64)


SPLIT = op_of("split", lambda: recipes.bits(recipes.U64), takes_dtype=False, stream=_SPLITS)
FOLD_IN = Op(
    "random_fold_in",
    ("key", "data"),
    _fold_impl,
    _infer_fold,
    nondifferentiable=RANDOM_BITS,
    overrides={"cupy": kernels.fold},
    params={"stream": COUNT},
)


def key(seed: int, *, device: Device | str | None = None) -> Array:
    """A key made of a number.

    Parameters
    ----------
    seed
        ``0 <= seed < 2**128``. Different seeds are different keys.
    device
        Where the key lives, and with it everything that is drawn from it; the default device if None.

    Returns
    -------
    Array
        uint64 of shape ``(2,)``: an ordinary array, to be passed to compiled functions, saved and sharded like any
        other.

    Examples
    --------
    >>> mt.random.key(7)
    Array([7, 0], dtype=uint64)
    """
    number = whole("key", "a seed is an integer", seed)
    if not 0 <= number < 2**128:
        raise ArgumentError(f"[key] a seed is between 0 and 2**128 - 1, got {number}")
    return placed(np.array([number % 2**64, number >> 64], np.uint64), device)


def split(key: Any, num: int = 2) -> Array:
    """``num`` new keys, independent of each other and of everything drawn from ``key``: uint64 of shape ``(num, 2)``.

    >>> a, b = mt.random.split(mt.random.key(0))
    >>> mt.random.split(mt.random.key(0), 3).shape
    (3, 2)
    """
    count = whole("split", "the number of keys is an integer", num)
    if count < 0:
        raise ArgumentError(f"[split] the number of keys must not be negative, got {count}")
    if getattr(key, "ndim", 1) == 3:  # the keys of n samples: num times as many
        return permute_dims(drawn(SPLIT, key, (len(key), 1, count, 2), recipes.U64), (2, 0, 1, 3))
    return drawn(SPLIT, key, (count, 2), recipes.U64)


def fold_in(key: Any, data: Any) -> Array:
    """The key for ``data`` under ``key``: a step, a layer's number or a name.

    Parameters
    ----------
    key
        A key.
    data
        An integer ``0 <= data < 2**64``, a 0-d integer array (a step counter inside a compiled function), or a string
        (a named stream: by the first 8 bytes of its BLAKE2b hash). Integers and names never meet. A vector of n
        integers gives n keys, of shape ``(n, 1, 2)``: the keys of n samples. Of such, each row is folded.

    Examples
    --------
    >>> key = mt.random.key(0)
    >>> bool(mt.all(mt.random.fold_in(key, 3) == mt.random.fold_in(key, mt.asarray(3))))
    True
    >>> dropout = mt.random.fold_in(key, "dropout")
    """
    k = as_key("fold_in", key)
    stream = _FOLDS
    if isinstance(data, str):
        data, stream = int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "little"), _NAMES
    elif isinstance(data, Array):
        if data.ndim > 1 or data.dtype.kind not in "iu":
            raise DTypeError(
                f"[fold_in] data must be a 0-d integer array or a vector of integers, got {data.dtype.name} of shape "
                f"{data.shape}"
            )
    else:
        data = int(whole("fold_in", "data must be an integer or a string", data))
        if not 0 <= data < 2**64:
            raise ArgumentError(f"[fold_in] data must be between 0 and 2**64 - 1, got {data}")
    return apply(FOLD_IN, (k, data), {"stream": stream})
