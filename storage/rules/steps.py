"""Steps of key rules: from a list of tensors to a list of tensors, checked by shape and dtype alone.

==============  =================  ==================================================================================
step            tensors            what it does
==============  =================  ==================================================================================
`Concat`        n → 1              one after the other along an axis
`Split`         1 → n              parts along an axis, of given sizes or equal
`Permute`       each               dimensions in another order
`Reshape`       each               another shape, row-major; one length may be -1
`Cast`          each               another dtype; nothing else ever changes one
`Pad`           each               longer along an axis, by a value, the mean of the rows, or noise (vocabularies)
`Slice`         each               a range along an axis
`Interleave`    n → 1              part 0 of each, part 1 of each, … along an axis
`Deinterleave`  1 → n              back
`FuseQKV`       q, k, v → 1        for each group: its query heads, its key head, its value head
`SplitQKV`      1 → q, k, v        back
`FuseFFN`       gate, up → 1       for each tensor-parallel part: gate, up
`SplitFFN`      1 → gate, up       back
`Init`          none → 1           a new array with one value
`Dequantize`    weight, scale → 1  short numbers, less zero points where these come third, times the scales of blocks
==============  =================  ==================================================================================

``apply`` makes lazy tensors (see ``lazy_tensors``) and raises where shapes or dtypes do not fit. ``inverse`` is the
step that undoes ``apply``, given the tensors that it was applied to; `NotInvertible` where there is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays.core.errors import CheckpointDTypeError, CheckpointShapeError, RuleConflict
from .lazy_tensors import Joined, Permuted, Reshaped, Sliced
from .step import NotInvertible, Step, axis_of, expect, the_one


def _sliced(t: Any, axis: int, start: int, stop: int) -> Sliced:
    before, after = t.shape[:axis], t.shape[axis + 1 :]
    return Sliced(t.name, t, (*(0,) * len(before), start, *(0,) * len(after)), (*before, stop - start, *after))


def _joined(tensors: Sequence[Any], axis: int) -> Any:
    first = tensors[0]
    k = axis_of(axis, first)
    rest = (*first.shape[:k], *first.shape[k + 1 :])
    for t in tensors[1:]:
        if len(t.shape) != len(first.shape) or (*t.shape[:k], *t.shape[k + 1 :]) != rest:
            both = f"{first.name!r} of shape {first.shape} and {t.name!r} of shape {t.shape}"
            raise CheckpointShapeError(f"{both} cannot be joined along axis {k}")
        if t.dtype != first.dtype:
            raise CheckpointDTypeError(
                f"{first.name!r} is {first.dtype} and {t.name!r} is {t.dtype}; put cast(...) before they are joined"
            )
    return Joined.of(first.name, tensors, k)


@dataclass(frozen=True, slots=True)
class Concat(Step):
    axis: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        return [_joined(tensors, self.axis)]

    def inverse(self, before: list[Any]) -> Step:
        return Split(self.axis, tuple(t.shape[axis_of(self.axis, t)] for t in before))


@dataclass(frozen=True, slots=True)
class Split(Step):
    """Sizes, or a number of equal parts; without either, one equal part for each target."""

    axis: int = 0
    sizes: tuple[int, ...] | None = None
    parts: int | None = None

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        (t,) = expect(1, tensors, "split")
        k = axis_of(self.axis, t)
        n, sizes = t.shape[k], self.sizes
        if sizes is None:
            parts = self.parts if self.parts is not None else targets
            if parts is None:
                raise RuleConflict("split needs sizes= or parts= where its targets are numbered")
            if parts < 1 or n % parts:
                raise CheckpointShapeError(
                    f"{t.name!r} of shape {t.shape} does not split into {parts} equal parts along axis {k}; give sizes="
                )
            sizes = (n // parts,) * parts
        if sum(sizes) != n or min(sizes, default=0) < 0:
            raise CheckpointShapeError(
                f"{t.name!r} has {n} along axis {k}, the sizes {list(sizes)} add up to {sum(sizes)}"
            )
        stops = itertools.accumulate(sizes)
        return [_sliced(t, k, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]

    def inverse(self, before: list[Any]) -> Step:
        return Concat(self.axis)


@dataclass(frozen=True, slots=True)
class Permute(Step):
    """Dimension i of the result is dimension ``axes[i]``; without axes, all in reverse order."""

    axes: tuple[int, ...] | None = None

    def _axes(self, t: Any) -> tuple[int, ...]:
        n = len(t.shape)
        if self.axes is None:
            return tuple(range(n))[::-1]
        axes = tuple(axis_of(a, t) for a in self.axes)
        if sorted(axes) != list(range(n)):
            raise CheckpointShapeError(f"{t.name!r} has {n} dimensions, permute({list(self.axes)}) names others")
        return axes

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        return [Permuted(t.name, t, self._axes(t)) for t in tensors]

    def inverse(self, before: list[Any]) -> Step:
        if self.axes is None:
            return self
        axes = the_one([self._axes(t) for t in before], "numbers of dimensions")
        return Permute(tuple(axes.index(i) for i in range(len(axes))))


@dataclass(frozen=True, slots=True)
class Reshape(Step):
    shape: tuple[int, ...]

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        return [Reshaped(t.name, t, self._shape(t)) for t in tensors]

    def _shape(self, t: Any) -> tuple[int, ...]:
        size, known = math.prod(t.shape), math.prod(n for n in self.shape if n != -1)
        shape = self.shape
        if -1 in shape and known and size % known == 0:
            shape = tuple(size // known if n == -1 else n for n in shape)
        if self.shape.count(-1) > 1 or min(shape, default=0) < 0 or math.prod(shape) != size:
            raise CheckpointShapeError(f"{t.name!r} of shape {t.shape} cannot be reshaped to {list(self.shape)}")
        return shape

    def inverse(self, before: list[Any]) -> Step:
        ndim = the_one([len(t.shape) for t in before], "numbers of dimensions")
        lengths = [{t.shape[d] for t in before} for d in range(ndim)]
        if sum(len(s) > 1 for s in lengths) > 1 or (
            any(len(s) > 1 for s in lengths) and any(0 in t.shape for t in before)
        ):
            raise NotInvertible("its arrays have different shapes, which one step back cannot restore")
        return Reshape(tuple(s.pop() if len(s) == 1 else -1 for s in lengths))


@dataclass(frozen=True, slots=True)
class Slice(Step):
    axis: int
    start: int
    stop: int

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        out = []
        for t in tensors:
            k = axis_of(self.axis, t)
            if not 0 <= self.start <= self.stop <= t.shape[k]:
                raise CheckpointShapeError(
                    f"{t.name!r} has {t.shape[k]} along axis {k}, not {self.start} to {self.stop}"
                )
            out.append(_sliced(t, k, self.start, self.stop))
        return out

    def inverse(self, before: list[Any]) -> Step:
        n = the_one([t.shape[axis_of(self.axis, t)] for t in before], "lengths")
        if (self.start, self.stop) != (0, n):
            raise NotInvertible(f"slice leaves out a part of axis {self.axis}")
        return self


@dataclass(frozen=True, slots=True)
class Interleave(Step):
    parts: int
    axis: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        if self.parts < 1:
            raise RuleConflict(f"interleave needs at least one part, got {self.parts}")
        pieces = []
        for i in range(self.parts):
            for t in tensors:
                k = axis_of(self.axis, t)
                n = t.shape[k] // self.parts
                if n * self.parts != t.shape[k]:
                    raise CheckpointShapeError(
                        f"{t.name!r} of shape {t.shape} has no {self.parts} equal parts along axis {k}"
                    )
                pieces.append(_sliced(t, k, i * n, (i + 1) * n))
        return [_joined(pieces, self.axis)]

    def inverse(self, before: list[Any]) -> Step:
        return Deinterleave(self.parts, self.axis, tuple(t.shape[axis_of(self.axis, t)] for t in before))


@dataclass(frozen=True, slots=True)
class Deinterleave(Step):
    """``sizes`` are the whole lengths of the results."""

    parts: int
    axis: int
    sizes: tuple[int, ...]

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        (t,) = expect(1, tensors, "deinterleave")
        k = axis_of(self.axis, t)
        if sum(self.sizes) != t.shape[k] or self.parts < 1 or any(s % self.parts for s in self.sizes):
            raise CheckpointShapeError(
                f"{t.name!r} has {t.shape[k]} along axis {k}, which is not {self.parts} parts of {list(self.sizes)}"
            )
        out, at, block = [], 0, t.shape[k] // self.parts
        for size in self.sizes:
            n = size // self.parts
            out.append(_joined([_sliced(t, k, i * block + at, i * block + at + n) for i in range(self.parts)], k))
            at += n
        return out

    def inverse(self, before: list[Any]) -> Step:
        return Interleave(self.parts, self.axis)


@dataclass(frozen=True, slots=True)
class FuseQKV(Step):
    heads: int
    groups: int
    axis: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        _check_heads(self.heads, self.groups)
        expect(3, tensors, "fuse_qkv")
        q, k, v = (t.shape[axis_of(self.axis, t)] for t in tensors)
        if q % self.heads or k != q // self.heads * self.groups or v != k:
            raise CheckpointShapeError(
                f"{tensors[0].name!r}: q, k and v have {q}, {k} and {v} along axis {self.axis}, which are not "
                f"{self.heads} query heads and {self.groups} key and value heads of one size"
            )
        return Interleave(self.groups, self.axis).apply(tensors, targets)

    def inverse(self, before: list[Any]) -> Step:
        return SplitQKV(self.heads, self.groups, self.axis)


@dataclass(frozen=True, slots=True)
class SplitQKV(Step):
    heads: int
    groups: int
    axis: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        _check_heads(self.heads, self.groups)
        (t,) = expect(1, tensors, "split_qkv")
        n, units = t.shape[axis_of(self.axis, t)], self.heads + 2 * self.groups
        if n % units:
            raise CheckpointShapeError(f"{t.name!r} of shape {t.shape} is not {units} heads along axis {self.axis}")
        sizes = (n // units * self.heads, n // units * self.groups, n // units * self.groups)
        return Deinterleave(self.groups, self.axis, sizes).apply(tensors, targets)

    def inverse(self, before: list[Any]) -> Step:
        return FuseQKV(self.heads, self.groups, self.axis)


def _check_heads(heads: int, groups: int) -> None:
    if heads < 1 or groups < 1 or heads % groups:
        raise CheckpointShapeError(f"{heads} query heads cannot be dealt to {groups} groups")


@dataclass(frozen=True, slots=True)
class FuseFFN(Step):
    parts: int = 1
    axis: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        expect(2, tensors, "fuse_ffn")
        if tensors[0].shape != tensors[1].shape:
            raise CheckpointShapeError(f"gate has shape {tensors[0].shape}, up {tensors[1].shape}")
        return Interleave(self.parts, self.axis).apply(tensors, targets)

    def inverse(self, before: list[Any]) -> Step:
        return SplitFFN(self.parts, self.axis)


@dataclass(frozen=True, slots=True)
class SplitFFN(Step):
    parts: int = 1
    axis: int = 0

    def apply(self, tensors: list[Any], targets: int | None) -> list[Any]:
        (t,) = expect(1, tensors, "split_ffn")
        half = t.shape[axis_of(self.axis, t)] // 2
        return Deinterleave(self.parts, self.axis, (half, half)).apply(tensors, targets)

    def inverse(self, before: list[Any]) -> Step:
        return FuseFFN(self.parts, self.axis)
