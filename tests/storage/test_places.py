"""Bytes know their place: chunks and shards that are whole, but not where they belong, and damage in every file of a
checkpoint."""

import itertools
import json
import shutil

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors, storage
from meshtape.storage import load, open_checkpoint, reshard, save, verify
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.format import chunk_sums, manifest
from meshtape.storage.format.chunk_grid import ChunkGrid

SHAPE = (48, 4096)  # two shards of float64, each of more than one chunk


@pytest.fixture(params=[None, "zstd"])
def saved(request, tmp_path, kit):
    """Two arrays of one dtype and layout, whose bytes all differ."""
    path = tmp_path / "c"
    host = kit.Host({"x": 2})
    a = np.random.default_rng(0).normal(size=SHAPE)
    tree = {name: kit.split(a + k, kit.Sharding(host, (0,))) for k, name in enumerate(["a", "b"])}
    save(path, tree, compression=request.param)
    return path


def refuses(path, name, part):
    """Full and partial reads, copies and `verify` notice what lies in a part of an array."""
    for act in (
        lambda: load(path),
        lambda: load(path, keys=name),
        lambda: open_checkpoint(path)[name][part],
        lambda: verify(path),
        lambda: reshard(path, f"{path}.new", mesh={"m": 2}, shardings={}),
        lambda: storage.merge(path, f"{path}.hf"),
    ):
        with pytest.raises(errors.CorruptCheckpoint):
            act()


def test_shards_that_were_exchanged(saved):
    files = sorted(f"{n}/{p.name}" for n in "ab" for p in (saved / n).glob("c.*"))
    assert len(files) == 4
    for first, second in itertools.combinations(files, 2):
        one, two = (saved / first).read_bytes(), (saved / second).read_bytes()
        (saved / first).write_bytes(two)
        (saved / second).write_bytes(one)
        half = slice(0, 1) if first.endswith("c.0.0") else slice(-1, None)
        refuses(saved, first[0], half)
        (saved / first).write_bytes(one)
        (saved / second).write_bytes(two)
    verify(saved)


def test_chunks_that_were_exchanged(tmp_path):
    """All pairs of chunks of two shards, their checksums with them, as they lie in files that are not compressed."""
    a = np.arange(2 * 400_000, dtype="f4").reshape(2, 400_000)
    save(tmp_path / "c", {"a": a, "b": a + 1})
    unit = int(np.prod(open_checkpoint(tmp_path / "c")["a"].tensor.chunk)) * 4 + 4
    files = {n: (tmp_path / "c" / n / "c.0.0") for n in "ab"}
    data = {n: bytearray(p.read_bytes()) for n, p in files.items()}
    places = [(n, k) for n in "ab" for k in range(a.nbytes // (unit - 4))]
    assert len(places) >= 6
    for (m, i), (n, k) in itertools.combinations(places, 2):
        bad = {name: bytearray(d) for name, d in data.items()}
        bad[m][i * unit : (i + 1) * unit] = data[n][k * unit : (k + 1) * unit]
        bad[n][k * unit : (k + 1) * unit] = data[m][i * unit : (i + 1) * unit]
        for name, path in files.items():
            path.write_bytes(bad[name])
        with pytest.raises(errors.CorruptCheckpoint, match=r"whole, but not the one that belongs there"):
            load(tmp_path / "c")
        with pytest.raises(errors.CorruptCheckpoint, match=r"another place or another save"):
            verify(tmp_path / "c")
    for name, path in files.items():
        path.write_bytes(data[name])
    verify(tmp_path / "c")


def test_what_does_not_touch_the_damage_still_reads(tmp_path):
    a = np.arange(4 * 600_000, dtype="f4").reshape(4, 600_000)
    save(tmp_path / "c", {"a": a})
    chunk = open_checkpoint(tmp_path / "c")["a"].tensor.chunk
    unit = int(np.prod(chunk)) * 4 + 4
    path = tmp_path / "c" / "a" / "c.0.0"
    data = bytearray(path.read_bytes())
    data[:unit], data[unit : 2 * unit] = data[unit : 2 * unit], data[:unit]
    path.write_bytes(data)
    assert (open_checkpoint(tmp_path / "c")["a"][-1, -chunk[1] :] == a[-1, -chunk[1] :]).all()
    with pytest.raises(errors.CorruptCheckpoint, match="belongs there"):
        open_checkpoint(tmp_path / "c")["a"][0, 0]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_flip_in_any_file_is_found_and_never_loaded(tmp_path, compression):
    """Bytes of every file: data, table of checksums, Zarr's metadata, documents, manifest."""
    tree = {"a": np.arange(3 << 17, dtype="f4").reshape(3, -1), "s": np.float32(2), "i": np.arange(5)}
    good, bad = tmp_path / "good", tmp_path / "bad"
    save(good, tree, documents={"config": {"layers": 2}}, compression=compression)
    shutil.copytree(good, bad)
    files = sorted(str(p.relative_to(good)) for p in good.rglob("*") if p.is_file())
    assert {chunk_sums.FILE, "zarr.json", "a/zarr.json", "config.json", manifest.FILE} <= set(files)
    rng = np.random.default_rng(1)
    for file in files:
        data = (good / file).read_bytes()
        places = range(0, len(data) - 1, 23) if len(data) < 1200 else rng.integers(0, len(data) - 1, 20)
        for at in map(int, places):
            changed = bytearray(data)
            changed[at] ^= 1 << int(rng.integers(8))
            (bad / file).write_bytes(changed)
            with pytest.raises(errors.CheckpointError):
                verify(bad)
            try:
                held = load(bad)
            except errors.CheckpointError:
                continue
            assert all((np.asarray(held[k]) == tree[k]).all() for k in tree)
        (bad / file).write_bytes(data)
    verify(bad)


def test_a_dtype_that_was_relabelled_for_others_is_found(tmp_path):
    save(tmp_path / "c", {"w": np.ones(4, "f4")})
    path = tmp_path / "c" / "w" / "zarr.json"
    path.write_text(path.read_text().replace("float32", "int32"))
    with pytest.raises(errors.CorruptCheckpoint, match=r"w/zarr.json.*'w'"):
        verify(tmp_path / "c")
    path.unlink()
    with pytest.raises(errors.CorruptCheckpoint, match=r"w/zarr.json is missing"):
        verify(tmp_path / "c")


def test_the_table_is_four_bytes_a_chunk_and_none_for_lone_chunks(tmp_path):
    save(tmp_path / "small", {f"w{i}": np.ones(4) for i in range(9)})
    assert not (tmp_path / "small" / chunk_sums.FILE).exists()
    save(tmp_path / "large", {"w": np.zeros((64, 65536), "f4"), "s": np.ones(3)})
    tensor = open_checkpoint(tmp_path / "large")["w"].tensor
    chunks = tensor.shape[0] * tensor.shape[1] // int(np.prod(tensor.chunk))
    assert (tmp_path / "large" / chunk_sums.FILE).stat().st_size == 4 * chunks


def test_a_table_that_is_missing_or_too_short(tmp_path):
    save(tmp_path / "c", {"w": np.zeros((64, 65536), "f4"), "s": np.ones(3)})
    path = tmp_path / "c" / chunk_sums.FILE
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    with pytest.raises(errors.CorruptCheckpoint, match="checksums of the chunks of key 'w'"):
        load(tmp_path / "c")
    path.unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"meshtape\.sums is missing"):
        load(tmp_path / "c")
    assert load(tmp_path / "c", keys="s")["s"].shape == (3,)
    assert load(tmp_path / "c", verify=False)["w"].shape == (64, 65536)


def test_a_manifest_without_a_table_still_loads(tmp_path):
    """As earlier versions wrote it: then the checksum beside each chunk counts."""
    save(tmp_path / "c", {"w": np.arange(64 * 65536, dtype="f4").reshape(64, -1)})
    path = tmp_path / "c" / manifest.FILE
    body = json.loads(path.read_bytes())
    del body["crc32c"], body["sums"], body["zarr"], body["arrays"][0]["sums"], body["arrays"][0]["zarr"]
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text))
    (tmp_path / "c" / chunk_sums.FILE).unlink()
    assert mt.sum(load(tmp_path / "c")["w"] * 0) == 0
    verify(tmp_path / "c")
    shard = tmp_path / "c" / "w" / "c.0.0"
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint, match="does not fit its crc32c"):
        load(tmp_path / "c")


@pytest.mark.parametrize("sums", [[-1, "00000000"], [0], "x", [0, "zz"], [1 << 61, "00000000"], [0, 5]])
def test_hostile_places_in_the_table(tmp_path, sums):
    save(tmp_path / "c", {"w": np.zeros((64, 65536), "f4")})
    path = tmp_path / "c" / manifest.FILE
    body = json.loads(path.read_bytes())
    del body["crc32c"]
    body["arrays"][0]["sums"] = sums
    text = json.dumps(body).encode()
    path.write_bytes(text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text))
    with pytest.raises(errors.CorruptCheckpoint):
        load(tmp_path / "c")


def test_a_table_of_absurd_length_takes_no_memory(tmp_path):
    held = chunk_sums.StoredSums(str(tmp_path), "t", (0, 0), ChunkGrid((1 << 40,), (1 << 40,), (1,)), "w")
    (tmp_path / "t").write_bytes(b"\0" * 64)
    with pytest.raises(errors.CorruptCheckpoint, match="do not fit"):
        held.check()
