"""Hosts of the ranks of a mesh: this process (the virtual mesh), or the workers of a Dask cluster.

A runtime keeps blocks and runs rank programs. It hands out *handles*: the client holds these, the blocks stay with
their ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from ...arrays.core.errors import OutOfMemory
from ..base.device_memory import HOST, BlockMemory, moved, on_host, serving
from ..partition.rank_program import RankProgram
from ..sharding.placement import Layout, block_box
from .executor import Prepared
from .memory_limits import Value

_CALLS = {
    "write_blocks": "save",
    "read_blocks": "load",
    "counts": "load",
    "run_blocks": "stream",
    "read_on_worker": "the data loader",
}


def called(fn: Any) -> str:
    """The name of a function of blocks in errors: that of the function that the user called.

    >>> def read_blocks(): ...
    >>> called(read_blocks)
    'load'
    """
    name = getattr(fn, "__name__", "call").strip("_")
    return _CALLS.get(name, name)


@dataclass(frozen=True, eq=False)
class HostValue:
    """Blocks that are still one array of this process; they are sent with the first program that reads them."""

    value: np.ndarray
    layout: Layout
    sizes: tuple[int, ...]

    def block(self, rank: int) -> np.ndarray:
        """The block of a rank: a view."""
        # (The ellipsis makes an array of no dimensions a view, and not a scalar.)
        return self.value[(*block_box(self.layout, self.sizes, self.value.shape, rank).slices, ...)]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LocalBlocks:
    """Blocks in this process, by rank."""

    blocks: dict[int, Any]


@dataclass(frozen=True, eq=False)
class Turns:
    """Several turns of one program in one run: the first ``carried`` outputs are the first inputs of the next turn.
    ``each`` lists, for each turn, handles of values of that turn alone, the inputs that come after the carried ones (or
    nothing at all)."""

    count: int
    carried: int
    each: Sequence[Sequence[Any]]


class Runtime(Protocol):
    """The interface of a mesh to the host of its ranks. A handle is a :class:`HostValue` or made by the runtime."""

    homes: tuple[int, ...]
    """Process of each rank."""

    def placed(self) -> str | None:
        """In words, the device of blocks and the transport between devices; None where blocks are in host memory."""

    def check_memory(self, what: str, values: Sequence[Value], sizes: tuple[int, ...]) -> None:
        """Raise :class:`OutOfMemory` where the blocks of these arrays together exceed the memory limit of a process."""

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[..., list[Any]]:
        """The program made ready: a function from the handles of inputs and constants to the handles of outputs.

        Its second argument, :class:`Turns`, runs several turns; the handles are then those of all inputs but ``each``,
        and the outputs that are not carried come back stacked, turn by turn.
        """

    def wait(self, handle: Any) -> None:
        """Wait for the blocks. Raises their error."""

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
        """Give up the runs in flight."""

    def close(self) -> None:
        """Free everything that the runtime holds."""


def _shared(blocks: Mapping[int, np.ndarray]) -> dict[int, Any]:
    """The same, with one block for ranks that share memory."""
    seen: dict[Any, np.ndarray] = {}
    return {r: seen.setdefault((b.__array_interface__["data"][0], b.shape, b.strides), b) for r, b in blocks.items()}


class LocalRuntime:
    """All ranks in this process, in lockstep: the default, and the bench on which every rule is tested."""

    _all: ClassVar[list[weakref.ref[LocalRuntime]]] = []

    def __init__(self, sizes: tuple[int, ...], memory: BlockMemory = HOST) -> None:
        self.sizes, self.memory = sizes, memory
        self._kept: weakref.WeakValueDictionary[int, LocalBlocks] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        if memory is not HOST:
            self._all.append(weakref.ref(self, self._all.remove))
        self._there: weakref.WeakKeyDictionary[HostValue, dict[int, Any]] = weakref.WeakKeyDictionary()
        self.ranks = tuple(range(math.prod(sizes)))
        self.homes = (0,) * len(self.ranks)

    def placed(self) -> str | None:
        return None if self.memory is HOST else self.memory.name

    def check_memory(self, what: str, values: Sequence[Value], sizes: tuple[int, ...]) -> None:
        """Nothing: this process has no known limit."""

    def _blocks(self, handle: Any) -> dict[int, Any]:
        if not isinstance(handle, HostValue):
            return handle.blocks
        blocks = self._there.get(handle)
        if blocks is None:
            blocks = {r: handle.block(r) for r in self.ranks}
            if self.memory is not HOST:  # a run takes it to the device: it travels once
                blocks = self._there[handle] = _shared(blocks)
        return blocks

    def load(self, program: RankProgram, names: Sequence[str]) -> Callable[..., list[Any]]:
        prepared = Prepared(program, self.ranks, self.homes, names, self.memory)
        prepared.others = self._on_the_device

        def run(handles: Sequence[Any], turns: Turns | None = None) -> list[Any]:
            blocks = [self._blocks(h) for h in handles]
            if turns is None:
                return list(map(self._keep, prepared.run(blocks)))
            each = [[self._blocks(h) for h in hs] for hs in turns.each]
            return list(map(self._keep, prepared.loop(blocks, turns.count, turns.carried, each)))

        return run

    def _on_the_device(self) -> Iterator[dict[int, Any]]:
        """The blocks of all arrays on the device of this mesh, the oldest first. References come at once, as other
        threads make arrays."""
        meshes = [m for r in list(self._all) if (m := r()) is not None and m.memory.name == self.memory.name]
        for mesh in meshes:
            yield from (b.blocks for r in mesh._kept.valuerefs() if (b := r()) is not None)
            values = (mesh._there.get(v) for r in mesh._there.keyrefs() if (v := r()) is not None)
            yield from (blocks for blocks in values if blocks is not None)

    def wait(self, handle: Any) -> None:
        """Nothing is under way."""

    def fetch(self, handle: Any, ranks: Sequence[int]) -> dict[int, np.ndarray]:
        blocks = handle.blocks if isinstance(handle, LocalBlocks) else {r: handle.block(r) for r in ranks}
        return {r: on_host(blocks[r]) for r in ranks}

    def call(self, fn: Any, handles: Sequence[Any], payloads: Mapping[int, Any]) -> list[Any]:
        blocks = [self.fetch(h, list(payloads)) for h in handles]
        with serving(self.memory):
            return [fn(dict(payloads), {r: [b[r] for b in blocks] for r in payloads})]

    def create(self, fn: Any, payloads: Mapping[int, Any], count: int) -> list[Any]:
        made = fn(dict(payloads))
        return [self.adopt({r: made[r][i] for r in self.ranks}) for i in range(count)]

    def adopt(self, blocks: Mapping[int, np.ndarray]) -> LocalBlocks:
        """Host blocks as blocks of the mesh. On a GPU without room for them they wait for a run that reads them."""
        if self.memory is HOST:
            return LocalBlocks(dict(blocks))
        there = _shared(blocks)
        with contextlib.suppress(OutOfMemory), self.memory.using():
            there = moved(there, self.memory.put)
        return self._keep(there)

    def _keep(self, blocks: dict[int, Any]) -> LocalBlocks:
        made = LocalBlocks(blocks)
        if self.memory is not HOST:
            self._kept[next(self._numbers)] = made
        return made

    def abandon(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""
