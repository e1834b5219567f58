"""`verify` compares the documents of exports too, and names whatever it did not compare."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from meshtape import errors
from meshtape.cli import main
from meshtape.storage import convert, load, merge, open_checkpoint, reshard, save, save_safetensors, verify
from meshtape.storage.stores import store as stores

GIVEN = {"config": {"hidden_size": 8}, "tokenizer.model": "tokens", "chat_template.jinja": "{{ m }}\n"}
TREE = {"w": np.arange(6.0, dtype="f4").reshape(2, 3), "b": np.ones(3, "f4")}
INDEX = "model.safetensors.index.json"

EXPORTS = {
    "merge": lambda src, out: merge(src, out),
    "merge in several files": lambda src, out: merge(src, out, max_shard_bytes=20),
    "convert": lambda src, out: convert(src, out, format="safetensors"),
    "reshard": lambda src, out: reshard(src, out, mesh={"m": 2}, shardings={"w": {"m": 0}}),
    "packed": lambda src, out: convert(src, out, format="zarr", pack=True),
}


@pytest.fixture
def source(tmp_path):
    save(tmp_path / "src", TREE, documents=GIVEN)
    return str(tmp_path / "src")


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_every_document_of_an_export_is_compared(request, tmp_path, source, export, place):
    if place == "memory":
        pytest.importorskip("obstore")
    out = str(tmp_path / "out") if place == "disk" else f"memory://{abs(hash(request.node.nodeid)):x}/out"
    export(source, out)
    assert verify(out).uncovered == []
    store = stores.at(out)
    for file in ("config.json", "tokenizer.model", "chat_template.jinja"):
        data = store.get(file)
        for changed in (data[:-1] + bytes([data[-1] ^ 1]), data + b" ", data[:-1], b""):
            store.put(file, changed)
            with pytest.raises(errors.CorruptCheckpoint, match=file):
                verify(out)
        store.delete([file])
        with pytest.raises((errors.CorruptCheckpoint, errors.IncompleteCheckpoint), match=f"{file} is missing"):
            verify(out)
        store.put(file, data)
    assert verify(out).uncovered == []
    store.put("README.md", b"mine")
    store.put("notes/today.txt", b"mine")
    report = verify(out)
    assert report.uncovered == ["README.md", "notes/"]


def test_an_edit_of_an_export_is_read_and_goes_along_and_is_told_by_verify(tmp_path, source):
    merge(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"hidden_size": 9}')
    assert open_checkpoint(tmp_path / "out").documents["config"] == {"hidden_size": 9}
    assert np.array_equal(np.asarray(load(tmp_path / "out")["w"]), TREE["w"])
    with pytest.raises(
        errors.CorruptCheckpoint, match=r"damaged or was edited; merge the directory anew to keep an edit"
    ):
        verify(tmp_path / "out")
    merge(tmp_path / "out", tmp_path / "again")
    assert verify(tmp_path / "again").uncovered == []
    assert open_checkpoint(tmp_path / "again").documents["config"] == {"hidden_size": 9}


def test_all_damage_is_told_at_once(tmp_path, source):
    merge(source, tmp_path / "out")
    for file in ("config.json", "model.safetensors"):
        data = bytearray((tmp_path / "out" / file).read_bytes())
        data[-2] ^= 1
        (tmp_path / "out" / file).write_bytes(data)
    with pytest.raises(errors.CorruptCheckpoint, match=r"(?s)2 damaged.*config\.json.*key 'w'"):
        verify(tmp_path / "out")


def _edit_index(out, change):
    index = json.loads((out / INDEX).read_bytes())
    change(index["metadata"]["meshtape.crc32c"])
    (out / INDEX).write_text(json.dumps(index))


def test_an_export_of_before_names_its_documents(tmp_path, source):
    """Its index has sums of files alone."""
    from meshtape.storage.format import tensor_sums

    merge(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    held = index["metadata"]["meshtape.crc32c"]
    for name in ("config.json", "tokenizer.model", "chat_template.jinja"):
        del held[name]
    held["index"] = tensor_sums.text([0])
    text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    (tmp_path / "out" / INDEX).write_bytes(tensor_sums.sealed(text, key=tensor_sums.INDEX))
    assert verify(tmp_path / "out").uncovered == ["chat_template.jinja", "config.json", "tokenizer.model"]


@pytest.mark.parametrize("name", ["../x.json", "/etc/hostname", "a\0b", "."])
@pytest.mark.parametrize("value", ["crc32c:00000000", "crc32c:00", 3, None, ["x"]])
def test_hostile_rows_of_an_index(tmp_path, source, name, value):
    from meshtape.storage.format import tensor_sums

    merge(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    held = index["metadata"]["meshtape.crc32c"]
    held[name], held["index"] = value, tensor_sums.text([0])
    text = json.dumps(index, indent=2).encode()
    (tmp_path / "out" / INDEX).write_bytes(tensor_sums.sealed(text, key=tensor_sums.INDEX))
    with pytest.raises(errors.CheckpointError):
        verify(tmp_path / "out")


def test_an_index_that_was_edited(tmp_path, source):
    merge(source, tmp_path / "out")
    _edit_index(tmp_path / "out", lambda held: held.pop("config.json"))
    with pytest.raises(errors.CorruptCheckpoint, match="does not fit the crc32c in it"):
        verify(tmp_path / "out")


def test_one_file_and_the_directory_around_it(tmp_path):
    save_safetensors(tmp_path / "model.safetensors", TREE)
    (tmp_path / "config.json").write_text("{}")
    assert verify(tmp_path / "model.safetensors").uncovered == []
    assert verify(tmp_path).uncovered == ["config.json"]
    np.savez(tmp_path / "x.npz", **TREE)
    assert verify(tmp_path / "x.npz").uncovered == []


def test_an_index_without_sums_over_files_that_have_some(tmp_path):
    save_safetensors(tmp_path / "a.safetensors", {"a": np.ones(3)})
    save_safetensors(tmp_path / "b.safetensors", {"b": np.ones(3)})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {n: f"{n}.safetensors" for n in "ab"}}))
    report = verify(tmp_path)
    assert (report.files, report.uncovered) == (2, [INDEX])


def test_without_any_checksum_nothing_is_called_sound(tmp_path):
    import zarr

    np.save(tmp_path / "x.npy", np.ones(3))
    zarr.create_array(tmp_path / "z", shape=(3,), dtype="f4")[...] = 1
    for where in ("x.npy", "z"):
        with pytest.raises(errors.CheckpointError, match="no checksums to verify"):
            verify(tmp_path / where)


def test_what_torch_distributed_keeps_beside_its_archives(tmp_path):
    shutil.copytree(Path(__file__).parent / "golden" / "torch-2.13-dcp", tmp_path / "dcp")
    report = verify(tmp_path / "dcp")
    assert ".metadata" in report.uncovered
    assert not any(name.endswith(".distcp") for name in report.uncovered)


def test_the_command_says_it(tmp_path, source):
    merge(source, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    done = CliRunner().invoke(main.main, ["verify", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "not compared, as nothing has their checksums (1): README.md" in " ".join(done.output.split())
    done = CliRunner().invoke(main.main, ["verify", str(tmp_path / "out"), "--json"])
    assert json.loads(done.output)["uncovered"] == ["README.md"]
