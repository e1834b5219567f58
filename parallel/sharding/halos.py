"""Halos: the part of an operand that a rank needs for its block of a result.

In a slice, a concatenation or a convolution, element ``t`` of the result needs other, nearby elements of the operand.
Where such a dimension is split, each rank fetches just the part that its block needs (a *halo*, where blocks overlap),
and runs the op on that.
"""

from __future__ import annotations

from typing import NamedTuple


class Halo(NamedTuple):
    """The elements ``[start, start + length)`` of an operand that the elements ``[o, o + k)`` of a result need.

    ==============  ===============================  ======================================================
    kind            numbers                          of
    ==============  ===============================  ======================================================
    ``slice``       first, step                      ``x[first::step]``
    ``slice_grad``     first, step, m                   the ``m`` values written to ``x[first::step]``
    ``join``        offset, n                        an operand of a concatenation
    ``conv``        stride, reach, padding, n        ``n`` places of an image under a kernel that reaches over ``reach``
    ``conv_transpose``      stride, reach, padding, places   the ``places`` of the result, from the image
    ==============  ===============================  ======================================================
    """

    kind: str
    numbers: tuple[int, ...]

    def region(self, o: int, k: int) -> tuple[int, int]:
        """(start, length) of the elements needed for ``k`` elements from ``o``."""
        if k == 0:
            return 0, 0
        if self.kind == "slice":
            first, step = self.numbers
            ends = (first + o * step, first + (o + k - 1) * step)
            return min(ends), max(ends) - min(ends) + 1
        if self.kind == "join":
            offset, n = self.numbers
            lo, hi = max(o - offset, 0), min(o + k - offset, n)
            return (lo, hi - lo) if hi > lo else (0, 0)
        if self.kind == "conv":
            stride, reach, padding, n = self.numbers
            lo, hi = max(o * stride - padding, 0), min((o + k - 1) * stride - padding + reach, n)
            return (lo, hi - lo) if hi > lo else (0, 0)
        if self.kind == "conv_transpose":
            stride, reach, padding, m = self.numbers
            o += padding
            lo, hi = -((reach - 1 - o) // stride), (o + k - 1) // stride
        else:
            first, step, m = self.numbers
            a, b = (o - first, o + k - 1 - first) if step > 0 else (first - o - k + 1, first - o)
            lo, hi = -(-a // abs(step)), b // abs(step)
        lo, hi = max(lo, 0), min(hi, m - 1)
        return (lo, hi - lo + 1) if hi >= lo else (0, 0)
