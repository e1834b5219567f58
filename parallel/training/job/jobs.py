"""The job of a script: the settings of ``meshtape run``, and ``mt.cluster_mesh()``, which applies them; the workers
and the Dask client behind a mesh."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....arrays.core.errors import MeshError
from ...dask.workers import known_workers
from ...execution.runtime import LocalRuntime
from ...mesh.mesh import Mesh


@dataclass
class Job:
    """One run of ``meshtape run``: the options of its command line, and the meshes and results of its script.

    ``client`` is None for a job in this process. ``holds`` says that the job has locked the directory, for all its
    runs.
    """

    directory: Path
    client: Any = None
    axes: Mapping[str, int] | None = None
    resume: str = "auto"
    meshes: list[Mesh] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    holds: bool = False

    __is_tree__ = False


_current: Job | None = None


def current_job() -> Job | None:
    """The job that is running in this process, or None."""
    return _current


@contextmanager
def running(job: Job) -> Iterator[Job]:
    """While it is open, ``job`` is the current one."""
    global _current
    before, _current = _current, job
    try:
        yield job
    finally:
        _current = before


def parse_axes(text: str) -> dict[str, int]:
    """Axes from a text such as ``data=4,model=2``; one of them may be -1, for the remaining workers.

    >>> parse_axes("data=-1,model=2")
    {'data': -1, 'model': 2}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.partition("=")
        name = name.strip()
        try:
            n = int(number)
        except ValueError:
            n = 0
        if not equals or not name.isidentifier() or n < -1 or n == 0 or name in axes:
            raise MeshError(f"a mesh is written like data=4,model=2, got {text!r}")
        axes[name] = n
    if list(axes.values()).count(-1) > 1:
        raise MeshError(f"only one axis of {text!r} can be -1")
    return axes


def resolve_axes(axes: Mapping[str, int], workers: int) -> dict[str, int]:
    """Axes with -1 resolved: as many ranks as there are workers, as far as the other axes divide them.

    >>> resolve_axes({"data": -1, "model": 2}, 6)
    {'data': 3, 'model': 2}
    """
    known = math.prod(n for n in axes.values() if n != -1)
    return {name: max(1, workers // known) if n == -1 else n for name, n in axes.items()}


def cluster_mesh(axes: Mapping[str, int] | None = None, *, client: Any = None) -> Mesh:
    """The mesh to run on: that of the job which ``meshtape run`` started, or one of your own.

    Parameters
    ----------
    axes
        Names and lengths, one of which may be -1 for the remaining workers. The command line's ``--mesh`` takes
        precedence. By default ``{"data": -1}``: every worker is a data rank.
    client
        A ``distributed.Client``; by default that of the job, else the one that is current in Dask, else none: then the
        ranks are virtual ones in this process (one, where -1 is asked for).

    Examples
    --------
    >>> import meshtape as mt
    >>> mt.cluster_mesh({"data": 2, "model": -1})
    Mesh(data=2, model=1)
    """
    job = _current
    if job is not None:
        axes = job.axes if job.axes is not None else axes
        client = client if client is not None else job.client
    if client is None:
        client = _dask_client()
    wanted = dict(axes) if axes is not None else {"data": -1}
    workers = 1 if client is None else len(known_workers(client))
    mesh = Mesh(resolve_axes(wanted, workers), client=client)
    if job is not None:
        job.meshes.append(mesh)
    return mesh


def _dask_client() -> Any:
    """The current Dask client of the script, without importing Dask if the script has not."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        return default_client()
    except ValueError:
        return None


def workers_of(mesh: Mesh) -> list[str]:
    """Addresses of a mesh's workers; none for a mesh of this process."""
    return [] if isinstance(mesh.runtime, LocalRuntime) else list(mesh.runtime.addresses)  # type: ignore[attr-defined]


def client_of(mesh: Mesh | None) -> Any:
    """The Dask client of a mesh, or None."""
    return None if mesh is None or isinstance(mesh.runtime, LocalRuntime) else mesh.runtime.client  # type: ignore[attr-defined]


def alive(client: Any) -> list[str]:
    """Workers that the scheduler has now."""
    return sorted(known_workers(client))
