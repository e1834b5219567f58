"""`convert(format="dcp")`: checkpoints that PyTorch's distributed checkpointing reads, written without PyTorch."""

import importlib.util
import pickletools
import shutil
import subprocess
import sys
import zlib

import ml_dtypes
import numpy as np
import pytest

from meshtape import errors
from meshtape.storage import convert, diff, load, open_checkpoint, save, verify
from meshtape.storage.base.checksums import ZIP, combine
from meshtape.storage.foreign import torch_pickle
from meshtape.storage.foreign.torch_pickle import PickledName, read_values
from meshtape.storage.transform.sinks import sink_dcp

VALUES = {"lr": 0.1, "betas": [0.9, 0.99], "step": 3, "name": "é\n", "big": -(2**70), "inf": float("inf"), "none": None}


@pytest.fixture
def source(kit, tmp_path):
    """Every dtype and shape, in a tree with lists and values."""
    tree = {f"{d.name}{s}": kit.random(d, s, i) for i, d in enumerate(kit.DTYPES) for s in kit.SHAPES}
    blocks = kit.split(kit.random(np.dtype("f4"), (90, 50)), kit.Sharding(kit.Host({"x": 2, "y": 2}), (0, 1)))
    tree["blocks"] = blocks  # cut by columns too
    save(tmp_path / "z", {"model": {"layers": [tree, {"w": np.ones(2, "u4")}]}, "opt": VALUES}, step=4)
    return tmp_path / "z"


def test_every_dtype_shape_and_value_comes_back(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sink_dcp, "CHUNK", 9000)
    report = convert(source, tmp_path / "d", format="dcp", max_shard_bytes=1000)
    assert len(report.files) > 3
    assert report.notes == ["a PyTorch checkpoint has no place for the step"]
    assert diff(source, tmp_path / "d").same
    assert {n: load(tmp_path / "d")[f"opt.{n}"] for n in VALUES} == VALUES
    said = verify(tmp_path / "d")
    assert (said.files, said.uncovered) == (len(report.files) + 1, [])
    assert any(len(a.tensor.chunks) > 1 for a in open_checkpoint(tmp_path / "d").values())
    held = sum((tmp_path / "d" / file).stat().st_size for file in [*report.files, ".metadata"])
    assert held == report.nbytes
    convert(tmp_path / "d", tmp_path / "again", format="zarr")
    assert diff(source, tmp_path / "again").same
    convert(source, tmp_path / "d", format="dcp", overwrite=True)
    assert diff(source, tmp_path / "d").same


def test_the_metadata_is_a_pickle_with_the_names_of_pytorch(source, tmp_path):
    convert(source, tmp_path / "d", format="dcp")
    data = (tmp_path / "d" / ".metadata").read_bytes()
    pickletools.dis(data, out=open("/dev/null", "w"))  # noqa: SIM115
    top = read_values(data, "x")
    assert top.name == "torch.distributed.checkpoint.metadata.Metadata"
    assert top.field("planner_data")["model.layers.1.w"] == ("model", "layers", 1, "w")
    assert top.field("planner_data")["opt.betas"] == ("opt", "betas")
    for info in top.field("storage_data").values():
        assert info.field("offset") % 64 == 0


@pytest.mark.parametrize(
    "value", [2**31, -(2**31), -(2**31) - 1, 255, 256, True, (), [], {}, "a" * 300, 1e300], ids=str
)
def test_plain_values_come_back_from_their_pickle(value):
    many = {
        "x": value,
        **{f"k{i}": [value, f"t{i % 300}", f"k{i}"] for i in range(400)},
    }  # more than a short memo holds
    assert read_values(torch_pickle.dumps(many), "x") == many


def test_what_has_no_form_is_refused(tmp_path):
    with pytest.raises(errors.CheckpointDTypeError, match="integer"):
        torch_pickle.dumps(1 << 3000)
    with pytest.raises(errors.CheckpointDTypeError, match="object"):
        torch_pickle.dumps(object())
    np.savez(tmp_path / "x.npz", a=np.ones(3, ml_dtypes.bfloat16).view("V2"))
    save(tmp_path / "z", {"a": [None, {"b": np.ones(2)}], "a.0": 5})
    with pytest.raises(errors.CheckpointKeyError, match=r"a\.0"):
        convert(tmp_path / "z", tmp_path / "d", format="dcp")
    assert not (tmp_path / "d").exists()
    for options in ({"mesh": {"m": 2}}, {"pack": True}, {"compression": "zstd"}, {"max_shard_bytes": 0}):
        with pytest.raises(errors.CheckpointError):
            convert(tmp_path / "z", tmp_path / "d", format="dcp", drop=["a.0"], **options)


def test_every_flip_is_found(tmp_path):
    """One bit of a byte of a small checkpoint, in turn: elements, archives, values and metadata."""
    save(tmp_path / "z", {"w": np.arange(12, dtype="f4").reshape(3, 4), "n": 3})
    convert(tmp_path / "z", tmp_path / "d", format="dcp")
    rng = np.random.default_rng(0)
    for file, step in (("__0_0.distcp", 7), (".metadata", 3)):
        path = tmp_path / "d" / file
        data = path.read_bytes()
        for at in range(0, len(data), step):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.integers(8)
            path.write_bytes(changed)
            with pytest.raises((errors.CorruptCheckpoint, errors.IncompleteCheckpoint, errors.CheckpointError)):
                verify(tmp_path / "d")
        path.write_bytes(data)
    verify(tmp_path / "d")


def test_a_file_of_another_save_does_not_fit(tmp_path):
    for k in (1, 2):
        save(tmp_path / f"s{k}", {"w": np.full((40, 7), k, np.float32)})
        convert(tmp_path / f"s{k}", tmp_path / f"d{k}", format="dcp")
    (part,) = (tmp_path / "d2").glob("*.distcp")
    shutil.copy(part, tmp_path / "d1")
    for ask in (load, verify):
        with pytest.raises(errors.CorruptCheckpoint, match="does not fit"):
            ask(tmp_path / "d1")


def test_crc32_of_parts():
    a, b = b"mesh" * 5, b"tape" * 7
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b), ZIP) == zlib.crc32(a + b)


def test_names_of_classes_take_no_part_in_the_memo_of_texts():
    held = {"torch.Size": PickledName("torch.Size"), "x": "torch.Size"}
    got = read_values(torch_pickle.dumps(held), "x")
    assert (got["torch.Size"].name, got["x"]) == ("torch.Size", "torch.Size")


_RANKS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard, Replicate

def rank(n, path, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=n, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        w = distribute_tensor(torch.zeros(301, 40), mesh, placements)
        state = {"model": {"w": w, "b": torch.zeros(7, dtype=torch.bfloat16)}, "step": 0}
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(w.full_tensor(), torch.arange(301 * 40.0).reshape(301, 40)), placements
        assert state["step"] == 7 and torch.equal(state["model"]["b"], torch.arange(7).bfloat16())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, tuple(sys.argv[1:]), nprocs=2)
    print("loaded")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_pytorch_loads_it(source, kit, tmp_path, monkeypatch):
    """Into plain tensors of every dtype, nested as they were; into tensors split over two ranks; and as a file of
    `torch.save`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    monkeypatch.setattr(sink_dcp, "CHUNK", 8000)
    convert(source, tmp_path / "d", format="dcp")
    wanted = load(source)
    for read in ("load", "file"):
        if read == "load":
            empty = {
                n: torch.empty(a.shape, dtype=getattr(torch, a.dtype.name))
                for n, a in wanted["model"]["layers"][0].items()
            }
            got = {
                "model": {"layers": [empty, {"w": torch.empty(2, dtype=torch.uint32)}]},
                "opt": dict.fromkeys(VALUES, 0),
            }
            got["opt"]["betas"] = [0.0, 0.0]
            dcp.load(got, checkpoint_id=str(tmp_path / "d"), no_dist=True)
        else:
            dcp_to_torch_save(str(tmp_path / "d"), str(tmp_path / "x.pt"))
            got = torch.load(tmp_path / "x.pt")
        assert got["opt"] == VALUES
        for n, a in wanted["model"]["layers"][0].items():
            tensor = got["model"]["layers"][0][n]
            held = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else np.empty(0, "u1")
            assert (tuple(tensor.shape), held.tobytes()) == (a.shape, np.asarray(a).tobytes()), n
    tree = {
        "model": {"w": np.arange(301 * 40, dtype="f4").reshape(301, 40), "b": np.arange(7).astype(ml_dtypes.bfloat16)}
    }
    save(tmp_path / "ranks", tree | {"step": 7})
    convert(tmp_path / "ranks", tmp_path / "ranked", format="dcp")
    (tmp_path / "ranks.py").write_text(_RANKS)
    command = [sys.executable, str(tmp_path / "ranks.py"), str(tmp_path / "ranked"), str(tmp_path / "store")]
    assert "loaded" in subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
