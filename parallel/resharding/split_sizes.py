"""Sizes of the parts in an all-to-all: a matrix whose different rows are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SplitSizes(NamedTuple):
    """Row ``i`` of the matrix, ``rows[of[i]]``, has the lengths that rank ``i`` of a group sends to each.

    Equal blocks have equal rows, so the stored size grows with the number of ranks, not with its square.

    Examples
    --------
    >>> sizes = SplitSizes.matrix([(2, 2, 1), (2, 2, 1), (2, 2, 0)])
    >>> sizes
    SplitSizes(rows=((2, 2, 1), (2, 2, 0)), of=(0, 0, 1))
    >>> sizes.row(2), sizes.column(2)
    ((2, 2, 0), (1, 1, 0))
    >>> sizes.transposed()
    SplitSizes(rows=((2, 2, 2), (1, 1, 0)), of=(0, 0, 1))
    """

    rows: tuple[tuple[int, ...], ...]
    of: tuple[int, ...]

    @classmethod
    def matrix(cls, rows: Sequence[tuple[int, ...]]) -> SplitSizes:
        """The sizes of a dense matrix."""
        return cls(tuple(rows), tuple(range(len(rows))))._shortest()

    @classmethod
    def alike(cls, row: Sequence[int], ranks: int) -> SplitSizes:
        """The sizes where all ranks have the same row."""
        return cls((tuple(row),), (0,) * ranks)

    def _shortest(self) -> SplitSizes:
        number = {row: k for k, row in enumerate(dict.fromkeys(self.rows))}
        return SplitSizes(tuple(number), tuple(number[self.rows[k]] for k in self.of))

    def row(self, i: int) -> tuple[int, ...]:
        """The lengths that rank ``i`` sends to each."""
        return self.rows[self.of[i]]

    def column(self, j: int) -> tuple[int, ...]:
        """The lengths that rank ``j`` receives from each."""
        kinds = self.kinds(j)
        return tuple(kinds[k] for k in self.of)

    def kinds(self, j: int) -> tuple[int, ...]:
        """The lengths that rank ``j`` receives, one for each different row; columns with equal kinds are equal."""
        return tuple(row[j] for row in self.rows)

    def transposed(self) -> SplitSizes:
        """The sizes of the reverse exchange."""
        kinds = list(zip(*self.rows, strict=True))
        number = {kind: k for k, kind in enumerate(dict.fromkeys(kinds))}
        rows = tuple(tuple(kind[k] for k in self.of) for kind in number)
        return SplitSizes(rows, tuple(number[kind] for kind in kinds))._shortest()
