"""Zarr arrays larger than the memory that is allowed: computed block by block, with the numbers of the whole."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zarr

import meshtape as mt
from meshtape import errors


@pytest.fixture
def stored(tmp_path):
    host = np.random.default_rng(0).normal(size=(101, 6))
    zarr.create_array(str(tmp_path / "x"), shape=host.shape, chunks=(8, 6), dtype=host.dtype)[...] = host
    return host, str(tmp_path / "x")


def where(tmp_path, name="out"):
    return str(tmp_path / name)


@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 3}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("memory", [800, 2_000, 10_000, "1 MiB"])
def test_elementwise_work_and_reductions(tmp_path, stored, sizes, memory):
    host, path = stored
    mesh = mt.Mesh(sizes)
    x = mt.from_zarr(path, mesh, a=mt.Shard(0))

    def fn(x):
        y = mt.tanh(x) * 2
        return {"y": y, "sum": mt.sum(y, axis=0), "max": mt.max(x), "mean": mt.mean(x, axis=0)}

    to = {"y": where(tmp_path), "sum": None, "max": None, "mean": None}
    out = mt.stream(fn, x, memory=memory, to=to)
    y = np.tanh(host) * 2
    np.testing.assert_allclose(zarr.open(out["y"].path)[...], y)
    np.testing.assert_allclose(np.asarray(out["sum"]), y.sum(axis=0))
    np.testing.assert_allclose(np.asarray(out["mean"]), host.mean(axis=0))
    assert float(out["max"]) == host.max()
    np.testing.assert_allclose(np.asarray(out["y"].load()), y)
    assert sizes["a"] == 1 or out["y"].load().sharding.placements["a"] == mt.Shard(0)


def test_rows_are_worked_on_whole(tmp_path, stored):
    """Products, softmax and norms along what is not split need nothing of other rows."""
    host, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    w = np.random.default_rng(1).normal(size=(6, 3))
    out = mt.stream(lambda x, w: mt.nn.softmax(mt.layer_norm(x, 6) @ w, axis=1), x, w, memory=4_000, to=where(tmp_path))
    want = mt.nn.softmax(mt.layer_norm(mt.asarray(host), 6) @ mt.asarray(w), axis=1)
    np.testing.assert_allclose(zarr.open(out.path)[...], np.asarray(want), 1e-9)


def test_two_stored_arrays_and_columns(tmp_path, stored):
    host, path = stored
    mesh = mt.Mesh({"a": 2, "b": 2})
    x = mt.from_zarr(path, mesh, a=mt.Shard(0), b=mt.Shard(1))
    assert mt.stream(lambda x, y: mt.sum(x * y), x, x, memory=1_000).shape == ()
    np.testing.assert_allclose(float(mt.stream(lambda x, y: mt.sum(x * y), x, x, memory=1_000)), (host * host).sum())


def test_what_needs_collectives_is_refused_before_anything_is_written(tmp_path, stored):
    _, path = stored
    x = mt.from_zarr(path, mt.Mesh({"a": 2}), a=mt.Shard(0))
    with pytest.raises(errors.ShardingConflict, match=r"needs all_gather.*sort needs dimension 0 whole"):
        mt.stream(lambda x: mt.sort(x, axis=0), x, to=where(tmp_path))
    with pytest.raises(errors.ShardingConflict, match="needs all_reduce"):
        mt.stream(lambda x: x - mt.mean(x, axis=0), x, to=where(tmp_path))
    with pytest.raises(errors.ShardingConflict, match=r"result 0 is split over the blocks: say where"):
        mt.stream(lambda x: x * 2, x)
    with pytest.raises(MemoryError, match=r"the smallest blocks need .* a rank, and 10 B are allowed"):
        mt.stream(lambda x: x * 2, x, memory=10, to=where(tmp_path))
    assert not (tmp_path / "out").exists()


def test_bad_input(tmp_path, stored):
    _, path = stored
    mesh = mt.Mesh({"a": 2})
    with pytest.raises(FileNotFoundError):
        mt.from_zarr(tmp_path / "nothing", mesh)
    with pytest.raises(errors.ShardingConflict, match="splits dimension 2"):
        mt.from_zarr(path, mesh, a=mt.Shard(2))
    with pytest.raises(errors.MeshError, match=r"needs an argument from mt\.from_zarr"):
        mt.stream(lambda x: x, mt.ones(3))
    with pytest.raises(errors.MeshError, match="arrays of two meshes"):
        mt.stream(lambda x, y: x + y, mt.from_zarr(path, mesh), mt.from_zarr(path, mt.Mesh({"a": 2})))
    assert repr(mt.from_zarr(path, mesh, a=mt.Shard(0))).startswith("Stored(")


def test_memory_stays_within_the_limit(tmp_path):
    """Twelve megabytes of numbers, worked on with one."""
    path = str(tmp_path / "x")
    array = zarr.create_array(path, shape=(1500, 1000), chunks=(25, 1000), dtype="f8")
    for i in range(0, 1500, 25):
        array[i : i + 25] = i
    x = mt.from_zarr(path, mt.Mesh({"a": 1}), a=mt.Shard(0))
    mt.stream(lambda x: mt.sum(mt.sin(x) * 2), x, memory="1 MB")  # what is imported and cached once
    tracemalloc.start()
    total = mt.stream(lambda x: mt.sum(mt.sin(x) * 2), x, memory="1 MB")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(float(total), 2000 * np.sin(np.arange(0, 1500, 25)).sum() * 25)
    assert peak < 3e6 < x.nbytes


@pytest.mark.timeout(180)
def test_on_worker_processes(processes, tmp_path, stored):
    host, path = stored
    with mt.Mesh({"a": 3}, client=processes) as mesh:
        x = mt.from_zarr(path, mesh, a=mt.Shard(0))
        np.testing.assert_allclose(np.asarray(x.load()), host)
        out = mt.stream(lambda x: (mt.exp(x), mt.sum(x)), x, memory=2_000, to=(where(tmp_path), None))
        np.testing.assert_allclose(zarr.open(out[0].path)[...], np.exp(host))
        np.testing.assert_allclose(float(out[1]), host.sum())
