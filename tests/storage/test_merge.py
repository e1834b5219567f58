"""Merging to Hugging Face files: names, sizes, bounded memory, determinism."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import (
    CheckpointManager,
    convert,
    load,
    merge,
    open_checkpoint,
    read_header,
    reshard,
    save,
    save_async,
    save_safetensors,
    verify,
)
from meshtape.storage.saving import save as saving
from meshtape.storage.transform.convert import TransformOptions


def test_layout_index_and_values(kit, tmp_path):
    host = kit.Host({"x": 2, "y": 2})
    tree = {
        "layers": [{"w": kit.split(np.arange(48.0).reshape(6, 8) + i, kit.Sharding(host, (0, 1)))} for i in range(4)]
    }
    tree |= {
        "flag": np.array(True),
        "none": np.ones((0, 3), "f4"),
        "epoch": 3,
        "gone": [None],
        "fp8": kit.random(kit.DTYPES[-1], (7,)),
    }
    save(tmp_path / "c", tree)
    seen = []
    report = merge(
        tmp_path / "c", tmp_path / "hf", max_shard_bytes=800, progress=lambda done, total: seen.append((done, total))
    )
    assert report.files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert report.skipped == ["epoch", "gone.0"]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.total_size == 4 * 48 * 8 + 1 + 7
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    for file in report.files:
        header = read_header(tmp_path / "hf" / file)
        assert header.metadata == {"format": "pt"}
        assert set(header.tensors) == {k for k, f in index["weight_map"].items() if f == file}
        assert sum(t.nbytes for t in header.tensors.values()) <= 800
    assert seen[-1] == (report.total_size, report.total_size)
    got = load(tmp_path / "hf")
    for i in range(4):
        assert kit.same(got[f"layers.{i}.w"], tree["layers"][i]["w"].whole())
    assert kit.same(got["flag"], tree["flag"])
    assert kit.same(got["none"], tree["none"])
    assert kit.same(got["fp8"], tree["fp8"])


def test_it_is_deterministic_and_replaces_stale_files(kit, tmp_path):
    save(tmp_path / "c", {f"k{i}": np.full(i + 1, i) for i in range(9)})
    merge(tmp_path / "c", tmp_path / "a", max_shard_bytes=100)
    merge(tmp_path / "c", tmp_path / "b", max_shard_bytes=40)
    with pytest.raises(errors.CheckpointExists):
        merge(tmp_path / "c", tmp_path / "b", max_shard_bytes=100)
    merge(tmp_path / "c", tmp_path / "b", max_shard_bytes=100, overwrite=True)
    files = sorted(f.name for f in (tmp_path / "a").iterdir())
    assert files == sorted(f.name for f in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert sorted(e.name for e in tmp_path.iterdir()) == ["a", "b", "c"]


def test_one_file_still_has_an_index(tmp_path):
    save(tmp_path / "c", {"w": np.ones(3)})
    assert merge(tmp_path / "c", tmp_path / "hf").files == ["model.safetensors"]
    assert sorted(f.name for f in (tmp_path / "hf").iterdir()) == ["model.safetensors", "model.safetensors.index.json"]
    save(tmp_path / "e", {})
    assert merge(tmp_path / "e", tmp_path / "empty").arrays == 0
    assert load(tmp_path / "empty") == {}


def test_what_has_no_safetensors_form_is_refused_before_writing(tmp_path):
    save(tmp_path / "c", {"a": np.ones(2), "z": {"c": np.ones(2, "c16")}})
    with pytest.raises(errors.CheckpointDTypeError, match=r"key 'z\.c': dtype complex128"):
        merge(tmp_path / "c", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert merge(tmp_path / "c", tmp_path / "hf", keys=["a"]).arrays == 1
    with pytest.raises(errors.CheckpointKeyError, match="nothing matches"):
        merge(tmp_path / "c", tmp_path / "x", keys="q.*")
    save(tmp_path / "m", {"__metadata__": np.ones(1)})
    with pytest.raises(errors.CheckpointKeyError, match="reserves"):
        merge(tmp_path / "m", tmp_path / "x")


def test_damage_in_the_source_is_found_and_nothing_is_left(tmp_path):
    save(tmp_path / "c", {"w": np.ones(100)})
    shard = tmp_path / "c" / "w" / "c.0"
    data = bytearray(shard.read_bytes())
    data[9] ^= 1
    shard.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint, match="key 'w'"):
        merge(tmp_path / "c", tmp_path / "hf")
    assert [e.name for e in tmp_path.iterdir()] == ["c"]


def test_safetensors_to_safetensors(kit, tmp_path):
    a = {f"k{i}": np.random.default_rng(i).normal(size=(300, 400)) for i in range(3)}
    save_safetensors(tmp_path / "x.safetensors", a)
    merge(tmp_path / "x.safetensors", tmp_path / "hf", max_shard_bytes=1_000_000)
    assert len(open_checkpoint(tmp_path / "hf")) == 3
    assert all(kit.same(load(tmp_path / "hf")[k], v) for k, v in a.items())


SCRIPT = """
import sys
import numpy as np
from meshtape.storage import merge, reshard, save
src, out = sys.argv[1:]
def peak():  # in kB; getrusage would count the process that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
save(out + "/warm", {"w": np.ones((4, 4))})
reshard(out + "/warm", out + "/warm2")
before = peak()
limit = {"memory_limit": 16 << 20}
for work in (
    lambda: merge(src, out + "/hf", **limit),
    lambda: reshard(src, out + "/columns", mesh={"m": 2}, shardings={"w": {"m": 1}}, **limit),
    lambda: reshard(src, out + "/rows", mesh={"m": 3}, shardings={"w": {"m": 0}}, dtype="float16", **limit),
):
    work()
    print(peak() - before)
"""


def test_memory_is_bounded_by_the_window(kit, tmp_path):
    """200 MB through windows of 16 MB: rows made of several shards, chunks copied as they are, rows cast."""
    w = np.zeros((4096, 12288), "f4")
    w[::7, ::5] = 3
    save(tmp_path / "c", {"w": kit.split(w, kit.Sharding(kit.Host({"x": 4}), (1,)))})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "c"), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    peaks = [int(line) >> 10 for line in done.stdout.split()]
    assert len(peaks) == 3
    assert max(peaks) < 16 + 60, peaks  # MiB: the limit, and what threads and imports take
    for name in ("hf", "columns", "rows"):
        assert np.array_equal(open_checkpoint(tmp_path / name)["w"][2000:2100].astype("f4"), w[2000:2100])


def test_all_that_write_zarr_share_how_it_is_stored():
    """save, save_async, the manager, convert and reshard; where it means nothing it is refused by name."""
    how = {"compression", "pack", "dtype_fallback"}
    own = set(inspect.signature(save).parameters) - {"path", "tree", "message"}  # the last is for repositories alone
    assert set(saving.SaveOptions.__annotations__) == own
    assert set(inspect.signature(save_async).parameters) == {"path", "tree", "then", "options"}
    for fn in (save, convert, CheckpointManager):
        assert how <= set(inspect.signature(fn).parameters), fn
    assert how | {"overwrite"} <= set(TransformOptions.__annotations__) & own


def test_every_way_of_writing_takes_a_dtype_fallback(tmp_path):
    tree = {"w": np.ones((2, 3), ml_dtypes.bfloat16)}
    save(tmp_path / "src", tree)
    manager = CheckpointManager(tmp_path / "run", dtype_fallback="raw")
    background = CheckpointManager(tmp_path / "run2", dtype_fallback="raw", asynchronous=True)
    manager.save(1, tree)
    background.save(1, tree)
    background.wait()
    save_async(tmp_path / "async", tree, dtype_fallback="raw").wait()
    convert(tmp_path / "src", tmp_path / "convert", format="zarr", dtype_fallback="raw")
    reshard(tmp_path / "src", tmp_path / "reshard", mesh={"m": 2}, shardings={"w": {"m": 0}}, dtype_fallback="raw")
    for out in (manager.latest(), background.latest(), tmp_path / "async", tmp_path / "convert", tmp_path / "reshard"):
        said = json.loads((Path(out) / "w" / "zarr.json").read_text())
        assert (said["data_type"], said["attributes"]) == ("uint16", {"meshtape": {"dtype": "bfloat16"}})
        assert np.array_equal(load(out)["w"].__array__().view("u2"), tree["w"].view("u2"))
        verify(out)
    for make in (
        lambda: save(tmp_path / "x", tree, dtype_fallback="int"),
        lambda: save_async(tmp_path / "x", tree, dtype_fallback="int"),
        lambda: CheckpointManager(tmp_path / "x", dtype_fallback="int"),
        lambda: convert(tmp_path / "src", tmp_path / "x", format="zarr", dtype_fallback="int"),
        lambda: merge(tmp_path / "src", tmp_path / "x", dtype_fallback="raw"),
    ):
        with pytest.raises(errors.CheckpointError, match="dtype_fallback="):
            make()
    assert not (tmp_path / "x").exists()
    with pytest.raises(TypeError, match="ovewrite"):
        save_async(tmp_path / "x", tree, ovewrite=True)


def test_merge_reshard_and_convert_share_their_options():
    own = {"src", "dst", "format", "layout", "mesh", "shardings", "max_shard_bytes"}
    assert set(TransformOptions.__annotations__) == set(inspect.signature(convert).parameters) - own
    for fn, mine in ((merge, {"max_shard_bytes"}), (reshard, {"mesh", "shardings"})):
        assert set(inspect.signature(fn).parameters) == {"src", "dst", "options"} | mine
        assert all(f"``{name}``" in fn.__doc__ for name in TransformOptions.__annotations__)
        with pytest.raises(TypeError, match="treads"):
            fn("nowhere", "nothing", treads=2)
