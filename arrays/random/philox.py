"""Philox4x64-10 (Salmon, Moraes, Dror and Shaw, 2011), and how its words become the elements of a block.

A draw is a function of a key and of the place of an element in the *global* array, and of nothing else. The words of a
key are numbered 0, 1, 2, …: word ``n`` is lane ``n % 4`` of the cipher applied to the counter ``(n // 4, 0, 0,
stream)``. A :class:`BitTransform` turns each aligned group of ``words`` words into a group of ``elements`` elements, so
that element ``i`` of the C-ordered global array needs the words of group ``i // elements`` alone. :func:`draw` makes
any rectangular block by that rule; whoever holds another block, on whatever backend, makes the very numbers that the
whole array has there.

On a CPU the words come from NumPy's C generator, on a GPU from a kernel, and wherever single groups are wanted from
:func:`philox4x64`, the same function written for any array namespace.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..kernels import philox as kernels

Ints = tuple[int, ...]
U64 = np.uint64
_LOW32 = U64(0xFFFFFFFF)
_32 = U64(32)

# Multipliers and key increments of the paper's Philox4x64.
_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_MASK64 = (1 << 64) - 1
_MASK256 = (1 << 256) - 1

# Words made at a time: with the scratch of a transform a chunk stays in a second-level cache; kernels on a GPU want
# more.
_CHUNK = 1 << 14
_GPU_CHUNK = 1 << 22

# A run of at least this many elements is worth the fixed costs (some 15 microseconds) of a pass of its own.
_LONG_RUN = 128
# Shorter ones: making what lies between them too is cheaper than the array generator while it is at most so many times
# as much.
_COVER = 8


class BitTransform(NamedTuple):
    """How words become elements.

    ``transform(xp, w)`` is given a fresh, contiguous uint64 array of shape ``(n, words)``, which it may overwrite, and
    returns ``(n, elements)``. Row ``r`` of the result depends on row ``r`` of ``w`` alone, by the same arithmetic
    wherever the row stands. ``words`` divides 4. Where a kernel makes the same elements on a GPU, ``kernel`` is its
    kind and its numbers.
    """

    words: int
    elements: int
    transform: Callable[[Any, Any], Any]
    kernel: tuple[str, tuple[tuple[str, float], ...]] | None = None


# ----- the cipher on arrays -------------------------------------------------------------------------------------------


def _mulhilo(xp: Any, a: Any, m: int) -> tuple[Any, Any]:
    """High and low half of the 128-bit products ``a * m``: no array namespace has 128-bit integers."""
    m0, m1 = U64(m & 0xFFFFFFFF), U64(m >> 32)
    a0, a1 = a & _LOW32, a >> _32
    mid = a1 * m0 + ((a0 * m0) >> _32)
    low_mid = (mid & _LOW32) + a0 * m1
    return a1 * m1 + (mid >> _32) + (low_mid >> _32), a * U64(m)


def philox4x64(xp: Any, counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """The four output words for arrays of counters and keys (all uint64; they broadcast together, at least
    one-dimensional)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for r in range(_ROUNDS):
        if r:
            k0, k1 = k0 + U64(_W0), k1 + U64(_W1)
        hi0, lo0 = _mulhilo(xp, c0, _M0)
        hi1, lo1 = _mulhilo(xp, c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
    return c0, c1, c2, c3


def _lanes(xp: Any, key: Any, blocks: Any, stream: int) -> tuple[Any, Any, Any, Any]:
    zero = xp.zeros((1,), U64)
    return philox4x64(xp, (blocks, zero, zero, zero + U64(stream)), (key[0:1], key[1:2]))


# ----- words ----------------------------------------------------------------------------------------------------------


class _Generators(threading.local):
    """One C generator a thread. Setting its state costs a microsecond, making a new one six."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(0)
        self.state = self.bits.state


_generators = _Generators()


def _seek(key: tuple[int, int], block: int, stream: int) -> np.random.Philox:
    """This thread's C generator, about to give the first word of ``block``."""
    # NumPy's generator increments the 256-bit counter before it enciphers.
    counter = (block + (stream << 192) - 1) & _MASK256
    inner = _generators.state["state"]
    inner["counter"][:] = [(counter >> s) & _MASK64 for s in (0, 64, 128, 192)]
    inner["key"][:] = key
    _generators.state["buffer_pos"] = 4
    _generators.bits.state = _generators.state
    return _generators.bits


def words(xp: Any, key: Any, start: int, count: int, stream: int = 0) -> Any:
    """Words ``start … start + count - 1`` of a key, as a uint64 array of this backend."""
    block, skip = divmod(start, 4)
    if xp is np:
        bits = _seek((int(key[0]), int(key[1])), block, stream)
        return bits.random_raw(skip + count)[skip:]
    if xp.__name__ == "cupy":
        return kernels.words(key, start, count, stream)
    blocks = xp.arange(block, -(-(start + count) // 4)).astype(U64)
    return xp.stack(_lanes(xp, key, blocks, stream), axis=1).reshape(-1)[skip : skip + count]


def words_of_groups(xp: Any, key: Any, groups: Any, size: int, stream: int = 0) -> Any:
    """Words ``g * size … g * size + size - 1`` for each ``g`` of an integer array: shape ``(len(groups), size)``."""
    per_block = 4 // size
    lanes = xp.stack(_lanes(xp, key, (groups // per_block).astype(U64), stream), axis=1)
    table = lanes.reshape(-1, size)
    return table[xp.arange(groups.shape[0]) * per_block + groups % per_block]


# ----- blocks ---------------------------------------------------------------------------------------------------------


def _fill_run(xp: Any, key: Any, recipe: BitTransform, start: int, out: Any, stream: int) -> None:
    """Elements ``start … start + len(out) - 1`` into ``out`` (flat)."""
    if recipe.kernel is not None and xp.__name__ == "cupy":
        kind, numbers = recipe.kernel
        kernels.fill(key, kind, dict(numbers), out, start, stream)
        return
    w, e = recipe.words, recipe.elements
    step = (_CHUNK if xp is np else _GPU_CHUNK) // w
    stop = start + out.shape[0]
    group, last = start // e, -(-stop // e)
    while group < last:
        n = min(step, last - group)
        values = recipe.transform(xp, words(xp, key, group * w, n * w, stream).reshape(n, w)).reshape(-1)
        first = group * e
        lo, hi = max(start, first), min(stop, first + n * e)
        out[lo - start : hi - start] = values[lo - first : hi - first]
        group += n


def _scattered(xp: Any, key: Any, recipe: BitTransform, places: Any, stream: int) -> Any:
    """The elements at arbitrary ``places`` (flat, int64)."""
    e = recipe.elements
    values = recipe.transform(xp, words_of_groups(xp, key, places // e, recipe.words, stream))
    if e == 1:
        return values.reshape(-1)
    return values.reshape(-1)[xp.arange(places.shape[0]) * e + places % e]


def draw(
    xp: Any,
    key: Any,
    recipe: BitTransform,
    dtype: np.dtype,
    shape: Ints,
    offset: Ints,
    global_shape: Ints,
    stream: int = 0,
) -> Any:
    """The block of ``shape`` that starts at ``offset`` of the global array.

    Memory beyond the result is bounded by a chunk, whatever the shapes are. Keys of shape ``(n, 1, 2)`` are those of
    the rows of the global array, each of which is an array of its own.
    """
    if key.ndim == 3:
        rows = xp.empty(shape, dtype)
        for i in range(shape[0]):
            rows[i] = draw(xp, key[offset[0] + i, 0], recipe, dtype, shape[1:], offset[1:], global_shape[1:], stream)
        return rows
    size = math.prod(shape)
    out = xp.empty(size, dtype)
    if size == 0:
        return out.reshape(shape)
    # Trailing dimensions that are whole, and the one before them, make one contiguous run.
    strides = [math.prod(global_shape[i + 1 :]) for i in range(len(shape))]
    split = len(shape)
    while split and shape[split - 1 :] == global_shape[split - 1 :]:
        split -= 1
    split = max(split - 1, 0)
    lead, run = shape[:split], math.prod(shape[split:])
    origin = sum(o * s for o, s in zip(offset, strides, strict=True))
    count = math.prod(lead)

    def starts(rows: np.ndarray) -> np.ndarray:
        """Place of the first element of some runs."""
        where = np.unravel_index(rows, lead) if lead else ()
        return sum((w.astype(np.int64) * s for w, s in zip(where, strides, strict=False)), np.full(rows.shape, origin))

    if count == 1:
        _fill_run(xp, key, recipe, origin, out, stream)
        return out.reshape(shape)
    if xp is np and run >= _LONG_RUN:
        for i, start in enumerate(starts(np.arange(count)).tolist()):
            _fill_run(xp, key, recipe, start, out[i * run : (i + 1) * run], stream)
        return out.reshape(shape)
    step = max(1, (_CHUNK if xp is np else _GPU_CHUNK) // run)
    for row in range(0, count, step):
        at = starts(np.arange(row, min(row + step, count)))
        part = out[row * run : (row + len(at)) * run]
        first, span = int(at[0]), int(at[-1]) + run - int(at[0])
        places = (xp.asarray(at)[:, None] + xp.arange(run)).reshape(-1)
        if span <= _COVER * part.shape[0]:
            cover = xp.empty(span, dtype)
            _fill_run(xp, key, recipe, first, cover, stream)
            part[:] = cover[places - first]
        else:
            part[:] = _scattered(xp, key, recipe, places, stream)
    return out.reshape(shape)
