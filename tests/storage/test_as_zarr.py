"""Checkpoints of any kind as Zarr v3 hierarchies: a store of zarr-python, and references for kerchunk and icechunk."""

import asyncio
import json
import os

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.storage.serving import virtual_files, zarr_view
from meshtape.storage.serving.served import ServedCheckpoint

zarr = pytest.importorskip("zarr")
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest  # noqa: E402
from zarr.core.buffer import default_buffer_prototype  # noqa: E402

BUFFER = default_buffer_prototype()


def tree():
    r = np.random.default_rng(0)
    return {
        "model.embed.weight": r.normal(size=(50, 12)).astype("f4"),
        "half": r.normal(size=(7, 3, 2)).astype(ml_dtypes.bfloat16),
        "eight": r.normal(size=(9,)).astype(ml_dtypes.float8_e4m3fn),
        "scalar": np.asarray(np.float64(3.5)),
        "empty": np.zeros((0, 3), "i4"),
        "flags": np.array([True, False, True]),
        "complex": (r.normal(size=(4,)) + 1j).astype("c8"),
    }


def same(group, held, names=None):
    for name in names or held:
        got, want = np.asarray(group[name][...]), np.asarray(held[name])
        assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes()), name


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(virtual_files, "_WINDOW", 200)
    monkeypatch.setattr(zarr_view, "LIMIT", 500)
    monkeypatch.setattr(zarr_view, "_COMPUTED", 500)


def safetensors(where):
    path = os.fspath(where / "model.safetensors")
    mt.storage.save_safetensors(path, tree())
    return path


def hugging_face(where):
    mt.save(where / "ours", {k: v for k, v in tree().items() if k != "complex"})
    mt.storage.merge(where / "ours", where / "hf", max_shard_bytes=1500)
    return where / "hf"


def ours(where):
    mt.save(where / "ours", tree())
    return where / "ours"


def compressed(where):
    mt.save(where / "zstd", tree(), compression="zstd")
    return where / "zstd"


def mapped(where):
    return mt.open_checkpoint(safetensors(where))


@pytest.mark.parametrize("make", [safetensors, hugging_face, ours, compressed, mapped])
def test_every_kind_opens_as_zarr(tmp_path, make):
    made = make(tmp_path)
    store = mt.storage.as_zarr(made)
    group = zarr.open_group(store, mode="r")
    assert group.metadata.consolidated_metadata is not None
    same(group, tree(), list(mt.open_checkpoint(made)))
    np.testing.assert_array_equal(group["model.embed.weight"][3:40:7, 2], tree()["model.embed.weight"][3:40:7, 2])
    assert group["model.embed.weight"].metadata.dimension_names[0] == "model.embed.weight.0"


@pytest.mark.parametrize("form", ["foreign", "zarr", "safetensors"])
def test_nested_groups_open_under_their_names(tmp_path, form):
    names = {
        "time": np.arange(3.0),
        "sub/deep/w": np.arange(3.0),
        "sub/deep/time": np.arange(3.0),
        "sub/a%2Fb": np.ones(3),
    }
    for name, x in names.items():
        zarr.create_array(f"{tmp_path}/foreign", name=name, data=x, dimension_names=["time"], attributes={"units": "m"})
    if form != "foreign":
        mt.storage.convert(tmp_path / "foreign", tmp_path / form, format=form)
    store = mt.storage.as_zarr(tmp_path / form)
    for group in (zarr.open_group(store, mode="r"), zarr.open_group(store, mode="r", use_consolidated=False)):
        for name in ("time", "sub/deep/w", "sub/deep/time"):
            np.testing.assert_array_equal(group[name][...], names[name])
        assert sorted(group["sub/deep"].array_keys()) == ["time", "w"]
        assert dict(group["sub/deep/w"].attrs) == {"units": "m"}
    assert ServedCheckpoint(tmp_path / form).find("zarr/sub").names == ("zarr.json", "a~252Fb/", "deep/")
    xarray = pytest.importorskip("xarray")
    deep = xarray.open_zarr(store, group="sub/deep")
    assert list(deep.w.dims) == list(deep.indexes) == ["time"]
    if form == "safetensors":
        assert "sub/deep/zarr.json" in mt.storage.zarr_references(tmp_path / form)["refs"]


@pytest.mark.parametrize("names", [["g1/w", "g1/g2/w", "b/w"], ["a-b/w", "a/w", "a/b/w"], ["b/w", "g/h/w", "g/w"]])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_groups_in_groups_open_in_any_order(tmp_path, names, zarr_format):
    """By consolidated metadata, which zarr-python reads in the order that it writes."""
    held = zarr.open_group(tmp_path / "z", mode="w", zarr_format=zarr_format)
    for name in names:
        held.create_array(name, data=np.ones(2))
    held.create_group("empty", attributes={"note": 1})
    held.create_group("g1/e~f/deep" if "g1/w" in names else "g/none")
    held["empty"].create_group("é?")
    mt.convert(tmp_path / "z", tmp_path / "c", format="zarr")
    wanted = {n.replace("é?", "~C3~A9~3F").replace("~f", "~7Ef") for n, _ in held.members(max_depth=None)}
    view = zarr.open_group(mt.storage.as_zarr(tmp_path / "z"), mode="r")
    assert {n for n, _ in view.members(max_depth=None)} == wanted
    assert dict(view["empty"].attrs) == {"note": 1}
    listed = zarr.open_group(mt.storage.as_zarr(tmp_path / "z"), mode="r", use_consolidated=False)
    assert {n for n, _ in listed.members(max_depth=None)} == wanted
    for store in (mt.storage.as_zarr(tmp_path / "z"), mt.storage.as_zarr(tmp_path / "c")):
        opened = zarr.open_group(store, mode="r")
        assert all(opened[name][...].tolist() == [1, 1] for name in names)
    part = mt.storage.as_zarr(mt.open_checkpoint(tmp_path / "z"))
    assert part._view.nodes == mt.storage.as_zarr(tmp_path / "z")._view.nodes


def test_rows_of_raw_tensors_are_ranges(tmp_path):
    path = safetensors(tmp_path)
    view = zarr_view.ZarrView(mt.open_checkpoint(path))
    assert view.grids["model.embed.weight"].chunk == (10, 12)
    chunk = view.find("model.embed.weight/c/2/0")
    found = chunk.stored(48, 96)
    assert (found.path, found.stored_nbytes) == (path, 48)
    assert found.start == view.tensors["model.embed.weight"].start + (20 * 12 + 12) * 4
    np.testing.assert_array_equal(virtual_files.read(chunk, 48, 96).view("f4"), tree()["model.embed.weight"][21])


def test_store_contract(tmp_path):
    store = mt.storage.as_zarr(safetensors(tmp_path))
    data = tree()["model.embed.weight"].tobytes()[:480]

    async def look():
        key = "model.embed.weight/c/0/0"
        ranges = [
            None,
            RangeByteRequest(5, 9),
            OffsetByteRequest(470),
            SuffixByteRequest(7),
            RangeByteRequest(470, 999),
        ]
        found = await store.get_partial_values(BUFFER, [(key, r) for r in ranges])
        assert [f.to_bytes() for f in found] == [data, data[5:9], data[470:], data[-7:], data[470:]]
        assert await store.exists(key)
        assert await store.getsize(key) == 480
        for odd in (
            "nothing/c/0",
            "model.embed.weight/c/5/0",
            "model.embed.weight/c/00/0",
            "model.embed.weight/c/0",
            "../x",
            "",
        ):
            assert (await store.exists(odd), await store.get(odd, BUFFER)) == (False, None), odd
        every = [k async for k in store.list()]
        assert len(every) == len(set(every))
        assert all([await store.exists(k) for k in every])
        assert {k async for k in store.list_dir("")} == {"zarr.json", *tree()}
        assert {k async for k in store.list_dir("scalar")} == {"zarr.json", "c"}
        assert [k async for k in store.list_prefix("scalar/")] == ["scalar/zarr.json", "scalar/c"]
        for write in (store.set("a", BUFFER.buffer.from_bytes(b"x")), store.delete("scalar/c")):
            with pytest.raises(mt.errors.StoreError, match="can only be read"):
                await write

    asyncio.run(look())


def test_damage_and_replacement_are_told(tmp_path):
    path = safetensors(tmp_path)
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last ^ 1]))
    group = zarr.open_group(mt.storage.as_zarr(path), mode="r")
    with pytest.raises(mt.errors.CorruptCheckpoint, match="crc32c"):
        group["flags"][...]
    held = ours(tmp_path)
    stored = zarr.open_group(mt.storage.as_zarr(held), mode="r")
    shard = held / "model.embed.weight" / "c.0.0"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    with pytest.raises(mt.errors.CorruptCheckpoint, match=r"model\.embed\.weight"):
        stored["model.embed.weight"][...]
    mt.storage.save_safetensors(path, tree(), overwrite=True)
    with pytest.raises(mt.errors.CheckpointReplaced):
        group["half"][...]


def test_types_without_a_form_in_zarr(tmp_path):
    path = os.fspath(tmp_path / "a.safetensors")
    scale = np.arange(4, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    mt.storage.save_safetensors(path, {"scale": scale, "w": np.ones(2)})
    group = zarr.open_group(mt.storage.as_zarr(path), mode="r")
    assert group["scale"].attrs["dtype"] == "float8_e8m0fnu"
    assert group["scale"][...].tolist() == [0, 1, 2, 3]


def test_references(tmp_path):
    path = safetensors(tmp_path)
    said = json.loads(json.dumps(mt.storage.zarr_references(path)))
    assert said["version"] == 1
    for name, want in tree().items():
        meta = json.loads(said["refs"][f"{name}/zarr.json"])
        chunk = meta["chunk_grid"]["configuration"]["chunk_shape"]
        out = np.zeros([-(-n // c) * c for n, c in zip(want.shape, chunk, strict=True)], want.dtype)
        for key, ref in said["refs"].items():
            if key.startswith(f"{name}/c"):
                coord = [int(i) for i in key.split("/")[2:]]
                with open(ref[0], "rb") as f:
                    f.seek(ref[1])
                    raw = f.read(ref[2])
                place = tuple(slice(i * c, (i + 1) * c) for i, c in zip(coord, chunk, strict=True))
                out[(*place, ...)] = np.frombuffer(raw, want.dtype).reshape(chunk)
        assert out[(*map(slice, want.shape), ...)].tobytes() == want.tobytes(), name
    with pytest.raises(mt.errors.CheckpointError, match="one run of bytes"):
        mt.storage.zarr_references(ours(tmp_path))


def test_a_last_chunk_stays_in_its_file(tmp_path):
    path = os.fspath(tmp_path / "a.safetensors")
    mt.storage.save_safetensors(path, {"w": np.arange(53 * 12, dtype="f4").reshape(53, 12)})
    refs = mt.storage.zarr_references(path)["refs"]
    assert max(r[1] + r[2] for k, r in refs.items() if "/c" in k) <= os.path.getsize(path)


@pytest.mark.slow
def test_fsspec_opens_the_references(tmp_path):
    fsspec, xarray = pytest.importorskip("fsspec"), pytest.importorskip("xarray")
    from zarr.storage import FsspecStore

    path = safetensors(tmp_path)
    fs = fsspec.filesystem("reference", fo=mt.storage.zarr_references(path), remote_protocol="file", asynchronous=True)
    same(zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r"), tree())
    seen = xarray.open_zarr(mt.storage.as_zarr(path), zarr_format=3, consolidated=True)
    np.testing.assert_array_equal(seen["model.embed.weight"].values, tree()["model.embed.weight"])


@pytest.mark.slow
def test_icechunk_commits_the_references(tmp_path):
    icechunk = pytest.importorskip("icechunk")
    path = safetensors(tmp_path)
    place = f"file://{tmp_path}/"
    config = icechunk.RepositoryConfig.default()
    config.set_virtual_chunk_container(
        icechunk.VirtualChunkContainer(place, icechunk.local_filesystem_store(os.fspath(tmp_path)))
    )
    storage = icechunk.local_filesystem_storage(os.fspath(tmp_path / "repo"))
    repo = icechunk.Repository.create(storage, config, authorize_virtual_chunk_access={place: None})
    snapshot = mt.storage.icechunk_references(path, repo, message="step 1")
    assert next(iter(repo.ancestry(branch="main"))).id == snapshot
    same(zarr.open_group(repo.readonly_session("main").store, mode="r"), tree())


def test_a_repository_must_be_open(tmp_path):
    mt.storage.save_safetensors(path := tmp_path / "m.safetensors", {"w": np.ones(3, "f4")})
    with pytest.raises(mt.errors.CheckpointError, match=r"takes an open icechunk\.Repository, got '/repo'"):
        mt.storage.icechunk_references(path, "/repo")


def test_a_huge_shape_takes_no_memory(tmp_path):
    shape = (1 << 40, 1 << 18)  # in chunks of one element
    made = zarr.create_array(tmp_path / "z", shape=shape, chunks=(1, 1), dtype="u1", fill_value=7)
    made[0, 1] = 3
    view = zarr.open_group(mt.storage.as_zarr(tmp_path / "z"), mode="r")["z"]
    assert view.shape == shape
    with pytest.warns(UserWarning, match="are not there"):
        assert view[0, :3].tolist() == [7, 3, 7]
    assert next(iter(mt.open_checkpoint(tmp_path / "z").values())).shape == shape


def test_attributes_that_no_json_holds_are_named(tmp_path):
    """Those beside them are shown, of groups as of arrays."""
    group = zarr.open_group(tmp_path / "z", mode="w", attributes={"nan": float("nan"), "kept": 1})
    group.create_group("g", attributes={"huge": "x" * 100_000, "kept": 2})
    group.create_array("g/w", data=np.ones(2), attributes={"inf": float("inf"), "kept": 3})
    with pytest.warns(UserWarning, match=r"no JSON, or above 64 KiB: the group \(nan\), g \(huge\), g/w \(inf\)$"):
        store = mt.storage.as_zarr(tmp_path / "z")
    view = zarr.open_group(store, mode="r")
    assert [dict(x.attrs) for x in (view, view["g"], view["g/w"])] == [{"kept": 1}, {"kept": 2}, {"kept": 3}]
    notes = " ".join(mt.convert(tmp_path / "z", tmp_path / "c", format="zarr").notes)
    assert "no JSON, or above 64 KiB: nan" in notes
    assert "g/w (inf)" in notes
    assert dict(zarr.open_group(tmp_path / "c", mode="r").attrs)["kept"] == 1
