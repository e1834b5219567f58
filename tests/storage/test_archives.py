"""Files of NumPy and of torch.save, read without pickle. The golden one was written by torch 2.15."""

import io
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import convert, load, merge, open_checkpoint, reshard, verify
from meshtape.storage.foreign import archives
from meshtape.storage.stores import store

GOLDEN = Path(__file__).parent / "golden" / "torch-2.15.pt"
TORCH = {
    "model.weight": np.arange(6, dtype="f4").reshape(2, 3),
    "model.bias": np.full(2, 0.5, "f4"),
    "param": np.arange(6, dtype="f4").reshape(2, 3),
    "t": np.arange(6.0).reshape(2, 3).T,
    "rows": np.arange(24, dtype="f4").reshape(4, 6)[1:3],
    "bf": np.arange(4).astype(ml_dtypes.bfloat16),
    "f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "i": np.arange(3),
    "b": np.array([True, False]),
    "s": np.float32(2.5),
    "e": np.zeros((0, 3), "f4"),
    "c": np.ones(2, "c8"),
    "u16": np.arange(3, dtype="u2"),
    "list.0": np.ones(2, "f4"),
}
ARRAYS = {
    "w": np.arange(600.0).reshape(20, 30),
    "t": np.asfortranarray(np.arange(12, dtype="i4").reshape(3, 4)),
    "s": np.float32(3),
    "e": np.zeros((0, 3)),
    "b": np.array([True, False]),
}


def npz(path):
    np.savez(path, **ARRAYS)


def compressed(path):
    np.savez_compressed(path, **ARRAYS)


@pytest.mark.parametrize("write", [npz, compressed])
def test_npz(kit, tmp_path, write):
    path = tmp_path / "x.npz"
    write(path)
    ckpt = open_checkpoint(path)
    assert list(ckpt) == list(ARRAYS)
    got = load(path)
    for name, a in ARRAYS.items():
        assert kit.same(np.asarray(got[name]), np.ascontiguousarray(a).reshape(a.shape)), name
    np.testing.assert_array_equal(ckpt["w"][3:9, ::7], ARRAYS["w"][3:9, ::7])
    np.testing.assert_array_equal(ckpt["t"][1:, 2], ARRAYS["t"][1:, 2])
    assert verify(path).arrays == len(ARRAYS)
    merge(path, tmp_path / "hf", memory_limit=1)
    reshard(path, tmp_path / "cut", mesh={"m": 2}, shardings={"w": {"m": 1}})
    for made in ("hf", "cut"):
        assert kit.same(np.asarray(load(tmp_path / made)["w"]), ARRAYS["w"])


@pytest.mark.parametrize("target", ["out", "memory://{}/out"])
def test_a_compressed_entry_is_unpacked_once(tmp_path, monkeypatch, target):
    """Not for each window, and in a file that goes, also when the transfer fails."""
    w = np.arange(1 << 17, dtype="i4").reshape(1 << 8, 1 << 9)
    np.savez_compressed(tmp_path / "x.npz", w=w, f=np.asfortranarray(w))
    target = target.format(tmp_path.name) if "://" in target else tmp_path / target
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened, unzip = [], zipfile.ZipFile.open
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda self, *a: opened.append(a) or unzip(self, *a))
    ckpt = open_checkpoint(tmp_path / "x.npz")
    opened.clear()
    rules = "w -> a, b, split(0, [128, 128])"
    merge(ckpt, target, rules=rules, memory_limit=1)
    assert len(opened) == 2
    got = load(target)
    for name, a in {"a": w[:128], "b": w[128:], "f": w}.items():
        np.testing.assert_array_equal(got[name], a)

    def stop(done, total):
        if done:
            assert len(list(tmp_path.glob("*.tmp-*"))) == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        merge(ckpt, target, rules=rules, memory_limit=1, overwrite=True, progress=stop)
    assert list(tmp_path.glob("*.tmp-*")) == []


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(kit, tmp_path, order):
    a = np.asarray(np.arange(12, dtype="f4").reshape(3, 4), order=order)
    np.save(tmp_path / "x.npy", a)
    assert kit.same(np.asarray(load(tmp_path / "x.npy")["arr_0"]), np.ascontiguousarray(a))
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "x.npy")["arr_0"][1:, 1], a[1:, 1])
    with pytest.raises(errors.CheckpointError, match="no checksums"):
        verify(tmp_path / "x.npy")
    with open(tmp_path / "x.npy", "ab") as f:
        f.write(b"x")
    with pytest.raises(errors.CorruptCheckpoint, match="bytes"):
        load(tmp_path / "x.npy")


@pytest.mark.parametrize("a", [np.array([{}], object), np.array(["a"]), np.arange(3, dtype=">f4"), np.ones(2, "f4,i4")])
def test_elements_without_a_form_are_named_or_refused(tmp_path, a):
    np.savez(tmp_path / "x.npz", odd=a, w=np.ones(3))
    ckpt = open_checkpoint(tmp_path / "x.npz")
    assert (list(ckpt), list(ckpt.skipped), ckpt.metadata) == (["w"], ["odd"], {})
    np.save(tmp_path / "x.npy", a)
    with pytest.raises(errors.CheckpointDTypeError, match="no form here"):
        load(tmp_path / "x.npy")


def test_torch(kit, tmp_path):
    ckpt = open_checkpoint(GOLDEN)
    assert ckpt.kind == "PyTorch"
    tree = load(GOLDEN)
    for name, a in TORCH.items():
        assert kit.same(ckpt[name].read(), np.ascontiguousarray(a).reshape(np.shape(a))), name
    assert (tree["epoch"], tree["name"], tree["list"][1]) == (3, "run", 1.5)
    assert tree["opt"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert verify(GOLDEN).arrays == len(ckpt)
    np.testing.assert_array_equal(ckpt["t"][1:, 0], TORCH["t"][1:, 0])
    merge(GOLDEN, tmp_path / "hf", prefix="model")
    assert kit.same(np.asarray(load(tmp_path / "hf")["weight"]), TORCH["model.weight"])
    convert(GOLDEN, tmp_path / "z", format="zarr", drop=["f8"])
    assert load(tmp_path / "z")["epoch"] == 3


X, M, T = np.array([1 + 2j, 3 - 4j, 5 + 6j], "c8"), (np.arange(6).reshape(2, 3) * (1 + 1j)).astype("c8"), np.arange(6.0)
SIGNS = {
    "conj": X.conj(),
    "mH": M.conj().T,
    "neg": -T.reshape(2, 3).astype("f4"),
    "both": -M.conj(),
    "view": M.conj()[1:],
    "int": -np.arange(3),
    "half": -np.arange(3).astype(ml_dtypes.bfloat16),
    "scalar": np.float32(-2.5),
    "param": X.conj(),
    "plain": X,
}


@pytest.mark.parametrize("where", [GOLDEN.with_name("torch-2.13-signs.pt"), GOLDEN.with_name("torch-2.13-signs")])
def test_conjugated_and_negated_tensors_of_torch(kit, tmp_path, where):
    """PyTorch stores their elements unturned, and says so beside them; both of torch.save and of DCP."""
    ckpt, tree = open_checkpoint(where), load(where)
    merge(where, tmp_path / "out", drop=[])
    merged = load(tmp_path / "out")
    assert set(ckpt) == set(SIGNS)
    for name, wanted in SIGNS.items():
        whole = np.ascontiguousarray(wanted).reshape(np.shape(wanted))
        assert kit.same(ckpt[name].read(), whole), name
        assert kit.same(np.asarray(tree[name]), whole), name
        assert kit.same(np.asarray(merged[name]), whole), name
        if whole.ndim:
            np.testing.assert_array_equal(ckpt[name][..., 1:], whole[..., 1:])
    assert verify(where).arrays == len(SIGNS)


@pytest.mark.parametrize(("old", "new"), [(b"conjq", b"oddlq"), (b"negq", b"oddq")])
def test_what_a_tensor_says_of_itself_and_is_not_known_is_refused(tmp_path, old, new):
    with (
        zipfile.ZipFile(GOLDEN.with_name("torch-2.13-signs.pt")) as a,
        zipfile.ZipFile(tmp_path / "x.pt", "w") as b,
    ):
        for n in a.namelist():
            length = len(old) - 1
            text = bytes([88, length, 0, 0, 0])  # BINUNICODE
            assert not n.endswith("data.pkl") or text + old in a.read(n)
            b.writestr(n, a.read(n).replace(text + old, text + new))
    held = open_checkpoint(tmp_path / "x.pt")
    refused = [name for name, why in held.skipped.items() if "clone" in why]
    assert refused
    for name in refused:
        with pytest.raises(errors.CheckpointDTypeError, match="clone"):
            held[name]


@pytest.mark.parametrize("kind", ["npz", "compressed", "torch"])
def test_flips_are_found(tmp_path, kind):
    """Wherever a byte is changed, a load gives the right values or a typed error, and verify finds what is changed in
    elements."""
    path = tmp_path / "x"
    if kind == "torch":
        shutil.copy(GOLDEN, path)
    else:
        (npz if kind == "npz" else compressed)(tmp_path / "x.npz")
        (tmp_path / "x.npz").rename(path)
    good, rng = path.read_bytes(), np.random.default_rng(0)
    held = open_checkpoint(path)
    right = {n: a.read().tobytes() for n, a in held.items()}
    for at in rng.integers(0, len(good), 120).tolist():
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            got = open_checkpoint(path)
            seen = {n: a.read().tobytes() for n, a in got.items()}
        except errors.CheckpointError:
            continue
        except MemoryError:
            raise AssertionError(at) from None
        # Views of a storage are compared with verify; names and descriptions have no checksum but that of the archive's
        # entry.
        if any(seen[n] != right[n] for n in seen.keys() & right.keys()):
            with pytest.raises(errors.CheckpointError):
                verify(path)
    path.write_bytes(good)
    for a in held.values():
        at, nbytes = a.tensor.held.stored
        if nbytes:
            bad = bytearray(good)
            bad[at] ^= 1
            path.write_bytes(bad)
            with pytest.raises(errors.CorruptCheckpoint, match=r"CRC-?32"):
                verify(path)


@pytest.mark.parametrize("kind", ["npz", "compressed", "torch"])
def test_no_entry_vanishes_from_a_table_of_contents(tmp_path, kind):
    """A bit of every byte of the table and its end, and all bits of its lengths: all is read as it was, or there is an
    error."""
    path = tmp_path / "x.npz"
    if kind == "torch":
        shutil.copy(GOLDEN.with_name("torch-2.13-signs.pt"), path)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(path, w=np.arange(6.0), b=np.ones(2), name=np.zeros(3))
    good = path.read_bytes()
    right = {n: a.read().tobytes() for n, a in open_checkpoint(path).items()}
    start = good.find(b"PK\x01\x02")
    lengths = [i + k for i in range(start, len(good)) if good[i : i + 4] == b"PK\x01\x02" for k in range(28, 34)]
    for at in lengths if kind == "torch" else range(start, len(good)):
        for bit in range(8) if at in lengths else [at % 8]:
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            try:
                got = {n: a.read().tobytes() for n, a in open_checkpoint(path).items()}
                verify(path)
            except errors.CheckpointError:
                continue
            assert got == right, (at - start, bit)


@pytest.mark.parametrize("part", ["elements", "header"])
def test_an_archive_that_unpacks_to_more_than_its_arrays(tmp_path, part, peak_of):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (4,)})
    large = {"elements": head.getvalue(), "header": b"\x93NUMPY\2\0" + (64 << 20).to_bytes(4, "little")}[part]
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("w.npy", large + bytes(64 << 20))

    def refused():
        with pytest.raises(errors.CorruptCheckpoint, match=r"needs|not an array"):
            open_checkpoint(tmp_path / "x.npz")

    assert peak_of(refused, below=4 << 20) < 4 << 20


@pytest.mark.parametrize("names", [[], ["a.txt"], ["a.npy", "b.txt"]])
def test_other_archives_are_refused(tmp_path, names):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as z:
        for n in names:
            z.writestr(n, b"x")
    with pytest.raises(errors.CheckpointError):
        open_checkpoint(tmp_path / "x.zip")


def test_what_torch_cannot_mean_is_refused(tmp_path):
    def archive(text):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as z:
            z.writestr("x/data.pkl", text)
            z.writestr("x/data/0", bytes(16))
        return tmp_path / "x.pt"

    for text in (b"cos\nsystem\n(S'true'\ntR.", b""):
        with pytest.raises(errors.CorruptCheckpoint, match="not a description"):
            open_checkpoint(archive(text))
    # A whole file, as torch.save(module) writes it.
    with pytest.raises(errors.NotACheckpoint, match=r"nothing of a file is run.*state_dict"):
        open_checkpoint(archive(b"\x80\x02ctorch.nn.modules.linear\nLinear\nq\x00)\x81."))


def test_an_archive_in_a_bucket(kit):
    where = "memory://archives"
    held = io.BytesIO()
    np.savez(held, **ARRAYS)
    store.at(where).put("x.npz", held.getvalue())
    store.at(where).put("x.pt", GOLDEN.read_bytes())
    assert kit.same(np.asarray(load(f"{where}/x.npz")["w"]), ARRAYS["w"])
    assert verify(f"{where}/x.pt").arrays == len(archives.open_archive(str(GOLDEN), True))


def test_a_model_in_files_of_torch(tmp_path):
    """As transformers wrote models before safetensors: one file, or several with an index."""
    names = list(open_checkpoint(GOLDEN))
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_text('{"a": 1}')
    shutil.copy(GOLDEN, one / "pytorch_model.bin")
    files = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
    for f in set(files.values()):
        shutil.copy(GOLDEN, two / f)
    (two / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for folder in (one, two):
        held = open_checkpoint(folder)
        assert list(held) == names
        assert held.documents["config"] == {"a": 1}
        for n in names:
            assert np.array_equal(
                held[n].read(), open_checkpoint(GOLDEN)[n].read(), equal_nan=held[n].dtype.kind in "fc"
            )
    (two / files[names[0]]).unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match="1 file missing"):
        open_checkpoint(two)


def test_an_archive_in_an_object_store_takes_a_request_an_entry(s3):
    """The table of contents and its end, and of each entry its two headers together; no more to list the arrays."""
    held = {f"w{i}": np.full((100, 1 + i), i, np.float32) for i in range(60)}
    data = io.BytesIO()
    np.savez(data, **held)
    store.at(s3.url).put("a.npz", [data.getvalue()])
    s3.proxy.reset()
    opened = open_checkpoint(f"{s3.url}/a.npz")
    assert sum(method == "GET" for method, _ in s3.proxy.log) <= 60 + 6
    assert all(np.array_equal(opened[n].read(), a) for n, a in held.items())
