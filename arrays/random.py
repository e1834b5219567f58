"""Random numbers that do not depend on how an array is split (``mt.random``).

A draw is a pure function of a key and of the place of an element in the global array: the same key gives the same numbers on
one device, on any mesh, and after a resume. Nothing is hidden: to draw again, make a new key.

>>> import meshtape as mt
>>> key = mt.random.key(0)
>>> mt.random.uniform(key, (2,))
Array([0.08723912, 0.85597221], dtype=float64)
>>> mt.random.uniform(key, (2,))
Array([0.08723912, 0.85597221], dtype=float64)
>>> dropout_key, noise_key = mt.random.split(key)
>>> step_key = mt.random.fold_in(key, 1000)

Use each key for one draw: two functions given one key see the same random words, so that their results are related.

Every element takes a fixed number of random bits (no rejection), which is what makes it computable alone. The recipes, and the
price of having no rejection, are stated with each function. Random words and everything made of them by integer arithmetic and
single multiplications (``bits``, ``uniform``, ``integers``, ``bernoulli``, ``permutation``) are the same to the bit on every
machine and device; what takes a logarithm or a cosine agrees to the last places of the mathematical library there.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _recipes as recipes
from ._dispatch import apply
from ._infer import as_shape
from ._op import Op, composite
from ._philox import Recipe, draw, words
from .devices import Device
from .dtypes import as_dtype
from .errors import DTypeError, ShapeError, TracedValueError
from .program import ShapeDtype

if TYPE_CHECKING:
    from ._array import Array

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "exponential",
    "fold_in",
    "gumbel",
    "integers",
    "key",
    "normal",
    "permutation",
    "split",
    "truncated_normal",
    "uniform",
]

# The counter's last word keeps draws apart from the words that new keys are made of.
_DRAWS, _SPLITS, _FOLDS, _NAMES = range(4)

# ----- ops ------------------------------------------------------------------------------------------------------------
# params: shape and offset of the block that is made, global_shape of the array it belongs to, dtype, and the op's own.


def _check_key(name: str, key: Any) -> None:
    if not isinstance(key, ShapeDtype) or key.dtype != recipes.U64 or key.shape != (2,):
        what = f"{key.dtype.name} of shape {key.shape}" if isinstance(key, ShapeDtype) else type(key).__name__
        raise DTypeError(f"[{name}] a key is uint64 of shape (2,), made by mt.random.key or split; got {what}")


def _infer(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    _check_key(op.name.removeprefix("random_"), args[0])
    return ShapeDtype(params["shape"], params["dtype"])


def _draws(name: str, recipe: Callable[..., Recipe], takes_dtype: bool = True) -> Op:
    """An op whose elements are made each on its own; ``recipe`` takes the dtype and the op's own parameters."""

    def impl(
        xp: Any,
        key: Any,
        shape: tuple[int, ...],
        offset: tuple[int, ...],
        global_shape: tuple[int, ...],
        dtype: np.dtype,
        **own: Any,
    ) -> Any:
        how = recipe(dtype, **own) if takes_dtype else recipe(**own)
        return draw(xp, key, how, dtype, shape, offset, global_shape)

    return Op(f"random_{name}", ("key",), impl, _infer, nondifferentiable="random bits")


def _box(x: Any, shape: tuple[int, ...], offset: tuple[int, ...], dtype: np.dtype) -> Any:
    return x[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].astype(dtype, copy=False)


def _split_impl(
    xp: Any,
    key: Any,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    global_shape: tuple[int, ...],
    dtype: np.dtype,
) -> Any:
    return draw(xp, key, recipes.bits(recipes.U64), dtype, shape, offset, global_shape, _SPLITS)


def _fold_impl(xp: Any, key: Any, data: Any, stream: int) -> Any:
    if xp is np:
        return words(np, key, 4 * (int(data) % 2**64), 2, stream)
    from ._philox import philox4x64

    zero = xp.zeros((1,), np.uint64)
    count = zero + (np.uint64(data % 2**64) if isinstance(data, int) else data.astype(np.uint64))
    return xp.concatenate(philox4x64(xp, (count, zero, zero, zero + np.uint64(stream)), (key[0:1], key[1:2]))[:2])


def _infer_fold(op: Op, args: tuple[Any, ...], params: Mapping[str, Any]) -> ShapeDtype:
    _check_key("fold_in", args[0])
    return ShapeDtype((2,), recipes.U64)


def _permutation_impl(
    xp: Any,
    key: Any,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    global_shape: tuple[int, ...],
    dtype: np.dtype,
) -> Any:
    # Every rank sorts all of the keys: no element is known before all are.
    order = draw(xp, key, recipes.bits(recipes.U64), recipes.U64, global_shape, (0,), global_shape)
    return _box(xp.argsort(order, kind="stable"), shape, offset, dtype)


def _choice_impl(
    xp: Any,
    key: Any,
    p: Any,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    global_shape: tuple[int, ...],
    dtype: np.dtype,
    replace: bool,
) -> Any:
    weights = p.astype(np.float64)
    if replace:
        edges = xp.cumsum(weights)
        u = draw(xp, key, recipes.uniform(recipes.F64, 0.0, 1.0), recipes.F64, shape, offset, global_shape) * edges[-1]
        found = xp.searchsorted(edges, u.reshape(-1), side="right").reshape(shape)
        # u * sum may round up to the sum: the last element that has a weight is meant.
        return xp.minimum(found, xp.searchsorted(edges, edges[-1:], side="left")[0]).astype(dtype, copy=False)
    # The largest of log p + Gumbel noise are a sample without replacement, in order (Yellott, 1977; Efraimidis, 2006).
    noise = draw(xp, key, recipes.gumbel(recipes.F64), recipes.F64, p.shape, (0,), p.shape)
    score = xp.where(weights > 0, xp.log(xp.where(weights > 0, weights, 1.0)) + noise, -np.inf)
    chosen = xp.argsort(-score, kind="stable")[: math.prod(global_shape)].reshape(global_shape)
    return _box(chosen, shape, offset, dtype)


BITS = _draws("bits", recipes.bits)
UNIFORM = _draws("uniform", recipes.uniform)
NORMAL = _draws("normal", recipes.normal)
TRUNCATED_NORMAL = _draws("truncated_normal", recipes.truncated)
INTEGERS = _draws("integers", recipes.integers)
BERNOULLI = _draws("bernoulli", recipes.bernoulli, takes_dtype=False)
EXPONENTIAL = _draws("exponential", recipes.exponential)
GUMBEL = _draws("gumbel", recipes.gumbel)
SPLIT = Op("random_split", ("key",), _split_impl, _infer, nondifferentiable="random bits")
FOLD_IN = Op("random_fold_in", ("key", "data"), _fold_impl, _infer_fold, nondifferentiable="random bits")
PERMUTATION = Op("random_permutation", ("key",), _permutation_impl, _infer, nondifferentiable="random bits")
CHOICE = Op("random_choice", ("key", "p"), _choice_impl, _infer, nondifferentiable="random bits")

# ----- arguments ------------------------------------------------------------------------------------------------------


def _key(name: str, key: Any) -> Array:
    from ._array import Array
    from .creation import asarray

    if not isinstance(key, Array | np.ndarray):
        _check_key(name, key)
    k = asarray(key)
    if k.shape != (2,) or k.dtype != recipes.U64:
        _check_key(name, ShapeDtype(k.shape, k.dtype))
    return k


def _float(name: str, dtype: Any) -> np.dtype:
    found = as_dtype(dtype, name)
    if found not in recipes.FLOATS:
        raise DTypeError(f"[{name}] dtype must be float64, float32, float16 or bfloat16, got {found.name}")
    return found


def _number(name: str, what: str, value: Any, *, finite: bool = True) -> float:
    if isinstance(value, str | bytes) or (getattr(value, "ndim", 0) != 0):
        raise DTypeError(f"[{name}] {what} must be a number, got {value!r}")
    try:
        number = float(value)
    except TracedValueError:
        raise
    except (TypeError, ValueError):
        raise DTypeError(f"[{name}] {what} must be a number, got {value!r}") from None
    if math.isnan(number) or (finite and math.isinf(number)):
        raise ValueError(f"[{name}] {what} must be {'finite' if finite else 'a number'}, got {number}")
    return number


def _positive(name: str, what: str, value: Any) -> float:
    number = _number(name, what, value)
    if number < 0:
        raise ValueError(f"[{name}] {what} must not be negative, got {number}")
    return number


def _draw(op: Op, key: Any, shape: int | Sequence[int], dtype: np.dtype, **own: Any) -> Array:
    name = op.name.removeprefix("random_")
    full = as_shape(name, shape)
    params = {"shape": full, "offset": (0,) * len(full), "global_shape": full, "dtype": dtype, **own}
    return apply(op, (_key(name, key),), params)


# ----- keys -----------------------------------------------------------------------------------------------------------


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
        uint64 of shape ``(2,)``: an ordinary array, to be passed to compiled functions, saved and sharded like any other.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.random.key(7)
    Array([7, 0], dtype=uint64)
    """
    from .creation import asarray

    try:
        number = operator.index(seed)
    except TypeError:
        raise DTypeError(f"[key] a seed is an integer, got {seed!r}") from None
    if not 0 <= number < 2**128:
        raise ValueError(f"[key] a seed is between 0 and 2**128 - 1, got {number}")
    return asarray(np.array([number % 2**64, number >> 64], np.uint64), device=device, copy=False)


def split(key: Any, num: int = 2) -> Array:
    """``num`` new keys, independent of each other and of everything drawn from ``key``: uint64 of shape ``(num, 2)``.

    >>> import meshtape as mt
    >>> a, b = mt.random.split(mt.random.key(0))
    >>> mt.random.split(mt.random.key(0), 3).shape
    (3, 2)
    """
    try:
        count = operator.index(num)
    except TypeError:
        raise DTypeError(f"[split] the number of keys is an integer, got {num!r}") from None
    if count < 0:
        raise ValueError(f"[split] the number of keys must not be negative, got {count}")
    return _draw(SPLIT, key, (count, 2), recipes.U64)


def fold_in(key: Any, data: Any) -> Array:
    """The key for ``data`` under ``key``: a step, a layer's number or a name.

    Parameters
    ----------
    key
        A key.
    data
        An integer ``0 <= data < 2**64``, a 0-d integer array (a step counter inside a compiled function), or a string
        (a named stream: by the first 8 bytes of its BLAKE2b hash). Integers and names never meet.

    Examples
    --------
    >>> import meshtape as mt
    >>> key = mt.random.key(0)
    >>> bool(mt.all(mt.random.fold_in(key, 3) == mt.random.fold_in(key, mt.asarray(3))))
    True
    >>> dropout = mt.random.fold_in(key, "dropout")
    """
    from ._array import Array

    k = _key("fold_in", key)
    stream = _FOLDS
    if isinstance(data, str):
        data, stream = int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "little"), _NAMES
    elif isinstance(data, Array):
        if data.ndim != 0 or data.dtype.kind not in "iu":
            raise DTypeError(f"[fold_in] data must be a 0-d integer array, got {data.dtype.name} of shape {data.shape}")
    else:
        try:
            data = int(operator.index(data))
        except TypeError:
            raise DTypeError(f"[fold_in] data must be an integer or a string, got {data!r}") from None
        if not 0 <= data < 2**64:
            raise ValueError(f"[fold_in] data must be between 0 and 2**64 - 1, got {data}")
    return apply(FOLD_IN, (k, data), {"stream": stream})


# ----- draws ----------------------------------------------------------------------------------------------------------


def bits(key: Any, shape: int | Sequence[int] = (), dtype: Any = np.uint64) -> Array:
    """Random bits: uint64 or uint32.

    >>> import meshtape as mt
    >>> mt.random.bits(mt.random.key(0), (2,))
    Array([ 1609277786247541068, 15789900245555285980], dtype=uint64)
    """
    wanted = as_dtype(dtype, "bits")
    if wanted not in (recipes.U64, recipes.U32):
        raise DTypeError(f"[bits] dtype must be uint64 or uint32, got {wanted.name}")
    return _draw(BITS, key, shape, wanted)


def uniform(
    key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64, low: float = 0.0, high: float = 1.0
) -> Array:
    """Uniform numbers, ``low <= x < high``.

    Multiples of ``2**-53`` (float64), ``2**-24`` (float32), ``2**-11`` (float16) or ``2**-8`` (bfloat16), which are exact in
    their dtype, scaled to the interval.

    Parameters
    ----------
    key
        A key: the same key gives the same numbers.
    shape
        Shape of the result.
    dtype
        float64, float32, float16 or bfloat16.
    low, high
        Ends of the interval.

    Examples
    --------
    >>> import meshtape as mt
    >>> x = mt.random.uniform(mt.random.key(1), (1000,), low=-1.0, high=1.0)
    >>> bool(mt.all(x >= -1) and mt.all(x < 1))
    True
    """
    wanted = _float("uniform", dtype)
    a, b = _number("uniform", "low", low), _number("uniform", "high", high)
    with np.errstate(over="ignore"):
        first, last = float(wanted.type(a)), float(wanted.type(b))
        width = b - a if wanted == recipes.F64 else float(np.float32(b - a))
    if not (-math.inf < first < last < math.inf and math.isfinite(width)):
        raise ValueError(f"[uniform] there must be {wanted.name} numbers from low up to high, got {a} and {b}")
    return _draw(UNIFORM, key, shape, wanted, low=a, high=b)


def normal(
    key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64, mean: float = 0.0, std: float = 1.0
) -> Array:
    """Normal numbers.

    By Box and Muller's transform of pairs: elements ``2j`` and ``2j + 1`` of the global array share two uniform numbers, of 53
    bits for float64 and of 32 bits otherwise. The largest magnitude is 8.57 (float64) or 6.76 standard deviations.

    >>> import meshtape as mt
    >>> x = mt.random.normal(mt.random.key(0), (10000,), mean=5.0, std=2.0)
    >>> round(float(mt.mean(x)), 1), round(float(mt.std(x)), 1)
    (5.0, 2.0)
    """
    wanted = _float("normal", dtype)
    return _draw(NORMAL, key, shape, wanted, mean=_number("normal", "mean", mean), std=_positive("normal", "std", std))


def truncated_normal(
    key: Any,
    lower: float,
    upper: float,
    shape: int | Sequence[int] = (),
    dtype: Any = np.float64,
    mean: float = 0.0,
    std: float = 1.0,
) -> Array:
    """Normal numbers given that they fall between two bounds: ``mean + std * z`` with ``lower <= z <= upper``.

    By the inverse distribution function in float64, of the tail that is exact; rounding to a shorter dtype may round onto a
    bound's neighbour.

    Raises
    ------
    ValueError
        When the interval is empty, or so far out that it has no probability in float64.

    Examples
    --------
    >>> import meshtape as mt
    >>> x = mt.random.truncated_normal(mt.random.key(0), -2.0, 2.0, (1000,))
    >>> bool(mt.all(mt.abs(x) <= 2))
    True
    """
    wanted = _float("truncated_normal", dtype)
    a = _number("truncated_normal", "lower", lower, finite=False)
    b = _number("truncated_normal", "upper", upper, finite=False)
    if not a < b:
        raise ValueError(f"[truncated_normal] lower must be below upper, got {a} and {b}")
    # Below about 1e-300 the inverse of the distribution function has no digits left.
    if (recipes.ndtr(-a) - recipes.ndtr(-b) if a > 0 else recipes.ndtr(b) - recipes.ndtr(a)) < 1e-300:
        raise ValueError(f"[truncated_normal] a normal number has no chance of lying between {a} and {b}")
    return _draw(
        TRUNCATED_NORMAL,
        key,
        shape,
        wanted,
        lower=a,
        upper=b,
        mean=_number("truncated_normal", "mean", mean),
        std=_positive("truncated_normal", "std", std),
    )


def integers(
    key: Any, shape: int | Sequence[int] = (), low: int = 0, high: int | None = None, dtype: Any = np.int64
) -> Array:
    """Integers, ``low <= x < high``, all equally likely.

    By the high half of the product of a 64-bit word and the number of values (Lemire, 2019) without its rejection: the
    probability of a value differs from ``1 / (high - low)`` by less than ``2**-64``.

    Parameters
    ----------
    key
        A key.
    shape
        Shape of the result.
    low, high
        Bounds, which may be anything that fits the dtype (``high`` may be one more). With ``high=None``, ``0 … low - 1``.
    dtype
        Any integer dtype.

    Examples
    --------
    >>> import meshtape as mt
    >>> x = mt.random.integers(mt.random.key(0), (1000,), 1, 7)
    >>> int(mt.min(x)), int(mt.max(x))
    (1, 6)
    """
    wanted = as_dtype(dtype, "integers")
    if wanted.kind not in "iu":
        raise DTypeError(f"[integers] dtype must be an integer dtype, got {wanted.name}")
    try:
        a, b = (0, operator.index(low)) if high is None else (operator.index(low), operator.index(high))
    except TypeError:
        raise DTypeError(f"[integers] low and high must be integers, got {low!r} and {high!r}") from None
    limits = np.iinfo(wanted)
    if not (limits.min <= a < b <= int(limits.max) + 1):
        raise ValueError(f"[integers] needs {limits.min} <= low < high <= {int(limits.max) + 1}, got {a} and {b}")
    return _draw(INTEGERS, key, shape, wanted, low=a, span=b - a)


@composite("bernoulli")
def bernoulli(key: Any, p: Any = 0.5, shape: int | Sequence[int] | None = None) -> Array:
    """True with probability ``p``.

    Parameters
    ----------
    key
        A key.
    p
        A number between 0 and 1, taken to the nearest multiple of ``2**-32``; or a floating array of such, which broadcasts to
        ``shape`` (numbers outside 0 … 1 mean 0 or 1 there).
    shape
        Shape of the result; that of ``p`` if None.

    Examples
    --------
    >>> import meshtape as mt
    >>> keep = mt.random.bernoulli(mt.random.key(0), 0.9, (100_000,))
    >>> round(float(mt.mean(keep)), 2)
    0.9
    """
    from ._array import Array
    from .creation import asarray
    from .manipulation import broadcast_to

    if isinstance(p, Array | np.ndarray):
        chance = asarray(p)
        full = chance.shape if shape is None else as_shape("bernoulli", shape)
        wide = recipes.F64 if _float("bernoulli", chance.dtype) == recipes.F64 else recipes.F32
        return uniform(key, full, wide) < broadcast_to(chance, full)
    number = _number("bernoulli", "p", p)
    if not 0 <= number <= 1:
        raise ValueError(f"[bernoulli] p must be between 0 and 1, got {number}")
    return _draw(BERNOULLI, key, () if shape is None else shape, recipes.BOOL, threshold=round(number * 2**32))


def exponential(key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64, scale: float = 1.0) -> Array:
    """Exponential numbers of mean ``scale``: ``-scale * log(u)``; at most 37.4 (float64) or 22.9 times ``scale``.

    >>> import meshtape as mt
    >>> bool(mt.all(mt.random.exponential(mt.random.key(0), (100,)) > 0))
    True
    """
    wanted = _float("exponential", dtype)
    return _draw(EXPONENTIAL, key, shape, wanted, scale=_positive("exponential", "scale", scale))


def gumbel(key: Any, shape: int | Sequence[int] = (), dtype: Any = np.float64) -> Array:
    """Standard Gumbel numbers, ``-log(-log(u))``: the largest of ``logits + gumbel`` is a draw from ``softmax(logits)``.

    >>> import meshtape as mt
    >>> mt.random.gumbel(mt.random.key(0), (3,)).shape
    (3,)
    """
    return _draw(GUMBEL, key, shape, _float("gumbel", dtype))


@composite("categorical")
def categorical(key: Any, logits: Any, axis: int = -1) -> Array:
    """One class for each row of unnormalised log-probabilities: the result lacks dimension ``axis``.

    By the largest of ``logits`` plus Gumbel noise; a logit of -inf is never chosen (unless all of a row are).

    >>> import meshtape as mt
    >>> logits = mt.asarray([[0.0, -mt.inf], [-mt.inf, 5.0]])
    >>> mt.random.categorical(mt.random.key(0), logits)
    Array([0, 1])
    """
    from .creation import asarray
    from .reductions import argmax

    x = asarray(logits)
    wanted = _float("categorical", x.dtype)
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"[categorical] logits of shape {x.shape} have no axis {axis}")
    if x.shape[axis] == 0:
        raise ShapeError(f"[categorical] there is no class to choose from: shape {x.shape}, axis {axis}")
    noise = gumbel(key, x.shape, recipes.F64 if wanted == recipes.F64 else recipes.F32)
    return argmax(x.astype(noise.dtype, copy=False) + noise, axis=axis)


@composite("permutation")
def permutation(key: Any, x: Any, axis: int = 0) -> Array:
    """The numbers ``0 … x - 1`` in random order, or the slices of an array along ``axis`` in random order.

    By sorting random 64-bit words; each device sorts all of them, also where the result is sharded. Orders are equally likely
    up to the chance of two equal words, ``x**2 / 2**65``.

    >>> import meshtape as mt
    >>> order = mt.random.permutation(mt.random.key(0), 5)
    >>> sorted(order.tolist())
    [0, 1, 2, 3, 4]
    >>> mt.random.permutation(mt.random.key(0), mt.ones((4, 2))).shape
    (4, 2)
    """
    from ._array import Array
    from .creation import asarray

    if isinstance(x, Array | np.ndarray) and x.ndim:
        values = asarray(x)
        if not -values.ndim <= axis < values.ndim:
            raise ShapeError(f"[permutation] an array of shape {values.shape} has no axis {axis}")
        axis %= values.ndim
        order = _draw(PERMUTATION, key, values.shape[axis], recipes.I64)
        return values[(*(slice(None),) * axis, order)]
    try:
        n = operator.index(x)
    except TypeError:
        raise DTypeError(f"[permutation] takes a number of elements or an array, got {x!r}") from None
    if n < 0:
        raise ValueError(f"[permutation] the number of elements must not be negative, got {n}")
    return _draw(PERMUTATION, key, n, recipes.I64)


@composite("choice")
def choice(
    key: Any,
    a: Any,
    shape: int | Sequence[int] = (),
    *,
    replace: bool = True,
    p: Any = None,
    axis: int = 0,
) -> Array:
    """Elements chosen at random.

    Parameters
    ----------
    key
        A key.
    a
        A number ``n``, to choose from ``0 … n - 1``, or an array, to choose slices of along ``axis``.
    shape
        Shape of the choice.
    replace
        Whether an element may be chosen again.
    p
        Weights of the elements (one-dimensional, not negative, not all 0); equal if None. They need not sum to one.

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.random.choice(mt.random.key(0), mt.asarray([10, 20, 30]), (4,), p=[0.0, 1.0, 0.0])
    Array([20, 20, 20, 20])
    """
    from ._array import Array
    from .creation import asarray

    full = as_shape("choice", shape)
    values = asarray(a) if isinstance(a, Array | np.ndarray) and a.ndim else None
    if values is not None:
        if not -values.ndim <= axis < values.ndim:
            raise ShapeError(f"[choice] an array of shape {values.shape} has no axis {axis}")
        axis %= values.ndim
        n = values.shape[axis]
    else:
        try:
            n = operator.index(a)
        except TypeError:
            raise DTypeError(f"[choice] takes a number of elements or an array, got {a!r}") from None
    count = math.prod(full)
    if n < 0 or (n == 0 and count):
        raise ValueError(f"[choice] cannot choose {count} of {n} elements")
    if not replace and count > n:
        raise ValueError(f"[choice] cannot choose {count} of {n} elements without replacement")
    if p is not None:
        where = _weights(key, p, n, count, full, replace)
    elif replace:
        where = integers(key, full, 0, max(n, 1))
    else:
        where = permutation(key, n)[:count].reshape(full)
    return where if values is None else values[(*(slice(None),) * axis, where)]


def _weights(key: Any, p: Any, n: int, count: int, full: tuple[int, ...], replace: bool) -> Array:
    from .creation import asarray

    k, weights = _key("choice", key), asarray(p)
    if weights.shape != (n,):
        raise ShapeError(f"[choice] p must have shape {(n,)}, one weight for each element, got {weights.shape}")
    host = weights._buf
    if isinstance(host, np.ndarray):  # weights that are not here yet cannot be looked at
        good = bool(np.all(host >= 0)) and bool(np.all(np.isfinite(host.astype(np.float64))))
        some = int(np.count_nonzero(host))
        if not good or (count and not some):
            raise ValueError("[choice] p must hold finite weights that are not negative and not all 0")
        if not replace and some < count:
            raise ValueError(f"[choice] cannot choose {count} without replacement: only {some} elements have a weight")
    params = {
        "shape": full,
        "offset": (0,) * len(full),
        "global_shape": full,
        "dtype": recipes.I64,
        "replace": bool(replace),
    }
    return apply(CHOICE, (k, weights), params)
