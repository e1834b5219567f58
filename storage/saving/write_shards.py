"""The part of a save that runs in the processes which hold the blocks: each rank writes the shards that it was
dealt."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...arrays.core.errors import CheckpointError
from ..base import activity
from ..base.threads import QUICK, SYNCS, UPLOADS, compressors, in_threads, writers
from ..format.chunk_sums import packed
from ..format.zarr_format import ShardBytes
from ..loading.deltas import from_base
from ..stores import atomic_directory, store
from ..stores.filesystem import active
from .dual import DualBytes
from .items import Record, Task
from .packs import laid_out
from .sharing import write_or_share

_OPEN = 128  # files that are written before they are synced


def write_blocks(
    payloads: Mapping[int, tuple[str, list[Task]]], blocks: Mapping[int, Sequence[np.ndarray]]
) -> list[Record]:
    """Write the shards that the ranks of this process were given. Called through ``BlockHost.run_on_blocks``."""
    fs = active()
    jobs, uploads = list[_Job](), list[_Job]()
    for rank, (root, tasks) in payloads.items():
        if store.is_url(root):
            uploads += _jobs(root, tasks, blocks[rank])
        else:
            wait_for(root, rank)
            jobs += _jobs(root, tasks, blocks[rank])

    records = _upload(uploads)
    opened: set[int] = set()
    quick = len(jobs) >= _OPEN // 2  # until a sync waits for a disk
    helpers = compressors(len(jobs), writers())

    def write(job: _Job) -> tuple[Callable[[], list[Record]], int, bool]:
        root, (task, *_), _ = job
        batches, found = _file(job, helpers)
        fd, shared = write_or_share(os.path.join(root, task.pack or task.file), batches(), task.like)
        opened.add(fd)
        return found, fd, shared

    def sync(fd: int) -> None:
        fs.fsync(fd)
        opened.discard(fd)
        fs.close(fd)

    try:
        # Here, where the error happens: on its way from another process it would count as the failure of a rank.
        with atomic_directory.writing(jobs[0][0] if jobs else ""):
            for first in range(0, len(jobs), _OPEN):
                written = in_threads(write, jobs[first : first + _OPEN], alone=quick)
                began = time.perf_counter()
                in_threads(sync, [fd for _, fd, _ in written], SYNCS, alone=quick)
                quick = quick and time.perf_counter() - began < QUICK * len(written)
                for found, _, shared in written:
                    some = found()
                    records += [replace(r, shared=True) for r in some] if shared else some
    finally:
        for fd in opened:
            fs.close(fd)
    return records


_Job = tuple[str, list[Task], list[np.ndarray]]  # root, tasks and their arrays: those of one pack, or one alone


def _jobs(root: str, tasks: Sequence[Task], blocks: Sequence[np.ndarray]) -> list[_Job]:
    """The files of one rank."""
    out: dict[str, _Job] = {}
    for t in tasks:
        _, some, parts = out.get(file := t.pack or t.file) or out.setdefault(file, (root, [], []))
        some.append(t)
        block = blocks[t.array]
        parts.append(block if t.part.shape == block.shape else block[(*t.part.slices, ...)])
    return list(out.values())


def _file(job: _Job, helpers: int) -> tuple[Callable[[], Generator[list[Any]]], Callable[[], list[Record]]]:
    """(source of the buffers of a file, its records when all of them are gone)."""
    root, (task, *_), (part, *_) = job
    wrote = partial(activity.wrote, root)
    if not task.pack:
        shard: ShardBytes | DualBytes
        if task.dual is not None:
            shard = DualBytes(part, task.grid, task.coord, wrote, task.dual)
        else:
            delta = (
                partial(from_base, task.base, task.grid, task.coord, task.compression)
                if task.base is not None and task.compression is not None
                else None
            )
            shard = ShardBytes(part, task.grid, task.coord, wrote, task.compression, helpers, delta)
        return shard.batches, lambda: [Record(task.file, shard.nbytes, shard.digest, packed(shard.sums))]
    records, body = laid_out(*job[1:])

    def batches() -> Generator[list[Any]]:
        for piece in body():
            yield [piece]
            wrote(len(piece))

    return batches, lambda: records


def _upload(jobs: Sequence[_Job]) -> list[Record]:
    """`write_blocks` for object stores: a shard is one upload."""
    helpers = compressors(len(jobs), UPLOADS)

    def put(job: _Job) -> list[Record]:
        root, (task, *_), _ = job
        batches, found = _file(job, helpers)
        store.at(root).put(task.pack or task.file, lambda: itertools.chain.from_iterable(batches()))
        return found()

    return [r for found in in_threads(put, jobs, UPLOADS) for r in found]


def wait_for(root: str, rank: int) -> None:
    """The directory was just made, perhaps by another host: network file systems show it a moment later, or never."""
    for pause in (0.0, 0.1, 0.3, 0.6, 1.0):
        time.sleep(pause)
        if os.path.isdir(root):
            return
    raise CheckpointError(
        f"rank {rank} does not see {root}: a checkpoint must lie on a file system that all workers share; choose "
        "another path"
    )
