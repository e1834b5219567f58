"""Loads that need not fit, and what the report says; parts of a checkpoint."""

import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import (
    LoadReport,
    Rules,
    convert,
    load,
    merge,
    open_checkpoint,
    read_header,
    save,
    save_safetensors,
)
from meshtape.storage.loading.report import MAX_LINES, grouped


def test_what_does_not_fit_is_in_the_report_and_stays_as_it_was(tmp_path):
    save(
        tmp_path / "c",
        {"a": np.arange(2.0), "b": {"c": np.ones((2, 3)), "d": np.ones(2, "i4")}, "n": 3, "old": np.ones(1)},
    )
    like = {
        "a": np.zeros(2),
        "b": {"c": np.zeros((4, 2)), "d": np.full(2, 7.0)},
        "n": 5,
        "new": np.full(1, 9.0),
        "m": 4,
    }
    report = LoadReport()
    got = load(tmp_path / "c", like=like, strict=False, report=report)
    assert report.loaded == ["a", "n"]
    assert report.missing == ["m", "new"] or report.missing == ["new", "m"]
    assert report.unexpected == ["old"]
    assert list(report.mismatched) == ["b.c", "b.d"]
    assert "stored shape (2, 3), wanted (4, 2)" in report.mismatched["b.c"]
    assert "stored dtype int32, wanted float64" in report.mismatched["b.d"]
    assert not report.fits
    assert got["a"].tolist() == [0, 1]
    assert (got["n"], got["m"]) == (3, 4)
    assert got["b"]["c"] is like["b"]["c"]
    assert got["b"]["d"] is like["b"]["d"]
    assert got["new"] is like["new"]
    assert set(report.phases) == {"open", "plan", "read"}
    # With a cast one thing less is wrong; and a later load starts a fresh report.
    load(tmp_path / "c", like=like, strict=False, cast=True, report=report)
    assert list(report.mismatched) == ["b.c"]
    load(tmp_path / "c", report=report)
    assert report.fits
    assert report.loaded == ["a", "b.c", "b.d", "old", "n"]


def test_without_a_report_a_warning_tells(tmp_path):
    save(tmp_path / "c", {"a": np.ones(2)})
    with pytest.warns(UserWarning, match=r"missing in the checkpoint \(1\): b"):
        load(tmp_path / "c", like={"a": np.zeros(2), "b": np.zeros(1)}, strict=False)


def test_missing_three_keys_are_exactly_listed(tmp_path):
    save(tmp_path / "c", {f"k{i}": np.ones(1) for i in range(10)})
    like = {f"k{i}": np.zeros(1) for i in range(10)} | {"x": np.zeros(1), "y.z": np.zeros(1), "q": np.zeros(1)}
    report = LoadReport()
    load(tmp_path / "c", like=like, strict=False, report=report)
    assert sorted(report.missing) == ["q", "x", "y.z"]


def test_ignored_names_may_be_missing_and_are_reported(tmp_path):
    """Tied heads and buffers that are made anew: excused by pattern, in strict loads too."""
    save(tmp_path / "c", {"w": np.ones(2), "rope.0.inv": np.ones(1), "rope.1.inv": np.ones(1)})
    like = {"w": np.zeros(2), "lm_head": np.full(2, 5.0)}
    with pytest.raises(errors.CheckpointKeyError, match=r"rope\.\{0-1\}\.inv \(2\)"):
        load(tmp_path / "c", like=like, ignore=["lm_head"])
    report = LoadReport()
    got = load(tmp_path / "c", like=like, ignore=["lm_head", "rope.*"], report=report)
    assert got["lm_head"] is like["lm_head"]
    assert sorted(report.ignored) == ["lm_head", "rope.0.inv", "rope.1.inv"]
    assert report.fits


def test_32_layers_are_one_line(tmp_path):
    arrays = {f"layers.{i}.mlp.w": np.ones(1) for i in range(32)}
    save_safetensors(tmp_path / "x.safetensors", arrays)
    report = LoadReport()
    load(tmp_path / "x.safetensors", rules="layers.{i}.mlp.w -> h.{i}.w", report=report)
    assert report.mapping == [("layers.{i}.mlp.w -> h.{i}.w", 32)]
    assert str(report).count("\n") == 1
    like = {f"h.{i}.v": np.ones(1) for i in range(32)}
    load(tmp_path / "x.safetensors", like=like, strict=False, report=report)
    assert "h.{0-31}.v (32)" in str(report)
    assert "layers.{0-31}.mlp.w (32)" in str(report)
    assert str(report).count("\n") == 2


def test_a_report_never_exceeds_forty_lines():
    report = LoadReport(
        missing=[f"name{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(500)],
        unexpected=[f"other{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(500)],
        mismatched={str(i): f"m{i}" for i in range(50)},
        mapping=[(f"r{i}", 1) for i in range(100)],
    )
    assert len(str(report).split("\n")) == MAX_LINES


def test_groups():
    assert grouped([]) == []
    assert grouped(["a.1.b.2", "a.1.b.3", "a.2.b.2", "w1", "w2", "x.7"]) == ["a.{1-2}.b.{2-3} (3)", "w1", "w2", "x.7"]
    assert grouped(f"e.{i}" for i in range(0, 40, 2)) == ["e.{0,2,4,6,8,…,38} (20)"]


def test_the_report_says_which_keys_forced_a_reshard(kit, tmp_path):
    by_rows = kit.Sharding(kit.Host({"x": 2}), (0,))
    save(tmp_path / "c", {"a": kit.split(np.ones((4, 4)), by_rows), "b": np.ones((4, 4)), "e": np.ones((0, 2))})
    for shardings, wanted in (
        ({"a": by_rows, "b": kit.Sharding(kit.Host({"x": 3}), (None,)), "e": by_rows}, []),
        ({"a": kit.Sharding(kit.Host({"x": 2}), (1,)), "b": by_rows, "e": None}, ["a", "b"]),
    ):
        report = LoadReport()
        load(tmp_path / "c", shardings=shardings, report=report)
        assert report.resharded == wanted
    assert "cut in other blocks than stored (2): a, b" in str(report)


def test_a_shape_that_a_rule_made_names_the_rule(tmp_path):
    save(tmp_path / "c", {"q": np.ones((2, 3)), "k": np.ones((1, 3))})
    with pytest.raises(
        errors.CheckpointShapeError, match=r"(?s)qk: stored shape \(3, 3\), wanted \(4, 3\).*q, k -> qk, concat"
    ):
        load(tmp_path / "c", like={"qk": np.zeros((4, 3))}, rules="q, k -> qk, concat(axis=0)")


# ----- a part of a checkpoint -----------------------------------------------------------------------------------------


@pytest.fixture
def nested(tmp_path):
    tree = {
        "params": {"layers": [{"w": np.full(2, i)} for i in range(3)], "n": 3},
        "opt": {"m": np.ones(4)},
        "params_ema": np.ones(1),
    }
    save(tmp_path / "c", tree, step=5)
    return tmp_path / "c"


def test_a_prefix_is_the_whole(nested):
    got = load(nested, prefix="params")
    assert set(got) == {"layers", "n"}
    assert [np.asarray(x["w"]).tolist() for x in got["layers"]] == [[0, 0], [1, 1], [2, 2]]
    assert np.asarray(load(nested, prefix="params.layers.1")["w"]).tolist() == [1, 1]
    assert np.asarray(load(nested, prefix="params", keys=["layers.2.*"])["layers"][2]["w"]).tolist() == [2, 2]
    assert list(open_checkpoint(nested).below("opt")) == ["m"]
    like = {"m": np.zeros(4)}
    assert load(nested, prefix="opt.", like=like)["m"].tolist() == [1] * 4
    with pytest.raises(errors.CheckpointKeyError, match="nothing lies below 'model'"):
        load(nested, prefix="model")


def test_a_prefix_of_flat_names(nested, tmp_path):
    merge(nested, tmp_path / "hf")
    assert list(load(tmp_path / "hf", prefix="params")) == ["layers.0.w", "layers.1.w", "layers.2.w"]
    assert list(load(tmp_path / "hf", prefix="params.layers")) == ["0.w", "1.w", "2.w"]


def test_a_prefix_is_a_group_of_nested_zarr(tmp_path):
    import zarr

    for name in ("sub/deep/w", "sub/deep/time", "sub/deeper", "top"):
        zarr.create_array(f"{tmp_path}/nested", name=name, data=np.arange(3.0), dimension_names=["time"])
    for prefix in ("sub/deep", "sub/deep/"):
        report = convert(tmp_path / "nested", tmp_path / "c", format="zarr", prefix=prefix, overwrite=True)
        assert sorted(zarr.open_group(report.path, mode="r").array_keys()) == ["time", "w"]
    assert sorted(load(tmp_path / "nested", prefix="sub")) == ["deep/time", "deep/w", "deeper"]


def test_names_in_the_file_are_those_in_the_index(nested, tmp_path):
    """A prefix that is taken off is off everywhere."""
    import json

    report = merge(nested, tmp_path / "hf", prefix="params", drop=["layers.1.*"])
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"layers.0.w", "layers.2.w"}
    assert set(read_header(tmp_path / "hf" / "model.safetensors").tensors) == set(index["weight_map"])
    assert list(report.skipped) == ["n"]
    convert(nested, tmp_path / "z", format="zarr", prefix="params")
    assert load(tmp_path / "z")["n"] == 3


def test_a_wrong_prefix_in_a_rule_fails_loudly(nested):
    with pytest.raises(errors.RuleMatchError, match="nearest keys"):
        Rules("model.{r*} -> {r*}").on(open_checkpoint(nested))
