"""Entries of ``config.json`` about each layer, for layers that come from several models and have other numbers now."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TYPES = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_FOR_EACH = re.compile(
    r"^(?!mtp|vision|.*token_id).*(layer|block|pattern|attention|attn|indexer|heads|experts|topk|moe|mlp|intermediate_size|window)"
)
_NUMBERS = re.compile(
    r"only_layers$|^(moe|cross_attention|rope_scaling)_layers$|^(hybrid|local)_layer_ids$|^(attn_layer|full_attn)_i[dn]\w+$"
)
_BELOW = frozenset(["max_window_layers", "first_k_dense_replace", "num_dense_layers"])  # the layers before this one
_MENTIONS = re.compile(r"layer|block|attn|attention|idx|indic")  # names of entries that may list layers
_BY_CLASS = re.compile(
    r"gemma\d|(t5|vault|embedding_|diffusion_)gemma|gpt_oss|olmo(3|_hybrid)|cohere(2|_compass)|exaone(4|_moe)|smollm3"
    r"|llama4|minimax(?!_m2)|qwen(3_5|3_next|4)|lfm3|granite(moe)?_swa|mimo_v2|deepseek_v4|hy_v4|inkling|bailing_hybrid"
    r"|beam|cwm|dory|kolibri|ultrabert|flint|neomme|muse_(glimmer|spark)"
)
"""Models whose class says which layers see a window, where the configuration does not."""
_FROM_THE_END = re.compile(r"gemma4|diffusion_gemma|embedding_gemma2|deepseek_v4|flint|neomme|muse_(glimmer|spark)")
_AT_THE_END = frozenset(["num_kv_shared_layers"])  # counts the last layers
_EVERY = re.compile(
    r"sparse_step$|layer_freq$|layer_step$|layer_interval$|every_n_layers$|layer_period$|attention_(interval|frequency)$|window_pattern$"
)
_OTHERS = re.compile(
    r"(num_kv_shared_layers|kv_source_layers|ple_layer_ids|block_types|attention_types|moe_layer_(start|end)_index"
    r"|scale_attn_by_inverse_layer_idx)$"
)


def inner(config: Any) -> dict[str, Any]:
    """The part of a configuration that describes the layers of text."""
    if not isinstance(config, dict):
        return {}
    parts = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    return next((part for part in parts if isinstance(part, dict)), config)


def renumber(config: dict[str, Any], order: Sequence[tuple[dict[str, Any], int]]) -> list[str]:
    """Change what a configuration says of layers to ``order``: the configuration that describes each layer, and its
    number there. Gives notes."""
    notes, n = [], count(config)
    for key in dict.fromkeys(k for c in (config, *(c for c, _ in order)) for k in c):
        held = [(c.get(key), i) for c, i in order]
        fits = [is_for_each(key, c) for c, _ in order]
        if any(fits):
            new: Any = [v[i] for v, i in held] if all(fits) else None
            if new is None:
                config.pop(key, None)
                notes.append(f"config.json: without {key!r}, which not all models have for each layer")
            elif config.get(key) != new:
                config[key] = "".join(new) if isinstance(held[0][0], str) else new
        elif _NUMBERS.search(key) and all(isinstance(v, list) for v, _ in held):
            config[key] = [k for k, (v, i) in enumerate(held) if i in v]
        elif all(_is_by_number(key, v) for v, _ in held):
            config[key] = {str(k): v[str(i)] for k, (v, i) in enumerate(held) if str(i) in v}
        elif not _holds(key, config, held, n):
            notes.append(
                f"config.json: {key!r} speaks of layers by their numbers, which are others now; see whether "
                f"{config.get(key)!r} is right"
            )
    kind, told = str(config.get("model_type")), any(k in _TYPES or _EVERY.search(k) for k in config)
    counts = _FROM_THE_END.match(kind)
    if _BY_CLASS.match(kind) and not told and [i for _, i in order] != list(range(n if counts else len(order))):
        notes.append(
            f"config.json: the class of {kind!r} chooses the attention of a layer by its number, which is another now; "
            "see whether 'layer_types' is to be written"
        )
    if counts and "gemma" in kind and (config.get("layer_types") or ["full_attention"])[-1] != "full_attention":
        notes.append(
            f"config.json: the class of {kind!r} has 'full_attention' in the last layer, 'layer_types' another"
        )
    return notes


def is_for_each(key: str, config: dict[str, Any]) -> bool:
    """Whether an entry has a value for each layer."""
    value, n = config.get(key), count(config)
    named = not _OTHERS.match(key) and _FOR_EACH.search(key) and not _NUMBERS.search(key)
    fits = isinstance(value, (list, str)) and (len(value) == n or (key == "no_rope_layers" and len(value) > n))
    return bool(named) and fits and bool(value)


def count(config: Mapping[str, Any]) -> int:
    types = next((config[k] for k in _TYPES if config.get(k)), ())  # count the layers where no entry does
    return next((config[k] for k in COUNTS if type(config.get(k)) is int), len(types))


def is_about_layers(key: str, config: dict[str, Any]) -> bool:
    """Whether an entry counts layers, or speaks of some by their numbers."""
    return key in COUNTS or is_for_each(key, config) or bool(_is_named(key))


def _is_named(key: str) -> Any:
    return _OTHERS.match(key) or key in _BELOW or _EVERY.search(key) or _NUMBERS.search(key)


def _is_by_number(key: str, value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(k.isdigit() for k in value) and bool(_MENTIONS.search(key))


def _lists_layers(key: str, value: Any) -> bool:
    if isinstance(value, dict):
        return _is_by_number(key, value) or any(_lists_layers(k, v) for k, v in value.items())
    numbers = value if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value) else []
    return len(set(numbers)) == len(numbers) > 0 and _MENTIONS.search(key) is not None


def _holds(key: str, config: dict[str, Any], held: Sequence[tuple[Any, int]], n: int) -> bool:
    """Whether an entry says the same of all layers by their new numbers; a limit that can is set to do so. ``n``: the
    number of layers before."""
    values = [v for v, _ in held]
    said = "layer_types" in config and re.search("window|attention", key) is not None  # by that, already
    if key in _BELOW and all(type(v) is int for v in values):
        below = [i < v for v, i in held]
        if below == sorted(below, reverse=True):
            config[key] = max(config.get(key, 0), len(held)) if all(below) else sum(below)
            return True
        return said
    if _EVERY.search(key) and all(type(v) is int and v > 0 for v in values):
        return said or (len(set(values)) == 1 and all((i - k) % v == 0 for k, (v, i) in enumerate(held)))
    same = [i for _, i in held] == list(range(len(held))) and all(v == values[0] for v in values)
    if key in _AT_THE_END and type(values[0]) is int and all(v == values[0] for v in values):
        own = n - values[0]  # layers, of which the others take keys and values
        if len(held) >= own and all(i == k if k < own else i >= own for k, (_, i) in enumerate(held)):
            config[key] = len(held) - own
            return True
        same = False
    return (
        not (_is_named(key) or any(_lists_layers(key, v) for v in values))
        or not any(values)
        or (same and config.get(key) == values[0])
    )
