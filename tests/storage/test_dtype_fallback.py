"""``save(dtype_fallback="raw")``: zarr-python opens the group where meshtape is not installed; meshtape reads the true
types."""

import json
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape import errors, storage

SMALL = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}

# Run with the types of meshtape taken away, as where it is not installed.
_STRANGER = """
import importlib.metadata, sys
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **given: () if given.get("group") == "zarr.data_type" else real(**given)
import numpy as np, zarr
from zarr.core.dtype import data_type_registry
data_type_registry._lazy_load_list.clear()
assert "meshtape" not in sys.modules
group = zarr.open_group(sys.argv[1], mode="r")
for name, array in sorted(group.arrays()):
    print(name, array.dtype, array[...].tobytes().hex())
assert "meshtape" not in sys.modules
"""


def _tree(kit):
    return {name: kit.random(np.dtype(t), (5, 3)) for name, t in SMALL.items()} | {
        "scalar": np.array(1.5, ml_dtypes.bfloat16),
        "plain": np.arange(3.0, dtype="f4"),
    }


def _stranger(where):
    return subprocess.run([sys.executable, "-P", "-c", _STRANGER, where], capture_output=True, text=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_stranger_opens_the_whole_group(kit, tmp_path, compression):
    tree = _tree(kit)
    mt.save(tmp_path / "raw", tree, dtype_fallback="raw", compression=compression)
    done = _stranger(tmp_path / "raw")
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    for name, a in tree.items():
        wanted = "float32" if name == "plain" else "uint16" if a.itemsize == 2 else "uint8"
        assert found[name] == [wanted, a.tobytes().hex()]


def test_by_default_a_stranger_is_told_the_names(kit, tmp_path):
    mt.save(tmp_path / "a", _tree(kit))
    assert _stranger(tmp_path / "a").returncode != 0
    said = json.loads((tmp_path / "a" / "bfloat16" / "zarr.json").read_text())
    assert (said["data_type"], said["attributes"]) == ("bfloat16", {})


def test_meshtape_reads_the_true_types(kit, tmp_path):
    tree = _tree(kit)
    report = mt.save(tmp_path / "raw", tree, dtype_fallback="raw")
    assert report.arrays == len(tree)
    ckpt, loaded = mt.open_checkpoint(tmp_path / "raw"), mt.load(tmp_path / "raw")
    for name, a in tree.items():
        assert ckpt[name].dtype == a.dtype
        assert kit.same(loaded[name], a)
    assert kit.same(ckpt["bfloat16"][1:3, 2], tree["bfloat16"][1:3, 2])
    assert mt.verify(tmp_path / "raw").arrays == len(tree)
    mt.merge(tmp_path / "raw", tmp_path / "m")
    assert kit.same(mt.load(tmp_path / "m")["float8_e5m2"], tree["float8_e5m2"])
    storage.convert(tmp_path / "raw", tmp_path / "z", format="zarr")
    assert json.loads((tmp_path / "z" / "bfloat16" / "zarr.json").read_text())["data_type"] == "bfloat16"
    mt.save_async(tmp_path / "later", tree, dtype_fallback="raw").wait()
    assert (tmp_path / "later" / "bfloat16" / "zarr.json").read_bytes() == (
        tmp_path / "raw" / "bfloat16" / "zarr.json"
    ).read_bytes()


def test_an_array_alone_still_names_its_type(kit, tmp_path):
    """Outside of the checkpoint, without a manifest: the attribute says what the integers are."""
    tree = _tree(kit)
    mt.save(tmp_path / "raw", tree, dtype_fallback="raw")
    import zarr

    zarr.create_group(str(tmp_path / "other"))
    for name in SMALL:
        shutil.copytree(tmp_path / "raw" / name, tmp_path / "other" / name)
    loaded = mt.load(tmp_path / "other")
    for name in SMALL:
        assert kit.same(loaded[name], tree[name])


def test_ranks_write_it_too(kit, tmp_path):
    sharding = kit.Sharding(kit.Host({"a": 2}), (0,))
    a = kit.random(np.dtype(ml_dtypes.bfloat16), (6, 4))
    mt.save(tmp_path / "raw", {"w": kit.split(a, sharding)}, dtype_fallback="raw")
    assert json.loads((tmp_path / "raw" / "w" / "zarr.json").read_text())["data_type"] == "uint16"
    assert kit.same(mt.load(tmp_path / "raw")["w"], a)


def test_another_word_is_refused(tmp_path):
    with pytest.raises(errors.CheckpointError, match=r"dtype_fallback='bits' is unknown"):
        mt.save(tmp_path / "a", {"w": np.ones(2)}, dtype_fallback="bits")
    assert not (tmp_path / "a").exists()
