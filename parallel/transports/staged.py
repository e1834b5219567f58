"""Staged transport: blocks of GPUs go through the host's memory and any other transport, where NCCL cannot be used."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.device_memory import BlockMemory, on_host
from ..collectives.pieces import ArraySink, BatchSink
from .group import Receives, Sends, Transport


class Staged:
    """A ``Transport`` for arrays of a device. Sends are copied to the host first. Received chunks are copied to the
    device one by one, and contributions are joined there."""

    def __init__(self, host: Transport, memory: BlockMemory) -> None:
        self._host, self._memory = host, memory

    def begin(self, run: int, timeout: float) -> None:
        self._host.begin(run, timeout)

    def turn(self, number: int) -> None:
        self._host.turn(number)

    def exchange(self, step: int, what: str, sends: Sends, receives: Receives) -> None:
        copied: dict[int, Any] = {}  # one array often goes to many

        def staged(a: Any) -> np.ndarray:
            found = copied.get(id(a))
            if found is None:
                found = copied[id(a)] = on_host(a)
            return found

        self._host.exchange(
            step,
            what,
            {p: [tuple(map(staged, b if isinstance(b, tuple) else (b,))) for b in found] for p, found in sends.items()},
            {
                p: [_Landing(s if hasattr(s, "accept") else ArraySink(s), self._memory) for s in found]
                for p, found in receives.items()
            },
        )

    def abort(self, reason: str) -> None:
        self._host.abort(reason)

    def shutdown(self) -> None:
        self._host.shutdown()

    def close(self) -> None:
        self._host.close()


class _Landing:
    """A sink whose chunks are put on the device before the sink of the device takes them."""

    def __init__(self, sink: BatchSink, memory: BlockMemory) -> None:
        self._sink, self._memory = sink, memory
        self.shape, self.dtype, self.width = sink.shape, sink.dtype, sink.width
        self._waiting: tuple[tuple[int, int], Any] | None = None  # a chunk whose turn has not come is not copied again

    def place(self, k: int, j: int) -> None:
        return None

    def accept(self, k: int, j: int, chunk: np.ndarray | None) -> bool:
        if self._waiting is None or self._waiting[0] != (k, j):
            self._waiting = (k, j), self._memory.put(chunk)
        taken = self._sink.accept(k, j, self._waiting[1])
        if taken:
            self._waiting = None
        return taken
