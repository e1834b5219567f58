"""Blocks of a GPU among the values that a worker of the real Dask keeps: beyond a limit they go to disk or to host
memory, and come back to the device when they are read. ``tests/parallel/test_device_blocks.py`` has the steps of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import meshtape as mt
from meshtape.parallel.base.bundles import Bundle

COUNT = 12
CALM = {f"distributed.worker.memory.{k}": False for k in ("spill", "pause", "terminate")}
"""Limits of the process's memory, which is not the memory that is counted here."""


def by_dask(limit: int) -> Iterator[Client]:
    """A worker process whose values may take ``limit`` bytes, those of the device counted."""
    of_workers = {**CALM, "distributed.worker.memory.target": 1 / 4}
    with (
        dask.config.set(of_workers),
        LocalCluster(
            n_workers=1, threads_per_worker=1, memory_limit=4 * limit, dashboard_address=None, silence_logs=40
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def by_dask_cuda(limit: int) -> Iterator[Client]:
    """A worker of dask-cuda whose values may take ``limit`` bytes of its GPU."""
    dask_cuda = pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    with (
        dask_cuda.LocalCUDACluster(n_workers=1, device_memory_limit=limit, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", [by_dask, by_dask_cuda])
def test_arrays_beyond_the_limit_leave_the_device_and_come_back(
    cluster: Callable[[int], Iterator[Client]], emulated: bool
) -> None:

    def on_the_device() -> list[float]:  # nested, as the worker cannot import this file
        """The first elements of the whole arrays that it has there."""
        gc.collect()
        slots = [b for o in gc.get_objects() if isinstance(o, Bundle) for b in o.slots.values()]
        blocks = [b[0] for b in slots if not isinstance(b[0], np.ndarray) and b[0].ndim == 2]
        return [float(b[0, 0]) for b in blocks]

    def on_disk(dask_worker: Any) -> int:
        return len(dask_worker.data.slow)

    side = 256 if emulated else 2048
    size = side * side * 4
    with (
        contextlib.contextmanager(cluster)(COUNT // 3 * size) as client,
        mt.Mesh({"a": 2}, client=client, device="cuda") as mesh,
    ):
        host = np.random.default_rng(0).standard_normal((side, side), np.float32)
        arrays = [mt.compute(mt.distribute(host, mesh, a=mt.Shard(0)) * (i + 2.0)) for i in range(COUNT)]
        firsts = [float(np.float32(i + 2) * host[0, 0]) for i in range(COUNT)]
        (held,) = client.run(on_the_device).values()
        assert 0 < len(set(firsts) & set(held)) <= COUNT // 2
        assert firsts[0] not in held
        if cluster is by_dask:
            (files,) = client.run(on_disk).values()
            assert files >= COUNT // 2
        total = np.asarray(mt.sum(arrays[0] + arrays[1], axis=1))
        np.testing.assert_allclose(total, host.sum(1) * 5, rtol=1e-4, atol=1e-3)
        (held,) = client.run(on_the_device).values()
        assert {*firsts[:2]} <= {*held}
        for i, x in enumerate(arrays):
            np.testing.assert_array_equal(np.asarray(x), host * np.float32(i + 2))
