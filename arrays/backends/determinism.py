"""Determinism of sums on a GPU: the same bits in every run, or speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_deterministic = True


def is_deterministic() -> bool:
    """Whether the functions that have a faster way without a fixed order leave it alone (by default they do).

    >>> mt.is_deterministic()
    True
    """
    return _deterministic


@contextmanager
def use_deterministic(mode: bool = True) -> Iterator[None]:
    """Add up in a fixed order on a GPU, or, with False, in whichever order is fastest, while the context is open.

    It concerns what is added at repeated indices: gradients of reading rows (``table[ids]``, ``take``, ``embedding``)
    and ``x.at[...].add``. With False each addition is an atomic operation, and the last digits of a sum change from run
    to run. Products may then add up split sums in place, gradients of convolutions theirs, and sums over the ranks of a
    mesh of GPUs are NCCL's own all-reduces. On a CPU, and in everything else on a GPU, the order is always the same. It
    holds for all threads of the process.

    >>> with mt.use_deterministic(False):
    ...     mt.is_deterministic()
    False
    """
    global _deterministic
    before, _deterministic = _deterministic, bool(mode)
    try:
        yield
    finally:
        _deterministic = before
