"""Checkpoints of Orbax in its four layouts. The golden ones were written by orbax-checkpoint 0.12.8."""

import importlib.util
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import convert, load, merge, open_checkpoint, reshard, verify

GOLDEN = Path(__file__).parent / "golden" / "orbax-0.12"
FILES = ("files-zarr2", "files-zarr3")
DATABASES = ("ocdbt-zarr2", "ocdbt-zarr3")
WANTED = {
    "list.0": np.arange(3, dtype="i4"),
    "list.1": np.float64(2.5),
    "mask": np.array([True, False]),
    "params.dense.bias": np.arange(4).astype(ml_dtypes.bfloat16),
    "params.dense.kernel": np.arange(12, dtype="f4").reshape(3, 4),
    "step": np.int64(7),
    "zeros": np.zeros((2, 2), "f4"),
}
HAS = importlib.util.find_spec("tensorstore") is not None


def check(kit, where, home):
    ckpt = open_checkpoint(where)
    assert ckpt.kind == "Orbax"
    assert {n: kit.same(a.read(), WANTED[n]) for n, a in ckpt.items()} == dict.fromkeys(WANTED, True)
    np.testing.assert_array_equal(ckpt["params.dense.kernel"][1:, ::2], WANTED["params.dense.kernel"][1:, ::2])
    tree = load(where)
    assert kit.same(np.asarray(tree["params"]["dense"]["bias"]), WANTED["params.dense.bias"])
    assert [np.asarray(a).tolist() for a in tree["list"]] == [[0, 1, 2], 2.5]
    assert (tree["name"], tree["none"], tree["empty"]) == ("run", None, {})
    merge(where, home / "hf", prefix="params")
    assert kit.same(np.asarray(load(home / "hf")["dense.bias"]), WANTED["params.dense.bias"])
    convert(where, home / "zarr", format="zarr")
    reshard(where, home / "cut", mesh={"m": 2}, shardings={"*.kernel": {"m": 1}})
    for made in ("zarr", "cut"):
        verify(home / made)
        assert load(home / made)["name"] == "run"


@pytest.mark.parametrize("layout", FILES)
def test_layouts_in_files(kit, tmp_path, layout):
    check(kit, GOLDEN / layout, tmp_path)


@pytest.mark.parametrize("layout", DATABASES)
def test_layouts_in_a_database(kit, tmp_path, layout):
    if not HAS:
        pytest.skip("tensorstore is not installed, which alone reads OCDBT")
    check(kit, shutil.copytree(GOLDEN / layout, tmp_path / "c"), tmp_path)


@pytest.mark.parametrize("layout", DATABASES)
def test_a_database_without_its_reader_is_refused_in_words(monkeypatch, layout):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.CheckpointError, match=r"OCDBT.*install meshtape.*use_ocdbt=False"):
        open_checkpoint(GOLDEN / layout)


def test_a_step_of_the_manager_is_its_one_item(tmp_path):
    shutil.copytree(GOLDEN / "files-zarr2", tmp_path / "3" / "default")
    (tmp_path / "3" / "_CHECKPOINT_METADATA").write_text("{}")
    assert open_checkpoint(tmp_path / "3")["step"][...] == 7


@pytest.mark.parametrize("layout", FILES)
def test_lost_chunks_and_arrays(tmp_path, layout):
    where = Path(shutil.copytree(GOLDEN / layout, tmp_path / "c"))
    chunk = where / "params.dense.kernel" / ("0.0" if layout.endswith("2") else "c/0/0")
    chunk.unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="1 chunk"):
        merge(where, tmp_path / "out")
    shutil.rmtree(where / "params.dense.kernel")
    with pytest.raises(errors.CheckpointError, match=r"params\.dense\.kernel"):
        open_checkpoint(where)


@pytest.mark.parametrize("layout", DATABASES)
def test_lost_chunks_of_a_database(tmp_path, layout):
    ts = pytest.importorskip("tensorstore")
    where = shutil.copytree(GOLDEN / layout, tmp_path / "c")
    name = "params.dense.kernel"
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{where}/"}).result()
    database.write(f"{name}/" + ("0.0" if layout.endswith("2") else "c/0/0"), None).result()
    for fails in (lambda: merge(where, tmp_path / "out"), lambda: verify(where)):
        with pytest.raises(errors.IncompleteCheckpoint, match=f"1 chunk of key '{name}'"):
            fails()
    with pytest.warns(UserWarning, match="1 chunk"):
        load(where)
    merge(where, tmp_path / "out", missing="fill")
    assert not np.asarray(load(tmp_path / "out")[name]).any()


@pytest.mark.parametrize("layout", FILES)
def test_a_dtype_that_zarr_does_not_know_hides_nothing_else(kit, tmp_path, layout):
    where = Path(shutil.copytree(GOLDEN / layout, tmp_path / "c"))
    said = where / "params.dense.kernel" / (".zarray" if layout.endswith("2") else "zarr.json")
    said.write_text(said.read_text().replace('"<f4"', '"int4"').replace('"float32"', '"int4"'))
    ckpt = open_checkpoint(where)
    assert list(ckpt.skipped) == ["params.dense.kernel"]
    assert all(kit.same(ckpt[n].read(), a) for n, a in WANTED.items() if n not in ckpt.skipped)


def test_empty_containers_are_as_orbax_restores_them(tmp_path):
    where = Path(shutil.copytree(GOLDEN / "files-zarr2", tmp_path / "c"))
    top = json.loads((where / "_METADATA").read_text())
    kinds = {"Tuple": (), "NamedTuple": None, "List": [], "Dict": {}, "None": None}
    for kind in kinds:
        value = {"value_type": kind, "skip_deserialize": True}
        top["tree_metadata"][kind] = {"key_metadata": [{"key": kind, "key_type": 2}], "value_metadata": value}
    (where / "_METADATA").write_text(json.dumps(top))
    tree = load(where)
    assert {kind: tree[kind] for kind in kinds} == kinds


def test_keys_of_random_numbers_are_named(tmp_path):
    where = Path(shutil.copytree(GOLDEN / "files-zarr2", tmp_path / "c"))
    (where / "array_metadatas").mkdir(exist_ok=True)
    rows = [{"param_name": n, "ext_metadata": e} for n, e in [("list.0", {"random_key_impl": "rbg"}), ("step", None)]]
    said = where / "array_metadatas" / "process_0"
    said.write_text(json.dumps({"array_metadatas": [{"array_metadata": r} for r in rows]}))
    with pytest.warns(UserWarning, match=r"list\.0 holds keys of jax\.random.*wrap_key_data\(data, impl='rbg'\)"):
        ckpt = open_checkpoint(where)
    assert ckpt.metadata == {"random_key_impl": {"list.0": "rbg"}}
    for text in ("{", "[]", '{"array_metadatas": [3]}'):
        said.write_text(text)
        with pytest.raises(errors.CorruptCheckpoint, match="process_0"):
            open_checkpoint(where)


HOSTILE = {
    "no JSON": "{",
    "a list": "[]",
    "no tree": "{}",
    "no keys": '{"tree_metadata": {"a": {"key_metadata": [], "value_metadata": {"value_type": "scalar"}}}}',
    "outside": '{"tree_metadata": {"a": {"key_metadata": [{"key": "../x", "key_type": 2}], "value_metadata": '
    '{"value_type": "scalar"}}}}',
    "absolute": '{"tree_metadata": {"a": {"key_metadata": [{"key": "/etc", "key_type": 2}], "value_metadata": '
    '{"value_type": "scalar"}}}}',
    "a number as key": '{"tree_metadata": {"a": {"key_metadata": [{"key": 3, "key_type": 1}], "value_metadata": '
    '{"value_type": "scalar"}}}}',
    "a value": '{"tree_metadata": {"a": 3}}',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_is_damaged_or_hostile(tmp_path, text):
    shutil.copytree(GOLDEN / "files-zarr2", tmp_path / "home" / "c")
    shutil.copytree(GOLDEN / "files-zarr2" / "step", tmp_path / "home" / "x")
    (tmp_path / "home" / "c" / "_METADATA").write_text(text)
    with pytest.raises(errors.CheckpointError):
        open_checkpoint(tmp_path / "home" / "c")


def test_one_name_twice_or_below_a_leaf(tmp_path):
    where = Path(shutil.copytree(GOLDEN / "files-zarr2", tmp_path / "c"))
    top = json.loads((where / "_METADATA").read_text())
    leaf = top["tree_metadata"]["('step',)"]
    for entries in ({"a": leaf, "b": leaf},):
        (where / "_METADATA").write_text(json.dumps({**top, "tree_metadata": entries}))
        with pytest.raises(errors.CorruptCheckpoint, match="twice"):
            open_checkpoint(where)
