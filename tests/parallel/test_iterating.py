"""Going through a split array: the elements are those of ``x[i]``, and many are fetched at a time."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.execution.runtime import HostValue
from meshtape.parallel.mesh import sharded_array


@pytest.fixture
def mesh() -> mt.Mesh:
    return mt.Mesh({"data": 2, "model": 2})


def is_here(x: mt.Array) -> bool:
    return isinstance(x._buf.handle, HostValue)


@pytest.mark.parametrize(
    "placements", [{}, {"data": mt.Shard(0)}, {"data": mt.Shard(1)}, {"model": mt.Shard(0)}], ids=str
)
@pytest.mark.parametrize("window", [1, 100, 1 << 24])
def test_elements_have_values_and_shardings(mesh, placements, window, monkeypatch):
    monkeypatch.setattr(sharded_array, "FETCH_WINDOW", window)
    host = np.arange(63.0).reshape(21, 3)
    x = mt.distribute(host, mesh, **placements) * 2
    found = list(x)
    assert all(map(is_here, found))
    for i, v in enumerate(found):
        np.testing.assert_array_equal(v, host[i] * 2)
        assert v.dtype == x.dtype
        assert v.sharding.layout == x[i].sharding.layout.reduced()
    np.testing.assert_array_equal(found[3] + x[4], host[3] * 2 + host[4] * 2)


def test_numbers(mesh):
    x = mt.distribute(np.arange(100, dtype=np.int16), mesh, data=mt.Shard(0))
    assert [int(v) for v in x] == x.tolist() == list(range(100))
    assert {v.dtype for v in x} == {np.dtype(np.int16)}
    assert list(mt.distribute(np.empty((0, 3)), mesh, data=mt.Shard(0))) == []
    with pytest.raises(TypeError, match="0-d"):
        iter(mt.distribute(np.array(1.0), mesh))


def test_few_elements_wait_for_nothing(mesh):
    x = mt.distribute(np.arange(3.0), mesh, data=mt.Shard(0)) * 2
    a, b, c = x
    assert len(mesh.pending) > 0
    assert not is_here(a)
    assert float(a + b + c) == 6


def test_large_elements_stay_where_they_are(mesh, monkeypatch):
    monkeypatch.setattr(sharded_array, "LARGEST_FETCHED", 8)
    x = mt.distribute(np.ones((20, 2)), mesh, data=mt.Shard(0))
    assert not any(map(is_here, x))


def test_what_is_recorded_is_differentiated(mesh):
    host = np.arange(12.0)
    x = mt.distribute(host, mesh, data=mt.Shard(0))
    np.testing.assert_array_equal(mt.grad(lambda x: sum(v * v for v in x))(x), 2 * host)
    with mt.Tape() as tape:
        tape.watch(x)
        y = sum(v * v for v in x)
    np.testing.assert_array_equal(tape.gradient(y, [x])[0], 2 * host)
    np.testing.assert_array_equal(mt.compile(lambda x: sum(v * v for v in x))(x), (host**2).sum())


def test_what_is_written_meanwhile_is_seen(mesh):
    x = mt.distribute(np.zeros(20), mesh, data=mt.Shard(0))
    seen = []
    for v in x:
        seen.append(float(v))
        x[10] = 5.0
    assert seen == [0.0] * 10 + [5.0] + [0.0] * 9


def test_an_element_does_not_keep_the_others(mesh):
    first = next(iter(mt.distribute(np.ones((100, 10)), mesh, data=mt.Shard(0))))
    assert first._buf.handle.value.base is None
