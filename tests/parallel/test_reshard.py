"""Resharding: plans as values, and the blocks that they move."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.arrays.core.blocks import Box
from meshtape.parallel.execution.executor import Prepared
from meshtape.parallel.resharding.plan import plan_reshard
from meshtape.parallel.sharding.placement import Layout, block_box, make_layout

NAMES = ("a", "b")
SHAPES = [(), (0,), (1,), (5,), (6, 4), (3, 5, 2)]
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3)]


def mesh_of(sizes: tuple[int, ...]) -> mt.Mesh:
    return mt.Mesh(dict(zip(NAMES, sizes, strict=False)))


def layouts(ndim: int, axes: int, partials: tuple[str, ...] = ()) -> list[Layout]:
    """Every layout of an array of ``ndim`` dimensions on a mesh of one or two axes."""
    choices = [None, *range(ndim), *partials]
    out = []
    for picked in itertools.product(choices, repeat=axes):
        shards: dict[int, list[int]] = {}
        for axis, p in enumerate(picked):
            if isinstance(p, int):
                shards.setdefault(p, []).append(axis)
        pending = {axis: p for axis, p in enumerate(picked) if isinstance(p, str)}
        out.append(make_layout(shards, pending))
        if any(len(v) > 1 for v in shards.values()):
            out.append(make_layout({d: v[::-1] for d, v in shards.items()}, pending))
    return out


def blocks_of(x: mt.Array) -> dict[int, np.ndarray]:
    mesh = x.sharding.mesh
    mt.compute(x)
    return mesh.runtime.fetch(x._buf.handle, range(mesh.size))


def holds(x: mt.Array, value: np.ndarray) -> None:
    """Every rank has its part of ``value``."""
    for rank, block in blocks_of(x).items():
        np.testing.assert_array_equal(block, value[x.sharding.box(value.shape, rank).slices])
        assert block.dtype == value.dtype


# ----- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_has_exactly_one_source_in_each_contribution(sizes, shape):
    for source, target in itertools.product(layouts(len(shape), len(sizes), ("sum",)), layouts(len(shape), len(sizes))):
        plan = plan_reshard(shape, sizes, source, target)
        assert plan.terms == math.prod(sizes[a] for a, _ in source.partials)
        for rank in range(plan.size):
            box = plan.box(rank)
            assert box == block_box(target, sizes, shape, rank)
            assert min(box.shape, default=0) >= 0
            count = np.zeros((plan.terms, *box.shape), int)
            for p in plan.pieces(rank):
                assert p.source.shape == p.target.shape
                inside = Box.whole(block_box(source, sizes, shape, p.rank).shape)
                assert p.source.intersect(inside) == p.source  # within the block that the rank has
                count[(p.term, *p.target.slices)] += 1
            assert (count == 1).all()


def test_a_rank_takes_its_own_block_before_another_ones():
    plan = plan_reshard((4,), (4,), Layout(), make_layout({0: [0]}))
    assert [[p.rank for p in plan.pieces(r)] for r in range(plan.size)] == [[0], [1], [2], [3]]
    assert plan.bytes_received(8) == 0


def test_among_equal_blocks_a_rank_takes_that_of_its_own_coordinates():
    """Groups of a collective keep to themselves: nobody sends to another row of the mesh what that has."""
    source = make_layout({0: [1]})
    plan = plan_reshard((8,), (3, 4), source, Layout())
    assert [[p.rank for p in plan.pieces(r)] for r in range(plan.size)] == [
        [4 * row + i for i in range(4)] for row in range(3) for _ in range(4)
    ]


@pytest.mark.parametrize(
    ("source", "target", "received"),
    [
        (make_layout({0: [0]}), Layout(), 4 * 12 * 8),  # all_gather: each of 4 ranks lacks 12 of 16 elements
        (Layout(), make_layout({0: [0]}), 0),  # slice
        (make_layout({0: [0]}), make_layout({1: [0]}), 4 * 3 * 8),  # all_to_all: a rank keeps 1 of its 4
        (make_layout({}, {0: "sum"}), Layout(), 4 * 3 * 16 * 8),  # all_reduce, done directly
        (make_layout({}, {0: "sum"}), make_layout({0: [0]}), 4 * 3 * 4 * 8),  # reduce_scatter
        (Layout(), make_layout({}, {0: "sum"}), 0),  # keep_one
    ],
)
def test_bytes_of_the_collectives(source, target, received):
    assert plan_reshard((4, 4), (4,), source, target).bytes_received(8) == received


def test_one_pending_reduction_never_becomes_another():
    with pytest.raises(mt.errors.ReshardError, match="a pending sum along mesh axis 0 cannot become a pending max"):
        plan_reshard((4,), (2,), make_layout({}, {0: "sum"}), make_layout({}, {0: "max"}))
    mesh = mesh_of((2,))
    x = mt.reshard(mt.distribute(np.arange(4.0), mesh), a=mt.Partial("sum"))
    with pytest.raises(mt.errors.ReshardError, match="along axis 'a' a pending sum cannot become a pending max"):
        mt.reshard(x, a=mt.Partial("max"))
    np.testing.assert_array_equal(mt.reshard(x, a=mt.Replicate()), np.arange(4.0))  # the mesh goes on


# ----- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trips_between_all_pairs_of_shardings(sizes, shape):
    mesh, value = mesh_of(sizes), np.arange(math.prod(shape), dtype=float).reshape(shape)
    placed = {s: mt.Sharding.of(mesh, s) for s in layouts(len(shape), len(sizes), ("sum",))}
    for source, target in itertools.product(placed.values(), repeat=2):
        x = mt.distribute(value, mesh)
        there = mt.reshard(mt.reshard(x, source), target)
        assert there.sharding == target
        back = mt.reshard(there, mt.Sharding.of(mesh, source.layout.reduced()))
        holds(back, value)
        if not target.partial:
            holds(there, value)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("sizes", [(3,), (2, 2)], ids=str)
def test_replicated_to_pending_and_back_is_the_identity(op, sizes):
    mesh, value = mesh_of(sizes), np.array([-3.0, 0.0, 5.0, np.inf, 1e-300])
    x = mt.distribute(value, mesh)
    for axes in (["a"], ["b"], ["a", "b"])[: 1 if len(sizes) == 1 else 3]:
        pending = mt.reshard(x, **dict.fromkeys(axes, mt.Partial(op)))
        holds(mt.reshard(pending, **dict.fromkeys(axes, mt.Replicate())), value)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float32", "complex64", "complex128"]
)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "any", "all"])
def test_pending_is_the_identity_in_every_dtype_or_refused(op, dtype):
    """Truths have no place for numbers, and products no one that leaves complex infinities and signs of zero as they
    are."""
    mesh = mesh_of((3,))
    value = [2, 0, 5]
    if dtype[0] == "c":
        value += [complex(np.inf, 0), complex(-np.inf, np.inf), complex(-0.0, -0.0), complex(1, -0.0)]
    elif "float" in dtype:
        value += [-0.0, np.inf, np.nan]
    x = mt.asarray(np.array(value), dtype=dtype)

    def keep(b: mt.Array) -> mt.Array:
        return b

    keep = mt.shard_map(keep, mesh, {}, {"a": mt.Partial(op)})
    if (op in ("any", "all") and dtype != "bool") or (op == "prod" and dtype[0] == "c"):
        for use in (lambda: mt.reshard(mt.distribute(x, mesh), a=mt.Partial(op)), lambda: keep(x)):
            with pytest.raises(mt.errors.ShardingConflict, match="cannot stay pending" if op == "prod" else "x != 0"):
                use()
        return
    back = mt.reshard(mt.reshard(mt.distribute(x, mesh), a=mt.Partial(op)), a=mt.Replicate())
    assert back.dtype == x.dtype
    if dtype[0] == "c":
        assert np.asarray(back).tobytes() == np.asarray(x).tobytes()
    else:
        got, want = (np.asarray(v).astype(float) for v in (back, x))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_the_rank_that_keeps_the_value_is_known_by_its_coordinate():
    """On a mesh of two axes the rank at coordinate 0 of the axis keeps it, in every row of the other."""
    mesh = mesh_of((2, 2))
    x = mt.reshard(mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0)), b=mt.Partial())
    blocks = blocks_of(x)
    np.testing.assert_array_equal([blocks[r] for r in range(4)], [[0, 1], [0, 0], [2, 3], [0, 0]])


@pytest.mark.parametrize("op", ["max", "min", "prod", "any", "all"])
def test_other_reductions_than_sums_are_scattered_too(op):
    mesh = mesh_of((3,))
    kind = bool if op in ("any", "all") else float
    value = np.array([[3, 0, 5, 1, 1], [4, 0, -2, 0, 1], [1, 0, 7, 1, 1]]).astype(kind)
    pending = getattr(mt, op)(mt.distribute(value, mesh, a=mt.Shard(0)), axis=0)
    assert pending.sharding.layout.partials == ((0, op),)
    holds(mt.reshard(pending, a=mt.Shard(0)), getattr(np, op)(value, axis=0))


@pytest.mark.parametrize(("source", "target"), [("rows", "columns"), ("pending", "rows"), ("nested", "turned")])
def test_one_process_of_many_ranks_copies_no_pair_by_itself(source, target):
    """Where all ranks are here, an all-to-all and a reduce-scatter join one array and cut it: 70 ranks, no 4,900
    pieces."""
    layouts = {
        "rows": make_layout({0: [0, 1]}),
        "columns": make_layout({1: [0, 1]}),
        "pending": make_layout({}, {0: "sum", 1: "sum"}),
        "nested": make_layout({0: [1, 0]}),
        "turned": make_layout({1: [1], 0: [0]}),
    }
    mesh, value = mesh_of((7, 10)), np.arange(130.0 * 75).reshape(130, 75)
    x = mt.reshard(mt.distribute(value, mesh), mt.Sharding.of(mesh, layouts[source]))
    holds(mt.reshard(x, mt.Sharding.of(mesh, layouts[target])), value)
    program = mesh.rank_program(
        mt.compile(lambda x: mt.reshard(x, mt.Sharding.of(mesh, layouts[target]))).program(x), [x.sharding]
    )
    prepared = Prepared(program, range(70), (0,) * 70, NAMES)
    parts = [p for step, _ in prepared._actions for m in step.moves for b in m.rounds.blocks for p in b.parts]
    assert sum(len(p.sources) for p in parts) <= 5 * 140


DTYPES = [
    "?",
    "i1",
    "u2",
    "i8",
    "f2",
    "f4",
    "c8",
    "c16",
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_dtype_passes(dtype):
    mesh, value = mesh_of((2, 3)), np.arange(35).reshape(7, 5).astype(dtype)
    for a, b in itertools.product([mt.Replicate(), mt.Shard(0), mt.Shard(1)], repeat=2):
        x = mt.distribute(value, mesh, a=a, b=b)
        holds(mt.reshard(x, a=b, b=a), value)
        holds(mt.reshard(x, a=mt.Replicate(), b=mt.Replicate()), value)


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2], ids=lambda d: np.dtype(d).name)
def test_short_floats_are_added_in_float32(dtype):
    """Eight contributions: rounding after each would lose what rounding once does not."""
    mesh = mt.Mesh({"a": 8})
    parts = np.array([[2.0]] + [[float(ml_dtypes.finfo(dtype).eps)]] * 7).astype(dtype)
    got = mt.sum(mt.distribute(parts, mesh, a=mt.Shard(0)), axis=0)
    np.testing.assert_array_equal(np.asarray(got), parts.astype("f4").sum(axis=0).astype(dtype))


# ----- what is no movement --------------------------------------------------------------------------------------------


def test_the_same_sharding_is_the_same_array():
    mesh = mesh_of((2, 2))
    x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0))
    assert mt.reshard(x, a=mt.Shard(0)) is x
    assert mt.reshard(x, x.sharding) is x
    assert len(mesh.pending) == 0


def test_axes_of_length_one_never_move():
    mesh = mt.Mesh({"a": 1, "b": 2})
    x = mt.distribute(np.arange(4.0), mesh, a=mt.Shard(0), b=mt.Shard(0))
    program = mesh.rank_program(mt.compile(lambda x: mt.reshard(x, a=mt.Replicate())).program(x), [x.sharding])
    assert program.steps == ()


def test_what_cannot_be_resharded():
    mesh = mesh_of((2,))
    x = mt.distribute(np.arange(4.0), mesh)
    with pytest.raises(mt.errors.ShardingConflict, match=r"splits dimension 1 of an array of shape \(4,\)"):
        mt.reshard(x, a=mt.Shard(1))
    with pytest.raises(mt.errors.ShardingConflict, match=r"splits dimension 0 of an array of shape \(\)"):
        mt.distribute(mt.asarray(1.0), mesh, a=mt.Shard(0))
    with pytest.raises(mt.errors.MeshError, match=r"Mesh\(a=2\) has no axis 'rows': its axes are 'a'"):
        mt.reshard(x, rows=mt.Shard(0))
    with pytest.raises(mt.errors.MeshError, match=r"mt\.storage\.reshard\(src, dst, …\) reshards a checkpoint"):
        mt.reshard("run/step-00000001", "resharded")
    with pytest.raises(mt.errors.MeshError, match=r"not on a mesh: use mt\.distribute"):
        mt.reshard(mt.ones(3), a=mt.Shard(0))
    with pytest.raises(mt.errors.ReshardError, match="makes no pending reductions"):
        mt.distribute(np.ones(3), mesh, a=mt.Partial())
    with pytest.raises(ValueError, match="Partial takes one of sum, prod, max, min, any, all, got 'mean'"):
        mt.Partial("mean")
    with pytest.raises(mt.errors.MeshError, match=r"must be Shard\(dim\), Replicate\(\) or Partial\(op\), got 0"):
        mt.distribute(np.ones(3), mesh, a=0)


def test_negative_dimensions_count_from_the_end():
    mesh = mesh_of((2,))
    assert mt.distribute(np.ones((2, 4)), mesh, a=mt.Shard(-1)).sharding == mt.Sharding(mesh, a=mt.Shard(1))
