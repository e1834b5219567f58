"""The preload of worker processes that are started here: it leaves the terminal to the job.

Ctrl-C reaches every process of the terminal's group. The job saves its state at it, which lies on the workers: they
must outlive the signal. They still end with the process that started them, since they watch a pipe to it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by Dask in the process of a worker, before it takes work: makes that process a group of its own."""
    if hasattr(os, "setpgid"):  # not on Windows, where the console's Ctrl-C is another mechanism
        with contextlib.suppress(PermissionError):  # the leader of a session is in a group of its own already
            os.setpgid(0, 0)
