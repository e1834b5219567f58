"""A scheduler, some workers and a client, that come back after anything was done to them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nursery
import spaces
from distributed import Client

from meshtape.parallel.dask.workers import known_workers

SIZE = 3
PATIENCE = 120.0
"""Seconds that what is no part of a round may take: of starting processes on a busy machine."""


class World:
    """See the module. ``missing`` says what cannot be done here, and why."""

    def __init__(self, folder: Path, missing: dict[str, str]) -> None:
        self.folder, self.missing = folder, missing
        self.network = "cut" not in missing
        self.disk = folder / "disk"
        self.disk.mkdir()
        if "disk" not in missing:
            try:
                spaces.mounted(str(self.disk), 24)
            except OSError as e:
                missing["disk"] = f"nothing can be mounted here: {e}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._count = 0
        self.pids: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        """Of the network devices of workers."""
        self.scheduler = 0
        self.client: Any = None
        self._nursery, self._asks, self._answers = nursery.begun()
        if self._line() != "ready":
            raise RuntimeError("the processes of the cluster cannot be started")

    def _line(self) -> str:
        return self._answers.readline().strip()

    def _born(self, **spec: Any) -> tuple[int, int]:
        """A new process, and its number. It stands still until its network is there."""
        self._count += 1
        folder = self.temporary / str(self._count)
        folder.mkdir()
        spec |= {"folder": str(folder), "log": str(self.folder / "log"), "name": self._count}
        self._asks.write(json.dumps(spec) + "\n")
        self._asks.flush()
        return int(self._line()), self._count

    def _go(self, pid: int) -> None:
        until = time.monotonic() + PATIENCE
        while state(pid) != "T" and time.monotonic() < until:
            time.sleep(0.002)
        os.kill(pid, signal.SIGCONT)

    def begin(self) -> None:
        """Start a scheduler and a client."""
        host = spaces.HOST if self.network else "127.0.0.1"
        file = self.folder / "scheduler"
        file.unlink(missing_ok=True)
        self.scheduler, _ = self._born(kind="scheduler", host=host, file=str(file), network=False)
        self._go(self.scheduler)
        until = time.monotonic() + PATIENCE
        while not (file.exists() and file.read_text()):
            if time.monotonic() > until:
                raise TimeoutError("the scheduler did not start")
            time.sleep(0.01)
        self.client = Client(file.read_text(), set_as_default=False, timeout=PATIENCE)
        self.pids = {}

    def ready(self) -> None:
        """Every worker works, and there are as many as there should be; what is broken is replaced."""
        if self.scheduler and (state(self.scheduler) in "TZX" or self.client.status != "running"):
            self.end()
        if not self.scheduler:
            self.begin()
        for address, pid in list(self.pids.items()):
            if state(pid) in "TZX":
                self.kill(address)
        there: list[str] = []
        until = time.monotonic() + PATIENCE
        while len(there) != SIZE or set(there) != set(self.pids):
            if time.monotonic() > until:
                raise TimeoutError(f"the cluster does not come back: {sorted(there)}, wanted {sorted(self.pids)}")
            there = list(known_workers(self.client))
            if set(there) <= set(self.pids):
                for _ in range(SIZE - len(self.pids)):
                    self._worker()
            else:
                time.sleep(0.02)
        found = self.client.run(os.getpid, on_error="return")
        for address in list(self.pids):
            if found.get(address) is None or isinstance(found[address], BaseException):
                self.kill(address)
                return self.ready()
            # In a name space of processes of its own the worker would have other numbers; it has not.
            assert self.pids[address] == found[address]
        return None

    def _worker(self) -> None:
        pid, number = self._born(
            kind="worker",
            host=spaces.address_of(self._count + 1) if self.network else "127.0.0.1",
            scheduler=self.client.scheduler.address,
            network=self.network,
        )
        if self.network:
            spaces.plug_in(pid, number)
        self._go(pid)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for address, w in known_workers(self.client).items():
                if w["name"] == number:
                    self.pids[address], self.numbers[address] = pid, number
                    return
            time.sleep(0.02)
        raise TimeoutError("a worker did not start")

    def kill(self, address: str) -> None:
        """A worker ends."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids.pop(address), signal.SIGKILL)

    @property
    def left(self) -> list[str]:
        """Workers whose processes are there and do not stand still."""
        return [a for a, pid in self.pids.items() if state(pid) not in "TZX"]

    def end(self) -> None:
        """Nothing is left of the cluster."""
        for pid in [*self.pids.values(), self.scheduler]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.client is not None:
            with contextlib.suppress(Exception):
                self.client.close(timeout=2)
        self.pids, self.scheduler, self.client = {}, 0, None

    def close(self) -> None:
        self.end()
        os.kill(self._nursery, signal.SIGKILL)
        os.waitpid(self._nursery, 0)


def state(pid: int) -> str:
    """Of a process, as in ``/proc``: ``T`` stands still, ``X`` is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return text.rpartition(")")[2].split()[0]


class Scene:
    """One round: who takes part, and where it writes."""

    def __init__(self, world: World, rng: random.Random, folder: Path) -> None:
        self.world, self.rng, self.folder = world, rng, folder
        self.client = world.client
        self.size = rng.choice((2, 3))
        self.workers = rng.sample(sorted(world.pids), self.size)
        self.victim = rng.choice(self.workers)
        self.pid = world.pids[self.victim]

    @contextlib.contextmanager
    def mesh(self, **axes: int) -> Iterator[Any]:
        """A mesh on the workers of the round."""
        import meshtape as mt

        mesh = mt.Mesh(axes or {"a": self.size}, client=self.client, workers=self.workers)
        try:
            yield mesh
        finally:
            mesh.close()
