"""`merge` makes directories that transformers opens: from its own directories, from ours, sharded, in other dtypes,
tied, with code of their own."""

import ast
import json
import os

import numpy as np
import pytest

import meshtape as mt
from meshtape.storage import blend, convert, extract_lora, merge, open_checkpoint, reshard, virtual

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.w = torch.nn.Linear(3, 2)
        self.post_init()
"""


def logits(where):
    model, said = transformers.AutoModelForCausalLM.from_pretrained(where, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()(torch.arange(8)[None]).logits.detach().float().numpy(), str(model.dtype)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def source(request, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(tie_word_embeddings=request.param, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    return tmp_path / "hf"


def test_every_way_back(source, tmp_path):
    wanted, _ = logits(source)
    convert(source, tmp_path / "zarr", format="zarr")
    reshard(source, tmp_path / "sharded", mesh={"m": 2}, shardings={"*.weight": {"m": 0}})
    index = json.loads((source / "model.safetensors.index.json").read_text())["metadata"]
    for held in (source, tmp_path / "zarr", tmp_path / "sharded"):
        for limit in (None, 100_000):
            for dtype in (None, "bfloat16"):
                out = tmp_path / "out"
                merge(held, out, max_shard_bytes=limit, dtype=dtype, overwrite=True)
                got, kind = logits(out)
                assert kind == f"torch.{dtype or 'float32'}"
                assert np.abs(got - wanted).max() <= (0.02 if dtype else 0)
                said = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]
                assert said["total_parameters"] == index["total_parameters"]
                assert dtype or said["total_size"] == index["total_size"]


def test_a_model_trained_here(source, tmp_path):
    """Its checkpoint has our names and no documents: both come from the model that it began as."""
    params, config = mt.models.decoder.from_pretrained(source)
    mt.save(tmp_path / "ours", {"params": params, "optimizer": {"step": 3}})
    names = mt.models.decoder.rules(config).inverse(open_checkpoint(source))
    options = {"prefix": "params", "rules": names, "documents": source}
    merge(tmp_path / "ours", tmp_path / "out", **options)
    assert np.abs(logits(tmp_path / "out")[0] - logits(source)[0]).max() < 1e-6
    # In another dtype than the config says: transformers would cast to that.
    mt.save(tmp_path / "half", {"params": mt.tree_map(lambda a: mt.astype(a, "bfloat16"), params)})
    merge(tmp_path / "half", tmp_path / "out", overwrite=True, **options)
    assert logits(tmp_path / "out")[1] == "torch.bfloat16"


def test_code_of_its_own_goes_along(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    os.makedirs(tmp_path / "own")
    (tmp_path / "own" / "modeling_own.py").write_text(CODE)
    auto = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    (tmp_path / "own" / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": auto, "dtype": "float32"})
    )
    mt.storage.save_safetensors(
        tmp_path / "own" / "model.safetensors", {"w.weight": np.ones((2, 3), "f4"), "w.bias": np.ones(2, "f4")}
    )
    convert(tmp_path / "own", tmp_path / "zarr", format="zarr")
    merge(tmp_path / "zarr", tmp_path / "out")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert model.w.weight.sum() == 6
    assert set(open_checkpoint(tmp_path / "out").documents) == {"config.json", "modeling_own.py"}


HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYERED = {
    "qwen3": {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3},
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 4},
    "llama4_text": {"num_hidden_layers": 8, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, **EXPERTS}
    | {"attention_chunk_size": 4},
    "qwen2_moe": {"num_hidden_layers": 6, "mlp_only_layers": [1, 4], **EXPERTS, "shared_expert_intermediate_size": 16},
    "cohere2": {"num_hidden_layers": 8, "sliding_window": 4},
    "smollm3": {"num_hidden_layers": 8},
    "nemotron_h": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "moe", "attention"] * 2, **EXPERTS}
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 16}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
}


@pytest.mark.parametrize("gone", [[4, 5, 6, 7], [0], [2]], ids=["last", "first", "within"])
@pytest.mark.parametrize("kind", LAYERED)
def test_a_model_without_some_layers_is_the_one_that_skips_them(tmp_path, kind, gone):
    torch.manual_seed(0)
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(kind, **HEADS, **tokens, **LAYERED[kind])
    made = transformers.AutoModelForCausalLM.from_config(config)
    for p in made.parameters():
        torch.nn.init.normal_(p, mean=p.ndim == 1, std=0.2)
    made.save_pretrained(tmp_path / "a")
    stem = next(n for n in open_checkpoint(tmp_path / "a") if ".layers.0." in n).partition("0.")[0]
    kept = [i for i in range(config.num_hidden_layers) if i not in gone]
    moves = [f"{stem}{i}.{{r*}} -> {stem}{j}.{{r}}" for j, i in enumerate(kept) if i != j]
    if moves:
        moves += [f"{stem}{i}.{{r*}} -> _" for i in gone]
        merge(tmp_path / "a", tmp_path / "out", rules="\n".join(moves))
    else:
        drop = [f"{stem}{i}.*" for i in range(len(kept), config.num_hidden_layers)]
        assert merge(tmp_path / "a", tmp_path / "out", drop=drop).notes == []
    read, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    assert read.config.num_hidden_layers == len(kept)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    inner = whole.model
    inner.layers = torch.nn.ModuleList([inner.layers[i] for i in kept])
    for key in ("layer_types", "no_rope_layers", "layers_block_type"):
        if len(held := getattr(whole.config, key, None) or ()) > len(kept):
            setattr(whole.config, key, [held[i] for i in kept])
    if kind != "nemotron_h":
        whole.config.num_hidden_layers = len(kept)
    ids = torch.arange(3, 15)[None]
    found, wanted = (m.eval()(ids, use_cache=False).logits for m in (read, whole))
    assert found.isfinite().all()
    assert torch.allclose(found, wanted, atol=1e-4)


def test_a_layer_without_experts_does_not_load_as_the_note_says(tmp_path):
    config = transformers.AutoConfig.for_model("qwen2_moe", **HEADS, vocab_size=64, **LAYERED["qwen2_moe"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "a")
    report = merge(tmp_path / "a", tmp_path / "out", drop="*layers.2.mlp.experts.*")
    assert ["none are in model.layers.2" in note for note in report.notes] == [True]
    _, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert said["missing_keys"]


def outputs(model, **inputs):
    with torch.no_grad():
        return model.eval()(**inputs)[0]


@pytest.mark.parametrize("kind", ["gpt_neox", "opt", "modernbert-decoder", "bloom", "gpt2", "lfm2"])
def test_arrays_outside_of_layers_are_of_the_model_that_runs_them(tmp_path, kind):
    """Slices of two models are the first's modules as far as its layers, and the second's from there on."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    sizes = {"vocab_size": 64, "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    sizes |= {"word_embed_proj_dim": 16, "ffn_dim": 48} if kind == "opt" else {"intermediate_size": 48}
    sizes |= {"layer_types": ["full_attention"] * 4, "num_key_value_heads": 2} if kind == "lfm2" else {}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    models = []
    for i, name in enumerate("ab"):
        torch.manual_seed(i)
        models.append(transformers.AutoModelForCausalLM.from_config(config))
        for p in models[-1].parameters():
            torch.nn.init.normal_(p, mean=p.ndim == 1, std=0.2)
        models[-1].save_pretrained(tmp_path / name)
    slices = [{"sources": [{"model": str(tmp_path / n), "layer_range": r}]} for n, r in (("a", [0, 2]), ("b", [2, 4]))]
    assert blend({"merge_method": "passthrough", "slices": slices}, tmp_path / "out").notes == []
    ids = torch.arange(3, 15)[None]
    within = []  # what goes into the third layer of the first model
    names = [n for n, _ in models[0].named_modules() if n.endswith((".layers.2", ".h.2"))]
    keep = models[0].get_submodule(names[0]).register_forward_pre_hook
    keep(lambda _, args, kwargs: within.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)
    outputs(models[0], input_ids=ids)
    put = models[1].get_submodule(names[0]).register_forward_pre_hook
    put(
        lambda _, args, kwargs: (
            ((within[0], *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": within[0]})
        ),
        with_kwargs=True,
    )
    wanted = outputs(models[1], input_ids=ids)
    read, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    assert torch.allclose(outputs(read, input_ids=ids), wanted, atol=1e-4)


@pytest.mark.parametrize("tokens", [[3, 7, 9], [3, 7], [20, 21], None], ids=["same", "fewer", "others", "head alone"])
def test_tokens_that_peft_trained_of_a_tied_head(tmp_path, tokens):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(tie_word_embeddings=True, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    chosen = {"lm_head": [3, 7]} if tokens is None else {"embed_tokens": [3, 7, 9], "lm_head": tokens}
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=chosen)
    made = peft.get_peft_model(base, options)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    ids = torch.arange(3, 30)[None]
    wanted = outputs(made, input_ids=ids)
    made.save_pretrained(tmp_path / "adapter")
    report = merge(virtual.lora(tmp_path / "base", tmp_path / "adapter"), tmp_path / "out")
    assert ["array of its own" in n for n in report.notes] == [True] * (tokens != [3, 7, 9])
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(outputs(read, input_ids=ids), wanted, atol=1e-5)


def test_an_adapter_of_a_model_of_speech_runs_in_peft(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8, "max_source_positions": 20}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_target_positions": 32, "vocab_size": 97}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    base = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **ids))
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for n, p in base.named_parameters():
            if n.endswith("q_proj.weight"):
                p.add_(torch.randn(32, 2) @ torch.randn(2, 32) * 0.1)
    base.save_pretrained(tmp_path / "tuned")
    extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter", rank=2)
    inputs = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": torch.tensor([[3, 4, 5]])}
    plain = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "base")
    read = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.allclose(outputs(read, **inputs), outputs(base, **inputs), atol=1e-5)


def test_layers_with_windows_run_as_the_note_says(tmp_path):
    for name, own in (("full", {"use_sliding_window": False}), ("own", {"sliding_window": 8, "max_window_layers": 0})):
        sizes = SIZES | {"use_sliding_window": True} | own
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).save_pretrained(tmp_path / name)
    slices = [{"sources": [{"model": str(tmp_path / n), "layer_range": [0, 1]}]} for n in ("full", "own")]
    report = blend({"merge_method": "passthrough", "slices": slices}, tmp_path / "out")
    (note,) = [n for n in report.notes if "cannot run" in n]
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = torch.arange(3, 30)[None]
    with pytest.raises(TypeError):
        outputs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), input_ids=ids)
    told |= ast.literal_eval(note[note.index("{") : note.index("}") + 1])
    (tmp_path / "out" / "config.json").write_text(json.dumps(told))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.config.layer_types == ["full_attention", "sliding_attention"]
    assert outputs(read, input_ids=ids).isfinite().all()
