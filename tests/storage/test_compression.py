"""Compressed chunks: the same arrays for everybody, copied as they are where they stay, and harmless whatever the files
hold."""

import contextlib
import itertools
import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshtape as mt
from meshtape import errors, storage
from meshtape.arrays.core.formatting import human_bytes
from meshtape.storage import (
    CheckpointManager,
    ShuffledZstd,
    Zstd,
    convert,
    estimate,
    load,
    merge,
    open_checkpoint,
    reshard,
    save,
    save_async,
    verify,
)
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.format import chunk_grid, chunk_sums, compression, dtypes, manifest
from meshtape.storage.format.compression import content_nbytes
from meshtape.storage.readers import compressed
from meshtape.storage.stores.filesystem import Files, using

BOTH = pytest.mark.parametrize("codec", [Zstd(1), ShuffledZstd()], ids=str)
SPLIT = {"mesh": {"m": 2}, "shardings": {"w": {"m": 1}, "*": {}}}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of some hundred bytes, so that small arrays have many."""
    monkeypatch.setattr(chunk_grid, "TARGET", 1 << 10)
    monkeypatch.setattr(chunk_grid, "SHORTEST_ROW", 64)


@pytest.fixture
def tree():
    return {
        "w": np.random.default_rng(0).standard_normal((64, 64), np.float32),
        "zeros": np.zeros((300, 17), "i8"),
        "mask": np.arange(5000) % 97 == 0,
        "none": np.ones((0, 3), "i4"),
        "one": np.array(2.5),
    }


def equal(kit, got, want):
    return got.keys() == want.keys() and all(kit.same(got[k], want[k]) for k in want)


def content(root):
    return {
        os.path.relpath(os.path.join(home, f), root): open(os.path.join(home, f), "rb").read()
        for home, _, files in os.walk(root)
        for f in files
    }


# ----- the same arrays ------------------------------------------------------------------------------------------------


@BOTH
def test_every_dtype_and_shape_on_meshes(kit, tmp_path, codec):
    every = {
        f"{d.name}.{len(s)}.{i}": kit.random(d, s, i) for d in kit.DTYPES for i, s in enumerate([*kit.SHAPES, (70, 9)])
    }
    save(tmp_path / "a", every, compression=str(codec))
    assert equal(kit, {n: a.read() for n, a in open_checkpoint(tmp_path / "a").items()}, every)
    verify(tmp_path / "a")
    a = kit.random(np.dtype("f2"), (33, 70))
    for sharding in kit.shardings(2, (2, 3)):
        where = tmp_path / str(sharding.dims)
        save(where, {"a": kit.split(a, sharding)}, compression=codec)
        assert kit.same(load(where)["a"], a)
        assert kit.same(load(tmp_path / str(sharding.dims), shardings={"a": sharding})["a"].whole(), a)


@BOTH
def test_others_read_it(kit, tree, tmp_path, codec):
    import zarr

    save(tmp_path / "c", tree, compression=codec)
    group = zarr.open_group(tmp_path / "c", mode="r")
    assert equal(kit, {n: group[n][...] for n in tree}, tree)
    inner = [c["name"] for c in group["w"].metadata.to_dict()["codecs"][0]["configuration"]["codecs"]]
    assert inner == ["bytes", "zstd" if codec == Zstd(1) else "blosc", "crc32c"]
    version = json.loads((tmp_path / "c" / manifest.FILE).read_bytes())["version"]
    assert version == (1 if codec == Zstd(1) else 3)  # an earlier reader refuses what it does not know


def test_bytes_in_groups_shrink_weights():
    """Numbers of a trained layer's kind: exponents of a few values, mantissas without order."""
    w = (np.random.default_rng(0).standard_normal(1 << 18) * 0.02).astype("f4")
    for a, most in ((w, 0.86), (w.astype(dtypes.by_name("bfloat16")), 0.71)):
        data = a.view("u1")
        grouped, plain = (len(c.compress(data, a.itemsize)) / data.size for c in (ShuffledZstd(), Zstd()))
        assert grouped < min(most, plain - 0.05)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [1, 127, 128, 5000, (1 << 20) // 4 + 3])
def test_frames_are_those_that_the_library_of_blosc_unpacks(itemsize, count):
    from numcodecs import blosc

    for data in (
        np.arange(count * itemsize, dtype="u8").astype("u1"),
        np.random.default_rng(0).bytes(count * itemsize),
    ):
        data = np.frombuffer(data, "u1")
        frame = ShuffledZstd().compress(data, itemsize)
        assert len(frame) <= ShuffledZstd().most(data.size)
        assert blosc.decompress(frame) == data.tobytes()
        out = np.empty_like(data)
        ShuffledZstd().decompress(np.frombuffer(frame, "u1"), out)
        assert np.array_equal(out, data)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_slices_are_those_of_numpy(data, tmp_path_factory):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    a = (np.arange(np.prod(shape)) % data.draw(st.integers(1, 9))).astype("i2").reshape(shape)
    home = tmp_path_factory.mktemp("c")
    save(home / "c", {"a": a}, compression="zstd:1")
    index = tuple(
        slice(lo := data.draw(st.integers(0, n - 1)), data.draw(st.integers(lo + 1, n)), data.draw(st.integers(1, 3)))
        for n in shape
    )
    stored = open_checkpoint(home / "c")["a"]
    assert np.array_equal(stored[index], a[index])
    assert stored.tensor.planned(mt.arrays.core.blocks.Box.whole(shape)) <= sum(
        p.stat().st_size for p in (home / "c" / "a").glob("c*")
    )


def test_equal_arrays_give_equal_files(tree, tmp_path):
    save(tmp_path / "a", tree, compression="zstd")
    save_async(tmp_path / "b", tree, compression=Zstd(3)).wait()
    manager = CheckpointManager(tmp_path / "run", compression="zstd:3")
    manager.save(1, tree)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert {k: v for k, v in content(manager.latest()).items() if k != "meshtape.json"} == {
        k: v for k, v in content(tmp_path / "a").items() if k != "meshtape.json"
    }
    assert len(content(tmp_path / "a")["zeros/c.0.0"]) < tree["zeros"].nbytes // 8
    snapshots = storage.Snapshots(f"{tmp_path}/s/{{step}}", compression="zstd")
    snapshots.begin(5, tree)
    snapshots.finalize()
    assert open_checkpoint(next((tmp_path / "s").iterdir())).compression == Zstd(3)


def test_wrong_choices_are_refused_before_anything_is_written(tree, tmp_path):
    save(tmp_path / "a", tree)
    for wrong in ("lz4", "zstd:", "zstd:23", "zstd:0", "weights:10", "zstd:x", 3, True, ("zstd", 3)):
        with pytest.raises(errors.CheckpointError, match=r"compression must be|a level of (zstd|weights)"):
            save(tmp_path / "b", tree, compression=wrong)
        with pytest.raises(errors.CheckpointError):
            reshard(tmp_path / "a", tmp_path / "b", compression=wrong)
    for act in (
        lambda: merge(tmp_path / "a", tmp_path / "b", compression="zstd"),
        lambda: convert(tmp_path / "a", tmp_path / "b", format="safetensors", compression=Zstd()),
    ):
        with pytest.raises(errors.CheckpointError, match="safetensors files are never compressed"):
            act()
    assert [e.name for e in tmp_path.iterdir()] == ["a"]
    for level in (0, 23, 1.0, True, "3"):
        with pytest.raises(errors.CheckpointError, match="integer from 1 to 22"):
            Zstd(level)


@pytest.mark.parametrize("codec", [Zstd(1), Zstd(), Zstd(22), ShuffledZstd(), ShuffledZstd(8)], ids=str)
def test_estimate_is_an_upper_bound(kit, tmp_path, codec):
    noise = {f"{n}": kit.random(np.dtype("u1"), (n,)) for n in (1, 5, 1023, 1024, 1025, 9000)}
    save(tmp_path / "c", noise, compression=codec)
    files = sum(len(v) for k, v in content(tmp_path / "c").items() if "/c." in k)
    found = estimate(noise, compression=codec)
    assert files <= found.zarr <= 1.2 * files + 100
    assert f"at most {human_bytes(found.zarr)} as Zarr ({codec})" in str(found)


# ----- cut anew, copied as they are -----------------------------------------------------------------------------------


@pytest.fixture
def coded(monkeypatch):
    """Chunks that were compressed or unpacked."""
    seen = []
    for kind, name in itertools.product((Zstd, ShuffledZstd), ("compress", "decompress")):
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, real=real, name=name, **k: seen.append(name) or real(*a, **k))
    return seen


@BOTH
def test_chunks_that_stay_the_same_are_neither_unpacked_nor_compressed(kit, tree, coded, tmp_path, codec):
    save(tmp_path / "a", tree, compression=codec)
    assert coded
    coded.clear()
    reshard(tmp_path / "a", tmp_path / "b", **SPLIT)
    reshard(tmp_path / "b", tmp_path / "c", mesh={"m": 2}, shardings={"w": {"m": 0}})
    reshard(tmp_path / "c", tmp_path / "d", mesh={"m": 1})
    reshard(tmp_path / "b", f"memory://compressed/{codec}", mesh={"m": 1}, pack=False)
    assert not coded
    assert content(tmp_path / "d").keys() == content(tmp_path / "a").keys()
    assert all(v == content(tmp_path / "a")[k] for k, v in content(tmp_path / "d").items() if k != "meshtape.json")
    for where in (tmp_path / "b", tmp_path / "c", f"memory://compressed/{codec}"):
        assert open_checkpoint(where).compression == codec
        verify(where)
        assert equal(kit, load(where), tree)
        assert storage.diff(tmp_path / "a", where).same


def test_other_compressions_rules_and_casts_read_the_values(kit, tree, tmp_path):
    save(tmp_path / "a", tree)
    convert(tmp_path / "a", tmp_path / "b", format="zarr", compression="zstd:9")
    assert open_checkpoint(tmp_path / "b").compression == Zstd(9)
    convert(tmp_path / "b", tmp_path / "c", format="zarr", compression=None)
    assert {k: v for k, v in content(tmp_path / "c").items() if "/c." in k} == {
        k: v for k, v in content(tmp_path / "a").items() if "/c." in k
    }
    cut = {"mesh": {"m": 2}, "shardings": {"v": {"m": 1}}}
    reshard(tmp_path / "b", tmp_path / "d", rules="w -> v, permute()", dtype="float64", compression="zstd:1", **cut)
    held = open_checkpoint(tmp_path / "d")
    assert held.compression == Zstd(1)
    assert kit.same(held["v"].read(), tree["w"].T.astype("f8"))
    merge(tmp_path / "b", tmp_path / "hf")
    assert equal(kit, load(tmp_path / "hf"), tree)
    convert(tmp_path / "hf", tmp_path / "e", format="zarr")
    assert open_checkpoint(tmp_path / "e").compression is None


def test_any_workers_and_memory_give_the_same_files(tree, tmp_path):
    save(tmp_path / "a", tree, compression="zstd:1")
    found = []
    for i, (threads, limit) in enumerate(itertools.product((1, 3), (1 << 10, 1 << 24))):
        convert(tmp_path / "a", tmp_path / f"b{i}", format="zarr", compression="zstd", threads=threads, memory_limit=limit)  # fmt: skip
        found.append(content(tmp_path / f"b{i}"))
    assert all(f == found[0] for f in found)


# ----- killed, full, gone on with -------------------------------------------------------------------------------------


class Failing(Files):
    def __init__(self, after):
        self.left = after

    def write(self, fd, buffers, offset):
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return super().write(fd, buffers, offset)


def test_a_full_disk_keeps_the_shards_that_are_whole(kit, tree, tmp_path):
    save(tmp_path / "a", tree)
    options = {"format": "zarr", "compression": "zstd", "threads": 1, **SPLIT}
    convert(tmp_path / "a", tmp_path / "whole", **options)
    with using(Failing(2)), pytest.raises(errors.StorageFull):
        convert(tmp_path / "a", tmp_path / "c", **options)
    part = tmp_path / "c.part"
    held = (part / "w" / "c.0.1").read_bytes()
    (part / "w" / "c.0.1").write_bytes(held[:50] + bytes([held[50] ^ 1]) + held[51:])
    report = convert(tmp_path / "a", tmp_path / "c", **options)
    assert report.resumed == tree["w"].nbytes // 2
    assert content(tmp_path / "c") == content(tmp_path / "whole")
    with using(Failing(2)), pytest.raises(errors.StorageFull):
        save(tmp_path / "d", tree, compression="zstd")
    assert not (tmp_path / "d").exists()


def test_room_for_the_uncompressed_bytes_is_not_asked_for(tmp_path):
    class Small(Files):
        def free_bytes(self, path):
            return 1 << 20

    with using(Small()):
        save(tmp_path / "c", {"w": np.zeros(1 << 19)}, compression="zstd")
        reshard(tmp_path / "c", tmp_path / "d", mesh={"m": 2}, shardings={"w": {"m": 0}})
        with pytest.raises(errors.StorageFull):
            save(tmp_path / "e", {"w": np.zeros(1 << 19)})


@pytest.mark.parametrize(
    "every", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["one operation in seven", "every operation"]
)
def test_a_conversion_killed_at_any_operation(kit, quick, every):
    t = {"w": kit.random(np.dtype("f4"), (20, 48)), "z": np.zeros((90, 9), "i8")}
    save(quick / "a", t)
    options = {"format": "zarr", "compression": "zstd:1", **SPLIT}
    convert(quick / "a", quick / "whole", **options)
    expected = content(quick / "whole")
    for n in range(1, 1000, every):
        home = quick / str(n)
        home.mkdir()
        killed = kit.die_at(n, lambda home=home: convert(quick / "a", home / "c", **options))
        if not (home / "c").exists():
            convert(quick / "a", home / "c", **options)
        assert content(home / "c") == expected
        assert [e.name for e in home.iterdir()] == ["c"]
        if not killed:
            break
    assert n > 20


def test_an_upload_that_was_cut_goes_on(kit, s3, monkeypatch, tmp_path):
    from meshtape.storage.stores import object_store

    monkeypatch.setattr(object_store, "RETRIES", 1)
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(object_store, "_clients", {})
    t = {f"w{i}": kit.random(np.dtype("f4"), (40, 48), i) for i in range(6)}
    save(tmp_path / "a", t, compression="zstd:1")
    s3.proxy.reset(lambda n, method, path: "500" if "w4/c" in path and method == "PUT" else None)
    with pytest.raises(errors.StoreError):
        reshard(tmp_path / "a", f"{s3.url}/c", mesh={"m": 1}, threads=1, pack=False)
    s3.proxy.reset()
    assert reshard(tmp_path / "a", f"{s3.url}/c", mesh={"m": 1}, threads=1, pack=False).resumed > 0
    verify(f"{s3.url}/c")
    assert equal(kit, load(f"{s3.url}/c"), t)
    assert kit.same(open_checkpoint(f"{s3.url}/c")["w3"][3:9, 40:], t["w3"][3:9, 40:])


# ----- hostile files --------------------------------------------------------------------------------------------------


def test_headers_of_frames_say_how_long_they_are():
    for n in (0, 1, 255, 256, 257, 65_791, 65_792, 1 << 20):
        assert content_nbytes(Zstd(1).compress(np.zeros(n, np.uint8))[:18]) == n
    assert content_nbytes(b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00") is None  # a frame that does not say
    assert content_nbytes(b"\x28\xb5\x2f\xfd\xc0\x58") is None  # cut off


class Shard:
    """The parts of a stored shard, to be put together otherwise."""

    def __init__(self, root, name="z", file="c.0.0"):
        self.root, self.path, self.name = root, root / name / file, name
        entry = next(a for a in json.loads((root / manifest.FILE).read_bytes())["arrays"] if a["dir"] == name)
        count = int(np.prod([s // c for s, c in zip(entry["shard"], entry["chunk"], strict=True)]))
        data = self.path.read_bytes()
        rows = [struct.unpack_from("<QQ", data, len(data) - 4 - 16 * count + 16 * k) for k in range(count)]
        self.frames = [data[at : at + n - 4] for at, n in rows]

    def write(self, frames=None, rows=None):
        """A file with these frames and index, all checksums right, and a manifest that fits it."""
        frames = self.frames if frames is None else frames
        at = np.cumsum([0, *(len(f) + 4 for f in frames)]).tolist()
        rows = [(a, b - a) for a, b in itertools.pairwise(at)] if rows is None else rows
        index = b"".join(struct.pack("<QQ", *r) for r in rows)
        body = b"".join(f + crc32c(f).to_bytes(4, "little") for f in frames)
        data = body + index + crc32c(index).to_bytes(4, "little")
        self.path.write_bytes(data)
        top = json.loads((self.root / manifest.FILE).read_bytes())
        top.pop("crc32c")
        for a in top["arrays"]:
            if a["dir"] == self.name:
                a["objects"][0][3:] = [len(data), f"{crc32c(b''.join(frames)):08x}"]
                table = chunk_sums.packed([crc32c(f) for f in frames])
                (self.root / chunk_sums.FILE).write_bytes(table)
                a["sums"] = [0, f"{crc32c(table):08x}"]
        text = json.dumps(top).encode()
        (self.root / manifest.FILE).write_bytes(text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text))


@pytest.fixture
def shard(tmp_path):
    save(tmp_path / "c", {"z": np.arange(300 * 8, dtype="i8").reshape(300, 8) // 7}, compression="zstd")
    held = Shard(tmp_path / "c")
    assert len(held.frames) > 8
    held.write()
    verify(tmp_path / "c")
    return held


def refused(shard, match):
    for act in (load, verify, lambda path: reshard(path, f"{path}.new", mesh={"m": 2}, shardings={"z": {"m": 1}})):
        with pytest.raises(errors.CorruptCheckpoint, match=match):
            act(shard.root)


def test_frames_that_hold_more_or_less_than_a_chunk_are_refused(shard):
    chunk = open_checkpoint(shard.root)["z"].tensor.chunk
    nbytes = int(np.prod(chunk)) * 8
    for n in (0, 1, nbytes - 1, nbytes + 1, 1 << 22):
        shard.write([Zstd().compress(np.zeros(n, np.uint8)), *shard.frames[1:]])
        for act in (load, verify):
            with pytest.raises(errors.CorruptCheckpoint, match=rf"chunk \(0, 0\).*announces {n} bytes"):
                act(shard.root)
    # One that lies about it: the header of one frame, the content of another.
    bomb = Zstd().compress(np.zeros(1 << 22, np.uint8))
    honest = Zstd().compress(np.zeros(nbytes, np.uint8))
    assert (honest[4] >> 6, bomb[4] >> 6) == (1, 2)
    lying = bytes([*bomb[:4], bomb[4], *honest[5:6]])
    for frame in (
        honest[:4] + bytes([honest[4]]) + honest[5:7] + bomb[9:],  # blocks of four megabytes
        honest[:-1],
        honest + bomb,
        bomb[:5] + nbytes.to_bytes(4, "little") + bomb[9:],
        b"\x28\xb5\x2f\xfd\x00\x58" + honest[7:],
        lying,
        b"",
        b"nonsense" * 4,
    ):
        shard.write([frame, *shard.frames[1:]])
        with pytest.raises(errors.CorruptCheckpoint):
            load(shard.root)
        with pytest.raises(errors.CorruptCheckpoint):
            verify(shard.root)


def test_frames_of_blosc_that_lie_are_refused():
    """Every header and every cut ends in the right bytes or an error, and never writes beyond its chunk."""
    data = np.arange(1 << 12, dtype="f4").view("u1")
    good = ShuffledZstd().compress(data, 4)
    room = np.zeros(data.size + 64, "u1")

    def unpacked(frame):
        room[:] = 77
        with contextlib.suppress(ValueError):
            ShuffledZstd().decompress(np.frombuffer(frame, "u1"), room[:-64])
            return room[:-64].tobytes()
        assert (room[-64:] == 77).all()
        return None

    assert unpacked(good) == data.tobytes()
    rng = np.random.default_rng(0)
    for frame in (b"", good[:15], good[:-1], good + b"x", ShuffledZstd().compress(data[:-4], 4), Zstd().compress(data)):
        assert unpacked(frame) is None
    for at in range(20):  # the header, and where the first block begins
        for value in (0, 1, 2, 127, 255, good[at] ^ 1):
            unpacked(good[:at] + bytes([value]) + good[at + 1 :])
    for at in rng.integers(20, len(good), 200).tolist():
        unpacked(good[:at] + bytes([good[at] ^ 1 << int(rng.integers(8))]) + good[at + 1 :])
    huge = good[:4] + (1 << 31).to_bytes(4, "little") + good[8:]
    with pytest.raises(ValueError, match="announces 2147483648 bytes"):
        ShuffledZstd().decompress(np.frombuffer(huge, "u1"), room[:-64])


def test_an_index_that_does_not_add_up_is_refused(shard):
    at = np.cumsum([0, *(len(f) + 4 for f in shard.frames)]).tolist()
    good = [(a, b - a) for a, b in itertools.pairwise(at)]
    big = 2**64 - 1
    far = 2**63 + 10  # lengths that pass over the end of the numbers, and come back to the right sum
    for rows in (
        [(0, far), (far, (at[2] - far) % 2**64), *good[2:]],
        [(big, big), *good[1:]],
        [(0, big), *good[1:]],
        [(0, 2**63), (2**63, 2**63), *good[2:]],
        [good[1], good[0], *good[2:]],
        [good[0], good[0], *good[2:]],
        [(0, 4), *good[1:]],
        [(8, good[0][1]), *good[1:]],
        [*good[:-1], (good[-1][0], good[-1][1] + 1)],
        [*good[:-1], (1 << 40, good[-1][1])],
    ):
        shard.write(rows=rows)
        refused(shard, "its index")


@BOTH
def test_changed_bytes_are_found(kit, tmp_path, codec):
    rng = np.random.default_rng(0)
    w = np.arange(600, dtype="i4").reshape(30, 20) // 9
    save(tmp_path / "c", {"w": w}, compression=codec)
    file = tmp_path / "c" / "w" / "c.0.0"
    data = file.read_bytes()
    for at in rng.integers(0, len(data), 60):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :])
        compressed._known.__init__()  # a process that has not read it before
        with pytest.raises(errors.CorruptCheckpoint):
            load(tmp_path / "c")
        with pytest.raises(errors.CorruptCheckpoint):
            verify(tmp_path / "c")
    for n in (0, 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:n])
        with pytest.raises(errors.CorruptCheckpoint):
            load(tmp_path / "c")
    file.write_bytes(data)
    assert kit.same(load(tmp_path / "c")["w"], w)
    assert kit.same(load(tmp_path / "c", verify=False)["w"], w)


def test_a_manifest_cannot_make_it_take_memory(shard):
    top = json.loads((shard.root / manifest.FILE).read_bytes())
    top.pop("crc32c")
    (a,) = top["arrays"]
    for changes in (
        {"compression": {"name": "lz4", "level": 3}},
        {"compression": {"name": "zstd", "level": 99}},
        {"compression": {"name": "zstd", "level": 3, "x": 1}},
        {"compression": "zstd"},
        {"shape": [300, 1 << 40], "chunk": [300, 1 << 40], "shard": [300, 1 << 40]},
        {"shape": [1 << 40, 8], "chunk": [1, 8], "shard": [1 << 40, 8]},
    ):
        new = copy_of(top, a | changes, changes)
        text = json.dumps(new).encode()
        (shard.root / manifest.FILE).write_bytes(text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text))
        with pytest.raises(errors.CorruptCheckpoint):
            open_checkpoint(shard.root)["z"][:1, :1]


def copy_of(top, a, changes):
    """A manifest whose array is ``a``, of consistent lengths."""
    if "shape" in changes:
        a = a | {"nbytes": int(np.prod(a["shape"], dtype=object)) * 8}
        a["objects"] = [[row[0], [0, 0], a["shape"], *row[3:]] for row in a["objects"]]
    return top | {"arrays": [a]}


# ----- shown ----------------------------------------------------------------------------------------------------------


def test_pages_and_commands_show_it(tree, tmp_path):
    from click.testing import CliRunner

    from meshtape.cli.main import main
    from meshtape.storage.browse.model.layout import chunk_map, stored

    save(tmp_path / "a", tree)
    run = lambda *a: CliRunner().invoke(main, list(map(str, a)))  # noqa: E731
    assert run("convert", tmp_path / "a", tmp_path / "b", "--format", "zarr", "--compression", "zstd:5").exit_code == 0
    held = open_checkpoint(tmp_path / "b")
    assert held.compression == Zstd(5)
    assert "zstd:5" in run("ls", tmp_path / "b").output
    assert "zstd:5 to " in stored(held["zeros"]).how
    chunks = chunk_map(held["zeros"], 0, 1, (0, 0)).chunks
    where = tmp_path / "b" / "zeros" / "c.0.0"
    whole = held["zeros"].tensor
    assert sum(c.nbytes for c in chunks) == where.stat().st_size - compressed.index_nbytes(whole.grid)
    assert "by zstd:5" in chunks[0].note
    assert {c.state for c in chunk_map(held["zeros"], 0, 1, (0, 0), check=True).chunks} == {"sound"}
    assert run("reshard", tmp_path / "b", tmp_path / "c", "--mesh", "m=2", "--compression", "none").exit_code == 0
    assert open_checkpoint(tmp_path / "c").compression is None
    assert "at most" in run("estimate", tmp_path / "a", "--compression", "zstd").output
    wrong = run("convert", tmp_path / "a", tmp_path / "d", "--format", "safetensors", "--compression", "zstd")
    assert wrong.exit_code == 1
    assert "never compressed" in str(wrong.exception) + wrong.output
    assert compression.chosen("zstd") == Zstd()
