"""Sharding rules by hand: which layout each op gives, in the notation ``[mesh axes of dimension 0, of dimension 1,
…]``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.sharding import propagate

AXES = ("x", "y", "z")
R = ()


def put(mesh: mt.Mesh, shape: tuple[int, ...], dims: tuple[tuple[int, ...], ...], dtype: Any = float) -> mt.Array:
    """An array whose dimension ``d`` is split over the mesh axes ``dims[d]``, outer first."""
    order = {mesh.names[a]: mt.Shard(d) for d, axes in enumerate(dims) for a in axes}
    return mt.distribute(np.ones(shape, dtype), mesh, **order)


def dims_of(x: mt.Array) -> tuple[tuple[int, ...], ...]:
    return tuple(x.sharding.layout.axes_of(d) for d in range(x.ndim))


def pending_of(x: mt.Array) -> dict[int, str]:
    return dict(x.sharding.layout.partials)


def grid(*sizes: int) -> mt.Mesh:
    return mt.Mesh(dict(zip(AXES, sizes, strict=False)))


# ----- six ops by six placements --------------------------------------------------------------------------------------

BINARY = {
    # placements of the left and the right operand of shapes (8, 8) and (8, 8), or (8,) → those of the result
    "none": (((R, R), (8, 8)), ((R, R), (8, 8)), (R, R)),
    "first": ((((0,), R), (8, 8)), ((R, R), (8, 8)), ((0,), R)),
    "second": (((R, R), (8, 8)), ((R, (1,)), (8, 8)), (R, (1,))),
    "both": ((((0,), R), (8, 8)), ((R, (1,)), (8, 8)), ((0,), (1,))),
    "broadcast": ((((0,), R), (8, 8)), (((1,),), (8,)), ((0,), (1,))),
    # One mesh axis, two dimensions: the operands are equally large, and the first keeps its split.
    "conflict": ((((0,), R), (8, 8)), ((R, (0,)), (8, 8)), ((0,), R)),
}


@pytest.mark.parametrize("case", BINARY)
@pytest.mark.parametrize("name", ["bitwise_or", "atan2", "fmax", "fmin"])
def test_binary_ops_take_the_splits_of_both(name, case):
    mesh, dtype = grid(2, 4), int if name == "bitwise_or" else float
    (left, a), (right, b), expected = BINARY[case]
    out = getattr(mt, name)(put(mesh, a, left, dtype), put(mesh, b, right, dtype))
    assert dims_of(out) == expected
    assert pending_of(out) == {}


UNARY = {
    "none": (R, R),
    "first": ((0,), R),
    "second": (R, (1,)),
    "both": ((0,), (1,)),
    "nested": ((0, 1), R),
    "turned": ((1, 0), R),
}


@pytest.mark.parametrize("case", UNARY)
def test_reciprocal_keeps_every_split(case):
    out = mt.reciprocal(put(grid(2, 4), (8, 8), UNARY[case]))
    assert dims_of(out) == UNARY[case]


@pytest.mark.parametrize("case", UNARY)
def test_min_leaves_pending_minima_of_a_split_dimension(case):
    mesh = grid(2, 4)
    rows, cols = UNARY[case]
    out = mt.min(put(mesh, (8, 8), UNARY[case]), axis=1)
    assert dims_of(out) == (rows,)
    assert pending_of(out) == dict.fromkeys(cols, "min")
    kept = mt.min(put(mesh, (8, 8), UNARY[case]), axis=0, keepdims=True)
    assert dims_of(kept) == (R, cols)
    assert pending_of(kept) == dict.fromkeys(rows, "min")


# ----- the table of rules ---------------------------------------------------------------------------------------------


def test_operands_of_one_mesh_axis_on_one_letter_by_two():
    """Two axes on one dimension, one from each operand: both stay."""
    mesh = grid(2, 4)
    assert dims_of(put(mesh, (8, 6), ((0,), R)) + put(mesh, (8, 1), ((1,), R))) == ((0, 1), R)


def test_a_length_of_one_that_broadcasts_is_never_split():
    mesh = grid(2, 4)
    assert dims_of(put(mesh, (8, 1), (R, (0,))) * put(mesh, (1, 6), (R, (1,)))) == (R, (1,))


@pytest.mark.parametrize(
    ("left", "right", "dims", "pending"),
    [
        (((0,), R), (R, (1,)), ((0,), (1,)), {}),
        ((R, (0,)), ((0,), R), (R, R), {0: "sum"}),
        (((1,), (0,)), (R, R), ((1,), R), {0: "sum"}),  # pulls the other operand's k along
        (((0,), R), (R, (0,)), ((0,), R), {}),  # one axis for rows and columns: the first keeps it
        (((0,), (1,)), ((1,), R), ((0,), R), {1: "sum"}),
    ],
)
def test_matmul(left, right, dims, pending):
    mesh = grid(2, 2)
    out = put(mesh, (8, 8), left) @ put(mesh, (8, 8), right)
    assert (dims_of(out), pending_of(out)) == (dims, pending)


def test_vectors_meet_in_a_pending_number():
    mesh = grid(2)
    out = put(mesh, (8,), ((0,),)) @ put(mesh, (8,), ((0,),))
    assert (dims_of(out), pending_of(out)) == ((), {0: "sum"})


@pytest.mark.parametrize(
    ("name", "op", "value"),
    [
        ("sum", "sum", 3.0),
        ("prod", "prod", 1.0),
        ("max", "max", 1.0),
        ("min", "min", 1.0),
        ("any", "any", True),
        ("all", "all", True),
    ],
)
def test_a_reduced_split_dimension_is_pending_with_its_own_operator(name, op, value):
    x = put(grid(2), (3,), ((0,),), type(value))
    out = getattr(mt, name)(x)
    assert pending_of(out) == {0: op}
    assert np.asarray(out) == value


@pytest.mark.parametrize(
    ("fn", "dims", "expected"),
    [
        (lambda x: mt.permute_dims(x, (1, 0)), ((0,), (1,)), ((1,), (0,))),
        (lambda x: mt.expand_dims(x, axis=0), ((0,), (1,)), (R, (0,), (1,))),
        (lambda x: mt.reshape(x, (32,)), ((0,), R), ((0,),)),
        (lambda x: mt.reshape(x, (32,)), ((0, 1), R), ((0, 1),)),
        (lambda x: mt.reshape(x, (32,)), (R, (1,)), (R,)),
        (lambda x: mt.reshape(x, (4, 2, 4)), ((0,), R), ((0,), R, R)),
        (lambda x: mt.broadcast_to(x, (3, 8, 4)), ((0,), (1,)), (R, (0,), (1,))),
        (lambda x: mt.flip(x, axis=0), ((0,), (1,)), ((0,), (1,))),
        (lambda x: mt.concat([x, x], axis=0), ((0,), (1,)), ((0,), (1,))),
        (lambda x: mt.stack([x, x], axis=0), ((0,), (1,)), (R, (0,), (1,))),
        (lambda x: x[2:4], ((0,), (1,)), ((0,), (1,))),
        (lambda x: x[:, 0], ((0,), (1,)), ((0,),)),
        (lambda x: mt.argmax(x, axis=0), ((0,), (1,)), ((1,),)),
        (lambda x: mt.layer_norm(x, 4), ((0, 1), R), ((0, 1), R)),
        (lambda x: mt.nn.softmax(x, axis=1), ((0,), (1,)), ((0,), (1,))),
    ],
)
def test_functions_of_one_array(fn, dims, expected):
    out = fn(put(grid(2, 2), (8, 4), dims))
    assert dims_of(out) == expected


def test_a_lookup_is_split_as_its_index_is_and_as_the_rows_are():
    mesh = grid(2, 2)
    table, where = put(mesh, (8, 6), (R, (1,))), put(mesh, (5,), ((0,),), int)
    assert dims_of(table[where]) == ((0,), (1,))


def test_the_gradient_of_a_lookup_is_pending_over_the_axes_of_the_index():
    mesh = grid(2, 2)
    where = put(mesh, (5,), ((0,),), int)
    seed = put(mesh, (5, 6), ((0,), R))
    _, pull = mt.vjp(lambda table: table[where], put(mesh, (8, 6), (R, (1,))))
    (g,) = pull(seed)
    assert (dims_of(g), pending_of(g)) == ((R, (1,)) if dims_of(g)[1] else (R, R), {0: "sum"})


def test_gradients_of_parameters_are_pending_over_the_axes_of_the_batch():
    mesh = grid(2, 2)
    x, w, b = put(mesh, (8, 4), ((0,), R)), put(mesh, (4, 4), (R, R)), put(mesh, (4,), (R,))
    _, pull = mt.vjp(lambda w, b: mt.layer_norm(x @ w, 4, weight=b), w, b)
    gw, gb = pull(put(mesh, (8, 4), ((0,), R)))
    assert pending_of(gw) == pending_of(gb) == {0: "sum"}


@pytest.mark.parametrize(
    ("sizes", "nesting", "kept"),
    [
        ((2, 4), (0, 1), 1),
        ((2, 4), (1, 0), 1),
        ((4, 2), (0, 1), 0),
        ((2, 2), (0, 1), 0),
        ((2, 2), (1, 0), 1),
        ((3, 4, 4), (1, 2), 1),
        ((2, 3, 4), (0, 1, 2), 2),
    ],
)
def test_where_all_axes_cannot_stay_the_largest_does_then_the_outer_one(sizes, nesting, kept):
    """A dimension of ``n`` rows of 4 that is split off stays split where the rows come out whole."""
    mesh, rows = grid(*sizes), sizes[kept]
    x = mt.distribute(np.arange(4 * rows), mesh, **{AXES[a]: mt.Shard(0) for a in nesting})
    y = mt.reshape(x, (rows, 4))
    assert dims_of(y) == ((kept,), R)
    mt.compute(y)
    for rank, block in mesh.runtime.fetch(y._buf.handle, range(mesh.size)).items():
        c = mesh.coordinates(rank)[kept]
        np.testing.assert_array_equal(block, np.arange(4 * rows).reshape(rows, 4)[c : c + 1])


def test_a_fallback_is_told_once(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(propagate, "_told", set())
    monkeypatch.setattr(propagate, "_cache", {})
    monkeypatch.setattr(propagate.log, "warning", told.append)
    mesh = grid(2, 4)
    for n in (4, 12, 4):  # rows
        mt.reshape(put(mesh, (4 * n,), ((0, 1),)), (n, 4))
    mt.reshape(put(mesh, (32,), ((0, 1),)), (8, 4))  # all axes stay
    assert told == [
        "[reshape] dimension 0 is split over the mesh axes [0, 1] of [2, 4] ranks, which do not divide the blocks that "
        "reshape keeps: it stays split over [1], and its blocks move"
    ]
    mt.reshape(put(mesh, (16,), ((1, 0),)), (4, 4))
    assert len(told) == 2


def test_a_fallback_leaves_other_dimensions_alone():
    x = put(grid(2, 3, 4), (16, 6), ((0, 2), (1,)))
    assert dims_of(mt.reshape(x, (4, 4, 6))) == ((2,), R, (1,))


# ----- numbers that a naive rule gets wrong ---------------------------------------------------------------------------


def split(*parts: list[Any], dtype: Any = float) -> mt.Array:
    """Ranks that hold these elements: the ceil rule over two ranks."""
    whole = [v for p in parts for v in p]
    x = mt.distribute(np.array(whole, dtype), grid(2), x=mt.Shard(0))
    assert [x.sharding.box(x.shape, r).shape[0] for r in range(2)] == [len(p) for p in parts]
    return x


def pending(*parts: Any, dtype: Any = float) -> mt.Array:
    """A sum of these contributions, one a rank, that nobody has carried out."""
    out = mt.sum(mt.distribute(np.array([[p] for p in parts], dtype), grid(2), x=mt.Shard(0)), axis=0)
    assert pending_of(out) == {0: "sum"}
    return out


GOLDEN = {
    "mean of unequal blocks": (lambda: mt.mean(split([1, 2], [6])), 3.0),
    "product": (lambda: mt.prod(split([2, 3], [4])), 24),
    "maximum": (lambda: mt.max(split([1, 5], [3])), 5),
    "2-norm": (lambda: mt.sqrt(mt.sum(mt.square(split([3], [4])))), 5),
    "logsumexp": (lambda: mt.nn.logsumexp(split([0, 0], [0])), 1.0986122886681098),
    "any": (lambda: mt.any(split([False], [True], dtype=bool)), True),
    "all": (lambda: mt.all(split([True], [False], dtype=bool)), False),
    "argmax": (lambda: mt.argmax(split([1, 5], [7, 0])), 2),
    "gradient of a tied maximum": (lambda: mt.grad(mt.max)(split([3, 1], [3, 2])), [0.5, 0, 0.5, 0]),
    "variance": (lambda: mt.var(split([1, 2], [3])), 2 / 3),
    "whole plus pending": (lambda: mt.distribute(np.array([1.0]), (p := pending(2, 3)).sharding.mesh) + p, [6]),
    "relu of a pending sum": (lambda: mt.nn.relu(pending(-3, 2)), [0]),
    "scaled pending sum": (lambda: pending(1, 2) * 3.0, [9]),
    "number added to a pending sum": (lambda: pending(1, 2) + 1.0, [4]),
    "pending sum cast to less": (
        lambda: pending(1.0004, 1.0008, dtype=np.float32).astype(np.float16),
        [np.float16(2.001953125)],
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden(case):
    make, expected = GOLDEN[case]
    np.testing.assert_allclose(np.asarray(make()), expected, rtol=1e-14)


def test_scaling_keeps_a_sum_pending_and_adding_a_number_does_not():
    assert pending_of(pending(1, 2) * 3.0) == {0: "sum"}
    assert pending_of(pending(1, 2) + 1.0) == {}
    assert pending_of(pending(1, 2, dtype=np.complex64).astype(np.complex64)) == {0: "sum"}
    assert pending_of(pending(1, 2).astype(np.float32)) == {}


def test_a_sum_is_carried_out_before_it_is_made_larger():
    assert pending_of(mt.broadcast_to(pending(1, 2), (5, 1))) == {}
    assert pending_of(mt.reshape(pending(1, 2), (1, 1))) == {0: "sum"}
    assert pending_of(pending(1, 2) * mt.ones(6)) == {}


@pytest.mark.parametrize("dtype", ["f4", "i4", "u1", "?"])
@pytest.mark.parametrize("name", ["max", "min"])
def test_ranks_without_elements_do_not_disturb_a_maximum(name, dtype):
    value = np.array([1, 0, 1], dtype)
    got = getattr(mt, name)(mt.distribute(value, mt.Mesh({"x": 8}), x=mt.Shard(0)))
    assert np.asarray(got) == getattr(value, name)()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ["max", "min"])
def test_nor_do_they_where_the_dtype_knows_no_infinity(name, dtype):
    value = np.array([1, 0.5, 1.5]).astype(dtype)
    got = getattr(mt, name)(mt.distribute(value, mt.Mesh({"x": 8}), x=mt.Shard(0)))
    assert float(got) == float(getattr(value.astype("f4"), name)())


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_of_no_elements_is_an_error_at_the_call(name):
    x = mt.distribute(np.zeros((0, 3)), grid(2), x=mt.Shard(0))
    with pytest.raises(mt.errors.ShapeError, match=rf"\[{name}\] of no elements has no value: shape \(0, 3\)"):
        getattr(mt, name)(x, axis=0)
