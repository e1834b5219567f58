"""Who hosts the ranks of a mesh: this process (the virtual mesh), or the workers of a Dask cluster.

A runtime keeps blocks and runs rank programs. What it hands out are *handles*: the client holds those, the blocks stay where
their ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .executor import Prepared
from .placement import Layout, block_box
from .rank_program import RankProgram


@dataclass(frozen=True, eq=False)
class HostValue:
    """Blocks that are still one array of this process: shipped with the first program that reads them."""

    value: np.ndarray
    layout: Layout
    sizes: tuple[int, ...]

    def block(self, rank: int) -> np.ndarray:
        """The block of a rank: a view."""
        # (The ellipsis makes an array of no dimensions a view, and not a scalar.)
        return self.value[(*block_box(self.layout, self.sizes, self.value.shape, rank).slices, ...)]


@dataclass(frozen=True, slots=True, eq=False)
class LocalBlocks:
    """Blocks in this process, by rank."""

    blocks: Mapping[int, np.ndarray]


@dataclass(frozen=True, eq=False)
class Turns:
    """Several turns of one program in one run: the first ``carried`` outputs are the first inputs of the next turn. ``each`` lists,
    for each turn, handles of values of that turn alone, the inputs that come after the carried ones (or nothing at all)."""

    count: int
    carried: int
    each: Sequence[Sequence[Any]]


class Runtime(Protocol):
    """What a mesh asks of whoever hosts its ranks. Handles are :class:`HostValue` or what the runtime itself gave out."""

    homes: tuple[int, ...]
    """Process of each rank."""

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[..., list[Any]]:
        """The program made ready: a function from the handles of inputs and constants to the handles of outputs.

        Its second argument, :class:`Turns`, runs several turns; the handles are then those of all inputs but ``each``, and the
        outputs that are not carried come back stacked, turn by turn.
        """

    def wait(self, handle: Any) -> None:
        """Until the blocks are there; raises what went wrong with them."""

    def fetch(self, handle: Any, ranks: Sequence[int]) -> dict[int, np.ndarray]:
        """Blocks brought to this process."""

    def call(
        self,
        fn: Callable[[dict[int, Any], dict[int, list[np.ndarray]]], Any],
        handles: Sequence[Any],
        payloads: Mapping[int, Any],
    ) -> list[Any]:
        """See ``BlockHost.run_on_blocks``."""

    def create(
        self, fn: Callable[[dict[int, Any]], dict[int, list[np.ndarray]]], payloads: Mapping[int, Any], count: int
    ) -> list[Any]:
        """See ``BlockHost.create``: handles of ``count`` new arrays."""

    def abandon(self) -> None:
        """Give up what is on its way."""

    def close(self) -> None:
        """Give back what the runtime holds."""


class LocalRuntime:
    """All ranks in this process, in lockstep: the default, and the bench on which every rule is tested."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        n = 1
        for s in sizes:
            n *= s
        self.ranks = tuple(range(n))
        self.homes = (0,) * n

    def _blocks(self, handle: Any) -> Mapping[int, np.ndarray]:
        if isinstance(handle, HostValue):
            return {r: handle.block(r) for r in self.ranks}
        return handle.blocks

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[..., list[Any]]:
        prepared = Prepared(program, self.ranks, self.homes, names)

        def run(handles: Sequence[Any], turns: Turns | None = None) -> list[Any]:
            blocks = [self._blocks(h) for h in handles]
            if turns is None:
                return [LocalBlocks(b) for b in prepared.run(blocks)]
            each = [[self._blocks(h) for h in hs] for hs in turns.each]
            return [LocalBlocks(b) for b in prepared.loop(blocks, turns.count, turns.carried, each)]

        return run

    def wait(self, handle: Any) -> None:
        """Nothing is under way."""

    def fetch(self, handle: Any, ranks: Sequence[int]) -> dict[int, np.ndarray]:
        blocks = self._blocks(handle)
        return {r: blocks[r] for r in ranks}

    def call(self, fn: Any, handles: Sequence[Any], payloads: Mapping[int, Any]) -> list[Any]:
        blocks = [self._blocks(h) for h in handles]
        return [fn(dict(payloads), {r: [b[r] for b in blocks] for r in payloads})]

    def create(self, fn: Any, payloads: Mapping[int, Any], count: int) -> list[Any]:
        made = fn(dict(payloads))
        return [LocalBlocks({r: made[r][i] for r in self.ranks}) for i in range(count)]

    def abandon(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
