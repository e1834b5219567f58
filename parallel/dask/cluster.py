"""Connecting to Dask: an existing scheduler, or workers of this machine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...arrays.core.errors import ClusterError, SchedulerUnreachable
from ..base import settings
from . import worker_preload
from .malloc import told_to_nannies

SELDOM = {
    "distributed.admin.tick.interval": ("20ms", "500ms"),
    "distributed.worker.profile.interval": ("10ms", "100ms"),
}
"""Intervals of Dask's periodic work: its default, and the value set here if the user set none. With the defaults an
idle scheduler and two workers take 127 ms of processor time a second (measured), and the interpreter from
computations."""


@contextmanager
def connect(address: str, *, timeout: float | None = None, security: Any = None) -> Iterator[Any]:
    """A client of the scheduler at ``address``; ``security`` is Dask's, for TLS. ``timeout`` is
    ``meshtape.timeouts.connect`` of Dask's configuration where it is not given.

    Raises
    ------
    SchedulerUnreachable
        When nothing answers there within ``timeout`` seconds.
    """
    import logging

    from distributed import Client

    from .progress import follow, last_word

    timeout = settings.number("timeouts.connect") if timeout is None else timeout
    log = logging.getLogger("distributed")
    level = log.level
    log.setLevel(logging.CRITICAL)  # its own account of failed connections is a page long
    found: list[Any] = []

    def start() -> None:
        client = Client.__new__(Client)
        try:
            client.__init__(address, timeout=timeout, security=security, set_as_default=False)
            found.append(client)
        except (OSError, TimeoutError, ValueError, TypeError) as e:
            found.append(e)
            # Else the garbage collector does it, at times while Dask starts another event loop, under a lock that both
            # need.
            with contextlib.suppress(Exception):
                client.close()

    # In a thread of its own: where something listens that never says a word, Dask's client waits for ever.
    thread = threading.Thread(target=start, name="meshtape-connect", daemon=True)
    thread.start()
    try:
        thread.join(timeout + 2.0)
    finally:
        log.setLevel(level)
    client = found[0] if found else TimeoutError(f"nothing was said in {timeout:.0f} s")
    if isinstance(client, TypeError) and address.startswith(("tls://", "wss://")):
        raise SchedulerUnreachable(
            f"the Dask scheduler at {address} asks for certificates: give security=Security(…), or --tls-ca, "
            "--tls-cert and --tls-key"
        ) from client
    if isinstance(client, Exception):
        raise SchedulerUnreachable(
            f"no Dask scheduler answers at {address} (waited {timeout:.0f} s): is it running, and is the address "
            "like tcp://host:8786?"
        ) from client
    try:
        follow(client)
        yield client
        last_word(client)
    finally:
        client.close()


@contextmanager
def local_cluster(workers: int, *, processes: bool = True, threads_per_worker: int = 1) -> Iterator[Any]:
    """A client of a Dask cluster of this machine, started here and stopped at the end, with one thread a worker.

    Raises
    ------
    ClusterError
        For no workers, and where their processes do not start: each reads the main script anew, which must be a file
        that starts workers under ``if __name__ == "__main__":`` alone.
    """
    if workers < 1:
        raise ClusterError(f"a cluster needs at least one worker, got {workers}")
    import dask
    from distributed import Client, LocalCluster

    from .progress import follow, last_word

    of_workers = {
        "distributed.worker.memory.terminate": False,
        # Dask's cluster looks, this long after a worker was lost, whether one of its name is there, and closes its
        # nanny if not. Its 15 s let a worker that dies twice within them, and is just being started again, stay away
        # for ever.
        "distributed.deploy.lost-worker-timeout": "1 hour",
        **{key: ours for key, (theirs, ours) in SELDOM.items() if dask.config.get(key) == theirs},
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(of_workers))
        stack.enter_context(told_to_nannies())
        try:
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=threads_per_worker,
                    processes=processes,
                    dashboard_address="127.0.0.1:0",  # any free port: the usual one may be taken
                    silence_logs=40,
                    **({"preload": _preloads()} if processes else {}),
                )
            )
        except RuntimeError as e:
            raise ClusterError(
                f"the worker processes did not start: {e} Each reads the main script anew: that must be a file, in "
                "which what "
                'starts workers stands under `if __name__ == "__main__":`'
            ) from e
        client = stack.enter_context(Client(cluster, set_as_default=False))
        client.wait_for_workers(workers)
        follow(client)
        yield client
        last_word(client)


def _preloads() -> list[str]:
    """The user's preloads of workers, followed by ours."""
    import dask

    users = dask.config.get("distributed.worker.preload")
    return [*([users] if isinstance(users, str) else users), worker_preload.__name__]


__all__ = ["connect", "local_cluster"]
__dir__ = __all__.copy
