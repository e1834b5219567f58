"""Blocks brought to the client, without a task: it asks the workers that have them.

They answer as soon as the run that makes the blocks has ended there. That is sooner than the client could know by way of the scheduler,
and spares a second round of tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import settings
from .flight import Flight, Gang, failed
from .workers import while_present

Blocks = Mapping[int, np.ndarray]


class Asking:
    """The client's side of ``meshtape_blocks``, which :class:`~.gang.MeshtapeWorker` answers."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._far: set[str] = set()  # workers that this process cannot reach, but the scheduler can

    async def take(self, this: Gang, slot: int, asked: Mapping[int, Sequence[int]]) -> dict[int, Blocks | None]:
        """Blocks of a gang's ``slot`` by process, and in it by rank; None for a process that failed, left, or was not ready within
        ``timeouts.silence``. ``asked`` gives the ranks of each process. On the client's event loop."""
        patience = settings.number("timeouts.silence")
        found = await asyncio.gather(*(self._one(this, slot, p, ranks, patience) for p, ranks in asked.items()))
        return {p: f.get("blocks") if isinstance(f, dict) else None for p, f in zip(asked, found, strict=True)}

    async def _one(self, this: Gang, slot: int, process: int, ranks: Sequence[int], patience: float) -> Any:
        task = this.futures[process]
        if failed(task):
            return None
        client, address = self._flight.client, self._flight.addresses[process]
        question = {"key": task.key, "slot": slot, "ranks": list(ranks), "patience": patience}
        if address not in self._far:
            try:
                return await while_present(client, address, client.rpc(address).meshtape_blocks(**question))
            except OSError:  # through the scheduler, then
                self._far.add(address)
        call = client.scheduler.broadcast(
            msg={"op": "meshtape_blocks", **question}, workers=[address], on_error="return"
        )
        found = await while_present(client, address, call)
        return found and found.get(address)
