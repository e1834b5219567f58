"""Checksums that travel with safetensors: in headers and indexes, compared by loads and by verify, unseen by other
readers."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from meshtape import errors
from meshtape.storage import (
    convert,
    load,
    load_safetensors,
    merge,
    open_checkpoint,
    read_header,
    save,
    save_safetensors,
    verify,
)
from meshtape.storage.format.tensor_sums import KEY

RNG = np.random.default_rng(0)
ARRAYS = {
    "a.w": RNG.normal(size=(40, 30)).astype("f4"),
    "a.b": RNG.integers(0, 99, 17, dtype="i8"),
    "empty": np.zeros((0, 3), "f4"),
    "one": np.float64(2.5),
    "half": RNG.normal(size=(5, 3)).astype("f2").T,
}


def single(home):
    save_safetensors(home / "x.safetensors", ARRAYS)
    return home / "x.safetensors"


def split(home):
    save(home / "src", ARRAYS)
    merge(home / "src", home / "hf", max_shard_bytes=2000)
    return home / "hf"


def whole(home):
    save(home / "src", ARRAYS)
    convert(home / "src", home / "one", format="safetensors")
    return home / "one"


WAYS = {"save_safetensors": single, "merge in several files": split, "convert in one file": whole}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_exports_carry_sums_that_verify_and_load_compare(tmp_path, make):
    where = make(tmp_path)
    assert verify(where).arrays == len(ARRAYS)
    got = load(where)
    for name, a in ARRAYS.items():
        np.testing.assert_array_equal(np.asarray(got[name]), a)
    files = [where] if where.is_file() else sorted(where.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "np") as f:  # the reference reads them as before
            assert f.metadata()["format"] == "pt"
            for name in f.keys():  # noqa: SIM118
                np.testing.assert_array_equal(f.get_tensor(name), ARRAYS[name])
        assert KEY not in read_header(file).metadata
    assert KEY not in open_checkpoint(where).metadata


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_no_flip_loads_in_silence(tmp_path, make):
    """One byte in every region: length, header, padding, each tensor, the index. A load gives the values or a typed
    error; verify finds it."""
    where = make(tmp_path)
    files = [where] if where.is_file() else sorted(p for p in where.iterdir())
    silent, unseen = [], []
    rng = np.random.default_rng(1)
    for file in files:
        good = file.read_bytes()
        data = 8 + int.from_bytes(good[:8], "little") if file.suffix == ".safetensors" else len(good)
        places = {*range(8), *rng.integers(8, data, 60).tolist()}
        places |= set(rng.integers(data, len(good), 25).tolist()) if data < len(good) else set()
        for at in sorted(places):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            try:
                got = load(where)
                if got.keys() != ARRAYS.keys() or any(
                    np.asarray(got[n]).tobytes() != a.tobytes() for n, a in ARRAYS.items()
                ):
                    silent.append((file.name, at))
            except errors.CheckpointError:
                pass
            try:
                verify(where)
                unseen.append((file.name, at, bytes(good[max(0, at - 20) : at + 5])))
            except errors.CheckpointError:
                pass
        file.write_bytes(good)
    assert not silent
    assert not unseen


def test_every_bit_of_the_metadata_of_a_small_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"w": np.arange(3, dtype="u1")})
    good = path.read_bytes()
    for at in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(errors.CheckpointError):
                load_safetensors(path)
            with pytest.raises(errors.CheckpointError):
                verify(path)


def test_a_file_of_another_save_is_told_from_its_own(tmp_path):
    save(tmp_path / "a", ARRAYS)
    save(tmp_path / "b", {n: np.asarray(a) + 1 for n, a in ARRAYS.items()})
    for n in "ab":
        merge(tmp_path / n, tmp_path / f"hf-{n}", max_shard_bytes=2000)
    file = sorted((tmp_path / "hf-a").glob("*.safetensors"))[0].name
    shutil.copy(tmp_path / "hf-b" / file, tmp_path / "hf-a" / file)
    with pytest.raises(errors.CorruptCheckpoint, match="another save"):
        open_checkpoint(tmp_path / "hf-a")


def test_files_without_sums_have_none_and_say_so(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    assert read_header(path).sums is None
    with pytest.raises(errors.CheckpointError, match="no checksums"):
        verify(path)
    save_safetensors(tmp_path / "y.safetensors", {"w": np.ones(3)}, checksums=False)
    assert (tmp_path / "y.safetensors").read_bytes() == path.read_bytes()


def test_a_directory_of_which_a_part_has_sums(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"a": np.ones(3)})
    safetensors.numpy.save_file({"b": np.ones(3)}, tmp_path / "b.safetensors")
    weight_map = {"a": "a.safetensors", "b": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(errors.CheckpointError, match="1 of 2 tensors without checksums; the others are whole: b"):
        verify(tmp_path)
    assert load(tmp_path).keys() == {"a", "b"}


def test_a_header_that_another_program_wrote_anew(tmp_path):
    """Metadata that was carried along describes other bytes: refused, with the way around it."""
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"w": np.ones(3)})
    with safe_open(path, "np") as f:
        metadata = f.metadata()
    safetensors.numpy.save_file({"w": np.zeros(3)}, path, metadata=metadata)
    with pytest.raises(errors.CorruptCheckpoint, match="verify=False"):
        load(path)
    np.testing.assert_array_equal(np.asarray(load(path, verify=False)["w"]), np.zeros(3))
    save_safetensors(path, {"w": np.full(3, 2.0)}, metadata=metadata, overwrite=True)  # ours makes new ones
    assert verify(path).arrays == 1


def test_windows_that_are_no_stretches_of_the_file(tmp_path):
    a = RNG.normal(size=(64, 40_000)).astype("f4")
    save(tmp_path / "src", {"w": a})
    assert open_checkpoint(tmp_path / "src")["w"].tensor.chunk[1] < 40_000
    merge(tmp_path / "src", tmp_path / "hf", memory_limit=1)
    assert verify(tmp_path / "hf").nbytes == a.nbytes
    np.testing.assert_array_equal(load_safetensors(tmp_path / "hf" / "model.safetensors")["w"], a)


@pytest.mark.parametrize("limit", [1, 400_000, 1 << 28])
def test_the_same_bytes_for_any_windows(tmp_path, limit):
    a = {"w": np.arange(300_000, dtype="f4").reshape(300, 1000), "v": np.arange(5)}
    save(tmp_path / "src", a)
    merge(tmp_path / "src", tmp_path / "one", memory_limit=limit)
    save_safetensors(tmp_path / "x.safetensors", a)
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()


def test_uploads_keep_the_sums_in_the_index(tmp_path):
    save(tmp_path / "src", ARRAYS)
    merge(tmp_path / "src", "memory://travelling/hf", max_shard_bytes=2000)
    assert verify("memory://travelling/hf").arrays == len(ARRAYS)
    got = open_checkpoint("memory://travelling/hf")
    assert all(a.tensor.crc32c is not None for a in got.arrays.values())
    merge("memory://travelling/hf", tmp_path / "back")
    assert verify(tmp_path / "back").arrays == len(ARRAYS)


def test_large_reads_are_compared_in_pieces(tmp_path, monkeypatch):
    from meshtape.storage.stores import local

    monkeypatch.setattr(local.LocalStore, "job", 1000)
    monkeypatch.setattr(local.LocalStore, "batch", 300)
    path = single(tmp_path)
    np.testing.assert_array_equal(np.asarray(load(path)["a.w"]), ARRAYS["a.w"])
    bad = bytearray(path.read_bytes())
    bad[-1] ^= 1
    path.write_bytes(bad)
    with pytest.raises(errors.CorruptCheckpoint, match=r"crc32c"):
        load(path)
    assert np.asarray(open_checkpoint(path)["a.w"][1:3]).shape == (2, 30)  # a part cannot be compared
