"""Shardings as plain data: a mesh is its axes, a sharding says which dimension each axis splits. No ranks needed.

>>> AxisLayout.of({"data": 2, "model": 4}, {"model": 1}, (6, 10), "w").describe()
['Replicate()', 'Shard(1)']
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ...arrays.core.blocks import BlockSharding, Box, ceil_blocks
from ...arrays.core.errors import CheckpointError, CheckpointKeyError, ReshardError
from ...arrays.core.formatting import some
from ..base.names import matching, patterns_of

T = TypeVar("T", bound=Any)
_SHARD = re.compile(r"\AShard\((-?\d+)\)\Z")


def by_mesh(held: Iterable[T]) -> list[tuple[Any, list[T]]]:
    """(mesh, those of it) of things with a ``sharding``; those of no mesh are left out."""
    groups: list[tuple[Any, list[T]]] = []
    for x in held:
        if x.sharding is None:
            continue
        mesh = x.sharding.mesh
        group = next((g for m, g in groups if m is mesh or m == mesh), None)
        if group is None:
            groups.append((mesh, group := []))
        group.append(x)
    return groups


@dataclass(frozen=True)
class AxisLayout:
    """Axes of a mesh, in order, and for each the dimension that it splits or None."""

    axes: tuple[tuple[str, int], ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(
        cls, mesh: Mapping[str, int], placements: Mapping[str, Any], shape: tuple[int, ...], name: str
    ) -> AxisLayout:
        """Checked: ``placements`` maps an axis to a dimension, `Shard(1)`, `Replicate()`, a text of these, or None."""
        for axis in placements:
            if axis not in mesh:
                raise ReshardError(f"{name}: the mesh {dict(mesh)} has no axis {axis!r}")
        dims: list[int | None] = []
        for axis in mesh:
            given = placements.get(axis)
            if given is not None and type(given) is not int:
                given = str(given)  # of `mt.Shard(1)`, too
                m = _SHARD.match(given)
                if m is None and given not in ("Replicate()", "Replicate"):
                    raise ReshardError(
                        f"{name}: {given!r} is no placement; say a dimension, 'Shard(1)' or 'Replicate()'"
                    )
                given = int(m[1]) if m else None
            if given is not None and (type(given) is not int or not -len(shape) <= given < len(shape)):
                raise ReshardError(
                    f"{name}: axis {axis!r} cannot split dimension {given!r} of an array of shape {shape}"
                )
            dims.append(None if given is None else given % len(shape))
        return cls(tuple(mesh.items()), tuple(dims))

    @property
    def partial(self) -> bool:
        return False

    def boxes(self, shape: tuple[int, ...]) -> list[Box]:
        """The distinct blocks of an array. Axes that split one dimension count as one long axis."""
        choices = []
        for d, n in enumerate(shape):
            parts = math.prod(count for (_, count), dim in zip(self.axes, self.dims, strict=True) if dim == d)
            choices.append(ceil_blocks(n, parts))
        return sorted({Box(tuple(s for s, _ in c), tuple(n for _, n in c)) for c in itertools.product(*choices)})

    def spans(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """For each dimension the first index and the length of each rank's block, (2, ranks); ranks in row-major order
        of the mesh."""
        counts = [n for _, n in self.axes]
        ranks = np.indices(counts).reshape(len(counts), -1) if counts else np.zeros((0, 1), int)
        out = []
        for d, n in enumerate(shape):
            number, parts = np.zeros(ranks.shape[1], np.int64), 1
            for k, dim in enumerate(self.dims):
                if dim == d:
                    number, parts = number * counts[k] + ranks[k], parts * counts[k]
            out.append(np.array(ceil_blocks(n, parts), np.int64).T[:, number])
        return out

    def block_sizes(self, shape: tuple[int, ...]) -> np.ndarray:
        """Elements of the block of each rank."""
        ranks = math.prod(n for _, n in self.axes)
        return np.prod([lengths for _, lengths in self.spans(shape)], axis=0, dtype=np.int64) * np.ones(ranks, np.int64)

    def describe(self) -> list[str]:
        """One text a mesh axis, as in the manifest."""
        return ["Replicate()" if d is None else f"Shard({d})" for d in self.dims]


Chooser = Callable[[tuple[str | int, ...], tuple[int, ...], np.dtype], Any]


class ShardingChoice:
    """The sharding of each array of these names, from the arguments of `reshard`; collects the meshes that occur."""

    def __init__(
        self, mesh: Mapping[str, int] | None, shardings: Mapping[str, Any] | Chooser | None, names: Collection[str]
    ) -> None:
        if not isinstance(mesh, Mapping | None):
            raise CheckpointError(f"mesh= maps axes to lengths, such as {{'model': 4}}, got {mesh!r:.80}")
        if not (isinstance(shardings, Mapping | None) or callable(shardings)):
            raise CheckpointError(
                f"shardings= maps names or patterns to shardings, or is a function, got {shardings!r:.80}"
            )
        self.axes = dict(mesh or {})
        for axis, n in self.axes.items():
            if type(n) is not int or n < 1:
                raise CheckpointError(f"mesh axis {axis!r} must have a positive length, got {n!r}")
        if isinstance(shardings, Mapping) and mesh is None and shardings:
            raise CheckpointError("shardings as plain data need mesh=, such as mesh={'model': 4}")
        self._choose = shardings if callable(shardings) else None
        self._placements: dict[str, Any] = {}  # the first pattern that matches a name counts
        given = {} if callable(shardings) else dict(shardings or {})
        found = {p: matching(p, names) for p in patterns_of(given, "shardings= maps names or patterns")}
        for pattern, held in found.items():
            for name in held:
                self._placements.setdefault(name, given[pattern])
        if lost := [p for p, held in found.items() if not held]:  # misspelt, it would leave everything in one block
            raise CheckpointKeyError(f"shardings: nothing matches {lost}; the arrays are {some(names, 12)}")
        self.meshes: list[dict[str, int]] = []

    def of(
        self, name: str, path: tuple[str | int, ...], shape: tuple[int, ...], dtype: np.dtype
    ) -> tuple[Any, list[Box], int | None]:
        """(sharding or None, distinct blocks, number of its mesh) of an array; the first pattern that matches
        counts."""
        whole = [Box.whole(shape)]
        placements = self._choose(path, shape, dtype) if self._choose else self._placements.get(name)
        if placements is None:
            return None, whole, None
        if isinstance(placements, Mapping):
            layout = AxisLayout.of(self.axes, placements, shape, name)
            return layout, layout.boxes(shape), self._mesh(self.axes)
        if not isinstance(placements, BlockSharding):
            raise CheckpointError(f"{name}: {placements!r} is not a sharding; say which axis splits which dimension")
        if placements.partial:
            raise ReshardError(f"{name}: an array cannot be stored as partial values ({placements}); shard it")
        boxes = sorted({placements.box(shape, rank) for rank in range(placements.mesh.size)})
        return placements, boxes, self._mesh(placements.mesh.describe())

    def _mesh(self, axes: dict[str, int]) -> int:
        if axes not in self.meshes:
            self.meshes.append(axes)
        return self.meshes.index(axes)
