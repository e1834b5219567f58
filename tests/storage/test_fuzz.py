"""Files are hostile: whatever bytes they hold, the answer is a checkpoint error or the right array.

Each test runs a seeded sample by default and, marked ``slow``, enough cases for more than 10⁵ together. A case that fails is named by its
seed.
"""

import copy
import json
import math
import os
import random

import numpy as np
import pytest
import zarr

from meshtape import errors
from meshtape.storage import dtypes, load, manifest, merge, open_checkpoint, safetensors, save
from meshtape.storage.checksums import crc32c

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
            try:
                objects = a.objects
            except errors.CheckpointError:
                continue
            assert len(objects) == math.prod(a.grid.counts), seed
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
