"""`merge` makes directories that transformers opens: from its own directories, from ours, sharded, in other dtypes,
tied, with code of their own."""

import json
import os

import numpy as np
import pytest

import meshtape as mt
from meshtape.storage import convert, merge, open_checkpoint, reshard

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
