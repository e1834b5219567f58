"""`config.json` follows layers and tokens that rules, selections and virtual checkpoints change; notes say the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshtape as mt
from meshtape.errors import CorruptCheckpoint
from meshtape.storage import blend, merge, open_checkpoint, reshard, save, save_safetensors, virtual

LAYERS = 4
PAD = "model.embed_tokens.weight -> model.embed_tokens.weight, pad(axis=0, size=16)"
HEAD = "lm_head.weight -> lm_head.weight, pad(axis=0, size=16)"
WITHOUT_SECOND = "\n".join(
    ["model.layers.1.{r*} -> _", *(f"model.layers.{i}.{{r*}} -> model.layers.{i - 1}.{{r}}" for i in (2, 3))]
)
CONFIG = {
    "num_hidden_layers": LAYERS,
    "vocab_size": 10,
    "hidden_size": 6,
    "layer_types": ["a", "b", "c", "d"],
    "first_k_dense_replace": 2,
    "max_position_embeddings": 12,
}


def made(where: Path, config: dict[str, Any] = CONFIG, **more: Any) -> str:
    """A model of layers of 6, with embeddings of 10 tokens, and positions."""
    where.mkdir()
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (10, 6), "model.wpe.weight": (12, 6)}
    shapes |= {f"model.layers.{i}.mlp.weight": (8, 6) for i in range(LAYERS)}
    shapes |= {"lm_head.weight": (10, 6)} | more
    save_safetensors(where / "model.safetensors", {n: rng.normal(size=s).astype("f4") for n, s in shapes.items()})
    (where / "config.json").write_text(json.dumps(config))
    return str(where)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    # name: options of merge, what of the configuration is another, beginnings of notes
    "nothing": ({}, {}, []),
    "a dtype": ({"dtype": "float16"}, {}, []),
    "other names": ({"rules": "model.{r*} -> base.{r}"}, {}, []),
    "a vocabulary": ({"rules": f"{PAD}\n{HEAD}"}, {"vocab_size": 16}, []),
    "half of a vocabulary": ({"rules": PAD}, {}, ["see whether vocab_size 10"]),
    "no head": (
        {"rules": PAD, "drop": "lm_head.*"},
        {"vocab_size": 16},
        ["does not say that it ties the head to the embedding, and lm_head.weight is not here"],
    ),
    "a head of another name": ({"rules": "lm_head.weight -> output.weight"}, {}, []),
    "the last layer": (
        {"drop": "model.layers.3.*"},
        {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]},
        [],
    ),
    "a layer within": (
        {"rules": WITHOUT_SECOND},
        {"num_hidden_layers": 3, "layer_types": ["a", "c", "d"], "first_k_dense_replace": 1},
        [],
    ),
    "another order": (
        {"rules": "model.layers.0.{r*} -> model.layers.3.{r}\nmodel.layers.3.{r*} -> model.layers.0.{r}"},
        {"layer_types": ["d", "b", "c", "a"]},
        ["'first_k_dense_replace' speaks of layers"],
    ),
    "a gap": ({"drop": "model.layers.1.*"}, {}, ["still says num_hidden_layers 4, and there are layers 0, 2, 3"]),
    "no layers": (
        {"keys": "model.embed*"},
        {},
        ["still says num_hidden_layers 4, and there are no layers", "does not say that it"],
    ),
    "stacked layers": ({"rules": "model.layers.{i}.mlp.weight -> mlp, concat(axis=0)"}, {}, []),
    "positions": (
        {"rules": "model.wpe.weight -> model.wpe.weight, slice(axis=0, start=0, stop=8)"},
        {},
        ["max_position_embeddings is 12, and arrays here have other lengths: model.wpe.weight (8, 6)"],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("inner", [None, "text_config", "llm_config", "language_config"])
def test_the_configuration_follows_layers_and_tokens(tmp_path: Path, name: str, inner: str | None) -> None:
    options, changed, notes = CASES[name]
    src = made(tmp_path / "model", {inner: CONFIG} if inner else CONFIG)
    report = merge(src, tmp_path / "out", **options)
    told = open_checkpoint(report.path).documents["config.json"]
    assert (told[inner] if inner else told) == CONFIG | changed
    assert len(report.notes) == len(notes)
    assert all(n.startswith(f"config.json: {start}") for n, start in zip(report.notes, notes, strict=True))
    if changed and "drop" not in options:  # a virtual checkpoint has it too, and what is written from its document
        where = virtual.write(tmp_path / "v.json", virtual.with_rules(src, options["rules"]))
        assert open_checkpoint(where).documents["config.json"] == told
        again = reshard(where, tmp_path / "again")
        assert (open_checkpoint(again.path).documents["config.json"], again.notes) == (told, report.notes)


def test_rows_of_a_virtual_checkpoint_are_in_its_configuration(tmp_path: Path) -> None:
    part = virtual.rows(made(tmp_path / "model"), {"*embed*": (0, 7), "lm_head.weight": (0, 7), "*wpe*": (0, 5)})
    assert part.documents["config.json"] == CONFIG | {"vocab_size": 7}
    report = merge(virtual.cast(part, "bfloat16"), tmp_path / "out")
    assert open_checkpoint(report.path).documents["config.json"]["vocab_size"] == 7
    assert ["max_position_embeddings" in n for n in report.notes] == [True]


def test_towers_and_sizes_that_were_untrue_before_are_left_alone(tmp_path: Path) -> None:
    tower = {f"vision.blocks.{i}.w": (2,) for i in range(LAYERS)}
    src = made(tmp_path / "towers", **tower)
    notes = merge(src, tmp_path / "a", drop="vision.blocks.3.*").notes  # its number of layers stands elsewhere
    assert ["'vision.blocks.'" in n for n in notes] == [True]
    told = open_checkpoint(merge(src, tmp_path / "b", drop="model.layers.3.*").path).documents["config.json"]
    assert told["num_hidden_layers"] == 3
    further = made(
        tmp_path / "further", CONFIG | {"num_hidden_layers": 3, "vocab_size": 9}
    )  # as those that predict more
    assert merge(further, tmp_path / "c").notes == []
    report = merge(further, tmp_path / "d", drop="model.layers.3.*", rules=f"{PAD}\n{HEAD}")
    assert ["layers" in n or "vocab_size 9" in n for n in report.notes] == [True, True]
    both = made(tmp_path / "both", CONFIG | {"is_encoder_decoder": True})
    assert ["numbers of layers" in n for n in merge(both, tmp_path / "e", drop="model.layers.3.*").notes] == [True]


def test_a_damaged_configuration_costs_no_arrays(tmp_path: Path) -> None:
    save(tmp_path / "c", {"embed_tokens.weight": np.ones((4, 2))}, documents={"config": {"vocab_size": 4}})
    with (tmp_path / "c" / "config.json").open("a") as f:
        f.write(" ")
    part = virtual.rows(tmp_path / "c", {"*": (0, 2)})
    assert part["embed_tokens.weight"].read().shape == (2, 2)
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        part.documents["config.json"]


def test_a_configuration_that_is_given_is_compared_with_the_arrays(tmp_path: Path) -> None:
    src = made(tmp_path / "model")
    given = {"config": CONFIG | {"vocab_size": 11, "num_hidden_layers": 5}}
    report = mt.merge(src, tmp_path / "out", documents=given)
    assert open_checkpoint(report.path).documents["config.json"] == given["config"]
    assert [n.split()[1] for n in report.notes] == ["vocab_size", "num_hidden_layers"]
    assert mt.merge(src, tmp_path / "true", documents={"config": CONFIG}).notes == []


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"swa_layers": [0, 2]}, "'swa_layers' speaks of layers"),
        ({"attention": {"global_attn_idx": [0, 3]}}, "'attention' speaks of layers"),
        ({"model_type": "gemma2"}, "the class of 'gemma2' chooses"),
        ({"num_kv_shared_layers": 2}, "'num_kv_shared_layers' speaks of layers"),
        ({"model_type": "vaultgemma"}, "the class of 'vaultgemma' chooses"),
        ({"model_type": "gemma4_text", "layer_types": ["full_attention"] * 3 + ["x"]}, "'full_attention' in the last"),
        ({"num_hidden_layers": None, "block_types": list("mama")}, "'block_types' is right"),
    ],
)
def test_entries_about_layers_that_cannot_follow_are_told(tmp_path: Path, entries: Any, said: str) -> None:
    plain = {"num_hidden_layers": LAYERS, "vocab_size": 10, "hidden_size": 6, "num_attention_heads": 2}
    source = made(tmp_path / "m", {k: v for k, v in (plain | entries).items() if v is not None})
    (note,) = merge(source, tmp_path / "out", rules=WITHOUT_SECOND).notes
    assert said in note


def test_layers_without_any_experts_are_told(tmp_path: Path) -> None:
    """Numbered or in one array; not of layers that go as a whole, nor those that rules or blends put elsewhere."""
    stacked = {f"model.layers.{i}.mlp.experts.up": (3, 4, 6) for i in range(LAYERS)}
    numbered = {f"model.layers.{i}.mlp.experts.{e}.up": (4, 6) for i in range(LAYERS) for e in range(3)}
    for n, experts in enumerate((stacked, numbered)):
        src = made(tmp_path / f"m{n}", CONFIG | {"num_experts": 3}, **experts)
        slices = [{"sources": [{"model": src, "layer_range": r}]} for r in ([0, 2], [1, 4])]
        config = {"merge_method": "passthrough", "slices": slices}
        for k, (options, wanted) in enumerate(
            (
                ({"drop": "model.layers.[12].mlp.experts.*"}, [1, 2]),
                ({"drop": "model.layers.3.*"}, []),
                ({"rules": WITHOUT_SECOND.replace("layers.1.{r*} -> _", "layers.1.{r*} -> _, optional()")}, []),
                ({"rules": "model.layers.2.mlp.experts.{r*} -> _"}, [2]),
            )
        ):
            told = [f"model.layers.{i}" for i in wanted]
            found = [note for note in merge(src, tmp_path / f"{n}{k}", **options).notes if "experts" in note]
            assert found == [f"{_BARE} {', '.join(told)}"] * bool(told)
        assert not blend(config, tmp_path / f"{n}b").notes
        (note,) = blend(config, tmp_path / f"{n}d", drop="model.layers.2.mlp.experts.*").notes  # that is in layer 1
        assert note == f"{_BARE} model.layers.2"
        (note,) = blend(config, tmp_path / f"{n}c", drop="model.layers.4.mlp.experts.*").notes
        assert note == f"{_BARE} model.layers.4"


_BARE = "config.json: a layer of experts does not load without any, and none are in"


def test_lists_of_layers_follow_by_any_ending(tmp_path: Path) -> None:
    source = made(tmp_path / "m", {**CONFIG, "attn_layer_indices": [1, 3]})
    report = merge(source, tmp_path / "out", rules=WITHOUT_SECOND)
    assert json.loads((tmp_path / "out/config.json").read_text())["attn_layer_indices"] == [2]
    assert not report.notes


def test_what_is_left_out_and_wanted_is_told(tmp_path: Path) -> None:
    """Experts, a head that is not tied, tokens beyond the rows, and scales that no entry names."""
    experts = {f"model.layers.0.moe.experts.{i}.w": (4, 6) for i in range(3)}
    said = CONFIG | {"num_local_experts": 3, "tie_word_embeddings": False}
    src = made(tmp_path / "model", said, **experts)
    vocab = {f"t{i}": i for i in range(10)}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))
    rows = virtual.rows(src, {"*embed*": (0, 7), "lm_head.weight": (0, 7)})
    for n, (source, options, wanted) in enumerate(
        (
            (src, {"dtype": "float16"}, []),
            (src, {"drop": "*.experts.1.*"}, ["num_local_experts is 3, and 'model.layers.0.moe.experts.'"]),
            (src, {"drop": "*.experts.*"}, ["and none are in model.layers.0"]),
            (src, {"rules": "{x*}.experts.{i}.w -> {x}.experts.w, concat(axis=0)"}, []),
            (src, {"drop": "lm_head.weight"}, ["does not tie the head to the embedding, and lm_head.weight is"]),
            (rows, {}, ["has 3 tokens beyond the 7 rows here: t7, t8, t9"]),
            (virtual.quantize(src, keys=["*.mlp.weight"]), {}, ["does not say that arrays are quantised"]),
        )
    ):
        notes = merge(source, tmp_path / str(n), **options).notes
        assert [w in note for w, note in zip(wanted, notes, strict=True)] == [True] * len(wanted), notes


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_configuration_of_float8_without_scales_names_a_dtype_that_transformers_reads(
    tmp_path: Path, dtype: str
) -> None:
    said = CONFIG | {"dtype": "float32", "text_config": {"torch_dtype": "bfloat16"}}
    src = made(tmp_path / "m", said)
    for n, (source, options) in enumerate(((src, {"dtype": dtype}), (virtual.cast(src, dtype), {}))):
        report = merge(source, tmp_path / str(n), **options)
        assert json.loads((tmp_path / str(n) / "config.json").read_text()) == said
        (note,) = report.notes
        assert "casts float8 without scales" in note
        assert "lm_head.weight" in note
    assert virtual.cast(src, dtype).documents["config.json"] == said


def test_entries_by_the_numbers_of_layers_follow(tmp_path: Path) -> None:
    """Members by number, lists that are longer than the model, layers that no entry counts, and those that share."""
    said = {
        "num_hidden_layers": None,
        "layers_block_type": list("mamb"),
        "no_rope_layers": [1, 1, 0, 1, 1, 1],
        "per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 4}},
        "num_kv_shared_layers": 2,
    }
    src = made(tmp_path / "m", {k: v for k, v in said.items() if v is not None})
    cases = {
        "last": {"drop": "model.layers.3.*"},
        "two": {"drop": "model.layers.[23].*"},
        "second": {"rules": WITHOUT_SECOND},
    }
    found = {}
    for name, options in cases.items():
        notes = merge(src, tmp_path / name, **options).notes
        assert ["num_kv_shared_layers" in n for n in notes] == [True] * (name == "second")
        found[name] = json.loads((tmp_path / name / "config.json").read_text())
    wide = {"head_dim": 8}
    assert found["last"] == {
        "layers_block_type": list("mam"),
        "no_rope_layers": [1, 1, 0],
        "per_layer_config": {"1": wide},
        "num_kv_shared_layers": 1,
    }
    assert (found["two"]["per_layer_config"], found["two"]["num_kv_shared_layers"]) == ({"1": wide}, 0)
    assert (found["second"]["layers_block_type"], found["second"]["no_rope_layers"]) == (list("mmb"), [1, 0, 1])
    assert found["second"]["per_layer_config"] == {"2": {"head_dim": 4}}
    src = made(tmp_path / "p", {"num_hidden_layers": LAYERS}, **{"model.embed_tokens_per_layer.weight": (10, 4)})
    (note,) = merge(src, tmp_path / "q", drop="model.layers.3.*").notes
    assert "'model.embed_tokens_per_layer.weight' has a part for each" in note
