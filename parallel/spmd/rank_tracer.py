"""The buffer that stands for a block in per-rank code, and the contract of the trace that it belongs to."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.op import Op, ShapeDtype
from ...autodiff.captures.tracing import Tracer
from ..sharding.mesh_protocol import MeshProtocol


class BlockTrace(Protocol):
    """The interface of ops to a trace of per-rank code, implemented by :class:`.rank_trace.RankTrace`."""

    mesh: MeshProtocol

    def group_size(self, axes: tuple[int, ...]) -> int:
        """Ranks of a group along the axes."""

    def index(self, axes: tuple[int, ...]) -> Array:
        """The place of this rank in its group, as a value of the program."""

    def lift(self, x: Array) -> Array:
        """A captured array as an input."""

    def axes_of_variation(self, x: Array) -> frozenset[int]:
        """Axes along which ranks may hold different values."""

    def varied(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The value, made to vary along the axes."""


class RankTracer(Tracer):
    """A buffer that stands for the block of every rank."""

    __slots__ = ("varying",)
    priority = 3
    traced = True

    def __init__(self, trace: BlockTrace, var: int, aval: ShapeDtype, varying: frozenset[int]) -> None:
        super().__init__(trace, var, aval, trace.mesh, None, None)  # type: ignore[arg-type]
        self.varying = varying

    def admit(self, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.builder.admit(op, args)  # type: ignore[attr-defined]

    def concrete(self) -> np.ndarray:
        self.builder.refuse(
            f"a value ({self.aval}) was asked for inside mt.shard_map, where arrays only stand for the blocks of "
            "ranks: use mt.where instead of `if`, as all ranks run the same code"
        )
