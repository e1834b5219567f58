"""Reader of a Hugging Face model's ``config.json``, with an allow-list of fields.

A field is read by the model, or is known not to affect the forward pass, or may have one value only (for which the
model here computes the same). All other fields are refused by name, unless they are null or empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...arrays.core.errors import NotACheckpoint, UnsupportedModel
from ...storage.checkpoint.checkpoint import Checkpoint
from .layers import RopeScaling

SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "max_length": "max_position_embeddings",
}
"""The sizes that every model has: our names of them, and theirs."""

IGNORED = frozenset(
    re.findall(
        r"\w+",
        # the file and the program that wrote it; how weights begin; what only training reads
        "_name_or_path _commit_hash architectures transformers_version torch_dtype dtype model_max_length "
        "initializer_range attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob "
        "resid_pdrop embd_pdrop classifier_dropout gradient_checkpointing output_router_logits router_aux_loss_coef "
        # tokens, labels, and how text is generated
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id "
        "forced_bos_token_id forced_eos_token_id tokenizer_class prefix id2label label2id num_labels problem_type "
        "finetuning_task task_specific_params use_cache cache_implementation max_length min_length do_sample "
        "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
        "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "num_return_sequences suppress_tokens begin_suppress_tokens exponential_decay_length_penalty "
        "remove_invalid_values "
        # how the same numbers are computed, or in which form they are returned
        "_attn_implementation _attn_implementation_autoset attn_implementation pretraining_tp chunk_size_feed_forward "
        "torchscript use_bfloat16 tf_legacy_loss return_dict return_dict_in_generate output_attentions "
        "output_hidden_states output_scores",
    )
)
"""Fields that leave the forward pass as it is."""

WHY = {
    "attention_bias": "its projections of attention have biases",
    "auto_map": "its code comes with the weights",
    "head_dim": "its heads are not hidden_size / num_attention_heads long",
    "hidden_act": "its hidden units have another activation",
    "is_decoder": "its attention looks at what came before alone",
    "layer_types": "its blocks are of several kinds; only 'full_attention' for each is honoured",
    "mlp_bias": "its feed-forward parts have biases",
    "model_type": "it is of another family",
    "position_embedding_type": "its positions are not learned, absolute ones",
    "quantization_config": "its weights are quantised: export them in a floating dtype",
    "rope_scaling": "its rotary angles are scaled in another way than 'linear' or 'llama3'",
    "router_jitter_noise": "its router is disturbed by noise",
    "sliding_window": "its attention looks back so many tokens at most: give max_length of at most that",
}
FAMILIES = {
    "gemma": "embeddings times the root of the width, norms by 1 + weight, GELU, long heads",
    "gemma2": "as gemma, with norms behind each part, capped scores and logits, and a sliding window in every other "
    "block",
    "gemma3": "as gemma2, with norms of queries and keys, and two bases of rotary angles",
    "gemma3_text": "as gemma2, with norms of queries and keys, and two bases of rotary angles",
    "gpt2": "learned positions, layer norms, GELU, biases",
    "gpt_neox": "parallel residuals, layer norms, GELU, biases, rotary angles for a part of each head",
    "phi": "parallel residuals, layer norms, GELU, biases, rotary angles for a part of each head",
    "phi3": "joined projections under other names",
    "qwen2": "biases of queries, keys and values",
    "qwen3": "norms of queries and keys",
    "roberta": "positions that begin behind the padding token, other names",
    "xlm-roberta": "positions that begin behind the padding token, other names",
    "distilbert": "no segments, other names",
    "mpnet": "relative positions",
}


@dataclass(frozen=True)
class Family:
    """A kind of model, and its ``model`` of ours for messages. ``defaults`` has the fields that it reads, with the
    values of fields that are left out (``...`` for none); ``only`` those for which it computes the same with a few
    values, the default first."""

    model: str
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def read(
    source: str | Path | Checkpoint, families: Mapping[str, Family], *, max_length: int | None = None
) -> dict[str, Any]:
    """The fields that a model reads, with ``rope`` and ``max_position_embeddings`` worked out.

    ``source``: a ``config.json``, or the checkpoint that has one beside its arrays.

    Raises
    ------
    UnsupportedModel
        Where a field has a value that the model here does not honour; names all of them.
    """
    path = source
    if isinstance(source, Checkpoint):
        path, given = f"the config.json of {source.path}", source.documents.get("config")
        if given is None:
            raise NotACheckpoint(f"{source.path} has no config.json, which says what its model is")
    else:
        try:
            given = json.loads(Path(source).read_text(encoding="utf-8"))
        except ValueError as e:
            raise UnsupportedModel(f"{path} is no JSON: {e}") from e
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{path} is no config.json of a model: it holds a {type(given).__name__}")
    kind = given.get("model_type", "bert" if "bert" in families else None)
    family = families.get(kind) if isinstance(kind, str) else None
    wrong: dict[str, str] = {}
    if family is None:
        can = " and ".join(map(repr, families))
        has = FAMILIES.get(str(kind))
        wrong["model_type"] = f"{WHY['model_type']} than {can}" + (f" ({has})" if has else "")
        family = next(iter(families.values()))
    found = {**family.defaults, **{k: v for k, v in given.items() if k in family.defaults and v is not None}}
    for name, value in found.items():
        if value is ...:
            wrong[name] = "a model needs it"
        elif not (value is None or isinstance(value, int | float)):
            wrong[name] = "is no number"
    for name, value in given.items():
        if name in ("model_type", *found) or value is None or value in ({}, []):
            continue
        if name in ("rope_scaling", "rope_parameters", "sliding_window") and "rope_theta" in found:
            continue
        if name == "layer_types" and value == ["full_attention"] * _whole(found.get("num_hidden_layers")):
            continue
        if name in family.only:
            # (1 is True to Python, and 0 False: they are other values here.)
            if not any(value == v and type(value) is type(v) for v in family.only[name]):
                can = " or ".join(map(repr, family.only[name]))
                wrong[name] = f"{WHY.get(name, 'the model here has no such part')}; only {can} is honoured"
        elif name not in IGNORED:
            wrong[name] = WHY.get(name, "is not known to this reader, and may change the forward pass")
    if not wrong:
        found["max_position_embeddings"] = min(
            found["max_position_embeddings"], max_length or found["max_position_embeddings"]
        )
        if "rope_theta" in found:
            if (size := found["head_dim"]) is not None and size * found["num_attention_heads"] != found["hidden_size"]:
                wrong["head_dim"] = WHY["head_dim"]
            _check_window(given, found, wrong)
            found["rope"] = _rope(given, found, wrong)
    if wrong:
        lines = [
            f"  {n} = {json.dumps(given[n]) if n in given else 'nothing'}: {why}" for n, why in sorted(wrong.items())
        ]
        raise UnsupportedModel(
            f"{path} describes a model that {family.model} would compute wrongly, or not at all:\n" + "\n".join(lines)
        )
    return found


def _whole(count: Any) -> int:
    return count if isinstance(count, int) else 0


def _check_window(given: Mapping[str, Any], found: Mapping[str, Any], wrong: dict[str, str]) -> None:
    """A window that is as long as the longest sequence is none."""
    # Mistral's own default is a window, where the field is left out.
    window = given.get("sliding_window", 4096 if given["model_type"] == "mistral" else None)
    if window is not None and not (isinstance(window, int) and window >= found["max_position_embeddings"]):
        wrong["sliding_window"] = (
            WHY["sliding_window"] + f" (max_position_embeddings is {found['max_position_embeddings']})"
        )


def _rope(given: Mapping[str, Any], found: dict[str, Any], wrong: dict[str, str]) -> RopeScaling | None:
    """The scaling of rotary angles. Transformers 5 writes it, and the base, as ``rope_parameters``."""
    name = "rope_parameters" if given.get("rope_parameters") else "rope_scaling"
    held = dict(given.get(name) or {})
    found["rope_theta"] = held.pop("rope_theta", found["rope_theta"])
    kinds = {str(held.pop(n)) for n in ("rope_type", "type") if n in held}
    numbers = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    kind = kinds.pop() if len(kinds) == 1 else "default" if not kinds and not held else ""
    if kind not in numbers or set(held) != set(numbers[kind]):
        wrong[name] = WHY["rope_scaling"] + f", which take {numbers['linear']} and {numbers['llama3']}"
        return None
    try:
        return None if kind == "default" else RopeScaling(*(float(held[n]) for n in numbers[kind]))
    except (TypeError, ValueError) as e:
        wrong[name] = str(e)
        return None
