"""The lock between saves of deltas and those who delete or replace anchors: on the folder of the run.

A save of a delta shares it from its look at the anchor to its commit. Who deletes an anchor has it alone while it looks
for deltas, gives them another base, and deletes. Object stores have no such locks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...arrays.core.errors import CheckpointError
from ..stores import store
from ..stores.filesystem import try_lock

PATIENCE = 60.0  # seconds that a deletion waits for saves, and a save for a deletion
_PAUSE = 0.02


@contextmanager
def locked(folder: str, *, shared: bool = False, patience: float | None = None) -> Iterator[bool]:
    """Hold the lock; gives False where it is another's after ``patience`` seconds of 0, and raises after more."""
    if store.is_url(folder) or not os.path.isdir(folder):
        yield True
        return
    patience = PATIENCE if patience is None else patience
    fd = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + patience
        while (mine := try_lock(fd, shared)) is False and time.monotonic() < end:
            time.sleep(_PAUSE)
        if mine is False and patience:
            other = "deletes a checkpoint" if shared else "saves deltas or deletes a checkpoint"
            raise CheckpointError(
                f"{folder}: another {other} for longer than {patience:g} s; call again when it has ended"
            )
        yield mine is not False
    finally:
        os.close(fd)
