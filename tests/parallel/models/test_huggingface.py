"""What a ``config.json`` says is honoured, or refused by name: the well-known families, field by field."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

import meshtape as mt
from meshtape.parallel.models import huggingface
from meshtape.parallel.models.layers import rotary_tables

de, en = mt.models.decoder, mt.models.encoder
REFUSED = mt.errors.UnsupportedModel

GENERAL = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "transformers_version": "4.43.0",
    "use_cache": True,
}
LLAMA_2 = GENERAL | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_1 = LLAMA_2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_2 = LLAMA_3_1 | {"head_dim": 64, "hidden_size": 2048, "tie_word_embeddings": True, "num_hidden_layers": 16}
MISTRAL_1 = GENERAL | {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MISTRAL_3 = MISTRAL_1 | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}
MISTRAL_NEMO = MISTRAL_3 | {"head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40}
MIXTRAL = MISTRAL_3 | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "vocab_size": 32000,
}
GEMMA = GENERAL | {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA_2 = GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_3 = GEMMA_2 | {
    "model_type": "gemma3_text",
    "rope_local_base_freq": 10000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
QWEN_2 = LLAMA_2 | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
PHI_3 = LLAMA_2 | {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 2047,
}
GPT_NEOX = GENERAL | {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
MINILM = BERT | {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
}
ROBERTA = BERT | {
    "model_type": "roberta",
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-05,
    "vocab_size": 50265,
}
QUANTISED = LLAMA_2 | {"quantization_config": {"bits": 4, "quant_method": "gptq"}}


@pytest.fixture
def file(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path / "config.json"

    return write


READ = {
    "Llama 2": (LLAMA_2, {"max_length": 4096, "theta": 1e4, "rope": None, "eps": 1e-5, "tied": False, "kv_heads": 32}),
    "Llama 3.1": (
        LLAMA_3_1,
        {"rope": de.RopeScaling(8.0, 1.0, 4.0, 8192.0), "theta": 5e5, "kv_heads": 8, "max_length": 131072},
    ),
    "Llama 3.2": (LLAMA_3_2, {"tied": True, "width": 2048}),
    "Mistral 7B v0.3": (MISTRAL_3, {"theta": 1e6, "vocab": 32768}),
    "Mixtral": (MIXTRAL, {"experts": mt.models.moe.Config(8, 2, capacity_factor=None), "kv_heads": 8}),
    "linear": (LLAMA_2 | {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope": de.RopeScaling(4.0)}),
    "default": (LLAMA_2 | {"rope_scaling": {"rope_type": "default"}}, {"rope": None}),
    "transformers 5": (
        {k: v for k, v in LLAMA_3_1.items() if k not in ("rope_scaling", "rope_theta")}
        | {"rope_parameters": LLAMA_3_1["rope_scaling"] | {"rope_theta": 500000.0}},
        {"rope": de.RopeScaling(8.0, 1.0, 4.0, 8192.0), "theta": 5e5},
    ),
    "layers of one type": (
        LLAMA_2 | {"layer_types": ["full_attention"] * LLAMA_2["num_hidden_layers"]},
        {"layers": 32},
    ),
    "a wide window": (MISTRAL_1 | {"sliding_window": 32768}, {"max_length": 32768}),
}


@pytest.mark.parametrize("name", READ)
def test_decoders_are_read(file, name):
    config, wanted = READ[name]
    found = de.Config.from_huggingface(file(config))
    assert {k: getattr(found, k) for k in wanted} == wanted


def test_what_a_config_leaves_out_is_hugging_faces_default(file):
    sizes = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    )
    least = {k: LLAMA_2[k] for k in ("model_type", *sizes)}
    c = de.Config.from_huggingface(file(least))
    assert (c.eps, c.theta, c.tied, c.kv_heads) == (1e-6, 1e4, False, 32)
    c = de.Config.from_huggingface(file(least | {"model_type": "mixtral"}))
    assert (c.eps, c.theta, c.kv_heads, c.experts.experts) == (1e-5, 1e6, 8, 8)
    with pytest.raises(REFUSED, match="sliding_window = nothing"):
        de.Config.from_huggingface(file(least | {"model_type": "mistral", "max_position_embeddings": 32768}))
    with pytest.raises(REFUSED, match="hidden_size = nothing: a model needs it"):
        de.Config.from_huggingface(file({k: v for k, v in least.items() if k != "hidden_size"}))


REFUSALS = {
    "Mistral 7B v0.1": (de, MISTRAL_1, ["sliding_window = 4096: .*give max_length"]),
    "layers of two types": (
        de,
        LLAMA_2 | {"layer_types": ["full_attention", "sliding_attention"] * 16},
        ["layer_types = .*only 'full_attention' for each is honoured"],
    ),
    "types of too few layers": (de, LLAMA_2 | {"layer_types": ["full_attention"] * 31}, ["layer_types"]),
    "Mistral Nemo": (de, MISTRAL_NEMO, ["head_dim = 128"]),
    "Gemma": (
        de,
        GEMMA,
        ['model_type = "gemma".*norms by 1', 'hidden_act = "gelu"', 'hidden_activation = "gelu_pytorch_tanh"'],
    ),
    "Gemma 2": (
        de,
        GEMMA_2,
        ["gemma2", "attn_logit_softcapping = 50", "final_logit_softcapping = 30", "query_pre_attn_scalar = 256"],
    ),
    "Gemma 3": (de, GEMMA_3, ["gemma3_text", "rope_local_base_freq", "sliding_window_pattern = 6"]),
    "Qwen 2": (de, QWEN_2, ['"qwen2".*biases of queries', "use_sliding_window = false"]),
    "Phi-3": (de, PHI_3, ["phi3", "auto_map"]),
    "GPT-NeoX": (de, GPT_NEOX, ["gpt_neox", "rotary_pct = 0.25", "use_parallel_residual = true"]),
    "no family": (de, {k: v for k, v in LLAMA_2.items() if k != "model_type"}, ["model_type = nothing"]),
    "BERT as a decoder": (de, BERT, ['model_type = "bert"']),
    "biases": (de, LLAMA_2 | {"attention_bias": True, "mlp_bias": True}, ["attention_bias = true", "mlp_bias = true"]),
    "yarn": (de, LLAMA_2 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling"]),
    "dynamic": (de, LLAMA_2 | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["rope_scaling"]),
    "longrope": (de, LLAMA_2 | {"rope_scaling": PHI_3["rope_scaling"]}, ["rope_scaling.*longrope"]),
    "a factor of no kind": (de, LLAMA_2 | {"rope_scaling": {"factor": 4.0}}, ["rope_scaling"]),
    "llama3 with more": (
        de,
        LLAMA_3_1 | {"rope_scaling": LLAMA_3_1["rope_scaling"] | {"attention_factor": 2.0}},
        ["rope_scaling.*attention_factor"],
    ),
    "llama3 the wrong way round": (
        de,
        LLAMA_3_1 | {"rope_scaling": LLAMA_3_1["rope_scaling"] | {"low_freq_factor": 8.0}},
        ["low and high"],
    ),
    "another activation": (de, LLAMA_2 | {"hidden_act": "gelu"}, ['hidden_act = "gelu".*activation.*silu']),
    "part of the rotation": (de, LLAMA_2 | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
    "quantised": (de, QUANTISED, ["quantization_config.*floating dtype"]),
    "unknown": (de, LLAMA_2 | {"residual_multiplier": 0.22}, ["residual_multiplier = 0.22: is not known"]),
    "unknown and off": (de, LLAMA_2 | {"norm_topk_prob": False}, ["norm_topk_prob = false"]),
    "a text for a number": (de, LLAMA_2 | {"hidden_size": "large"}, ['hidden_size = "large": is no number']),
    "noise": (de, MIXTRAL | {"router_jitter_noise": 0.1}, ["router_jitter_noise = 0.1"]),
    "RoBERTa": (en, ROBERTA, ['model_type = "roberta".*padding token']),
    "relative positions": (en, BERT | {"position_embedding_type": "relative_key"}, ["position_embedding_type"]),
    "a BERT that decodes": (en, BERT | {"is_decoder": True}, ["is_decoder = true"]),
    "tanh": (en, BERT | {"hidden_act": "gelu_new"}, ['hidden_act = "gelu_new"']),
    "rope in BERT": (en, BERT | {"rope_scaling": {"type": "linear"}}, ["rope_scaling"]),
    "a window in BERT": (en, BERT | {"sliding_window": 4}, ["sliding_window"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_model_does_not_honour_is_refused_by_name(file, name):
    model, config, words = REFUSALS[name]
    with pytest.raises(REFUSED) as e:
        model.Config.from_huggingface(file(config))
    for text in words:
        assert re.search(text, str(e.value)), (text, str(e.value))
    assert "config.json" in str(e.value)


def test_a_window_is_none_for_sequences_within_it(file):
    c = de.Config.from_huggingface(file(MISTRAL_1), max_length=4096)
    assert c.max_length == 4096
    with pytest.raises(REFUSED, match="sliding_window"):
        de.Config.from_huggingface(file(MISTRAL_1), max_length=4097)
    assert de.Config.from_huggingface(file(LLAMA_2), max_length=10**6).max_length == 4096


@pytest.mark.parametrize("config", [BERT, MINILM, {k: v for k, v in BERT.items() if k != "model_type"}])
def test_encoders_are_read(file, config):
    c = en.Config.from_huggingface(file(config))
    assert (c.vocab, c.width, c.layers, c.eps) == (30522, config["hidden_size"], config["num_hidden_layers"], 1e-12)


def test_a_file_that_is_no_config_is_refused(tmp_path):
    for text in ("{", "[]", "3"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(REFUSED, match=r"config\.json"):
            de.Config.from_huggingface(tmp_path / "config.json")


# ----- rotary angles --------------------------------------------------------------------------------------------------


def llama3_speed(speed, factor=8.0, low=1.0, high=4.0, original=8192):
    """Hugging Face's ``_compute_llama3_parameters``, for one angle."""
    length = 2 * math.pi / speed
    if length < original / high:
        return speed
    if length > original / low:
        return speed / factor
    smooth = (original / length - low) / (high - low)
    return (1 - smooth) * speed / factor + smooth * speed


@pytest.mark.parametrize(("d", "theta"), [(64, 500000.0), (128, 500000.0), (8, 10000.0)])
def test_llama_3_turns_slowly_what_turns_seldom(d, theta):
    scaling = de.RopeScaling(8.0, 1.0, 4.0, 8192.0)
    speeds = theta ** (-np.arange(0, d, 2) / d)
    wanted = np.array([llama3_speed(s) for s in speeds])
    np.testing.assert_allclose(scaling(speeds), wanted, rtol=1e-14)
    cos, sin = rotary_tables(np.array([0, 5000]), d, theta, scaling)
    np.testing.assert_allclose(np.asarray(cos)[1], np.cos(5000 * wanted), atol=1e-6)
    np.testing.assert_allclose(np.asarray(sin)[1], np.sin(5000 * wanted), atol=1e-6)


def test_by_hand():
    """Angles of 1, 2 pi 2 / 8192 and 2 pi / 16384: as they are, between, and an eighth."""
    speeds = np.array([1.0, 4 * math.pi / 8192, math.pi / 8192])
    found = de.RopeScaling(8.0, 1.0, 4.0, 8192.0)(speeds) / speeds
    np.testing.assert_allclose(found, [1.0, 1 / 3 + 2 / 3 / 8, 1 / 8])
    np.testing.assert_allclose(de.RopeScaling(4.0)(speeds), speeds / 4)
    for wrong in ((0.5,), (2.0, 4.0, 1.0, 8.0), (2.0, 1.0)):
        with pytest.raises(ValueError, match="must be"):
            de.RopeScaling(*wrong)


def test_scaled_angles_reach_the_logits():
    c = de.Config(vocab=20, width=16, layers=1, heads=2, max_length=16)
    params, ids = de.init(mt.random.key(0), c), np.arange(12)[None] % 20
    plain = np.asarray(de.apply(params, ids, c))
    slow = de.Config(vocab=20, width=16, layers=1, heads=2, max_length=16, rope=de.RopeScaling(4.0))
    assert np.abs(np.asarray(de.apply(params, ids, slow)) - plain).max() > 1e-5


# ----- whole directories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "tied", "mixtral"])
def test_a_directory_is_loaded_with_its_config(tmp_path, family):
    experts = mt.models.moe.Config(4, 2, capacity_factor=None) if family == "mixtral" else None
    c = de.Config(
        24, 16, 2, 4, 2, 24, 32, eps=1e-5, theta=1e6 if experts else 1e4, tied=family == "tied", experts=experts
    )
    params = de.init(mt.random.key(3), c)
    flat = {mt.tree.path_name(p): np.asarray(x) for p, x in mt.tree.flatten_with_path(params)}
    names = theirs_of(c)
    rules = de.rules(c)
    tensors = rules.inverse(names).on_arrays(flat)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    mt.storage.save_safetensors(tmp_path / "model.safetensors", tensors)
    config = LLAMA_2 | {"model_type": "mixtral" if experts else "llama", "vocab_size": 24, "hidden_size": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    config |= {"max_position_embeddings": 32, "tie_word_embeddings": family == "tied"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2} if experts else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, found = de.from_pretrained(tmp_path)
    assert found == c
    ids = np.arange(8)[None] % 24
    np.testing.assert_array_equal(np.asarray(de.apply(loaded, ids, found)), np.asarray(de.apply(params, ids, c)))
    split, _ = de.from_pretrained(tmp_path, mt.Mesh({"data": 2, "model": 2}), "fsdp+tp", dtype=np.float64)
    for a, b in zip(mt.tree.flatten(split)[0], mt.tree.flatten(params)[0], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(np.float64))
    tensors["model.norm.weight"] = np.full(16, 7e4, np.float32)
    mt.storage.save_safetensors(tmp_path / "model.safetensors", tensors, overwrite=True)
    for mesh in (None, mt.Mesh({"data": 2, "model": 2})):
        with pytest.raises(mt.errors.Lossy, match="'norm': 16 became infinite"):
            de.from_pretrained(tmp_path, mesh, dtype=np.float16)
        half, _ = de.from_pretrained(tmp_path, mesh, dtype=np.float16, allow_overflow=True)
        assert np.isinf(np.asarray(half["norm"])).all()


def theirs_of(c):
    """Names and shapes of Hugging Face's tensors."""
    kv = c.kv_heads * c.head_size
    out = {"model.embed_tokens.weight": (c.vocab, c.width), "model.norm.weight": (c.width,)}
    for i in range(c.layers):
        at = f"model.layers.{i}"
        out |= {f"{at}.self_attn.{n}_proj.weight": (kv if n in "kv" else c.width, c.width) for n in "qkvo"}
        out |= {f"{at}.{n}_layernorm.weight": (c.width,) for n in ("input", "post_attention")}
        if c.experts is None:
            out |= {f"{at}.mlp.{n}_proj.weight": (c.ffn, c.width) for n in ("gate", "up")}
            out[f"{at}.mlp.down_proj.weight"] = (c.width, c.ffn)
        else:
            out[f"{at}.block_sparse_moe.gate.weight"] = (c.experts.experts, c.width)
            for e in range(c.experts.experts):
                shapes = (("w1", (c.ffn, c.width)), ("w3", (c.ffn, c.width)), ("w2", (c.width, c.ffn)))
                out |= {f"{at}.block_sparse_moe.experts.{e}.{w}.weight": s for w, s in shapes}
    if not c.tied:
        out["lm_head.weight"] = (c.vocab, c.width)
    return {n: np.zeros(s, np.float32) for n, s in out.items()}


@pytest.mark.parametrize("model", [en, de], ids=["encoder", "decoder"])
def test_config_and_weights_are_of_one_generation(tmp_path, monkeypatch, model):
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16}
    sizes |= {"max_position_embeddings": 6, "model_type": "bert" if model is en else "llama"}
    if model is en:
        top = {
            f"embeddings.{n}_embeddings.weight": (m, 8) for n, m in (("word", 11), ("position", 6), ("token_type", 2))
        }
        wide = {"intermediate.dense": (16, 8), "output.dense": (8, 16)}
        parts = dict.fromkeys(("self.query", "self.key", "self.value", "output.dense"), (8, 8))
        parts = {f"encoder.layer.0.{n}": s for n, s in ({f"attention.{n}": s for n, s in parts.items()} | wide).items()}
        norms = ["embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output"]
        shapes = top | {f"{n}.weight": s for n, s in parts.items()} | {f"{n}.bias": s[:1] for n, s in parts.items()}
        shapes |= {f"{n}.LayerNorm.{p}": (8,) for n in norms for p in ("weight", "bias")}
    else:
        layer = {f"self_attn.{n}_proj": (8, 8) for n in "qkvo"} | {"mlp.down_proj": (8, 16)}
        layer |= {"mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8)}
        layer |= {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
        shapes = {f"model.layers.0.{n}.weight": s for n, s in layer.items()}
        shapes |= {"model.embed_tokens.weight": (11, 8), "lm_head.weight": (11, 8), "model.norm.weight": (8,)}

    def put(heads):
        config = sizes | {"num_attention_heads": heads} | ({} if model is en else {"num_key_value_heads": heads})
        arrays = {n: np.full(s, heads, np.float32) for n, s in shapes.items()}
        mt.save(tmp_path / "source", arrays, documents={"config": config}, overwrite=True)
        mt.merge(tmp_path / "source", tmp_path / "m", overwrite=True)

    def read(*args, **kwargs):
        found = plain(*args, **kwargs)
        if waiting:
            put(waiting.pop())
        return found

    waiting, plain = [4], huggingface.read
    put(2)
    monkeypatch.setattr(huggingface, "read", read)
    params, config = model.from_pretrained(tmp_path / "m")
    assert not waiting
    assert config.heads == 4
    assert {float(v) for x in mt.tree.flatten(params)[0] for v in np.unique(np.asarray(x))} == {4.0}
