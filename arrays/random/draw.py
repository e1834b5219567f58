"""The common part of functions that draw: checks, the op, and the block of the global array that it fills."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.array import Array
from ..core.dispatch import apply, as_number
from ..core.dtypes import as_dtype
from ..core.errors import ArgumentError, DTypeError, ShapeError, TracedValueError
from ..core.op import Op, ShapeDtype
from ..core.shape_rules import as_shape
from ..ops.creation import asarray
from ..ops.param_kinds import DRAW, Kind
from . import bit_transforms as recipes
from .philox import BitTransform, Ints, draw

RANDOM_BITS = "random bits"
"""Why no draw has a derivative."""

# ----- arguments ------------------------------------------------------------------------------------------------------


def check_key(name: str, key: Any) -> None:
    """Raise unless a key is two words; keys of samples have a dimension of one between, unlike those of ``split``."""
    shaped = isinstance(key, ShapeDtype) and (key.shape == (2,) or (len(key.shape) == 3 and key.shape[1:] == (1, 2)))
    if not shaped or key.dtype != recipes.U64:
        what = f"{key.dtype.name} of shape {key.shape}" if isinstance(key, ShapeDtype) else type(key).__name__
        raise DTypeError(
            f"[{name}] a key is uint64 of shape (2,), made by mt.random.key or split, and keys of n samples are of "
            f"shape (n, 1, 2); got {what}"
        )


def as_key(name: str, key: Any) -> Array:
    """A key as an Array. Raises :class:`DTypeError` for anything else."""
    if not isinstance(key, Array | np.ndarray):
        check_key(name, key)
    k = asarray(key)
    if k.shape != (2,) or k.dtype != recipes.U64:
        check_key(name, ShapeDtype(k.shape, k.dtype))
    return k


def by_sample(key: Array, shape: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """The key of a draw, and the shape to draw in; with keys of samples, their number is its first dimension.

    A draw whose first dimension is a multiple of the samples belongs to them, row by row. Any other one belongs to the
    batch: it takes the key of the first sample.
    """
    if key.ndim == 1:
        return key, shape
    n = key.shape[0]
    if shape and (shape[0] == n or (n and shape[0] % n == 0)):
        return key, shape if shape[0] == n else (n, shape[0] // n, *shape[1:])
    return key[0, 0], shape


def floating(name: str, dtype: Any) -> np.dtype:
    """One of the floating dtypes that there are recipes for."""
    found = as_dtype(dtype, name)
    if found not in recipes.FLOATS:
        raise DTypeError(f"[{name}] dtype must be float64, float32, float16 or bfloat16, got {found.name}")
    return found


def whole(name: str, expected: str, value: Any) -> int:
    """An integer. Raises :class:`DTypeError` that says what was expected."""
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(f"[{name}] {expected}, got {value!r}") from None


def number(name: str, what: str, value: Any, *, finite: bool = True) -> float:
    """A Python number that is not NaN."""
    if isinstance(value, str | bytes) or (getattr(value, "ndim", 0) != 0):
        raise DTypeError(f"[{name}] {what} must be a number, got {value!r}")
    try:
        found = as_number(name, what, value)
    except TracedValueError:
        raise
    except (TypeError, ValueError):
        raise DTypeError(f"[{name}] {what} must be a number, got {value!r}") from None
    if math.isnan(found) or (finite and math.isinf(found)):
        raise ArgumentError(f"[{name}] {what} must be {'finite' if finite else 'a number'}, got {found}")
    return found


def not_negative(name: str, what: str, value: Any) -> float:
    """A finite number of at least 0."""
    found = number(name, what, value)
    if found < 0:
        raise ArgumentError(f"[{name}] {what} must not be negative, got {found}")
    return found


# ----- draws ----------------------------------------------------------------------------------------------------------


def infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    """The shape rule of ops that draw."""
    name, key = op.name.removeprefix("random_"), args[0]
    check_key(name, key)
    if len(key.shape) == 3 and params["global_shape"][:1] != key.shape[:1]:
        raise ShapeError(f"[{name}] {key.shape[0]} keys of samples do not fit the shape {params['global_shape']}")
    return ShapeDtype(params["shape"], params["dtype"])


BY_PLACE: set[Op] = set()
"""Ops whose elements are functions of the key and their place alone. The others (a permutation) take one key."""


def op_of(
    name: str,
    recipe: Callable[..., BitTransform],
    *,
    takes_dtype: bool = True,
    stream: int = 0,
    flops: int = 1,
    **own: Kind,
) -> Op:
    """An op whose elements are made each on its own; ``recipe`` takes the dtype and the op's own parameters, of these
    kinds.

    All have the shape and offset of the block that is made, the global shape of the array it belongs to, and the dtype.
    """

    def impl(xp: Any, key: Any, shape: Ints, offset: Ints, global_shape: Ints, dtype: np.dtype, **own: Any) -> Any:
        how = recipe(dtype, **own) if takes_dtype else recipe(**own)
        return draw(xp, key, how, dtype, shape, offset, global_shape, stream)

    op = Op(f"random_{name}", ("key",), impl, infer, nondifferentiable=RANDOM_BITS, params={**DRAW, **own}, flops=flops)
    BY_PLACE.add(op)
    return op


def drawn(op: Op, key: Any, shape: int | Sequence[int], dtype: np.dtype, *operands: Any, **own: Any) -> Array:
    """The whole array that an op draws."""
    name = op.name.removeprefix("random_")
    full = as_shape(name, shape)
    k, rows = as_key(name, key), full
    if k.ndim == 3:
        k, rows = by_sample(k, full) if op in BY_PLACE else (k[0, 0], full)
    params = {"shape": rows, "offset": (0,) * len(rows), "global_shape": rows, "dtype": dtype, **own}
    out = apply(op, (k, *operands), params)
    return out if rows is full else out.reshape(full)


class Request(NamedTuple):
    """The checked arguments of a distribution: shape, dtype and parameters of the op."""

    shape: int | Sequence[int]
    dtype: np.dtype
    own: Mapping[str, Any]


def distribution(recipe: Callable[..., BitTransform], **facts: Any) -> Callable[[Callable[..., Request]], Any]:
    """Decorator that turns a checking function, which returns a :class:`Request`, into one that draws with a key;
    ``facts`` are those of :func:`op_of`."""

    def decorate(check: Callable[..., Request]) -> Any:
        op = op_of(check.__name__, recipe, **facts)
        check.__annotations__["return"] = "Array"  # what whoever reads the signature wants to know

        @functools.wraps(check)
        def public(key: Any, *args: Any, **kwargs: Any) -> Array:
            request = check(key, *args, **kwargs)
            return drawn(op, key, request.shape, request.dtype, **request.own)

        return public

    return decorate


def box_of(x: Any, shape: tuple[int, ...], offset: tuple[int, ...], dtype: np.dtype) -> Any:
    """The block of a whole array."""
    return x[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].astype(dtype, copy=False)
