"""What a round may leave behind: nothing."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

from world import World

import meshtape as mt
from meshtape.parallel.dask.streams import WorkerFuture

_SPARE = 40
"""Descriptors and threads that Dask's pools may keep beside those of a new cluster."""
_KEPT = ("meshtape-gang_", "meshtape-accept", "meshtape-array")
"""Threads that stay with their process."""


def of_worker(dask_worker: Any) -> dict[str, Any]:
    """What is meshtape's own on a worker, once its meshes are closed."""
    found = _of_worker(dask_worker)
    if any(found.values()):  # or only waits to be collected, which takes a tenth of a second
        gc.collect()
        found = _of_worker(dask_worker)
    return found


def _of_worker(dask_worker: Any) -> dict[str, Any]:
    from meshtape.parallel.dask import worker

    state = worker._STATES.get(dask_worker.address)
    found: dict[str, Any] = {
        "threads": [
            t.name for t in threading.enumerate() if t.name.startswith("meshtape-") and not t.name.startswith(_KEPT)
        ],
        "shared memory": Path("/proc/self/maps").read_text().count("/dev/shm/meshtape-"),
        "folders": sum(p.name.startswith("meshtape") for p in Path(os.environ["TMPDIR"]).iterdir()),
        "Dask's data": len(dask_worker.data),
    }
    if state is not None:
        plane = state.plane
        found |= {
            "contexts": len(state.contexts),
            "owners": len(state.owners),
            "programs": len(state.programs),
            "values": sum(len(d.kept) for d in state.resident.sessions.values()),
            "failures": sum(len(d.failures) for d in state.resident.sessions.values()),
            "queued": sum(len(d.names()) for d in state.resident.sessions.values()),
        }
        if plane is not None:
            found |= {"secrets": len(plane._secrets), "groups": len(plane._groups), "arrived": len(plane._arrived)}
    return found


def of_scheduler(dask_scheduler: Any) -> dict[str, int]:
    plugin = dask_scheduler.plugins.get("meshtape")
    found = {"tasks": len(dask_scheduler.tasks)}
    if plugin is not None:
        found |= {"meshes": len(plugin.meshes), "waiting": len(plugin.waiting)}
    return found


class Watch:
    """Counts what a round leaves, beside what there was before it."""

    def __init__(self, world: World) -> None:
        self.world, self.before = world, self._of_client()

    def _of_client(self) -> dict[str, int]:
        names = [t.name for t in threading.enumerate()]
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(names),
            "our threads": sum(n.startswith("meshtape-") and not n.startswith(_KEPT) for n in names),
        }

    def _found(self, folder: Path) -> dict[str, Any]:
        gc.collect()
        left: dict[str, Any] = {}
        now = self._of_client()
        for name, spare in (("descriptors", _SPARE), ("threads", _SPARE), ("our threads", 0)):
            if now[name] > self.before[name] + spare:
                left[f"{name} of the client"] = f"{self.before[name]} before, {now[name]} now"
        client = self.world.client
        if client.futures:
            left["Dask's futures"] = sorted(map(str, client.futures))[:5]
        if ours := [repr(o) for o in gc.get_objects() if isinstance(o, WorkerFuture)]:
            left["futures"] = ours[:5]
        for address, found in client.run(of_worker, on_error="return").items():
            if isinstance(found, BaseException):
                left[address] = repr(found)
            elif some := {k: n for k, n in found.items() if n}:
                left[address] = some
        if some := {k: n for k, n in client.run_on_scheduler(of_scheduler).items() if n}:
            left["scheduler"] = some
        if "shared" not in self.world.missing and (shared := [p.name for p in Path("/dev/shm").glob("meshtape-*")]):
            left["/dev/shm"] = shared[:8]
        if beside := [p.name for p in folder.iterdir() if p.name != "c" and not p.name.isdigit()]:
            left["beside the checkpoint"] = beside
        if some_temporary := [str(p.name) for p in self.world.temporary.iterdir() if not p.name.isdigit()]:
            left["temporary files"] = some_temporary
        return left

    def left(self, folder: Path, seconds: float) -> dict[str, Any]:
        """What is left after some seconds at most."""
        until = time.monotonic() + seconds
        while (found := self._found(folder)) and time.monotonic() < until:
            time.sleep(0.1)
        if list(found) == ["/dev/shm"]:
            mt.gang(self.world.client, int).result()  # which takes away what killed ones have left
            found = self._found(folder)
        return found
