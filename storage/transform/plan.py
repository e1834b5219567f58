"""The fingerprint of a transfer's plan, which decides whether an interrupted run can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from ..rules.lazy_tensors import Recipes
from ..stores.generations import Generation
from .sinks.sink import TransferSink

MEMORY_LIMIT = 256 << 20
THREADS = 2
Progress = Callable[[int, int], None]


def fingerprint(
    source: Generation, tensors: Sequence[Any], sink: TransferSink, windows: int, memory_limit: int, threads: int
) -> str:
    """A digest that is equal for two runs that write the same windows of the same bytes."""
    made = Recipes()
    held = [made.of(t) for t in tensors]
    plan = json.dumps(
        [3, dict(source.tags), source.changes(), held, sink.describe(), windows, memory_limit, threads], sort_keys=True
    )
    return hashlib.sha256(plan.encode()).hexdigest()
