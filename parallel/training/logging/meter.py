"""Means and rates of the steps between two logs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...dask.workers import known_workers
from ...mesh.mesh import Mesh
from ..job.jobs import client_of, workers_of


class Meter:
    """Collects the numbers of steps without reading them, until :meth:`read` does."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self._held: list[dict[str, Any]] = []
        self._since = time.perf_counter()

    def step(self, found: dict[str, Any]) -> None:
        self._held.append(found)

    def rows(self) -> list[dict[str, float]]:
        """The numbers of the steps since the last call. Reading waits for them."""
        rows = [{n: float(v) for n, v in found.items()} for found in self._held]
        self._held.clear()
        return rows

    def means(self, rows: Sequence[dict[str, float]]) -> dict[str, float]:
        """Means over steps, weighted by the weights of their losses, and rates since the last call.

        ``per_second`` is the weight a second: tokens, or samples where the loss is a mean over them. Without weight
        there are no means. A step that was left out has no weight.
        """
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        counted = [r for r in rows if r["finite"]]
        weight = sum(r["weight"] for r in counted)
        out = {
            n: sum(r[n] * r["weight"] for r in counted) / weight
            for n in rows[0]
            if weight and n not in ("weight", "grad_norm", "finite", "scale")
        }
        out |= {n: rows[-1][n] for n in ("grad_norm", "scale") if n in rows[-1]}
        out |= {
            "per_second": weight / seconds,
            "step_ms": 1e3 * seconds / len(rows),
            "memory": float(memory(self.mesh)),
        }
        return out


def memory(mesh: Mesh | None) -> int:
    """Bytes that the processes of a run hold in memory: of the workers, or of this process."""
    client = client_of(mesh)
    if client is None or mesh is None:
        import psutil

        return int(psutil.Process().memory_info().rss)
    info = known_workers(client)
    return sum(int(info[a]["metrics"].get("memory", 0)) for a in workers_of(mesh) if a in info)
