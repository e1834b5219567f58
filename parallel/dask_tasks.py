"""Tasks of Dask's graphs.

Dask's specification of graphs calls the class ``dask.Task`` (https://docs.dask.org/en/stable/spec.html) and says that the older form,
tuples, will go; the releases up to 2026.8 have the class in a module of their own only. This is the one place that knows where it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import dask
from distributed import Future

from ..arrays.errors import ClusterError


def _classes() -> tuple[Any, Any]:
    """The classes of tasks, and of references to them."""
    for module in ("dask", "dask.task_spec", "dask._task_spec"):
        try:
            found = importlib.import_module(module)
            return found.Task, found.TaskRef
        except (ImportError, AttributeError):
            continue
    raise ClusterError(
        f"dask {dask.__version__} has no Task where meshtape looks for it: install one from 2025.1 to 2026.8, or a newer meshtape"
    )


def task(key: str, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The task that calls ``fn(*args)``; futures among the arguments are handed over as what they hold. Other containers are not
    looked into.

    >>> task("total", sum, [[1, 2]])()
    3
    """
    make, refer = _classes()
    return make(key, fn, *(refer(a.key) if isinstance(a, Future) else a for a in args))
