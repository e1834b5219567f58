"""Copies in the memory of the workers: every block on two of them, and all of it there again when one is gone."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshtape as mt
from meshtape.arrays.core.blocks import Box
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.dask.workers import known_workers
from meshtape.parallel.mesh.replicas import COPIES, Key, Replica, plan_copies

LIMIT = 250.0
X = np.arange(30.0).reshape(6, 5)


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(1, 100)), min_size=1, max_size=30),
    st.integers(1, 3),
)
def test_every_block_is_kept_twice_and_nobody_sends_what_he_lacks(count, blocks, hosts):
    workers = [f"tcp://10.0.0.{i % hosts}:{1000 + i}" for i in range(count)]
    holders = {
        Key(i, Box((i,), (1,))): (sorted({workers[w % count] for w in found}), nbytes)
        for i, (found, nbytes) in enumerate(blocks)
    }
    keeps, sends = plan_copies(holders, workers)
    where = {key: [w for w, keys in keeps.items() if key in keys] for key in holders}
    for key, kept in where.items():
        assert set(kept) <= set(holders[key][0])
    for (source, target), keys in sends.items():
        for key in keys:
            assert source in holders[key][0]
            where[key].append(target)
            if hosts > 1 and count > 1:  # then there is a worker on another host
                assert source.split(":")[1] != target.split(":")[1]
    assert all(len(set(kept)) == len(kept) == COPIES for kept in where.values())


def tree(mesh):
    return {
        "split": mt.distribute(X, mesh, data=mt.Shard(0)) + 1,
        "whole": mt.distribute(np.arange(4), mesh) * 2,
        "empty": mt.distribute(np.zeros((0, 3)), mesh, data=mt.Shard(0)) + 1,
        "number": mt.distribute(np.float32(3), mesh) + 1,
        "sent": mt.distribute(X[0], mesh),  # still in this process
        "none": None,
    }


def check(found, sharding):
    assert found["split"].sharding.layout == sharding.layout
    np.testing.assert_array_equal(np.asarray(found["split"]), X + 1)
    np.testing.assert_array_equal(np.asarray(found["whole"]), np.arange(4) * 2)
    np.testing.assert_array_equal(np.asarray(found["sent"]), X[0])
    assert found["empty"].shape == (0, 3)
    assert float(found["number"]) == 4.0
    assert found["none"] is None


def shardings(mesh):
    split = mt.Sharding(mesh, data=mt.Shard(0))
    return {n: None if n == "none" else split if n in ("split", "empty") else mt.Sharding(mesh) for n in tree(mesh)}


def test_a_copy_in_this_process_goes_to_any_mesh_of_it():
    copy = Replica(tree(mt.Mesh({"data": 2})))
    assert copy.complete
    assert copy.available([])
    mesh = mt.Mesh({"data": 4})
    check(copy.restore(shardings(mesh)), shardings(mesh)["split"])


def test_a_copy_outlives_what_it_was_taken_of_and_the_death_of_a_worker(mortal, eventually):
    old = mt.Mesh({"data": 3}, client=mortal)
    held = tree(old)
    copy = Replica(held)
    for _ in range(3):  # the mesh computes on, and lets go of what was copied
        held = {n: None if x is None else x * 2 for n, x in held.items()}
        mt.compute(held)
    assert copy.wait(LIMIT)
    victim, left = old.runtime.addresses[1], old.runtime.addresses[:1]
    os.kill(mortal.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
    assert copy.available(left)
    assert not copy.available([])
    eventually(lambda: victim not in known_workers(mortal))
    with mt.Mesh({"data": 2}, client=mortal, workers=left) as mesh:
        check(copy.restore(shardings(mesh)), shardings(mesh)["split"])
        with pytest.raises(mt.errors.ReshardError, match="cannot be put on"):
            copy.restore(shardings(mt.Mesh({"data": 2})))
        copy.drop()
        assert not copy.available(left)


def test_with_one_worker_the_copy_is_in_this_process():
    with local_cluster(1, processes=False) as client, mt.Mesh({"data": 2}, client=client) as mesh:
        copy = Replica(tree(mesh))
        with mt.Mesh({"data": 3}, client=client) as other:
            check(copy.restore(shardings(other)), shardings(other)["split"])
    assert copy.available([])
    np.testing.assert_array_equal(np.asarray(copy.local()["split"]), X + 1)
    with pytest.raises(mt.errors.ReshardError, match="structure"):
        copy.restore({})


def test_a_bit_that_flips_in_a_copy_is_never_used(processes):
    def flip(dask_worker):
        """Of each block that is kept, one bit."""
        from meshtape.parallel.mesh.replicas import ReplicaBlocks

        changed = 0
        for value in [v for v in dask_worker.data.values() if isinstance(v, ReplicaBlocks)]:
            for key, block in value.blocks.items():
                value.blocks[key] = other = block.copy()
                other.reshape(-1).view("u1")[-1] ^= 4
                changed += 1
        return changed

    large = np.tile(X, 100)  # small ones are not among Dask's data
    with mt.Mesh({"data": 2}, client=processes) as mesh:
        x = mt.distribute(large, mesh, data=mt.Shard(0)) + 1
        copy = Replica({"x": x})
        assert copy.wait(LIMIT)
        first, second = mesh.runtime.addresses
        assert all(processes.run(flip, workers=[first]).values())
        sharding = mt.Sharding(mesh, data=mt.Shard(0))
        np.testing.assert_array_equal(np.asarray(copy.restore({"x": sharding})["x"]), large + 1)
        np.testing.assert_array_equal(np.asarray(x), large + 1)
        assert all(processes.run(flip, workers=[second]).values())
        with pytest.raises(mt.errors.RankLost, match=r"no worker is left that keeps the block .* as it was"):
            copy.restore({"x": sharding})
