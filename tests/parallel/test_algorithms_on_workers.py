"""Every algorithm of collectives between worker processes, with several ranks each: the bits of the virtual mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.collectives.costs import Ways

pytestmark = pytest.mark.timeout(300)


def computed(mesh: mt.Mesh) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x = mt.distribute(rng.normal(size=(20, 15)) * 4.0 ** rng.integers(-3, 3, (20, 15)), mesh, a=mt.Shard(0))

    def per_rank(x: Any) -> Any:
        whole = mt.all_reduce(x[:2], "a")
        part = mt.reduce_scatter(x[:1], "a", dim=1)
        return mt.concat([whole, mt.all_gather(part, "a", dim=1), mt.broadcast(x[:1], "a", source=3)])

    rows = {"a": mt.Shard(0)}
    out = [
        mt.reshard(mt.sum(x, axis=0), a=mt.Replicate()),
        mt.reshard(x, a=mt.Shard(1)),
        mt.reshard(x, a=mt.Replicate()),
        mt.shard_map(per_rank, mesh, rows, {})(x),
        mt.shard_map(lambda x: mt.all_to_all(x, "a", split_dim=1, concat_dim=0), mesh, rows, {"a": mt.Shard(1)})(x),
    ]
    return [np.asarray(mt.compute(y)) for y in out]


def test_worker_processes_have_the_bits_of_the_virtual_mesh_by_every_algorithm(processes):

    def take_only(algorithm: str | None) -> None:
        from meshtape.parallel.resharding import schedule

        schedule.COSTS = schedule.COSTS._replace(only=algorithm)

    want = computed(mt.Mesh({"a": 5}))
    try:
        for algorithm in (None, *Ways._fields):
            processes.run(take_only, algorithm)
            with mt.Mesh({"a": 5}, client=processes) as mesh:
                for got, expected in zip(computed(mesh), want, strict=True):
                    assert got.tobytes() == expected.tobytes()
    finally:
        processes.run(take_only, None)
