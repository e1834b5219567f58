"""The plan of a transfer, and its fingerprint, which decides whether an interrupted run can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..rules.lazy_tensors import Recipes
from ..stores.generations import Generation
from .sinks.sink import TransferSink
from .workers import Workers

MEMORY_LIMIT = 256 << 20
THREADS = 2
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Transfer:
    """Lazy tensors on their way to a sink at a target.

    ``source`` is what they read. With an executor the windows are read and written by its processes, which must see
    both. Unless ``allow_overflow``, `Lossy` is raised once an array is complete whose cast lost values, and nothing is
    committed.
    """

    source: Generation
    tensors: Sequence[Any]
    sink: TransferSink
    target: str
    memory_limit: int
    spread: Workers
    overwrite: bool
    progress: Progress
    allow_overflow: bool

    def fingerprint(self, windows: int) -> str:
        """A digest that is equal for two runs that write the same windows of the same bytes."""
        made, source = Recipes(), self.source
        read = [dict(source.tags), source.changes(), [made.of(t) for t in self.tensors]]
        plan = [3, *read, self.sink.describe(), windows, self.memory_limit, self.spread.threads]
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
