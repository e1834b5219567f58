"""The mesh protocol: the interface of :class:`meshtape.parallel.mesh.mesh.MeshProtocol` for packages below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...arrays.core.array import Array
from ...arrays.core.op import Op


class MeshProtocol(Protocol):
    """A grid of ranks with named axes, with the methods that its arrays need."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    size: int
    runtime: Any
    pending: Any

    def axis(self, name: str) -> int:
        """Number of the axis called ``name``."""

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank along each axis."""

    def replicate(self, value: Array) -> Array:
        """The value on every rank."""

    def moved(self, buf: Any, layout: Any) -> Any:
        """The same value in another layout."""

    def place_layouts(
        self, op: Op, avals: Sequence[Any], out_avals: Sequence[Any], layouts: Sequence[Any], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Layouts of the results of a call."""

    def check_moves(self, op: Op, avals: Sequence[Any], layouts: Sequence[Any], placed: Any) -> None:
        """Raise where a call moves blocks and must not."""
