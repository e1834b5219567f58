"""Hugging Face's models that the decoder computes: values of their ``config.json``, and names of their weights."""

from __future__ import annotations

from typing import Any

from ...storage import Rules
from . import huggingface

_LLAMA = dict.fromkeys(huggingface.SIZES.values(), ...) | {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_SAME = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}
_MIXTRAL = {
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "llama": huggingface.Family("mt.models.decoder", _LLAMA, _SAME),
    "mistral": huggingface.Family("mt.models.decoder", _LLAMA | {"num_key_value_heads": 8}, _SAME),
    "mixtral": huggingface.Family("mt.models.decoder", _LLAMA | _MIXTRAL, _SAME | {"router_jitter_noise": (0.0, 0)}),
}
"""The model types of Hugging Face that are this model, with the defaults of their ``config.json``."""


def rules(config: Any) -> Rules:
    """Key rules from the names of Hugging Face's Llama to this tree; ``.inverse`` leads back.

    They stored weights as ``(outputs, inputs)``. A decoder with experts follows the names of Mixtral. Names do not tell
    how a model computes: :func:`~meshtape.models.decoder.from_pretrained` reads that too, and refuses models that this
    one would compute wrongly.
    """
    lines = [
        "model.embed_tokens.weight -> embed",
        "model.norm.weight -> norm",
        "model.layers.{i}.input_layernorm.weight -> layers.{i}.attn_norm",
        "model.layers.{i}.post_attention_layernorm.weight -> layers.{i}.ffn_norm",
        *(f"model.layers.{{i}}.self_attn.{n}_proj.weight -> layers.{{i}}.attn.{n}, permute()" for n in "qkvo"),
    ]
    if config.experts is None:
        lines += [
            f"model.layers.{{i}}.mlp.{n}_proj.weight -> layers.{{i}}.ffn.{n}, permute()" for n in ("gate", "up", "down")
        ]
    else:
        lines.append("model.layers.{i}.block_sparse_moe.gate.weight -> layers.{i}.ffn.router, permute()")
        up, down = f"{config.width}, {config.ffn}", f"{config.ffn}, {config.width}"
        lines += [
            f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}.weight -> "
            f"layers.{{i}}.ffn.experts.{ours}, permute(), reshape([1, {shape}]), concat(0)"
            for theirs, ours, shape in (("w1", "gate", up), ("w3", "up", up), ("w2", "down", down))
        ]
    lines.append("model.layers.{i}.self_attn.rotary_emb.inv_freq -> _, optional()")
    lines.append("lm_head.weight -> _, optional()" if config.tied else "lm_head.weight -> head, permute()")
    return Rules("\n".join(lines))
