"""Indexes with steps read what they need, into the result, from every format."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtape import errors
from meshtape.arrays.core.blocks import Box
from meshtape.storage import Rules, load, open_checkpoint, save, save_safetensors
from meshtape.storage.base.checksums import crc32c
from meshtape.storage.readers import reading
from meshtape.storage.readers import tensor as tensors
from meshtape.storage.readers.raw_tensor import RawTensor
from meshtape.storage.stores import local

SHAPES = {"scalar": (), "line": (4001,), "matrix": (97, 130), "cube": (13, 17, 19), "thin": (900, 3), "none": (0, 5)}
ARRAYS = {n: (np.arange(np.prod(s, dtype=int)).reshape(s) * 3 + 1).astype(np.float32) for n, s in SHAPES.items()}
DCP = Path(__file__).parent / "golden" / "torch-2.13-dcp"


def _zarr(path, version):
    import zarr

    root = zarr.open_group(str(path), mode="w", zarr_format=version)
    for name, a in ARRAYS.items():
        chunks = tuple(max(1, n // 3) for n in a.shape)
        cut = {"chunks": chunks} if a.shape else {}
        if version == 3 and name in ("matrix", "cube"):
            cut["shards"] = tuple(2 * n for n in chunks)
        root.create_array(name, shape=a.shape, dtype=a.dtype, **cut)[...] = a


def _hugging_face(path):
    path.mkdir()
    parts = {f"{k}.safetensors": {n: a for i, (n, a) in enumerate(ARRAYS.items()) if i % 2 == k} for k in range(2)}
    for file, held in parts.items():
        save_safetensors(path / file, held)
    index = {"metadata": {}, "weight_map": {n: file for file, held in parts.items() for n in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


FORMATS = {
    "zarr": lambda p: save(p, ARRAYS),
    "zstd": lambda p: save(p, ARRAYS, compression="zstd:1"),
    "safetensors": lambda p: save_safetensors(p.with_suffix(".safetensors"), ARRAYS),
    "hugging face": _hugging_face,
    "zarr v2": lambda p: _zarr(p, 2),
    "zarr v3": lambda p: _zarr(p, 3),
    "npz": lambda p: np.savez(p.with_suffix(".npz"), **ARRAYS),
    "deflated npz": lambda p: np.savez_compressed(p.with_suffix(".npz"), **ARRAYS),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    home = tmp_path_factory.mktemp("slices")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshtape.storage.format.chunk_grid.TARGET", 4096)  # many chunks in little data
        patch.setattr("meshtape.storage.format.chunk_grid.SHORTEST_ROW", 64)
        out = {}
        for i, (name, write) in enumerate(FORMATS.items()):
            write(home / str(i))
            (path,) = [p for p in home.iterdir() if p.name.split(".")[0] == str(i)]
            out[name] = open_checkpoint(path)
    for kind in ("zarr", "safetensors"):
        swapped = "; ".join(f"{n} -> {n}, permute()" for n, s in SHAPES.items() if len(s) > 1)
        out[f"rules on {kind}"] = Rules(swapped.replace("; ", "\n")).on(out[kind])
    return out


def _one(n):
    some = st.one_of(st.none(), st.integers(-n - 3, n + 3))
    step = st.one_of(st.none(), st.integers(-12, 12), st.integers(-n - 1, n + 1)).filter(lambda s: s != 0)
    cut = st.builds(slice, some, some, step)
    return st.one_of(cut, cut, cut, st.integers(-n, n - 1)) if n else cut


@st.composite
def indexes(draw, shape):
    items = [draw(_one(n)) for n in shape[: draw(st.integers(0, len(shape)))]]
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
        after = len(items) - 1 - items.index(...)
        items = [*items[: items.index(...) + 1], *(draw(_one(n)) for n in shape[len(shape) - after :])]
    return tuple(items)


@pytest.mark.parametrize(("small", "at_hand"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", [*FORMATS, "rules on zarr", "rules on safetensors"])
def test_every_index_gives_what_numpy_gives(stored, monkeypatch, kind, small, at_hand):
    if small:  # so that every way to cut a read is taken in little data
        for name, n in {"gap": 16, "row": 800, "near": 100, "batch": 1000, "job": 3000}.items():
            monkeypatch.setattr(local.LocalStore, name, n, raising=False)
        monkeypatch.setattr(tensors, "_WINDOW", 5000)
        monkeypatch.setattr(tensors, "_SKIPPED", 200)
    monkeypatch.setattr(local._LocalReader, "at_hand", lambda self, offset: at_hand)
    ckpt = stored[kind]

    @settings(max_examples=8 if "zarr v" in kind else 40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from([n for n in ckpt if n in ARRAYS]))
        whole = ARRAYS[name].T if kind.startswith("rules") else ARRAYS[name]
        index = data.draw(indexes(whole.shape))
        wanted, got = whole[index], ckpt[name][index]
        assert np.shape(got) == np.shape(wanted)
        assert np.array_equal(got, wanted)

    check()


def test_steps_over_chunks_of_dcp(stored):
    for a in open_checkpoint(DCP).arrays.values():
        whole = a.read()
        for step in (2, -3, 5):
            index = (slice(None, None, step),) * a.ndim
            assert np.array_equal(a[index], whole[index], equal_nan=True)


def _read_bytes(monkeypatch, run):
    """Bytes that ``run`` reads from local files."""
    total = []
    readv, gather = local._LocalReader.readv, local._LocalReader.gather

    def gathered(self, nbytes, starts):
        out = gather(self, nbytes, starts)
        total.append(len(out))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(local._LocalReader, "readv", lambda self, b, at: total.append(readv(self, b, at)) or total[-1])
        patch.setattr(local._LocalReader, "gather", gathered)
        run()
    return sum(total)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    home = tmp_path_factory.mktemp("matrix")
    w = np.arange(400 * 50_000, dtype="f4").reshape(400, 50_000)  # rows of 200 kB, 80 MB in all
    save(home / "zarr", {"w": w})
    save_safetensors(home / "w.safetensors", {"w": w})
    return home, w


def test_rows_between_are_not_read_from_a_raw_file(matrix, monkeypatch):
    home, w = matrix
    a = open_checkpoint(home / "w.safetensors")["w"]
    assert _read_bytes(monkeypatch, lambda: a[::10]) == w[::10].nbytes
    assert _read_bytes(monkeypatch, lambda: a[:, 7]) == w[:, 7].nbytes
    assert _read_bytes(monkeypatch, lambda: a[::-40, 100:200]) == w[::-40, 100:200].nbytes


def test_rows_of_a_file_that_was_cut_short_meanwhile(tmp_path):
    w = np.arange(200 * 16_384, dtype="f4").reshape(200, 16_384)
    save_safetensors(tmp_path / "w.safetensors", {"w": w})
    a = open_checkpoint(tmp_path / "w.safetensors")["w"]
    os.truncate(tmp_path / "w.safetensors", w.nbytes // 2)
    with pytest.raises(errors.CheckpointError):
        a[:, 7]


@pytest.mark.parametrize("at_hand", [True, False])
def test_gaps_are_skipped_where_that_is_cheap(monkeypatch, tmp_path, at_hand):
    w = np.arange(200 * 16_384, dtype="f4").reshape(200, 16_384)  # rows of 64 kB
    save_safetensors(tmp_path / "w.safetensors", {"w": w})
    a = open_checkpoint(tmp_path / "w.safetensors")["w"]
    monkeypatch.setattr(local._LocalReader, "at_hand", lambda self, offset: at_hand)
    got = _read_bytes(monkeypatch, lambda: a[:, 7])
    assert got == w[:, 7].nbytes if at_hand else got > w.nbytes / 2


def test_each_chunk_that_is_touched_is_read_once(matrix, monkeypatch):
    home, w = matrix
    a = open_checkpoint(home / "zarr")["w"]
    unit = int(np.prod(a.tensor.chunk)) * 4 + 4
    a[::200, 5]  # the table of checksums is read once, and kept
    for index in (np.s_[::3], np.s_[::3, ::7], np.s_[:, ::20_000], np.s_[::200, 5]):
        touched = [
            len({int(i) // c for i in at}) for at, c in zip(_picked(index, w.shape), a.tensor.chunk, strict=True)
        ]
        assert _read_bytes(monkeypatch, lambda index=index: a[index]) == np.prod(touched) * unit


def _picked(index, shape):
    index = index if isinstance(index, tuple) else (index,)
    return [np.atleast_1d(np.arange(n)[i]) for n, i in zip(shape, [*index, slice(None)][: len(shape)], strict=True)]


@pytest.mark.parametrize("place", ["zarr", "w.safetensors"])
@pytest.mark.parametrize("index", ["::10", "::-2, ::50", ":, ::25"])
def test_memory_is_that_of_the_result_and_a_window(matrix, place, index):
    """A child process, as what a process has once held is never less."""
    home, _ = matrix
    code = f"""
import numpy as np
from meshtape.storage import open_checkpoint
a = open_checkpoint({str(home / place)!r})["w"]
a[:2, :2], a[::399, ::49999]
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
got = a[{index}]
print(peak() - before - (got.nbytes >> 10))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert int(done.stdout) < 40 << 10


def test_a_raw_tensor_of_longer_strides_is_not_compared_with_the_checksum_of_the_whole(matrix):
    home, w = matrix
    tensor = open_checkpoint(home / "w.safetensors")["w"].tensor
    assert isinstance(tensor, RawTensor)
    assert tensor.crc32c is not None
    assert np.array_equal(open_checkpoint(home / "w.safetensors")["w"][0:400:1, ::2], w[:, ::2])


def test_a_file_of_many_arrays_is_opened_for_many_and_replaced_files_are_told(tmp_path, monkeypatch):
    held = {f"layers.{i}.weight": np.full(8, i, "f4") for i in range(500)}
    where = tmp_path / "many.safetensors"
    save_safetensors(where, held)
    opened = []
    real = local.LocalStore.reader
    monkeypatch.setattr(local.LocalStore, "reader", lambda self, name: opened.append(name) or real(self, name))
    got = load(where)
    assert all(np.array_equal(got[n], a) for n, a in held.items())
    assert len(opened) < 100
    ckpt = open_checkpoint(where)
    jobs = [job for a in ckpt.arrays.values() for job in a.tensor.jobs(Box.whole(a.shape), np.empty(a.shape, a.dtype))]

    def replace():
        with open(where, "r+b") as f:  # in place: the file that is open changes
            f.seek(-4, os.SEEK_END)
            f.write(b"\1\1\1\1")
        os.utime(where, (1, 1))
        return 0

    jobs[0]()
    replace()
    with pytest.raises(errors.CheckpointReplaced):
        tensors.run(jobs[1:], 1)
    assert not getattr(reading._own, "readers", None)


@pytest.mark.parametrize("place", ["true", "1.0", '"1"'])
def test_forms_of_arrays_that_look_alike_are_not_taken_for_one_another(tmp_path, place):
    """The second array says ``true`` where a length belongs; the first, which is right, has the same form but for
    that."""
    save(tmp_path / "c", {"a": np.ones((1, 3), "f4"), "b": np.ones((1, 3), "f4")})
    path = tmp_path / "c" / "meshtape.json"
    data = path.read_bytes().rpartition(b', "crc32c"')[0]
    first, mark, second = data.rpartition(b'"shape":[1,3]')
    assert mark
    data = first + b'"shape":[' + place.encode() + b",3]" + second
    path.write_bytes(data + b', "crc32c": "%08x"}\n' % crc32c(data + b"}"))
    with pytest.raises(errors.CorruptCheckpoint, match="is no list of integers"):
        open_checkpoint(tmp_path / "c")
