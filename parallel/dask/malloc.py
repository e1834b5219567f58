"""The allocator of worker processes: its environment variables, and a test of whether it keeps freed memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .workers import ask, known_workers

ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_ARENA_MAX": "1",
}
"""Environment of worker processes. A Dask nanny starts workers with a malloc that gives every freed temporary back to
the system; each new NumPy array is then mapped and page-faulted in again, which costs up to three times the work
itself. The first two are needed together, as one freezes the other; the third because programs run in a thread, whose
own arena of glibc's cannot hold blocks of more than 32 MB. They must be there when the process starts: ``dask worker``
processes of other clusters need them in ``distributed.nanny.pre-spawn-environ`` of Dask's configuration."""

MEGABYTES = 32
"""Size of the temporaries that are measured: more than an arena of a thread takes."""


@contextmanager
def told_to_nannies() -> Iterator[None]:
    """A context whose nannies give :data:`ENVIRONMENT` to their workers, except for variables that the user has set.

    A nanny prefers the variables of this process's environment, and leaves those of its worker there. So Dask's
    defaults that another cluster of this process left there do not count as set by the user.
    """
    import dask
    import distributed  # noqa: F401  # whose defaults they are

    key = "distributed.nanny.pre-spawn-environ"
    defaults = dask.config.merge(*dask.config.defaults)  # the current setting may be another cluster's
    dasks = {k: str(v) for k, v in dask.config.get(key, {}, config=defaults).items()}
    before = {k: os.environ.get(k) for k in ENVIRONMENT}
    for k in ENVIRONMENT:
        if k in dasks and before[k] == dasks[k]:
            del os.environ[k]
    try:
        with dask.config.set({key: ENVIRONMENT}):
            yield
    finally:
        for k, v in before.items():
            os.environ.pop(k, None)
            if v is not None:
                os.environ[k] = v


class Allocator(NamedTuple):
    """The allocator of one worker's process, as measured."""

    worker: str
    faults: int | None
    """Page faults of one temporary of 32 MiB, in the thread of programs; None where the system does not count them."""
    unlike: tuple[str, ...]
    """Variables of :data:`ENVIRONMENT` that the process was started without, or with another value."""

    @property
    def keeps(self) -> bool:
        """Whether freed memory is reused, not returned to the system each time."""
        # Fresh memory has a fault a page, and huge pages have 2 MiB at least.
        return self.faults is None or self.faults < MEGABYTES // 4

    def __str__(self) -> str:
        if self.keeps:
            return f"{self.worker}: memory is used again"
        wanted = "; start it with " + " ".join(f"{k}={ENVIRONMENT[k]}" for k in self.unlike) if self.unlike else ""
        return f"{self.worker}: {self.faults} page faults for each temporary of {MEGABYTES} MiB{wanted}"


def allocators(client: Any) -> list[Allocator]:
    """Whether each worker of a Dask cluster keeps the memory of temporaries, by measuring it there.

    Workers that :func:`~meshtape.parallel.dask.cluster.local_cluster` and ``meshtape run`` start do. Others need
    :data:`ENVIRONMENT` in Dask's configuration, before their nannies start them; a process that runs cannot be changed.

    Parameters
    ----------
    client
        A ``distributed.Client``.

    Returns
    -------
    list of Allocator
        One a worker, in the order of addresses. Each prints as a line.

    Raises
    ------
    ClusterError
        Where a worker leaves meanwhile.
    """
    workers = sorted(known_workers(client))
    found = ask(client, _measured, workers=workers)
    out = []
    for address in workers:
        answer = found[address]
        if isinstance(answer, BaseException):
            raise answer
        out.append(Allocator(address, *answer))
    return out


def _measured() -> tuple[int | None, tuple[str, ...]]:
    """On a worker: in a thread of its own, as programs are run in one, and an arena belongs to a thread."""
    import resource

    unlike = tuple(k for k, v in ENVIRONMENT.items() if os.environ.get(k) != v)
    who = getattr(resource, "RUSAGE_THREAD", None)
    faults: list[int] = []

    def use() -> None:
        x = np.ones(MEGABYTES << 17)
        for k in range(3):
            before = resource.getrusage(who).ru_minflt  # type: ignore[arg-type]
            np.negative(x)
            if k:  # at first it is fresh in any case
                faults.append(resource.getrusage(who).ru_minflt - before)  # type: ignore[arg-type]

    if who is None:
        return None, unlike
    thread = threading.Thread(target=use, name="meshtape-allocator")
    thread.start()
    thread.join()
    return min(faults), unlike


__all__ = ["Allocator", "allocators"]
__dir__ = __all__.copy
