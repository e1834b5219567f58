"""Arrays of several models as one model: shapes, and the one ``config.json`` that all of it runs with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...arrays.core.errors import CheckpointError
from ..checkpoint.checkpoint import Checkpoint
from ..transform import layer_entries
from ..transform.model_config import config_of

_HARD = re.compile(
    r"^(hidden_size|n_embd|d_model|head_dim|(qk|v)_.*head_dim|(num|n)_(attention_|key_value_|kv_)?heads?(_kv)?)$"
)
_ELSE = re.compile(
    r"^_|token|dropout|pdrop|^(output|return|use_cache|init|label|id2label|tie|auto|gradient|summary|loss|task)|vocab"
    r"|_loss|dtype|version|architectures|quantization|_init|initializer|name|(?<!attention_)chunk_size|pretraining"
)
"""Entries of ``config.json`` without a part in what layers compute."""

EXACT = "Take sums of virtual.lora(base, adapter), of which extract_lora makes an adapter"
AVERAGED = (
    "adapter_config.json: factors are averaged one by one, as suits steps of one run; that is no mean of what others "
    f"add to a model. {EXACT}"
)
_SCALES = ("peft_type", "lora_alpha", "use_rslora", "alpha_pattern", "use_dora", "fan_in_fan_out")
"""Entries of ``adapter_config.json`` by which equal factors add other things to a model."""


def entries(config: Mapping[str, Any], each: bool) -> dict[str, Any]:
    """What a configuration says of the computation of all layers alike, and of ``each``."""
    rope = config.get("rope_parameters")
    plain = {k: v for k, v in config.items() if k != "rope_parameters"} | (rope if isinstance(rope, dict) else {})
    plain = {k: v for k, v in plain.items() if k not in layer_entries.COUNTS and not _ELSE.search(k)}
    return {k: v for k, v in plain.items() if each or not layer_entries.is_about_layers(k, config)}


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], each: bool) -> dict[str, tuple[Any, Any]]:
    """Entries of which two configurations say other things: (ours, theirs) by key; of lists of one length, the first
    such elements."""
    a, b = entries(ours, each), entries(theirs, each)
    found = {k: (a[k], b[k]) for k in a.keys() & b.keys() if a[k] != b[k]}
    for k, (x, y) in list(found.items()):
        if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
            del found[k]
            i = next(i for i in range(len(x)) if x[i] != y[i])
            found[f"{k}[{i}]"] = x[i], y[i]
    return found


def compared(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], here: str, there: str, each: bool = True
) -> tuple[str, list[str]]:
    """(differences with which two configurations describe no one model, notes of those with which they may). ``each``:
    also of entries about single layers, which stay where they are."""
    found = differing(ours, theirs, each)
    if hard := told(of_widths(found)):
        return hard, []
    notes = [f"config.json: what comes of {there} runs with that of {here}: {told(found.items())}"] * bool(found)
    if ours and not any(k in ours for k in layer_entries.COUNTS):
        lost = [k for k in layer_entries.COUNTS if k in theirs]
        notes += [f"config.json: that of {here} does not say {k!r}, as that of {there} does" for k in lost]
    return "", notes


def sizes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Whole numbers that differ, which tell why shapes do."""
    return (
        (k, (ours[k], theirs[k]))
        for k in sorted(ours.keys() & theirs.keys())
        if type(ours[k]) is type(theirs[k]) is int and ours[k] != theirs[k] and not k.endswith("_id")
    )


def are_adapters(made: Sequence[Checkpoint]) -> bool:
    """Whether these are adapters of PEFT. Raises where factors would be added that stand for other products."""
    configs = [config_of(c.documents, "adapter_config.json") for c in made]
    for ckpt, config in zip(made, configs, strict=True):
        if bool(config) != bool(configs[0]):
            model, adapter = (c.path for c in (made[0], ckpt)[:: -1 if configs[0] else 1])
            raise CheckpointError(f"{adapter} is an adapter, and {model} has no adapter_config.json. {EXACT}")
        for key in _SCALES:
            if (ours := configs[0].get(key)) != (theirs := config.get(key)):
                raise CheckpointError(
                    f"{made[0].path} is an adapter with {key} = {ours!r}, {ckpt.path} one with {theirs!r}: sums of "
                    f"their factors are no sums of what they add to a model. {EXACT}"
                )
    return bool(configs[0])


def told(found: Iterable[tuple[str, tuple[Any, Any]]]) -> str:
    return ", ".join(f"{k} is {a!r:.60}, and there {b!r:.60}" for k, (a, b) in sorted(found))


def of_widths(found: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Those without which a layer means nothing: widths and numbers of heads."""
    return ((k, v) for k, v in found.items() if _HARD.match(k) and None not in v)


def is_sized_by_layer(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has sizes for each layer, which follow the layers."""
    return any(layer_entries.is_for_each(k, config) and not isinstance(v[0], str) for k, v in config.items())
