"""Configurations and the like lie beside the arrays, verbatim, and go along; a merged directory is enough for
inference."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import meshtape as mt
from meshtape import errors
from meshtape.arrays.core.tree import flatten_with_path, tree_map
from meshtape.storage import CheckpointManager, convert, load, merge, open_checkpoint, reshard, save, verify

CONFIG = {"architectures": ["TinyLM"], "layers": 2, "rope": {"theta": 1e6}, "name": "Übung"}
TEMPLATE = "{% for m in messages %}\n"


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    if request.param == "disk":
        return str(tmp_path)
    pytest.importorskip("obstore")
    return f"memory://{abs(hash(request.node.nodeid)):x}"


def test_documents_are_kept_verbatim_and_checked(place, tmp_path):
    given = {
        "config": CONFIG,
        "generation_config": {"top_p": 0.9},
        "chat_template.jinja": TEMPLATE,
        "raw.json": b'{"a":1}',
    }
    save(f"{place}/c", {"w": np.ones(3)}, documents=given)
    ckpt = open_checkpoint(f"{place}/c")
    assert list(ckpt.documents) == ["config.json", "generation_config.json", "chat_template.jinja", "raw.json"]
    assert ckpt.documents["config"] == ckpt.documents["config.json"] == CONFIG
    assert ckpt.documents["chat_template.jinja"] == TEMPLATE
    assert ckpt.documents.raw("raw") == b'{"a":1}'
    with pytest.raises(errors.CheckpointKeyError, match=r"it has config\.json"):
        ckpt.documents["nothing"]
    # What is replaced takes its documents with it.
    save(f"{place}/c", {"w": np.ones(3)}, documents={"config": {"layers": 3}}, overwrite=True)
    again = open_checkpoint(f"{place}/c")
    assert dict(again.documents) == {"config.json": {"layers": 3}}
    assert verify(f"{place}/c").files == 2
    save(f"{place}/c", {"w": np.ones(3)}, overwrite=True)
    assert dict(open_checkpoint(f"{place}/c").documents) == {}


def test_they_go_along_through_every_change_of_form(place):
    save(f"{place}/c", {"w": np.ones((4, 4), "f4")}, documents={"config": CONFIG, "tokenizer.model": "tokens"})
    reshard(f"{place}/c", f"{place}/tp", mesh={"m": 2}, shardings={"w": {"m": 0}})
    merge(f"{place}/tp", f"{place}/hf")
    merge(f"{place}/hf", f"{place}/hf2")
    convert(f"{place}/hf2", f"{place}/back", format="zarr")
    wanted = open_checkpoint(f"{place}/c").documents.every()
    for name in ("tp", "hf", "hf2", "back"):
        assert open_checkpoint(f"{place}/{name}").documents.every() == wanted, name
    # Merged over an older one, the directory has the new documents.
    save(f"{place}/d", {"w": np.ones((4, 4), "f4")}, documents={"config": {"layers": 9}})
    merge(f"{place}/d", f"{place}/hf", overwrite=True)
    assert open_checkpoint(f"{place}/hf").documents["config"] == {"layers": 9}


def test_damage_is_found(tmp_path):
    save(tmp_path / "c", {"w": np.ones(3)}, documents={"config": CONFIG})
    file = tmp_path / "c" / "config.json"
    assert json.loads(file.read_text()) == CONFIG
    file.write_text(file.read_text().replace("TinyLM", "TinyML"))
    with pytest.raises(errors.CorruptCheckpoint, match=r"config\.json"):
        open_checkpoint(tmp_path / "c").documents["config"]
    with pytest.raises(errors.CorruptCheckpoint, match="1 damaged"):
        verify(tmp_path / "c")
    file.unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"config\.json is missing"):
        verify(tmp_path / "c")
    assert np.asarray(load(tmp_path / "c")["w"]).tolist() == [1, 1, 1]  # losing it loses no weights


@pytest.mark.parametrize(
    "name", ["../x.json", "a/b.json", "meshtape.json", "zarr.json", ".hidden.json", "model.safetensors.index.json"]
)
def test_names_that_are_refused(tmp_path, name):
    with pytest.raises(errors.CheckpointKeyError, match="cannot be named"):
        save(tmp_path / "c", {"w": np.ones(1)}, documents={name: "x"})
    assert not (tmp_path / "c").exists()


def test_a_document_and_an_array_share_no_name(tmp_path):
    for tree in ({"config.json": np.ones(2)}, {"CONFIG": {"json": np.ones(2)}}):
        for given in ({}, {"layout": "dual"}, {"pack": 1 << 20}):
            with pytest.raises(
                errors.CheckpointKeyError, match=r"named 'config.json': the folder of the array .*choose"
            ):
                save(tmp_path / "c", tree, documents={"config": {}}, **given)
    (tmp_path / "hf").mkdir()
    mt.storage.save_safetensors(tmp_path / "hf" / "model.safetensors", {"config.json": np.ones(2)})
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(errors.CheckpointKeyError, match=r"named 'config.json': the folder of the array"):
        convert(tmp_path / "hf", tmp_path / "c", format="zarr")
    assert not (tmp_path / "c").exists()
    convert(tmp_path / "hf", tmp_path / "c", format="zarr", rules="config.json -> w")


def test_what_is_no_document(tmp_path):
    for value in (object(), {"x": float("nan")}, {1: {2, 3}}):
        with pytest.raises(errors.CheckpointError, match="no JSON"):
            save(tmp_path / "c", {"w": np.ones(1)}, documents={"config": value})
    with pytest.raises(errors.CheckpointKeyError, match="two documents"):
        save(tmp_path / "c", {"w": np.ones(1)}, documents={"config": 1, "config.json": 2})


def test_the_manager_keeps_them(tmp_path):
    manager = CheckpointManager(tmp_path, asynchronous=True)
    manager.save(1, {"w": np.ones(2)}, documents={"config": CONFIG})
    manager.wait()
    assert open_checkpoint(manager.latest()).documents["config"] == CONFIG


_INFER = """
import json, sys, numpy as np
import meshtape as mt
from meshtape.storage import load, open_checkpoint
where = sys.argv[1]
config = open_checkpoint(where).documents["config"]
p = load(where)
x = mt.asarray(np.linspace(-1, 1, config["inputs"], dtype=np.float32))
for i in range(config["layers"]):
    x = mt.nn.gelu(x @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"])
print(json.dumps(np.asarray(x).tolist()))
"""


def test_full_state_and_inference_in_a_fresh_process_from_the_merged_directory_alone(tmp_path):
    """Parameters, optimizer with master weights, average, random state, progress, step and documents come back as they
    were; what is merged from them runs a model where nothing else is."""
    rng = np.random.default_rng(0)
    params = {
        "layers": [
            {"w": mt.asarray(rng.standard_normal((6, 6)).astype("f4")), "b": mt.zeros(6, dtype=mt.float32)}
            for _ in range(2)
        ]
    }
    low = tree_map(lambda x: mt.astype(x, mt.bfloat16), params)
    optimizer = mt.optim.adamw(1e-3)
    state = {
        "params": params,
        "optimizer": optimizer.init(low),
        "ema": params,
        "rng": mt.random.key(7),
        "progress": {"epoch": 3, "samples": [[0, 640], [1280, 1300]]},
        "schedule": {"warmup": 100, "peak": 3e-4},
    }
    documents = {"config": {"layers": 2, "inputs": 6, **CONFIG, "layers ": 2}, "generation_config": {"top_k": 5}}
    save(tmp_path / "c", state, step=1300, metadata={"loss": float("nan")}, documents=documents)
    ckpt = open_checkpoint(tmp_path / "c")
    assert ckpt.step == 1300
    got = load(tmp_path / "c", like=state)
    for (path, a), (other, b) in zip(flatten_with_path(state), flatten_with_path(got), strict=True):
        assert path == other
        if hasattr(a, "shape"):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
        else:
            assert a == b
    merge(tmp_path / "c", tmp_path / "model", prefix="params")
    assert sorted(e.name for e in (tmp_path / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    out = subprocess.run(
        [sys.executable, "-c", _INFER, str(tmp_path / "elsewhere")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd="/",
    )
    assert out.returncode == 0, out.stderr
    x = mt.asarray(np.linspace(-1, 1, 6, dtype=np.float32))
    for layer in params["layers"]:
        x = mt.nn.gelu(x @ layer["w"] + layer["b"])
    assert json.loads(out.stdout) == np.asarray(x).tolist()


def test_documents_are_given_to_an_export(tmp_path):
    """By name, or those of a model's directory: before those of the source; its config names the dtype that is
    written."""
    save(tmp_path / "c", {"w": np.ones((2, 3), np.float32)}, documents={"config": {"a": 1}, "notes.txt": "mine"})
    os.makedirs(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"dtype": "bfloat16", "b": 2}')
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text("{}")
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"weights")
    merge(tmp_path / "c", tmp_path / "out", documents=tmp_path / "hf")
    got = open_checkpoint(tmp_path / "out").documents
    assert set(got) == {"config.json", "tokenizer.json", "notes.txt"}
    assert got["config"] == {"dtype": "float32", "b": 2}  # that of the weights: transformers would cast to the other
    merge(tmp_path / "c", tmp_path / "half", documents={"config": {"dtype": "float32"}}, dtype="float16")
    assert open_checkpoint(tmp_path / "half").documents["config"] == {"dtype": "float16"}
    convert(tmp_path / "hf" / ".." / "c", tmp_path / "z", format="zarr", documents=tmp_path / "half")
    assert open_checkpoint(tmp_path / "z").documents["config"] == {"dtype": "float32"}
    verify(tmp_path / "out")
    os.makedirs(tmp_path / "empty")
    with pytest.raises(errors.CheckpointError, match=r"no config\.json"):
        merge(tmp_path / "c", tmp_path / "no", documents=tmp_path / "empty")
    with pytest.raises(errors.CheckpointKeyError, match="no place"):
        convert(tmp_path / "c", tmp_path / "no", format="dcp", documents=tmp_path / "hf")
    assert not (tmp_path / "no").exists()
