"""The models of Hugging Face that the decoder computes, and the values of their ``config.json``."""

from __future__ import annotations

from . import huggingface

_LLAMA = dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ),
    ...,
) | {
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
"""The models of Hugging Face that are this one, with the defaults of their ``config.json``."""
