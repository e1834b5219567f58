"""Files are hostile: whatever bytes they hold, the answer is a checkpoint error or the right array.

Each test runs a seeded sample by default and, marked ``slow``, enough cases for more than 10⁵ together. A case that
fails is named by its seed.
"""

import copy
import json
import math
import os
import random
import re

import numpy as np
import pytest
import zarr

import meshtape.parallel  # noqa: F401  # it has ops of its own
from meshtape import errors
from meshtape.arrays.core.op import OPS
from meshtape.storage import load, load_program, merge, open_checkpoint, save
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.format import chunk_grid, dtypes, manifest
from meshtape.storage.readers import safetensors

SCALE = [pytest.param(1, id="sample"), pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(3000)], id="all")]
ODD = [
    0,
    1,
    -1,
    2**31,
    2**62,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e400,
    None,
    True,
    "",
    "x",
    "..",
    "../x",
    "/etc/passwd",
]
ODD += [
    "a/../../x",
    "\x00",
    "c.0",
    "F32",
    "F4",
    "bool",
    [],
    [[]],
    {},
    {"a": []},
    [0, 2**63],
    [2**40, 2**40],
    "9" * 400,
    "é" * 50,
]


def flipped(rng, data):
    """A few bytes changed, cut, doubled or zeroed."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not data:
            break
        at, n = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 40])
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[at : at + n]
        elif kind == 3:
            data[at:at] = data[at : at + n]
        elif kind == 4:
            data[at : at + n] = bytes(len(data[at : at + n]))
        else:
            del data[at:]
    return bytes(data)


def twisted(rng, document):
    """A JSON document with one to three places changed for something odd."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice([1, 1, 2, 3])):
        node, key, parent = document, None, None
        while isinstance(node, (dict, list)) and node and (parent is None or rng.random() < 0.85):
            parent = node
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            node = node[key]
        if parent is None:
            continue
        kind = rng.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), parent[key])
        elif kind == 2 and isinstance(node, int) and not isinstance(node, bool):
            parent[key] = node + rng.choice([-1, 1, 8, -node - 1, 2**32])
        elif kind == 3 and isinstance(parent, dict):
            parent[rng.choice(["dtype", "shape", "extra", "", "data_offsets"])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(ODD))
    return document


def cases(scale, count, tag):
    for i in range(scale * count):
        yield f"{tag} {i}", random.Random(f"{tag} {i}")


@pytest.fixture(scope="module")
def small(tmp_path_factory, kit):
    where = tmp_path_factory.mktemp("small") / "c"
    host = kit.Host({"x": 2})
    tree = {
        "w": kit.split(np.arange(24, dtype="f4").reshape(4, 6), kit.Sharding(host, (0,))),
        "b": [np.arange(5), {"s": np.float64(2.5)}],
        "n": np.ones((0, 3), "i2"),
        "epoch": 3,
    }
    save(where, tree, step=5, metadata={"note": "x"})
    merge(where, where.parent / "hf", max_shard_bytes=100)
    return where


@pytest.mark.parametrize("scale", SCALE)
def test_safetensors_headers(scale):
    entries = [
        ("a", "F32", (2, 3)),
        ("b", "I64", ()),
        ("c", "F8_E4M3", (7,)),
        ("d", "BOOL", (0, 3)),
        ("é", "BF16", (1, 1, 2)),
    ]
    head, place = safetensors.build_header(entries, {"format": "pt"})
    size = len(head) + sum(t.nbytes for t in place.values())
    document = json.loads(head[8:])
    accepted = 0
    for seed, rng in cases(scale, 800, "header"):
        if rng.random() < 0.5:
            prefix = flipped(rng, head)
        else:
            text = json.dumps(twisted(rng, document)).replace("Infinity", "1e999").encode()
            text += b" " * (-len(text) % 8)
            prefix = len(text).to_bytes(8, "little") + text
        total = rng.choice([size, len(prefix) + size - len(head), size - 1, 2**63])
        try:
            header = safetensors.parse_header(prefix, total)
        except errors.CorruptCheckpoint:
            continue
        accepted += 1
        at = 0
        for t in header.tensors.values():
            assert t.begin == at, seed
            at = t.end
            assert 8 * t.nbytes == math.prod(t.shape) * dtypes.SAFETENSORS[t.dtype].bits, seed
        assert header.data_start + at == total, seed
    assert accepted  # renamed keys, for one, are right


@pytest.mark.parametrize("scale", SCALE)
def test_manifests(scale, small):
    data = (small / manifest.FILE).read_bytes()
    document = json.loads(data)
    del document["crc32c"]
    opened = 0
    for seed, rng in cases(scale, 600, "manifest"):
        if rng.random() < 0.3:
            text = flipped(rng, data)
            if text == data:
                continue
        else:
            # Signed again: an attacker can, and the checks below the checksum are what counts.
            text = json.dumps(twisted(rng, document), separators=(",", ":")).encode()
            text = text[:-1] + b', "crc32c": "%08x"}\n' % crc32c(text)
        try:
            m = manifest.loads(text, "m")
        except errors.CheckpointError:
            continue
        opened += 1
        for a in m.arrays:
            assert "/" not in a.directory, seed
            assert a.directory not in ("", ".", ".."), seed
            assert a.nbytes < 2**62, seed
            assert len(a) == math.prod(a.grid.counts), seed
    assert opened


@pytest.mark.parametrize("scale", SCALE)
def test_a_checkpoint_with_any_file_changed(scale, small, kit):
    """Damage is an error, or it is in a place that does not matter to the values."""
    good = load(small)
    files = sorted(p for p in small.rglob("*") if p.is_file())
    refused = 0
    for seed, rng in cases(scale, 250, "file"):
        path = rng.choice(files)
        before = path.read_bytes()
        after = flipped(rng, before)
        path.write_bytes(after)
        try:
            got = load(small)
        except errors.CheckpointError:
            refused += 1
        else:
            assert kit.same(got["w"], good["w"]), seed
            assert kit.same(got["b"][0], good["b"][0]), seed
            assert kit.same(got["b"][1]["s"], good["b"][1]["s"]), seed
            assert got["epoch"] == 3, seed
        finally:
            path.write_bytes(before)
    assert refused > scale * 50
    assert kit.same(load(small)["w"], good["w"])


@pytest.mark.parametrize("scale", SCALE)
def test_hugging_face_indexes(scale, small, tmp_path):
    """Nothing is read that lies outside of the directory."""
    root = small.parent / "hf"
    index = root / "model.safetensors.index.json"
    data = index.read_bytes()
    secret = np.arange(3.0)
    safetensors.save_safetensors(small.parent / "x", {"w": secret}, overwrite=True)
    link = root / "link.safetensors"
    link.unlink(missing_ok=True)
    os.symlink(small.parent / "x", link)
    document = json.loads(data)
    try:
        for seed, rng in cases(scale, 150, "index"):
            changed = twisted(rng, document)
            if rng.random() < 0.3 and isinstance(changed.get("weight_map"), dict):
                changed["weight_map"]["w"] = rng.choice(
                    ["../x", "link.safetensors", str(small.parent / "x"), "a/../../x"]
                )
            index.write_bytes(json.dumps(changed).encode() if rng.random() < 0.8 else flipped(rng, data))
            try:
                got = open_checkpoint(root)
                values = {n: got[n].read() for n in got}
            except errors.CheckpointError:
                continue
            for n, v in values.items():
                assert v.shape != (3,), (seed, n)
    finally:
        index.write_bytes(data)
        link.unlink()


@pytest.mark.parametrize("scale", SCALE)
def test_zarr_metadata_of_others(scale, tmp_path):
    a = zarr.create_array(str(tmp_path / "z"), shape=(6, 4), dtype="f4", chunks=(3, 4))
    a[...] = np.arange(24).reshape(6, 4)
    path = tmp_path / "z" / "zarr.json"
    data = path.read_bytes()
    document = json.loads(data)
    read = 0
    for _, rng in cases(scale, 40, "zarr"):
        path.write_bytes(json.dumps(twisted(rng, document)).encode() if rng.random() < 0.7 else flipped(rng, data))
        try:
            ckpt = open_checkpoint(tmp_path / "z")
            for name in ckpt:
                stored = ckpt[name]
                if stored.nbytes < 1 << 20:
                    stored.read()
                    read += 1
        except errors.CheckpointError:
            continue
    assert read


@pytest.mark.parametrize("scale", SCALE)
def test_programs_of_every_op(scale, op_programs):
    """A call with anything changed is refused when it is loaded, or is one that its op takes; a call that cannot be
    made says so."""
    refused, ran, late = 0, 0, []
    for name in sorted(OPS):
        samples = list(op_programs(name))
        for seed, rng in cases(scale, 4, name):
            _, document, args, _ = rng.choice(samples)
            document = json.loads(json.dumps(document))
            (entry,) = document["entries"]
            where = rng.random()
            if where < 0.5 and "params" in entry:
                entry["params"] = twisted(rng, entry["params"])
            elif where < 0.8:
                document["entries"] = twisted(rng, document["entries"])
            else:
                document = twisted(rng, document)
            try:
                run = load_program(document)
                if re.search(r"\d{10}", json.dumps(document["entries"])):
                    continue  # a permutation of so many numbers is possible, and takes its time
                arrays = [a for a in args if isinstance(a, np.ndarray)]
                with np.errstate(all="ignore"):
                    got = run(*arrays)
            except errors.MeshtapeError as e:
                refused += 1
                if "cannot be computed" in str(e):
                    late.append((seed, str(e)))
            else:
                ran += 1
                # What is said of the results is so.
                said = [document["types"][str(v)] for v in document["outputs"]]
                assert [[a.dtype.name, list(a.shape)] for a in got] == said, seed
    assert refused > 5 * ran > 0
    assert not late  # nothing was found out only when it ran


def signed_shard(rng, frames, twist):
    """A shard of these frames with every checksum right, and what the manifest says of it; ``twist`` changes its
    index."""
    body, entries, digest = b"", [], 0
    for frame in frames:
        entries += [len(body), len(frame) + 4]
        body += frame + crc32c(frame).to_bytes(4, "little")
        digest = crc32c(frame, digest)
    if twist:
        at = rng.randrange(len(entries))
        entries[at] = rng.choice(
            [0, 1, 2**31, 2**63, 2**64 - 1, -entries[at] % 2**64, entries[at] + 1, entries[at - 1]]
        )
        if rng.random() < 0.3:
            rng.shuffle(entries)
    index = np.array(entries, "<u8").tobytes()
    data = body + index + crc32c(index).to_bytes(4, "little")
    return data, len(data), f"{digest:08x}"


@pytest.mark.parametrize("scale", SCALE)
def test_compressed_shards(scale, tmp_path, monkeypatch):
    """Frames and indexes that somebody changed and signed again: an error, or an array of the shape and dtype that the
    manifest says."""
    monkeypatch.setattr(chunk_grid, "TARGET", 1 << 9)
    monkeypatch.setattr(chunk_grid, "SHORTEST_ROW", 64)
    values = {"w": (np.arange(640) // 7).astype("f4").reshape(20, 32), "n": np.zeros((40, 16), "i8")}
    save(tmp_path / "c", values, compression="zstd")
    text = (tmp_path / "c" / manifest.FILE).read_bytes()
    arrays = json.loads(text)["arrays"]
    held = {}
    for array in arrays:
        ((file, *_),) = array["objects"]
        path = tmp_path / "c" / array["dir"] / file
        data = path.read_bytes()
        n = math.prod(-(-s // c) for s, c in zip(array["shard"], array["chunk"], strict=True))
        index = np.frombuffer(data[-16 * n - 4 : -4], "<u8").reshape(n, 2)
        held[path] = data, [data[at : at + size - 4] for at, size in index.tolist()]
        assert n > 3
    refused = read = 0
    for seed, rng in cases(scale, 100, "frames"):
        which = rng.randrange(2)
        path = list(held)[which]
        data, frames = held[path]
        frames, kind = list(frames), rng.randrange(4)
        at = rng.randrange(len(frames))
        if kind == 0:  # nothing is signed again
            changed, size, digest = flipped(rng, data), None, None
        else:
            if kind == 1:
                frames[at] = flipped(rng, frames[at])
            elif kind == 2:
                frames[at] = rng.choice([f for _, fs in held.values() for f in fs])
            changed, size, digest = signed_shard(rng, frames, twist=kind == 3)
        document = json.loads(text)
        del document["crc32c"]
        if size is not None:
            document["arrays"][which]["objects"][0][3:] = [size, digest]
        told = json.dumps(document, separators=(",", ":")).encode()
        path.write_bytes(changed)
        (tmp_path / "c" / manifest.FILE).write_bytes(told[:-1] + b', "crc32c": "%08x"}\n' % crc32c(told))
        try:
            got = load(tmp_path / "c")
        except errors.CheckpointError:
            refused += 1
        else:
            read += 1
            for name, value in values.items():
                assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), seed
                if kind == 0:
                    assert np.array_equal(np.asarray(got[name]), value), seed
        path.write_bytes(data)
    assert refused > scale * 40
    assert read > scale * 5
