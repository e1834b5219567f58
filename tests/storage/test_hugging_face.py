"""Directories of Hugging Face as users have them: files missing, tied heads, adapters, other names, other formats,
terabytes."""

import json
import os
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import meshtape as mt
from meshtape import errors, storage
from meshtape.cli.main import main
from meshtape.storage import load, merge, open_checkpoint, save_safetensors
from meshtape.storage.stores import local

PT = {"format": "pt"}


def index(root, files, name="model.safetensors.index.json", **metadata):
    """Files with their arrays, and their index."""
    weight_map = {}
    for file, arrays in files.items():
        save_safetensors(root / file, arrays, metadata=PT)
        weight_map |= dict.fromkeys(arrays, file)
    (root / name).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


def test_a_shard_of_the_index_is_missing(tmp_path):
    """All that is missing is named, whatever part of the model is wanted, and nothing is written."""
    parts = {f"model-0000{i}-of-00004.safetensors": {f"layers.{i}.w": np.full(3, i)} for i in range(1, 5)}
    index(tmp_path, parts, total_size=96)
    for i in (2, 4):
        (tmp_path / f"model-0000{i}-of-00004.safetensors").unlink()
    wanted = r"2 files missing: model-00002-of-00004\.safetensors, model-00004-of.*layers\.2\.w.*layers\.4\.w"
    for act in (
        lambda: load(tmp_path, keys=["layers.1.w"]),
        lambda: open_checkpoint(tmp_path),
        lambda: merge(tmp_path, tmp_path / "out"),
        lambda: storage.estimate(tmp_path),
    ):
        with pytest.raises(errors.IncompleteCheckpoint, match=wanted):
            act()
    assert not (tmp_path / "out").exists()
    assert load(tmp_path / "model-00001-of-00004.safetensors")["layers.1.w"].tolist() == [1, 1, 1]


def test_an_index_that_lists_nothing(tmp_path):
    """It is an empty model where nothing is there, and has lost its entries beside a shard or a length."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 0}, "weight_map": {}}')
    assert load(tmp_path) == {}
    index.write_text('{"metadata": {"total_size": 4}, "weight_map": {}}')
    with pytest.raises(errors.IncompleteCheckpoint, match="lists no tensor"):
        open_checkpoint(tmp_path)
    index.write_text('{"weight_map": {}}')
    save_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": np.ones(1)})
    with pytest.raises(errors.IncompleteCheckpoint, match=r"lists no tensor.*00001"):
        open_checkpoint(tmp_path)


def test_keys_that_an_index_does_not_list_are_named(tmp_path):
    index(tmp_path, {"model.safetensors": {"a": np.ones(2), "b": np.ones(3)}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.warns(UserWarning, match="without what cannot be read.*b .model.safetensors holds it, and"):
        assert list(load(tmp_path)) == ["a"]
    assert merge(tmp_path, tmp_path / "out").skipped == ["b"]


def test_a_tied_head(kit, tmp_path):
    """Writers leave the second of two tied arrays out; a rule ties it again, on any mesh, and its inverse drops it."""
    embed = kit.random(np.dtype("f4"), (8, 4))
    index(tmp_path, {"model-00001-of-00001.safetensors": {"model.embed_tokens.weight": embed}}, total_size=128)
    tie = "model.embed_tokens.weight -> model.embed_tokens.weight\nmodel.embed_tokens.weight -> lm_head.weight"
    like = {
        name: kit.split(np.zeros((8, 4), "f4"), kit.Sharding(kit.Host({"m": 3}), (0,)))
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    }
    got = load(tmp_path, like=like, rules=tie)
    assert all(kit.same(got[n].whole(), embed) for n in like)
    merge(tmp_path, tmp_path / "both", rules=tie)
    assert sorted(open_checkpoint(tmp_path / "both")) == ["lm_head.weight", "model.embed_tokens.weight"]
    merge(tmp_path / "both", tmp_path / "tied", drop=["lm_head.weight"])
    assert storage.diff(tmp_path, tmp_path / "tied").same


def test_quantised_weights_keep_their_scales(kit, tmp_path):
    """Float8 numbers and their scales go along to the bit; a conversion that would part them is refused."""
    w = kit.random(np.dtype(ml_dtypes.float8_e4m3fn), (128, 64))
    arrays = {
        "q.weight": w,
        "q.weight_scale_inv": kit.random(np.dtype("f4"), (1, 1)),
        "norm.weight": kit.random(np.dtype(ml_dtypes.bfloat16), (64,)),
    }
    index(tmp_path, {"model.safetensors": arrays})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    storage.convert(tmp_path, tmp_path / "z", format="zarr", mesh={"m": 3}, shardings={"q.weight": {"m": 0}})
    merge(tmp_path / "z", tmp_path / "back")
    got = load(tmp_path / "back")
    assert all(kit.same(got[n], arrays[n]) for n in arrays)
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    with pytest.raises(
        errors.CheckpointDTypeError, match=r"'q\.weight' is float8_e4m3fn with its scale in .*_scale_inv"
    ):
        merge(tmp_path, tmp_path / "wrong", dtype="bfloat16")
    assert not (tmp_path / "wrong").exists()
    merge(tmp_path, tmp_path / "part", dtype="float32", drop=["q.*"])
    assert open_checkpoint(tmp_path / "part")["norm.weight"].dtype == np.float32


def test_files_beside_the_model_go_along_to_the_byte(tmp_path):
    index(tmp_path, {"model.safetensors": {"w": np.ones(2)}})
    beside = {
        "config.json": b'{"architectures":["X"],\r\n "rope_theta": 1e+06}',
        "generation_config.json": b"{}",
        "tokenizer.json": '{"ü": "日本"}'.encode(),
        "tokenizer_config.json": b"{ }\n\n",
        "special_tokens_map.json": b"[]",
        "vocab.txt": b"[PAD]\n[UNK]\n",
        "merges.txt": b"#version: 0.2\n",
        "tokenizer.model": bytes(range(256)),
        "chat_template.jinja": b"{{ messages }}",
    }
    for name, data in beside.items():
        (tmp_path / name).write_bytes(data)
    merge(tmp_path, tmp_path / "a")
    storage.reshard(tmp_path / "a", tmp_path / "b", mesh={"m": 2}, shardings={"w": {"m": 0}})
    merge(tmp_path / "b", tmp_path / "c")
    for place in "abc":
        assert {n: (tmp_path / place / n).read_bytes() for n in beside} == beside


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "diffusion_pytorch_model.safetensors",
        "consolidated.safetensors",
        "model.fp16.safetensors",
    ],
)
def test_one_model_by_another_name(name, tmp_path):
    lora = {"base_model.model.q.lora_A.weight": np.ones((2, 4), "f4")}
    save_safetensors(tmp_path / name, lora, metadata=PT)
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    ckpt = open_checkpoint(tmp_path)
    assert list(ckpt) == list(lora)
    assert ckpt.documents["adapter_config"] == {"r": 2}
    merge(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_an_index_by_another_name(tmp_path):
    stem = "diffusion_pytorch_model"
    parts = {f"{stem}-0000{i}-of-00002.safetensors": {f"w{i}": np.full(2, i)} for i in (1, 2)}
    index(tmp_path, parts, f"{stem}.safetensors.index.json")
    assert [load(tmp_path)[f"w{i}"].tolist() for i in (1, 2)] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("names", [("a", "b"), ("model-00002-of-00003",)])
def test_files_that_nothing_joins(names, tmp_path):
    for name in names:
        save_safetensors(tmp_path / f"{name}.safetensors", {"w": np.ones(2)})
    with pytest.raises(errors.IncompleteCheckpoint, match=r"no model\.safetensors\.index\.json.*or open one file: "):
        open_checkpoint(tmp_path)


def _zip(path):
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/data.pkl", b"cos\nsystem\n(S'touch /tmp/never'\ntR.")


FOREIGN = {
    "model.pt": (_zip, r"PyTorch with pickle.*save_file"),
    "pytorch_model-00001-of-00002.bin": (_zip, "PyTorch with pickle"),
    "old.pt": (lambda p: p.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), "PyTorch with pickle"),
    "m.Q4_K_M.gguf": (lambda p: p.write_bytes(b"GGUF" + bytes(60)), r"is GGUF.*gguf_file='m\.Q4_K_M\.gguf'"),
    "tf_model.h5": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(20)), "is HDF5"),
    "x.npz": (lambda p: np.savez(p, w=np.ones(2)), "open that file itself"),
    "model.safetensors": (
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"),
        "pointer of Git LFS.*git lfs pull",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_refused_with_what_to_do(name, tmp_path):
    """By name and first bytes: nothing of them is interpreted."""
    make, match = FOREIGN[name]
    make(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.NotACheckpoint, match=f"(?s){match}") as told:
        open_checkpoint(tmp_path)
    assert name in str(told.value)
    if make is _zip:
        with pytest.raises(errors.CorruptCheckpoint, match="refused"):
            open_checkpoint(tmp_path / name)
    elif name.endswith(".npz"):
        assert list(open_checkpoint(tmp_path / name)) == ["w"]
    else:
        with pytest.raises(errors.NotACheckpoint, match=f"(?s){match}") as told:
            open_checkpoint(tmp_path / name)
        assert name in str(told.value)
    assert not os.path.exists("/tmp/never")


def test_what_a_transfer_has_not_finished_is_no_model(tmp_path):
    save_safetensors(tmp_path / "x.safetensors", {f"k{i}": np.ones(30_000) for i in range(3)})

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "x.safetensors", tmp_path / "out", progress=stop, threads=1, memory_limit=1)
    with pytest.raises(errors.IncompleteCheckpoint, match="interrupted transfer"):
        open_checkpoint(tmp_path / "out.part")


@pytest.fixture(scope="module")
def terabytes(tmp_path_factory):
    """Two models of three terabytes each in files without blocks, and one of them cut for a mesh by its manifest
    alone."""
    home = tmp_path_factory.mktemp("terabytes")
    for name, dtype in (("a", "BF16"), ("b", "F16")):
        root = home / name
        root.mkdir()
        weight_map = {}
        for i in range(1, 4):
            file = f"model-0000{i}-of-00003.safetensors"
            entries = [(f"layers.{i}.{k}.weight", dtype, (1 << 20, 1 << 16)) for k in range(8)]
            head, place = storage.readers.safetensors.build_header(entries, PT)
            (root / file).write_bytes(head)
            try:
                os.truncate(root / file, len(head) + sum(t.nbytes for t in place.values()))
            except OSError as e:
                pytest.skip(f"this file system takes no file of a terabyte: {e}")
            weight_map |= {n: file for n, _, _ in entries}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return home


def test_terabytes_are_looked_at_without_being_read(terabytes, monkeypatch):
    read = 0
    original = local.preadv

    def counted(fd, buffers, offset):
        nonlocal read
        n = original(fd, buffers, offset)
        read += n
        return n

    monkeypatch.setattr(local, "preadv", counted)
    a, b = str(terabytes / "a"), str(terabytes / "b")

    def call(*args):
        done = CliRunner().invoke(main, [*args, "--json"])
        assert done.exit_code in (0, 1), done.output
        return json.loads(done.stdout)

    assert call("ls", a)["nbytes"] == 24 << 37
    assert call("tree", a)["arrays"] == 24
    estimate = storage.estimate(a, mesh={"m": 64}, shardings={"*": {"m": 0}})
    assert estimate.nbytes == 24 << 37
    report = call("diff", a, b, "--no-values")
    assert len(report["differing"]) == 24
    assert storage.diff(a, a, values=False).same
    assert storage.diff(a, b, values=False).arrays[0].different is None
    assert read < 8 << 20
    # A corner of it is a few bytes.
    read = 0
    corner = open_checkpoint(a)["layers.2.5.weight"][-1, -3:]
    assert corner.astype("f4").tolist() == [0, 0, 0]
    assert read < 2 << 20
    with pytest.raises(errors.StorageFull, match=r"needs 3298\d+ bytes"):
        merge(a, terabytes / "out")
    assert sorted(p.name for p in terabytes.iterdir()) == ["a", "b"]
    # A table of contents of a terabyte is none.
    for name in ("meshtape.json", "program.json", "model.safetensors.index.json"):
        root = terabytes / "tables"
        root.mkdir()
        (root / name).touch()
        os.truncate(root / name, 1 << 40)
        with pytest.raises(errors.CorruptCheckpoint, match="at most"):
            (mt.load_program if name == "program.json" else open_checkpoint)(root)
        (root / name).unlink()
        root.rmdir()
    assert mt.storage.estimate(b).nbytes == 24 << 37


def test_a_model_beside_zarr_without_its_manifest_is_told(tmp_path):
    """One of layout "dual" is both at once; a manifest decides."""
    for layout in (None, "dual"):
        at = tmp_path / str(layout)
        storage.save(at, {"w": np.ones((4, 2), "f4")}, layout=layout)
        if layout is None:
            storage.save_safetensors(at / "model.safetensors", {"x": np.ones(3)})
        assert list(storage.open_checkpoint(at)) == ["w"]
        (at / "meshtape.json").unlink()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert list(storage.open_checkpoint(at)) == (["w"] if layout else ["x"])
        assert ["holds two models: model.safetensors, which is opened" in str(w.message) for w in told] == (
            [] if layout else [True]
        )
