"""Batch arithmetic: a global batch is micro-batch × data ranks × accumulation steps, exactly, or an error says why
not."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from ....arrays.core.errors import BatchSizeError


@dataclass(frozen=True)
class BatchSizes:
    """How a global batch is cut.

    Attributes
    ----------
    batch
        Samples of one optimizer step, over all ranks.
    micro
        Samples that one rank computes at a time.
    accumulation
        Micro-batches that each rank sums before a step.
    ranks
        The number of ranks that the samples are split over.
    """

    batch: int
    micro: int
    accumulation: int
    ranks: int

    __is_tree__ = False


def batch_sizes(batch: int, *, ranks: int, micro: int | None = None, accumulation: int | None = None) -> BatchSizes:
    """The sizes that follow from the global batch. Missing ones are computed, and uneven divisions are refused.

    Raises
    ------
    BatchSizeError
        Where ``batch`` is not ``micro * ranks * accumulation``; the message names all of them.

    Examples
    --------
    >>> batch_sizes(32, ranks=2, micro=4)
    BatchSizes(batch=32, micro=4, accumulation=4, ranks=2)
    >>> batch_sizes(30, ranks=2, micro=4)
    Traceback (most recent call last):
    meshtape.arrays.core.errors.BatchSizeError: a batch of 30 is no multiple of micro 4 * ranks 2 = 8: 24 and 32 are
    """
    for name, value in (("batch", batch), ("ranks", ranks), ("micro", micro), ("accumulation", accumulation)):
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise BatchSizeError(f"{name} must be a whole number and at least 1, got {value!r}")
    if micro is None and accumulation is None:
        accumulation = 1
    if micro is None:
        assert accumulation is not None
        _divide(batch, ranks * accumulation, f"ranks {ranks} * accumulation {accumulation} = {ranks * accumulation}")
        return BatchSizes(batch, batch // (ranks * accumulation), accumulation, ranks)
    _divide(batch, micro * ranks, f"micro {micro} * ranks {ranks} = {micro * ranks}")
    steps = batch // (micro * ranks)
    if accumulation is not None and accumulation != steps:
        raise BatchSizeError(
            f"micro {micro} * ranks {ranks} * accumulation {accumulation} = {micro * ranks * accumulation}, which is "
            f"not the batch {batch}: leave one of them out"
        )
    return BatchSizes(batch, micro, steps, ranks)


def _divide(batch: int, unit: int, text: str) -> None:
    if batch % unit:
        below, above = batch // unit * unit, -(-batch // unit) * unit
        near = f"{below} and {above} are" if below else f"{above} is"
        raise BatchSizeError(f"a batch of {batch} is no multiple of {text}: {near}")
