"""Small arrays share safetensors files: the same values on every way, few requests, and nothing damaged or swapped that
passes."""

import itertools
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors
from meshtape.storage import (
    CheckpointManager,
    LoadReport,
    convert,
    diff,
    load,
    merge,
    open_checkpoint,
    reshard,
    save,
    save_async,
    save_safetensors,
    verify,
)
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.format import manifest

GOLDEN = Path(__file__).parent / "golden" / "v2"


def packs_of(root):
    return sorted(f for f in os.listdir(root) if f.startswith("pack-"))


@pytest.mark.parametrize("parts", [None, (1,), (3,), (2, 2)], ids=str)
def test_every_dtype_and_shape_survives_p_to_q(kit, tmp_path, parts):
    values, tree = {}, {}
    rng = np.random.default_rng(3)
    options = None if parts is None else {n: kit.shardings(n, parts) for n in range(4)}
    for i, (dtype, shape) in enumerate(itertools.product(kit.DTYPES, kit.SHAPES)):
        name = f"{dtype.name}-{shape}"
        values[name] = tree[name] = kit.random(dtype, shape, i)
        if options is not None:
            tree[name] = kit.split(values[name], options[len(shape)][rng.integers(len(options[len(shape)]))])
    save(tmp_path / "c", tree, pack=True)
    assert packs_of(tmp_path / "c")
    verify(tmp_path / "c")
    loaded, ckpt = load(tmp_path / "c"), open_checkpoint(tmp_path / "c")
    assert list(loaded) == list(values)
    for name, a in values.items():
        assert kit.same(loaded[name], a), name
        if a.ndim:
            assert kit.same(ckpt[name][-1:], a[-1:]), name
    onto = kit.shardings(1, (4,))[1].mesh

    def choose(path, shape, dtype):
        return kit.Sharding(onto, (0,)) if shape else None

    report = LoadReport()
    got = load(tmp_path / "c", shardings=choose, report=report)
    for name, a in values.items():
        if a.ndim:
            for rank, block in got[name].blocks.items():
                assert kit.same(block, a[got[name].sharding.box(a.shape, rank).slices]), (name, rank)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree_with_any_threshold(kit, quick, data):
    host = kit.Host({"x": data.draw(st.integers(1, 5))})
    values, tree = {}, {}
    for i in range(data.draw(st.integers(1, 6))):
        shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
        values[f"a{i}"] = a = kit.random(data.draw(st.sampled_from(kit.DTYPES)), shape, i)
        dims = data.draw(st.sampled_from(["local", None, *range(len(shape))]))
        tree[f"a{i}"] = a if dims == "local" else kit.split(a, kit.Sharding(host, (dims,)))
    shutil.rmtree(quick / "c", ignore_errors=True)
    save(quick / "c", tree, pack=data.draw(st.sampled_from([0, 1, 16, 64, True, False])))
    verify(quick / "c")
    got, ckpt = load(quick / "c"), open_checkpoint(quick / "c")
    for name, a in values.items():
        assert kit.same(got[name], a)
        index = tuple(slice(*sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in a.shape)
        assert kit.same(ckpt[name][index], a[index])


def test_the_real_reader_of_safetensors_finds_what_the_group_names(tmp_path):
    """As the format page says: attributes of the group, then safetensors alone."""
    numpy_reader = pytest.importorskip("safetensors.numpy")
    a, b = np.arange(12.0).reshape(3, 4), np.float32(2.5)
    save(tmp_path / "c", {"layers": [{"w": a}], "b": b, "big": np.zeros(1 << 18)}, pack=True)
    group = json.loads((tmp_path / "c" / "zarr.json").read_bytes())
    assert group["attributes"]["meshtape"] == {"version": 2, "packs": ["pack-local-00000.safetensors"]}
    found = {}
    for file in group["attributes"]["meshtape"]["packs"]:
        found |= numpy_reader.load_file(tmp_path / "c" / file)
    assert sorted(found) == ["b", "layers.0.w"]
    assert np.array_equal(found["layers.0.w"], a)
    assert found["b"] == b
    import zarr

    assert [name for name, _ in zarr.open(tmp_path / "c", mode="r").arrays()] == ["big"]


def test_packs_of_split_arrays_are_files_of_torch_distributed(kit, tmp_path):
    """Each block has the name of its array, and says where it lies in it."""
    host = kit.Host({"x": 3})
    a = np.arange(28.0).reshape(7, 4)
    save(tmp_path / "c", {"a": kit.split(a, kit.Sharding(host, (0,))), "s": kit.split(np.ones(3), kit.Sharding(host, (None,)))}, pack=True)  # fmt: skip
    packs = packs_of(tmp_path / "c")
    assert len(packs) == 3  # the replicated one goes where a pack is in any case
    blocks = np.full((7, 4), np.nan)
    for file in packs:  # by safetensors alone
        with pytest.importorskip("safetensors").safe_open(tmp_path / "c" / file, "np") as pack:
            (row, column) = json.loads(pack.metadata()["DCP_SHARDING_INFO"])["a"]["saved_offsets"]
            part = pack.get_tensor("a")
            blocks[row : row + part.shape[0], column : column + part.shape[1]] = part
    assert np.array_equal(blocks, a)
    (tmp_path / "d").mkdir()
    for file in packs:  # under names of torch's: those of ours without a manifest are an incomplete checkpoint
        shutil.copy(tmp_path / "c" / file, tmp_path / "d" / file.replace("pack", "shard"))
    others = load(tmp_path / "d")
    assert open_checkpoint(tmp_path / "d").kind == "PyTorch DCP"
    assert kit.same(others["a"], a)
    assert kit.same(others["s"], np.ones(3))


def test_few_requests_for_many_arrays(s3):
    tree = {f"w{i}": np.full((8, i % 7 + 1), i, np.float32) for i in range(300)}
    s3.proxy.reset()
    save(f"{s3.url}/c", tree)
    assert sum(method in ("PUT", "POST") for method, _ in s3.proxy.log) <= 20
    s3.proxy.reset()
    got = load(f"{s3.url}/c")
    assert sum(method == "GET" for method, _ in s3.proxy.log) <= 20
    for name, a in tree.items():
        assert np.array_equal(np.asarray(got[name]), a)
    s3.proxy.reset()
    assert np.array_equal(open_checkpoint(f"{s3.url}/c")["w20"][2:3, 1], tree["w20"][2:3, 1])
    assert s3.proxy.sent < 200_000  # the manifest, and one block
    s3.proxy.reset()
    assert verify(f"{s3.url}/c").arrays == 300
    assert sum(method == "GET" for method, _ in s3.proxy.log) <= 20


def gets(s3, work):
    """(what a call returned, requests that read an object)."""
    s3.proxy.reset()
    out = work()
    return out, sum(method == "GET" and "list-type" not in path for method, path in s3.proxy.log)


def test_a_pack_is_a_request_for_all_that_read_array_after_array(kit, s3, tmp_path):
    """merge, convert, diff and verify of arrays of four ranks: four packs, and the manifests."""
    host = kit.Host({"x": 4})
    values = {f"w{i}": np.arange(8.0 * (i % 7 + 1)).reshape(8, -1) + i for i in range(60)}
    tree = {n: kit.split(a, kit.Sharding(host, (0,))) for n, a in values.items()}
    save(f"{s3.url}/c", tree)
    save(f"{s3.url}/d", tree | {"w50": kit.split(values["w50"] + 1, kit.Sharding(host, (0,)))})
    rule = "w5 -> v, permute([1, 0])"
    works = {
        "merge": (lambda: merge(f"{s3.url}/c", tmp_path / "hf"), 8),
        "merge by rules": (lambda: merge(f"{s3.url}/c", tmp_path / "hf2", rules=rule, dtype="float32"), 8),
        "convert": (lambda: convert(f"{s3.url}/c", tmp_path / "z", format="zarr"), 8),
        "one window at a time": (
            lambda: convert(f"{s3.url}/c", tmp_path / "z1", format="zarr", threads=1, pack=True),
            8,
        ),
        "reshard": (
            lambda: reshard(f"{s3.url}/c", tmp_path / "r", mesh={"y": 2}, shardings={"*": {"y": 0}}, pack=True),
            8,
        ),
        "diff": (lambda: diff(f"{s3.url}/c", f"{s3.url}/d"), 16),
        "verify": (lambda: verify(f"{s3.url}/c"), 10),
        "a slice": (lambda: open_checkpoint(f"{s3.url}/c")["w9"][:], 8),
        "a slice with steps": (lambda: open_checkpoint(f"{s3.url}/c")["w9"][::3, ::2], 8),
        "rows of one rank": (lambda: open_checkpoint(f"{s3.url}/c")["w9"][2:4], 5),
    }
    found, counts = {}, {}
    for name, (work, most) in works.items():
        found[name], counts[name] = gets(s3, work)
        assert counts[name] <= most, counts
    for out in ("hf", "z", "z1", "r"):
        got = load(tmp_path / out)
        assert all(kit.same(got[n], a) for n, a in values.items()), out
    got = load(tmp_path / "hf2")
    assert np.array_equal(np.asarray(got["v"]), values["w5"].astype("f4").T)
    assert [d.name for d in found["diff"].arrays] == ["w50"]
    assert found["diff"].equal == 59
    assert kit.same(found["a slice"], values["w9"])
    assert kit.same(found["a slice with steps"], values["w9"][::3, ::2])


def test_small_tensors_of_one_safetensors_object_are_read_together(kit, s3, tmp_path):
    values = {f"w{i}": np.arange(8.0 * (i % 7 + 1)).reshape(8, -1) + i for i in range(60)}
    save(tmp_path / "c", values)
    merge(tmp_path / "c", f"{s3.url}/hf", max_shard_bytes=10_000)
    files = len(json.loads((Path(merge(tmp_path / "c", tmp_path / "hf", max_shard_bytes=10_000).path) / "model.safetensors.index.json").read_bytes())["metadata"]["meshtape.crc32c"]) - 1  # fmt: skip
    for work in (
        lambda: convert(f"{s3.url}/hf", tmp_path / "z", format="zarr"),
        lambda: verify(f"{s3.url}/hf"),
        lambda: diff(f"{s3.url}/hf", tmp_path / "c"),
    ):
        _, count = gets(s3, work)
        assert count <= 4 * files + 6, (count, files)  # of each: its length, header and tensors
    got = load(tmp_path / "z")
    assert all(kit.same(got[n], a) for n, a in values.items())


@pytest.mark.parametrize("memory", [1, 3_000, 20_000])
def test_little_memory_reads_ahead_less_and_the_same(kit, s3, tmp_path, memory):
    values = {f"w{i}": np.arange(8.0 * (i % 7 + 1)).reshape(8, -1) + i for i in range(40)}
    save(f"{s3.url}/c", values)
    _, count = gets(s3, lambda: convert(f"{s3.url}/c", tmp_path / "z", format="zarr", memory_limit=memory))
    assert count <= 46  # never more than one for each array
    assert diff(f"{s3.url}/c", tmp_path / "z", memory_limit=memory).same


def test_columns_of_a_large_array_beside_a_small_one_that_is_read_ahead(tmp_path):
    pytest.importorskip("obstore")
    w, where = np.arange(8.0 * (1 << 18)).reshape(8, -1), f"memory://columns-{os.getpid()}/a.safetensors"
    save_safetensors(where, {"w": w, "small": np.ones(10)})
    convert(where, tmp_path / "c", format="safetensors", rules="w -> left, right, split(axis=1)")
    got = load(tmp_path / "c")
    assert np.array_equal(np.concatenate([got["left"], got["right"]], axis=1), w)


def test_a_pack_that_is_damaged_or_replaced_on_the_way_is_told(kit, s3, tmp_path):
    values = {f"w{i}": np.arange(8.0) + i for i in range(20)}
    save(f"{s3.url}/c", values)
    from meshtape.storage.stores import store as stores

    store, name = stores.at(f"{s3.url}/c"), "pack-local-00000.safetensors"
    data = store.get(name)
    store.put(name, data[:-3] + b"\1" + data[-2:])
    for work in (
        lambda: merge(f"{s3.url}/c", tmp_path / "hf"),
        lambda: diff(f"{s3.url}/c", f"{s3.url}/c"),
    ):
        with pytest.raises(errors.CorruptCheckpoint, match="does not fit its crc32c"):
            work()
    store.put(name, data[:-8])
    with pytest.raises(errors.CorruptCheckpoint, match="the manifest says"):
        merge(f"{s3.url}/c", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", ["packs", "safetensors"])
@pytest.mark.parametrize("when", ["before anything is read", "after some was read"])
def test_a_source_that_is_replaced_while_it_is_read_ahead(tmp_path, kind, when):
    """What was fetched belongs to the generation that was opened: the result is of one generation, or there is none."""
    pytest.importorskip("obstore")
    place = f"memory://ahead-{os.getpid()}-{kind}-{len(when)}"

    def put(value):
        tree = {f"w{i}": np.full(50, value, np.float32) for i in range(30)}
        if kind == "packs":
            save(f"{place}/c", tree, overwrite=True)
        else:
            save_safetensors(f"{place}/c/model.safetensors", tree, overwrite=True)

    put(1)
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == (1 if when.startswith("before") else 5):
            put(2)

    for act in (merge, lambda a, b, **k: convert(a, b, format="zarr", **k)):
        put(1)
        calls.clear()
        with pytest.raises(errors.CheckpointReplaced):
            act(f"{place}/c", tmp_path / "out", threads=1, progress=progress)
        assert not (tmp_path / "out").exists()
        act(f"{place}/c", tmp_path / "out")
        assert {float(x) for a in load(tmp_path / "out").values() for x in np.asarray(a)} == {2.0}
        shutil.rmtree(tmp_path / "out")


def test_few_files_for_many_ranks(kit, quick):
    host = kit.Host({"x": 200}, processes=2)
    rows = {f"w{i}": np.arange(400.0) + i for i in range(8)}
    norm = {f"n{i}": np.arange(5.0) + i for i in range(8)}
    tree = {n: kit.split(a, kit.Sharding(host, (0,))) for n, a in rows.items()}
    save(quick / "c", tree, pack=True)
    assert sum(len(files) for _, _, files in os.walk(quick / "c")) == 200 + 2
    got = load(quick / "c")
    assert all(kit.same(got[n], a) for n, a in rows.items())
    tree = {n: kit.split(a, kit.Sharding(host, (None,))) for n, a in norm.items()}
    save(quick / "d", tree, pack=True)
    assert len(packs_of(quick / "d")) == 1  # of 200 ranks that hold them, one writes


def test_a_flip_of_any_byte_of_a_pack_is_found(tmp_path):
    save(tmp_path / "c", {"a": np.arange(6, dtype="u1"), "b": np.float32(1), "c": [np.arange(3.0)]}, pack=True)
    path = tmp_path / "c" / packs_of(tmp_path / "c")[0]
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(errors.CorruptCheckpoint, match="pack-local-00000"):
            verify(tmp_path / "c")
    for cut in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(cut)
        with pytest.raises(errors.CorruptCheckpoint, match="pack-local-00000"):
            verify(tmp_path / "c")
        with pytest.raises(errors.CorruptCheckpoint, match="pack-local-00000"):
            load(tmp_path / "c")
    path.unlink()
    for read in (load, verify):
        with pytest.raises(errors.IncompleteCheckpoint, match="pack-local-00000"):
            read(tmp_path / "c")
    path.write_bytes(whole)
    verify(tmp_path / "c")


def test_swapped_blocks_are_found(tmp_path):
    save(tmp_path / "c", {"a": np.full(4, 1.0), "b": np.full(4, 2.0)}, pack=True)
    path = tmp_path / "c" / packs_of(tmp_path / "c")[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-64] + whole[-32:] + whole[-64:-32])
    with pytest.raises(errors.CorruptCheckpoint, match="key 'a'"):
        load(tmp_path / "c", keys=["a"])
    with pytest.raises(errors.CorruptCheckpoint, match="key 'b'"):
        open_checkpoint(tmp_path / "c")["b"][1]
    with pytest.raises(errors.CorruptCheckpoint, match="key 'a'"):
        verify(tmp_path / "c")
    assert np.array_equal(np.asarray(load(tmp_path / "c", verify=False)["a"]), np.full(4, 2.0))


def _edited(root, change):
    """The manifest with a change, and a checksum that fits."""
    file = root / manifest.FILE
    body = json.loads(file.read_bytes())
    del body["crc32c"]
    change(body)
    text = json.dumps(body).encode()
    file.write_bytes(text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text))


HOSTILE = {
    "a pack beside the checkpoint": lambda m: m["packs"][0].__setitem__(0, "../x.safetensors"),
    "a pack in a folder": lambda m: m["packs"][0].__setitem__(0, "a/x.safetensors"),
    "a pack that is another file": lambda m: m["packs"][0].__setitem__(0, "README.md"),
    "a pack twice": lambda m: m["packs"].append(m["packs"][0]),
    "a header longer than the file": lambda m: m["packs"][0].__setitem__(2, 1 << 40),
    "a pack that is a number": lambda m: m["packs"].__setitem__(0, 3),
    "packs that are no list": lambda m: m.__setitem__("packs", {"a": 1}),
    "a block before the data": lambda m: m["arrays"][0]["objects"][0].__setitem__(5, 0),
    "a block beyond the file": lambda m: m["arrays"][0]["objects"][0].__setitem__(5, 1 << 40),
    "a block at a place that is no number": lambda m: m["arrays"][0]["objects"][0].__setitem__(5, "8"),
    "a pack that is not listed": lambda m: m["arrays"][0]["objects"][0].__setitem__(0, 1),
    "the last pack by a negative number": lambda m: m["arrays"][0]["objects"][0].__setitem__(0, -1),
    "a block of another length": lambda m: m["arrays"][0]["objects"][0].__setitem__(3, 8),
    "a block of another place": lambda m: m["arrays"][0]["objects"][0].__setitem__(1, [1]),
    "a block at no place": lambda m: m["arrays"][0]["objects"][0].__setitem__(1, 3),
    "a short row": lambda m: m["arrays"][0]["objects"][0].pop(),
    "no row": lambda m: m["arrays"][0]["objects"].pop(),
    "packed and compressed": lambda m: m["arrays"][0].__setitem__("compression", {"name": "zstd", "level": 3}),
    "packed and a directory": lambda m: m["arrays"][0].__setitem__("dir", "a"),
    "packed, said by a number": lambda m: m["arrays"][0].__setitem__("packed", 1),
    "packed and in chunks": lambda m: m["arrays"][0].__setitem__("chunk", [2]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused(tmp_path, change):
    save(tmp_path / "c", {"a": np.full(4, 1.0), "b": np.full(4, 2.0)}, pack=True)
    _edited(tmp_path / "c", change)
    with pytest.raises(errors.CorruptCheckpoint):
        load(tmp_path / "c")


def test_a_gap_that_no_block_covers_is_found(tmp_path):
    save(tmp_path / "c", {"a": np.full(4, 1.0), "b": np.full(4, 2.0)}, pack=True)

    def overlap(m):
        m["arrays"][1]["objects"][0][4:] = m["arrays"][0]["objects"][0][4:]

    _edited(tmp_path / "c", overlap)
    with pytest.raises(errors.CorruptCheckpoint, match="do not fill it"):
        verify(tmp_path / "c")


def test_the_version_is_that_of_what_is_in_it(tmp_path, monkeypatch):
    """A reader that knows no packs refuses them by the version; without packs the text is as before."""
    save(tmp_path / "packed", {"a": np.ones(3)}, pack=True)
    save(tmp_path / "plain", {"a": np.ones(3)})
    assert json.loads((tmp_path / "plain" / manifest.FILE).read_bytes())["version"] == 1
    assert json.loads((tmp_path / "plain" / "zarr.json").read_bytes())["attributes"]["meshtape"] == {"version": 1}
    assert json.loads((tmp_path / "packed" / manifest.FILE).read_bytes())["version"] == 2
    monkeypatch.setattr(manifest, "VERSION", 1)
    monkeypatch.setattr(manifest, "MIGRATIONS", [])
    load(tmp_path / "plain")
    with pytest.raises(errors.UnsupportedVersion, match="format version 2; this meshtape reads up to version 1"):
        load(tmp_path / "packed")


def test_golden(kit):
    ckpt = open_checkpoint(GOLDEN)
    assert (ckpt.step, ckpt.metadata) == (7, {"note": "written by format version 2"})
    verify(GOLDEN)
    tree = load(GOLDEN)
    assert kit.same(tree["layers"][0]["w"], np.arange(12, dtype="f4").reshape(3, 4))
    assert kit.same(tree["layers"][1], np.arange(3).astype(ml_dtypes.bfloat16))
    assert kit.same(tree["split"], np.arange(10, dtype="i4"))
    assert kit.same(tree["c"], np.array([1 + 2j]))
    assert kit.same(tree["scalar"], np.float64(1.5))


@pytest.mark.parametrize("pack", [True, False, 0, 16, None])
def test_what_is_packed(tmp_path, pack):
    tree = {"small": np.ones(2), "large": np.ones(3), "huge": np.zeros(1 << 18)}
    save(tmp_path / "c", tree, pack=pack)
    folders = {p.name for p in (tmp_path / "c").iterdir() if p.is_dir()}
    assert folders == {True: {"huge"}, 16: {"large", "huge"}}.get(pack if pack != 1 else True, set(tree)) or pack == 0


@pytest.mark.parametrize("pack", ["1 MiB", -1, 1.5])
def test_no_such_threshold(tmp_path, pack):
    for make in (
        lambda: save(tmp_path / "c", {"a": np.ones(2)}, pack=pack),
        lambda: CheckpointManager(tmp_path, pack=pack),
    ):
        with pytest.raises(errors.CheckpointError, match="pack is True, False, or a number of bytes"):
            make()


def test_names_that_no_header_can_hold_stay_arrays_of_their_own(tmp_path):
    tree = {"__metadata__": np.ones(2), "\ud800": np.ones(3), "": np.ones(4), "a/../b": np.ones(5)}
    save(tmp_path / "c", tree, pack=True)
    verify(tmp_path / "c")
    got = load(tmp_path / "c")
    assert [np.asarray(got[n]).size for n in tree] == [2, 3, 4, 5]


def test_packs_of_a_limited_size(kit, tmp_path, monkeypatch):
    from meshtape.storage.saving import packs

    monkeypatch.setattr(packs, "LIMIT", 100)
    tree = {f"w{i}": np.full(5, i, np.float64) for i in range(7)}
    save(tmp_path / "c", tree, pack=True)
    assert len(packs_of(tmp_path / "c")) == 4
    got = load(tmp_path / "c")
    assert all(kit.same(got[n], a) for n, a in tree.items())
    verify(tmp_path / "c")


def test_merge_diff_manager_and_the_background(kit, tmp_path):
    host = kit.Host({"x": 2})
    a, b = np.arange(12.0).reshape(4, 3), np.arange(5, dtype="f4")
    tree = {"a": kit.split(a, kit.Sharding(host, (0,))), "b": b}
    handle = save_async(tmp_path / "c", tree, pack=True)
    assert handle.wait().files == 3
    save(tmp_path / "plain", {"a": a, "b": b})
    assert diff(tmp_path / "c", tmp_path / "plain").same
    merge(tmp_path / "c", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()
    got = load(tmp_path / "hf")
    assert kit.same(got["a"], a) and kit.same(got["b"], b)  # noqa: PT018
    convert(tmp_path / "c", tmp_path / "z", format="zarr")
    assert kit.same(load(tmp_path / "z")["a"], a)
    manager = CheckpointManager(tmp_path / "run", pack=True)
    for step in (1, 2, 3):
        manager.save(step, {"w": np.full(3, step)})
    assert packs_of(manager.latest())
    assert np.asarray(manager.restore()["w"])[0] == 3


def test_overwriting_leaves_nothing_of_the_old_and_refuses_strangers(tmp_path):
    tree = {"a": np.ones(3), "b": np.zeros(2)}
    for pack in (True, False, True, 16, False):
        save(tmp_path / "c", tree, pack=pack, overwrite=True)
        assert bool(packs_of(tmp_path / "c")) == bool(pack)
    save(tmp_path / "c", tree, pack=True, overwrite=True)
    (tmp_path / "c" / "pack-mine.safetensors").write_bytes(b"x")
    with pytest.raises(errors.CheckpointExists, match="pack-mine"):
        save(tmp_path / "c", tree, overwrite=True)


def test_convert_and_reshard_into_an_object_store(kit, s3, tmp_path):
    tree = {f"w{i}": np.full((8, i % 7 + 1), i, np.float32) for i in range(60)} | {
        "c": np.ones(2, complex),
        "s": np.float64(3),
    }
    save(tmp_path / "c", tree)
    s3.proxy.reset()
    report = convert(tmp_path / "c", f"{s3.url}/z", format="zarr")
    assert report.files == ["c", "pack-local-00000.safetensors"]
    assert sum(method in ("PUT", "POST") for method, _ in s3.proxy.log) <= 10
    mesh = {"mesh": {"x": 2}, "shardings": {"w*": {"x": 0}, "*": {}}}
    reshard(f"{s3.url}/z", f"{s3.url}/r", **mesh)
    reshard(f"{s3.url}/r", f"{s3.url}/r2", pack=100, **mesh)
    convert(f"{s3.url}/r", tmp_path / "back", format="zarr")
    convert(f"{s3.url}/r", f"{s3.url}/z", format="zarr", overwrite=True)
    for place in (f"{s3.url}/z", f"{s3.url}/r", f"{s3.url}/r2", tmp_path / "back"):
        verify(place)
        got = load(place)
        assert all(kit.same(got[n], a) for n, a in tree.items()), place


def _files(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("limit", [1, 1 << 16, 256 << 20], ids=["least", "small", "default"])
def test_convert_writes_the_packs_of_a_save(kit, tmp_path, limit):
    """Window by window, by threads, to the byte: packs, arrays beside them, metadata and manifest."""
    tree = {
        f"{d.name}-{s}": kit.random(d, s, i) for i, (d, s) in enumerate(itertools.product(kit.DTYPES, kit.SHAPES))
    } | {"large": kit.random(np.dtype("f4"), (300, 200)), "huge": np.arange(1 << 18), "none": None, "n": 3}
    save(tmp_path / "wanted", tree, pack=True, step=4, documents={"config": {"a": 1}})
    save(tmp_path / "plain", tree, step=4, documents={"config": {"a": 1}})
    report = convert(tmp_path / "plain", tmp_path / "c", format="zarr", pack=True, memory_limit=limit, threads=3)
    assert "pack-local-00000.safetensors" in report.files
    assert _files(tmp_path / "c") == _files(tmp_path / "wanted")
    verify(tmp_path / "c")
    assert not packs_of(convert(tmp_path / "c", tmp_path / "d", format="zarr").path)
    with pytest.raises(errors.CheckpointError, match="leave out pack="):
        merge(tmp_path / "plain", tmp_path / "e", pack=True)


def test_reshard_writes_the_packs_of_ranks(kit, tmp_path, monkeypatch):
    from meshtape.storage.saving import packs

    a, b = np.arange(63.0).reshape(7, 9), np.arange(5, dtype="f4")
    host = kit.Host({"x": 3})
    split = {"a": kit.split(a, kit.Sharding(host, (0,))), "b": kit.split(b, kit.Sharding(host, (0,)))}
    save(tmp_path / "wanted", split, pack=True)
    save(tmp_path / "plain", {"a": a, "b": b})
    axes = {"mesh": {"x": 3}, "shardings": {"*": {"x": 0}}}
    reshard(tmp_path / "plain", tmp_path / "c", pack=True, **axes)
    # The manifest of the save lists them in the order in which the processes answered.
    found, wanted = _files(tmp_path / "c"), _files(tmp_path / "wanted")
    assert {n: found[n] for n in packs_of(tmp_path / "c")} == {n: wanted[n] for n in packs_of(tmp_path / "wanted")}
    # With a number of bytes, the larger array stays Zarr's; a limit of a file makes several.
    reshard(tmp_path / "plain", tmp_path / "d", pack=100, **axes)
    assert [p.name for p in (tmp_path / "d").iterdir() if p.is_dir()] == ["a"]
    monkeypatch.setattr(packs, "LIMIT", 200)
    reshard(tmp_path / "plain", tmp_path / "e", pack=True, **axes)
    assert len(packs_of(tmp_path / "e")) == 5  # the last rank has no row of b
    for out in ("d", "e"):
        verify(tmp_path / out)
        assert kit.same(load(tmp_path / out)["a"], a) and kit.same(load(tmp_path / out)["b"], b)  # noqa: PT018


def test_packs_written_by_other_processes(kit, tmp_path):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    tree = {f"w{i}": np.full((i + 1, 3), i, np.float32) for i in range(5)}
    save(tmp_path / "plain", tree)
    save(tmp_path / "wanted", tree, pack=True)
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        convert(tmp_path / "plain", tmp_path / "c", format="zarr", pack=True, client=pool)
    assert _files(tmp_path / "c") == _files(tmp_path / "wanted")


def test_a_conversion_into_packs_killed_at_every_operation(kit, quick):
    """The same call again goes on, and writes the same files; nothing else is left."""
    save(quick / "plain", _tree(1))
    save(quick / "wanted", _tree(1), pack=True)
    resumed = set()
    for n in range(1, 1000):
        home = quick / str(n)
        home.mkdir()

        def run(home=home):
            return convert(quick / "plain", home / "c", format="zarr", pack=True, overwrite=True)

        killed = kit.die_at(n, run, True)
        resumed.add(run().resumed > 0)
        assert _files(home / "c") == _files(quick / "wanted")
        assert [e.name for e in home.iterdir()] == ["c"]
        if not killed:
            break
    assert resumed == {True, False}


def test_a_pack_of_a_conversion_that_changes_is_never_committed(kit, tmp_path, monkeypatch):
    """Windows are read back: a disk that stores other bytes than it was given is found."""
    from meshtape.storage.transform.sinks import raw_writer

    save(tmp_path / "plain", _tree(1))
    real = raw_writer._write

    def write(root, stretches):
        real(root, stretches)
        with open(os.path.join(root, stretches[0].file), "r+b") as f:  # other threads write other parts meanwhile
            f.seek(stretches[0].place)
            byte = f.read(1)[0]
            f.seek(stretches[0].place)
            f.write(bytes([byte ^ 1]))

    monkeypatch.setattr(raw_writer, "_write", write)
    with pytest.raises(errors.CorruptCheckpoint, match="does not read back"):
        convert(tmp_path / "plain", tmp_path / "c", format="zarr", pack=True)
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("where", ["memory", "s3"])
def test_overwriting_in_an_object_store(request, where):
    from meshtape.storage.stores import store as stores

    pytest.importorskip("obstore")
    place = f"memory://packs-{os.getpid()}/c" if where == "memory" else f"{request.getfixturevalue('s3').url}/c"
    for value, pack in enumerate((None, False, None, True)):
        save(place, {"a": np.full(3, value), "b": np.zeros(2)}, pack=pack, overwrite=True)
        assert np.asarray(load(place)["a"]).tolist() == [value] * 3
        verify(place)
        held = [e.name for e in stores.at(place).entries()]
        assert len(held) == (6 if pack is False else 3), held


def _tree(value):
    return {"a": np.full((2, 2), value), "b": [np.full(3, value), {"generation": value}]}


def test_overwriting_save_killed_at_one_operation_in_three(kit, quick):
    save(quick / "warm", _tree(0), pack=True)
    saw = set()
    for n in range(1, 1000, 3):
        home = quick / str(n)
        home.mkdir()
        save(home / "c", _tree(1), step=1, pack=True)
        killed = kit.die_at(n, lambda home=home: save(home / "c", _tree(2), step=2, overwrite=True, pack=True), True)
        got = load(home / "c")
        now = got["b"][1]["generation"]
        assert {int(x) for part in (got["a"], got["b"][0]) for x in np.asarray(part).ravel()} == {now}
        verify(home / "c")
        saw.add(now)
        save(home / "c", _tree(3), overwrite=True, pack=True)
        assert [e.name for e in home.iterdir()] == ["c"]
        assert len(list((home / "c").iterdir())) == 3
        if not killed:
            break
    assert saw == {1, 2}


def test_any_layout_and_byte_order(kit, tmp_path):
    a = np.arange(12.0).reshape(3, 4)
    save(tmp_path / "c", {"t": a.T, "big": a.astype(">f8"), "s": a[:, ::2], "mt": mt.asarray(a).T}, pack=True)
    got = load(tmp_path / "c")
    verify(tmp_path / "c")
    for name, wanted in {"t": a.T, "big": a, "s": a[:, ::2], "mt": a.T}.items():
        assert np.array_equal(np.asarray(got[name]), wanted)


def test_a_checkpoint_that_was_replaced_is_not_read_in_part(tmp_path):
    for verified in (True, False):
        save(tmp_path / "c", {"a": np.full(4, 1.0)}, pack=True, overwrite=True)
        old = open_checkpoint(tmp_path / "c", verify=verified)
        save(tmp_path / "c", {"a": np.full(4, 2.0)}, pack=True, overwrite=True)
        with pytest.raises(errors.CheckpointReplaced):
            old["a"][:]


def test_a_lost_manifest_is_told_and_a_damaged_one_can_be_replaced(tmp_path):
    save(tmp_path / "c", {"a": np.ones(3)}, pack=True)
    (tmp_path / "c" / manifest.FILE).write_bytes(b"{}")
    save(tmp_path / "c", {"a": np.full(3, 2.0)}, pack=True, overwrite=True)
    assert np.asarray(load(tmp_path / "c")["a"])[0] == 2
    (tmp_path / "c" / manifest.FILE).unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="packs that its attributes name"):
        load(tmp_path / "c")


def test_a_mesh_of_the_library(tmp_path):
    mesh = mt.Mesh({"x": 2})
    x = mt.distribute(mt.asarray(np.arange(10.0)), mesh, x=mt.Shard(0))
    save(tmp_path / "c", {"x": x}, pack=True)
    got = load(tmp_path / "c", like={"x": x})
    assert np.array_equal(np.asarray(got["x"]), np.arange(10.0))


def test_show_and_browse(tmp_path):
    from meshtape.storage.browse.model.layout import chunk_map, stored

    save(tmp_path / "c", {"a": np.ones((4, 4))}, pack=True)
    array = open_checkpoint(tmp_path / "c")["a"]
    said = stored(array)
    assert "safetensors" in said.how
    assert said.nbytes == 128
    (chunk,) = chunk_map(array, 0, 1, (0, 0), check=True).chunks
    assert (chunk.state, chunk.nbytes) == ("sound", 128)
