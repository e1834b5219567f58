"""The decoder equals a plain NumPy one, the same on every mesh and plan, forward and backward; key rules lead there and
back."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

de = mt.models.decoder
CONFIG = de.Config(vocab=40, width=32, layers=2, heads=4, kv_heads=2, max_length=24)


def batch(config=CONFIG, rows=6, length=16, seed=0):
    ids = np.random.default_rng(seed).integers(0, config.vocab, (rows, length + 1))
    labels = ids[:, 1:].copy()
    labels[0, :5] = -100
    return {"ids": ids[:, :-1], "labels": labels}


def mean_loss(params, batch, config=CONFIG, **options):
    total, weight = de.loss(params, batch, config, **options)
    return total / weight


def numpy_logits(p, ids, c):
    """Llama's forward pass, written as plainly as NumPy allows, in float64."""
    p = mt.tree.tree_map(lambda a: np.asarray(a, np.float64), p)

    def rms(x, w):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.eps) * w

    def turn(x):  # (s, heads, d)
        half = c.head_size // 2
        out = np.empty_like(x)
        for pos in range(len(x)):
            for i in range(half):
                a = pos * c.theta ** (-2 * i / c.head_size)
                out[pos, :, i] = x[pos, :, i] * np.cos(a) - x[pos, :, i + half] * np.sin(a)
                out[pos, :, i + half] = x[pos, :, i + half] * np.cos(a) + x[pos, :, i] * np.sin(a)
        return out

    rows = []
    for row in ids:
        x = p["embed"][row]
        for layer in p["layers"]:
            h = rms(x, layer["attn_norm"])
            q = turn((h @ layer["attn"]["q"]).reshape(len(row), c.heads, -1))
            k = turn((h @ layer["attn"]["k"]).reshape(len(row), c.kv_heads, -1))
            v = (h @ layer["attn"]["v"]).reshape(len(row), c.kv_heads, -1)
            out = np.zeros_like(q)
            for i in range(c.heads):
                g = i // (c.heads // c.kv_heads)
                for t in range(len(row)):
                    scores = k[: t + 1, g] @ q[t, i] / np.sqrt(c.head_size)
                    w = np.exp(scores - scores.max())
                    out[t, i] = w @ v[: t + 1, g] / w.sum()
            x = x + out.reshape(len(row), -1) @ layer["attn"]["o"]
            h = rms(x, layer["ffn_norm"])
            gate = h @ layer["ffn"]["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn"]["up"])) @ layer["ffn"]["down"]
        rows.append(rms(x, p["norm"]) @ (p["embed"].T if c.tied else p["head"]))
    return np.stack(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_a_plain_numpy_forward_pass(tied):
    c = de.Config(vocab=40, width=32, layers=2, heads=4, kv_heads=2, max_length=24, tied=tied)
    params = de.init(mt.random.key(1), c)
    ids = batch()["ids"][:2]
    np.testing.assert_allclose(np.asarray(de.apply(params, ids, c)), numpy_logits(params, ids, c), atol=2e-6)


@pytest.fixture(scope="module")
def single():
    params = de.init(mt.random.key(0), CONFIG)
    data = mt.tree.tree_map(mt.asarray, batch())
    return params, mt.value_and_grad(mean_loss)(params, data)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("dp", {"data": 2}),
        ("dp", {"data": 4}),  # six rows over four ranks: 2, 2, 2, 0
        ("tp", {"model": 2}),
        ("tp", {"model": 4}),  # two key and value heads over four ranks
        ("dp+tp", {"data": 2, "model": 2}),
        ("dp+tp+sp", {"data": 2, "model": 2}),
        ("tp+sp+vocab", {"model": 3}),
        ("vocab", {"model": 2}),
        ("fsdp", {"data": 4}),
        ("fsdp+tp", {"data": 2, "model": 2}),
        ("dp+tp", {"data": 2}),  # an axis that the mesh lacks
    ],
)
def test_every_plan_gives_the_loss_and_gradients_of_one_rank(single, name, axes):
    params, (value, grads) = single
    plan, mesh = de.plan(name), mt.Mesh(axes)
    step = mt.compile(lambda p, b: mt.value_and_grad(lambda p: mean_loss(p, b, plan=plan))(p))
    v, g = step(plan.distribute(params, mesh), mt.distribute(batch(), plan.batch(mesh)))
    assert abs(float(v) - float(value)) < 2e-6
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(g)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=5e-7)


def test_tensor_parallel_weights_lie_by_columns_and_rows():
    plan, mesh = de.plan("tp+vocab"), mt.Mesh({"model": 2})
    params = plan.distribute(de.init(mt.random.key(0), CONFIG), mesh)
    layer = params["layers"][1]
    assert layer["attn"]["q"].sharding == mt.Sharding(mesh, model=mt.Shard(1))
    assert layer["attn"]["o"].sharding == mt.Sharding(mesh, model=mt.Shard(0))
    assert layer["ffn"]["down"].sharding == mt.Sharding(mesh, model=mt.Shard(0))
    assert params["embed"].sharding == mt.Sharding(mesh, model=mt.Shard(0))
    assert layer["attn_norm"].sharding == mt.Sharding(mesh)


def test_sequence_parallel_takes_reduce_scatters_where_tensor_parallel_takes_all_reduces():
    mesh = mt.Mesh({"model": 2})
    data = mt.distribute(batch(), mesh)
    texts = {}
    for name in ("tp", "tp+sp"):
        plan = de.plan(name)
        params = plan.distribute(de.init(mt.random.key(0), CONFIG), mesh)
        texts[name] = mt.explain(lambda p, b, plan=plan: mean_loss(p, b, plan=plan), params, data)
    # Two regions a block leave a sum behind; with sp each sum is scattered over the sequence at once.
    assert texts["tp+sp"].count("reduce_scatter") >= 2 * CONFIG.layers > texts["tp"].count("reduce_scatter")


def test_recompute_gives_the_same_gradients_to_the_bit():
    c = de.Config(vocab=40, width=32, layers=2, heads=4, max_length=24, dropout=0.2)
    params, data, key = de.init(mt.random.key(0), c), mt.tree.tree_map(mt.asarray, batch()), mt.random.key(3)
    runs = [
        mt.value_and_grad(lambda p, how=how: mean_loss(p, data, c, key=key, recompute=how))(params)
        for how in ("none", "attention", "blocks")
    ]
    for value, grads in runs[1:]:
        assert float(value) == float(runs[0][0])
        for a, b in zip(mt.tree.flatten(runs[0][1])[0], mt.tree.flatten(grads)[0], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_recompute_holds_less_for_the_backward_pass(peak_of):
    c = de.Config(vocab=16, width=32, layers=6, heads=4, max_length=160)
    params = de.init(mt.random.key(0), c)
    ids = mt.asarray(np.random.default_rng(0).integers(0, 16, (2, 160)))

    def peak(how, below=None):
        step = mt.compile(lambda p: mt.value_and_grad(lambda p: de.apply(p, ids, c, recompute=how).sum())(p))
        return peak_of(lambda: step(params), below)

    plain = peak("none")
    # The attention weights, s² a head, are kept by none of them.
    for how, share in (("attention", 1.05), ("blocks", 0.6)):
        assert peak(how, share * plain) < share * plain


def test_dropout_is_the_same_field_on_every_mesh():
    c = de.Config(vocab=40, width=32, layers=1, heads=4, max_length=24, dropout=0.5)
    params, key = de.init(mt.random.key(0), c), mt.random.key(3)
    one = float(mean_loss(params, mt.tree.tree_map(mt.asarray, batch()), c, key=key))
    assert abs(one - float(mean_loss(params, mt.tree.tree_map(mt.asarray, batch()), c))) > 1e-4
    for name, axes in (("dp", {"data": 3}), ("dp+tp+sp", {"data": 2, "model": 2})):
        plan, mesh = de.plan(name), mt.Mesh(axes)
        p, b = plan.distribute(params, mesh), mt.distribute(batch(), plan.batch(mesh))
        assert abs(float(mean_loss(p, b, c, key=key, plan=plan)) - one) < 2e-6


@pytest.mark.parametrize("tied", [True, False])
def test_key_rules_lead_from_llama_names_and_back(tied):
    c = de.Config(vocab=12, width=8, layers=2, heads=2, kv_heads=1, ffn=16, tied=tied)
    rng = np.random.default_rng(0)
    sizes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    theirs = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,)}
    for i in range(2):
        at = f"model.layers.{i}"
        theirs |= {f"{at}.self_attn.{n}_proj.weight": s for n, s in sizes.items()}
        theirs |= {f"{at}.mlp.gate_proj.weight": (16, 8), f"{at}.mlp.up_proj.weight": (16, 8)}
        theirs |= {f"{at}.mlp.down_proj.weight": (8, 16), f"{at}.input_layernorm.weight": (8,)}
        theirs |= {f"{at}.post_attention_layernorm.weight": (8,)}
    if not tied:
        theirs["lm_head.weight"] = (12, 8)
    theirs = {n: rng.normal(size=s).astype(np.float32) for n, s in theirs.items()}
    rules = de.rules(c)
    ours = rules.on_arrays(theirs)
    mine = de.init(mt.random.key(0), c)
    assert {n: a.shape for n, a in ours.items()} == {
        mt.tree.path_name(p): x.shape for p, x in mt.tree.flatten_with_path(mine)
    }
    np.testing.assert_array_equal(ours["layers.1.attn.k"], theirs["model.layers.1.self_attn.k_proj.weight"].T)
    back = rules.inverse(theirs).on_arrays(ours)
    assert back.keys() == theirs.keys()
    assert all(np.array_equal(back[n], theirs[n]) for n in theirs)


def test_generate_continues_with_the_likeliest_token():
    params = de.init(mt.random.key(0), CONFIG)
    out = np.asarray(de.generate(params, np.array([[1, 2, 3]]), CONFIG, 4))
    assert out.shape == (1, 7)
    assert out[0, 3] == np.asarray(de.apply(params, np.array([[1, 2, 3]]), CONFIG))[0, -1].argmax()
    assert out[0, 6] == numpy_logits(params, out[:, :6], CONFIG)[0, -1].argmax()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 30, "heads": 4}, "no multiple of 2 \\* heads"),
        ({"heads": 4, "kv_heads": 3}, "cannot share 3"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(mt.errors.ShapeError, match=message):
        de.Config(**{"vocab": 10, "width": 32, "layers": 1, "heads": 4, **sizes})


def test_ids_that_do_not_fit_are_refused():
    params = de.init(mt.random.key(0), CONFIG)
    with pytest.raises(mt.errors.ShapeError, match="longer than the model's max_length 24"):
        de.apply(params, np.zeros((1, 25), int), CONFIG)
    with pytest.raises(mt.errors.ShapeError, match="integers of shape"):
        de.apply(params, np.zeros((1, 5)), CONFIG)


@pytest.mark.parametrize("lost", ["ids", "labels"])
def test_a_batch_without_a_part_is_refused_by_its_name(lost):
    params, held = de.init(mt.random.key(0), CONFIG), batch()
    del held[lost]
    with pytest.raises(mt.errors.ArgumentError, match=rf"\[decoder\] a batch is a dict with '{lost}', got one with"):
        de.loss(params, held, CONFIG)
    first, last = de.stages(CONFIG, 2)
    parts, _ = de.split_stages(params, CONFIG, 2)
    with pytest.raises(mt.errors.ArgumentError, match=f"a batch is a dict with '{lost}'"):
        last(parts[1], first(parts[0], None, held, None), held, None)
    with pytest.raises(mt.errors.ArgumentError, match="a batch is a dict with 'ids', got list"):
        de.loss(params, [1, 2], CONFIG)


def test_plans_that_mean_nothing_are_refused():
    with pytest.raises(mt.errors.PlanError, match="'zp'"):
        de.plan("dp+zp")
    with pytest.raises(mt.errors.PlanError, match="twice"):
        de.plan("dp+dp")
    with pytest.raises(mt.errors.PlanError, match="'sp' without 'tp'"):
        de.plan("dp+sp")
    assert str(de.plan("dp + tp")) == "dp+tp"
