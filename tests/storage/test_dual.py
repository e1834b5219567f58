"""`layout="dual"`: files that are at once shards of Zarr and safetensors files."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest

import meshtape as mt
from meshtape.storage.format import chunk_grid, zarr_format
from meshtape.storage.format.chunk_grid import ChunkGrid

R = np.random.default_rng(0)
TREE = {
    "embed": R.normal(size=(53, 12)).astype("f4"),
    "layers": [{"w": R.normal(size=(6, 5, 16)).astype(ml_dtypes.bfloat16)}, {"w": R.integers(0, 9, (7,))}],
    "eight": R.normal(size=(9, 2)).astype(ml_dtypes.float8_e4m3fn),
    "flags": np.array([[True], [False], [True]]),
    "scalar": np.asarray(np.float32(3.5)),
    "empty": np.zeros((0, 3), "i4"),
}
FLAT = {"embed": TREE["embed"], "layers.0.w": TREE["layers"][0]["w"], "layers.1.w": TREE["layers"][1]["w"]} | {
    k: TREE[k] for k in ("eight", "flags", "scalar", "empty")
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(zarr_format, "TARGET", 300)


def save(where, tree=None, **options):
    mt.save(where, TREE if tree is None else tree, layout="dual", **options)
    return where


def same(a, b, name=""):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), name


def test_meshtape_reads_it(tmp_path):
    ckpt = mt.open_checkpoint(save(tmp_path / "c", step=3))
    assert ckpt.step == 3
    for name, want in FLAT.items():
        same(ckpt[name].read(), want, name)
    for index in (np.s_[5:40], np.s_[3:50:7, 2:9], np.s_[-1], np.s_[:, 3]):
        same(ckpt["embed"][index], TREE["embed"][index])
    same(ckpt["layers.0.w"][1:4, 2:5, 3], TREE["layers"][0]["w"][1:4, 2:5, 3])
    report = mt.storage.verify(tmp_path / "c")
    assert not report.uncovered
    assert mt.storage.diff(tmp_path / "c", save(tmp_path / "again")).equal
    same(mt.open_checkpoint(tmp_path / "c", verify=False)["embed"][50:], TREE["embed"][50:])


def test_others_read_the_very_files(tmp_path):
    zarr = pytest.importorskip("zarr")
    safetensors = pytest.importorskip("safetensors")
    where = save(tmp_path / "c")
    group = zarr.open_group(where, mode="r")
    for name, want in FLAT.items():
        same(group[name][...], want, name)
    same(group["embed"][7:41:3], TREE["embed"][7:41:3])
    for file in where.glob("*/c.*"):
        held = mt.storage.load_safetensors(file)
        name = next(n for n in held if n != zarr_format.DUAL_INDEX)
        same(held[name], FLAT[name], name)
        if name in ("embed", "layers.1.w", "flags"):
            with safetensors.safe_open(file, "np") as f:
                assert set(f.keys()) == {name, zarr_format.DUAL_INDEX}
                same(f.get_tensor(name), FLAT[name], name)
        assert mt.storage.verify(file).files == 1


def test_index_of_hugging_face(tmp_path):
    where = save(tmp_path / "c", documents={"config": {"a": 1}})
    shown = tmp_path / "hf"
    shutil.copytree(where, shown)
    for name in ("meshtape.json", "meshtape.sums", "zarr.json"):
        os.remove(shown / name)
    ckpt = mt.open_checkpoint(shown)
    assert ckpt.kind == "Hugging Face"
    assert not ckpt.skipped
    difference = mt.storage.diff(shown, where)
    assert difference.equal
    assert zarr_format.DUAL_INDEX not in str(difference)
    assert list(mt.open_checkpoint(where / "embed" / "c.0.0")) == ["embed"]
    for name, want in FLAT.items():
        same(ckpt[name].read(), want, name)
    link = where / json.loads((where / "model.safetensors.index.json").read_text())["weight_map"]["embed"]
    assert os.path.samefile(link, where / "embed" / "c.0.0")


def test_copies_of_links_are_compared(tmp_path):
    shutil.copytree(save(tmp_path / "c"), tmp_path / "copy")
    assert mt.storage.verify(tmp_path / "copy").uncovered == []
    link = next((tmp_path / "copy").glob("model-00001-of-*.safetensors"))
    data = bytearray(link.read_bytes())
    data[-9] ^= 1
    link.write_bytes(data)
    with pytest.raises(mt.errors.CorruptCheckpoint, match=link.name):
        mt.storage.verify(tmp_path / "copy")
    link.unlink()
    with pytest.raises(mt.errors.CorruptCheckpoint, match=link.name):
        mt.storage.verify(tmp_path / "copy")


def test_transforms_and_replacing(tmp_path):
    where = save(tmp_path / "c")
    mt.storage.convert(where, tmp_path / "z", format="zarr")
    mt.storage.merge(where, tmp_path / "hf")
    for other in ("z", "hf"):
        ckpt = mt.open_checkpoint(tmp_path / other)
        for name, want in FLAT.items():
            same(ckpt[name].read(), want, name)
    save(where, {"embed": TREE["embed"] + 1}, overwrite=True)
    same(mt.open_checkpoint(where)["embed"].read(), TREE["embed"] + 1)
    mt.save(where, TREE, overwrite=True)
    assert not list(where.glob("model*"))
    save(where, overwrite=True)
    (where / "notes.bin").write_bytes(b"mine")
    with pytest.raises(mt.errors.CheckpointExists, match=r"notes\.bin"):
        save(where, overwrite=True)


def test_transforms_write_it(kit, quick, monkeypatch):
    plain, where = quick / "p", save(quick / "c", step=3)
    mt.save(plain, TREE, step=3)
    whole = {p.relative_to(where): p.read_bytes() for p in sorted(where.rglob("*")) if p.is_file()}
    for i, options in enumerate(
        ({}, {"memory_limit": 1, "threads": 1}, {"mesh": {"m": 3}, "shardings": {"*w": {"m": 0}}})
    ):
        out = quick / f"o{i}"
        mt.convert(plain, out, format="zarr", layout="dual", **options)
        assert not mt.storage.verify(out).uncovered
        for name, want in FLAT.items():
            same(mt.open_checkpoint(out)[name].read(), want, name)
        if i < 2:
            assert {p.relative_to(out): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()} == whole
    for n in (3, 30, 60, 90, 120, 150):
        out = quick / f"k{n}"
        kit.die_at(n, lambda out=out: mt.convert(plain, out, format="zarr", layout="dual"), True)
        mt.convert(plain, out, format="zarr", layout="dual", overwrite=out.exists())
        assert not mt.storage.verify(out).uncovered
    for options, error in (
        ({"format": "safetensors"}, "of format"),
        ({"format": "zarr", "compression": "zstd"}, "compression="),
        ({"format": "zarr", "mesh": {"m": 2}, "shardings": {"embed": {"m": 1}}}, "whole rows"),
    ):
        with pytest.raises(mt.errors.CheckpointError, match=error):
            mt.convert(plain, quick / "bad", layout="dual", **options)
    for name, value in (("pack", True), ("anchor_every", 3)):
        with pytest.raises(mt.errors.CheckpointError, match=f"{name}="):
            mt.CheckpointManager(quick / "bad", layout="dual", **{name: value})
    assert not (quick / "bad").exists()
    manager = mt.CheckpointManager(quick / "run", layout="dual")
    for step in (1, 2):
        manager.save(step, TREE)
    same(mt.storage.load_safetensors(quick / "run" / "step-00000002" / "embed" / "c.0.0")["embed"], TREE["embed"])
    mt.convert(plain, "memory://dual/c", format="zarr", layout="dual")
    mt.storage.verify("memory://dual/c")
    same(mt.open_checkpoint("memory://dual/c")["embed"].read(), TREE["embed"])


def test_blocks_of_a_mesh(tmp_path):
    mesh = mt.Mesh({"data": 2, "model": 2})
    x = mt.asarray(TREE["embed"])
    tree = {"rows": mt.distribute(x, mesh, data=mt.Shard(0)), "all": mt.distribute(x, mesh)}
    where = save(tmp_path / "c", tree)
    ckpt = mt.open_checkpoint(where)
    same(ckpt["rows"].read(), TREE["embed"])
    held = mt.storage.load_safetensors(where / "rows" / "c.1.0")
    same(held["rows"], TREE["embed"][27:])
    said = mt.storage.read_header(where / "rows" / "c.1.0").metadata["meshtape.block"]
    assert json.loads(said) == {"offset": [27, 0], "of": [53, 12]}
    assert not list(where.glob("model*"))
    assert not mt.storage.verify(where).uncovered
    loaded = mt.load(where, like={"rows": mt.distribute(x, mesh, model=mt.Shard(1)), "all": x})
    same(np.asarray(loaded["rows"]), TREE["embed"])
    zarr = pytest.importorskip("zarr")
    same(zarr.open_group(where, mode="r")["rows"][20:40], TREE["embed"][20:40])
    with pytest.raises(mt.errors.CheckpointError, match="whole rows"):
        save(tmp_path / "d", {"w": mt.distribute(x, mesh, model=mt.Shard(1))})
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("tree", "options", "error"),
    [
        ({"w": np.ones(3)}, {"compression": "zstd"}, "compression="),
        ({"w": np.ones(3)}, {"pack": True}, "pack="),
        ({"w": np.ones(3, "c16")}, {}, "safetensors form"),
        ({zarr_format.DUAL_INDEX: np.ones(3)}, {}, "reserve"),
        ({"\ud800": np.ones(3)}, {}, "surrogate"),
        ({"__metadata__": np.ones(3)}, {}, "reserve"),
        ({"__metadata__": np.ones(())}, {}, "reserve"),
        ({"model.safetensors.index.json": np.ones(3)}, {}, "rename"),
    ],
)
def test_refusals(tmp_path, tree, options, error):
    with pytest.raises(mt.errors.CheckpointError, match=error):
        save(tmp_path / "c", tree, **options)
    assert not (tmp_path / "c").exists()
    with pytest.raises(mt.errors.CheckpointError, match="unknown"):
        mt.save(tmp_path / "c", tree, layout="other")


def of_one_array(held):
    """The array of a mapping with one."""
    (array,) = held.values()
    return array


@pytest.fixture(params=["itself", "in a group of others"])
def folder(request, tmp_path):
    """The folder of an array of two blocks, or a group around its checkpoint."""
    home = tmp_path / "home" / "ckpt"
    home.parent.mkdir()
    save(home, {"w": mt.distribute(np.arange(78, dtype="f4").reshape(13, 6), mt.Mesh({"m": 2}), m=mt.Shard(0))})
    if request.param == "itself":
        return home / "w"
    pytest.importorskip("zarr").create_group(str(home.parent))
    return home.parent


def readers(folder, tmp_path):
    """All that read an array at its folder, or the group around."""
    import zarr

    mesh, array = mt.Mesh({"m": 2}), folder if folder.name == "w" else folder / "ckpt" / "w"
    merged = tmp_path / "merged"
    yield lambda: of_one_array(mt.load(folder))
    yield lambda: of_one_array(mt.open_checkpoint(folder))[...]
    yield lambda: zarr.open_group(mt.storage.as_zarr(folder), mode="r")[next(iter(mt.open_checkpoint(folder)))][...]
    yield lambda: mt.merge(folder, merged, overwrite=True) and of_one_array(mt.load(merged))
    yield lambda: mt.from_zarr(array, mesh, m=mt.Shard(0)).load()
    yield lambda: mt.stream(lambda x: mt.max(x, axis=1), mt.from_zarr(array, mesh, m=mt.Shard(1)), memory=2000)


def test_a_flip_is_told_at_the_folder_of_an_array(folder, tmp_path):
    wanted = np.arange(78, dtype="f4").reshape(13, 6)
    for i, read in enumerate(readers(folder, tmp_path)):
        same(read(), wanted if i < 5 else wanted.max(axis=1), str(i))
    assert mt.storage.verify(folder).files > 1
    (shard,) = folder.rglob("c.0.0")
    with open(shard, "r+b") as f:
        f.seek(mt.storage.read_header(shard).data_start + 9)
        f.write(b"\x77")
    for read in readers(folder, tmp_path):
        with pytest.raises(mt.errors.CorruptCheckpoint, match="does not fit its crc32c"):
            read()
    with pytest.raises(mt.errors.CorruptCheckpoint, match=r"c\.0\.0"):
        mt.storage.verify(folder)


@pytest.mark.parametrize("place", ["w", "w/c.0.0", "model-00002-of-00002.safetensors", "."])
def test_every_flip_is_found_by_verify_of_a_part(tmp_path, place):
    """At the folder of an array, of one file, and of the directory as Hugging Face has it."""
    where = save(tmp_path / "c", {"b": np.arange(3), "w": R.normal(size=(13, 6)).astype("f4")})
    if place == ".":
        (where / "meshtape.json").unlink()
    part = where / place
    found = 0
    for file in [part] if part.is_file() else sorted(part.rglob("w/*") if place == "." else part.iterdir()):
        if place == "." and file.name == "zarr.json":
            continue  # of no safetensors
        whole = file.read_bytes()
        for at in {*range(0, len(whole), 41), *range(max(0, len(whole) - 70), len(whole))}:
            with open(file, "r+b") as f:
                f.seek(at)
                f.write(bytes([whole[at] ^ 4]))
            with pytest.raises(mt.errors.CheckpointError):
                mt.storage.verify(part)
            found += 1
            with open(file, "r+b") as f:
                f.write(whole)
    assert found > 70
    mt.storage.verify(part)


def test_every_flip_is_found(tmp_path):
    where = save(tmp_path / "c", {"w": R.normal(size=(13, 6)).astype("f4"), "b": np.arange(3), "s": np.float32(2)})
    found = 0
    for file in sorted(p for p in where.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for at in {*range(0, len(whole), 41), *range(max(0, len(whole) - 8), len(whole))}:
            with open(file, "r+b") as f:
                f.seek(at)
                f.write(bytes([whole[at] ^ 4]))
            with pytest.raises(mt.errors.CheckpointError):
                mt.storage.verify(where)
            found += 1
            with open(file, "r+b") as f:
                f.write(whole)
    assert found > 150
    mt.storage.verify(where)


def test_a_kill_leaves_the_old_or_the_new(kit, quick):
    tree = lambda k: {"w": np.full((40, 3), k), "s": np.asarray(k)}  # noqa: E731
    seen = set()
    for n in range(1, 200, 6):
        home = quick / str(n)
        home.mkdir()
        save(home / "c", tree(1))
        killed = kit.die_at(n, lambda home=home: save(home / "c", tree(2), overwrite=True), True)
        ckpt = mt.open_checkpoint(home / "c")
        now = {*ckpt["w"].read().ravel().tolist(), int(ckpt["s"].read())}
        assert len(now) == 1
        seen |= now
        mt.storage.verify(home / "c")
        save(home / "c", tree(3), overwrite=True)
        assert [e.name for e in home.iterdir()] == ["c"]
        if not killed:
            break
    assert seen == {1, 2}


def test_damage_is_told_when_it_is_read(tmp_path):
    where = save(tmp_path / "c")
    shard = where / "embed" / "c.0.0"
    start = mt.storage.read_header(shard).data_start
    with open(shard, "r+b") as f:
        f.seek(start + 5)
        f.write(b"\0\0")
    with pytest.raises(mt.errors.CorruptCheckpoint, match="chunk"):
        mt.open_checkpoint(where)["embed"][0]
    same(mt.open_checkpoint(where)["embed"][20:], TREE["embed"][20:])


def test_an_object_store_gets_the_shards(tmp_path):
    where = "memory://dual/c"
    save(where, {"w": TREE["embed"]}, overwrite=True)
    same(mt.open_checkpoint(where)["w"][3:9], TREE["embed"][3:9])
    mt.storage.verify(where)


@pytest.mark.parametrize(
    ("grid", "item", "chunk"),
    [
        (((100, 3), (100, 3)), 4, (25, 3)),
        (((7, 2), (3, 2)), 4, (3, 2)),
        (((4, 50, 60), (2, 50, 60)), 4, (1, 1, 60)),
        (((1,), (1,)), 8, (1,)),
        (((3, 1000), (3, 1000)), 1, (1, 250)),
    ],
)
def test_chunks_are_runs_of_rows(grid, item, chunk):
    found = zarr_format.dual_grid(ChunkGrid(*grid, grid[1]), item, "w")
    assert found.chunk == chunk
    assert zarr_format.is_dual_grid(found)
    assert chunk_grid.tiled(found.shape, [found.shard_box(c) for c in found.shards()])


@pytest.mark.slow
def test_tensorstore_and_xarray_read_it(tmp_path):
    ts, xarray = pytest.importorskip("tensorstore"), pytest.importorskip("xarray")
    where = save(tmp_path / "c")
    for name in ("embed", "layers.0.w", "layers.1.w", "eight", "flags"):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{where}/{name}/"}}
        same(ts.open(spec, open=True).result().read().result(), FLAT[name], name)
    seen = xarray.open_zarr(where, zarr_format=3)
    same(seen["embed"][5:9].values, TREE["embed"][5:9])


@pytest.mark.slow
def test_transformers_opens_the_directory(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {n: p.detach() for n, p in model.state_dict().items()}
    where = save(tmp_path / "c", weights, documents={"config": {**config.to_dict(), "dtype": "bfloat16"}})
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert set(info["unexpected_keys"]) <= {zarr_format.DUAL_INDEX}
    for name, want in weights.items():
        assert torch.equal(opened.state_dict()[name], want), name
    (file,) = [f for f in where.glob("model-*") if "lm_head.weight" in load_file(f)]
    assert torch.equal(load_file(file)["lm_head.weight"], weights["lm_head.weight"])


@pytest.mark.slow
def test_the_loader_of_vllm_reads_the_files(tmp_path):
    utils = pytest.importorskip("vllm.model_executor.model_loader.weight_utils", exc_type=ImportError)
    models = pytest.importorskip("vllm.model_executor.models.utils", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    where = save(tmp_path / "c", {"w": TREE["embed"], "b": np.ones(7, np.float32)})
    mt.merge(where, tmp_path / "copy")
    model = torch.nn.Module()
    model.w, model.b = (torch.nn.Parameter(torch.zeros(s)) for s in (TREE["embed"].shape, (7,)))
    for strategy in ("lazy", "eager", "prefetch"):
        held = dict(utils.safetensors_weights_iterator(list(map(str, where.glob("model-*"))), False, strategy))
        assert held.keys() == {"w", "b", zarr_format.DUAL_INDEX}
        same(held["w"].numpy(), TREE["embed"])
    with pytest.raises(ValueError, match=zarr_format.DUAL_INDEX):  # which is why a copy is written for vLLM
        models.AutoWeightsLoader(model).load_weights(held.items())
    copied = utils.safetensors_weights_iterator(list(map(str, (tmp_path / "copy").glob("*.safetensors"))), False)
    assert models.AutoWeightsLoader(model).load_weights(copied) == {"w", "b"}
    same(model.w.detach().numpy(), TREE["embed"])
