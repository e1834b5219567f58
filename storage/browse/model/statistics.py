"""Statistics of a stored array: counts of NaN, infinities and zeros, moments, quantiles, a histogram.

They are computed piece by piece. A small array is read whole, and everything is exact. A large one is sampled, unless
exact numbers are asked for: then it is read twice, and its quantiles are known to one part in 4,096. The result says
which of these was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...checkpoint.checkpoint import StoredArray
from .pieces import Pieces

LIMIT = 16 << 20  # bytes that a page reads without being asked for more
BINS = 60
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_KEY_BITS = 20


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite elements that were seen, and counts of the others.

    ``exact`` says whether all elements were seen; ``quantile_error`` is the relative error of the quantiles (0 when
    they are exact for what was seen). Of complex elements the magnitudes are described. ``edges`` has one element more
    than ``counts``.
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
    filled: str = ""  # a note on chunks that are not there

    @property
    def how(self) -> str:
        """One sentence on how the numbers came about."""
        text = f"Sampled: {self.seen:,} of {self.size:,} elements, in pieces spread evenly over the array."
        if self.exact:
            text = f"Exact: all {self.size:,} elements were read."
            text += " Quantiles to one part in 4,096." if self.quantile_error else ""
        return f"{text} {self.filled}".rstrip()


def statistics(
    array: StoredArray, *, limit: int = LIMIT, exact: bool = False, progress: Callable[[int, int], None] | None = None
) -> Statistics:
    """Statistics of ``array``: exact when it has at most ``limit`` bytes or ``exact`` is asked for, else of a sample of
    ``limit`` bytes.

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
    sampled = array.nbytes > limit
    # Of a sample, or a small array, all elements are kept and sorted; a large one is read twice, and its keys are
    # counted.
    twice = sampled and exact
    boxes = list(pieces.spread(max(1, limit // max(pieces.nbytes, 1)))) if sampled and not exact else []
    total = sum(b.size for b in boxes) * array.dtype.itemsize if boxes else array.nbytes * (2 if twice else 1)
    done = 0

    def read() -> Iterator[np.ndarray]:
        nonlocal done
        for box in boxes or pieces.all():
            values = array.read(box)
            done += values.nbytes
            yield numbers_of(values).reshape(-1)
            if progress is not None:
                progress(done, total)

    moments = _Moments()
    parts: list[np.ndarray] = []
    keys = np.zeros(1 << _KEY_BITS if twice else 0, np.int64)
    for values in read():
        flat = moments.add(values)
        if twice:
            keys += np.bincount(_key(flat), minlength=1 << _KEY_BITS)
        else:
            parts.append(flat)
    extra: dict[str, Any] = {}
    if moments.n:
        edges = _edges(moments.low, moments.high)
        places = [min(moments.n - 1, int(q * moments.n)) for q in QUANTILES]
        if twice:
            counts = sum(_count(values, edges) for values in read())
            ranks = np.cumsum(keys)
            found = [_unkey(int(np.searchsorted(ranks, k, "right"))) for k in places]
            found = [min(max(v, moments.low), moments.high) for v in found]
            extra["quantile_error"] = 2.0 ** -(_KEY_BITS - 8)
        else:
            finite = np.concatenate(parts)
            counts = _count(finite, edges)
            finite.sort()
            found = [finite[k].item() for k in places]
        extra |= {"quantiles": dict(zip(QUANTILES, found, strict=True))}
        extra |= {"edges": edges.tolist(), "counts": counts.tolist()}
        extra |= {"low": moments.low, "high": moments.high, "mean": moments.mean, "norm": math.sqrt(moments.squares)}
        extra["std"] = math.sqrt(moments.m2 / moments.n) if moments.m2 >= 0 else math.nan
    size, kind = math.prod(array.shape), array.dtype.kind
    tally = {k: getattr(moments, k) for k in ("seen", "nan", "infinite", "zeros")}
    extra |= {"magnitudes": kind == "c", "filled": array.filled}
    return Statistics(exact=moments.seen == size, size=size, nbytes=done, **tally, **extra)


def numbers_of(a: np.ndarray) -> np.ndarray:
    """As real numbers that NumPy can compute with: complex as magnitudes, extension types and booleans widened."""
    if a.dtype.kind == "c":
        with np.errstate(all="ignore"):
            return np.abs(a)
    own = a.dtype.kind in "iu" or (a.dtype.kind == "f" and a.dtype.itemsize >= 4)
    return a if own else a.astype(np.float32)


def not_finite(numbers: np.ndarray) -> tuple[int, int, np.ndarray | None]:
    """(NaN, infinities, where the others are); None for the last where all are finite."""
    finite = np.isfinite(numbers) if numbers.dtype.kind == "f" else None
    if finite is None or finite.all():
        return 0, 0, None
    nan = int(np.count_nonzero(np.isnan(numbers)))
    return nan, numbers.size - int(np.count_nonzero(finite)) - nan, finite


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

    def add(self, flat: np.ndarray) -> np.ndarray:
        """Take a block in; returns its finite elements."""
        self.seen += flat.size
        nan, infinite, finite = not_finite(flat)
        self.nan, self.infinite = self.nan + nan, self.infinite + infinite
        flat = flat if finite is None else flat[finite]
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
    """Finite elements in each bin. The edges span all of them, so a search suffices and no difference can overflow."""
    if flat.dtype.kind == "f":
        flat = flat[np.isfinite(flat)]
    where = np.searchsorted(edges, flat.astype(np.float64, copy=False), side="right") - 1
    return np.bincount(np.clip(where, 0, len(edges) - 2), minlength=len(edges) - 1)


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
