"""The block interface of sharded arrays, for the packages that move their bytes.

``storage`` saves and loads arrays whose blocks live in several processes, but does not depend on meshes: it uses the
two small protocols below, which ``parallel`` implements. ``Box`` is the geometry that both share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from .array import Array


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangle of an array: ``offset[i] <= index[i] < offset[i] + shape[i]``. Lengths may be zero.

    >>> Box((0, 2), (4, 3)).intersect(Box((2, 0), (4, 4)))
    Box(offset=(2, 2), shape=(2, 2))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers an array of ``shape``."""
        return _whole(tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects this box from the whole array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty. Two 0-d boxes always meet."""
        lo = tuple(map(max, self.offset, other.offset))
        hi = tuple(map(min, self.stop, other.stop))
        if any(b <= a for a, b in zip(lo, hi, strict=True)):
            return None
        return Box(lo, tuple(b - a for a, b in zip(lo, hi, strict=True)))

    def meet(self, other: Box) -> tuple[Box, Box] | None:
        """The common part as elements of this box, and as elements of the other one; None where it is empty."""
        mine, its, shape = [], [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            lo = a if a > b else b
            length = min(a + n, b + m) - lo
            if length <= 0:
                return None
            mine.append(lo - a)
            its.append(lo - b)
            shape.append(length)
        common = tuple(shape)
        return Box(tuple(mine), common), Box(tuple(its), common)

    def within(self, outer: Box) -> Box:
        """The same elements, with offsets counted from the start of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def shifted(self, offset: Sequence[int]) -> Box:
        """The box as far on; the inverse of `within`."""
        return Box(tuple(a + b for a, b in zip(self.offset, offset, strict=True)), self.shape)


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


@runtime_checkable
class BlockSharding(Protocol):
    """How an array is split over the ranks of a :class:`BlockHost` (``meshtape.Sharding`` is one)."""

    @property
    def mesh(self) -> BlockHost: ...

    @property
    def partial(self) -> bool:
        """Whether ranks hold contributions that still have to be reduced."""

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """The block of an array of ``shape`` that ``rank`` holds (perhaps empty). Equal boxes are replicas."""

    def describe(self) -> list[str]:
        """One text a mesh axis, in the order of the mesh's axes: ``["Shard(0)", "Replicate()"]``."""


@runtime_checkable
class BlockHost(Protocol):
    """The holder of the blocks (``meshtape.Mesh`` is one): ranks ``0 … size-1``, spread over one or more processes."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def describe(self) -> dict[str, int]:
        """Axis names and lengths, in order: ``{"data": 2, "model": 4}``."""

    def settle(self, arrays: Sequence[Array]) -> list[Array]:
        """Equal arrays whose values are computed and whose shardings are not partial."""

    def run_on_blocks(
        self,
        fn: Callable[[dict[int, Any], dict[int, list[np.ndarray]]], Any],
        arrays: Sequence[Array],
        payloads: Mapping[int, Any],
    ) -> list[Any]:
        """Call ``fn(payloads, blocks)`` once in each process that hosts a rank of ``payloads``.

        ``fn`` sees the payloads and blocks of the ranks of its own process alone, keyed by rank; ``blocks[rank]`` lists
        that rank's block of each of ``arrays``, in order. ``fn`` is an importable function, payloads and results can be
        pickled (Dask carries them). The blocks are not to be changed. The results come in no particular order; an error
        raised by one process is raised here, when all have ended.
        """

    def create(
        self,
        fn: Callable[[dict[int, Any]], dict[int, list[np.ndarray]]],
        payloads: Mapping[int, Any],
        specs: Sequence[tuple[tuple[int, ...], np.dtype, BlockSharding]],
    ) -> list[Array]:
        """New split arrays with the given (shape, dtype, sharding), whose blocks ``fn`` makes where they will live.

        ``fn(payloads)`` is called once in each process with the payloads of its ranks and returns, for each rank, its
        block of each array, in the order of ``specs``.
        """


def ceil_blocks(n: int, parts: int) -> list[tuple[int, int]]:
    """(start, length) of each block when ``n`` elements are split in ``parts`` by the *ceil* rule.

    Each block has ``ceil(n / parts)`` elements, the last ones fewer or none: the way a regular Zarr chunk grid divides.

    >>> [length for _, length in ceil_blocks(5, 4)]
    [2, 2, 1, 0]
    """
    step = -(-n // parts) if n else 0
    out = []
    for i in range(parts):
        start = min(i * step, n)
        out.append((start, min(step, n - start)))
    return out
