"""Formulas that choose elements of the sources: NearSwap, Arcee fusion, and Reinforced Agent Merging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from . import statistics
from .methods import Formula, Piece, real, rounded
from .statistics import Jobs


@dataclass(frozen=True, slots=True)
class NearSwap(Formula):
    """The other model where it is within ``t`` of the base; beyond, the less of it the farther (Alchemonaut,
    "QuartetAnemoi", 2024)."""

    t: float

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        (a, b), work, kind = piece.held, piece.work, real(piece.work).type
        distance = rounded(np.maximum(rounded(np.abs(a - b), work), kind(1e-6)), work)
        weight = np.clip(rounded(rounded(1 / distance, work) * kind(self.t), work), 0, 1)
        return rounded(weight * b, work) + rounded(rounded(1 - weight, work) * a, work)


@dataclass(frozen=True, slots=True)
class ArceeFusion(Formula):
    """The differences whose importance is above the median by 1.5 times the distance of the quartiles (Arcee AI, "Arcee
    Fusion", 2024).

    Importance is the size of the difference times the Kullback-Leibler divergence of the softmax of its row from that
    of the base.
    """

    measures: ClassVar[bool] = True
    rows: ClassVar[bool] = True

    def ranked(self, piece: Piece) -> list[np.ndarray]:
        base, x = (np.atleast_1d(h).astype(np.float64) for h in piece.held)
        p, q = (_softmax(h) + 1e-8 for h in (x, base))
        divergence = np.sum(p * np.log(p / q), axis=-1, keepdims=True)
        return [(np.abs(x - base) * divergence).astype(real(piece.work)).reshape(piece.box.shape)]

    def measuring(self, tensor: Any) -> Jobs:
        last = math.prod(tensor.shape) - 1
        cuts = yield from statistics.order_statistics(tensor, [(0, last * k // 4 + 1, False) for k in (1, 2, 3)])
        kind = real(tensor.work)
        lower, middle, upper = np.asarray([c.key for c in cuts], f"u{kind.itemsize}").view(kind)
        threshold = middle + kind.type(1.5) * (upper - lower)
        statistics.check_finite(tensor, threshold)
        return threshold

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        base, x = piece.held
        return base + (x - base) * (self.ranked(piece)[0] >= measured)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    return e / e.sum(axis=-1, keepdims=True)


@dataclass(frozen=True, slots=True)
class AgentMerging(Formula):
    """The base plus each difference that one model has alone, and the mean of those that several have ("RAM",
    arXiv:2601.13572).

    With an ``alpha`` (RAM+, tensor-local), what a model has alone is enlarged by ``r`` times the ratio of the elements
    that it shares to those that it has alone, which counts up to ``alpha``.
    """

    epsilon: float  # a difference is one above it
    r: float = 0.0
    alpha: float | None = None

    @property
    def measures(self) -> bool:  # type: ignore[override]
        return self.alpha is not None

    def _counted(self, piece: Piece) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        deltas = piece.deltas()
        limit = rounded(np.asarray(self.epsilon, real(piece.work)), piece.work)
        masks = [~(np.abs(d) <= limit) for d in deltas]  # NaN is a difference, too
        return deltas, masks, np.sum(masks, axis=0)

    def shares(self, piece: Piece) -> np.ndarray:
        """(shared, alone) numbers of elements of each difference."""
        _, masks, count = self._counted(piece)
        return np.asarray([[np.count_nonzero(m & (count > 1)), np.count_nonzero(m & (count == 1))] for m in masks])

    def measuring(self, tensor: Any) -> Jobs:
        shared, alone = (yield from statistics.shares(tensor)).T.astype(np.float32)
        ratio = shared / np.maximum(alone, np.float32(self.epsilon))
        return 1 + np.float32(self.r) * np.clip(ratio, 0, np.float32(self.alpha))

    def combine(self, piece: Piece, measured: Sequence[float] | None) -> np.ndarray:
        deltas, masks, count = self._counted(piece)
        work = piece.work if measured is None else real(piece.work)  # mergekit's factors are float32
        total = np.zeros_like(piece.held[0])
        for i, (d, mask) in enumerate(zip(deltas, masks, strict=True)):
            alone = d if measured is None else d * measured[i]
            total += np.where(
                mask, np.where(count > 1, rounded(d / np.maximum(count, 1).astype(d.dtype), piece.work), alone), 0
            )
        return piece.held[0] + rounded(total, work)
