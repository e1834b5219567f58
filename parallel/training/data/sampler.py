"""The sampler: the next samples as a pure function of the seed and of the number of consumed samples.

It does not depend on ranks, workers or batch sizes. So a run resumes on another world size, or with another batch size,
at the very next sample of the same permutation.
"""

from __future__ import annotations

import numpy as np

from ....arrays import random
from ....arrays.core.errors import DataError


class Sampler:
    """An order of ``size`` samples for every epoch.

    Parameters
    ----------
    size
        Number of samples.
    seed
        Of the permutations; epoch ``e`` has the permutation of ``fold_in(key(seed), e)``.
    shuffle
        Without it every epoch goes through the samples in order.
    drop_last
        Leave out the end of an epoch that fills no batch. Otherwise the last batch of an epoch is shorter; no batch
        ever has samples of two epochs.

    Examples
    --------
    >>> sampler = Sampler(5, seed=0, shuffle=False)
    >>> sampler.take(3, 4)
    (array([3, 4]), 5)
    >>> sampler.take(5, 4), sampler.epoch(5)
    ((array([0, 1, 2, 3]), 9), 1)
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False) -> None:
        if size < 1:
            raise DataError(f"a sampler needs at least one sample, got {size}: the data set is empty")
        self.size, self.seed, self.shuffle, self.drop_last = size, seed, shuffle, drop_last
        self._order: tuple[int, np.ndarray] | None = None

    def epoch(self, consumed: int) -> int:
        """The epoch of the next sample. At the end of an epoch that is the next one."""
        return consumed // self.size

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of an epoch."""
        if not self.shuffle:
            return np.arange(self.size)
        if self._order is None or self._order[0] != epoch:
            key = random.fold_in(random.key(self.seed), epoch)
            self._order = (epoch, np.asarray(random.permutation(key, self.size)))
        return self._order[1]

    def take(self, consumed: int, count: int) -> tuple[np.ndarray, int]:
        """Numbers of the next ``count`` samples (fewer at the end of an epoch), and the number of consumed samples
        after them. Samples that ``drop_last`` leaves out count as consumed."""
        if consumed < 0 or count < 1:
            raise DataError(f"take needs consumed >= 0 and count >= 1, got {consumed} and {count}")
        epoch, offset = divmod(consumed, self.size)
        if self.drop_last and offset + count > self.size:
            if count > self.size:
                raise DataError(f"a batch of {count} is larger than the {self.size} samples, and drop_last leaves none")
            epoch, offset = epoch + 1, 0
        ids = self.order(epoch)[offset : offset + count]
        after = offset + len(ids)
        if self.drop_last and after + count > self.size:
            after = self.size  # the rest is left out, and the epoch done
        return ids, epoch * self.size + after

    def batches_per_epoch(self, count: int) -> int:
        """Number of batches of ``count`` samples in an epoch."""
        return self.size // count if self.drop_last else -(-self.size // count)
