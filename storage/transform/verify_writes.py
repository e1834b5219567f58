"""The steps of a transfer: windows that are written together, and read back at once while other threads write others.

Reading back needs processors and memory, writing waits for the disk; together they take little longer than the slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...arrays.core.blocks import Box
from ..readers.reading import SMALL
from ..rules.casting import CastLoss
from .sinks.raw_writer import check_all, put_all
from .sinks.sink import Unit, WindowWriter

_TOGETHER = 512  # windows at most


def steps_of(
    left: Sequence[int], units: Sequence[Unit], sizes: Sequence[int], writers: Sequence[WindowWriter], limit: int
) -> list[list[int]]:
    """The windows ``left``, by number, in steps: one, or several small ones that have at most ``limit`` bytes."""
    out: list[list[int]] = []
    used = 0
    for n in left:
        small = sizes[n] <= SMALL and hasattr(writers[units[n].array], "raw_of")
        if not (small and 0 < used <= limit - sizes[n] and len(out[-1]) < _TOGETHER):
            out.append([])
            used = 0
        out[-1].append(n)
        used = used + sizes[n] if small else limit
    return out


def put_and_check(
    writers: Sequence[WindowWriter], root: str, windows: Sequence[Box], tensors: Sequence[Any]
) -> list[tuple[list[int], CastLoss, bool]]:
    """Write windows, and read them back: checksums and losses of each, and whether it is there as written."""
    done = put_all(writers, root, windows, tensors)
    same = check_all(writers, root, windows, [sums for sums, _ in done])
    return [(*row, whole) for row, whole in zip(done, same, strict=True)]
