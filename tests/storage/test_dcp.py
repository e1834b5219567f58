"""Checkpoints that PyTorch's distributed checkpointing wrote, read without PyTorch; and files that mean harm.

The golden one was written by torch 2.13 on two ranks: ``model.w`` cut by rows, ``model.v`` by columns, the others
replicated.
"""

import importlib.util
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import convert, diff, load, merge, open_checkpoint, reshard, verify
from meshtape.storage.foreign.torch_pickle import read_values

GOLDEN = Path(__file__).parent / "golden" / "torch-2.13-dcp"
WANTED = {
    "model.w": np.arange(35, dtype="f4").reshape(7, 5),
    "model.v": np.arange(24).astype(ml_dtypes.bfloat16).reshape(4, 6),
    "model.r": np.arange(3),
    "model.t": np.arange(6.0).reshape(2, 3).T,  # stored in the order of another layout
    "model.s": np.float32(2.5),
    "model.e": np.zeros((0, 3), "f4"),
    "model.f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
    "model.b": np.array([True, False]),
    "list.0": np.ones(2, "f4"),
}


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "dcp"))


def test_everything_is_read(kit):
    ckpt = open_checkpoint(GOLDEN)
    assert ckpt.kind == "PyTorch DCP"
    assert list(ckpt) == list(WANTED)
    for name, wanted in WANTED.items():
        assert kit.same(ckpt[name].read(), wanted), name
    tree = load(GOLDEN)
    assert {k: tree[k] for k in ("step", "lr", "name", "list.1")} == {"step": 7, "lr": 0.5, "name": "run", "list.1": 3}


def test_any_box_is_read_across_chunks():
    ckpt = open_checkpoint(GOLDEN)
    for name in ("model.w", "model.v", "model.t"):
        stored, wanted = ckpt[name], WANTED[name]
        n, m = wanted.shape
        for a in range(n):
            for b in range(m):
                index = (slice(a, n - a // 2), slice(b, b + 2))
                assert np.array_equal(stored[index], wanted[index])
    assert ckpt["model.w"].tensor.planned(ckpt["model.w"].tensor.chunks[0].box) == 4 * 5 * 4


def test_it_loads_onto_a_mesh_and_takes_other_forms(kit, tmp_path):
    host = kit.Host({"x": 3}, processes=3)
    got = load(GOLDEN, shardings=lambda path, shape, dtype: kit.Sharding(host, (0,)) if len(shape) == 2 else None)
    assert kit.same(got["model.w"].whole(), WANTED["model.w"])
    merge(GOLDEN, tmp_path / "hf", prefix="model")
    for name, a in load(tmp_path / "hf").items():
        assert kit.same(a, WANTED[f"model.{name}"])
    reshard(GOLDEN, tmp_path / "tp", mesh={"m": 2}, shardings={"model.w": {"m": 1}})
    verify(tmp_path / "tp")
    assert diff(GOLDEN, tmp_path / "tp").same
    convert(GOLDEN, tmp_path / "z", format="zarr", rules="model.{r*} -> {r*}")
    assert load(tmp_path / "z")["step"] == 7


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_what_torch_writes_now(kit, tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    a = torch.randn(40, 30)
    dcp.save({"a": a, "t": a.T, "n": 3}, checkpoint_id=str(tmp_path / "c"))
    got = load(tmp_path / "c")
    assert kit.same(got["a"], a.numpy())
    assert kit.same(got["t"], np.ascontiguousarray(a.T.numpy()))
    assert got["n"] == 3


def test_a_dtype_without_a_form_hides_nothing_else(copy):
    meta = copy / ".metadata"
    meta.write_bytes(meta.read_bytes().replace(b"\x8c\x07float64", b"\x8c\x09complex32"))
    ckpt = open_checkpoint(copy)
    assert list(ckpt.skipped) == ["model.t"]
    assert "complex32" in ckpt.skipped["model.t"]
    assert set(ckpt) == WANTED.keys() - {"model.t"}


def test_a_missing_file_is_named(copy):
    (copy / "__0_0.distcp").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"__0_0\.distcp"):
        load(copy, keys=["model.w"])


class Harm:
    def __init__(self, what, *args):
        self.what, self.args = what, args

    def __reduce__(self):
        return self.what, self.args


@pytest.mark.parametrize(
    "value",
    [
        Harm(os.system, "touch harmed"),
        Harm(eval, "1"),
        Harm(getattr, "", "join"),
        {"a": Harm(__import__, "os")},
        Harm(np.ndarray, (1 << 40,)),
        Harm(zipfile.ZipFile, "x"),
    ],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("protocol", range(5))
def test_what_would_be_called_is_refused(value, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(value, protocol)
    with pytest.raises(errors.CorruptCheckpoint, match="refused"):
        read_values(data, "x")
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint):
        open_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == [".metadata"]


def laughs(first, then):
    """Tuples of twice the one before, seventy times: some hundred bytes that no walk, and no hash, comes to the end
    of."""
    return first + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(70)) + then


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02h\x05.",
        b"\x80\x02r\xff\xff\xff\xff.",  # a memo of four billion places
        b"\x80\x02(((((((.",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02K\x01a.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"cos\nsystem\n.",
        b"\x80\x02K\x01b.",
        b"\x80\x02X\xff\xff\xff\x7fabc",
        laughs(b"\x80\x02Nq\x000", b"hF."),
        laughs(b"\x80\x02Nq\x000", b"}hFNs."),
        laughs(b"\x80\x02]q\x000", b"}q\x80hF\x85q\x81Nsh\x80."),
        b"\x80\x02]q\x00(h\x00h\x00e.",
        b"\x80\x02" + b"]" * 9999 + b"a" * 9998 + b".",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_broken_descriptions_are_refused(data):
    with pytest.raises(errors.CorruptCheckpoint):
        read_values(data, "x")


def test_plain_values_are_read():
    value = {"a": [1, -2, 1 << 70, 2.5, None, True, "ü", b"x"], "t": (1, (2, 3), ()), "n": {"x": {}}}
    for protocol in (3, 4, 5):
        assert read_values(pickle.dumps(value, protocol), "x") == value


def _flips(data, rng, n):
    for _ in range(n):
        out = bytearray(data)
        for _ in range(int(rng.integers(1, 4))):
            out[int(rng.integers(len(out)))] = int(rng.integers(256))
        yield bytes(out)


@pytest.mark.parametrize("scale", [60, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_any_damage_is_an_error_or_read_as_it_stands(copy, scale):
    """Never a crash, nor a read outside; what is changed among the elements cannot be seen, as the format has no
    checksums."""
    rng = np.random.default_rng(0)
    for file in (".metadata", "__1_0.distcp"):
        data = (copy / file).read_bytes()
        for changed in _flips(data, rng, scale):
            (copy / file).write_bytes(changed)
            try:
                for a in open_checkpoint(copy).values():
                    if a.nbytes < 1 << 20:
                        a.read()
            except errors.CheckpointError:
                pass
        (copy / file).write_bytes(data)


@pytest.mark.parametrize(("local", "central", "value"), [(6, 8, 1), (8, 10, 8), (8, 10, 12), (8, 10, 99)])
def test_archives_that_are_encrypted_or_packed_are_refused(copy, local, central, value):
    """In both headers of every entry of a file: the bit that says encrypted, then the method."""
    data = bytearray((copy / "__1_0.distcp").read_bytes())
    for signature, at in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        start = data.find(signature)
        while start >= 0:
            data[start + at] = value
            start = data.find(signature, start + 4)
    (copy / "__1_0.distcp").write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint):
        load(copy)


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a\\b", ""])
def test_files_elsewhere_are_refused(copy, file):
    data = (copy / ".metadata").read_bytes()
    old = b"\x8c\x0c__0_0.distcp"
    assert old in data
    text = file.encode()
    (copy / ".metadata").write_bytes(data.replace(old, b"\x8c" + bytes([len(text)]) + text))
    with pytest.raises(errors.CorruptCheckpoint, match=r"refused|not a file name"):
        open_checkpoint(copy)
