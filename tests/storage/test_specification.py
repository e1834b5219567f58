"""The storage format is a specification: a reader and a writer made from its text alone, which share no code with
meshtape."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
from numcodecs import blosc, zstd

import meshtape as mt

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
EXTRA = {n: getattr(ml_dtypes, n) for n in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


def plain(value: Any) -> Any:
    """Section 2: ``{"$float": "NaN"}`` stands for what JSON has not."""
    if isinstance(value, dict):
        return NOT_FINITE[value["$float"]] if set(value) == {"$float"} else {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def read(root: Path) -> tuple[dict[str, Any], Any]:
    """The manifest, and the tree with its arrays, by sections 1, 2 and 4."""
    raw = (root / "meshtape.json").read_bytes()
    tail = re.search(rb', "crc32c": "([0-9a-f]{8})"\}\Z', raw.rstrip(b"\n"))
    assert google_crc32c.value(raw[: tail.start()] + b"}") == int(tail[1], 16)
    manifest = json.loads(raw)
    assert manifest["format"] == "meshtape"
    assert manifest["version"] in (1, 3, 5)
    arrays = [array(root, a) for a in manifest["arrays"]]
    if "base" in manifest:
        name, identity = manifest["base"]
        base = json.loads((root.parent / name / "meshtape.json").read_bytes())
        assert identity == f"meshtape:{base['crc32c']}"
        below = {tuple(a["path"]): array(root.parent / name, a) for a in base["arrays"]}
        said = manifest["arrays"]
        arrays = [
            added(below[tuple(a["path"])], x, a) if a.get("delta") else x for a, x in zip(said, arrays, strict=True)
        ]
    for name, (crc, file) in manifest.get("documents", {}).items():
        assert google_crc32c.value((root / file).read_bytes()) == int(crc, 16), name
    return manifest, node(manifest["tree"], arrays)


def node(n: Any, arrays: list[np.ndarray]) -> Any:
    if n is None:
        return None
    ((kind, value),) = n.items()
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {k: node(v, arrays) for k, v in value}
    if kind in ("list", "tuple"):
        items = [node(v, arrays) for v in value]
        return tuple(items) if kind == "tuple" else items
    assert kind == "value"
    return plain(value)


def signed(z: np.ndarray) -> np.ndarray:
    return (z >> 1) ^ (np.zeros_like(z) - (z & 1))


def added(base: np.ndarray, stored: np.ndarray, a: dict[str, Any]) -> np.ndarray:
    """Section 2.6."""
    bits = stored.view(f"u{base.dtype.itemsize}")
    d = bits if a["compression"]["name"] == "packed-zstd" else signed(bits)
    return (base.view(bits.dtype) + d).view(base.dtype)


def unpacked(frame: bytes) -> bytes:
    """The content of a frame of ``packed-zstd``."""
    end = 4 + int.from_bytes(frame[:4], "little")
    if end == 4:
        return blosc.decompress(frame[4:])
    z = np.array([b >> k & 3 for b in zstd.decompress(frame[4:end]) for k in (0, 2, 4, 6)], "<u2")
    if (z == 3).any():
        z[z == 3] += np.frombuffer(blosc.decompress(frame[end:]), "<u2")
    return signed(z).tobytes()


def array(root: Path, a: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(EXTRA.get(a["dtype"], a["dtype"]))
    out = np.zeros(a["shape"], dtype)
    assert out.nbytes == a["nbytes"]
    seen = np.zeros(a["shape"], bool)
    for file, offset, shape, length, crc in a["objects"]:
        data = (root / a["dir"] / file).read_bytes()
        assert len(data) == length
        together, at, table = b"", 0, []
        grid = [-(-s // c) for s, c in zip(a["shard"], a["chunk"], strict=True)]
        compressed = a.get("compression") is not None and bool(a["shape"])
        stored = np.frombuffer(data[-(math.prod(grid) * 16 + 4) : -4], "<u8").reshape(*grid, 2) if compressed else None
        for index in np.ndindex(*grid):
            start = [i * c for i, c in zip(index, a["chunk"], strict=True)]
            if any(s >= n for s, n in zip(start, shape, strict=True)):
                table.append((2**64 - 1, 2**64 - 1))  # holds no element of the array
                continue
            size = math.prod(a["chunk"]) * dtype.itemsize
            if stored is not None:
                size = int(stored[index][1]) - 4
            block = data[at : at + size]
            assert google_crc32c.value(block) == int.from_bytes(data[at + size : at + size + 4], "little")
            together += block
            table.append((at, size + 4))
            at += size + 4
            if stored is not None:
                kind = a["compression"]["name"]
                codec = {"zstd": zstd.decompress, "shuffle-zstd": blosc.decompress, "packed-zstd": unpacked}[kind]
                block = codec(block)
            ends = [min(s + c, n) for s, c, n in zip(start, a["chunk"], shape, strict=True)]
            place = tuple(slice(o + s, o + e) for o, s, e in zip(offset, start, ends, strict=True))
            inside = tuple(slice(e - s) for s, e in zip(start, ends, strict=True))
            assert not seen[place].any(), "each element once"
            seen[place] = True
            out[place] = np.frombuffer(block, dtype, math.prod(a["chunk"])).reshape(a["chunk"])[inside]
        assert google_crc32c.value(together) == int(crc, 16)
        if a["shape"]:  # 1.3: a 0-d array is one bare chunk, without an index
            index_bytes = b"".join(struct.pack("<QQ", *row) for row in table)
            mark = google_crc32c.value(index_bytes).to_bytes(4, "little")
            assert data[at:] == index_bytes + mark
    assert seen.all()
    return out


def same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b or (a != a and b != b)


@pytest.mark.parametrize("compression", [None, "zstd", "weights", "delta"])
def test_a_reader_made_from_the_text_reads_everything(tmp_path: Path, compression: str | None) -> None:
    rng = np.random.default_rng(0)
    mesh = mt.Mesh({"data": 2, "model": 3})
    w, odd = rng.normal(size=(10, 7)).astype(np.float32), rng.normal(size=(5, 4, 3))
    tree = {
        "layers": [{"w": w, "half": w.astype(ml_dtypes.bfloat16)}, (odd, None)],
        "flags": rng.integers(0, 2, 9).astype(bool),
        "step": np.int64(7),
        "empty": np.zeros((0, 3), np.int16),
        "names/with .. %": np.arange(3, dtype=np.uint8),
        "rate": 1e-3,
        "bad": math.nan,
        "kind": "adam",
        "on": True,
    }
    split = {**tree, "layers": [{**tree["layers"][0], "w": mt.distribute(w, mesh, data=mt.Shard(0), model=mt.Shard(1))}, (mt.distribute(odd, mesh, model=mt.Shard(0)), None)]}  # fmt: skip
    if compression == "delta":
        mt.save(tmp_path / "b", {**tree, "layers": [{"w": w + 1, "half": w.astype(ml_dtypes.bfloat16)}, (-odd, None)]})
    mt.save(
        tmp_path / "c",
        split,
        step=3,
        metadata={"loss": math.inf, "who": "é"},
        documents={"config.json": {"a": 1}},
        compression=None if compression == "delta" else compression,
        base=tmp_path / "b" if compression == "delta" else None,
    )
    manifest, found = read(tmp_path / "c")
    expected = {**tree, "step": np.asarray(tree["step"])}
    same({k: found[k] for k in expected}, expected)
    assert manifest["step"] == 3
    assert plain(manifest["metadata"]) == {"loss": math.inf, "who": "é"}
    assert manifest["meshes"] == [[["data", 2], ["model", 3]]]
    (split_w,) = [a for a in manifest["arrays"] if a["path"] == ["layers", 0, "w"]]
    assert split_w["sharding"] == ["Shard(0)", "Shard(1)"]
    assert len(split_w["objects"]) == 6, "one file a block"


def write(root: Path, arrays: dict[str, np.ndarray], step: int) -> None:
    """A checkpoint of flat names, one shard and one chunk an array, by section 1 and 2."""
    root.mkdir()
    entries = []
    for name, a in arrays.items():
        where = root / name
        where.mkdir()
        data = a.astype(a.dtype.newbyteorder("<")).tobytes()
        index = struct.pack("<QQ", 0, len(data) + 4)
        parts = [data, google_crc32c.value(data).to_bytes(4, "little"), index, google_crc32c.value(index).to_bytes(4, "little")]  # fmt: skip
        file = "c." + ".".join("0" * a.ndim)
        (where / file).write_bytes(b"".join(parts))
        crc = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {"chunk_shape": list(a.shape), "codecs": crc, "index_codecs": crc, "index_location": "end"}
        zarr_json = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(a.shape),
            "data_type": a.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(a.shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        }
        (where / "zarr.json").write_text(json.dumps(zarr_json))
        whole = [file, [0] * a.ndim, list(a.shape), sum(map(len, parts)), f"{google_crc32c.value(data):08x}"]
        entries.append({"path": [name], "dir": name, "shape": list(a.shape), "dtype": a.dtype.name, "shard": list(a.shape), "chunk": list(a.shape), "nbytes": a.nbytes, "mesh": None, "sharding": None, "objects": [whole]})  # fmt: skip
    (root / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {"meshtape": {"version": 1}}}))  # fmt: skip
    head = {
        "format": "meshtape",
        "version": 1,
        "step": step,
        "metadata": {},
        "nbytes": sum(a.nbytes for a in arrays.values()),
        "meshes": [],
        "tree": {"dict": [[name, {"array": i}] for i, name in enumerate(arrays)]},
        "arrays": entries,
    }
    body = json.dumps(head).encode()
    (root / "meshtape.json").write_bytes(body[:-1] + b', "crc32c": "%08x"}' % google_crc32c.value(body))


def test_what_a_writer_made_from_the_text_writes_is_a_checkpoint(tmp_path: Path) -> None:
    import zarr

    arrays = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "n": np.arange(5)}
    write(tmp_path / "c", arrays, 9)
    ckpt = mt.open_checkpoint(tmp_path / "c")
    assert ckpt.step == 9
    same({k: np.asarray(v) for k, v in mt.load(tmp_path / "c").items()}, arrays)
    assert mt.verify(tmp_path / "c").arrays == 2
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")["w"][:], arrays["w"])
    file = tmp_path / "c" / "w" / "c.0.0"
    file.write_bytes(b"\x01" + file.read_bytes()[1:])
    with pytest.raises(mt.errors.CorruptCheckpoint):
        mt.load(tmp_path / "c")
