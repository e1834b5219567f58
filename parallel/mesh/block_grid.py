"""The grid of block owners, as the pictures of an array's blocks draw it."""

from __future__ import annotations

import colorsys
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ...arrays.core.blocks import Box, ceil_blocks
from ..sharding.placement import Partial, Sharding

Span = tuple[int, int]
"""Where a run of rows or columns starts and stops."""


class Slab(NamedTuple):
    """The blocks at one place of the leading dimensions, as a table: rows and columns are those of the last two
    dimensions (a vector is one row), and ``ranks[i][j]`` hold the block in row ``i`` and column ``j``. ``place`` is
    that of the leading dimensions, ``[0:2, 0:3, …]``; empty where none is split."""

    place: str
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]


class BlockGrid(NamedTuple):
    """All blocks of an array, the ranks without elements, and notes."""

    slabs: tuple[Slab, ...]
    idle: tuple[int, ...]
    notes: tuple[str, ...]


def grid_of(shape: tuple[int, ...], sharding: Sharding) -> BlockGrid:
    """The blocks of an array of ``shape``.

    >>> import meshtape as mt
    >>> grid = grid_of((5,), mt.Sharding(mt.Mesh({"a": 4}), a=mt.Shard(0)))
    >>> grid.slabs[0].columns, grid.slabs[0].ranks, grid.idle
    (((0, 2), (2, 4), (4, 5)), (((0,), (1,), (2,)),), (3,))
    """
    mesh = sharding.mesh
    holders: dict[Box, list[int]] = {}
    for rank in range(mesh.size):
        holders.setdefault(sharding.box(shape, rank), []).append(rank)
    idle = sorted(r for box, ranks in holders.items() if not box.size for r in ranks)
    notes = []
    for dim, axes in sharding.layout.shards:
        lengths = [k for _, k in ceil_blocks(shape[dim], math.prod(mesh.sizes[a] for a in axes))]
        if len(set(lengths)) > 1:
            notes.append(f"dimension {dim} in blocks of {_runs_text(lengths)}")
    if math.prod(shape) and idle:
        notes.append(f"no elements on rank{'s' if len(idle) > 1 else ''} {ranks_text(idle)}")
    for name, p in sharding.placements.items():
        if isinstance(p, Partial) and mesh.sizes[mesh.axis(name)] > 1:
            notes.append(f"along {name} each rank of a block holds a part of a pending {p.op}")
    if not math.prod(shape):
        return BlockGrid((), tuple(idle), ("no elements", *notes))
    slabs: dict[tuple[Span, ...], dict[tuple[Span, Span], list[int]]] = {}
    for box, ranks in holders.items():
        if box.size:
            spans = tuple(zip(box.offset, box.stop, strict=True))
            row = spans[-2] if len(spans) > 1 else (0, 1)
            column = spans[-1] if spans else (0, 1)
            slabs.setdefault(spans[:-2], {})[row, column] = ranks
    out = []
    for lead, cells in sorted(slabs.items()):
        rows, columns = sorted({r for r, _ in cells}), sorted({c for _, c in cells})
        place = "" if len(slabs) == 1 else f"[{', '.join(f'{a}:{b}' for a, b in lead)}, …]"
        table = tuple(tuple(tuple(cells[r, c]) for c in columns) for r in rows)
        out.append(Slab(place, tuple(rows), tuple(columns), table))
    return BlockGrid(tuple(out), tuple(idle), tuple(notes))


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-3, 6`` for many, in order; long lists in short.

    >>> threes = [0, 1, 2, 8, 9, 10, 16, 17, 18, 24, 25, 26]
    >>> ranks_text([0, 1, 2, 3, 6]), ranks_text(range(0, 64, 4)), ranks_text(threes)
    ('0-3, 6', '0, 4, …, 60', '0-2, 8-10, …, 24-26')
    """
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    if len(texts) > 3:
        steps = {(b[0] - a[0], len(b) - len(a)) for a, b in itertools.pairwise(runs)}
        texts = [*texts[:2], "…", texts[-1]] if len(steps) == 1 else texts
    if len(texts) > 8:
        texts = [*texts[:6], "…", texts[-1]]
    return ", ".join(texts)


def _runs_text(lengths: Sequence[int]) -> str:
    """``2, 2, 1, 0``; many equal ones are counted: ``2 (31 times), 1, 0 (32 times)``."""
    runs = [(n, len(list(same))) for n, same in itertools.groupby(lengths)]
    return ", ".join(", ".join([str(n)] * k) if k < 4 else f"{n} ({k} times)" for n, k in runs)


def colour_of(rank: int) -> str:
    """A light colour for a rank: hues a golden section apart, so that neighbours differ and none soon comes again."""
    r, g, b = colorsys.hls_to_rgb((0.52 + 0.6180339887 * rank) % 1.0, 0.80 - 0.07 * (rank % 2), 0.55)
    return f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}"
