"""Ring attention equals attention, forward and backward; a decoder with a split sequence equals one rank."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.transforms.ring_attention import ring_attention

de = mt.models.decoder


def blocks(seed=0, kv=2, group=2, s=12, d=4, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = [(2, kv, group, s, d), (2, kv, 1, s, d), (2, kv, 1, s, d)]
    return [mt.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "axes", [{"context": 1}, {"context": 3}, {"context": 4}, {"data": 2, "context": 2, "model": 2}]
)
def test_values_and_gradients_equal_attention(axes, is_causal):
    q, k, v = blocks()
    g = mt.asarray(np.random.default_rng(1).normal(size=q.shape))

    def whole(q, k, v):
        return (mt.nn.scaled_dot_product_attention(q, k, v, is_causal=is_causal) * g).sum()

    mesh = mt.Mesh(axes)
    placed = {"context": mt.Shard(3), "data": mt.Shard(0), "model": mt.Shard(1)}
    put = lambda x: mt.distribute(x, mesh, **{n: p for n, p in placed.items() if n in axes})  # noqa: E731

    def ring(q, k, v):
        return (ring_attention(q, k, v, axis="context", is_causal=is_causal) * g).sum()

    value, grads = mt.value_and_grad(whole, argnums=(0, 1, 2))(q, k, v)
    v2, g2 = mt.compile(mt.value_and_grad(ring, argnums=(0, 1, 2)))(put(q), put(k), put(v))
    assert abs(float(v2) - float(value)) < 1e-12
    for a, b in zip(grads, g2, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-13)


def test_sixteen_bit_blocks_are_joined_in_float32():
    q, k, v = blocks(dtype=mt.bfloat16, s=64)
    mesh = mt.Mesh({"context": 4})
    out = ring_attention(*(mt.distribute(x, mesh, context=mt.Shard(3)) for x in (q, k, v)), axis="context")
    whole = mt.nn.scaled_dot_product_attention(q, k, v)
    assert out.dtype == mt.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(whole, np.float32), atol=2e-2)


def test_keys_travel_from_rank_to_rank_and_are_never_gathered():
    mesh = mt.Mesh({"context": 4})
    args = [mt.distribute(x, mesh, context=mt.Shard(3)) for x in blocks()]
    text = mt.explain(lambda q, k, v: ring_attention(q, k, v, axis="context"), *args)
    assert text.count("permute(") >= 6
    assert "all_gather" not in text


@pytest.mark.parametrize(
    ("name", "axes"),
    [("cp", {"context": 4}), ("dp+cp", {"data": 2, "context": 2}), ("cp+tp", {"context": 2, "model": 2})],
)
def test_a_decoder_with_a_split_sequence_equals_one_rank(name, axes, as_on_one_rank):
    c = de.Config(vocab=40, width=32, layers=2, heads=4, kv_heads=2, max_length=16)
    as_on_one_rank(c, name, axes, np.random.default_rng(0).integers(0, 40, (4, 17)))


def test_sequences_that_do_not_divide_are_refused():
    mesh = mt.Mesh({"context": 4})
    x = mt.distribute(mt.ones((1, 1, 6, 2)), mesh)
    with pytest.raises(mt.errors.ShapeError, match="multiple of the 4 ranks"):
        ring_attention(x, x, x, axis="context")
    with pytest.raises(mt.errors.MeshError, match="axis 'ring'"):
        ring_attention(x, x, x, axis="ring")
