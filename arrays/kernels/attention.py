"""Attention of floats of two bytes on CUDA's tensor cores, without the matrix of the weights.

Calls that :mod:`.cudnn.attention` serves are cuDNN's. These functions return NotImplemented for those that the kernels
do not serve: other dtypes, heads of more than 256 elements, queries that broadcast, several masks, a device before
compute capability 8.0 or with little shared memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..core.op import for_floats
from .cudnn import attention as cudnn_attention
from .geometry import MAX_GRID, ceil_div
from .launch import NOTHING, contiguous, i64, named, runner

FILE = "attention.cu"
THREADS = 128
"""Of a block, but for the cotangents of keys."""
WIDTHS = (32, 64, 128, 256)
STEP, SHORT = 64, 32
"""Queries that a block of keys takes at once: as the device has shared memory."""
MORE = 32
"""Bytes of shared memory that a kernel declares itself, at most."""
DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    for d in DTYPES:
        for width in WIDTHS:
            for kernel in ("forward", "backward_queries"):
                yield FILE, named(f"attention_{kernel}", d, width)
            for step in (STEP, SHORT) if width >= 128 else (STEP,):
                yield FILE, named("attention_backward_keys", d, width, step)
        yield FILE, named("attention_poison", d)


def _repeated(lead: Sequence[int], whole: Sequence[int]) -> tuple[int, int] | None:
    """How an operand with these leading dimensions serves all batches: each of its own serves so many neighbours, and
    after so many it begins again. None where it is not so regular.

    >>> _repeated((2, 4, 1), (2, 4, 3)), _repeated((1, 4, 1), (2, 4, 3)), _repeated((), (2, 3))
    ((3, 8), (3, 4), (6, 1))
    >>> _repeated((2, 1, 3), (2, 4, 3)) is None
    True
    """
    lead = (1,) * (len(whole) - len(lead)) + tuple(lead)
    full = [i for i, n in enumerate(lead) if n > 1]
    if not full:
        return math.prod(whole), 1
    run = slice(full[0], full[-1] + 1)
    return (math.prod(whole[run.stop :]), math.prod(lead[run])) if lead[run] == tuple(whole[run]) else None


def _halves(width: int) -> int:
    """Times 16 rows that a warp has: sums of more would take more registers than there are."""
    return 2 if width <= 128 else 1


class _Call(NamedTuple):
    """A call as the kernels take it."""

    q: Any
    k: Any
    v: Any
    lead: tuple[int, ...]
    width: int  # of the tiles
    numbers: list[Any]
    masked: bool  # some tiles may be left out
    keys: int  # batches of keys and values

    def start(self, kernel: str, arguments: Sequence[Any], length: int, batches: int, step: int | None = None) -> None:
        """Start a kernel for blocks of rows out of ``length``."""
        rows, threads = (step, 4 * step) if step else (THREADS // 2, THREADS)
        name = named(f"attention_{kernel}", self.q.dtype, self.width, *(() if step is None else (step,)))
        grid, shared = (batches * ceil_div(length, rows * _halves(self.width)), 1, 1), _shared(self.width, step)
        runner().launch(FILE, name, grid, (threads, 1, 1), [*arguments, *self.numbers], shared)

    def poison(self, *operands: Any) -> list[Any]:
        """Of each of up to three operands zeros for each batch and column, NaN for those with an element that is not
        finite; and nothing where no tile is left out."""
        if not self.masked:
            return [NOTHING] * len(operands)
        r = runner()
        shapes = tuple([(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in operands])
        ends, numbers, grid = _poison_geometry(shapes, r.properties().multiprocessors)
        zeros = r.xp.zeros(ends[-1], np.float32)
        outs = [zeros[a:b] for a, b in itertools.pairwise(ends)]
        each = [(x, out, *n) for x, out, n in zip(operands, outs, numbers, strict=True)]
        arguments = [a for k in range(3) for a in each[min(k, len(each) - 1)]]
        r.launch(FILE, named("attention_poison", self.q.dtype), grid, (THREADS, 1, 1), arguments)
        return outs


@functools.lru_cache(maxsize=256)
def _poison_geometry(shapes: Sequence[tuple[int, int, int]], multiprocessors: int) -> tuple[Any, Any, Any]:
    """Where the zeros of each stack of matrices begin, the numbers that the kernel takes of each, and its grid."""
    numbers = []
    for batches, rows, width in shapes:
        most = ceil_div(4 * multiprocessors, batches)
        numbers.append((batches, rows, width, max(1, min(ceil_div(rows * width // 8, 4 * THREADS), most))))
    ends = [0, *itertools.accumulate(batches * width for batches, _, width in shapes)]
    grid = max(batches * parts for batches, *_, parts in numbers), len(shapes), 1
    return ends, [tuple(map(np.int32, n)) for n in numbers], grid


def _shared(width: int, step: int | None = None) -> int:
    """Bytes of shared memory that a block takes at most, for the cotangents of keys with ``step`` queries at once.

    >>> _shared(64), _shared(128), _shared(128, STEP), _shared(128, SHORT), _shared(256), _shared(256, SHORT)
    (65536, 98304, 165376, 74496, 98304, 103168)
    """
    n = _halves(width)
    if step is None:
        return (4 if width < 128 else 3) * n * THREADS * width
    return step * ((4 * n + 8) * width + 4 * n * step + 24)


def _padded(x: Any) -> Any:
    """Rows of a length that 8 divides, which begin where the device loads 16 bytes."""
    r, n = runner(), x.shape[-1]
    if n % 8:
        out = r.xp.zeros((*x.shape[:-1], ceil_div(n, 8) * 8), x.dtype)
        out[..., :n] = x
        return out
    x = contiguous(x)
    return r.xp.array(x) if r.address(x) % 16 else x


@functools.lru_cache(maxsize=256)
def _form(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: Any, scale: float, diagonal: Any, device: Any
) -> tuple[Any, ...] | None:
    """Of arrays of these shapes the leading dimensions, the width of tiles, numbers before a mask and behind it,
    whether tiles may be left out, and batches of keys. None where the kernels do not serve them."""
    (rows, d), (keys, e) = q[-2:], v[-2:]
    lead = np.broadcast_shapes(*(shape[:-2] for shape in (q, k, v, mask or ())))
    batches, diagonal = math.prod(lead), keys if diagonal is None else max(-rows, min(diagonal, keys))
    if q[:-2] != lead or not 0 < max(d, e) <= WIDTHS[-1] or not min(batches, rows, keys, d, e) or rows + keys >= 2**30:
        return None
    kv, of_values, seen = (_repeated(shape[:-2], lead) for shape in (k, v, mask or ()))
    width = next(n for n in WIDTHS if n >= max(d, e))
    if kv is None or kv != of_values or seen is None or batches * ceil_div(max(rows, keys), SHORT) > MAX_GRID:
        return None
    if device.capability < 80 or device.shared_memory < max(_shared(width), _shared(width, SHORT)) + MORE:
        return None
    sizes = rows, keys, ceil_div(d, 8) * 8, ceil_div(e, 8) * 8
    numbers = (*map(np.int32, sizes), np.float32(scale), np.int32(diagonal), *map(i64, kv))
    masks = (*map(i64, (1, 1, 0)), *map(np.int32, (0, 0)))
    if mask is not None:
        row, column = (1, 1, *mask)[-2:]
        masks = (*map(i64, (*seen, row * column)), *map(np.int32, (column if row > 1 else 0, column > 1)))
    return lead, width, numbers, masks, diagonal < keys, kv[1]


def _prepared(q: Any, k: Any, v: Any, mask: Sequence[Any], scale: float, diagonal: int | None) -> _Call | None:
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype or len(mask) > 1:
        return None
    shape = mask[0].shape if mask else None
    form = _form(q.shape, k.shape, v.shape, shape, scale, diagonal, runner().properties())
    if form is None:
        return None
    lead, width, numbers, masks, masked, keys = form
    given: Any = NOTHING, np.int32(0)
    if mask:
        added = mask[0].dtype.kind != "b"
        given = contiguous(mask[0], np.dtype(np.float32) if added else None), np.int32(1 + added)
    return _Call(*map(_padded, (q, k, v)), lead, width, [*numbers, *given, *masks], masked, keys)


@for_floats
def attention(q: Any, k: Any, v: Any, *mask: Any, scale: float, diagonal: int | None) -> Any:
    """See :data:`meshtape.arrays.nn.attention.ATTENTION`."""
    found = None if mask else cudnn_attention.attention(runner().xp, q, k, v, scale, diagonal)
    if found is not None:
        return found
    call = _prepared(q, k, v, mask, scale, diagonal)
    if call is None:
        return NotImplemented
    rows, e = q.shape[-2], v.shape[-1]
    out = runner().xp.empty((*call.lead, rows, call.v.shape[-1]), q.dtype)
    of_rows = [runner().xp.empty((*call.lead, rows), np.float32) for _ in range(2)]
    call.start("forward", [call.q, call.k, call.v, out, *of_rows, *call.poison(call.v)], rows, math.prod(call.lead))
    return out[..., :e], *of_rows


@for_floats
def attention_backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, shift: Any, total: Any, *mask: Any, scale: float, diagonal: int | None
) -> Any:
    """See :data:`meshtape.arrays.nn.attention.ATTENTION_BACKWARD`."""
    given = g, q, k, v, out, shift, total
    found = None if mask else cudnn_attention.attention_backward(runner().xp, *given, scale, diagonal)
    if found is not None:
        return found
    call = _prepared(q, k, v, mask, scale, diagonal) if g.dtype == out.dtype == q.dtype else None
    if call is None:
        return NotImplemented
    xp, rows, keys, batches = runner().xp, q.shape[-2], k.shape[-2], math.prod(call.lead)
    operands = call.q, call.k, call.v, _padded(g)
    q_poison, k_poison, g_poison = call.poison(*operands[:2], operands[3])
    dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in operands[:3])
    of_rows = [contiguous(a, np.float32) for a in (shift, total)]
    of_rows.append(xp.empty((batches, rows), np.float32))  # the means of slopes
    call.start("backward_queries", [*operands, _padded(out), dq, *of_rows, k_poison], rows, batches)
    arguments = [*operands, dk, dv, *of_rows, q_poison, g_poison, i64(batches)]
    step = STEP if runner().properties().shared_memory >= _shared(call.width, STEP) + MORE else SHORT
    call.start("backward_keys", arguments, keys, call.keys, step)
    return tuple(x[..., : like.shape[-1]] for x, like in zip((dq, dk, dv), (q, k, v), strict=True))
