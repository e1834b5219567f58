"""Dimensions of blocks that stay together: heads, groups of channels, rows that become columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors

rng = np.random.default_rng(11)


def put(shape: tuple[int, ...], mesh: mt.Mesh, **placements: mt.parallel.Placement) -> mt.Array:
    return mt.distribute(rng.normal(size=shape), mesh, **placements)


def same(fn: Callable[..., Any], *args: mt.Array) -> str:
    """Value and gradients are those of whole arrays; the text of the program that gives both."""
    whole = [mt.asarray(np.asarray(a)) for a in args]

    def both(*args: mt.Array) -> Any:
        return fn(*args), mt.grad(lambda *args: mt.sum(mt.sin(fn(*args))), tuple(range(len(args))))(*args)

    want = mt.tree.flatten(both(*whole))[0]
    for run in (both, mt.compile(both)):
        for got, w in zip(mt.tree.flatten(run(*args))[0], want, strict=True):
            np.testing.assert_allclose(np.asarray(got), np.asarray(w), 1e-9, 1e-9)
    return mt.explain(both, *args)


# ----- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_are_split_with_the_columns_that_make_them(ranks):
    """(batch, places, heads * width) and (batch, places, heads, width): the split goes through, both ways."""
    mesh = mt.Mesh({"model": ranks})
    x = put((2, 3, 12), mesh, model=mt.Shard(2))
    apart = mt.reshape(x, (2, 3, 4, 3))
    assert apart.sharding == mt.Sharding(mesh, model=mt.Shard(2))
    assert mt.reshape(apart, (2, 3, 12)).sharding == x.sharding
    text = same(lambda x: mt.reshape(mt.permute_dims(mt.reshape(x, (2, 3, 4, 3)), (0, 2, 1, 3)) * 2.0, (2, 4, 9)), x)
    assert "all_gather" not in text, text
    assert "all_to_all" not in text, text


def test_attention_of_split_heads_moves_nothing_but_its_last_sum():
    """Megatron's block, grouped keys included: q, k and v by columns, the projection by rows."""
    mesh, heads, kv, width = mt.Mesh({"model": 2}), 4, 2, 3
    x = mt.distribute(rng.normal(size=(2, 5, 6)), mesh)
    wq = put((6, heads * width), mesh, model=mt.Shard(1))
    wk, wv = (put((6, kv * width), mesh, model=mt.Shard(1)) for _ in range(2))
    wo = put((heads * width, 6), mesh, model=mt.Shard(0))

    def attend(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
        q = mt.permute_dims(mt.reshape(x @ wq, (2, 5, kv, heads // kv, width)), (0, 2, 3, 1, 4))
        k, v = (mt.permute_dims(mt.reshape(x @ w, (2, 5, kv, 1, width)), (0, 2, 3, 1, 4)) for w in (wk, wv))
        scores = mt.nn.softmax(q @ k.mT, axis=-1)
        return mt.reshape(mt.permute_dims(scores @ v, (0, 3, 1, 2, 4)), (2, 5, heads * width)) @ wo

    text = same(attend, x, wq, wk, wv, wo)
    assert "all_gather" not in text, text
    assert "all_to_all" not in text, text


def test_rows_and_columns_that_share_a_divisor():
    """6×4 as 8×3: the first twelve elements are three rows before and four after, so that two ranks keep what they
    have."""
    mesh = mt.Mesh({"a": 2})
    x = put((6, 4), mesh, a=mt.Shard(0))
    assert mt.reshape(x, (8, 3)).sharding == x.sharding
    assert "all_" not in same(lambda x: mt.reshape(x, (8, 3)), x)


def test_several_axes_on_one_dimension():
    mesh = mt.Mesh({"a": 2, "b": 2})
    for order in ({"a": mt.Shard(0), "b": mt.Shard(0)}, {"b": mt.Shard(0), "a": mt.Shard(0)}):
        x = put((8, 3), mesh, **order)
        for shape in ((24,), (4, 6), (4, 2, 3)):
            y = mt.reshape(x, shape)
            assert y.sharding == mt.Sharding(mesh, **order)
            same(lambda x, shape=shape: mt.reshape(x, shape), x)


# ----- channels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "groups", "ranks"), [(6, 2, 2), (8, 4, 2), (12, 4, 4), (5, 5, 2), (1, 1, 2)])
def test_groups_of_channels_stay_with_their_rank(channels, groups, ranks):
    """C=6 and G=2, split in two, may be kept; so may groups of one channel, ragged or empty."""
    mesh = mt.Mesh({"model": ranks})
    x = put((3, channels, 4), mesh, model=mt.Shard(1))
    w, b = (put((channels,), mesh, model=mt.Shard(0)) for _ in range(2))
    text = same(lambda x, w, b: mt.group_norm(x, groups, w, b), x, w, b)
    assert "all_gather" not in text, text
    assert "all_reduce" not in text, text


def test_groups_that_ranks_do_not_divide_are_gathered_and_explain_says_why():
    """C=6 and G=3, split in two: the channels are made whole."""
    mesh = mt.Mesh({"model": 2})
    x = put((2, 6, 4), mesh, model=mt.Shard(1))
    text = same(lambda x: mt.group_norm(x, 3), x)
    assert "all_gather(model)" in text
    assert "as group_norm keeps dimension 1 in 3 blocks of 2, which 2 ranks do not divide" in text, text


@pytest.mark.parametrize(("ins", "outs", "groups", "ranks"), [(4, 8, 4, 2), (6, 6, 2, 2), (5, 5, 5, 2), (3, 3, 3, 4)])
@pytest.mark.parametrize("rows", [False, True])
def test_grouped_convolutions_of_split_channels(ins, outs, groups, ranks, rows):
    """Groups do not see each other: nothing moves but the halos of rows that are split as well."""
    mesh = mt.Mesh({"model": ranks, "h": 2} if rows else {"model": ranks})
    more = {"h": mt.Shard(2)} if rows else {}
    x = put((2, ins, 6, 5), mesh, model=mt.Shard(1), **more)
    w = put((outs, ins // groups, 3, 2), mesh, model=mt.Shard(0))
    text = same(lambda x, w: mt.nn.conv2d(x, w, groups=groups), x, w)
    assert "all_gather" not in text, text
    assert "all_reduce(model)" not in text, text


# ----- what does not divide -------------------------------------------------------------------------------------------


def test_explain_says_which_blocks_a_split_cuts():
    mesh = mt.Mesh({"a": 4})
    x = put((2, 12), mesh, a=mt.Shard(1))
    text = same(lambda x: mt.reshape(x, (2, 3, 4)), x)
    assert "as reshape keeps dimension 1 in 3 blocks of 4, which 4 ranks do not divide" in text, text


def test_explicit_sharding_refuses_what_does_not_divide_before_anything_runs():
    mesh = mt.Mesh({"a": 4, "b": 2})
    x, y = put((12,), mesh, a=mt.Shard(0)), put((12,), mesh, b=mt.Shard(0))
    reshaped = r"\[reshape\] operand 0, float64\[12@a\], would have to be gathered along 'a' \(72 bytes a rank\), "
    blocks = "as reshape keeps dimension 0 in 3 blocks of 4, which 4 ranks do not divide: reshard it by name"
    with mt.explicit_sharding():
        with pytest.raises(errors.ShardingConflict, match=reshaped + blocks):
            mt.reshape(x, (3, 4))
        with pytest.raises(errors.ShardingConflict, match=reshaped + blocks):
            mt.compile(lambda x: mt.reshape(x, (3, 4)))(x)
        with pytest.raises(errors.ShardingConflict, match=r"\[sort\] .* gathered along 'b' .* needs dimension 0 whole"):
            mt.sort(y)
        with pytest.raises(
            errors.ShardingConflict, match=r"\[add\] operand 1, float64\[16@b\], .* exchanged along 'b'"
        ):
            put((16,), mesh, a=mt.Shard(0)) + put((16,), mesh, b=mt.Shard(0))
        with pytest.raises(errors.ShardingConflict, match=r"\[group_norm\] .* in 3 blocks of 2, which 2 ranks"):
            mt.group_norm(put((2, 6, 4), mesh, b=mt.Shard(1)), 3)
        # What is asked for by name, cut from what is whole, or summed, stays.
        z = mt.reshard(y, b=mt.Replicate(), a=mt.Shard(0)) + x
        assert (x + mt.ones(12)).sharding == x.sharding
        assert mt.reshape(mt.sum(mt.reshape(mt.reshard(x, a=mt.Replicate()), (3, 4)), axis=0) + 1.0, (2, 2)).shape == (
            2,
            2,
        )
    np.testing.assert_allclose(np.asarray(z), np.asarray(x) + np.asarray(y))
    assert mt.reshape(x, (3, 4)).shape == (3, 4)  # and outside it everything is as before


def test_explicit_sharding_looks_into_ops_that_are_decomposed():
    mesh = mt.Mesh({"a": 2, "b": 2})
    x = put((3, 8), mesh, a=mt.Shard(1))
    places_and_groups = put((2, 6, 4), mesh, a=mt.Shard(2), b=mt.Shard(1))
    with mt.explicit_sharding():
        assert mt.nn.softmax(x, axis=1).sharding == x.sharding  # sums and maxima of rows move, and no elements
        with pytest.raises(
            errors.ShardingConflict, match=r"\[group_norm\] a value in .* in 3 blocks of 2, which 2 ranks"
        ):
            mt.group_norm(places_and_groups, 3)
