"""Damaged, incomplete and hostile checkpoints: every one is an error that names the place."""

import json
import os
import re
import shutil

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.storage import load, merge, open_checkpoint, save, save_safetensors, verify
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.format import chunk_sums, manifest
from meshtape.storage.stores import local
from meshtape.storage.stores import store as stores

HOSTILE = [
    "../x",
    "/etc/passwd",
    "a\0b",
    "n" * 300,
    "zarr.json",
    "meshtape.json",
    "c",
    "",
    "über-größe-重み-🙂",
    "a/b//c",
    "a\\b",
    ".",
    "..",
    ".hidden",
    "__reserved",
    "CON",
    "nul.txt",
    "trailing.",
    "UPPER",
    "upper",
    "with space",
    "%41",
    "A",
    "~",
    "n" * 299 + "m",
    "\ud800",
    "C:evil",
    "line\nbreak",
    "step-1.tmp-x",
]


@pytest.fixture
def saved(kit, tmp_path):
    w = np.arange(2_000_000, dtype="f4").reshape(1000, 2000)
    save(tmp_path / "c", {"w": kit.split(w, kit.Sharding(kit.Host({"x": 2}), (0,))), "s": np.float32(1)})
    return tmp_path / "c"


def test_hostile_names_round_trip(kit, tmp_path):
    tree = {name: np.full(3, i) for i, name in enumerate(HOSTILE)}
    save(tmp_path / "c", tree)
    assert [e.name for e in tmp_path.iterdir()] == ["c"]
    got = load(tmp_path / "c")
    assert list(got) == HOSTILE
    assert all(kit.same(got[k], tree[k]) for k in tree)
    directories = [e.name for e in (tmp_path / "c").iterdir() if e.is_dir()]
    assert len({d.casefold() for d in directories}) == len(HOSTILE)
    assert all(re.fullmatch(r"[A-Za-z0-9_.%~-]{1,160}", d) for d in directories)
    import zarr

    assert len(list(zarr.open(tmp_path / "c", mode="r").array_keys())) == len(HOSTILE)


def test_hostile_names_merge_and_load_again(kit, tmp_path):
    tree = {name: np.full(3, i) for i, name in enumerate(HOSTILE) if name != "\ud800"}
    save(tmp_path / "c", tree)
    merge(tmp_path / "c", tmp_path / "hf", max_shard_bytes=100)
    got = load(tmp_path / "hf")
    assert all(kit.same(got[k], tree[k]) for k in tree)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_every_flipped_bit_is_found(tmp_path):
    """All bytes of a small checkpoint, in each file that holds data."""
    save(tmp_path / "good", {"w": np.arange(6.0)})
    size = (tmp_path / "good" / "w" / "c.0").stat().st_size
    for at in range(size):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "c")
        flip(tmp_path / "c" / "w" / "c.0", at)
        with pytest.raises(errors.CorruptCheckpoint, match=re.escape(str(tmp_path / "c" / "w" / "c.0"))):
            verify(tmp_path / "c")
        if at < 6 * 8:
            with pytest.raises(errors.CorruptCheckpoint, match=r"chunk \(0,\) of key 'w'"):
                load(tmp_path / "c")
        else:  # in the checksum beside the chunk, or in the index, which our reader does not need
            load(tmp_path / "c")


def test_every_flipped_bit_of_the_manifest_is_found(tmp_path):
    save(tmp_path / "good", {"w": np.arange(2.0), "n": 12})
    data = (tmp_path / "good" / manifest.FILE).read_bytes()
    for at in range(len(data) - 1):  # all but the final newline
        for bit in (0, 4):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with pytest.raises((errors.CorruptCheckpoint, errors.UnsupportedVersion)):
                manifest.loads(bytes(bad), "x")
    for end in range(0, len(data) - 1):
        with pytest.raises(errors.CorruptCheckpoint, match="x: "):
            manifest.loads(data[:end], "x")


def test_flip_names_file_key_and_chunk(saved):
    flip(saved / "w" / "c.1.0", 1_500_000)
    with pytest.raises(errors.CorruptCheckpoint) as e:
        load(saved)
    assert "w/c.1.0" in str(e.value)
    assert "key 'w'" in str(e.value)
    assert "chunk (0, 1)" in str(e.value)
    # What does not touch the damage still reads.
    assert open_checkpoint(saved)["w"][:500].shape == (500, 2000)
    with pytest.raises(errors.CorruptCheckpoint, match="1 damaged files"):
        verify(saved)


@pytest.mark.parametrize("change", [-1, -1000, 1, 4096])
def test_truncated_and_extended_files_are_found(saved, change):
    path = saved / "w" / "c.0.0"
    size = path.stat().st_size
    os.truncate(path, size + change)
    for check in (load, verify):
        with pytest.raises(
            errors.CorruptCheckpoint, match=rf"c\.0\.0 has {size + change} bytes, the manifest says {size}"
        ):
            check(saved)


def test_missing_files_are_listed_before_anything_is_read(saved):
    (saved / "w" / "c.0.0").unlink()
    (saved / "w" / "c.1.0").unlink()
    for check in (load, verify):
        with pytest.raises(errors.IncompleteCheckpoint, match=r"2 of 2 files of key 'w' missing: w/c.0.0, w/c.1.0"):
            check(saved)
    assert load(saved, keys="s")["s"].shape == ()


def test_a_swapped_file_of_another_save_is_found_by_verify(tmp_path):
    save(tmp_path / "a", {"w": np.zeros(4)})
    save(tmp_path / "b", {"w": np.ones(4)})
    shutil.copy(tmp_path / "a" / "w" / "c.0", tmp_path / "b" / "w" / "c.0")
    with pytest.raises(errors.CorruptCheckpoint, match="of another place or another save"):
        verify(tmp_path / "b")


def test_without_manifest_it_is_incomplete_but_zarr_still_reads(saved):
    import zarr

    (saved / manifest.FILE).unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="Load another checkpoint"):
        load(saved)
    assert zarr.open(saved, mode="r")["w"].shape == (1000, 2000)
    (saved / "zarr.json").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="did not finish"):
        load(saved)


def test_bytes_behind_the_table_of_checksums_are_found(saved):
    with (saved / chunk_sums.FILE).open("ab") as f:
        f.write(b"junk")
    with pytest.raises(errors.CorruptCheckpoint, match="goes on after the checksums of all arrays"):
        verify(saved)


@pytest.mark.parametrize("where", ["a disk", "memory://packs"])
def test_packs_without_what_lists_them_are_no_model(tmp_path, where):
    """A pack is a true safetensors file, of small arrays and of blocks of others. In an object store it is there before
    the manifest."""
    mesh, root = mt.Mesh({"m": 2}), str(tmp_path / "c") if where == "a disk" else f"{where}/c"
    save(root, {"b": mt.distribute(np.arange(4.0), mesh, m=mt.Shard(0))}, pack=True)
    for lost in (manifest.FILE, "zarr.json", chunk_sums.FILE, "pack-0-00001-00000.safetensors"):
        stores.at(root).delete([lost])
        for ask in (load, verify, open_checkpoint):
            with pytest.raises(errors.IncompleteCheckpoint, match="did not finish"):
                ask(root)


def test_remains_of_a_save_are_told_from_nothing(tmp_path):
    with pytest.raises(errors.NotACheckpoint, match="no such file"):
        open_checkpoint(tmp_path / "c")
    (tmp_path / "c.tmp-00000000-1-00000000").mkdir()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"cut short.*Load another"):
        open_checkpoint(tmp_path / "c")
    (tmp_path / "x").mkdir()
    with pytest.raises(errors.NotACheckpoint, match="is not a checkpoint"):
        open_checkpoint(tmp_path / "x")
    (tmp_path / "y.bin").write_bytes(b"hello")
    with pytest.raises(errors.NotACheckpoint):
        open_checkpoint(tmp_path / "y.bin")
    save(tmp_path / "x" / "step-00000001", {})
    with pytest.raises(errors.NotACheckpoint, match=r"it holds checkpoints, such as .*step-00000001"):
        open_checkpoint(tmp_path / "x")


def sealed(body):
    """A manifest whose checksum fits, whatever it says."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text)


def body_of(path):
    body = json.loads((path / manifest.FILE).read_bytes())
    del body["crc32c"]
    return body


def set_in(body, where, value):
    *head, last = where
    for k in head:
        body = body[k]
    body[last] = value


W = ["arrays", 0]
ATTACKS = [
    (["arrays", 0, "dir"], "../../etc"),
    (["arrays", 0, "dir"], "\ud800"),
    (["arrays", 0, "dir"], "/etc"),
    (["arrays", 0, "dir"], "a/b"),
    (["arrays", 0, "dir"], "a\0"),
    (["arrays", 0, "dir"], ""),
    (["arrays", 0, "dir"], 7),
    (["arrays", 0, "objects", 0, 0], "../../etc/passwd"),
    (["arrays", 0, "objects", 0, 0], "/etc/passwd"),
    (["arrays", 0, "objects", 0, 0], None),
    (["arrays", 0, "objects", 0, 1], [500, 0]),
    (["arrays", 0, "objects", 0, 2], [-1, 5]),
    (["arrays", 0, "objects", 0, 3], 10**18),
    (["arrays", 0, "objects", 0, 4], "xyz"),
    (["arrays", 0, "objects", 0], []),
    (["arrays", 0, "objects"], []),
    (["arrays", 0, "objects"], {}),
    (["arrays", 0, "shape"], [10**12, 2000]),
    (["arrays", 0, "shape"], [2**63, 2000]),
    (["arrays", 0, "shape"], [-1, 2000]),
    (["arrays", 0, "shape"], [True, 2000]),
    (["arrays", 0, "shape"], [1000]),
    (["arrays", 0, "shape"], "x"),
    (["arrays", 0, "shard"], [0, 2000]),
    (["arrays", 0, "chunk"], [3, 2000]),
    (["arrays", 0, "chunk"], [0, 0]),
    (["arrays", 0, "dtype"], "object"),
    (["arrays", 0, "dtype"], None),
    (["arrays", 0, "path"], "w"),
    (["arrays", 0, "path"], [1.5]),
    (["arrays", 0, "path"], ["s"]),
    (["arrays", 0, "mesh"], 5),
    (["arrays", 0, "sharding"], [1]),
    (["arrays", 0], None),
    (["arrays"], None),
    (["tree"], {"array": 0}),
    (["tree"], {"array": 99}),
    (["tree"], {"dict": [["w", {"array": 0}], ["w", {"array": 0}]]}),
    (["tree"], {"pickle": "x"}),
    (["tree"], 5),
    (["step"], "1"),
    (["metadata"], []),
    (["meshes"], [[["x", "y"]]]),
    (["arrays", 1, "dir"], "w"),  # that of the other
    (["documents"], {"config.json": ["00000000", "w/zarr.json"]}),
    (["documents"], {"config.json": ["00000000", "../config.json"]}),
    (["documents"], {"config.json": "config.json"}),
    (["documents"], {"config.json": ["0", "config.json"]}),
    (["documents"], []),
    (["documents"], None),
    (["zarr"], "a"),
    (["zarr"], None),
    (["arrays", 0, "zarr"], "a"),
    (["arrays", 0, "zarr"], "0x12_456"),
    (["arrays", 0, "zarr"], None),
    (["arrays", 0, "nbytes"], []),
    (["arrays", 0, "mesh"], None),
    (["arrays", 1, "sharding"], ["R"]),
    (["nbytes"], "8"),
    (["tree"], {"dict": [["w", {"array": 0}], ["s", {"array": 1}], ["v", {"value": {}}]]}),
    (["tree"], {"dict": [["w", {"array": 0}], ["s", {"array": 1}], ["v", {"value": [1]}]]}),
    (["version"], 0),
    (["version"], "1"),
    (["format"], "other"),
]


@pytest.mark.parametrize(("where", "value"), ATTACKS, ids=lambda x: str(x)[:40])
def test_a_hostile_manifest_is_refused(saved, where, value):
    body = body_of(saved)
    set_in(body, where, value)
    (saved / manifest.FILE).write_bytes(sealed(body))
    with pytest.raises((errors.CorruptCheckpoint, errors.IncompleteCheckpoint, errors.CheckpointKeyError)) as e:
        load(saved)
    assert manifest.FILE in str(e.value) or "collide" in str(e.value)


def test_deep_and_random_manifests_are_refused(saved):
    deep = []
    for levels in (250, 5000):
        body = body_of(saved)
        body["tree"] = "HERE"
        deep.append(sealed(body).replace(b'"HERE"', b'{"list":[' * levels + b"null" + b"]}" * levels))
        text = deep[-1].split(b', "crc32c"')[0] + b"}"
        deep[-1] = text[:-1] + b', "crc32c": "%08x"}' % crc32c(text)
    for data in (*deep, b"", b"{}", b"[" * 100_000, b"\xff", b"null", sealed([])):
        (saved / manifest.FILE).write_bytes(data)
        with pytest.raises(errors.CorruptCheckpoint, match=manifest.FILE):
            load(saved)


def test_a_newer_version_is_refused_and_both_are_named(saved):
    body = body_of(saved)
    body["version"] = 7
    (saved / manifest.FILE).write_bytes(sealed(body))
    with pytest.raises(errors.UnsupportedVersion, match=rf"version 7.*up to version {manifest.VERSION}"):
        load(saved)


@pytest.mark.parametrize("part", ["w", "w/c.0.0"])
@pytest.mark.parametrize("beneath", [True, False])  # whether the system looks at links itself
def test_links_out_of_the_checkpoint_are_refused(saved, tmp_path, part, beneath, monkeypatch):
    if not beneath:
        monkeypatch.setattr(local.Beneath, "open", lambda self, name: -1)
    same = load(saved)["w"]
    (saved / part).rename(tmp_path / "secret")
    (saved / part).symlink_to(tmp_path / "secret")
    with pytest.raises(errors.CorruptCheckpoint, match="link out of the checkpoint"):
        load(saved)
    (saved / part).unlink()
    (tmp_path / "secret").rename(saved / "inside")
    (saved / part).symlink_to(os.path.relpath(saved / "inside", (saved / part).parent))
    assert np.array_equal(np.asarray(load(saved)["w"]), np.asarray(same))  # one that stays inside is followed


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a\0b", "", 5, "link.safetensors", "a\\b", "9" * 300, "a/" * 600]
)
def test_hostile_weight_maps_are_refused(tmp_path, file):
    save_safetensors(tmp_path / "x.safetensors", {"w": np.ones(1)})
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(errors.CorruptCheckpoint, match=r"index\.json"):
        load(hf)


def test_incomplete_hugging_face_directories(tmp_path):
    save(tmp_path / "c", {"a": np.ones(4), "b": np.ones(4)})
    merge(tmp_path / "c", tmp_path / "hf", max_shard_bytes=32)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"a"', '"z"'))
    with pytest.raises(errors.CorruptCheckpoint, match=r"damaged or was edited; verify=False reads it"):
        load(tmp_path / "hf")
    with pytest.raises(errors.IncompleteCheckpoint, match=r"z in model-00001-of-00002.safetensors"):
        load(tmp_path / "hf", verify=False)
    index.write_text(text)
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"1 file missing: model-00002.*with them b"):
        load(tmp_path / "hf")
    index.unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"no model.safetensors.index.json"):
        load(tmp_path / "hf")
    index.write_text("{")
    with pytest.raises(errors.CorruptCheckpoint, match="not an index"):
        load(tmp_path / "hf")


def test_without_verification_damage_goes_unnoticed_and_lengths_do_not(tmp_path):
    where = tmp_path / "c"
    save(where, {"w": np.arange(6.0)})
    (file,) = (where / "w").glob("c.*")
    held = bytearray(file.read_bytes())
    held[7] ^= 0x40  # the exponent of the first number
    file.write_bytes(held)
    with pytest.raises(errors.CorruptCheckpoint, match="crc32c"):
        load(where)
    np.testing.assert_array_equal(np.asarray(load(where, verify=False)["w"])[1:], np.arange(1.0, 6.0))
    assert np.asarray(load(where, verify=False)["w"])[0] != 0
    file.write_bytes(held[:-1])
    with pytest.raises(errors.CorruptCheckpoint, match="bytes"):
        load(where, verify=False)


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"pack": True}], ids=str)
@pytest.mark.parametrize("file", ["zarr.json", "w/zarr.json"])
def test_metadata_of_zarr_that_are_empty_are_found(tmp_path, options, file):
    save(tmp_path / "c", {"w": np.arange(600.0), "v": np.ones(3)}, **options)
    assert verify(tmp_path / "c").arrays == 2
    if not (tmp_path / "c" / file).exists():
        pytest.skip("it lies in a pack")
    (tmp_path / "c" / file).write_bytes(b"")
    with pytest.raises(errors.CorruptCheckpoint, match=r"zarr\.json is missing or empty"):
        verify(tmp_path / "c")


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"layout": "dual"}], ids=str)
def test_a_lost_file_of_an_array_that_is_read_by_itself(tmp_path, options):
    """The manifest above knows that it was there. Without one Zarr's meaning of a chunk that is not there holds."""
    mesh = mt.Mesh({"m": 2})
    save(tmp_path / "c", {"w": mt.distribute(mt.ones((8, 4)), mesh, m=mt.Shard(0))}, **options)
    (tmp_path / "c" / "w" / "c.1.0").unlink()
    where = tmp_path / "c" / "w"
    for act in (
        lambda: mt.from_zarr(where, mesh, m=mt.Shard(0)).load(),
        lambda: mt.stream(mt.sum, mt.from_zarr(where, mesh, m=mt.Shard(0)), memory=1000),
        lambda: mt.training.ZarrSource(str(where)).read(np.arange(8)),
        lambda: open_checkpoint(where)["w"][...],
        lambda: load(where),
        lambda: mt.storage.convert(where, tmp_path / "out", format="zarr", missing="fill"),
        lambda: mt.storage.diff(where, where),
    ):
        with pytest.raises(errors.IncompleteCheckpoint, match=r"c\.1\.0"):
            act()
    (tmp_path / "c" / "meshtape.json").unlink()
    with pytest.warns(UserWarning, match=r"c\.1\.0.*lost, or never written"):
        assert np.asarray(load(where)["w"]).sum() == 16
