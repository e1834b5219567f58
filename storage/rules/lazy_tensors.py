"""Lazy tensors, made from stored ones box by box: key rules compile to them.

Each has the interface of a stored tensor (``shape``, ``dtype``, ``chunk``, ``only``, ``planned``, ``jobs``), so that
load, merge, convert and reshard treat both alike. A rule followed by a reshard never needs a whole tensor: a box of the
result asks its sources for the boxes it is made of, which are read straight into its memory wherever a view can express
the change. All are small picklable values.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import CheckpointError
from ..base.scratch import keep_freed
from ..format.chunk_grid import runs, windows
from ..readers.reading import Job
from ..readers.shared import KEPT, evaluation, is_evaluating, jobs_of, once
from ..readers.tensor import StoredTensor, read_into, rows_of
from .casting import cast
from .labels import Labels, Reader, given

_SOURCES = frozenset(["source", "parts", "scale", "zero"])
_PIECE = 8 << 20  # bytes that a cast holds at once
T = TypeVar("T")


def of_source(name: str) -> Any:
    """A property that is the one of the source."""
    return property(lambda self: getattr(self.source, name))


class DerivedTensor:
    """Base of the tensors derived from others. ``check`` checks the sources.

    One with a single ``source`` says by ``needs`` which box of it makes a box.
    """

    __slots__ = ()
    casts: ClassVar[bool] = False  # itself, not its sources
    how: ClassVar[str] = "made of other arrays when it is read"
    per_element: Any = 8  # bytes that ``_read`` holds for an element
    source: Any

    def needs(self, box: Box) -> Box:
        return box

    def sources(self) -> tuple[Any, ...]:
        return (self.source,)

    def only(self, box: Box) -> Any:
        return replace(self, source=once("only", self.source, self.needs(box))) if box.size else self  # type: ignore[type-var]

    def planned(self, box: Box) -> int:
        return once("planned", self.source, self.needs(box), again=0) if box.size else 0

    def pieces(self, box: Box, kept: int) -> Iterator[Box]:
        """The parts of a box that are read one at a time, of each element of which an evaluation keeps some bytes."""
        unit = max(self.per_element, kept * _PIECE // KEPT)
        return windows(box.shape, tuple(max(c, 1) for c in self.chunk), unit, _PIECE)  # type: ignore[attr-defined]

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        """Calls of ``_read`` that hold a piece each."""
        keep_freed()
        uses, kept = ({}, 0) if is_evaluating() else _uses(self)

        def read(part: Box) -> int:
            return self._read(part.shifted(box.offset), out[(*part.slices, ...)])  # type: ignore[attr-defined, no-any-return]

        for part in self.pieces(box, kept):
            yield lambda part=part: evaluation(uses, lambda: read(part))

    def evaluated(self, call: Callable[[], T]) -> T:
        """A call as an `evaluation` of this tensor, which may be a part of another's."""
        return evaluation(_uses(self)[0], call)

    @property
    def readers(self) -> int:
        return max((t.readers for t in leaves(self)), default=1)

    @property
    def absent(self) -> set[str]:
        return set().union(*(getattr(t, "absent", ()) for t in leaves(self)))

    def check(self) -> None:
        for t in leaves(self):
            if hasattr(t, "check"):
                t.check()

    def labels(self, of: Reader) -> Labels:
        """What other writers said of the sources that is true of it, too."""
        return Labels()

    @property
    def said(self) -> str:
        """The same as of a stored tensor; `CheckpointDTypeError` where a cast loses a fill value."""
        return labels_of(self).text(self.name, len(self.shape))  # type: ignore[attr-defined]


def labels_of(tensor: Any, of: Reader = given) -> Labels:
    """The labels of a tensor; ``of`` gives those of stored ones."""
    return once("labels", tensor, of) if isinstance(tensor, DerivedTensor) else of(tensor)


class OfParts(DerivedTensor):
    """Base of those made of ``parts``, of each of which a box needs the same box."""

    __slots__ = ()
    parts: tuple[Any, ...]

    def sources(self) -> tuple[Any, ...]:
        return self.parts

    def only(self, box: Box) -> Any:
        if not box.size:
            return self
        return replace(self, parts=tuple(once("only", p, self.needs(box)) for p in self.parts))  # type: ignore[type-var]

    def planned(self, box: Box) -> int:
        return sum(once("planned", p, self.needs(box), again=0) for p in self.parts) if box.size else 0


class Recipes:
    """Digests of the derivations of tensors: equal digests read the same bytes of the same files."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # a tensor may be the source of many

    def of(self, tensor: Any) -> str:
        found = self._known.get(id(tensor))
        if found is None:
            # Tensors of several checkpoints may have one name, so each says where it lies.
            told = [type(tensor).__name__, tensor.name, str(getattr(tensor, "root", getattr(tensor, "path", "")))]
            if isinstance(tensor, DerivedTensor):
                told += [str(getattr(tensor, f.name)) for f in fields(tensor) if f.name not in _SOURCES]
                told += [self.of(s) for s in tensor.sources()]
            found = self._known[id(tensor)] = hashlib.sha256("\0".join(told).encode("utf-8", "replace")).hexdigest()
        return found


def with_leaves(tensor: Any, change: Callable[[Any], Any]) -> Any:
    """A tensor whose stored sources are changed, each once."""
    known: dict[int, Any] = {}

    def changed(t: Any) -> Any:
        if id(t) not in known:
            known[id(t)] = made(t) if isinstance(t, DerivedTensor) else None if t is None else change(t)
        return known[id(t)]

    def made(t: DerivedTensor) -> Any:
        held = {f.name: getattr(t, f.name) for f in fields(t) if f.name in _SOURCES}  # type: ignore[arg-type]
        new = {n: tuple(map(changed, x)) if n == "parts" else changed(x) for n, x in held.items()}
        return replace(t, **new) if new else t  # type: ignore[type-var]

    return changed(tensor)


def every(tensor: Any, stop: Container[int] = ()) -> list[Any]:
    """A tensor and all that it is made of, each once. Those whose ids are in ``stop`` are looked at no further."""
    found, left = dict[int, Any](), [tensor]
    while left:
        t = left.pop()
        if id(t) not in found:
            found[id(t)] = t
            left += reversed(t.sources() if isinstance(t, DerivedTensor) and id(t) not in stop else ())
    return list(found.values())


def leaves(tensor: Any) -> list[Any]:
    """The stored sources of a tensor, each once."""
    return [t for t in every(tensor) if not isinstance(t, DerivedTensor)]


def _uses(tensor: DerivedTensor) -> tuple[dict[int, int], int]:
    """(how often others are made of each source of a tensor, by its id, where it is several times; the bytes of an
    element of all of these)."""
    sources = [s for t in every(tensor) if isinstance(t, DerivedTensor) for s in t.sources()]
    counts = Counter(map(id, sources))
    shared = {id(s): s for s in sources if counts[id(s)] > 1}
    return {key: counts[key] for key in shared}, sum(s.dtype.itemsize for s in shared.values())


@dataclass(frozen=True, slots=True)
class InMemoryTensor:
    """An array in memory, with the interface of a stored tensor."""

    name: str
    array: np.ndarray
    how: ClassVar[str] = "an array in memory"

    readers: ClassVar[int] = 1
    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    chunk = property(lambda self: rows_of(self.array.shape))

    def only(self, box: Box) -> InMemoryTensor:
        return self

    def planned(self, box: Box) -> int:
        return 0

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        def copy() -> int:
            out[...] = self.array[(*box.slices, ...)]
            return 0

        yield copy


@dataclass(frozen=True, slots=True)
class Filled(DerivedTensor):
    """A tensor of one repeated value."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    value: float | bool = 0

    chunk = property(lambda self: rows_of(self.shape))

    def sources(self) -> tuple[Any, ...]:
        return ()

    def only(self, box: Box) -> Filled:
        return self

    def planned(self, box: Box) -> int:
        return 0

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        def fill() -> int:
            out[...] = self.value
            return 0

        if box.size:
            yield fill


@dataclass(frozen=True, slots=True)
class Sliced(DerivedTensor):
    """The part of a tensor that starts at ``start``."""

    name: str
    source: StoredTensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    dtype, chunk = of_source("dtype"), of_source("chunk")

    def needs(self, box: Box) -> Box:
        return box.shifted(self.start)

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        if box.size:
            yield from jobs_of(self.source, self.needs(box), out)

    def labels(self, of: Reader) -> Labels:
        return labels_of(self.source, of).sliced(self.start, self.source.shape, self.shape)


def casts(tensor: Any) -> bool:
    """Whether reading a tensor may lose values (see ``casting``)."""
    return any(t.casts for t in every(tensor) if isinstance(t, DerivedTensor))


def renamed(name: str, tensor: Any) -> Sliced:
    """All of a tensor under a name of its own: readers tell arrays apart by name."""
    shape = tuple(tensor.shape)
    return Sliced(name, tensor, (0,) * len(shape), shape)


def whole_of(tensor: Any) -> Any:
    """The tensor without slices that keep all of it, which change only its name."""
    while isinstance(tensor, Sliced) and not any(tensor.start) and tensor.shape == tensor.source.shape:
        tensor = tensor.source
    return tensor


@dataclass(frozen=True, slots=True)
class Joined(DerivedTensor):
    """Tensors one after the other along an axis. A part that is not needed any more (see ``only``) is None."""

    name: str
    parts: tuple[StoredTensor | None, ...]
    starts: tuple[int, ...]
    axis: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, name: str, parts: Sequence[StoredTensor], axis: int) -> Joined:
        """Of parts whose other dimensions and dtypes are known to agree."""
        lengths = [p.shape[axis] for p in parts]
        shape = list(parts[0].shape)
        shape[axis] = sum(lengths)
        starts = tuple(itertools.accumulate(lengths[:-1], initial=0))
        return cls(name, tuple(parts), starts, axis, tuple(shape), parts[0].dtype)

    def sources(self) -> tuple[Any, ...]:
        return tuple(p for p in self.parts if p is not None)

    @property
    def chunk(self) -> tuple[int, ...]:
        left = self.sources()
        return left[0].chunk if left else self.shape

    def _boxes(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """(number of a part, the box of it that is wanted, the place of that in ``box``)."""
        k = self.axis
        ends = (*self.starts[1:], self.shape[k])
        for i, (start, end) in enumerate(zip(self.starts, ends, strict=True)):
            a, b = max(start, box.offset[k]), min(end, box.stop[k])
            if a < b and box.size:
                shape = (*box.shape[:k], b - a, *box.shape[k + 1 :])
                there = Box((*box.offset[:k], a - start, *box.offset[k + 1 :]), shape)
                here = Box(tuple(a - box.offset[k] if d == k else 0 for d in range(len(shape))), shape)
                yield i, there, here

    def only(self, box: Box) -> Joined:
        needed = {i: there for i, there, _ in self._boxes(box)}
        parts = tuple(once("only", p, needed[i]) if i in needed else None for i, p in enumerate(self.parts))
        return replace(self, parts=parts)

    def planned(self, box: Box) -> int:
        return sum(once("planned", self.parts[i], there, again=0) for i, there, _ in self._boxes(box))

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        for i, there, here in self._boxes(box):
            yield from jobs_of(self.parts[i], there, out[here.slices])

    def labels(self, of: Reader) -> Labels:
        silent = DerivedTensor.labels  # of new rows
        said = [labels_of(p, of) for p in self.sources() if getattr(type(p), "labels", None) is not silent]
        held = Labels.agreed(self.name, said)
        return replace(held, dims=tuple(None if i == self.axis else d for i, d in enumerate(held.dims)))


@dataclass(frozen=True, slots=True)
class Permuted(DerivedTensor):
    """Dimensions in another order: dimension i of the result is dimension ``axes[i]`` of the source."""

    name: str
    source: StoredTensor
    axes: tuple[int, ...]

    dtype = of_source("dtype")
    shape = property(lambda self: self._turned(self.source.shape))
    chunk = property(lambda self: self._turned(self.source.chunk))

    def _turned(self, of: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([of[a] for a in self.axes])

    def _inverse(self) -> tuple[int, ...]:
        return tuple(self.axes.index(i) for i in range(len(self.axes)))

    def needs(self, box: Box) -> Box:
        inverse = self._inverse()
        return Box(tuple(box.offset[i] for i in inverse), tuple(box.shape[i] for i in inverse))

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        yield from jobs_of(self.source, self.needs(box), out.transpose(self._inverse()))

    def labels(self, of: Reader) -> Labels:
        held = labels_of(self.source, of)
        return replace(held, dims=tuple(held.dims[a] for a in self.axes) if held.dims else ())


@dataclass(frozen=True, slots=True)
class Converted(DerivedTensor):
    """Another dtype, by NumPy's rules; lost values are counted (see ``casting``). ``allowed``: losses are accepted."""

    name: str
    source: StoredTensor
    dtype: np.dtype
    allowed: bool = False
    casts: ClassVar[bool] = True

    shape, chunk = of_source("shape"), of_source("chunk")
    per_element = property(lambda self: self.source.dtype.itemsize)

    def _read(self, box: Box, out: np.ndarray) -> int:
        held, nbytes = read_into(self.source, box)
        out[...] = cast(self.name, held, self.dtype, box.offset, self.allowed)
        return nbytes

    def labels(self, of: Reader) -> Labels:
        return labels_of(self.source, of).cast(self.name, self.source.dtype, self.dtype)


@dataclass(frozen=True, slots=True)
class Agreed(OfParts):
    """A tensor that several sources must hold alike, such as the step count of parameters that a rule joins."""

    name: str
    parts: tuple[StoredTensor, ...]

    source = property(lambda self: self.parts[0])
    shape, dtype, chunk = of_source("shape"), of_source("dtype"), of_source("chunk")
    per_element = property(lambda self: 2 * self.dtype.itemsize)

    def _read(self, box: Box, out: np.ndarray) -> int:
        nbytes = read_into(self.source, box, out)[1]
        for other in self.parts[1:]:
            held, n = read_into(other, box)
            nbytes += n
            if held.tobytes() != out.tobytes():
                raise self._differ(other, out, held)
        return nbytes

    def _differ(self, other: Any, ours: np.ndarray, theirs: np.ndarray) -> CheckpointError:
        return CheckpointError(
            f"{self.name!r} is joined from sources that must agree, but {self.parts[0].name!r} holds {ours} and "
            f"{other.name!r} holds {theirs}; drop them, or leave one with a rule of its own"
        )

    def labels(self, of: Reader) -> Labels:
        return Labels.agreed(self.name, [labels_of(p, of) for p in self.parts])


def groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[slice, slice]]:
    """Dimensions of two shapes of one size that can be matched: the smallest groups with equal products.

    >>> groups((8, 3, 4), (2, 4, 12))
    [(slice(0, 1, None), slice(0, 2, None)), (slice(1, 3, None), slice(2, 3, None))]
    """
    out, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        i0, j0, m, n = i, j, 1, 1
        if i < len(a):
            m, i = a[i], i + 1
        if j < len(b):
            n, j = b[j], j + 1
        while m != n:
            if m < n:
                m, i = m * a[i], i + 1
            else:
                n, j = n * b[j], j + 1
        out.append((slice(i0, i), slice(j0, j)))
    return out


def rectangles(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """A range of the flat array as boxes, in order; at most two for each dimension and one more.

    >>> [(b.offset, b.shape) for b in rectangles(5, 13, (4, 6))]
    [((0, 5), (1, 1)), ((1, 0), (1, 6)), ((2, 0), (1, 1))]
    >>> list(rectangles(5, 5, (5, 5)))
    []
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, head = divmod(start, row)
    if head:
        end = min(stop, (first + 1) * row)
        for b in rectangles(head, end - first * row, inner):
            yield Box((first, *b.offset), (1, *b.shape))
        start, first = end, first + 1
    last = stop // row
    if last > first:
        yield Box((first, *([0] * len(inner))), (last - first, *inner))
        start = last * row
    if start < stop:
        for b in rectangles(0, stop - start, inner):
            yield Box((last, *b.offset), (1, *b.shape))


@dataclass(frozen=True, slots=True)
class Reshaped(DerivedTensor):
    """The same elements in row-major order under another shape."""

    name: str
    source: StoredTensor
    shape: tuple[int, ...]

    dtype = of_source("dtype")
    chunk = property(lambda self: rows_of(self.shape))

    def _pieces(self, box: Box) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """(box of the source, its place in ``box`` with one flat dimension for each group)."""
        choices = []
        for there, here in groups(self.source.shape, self.shape):
            sub, found = self.source.shape[there], []
            for inner, outer, length in runs(Box(box.offset[here], box.shape[here]), self.shape[here]):
                for part in rectangles(outer, outer + length, sub):
                    found.append((part, slice(inner, inner + part.size)))
                    inner += part.size
            choices.append(found)
        for chosen in itertools.product(*choices):
            offset = tuple(n for part, _ in chosen for n in part.offset)
            yield Box(offset, tuple(n for part, _ in chosen for n in part.shape)), tuple(s for _, s in chosen)

    def needs(self, box: Box) -> Box:
        pieces = [there for there, _ in self._pieces(box)]
        lo = tuple(min(p.offset[d] for p in pieces) for d in range(len(self.source.shape)))
        return Box(lo, tuple(max(p.stop[d] for p in pieces) - a for d, a in enumerate(lo)))

    def planned(self, box: Box) -> int:
        return sum(once("planned", self.source, there, again=0) for there, _ in self._pieces(box)) if box.size else 0

    def jobs(self, box: Box, out: np.ndarray) -> Iterator[Job]:
        if not box.size:
            return
        flat = [math.prod(box.shape[here]) for _, here in groups(self.source.shape, self.shape)]
        try:
            target = np.reshape(out, flat, copy=False)
        except ValueError:  # the memory has gaps where the flat dimensions would go on
            yield lambda: self._read(box, out)
            return
        for there, place in self._pieces(box):
            # Splitting a dimension is always a view.
            yield from jobs_of(self.source, there, np.reshape(target[(*place, ...)], there.shape, copy=False))

    def _read(self, box: Box, out: np.ndarray) -> int:
        held, nbytes = read_into(self, box)
        out[...] = held
        return nbytes

    def labels(self, of: Reader) -> Labels:
        return replace(labels_of(self.source, of), dims=())
