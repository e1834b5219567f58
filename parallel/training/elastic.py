"""Elastic training: the policy for the next mesh when workers are lost or added.

When a rank is lost the run waits a moment for its worker to come back (a nanny starts a new one within a second). It
then builds a mesh of the present workers, puts the newest snapshot on it and goes on. With ``on_loss="shrink"`` each
worker keeps its number of ranks, and the data axis gets shorter. With ``"keep"`` the mesh keeps its axes, and workers
take more ranks each until others are back, so that the numbers stay the same to the bit. All other axes keep their
lengths in either case: if too few workers are left for them, workers take more ranks.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...arrays.core.errors import (
    ClusterError,
    CollectiveTimeout,
    MeshtapeError,
    RankLost,
    TrainingError,
    WorkerMismatch,
)
from ..mesh.mesh import Mesh
from ..models.plans import AXES
from .job.jobs import alive, client_of, workers_of

POLL = 0.2


@dataclass(frozen=True)
class Elastic:
    """The policy of a run when workers are lost or added.

    Parameters
    ----------
    max_restarts
        The number of losses that a run survives; the next one ends it.
    on_loss
        ``"shrink"`` or ``"keep"``; see the module.
    rejoin
        Seconds that lost workers are waited for before the run goes on without them.
    min_workers
        With fewer workers the run waits, up to ``patience`` seconds.
    patience
        Seconds until a run without ``min_workers`` gives up.
    most
        Length to which the data axis may grow when workers are added; by default the one that it began with.
    """

    max_restarts: int = 3
    on_loss: Literal["shrink", "keep"] = "shrink"
    rejoin: float = 10.0
    min_workers: int = 1
    patience: float = 300.0
    most: int | None = None

    __is_tree__ = False

    def __post_init__(self) -> None:
        if self.on_loss not in ("shrink", "keep"):
            raise TrainingError(f"on_loss must be 'shrink' or 'keep', got {self.on_loss!r}")
        if self.max_restarts < 0 or self.min_workers < 1 or self.rejoin < 0 or self.patience < 0:
            raise TrainingError(f"numbers of {self} cannot be negative, and a run needs a worker")

    def axes(self, first: dict[str, int], per_worker: int, workers: int, fits: Callable[[int], bool]) -> dict[str, int]:
        """Axes of the next mesh, from the ``first`` ones and the ranks of a worker then. ``fits`` says whether the
        batch divides over so many data ranks.

        >>> Elastic().axes({"data": 4, "model": 2}, 1, 6, lambda n: 12 % n == 0)
        {'data': 3, 'model': 2}
        >>> Elastic(on_loss="keep").axes({"data": 4, "model": 2}, 1, 6, lambda n: True)
        {'data': 4, 'model': 2}
        """
        data = AXES["dp"]
        if self.on_loss == "keep" or data not in first:
            return dict(first)
        others = math.prod(n for name, n in first.items() if name != data)
        room = max(1, workers * per_worker // others)
        most = first[data] if self.most is None else max(self.most, first[data])
        return {**first, data: next(n for n in range(min(most, room), 0, -1) if fits(n) or n == 1)}


def is_loss(error: BaseException, mesh: Mesh | None) -> bool:
    """Whether an error was caused by a loss in the cluster, and not by the job.

    While the scheduler misses a worker of the mesh, an error of any kind counts as caused by that.
    """
    client = client_of(mesh)
    if client is None or mesh is None or isinstance(error, WorkerMismatch):
        return False
    if client.status != "running":
        return False  # nothing is left to go on with
    if isinstance(error, RankLost | CollectiveTimeout):
        return True
    if not isinstance(error, MeshtapeError | OSError | RuntimeError | TimeoutError):
        return False
    until = time.monotonic() + 2.0  # a peer knows of a death before the scheduler does
    while time.monotonic() < until:
        try:
            if set(workers_of(mesh)) - set(alive(client)):
                return True
        except ClusterError:
            return False
        time.sleep(POLL)
    return False


def rebuild(
    mesh: Mesh, first: dict[str, int], per_worker: int, policy: Elastic, fits: Callable[[int], bool], wanted: int
) -> Mesh:
    """A new mesh in place of one that lost workers. ``wanted`` is the number of workers that the run began with.

    Raises
    ------
    TrainingError
        Where too few workers are there when patience ends.
    """
    client = client_of(mesh)
    with contextlib.suppress(MeshtapeError, OSError, TimeoutError):  # half of it is gone
        mesh.close(wait=False)
    began = time.monotonic()
    while True:
        if client.status != "running":
            raise ClusterError(f"the Dask client is {client.status}: the cluster is gone, and the run with it")
        there, waited = alive(client), time.monotonic() - began
        if len(there) >= wanted or (len(there) >= policy.min_workers and waited >= policy.rejoin):
            try:
                return Mesh(policy.axes(first, per_worker, len(there), fits), client=client, workers=there)
            except (MeshtapeError, OSError, TimeoutError):
                # A worker that goes while the mesh is built is simply not there next time.
                if waited >= policy.patience:
                    raise
        elif waited >= policy.patience:
            raise TrainingError(
                f"{len(there)} worker(s) are left and {policy.min_workers} are needed; waited {waited:.0f} s for more"
            )
        time.sleep(POLL)
