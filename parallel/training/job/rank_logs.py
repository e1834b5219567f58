"""Logs of all ranks of a job in one place: a file a worker, written as the lines come."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import WorkerPlugin

from ...dask.workers import LOOK, give_plugin, on_loop

TOPIC = "meshtape-logs"
LOGGERS = {"": logging.WARNING, "meshtape": logging.INFO, "distributed.worker": logging.INFO}
"""The lowest level of collected lines by logger: warnings of any library, and news of workers."""


class _ToScheduler(logging.Handler):
    """Sends log lines to subscribers. Lines that cannot be sent are lost, as logging must not end a job."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.worker = worker
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self.worker.log_event(TOPIC, {"worker": self.worker.address, "line": self.format(record)})


class ForwardLogs(WorkerPlugin):
    """A plugin that forwards the logs of a worker. It is installed on all workers, later ones too."""

    name = TOPIC

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def setup(self, worker: Any) -> None:
        """Called by Dask when the worker gets the plugin."""
        self.handlers = []
        for name, level in LOGGERS.items():
            handler = _ToScheduler(worker)
            handler.setLevel(level)
            # A record passes the handlers of its logger and of those above it: the root's must not take it again.
            if not name:
                handler.addFilter(lambda r: not r.name.startswith(tuple(n for n in LOGGERS if n)))
            logging.getLogger(name).addHandler(handler)
            self.handlers.append((name, handler))
        self.silenced = []
        if self.quiet:
            for theirs in logging.getLogger("distributed").handlers:
                self.silenced.append((theirs, theirs.level))
                theirs.setLevel(logging.CRITICAL)

    def teardown(self, worker: Any) -> None:
        """Called by Dask when the plugin is taken away, or the worker ends."""
        for name, handler in self.handlers:
            logging.getLogger(name).removeHandler(handler)
        for handler, level in self.silenced:
            handler.setLevel(level)


def file_name(address: str) -> str:
    """The file of a worker's log.

    >>> file_name("tcp://10.0.0.1:40331")
    '10.0.0.1_40331.log'
    """
    where = address.partition("://")[2] or address
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in where) + ".log"


@contextmanager
def collected(client: Any, folder: Path, *, quiet: bool = False) -> Iterator[None]:
    """A context in which the logs of ``client``'s workers are appended to files in ``folder``.

    ``quiet`` keeps logs of Dask's workers from their own standard error. For workers that were started for this job
    that is the user's terminal, where each lost worker would leave a page of tracebacks although the run survives.
    """
    if client is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)

    def write(event: Any) -> None:
        said = event[1]
        with contextlib.suppress(OSError), (folder / file_name(said["worker"])).open("a", encoding="utf-8") as file:
            file.write(said["line"] + "\n")

    client.subscribe_topic(TOPIC, write)
    if (problem := give_plugin(client, ForwardLogs(quiet))) is not None:
        raise problem
    try:
        yield
    finally:
        if client.status == "running":  # else its scheduler is gone, with all that was registered there
            # It may go just now.
            with contextlib.suppress(OSError, TimeoutError, RuntimeError, ValueError, AttributeError):
                client.unsubscribe_topic(TOPIC)
                # A worker may stand still.
                on_loop(client, client.scheduler.unregister_worker_plugin, name=TOPIC, seconds=LOOK)
