"""Placements and the arithmetic of blocks."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.blocks import ceil_blocks
from meshtape.parallel import parse_placement
from meshtape.parallel.sharding.placement import Layout, make_layout


@pytest.mark.parametrize(
    ("n", "parts", "lengths"),
    [
        (5, 4, [2, 2, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (6, 4, [2, 2, 2, 0]),
        (7, 3, [3, 3, 1]),
        (0, 3, [0, 0, 0]),
        (8, 4, [2, 2, 2, 2]),
        (3, 1, [3]),
    ],
)
def test_blocks_follow_the_ceil_rule(n, parts, lengths):
    blocks = ceil_blocks(n, parts)
    assert [length for _, length in blocks] == lengths
    assert [start for start, _ in blocks] == [sum(lengths[:i]) for i in range(parts)]


def block(x: mt.Array, coordinates: tuple[int, ...]) -> np.ndarray:
    mesh = x.sharding.mesh
    rank = int(np.ravel_multi_index(coordinates, mesh.sizes))
    assert mesh.coordinates(rank) == coordinates
    return np.asarray(x)[x.sharding.box(x.shape, rank).slices]


def test_the_axis_named_first_is_the_outer_one():
    mesh = mt.Mesh({"r": 2, "c": 4})
    rows_first = mt.distribute(np.arange(16), mesh, r=mt.Shard(0), c=mt.Shard(0))
    cols_first = mt.distribute(np.arange(16), mesh, c=mt.Shard(0), r=mt.Shard(0))
    for r in range(2):
        for c in range(4):
            first = 4 * r + c
            np.testing.assert_array_equal(block(rows_first, (r, c)), [2 * first, 2 * first + 1])
            first = 2 * c + r
            np.testing.assert_array_equal(block(cols_first, (r, c)), [2 * first, 2 * first + 1])
    assert rows_first.sharding != cols_first.sharding


def test_two_axes_over_five_elements_share_the_ceil_rule():
    mesh = mt.Mesh({"r": 2, "c": 2})
    sharding = mt.Sharding(mesh, r=mt.Shard(0), c=mt.Shard(0))
    assert [sharding.box((5,), rank).shape for rank in range(4)] == [(2,), (2,), (1,), (0,)]


def test_shardings_are_values():
    mesh = mt.Mesh({"r": 2, "c": 2})
    s = mt.Sharding(mesh, r=mt.Shard(1), c=mt.Partial("max"))
    assert s == mt.Sharding(mesh, c=mt.Partial("max"), r=mt.Shard(1))
    assert hash(s) == hash(mt.Sharding(mesh, c=mt.Partial("max"), r=mt.Shard(1)))
    assert s != mt.Sharding(mt.Mesh({"r": 2, "c": 2}), r=mt.Shard(1), c=mt.Partial("max"))
    assert s.placements == {"r": mt.Shard(1), "c": mt.Partial("max")}
    assert s.describe() == ["Shard(1)", "Partial('max')"]
    assert s.partial
    assert not s.with_placements(c=mt.Replicate()).partial
    assert repr(s) == "Sharding(r=Shard(1), c=Partial('max'))"
    assert s.text((2, 8), np.dtype("f4")) == "float32[2,8@r]{Partial('max'):c}"
    with pytest.raises(AttributeError):
        mt.Shard(0).dim = 1


def test_other_placements_keep_the_order_of_the_axes_that_stay():
    mesh = mt.Mesh({"a": 2, "b": 2, "c": 2})
    s = mt.Sharding(mesh, c=mt.Shard(0), a=mt.Shard(0))
    assert s.with_placements(b=mt.Shard(0)).layout == make_layout({0: [2, 0, 1]})
    assert s.with_placements(c=mt.Replicate()).layout == make_layout({0: [0]})


def test_layouts_have_one_form():
    assert make_layout({1: [0], 0: []}) == Layout(shards=((1, (0,)),))
    assert make_layout({}, {1: "max", 0: "sum"}) == Layout(partials=((0, "sum"), (1, "max")))


@pytest.mark.parametrize("p", [mt.Shard(3), mt.Replicate(), mt.Partial(), mt.Partial("any")], ids=repr)
def test_placements_are_read_back_from_their_text(p):
    assert parse_placement(repr(p)) == p


@pytest.mark.parametrize("text", ["", "Shard", "Shard()", "Shard(x)", "Replicate(1)", "Partial('mean')", "Gather(0)"])
def test_what_is_no_placement_is_refused(text):
    with pytest.raises(ValueError, match=r"no placement|Partial takes"):
        parse_placement(text)


# ----- meshes ---------------------------------------------------------------------------------------------------------


def test_a_mesh_is_a_grid_in_c_order():
    mesh = mt.Mesh({"data": 2, "model": 3})
    assert (mesh.size, mesh.names, mesh.sizes) == (6, ("data", "model"), (2, 3))
    assert mesh.describe() == {"data": 2, "model": 3}
    assert [mesh.coordinates(r) for r in (0, 1, 3, 5)] == [(0, 0), (0, 1), (1, 0), (1, 2)]
    assert repr(mesh) == "Mesh(data=2, model=3)"


def test_a_mesh_without_axes_is_one_rank():
    mesh = mt.Mesh({})
    x = mt.distribute(np.arange(3.0), mesh)
    assert mesh.size == 1
    np.testing.assert_array_equal(x * 2, [0, 2, 4])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 0}, "mesh axis 'data' must have a length of at least 1, got 0"),
        ({"data": 2.5}, "must have a length of at least 1, got 2.5"),
        ({"a b": 2}, "must be an identifier, got 'a b'"),
        ({1: 2}, "must be an identifier, got 1"),
        ((2, 2), r"a mesh is made of named axes such as \{'data': 2\}"),
    ],
)
def test_what_is_no_mesh(axes, message):
    with pytest.raises(mt.errors.MeshError, match=message):
        mt.Mesh(axes)


def test_workers_without_a_client():
    with pytest.raises(mt.errors.MeshError, match=r"pass client=… too"):
        mt.Mesh({"data": 2}, workers=["tcp://127.0.0.1:1"])


def test_a_client_that_is_none_of_dasks():
    with pytest.raises(mt.errors.MeshError, match=r"takes a distributed\.Client, got str"):
        mt.Mesh({"data": 2}, client="tcp://127.0.0.1:8786")


def test_only_meshes_and_shardings_say_where_arrays_go():
    with pytest.raises(mt.errors.MeshError, match="distributed over a Mesh or by a Sharding, got str"):
        mt.distribute(np.ones(3), "data")
