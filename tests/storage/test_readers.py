"""Tools that know nothing of meshtape read its files."""

import contextlib
import json
import subprocess
import sys

import numpy as np
import pytest

from meshtape.storage import (
    convert,
    load,
    merge,
    open_checkpoint,
    register_zarr_dtypes,
    reshard,
    save,
    save_safetensors,
    verify,
)
from meshtape.storage.commit.object_commit import _renew_group
from meshtape.storage.stores.store import at


@pytest.fixture
def saved(kit, tmp_path):
    """All dtypes, in shapes with edge chunks, split over a mesh."""
    host = kit.Host({"x": 2, "y": 2})
    tree = {}
    for i, dtype in enumerate(kit.DTYPES):
        for shape, dims in [((), (None, None)), ((7,), (0, None)), ((5, 6), (0, 1)), ((0, 3), (0, 1))]:
            a = kit.random(dtype, shape, i)
            tree[f"{dtype.name}.{len(shape)}{0 in shape}"] = kit.split(a, kit.Sharding(host, dims))
    tree["large"] = kit.split(np.arange(3_000_000, dtype="f8").reshape(1500, 2000), kit.Sharding(host, (1, 0)))
    save(tmp_path / "c", tree)
    return tmp_path / "c", tree


def test_zarr_reads_every_array(kit, saved, recwarn):
    import zarr

    register_zarr_dtypes()
    path, tree = saved
    group = zarr.open(path, mode="r")
    assert set(dict(group.members())) == set(tree)
    for name, a in tree.items():
        assert kit.same(group[name][...], a.whole()), name
        # ... and the array on its own, without the group's consolidated metadata.
        assert kit.same(zarr.open_array(path, path=name, mode="r")[...], a.whole()), name
    assert not [w for w in recwarn if "zarr" in str(w.category).lower()]


def test_plain_zarr_reads_standard_dtypes_in_a_process_without_meshtape(tmp_path):
    save(tmp_path / "c", {"w": np.arange(6.0).reshape(2, 3)})
    code = (
        "import sys, zarr; g = zarr.open(sys.argv[1], mode='r'); "
        "assert g['w'][...].tolist() == [[0, 1, 2], [3, 4, 5]]; assert 'meshtape.storage' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=True, timeout=240)


def test_zarr_detects_a_flipped_bit_in_our_chunks(tmp_path):
    import zarr

    save(tmp_path / "c", {"w": np.ones((4, 4))})
    shard = tmp_path / "c" / "w" / "c.0.0"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open(tmp_path / "c", mode="r")["w"][...]


def test_dask_reads_blocks(saved):
    import dask.array

    path, tree = saved
    d = dask.array.from_zarr(str(path), component="large")
    assert np.array_equal(d[100:1400:7, 3].compute(scheduler="threads"), tree["large"].whole()[100:1400:7, 3])


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_xarray_opens_arrays_of_different_shapes_side_by_side(tmp_path, compression):
    xarray = pytest.importorskip("xarray")
    tree = {"a": np.arange(12.0).reshape(3, 4), "b": {"c": np.arange(5)}, "d": np.ones((4, 4))}
    save(tmp_path / "c", tree, compression=compression)
    ds = xarray.open_zarr(tmp_path / "c")
    assert np.array_equal(ds["a"].values, tree["a"])
    assert np.array_equal(ds["b.c"].values, tree["b"]["c"])
    assert ds["d"].shape == (4, 4)


def test_a_zarr_group_by_others_opens_and_loads(kit, tmp_path):
    import zarr

    g = zarr.open_group(tmp_path / "z", mode="w")
    a = np.arange(60.0).reshape(6, 10)
    g.create_array("x/y", shape=a.shape, chunks=(2, 5), dtype=a.dtype)[...] = a
    ckpt = open_checkpoint(tmp_path / "z")
    assert ckpt.kind == "Zarr"
    assert kit.same(ckpt["x/y"][1:5, ::3], a[1:5, ::3])
    sharding = kit.Sharding(kit.Host({"x": 4}), (1,))
    assert kit.same(load(tmp_path / "z", shardings=lambda *_: sharding)["x/y"].whole(), a)
    zarr.save_array(tmp_path / "one", a)
    assert kit.same(open_checkpoint(tmp_path / "one")["one"][...], a)


def test_safetensors_reads_what_merge_and_our_writer_wrote(kit, tmp_path):
    import ml_dtypes  # noqa: F401 - its import is what lets the reference build bfloat16
    from safetensors import safe_open
    from safetensors.numpy import load_file

    plain = {
        d.name: kit.random(d, (3, 4), i) for i, d in enumerate(kit.DTYPES) if "float8" not in d.name and d != "c16"
    }
    save(tmp_path / "c", plain)
    merge(tmp_path / "c", tmp_path / "hf")
    save_safetensors(tmp_path / "own.safetensors", plain, metadata={"format": "pt"})
    for file in (tmp_path / "hf" / "model.safetensors", tmp_path / "own.safetensors"):
        found = load_file(file)
        assert found.keys() == plain.keys()
        assert all(kit.same(found[k], plain[k]) for k in plain)
        with safe_open(file, "np") as f:
            assert f.metadata().keys() == {"format", "meshtape.crc32c"}
            assert f.metadata()["format"] == "pt"


def test_our_reader_reads_what_safetensors_wrote(kit, tmp_path):
    from safetensors.numpy import save_file

    every = {d.name: kit.random(d, (3, 4), i) for i, d in enumerate(kit.DTYPES) if d != "c16"}
    save_file(every, tmp_path / "x.safetensors")
    got = load(tmp_path / "x.safetensors")
    assert all(kit.same(got[k], every[k]) for k in every)


def test_attributes_of_others_that_are_not_written_are_named(tmp_path):
    import zarr

    group = zarr.create_group(tmp_path / "x")
    t = group.create_array("t", shape=(2, 3), dtype="i2", dimension_names=("y", "x"))
    t[:] = np.arange(6).reshape(2, 3)
    t.attrs.update(scale_factor=0.01, units="K")
    group.create_array("plain", data=np.ones(2))
    told = ["attributes are not written: those of t (scale_factor, units, names of dimensions)"]
    assert convert(tmp_path / "x", tmp_path / "m", format="dcp").notes == told
    t.attrs["wrong"] = float("nan")  # no JSON
    made = convert(tmp_path / "x", tmp_path / "z", format="zarr")
    assert made.notes == ["attributes are not written: those of t (wrong)"]
    assert open_checkpoint(made.path)["t"].attributes == {"scale_factor": 0.01, "units": "K"}
    t.attrs["history"], t.attrs["source"] = "a" * 40_000, "b" * 40_000  # too long together
    made = convert(tmp_path / "x", tmp_path / "y", format="zarr")
    assert made.notes == ["attributes are not written: those of t (wrong, history, source)"]
    assert open_checkpoint(made.path)["t"].attributes == {"scale_factor": 0.01, "units": "K"}


@pytest.mark.parametrize("version", [2, 3])
def test_attributes_of_others_go_along_into_zarr(tmp_path, version):
    xarray = pytest.importorskip("xarray")
    values = np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.5]])
    x = {"units": "m"}
    source = xarray.Dataset(
        {"t": (("y", "x"), values, {"units": "K"}), "plain": ("y", np.ones(2))},
        {"x": ("x", np.arange(3), x), "lat": (("y", "x"), values)},
    )
    packed = {"t": {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -9}, "lat": {"_FillValue": 7.0}}
    source.attrs = {"title": "made here", "levels": [1, 2]}
    source.to_zarr(tmp_path / "a", zarr_format=version, consolidated=False, encoding=packed)
    wanted = xarray.open_zarr(tmp_path / "a", consolidated=False).load()
    report = convert(tmp_path / "a", tmp_path / "b", format="zarr", missing="fill", pack=True)
    again = reshard(tmp_path / "b", tmp_path / "c", mesh={"m": 2}, shardings={"t": {"m": 0}})
    model = merge(tmp_path / "b", tmp_path / "m")  # the texts of a safetensors file carry them along
    back = convert(tmp_path / "m", tmp_path / "n", format="zarr")
    for r in (report, again, model, back):
        assert r.notes == []
        ckpt = open_checkpoint(r.path)
        assert ckpt["t"].attributes["units"] == "K"
        assert ckpt["t"].dimension_names == ["y", "x"]
        assert ckpt["plain"].dimension_names == ["y"]
        assert ckpt.metadata == source.attrs
        if r is not model:
            found = xarray.open_zarr(r.path).load()
            assert {**found.attrs, "meshtape": None} == {**source.attrs, "meshtape": None}
            xarray.testing.assert_identical(wanted.drop_attrs(deep=False), found.drop_attrs(deep=False))
        verify(r.path)
    url = f"memory://attributes/{version}"
    convert(tmp_path / "b", url, format="zarr")
    written = at(url).get("zarr.json")
    at(url).put("zarr.json", b"{}")  # of the checkpoint before, as a kill leaves it
    _renew_group(at(url))
    assert at(url).get("zarr.json") == written
    group = tmp_path / "b" / "zarr.json"
    group.write_text(group.read_text().replace('"K"', '"C"'))
    assert ["zarr.json is missing or damaged" in n for n in reshard(tmp_path / "b", tmp_path / "e").notes] == [True]
    cut = convert(tmp_path / "a", tmp_path / "d", format="zarr", rules="t -> t, cast(float32)", missing="fill")
    assert cut.notes == []
    found = xarray.open_zarr(cut.path).load()
    xarray.testing.assert_identical(wanted.drop_attrs(deep=False), found.drop_attrs(deep=False))


def test_attributes_that_cannot_travel_are_told_and_none_takes_a_reserved_name(tmp_path):
    import zarr
    from safetensors.numpy import load_file, save_file

    group = zarr.create_group(tmp_path / "x", attributes={"when": float("nan")})
    below = group.create_group("below", attributes={"title": "y"})
    for name, said in {
        "nan": {"a": float("nan")},
        "huge": {"a": "b" * 70_000},
        "half": {"a": "\ud800"},
        "deep": {"a": json.loads("[" * 90 + "]" * 90)},
        "ours": {"meshtape": {"dtype": "bfloat16"}, "codecs": [], "shape": [9]},
    }.items():
        below.create_array(name, data=np.arange(3.0)).attrs.update(said)
    told = [
        "attributes of groups below the root are not written: those of below",
        "attributes of the group are not written, as they are no JSON, or above 64 KiB: when",
        "attributes are not written: those of below/half (a), below/huge (a), below/nan (a)",
    ]
    for r in (convert(tmp_path / "x", tmp_path / "z", format="zarr"), merge(tmp_path / "x", tmp_path / "m")):
        assert r.notes == told
        verify(r.path)
        assert open_checkpoint(r.path)["below/ours"].attributes == {"codecs": [], "shape": [9]}
        assert len(json.dumps(open_checkpoint(r.path)["below/deep"].attributes)) > 180
        assert load(r.path)["below/ours"].tolist() == [0, 1, 2]
    assert np.isnan(open_checkpoint(tmp_path / "z").metadata["when"])
    assert load_file(tmp_path / "m" / "model.safetensors").keys() == load(tmp_path / "m").keys()
    for text in (
        '{"": {"attributes": 3, "shape": 1}}',
        "{",
        "[]",
        '{"w": 1}',
        '{"w": {"attributes": 3, "dimension_names": ["x", "y"], "shape": []}}',
        "[" * 99999,
    ):
        save_file({"w": np.ones(3)}, tmp_path / "s", {"meshtape.attributes": text})
        with pytest.warns(UserWarning, match="cannot be read") if "shape" not in text else contextlib.nullcontext():
            ckpt = open_checkpoint(tmp_path / "s")
        assert (ckpt["w"].attributes, ckpt["w"].dimension_names, ckpt.metadata) == ({}, None, {})
        assert convert(ckpt, tmp_path / "t", format="zarr", overwrite=True).notes == []
