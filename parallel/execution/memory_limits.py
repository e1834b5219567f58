"""Memory limits of the workers of a mesh, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...arrays.core.errors import OutOfMemory
from ...arrays.core.formatting import human_bytes
from ...arrays.core.op import ShapeDtype
from ..sharding.placement import Layout, block_box

Value = tuple[ShapeDtype, Layout]


def check_memory(
    what: str,
    values: Iterable[Value],
    sizes: tuple[int, ...],
    homes: Sequence[int],
    limits: Sequence[int | None],
    processes: Mapping[int, str],
) -> None:
    """Raise :class:`OutOfMemory` where blocks held at one time exceed the memory limit of a process.

    The count is a lower bound: each block of a process, once, however many of its ranks share it. Other memory of a
    program comes on top.

    ``homes`` has the process of each rank, ``limits`` the bytes that each process may use (None without a limit),
    ``processes`` each in words.

    >>> import numpy as np
    >>> rows = (ShapeDtype((8,), np.dtype("f8")), Layout(((0, (0,)),)))
    >>> check_memory("step", [rows], (4,), (0, 0, 1, 1), [32, 32], {0: "ranks 0-1", 1: "ranks 2-3"})
    >>> check_memory("step", [rows, rows], (4,), (0, 0, 1, 1), [None, 32], {0: "ranks 0-1", 1: "ranks 2-3"})
    Traceback (most recent call last):
    meshtape.arrays.core.errors.OutOfMemory: [step] ranks 2-3 would hold 64 B of blocks at once, ...
    """
    values = list(values)
    least = min((n for n in limits if n), default=0)
    most = max(map(homes.count, range(len(limits))), default=0)
    # No block is larger than that of rank 0: mostly that is all there is to know.
    if not least or most * sum(_bytes(v, sizes, 0) for v in values) <= least:
        return
    need = [0] * len(limits)
    for value in values:
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for rank, process in enumerate(homes):
            box = block_box(value[1], sizes, value[0].shape, rank)
            key = (process, box.offset)
            # Contributions to a pending reduction are each their own.
            if value[1].partials or key not in seen:
                seen.add(key)
                need[process] += box.size * value[0].dtype.itemsize
    for process, (n, limit) in enumerate(zip(need, limits, strict=True)):
        if limit and n > limit:
            raise OutOfMemory(
                f"[{what}] {processes[process]} would hold {human_bytes(n)} of blocks at once, and may use "
                f"{human_bytes(limit)}: take more workers, split what is replicated, give workers a larger "
                "memory_limit, or work block by block with mt.stream"
            )


def _bytes(value: Value, sizes: tuple[int, ...], rank: int) -> int:
    aval, layout = value
    return math.prod(block_box(layout, sizes, aval.shape, rank).shape) * aval.dtype.itemsize
