"""Layers and arrays of several models that make no model: told before a byte is written. What can run is noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtape.errors import CheckpointError, CheckpointKeyError, CheckpointShapeError
from meshtape.storage import blend, blended, merge, open_checkpoint, save_safetensors, virtual

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


SIDES: dict[str, tuple[list[str], list[str]]] = {
    # arrays before the layers, and after them
    "gpt_neox": (["gpt_neox.embed_in.weight"], ["gpt_neox.final_layer_norm.weight", "embed_out.weight"]),
    "opt": (
        ["model.decoder.embed_positions.weight", "model.decoder.project_in.weight"],
        ["model.decoder.project_out.weight", "model.decoder.final_layer_norm.bias"],
    ),
    "clip": (
        ["vision_model.embeddings.class_embedding", "vision_model.pre_layrnorm.weight"],
        ["vision_model.post_layernorm.weight", "visual_projection.weight"],
    ),
    "nomic_bert": (["embeddings.word_embeddings.weight", "emb_ln.weight"], ["pooler.dense.weight"]),
    "gpt2": (["wte.weight", "wpe.weight"], ["ln_f.bias", "lm_head.weight"]),
    "bloom": (["word_embeddings_layernorm.weight"], ["transformer.ln_f.weight"]),
    "lfm2": (["model.embed_tokens.weight"], ["model.embedding_norm.weight"]),
    "modernbert": (["model.embeddings.norm.weight"], ["model.final_norm.weight", "head.norm.weight"]),
    "rwkv": (["rwkv.embeddings.weight"], ["rwkv.ln_out.weight", "head.weight"]),
}


@pytest.mark.parametrize("kind", SIDES)
def test_arrays_outside_of_layers_come_of_the_model_on_their_side(tmp_path: Path, kind: str) -> None:
    ahead, behind = SIDES[kind]
    for name, value in (("a", 1.0), ("b", 2.0)):
        names = [*ahead, *behind, "rare.weight", *(f"h.{i}.w" for i in range(3))]
        save_safetensors(tmp_path / f"{name}.safetensors", {n: np.full(2, value, np.float32) for n in names})
    a, b = (str(tmp_path / f"{n}.safetensors") for n in "ab")
    report = blend(stacked(a, b), tmp_path / "out")
    got = open_checkpoint(report.path)
    assert {n: got[n][0] for n in (*ahead, *behind)} == dict.fromkeys(ahead, 1.0) | dict.fromkeys(behind, 2.0)
    assert got["rare.weight"][0] == 2
    (note,) = report.notes
    assert note.startswith(f"'rare.weight': of {b}, as the last layers are")
    assert blend(stacked(a, a), tmp_path / "same").notes == []


WINDOWS = {"sliding_window": 8, "use_sliding_window": True}
CHUNKS = {"attention_chunk_size": 4}


@pytest.mark.parametrize(("kind", "entries"), [("sliding_attention", WINDOWS), ("chunked_attention", CHUNKS)])
def test_kinds_of_attention_without_their_sizes_are_noted(tmp_path: Path, kind: str, entries: dict[str, Any]) -> None:
    none = {k: False if v is True else None for k, v in entries.items()}
    full = made(tmp_path / "full", {"layer_types": ["full_attention"] * 3} | none)
    own = made(tmp_path / "own", {"layer_types": [kind] * 3} | entries)
    notes = [n for n in blend(stacked(full, own), tmp_path / "a").notes if "cannot run" in n]
    assert len(notes) == 1
    assert f"write {entries!r}, or" in notes[0]
    for k, pair in enumerate(((own, full), (own, own), (full, full))):
        assert not any("cannot run" in n for n in blend(stacked(*pair), tmp_path / str(k)).notes)


FALSE: dict[str, tuple[dict[str, Any], str]] = {
    "more tokens": ({"vocab_size": 7}, "vocab_size is 7, and the embeddings here have 5 rows"),
    "fewer tokens": ({"vocab_size": 3}, "vocab_size is 3, and the embeddings here have 5 rows"),
    "more layers": ({"num_hidden_layers": 5}, "num_hidden_layers is 5, and there are 3 layers here"),
    "fewer layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and there are 3 layers here"),
    "no layers": ({"num_hidden_layers": None}, "does not say 'num_hidden_layers', as that of"),
}


@pytest.mark.parametrize("name", FALSE)
def test_sizes_that_the_arrays_do_not_have_are_noted(tmp_path: Path, name: str) -> None:
    change, told = FALSE[name]
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    config = {k: v for k, v in (PLAIN | change).items() if v is not None}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (note,) = blend(linear(a, b), tmp_path / "out").notes
    assert told in note
    later = {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}  # the last one predicts later tokens
    for m in (a, b):
        Path(m, "config.json").write_text(json.dumps(PLAIN | later))
    assert blend(linear(a, b), tmp_path / "later").notes == []


def test_arrays_that_a_model_needs_and_that_are_dropped_are_noted(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    for k, (drop, gone) in enumerate(
        (
            ("model.layers.1.mlp.*", ["model.layers.1.mlp.weight"]),
            ("model.embed*", ["model.embed_tokens.weight"]),
            ("model.layers.2.*", []),
        )
    ):
        for how, report in (
            ("blend", blend(linear(a, b), tmp_path / f"{k}", drop=[drop])),
            ("merge", merge(a, tmp_path / f"m{k}", drop=[drop])),
        ):
            found = [n for n in report.notes if "arrays of the model are not here" in n]
            assert found == [f"config.json: arrays of the model are not here: {', '.join(gone)}"] * bool(gone), how


def linear(*models: str) -> dict[str, Any]:
    return {"merge_method": "linear", "models": [{"model": m, "parameters": {"weight": 0.5}} for m in models]}


SUMS = {
    "mean": lambda a, b: virtual.mean([a, b]),
    "weighted_sum": lambda a, b: virtual.weighted_sum([a, b], [1, 2]),
    "ema": lambda a, b: virtual.ema([b, a], decay=0.5),  # with the documents of the last
    "difference": virtual.difference,
    "add": lambda a, b: virtual.add(a, virtual.difference(b, b)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_models_that_compute_otherwise(tmp_path: Path, name: str) -> None:
    """Refused and noted as blends of them are."""
    a = made(tmp_path / "a")
    heads, theta = (
        made(tmp_path / k, more)
        for k, more in (("heads", {"num_attention_heads": 4}), ("theta", {"rope_theta": 5e5, "rope_parameters": None}))
    )
    Path(a, "config.json").write_text(json.dumps(PLAIN | {"rope_theta": 1e4, "rope_parameters": None}))
    with pytest.raises(CheckpointShapeError, match="num_attention_heads is 2, and there 4"):
        SUMS[name](a, heads)
    notes = merge(SUMS[name](a, theta), tmp_path / "out").notes
    assert len(notes) == 1
    assert "rope_theta is 10000.0, and there 500000.0" in notes[0]
    assert merge(SUMS[name](a, a), tmp_path / "same").notes == []


def test_layers_of_other_kinds_at_one_place_are_noted(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    a, b = (made(tmp_path / n, {"layer_types": kinds[i : i + 3], "sliding_window": 8}) for i, n in enumerate("ab"))
    told = "layer_types[0] is 'full_attention', and there 'sliding_attention'"
    for notes in (
        blend(linear(a, b), tmp_path / "blend").notes,
        merge(virtual.mean([a, b]), tmp_path / "mean").notes,
    ):
        assert [told in n for n in notes] == [True]
    assert blend(stacked(a, b), tmp_path / "slices").notes == []  # where entries follow the layers


def test_integers_of_a_base_that_is_not_listed_are_the_first(tmp_path: Path) -> None:
    for n, v in (("base", 100), ("a", 200), ("b", 300)):
        save_safetensors(tmp_path / n, {"w": np.full(4, v, np.float32), "n": np.array(v)})
    base, a, b = (str(tmp_path / n) for n in ("base", "a", "b"))
    for listed in ([], [base]):
        models = [{"model": m, **({} if m == base else {"parameters": {"weight": 1}})} for m in (*listed, a, b)]
        config = {"merge_method": "task_arithmetic", "base_model": base, "models": models}
        assert [int(blended(config, integers=i)["n"].read()) for i in ("first", "last")] == [100, 300]
