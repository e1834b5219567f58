"""The part of a save that runs in the processes which hold the blocks: each rank writes the shards that it was dealt."""
# Paths are plain texts here: they come from manifests and go to system calls.

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..arrays.blocks import Box
from ..arrays.errors import CheckpointError
from .files import active
from .grid import Grid
from .zarr_format import write_shard

THREADS = 4


@dataclass(frozen=True)
class Task:
    """One shard to write: which array of the call, which part of the rank's block, and the file's place in the grid."""

    array: int
    part: Box
    grid: Grid
    coord: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Record:
    """One shard written."""

    file: str
    nbytes: int
    crc32c: int


def write_blocks(
    payloads: Mapping[int, tuple[str, list[Task]]], blocks: Mapping[int, Sequence[np.ndarray]]
) -> list[Record]:
    """Write the shards that the ranks of this process were given. Called through ``BlockHost.run_on_blocks``."""
    fs = active()
    jobs: list[tuple[str, Task, np.ndarray]] = []
    for rank, (root, tasks) in payloads.items():
        _wait_for(root, rank)
        jobs += [(os.path.join(root, t.file), t, blocks[rank][t.array][(*t.part.slices, ...)]) for t in tasks]

    def write(job: tuple[str, Task, np.ndarray]) -> Record:
        path, task, part = job
        nbytes, digest = write_shard(fs, path, part, task.grid, task.coord)
        return Record(task.file, nbytes, digest)

    if len(jobs) < 2:
        return [write(job) for job in jobs]
    # Threads, because each shard ends with a sync: one waits for the disk while the others copy and sum.
    with ThreadPoolExecutor(min(THREADS, len(jobs)), thread_name_prefix="meshtape-io") as pool:
        futures = [pool.submit(write, job) for job in jobs]
        try:
            return [f.result() for f in futures]
        except BaseException:
            for f in futures:
                f.cancel()
            raise


def _wait_for(root: str, rank: int) -> None:
    """The directory was just made, perhaps by another host: network file systems show it a moment later, or never."""
    for pause in (0.0, 0.1, 0.3, 0.6, 1.0):
        time.sleep(pause)
        if os.path.isdir(root):
            return
    raise CheckpointError(
        f"rank {rank} does not see {root}: a checkpoint must lie on a file system that all workers share; choose another path"
    )
