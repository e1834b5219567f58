"""Set-up of the scheduler and the workers, before a mesh or a gang begins: plugins, versions, streams."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from distributed import Client

from ...arrays.core.errors import ClusterError, WorkerMismatch
from ..base import settings
from .scheduler_plugin import MeshtapeScheduler
from .streams import WorkerStreams, streams_of
from .worker import MeshtapeWorker
from .workers import ask, check_running


def set_up(client: Client, addresses: Sequence[str]) -> WorkerStreams:
    """Register the plugins of the scheduler and of some workers, and open streams to these workers. Other workers are
    left alone: in a shared cluster, those of other users need no meshtape.

    Raises
    ------
    WorkerMismatch
        Where the scheduler or a worker cannot import meshtape, or a worker has another version of it or of NumPy.
    ClusterError
        Where a worker or the scheduler cannot be reached.
    """

    async def register() -> None:
        await asyncio.wait_for(client.register_plugin(MeshtapeScheduler()), settings.number("timeout"))

    try:
        client.sync(register)
    except (OSError, TimeoutError) as e:
        check_running(client)
        raise ClusterError(
            f"the scheduler at {client.scheduler.address} does not answer: {str(e) or 'it stands still'}"
        ) from e
    except Exception as e:
        raise WorkerMismatch(
            f"the scheduler at {client.scheduler.address} cannot import meshtape: install meshtape "
            f"{importlib.metadata.version('meshtape')} in its environment, restart it ({type(e).__name__}: {e})"
        ) from e
    _check_versions(client, addresses)
    for address, problem in ask(client, _install, workers=addresses).items():
        if isinstance(problem, BaseException):
            raise WorkerMismatch(f"worker {address} cannot set up meshtape: {problem}") from problem
    streams = streams_of(client)
    streams.open(addresses)
    return streams


async def _install(dask_worker: Any) -> None:
    if MeshtapeWorker.name not in dask_worker.plugins:
        await dask_worker.plugin_add(MeshtapeWorker(), catch_errors=False)


def _check_versions(client: Client, addresses: Sequence[str]) -> None:
    """Check that every worker has this meshtape and this NumPy, by a function that needs neither."""
    for package in ("meshtape", "numpy"):
        mine = importlib.metadata.version(package)
        for address, theirs in ask(client, importlib.metadata.version, package, workers=addresses).items():
            if isinstance(theirs, BaseException):
                raise WorkerMismatch(
                    f"worker {address} cannot import {package}: install {package} {mine} in its environment, restart it"
                )
            if theirs != mine:
                raise WorkerMismatch(
                    f"worker {address} has {package} {theirs}, this process {mine}: use one version everywhere"
                )
