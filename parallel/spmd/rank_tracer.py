"""The buffer that stands for a block in per-rank code, and the contract of the trace that it belongs to."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...arrays.core.array import Array
from ...arrays.core.errors import TracedValueError
from ...arrays.core.op import Op
from ...arrays.core.shape_dtype import ShapeDtype
from ...autodiff.captures.tracing import Tracer
from ..sharding.mesh_protocol import Mesh


class BlockTrace(Protocol):
    """The interface of ops to a trace of per-rank code, implemented by :class:`.rank_trace.RankTrace`."""

    mesh: Mesh

    def group_size(self, axes: tuple[int, ...]) -> int:
        """Ranks of a group along the axes."""

    def place(self, axes: tuple[int, ...], *, uneven: bool = True) -> int:
        """This rank's place in its group."""

    def index(self, axes: tuple[int, ...]) -> Array:
        """The place as a value of the program."""

    def meet(self, what: str, axes: tuple[int, ...], details: Any, payload: Any = None) -> list[Any]:
        """The payloads of all ranks of the group."""

    def lift(self, x: Array) -> Array:
        """A captured array as an input."""

    def axes_of_variation(self, x: Array) -> frozenset[int]:
        """Axes along which ranks may hold different values."""

    def varied(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The value, made to vary along the axes."""

    def settled(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The result of a collective that is the same on all ranks."""

    def differ(self, axes: tuple[int, ...]) -> None:
        """From here on ranks hold blocks of different shapes."""


class RankTracer(Tracer):
    """A buffer that stands for the block of one rank, or of every rank."""

    __slots__ = ("index_of", "varying")
    priority = 3
    traced = True

    def __init__(self, trace: BlockTrace, var: int, aval: ShapeDtype, varying: frozenset[int]) -> None:
        super().__init__(trace, var, aval, trace.mesh, None, None)  # type: ignore[arg-type]
        self.varying = varying
        self.index_of: tuple[int, ...] | None = None  # mesh axes whose index this is

    def admit(self, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.builder.admit(op, args)  # type: ignore[attr-defined]

    def concrete(self) -> np.ndarray:
        if self.index_of is not None:
            return np.asarray(self.builder.look(self.index_of))  # type: ignore[attr-defined]
        raise TracedValueError(
            f"a value ({self.aval}) was asked for inside mt.shard_map, where arrays only stand for the blocks of ranks: use "
            "mt.where instead of `if`; only int(mt.axis_index(…)) is known there"
        )
