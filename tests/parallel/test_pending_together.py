"""Different reductions that are pending on several axes at once, and reductions that begin on another mesh."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import meshtape as mt

REDUCED = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
PAIRS = list(itertools.product(REDUCED, REDUCED))
BLOCKS = np.random.default_rng(0).normal(size=(2, 3, 4))
VALUE = np.array([1.0, -2.0, 0.0, 3.5])


@pytest.fixture(scope="module")
def mesh() -> mt.Mesh:
    return mt.Mesh({"a": 2, "b": 3})


def pending(mesh: mt.Mesh, outer: str, inner: str) -> tuple[mt.Array, np.ndarray]:
    """An array of which each rank has a block of its own, and its value: the last axis is reduced first."""
    x = mt.distribute(BLOCKS, mesh, a=mt.Shard(0), b=mt.Shard(1))
    places = {"a": mt.Shard(0), "b": mt.Shard(1)}
    y = mt.shard_map(lambda x: x[0, 0], mesh, places, {"a": mt.Partial(outer), "b": mt.Partial(inner)})(x)
    return y, REDUCED[outer].reduce(REDUCED[inner].reduce(BLOCKS, axis=1), axis=0)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_every_pair_of_reductions_to_every_placement(mesh, outer, inner):
    y, want = pending(mesh, outer, inner)
    kinds = {
        "a": (mt.Replicate(), mt.Shard(0), mt.Partial(outer)),
        "b": (mt.Replicate(), mt.Shard(0), mt.Partial(inner)),
    }
    for a, b in itertools.product(kinds["a"], kinds["b"]):
        found = mt.reshard(y, a=a, b=b)
        assert found.sharding == mt.Sharding(mesh, a=a, b=b)
        np.testing.assert_allclose(np.asarray(found), want, 1e-12)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_what_is_computed_of_them(mesh, outer, inner):
    y, want = pending(mesh, outer, inner)
    for name, fn in {
        "scaled": lambda v: v * -2.0,
        "moved": lambda v: v + 1.0,
        "twice": lambda v: v + v,
        "sum": lambda v: v.sum(),
        "largest": lambda v: v.max(),
    }.items():
        np.testing.assert_allclose(np.asarray(fn(y)), fn(want), 1e-12, err_msg=name)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_two_that_begin_together(mesh, outer, inner):
    x = mt.reshard(mt.distribute(VALUE, mesh), a=mt.Partial(outer), b=mt.Partial(inner))
    assert x.sharding == mt.Sharding(mesh, a=mt.Partial(outer), b=mt.Partial(inner))
    np.testing.assert_array_equal(np.asarray(x), VALUE)
    np.testing.assert_array_equal(np.asarray(mt.reshard(x, a=mt.Replicate(), b=mt.Replicate())), VALUE)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_to_another_mesh_and_its_gradient(mesh, outer, inner):
    other = mt.Mesh({"c": 2, "d": 2})
    target = mt.Sharding(other, c=mt.Partial(outer), d=mt.Partial(inner))
    x = mt.distribute(VALUE, mesh, a=mt.Shard(0))
    y = mt.reshard(x, target)
    assert y.sharding == target
    np.testing.assert_array_equal(np.asarray(y), VALUE)
    g = mt.grad(lambda x: mt.sum(mt.reshard(mt.reshard(x, target), c=mt.Replicate(), d=mt.Replicate()) * 3.0))(x)
    np.testing.assert_array_equal(np.asarray(g), np.full(4, 3.0))
    z, want = pending(mesh, outer, inner)
    np.testing.assert_allclose(np.asarray(mt.reshard(z, target)), want, 1e-12)
