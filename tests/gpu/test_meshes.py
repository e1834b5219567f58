"""Meshes whose blocks are on this machine's GPUs: the promises of ``tests/parallel/test_device_blocks.py`` on the real
thing; there they run against an emulation of CuPy and NCCL."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.backends.backend import cupy_backend
from meshtape.parallel.dask.cluster import local_cluster
from meshtape.parallel.execution.devices import visible


@pytest.fixture
def mesh():
    with mt.Mesh({"a": 2, "b": 2}, device="cuda") as mesh:
        yield mesh


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("f4")


def test_what_this_process_sees():
    found = visible()
    assert len(found.ids) == cupy_backend().device_count() == len(set(found.ids))
    assert found.missing == ""
    assert bool(found.nccl) != bool(found.without_nccl)


STEPS = {
    "product": lambda x: x @ x.mT,
    "softmax": lambda x: mt.nn.softmax(x, axis=1),
    "layer_norm": lambda x: mt.layer_norm(x, 40),
    "mean": lambda x: mt.mean(x, axis=0),
    "max": lambda x: mt.max(x, axis=1),
    "sort": lambda x: mt.sort(x, axis=0),
    "rows": lambda x: x[np.array([0, 5, 5, 29])],
    "written": lambda x: x.at[np.array([1, 1, 7])].add(1.0),
    "gradient": lambda x: mt.grad(lambda x: mt.mean(mt.tanh(x @ x.mT)))(x),
}


@pytest.mark.parametrize("name", STEPS)
def test_blocks_on_a_gpu_give_what_the_host_gives(mesh, name):
    host = numbers(30, 40)
    x = mt.distribute(host, mesh, a=mt.Shard(0), b=mt.Shard(1))
    got = mt.compute(STEPS[name](x))
    assert all(isinstance(b, cupy_backend().xp.ndarray) for b in got._buf.handle.blocks.values())
    want = np.asarray(STEPS[name](mt.asarray(host, device="cpu")))
    np.testing.assert_allclose(np.asarray(got), want, 1e-4, 1e-5)


def test_random_numbers_do_not_depend_on_the_device(mesh):
    def draw(m):
        return np.asarray(mt.reshard(mt.random.uniform(mt.distribute(mt.random.key(3), m), (64, 5)), a=mt.Shard(0)))

    np.testing.assert_array_equal(draw(mesh), draw(mt.Mesh({"a": 3}, device="cpu")))


def test_checkpoints_go_straight_to_the_gpu(mesh, tmp_path):
    x = mt.compute(mt.distribute(numbers(10, 3), mesh, a=mt.Shard(0)) + 0)
    mt.save(tmp_path / "c", {"x": x})
    again = mt.load(tmp_path / "c", like={"x": x})["x"]
    assert all(isinstance(b, cupy_backend().xp.ndarray) for b in again._buf.handle.blocks.values())
    np.testing.assert_array_equal(np.asarray(again), numbers(10, 3))


@pytest.fixture(scope="module")
def client():
    with local_cluster(2) as client:
        yield client


@pytest.mark.timeout(300)
def test_workers_share_a_gpu_or_have_their_own(client):
    """Two worker processes: through NCCL where each has a GPU to itself, else through the host's memory; the bits are
    the same."""
    host = numbers(257, 40)
    with mt.Mesh({"a": 2}, client=client, device="cuda") as mesh:
        alone = cupy_backend().device_count() > 1 and visible().nccl
        assert ("NCCL between GPUs" in repr(mesh)) == bool(alone)
        x = mt.distribute(host, mesh, a=mt.Shard(0))
        got = np.asarray(mt.sum(x, axis=0)), np.asarray(mt.flip(x, axis=0))
    with mt.Mesh({"a": 2}, device="cuda") as mesh:
        x = mt.distribute(host, mesh, a=mt.Shard(0))
        want = np.asarray(mt.sum(x, axis=0)), np.asarray(mt.flip(x, axis=0))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
