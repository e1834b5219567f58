"""The formulas of blending, on pieces of tensors held as float32 (float64 for float64).

Each formula is a small picklable value: it is part of a lazy tensor, and its text part of the fingerprint of a
transfer. ``combine`` gives the elements of a piece from those of the sources, by operations whose result for an element
depends on that element and on what was ``measured`` of whole tensors alone, so that it is the same to the bit however
the tensor is cut. Where mergekit computes in a short type, each operation here is rounded to it (`rounded`), and where
PyTorch multiplies and adds with one rounding, so does `fused`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError
from ...arrays.native.ops import add_product
from ...arrays.random.philox import BitTransform, draw
from . import statistics
from .statistics import Cut, Jobs

_HALVES = BitTransform(1, 2, lambda xp, w: w.view(np.uint32))  # two numbers of 32 bits from a word
_CACHED = 32768  # elements whose float64 values stay in a processor's cache
_SMALL = 1e-7  # a norm below is not scaled to


def real(work: np.dtype) -> np.dtype:
    """The dtype in which values of another are computed with."""
    return np.dtype(np.float64 if work == np.float64 else np.float32)


def rounded(a: np.ndarray, work: np.dtype) -> np.ndarray:
    """Values as ``work`` holds them; float32, float64 and float8, which has no arithmetic of its own, stay as they
    are."""
    return a.astype(work).astype(np.float32) if work.itemsize == 2 else a


def fused(x: np.ndarray, w: Any, total: np.ndarray) -> np.ndarray:
    """``x * w + total`` with one rounding, in the memory of ``total`` where a kernel does it."""
    if add_product(x, w, total):
        return total
    if total.dtype == np.float64:
        x_high, w_high = _high(x), _high(np.float64(w))
        x_low, w_low = x - x_high, w - w_high
        product = x * w
        lost = ((x_high * w_high - product) + x_high * w_low + x_low * w_high) + x_low * w_low
        out = product + total
        back = out - product
        rest = (product - (out - back)) + (total - back) + lost
        return out + np.where(np.isfinite(rest), rest, 0)
    out, flat, sums = np.empty(x.shape, np.float32), x.reshape(-1), total.reshape(-1)
    for i in range(0, flat.size, _CACHED):
        part = slice(i, i + _CACHED)
        product = np.multiply(flat[part], w, dtype=np.float64)  # exact
        whole = product + sums[part]
        # The second rounding can differ from a single one only where the first ended in the middle of two neighbours.
        middle = (whole.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
        if middle.any():
            p, t, s = product[middle], sums[part][middle].astype(np.float64), whole[middle]
            back = s - p
            lost = (p - (s - back)) + (t - back)
            whole[middle] = np.where(lost == 0, s, np.nextafter(s, np.copysign(np.inf, lost)))
        out.reshape(-1)[part] = whole
    return out


def _high(a: Any) -> Any:
    """The upper half of the digits of float64 numbers (Dekker, 1971)."""
    c = a * 134217729.0
    return c - (c - a)


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of a box of every source of a tensor."""

    box: Box
    shape: tuple[int, ...]  # of the tensor
    work: np.dtype  # in which mergekit computes
    held: list[np.ndarray]

    def positions(self) -> np.ndarray:
        """The number of each element in row-major order."""
        out = np.zeros((1,) * len(self.shape), np.int64)
        for axis, (start, n) in enumerate(zip(self.box.offset, self.box.shape, strict=True)):
            along = [1] * len(self.shape)
            along[axis] = n
            out = out + (np.arange(start, start + n) * math.prod(self.shape[axis + 1 :])).reshape(along)
        return out

    def deltas(self) -> list[np.ndarray]:
        """The differences from the first source."""
        return [rounded(x - self.held[0], self.work) for x in self.held[1:]]


class Formula:
    """Base of the formulas."""

    __slots__ = ()
    measures: ClassVar[bool] = False  # whether `combine` needs numbers about the whole tensor
    rows: ClassVar[bool] = False  # whether a piece must hold whole rows
    keeps_scale: ClassVar[Any] = False  # whether products of two results are as large as those of the sources

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        raise NotImplementedError

    def measuring(self, tensor: Any) -> Jobs:
        """Yields lists of calls whose results it is sent, and returns what was ``measured``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Linear(Formula):
    """Weighted sum, or mean (Wortsman et al., "Model soups", arXiv:2203.05482)."""

    weights: tuple[float, ...]
    normalize: bool

    keeps_scale = property(lambda self: self.normalize or math.isclose(math.fsum(self.weights), 1))

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        kind = real(piece.work).type
        out, whole = piece.held[0] * kind(self.weights[0]) + kind(0), kind(self.weights[0])
        for x, w in zip(piece.held[1:], self.weights[1:], strict=True):
            out = fused(x, kind(w), out)
            whole += kind(w)
        return out / whole if self.normalize else out


@dataclass(frozen=True, slots=True)
class Scaled(Formula):
    """One source, multiplied by a number."""

    scale: float | None

    keeps_scale = property(lambda self: self.scale in (None, 1))

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        (x,) = piece.held
        return x if self.scale is None else x * x.dtype.type(self.scale)


# ----- task vectors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sparsifier:
    """A choice of elements of a task vector; this one keeps all."""

    density: float = 1.0

    def cuts(self, size: int) -> list[tuple[int, bool]]:
        """(count, whether of the largest) of the order statistics that the choice needs."""
        return []

    def mask(self, delta: np.ndarray, piece: Piece, cuts: Sequence[Cut]) -> Any:
        """True where an element is kept; None where all are."""
        return None if self.density > 0 else np.False_


@dataclass(frozen=True, slots=True)
class Trim(Sparsifier):
    """The largest ones by magnitude (Yadav et al., "TIES-Merging", arXiv:2306.01708); of equal ones the first."""

    def cuts(self, size: int) -> list[tuple[int, bool]]:
        return [(max(1, int(self.density * size)), True)] if 0 < self.density < 1 and size else []

    def mask(self, delta: np.ndarray, piece: Piece, cuts: Sequence[Cut]) -> Any:
        if not cuts:
            return None if self.density > 0 else np.False_
        return cuts[0].holds(delta, piece)


@dataclass(frozen=True, slots=True)
class Outliers(Sparsifier):
    """All but the ``gamma`` largest and the smallest (Davari and Belilovsky, "Model Breadcrumbs", arXiv:2312.06795)."""

    gamma: float = 0.01

    def cuts(self, size: int) -> list[tuple[int, bool]]:
        if self.density >= 1:
            return []
        kept, top = int(self.density * size), int(self.gamma * size)
        bottom = max(0, size - kept - top)
        return [(n, False) for n in (bottom, min(bottom + kept, size))]

    def mask(self, delta: np.ndarray, piece: Piece, cuts: Sequence[Cut]) -> Any:
        return None if self.density >= 1 else cuts[1].holds(delta, piece) & ~cuts[0].holds(delta, piece)


@dataclass(frozen=True, slots=True)
class Drop(Sparsifier):
    """Each with probability ``density`` (Yu et al., DARE, arXiv:2311.03099), by random numbers of a ``key`` and the
    element's place."""

    key: tuple[int, int] = (0, 0)

    def mask(self, delta: np.ndarray, piece: Piece, cuts: Sequence[Cut]) -> Any:
        if not 0 < self.density < 1:
            return None if self.density > 0 else np.False_
        return self.below(self.density, piece)

    def below(self, probability: Any, piece: Piece) -> np.ndarray:
        """True with a probability."""
        key = np.asarray(self.key, np.uint64)
        bits = draw(np, key, _HALVES, np.dtype(np.uint32), piece.box.shape, piece.box.offset, piece.shape)
        return bits < probability * 2.0**32


@dataclass(frozen=True, slots=True)
class MagnitudeDrop(Drop):
    """Each with a probability that grows with its rank in its row, from ``density - epsilon`` to ``density + epsilon``
    (Deep et al., DELLA, arXiv:2406.11617). A row of one element has the probability ``density``."""

    epsilon: float = 0.15

    def mask(self, delta: np.ndarray, piece: Piece, cuts: Sequence[Cut]) -> Any:
        if not 0 < self.density < 1:
            return None if self.density > 0 else np.False_
        if not delta.ndim or delta.shape[-1] < 2:
            return self.below(self.density, piece)
        order = np.argsort(np.abs(delta), axis=-1, kind="stable")
        rank = np.empty(delta.shape, np.float64)
        np.put_along_axis(rank, order, np.broadcast_to(np.arange(delta.shape[-1], dtype=np.float64), delta.shape), -1)
        return self.below((self.density - self.epsilon) + rank / (delta.shape[-1] - 1) * 2 * self.epsilon, piece)


def signs_agree(deltas: Sequence[np.ndarray], work: np.dtype) -> list[np.ndarray]:
    """True where an element has the sign that the sum over all has, of which zero counts as positive (TIES)."""
    total = np.zeros_like(deltas[0])
    for d in deltas:
        total += d
    positive = rounded(total, work) >= 0
    # Not by `where`, which takes a branch for each element.
    return [((d > 0) & positive) | ((d < 0) & ~positive) for d in deltas]


@dataclass(frozen=True, slots=True)
class TaskVectors(Formula):
    """The base plus a weighted sum of sparse differences from it (Ilharco et al., "Editing models with task
    arithmetic", arXiv:2212.04089).

    With ``consensus`` of the elements that agree with the elected sign. ``rescale`` keeps the sum of magnitudes of each
    difference.
    """

    weights: tuple[float, ...]
    factor: float  # lambda
    normalize: bool
    consensus: bool
    rescale: bool
    sparsifiers: tuple[Sparsifier, ...]

    @property
    def rows(self) -> bool:  # type: ignore[override]
        return any(isinstance(s, MagnitudeDrop) for s in self.sparsifiers)

    @property
    def measures(self) -> bool:  # type: ignore[override]
        return any(s.cuts(1 << 30) or (self.rescale and s.density < 1) for s in self.sparsifiers)

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        work, kind = piece.work, real(piece.work).type
        cuts, scales = measured or ([()] * len(self.weights), None)
        weights = [rounded(np.asarray(w, kind), work)[()] for w in self.weights]
        deltas = []
        for i, (d, mask) in enumerate(self.sparse(piece, cuts)):
            kept = d if mask is None else d * mask
            if scales is not None and scales[i] != 1:
                kept = rounded(kept * scales[i], work)
            deltas.append(rounded(kept * weights[i], work))
        total, divisor = np.zeros(piece.box.shape, kind), np.zeros((), kind)
        masks = signs_agree(deltas, work) if self.consensus else [None] * len(deltas)
        for d, w, mask in zip(deltas, weights, masks, strict=True):
            total += d if mask is None else d * mask
            divisor = divisor + (w if mask is None else w * mask)
        total = rounded(total, work)
        if self.normalize:
            divisor = rounded(np.asarray(divisor, kind), work)
            total = rounded(total / np.where(divisor == 0, kind(1), divisor), work)
        if self.factor != 1:
            total = rounded(total * kind(self.factor), work)
        return piece.held[0] + total

    def sparse(self, piece: Piece, cuts: Sequence[Sequence[Cut]]) -> Iterator[tuple[np.ndarray, Any]]:
        """(difference, mask) of each source."""
        for d, s, c in zip(piece.deltas(), self.sparsifiers, cuts, strict=True):
            yield d, s.mask(d, piece, c)

    def measuring(self, tensor: Any) -> Jobs:
        size = math.prod(tensor.shape)
        wanted = [(i, *c) for i, s in enumerate(self.sparsifiers) for c in s.cuts(size)]
        found = yield from statistics.order_statistics(tensor, wanted)
        cuts = [tuple(c for (i, *_), c in zip(wanted, found, strict=True) if i == k) for k in range(len(self.weights))]
        scales = None
        if self.rescale and any(s.density < 1 for s in self.sparsifiers):
            sums = yield from statistics.magnitudes(tensor, cuts)
            statistics.check_finite(tensor, sums)
            scales = [_scale(before, after, tensor.work) for before, after in sums]
        return cuts, scales

    def ranked(self, piece: Piece) -> list[np.ndarray]:
        return piece.deltas()


def _scale(before: float, after: float, work: np.dtype) -> Any:
    """The factor that gives the kept elements the sum of magnitudes of all, rounded as bfloat16 work rounds it."""
    kind = real(work).type
    if work.name == "bfloat16":
        before, after = (rounded(np.asarray(x, np.float32), work)[()] for x in (before, after))
        return 1 if min(before, after) < _SMALL else rounded(np.asarray(before / after, np.float32), work)[()]
    return 1 if min(before, after) < _SMALL else kind(before / after)


@dataclass(frozen=True, slots=True)
class SelectCalculateErase(Formula):
    """SCE (Wan et al., "FuseChat", arXiv:2408.07990): the elements of largest variance, weighted by the square of each
    difference."""

    topk: float
    measures: ClassVar[bool] = True

    def ranked(self, piece: Piece) -> list[np.ndarray]:
        """The variance over the sources."""
        deltas = piece.deltas()
        mean = sum((d.astype(np.float64) for d in deltas), 0.0) / len(deltas)
        spread = sum(((d - mean) ** 2 for d in deltas), 0.0) / len(deltas)
        return [rounded(np.asarray(spread, real(piece.work)), piece.work)]

    def sparse(self, piece: Piece, cuts: Sequence[Sequence[Cut]]) -> Iterator[tuple[np.ndarray, Any]]:
        mask = None
        if self.topk < 1:
            mask = cuts[0][0].holds(self.ranked(piece)[0], piece) if cuts[0] else np.False_
        for d in piece.deltas():
            yield d, mask

    def measuring(self, tensor: Any) -> Jobs:
        cuts: list[tuple[Cut, ...]] = [()]
        if 0 < self.topk < 1:
            count = int((yield from statistics.nonzero(tensor)) * self.topk)
            if count:
                cuts = [tuple((yield from statistics.order_statistics(tensor, [(0, count, True)])))]
                key = np.asarray(cuts[0][0].key, f"u{real(tensor.work).itemsize}")
                statistics.check_finite(tensor, key.view(real(tensor.work)))  # else the chosen ones are any of several
        squares = yield from statistics.squares(tensor, cuts)
        statistics.check_finite(tensor, squares)
        means = np.asarray(squares) / max(math.prod(tensor.shape), 1)
        # mergekit's own bound: differences so small count alike.
        weights = means / means.sum() if means.sum() >= 1e-6 else np.full(len(means), 1 / len(means))
        return cuts, tuple(weights)

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        cuts, weights = measured
        deltas = [d if mask is None else d * mask for d, mask in self.sparse(piece, cuts)]
        total, divisor = np.zeros(piece.box.shape), np.zeros(piece.box.shape)
        for d, agrees, w in zip(deltas, signs_agree(deltas, piece.work), weights, strict=True):
            total += d * (w * agrees)
            divisor += w * agrees
        return np.asarray(piece.held[0] + total / np.maximum(divisor, 1e-6), real(piece.work))


# ----- combinations with coefficients that follow from lengths and angles ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Directions(Formula):
    """A linear combination whose coefficients follow from the scalar products of the sources: every formula on the
    sphere of all directions.

    ``relative``: of the differences from the first source. ``axis``: of each row (-1) or column (0) by itself, or None.
    """

    kind: str
    weights: tuple[float, ...]
    relative: bool = False
    axis: int | None = None
    options: tuple[tuple[str, float], ...] = field(default=())
    measures: ClassVar[bool] = True

    def measuring(self, tensor: Any) -> Jobs:
        products = yield from statistics.products(tensor, self.relative or self.kind == "model_stock", self.axis)
        statistics.check_finite(tensor, products)
        with np.errstate(all="ignore"):
            out = COEFFICIENTS[self.kind](products, self.weights, dict(self.options))
        if not np.isfinite(out).all():
            raise CheckpointError(
                f"key {tensor.name!r}: {self.kind} has no result for these sources, which have no common direction "
                "(such as opposite ones)"
            )
        return out

    def combine(self, piece: Piece, measured: Any) -> np.ndarray:
        kind = real(piece.work).type
        held = piece.deltas() if self.relative else piece.held
        c = np.moveaxis(measured, -1, 0)
        if self.axis == -1:
            c = c[(slice(None), *piece.box.slices[:-1])][..., None]
        elif self.axis == 0:
            c = c[(slice(None), *piece.box.slices[1:])][:, None]
        total = sum((np.multiply(x, k, dtype=np.float64) for x, k in zip(held, c, strict=True)), 0.0)
        return np.asarray(piece.held[0] + total if self.relative else total, kind)


def _lengths(products: np.ndarray) -> np.ndarray:
    return np.sqrt(np.diagonal(products, axis1=-2, axis2=-1))


def _slerp(cos: np.ndarray, straight: np.ndarray, t: float) -> np.ndarray:
    angle = np.arccos(np.where(straight, 0, np.clip(cos, -1, 1)))
    c = [np.sin(x * angle) / np.sin(angle) for x in (1 - t, t)]
    return np.stack([np.where(straight, line, arc) for line, arc in zip((1 - t, t), c, strict=True)], -1)


def slerp(products: np.ndarray, weights: Sequence[float], options: dict[str, float]) -> np.ndarray:
    """Shoemake, "Animating rotation with quaternion curves" (1985). Nearly parallel and opposite vectors are
    interpolated on a line."""
    length = _lengths(products)
    length = np.where(length > 1e-8, length, 1)
    cos = products[..., 0, 1] / length[..., 0] / length[..., 1]
    return _slerp(cos, np.abs(cos) > 0.9995, weights[0])


def nuslerp(products: np.ndarray, weights: Sequence[float], options: dict[str, float]) -> np.ndarray:
    """Slerp between two differences, or two models, with weights."""
    length = np.maximum(_lengths(products), 1e-7)
    cos = products[..., 0, 1] / length[..., 0] / length[..., 1]
    return _slerp(cos, 1 - np.clip(cos, -1, 1) ** 2 <= 1e-16, weights[1] / sum(weights))


def multislerp(products: np.ndarray, weights: Sequence[float], options: dict[str, float]) -> np.ndarray:
    """Interpolation in the tangent space at the mean direction (Goddard, 2025), in coefficients of the unit vectors."""
    eps, w = options["eps"], np.asarray(weights, np.float64)
    if options["normalize_weights"]:
        w = w / w.sum()
    length = _lengths(products)
    if not length.any():  # as of an array that no model changed
        return length
    units = products / np.outer(length + eps, length + eps)
    norm = math.sqrt(max(w @ units @ w, 0))
    if norm < eps:
        return w if len(w) == 2 else np.full(len(w), np.nan)
    mean = w / norm
    tangent = w - (w @ (units @ mean)) * mean
    step = math.sqrt(max(tangent @ units @ tangent, 0)) + eps
    return (mean * math.cos(step) + tangent * (math.sin(step) / step)) * (w @ length) / (length + eps)


def karcher(products: np.ndarray, weights: Sequence[float], options: dict[str, float]) -> np.ndarray:
    """The Riemannian centre of mass on the sphere (Karcher, 1977), in coefficients of the unit vectors; vectors of no
    length don't count."""
    tol, n = options["tol"], len(products)
    length = _lengths(products)
    valid = length > tol
    if not valid.any():
        return np.zeros(n)
    scale = np.where(valid, length, 1)
    units = np.where(np.outer(valid, valid), products / np.outer(scale, scale), 0)
    alphas = valid / valid.sum()

    def norm(c: np.ndarray) -> float:
        return math.sqrt(max(c @ units @ c, 0))

    first = np.zeros(n)
    first[int(np.argmax(valid))] = 1
    mean = alphas / norm(alphas) if norm(alphas) >= tol else first
    for _ in range(int(options["max_iter"])):
        tangent = np.zeros(n)
        for i in np.flatnonzero(valid):
            cos = float(np.clip(mean @ units[i], -1, 1))
            angle = math.acos(cos)
            if angle < tol:
                continue
            if angle > math.pi - 1e-6:
                return np.full(n, np.nan)  # no single shortest way between opposite directions
            unit = np.zeros(n)
            unit[i] = 1
            tangent += alphas[i] * (angle / math.sin(angle)) * (unit - cos * mean)
        step = norm(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) * (tangent / step)
        if norm(mean) > tol:
            mean = mean / norm(mean)
    return np.where(valid, mean / scale, 0) * length.mean()


def model_stock(products: np.ndarray, weights: Sequence[float], options: dict[str, float]) -> np.ndarray:
    """Jang et al., "Model Stock", arXiv:2403.19522: towards the mean as far as the differences agree."""
    n = products.shape[-1]
    length = _lengths(products)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    each = [products[..., i, j] / np.maximum(length[..., i] * length[..., j], 1e-6) for i, j in pairs]
    cos = np.mean([np.clip(c, -1, 1) for c in each], axis=0)
    below = 1 + (n - 1) * cos
    t = np.where(np.abs(below) < 1e-6, 0, n * cos / np.where(np.abs(below) < 1e-6, 1, below))
    return np.stack([1 - t, *[t / n] * n], -1)


COEFFICIENTS = {f.__name__: f for f in (slerp, nuslerp, multislerp, karcher, model_stock)}
