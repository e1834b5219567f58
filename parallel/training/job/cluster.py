"""The workers and the Dask client behind a mesh."""

from __future__ import annotations

from typing import Any

from ...dask.workers import known_workers
from ...execution.runtime import LocalRuntime
from ...mesh.mesh import Mesh


def workers_of(mesh: Mesh) -> list[str]:
    """Addresses of a mesh's workers; none for a mesh of this process."""
    return [] if isinstance(mesh.runtime, LocalRuntime) else list(mesh.runtime.addresses)  # type: ignore[attr-defined]


def client_of(mesh: Mesh | None) -> Any:
    """The Dask client of a mesh, or None."""
    return None if mesh is None or isinstance(mesh.runtime, LocalRuntime) else mesh.runtime.client  # type: ignore[attr-defined]


def alive(client: Any) -> list[str]:
    """Workers that the scheduler has now."""
    return sorted(known_workers(client))
