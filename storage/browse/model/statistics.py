"""Statistics of a stored array: counts of NaN, infinities and zeros, moments, quantiles, a histogram.

They are computed piece by piece. A small array is read whole, and everything is exact. A large one is sampled, unless
exact numbers are asked for: then it is read twice, and its quantiles are known to one part in 4,096. The result says
which of these was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ....arrays.core.blocks import Box
from ...checkpoint.checkpoint import StoredArray
from .pieces import Pieces

LIMIT = 16 << 20  # bytes that a page reads without being asked for more
BINS = 60
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_KEY_BITS = 20


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite elements that were seen, and counts of the others.

    ``exact`` says whether all elements were seen; ``quantile_error`` is the relative error of the quantiles (0 when they are exact for
    what was seen). Of complex elements the magnitudes are described. ``edges`` has one element more than ``counts``.
    """

    exact: bool
    seen: int
    size: int
    nbytes: int
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    quantiles: dict[float, float] = field(default_factory=dict)
    quantile_error: float = 0.0
    edges: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    magnitudes: bool = False

    @property
    def how(self) -> str:
        """One sentence on how the numbers came about."""
        if self.exact:
            text = f"Exact: all {self.size:,} elements were read."
            return text if not self.quantile_error else text + " Quantiles to one part in 4,096."
        return f"Sampled: {self.seen:,} of {self.size:,} elements, in pieces spread evenly over the array."


def statistics(
    array: StoredArray,
    *,
    limit: int = LIMIT,
    exact: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Statistics of ``array``: exact when it has at most ``limit`` bytes or ``exact`` is asked for, else of a sample of ``limit`` bytes.

    ``progress(done, total)`` is told of bytes read; what it raises ends the work.

    >>> import numpy as np, os, tempfile
    >>> from meshtape.storage import open_checkpoint, save
    >>> where = os.path.join(tempfile.mkdtemp(), "c")
    >>> _ = save(where, {"w": np.array([0.0, 1.0, 3.0, np.nan])})
    >>> s = statistics(open_checkpoint(where)["w"])
    >>> s.exact, s.nan, s.zeros, s.high, s.quantiles[0.5]
    (True, 1, 1, 3.0, 1.0)
    """
    pieces = Pieces.of(array)
    size = math.prod(array.shape)
    whole = array.nbytes <= limit
    if whole or not exact:
        boxes = list(pieces.spread(max(1, limit // max(pieces.nbytes, 1)))) if not whole else list(pieces.all())
        return _in_memory(array, boxes, size, progress)
    return _streamed(array, pieces, size, progress)


def numbers_of(a: np.ndarray) -> np.ndarray:
    """As real numbers that NumPy can compute with: complex as magnitudes, extension types and booleans widened."""
    if a.dtype.kind == "c":
        with np.errstate(all="ignore"):
            return np.abs(a)
    if a.dtype.kind in "f" and a.dtype.itemsize >= 4:
        return a
    if a.dtype.kind in "iu":
        return a
    return a.astype(np.float32)


@dataclass
class _Moments:
    """Counts, extremes and central moments, merged block by block (Chan, Golub, LeVeque 1979)."""

    seen: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    n: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    m2: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> np.ndarray:
        """Take a block in; returns its finite elements, flat."""
        flat = values.reshape(-1)
        self.seen += flat.size
        if flat.dtype.kind == "f":
            finite = np.isfinite(flat)
            if not finite.all():
                nan = int(np.count_nonzero(np.isnan(flat)))
                self.nan += nan
                self.infinite += flat.size - int(np.count_nonzero(finite)) - nan
                flat = flat[finite]
        if not flat.size:
            return flat
        self.zeros += flat.size - int(np.count_nonzero(flat))
        self.low = min(self.low, flat.min().item())
        self.high = max(self.high, flat.max().item())
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(flat.mean(dtype=np.float64))
            wide = flat.astype(np.float64)
            self.squares += float(wide @ wide)
            wide -= mean
            m2 = float(wide @ wide)
        total = self.n + flat.size
        delta = mean - self.mean
        self.m2 += m2 + delta * delta * self.n * flat.size / total
        self.mean += delta * flat.size / total
        self.n = total
        return flat

    def facts(self) -> dict[str, float]:
        if not self.n:
            return {}
        return {
            "low": self.low,
            "high": self.high,
            "mean": self.mean,
            "std": math.sqrt(self.m2 / self.n) if self.m2 >= 0 else math.nan,
            "norm": math.sqrt(self.squares),
        }


def _edges(low: float, high: float) -> np.ndarray:
    low, high = float(low), float(high)
    if low == high:
        gap = max(abs(low) * 1e-6, 0.5)
        return np.array([low - gap, low + gap])
    with np.errstate(over="ignore", invalid="ignore"):
        edges = np.linspace(low, high, BINS + 1)
        # A range beyond the largest float has no length; half of it has.
        return edges if np.isfinite(edges).all() else np.linspace(low / 2, high / 2, BINS + 1) * 2


def _count(flat: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Elements in each bin. The edges span all elements, so a search suffices and no difference can overflow."""
    where = np.searchsorted(edges, flat.astype(np.float64, copy=False), side="right") - 1
    return np.bincount(np.clip(where, 0, len(edges) - 2), minlength=len(edges) - 1)


def _in_memory(
    array: StoredArray, boxes: Iterable[Box], size: int, progress: Callable[[int, int], None] | None
) -> Statistics:
    moments, parts, nbytes = _Moments(), [], 0
    boxes = list(boxes)
    total = sum(b.size for b in boxes) * array.dtype.itemsize
    for box in boxes:
        values = array.read(box)
        nbytes += values.nbytes
        parts.append(moments.add(numbers_of(values)))
        if progress is not None:
            progress(nbytes, total)
    finite = np.concatenate(parts) if parts else np.empty(0)
    extra: dict = {}
    if finite.size:
        edges = _edges(moments.low, moments.high)
        finite.sort()
        at = [finite[min(finite.size - 1, int(q * finite.size))].item() for q in QUANTILES]
        extra = {
            "quantiles": dict(zip(QUANTILES, at, strict=True)),
            "edges": edges.tolist(),
            "counts": _count(finite, edges).tolist(),
        }
    return _result(array, moments, size, nbytes, extra)


def _streamed(array: StoredArray, pieces: Pieces, size: int, progress: Callable[[int, int], None] | None) -> Statistics:
    moments, done = _Moments(), 0
    keys = np.zeros(1 << _KEY_BITS, np.int64)
    for box in pieces.all():
        values = array.read(box)
        done += values.nbytes
        flat = moments.add(numbers_of(values))
        keys += np.bincount(_key(flat), minlength=1 << _KEY_BITS)
        if progress is not None:
            progress(done, 2 * array.nbytes)
    extra: dict = {}
    if moments.n:
        edges = _edges(moments.low, moments.high)
        counts = np.zeros(len(edges) - 1, np.int64)
        for box in pieces.all():
            values = numbers_of(array.read(box)).reshape(-1)
            done += box.size * array.dtype.itemsize
            counts += _count(values[np.isfinite(values)] if values.dtype.kind == "f" else values, edges)
            if progress is not None:
                progress(done, 2 * array.nbytes)
        ranks = np.cumsum(keys)
        at = [_unkey(int(np.searchsorted(ranks, min(moments.n - 1, int(q * moments.n)), "right"))) for q in QUANTILES]
        extra = {
            "quantiles": {q: min(max(v, moments.low), moments.high) for q, v in zip(QUANTILES, at, strict=True)},
            "quantile_error": 2.0 ** -(_KEY_BITS - 8),
            "edges": edges.tolist(),
            "counts": counts.tolist(),
        }
    return _result(array, moments, size, done, extra)


def _key(flat: np.ndarray) -> np.ndarray:
    """The step of each element among 2²⁰ in the order of float32: the upper bits of its pattern, made monotone."""
    with np.errstate(over="ignore"):
        bits = flat.astype(np.float32).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (ordered >> np.uint32(32 - _KEY_BITS)).astype(np.int64)


def _unkey(k: int) -> float:
    """The middle of step ``k``."""
    ordered = np.uint32((k << (32 - _KEY_BITS)) | (1 << (31 - _KEY_BITS)))
    bits = ordered & np.uint32(0x7FFFFFFF) if ordered >> np.uint32(31) else ~ordered
    return float(np.asarray(bits, np.uint32).reshape(1).view(np.float32)[0])


def _result(array: StoredArray, moments: _Moments, size: int, nbytes: int, extra: dict) -> Statistics:
    return Statistics(
        exact=moments.seen == size,
        seen=moments.seen,
        size=size,
        nbytes=nbytes,
        nan=moments.nan,
        infinite=moments.infinite,
        zeros=moments.zeros,
        magnitudes=array.dtype.kind == "c",
        **moments.facts(),
        **extra,
    )
