"""Networks of experts on CUDA: grouped products, with a number of launches that does not depend on that of experts.

Pairs of a row and a choice are counted and put in the order of their experts on the device, which the host does not
wait for: grids are as large as any routing may need, and blocks without a tile end at once. Floats of two bytes go to
the tensor cores from compute capability 8.0 on; all others, and the devices before, multiply number by number. Operands
of different dtypes are computed in that of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.dtypes import KERNEL_FLOATS
from ..core.op import for_floats
from .geometry import MAX_GRID, ceil_div, vector_length
from .launch import NOTHING, contiguous, i64, named, runner, wide

FILE = "grouped.cu"
THREADS, ROWS, BLOCKS = 256, 128, 256
"""Threads of a block; rows of a tile; blocks that count pairs, at most."""


def variants() -> Iterator[tuple[str, str]]:
    """File and name of every kernel that these functions may start."""
    yield FILE, "count_pairs"
    yield FILE, "place_pairs"
    for d in KERNEL_FLOATS:
        for vector in (1, 16 // d.itemsize):
            yield FILE, named("sum_pairs", d, vector)
        for tensor in (False, True) if d.itemsize == 2 else (False,):
            for backward in (False, True):
                yield FILE, named("experts_hidden", backward, tensor, d)
                yield FILE, named("experts_rows", backward, tensor, d)
            for count in (1, 2):
                yield FILE, named("experts_matrices", count, tensor, d)


class _Call:
    """A call as the kernels take it: its operands in one dtype, and the order of its pairs."""

    def __init__(self, x: Any, chosen: Any, weights: Any, matrices: Sequence[Any], *rows: Any) -> None:
        self.experts, self.width, self.hidden = matrices[0].shape
        self.k, self.rows = chosen.shape[-1], math.prod(x.shape[:-1])
        self.pairs = self.rows * self.k
        self.work = wide(x.dtype)
        operands = (x, *rows, *matrices)
        self.dtype = x.dtype if all(a.dtype == x.dtype for a in operands) else self.work
        self.operands = [contiguous(a, self.dtype) for a in operands]
        self.weights = contiguous(weights, self.work)
        self.tensor = self.dtype.itemsize == 2 and runner().properties().capability >= 80
        self.half = 128 if self.tensor else 64  # columns of each of a block's two tiles
        self.most = ceil_div(self.pairs, ROWS) + min(self.experts, self.pairs)

    def is_empty(self) -> bool:
        return not min(self.pairs, self.experts, self.width, self.hidden)

    def is_served(self) -> bool:
        """Whether pairs, lengths and blocks can be counted in 32 bits."""
        longest = max(self.width, self.hidden)
        blocks = (self.most + self.experts * ceil_div(longest, ROWS)) * ceil_div(longest, self.half)
        return max(blocks, longest, self.pairs, self.experts * BLOCKS) < MAX_GRID - 2**16

    def route(self, chosen: Any, numbers: Any) -> None:
        """Put the pairs in the order of their experts."""
        empty = runner().xp.empty
        share = ceil_div(max(ceil_div(self.pairs, BLOCKS), 2 * THREADS), THREADS) * THREADS
        grid = (ceil_div(self.pairs, share), 1, 1)
        sizes = i32(self.pairs, self.experts, share)
        self.found, self.order, self.sources = (empty(self.pairs, np.int32) for _ in range(3))
        counts, self.starts = empty((grid[0], self.experts), np.int32), empty(self.experts + 1, np.int32)
        self.tiles = empty((self.most, 3), np.int32)
        given = [contiguous(a, np.int64) for a in (chosen, numbers)]
        _launch("count_pairs", grid, [*given, self.found, counts, *sizes])
        made = [self.order, self.sources, self.starts, self.tiles]
        _launch("place_pairs", grid, [self.found, counts, *made, *sizes, *i32(self.k, ROWS, self.most)])

    def products(
        self, kernel: str, variant: bool | int, blocks: int, read: Sequence[Any], made: Sequence[Any], *more: Any
    ) -> None:
        """Start a kernel that multiplies what it reads of ``read``."""
        size = self.dtype.itemsize
        addresses = [runner().address(a) for a in (*read, *made) if a is not NOTHING]
        aligned = all(vector_length(n, (size,), addresses) > 1 for n in (self.width, self.hidden))
        # Tiles of 64 elements (64 bytes) along the sums, of as many steps as a block has the memory for.
        stage = (ROWS + 2 * self.half) * (2 * 64 if self.tensor else 64 + 16)
        stages = min(4 if self.tensor else 3, (runner().properties().shared_memory - 2048) // stage)
        given = [*read, *made, *more, np.bool_(aligned), np.int32(stages)]
        _launch(named(kernel, variant, self.tensor, self.dtype), (blocks, 1, 1), given, stages * stage)

    def hidden_units(self, read: Sequence[Any], parts: Any) -> list[Any]:
        """The hidden units by place in the order, and with ``parts`` the cotangents of their two products."""
        backward = parts is not NOTHING
        made = [runner().xp.empty((self.pairs, self.hidden), self.dtype) for _ in range(3 if backward else 1)]
        given = [self.weights, self.order, self.sources, self.tiles, parts, *i32(self.most, self.width, self.hidden)]
        blocks = self.most * ceil_div(self.hidden, self.half * (2 if backward else 1))
        written = [*made, *[NOTHING] * (3 - len(made))]
        self.products("experts_hidden", backward, blocks, read, written, *given)
        return made

    def row_sums(self, backward: bool, read: Sequence[Any], like: Any) -> Any:
        """Products of hidden units, added up for each row."""
        pairs = runner().xp.empty((self.pairs, self.width), self.work)
        given = [self.weights, self.order, self.tiles, *i32(self.most, self.width, self.hidden)]
        blocks = self.most * ceil_div(self.width, 2 * self.half)
        self.products("experts_rows", backward, blocks, read, [pairs], *given)
        return self.summed(pairs, like, self.width, self.k, False)

    def matrices(self, a: Any, *b: Any) -> list[Any]:
        """For each expert the product of the columns of ``a`` and of ``b``, over the rows of its pairs."""
        lengths = (self.width, self.hidden) if len(b) == 2 else (self.hidden, self.width)
        out = [runner().xp.empty((self.experts, *lengths), self.dtype) for _ in b]
        blocks = self.experts * ceil_div(lengths[0], ROWS) * ceil_div(lengths[1], self.half * (3 - len(b)))
        absent = [NOTHING] * (2 - len(b))
        given = [self.sources, self.starts, *i32(*lengths)]
        self.products("experts_matrices", len(b), blocks, [a, *b, *absent], [*out, *absent], *given)
        return out

    def summed(self, values: Any, like: Any, width: int, each: int, together: bool) -> Any:
        """Every ``each`` rows of ``values`` added up, in the shape and dtype of ``like``: rows of so many pairs, or,
        with ``together``, of one."""
        direct = wide(like.dtype) == self.work
        out = runner().xp.empty(like.shape, like.dtype if direct else self.work)
        vector = vector_length(width, (out.dtype.itemsize,), [runner().address(a) for a in (values, out)])
        count = out.size // width
        grid = (min(ceil_div(out.size // vector, THREADS), 1 << 16), 1, 1)
        given = [values, self.found, out, i64(count), *i32(width, each), np.bool_(together), np.int32(self.experts)]
        _launch(named("sum_pairs", out.dtype, vector), grid, given)
        return out.astype(like.dtype, copy=False)


def _launch(kernel: str, grid: tuple[int, int, int], arguments: Sequence[Any], shared: int = 0) -> None:
    runner().launch(FILE, kernel, grid, (THREADS, 1, 1), arguments, shared)


def i32(*numbers: int) -> list[Any]:
    """Numbers as the kernels take them."""
    return [np.int32(n) for n in numbers]


@for_floats
def experts(x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any, numbers: Any) -> Any:
    """See :data:`meshtape.arrays.nn.mixture_of_experts.EXPERTS`."""
    call = _Call(x, chosen, weights, (gate, up, down))
    if call.is_empty():
        return runner().xp.zeros(x.shape, x.dtype)
    if not call.is_served():
        return NotImplemented
    call.route(chosen, numbers)
    rows, gate, up, down = call.operands
    (h,) = call.hidden_units([rows, NOTHING, gate, up, down], NOTHING)
    return call.row_sums(False, [h, NOTHING, down, NOTHING], x)


@for_floats
def experts_backward(g: Any, x: Any, chosen: Any, weights: Any, gate: Any, up: Any, down: Any, numbers: Any) -> Any:
    """See :data:`meshtape.arrays.nn.mixture_of_experts.EXPERTS_BACKWARD`."""
    call, xp = _Call(x, chosen, weights, (gate, up, down), g), runner().xp
    if call.is_empty():
        return tuple(xp.zeros(a.shape, a.dtype) for a in (x, weights, gate, up, down))
    if not call.is_served():
        return NotImplemented
    call.route(chosen, numbers)
    rows, slopes, *matrices = call.operands
    each = ceil_div(call.hidden, call.half) * (4 if call.tensor else 2)
    parts = xp.empty((call.pairs, each), call.work)
    h, of_gate, of_up = call.hidden_units([rows, slopes, *matrices], parts)
    dweights = call.summed(parts, weights, 1, each, True)
    dx = call.row_sums(True, [of_gate, of_up, *matrices[:2]], x)
    found = (*call.matrices(rows, of_gate, of_up), *call.matrices(h, slopes))
    return dx, dweights, *(d.astype(a.dtype, copy=False) for d, a in zip(found, (gate, up, down), strict=True))
