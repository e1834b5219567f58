"""Our arrays as Dask collections, and Dask's arrays on meshes: values, places, and no way through the client."""

from __future__ import annotations

import contextlib

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from dask.base import is_dask_collection
from distributed import progress, wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors

SHAPES = [(), (5,), (0,), (1,), (6, 4), (3, 5, 2)]
bounded = settings(deadline=None, max_examples=25, database=None, suppress_health_check=list(HealthCheck))


def draw_sharding(data, mesh, ndim):
    order = data.draw(st.permutations(mesh.names))
    choices = [mt.Replicate(), *(mt.Shard(d) for d in range(ndim))]
    return mt.Sharding(mesh, **{n: data.draw(st.sampled_from(choices)) for n in order})


@bounded
@given(data=st.data())
def test_there_and_back(data):
    sizes = data.draw(st.sampled_from([{"a": 1}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}]))
    mesh, shape = mt.Mesh(sizes), data.draw(st.sampled_from(SHAPES))
    x = np.random.default_rng(0).normal(size=shape)
    y = mt.distribute(x, draw_sharding(data, mesh, len(shape))) + 1
    d = y.to_dask()
    assert (d.shape, d.dtype) == (y.shape, y.dtype)
    np.testing.assert_array_equal(d.compute(scheduler="sync"), x + 1)
    placements = draw_sharding(data, mesh, len(shape)).placements
    with dask.config.set(scheduler="sync"):
        back = mt.from_dask(d * 2, mesh, **placements)
    np.testing.assert_array_equal(np.asarray(back), 2 * (x + 1))
    np.testing.assert_array_equal(np.asarray(back - 1), 2 * (x + 1) - 1)


def test_chunks_are_blocks():
    mesh = mt.Mesh({"a": 4, "b": 2})
    x = mt.distribute(np.ones((5, 6)), mesh, a=mt.Shard(0), b=mt.Shard(1)) * 1
    assert x.to_dask().chunks == ((2, 2, 1), (3, 3))


def test_a_local_array_is_no_collection():
    assert not is_dask_collection(mt.ones(3))
    assert mt.ones(3).to_dask().sum().compute(scheduler="sync") == 3


def test_a_pending_sum_is_made():
    mesh = mt.Mesh({"a": 2})
    x = mt.sum(mt.distribute(np.ones((4, 3)), mesh, a=mt.Shard(0)), axis=0)
    assert x.to_dask().compute(scheduler="sync").tolist() == [4, 4, 4]


def test_the_collection_protocol():
    mesh = mt.Mesh({"a": 2})
    x = mt.distribute(np.arange(6.0), mesh, a=mt.Shard(0)) * 2
    assert is_dask_collection(x)
    (value,) = dask.compute(x, scheduler="sync")
    np.testing.assert_array_equal(value, 2 * np.arange(6.0))
    (again,) = dask.persist(x, scheduler="sync")
    assert again.sharding == x.sharding
    assert dask.base.tokenize(x) == dask.base.tokenize(x)
    assert dask.base.tokenize(x) != dask.base.tokenize(x + 1)


def test_what_is_refused():
    mesh = mt.Mesh({"a": 2})
    with pytest.raises(errors.MeshError, match=r"takes a dask\.array, got numpy\.ndarray"):
        mt.from_dask(np.ones(3), mesh)
    unknown = da.arange(6, chunks=3)
    with pytest.raises(errors.ShapeError, match="compute_chunk_sizes"):
        mt.from_dask(unknown[unknown > 2], mesh)
    with pytest.raises(errors.ShardingConflict, match="splits dimension 1"):
        mt.from_dask(unknown, mesh, a=mt.Shard(1))
    with pytest.raises(errors.MeshError, match="no pending reductions"):
        mt.from_dask(unknown, mesh, a=mt.Partial())
    masked = da.from_array(np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0]), chunks=2)
    for taken in (lambda: mt.from_dask(masked, mesh, a=mt.Shard(0)), lambda: mt.asarray(masked)):
        with pytest.raises(errors.DTypeError, match="masked elements are no numbers"):
            taken()
    for dtype in ("M8[D]", "U1", "longdouble", "c32" if np.dtype("clongdouble").itemsize == 32 else "S1"):
        with pytest.raises(errors.DTypeError):
            mt.from_dask(da.zeros(4, dtype=dtype, chunks=2), mesh, a=mt.Shard(0))
    assert mt.from_dask(da.arange(4, dtype=">f8", chunks=2), mesh, a=mt.Shard(0)).dtype == np.dtype("f8")


def test_on_a_cluster(processes):
    rng = np.random.default_rng(0)
    host = rng.normal(size=(40, 7))
    with mt.Mesh({"a": 3}, client=processes) as mesh:
        d = da.from_array(host, chunks=(9, 4))
        x = mt.from_dask(d, mesh, a=mt.Shard(0))
        np.testing.assert_allclose(np.asarray(mt.sum(x * x, axis=0)), (host * host).sum(axis=0))
        y = x + 1
        with processes.as_current():
            with pytest.raises(errors.MeshError, match=r"call mt\.compute\(x\) before distributed\.wait"):
                wait(y)
            mt.compute(y)
            wait(y)
            progress(y, notebook=False)
        back = y.to_dask()
        assert back.chunks == ((14, 14, 12), (7,))
        np.testing.assert_allclose(processes.compute(back.mean(axis=0)).result(), (host + 1).mean(axis=0))
        (value,) = processes.compute([y])
        np.testing.assert_array_equal(value.result(), host + 1)
        whole = mt.from_dask(d.T, mesh)
        np.testing.assert_array_equal(np.asarray(whole), host.T)


def test_blocks_do_not_come_through_the_client(processes, monkeypatch):
    """What the client itself sends and gets is counted; eight megabytes are not among it."""
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        d = da.ones((1000, 1000), chunks=(100, 1000))
        gathered: list[object] = []
        original = type(processes).gather
        monkeypatch.setattr(
            type(processes), "gather", lambda self, *a, **k: gathered.append(a) or original(self, *a, **k)
        )
        x = mt.from_dask(d, mesh, a=mt.Shard(1)) + 1
        mt.compute(x)
        total = x.to_dask().sum()
        assert not gathered
        assert processes.compute(total).result() == 2e6


def test_low_precision_on_a_cluster(processes):
    with mt.Mesh({"a": 2}, client=processes) as mesh:
        x = mt.distribute(np.arange(6).astype(ml_dtypes.bfloat16), mesh, a=mt.Shard(0)) * 2
        value = processes.compute(x.to_dask().astype("f4")).result()
        assert value.tolist() == [0, 2, 4, 6, 8, 10]


# ----- memory that is shared ------------------------------------------------------------------------------------------


def spoil(block):
    """A user's function of blocks that writes to its argument, by every way that NumPy has."""
    for a in (block, block.base):
        if isinstance(a, np.ndarray):
            with contextlib.suppress(ValueError):
                a.flags.writeable = True
                a[...] = 9.0
    with contextlib.suppress(ValueError):
        block[...] = 9.0
    return np.zeros_like(block)


@pytest.mark.parametrize("where", ["here", "workers"])
def test_functions_of_blocks_cannot_write_to_the_mesh(where, request):
    client = request.getfixturevalue("threads") if where == "workers" else None
    mesh = mt.Mesh({"a": 2}, client=client)
    data = np.arange(12.0).reshape(6, 2)
    for x in (
        mt.distribute(data, mesh, a=mt.Shard(0)),
        mt.distribute(data, mesh) + 0.0,
        mt.distribute(data, mesh, a=mt.Shard(0)) * 1.0,
    ):
        d = x.to_dask().map_blocks(spoil, dtype=float, meta=np.empty((0, 0)))
        got = client.compute(d).result() if client else d.compute(scheduler="sync")
        np.testing.assert_array_equal(got, np.zeros((6, 2)))
        np.testing.assert_array_equal(np.asarray(x + 0.0), data)
        np.testing.assert_array_equal(np.asarray(x), data)
        spoil(np.asarray(x))
        np.testing.assert_array_equal(np.asarray(x), data)


@pytest.mark.parametrize("where", ["here", "workers"])
def test_the_source_of_blocks_may_be_written_to(where, request):
    client = request.getfixturevalue("threads") if where == "workers" else None
    mesh = mt.Mesh({"a": 2}, client=client)
    data = np.arange(12.0).reshape(6, 2)
    local = mt.asarray(data)
    held = [
        mt.distribute(data, mesh, a=mt.Shard(0)),
        mt.distribute(local, mesh, a=mt.Shard(0)),
        mt.distribute(local, mesh),
        mt.distribute(local, mesh, a=mt.Shard(0)) * 1.0,
        mt.from_dask(da.from_array(data, chunks=(3, 2)), mesh, a=mt.Shard(0)),
        mt.from_dask(da.from_array(data, chunks=(6, 2)), mesh),
    ]
    for x in held:
        if isinstance(x._buf.handle, type(None)):
            mt.compute(x)
    want = data.copy()
    data[...] = 9.0
    local[...] = 8.0
    for x in held:
        np.testing.assert_array_equal(np.asarray(x), want)
