"""Arrays that change their mesh: every element once, whatever the two meshes have in common."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors
from meshtape.parallel.dask.workers import known_workers
from meshtape.parallel.mesh.mesh_transfer import plan_transfer
from meshtape.parallel.sharding.placement import block_box, make_layout

bounded = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)

SIZES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3)]
SHAPES = [(), (1,), (0,), (5,), (6, 4), (3, 5, 2)]


def draw_layout(data, sizes, ndim, *, pending=False):
    """Any placements, axes of one dimension in any order; some axes with a sum that is still to be made."""
    shards: dict[int, list[int]] = {}
    partials: dict[int, str] = {}
    for axis in data.draw(st.permutations(range(len(sizes)))):
        dim = data.draw(st.sampled_from([None, *range(ndim), *(["sum"] * pending)]))
        if dim == "sum":
            partials[axis] = "sum"
        elif dim is not None:
            shards.setdefault(dim, []).append(axis)
    return make_layout(shards, partials)


def moves(data, one, two):
    """An array in any sharding of the one mesh, in any of the other, and back: every rank has its part each time."""
    shape = data.draw(st.sampled_from(SHAPES))
    kind = np.dtype(data.draw(st.sampled_from(["f8", "i2", "c8", ml_dtypes.bfloat16])))
    x = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape).astype(kind)
    source = mt.Sharding.of(one, draw_layout(data, one.sizes, len(shape), pending=True))
    target = mt.Sharding.of(two, draw_layout(data, two.sizes, len(shape)))
    a = mt.reshard(mt.distribute(x, one), source) * 2
    b = mt.reshard(a, target)
    assert b.sharding == target
    for y in (b, mt.reshard(b, mt.Sharding.of(one, source.layout.reduced()))):
        mt.compute(y)
        blocks = y.sharding.mesh.runtime.fetch(y._buf.handle, range(y.sharding.mesh.size))
        for rank, block in blocks.items():
            part = (x * kind.type(2))[y.sharding.box(shape, rank).slices]
            assert (block.shape, block.dtype) == (part.shape, kind)
            np.testing.assert_array_equal(block, part)


@settings(bounded, max_examples=150)
@given(data=st.data())
def test_every_element_comes_from_one_place(data):
    shape = data.draw(st.sampled_from(SHAPES))
    old, new = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(SIZES))
    before, after = draw_layout(data, old, len(shape)), draw_layout(data, new, len(shape))
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for t, parts in enumerate(plan_transfer(shape, old, before, new, after)):
        want = block_box(after, new, shape, t)
        block, count = np.full(want.shape, -1), np.zeros(want.shape, int)
        for p in parts:
            source = whole[block_box(before, old, shape, p.rank).slices]
            block[p.target.slices] = source[p.source.slices]
            count[p.target.slices] += 1
        np.testing.assert_array_equal(block, whole[want.slices])
        assert (count == 1).all()


@settings(bounded, max_examples=60)
@given(data=st.data())
def test_there_and_back(data):
    one, two = (mt.Mesh({f"a{i}": n for i, n in enumerate(data.draw(st.sampled_from(SIZES)))}) for _ in range(2))
    moves(data, one, data.draw(st.sampled_from([one, two])))


def test_gradients_go_back_to_the_mesh_they_came_from():
    one, two = mt.Mesh({"a": 2}), mt.Mesh({"b": 3})
    x = mt.distribute(np.arange(5.0), one, a=mt.Shard(0))
    w = mt.distribute(np.arange(5.0), two, b=mt.Shard(0))

    def loss(x, w):
        return mt.sum(mt.sin(mt.reshard(x * 2, mt.Sharding(two, b=mt.Shard(0))) * w))

    gx, gw = mt.grad(loss, (0, 1))(x, w)
    n = np.arange(5.0)
    assert gx.sharding.mesh is one
    assert gw.sharding.mesh is two
    np.testing.assert_allclose(np.asarray(gx), 2 * n * np.cos(2 * n * n))
    np.testing.assert_allclose(np.asarray(gw), 2 * n * np.cos(2 * n * n))


def test_pending_sums_are_made_first():
    one, two = mt.Mesh({"a": 2}), mt.Mesh({"b": 4})
    x = mt.sum(mt.distribute(np.ones((4, 3)), one, a=mt.Shard(0)), axis=0)
    assert np.asarray(mt.reshard(x, mt.Sharding(two, b=mt.Shard(0)))).tolist() == [4, 4, 4]


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, bool, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_dtypes(dtype):
    one, two = mt.Mesh({"a": 2}), mt.Mesh({"b": 3})
    x = np.arange(7).astype(dtype)
    y = mt.reshard(mt.distribute(x, one, a=mt.Shard(0)), mt.Sharding(two, b=mt.Shard(0)))
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y), x)


def test_what_is_refused():
    one, two = mt.Mesh({"a": 2}), mt.Mesh({"b": 2})
    x = mt.distribute(np.ones(4), one, a=mt.Shard(0))
    with pytest.raises(errors.ReshardError, match="a compiled function stays on one mesh"):
        mt.compile(lambda x: mt.reshard(x, mt.Sharding(two)))(x)
    with pytest.raises(errors.MeshError, match="places 0 to 1 along axis 'a', got 2"):
        one.submesh(a=2)
    with pytest.raises(errors.MeshError, match="no axis 'z'"):
        one.submesh(z=0)


def test_parts_of_a_mesh():
    mesh = mt.Mesh({"pipe": 2, "data": 3})
    part = mesh.submesh(pipe=1)
    assert (part.names, part.sizes) == (("data",), (3,))
    assert mesh.submesh(pipe=-1) is part
    assert mesh.submesh(pipe=0, data=2).size == 1


def test_memory_is_that_of_the_new_blocks(peak_of):
    one, two = mt.Mesh({"a": 4}), mt.Mesh({"b": 3})
    x = mt.compute(mt.distribute(np.ones((600, 1000)), one, a=mt.Shard(0)) * 1)
    y = mt.reshard(x, mt.Sharding(two, b=mt.Shard(1)))
    assert y.shape == x.shape
    assert peak_of(lambda: mt.reshard(x, mt.Sharding(two, b=mt.Shard(1))), most := 1.2 * x.nbytes) < most


@pytest.mark.timeout(300)
def test_there_and_back_between_workers(processes):
    """The same mesh, one that is a part of it, a larger one, one beside it, and one that overlaps it."""
    first, second = sorted(known_workers(processes))
    with contextlib.ExitStack() as stack:

        def mesh(axes, *workers):
            return stack.enter_context(mt.Mesh(axes, client=processes, workers=workers))

        both, turned = mesh({"a": 2, "b": 2}, first, second), mesh({"c": 3}, second, first)
        one, other = mesh({"d": 2}, first), mesh({"e": 1, "f": 2}, second)
        part = both.submesh(a=1)
        pairs = [(both, both), (both, part), (part, both), (both, turned), (turned, one), (one, both), (one, other)]

        @settings(bounded, max_examples=10)
        @given(data=st.data())
        def sample(data):
            moves(data, *data.draw(st.sampled_from(pairs)))

        sample()


def test_between_workers(processes):
    """Disjoint, overlapping, smaller and larger meshes of one cluster; the client sees none of the blocks."""
    addresses = sorted(known_workers(processes))
    x = np.random.default_rng(0).normal(size=(37, 11))
    with (
        mt.Mesh({"a": 3}, client=processes) as both,
        mt.Mesh({"b": 2}, client=processes, workers=addresses[:1]) as first,
        mt.Mesh({"c": 2, "d": 2}, client=processes, workers=addresses[1:]) as second,
    ):
        start = mt.distribute(x, both, a=mt.Shard(0)) + 1
        there = mt.reshard(start, mt.Sharding(first, b=mt.Shard(1)))
        beside = mt.reshard(there, mt.Sharding(second, c=mt.Shard(0), d=mt.Shard(1)))
        back = mt.reshard(beside, mt.Sharding(both, a=mt.Shard(1)))
        for y, mesh in ((there, first), (beside, second), (back, both)):
            assert y.sharding.mesh is mesh
            np.testing.assert_array_equal(np.asarray(y), x + 1)
            np.testing.assert_array_equal(np.asarray(y * 2), 2 * (x + 1))
        half = mt.reshard(there.astype(mt.bfloat16), mt.Sharding(second, c=mt.Shard(0)))
        np.testing.assert_array_equal(np.asarray(half), (x + 1).astype(ml_dtypes.bfloat16))
        part = both.submesh(a=1)
        np.testing.assert_array_equal(np.asarray(mt.reshard(start, mt.Sharding(part))), x + 1)
