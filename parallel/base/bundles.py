"""Blocks that runs left on a worker, in device memory or in host memory."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from . import settings
from .device_memory import BlockMemory, CudaMemory, is_on_host, memory_of, moved, on_host


class Bundle:
    """Blocks that one run left on one worker: ``slots[slot][rank]``."""

    _clock = itertools.count()

    def __init__(self, slots: dict[int, dict[int, np.ndarray]]) -> None:
        self.slots = slots
        self.read()

    def read(self) -> None:
        """Note that a run reads it now."""
        self.last_read = next(self._clock)

    def blocks(self, host: bool) -> dict[int, int]:
        """Bytes of the blocks in host memory, or of the others, by block: an array may be in several bundles."""
        every = [b for blocks in list(self.slots.values()) for b in blocks.values()]
        return {id(b): b.nbytes for b in every if is_on_host(b) == host}

    def spill(self, memory: CudaMemory) -> None:
        """Move its blocks to host memory, where Dask may put them aside on disk. A run that reads them takes them
        back."""
        for i, blocks in list(self.slots.items()):
            host = moved(blocks, memory.spilled)
            if self.slots.get(i) is blocks:  # slots may be dropped meanwhile
                self.slots[i] = host

    def __sizeof__(self) -> int:
        # Dask's memory accounting and dashboard show this. As Dask does for CuPy's arrays, memory of a device counts
        # too.
        return 64 + sum(b.nbytes for blocks in self.slots.values() for b in blocks.values())

    def __reduce__(self) -> Any:
        # Dask puts values aside on disk: blocks of a device go as host memory, and come back to it.
        devices = {str(b.device.id) for blocks in self.slots.values() for b in blocks.values() if not is_on_host(b)}
        host = {i: {r: on_host(b) for r, b in blocks.items()} for i, blocks in self.slots.items()}
        return _bundle_of, (host, f"cuda:{min(devices)}" if devices else "cpu")

    def __repr__(self) -> str:
        return f"<Bundle of {len(self.slots)} array(s), {self.__sizeof__()} bytes>"


def _bundle_of(slots: dict[int, dict[int, np.ndarray]], device: str) -> Bundle:
    memory = memory_of(device)
    with memory.using():
        return Bundle({i: {r: memory.put(b) for r, b in blocks.items()} for i, blocks in slots.items()})


def make_room(kept: Callable[[], Iterable[Any]], needed: Iterable[Bundle], memory: BlockMemory) -> None:
    """Spill bundles that no run has read for longest, until what is kept and what the next run needs takes no more than
    its share of the device."""
    needed = {id(b): b for b in needed}
    for b in needed.values():
        b.read()
    if not isinstance(memory, CudaMemory):
        return
    rest = {id(b): b for b in kept() if isinstance(b, Bundle) and id(b) not in needed}
    others = sorted(rest.values(), key=_last_read)
    size = {k: n for b in needed.values() for host in (False, True) for k, n in b.blocks(host).items()}
    sizes = [b.blocks(host=False) for b in others]
    limit = settings.number("device-memory") * memory.total()
    for i, bundle in enumerate(others):
        if sum(functools.reduce(operator.or_, sizes[i:], size).values()) <= limit:
            return
        if sizes[i]:
            bundle.spill(memory)


_last_read = operator.attrgetter("last_read")


def oldest_first(kept: Iterable[Any]) -> Iterator[dict[int, Any]]:
    """The blocks of each array, those first that no run has read for longest."""
    for bundle in sorted((b for b in kept if isinstance(b, Bundle)), key=_last_read):
        yield from list(bundle.slots.values())


def register_with_dask_cuda() -> None:
    """Let dask-cuda's limit of device memory count blocks, where it runs this worker."""
    if "dask_cuda" in sys.modules:
        from dask_cuda.is_device_object import is_device_object

        is_device_object.register(Bundle, lambda b: bool(b.blocks(host=False)))
