"""Mistakes in key rules that once gave a wrong checkpoint, or an error that told too little."""

import json
import re

import numpy as np
import pytest

from meshtape import errors, storage
from meshtape.storage import LoadReport, Rules, convert, load, merge, open_checkpoint, save, save_safetensors
from meshtape.storage.format import dtypes
from meshtape.storage.rules import rules as r
from meshtape.storage.rules import steps, value_steps


def numbered(*names, shape=(2, 3)):
    return {n: np.full(shape, i, np.float32) for i, n in enumerate(names)}


# ----- captures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("layers.{layer}.w -> blocks.{lyer}.w", "{lyer} stands in no source; the nearest that it has is {layer}"),
        ("layers.{layer}.w -> blocks.{lyer}.w, permute()", "the nearest that it has is {layer}"),
        ("layers.{layer}.w -> blocks.{lyer}.w, split(axis=0, parts=2)", "the nearest that it has is {layer}"),
        ("layers.{layer}.w -> all.{n}, concat()", "{n} stands in no source"),
        ("layers.0.w -> all.{n}", "{n} stands in no source."),
        ("layers.{layer}.w -> a.{x}.{y}, split(parts=2)", "['x', 'y'] stand in no source"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_misspelt_capture_is_named(rule, told, count):
    with pytest.raises(errors.RuleConflict) as e:
        Rules(rule).on_arrays(
            numbered(*(f"layers.{i}.w" for i in (5, 7, 9)[:count]) if "{" in rule[:9] else ["layers.0.w"])
        )
    assert told in str(e.value)
    assert rule.split(" ->")[0] in str(e.value)


def test_parts_are_still_numbered(kit):
    held = {f"l.{i}.w": np.arange(8.0).reshape(4, 2) + i for i in (3, 4)}
    got = Rules("l.{i}.w -> e.{i}.{x}.w, split(axis=0, parts=2)").on_arrays(held)
    assert sorted(got) == ["e.3.0.w", "e.3.1.w", "e.4.0.w", "e.4.1.w"]
    # Collected, joined, and cut in other parts.
    got = Rules("l.{i}.w -> e.{x}.w, concat(axis=0), split(axis=0, parts=4)").on_arrays(held)
    assert kit.same(got["e.3.w"], held["l.4.w"][2:])


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ([0, 1, 3], "x=2 is missing"),
        ([0, 5], "x=1-4 is missing"),
        ([0, 2, 4], "x=1,3 is missing"),
        ([1, 2, 4], "x=3 is missing"),
        ([7, 9, 10, 11], "x=8 is missing"),
    ],
)
@pytest.mark.parametrize("step", ["concat(axis=0)", "interleave(parts=2)"])
def test_a_lost_expert_is_named(there, told, step):
    with pytest.raises(errors.RuleMatchError) as e:
        Rules(f"e.{{x}}.w -> all, {step}").on_arrays(numbered(*(f"e.{i}.w" for i in there)))
    assert told in str(e.value)
    assert f"e.{{x}}.w -> all, {step[:6]}" in str(e.value)
    assert "name each source" in str(e.value)


def test_a_lost_expert_of_one_layer_or_of_a_pair():
    held = numbered(*(f"l.{i}.e.{x}.w" for i in (3, 4) for x in range(4) if (i, x) != (4, 2)))
    with pytest.raises(errors.RuleMatchError, match="x=2 is missing for i=4"):
        Rules("l.{i}.e.{x}.w -> l.{i}.w, concat()").on_arrays(held)
    with pytest.raises(errors.RuleMatchError, match="x=2 is missing for i=4"):
        Rules("l.{i}.e.{x}.w -> w, concat()").on_arrays(held)
    first = numbered(*(f"l.{i}.e.{x}.w" for i in (3, 4) for x in range(4) if (i, x) != (4, 0)))
    with pytest.raises(errors.RuleMatchError, match="x=0 is missing for i=4"):
        Rules("l.{i}.e.{x}.w -> l.{i}.w, concat()").on_arrays(first)
    layers = numbered(*(f"l.{i}.e.{x}.w" for i in (3, 5) for x in range(2)))
    with pytest.raises(errors.RuleMatchError, match="i=4 is missing"):
        Rules("l.{i}.e.{x}.w -> w, concat()").on_arrays(layers)
    pairs = numbered(*(f"e.{x}.{n}" for x in (0, 2) for n in "gu"))
    with pytest.raises(errors.RuleMatchError, match="x=1 is missing"):
        Rules("e.{x}.g, e.{x}.u -> all, concat()").on_arrays(pairs)


LOST = {  # rule: keys that are there, those that are not, and what is told
    "the last of a layer": ("l.{i}.e.{x}.w -> l.{i}.w", [f"l.{i}.e.{x}.w" for i in range(3) for x in range(4)], "l.1.e.3.w", "x=3 is missing for i=1"),
    "all but one of a layer": ("l.{i}.e.{x}.w -> l.{i}.w", [f"l.{i}.e.{x}.w" for i in range(2) for x in range(2)], "l.1.e.1.w", "x=1 is missing for i=1"),
    "the last of the last": ("e.{i}.{x}.w -> w", [f"e.{i}.{x}.w" for i in range(2) for x in range(3)], "e.1.2.w", "x=2 is missing for i=1"),
    "the last of two names": ("l.{i}.{x}.g, l.{i}.{x}.u -> l.{i}.w", [f"l.{i}.{x}.{n}" for i in range(2) for x in range(3) for n in "gu"], "l.0.2.[gu]", "x=2 is missing for i=0"),
    "a text": ("l.{i}.{x}.w -> l.{i}.w", [f"l.{i}.{x}.w" for i in range(2) for x in "qkv"], "l.1.k.w", "x=k is missing for i=1"),
    "one beside a text": ("e.{x}.w -> w", ["e.0.w", "e.1.w", "e.2.w", "e.3.w", "e.shared.w"], "e.[12].w", "x=1-2 is missing"),
    "a text beside numbers": ("l.{i}.{x}.w -> l.{i}.w", [f"l.{i}.{x}.w" for i in range(2) for x in (0, 1, "shared")], "l.0.shared.w", "x=shared is missing for i=0"),
}  # fmt: skip


@pytest.mark.parametrize("step", ["concat(axis=0)", "interleave(parts=2)"])
@pytest.mark.parametrize("case", LOST)
def test_whatever_is_lost_is_named(case, step):
    rule, there, lost, told = LOST[case]
    assert Rules(f"{rule}, {step}").on_arrays(numbered(*there))
    left = [n for n in there if not re.fullmatch(lost, n)]
    assert len(left) < len(there)
    with pytest.raises(errors.RuleMatchError, match=told):
        Rules(f"{rule}, {step}").on_arrays(numbered(*left))


@pytest.mark.parametrize("names", [["e.1", "e.01"], ["e.0", "e.1", "e.001", "e.2"], ["e.00", "e.0"]])
def test_two_texts_of_one_number(names):
    with pytest.raises(errors.RuleConflict, match="are one number"):
        Rules("e.{x} -> all, concat()").on_arrays(numbered(*names))


def test_numbers_that_are_far_apart_or_endless_are_told_briefly():
    with pytest.raises(errors.RuleMatchError, match="x=1-1000 is missing"):
        Rules("e.{x} -> all, concat()").on_arrays(numbered("e.0", f"e.{10**15}"))
    assert list(Rules("e.{x} -> all, concat()").on_arrays(numbered("e." + "9" * 5000))) == ["all"]


def test_what_is_no_gap():
    held = numbered("enc.0.w", "enc.1.w", "dec.2.w")  # a name that is passed over, not collected
    assert list(Rules("{side}.{i}.w -> l.{i}.w").on_arrays(held)) == ["l.0.w", "l.1.w", "l.2.w"]
    for names in (["e.3", "e.4"], ["e.a", "e.c"], ["e.0"], ["e.9"], ["e.00", "e.01"]):
        assert list(Rules("e.{x} -> all, concat()").on_arrays(numbered(*names))) == ["all"]
    assert Rules("e.0, e.2 -> all, concat()").on_arrays(numbered("e.0", "e.2"))["all"].shape == (4, 3)
    assert Rules("e.{x} -> _").on_arrays(numbered("e.0", "e.2", "n")).keys() == {"n"}
    assert Rules("e.{x} -> f.{x}").on_arrays(numbered("e.0", "e.2")).keys() == {"f.0", "f.2"}


# ----- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int8", 300),
        ("int8", 1.5),
        ("int8", float("nan")),
        ("uint8", -1),
        ("int64", 2**63),
        ("float16", 1e6),
        ("float32", 1e300),
        ("float32", 10**400),
        ("float8_e4m3fn", float("inf")),
        ("bool", 2),
    ],
)
def test_a_value_that_the_dtype_cannot_hold(dtype, value):
    with pytest.raises(errors.CheckpointDTypeError, match="cannot hold the value") as e:
        Rules([r.Rule((), "b", value_steps.Init((2,), dtype, value))]).on_arrays({})
    assert "-> b, init(" in str(e.value)
    with pytest.raises(errors.CheckpointDTypeError, match="cannot hold the value"):
        Rules([r.Rule("a", "b", value_steps.Pad(0, 9, value))]).on_arrays({"a": np.zeros(2, dtypes.by_name(dtype))})


def test_values_that_are_held(kit):
    for dtype, value in (
        ("int64", 2**63 - 1),
        ("uint64", 2**64 - 1),
        ("bool", True),
        ("float32", 0.1),
        ("float16", 65504),
    ):
        got = Rules([r.Rule((), "b", value_steps.Init((2,), dtype, value))]).on_arrays({})["b"]
        assert kit.same(got, np.full(2, value, dtype))
    assert np.isnan(Rules("_ -> b, init(shape=[1], dtype=float32, value=nan)").on_arrays({})["b"]).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: value_steps.Init((2,), "float32", "1"),
        lambda: value_steps.Init((2.5,), "float32"),
        lambda: value_steps.Init(2, "float32"),
        lambda: value_steps.Init((2,), "float32", None),
        lambda: steps.Concat("0"),
        lambda: steps.Split(0, (1.0, 2)),
        lambda: value_steps.Pad(0, 1.5),
        lambda: value_steps.Pad(0, 4, 1j),
        lambda: value_steps.Cast(3),
        lambda: steps.Reshape("4"),
    ],
)
def test_a_field_of_another_type_is_refused_when_the_step_is_made(make):
    with pytest.raises(errors.RuleSyntaxError, match="it cannot be"):
        make()


def test_lists_and_numpy_numbers_are_taken():
    assert steps.Reshape([2, np.int64(3)]) == steps.Reshape((2, 3))
    assert value_steps.Pad(np.int32(0), np.int64(8), np.float32(0.5)) == value_steps.Pad(0, 8, 0.5)


# ----- prefix, shapes and dtypes --------------------------------------------------------------------------------------


def test_rules_see_names_without_the_prefix(kit, tmp_path):
    held = {"params": {"l": {"w": np.ones((2, 2))}}, "opt": {"l": {"w": np.zeros((2, 2))}}}
    save(tmp_path / "c", held)
    rules = "l.w -> layer.weight"
    assert list(load(tmp_path / "c", prefix="params", rules=rules)) == ["layer.weight"]
    merge(tmp_path / "c", tmp_path / "hf", prefix="params", rules=rules)
    convert(tmp_path / "c", tmp_path / "z", format="zarr", prefix="params", rules=rules)
    for out in ("hf", "z"):
        assert kit.same(open_checkpoint(tmp_path / out)["layer.weight"].read(), held["params"]["l"]["w"])
    with pytest.raises(errors.RuleMatchError, match=r"nearest keys: 'l\.w'"):
        load(tmp_path / "c", prefix="params", rules="params.l.w -> w")


def test_a_wrong_shape_and_dtype_are_both_told(tmp_path):
    save(tmp_path / "c", {"w": np.ones((2, 3), np.float32)})
    with pytest.raises(errors.CheckpointShapeError) as e:
        load(tmp_path / "c", like={"w": np.ones((3, 2), np.float16)})
    for text in ("stored shape (2, 3), wanted (3, 2)", "stored dtype float32, wanted float16"):
        assert text in str(e.value)


# ----- a vocabulary that grew -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10, 4), (10,), (10, 2, 2)])
def test_more_rows_keep_those_that_are_stored(kit, tmp_path, shape):
    stored = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    save(tmp_path / "c", {"embed": stored})
    like = np.full((12, *shape[1:]), -1, "f4")
    report = LoadReport()
    got = load(tmp_path / "c", like={"embed": like}, strict=False, report=report)["embed"]
    assert kit.same(np.asarray(got), np.concatenate([stored, like[10:]]))
    assert "10 rows stored, the other 2 are those of like" in str(report)
    assert not report.fits
    with pytest.warns(UserWarning, match="10 rows stored"):
        load(tmp_path / "c", like={"embed": like}, strict=False)
    with pytest.raises(errors.CheckpointShapeError):
        load(tmp_path / "c", like={"embed": like})
    got = load(tmp_path / "c", like={"embed": like.astype("f2")}, strict=False, cast=True, report=report)["embed"]
    assert kit.same(np.asarray(got), np.concatenate([stored, like[10:]]).astype("f2"))
    fewer = load(tmp_path / "c", like={"embed": like[:9]}, strict=False, report=report)["embed"]
    assert kit.same(np.asarray(fewer), like[:9])


def test_more_rows_of_a_split_array_are_an_error_with_the_rule(kit, tmp_path):
    save(tmp_path / "c", {"embed": np.ones((10, 4), np.float32)})
    like = kit.split(np.zeros((12, 4), "f4"), kit.Sharding(kit.Host({"m": 2}), (0,)))
    with pytest.raises(errors.CheckpointShapeError, match=r"embed -> embed, pad\(axis=0, size=12, fill=mean\)"):
        load(tmp_path / "c", like={"embed": like}, strict=False)
    rule = "embed -> embed, pad(axis=0, size=12, fill=mean)"
    got = load(tmp_path / "c", like={"embed": like}, rules=rule)["embed"].whole()
    assert kit.same(got, np.ones((12, 4), np.float32))


# ----- the dtype in config.json ---------------------------------------------------------------------------------------


def hugging_face(where, config):
    save_safetensors(where / "model.safetensors", {"w": np.ones(3, np.float32)}, metadata={"format": "pt"})
    (where / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


@pytest.mark.parametrize("way", ["merge", "convert"])
def test_config_json_names_the_new_dtype(tmp_path, way):
    config = {
        "model_type": "x",
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "deep_config": {"torch_dtype": "float16"}},
        "quantization_config": {"dtype": "int8"},
        "labels": {"dtype": "a label"},
    }
    (tmp_path / "in").mkdir()
    hugging_face(tmp_path / "in", config)
    if way == "merge":
        merge(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    else:
        convert(tmp_path / "in", tmp_path / "out", format="zarr", dtype="bfloat16")
    got = json.loads((tmp_path / "out" / "config.json").read_text())
    config["torch_dtype"] = config["text_config"]["dtype"] = config["text_config"]["deep_config"]["torch_dtype"] = (
        "bfloat16"
    )
    assert got == config
    assert list(got) == list(config)


@pytest.mark.parametrize(
    "config", ['{"a": 1}', "{no json", '["dtype"]', '{"torch_dtype": "bfloat16"}', '{"dtype": null}']
)
def test_other_documents_stay_to_the_byte(tmp_path, config):
    (tmp_path / "in").mkdir()
    hugging_face(tmp_path / "in", config)
    merge(tmp_path / "in", tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out" / "config.json").read_text() == config


def test_without_a_dtype_config_json_stays(tmp_path):
    (tmp_path / "in").mkdir()
    hugging_face(tmp_path / "in", '{"torch_dtype":"float32"}')
    merge(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"torch_dtype":"float32"}'


def test_a_temporary_name_that_is_a_key_of_the_checkpoint_is_refused():
    """A pattern that reads the key would be given the temporary array in its place."""
    arrays = {"a": np.ones(2), "$t": np.zeros(2)}
    with pytest.raises(errors.RuleConflict, match=r"'\$t' is a key of the checkpoint"):
        Rules("a -> $t\n$t -> b\n{r*} -> m.{r*}").on_arrays(arrays)


def test_what_rules_give_drop_and_read_is_told_with_both_rules():
    for text, word in (
        ("a -> c\nb -> c", r"'c' is given twice, by\n  a -> c   \(line 1\)\nand by\n  b -> c   \(line 2\)"),
        ("a -> _\na -> c", r"'a' is dropped by\n  a -> _   \(line 1\)\nand read by\n  a -> c   \(line 2\)"),
        ("a -> $t\nb -> $t", r"'\$t' is given twice, by\n  a -> \$t   \(line 1\)\nand by\n  b -> \$t"),
        ("a -> $t\nb -> c", r"'\$t', given by\n  a -> \$t   \(line 1\)\nis read by no later rule"),
        ("a -> b", r"'b' is given by\n  a -> b   \(line 1\)\nbut the checkpoint holds"),
    ):
        with pytest.raises(errors.RuleConflict, match=word):
            Rules(text).on_arrays({"a": np.ones(2), "b": np.zeros(2)})


def test_scalars_of_the_state_follow_into_numbered_parts():
    """They were lost: the rule of the state alone does not know how many parts there are."""
    arrays = {
        "h.3.qkv": np.ones((4, 2)),
        "m.h.3.qkv": np.ones((4, 2)),
        "s.h.3.qkv": np.float32(3),
        "s.h.4.qkv": np.float32(5),
    }
    got = Rules("h.{i}.qkv -> h.{i}.{n}, split(axis=0, parts=2)", follow=["m.{}", "s.{}"]).on_arrays(arrays)
    assert sorted(got) == ["h.3.0", "h.3.1", "m.h.3.0", "m.h.3.1", "s.h.3.0", "s.h.3.1", "s.h.4.qkv"]
    assert got["s.h.3.0"] == got["s.h.3.1"] == 3
    assert got["s.h.4.qkv"] == 5


def test_braces_of_a_name_stay_braces():
    held = Rules("x.{i}.{{a}} -> {{i}}.{i}.{{{i}}}").on_arrays({"x.3.{a}": np.ones(2)})
    assert list(held) == ["{i}.3.{3}"]


def test_nothing_and_what_is_empty_go_along(tmp_path):
    """They are leaves, too: by rules, by keys, and where others are dropped."""
    tree = {"params": {"w": np.ones(3)}, "rng": [1, None, True], "scheduler": None, "empty": {}, "none": [], "n": 3}
    place = storage.save(tmp_path / "c", tree).path
    flat = {"w": 3, "rng.0": 1, "rng.1": None, "rng.2": True, "scheduler": None, "empty": {}, "none": [], "n": 3}

    def said(found):
        return {k: len(v) if k == "w" else v for k, v in found.items()}

    rules = "params.{x*} -> {x*}"
    assert said(storage.load(place, rules=rules)) == flat
    assert said(storage.load(storage.virtual.with_rules(place, rules))) == flat
    storage.convert(place, tmp_path / "d", format="zarr", rules=rules)
    assert said(storage.load(tmp_path / "d")) == flat
    assert storage.load(place, keys=["scheduler", "empty"]) == {"scheduler": None, "empty": {}}
    storage.convert(place, tmp_path / "e", format="zarr", drop=["n", "params.*"])
    assert storage.load(tmp_path / "e") == {k: v for k, v in tree.items() if k not in ("n", "params")}
    storage.convert(place, tmp_path / "f", format="zarr", drop=["scheduler", "rng.0", "empty", "none"])
    rest = storage.load(tmp_path / "f")
    assert (rest.pop("params")["w"].tolist(), rest) == ([1] * 3, {"rng": [None, None, True], "n": 3})
    report = storage.convert(place, tmp_path / "dcp", format="dcp")
    assert report.notes == ["a PyTorch checkpoint has no place for the empty dict empty"]
    assert storage.load(tmp_path / "dcp").keys() == {"params.w", *tree} - {"params", "empty"}
    report = storage.convert(place, tmp_path / "g.safetensors", format="safetensors")
    assert sorted(report.skipped) == ["empty", "n", "none", "rng.0", "rng.1", "rng.2", "scheduler"]


def test_steps_within_steps_have_a_bound(tmp_path):
    """Each is some calls within calls of Python; permutes took a power of their number to open."""
    save(tmp_path / "c", {"w": np.arange(120.0).reshape(2, 3, 4, 5)})
    turns = ", ".join(["permute([1, 0, 3, 2])"] * 31)
    assert load(tmp_path / "c", rules=f"w -> w, {turns}")["w"].shape == (3, 2, 5, 4)
    casts = ", ".join(["cast(float32)", "cast(float64)"] * 600)
    line = "\n".join(f"$a{i} -> $a{i + 1}, cast(float32), cast(float64)" for i in range(600))
    for rules in (f"w -> w, {casts}", f"w -> $a0\n{line}\n$a600 -> w"):
        with pytest.raises(errors.RuleConflict, match="one within another; at most 128 are allowed"):
            load(tmp_path / "c", rules=rules)
    deep = tmp_path / "c"
    for _ in range(4):
        deep = storage.virtual.with_rules(deep, f"w -> w, {turns}")
    for n in range(28):
        deep = storage.virtual.cast(deep, ("float32", "float64")[n % 2])
    where = storage.virtual.write(tmp_path / "deep.json", deep)
    assert np.array_equal(load(where)["w"], np.arange(120.0).reshape(2, 3, 4, 5))
    merge(where, tmp_path / "out")
    assert storage.diff(where, tmp_path / "out").equal
    with pytest.raises(errors.RuleConflict, match="at most 128"):
        storage.virtual.with_rules(
            storage.virtual.with_rules(tmp_path / "c", f"w -> w, {turns}"),
            f"w -> w, {turns}, {turns}, {turns}, {turns}",
        )


def test_values_within_values_have_a_bound(tmp_path):
    deep = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(errors.CheckpointError, match="more than 200, cannot be saved"):
        save(tmp_path / "c", {"w": np.ones(2)}, metadata={"a": deep})
    assert not (tmp_path / "c").exists()
