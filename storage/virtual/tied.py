"""Heads that a model ties to its embedding and does not store. An adapter that trains one of the two parts them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...arrays.core.errors import CheckpointError
from ..checkpoint.checkpoint import Checkpoint, StoredArray
from ..format.documents import Documents, untied
from ..format.manifest import Leaf
from ..rules.lazy_tensors import renamed
from ..transform.model_config import HEADS, TABLES, config_of, stands_for

_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of the names of architectures
_OTHERWISE = ("ForMaskedLM", "ForPreTraining")  # whose head has other names
_STACK = re.compile(r"(.*?\.)?(?:model|transformer)\.")


def with_own_head(base: Checkpoint, whole: Iterable[str], factored: Iterable[str]) -> Checkpoint:
    """A base whose head is an array of its own where an adapter parts it from the embedding.

    PEFT trains a copy of a module, so that a tied head stays as it was beside a trained embedding, and an embedding
    beside a trained head. ``whole`` and ``factored`` are names of the weights that the adapter trained whole, and of
    those that it has factors or single rows for. Raises `CheckpointError` for a base that ties other arrays, too.
    """
    whole, factored = list(whole), list(factored)
    heads = [n for n in (*whole, *factored) if n.endswith(HEADS)]
    tables = [n for n in whole if n.endswith(TABLES) and n in base]
    config, documents = config_of(base.documents), base.documents
    if not heads and not tables:
        shared = [n for n in factored if n.endswith(TABLES) and n in base and not any(h.endswith(HEADS) for h in base)]
        if shared and ties_head(config) and isinstance(documents, Documents):
            note = (
                f"{shared[0]} is the head, too, so its factors are in both, as merge_and_unload of PEFT has it; the "
                "model that was trained computes its head without them"
            )
            return replace(base, documents=documents.edited("config.json", bytes, [note]))
        return base
    if _said(config) is False or not (heads or ties_head(config)):
        return base
    if config.get("is_encoder_decoder") or any(k.endswith(_OTHERWISE) for k in _kinds(config)):
        raise CheckpointError(
            f"{base.path} ties {(heads or tables)[0]!r} to other arrays (tie_word_embeddings), and the adapter trained "
            "it alone; let PEFT merge it (merge_and_unload)"
        )
    start = _STACK.match(tables[0]) if tables else None
    head = heads[0] if heads else f"{(start and start[1]) or ''}{HEADS['embed_in' in tables[0]]}"
    if isinstance(documents, Documents) and config:
        note = (
            f"{head} has factors or tokens of its own and a tied base, so it is an array of its own, as in the model "
            "that was trained; merge_and_unload of PEFT changes the embedding with it"
        )
        documents = documents.edited("config.json", untied, [note] * (head in factored and head not in base))
    if head in base or (embedding := stands_for(head, base)) is None:
        return replace(base, documents=documents)
    path = (head,) if len(base[embedding].path) == 1 else tuple(head.split("."))
    arrays = base.arrays | {head: StoredArray(path, renamed(head, base[embedding].tensor))}
    structure = _with_leaf(base.structure, path, Leaf(len(base)))
    return replace(base, arrays=arrays, structure=structure, documents=documents)


def ties_head(config: Mapping[str, Any]) -> bool:
    """Whether a model has a head that is its embedding: as its ``config.json`` says, or by its architecture."""
    kinds, said = _kinds(config), _said(config)
    return said is not False and (any(k.endswith(_WITH_HEAD + _OTHERWISE) for k in kinds) if kinds else bool(said))


def _said(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config")
    return ((text if isinstance(text, Mapping) else {}) | config).get("tie_word_embeddings")


def _kinds(config: Mapping[str, Any]) -> list[str]:
    return [str(a) for a in config.get("architectures") or ()]


def _with_leaf(node: Any, path: tuple[Any, ...], leaf: Leaf) -> Any:
    """A tree of dicts with a further leaf."""
    if not path:
        return leaf
    return node | {path[0]: _with_leaf(node.get(path[0], {}), path[1:], leaf)}
