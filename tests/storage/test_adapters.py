"""Adapters with more than factors: embeddings with more rows, copies of modules, rows of single tokens."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CheckpointError, CheckpointKeyError
from meshtape.storage import merge, open_checkpoint, save_safetensors, virtual

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RNG = np.random.default_rng(0)
OLD, NEW, OTHER = (RNG.normal(size=(n, 4)).astype("f4") for n in (5, 7, 7))
ROWS = RNG.normal(size=(2, 4)).astype("f4")
A, B = RNG.normal(size=(1, 7)).astype("f4"), RNG.normal(size=(4, 1)).astype("f4")
PRODUCT = 2 * (B @ A).T  # with lora_alpha 2 and r 1
EYE = np.eye(4, dtype="f4")


def base(where: Path, tied: bool) -> str:
    """A model of one matrix and an embedding, which is the head too or not."""
    where.mkdir()
    save_safetensors(where / "model.safetensors", {TABLE: OLD, "m.weight": EYE} | ({} if tied else {HEAD: OLD}))
    said = {"vocab_size": 5, "tie_word_embeddings": tied, "architectures": ["LlamaForCausalLM"]}
    (where / "config.json").write_text(json.dumps(said))
    return str(where)


def adapter(where: Path, arrays: dict[str, Any], **config: Any) -> str:
    """An adapter with factors of the matrix, and other arrays."""
    where.mkdir()
    factors = {"m.lora_A.weight": EYE[:1], "m.lora_B.weight": EYE[:, :1]}
    held = {f"base_model.model.{n}": x for n, x in (factors | arrays).items()}
    save_safetensors(where / "adapter_model.safetensors", held)
    said = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "modules_to_save": None} | config
    (where / "adapter_config.json").write_text(json.dumps(said))
    return str(where)


def with_rows(table: np.ndarray, rows: Any) -> np.ndarray:
    out = table.copy()
    out[rows] = ROWS
    return out


def named(name: str, part: str) -> str:
    return name.replace(".weight", f".{part}.weight")


DELTA, TOKEN = "model.embed_tokens.token_adapter.trainable_tokens_delta", "token_adapter.base_layer"
RESIZED = {TABLE: NEW, HEAD: NEW}
COPIES = {named(TABLE, "modules_to_save"): NEW, named(TABLE, "original_module"): OTHER, TABLE: NEW}
FACTORS = {"model.embed_tokens.lora_embedding_A": A, "model.embed_tokens.lora_embedding_B": B}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, Any, Any]] = {
    # name: arrays, configuration, tied before, embedding after, head after (None where it stays tied)
    "resized": ({TABLE: NEW, HEAD: OTHER}, {}, False, NEW, OTHER),
    "resized and tied": (RESIZED, {}, True, NEW, None),
    "a copy": (COPIES | {HEAD: OTHER}, {"modules_to_save": ["embed_tokens"]}, False, NEW, OTHER),
    "a copy of a tied one": (COPIES | {HEAD: OTHER}, {"modules_to_save": ["embed_tokens"]}, True, NEW, OTHER),
    "copies of both": (RESIZED, {"modules_to_save": ["embed_tokens", "lm_head"]}, True, NEW, NEW),
    "factors": ({named(TABLE, "base_layer"): NEW, HEAD: OTHER} | FACTORS, {}, False, NEW + PRODUCT, OTHER),
    "factors of a tied one": ({named(TABLE, "base_layer"): NEW} | FACTORS, {}, True, NEW + PRODUCT, None),
    "tokens": ({DELTA: ROWS}, {"trainable_token_indices": [4, 1]}, False, with_rows(OLD, [4, 1]), OLD),
    "tokens by name": (
        {DELTA: ROWS},
        {"trainable_token_indices": {"lm_head": [0], "embed_tokens": [2, 3]}},
        True,
        with_rows(OLD, [2, 3]),
        None,
    ),
    "tokens of a resized one": (
        {DELTA: ROWS, named(TABLE, TOKEN): NEW, HEAD: OTHER},
        {"trainable_token_indices": [6, 0]},
        False,
        with_rows(NEW, [6, 0]),
        OTHER,
    ),
    "tokens of a tied one": (
        {DELTA: ROWS, named(TABLE, TOKEN): NEW, named(HEAD, TOKEN): NEW},
        {"trainable_token_indices": [6, 0]},
        True,
        with_rows(NEW, [6, 0]),
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_adapter_holds_beside_factors_is_applied(tmp_path: Path, name: str) -> None:
    arrays, config, tied, table, head = CASES[name]
    made = virtual.lora(base(tmp_path / "base", tied), adapter(tmp_path / "lora", arrays, **config))
    kept = open_checkpoint(virtual.write(tmp_path / "d.json", made))
    for ckpt in (made, kept, open_checkpoint(merge(made, tmp_path / "out").path)):
        np.testing.assert_allclose(ckpt[TABLE].read(), table, rtol=1e-6)
        np.testing.assert_array_equal(ckpt[TABLE][1:3, 1:], ckpt[TABLE].read()[1:3, 1:])
        assert (HEAD in ckpt) == (head is not None)
        if head is not None:
            np.testing.assert_array_equal(ckpt[HEAD].read(), head)
        np.testing.assert_array_equal(ckpt["m.weight"].read(), EYE + 2 * np.outer(EYE[0], EYE[0]))
        told = ckpt.documents["config.json"]
        assert (told["vocab_size"], told["tie_word_embeddings"]) == (len(table), head is None)
    with (
        pytest.raises(CheckpointError, match="trained whole")
        if "cop" in name or "token" in name
        else contextlib.nullcontext()
    ):
        virtual.lora(tmp_path / "base", tmp_path / "lora", scale=0.5)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows of one alone": (
        {TABLE: NEW},
        {},
        r"lm_head.weight, which it does not hold, 5; .*resize_token_embeddings\(7\)",
    ),
    "another width": (
        {TABLE: NEW[:, :3], HEAD: NEW},
        {},
        r"has the shape \(7, 3\), and model.embed_tokens.weight \(5, 4\)",
    ),
    "tokens that are not there": (
        {DELTA: ROWS},
        {"trainable_token_indices": [1, 5]},
        "trainable_tokens_delta of the adapter",
    ),
    "other numbers of tokens": (
        {DELTA: ROWS},
        {"trainable_token_indices": [1]},
        "trainable_tokens_delta of the adapter",
    ),
    "tokens that nothing names": ({DELTA: ROWS}, {}, "trainable_tokens_delta of the adapter"),
    "tokens beside factors": (
        {named(TABLE, "base_layer"): NEW, HEAD: NEW, DELTA: ROWS} | FACTORS,
        {"trainable_token_indices": [0, 1]},
        "factors and tokens of its own",
    ),
    "a matrix with more rows": ({"m.weight": NEW}, {}, r"m.weight of the adapter has the shape \(7, 4\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_do_not_hold_all_are_refused(tmp_path: Path, name: str) -> None:
    arrays, config, message = REFUSED[name]
    with pytest.raises(CheckpointKeyError, match=message):
        virtual.lora(base(tmp_path / "base", False), adapter(tmp_path / "lora", arrays, **config))
