"""Dimensions that ops slice, look up or reach over, while they are split: what moves is what has to, and nothing is
gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.arrays.nn import losses
from meshtape.parallel.execution.explain import program_text
from meshtape.parallel.sharding.halos import Halo


def program(fn: Callable[..., Any], *args: mt.Array) -> Any:
    mesh = next(a.sharding.mesh for a in args if a.sharding is not None)
    return mesh.rank_program(mt.compile(fn).program(*args), [a.sharding for a in args])


def text(fn: Callable[..., Any], *args: mt.Array) -> str:
    mesh = next(a.sharding.mesh for a in args if a.sharding is not None)
    return program_text(program(fn, *args), mesh.names)


def same(fn: Callable[..., Any], *args: mt.Array) -> None:
    """Eager, compiled and whole: the same."""
    want = np.asarray(fn(*(mt.asarray(np.asarray(a)) for a in args)))
    np.testing.assert_allclose(np.asarray(fn(*args)), want, 1e-10, 1e-10)
    np.testing.assert_allclose(np.asarray(mt.compile(fn)(*args)), want, 1e-10, 1e-10)


# ----- looking up -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> mt.Mesh:
    return mt.Mesh({"data": 2, "model": 4})


def table_and_ids(mesh: mt.Mesh, rows: int = 50, batch: int = 4) -> tuple[mt.Array, mt.Array]:
    rng = np.random.default_rng(0)
    table = mt.distribute(mt.asarray(rng.normal(size=(rows, 3))), mesh, model=mt.Shard(0))
    return table, mt.distribute(mt.asarray(rng.integers(-rows, rows, (batch, 2))), mesh, data=mt.Shard(0))


def test_a_split_vocabulary_is_not_gathered(mesh):
    """Rows split over the model's ranks, each answers for its own; the sum is the embedding."""
    table, ids = table_and_ids(mesh)

    def embed(table, ids):
        return mt.nn.embedding(ids, table)

    same(embed, table, ids)
    lines = text(embed, table, ids)
    assert "all_gather" not in lines
    assert "{sum:model}" in lines
    assert embed(table, ids).sharding.placements == {"data": mt.Shard(0), "model": mt.Partial()}


def test_the_gradient_of_a_split_vocabulary_is_split(mesh):
    table, ids = table_and_ids(mesh)

    def gradient(table, ids):
        return mt.grad(lambda t: mt.sum(mt.sin(mt.nn.embedding(ids, t))))(table)

    same(gradient, table, ids)
    lines = text(lambda t, i: t - 0.1 * gradient(t, i), table, ids)
    assert "all_gather" not in lines
    (reduced,) = [line for line in lines.splitlines() if "all_reduce(data)" in line]
    assert "[50@model,3]" in reduced, lines
    assert gradient(table, ids).sharding.placements == {"data": mt.Partial(), "model": mt.Shard(0)}


def test_a_large_lookup_in_a_small_table_gathers_the_table(mesh):
    table, ids = table_and_ids(mesh, rows=8, batch=4000)
    lines = text(lambda t, i: mt.nn.embedding(i, t), table, ids)
    assert "all_gather(model)" in lines
    assert "all_reduce" not in lines


def test_an_index_out_of_range_is_an_error_on_a_part_too(mesh):
    table, _ = table_and_ids(mesh)
    ids = mt.distribute(mt.asarray([3, 50]), mesh)
    with pytest.raises(errors.ArrayIndexError, match="index 50 is out of bounds for axis 0 with size 50"):
        mt.compute(table[ids])


def test_one_row(mesh):
    table, _ = table_and_ids(mesh)
    same(lambda t: t[49], table)
    same(lambda t: t[-50], table)
    assert "all_gather" not in text(lambda t: t[49], table)


@pytest.mark.parametrize("method", ["set", "add", "min", "max"])
def test_writes_to_a_split_dimension(mesh, method):
    """Each rank keeps the writes that are its own; duplicates over several ranks, numbers and broadcast values."""
    x = mt.distribute(mt.asarray(np.arange(24.0).reshape(8, 3)), mesh, model=mt.Shard(0))
    ids = mt.distribute(mt.asarray([7, 0, 7, 3, -8]), mesh)
    values = mt.distribute(mt.asarray(np.linspace(-9, 9, 15).reshape(5, 3)), mesh)

    def write(x, ids, v):
        return getattr(x.at[ids], method)(v)

    same(write, x, ids, values)
    same(lambda x, ids: write(x, ids, 2.5), x, ids)
    same(lambda x, ids, v: write(x, ids, v[0]), x, ids, values)
    same(lambda x, ids, v: mt.grad(lambda v: mt.sum(mt.sin(write(x, ids, v))))(v), x, ids, values)
    assert "all_gather" not in text(write, x, ids, values)
    assert write(x, ids, values).sharding == x.sharding


def test_the_place_of_the_largest(mesh):
    """[1,5 | 7,0] has its largest at 2; the first of equals; NaN is the largest."""
    for values in ([1.0, 5, 7, 0], [7.0, 5, 7, 7], [1.0, np.nan, 7, np.nan], [3.0] * 9):
        x = mt.distribute(mt.asarray(values), mesh, model=mt.Shard(0))
        for fn in (mt.argmax, mt.argmin):
            same(fn, x)
            assert "all_gather" not in text(fn, x)


def test_vocabulary_parallel_cross_entropy(mesh, monkeypatch):
    rng = np.random.default_rng(0)
    logits = mt.distribute(mt.asarray(rng.normal(size=(6, 50))), mesh, data=mt.Shard(0), model=mt.Shard(1))
    labels = mt.distribute(mt.asarray(rng.integers(0, 50, 6)), mesh, data=mt.Shard(0))
    same(mt.nn.cross_entropy, logits, labels)

    def gradient(logits, labels):
        return mt.grad(lambda x: mt.nn.cross_entropy(x, labels))(logits)

    same(gradient, logits, labels)
    lines = text(gradient, logits, labels)
    assert "all_gather" not in lines, lines
    assert program(gradient, logits, labels).moved_bytes() < 6 * 50 * 8

    # Of the factors of the logits: rows alone in tiles on each rank, split classes as they are above.
    monkeypatch.setattr(losses, "WHOLE", 0)
    hidden, weight = mt.asarray(rng.normal(size=(6, 8))), mt.asarray(rng.normal(size=(8, 50)))

    def slopes(h, w, labels):
        dh, dw = mt.grad(lambda p: mt.nn.linear_cross_entropy(*p, labels))((h, w))
        return dh @ dw

    for places, tiled in (({}, True), ({"model": mt.Shard(1)}, False), ({"model": mt.Shard(0)}, False)):
        h, w = mt.distribute(hidden, mesh, data=mt.Shard(0)), mt.distribute(weight, mesh, **places)
        same(slopes, h, w, labels)
        lines = text(slopes, h, w, labels)
        assert ("linear_cross_entropy_backward" in lines) is tiled
        assert "all_gather" not in lines, lines


# ----- slices and their like ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[1:],
        lambda x: x[:-1],
        lambda x: x[1:] - x[:-1],
        lambda x: x[::3],
        lambda x: x[::-2],
        lambda x: x[5:2],
        lambda x: mt.flip(x, axis=0),
        lambda x: mt.concat([x, x[:3]], axis=0),
        lambda x: mt.roll(x, 2, axis=0),
        lambda x: mt.pad(x, ((2, 1), (0, 0))),
        lambda x: x.at[2:9:2].set(0.5),
        lambda x: x.at[::-1].add(x),
        lambda x: mt.grad(lambda x: mt.sum(mt.sin(x[1:] * x[:-1])))(x),
        lambda x: mt.grad(lambda x: mt.sum(mt.sin(mt.concat([x[3:], x[:3], x]))))(x),
    ],
)
@pytest.mark.parametrize("n", [3, 4])
def test_slices_of_a_split_dimension_move_what_they_need(n, fn):
    mesh = mt.Mesh({"a": n})
    x = mt.distribute(mt.asarray(np.random.default_rng(0).normal(size=(11, 2))), mesh, a=mt.Shard(0))
    same(fn, x)
    assert "all_gather" not in text(fn, x)


def test_a_shift_moves_one_row_a_rank():
    mesh = mt.Mesh({"a": 4})
    x = mt.distribute(mt.ones((16, 8)), mesh, a=mt.Shard(0))
    # Rows 1 to 15 in blocks of 4, 4, 4, 3: each rank lacks the first row of the next.
    assert program(lambda x: x[1:], x).moved_bytes() == 3 * 8 * 8


# ----- convolutions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"padding": 1}, {"stride": 2, "padding": "same"}, {"dilation": 2}, {"groups": 3}]
)
@pytest.mark.parametrize("sizes", [{"h": 3}, {"h": 2, "w": 2}, {"h": 8}])
def test_convolution_of_split_images_exchanges_halos(sizes, options):
    if options.get("padding") == "same" and options.get("stride"):
        options = {**options, "padding": 1}
    mesh = mt.Mesh(sizes)
    rng = np.random.default_rng(0)
    placements = {"h": mt.Shard(2), **({"w": mt.Shard(3)} if "w" in sizes else {})}
    x = mt.distribute(mt.asarray(rng.normal(size=(2, 3, 9, 8))), mesh, **placements)
    k = mt.distribute(mt.asarray(rng.normal(size=(3, 3 // options.get("groups", 1), 3, 3))), mesh)

    def conv(x, k):
        return mt.nn.conv2d(x, k, **options)

    def gradients(x, k):
        gx, gk = mt.grad(lambda x, k: mt.sum(mt.sin(conv(x, k))), (0, 1))(x, k)
        return mt.sum(gx * mt.sin(gx)) + mt.sum(gk * gk)

    same(conv, x, k)
    same(lambda x, k: mt.grad(lambda x: mt.sum(mt.sin(conv(x, k))))(x), x, k)
    same(gradients, x, k)
    assert "all_gather" not in text(conv, x, k)


def test_a_halo_is_as_wide_as_the_kernel_reaches():
    mesh = mt.Mesh({"h": 4})
    x = mt.distribute(mt.ones((1, 1, 16, 8)), mesh, h=mt.Shard(2))
    k = mt.distribute(mt.ones((1, 1, 3, 3)), mesh)
    # 14 rows in blocks of 4, 4, 4, 2 see rows [0,6), [4,10), [8,14), [12,16): two of the next rank's, three times.
    assert program(lambda x, k: mt.nn.conv2d(x, k), x, k).moved_bytes() == 3 * 2 * 8 * 8


@pytest.mark.parametrize(
    ("fn", "moves"),
    [
        (lambda x, k: mt.nn.conv2d(x, k), 0),  # a kernel of one place
        (lambda x, k: x[:, :, :], 0),
        (lambda x, k: x[:, :, ::2], 1),  # each rank cuts its part from its own
        (lambda x, k: mt.nn.conv2d(x, k, stride=2), 1),
    ],
)
def test_what_ranks_have_already_is_no_halo(fn, moves):
    mesh = mt.Mesh({"h": 2})
    x = mt.distribute(mt.asarray(np.random.default_rng(0).normal(size=(1, 2, 8, 3))), mesh, h=mt.Shard(2))
    k = mt.distribute(mt.asarray(np.random.default_rng(1).normal(size=(2, 2, 1, 1))), mesh)
    same(fn, x, k)
    found = text(fn, x, k)
    assert "halo_exchange" not in found
    assert found.count("# 0 bytes") == found.count("= slice(h) %") == moves, found


# ----- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, -1, -2])
@pytest.mark.parametrize("first", [0, 3, 9])
def test_windows_are_what_elements_need(first, step):
    n = 10
    places = list(range(first, n if step > 0 else -1, step))
    m = len(places)
    for o in range(m + 1):
        for k in range(m - o + 1):
            start, length = Halo("slice", (first, step)).region(o, k)
            assert set(range(start, start + length)) >= set(places[o : o + k])
            assert length <= max(places[o : o + k], default=-1) - min(places[o : o + k], default=0) + 1
    for o in range(n + 1):
        for k in range(n - o + 1):
            start, length = Halo("slice_grad", (first, step, m)).region(o, k)
            assert (
                list(range(start, start + length)) == [t for t, p in enumerate(places) if o <= p < o + k] or not length
            )
            assert length == sum(o <= p < o + k for p in places)


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize(("stride", "reach"), [(1, 1), (1, 3), (2, 3), (3, 2), (2, 5)])
def test_windows_of_convolutions(stride, reach, padding):
    places = 6
    n = max((places - 1) * stride + reach + 1 - 2 * padding, 1)
    first = [t * stride - padding for t in range(places)]  # that each place of the result sees
    for o in range(places):
        for k in range(1, places - o + 1):
            start, length = Halo("conv", (stride, reach, padding, n)).region(o, k)
            seen = [i for i in range(n) if first[o] <= i < first[o + k - 1] + reach]
            assert list(range(start, start + length)) == seen
    for o in range(n):
        for k in range(1, n - o + 1):
            start, length = Halo("conv_transpose", (stride, reach, padding, places)).region(o, k)
            seen = [t for t in range(places) if first[t] < o + k and first[t] + reach > o]
            assert list(range(start, start + length)) == seen
