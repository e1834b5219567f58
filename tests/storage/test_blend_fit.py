"""Layers and arrays of several models that make no model: told before a byte is written. What can run is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CheckpointError, CheckpointKeyError, CheckpointShapeError
from meshtape.storage import blend, open_checkpoint, save_safetensors

PLAIN = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 5,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
}


def made(where: Path, config: dict[str, Any] | None = None, head: bool = True, **more: Any) -> str:
    """A model of three layers; arrays of its configuration's sizes, each of one value of its own. ``more``: arrays to
    add, or with None to leave out."""
    config = PLAIN | (config or {})
    width, inner, tokens = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (tokens, width)}
    for i in range(config["num_hidden_layers"]):
        one = inner[i] if isinstance(inner, list) else inner
        shapes |= {f"model.layers.{i}.mlp.weight": (one, width), f"model.layers.{i}.norm.weight": (width,)}
    shapes |= {"model.norm.weight": (width,)} | ({"lm_head.weight": (tokens, width)} if head else {})
    shapes = {n: s for n, s in (shapes | more).items() if s is not None}
    where.mkdir()
    value = float(sum(map(ord, where.name)))
    arrays = {n: np.full(s, value + i, np.float32) for i, (n, s) in enumerate(shapes.items())}
    save_safetensors(where / "model.safetensors", arrays)
    (where / "config.json").write_text(json.dumps(config))
    return str(where)


def stacked(*models: str, ranges: Any = ((0, 2), (1, 3)), **more: Any) -> dict[str, Any]:
    slices = [{"sources": [{"model": m, "layer_range": list(r)}]} for m, r in zip(models, ranges, strict=True)]
    return {"merge_method": "passthrough", "slices": slices, **more}


MISFITS: dict[str, tuple[Any, type[CheckpointError], list[str]]] = {
    # name: how the second model differs, the error, what it says
    "width": ({"hidden_size": 8}, CheckpointShapeError, ["hidden_size is 4, and there 8", "(8,) for (4,)"]),
    "inner": (
        {"intermediate_size": 7},
        CheckpointShapeError,
        ["intermediate_size is 6, and there 7", "(7, 4) for (6, 4)"],
    ),
    "heads": ({"num_attention_heads": 4}, CheckpointShapeError, ["num_attention_heads is 2, and there 4"]),
    "tokens": (
        {"vocab_size": 6},
        CheckpointShapeError,
        ["vocab_size is 5, and there 6", "lm_head.weight (6, 4) for (5, 4)"],
    ),
    "more": ({"model.layers.1.q.bias": (4,)}, CheckpointKeyError, ["has no such array: 'model.layers.2.q.bias'"]),
    "fewer": (
        {"model.layers.1.mlp.weight": None},
        CheckpointKeyError,
        ["its layers lack: 'model.layers.N.mlp.weight'"],
    ),
    "no norm": ({"model.norm.weight": None}, CheckpointKeyError, ["it lacks: 'model.norm.weight'"]),
    "own head": ({"score.weight": (2, 4)}, CheckpointKeyError, ["has no such array: 'score.weight'"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_models_that_do_not_fit_are_refused_before_a_byte_is_written(tmp_path: Path, name: str) -> None:
    change, error, parts = MISFITS[name]
    arrays = {k: v for k, v in change.items() if "." in k}
    a = made(tmp_path / "a")
    b = made(tmp_path / "b", {k: v for k, v in change.items() if k not in arrays}, **arrays)
    with pytest.raises(error) as e:
        blend(stacked(a, b), tmp_path / "out")
    assert all(part in str(e.value) for part in (*parts, f"{b} makes no model with {a}, whose config.json is written"))
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(CheckpointError):  # and where the base says how, and is in no slice
        blend(stacked(b, b, base_model=a), tmp_path / "out")


def test_entries_that_differ_and_let_it_run_are_noted(tmp_path: Path) -> None:
    a = made(tmp_path / "a")
    other = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "bos_token_id": 2}
    b = made(tmp_path / "b", other)
    for config in (
        stacked(a, b),
        {"merge_method": "slerp", "base_model": a, "models": [{"model": b}], "parameters": {"t": 0.5}},
    ):
        report = blend(config, tmp_path / "out", overwrite=True)
        assert report.notes == [
            f"config.json: what comes of {b} runs with that of {a}: rms_norm_eps is 1e-06, and there 1e-05, rope_theta is "
            "10000.0, and there 500000.0"
        ]
    assert blend(stacked(a, a), tmp_path / "same").notes == []
    c = made(tmp_path / "c", {"num_attention_heads": 4})
    with pytest.raises(CheckpointShapeError, match="num_attention_heads is 2, and there 4"):
        blend(
            {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 1}} for m in (a, c)]},
            tmp_path / "no",
        )


def test_layers_of_several_shapes_pass(tmp_path: Path) -> None:
    """Of a mixture of experts after dense layers, of sizes for each layer, and with buffers that one model stores."""
    layers = {f"model.layers.{i}.mlp.{k}.weight": (3, 4) for i in (1, 2) for k in ("gate", "experts.0", "experts.1")}
    layers |= {f"model.layers.{i}.mlp.weight": None for i in (1, 2)}
    config = {"first_k_dense_replace": 1, "num_experts_per_tok": 1}
    a, b = (made(tmp_path / n, config, **layers) for n in "ab")
    report = blend(stacked(a, b), tmp_path / "moe")
    assert (report.notes, "model.layers.3.mlp.gate.weight" in open_checkpoint(report.path)) == ([], True)
    sized = [made(tmp_path / n, {"intermediate_size": s}) for n, s in (("c", [6, 6, 6]), ("d", [6, 7, 8]))]
    report = blend(stacked(*sized), tmp_path / "sized")
    assert open_checkpoint(report.path).documents["config.json"]["intermediate_size"] == [6, 6, 7, 8]
    wide = made(tmp_path / "wide", {"intermediate_size": [6, 6, 6], "hidden_size": 8})
    with pytest.raises(CheckpointShapeError, match="hidden_size is 4, and there 8"):
        blend(stacked(sized[0], wide), tmp_path / "no")
    buffered = made(tmp_path / "e", **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (2,) for i in range(3)})
    plain = made(tmp_path / "f")
    assert (
        blend(stacked(buffered, plain), tmp_path / "g").notes
        == blend(stacked(plain, buffered), tmp_path / "h").notes
        == []
    )


def test_heads_that_one_model_ties(tmp_path: Path) -> None:
    own, tied, other = (
        made(tmp_path / "own"),
        *(made(tmp_path / n, {"tie_word_embeddings": True}, head=False) for n in ("tied", "other")),
    )
    report = blend(stacked(own, tied), tmp_path / "a")  # the head of the last layers is their model's embedding
    got, embedding = open_checkpoint(report.path), open_checkpoint(tied)["model.embed_tokens.weight"].read()
    assert np.array_equal(got["lm_head.weight"].read(), embedding)
    assert got.documents["config.json"]["tie_word_embeddings"] is False
    got = open_checkpoint(blend(stacked(tied, own), tmp_path / "b").path)
    assert np.array_equal(got["lm_head.weight"].read(), open_checkpoint(own)["lm_head.weight"].read())
    assert got.documents["config.json"]["tie_word_embeddings"] is False
    report = blend(stacked(tied, other), tmp_path / "c")
    assert report.notes == [
        f"config.json: ties the head to model.embed_tokens.weight, also after the layers of {other}"
    ]
    assert blend(stacked(tied, tied), tmp_path / "d").notes == []
