"""Experts: routing by hand, capacity and drop-less, all-to-all on a mesh, and equality with one rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt

moe, de = mt.models.moe, mt.models.decoder


def test_routing_by_hand():
    """Three tokens, three experts, two places an expert: the third token that wants expert 0 loses its first choice."""
    p = mt.asarray(np.array([[[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.5, 0.4, 0.1]]]))
    dispatch, combine, first = moe.route(p, moe.Config(experts=3, top_k=2, capacity_factor=0.5))
    assert dispatch.shape == (1, 3, 3, 1)
    seats = [(t, e) for t in range(3) for e in range(3) if float(dispatch[0, t, e, 0])]
    # First choices go before second ones: token 0 sits at expert 0, the others find it full. Of the second choices
    # token 0 comes to expert 1 before token 2, and token 1 has expert 2 for itself.
    assert seats == [(0, 0), (0, 1), (1, 2)]
    np.testing.assert_allclose(np.asarray(combine)[0, 0, :, 0], [0.7 / 0.9, 0.2 / 0.9, 0])
    np.testing.assert_allclose(np.asarray(combine)[0, 1, :, 0], [0, 0, 0.3 / 0.9])
    np.testing.assert_array_equal(np.asarray(first)[0].argmax(-1), [0, 0, 0])


def numpy_block(p, x, top_k):
    """Every token by its experts, one at a time; no capacity."""
    p = mt.tree.tree_map(lambda a: np.asarray(a, np.float64), p)
    out = np.zeros_like(x)
    for b, t in np.ndindex(*x.shape[:2]):
        scores = x[b, t] @ p["router"]
        prob = np.exp(scores - scores.max())
        prob /= prob.sum()
        best = np.argsort(-prob)[:top_k]
        for e in best:
            gate = x[b, t] @ p["experts"]["gate"][e]
            h = gate / (1 + np.exp(-gate)) * (x[b, t] @ p["experts"]["up"][e])
            out[b, t] += prob[e] / prob[best].sum() * (h @ p["experts"]["down"][e])
    return out


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_drop_less_block_equals_a_loop_over_tokens(top_k):
    c = moe.Config(experts=4, top_k=top_k, capacity_factor=None)
    params = moe.init(mt.random.key(0), c, width=8, ffn=16)
    x = np.random.default_rng(0).normal(size=(3, 5, 8))
    y, _ = moe.apply(params, mt.asarray(x), c)
    np.testing.assert_allclose(np.asarray(y), numpy_block(params, x, top_k), atol=1e-7)


def test_tokens_beyond_the_capacity_give_zero():
    c = moe.Config(experts=2, top_k=1, capacity_factor=0.5)
    params = moe.init(mt.random.key(0), c, width=4, ffn=8)
    x = mt.ones((1, 8, 4), dtype=mt.float32)  # all want the same expert, which has two places
    y = np.asarray(moe.apply(params, x, c)[0])
    assert np.abs(y[0, :2]).min() > 0
    np.testing.assert_array_equal(y[0, 2:], 0)


def test_balance_loss_is_one_when_all_experts_are_used_equally():
    c = moe.Config(experts=4, top_k=1, capacity_factor=None)
    params = moe.init(mt.random.key(0), c, width=4, ffn=8)
    params["router"] = mt.eye(4, dtype=mt.float32)
    x = mt.asarray(np.eye(4, dtype=np.float32)[None] * 50)
    assert abs(float(moe.apply(params, x, c)[1]) - 1.0) < 1e-6


@pytest.mark.parametrize("capacity", [1.0, None])
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("dp", {"data": 2}),
        ("ep", {"expert": 2}),
        ("ep", {"expert": 4}),  # six experts over four ranks: 2, 2, 2, 0
        ("dp+ep+tp", {"data": 2, "expert": 2, "model": 2}),
    ],
)
def test_experts_on_a_mesh_equal_one_rank(capacity, name, axes, as_on_one_rank):
    c = de.Config(
        vocab=40, width=16, layers=1, heads=2, max_length=16, experts=moe.Config(6, 2, capacity_factor=capacity)
    )
    as_on_one_rank(c, name, axes, np.random.default_rng(0).integers(0, 40, (6, 9)))


def dense(x, chosen, weights, w):
    """Every expert for every row, in float64."""
    out = np.zeros_like(x)
    for e in range(len(w["gate"])):
        a = x @ w["gate"][e]
        share = (weights * (chosen == e)).sum(-1, keepdims=True)
        out += share * ((a / (1 + np.exp(-a)) * (x @ w["up"][e])) @ w["down"][e])
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.sampled_from((1, 2, 3, 4)), st.integers(0, 2**20),
    st.sampled_from(("random", "one", "none")), st.booleans(),
)  # fmt: skip
def test_any_routing_equals_the_dense_formula_on_any_number_of_ranks(experts, top_k, rows, ranks, seed, kind, split):
    """One expert may take all rows, others none; rows may go nowhere; values and all gradients. Rows that are split as
    the experts are travel to them."""
    rng = np.random.default_rng(seed)
    x, weights = rng.normal(size=(rows, 4)), rng.uniform(size=(rows, top_k))
    chosen = rng.integers(0, experts, (rows, top_k))
    if kind == "one":
        chosen[:] = experts - 1
    elif kind == "none":
        chosen[:] = experts + 3
    w = {n: rng.normal(size=(experts, *s)) for n, s in (("gate", (4, 3)), ("up", (4, 3)), ("down", (3, 4)))}
    g = mt.asarray(rng.normal(size=(rows, 4)))

    def loss(x, weights, w):
        return mt.sum(mt.nn.experts(x, mt.asarray(chosen), weights, **w) * g)

    operands = mt.asarray(x), mt.asarray(weights), mt.tree.tree_map(mt.asarray, w)
    np.testing.assert_allclose(
        np.asarray(mt.nn.experts(operands[0], chosen, operands[1], **operands[2])),
        dense(x, chosen, weights, w),
        atol=1e-12,
    )
    value, grads = mt.value_and_grad(loss, argnums=(0, 1, 2))(*operands)
    mesh = mt.Mesh({"expert": ranks})
    put = [mt.distribute(a, mesh, **({"expert": mt.Shard(0)} if split else {})) for a in operands[:2]]
    put.append(mt.tree.tree_map(lambda a: mt.distribute(a, mesh, expert=mt.Shard(0)), operands[2]))
    v, found = mt.value_and_grad(loss, argnums=(0, 1, 2))(*put)
    np.testing.assert_allclose(float(v), float(value), atol=1e-10)
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(found)[0], strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=1e-10)


def test_choices_of_a_dtype_that_does_not_count_all_experts():
    rng = np.random.default_rng(0)
    x, weights, chosen = rng.normal(size=(6, 4)), rng.uniform(size=(6, 2)), rng.integers(-1, 128, (6, 2))
    w = {n: rng.normal(size=(300, *s)) for n, s in (("gate", (4, 3)), ("up", (4, 3)), ("down", (3, 4)))}
    got = mt.nn.experts(x, chosen.astype(np.int8), weights, **w)
    np.testing.assert_allclose(np.asarray(got), dense(x, chosen, weights, w), atol=1e-12)


def test_a_weight_that_is_not_finite_reaches_its_row_and_its_expert_alone():
    w = {n: mt.ones((3, *s)) for n, s in (("gate", (4, 3)), ("up", (4, 3)), ("down", (3, 4)))}
    weights = mt.asarray([[np.nan, 1.0], [1.0, 1.0]])

    def loss(w):
        y = mt.nn.experts(mt.ones((2, 4)), mt.asarray([[0, 1], [1, 2]]), weights, **w)
        assert mt.isnan(y).numpy().tolist() == [[True] * 4, [False] * 4]
        return mt.sum(y)

    for slope in mt.grad(loss)(w).values():
        assert mt.isnan(slope).numpy().all(axis=(1, 2)).tolist() == [True, False, False]


def test_hidden_units_exist_for_the_rows_of_one_expert_at_a_time(peak_of):
    """The places that padding would take are ``experts * rows``; what is held is of the rows that an expert gets."""
    experts, rows, width, hidden = 16, 2048, 16, 256
    rng = np.random.default_rng(0)
    w = [
        mt.asarray(rng.normal(size=s).astype(np.float32))
        for s in [(experts, width, hidden)] * 2 + [(experts, hidden, width)]
    ]
    x, chosen = mt.asarray(rng.normal(size=(rows, width)).astype(np.float32)), np.arange(rows)[:, None] % experts
    weights = mt.ones((rows, 1), dtype=mt.float32)
    grad = mt.grad(
        lambda x, *w: mt.sum(mt.nn.experts(x, chosen, weights, gate=w[0], up=w[1], down=w[2])), argnums=(0, 1, 2, 3)
    )
    peak = peak_of(lambda: grad(x, *w))
    operands = 4 * (2 * rows * width + 3 * experts * width * hidden)  # the gradients, and what rows bring along
    assert peak < 2 * operands + 10 * 4 * hidden * rows // experts < 4 * hidden * rows * experts / 4


def test_drop_less_experts_stay_where_they_are():
    """Just the tokens travel, there and back; no rank gets a matrix of another, and nothing is gathered but counts."""
    c = moe.Config(experts=4, top_k=2, capacity_factor=None)
    plan, mesh = de.plan("ep"), mt.Mesh({"expert": 2})
    params = moe.init(mt.random.key(0), c, width=8, ffn=64)
    params["experts"] = mt.tree.tree_map(lambda w: mt.distribute(w, mesh, expert=mt.Shard(0)), params["experts"])
    params["router"] = mt.distribute(params["router"], mesh)
    x = mt.distribute(mt.ones((4, 8, 8), dtype=mt.float32), mesh, expert=mt.Shard(0))
    text = mt.explain(lambda p, x: moe.apply(p, x, c, plan=plan)[0], params, x)
    # The tokens with their choices and weights, and the sums: one round each way, after one of counts.
    assert text.count("ragged_all_to_all(expert)") == 4
    assert (text.count("all_gather"), text.count("reduce_scatter"), text.count("all_reduce")) == (1, 0, 0), text
    assert "[4,8,64]" not in text  # a stack of matrices as a whole


def test_tokens_travel_by_all_to_all():
    c = moe.Config(experts=4, top_k=2, capacity_factor=1.0)
    plan, mesh = de.plan("ep"), mt.Mesh({"expert": 2})
    params = moe.init(mt.random.key(0), c, width=8, ffn=16)
    params["experts"] = mt.tree.tree_map(lambda w: mt.distribute(w, mesh, expert=mt.Shard(0)), params["experts"])
    params["router"] = mt.distribute(params["router"], mesh)
    x = mt.distribute(mt.ones((4, 8, 8), dtype=mt.float32), mesh, expert=mt.Shard(0))
    text = mt.explain(lambda p, x: moe.apply(p, x, c, plan=plan)[0], params, x)
    assert text.count("all_to_all") == 2
    assert "all_gather" not in text


@pytest.mark.parametrize(("experts", "ranks", "files"), [(8, 1, 4), (8, 2, 4), (8, 8, 4), (6, 4, 3)])
def test_every_expert_is_saved_once_and_loaded_on_any_number_of_ranks(tmp_path, experts, ranks, files):
    """Six experts over four ranks lie 2, 2, 2, 0."""
    plan = de.plan("dp+ep")
    mesh = mt.Mesh({"data": 2, "expert": 4})
    w = mt.asarray(np.arange(experts * 6, dtype=np.float32).reshape(experts, 3, 2))
    put = mt.distribute(w, plan.sharding("layers.0.ffn.experts.up", w.shape, mesh))
    mt.save(tmp_path / "c", {"experts": {"up": put}})
    chunks = sorted(p.name for p in (tmp_path / "c").rglob("c.*"))
    assert len(chunks) == files  # one a rank that has experts, none for the second data rank
    new = mt.Mesh({"expert": ranks})
    back = mt.load(tmp_path / "c", shardings=lambda path, shape, dtype: plan.sharding(path, shape, new))
    np.testing.assert_array_equal(np.asarray(back["experts"]["up"]), np.asarray(w))
    assert back["experts"]["up"].sharding.block_shape(w.shape)[0] == -(-experts // ranks)


def test_key_rules_of_mixtral_stack_the_experts():
    c = de.Config(vocab=10, width=4, layers=1, heads=2, ffn=6, experts=moe.Config(2, 1))
    rng = np.random.default_rng(0)
    at = "model.layers.0"
    theirs = {"model.embed_tokens.weight": (10, 4), "model.norm.weight": (4,), f"{at}.input_layernorm.weight": (4,)}
    theirs |= {f"{at}.post_attention_layernorm.weight": (4,), f"{at}.block_sparse_moe.gate.weight": (2, 4)}
    theirs |= {f"{at}.self_attn.{n}_proj.weight": (4, 4) for n in "qkvo"}
    for e in range(2):
        theirs |= {f"{at}.block_sparse_moe.experts.{e}.w{k}.weight": (4, 6) if k == 2 else (6, 4) for k in (1, 2, 3)}
    theirs = {n: rng.normal(size=s).astype(np.float32) for n, s in theirs.items()}
    ours = de.rules(c).on_arrays(theirs)
    assert ours["layers.0.ffn.experts.down"].shape == (2, 6, 4)
    np.testing.assert_array_equal(
        ours["layers.0.ffn.experts.up"][1], theirs[f"{at}.block_sparse_moe.experts.1.w3.weight"].T
    )
    assert {n: a.shape for n, a in ours.items()} == {
        mt.tree.path_name(p): x.shape for p, x in mt.tree.flatten_with_path(de.init(mt.random.key(0), c))
    }


def test_what_cannot_be_is_refused():
    with pytest.raises(mt.errors.ShapeError, match="top_k"):
        moe.Config(experts=2, top_k=3)
    with pytest.raises(ValueError, match="capacity_factor"):
        moe.Config(experts=2, capacity_factor=0.0)
    with pytest.raises(mt.errors.ShapeError, match="batch, s, width"):
        moe.apply({}, mt.ones((2, 3)), moe.Config(2))


def test_second_choices_take_the_places_that_first_ones_leave():
    """One place an expert: each token gets its first choice, and what would be its second is taken."""
    config = mt.models.moe.Config(experts=2, top_k=2, capacity_factor=0.5)
    probabilities = mt.asarray([[[0.6, 0.4], [0.3, 0.7]]])
    dispatch, combine, _ = mt.models.moe.route(probabilities, config)
    np.testing.assert_array_equal(np.asarray(dispatch)[0, :, :, 0], np.eye(2))
    np.testing.assert_allclose(np.asarray(combine)[0, :, :, 0], np.diag([0.6, 0.7]))
