"""Adapters with more than factors: embeddings with more rows, copies of modules, rows of single tokens."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CheckpointError, CheckpointKeyError, CorruptCheckpoint
from meshtape.storage import blend, merge, open_checkpoint, save, save_safetensors, virtual

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
    "tokens of a tied head": (
        {"lm_head.token_adapter.trainable_tokens_delta": ROWS},
        {"trainable_token_indices": {"lm_head": [2, 0]}},
        True,
        OLD,
        with_rows(OLD, [2, 0]),
    ),
    "other tokens of a tied head": (
        {DELTA: ROWS, "lm_head.token_adapter.trainable_tokens_delta": ROWS},
        {"trainable_token_indices": {"lm_head": [2, 0], "embed_tokens": [3, 4]}},
        True,
        with_rows(OLD, [3, 4]),
        with_rows(OLD, [2, 0]),
    ),
    "the same tokens of a tied head": (
        {DELTA: ROWS, "lm_head.token_adapter.trainable_tokens_delta": ROWS},
        {"trainable_token_indices": {"lm_head": [3, 4], "embed_tokens": [3, 4]}},
        True,
        with_rows(OLD, [3, 4]),
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


HEAD_ROWS = {"lm_head.token_adapter.trainable_tokens_delta": ROWS}
ON_HEAD = {"lm_head.lora_A.weight": EYE[:1], "lm_head.lora_B.weight": A.T[:5]}
NOTES: dict[str, tuple[dict[str, Any], bool, list[str]]] = {
    "factors of the embedding": (FACTORS, True, ["model.embed_tokens.weight is the head, too"]),
    "factors of the head": (ON_HEAD, True, ["lm_head.weight has factors or tokens of its own"]),
    "factors of both": (FACTORS | ON_HEAD, True, ["lm_head.weight has factors or tokens of its own"]),
    "tokens of the head": (HEAD_ROWS, True, ["lm_head.weight has factors or tokens of its own"]),
    "no tie": (FACTORS | ON_HEAD, False, []),
    "factors of neither": ({}, True, []),
}


@pytest.mark.parametrize("name", NOTES)
def test_factors_beside_a_tie_are_noted(tmp_path: Path, name: str) -> None:
    arrays, tied, wanted = NOTES[name]
    arrays = {n: x[:, :5] if n.endswith("embedding_A") else x for n, x in arrays.items()}
    rows = {"trainable_token_indices": {"lm_head": [0, 2]}}
    made = virtual.lora(base(tmp_path / "base", tied), adapter(tmp_path / "lora", arrays, **rows))
    notes = merge(made, tmp_path / "out").notes
    assert len(notes) == len(wanted)
    assert all(n.startswith(w) and "merge_and_unload of PEFT" in n for n, w in zip(notes, wanted, strict=True))


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "vision-encoder-decoder", None])
def test_the_flag_of_the_adapter_gives_way_to_the_layers(tmp_path: Path, kind: str | None, flag: bool) -> None:
    """Square matrices lie as those of the model's architecture do; those of other shapes say so by themselves."""
    turned = kind not in ("llama", None)
    held = {"c_proj": EYE, "c_attn": np.ones((4, 6) if turned else (6, 4), "f4"), "q": EYE}
    (tmp_path / "base").mkdir()
    save_safetensors(tmp_path / "base" / "model.safetensors", {f"{n}.weight": x for n, x in held.items()})
    if kind is not None:
        said = {"model_type": kind, "decoder": {"model_type": "gpt2"}} if "vision" in kind else {"model_type": kind}
        (tmp_path / "base" / "config.json").write_text(json.dumps(said))
    factors = {f"{n}.lora_A.weight": EYE[:1] for n in held}
    factors |= {f"{n}.lora_B.weight": np.arange(6 if n == "c_attn" else 4, dtype="f4")[:, None] for n in held}
    where = tmp_path / "lora"
    adapter(where, factors, fan_in_fan_out=flag)
    (where / "adapter_model.safetensors").unlink()
    save_safetensors(where / "adapter_model.safetensors", factors)
    if kind is None and flag:
        with pytest.raises(CheckpointKeyError, match=r"c_proj.weight is square, c_attn.weight is not.*config\.json"):
            virtual.lora(tmp_path / "base", where)
        return
    made = virtual.lora(tmp_path / "base", where)
    for n, x in held.items():
        delta = 2 * np.outer(factors[f"{n}.lora_B.weight"], EYE[0])
        wanted = x + (delta.T if turned and n != "q" else delta)
        np.testing.assert_array_equal(made[f"{n}.weight"].read(), wanted)


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "copies": ({"modules_to_save": True}, "modules_to_save is True, and no list"),
    "one copy": ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', and no list"),
    "copies of numbers": ({"modules_to_save": [5]}, "5 is no text"),
    "tokens": ({"trainable_token_indices": True}, "trainable_token_indices is True, and no list"),
    "tokens by name": ({"trainable_token_indices": {"wte": 1}}, "and no list"),
    "texts for tokens": ({"trainable_token_indices": {"wte": ["a"]}}, "'a' is no whole number"),
    "parameters": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_configurations_that_say_something_else_are_refused(tmp_path: Path, name: str) -> None:
    config, message = MALFORMED[name]
    with pytest.raises(CheckpointError, match=message):
        virtual.lora(base(tmp_path / "base", False), adapter(tmp_path / "lora", {}, **config))


TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate("abcde")}}}
MORE = TOKENIZER | {
    "added_tokens": [{"id": 5 + i, "content": t, "special": True} for i, t in enumerate(("<x>", "<y>"))]
}


def test_the_tokenizer_of_an_adapter_goes_along(tmp_path: Path) -> None:
    """Where the embeddings have rows for its tokens; else that of the base, with a note."""

    def put(where: str, **files: Any) -> str:
        for name, said in files.items():
            Path(where, f"{name}.json").write_text(json.dumps(said))
        return where

    old = put(base(tmp_path / "base", False), tokenizer=TOKENIZER, special_tokens_map={"eos_token": "a"})
    new = put(adapter(tmp_path / "new", {TABLE: NEW, HEAD: NEW}), tokenizer=MORE, tokenizer_config={"eos_token": "<x>"})
    made = virtual.lora(old, new)
    report = merge(made, tmp_path / "out")
    for docs in (made.documents, open_checkpoint(report.path).documents):
        assert (docs["tokenizer"], docs["tokenizer_config"]) == (MORE, {"eos_token": "<x>"})
        assert "special_tokens_map.json" not in docs
        assert docs["config"]["vocab_size"] == 7
    assert report.notes == ["tokenizer.json, tokenizer_config.json: of the adapter, in place of the base's tokenizer"]
    without = merge(virtual.lora(old, adapter(tmp_path / "rows", {TABLE: NEW, HEAD: NEW})), tmp_path / "without")
    assert without.notes == ["tokenizer: the embeddings have 7 rows, not 5, and the adapter brings no tokenizer"]
    beyond = merge(virtual.lora(old, put(adapter(tmp_path / "beyond", {}), tokenizer=MORE)), tmp_path / "kept")
    assert [n[:30] for n in beyond.notes] == ["tokenizer: that of the base, a"]
    assert open_checkpoint(beyond.path).documents["tokenizer"] == TOKENIZER
    same = merge(virtual.lora(old, put(adapter(tmp_path / "same", {}), tokenizer=TOKENIZER)), tmp_path / "same out")
    assert same.notes == []
    said: dict[str, Any] = {
        "merge_method": "linear",
        "models": [{"model": f"{old}+{new}", "parameters": {"weight": 1}}],
    }
    said["models"].append({"model": old, "parameters": {"weight": 1}})
    joined = blend(said | {"base_model": old, "tokenizer_source": "union"}, tmp_path / "union")
    np.testing.assert_array_equal(open_checkpoint(joined.path)[TABLE][5:], NEW[5:])
    cut = blend(said | {"base_model": old, "tokenizer_source": "base"}, tmp_path / "cut")
    assert any("without 2 tokens" in n and "<x>, <y>" in n for n in cut.notes)


def test_a_head_that_shares_tokens_has_them_beneath_its_factors(tmp_path: Path) -> None:
    """As in PEFT: an adapter with factors of a tied head, and with tokens of the embedding."""
    factors = {"lm_head.lora_A.weight": EYE[:1], "lm_head.lora_B.weight": A[0, :5, None]}
    config = {"trainable_token_indices": {"embed_tokens": [0, 2]}}
    made = virtual.lora(base(tmp_path / "base", True), adapter(tmp_path / "lora", {DELTA: ROWS} | factors, **config))
    np.testing.assert_array_equal(made[TABLE].read(), with_rows(OLD, [0, 2]))
    wanted = with_rows(OLD, [0, 2]) + 2 * np.outer(A[0, :5], EYE[0])
    np.testing.assert_allclose(made[HEAD].read(), wanted, rtol=1e-6)


@pytest.mark.parametrize("rows", [3, 7])
def test_a_tied_head_with_other_rows_than_its_embedding_is_refused(tmp_path: Path, rows: int) -> None:
    config = {"modules_to_save": ["lm_head"]}
    with pytest.raises(CheckpointKeyError, match=rf"embed_tokens.weight, which .* 5; .*embeddings\({rows}\)"):
        virtual.lora(base(tmp_path / "base", True), adapter(tmp_path / "lora", {HEAD: NEW[:rows]}, **config))


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


def test_new_tokens_of_a_base_without_rows_for_them_say_how_many_it_takes(tmp_path: Path) -> None:
    tokens = adapter(tmp_path / "lora", {DELTA: ROWS}, trainable_token_indices=[5, 6])
    with pytest.raises(CheckpointKeyError, match=r"tokens up to 6.*has 5 rows; .*resize_token_embeddings\(7\)") as e:
        virtual.lora(base(tmp_path / "base", False), tokens)
    assert "which it does not hold" not in str(e.value)


@pytest.mark.parametrize("alpha", [0, -3, 1e-3])
def test_any_finite_alpha_scales(tmp_path, alpha):
    """PEFT takes each of them."""
    save(tmp_path / "base", {"m.weight": EYE})
    made = virtual.lora(tmp_path / "base", adapter(tmp_path / "lora", {}, lora_alpha=alpha))
    np.testing.assert_allclose(made["m.weight"][...], EYE + alpha * EYE[:, :1] @ EYE[:1])
    said = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    for wrong in ({"lora_alpha": None}, {"lora_alpha": True}, {"lora_alpha": "2"}, {"r": 0}, {"r": -1}):
        (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(said | wrong))
        with pytest.raises(CorruptCheckpoint, match=next(iter(wrong))):
            virtual.lora(tmp_path / "base", tmp_path / "lora")
