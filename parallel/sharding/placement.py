"""Placements and shardings: immutable values that describe the blocks of each rank.

A *placement* says how an array is laid out along one axis of a mesh. A *sharding* is a mesh and a placement for each of
its axes. Where several axes split one dimension, their order matters: the first named is the outer one. Blocks follow
the ceil rule over all ranks that split a dimension together: 5 elements over 4 ranks are 2, 2, 1 and 0.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import ml_dtypes
import numpy as np

from ...arrays.core.blocks import Box
from ...arrays.core.errors import MeshError, ShardingConflict
from ...arrays.core.formatting import DRAWINGS
from .mesh_protocol import MeshProtocol

REDUCE_OPS = ("sum", "prod", "max", "min", "any", "all")


@dataclass(frozen=True, slots=True)
class Shard:
    """The array is split along dimension ``dim`` over the ranks of the mesh axis."""

    dim: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            if isinstance(self.dim, bool) or not isinstance(self.dim, SupportsIndex):
                raise MeshError(f"Shard takes the number of a dimension, got {self.dim!r}")
            object.__setattr__(self, "dim", operator.index(self.dim))

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of the mesh axis holds the same elements."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank of the mesh axis holds a contribution; the value is their reduction by ``op``.

    ``op`` is ``"sum"``, ``"prod"``, ``"max"``, ``"min"``, ``"any"`` or ``"all"``; the last two take booleans, and
    ``"prod"`` no complex numbers.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise MeshError(f"Partial takes one of {', '.join(REDUCE_OPS)}, got {self.op!r}")

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


Placement = Shard | Replicate | Partial


def parse_placement(text: str) -> Placement:
    """Inverse of ``repr``.

    >>> parse_placement("Partial('max')")
    Partial('max')
    """
    name, _, rest = text.partition("(")
    inner = rest.removesuffix(")").strip("'\" ")
    if rest.endswith(")"):
        if name == "Replicate" and not inner:
            return Replicate()
        if name == "Shard" and inner.lstrip("-").isdecimal():
            return Shard(int(inner))
        if name == "Partial":
            return Partial(inner or "sum")
    raise MeshError(f"{text!r} is no placement: write Shard(dim), Replicate() or Partial('op')")


@dataclass(frozen=True, slots=True)
class Layout:
    """A sharding without its mesh, in one canonical form.

    ``shards`` lists ``(dimension, mesh axes from outer to inner)`` for split dimensions in order, ``partials`` lists
    ``(mesh axis, reduction)``. All other axes replicate.
    """

    shards: tuple[tuple[int, tuple[int, ...]], ...] = ()
    partials: tuple[tuple[int, str], ...] = ()

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Mesh axes that split a dimension, outer first."""
        for d, axes in self.shards:
            if d == dim:
                return axes
        return ()

    def placement(self, axis: int) -> Placement:
        """The placement along a mesh axis."""
        for d, axes in self.shards:
            if axis in axes:
                return Shard(d)
        for a, op in self.partials:
            if a == axis:
                return Partial(op)
        return Replicate()

    def is_cut_to(self, other: Layout) -> bool:
        """Whether each rank can cut its block in the other layout from the one that it has, without reductions or
        gathers."""
        return self.partials == other.partials and all(other.axes_of(d) == axes for d, axes in self.shards)

    def reduced(self) -> Layout:
        """The same blocks with nothing left to reduce."""
        return Layout(self.shards)

    def on_many(self, sizes: Sequence[int]) -> Layout:
        """The same blocks, without mesh axes of one rank."""
        shards = {d: [a for a in axes if sizes[a] > 1] for d, axes in self.shards}
        return make_layout(shards, {a: op for a, op in self.partials if sizes[a] > 1})


REPLICATED = Layout()


def make_layout(shards: Mapping[int, Sequence[int]], partials: Mapping[int, str] | None = None) -> Layout:
    return Layout(
        tuple((d, tuple(axes)) for d, axes in sorted(shards.items()) if axes),
        tuple(sorted((partials or {}).items())),
    )


@functools.cache
def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of rank numbers along each mesh axis.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(sizes[a + 1 :]) for a in range(len(sizes)))


def group_of(sizes: tuple[int, ...], axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The group of :func:`~meshtape.parallel.resharding.collective_plans.groups_of` that a rank is in.

    >>> group_of((2, 3), (1,), 4)
    (3, 4, 5)
    """
    strides = strides_of(sizes)
    first = rank - sum(rank // strides[a] % sizes[a] * strides[a] for a in axes)
    places = itertools.product(*(range(0, sizes[a] * strides[a], strides[a]) for a in axes))
    return tuple(first + sum(p) for p in places)


def block_box(layout: Layout, sizes: tuple[int, ...], shape: Sequence[int], rank: int) -> Box:
    """The block of an array of ``shape`` that ``rank`` of a mesh of lengths ``sizes`` holds: that of
    ``ceil_blocks``."""
    if not layout.shards:
        return Box.whole(shape)
    strides = strides_of(sizes)
    offset, lengths = [0] * len(shape), list(shape)
    for dim, axes in layout.shards:
        index, parts = 0, 1
        for a in axes:
            index = index * sizes[a] + rank // strides[a] % sizes[a]
            parts *= sizes[a]
        n = shape[dim]
        step = -(-n // parts)
        offset[dim] = start = min(index * step, n)
        lengths[dim] = min(step, n - start)
    return Box(tuple(offset), tuple(lengths))


def dims_text(shape: Sequence[int], layout: Layout, names: Sequence[str]) -> str:
    """Lengths, each with the axes that split it: ``8@data,4``."""
    axes = [layout.axes_of(d) for d in range(len(shape))]
    return ",".join(f"{n}@{'+'.join(names[a] for a in s)}" if s else str(n) for n, s in zip(shape, axes, strict=True))


class Sharding:
    """A mesh, and the placement of an array along each of its axes.

    Parameters
    ----------
    mesh
        The mesh.
    placements
        By axis name; axes that are left out replicate. Where several axes shard one dimension, the one named first is
        the outer one.

    Examples
    --------
    >>> import meshtape as mt
    >>> mesh = mt.Mesh({"data": 2, "model": 2})
    >>> mt.Sharding(mesh, data=mt.Shard(0))
    Sharding(data=Shard(0), model=Replicate())
    """

    __slots__ = ("layout", "mesh")

    def __init__(self, mesh: MeshProtocol, /, **placements: Placement) -> None:
        if not hasattr(mesh, "axis"):
            raise MeshError(f"a sharding is made of a Mesh and placements, got {mesh!r}")
        shards: dict[int, list[int]] = {}
        partials: dict[int, str] = {}
        for name, p in placements.items():
            axis = mesh.axis(name)
            if isinstance(p, Shard):
                shards.setdefault(p.dim, []).append(axis)
            elif isinstance(p, Partial):
                partials[axis] = p.op
            elif not isinstance(p, Replicate):
                raise MeshError(
                    f"the placement of axis {name!r} must be Shard(dim), Replicate() or Partial(op), got {p!r}"
                )
        self.mesh = mesh
        self.layout = make_layout(shards, partials)

    @classmethod
    def of(cls, mesh: MeshProtocol, layout: Layout) -> Sharding:
        """A sharding from a layout in canonical form."""
        s = cls.__new__(cls)
        s.mesh, s.layout = mesh, layout
        return s

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement along each mesh axis, by name, in the mesh's order."""
        return {name: self.layout.placement(i) for i, name in enumerate(self.mesh.names)}

    @property
    def partial(self) -> bool:
        """Whether ranks hold contributions that still have to be reduced."""
        return bool(self.layout.partials)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """The block of an array of ``shape`` that ``rank`` holds (perhaps empty)."""
        return block_box(self.layout, self.mesh.sizes, shape, rank)

    def block_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the largest block."""
        return self.box(shape, 0).shape

    def describe(self) -> list[str]:
        """One text a mesh axis, in the mesh's order."""
        return [repr(p) for p in self.placements.values()]

    def with_placements(self, **placements: Placement) -> Sharding:
        """The same sharding, with other placements along the named axes."""
        kept = {n: p for n, p in self.placements.items() if n not in placements}
        for n in placements:
            self.mesh.axis(n)
        # Axes that stay keep their order; the named ones come last, hence innermost.
        order = [self.mesh.names[a] for _, axes in self.layout.shards for a in axes]
        first = {n: kept.pop(n) for n in order if n in kept}
        return Sharding(self.mesh, **first, **kept, **placements)

    def check(self, shape: Sequence[int], dtype: np.dtype) -> Sharding:
        """Itself. Raises :class:`ShardingConflict` where it does not fit an array of this shape and dtype."""
        fixed: dict[int, tuple[int, ...]] = {}
        for dim, axes in self.layout.shards:
            if not -len(shape) <= dim < len(shape):
                raise ShardingConflict(f"{self} splits dimension {dim} of an array of shape {tuple(shape)}")
            if dim % len(shape) in fixed:
                raise ShardingConflict(
                    f"{self} calls one dimension of an array of shape {tuple(shape)} both {dim % len(shape)} and "
                    f"{dim % len(shape) - len(shape)}: name it one way, so that the first named axis is the outer one"
                )
            fixed[dim % len(shape)] = axes
        for axis, op in self.layout.partials:
            if op in ("any", "all") and dtype.kind != "b":
                raise ShardingConflict(
                    f"{self} of {dtype.name}: {op!r} takes booleans, so compare the numbers first (x != 0)"
                )
            if op == "prod" and dtype.kind == "c":
                name = self.mesh.names[axis]
                raise ShardingConflict(
                    f"{self} of {dtype.name}: a product of complex numbers cannot stay pending, as times 1 an infinite "
                    f"one is NaN; replicate it, in mt.shard_map with mt.all_reduce(x, {name!r}, op='prod')"
                )
        return Sharding.of(self.mesh, make_layout(fixed, dict(self.layout.partials)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharding) and self.mesh is other.mesh and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((id(self.mesh), self.layout))

    def __repr__(self) -> str:
        return f"Sharding({', '.join(f'{n}={p!r}' for n, p in self.placements.items())})"

    def _repr_html_(self) -> str:
        return DRAWINGS["sharding"](self)

    def text(self, shape: Sequence[int], dtype: np.dtype) -> str:
        """Shape with shardings, as in ``float32[8@data,4]{Partial('sum'):model}``."""
        dims = dims_text(shape, self.layout, self.mesh.names)
        partial = ",".join(f"Partial({op!r}):{self.mesh.names[a]}" for a, op in self.layout.partials)
        return f"{dtype.name}[{dims}]" + (f"{{{partial}}}" if partial else "")


def identity_of(op: str, dtype: np.dtype) -> object:
    """The identity of a reduction, for ranks without elements. A sum of floats has -0.0, as -0.0 + 0.0 is 0.0."""
    if op == "sum":
        return 0 if dtype.kind in "biu" else complex(-0.0, -0.0) if dtype.kind == "c" else -0.0
    if op == "any":
        return 0
    if op in ("prod", "all"):
        return 1
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min if op == "max" else info.max
    if dtype.kind == "b":
        return op == "min"
    if dtype.kind == "c":  # in the order of their real parts, and then of the others
        return complex(-math.inf, -math.inf) if op == "max" else complex(math.inf, math.inf)
    if dtype.kind == "V" and not has_infinity(dtype):
        info = ml_dtypes.finfo(dtype)
        return info.min if op == "max" else info.max
    return -math.inf if op == "max" else math.inf


def has_infinity(dtype: np.dtype) -> bool:
    """Whether a floating dtype has infinities; ``float8_e4m3fn`` has only NaN."""
    return bool(np.isinf(np.asarray(math.inf).astype(dtype)))


REDUCERS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
}
"""NumPy ufunc that joins two contributions."""
