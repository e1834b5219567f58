"""Messages between two GPUs of this machine: the contract of ``transports`` on device memory. Never run so far on GPUs;
``tests/parallel/test_device_blocks.py`` runs the same code against an emulation."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.collectives.combining import ALL_REDUCE, AllReduce
from meshtape.parallel.collectives.pieces import Fold
from meshtape.parallel.transports.rendezvous import DataPlane

MESH, SECRET = b"n" * 16, b"s" * 32


@pytest.fixture
def pair() -> Any:
    import cupy

    from meshtape.parallel.transports.nccl import NcclGroup, nccl

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    try:
        nccl()
    except mt.errors.BackendError as e:
        pytest.skip(str(e))
    planes = [DataPlane("127.0.0.1") for _ in range(2)]
    groups: list[Any] = [None, None]

    def join(me: int) -> None:
        with cupy.cuda.Device(me):
            host = planes[me].group(MESH, 0, me, {1 - me: planes[1 - me].address}, {0: "rank 0", 1: "rank 1"}, 30)
            host.begin(1, 30)
            groups[me] = NcclGroup(host, me, 2)

    for p in planes:
        p.register_mesh(MESH, SECRET)
    together(join)
    yield groups
    for p in planes:
        p.close()


def together(fn: Any) -> None:
    threads = [threading.Thread(target=fn, args=(me,)) for me in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)


def test_blocks_and_sums_cross_between_devices(pair):
    import cupy

    sums: list[Any] = [None, None]

    def run(me: int) -> None:
        with cupy.cuda.Device(me):
            mine = cupy.arange(600_000, dtype=cupy.float32) * (me + 1)
            theirs = cupy.empty((300, 2000), cupy.float32)
            pair[me].exchange(0, "swap", {1 - me: [mine.reshape(300, 2000)]}, {1 - me: [theirs]})
            cupy.testing.assert_array_equal(theirs.ravel(), cupy.arange(600_000, dtype=cupy.float32) * (2 - me))
            out = cupy.empty_like(mine)
            fold = Fold(out, [mine if p == me else None for p in (0, 1)], np.add, False)
            pair[me].exchange(1, "sum", {1 - me: [mine]}, {1 - me: [fold.sink([1 - me])]})
            own = AllReduce((0, 1), [mine], np.add, np.dtype(np.float32), False)
            pair[me].exchange(2, "sum of its own", {}, {ALL_REDUCE: [own]})
            sums[me] = cupy.asnumpy(out), cupy.asnumpy(own.result)

    together(run)
    for s in sums:
        for one in s:
            np.testing.assert_array_equal(one, np.arange(600_000, dtype=np.float32) * 3)
