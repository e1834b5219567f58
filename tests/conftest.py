"""What tests of several packages share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from distributed import Client, SchedulerPlugin


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long runs out unless they are asked for, with ``-m slow`` or any other expression."""
    if config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="a long run, of which a sample runs by default; ask for it with -m slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


class Log(SchedulerPlugin):
    """Keys of the tasks that the scheduler has seen finish."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "processing" and finish == "memory":
            self.done.append(str(key))


@contextmanager
def _tasks(client: Client) -> Iterator[list[str]]:
    """Names of the tasks that end on the workers while the context is open."""
    name = f"log-{time.monotonic_ns()}"
    client.register_plugin(Log(), name=name)
    done: list[str] = []
    try:
        yield done
    finally:
        time.sleep(0.1)  # a result travels to the client faster than the plugin is asked
        done += client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins[name].done)
        client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.remove_plugin(name))


@pytest.fixture
def tasks() -> Callable[[Client], AbstractContextManager[list[str]]]:
    """``with tasks(client) as done``: names of the tasks that end on the workers meanwhile."""
    return _tasks
