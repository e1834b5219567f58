"""Set-up of the scheduler and the workers, before a mesh or a gang begins: plugins, versions, streams."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, Worker

from ...arrays.core.errors import ClusterError, WorkerMismatch
from ..base import settings
from .scheduler_plugin import MeshtapeScheduler
from .streams import WorkerStreams, streams_of
from .worker import MeshtapeWorker
from .workers import ask, check_running, on_loop, while_answering


def set_up(client: Client, addresses: Sequence[str]) -> WorkerStreams:
    """Register the plugins of the scheduler and of some workers, and open streams to these workers. Other workers are
    left alone: in a shared cluster, those of other users need no meshtape.

    Raises
    ------
    WorkerMismatch
        Where the scheduler or a worker cannot import meshtape, or a worker has another version of it or of NumPy.
    ClusterError
        Where a worker or the scheduler cannot be reached, or the scheduler refuses plugins.
    """

    async def register() -> None:
        await asyncio.wait_for(client.register_plugin(MeshtapeScheduler()), settings.number("timeout"))

    begin = _beginning()
    try:
        while_answering(client, client._run_on_scheduler, begin)
        on_loop(client, register)
    except ClusterError:
        raise
    except (OSError, TimeoutError) as e:
        check_running(client)
        raise ClusterError(
            f"the scheduler at {client.scheduler.address} does not answer: {str(e) or 'it stands still'}"
        ) from e
    except ImportError as e:
        raise WorkerMismatch(
            f"the scheduler at {client.scheduler.address} cannot import meshtape: install meshtape "
            f"{importlib.metadata.version('meshtape')} in its environment, restart it ({type(e).__name__}: {e})"
        ) from e
    except Exception as e:
        raise ClusterError(f"the scheduler at {client.scheduler.address} takes no plugin of meshtape: {e}") from e
    _check_versions(client, addresses)
    for address, problem in ask(client, begin, workers=addresses).items():
        if isinstance(problem, BaseException):
            raise WorkerMismatch(f"worker {address} cannot set up meshtape: {problem}") from problem
    streams = streams_of(client)
    streams.open(addresses)
    return streams


def _beginning() -> Callable[..., Any]:
    """A function for the scheduler and the workers. It imports meshtape in a thread, which may take long where disks
    are slow: an event loop that stands still meanwhile counts as lost. It travels by value, as a function of a module
    would be imported by the loop."""

    async def begin(dask_worker: Any) -> None:
        import asyncio
        import importlib

        await (await asyncio.to_thread(importlib.import_module, "meshtape.parallel.dask.set_up")).install(dask_worker)

    return begin


async def install(server: Any) -> None:
    """Give a worker our plugin, once."""
    if isinstance(server, Worker) and MeshtapeWorker.name not in server.plugins:
        await server.plugin_add(MeshtapeWorker(), catch_errors=False)


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
