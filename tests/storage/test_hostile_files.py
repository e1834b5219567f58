"""Input that means harm, or is of an odd kind: a typed error in bounded memory, never an endless wait."""

import json
import math
import os
import re
import signal
import socket
import struct

import numpy as np
import pytest
import zarr

from meshtape import errors
from meshtape.storage import (
    CheckpointManager,
    gc,
    leftovers,
    load,
    load_safetensors,
    merge,
    open_checkpoint,
    read_header,
    save,
    save_safetensors,
    verify,
)
from meshtape.storage.base.sealed import sealed, unsealed
from meshtape.storage.stores import store

PLACES = {  # what is replaced, below the directory of each kind
    "meshtape": ["meshtape.json", "w/c.0", "config.json"],
    "Hugging Face": ["model.safetensors.index.json", "model.safetensors", "config.json"],
    "Zarr": ["w/zarr.json", "w/c/0"],
    "one file": ["x.safetensors"],
}


def directory(kind, home):
    where = home / "c"
    if kind == "meshtape":
        save(where, {"w": np.arange(4.0)}, documents={"config": {"a": 1}})
    elif kind == "Hugging Face":
        save(home / "src", {"w": np.arange(4.0)}, documents={"config": {"a": 1}})
        merge(home / "src", where)
    elif kind == "Zarr":
        group = zarr.open_group(where, mode="w")
        group.create_array("w", data=np.arange(4.0))
    else:
        where.mkdir()
        save_safetensors(where / "x.safetensors", {"w": np.arange(4.0)})
    return where


def odd(kind, path):
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        old = os.getcwd()
        os.chdir(path.parent)  # an address of a socket has at most 108 bytes
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.bind(path.name)
        finally:
            os.chdir(old)


@pytest.fixture(autouse=True)
def no_endless_wait():
    def late(*_):
        raise TimeoutError("an endless wait")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["pipe", "directory", "socket", "device"])
@pytest.mark.parametrize(("kind", "file"), [(k, f) for k, files in PLACES.items() for f in files])
def test_odd_things_in_place_of_files(tmp_path, kind, file, what):
    where = directory(kind, tmp_path)
    odd(what, where / file)
    refused = 0
    for use in (load, lambda p: [open_checkpoint(p).documents[n] for n in ("config",) if kind != "Zarr"], verify):
        try:
            use(where)
        except errors.CheckpointError:
            refused += 1
    # Beside a directory in the place of its index, the one file of a model is a checkpoint by itself.
    assert refused or (file.endswith("index.json") and what == "directory")


@pytest.mark.parametrize("what", ["pipe", "directory", "socket", "device"])
def test_odd_things_named_themselves(tmp_path, what):
    odd(what, tmp_path / "x.safetensors")
    for use in (load, open_checkpoint, read_header, load_safetensors, verify):
        with pytest.raises(errors.CheckpointError):
            use(tmp_path / "x.safetensors")


@pytest.mark.parametrize("what", ["pipe", "directory", "socket", "device"])
def test_only_files_are_replaced_by_a_file(tmp_path, what):
    """A device is reached through a link here: none is at risk in a test."""
    path = tmp_path / "x.safetensors"
    odd(what, path)
    before = os.lstat(path)
    for overwrite in (False, True):
        with pytest.raises(errors.CheckpointError):
            save_safetensors(path, {"w": np.ones(3)}, overwrite=overwrite)
    with pytest.raises(errors.CheckpointExists, match="only files are replaced"):
        store.at(str(tmp_path)).put("x.safetensors", b"x")
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert [e.name for e in tmp_path.iterdir()] == ["x.safetensors"]


def sized(path, shape):
    """A file of one array whose elements are a hole."""
    nbytes = math.prod(shape) * 8
    if path.suffix == ".npy":
        with path.open("wb") as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "<f8", "fortran_order": False, "shape": shape})
    elif path.suffix == ".zarr":
        zarr.create_array(path, shape=shape, chunks=tuple(max(1, n // 8) for n in shape), dtype="f8")
        return path
    else:
        path.write_bytes(blob({"w": {"dtype": "F64", "shape": list(shape), "data_offsets": [0, nbytes]}}))
    os.truncate(path, path.stat().st_size + nbytes)
    return path


@pytest.mark.filterwarnings("ignore:.*chunks of key")
@pytest.mark.parametrize("suffix", ["npy", "safetensors", "zarr"])
@pytest.mark.parametrize(
    "use",
    [
        load,
        lambda p: next(iter(open_checkpoint(p).values()))[:],
        lambda p: next(iter(open_checkpoint(p).values()))[::2],
        lambda p: load_safetensors(p) if p.suffix == ".safetensors" else load(p, keys="*"),
    ],
    ids=["load", "slice", "steps", "load_safetensors"],
)
def test_more_than_there_is_memory_for(tmp_path, monkeypatch, suffix, use):
    path, empty = sized(tmp_path / f"x.{suffix}", (1 << 20,)), np.empty

    def small(shape, *args, **kw):
        if math.prod(np.atleast_1d(shape).tolist()) >= 1 << 19:
            raise MemoryError("Unable to allocate it")
        return empty(shape, *args, **kw)

    monkeypatch.setattr(np, "empty", small)
    with pytest.raises(errors.OutOfMemory, match=r"key .*read slices"):
        use(path)


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
@pytest.mark.parametrize("index", [None, (slice(None), slice(None, None, 3)), slice(None)], ids=str)
def test_lengths_beside_a_zero_that_no_array_has(tmp_path, suffix, index):
    path = sized(tmp_path / f"x.{suffix}", (0, 1 << 40, 1 << 40))
    with pytest.raises(errors.CheckpointError, match=r"no array has the shape \(0, "):
        load(path) if index is None else next(iter(open_checkpoint(path).values()))[index]


@pytest.mark.parametrize(
    "use", [load, verify, lambda p: merge(p, p / "out"), lambda p: next(iter(open_checkpoint(p).values()))[:]]
)
def test_chunks_without_a_length(tmp_path, use):
    zarr.create_array(tmp_path / "z", shape=(4,), chunks=(4,), dtype="f8")[...] = 1
    text = json.loads((tmp_path / "z" / "zarr.json").read_text())
    text["chunk_grid"]["configuration"]["chunk_shape"] = [0]
    (tmp_path / "z" / "zarr.json").write_text(json.dumps(text))
    with pytest.raises(errors.CorruptCheckpoint, match=r"chunks of \(0,\)"):
        use(tmp_path / "z")


USES = {
    "save": lambda p: save(p, {"w": np.ones(2)}),
    "save_safetensors": lambda p: save_safetensors(p, {"w": np.ones(2)}),
    "merge": lambda p: merge(p, "out"),
    "load": load,
    "verify": verify,
    "gc": gc,
    "leftovers": leftovers,
    "manager": lambda p: CheckpointManager(p).save(1, {"w": np.ones(2)}),
    "latest": lambda p: CheckpointManager(p).latest(),
}


@pytest.mark.parametrize("size", ["4.0", "-4.0", "4.5", '"4"'])
@pytest.mark.parametrize(
    ("kind", "what", "told"),
    [
        ("meshtape", "shape", "meshtape.json: .*path \\['w'\\]: shape \\[{}\\] is no list of integers"),
        ("meshtape", "chunk", "meshtape.json: .*path \\['w'\\]: chunk \\[{}\\] is no list of integers"),
        ("Zarr", "shape", "key 'w': .*{}"),
        ("Zarr", "chunk_shape", "key 'w': .*{}"),
    ],
)
def test_a_size_that_is_no_integer_is_told_with_its_array(tmp_path, kind, what, told, size):
    where = directory(kind, tmp_path)
    file = where / ("meshtape.json" if kind == "meshtape" else "w/zarr.json")
    text = file.read_bytes() if kind == "Zarr" else unsealed(file.read_bytes())[0]
    changed = re.sub(rb'("%s":\s*\[\s*)4' % what.encode(), rb"\g<1>" + size.encode(), text, count=1)
    assert changed != text
    file.write_bytes(changed if kind == "Zarr" else sealed(changed))
    with pytest.raises(errors.CorruptCheckpoint, match=told.format(size.replace('"', "'"))):
        open_checkpoint(where)


@pytest.mark.parametrize("name", ["a\0b", "p/" * 3000, "p" * 1000], ids=["NUL", "deep", "long"])
@pytest.mark.parametrize("use", USES)
def test_names_that_no_file_has(tmp_path, name, use):
    with pytest.raises(errors.MeshtapeError):
        USES[use](f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


def blob(header, data=b""):
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def test_a_surrogate_in_an_index_is_damage(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"a": np.ones(3)})
    for weight_map in ({"\ud800": "a.safetensors"}, {"a": "\udfff.safetensors"}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(errors.CorruptCheckpoint, match="index"):
            open_checkpoint(tmp_path)


def test_a_name_twice_among_hundreds_of_thousands_is_found_in_one_pass(tmp_path):
    names = [*range(300_000), 299_999]
    weights = ",".join(f'"{n}": "model.safetensors"' for n in names)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{weights}}}}}')
    with pytest.raises(errors.CorruptCheckpoint, match="it gives '299999' twice"):
        open_checkpoint(tmp_path)


def test_millions_of_texts_without_tensors_are_refused_before_they_are_made(tmp_path):
    entries = ",".join(f'"{i}":""' for i in range(300_000)).encode()
    raw = b'{"__metadata__":{' + entries + b"}}"
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(errors.CorruptCheckpoint, match="entries of metadata"):
        open_checkpoint(path)
    save_safetensors(
        path, {"w": np.ones(2)}, metadata={"long": '"' * 900_000}, overwrite=True
    )  # one long text is no harm
    assert load(path).keys() == {"w"}


@pytest.mark.parametrize("tensors", [{1: np.ones(2), "1": np.ones(3)}, {("a",): np.ones(2)}, {None: np.ones(2)}])
def test_names_that_are_no_texts_are_refused_before_writing(tmp_path, tensors):
    with pytest.raises(errors.CheckpointKeyError, match="texts"):
        save_safetensors(tmp_path / "x.safetensors", tensors)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"])
def test_packed_bits_do_not_hide_the_rest_of_a_file(tmp_path, dtype):
    bits = {"F4": 4, "F8_E8M0": 8}.get(dtype, 6)
    n = 8 * bits // 8
    header = {
        "odd": {"dtype": dtype, "shape": [8], "data_offsets": [0, n]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [n, n + 8]},
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob(header, bytes(n) + np.ones(2, "f4").tobytes()))
    held = open_checkpoint(path)
    assert list(held) == ["odd", "w"]
    assert "odd" in repr(held)
    np.testing.assert_array_equal(held["w"][:], np.ones(2))
    np.testing.assert_array_equal(np.asarray(load(path, keys=["w"])["w"]), np.ones(2))
    merge(path, tmp_path / "out", drop=["odd"])
    assert verify(tmp_path / "out").arrays == 1
    if dtype != "F8_E8M0":
        for use in (lambda: held["odd"][:], lambda: load(path), lambda: merge(path, tmp_path / "all")):
            with pytest.raises(errors.CheckpointDTypeError, match="odd"):
                use()
